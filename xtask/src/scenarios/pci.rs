//! NVMe controllers of QEMU, driven by blkyard in a guest with an emulated IOMMU.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{MIB, RunsIn, Scenario, ScenarioContext};
use crate::guest::Kernel;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "nvme-pci",
        sentence: "pci: takes a controller on request only, verifies on several queues, survives a reset and is served with consent",
        place: RunsIn::Guest,
        ours: true,
        tell: pci,
    },
    Scenario {
        name: "nvme-pci-pinned",
        sentence: "a front-end whose memory is pinned and that gives pages back has its I/O failed, and works again when it starts anew",
        place: RunsIn::Guest,
        ours: true,
        tell: pinned,
    },
    Scenario {
        name: "nvme-pci-unplug",
        sentence: "a controller of pci: that is unplugged under load is released at once, and its I/O fails after gone_s",
        place: RunsIn::Guest,
        ours: true,
        tell: unplug,
    },
    Scenario {
        name: "nvme-pci-iommufd",
        sentence: "pci: uses iommufd where the kernel has it, on request the group, and survives a reset and an unplug there",
        place: RunsIn::Guest,
        ours: true,
        tell: iommufd,
    },
    Scenario {
        name: "nvme-pci-premapped",
        sentence: "the fourth study reads a controller of pci: in memory mapped for each I/O and in memory mapped once",
        place: RunsIn::Guest,
        ours: true,
        tell: premapped,
    },
];

/// Shell functions of tasks with the program in /host.
pub(super) const SHELL: &str = "set -e
    export TMPDIR=/tmp
    blkyard() { /host/blkyard \"$@\" >/tmp/said 2>&1 || { tail -n 8 /tmp/said; echo \"of: $*\"; return 1; }; }
    # A command that must fail, and a text in its output.
    refused() {
        text=$1
        shift
        if \"$@\" >/tmp/refused 2>&1 </dev/null; then echo \"was not refused: $*\"; exit 1; fi
        grep -q \"$text\" /tmp/refused || { echo \"'$text' is not in:\"; cat /tmp/refused; exit 1; }
    }
    ";

/// What every task begins with, with the modules of the guest's kernel.
const PRELUDE: &str = "modprobe -a nvme vfio_pci vfio_iommu_type1 ext4
    ";

/// What follows the modules.
const MACHINE: &str = "
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    device=0000:01:00.0
    returned() {
        echo $device >/sys/bus/pci/drivers/vfio-pci/unbind
        echo >/sys/bus/pci/devices/$device/driver_override
        echo $device >/sys/bus/pci/drivers_probe
        until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    }
    load='--bs 4k --iodepth 16 --numjobs 2 --size 4m --verify crc32c'
    ";

fn pci(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}{MACHINE}
        refused 'driver nvme has it' blkyard bench pci:$device --rw read
        refused 'no such device' blkyard bench pci:0000:7f:00.0 --rw read
        refused 'not an NVMe controller' blkyard bench pci:0000:00:1f.2 --rw read
        mkfs.ext4 -q /dev/nvme0n1 32m
        mkdir /tmp/mounted
        mount /dev/nvme0n1 /tmp/mounted
        refused 'is in use' blkyard bench \"pci:$device?unbind=on\" --rw read
        refused 'driver nvme has it' blkyard nvme id-ctrl pci:$device
        refused 'is in use' blkyard nvme id-ctrl \"pci:$device?unbind=on\"
        umount /tmp/mounted
        # Single commands, after which the kernel's driver finds the same.
        asked() {{
            for what in 'id-ctrl' 'id-ns -n 1'; do /host/blkyard nvme $what $1; done
            /host/blkyard nvme io-passthru -O 2 -n 1 -l 512 -r --cdw10=8 $2
        }}
        asked /dev/nvme0 /dev/nvme0n1 >/tmp/kernels 2>/tmp/said || {{ cat /tmp/said; exit 1; }}
        asked \"pci:$device?unbind=on\" pci:$device >/tmp/ours 2>/tmp/said || {{ cat /tmp/said; exit 1; }}
        diff /tmp/kernels /tmp/ours || exit 1
        returned
        echo asked
        blkyard bench \"pci:$device?unbind=on&queues=2\" --rw randwrite $load
        grep -q 'opened through IOMMU group' /tmp/said || {{ cat /tmp/said; exit 1; }}
        refused 'the kernel offers no iommufd' blkyard bench \"pci:$device?iommu=iommufd\" --rw read
        echo written
        blkyard bench \"pci:$device?queues=2\" --rw randread $load
        returned
        # The kernel's driver finds the same.
        blkyard bench file:/dev/nvme0n1 --rw read $load
        echo verified
        # A reset of the function under load: commands are late, and the controller is set up again.
        /host/blkyard bench \"pci:$device?unbind=on&timeout_s=2\" --rw randwrite --bs 4k --iodepth 16 --runtime 12 >/tmp/bench 2>&1 &
        bench=$!
        until grep -q vfio-msix /proc/interrupts; do sleep 0.1; done
        sleep 2
        echo 1 >/sys/bus/pci/devices/$device/reset
        wait $bench || {{ cat /tmp/bench; exit 1; }}
        grep -q 'the controller is reset' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
        blkyard bench pci:$device --rw randwrite $load
        echo reset
        (ulimit -l 64; refused 'ulimit -l' /usr/bin/setpriv --bounding-set -ipc_lock /host/blkyard bench pci:$device --rw read)
        refused 'pin=on' blkyard serve --device pci:$device --export vhost-user-blk:/tmp/disk.sock --control none
        /host/blkyard serve --device \"pci:$device?pin=on\" --export vhost-user-blk:/tmp/disk.sock --control none >/tmp/serve 2>&1 &
        serve=$!
        until grep -q ready /tmp/serve; do sleep 0.1; done
        blkyard bench vhost-user:/tmp/disk.sock --rw randwrite $load
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo served"
    );
    let vm = Vm::new(ground.guest, 2).nvme(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    ensure!(output == "asked\nwritten\nverified\nreset\nserved\n", "the guest says:\n{output}");
    Ok(())
}

/// A front-end that rests touches no page, so the one that it has given back is missing at the next look.
fn pinned(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let folder = program_folder(ground)?;
    ground.guest.copy_program("usr/bin/fallocate", &[], &folder)?;
    let task = format!(
        "{SHELL}{PRELUDE}{MACHINE}
        /host/blkyard serve --device \"pci:$device?unbind=on&pin=on\" --export vhost-user-blk:/tmp/disk.sock --control none >/tmp/serve 2>&1 &
        serve=$!
        until grep -q ready /tmp/serve; do sleep 0.1; done
        /host/blkyard bench vhost-user:/tmp/disk.sock --rw randread --bs 128k --iodepth 16 --runtime 1000 >/tmp/bench 2>&1 &
        bench=$!
        sleep 2
        kill -STOP $bench
        sleep 1
        ! grep -q 'fails from now on' /tmp/serve || {{ cat /tmp/serve; exit 1; }}
        echo works
        # As the VMM of a guest with a balloon does. Buffers of this size are larger than rings.
        memory=$(for file in /proc/$bench/fd/*; do
            case $(readlink $file) in *memfd:*) echo $(stat -L -c %s $file) $file ;; esac
        done | sort -n | tail -n 1)
        /host/fallocate --punch-hole --offset $((${{memory% *}} - 4096)) --length 4096 ${{memory#* }}
        until grep -q 'fails from now on' /tmp/serve; do sleep 0.1; done
        kill -CONT $bench
        if wait $bench; then echo 'the load did not fail'; exit 1; fi
        echo refused
        blkyard bench vhost-user:/tmp/disk.sock --rw randwrite $load
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo served"
    );
    let output = Vm::new(ground.guest, 2).nvme(image.path.clone()).folder(folder).succeed(&task)?;
    ensure!(output == "works\nrefused\nserved\n", "the guest says:\n{output}");
    Ok(())
}

fn unplug(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}{MACHINE}
        /host/blkyard bench \"pci:$device?unbind=on&gone_s=3\" --rw randwrite --bs 4k --iodepth 16 --runtime 1000 >/tmp/bench 2>&1 &
        bench=$!
        until grep -q vfio-msix /proc/interrupts; do sleep 0.1; done
        sleep 2
        echo running
        until [ ! -e /sys/bus/pci/devices/$device ]; do sleep 0.1; done
        echo released
        if wait $bench; then echo 'the load did not fail'; exit 1; fi
        echo failed"
    );
    let vm = Vm::new(ground.guest, 2).nvme(image.path.clone()).folder(program_folder(ground)?);
    let mut machine = vm.start(&task)?;
    machine.wait_for_output(|output| output.contains("running\n"))?;
    machine.pull_nvme(0).context("of the controller")?;
    let output = machine.wait()?.success()?;
    ensure!(output == "running\nreleased\nfailed\n", "the guest says:\n{output}");
    Ok(())
}

/// Debian's newer kernel, with modules that its own lack.
fn iommufd(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let folder = program_folder(ground)?;
    let modules = ground.guest.copy_iommufd(&folder)?;
    let modules: Vec<_> = modules.iter().map(|module| format!("insmod /host/{module}\n")).collect();
    let modules = modules.concat();
    let task = format!(
        "{SHELL}modprobe -a nvme irqbypass
        {modules}{MACHINE}
        # Waits for interrupts of a program, and says which nodes of VFIO and iommufd it has open.
        nodes() {{
            until grep -q vfio-msix /proc/interrupts; do sleep 0.1; done
            for fd in /proc/$1/fd/*; do readlink $fd || true; done | grep -E '^/dev/(vfio|iommu)' | sort -u >/tmp/nodes
            echo $(sed 's/[0-9][0-9]*$/N/' /tmp/nodes)
        }}
        blkyard bench \"pci:$device?unbind=on&queues=2\" --rw randwrite $load
        grep -q 'opened through iommufd' /tmp/said || {{ cat /tmp/said; exit 1; }}
        blkyard bench \"pci:$device?queues=2\" --rw randread $load
        returned
        blkyard bench file:/dev/nvme0n1 --rw read $load
        echo verified
        /host/blkyard bench \"pci:$device?unbind=on&timeout_s=2\" --rw randwrite --bs 4k --iodepth 16 --runtime 7 >/tmp/bench 2>&1 &
        bench=$!
        nodes $bench
        sleep 1
        echo 1 >/sys/bus/pci/devices/$device/reset
        wait $bench || {{ cat /tmp/bench; exit 1; }}
        grep -q 'the controller is reset' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
        echo reset
        # A user who may open the group only.
        chmod 0 /dev/iommu
        confined() {{ /usr/bin/setpriv --bounding-set -dac_override /host/blkyard bench \"pci:$device$1\" --rw read --runtime 1; }}
        refused '/dev/iommu: Permission denied' confined '?iommu=iommufd'
        confined >/tmp/confined 2>&1 && grep -q 'opened through IOMMU group' /tmp/confined || {{ cat /tmp/confined; exit 1; }}
        chmod 600 /dev/iommu
        /host/blkyard bench \"pci:$device?iommu=group\" --rw randread --bs 4k --runtime 6 >/tmp/bench 2>&1 &
        bench=$!
        nodes $bench
        refused 'another process has the device' blkyard bench \"pci:$device?iommu=iommufd\" --rw read
        wait $bench || {{ cat /tmp/bench; exit 1; }}
        /host/blkyard bench \"pci:$device?gone_s=2\" --rw randwrite --bs 4k --iodepth 16 --runtime 1000 >/tmp/bench 2>&1 &
        bench=$!
        nodes $bench
        refused 'another process has the device' blkyard bench pci:$device --rw read
        refused 'another process has the device' blkyard bench \"pci:$device?iommu=group\" --rw read
        echo running
        until [ ! -e /sys/bus/pci/devices/$device ]; do sleep 0.1; done
        echo released
        if wait $bench; then echo 'the load did not fail'; exit 1; fi
        grep -q 'the device is unplugged' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
        # Nothing was left mapped or in use.
        ! grep -q 'cannot be unmapped' /tmp/bench || {{ cat /tmp/bench; exit 1; }}
        ! dmesg | grep -E 'WARNING|BUG:|Oops' || exit 1
        echo failed"
    );
    let vm = Vm::new(ground.guest, 2).kernel(Kernel::New).nvme(image.path.clone()).folder(folder);
    let mut machine = vm.start(&task)?;
    machine.wait_for_output(|output| output.contains("running\n"))?;
    machine.pull_nvme(0).context("of the controller")?;
    let output = machine.wait()?.success()?;
    // No group and no container is open beside iommufd, and no iommufd beside the group.
    let by_iommufd = "/dev/iommu /dev/vfio/devices/vfioN";
    let wanted =
        ["verified", by_iommufd, "reset", "/dev/vfio/N /dev/vfio/vfio", by_iommufd, "running", "released", "failed"];
    ensure!(output.lines().eq(wanted), "the guest says:\n{output}");
    Ok(())
}

/// Each size in both kinds of memory. The figures are of an emulated machine, and only reported.
fn premapped(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let task = format!(
        "{SHELL}{PRELUDE}{MACHINE}
        /host/blkyard study premapped --quick --json --device \"pci:$device?unbind=on\" 2>/tmp/said || {{
            cat /tmp/said
            exit 1
        }}"
    );
    let vm = Vm::new(ground.guest, 2).nvme(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    let report: Value = serde_json::from_str(&output).with_context(|| format!("the guest says:\n{output}"))?;
    let pairs = report["pairs"].as_array().context("the report has no pairs")?;
    let sizes: Vec<_> = pairs.iter().filter_map(|pair| pair["bytes"].as_u64()).collect();
    ensure!(sizes == [512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20], "sizes {sizes:?}");
    let mut measured = Vec::new();
    for pair in pairs {
        ensure!(pair["samples"].as_u64().is_some_and(|samples| samples >= 6), "{pair}");
        let verdict = |key: &str| pair[key].as_str().with_context(|| format!("no {key} in {pair}"));
        let figure = |key: &str| pair[key]["median"].as_f64().filter(|figure| *figure > 0.0);
        let ratios = figure("cpu_ratio").zip(figure("iops_ratio"));
        let (cpu, iops) = ratios.with_context(|| format!("no ratios in {pair}"))?;
        let bytes = &pair["bytes"];
        let (saves_cpu, is_faster) = (verdict("saves_cpu")?, verdict("is_faster")?);
        measured.push(format!("{bytes} B CPU {cpu:.3} ({saves_cpu}), IOPS {iops:.2} ({is_faster})"));
    }
    ground.measured(format!("mapped once over mapped for each I/O: {}", measured.join("; ")));
    Ok(())
}

/// A folder with the program, for a guest.
pub(super) fn program_folder(ground: &ScenarioContext) -> Result<PathBuf> {
    let folder = ground.path("programs");
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (from, to) = (PathBuf::from(ground.program.command()?.get_program()), folder.join("blkyard"));
    fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
    Ok(folder)
}
