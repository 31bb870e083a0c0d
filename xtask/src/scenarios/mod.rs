//! Scenarios: the running daemon with foreign clients.
//!
//! A scenario has a name, a sentence that completes "This test shows that …", and a function. Each gets its own
//! context: an empty folder, the server's program, the guest's programs. Scenarios share no state and do not depend on
//! their order.

mod attached;
mod blkio;
mod control;
mod crash;
mod daemon;
mod first_minute;
mod foreign;
mod guest;
mod numa;
mod nvme;
mod nvme_auth;
mod nvme_cli;
mod nvme_ng;
mod nvme_qemu;
mod nvme_tcp;
mod nvme_tls;
mod old_kernel;
mod pci;
mod plug;
mod queues;
mod rates;
mod refusals;
mod sharing;
mod studies;
mod takeover;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::guest::Guest;
use crate::process::{self, Ended, Running};
use crate::server::{Export, OfferedDevice, Program, ReadyServer};

/// Time limit of a client. The longest takes 3 s on an idle machine, and much longer on a busy one.
const CLIENT_LIMIT: Duration = Duration::from_mins(5);

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Environment of a scenario, which determines its requirements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RunsIn {
    /// Clients on this machine.
    Host,
    /// A booted guest.
    Guest,
}

pub struct Scenario {
    pub name: &'static str,
    /// Completes "This test shows that …".
    pub sentence: &'static str,
    pub place: RunsIn,
    /// Whether it applies only to blkyard, not to any vhost-user-blk server.
    pub ours: bool,
    pub tell: fn(&ScenarioContext) -> Result<()>,
}

/// All scenarios, in the order they run.
pub fn all() -> impl Iterator<Item = &'static Scenario> {
    let served = foreign::SCENARIOS.iter().chain(blkio::SCENARIOS).chain(daemon::SCENARIOS).chain(control::SCENARIOS);
    let host = served.chain(rates::SCENARIOS).chain(sharing::SCENARIOS);
    let host = host.chain(refusals::SCENARIOS).chain(attached::SCENARIOS);
    host.chain(first_minute::SCENARIOS)
        .chain(studies::SCENARIOS)
        .chain(guest::SCENARIOS)
        .chain(queues::SCENARIOS)
        .chain(plug::SCENARIOS)
        .chain(numa::SCENARIOS)
        .chain(pci::SCENARIOS)
        .chain(old_kernel::SCENARIOS)
        .chain(crash::SCENARIOS)
        .chain(takeover::SCENARIOS)
        .chain(nvme::SCENARIOS)
        .chain(nvme_cli::SCENARIOS)
        .chain(nvme_ng::SCENARIOS)
        .chain(nvme_qemu::SCENARIOS)
        .chain(nvme_tcp::SCENARIOS)
        .chain(nvme_auth::SCENARIOS)
        .chain(nvme_tls::SCENARIOS)
}

/// A requirement of a scenario that this machine lacks; the scenario is skipped.
#[derive(Debug)]
pub struct Missing(pub String);

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

/// Context of a scenario.
pub struct ScenarioContext<'a> {
    pub program: &'a Program,
    pub guest: &'a Guest,
    /// Output of the servers while the scenario runs.
    pub log: File,
    /// Measured values for the report.
    measured: Mutex<Option<String>>,
    folder: TempDir,
}

impl<'a> ScenarioContext<'a> {
    pub fn new(program: &'a Program, guest: &'a Guest, log: File) -> Result<Self> {
        // A short path, since a socket path has at most 108 bytes.
        let folder = tempfile::Builder::new().prefix("blkyard-").tempdir().context("cannot make a temporary folder")?;
        Ok(Self { program, guest, log, measured: Mutex::default(), folder })
    }

    /// Adds measured values to the report.
    pub fn measured(&self, what: String) {
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
    }

    pub fn take_measured(&self) -> Option<String> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub fn path(&self, leaf: &str) -> PathBuf {
        self.folder.path().join(leaf)
    }

    /// A sparse image of this size.
    pub fn image(&self, leaf: &str, bytes: u64) -> Result<Image> {
        let path = self.path(leaf);
        let file = File::create_new(&path).with_context(|| format!("cannot make {}", path.display()))?;
        file.set_len(bytes).with_context(|| format!("cannot size {}", path.display()))?;
        Ok(Image { path })
    }

    /// An export of `device` at the socket `leaf`.
    pub fn export(&self, device: OfferedDevice, leaf: &str, queues: u16) -> Export {
        Export { device, socket: self.path(leaf), queues, serial: None }
    }

    pub fn serve(&self, exports: &[Export]) -> Result<ReadyServer> {
        ReadyServer::start(self.program, exports, &self.log)
    }

    /// The usual set-up: an image of this size, served at a socket.
    pub fn serve_image(&self, bytes: u64, queues: u16) -> Result<(Image, Export, ReadyServer)> {
        let image = self.image("disk.img", bytes)?;
        let export = self.export(OfferedDevice::File(image.path.clone()), "disk.sock", queues);
        let server = self.serve(std::slice::from_ref(&export))?;
        Ok((image, export, server))
    }

    /// Runs qemu-io at a socket with a list of commands, which must all succeed.
    pub fn qemu_io(&self, socket: &Path, commands: &[String]) -> Result<String> {
        let ended = self.try_qemu_io(socket, commands, &[])?;
        let said = ended.said();
        // Some failures do not change the exit status.
        let bad = ["fail", "error", "Error"].iter().any(|word| said.contains(word));
        ensure!(ended.status.success() && !bad, "qemu-io failed ({}):\n{}", ended.status, process::tail(&said, 20));
        Ok(said)
    }

    /// Runs qemu-io with further options; failures are returned in the result.
    pub fn try_qemu_io(&self, socket: &Path, commands: &[String], options: &[&str]) -> Result<Ended> {
        let mut command = self.guest.command("qemu-io");
        command.args(options).arg("--image-opts").arg(client_options(socket));
        for line in commands {
            command.args(["-c", line]);
        }
        process::run("qemu-io", &command, CLIENT_LIMIT)
    }

    /// Runs `qemu-img bench` at a socket to its end.
    pub fn qemu_bench(&self, socket: &Path, options: &[&str]) -> Result<()> {
        process::succeed("qemu-img bench", &self.bench_command(socket, options), CLIENT_LIMIT)?;
        Ok(())
    }

    /// Starts `qemu-img bench` at a socket.
    pub fn start_qemu_bench(&self, socket: &Path, options: &[&str]) -> Result<Running> {
        Running::start("qemu-img bench", &self.bench_command(socket, options))
    }

    fn bench_command(&self, socket: &Path, options: &[&str]) -> Command {
        let mut command = self.guest.command("qemu-img");
        command.args(["bench", "-t", "none"]).args(options).arg("--image-opts").arg(client_options(socket));
        command
    }

    /// qemu-io, connected to a socket and idle after it has written a block of the image.
    pub fn start_silent_client(&self, socket: &Path, image: &Image) -> Result<Running> {
        const BYTE: u8 = 0x5d;
        let mut command = self.guest.command("qemu-io");
        let (write, sleep) = (format!("write -P {BYTE} 0 4k"), format!("sleep {}", CLIENT_LIMIT.as_millis()));
        command.arg("--image-opts").arg(client_options(socket)).args(["-c", &write, "-c", &sleep]);
        let mut running = Running::start("qemu-io", &command)?;
        // Its output is buffered until it ends, so the image is checked instead.
        let written = running.wait_until(CLIENT_LIMIT, |_| image.holds(0, BYTE))?;
        ensure!(written, "the client ended too early: {}{}", running.stdout()?, running.stderr()?);
        Ok(running)
    }
}

/// Checks that an idle server uses less than 1 % of a CPU, measured as CPU time, which does not depend on the load of
/// the machine.
fn check_idle(server: &ReadyServer) -> Result<()> {
    const WATCHED: Duration = Duration::from_secs(3);
    // A hypervisor sometimes charges stolen time to the running thread; a server that never sleeps exceeds the limit in
    // every window.
    let mut used = Vec::new();
    while used.len() < 5 {
        used.push(server.processor_time_within(WATCHED)?);
        if used.last().is_some_and(|used| *used < WATCHED / 100) {
            return Ok(());
        }
    }
    bail!("the idle daemon used {used:?} of processor time, each in {WATCHED:?}")
}

/// QEMU's name for a disk at a vhost-user-blk socket through libblkio.
fn client_options(socket: &Path) -> String {
    format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display())
}

/// A disk image on the host.
pub struct Image {
    pub path: PathBuf,
}

impl Image {
    /// The bytes of a range, read through the file system.
    pub fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let file = File::open(&self.path).with_context(|| format!("cannot open {}", self.path.display()))?;
        let mut bytes = vec![0; usize::try_from(length)?];
        file.read_exact_at(&mut bytes, offset).with_context(|| format!("cannot read {}", self.path.display()))?;
        Ok(bytes)
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let file = File::options().write(true).open(&self.path);
        file.and_then(|file| file.write_all_at(bytes, offset))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Whether the byte at this offset has this value now.
    pub fn holds(&self, offset: u64, byte: u8) -> Result<bool> {
        Ok(self.read(offset, 1)? == [byte])
    }

    /// Checks that a range is filled with one byte.
    pub fn check_pattern(&self, offset: u64, length: u64, byte: u8) -> Result<()> {
        match self.read(offset, length)?.iter().position(|&found| found != byte) {
            None => Ok(()),
            Some(at) => bail!(
                "{} should hold {byte:#04x} from {offset} on for {length} bytes, and does not at {}",
                self.path.display(),
                offset + at as u64
            ),
        }
    }

    /// Allocated bytes of the image, without holes.
    pub fn allocated(&self) -> Result<u64> {
        let metadata = self.path.metadata().with_context(|| format!("cannot look at {}", self.path.display()))?;
        Ok(metadata.blocks() * 512)
    }
}
