//! I/O in registered buffers, from the queue core to the controller and back. A bounced domain keeps what the
//! controller sees apart from what the program sees, so a page that is missed or copied in excess shows as wrong data.
//!
//! The numbered tests are those of defects in the series for Linux of 2022 ("DMA pre-mapping for registered buffers").

use std::sync::Arc;

use blkyard_mem::{BufferAccess, CountingAllocator, Region, RegionTable, RegisteredBuffer, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, Status};
use blkyard_nvme::{
    IdentifyController, IdentifyNamespace, IoQueueCommand, IoQueueReport, LbaFormat, LoopbackBuffers, NvmeLoopback,
    NvmeLoopbackConfig,
};
use proptest::prelude::*;

const DISK_BYTES: usize = 4 << 20;
const BUFFER_BYTES: u64 = 9 << 20;
const PAGE: u64 = 4096;

const FORMS: [LoopbackBuffers; 7] = [
    LoopbackBuffers::Contiguous,
    LoopbackBuffers::Scattered(4096),
    LoopbackBuffers::Scattered(16384),
    LoopbackBuffers::Scattered(65536),
    LoopbackBuffers::Scattered(2 << 20),
    LoopbackBuffers::Bounced(4096),
    LoopbackBuffers::Bounced(65536),
];

/// Executes reads and writes on a region.
fn ram(store: Arc<Region>) -> impl FnMut(&Bio, &RegionTable) -> Status {
    move |bio, memory| {
        let place = store.span(bio.sector * 512, bio.bytes() as usize).unwrap();
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
        Status::Ok
    }
}

/// A disk of memory behind a queue, and a registered buffer.
struct Bench<S> {
    hw: HwQueue<NvmeLoopback<S>>,
    region: Arc<Region>,
    store: Arc<Region>,
    buffer: Arc<RegisteredBuffer>,
    ended: Vec<Box<Bio>>,
    now_ns: u64,
}

fn bench(buffers: LoopbackBuffers, takes_sgl: bool) -> Bench<impl FnMut(&Bio, &RegionTable) -> Status> {
    bench_at(buffers, takes_sgl, 0, 11)
}

/// With the buffer from this byte of its region on, and transfers of so many pages as a power of two.
fn bench_at(
    buffers: LoopbackBuffers,
    takes_sgl: bool,
    start: u64,
    mdts: u8,
) -> Bench<impl FnMut(&Bio, &RegionTable) -> Status> {
    let controller = IdentifyController { mdts, sgl: if takes_sgl { 2 } else { 0 }, ..IdentifyController::default() };
    let blocks = DISK_BYTES as u64 / 512;
    let mut namespace = IdentifyNamespace { blocks, capacity: blocks, ..IdentifyNamespace::default() };
    namespace.set_lba_format(0, LbaFormat { block_shift: 9, ..LbaFormat::default() });
    let config = NvmeLoopbackConfig { controller, namespace, entries: 9, list_pages: 5, has_shadow: true, buffers };
    let store = Region::anonymous(DISK_BYTES).unwrap();
    let loopback = NvmeLoopback::new(&config, ram(Arc::clone(&store))).unwrap();
    let info = Arc::new(loopback.info.clone());
    let config = HwQueueConfig { depth: 8, bios_max: 64, ..HwQueueConfig::default() };
    let mut hw = HwQueue::new(loopback, info, config);
    let region = Region::shared(BUFFER_BYTES as usize + 65536).unwrap();
    hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    let buffer = RegisteredBuffer::new(&region, start, BUFFER_BYTES, BufferAccess::ReadWrite).unwrap();
    assert!(hw.add_buffer(&mut (), &buffer));
    Bench { hw, region, store, buffer, ended: Vec::with_capacity(64), now_ns: 0 }
}

fn bio(op: Op, sector: u64, segments: &[Segment]) -> Box<Bio> {
    let mut bio = Bio::with_capacity(segments.len());
    let bytes: u32 = segments.iter().map(|segment| segment.len).sum();
    (bio.op, bio.sector, bio.sectors) = (op, sector, bytes / 512);
    bio.segments.extend(segments);
    bio
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Bench<S> {
    fn round(&mut self) {
        // Longer than the retry interval of a queue whose device was full.
        self.now_ns += 10_000_000;
        self.hw.issue(&mut (), self.now_ns);
        let ended = &mut self.ended;
        self.hw.reap(&mut (), self.now_ns, &mut |bio| ended.push(bio));
    }

    fn finish(&mut self) -> Vec<Status> {
        for _ in 0..1000 {
            if self.hw.is_idle() {
                return self.ended.drain(..).map(|bio| bio.status).collect();
            }
            self.round();
        }
        panic!("the queue does not come to rest");
    }

    fn one(&mut self, op: Op, sector: u64, segments: &[Segment]) -> Status {
        self.hw.submit(bio(op, sector, segments));
        self.finish()[0]
    }

    /// Writes from one part of the buffer, then reads into another; checks every byte of disk and memory.
    fn check(&mut self, from: u64, to: u64, bytes: u32, sector: u64) {
        let pattern: Vec<u8> = (0..bytes).map(|at| (at / 4096 * 31 + at % 251 + 1) as u8).collect();
        let (all, disk) = (self.region.span(0, self.region.len()).unwrap(), self.store.span(0, DISK_BYTES).unwrap());
        all.fill(0xee);
        disk.fill(0xdd);
        let at = |offset: u64| (self.buffer.offset() + offset) as usize;
        all.part(at(from), pattern.len()).copy_from_slice(&pattern);
        let mut memory = vec![0; all.len()];
        all.copy_to_slice(&mut memory);
        let mut stored = vec![0xdd; DISK_BYTES];
        stored[sector as usize * 512..][..pattern.len()].copy_from_slice(&pattern);
        let place = at(to);

        assert_eq!(self.one(Op::Write, sector, &[self.buffer.segment(from, bytes)]), Status::Ok);
        assert!(same(&self.store, &stored), "written: {bytes} bytes from {from}");
        assert!(same(&self.region, &memory), "a write changes no memory");
        assert_eq!(self.one(Op::Read, sector, &[self.buffer.segment(to, bytes)]), Status::Ok);
        memory[place..][..pattern.len()].copy_from_slice(&pattern);
        assert!(same(&self.region, &memory), "read: {bytes} bytes to {to}, and nothing else");
    }
}

fn same(region: &Region, bytes: &[u8]) -> bool {
    let mut copy = vec![0; bytes.len()];
    region.span(0, bytes.len()).unwrap().copy_to_slice(&mut copy);
    copy == bytes
}

#[test]
fn defect_1_a_copied_list_begins_where_the_data_does() {
    // Longer than what is left of any table page: the list is copied.
    for form in FORMS {
        let mut bench = bench(form, false);
        for page in [0, 255, 256, 511] {
            bench.check(page * PAGE + 512, (page + 7) * PAGE + 1024, (2 << 20) + 512, 24);
        }
    }
}

#[test]
fn defect_2_pages_of_the_mapping_are_larger_than_those_of_the_controller() {
    for page in [4096, 8192, 16384, 65536, 2 << 20] {
        for form in [LoopbackBuffers::Scattered(page), LoopbackBuffers::Bounced(page)] {
            let mut bench = bench(form, false);
            for (from, bytes) in [(0, 512), (page - 512, 1024), (page / 2, 2 * page as u32), (3 * page + 512, 131_072)]
            {
                bench.check(from, from + page + PAGE, bytes, 0);
            }
        }
    }
}

#[test]
fn defect_3_a_partial_first_page_is_copied_exactly() {
    for start in [0, 512, 4092, 8188] {
        let mut bench = bench_at(LoopbackBuffers::Bounced(4096), false, start, 11);
        for (from, bytes) in [(512, 512), (3584, 512), (3584, 1024), (5 * PAGE + 1024, 3072), (5 * PAGE + 1024, 3584)] {
            bench.check(from, from + 20 * PAGE + 512, bytes, 8);
        }
    }
}

#[test]
fn defect_4_pages_behind_the_first_are_copied_to_the_device_from_their_place() {
    let mut bench = bench(LoopbackBuffers::Bounced(4096), false);
    for page in [1, 255, 256, 511, 512, 1000, 2000] {
        bench.check(page * PAGE + 512, 0, 5 * 4096, 8);
    }
}

#[test]
fn defect_5_the_last_page_is_copied_back() {
    let mut bench = bench(LoopbackBuffers::Bounced(4096), false);
    for bytes in [4096, 4608, 8192, 8704, 131_072, 131_584, 1 << 20] {
        for into in [0, 512, 3584] {
            bench.check(0, 1500 * PAGE + into, bytes, 8);
        }
    }
    // The buffer's own last page.
    bench.check(0, BUFFER_BYTES - 131_072, 131_072, 8);
}

#[test]
fn defect_6_lists_end_at_the_last_entry_of_a_table_page() {
    for form in FORMS {
        let mut bench = bench(form, false);
        // First page and pages: the last pointer in slot 510, in slot 511, and one that does not fit.
        for (page, pages) in [(254, 257), (254, 258), (254, 259), (509, 258), (510, 258), (510, 259), (255, 257)] {
            bench.check(page * PAGE, (page + 1) * PAGE, pages * 4096, 0);
        }
    }
}

#[test]
fn defect_7_a_mapping_outlives_requests_in_flight_and_a_removed_controller() {
    let mut bench = bench(LoopbackBuffers::Bounced(4096), false);
    let id = bench.buffer.id();
    bench.hw.driver_mut().controller.is_running = false;
    bench.hw.submit(bio(Op::Read, 0, &[bench.buffer.segment(0, 65536)]));
    bench.round();
    assert!(!bench.hw.remove_buffer(&mut (), id), "the controller has a command");
    // It drains, and the data arrives.
    bench.store.span(0, 65536).unwrap().fill(7);
    bench.hw.driver_mut().controller.is_running = true;
    assert_eq!(bench.finish(), [Status::Ok]);
    assert!(same(&bench.region, &vec![7; 65536]));
    assert!(bench.hw.remove_buffer(&mut (), id));
    assert_eq!(bench.one(Op::Read, 0, &[bench.buffer.segment(0, 512)]), Status::Invalid);
    assert!(bench.hw.add_buffer(&mut (), &Arc::clone(&bench.buffer)));

    // A reset with a read in flight: it waits to be done again, and holds its buffer.
    bench.hw.driver_mut().controller.is_running = false;
    bench.hw.submit(bio(Op::Read, 0, &[bench.buffer.segment(65536, 65536)]));
    bench.round();
    let host = &mut bench.hw.driver_mut().host;
    host.command(IoQueueCommand::Stop);
    host.command(IoQueueCommand::Cancel);
    bench.round();
    let host = &mut bench.hw.driver_mut().host;
    assert_eq!(host.take_report(), Some(IoQueueReport::Cancelled));
    assert!(!bench.hw.is_idle());
    assert!(bench.hw.memory().resolve(bench.buffer.segment(65536, 65536)).is_some());
    // The removed controller fails what waits, and what comes.
    bench.hw.driver_mut().host.command(IoQueueCommand::Fail);
    bench.hw.submit(bio(Op::Write, 0, &[bench.buffer.segment(0, 4096)]));
    assert_eq!(bench.finish(), [Status::Offline, Status::Offline]);
    assert!(bench.hw.remove_buffer(&mut (), id));
}

#[test]
fn bytes_of_a_write_are_copied_before_it_is_sent_and_of_a_read_after_it_is_back() {
    let mut bench = bench(LoopbackBuffers::Bounced(4096), false);
    let place = |bench: &Bench<_>, at, len| bench.region.span(bench.buffer.offset() + at, len).unwrap().fill(9);
    bench.region.span(0, 1 << 20).unwrap().fill(1);
    bench.store.span(0, DISK_BYTES).unwrap().fill(2);
    bench.hw.driver_mut().controller.is_running = false;
    bench.hw.submit(bio(Op::Write, 0, &[bench.buffer.segment(512, 3 * 4096)]));
    bench.hw.submit(bio(Op::Read, 64, &[bench.buffer.segment(20 * PAGE + 512, 3 * 4096)]));
    bench.round();
    // Too late for the write, and too early for the read.
    place(&bench, 512, 3 * 4096);
    place(&bench, 20 * PAGE, 5 * 4096);
    bench.hw.driver_mut().controller.is_running = true;
    assert_eq!(bench.finish(), [Status::Ok; 2]);
    let mut stored = vec![2; 6 * 4096];
    stored[..3 * 4096].fill(1);
    assert!(same(&bench.store, &stored), "the bytes at submission");
    let mut read = vec![9; 5 * 4096];
    read[512..512 + 3 * 4096].fill(2);
    let mut bytes = vec![0; read.len()];
    bench.region.span(20 * PAGE, bytes.len()).unwrap().copy_to_slice(&mut bytes);
    assert!(bytes == read, "these bytes and no others");
}

#[test]
fn a_split_bio_in_a_buffer_arrives_whole() {
    for form in FORMS {
        // Transfers of 128 KiB.
        let mut bench = bench_at(form, false, 4096, 5);
        for (from, to) in [(0, 3 * PAGE), (512, 250 * PAGE + 1024), (255 * PAGE, 511 * PAGE + 3584)] {
            bench.check(from, to, 1 << 20, 16);
        }
    }
}

#[test]
fn merged_and_mixed_segments_arrive_where_they_belong() {
    for form in FORMS {
        for takes_sgl in [false, true] {
            let mut bench = bench(form, takes_sgl);
            for sector in 0..256 {
                bench.store.span(sector * 512, 512).unwrap().fill(sector as u8);
            }
            // Two segments of the buffer, one of plain memory between them.
            let plain = Segment { region: 0, offset: BUFFER_BYTES + 8192, len: 8192 };
            let parts = [bench.buffer.segment(20 * PAGE, 8192), plain, bench.buffer.segment(40 * PAGE, 12288)];
            assert_eq!(bench.one(Op::Read, 0, &parts), Status::Ok, "{form:?}");
            let mut sector = 0;
            for part in parts {
                for at in (0..u64::from(part.len)).step_by(512) {
                    let mut bytes = [0; 512];
                    bench.region.span(part.offset + at, 512).unwrap().copy_to_slice(&mut bytes);
                    assert_eq!(bytes, [sector; 512], "{form:?}");
                    sector += 1;
                }
            }
            // Bios that meet in memory and on the disk become one command.
            for number in 0..4_u64 {
                let segment = bench.buffer.segment(number * 2048 + 512, 2048);
                bench.hw.submit(bio(Op::Read, number * 4, &[segment]));
            }
            assert_eq!(bench.finish(), [Status::Ok; 4]);
            assert_eq!(bench.hw.stats().snapshot().merged[0], 3, "{form:?}");
            let want: Vec<u8> = (0..16).flat_map(|sector| [sector; 512]).collect();
            let mut bytes = vec![0; want.len()];
            bench.region.span(512, want.len()).unwrap().copy_to_slice(&mut bytes);
            assert_eq!(bytes, want, "{form:?}");
        }
    }
}

#[test]
fn registered_io_allocates_nothing() {
    for form in FORMS {
        let mut bench = bench(form, false);
        let mut bios: Vec<_> = (0..4).map(|_| Bio::with_capacity(1)).collect();
        let mut rounds = |count: u64| {
            for number in 0..count {
                for mut bio in bios.drain(..) {
                    bio.reset();
                    // Most lists in place, some copied.
                    let (page, pages) = ((number * 37) % 1000, [1, 2, 32, 256, 300][number as usize % 5]);
                    bio.sectors = pages * 8;
                    bio.segments.push(bench.buffer.segment(page * PAGE, pages * 4096));
                    bench.hw.submit(bio);
                }
                while !bench.hw.is_idle() {
                    bench.round();
                }
                bios.append(&mut bench.ended);
            }
        };
        rounds(10);
        let before = CountingAllocator::count();
        rounds(100);
        assert_eq!(CountingAllocator::count(), before, "{form:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_byte_goes_where_it_belongs(
        form in prop::sample::select(&FORMS[..]), takes_sgl: bool, start in 0_u64..2048, mdts in 5_u8..12,
        ios in prop::collection::vec((0_u64..2300, 0_u64..8, 1_u32..600, 0_u64..8), 1..4),
    ) {
        let mut bench = bench_at(form, takes_sgl, start * 4, mdts);
        for (page, into, sectors, other) in ios {
            // Odd lengths, and some megabytes.
            let bytes = if sectors % 7 == 0 { sectors * 4096 } else { sectors * 512 };
            let last = BUFFER_BYTES - u64::from(bytes);
            let at = |page: u64, into: u64| (page * PAGE + into * 512).min(last);
            bench.check(at(page, into), at(2300 - page, other), bytes, u64::from(sectors));
        }
    }
}
