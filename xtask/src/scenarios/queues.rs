//! The queues of a Linux guest's virtio-blk driver: the maximum number, in both ring formats; and how a guest's own fio
//! goes on them.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Image, KIB, MIB, RunsIn, Scenario, ScenarioContext, control};
use crate::server::OfferedDevice;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "queues-guest",
        sentence: "a guest writes and verifies disks of 1, 2, 4 and 16 queues, split and packed, through every queue of each",
        place: RunsIn::Guest,
        ours: true,
        tell: guest,
    },
    Scenario {
        name: "queues-fio",
        sentence: "a guest's fio reads with 1, 2 and 4 jobs from disks of 1, 2 and 4 queues without an error, through every queue",
        place: RunsIn::Guest,
        ours: true,
        tell: fio,
    },
];

/// Queues of each disk; disks with packed rings come first.
const QUEUES: [u16; 8] = [1, 2, 4, 16, 1, 2, 4, 16];
const PACKED: usize = 4;
/// Bytes written through each queue.
const SHARE: u64 = 128 * KIB;

/// One job for each queue, on the first CPU that uses it.
const TASK: &str = "set -e
    modprobe virtio_blk
    for cpu in $(seq 2 15); do echo 1 >/sys/devices/system/cpu/cpu$cpu/online; done
    jobs=
    for disk in $(ls /sys/block | grep vd); do
        cd /sys/block/$disk
        echo $disk $(ls mq | wc -l) $(cut -c 35 device/features)
        for queue in $(ls mq); do
            cpu=$(cut -d , -f 1 mq/$queue/cpu_list)
            jobs=\"$jobs --name=$disk-$queue --filename=/dev/$disk --offset=${queue}m --cpus_allowed=$cpu\"
        done
    done
    cd /tmp
    fio --direct=1 --ioengine=libaio --thread --group_reporting --verify=crc32c --verify_fatal=1 --iodepth=8 \
        --rw=randwrite --bs=4k --size=128k --output-format=terse --output=/dev/null $jobs
    echo verified
    sleep 1000";

fn guest(ground: &ScenarioContext) -> Result<()> {
    // As many CPUs as queues, since a driver takes no more. Two CPUs boot and the others start later, which is faster.
    let mut vm = Vm::new(ground.guest, 16).online(2);
    let (mut images, mut exports) = (Vec::<Image>::new(), Vec::new());
    for (number, queues) in QUEUES.into_iter().enumerate() {
        let image = ground.image(&format!("{number}.img"), 16 * MIB)?;
        let export = ground.export(OfferedDevice::File(image.path.clone()), &format!("{number}.sock"), queues);
        vm = vm.disk(&export.socket, queues);
        if number + 1 == PACKED {
            vm = vm.packed();
        }
        images.push(image);
        exports.push(export);
    }
    // The firmware keeps rings of each disk in memory where QEMU may load the initramfs; the server then logs these
    // rings as broken.
    let server = control::serve(ground, &exports)?;
    let mut machine = vm.start(TASK)?;
    machine.wait_for_output(|output| output.contains("verified")).context("of fio's blocks")?;
    // Queues and ring format of each disk in the guest.
    let output = machine.output();
    let disk = |(number, queues): (usize, &u16)| {
        let name = char::from(b'a' + number as u8);
        format!("vd{name} {queues} {}\n", u8::from(number < PACKED))
    };
    let expected: String = QUEUES.iter().enumerate().map(disk).collect();
    ensure!(output == expected + "verified\n", "the guest says:\n{output}");
    // Requests received by each queue.
    let tree = control::tree_when(ground, "every queue's counters", control::all_answered)?;
    for (number, queues) in QUEUES.into_iter().enumerate() {
        let export = &tree["exports"][number];
        let packed = export["session"]["features"].as_array().is_some_and(|all| all.contains(&"RING_PACKED".into()));
        ensure!(packed == (number < PACKED), "export {number} has other rings than its guest:\n{export:#}");
        let all = export["queues"].as_array().context("an export without queues")?;
        ensure!(all.len() == usize::from(queues), "export {number} has {} queues", all.len());
        for queue in all {
            let bytes = |op| queue.pointer(&format!("/ops/{op}/bytes")).and_then(Value::as_u64);
            let through = bytes("write") == Some(SHARE) && bytes("read") >= Some(SHARE);
            ensure!(through, "fio wrote and read {SHARE} bytes through each queue, and not by this one:\n{queue:#}");
        }
    }
    drop(machine);
    server.stop()?;
    for (image, queues) in images.iter().zip(QUEUES) {
        let (share, allocated) = (u64::from(queues) * SHARE, image.allocated()?);
        let fine = (share..share + 64 * KIB).contains(&allocated);
        ensure!(fine, "{} has {allocated} bytes and not {share}", image.path.display());
    }
    Ok(())
}

/// Jobs, and queues of the disks: the grid of the study `multi-vq`.
const JOBS: [usize; 3] = [1, 2, 4];
const FIO_QUEUES: [u16; 3] = [1, 2, 4];

/// The study's load. Job `n` runs on a CPU of queue `n` modulo their number, and no two on one CPU.
const FIO_TASK: &str = "set -e
    modprobe virtio_blk
    cd /tmp
    for jobs in 1 2 4; do
        for disk in vda vdb vdc; do
            queues=$(ls /sys/block/$disk/mq | wc -l)
            list=
            for job in $(seq 0 $((jobs - 1))); do
                cpus=/sys/block/$disk/mq/$((job % queues))/cpu_list
                cpu=$(tr -d ' ' <$cpus | cut -d , -f $((job / queues + 1)))
                list=\"$list --name=job$job --cpus_allowed=$cpu\"
            done
            fio --filename=/dev/$disk --direct=1 --ioengine=libaio --thread --group_reporting --rw=randread --bs=4k \
                --iodepth=64 --norandommap --time_based --runtime=4 --output-format=terse --output=found $list
            echo cell $jobs $queues $(cut -d ';' -f 5,8 found | tr ';' ' ')
        done
    done
    echo finished
    sleep 1000";

/// Without KVM the guest's CPUs are threads of an emulator that share the machine's, so a rate says nothing about a
/// rate of the study's: the figures are printed, and nothing is required of them.
fn fio(ground: &ScenarioContext) -> Result<()> {
    let mut vm = Vm::new(ground.guest, 4);
    let mut exports = Vec::new();
    for queues in FIO_QUEUES {
        // Of different sizes, since disks of one name are one disk.
        let export = ground.export(OfferedDevice::Ram(64 * u32::from(queues)), &format!("{queues}.sock"), queues);
        vm = vm.disk(&export.socket, queues);
        exports.push(export);
    }
    let server = control::serve(ground, &exports)?;
    let mut machine = vm.start(FIO_TASK)?;
    machine.wait_for_output(|output| output.contains("finished")).context("of fio's reads")?;
    let output = machine.output();
    let mut cells = output.lines().filter_map(|line| line.strip_prefix("cell "));
    let mut found = Vec::new();
    for jobs in JOBS {
        let mut rates = Vec::new();
        for queues in FIO_QUEUES {
            let cell = cells.next().with_context(|| format!("no cell of {jobs} jobs, {queues} queues:\n{output}"))?;
            let numbers: Vec<usize> = cell.split(' ').filter_map(|number| number.parse().ok()).collect();
            let [has_jobs, has_queues, errors, iops] = numbers[..] else { bail!("fio says {cell}:\n{output}") };
            ensure!((has_jobs, has_queues) == (jobs, usize::from(queues)), "another cell: {cell}");
            ensure!(errors == 0 && iops > 0, "{jobs} jobs, {queues} queues: error {errors}, {iops} IOPS");
            rates.push(iops.to_string());
        }
        found.push(format!("{jobs} jobs {}", rates.join(", ")));
    }
    let tree = control::tree_when(ground, "every queue's counters", control::all_answered)?;
    for (number, queues) in FIO_QUEUES.into_iter().enumerate() {
        let all = tree["exports"][number]["queues"].as_array().context("an export without queues")?;
        ensure!(all.len() == usize::from(queues), "export {number} has {} queues", all.len());
        for queue in all {
            let bytes = queue.pointer("/ops/read/bytes").and_then(Value::as_u64);
            ensure!(bytes > Some(MIB), "four jobs read through each queue, and not through this one:\n{queue:#}");
        }
    }
    drop(machine);
    server.stop()?;
    ground.measured(format!("IOPS on 1, 2, 4 queues, an emulated guest: {}", found.join("; ")));
    Ok(())
}
