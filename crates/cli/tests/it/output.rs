//! The program as a process with failing or stalling standard output or error, while a client does I/O.

use std::fs::{File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use blkyard::{Bio, Disk, DiskConfig, Op, Status, Submitter};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::common::{PATIENCE, Process, program, run, succeed};

/// Starts a daemon with one disk in memory; returns once it can be connected to.
fn serve(folder: &Path, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Process {
    let arguments = ["serve", "--device", "ram:16M", "--export", "vhost-user-blk:s", "--stats", "1", "--control", "c"];
    start(program(folder, &arguments), folder, stdout, stderr)
}

/// The same for any command with the control socket `c`. Its standard output may be unusable, so `ready` is not read.
fn start(mut serve: Command, folder: &Path, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Process {
    let mut daemon = Process::spawn(serve.stdout(stdout).stderr(stderr));
    daemon.wait_for(&folder.join("c"));
    daemon
}

/// Stops a daemon and returns its log.
fn log(daemon: Process, mut reader: PipeReader) -> String {
    daemon.stop();
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    log
}

/// Has clients come, do I/O and go, and stops the daemon.
fn serves_and_ends_well(mut daemon: Process, folder: &Path) {
    for _ in 0..2 {
        let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--runtime", "1", "--output-format", "json"];
        succeed(folder, &words);
    }
    succeed(folder, &["inspect", "--control", "c"]);
    assert!(daemon.is_running(), "the daemon ended by itself");
    daemon.stop();
}

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

fn without_reader() -> PipeWriter {
    pipe().unwrap().1
}

/// A full pipe with a reader.
fn stalled() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(b"x").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

/// Comes as a front-end, asks one thing and leaves.
fn visit(folder: &Path) {
    /// VHOST_USER_GET_FEATURES in version 1, without a body; and the length of its answer.
    const GET_FEATURES: [u32; 3] = [1, 1, 0];
    const ANSWER_BYTES: usize = 20;
    let mut stream = UnixStream::connect(folder.join("s")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&GET_FEATURES.map(u32::to_ne_bytes).concat()).unwrap();
    stream.read_exact(&mut [0; ANSWER_BYTES]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    // Closed by the daemon at the end of the session.
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn version_names_the_program() {
    let output = Command::new(env!("CARGO_BIN_EXE_blkyard")).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), concat!("blkyard ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn daemon_serves_with_its_log_on_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    serves_and_ends_well(serve(folder.path(), full(), full()), folder.path());
}

#[test]
fn daemon_serves_after_the_reader_of_its_log_died() {
    let folder = tempfile::tempdir().unwrap();
    serves_and_ends_well(serve(folder.path(), without_reader(), without_reader()), folder.path());
}

#[test]
fn daemon_serves_and_ends_while_its_log_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let ((_out, stdout), (_err, stderr)) = (stalled(), stalled());
    serves_and_ends_well(serve(folder.path(), stdout, stderr), folder.path());
}

#[test]
fn log_is_whole_when_its_reader_wakes() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reader, stderr) = stalled();
    let daemon = serve(folder.path(), Stdio::null(), stderr);
    visit(folder.path());
    let log = std::thread::spawn(move || {
        let mut log = Vec::new();
        reader.read_to_end(&mut log).unwrap();
        String::from_utf8(log).unwrap()
    });
    daemon.stop();
    let log = log.join().unwrap();
    let words = ["a front-end connected", "the front-end left", "stopping"];
    assert!(words.iter().all(|word| log.contains(word)), "{}", log.trim_start_matches('x'));
}

/// Commands that end with a report, without a daemon.
const REPORTS: &[&[&str]] = &[
    &["bench", "null:1G", "--runtime", "1"],
    &["bench", "null:1G", "--runtime", "1", "--output-format", "json"],
    &["floor", "--quick"],
    &["floor", "--quick", "--json"],
    &["--help"],
    &["bench", "--help"],
    &["--version"],
];

#[test]
fn report_that_cannot_be_written_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = serve(folder.path(), Stdio::null(), Stdio::null());
    let asks: &[&[&str]] = &[
        &["inspect", "--control", "c"],
        &["inspect", "--control", "c", "--json"],
        &["set", "--control", "c", "daemon", "stats=5"],
    ];
    for arguments in REPORTS.iter().chain(asks) {
        let done = program(folder.path(), arguments).stdout(full()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("standard output") && said.lines().count() == 1, "{arguments:?}: {said}");
        // A reader that has left is no news.
        let done = program(folder.path(), arguments).stdout(without_reader()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!((done.status.code(), said.as_str()), (Some(1), ""), "{arguments:?}");
        let done = program(folder.path(), arguments).stdout(full()).stderr(full()).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
    }
    daemon.stop();
}

#[test]
fn error_that_cannot_be_written_is_a_failure_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [&["bench", "floppy:a"][..], &["serve", "--device", "ram:lots"], &["inspect", "--control", "none"]]
    {
        let (_reader, stalled) = stalled();
        for stderr in [Stdio::from(full()), Stdio::from(without_reader()), Stdio::from(stalled)] {
            let ended = program(folder.path(), arguments).stderr(stderr).status().unwrap();
            assert_eq!(ended.code(), Some(1), "{arguments:?}");
        }
    }
}

/// The log of a daemon after a front-end has connected and left.
fn log_with(arguments: &[&str], journal: bool) -> String {
    let folder = tempfile::tempdir().unwrap();
    let device = ["serve", "--device", "ram:16M", "--export", "vhost-user-blk:s", "--control", "c"];
    let mut serve = program(folder.path(), &[&device, arguments].concat());
    let (reader, stderr) = pipe().unwrap();
    if journal {
        let stat = rustix::fs::fstat(&stderr).unwrap();
        serve.env("JOURNAL_STREAM", format!("{}:{}", stat.st_dev, stat.st_ino));
    } else {
        serve.env("JOURNAL_STREAM", "1:2");
    }
    let daemon = start(serve, folder.path(), Stdio::null(), stderr);
    visit(folder.path());
    log(daemon, reader)
}

/// Whether a text begins as 2026-11-22T20:33:01.123Z does.
fn has_time(text: &str) -> bool {
    let form = "0000-00-00T00:00:00.000Z";
    let fits = |(is, wanted): (char, char)| if wanted == '0' { is.is_ascii_digit() } else { is == wanted };
    text.len() >= form.len() && text.chars().zip(form.chars()).all(fits)
}

#[test]
fn log_lines_carry_the_time() {
    let log = log_with(&[], false);
    assert!(log.contains("  INFO vhost-user-blk:s: a front-end connected\n"), "{log}");
    assert!(log.lines().all(has_time), "{log}");
}

#[test]
fn log_lines_under_journald_carry_no_time() {
    let log = log_with(&[], true);
    assert!(log.contains(" INFO vhost-user-blk:s: a front-end connected\n"), "{log}");
    assert!(!log.lines().any(has_time), "{log}");
}

#[test]
fn json_log_is_one_object_a_line() {
    let log = log_with(&["--log-format", "json"], false);
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| has_time(line["timestamp"].as_str().unwrap())), "{log}");
    assert!(
        lines
            .iter()
            .any(|line| line["message"] == "vhost-user-blk:s: a front-end connected" && line["level"] == "INFO"),
        "{log}"
    );
    let log = log_with(&["--log-format", "json"], true);
    assert!(log.contains("message") && !log.contains("timestamp"), "{log}");
}

#[test]
fn log_format_is_read_from_a_file_and_errors_keep_to_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk.toml"), "log_format = \"json\"\n[[device]]\nspec = \"ram:1M\"").unwrap();
    for arguments in [&["--config", "disk.toml"][..], &["--log-format", "json", "--device", "ram:1M"]] {
        let done = run(folder.path(), &[&["serve"], arguments].concat());
        let said = String::from_utf8(done.stderr).unwrap();
        let line: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert!(line["message"].as_str().unwrap().contains("no export serves this device"), "{said}");
    }
}

/// The lines of a log on I/O errors, as JSON.
fn io_errors(log: &str) -> Vec<serde_json::Value> {
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["message"] == "I/O error").collect()
}

/// Reads blocks for this time, one after the other; returns the number of failures.
fn failed_reads(queue: &mut Submitter, time: Duration) -> u64 {
    let (begin, mut failed) = (Instant::now(), 0);
    let mut free = vec![Bio::with_capacity(1)];
    while begin.elapsed() < time {
        let mut bio = free.pop().unwrap();
        bio.reset();
        (bio.op, bio.sector, bio.sectors) = (Op::Read, 8, 8);
        bio.segments.push(queue.buffer(0, 4096));
        queue.submit(bio);
        while free.is_empty() {
            queue.wait(|bio| free.push(bio));
        }
        failed += u64::from(free[0].status != Status::Ok);
    }
    failed
}

#[test]
fn io_errors_leave_few_lines_that_count_all() {
    let folder = tempfile::tempdir().unwrap();
    let (reader, stderr) = pipe().unwrap();
    let mut serve = program(folder.path(), &["serve"]);
    serve.args(["--device", "chaos:16M?errors=2&requeues=0&timeouts=0", "--export", "vhost-user-blk:s"]);
    serve.args(["--control", "c", "--log-format", "json"]);
    let daemon = start(serve, folder.path(), Stdio::null(), stderr);
    let begin = Instant::now();
    let name = format!("vhost-user:{}", folder.path().join("s").display());
    let config = DiskConfig { threads: 1, buffer_bytes: 4096, ..DiskConfig::default() };
    let seen = Disk::open(&name, config).unwrap().run(|queue| failed_reads(queue, Duration::from_secs(7)));
    let log = log(daemon, reader);
    let (lines, seconds) = (io_errors(&log), begin.elapsed().as_secs());
    let errors: u64 = lines.iter().map(|line| line["errors"].as_u64().unwrap()).sum();
    assert_eq!(seen, [errors], "{log}");
    assert!(errors > 1000, "{errors}");
    assert!((2..=3 + seconds / 5).contains(&(lines.len() as u64)), "in {seconds} s: {log}");
    let line = &lines[0];
    assert!(line["device"].as_str().unwrap().starts_with("chaos:16M") && line["operation"] == "read", "{line}");
    assert!(line["sector"].is_u64() && line["bytes"] == 4096 && line["cause"].is_string(), "{line}");
    assert!(line.get("errno").is_none(), "no system said anything: {line}");
}

#[test]
fn failed_write_and_failed_sync_of_a_file_are_logged_with_their_errno() {
    let folder = tempfile::tempdir().unwrap();
    // A file that refuses writes from some moment on, although it is open for them.
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("disk", flags).unwrap());
    file.set_len(16 << 20).unwrap();
    let device = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let (reader, stderr) = pipe().unwrap();
    let mut serve = program(folder.path(), &["serve"]);
    serve.args(["--device", &format!("{device}?cache=writethrough"), "--export", "vhost-user-blk:s"]);
    serve.args(["--control", "c", "--log-format", "json"]);
    let daemon = start(serve, folder.path(), Stdio::null(), stderr);
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let done = run(folder.path(), &["bench", "vhost-user:s", "--rw", "randwrite", "--runtime", "1"]);
    assert_eq!(done.status.code(), Some(1), "the client saw no error");
    let log = log(daemon, reader);
    let lines = io_errors(&log);
    let line = &lines[0];
    assert_eq!((line["errno"].as_i64(), line["operation"].as_str()), (Some(1), Some("write")), "{log}");
    assert!(line["device"].as_str().unwrap().contains(&device) && line["bytes"] == 4096, "{log}");
    assert_eq!(log.matches("a sync failed").count(), 1, "{log}");
}

#[test]
fn hostile_reconnects_leave_few_lines_that_count_all() {
    /// Each leaves two lines: it came, and it left.
    const FRONT_ENDS: u64 = 3000;
    let folder = tempfile::tempdir().unwrap();
    let (reader, stderr) = pipe().unwrap();
    let daemon = serve(folder.path(), Stdio::null(), stderr);
    let begin = Instant::now();
    (0..FRONT_ENDS).for_each(|_| visit(folder.path()));
    let seconds = begin.elapsed().as_secs();
    // The rest is logged once a line is due again.
    std::thread::sleep(Duration::from_secs(12));
    let log = log(daemon, reader);
    let lines = log.lines().filter(|line| line.contains("vhost-user-blk:s: ")).count() as u64;
    assert!((30..=40 + seconds / 10).contains(&lines), "{lines} lines in {seconds} s: {log}");
    let counts = log.lines().filter_map(|line| {
        let line = line.split("vhost-user-blk:s: ").nth(1)?;
        let mut words = line.split(|letter: char| !letter.is_ascii_digit());
        line.contains("left out").then(|| words.find_map(|word| word.parse::<u64>().ok())).flatten()
    });
    let (held_back, summary) = (counts.sum::<u64>(), log.contains("more lines about its front-ends were left out"));
    let shown = lines - u64::from(summary);
    assert_eq!(shown + held_back, 2 * FRONT_ENDS, "{log}");
}

#[test]
fn lone_front_end_is_logged_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (reader, stderr) = pipe().unwrap();
    let daemon = serve(folder.path(), Stdio::null(), stderr);
    (0..5).for_each(|_| visit(folder.path()));
    let log = log(daemon, reader);
    assert_eq!(log.matches("a front-end connected\n").count(), 5, "{log}");
    assert_eq!(log.matches("the front-end left\n").count(), 5, "{log}");
}

#[test]
fn the_log_says_why_a_back_end_is_not_connected_again() {
    for (export, device) in [("vhost-user-blk:b", "vhost-user:b?gone_s=2"), ("vfio-user:b", "vfio-user:b?gone_s=2")] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let back_end = |disk: &str| {
            let arguments = ["serve", "--device", disk, "--export", export, "--control", "none"];
            let mut back_end = Process::spawn(program(folder, &arguments).stdout(Stdio::null()));
            back_end.wait_for(&folder.join("b"));
            back_end
        };
        let first = back_end("null:64M");
        let (reader, stderr) = pipe().unwrap();
        let arguments = ["serve", "--device", device, "--export", "vhost-user-blk:s", "--control", "c"];
        let daemon = start(program(folder, &arguments), folder, Stdio::null(), stderr);
        first.stop();
        let _other = back_end("null:64M?block_size=4k");
        std::thread::sleep(Duration::from_secs(4));
        let log = log(daemon, reader);
        let line = |words: [&str; 2]| log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count();
        assert_eq!(line(["limits", "it is tried again"]), 1, "{device}: {log}");
        assert_eq!(line(["not connected for 2s", "I/O fails until it is connected again"]), 1, "{device}: {log}");
    }
}
