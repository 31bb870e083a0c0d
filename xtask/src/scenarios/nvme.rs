//! NVMe over vfio-user: drivers of others on the controller of `blkyard serve`, in a QEMU with `vfio-user-pci`.
//!
//! SeaBIOS and Linux have drivers of their own, nvme-cli reads what they do not. QEMU's client connects once: with the
//! end of the daemon its machine ends, too, so no scenario restarts a daemon under a guest. It does not notice a
//! takeover.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::control::succeed;
use super::takeover::{HEIRS, take_over};
use super::{CLIENT_LIMIT, Image, KIB, MIB, RunsIn, Scenario, ScenarioContext, crash};
use crate::process::{self, Running};
use crate::server::ReadyServer;
use crate::vm::{Machine, Vm, controller_option};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "nvme-firmware",
        sentence: "a machine's firmware finds an NVMe export and starts what is on it, and memory that is not shared is named in the log",
        place: RunsIn::Host,
        ours: true,
        tell: firmware,
    },
    Scenario {
        name: "nvme-guest",
        sentence: "Linux and nvme-cli find an NVMe export as its disk is, four queues verify through resets of controller and function, files live in a file system, and it grows",
        place: RunsIn::Guest,
        ours: true,
        tell: guest,
    },
    Scenario {
        name: "nvme-namespaces",
        sentence: "Linux finds three disks as namespaces of one controller, two verify together over four queues and through resets, and one of them grows",
        place: RunsIn::Guest,
        ours: true,
        tell: namespaces,
    },
    Scenario {
        name: "nvme-few-queues",
        sentence: "two namespaces of a controller with two I/O queues are served on to Linux on four queues, verify together, and outlive a killed server",
        place: RunsIn::Guest,
        ours: true,
        tell: few_queues,
    },
    Scenario {
        name: "nvme-crash",
        sentence: "what a guest has flushed to an NVMe export is there after the machine was reset and after it was killed, both amid I/O",
        place: RunsIn::Guest,
        ours: true,
        tell: crash,
    },
    Scenario {
        name: "nvme-hung",
        sentence: "a machine that hangs amid I/O on its NVMe export holds up no other and no change, and goes on when it wakes",
        place: RunsIn::Guest,
        ours: true,
        tell: hung,
    },
    Scenario {
        name: "takeover-nvme",
        sentence: "a guest goes on with its NVMe export as eight daemons take over one from another amid its writes, and fio finds every checksum intact",
        place: RunsIn::Guest,
        ours: true,
        tell: takeover,
    },
];

const SERIAL: &str = "guest-nvme";

/// Images of 64 MiB, served as NVMe controllers of four queues or as namespaces of one.
struct NvmeDisks {
    images: Vec<Image>,
    sockets: Vec<PathBuf>,
    server: ReadyServer,
}

fn serve(ground: &ScenarioContext, count: usize) -> Result<NvmeDisks> {
    let sockets: Vec<_> = (0..count).map(|number| ground.path(&format!("{number}.sock"))).collect();
    let device = |number: usize| {
        let options = format!("?queues=4&serial={SERIAL}");
        (String::new(), format!("vfio-user:{}{options}", sockets[number].display()))
    };
    serve_by(ground, count, &sockets, device)
}

/// Serves images with the options of device and the export that these numbers have.
fn serve_by(
    ground: &ScenarioContext,
    count: usize,
    sockets: &[PathBuf],
    device: impl Fn(usize) -> (String, String),
) -> Result<NvmeDisks> {
    let mut command = ground.program.command()?;
    command.arg("serve").arg("--control").arg(ground.path("control.sock"));
    let mut images = Vec::new();
    for number in 0..count {
        let image = ground.image(&format!("{number}.img"), 64 * MIB)?;
        let (options, export) = device(number);
        command.args(["--device", &format!("file:{}{options}", image.path.display()), "--export", &export]);
        images.push(image);
    }
    let server = ReadyServer::start_command(&command, sockets, &ground.log)?;
    Ok(NvmeDisks { images, sockets: sockets.to_vec(), server })
}

/// A boot sector: writes the two blocks behind it to QEMU's debug port and ends QEMU.
#[rustfmt::skip]
const BOOT: &[u8] = &[
    0x31, 0xc0,                     // xor ax, ax
    0x8e, 0xd8,                     // mov ds, ax
    0xbe, 0x28, 0x7c,               // mov si, 0x7c28       the packet below
    0xb4, 0x42,                     // mov ah, 0x42         extended read from the drive in dl
    0xcd, 0x13,                     // int 0x13
    0x72, 0x0f,                     // jc failed
    0xbe, 0x00, 0x80,               // mov si, 0x8000
    0xb9, 0x00, 0x04,               // mov cx, 1024
    0xba, 0xe9, 0x00,               // mov dx, 0xe9         debug port
    0xf3, 0x6e,                     // rep outsb
    0x31, 0xc0,                     // xor ax, ax
    0xeb, 0x02,                     // jmp end
    0xb0, 0x01,                     // failed: mov al, 1
    0xba, 0xf4, 0x00,               // end: mov dx, 0xf4    exit port
    0xee,                           // out dx, al
    0xf4, 0xeb, 0xfd,               // hlt, jmp to it
    0x8d, 0x74, 0x00,               //                      filler
    0x10, 0x00, 0x02, 0x00,         // packet: its size, two blocks,
    0x00, 0x80, 0x00, 0x00,         //         to 0000:8000,
    0x01, 0, 0, 0, 0, 0, 0, 0,      //         from block 1
];

fn firmware(ground: &ScenarioContext) -> Result<()> {
    /// Status of a QEMU that the exit port has ended with 0.
    const READ: i32 = 1;
    let NvmeDisks { images, sockets, mut server } = serve(ground, 1)?;
    images[0].write(0, BOOT)?;
    images[0].write(510, &[0x55, 0xaa])?;
    let said = ground.path("debug");
    let machine = |memory: &[&str]| {
        let mut qemu = ground.guest.command("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-accel", "tcg", "-m", "128"])
            .args(memory)
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1", "-device", &controller_option(&sockets[0])])
            .args(["-debugcon", &format!("file:{}", said.display())]);
        qemu
    };
    let shared = ["-object", "memory-backend-memfd,id=memory,size=128M,share=on", "-M", "q35,memory-backend=memory"];
    for byte in [b'a', b'b', b'c'] {
        let blocks = [[byte; 512], [byte + 1; 512]].concat();
        images[0].write(512, &blocks)?;
        let ended = process::run("QEMU", &machine(&shared), CLIENT_LIMIT)?;
        ensure!(ended.status.code() == Some(READ), "the firmware read nothing ({}): {}", ended.status, ended.said());
        let said = fs::read(&said).context("the boot sector said nothing")?;
        ensure!(said == blocks, "the boot sector read {} bytes that are not on the disk", said.len());
    }
    let unshared = Running::start("QEMU", &machine(&["-M", "q35"]))?;
    let is_told = |said: &str| said.contains("memory is not shared") && said.contains("share=on -machine");
    server.wait_until_said(CLIENT_LIMIT, is_told).context("of a machine whose memory is not shared")?;
    drop(unshared);
    server.stop()?;
    Ok(())
}

/// Functions of the guest's tasks: to wait, to compare a field of nvme-cli's output, to load the disk.
const PRELUDE: &str = "set -e
    modprobe nvme
    disk=/dev/nvme0n1
    until_true() { until \"$@\"; do sleep 0.1; done; }
    until_true test -b $disk
    has() {
        name=$1 value=$2; shift 2
        found=$(\"$@\" | sed -n \"s/^$name[[:space:]]*: *//p\" | head -n 1 | tr -d ' ')
        [ \"$found\" = $value ] || { echo \"$*: $name is $found and not $value\"; exit 1; }
    }
    load() {
        fio --filename=$disk --direct=1 --ioengine=libaio --thread --iodepth=16 --group_reporting --name=load \\
            --rw=randwrite --bs=4k --size=4m --numjobs=4 --offset_increment=8m --verify=crc32c --verify_fatal=1 \\
            --output-format=terse --output=/dev/null --allow_file_create=0 \"$@\"
    }";

fn guest(ground: &ScenarioContext) -> Result<()> {
    const GROWN: u64 = 96 * MIB;
    const RESETS: usize = 8;
    let NvmeDisks { images, sockets, server } = serve(ground, 1)?;
    let sectors = |bytes: u64| format!("{:#x}", bytes / 512);
    let task = format!(
        "{PRELUDE}
        has sn {SERIAL} nvme id-ctrl /dev/nvme0
        has nn 1 nvme id-ctrl /dev/nvme0
        has vwc 0x7 nvme id-ctrl /dev/nvme0
        for size in nsze ncap; do has $size {whole} nvme id-ns $disk; done
        has critical_warning 0 nvme smart-log /dev/nvme0
        has error_count 0 nvme error-log /dev/nvme0
        nvme list | grep -q '^/dev/nvme0n1 .* {SERIAL} '
        nvme get-feature -f 7 /dev/nvme0 | grep -q 0x00030003
        ! nvme format -f $disk 2>/dev/null
        nvme error-log /dev/nvme0 | grep -q 'Invalid Command Opcode'
        nvme ns-rescan /dev/nvme0
        function=$(readlink -f /sys/class/nvme/nvme0/device)
        test $(stat -c %s $function/config) = 4096
        bytes() {{ od -An -tx1 -j$(($1)) -N$2 $function/config | tr -d ' \\n'; }}
        test $(bytes 0x40 2)-$(bytes 0x50 4)-$(bytes 0x60 2)-$(bytes 0x64 4) = 1150-01600300-1000-00800010
        test $(bytes 0x100 4) = 00000000
        test $(cat $function/power_state) = D0
        grep -q flr $function/reset_method
        echo identified

        load --cpus_allowed=0-3 --cpus_allowed_policy=split
        awk '/nvme0q[1-9]/ {{ queues += 1; if ($2 + $3 + $4 + $5 < 4) exit 1 }} END {{ exit queues != 4 }}' /proc/interrupts
        echo queues

        (until [ -e /tmp/end ]; do load; done) & load=$!
        for reset in $(seq {RESETS}); do sleep 0.2; nvme reset /dev/nvme0; done
        echo flr >$function/reset_method
        for reset in $(seq {RESETS}); do sleep 0.2; echo 1 >$function/reset; done
        touch /tmp/end
        wait $load
        echo reset

        modprobe ext4
        mkdir /tmp/files
        mkfs.ext4 -q $disk
        mount $disk /tmp/files
        dd if=/dev/urandom of=/tmp/files/file bs=64k count=128 2>/dev/null
        sum=$(md5sum </tmp/files/file)
        umount /tmp/files
        /usr/sbin/e2fsck -fn $disk >/tmp/fsck 2>&1 || {{ cat /tmp/fsck; exit 1; }}
        echo 1 >$function/remove
        test ! -e $disk
        echo 1 >/sys/bus/pci/rescan
        until_true test -b $disk
        mount $disk /tmp/files
        test \"$sum\" = \"$(md5sum </tmp/files/file)\"
        umount /tmp/files
        echo files

        until_true grep -q {grown} /sys/block/nvme0n1/size
        has nsze {grown_hex} nvme id-ns $disk
        tr '\\0' g </dev/zero | dd of=$disk bs=1M seek={last} count=1 iflag=fullblock oflag=direct conv=fsync 2>/dev/null
        echo grown",
        whole = sectors(64 * MIB),
        grown = GROWN / 512,
        grown_hex = sectors(GROWN),
        last = GROWN / MIB - 1,
    );
    let mut machine = Vm::new(ground.guest, 4).controller(&sockets[0]).start(&task)?;
    machine.wait_for_output(|output| output.contains("files\n"))?;
    succeed(ground, &["set", "device:0", "size=96M"])?;
    let output = machine.wait()?.success()?;
    ensure!(output.ends_with("\nfiles\ngrown\n"), "the guest said:\n{output}");
    server.stop()?;
    images[0].check_pattern(GROWN - MIB, MIB, b'g')
}

fn namespaces(ground: &ScenarioContext) -> Result<()> {
    const GROWN: u64 = 96 * MIB;
    let socket = ground.path("0.sock");
    let device = |number: usize| {
        let options = if number == 0 { format!("?queues=4&serial={SERIAL}") } else { String::new() };
        let access = if number == 2 { "?readonly=on" } else { "" };
        (access.to_owned(), format!("vfio-user:{}{options}", socket.display()))
    };
    let NvmeDisks { images, sockets, server } = serve_by(ground, 3, std::slice::from_ref(&socket), device)?;
    let task = format!(
        "{PRELUDE}
        for nsid in 1 2 3; do until_true test -b /dev/nvme0n$nsid; done
        # Names follow the order in which the kernel's scan finds the namespaces.
        for block in /sys/block/nvme0n[123]; do
            nsid=$(cat $block/nsid)
            ln -s $block /tmp/ns$nsid
            ln -s /dev/${{block##*/}} /tmp/disk$nsid
        done
        has nn 3 nvme id-ctrl /dev/nvme0
        test $(nvme list-ns /dev/nvme0 | grep -c ]:0x) = 3
        test $(cat /tmp/ns[123]/uuid | sort -u | wc -l) = 3
        test \"$(cat /tmp/ns[123]/ro | tr -d '\\n')\" = 001
        echo found

        both() {{
            (disk=/tmp/disk1; load --cpus_allowed=0-3 --cpus_allowed_policy=split \"$@\") & first=$!
            (disk=/tmp/disk2; load --cpus_allowed=0-3 --cpus_allowed_policy=split \"$@\") & second=$!
        }}
        both
        wait $first
        wait $second
        awk '/nvme0q[1-9]/ {{ queues += 1; if ($2 + $3 + $4 + $5 < 4) exit 1 }} END {{ exit queues != 4 }}' /proc/interrupts
        both --loops=3
        for reset in 1 2 3 4; do sleep 0.2; nvme reset /dev/nvme0; done
        wait $first
        wait $second
        for nsid in 1 2; do
            tr '\\0' $nsid </dev/zero | dd of=/tmp/disk$nsid bs=1M seek=60 count=1 iflag=fullblock oflag=direct 2>/dev/null
        done
        echo verified

        until_true grep -q {grown} /tmp/ns2/size
        grep -q {whole} /tmp/ns1/size
        tr '\\0' g </dev/zero | dd of=/tmp/disk2 bs=1M seek={last} count=1 iflag=fullblock oflag=direct conv=fsync 2>/dev/null
        echo grown",
        whole = 64 * MIB / 512,
        grown = GROWN / 512,
        last = GROWN / MIB - 1,
    );
    let mut machine = Vm::new(ground.guest, 4).controller(&sockets[0]).start(&task)?;
    machine.wait_for_output(|output| output.contains("verified\n"))?;
    succeed(ground, &["set", "device:1", "size=96M"])?;
    let output = machine.wait()?.success()?;
    ensure!(output.ends_with("found\nverified\ngrown\n"), "the guest said:\n{output}");
    server.stop()?;
    for (image, byte) in images.iter().zip([b'1', b'2']) {
        image.check_pattern(60 * MIB, MIB, byte)?;
    }
    images[1].check_pattern(GROWN - MIB, MIB, b'g')
}

fn few_queues(ground: &ScenarioContext) -> Result<()> {
    let (few, socket) = (ground.path("few.sock"), ground.path("onward.sock"));
    let images = [ground.image("0.img", 64 * MIB)?, ground.image("1.img", 64 * MIB)?];
    let mut command = ground.program.command()?;
    command.arg("serve");
    for (image, options) in images.iter().zip(["?queues=2", ""]) {
        command.args(["--device", &format!("file:{}", image.path.display())]);
        command.args(["--export", &format!("vfio-user:{}{options}", few.display())]);
    }
    let serve = || ReadyServer::start_command(&command, std::slice::from_ref(&few), &ground.log);
    let server = serve()?;
    let mut proxy = ground.program.command()?;
    proxy.arg("serve");
    for (nsid, options) in [(1, format!("?queues=4&serial={SERIAL}")), (2, String::new())] {
        proxy.args(["--device", &format!("vfio-user:{}?namespace={nsid}", few.display())]);
        proxy.args(["--export", &format!("vfio-user:{}{options}", socket.display())]);
    }
    let onward = ReadyServer::start_command(&proxy, std::slice::from_ref(&socket), &ground.log)?;
    let task = format!(
        "{PRELUDE}
        both() {{
            (disk=/dev/nvme0n1; load --cpus_allowed=0-3 --cpus_allowed_policy=split \"$@\") & first=$!
            (disk=/dev/nvme0n2; load --cpus_allowed=0-3 --cpus_allowed_policy=split \"$@\") & second=$!
        }}
        until_true test -b /dev/nvme0n2
        both
        wait $first
        wait $second
        echo verified
        both --loops=3
        wait $first
        wait $second
        for number in 1 2; do
            nsid=$(cat /sys/block/nvme0n$number/nsid)
            tr '\\0' $nsid </dev/zero | dd of=/dev/nvme0n$number bs=1M seek=60 count=1 iflag=fullblock oflag=direct conv=fsync 2>/dev/null
        done
        echo written"
    );
    let mut machine = Vm::new(ground.guest, 4).controller(&socket).start(&task)?;
    machine.wait_for_output(|output| output.contains("verified\n"))?;
    server.kill();
    let server = serve()?;
    let output = machine.wait()?.success()?;
    ensure!(output.ends_with("verified\nwritten\n"), "the guest said:\n{output}");
    onward.stop()?;
    server.stop()?;
    images.iter().zip([b'1', b'2']).try_for_each(|(image, byte)| image.check_pattern(60 * MIB, MIB, byte))
}

fn crash(ground: &ScenarioContext) -> Result<()> {
    /// Offset of the flushed bytes, beyond the load.
    const KEPT: u64 = 48 * MIB;
    let NvmeDisks { images, sockets, mut server } = serve(ground, 1)?;
    // Each boot finds what the one before has flushed, and flushes something else.
    let task = format!(
        "{PRELUDE}
        boot=$(dd if=$disk bs=4k skip={at} count=1 iflag=direct 2>/dev/null | tr -d '\\0' | cut -c 1)
        test $(dd if=$disk bs=4k skip={at} count=256 iflag=direct 2>/dev/null | tr -cd \"${{boot:-\\0}}\" | wc -c) = {MIB}
        boot=$((boot + 1))
        [ $boot -lt 3 ] || {{ echo boot $boot; exit 0; }}
        tr '\\0' $boot </dev/zero | dd of=$disk bs=4k seek={at} count=256 iflag=fullblock 2>/dev/null
        sync
        load --time_based --runtime=1000 &
        sleep 1
        echo boot $boot
        wait",
        at = KEPT / (4 * KIB)
    );
    let vm = || Vm::new(ground.guest, 2).controller(&sockets[0]);
    let mut machine = vm().may_reboot().start(&task)?;
    machine.wait_for_output(|output| output.contains("boot 1\n"))?;
    machine.reset()?;
    machine.wait_for_output(|output| output.contains("boot 2\n"))?;
    drop(machine);
    let output = vm().succeed(&task)?;
    ensure!(output == "boot 3\n", "the guest said:\n{output}");
    server.check_alive()?;
    server.stop()?;
    images[0].check_pattern(KEPT, MIB, b'2')
}

/// A load that is repeated until [`end_load`].
fn endless_load() -> String {
    format!("{PRELUDE}\nuntil {ends}; do load; done\necho verified", ends = crash::is_ended("$disk"))
}

/// Stops such a load, which must have verified all of its data.
fn end_load(machine: Machine, image: &Image) -> Result<()> {
    crash::set_ended(image, true)?;
    let output = machine.wait()?.success()?;
    ensure!(output == "verified\n", "the guest said:\n{output}");
    Ok(())
}

fn takeover(ground: &ScenarioContext) -> Result<()> {
    let NvmeDisks { images, sockets, mut server } = serve(ground, 1)?;
    let mut machine = Vm::new(ground.guest, 4).controller(&sockets[0]).start(&endless_load())?;
    crash::wait_for_writes(&mut machine, &images[0])?;
    let mut rests = Vec::new();
    for heir in 0..HEIRS {
        crash::go_on(&mut machine)?;
        let (taker, rested) = take_over(ground, &sockets[0]).with_context(|| format!("heir {heir}"))?;
        std::mem::replace(&mut server, taker).end().context("the daemon before")?;
        rests.push(rested);
    }
    crash::go_on(&mut machine)?;
    end_load(machine, &images[0])?;
    server.stop()?;
    let longest = rests.iter().max().copied().unwrap_or_default();
    ground.measured(format!("the guest rested {rests:.1?}, at most {longest:.1?}"));
    Ok(())
}

fn hung(ground: &ScenarioContext) -> Result<()> {
    let NvmeDisks { images, sockets, server } = serve(ground, 2)?;
    let (first, second) = (&images[0], &images[1]);
    let mut machine = Vm::new(ground.guest, 2).controller(&sockets[0]).start(&endless_load())?;
    machine.wait_until(|| Ok(first.allocated()? > 0))?;
    machine.hang(true)?;
    let output =
        Vm::new(ground.guest, 2).controller(&sockets[1]).succeed(&format!("{PRELUDE}\nload\necho verified"))?;
    ensure!(output == "verified\n", "the guest beside the one that hangs said:\n{output}");
    ensure!(second.allocated()? > 0, "it wrote nothing");
    for change in [["set", "export:0", "depth=8"], ["set", "daemon", "lanes=1"], ["set", "daemon", "lanes=2"]] {
        succeed(ground, &change)?;
    }
    succeed(ground, &["inspect"])?;
    machine.hang(false)?;
    end_load(machine, first).context("the guest that hung")?;
    server.stop()?;
    Ok(())
}
