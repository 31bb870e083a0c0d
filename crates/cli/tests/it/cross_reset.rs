//! Cross-controller reset between two ports of a daemon: what a host may have reset, when that is complete, and what a
//! disk over both ports gains by it when one hangs without closing its connections.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blkyard::{Bio, Disk, DiskConfig, Op, QueueCounts, Status, Submitter};
use blkyard_nvme::{
    CROSS_RESET_LOG, ControllerInstance, CrossResetEntry, CrossResetState, IdentifyController, NvmeStatus, Sqe, admin,
    cns, feature, io,
};
use blkyard_wire::nvme_tcp::Pdu;
use rustix::process::Signal;

use crate::common::{Daemon, Process, inspect, program, wait_until};
use crate::tcp_host::{Answer, TcpHost};

pub(crate) const NQN: &str = "nqn.2026-11.test:reset";
pub(crate) const HOST: &str = "nqn.2026-11.test:host";
/// Time that I/O may take on a path, s; and what a move to another path may add to that.
pub(crate) const TIMEOUT_S: u64 = 1;
const MOVE: Duration = Duration::from_millis(50);
/// What the threads of a loaded machine may add: below all pauses of a recovery by time.
pub(crate) const LOADED: Duration = Duration::from_millis(1500);

/// A daemon with two ports for this device, and their addresses.
pub(crate) fn two_ports(folder: &Path, device: &str) -> (Daemon, [SocketAddr; 2]) {
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}");
    let words = ["--control", "c", "--device", device, "--export", &export, "--export", &export];
    let log = File::create(folder.join("log")).unwrap();
    let daemon = Daemon::launch(program(folder, &["serve"]).args(words).stderr(log));
    let address = |port: usize| {
        let tree = inspect(folder, &[]);
        tree["exports"][port]["session"]["target"]["address"].as_str().map(|address| address.parse().unwrap())
    };
    wait_until("both ports listen", || address(0).is_some() && address(1).is_some());
    (daemon, [0, 1].map(|port| address(port).unwrap()))
}

fn instance(host: &mut TcpHost) -> ControllerInstance {
    let page = host.admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    let identify = IdentifyController::parse(&page.try_into().unwrap());
    ControllerInstance::of(&identify).unwrap()
}

fn reset(host: &mut TcpHost, instance: ControllerInstance) -> Answer {
    host.admin.run(instance.reset_command(), &[], 0)
}

fn log(host: &mut TcpHost) -> Vec<CrossResetEntry> {
    let page = host.admin.succeed(Sqe::get_log_page(CROSS_RESET_LOG, 0, 0, 1024, 0), &[], 4096);
    CrossResetEntry::parse(&page.try_into().unwrap())
}

fn answer(status: NvmeStatus, result: u64) -> Answer {
    Answer { status, result, data: Vec::new() }
}

#[test]
fn a_host_has_its_controller_at_another_port_reset() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), "ram:16M?share=on");
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 1));
    hosts[0].io[0].write(1, 0, &[1; 4096]);
    let lost = instance(&mut hosts[0]);
    assert_eq!(reset(&mut hosts[1], lost), answer(NvmeStatus::SUCCESS, 1));
    assert!(hosts[0].admin.next().is_none() && hosts[0].io[0].next().is_none(), "its connections are closed");
    // A host that asks again, for its answer was lost, learns the same.
    assert_eq!(reset(&mut hosts[1], lost), answer(NvmeStatus::SUCCESS, 1));
    // The next controller with that identifier is another one.
    let again = TcpHost::connect(addresses[0], NQN, HOST, Some(lost.id), 1);
    hosts[0] = again;
    assert_ne!(instance(&mut hosts[0]), lost);
    assert_eq!(reset(&mut hosts[1], lost), answer(NvmeStatus::SUCCESS, 1));
    assert_eq!(hosts[0].io[0].read(1, 0, 4096), [1; 4096]);
    // One of the same port, too.
    let mut third = TcpHost::connect(addresses[1], NQN, HOST, None, 1);
    let other = instance(&mut hosts[1]);
    assert_eq!(reset(&mut third, other), answer(NvmeStatus::SUCCESS, 1));
    daemon.stop();
}

#[test]
fn a_host_has_nothing_else_reset() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), "ram:16M?share=on");
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 1));
    let mut foreign = TcpHost::connect(addresses[0], NQN, "nqn.2026-11.test:other", None, 1);
    let (own, other, theirs) = (instance(&mut hosts[1]), instance(&mut hosts[0]), instance(&mut foreign));
    // The last one may be of another process, whose commands may still be executed.
    let unknown = ControllerInstance { id: 60_000, ..other };
    for wrong in [
        own,
        theirs,
        ControllerInstance { random: other.random ^ 1, ..other },
        ControllerInstance { uniquifier: other.uniquifier ^ 0x80, ..other },
        ControllerInstance { uniquifier: 0, ..other },
        ControllerInstance { id: other.id + 5, ..other },
        unknown,
    ] {
        let refused = reset(&mut hosts[1], wrong);
        assert_eq!(refused.status.without_flags(), NvmeStatus::INVALID_FIELD, "{wrong:?}");
        assert!(refused.status.is_final() && refused.result == 0);
    }
    assert_eq!(log(&mut hosts[1]), []);
    for host in hosts.iter_mut().chain([&mut foreign]) {
        host.io[0].write(1, 0, &[1; 512]);
    }
    // Reserved fields are ignored, and so is a namespace.
    let mut dwords = other.reset_command().dwords();
    (dwords[1], dwords[10], dwords[11], dwords[15]) = (u32::MAX, dwords[10] | 0xff00_0000, u32::MAX, u32::MAX);
    assert_eq!(hosts[1].admin.run(Sqe::from_dwords(dwords), &[], 0), answer(NvmeStatus::SUCCESS, 1));
    daemon.stop();
}

/// A daemon whose disk is another one's, which hangs with a write of the first of two hosts.
pub(crate) fn with_held_write(folder: &Path, options: &str) -> (Daemon, Daemon, [TcpHost; 2], SocketAddr) {
    let disk = ["--control", "d", "--device", "ram:16M", "--export", "vhost-user-blk:b?queues=4"];
    let disk = Daemon::start(folder, &disk);
    let (daemon, addresses) = two_ports(folder, &format!("vhost-user:b?share=on{options}"));
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 1));
    // The disk knows the memory of the daemon after the first write.
    hosts[0].io[0].write(1, 0, &[0; 4096]);
    disk.hang();
    hosts[0].io[0].submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &[1; 4096], 0);
    wait_until("the write is at the disk", || {
        let exports = inspect(folder, &[])["exports"].clone();
        exports[0]["queues"].as_array().is_some_and(|queues| queues.iter().any(|queue| queue["now"]["in_flight"] == 1))
    });
    (disk, daemon, hosts, addresses[1])
}

fn states(host: &mut TcpHost) -> Vec<(u16, CrossResetState)> {
    log(host).iter().map(|entry| (entry.id, entry.state)).collect()
}

#[test]
fn a_reset_is_complete_when_the_device_has_given_back_the_last_write() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, daemon, mut hosts, address) = with_held_write(folder.path(), "");
    let enabled = Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 20);
    hosts[1].admin.succeed(enabled, &[], 0);
    let event = hosts[1].admin.submit(Sqe::new(admin::ASYNC_EVENT, 0), &[], 0);
    let lost = instance(&mut hosts[0]);
    assert_eq!(reset(&mut hosts[1], lost), answer(NvmeStatus::SUCCESS, 0));
    assert!(hosts[0].admin.next().is_none(), "its admin connection is closed");
    let mut third = TcpHost::connect(address, NQN, HOST, None, 1);
    assert_eq!(reset(&mut third, lost).status.without_flags(), NvmeStatus::CROSS_RESET_RUNNING);
    for _ in 0..5 {
        sleep(Duration::from_millis(50));
        assert_eq!(states(&mut hosts[1]), [(lost.id, CrossResetState::Running)]);
    }
    disk.signal(Signal::CONT);
    let notice = match hosts[1].admin.next() {
        Some((Pdu::CapsuleResp(cqe), _)) => blkyard_nvme::Cqe(cqe),
        other => panic!("{other:?}"),
    };
    assert_eq!((notice.cid(), notice.result()), (event, 2 | 0xf4 << 8 | 0x1e << 16));
    assert_eq!(states(&mut hosts[1]), [(lost.id, CrossResetState::Succeeded)]);
    // Its I/O connection is closed, maybe after the answer of the disk.
    while hosts[0].io[0].next().is_some() {}
    // The write was executed before, so a newer one stays.
    hosts[1].io[0].write(1, 0, &[2; 4096]);
    sleep(Duration::from_millis(100));
    assert_eq!(hosts[1].io[0].read(1, 0, 4096), [2; 4096]);
    drop((hosts, third));
    daemon.stop();
    drop(disk);
}

#[test]
fn a_reset_has_failed_if_the_device_is_left_with_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, daemon, mut hosts, _) = with_held_write(folder.path(), "&timeout_s=1&gone_s=1");
    let lost = instance(&mut hosts[0]);
    assert_eq!(reset(&mut hosts[1], lost), answer(NvmeStatus::SUCCESS, 0));
    // The disk may execute the write when it goes on, though the daemon waits no longer.
    wait_until("the write is given up", || states(&mut hosts[1]) != [(lost.id, CrossResetState::Running)]);
    assert_eq!(states(&mut hosts[1]), [(lost.id, CrossResetState::Failed)]);
    assert_ne!(reset(&mut hosts[1], lost).status, NvmeStatus::SUCCESS);
    drop(hosts);
    disk.signal(Signal::CONT);
    drop((daemon, disk));
}

/// Passes connections on until it is frozen: then it keeps them, and passes no byte on.
#[derive(Default)]
pub(crate) struct Relay {
    is_frozen: AtomicBool,
    bytes: AtomicU64,
}

impl Relay {
    pub(crate) fn start(target: SocketAddr) -> (Arc<Relay>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let relay = Arc::new(Relay::default());
        let shared = Arc::clone(&relay);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(target) else { continue };
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                }
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let relay = Arc::clone(&shared);
                    std::thread::spawn(move || relay.pass_on(from, to));
                }
            }
        });
        (relay, address)
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 256 << 10];
        loop {
            let len = from.read(&mut buffer).unwrap_or(0);
            while self.is_frozen.load(SeqCst) {
                sleep(Duration::from_millis(1));
            }
            self.bytes.fetch_add(len as u64, SeqCst);
            if len == 0 || to.write_all(&buffer[..len]).is_err() {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
        }
    }

    /// Freezes it amid I/O.
    fn freeze_amid_io(&self) {
        let before = self.bytes.load(SeqCst);
        wait_until("there is I/O", || self.bytes.load(SeqCst) > before + (1 << 20));
        self.freeze(true);
    }

    pub(crate) fn freeze(&self, is_frozen: bool) {
        self.is_frozen.store(is_frozen, SeqCst);
    }

    /// Repeats I/O until it uses the path of the relay, which may be connected later than the others.
    pub(crate) fn use_it(&self, mut io: impl FnMut()) {
        let mut before = u64::MAX;
        while self.bytes.load(SeqCst) < before.saturating_add(4096) {
            before = self.bytes.load(SeqCst);
            io();
        }
    }
}

/// Runs a load on a disk over both addresses, the first of which hangs meanwhile. Returns its report, and its log.
fn bench_with_hang(
    folder: &Path,
    relay: &Relay,
    addresses: [SocketAddr; 2],
    options: &str,
    words: &[&str],
) -> (serde_json::Value, String) {
    let paths = addresses.map(|address| format!("nvme-tcp://{address}/{NQN}")).join(",");
    let device = format!("multipath:{paths}?policy=round-robin&queues=2&timeout_s={TIMEOUT_S}{options}");
    let words = [&["bench", &device, "-v", "--bs", "4k", "--output-format", "json"], words].concat();
    let mut command = program(folder, &words);
    let mut load = Process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let (mut stdout, mut stderr) = (load.0.stdout.take().unwrap(), load.0.stderr.take().unwrap());
    let text = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text).unwrap()
    });
    relay.freeze_amid_io();
    let mut report = String::new();
    stdout.read_to_string(&mut report).unwrap();
    let text = text.join().unwrap();
    let status = load.ended();
    assert!(status.success(), "{status}: {report} {text}");
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["jobs"][0]["total_err"], 0, "{text}");
    (report, text)
}

/// Longest latency of reads and of writes.
fn longest(report: &serde_json::Value) -> [Duration; 2] {
    ["read", "write"].map(|op| Duration::from_nanos(report["jobs"][0][op]["lat_ns"]["max"].as_f64().unwrap() as u64))
}

#[test]
fn io_of_a_path_that_hangs_goes_on_within_50_ms_of_its_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, addresses) = two_ports(folder, "ram:16M?share=on");
    let bound = Duration::from_secs(TIMEOUT_S) + MOVE;
    for depth in ["1", "32"] {
        let hang = || {
            let (relay, relayed) = Relay::start(addresses[0]);
            let words = ["--rw", "randrw", "--iodepth", depth, "--runtime", "3"];
            let (report, text) = bench_with_hang(folder, &relay, [relayed, addresses[1]], "", &words);
            let [reads, writes] = longest(&report);
            println!("depth {depth}: reads took {reads:?}, writes {writes:?} at most; the bound is {bound:?}");
            assert!(text.contains("its controller was reset by another path"), "{text}");
            assert!(reads.max(writes) < bound + LOADED, "{reads:?} {writes:?}");
            assert!(reads.max(writes) >= Duration::from_secs(TIMEOUT_S), "no I/O was on the path that hung");
            reads.max(writes)
        };
        // Other processes of a loaded machine delay some hang; they do not make one shorter.
        let mut hangs = (0..5).map(|_| hang());
        assert!(hangs.any(|longest| longest < bound), "depth {depth}: each took longer than {bound:?}");
    }
    daemon.stop();
}

#[test]
fn verified_writes_survive_a_path_that_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Slow enough that it writes when the path hangs.
    let (daemon, addresses) = two_ports(folder, "ram:16M?share=on&mbps=6");
    let (relay, relayed) = Relay::start(addresses[0]);
    let words = ["--rw", "randwrite", "--iodepth", "32", "--verify", "crc32c"];
    bench_with_hang(folder, &relay, [relayed, addresses[1]], "", &words);
    daemon.stop();
}

/// Has each of four blocks written with this value, or read; returns the values read.
pub(crate) fn four_blocks(queue: &mut Submitter, op: Op, value: u8) -> Vec<u8> {
    const BLOCK: usize = 4096;
    for block in 0..4 {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.cookie, bio.sector, bio.sectors) = (op, block, block * 64, BLOCK as u32 / 512);
        bio.segments.push(queue.buffer(block as usize, BLOCK));
        if op == Op::Write {
            queue.data(bio.segments[0]).fill(value);
        }
        queue.submit(bio);
    }
    let mut ended = Vec::new();
    while queue.wait(|bio| ended.push(bio)) > 0 {}
    let value = |bio: Box<Bio>| {
        assert_eq!(bio.status, Status::Ok);
        let mut bytes = [0; BLOCK];
        queue.data(bio.segments[0]).copy_to_slice(&mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        bytes[0]
    };
    ended.into_iter().map(value).collect()
}

#[test]
fn a_write_that_a_hung_path_delays_does_not_land_later() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), "ram:16M?share=on");
    let (relay, relayed) = Relay::start(addresses[0]);
    let paths = [relayed, addresses[1]].map(|address| format!("nvme-tcp://{address}/{NQN}")).join(",");
    let device = format!("multipath:{paths}?policy=round-robin&queues=1&timeout_s={TIMEOUT_S}");
    let config = DiskConfig { threads: 1, depth: 4, buffer_bytes: 4096, queues: QueueCounts::only(1) };
    let mut disk = Disk::open(&device, config).unwrap();
    let values = disk.run(|queue| {
        relay.use_it(|| _ = four_blocks(queue, Op::Write, 1));
        relay.freeze(true);
        let start = Instant::now();
        four_blocks(queue, Op::Write, 2);
        assert!(start.elapsed() >= Duration::from_secs(TIMEOUT_S), "no write was on the path that hangs");
        four_blocks(queue, Op::Write, 3);
        // What the relay has kept arrives.
        relay.freeze(false);
        sleep(Duration::from_millis(500));
        four_blocks(queue, Op::Read, 0)
    });
    assert_eq!(values, [vec![3; 4]]);
    drop(disk);
    daemon.stop();
}

#[test]
fn without_the_command_writes_wait_for_the_declared_time() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Two daemons: neither knows the controllers of the other.
    let targets = ["t", "u"].map(|control| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let export = format!("nvme-tcp://{address}?nqn={NQN}");
        let words = ["--control", control, "--device", "ram:16M", "--export", &export];
        (Daemon::start(folder, &words), address)
    });
    let (relay, relayed) = Relay::start(targets[0].1);
    // All that is in flight ends up on the path that hangs; at a depth of 4 none of it was a write in one of 16 runs.
    let words = ["--rw", "randrw", "--iodepth", "32", "--runtime", "9"];
    let addresses = [relayed, targets[1].1];
    let (report, text) = bench_with_hang(folder, &relay, addresses, "&keep_alive_s=1", &words);
    let [reads, writes] = longest(&report);
    println!("reads took {reads:?}, writes {writes:?} at most");
    assert!(text.contains("unanswered writes wait up to 6 s"), "{text}");
    assert!(reads < Duration::from_secs(TIMEOUT_S) + MOVE + LOADED, "{reads:?}");
    let silence = Duration::from_secs(TIMEOUT_S + 6);
    assert!((silence..silence + LOADED).contains(&writes), "{writes:?}");
    drop(targets);
}
