//! A daemon on an NVMe controller that another daemon serves, and that is restarted again and again under load.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, Stop, inspect, succeed, wait_until};

/// Reads and writes that have ended at the client's device.
fn ios(folder: &Path) -> u64 {
    let tree = inspect(folder, &[]);
    let queues = tree["exports"][0]["queues"].as_array().unwrap();
    let of = |op: &str| queues.iter().map(|queue| queue["ops"][op]["ios"].as_u64().unwrap()).sum::<u64>();
    of("read") + of("write")
}

#[test]
fn eight_restarts_of_a_controller_in_a_row_fail_no_io() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(64 << 20).unwrap();
    let words = ["--control", "none", "--device", "file:disk.img", "--export", "vfio-user:n?queues=2"];
    let mut server = Daemon::start(folder, &words);
    let client = ["--control", "c", "--device", "vfio-user:n?queues=2", "--export", "vhost-user-blk:s?queues=2"];
    let daemon = Daemon::start(folder, &client);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = Stop(&is_over);
        let load = scope.spawn(|| {
            let words = "bench vhost-user:s --rw randwrite --bs 4k --iodepth 32 --numjobs 2 --verify crc32c";
            let words: Vec<_> = words.split(' ').collect();
            while !is_over.load(Relaxed) {
                // Each pass writes all blocks once and reads them back.
                let said = succeed(folder, &words);
                assert!(said.contains("no errors") && said.contains(" 0 differ"), "{said}");
            }
        });
        let mut seen = 0;
        for _ in 0..8 {
            wait_until("I/O goes on", || load.is_finished() || ios(folder) > seen);
            thread::sleep(Duration::from_millis(20));
            server.signal(Signal::KILL);
            server.process.ended();
            server = Daemon::start(folder, &words);
            seen = ios(folder);
        }
        wait_until("I/O goes on", || load.is_finished() || ios(folder) > seen);
        drop(stop);
        load.join().unwrap();
    });
    assert!(inspect(folder, &[])["devices"][0]["counters"]["sessions"].as_u64().unwrap() > 8);
    daemon.stop();
    server.stop();
}
