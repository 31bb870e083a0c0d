//! The QEMU command printed by `serve`, pasted unchanged, like by a new user.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::crash::{end_load, go_on, load, wait_for_writes};
use super::{Image, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process::Running;
use crate::qmp::Monitor;
use crate::server::ReadyServer;
use crate::vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "pasted-line",
        sentence: "the QEMU command that serve prints for several exports attaches them all, whatever their folder is called",
        place: RunsIn::Host,
        ours: true,
        tell: all_exports,
    },
    Scenario {
        name: "pasted-line-many",
        sentence: "the QEMU command that serve prints for 40 exports attaches them all",
        place: RunsIn::Host,
        ours: true,
        tell: many_exports,
    },
    Scenario {
        name: "first-mistakes",
        sentence: "a QEMU without shared memory, one with too many queues and one at a socket in use are answered in the log with the cure",
        place: RunsIn::Host,
        ours: true,
        tell: mistakes,
    },
    Scenario {
        name: "pasted-line-guest",
        sentence: "a guest started by the line that serve prints uses its disks, and goes on when the daemon is killed or restarted",
        place: RunsIn::Guest,
        ours: true,
        tell: survives_restarts,
    },
];

/// Characters that are special to a shell and to QEMU's option parser.
const FOLDER: &str = "it's a folder, with $HOME";

/// Time limit for QEMU and a daemon on a busy machine.
const LIMIT: Duration = Duration::from_mins(5);

/// The line of serve's output that starts QEMU.
fn printed_line(said: &str) -> Result<&str> {
    let mut lines = said.lines().map(str::trim_start).filter(|line| line.starts_with("qemu-system-x86_64 "));
    let line = lines.next().with_context(|| format!("serve prints no QEMU command:\n{said}"))?;
    ensure!(lines.next().is_none(), "serve prints more than one QEMU command:\n{said}");
    Ok(line)
}

/// The daemon, with two images in a folder with a difficult name, on sockets with relative paths.
struct Awkward {
    command: Command,
    sockets: [std::path::PathBuf; 2],
    images: [Image; 2],
}

impl Awkward {
    fn new(ground: &ScenarioContext) -> Result<Awkward> {
        let folder = ground.path(FOLDER);
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let image = |leaf: &str| ground.image(&format!("{FOLDER}/{leaf}"), 64 * MIB);
        let images = [image("a.img")?, image("b.img")?];
        let mut command = ground.program.command()?;
        command.arg("serve").current_dir(&folder).args(["--control", "none"]);
        command.args(["--device", "file:a.img", "--export", "vhost-user-blk:a.sock?queues=2"]);
        command.args(["--device", "file:b.img", "--export", "vhost-user-blk:b.sock?queues=3"]);
        Ok(Awkward { command, sockets: ["a.sock", "b.sock"].map(|leaf| folder.join(leaf)), images })
    }

    fn serve(&self, ground: &ScenarioContext) -> Result<ReadyServer> {
        ReadyServer::start_command(&self.command, &self.sockets, &ground.log)
    }
}

fn all_exports(ground: &ScenarioContext) -> Result<()> {
    let served = Awkward::new(ground)?;
    let server = served.serve(ground)?;
    let said = server.said()?;
    let line = printed_line(&said)?;
    for (word, times) in [("memory-backend-memfd", 1), ("share=on", 1), ("reconnect-ms=", 2), ("...", 0)] {
        let found = line.matches(word).count();
        ensure!(found == times, "'{word}' is there {found} times and not {times}:\n{line}");
    }
    let queues = attached_queues(ground, line)?;
    ensure!(queues == [2, 3], "QEMU has disks with so many queues: {queues:?}");
    server.stop()?;
    Ok(())
}

fn many_exports(ground: &ScenarioContext) -> Result<()> {
    const EXPORTS: usize = 40;
    let mut command = ground.program.command()?;
    command.args(["serve", "--control", "none"]);
    let sockets: Vec<_> = (0..EXPORTS).map(|number| ground.path(&format!("{number}.sock"))).collect();
    for socket in &sockets {
        command.args(["--device", "ram:1M", "--export", &format!("vhost-user-blk:{}?queues=1", socket.display())]);
    }
    let server = ReadyServer::start_command(&command, &sockets, &ground.log)?;
    let queues = attached_queues(ground, printed_line(&server.said()?)?)?;
    ensure!(queues == [1; EXPORTS], "QEMU has disks with so many queues: {queues:?}");
    server.stop()?;
    Ok(())
}

/// Queues of each disk in a QEMU started by this line.
fn attached_queues(ground: &ScenarioContext, line: &str) -> Result<Vec<serde_json::Value>> {
    let monitor = ground.path("monitor");
    let mut qemu =
        paste(ground, &format!("{line} -S -display none -qmp unix:{},server=on,wait=off", monitor.display()))?;
    // QEMU listens before its devices exist, and answers afterwards.
    let listens = qemu.wait_until(LIMIT, |_| Ok(monitor.exists()))?;
    ensure!(listens, "QEMU ended: {}", qemu.stderr()?);
    let mut monitor = Monitor::connect(&monitor)?;
    let children = monitor.command("qom-list", &json!({ "path": "/machine/peripheral-anon" }))?;
    let mut queues = Vec::new();
    for child in children.as_array().into_iter().flatten() {
        let Some(name) = child["name"].as_str().filter(|_| child["type"] == "child<vhost-user-blk-pci>") else {
            continue;
        };
        let device = format!("/machine/peripheral-anon/{name}");
        let realized = monitor.command("qom-get", &json!({ "path": device, "property": "realized" }))?;
        ensure!(realized == true, "{device} is not realized");
        queues.push(monitor.command("qom-get", &json!({ "path": device, "property": "num-queues" }))?);
    }
    drop(qemu);
    Ok(queues)
}

/// Runs a line in a shell, with the test guest's QEMU.
fn paste(ground: &ScenarioContext, line: &str) -> Result<Running> {
    let mut shell = Command::new("sh");
    // `exec` replaces the shell, so killing it ends QEMU, too.
    shell.args(["-c", &format!("exec {line}")]).env("PATH", ground.guest.search_path());
    Running::start("QEMU", &shell)
}

fn mistakes(ground: &ScenarioContext) -> Result<()> {
    let (_, _, mut server) = ground.serve_image(MIB, 2)?;
    let line = printed_line(&server.said()?)?.to_owned();
    // No boot is needed: the firmware reads the disk.
    let right = format!("{line} -display none -machine accel=tcg");
    let unshared =
        right.replace(",memory-backend=mem", "").replace("-object memory-backend-memfd,id=mem,size=1G,share=on", "");
    let greedy = right.replace("num-queues=2", "num-queues=3");
    ensure!(unshared != right && greedy != right, "the line is not what it was: {line}");
    let mut answered = |words: &[&str]| {
        let says = |said: &str| said.lines().any(|line| words.iter().all(|word| line.contains(word)));
        server.wait_until_said(LIMIT, says).with_context(|| format!("no line with {words:?}"))
    };
    let qemu = paste(ground, &unshared)?;
    answered(&["WARN", "not shared", "share=on", "memory-backend=mem"])?;
    drop(qemu);
    let qemu = paste(ground, &greedy)?;
    answered(&["WARN", "2 queues are served", "num-queues=2", "queues=N"])?;
    drop(qemu);
    let first = paste(ground, &right)?;
    answered(&["a front-end connected"])?;
    let second = paste(ground, &right)?;
    answered(&["WARN", "another front-end waits", "process "])?;
    drop((second, first));
    server.stop()?;
    Ok(())
}

fn survives_restarts(ground: &ScenarioContext) -> Result<()> {
    const MARK: &str = "second disk";
    let served = Awkward::new(ground)?;
    let [first, second] = &served.images;
    let mut server = served.serve(ground)?;
    let line = printed_line(&server.said()?)?.to_owned();
    let task = format!("{}\nprintf '{MARK}' | dd of=/dev/vdb conv=sync,notrunc oflag=direct 2>/dev/null", load());
    // KVM is unreliable here: if it is present but broken, QEMU does not fall back.
    let mut machine = vm::start_command_line(ground.guest, &format!("{line} -machine accel=tcg"), &task)?;
    wait_for_writes(&mut machine, first)?;
    for is_killed in [true, false] {
        go_on(&mut machine)?;
        if is_killed {
            server.kill();
        } else {
            server.stop()?;
        }
        server = served.serve(ground)?;
        machine.wait_until(|| Ok(came_back(&server.said()?, Path::new("a.sock"))))?;
    }
    end_load(machine, first)?;
    let found = second.read(0, MARK.len() as u64)?;
    ensure!(found == MARK.as_bytes(), "the second disk begins with {found:02x?}");
    server.stop()?;
    Ok(())
}

/// Whether a front-end has connected to an export since the server started.
fn came_back(said: &str, socket: &Path) -> bool {
    said.lines().any(|line| line.contains("a front-end connected") && line.contains(&socket.display().to_string()))
}
