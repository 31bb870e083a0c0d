//! Data written and read by qemu-io and `qemu-img bench`, which use vhost-user-blk through libblkio.
//!
//! The content of the image on the host is always checked. Start, refusals and end of the daemon are in `daemon` and
//! `refusals`.

use anyhow::{Context, Result, ensure};

use super::{KIB, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process;
use crate::server::OfferedDevice;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "foreign-patterns",
        sentence: "what a foreign client writes it reads back, also after it reconnects, and the image holds it",
        place: RunsIn::Host,
        ours: false,
        tell: patterns,
    },
    Scenario {
        name: "foreign-sizes",
        sentence: "transfers of many sizes at many offsets, up to 1 MiB and more, leave exactly the bytes they should",
        place: RunsIn::Host,
        ours: false,
        tell: sizes,
    },
    Scenario {
        name: "foreign-sectors",
        sentence: "a write of one 512-byte sector leaves its neighbours alone",
        place: RunsIn::Host,
        ours: false,
        tell: sectors,
    },
    Scenario {
        name: "foreign-zeroes",
        sentence: "write zeroes, with unmap and without, reads as zeroes and touches nothing beside it",
        place: RunsIn::Host,
        ours: false,
        tell: zeroes,
    },
    Scenario {
        name: "foreign-discard",
        sentence: "a discard gives the image's blocks back to the file system",
        place: RunsIn::Host,
        ours: false,
        tell: discard,
    },
    Scenario {
        name: "foreign-depth",
        sentence: "64 writes and 64 reads at a time all arrive",
        place: RunsIn::Host,
        ours: false,
        tell: depth,
    },
    Scenario {
        name: "foreign-reconnect",
        sentence: "a client that leaves and comes back, again and again, finds what it wrote last",
        place: RunsIn::Host,
        ours: false,
        tell: reconnect,
    },
    Scenario {
        name: "foreign-two-exports",
        sentence: "two exports of one daemon, in use at the same time, do not mix their bytes",
        place: RunsIn::Host,
        ours: false,
        tell: two_exports,
    },
    Scenario {
        name: "foreign-read-only",
        sentence: "a read-only export can be read, refuses writes and leaves its image as it was",
        place: RunsIn::Host,
        ours: false,
        tell: read_only,
    },
];

fn patterns(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(64 * MIB, 1)?;
    let places: Vec<(u64, u64, u8)> =
        vec![(0, 64 * KIB, 0x5a), (MIB, 4 * KIB, 0x01), (5 * MIB + 4 * KIB, 12 * KIB, 0xfe), (63 * MIB, MIB, 0x77)];
    let command = |verb| {
        let line = move |(offset, length, byte): &(u64, u64, u8)| format!("{verb} -P {byte:#x} {offset} {length}");
        places.iter().map(line).collect::<Vec<_>>()
    };
    let writes_then_reads = [command("write"), vec!["flush".into()], command("read")].concat();
    ground.qemu_io(&export.socket, &writes_then_reads)?;
    ground.qemu_io(&export.socket, &command("read")).context("after a reconnection")?;
    ground.qemu_io(&export.socket, &["read -P 0 2M 1M".into()]).context("of what nobody wrote")?;
    // Forced unit access and vectored writes use other code paths of the server.
    let special = ["write -f -P 0x33 8M 8k", "writev -P 0x44 9M 512 4k 1k 512", "read -P 0x44 9M 6k"];
    ground.qemu_io(&export.socket, &special.map(String::from))?;
    for (offset, length, byte) in places {
        image.check_pattern(offset, length, byte)?;
    }
    image.check_pattern(8 * MIB, 8 * KIB, 0x33)?;
    image.check_pattern(9 * MIB, 6 * KIB, 0x44)?;
    image.check_pattern(9 * MIB + 6 * KIB, 64 * KIB, 0)?;
    server.stop()?;
    Ok(())
}

fn sizes(ground: &ScenarioContext) -> Result<()> {
    const DISK: u64 = 16 * MIB;
    let (image, export, server) = ground.serve_image(DISK, 1)?;
    let sizes = [512, 1024, 1536, 4096, 4608, 8192, 65024, 65536, 131_072, 131_584, 524_288, MIB - 512, MIB, 2 * MIB];
    let mut expected = vec![0; usize::try_from(DISK)?];
    let mut commands = Vec::new();
    let mut offset = 512;
    for (index, size) in sizes.iter().enumerate() {
        let byte = u8::try_from(index + 1)?;
        commands.push(format!("write -P {byte} {offset} {size}"));
        commands.push(format!("read -P {byte} {offset} {size}"));
        expected[usize::try_from(offset)?..usize::try_from(offset + size)?].fill(byte);
        // A gap that keeps the next range off larger boundaries.
        offset += size + 1536;
    }
    ensure!(offset < DISK, "the sizes do not fit on the disk");
    ground.qemu_io(&export.socket, &commands)?;
    compare(&image.read(0, DISK)?, &expected)?;
    // The last sector is a boundary too.
    ground.qemu_io(&export.socket, &[format!("write -P 0x99 {} 512", DISK - 512)])?;
    image.check_pattern(DISK - 512, 512, 0x99)?;
    let beyond = ground.try_qemu_io(&export.socket, &[format!("write -P 0x98 {DISK} 512")], &[])?;
    ensure!(beyond.said().contains("failed") || !beyond.status.success(), "a write beyond the end succeeded");
    server.stop()?;
    Ok(())
}

fn sectors(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(4 * MIB, 1)?;
    let mut expected = vec![0xaa; 64 * 1024];
    let mut commands = vec!["write -P 0xaa 0 64k".to_owned()];
    for sector in [1_u8, 7, 8, 9, 40, 63] {
        let at = usize::from(sector) * 512;
        commands.push(format!("write -P {sector} {at} 512"));
        expected[at..at + 512].fill(sector);
    }
    commands.push("read -P 0xaa 0 512".into());
    commands.push("read -P 9 4608 512".into());
    ground.qemu_io(&export.socket, &commands)?;
    compare(&image.read(0, 64 * KIB)?, &expected)?;
    server.stop()?;
    Ok(())
}

fn zeroes(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(16 * MIB, 1)?;
    let commands = [
        "write -P 0x11 0 8M",
        "write -z 64k 64k",
        "read -P 0 64k 64k",
        "write -z -u 1M 1M",
        "read -P 0 1M 1M",
        // A range that starts and ends within a block of the file system.
        "write -z 3073k 1k",
        "read -P 0 3073k 1k",
        "read -P 0x11 3074k 1k",
    ];
    ground.qemu_io(&export.socket, &commands.map(String::from))?;
    for (offset, end, byte) in [
        (0, 64 * KIB, 0x11),
        (64 * KIB, 128 * KIB, 0),
        (128 * KIB, MIB, 0x11),
        (MIB, 2 * MIB, 0),
        (2 * MIB, 3073 * KIB, 0x11),
        (3073 * KIB, 3074 * KIB, 0),
        (3074 * KIB, 8 * MIB, 0x11),
    ] {
        image.check_pattern(offset, end - offset, byte)?;
    }
    server.stop()?;
    Ok(())
}

fn discard(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(32 * MIB, 1)?;
    ground.qemu_io(&export.socket, &["write -P 0x22 0 16M".into(), "flush".into()])?;
    let before = image.allocated()?;
    ensure!(before >= 16 * MIB, "the image has only {before} bytes allocated after 16 MiB were written");
    ground.qemu_io(&export.socket, &["discard 4M 8M".into(), "flush".into()])?;
    let after = image.allocated()?;
    ensure!(after <= before - 7 * MIB, "8 MiB were discarded, and the image went from {before} bytes to {after}");
    image.check_pattern(4 * MIB, 8 * MIB, 0)?;
    image.check_pattern(0, 4 * MIB, 0x22)?;
    image.check_pattern(12 * MIB, 4 * MIB, 0x22)?;
    ground.qemu_io(&export.socket, &["write -P 0x23 5M 64k".into(), "read -P 0x23 5M 64k".into()])?;
    server.stop()?;
    Ok(())
}

fn depth(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(32 * MIB, 1)?;
    ground.qemu_bench(&export.socket, &["-w", "--pattern=0x66", "-c", "8192", "-d", "64", "-s", "4k"])?;
    // This client wraps around one block before the end.
    image.check_pattern(0, 32 * MIB - 4 * KIB, 0x66)?;
    ground.qemu_bench(&export.socket, &["-c", "30000", "-d", "64", "-s", "4k"])?;
    ground.qemu_bench(&export.socket, &["-w", "--pattern=0x67", "-c", "256", "-d", "64", "-s", "128k"])?;
    image.check_pattern(0, 32 * MIB - 128 * KIB, 0x67)?;
    ground.qemu_bench(&export.socket, &["-w", "-c", "2000", "-d", "16", "-s", "4k", "--flush-interval=16"])?;
    server.stop()?;
    Ok(())
}

fn reconnect(ground: &ScenarioContext) -> Result<()> {
    let (image, export, mut server) = ground.serve_image(8 * MIB, 2)?;
    for round in 1..=10_u8 {
        let offset = u64::from(round - 1) * 64 * KIB;
        let mut commands = vec![format!("write -P {round} {offset} 64k")];
        if round > 1 {
            commands.insert(0, format!("read -P {} {} 64k", round - 1, offset - 64 * KIB));
        }
        ground.qemu_io(&export.socket, &commands).with_context(|| format!("connection {round}"))?;
        server.check_alive()?;
        image.check_pattern(offset, 64 * KIB, round)?;
    }
    server.stop()?;
    Ok(())
}

fn two_exports(ground: &ScenarioContext) -> Result<()> {
    let (left, right) = (ground.image("left.img", 16 * MIB)?, ground.image("right.img", 16 * MIB)?);
    let exports = [
        ground.export(OfferedDevice::File(left.path.clone()), "left.sock", 1),
        ground.export(OfferedDevice::File(right.path.clone()), "right.sock", 2),
    ];
    let server = ground.serve(&exports)?;
    let options = |pattern| ["-w", pattern, "-c", "20000", "-d", "16", "-s", "4k"];
    let one = ground.start_qemu_bench(&exports[0].socket, &options("--pattern=0x01"))?;
    let two = ground.start_qemu_bench(&exports[1].socket, &options("--pattern=0x02"))?;
    for client in [one, two] {
        let ended = client.wait(super::CLIENT_LIMIT)?;
        ensure!(ended.status.success(), "a client failed:\n{}", process::tail(&ended.said(), 10));
    }
    left.check_pattern(0, 16 * MIB - 4 * KIB, 1)?;
    right.check_pattern(0, 16 * MIB - 4 * KIB, 2)?;
    server.stop()?;
    Ok(())
}

fn read_only(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    image.write(0, &vec![0x3c; 64 * 1024])?;
    let export = ground.export(OfferedDevice::ReadOnly(image.path.clone()), "disk.sock", 1);
    let mut server = ground.serve(std::slice::from_ref(&export))?;
    let read = ground.try_qemu_io(&export.socket, &["read -P 0x3c 0 64k".into()], &["-r"])?;
    ensure!(read.status.success() && read.said().contains("read 65536/65536"), "cannot be read: {}", read.said());
    // The client may fail at opening the disk or at its write.
    let write = ground.try_qemu_io(&export.socket, &["write -P 0x3d 0 64k".into()], &[])?;
    ensure!(!write.said().contains("wrote 65536/65536"), "a write succeeded: {}", write.said());
    server.check_alive()?;
    image.check_pattern(0, 64 * KIB, 0x3c)?;
    server.stop()?;
    Ok(())
}

/// The first difference, with its offset.
fn compare(found: &[u8], expected: &[u8]) -> Result<()> {
    let difference = found.iter().zip(expected).position(|(found, expected)| found != expected);
    if let Some(at) = difference {
        anyhow::bail!("byte {at} of the image is {:#04x} and should be {:#04x}", found[at], expected[at]);
    }
    ensure!(found.len() == expected.len(), "the image has {} bytes and should have {}", found.len(), expected.len());
    Ok(())
}
