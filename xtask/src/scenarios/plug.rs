//! Disks that a guest's driver releases and takes again, because it is told to or because they are unplugged.

use std::collections::BTreeMap;
use std::{fmt, fs};

use anyhow::{Context, Result, ensure};

use super::{KIB, MIB, RunsIn, Scenario, ScenarioContext};
use crate::server::{self, OfferedDevice, ReadyServer};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "plug-reprobe",
        sentence: "a driver that leaves its disk and takes it again, 100 times under load, loses nothing and costs the daemon nothing",
        place: RunsIn::Guest,
        ours: true,
        tell: reprobe,
    },
    Scenario {
        name: "plug-pulled",
        sentence: "a disk pulled under load takes only itself away, the daemon serves others, and plugged in again the disk is there",
        place: RunsIn::Guest,
        ours: false,
        tell: pulled,
    },
];

/// Writes and verifies a disk repeatedly until stopped.
const LOAD: &str = "load() {
        while [ ! -e /tmp/stop ]; do
            fio --name=load --filename=/dev/$1 --direct=1 --ioengine=libaio --thread --iodepth=16 --rw=randwrite --bs=4k \\
                --size=1m --loops=4 --allow_file_create=0 --disk_util=0 --verify=crc32c --verify_fatal=1 \\
                --output-format=terse --output=/dev/null || return 1
        done
    }";

/// Number of driver resets. The two ring formats alternate.
const PROBES: u64 = 100;
/// Round of the first resource check, after each action was done twice.
const WARM: u64 = 4;
/// Offset of the host's acknowledgement of a check: two sectors of the loaded disk beyond fio's writes.
const SAID: u64 = 8 * MIB;
/// Offset of the writes in flight when the driver leaves.
const LOST: u64 = 8 * MIB;

fn reprobe(ground: &ScenarioContext) -> Result<()> {
    let mut exports = Vec::new();
    let mut images = Vec::new();
    for leaf in ["packed", "split", "load"] {
        let image = ground.image(&format!("{leaf}.img"), 16 * MIB)?;
        exports.push(ground.export(OfferedDevice::File(image.path.clone()), &format!("{leaf}.sock"), 2));
        images.push(image);
    }
    let server = ground.serve(&exports)?;
    let task = format!(
        "set -e
        modprobe virtio_blk
        {LOAD}
        load vdc && echo loaded >/tmp/load &
        wait_for_host() {{
            until dd if=/dev/vdc bs=512 skip=$(({SAID} / 512 + $1)) count=1 iflag=direct 2>/dev/null | grep -q go; do sleep 0.1; done
        }}
        packed=$(basename $(readlink -f /sys/block/vda/device))
        split=$(basename $(readlink -f /sys/block/vdb/device))
        # The daemon holds a ring for each queue that has signalled since its driver came.
        use_all_queues() {{
            for disk in $(ls /sys/block | grep ^vd); do
                for cpu in 0 1; do
                    taskset -c $cpu dd if=/dev/$disk of=/dev/null bs=512 count=1 iflag=direct 2>/dev/null
                done
            done
        }}
        probe=0
        while [ $probe -lt {PROBES} ]; do
            device=$packed
            if [ $((probe % 2)) = 1 ]; then device=$split; fi
            disk=$(ls /sys/bus/virtio/devices/$device/block)
            # Opened before the driver leaves. What becomes of these writes is its affair.
            exec 3<>/dev/$disk
            dd if=/dev/zero bs=64k count=16 seek=$(({LOST} / 65536)) conv=notrunc,fsync >&3 2>/dev/null &
            writer=$!
            echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
            exec 3>&-
            wait $writer || true
            echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
            disk=$(ls /sys/bus/virtio/devices/$device/block)
            printf '%04096d' $probe | dd of=/dev/$disk bs=4k seek=$probe conv=notrunc oflag=direct iflag=fullblock 2>/dev/null
            before=$((probe < 2 ? probe : probe - 2))
            test $(dd if=/dev/$disk bs=4k skip=$before count=1 iflag=direct 2>/dev/null) = $(printf '%04096d' $before)
            probe=$((probe + 1))
            if [ $probe = {WARM} ]; then use_all_queues; echo warm; wait_for_host 0; fi
        done
        use_all_queues
        echo probed
        wait_for_host 1
        touch /tmp/stop
        wait
        cat /tmp/load"
    );
    let vm = Vm::new(ground.guest, 2).disk(&exports[0].socket, 2).packed();
    let mut machine = vm.disk(&exports[1].socket, 2).disk(&exports[2].socket, 2).start(&task)?;
    machine.wait_for_output(|output| output.contains("warm\n"))?;
    let before = HeldResources::by(&server)?;
    images[2].write(SAID, b"go")?;
    machine.wait_for_output(|output| output.contains("probed\n"))?;
    let after = HeldResources::by(&server)?;
    images[2].write(SAID + 512, b"go")?;
    let output = machine.wait()?.success()?;
    ensure!(output == "warm\nprobed\nloaded\n", "the guest says:\n{output}");
    after.check_against(&before)?;
    server.stop()?;
    for probe in 0..PROBES {
        let block = images[(probe % 2) as usize].read(probe * 4 * KIB, 4 * KIB)?;
        ensure!(block == format!("{probe:04096}").as_bytes(), "the block of probe {probe} is not in its image");
    }
    Ok(())
}

/// Resources of a process that could leak.
struct HeldResources {
    /// What descriptors refer to, as the kernel names it.
    descriptors: Vec<String>,
    /// Names of mappings. Those of memory without a name are empty.
    mappings: Vec<String>,
    /// Private memory, without that shared by guests.
    private_kib: u64,
}

impl HeldResources {
    fn by(server: &ReadyServer) -> Result<Self> {
        let of = |leaf: &str| format!("/proc/{}/{leaf}", server.id());
        let read = |leaf: &str| fs::read_to_string(of(leaf)).with_context(|| format!("cannot read {}", of(leaf)));
        let status = read("status")?;
        let private = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next());
        let mut descriptors = Vec::new();
        for entry in fs::read_dir(of("fd")).with_context(|| format!("cannot read {}", of("fd")))? {
            // A descriptor that was closed in between refers to nothing.
            if let Ok(target) = fs::read_link(entry?.path()) {
                descriptors.push(target.display().to_string());
            }
        }
        let name = |line: &str| line.split_whitespace().skip(5).collect::<Vec<_>>().join(" ");
        Ok(Self {
            descriptors,
            mappings: read("maps")?.lines().map(name).collect(),
            private_kib: private.context("a process without memory")?.parse()?,
        })
    }

    /// Checks that the resources have not grown since an equal state. The allocator may keep a few pages.
    fn check_against(&self, before: &Self) -> Result<()> {
        let fine = self.descriptors.len() <= before.descriptors.len()
            && self.mappings.len() <= before.mappings.len() + 8
            && self.private_kib <= before.private_kib + 1024;
        ensure!(
            fine,
            "the daemon held {before} after {WARM} probes and {self} after {PROBES}\n\
             descriptors: {}\nmappings: {}",
            changes(&before.descriptors, &self.descriptors),
            changes(&before.mappings, &self.mappings),
        );
        Ok(())
    }
}

impl fmt::Display for HeldResources {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, mappings, private_kib } = self;
        write!(formatter, "{} descriptors, {} mappings, {private_kib} KiB", descriptors.len(), mappings.len())
    }
}

/// How many more or fewer of each name `after` has. Digits, such as a socket's number, do not count.
fn changes(before: &[String], after: &[String]) -> String {
    let mut counts = BTreeMap::new();
    for (names, step) in [(before, -1), (after, 1)] {
        for name in names {
            *counts.entry(name.replace(char::is_numeric, "")).or_insert(0) += step;
        }
    }
    counts.retain(|_, count: &mut i32| *count != 0);
    let changes: Vec<_> = counts.iter().map(|(name, count)| format!("{count:+} of {name:?}")).collect();
    changes.join(", ")
}

/// Number of unplugs.
const PULLS: u8 = 3;

fn pulled(ground: &ScenarioContext) -> Result<()> {
    const QUEUES: u16 = 2;
    const KEPT: usize = 0;
    const PULLED: usize = 1;
    let (image, kept) = (ground.image("pulled.img", 16 * MIB)?, ground.image("kept.img", 16 * MIB)?);
    let exports = [
        ground.export(OfferedDevice::File(kept.path), "kept.sock", QUEUES),
        ground.export(OfferedDevice::File(image.path.clone()), "pulled.sock", QUEUES),
    ];
    let mut server = ground.serve(&exports)?;
    // The unplugged disk has the same name each time, since the driver assigns the first free one. Its load does not
    // read back: an unplugged disk has zero sectors, and a reader gets the end of the file instead of an error.
    let task = format!(
        "set -e
        modprobe virtio_blk
        {LOAD}
        load vda && echo kept >/tmp/load &
        until_true() {{ until \"$@\"; do sleep 0.1; done; }}
        for pull in $(seq {PULLS}); do
            until_true test -b /dev/vdb
            # What another client has written meanwhile.
            if [ $pull -gt 1 ]; then
                test $(dd if=/dev/vdb bs=4k skip=2048 count=16 iflag=direct 2>/dev/null | tr -cd \"\\\\$pull\" | wc -c) = 65536
            fi
            echo plugged $pull
            fio --name=lost --filename=/dev/vdb --direct=1 --ioengine=libaio --thread --iodepth=16 --rw=randwrite --bs=4k \
                --size=1m --time_based --runtime=1000 --allow_file_create=0 --output=/dev/null 2>/dev/null || echo lost $pull
            until_true test ! -e /dev/vdb
        done
        until_true test -b /dev/vdb
        touch /tmp/stop
        wait
        rm /tmp/stop
        fio --name=last --filename=/dev/vdb --direct=1 --ioengine=libaio --thread --iodepth=16 --rw=randwrite --bs=4k \
            --size=1m --verify=crc32c --verify_fatal=1 --output-format=terse --output=/dev/null
        cat /tmp/load
        dmesg | grep -c 'error.*vda' || true"
    );
    let vm = Vm::new(ground.guest, 2).disk(&exports[KEPT].socket, QUEUES).disk_in_port(&exports[PULLED].socket, QUEUES);
    let mut machine = vm.start(&task)?;
    for pull in 1..=PULLS {
        image.write(0, &[0; 4096])?;
        machine.wait_for_output(|output| output.contains(&format!("plugged {pull}\n")))?;
        machine.wait_until(|| Ok(image.read(0, 4 * KIB)? != [0; 4096])).context("of the load")?;
        machine.pull(PULLED).with_context(|| format!("pull {pull}"))?;
        machine.wait_for_output(|output| output.contains(&format!("lost {pull}\n")))?;
        server.check_alive()?;
        machine.wait_until(|| Ok(!server::has_client(&exports[PULLED].socket)))?;
        let write = format!("write -P {} 8M 64k", pull + 1);
        ground.qemu_io(&exports[PULLED].socket, &[write, "flush".into()]).context("another front-end")?;
        machine.plug(PULLED, &exports[PULLED].socket, QUEUES).with_context(|| format!("after pull {pull}"))?;
    }
    let output = machine.wait()?.success()?;
    ensure!(output.ends_with("\nkept\n0\n"), "the guest says:\n{output}");
    server.stop()?;
    Ok(())
}
