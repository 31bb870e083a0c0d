//! The command `serve` as a process, without a client.

use std::io::{BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blkyard_os::{FileConfig, FileDevice};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Longer than a daemon takes to start on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// A daemon that does not outlive its test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves until the daemon has looked after its lanes twice, and stops it. The whole must end well.
fn serves_until_told_to_stop(arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .arg("serve")
        .args(arguments)
        .args(["--stats", "1"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut daemon = Daemon(daemon);
    let mut lines = BufReader::new(daemon.0.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap() == "ready"), "{arguments:?}: not ready");
    // It says what it counted just before it looks after its lanes; that it says so again shows that it went on.
    let counted = lines.by_ref().filter(|line| line.as_ref().unwrap().contains(" IOPS")).take(2).count();
    assert_eq!(counted, 2, "{arguments:?}: ended by itself");
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success(), "{arguments:?}: ended badly");
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

#[test]
fn a_daemon_serves_even_if_nobody_listens_to_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let daemon = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .args(["serve", "--device", "ram:16M", "--export", "vhost-user-blk:s", "--control", "c"])
        .current_dir(folder.path())
        .stdout(writer)
        .spawn()
        .unwrap();
    let mut daemon = Daemon(daemon);
    let looks = || {
        let mut look = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        look.args(["inspect", "--control", "c"]).current_dir(folder.path()).output().unwrap().status.success()
    };
    let begin = Instant::now();
    while !looks() {
        assert!(daemon.0.try_wait().unwrap().is_none() && begin.elapsed() < PATIENCE, "it does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success(), "it ended badly");
}

#[test]
fn what_is_wrong_with_a_name_is_said_before_what_is_missing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk.toml"), "[[device]]\nspec = \"ram:1M\"").unwrap();
    for (arguments, words) in [
        (["--device", "null:1G?iops_mx=4"], ["null:1G?iops_mx=4", "unknown key 'iops_mx'"]),
        (["--device", "ram:1M"], ["ram:1M: no export serves this device", "--export"]),
        (["--config", "disk.toml"], ["ram:1M: no export serves this device", "[[device.export]]"]),
    ] {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        let ended = serve.arg("serve").args(arguments).current_dir(folder.path()).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
    }
}

#[test]
fn a_disk_that_nobody_is_to_see_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(folder.path().join("disk.img")).unwrap();
    file.set_len(1 << 20).unwrap();
    let image = FileDevice::open(FileConfig::new(folder.path().join("disk.img"))).unwrap();
    // On its way through a socket the lock is in no process's hands, as that of one that died with I/O under way.
    let (near, _far) = UnixStream::pair().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sent = [image.description()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
    sendmsg(&near, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    drop(image);
    let mut serve = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    serve.args(["serve", "--device", "disk.img", "--lock-wait-s", "30"]).current_dir(folder.path());
    let said = String::from_utf8(serve.output().unwrap().stderr).unwrap();
    assert!(said.contains("no export serves this device") && !said.contains("waiting"), "{said}");
}

#[test]
fn a_flag_that_is_no_number_says_which_numbers_there_are() {
    for (flag, value, cure) in [
        ("--spin-us", "abc", "give a number from 0 to 1000000"),
        ("--spin-us", "1000001", "give a number from 0 to 1000000"),
        ("--lanes", "0", "give a number from 1 to"),
        ("--stats", "-", "give a number from 1 to 86400"),
    ] {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        let ended = serve.args(["serve", "--device", "ram:1M", flag, value]).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && said.contains(flag) && said.contains(cure), "{flag} {value}: {said}");
    }
}

#[test]
fn a_mode_in_a_file_is_the_mode_of_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let start = |mode: &str| {
        let text =
            format!("[[device]]\nspec = 'null:1G'\n[[device.export]]\nspec = 'vhost-user-blk:s'\nmode = {mode}\n");
        std::fs::write(folder.path().join("c.toml"), text).unwrap();
        let mut serve = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        serve.args(["serve", "--config", "c.toml", "--control", "none"]).current_dir(folder.path());
        Daemon(serve.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    for mode in ["0o660", "'0660'"] {
        let mut daemon = start(mode);
        let mut lines = BufReader::new(daemon.0.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap() == "ready"), "{mode}: not ready");
        let metadata = std::fs::metadata(folder.path().join("s")).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o660, "{mode}");
    }
    for mode in ["660", "'0o660'", "'999'", "true", "[6]", "6.6"] {
        let mut daemon = start(mode);
        let mut said = String::new();
        daemon.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!daemon.0.wait().unwrap().success(), "{mode} was taken");
        assert!(said.contains("mode = \"0660\"") && said.contains("mode = 0o660"), "{mode}: {said}");
    }
}
