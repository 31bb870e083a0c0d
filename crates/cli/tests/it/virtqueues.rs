//! Queues of one export that share a hardware queue, in a daemon as a user starts it.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Daemon, PATIENCE, Process, Stop, inspect, program, succeed};

/// A daemon with these words and a control socket at `c`; ready.
fn serve(folder: &Path, words: &[&str]) -> Daemon {
    Daemon::start(folder, &[&["--control", "c"], words].concat())
}

/// A daemon whose disk others use, with a control socket at `d`.
fn serve_disk(folder: &Path, words: &[&str]) -> Daemon {
    Daemon::start(folder, &[&["--control", "d"], words].concat())
}

fn tree(folder: &Path) -> Value {
    inspect(folder, &[])
}

fn reads(tree: &Value, queue: usize, what: &str) -> u64 {
    tree["exports"][0]["queues"][queue]["ops"]["read"][what].as_u64().unwrap()
}

#[test]
fn queues_that_share_are_counted_each() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let export = "vhost-user-blk:s?queues=3";
    let _daemon = serve(folder, &["--device", "ram:16M?scheduler=fair", "--export", export, "--lanes", "2"]);
    let load = ["--rw", "randread", "--bs", "4k", "--iodepth", "4", "--runtime", "1", "--output-format", "json"];
    let report = succeed(folder, &[&["bench", "vhost-user:s?queues=2", "--numjobs", "2"], &load[..]].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    let of_job = |job: &Value| job["read"]["io_bytes"].as_u64().unwrap();
    let theirs: u64 = report["jobs"].as_array().unwrap().iter().map(of_job).sum();
    let tree = tree(folder);
    // Bytes: of I/Os side by side the client makes one request.
    let ours = [0, 1, 2].map(|queue| reads(&tree, queue, "bytes"));
    assert!(ours[0] > 0 && ours[1] > 0 && ours[2] == 0, "{ours:?}");
    assert!(ours.iter().sum::<u64>() >= theirs, "{ours:?} of {theirs}");
    let queues = &tree["exports"][0]["queues"];
    for queue in 0..2 {
        let latency = &queues[queue]["ops"]["read"]["latency"];
        assert!(latency["mean_ns"].as_u64().unwrap() > 0, "{latency:#}");
    }
    assert_eq!((&queues[0]["shares_with"], &queues[1]["shown_with"]), (&serde_json::json!([1, 2]), &0.into()));
    let shown = succeed(folder, &["inspect", "--control", "c"]);
    assert!(
        shown.contains("queue 0 on lane 0: at rest, ring of 0, shares its hardware queue with queues 1, 2"),
        "{shown}"
    );
    assert!(shown.contains(", shares the hardware queue shown with queue 0"), "{shown}");
}

/// A load that writes blocks with checksums by four jobs, each on a separate queue, and reads them all again.
fn verifying_load(folder: &Path, size: &str) -> Process {
    verifying_load_of(folder, 4, size)
}

fn verifying_load_of(folder: &Path, queues: usize, size: &str) -> Process {
    let (device, jobs) = (format!("vhost-user:s?queues={queues}"), queues.to_string());
    let words = ["bench", &device, "--numjobs", &jobs, "--rw", "randwrite", "--bs", "4k", "--iodepth", "8"];
    let words = [&words[..], &["--size", size, "--verify", "crc32c"]].concat();
    Process::spawn(program(folder, &words).stdout(Stdio::null()).stderr(Stdio::piped()))
}

/// Waits for its end, which is to be a good one.
fn ends_well(mut load: Process) {
    let mut said = String::new();
    load.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(load.ended_within(PATIENCE).is_some_and(|status| status.success()), "{said}");
}

/// The lane of each queue of the first export, and how many queues it shares its hardware queue with.
fn shape(folder: &Path) -> Vec<(u64, usize)> {
    let tree = tree(folder);
    let queues = tree["exports"][0]["queues"].as_array().unwrap();
    let of_queue =
        |queue: &Value| (queue["lane"].as_u64().unwrap(), queue["shares_with"].as_array().map_or(0, Vec::len));
    queues.iter().map(of_queue).collect()
}

#[test]
fn lanes_and_schedulers_change_under_verified_io() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let export = "vhost-user-blk:s?queues=4";
    let _daemon = serve(folder, &["--device", "ram:128M?mbps=60", "--export", export, "--lanes", "2"]);
    assert_eq!(shape(folder), [(0, 1), (0, 1), (1, 1), (1, 1)], "they share on each lane");
    let mut load = verifying_load(folder, "128M");
    let set = |part: &str, value: &str| succeed(folder, &["set", "--control", "c", part, value]);
    let mut changes = 0;
    while load.is_running() || changes < 12 {
        match changes % 6 {
            0 => {
                set("device:0", "scheduler=fair");
                assert_eq!(shape(folder), [(0, 3); 4], "a scheduler that orders sees all of them");
            }
            1 => {
                set("device:0", "scheduler=none");
                assert_eq!(shape(folder), [(0, 1), (0, 1), (1, 1), (1, 1)]);
            }
            2 => {
                set("daemon", "lanes=4");
                assert_eq!(shape(folder), [(0, 0), (1, 0), (2, 0), (3, 0)]);
            }
            3 => {
                set("device:0", "scheduler=deadline");
                assert_eq!(shape(folder), [(0, 3); 4]);
            }
            4 => {
                set("daemon", "lanes=1");
                set("device:0", "scheduler=none");
                assert_eq!(shape(folder), [(0, 3); 4], "one lane, one hardware queue");
            }
            _ => {
                set("daemon", "lanes=2");
                assert_eq!(shape(folder), [(0, 1), (0, 1), (1, 1), (1, 1)]);
            }
        }
        changes += 1;
    }
    ends_well(load);
}

#[test]
fn added_queues_share_by_the_same_rule() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let export = "vhost-user-blk:s?queues=2";
    let _daemon = serve(folder, &["--device", "ram:16M?scheduler=fair", "--export", export, "--lanes", "2"]);
    succeed(folder, &["set", "--control", "c", "export:0", "queues=4"]);
    assert_eq!(shape(folder), [(0, 3); 4]);
    ends_well(verifying_load(folder, "16M"));
    succeed(folder, &["set", "--control", "c", "device:0", "scheduler=none"]);
    assert_eq!(shape(folder), [(0, 1), (0, 1), (1, 1), (1, 1)]);
    ends_well(verifying_load(folder, "16M"));
}

#[test]
fn queues_are_added_beside_io_to_an_export_of_a_device_with_few_queues() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _back_end = serve_disk(folder, &["--device", "ram:64M?mbps=30", "--export", "vhost-user-blk:b?queues=2"]);
    let _daemon = serve(folder, &["--device", "vhost-user:b", "--export", "vhost-user-blk:s?queues=1", "--lanes", "2"]);
    let mut load = verifying_load_of(folder, 1, "64M");
    let written = || tree(folder)["exports"][0]["queues"][0]["ops"]["write"]["ios"].as_u64().unwrap();
    while written() == 0 {
        assert!(load.is_running(), "it is over before it began");
    }
    succeed(folder, &["set", "--control", "c", "export:0", "queues=4"]);
    assert!(load.is_running(), "there was no I/O beside the change");
    ends_well(load);
    ends_well(verifying_load(folder, "16M"));
}

#[test]
fn lanes_change_while_front_ends_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = ["--device", "ram:16M", "--export", "vhost-user-blk:a?queues=1", "--device", "ram:16M"];
    let mut daemon = serve(folder, &[&words[..], &["--export", "vhost-user-blk:s?queues=2", "--lanes", "2"]].concat());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            let words = ["bench", "vhost-user:s?queues=2", "--numjobs", "2", "--rw", "randread", "--runtime", "20ms"];
            let mut sessions = 0;
            while !stop.load(Relaxed) || sessions < 20 {
                succeed(folder, &words);
                sessions += 1;
            }
        });
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(5) {
            for lanes in ["lanes=1", "lanes=2"] {
                succeed(folder, &["set", "--control", "c", "daemon", lanes]);
            }
        }
    });
    assert!(daemon.is_running(), "the daemon has ended");
    ends_well(verifying_load_of(folder, 2, "16M"));
}

#[test]
fn queues_share_those_of_a_device_that_has_fewer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for queues in ["1", "2"] {
        let export = format!("vhost-user-blk:b{queues}?queues={queues}");
        let _back_end = serve_disk(folder, &["--device", "ram:16M", "--export", &export]);
        let device = format!("vhost-user:b{queues}");
        let _daemon = serve(folder, &["--device", &device, "--export", "vhost-user-blk:s?queues=4", "--lanes", "2"]);
        let spread = vec![(0, 1), (0, 1), (1, 1), (1, 1)];
        assert_eq!(shape(folder), if queues == "1" { vec![(0, 3); 4] } else { spread });
        let mut load = verifying_load(folder, "16M");
        let mut changes = 0;
        while load.is_running() || changes < 4 {
            for value in ["scheduler=deadline", "scheduler=none"] {
                succeed(folder, &["set", "--control", "c", "device:0", value]);
                changes += 1;
            }
        }
        ends_well(load);
    }
}

#[test]
fn exports_of_one_device_leave_each_other_queues() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _back_end = serve_disk(folder, &["--device", "ram:16M", "--export", "vhost-user-blk:b?queues=3"]);
    let words = ["--device", "vhost-user:b?share=on", "--export", "vhost-user-blk:s?queues=4"];
    let others = ["--export", "vhost-user-blk:t?queues=4", "--lanes", "2"];
    let _daemon = serve(folder, &[&words[..], &others].concat());
    let tree = tree(folder);
    let lanes = |export: usize| {
        let queues = tree["exports"][export]["queues"].as_array().unwrap();
        queues.iter().map(|queue| queue["lane"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!([lanes(0), lanes(1)], [[0, 0, 1, 1], [1; 4]], "three queues: two for one and one for the other");
    ends_well(verifying_load(folder, "16M"));
    succeed(folder, &["set", "--control", "c", "daemon", "lanes=1"]);
    succeed(folder, &["set", "--control", "c", "daemon", "lanes=3"]);
    ends_well(verifying_load(folder, "16M"));
}
