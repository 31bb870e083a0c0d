//! Asynchronous events of a controller: pending events, and the host's requests for them.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::logs::lid;
use crate::cross_reset::{CROSS_RESET_NOTICE, CROSS_RESET_NOTICES};
use crate::{ANA_LOG, CROSS_RESET_LOG};

/// Maximum Asynchronous Event Requests.
pub(crate) const REQUESTS_MAX: usize = 4;
/// Bits of the configuration (feature 0Bh) that may always be set: SMART warnings and namespace changes.
pub(crate) const CONFIGURABLE: u32 = 0xff | NAMESPACE_NOTICES;
/// Namespace attribute notices, in the configuration and in OAES.
const NAMESPACE_NOTICES: u32 = 1 << 8;
/// Asymmetric namespace access change notices, likewise, with ANA.
pub(crate) const ANA_NOTICES: u32 = 1 << 11;

/// An event that can be reported to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ControllerEvent {
    /// A doorbell of a queue that does not exist was written.
    InvalidDoorbellRegister,
    /// A doorbell was written with an invalid value.
    InvalidDoorbellValue,
    /// Namespaces were added, removed or changed.
    NamespacesChanged,
    /// A group of namespaces has another ANA state.
    AnaChanged,
    /// The reset of another controller is complete.
    CrossReset,
}

impl ControllerEvent {
    const ALL: [ControllerEvent; 5] = [
        ControllerEvent::InvalidDoorbellRegister,
        ControllerEvent::InvalidDoorbellValue,
        ControllerEvent::NamespacesChanged,
        ControllerEvent::AnaChanged,
        ControllerEvent::CrossReset,
    ];

    /// Type of the event (bits 0-2 of the result), its information (8-15), and the log page that clears it (16-23).
    const fn parts(self) -> (u8, u8, u8) {
        match self {
            ControllerEvent::InvalidDoorbellRegister => (0, 0, lid::ERROR),
            ControllerEvent::InvalidDoorbellValue => (0, 1, lid::ERROR),
            ControllerEvent::NamespacesChanged => (2, 0, lid::CHANGED_NAMESPACES),
            ControllerEvent::AnaChanged => (2, 3, ANA_LOG),
            ControllerEvent::CrossReset => (2, CROSS_RESET_NOTICE, CROSS_RESET_LOG),
        }
    }

    /// Dword 0 of the completion.
    pub(crate) const fn result(self) -> u32 {
        let (kind, info, page) = self.parts();
        kind as u32 | (info as u32) << 8 | (page as u32) << 16
    }
}

/// Events and requests.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PendingEvents {
    /// Pending events, each once.
    events: VecDeque<ControllerEvent>,
    /// The cids of requests, in order.
    requests: VecDeque<u16>,
    /// One bit for each event type that was reported and whose log page was not read since.
    masked: u8,
}

impl PendingEvents {
    /// Adds an event, unless it is already pending; notices only if they are enabled.
    pub(crate) fn push(&mut self, event: ControllerEvent, configuration: u32) {
        let is_wanted = match event {
            ControllerEvent::NamespacesChanged => configuration & NAMESPACE_NOTICES != 0,
            ControllerEvent::AnaChanged => configuration & ANA_NOTICES != 0,
            ControllerEvent::CrossReset => configuration & CROSS_RESET_NOTICES != 0,
            ControllerEvent::InvalidDoorbellRegister | ControllerEvent::InvalidDoorbellValue => true,
        };
        if is_wanted && !self.events.contains(&event) {
            self.events.push_back(event);
        }
    }

    /// Stores a request; there must be room for it.
    pub(crate) fn add_request(&mut self, cid: u16) {
        self.requests.push_back(cid);
    }

    /// Whether another request can be stored.
    pub(crate) fn has_room(&self) -> bool {
        self.requests.len() < REQUESTS_MAX
    }

    /// Whether a request has this cid.
    pub(crate) fn has_request(&self, cid: u16) -> bool {
        self.requests.contains(&cid)
    }

    /// The same without requests.
    pub(crate) fn without_requests(&self) -> PendingEvents {
        PendingEvents { requests: VecDeque::new(), ..self.clone() }
    }

    /// The cids of all requests.
    pub(crate) fn requests(&self) -> impl ExactSizeIterator<Item = u16> {
        self.requests.iter().copied()
    }

    /// Removes an aborted request.
    pub(crate) fn remove_request(&mut self, cid: u16) {
        self.requests.retain(|request| *request != cid);
    }

    /// The next event to report, and the request to complete with it.
    pub(crate) fn next(&self) -> Option<(u16, ControllerEvent)> {
        let is_open = |event: &&ControllerEvent| self.masked & 1 << event.parts().0 == 0;
        Some((*self.requests.front()?, *self.events.iter().find(is_open)?))
    }

    /// Removes the next event after it was reported.
    pub(crate) fn told(&mut self, event: ControllerEvent) {
        self.requests.pop_front();
        self.events.retain(|other| *other != event);
        self.masked |= 1 << event.parts().0;
    }

    /// Unmasks the event type of a log page that the host has read.
    pub(crate) fn was_read(&mut self, page: u8) {
        self.events.retain(|event| event.parts().2 != page);
        for event in ControllerEvent::ALL.into_iter().filter(|event| event.parts().2 == page) {
            self.masked &= !(1 << event.parts().0);
        }
    }
}
