//! How `serve` and `bench` end when they are told to, whatever hangs; and how `inspect` waits: for a bounded time.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longer than anything takes here on a busy machine, and far less than for ever.
const PATIENCE: Duration = Duration::from_mins(1);

/// A process that does not outlive its test. What it says lies in a file of its own.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts a shell command in a folder, in which `$B` is the program.
    fn start(folder: &Path, name: &str, command: &str) -> Process {
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log).unwrap();
        let child = Command::new("sh")
            .args(["-c", command])
            .env("B", env!("CARGO_BIN_EXE_blkyard"))
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn();
        Process { child: child.unwrap(), log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn wait_until(&mut self, what: &str, enough: impl Fn(&str) -> bool) {
        let begin = Instant::now();
        while !enough(&self.said()) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && begin.elapsed() < PATIENCE, "{what} ({ended:?}): {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ready(&mut self) {
        self.wait_until("it is not ready", |said| said.lines().any(|line| line == "ready"));
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its end, which must come within this time.
    fn ended(&mut self, within: Duration) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begin.elapsed() < within, "still there after {within:?}: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
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
        let mut daemon = Process::start(folder.path(), &format!("daemon{limit}"), &serve);
        daemon.ready();
        let client = format!("exec $B bench 'vhost-user:s{limit}?timeout_s=5' --numjobs 8 --iodepth 1 --runtime 1");
        (daemon, Process::start(folder.path(), &format!("client{limit}"), &client))
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

/// A chain of two daemons and a client: the first has the data, the second serves it on, with these arguments.
struct Chain {
    folder: tempfile::TempDir,
    first: Process,
    second: Process,
    client: Process,
}

/// How the second daemon of a [`Chain`] is started.
const SECOND: &str = "exec $B serve --device 'vhost-user:first?timeout_s=600' --export 'vhost-user-blk:second?queues=1' \
                      --control control";

impl Chain {
    /// The client writes; each request takes 10 ms with the first daemon.
    fn start(arguments: &str) -> Chain {
        let folder = tempfile::tempdir().unwrap();
        let mut first = Process::start(
            folder.path(),
            "first",
            "exec $B serve --device 'model:latency?us=10000&size=8M' --export 'vhost-user-blk:first?queues=1' --control none",
        );
        first.ready();
        let mut second = Process::start(folder.path(), "second", &format!("{SECOND} {arguments}"));
        second.ready();
        let client = Process::start(
            folder.path(),
            "client",
            "exec $B bench 'vhost-user:second?gone_s=600' --rw randwrite --verify crc32c --iodepth 4",
        );
        let chain = Chain { folder, first, second, client };
        let begin = Instant::now();
        while chain.queue()["ops"]["write"]["ios"].as_u64().unwrap_or(0) == 0 {
            assert!(begin.elapsed() < PATIENCE, "nothing is written: {}", chain.client.said());
        }
        chain
    }

    /// The second daemon's queue, as `inspect` shows it.
    fn queue(&self) -> serde_json::Value {
        let mut look = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        look.args(["inspect", "--control", "control", "--json"]).current_dir(self.folder.path());
        let tree: serde_json::Value = serde_json::from_slice(&look.output().unwrap().stdout).unwrap();
        tree["exports"][0]["queues"][0].clone()
    }

    /// Stops the first daemon, and waits until it has in flight all that the client submits.
    fn hang(&self) {
        self.first.signal(Signal::STOP);
        let begin = Instant::now();
        // Twice in a row, in case it has not stopped yet.
        let mut full = 0;
        while full < 2 {
            full = if self.queue()["now"]["in_flight"] == 4 { full + 1 } else { 0 };
            assert!(begin.elapsed() < PATIENCE, "the queue does not fill: {}", self.queue());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The first daemon hangs; what it had in flight is reported by the second, which ends.
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
        for socket in ["second", "control"] {
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
    let mut second = Process::start(chain.folder.path(), "third", SECOND);
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
    chain.second.wait_until("it does not drain", |said| said.contains("for 3600 s at most"));
    chain.second.signal(Signal::INT);
    chain.check_left(Duration::from_secs(20));
}

#[test]
fn idle_daemon_ends_although_its_back_end_is_silent() {
    let mut chain = Chain::start("--drain-s 2");
    chain.client.signal(Signal::KILL);
    chain.second.wait_until("the client has not left", |said| said.contains("the front-end left"));
    chain.first.signal(Signal::STOP);
    chain.second.signal(Signal::TERM);
    let status = chain.second.ended(PATIENCE);
    // Nothing is in flight, so nothing is left.
    assert!(status.success(), "{status}: {}", chain.second.said());
}

#[test]
fn signal_ends_a_daemon_that_still_starts() {
    let folder = tempfile::tempdir().unwrap();
    let silent = UnixListener::bind(folder.path().join("silent")).unwrap();
    let serve = "exec $B serve --device 'vhost-user:silent?timeout_s=600' --export vhost-user-blk:s";
    for signal in [Signal::INT, Signal::TERM] {
        let mut daemon = Process::start(folder.path(), "daemon", serve);
        let connection = silent.accept().unwrap();
        daemon.signal(signal);
        let status = daemon.ended(Duration::from_secs(20));
        assert!(status.success() && daemon.said().contains("stopped before anything was served"), "{}", daemon.said());
        drop(connection);
    }
}

#[test]
fn front_end_that_hangs_does_not_delay_the_end_and_sighup_is_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let serve = "exec $B serve --device ram:16M --export vhost-user-blk:a --device ram:16M --export vhost-user-blk:b \
                 --control none --drain-s 600";
    let mut daemon = Process::start(folder.path(), "daemon", serve);
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
    daemon.wait_until("SIGHUP is not logged", |said| said.contains("SIGHUP is ignored: reload is not implemented"));
    daemon.signal(Signal::TERM);
    let status = daemon.ended(Duration::from_secs(20));
    assert!(status.success(), "{}", daemon.said());
}

#[test]
fn idle_connections_keep_nobody_from_the_control_socket() {
    const IDLE: usize = 3000;
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Process::start(
        folder.path(),
        "daemon",
        "exec $B serve --device ram:16M --export vhost-user-blk:s --control control",
    );
    daemon.ready();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let control = folder.path().join("control");
    let idle: Vec<_> = (0..IDLE).map(|_| UnixStream::connect(&control).unwrap()).collect();
    let begin = Instant::now();
    let inspect = |arguments: &[&str]| {
        let mut inspect = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        inspect.arg("inspect").args(arguments).current_dir(folder.path()).output().unwrap()
    };
    let answered = inspect(&["--control", "control", "--timeout-s", "30"]);
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
        let mut inspect = Process::start(folder.path(), "inspect", &command);
        let status = inspect.ended(Duration::from_secs(30));
        let said = inspect.said();
        let words = format!("control socket {name}: no answer within 1s; wait longer with --timeout-s");
        assert!(!status.success() && said.contains(&words), "{said}");
    }
    drop(silent);
}

/// Runs `bench` in its two ways, a job for each queue and more jobs than queues, until it has done some I/O and `hang`
/// has made its back-end silent; it must then end soon at one signal.
fn check_bench_ends(serve: &str, signals: &[(Signal, &str)], hang: impl Fn(&Process)) {
    for (jobs, outstanding) in [(1, 4), (3, 12)] {
        let folder = tempfile::tempdir().unwrap();
        let mut daemon = Process::start(folder.path(), "daemon", serve);
        daemon.ready();
        let mut sessions = 0;
        for &(signal, name) in signals {
            let bench = format!("exec $B bench vhost-user:s?timeout_s=600 --iodepth 4 --numjobs {jobs} --runtime 3600");
            let mut bench = Process::start(folder.path(), name, &bench);
            let connections = sessions + 1;
            daemon.wait_until("no client", |said| said.matches("a front-end connected").count() >= connections);
            sessions = connections;
            // Once connected it has I/O in flight before long, and always.
            std::thread::sleep(Duration::from_secs(2));
            hang(&daemon);
            std::thread::sleep(Duration::from_secs(1));
            bench.signal(signal);
            let begin = Instant::now();
            let status = bench.ended(Duration::from_secs(30));
            let said = bench.said();
            eprintln!("{jobs} jobs, {name}: ended after {:?}", begin.elapsed());
            let words = format!("outstanding  : {outstanding} I/Os were submitted and not finished");
            assert!(status.code() == Some(1) && said.contains(&words), "{status}: {said}");
            daemon.signal(Signal::CONT);
        }
    }
}

#[test]
fn bench_ends_at_a_signal_although_its_back_end_is_silent() {
    let serve = "exec $B serve --device null:1G --export 'vhost-user-blk:s?queues=1' --control none";
    check_bench_ends(serve, &[(Signal::INT, "int"), (Signal::TERM, "term")], |daemon| daemon.signal(Signal::STOP));
}

#[test]
fn bench_ends_at_a_signal_although_its_requests_are_dropped() {
    // Each request is lost until its queue asks for it, which is long after.
    let serve =
        "exec $B serve --device 'chaos:16M?timeouts=1&requeues=0' --export 'vhost-user-blk:s?queues=1' --control none";
    // One for each daemon: the next client would have to wait until the requests are asked for.
    check_bench_ends(serve, &[(Signal::INT, "int")], |_| ());
}
