//! An NVMe client that leaves while its device hangs, in a daemon as a user starts it.

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
