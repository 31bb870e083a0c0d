//! Clients of libblkio with several queues: a C program of this project, and QEMU's tools, which use one queue of any
//! number.
//!
//! The program itself compares its reads (see `blkio-client.c`); the image is checked here.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::{CLIENT_LIMIT, Image, KIB, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process::succeed;
use crate::server::{Export, OfferedDevice};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "blkio-program",
        sentence: "a C program on libblkio writes, flushes, reads, discards and zeroes through 1, 2 and 4 queues, rung for and polling",
        place: RunsIn::Host,
        ours: false,
        tell: program,
    },
    Scenario {
        name: "blkio-qemu",
        sentence: "qemu-io and qemu-img bench find their way at exports of 1, 2 and 4 queues",
        place: RunsIn::Host,
        ours: false,
        tell: qemu,
    },
];

const QUEUES: [u16; 3] = [1, 2, 4];
const DISK: u64 = 16 * MIB;

/// Makes an image and an export with this number of queues.
fn disk(ground: &ScenarioContext, name: &str, queues: u16) -> Result<(Image, Export)> {
    let image = ground.image(&format!("{name}{queues}.img"), DISK)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), &format!("{name}{queues}.sock"), queues);
    Ok((image, export))
}

fn program(ground: &ScenarioContext) -> Result<()> {
    let source = ground.path("client.c");
    fs::write(&source, include_str!("blkio-client.c")).with_context(|| format!("cannot write {}", source.display()))?;
    let program = ground.path("client");
    ground.guest.build_with_libblkio(&source, &program)?;
    // A separate disk for each run, since all write the same data.
    for mode in ["event", "poll"] {
        for queues in QUEUES {
            let about = || format!("with {queues} queues, mode {mode}");
            let (image, export) = disk(ground, mode, queues)?;
            let server = ground.serve(std::slice::from_ref(&export))?;
            let mut client = ground.guest.command_with_libblkio(&program);
            client.arg(&export.socket).args([&queues.to_string(), mode]);
            let said = succeed("the client", &client, CLIENT_LIMIT).with_context(about)?;
            ensure!(said == "verified\n", "the client says {}: {said}", about());
            check_image(&image).with_context(about)?;
            server.stop()?;
        }
    }
    Ok(())
}

/// Checks the result of the program: 4 MiB of numbered blocks, the second MiB discarded and the third zeroed.
fn check_image(image: &Image) -> Result<()> {
    const BLOCK: u64 = 4 * KIB;
    for block in (0..MIB / BLOCK).chain(3 * MIB / BLOCK..4 * MIB / BLOCK) {
        let words = (0..BLOCK / 8).flat_map(|index| ((block + 1) << 32 | index).to_le_bytes());
        ensure!(image.read(block * BLOCK, BLOCK)?.into_iter().eq(words), "block {block} is not as it was written");
    }
    image.check_pattern(MIB, 2 * MIB, 0)?;
    image.check_pattern(4 * MIB, DISK - 4 * MIB, 0)?;
    let allocated = image.allocated()?;
    ensure!(allocated <= 3 * MIB + 64 * KIB, "1 of 4 MiB was discarded, and {allocated} bytes are allocated");
    Ok(())
}

fn qemu(ground: &ScenarioContext) -> Result<()> {
    for queues in QUEUES {
        let about = || format!("with {queues} queues");
        let (image, export) = disk(ground, "disk", queues)?;
        let server = ground.serve(std::slice::from_ref(&export))?;
        let commands =
            ["write -P 0x35 15M 1M", "flush", "read -P 0x35 15M 1M", "write -z 15872k 64k", "discard 15M 64k"];
        ground.qemu_io(&export.socket, &commands.map(String::from)).with_context(about)?;
        let options = ["-w", "--pattern=0x36", "-c", "3000", "-d", "64", "-s", "4k"];
        ground.qemu_bench(&export.socket, &options).with_context(about)?;
        ground.qemu_bench(&export.socket, &["-c", "10000", "-d", "64", "-s", "4k"]).with_context(about)?;
        for (offset, length, byte) in
            [(0, 3000 * 4 * KIB, 0x36), (15 * MIB + 64 * KIB, 448 * KIB, 0x35), (15872 * KIB, 64 * KIB, 0)]
        {
            image.check_pattern(offset, length, byte).with_context(about)?;
        }
        server.stop()?;
    }
    Ok(())
}
