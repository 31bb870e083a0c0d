//! The program as a process that does not outlive its test: commands that run to their end, and daemons.
//!
//! Every wait is bounded: a test whose process takes longer than [`PATIENCE`] fails.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longer than any step of a test takes on a busy machine; a process that takes longer hangs.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// Pause of a client between two looks for completions. One that never sleeps takes the CPU from the daemon, and from
/// the kernel's worker that completes direct writes, which then waits for it for seconds on a busy machine.
pub const IDLE_PAUSE: Duration = Duration::from_micros(50);

/// Time for which a killed process is waited for: one that hangs in a close cannot end.
const REAP_TIME: Duration = Duration::from_secs(5);

/// The program with these arguments, in a folder.
pub fn program(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    command.args(arguments).current_dir(folder);
    command
}

/// Runs the program to its end.
pub fn run(folder: &Path, arguments: &[&str]) -> Output {
    program(folder, arguments).output().unwrap()
}

/// Runs the program to its end, which must be success; returns its standard output.
pub fn succeed(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The tree of the daemon with the control socket `c`.
pub fn inspect(folder: &Path, arguments: &[&str]) -> Value {
    inspect_at(folder, "c", arguments)
}

/// The same of the daemon with this control socket.
pub fn inspect_at(folder: &Path, control: &str, arguments: &[&str]) -> Value {
    let all = [&["inspect", "--control", control, "--json"], arguments].concat();
    serde_json::from_str(&succeed(folder, &all)).unwrap()
}

/// Checks a condition every 10 ms until it holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sets a flag when it is dropped, also by a failed test: a scope would wait for threads that work until then.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// State letter of a thread with this folder in /proc, if it has not ended.
fn state_of_thread(folder: &Path) -> Option<char> {
    let status = std::fs::read_to_string(folder.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("State:"))?.trim().chars().next()
}

/// A process that is killed when it is dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.ended_within(REAP_TIME);
    }
}

impl Process {
    pub fn spawn(command: &mut Command) -> Process {
        Process(command.spawn().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Stops it by SIGSTOP until it gets SIGCONT. A thread that runs on another CPU stops a little after the signal
    /// was sent: this waits until all have.
    pub fn hang(&self) {
        self.signal(Signal::STOP);
        let folder = format!("/proc/{}/task", self.0.id());
        wait_until("all threads of the process have stopped", || {
            let threads = std::fs::read_dir(&folder).unwrap();
            threads.filter_map(|thread| state_of_thread(&thread.ok()?.path())).all(|state| state == 'T')
        });
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Its exit status, if it ends within this time.
    pub fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let begin = Instant::now();
        loop {
            let status = self.0.try_wait().unwrap();
            if status.is_some() || begin.elapsed() > limit {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its exit status, for which it has time.
    pub fn ended(&mut self) -> ExitStatus {
        self.ended_within(PATIENCE).expect("the process does not end")
    }

    /// Waits until it has created a file, such as its socket.
    pub fn wait_for(&mut self, path: &Path) {
        wait_until("the process creates its socket", || {
            assert!(self.is_running(), "the process ended before it created {}", path.display());
            path.exists()
        });
    }

    /// Ends it by SIGTERM, which must lead to success.
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        let status = self.ended();
        assert!(status.success(), "after SIGTERM: {status}");
    }
}

/// A daemon that serves, and its standard output.
pub struct Daemon {
    pub process: Process,
    /// Lines that it wrote before `ready`.
    pub greeting: Vec<String>,
    lines: Receiver<String>,
}

impl Daemon {
    /// Starts `serve` with these arguments in a folder; returns once it is ready.
    pub fn start(folder: &Path, arguments: &[&str]) -> Daemon {
        Daemon::launch(program(folder, &["serve"]).args(arguments))
    }

    /// Starts a command that serves; returns once it is ready.
    pub fn launch(command: &mut Command) -> Daemon {
        let mut process = Process::spawn(command.stdout(Stdio::piped()));
        let stdout = BufReader::new(process.0.stdout.take().unwrap());
        let (sender, lines) = channel();
        // Reads even if the test does not, so that the daemon never waits for a reader.
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut daemon = Daemon { process, greeting: Vec::new(), lines };
        loop {
            match daemon.next_line().as_str() {
                "ready" => return daemon,
                line => daemon.greeting.push(line.to_owned()),
            }
        }
    }

    /// The next line of its standard output, for which it has time.
    pub fn next_line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the daemon ended or wrote no line")
    }

    /// Lines that it has written and that were not read yet.
    pub fn lines_so_far(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// As [`Process::hang`].
    pub fn hang(&self) {
        self.process.hang();
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    /// Ends it by SIGTERM, which must lead to success.
    pub fn stop(self) {
        self.process.stop();
    }
}
