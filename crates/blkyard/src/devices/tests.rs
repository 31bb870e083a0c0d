//! Names of all kinds, and a further kind that only this file knows.

use std::sync::Arc;

use blkyard_mq::{
    Batch, Bio, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, QueueCounts, QueueKind, RegionTable, Segment,
    Status,
};
use blkyard_os::{Ring, RingConfig};

use super::*;
use crate::{Backing, DeviceHandover, DeviceOps, DeviceQueue, ReceivedDevice};

#[test]
fn memory_devices_by_name() {
    let device = Device::open("ram:64M?block_size=4k&readonly=on").unwrap();
    let info = device.info();
    assert_eq!((info.capacity_sectors, info.limits.logical_block_bytes, info.read_only), (131_072, 4096, true));
    info.limits.check().unwrap();
    let null = Device::open("null:8T").unwrap();
    assert_eq!((null.info().capacity_sectors, null.backing().unwrap()), (1 << 34, Backing::Nothing));
}

#[test]
fn names_that_are_wrong_say_what_would_be_right() {
    for (name, words) in [
        ("ram:lots", ["lots", "512M"]),
        ("vhost-user:/nonexistent.sock", ["/nonexistent.sock", "start its back-end"]),
        ("vhost-user:/dev/null", ["/dev/null", "no process listens"]),
        ("vhost-user:/x?queue_size=100", ["queue_size=100", "power of two"]),
        ("vhost-user:/x?queues=0", ["queues=0", "from 1"]),
        ("vhost-user:/x?queue=1", ["'queue'", "queues, queue_size, packed"]),
        ("ram:1000", ["1000", "blocks of 512"]),
        ("nvme:/dev/ng987n1", ["/dev/ng987n1: no such device", "blkyard nvme list"]),
        ("nvme:/dev/null", ["not a character device of an NVMe namespace", "/dev/ngXnY"]),
        ("nvme:/dev/ng0n1?poll=maybe", ["poll=maybe", "on or off"]),
        ("nvme:/dev/ng0n1?queues=4", ["queues", "readonly, poll"]),
        ("pci:nvme0", ["not a PCI address", "0000:00:10.0"]),
        ("pci:ffff:ff:1f.7", ["no such device", "lspci"]),
        ("pci:00:10.0?unbind=maybe", ["unbind=maybe", "on or off"]),
        ("pci:00:10.0?iommu=type1", ["iommu=type1", "group or iommufd"]),
        ("pci:00:10.0?pinned=on", ["pinned", "unbind, pin, iommu"]),
        (
            "floppy:a",
            [
                "floppy",
                "vfio-user:SOCKET, nvme:/dev/ngXnY, nvme-tcp://HOST:PORT/NQN, pci:ADDRESS, ram:SIZE, null:SIZE, chaos:SIZE, model:NAME, multipath:DEVICE,DEVICE or nvme-discover://HOST:PORT/NQN",
            ],
        ),
        ("null:1G?sise=4", ["sise", "latency_us"]),
        ("null:1G?seed=4", ["seed", "latency_us"]),
        ("chaos:1M?mbps=4", ["mbps", "timeouts"]),
        ("ram:1G?block_size=513", ["block_size=513", "4k"]),
        ("multipath:ram:1M", ["one path", "separate them by commas"]),
        ("multipath:ram:1M,ram:2M", ["ram:2M", "2048 sectors, and this path 4096"]),
        ("multipath:ram:1M,ram:1M", ["ram:1M, so it may be another disk", "unidentified=on"]),
        ("multipath:ram:1M,floppy:a", ["floppy", "ram:SIZE"]),
        ("multipath:ram:1M,ram:1M?policy=best", ["policy=best", "round-robin"]),
        ("multipath:ram:1M,null:1M?latency=4", ["latency", "the known keys"]),
        ("nvme-discover://127.0.0.1", ["name of the subsystem is missing", "nvme-discover://HOST:PORT/NQN"]),
        ("nvme-discover://127.0.0.1:1/nqn.x", ["cannot connect to 127.0.0.1:1", "see whether it runs"]),
        (
            "multipath:nvme-discover://127.0.0.1/nqn.x,ram:1M",
            ["a path is a device over several paths", "name all paths"],
        ),
        ("multipath:multipath:ram:1M,ram:1M", ["a path is a device over several paths", "name all paths"]),
        ("file:/x?direct=perhaps", ["direct=perhaps", "auto"]),
    ] {
        let error = Device::open(name).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{name}: {error}");
    }
}

#[test]
fn a_scheme_names_one_kind() {
    let schemes: Vec<_> = KINDS.iter().flat_map(|kind| kind.schemes).collect();
    assert!((1..schemes.len()).all(|number| !schemes[..number].contains(&schemes[number])), "{schemes:?}");
}

#[test]
fn kinds_that_end_with_the_daemon_say_why_they_are_not_handed_over() {
    for (name, file) in [("ram:1M", false), ("chaos:1M", false), ("model:latency?size=1M", false), ("null:1M", true)] {
        let spec = Spec::parse(name).unwrap();
        let file = file.then(|| std::fs::File::open("/dev/null").unwrap().into());
        let error = Device::adopt(spec, ReceivedDevice { file, ..ReceivedDevice::default() }).unwrap_err().to_string();
        assert!(error.starts_with(name) && error.contains("without --takeover"), "{error}");
    }
    let error = Device::open("ram:1M").unwrap().can_be_handed_over().unwrap_err().to_string();
    assert!(error.contains("ram:1M: its memory is lost when this daemon ends"), "{error}");
    let null = Device::open("null:1M").unwrap();
    assert!(null.can_be_handed_over().is_ok());
    assert!(Device::adopt(Spec::parse("null:1M").unwrap(), ReceivedDevice::default()).is_ok());
}

#[test]
fn a_namespace_is_adopted_with_both_of_its_descriptors_only() {
    let null = || Some(std::fs::File::open("/dev/null").unwrap().into());
    let adopt = |name: &str, file, claim| {
        let received = ReceivedDevice { file, claim, sync_failed: false };
        Device::adopt(Spec::parse(name).unwrap(), received).unwrap_err().to_string()
    };
    for (name, file, claim) in
        [("nvme:/dev/ng0n1", null(), None), ("nvme:/dev/ng0n1", None, null()), ("file:/dev/null", null(), null())]
    {
        let error = adopt(name, file, claim);
        assert!(error.contains("cannot be handed over"), "{error}");
    }
    let error = adopt("nvme:/dev/ng0n1", null(), null());
    assert!(error.contains("not a character device of an NVMe namespace"), "{error}");
}

/// A kind whose reads return the byte of its name. This is the complete code of a further kind; [`FILLED`] is its line
/// in the table.
const FILLED: DeviceKind = DeviceKind { schemes: &["filled"], usage: "filled:BYTE", open, adopt: None, open_all: None };

fn open(mut spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let capacity_sectors = spec.take_number("sectors", 1, 1 << 40)?.unwrap_or(2048);
    let wrong = |_| SpecError::new(&spec.name, "the byte is no number", "give one from 0 to 255");
    let byte = spec.body.parse().map_err(wrong)?;
    let info = DeviceInfo { name: spec.name.clone(), capacity_sectors, ..DeviceInfo::default() };
    spec.finish()?;
    Ok(Filled { info, byte }.into())
}

#[derive(Debug)]
struct Filled {
    info: DeviceInfo,
    byte: u8,
}

impl DeviceOps for Filled {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn describe(&self) -> String {
        format!("{} everywhere", self.byte)
    }

    fn queue(&self, _: QueueKind, _: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(FilledQueue(self.byte)))
    }

    fn backing(&self) -> io::Result<Backing> {
        Ok(Backing::Nothing)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Err("it is a test")
    }
}

#[derive(Debug)]
struct FilledQueue(u8);

impl<Cx: ?Sized> Driver<Cx> for FilledQueue {
    fn queue_rqs(&mut self, _: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, request, segments)) = batch.take() {
            let mut spans = segments.map(|segment| memory.resolve(segment));
            let filled = request.op() != Op::Read || spans.all(|span| span.inspect(|span| span.fill(self.0)).is_some());
            batch.complete(tag, if filled { Status::Ok } else { Status::Invalid });
        }
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, _: &mut Done<'_>, _: u64) {}
}

#[test]
fn a_device_is_asked_for_queues_of_a_kind_unless_its_name_says() {
    for (name, [read, poll], read_queues, poll_queues) in [
        ("vfio-user:/run/x.sock", [0, 2], None, Some("2")),
        ("vfio-user:/run/x.sock", [3, 0], Some("3"), None),
        ("nvme-tcp://127.0.0.1/nqn?queues=3", [2, 1], Some("2"), Some("1")),
        ("pci:0000:01:00.0?poll_queues=4&read_queues=0", [1, 2], Some("0"), Some("4")),
        ("vfio-user:/run/x.sock?poll_queues=0", [0, 2], None, Some("0")),
        ("vfio-user:/run/x.sock", [0, 0], None, None),
        ("multipath:nvme-tcp://a/nqn.x,nvme-tcp://b/nqn.x?queues=2", [1, 2], Some("1"), Some("2")),
        ("multipath:nvme-tcp://a/nqn.x,ram:16M", [1, 2], None, None),
        ("nvme-discover://a/nqn.x", [1, 2], Some("1"), Some("2")),
        ("vhost-user:/run/x.sock", [2, 2], None, None),
        ("disk.img", [2, 2], None, None),
    ] {
        let mut spec = Spec::parse(name).unwrap();
        Device::ask_queues(&mut spec, QueueCounts { default: 1, read, poll });
        assert_eq!(spec.take("read_queues").as_deref(), read_queues, "{name}");
        assert_eq!(spec.take("poll_queues").as_deref(), poll_queues, "{name}");
    }
}

#[test]
fn a_further_kind_is_its_file_and_a_line() {
    let kinds = [FILLED];
    let spec = Spec::parse("filled:90?sectors=64").unwrap();
    let device = (kind_of(&kinds, &spec).unwrap().open)(spec, None).unwrap();
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let queue = device.queue(QueueKind::Default, 4).unwrap();
    let config = HwQueueConfig { depth: 4, bios_max: 4, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(queue, Arc::new(device.info().clone()), config);
    let (memory, first_byte) = device.memory(1, 4096).unwrap().remove(0);
    queue.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(&memory)])));
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sector, bio.sectors) = (Op::Read, 8, 8);
    bio.segments.push(Segment { region: 0, offset: first_byte, len: 4096 });
    queue.submit(bio);
    queue.issue(&mut ring, 1);
    let mut statuses = Vec::new();
    queue.reap(&mut ring, 2, &mut |bio| statuses.push(bio.status));
    assert_eq!(statuses, [Status::Ok]);
    let mut bytes = [0; 4096];
    memory.span(first_byte, 4096).unwrap().copy_to_slice(&mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 90));
    let error = kind_of(&kinds, &Spec::parse("ram:1M").unwrap()).err().unwrap().to_string();
    assert!(error.contains("filled:BYTE"), "{error}");
}
