//! A registered buffer of a program that uses several disks of daemons: one registration serves those with a DMA domain
//! each, namespaces of one controller, and the paths of one disk.

use std::path::Path;
use std::sync::Arc;

use blkyard::{
    Bio, BufferAccess, Disk, DiskConfig, Op, QueueCounts, Region, RegisteredBuffer, SECTOR_BYTES, Segment, Status,
    Submitter,
};

use crate::common::{Daemon, inspect, inspect_at, wait_until};
use crate::cross_reset::{NQN, two_ports};

/// Bytes of the buffer, which begins within its region.
const BYTES: u64 = 512 << 10;
const START: u64 = 8192;
/// Offsets and lengths in the buffer: a part of a page, pages from within one on, and 64 pages.
const RANGES: [(u64, u32); 3] = [(512, 512), (8192 + 512, 8192), (65536, 256 << 10)];

fn config() -> DiskConfig {
    DiskConfig { threads: 1, depth: 4, buffer_bytes: 4096, queues: QueueCounts::only(1) }
}

fn buffer() -> Arc<RegisteredBuffer> {
    let region = Region::shared(1 << 20).unwrap();
    RegisteredBuffer::new(&region, START, BYTES, BufferAccess::ReadWrite).unwrap()
}

/// One I/O: its range of the disk is that of the buffer.
fn io(queue: &mut Submitter, op: Op, segment: Segment, at: u64) -> Status {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sector, bio.sectors) = (op, at / SECTOR_BYTES, segment.len / SECTOR_BYTES as u32);
    if op == Op::Flush {
        (bio.sector, bio.sectors) = (0, 0);
    } else {
        bio.segments.push(segment);
    }
    queue.submit(bio);
    let mut status = Status::default();
    queue.wait(|bio| status = bio.status);
    status
}

/// Bytes that differ by disk, and in each 512 bytes.
fn pattern(disk: u8, at: u64, len: u32) -> Vec<u8> {
    (at..at + u64::from(len)).map(|at| disk ^ (at / 512 * 7 + at) as u8).collect()
}

/// Writes each range from the buffer.
fn write(disk: &mut Disk, buffer: &RegisteredBuffer, number: u8) {
    for (at, len) in RANGES {
        let segment = buffer.segment(at, len);
        buffer.span(segment).unwrap().copy_from_slice(&pattern(number, at, len));
        assert_eq!(disk.run(|queue| io(queue, Op::Write, segment, at)), [Status::Ok], "{}", disk.info().name);
    }
    assert_eq!(disk.run(|queue| io(queue, Op::Flush, buffer.segment(0, 0), 0)), [Status::Ok]);
}

/// Reads each range into another place of the buffer, and compares.
fn verify(disk: &mut Disk, buffer: &RegisteredBuffer, number: u8) {
    for (at, len) in RANGES {
        let segment = buffer.segment(BYTES - 512 - u64::from(len), len);
        buffer.span(segment).unwrap().fill(0);
        assert_eq!(disk.run(|queue| io(queue, Op::Read, segment, at)), [Status::Ok], "{}", disk.info().name);
        let mut bytes = vec![0; len as usize];
        buffer.span(segment).unwrap().copy_to_slice(&mut bytes);
        assert!(bytes == pattern(number, at, len), "{}: {len} bytes at {at}", disk.info().name);
    }
}

fn image(folder: &Path, name: &str) {
    std::fs::File::create(folder.join(name)).unwrap().set_len(1 << 20).unwrap();
}

/// Number of memory regions that each export's client has mapped.
fn mapped(folder: &Path) -> Vec<u64> {
    let tree = inspect(folder, &[]);
    tree["exports"].as_array().unwrap().iter().map(|export| export["session"]["regions"].as_u64().unwrap()).collect()
}

#[test]
fn one_registration_serves_two_vfio_user_disks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ["a.img", "b.img"].iter().for_each(|name| image(folder, name));
    let words = ["--control", "c", "--device", "a.img", "--export", "vfio-user:n"];
    let daemon = Daemon::start(folder, &[&words[..], &["--device", "b.img", "--export", "vfio-user:m"]].concat());
    let buffer = buffer();
    let mut disks = ["n", "m"]
        .map(|socket| Disk::open(&format!("vfio-user:{}?queues=1", folder.join(socket).display()), config()).unwrap());
    let refused = disks.each_mut().map(|disk| disk.run(|queue| io(queue, Op::Read, buffer.segment(0, 512), 0))[0]);
    assert_eq!(refused, [Status::Invalid; 2], "the buffer is not registered");
    let before = mapped(folder);
    disks.iter().for_each(|disk| disk.buffers().register(&buffer));
    let after: Vec<_> = before.iter().map(|regions| regions + 1).collect();
    assert_eq!(mapped(folder), after, "one mapping in each domain");
    for (number, disk) in (1..).zip(&mut disks) {
        write(disk, &buffer, number);
    }
    for (number, disk) in (1..).zip(&mut disks) {
        verify(disk, &buffer, number);
    }
    assert_eq!(mapped(folder), after, "no I/O maps");
    for (number, name) in (1..).zip(["a.img", "b.img"]) {
        let bytes = std::fs::read(folder.join(name)).unwrap();
        for (at, len) in RANGES {
            let range = at as usize..at as usize + len as usize;
            assert!(bytes[range] == pattern(number, at, len), "{name}: {len} bytes at {at}");
        }
    }
    // One disk lets go of it: the other goes on.
    disks[0].buffers().unregister(&buffer);
    assert_eq!(mapped(folder), [before[0], after[1]]);
    assert_eq!(disks[0].run(|queue| io(queue, Op::Read, buffer.segment(0, 512), 0)), [Status::Invalid]);
    write(&mut disks[1], &buffer, 3);
    verify(&mut disks[1], &buffer, 3);
    drop(disks);
    wait_until("the disks have let go of it", || Arc::strong_count(&buffer) == 1);
    daemon.stop();
}

#[test]
fn one_registration_serves_all_paths_of_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (tcp, addresses) = two_ports(folder, "ram:1M?share=on");
    let paths = addresses.map(|address| format!("nvme-tcp://{address}/{NQN}")).join(",");
    let over_tcp = format!("multipath:{paths}?policy=round-robin&queues=1");
    // Each of these has a DMA domain.
    let exports = ["--export", "vhost-user-blk:n", "--export", "vhost-user-blk:m"];
    let words = [&["--control", "d", "--device", "ram:1M?share=on"][..], &exports].concat();
    let vhost_user = Daemon::start(folder, &words);
    let paths = ["n", "m"].map(|socket| format!("vhost-user:{}", folder.join(socket).display())).join(",");
    let over_vhost_user = format!("multipath:{paths}?policy=round-robin&queues=1&unidentified=on");
    let buffer = buffer();
    let mut disks = [over_tcp, over_vhost_user].map(|name| Disk::open(&name, config()).unwrap());
    disks.iter().for_each(|disk| disk.buffers().register(&buffer));
    for (number, disk) in (1..).zip(&mut disks) {
        write(disk, &buffer, number);
    }
    for (number, disk) in (1..).zip(&mut disks) {
        // Each range by either path.
        (0..2).for_each(|_| verify(disk, &buffer, number));
    }
    for disk in &mut disks {
        disk.buffers().unregister(&buffer);
        assert_eq!(disk.run(|queue| io(queue, Op::Read, buffer.segment(0, 512), 0)), [Status::Invalid]);
    }
    drop(disks);
    assert_eq!(Arc::strong_count(&buffer), 1);
    for control in ["c", "d"] {
        let tree = inspect_at(folder, control, &[]);
        for path in 0..2 {
            let queues = tree["exports"][path]["queues"].as_array().unwrap();
            let reads: u64 = queues.iter().filter_map(|queue| queue["ops"]["read"]["ios"].as_u64()).sum();
            assert!(reads > 0, "path {path} of {control} has no I/O");
        }
    }
    tcp.stop();
    vhost_user.stop();
}
