//! `nvme-discover://HOST:PORT/NQN`: a namespace of an NVMe subsystem at all ports that discovery services name.
//!
//! The services are asked when the device is opened, which then is a [`multipath`] device over NVMe/TCP, also over a
//! single port. They are asked again at intervals: ports that they name later, or again after their path was given up,
//! are given to spare paths, which the device has from the start.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use blkyard_attach::{AttachError, TcpPeer, TcpSparePath, WalkedServices, walk_discovery_services};
use blkyard_mpath::PATHS_MAX;
use blkyard_nvme::fabrics::{DISCOVERY_NQN, Nqn};
use blkyard_nvme::{DISCOVERY_PORT, DiscoveryEntry, DiscoveryKind, FabricsHostConfig};
use blkyard_os::SystemClock;
use blkyard_sys::TimeSource;

use super::nvme_tcp::{parse_address, take_host};
use super::{DeviceKind, MakeConnector, adopt_by_name, multipath};
use crate::device::{Device, DeviceError, ReceivedDevice};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &[SCHEME], usage: "nvme-discover://HOST:PORT/NQN", open, adopt: Some(adopt), open_all: None };

pub(super) const SCHEME: &str = "nvme-discover";

/// Paths for ports that are named later, at most.
const SPARES_MAX: usize = 4;
/// Default interval at which the services are asked again, s.
const REDISCOVER_S: u64 = 30;
/// Subsystems that an error lists, at most.
const NAMES_MAX: usize = 16;

fn open(mut spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let (service, subsystem) = parse_address(&spec, DISCOVERY_PORT)?;
    let interval_s = spec.take_number("rediscover_s", 0, 86_400)?.unwrap_or(REDISCOVER_S);
    // The option remains for the paths.
    let (host, host_id) = take_host(&mut spec.clone())?;
    let discovery = Nqn::new(DISCOVERY_NQN).expect("the NQN of discovery services is valid");
    let config = FabricsHostConfig::new(host, host_id, discovery);
    let clock: Arc<dyn TimeSource> = Arc::new(SystemClock);
    let WalkedServices { subsystems, warnings } = walk_discovery_services(&spec.address(), &service, &config, &clock)?;
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let mut ports = ports_of(&subsystem, &subsystems);
    if ports.is_empty() {
        return Err(unnamed(&spec, &service, &subsystem, &subsystems).into());
    }
    if ports.len() > PATHS_MAX {
        tracing::warn!("{}: {} ports are named, and the first {PATHS_MAX} are used", spec.address(), ports.len());
        ports.truncate(PATHS_MAX);
    }
    let path = |port: &SocketAddr| Spec::parse(&format!("nvme-tcp://{port}/{subsystem}"));
    let paths = ports.iter().map(path).collect::<Result<_, _>>()?;
    let spares = if interval_s > 0 { SPARES_MAX.min(PATHS_MAX - ports.len()) } else { 0 };
    let name = spec.address();
    multipath::open_over(spec, paths, spares, |spares, peers, end| {
        let interval = Duration::from_secs(interval_s);
        let (known, spares) = (ports, spares.into());
        let watch = PortWatch { name, service, subsystem, config, clock, known, peers, spares, warnings };
        watch.start(interval, end)
    })
}

/// Asks the services again, and connects spare paths to ports that they name now.
#[derive(Debug)]
struct PortWatch {
    /// Name of the device, for messages.
    name: String,
    service: String,
    subsystem: Nqn,
    config: FabricsHostConfig,
    clock: Arc<dyn TimeSource>,
    /// Ports that have got a path.
    known: Vec<SocketAddr>,
    /// Associations of their paths, and then of those without a port.
    peers: Vec<Arc<TcpPeer>>,
    /// Those without a port.
    spares: VecDeque<TcpSparePath>,
    /// Warnings of the last time. The same ones are not logged again.
    warnings: Vec<String>,
}

impl PortWatch {
    /// Watches until the end of the device, or until no spare path is left.
    fn start(mut self, interval: Duration, end: Receiver<()>) -> Result<(), DeviceError> {
        if self.spares.is_empty() {
            return Ok(());
        }
        let name = self.name.clone();
        let run = move || {
            while end.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) && self.look() {}
        };
        let thread = std::thread::Builder::new().name("nvme-discover".into()).spawn(run);
        thread.map(drop).map_err(|source| AttachError::System { disk: name, source }.into())
    }

    /// Asks the services. False if a port has found no path.
    fn look(&mut self) -> bool {
        let walked = walk_discovery_services(&self.name, &self.service, &self.config, &self.clock);
        let WalkedServices { subsystems, warnings } = walked.unwrap_or_else(|error| WalkedServices {
            subsystems: Vec::new(),
            warnings: vec![format!("{error}; its ports stay in use, and it is asked again")],
        });
        warnings.iter().filter(|new| !self.warnings.contains(new)).for_each(|new| tracing::warn!("{new}"));
        self.warnings = warnings;
        ports_of(&self.subsystem, &subsystems).into_iter().all(|port| self.use_port(port))
    }

    fn use_port(&mut self, port: SocketAddr) -> bool {
        // A path that the target refused would be refused again.
        let is_over = |peer: &TcpPeer| peer.given_up().is_some_and(|why| !why.is_final());
        let is_in_use = |(known, peer): (&SocketAddr, &Arc<TcpPeer>)| *known == port && !is_over(peer);
        if self.known.iter().zip(&self.peers).any(is_in_use) {
            return true;
        }
        let Some(spare) = self.spares.pop_front() else {
            let cure = "open the device again to use it, as a takeover does";
            tracing::warn!("{}: a discovery service names port {port}, and no spare path is left; {cure}", self.name);
            return false;
        };
        tracing::info!("{}: a discovery service names port {port}, which is connected", self.name);
        self.known.push(port);
        spare.connect(&format!("nvme-tcp://{port}/{}", self.subsystem), &port.to_string());
        true
    }
}

/// Asks the services anew.
fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    adopt_by_name(spec, received, open)
}

/// Ports of a subsystem, each once, in the order in which they are named.
fn ports_of(subsystem: &Nqn, named: &[DiscoveryEntry]) -> Vec<SocketAddr> {
    let mut ports = Vec::new();
    for entry in named.iter().filter(|entry| entry.kind == DiscoveryKind::Subsystem && entry.subsystem == *subsystem) {
        let port = SocketAddr::new(entry.address, entry.port);
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    ports
}

/// No service has named the subsystem.
fn unnamed(spec: &Spec, service: &str, subsystem: &Nqn, named: &[DiscoveryEntry]) -> SpecError {
    let mut others: Vec<_> = named.iter().map(|entry| entry.subsystem.as_str()).collect();
    others.sort_unstable();
    others.dedup();
    let further = others.len().saturating_sub(NAMES_MAX);
    others.truncate(NAMES_MAX);
    let cause = format!("the discovery service at {service} names no {subsystem}");
    let mut names = if others.is_empty() { "nothing".to_owned() } else { others.join(", ") };
    if further > 0 {
        names = format!("{names} and {further} more");
    }
    // Services show a host only what it may use.
    let cure = format!("it names {names} to this host: correct the name, the target's list of hosts, or host_nqn=NQN");
    SpecError::new(&spec.name, cause, cure)
}

#[cfg(test)]
mod tests {
    use blkyard_nvme::fabrics::ANY_CONTROLLER;
    use blkyard_nvme::{FabricsHostError, SecureChannel};
    use blkyard_sys::EventFd;

    use super::*;

    fn entry(kind: DiscoveryKind, subsystem: &Nqn, port: u16) -> DiscoveryEntry {
        DiscoveryEntry {
            kind,
            subsystem: subsystem.clone(),
            address: [192, 0, 2, 1].into(),
            port,
            port_id: port,
            controller_id: ANY_CONTROLLER,
            admin_entries: 32,
            no_flow_control: true,
            secure_channel: SecureChannel::NotSpecified,
            has_tls: false,
        }
    }

    #[test]
    fn ports_are_those_of_the_subsystem_each_once() {
        let [wanted, other] = ["nqn.x:wanted", "nqn.x:other"].map(|name| Nqn::new(name).unwrap());
        let named = [
            entry(DiscoveryKind::Subsystem, &other, 1),
            entry(DiscoveryKind::Subsystem, &wanted, 3),
            entry(DiscoveryKind::Subsystem, &wanted, 2),
            DiscoveryEntry { port_id: 9, ..entry(DiscoveryKind::Subsystem, &wanted, 3) },
            entry(DiscoveryKind::Current, &wanted, 4),
        ];
        let ports: Vec<_> = ports_of(&wanted, &named).iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [3, 2]);
    }

    /// A watch of this port's path, with no spare path, and the association of that path.
    fn watch_of(known: SocketAddr) -> (PortWatch, Arc<TcpPeer>) {
        let [host, subsystem] = ["nqn.x:host", "nqn.x:disk"].map(|name| Nqn::new(name).unwrap());
        let discovery = Nqn::new(DISCOVERY_NQN).unwrap();
        let peer = Arc::new(TcpPeer::new(subsystem.clone(), Arc::new(EventFd::new().unwrap())));
        let watch = PortWatch {
            name: "nvme-discover:test".into(),
            service: "192.0.2.1:8009".into(),
            subsystem,
            config: FabricsHostConfig::new(host, [7; 16], discovery),
            clock: Arc::new(SystemClock),
            known: vec![known],
            peers: vec![Arc::clone(&peer)],
            spares: VecDeque::new(),
            warnings: vec![],
        };
        (watch, peer)
    }

    #[test]
    fn watch_ends_with_the_first_port_that_finds_no_spare_path() {
        let [known, new]: [SocketAddr; 2] = ["192.0.2.1:4420", "192.0.2.2:4420"].map(|port| port.parse().unwrap());
        let (mut watch, _) = watch_of(known);
        assert_eq!([known, new].map(|port| watch.use_port(port)), [true, false]);
        assert_eq!(watch.known, [known]);
    }

    #[test]
    fn port_whose_path_was_given_up_wants_a_spare_path() {
        use FabricsHostError::{NoCommandSet, Unreachable};
        let known = "192.0.2.1:4420".parse().unwrap();
        for (why, is_in_use) in [(Unreachable, false), (NoCommandSet, true)] {
            let (mut watch, peer) = watch_of(known);
            assert!(watch.use_port(known));
            peer.give_up(why);
            // No spare path is left.
            assert_eq!(watch.use_port(known), is_in_use, "{why:?}");
        }
    }

    #[test]
    fn an_unnamed_subsystem_is_told_with_those_that_are_named() {
        let [wanted, other] = ["nqn.x:wanted", "nqn.x:other"].map(|name| Nqn::new(name).unwrap());
        let spec = Spec::parse("nvme-discover://192.0.2.1/nqn.x:wanted").unwrap();
        let named = [1, 2].map(|port| entry(DiscoveryKind::Subsystem, &other, port));
        let error = unnamed(&spec, "192.0.2.1:8009", &wanted, &named);
        assert_eq!(error.cause, "the discovery service at 192.0.2.1:8009 names no nqn.x:wanted");
        let cure = "it names nqn.x:other to this host: correct the name, the target's list of hosts, or host_nqn=NQN";
        assert_eq!(error.cure, cure);
        let many = (10..50).map(|number| Nqn::new(&format!("nqn.x:{number}")).unwrap());
        let many: Vec<_> = many.map(|name| entry(DiscoveryKind::Subsystem, &name, 1)).collect();
        let cure = unnamed(&spec, "192.0.2.1:8009", &wanted, &many).cure;
        assert!(
            cure.starts_with("it names nqn.x:10, ") && cure.contains(", nqn.x:25 and 24 more to this host"),
            "{cure}"
        );
        assert!(unnamed(&spec, "192.0.2.1:8009", &wanted, &[]).cure.starts_with("it names nothing to this host"));
    }
}
