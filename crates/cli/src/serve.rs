//! The command `serve`: opens devices, creates queues and lanes, serves exports until it is stopped.
//!
//! Names, devices and sockets are checked before anything is served. `lanes.rs` places queues on lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard::rate::take_own_rate;
use blkyard::scheduler::take_device_scheduler;
use blkyard::spec::{Spec, SpecError, number, show_size};
use blkyard::tracker::take_device_tracker;
use blkyard::{Connector, Device, DeviceError};
use blkyard_export::{
    Acceptor, BackendConfig, BoundSocket, ControlLoop, NvmeDisk, NvmeTcpExport, SEG_MAX, VfioUserExport,
};
use blkyard_mq::{DeviceInfo, HeldBack, IdlePolicy, LogLimit};
use blkyard_os::{LaneConfig, RingConfig, Signals, allow_all_descriptors, cpu_places};
use blkyard_virtio::BlkConfig;

use crate::answers;
use crate::control::{ControlPlace, ControlServer};
use crate::daemon::{
    ByProtocol, ClientRemotes, ClientState, Daemon, DiskPlan, ExportedDevice, LANES_MAX, LatencyTrackers, QueueMaker,
    ServedDevice, ServedExport, ServedLanes, ServedServer, SetLanesError, Share, ShareDevice, depth_of_all, pin_lane,
    set_path_tracker, usual_tracker,
};
use crate::ending::{Parts, StopToken, supervise};
use crate::io_errors::{ErrorLog, tell_rest};
use crate::log::{self, LogFormat, say};
use crate::notify;
use crate::plan::{Plan, Settings, Word, from_file, from_words, unserved};
use crate::ports::SubsystemPorts;
use crate::qemu::{self, QemuDisk};
use crate::ready::{Inherited, ReadyExport, Start};
use crate::receiver::ReceiverProcess;
use crate::takeover::{self, InheritedState};
use crate::threads;
use crate::wanted::{Wanted, add_namespace, check_is_namespace, want};
use crate::watch::Watch;

pub use crate::error::ServeError;

/// Arguments of `serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Disk to serve, by its name, with options as ?key=value&key=value. Repeat for more disks.
    ///
    /// file:PATH or a bare path, through io_uring: readonly=on|off, direct=auto|on|off (bypass the page cache),
    /// cache=writeback|writethrough, block_size=512|4k.
    ///
    /// vhost-user:SOCKET, a disk that another process serves: queues=N, queue_size=N, packed=on|off, timeout_s (time
    /// limit of an answer), gone_s (time limit of I/O without a back-end).
    ///
    /// vfio-user:SOCKET, a namespace of an NVMe controller that another process serves: namespace=N, queues=N,
    /// poll_queues=N, queue_size=N, shadow_doorbells=on|off, timeout_s and gone_s as above. More devices with the same
    /// address are further namespaces, with no option other than namespace=N.
    ///
    /// nvme-tcp://HOST:PORT/NQN, a namespace of an NVMe controller over TCP: namespace=N, queues=N, poll_queues=N,
    /// queue_size=N, header_digest=on|off, data_digest=on|off, timeout_s=N, keep_alive_s=N, reconnect_delay_s=N,
    /// ctrl_loss_s=N, fast_io_fail_s=N, host_nqn=NQN, secret=FILE (this host's secret, for targets that ask for it),
    /// ctrl_secret=FILE (the target's, which must then authenticate itself), tls_key=FILE (for TLS 1.3; behind the key
    /// may be compat, as for tls_keys= of an export, and v1 for an identity of version 1).
    ///
    /// nvme:/dev/ngXnY, a namespace of the kernel's NVMe driver, by passthrough: readonly=on|off, poll=on|off (poll for
    /// completions in the driver's poll queues).
    ///
    /// pci:ADDRESS, a namespace of an NVMe controller of this machine, through VFIO: unbind=on to take it from the
    /// kernel's driver, iommu=group|iommufd for one interface of the kernel, pin=on to allow exports, other options as
    /// for vfio-user:SOCKET.
    ///
    /// ram:SIZE and null:SIZE, memory and a null device: readonly, cache, block_size, latency_us, mbps, discard=on|off,
    /// max_sectors, virt_boundary=on|off.
    ///
    /// chaos:SIZE, memory with injected faults: as ram without mbps; seed; and one in N requests: errors, requeues,
    /// timeouts.
    ///
    /// model:disk, model:flash, model:latency, memory with the service times of a model: size, seed, readonly; cache
    /// for disk and flash; us, jitter_us, iops and mbps for latency.
    ///
    /// multipath:DEVICE,DEVICE, one disk over several devices that reach the same one:
    /// policy=numa|round-robin|queue-depth|latency|adaptive, no_path_s=N (how long I/O waits without a path), other
    /// options as for each path. nvme-discover://HOST:PORT/NQN, the same over all ports at which the discovery service
    /// (port 8009 by default) and those it refers to offer this NVMe subsystem.
    ///
    /// Any of them: share=on to give one writable disk to several exports;
    /// scheduler=none|deadline|kyber|timeslice|fair; iops_max=N, bytes_per_s_max=SIZE and burst_ms=N, limits of all its
    /// exports together.
    #[arg(long, value_name = "SPEC")]
    pub device: Vec<String>,
    /// Export of the disk named before. Repeat for more exports.
    ///
    /// vhost-user-blk:SOCKET, a virtio-blk disk. vfio-user:SOCKET, a PCI device with an NVMe controller, for QEMU 10.1
    /// or newer and for programs with an NVMe driver. nvme-tcp://ADDRESS:PORT, a namespace of an NVMe subsystem over
    /// TCP, for hosts on the network.
    ///
    /// Options follow as ?key=value: queues=N (default: one for each CPU), serial=TEXT (up to 20 characters), mode=0660
    /// and group=NAME of the socket, lanes=0,1,... (lane of each queue, in turn), iops_max=N, bytes_per_s_max=SIZE and
    /// burst_ms=N (limits of its queues together), scheduler_weight=N (its part of a device with scheduler=fair, from
    /// 10 to 1000; 100 by default).
    ///
    /// A vfio-user or nvme-tcp export with the address of an earlier one adds its device there as one more namespace;
    /// namespace=N sets its identifier (default: the next), and all other options are those of the first.
    ///
    /// vfio-user only: doorbells=message (default) or shared, in memory that the daemon polls, for clients that poll,
    /// such as SPDK; pci_id=VENDOR:DEVICE of the controller, hexadecimal (default: 4e58:0001).
    ///
    /// nvme-tcp only: nqn=NQN of the subsystem (default: from the names of machine and serial number), hosts=NQN,...
    /// that may connect (default: any), secrets=FILE with a line for each host that is authenticated (NQN, its secret
    /// as made by blkyard nvme gen-dhchap-key, and the target's own if it is to authenticate itself; other hosts only
    /// by hosts=), tls_keys=FILE with a line for each host that uses TLS 1.3 (NQN, its key as made by blkyard nvme
    /// gen-tls-key, and compat if an nvme-cli without that option derives it; other hosts only by hosts=; only in a
    /// program built with --features tls), referrals=ADDRESS:PORT,... of other discovery services, remote=on to allow
    /// an address that other machines reach without TLS, queues=N of all hosts together (default: 32). No mode and
    /// group.
    #[arg(long, value_name = "SPEC")]
    pub export: Vec<String>,
    /// Replace the running daemon with this control socket, and continue its exports. Guests see a pause; that daemon
    /// ends.
    ///
    /// Devices, exports and control socket are taken over with their settings; lanes, cpus, spin_us, stats, drain_s and
    /// log_format unless they are given. Disks in files and null disks can be handed over.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["device", "export", "config", "control", "lock_wait_s"])]
    pub takeover: Option<PathBuf>,
    /// Read devices and exports from a TOML file instead: tables `device` and `device.export`, each with spec = "..."
    /// and the options above as keys; at the top lanes, cpus, spin_us, stats, control, lock_wait_s, drain_s and
    /// log_format.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "export"])]
    pub config: Option<PathBuf>,
    /// Print a line for each export every so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = number(1, 86_400))]
    pub stats: Option<u64>,
    /// Threads that do the work. Default: one for each CPU, but no more than there are queues.
    #[arg(long, value_name = "N", value_parser = number(1, LANES_MAX))]
    pub lanes: Option<u64>,
    /// Keep lanes on these CPUs, one after another: 0,1,2,3. Default: the system chooses.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cpus: Vec<u32>,
    /// Longest busy-polling of a lane before it sleeps, microseconds; shorter where it does not pay. A longer time
    /// shortens latency and costs CPU. Default: 25, and 200 while trials show that this pays.
    #[arg(long, value_name = "US", value_parser = number(0, IdlePolicy::SPIN_US_MAX))]
    pub spin_us: Option<u64>,
    /// Control socket for blkyard inspect and set, or none. Default: PID.sock in $XDG_RUNTIME_DIR/blkyard or
    /// /run/blkyard, or SOCKET.control beside the first export.
    #[arg(long, value_name = "PATH", value_parser = |text: &str| Ok::<_, String>(ControlPlace::from(text)))]
    pub control: Option<ControlPlace>,
    /// Time to wait for an image whose lock has no live owner: I/O of a killed daemon must end before its requests are
    /// submitted again. Seconds; default: 60.
    #[arg(long, value_name = "SECONDS", value_parser = number(0, LOCK_WAIT_S_MAX))]
    pub lock_wait_s: Option<u64>,
    /// Time limit for requests in flight after SIGINT or SIGTERM. Then, or at a second signal, the daemon reports the
    /// rest and exits; the front-ends keep their records. Seconds; default: 30.
    #[arg(long, value_name = "SECONDS", value_parser = number(0, DRAIN_S_MAX))]
    pub drain_s: Option<u64>,
    /// Format of the log on standard error: text, or one JSON object a line. Default: text.
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
}

/// Longer than any disk tries to do an operation: Linux gives one of SCSI up after 30 s, and after five more tries.
const LOCK_WAIT_S_MAX: u64 = 3600;
/// One such try of a SCSI disk, and the reset that may follow.
const LOCK_WAIT_S: u64 = 60;
/// Longer than any disk tries to do an operation, as above.
const DRAIN_S_MAX: u64 = 3600;
/// A healthy device is done in less, and service managers kill after 90 s.
const DRAIN_S: u64 = 30;

impl ServeArgs {
    /// These arguments, with defaults from the file.
    fn or(&self, settings: Settings) -> Result<ServeArgs, SpecError> {
        let bounded = |key: &str, value: Option<u64>, min: u64, max: u64| match value {
            Some(value) if !(min..=max).contains(&value) => {
                let cause = format!("{value} is out of range");
                Err(SpecError::new(key, cause, format!("give a number from {min} to {max}")))
            }
            value => Ok(value),
        };
        Ok(ServeArgs {
            device: self.device.clone(),
            export: self.export.clone(),
            takeover: self.takeover.clone(),
            config: self.config.clone(),
            stats: self.stats.or(bounded("stats", settings.stats, 1, 86_400)?),
            lanes: self.lanes.or(bounded("lanes", settings.lanes, 1, LANES_MAX)?),
            cpus: if self.cpus.is_empty() { settings.cpus.unwrap_or_default() } else { self.cpus.clone() },
            spin_us: self.spin_us.or(bounded("spin_us", settings.spin_us, 0, IdlePolicy::SPIN_US_MAX)?),
            control: self.control.clone().or(settings.control),
            lock_wait_s: self.lock_wait_s.or(bounded("lock_wait_s", settings.lock_wait_s, 0, LOCK_WAIT_S_MAX)?),
            drain_s: self.drain_s.or(bounded("drain_s", settings.drain_s, 0, DRAIN_S_MAX)?),
            log_format: self.log_format.or(settings.log_format),
        })
    }
}

/// Serves until SIGINT or SIGTERM.
///
/// # Errors
/// See [`ServeError`]. Requests in flight complete first, within the time limit.
pub fn run(args: &ServeArgs, words: &[Word]) -> Result<(), ServeError> {
    args.log_format.iter().for_each(|format| log::set_format(*format));
    let signals = Signals::install()?.and_hangup()?;
    let (args, words) = (args.clone(), words.to_vec());
    supervise(&signals, move |stop| serve(&args, &words, stop))
}

/// Opens, serves and ends, on a separate thread.
fn serve(args: &ServeArgs, words: &[Word], stop: &StopToken) -> Result<(), ServeError> {
    if let Err(error) = allow_all_descriptors() {
        tracing::warn!("the limit on open files could not be raised: {error}");
    }
    // Before any image is open: it must not keep one from being locked again.
    let receiver = Arc::new(ReceiverProcess::start()?);
    let acceptor: Arc<dyn Acceptor> = Arc::clone(&receiver) as _;
    let tracked = |socket: BoundSocket| Ok(stop.track(socket.accept_through(Arc::clone(&acceptor))?));
    let mut inherited = args.takeover.as_deref().map(takeover::take).transpose()?;
    let Plan { disks, settings } = match (&inherited, &args.config) {
        (Some(inherited), _) => Plan { disks: inherited.disks.clone(), settings: inherited.settings.clone() },
        (None, Some(path)) => from_file(path)?,
        (None, None) if words.is_empty() => {
            Plan { disks: from_words(&default_disk()?)?, settings: Settings::default() }
        }
        (None, None) => Plan { disks: from_words(words)?, settings: Settings::default() },
    };
    let args = &args.or(settings)?;
    args.log_format.iter().for_each(|format| log::set_format(*format));
    let limit = Duration::from_secs(args.lock_wait_s.unwrap_or(LOCK_WAIT_S));
    let patience = Patience { stop, limit, connector: receiver };
    let plans = disks.clone();
    let Some((devices, trackers, wanted)) = open(disks, &patience, inherited.as_mut())? else { return Ok(()) };
    let shares: Vec<Share> = wanted.iter().map(|want| want.share.clone()).collect();
    let queues = shares.iter().map(|share| share.queues).sum();
    let count = args.lanes.map_or_else(|| cpu_places().len().min(queues), |lanes| lanes as usize);
    let lanes = ServedLanes::start(count, shares, lane_configs(args)).map_err(|error| match error {
        SetLanesError::Refused(error) => ServeError::from(error),
        SetLanesError::Lane(error) => error.into(),
    })?;
    let lanes = Arc::new(lanes);
    let mut exports = Vec::new();
    let mut ports = SubsystemPorts::new(&wanted)?;
    let devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
    for want in wanted {
        let lane_of = lanes.seen(exports.len()).lanes;
        let left = inherited.as_mut().and_then(|inherited| inherited.exports.pop_front());
        let export = bind(&devices, want, left, (&lanes, exports.len()), &mut ports, &tracked)?;
        exports.push((export, lane_of));
    }
    introduce(&devices, &exports, count);
    let first = exports.iter().find_map(|(export, _)| export.socket.as_ref()).map(|socket| socket.path());
    let place = args.control.clone().unwrap_or_default();
    let mut control = if inherited.is_none() { place.bind(first)?.map(tracked).transpose()? } else { None };
    let mut watch = Watch::new(exports.len(), devices.len());
    let exports_control = ControlLoop::start()?;
    let mut starts = Parts::new(stop);
    let mut served = Vec::new();
    for (export, _) in exports {
        let queues = export.queues.clone();
        let (name, serial) = (export.name.clone(), export.serial);
        let (of, depth_max) = (export.devices.clone(), depth_of_all(&served_by(&export.devices, &devices)));
        let (rate, weight, ana) = (Arc::clone(&export.rate), Arc::clone(&export.weight), export.ana.clone());
        let start = export.start(&exports_control)?;
        served.push(ServedExport {
            name,
            devices: of,
            front_end: start.front_end(),
            serial,
            rate,
            weight,
            ana,
            queues: Mutex::new(queues),
            depth_max,
        });
        starts.push(start);
    }
    let taken = inherited.map(InheritedState::taken).transpose()?;
    let took_over = taken.is_some();
    let mut servers = Parts::new(stop);
    starts.take().into_iter().map(Start::go).for_each(|server| servers.push(server));
    if let Some((socket, pause)) = taken {
        let [rest, whole] = [pause.rest, pause.whole].map(|time| time.as_secs_f64() * 1e3);
        say(format_args!(
            "took over: guests were paused for {whole:.1} ms, {rest:.1} of them until the requests in flight had completed"
        ));
        control = tracked(socket).map_err(|error| tell_no_control(&error)).ok();
    }
    let daemon = Arc::new(Daemon {
        started: Instant::now(),
        stats_s: args.stats.unwrap_or(0).into(),
        plans,
        cpus: args.cpus.clone(),
        drain_s: args.drain_s.unwrap_or(DRAIN_S),
        is_handed: AtomicBool::new(false),
        devices,
        exports: served,
        lanes,
        trackers,
    });
    stop.serves(&daemon);
    let control = match control.map(|socket| introduce_control(socket, &daemon)).transpose() {
        Err(error) if took_over => {
            tell_no_control(&error);
            None
        }
        control => control?,
    };
    let tracking = LatencyTrackers::start(&daemon)?;
    say("ready");
    notify::ready();

    let mut errors = ErrorLog::new(daemon.devices.len());
    let resize_log = Arc::new(daemon.devices.iter().map(|_| Mutex::default()).collect::<Vec<_>>());
    let mut broken = None;
    let mut seconds = 0;
    let mut follower = None;
    while !stop.wait(Duration::from_secs(1)) {
        if daemon.is_handed.load(Ordering::SeqCst) {
            break;
        }
        seconds += 1;
        if daemon.stats_every().is_some_and(|every| seconds % every == 0) {
            watch.print(&daemon);
        }
        // Not here: it waits for queues, and we are to hear of signals.
        if follower.as_ref().is_none_or(JoinHandle::is_finished) {
            follower = follow_sizes(&daemon, &resize_log).unwrap_or_else(|error| {
                tracing::warn!("the new size of a disk could not be applied: {error}; it is tried again");
                None
            });
        }
        errors.tell(&daemon);
        daemon.exports.iter().for_each(|export| export.front_end.log_held_back());
        if let Some(why) = threads::ended(&daemon, &servers, control.as_ref()) {
            let ours = !daemon.is_handed.load(Ordering::SeqCst);
            broken = ours.then_some(why);
            break;
        }
    }
    if let Some(why) = &broken {
        tracing::error!("{why}; the daemon ends");
        stop.fails(why);
    }
    stop.stops();
    tracing::info!("stopping: draining requests in flight, for {} s at most", daemon.drain_s);
    servers.iter().for_each(ServedServer::ask_to_stop);
    servers.take().into_iter().for_each(ServedServer::join);
    // Exports that have ended answer it at once.
    follower.into_iter().for_each(|follower| drop(follower.join()));
    daemon.trackers.end();
    drop(tracking.join());
    // Serves until here, so that requests in flight can be inspected while the daemon stops. From now on there are
    // none.
    drop(control);
    tell_rest(&daemon);
    // The only other owner has given up waiting, and ends the process.
    if let Some(daemon) = Arc::into_inner(daemon) {
        let Daemon { lanes, devices, .. } = daemon;
        // All that else had them were the exports, which have ended.
        let Some(lanes) = Arc::into_inner(lanes) else { unreachable!("queues of an export outlive it") };
        lanes.join()?;
        stop.drained();
        drop(devices);
    }
    broken.map_or(Ok(()), |why| Err(ServeError::Broken(why)))
}

/// There is no way back after a takeover: the guests are served, and the daemon cannot be inspected.
fn tell_no_control(error: &impl std::fmt::Display) {
    tracing::error!("the daemon took over and has no control socket: {error}; restart it when the guests permit");
}

/// A disk that another process serves may have been resized there: a thread tells its front-ends here, and ends with
/// the daemon. `None` if there is no such disk.
fn follow_sizes(daemon: &Arc<Daemon>, log: &Arc<Vec<Mutex<LogLimit>>>) -> std::io::Result<Option<JoinHandle<()>>> {
    let resized = |served: &Arc<ServedDevice>| {
        // A size of zero is announced to no front-end: I/O on that device fails soon enough.
        served.device.sectors_now().is_some_and(|sectors| ![0, served.info().capacity_sectors].contains(&sectors))
    };
    if !daemon.devices.iter().any(resized) {
        return Ok(None);
    }
    let (daemon, log) = (Arc::clone(daemon), Arc::clone(log));
    let follow = move || {
        let resized = daemon.devices.iter().enumerate().filter(|(_, served)| resized(served));
        resized.for_each(|(number, _)| follow_size(&daemon, number, &log[number]));
    };
    std::thread::Builder::new().name("resize".into()).spawn(follow).map(Some)
}

fn follow_size(daemon: &Daemon, number: usize, log: &Mutex<LogLimit>) {
    // It has that size already, even if data is lost.
    let values = [("size", "probe"), ("force", "on")].map(|(key, value)| (key.into(), value.into()));
    let done = crate::set::apply(daemon, &format!("device:{number}"), values.into());
    let pass = || log.lock().unwrap_or_else(PoisonError::into_inner).pass(Instant::now()).map(HeldBack);
    // The back-end resizes its disk as often as it likes.
    let Some(held_back) = pass() else { return };
    match done {
        Ok(done) => tracing::info!("{}{held_back}", done.join("; ")),
        Err(why) => tracing::warn!("{why}{held_back}"),
    }
}

/// How long we wait for images.
struct Patience<'a> {
    /// By which the user ends it.
    stop: &'a StopToken,
    limit: Duration,
    /// Connects to back-ends.
    connector: Arc<dyn Connector>,
}

impl Patience<'_> {
    /// Opens the device of this number. Later ones with the same address, if those share a connection, are opened with
    /// it and put among `siblings`. `None` after a stop.
    fn open_all(
        &self,
        specs: &[Spec],
        number: usize,
        is_served: bool,
        siblings: &mut BTreeMap<usize, Device>,
    ) -> Result<Option<Device>, ServeError> {
        let spec = &specs[number];
        let is_same = |other: &Spec| other.scheme == spec.scheme && other.body == spec.body;
        let all: Vec<_> = (number..specs.len()).filter(|other| is_same(&specs[*other])).collect();
        if all.len() == 1 || !Device::shares_connection(spec) {
            return self.open(spec, is_served);
        }
        let specs = all.iter().map(|number| specs[*number].clone()).collect();
        let mut opened = Device::open_all(specs, || Ok(Arc::clone(&self.connector)))?.into_iter();
        let device = opened.next();
        siblings.extend(all.into_iter().skip(1).zip(opened));
        Ok(device)
    }

    /// Opens a device. While its image is locked without a visible owner, it is tried again, unless it has no export.
    /// `None` after a stop.
    fn open(&self, spec: &Spec, is_served: bool) -> Result<Option<Device>, ServeError> {
        let start = Instant::now();
        let mut told = false;
        loop {
            match Device::through(spec.clone(), || Ok(Arc::clone(&self.connector))) {
                Err(DeviceError::Held(_)) if !is_served => return Err(unserved(&spec.name).into()),
                Err(DeviceError::Held(_)) if start.elapsed() < self.limit => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(
                            "{}: waiting for its lock, up to {} s: no process is known to hold it, so a dead daemon may have I/O in flight",
                            spec.name,
                            self.limit.as_secs()
                        );
                    }
                    if self.stop.is_requested() {
                        return Ok(None);
                    }
                }
                opened => {
                    if told && opened.is_ok() {
                        tracing::info!("{}: locked after {:.1} s", spec.name, start.elapsed().as_secs_f64());
                    }
                    return Ok(Some(opened?));
                }
            }
        }
    }
}

/// Opens every device and checks every export; `None` after a stop.
fn open(
    mut plans: Vec<DiskPlan>,
    patience: &Patience<'_>,
    mut inherited: Option<&mut InheritedState>,
) -> Result<Option<(Vec<ServedDevice>, LatencyTrackers, Vec<Wanted>)>, ServeError> {
    let mut opened = Vec::new();
    let trackers = LatencyTrackers::default();
    let mut wanted: Vec<Wanted> = Vec::new();
    let take = |plan: &mut DiskPlan| -> Result<_, SpecError> {
        let share = plan.device.take_switch("share")?.unwrap_or(false);
        let scheduler = take_device_scheduler(&mut plan.device)?;
        Ok((share, scheduler, take_own_rate(&mut plan.device)?, take_device_tracker(&mut plan.device)?))
    };
    let options = plans.iter_mut().map(take).collect::<Result<Vec<_>, _>>()?;
    let specs: Vec<_> = plans.iter().map(|plan| plan.device.clone()).collect();
    // By number, those opened together with an earlier one.
    let mut siblings = BTreeMap::new();
    for (number, (plan, (share, scheduler, rate, tracker))) in plans.into_iter().zip(options).enumerate() {
        let name = plan.device.name.clone();
        let left = inherited.as_mut().and_then(|inherited| inherited.devices.pop_front());
        let (device, info) = if let Some(mut left) = left {
            let device = Device::adopt(plan.device, std::mem::take(&mut left.received))?;
            left.check(&device)?;
            let info = left.info(device.info());
            (device, info)
        } else {
            let device = match siblings.remove(&number) {
                Some(device) => device,
                None => match patience.open_all(&specs, number, !plan.exports.is_empty(), &mut siblings)? {
                    Some(device) => device,
                    None => return Ok(None),
                },
            };
            if !plan.exports.is_empty() {
                device.can_be_exported()?;
            }
            let info = device.info().clone();
            (device, info)
        };
        if plan.exports.is_empty() {
            return Err(unserved(&name).into());
        }
        if plan.exports.len() > 1 && !share && !device.info().read_only {
            let cause = format!("{} exports would write to one disk", plan.exports.len());
            let cure = "add ?readonly=on, or ?share=on if the guests coordinate their writes; others destroy its data";
            return Err(SpecError::new(name, cause, cure).into());
        }
        let (number, queues, orders) = (opened.len(), device.queues_max(), scheduler.orders());
        let pool_of = |device: &Device| device.queue_pool().map(|member| member.pool);
        let is_of_same =
            |earlier: &ServedDevice| pool_of(&earlier.device).is_some_and(|pool| pool_of(&device) == Some(pool));
        let of = ShareDevice { number, pool: opened.iter().position(is_of_same).unwrap_or(number), queues, orders };
        for export in plan.exports {
            let Some(export) = add_namespace(&mut wanted, export, of)? else { continue };
            let mut want = want(export, wanted.len(), of)?;
            if let Some(left) = inherited.as_ref().and_then(|inherited| inherited.exports.get(wanted.len())) {
                want.share.queues = left.made.into();
            }
            wanted.push(want);
        }
        let tracker = tracker(usual_tracker(&info));
        set_path_tracker(&device, tracker);
        trackers.set(opened.len(), tracker);
        opened.push(ServedDevice::new(device, Arc::new(info), scheduler, rate));
    }
    Ok(Some((opened, trackers, wanted)))
}

/// The devices of an export.
fn served_by(of: &[ExportedDevice], devices: &[Arc<ServedDevice>]) -> Vec<Arc<ServedDevice>> {
    of.iter().map(|of| Arc::clone(&devices[of.device])).collect()
}

/// Binds the socket of the export of this number or continues with the inherited one, and creates its queues.
fn bind(
    devices: &[Arc<ServedDevice>],
    want: Wanted,
    left: Option<ClientState>,
    (lanes, export): (&Arc<ServedLanes>, usize),
    ports: &mut SubsystemPorts,
    tracked: &impl Fn(BoundSocket) -> std::io::Result<Arc<BoundSocket>>,
) -> Result<ReadyExport, ServeError> {
    let served = served_by(&want.devices, devices);
    let infos: Vec<_> = served.iter().map(|served| served.info()).collect();
    let Share { name, queues, .. } = want.share;
    let (rate, weight) = (Arc::new(want.rate), Arc::new(want.weight));
    let maker = QueueMaker {
        lanes: Arc::clone(lanes),
        export,
        protocol: want.protocol,
        devices: served.clone(),
        serial: want.serial,
        rate: Arc::clone(&rate),
        weight: Arc::clone(&weight),
    };
    maker.register();
    if !matches!(want.protocol, ByProtocol::VhostUser(())) {
        infos.iter().try_for_each(|info| check_is_namespace(&name, info))?;
    }
    let (remotes, problem) = maker.make_all(0..queues);
    problem.map_or(Ok(()), |why| Err(ServeError::Queue(why)))?;
    let mut left_listener = None;
    let (socket, inherited) = match left {
        None if want.target.is_some() => (None, None),
        Some(ClientState { listener, path, identity, offered, depth, wce, session, .. }) => {
            let socket = if want.target.is_some() {
                left_listener = Some(TcpListener::from(listener));
                None
            } else {
                Some(tracked(BoundSocket::adopt(listener, path, identity))?)
            };
            (socket, Some(Inherited { offered, depth, wce, session }))
        }
        None => (Some(tracked(BoundSocket::bind(&want.socket)?)?), None),
    };
    let watches = remotes.watches();
    let domains = served.iter().flat_map(|served| served.device.dma_domains()).collect();
    let namespaces = || {
        let of = want.devices.iter().zip(&infos);
        of.map(|(of, info)| (of.nsid.unwrap_or(1), DeviceInfo::clone(info))).collect::<Vec<_>>()
    };
    let mut ana = None;
    let config = match remotes {
        ClientRemotes::VhostUser(remotes) => {
            let info = &infos[0];
            let disk = BlkConfig::new(info, queues as u16, SEG_MAX, info.volatile_cache);
            ByProtocol::VhostUser(BackendConfig { name: name.clone(), disk, queues: remotes, domains })
        }
        ClientRemotes::NvmeTcp(remotes) => {
            let Some(target) = want.target else { unreachable!("a target has an address") };
            let serial = want.serial.to_string();
            let (disk, states, listener) =
                ports.bind(&name, target, left_listener, namespaces(), (queues as u16, serial))?;
            ana = Some(states);
            let config = NvmeTcpExport { name: name.clone(), disk, queues: remotes, domains };
            ByProtocol::NvmeTcp((config, listener))
        }
        ClientRemotes::VfioUser(remotes) => {
            let namespaces = namespaces();
            let path = std::path::absolute(&want.socket.path).unwrap_or_else(|_| want.socket.path.clone());
            let disk = NvmeDisk::of_namespaces(namespaces, queues as u16, want.serial.to_string())
                .with_name(path.to_string_lossy())
                .with_doorbells(want.doorbells)
                .with_pci_id(want.pci_id);
            ByProtocol::VfioUser(VfioUserExport { name: name.clone(), disk, queues: remotes, domains })
        }
    };
    let (serial, devices) = (want.serial, want.devices);
    Ok(ReadyExport { name, socket, config, queues: watches, serial, rate, weight, devices, ana, inherited })
}

/// How each lane is made.
fn lane_configs(args: &ServeArgs) -> impl Fn(usize) -> LaneConfig + Send + Sync + 'static {
    let (cpus, machine) = (args.cpus.clone(), cpu_places());
    let policy = args.spin_us.map_or_else(IdlePolicy::default, |us| IdlePolicy::up_to(us * 1000));
    move |lane| {
        let (cpus, node) = pin_lane(&cpus, &machine, lane);
        let ring = RingConfig { outstanding_max: 16_384, pollers_max: 4096, ..RingConfig::default() };
        LaneConfig { name: format!("lane{lane}"), cpus, node, policy, ring }
    }
}

/// The default disk.
fn default_disk() -> Result<[Word; 2], ServeError> {
    const BYTES: u64 = 1 << 30;
    let path = Path::new("blkyard.img");
    let failed = |source| ServeError::Image { path: path.into(), source };
    match std::fs::File::create_new(path) {
        Ok(image) => {
            image.set_len(BYTES).map_err(|error| {
                // Left behind, it would be used as a disk the next time.
                let _ = std::fs::remove_file(path);
                failed(error)
            })?;
            say(format_args!("made {}, {} sparse", path.display(), show_size(BYTES)));
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    Ok([Word::Device("file:blkyard.img".into()), Word::Export("vhost-user-blk:blkyard.sock".into())])
}

/// Answers at the control socket, and says how to reach it.
fn introduce_control(socket: Arc<BoundSocket>, daemon: &Arc<Daemon>) -> Result<ControlServer, ServeError> {
    let path = std::path::absolute(socket.path()).unwrap_or_else(|_| socket.path().into());
    say("inspect it with");
    say(format_args!("  blkyard inspect --control {}", path.display()));
    Ok(answers::serve(socket, Arc::clone(daemon))?)
}

/// The lanes of queues, each once: an export may have dozens of queues.
fn show_lanes(lane_of: &[usize]) -> String {
    let lanes: BTreeSet<_> = lane_of.iter().collect();
    let numbers: Vec<_> = lanes.iter().map(ToString::to_string).collect();
    format!("{} {}", if lanes.len() == 1 { "lane" } else { "lanes" }, numbers.join(", "))
}

/// Prints the exports, and how to attach them.
fn introduce(devices: &[Arc<ServedDevice>], exports: &[(ReadyExport, Vec<usize>)], lanes: usize) {
    /// Exports that are printed, in readable number.
    const INTRODUCED_MAX: usize = 64;
    for (export, lane_of) in exports.iter().take(INTRODUCED_MAX) {
        for of in &export.devices {
            let (device, info) = (&devices[of.device].device, devices[of.device].info());
            let access = if info.read_only { ", read-only" } else { "" };
            let nsid = of.nsid.filter(|_| export.devices.len() > 1);
            let nsid = nsid.map(|nsid| format!("namespace {nsid}: ")).unwrap_or_default();
            let size = show_size(info.capacity_sectors << 9);
            say(format_args!("{nsid}{}: {size}{access}; {}", info.name, device.describe()));
        }
        let queues = export.queues.len();
        say(format_args!("  on {} with {queues} queues, on {} of {lanes}", export.name, show_lanes(lane_of)));
    }
    if exports.len() > INTRODUCED_MAX {
        say(format_args!("and {} more exports; blkyard inspect shows them", exports.len() - INTRODUCED_MAX));
    }
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
    for (export, _) in exports.iter().take(INTRODUCED_MAX) {
        if let ByProtocol::NvmeTcp((config, listener)) = &export.config
            && let Ok(address) = listener.local_addr()
        {
            let (ip, port, nqn) = (address.ip(), address.port(), config.disk.nqn());
            let tls = if config.disk.has_tls() { " --tls" } else { "" };
            say(format_args!("connect to {} with\n  nvme connect -t tcp -a {ip} -s {port} -n {nqn}{tls}", export.name));
        }
    }
    let local: Vec<_> = exports.iter().filter_map(|(export, _)| Some((export, export.socket.as_ref()?))).collect();
    if local.is_empty() {
        return;
    }
    let sockets: Vec<_> = local.iter().map(|(_, socket)| absolute(socket.path())).collect();
    let disks = local.iter().zip(&sockets).map(|((export, _), socket)| QemuDisk {
        socket,
        queues: export.queues.len(),
        is_nvme: matches!(export.config, ByProtocol::VfioUser(_)),
    });
    let what = match local.len() {
        0..=1 => "it".into(),
        2..=qemu::DISKS_MAX => "all disks; each has a -device of its own".into(),
        _ => format!("the first {} disks, its maximum; each has a -device of its own", qemu::DISKS_MAX),
    };
    let versions = qemu::versions(disks.clone());
    say(format_args!("start a virtual machine with {what} ({versions}):"));
    say(format_args!("  {}", qemu::command(disks)));
}
