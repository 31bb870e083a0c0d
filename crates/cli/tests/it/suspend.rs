//! A disk whose controller is shut down and brought up again under load, as a user does before a machine sleeps.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, Process, inspect, program, run, succeed, wait_until};

fn target(folder: &Path) -> Daemon {
    Daemon::start(folder, &["--control", "t", "--device", "ram:64M?mbps=40", "--export", "vfio-user:n?queues=4"])
}

fn device(folder: &Path) -> serde_json::Value {
    inspect(folder, &[])["devices"][0].clone()
}

fn counter(folder: &Path, name: &str) -> u64 {
    device(folder)["counters"][name].as_u64().unwrap()
}

/// I/Os that the disk's exports have completed.
fn ios(folder: &Path) -> u64 {
    let exports = inspect(folder, &[])["exports"].clone();
    let queues = exports[0]["queues"].as_array().unwrap().iter();
    queues.map(|queue| queue["ops"]["write"]["ios"].as_u64().unwrap()).sum()
}

fn set(folder: &Path, suspended: &str) -> String {
    succeed(folder, &["set", "--control", "c", "device:0", &format!("suspended={suspended}")])
}

#[test]
fn a_suspended_disk_holds_its_io_and_goes_on_when_it_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let target = target(folder);
    let words = ["--control", "c", "--lanes", "2", "--device", "vfio-user:n", "--export", "vhost-user-blk:s?queues=2"];
    let daemon = Daemon::start(folder, &words);
    let load = ["bench", "vhost-user:s?queues=2", "--numjobs", "2", "--iodepth", "16", "--rw", "randwrite"];
    let mut load = Process::spawn(
        program(folder, &[&load[..], &["--bs", "4k", "--verify", "crc32c"]].concat()).stdout(Stdio::null()),
    );
    for _ in 0..3 {
        let before = ios(folder);
        wait_until("there is I/O", || ios(folder) > before);
        let said = set(folder, "on");
        assert!(said.contains("its controller is shut down"), "{said}");
        assert_eq!(counter(folder, "suspended"), 1);
        let before = ios(folder);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(ios(folder), before, "I/O goes on at a controller that is shut down");
        assert!(load.is_running());
        set(folder, "on");
        set(folder, "off");
        assert_eq!((counter(folder, "suspended"), counter(folder, "resets")), (0, 0));
    }
    let status = load.ended();
    assert!(status.success(), "{status}");
    daemon.stop();
    target.stop();
}

#[test]
fn a_target_may_be_restarted_while_its_disk_is_suspended() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let old = target(folder);
    let words = ["--control", "c", "--device", "vfio-user:n", "--export", "vhost-user-blk:s"];
    let daemon = Daemon::start(folder, &words);
    set(folder, "on");
    old.signal(Signal::KILL);
    drop(old);
    wait_until("the loss is seen", || counter(folder, "connected") == 0);
    let refused = run(folder, &["set", "--control", "c", "device:0", "suspended=on"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("not connected"), "{error}");
    let target = target(folder);
    wait_until("the next controller is suspended as well", || counter(folder, "suspended") == 1);
    set(folder, "off");
    succeed(
        folder,
        &["bench", "vhost-user:s", "--rw", "randwrite", "--size", "4M", "--bs", "4k", "--verify", "crc32c"],
    );
    // A daemon that ends with a suspended disk shuts nothing down twice.
    set(folder, "on");
    daemon.stop();
    target.stop();
}

#[test]
fn a_device_without_a_controller_says_that_it_cannot_be_suspended() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = Daemon::start(folder, &["--control", "c", "--device", "ram:16M", "--export", "vhost-user-blk:s"]);
    let refused = run(folder, &["set", "--control", "c", "device:0", "suspended=on"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("no controller that can be shut down"), "{error}");
    daemon.stop();
}
