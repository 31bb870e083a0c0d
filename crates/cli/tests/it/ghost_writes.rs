//! A write that a path delays, while two targets have the same disk: it must not land on a newer one. Neither target
//! can have a controller of the other reset, so the host waits until the first is silent for certain.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use blkyard::{Disk, DiskConfig, Op, QueueCounts};
use rustix::process::Signal;

use crate::common::Daemon;
use crate::cross_reset::{LOADED, NQN, Relay, TIMEOUT_S, four_blocks};

/// Keep-alive timeout and quiesce time of our targets, s.
const SILENCE_S: u64 = 1 + 5;
/// Bytes between the blocks that are written.
const STRIDE: usize = 64 * 512;

/// A daemon with a file, and two targets for it in a daemon each.
struct OneFile {
    targets: [Daemon; 2],
    addresses: [SocketAddr; 2],
    disk: Daemon,
}

impl OneFile {
    fn start(folder: &Path) -> OneFile {
        std::fs::File::create(folder.join("disk")).unwrap().set_len(4 << 20).unwrap();
        let words = ["--control", "d", "--device", "file:disk?share=on", "--export", "vhost-user-blk:d0?queues=2"];
        let disk = Daemon::start(folder, &[&words[..], &["--export", "vhost-user-blk:d1?queues=2"]].concat());
        let addresses = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let targets = [0, 1].map(|number| {
            let device = format!("vhost-user:d{number}");
            let export = format!("nvme-tcp://{}?nqn={NQN}", addresses[number]);
            Daemon::start(folder, &["--control", &format!("t{number}"), "--device", &device, "--export", &export])
        });
        OneFile { targets, addresses, disk }
    }

    fn stop(self) {
        self.targets.into_iter().for_each(Daemon::stop);
        self.disk.stop();
    }
}

/// Writes blocks while the first path hangs, then newer ones over the other; then the first path goes on. Checks the
/// blocks, read by the host and in the file itself.
fn check(folder: &Path, addresses: [SocketAddr; 2], relay: &Relay, hang: impl Fn() + Sync, go_on: impl Fn() + Sync) {
    let paths = addresses.map(|address| format!("nvme-tcp://{address}/{NQN}")).join(",");
    let device = format!("multipath:{paths}?policy=round-robin&queues=1&timeout_s={TIMEOUT_S}&keep_alive_s=1");
    let config = DiskConfig { threads: 1, depth: 4, buffer_bytes: 4096, queues: QueueCounts::only(1) };
    let mut disk = Disk::open(&device, config).unwrap();
    let values = disk.run(|queue| {
        relay.use_it(|| _ = four_blocks(queue, Op::Write, 1));
        hang();
        let start = Instant::now();
        four_blocks(queue, Op::Write, 2);
        let waited = start.elapsed();
        println!("the writes took {waited:?}");
        // By time: no other evidence is to be had from the other target.
        let silence = Duration::from_secs(TIMEOUT_S + SILENCE_S);
        assert!((silence..silence + LOADED).contains(&waited), "{waited:?}");
        four_blocks(queue, Op::Write, 3);
        go_on();
        sleep(Duration::from_secs(1));
        four_blocks(queue, Op::Read, 0)
    });
    assert_eq!(values, [vec![3; 4]]);
    drop(disk);
    let file = std::fs::read(folder.join("disk")).unwrap();
    for block in 0..4 {
        let bytes = &file[block * STRIDE..][..4096];
        assert!(bytes.iter().all(|byte| *byte == 3), "block {block} of the file has {}", bytes[0]);
    }
}

#[test]
fn a_write_late_in_the_network_does_not_land_on_a_newer_one_of_another_target() {
    let folder = tempfile::tempdir().unwrap();
    let rig = OneFile::start(folder.path());
    let (relay, relayed) = Relay::start(rig.addresses[0]);
    let addresses = [relayed, rig.addresses[1]];
    check(folder.path(), addresses, &relay, || relay.freeze(true), || relay.freeze(false));
    rig.stop();
}

#[test]
fn a_write_in_a_stopped_target_does_not_land_on_a_newer_one_of_another_target() {
    let folder = tempfile::tempdir().unwrap();
    let rig = OneFile::start(folder.path());
    let (relay, relayed) = Relay::start(rig.addresses[0]);
    let addresses = [relayed, rig.addresses[1]];
    let target = &rig.targets[0].process;
    check(folder.path(), addresses, &relay, || target.hang(), || target.signal(Signal::CONT));
    rig.stop();
}
