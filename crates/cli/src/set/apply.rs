//! Executes `set` on a running daemon: sizes, limits, queues, lanes.
//!
//! Runs on the thread of the control socket, and on the one that follows the size of a disk. Everything is checked
//! before any change. Changes for which a queue must drain are made by the thread of its export; here they are waited
//! for, for a bounded time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use blkyard::Backing;
use blkyard::rate::{describe, take_rate};
use blkyard::scheduler::take_scheduler;
use blkyard::spec::{Spec, SpecError, show_size};
use blkyard::tracker::{take_tracker, tracker_options};
use blkyard_export::{Changed, QUEUES_MAX};
use blkyard_mpath::{HedgeConfig, PolicyKind};
use blkyard_mq::{DeviceInfo, IdlePolicy, SECTOR_SHIFT, SchedulerConfig};
use blkyard_nvme::{AnaGroups, AnaState};
use blkyard_os::Moves;

use super::size::Resize;
use crate::control::{PartKind, Target};
use crate::daemon::{
    ClientRemotes, Daemon, LANES_MAX, Protocol, QueueMaker, ServedDevice, ServedExport, ServedLanes, set_path_tracker,
    take_weight, usual_tracker,
};
use crate::inspect::show_time;
use crate::wanted::ANA_STATES;

/// Time limit of exports for a change. Requests in flight complete first, so it takes as long as the slowest.
const CHANGE_TIME: Duration = Duration::from_secs(20);

/// Sets `values` of the part that is called `what`. Returns the changes as text.
///
/// # Errors
/// Names part, cause and cure. Nothing has changed then, unless the error says so.
pub fn apply(daemon: &Daemon, what: &str, values: BTreeMap<String, String>) -> Result<Vec<String>, String> {
    let target: Target = what.parse().map_err(|error: SpecError| error.to_string())?;
    if values.is_empty() {
        return Err(SpecError::new(target, "no setting is given", "write it as key=value").to_string());
    }
    let keys = Spec::of_options(&target.to_string(), values);
    let done = match target.kind {
        PartKind::Daemon => set_daemon(daemon, keys),
        PartKind::Device => the_one(&target, daemon.devices.iter().map(|device| device.device.info().name.as_str()))
            .map_err(Problem::from)
            .and_then(|number| set_device(daemon, number, keys)),
        PartKind::Export => the_one(&target, daemon.exports.iter().map(|export| export.name.as_str()))
            .map_err(Problem::from)
            .and_then(|number| set_export(daemon, number, keys)),
        PartKind::Lane => Err(SpecError::new(target, "a single lane has no settings", "use blkyard set daemon").into()),
    };
    done.map_err(|Problem(text)| text)
}

/// Cause of a failed change.
struct Problem(String);

impl From<SpecError> for Problem {
    fn from(error: SpecError) -> Problem {
        Problem(error.to_string())
    }
}

/// The number of the one part that is meant.
fn the_one<'a>(target: &Target, names: impl Iterator<Item = &'a str>) -> Result<usize, SpecError> {
    let meant: Vec<_> = names.enumerate().filter(|(number, name)| target.means(*number, name)).collect();
    match meant[..] {
        [(number, _)] => Ok(number),
        [] => Err(SpecError::new(target, "the daemon has no part of that name", "blkyard inspect lists all")),
        _ => {
            let all: Vec<_> = meant.iter().map(|(number, name)| format!("{number} ({name})")).collect();
            Err(SpecError::new(target, format!("the name is ambiguous: {}", all.join(", ")), "name one by its number"))
        }
    }
}

/// `spin_us`: a bound in microseconds, or `auto`.
fn take_idle_policy(keys: &mut Spec) -> Result<Option<IdlePolicy>, SpecError> {
    let read = |text: &str| match text {
        "auto" => Some(IdlePolicy::default()),
        _ => {
            text.parse::<u64>().ok().filter(|us| *us <= IdlePolicy::SPIN_US_MAX).map(|us| IdlePolicy::up_to(us * 1000))
        }
    };
    keys.take_with("spin_us", &format!("auto, or a number from 0 to {}", IdlePolicy::SPIN_US_MAX), read)
}

fn set_daemon(daemon: &Daemon, mut keys: Spec) -> Result<Vec<String>, Problem> {
    let stats = keys.take_number("stats", 0, 86_400)?;
    let lanes = keys.take_number("lanes", 1, LANES_MAX)?;
    let policy = take_idle_policy(&mut keys)?;
    keys.finish()?;
    let mut done = Vec::new();
    // First, since it is the one that may fail.
    if let Some(lanes) = lanes {
        // The options with which queues are made must not change meanwhile.
        let _alone: Vec<_> = daemon.devices.iter().map(|device| device.change()).collect();
        done.push(set_lanes(&daemon.lanes, lanes)?);
    }
    if let Some(policy) = policy {
        daemon.lanes.set_idle_policy(policy).map_err(|error| Problem(format!("daemon: spin_us: {error}")))?;
        done.push(match policy.spin_ns / 1000 {
            _ if policy == IdlePolicy::default() => "daemon: lanes busy-poll for as long as it pays".into(),
            0 => "daemon: lanes sleep as soon as they find no work".into(),
            us => format!("daemon: lanes busy-poll for {us} us before they sleep"),
        });
    }
    if let Some(seconds) = stats {
        daemon.stats_s.store(seconds, Relaxed);
        done.push(match seconds {
            0 => "daemon: statistics are off".into(),
            _ => format!("daemon: statistics are printed every {seconds} s"),
        });
    }
    Ok(done)
}

/// Changes the number of lanes, and says which queues that moved.
fn set_lanes(lanes: &ServedLanes, count: u64) -> Result<String, Problem> {
    let before = lanes.count();
    let moves = lanes.set_lanes(count).map_err(|error| Problem(format!("daemon: lanes={count}: {error}")))?;
    let moved = moved(moves);
    Ok(format!("daemon: lanes: {before} before, {count} now; {moved}"))
}

/// Which queues moved, in words.
fn moved(moves: Moves) -> String {
    let longest = show_time(u64::try_from(moves.longest.as_nanos()).unwrap_or(u64::MAX));
    match moves.count {
        0 => "no queue moved".into(),
        1 => format!("1 queue moved, paused for {longest} at most"),
        n => format!("{n} queues moved, paused for {longest} at most"),
    }
}

fn set_device(daemon: &Daemon, number: usize, mut keys: Spec) -> Result<Vec<String>, Problem> {
    let served = &daemon.devices[number];
    let (name, made) = (keys.name.clone(), served.device.info());
    let exports: Vec<_> = daemon.exports.iter().filter(|export| export.place_of(number).is_some()).collect();
    let block_sectors = made.limits.logical_block_bytes >> SECTOR_SHIFT;
    let depth_max = exports.iter().map(|export| export.depth_max).min().unwrap_or(1);

    let size = keys.take("size");
    let force = keys.take_switch("force")?.unwrap_or(false);
    let sectors_max = keys.take_number("sectors_max", u64::from(block_sectors), u64::from(made.limits.sectors_max))?;
    let depth = keys.take_number("depth", 1, depth_max as u64)?;
    let scheduler = take_scheduler(&mut keys, served.scheduler())?;
    let rate = take_rate(&mut keys, served.rate.config())?;
    let tracker = take_tracker(&mut keys, daemon.trackers.config(number), usual_tracker(made))?;
    let policies = PolicyKind::ALL.map(PolicyKind::name).join(", ");
    let policy = keys.take_with("policy", &format!("one of {policies}"), |name| name.parse::<PolicyKind>().ok())?;
    let hedged_reads = keys.take_switch("hedged_reads")?;
    let suspended = keys.take_switch("suspended")?;
    keys.finish()?;
    if (policy.is_some() || hedged_reads.is_some()) && served.device.path_settings().is_none() {
        let cause = "policy and hedged_reads are for several paths, and this device has one";
        return Err(SpecError::new(name, cause, "open it as multipath:DEVICE,DEVICE").into());
    }
    if force && size.is_none() {
        return Err(SpecError::new(name, "force=on needs a size", "add size=SIZE").into());
    }

    // A separate thread follows the size of a disk that another process serves.
    let _alone = served.change();
    let mut info = (*served.info()).clone();
    let mut done = Vec::new();
    if let Some(sectors_max) = sectors_max {
        info.limits.sectors_max = sectors_max as u32;
        info.limits.check().map_err(|error| SpecError::new(&name, error, "choose a multiple of the block"))?;
        done.push(format!("{name}: requests have at most {sectors_max} sectors"));
    }
    if let Some(request) = size {
        let in_use = exports.iter().any(|export| export.front_end.is_connected());
        done.push(resize(served, &name, &mut info, &request, in_use, force)?);
    }
    let mut problems = Vec::new();
    if !done.is_empty() {
        let info = Arc::new(info);
        served.set_info(Arc::clone(&info));
        change(&exports, number, &info, &mut done, &mut problems);
    }
    if let Some(depth) = depth {
        bound(&exports, depth as usize, &mut done, &mut problems);
    }
    if let Some(scheduler) = scheduler {
        served.set_scheduler(scheduler);
        let ask = |export: &&ServedExport| {
            let scheduler = export.weight.of(scheduler);
            export.front_end.schedule(export.place_of(number).unwrap_or(0), scheduler)
        };
        let asked: Vec<_> = exports.iter().map(ask).collect();
        for (export, answer) in wait_for_all(&exports, asked) {
            match answer {
                Ok(()) => {
                    done.push(format!("{export}: scheduler {} orders waiting I/O", scheduler.name()));
                }
                Err(why) => problems.push(format!("{export}: {why}")),
            }
        }
        let placed = daemon.lanes.set_orders(number, scheduler.orders());
        match placed {
            Ok(moves) if moves.count > 0 => done.push(format!("{name}: {}", moved(moves))),
            Ok(_) => {}
            Err(error) => problems.push(error.to_string()),
        }
    }
    if let (Some(policy), Some(settings)) = (policy, served.device.path_settings()) {
        settings.change(|rules| rules.policy = policy);
        done.push(format!("{name}: policy {} chooses the path of each I/O", policy.name()));
    }
    if let (Some(are_hedged), Some(settings)) = (hedged_reads, served.device.path_settings()) {
        settings.change(|rules| rules.hedged_reads = are_hedged.then(HedgeConfig::default));
        let what = if are_hedged {
            "a read that is late on its NVMe/TCP path is sent to another one as well"
        } else {
            "reads are not hedged"
        };
        done.push(format!("{name}: {what}"));
    }
    if let Some(suspended) = suspended {
        match served.device.set_suspended(suspended) {
            Ok(()) if suspended => done.push(format!("{name}: its controller is shut down, and I/O waits")),
            Ok(()) => done.push(format!("{name}: its controller is up, and I/O goes on")),
            Err(error) => problems.push(error.to_string()),
        }
    }
    if let Some(rate) = rate {
        served.rate.set(rate);
        done.push(format!("{name}: {}", describe(rate)));
        limit(daemon, &exports, &mut problems);
    }
    // With the same settings it keeps what it has learned.
    if tracker != daemon.trackers.config(number) {
        daemon.trackers.set(number, tracker);
        set_path_tracker(&served.device, tracker);
        let words = tracker_options(tracker).into_iter().filter_map(|(key, value)| Some(format!("{key} {}", value?)));
        let words = words.collect::<Vec<_>>().join(", ");
        done.push(match tracker {
            None => format!("{name}: its latency is not tracked"),
            Some(_) => format!("{name}: its latency is tracked: {words}"),
        });
    }
    if problems.is_empty() { Ok(done) } else { Err(Problem([done, problems].concat().join("\n"))) }
}

/// Decides about another size, grows the file if it takes that, and notes the size in `info`.
fn resize(
    served: &ServedDevice,
    name: &str,
    info: &mut DeviceInfo,
    request: &str,
    in_use: bool,
    force: bool,
) -> Result<String, SpecError> {
    let made = served.device.info();
    let now_bytes = info.capacity_sectors << SECTOR_SHIFT;
    let unknown =
        |error| SpecError::new(name, format!("its length cannot be read: {error}"), "check that it still exists");
    let backing = served.device.backing().map_err(unknown)?;
    let resize =
        Resize { object: name, now_bytes, block_bytes: made.limits.logical_block_bytes, backing, in_use, force };
    let decision = resize.decide(request)?;
    if decision.grows_file {
        served.device.grow(decision.bytes).map_err(|error| {
            let cause = format!("the file cannot be grown to {}: {error}", show_size(decision.bytes));
            SpecError::new(name, cause, "check the limits of the file system; the size is unchanged")
        })?;
    }
    info.capacity_sectors = decision.bytes >> SECTOR_SHIFT;
    let file = match backing {
        _ if decision.grows_file => "; the file was grown".into(),
        Backing::File { bytes, .. } if bytes > decision.bytes => format!("; the file keeps its {}", show_size(bytes)),
        _ => String::new(),
    };
    Ok(format!("{name}: {} now, {} before{file}", show_size(decision.bytes), show_size(now_bytes)))
}

/// Has all these exports serve the device as it is now.
fn change(
    exports: &[&ServedExport],
    device: usize,
    info: &Arc<DeviceInfo>,
    done: &mut Vec<String>,
    problems: &mut Vec<String>,
) {
    let ask = |export: &&ServedExport| export.front_end.change(export.place_of(device).unwrap_or(0), Arc::clone(info));
    let asked: Vec<_> = exports.iter().map(ask).collect();
    for (export, answer) in wait_for_all(exports, asked) {
        match answer {
            Ok(Changed::Unseen) => done.push(format!("{export}: no front-end is connected; the next one reads the new size")),
            Ok(Changed::Silent) => done.push(format!("{export}: in force")),
            Ok(Changed::Told) => done.push(format!("{export}: its front-end was notified")),
            Ok(Changed::Untold) => done.push(format!(
                "{export}: its front-end has no back-end channel; it sees the size when it reads the configuration or connects again"
            )),
            Err(why) => problems.push(format!("{export}: {why}")),
        }
    }
}

/// Bounds the requests in flight of each queue of these exports.
fn bound(exports: &[&ServedExport], depth: usize, done: &mut Vec<String>, problems: &mut Vec<String>) {
    let asked: Vec<_> = exports.iter().map(|export| export.front_end.set_depth(depth)).collect();
    for (export, answer) in wait_for_all(exports, asked) {
        match answer {
            Ok(depth) => done.push(format!("{export}: each queue has at most {depth} requests in flight")),
            Err(why) => problems.push(format!("{export}: {why}")),
        }
    }
}

/// Has these exports pass the limits that hold for them by now.
fn limit(daemon: &Daemon, exports: &[&ServedExport], problems: &mut Vec<String>) {
    let (mut of_export, mut asked) = (Vec::new(), Vec::new());
    for export in exports {
        for (place, of) in (0..).zip(&export.devices) {
            of_export.push(*export);
            asked.push(export.front_end.set_rates(place, daemon.devices[of.device].rates(&export.rate)));
        }
    }
    for (export, answer) in wait_for_all(&of_export, asked) {
        problems.extend(answer.err().map(|why| format!("{export}: {why}")));
    }
}

/// Gives an export another weight, with all devices that it serves.
fn weigh(daemon: &Daemon, export: &ServedExport, weight: u16, done: &mut Vec<String>, problems: &mut Vec<String>) {
    if weight == export.weight.get() {
        // Its schedulers keep what they have learned.
        return done.push(format!("{export}: its weight is {weight} already"));
    }
    export.weight.set(weight);
    let (mut of_export, mut asked) = (Vec::new(), Vec::new());
    for (place, of) in (0..).zip(&export.devices) {
        let scheduler = export.weight.of(daemon.devices[of.device].scheduler());
        if matches!(scheduler, SchedulerConfig::Fair(_)) {
            of_export.push(export);
            asked.push(export.front_end.schedule(place, scheduler));
        }
    }
    let when = if asked.is_empty() { ", once its device has scheduler=fair" } else { "" };
    done.push(format!("{export}: its weight is {weight}{when}"));
    for (export, answer) in wait_for_all(&of_export, asked) {
        problems.extend(answer.err().map(|why| format!("{export}: {why}")));
    }
}

/// The answers of exports that were all asked at once, with their names.
fn wait_for_all<T>(
    exports: &[&ServedExport],
    asked: Vec<Receiver<Result<T, String>>>,
) -> Vec<(String, Result<T, String>)> {
    let until = Instant::now() + CHANGE_TIME;
    let wait = |asked| wait_until(until, &asked).map_err(|unchanged| unchanged.why);
    exports.iter().map(ToString::to_string).zip(asked.into_iter().map(wait)).collect()
}

/// Why an export did not change.
struct Unchanged {
    why: String,
    /// It still may, later.
    is_pending: bool,
}

/// The answer of an export.
fn wait_until<T>(until: Instant, asked: &Receiver<Result<T, String>>) -> Result<T, Unchanged> {
    let (why, is_pending) = match asked.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(why)) => (format!("{why}; see the daemon's log"), false),
        Err(RecvTimeoutError::Disconnected) => ("its thread has ended; see the daemon's log".into(), false),
        Err(RecvTimeoutError::Timeout) => (
            format!(
                "not within {CHANGE_TIME:?}: a request in flight does not complete; the change is made once it has"
            ),
            true,
        ),
    };
    Err(Unchanged { why, is_pending })
}

/// The ANA groups whose state is to change, and that state.
fn take_ana(keys: &mut Spec, export: &ServedExport) -> Result<Option<(Vec<u32>, AnaState)>, SpecError> {
    let state = keys.take_with("ana_state", ANA_STATES, AnaState::from_name)?;
    let group = keys.take_number("ana_group", 1, AnaGroups::GROUPS_MAX.into())?;
    let no = |cause: String, cure: &str| Err(SpecError::new(&keys.name, cause, cure));
    let Some(state) = state else {
        return group.map_or(Ok(None), |_| no("ana_group=N needs a state".into(), "add ana_state=STATE"));
    };
    let Some(ana) = &export.ana else {
        return no("it has no ANA groups".into(), "only exports over NVMe/TCP have them");
    };
    let mut groups = ana.groups().to_vec();
    groups.sort_unstable();
    groups.dedup();
    let known = groups.clone();
    groups.retain(|known| group.is_none_or(|group| u64::from(*known) == group));
    if groups.is_empty() {
        return no(format!("no namespace is in this group, but in {known:?}"), "name one of these");
    }
    Ok(Some((groups, state)))
}

fn set_export(daemon: &Daemon, number: usize, mut keys: Spec) -> Result<Vec<String>, Problem> {
    let export = &daemon.exports[number];
    let queues = keys.take_number("queues", 1, u64::from(QUEUES_MAX))?;
    if queues.is_some() && matches!(export.front_end.protocol(), Protocol::NvmeTcp(())) {
        let cause = "all of its hosts share its queues, whose number is fixed from its start";
        return Err(SpecError::new(&keys.name, cause, "serve it with queues=N behind its name").into());
    }
    let depth = keys.take_number("depth", 1, export.depth_max as u64)?;
    let rate = take_rate(&mut keys, export.rate.config())?;
    let weight = take_weight(&mut keys)?;
    let ana = take_ana(&mut keys, export)?;
    keys.finish()?;
    // In the order of the devices, as for all of them.
    let served = || daemon.devices.iter().enumerate().filter(|(number, _)| export.place_of(*number).is_some());
    let _alone: Vec<_> = served().map(|(_, device)| device.change()).collect();
    let (mut done, mut problems) = (Vec::new(), Vec::new());
    if let Some(queues) = queues {
        let before = export.queues().len();
        let (more, problem) = make_queues(daemon, number, queues as usize);
        let queues = if problem.is_none() { queues as u16 } else { export.front_end.offered() };
        problems.extend(problem);
        let count = export.queues().len() - before;
        let made = if count == 0 { String::new() } else { format!(", {count} of them new,") };
        let offered = export.front_end.offer(queues, more);
        let from = |when| format!("{export}: it offers {queues} queues{made}{when}");
        match wait_until(Instant::now() + CHANGE_TIME, &offered) {
            Ok(Changed::Unseen) => done.push(from("")),
            Ok(_) => done.push(from(" from the next front-end on; the connected one keeps its queues")),
            Err(Unchanged { why, is_pending }) => {
                problems.push(format!("{export}: {why}"));
                if !is_pending {
                    take_back(daemon, number, before);
                }
            }
        }
        for (number, device) in served() {
            if count > 0 && device.device.queues_max() < usize::MAX {
                // These are served already.
                let placed = daemon.lanes.place_device(number);
                problems.extend(placed.err().map(|error| error.to_string()));
            }
        }
    }
    if let (Some((groups, state)), Some(ana)) = (ana, &export.ana) {
        for group in groups {
            let told = if ana.set(group, state) { "; hosts are notified" } else { " already" };
            done.push(format!("{export}: ANA group {group} is {}{told}", state.name()));
        }
    }
    if let Some(depth) = depth {
        bound(&[export], depth as usize, &mut done, &mut problems);
    }
    if let Some(rate) = rate {
        export.rate.set(rate);
        done.push(format!("{export}: {}", describe(rate)));
        limit(daemon, &[export], &mut problems);
    }
    if let Some(weight) = weight {
        weigh(daemon, export, weight, &mut done, &mut problems);
    }
    if problems.is_empty() { Ok(done) } else { Err(Problem([done, problems].concat().join("\n"))) }
}

/// Makes the queues that an export lacks, or as many of them as there is room for; they are yet to be given to it.
fn make_queues(daemon: &Daemon, number: usize, wanted: usize) -> (ClientRemotes, Option<String>) {
    let export = &daemon.exports[number];
    let maker = QueueMaker {
        lanes: Arc::clone(&daemon.lanes),
        export: number,
        protocol: export.front_end.protocol(),
        devices: export.devices.iter().map(|of| Arc::clone(&daemon.devices[of.device])).collect(),
        serial: export.serial,
        rate: Arc::clone(&export.rate),
        weight: Arc::clone(&export.weight),
    };
    let made = export.queues().len();
    let mut problem = None;
    if wanted > made {
        problem = daemon.lanes.set_queues(number, wanted).err().map(|error| error.to_string());
    }
    let more = if problem.is_none() { made..wanted } else { made..made };
    let (remotes, unmade) = maker.make_all(more);
    problem = problem.or_else(|| unmade.map(|why| format!("{export}: queues={wanted}: {why}")));
    let watches = remotes.watches();
    if problem.is_some() {
        take_back(daemon, number, made + watches.len());
    }
    export.add_queues(watches);
    (remotes, problem)
}

/// Takes the places of queues back that were not made, or not given to their export: it has so many.
fn take_back(daemon: &Daemon, number: usize, queues: usize) {
    let export = &daemon.exports[number];
    export.keep_queues(queues);
    // With fewer queues it names no lane that it did not name before.
    if let Err(error) = daemon.lanes.set_queues(number, queues) {
        tracing::error!("{export}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use blkyard::Device;
    use blkyard::rate::RateSlot;
    use blkyard_export::{BackendConfig, BoundSocket, SEG_MAX, SocketConfig, VhostUserServer};
    use blkyard_mq::RateConfig;
    use blkyard_os::LaneConfig;
    use blkyard_virtio::{BlkConfig, SerialId};

    use super::*;
    use crate::daemon::{ByProtocol, ExportedDevice, FrontEndHandle, LatencyTrackers, Protocol, Share, ShareDevice};

    /// A daemon with one disk and no front-end.
    fn daemon(disk: &str) -> Daemon {
        let device = Device::open(disk).unwrap();
        let info = Arc::new(device.info().clone());
        let lanes = ServedLanes::start(1, Vec::new(), |_| LaneConfig { name: "lane".into(), ..LaneConfig::default() });
        Daemon {
            started: Instant::now(),
            stats_s: 0.into(),
            plans: Vec::new(),
            drain_s: 30,
            cpus: Vec::new(),
            is_handed: AtomicBool::new(false),
            devices: vec![Arc::new(ServedDevice::new(device, info, SchedulerConfig::None, RateConfig::default()))],
            exports: Vec::new(),
            lanes: Arc::new(lanes.unwrap()),
            trackers: LatencyTrackers::default(),
        }
    }

    #[test]
    fn queues_that_their_export_does_not_take_are_removed() {
        let mut daemon = daemon("null:1M");
        let name = "e".to_owned();
        let devices = vec![ShareDevice { number: 0, pool: 0, queues: usize::MAX, orders: false }];
        let share = Share { name: name.clone(), queues: 1, named: None, devices };
        daemon.lanes = Arc::new(ServedLanes::start(2, vec![share], |_| LaneConfig::default()).unwrap());
        let (serial, rate) = (SerialId::new("x").unwrap(), Arc::new(RateSlot::new(RateConfig::default())));
        let (lanes, device) = (Arc::clone(&daemon.lanes), Arc::clone(&daemon.devices[0]));
        let disk = BlkConfig::new(&device.info(), 1, SEG_MAX, false);
        let maker = QueueMaker {
            lanes,
            export: 0,
            protocol: Protocol::VhostUser(()),
            devices: vec![device],
            serial,
            rate: Arc::clone(&rate),
            weight: Arc::default(),
        };
        maker.register();
        let (made, None) = maker.make_all(0..1) else { panic!("the queue cannot be made") };
        let queues = Mutex::new(made.watches());
        let ClientRemotes::VhostUser(remotes) = made else { panic!("queues of another protocol") };
        let folder = tempfile::tempdir().unwrap();
        let socket = SocketConfig { path: folder.path().join("s"), mode: None, group: None };
        let config = BackendConfig { name: name.clone(), disk, queues: remotes, domains: Vec::new() };
        let server = VhostUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        let front_end = ByProtocol::VhostUser(FrontEndHandle::of(&server));
        daemon.exports.push(ServedExport {
            name,
            devices: vec![ExportedDevice { device: 0, nsid: None }],
            front_end,
            serial,
            rate,
            weight: Arc::default(),
            ana: None,
            queues,
            depth_max: 8,
        });
        let set = |queues: &str| apply(&daemon, "export:0", [("queues".into(), queues.into())].into());
        let known = || (daemon.exports[0].queues().len(), daemon.lanes.seen(0).lanes.len());
        set("2").unwrap();
        assert_eq!(known(), (2, 2));
        server.ask_to_stop();
        server.join();
        let error = set("4").unwrap_err();
        assert!(error.contains("its thread has ended"), "{error}");
        assert_eq!(known(), (2, 2));
    }

    #[test]
    fn changes_of_one_disk_at_the_same_time_are_both_kept() {
        const ROUNDS: u32 = 2000;
        let daemon = &daemon("null:1M");
        let set = |key: &str, value: u32| apply(daemon, "device:0", [(key.into(), value.to_string())].into()).unwrap();
        let info = || daemon.devices[0].info();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..ROUNDS {
                    set("size", round * 4096);
                    assert_eq!(info().capacity_sectors, u64::from(round) * 8, "another change took it back");
                }
            });
            for round in 1..ROUNDS {
                set("sectors_max", round * 8);
                assert_eq!(info().limits.sectors_max, round * 8, "another change took it back");
            }
        });
    }
}
