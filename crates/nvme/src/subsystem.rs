//! A subsystem over fabrics: which hosts may connect, and the controllers of their associations.
//!
//! Each association, of a discovery service too, has a controller of its own, which ends with it. A host may name the
//! controller of its earlier association in a Connect: that association is ended first, so the host knows that none of
//! its commands is executed any more.
//!
//! Owned by the control path of an export. It has no connections and no clock.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::auth::{AuthTarget, HostSecrets};
use crate::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, DISCOVERY_NQN, InvalidParameter, Nqn, fabrics_status,
};
use crate::{
    ConnectedQueue, Controller, ControllerInstance, ControllerOptions, ControllerSnapshot, DiscoveryEntry,
    DiscoveryKind, DiscoveryLog, FabricsOptions, NamespaceTable, NvmeStatus, SnapshotError,
};

/// Offsets of fields of a Connect command.
const QID_AT: u16 = 42;
const SQSIZE_AT: u16 = 44;
/// Offsets of fields of its data.
const HOST_ID_AT: u16 = 0;
const CONTROLLER_ID_AT: u16 = 16;
const SUBSYSTEM_AT: u16 = 256;
const HOST_AT: u16 = 512;
/// Generation of each discovery log, which no association sees change.
const GENERATION: u64 = 1;

/// Options of a subsystem.
#[derive(Clone, Debug)]
pub struct SubsystemOptions {
    /// Its name.
    pub nqn: Nqn,
    /// Hosts that may connect; unset for any.
    pub hosts: Option<Vec<Nqn>>,
    /// Hosts that are to be authenticated; unset for none.
    pub auth: Option<HostSecrets>,
    /// Properties of its I/O controllers. The controller identifier is that of the first one.
    pub controller: ControllerOptions,
    /// Maximum associations; those with the discovery service, which is open to all, are counted apart. A further one
    /// with that ends the oldest.
    pub controllers_max: u16,
    /// Maximum entries of an admin queue.
    pub admin_entries: u16,
    /// Entries of the discovery log. Hosts that may not connect are shown no subsystem.
    pub discovery: Vec<DiscoveryEntry>,
    /// A random number, for controllers that can have each other reset (cross-controller reset): other ports and
    /// earlier subsystems have another one. Unset for controllers that cannot.
    pub instance_seed: Option<u64>,
}

/// The association of a host.
#[derive(Debug)]
pub struct FabricsAssociation {
    /// Its controller.
    pub controller: Controller,
    host: Nqn,
    host_id: [u8; 16],
    is_discovery: bool,
}

impl FabricsAssociation {
    /// The host.
    pub fn host(&self) -> &Nqn {
        &self.host
    }

    /// Identifier of the host.
    pub fn host_id(&self) -> [u8; 16] {
        self.host_id
    }

    /// Whether the controller is one of the discovery service.
    pub fn is_discovery(&self) -> bool {
        self.is_discovery
    }
}

/// Why a Connect is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRefusal {
    /// Status of the command.
    pub status: NvmeStatus,
    /// Its result.
    pub result: u64,
}

impl ConnectRefusal {
    fn field(offset: u16, in_data: bool) -> ConnectRefusal {
        let result = InvalidParameter { offset, in_data }.result();
        ConnectRefusal { status: fabrics_status::INVALID_PARAMETERS.with_dnr(), result }
    }
}

impl From<NvmeStatus> for ConnectRefusal {
    fn from(status: NvmeStatus) -> ConnectRefusal {
        ConnectRefusal { status, result: 0 }
    }
}

impl From<InvalidParameter> for ConnectRefusal {
    fn from(parameter: InvalidParameter) -> ConnectRefusal {
        ConnectRefusal::field(parameter.offset, parameter.in_data)
    }
}

/// What a valid Connect leads to.
#[derive(Debug)]
pub enum Connected {
    /// A new association: its controller identifier is the result of the command.
    Admin(u16),
    /// An I/O queue of this controller, whose identifier is the result.
    Io(u16, ConnectedQueue),
    /// The association of this controller is to be ended and [removed](FabricsSubsystem::remove), and then the Connect
    /// is to be tried again.
    Replaces(u16),
}

/// The associations of a subsystem as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubsystemSnapshot {
    associations: Vec<AssociationSnapshot>,
    next: u16,
    instances: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct AssociationSnapshot {
    id: u16,
    host: String,
    host_id: [u8; 16],
    /// Set for the discovery service.
    discovery: Option<DiscoveryLog>,
    instance: Option<ControllerInstance>,
    controller: ControllerSnapshot,
}

/// A subsystem and its associations.
#[derive(Debug)]
pub struct FabricsSubsystem {
    options: SubsystemOptions,
    discovery: Nqn,
    namespaces: NamespaceTable,
    /// By controller identifier.
    associations: BTreeMap<u16, FabricsAssociation>,
    /// Distance of the next controller identifier from the first one.
    next: u16,
    /// Number of controllers so far.
    instances: u64,
    /// Number of authentications so far.
    authentications: u64,
}

impl FabricsSubsystem {
    /// Controller identifiers of a subsystem: from the one of its options on.
    pub const CONTROLLER_IDS: u16 = 1000;

    /// A subsystem without associations.
    ///
    /// # Panics
    /// If the options allow no association or too many.
    pub fn new(options: SubsystemOptions, namespaces: NamespaceTable) -> FabricsSubsystem {
        assert!((1..=FabricsSubsystem::CONTROLLER_IDS).contains(&options.controllers_max), "{options:?}");
        let Some(discovery) = Nqn::new(DISCOVERY_NQN) else { unreachable!("it is a name") };
        FabricsSubsystem {
            options,
            discovery,
            namespaces,
            associations: BTreeMap::new(),
            next: 0,
            instances: 0,
            authentications: 0,
        }
    }

    /// Its options.
    pub fn options(&self) -> &SubsystemOptions {
        &self.options
    }

    /// The associations, by controller identifier.
    pub fn associations(&self) -> impl Iterator<Item = (u16, &FabricsAssociation)> {
        self.associations.iter().map(|(id, association)| (*id, association))
    }

    /// The association of a controller.
    pub fn association(&mut self, id: u16) -> Option<&mut FabricsAssociation> {
        self.associations.get_mut(&id)
    }

    /// Removes an association, whose queues are stopped.
    pub fn remove(&mut self, id: u16) {
        self.associations.remove(&id);
    }

    /// The authentication of the host of an association, on one of its queues. `None` if it needs none.
    pub fn authentication(&mut self, id: u16) -> Option<AuthTarget> {
        let association = self.associations.get(&id).filter(|association| !association.is_discovery)?;
        let HostSecrets { hosts, seed } = self.options.auth.as_ref()?;
        let secrets = Arc::clone(hosts.get(&association.host)?);
        self.authentications += 1;
        let (host, subsystem) = (association.host.clone(), self.options.nqn.clone());
        Some(AuthTarget::new(host, subsystem, secrets, seed, self.authentications))
    }

    /// Replaces the entries of the discovery logs of later associations.
    pub fn set_discovery(&mut self, entries: Vec<DiscoveryEntry>) {
        self.options.discovery = entries;
    }

    /// Replaces the namespaces.
    pub fn set_namespaces(&mut self, namespaces: &NamespaceTable) {
        self.namespaces = namespaces.clone();
        for association in self.associations.values_mut().filter(|association| !association.is_discovery) {
            association.controller.set_namespaces(namespaces.clone());
        }
    }

    /// Notifies all hosts that a group of namespaces has another ANA state.
    pub fn ana_changed(&mut self) {
        self.associations.values_mut().for_each(|association| association.controller.ana_changed());
    }

    /// Handles a Connect. The first invalid field determines the status.
    ///
    /// # Errors
    /// See [`ConnectRefusal`].
    pub fn connect(&mut self, command: &ConnectCommand, data: &[u8], now_ns: u64) -> Result<Connected, ConnectRefusal> {
        let data: &[u8; CONNECT_BYTES] = data.try_into().map_err(|_| NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())?;
        let data = ConnectData::parse(data)?;
        let is_discovery = data.subsystem == self.discovery;
        if !is_discovery && data.subsystem != self.options.nqn {
            return Err(ConnectRefusal::field(SUBSYSTEM_AT, true));
        }
        // The discovery service is open to all: it tells no host what it may not use.
        if !is_discovery && !self.is_allowed(&data.host) {
            let ConnectRefusal { result, .. } = ConnectRefusal::field(HOST_AT, true);
            return Err(ConnectRefusal { status: fabrics_status::INVALID_HOST.with_dnr(), result });
        }
        let entries_max = match command.qid {
            0 => self.options.admin_entries,
            _ => self.options.controller.queue_entries,
        };
        if command.sq_size == 0 || command.sq_size >= entries_max {
            return Err(ConnectRefusal::field(SQSIZE_AT, false));
        }
        if command.qid == 0 {
            self.connect_admin(command, data, is_discovery, now_ns)
        } else {
            self.connect_io(command.qid, &data, is_discovery)
        }
    }

    fn connect_admin(
        &mut self,
        command: &ConnectCommand,
        data: ConnectData,
        is_discovery: bool,
        now_ns: u64,
    ) -> Result<Connected, ConnectRefusal> {
        let first = self.options.controller.controller_id;
        let id = if data.controller_id == ANY_CONTROLLER {
            if self.is_full(is_discovery) {
                // Anybody may ask the discovery service: nobody is to keep others from it.
                let oldest = self.oldest_discovery().filter(|_| is_discovery);
                return oldest.map(Connected::Replaces).ok_or(fabrics_status::CONTROLLER_BUSY.into());
            }
            let ids = FabricsSubsystem::CONTROLLER_IDS;
            let free = (0..ids).map(|step| (self.next + step) % ids);
            let free = free.clone().find(|place| !self.associations.contains_key(&(first + place)));
            let Some(place) = free else { return Err(fabrics_status::CONTROLLER_BUSY.into()) };
            self.next = (place + 1) % ids;
            first + place
        } else {
            let id = data.controller_id;
            if !(first..first + FabricsSubsystem::CONTROLLER_IDS).contains(&id) {
                return Err(ConnectRefusal::field(CONTROLLER_ID_AT, true));
            }
            match self.associations.get(&id) {
                Some(known) if known.host == data.host && known.host_id == data.host_id => {
                    return Ok(Connected::Replaces(id));
                }
                Some(_) => return Err(fabrics_status::CONTROLLER_BUSY.into()),
                None if self.is_full(is_discovery) => return Err(fabrics_status::CONTROLLER_BUSY.into()),
                None => id,
            }
        };
        let log = is_discovery.then(|| Arc::new(self.log_for(&data.host)));
        let controller = self.new_controller(id, log, command.keep_alive_ms, now_ns);
        let controller = controller.map_err(|_| NvmeStatus::INTERNAL)?;
        let ConnectData { host, host_id, .. } = data;
        self.associations.insert(id, FabricsAssociation { controller, host, host_id, is_discovery });
        Ok(Connected::Admin(id))
    }

    fn new_controller(
        &mut self,
        id: u16,
        log: Option<Arc<DiscoveryLog>>,
        keep_alive_ms: u32,
        now_ns: u64,
    ) -> io::Result<Controller> {
        self.instances += 1;
        let instance = self.options.instance_seed.map(|seed| instance(id, seed, self.instances));
        let (options, namespaces) = self.controller_options(id, log, instance);
        Controller::over_fabrics(options, namespaces, keep_alive_ms, now_ns)
    }

    /// Whether there is no room for another association, with the discovery service or with the subsystem.
    fn is_full(&self, is_discovery: bool) -> bool {
        let same = self.associations.values().filter(|association| association.is_discovery == is_discovery);
        same.count() >= usize::from(self.options.controllers_max)
    }

    /// The oldest association with the discovery service: identifiers are given in turn.
    fn oldest_discovery(&self) -> Option<u16> {
        let next = self.options.controller.controller_id + self.next;
        let ids = self.associations.range(next..).chain(self.associations.range(..next));
        ids.filter(|(_, association)| association.is_discovery).map(|(id, _)| *id).next()
    }

    fn is_allowed(&self, host: &Nqn) -> bool {
        self.options.hosts.as_ref().is_none_or(|hosts| hosts.contains(host))
    }

    /// The discovery log that a host reads.
    fn log_for(&self, host: &Nqn) -> DiscoveryLog {
        let is_shown = |entry: &&DiscoveryEntry| entry.kind != DiscoveryKind::Subsystem || self.is_allowed(host);
        let entries: Vec<_> = self.options.discovery.iter().filter(is_shown).cloned().collect();
        DiscoveryLog::new(GENERATION, &entries)
    }

    /// Options and namespaces of a controller: of the discovery service if it has a log.
    fn controller_options(
        &self,
        id: u16,
        discovery: Option<Arc<DiscoveryLog>>,
        instance: Option<ControllerInstance>,
    ) -> (ControllerOptions, NamespaceTable) {
        let options = self.options.controller.clone();
        let in_capsule = options.fabrics.as_ref().map_or(0, |fabrics| fabrics.in_capsule);
        let is_discovery = discovery.is_some();
        let subsystem = if is_discovery { &self.discovery } else { &self.options.nqn };
        let options = ControllerOptions {
            controller_id: id,
            subsystem: subsystem.as_str().to_owned(),
            fabrics: Some(FabricsOptions { in_capsule, discovery, instance }),
            ..options
        };
        let namespaces = if is_discovery { NamespaceTable::new(1) } else { self.namespaces.clone() };
        (options, namespaces)
    }

    /// Saves the associations, whose controllers are at rest.
    ///
    /// # Errors
    /// A controller is not.
    pub fn snapshot(&self) -> Result<SubsystemSnapshot, SnapshotError> {
        let save = |(id, association): (&u16, &FabricsAssociation)| {
            Ok(AssociationSnapshot {
                id: *id,
                host: association.host.as_str().to_owned(),
                host_id: association.host_id,
                discovery: association.controller.discovery_log().map(|log| DiscoveryLog::clone(log)),
                instance: association.controller.instance(),
                controller: association.controller.snapshot([])?,
            })
        };
        let associations = self.associations.iter().map(save).collect::<Result<_, SnapshotError>>()?;
        Ok(SubsystemSnapshot { associations, next: self.next, instances: self.instances })
    }

    /// Restores the associations of a new subsystem.
    ///
    /// # Errors
    /// The state is invalid for its options, or the system has no memory left.
    pub fn restore(&mut self, saved: &SubsystemSnapshot) -> Result<(), SnapshotError> {
        let first = self.options.controller.controller_id;
        for one in &saved.associations {
            let host = Nqn::new(&one.host).ok_or(SnapshotError::Invalid("the name of a host"))?;
            let is_id = (first..first + FabricsSubsystem::CONTROLLER_IDS).contains(&one.id);
            if !is_id || self.is_full(one.discovery.is_some()) {
                return Err(SnapshotError::Invalid("other controller identifiers"));
            }
            let log = one.discovery.clone().map(Arc::new);
            let is_discovery = log.is_some();
            let (options, namespaces) = self.controller_options(one.id, log, one.instance);
            let controller = Controller::restore_over_fabrics(options, namespaces, &one.controller)?;
            let association = FabricsAssociation { controller, host, host_id: one.host_id, is_discovery };
            self.associations.insert(one.id, association);
        }
        (self.next, self.instances) = (saved.next % FabricsSubsystem::CONTROLLER_IDS, saved.instances);
        Ok(())
    }

    fn connect_io(&mut self, qid: u16, data: &ConnectData, is_discovery: bool) -> Result<Connected, ConnectRefusal> {
        let id = data.controller_id;
        let known = self.associations.get_mut(&id).filter(|known| known.is_discovery == is_discovery);
        let Some(association) = known else { return Err(ConnectRefusal::field(CONTROLLER_ID_AT, true)) };
        if association.host != data.host {
            return Err(ConnectRefusal::field(HOST_AT, true));
        }
        if association.host_id != data.host_id {
            return Err(ConnectRefusal::field(HOST_ID_AT, true));
        }
        if is_discovery || qid > association.controller.queues_granted() {
            return Err(ConnectRefusal::field(QID_AT, false));
        }
        Ok(Connected::Io(id, association.controller.connect_queue(qid)?))
    }
}

/// The life of the controller that is the `number`th of its subsystem: a bijection of that number for each seed (the
/// finalizer of SplitMix64), so that no two are the same.
fn instance(id: u16, seed: u64, number: u64) -> ControllerInstance {
    let mut random = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    random = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    random ^= random >> 31;
    // Zero is none, for both.
    ControllerInstance { id, uniquifier: (number % 255) as u8 + 1, random: random.max(1) }
}
