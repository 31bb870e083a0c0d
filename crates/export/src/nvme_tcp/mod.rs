//! NVMe over TCP: a subsystem for hosts on the network, with the discovery service on the same port.
//!
//! Each device is a namespace. Each connection is a queue: admin queues are handled by the export's control path, I/O
//! queues are client queues on their lanes. Formats are in `wire`, and what commands mean is in `nvme`; `core` does not
//! depend on this module. See `docs/adr/0054-an-nvme-tcp-target.md`.
//!
//! Left out: reservations, in-band changes of namespaces.

mod ana;
mod clock;
mod connection;
mod directory;
mod queue;
mod session;
mod socket;

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use blkyard_mq::DeviceInfo;
use blkyard_nvme::auth::HostSecrets;
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::tcp::TcpIoQueueOptions;
use blkyard_nvme::tls::TlsHosts;
use blkyard_nvme::{
    AnaGroup, ControllerOptions, DiscoveryEntry, FabricsOptions, FabricsSubsystem, NamespaceTable, ServedNamespace,
    SubsystemOptions,
};

use crate::NvmeDisk;
use crate::core::{self, ControlLoop, ExportedDisk};

pub use ana::NvmeTcpAna;
pub use clock::ControllerClock;
pub use directory::PortDirectory;
pub use queue::{NvmeTcpQueueSession, NvmeTcpQueueSetup};
pub use session::{NVME_TCP_STATE_VERSION, NvmeTcpError, NvmeTcpRecord, NvmeTcpSession, NvmeTcpState, NvmeTcpView};

/// Longest transfer of a command (MDTS), bytes.
const TRANSFER_BYTES: u32 = 128 << 10;
/// Maximum in-capsule data, bytes: short writes need no further round trip.
const IN_CAPSULE_BYTES: u32 = 8192;
/// Memory of a queue for commands with more data than that, bytes: enough for sequential I/O at depth 8.
const POOL_BYTES: u32 = 1 << 20;
/// Maximum entries of an I/O queue: the default of Linux.
const ENTRIES_MAX: u16 = 128;
/// Maximum entries of an admin queue: those of Linux.
const ADMIN_ENTRIES: u16 = 32;
/// Maximum associations.
const CONTROLLERS_MAX: u16 = 256;

/// Configuration of an NVMe/TCP export.
pub type NvmeTcpExport = core::ExportConfig<NvmeTcpSession>;
/// A serving NVMe/TCP export.
pub type NvmeTcpServer = core::Server<NvmeTcpSession>;
/// A hardware queue and the connections that feed it.
pub type NvmeTcpQueuePoller<D> = core::QueuePoller<D, NvmeTcpQueueSession>;
/// The control path's end of an I/O queue.
pub type NvmeTcpQueueRemote = core::QueueRemote<NvmeTcpQueueSession>;

/// A subsystem as hosts see it.
#[derive(Clone, Debug)]
pub struct NvmeTcpDisk {
    /// The namespaces, with identifiers made from the NQN: the same for all ports of a subsystem.
    pub(crate) namespaces: NvmeDisk,
    pub(crate) nqn: Nqn,
    pub(crate) serial: String,
    pub(crate) hosts: Option<Vec<Nqn>>,
    /// Hosts that are authenticated.
    pub(crate) auth: Option<HostSecrets>,
    /// Hosts whose connections are encrypted.
    pub(crate) tls: Option<Arc<TlsHosts>>,
    pub(crate) referrals: Vec<SocketAddr>,
    /// All ports of the subsystem.
    pub(crate) ports: Arc<PortDirectory>,
    /// ANA groups at this port; unset without ANA.
    pub(crate) ana: Option<Arc<NvmeTcpAna>>,
    /// The first of its controller identifiers.
    pub(crate) first_controller: u16,
    /// A random number, for cross-controller resets; unset without them.
    pub(crate) instance_seed: Option<u64>,
}

impl NvmeTcpDisk {
    /// Controller identifiers of a port: ports of one subsystem must have different ones.
    pub const CONTROLLER_IDS: u16 = FabricsSubsystem::CONTROLLER_IDS;
    /// Upper bound of the first controller identifier.
    pub const FIRST_CONTROLLER_MAX: u16 = 0xfff0 - FabricsSubsystem::CONTROLLER_IDS;

    /// A subsystem with these namespaces: identifier and device of each, by number of the device; for at most so many
    /// I/O queues of all hosts together.
    ///
    /// # Panics
    /// As for [`NvmeDisk::of_namespaces`].
    pub fn new(nqn: Nqn, namespaces: Vec<(u32, DeviceInfo)>, queues: u16, serial: impl Into<String>) -> NvmeTcpDisk {
        let namespaces = NvmeDisk::of_namespaces(namespaces, queues, "").with_name(nqn.as_str());
        NvmeTcpDisk {
            namespaces,
            nqn,
            serial: serial.into(),
            hosts: None,
            auth: None,
            tls: None,
            referrals: Vec::new(),
            ports: Arc::default(),
            ana: None,
            first_controller: 1,
            // The standard library draws its keys from the system.
            instance_seed: Some(RandomState::new().hash_one(())),
        }
    }

    /// The NQN of a subsystem that was given none: a UUID made from the name of the machine and the serial number.
    ///
    /// # Panics
    /// Never: it is a valid name.
    pub fn default_nqn(machine: &str, serial: &str) -> Nqn {
        let name = NvmeDisk::new(&DeviceInfo::default(), 1, serial).with_name(machine).subsystem();
        Nqn::new(&name).expect("the NQN of a UUID is valid")
    }

    /// The serial number of a subsystem that was given none but an NQN: the same for all of its ports.
    pub fn default_serial(nqn: &Nqn) -> String {
        let uuid = NvmeDisk::new(&DeviceInfo::default(), 1, "").with_name(nqn.as_str()).subsystem();
        // Its last 64 bits.
        let digits: Vec<_> = uuid.chars().rev().filter(|digit| *digit != '-').take(16).collect();
        digits.into_iter().rev().collect()
    }

    /// The same for these hosts only.
    #[must_use]
    pub fn with_hosts(self, hosts: Vec<Nqn>) -> NvmeTcpDisk {
        NvmeTcpDisk { hosts: Some(hosts), ..self }
    }

    /// The same, with hosts that are to be authenticated: each queue of theirs, but not with the discovery service.
    #[must_use]
    pub fn with_auth(self, auth: HostSecrets) -> NvmeTcpDisk {
        NvmeTcpDisk { auth: Some(auth), ..self }
    }

    /// The same, with hosts whose connections must be encrypted, with their keys: all but those to the discovery
    /// service, which they may encrypt as well.
    #[must_use]
    pub fn with_tls(self, tls: TlsHosts) -> NvmeTcpDisk {
        NvmeTcpDisk { tls: Some(Arc::new(tls)), ..self }
    }

    /// The same, with other discovery services in its discovery log.
    #[must_use]
    pub fn with_referrals(self, referrals: Vec<SocketAddr>) -> NvmeTcpDisk {
        NvmeTcpDisk { referrals, ..self }
    }

    /// The same, with the other ports of the subsystem: they are in its discovery log, and a controller of one port can
    /// have one of another port reset.
    #[must_use]
    pub fn with_ports(self, ports: Arc<PortDirectory>) -> NvmeTcpDisk {
        NvmeTcpDisk { ports, ..self }
    }

    /// The same with asymmetric access: the groups at this port.
    ///
    /// # Panics
    /// If there are more or fewer groups than namespaces.
    #[must_use]
    pub fn with_ana(self, ana: Arc<NvmeTcpAna>) -> NvmeTcpDisk {
        assert_eq!(ana.groups().len(), self.infos().len(), "a group for each namespace");
        NvmeTcpDisk { ana: Some(ana), ..self }
    }

    /// The same with other controller identifiers: [`NvmeTcpDisk::CONTROLLER_IDS`] from this one on.
    ///
    /// # Panics
    /// If it is zero or above [`NvmeTcpDisk::FIRST_CONTROLLER_MAX`].
    #[must_use]
    pub fn with_first_controller(self, first_controller: u16) -> NvmeTcpDisk {
        assert!((1..=NvmeTcpDisk::FIRST_CONTROLLER_MAX).contains(&first_controller), "{first_controller}");
        NvmeTcpDisk { first_controller, ..self }
    }

    /// The same with this in place of a random number, different for each port and process; unset without
    /// cross-controller resets. For simulations, which are to be repeatable.
    #[must_use]
    pub fn with_instance_seed(self, instance_seed: Option<u64>) -> NvmeTcpDisk {
        NvmeTcpDisk { instance_seed, ..self }
    }

    /// Whether it has hosts whose connections are encrypted.
    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// NQN of the subsystem.
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    pub(crate) fn table(&self) -> NamespaceTable {
        let mut table = self.namespaces.table();
        let Some(ana) = &self.ana else { return table };
        for namespace in table.iter().cloned().collect::<Vec<_>>() {
            let ana_group = ana.groups()[usize::from(namespace.device)];
            table.set(namespace.format.nsid, Some(ServedNamespace { ana_group, ..namespace }));
        }
        table.with_ana(Arc::clone(ana.states()))
    }

    /// State of each group with namespaces, and these.
    pub(crate) fn ana_view(&self) -> Vec<AnaGroup> {
        let Some(ana) = &self.ana else { return Vec::new() };
        let mut groups: Vec<AnaGroup> = Vec::new();
        for namespace in self.table().iter() {
            let (id, nsid) = (namespace.ana_group, namespace.format.nsid);
            match groups.iter_mut().find(|group| group.id == id) {
                Some(group) => group.namespaces.push(nsid),
                None => groups.push(AnaGroup { id, state: ana.state(id), namespaces: vec![nsid] }),
            }
        }
        groups.sort_by_key(|group| group.id);
        groups
    }
}

impl ExportedDisk for NvmeTcpDisk {
    fn infos(&self) -> Vec<&DeviceInfo> {
        self.namespaces.infos()
    }

    fn set_info(&mut self, device: u16, info: &Arc<DeviceInfo>) {
        self.namespaces.set_info(device, info);
    }

    fn queues(&self) -> u16 {
        self.namespaces.queues()
    }

    fn set_queues(&mut self, queues: u16) {
        self.namespaces.set_queues(queues);
    }

    fn write_cache(&self) -> bool {
        self.namespaces.write_cache()
    }

    fn set_write_cache(&mut self, write_back: bool) {
        self.namespaces.set_write_cache(write_back);
    }
}

impl NvmeTcpServer {
    /// Serves a subsystem on a listening socket, with a control loop shared with other exports.
    ///
    /// # Errors
    /// The system has no memory, thread or descriptor left.
    pub fn serve_on(control: &ControlLoop, listener: TcpListener, config: NvmeTcpExport) -> io::Result<NvmeTcpServer> {
        core::Server::start_session(control, config, |config, log| NvmeTcpSession::new(listener, config, log))
    }
}

/// Entries of a discovery log for a host that has reached this address.
fn discovery_entries(disk: &NvmeTcpDisk, local: SocketAddr) -> Vec<DiscoveryEntry> {
    use blkyard_nvme::DiscoveryKind::{Referral, Subsystem};
    use blkyard_nvme::SecureChannel::{NotRequired, Required};
    use blkyard_nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN};
    let entry = |kind, subsystem: Nqn, address: SocketAddr, port_id| DiscoveryEntry {
        kind,
        subsystem,
        address: address.ip().to_canonical(),
        port: address.port(),
        port_id,
        controller_id: ANY_CONTROLLER,
        admin_entries: ADMIN_ENTRIES,
        no_flow_control: true,
        // The port of another discovery service is not known.
        secure_channel: if disk.has_tls() && kind == Subsystem { Required } else { NotRequired },
        has_tls: disk.has_tls() && kind == Subsystem,
    };
    let ports = disk.ports.seen_from(local).into_iter();
    let mut entries: Vec<_> = ports.map(|port| entry(Subsystem, disk.nqn.clone(), port, port.port())).collect();
    for address in &disk.referrals {
        if let Some(discovery) = Nqn::new(DISCOVERY_NQN) {
            entries.push(entry(Referral, discovery, *address, address.port()));
        }
    }
    entries
}

/// Options of an I/O queue with so many entries.
fn queue_options(entries: u16, has_flow_control: bool) -> TcpIoQueueOptions {
    TcpIoQueueOptions {
        entries,
        has_flow_control,
        in_capsule: IN_CAPSULE_BYTES,
        transfer_bytes: TRANSFER_BYTES,
        pool_bytes: POOL_BYTES,
    }
}

fn subsystem_options(disk: &NvmeTcpDisk) -> SubsystemOptions {
    let controller = ControllerOptions {
        serial: disk.serial.clone(),
        subsystem: disk.nqn.to_string(),
        controller_id: disk.first_controller,
        io_queues: disk.queues().clamp(1, ControllerOptions::IO_QUEUES_MAX),
        queue_entries: ENTRIES_MAX,
        depth: ENTRIES_MAX,
        vectors: 1,
        transfer_bytes: TRANSFER_BYTES,
        has_shadow: false,
        fabrics: Some(FabricsOptions { in_capsule: IN_CAPSULE_BYTES, ..FabricsOptions::default() }),
        ..ControllerOptions::default()
    };
    SubsystemOptions {
        nqn: disk.nqn.clone(),
        hosts: disk.hosts.clone(),
        auth: disk.auth.clone(),
        controller,
        controllers_max: CONTROLLERS_MAX,
        admin_entries: ADMIN_ENTRIES,
        discovery: Vec::new(),
        instance_seed: disk.instance_seed,
    }
}
