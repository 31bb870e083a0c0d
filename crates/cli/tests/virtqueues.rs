//! Queues of one export that share a hardware queue, in a daemon as a user starts it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// A process that does not outlive its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    command.args(words).current_dir(folder);
    command
}

fn run(folder: &Path, words: &[&str]) -> String {
    let output = program(folder, words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A daemon with these words and a control socket at `c`; ready.
fn serve(folder: &Path, words: &[&str]) -> Process {
    let words = [&["serve", "--control", "c"], words].concat();
    let mut child = program(folder, &words).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let process = Process(child);
    assert!(said.by_ref().any(|line| line.unwrap() == "ready"), "it is not ready");
    std::thread::spawn(move || said.for_each(drop));
    process
}

fn tree(folder: &Path) -> Value {
    serde_json::from_str(&run(folder, &["inspect", "--control", "c", "--json"])).unwrap()
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
    let report = run(folder, &[&["bench", "vhost-user:s?queues=2", "--numjobs", "2"], &load[..]].concat());
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
    let shown = run(folder, &["inspect", "--control", "c"]);
    assert!(
        shown.contains("queue 0 on lane 0: at rest, ring of 0, shares its hardware queue with queues 1, 2"),
        "{shown}"
    );
    assert!(shown.contains(", shares the hardware queue shown with queue 0"), "{shown}");
}
