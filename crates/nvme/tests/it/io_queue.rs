//! The driver of an I/O queue with the controller's parser on one thread: every operation with its content, and hostile
//! commands.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{CountingAllocator, Region, RegionTable, Segment, View};
use blkyard_mq::{Batch, Bio, BioFlags, Done, Driver, HwQueue, HwQueueConfig, Op, PathGeneration, Status};
use blkyard_nvme::{
    DmaMap, DmaRange, IdentifyController, IdentifyNamespace, IoCommand, IoParser, IoQueueCommand, IoQueueReport,
    LbaFormat, LoopbackBuffers, NamespaceFormat, NvmeLoopback, NvmeLoopbackConfig, NvmeStatus, Psdt, Sqe, control, io,
};
use proptest::prelude::*;

const SECTORS: u64 = 4096;
const BUFFER_BYTES: usize = 16 << 20;
const NONE: BioFlags = BioFlags::empty();

/// Variant of a disk under test: block size, SGLs, shadow doorbells.
#[derive(Clone, Copy, Debug)]
struct Form {
    block_shift: u8,
    sgl: bool,
    has_shadow: bool,
}

fn forms() -> impl Iterator<Item = Form> {
    [9, 12].into_iter().flat_map(|block_shift| {
        [false, true]
            .into_iter()
            .flat_map(move |sgl| [false, true].map(move |has_shadow| Form { block_shift, sgl, has_shadow }))
    })
}

fn config(form: Form, entries: u16) -> NvmeLoopbackConfig {
    let controller = IdentifyController {
        mdts: 11,
        nvm_commands: 0xc,
        write_cache: 1,
        sgl: if form.sgl { 2 } else { 0 },
        ..IdentifyController::default()
    };
    let blocks = (SECTORS * 512) >> form.block_shift;
    let mut namespace = IdentifyNamespace { blocks, capacity: blocks, ..IdentifyNamespace::default() };
    namespace.set_lba_format(0, LbaFormat { block_shift: form.block_shift, ..LbaFormat::default() });
    let buffers = LoopbackBuffers::default();
    NvmeLoopbackConfig { controller, namespace, entries, list_pages: 5, has_shadow: form.has_shadow, buffers }
}

fn store() -> Arc<Region> {
    Region::anonymous(SECTORS as usize * 512).unwrap()
}

/// Executes a bio on a region.
fn ram(store: Arc<Region>) -> impl FnMut(&Bio, &RegionTable) -> Status {
    move |bio, memory| {
        let Some(place) = store.span(bio.sector * 512, bio.bytes() as usize) else { return Status::Invalid };
        match bio.op {
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes => place.fill(0),
            Op::Read | Op::Write => {
                let mut done = 0;
                for segment in &bio.segments {
                    let span = memory.resolve(*segment).unwrap();
                    let part = place.part(done, span.len());
                    if bio.op == Op::Read {
                        span.copy_from(&part);
                    } else {
                        part.copy_from(&span);
                    }
                    done += span.len();
                }
            }
        }
        Status::Ok
    }
}

/// A hardware queue over a loopback, with a buffer for data.
struct Bench<S> {
    hw: HwQueue<NvmeLoopback<S>>,
    buffer: Arc<Region>,
    ended: Vec<Box<Bio>>,
    now_ns: u64,
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Bench<S> {
    fn new(config: &NvmeLoopbackConfig, serve: S) -> Bench<S> {
        let loopback = NvmeLoopback::new(config, serve).unwrap();
        let (info, depth) = (loopback.info.clone(), loopback.host.depth());
        let config = HwQueueConfig { depth: usize::from(depth), bios_max: 512, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(loopback, Arc::new(info), config);
        let buffer = Region::anonymous(BUFFER_BYTES).unwrap();
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&buffer)])));
        Bench { hw, buffer, ended: Vec::with_capacity(512), now_ns: 0 }
    }

    fn submit(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u32, pieces: &[(u64, u32)], cookie: u64) {
        let mut bio = Bio::with_capacity(pieces.len());
        (bio.op, bio.flags, bio.sector, bio.sectors, bio.cookie) = (op, flags, sector, sectors, cookie);
        bio.segments.extend(pieces.iter().map(|(offset, len)| Segment { region: 0, offset: *offset, len: *len }));
        self.hw.submit(bio);
    }

    fn round(&mut self) {
        // Longer than the retry interval of a queue whose device was full.
        self.now_ns += 10_000_000;
        self.hw.issue(&mut (), self.now_ns);
        let ended = &mut self.ended;
        self.hw.reap(&mut (), self.now_ns, &mut |bio| ended.push(bio));
    }

    /// Runs rounds until the queue is idle; returns the statuses by cookie.
    fn finish(&mut self) -> Vec<(u64, Status)> {
        let mut rounds = 0;
        while !self.hw.is_idle() {
            self.round();
            rounds += 1;
            assert!(rounds < 10_000, "the queue does not come to rest");
        }
        let mut ended: Vec<_> = self.ended.drain(..).map(|bio| (bio.cookie, bio.status)).collect();
        ended.sort_by_key(|(cookie, _)| *cookie);
        ended
    }

    fn one(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u32, pieces: &[(u64, u32)]) -> Status {
        self.submit(op, flags, sector, sectors, pieces, 0);
        self.finish()[0].1
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.buffer.span(offset, bytes.len()).unwrap().copy_from_slice(bytes);
    }

    fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.span(offset, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }
}

#[test]
fn each_operation_arrives_as_it_was_meant() {
    for form in forms() {
        let seen = Rc::new(RefCell::new(vec![]));
        let log = Rc::clone(&seen);
        let mut bench = Bench::new(&config(form, 8), move |bio, _| {
            let segments: Vec<(u64, u32)> = bio.segments.iter().map(|piece| (piece.offset, piece.len)).collect();
            log.borrow_mut().push((bio.op, bio.flags, bio.sector, bio.sectors, segments));
            Status::Ok
        });
        let mut ask = |op, flags, sector, sectors, pieces: &[(u64, u32)]| {
            assert_eq!(bench.one(op, flags, sector, sectors, pieces), Status::Ok, "{form:?}");
            seen.borrow_mut().pop().unwrap()
        };
        let fua = BioFlags::FUA;
        for (op, flags) in [(Op::Read, NONE), (Op::Write, NONE), (Op::Write, fua)] {
            for pieces in [
                &[(0, 4096)][..],
                &[(512, 8192)],
                &[(0x1200, 65536)],
                &[(0x1000, 4096), (0x8000, 4096)],
                &[(0x1e00, 512), (0x8000, 3584)],
                &[(0x1000, 4096), (0x10_0000, 0x10_0000)],
            ] {
                let sectors = pieces.iter().map(|(_, len)| len / 512).sum();
                assert_eq!(ask(op, flags, 16, sectors, pieces), (op, flags, 16, sectors, pieces.to_vec()), "{form:?}");
            }
        }
        assert_eq!(ask(Op::Flush, NONE, 0, 0, &[]), (Op::Flush, NONE, 0, 0, vec![]));
        assert_eq!(ask(Op::Discard, NONE, 8, 64, &[]), (Op::Discard, NONE, 8, 64, vec![]));
        assert_eq!(ask(Op::WriteZeroes, NONE, 16, 64, &[]), (Op::WriteZeroes, NONE, 16, 64, vec![]));
        let stay = BioFlags::NO_UNMAP;
        assert_eq!(ask(Op::WriteZeroes, stay, 16, 64, &[]), (Op::WriteZeroes, stay, 16, 64, vec![]));
        // Segments that PRP cannot describe become an SGL or several requests, or are refused if they meet within a
        // block.
        let torn = bench.one(Op::Write, NONE, 0, 16, &[(0x1000, 4608), (0x8000, 3584)]);
        let parts: Vec<_> = seen.borrow_mut().drain(..).map(|(_, _, sector, sectors, _)| (sector, sectors)).collect();
        match (form.sgl, form.block_shift) {
            (true, _) => assert_eq!((torn, &parts[..]), (Status::Ok, &[(0, 16)][..])),
            (false, 9) => assert_eq!((torn, &parts[..]), (Status::Ok, &[(0, 9), (9, 7)][..])),
            (false, _) => assert_eq!(torn, Status::Invalid),
        }
    }
}

#[test]
fn many_discards_are_one_command() {
    for form in forms() {
        let counts = Rc::new(RefCell::new(vec![]));
        let log = Rc::clone(&counts);
        let mut bench = Bench::new(&config(form, 8), move |bio, _| {
            log.borrow_mut().push((bio.op, bio.sector, bio.sectors));
            Status::Ok
        });
        for number in 0..40 {
            bench.submit(Op::Discard, NONE, number * 64, 16, &[], number);
        }
        assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
        let mut all = counts.borrow().clone();
        all.sort_unstable_by_key(|(_, sector, _)| *sector);
        let want: Vec<_> = (0..40).map(|number| (Op::Discard, number * 64, 16)).collect();
        assert_eq!(all, want, "{form:?}");
    }
}

#[test]
fn what_the_controller_says_becomes_the_status() {
    for (says, becomes) in [
        (Status::Ok, Status::Ok),
        (Status::NotSupported, Status::NotSupported),
        (Status::Io, Status::Io),
        (Status::Medium, Status::Medium),
        (Status::NoSpace, Status::NoSpace),
        (Status::Offline, Status::Io),
    ] {
        for form in forms() {
            let mut bench = Bench::new(&config(form, 8), |_: &Bio, _: &RegionTable| says);
            assert_eq!(bench.one(Op::Read, NONE, 0, 8, &[(0, 4096)]), becomes);
            assert_eq!(bench.one(Op::Discard, NONE, 0, 8, &[]), becomes);
        }
    }
}

#[test]
fn memory_that_the_controller_does_not_reach_is_refused_before_it_is_asked() {
    for form in forms() {
        let mut bench = Bench::new(&config(form, 8), |_: &Bio, _: &RegionTable| panic!("nothing arrives"));
        let end = BUFFER_BYTES as u64;
        assert_eq!(bench.one(Op::Read, NONE, 0, 8, &[(end, 4096)]), Status::Invalid);
        assert_eq!(bench.one(Op::Write, NONE, 0, 16, &[(0x1000, 4096), (end, 4096)]), Status::Invalid);
        assert_eq!(bench.one(Op::Write, NONE, 0, 16, &[(end - 4096, 8192)]), Status::Invalid);
    }
}

#[test]
fn requests_wait_for_list_pages_in_order() {
    let form = Form { block_shift: 9, sgl: false, has_shadow: true };
    let order = Rc::new(RefCell::new(vec![]));
    let log = Rc::clone(&order);
    let mut bench = Bench::new(&config(form, 64), move |bio, _| {
        log.borrow_mut().push(bio.sector);
        Status::Ok
    });
    // Each request needs a page of pointers, and the pool has five pages.
    for number in 0..20 {
        bench.submit(Op::Write, BioFlags::NO_MERGE, number, 512, &[(0x200, 512 * 512)], number);
    }
    bench.now_ns = 1;
    bench.hw.issue(&mut (), 1);
    assert_eq!(bench.hw.in_flight(), 5);
    assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
    assert_eq!(*order.borrow(), (0..20).collect::<Vec<u64>>());
}

#[test]
fn requests_of_a_silent_controller_are_sent_again_in_order() {
    let form = Form { block_shift: 9, sgl: true, has_shadow: true };
    let order = Rc::new(RefCell::new(vec![]));
    let log = Rc::clone(&order);
    let mut bench = Bench::new(&config(form, 8), move |bio: &Bio, _: &RegionTable| {
        log.borrow_mut().push(bio.sector);
        Status::Ok
    });
    bench.hw.driver_mut().controller.is_running = false;
    for number in 0..9 {
        bench.submit(Op::Write, BioFlags::NO_MERGE, number * 8, 512, &[(0x200, 512 * 512)], number);
    }
    bench.round();
    let host = &mut bench.hw.driver_mut().host;
    assert_eq!(host.pair().in_flight(), 7, "a ring of 8 entries");
    host.command(IoQueueCommand::Stop);
    assert_eq!(host.take_report(), Some(IoQueueReport::Stopped));
    bench.round();
    assert_eq!(bench.hw.driver_mut().host.pair().in_flight(), 7, "not before the controller is silent");
    let host = &mut bench.hw.driver_mut().host;
    host.command(IoQueueCommand::Cancel);
    assert!(host.wants_poll() && host.take_report().is_none());
    bench.round();
    let host = &mut bench.hw.driver_mut().host;
    assert_eq!((host.take_report(), host.pair().in_flight()), (Some(IoQueueReport::Cancelled), 0));
    assert!(!host.is_pending() && bench.ended.is_empty());
    // The controller's half of the pair has not advanced, and can continue.
    bench.hw.driver_mut().host.command(IoQueueCommand::Start);
    bench.hw.driver_mut().controller.is_running = true;
    assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
    assert_eq!(*order.borrow(), (0..9).map(|number| number * 8).collect::<Vec<u64>>());
}

#[test]
fn requests_fail_once_there_is_no_controller() {
    let form = Form { block_shift: 9, sgl: true, has_shadow: true };
    let mut bench = Bench::new(&config(form, 8), |_: &Bio, _: &RegionTable| Status::Ok);
    bench.hw.driver_mut().controller.is_running = false;
    for number in 0..20 {
        bench.submit(Op::Write, BioFlags::NO_MERGE, number * 8, 8, &[(0, 4096)], number);
    }
    bench.round();
    for command in [IoQueueCommand::Stop, IoQueueCommand::Cancel, IoQueueCommand::Fail] {
        bench.hw.driver_mut().host.command(command);
    }
    let ended = bench.finish();
    assert_eq!(ended.len(), 20);
    assert!(ended.iter().all(|(_, status)| *status == Status::Offline));
}

#[test]
fn a_queue_that_was_given_up_fails_what_is_cancelled_later() {
    let form = Form { block_shift: 9, sgl: false, has_shadow: false };
    let mut bench = Bench::new(&config(form, 32), |_: &Bio, _: &RegionTable| Status::Ok);
    bench.hw.driver_mut().controller.is_running = false;
    let submit = |bench: &mut Bench<_>, number| {
        bench.submit(Op::Write, BioFlags::NO_MERGE, number * 8, 8, &[(0, 4096)], number);
        bench.round();
    };
    submit(&mut bench, 0);
    // It hangs, is given up, and later turns out to be gone.
    for command in [IoQueueCommand::Fail, IoQueueCommand::Stop, IoQueueCommand::Cancel] {
        bench.hw.driver_mut().host.command(command);
    }
    submit(&mut bench, 1);
    let ended = bench.finish();
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|(_, status)| *status == Status::Offline), "{ended:?}");
}

#[test]
fn a_failure_is_retried_five_times() {
    let form = Form { block_shift: 9, sgl: true, has_shadow: true };
    let failures = Rc::new(Cell::new(0));
    for (fail, status, calls) in [(5, Status::Ok, 6), (6, Status::Medium, 6)] {
        failures.set(0);
        let counter = Rc::clone(&failures);
        let mut bench = Bench::new(&config(form, 8), move |_: &Bio, _: &RegionTable| {
            counter.set(counter.get() + 1);
            if counter.get() <= fail { Status::Medium } else { Status::Ok }
        });
        assert_eq!(bench.one(Op::Read, NONE, 0, 8, &[(0, 4096)]), status);
        assert_eq!(failures.get(), calls);
        // The next request of the slot starts with a retry count of zero.
        failures.set(fail);
        assert_eq!(bench.one(Op::Read, NONE, 0, 8, &[(0, 4096)]), Status::Ok);
    }
}

#[test]
fn a_slot_whose_request_was_taken_starts_with_no_retries() {
    let form = Form { block_shift: 9, sgl: true, has_shadow: true };
    let failures = Rc::new(Cell::new(0));
    let counter = Rc::clone(&failures);
    let mut bench = Bench::new(&config(form, 2), move |_: &Bio, _: &RegionTable| {
        counter.set(counter.get() + 1);
        if counter.get() <= 5 { Status::Medium } else { Status::Ok }
    });
    // The only slot: its request fails twice, and is taken to another queue while it waits for its next try.
    bench.submit(Op::Read, NONE, 0, 8, &[(0, 4096)], 1);
    while failures.get() < 2 {
        bench.round();
    }
    bench.hw.driver_mut().host.command(IoQueueCommand::Stop);
    bench.round();
    bench.hw.quiesce();
    let mut taken = 0;
    bench.hw.take_bios(PathGeneration { path: 0, generation: 1 }, &mut |_| taken += 1);
    bench.hw.unquiesce();
    assert_eq!((taken, bench.hw.is_idle(), bench.ended.len()), (1, true, 0));
    bench.hw.driver_mut().host.command(IoQueueCommand::Start);
    // The next one has all retries of its own.
    failures.set(0);
    assert_eq!(bench.one(Op::Read, NONE, 0, 8, &[(0, 4096)]), Status::Ok);
    assert_eq!(failures.get(), 6);
}

/// A queue, and the one that takes over from it when it is next polled.
struct Successive<S> {
    present: NvmeLoopback<S>,
    next: Option<NvmeLoopback<S>>,
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Driver<()> for Successive<S> {
    fn queue_rqs(&mut self, cx: &mut (), memory: &RegionTable, batch: &mut Batch<'_>) {
        self.present.queue_rqs(cx, memory, batch);
    }

    fn poll(&mut self, cx: &mut (), memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.present.poll(cx, memory, done, now_ns);
        if let Some(mut next) = self.next.take() {
            next.set_memory(cx, memory);
            next.host.take_over(&mut self.present.host, done);
            self.present = next;
        }
    }

    fn wants_poll(&self) -> bool {
        self.next.is_some()
    }

    fn set_memory(&mut self, cx: &mut (), memory: &RegionTable) {
        self.present.set_memory(cx, memory);
    }
}

#[test]
fn retries_are_counted_across_queues() {
    let form = Form { block_shift: 9, sgl: true, has_shadow: true };
    let tries = Rc::new(Cell::new(0));
    let open = || {
        let tries = Rc::clone(&tries);
        let fail = move |_: &Bio, _: &RegionTable| {
            tries.set(tries.get() + 1);
            Status::Medium
        };
        NvmeLoopback::new(&config(form, 8), fail).unwrap()
    };
    let driver = Successive { present: open(), next: None };
    let config = HwQueueConfig { depth: 7, bios_max: 8, ..HwQueueConfig::default() };
    let mut hw = HwQueue::new(driver, Arc::new(open().info.clone()), config);
    hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Region::anonymous(4096).unwrap()])));
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sectors) = (Op::Read, 8);
    bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
    hw.submit(bio);
    let (mut now_ns, mut ended, mut seen) = (0, vec![], 0);
    while ended.is_empty() {
        now_ns += 10_000_000;
        hw.issue(&mut (), now_ns);
        hw.reap(&mut (), now_ns, &mut |bio| ended.push(bio.status));
        // A new queue after each try.
        if std::mem::replace(&mut seen, tries.get()) != tries.get() {
            assert!(seen <= 6, "it has no end");
            hw.driver_mut().present.host.command(IoQueueCommand::Stop);
            hw.driver_mut().next = Some(open());
        }
    }
    assert_eq!((ended, seen), (vec![Status::Medium], 6));
}

#[test]
fn nothing_is_allocated_per_request() {
    for form in forms() {
        let mut bench = Bench::new(&config(form, 64), ram(store()));
        let pieces: Vec<(u64, u32)> = (0..30).map(|piece| (piece * 8192, 4096)).collect();
        for round in 0..3 {
            for number in 0..50 {
                bench.submit(Op::Read, BioFlags::NO_MERGE, number * 8, 8, &pieces[..1], number);
                bench.submit(Op::Write, BioFlags::NO_MERGE, 1000 + 8 * number, 240, &pieces, number);
                bench.submit(Op::Discard, NONE, 16 * number, 8, &[], number);
                bench.submit(Op::Flush, NONE, 0, 0, &[], number);
            }
            let before = CountingAllocator::count();
            while !bench.hw.is_idle() {
                bench.round();
            }
            assert_eq!(CountingAllocator::count() - before, 0, "{form:?}, round {round}");
            assert!(bench.ended.len() == 200 && bench.ended.iter().all(|bio| bio.status.is_ok()));
            bench.ended.clear();
        }
    }
}

/// A controller's parser over 1 MiB of a host's memory at address zero.
struct Parse {
    parser: IoParser,
    map: DmaMap,
    bio: Box<Bio>,
    memory: View,
}

const FORMAT: NamespaceFormat = NamespaceFormat { nsid: 1, blocks: 1000, block_shift: 12, read_only: false };
const MDTS_BYTES: u64 = 128 << 10;

impl Parse {
    fn new() -> Parse {
        let region = Region::anonymous(1 << 20).unwrap();
        let memory = View::new(Arc::clone(&region), 0, 1 << 20, 4096).unwrap();
        let table = Arc::new(RegionTable::new(vec![region]));
        let map = DmaMap::new(table, vec![DmaRange { addr: 0, len: 1 << 20, region: 0, offset: 0 }]).unwrap();
        let parser = IoParser::new(MDTS_BYTES);
        Parse { bio: Bio::with_capacity(parser.segments_max()), parser, map, memory }
    }

    fn parse(&mut self, sqe: Sqe) -> Result<IoCommand, NvmeStatus> {
        self.parser.parse(&sqe, &FORMAT, &self.map, &mut self.bio)
    }

    fn put_ranges(&self, at: usize, ranges: &[(u64, u32)]) {
        for (number, (slba, blocks)) in ranges.iter().enumerate() {
            // Context attributes are hints.
            self.memory.store_u64s(at + number * 16, [0xffff_ffff | u64::from(*blocks) << 32, *slba], Relaxed);
        }
    }
}

#[test]
fn each_command_that_makes_no_sense_gets_its_status() {
    let read = |slba, blocks| Sqe::with_blocks(io::READ, 1, slba, blocks, 0).with_data(Psdt::Prp, [0x1000, 0x2000]);
    let fused = |bits: u64| {
        let mut sqe = read(0, 1);
        sqe.0[0] |= bits << 8;
        sqe
    };
    let zeroes = |slba, blocks| Sqe::with_blocks(io::WRITE_ZEROES, 1, slba, blocks, 0);
    let dsm = |ranges, pointer| Sqe::deallocate(1, ranges).with_data(Psdt::Prp, [pointer, 0]);
    let of = |opcode| Sqe::new(opcode, 1);
    let vectors = [
        ("unknown opcode", of(0x77), NvmeStatus::INVALID_OPCODE),
        ("write uncorrectable", of(io::WRITE_UNCORRECTABLE), NvmeStatus::INVALID_OPCODE),
        ("first half of a fused pair", fused(1), NvmeStatus::INVALID_FIELD),
        ("second half of a fused pair", fused(2), NvmeStatus::INVALID_FIELD),
        ("reserved data format", fused(0xc0), NvmeStatus::INVALID_FIELD),
        ("another namespace", Sqe::with_blocks(io::READ, 2, 0, 1, 0), NvmeStatus::INVALID_NAMESPACE),
        ("no namespace", Sqe::with_blocks(io::READ, 0, 0, 1, 0), NvmeStatus::INVALID_NAMESPACE),
        ("read of all namespaces", Sqe::with_blocks(io::READ, u32::MAX, 0, 1, 0), NvmeStatus::INVALID_NAMESPACE),
        ("beyond the end", read(1000, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        ("over the end", read(999, 2), NvmeStatus::LBA_OUT_OF_RANGE),
        ("wraps", read(u64::MAX, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        ("wraps far", read(u64::MAX - 65534, 65536), NvmeStatus::LBA_OUT_OF_RANGE),
        ("longer than MDTS", read(0, 33), NvmeStatus::INVALID_FIELD),
        ("zeroes over the end", zeroes(999, 2), NvmeStatus::LBA_OUT_OF_RANGE),
        ("zeroes that wrap", zeroes(u64::MAX, 65536), NvmeStatus::LBA_OUT_OF_RANGE),
        ("ranges not in dwords", dsm(1, 0x1002), NvmeStatus::INVALID_PRP_OFFSET),
        ("ranges not mapped", dsm(256, 1 << 20), NvmeStatus::DATA_TRANSFER_ERROR),
        ("a range over the end", dsm(2, 0x4000), NvmeStatus::LBA_OUT_OF_RANGE),
        ("a range that wraps", dsm(1, 0x5000), NvmeStatus::LBA_OUT_OF_RANGE),
    ];
    let mut fixture = Parse::new();
    fixture.put_ranges(0x4000, &[(0, 10), (999, 2)]);
    fixture.put_ranges(0x5000, &[(u64::MAX, u32::MAX)]);
    for (name, sqe, status) in vectors {
        assert_eq!(fixture.parse(sqe), Err(status.with_dnr()), "{name}");
    }
    assert_eq!(fixture.parse(Sqe::new(io::FLUSH, u32::MAX)), Ok(IoCommand::Bio));
    assert_eq!(fixture.parse(zeroes(0, 1000)), Ok(IoCommand::Bio), "MDTS is for data");
    // The last blocks; LBAs of every width.
    assert_eq!(fixture.parse(read(998, 2)), Ok(IoCommand::Bio));
    assert_eq!((fixture.bio.sector, fixture.bio.sectors), (998 * 8, 16));
    let write = Sqe::with_blocks(io::WRITE, 1, 0, 1, control::FUA | control::LIMITED_RETRY);
    assert_eq!(fixture.parse(write), Ok(IoCommand::Bio));
    assert_eq!((fixture.bio.op, fixture.bio.flags), (Op::Write, BioFlags::FUA));
}

#[test]
fn ranges_are_copied_once_and_discarded_in_parts() {
    let mut fixture = Parse::new();
    // Ranges across a page boundary, with the second page at another address.
    fixture.memory.store_u64(0x1ff8, 5 << 32, Relaxed);
    fixture.memory.store_u64(0x7000, 77, Relaxed);
    fixture.put_ranges(0x7008, &[(100, 0), (1, 999)]);
    let sqe = Sqe::deallocate(1, 3).with_data(Psdt::Prp, [0x1ff8, 0x7000]);
    assert_eq!(fixture.parse(sqe), Ok(IoCommand::Deallocate));
    // Later changes by the host have no effect.
    fixture.put_ranges(0x7008, &[(9999, 9999), (9999, 9999)]);
    let mut all = vec![];
    while fixture.parser.discard(&FORMAT, &mut fixture.bio) {
        all.push((fixture.bio.op, fixture.bio.sector, fixture.bio.sectors));
    }
    assert_eq!(all, [(Op::Discard, 8, 999 * 8), (Op::Discard, 77 * 8, 40)]);

    let huge = NamespaceFormat { blocks: u64::MAX >> 12, ..FORMAT };
    fixture.put_ranges(0x1000, &[(0, u32::MAX)]);
    let sqe = Sqe::deallocate(1, 1).with_data(Psdt::Prp, [0x1000, 0]);
    assert_eq!(fixture.parser.parse(&sqe, &huge, &fixture.map, &mut fixture.bio), Ok(IoCommand::Deallocate));
    let (mut next, mut parts) = (0, 0);
    while fixture.parser.discard(&huge, &mut fixture.bio) {
        assert_eq!(fixture.bio.sector, next);
        next += u64::from(fixture.bio.sectors);
        parts += 1;
    }
    assert_eq!((next, parts), (u64::from(u32::MAX) * 8, 9));

    let mut hint = Sqe::deallocate(1, 256);
    hint.0[5] &= 0xffff_ffff;
    assert_eq!(fixture.parse(hint), Ok(IoCommand::Nothing), "its data is not looked at");
}

/// A random request, with numbers small enough to collide often.
#[derive(Clone, Debug)]
struct Request {
    op: Op,
    block: u64,
    /// Blocks of each segment, or a single number for a range.
    pieces: Vec<u32>,
    /// Gap before each segment, dwords.
    gap: u64,
}

fn request() -> impl Strategy<Value = Request> {
    let op = prop_oneof![
        4 => Just(Op::Read),
        4 => Just(Op::Write),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes)
    ];
    let gap = prop_oneof![Just(0_u64), 1_u64..1024];
    (op, 0_u64..100, prop::collection::vec(1_u32..20, 1..5), gap).prop_map(|(op, block, pieces, gap)| Request {
        op,
        block,
        pieces,
        gap,
    })
}

/// Content of a sector after its write in a round.
fn byte(sector: u64, round: usize) -> u8 {
    (sector * 7 + round as u64 * 13 + 1) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// A disk behind a driver, a queue pair and a controller behaves like a disk. Requests that overlap one in flight
    /// are submitted after it.
    #[test]
    fn a_disk_is_a_disk_whatever_lies_between(
        form in 0_usize..8,
        entries in prop_oneof![Just(2_u16), Just(5), Just(64)],
        requests in prop::collection::vec(request(), 1..60),
    ) {
        let form = forms().nth(form).unwrap();
        let mut bench = Bench::new(&config(form, entries), ram(store()));
        let shift = form.block_shift - 9;
        let mut model = vec![0_u8; SECTORS as usize];
        let mut busy = vec![false; SECTORS as usize];
        // Sector and its place in the buffer.
        let mut reads: Vec<(u64, u64)> = vec![];
        let mut offset = 0_u64;
        for (round, request) in requests.into_iter().enumerate() {
            let sectors = request.pieces.iter().sum::<u32>() << shift;
            let sector = request.block << shift;
            let range = sector as usize..sector as usize + sectors as usize;
            if busy[range.clone()].contains(&true) || offset > 15 << 20 || round % 16 == 15 {
                prop_assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
                for (sector, at) in reads.drain(..) {
                    let got = bench.get(at, 512);
                    prop_assert!(got.iter().all(|b| *b == model[sector as usize]), "{form:?}, sector {sector}");
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
            let mut next = sector;
            // PRP lists can describe whole pages and one segment of any form; SGLs all.
            let is_legal = form.sgl || (form.block_shift == 12 && request.gap == 0);
            let lens = if is_legal { request.pieces } else { vec![request.pieces.iter().sum()] };
            for len in lens.into_iter().filter(|_| request.op.has_data()) {
                offset = offset.next_multiple_of(4096) + 4096 + request.gap * 4;
                let len = (len << shift) * 512;
                pieces.push((offset, len));
                for at in (offset..offset + u64::from(len)).step_by(512) {
                    if request.op == Op::Read {
                        reads.push((next, at));
                    } else {
                        bench.put(at, &[byte(next, round); 512]);
                        model[next as usize] = byte(next, round);
                    }
                    next += 1;
                }
                offset += u64::from(len);
            }
            if !request.op.has_data() {
                model[range].fill(0);
            }
            bench.submit(request.op, NONE, sector, sectors, &pieces, round as u64);
        }
        prop_assert!(bench.finish().iter().all(|(_, status)| status.is_ok()));
        for (sector, at) in reads {
            prop_assert!(bench.get(at, 512).iter().all(|b| *b == model[sector as usize]), "{form:?}, sector {sector}");
        }
    }
}

/// The loopback is a driver for any lane.
const _: fn() = || {
    fn is_driver<D: Driver<()>>() {}
    is_driver::<NvmeLoopback<fn(&Bio, &RegionTable) -> Status>>();
};
