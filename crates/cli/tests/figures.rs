//! The figures of `serve --stats` and `inspect`, against those of a client that measures for itself.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

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

fn run(folder: &Path, words: &[&str]) -> Output {
    let output = program(folder, words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

/// A daemon of one export of this device, at `s`, with its control socket at `c`. It says its figures each second.
struct Daemon {
    _process: Process,
    lines: Arc<Mutex<Vec<String>>>,
}

fn serve(folder: &Path, device: &str, queues: &str) -> Daemon {
    let export = format!("vhost-user-blk:s?queues={queues}");
    let words = ["serve", "--device", device, "--export", &export, "--control", "c", "--stats", "1"];
    let mut child = program(folder, &words).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let process = Process(child);
    assert!(said.by_ref().any(|line| line.unwrap() == "ready"), "it is not ready");
    let lines = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&lines);
    std::thread::spawn(move || said.map_while(Result::ok).for_each(|line| heard.lock().unwrap().push(line)));
    Daemon { _process: process, lines }
}

/// Report of a client that does this for so many seconds.
fn bench(folder: &Path, rw: &str, iodepth: &str, seconds: &str) -> Value {
    let words = ["bench", "vhost-user:s", "--rw", rw, "--bs", "4k", "--iodepth", iodepth, "--runtime", seconds];
    serde_json::from_slice(&run(folder, &[&words[..], &["--output-format", "json"]].concat()).stdout).unwrap()
}

fn inspect(folder: &Path, words: &[&str]) -> Value {
    let all = [&["inspect", "--control", "c", "--json"], words].concat();
    serde_json::from_slice(&run(folder, &all).stdout).unwrap()
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
    let fresh = text(run(folder, &["inspect", "--control", "c"]));
    assert!(fresh.contains(" s\n") && !fresh.contains("up for 0 ns"), "{fresh}");
    bench(folder, "randread", "8", "2");
    let tree = inspect(folder, &[]);
    assert_eq!(tree["schema"], 1);
    let latency = &reads(&tree)["latency"];
    let max_ns = latency["max_ns"].as_u64().unwrap();
    for (percent, ns) in latency["percentile_ns"].as_object().unwrap() {
        assert!(ns.as_u64().unwrap() <= max_ns, "p{percent} exceeds the longest: {latency:#}");
    }
    let shown = text(run(folder, &["inspect", "--control", "c"]));
    assert!(!shown.contains("of 0 bytes"), "{shown}");
    let said = daemon.lines.lock().unwrap().join("\n");
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

/// Compares a client's mean with what the daemon says of the same reads or trims.
fn compare(device: &str, values: &[&str], name: &str, dominant: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = serve(folder, device, "1");
    if !values.is_empty() {
        run(folder, &[&["set", "--control", "c", "export:0"], values].concat());
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
    let said = daemon.lines.lock().unwrap().join("\n");
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
