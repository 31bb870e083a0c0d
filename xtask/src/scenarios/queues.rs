//! The queues of a Linux guest's virtio-blk driver: the maximum number, in both ring formats.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Image, KIB, MIB, RunsIn, Scenario, ScenarioContext, control};
use crate::server::OfferedDevice;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "queues-guest",
    sentence: "a guest writes and verifies disks of 1, 2, 4 and 16 queues, split and packed, through every queue of each",
    place: RunsIn::Guest,
    ours: true,
    tell: guest,
}];

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
