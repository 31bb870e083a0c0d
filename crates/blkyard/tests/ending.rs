//! How `serve` ends when it is told to: in order, within its time, and with a word about what it leaves.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longer than anything takes here on a busy machine, and far less than for ever.
const PATIENCE: Duration = Duration::from_mins(1);

/// A process that does not outlive its test. What it says lies in a file of its own.
struct Process {
    child: Child,
    log: std::path::PathBuf,
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
