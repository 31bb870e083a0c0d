//! Daemons killed during a guest's writes, and their successors.
//!
//! The guest is not notified. Its QEMU connects to the next daemon and passes the in-flight records.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{CLIENT_LIMIT, Image, KIB, MIB, Missing, RunsIn, Scenario, ScenarioContext};
use crate::process::{self, Running};
use crate::server::{OfferedDevice, STOP_LIMIT};
use crate::vm::{Machine, Vm};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "crash-guest-fio",
        sentence: "a guest goes on through eight daemons killed amid its writes, and fio finds every block's checksum intact",
        place: RunsIn::Guest,
        ours: true,
        tell: |ground| guest_fio(ground, false),
    },
    Scenario {
        name: "crash-guest-packed",
        sentence: "a guest with packed rings goes on through killed daemons as well",
        place: RunsIn::Guest,
        ours: true,
        tell: |ground| guest_fio(ground, true),
    },
    Scenario {
        name: "crash-slow-disk",
        sentence: "what a killed daemon had handed to a slow disk is on it before the next one serves, and is then done again",
        place: RunsIn::Guest,
        ours: true,
        tell: slow_disk,
    },
];

/// Life time of a daemon after the guest's QEMU has connected.
const LIFE: Duration = Duration::from_millis(150);

/// Number of kills in a scenario: this number, or the value of `BLKYARD_TEST_KILLS`.
pub(super) fn kills(usually: usize) -> Result<usize> {
    match std::env::var("BLKYARD_TEST_KILLS") {
        Ok(kills) => {
            kills.parse().with_context(|| format!("BLKYARD_TEST_KILLS={kills} is no number: say how often to kill"))
        }
        Err(_) => Ok(usually),
    }
}

/// Reconnection interval of QEMU.
const RECONNECT_MS: u32 = 20;

/// Offset of the block that stops a writing guest, beyond its writes, and the content that stops it.
const END_AT: u64 = 60 * MIB;
const END: &str = "end";

/// Log text of a queue that starts with requests of a killed daemon.
const LEFT: &str = "requests of the previous session are submitted again";

/// Number of requests that daemons found in flight at their start.
pub(super) fn left(said: &str) -> u64 {
    let counts = said.lines().filter(|line| line.contains(LEFT));
    counts.filter_map(|line| line.split(LEFT).next()?.split_whitespace().next_back()?.parse::<u64>().ok()).sum()
}

/// Log text of a server when the guest's QEMU has connected.
const CAME: &str = "a front-end connected";

/// A load of 32 MiB on an image of twice the size, repeated until [`end_load`]: it writes every block once at full
/// speed, then reads all. On a fast machine, too, it runs until it is stopped.
pub(super) fn load() -> String {
    format!(
        "modprobe virtio_blk
        until {ends}; do
            fio --filename=/dev/vda --direct=1 --ioengine=libaio --thread \
            --group_reporting --verify=crc32c --verify_fatal=1 --iodepth=32 --output-format=terse --output=/dev/null \
            --loops=4 --name=small --rw=randwrite --bs=4k --size=6m --numjobs=4 --offset_increment=8m \
            --name=mixed --rw=randwrite --bsrange=4k-128k --size=8m --offset=40m || exit
        done
        echo verified",
        ends = is_ended("/dev/vda")
    )
}

/// A guest's command: whether the image of this disk says [`END`].
pub(super) fn is_ended(disk: &str) -> String {
    let block = END_AT / (4 * KIB);
    format!("test \"$(dd if={disk} bs=4k skip={block} count=1 iflag=direct 2>/dev/null | tr -d '\\0')\" = {END}")
}

/// Ends a guest's load that asks [`is_ended`], or prepares the image for another.
pub(super) fn set_ended(image: &Image, is_ended: bool) -> Result<()> {
    image.write(END_AT, if is_ended { END.as_bytes() } else { &[0; END.len()] })
}

/// Stops such a load, and checks that all written data was verified and is in the image.
pub(super) fn end_load(machine: Machine, image: &Image) -> Result<()> {
    set_ended(image, true)?;
    let output = machine.wait()?.success()?;
    ensure!(output.contains("verified"), "fio said:\n{output}");
    let allocated = image.allocated()?;
    ensure!(allocated >= 32 * MIB, "only {allocated} bytes of what fio wrote are in the image");
    Ok(())
}

fn guest_fio(ground: &ScenarioContext, packed: bool) -> Result<()> {
    let kills = kills(8)?;
    let (image, export, mut server) = ground.serve_image(64 * MIB, 4)?;
    let vm = Vm::new(ground.guest, 4).disk(&export.socket, 4).reconnects_every_ms(RECONNECT_MS);
    let mut machine = if packed { vm.packed() } else { vm }.start(&load())?;
    wait_for_writes(&mut machine, &image)?;
    let (mut done, mut found, mut amid) = (0, 0, 0);
    // A daemon may be killed between two requests, but not in all cases.
    while done < kills || found == 0 && done < 2 * kills {
        let case = || format!("after {done} kills");
        machine.wait_until(|| Ok(server.said()?.contains(CAME))).with_context(case)?;
        go_on(&mut machine).with_context(case)?;
        let inherited = left(&server.said()?);
        server.kill();
        server = ground.serve(std::slice::from_ref(&export)).with_context(case)?;
        (done, found, amid) = (done + 1, found + inherited, amid + usize::from(inherited > 0));
    }
    end_load(machine, &image)?;
    let inherited = left(&server.said()?);
    (found, amid) = (found + inherited, amid + usize::from(inherited > 0));
    ensure!(found > 0, "no daemon was killed in the middle of anything");
    server.stop()?;
    ground.measured(format!("{done} daemons killed, {amid} with requests in flight, {found} in all"));
    Ok(())
}

/// Waits until the guest has begun to write.
pub(super) fn wait_for_writes(machine: &mut Machine, image: &Image) -> Result<()> {
    machine.wait_until(|| Ok(image.allocated()? > 0))
}

/// Lets the guest run for a while.
pub(super) fn go_on(machine: &mut Machine) -> Result<()> {
    let until = Instant::now() + LIFE;
    machine.wait_until(|| Ok(Instant::now() >= until))
}

/// Number of blocks written concurrently by the guest, too far apart to be merged.
const BLOCKS: u64 = 8;
const APART: u64 = 64 * KIB;
const BYTE: u8 = 0x5a;
/// Interval of the slow disk's writes.
const WRITE_EVERY: Duration = Duration::from_secs(1);

fn slow_disk(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let slow = SlowDisk::start(ground, &image)?;
    let export = ground.export(OfferedDevice::File(slow.device.clone()), "disk.sock", 1);
    let server = ground.serve(std::slice::from_ref(&export))?;
    let task = format!(
        "modprobe virtio_blk && tr '\\0' '\\{BYTE:o}' </dev/zero | dd of=/tmp/block bs=4k count=1 iflag=fullblock 2>/dev/null
        for block in $(seq 0 {}); do
            dd if=/tmp/block of=/dev/vda bs=4k count=1 seek=$((block * {})) oflag=direct conv=notrunc 2>/dev/null &
        done
        wait && echo written",
        BLOCKS - 1,
        APART / (4 * KIB)
    );
    let mut machine =
        Vm::new(ground.guest, 2).disk(&export.socket, 1).reconnects_every_ms(RECONNECT_MS).start(&task)?;
    let landed = || (0..BLOCKS).try_fold(0, |sum, block| Ok(sum + u64::from(image.holds(block * APART, BYTE)?)));
    // Once the second has arrived, all have been submitted.
    machine.wait_until(|| landed().map(|landed| landed >= 2))?;
    server.kill();
    let (died, on_disk) = (Instant::now(), landed()?);
    ensure!(on_disk < BLOCKS, "the disk is not slow: all {BLOCKS} blocks were on it before the kill");
    let server = ground.serve(std::slice::from_ref(&export))?;
    let (waited, on_disk_then) = (died.elapsed(), landed()?);
    let said = server.said()?;
    ensure!(said.contains("waiting for its lock"), "the second daemon does not say what it waits for:\n{said}");
    // The daemon serves only now, and the disk takes a second for the next request, so these are the first daemon's
    // writes.
    ensure!(on_disk_then == BLOCKS, "{on_disk_then} of {BLOCKS} blocks are on the disk when the second daemon serves");
    let least = WRITE_EVERY.mul_f64((BLOCKS - on_disk - 1) as f64 * 0.9);
    ensure!(waited >= least, "the second daemon served after {waited:?}, the first one's writes took {least:?}");
    ensure!(!machine.output().contains("written"), "the guest was answered by nobody");
    let output = machine.wait()?.success()?;
    ensure!(output.trim() == "written", "the guest said: {output}");
    let found = left(&server.said()?);
    ensure!(found >= BLOCKS - on_disk, "{found} requests were done again, and {on_disk} of {BLOCKS} had been done");
    server.stop()?;
    (0..BLOCKS).try_for_each(|block| image.check_pattern(block * APART, 4 * KIB, BYTE))
}

/// A disk that completes one write per second, even after its user was killed: a loop device, which has kernel threads,
/// on a file of a foreign FUSE server, qemu-storage-daemon.
struct SlowDisk {
    server: Running,
    device: PathBuf,
}

impl SlowDisk {
    fn start(ground: &ScenarioContext, image: &Image) -> Result<SlowDisk> {
        let file = ground.path("slow.img");
        File::create_new(&file).with_context(|| format!("cannot make {}", file.display()))?;
        let mut command = ground.guest.command("qemu-storage-daemon");
        command.args(["--object", "throttle-group,id=slow,x-iops-write=1"]);
        command.args(["--blockdev", &format!("driver=file,filename={},node-name=image", image.path.display())]);
        command.args(["--blockdev", "driver=throttle,throttle-group=slow,file=image,node-name=disk"]);
        command.args(["--export", &format!("fuse,id=slow,node-name=disk,mountpoint={},writable=on", file.display())]);
        // From here on, the drop cleans up.
        let mut slow = SlowDisk { server: Running::start("the slow disk", &command)?, device: PathBuf::new() };
        let bytes = image.path.metadata()?.len();
        if !slow.server.wait_until(CLIENT_LIMIT, |_| Ok(file.metadata()?.len() == bytes))? {
            let why = slow.server.stderr()?;
            return Err(Missing(format!("no FUSE file can be mounted here: {}", why.trim())).into());
        }
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        match process::run("losetup", &losetup, CLIENT_LIMIT) {
            Ok(ended) if ended.status.success() => slow.device = ended.stdout.trim().into(),
            Ok(ended) => return Err(Missing(format!("no loop device can be had here: {}", ended.said())).into()),
            Err(error) => return Err(Missing(format!("no loop device can be had here: {error:#}")).into()),
        }
        Ok(slow)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        if self.device.as_os_str() != "" {
            let _ = process::run("losetup", Command::new("losetup").arg("--detach").arg(&self.device), CLIENT_LIMIT);
        }
        // On SIGTERM, the server removes its mount.
        let _ = self.server.ask_to_end();
        let _ = self.server.wait_until(STOP_LIMIT, |_| Ok(false));
    }
}
