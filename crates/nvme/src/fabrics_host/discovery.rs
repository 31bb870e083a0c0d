//! A walk over discovery services: the subsystems that a service names, and those of the services it refers to.
//!
//! Referrals are followed breadth first, each address once, and at most [`DISCOVERY_SERVICES_MAX`] services in all:
//! services may refer to each other, and a hostile one to any number. The owner asks for the next service, reads its
//! log with a [`FabricsHost`](super::FabricsHost), and gives the entries back.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use crate::discovery::{DiscoveryEntry, DiscoveryKind};

/// Maximum services asked in one walk: far above any real fabric.
pub const DISCOVERY_SERVICES_MAX: usize = 32;

/// A discovery service to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiscoveryService {
    /// Its address.
    pub address: SocketAddr,
    /// Number of referrals that led to it.
    pub depth: u32,
}

/// See the head of the module.
#[derive(Clone, Debug)]
pub struct DiscoveryWalk {
    waiting: VecDeque<DiscoveryService>,
    known: Vec<SocketAddr>,
    subsystems: Vec<DiscoveryEntry>,
    dropped: usize,
}

impl DiscoveryWalk {
    /// A walk that begins at this service.
    pub fn new(address: SocketAddr) -> DiscoveryWalk {
        let first = DiscoveryService { address, depth: 0 };
        DiscoveryWalk { waiting: VecDeque::from([first]), known: vec![address], subsystems: vec![], dropped: 0 }
    }

    /// The next service to ask; `None` at the end of the walk.
    pub fn next_service(&mut self) -> Option<DiscoveryService> {
        self.waiting.pop_front()
    }

    /// Takes the log of a service. Addresses of subsystems and referrals that are unspecified are those of the service.
    pub fn add(&mut self, service: DiscoveryService, entries: Vec<DiscoveryEntry>) {
        for mut entry in entries {
            if entry.address.is_unspecified() {
                entry.address = service.address.ip();
            }
            match entry.kind {
                DiscoveryKind::Subsystem if !self.subsystems.contains(&entry) => self.subsystems.push(entry),
                DiscoveryKind::Referral => self.refer(entry.address, entry.port, service.depth + 1),
                DiscoveryKind::Subsystem | DiscoveryKind::Current => {}
            }
        }
    }

    fn refer(&mut self, address: IpAddr, port: u16, depth: u32) {
        let address = SocketAddr::new(address, port);
        if self.known.contains(&address) {
            return;
        }
        if self.known.len() == DISCOVERY_SERVICES_MAX {
            self.dropped += 1;
            return;
        }
        self.known.push(address);
        self.waiting.push_back(DiscoveryService { address, depth });
    }

    /// The subsystems found, in order.
    pub fn subsystems(&self) -> &[DiscoveryEntry] {
        &self.subsystems
    }

    /// Number of referrals that were not followed.
    pub fn dropped(&self) -> usize {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN, Nqn};

    fn entry(kind: DiscoveryKind, host: u8, port: u16) -> DiscoveryEntry {
        DiscoveryEntry {
            kind,
            subsystem: Nqn::new(DISCOVERY_NQN).unwrap(),
            address: IpAddr::from([192, 0, 2, host]),
            port,
            port_id: 1,
            controller_id: ANY_CONTROLLER,
            admin_entries: 32,
            no_flow_control: false,
            secure_channel: crate::discovery::SecureChannel::NotRequired,
            has_tls: false,
        }
    }

    #[test]
    fn referrals_are_followed_once_and_subsystems_kept() {
        let mut walk = DiscoveryWalk::new("192.0.2.1:8009".parse().unwrap());
        let first = walk.next_service().unwrap();
        let disk = entry(DiscoveryKind::Subsystem, 5, 4420);
        let refers = |host| entry(DiscoveryKind::Referral, host, 8009);
        walk.add(first, vec![refers(2), refers(1), refers(2), disk.clone()]);
        let second = walk.next_service().unwrap();
        assert_eq!((second.address.to_string().as_str(), second.depth), ("192.0.2.2:8009", 1));
        // A loop.
        walk.add(second, vec![refers(1), disk.clone(), entry(DiscoveryKind::Current, 2, 8009)]);
        assert_eq!((walk.next_service(), walk.subsystems(), walk.dropped()), (None, &[disk][..], 0));
    }

    #[test]
    fn a_walk_is_bounded() {
        let mut walk = DiscoveryWalk::new("192.0.2.1:8009".parse().unwrap());
        let mut asked = 0;
        let mut port = 10_000;
        while let Some(service) = walk.next_service() {
            asked += 1;
            let entries = (0..5).map(|_| {
                port += 1;
                entry(DiscoveryKind::Referral, 1, port)
            });
            walk.add(service, entries.collect());
        }
        assert_eq!((asked, walk.dropped()), (DISCOVERY_SERVICES_MAX, 32 * 5 - 31));
    }

    #[test]
    fn an_unspecified_address_is_that_of_the_service() {
        let mut walk = DiscoveryWalk::new("192.0.2.1:8009".parse().unwrap());
        let service = walk.next_service().unwrap();
        let mut disk = entry(DiscoveryKind::Subsystem, 9, 4420);
        disk.address = "0.0.0.0".parse().unwrap();
        walk.add(service, vec![disk]);
        assert_eq!(walk.subsystems()[0].address.to_string(), "192.0.2.1");
    }
}
