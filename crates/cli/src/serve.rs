//! The command `serve`: opens devices, creates queues and lanes, serves exports until it is stopped.
//!
//! Names, devices and sockets are checked before anything is served. `lanes.rs` places queues on lanes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard::rate::{RateSlot, take_own_rate};
use blkyard::scheduler::take_device_scheduler;
use blkyard::spec::{Spec, SpecError, number, show_size};
use blkyard::{Connector, Device, DeviceError};
use blkyard_export::{
    Acceptor, BackendConfig, BoundSocket, ControlLoop, QUEUES_MAX, SEG_MAX, SessionState, SocketConfig,
    VhostUserServer, VhostUserState, VhostUserTaking, VirtqueueRemote,
};
use blkyard_mem::DmaDomain;
use blkyard_mq::{HeldBack, IdlePolicy, LogLimit};
use blkyard_os::{LaneConfig, RingConfig, Signals, allow_all_descriptors, cpu_places};
use blkyard_virtio::{BlkConfig, SerialId};

use crate::answers;
use crate::control::{ControlPlace, ControlServer};
use crate::daemon::{
    Daemon, DiskPlan, LANES_MAX, QueueMaker, ServedDevice, ServedExport, ServedLanes, SetLanesError, Share, depth_of,
};
use crate::ending::{Parts, StopToken, supervise};
use crate::io_errors::{ErrorLog, tell_rest};
use crate::log::{self, LogFormat, say};
use crate::plan::{MODE_KEY, MODE_WANTED, Plan, Settings, Word, from_file, from_words, parse_mode, unserved};
use crate::qemu;
use crate::receiver::ReceiverProcess;
use crate::takeover::{self, InheritedState};
use crate::threads;
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
    /// ram:SIZE and null:SIZE, memory and a null device: readonly, cache, block_size, latency_us, mbps, discard=on|off,
    /// max_sectors, virt_boundary=on|off.
    ///
    /// chaos:SIZE, memory with injected faults: as ram without mbps; seed; and one in N requests: errors, requeues,
    /// timeouts.
    ///
    /// model:disk, model:flash, model:latency, memory with the service times of a model: size, seed, readonly; cache
    /// for disk and flash; us, jitter_us, iops and mbps for latency.
    ///
    /// Any of them: share=on to give one writable disk to several exports;
    /// scheduler=none|deadline|kyber|timeslice|fair; iops_max=N, bytes_per_s_max=SIZE and burst_ms=N, limits of all its
    /// exports together.
    #[arg(long, value_name = "SPEC")]
    pub device: Vec<String>,
    /// Export of the disk named before: vhost-user-blk:SOCKET. Repeat for more exports.
    ///
    /// Options follow as ?key=value: queues=N (default: one for each CPU), serial=TEXT (up to 20 characters), mode=0660
    /// and group=NAME of the socket, lanes=0,1,... (lane of each queue, in turn), iops_max=N, bytes_per_s_max=SIZE and
    /// burst_ms=N (limits of its queues together).
    #[arg(long, value_name = "SPEC")]
    pub export: Vec<String>,
    /// Replace the running daemon with this control socket, and continue its exports. Guests see a pause; that daemon
    /// ends.
    ///
    /// Devices, exports and control socket are taken over with their settings; lanes, cpus, spin_us and stats unless
    /// they are given. Disks in files and null disks can be handed over.
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
    /// shortens latency and costs CPU. Default: 25.
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

/// One export, ready to be served.
struct ReadyExport {
    name: String,
    socket: Arc<BoundSocket>,
    disk: BlkConfig,
    remotes: Vec<VirtqueueRemote>,
    domains: Vec<Arc<DmaDomain>>,
    serial: SerialId,
    rate: Arc<RateSlot>,
    device: usize,
    /// State inherited from another daemon.
    inherited: Option<Inherited>,
}

/// State of an export inherited from another daemon, beside its socket.
struct Inherited {
    offered: u16,
    depth: Option<usize>,
    wce: bool,
    session: Option<SessionState>,
}

impl ReadyExport {
    /// Serves it, or prepares to continue with it.
    fn start(self, control: &ControlLoop) -> Result<Start, ServeError> {
        let ReadyExport { name, socket, disk, remotes, domains, inherited, .. } = self;
        let config = BackendConfig { name: name.clone(), disk, queues: remotes, domains };
        let Some(Inherited { offered, depth, wce, session }) = inherited else {
            return Ok(Start::Served(VhostUserServer::start_on(control, socket, config)?));
        };
        let taking = VhostUserServer::take_over_on(control, socket, config, offered, wce, session);
        let cure = "the other daemon continues; stop it instead";
        let taking = taking.map_err(|why| SpecError::new(name, format!("it cannot be taken over: {why}"), cure))?;
        if let Some(depth) = depth {
            // Applied as soon as it serves; it cannot fail.
            let _ = taking.server().hand().set_depth(depth);
        }
        Ok(Start::Taking(taking))
    }
}

/// An export that is served, or will be once the other daemon has let go.
enum Start {
    Served(VhostUserServer),
    Taking(VhostUserTaking),
}

impl Start {
    fn server(&self) -> &VhostUserServer {
        match self {
            Start::Served(server) => server,
            Start::Taking(taking) => taking.server(),
        }
    }

    fn go(self) -> VhostUserServer {
        match self {
            Start::Served(server) => server,
            Start::Taking(taking) => taking.go(),
        }
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
    let Some(opened) = open(disks, &patience, inherited.as_mut())? else { return Ok(()) };
    let shares: Vec<Share> = opened.iter().flat_map(|(_, exports)| exports).map(|want| want.share.clone()).collect();
    let queues = shares.iter().map(|share| share.queues).sum();
    let count = args.lanes.map_or_else(|| cpu_places().len().min(queues), |lanes| lanes as usize);
    let lanes = ServedLanes::start(count, shares, lane_configs(args)).map_err(|error| match error {
        SetLanesError::Refused(error) => ServeError::from(error),
        SetLanesError::Lane(error) => error.into(),
    })?;
    let lanes = Arc::new(lanes);
    let mut exports = Vec::new();
    let mut devices = Vec::new();
    for (device, wanted) in opened {
        let device = Arc::new(device);
        for want in wanted {
            let lane_of = lanes.seen(exports.len()).lanes;
            let left = inherited.as_mut().and_then(|inherited| inherited.exports.pop_front());
            let export = bind(&device, devices.len(), want, left, (&lanes, exports.len()), &tracked)?;
            exports.push((export, lane_of));
        }
        devices.push(device);
    }
    introduce(&devices, &exports, count);
    let first = exports.first().map(|(export, _)| export.socket.path());
    let place = args.control.clone().unwrap_or_default();
    let mut control = if inherited.is_none() { place.bind(first)?.map(tracked).transpose()? } else { None };
    let mut watch = Watch::new(exports.len());
    let exports_control = ControlLoop::start()?;
    let mut starts = Parts::new(stop);
    let mut served = Vec::new();
    for (export, _) in exports {
        let queues: Vec<_> = export.remotes.iter().map(VirtqueueRemote::watch).collect();
        let (name, device, serial) = (export.name.clone(), export.device, export.serial);
        let rate = Arc::clone(&export.rate);
        let start = export.start(&exports_control)?;
        let server = start.server();
        served.push(ServedExport {
            name,
            device,
            status: Arc::clone(server.status()),
            hand: server.hand().clone(),
            serial,
            rate,
            queues: Mutex::new(queues),
            depth_max: depth_of(&devices[device].device),
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
    });
    stop.serves(&daemon);
    let control = match control.map(|socket| introduce_control(socket, &daemon)).transpose() {
        Err(error) if took_over => {
            tell_no_control(&error);
            None
        }
        control => control?,
    };
    say("ready");

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
        daemon.exports.iter().for_each(|export| export.status.log_held_back());
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
    servers.iter().for_each(VhostUserServer::ask_to_stop);
    servers.take().into_iter().for_each(VhostUserServer::join);
    // Exports that have ended answer it at once.
    follower.into_iter().for_each(|follower| drop(follower.join()));
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

/// A checked export.
struct Wanted {
    share: Share,
    socket: SocketConfig,
    serial: SerialId,
    rate: RateSlot,
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
    plans: Vec<DiskPlan>,
    patience: &Patience<'_>,
    mut inherited: Option<&mut InheritedState>,
) -> Result<Option<Vec<(ServedDevice, Vec<Wanted>)>>, ServeError> {
    let mut opened = Vec::new();
    let mut exports = 0;
    for mut plan in plans {
        let share = plan.device.take_switch("share")?.unwrap_or(false);
        let scheduler = take_device_scheduler(&mut plan.device)?;
        let rate = take_own_rate(&mut plan.device)?;
        let name = plan.device.name.clone();
        let left = inherited.as_mut().and_then(|inherited| inherited.devices.pop_front());
        let (device, info) = if let Some(mut left) = left {
            let device = Device::adopt(plan.device, left.file.take(), left.sync_failed)?;
            let info = left.info(device.info());
            (device, info)
        } else {
            let Some(device) = patience.open(&plan.device, !plan.exports.is_empty())? else { return Ok(None) };
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
        let mut wanted = Vec::new();
        for export in plan.exports {
            let mut want = want(export, exports, device.queues_max())?;
            if let Some(left) = inherited.as_ref().and_then(|inherited| inherited.exports.get(exports)) {
                want.share.queues = left.made.into();
            }
            want.share.device = opened.len();
            want.share.device_queues = device.queues_max();
            want.share.orders = scheduler.orders();
            wanted.push(want);
            exports += 1;
        }
        opened.push((ServedDevice::new(device, Arc::new(info), scheduler, rate), wanted));
    }
    Ok(Some(opened))
}

fn want(mut spec: Spec, number: usize, queues_max: usize) -> Result<Wanted, ServeError> {
    if spec.scheme != "vhost-user-blk" {
        let cause = format!("unknown kind of export '{}'", spec.scheme);
        return Err(SpecError::new(&spec.name, cause, "use vhost-user-blk:SOCKET").into());
    }
    let queues = spec.take_number("queues", 1, u64::from(QUEUES_MAX))?;
    let usual = || cpu_places().len().min(usize::from(QUEUES_MAX)).min(queues_max);
    let queues = queues.map_or_else(usual, |queues| queues as usize);
    let serial = spec.take("serial").unwrap_or_else(|| format!("blkyard-{number}"));
    let serial = SerialId::new(&serial)
        .map_err(|error| SpecError::new(&spec.name, error, "give up to 20 printable ASCII characters"))?;
    let mode = spec.take_with(MODE_KEY, MODE_WANTED, parse_mode)?;
    let group = spec.take("group").map(|name| group_number(&spec.name, &name)).transpose()?;
    let named = spec.take_with("lanes", "numbers of lanes, such as 0,1", |text| {
        text.split(',').map(|lane| lane.trim().parse::<usize>().ok()).collect::<Option<Vec<_>>>()
    })?;
    let rate = RateSlot::new(take_own_rate(&mut spec)?);
    let name = format!("{}:{}", spec.scheme, spec.body);
    let path = PathBuf::from(&spec.body);
    spec.finish()?;
    let share = Share { name, queues, named, device: 0, device_queues: usize::MAX, orders: false };
    Ok(Wanted { share, socket: SocketConfig { path, mode, group }, serial, rate })
}

/// The number of a group, by its name or number.
fn group_number(object: &str, name: &str) -> Result<u32, SpecError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let mut lines = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = lines.find(|fields| fields.first() == Some(&name)).and_then(|fields| fields.get(2)?.parse().ok());
    found
        .ok_or_else(|| SpecError::new(object, format!("no such group '{name}'"), "name one of /etc/group, or a number"))
}

/// Binds the socket of the export of this number or continues with the inherited one, and creates its queues.
fn bind(
    served: &Arc<ServedDevice>,
    device_index: usize,
    want: Wanted,
    left: Option<VhostUserState>,
    (lanes, export): (&Arc<ServedLanes>, usize),
    tracked: &impl Fn(BoundSocket) -> std::io::Result<Arc<BoundSocket>>,
) -> Result<ReadyExport, ServeError> {
    let info = served.info();
    let Share { name, queues, .. } = want.share;
    let rate = Arc::new(want.rate);
    let maker = QueueMaker {
        lanes: Arc::clone(lanes),
        export,
        device: Arc::clone(served),
        serial: want.serial,
        rate: Arc::clone(&rate),
    };
    maker.register();
    let remotes =
        (0..queues).map(|queue| maker.make(queue)).collect::<Result<Vec<_>, _>>().map_err(ServeError::Queue)?;
    let (socket, inherited) = match left {
        Some(VhostUserState { listener, path, identity, offered, depth, wce, session, .. }) => {
            let socket = BoundSocket::adopt(listener, path, identity);
            (tracked(socket)?, Some(Inherited { offered, depth, wce, session }))
        }
        None => (tracked(BoundSocket::bind(&want.socket)?)?, None),
    };
    let disk = BlkConfig::new(&info, queues as u16, SEG_MAX, info.volatile_cache);
    let domains = served.device.dma_domains();
    Ok(ReadyExport { name, socket, disk, remotes, domains, serial: want.serial, rate, device: device_index, inherited })
}

/// How each lane is made.
fn lane_configs(args: &ServeArgs) -> impl Fn(usize) -> LaneConfig + Send + Sync + 'static {
    let cpus = args.cpus.clone();
    let policy = args.spin_us.map_or_else(IdlePolicy::default, |us| IdlePolicy { spin_ns: us * 1000 });
    move |lane| LaneConfig {
        name: format!("lane{lane}"),
        cpus: (!cpus.is_empty()).then(|| vec![cpus[lane % cpus.len()]]),
        policy,
        ring: RingConfig { outstanding_max: 16_384, pollers_max: 4096, ..RingConfig::default() },
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

/// Prints the exports, and how to attach them.
fn introduce(devices: &[Arc<ServedDevice>], exports: &[(ReadyExport, Vec<usize>)], lanes: usize) {
    /// Exports that are printed, in readable number.
    const INTRODUCED_MAX: usize = 64;
    for (export, lane_of) in exports.iter().take(INTRODUCED_MAX) {
        let device = &devices[export.device].device;
        let info = devices[export.device].info();
        let access = if info.read_only { ", read-only" } else { "" };
        say(format_args!("{}: {}{access}; {}", info.name, show_size(info.capacity_sectors << 9), device.describe()));
        say(format_args!("  on {} with {} queues, on lanes {lane_of:?} of {lanes}", export.name, export.remotes.len()));
    }
    if exports.len() > INTRODUCED_MAX {
        say(format_args!("and {} more exports; blkyard inspect shows them", exports.len() - INTRODUCED_MAX));
    }
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
    let sockets: Vec<_> = exports.iter().map(|(export, _)| absolute(export.socket.path())).collect();
    let queues = exports.iter().map(|(export, _)| export.remotes.len());
    let what = match exports.len() {
        0..=1 => "it".into(),
        2..=qemu::DISKS_MAX => "all disks; each has a -chardev and a -device".into(),
        _ => format!("the first {} disks, its maximum; each has a -chardev and a -device", qemu::DISKS_MAX),
    };
    say(format_args!("start a virtual machine with {what} ({}):", qemu::VERSIONS));
    say(format_args!("  {}", qemu::command(sockets.iter().map(PathBuf::as_path).zip(queues))));
}
