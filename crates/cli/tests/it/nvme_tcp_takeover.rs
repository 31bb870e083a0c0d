//! `serve --takeover` under hosts of NVMe/TCP exports: their connections continue with the next daemon.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use blkyard_nvme::fabrics::ANY_CONTROLLER;
use blkyard_nvme::{Cqe, NvmeStatus, Psdt, Sqe, admin, feature, io};
use blkyard_wire::nvme_tcp::{Framing, H2cData, IcReq, Pdu, R2t};

use crate::common::{Daemon, Process, inspect, program, run, succeed, wait_until};
use crate::nvme_takeover::{replace, take_and_leave};
use crate::nvme_tcp::{free_address, pattern};
use crate::tcp_host::{TcpHost, TcpQueue, enabled};

const NQN: &str = "nqn.2026-11.test:takeover";
const HOST: &str = "nqn.2026-11.test:host";
const IN_CAPSULE: u64 = 0x01 << 56;
const TRANSPORT: u64 = 0x5a << 56;

/// A daemon with two images as namespaces of one subsystem, and its address.
fn serve(folder: &Path, limit: &str) -> (Daemon, SocketAddr) {
    let address = free_address();
    let mut words = ["--control", "c", "--lanes", "2"].map(str::to_owned).to_vec();
    for (name, options) in [("a.img", format!("?nqn={NQN}&queues=8&ana_group=1")), ("b.img", "?ana_group=2".into())] {
        std::fs::File::create(folder.join(name)).unwrap().set_len(64 << 20).unwrap();
        let words_of =
            ["--device", &format!("file:{name}{limit}"), "--export", &format!("nvme-tcp://{address}{options}")];
        words.extend(words_of.map(str::to_owned));
    }
    (Daemon::start(folder, &words.iter().map(String::as_str).collect::<Vec<_>>()), address)
}

fn hosts(folder: &Path) -> serde_json::Value {
    inspect(folder, &[])["exports"][0]["session"]["target"]["hosts"].clone()
}

#[test]
fn hosts_continue_through_takeovers_under_verified_writes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // So slow that the hosts are at work for longer than the takeovers take.
    let (mut daemon, address) = serve(folder, "?bytes_per_s_max=8M");
    let device = format!("nvme-tcp://{address}/{NQN}");
    let first = format!("{device}?namespace=1&queues=2");
    let second = format!("{device}?namespace=2&queues=2&header_digest=on&data_digest=on");
    let client = |device: &str, words: &[&str]| {
        let all = ["bench", device, "--rw", "randwrite", "--verify", "crc32c", "--queues", "2", "--numjobs", "2"];
        let mut command = program(folder, &[&all, words].concat());
        Process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let mut clients =
        [client(&first, &["--bs", "4k", "--iodepth", "16"]), client(&second, &["--bs", "128k", "--iodepth", "8"])];
    let queues = || inspect(folder, &[])["exports"][0]["session"]["io_queues"].as_u64().unwrap();
    wait_until("both hosts connect", || queues() == 4);
    let before = hosts(folder);
    for takeover in 0..3 {
        take_and_leave(folder, "\"target\":{");
        let pause = replace(folder, &mut daemon);
        println!("hosts were paused for {pause} ms");
        assert_eq!((hosts(folder), queues()), (before.clone(), 4), "takeover {takeover}");
    }
    assert!(clients.iter_mut().all(Process::is_running), "a client has ended before the last takeover");
    for client in &mut clients {
        let (mut said, status) = (String::new(), client.ended());
        client.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success() && !said.contains("lost"), "{status}: {said}");
    }
    wait_until("the associations end", || hosts(folder).as_array().unwrap().is_empty());
    daemon.stop();
}

/// A write of 4 KiB as a capsule with its data.
fn capsule(cid: u16, block: u64, data: &[u8]) -> Vec<u8> {
    let sqe = Sqe::with_blocks(io::WRITE, 1, block, data.len() as u32 / 512, 0).with_cid(cid);
    let sqe = sqe.with_data(Psdt::Sgl, [0, IN_CAPSULE + data.len() as u64]);
    [Pdu::CapsuleCmd { sqe: sqe.0, len: data.len() as u32 }.encode(Framing::PLAIN).bytes(), data].concat()
}

/// Sends a write, and returns what the target asks for.
fn asked(queue: &mut TcpQueue, cid: u16, block: u64, bytes: u32) -> R2t {
    let sqe = Sqe::with_blocks(io::WRITE, 1, block, bytes / 512, 0).with_cid(cid);
    let sqe = sqe.with_data(Psdt::Sgl, [0, TRANSPORT + u64::from(bytes)]);
    queue.send(Pdu::CapsuleCmd { sqe: sqe.0, len: 0 }.encode(Framing::PLAIN).bytes());
    let next = queue.next();
    let Some((Pdu::R2t(r2t), _)) = next else { panic!("{next:?}") };
    r2t
}

fn completed(queue: &mut TcpQueue) -> Cqe {
    let next = queue.next();
    let Some((Pdu::CapsuleResp(cqe), _)) = next else { panic!("{next:?}") };
    assert_eq!(Cqe(cqe).status(), NvmeStatus::SUCCESS);
    Cqe(cqe)
}

#[test]
fn a_stream_is_continued_from_any_byte_of_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut daemon, address) = serve(folder, "");
    let mut host = TcpHost::connect(address, NQN, HOST, None, 4);
    host.admin.succeed(Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 8), &[], 0);
    let event = host.admin.submit(Sqe::new(admin::ASYNC_EVENT, 0), &[], 0);
    // Connections before their Connect.
    let request = Pdu::IcReq(IcReq { alignment: 0, header_digest: false, data_digest: false, maxr2t: 0 });
    let (mut half, mut fresh) = (TcpQueue::open(address), TcpQueue::initialized(address));
    half.send(&request.encode(Framing::PLAIN).bytes()[..50]);
    let mut heads = [0; 2];
    for (number, cut) in [1, 7, 8, 71, 72, 73, 4000].into_iter().enumerate() {
        let seed = number as u8;
        let (block, cid) = (number as u64 * 64, number as u16 + 100);
        let (short, long) = (pattern(4096, seed), pattern(16 << 10, seed + 100));
        // Part of a capsule. Part of data that was asked for, in the memory of a slot and of the pool.
        let whole = capsule(cid, block, &short);
        host.io[0].send(&whole[..cut]);
        let mut data = [Vec::new(), Vec::new()];
        for (place, bytes) in [(0, &short), (1, &long)] {
            let queue = &mut host.io[place + 1];
            let r2t = asked(queue, cid, block + 8 + place as u64 * 8, bytes.len() as u32);
            let (cccid, ttag, len) = (r2t.cccid, r2t.ttag, r2t.len);
            let header = H2cData { cccid, ttag, offset: 0, len, is_last: true };
            data[place] = [Pdu::H2cData(header).encode(Framing::PLAIN).bytes(), bytes].concat();
            queue.send(&data[place][..cut.min(data[place].len())]);
        }
        if number % 2 == 0 {
            take_and_leave(folder, "\"target\":{");
        }
        if number != 2 {
            replace(folder, &mut daemon);
        }
        host.io[0].send(&whole[cut..]);
        heads[0] = completed(&mut host.io[0]).sq_head();
        for (place, data) in data.iter().enumerate() {
            host.io[place + 1].send(&data[cut..]);
            assert_eq!(completed(&mut host.io[place + 1]).cid(), cid);
        }
        assert_eq!(heads[0], heads[1] + 1 + u16::from(number == 0), "the head of the queue");
        heads[1] = heads[0];
        let read: Vec<u8> = [0, 8].map(|at| host.io[3].read(1, block + at, 4096)).concat();
        assert!(read == [&short[..], &short].concat() && host.io[3].read(1, block + 16, 16 << 10) == long, "cut {cut}");
    }
    half.send(&request.encode(Framing::PLAIN).bytes()[50..]);
    assert!(matches!(half.next(), Some((Pdu::IcResp(_), _))));
    let answer = fresh.connect(NQN, "nqn.fresh", 0, ANY_CONTROLLER, 0);
    assert!(answer.status.is_success() && answer.result as u16 != host.controller, "{answer:?}");
    // The event request that the first daemon took.
    succeed(folder, &["set", "--control", "c", "device:0", "size=65M"]);
    let Some((Pdu::CapsuleResp(cqe), _)) = host.admin.next() else { panic!("no event") };
    assert_eq!((Cqe(cqe).cid(), cqe[0] as u32), (event, 2 | 4 << 16));
    daemon.stop();
}

#[test]
fn timers_and_access_states_are_those_of_before() {
    const KEEP_ALIVE: Duration = Duration::from_secs(6);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut daemon, address) = serve(folder, "");
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    succeed(folder, &["set", "--control", "c", "export:0", "ana_group=2", "ana_state=inaccessible"]);
    let mut quiet = TcpQueue::initialized(address);
    let begin = Instant::now();
    let answer = quiet.connect(NQN, "nqn.quiet", 0, ANY_CONTROLLER, KEEP_ALIVE.as_millis() as u32);
    assert!(answer.status.is_success());
    quiet.set_config(enabled());
    std::thread::sleep(KEEP_ALIVE * 2 / 3);
    replace(folder, &mut daemon);
    let read = |host: &mut TcpHost, nsid| host.io[0].run(Sqe::with_blocks(io::READ, nsid, 0, 8, 0), &[], 4096).status;
    assert_eq!([1, 2].map(|nsid| read(&mut host, nsid)), [NvmeStatus::SUCCESS, NvmeStatus::ANA_INACCESSIBLE]);
    assert_eq!(quiet.next(), None);
    let passed = begin.elapsed();
    assert!(passed >= KEEP_ALIVE && passed < KEEP_ALIVE * 5 / 3, "ended after {passed:?}");
    daemon.stop();
}

#[test]
fn another_number_of_queues_is_refused_and_a_takeover_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut daemon, address) = serve(folder, "");
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    let refused = run(folder, &["set", "--control", "c", "export:0", "queues=16"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("serve it with queues=N"), "{said}");
    replace(folder, &mut daemon);
    host.io[0].write(1, 0, &pattern(4096, 1));
    assert_eq!(host.io[0].read(1, 0, 4096), pattern(4096, 1));
    daemon.stop();
}
