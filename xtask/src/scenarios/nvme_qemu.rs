//! QEMU's NVMe controller behind vfio-user as a device of blkyard, without a guest: a controller that shares no line
//! with ours, and none with the crate that plays the server in other tests.
//!
//! What was seen of QEMU 10.0's server (libvfio-user), and holds for any client:
//! - It ends with its client, so each command here gets a server of its own.
//! - It offers no memory of BAR 0: each doorbell is a message.
//! - After a reset of its machine the device decodes no memory, and register accesses are refused. The reply to a
//!   refused access has the fields of the access behind its header, where the specification allows none.
//! - A reset of the controller is answered after the I/O in flight has ended: QEMU cancels none of it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{CLIENT_LIMIT, Image, KIB, MIB, RunsIn, Scenario, ScenarioContext, control, crash};
use crate::process::{self, Running};
use crate::qmp::Monitor;
use crate::server::{Export, OfferedDevice, ReadyServer};

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "nvme-qemu-controller",
    sentence: "QEMU's NVMe controller over vfio-user is queried, verified over four queues, and loses no write of a client through suspends, resets and kills",
    place: RunsIn::Host,
    ours: true,
    tell: qemu_controller,
}];

const SERIAL: &str = "qemu-vfio-user";
/// Time limit of an I/O and of a message, s.
const TIMEOUT_S: u32 = 4;
/// How long a stalled I/O takes, s: it is aborted after one limit and the controller reset after two, and QEMU answers
/// that reset when the I/O has ended, which must be within a third.
const STALL_S: u32 = TIMEOUT_S * 5 / 2;
/// Time between two disturbances of a load, shortened if the whole load takes less.
const CALM: Duration = Duration::from_millis(250);

/// An image, and where QEMU offers it.
struct QemuController {
    image: Image,
    socket: PathBuf,
    monitor: PathBuf,
}

impl QemuController {
    /// Starts QEMU, which serves one client.
    fn start(&self, ground: &ScenarioContext) -> Result<ReadyServer> {
        let mut command = ground.guest.command_of_controller();
        // Without vCPUs the accelerator does nothing.
        command.args(["-machine", "x-remote,vfio-user=on", "-accel", "qtest"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-object", "throttle-group,id=pace"]);
        let file = json!({ "driver": "file", "filename": self.image.path, "discard": "unmap" });
        let disk = json!({ "driver": "throttle", "node-name": "disk", "throttle-group": "pace", "file": file });
        let server = json!({
            "qom-type": "x-vfio-user-server", "id": "server", "device": "nvme",
            "socket": { "type": "unix", "path": self.socket },
        });
        command.args(["-blockdev", &disk.to_string()]);
        command.args(["-device", &format!("nvme,id=nvme,drive=disk,serial={SERIAL}")]);
        command.args(["-object", &server.to_string()]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", self.monitor.display())]);
        // QEMU does not replace the socket of a killed process.
        let _ = fs::remove_file(&self.socket);
        ReadyServer::start_foreign(&command, std::slice::from_ref(&self.socket), &ground.log)
    }

    /// Runs a client of ours against a QEMU of its own, which must end in order after it.
    fn with_client(&self, ground: &ScenarioContext, arguments: &[&str]) -> Result<String> {
        let server = self.start(ground)?;
        let mut command = ground.program.command()?;
        command.args(arguments);
        let said = process::succeed("blkyard", &command, CLIENT_LIMIT)?;
        server.end().with_context(|| format!("QEMU after {arguments:?}"))?;
        Ok(said)
    }

    /// A command of QEMU's monitor.
    fn order(&self, name: &str, arguments: &Value) -> Result<()> {
        Monitor::connect(&self.monitor)?.command(name, arguments)?;
        Ok(())
    }

    /// The device, with options.
    fn device(&self, options: &str) -> String {
        format!("vfio-user:{}?{options}", self.socket.display())
    }

    /// Has each further read take as long as this, s; zero for no delay.
    fn delay_reads(&self, seconds: u32) -> Result<()> {
        let limits = match seconds {
            0 => json!({ "iops-read": 0, "iops-size": 0 }),
            // A read counts as as many as the size goes into its bytes, at one a second.
            _ => json!({ "iops-read": 1, "iops-size": 4 * KIB / u64::from(seconds) }),
        };
        self.order("qom-set", &json!({ "path": "/objects/pace", "property": "limits", "value": limits }))
    }
}

fn qemu_controller(ground: &ScenarioContext) -> Result<()> {
    let disk = QemuController {
        image: ground.image("disk.img", 64 * MIB)?,
        socket: ground.path("nvme.sock"),
        monitor: ground.path("qmp.sock"),
    };
    queried(ground, &disk)?;
    verified(ground, &disk)?;
    served(ground, &disk)
}

/// `blkyard nvme` on the controller.
fn queried(ground: &ScenarioContext, disk: &QemuController) -> Result<()> {
    let device = disk.device("");
    let device = device.trim_end_matches('?');
    let ask = |what: &str| -> Result<Value> {
        let said = disk.with_client(ground, &["nvme", what, device, "-o", "json"])?;
        serde_json::from_str(&said).with_context(|| format!("{what} says:\n{said}"))
    };
    let controller = ask("id-ctrl")?;
    let is = |key: &str, value: &str| controller[key].as_str().is_some_and(|found| found.trim() == value);
    ensure!(is("mn", "QEMU NVMe Ctrl") && is("sn", SERIAL) && controller["vid"] == 0x1b36, "{controller}");
    let health = ask("smart-log")?;
    ensure!(health["critical_warning"] == 0 && health["avail_spare"].is_u64(), "{health}");
    let bytes: Vec<u8> = (0..4 * KIB).map(|number| (number % 251) as u8).collect();
    disk.image.write(0, &bytes)?;
    let file = ground.path("block").display().to_string();
    // Read, eight blocks from 0.
    let read = ["-O", "2", "-n", "1", "-l", "4096", "-r", "--cdw12=7", "-i", &file];
    disk.with_client(ground, &[&["nvme", "io-passthru", device][..], &read].concat())?;
    ensure!(fs::read(&file).with_context(|| format!("cannot read {file}"))? == bytes, "other bytes were read");
    Ok(())
}

/// `bench` writes checksums and reads them back, and the image has them, too.
fn verified(ground: &ScenarioContext, disk: &QemuController) -> Result<()> {
    let options = ["--verify", "crc32c", "--iodepth", "32"];
    for (of_device, of_bench) in [
        ("queues=4", &["--bs", "4k", "--numjobs", "4", "--queues", "4", "--fsync", "64"][..]),
        ("queues=2&shadow_doorbells=off", &["--bs", "64k", "--numjobs", "2"]),
        ("queues=1&queue_size=16", &["--bs", "4k", "--numjobs", "4", "--queues", "1"]),
    ] {
        let device = disk.device(of_device);
        let load = [&["bench", &device, "--rw", "randwrite"][..], of_bench, &options].concat();
        check_report(&disk.with_client(ground, &load)?).with_context(|| of_device.to_owned())?;
        let mut read = ground.program.command()?;
        read.arg("bench").arg(format!("file:{}", disk.image.path.display())).args(["--rw", "read"]);
        check_report(&process::succeed("blkyard bench", read.args(of_bench).args(options), CLIENT_LIMIT)?)
            .with_context(|| format!("the image after {of_device}"))?;
    }
    Ok(())
}

fn check_report(said: &str) -> Result<()> {
    ensure!(said.contains("no errors") && said.contains(" 0 differ"), "not all was as it should be:\n{said}");
    Ok(())
}

/// A daemon serves the disk, and its client does not notice what happens to the controller.
fn served(ground: &ScenarioContext, disk: &QemuController) -> Result<()> {
    let options = format!("queues=2&timeout_s={TIMEOUT_S}&gone_s=30");
    let export = ground.export(OfferedDevice::Spec(disk.device(&options)), "disk.sock", 2);
    let mut server = Some(disk.start(ground)?);
    let mut daemon = control::serve(ground, std::slice::from_ref(&export))?;

    let times = crash::kills(8)?;
    let verified = ["--rw", "randwrite", "--bs", "4k", "--verify", "crc32c", "--numjobs", "2", "--iodepth", "32"];
    let is_suspended = |word: &str| control::succeed(ground, &["set", "device:0", word]);
    let mut suspend = || {
        is_suspended("suspended=on")?;
        is_suspended("suspended=off").map(drop)
    };
    disturbed(times, || bench(ground, &export, &verified), &mut suspend).context("suspended and resumed")?;

    let mut reset = || disk.order("system_reset", &json!({}));
    // One that meets no new I/O is noticed by the first late command.
    disturbed(times / 2, || bench(ground, &export, &verified), &mut reset).context("reset from outside")?;
    ensure!(daemon.said()?.contains("was reset from outside"), "no reset was noticed");

    late(ground, disk, &export, &mut daemon)?;
    ensure!(!daemon.said()?.contains("until it is connected again"), "the connection was lost without a kill");

    let mut kill = || {
        server.take().into_iter().for_each(ReadyServer::kill);
        server = Some(disk.start(ground)?);
        Ok(())
    };
    disturbed(times, || bench(ground, &export, &verified), &mut kill).context("killed")?;
    let said = daemon.said()?;
    ensure!(said.contains("connected again"), "no kill was noticed");
    ensure!(!said.contains("ERROR"), "the daemon reports errors:\n{}", process::tail(&said, 20));

    // A client of others, and its bytes in the file. The memory of its rings is no whole number of pages, which the log
    // says, too; no I/O is in it.
    let pattern = ["-w", "--pattern=0x6b", "-c", "16384", "-d", "64", "-s", "4k"];
    disturbed(times, || ground.start_qemu_bench(&export.socket, &pattern), &mut kill).context("killed")?;
    disk.image.check_pattern(0, 64 * MIB - 4 * KIB, 0x6b)?;
    // The last kill may have met no I/O. Afterwards the daemon is connected.
    ground.qemu_io(&export.socket, &["read -P 0x6b 1M 1M".to_owned()])?;

    let said = daemon.stop()?.said();
    let has_failed = ["I/O error", "I/O fails until"].iter().any(|words| said.contains(words));
    ensure!(!has_failed, "I/O failed:\n{}", process::tail(&said, 20));
    server.map_or(Ok(()), |server| server.end().map(drop)).context("QEMU after the daemon")
}

fn bench(ground: &ScenarioContext, export: &Export, options: &[&str]) -> Result<Running> {
    Running::start("blkyard bench", &bench_command(ground, export, options)?)
}

fn bench_command(ground: &ScenarioContext, export: &Export, options: &[&str]) -> Result<Command> {
    let mut command = ground.program.command()?;
    command.arg("bench").arg(format!("vhost-user:{}", export.socket.display())).args(options);
    Ok(command)
}

/// Starts loads, one after the other, until they were disturbed so many times; each must succeed, and verify if it says
/// whether it did.
fn disturbed(times: usize, start: impl Fn() -> Result<Running>, disturb: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let (mut count, mut calm) = (0, CALM);
    while count < times {
        let before = count;
        let mut load = start()?;
        while count < times {
            let until = Instant::now() + calm;
            if !load.wait_until(CLIENT_LIMIT, |_| Ok(Instant::now() >= until))? {
                break;
            }
            disturb()?;
            count += 1;
        }
        let ended = load.wait(CLIENT_LIMIT)?;
        ensure!(ended.status.success(), "a load failed after {count} times:\n{}", process::tail(&ended.said(), 20));
        if ended.stdout.contains("verify") {
            check_report(&ended.stdout)?;
        }
        if count == before {
            calm /= 2;
        }
    }
    Ok(())
}

/// A read that takes too long has the controller reset with it in flight.
fn late(ground: &ScenarioContext, disk: &QemuController, export: &Export, daemon: &mut ReadyServer) -> Result<()> {
    disk.delay_reads(STALL_S)?;
    // The first read is not delayed.
    let options = ["--rw", "randread", "--bs", "4k", "--verify", "crc32c", "--size", "8k"];
    let load = bench(ground, export, &options)?;
    let is_reset = |said: &str| said.contains("the controller is reset");
    daemon.wait_until_said(CLIENT_LIMIT, is_reset).context("a late read")?;
    disk.delay_reads(0)?;
    let ended = load.wait(CLIENT_LIMIT)?;
    ensure!(ended.status.success(), "a late read failed:\n{}", process::tail(&ended.said(), 20));
    check_report(&ended.stdout)
}
