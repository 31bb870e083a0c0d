//! Abort of NVMe commands, in a daemon as a user starts it.

use rustix::process::Signal;

use crate::common::{Daemon, inspect, run, succeed, wait_until};
use crate::nvme_guest::NvmeGuest;

#[test]
fn commands_that_wait_for_a_hung_device_are_aborted() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let back_end = Daemon::start(folder, &["--control", "d", "--device", "ram:64M", "--export", "vhost-user-blk:b"]);
    let words =
        ["--control", "c", "--device", "vhost-user:b?queues=1&timeout_s=600", "--export", "vfio-user:n?queues=1"];
    let daemon = Daemon::start(folder, &words);
    succeed(folder, &["set", "--control", "c", "export:0", "depth=1"]);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
    guest.check(1);
    back_end.hang();
    guest.begin_some_reads(8);
    let refused = || inspect(folder, &[])["exports"][0]["queues"][0]["counters"]["refused"].as_u64().unwrap();
    assert_eq!(refused(), 0);
    assert_eq!((guest.abort_all(), guest.in_flight()), (7, 8), "the device has one");
    assert_eq!(refused(), 7);
    back_end.signal(Signal::CONT);
    guest.finish_all();
    guest.verify(1);
    drop(guest);
    daemon.stop();
    back_end.stop();
}

#[test]
fn command_that_a_rate_limit_holds_is_aborted_when_it_is_late() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let export = "vfio-user:n?queues=1&bytes_per_s_max=4k&burst_ms=1";
    let daemon = Daemon::start(folder, &["--control", "c", "--device", "ram:64M", "--export", export]);
    // What is in flight when a client leaves passes at once, and is charged: 256 KiB each time.
    for sessions in 1..=4 {
        let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
        guest.begin_reads();
        wait_until("all commands are fetched", || {
            // All that fit the ring, but for the first, which the limit lets pass.
            inspect(folder, &[])["exports"][0]["queues"][0]["now"]["chains"].as_u64() >= Some(30)
        });
        guest.die();
        wait_until("the client is gone", || {
            let export = &inspect(folder, &[])["exports"][0];
            export["session"].is_null() && export["sessions"] == sessions
        });
    }
    let late = ["nvme", "io-passthru", "vfio-user:n", "-O", "2", "-n", "1", "-r", "-l", "512", "-t", "2000"];
    let output = run(folder, &late);
    let message = String::from_utf8(output.stderr).unwrap();
    let expected = "Read failed, NVMe status: abort requested (007h); it exceeded its timeout";
    assert!(output.status.code() == Some(1) && message.contains(expected), "{message}");
    daemon.stop();
}
