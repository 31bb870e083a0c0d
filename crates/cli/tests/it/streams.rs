//! Streams of guests that `fair` finds, on the model of a disk, in a daemon as a user starts it.

use std::path::Path;

use serde_json::Value;

use crate::common::{Daemon, inspect, succeed};

/// Comparisons of which one must show the difference.
const ROUNDS: usize = 5;

/// A daemon with a disk that has this scheduler, and an export of so many queues.
fn serve(folder: &Path, scheduler: &str, queues: usize) -> Daemon {
    let (device, export) =
        (format!("model:disk?size=20G&scheduler={scheduler}"), format!("vhost-user-blk:s?queues={queues}"));
    Daemon::start(folder, &["--control", "c", "--device", &device, "--export", &export])
}

/// Bytes that two sequential readers of 64 KiB read in three seconds through one queue.
fn read_by_two(scheduler: &str) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder, scheduler, 1);
    let load = ["bench", "vhost-user:s?queues=1", "--numjobs", "2", "--rw", "read", "--bs", "64k", "--iodepth", "1"];
    let report = succeed(folder, &[&load[..], &["--runtime", "3", "--output-format", "json"]].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    if scheduler == "fair" {
        let tree = inspect(folder, &[]).to_string();
        assert!(tree.contains("sequence"), "{tree}");
    }
    jobs.iter().map(|job| job["read"]["io_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn sequential_readers_on_one_queue_are_told_apart() {
    // Repeated while the machine is busy: as one stream they are as slow every time.
    let said = (0..ROUNDS).map(|_| {
        let [none, fair] = ["none", "fair"].map(read_by_two);
        (fair * 10 <= none * 13).then(|| format!("{fair} bytes with fair, {none} without"))
    });
    let slow: Vec<_> = said.map_while(|said| said).collect();
    assert!(slow.len() < ROUNDS, "{slow:?}");
}
