//! Life cycle of the daemon: its devices, idle cost, killed clients, and end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{CLIENT_LIMIT, KIB, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process;
use crate::server::{self, OfferedDevice, ReadyServer};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "daemon-ram",
        sentence: "a RAM disk keeps what is written from one connection to the next",
        place: RunsIn::Host,
        ours: false,
        tell: ram,
    },
    Scenario {
        name: "daemon-null",
        sentence: "a null disk takes every write and answers every read",
        place: RunsIn::Host,
        ours: false,
        tell: null,
    },
    Scenario {
        name: "daemon-idle",
        sentence: "with sixteen queues, a client attached and nothing to do, the daemon uses less than 1 % of a processor",
        place: RunsIn::Host,
        ours: false,
        tell: idle,
    },
    Scenario {
        name: "daemon-sigterm",
        sentence: "SIGTERM under load ends the daemon soon and with success",
        place: RunsIn::Host,
        ours: false,
        tell: sigterm,
    },
    Scenario {
        name: "daemon-second-client",
        sentence: "a second client at a socket neither disturbs the first nor is forgotten once that has left",
        place: RunsIn::Host,
        ours: false,
        tell: second_client,
    },
    Scenario {
        name: "daemon-client-killed",
        sentence: "a client killed in the middle of its writes takes nothing with it: the next one is served",
        place: RunsIn::Host,
        ours: false,
        tell: client_killed,
    },
    Scenario {
        name: "daemon-stats",
        sentence: "with --stats 1 the daemon says something of its export every second",
        place: RunsIn::Host,
        ours: true,
        tell: stats,
    },
    Scenario {
        name: "daemon-bare-serve",
        sentence: "serve without arguments makes a sparse image of 1 GiB and a socket, and says how to attach it",
        place: RunsIn::Host,
        ours: true,
        tell: bare_serve,
    },
    Scenario {
        name: "daemon-options",
        sentence: "the ways to reach a file (with and without the page cache, written through or not) lead to the same bytes",
        place: RunsIn::Host,
        ours: true,
        tell: options,
    },
    Scenario {
        name: "daemon-config",
        sentence: "a file of settings serves several disks as it says, with the permissions of the socket it asks for",
        place: RunsIn::Host,
        ours: true,
        tell: config,
    },
    Scenario {
        name: "daemon-bench",
        sentence: "bench with verification on a file ends well, and its report for programs is JSON",
        place: RunsIn::Host,
        ours: true,
        tell: bench,
    },
];

fn ram(ground: &ScenarioContext) -> Result<()> {
    let export = ground.export(OfferedDevice::Ram(64), "ram.sock", 4);
    let server = ground.serve(std::slice::from_ref(&export))?;
    let writes = ["read -P 0 0 1M", "write -P 0x19 0 1M", "write -P 0x20 32769k 512", "write -z 64k 64k"];
    ground.qemu_io(&export.socket, &writes.map(String::from))?;
    let reads = ["read -P 0x19 0 64k", "read -P 0 64k 64k", "read -P 0x19 128k 64k", "read -P 0x20 32769k 512"];
    ground.qemu_io(&export.socket, &reads.map(String::from))?;
    ground.qemu_bench(&export.socket, &["-w", "-c", "20000", "-d", "64", "-s", "4k"])?;
    server.stop()?;
    Ok(())
}

fn null(ground: &ScenarioContext) -> Result<()> {
    let export = ground.export(OfferedDevice::Null(1024), "null.sock", 4);
    let server = ground.serve(std::slice::from_ref(&export))?;
    ground.qemu_io(&export.socket, &["write -P 0x19 1023M 1M".into(), "read 0 1M".into(), "flush".into()])?;
    ground.qemu_bench(&export.socket, &["-c", "50000", "-d", "64", "-s", "4k"])?;
    server.stop()?;
    Ok(())
}

fn idle(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(8 * MIB, 16)?;
    let client = ground.start_silent_client(&export.socket, &image)?;
    super::check_idle(&server)?;
    ensure!(server::has_client(&export.socket), "the client has gone: {}", client.stderr()?);
    drop(client);
    server.stop()?;
    Ok(())
}

fn sigterm(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(32 * MIB, 1)?;
    let options = ["-w", "--pattern=0x5e", "-c", "50000000", "-d", "64", "-s", "4k"];
    let mut client = ground.start_qemu_bench(&export.socket, &options)?;
    let started = client.wait_until(CLIENT_LIMIT, |_| image.holds(8 * MIB, 0x5e))?;
    ensure!(started, "the client ended too early: {}", client.stderr()?);
    server.stop()?;
    // A client of libblkio does not detect the end of its server, and may wait without end.
    drop(client);
    image.check_pattern(0, 4 * MIB, 0x5e)?;
    // Its lock was released with it.
    ground.serve(std::slice::from_ref(&export))?.stop()?;
    Ok(())
}

fn second_client(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(32 * MIB, 1)?;
    image.write(31 * MIB, &[0x29; 4096])?;
    let mut first =
        ground.start_qemu_bench(&export.socket, &["-w", "--pattern=0x28", "-c", "30000", "-d", "8", "-s", "1k"])?;
    first.wait_until(CLIENT_LIMIT, |_| Ok(server::has_client(&export.socket)))?;
    // It is served after the first has ended, and the disk is consistent then.
    ground.qemu_io(&export.socket, &["read -P 0x29 31M 4k".into()]).context("the second client")?;
    let first = first.wait(CLIENT_LIMIT)?;
    ensure!(first.status.success(), "the first client failed:\n{}", process::tail(&first.said(), 10));
    image.check_pattern(0, 29 * MIB, 0x28)?;
    server.stop()?;
    Ok(())
}

fn client_killed(ground: &ScenarioContext) -> Result<()> {
    let (image, export, mut server) = ground.serve_image(32 * MIB, 2)?;
    for round in 0..3_u8 {
        let byte = 0x81 + round;
        let pattern = format!("--pattern={byte}");
        let options = ["-w", &pattern, "-c", "50000000", "-d", "64", "-s", "16k"];
        let mut client = ground.start_qemu_bench(&export.socket, &options)?;
        let writes = client.wait_until(CLIENT_LIMIT, |_| image.holds(4 * MIB, byte))?;
        ensure!(writes, "client {round} ended too early: {}", client.stderr()?);
        drop(client);
        server.check_alive().with_context(|| format!("after the death of client {round}"))?;
        ground.qemu_io(&export.socket, &["write -P 0x71 0 1M".into(), "read -P 0x71 0 1M".into()])?;
        image.check_pattern(0, MIB, 0x71)?;
    }
    server.stop()?;
    Ok(())
}

fn stats(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path), "disk.sock", 1);
    let mut command = ground.program.serve(std::slice::from_ref(&export))?;
    command.args(["--stats", "1"]);
    let mut server = ReadyServer::start_command(&command, std::slice::from_ref(&export.socket), &ground.log)?;
    ground.qemu_io(&export.socket, &["write 0 1M".into()])?;
    // An idle daemon prints one line per second: the interval from the second to the fourth line is 3 to 4 s. A busy
    // machine may lengthen it, so the check is repeated; it is never shorter.
    let mut took = Vec::new();
    while took.len() < 10 {
        let lines =
            |said: &str| said.lines().filter(|line| line.contains("disk.sock") && line.ends_with(": 0 IOPS")).count();
        let (start, before) = (Instant::now(), lines(&server.said()?));
        server.wait_until_said(CLIENT_LIMIT, |said| lines(said) >= before + 4)?;
        took.push(start.elapsed());
        ensure!(start.elapsed() >= Duration::from_secs(3), "four lines of statistics came in {took:?}");
        if start.elapsed() < Duration::from_millis(4900) {
            server.stop()?;
            return Ok(());
        }
    }
    bail!("four lines of statistics took {took:?}")
}

fn bare_serve(ground: &ScenarioContext) -> Result<()> {
    let mut command = ground.program.command()?;
    command.arg("serve").current_dir(ground.path(""));
    let socket = ground.path("blkyard.sock");
    let server = ReadyServer::start_command(&command, std::slice::from_ref(&socket), &ground.log)?;
    let said = server.said()?;
    for word in ["blkyard.img", "blkyard.sock", "vhost-user-blk-pci", "num-queues", "share=on"] {
        ensure!(said.contains(word), "serve says nothing of {word}:\n{said}");
    }
    let image = super::Image { path: ground.path("blkyard.img") };
    let size = image.path.metadata().context("serve made no image")?.len();
    ensure!(size == 1024 * MIB, "the image has {size} bytes");
    let allocated = image.allocated()?;
    ensure!(allocated < MIB, "the fresh image takes {allocated} bytes of the disk");
    ground.qemu_io(&socket, &["write -P 0x42 0 64k".into(), "read -P 0x42 0 64k".into()])?;
    image.check_pattern(0, 64 * KIB, 0x42)?;
    server.stop()?;
    // The second run keeps the existing image.
    ReadyServer::start_command(&command, &[socket], &ground.log)?.stop()?;
    image.check_pattern(0, 64 * KIB, 0x42)
}

fn options(ground: &ScenarioContext) -> Result<()> {
    for (number, option) in
        ["direct=on", "direct=off", "cache=writethrough", "direct=off&cache=writethrough"].iter().enumerate()
    {
        let image = ground.image(&format!("{number}.img"), 16 * MIB)?;
        let spec = format!("{}?{option}", OfferedDevice::File(image.path.clone()).spec());
        let export = ground.export(OfferedDevice::Spec(spec), &format!("{number}.sock"), 2);
        let server = ground.serve(std::slice::from_ref(&export)).with_context(|| format!("with {option}"))?;
        let commands =
            ["write -P 0x51 0 1M", "write -P 0x52 1049088 512", "write -z -u 64k 64k", "discard 128k 64k", "flush"];
        ground.qemu_io(&export.socket, &commands.map(String::from)).with_context(|| format!("with {option}"))?;
        ground
            .qemu_bench(&export.socket, &["-w", "--pattern=0x53", "-c", "500", "-d", "32", "-s", "4k", "-o", "2M"])?;
        for (offset, length, byte) in [
            (0, 64 * KIB, 0x51),
            (64 * KIB, 128 * KIB, 0),
            (192 * KIB, 832 * KIB, 0x51),
            (1_049_088, 512, 0x52),
            (2 * MIB, 2000 * KIB, 0x53),
        ] {
            image.check_pattern(offset, length, byte).with_context(|| format!("with {option}"))?;
        }
        server.stop()?;
    }
    Ok(())
}

fn config(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 16 * MIB)?;
    let (disk, memory) = (ground.path("disk.sock"), ground.path("memory.sock"));
    let text = format!(
        "[[device]]\nspec = \"file:{}\"\n\
         [[device.export]]\nspec = \"vhost-user-blk:{}\"\nqueues = 4\nserial = \"from-a-file\"\nmode = \"0640\"\n\
         [[device]]\nspec = \"ram:16M\"\n\
         [[device.export]]\nspec = \"vhost-user-blk:{}\"\n",
        image.path.display(),
        disk.display(),
        memory.display()
    );
    let path = ground.path("disks.toml");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = ground.program.command()?;
    command.arg("serve").arg("--config").arg(&path);
    let server = ReadyServer::start_command(&command, &[disk.clone(), memory.clone()], &ground.log)?;
    let mode = disk.metadata().context("cannot look at the socket")?.permissions().mode() & 0o777;
    ensure!(mode == 0o640, "the socket's permissions are {mode:o} and not 640");
    ground.qemu_io(&disk, &["write -P 0x61 0 64k".into()])?;
    ground.qemu_io(&memory, &["write -P 0x62 0 64k".into(), "read -P 0x62 0 64k".into()])?;
    image.check_pattern(0, 64 * KIB, 0x61)?;
    server.stop()?;
    Ok(())
}

fn bench(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 16 * MIB)?;
    let run = |arguments: &[&str]| {
        let mut command: Command = ground.program.command()?;
        command.arg("bench").args(arguments);
        process::succeed("blkyard bench", &command, CLIENT_LIMIT)
    };
    let file = format!("file:{}", image.path.display());
    run(&[&file, "--rw", "randwrite", "--bs", "4k", "--iodepth", "16", "--size", "16M", "--verify", "crc32c"])?;
    let report = run(&["null:1G", "--rw", "randread", "--bs", "4k", "--runtime", "1", "--output-format", "json"])?;
    let report: serde_json::Value =
        serde_json::from_str(&report).with_context(|| format!("the report is not JSON:\n{report}"))?;
    ensure!(report.is_object(), "the report is not an object: {report}");
    let text = report.to_string();
    for key in ["iops", "clat_ns", "percentile"] {
        ensure!(text.contains(&format!("\"{key}\"")), "the report has no {key}, as fio's has: {text}");
    }
    Ok(())
}
