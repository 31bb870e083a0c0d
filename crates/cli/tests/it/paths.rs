//! Paths of a device as a user sees them: each path in the statistics and in `inspect`.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;

use crate::common::{Daemon, PATIENCE, Process, inspect_at, program, succeed, wait_until};

const NQN: &str = "nqn.2026-11.test:paths";

/// A daemon with a disk at two ports, slow enough that a load always has I/O in flight.
fn target(folder: &Path, device: &str) -> (Daemon, [SocketAddr; 2]) {
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}");
    let words = ["--control", "t", "--device", device, "--export", &export, "--export", &export];
    let daemon = Daemon::start(folder, &words);
    let address = |port: usize| {
        let tree = inspect_at(folder, "t", &[]);
        tree["exports"][port]["session"]["target"]["address"].as_str().map(|address| address.parse().unwrap())
    };
    wait_until("both ports listen", || address(0).is_some() && address(1).is_some());
    (daemon, [0, 1].map(|port| address(port).unwrap()))
}

fn name_of(addresses: &[SocketAddr], options: &str) -> String {
    let paths: Vec<_> = addresses.iter().map(|address| format!("nvme-tcp://{address}/{NQN}")).collect();
    format!("multipath:{}?{options}", paths.join(","))
}

/// The daemon that has both ports as paths of its device, which it exports at `s`.
fn initiator(folder: &Path, addresses: &[SocketAddr], options: &str) -> Daemon {
    let device = name_of(addresses, options);
    Daemon::start(folder, &["--control", "c", "--stats", "1", "--device", &device, "--export", "vhost-user-blk:s"])
}

fn paths(folder: &Path) -> [Value; 2] {
    let tree = inspect_at(folder, "c", &[]);
    [0, 1].map(|path| tree["devices"][0]["paths"][path].clone())
}

fn state(folder: &Path, path: usize) -> String {
    paths(folder)[path]["state"].as_str().unwrap().to_owned()
}

fn ios(folder: &Path) -> [u64; 2] {
    paths(folder).map(|path| path["ios"].as_u64().unwrap())
}

fn set_ana(folder: &Path, port: usize, state: &str) {
    succeed(folder, &["set", "--control", "t", &format!("export:{port}"), &format!("ana_state={state}")]);
}

fn load(folder: &Path, rw: &str, seconds: &str) -> Process {
    let words = ["bench", "vhost-user:s", "--rw", rw, "--bs", "4k", "--iodepth", "16", "--runtime", seconds];
    Process::spawn(program(folder, &words).stdout(Stdio::null()))
}

/// The next statistics line of each path, of the same moment, for which this holds.
fn stats_lines(daemon: &Daemon, what: &str, holds: impl Fn(&[String; 2]) -> bool) -> [String; 2] {
    let begin = Instant::now();
    loop {
        assert!(begin.elapsed() < PATIENCE, "no statistics: {what}");
        let first = daemon.next_line();
        println!("{first}");
        if !first.contains("device 0, path 0 ") {
            continue;
        }
        let lines = [first, daemon.next_line()];
        println!("{}", lines[1]);
        assert!(lines[1].contains("device 0, path 1 "), "{lines:?}");
        if holds(&lines) {
            return lines;
        }
    }
}

/// The number before these words in a line.
fn number_before(line: &str, words: &str) -> u64 {
    let (before, _) = line.split_once(words).unwrap_or_else(|| panic!("{words:?} is not in {line}"));
    let digits = before.rfind(|letter: char| !letter.is_ascii_digit()).map_or(0, |at| at + 1);
    before[digits..].parse().unwrap_or_else(|_| panic!("no number before {words:?} in {line}"))
}

#[test]
fn statistics_and_inspect_show_state_latency_load_share_and_reason_of_each_path() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (target, addresses) = target(folder, "ram:16M?share=on&mbps=20");
    let daemon = initiator(folder, &addresses, "policy=round-robin");
    let idle = stats_lines(&daemon, "without I/O", |_| true);
    assert!(idle.iter().all(|line| line.contains(": live, 0 IOPS, 0 in flight")), "{idle:?}");

    let load = load(folder, "randread", "120");
    let both = stats_lines(&daemon, "both paths are used", |lines| lines.iter().all(|line| line.contains("% of all")));
    let both = stats_lines(&daemon, "a whole second", |_| true).into_iter().chain(both);
    for line in both {
        assert!(line.contains(": live, ") && line.contains(", mean "), "{line}");
        assert!((40..=60).contains(&number_before(&line, " % of all")), "{line}");
        // At 20 MB/s 16 blocks take 3 ms.
        assert!(line.contains(" ms, ") && number_before(&line, " in flight") > 0, "{line}");
        assert!(line.ends_with(", last chosen as: best"), "{line}");
    }
    for (number, path) in paths(folder).iter().enumerate() {
        let [ios, latency, in_flight] = ["ios", "latency_sum_ns", "in_flight"].map(|name| path[name].as_u64().unwrap());
        assert!(path["state"] == "live" && path["chosen"] == "best", "{path:#}");
        assert!(latency / ios > 500_000 && in_flight > 0, "{path:#}");
        let text = succeed(folder, &["inspect", "--control", "c"]).replace("\n      ", " ");
        let (_, text) = text.split_once(&format!("path {number}: ")).unwrap();
        let text = text.lines().next().unwrap();
        assert!(text.contains(", live, ") && text.contains("mean latency "), "{text}");
        assert!((40..=60).contains(&number_before(text, " % of ")), "{text}");
        assert!(number_before(text, " in flight") > 0 && text.contains("last chosen as: best"), "{text}");
    }

    set_ana(folder, 0, "inaccessible");
    wait_until("the path is inaccessible", || state(folder, 0) == "inaccessible");
    let only = stats_lines(&daemon, "one path is used", |lines| lines[1].contains("100 % of all"));
    assert!(only[0].contains(": inaccessible, 0 IOPS, 0 in flight"), "{only:?}");
    assert!(only[1].contains(": live, ") && only[1].ends_with("last chosen as: only path"), "{only:?}");
    let [lost, used] = paths(folder);
    assert!(lost["in_flight"] == 0 && used["chosen"] == "only path", "{lost:#} {used:#}");
    drop(load);
    daemon.stop();
    target.stop();
}
