//! Asynchronous events of a controller: those that happened, and the requests that wait for them.

use std::collections::VecDeque;

use super::logs::lid;

/// Most Asynchronous Event Requests at one time.
pub(crate) const REQUESTS_MAX: usize = 4;
/// Bits of the configuration (feature 0Bh) that may be set: SMART warnings, and changes of namespaces.
pub(crate) const CONFIGURABLE: u32 = 0xff | NAMESPACE_NOTICES;
/// Namespace attribute notices.
const NAMESPACE_NOTICES: u32 = 1 << 8;

/// An event that a host can be notified of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControllerEvent {
    /// A doorbell of a queue that does not exist was written.
    InvalidDoorbellRegister,
    /// A doorbell was written a value that its queue does not allow.
    InvalidDoorbellValue,
    /// Namespaces have come, gone or changed.
    NamespacesChanged,
}

impl ControllerEvent {
    const ALL: [ControllerEvent; 3] = [
        ControllerEvent::InvalidDoorbellRegister,
        ControllerEvent::InvalidDoorbellValue,
        ControllerEvent::NamespacesChanged,
    ];

    /// Type of the event (bits 0-2 of the result), its information (8-15), and the log page that clears it (16-23).
    const fn parts(self) -> (u8, u8, u8) {
        match self {
            ControllerEvent::InvalidDoorbellRegister => (0, 0, lid::ERROR),
            ControllerEvent::InvalidDoorbellValue => (0, 1, lid::ERROR),
            ControllerEvent::NamespacesChanged => (2, 0, lid::CHANGED_NAMESPACES),
        }
    }

    /// Dword 0 of the completion.
    pub(crate) const fn result(self) -> u32 {
        let (kind, info, page) = self.parts();
        kind as u32 | (info as u32) << 8 | (page as u32) << 16
    }
}

/// Events and requests.
#[derive(Debug, Default)]
pub(crate) struct PendingEvents {
    /// Each once.
    events: VecDeque<ControllerEvent>,
    /// The cids of requests, in order.
    requests: VecDeque<u16>,
    /// A bit for each type of event that was reported and whose log page was not read since.
    masked: u8,
}

impl PendingEvents {
    /// Adds an event. One that is not reported yet is kept once; notices only if they are configured.
    pub(crate) fn push(&mut self, event: ControllerEvent, configuration: u32) {
        let is_wanted = event != ControllerEvent::NamespacesChanged || configuration & NAMESPACE_NOTICES != 0;
        if is_wanted && !self.events.contains(&event) {
            self.events.push_back(event);
        }
    }

    /// Keeps a request, for which there is room.
    pub(crate) fn add_request(&mut self, cid: u16) {
        self.requests.push_back(cid);
    }

    /// Whether one more request can be kept.
    pub(crate) fn has_room(&self) -> bool {
        self.requests.len() < REQUESTS_MAX
    }

    /// Whether a request has this cid.
    pub(crate) fn has_request(&self, cid: u16) -> bool {
        self.requests.contains(&cid)
    }

    /// Removes a request that was aborted.
    pub(crate) fn remove_request(&mut self, cid: u16) {
        self.requests.retain(|request| *request != cid);
    }

    /// The next event to tell of, and the request to complete with it.
    pub(crate) fn next(&self) -> Option<(u16, ControllerEvent)> {
        let is_open = |event: &&ControllerEvent| self.masked & 1 << event.parts().0 == 0;
        Some((*self.requests.front()?, *self.events.iter().find(is_open)?))
    }

    /// The next event was reported to the host.
    pub(crate) fn told(&mut self, event: ControllerEvent) {
        self.requests.pop_front();
        self.events.retain(|other| *other != event);
        self.masked |= 1 << event.parts().0;
    }

    /// The host has read a log page: it knows all events of that page, and later ones are reported again.
    pub(crate) fn was_read(&mut self, page: u8) {
        self.events.retain(|event| event.parts().2 != page);
        for event in ControllerEvent::ALL.into_iter().filter(|event| event.parts().2 == page) {
            self.masked &= !(1 << event.parts().0);
        }
    }
}
