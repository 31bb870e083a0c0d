//! Start and stop of the server under test.
//!
//! It is `blkyard serve` or qemu-storage-daemon; a scenario that fails with both is itself wrong.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{Ended, Running, run, tail};

/// Time limit for a server to become ready, generous for machines that compile meanwhile.
const READY_LIMIT: Duration = Duration::from_mins(1);

/// Time limit for a server to complete requests in flight: milliseconds, except on a busy machine. A server that waits
/// for its client exceeds it.
pub const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Line that blkyard prints when it is ready. Its sockets listen earlier, when their permissions may not be set yet and
/// start-up lines are still missing.
const READY: &str = "ready";

/// The server program.
pub enum Program {
    Blkyard(PathBuf),
    /// qemu-storage-daemon.
    Foreign(PathBuf),
}

/// Device to serve.
#[derive(Clone)]
pub enum OfferedDevice {
    File(PathBuf),
    ReadOnly(PathBuf),
    /// Memory disk of this size, MiB.
    Ram(u32),
    /// Null device of this size, MiB.
    Null(u32),
    /// Specification in blkyard's syntax.
    Spec(String),
}

impl OfferedDevice {
    /// The device in blkyard's syntax.
    pub fn spec(&self) -> String {
        match self {
            Self::File(path) => format!("file:{}", path.display()),
            Self::ReadOnly(path) => format!("file:{}?readonly=on", path.display()),
            Self::Ram(mib) => format!("ram:{mib}M"),
            Self::Null(mib) => format!("null:{mib}M"),
            Self::Spec(spec) => spec.clone(),
        }
    }
}

/// One disk at one socket.
#[derive(Clone)]
pub struct Export {
    pub device: OfferedDevice,
    pub socket: PathBuf,
    pub queues: u16,
    pub serial: Option<&'static str>,
}

impl Export {
    fn spec(&self) -> String {
        let serial = self.serial.map(|serial| format!("&serial={serial}")).unwrap_or_default();
        format!("vhost-user-blk:{}?queues={}{serial}", self.socket.display(), self.queues)
    }
}

impl Program {
    /// Whether this is blkyard, for checks that only blkyard must pass.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Blkyard(_))
    }

    /// blkyard with these arguments.
    pub fn command(&self) -> Result<Command> {
        match self {
            Self::Blkyard(path) => Ok(Command::new(path)),
            Self::Foreign(_) => bail!("this scenario is for blkyard only"),
        }
    }

    /// The command that serves these exports.
    pub fn serve(&self, exports: &[Export]) -> Result<Command> {
        match self {
            Self::Blkyard(path) => {
                let mut command = Command::new(path);
                command.arg("serve");
                let mut before = None;
                for export in exports {
                    // Each device once; exports of the same device share it.
                    let device = export.device.spec();
                    if before.as_ref() != Some(&device) {
                        command.args(["--device", &device]);
                    }
                    command.args(["--export", &export.spec()]);
                    before = Some(device);
                }
                Ok(command)
            }
            Self::Foreign(path) => foreign(path, exports),
        }
    }

    /// Error output of blkyard refusing to serve. Serving instead is an error.
    pub fn refusal(&self, arguments: &[&str]) -> Result<String> {
        let ended = run("blkyard serve", self.command()?.arg("serve").args(arguments), READY_LIMIT)
            .context("serve should have refused this at once")?;
        ensure!(!ended.status.success(), "serve should have refused this, and ended with success: {}", ended.said());
        ensure!(ended.status.code().is_some(), "serve should have refused this, and was killed: {}", ended.status);
        ensure!(!ended.said().contains("panicked"), "serve panicked:\n{}", ended.said());
        Ok(ended.stderr)
    }
}

fn foreign(path: &Path, exports: &[Export]) -> Result<Command> {
    let mut command = Command::new(path);
    for (index, export) in exports.iter().enumerate() {
        let (node, writable) = match &export.device {
            OfferedDevice::File(image) => (file_node(image), "on"),
            OfferedDevice::ReadOnly(image) => (format!("{},read-only=on", file_node(image)), "off"),
            OfferedDevice::Null(mib) => (format!("null-co,size={},read-zeroes=on", u64::from(*mib) << 20), "on"),
            OfferedDevice::Spec(spec) => bail!("only blkyard understands {spec}"),
            OfferedDevice::Ram(mib) => {
                let image = export.socket.with_extension("ram");
                let file = File::create(&image).with_context(|| format!("cannot make {}", image.display()))?;
                file.set_len(u64::from(*mib) << 20).with_context(|| format!("cannot size {}", image.display()))?;
                (file_node(&image), "on")
            }
        };
        command.args(["--blockdev", &format!("driver={node},node-name=disk{index}")]).arg("--export").arg(format!(
            "vhost-user-blk,id=export{index},node-name=disk{index},writable={writable},num-queues={},\
             addr.type=unix,addr.path={}",
            export.queues,
            export.socket.display()
        ));
    }
    Ok(command)
}

fn file_node(image: &Path) -> String {
    format!("file,filename={},discard=unmap", image.display())
}

/// A ready server. Dropping it kills it.
pub struct ReadyServer {
    running: Running,
}

impl ReadyServer {
    /// Starts `program` with these exports; its output goes to `log`.
    pub fn start(program: &Program, exports: &[Export], log: &File) -> Result<Self> {
        let sockets: Vec<_> = exports.iter().map(|export| export.socket.clone()).collect();
        Self::start_and_wait(&program.serve(exports)?, &sockets, log, program.is_ours())
    }

    /// Starts blkyard with this command, and waits until it is ready.
    pub fn start_command(command: &Command, sockets: &[PathBuf], log: &File) -> Result<Self> {
        Self::start_and_wait(command, sockets, log, true)
    }

    /// Starts another server with this command, and waits until it listens.
    pub fn start_foreign(command: &Command, sockets: &[PathBuf], log: &File) -> Result<Self> {
        Self::start_and_wait(command, sockets, log, false)
    }

    fn start_and_wait(command: &Command, sockets: &[PathBuf], log: &File, says_ready: bool) -> Result<Self> {
        let mut running = Running::start_logged("the server", command, log)?;
        let ready = |running: &Running| {
            let said = !says_ready || running.stdout()?.lines().any(|line| line == READY);
            Ok(said && sockets.iter().all(|socket| listens(socket)))
        };
        if running.wait_until(READY_LIMIT, ready)? && running.poll()?.is_none() {
            return Ok(Self { running });
        }
        let said = running.stdout()?;
        let ended = running.wait(Duration::ZERO)?;
        bail!("the server ended before it was ready ({}); it said:\n{}", ended.status, tail(&said, 20));
    }

    /// The server's process.
    pub fn id(&self) -> u32 {
        self.running.id()
    }

    /// Asks the server to end; it must do so within the time limit and with success.
    pub fn stop(mut self) -> Result<Ended> {
        self.running.ask_to_end()?;
        self.end().context("after SIGTERM")
    }

    /// Waits for the server to end; it must do so within the time limit and with success.
    pub fn end(self) -> Result<Ended> {
        let ended = self.running.wait(STOP_LIMIT).context("the server does not end")?;
        ensure!(ended.status.success(), "the server ended with {}", ended.status);
        Ok(ended)
    }

    /// Kills the server.
    pub fn kill(self) {
        drop(self);
    }

    /// Waits until the server's output satisfies a condition.
    pub fn wait_until_said(&mut self, limit: Duration, enough: impl Fn(&str) -> bool) -> Result<()> {
        let told = self.running.wait_until(limit, |running| Ok(enough(&running.stdout()?)))?;
        ensure!(told, "the server ended before it had said enough");
        Ok(())
    }

    /// Output of the server so far.
    pub fn said(&self) -> Result<String> {
        self.running.stdout()
    }

    /// Checks that the server is still running.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.running.poll()? {
            None => Ok(()),
            Some(status) => bail!("the server should still be there, and ended with {status}"),
        }
    }

    /// CPU time of all threads of the server during this interval.
    pub fn processor_time_within(&self, time: Duration) -> Result<Duration> {
        let before = self.processor_times()?;
        std::thread::sleep(time);
        let used = |(thread, after): (OsString, Duration)| {
            after.saturating_sub(before.get(&thread).copied().unwrap_or_default())
        };
        Ok(self.processor_times()?.into_iter().map(used).sum())
    }

    /// CPU time of each thread so far.
    fn processor_times(&self) -> Result<BTreeMap<OsString, Duration>> {
        let folder = format!("/proc/{}/task", self.running.id());
        let mut times = BTreeMap::new();
        for thread in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))? {
            let thread = thread?;
            // The first field is CPU time in nanoseconds, finer than the ticks of `stat`.
            let path = thread.path().join("schedstat");
            // The kernel's io_uring threads come and go, so a listed thread may be gone.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let word = text.split(' ').next().unwrap_or_default();
            let nanos = word.parse().with_context(|| format!("cannot understand {}", path.display()))?;
            times.insert(thread.file_name(), Duration::from_nanos(nanos));
        }
        ensure!(!times.is_empty(), "no thread's time can be read in {folder}");
        Ok(times)
    }
}

/// Whether a socket exists and has a listener.
fn listens(socket: &Path) -> bool {
    // `__SO_ACCEPTCON` in the flags.
    socket.exists() && table_entries(socket).any(|entry| entry.flags == "00010000")
}

/// Whether a client is connected to the server at a socket.
pub fn has_client(socket: &Path) -> bool {
    // `SS_CONNECTED`: the server's end of a connection has the path of its listening socket.
    table_entries(socket).any(|entry| entry.state == "03")
}

/// Entries of the kernel's table for a socket and its connections. A test connection would count as a client.
struct TableEntry {
    flags: String,
    state: String,
}

fn table_entries(socket: &Path) -> impl Iterator<Item = TableEntry> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // A server with a relative path is in the table under that path.
    let names = [Some(socket.as_os_str()), socket.file_name()];
    let entry = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
        // Fields: number, references, protocol, flags, type, state, inode, path.
        [_, _, _, flags, _, state, _, path] if names.contains(&Some(path.as_ref())) => {
            Some(TableEntry { flags: flags.to_owned(), state: state.to_owned() })
        }
        _ => None,
    };
    table.lines().filter_map(entry).collect::<Vec<_>>().into_iter()
}
