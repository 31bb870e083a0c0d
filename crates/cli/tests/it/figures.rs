//! The figures of `serve --stats` and `inspect`, against those of a client that measures for itself.

use std::path::Path;

use serde_json::Value;

use crate::common::{Daemon, inspect, run, succeed};

/// A daemon of one export of this device, at `s`, with its control socket at `c`. It writes statistics each second.
fn serve(folder: &Path, device: &str, queues: &str) -> Daemon {
    let export = format!("vhost-user-blk:s?queues={queues}");
    Daemon::start(folder, &["--device", device, "--export", &export, "--control", "c", "--stats", "1"])
}

/// Report of a client that does this for so many seconds.
fn bench(folder: &Path, rw: &str, iodepth: &str, seconds: &str) -> Value {
    let words = ["bench", "vhost-user:s", "--rw", rw, "--bs", "4k", "--iodepth", iodepth, "--runtime", seconds];
    serde_json::from_str(&succeed(folder, &[&words[..], &["--output-format", "json"]].concat())).unwrap()
}

fn op<'a>(tree: &'a Value, name: &str) -> &'a Value {
    &tree["exports"][0]["queues"][0]["ops"][name]
}

fn reads(tree: &Value) -> &Value {
    op(tree, "read")
}

#[test]
fn percentiles_and_lines_keep_their_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = serve(folder, "ram:16M", "40");
    let fresh = succeed(folder, &["inspect", "--control", "c"]);
    assert!(fresh.contains(" s\n") && !fresh.contains("up for 0 ns"), "{fresh}");
    bench(folder, "randread", "8", "2");
    let tree = inspect(folder, &[]);
    assert_eq!(tree["schema"], 1);
    let latency = &reads(&tree)["latency"];
    let max_ns = latency["max_ns"].as_u64().unwrap();
    for (percent, ns) in latency["percentile_ns"].as_object().unwrap() {
        assert!(ns.as_u64().unwrap() <= max_ns, "p{percent} exceeds the longest: {latency:#}");
    }
    let shown = succeed(folder, &["inspect", "--control", "c"]);
    assert!(!shown.contains("of 0 bytes"), "{shown}");
    let said = daemon.lines_so_far().join("\n");
    assert!(said.contains("read ") && said.contains(" IOPS "), "{said}");
    for line in shown.lines().chain(said.lines()) {
        assert!(line.chars().count() <= 110, "{} columns: {line}", line.chars().count());
    }
}

#[test]
fn a_window_counts_what_happens_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder, "ram:16M", "1");
    bench(folder, "randread", "4", "1");
    let before = inspect(folder, &[]);
    assert!(before["window_s"].is_null() && reads(&before)["ios"].as_u64().unwrap() > 0);
    let quiet = inspect(folder, &["--window", "1"]);
    assert!(quiet["window_s"].as_f64().unwrap() >= 1.0);
    assert_eq!((reads(&quiet)["ios"].as_u64(), &reads(&quiet)["latency"]), (Some(0), &Value::Null));
    assert_eq!(reads(&inspect(folder, &[]))["ios"], reads(&before)["ios"], "the window took something away");
}

/// Whether two means agree: within a fifth and a millisecond, for the client sees the wake-ups as well.
fn agree(ours_ns: f64, theirs_ns: f64) -> bool {
    (ours_ns - theirs_ns).abs() <= theirs_ns * 0.2 + 1e6
}

/// Compares a client's mean with the daemon's for the same reads or trims.
fn compare(device: &str, values: &[&str], name: &str, dominant: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = serve(folder, device, "1");
    if !values.is_empty() {
        succeed(folder, &[&["set", "--control", "c", "export:0"], values].concat());
    }
    let report = bench(folder, &format!("rand{name}"), "16", "3");
    let theirs_ns = report["jobs"][0][name]["clat_ns"]["mean"].as_f64().unwrap();
    let tree = inspect(folder, &[]);
    let latency = &op(&tree, name)["latency"];
    let ours_ns = latency["mean_ns"].as_f64().unwrap();
    assert!(agree(ours_ns, theirs_ns), "the client saw a mean of {theirs_ns} ns: {latency:#}");
    let parts = latency["part_sum_ns"].as_object().unwrap();
    let sum: u64 = parts.values().map(|ns| ns.as_u64().unwrap()).sum();
    assert_eq!(sum, latency["sum_ns"].as_u64().unwrap(), "the parts are not the whole: {latency:#}");
    let most = parts.iter().max_by_key(|(_, ns)| ns.as_u64()).unwrap().0;
    assert_eq!(most, dominant, "{latency:#}");
    let said = daemon.lines_so_far().join("\n");
    assert!(said.contains(&format!(" % {dominant})")), "{said}");
}

#[test]
fn latency_under_a_limit_is_what_the_client_sees() {
    compare("ram:16M?iops_max=200&burst_ms=1", &[], "read", "limit");
}

#[test]
fn latency_without_tags_is_what_the_client_sees() {
    compare("ram:16M?latency_us=5000", &["depth=1"], "read", "tag");
}

#[test]
fn latency_with_a_scheduler_is_what_the_client_sees() {
    // Tags are free; the scheduler has one I/O at a time at the device of those that are neither reads nor durable.
    compare("ram:16M?latency_us=5000&scheduler=deadline&async_depth=1", &[], "trim", "scheduler");
}

/// The tracker of device 0, if it is on.
fn tracker(folder: &Path) -> Option<Value> {
    Some(inspect(folder, &[])["devices"][0]["tracker"].clone()).filter(|tracker| !tracker.is_null())
}

#[test]
fn a_tracker_follows_the_device_and_not_what_holds_its_requests() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // A limit holds each read ten times as long as the device, which takes 5 ms. Nothing is forgotten.
    let device = "ram:16M?latency_us=5000&iops_max=20&burst_ms=1&tracker=on&tracker_decay=100&tracker_samples_min=1";
    let _daemon = serve(folder, device, "1");
    bench(folder, "randread", "1", "1");
    let read = |tracker: &Value| tracker["nodes"][0]["directions"]["read"]["latency_ns"].as_u64().unwrap();
    let learned = tracker(folder).expect("it is on");
    assert!((5_000_000..25_000_000).contains(&read(&learned)), "{learned:#}");
    assert_eq!(learned["nodes"][0]["directions"]["write"]["latency_ns"], 0, "{learned:#}");
    let shown = succeed(folder, &["inspect", "--control", "c"]);
    assert!(shown.contains("latency tracker: tracker_decay 100") && shown.contains("write unknown"), "{shown}");

    let set = |values: &[&str]| succeed(folder, &[&["set", "--control", "c", "device:0"], values].concat());
    assert!(set(&["tracker=on"]).is_empty(), "it is as it was");
    assert_eq!(read(&tracker(folder).unwrap()), read(&learned));
    set(&["tracker_window_us=1000"]);
    assert_eq!(tracker(folder).unwrap()["settings"]["tracker_window_us"], 1000);
    set(&["tracker=off"]);
    assert_eq!(tracker(folder), None);
    let refused = run(folder, &["set", "--control", "c", "device:0", "tracker_decay=10"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("add tracker=on"), "{why}");
}

#[test]
fn a_tracker_that_was_set_is_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let mut old = serve(folder, "file:disk.img", "1");
    succeed(folder, &["set", "--control", "c", "device:0", "tracker=on", "tracker_decay=90"]);
    let _new = Daemon::start(folder, &["--takeover", "c"]);
    assert!(old.process.ended().success());
    let settings = tracker(folder).expect("it was handed over")["settings"].clone();
    assert_eq!((&settings["tracker_window_us"], &settings["tracker_decay"]), (&2000.into(), &90.into()));
}
