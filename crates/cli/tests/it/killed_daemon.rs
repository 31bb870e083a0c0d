//! A daemon over NVMe/TCP that is killed with a write at its target, and the next one.

use std::fs::File;
use std::thread::spawn;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{Daemon, inspect_at, program, wait_until};
use crate::guest::Guest;

const NQN: &str = "nqn.2026-11.test:killed";
/// Keep-alive timeout, and the quiesce time that the target declares.
const SILENCE: Duration = Duration::from_secs(1 + 5);

#[test]
fn the_next_daemon_waits_out_what_a_killed_one_left_at_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = ["--control", "d", "--device", "ram:16M", "--export", "vhost-user-blk:b?queues=4"];
    let disk = Daemon::start(folder, &disk);
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}");
    let target = Daemon::start(folder, &["--control", "t", "--device", "vhost-user:b", "--export", &export]);
    let address =
        inspect_at(folder, "t", &[])["exports"][0]["session"]["target"]["address"].as_str().unwrap().to_owned();
    let device = format!("nvme-tcp://{address}/{NQN}?keep_alive_s=1&queues=1");
    let words = ["--control", "c", "--device", &device, "--export", "vhost-user-blk:s?queues=1"];
    let mut daemon = Daemon::start(folder, &words);
    let mut guest = Guest::connect(&folder.join("s"), 1);
    guest.check(0, 0, 1);
    disk.hang();
    let writer = spawn(move || {
        guest.check(0, 0, 2);
        guest
    });
    let queue = |control: &str| inspect_at(folder, control, &[])["exports"][0]["queues"][0]["now"].clone();
    wait_until("the write is at the disk", || queue("t")["in_flight"] == 1);
    daemon.signal(Signal::KILL);
    wait_until("the daemon is dead", || !daemon.is_running());
    let killed = Instant::now();
    let log = folder.join("log");
    let next = Daemon::launch(program(folder, &["serve"]).args(words).stderr(File::create(&log).unwrap()));
    wait_until("the record is held", || queue("c")["state"] == "held");
    assert_eq!(queue("c")["in_flight"], 0);
    assert!(queue("c")["held_ns"].as_u64().is_some_and(|held_ns| held_ns <= SILENCE.as_nanos() as u64));
    disk.signal(Signal::CONT);
    let mut guest = writer.join().unwrap();
    assert!(killed.elapsed() >= SILENCE, "the write was sent again after {:?}", killed.elapsed());
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(said.contains("1 requests of the previous session are submitted again"), "{said}");
    assert!(said.contains("its requests wait 6 s"), "{said}");
    assert_eq!(queue("c")["state"], "running");
    // What comes later does not wait.
    let begun = Instant::now();
    guest.check(0, 1, 3);
    assert!(begun.elapsed() < SILENCE);
    drop(guest);
    next.stop();
    target.stop();
    disk.stop();
}
