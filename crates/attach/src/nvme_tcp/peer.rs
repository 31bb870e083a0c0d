//! Associations that are paths to one device help each other: one that is lost asks the others to have its controller
//! reset (cross-controller reset), so that writes without an answer need not wait for its silence.
//!
//! All others are asked at the same time, since some may hang, too. Without success they are asked again at intervals,
//! until time has fenced the association: one of them may be connecting at present.
//!
//! On the control threads alone.

use std::sync::{Arc, OnceLock, PoisonError};

use blkyard_mem::Mailbox;
use blkyard_mq::FenceEvidence;
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{ControllerInstance, FabricsHostError};
use blkyard_sys::EventFd;

use crate::nvme_tcp::control::TcpControl;

/// Pause before the others are asked again, ns.
const AGAIN_NS: u64 = 1_000_000_000;

/// An association, for those that are other paths to the same device.
#[derive(Debug)]
pub struct TcpPeer {
    subsystem: Nqn,
    messages: Mailbox<PeerMessage>,
    /// Wakes the control thread.
    wake: Arc<EventFd>,
    given_up: OnceLock<FabricsHostError>,
}

/// A message for the control thread of an association.
#[derive(Debug)]
pub(super) enum PeerMessage {
    /// Have the controller reset this one, and answer.
    Reset(ControllerInstance, Arc<TcpPeer>),
    /// Whether this controller was reset.
    Answer(ControllerInstance, bool),
}

impl TcpPeer {
    /// Of an association with this subsystem, whose control thread is woken by `wake`.
    pub fn new(subsystem: Nqn, wake: Arc<EventFd>) -> TcpPeer {
        TcpPeer { subsystem, messages: Mailbox::default(), wake, given_up: OnceLock::new() }
    }

    /// Why the association was given up; unset unless it was.
    pub fn given_up(&self) -> Option<FabricsHostError> {
        self.given_up.get().copied()
    }

    /// Notes that the association was given up for this reason.
    pub fn give_up(&self, why: FabricsHostError) {
        let _ = self.given_up.set(why);
    }

    /// Whether both are of one subsystem, so that a controller of one can have one of the other reset.
    pub(super) fn is_of(&self, subsystem: &Nqn) -> bool {
        self.subsystem == *subsystem
    }

    fn post(&self, message: PeerMessage) {
        if self.messages.send(message).is_ok() {
            self.wake.signal();
        }
    }

    /// The association has ended.
    pub(super) fn close(&self) {
        self.messages.close();
    }
}

/// State of requests between peers.
#[derive(Debug, Default)]
pub(super) struct PeerRequests {
    /// Resets that peers wait for.
    asked: Vec<(ControllerInstance, Arc<TcpPeer>)>,
    /// When the peers are asked again to reset the controller of the lost association.
    again_ns: Option<u64>,
    /// When the association was lost, ns; and whether it was said that no peer could reset its controller.
    lost_ns: Option<u64>,
    is_told: bool,
}

impl TcpControl {
    /// Handles the messages of peers, and asks them again if that is due.
    pub(super) fn talk_to_peers(&mut self, now_ns: u64) {
        for message in self.shared.peer.messages.take() {
            match message {
                PeerMessage::Reset(instance, peer) => {
                    if self.admin.host.reset_other(instance, now_ns) {
                        self.peers.asked.push((instance, peer));
                    } else {
                        peer.post(PeerMessage::Answer(instance, false));
                    }
                }
                PeerMessage::Answer(instance, true) => self.admin.host.was_reset(instance),
                // Another one may, or the same one later.
                PeerMessage::Answer(_, false) => {}
            }
        }
        if self.peers.again_ns.is_some_and(|again_ns| now_ns >= again_ns) {
            self.ask_peers(now_ns);
            self.say_not_reset();
        }
    }

    /// The association is lost: its peers are asked to have its controller reset.
    pub(super) fn path_lost(&mut self, now_ns: u64) {
        (self.peers.lost_ns, self.peers.is_told) = (Some(now_ns), false);
        self.ask_peers(now_ns);
        if self.peers.again_ns.is_none() {
            self.say_not_reset();
        }
    }

    fn ask_peers(&mut self, now_ns: u64) {
        let Some(instance) = self.admin.host.wants_reset() else {
            self.peers.again_ns = None;
            return;
        };
        let peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        for peer in &*peers {
            peer.post(PeerMessage::Reset(instance, Arc::clone(&self.shared.peer)));
        }
        self.peers.again_ns = (!peers.is_empty()).then_some(now_ns.saturating_add(AGAIN_NS));
    }

    /// The reset of a peer's controller has ended.
    pub(super) fn peer_was_reset(&mut self, instance: ControllerInstance, is_reset: bool) {
        if let Some(place) = self.peers.asked.iter().position(|(asked, _)| *asked == instance) {
            self.peers.asked.swap_remove(place).1.post(PeerMessage::Answer(instance, is_reset));
        }
    }

    /// The lost association executes no command any more.
    pub(super) fn fenced(&mut self, association: u64, evidence: FenceEvidence, now_ns: u64) {
        self.peers.again_ns = None;
        self.shared.monitor.fence(association as u32, evidence);
        // An association that was not lost has ended in order.
        let Some(lost_ns) = self.peers.lost_ns.take().filter(|_| self.is_path()) else { return };
        let name = &self.config.name;
        let by = match evidence {
            FenceEvidence::AssociationEnded => "the target has ended the association",
            FenceEvidence::CrossControllerReset => "its controller was reset by another path",
            FenceEvidence::QuiesceElapsed => "keep-alive timeout and quiesce time have passed",
        };
        let after_ms = now_ns.saturating_sub(lost_ns) / 1_000_000;
        tracing::info!("{name}: {by}, {after_ms} ms after the loss: unanswered writes are sent again");
    }

    /// When peers are asked again, ns.
    pub(super) fn peers_due_ns(&self) -> Option<u64> {
        self.peers.again_ns
    }

    /// Says once for each loss how long writes wait.
    fn say_not_reset(&mut self) {
        if !self.is_path() || self.admin.host.is_fenced() || std::mem::replace(&mut self.peers.is_told, true) {
            return;
        }
        let (name, silence_s) = (&self.config.name, self.admin.host.silence_ns() as f64 / 1e9);
        tracing::warn!(
            "{name}: no other path can have its controller reset: unanswered writes wait up to {silence_s} s, the \
             keep-alive timeout and the quiesce time of the target"
        );
    }
}
