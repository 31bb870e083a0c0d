//! End of `serve` and `bench` after signals, also with hanging devices; and bounded waits of `inspect`.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{PATIENCE, Process, inspect, run, wait_until};

/// A process that writes its output to a file.
struct LoggedProcess {
    process: Process,
    log: PathBuf,
}

impl LoggedProcess {
    /// Starts a shell command in a folder, in which `$B` is the program.
    fn start(folder: &Path, name: &str, command: &str) -> LoggedProcess {
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log).unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).env("B", env!("CARGO_BIN_EXE_blkyard")).current_dir(folder).stdin(Stdio::null());
        let process = Process::spawn(shell.stdout(output.try_clone().unwrap()).stderr(output));
        LoggedProcess { process, log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn wait_until(&mut self, what: &str, enough: impl Fn(&str) -> bool) {
        wait_until(what, || {
            let said = self.said();
            assert!(self.process.is_running(), "ended before this: {what}: {said}");
            enough(&said)
        });
    }

    fn ready(&mut self) {
        self.wait_until("the daemon is ready", |said| said.lines().any(|line| line == "ready"));
    }

    fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    fn hang(&self) {
        self.process.hang();
    }

    /// Its exit status, which it must have within this time.
    fn ended(&mut self, within: Duration) -> ExitStatus {
        let status = self.process.ended_within(within);
        status.unwrap_or_else(|| panic!("not ended after {within:?}: {}", self.said()))
    }
}

#[test]
fn daemon_without_descriptors_still_ends() {
    let folder = tempfile::tempdir().unwrap();
    // Where they run out depends on how many a session takes: one of these limits is met at each step of its setup.
    let limits = 14..36;
    let start = |limit: u32| {
        let serve = format!(
            "ulimit -n {limit}; exec $B serve --device ram:16M --export 'vhost-user-blk:s{limit}?queues=64' --lanes 1 \
             --control none"
        );
        let mut daemon = LoggedProcess::start(folder.path(), &format!("daemon{limit}"), &serve);
        daemon.ready();
        let client = format!("exec $B bench 'vhost-user:s{limit}?timeout_s=5' --numjobs 8 --iodepth 1 --runtime 1");
        (daemon, LoggedProcess::start(folder.path(), &format!("client{limit}"), &client))
    };
    let started: Vec<_> = limits.map(start).collect();
    std::thread::sleep(Duration::from_secs(1));
    for (daemon, _) in &started {
        daemon.signal(Signal::TERM);
    }
    for (mut daemon, client) in started {
        let status = daemon.ended(Duration::from_secs(20));
        assert!(status.success(), "{status}: {}", daemon.said());
        drop(client);
    }
}

/// The first queue of the first export of the daemon with the control socket `c`.
fn queue(folder: &Path) -> serde_json::Value {
    inspect(folder, &["export:0"])["exports"][0]["queues"][0].clone()
}

/// I/Os that a queue has completed.
fn completed(queue: &serde_json::Value) -> u64 {
    queue["ops"].as_object().unwrap().values().filter_map(|op| op["ios"].as_u64()).sum()
}

/// Of each thread of a process: its state, such as `S`, and how often it has gone to sleep.
fn threads(process: &LoggedProcess) -> Vec<(char, u64)> {
    let folder = format!("/proc/{}/task", process.process.0.id());
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Some((field("State:")?.chars().next()?, field("voluntary_ctxt_switches:")?.parse().ok()?))
    };
    std::fs::read_dir(folder).unwrap().filter_map(status).collect()
}

/// Waits until all threads of a client sleep. Its back-end completes nothing: all it can submit is submitted then.
fn wait_until_asleep(process: &LoggedProcess) {
    let mut before = Vec::new();
    wait_until("all threads of the process sleep", || {
        // No thread has run between two checks if none went to sleep again.
        let now = threads(process);
        let is_asleep = now == before && now.iter().all(|&(state, _)| state == 'S');
        before = now;
        is_asleep
    });
}

/// A chain of two daemons and a client: the first has the data, the second serves it on, with these arguments.
struct Chain {
    folder: tempfile::TempDir,
    first: LoggedProcess,
    second: LoggedProcess,
    client: LoggedProcess,
}

/// How the second daemon of a [`Chain`] is started.
const SECOND: &str = "exec $B serve --device 'vhost-user:first?timeout_s=600' --export 'vhost-user-blk:second?queues=1' \
                      --control c";

impl Chain {
    /// The client writes; each request takes 10 ms with the first daemon.
    fn start(arguments: &str) -> Chain {
        let folder = tempfile::tempdir().unwrap();
        let mut first = LoggedProcess::start(
            folder.path(),
            "first",
            "exec $B serve --device 'model:latency?us=10000&size=8M' --export 'vhost-user-blk:first?queues=1' --control none",
        );
        first.ready();
        let mut second = LoggedProcess::start(folder.path(), "second", &format!("{SECOND} {arguments}"));
        second.ready();
        let client = LoggedProcess::start(
            folder.path(),
            "client",
            "exec $B bench 'vhost-user:second?gone_s=600' --rw randwrite --verify crc32c --iodepth 4",
        );
        let chain = Chain { folder, first, second, client };
        wait_until("the client writes", || chain.queue()["ops"]["write"]["ios"].as_u64() > Some(0));
        chain
    }

    /// The second daemon's queue, as `inspect` shows it.
    fn queue(&self) -> serde_json::Value {
        queue(self.folder.path())
    }

    /// Stops the first daemon, and waits until it has in flight all that the client submits.
    fn hang(&self) {
        self.first.hang();
        wait_until("the queue fills", || self.queue()["now"]["in_flight"] == 4);
    }

    /// The first daemon hangs; the second reports its requests in flight, and ends.
    fn check_left(&mut self, within: Duration) {
        let status = self.second.ended(within);
        let said = self.second.said();
        assert_eq!(status.code(), Some(1), "{said}");
        for words in [
            "vhost-user-blk:second: queue 0: 4 requests not answered, 4 with vhost-user:first",
            "queue 0: write of 8 sectors at sector ",
            "with 4 requests in flight; the front-ends keep the records: start the daemon again",
        ] {
            assert!(said.contains(words), "'{words}' is missing: {said}");
        }
        for socket in ["second", "c"] {
            assert!(!self.folder.path().join(socket).exists(), "{socket} is left behind");
        }
    }
}

#[test]
fn hanging_device_is_left_after_the_drain_time_and_its_requests_are_done_again() {
    let mut chain = Chain::start("--drain-s 2");
    chain.hang();
    chain.second.signal(Signal::TERM);
    let begin = Instant::now();
    chain.check_left(PATIENCE);
    assert!(begin.elapsed() >= Duration::from_secs(2), "it waited for {:?} only", begin.elapsed());
    chain.first.signal(Signal::CONT);
    let mut second = LoggedProcess::start(chain.folder.path(), "third", SECOND);
    second.ready();
    let status = chain.client.ended(2 * PATIENCE);
    let said = chain.client.said();
    assert!(status.success() && said.contains("2048 blocks checked, 0 differ"), "{status}: {said}");
    second.signal(Signal::TERM);
    assert!(second.ended(PATIENCE).success(), "{}", second.said());
}

#[test]
fn second_signal_ends_at_once() {
    let mut chain = Chain::start("--drain-s 3600");
    chain.hang();
    chain.second.signal(Signal::TERM);
    chain.second.wait_until("the daemon drains", |said| said.contains("for 3600 s at most"));
    // Two that come together are one.
    std::thread::sleep(Duration::from_millis(100));
    chain.second.signal(Signal::INT);
    chain.check_left(Duration::from_secs(20));
}

#[test]
fn idle_daemon_ends_although_its_back_end_is_silent() {
    let mut chain = Chain::start("--drain-s 2");
    chain.client.signal(Signal::KILL);
    chain.second.wait_until("the client has left", |said| said.contains("the front-end left"));
    chain.first.hang();
    chain.second.signal(Signal::TERM);
    let status = chain.second.ended(PATIENCE);
    // No request is in flight, so none is left.
    assert!(status.success(), "{status}: {}", chain.second.said());
}

#[test]
fn signal_ends_a_daemon_that_still_starts() {
    let folder = tempfile::tempdir().unwrap();
    let silent = UnixListener::bind(folder.path().join("silent")).unwrap();
    let serve = "exec $B serve --device 'vhost-user:silent?timeout_s=600' --export vhost-user-blk:s";
    for signal in [Signal::INT, Signal::TERM] {
        let mut daemon = LoggedProcess::start(folder.path(), "daemon", serve);
        let connection = silent.accept().unwrap();
        daemon.signal(signal);
        let status = daemon.ended(Duration::from_secs(20));
        assert!(
            status.success() && daemon.said().contains("stopped before the first export was served"),
            "{}",
            daemon.said()
        );
        drop(connection);
    }
}

#[test]
fn front_end_that_hangs_does_not_delay_the_end_and_sighup_is_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let serve = "exec $B serve --device ram:16M --export vhost-user-blk:a --device ram:16M --export vhost-user-blk:b \
                 --control none --drain-s 600";
    let mut daemon = LoggedProcess::start(folder.path(), "daemon", serve);
    daemon.ready();
    // One stops in the middle of a header, the other asks for the features and never reads.
    let mut half = UnixStream::connect(folder.path().join("a")).unwrap();
    half.write_all(&[1, 0, 0]).unwrap();
    let mut deaf = UnixStream::connect(folder.path().join("b")).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let question: Vec<u8> = [1_u32, 1, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    let begin = Instant::now();
    while deaf.write_all(&question).is_ok() || begin.elapsed() < Duration::from_secs(1) {}
    daemon.signal(Signal::HUP);
    daemon.wait_until("SIGHUP is logged", |said| said.contains("SIGHUP is ignored: reload is not implemented"));
    daemon.signal(Signal::TERM);
    let status = daemon.ended(Duration::from_secs(20));
    assert!(status.success(), "{}", daemon.said());
}

#[test]
fn idle_connections_keep_nobody_from_the_control_socket() {
    const IDLE: usize = 3000;
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = LoggedProcess::start(
        folder.path(),
        "daemon",
        "exec $B serve --device ram:16M --export vhost-user-blk:s --control c",
    );
    daemon.ready();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let control = folder.path().join("c");
    let idle: Vec<_> = (0..IDLE).map(|_| UnixStream::connect(&control).unwrap()).collect();
    let begin = Instant::now();
    let answered = run(folder.path(), &["inspect", "--control", "c", "--timeout-s", "30"]);
    eprintln!("inspect answered after {:?} beside {} idle connections", begin.elapsed(), idle.len());
    assert!(answered.status.success(), "{}", String::from_utf8_lossy(&answered.stderr));
}

#[test]
fn inspect_waits_for_a_bounded_time() {
    let folder = tempfile::tempdir().unwrap();
    // One that never takes anybody, with room in its backlog and without; and one that answers a bit now and then.
    let silent = UnixListener::bind(folder.path().join("silent")).unwrap();
    let full = UnixListener::bind(folder.path().join("full")).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let _waiting = UnixStream::connect(folder.path().join("full")).unwrap();
    let slow = UnixListener::bind(folder.path().join("slow")).unwrap();
    std::thread::spawn(move || {
        let mut client = slow.accept().unwrap().0;
        while client.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    for name in ["silent", "full", "slow"] {
        let command = format!("exec $B inspect --control {name} --timeout-s 1");
        let mut inspect = LoggedProcess::start(folder.path(), "inspect", &command);
        let status = inspect.ended(Duration::from_secs(30));
        let said = inspect.said();
        let words = format!("control socket {name}: no answer within 1s; wait longer with --timeout-s");
        assert!(!status.success() && said.contains(&words), "{said}");
    }
    drop(silent);
}

/// Runs `bench` in its two ways, a job for each queue and more jobs than queues, against a back-end that becomes
/// silent; it must then end soon at one signal. `hang` returns once all that the client can submit is outstanding.
fn check_bench_ends(device: &str, signals: &[(Signal, &str)], hang: impl Fn(&Silence<'_>)) {
    for (jobs, outstanding) in [(1, 4), (3, 12_u64)] {
        let folder = tempfile::tempdir().unwrap();
        let serve = format!("exec $B serve --device '{device}' --export 'vhost-user-blk:s?queues=1' --control c");
        let mut daemon = LoggedProcess::start(folder.path(), "daemon", &serve);
        daemon.ready();
        for (sessions, &(signal, name)) in signals.iter().enumerate() {
            // Random, so that no two are merged into one request.
            let load = format!("--rw randread --iodepth 4 --numjobs {jobs} --runtime 3600");
            let bench = format!("exec $B bench vhost-user:s?timeout_s=600 {load}");
            let mut bench = LoggedProcess::start(folder.path(), name, &bench);
            daemon.wait_until("the client connects", |said| said.matches("a front-end connected").count() > sessions);
            hang(&Silence { folder: folder.path(), daemon: &daemon, bench: &bench, outstanding });
            bench.signal(signal);
            let begin = Instant::now();
            let status = bench.ended(Duration::from_secs(30));
            let said = bench.said();
            eprintln!("{jobs} jobs, {name}: ended after {:?}", begin.elapsed());
            let words = format!("outstanding  : {outstanding} I/Os were submitted and have not completed");
            assert!(status.code() == Some(1) && said.contains(&words), "{status}: {said}");
            daemon.signal(Signal::CONT);
        }
    }
}

/// A client and its daemon, which is about to stop answering.
struct Silence<'a> {
    folder: &'a Path,
    daemon: &'a LoggedProcess,
    bench: &'a LoggedProcess,
    /// Number of I/Os that the client keeps in flight.
    outstanding: u64,
}

#[test]
fn bench_ends_at_a_signal_although_its_back_end_is_silent() {
    // Nearly all the time everything is in flight. Of a faster device the daemon could be stopped between publishing a
    // completion and signalling it: the client, woken by its own signal, would find it.
    check_bench_ends("null:1G?latency_us=500000", &[(Signal::INT, "int"), (Signal::TERM, "term")], |silence| {
        let before = completed(&queue(silence.folder));
        wait_until("the client does I/O", || {
            let queue = queue(silence.folder);
            completed(&queue) > before && queue["now"]["in_flight"] == silence.outstanding
        });
        silence.daemon.hang();
        wait_until_asleep(silence.bench);
    });
}

#[test]
fn bench_ends_at_a_signal_although_its_requests_are_dropped() {
    // Each request is lost until its queue times out, which is long after. One client for each daemon: the next one
    // would have to wait for the time-out.
    check_bench_ends("chaos:16M?timeouts=1&requeues=0", &[(Signal::INT, "int")], |silence| {
        wait_until("requests are in flight", || queue(silence.folder)["now"]["in_flight"].as_u64() > Some(0));
        wait_until_asleep(silence.bench);
    });
}
