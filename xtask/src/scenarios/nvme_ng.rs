//! A namespace of the kernel's NVMe driver by passthrough (`nvme:/dev/ngXnY`), in a guest with a controller of QEMU.

use anyhow::{Context, Result, ensure};

use super::pci::{SHELL, program_folder};
use super::takeover::HEIRS;
use super::{MIB, RunsIn, Scenario, ScenarioContext};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "nvme-ng",
        sentence: "nvme: takes a namespace that is not in use, verifies on several queues through resets, polls, and is served",
        place: RunsIn::Guest,
        ours: true,
        tell: passthrough,
    },
    Scenario {
        name: "nvme-ng-unplug",
        sentence: "a controller whose namespace is loaded through nvme: can be unplugged, and its I/O fails",
        place: RunsIn::Guest,
        ours: true,
        tell: unplug,
    },
    Scenario {
        name: "nvme-ng-killed",
        sentence: "a namespace whose user was killed is taken only once its last write is done",
        place: RunsIn::Guest,
        ours: true,
        tell: killed,
    },
    Scenario {
        name: "takeover-nvme-ng",
        sentence: "verified writes on a namespace go on as eight daemons take over one from another, and one that finds it formatted is refused",
        place: RunsIn::Guest,
        ours: true,
        tell: takeover,
    },
    Scenario {
        name: "nvme-ng-speed",
        sentence: "blkyard on nvme: is measured beside fio on the same namespace",
        place: RunsIn::Guest,
        ours: true,
        tell: speed,
    },
];

/// What every task begins with.
const PRELUDE: &str = "ready() { until [ -c /dev/ng0n1 ] && [ -b /dev/nvme0n1 ]; do sleep 0.1; done; }
    modprobe -a nvme ext4
    ready
    serve() {
        : >/tmp/serve
        /host/blkyard serve --device nvme:/dev/ng0n1 --export 'vhost-user-blk:/tmp/disk.sock?queues=2' \\
            --control /tmp/control.sock >>/tmp/serve 2>&1 &
        serve=$!
        until_ready /tmp/serve $serve
    }
    until_ready() { until grep -q ready $1; do kill -0 $2 || { cat $1; exit 1; }; sleep 0.1; done; }
    load='--bs 4k --iodepth 16 --numjobs 2 --size 8m --verify crc32c'
    ";

fn passthrough(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}
        refused 'use nvme:/dev/ng0n1' blkyard bench nvme:/dev/nvme0n1 --rw read
        refused 'such as nvme:/dev/ng0n1' blkyard bench nvme:/dev/nvme0 --rw read
        refused 'no such device' blkyard bench nvme:/dev/ng7n1 --rw read
        refused 'nvme.poll_queues=N' blkyard bench 'nvme:/dev/ng0n1?poll=on' --rw read
        refused 'permission denied' /usr/bin/setpriv --reuid 1000 --clear-groups /host/blkyard bench nvme:/dev/ng0n1 --rw read
        refused 'read-only' blkyard bench 'nvme:/dev/ng0n1?readonly=on' --rw write
        echo 2 >/proc/sys/kernel/io_uring_disabled
        refused 'io_uring is disabled' blkyard bench nvme:/dev/ng0n1 --rw read
        echo 0 >/proc/sys/kernel/io_uring_disabled
        mkfs.ext4 -q /dev/nvme0n1 32m
        mkdir /tmp/mounted
        mount /dev/nvme0n1 /tmp/mounted
        refused 'it is mounted' blkyard bench nvme:/dev/ng0n1 --rw read
        umount /tmp/mounted
        echo refused
        blkyard bench nvme:/dev/ng0n1 --rw randwrite $load --fsync 64
        # The kernel's block layer finds the same, and the other way round.
        blkyard bench file:/dev/nvme0n1 --rw read $load
        blkyard bench 'file:/dev/nvme0n1' --rw write --bs 256k --iodepth 8 --numjobs 2 --size 16m --verify crc32c
        blkyard bench nvme:/dev/ng0n1 --rw randread --bs 256k --iodepth 8 --numjobs 2 --size 16m --verify crc32c
        # Beyond the largest transfer, in memory that is not registered, on one queue of two threads, and without data.
        blkyard bench nvme:/dev/ng0n1 --rw write --bs 2m --iodepth 4 --size 16m --verify crc32c
        blkyard bench nvme:/dev/ng0n1 --rw randwrite $load --no-registered
        blkyard bench nvme:/dev/ng0n1 --rw randwrite $load --queues 1
        blkyard bench nvme:/dev/ng0n1 --rw randtrim --bs 64k --iodepth 16 --size 8m
        echo verified
        # Resets of the controller under load: the kernel starts many commands later, from entries that it reads again.
        (until [ -e /tmp/end ]; do echo 1 >/sys/class/nvme/nvme0/reset_controller; sleep 0.4; done) &
        resets=$!
        # Memory that is not registered is mapped by the kernel's worker threads then, which may fail.
        for run in 1 2 3 4; do
            blkyard bench nvme:/dev/ng0n1 --rw randwrite $load
            blkyard bench nvme:/dev/ng0n1 --rw randwrite $load --no-registered
        done
        touch /tmp/end
        wait $resets
        echo reset
        serve
        refused 'is in use' blkyard bench nvme:/dev/ng0n1 --rw read
        refused 'in use' blkyard bench file:/dev/nvme0n1 --rw read
        blkyard bench vhost-user:/tmp/disk.sock --rw randwrite $load
        # An idle daemon sleeps.
        ticks() {{ awk '{{ print $14 + $15 }}' /proc/$serve/stat; }}
        before=$(ticks)
        sleep 3
        [ $(($(ticks) - before)) -lt 30 ] || {{ echo \"the idle daemon used $(($(ticks) - before)) ticks\"; exit 1; }}
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo served
        # Poll queues of the kernel's driver, whose queues have no interrupts.
        modprobe -r nvme
        modprobe nvme poll_queues=1
        ready
        polled() {{ awk '/nvme0q/ {{ for (cpu = 2; cpu <= 3; cpu++) sum += $cpu }} END {{ print sum }}' /proc/interrupts; }}
        before=$(polled)
        blkyard bench 'nvme:/dev/ng0n1?poll=on' --rw randwrite $load --fsync 64
        blkyard bench nvme:/dev/ng0n1 --rw randread $load --hipri
        # The admin queue and the block device have some.
        [ $(($(polled) - before)) -lt 200 ] || {{ echo \"$(($(polled) - before)) interrupts\"; exit 1; }}
        echo polled"
    );
    let vm = Vm::new(ground.guest, 2).nvme_image(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    ensure!(output == "refused\nverified\nreset\nserved\npolled\n", "the guest says:\n{output}");
    Ok(())
}

fn unplug(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}
        /host/blkyard bench nvme:/dev/ng0n1 --rw randwrite --bs 4k --iodepth 16 --runtime 1000 >/tmp/bench 2>&1 &
        bench=$!
        sleep 2
        kill -0 $bench
        echo running
        if wait $bench; then echo 'the load did not fail'; exit 1; fi
        until [ ! -e /sys/bus/pci/devices/0000:01:00.0 ]; do sleep 0.1; done
        echo failed"
    );
    let vm = Vm::new(ground.guest, 2).nvme(image.path.clone()).folder(program_folder(ground)?);
    let mut machine = vm.start(&task)?;
    machine.wait_for_output(|output| output.contains("running\n"))?;
    machine.pull_nvme(0).context("of the controller")?;
    let output = machine.wait()?.success()?;
    ensure!(output == "running\nfailed\n", "the guest says:\n{output}");
    Ok(())
}

/// The controller carries out a few writes a second, so that many are left behind by a process that is killed.
fn killed(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}
        # Each write changes it.
        sum() {{ dd if=/dev/nvme0n1 bs=64k count=64 iflag=direct 2>/dev/null | md5sum; }}
        killed() {{ kill -9 $1; wait $1 2>/dev/null || true; }}
        # The next user, by this name, waits for the last write of one that was killed.
        waits() {{
            dd if=/dev/zero of=/dev/nvme0n1 bs=4M count=1 oflag=direct 2>/dev/null
            empty=$(sum)
            /host/blkyard bench nvme:/dev/ng0n1 --rw randwrite --bs 4k --iodepth 32 --size 4m --verify crc32c \\
                >/tmp/bench 2>&1 &
            bench=$!
            while [ \"$(sum)\" = \"$empty\" ]; do kill -0 $bench || {{ cat /tmp/bench; exit 1; }}; sleep 0.1; done
            sleep 1
            killed $bench
            left=$(sum)
            refused=0
            until /host/blkyard bench $1 --rw read --bs 4k --size 4k >/tmp/bench 2>&1; do
                grep -q 'lock' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
                refused=$((refused + 1))
            done
            taken=$(sum)
            [ $refused -gt 0 ] && [ \"$left\" != \"$taken\" ] || {{ echo \"$1: no write was left behind: $refused\"; exit 1; }}
            sleep 8
            [ \"$taken\" = \"$(sum)\" ] || {{ echo \"$1: a write of the dead process came later\"; exit 1; }}
        }}
        waits nvme:/dev/ng0n1
        waits file:/dev/nvme0n1
        echo taken
        # A daemon that is killed amid writes, and its next ones: the same writes are sent again, and later ones follow.
        serve
        for run in 1 2 3; do
            /host/blkyard bench vhost-user:/tmp/disk.sock --rw randwrite --bs 4k --iodepth 16 --size 256k --verify crc32c \\
                >/tmp/bench 2>&1 &
            bench=$!
            sleep 4
            killed $serve
            serve
            grep -q 'waiting for its lock' /tmp/serve || {{ echo 'it did not wait:'; cat /tmp/serve /tmp/bench; exit 1; }}
            wait $bench || {{ cat /tmp/bench /tmp/serve; exit 1; }}
            grep -q ' 0 differ' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
        done
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo killed"
    );
    let vm = Vm::new(ground.guest, 2).nvme_image(image.path.clone()).nvme_writes_per_second(5);
    let output = vm.folder(program_folder(ground)?).succeed(&task)?;
    ensure!(output == "taken\nkilled\n", "the guest says:\n{output}");
    Ok(())
}

fn takeover(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}
        serve
        loads() {{
            until [ -e /tmp/end ]; do
                /host/blkyard bench vhost-user:/tmp/disk.sock --rw randwrite $load >/tmp/bench 2>&1 || return 1
                grep -q ' 0 differ' /tmp/bench && ! grep -q 'connected again' /tmp/bench || return 1
            done
        }}
        loads &
        loads=$!
        for daemon in $(seq {HEIRS}); do
            sleep 1
            : >/tmp/taken
            /host/blkyard serve --takeover /tmp/control.sock >/tmp/taken 2>&1 &
            new=$!
            until_ready /tmp/taken $new
            wait $serve || {{ cat /tmp/serve; exit 1; }}
            serve=$new
            mv /tmp/taken /tmp/serve
            sed -n 's/took over: guests were paused for \\([0-9.]*\\) ms.*/paused \\1/p' /tmp/serve
            refused 'in use' blkyard bench nvme:/dev/ng0n1 --rw read
            refused 'in use' blkyard bench file:/dev/nvme0n1 --rw read
        done
        touch /tmp/end
        wait $loads || {{ cat /tmp/bench /tmp/serve; exit 1; }}
        echo verified
        # With blocks of 4 KiB it is another disk for the guests. nvme-cli fails to tell the block device, which is in use.
        nvme format /dev/nvme0n1 --lbaf=4 --force >/dev/null 2>&1 || true
        until [ $(cat /sys/block/nvme0n1/queue/logical_block_size) = 4096 ]; do sleep 0.1; done
        refused 'differ from those that guests were told' /host/blkyard serve --takeover /tmp/control.sock
        kill -0 $serve
        nvme format /dev/nvme0n1 --lbaf=0 --force >/dev/null 2>&1 || true
        until [ $(cat /sys/block/nvme0n1/queue/logical_block_size) = 512 ]; do sleep 0.1; done
        blkyard bench vhost-user:/tmp/disk.sock --rw randwrite $load
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        # It is free.
        blkyard bench nvme:/dev/ng0n1 --rw read --bs 4k --size 4k
        echo refused"
    );
    let vm = Vm::new(ground.guest, 2).nvme_image(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    let (pauses, rest) = output.split_at(output.find("verified").unwrap_or(output.len()));
    ensure!(rest == "verified\nrefused\n" && pauses.lines().count() == HEIRS, "the guest says:\n{output}");
    let pauses: Vec<_> = pauses.lines().filter_map(|line| line.strip_prefix("paused ")).collect();
    ground.measured(format!("clients were paused for {} ms", pauses.join(", ")));
    Ok(())
}

/// IOPS of random reads of 4 KiB, 16 in flight in one job: an emulated machine, whose figures compare with each other
/// only.
fn speed(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}
        run='--rw randread --bs 4k --iodepth 16 --runtime 3'
        ours() {{ blkyard bench $1 $run $2; iops; }}
        fio_of() {{
            fio --name=load --rw=randread --bs=4k --iodepth=16 --runtime=3 --time_based --thread --norandommap \\
                --filename=$1 --ioengine=$2 $3 $4 $5 >/tmp/said 2>&1 || {{ cat /tmp/said; return 1; }}
            iops
        }}
        iops() {{ sed -n 's/.*IOPS=\\([^, ]*\\).*/\\1/p' /tmp/said | head -n 1; }}
        for round in 1 2 3; do
            echo \"nvme: $(ours nvme:/dev/ng0n1)\"
            echo \"nvme: unregistered $(ours nvme:/dev/ng0n1 --no-registered)\"
            echo \"file: $(ours file:/dev/nvme0n1)\"
            echo \"fio io_uring_cmd $(fio_of /dev/ng0n1 io_uring_cmd --cmd_type=nvme --fixedbufs)\"
            echo \"fio io_uring $(fio_of /dev/nvme0n1 io_uring --direct=1 --fixedbufs)\"
        done"
    );
    let vm = Vm::new(ground.guest, 2).nvme_image(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    ensure!(output.lines().count() == 15, "the guest says:\n{output}");
    ground.measured(format!("IOPS, three rounds: {}", output.lines().collect::<Vec<_>>().join(", ")));
    Ok(())
}
