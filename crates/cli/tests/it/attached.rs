//! The command `bench` as the client of a foreign back-end, which loses its requests when memory or rings change, and
//! drops requests.

use std::process::{Command, Output, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::lossy::{Lossy, LossyConfig};

/// Longer than any of these takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(2);

/// Writes all of a disk of 8 MiB and reads it back; a hanging process is killed. Returns its output and its run time.
fn bench(lossy: &Lossy, options: &str, arguments: &[&str]) -> (Output, Duration) {
    let start = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .arg("bench")
        .arg(format!("vhost-user:{}?{options}", lossy.path().display()))
        .args(["--rw", "randwrite", "--bs", "4k", "--verify", "crc32c"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("bench {arguments:?} hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    (child.wait_with_output().unwrap(), start.elapsed())
}

fn check_good(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("no errors") && said.contains(" 0 differ"), "{output:?}");
}

#[test]
fn jobs_that_share_queues_or_not_lose_no_io_when_they_start() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 0..5 {
        for arguments in [["--numjobs", "4", "--iodepth", "8"], ["--numjobs", "2", "--iodepth", "32"]] {
            let lossy = Lossy::start(&folder.path().join("s"), LossyConfig::new(2, seed));
            check_good(&bench(&lossy, "queues=2", &arguments).0);
            // At the end the memory may be withdrawn, before the connection is closed.
            let (grown, lost) = (lossy.seen.tables_grown.load(Relaxed), lossy.seen.lost.load(Relaxed));
            assert_eq!((grown, lost), (1, 0), "all memory was told at once");
        }
    }
}

#[test]
fn any_number_of_jobs_runs_at_a_back_end_with_eight_memory_slots() {
    let folder = tempfile::tempdir().unwrap();
    // With a queue for each job, and with queues that jobs share.
    for queues in [16, 2] {
        let lossy = Lossy::start(&folder.path().join("s"), LossyConfig::new(queues, 1));
        check_good(&bench(&lossy, &format!("queues={queues}"), &["--numjobs", "16", "--iodepth", "4"]).0);
        assert_eq!(lossy.seen.lost.load(Relaxed), 0);
    }
}

#[test]
fn requests_that_a_back_end_drops_are_done_again_after_timeout_s() {
    let folder = tempfile::tempdir().unwrap();
    // Of some thousand requests several.
    let config = LossyConfig { drop_every: 300, ..LossyConfig::new(2, 3) };
    let lossy = Lossy::start(&folder.path().join("s"), config);
    check_good(&bench(&lossy, "queues=2&timeout_s=2", &["--numjobs", "4", "--iodepth", "8"]).0);
    let (dropped, sessions) = (lossy.seen.dropped.load(Relaxed), lossy.seen.sessions.load(Relaxed));
    assert!(sessions > 1 && dropped > 0, "{dropped} dropped in {sessions} sessions");
}

#[test]
fn a_back_end_that_answers_no_request_fails_io_after_timeout_s_and_gone_s() {
    let folder = tempfile::tempdir().unwrap();
    let lossy = Lossy::start(&folder.path().join("s"), LossyConfig { drop_every: 1, ..LossyConfig::new(2, 1) });
    let (output, took) = bench(&lossy, "queues=2&timeout_s=2&gone_s=3", &["--numjobs", "4", "--iodepth", "8"]);
    assert!(!output.status.success() && took >= Duration::from_secs(5), "{took:?}: {output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("did not answer req.") && said.contains("timeout_s"), "{said}");
}
