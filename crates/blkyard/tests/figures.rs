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

/// What a client measures that reads at random for so many seconds: its report.
fn bench(folder: &Path, iodepth: &str, seconds: &str) -> Value {
    let words = ["bench", "vhost-user:s", "--rw", "randread", "--bs", "4k", "--iodepth", iodepth, "--runtime", seconds];
    serde_json::from_slice(&run(folder, &[&words[..], &["--output-format", "json"]].concat()).stdout).unwrap()
}

fn inspect(folder: &Path, words: &[&str]) -> Value {
    let all = [&["inspect", "--control", "c", "--json"], words].concat();
    serde_json::from_slice(&run(folder, &all).stdout).unwrap()
}

fn reads(tree: &Value) -> &Value {
    &tree["exports"][0]["queues"][0]["ops"]["read"]
}

#[test]
fn percentiles_and_lines_keep_their_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = serve(folder, "ram:16M", "40");
    let fresh = text(run(folder, &["inspect", "--control", "c"]));
    assert!(fresh.contains(" s\n") && !fresh.contains("up for 0 ns"), "{fresh}");
    bench(folder, "8", "2");
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
    bench(folder, "4", "1");
    let before = inspect(folder, &[]);
    assert!(before["window_s"].is_null() && reads(&before)["ios"].as_u64().unwrap() > 0);
    let quiet = inspect(folder, &["--window", "1"]);
    assert!(quiet["window_s"].as_f64().unwrap() >= 1.0);
    assert_eq!((reads(&quiet)["ios"].as_u64(), &reads(&quiet)["latency"]), (Some(0), &Value::Null));
    assert_eq!(reads(&inspect(folder, &[]))["ios"], reads(&before)["ios"], "the window took something away");
}
