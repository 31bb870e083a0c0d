//! Paths of a device as a user sees and steers them: each path in the statistics and in `inspect`, ANA states that
//! change at the target under load, and I/O without any path.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use blkyard::{Bio, Disk, DiskConfig, Op, QueueCounts, Status, Submitter};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Daemon, PATIENCE, Process, Stop, inspect_at, program, succeed, wait_until};

const NQN: &str = "nqn.2026-11.test:paths";

/// A daemon with a disk at two ports, slow enough that a load always has I/O in flight.
fn target(folder: &Path, device: &str) -> (Daemon, [SocketAddr; 2]) {
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}");
    let words = ["--control", "t", "--device", device, "--export", &export, "--export", &export];
    let daemon = Daemon::start(folder, &words);
    let address = |port: usize| {
        let tree = inspect_at(folder, "t", &[]);
        tree["exports"][port]["session"]["target"]["address"].as_str().map(|address| address.parse().unwrap())
    };
    wait_until("both ports listen", || address(0).is_some() && address(1).is_some());
    (daemon, [0, 1].map(|port| address(port).unwrap()))
}

fn name_of(addresses: &[SocketAddr], options: &str) -> String {
    let paths: Vec<_> = addresses.iter().map(|address| format!("nvme-tcp://{address}/{NQN}")).collect();
    format!("multipath:{}?{options}", paths.join(","))
}

/// The daemon that has both ports as paths of its device, which it exports at `s`.
fn initiator(folder: &Path, addresses: &[SocketAddr], options: &str) -> Daemon {
    let device = name_of(addresses, options);
    Daemon::start(folder, &["--control", "c", "--stats", "1", "--device", &device, "--export", "vhost-user-blk:s"])
}

fn paths(folder: &Path) -> [Value; 2] {
    let tree = inspect_at(folder, "c", &[]);
    [0, 1].map(|path| tree["devices"][0]["paths"][path].clone())
}

fn state(folder: &Path, path: usize) -> String {
    paths(folder)[path]["state"].as_str().unwrap().to_owned()
}

fn ios(folder: &Path) -> [u64; 2] {
    paths(folder).map(|path| path["ios"].as_u64().unwrap())
}

fn set_ana(folder: &Path, port: usize, state: &str) {
    succeed(folder, &["set", "--control", "t", &format!("export:{port}"), &format!("ana_state={state}")]);
}

fn load(folder: &Path, rw: &str, seconds: &str) -> Process {
    let words = ["bench", "vhost-user:s", "--rw", rw, "--bs", "4k", "--iodepth", "16", "--runtime", seconds];
    Process::spawn(program(folder, &words).stdout(Stdio::null()))
}

/// The next statistics line of each path, of the same moment, for which this holds.
fn stats_lines(daemon: &Daemon, what: &str, holds: impl Fn(&[String; 2]) -> bool) -> [String; 2] {
    let begin = Instant::now();
    loop {
        assert!(begin.elapsed() < PATIENCE, "no statistics: {what}");
        let first = daemon.next_line();
        println!("{first}");
        if !first.contains("device 0, path 0 ") {
            continue;
        }
        let lines = [first, daemon.next_line()];
        println!("{}", lines[1]);
        assert!(lines[1].contains("device 0, path 1 "), "{lines:?}");
        if holds(&lines) {
            return lines;
        }
    }
}

/// The number before these words in a line.
fn number_before(line: &str, words: &str) -> u64 {
    let (before, _) = line.split_once(words).unwrap_or_else(|| panic!("{words:?} is not in {line}"));
    let digits = before.rfind(|letter: char| !letter.is_ascii_digit()).map_or(0, |at| at + 1);
    before[digits..].parse().unwrap_or_else(|_| panic!("no number before {words:?} in {line}"))
}

#[test]
fn statistics_and_inspect_show_state_latency_load_share_and_reason_of_each_path() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (target, addresses) = target(folder, "ram:16M?share=on&mbps=20");
    let daemon = initiator(folder, &addresses, "policy=round-robin");
    let idle = stats_lines(&daemon, "without I/O", |_| true);
    assert!(idle.iter().all(|line| line.contains(": live, 0 IOPS, 0 in flight")), "{idle:?}");

    let load = load(folder, "randread", "120");
    let both = stats_lines(&daemon, "both paths are used", |lines| lines.iter().all(|line| line.contains("% of all")));
    let both = stats_lines(&daemon, "a whole second", |_| true).into_iter().chain(both);
    for line in both {
        assert!(line.contains(": live, ") && line.contains(", mean "), "{line}");
        assert!((40..=60).contains(&number_before(&line, " % of all")), "{line}");
        // At 20 MB/s 16 blocks take 3 ms.
        assert!(line.contains(" ms, ") && number_before(&line, " in flight") > 0, "{line}");
        assert!(line.ends_with(", last chosen as: best"), "{line}");
    }
    for (number, path) in paths(folder).iter().enumerate() {
        let [ios, latency, in_flight] = ["ios", "latency_sum_ns", "in_flight"].map(|name| path[name].as_u64().unwrap());
        assert!(path["state"] == "live" && path["chosen"] == "best", "{path:#}");
        assert!(latency / ios > 500_000 && in_flight > 0, "{path:#}");
        let text = succeed(folder, &["inspect", "--control", "c"]).replace("\n      ", " ");
        let (_, text) = text.split_once(&format!("path {number}: ")).unwrap();
        let text = text.lines().next().unwrap();
        assert!(text.contains(", live, ") && text.contains("mean latency "), "{text}");
        assert!((40..=60).contains(&number_before(text, " % of ")), "{text}");
        assert!(number_before(text, " in flight") > 0 && text.contains("last chosen as: best"), "{text}");
    }

    set_ana(folder, 0, "inaccessible");
    wait_until("the path is inaccessible", || state(folder, 0) == "inaccessible");
    let only = stats_lines(&daemon, "one path is used", |lines| lines[1].contains("100 % of all"));
    assert!(only[0].contains(": inaccessible, 0 IOPS, 0 in flight"), "{only:?}");
    assert!(only[1].contains(": live, ") && only[1].ends_with("last chosen as: only path"), "{only:?}");
    let [lost, used] = paths(folder);
    assert!(lost["in_flight"] == 0 && used["chosen"] == "only path", "{lost:#} {used:#}");
    drop(load);
    daemon.stop();
    target.stop();
}

/// Writes each of the disk's first blocks again and again and reads it back, until told to stop. All succeeds.
fn verified_io(folder: &Path, stop: &AtomicBool) -> u64 {
    const BLOCKS: u64 = 64;
    let name = format!("vhost-user:{}/s", folder.display());
    let config = DiskConfig { threads: 1, depth: 8, buffer_bytes: 4096, queues: QueueCounts::only(1) };
    let mut disk = Disk::open(&name, config).unwrap();
    let rounds = disk.run(|queue| {
        let mut round = 0_u64;
        while !stop.load(Relaxed) {
            for op in [Op::Write, Op::Read] {
                for first in (0..BLOCKS).step_by(8) {
                    for slot in 0..8 {
                        let block = first + slot;
                        let mut bio = Bio::with_capacity(1);
                        (bio.op, bio.cookie, bio.sector, bio.sectors) = (op, block, block * 8, 8);
                        bio.segments.push(queue.buffer(slot as usize, 4096));
                        queue.data(bio.segments[0]).fill(if op == Op::Write { (round + block) as u8 } else { 0xa5 });
                        queue.submit(bio);
                    }
                    let mut ended = Vec::new();
                    while queue.wait(|bio| ended.push(bio)) > 0 {}
                    assert_eq!(ended.len(), 8);
                    for bio in ended {
                        assert_eq!(bio.status, Status::Ok, "round {round}, block {}", bio.cookie);
                        let mut bytes = [0; 4096];
                        queue.data(bio.segments[0]).copy_to_slice(&mut bytes);
                        assert_eq!(bytes, [(round + bio.cookie) as u8; 4096], "round {round}, block {}", bio.cookie);
                    }
                }
            }
            round += 1;
        }
        round
    });
    rounds[0]
}

#[test]
fn paths_follow_ana_states_under_load_and_no_io_fails() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (target, addresses) = target(folder, "ram:16M?share=on&latency_us=200");
    let daemon = initiator(folder, &addresses, "policy=round-robin");
    let stop = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let ending = Stop(&stop);
        let load = scope.spawn(|| verified_io(folder, &stop));
        wait_until("there is I/O", || ios(folder).iter().all(|ios| *ios > 100));
        let live = "live";
        for (port, told, shown, uses) in [
            (0, "inaccessible", "inaccessible", [false, true]),
            (0, "optimized", live, [true, true]),
            (0, "non-optimized", "live, non-optimized", [false, true]),
            (1, "non-optimized", "live, non-optimized", [true, true]),
            (1, "inaccessible", "inaccessible", [true, false]),
            (0, "optimized", live, [true, false]),
            (1, "change", "changing", [true, false]),
            (1, "optimized", live, [true, true]),
            (0, "persistent-loss", "inaccessible for good", [false, true]),
            (0, "optimized", live, [true, true]),
        ] {
            set_ana(folder, port, told);
            wait_until("inspect shows the state", || state(folder, port) == shown);
            // Requests in flight then.
            wait_until("an unused path is idle", || {
                paths(folder).iter().zip(uses).all(|(path, is_used)| is_used || path["in_flight"] == 0)
            });
            let before = ios(folder);
            let what = format!("I/O goes on after port {port} is {told}");
            wait_until(&what, || (0..2).all(|path| !uses[path] || ios(folder)[path] > before[path] + 100));
            let after = ios(folder);
            assert!(
                (0..2).all(|path| uses[path] || after[path] == before[path]),
                "{told} at {port}: {before:?} {after:?}"
            );
        }
        drop(ending);
        load.join().unwrap()
    });
    assert!(rounds > 0);
    daemon.stop();
    target.stop();
}

/// A disk over both ports of a target at fixed addresses, which is killed with a read in flight.
struct Outage {
    folder: tempfile::TempDir,
    addresses: [SocketAddr; 2],
    disk: Disk,
    /// Status of each of two reads, one in flight before the target was killed and one after, and their end since then.
    ends: Vec<(Status, Duration)>,
    /// Time from its kill to the end of its connections, which the kernel closes once it has taken its rings apart.
    closed: Duration,
}

/// What threads of a busy machine may add to a deadline.
const LOADED: Duration = Duration::from_millis(1500);

/// Whether this end of a connection is open.
fn is_connected(address: &SocketAddr) -> bool {
    let SocketAddr::V4(address) = address else { unreachable!("an address of ours") };
    // As proc(5) has it: the address as a number, and the state, of which 01 is for established.
    let end = format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port());
    let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let mut connections = connections.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    connections.any(|fields| fields[1] == end && fields[3] == "01")
}

impl Outage {
    /// `restart` is how long after its end the target is started again.
    fn begin(name: impl FnOnce(&[SocketAddr]) -> String, restart: Option<Duration>) -> (Outage, Option<Daemon>) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::File::create(folder.path().join("disk")).unwrap().set_len(1 << 20).unwrap();
        // Free ports of an address that no other process uses: they stay free while the target is down.
        let [low, middle, high, _] = std::process::id().to_le_bytes();
        let own = Ipv4Addr::new(127, 64 | high, middle, low);
        let listeners = [0; 2].map(|_| TcpListener::bind((own, 0)).unwrap());
        let addresses = listeners.map(|listener| listener.local_addr().unwrap());
        let mut target = Some(Outage::target(folder.path(), addresses));
        let config = DiskConfig { threads: 1, depth: 2, buffer_bytes: 4096, queues: QueueCounts::only(1) };
        let mut disk = Disk::open(&name(&addresses), config).unwrap();
        let folder_of = folder.path();
        let ends = disk.run(|queue| {
            read(queue, 0);
            let mut ended = Vec::new();
            while queue.wait(|bio| ended.push(bio.status)) > 0 {}
            assert_eq!(ended, [Status::Ok]);
        });
        assert_eq!(ends.len(), 1);
        target.as_ref().unwrap().hang();
        let target = std::sync::Mutex::new(&mut target);
        let ends = disk.run(|queue| {
            let mut target = target.lock().unwrap();
            read(queue, 0);
            queue.ring();
            let old = target.take().unwrap();
            let start = Instant::now();
            old.signal(Signal::KILL);
            drop(old);
            wait_until("its connections are closed", || !addresses.iter().any(is_connected));
            let closed = start.elapsed();
            read(queue, 1);
            queue.ring();
            let mut ended = Vec::new();
            if let Some(pause) = restart {
                while start.elapsed() < pause {
                    queue.poll(|bio| ended.push((bio.status, start.elapsed())));
                    std::thread::sleep(Duration::from_millis(5));
                }
                assert!(ended.is_empty(), "{ended:?} without a target");
                **target = Some(Outage::target(folder_of, addresses));
            }
            while queue.wait(|bio| ended.push((bio.status, start.elapsed()))) > 0 {}
            (ended, closed)
        });
        println!("{ends:?}");
        let target = target.into_inner().unwrap().take();
        let (ends, closed) = ends.into_iter().next().unwrap();
        (Outage { folder, addresses, disk, ends, closed }, target)
    }

    fn target(folder: &Path, addresses: [SocketAddr; 2]) -> Daemon {
        let _ = std::fs::remove_file(folder.join("t"));
        let [one, other] = addresses.map(|address| format!("nvme-tcp://{address}?nqn={NQN}"));
        let words = ["--control", "t", "--device", "file:disk?share=on", "--export", &one, "--export", &other];
        Daemon::start(folder, &words)
    }

    /// Reads until one succeeds, which must be soon after the target is back.
    fn recovers(mut self) {
        let target = Outage::target(self.folder.path(), self.addresses);
        self.disk.run(|queue| {
            let begin = Instant::now();
            loop {
                read(queue, 0);
                let mut status = Status::Io;
                while queue.wait(|bio| status = bio.status) > 0 {}
                match status {
                    Status::Ok => return,
                    Status::Path => std::thread::sleep(Duration::from_millis(10)),
                    other => panic!("{other:?}"),
                }
                assert!(begin.elapsed() < PATIENCE, "I/O fails although the target is back");
            }
        });
        drop(self.disk);
        target.stop();
    }
}

fn read(queue: &mut Submitter, slot: usize) {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sectors) = (Op::Read, 8);
    bio.segments.push(queue.buffer(slot, 4096));
    queue.submit(bio);
}

/// Checks that both reads have ended with a path error after this time, and no sooner.
fn fail_after(outage: &Outage, seconds: u64) {
    let Outage { ends, closed, .. } = outage;
    let deadline = Duration::from_secs(seconds);
    assert_eq!(ends.len(), 2);
    for (status, time) in ends {
        assert_eq!(*status, Status::Path, "{ends:?}");
        assert!((deadline..*closed + deadline + LOADED).contains(time), "{ends:?}, closed after {closed:?}");
    }
}

#[test]
fn without_a_path_io_waits_for_no_path_s_and_fails_with_the_path_error() {
    let name = |addresses: &[SocketAddr]| name_of(addresses, "no_path_s=3&reconnect_delay_s=1");
    let (outage, _) = Outage::begin(name, None);
    fail_after(&outage, 3);
    outage.recovers();
}

#[test]
fn io_that_waits_for_a_path_succeeds_when_one_is_back_before_the_deadline() {
    let name = |addresses: &[SocketAddr]| name_of(addresses, "no_path_s=60&reconnect_delay_s=1");
    let (outage, target) = Outage::begin(name, Some(Duration::from_secs(2)));
    assert!(outage.ends.iter().all(|(status, _)| *status == Status::Ok) && outage.ends.len() == 2);
    drop(outage);
    target.unwrap().stop();
}

#[test]
fn io_of_one_path_fails_with_the_path_error_after_fast_io_fail_s() {
    let name =
        |addresses: &[SocketAddr]| format!("nvme-tcp://{}/{NQN}?fast_io_fail_s=3&reconnect_delay_s=1", addresses[0]);
    let (outage, _) = Outage::begin(name, None);
    fail_after(&outage, 3);
    outage.recovers();
}

#[test]
fn io_of_several_paths_fails_once_fast_io_fail_s_has_passed_for_all() {
    let name = |addresses: &[SocketAddr]| name_of(addresses, "no_path_s=60&fast_io_fail_s=3&reconnect_delay_s=1");
    let (outage, _) = Outage::begin(name, None);
    fail_after(&outage, 3);
    outage.recovers();
}
