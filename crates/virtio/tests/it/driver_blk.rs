//! The virtio-blk driver against our device, both on one thread: every operation in every format, with its content.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{PAGE_BYTES, Region, RegionTable};
use blkyard_mq::{Batch, Bio, BioFlags, DeviceInfo, Done, Driver, Op, QueueLimits, Status};
use blkyard_virtio::driver::{BlkDisk, BlkLayout, BlkRing, DeviceFault, Loopback, LoopbackConfig, SharedMemory};
use blkyard_virtio::{
    BlkConfig, Chain, DeviceRing, Features, GuestMemory, GuestRange, RingBase, RingLayout, VirtioStatus, write_status,
};
use proptest::prelude::*;

use crate::driver_common::disk::{Bench, SECTORS, bench, config, info, ram, store};
use crate::driver_common::formats;

const NONE: BioFlags = BioFlags::empty();

#[test]
fn each_operation_arrives_as_it_was_meant() {
    for format in formats() {
        let seen = Rc::new(RefCell::new(vec![]));
        let log = Rc::clone(&seen);
        let mut bench = bench(&config(format, 8), move |bio, _| {
            let lens: Vec<u32> = bio.segments.iter().map(|segment| segment.len).collect();
            log.borrow_mut().push((bio.op, bio.flags, bio.sector, bio.sectors, lens));
            Status::Ok
        });
        let mut ask = |op, flags, sector, sectors, pieces: &[(u64, u32)]| {
            assert_eq!(bench.one(op, flags, sector, sectors, pieces), Status::Ok, "{format:?}");
            seen.borrow_mut().pop().unwrap()
        };
        assert_eq!(ask(Op::Read, NONE, 7, 2, &[(0, 1024)]), (Op::Read, NONE, 7, 2, vec![1024]));
        assert_eq!(ask(Op::Write, NONE, 8, 3, &[(0, 512), (4096, 1024)]), (Op::Write, NONE, 8, 3, vec![512, 1024]));
        assert_eq!(ask(Op::Flush, NONE, 0, 0, &[]), (Op::Flush, NONE, 0, 0, vec![]));
        assert_eq!(ask(Op::Discard, NONE, 9, 64, &[]), (Op::Discard, NONE, 9, 64, vec![]));
        assert_eq!(ask(Op::WriteZeroes, NONE, 10, 65, &[]), (Op::WriteZeroes, NONE, 10, 65, vec![]));
        let stay = BioFlags::NO_UNMAP;
        assert_eq!(ask(Op::WriteZeroes, stay, 10, 65, &[]), (Op::WriteZeroes, stay, 10, 65, vec![]));
        // The queue flushes durable writes, since the device has no such flag.
        assert_eq!(ask(Op::Write, BioFlags::FUA, 8, 1, &[(0, 512)]), (Op::Flush, NONE, 0, 0, vec![]));
        assert_eq!(seen.borrow_mut().pop().unwrap(), (Op::Write, NONE, 8, 1, vec![512]));
        assert!(seen.borrow().is_empty());
    }
}

#[test]
fn what_the_device_says_becomes_the_status() {
    for (says, becomes) in [
        (Status::Ok, Status::Ok),
        (Status::NotSupported, Status::NotSupported),
        (Status::Io, Status::Io),
        (Status::Medium, Status::Io),
        (Status::NoSpace, Status::Io),
    ] {
        for format in formats() {
            let mut bench = bench(&config(format, 8), |_: &Bio, _: &RegionTable| says);
            assert_eq!(bench.one(Op::Read, NONE, 0, 1, &[(0, 512)]), becomes);
            assert_eq!(bench.one(Op::Write, NONE, 0, 1, &[(0, 512)]), becomes);
        }
    }
}

/// A test's request, with values small enough to collide often.
#[derive(Clone, Debug)]
struct Request {
    op: Op,
    sector: u64,
    /// Sectors of each piece of data, or one number for a range.
    pieces: Vec<u32>,
}

fn request() -> impl Strategy<Value = Request> {
    let op = prop_oneof![
        4 => Just(Op::Read),
        4 => Just(Op::Write),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes)
    ];
    (op, 0_u64..200, prop::collection::vec(1_u32..4, 1..5)).prop_map(|(op, sector, pieces)| Request {
        op,
        sector,
        pieces,
    })
}

/// A byte of a sector that was written in a round.
fn byte(sector: u64, round: usize) -> u8 {
    (sector * 7 + round as u64 * 13 + 1) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// A disk behind a driver, a ring and a device is a disk. Overlapping requests wait for each other here.
    #[test]
    fn a_disk_is_a_disk_whatever_lies_between(
        format in 0_usize..8,
        size in prop_oneof![Just(4_u16), Just(8), Just(64), Just(128)],
        requests in prop::collection::vec(request(), 1..80),
    ) {
        let format = formats().nth(format).unwrap();
        let mut bench = bench(&config(format, size), ram(store()));
        let mut model = vec![0_u8; SECTORS as usize];
        let mut busy = vec![false; SECTORS as usize];
        let mut reads: Vec<(u64, u64, u64)> = vec![];
        let mut offset = 0;
        for (round, request) in requests.into_iter().enumerate() {
            let sectors: u32 = request.pieces.iter().sum();
            let range = request.sector as usize..request.sector as usize + sectors as usize;
            if busy[range.clone()].contains(&true) || offset > 900_000 || round % 16 == 15 {
                prop_assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
                for (at, sector, sectors) in reads.drain(..) {
                    for n in 0..sectors {
                        let got = bench.get(at + n * 512, 512);
                        prop_assert!(got.iter().all(|b| *b == model[(sector + n) as usize]), "{format:?}, sector {}", sector + n);
                    }
                }
                busy.fill(false);
                offset = 0;
            }
            if request.op == Op::Flush {
                bench.submit(Op::Flush, NONE, 0, 0, &[], 0);
                continue;
            }
            busy[range.clone()].fill(true);
            let mut pieces = vec![];
            let start = offset;
            if request.op.has_data() {
                for piece in &request.pieces {
                    // Far enough from each other that they do not become one.
                    pieces.push((offset, piece * 512));
                    offset += u64::from(piece * 512);
                }
            }
            match request.op {
                Op::Read => reads.push((start, request.sector, u64::from(sectors))),
                Op::Write => {
                    for n in 0..u64::from(sectors) {
                        bench.put(start + n * 512, &[byte(request.sector + n, round); 512]);
                        model[(request.sector + n) as usize] = byte(request.sector + n, round);
                    }
                }
                _ => model[range].fill(0),
            }
            bench.submit(request.op, NONE, request.sector, sectors, &pieces, 0);
        }
        prop_assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
        prop_assert!(bench.hw.driver_mut().device.refusals.total() == 0);
    }
}

#[test]
fn a_full_ring_leaves_requests_with_the_queue_and_takes_them_later() {
    for format in formats().filter(|format| !format.contains(Features::INDIRECT_DESC)) {
        let mut bench = bench(&config(format, 16), ram(store()));
        assert_eq!(bench.hw.driver_mut().driver.depth(), 8);
        // Eight requests of eight descriptors each: two fit.
        let pieces: Vec<(u64, u32)> = (0..6).map(|piece| (piece * 8192, 512)).collect();
        for number in 0..8 {
            bench.submit(Op::Read, BioFlags::NO_MERGE, number * 100, 6, &pieces, number);
        }
        bench.hw.issue(&mut (), 1);
        assert_eq!(bench.hw.driver_mut().driver.in_flight().collect::<Vec<_>>(), [0, 1], "{format:?}");
        assert_eq!(bench.finish(), (0..8).map(|number| (number, Status::Ok)).collect::<Vec<_>>());
    }
}

#[test]
fn data_that_the_device_cannot_reach_fails_alone_and_is_counted() {
    for format in formats() {
        let mut bench = bench(&config(format, 8), ram(store()));
        let far = 1 << 30;
        for (number, offset) in [(0, 0), (1, far), (2, 4096)] {
            bench.submit(Op::Read, NONE, number * 100, 2, &[(offset, 512), (8192, 512)], number);
        }
        let want = vec![(0, Status::Ok), (1, Status::Invalid), (2, Status::Ok)];
        assert_eq!(bench.finish(), want, "{format:?}");
        let counted: Vec<_> = violations(&mut bench);
        assert_eq!(counted, [("data outside the memory shared with the device", 1)]);
    }
}

fn violations<S: FnMut(&Bio, &RegionTable) -> Status>(bench: &mut Bench<Loopback<S>>) -> Vec<(&'static str, u64)> {
    bench.hw.driver_mut().driver.violations().iter().filter(|(_, count)| *count > 0).collect()
}

#[test]
fn a_status_that_means_nothing_is_an_error_and_is_counted() {
    for format in formats() {
        for (byte, want, count) in [(0, Status::Ok, 0), (6, Status::Io, 0), (7, Status::Io, 1), (0xff, Status::Io, 1)] {
            let mut bench = bench(&config(format, 8), ram(store()));
            bench.submit(Op::Read, NONE, 0, 1, &[(0, 512)], 0);
            bench.hw.issue(&mut (), 1);
            let half = bench.hw.driver_mut();
            let _ = half.device.turn();
            let layout = BlkLayout::new(&half.disk, 8);
            half.device.queue_memory().span(layout.places as u64 + 16, 1).unwrap().fill(byte);
            assert_eq!(bench.finish(), [(0, want)], "{format:?}: {byte}");
            assert_eq!(violations(&mut bench).iter().map(|(_, count)| count).sum::<u64>(), count);
        }
    }
}

#[test]
fn a_serial_number_is_asked_for_before_all_else() {
    for format in formats() {
        let mut bench = bench(&config(format, 4), ram(store()));
        let half = bench.hw.driver_mut();
        let _ = half.driver.ask_id();
        assert_eq!(half.driver.poll_id(), Ok(None));
        let _ = half.device.turn();
        let id = half.driver.poll_id().unwrap().unwrap().unwrap();
        assert_eq!(&id, b"loop-serial\0\0\0\0\0\0\0\0\0", "{format:?}");
        // Requests wait for it.
        let _ = half.driver.ask_id();
        assert_eq!(bench.one(Op::Read, NONE, 0, 1, &[(0, 512)]), Status::Ok);
    }
}

/// A driver whose session is lost when the ring breaks, and begins again.
struct Sessions<S> {
    config: LoopbackConfig,
    serve: S,
    now: Loopback<S>,
    count: u32,
    fail: bool,
}

impl<S: FnMut(&Bio, &RegionTable) -> Status + Clone> Driver<()> for Sessions<S> {
    fn queue_rqs(&mut self, cx: &mut (), memory: &RegionTable, batch: &mut Batch<'_>) {
        self.now.queue_rqs(cx, memory, batch);
    }

    fn poll(&mut self, cx: &mut (), memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.now.poll(cx, memory, done, now_ns);
        if self.now.driver.ring().fault().is_none() {
            return;
        }
        for tag in self.now.driver.take_in_flight() {
            if self.fail { done.complete(tag, Status::Offline) } else { done.requeue(tag) }
        }
        self.now = Loopback::new(&self.config, self.serve.clone()).unwrap();
        self.now.set_memory(cx, memory);
        self.count += 1;
    }

    fn set_memory(&mut self, cx: &mut (), memory: &RegionTable) {
        self.now.set_memory(cx, memory);
    }
}

#[test]
fn what_a_lost_session_had_is_done_again_or_fails() {
    for format in formats() {
        for fail in [false, true] {
            let config = config(format, 16);
            let serve = |_: &Bio, _: &RegionTable| Status::Ok;
            let now = Loopback::new(&config, serve).unwrap();
            let mut bench = Bench::new(Sessions { config, serve, now, count: 1, fail }, info(), 8);
            (0..4).for_each(|number| bench.submit(Op::Read, NONE, number * 100, 1, &[(0, 512)], number));
            bench.hw.issue(&mut (), 1);
            let half = &mut bench.hw.driver_mut().now;
            assert_eq!(half.driver.in_flight().count(), 4);
            lie(half);
            let want = if fail { Status::Offline } else { Status::Ok };
            assert_eq!(bench.finish(), (0..4).map(|number| (number, want)).collect::<Vec<_>>(), "{format:?}");
            assert_eq!(bench.hw.driver_mut().count, 2);
            assert_eq!(bench.one(Op::Read, NONE, 0, 1, &[(0, 512)]), Status::Ok);
        }
    }
}

/// The device breaks the ring, and is seen no more.
fn lie<S: FnMut(&Bio, &RegionTable) -> Status>(half: &mut Loopback<S>) {
    let layout = BlkLayout::new(&half.disk, half.driver.ring().size());
    let (part, at, bytes) = if half.disk.features.contains(Features::RING_PACKED) {
        // Used in this lap, and an id beyond the ring.
        (layout.parts[0], 12, vec![0xff, 0xff, 0x80, 0x80])
    } else {
        (layout.parts[2], 2, vec![0xff, 0xff])
    };
    half.device.is_running = false;
    half.device.queue_memory().span((part + at) as u64, bytes.len()).unwrap().copy_from_slice(&bytes);
}

#[test]
fn a_broken_ring_keeps_its_requests_until_they_are_taken_back() {
    for format in formats() {
        let mut bench = bench(&config(format, 16), |_: &Bio, _: &RegionTable| Status::Ok);
        bench.submit(Op::Read, NONE, 0, 1, &[(0, 512)], 0);
        bench.hw.issue(&mut (), 1);
        lie(bench.hw.driver_mut());
        bench.round();
        for _ in 0..3 {
            bench.submit(Op::Read, NONE, 100, 1, &[(0, 512)], 1);
            bench.round();
        }
        assert!(bench.ended.is_empty());
        let half = bench.hw.driver_mut();
        assert!(matches!(half.driver.ring().fault(), Some(DeviceFault::UsedJumped | DeviceFault::IdOutOfRange)));
        assert_eq!(half.driver.in_flight().collect::<Vec<_>>(), [0]);
        assert_eq!(violations(&mut bench).len(), 1, "counted once: {:?}", violations(&mut bench));
        // For the test ends here.
        let Loopback { driver, .. } = bench.hw.driver_mut();
        driver.take_in_flight().for_each(std::mem::forget);
    }
}

#[test]
fn what_comes_back_after_all_was_taken_back_is_not_listened_to() {
    for format in formats() {
        let mut bench = bench(&config(format, 16), |_: &Bio, _: &RegionTable| Status::Ok);
        bench.submit(Op::Read, NONE, 0, 1, &[(0, 512)], 0);
        bench.hw.issue(&mut (), 1);
        bench.hw.driver_mut().driver.take_in_flight().for_each(std::mem::forget);
        bench.submit(Op::Read, NONE, 100, 1, &[(0, 512)], 1);
        (0..3).for_each(|_| bench.round());
        let half = bench.hw.driver_mut();
        assert_eq!(
            (half.device.ring.in_flight(), half.driver.ring().in_flight()),
            (0, 1),
            "{format:?}: answered, and not heard"
        );
        assert!(half.driver.in_flight().next().is_none() && bench.ended.is_empty());
    }
}

#[test]
fn header_and_status_are_one_line_and_nothing_overlaps() {
    for format in formats() {
        for size in [4, 128, 1024] {
            let half = Loopback::new(&config(format, size), |_: &Bio, _: &RegionTable| Status::Ok).unwrap();
            let layout = BlkLayout::new(&half.disk, size);
            let mut ends = layout.parts.to_vec();
            ends.push(layout.places);
            assert!(ends.is_sorted() && ends.iter().chain([&layout.stride]).all(|at| at.is_multiple_of(128)));
            let most = usize::from(half.disk.info.limits.segments_max);
            assert!(64 + (most + 2) * 16 <= layout.stride);
            // Whole pages, since pages are placed on NUMA nodes.
            let used = layout.places + usize::from(half.driver.depth()) * layout.stride;
            assert_eq!(layout.bytes, used.next_multiple_of(PAGE_BYTES));
        }
    }
}

#[test]
fn every_place_is_written_within_its_own_memory() {
    // All requests in flight at once, each with a different pattern.
    for format in formats() {
        let store: Arc<Region> = store();
        let mut bench = bench(&config(format, 64), ram(Arc::clone(&store)));
        let depth = u64::from(bench.hw.driver_mut().driver.depth());
        for number in 0..depth {
            bench.put(number * 1024, &[number as u8 + 1; 1024]);
            bench.submit(Op::Write, NONE, number * 20, 2, &[(number * 1024, 512), (number * 1024 + 512, 512)], number);
        }
        assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
        for number in 0..depth {
            let mut bytes = [0; 1024];
            store.span(number * 20 * 512, 1024).unwrap().copy_to_slice(&mut bytes);
            assert_eq!(bytes, [number as u8 + 1; 1024]);
        }
    }
}

/// A device that records discards and accepts them.
struct Ranges {
    blk: BlkRing,
    ring: DeviceRing,
    memory: GuestMemory,
    chain: Chain,
    /// Readable bytes of each chain.
    seen: Vec<Vec<u8>>,
}

impl Ranges {
    /// With this number of ranges in a discard, for any ring.
    fn new(features: Features, ranges: u16) -> (Ranges, BlkDisk) {
        let mut space = BlkConfig::new(&info(), 1, 126, true).read(0, 60).unwrap();
        space[40..42].copy_from_slice(&ranges.to_le_bytes());
        let disk = BlkDisk::new("ranges", features | Features::DISCARD | Features::SEG_MAX, &space, 128).unwrap();
        let layout = BlkLayout::new(&disk, 128);
        let region = Region::anonymous(layout.bytes).unwrap();
        let addr = 1 << 20;
        let shared = SharedMemory { region: Arc::clone(&region), offset: 0, addr };
        let blk = BlkRing::new(&disk, 128, &shared, Arc::default()).unwrap();
        let range = GuestRange { guest_addr: addr, user_addr: addr, len: layout.bytes as u64, region: 0, offset: 0 };
        let memory = GuestMemory::new(Arc::new(RegionTable::new(vec![region])), vec![range]).unwrap();
        let parts = layout.parts.map(|part| addr + part as u64);
        let ring = RingLayout::locate(&memory, disk.features, 128, parts).unwrap();
        let ring = DeviceRing::new(ring, 128, disk.features, RingBase::start(disk.features)).unwrap();
        (Ranges { blk, ring, memory, chain: Chain::new(128), seen: vec![] }, disk)
    }
}

impl Driver<()> for Ranges {
    fn queue_rqs(&mut self, _cx: &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let _ = self.blk.queue(batch, |_| None);
    }

    fn poll(&mut self, _cx: &mut (), _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        while let Some(head) = self.ring.fetch(&self.memory, &mut self.chain).unwrap() {
            let mut bytes = vec![];
            for segment in self.chain.readable() {
                let span = self.memory.table().resolve(*segment).unwrap();
                let at = bytes.len();
                bytes.resize(at + span.len(), 0);
                span.copy_to_slice(&mut bytes[at..]);
            }
            self.seen.push(bytes);
            write_status(&self.memory, self.chain.status_at().unwrap(), VirtioStatus::Ok);
            self.ring.complete(head, 1);
        }
        let _ = self.ring.publish();
        self.blk.poll(done).unwrap();
    }
}

#[test]
fn a_discard_of_many_ranges_has_them_one_after_the_other() {
    for format in formats() {
        for (most, want) in [(1, vec![1; 100]), (60, vec![60, 40]), (125, vec![100])] {
            let (ranges, disk) = Ranges::new(format, most);
            let limits = QueueLimits { discard_sectors_max: 1 << 20, ..disk.info.limits };
            let mut bench = Bench::new(ranges, DeviceInfo { limits, ..disk.info }, 64);
            (0..100).for_each(|number| bench.submit(Op::Discard, NONE, number * 40, 8, &[], number));
            assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
            let seen = &bench.hw.driver_mut().seen;
            let lens: Vec<usize> = seen.iter().map(|bytes| bytes.len() / 16 - 1).collect();
            assert_eq!(lens, want, "{format:?}");
            let words = |bytes: &[u8]| (u64::from_le_bytes(bytes[..8].try_into().unwrap()), bytes[8..16].to_vec());
            let mut number = 0;
            for bytes in seen {
                assert_eq!(words(bytes), (11, vec![0; 8]), "type, and no sector");
                for range in bytes[16..].chunks(16) {
                    assert_eq!(words(range), (number * 40, vec![8, 0, 0, 0, 0, 0, 0, 0]));
                    number += 1;
                }
            }
        }
    }
}
