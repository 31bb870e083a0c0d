//! The command `serve` as a process, without a client.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Serves, waits for longer than the daemon takes to look after its lanes, and stops it. The whole must end well.
fn serves_until_told_to_stop(arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .arg("serve")
        .args(arguments)
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap() == "ready"), "{arguments:?}: not ready");
    std::thread::sleep(Duration::from_millis(1500));
    assert!(daemon.try_wait().unwrap().is_none(), "{arguments:?}: ended by itself");
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.wait().unwrap().success(), "{arguments:?}: ended badly");
    assert!(!folder.path().join("s").exists(), "the socket is left behind");
}

#[test]
fn more_lanes_than_queues_harm_nobody() {
    serves_until_told_to_stop(&["--device", "ram:16M", "--export", "vhost-user-blk:s?queues=1", "--lanes", "3"]);
}

#[test]
fn lanes_that_no_queue_is_given_to_harm_nobody() {
    serves_until_told_to_stop(&[
        "--device",
        "ram:16M",
        "--export",
        "vhost-user-blk:s?queues=2&lanes=2",
        "--lanes",
        "3",
    ]);
}
