//! `multipath:DEVICE,DEVICE`: one disk over several devices that reach the same one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

use blkyard_attach::{AcceptNamespace, AttachError, TcpPeer, TcpSparePath};
use blkyard_mem::{DmaDomain, PAGE_BYTES, Region};
use blkyard_mpath::{
    HedgeConfig, MultipathQueue, MultipathSettings, MultipathStats, PATHS_MAX, PathCounters, PathMonitor, PathRules,
    PolicyKind, QueuePath,
};
use blkyard_mq::{DeviceInfo, Driver, QueueKind, QueueLimits, SECTOR_SHIFT};
use blkyard_nvme::NamespaceIds;
use blkyard_os::Ring;
use blkyard_sys::{Epoll, EventFlags, Registered};

use super::{DeviceKind, KINDS, MakeConnector, adopt_by_name, kind_of};
use crate::device::{
    Backing, Device, DeviceError, DeviceHandover, DeviceOps, DevicePath, DeviceQueue, LatePath, ReceivedDevice,
};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &[SCHEME], usage: "multipath:DEVICE,DEVICE", open, adopt: Some(adopt), open_all: None };

const SCHEME: &str = "multipath";
/// Schemes of devices over several paths.
const MULTIPATH_SCHEMES: [&str; 2] = [SCHEME, super::discovered::SCHEME];
/// Default time that I/O waits without a usable path: as long as an association over TCP is tried for.
const NO_PATH_S: u64 = 600;

fn open(spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let paths: Vec<_> = spec.body.split(',').filter(|path| !path.is_empty()).collect();
    let wrong = |cause: &str, cure: &str| SpecError::new(&spec.name, cause, cure);
    if paths.len() < 2 {
        return Err(wrong("it has one path", "name at least two devices, and separate them by commas").into());
    }
    if paths.len() > PATHS_MAX {
        return Err(wrong("it has too many paths", &format!("name at most {PATHS_MAX}")).into());
    }
    let paths = paths.into_iter().map(Spec::parse).collect::<Result<_, _>>()?;
    open_over(spec, paths, 0, |_, _, _| Ok(()))
}

/// Sets the rules by which paths are chosen in a device's name, as they would be given there.
pub fn put_path_rules(spec: &mut Spec, rules: PathRules) {
    spec.put("policy", (rules.policy != PolicyKind::default()).then(|| rules.policy.name()));
    spec.put("hedged_reads", rules.hedged_reads.map(|_| "on"));
}

/// Opens one disk over these paths, and so many spare ones. `watch` gets the spare ones, the associations of all, the
/// spare ones last, and the end of their device: when the sender is dropped. The options of the disk's name are those
/// of several paths, and of each path.
pub(super) fn open_over(
    mut spec: Spec,
    mut paths: Vec<Spec>,
    spares: usize,
    watch: impl FnOnce(Vec<TcpSparePath>, Vec<Arc<TcpPeer>>, Receiver<()>) -> Result<(), DeviceError>,
) -> Result<Device, DeviceError> {
    let names = PolicyKind::ALL.map(PolicyKind::name).join(", ");
    let policy = spec.take_with("policy", &format!("one of {names}"), |name| name.parse().ok())?;
    let no_path_s = spec.take_number("no_path_s", 0, u64::from(u32::MAX))?.unwrap_or(NO_PATH_S);
    let is_unidentified = spec.take_switch("unidentified")?.unwrap_or(false);
    let hedged_reads = spec.take_switch("hedged_reads")?.unwrap_or(false).then(HedgeConfig::default);
    let rules = PathRules { policy: policy.unwrap_or_default(), hedged_reads, ..PathRules::default() };
    let settings = MultipathSettings::new(rules, no_path_s * 1_000_000_000);
    // The others are those of each path.
    let options = spec.take_rest();
    for path in &mut paths {
        if MULTIPATH_SCHEMES.contains(&path.scheme.as_str()) {
            let cure = "name all paths in one list";
            return Err(SpecError::new(&path.name, "a path is a device over several paths itself", cure).into());
        }
        options.iter().try_for_each(|(key, value)| path.set(key, value))?;
        kind_of(KINDS, path)?;
    }
    let (end, ended) = channel();
    let device = MultipathDevice::open(&spec, &paths, settings, is_unidentified, spares, end)?;
    let peers = device.paths.iter().filter_map(|path| path.peer().cloned()).collect();
    watch(device.spares.clone(), peers, ended)?;
    Ok(device.into())
}

/// Opens the paths anew, as [`MultipathDevice::handover`] has found possible.
fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    adopt_by_name(spec, received, open)
}

/// Opens all paths at the same time: one that does not answer takes its whole timeout.
fn open_all(specs: &[Spec]) -> Vec<Result<Device, DeviceError>> {
    std::thread::scope(|scope| {
        let open = |spec: &Spec| (kind_of(KINDS, spec)?.open)(spec.clone(), None);
        let threads: Vec<_> = specs.iter().map(|spec| scope.spawn(move || open(spec))).collect();
        let outcome = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        threads.into_iter().map(outcome).collect()
    })
}

/// Why the controller of a path does not answer, if that is why it could not be opened.
fn unreachable_cause(error: &DeviceError) -> Option<&str> {
    let DeviceError::Other(error) = error else { return None };
    match error.downcast_ref()? {
        AttachError::Unreachable { cause, .. } => Some(cause),
        _ => None,
    }
}

/// A device over several.
#[derive(Debug)]
struct MultipathDevice {
    info: DeviceInfo,
    /// Identity of the disk.
    ids: NamespaceIds,
    paths: Vec<Device>,
    monitors: Vec<Option<Arc<PathMonitor>>>,
    settings: Arc<MultipathSettings>,
    queues: Mutex<QueueStats>,
    /// Paths for ports that become known later, the last ones. They get their ports in order.
    spares: Vec<TcpSparePath>,
    /// Its end tells the watch of ports.
    _end: Sender<()>,
}

/// Counters of all queues so far.
#[derive(Debug)]
struct QueueStats {
    /// Of the queues that are open, and of those that were closed since the last look.
    open: Vec<Arc<MultipathStats>>,
    /// Of those that were closed before, by path.
    closed: Vec<PathCounters>,
}

impl QueueStats {
    /// Adds up the counters of queues that are closed by now.
    fn look(&mut self) {
        let closed = &mut self.closed;
        self.open.retain(|stats| {
            let is_open = Arc::strong_count(stats) > 1;
            if !is_open {
                for (number, sum) in closed.iter_mut().enumerate() {
                    // Requests that were at a path when its queue was closed are nowhere.
                    add(sum, &PathCounters { in_flight: 0, ..stats.path(number) });
                }
            }
            is_open
        });
    }
}

fn add(sum: &mut PathCounters, one: &PathCounters) {
    sum.ios += one.ios;
    sum.latency_ns += one.latency_ns;
    sum.in_flight += one.in_flight;
    sum.moved += one.moved;
    sum.hedges += one.hedges;
    sum.hedges_won += one.hedges_won;
    if one.chosen_ns > sum.chosen_ns {
        (sum.chosen_ns, sum.reason) = (one.chosen_ns, one.reason);
    }
}

impl MultipathDevice {
    /// Opens the paths, of which one must answer at least; others that do not are connected later.
    fn open(
        spec: &Spec,
        names: &[Spec],
        settings: MultipathSettings,
        is_unidentified: bool,
        spares: usize,
        end: Sender<()>,
    ) -> Result<MultipathDevice, DeviceError> {
        let (mut opened, mut late) = (Vec::new(), Vec::new());
        for (number, path) in open_all(names).into_iter().enumerate() {
            match path {
                Ok(device) => opened.push((number, device)),
                Err(error) => match unreachable_cause(&error).map(str::to_owned) {
                    Some(why) => late.push((number, why, error)),
                    None => return Err(error),
                },
            }
        }
        let Some((_, first)) = opened.first() else { return Err(late.remove(0).2) };
        let known = PathIdentity { name: first.info().name.clone(), ids: first.ids(), is_unidentified };
        let mut info = first.info().clone();
        for (_, path) in &opened[1..] {
            known.join(&mut info, path.info(), &path.ids())?;
        }
        let queues = opened.iter().map(|(_, path)| path.queues_max()).min().unwrap_or(0);
        let depth = opened.iter().map(|(_, path)| path.depth_max()).min().unwrap_or(0);
        let late_path = |why| LatePath { info: info.clone(), queues, depth, why, accepts: known.check(&info) };
        let spare_path = |_| {
            let (number, beside) = &opened[0];
            beside.spare_path(&names[*number], late_path("no port is known for it".into()))
        };
        let (spare_devices, spares): (Vec<_>, Vec<_>) =
            (0..spares).map(spare_path).collect::<Result<Vec<_>, DeviceError>>()?.into_iter().unzip();
        for (number, why, error) in late {
            let path = late_path(why);
            // One of its kind knows how to connect it.
            let beside = opened.iter().find(|(other, _)| names[*other].scheme == names[number].scheme);
            let Some((_, beside)) = beside else { return Err(error) };
            tracing::warn!("{error}: the other paths are used, and this one when it answers");
            let path = beside.later_path(&names[number], path)?;
            opened.push((number, path));
        }
        opened.sort_by_key(|(number, _)| *number);
        let paths: Vec<_> = opened.into_iter().map(|(_, path)| path).chain(spare_devices).collect();
        info.name = spec.address();
        let monitors = paths.iter().map(|path| path.as_path()).collect();
        let peers: Vec<_> = paths.iter().filter_map(|path| path.peer().cloned()).collect();
        paths.iter().for_each(|path| path.set_peers(&peers));
        let queues = QueueStats { open: Vec::new(), closed: vec![PathCounters::default(); paths.len()] };
        Ok(MultipathDevice {
            info,
            ids: known.ids,
            paths,
            monitors,
            settings: Arc::new(settings),
            queues: Mutex::new(queues),
            spares,
            _end: end,
        })
    }

    /// Names of the paths, without the spare ones that have no port yet.
    fn path_names(&self) -> Vec<String> {
        let fixed = self.paths[..self.paths.len() - self.spares.len()].iter().map(|path| path.info().name.clone());
        fixed.chain(self.spares.iter().map_while(TcpSparePath::name)).collect()
    }

    fn queue_stats(&self) -> MutexGuard<'_, QueueStats> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.look();
        queues
    }
}

/// What shows that a path reaches the device of the first one.
#[derive(Clone, Debug)]
struct PathIdentity {
    /// Name and identifiers of the first path.
    name: String,
    ids: NamespaceIds,
    is_unidentified: bool,
}

impl PathIdentity {
    /// Adds a path to the properties of the device, if it reaches the same one: by identifiers of the namespace, or
    /// unidentified.
    fn join(&self, info: &mut DeviceInfo, other: &DeviceInfo, ids: &NamespaceIds) -> Result<(), SpecError> {
        let differs = |cause: String| SpecError::new(&other.name, cause, "name paths to the same device only");
        if other.capacity_sectors != info.capacity_sectors {
            let (one, other) = (info.capacity_sectors, other.capacity_sectors);
            return Err(differs(format!("the first path has {one} sectors, and this path {other}")));
        }
        let (one, new) = (&info.limits, &other.limits);
        if one.logical_block_bytes != new.logical_block_bytes {
            let (one, new) = (one.logical_block_bytes, new.logical_block_bytes);
            return Err(differs(format!("the first path has blocks of {one} bytes, and this path of {new}")));
        }
        let name = &self.name;
        match is_same(&self.ids, ids) {
            Some(true) => {}
            Some(false) => {
                return Err(differs(format!("NGUID, UUID or EUI-64 of the namespace differ from those at {name}")));
            }
            None if self.is_unidentified => {}
            None => {
                let cause = format!("it has no NGUID, UUID or EUI-64 in common with {name}, so it may be another disk");
                let cure =
                    "name paths to one NVMe namespace; or, if it is the same disk for certain, set unidentified=on";
                return Err(SpecError::new(&other.name, cause, cure));
            }
        }
        info.limits = limits_of_both(one, new);
        info.read_only |= other.read_only;
        info.volatile_cache |= other.volatile_cache;
        info.fua &= other.fua;
        info.rotational |= other.rotational;
        let timeouts = [info.timeout_ns, other.timeout_ns].into_iter().filter(|ns| *ns > 0);
        info.timeout_ns = timeouts.min().unwrap_or(0);
        info.silence_ns = info.silence_ns.max(other.silence_ns);
        Ok(())
    }

    /// The check of a path that comes later: it joins only if the device, of which users have read these properties,
    /// stays as it is.
    fn check(&self, told: &DeviceInfo) -> Box<AcceptNamespace> {
        let (identity, told) = (self.clone(), told.clone());
        Box::new(move |sectors, found, ids| {
            let told = DeviceInfo { capacity_sectors: sectors, ..told.clone() };
            let mut joined = told.clone();
            let other = DeviceInfo { timeout_ns: told.timeout_ns, ..found.clone() };
            identity.join(&mut joined, &other, ids).map_err(|error| format!("{}; {}", error.cause, error.cure))?;
            let look = |info: &DeviceInfo| (info.limits, info.read_only, info.volatile_cache, info.fua);
            if look(&joined) != look(&told) {
                let cause = "its limits, write protection or cache do not allow what the paths at the start do";
                return Err(format!("{cause}; set it up like those at its target, or start again with all paths"));
            }
            Ok(())
        })
    }
}

/// Whether two namespaces are the same: no identifier differs that both have. `None` if they have none in common.
fn is_same(one: &NamespaceIds, other: &NamespaceIds) -> Option<bool> {
    fn agree<const N: usize>(one: [u8; N], other: [u8; N]) -> Option<bool> {
        (one != [0; N] && other != [0; N]).then_some(one == other)
    }
    let all = [agree(one.nguid, other.nguid), agree(one.uuid, other.uuid), agree(one.eui64, other.eui64)];
    all.into_iter().flatten().reduce(|one, other| one && other)
}

/// Limits that requests for either path keep.
fn limits_of_both(one: &QueueLimits, other: &QueueLimits) -> QueueLimits {
    QueueLimits {
        logical_block_bytes: one.logical_block_bytes,
        physical_block_bytes: one.physical_block_bytes.max(other.physical_block_bytes),
        sectors_max: one.sectors_max.min(other.sectors_max),
        segments_max: one.segments_max.min(other.segments_max),
        segment_bytes_max: one.segment_bytes_max.min(other.segment_bytes_max),
        segment_boundary_mask: one.segment_boundary_mask.min(other.segment_boundary_mask),
        // Boundaries are powers of two or absent; of others the smaller is kept, and the other only costs time.
        chunk_sectors: match (one.chunk_sectors, other.chunk_sectors) {
            (0, chunk) | (chunk, 0) => chunk,
            (one, other) => one.min(other),
        },
        virt_boundary_mask: one.virt_boundary_mask | other.virt_boundary_mask,
        dma_alignment_mask: one.dma_alignment_mask | other.dma_alignment_mask,
        write_granularity_bytes: one.write_granularity_bytes.max(other.write_granularity_bytes),
        atomic_sectors_max: one.atomic_sectors_max.min(other.atomic_sectors_max),
        discard_sectors_max: one.discard_sectors_max.min(other.discard_sectors_max),
        discard_granularity_bytes: one.discard_granularity_bytes.max(other.discard_granularity_bytes),
        discard_alignment_bytes: one.discard_alignment_bytes.max(other.discard_alignment_bytes),
        discard_segments_max: one.discard_segments_max.min(other.discard_segments_max),
        write_zeroes_sectors_max: one.write_zeroes_sectors_max.min(other.write_zeroes_sectors_max),
    }
}

/// Eventfds of the paths of one queue, as one descriptor.
#[derive(Debug)]
struct PathEvents {
    epoll: Epoll,
    _eventfds: Vec<Registered<OwnedFd>>,
}

impl PathEvents {
    /// Of the drivers that have one; `None` if no driver has.
    fn new(paths: &[QueuePath<DeviceQueue>]) -> io::Result<Option<PathEvents>> {
        let eventfds: Vec<_> = paths.iter().filter_map(|path| Driver::<Ring>::eventfd(&path.driver)).collect();
        if eventfds.is_empty() {
            return Ok(None);
        }
        let epoll = Epoll::new()?;
        let register = |eventfd: BorrowedFd<'_>| epoll.register(eventfd.try_clone_to_owned()?, 0, EventFlags::IN);
        let eventfds = eventfds.into_iter().map(register).collect::<io::Result<_>>()?;
        Ok(Some(PathEvents { epoll, _eventfds: eventfds }))
    }
}

impl AsFd for PathEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl DeviceOps for MultipathDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn describe(&self) -> String {
        let PathRules { policy, hedged_reads, .. } = self.settings.rules();
        let paths = self.path_names().len();
        let hedges = match hedged_reads {
            None => "",
            Some(_) if self.monitors[..paths].iter().flatten().count() > 1 => ", hedged reads",
            Some(_) => ", hedged reads set but of no effect: they need two paths over NVMe/TCP",
        };
        format!("{paths} paths, policy {}{hedges}", policy.name())
    }

    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        let open = |(device, monitor): (&Device, &Option<Arc<PathMonitor>>)| {
            Ok(QueuePath { driver: device.queue(kind, depth)?, monitor: monitor.clone(), node: 0 })
        };
        let paths = self.paths.iter().zip(&self.monitors).map(open).collect::<Result<Vec<_>, DeviceError>>()?;
        let failed = |source| DeviceError::Memory { name: self.info.name.clone(), source };
        let events = PathEvents::new(&paths).map_err(failed)?;
        let queue = MultipathQueue::new(paths, Arc::clone(&self.settings), depth, 0, events);
        self.queue_stats().open.push(Arc::clone(queue.stats()));
        Ok(Box::new(queue))
    }

    fn queues_max(&self) -> usize {
        self.paths.iter().map(|path| path.queues_max()).min().unwrap_or(0)
    }

    fn depth_max(&self) -> usize {
        self.paths.iter().map(|path| path.depth_max()).min().unwrap_or(0)
    }

    /// One region in all, shared: some path may map it, or give it to another process.
    fn memory(&self, parts: usize, bytes: usize) -> io::Result<Vec<(Arc<Region>, u64)>> {
        let part_bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let all = part_bytes.checked_mul(parts).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Region::shared(all)?;
        Ok((0..parts).map(|part| (Arc::clone(&region), (part_bytes * part) as u64)).collect())
    }

    fn dma_domains(&self) -> Vec<Arc<DmaDomain>> {
        self.paths.iter().flat_map(|path| path.dma_domains()).collect()
    }

    fn check_export(&self) -> Result<(), (&'static str, &'static str)> {
        self.paths.iter().try_for_each(|path| path.check_export())
    }

    fn backing(&self) -> io::Result<Backing> {
        let sectors = self.sectors_now().unwrap_or(self.info.capacity_sectors);
        let fixed = ("is reached over several paths", "resize it at its target; the new size is read automatically");
        Ok(Backing::Remote { bytes: sectors << SECTOR_SHIFT, fixed })
    }

    /// The smallest of the paths' sizes: I/O within it succeeds on each. A path that was given up learns of no change,
    /// and counts only if all were.
    fn sectors_now(&self) -> Option<u64> {
        let is_used = |path: &&Device| path.peer().is_none_or(|peer| peer.given_up().is_none());
        let used = self.paths.iter().filter(is_used).filter_map(|path| path.sectors_now()).min();
        used.or_else(|| self.paths.iter().filter_map(|path| path.sectors_now()).min())
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        // By its name and identity.
        let is_remote = |path: &Device| path.handover().is_ok_and(|path| path.file.is_none() && path.ids.is_some());
        if self.paths.iter().all(is_remote) {
            return Ok(DeviceHandover { ids: Some(self.ids), ..DeviceHandover::default() });
        }
        Err("one of its paths belongs to this daemon")
    }

    fn ids(&self) -> NamespaceIds {
        self.ids
    }

    fn paths(&self) -> Vec<DevicePath> {
        let queues = self.queue_stats();
        let view = |(number, name): (usize, String)| {
            let mut counters = queues.closed[number];
            queues.open.iter().for_each(|stats| add(&mut counters, &stats.path(number)));
            let state = self.monitors[number].as_ref().map(|monitor| monitor.state()).unwrap_or_default();
            DevicePath { name, state, loss: self.paths[number].loss(), counters }
        };
        self.path_names().into_iter().enumerate().map(view).collect()
    }

    fn path_settings(&self) -> Option<&MultipathSettings> {
        Some(&self.settings)
    }

    fn has_ended(&self) -> bool {
        self.paths[..self.path_names().len()].iter().all(|path| path.has_ended())
    }
}
