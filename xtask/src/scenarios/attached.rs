//! blkyard as the client: disks of other servers, used by `bench` and by `serve`.
//!
//! Data is written with checksums and read back; if the disk is a file, its content is checked on the host as well.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{CLIENT_LIMIT, KIB, MIB, RunsIn, Scenario, ScenarioContext, crash};
use crate::process::{self, Running};
use crate::server::{Export, OfferedDevice, Program, ReadyServer};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "attached-verify",
        sentence: "bench writes a disk that a daemon serves, by one queue or two, shared or not, polled or not, and reads it back",
        place: RunsIn::Host,
        ours: true,
        tell: verify,
    },
    Scenario {
        name: "attached-foreign",
        sentence: "bench does the same with a disk that qemu-storage-daemon serves, and the image holds what it should",
        place: RunsIn::Host,
        ours: true,
        tell: foreign,
    },
    Scenario {
        name: "attached-proxy",
        sentence: "a daemon serves on what another one serves, straight from its client's memory",
        place: RunsIn::Host,
        ours: true,
        tell: proxy,
    },
    Scenario {
        name: "attached-killed",
        sentence: "a back-end that is killed and started again in the middle of writes, again and again, loses none of them",
        place: RunsIn::Host,
        ours: true,
        tell: killed,
    },
    Scenario {
        name: "attached-foreign-killed",
        sentence: "the same with qemu-storage-daemon, which keeps no account of what it had in flight",
        place: RunsIn::Host,
        ours: true,
        tell: foreign_killed,
    },
];

/// Ring formats, as options of a device.
const SPLIT: &str = "packed=off";
const PACKED: &str = "packed=on";
/// Ways to distribute jobs over two queues.
const WAYS: [&[&str]; 4] = [
    &["--numjobs", "1", "--iodepth", "1"],
    &["--numjobs", "2", "--iodepth", "32", "--fsync", "64"],
    &["--numjobs", "4", "--iodepth", "8", "--queues", "2"],
    &["--numjobs", "2", "--iodepth", "8", "--queues", "1", "--poll_queues", "1", "--hipri"],
];

/// `bench` on the disk at the export's socket: random writes of blocks with checksums, read back at the end.
fn bench(ground: &ScenarioContext, export: &Export, rings: &str, options: &[&str]) -> Result<Command> {
    let mut command = ground.program.command()?;
    command.arg("bench").arg(format!("vhost-user:{}?{rings}", export.socket.display()));
    command.args(["--rw", "randwrite", "--bs", "4k", "--verify", "crc32c"]).args(options);
    Ok(command)
}

fn run_bench(ground: &ScenarioContext, export: &Export, rings: &str, options: &[&str]) -> Result<()> {
    let said = process::succeed("blkyard bench", &bench(ground, export, rings, options)?, CLIENT_LIMIT)?;
    check_report(&said).with_context(|| format!("bench {}", options.join(" ")))
}

fn check_report(said: &str) -> Result<()> {
    ensure!(said.contains("no errors") && said.contains(" 0 differ"), "not all was as it should be:\n{said}");
    Ok(())
}

fn verify(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(16 * MIB, 2)?;
    for rings in [SPLIT, PACKED] {
        for way in WAYS {
            run_bench(ground, &export, rings, way)?;
        }
    }
    ensure!(image.allocated()? >= 16 * MIB, "the image does not hold what was written");
    server.stop()?;
    Ok(())
}

/// A disk served by qemu-storage-daemon with this number of queues.
fn foreign_server(ground: &ScenarioContext, export: &Export) -> Result<ReadyServer> {
    let program = Program::Foreign(ground.guest.program("qemu-storage-daemon"));
    ReadyServer::start(&program, std::slice::from_ref(export), &ground.log)
}

fn foreign(ground: &ScenarioContext) -> Result<()> {
    for queues in [1, 2] {
        let image = ground.image(&format!("disk{queues}.img"), 16 * MIB)?;
        let export = ground.export(OfferedDevice::File(image.path.clone()), &format!("disk{queues}.sock"), queues);
        let server = foreign_server(ground, &export)?;
        for way in WAYS.iter().filter(|way| queues == 2 || !way.contains(&"2")) {
            run_bench(ground, &export, SPLIT, way)?;
        }
        ensure!(image.allocated()? >= 16 * MIB, "the image does not hold what was written");
        server.stop()?;
    }
    Ok(())
}

fn proxy(ground: &ScenarioContext) -> Result<()> {
    let (image, origin, server) = ground.serve_image(16 * MIB, 2)?;
    let spec = format!("vhost-user:{}?queues=2", origin.socket.display());
    let export = ground.export(OfferedDevice::Spec(spec), "proxy.sock", 2);
    let proxy = ground.serve(std::slice::from_ref(&export))?;
    let commands = [
        "write -P 0x5a 0 64k",
        "write -P 0x77 15M 1M",
        "write -z 32k 16k",
        "discard 1M 1M",
        "flush",
        "read -P 0x5a 0 32k",
        "read -P 0 32k 16k",
        "read -P 0x77 15M 1M",
    ];
    for _ in 0..3 {
        ground.qemu_io(&export.socket, &commands.map(String::from))?;
    }
    ground.qemu_bench(&export.socket, &["-w", "--pattern=0x66", "-c", "2048", "-d", "64", "-s", "4k"])?;
    image.check_pattern(0, 8 * MIB - 4 * KIB, 0x66)?;
    image.check_pattern(15 * MIB, MIB, 0x77)?;
    run_bench(ground, &export, PACKED, WAYS[1])?;
    proxy.stop()?;
    server.stop()?;
    Ok(())
}

fn killed(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 256 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 2);
    for rings in [SPLIT, PACKED] {
        let left = under_load(ground, &export, rings, || ground.serve(std::slice::from_ref(&export)))?;
        // Otherwise no daemon found requests in flight, and all were submitted as new.
        ensure!(left > 0, "with {rings} no daemon went on from what the one before had in flight");
    }
    Ok(())
}

fn foreign_killed(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 256 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 2);
    under_load(ground, &export, SPLIT, || {
        // qemu-storage-daemon does not replace the socket of a killed process.
        let _ = std::fs::remove_file(&export.socket);
        foreign_server(ground, &export)
    })?;
    Ok(())
}

/// Kills and restarts a back-end repeatedly while `bench` writes to its disk. Returns the number of requests that
/// back-ends report as found in flight.
fn under_load(
    ground: &ScenarioContext,
    export: &Export,
    rings: &str,
    start: impl Fn() -> Result<ReadyServer>,
) -> Result<u64> {
    /// Life time of a back-end, shortened if the whole load takes less.
    const LIFE: Duration = Duration::from_millis(150);
    let (times, mut life) = (crash::kills(10)?, LIFE);
    let mut server = start()?;
    let (mut kills, mut left) = (0, 0);
    while kills < times {
        let before = kills;
        let mut load =
            Running::start("blkyard bench", &bench(ground, export, rings, &["--numjobs", "2", "--iodepth", "32"])?)?;
        while kills < times {
            let until = Instant::now() + life;
            if !load.wait_until(CLIENT_LIMIT, |_| Ok(Instant::now() >= until))? {
                break;
            }
            left += crash::left(&server.said()?);
            server.kill();
            server = start()?;
            kills += 1;
        }
        let ended = load.wait(CLIENT_LIMIT)?;
        ensure!(ended.status.success(), "the load failed after {kills} kills:\n{}", process::tail(&ended.said(), 20));
        check_report(&ended.stdout)?;
        if kills == before {
            life /= 2;
        }
    }
    left += crash::left(&server.said()?);
    server.stop()?;
    Ok(left)
}
