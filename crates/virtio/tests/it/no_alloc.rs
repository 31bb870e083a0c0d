//! After set-up a ring allocates nothing, for any behaviour of the guest.

use std::sync::Arc;

use blkyard_mem::{CountingAllocator, Region};
use blkyard_virtio::driver_model::{Descriptor, ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{
    Features, Inflight, Parsed, RingFault, VirtioStatus, inflight_bytes, parse, write_status, written,
};

use crate::common::{Device, SEGMENTS};

/// Fetches and answers all there is; returns how many were I/O, and how many were refused.
fn turn(device: &mut Device) -> (u32, u32) {
    let (mut io, mut refused) = (0, 0);
    while let Ok(Some(head)) = device.ring.fetch(&device.memory, &mut device.chain) {
        let parsed = parse(&device.chain, &device.memory, &device.context, &mut device.bio);
        let (status, status_at) = match parsed {
            Parsed::Io { status_at } => {
                io += 1;
                (VirtioStatus::Ok, Some(status_at))
            }
            Parsed::GetId { status_at } => {
                device.serial.write(&device.memory, device.chain.writable());
                (VirtioStatus::Ok, Some(status_at))
            }
            Parsed::Reject { status, status_at, reason } => {
                device.refusals.request(&reason);
                refused += 1;
                (status, status_at)
            }
        };
        if let Some(at) = status_at {
            write_status(&device.memory, at, status);
        }
        device.ring.complete(head, written(device.bio.bytes(), status));
    }
    let _ = device.ring.publish();
    device.ring.enable_notify();
    device.ring.disable_notify();
    (io, refused)
}

#[test]
fn a_ring_allocates_nothing_whatever_the_guest_does() {
    let mut guest = ModelGuest::new(64, 0x10000, true);
    let mut device = Device::new(&guest, true);
    let header = guest.alloc(16, 16);
    let data = guest.alloc(4096, 512);
    let status = guest.alloc(1, 1);
    let table = guest.alloc(16 * 64, 16);
    let buffers = |parts: u16| {
        let mut buffers = vec![ModelBuffer { addr: header, len: 16, writable: false }];
        buffers.extend((0..parts).map(|_| ModelBuffer { addr: data, len: 512, writable: true }));
        buffers.push(ModelBuffer { addr: status, len: 1, writable: true });
        buffers
    };
    let mut saw = (0, 0);
    for (name, kind, parts) in [
        ("a read", 0, 1),
        ("a read of as many segments as there may be", 0, SEGMENTS),
        ("a read of one more", 0, SEGMENTS + 1),
        ("a read of many more", 0, 50),
        ("the serial number", 8, 1),
        ("an unknown request", 77, 1),
    ] {
        for indirect in [false, true] {
            guest.write(header, &blk_header(kind, 1));
            let buffers = buffers(parts);
            let head = if indirect { guest.chain_indirect(table, &buffers) } else { guest.chain(&buffers) };
            guest.offer(head.unwrap());
            guest.publish();
            let before = CountingAllocator::count();
            let (io, refused) = turn(&mut device);
            assert!(before > 0, "the allocator counts");
            assert_eq!(CountingAllocator::count() - before, 0, "{name}");
            assert_eq!(guest.poll().map(|used| used.0), head.map(u32::from), "{name}");
            saw = (saw.0 + io, saw.1 + refused);
        }
    }
    assert_eq!(saw, (4, 6));
    // A chain that is a circle, and a ring that breaks.
    guest.set_descriptor(guest.addrs()[0], 5, Descriptor { addr: data, len: 1, flags: 1, next: 5 });
    guest.offer(5);
    guest.offer(64);
    guest.publish();
    let before = CountingAllocator::count();
    assert_eq!(turn(&mut device), (0, 1));
    assert_eq!(CountingAllocator::count() - before, 0);
    assert!(device.ring.fault().is_some());
}

#[test]
fn a_record_grows_no_more_than_its_ring_whatever_the_guest_offers() {
    for order in [Features::empty(), Features::IN_ORDER] {
        let mut guest = ModelGuest::with(order, 4, 0x1000);
        let mut device = Device::new(&guest, true);
        let region = Region::anonymous(inflight_bytes(order, 4)).unwrap();
        device.ring.track(Inflight::new(Arc::clone(&region), 0, region.len()).unwrap()).unwrap();
        let addr = guest.alloc(1, 1);
        let head = guest.chain(&[ModelBuffer { addr, len: 1, writable: true }]).unwrap();
        let mut ends = 0;
        let broken = loop {
            // The same one again as soon as it has ended, though that was not published.
            guest.offer(head);
            let _ = guest.publish();
            let before = CountingAllocator::count();
            let fetched = device.ring.fetch(&device.memory, &mut device.chain);
            let Ok(Some(head)) = fetched else { break fetched };
            device.ring.complete(head, 1);
            assert_eq!(CountingAllocator::count() - before, 0, "{order:?}, {ends}");
            ends += 1;
        };
        assert_eq!((broken, ends), (Err(RingFault::HeadTwice), 4), "{order:?}");
    }
}

#[test]
fn a_driver_allocates_nothing_whatever_it_is_asked() {
    use blkyard_mq::{BioFlags, Op};
    for format in crate::driver_common::formats() {
        let mut bench = crate::driver_common::disk::bench(
            &crate::driver_common::disk::config(format, 64),
            crate::driver_common::disk::ram(crate::driver_common::disk::store()),
        );
        let pieces: Vec<(u64, u32)> = (0..30).map(|piece| (piece * 2048, 512)).collect();
        for round in 0..3 {
            for number in 0..100 {
                bench.submit(Op::Read, BioFlags::NO_MERGE, number, 1, &pieces[..1], number);
                bench.submit(Op::Write, BioFlags::NO_MERGE, 1000 + 30 * number, 30, &pieces, number);
                bench.submit(Op::Discard, BioFlags::empty(), 100 * number % 1000, 8, &[], number);
                bench.submit(Op::Flush, BioFlags::empty(), 0, 0, &[], number);
            }
            let before = CountingAllocator::count();
            let mut rounds = 0;
            while !bench.hw.is_idle() {
                bench.round();
                bench.hw.driver_mut().driver.arm();
                bench.hw.driver_mut().driver.disarm();
                rounds += 1;
            }
            assert_eq!(CountingAllocator::count() - before, 0, "{format:?}, round {round}");
            assert!(rounds > 1 && bench.ended.iter().all(|bio| bio.status.is_ok()));
            bench.ended.clear();
        }
    }
}
