//! The command `serve` as a process, without a client.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use blkyard_os::{FileConfig, FileDevice};
use blkyard_sys::send_fds;
use rustix::net::SendFlags;

use crate::common::{Daemon, Process, inspect, inspect_at, program, run, succeed, wait_until};

/// Serves until the daemon has checked its lanes twice, and stops it.
fn serves_until_stopped(arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), &[arguments, &["--stats", "1"]].concat());
    // The daemon writes its statistics just before it checks its lanes; the second line shows that it continued.
    for _ in 0..2 {
        while !daemon.next_line().contains(" IOPS") {}
    }
    daemon.stop();
    assert!(!folder.path().join("s").exists(), "the socket is left behind");
}

#[test]
fn a_daemon_with_more_lanes_than_queues_serves() {
    serves_until_stopped(&["--device", "ram:16M", "--export", "vhost-user-blk:s?queues=1", "--lanes", "3"]);
}

#[test]
fn a_daemon_with_lanes_that_no_export_names_serves() {
    serves_until_stopped(&["--device", "ram:16M", "--export", "vhost-user-blk:s?queues=2&lanes=2", "--lanes", "3"]);
}

#[test]
fn a_daemon_whose_standard_output_is_closed_serves() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let arguments = ["serve", "--device", "ram:16M", "--export", "vhost-user-blk:s", "--control", "c"];
    let mut daemon = Process::spawn(program(folder, &arguments).stdout(writer));
    wait_until("the daemon answers on its control socket", || {
        assert!(daemon.is_running(), "the daemon ended by itself");
        run(folder, &["inspect", "--control", "c"]).status.success()
    });
    assert_eq!(inspect(folder, &[])["exports"].as_array().unwrap().len(), 1);
    daemon.stop();
}

#[test]
fn a_wrong_option_is_reported_before_a_missing_export() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk.toml"), "[[device]]\nspec = \"ram:1M\"").unwrap();
    for (arguments, words) in [
        (["--device", "null:1G?iops_mx=4"], ["null:1G?iops_mx=4", "unknown key 'iops_mx'"]),
        (["--device", "ram:1M"], ["ram:1M: no export serves this device", "--export"]),
        (["--config", "disk.toml"], ["ram:1M: no export serves this device", "[[device.export]]"]),
    ] {
        let ended = run(folder.path(), &[&["serve"], &arguments[..]].concat());
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
    }
}

#[test]
fn a_locked_image_without_an_export_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(folder.path().join("disk.img")).unwrap();
    file.set_len(1 << 20).unwrap();
    let image = FileDevice::open(FileConfig::new(folder.path().join("disk.img"))).unwrap();
    // In the queue of a socket the lock belongs to no process, like that of a daemon that died with I/O in flight.
    let (near, _far) = UnixStream::pair().unwrap();
    send_fds(&near, b"x", &[image.description().as_fd()], SendFlags::empty()).unwrap();
    drop(image);
    let ended = run(folder.path(), &["serve", "--device", "disk.img", "--lock-wait-s", "30"]);
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("no export serves this device") && !said.contains("waiting"), "{said}");
}

#[test]
fn a_flag_that_is_not_a_number_is_refused_with_its_range() {
    for (flag, value, cure) in [
        ("--spin-us", "abc", "give a number from 0 to 1000000"),
        ("--spin-us", "1000001", "give a number from 0 to 1000000"),
        ("--lanes", "0", "give a number from 1 to"),
        ("--stats", "-", "give a number from 1 to 86400"),
    ] {
        let ended = run(&std::env::temp_dir(), &["serve", "--device", "ram:1M", flag, value]);
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && said.contains(flag) && said.contains(cure), "{flag} {value}: {said}");
    }
}

#[test]
fn a_mode_in_a_file_is_the_mode_of_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--config", "c.toml", "--control", "none"];
    let configure = |mode: &str| {
        let text =
            format!("[[device]]\nspec = 'null:1G'\n[[device.export]]\nspec = 'vhost-user-blk:s'\nmode = {mode}\n");
        std::fs::write(folder.path().join("c.toml"), text).unwrap();
    };
    for mode in ["0o660", "'0660'"] {
        configure(mode);
        let _daemon = Daemon::start(folder.path(), &arguments);
        let metadata = std::fs::metadata(folder.path().join("s")).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o660, "{mode}");
    }
    for mode in ["660", "'0o660'", "'999'", "true", "[6]", "6.6"] {
        configure(mode);
        let ended = run(folder.path(), &[&["serve"], &arguments[..]].concat());
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success(), "{mode} was taken");
        assert!(said.contains("mode = \"0660\"") && said.contains("mode = 0o660"), "{mode}: {said}");
    }
}

#[test]
fn a_remote_disk_takes_no_size_that_would_be_undone() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _server = Daemon::start(folder, &["--device", "null:64M", "--export", "vhost-user-blk:s", "--control", "c"]);
    let device = ["--device", "vhost-user:s?queues=1"];
    let _daemon = Daemon::start(folder, &[&device[..], &["--export", "vhost-user-blk:t", "--control", "d"]].concat());
    let set = |control: &str, size: &str| run(folder, &["set", "--control", control, "device:0", size, "force=on"]);
    let size = || inspect_at(folder, "d", &[])["devices"][0]["size_bytes"].as_u64().unwrap() >> 20;
    for wrong in ["size=32M", "size=128M"] {
        let refused = set("d", wrong);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && said.contains("64 MiB and is served by another process"), "{said}");
    }
    for right in [32, 128] {
        assert!(set("c", &format!("size={right}M")).status.success());
        wait_until("the size is followed", || size() == right);
        succeed(folder, &["set", "--control", "d", "device:0", &format!("size={right}M")]);
    }
}
