//! A device that hangs beside others, in a daemon as a user starts it: whoever does not use it notices nothing.

use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;

use crate::common::{Daemon, Process, inspect, program, run, succeed, wait_until};

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
