//! NVMe clients that wait for their device, in a daemon as a user starts it.

use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, inspect, program, succeed, wait_until};
use crate::nvme_guest::NvmeGuest;

#[test]
fn wait_for_a_hung_device_is_logged_and_shown_and_delays_no_other_export() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let back_end = Daemon::start(folder, &["--control", "d", "--device", "ram:64M", "--export", "vhost-user-blk:b"]);
    let hung = ["--device", "vhost-user:b?queues=1&timeout_s=600", "--export", "vfio-user:n?queues=1"];
    let other = ["--device", "ram:16M", "--export", "vhost-user-blk:t"];
    let mut command = program(folder, &[&["serve", "--control", "c"], &hung[..], &other].concat());
    let daemon = Daemon::launch(command.stderr(std::fs::File::create(folder.join("log")).unwrap()));
    let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
    guest.check(1);
    back_end.hang();
    guest.begin_some_reads(8);
    let session = || inspect(folder, &[])["exports"][0]["session"].clone();
    wait_until("the commands are fetched", || inspect(folder, &[])["exports"][0]["queues"][0]["now"]["chains"] == 8);
    assert!(session()["waits"].is_null());
    guest.die();
    wait_until("the wait is shown", || session()["waits"]["what"] == "the end of the session");
    assert!(session()["memory_bytes"].as_u64() > Some(0), "its memory stays");
    let log = || std::fs::read_to_string(folder.join("log")).unwrap();
    wait_until("the wait is logged", || log().contains("the end of the session waits: requests in flight do not end"));
    let text = succeed(folder, &["inspect", "--control", "c"]);
    assert!(text.contains("the end of the session waits for requests in flight, for "), "{text}");
    succeed(folder, &["bench", "vhost-user:t", "--rw", "randread", "--runtime", "20ms"]);
    back_end.signal(Signal::CONT);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
    guest.verify(1);
    drop(guest);
    wait_until("its end is logged", || log().contains("the end of the session continues: requests in flight ended"));
    daemon.stop();
    back_end.stop();
}

/// Writes to a device while each command is late after 200 ms.
fn write_with_late_commands(device: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = Daemon::start(folder, &["--control", "c", "--device", device, "--export", "vfio-user:n?queues=2"]);
    let mut guest = NvmeGuest::connect_with(&folder.join("n"), 2, true, Duration::from_millis(200));
    guest.write(1);
    assert!(guest.late() > 0, "no command is late");
    drop(guest);
    daemon.stop();
}

#[test]
fn late_commands_at_a_slow_device_are_waited_for() {
    write_with_late_commands("ram:64M?latency_us=1000000");
}

#[test]
#[should_panic(expected = "are late, and not at the device")]
fn late_commands_that_the_device_does_not_have_fail_a_test() {
    // The limit holds them in the daemon.
    write_with_late_commands("ram:64M?iops_max=4&burst_ms=1");
}
