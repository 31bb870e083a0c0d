//! One disk over two NVMe/TCP targets, as a user starts it: targets that are killed, that hang, and that come back amid
//! verified writes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, Process, inspect, program, run, succeed, wait_until};

const NQN: &str = "nqn.2026-11.test:paths";

/// A disk in a daemon, two targets for it in a daemon each, and the daemon that has both as paths of its device.
struct Rig<'a> {
    folder: &'a Path,
    addresses: [SocketAddr; 2],
    targets: [Option<Daemon>; 2],
    daemon: Daemon,
    _disk: Daemon,
}

impl Rig<'_> {
    fn start<'a>(folder: &'a Path, options: &str) -> Rig<'a> {
        Rig::start_with(folder, options, [true; 2])
    }

    /// With these targets up when the daemon starts.
    fn start_with<'a>(folder: &'a Path, options: &str, up: [bool; 2]) -> Rig<'a> {
        // Slow enough that a load is still running when something happens to a target.
        let disk = ["--device", "ram:32M?share=on&mbps=40", "--export", "vhost-user-blk:d0?queues=4"];
        let disk = [&["--control", "d"], &disk[..], &["--export", "vhost-user-blk:d1?queues=4"]].concat();
        let disk = Daemon::start(folder, &disk);
        // Free ports of an address that no other process uses: they stay free while a target is down.
        let listeners = [0; 2].map(|_| TcpListener::bind((own_loopback(), 0)).unwrap());
        let addresses = listeners.map(|listener| listener.local_addr().unwrap());
        let targets = [0, 1].map(|path| up[path].then(|| target(folder, addresses[path], path)));
        let paths = addresses.map(|address| format!("nvme-tcp://{address}/{NQN}")).join(",");
        // A hung target is to be noticed by its I/O: long enough for a load to begin, on a busy machine too.
        let keep_alive = if options.contains("keep_alive_s") { "" } else { "&keep_alive_s=5" };
        let device = format!("multipath:{paths}?queues=2{keep_alive}&reconnect_delay_s=1&{options}");
        let words = ["--control", "c", "--lanes", "2", "--device", &device, "--export", "vhost-user-blk:s?queues=2"];
        let daemon = Daemon::start(folder, &words);
        Rig { folder, addresses, targets, daemon, _disk: disk }
    }

    fn path(&self, path: usize) -> serde_json::Value {
        inspect(self.folder, &[])["devices"][0]["paths"][path].clone()
    }

    fn count(&self, path: usize, name: &str) -> u64 {
        self.path(path)[name].as_u64().unwrap()
    }

    fn ios(&self) -> u64 {
        (0..2).map(|path| self.count(path, "ios")).sum()
    }

    fn loss(&self, path: usize) -> String {
        self.path(path)["loss"].as_str().unwrap_or_default().to_owned()
    }

    fn is_live(&self, path: usize) -> bool {
        self.path(path)["state"] == "live"
    }

    /// Verified writes over both queues, which have begun.
    fn load(&self) -> Process {
        let before = self.ios();
        let words = ["--numjobs", "2", "--iodepth", "16", "--rw", "randwrite", "--bs", "4k", "--verify", "crc32c"];
        let words = [&["bench", "vhost-user:s?queues=2"], &words[..]].concat();
        let load = Process::spawn(program(self.folder, &words).stdout(Stdio::null()));
        wait_until("there is I/O", || self.ios() > before);
        load
    }

    /// Hangs a target, and begins a load of which it has a part. If the path is lost meanwhile, that has moved.
    fn load_of_hung(&self, path: usize) -> Process {
        let moved = self.count(path, "moved");
        self.targets[path].as_ref().unwrap().hang();
        let load = self.load();
        wait_until("the hung target has I/O", || {
            self.count(path, "in_flight") > 0 || self.count(path, "moved") > moved
        });
        load
    }
}

/// A loopback address for this process.
pub fn own_loopback() -> Ipv4Addr {
    let [low, middle, high, _] = std::process::id().to_le_bytes();
    Ipv4Addr::new(127, 64 | high, middle, low)
}

fn target(folder: &Path, address: SocketAddr, path: usize) -> Daemon {
    let (device, export) = (format!("vhost-user:d{path}"), format!("nvme-tcp://{address}?nqn={NQN}"));
    Daemon::start(folder, &["--control", &format!("t{path}"), "--device", &device, "--export", &export])
}

fn finish(mut load: Process) {
    let status = load.ended();
    assert!(status.success(), "the verified writes: {status}");
}

#[test]
fn io_survives_each_target_killed_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(folder.path(), "policy=round-robin");
    for path in [0, 1] {
        let load = rig.load_of_hung(path);
        let target = rig.targets[path].take().unwrap();
        target.signal(Signal::KILL);
        drop(target);
        wait_until("the path is lost", || !rig.is_live(path));
        finish(load);
        assert!(rig.count(path, "moved") > 0, "no I/O was moved");
        let load = rig.load();
        rig.targets[path] = Some(target_again(&rig, path));
        wait_until("the path is live again", || rig.is_live(path));
        finish(load);
        let before = rig.count(path, "ios");
        finish(rig.load());
        assert!(rig.count(path, "ios") > before, "the path is not used again");
    }
    rig.daemon.stop();
}

fn target_again(rig: &Rig, path: usize) -> Daemon {
    let _ = std::fs::remove_file(rig.folder.join(format!("t{path}")));
    target(rig.folder, rig.addresses[path], path)
}

#[test]
fn a_hung_target_delays_io_and_fails_none() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::start(folder.path(), "timeout_s=2");
    finish(rig.load_of_hung(0));
    wait_until("the path is lost", || !rig.is_live(0));
    assert!(rig.count(0, "moved") > 0, "no I/O was moved");
    finish(rig.load());
    let text = succeed(rig.folder, &["inspect", "--control", "c"]);
    assert!(text.contains("policy adaptive") && text.contains("path 1: nvme-tcp://"), "{text}");
    rig.targets[0].as_ref().unwrap().signal(Signal::CONT);
    wait_until("the path is live again", || rig.is_live(0));
    finish(rig.load());
    rig.daemon.stop();
}

/// Reads everything, and verifies the data.
const READS: [&str; 10] =
    ["bench", "vhost-user:s", "--iodepth", "8", "--bs", "4k", "--rw", "randread", "--verify", "crc32c"];

/// Begins to read everything with its data verified, and hangs a target when it has some of the reads.
fn verified_reads_of_hung(rig: &Rig) -> Process {
    let before = rig.ios();
    let load = Process::spawn(program(rig.folder, &READS).stdout(Stdio::null()));
    // By then the lane knows how long a read takes.
    wait_until("there are reads", || rig.ios() > before + 1000);
    rig.targets[0].as_ref().unwrap().hang();
    load
}

#[test]
fn hedged_reads_pass_a_hung_target_and_its_late_answers_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // No path is given up for a hang.
    let rig = Rig::start(folder.path(), "policy=queue-depth&keep_alive_s=600");
    let words = ["bench", "vhost-user:s", "--iodepth", "8", "--bs", "4k", "--rw", "write", "--verify", "crc32c"];
    succeed(rig.folder, &words);
    let target = rig.targets[0].as_ref().unwrap();

    let mut load = verified_reads_of_hung(&rig);
    std::thread::sleep(Duration::from_secs(3));
    assert!(load.is_running() && rig.count(0, "in_flight") > 0, "reads end without the target that has them");
    target.signal(Signal::CONT);
    finish(load);

    succeed(rig.folder, &["set", "--control", "c", "device:0", "hedged_reads=on"]);
    finish(verified_reads_of_hung(&rig));
    let (late, won) = (rig.count(0, "in_flight"), rig.count(1, "hedges_won"));
    assert!(
        late > 0 && won > 0,
        "{late} commands are at the hung target, {won} of its reads were answered by the other"
    );
    let text = succeed(rig.folder, &["inspect", "--control", "c"]);
    assert!(text.contains(", hedged reads\n") && text.contains(" hedged reads, "), "{text}");
    let reads = rig.ios();
    let load = Process::spawn(program(rig.folder, &READS).stdout(Stdio::null()));
    wait_until("there are reads", || rig.ios() > reads + 1000);
    target.signal(Signal::CONT);
    finish(load);
    wait_until("the late reads have ended", || rig.count(0, "in_flight") == 0);
    rig.daemon.stop();
}

#[test]
fn a_path_that_is_down_at_the_start_joins_when_it_comes() {
    for late in [1, 0] {
        let (folder, early) = (tempfile::tempdir().unwrap(), 1 - late);
        let mut rig = Rig::start_with(folder.path(), "policy=round-robin", [late != 0, late != 1]);
        wait_until("the reason is shown", || rig.loss(late).contains("cannot connect to"));
        assert!(rig.is_live(early) && rig.path(early)["loss"].is_null());
        finish(rig.load());
        assert_eq!(rig.count(late, "ios"), 0);
        let load = rig.load();
        rig.targets[late] = Some(target_again(&rig, late));
        wait_until("the path joins", || rig.is_live(late));
        finish(load);
        finish(rig.load());
        assert!(rig.count(late, "ios") > 0 && rig.path(late)["loss"].is_null());
        let load = rig.load_of_hung(early);
        let target = rig.targets[early].take().unwrap();
        target.signal(Signal::KILL);
        drop(target);
        finish(load);
        rig.daemon.stop();
    }
}

#[test]
fn a_late_path_to_another_disk_stays_out_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::start_with(folder.path(), "policy=round-robin", [true, false]);
    let export = format!("nvme-tcp://{}?nqn={NQN}", rig.addresses[1]);
    for (device, options, reason) in [
        ("ram:16M", "", "65536 sectors, and this path 32768"),
        ("ram:32M?block_size=4k", "", "blocks of 512 bytes, and this path of 4096"),
        ("ram:32M?readonly=on", "", "write protection"),
        ("ram:32M", "&queues=1", "1 I/O queues of"),
    ] {
        let words = ["--control", "other", "--device", device, "--export", &format!("{export}{options}")];
        let other = Daemon::start(folder.path(), &words);
        wait_until("the reason is shown", || rig.loss(1).contains(reason));
        let text = succeed(rig.folder, &["inspect", "--control", "c"]);
        assert!(text.contains("not connected: ") && text.contains(reason) && !rig.is_live(1), "{text}");
        if options.is_empty() && device == "ram:16M" {
            finish(rig.load());
        }
        other.stop();
    }
    assert_eq!(rig.count(1, "ios"), 0);
    rig.targets[1] = Some(target_again(&rig, 1));
    wait_until("the right disk joins", || rig.is_live(1));
    finish(rig.load());
    assert!(rig.count(1, "ios") > 0);
    rig.daemon.stop();
}

#[test]
fn paths_are_taken_over_and_one_may_be_down() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(folder.path(), "");
    succeed(rig.folder, &["set", "--control", "c", "device:0", "policy=round-robin", "hedged_reads=on"]);
    for path in [0, 1] {
        let load = rig.load_of_hung(path);
        let target = rig.targets[path].take().unwrap();
        target.signal(Signal::KILL);
        drop(target);
        wait_until("the path is lost", || !rig.is_live(path));
        finish(load);
        let load = rig.load();
        let new = Daemon::start(rig.folder, &["--takeover", "c"]);
        let status = std::mem::replace(&mut rig.daemon, new).process.ended();
        assert!(status.success(), "the old daemon ends with {status}");
        finish(load);
        let reached = inspect(rig.folder, &[])["devices"][0]["reached"].to_string();
        assert!(reached.contains("policy round-robin, hedged reads"), "what was set is lost: {reached}");
        rig.targets[path] = Some(target_again(&rig, path));
        wait_until("the path joins", || rig.is_live(path));
        let before = rig.count(path, "ios");
        finish(rig.load());
        assert!(rig.count(path, "ios") > before, "the path is not used");
    }
    rig.daemon.stop();
}

#[test]
fn without_any_path_the_start_fails_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let address = TcpListener::bind((own_loopback(), 0)).unwrap().local_addr().unwrap();
    let device = format!("multipath:nvme-tcp://{address}/{NQN},nvme-tcp://{address}/{NQN}");
    for device in [&*device, &format!("nvme-tcp://{address}/{NQN}")] {
        let output = run(folder.path(), &["serve", "--device", device, "--export", "vhost-user-blk:s"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(&format!("cannot connect to {address}")), "{error}");
    }
}

#[test]
fn latency_measures_as_the_tracker_of_its_device() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Both paths are unknown until a window ends, and the first of equals gets all.
    let paths = "multipath:null:64M,null:64M?unidentified=on&latency_us=50";
    let device = format!("{paths}&policy=latency&tracker=on&tracker_window_us=10000000");
    let daemon = Daemon::start(folder, &["--control", "c", "--device", &device, "--export", "vhost-user-blk:s"]);
    let reads = || {
        succeed(folder, &["bench", "vhost-user:s", "--rw", "read", "--size", "4M"]);
        let paths = inspect(folder, &[])["devices"][0]["paths"].clone();
        [0, 1].map(|path| paths[path]["ios"].as_u64().unwrap())
    };
    let long = reads();
    assert!(long[0] > 0 && long[1] == 0, "{long:?}");
    succeed(folder, &["set", "--control", "c", "device:0", "tracker_window_us=1000"]);
    let short = reads();
    assert!(short[1] > 0, "{short:?}");
    succeed(folder, &["set", "--control", "c", "device:0", "hedged_reads=on"]);
    let text = succeed(folder, &["inspect", "--control", "c"]);
    assert!(text.contains("hedged reads set but of no effect"), "these paths cannot: {text}");
    let refused = run(folder, &["set", "--control", "c", "device:0", "hedged_reads=perhaps"]);
    assert!(!refused.status.success());
    daemon.stop();
}

#[test]
fn policy_is_set_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let device =
        ["--device", "multipath:null:64M,null:64M?unidentified=on&policy=numa", "--export", "vhost-user-blk:s"];
    let daemon = Daemon::start(folder, &[&["--control", "c"], &device[..]].concat());
    let reads = || {
        succeed(folder, &["bench", "vhost-user:s", "--rw", "read", "--size", "4M"]);
        let paths = inspect(folder, &[])["devices"][0]["paths"].clone();
        [0, 1].map(|path| paths[path]["ios"].as_u64().unwrap())
    };
    let numa = reads();
    assert!(numa[0] > 0 && numa[1] == 0, "{numa:?}");
    succeed(folder, &["set", "--control", "c", "device:0", "policy=round-robin"]);
    let both = reads();
    assert!(both[0] > numa[0] && both[1] > 0, "{both:?}");
    let text = succeed(folder, &["inspect", "--control", "c"]);
    assert!(text.contains("policy round-robin") && text.contains("path 1: null:64M, live, "), "{text}");
    let refused = run(folder, &["set", "--control", "c", "device:0", "policy=best"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("queue-depth"), "{error}");
    daemon.stop();
}
