//! A device that hangs, or is lost, beside others, in a daemon as a user starts it: whoever does not use it notices
//! nothing.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use blkyard_nvme::{Sqe, io};
use rustix::process::Signal;

use crate::common::{Daemon, Process, inspect, program, run, succeed, wait_until};
use crate::fuse::Fuse;
use crate::loop_device::Loop;
use crate::nvme_tcp::{HOST, NQN, free_address, pattern};
use crate::tcp_host::TcpHost;

/// How often `set` is tried: each waits 10 s for the queue, which is much on any machine.
const ROUNDS: usize = 3;
/// Times that another export is used, and all of them are looked at, while one `set` waits. The first may come before
/// the daemon has begun with it.
const USES: usize = 3;
const LANES: [&str; 5] = ["set", "--control", "c", "daemon", "lanes=1"];

/// A device of another process that hangs, beside one in memory, each with an export.
fn hang(folder: &Path) -> (Daemon, Daemon, Process) {
    let back_end = Daemon::start(
        folder,
        &["--control", "d", "--device", "ram:16M?mbps=50", "--export", "vhost-user-blk:b?queues=2"],
    );
    let hung = ["--device", "vhost-user:b", "--export", "vhost-user-blk:s?queues=2"];
    let other = ["--device", "ram:16M", "--export", "vhost-user-blk:t?queues=2"];
    let words = [&["--control", "c", "--lanes", "2"], &hung[..], &other].concat();
    let daemon = Daemon::start(folder, &words);
    let load = ["bench", "vhost-user:s?queues=2", "--numjobs", "2", "--rw", "randread", "--runtime", "600"];
    let load = Process::spawn(program(folder, &load).stdout(Stdio::null()));
    wait_until("there is I/O", || {
        let reads = |queue: usize| inspect(folder, &[])["exports"][0]["queues"][queue]["ops"]["read"]["ios"].as_u64();
        reads(0) > Some(0) && reads(1) > Some(0)
    });
    back_end.hang();
    // A job that had no CPU time meanwhile submits only now.
    wait_until("I/O of each queue hangs", || {
        let queues = &inspect(folder, &[])["exports"][0]["queues"];
        (0..2).all(|queue| queues[queue]["now"]["in_flight"] == 1)
    });
    (back_end, daemon, load)
}

#[test]
fn set_that_waits_for_a_hung_device_delays_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (back_end, daemon, load) = hang(folder);
    let mut uses = (0..ROUNDS).map(|_| {
        let mut set = Process::spawn(program(folder, &LANES).stderr(Stdio::null()));
        let mut uses = 0;
        while set.is_running() && uses < USES {
            succeed(folder, &["bench", "vhost-user:t", "--rw", "randread", "--runtime", "20ms"]);
            inspect(folder, &[]);
            uses += usize::from(set.is_running());
        }
        uses
    });
    assert!(uses.any(|uses| uses == USES), "set delays inspect, or a front-end of another device");
    back_end.signal(Signal::CONT);
    drop(load);
    wait_until("the lanes can be set", || run(folder, &LANES).status.success());
    daemon.stop();
    drop(back_end);
}

/// A file whose server hangs, opened with these options, while there is I/O of this kind; beside a file of a disk on
/// the same lane, which is then written and flushed.
fn hang_a_file(options: &str, rw: &str, op: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("mounted")).unwrap();
    let Some(served) = Fuse::mount(&folder.join("mounted"), &[]) else { return };
    File::create(folder.join("image")).unwrap().set_len(16 << 20).unwrap();
    let hung = ["--device", &format!("mounted/file{options}"), "--export", "vhost-user-blk:s?queues=1"];
    let other = ["--device", "image", "--export", "vhost-user-blk:t?queues=1"];
    let daemon = Daemon::start(folder, &[&["--control", "c", "--lanes", "1"], &hung[..], &other].concat());
    let load = ["bench", "vhost-user:s?timeout_s=600", "--rw", rw, "--iodepth", "32", "--runtime", "600"];
    let load = Process::spawn(program(folder, &load).stdout(Stdio::null()).stderr(Stdio::null()));
    let done = || inspect(folder, &[])["exports"][0]["queues"][0]["ops"][op]["ios"].as_u64();
    wait_until("there is I/O", || done() > Some(0));
    served.hang();
    // All of its I/O hangs by now.
    let mut before = done();
    wait_until("the file hangs", || {
        std::thread::sleep(Duration::from_millis(300));
        let now = done();
        let hangs = now == before;
        before = now;
        hangs
    });
    succeed(folder, &["bench", "vhost-user:t?timeout_s=5", "--rw", "randwrite", "--fsync", "1", "--runtime", "100ms"]);
    // All that it has ends with an error.
    drop(served);
    drop(load);
    daemon.stop();
}

#[test]
fn file_whose_server_hangs_delays_no_other_on_its_lane() {
    for (rw, op) in [("randread", "read"), ("randwrite", "write"), ("randtrim", "trim")] {
        for options in ["", "?direct=off"] {
            println!("{rw} {options}");
            hang_a_file(options, rw, op);
        }
    }
}

#[test]
fn disk_that_hangs_with_more_than_it_has_room_for_delays_no_other_on_its_lane() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("mounted")).unwrap();
    let Some(served) = Fuse::mount(&folder.join("mounted"), &[]) else { return };
    let Some(disk) = Loop::new(&served.file(), &[]) else { return };
    File::create(folder.join("image")).unwrap().set_len(16 << 20).unwrap();
    // What is read through the page cache is submitted by whoever wants it.
    let hung = ["--device", &format!("{}?direct=off", disk.0.display()), "--export", "vhost-user-blk:s?queues=2"];
    let other = ["--device", "image", "--export", "vhost-user-blk:t?queues=1"];
    let daemon = Daemon::start(folder, &[&["--control", "c", "--lanes", "1"], &hung[..], &other].concat());
    served.hang();
    let load = ["bench", "vhost-user:s?timeout_s=600", "--rw", "randread", "--runtime", "600"];
    let load = [&load[..], &["--iodepth", "128", "--numjobs", "2"]].concat();
    let load = Process::spawn(program(folder, &load).stdout(Stdio::null()).stderr(Stdio::null()));
    wait_until("the disk hangs", || {
        let export = &inspect(folder, &[])["exports"][0];
        let in_flight = |queue: usize| export["queues"][queue]["now"]["in_flight"].as_u64().unwrap_or(0);
        in_flight(0) + in_flight(1) > 200
    });
    succeed(folder, &["bench", "vhost-user:t?timeout_s=5", "--rw", "randwrite", "--fsync", "1", "--runtime", "100ms"]);
    drop(served);
    drop(load);
    daemon.stop();
}

/// Sleeps of the control thread of a daemon's exports so far.
fn sleeps(daemon: &Daemon) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.process.0.id())).unwrap();
    let threads = threads.map(|thread| thread.unwrap().path());
    let is_control = |thread: &std::path::PathBuf| std::fs::read_to_string(thread.join("comm")).unwrap() == "exports\n";
    let status = std::fs::read_to_string(threads.filter(is_control).last().unwrap().join("status")).unwrap();
    let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    sleeps.unwrap().trim().parse().unwrap()
}

#[test]
fn association_that_ended_is_seldom_looked_at_while_a_hung_device_has_its_commands() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = ["--control", "d", "--device", "ram:16M", "--export", "vhost-user-blk:b?queues=1"];
    let back_end = Daemon::start(folder, &words);
    let address = free_address();
    let export = format!("nvme-tcp://{address}?nqn={NQN}");
    let daemon = Daemon::start(folder, &["--control", "c", "--device", "vhost-user:b", "--export", &export]);
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    host.io[0].write(1, 0, &pattern(4096, 1));
    back_end.hang();
    host.io[0].submit(Sqe::with_blocks(io::READ, 1, 0, 8, 0), &[], 4096);
    wait_until("the device has a command", || inspect(folder, &[]).to_string().contains("\"in_flight\":1"));
    drop(host);
    // From here on the interval is the longest.
    std::thread::sleep(Duration::from_secs(2));
    let before = sleeps(&daemon);
    std::thread::sleep(Duration::from_secs(1));
    let count = sleeps(&daemon) - before;
    // Each look is two sleeps: one until it is due, one until it has ended.
    assert!((1..=100).contains(&count), "{count} sleeps within a second");
    back_end.signal(Signal::CONT);
    wait_until("the device has no command", || !inspect(folder, &[]).to_string().contains("\"in_flight\":1"));
    // The only queue of the export is free at once.
    let mut host = TcpHost::connect(address, NQN, HOST, None, 1);
    assert_eq!(host.io[0].read(1, 0, 4096), pattern(4096, 1));
    daemon.stop();
    drop(back_end);
}

#[test]
fn daemon_serves_its_other_disks_when_a_remote_one_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let address = free_address();
    let export = format!("nvme-tcp://{address}?nqn={NQN}");
    let target = Daemon::start(folder, &["--control", "d", "--device", "ram:16M", "--export", &export]);
    let remote = format!("nvme-tcp://{address}/{NQN}?ctrl_loss_s=1");
    let remote = ["--device", &remote, "--export", "vhost-user-blk:s"];
    let other = ["--device", "ram:16M", "--export", "vhost-user-blk:t"];
    let daemon = Daemon::start(folder, &[&["--control", "c"], &remote[..], &other].concat());
    let read = |socket: &'static str| ["bench", socket, "--rw", "randread", "--runtime", "100ms"];
    succeed(folder, &read("vhost-user:s"));
    target.stop();
    // Its I/O waits until then.
    for _ in 0..2 {
        let lost = run(folder, &read("vhost-user:s"));
        assert!(!lost.status.success(), "a disk without a target can be read");
        succeed(folder, &read("vhost-user:t"));
    }
    daemon.stop();
}
