//! Child processes, which never outlive this process.
//!
//! Every child leads a separate process group, is killed by the kernel if this process dies, and by its id when its
//! owner drops it. Output goes to files, never to pipes, so a child cannot block on a reader and its output can be read
//! at any time.
//!
//! Starts no thread, and must be called from the main thread only: the kernel ties the death signal of a child to the
//! thread that started it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// Polling interval for the end of a child: short compared to measured times, long compared to the microseconds of a
/// poll.
const POLL: Duration = Duration::from_millis(10);

/// Time within which every thread of a child must have stopped after SIGSTOP.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Result of a program.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Both streams, for messages.
    pub fn said(&self) -> String {
        let mut said = self.stdout.trim_end().to_owned();
        if !said.is_empty() && !self.stderr.trim().is_empty() {
            said.push('\n');
        }
        said.push_str(self.stderr.trim_end());
        said
    }
}

/// A child that is running or was not reaped yet.
///
/// Dropping it kills its process group.
pub struct Running {
    name: String,
    child: Child,
    stdout: File,
    stderr: File,
    /// Lengths of both files before the program started: a log may have earlier output.
    before: u64,
    ended: Option<ExitStatus>,
}

impl Running {
    /// Starts `command` with an empty standard input. Its output goes to unnamed files.
    pub fn start(name: &str, command: &Command) -> Result<Self> {
        let stdout = tempfile::tempfile().context("cannot make a temporary file for a program's output")?;
        let stderr = tempfile::tempfile().context("cannot make a temporary file for a program's output")?;
        Self::start_into(name, command, stdout, stderr, 0)
    }

    /// Starts `command`; both streams are appended to `log`.
    pub fn start_logged(name: &str, command: &Command, log: &File) -> Result<Self> {
        let again = || log.try_clone().context("cannot open a log a second time");
        let before = log.metadata().context("cannot ask a log for its length")?.len();
        Self::start_into(name, command, again()?, again()?, before)
    }

    fn start_into(name: &str, command: &Command, stdout: File, stderr: File, before: u64) -> Result<Self> {
        let handle = |file: &File| file.try_clone().map(Stdio::from).context("cannot pass a file to a program");
        // setpriv instead of a hook between fork and exec, which would need unsafe code.
        let mut wrapped = Command::new("setpriv");
        wrapped.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(key, value),
                None => wrapped.env_remove(key),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            wrapped.current_dir(folder);
        }
        let child = wrapped
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(handle(&stdout)?)
            .stderr(handle(&stderr)?)
            .spawn()
            .with_context(|| format!("cannot start {name}: setpriv is missing (Debian package util-linux)"))?;
        Ok(Self { name: name.to_owned(), child, stdout, stderr, before, ended: None })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Standard output of the program so far.
    pub fn stdout(&self) -> Result<String> {
        contents(&self.stdout, self.before)
    }

    /// Standard error of the program so far.
    pub fn stderr(&self) -> Result<String> {
        contents(&self.stderr, self.before)
    }

    /// The exit status, if the program has ended.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().with_context(|| format!("cannot ask after {}", self.name))?;
        }
        Ok(self.ended)
    }

    /// Sends SIGTERM to the program, unless it has ended.
    pub fn ask_to_end(&mut self) -> Result<()> {
        if self.poll()?.is_none() {
            kill_process(self.pid(), Signal::TERM).with_context(|| format!("cannot signal {}", self.name))?;
        }
        Ok(())
    }

    /// Stops the program as a debugger does and waits until all its threads have stopped, or lets it go on.
    pub fn hang(&self, is_hung: bool) -> Result<()> {
        let signal = if is_hung { Signal::STOP } else { Signal::CONT };
        kill_process(self.pid(), signal).with_context(|| format!("cannot signal {}", self.name))?;
        let start = Instant::now();
        while is_hung && !self.has_stopped()? {
            anyhow::ensure!(start.elapsed() < STOP_LIMIT, "{} does not stop", self.name);
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Whether all threads of the program are stopped.
    fn has_stopped(&self) -> Result<bool> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id()))?;
        // A thread whose status cannot be read has ended.
        let states = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("status")).ok());
        Ok(states.into_iter().all(|status| status.contains("State:\tT")))
    }

    /// Waits until the program has ended. After `limit` it is killed, which is an error.
    pub fn wait(mut self, limit: Duration) -> Result<Ended> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.poll()? {
                return Ok(Ended { status, stdout: self.stdout()?, stderr: self.stderr()? });
            }
            if start.elapsed() >= limit {
                let said = format!("{}{}", self.stdout()?, self.stderr()?);
                bail!("{} was killed: it had not ended after {limit:?}; it said:\n{}", self.name, tail(&said, 20));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until `ready` holds for the running program; false if it has ended before.
    pub fn wait_until(&mut self, limit: Duration, mut ready: impl FnMut(&Self) -> Result<bool>) -> Result<bool> {
        let start = Instant::now();
        loop {
            if ready(self)? {
                return Ok(true);
            }
            if self.poll()?.is_some() {
                // The condition may have become true between the check and the end.
                return ready(self);
            }
            if start.elapsed() >= limit {
                bail!(
                    "{} was not where it should be after {limit:?}; it said:\n{}{}",
                    self.name,
                    self.stdout()?,
                    self.stderr()?
                );
            }
            std::thread::sleep(POLL);
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.poll() {
            // Kills the group, since build tools and shells have children. Its id is that of the child, which cannot be
            // reused before the child is reaped.
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Runs a program to its end and returns its output, with any exit status.
pub fn run(name: &str, command: &Command, limit: Duration) -> Result<Ended> {
    Running::start(name, command)?.wait(limit)
}

/// Runs a program that must succeed, and returns its standard output.
pub fn succeed(name: &str, command: &Command, limit: Duration) -> Result<String> {
    let ended = run(name, command, limit)?;
    if !ended.status.success() {
        bail!("{name} failed ({}):\n{}", ended.status, tail(&ended.said(), 20));
    }
    Ok(ended.stdout)
}

/// The last `lines` lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn contents(file: &File, from: u64) -> Result<String> {
    // Positional reads, since the child shares the file offset.
    let length = file.metadata().context("cannot ask a log for its length")?.len().saturating_sub(from);
    let mut bytes = vec![0; usize::try_from(length).context("a log too long to read")?];
    file.read_exact_at(&mut bytes, from).context("cannot read a program's output")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Time limit of a wait, longer than any step takes on a busy machine.
    const PATIENCE: Duration = Duration::from_mins(1);

    #[test]
    fn output_and_status_come_back() {
        let ended = run("sh", &shell("echo out; echo err >&2; exit 3"), PATIENCE).unwrap();
        assert_eq!((ended.status.code(), ended.stdout.as_str(), ended.stderr.as_str()), (Some(3), "out\n", "err\n"));
        assert_eq!(ended.said(), "out\nerr");
    }

    #[test]
    fn who_shares_a_log_is_told_only_what_it_said_itself() {
        let log = tempfile::tempfile().unwrap();
        for word in ["one", "another"] {
            let ended = Running::start_logged("sh", &shell(&format!("echo {word}")), &log).unwrap().wait(PATIENCE);
            assert_eq!(ended.unwrap().stdout, format!("{word}\n"));
        }
    }

    #[test]
    fn a_program_over_its_limit_is_killed_with_its_children() {
        let mut sleeper = Running::start("sleeper", &shell("sleep 1000 & echo $!; wait")).unwrap();
        assert!(sleeper.wait_until(PATIENCE, |sleeper| Ok(sleeper.stdout()?.ends_with('\n'))).unwrap());
        let grandchild = sleeper.stdout().unwrap().trim().to_owned();
        let error = sleeper.wait(Duration::from_millis(1)).err().unwrap().to_string();
        assert!(error.contains("sleeper was killed") && error.contains(&grandchild), "{error}");
        let start = Instant::now();
        while is_alive(&grandchild) {
            assert!(start.elapsed() < PATIENCE, "a grandchild outlived its group");
            std::thread::sleep(POLL);
        }
    }

    /// Whether a process exists and is not a zombie.
    fn is_alive(id: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    #[test]
    fn tail_keeps_the_end() {
        assert_eq!(tail("a\nb\nc\n", 2), "b\nc");
        assert_eq!(tail("a", 5), "a");
    }
}
