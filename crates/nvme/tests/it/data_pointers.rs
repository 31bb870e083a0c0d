//! Data pointers from both sides: the examples of the specification, random segments through builder and walker, and
//! hostile input.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{CountingAllocator, Region, RegionTable, Segment, View};
use blkyard_nvme::{
    DataWalker, DmaMap, DmaRange, DmaSegment, DsmRange, ListError, ListPool, NvmeStatus, Psdt, SGL_DESCRIPTORS_MAX,
    Sqe, TRANSFER_BYTES_MAX, io,
};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// Data is identity-mapped: an address equals the offset in its region.
const DATA_BYTES: u64 = 64 << 20;
/// Controller address of the lists.
const LISTS_AT: u64 = 0x8000_0000;
const SLOTS: u16 = 4;
const PAGES: u16 = 16;
const SMALL: u64 = LISTS_AT + PAGES as u64 * PAGE;

struct Fixture {
    lists: Arc<Region>,
    pool: ListPool,
    map: DmaMap,
    walker: DataWalker,
    segments: Vec<Segment>,
}

impl Fixture {
    fn new() -> Fixture {
        let data = Region::anonymous(DATA_BYTES as usize).unwrap();
        let bytes = ListPool::bytes(SLOTS, PAGES);
        let lists = Region::anonymous(bytes).unwrap();
        let view = View::new(Arc::clone(&lists), 0, bytes, 4096).unwrap();
        let table = Arc::new(RegionTable::new(vec![data, Arc::clone(&lists)]));
        let ranges = vec![
            DmaRange { addr: 0, len: DATA_BYTES, region: 0, offset: 0 },
            DmaRange { addr: LISTS_AT, len: bytes as u64, region: 1, offset: 0 },
        ];
        let walker = DataWalker::new(TRANSFER_BYTES_MAX, true);
        Fixture {
            segments: Vec::with_capacity(walker.segments_max()),
            lists,
            pool: ListPool::new(view, LISTS_AT, SLOTS, PAGES),
            map: DmaMap::new(table, ranges).unwrap(),
            walker,
        }
    }

    /// A word in the memory of the lists.
    fn word(&self, addr: u64) -> u64 {
        View::new(Arc::clone(&self.lists), addr - LISTS_AT, 8, 8).unwrap().load_u64(0, Relaxed)
    }

    fn put(&self, addr: u64, words: &[u64]) {
        for (number, word) in words.iter().enumerate() {
            let view = View::new(Arc::clone(&self.lists), addr - LISTS_AT + number as u64 * 8, 8, 8).unwrap();
            view.store_u64(0, *word, Relaxed);
        }
    }

    fn walk(&mut self, psdt: Psdt, pointer: [u64; 2], bytes: u64) -> Result<Vec<DmaSegment>, NvmeStatus> {
        let sqe = Sqe::new(io::READ, 1).with_data(psdt, pointer);
        self.walker.walk(&self.map, &sqe, bytes, &mut self.segments)?;
        let run = |segment: &Segment| DmaSegment { addr: segment.offset, len: u64::from(segment.len) };
        Ok(self.segments.iter().map(run).collect())
    }

    /// The pointers of a PRP list and its number of links, derived from the specification, not from our walker.
    fn list(&self, mut at: u64, pointers: usize) -> (Vec<u64>, usize) {
        let (mut found, mut links) = (vec![], 0);
        while found.len() < pointers {
            let is_last_entry = at % PAGE == PAGE - 8;
            if is_last_entry && pointers - found.len() > 1 {
                at = self.word(at);
                assert_eq!(at % PAGE, 0, "a list page is aligned");
                links += 1;
                continue;
            }
            found.push(self.word(at));
            at += 8;
        }
        (found, links)
    }
}

fn segments(pieces: &[(u64, u64)]) -> impl Iterator<Item = DmaSegment> + Clone {
    pieces.iter().map(|(addr, len)| DmaSegment { addr: *addr, len: *len })
}

fn joined(pieces: &[(u64, u64)]) -> Vec<DmaSegment> {
    let mut all: Vec<DmaSegment> = vec![];
    for piece in segments(pieces) {
        match all.last_mut() {
            Some(last) if last.addr + last.len == piece.addr => last.len += piece.len,
            _ => all.push(piece),
        }
    }
    all
}

/// Expected second PRP entry.
#[derive(Clone, Copy)]
enum Second {
    Nothing,
    Data(u64),
    /// A list in the slot's small block.
    Small(usize),
    /// A list in pages: pointers and links.
    Pages(usize, usize),
}

#[test]
fn each_worked_example_comes_out_as_it_is_written() {
    use Second::{Data, Nothing, Pages, Small};
    let kib = |kib: u64| kib << 10;
    let mib = |mib: u64| mib << 20;
    let examples: &[(u32, &[(u64, u64)], Second)] = &[
        (1, &[(0x10000, 512)], Nothing),
        (2, &[(0x10e00, 512)], Nothing),
        (3, &[(0x10e00, 1024)], Data(0x11000)),
        (4, &[(0x10000, 8192)], Data(0x11000)),
        (5, &[(0x10200, 8192)], Small(2)),
        (6, &[(0x20000, 4096), (0x55000, 4096)], Data(0x55000)),
        (8, &[(0x20800, 2048), (0x30000, 4096)], Data(0x30000)),
        (9, &[(0x10_0000, kib(128))], Small(31)),
        (10, &[(0x10_0200, kib(128))], Small(32)),
        (11, &[(0x10_0000, kib(132))], Small(32)),
        (11, &[(0x10_0000, kib(136))], Pages(33, 0)),
        (12, &[(0x10_0000, mib(2))], Pages(511, 0)),
        (13, &[(0x10_0000, mib(2) + kib(4))], Pages(512, 0)),
        (14, &[(0x10_0000, mib(2) + kib(8))], Pages(513, 1)),
        (15, &[(0x10_0200, mib(8))], Pages(2048, 4)),
        (16, &[(0x10000, 512), (0x10200, 512), (0x10400, 1024)], Nothing),
    ];
    let mut fixture = Fixture::new();
    for (number, pieces, second) in examples {
        let bytes = pieces.iter().map(|(_, len)| len).sum();
        let prp = fixture.pool.prp(1, bytes, segments(pieces)).unwrap();
        assert_eq!(prp[0], pieces[0].0, "example {number}");
        let (pointers, links) = match *second {
            Nothing => (0, 0),
            Data(_) => (1, 0),
            Small(pointers) => (pointers, 0),
            Pages(pointers, links) => (pointers, links),
        };
        let held = usize::from(PAGES) - fixture.pool.free_pages();
        match *second {
            Nothing => assert_eq!(prp[1], 0, "example {number}"),
            Data(addr) => assert_eq!(prp[1], addr, "example {number}"),
            Small(_) => assert_eq!((prp[1], held), (SMALL + 256, 0), "example {number}: the block of slot 1"),
            Pages(..) => {
                assert!(prp[1].is_multiple_of(PAGE) && (LISTS_AT..SMALL).contains(&prp[1]), "example {number}");
                assert_eq!(held, links + 1, "example {number}");
            }
        }
        if pointers > 1 {
            let want: Vec<u64> = pages(pieces).collect();
            assert_eq!(fixture.list(prp[1], pointers), (want[1..].to_vec(), links), "example {number}");
            assert_eq!(want.len() - 1, pointers, "example {number}");
        }
        assert_eq!(fixture.walk(Psdt::Prp, prp, bytes), Ok(joined(pieces)), "example {number}");
        fixture.pool.release(1);
        assert_eq!(fixture.pool.free_pages(), usize::from(PAGES), "example {number}");
    }
    // The seventh case is invalid for PRP and valid for SGL.
    let pieces = [(0x20000, 4096), (0x55200, 512)];
    assert_eq!(fixture.pool.prp(1, 4608, segments(&pieces)), Err(ListError::Gap));
    let (psdt, pointer) = fixture.pool.map(1, 4608, segments(&pieces), 2, Some(0)).unwrap();
    assert_eq!((psdt, pointer), (Psdt::Sgl, [SMALL + 256, 0x3000_0000_0000_0020]));
    assert_eq!(fixture.walk(psdt, pointer, 4608), Ok(joined(&pieces)));
}

/// The pages of the segments, each by its first used byte.
fn pages(pieces: &[(u64, u64)]) -> impl Iterator<Item = u64> {
    joined(pieces).into_iter().flat_map(|run| {
        let first = std::iter::once(run.addr);
        let rest = (run.addr / PAGE + 1..=(run.addr + run.len - 1) / PAGE).map(|page| page * PAGE);
        first.chain(rest)
    })
}

#[test]
fn sgl_or_prp_is_chosen_by_what_the_data_is_like() {
    let mut fixture = Fixture::new();
    let torn = [(0x1000, 512), (0x3000, 512)];
    let aligned: Vec<_> = (0..8).map(|page| (0x10_0000 + page * 0x2000, 4096)).collect();
    let long = [(0x10_0200, 0x1_0000)];
    for (name, pieces, threshold, want) in [
        ("no SGL", &long[..], None, Ok(Psdt::Prp)),
        ("no SGL, and no PRP either", &torn, None, Err(ListError::Gap)),
        ("forced", &torn, Some(0), Ok(Psdt::Sgl)),
        ("forced, however short", &torn, Some(1 << 20), Ok(Psdt::Sgl)),
        ("off unless forced", &long, Some(0), Ok(Psdt::Prp)),
        ("one long segment", &long, Some(32 << 10), Ok(Psdt::Sgl)),
        ("one segment within two pages", &[(0x1200, 4096)], Some(512), Ok(Psdt::Prp)),
        ("short segments", &aligned, Some(32 << 10), Ok(Psdt::Prp)),
        ("as long as the threshold", &aligned, Some(4096), Ok(Psdt::Sgl)),
    ] {
        let bytes = pieces.iter().map(|(_, len)| len).sum();
        let found = fixture.pool.map(0, bytes, segments(pieces), pieces.len() as u64, threshold);
        assert_eq!(found.map(|(psdt, _)| psdt), want, "{name}");
        if let Ok((psdt, pointer)) = found {
            assert_eq!(fixture.walk(psdt, pointer, bytes), Ok(joined(pieces)), "{name}");
        }
        fixture.pool.release(0);
    }
    // A long segment is one descriptor in the command itself.
    assert_eq!(fixture.pool.sgl(0, 0x1_0000, segments(&long), 1), Ok([0x10_0200, 0x1_0000]));
}

/// The first walk of torn ones ends at the second segment, which does not fit, and walks look one ahead.
#[test]
fn segments_are_walked_once_unless_they_are_torn() {
    let mut fixture = Fixture::new();
    let apart: Vec<_> = (0..40).map(|page| (0x10_0000 + page * 0x2000, 4096)).collect();
    let torn: Vec<_> = apart.iter().map(|(at, len)| (at + 512, *len)).collect();
    for (name, pieces, threshold, walked) in [
        ("no SGL", &apart, None, 40),
        ("PRP entries are possible", &apart, Some(0), 40),
        ("too short for an SGL", &apart, Some(32 << 10), 40),
        ("an SGL", &apart, Some(4096), 40),
        ("torn, an SGL in any case", &torn, Some(4096), 40),
        ("torn", &torn, Some(0), 3 + 40),
    ] {
        let seen = Cell::new(0);
        let counted = segments(pieces).inspect(|_| seen.set(seen.get() + 1));
        fixture.pool.map(0, 40 * 4096, counted, 40, threshold).unwrap();
        fixture.pool.release(0);
        assert_eq!(seen.get(), walked, "{name}");
    }
}

#[test]
fn data_that_cannot_be_named_is_refused_and_holds_nothing() {
    let mut fixture = Fixture::new();
    let far: Vec<_> = (0..257).map(|page| (page * 0x2000, 512)).collect();
    for (name, pieces, bytes, error) in [
        ("nothing", &[][..], 0, ListError::Length),
        ("unaligned", &[(0x1002, 512)], 512, ListError::Unaligned),
        ("too short", &[(0x1000, 512)], 1024, ListError::Length),
        ("too long", &[(0x1000, 0x8000)], 0x4000, ListError::Length),
        ("more segments", &[(0x1000, 0x1000), (0x8000, 0x1000)], 0x1000, ListError::Length),
        ("ends within a page", &[(0x1000, 0x800), (0x8000, 0x800)], 0x1000, ListError::Gap),
        ("longer than any", &[(0, TRANSFER_BYTES_MAX + 4096)], TRANSFER_BYTES_MAX + 4096, ListError::TooLong),
        ("a gap in a long list", &[(0, 0x8_0000), (0x20_0200, 0x8_0000)], 0x10_0000, ListError::Gap),
    ] {
        assert_eq!(fixture.pool.prp(0, bytes, segments(pieces)), Err(error), "{name}");
        assert_eq!(fixture.pool.free_pages(), usize::from(PAGES), "{name}");
    }
    assert_eq!(fixture.pool.sgl(0, 257 * 512, segments(&far), 257), Err(ListError::TooMany));
    assert_eq!(fixture.pool.sgl(0, 1024, segments(&[(2, 512), (0x2000, 512)]), 2), Err(ListError::Unaligned));
    assert_eq!(fixture.pool.sgl(0, 1024, segments(&far), 1), Err(ListError::TooMany), "no room but for one");
    assert_eq!(fixture.pool.sgl(0, 512, segments(&far), 257), Err(ListError::Length));

    // Three maximum transfers take all pages but one.
    let longest = [(0x200, TRANSFER_BYTES_MAX)];
    for slot in 0..3 {
        fixture.pool.prp(slot, TRANSFER_BYTES_MAX, segments(&longest)).unwrap();
    }
    let next = fixture.pool.prp(3, TRANSFER_BYTES_MAX, segments(&longest));
    assert_eq!((next, fixture.pool.free_pages()), (Err(ListError::NoPages), 1));
    fixture.pool.release(1);
    assert!(fixture.pool.prp(3, TRANSFER_BYTES_MAX, segments(&longest)).is_ok());
}

#[test]
fn ranges_of_a_deallocation_are_its_data() {
    let mut fixture = Fixture::new();
    for (count, place) in [(1_u64, SMALL), (16, SMALL), (17, LISTS_AT), (256, LISTS_AT)] {
        let ranges = (0..count).map(|number| DsmRange { slba: number << 40, blocks: number as u32 + 1 });
        let (found, pointer) = fixture.pool.ranges(0, ranges).unwrap();
        assert_eq!((u64::from(found), pointer), (count, [place, 0]));
        for number in 0..count {
            let at = place + number * 16;
            assert_eq!([fixture.word(at), fixture.word(at + 8)], [(number + 1) << 32, number << 40]);
        }
        fixture.pool.release(0);
    }
    let many = (0..257).map(|slba| DsmRange { slba, blocks: 1 });
    assert_eq!(fixture.pool.ranges(0, many), Err(ListError::TooMany));
}

/// A hostile PRP list or SGL: content of the lists, the command's pointer, its bytes, and the expected status.
type Vector<'a> = (&'a str, &'a [(u64, &'a [u64])], [u64; 2], u64, NvmeStatus);

#[test]
fn each_hostile_prp_gets_its_status() {
    const LIST: u64 = LISTS_AT;
    let gone = DATA_BYTES;
    let full: Vec<u64> = (0..512).map(|page| page * PAGE).collect();
    // A list of 511 data pages whose last entry is data, although more data follows.
    let (ends, tail) = (0x20_0000, LISTS_AT + PAGE);
    let around: Vec<u64> = (0..511).map(|page| page * PAGE).chain([LIST]).collect();
    let linked = |link: u64| (0..511).map(|page| page * PAGE).chain([link]).collect::<Vec<u64>>();
    let (crooked, lost) = (linked(tail + 8), linked(gone));
    let vectors: &[Vector<'_>] = &[
        ("first entry not in dwords", &[], [0x1002, 0], 512, NvmeStatus::INVALID_PRP_OFFSET),
        ("second entry within a page", &[], [0x1000, 0x2200], 8192, NvmeStatus::INVALID_PRP_OFFSET),
        ("second entry off by a byte", &[], [0x1000, 0x2001], 8192, NvmeStatus::INVALID_PRP_OFFSET),
        ("first entry not mapped", &[], [gone, 0], 512, NvmeStatus::DATA_TRANSFER_ERROR),
        ("first entry at the last address", &[], [!3, 0], 512, NvmeStatus::DATA_TRANSFER_ERROR),
        ("second entry not mapped", &[], [0x1000, gone], 8192, NvmeStatus::DATA_TRANSFER_ERROR),
        ("list not in words", &[], [0x1000, LIST + 4], 12288, NvmeStatus::INVALID_PRP_OFFSET),
        ("list not mapped", &[], [0x1000, gone], 12288, NvmeStatus::DATA_TRANSFER_ERROR),
        ("list at the last address", &[], [0x1000, !0xfff], 12288, NvmeStatus::DATA_TRANSFER_ERROR),
        ("entry within a page", &[(LIST, &[0x2000, 0x3200])], [0x1000, LIST], 12288, NvmeStatus::INVALID_PRP_OFFSET),
        ("entry not mapped", &[(LIST, &[0x2000, gone])], [0x1000, LIST], 12288, NvmeStatus::DATA_TRANSFER_ERROR),
        (
            "list that begins with a link, which is not mapped",
            &[(LIST + 8, &[0x2000])],
            [0x1000, LIST + PAGE - 8],
            12288,
            NvmeStatus::DATA_TRANSFER_ERROR,
        ),
        ("longer than MDTS", &[], [0, LIST], TRANSFER_BYTES_MAX + 512, NvmeStatus::INVALID_FIELD),
        ("link within a page", &[(LIST, &crooked)], [0, LIST], ends + 8192, NvmeStatus::INVALID_PRP_OFFSET),
        ("link not mapped", &[(LIST, &lost)], [0, LIST], ends + 8192, NvmeStatus::DATA_TRANSFER_ERROR),
    ];
    for (name, lists, pointer, bytes, status) in vectors {
        let mut fixture = Fixture::new();
        // A stray link that leads out of the memory.
        fixture.put(LIST + PAGE - 8, &[gone]);
        lists.iter().for_each(|(at, words)| fixture.put(*at, words));
        assert_eq!(fixture.walk(Psdt::Prp, *pointer, *bytes), Err(status.with_dnr()), "{name}");
        assert!(fixture.segments.capacity() <= fixture.walker.segments_max(), "{name}");
    }
    let mut fixture = Fixture::new();
    // A list that links to itself ends with the data.
    fixture.put(LIST, &around);
    assert!(fixture.walk(Psdt::Prp, [0, LIST], TRANSFER_BYTES_MAX).is_ok());
    // A list read to the end of its page: the last entry, data for the host, is a link.
    fixture.put(LIST, &full);
    fixture.put(tail, &[0x5000]);
    assert_eq!(fixture.walk(Psdt::Prp, [0, LIST], ends + 4096).map(|all| all.len()), Ok(2));
    let beyond = fixture.walk(Psdt::Prp, [0, LIST], ends + 8192).unwrap();
    assert_eq!(beyond.last().map(|run| run.addr), Some(0), "what stands in the data page 511, and not behind the list");
    assert!(!beyond.contains(&DmaSegment { addr: 0x5000, len: 4096 }));
    // Address zero is valid where it is mapped.
    assert_eq!(fixture.walk(Psdt::Prp, [0x1000, 0], 8192).unwrap()[1], DmaSegment { addr: 0, len: 4096 });
}

const fn descriptor(kind: u64, addr: u64, len: u64) -> [u64; 2] {
    [addr, len | kind << 56]
}

#[test]
fn each_hostile_sgl_gets_its_status() {
    const LIST: u64 = LISTS_AT;
    const DATA: u64 = 0x00;
    const SEGMENT: u64 = 0x20;
    const LAST: u64 = 0x30;
    let gone = DATA_BYTES;
    let flat = |all: &[[u64; 2]]| all.concat();
    let block = |len| descriptor(DATA, 0x1000, len);
    let lists = [
        flat(&[block(512), descriptor(LAST, LIST, 16)]),
        flat(&[descriptor(LAST, LIST, 16), block(512)]),
        flat(&[block(512), block(512)]),
        flat(&[block(512), descriptor(DATA, gone, 512)]),
        flat(&[block(0), descriptor(SEGMENT, LIST, 32)]),
    ];
    let vectors: &[Vector<'_>] = &[
        ("too short", &[], block(508), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("too long", &[], block(516), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("longer than any", &[], block(0xffff_fffc), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("no bytes", &[], block(0), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("address not in dwords", &[], descriptor(DATA, 0x1001, 512), 512, NvmeStatus::INVALID_SGL_GRANULARITY),
        ("length not in dwords", &[], block(510), 512, NvmeStatus::INVALID_SGL_GRANULARITY),
        ("not mapped", &[], descriptor(DATA, gone - 256, 512), 512, NvmeStatus::DATA_TRANSFER_ERROR),
        ("at the last address", &[], descriptor(DATA, !3, 512), 512, NvmeStatus::DATA_TRANSFER_ERROR),
        ("bit bucket", &[], descriptor(0x10, 0x1000, 512), 512, NvmeStatus::INVALID_SGL_TYPE),
        ("keyed", &[], descriptor(0x40, 0x1000, 512), 512, NvmeStatus::INVALID_SGL_TYPE),
        ("offset in a capsule", &[], descriptor(0x01, 0x1000, 512), 512, NvmeStatus::INVALID_SGL_TYPE),
        ("vendor's", &[], descriptor(0xf0, 0x1000, 512), 512, NvmeStatus::INVALID_SGL_TYPE),
        ("empty segment", &[], descriptor(LAST, LIST, 0), 512, NvmeStatus::INVALID_SGL_SEGMENT),
        ("segment of half a descriptor", &[], descriptor(LAST, LIST, 24), 512, NvmeStatus::INVALID_SGL_SEGMENT),
        ("segment of 4 GiB", &[], descriptor(LAST, LIST, 0xffff_fff0), 512, NvmeStatus::INVALID_SGL_COUNT),
        ("segment not mapped", &[], descriptor(LAST, gone, 32), 512, NvmeStatus::DATA_TRANSFER_ERROR),
        ("segment half mapped", &[], descriptor(LAST, gone - 16, 32), 512, NvmeStatus::DATA_TRANSFER_ERROR),
        (
            "segment after the last",
            &[(LIST, &lists[0])],
            descriptor(LAST, LIST, 32),
            512,
            NvmeStatus::INVALID_SGL_SEGMENT,
        ),
        (
            "segment in the middle",
            &[(LIST, &lists[1])],
            descriptor(SEGMENT, LIST, 32),
            512,
            NvmeStatus::INVALID_SGL_COUNT,
        ),
        (
            "segment that leads nowhere",
            &[(LIST, &lists[2])],
            descriptor(SEGMENT, LIST, 32),
            1024,
            NvmeStatus::INVALID_SGL_SEGMENT,
        ),
        ("block not mapped", &[(LIST, &lists[3])], descriptor(LAST, LIST, 32), 1024, NvmeStatus::DATA_TRANSFER_ERROR),
        (
            "circle without bytes",
            &[(LIST, &lists[4])],
            descriptor(SEGMENT, LIST, 32),
            512,
            NvmeStatus::INVALID_SGL_COUNT,
        ),
        ("longer than MDTS", &[], block(512), TRANSFER_BYTES_MAX + 512, NvmeStatus::INVALID_FIELD),
    ];
    for (name, lists, pointer, bytes, status) in vectors {
        let mut fixture = Fixture::new();
        lists.iter().for_each(|(at, words)| fixture.put(*at, words));
        assert_eq!(fixture.walk(Psdt::Sgl, *pointer, *bytes), Err(status.with_dnr()), "{name}");
    }
    let mut fixture = Fixture::new();
    let reserved = Sqe([0xc000, 0, 0, 0x1000, 0, 0, 0, 0]);
    let sqes = [(reserved, true), (Sqe::new(io::READ, 1).with_data(Psdt::Sgl, block(512)), false)];
    for (sqe, takes_sgl) in sqes {
        let answer = DataWalker::new(4096, takes_sgl).walk(&fixture.map, &sqe, 512, &mut fixture.segments);
        assert_eq!(answer, Err(NvmeStatus::INVALID_FIELD.with_dnr()));
    }
    // A chain of segments of the maximum length, with empty descriptors where they are allowed.
    let first = flat(&[block(512), block(0), descriptor(LAST, LIST + 0x800, 16)]);
    fixture.put(LIST, &first);
    fixture.put(LIST + 0x800, &descriptor(DATA, 0x3000, 1024));
    let all = fixture.walk(Psdt::Sgl, descriptor(SEGMENT, LIST, 48), 1536);
    assert_eq!(all, Ok(vec![DmaSegment { addr: 0x1000, len: 512 }, DmaSegment { addr: 0x3000, len: 1024 }]));
}

#[test]
fn nothing_is_allocated_per_command() {
    let mut fixture = Fixture::new();
    let aligned: Vec<_> = (0..40).map(|page| (page * 0x2000, 4096)).collect();
    let cases: &[(&[(u64, u64)], Option<u32>)] =
        &[(&[(0x200, TRANSFER_BYTES_MAX)], None), (&[(0x200, 512)], None), (&aligned, None), (&aligned, Some(4096))];
    for (pieces, threshold) in cases {
        let bytes = pieces.iter().map(|(_, len)| len).sum();
        let before = CountingAllocator::count();
        let (psdt, pointer) = fixture.pool.map(2, bytes, segments(pieces), pieces.len() as u64, *threshold).unwrap();
        let sqe = Sqe::new(io::READ, 1).with_data(psdt, pointer);
        fixture.walker.walk(&fixture.map, &sqe, bytes, &mut fixture.segments).unwrap();
        fixture.pool.release(2);
        assert!(before > 0, "the allocator counts");
        assert_eq!(CountingAllocator::count() - before, 0);
    }
}

/// Segments for PRP: a first one at any offset, then whole pages, then a last one of any length. In dwords.
fn prp_segments() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let middle = prop::collection::vec((0_u64..4000, prop_oneof![4 => 1_u64..8, 1 => 1_u64..700]), 0..12);
    (0_u64..4000, 0_u64..1024, 1_u64..1025, middle).prop_map(|(first, offset, last, middle)| {
        let addr = first * PAGE + offset * 4;
        let mut pieces = vec![(addr, PAGE - offset * 4)];
        pieces.extend(middle.into_iter().map(|(page, pages)| (page * PAGE, pages * PAGE)));
        let end = pieces.len() - 1;
        pieces[end].1 -= (last * 4).min(pieces[end].1 - 4);
        pieces
    })
}

fn any_segments() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0_u64..1 << 20, 1_u64..9000), 1..40)
        .prop_map(|pieces| pieces.into_iter().map(|(at, len)| (at * 4, len * 4)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// The walk finds the same bytes in the same order; only the first pointer may be unaligned; a link exists if and
    /// only if more pointers are needed than fit.
    #[test]
    fn prp_entries_name_the_same_bytes_in_the_same_order(pieces in prp_segments()) {
        let mut fixture = Fixture::new();
        let bytes: u64 = pieces.iter().map(|(_, len)| len).sum();
        let built = fixture.pool.prp(3, bytes, segments(&pieces));
        if bytes > TRANSFER_BYTES_MAX {
            prop_assert_eq!(built, Err(ListError::TooLong));
            return Ok(());
        }
        let prp = built.unwrap();
        let want: Vec<u64> = pages(&pieces).collect();
        let pointers = want.len() - 1;
        let (found, links) = match pointers {
            0 => (vec![], 0),
            1 => (vec![prp[1]], 0),
            _ => fixture.list(prp[1], pointers),
        };
        prop_assert!(found.iter().all(|pointer| pointer % PAGE == 0));
        prop_assert_eq!((prp[0], &found[..]), (want[0], &want[1..]));
        let fitting = if links == 0 { 512 } else { links * 511 + 512 };
        prop_assert!(pointers <= fitting && (links == 0 || pointers > links * 511 + 1));
        prop_assert_eq!(fixture.walk(Psdt::Prp, prp, bytes), Ok(joined(&pieces)));
        fixture.pool.release(3);
        prop_assert_eq!(fixture.pool.free_pages(), usize::from(PAGES));
    }

    /// For any segments, the chosen pointer names the same bytes in the same order, or the segments are refused.
    #[test]
    fn any_segments_are_named_or_refused(pieces in any_segments(), threshold in prop_oneof![Just(0), 1_u32..100_000]) {
        let mut fixture = Fixture::new();
        let bytes: u64 = pieces.iter().map(|(_, len)| len).sum();
        match fixture.pool.map(0, bytes, segments(&pieces), pieces.len() as u64, Some(threshold)) {
            Ok((psdt, pointer)) => prop_assert_eq!(fixture.walk(psdt, pointer, bytes), Ok(joined(&pieces))),
            Err(error) => prop_assert!(error == ListError::TooLong && bytes > TRANSFER_BYTES_MAX),
        }
    }

    /// For any input of a host, the walk ends, returns only mapped bytes, as many as requested, and never grows its
    /// list.
    #[test]
    fn any_pointer_is_walked_or_refused(
        words in prop::collection::vec(prop_oneof![
            3 => (0_u64..0x4400).prop_map(|page| page * PAGE),
            2 => (0_u64..20).prop_map(|page| LISTS_AT + page * PAGE),
            1 => any::<u64>(),
            1 => (0_u64..64, prop_oneof![Just(0_u64), Just(0x20), Just(0x30), 0_u64..256])
                .prop_map(|(len, kind)| (len * 16) | kind << 56),
        ], 1024),
        pointer in (0_usize..1024, 0_usize..1024),
        is_sgl in any::<bool>(),
        blocks in 1_u64..=TRANSFER_BYTES_MAX / 512,
    ) {
        let mut fixture = Fixture::new();
        fixture.put(LISTS_AT, &words);
        let capacity = fixture.segments.capacity();
        let psdt = if is_sgl { Psdt::Sgl } else { Psdt::Prp };
        if let Ok(all) = fixture.walk(psdt, [words[pointer.0], words[pointer.1]], blocks * 512) {
            prop_assert_eq!(all.iter().map(|run| run.len).sum::<u64>(), blocks * 512);
            prop_assert!(fixture.segments.iter().all(|segment| fixture.map.table().resolve(*segment).is_some()));
        }
        prop_assert_eq!(fixture.segments.capacity(), capacity);
    }
}

#[test]
fn an_sgl_of_as_many_descriptors_as_there_may_be() {
    let mut fixture = Fixture::new();
    let pieces: Vec<_> = (0..SGL_DESCRIPTORS_MAX as u64).map(|page| (page * 0x2000 + 0x10, 0x20)).collect();
    let bytes = SGL_DESCRIPTORS_MAX as u64 * 0x20;
    let pointer = fixture.pool.sgl(0, bytes, segments(&pieces), pieces.len() as u64).unwrap();
    assert_eq!((pointer[0] % PAGE, pointer[1]), (0, 0x3000_0000_0000_1000));
    assert_eq!(fixture.walk(Psdt::Sgl, pointer, bytes), Ok(joined(&pieces)));
}
