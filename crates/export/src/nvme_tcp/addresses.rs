//! Addresses of the ports of a subsystem, as its discovery log names them.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

/// Where the ports of one subsystem listen. Shared by them; each adds its own.
#[derive(Debug, Default)]
pub struct PortAddresses(Mutex<Vec<SocketAddr>>);

impl PortAddresses {
    /// Adds a port that listens to this address.
    pub fn add(&self, address: SocketAddr) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(address);
    }

    /// All ports for a host that has reached one of them at `local`, which is the first.
    pub(crate) fn seen_from(&self, local: SocketAddr) -> Vec<SocketAddr> {
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let mut seen = vec![local];
        for port in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // One that listens to all addresses of the machine has the one that the host knows.
            let ip = if port.ip().is_unspecified() { local.ip() } else { port.ip().to_canonical() };
            let address = SocketAddr::new(ip, port.port());
            if !seen.contains(&address) {
                seen.push(address);
            }
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_named_as_the_host_can_reach_them() {
        let ports = PortAddresses::default();
        for address in ["0.0.0.0:4420", "[::]:4421", "10.0.0.7:4420"] {
            ports.add(address.parse().unwrap());
        }
        let seen = |local: &str| ports.seen_from(local.parse().unwrap()).iter().map(ToString::to_string).collect();
        let seen: [Vec<String>; 2] = [seen("[::ffff:10.0.0.5]:4421"), seen("10.0.0.7:4420")];
        assert_eq!(seen[0], ["10.0.0.5:4421", "10.0.0.5:4420", "10.0.0.7:4420"]);
        assert_eq!(seen[1], ["10.0.0.7:4420", "10.0.0.7:4421"]);
        let alone = PortAddresses::default().seen_from("127.0.0.1:1".parse().unwrap());
        assert_eq!(alone.len(), 1);
    }
}
