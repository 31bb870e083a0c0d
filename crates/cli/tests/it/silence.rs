//! What a target promises of associations that have ended, when its process or its device hangs.

use std::thread::sleep;
use std::time::{Duration, Instant};

use blkyard_nvme::{KEEP_ALIVE_LATE_NS, Sqe, admin, feature, io};
use rustix::process::Signal;

use crate::common::{inspect, wait_until};
use crate::cross_reset::{HOST, NQN, two_ports, with_held_write};
use crate::tcp_host::TcpHost;

const KEEP_ALIVE_MS: u32 = 1000;

#[test]
fn a_target_that_was_stopped_executes_nothing_of_the_past() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), "ram:16M?share=on");
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 2));
    for host in &mut hosts {
        host.admin.succeed(Sqe::feature(admin::SET_FEATURES, feature::KEEP_ALIVE, KEEP_ALIVE_MS), &[], 0);
        host.io[0].write(1, 0, &[1; 4096]);
    }
    daemon.hang();
    let begun = Instant::now();
    for queue in hosts.iter_mut().flat_map(|host| &mut host.io) {
        queue.submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &[2; 4096], 0);
    }
    // In time, and read too late.
    hosts[0].admin.submit(Sqe::new(admin::KEEP_ALIVE, 0), &[], 0);
    let until = Duration::from_millis(KEEP_ALIVE_MS.into()) + Duration::from_nanos(2 * KEEP_ALIVE_LATE_NS);
    sleep(until.saturating_sub(begun.elapsed()));
    daemon.signal(Signal::CONT);
    let mut next = TcpHost::connect(addresses[0], NQN, HOST, None, 1);
    for host in &mut hosts {
        assert!(host.io.iter_mut().all(|queue| queue.next().is_none()), "a command was answered");
        while host.admin.next().is_some() {}
    }
    assert_eq!(next.io[0].read(1, 0, 4096), [1; 4096]);
    drop((hosts, next));
    daemon.stop();
}

#[test]
fn a_host_waits_for_the_commands_of_its_ended_associations() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (disk, daemon, [lost, mut host], address) = with_held_write(folder, "");
    let mut foreign = TcpHost::connect(address, NQN, "nqn.2026-11.test:other", None, 1);
    let at_disk = || {
        let exports = inspect(folder, &[])["exports"].clone();
        let queues = exports.as_array().into_iter().flatten().filter_map(|export| export["queues"].as_array());
        queues.flatten().filter_map(|queue| queue["now"]["in_flight"].as_u64()).sum::<u64>()
    };
    assert_eq!(at_disk(), 1);
    drop(lost);
    sleep(Duration::from_nanos(2 * KEEP_ALIVE_LATE_NS));
    host.io[0].submit(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &[2; 4096], 0);
    foreign.io[0].submit(Sqe::with_blocks(io::READ, 1, 8, 1, 0), &[], 512);
    wait_until("the read of another host is at the disk", || at_disk() == 2);
    sleep(Duration::from_millis(100));
    assert_eq!(at_disk(), 2, "the write is there, too");
    let said = std::fs::read_to_string(folder.join("log")).unwrap();
    assert!(
        said.contains(&format!("commands of host {HOST} wait: a device has not ended those of controller")),
        "{said}"
    );
    disk.signal(Signal::CONT);
    while !matches!(host.io[0].next(), Some((blkyard_wire::nvme_tcp::Pdu::CapsuleResp(_), _))) {}
    assert_eq!(host.io[0].read(1, 0, 4096), [2; 4096]);
    drop((host, foreign));
    daemon.stop();
    drop(disk);
}
