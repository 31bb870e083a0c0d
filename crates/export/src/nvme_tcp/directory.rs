//! What the ports of a subsystem in this process know of each other: addresses for the discovery log, and mailboxes.
//!
//! A host may have a controller of one port reset by one of another port. Each port has its own session, maybe on
//! another thread, so the request is a message: a [`ResetTicket`], which is answered exactly once, however it ends.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blkyard_mem::Mailbox;
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{ControllerInstance, NvmeStatus};
use blkyard_sys::EventFd;

/// The ports of one subsystem. Shared by them; each adds its own.
#[derive(Debug, Default)]
pub struct PortDirectory {
    addresses: Mutex<Vec<SocketAddr>>,
    mailboxes: Mutex<Vec<Weak<PortMailbox>>>,
    holds: Mutex<Vec<(SubsystemHost, Weak<HostHold>)>>,
}

/// A host: its name and identifier.
pub(crate) type SubsystemHost = (Nqn, [u8; 16]);

/// Devices for which commands of a host wait: an association of it has ended, and they may still execute its commands.
/// Shared by the queues of the host at all ports.
#[derive(Debug, Default)]
pub(crate) struct HostHold {
    /// As bits, modulo 64.
    devices: AtomicU64,
    /// By controller of the association.
    parts: Mutex<Vec<(u16, u64)>>,
}

impl HostHold {
    #[inline]
    pub(crate) fn devices(&self) -> u64 {
        self.devices.load(Relaxed)
    }

    /// Sets the devices that have commands of a controller whose association has ended. Returns whether there are fewer
    /// now.
    pub(crate) fn set(&self, controller: u16, devices: u64) -> bool {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|(known, _)| *known != controller);
        if devices > 0 {
            parts.push((controller, devices));
        }
        let all = parts.iter().fold(0, |all, (_, devices)| all | devices);
        self.devices.swap(all, Relaxed) & !all != 0
    }
}

impl PortDirectory {
    /// Adds a port that listens to this address.
    pub fn add(&self, address: SocketAddr) {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).push(address);
    }

    /// All ports for a host that has reached one of them at `local`, which is the first.
    pub(crate) fn seen_from(&self, local: SocketAddr) -> Vec<SocketAddr> {
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let mut seen = vec![local];
        for port in &*self.addresses.lock().unwrap_or_else(PoisonError::into_inner) {
            // One that listens to all addresses of the machine has the one that the host knows.
            let ip = if port.ip().is_unspecified() { local.ip() } else { port.ip().to_canonical() };
            let address = SocketAddr::new(ip, port.port());
            if !seen.contains(&address) {
                seen.push(address);
            }
        }
        seen
    }

    /// Adds the mailbox of a port.
    pub(crate) fn add_mailbox(&self, mailbox: &Arc<PortMailbox>) {
        let mut mailboxes = self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner);
        mailboxes.retain(|known| known.strong_count() > 0);
        mailboxes.push(Arc::downgrade(mailbox));
    }

    /// What this host has to wait for.
    pub(crate) fn hold_of(&self, host: &SubsystemHost) -> Arc<HostHold> {
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounded by the associations.
        holds.retain(|(_, hold)| hold.strong_count() > 0);
        let known = holds.iter().filter(|(known, _)| known == host).find_map(|(_, hold)| hold.upgrade());
        known.unwrap_or_else(|| {
            let hold = Arc::default();
            holds.push((host.clone(), Arc::downgrade(&hold)));
            hold
        })
    }

    /// Has no host wait for a device: for simulations of a target without holds.
    pub fn release_all(&self) {
        let holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        holds.iter().filter_map(|(_, hold)| hold.upgrade()).for_each(|hold| hold.devices.store(0, Relaxed));
    }

    /// A host waits for fewer devices.
    pub(crate) fn tell_released(&self) {
        let mailboxes = self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner);
        mailboxes.iter().filter_map(Weak::upgrade).for_each(|mailbox| mailbox.send(PortMessage::Released));
    }

    /// Mailbox of the port that has this controller identifier.
    pub(crate) fn port_of(&self, controller: u16) -> Option<Arc<PortMailbox>> {
        let mailboxes = self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner);
        mailboxes.iter().filter_map(Weak::upgrade).find(|mailbox| mailbox.controllers.contains(&controller))
    }
}

/// Messages for the session of a port.
#[derive(Debug)]
pub(crate) struct PortMailbox {
    /// Its controller identifiers.
    controllers: Range<u16>,
    messages: Mailbox<PortMessage>,
    eventfd: EventFd,
}

/// A message for the session of a port.
#[derive(Debug)]
pub(crate) enum PortMessage {
    /// A host waits for fewer devices.
    Released,
    /// Reset a controller of this port.
    Reset(ResetTicket),
    /// The reset that this controller of the port has asked for has ended.
    Answer(u16, ControllerInstance, Result<(), NvmeStatus>),
}

impl PortMailbox {
    /// Of a port with these controller identifiers.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn new(controllers: Range<u16>) -> io::Result<PortMailbox> {
        Ok(PortMailbox { controllers, messages: Mailbox::default(), eventfd: EventFd::new()? })
    }

    /// Sends a message. A port that has ended drops it, which answers a ticket.
    pub(crate) fn send(&self, message: PortMessage) {
        if self.messages.send(message).is_ok() {
            self.eventfd.signal();
        }
    }

    /// Takes all messages.
    pub(crate) fn take(&self) -> Vec<PortMessage> {
        // Before the messages: a later one signals again.
        self.eventfd.take();
        self.messages.take()
    }

    /// The port has ended.
    pub(crate) fn close(&self) {
        self.messages.close();
    }
}

impl AsFd for PortMailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// A request of a host for the reset of a controller. Dropped without an answer, the reset has failed.
#[derive(Debug)]
pub(crate) struct ResetTicket {
    pub(crate) instance: ControllerInstance,
    /// The host, with its identifier.
    pub(crate) host: (Nqn, [u8; 16]),
    /// Where it was asked for: port and controller.
    asked: (Arc<PortMailbox>, u16),
    outcome: Result<(), NvmeStatus>,
}

impl ResetTicket {
    /// For a controller of a port.
    pub(crate) fn new(
        instance: ControllerInstance,
        host: (Nqn, [u8; 16]),
        asked: (Arc<PortMailbox>, u16),
    ) -> ResetTicket {
        ResetTicket { instance, host, asked, outcome: Err(NvmeStatus::INTERNAL) }
    }

    /// Answers it.
    pub(crate) fn answer(mut self, outcome: Result<(), NvmeStatus>) {
        self.outcome = outcome;
    }
}

impl Drop for ResetTicket {
    fn drop(&mut self) {
        let (port, controller) = &self.asked;
        port.send(PortMessage::Answer(*controller, self.instance, self.outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_named_as_the_host_can_reach_them() {
        let ports = PortDirectory::default();
        for address in ["0.0.0.0:4420", "[::]:4421", "10.0.0.7:4420"] {
            ports.add(address.parse().unwrap());
        }
        let seen = |local: &str| ports.seen_from(local.parse().unwrap()).iter().map(ToString::to_string).collect();
        let seen: [Vec<String>; 2] = [seen("[::ffff:10.0.0.5]:4421"), seen("10.0.0.7:4420")];
        assert_eq!(seen[0], ["10.0.0.5:4421", "10.0.0.5:4420", "10.0.0.7:4420"]);
        assert_eq!(seen[1], ["10.0.0.7:4420", "10.0.0.7:4421"]);
        let alone = PortDirectory::default().seen_from("127.0.0.1:1".parse().unwrap());
        assert_eq!(alone.len(), 1);
    }
}
