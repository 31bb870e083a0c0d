//! I/O of a Linux guest on its virtio disk, and the resulting content of the image on the host.
//!
//! A boot takes seconds, so one boot checks several properties. Rates in an emulated guest are meaningless and not
//! checked.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::nvme_tcp::{self, HOST_NQN, NQN};
use super::{CLIENT_LIMIT, Image, KIB, MIB, RunsIn, Scenario, ScenarioContext, crash};
use crate::process::{run, succeed};
use crate::server::{Export, OfferedDevice, ReadyServer};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "guest-queues",
        sentence: "a guest has as many hardware queues as the smaller of its processors and the export's queues",
        place: RunsIn::Guest,
        ours: false,
        tell: queues,
    },
    Scenario {
        name: "guest-idle",
        sentence: "with a guest's sixteen queues attached and nothing to do, the daemon uses less than 1 % of a processor",
        place: RunsIn::Guest,
        ours: false,
        tell: idle,
    },
    Scenario {
        name: "guest-serial",
        sentence: "a guest sees the serial number and the size that were set",
        place: RunsIn::Guest,
        ours: true,
        tell: serial,
    },
    Scenario {
        name: "guest-file-system",
        sentence: "files in an ext4 made by the guest have the same sums before and after a remount, and on the host",
        place: RunsIn::Guest,
        ours: false,
        tell: file_system,
    },
    Scenario {
        name: "guest-fio-verify",
        sentence: "fio, writing from several jobs at once, finds every block's checksum intact",
        place: RunsIn::Guest,
        ours: false,
        tell: fio_verify,
    },
    Scenario {
        name: "guest-packed",
        sentence: "a guest with packed rings finds every block's checksum intact, also after its driver was reset",
        place: RunsIn::Guest,
        ours: true,
        tell: packed,
    },
    Scenario {
        name: "guest-in-order",
        sentence: "a guest whose rings keep the order, split and packed, finds every block's checksum intact, also after its driver was reset",
        place: RunsIn::Guest,
        ours: true,
        tell: in_order,
    },
    Scenario {
        name: "guest-migrated",
        sentence: "a guest that moves to another QEMU amid its I/O, split or packed, finds every block's checksum intact",
        place: RunsIn::Guest,
        ours: true,
        tell: migrated,
    },
    Scenario {
        name: "guest-migrated-remote",
        sentence: "a guest that moves to another daemon of the same remote disk amid its I/O finds every checksum intact",
        place: RunsIn::Guest,
        ours: true,
        tell: migrated_remote,
    },
    Scenario {
        name: "guest-discard",
        sentence: "blkdiscard gives blocks back to the host, and zeroes out what it is told to",
        place: RunsIn::Guest,
        ours: false,
        tell: discard,
    },
    Scenario {
        name: "guest-boots-from-disk",
        sentence: "a guest boots from a root on the disk, and what it leaves there is there",
        place: RunsIn::Guest,
        ours: false,
        tell: boots_from_disk,
    },
    Scenario {
        name: "guest-restarted",
        sentence: "a guest that is started again, and one that reboots, find their data with the same daemon",
        place: RunsIn::Guest,
        ours: false,
        tell: restarted,
    },
    Scenario {
        name: "guest-daemon-sigterm",
        sentence: "a daemon stopped amid a guest's writes loses none that the guest saw acknowledged and synced",
        place: RunsIn::Guest,
        ours: false,
        tell: daemon_sigterm,
    },
    Scenario {
        name: "guest-write-cache",
        sentence: "a guest can turn the disk's write cache off and on, and writes both ways",
        place: RunsIn::Guest,
        ours: false,
        tell: write_cache,
    },
    Scenario {
        name: "guest-read-only",
        sentence: "a guest is told that a read-only disk is one, and cannot write to it",
        place: RunsIn::Guest,
        ours: false,
        tell: read_only,
    },
];

fn queues(ground: &ScenarioContext) -> Result<()> {
    let (_image, export, server) = ground.serve_image(16 * MIB, 4)?;
    for processors in [4, 2] {
        let vm = Vm::new(ground.guest, processors).disk(&export.socket, 4);
        // The request of each CPU uses its own queue.
        let task = "set -e
            modprobe virtio_blk
            ls /sys/block/vda/mq | wc -l
            for cpu in $(ls /sys/block/vda/mq); do
                taskset -c $cpu dd if=/dev/vda of=/dev/null bs=64k count=4 iflag=direct 2>/dev/null
            done";
        let output = vm.succeed(task)?;
        ensure!(
            output.trim() == processors.to_string(),
            "{processors} processors, 4 queues, and the guest has {output}"
        );
    }
    server.stop()?;
    Ok(())
}

fn idle(ground: &ScenarioContext) -> Result<()> {
    // Four disks of four queues: booting a machine with sixteen CPUs takes most of a minute.
    let mut exports = Vec::new();
    let mut vm = Vm::new(ground.guest, 4);
    for number in 0..4 {
        let image = ground.image(&format!("{number}.img"), 16 * MIB)?;
        let export = ground.export(OfferedDevice::File(image.path), &format!("{number}.sock"), 4);
        vm = vm.disk(&export.socket, 4);
        exports.push(export);
    }
    let server = ground.serve(&exports)?;
    let mut machine = vm.start("modprobe virtio_blk && ls -d /sys/block/vd?/mq/* | wc -l && sleep 100")?;
    machine.wait_for_output(|output| output.contains('\n'))?;
    ensure!(machine.output().trim() == "16", "the guest has {} queues", machine.output());
    super::check_idle(&server)?;
    drop(machine);
    server.stop()?;
    Ok(())
}

fn serial(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 24 * MIB)?;
    let mut export = ground.export(OfferedDevice::File(image.path), "disk.sock", 1);
    export.serial = Some("abc-123");
    let server = ground.serve(std::slice::from_ref(&export))?;
    let vm = Vm::new(ground.guest, 1).disk(&export.socket, 1);
    let output = vm.succeed("modprobe virtio_blk && cat /sys/block/vda/serial && echo && cat /sys/block/vda/size")?;
    let words: Vec<_> = output.split_whitespace().collect();
    ensure!(words == ["abc-123", "49152"], "the guest sees {words:?}");
    server.stop()?;
    Ok(())
}

fn file_system(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(96 * MIB, 2)?;
    let task = "set -e
        modprobe -a virtio_blk ext4
        mkfs.ext4 -q /dev/vda
        mkdir /tmp/disk
        mount -t ext4 /dev/vda /tmp/disk
        cd /tmp/disk
        mkdir -p deep/er
        for kib in 1 3 64 257 1024 5000; do
            dd if=/dev/urandom of=deep/er/$kib bs=1k count=$kib 2>/dev/null
        done
        cd deep/er && sha256sum * >/tmp/sums && cd /
        umount /tmp/disk
        mount -t ext4 /dev/vda /tmp/disk
        cd /tmp/disk/deep/er && sha256sum -c -s /tmp/sums && cd /
        umount /tmp/disk
        cat /tmp/sums";
    let output = Vm::new(ground.guest, 2).disk(&export.socket, 2).succeed(task)?;
    let sums = parse_sums(&output);
    ensure!(sums.len() == 6, "the guest should have summed 6 files:\n{output}");
    // Checked while the daemon runs, too: the content on the host must not depend on its end.
    check_file_system(ground, &image, &sums)?;
    server.stop()?;
    check_file_system(ground, &image, &sums)
}

/// Checks an ext4 file system with the host's tools, and the checksums of the files in deep/er.
fn check_file_system(ground: &ScenarioContext, image: &super::Image, sums: &BTreeMap<String, String>) -> Result<()> {
    let mut check = ground.guest.command("e2fsck");
    succeed("e2fsck", check.args(["-f", "-n"]).arg(&image.path), CLIENT_LIMIT)?;
    for (name, sum) in sums {
        let copy = ground.path("copy");
        let mut dump = ground.guest.command("debugfs");
        dump.args(["-R", &format!("dump /deep/er/{name} {}", copy.display())]).arg(&image.path);
        succeed("debugfs", &dump, CLIENT_LIMIT)?;
        let host = succeed("sha256sum", Command::new("sha256sum").arg(&copy), CLIENT_LIMIT)?;
        ensure!(host.starts_with(sum.as_str()), "file {name}: the guest's sum is {sum}, the host's {host}");
        std::fs::remove_file(&copy).context("debugfs left no copy")?;
    }
    Ok(())
}

/// Lines of `SUM  NAME`.
fn parse_sums(text: &str) -> BTreeMap<String, String> {
    text.lines().filter_map(|line| line.split_once("  ")).map(|(sum, name)| (name.to_owned(), sum.to_owned())).collect()
}

fn fio_verify(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(64 * MIB, 4)?;
    let task = "modprobe virtio_blk && fio --filename=/dev/vda --direct=1 --ioengine=libaio --thread --group_reporting \
        --verify=crc32c --verify_fatal=1 --iodepth=16 --output-format=terse --output=/dev/null \
        --name=small --rw=randwrite --bs=4k --size=4m --numjobs=4 --offset_increment=8m \
        --name=mixed --rw=randwrite --bsrange=4k-128k --size=8m --offset=40m \
        --name=sectors --rw=randwrite --bs=512 --size=256k --offset=56m && echo verified";
    let output = Vm::new(ground.guest, 4).disk(&export.socket, 4).succeed(task)?;
    ensure!(output.trim() == "verified", "fio said:\n{output}");
    let written = image.allocated()?;
    ensure!(written >= 24 * MIB, "only {written} bytes of what fio wrote are in the image");
    server.stop()?;
    Ok(())
}

fn packed(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(64 * MIB, 4)?;
    let output = Vm::new(ground.guest, 4).disk(&export.socket, 4).packed().succeed(&verified(&[RING_PACKED]))?;
    let lines: Vec<_> = output.lines().collect();
    ensure!(lines == ["features 1", "verified"], "the guest said:\n{output}");
    ensure!(image.allocated()? >= 24 * MIB, "what fio wrote is not in the image");
    server.stop()?;
    Ok(())
}

fn in_order(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(64 * MIB, 2)?;
    for (packed, features) in [(false, "features 01"), (true, "features 11")] {
        let vm = Vm::new(ground.guest, 2).disk(&export.socket, 2).in_order();
        let output = if packed { vm.packed() } else { vm }.succeed(&verified(&[RING_PACKED, IN_ORDER]))?;
        let lines: Vec<_> = output.lines().collect();
        ensure!(lines == [features, "verified"], "the guest said:\n{output}");
    }
    ensure!(image.allocated()? >= 24 * MIB, "what fio wrote is not in the image");
    server.stop()?;
    Ok(())
}

/// Position of a feature's bit in the guest's list, counted from one.
const RING_PACKED: u32 = 35;
const IN_ORDER: u32 = 36;

/// Guest task that prints these features, writes and verifies, and repeats this after a driver reset.
fn verified(features: &[u32]) -> String {
    let features = features.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    // The driver is unbound and bound again, so the rings restart; odd lengths use indirect tables and chains.
    let load = "load() {
            fio --filename=/dev/vda --direct=1 --ioengine=libaio --thread --group_reporting --randseed=$1 \
                --verify=crc32c --verify_fatal=1 --iodepth=16 --output-format=terse --output=/dev/null \
                --name=small --rw=randwrite --bs=4k --size=4m --numjobs=4 --offset_increment=8m \
                --name=mixed --rw=randwrite --bsrange=4k-128k --size=8m --offset=40m \
                --name=sectors --rw=randwrite --bs=512 --size=256k --offset=56m
        }
        sum() { sha256sum /dev/vda | cut -d ' ' -f 1; }
        load 1
        before=$(sum)
        device=$(basename $(readlink /sys/block/vda/device))
        echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
        echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
        test $(sum) = $before
        load 2
        echo verified";
    format!("set -e\nmodprobe virtio_blk\necho features $(cut -c {features} /sys/block/vda/device/features)\n{load}")
}

fn migrated(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 64 * MIB)?;
    let device = OfferedDevice::Spec(format!("file:{}?share=on", image.path.display()));
    let exports = ["from.sock", "to.sock"].map(|socket| ground.export(device.clone(), socket, 2));
    let server = ground.serve(&exports)?;
    for packed in [false, true] {
        migrate(ground, &image, &exports, packed)?;
    }
    server.stop()?;
    Ok(())
}

fn migrated_remote(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 64 * MIB)?;
    let address = nvme_tcp::free_address()?;
    let mut target = ground.program.command()?;
    target.args(["serve", "--device", &format!("file:{}", image.path.display())]);
    target.args(["--export", &format!("nvme-tcp://{address}?nqn={NQN}")]);
    let target = ReadyServer::start_command(&target, &[], &ground.log)?;
    let exports = ["from", "to"].map(|side| {
        let spec = format!("nvme-tcp://{address}/{NQN}?host_nqn={HOST_NQN}-{side}");
        ground.export(OfferedDevice::Spec(spec), &format!("{side}.sock"), 2)
    });
    let daemons = [ground.serve(&exports[..1])?, ground.serve(&exports[1..])?];
    migrate(ground, &image, &exports, false)?;
    for server in daemons.into_iter().chain([target]) {
        server.stop()?;
    }
    Ok(())
}

/// Moves a guest from a QEMU at the first export to one at the second.
fn migrate(ground: &ScenarioContext, image: &Image, exports: &[Export; 2], packed: bool) -> Result<()> {
    // The daemon writes verified data into the guest's memory, so a lost page is a wrong checksum.
    let task = format!(
        "modprobe virtio_blk
        round=0
        until {ends}; do
            round=$((round + 1))
            fio --filename=/dev/vda --direct=1 --ioengine=libaio --thread --group_reporting --randseed=$round \
                --verify=crc32c --verify_fatal=1 --iodepth=16 --output-format=terse --output=/dev/null \
                --name=small --rw=randwrite --bs=4k --size=2m --numjobs=2 --offset_increment=8m \
                --name=mixed --rw=randwrite --bsrange=4k-128k --size=4m --offset=40m || exit 1
            echo round $round
        done
        echo verified",
        ends = crash::is_ended("/dev/vda")
    );
    let vm = |export: &Export| {
        let vm = Vm::new(ground.guest, 2).disk(&export.socket, 2);
        if packed { vm.packed() } else { vm }
    };
    let way = ground.path(if packed { "way-packed" } else { "way" });
    crash::set_ended(image, false)?;
    let mut there = vm(&exports[1]).incoming(way.clone()).start(&task)?;
    let mut here = vm(&exports[0]).start(&task)?;
    here.wait_for_output(|output| output.lines().count() >= 2)?;
    here.migrate(&way)?;
    let before = here.output();
    drop(here);
    // The guest was stopped only after its migration, and has continued since.
    there.wait_for_output(|output| output.contains("round"))?;
    crash::set_ended(image, true)?;
    let after = there.wait()?.success()?;
    ensure!(!before.contains("verified") && after.trim_end().ends_with("verified"), "{before}\nthen\n{after}");
    Ok(())
}

fn discard(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(32 * MIB, 2)?;
    let task = "set -e
        modprobe virtio_blk
        cd /sys/block/vda/queue
        test $(cat discard_max_bytes) -gt 0
        test $(cat write_zeroes_max_bytes) -gt 0
        tr '\\0' '\\377' </dev/zero | dd of=/dev/vda bs=64k count=256 iflag=fullblock 2>/dev/null
        sync
        /usr/sbin/blkdiscard -o 4M -l 4M /dev/vda
        /usr/sbin/blkdiscard -z -o 10M -l 1M /dev/vda
        sync
        echo 3 >/proc/sys/vm/drop_caches
        left() { dd if=/dev/vda bs=1M skip=$1 count=$2 2>/dev/null | tr -d '\\0' | wc -c; }
        echo $(left 0 4) $(left 4 4) $(left 8 2) $(left 10 1) $(left 11 5) $(left 16 16)";
    let output = Vm::new(ground.guest, 2).disk(&export.socket, 2).succeed(task)?;
    ensure!(output.trim() == "4194304 0 2097152 0 5242880 0", "the guest counts as not zero: {output}");
    for (offset, length, byte) in [(0, 4, 0xff), (4, 4, 0), (8, 2, 0xff), (10, 1, 0), (11, 5, 0xff), (16, 16, 0)] {
        image.check_pattern(offset * MIB, length * MIB, byte)?;
    }
    let allocated = image.allocated()?;
    ensure!(allocated <= 12 * MIB + 64 * KIB, "4 of 16 MiB were discarded, and {allocated} bytes are still allocated");
    server.stop()?;
    Ok(())
}

fn boots_from_disk(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("root.img", 384 * MIB)?;
    let mut make = ground.guest.command("mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d"]).arg(ground.guest.root_tree()).arg(&image.path);
    succeed("mke2fs", &make, CLIENT_LIMIT)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "root.sock", 2);
    let server = ground.serve(std::slice::from_ref(&export))?;
    let vm = Vm::new(ground.guest, 2).disk(&export.socket, 2).boot_from_disk();
    let output = vm.succeed("grep ' / ' /proc/mounts && fio --version && echo 'the guest was here' >/trace && sync")?;
    ensure!(output.starts_with("/dev/vda / ext4") || output.contains("\n/dev/vda / ext4"), "the root is:\n{output}");
    let again = vm.succeed("cat /trace")?;
    ensure!(again.trim() == "the guest was here", "the second boot finds: {again}");
    server.stop()?;
    let mut check = ground.guest.command("e2fsck");
    let checked = run("e2fsck", check.args(["-f", "-n"]).arg(&image.path), CLIENT_LIMIT)?;
    ensure!(checked.status.success(), "the root's file system is damaged:\n{}", checked.said());
    let mut show = ground.guest.command("debugfs");
    let trace = succeed("debugfs", show.args(["-R", "cat /trace"]).arg(&image.path), CLIENT_LIMIT)?;
    ensure!(trace.trim() == "the guest was here", "the host finds: {trace}");
    Ok(())
}

fn restarted(ground: &ScenarioContext) -> Result<()> {
    let (image, export, mut server) = ground.serve_image(16 * MIB, 2)?;
    let vm = Vm::new(ground.guest, 2).disk(&export.socket, 2);
    vm.succeed("modprobe virtio_blk && echo first | dd of=/dev/vda bs=512 seek=8 conv=sync,fsync 2>/dev/null")?;
    server.check_alive()?;
    // Another queue count, as after a change of the machine, and a reboot of the same QEMU.
    let task = "modprobe virtio_blk
        block() { dd if=/dev/vda bs=512 skip=$1 count=1 2>/dev/null | head -n 1 | tr -d '\\0'; }
        if [ \"$(block 16)\" != second ]; then
            echo second | dd of=/dev/vda bs=512 seek=16 conv=sync,fsync 2>/dev/null
            echo before: $(block 8)
            reboot -f
            sleep 60
        fi
        echo after: $(block 8) $(block 16)";
    let output = Vm::new(ground.guest, 1).disk(&export.socket, 1).may_reboot().succeed(task)?;
    let lines: Vec<_> = output.lines().collect();
    ensure!(lines == ["before: first", "after: first second"], "the guest says: {lines:?}");
    ensure!(image.read(8 * 512, 6)? == b"first\n", "the image does not hold what the first guest wrote");
    server.check_alive()?;
    server.stop()?;
    Ok(())
}

fn daemon_sigterm(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(64 * MIB, 2)?;
    // The lower half gets numbers one by one, each printed only after a sync. The upper half gets many concurrent
    // writes, so that some are in flight at the end.
    let task = "modprobe virtio_blk
        fio --name=load --filename=/dev/vda --offset=32m --size=32m --direct=1 --ioengine=libaio --iodepth=16 \
            --thread --rw=randwrite --bs=4k --time_based --runtime=100 --output=/dev/null &
        number=0
        while printf '%04096d' $number | dd of=/dev/vda bs=4k seek=$number conv=notrunc,fsync 2>/dev/null; do
            echo $number
            number=$((number + 1))
        done
        sleep 100";
    let mut machine = Vm::new(ground.guest, 2).disk(&export.socket, 2).start(task)?;
    machine.wait_for_output(|output| output.lines().count() >= 40)?;
    server.stop()?;
    // The guest may still print writes acknowledged just before the end.
    std::thread::sleep(Duration::from_millis(500));
    let output = machine.output();
    drop(machine);
    // Text after the last line break may be an incomplete number.
    let whole = output.rsplit_once('\n').map_or("", |(whole, _)| whole);
    for (expected, line) in whole.lines().enumerate() {
        ensure!(line == expected.to_string(), "the guest's {expected}th line is {line:?}");
        let block = image.read(expected as u64 * 4 * KIB, 4 * KIB)?;
        ensure!(
            block == format!("{expected:04096}").as_bytes(),
            "write {expected} was acknowledged and synced, and is not in the image"
        );
    }
    // The lock was released with the daemon, and the image can be served again.
    ground.serve(std::slice::from_ref(&export))?.stop()?;
    Ok(())
}

fn write_cache(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(16 * MIB, 1)?;
    let task = "set -e
        modprobe virtio_blk
        show() { cat /sys/block/vda/cache_type /sys/block/vda/queue/write_cache; }
        fill() { tr '\\0' \"$1\" </dev/zero | dd of=/dev/vda bs=4k seek=$2 count=64 oflag=direct iflag=fullblock conv=notrunc; }
        show
        echo 'write through' >/sys/block/vda/cache_type
        show
        fill '\\021' 0 2>/dev/null
        echo 'write back' >/sys/block/vda/cache_type
        show
        fill '\\042' 64 2>/dev/null
        sync";
    let output = Vm::new(ground.guest, 1).disk(&export.socket, 1).succeed(task)?;
    let lines: Vec<_> = output.lines().collect();
    let (back, through) = ("write back", "write through");
    ensure!(lines.len() == 6, "the guest says: {lines:?}");
    // The initial mode is the server's choice; blkyard offers the cache.
    ensure!(lines[..2] == [back, back] || !ground.program.is_ours(), "the guest's settings are at first: {lines:?}");
    ensure!(lines[2..] == [through, through, back, back], "the guest's settings are: {lines:?}");
    image.check_pattern(0, 256 * KIB, 0x11)?;
    image.check_pattern(256 * KIB, 256 * KIB, 0x22)?;
    server.stop()?;
    Ok(())
}

fn read_only(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    image.write(0, &[b'r'; 4096])?;
    let export = ground.export(OfferedDevice::ReadOnly(image.path.clone()), "disk.sock", 1);
    let server = ground.serve(std::slice::from_ref(&export))?;
    let task = "modprobe virtio_blk
        cat /sys/block/vda/ro
        dd if=/dev/vda bs=1 count=4 2>/dev/null; echo
        /usr/sbin/blockdev --setrw /dev/vda
        echo w | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null || echo refused";
    let output = Vm::new(ground.guest, 1).disk(&export.socket, 1).succeed(task)?;
    let lines: Vec<_> = output.lines().collect();
    ensure!(lines == ["1", "rrrr", "refused"], "the guest says: {lines:?}");
    image.check_pattern(0, 4096, b'r')?;
    server.stop()?;
    Ok(())
}
