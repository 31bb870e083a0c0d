//! An open device of any kind.
//!
//! A kind of device is a type that implements [`DeviceOps`], and the driver of its queues. `devices.rs` knows the names
//! of all kinds. Users of a [`Device`] treat all kinds alike. An operation of a single kind is a method with a default.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Debug;
use std::io;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_attach::{Connector, LateNamespace, QueuePoolMember, TcpPeer, TcpSparePath};
use blkyard_mem::DmaDomain;
use blkyard_mpath::{MultipathSettings, PathCounters, PathMonitor, PathState};
use blkyard_mq::{DeviceInfo, Driver, QueueCounts, QueueKind, Region, SECTOR_SHIFT, TagSet};
use blkyard_nvme::NamespaceIds;
use blkyard_os::Ring;

use crate::devices::{KINDS, QUEUE_KIND_SCHEMES, kind_of, no_handover};
use crate::spec::{Spec, SpecError};

/// Why a device, or a queue of it, cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Its name is not understood.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no memory for it.
    #[error("{name}: out of memory: {source}; give a smaller size")]
    Memory {
        /// The device's name.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// It is locked, and no process is seen to use it: I/O of one that has ended may be under way. Worth another try.
    #[error(transparent)]
    Held(Box<dyn Error + Send + Sync>),
    /// Error of its kind, with object, cause and cure.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

/// Driver of one hardware queue, for any kind of device.
pub type DeviceQueue = Box<dyn QueueDriver>;

/// A driver that runs on a real lane.
pub trait QueueDriver: Driver<Ring> + Debug + Send {}

impl<D: Driver<Ring> + Debug + Send> QueueDriver for D {}

/// Operations on an open device.
pub trait DeviceOps: Debug + Send + Sync {
    /// Its name, size and limits when it was opened.
    fn info(&self) -> &DeviceInfo;

    /// A line on how the device is reached, for people.
    fn describe(&self) -> String;

    /// Opens one more queue of `depth` requests.
    ///
    /// # Errors
    /// The device has no more queues, or none of this depth.
    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError>;

    /// Queues that can be open at one time; of all members together if it is in a [pool](DeviceOps::queue_pool).
    fn queues_max(&self) -> usize {
        usize::MAX
    }

    /// Which devices have their queues in common with this one: namespaces of a controller that has too few for each to
    /// have its own.
    fn queue_pool(&self) -> Option<QueuePoolMember> {
        None
    }

    /// [`queue`](DeviceOps::queue) for these members of its pool, whose requests number them in this order.
    ///
    /// # Errors
    /// As there.
    fn queue_of(&self, _members: &[usize], kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        self.queue(kind, depth)
    }

    /// Requests that one queue can have in flight.
    fn depth_max(&self) -> usize {
        TagSet::DEPTH_MAX
    }

    /// Memory of our own that its queues can reach, in so many parts of so many bytes. Each part is a region, and its
    /// first byte there.
    ///
    /// # Errors
    /// The system has no room.
    fn memory(&self, parts: usize, bytes: usize) -> io::Result<Vec<(Arc<Region>, u64)>> {
        // Private memory is cheapest, and a queue that is used with one part pins no other.
        (0..parts).map(|_| Ok((Region::anonymous(bytes)?, 0))).collect()
    }

    /// DMA domains: one for each path that maps memory; empty for a device that uses our addresses. Memory that its
    /// owner maps there stays mapped, independent of queues. Other memory of a queue is mapped for as long as the queue
    /// has it.
    fn dma_domains(&self) -> Vec<Arc<DmaDomain>> {
        Vec::new()
    }

    /// Whether it may be exported: its queues can use memory of other processes without harm to them.
    ///
    /// # Errors
    /// The reason why not, as a clause that follows the device's name, and cure.
    fn check_export(&self) -> Result<(), (&'static str, &'static str)> {
        Ok(())
    }

    /// Its backing: the bounds of its size. By default memory.
    ///
    /// # Errors
    /// The system's error.
    fn backing(&self) -> io::Result<Backing> {
        Ok(Backing::Memory(self.info().capacity_sectors << SECTOR_SHIFT))
    }

    /// Grows its backing.
    ///
    /// # Errors
    /// The system has no room, or this kind does not grow.
    fn grow(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Its size now, sectors, if something else than `grow` changes it.
    fn sectors_now(&self) -> Option<u64> {
        None
    }

    /// Everything beside the name that another process needs to continue with it. By default a device is memory of
    /// this process, and ends with it.
    ///
    /// # Errors
    /// The reason why none can: a clause that follows the device's name.
    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Err("its memory is lost when this daemon ends")
    }

    /// Identifiers of a namespace; unset ones are zero.
    fn ids(&self) -> NamespaceIds {
        NamespaceIds::default()
    }

    /// Makes it one of several paths to a device, before a queue of it is opened. Returns state and proofs of the path;
    /// `None` for a device whose connection, if any, is its own matter.
    fn as_path(&self) -> Option<Arc<PathMonitor>> {
        None
    }

    /// Opens another path to the same disk, of a name whose device does not answer: it is connected in the background.
    /// The name is one of the same kind.
    ///
    /// # Errors
    /// See [`DeviceError`]; also for a kind whose paths have to answer when they are opened.
    fn later_path(&self, spec: &Spec, _late: LatePath) -> Result<Device, DeviceError> {
        Err(no_late_path(spec))
    }

    /// Opens another path to the same disk, whose address is not known yet. Its options are those of a name of the same
    /// kind, and its queues can be opened at once.
    ///
    /// # Errors
    /// See [`later_path`](DeviceOps::later_path).
    fn spare_path(&self, spec: &Spec, _late: LatePath) -> Result<(Device, TcpSparePath), DeviceError> {
        Err(no_late_path(spec))
    }

    /// Why it is not connected, if it is not and knows.
    fn loss(&self) -> Option<String> {
        None
    }

    /// Its association, if other paths to the same device may help it.
    fn peer(&self) -> Option<&Arc<TcpPeer>> {
        None
    }

    /// Sets the associations of all paths to the device, of which it is one.
    fn set_peers(&self, _peers: &[Arc<TcpPeer>]) {}

    /// The paths of a device over several; empty for another.
    fn paths(&self) -> Vec<DevicePath> {
        Vec::new()
    }

    /// Settings of a device over several paths.
    fn path_settings(&self) -> Option<&MultipathSettings> {
        None
    }

    /// Counts beside those of its queues, by name.
    fn counters(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// Shuts its controller down, as before a machine sleeps, or brings it up again; I/O waits meanwhile without a
    /// limit.
    ///
    /// # Errors
    /// It does not get there, or devices of this kind have no controller.
    fn set_suspended(&self, _is_suspended: bool) -> Result<(), DeviceError> {
        let cause = "it has no controller that can be shut down and up";
        Err(SpecError::new(&self.info().name, cause, "suspend devices of vfio-user: and pci:").into())
    }

    /// Whether a thread of it has ended by itself.
    fn has_ended(&self) -> bool {
        false
    }

    /// Whether blocks that were never written are read faster than others, so that a benchmark writes them first.
    fn needs_preconditioning(&self) -> bool {
        false
    }
}

fn no_late_path(spec: &Spec) -> DeviceError {
    SpecError::new(&spec.name, "paths of this kind are not connected later", "start its server first").into()
}

/// A path that is to be connected in the background, and what it must keep.
pub type LatePath = LateNamespace;

/// A path of a device over several, for inspection.
#[derive(Clone, Debug)]
pub struct DevicePath {
    /// Name of the device that is this path.
    pub name: String,
    /// Its state.
    pub state: PathState,
    /// Why it is not connected.
    pub loss: Option<String>,
    /// Counters of all queues together; of the last choice, that of the queue that chose last.
    pub counters: PathCounters,
}

/// Backing of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// A file or block device.
    File {
        /// Its length now, bytes.
        bytes: u64,
        /// Reason why we cannot grow it, and cure; `None` if we can.
        fixed: Option<(&'static str, &'static str)>,
    },
    /// A disk of another program, whose size is followed.
    Remote {
        /// Its size now, bytes.
        bytes: u64,
        /// Reason why only that size can be served, and cure.
        fixed: (&'static str, &'static str),
    },
    /// Memory of so many bytes, taken at start.
    Memory(u64),
    /// No backing.
    Nothing,
}

/// Everything beside the name that another process needs to continue with a device.
#[derive(Debug, Default)]
pub struct DeviceHandover<'a> {
    /// The descriptor that carries its I/O and its lock, if that is a file. Without one, the other process opens the
    /// device by its name again.
    pub file: Option<BorrowedFd<'a>>,
    /// The descriptor that keeps others away from the same disk by another of its names.
    pub claim: Option<BorrowedFd<'a>>,
    /// A sync of it has failed.
    pub sync_failed: bool,
    /// Identity of a namespace, which the other process must find again.
    pub ids: Option<NamespaceIds>,
}

/// What a process has received of a [`DeviceHandover`].
#[derive(Debug, Default)]
pub struct ReceivedDevice {
    /// As in [`DeviceHandover`].
    pub file: Option<OwnedFd>,
    /// As in [`DeviceHandover`].
    pub claim: Option<OwnedFd>,
    /// As in [`DeviceHandover`].
    pub sync_failed: bool,
}

/// An open device.
#[derive(Debug)]
pub struct Device(Box<dyn DeviceOps>);

impl<D: DeviceOps + 'static> From<D> for Device {
    fn from(device: D) -> Device {
        Device(Box::new(device))
    }
}

impl Deref for Device {
    type Target = dyn DeviceOps;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Device {
    /// Opens a device by its name. A back-end that serves it must be trusted: see [`Connector`].
    ///
    /// # Errors
    /// See [`DeviceError`]: each names device, cause and cure.
    pub fn open(name: &str) -> Result<Device, DeviceError> {
        Device::from_spec(Spec::parse(name)?)
    }

    /// Opens a device by its parsed name.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn from_spec(spec: Spec) -> Result<Device, DeviceError> {
        (kind_of(KINDS, &spec)?.open)(spec, None)
    }

    /// Opens a device by its parsed name. If another process serves it, `connector` makes the connector, which must
    /// keep descriptors away that block on close.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn through(
        spec: Spec,
        connector: impl FnOnce() -> io::Result<Arc<dyn Connector>>,
    ) -> Result<Device, DeviceError> {
        (kind_of(KINDS, &spec)?.open)(spec, Some(Box::new(connector)))
    }

    /// Has the device of this name ask its controller for read and poll queues beside the default ones, if it is of a
    /// kind that has them (options `read_queues` and `poll_queues`) and its name does not say. Without its own poll
    /// queues, queues of kind [`QueueKind::Poll`] signal for each completion.
    pub fn ask_queues(spec: &mut Spec, counts: QueueCounts) {
        let has_kinds = |scheme: &str| QUEUE_KIND_SCHEMES.contains(&scheme);
        // The options of a device over several paths are those of each path.
        let is_asked = match &*spec.scheme {
            "multipath" => spec.body.split(',').all(|path| path.split_once(':').is_some_and(|(it, _)| has_kinds(it))),
            scheme => has_kinds(scheme),
        };
        for (key, queues) in [("read_queues", counts.read), ("poll_queues", counts.poll)] {
            if is_asked && queues > 0 {
                let said = spec.take(key);
                spec.put(key, Some(said.unwrap_or_else(|| queues.to_string())));
            }
        }
    }

    /// Whether several devices with the address of this name share one connection, and are to be opened together.
    pub fn shares_connection(spec: &Spec) -> bool {
        kind_of(KINDS, spec).is_ok_and(|kind| kind.open_all.is_some())
    }

    /// Opens several devices with the same address over one connection: namespaces of one controller. Options other
    /// than `namespace` are those of the first. `connector` is as for [`Device::through`].
    ///
    /// # Errors
    /// As for [`Device::open`]; also for devices that do not [share](Device::shares_connection) a connection.
    ///
    /// # Panics
    /// If there is no name.
    pub fn open_all(
        specs: Vec<Spec>,
        connector: impl FnOnce() -> io::Result<Arc<dyn Connector>>,
    ) -> Result<Vec<Device>, DeviceError> {
        let first = specs.first().unwrap_or_else(|| panic!("no device is named"));
        let Some(open_all) = kind_of(KINDS, first)?.open_all else {
            let cause = "devices of this kind do not share a connection";
            return Err(SpecError::new(&first.name, cause, "open each by itself").into());
        };
        open_all(specs, Some(Box::new(connector)))
    }

    /// Continues with a device that another process has open, from its parsed name and its [`DeviceHandover`].
    ///
    /// # Errors
    /// As for [`Device::open`]; also for devices that cannot be handed over.
    pub fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
        let Some(adopt) = kind_of(KINDS, &spec)?.adopt else { return Err(no_handover(&spec)) };
        adopt(spec, received)
    }

    /// Whether it may be exported.
    ///
    /// # Errors
    /// Says why not.
    pub fn can_be_exported(&self) -> Result<(), SpecError> {
        self.check_export().map_err(|(cause, cure)| SpecError::new(&self.info().name, cause, cure))
    }

    /// Whether another process can continue with it.
    ///
    /// # Errors
    /// Says why not.
    pub fn can_be_handed_over(&self) -> Result<(), SpecError> {
        let refusal = |cause| SpecError::new(&self.info().name, cause, "serve it by a separate daemon");
        self.handover().map(|_| ()).map_err(refusal)
    }
}
