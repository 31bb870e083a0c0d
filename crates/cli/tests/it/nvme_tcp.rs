//! NVMe/TCP exports of a daemon as a user starts it: connections, associations, and hostile hosts beside honest ones.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN, fabrics_status};
use blkyard_nvme::registers::{CSTS, ControllerConfig};
use blkyard_nvme::{
    Cqe, DISCOVERY_LOG, DiscoveryEntry, DiscoveryKind, IdentifyController, NvmeStatus, Sqe, admin, cns, feature, io,
};
use blkyard_wire::nvme_tcp::{FatalStatus, Framing, H2cData, Pdu};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

use crate::common::{Daemon, inspect, program, run, succeed, wait_until};
use crate::tcp_host::{TcpHost, TcpQueue, enabled};

pub const NQN: &str = "nqn.2026-11.test:disk";
pub const HOST: &str = "nqn.2026-11.test:host";

/// An address with a free port. Its loopback address belongs to this call alone: of 127.0.0.1 any other program could
/// get the port before the daemon listens to it, or while it is restarted.
pub fn free_address() -> SocketAddr {
    static CALLS: AtomicU8 = AtomicU8::new(0);
    let [low, high, ..] = std::process::id().to_le_bytes();
    let address = Ipv4Addr::new(127, 1 + CALLS.fetch_add(1, Relaxed) % 200, high, low);
    TcpListener::bind((address, 0)).unwrap().local_addr().unwrap()
}

/// A daemon with a subsystem, and its address.
fn serve(folder: &Path, devices: &[&str], options: &str, words: &[&str]) -> (Daemon, SocketAddr) {
    let address = free_address();
    let export = |number: usize| {
        let options = if number == 0 { format!("?nqn={NQN}{options}") } else { String::new() };
        format!("nvme-tcp://{address}{options}")
    };
    let exports: Vec<_> = (0..devices.len()).map(export).collect();
    let mut arguments = vec!["--control", "c"];
    for (device, export) in devices.iter().zip(&exports) {
        arguments.extend(["--device", device, "--export", export]);
    }
    arguments.extend(words);
    (Daemon::start(folder, &arguments), address)
}

pub fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512) as u8 ^ seed ^ at as u8).collect()
}

fn hosts(folder: &Path) -> usize {
    inspect(folder, &[])["exports"][0]["session"]["target"]["hosts"].as_array().unwrap().len()
}

fn io_queues(folder: &Path) -> u64 {
    inspect(folder, &[])["exports"][0]["session"]["io_queues"].as_u64().unwrap()
}

#[test]
fn files_are_namespaces_of_a_subsystem() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, bytes) in [("a.img", 64 << 20), ("b.img", 32 << 20)] {
        std::fs::File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
    }
    let (daemon, address) = serve(folder, &["a.img", "b.img"], "&serial=S1", &["--lanes", "2"]);
    let greeting = daemon.greeting.join("\n");
    let connect = format!("nvme connect -t tcp -a {} -s {} -n {NQN}", address.ip(), address.port());
    assert!(greeting.contains(&connect) && greeting.contains("namespace 2: b.img"), "{greeting}");
    let mut host = TcpHost::connect(address, NQN, HOST, None, 4);
    let page = host.admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    let identify = IdentifyController::parse(&page.try_into().unwrap());
    assert_eq!((identify.controller_id, identify.namespaces, &identify.serial[..3]), (host.controller, 2, &b"S1 "[..]));
    for round in 0..3 {
        for (number, queue) in host.io.iter_mut().enumerate() {
            for bytes in [512, 4096, 8192, 16 << 10, 128 << 10] {
                for nsid in [1, 2] {
                    let data = pattern(bytes, (round * 8 + number * 2) as u8 + nsid as u8);
                    queue.write(nsid, 1024, &data);
                    assert!(queue.read(nsid, 1024, bytes as u32) == data, "{bytes} bytes of namespace {nsid}");
                }
            }
            queue.succeed(Sqe::new(io::FLUSH, 1), &[], 0);
        }
    }
    let session = &inspect(folder, &[])["exports"][0]["session"];
    assert_eq!((session["io_queues"].as_u64(), session["target"]["nqn"].as_str()), (Some(4), Some(NQN)));
    assert_eq!(session["target"]["hosts"][0]["nqn"].as_str(), Some(HOST));
    let text = succeed(folder, &["inspect", "--control", "c"]);
    assert!(text.contains(HOST) && text.contains("I/O queues connected: 4"), "{text}");
    // What one host wrote is in the file once it is flushed.
    drop(host);
    wait_until("the association ends", || hosts(folder) == 0 && io_queues(folder) == 0);
    daemon.stop();
    let image = std::fs::read(folder.join("b.img")).unwrap();
    assert!(image[1024 * 512..][..128 << 10] == pattern(128 << 10, 2 * 8 + 3 * 2 + 2));
}

#[test]
fn commands_of_the_user_reach_a_controller_over_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder, &["ram:8M?cache=writeback", "ram:1M"], "&serial=S7", &[]);
    let name = format!("nvme-tcp://{address}/{NQN}");
    let nvme = |words: &[&str]| run(folder, &[&["nvme", words[0], &name], &words[1..]].concat());
    let bytes = |words: &[&str]| {
        let output = nvme(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let json = |words: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&bytes(&[words, &["-o", "json"]].concat())).unwrap()
    };
    // The same as by a host of PDUs, but for the identifier of the controller, and the numbers of its instance.
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    let mut known = host.admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    drop(host);
    let passthru = ["admin-passthru", "-O", "6", "-r", "-l", "4096", "--cdw10=1", "-b"];
    let [mut found, mut passed] = [&["id-ctrl", "-b"][..], &passthru].map(&bytes);
    for data in [&mut known, &mut found, &mut passed] {
        data[78..80].fill(0);
        data[135..144].fill(0);
    }
    assert!(found == known && passed == known && known[4..6] == *b"S7");
    let controller = json(&["id-ctrl"]);
    assert_eq!((controller["sn"].as_str().unwrap().trim_end(), &controller["subnqn"]), ("S7", &NQN.into()));
    let sizes = [&["id-ns"][..], &["id-ns", "-n", "2"]].map(|words| json(words)["nsze"].as_u64().unwrap());
    assert_eq!(sizes, [16384, 2048]);
    assert_eq!(json(&["smart-log"])["critical_warning"], 0);
    assert!(!json(&["error-log"])["errors"].as_array().unwrap().is_empty());
    assert_eq!(json(&["get-feature"])["feature: 0x06"][0]["name"], "Volatile Write Cache");
    for (words, part) in [
        (&["admin-passthru", "-O", "0xc0"][..], "invalid opcode (001h)"),
        (&["id-ns", "-n", "77"], "give a namespace"),
        (&["io-passthru", "-O", "2", "-n", "1", "-r", "-l", "512"], "only admin commands"),
        (&["admin-passthru", "-O", "6", "-r", "-l", "8192", "--cdw10=1"], "at most 4096 bytes"),
    ] {
        let output = nvme(words);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && error.contains(part), "{words:?}: {error}");
    }
    // Each has disconnected in order.
    wait_until("the associations end", || hosts(folder) == 0);
    for wrong in [format!("nvme-tcp://{address}/nqn.other"), format!("nvme-tcp://{}:1/{NQN}", address.ip())] {
        let output = run(folder, &["nvme", "id-ctrl", &wrong]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && error.contains(&wrong), "{error}");
    }
    daemon.stop();
}

#[test]
fn each_command_is_answered_while_the_lane_falls_asleep() {
    // A command that needs no device at first, at any time: a write that asks for its data, and an invalid one.
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["null:1G"], "", &["--spin-us", "0"]);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    let data = pattern(16 << 10, 1);
    for round in 0..2000_u32 {
        (0..round % 50).for_each(|_| std::hint::spin_loop());
        host.io[0].write(1, 0, &data);
        let refused = host.io[0].run(Sqe::new(0x99, 1), &[], 0);
        assert_eq!(refused.status, NvmeStatus::INVALID_OPCODE.with_dnr());
    }
    daemon.stop();
}

#[test]
fn discovery_log_names_subsystem_and_referrals() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["null:1G"], "&referrals=127.0.0.9:8009&hosts=nqn.other", &[]);
    let mut queue = TcpQueue::initialized(address);
    let answer = queue.connect(NQN, HOST, 0, ANY_CONTROLLER, 0);
    assert_eq!((answer.status, answer.result), (fabrics_status::INVALID_HOST.with_dnr(), 512 | 1 << 16));
    // What a host may not use is not shown to it.
    let [referral] = &discover(address, HOST)[..] else { panic!("more than the referral") };
    assert_eq!((referral.kind, referral.port), (DiscoveryKind::Referral, 8009));
    let [subsystem, other] = &discover(address, "nqn.other")[..] else { panic!("not both") };
    assert_eq!((subsystem.kind, subsystem.subsystem.as_str()), (DiscoveryKind::Subsystem, NQN));
    assert_eq!((subsystem.address, subsystem.port), (address.ip(), address.port()));
    assert_eq!(other, referral);
    daemon.stop();
}

/// What the discovery service shows to a host.
fn discover(address: SocketAddr, host: &str) -> Vec<DiscoveryEntry> {
    let mut queue = TcpQueue::initialized(address);
    let answer = queue.connect(DISCOVERY_NQN, host, 0, ANY_CONTROLLER, 0);
    assert!(answer.status.is_success(), "{answer:?}");
    let early = queue.run(Sqe::get_log_page(DISCOVERY_LOG, 0, 0, 256, 0), &[], 1024);
    assert_eq!(early.status, NvmeStatus::COMMAND_SEQUENCE.with_dnr());
    queue.set_config(enabled());
    let log = queue.succeed(Sqe::get_log_page(DISCOVERY_LOG, 0, 0, 768, 0), &[], 3072);
    let count = usize::from(log[8]);
    let entries = log.chunks_exact(1024).skip(1).take(count);
    entries.map(|entry| DiscoveryEntry::parse(entry.try_into().unwrap()).unwrap()).collect()
}

#[test]
fn hostile_connection_gets_its_term_req_and_costs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:64M"], "", &[]);
    let mut honest = TcpHost::connect(address, NQN, HOST, None, 2);
    let data = H2cData { cccid: 1, ttag: 0, offset: 0, len: 512, is_last: true };
    let h2c = [Pdu::H2cData(data).encode(Framing::PLAIN).bytes(), &[0; 512]].concat();
    let mut check = |name: &str, mut queue: TcpQueue, bytes: &[u8], status: FatalStatus, information: u32| {
        queue.send(bytes);
        let term = queue.term_req();
        assert_eq!((term.status, term.information), (status as u16, information), "{name}");
        let data = pattern(4096, 7);
        honest.io[1].write(1, 8, &data);
        assert_eq!(honest.io[0].read(1, 8, 4096), data, "{name}");
    };
    // CVE-2026-22998, before Connect and on an I/O queue; CVE-2026-89969: a second ICReq.
    check("data before Connect", TcpQueue::initialized(address), &h2c, FatalStatus::InvalidHeaderField, 10);
    let mut second = [0; 128];
    (second[2], second[4]) = (128, 128);
    check("second ICReq", TcpQueue::initialized(address), &second, FatalStatus::SequenceError, 0);
    check("command before ICReq", TcpQueue::open(address), &[4, 0, 72, 0, 72, 0, 0, 0], FatalStatus::SequenceError, 0);
    check(
        "unknown type",
        TcpQueue::initialized(address),
        &[0x30, 0, 8, 0, 8, 0, 0, 0],
        FatalStatus::InvalidHeaderField,
        0,
    );
    let mut other = TcpHost::connect(address, NQN, "nqn.hostile", None, 1);
    check("data on an I/O queue", other.io.remove(0), &h2c, FatalStatus::InvalidHeaderField, 10);
    check("data on an admin queue", other.admin, &h2c, FatalStatus::InvalidHeaderField, 10);
    // CVE-2023-5178, CVE-2026-46135: connections that end at each point.
    for point in 0..4 {
        let mut queue = TcpQueue::open(address);
        if point > 0 {
            queue = TcpQueue::initialized(address);
        }
        if point > 1 {
            queue.connect(NQN, HOST, 0, ANY_CONTROLLER, 0);
        }
        if point > 2 {
            queue.submit(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
        }
    }
    let data = pattern(4096, 9);
    honest.io[0].write(1, 0, &data);
    assert_eq!(honest.io[1].read(1, 0, 4096), data);
    wait_until("the hostile associations end", || hosts(folder.path()) == 1 && io_queues(folder.path()) == 2);
    daemon.stop();
}

#[test]
fn idle_connections_keep_no_host_out() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["null:1G"], "", &[]);
    let mut honest = TcpHost::connect(address, NQN, HOST, None, 1);
    // Peers that send nothing, or half an ICReq.
    let mut idle: Vec<_> = (0..1000).map(|_| TcpStream::connect(address).unwrap()).collect();
    idle.iter_mut().step_by(2).for_each(|stream| drop(stream.write_all(&[0, 0, 128])));
    honest.io[0].read(1, 0, 4096);
    let mut late = TcpHost::connect(address, NQN, "nqn.late", None, 1);
    late.io[0].read(1, 0, 4096);
    honest.io[0].read(1, 8, 4096);
    // The oldest were disconnected.
    let mut first = idle.swap_remove(0);
    first.set_read_timeout(Some(crate::common::PATIENCE)).unwrap();
    let end = std::io::Read::read(&mut first, &mut [0; 16]);
    assert!(matches!(end, Ok(0)) || end.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
    daemon.stop();
}

#[test]
fn a_peer_that_leaves_before_it_is_accepted_is_no_shortage() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, address) = (folder.path(), free_address());
    let log = folder.join("log");
    let export = format!("nvme-tcp://{address}?nqn={NQN}");
    let mut command = program(folder, &["serve", "--control", "c", "--device", "null:1G", "--export", &export]);
    let daemon = Daemon::launch(command.stderr(std::fs::File::create(&log).unwrap()));
    daemon.hang();
    for _ in 0..20 {
        let stream = TcpStream::connect(address).unwrap();
        // Closed by a reset.
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    }
    daemon.signal(Signal::CONT);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    host.io[0].read(1, 0, 4096);
    daemon.stop();
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains(HOST) && !log.contains("could not be accepted"), "{log}");
}

#[test]
fn connect_to_the_same_controller_ends_the_old_association() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:64M"], "", &[]);
    let mut old = TcpHost::connect(address, NQN, HOST, None, 2);
    old.io[0].write(1, 0, &pattern(4096, 1));
    let mut new = TcpHost::connect(address, NQN, HOST, Some(old.controller), 2);
    assert_eq!(new.controller, old.controller);
    // Connections of the old one are closed: what is sent there has no effect.
    new.io[1].write(1, 0, &pattern(4096, 2));
    for queue in &mut old.io {
        queue.submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &pattern(4096, 3), 0);
        assert_eq!(queue.next(), None);
    }
    assert_eq!(old.admin.next(), None);
    assert_eq!(new.io[0].read(1, 0, 4096), pattern(4096, 2));
    // Another host cannot end it.
    let refused = TcpQueue::initialized(address).connect(NQN, "nqn.other", 0, new.controller, 0);
    assert_eq!(refused.status, fabrics_status::CONTROLLER_BUSY);
    assert_eq!(new.io[0].read(1, 0, 4096), pattern(4096, 2));
    daemon.stop();
}

#[test]
fn keep_alive_timeout_ends_an_association() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:64M"], "", &[]);
    let mut other = TcpHost::connect(address, NQN, "nqn.other", None, 1);
    let mut quiet = TcpQueue::initialized(address);
    let controller = quiet.connect(NQN, HOST, 0, ANY_CONTROLLER, 4000).result as u16;
    quiet.set_config(enabled());
    let mut queue = TcpQueue::initialized(address);
    assert!(queue.connect(NQN, HOST, 1, controller, 0).status.is_success());
    // Without Keep Alive both connections end; the one of another host stays.
    assert_eq!((quiet.next(), queue.next()), (None, None));
    other.io[0].write(1, 0, &pattern(512, 1));
    assert_eq!(other.io[0].read(1, 0, 512), pattern(512, 1));
    daemon.stop();
}

#[test]
fn reset_and_shutdown_end_the_io_queues() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:64M"], "", &[]);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 2);
    host.admin.set_config(ControllerConfig { enabled: false, ..enabled() });
    wait_until("the controller is reset", || host.admin.property(CSTS) == 0);
    for queue in &mut host.io {
        assert_eq!(queue.next(), None);
    }
    host.admin.set_config(enabled());
    let mut queue = TcpQueue::initialized(address);
    assert!(queue.connect(NQN, HOST, 1, host.controller, 0).status.is_success());
    queue.write(1, 0, &pattern(512, 1));
    host.admin.set_config(ControllerConfig { shutdown: 1, ..enabled() });
    wait_until("the controller is shut down", || host.admin.property(CSTS) & 0xc == 8);
    assert_eq!(queue.next(), None);
    daemon.stop();
}

/// Disables the write cache, which is flushed for that, and does not wait.
fn disable_write_cache(admin: &mut TcpQueue) {
    admin.submit(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, 0), &[], 0);
}

#[test]
fn a_disabled_write_cache_has_no_write_that_was_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let latency = Duration::from_secs(1);
    let (daemon, address) = serve(folder, &["ram:16M?cache=writeback&latency_us=1000000"], "", &[]);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 2);
    let begin = Instant::now();
    host.io[1].submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &pattern(4096, 1), 0);
    wait_until("the device has the write", || inspect(folder, &[]).to_string().contains("\"in_flight\":1"));
    disable_write_cache(&mut host.admin);
    assert!(matches!(host.admin.next(), Some((Pdu::CapsuleResp(cqe), _)) if Cqe(cqe).status().is_success()));
    assert!(begin.elapsed() >= 2 * latency, "the flush began before the write had ended: {:?}", begin.elapsed());
    drop(host);
    daemon.stop();
}

#[test]
fn an_io_queue_connects_while_the_device_is_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = ["ram:16M?cache=writeback&latency_us=2000000"];
    let (daemon, address) = serve(folder, &words, "&queues=2", &[]);
    let mut admin = TcpQueue::initialized(address);
    let controller = admin.connect(NQN, HOST, 0, ANY_CONTROLLER, 0).result as u16;
    admin.set_config(enabled());
    assert_eq!(admin.property(CSTS), 1);
    disable_write_cache(&mut admin);
    wait_until("the device is flushed", || inspect(folder, &[]).to_string().contains("\"in_flight\":1"));
    let mut queue = TcpQueue::initialized(address);
    assert!(queue.connect(NQN, HOST, 1, controller, 0).status.is_success());
    assert!(matches!(admin.next(), Some((Pdu::CapsuleResp(cqe), _)) if Cqe(cqe).status().is_success()));
    queue.write(1, 0, &pattern(4096, 1));
    drop((admin, queue));
    daemon.stop();
}

#[test]
fn growth_is_announced_to_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("a.img")).unwrap().set_len(1 << 20).unwrap();
    let (daemon, address) = serve(folder, &["a.img"], "", &[]);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 2);
    host.admin.succeed(Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 8), &[], 0);
    host.admin.submit(Sqe::new(admin::ASYNC_EVENT, 0), &[], 0);
    let beyond = Sqe::with_blocks(io::READ, 1, 2048, 8, 0);
    assert_eq!(host.io[0].run(beyond, &[], 4096).status, NvmeStatus::LBA_OUT_OF_RANGE.with_dnr());
    succeed(folder, &["set", "--control", "c", "device:0", "size=2M"]);
    let Some((Pdu::CapsuleResp(cqe), _)) = host.admin.next() else { panic!("no event") };
    assert_eq!(cqe[0] as u32, 2 | 4 << 16);
    for queue in &mut host.io {
        assert_eq!(queue.read(1, 2048, 4096), [0; 4096]);
    }
    daemon.stop();
}

#[test]
fn without_descriptors_connections_wait_and_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, address) = (folder.path(), free_address());
    let log = folder.join("log");
    let export = format!("nvme-tcp://{address}?nqn={NQN}");
    let mut command = program(folder, &["serve", "--control", "c", "--device", "ram:16M", "--export", &export]);
    let daemon = Daemon::launch(command.stderr(std::fs::File::create(&log).unwrap()));
    let mut host = TcpHost::connect(address, NQN, HOST, None, 2);
    // It may open nothing more; what is open stays.
    let pid = Pid::from_child(&daemon.process.0);
    let limit = |limit: Rlimit| prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let before = limit(Rlimit { current: Some(3), ..getrlimit(Resource::Nofile) });
    let waiting: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let warnings = || std::fs::read_to_string(&log).unwrap().matches("could not be accepted").count();
    wait_until("the shortage is logged", || warnings() > 0);
    for round in 0..200 {
        let data = pattern(4096, round);
        host.io[0].write(1, u64::from(round) * 8, &data);
        assert_eq!(host.io[1].read(1, u64::from(round) * 8, 4096), data);
        host.admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    }
    limit(before);
    let mut late = TcpHost::connect(address, NQN, "nqn.late", None, 1);
    assert_eq!(late.io[0].read(1, 8, 4096), pattern(4096, 1));
    drop(waiting);
    daemon.stop();
}

#[test]
fn idle_connections_that_have_all_descriptors_keep_no_host_out() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["null:1G"], "", &[]);
    let mut honest = TcpHost::connect(address, NQN, HOST, None, 1);
    let pid = Pid::from_child(&daemon.process.0);
    let open = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap().count() as u64;
    let limit = Rlimit { current: Some(open + 20), ..getrlimit(Resource::Nofile) };
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let begin = Instant::now();
    let _idle: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut late = TcpHost::connect(address, NQN, "nqn.late", None, 1);
    late.io[0].read(1, 0, 4096);
    assert!(begin.elapsed() < Duration::from_secs(10), "it waited until the idle ones had no time left");
    honest.io[0].read(1, 8, 4096);
    daemon.stop();
}

/// CVE-2024-46737: a Connect for whose commands the system has no memory left. Its queue was torn down with them.
#[test]
fn connect_without_memory_for_its_commands_is_refused_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:16M"], "", &[]);
    let mut honest = TcpHost::connect(address, NQN, HOST, None, 1);
    let mut queue = TcpQueue::initialized(address);
    let mut leaving = TcpQueue::initialized(address);
    // Enough for what is allocated in small parts, and not for the memory of an admin queue's commands.
    let pid = Pid::from_child(&daemon.process.0);
    let sizes = std::fs::read_to_string(format!("/proc/{}/statm", pid.as_raw_nonzero())).unwrap();
    let pages: u64 = sizes.split(' ').next().unwrap().parse().unwrap();
    let limit = |limit: Rlimit| prlimit(Some(pid), Resource::As, limit).unwrap();
    let before = limit(Rlimit { current: Some(pages * 4096 + (256 << 10)), ..getrlimit(Resource::As) });
    for round in 0..50 {
        let answer = queue.connect(NQN, "nqn.late", 0, ANY_CONTROLLER, 0);
        assert_eq!((answer.status, answer.result), (NvmeStatus::INTERNAL, 0), "round {round}");
        // There is no queue, and no association whose command this could be.
        let command = queue.run(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
        assert_eq!(command.status, NvmeStatus::COMMAND_SEQUENCE.with_dnr());
        let data = pattern(4096, round);
        honest.io[0].write(1, 0, &data);
        assert_eq!(honest.io[0].read(1, 0, 4096), data);
    }
    let answer = leaving.connect(NQN, "nqn.leaving", 0, ANY_CONTROLLER, 0);
    assert_eq!(answer.status, NvmeStatus::INTERNAL);
    drop(leaving);
    assert_eq!(hosts(folder.path()), 1);
    limit(before);
    assert!(queue.connect(NQN, "nqn.late", 0, ANY_CONTROLLER, 0).status.is_success(), "the connection can be used");
    queue.set_config(enabled());
    assert_eq!(queue.property(CSTS), 1);
    assert_eq!(hosts(folder.path()), 2);
    daemon.stop();
}

/// CVE-2022-48697: a target used the request of an I/O queue's Connect after its response had gone out. Here a command
/// is a slot of its queue, which is free for another one only then. So a host that sends commands right behind the
/// Connect and leaves at once, in any way, costs the target nothing but that queue.
#[test]
fn io_connect_whose_host_leaves_at_once_frees_its_queue() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, address) = serve(folder.path(), &["ram:16M"], "&queues=4", &[]);
    let mut honest = TcpHost::connect(address, NQN, HOST, None, 1);
    for round in 0..60 {
        let mut admin = TcpQueue::initialized(address);
        let controller = admin.connect(NQN, "nqn.leaving", 0, ANY_CONTROLLER, 0).result as u16;
        admin.set_config(enabled());
        assert_eq!(admin.property(CSTS), 1);
        let queues: Vec<_> = (1..=2)
            .map(|qid| {
                let mut queue = TcpQueue::initialized(address);
                let connect = queue.submit_connect(NQN, "nqn.leaving", qid, controller, 0);
                let read = queue.submit(Sqe::with_blocks(io::READ, 1, 0, 8, 0), &[], 4096);
                if round % 3 == 0 {
                    // The response, the read's data, and its response, in this order.
                    let answers: Vec<_> = (0..3).map(|_| queue.next().unwrap()).collect();
                    let status = |at: usize| match answers[at].0 {
                        Pdu::CapsuleResp(cqe) => (Cqe(cqe).cid(), Cqe(cqe).status()),
                        ref other => panic!("{other:?}"),
                    };
                    assert_eq!([status(0), status(2)], [(connect, NvmeStatus::SUCCESS), (read, NvmeStatus::SUCCESS)]);
                }
                if round % 2 == 0 {
                    // Closed by a reset.
                    set_socket_linger(&queue.stream, Some(Duration::ZERO)).unwrap();
                }
                queue
            })
            .collect();
        // The queues first, or the admin queue.
        if round % 4 < 2 {
            drop(queues);
            drop(admin);
        } else {
            drop(admin);
            drop(queues);
        }
        let data = pattern(4096, round);
        honest.io[0].write(1, 8, &data);
        assert_eq!(honest.io[0].read(1, 8, 4096), data);
        wait_until("its queues are free", || hosts(folder.path()) == 1 && io_queues(folder.path()) == 1);
    }
    daemon.stop();
}

#[test]
fn a_hung_device_behind_an_ended_association_holds_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = ["--control", "d", "--device", "ram:16M", "--export", "vhost-user-blk:b?queues=4"];
    let disk = Daemon::start(folder, &disk);
    let (daemon, address) = serve(folder, &["vhost-user:b", "ram:16M"], "&queues=4", &[]);
    let mut other = TcpHost::connect(address, NQN, "nqn.other", None, 1);
    let mut ended = TcpHost::connect(address, NQN, HOST, None, 2);
    // The disk knows the memory of the daemon after the first write.
    ended.io[0].write(1, 0, &[0; 4096]);
    disk.hang();
    ended.io[0].submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &[1; 4096], 0);
    // Its data does not come.
    ended.io[1].submit(Sqe::with_blocks(io::WRITE, 1, 64, 32, 0), &[2; 16 << 10], 0);
    assert!(matches!(ended.io[1].next(), Some((Pdu::R2t(_), _))));
    wait_until("the write is at the disk", || {
        let queues = inspect(folder, &[])["exports"][0]["queues"].clone();
        queues.as_array().is_some_and(|queues| queues.iter().any(|queue| queue["now"]["in_flight"] == 1))
    });
    drop(ended);
    // The queue with the write is kept, and no other one.
    wait_until("the other queue is free", || io_queues(folder) == 2);
    let mut third = TcpHost::connect(address, NQN, "nqn.third", None, 2);
    for round in 0..100 {
        let data = pattern(4096, round);
        other.io[0].write(2, 0, &data);
        assert_eq!(third.io[usize::from(round % 2)].read(2, 0, 4096), data);
        other.admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    }
    assert_eq!(io_queues(folder), 4, "the device still has a write of the association");
    disk.signal(Signal::CONT);
    wait_until("the association is gone", || io_queues(folder) == 3 && hosts(folder) == 2);
    assert_eq!(other.io[0].read(1, 0, 4096), [1; 4096], "the device had it");
    assert_eq!(other.io[0].read(1, 64, 16 << 10), [0; 16 << 10], "its data never came");
    drop((other, third));
    daemon.stop();
    drop(disk);
}
