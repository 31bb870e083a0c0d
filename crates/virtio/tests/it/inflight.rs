//! The in-flight record: in the format of the vhost-user document, readable from other back-ends, and never trusted.
//!
//! `kill_inflight.rs` shows that nothing is lost or done twice when a device dies.

use std::sync::Arc;

use blkyard_mem::Region;
use blkyard_virtio::driver_model::{GUEST_BASE, ModelBuffer, ModelGuest};
use blkyard_virtio::{Chain, DeviceRing, Features, Inflight, InflightFault, SplitRing, inflight_bytes};
use proptest::prelude::*;

const SIZE: u16 = 8;

struct Bench {
    guest: ModelGuest,
    region: Arc<Region>,
    ring: SplitRing,
    chain: Chain,
}

impl Bench {
    /// As below, with the heads 0, 1, 2 …
    fn new(offered: u16, used_idx: u16, record: &[u8]) -> (Bench, Result<(), InflightFault>) {
        Bench::offering(&(0..offered).collect::<Vec<_>>(), used_idx, record)
    }

    /// A driver that has offered these heads, a device that has fetched none, and a record with these bytes.
    fn offering(heads: &[u16], used_idx: u16, record: &[u8]) -> (Bench, Result<(), InflightFault>) {
        let mut guest = ModelGuest::new(SIZE, 0x1000, false);
        guest.start_at(used_idx);
        for _ in 0..SIZE {
            guest.chain(&[ModelBuffer { addr: GUEST_BASE, len: 1, writable: true }]).unwrap();
        }
        heads.iter().for_each(|head| guest.offer(*head));
        let _ = guest.publish();
        // As the front-end says it after a crash: it knows the used index only.
        let layout = guest.layout().clone();
        let mut ring = SplitRing::new(layout, SIZE, Features::empty(), used_idx).unwrap();
        let region = Region::anonymous(inflight_bytes(Features::empty(), SIZE)).unwrap();
        region.span(0, record.len()).unwrap().copy_from_slice(record);
        let outcome = ring.track(Inflight::new(Arc::clone(&region), 0, region.len()).unwrap());
        (Bench { guest, region, ring, chain: Chain::new(4) }, outcome)
    }

    fn fetch(&mut self) -> Option<blkyard_virtio::ChainHead> {
        self.ring.fetch(self.guest.memory(), &mut self.chain).unwrap()
    }

    /// All there is to fetch, by its heads.
    fn fetch_all(&mut self) -> Vec<u16> {
        std::iter::from_fn(|| self.fetch().map(|head| head.id())).collect()
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.span(0, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }
}

/// A record as it lies in memory: version, used index, head of the last batch; and in flight, next and counter of each
/// entry.
fn record(version: u16, used_idx: u16, last: u16, entries: [(u8, u16, u64); SIZE as usize]) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    for field in [version, SIZE, last, used_idx] {
        bytes.extend(field.to_le_bytes());
    }
    for (inflight, next, counter) in entries {
        bytes.extend([inflight, 0, 0, 0, 0, 0]);
        bytes.extend(next.to_le_bytes());
        bytes.extend(counter.to_le_bytes());
    }
    bytes
}

const NONE: (u8, u16, u64) = (0, 0, 0);

#[test]
fn the_record_is_as_the_document_draws_it() {
    let (mut bench, outcome) = Bench::new(5, 100, &[]);
    outcome.unwrap();
    assert_eq!(bench.bytes(144), record(1, 100, 0, [NONE; 8]));
    let heads: Vec<_> = std::iter::from_fn(|| bench.fetch()).collect();
    let mut entries = [NONE; 8];
    (0..5).for_each(|at| entries[at] = (1, 0, at as u64));
    assert_eq!(bench.bytes(144), record(1, 100, 0, entries));
    let mut heads = heads.into_iter();
    // The one in the middle stays.
    for (at, head) in heads.by_ref().take(2).enumerate() {
        bench.ring.complete(head, 1);
        entries[at] = (1, at.saturating_sub(1) as u16, at as u64);
    }
    let kept = heads.next();
    heads.for_each(|head| bench.ring.complete(head, 1));
    (entries[3], entries[4]) = ((1, 1, 3), (1, 3, 4));
    assert_eq!(bench.bytes(144), record(1, 100, 4, entries), "completed, and nothing published");
    let _ = bench.ring.publish();
    [0, 1, 3, 4].iter().for_each(|at: &usize| entries[*at].0 = 0);
    assert_eq!(bench.bytes(144), record(1, 104, 4, entries));
    assert_eq!(kept.map(|head| head.id()), Some(2));
}

#[test]
fn parts_lie_as_other_back_ends_have_them() {
    // Rounded up to 64: two of them put 66 entries' part at 1088.
    for (size, split, packed) in [(1, 64, 64), (3, 64, 128), (66, 1088, 2176), (128, 2112, 4160), (1024, 16448, 32832)]
    {
        assert_eq!(inflight_bytes(Features::empty(), size), split, "{size}");
        assert_eq!(inflight_bytes(Features::RING_PACKED, size), packed, "{size}");
    }
    let region = Region::anonymous(4096).unwrap();
    assert!(Inflight::new(Arc::clone(&region), 4, 64).is_none(), "not aligned");
    assert!(Inflight::new(region, 4064, 64).is_none(), "beyond the end");
}

#[test]
fn what_another_back_end_left_is_fetched_in_the_order_it_was_fetched_before() {
    let mut entries = [NONE; 8];
    (entries[0], entries[1], entries[3]) = ((1, 7, 7), (1, 0, 5), (1, 0, 6));
    // Only 1 means in flight.
    entries[5] = (2, 0, 1);
    // Three of those offered were fetched, in another order than their numbers.
    let (mut bench, outcome) = Bench::offering(&[1, 3, 0, 4], 65534, &record(1, 65534, 3, entries));
    outcome.unwrap();
    assert_eq!((bench.ring.left(), bench.ring.in_flight(), bench.ring.base().next_avail()), (3, 3, 1));
    assert!(bench.ring.enable_notify(), "there is work");
    // Then the chains offered behind the three that were in flight.
    let then: Vec<_> = std::iter::from_fn(|| bench.fetch().map(|head| head.id())).take(4).collect();
    assert_eq!(then, [1, 3, 0, 4]);
}

#[test]
fn what_was_published_before_the_end_is_not_fetched_again() {
    let mut entries = [NONE; 8];
    // Published together: 2, then 1, then 0. The end came when one of them was crossed out.
    entries[0] = (1, 1, 0);
    entries[1] = (0, 2, 1);
    entries[2] = (1, 6, 2);
    entries[6] = (1, 0, 3);
    let (mut bench, outcome) = Bench::offering(&[6], 13, &record(1, 10, 0, entries));
    outcome.unwrap();
    assert_eq!(bench.fetch_all(), [6]);
    entries[0].0 = 0;
    entries[2].0 = 0;
    assert_eq!(bench.bytes(144), record(1, 13, 0, entries));
}

#[test]
fn a_record_with_nothing_in_flight_goes_with_any_ring() {
    // The driver has set its ring up anew, and another back-end made the record for a smaller one.
    let mut bytes = record(1, 40_000, 9999, [(0, 50, 3); 8]);
    bytes[10] = 4;
    let (mut bench, outcome) = Bench::new(2, 0, &bytes);
    outcome.unwrap();
    assert_eq!(bench.fetch_all(), [0, 1]);
}

#[test]
fn a_record_that_makes_no_sense_is_refused_and_left_as_it_is() {
    let in_flight = |index: usize| {
        let mut entries = [NONE; 8];
        entries[index] = (1, 0, 0);
        entries
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = record(1, 10, 0, in_flight(0));
        bytes[at] = byte;
        bytes
    };
    for (bytes, fault) in [
        (record(2, 10, 0, [NONE; 8]), InflightFault::Version),
        (with(3, 1), InflightFault::Features),
        (with(10, 7), InflightFault::DescNum),
        (with(11, 1), InflightFault::DescNum),
        (record(1, 1, 0, in_flight(0)), InflightFault::UsedJumped),
        (record(1, 11, 0, in_flight(0)), InflightFault::UsedJumped),
        (record(1, 9, 8, in_flight(0)), InflightFault::BatchOutOfRange),
    ] {
        let (bench, outcome) = Bench::new(0, 10, &bytes);
        assert_eq!(outcome, Err(fault));
        assert_eq!(bench.bytes(144), bytes, "{fault}");
    }
    let DeviceRing::Split(mut ring) = ModelGuest::new(16, 0, false).device(false) else { unreachable!() };
    let short = Region::anonymous(1024).unwrap();
    assert_eq!(ring.track(Inflight::new(short, 0, 256).unwrap()), Err(InflightFault::TooSmall));
}

/// A packed ring of four, driver and device and record.
struct PackedBench {
    guest: ModelGuest,
    ring: DeviceRing,
    region: Arc<Region>,
    chain: Chain,
}

impl PackedBench {
    /// A driver that has offered chains of one, two and one descriptors, and a record with these bytes.
    fn new(record: &[u8]) -> (PackedBench, Result<(), InflightFault>) {
        let mut guest = ModelGuest::with(Features::RING_PACKED, 4, 0x1000);
        let base = guest.device(false).base();
        for count in [1, 2, 1] {
            let buffers: Vec<_> =
                (0..count).map(|at| ModelBuffer { addr: GUEST_BASE + at, len: 7, writable: true }).collect();
            let head = guest.chain(&buffers).unwrap();
            guest.offer(head);
        }
        let _ = guest.publish();
        let region = Region::anonymous(inflight_bytes(Features::RING_PACKED, 4)).unwrap();
        region.span(0, record.len()).unwrap().copy_from_slice(record);
        let mut ring = guest.device_at(false, base);
        let outcome = ring.track(Inflight::new(Arc::clone(&region), 0, region.len()).unwrap());
        (PackedBench { guest, ring, region, chain: Chain::new(4) }, outcome)
    }

    fn fetch(&mut self) -> Option<blkyard_virtio::ChainHead> {
        self.ring.fetch(self.guest.memory(), &mut self.chain).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 160];
        self.region.span(0, 160).unwrap().copy_to_slice(&mut bytes);
        bytes
    }
}

/// An entry of a packed record: in flight, next, last and num; counter; id, flags, length and address.
type Entry = ([u16; 4], u64, (u16, u16, u32, u64));

/// A packed record as it lies in memory: free head and old one, used index and old one, and the two wrap counters.
fn packed_record(places: [u16; 4], wraps: [u8; 2], entries: [Entry; 4]) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    let places = [1, 4].into_iter().chain(places);
    places.for_each(|field: u16| bytes.extend(field.to_le_bytes()));
    bytes.extend(wraps);
    bytes.resize(32, 0);
    for (links, counter, (id, flags, len, addr)) in entries {
        links.iter().for_each(|field| bytes.extend(field.to_le_bytes()));
        bytes.extend(counter.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(addr.to_le_bytes());
    }
    bytes
}

/// Flags of an offered descriptor: writable and available in the first lap; with a next one or not.
const LAST: u16 = 2 | 1 << 7;
const NOT_LAST: u16 = 3 | 1 << 7;

/// The record of all three chains in flight.
fn three_in_flight() -> [Entry; 4] {
    [
        ([1, 1, 0, 1], 0, (0, LAST, 7, GUEST_BASE)),
        ([1, 2, 2, 2], 1, (0xdead, NOT_LAST, 7, GUEST_BASE)),
        ([0, 3, 0, 0], 0, (1, LAST, 7, GUEST_BASE + 1)),
        ([1, 4, 3, 1], 2, (2, LAST, 7, GUEST_BASE)),
    ]
}

#[test]
fn the_record_of_a_packed_ring_is_as_the_document_draws_it() {
    let (mut bench, outcome) = PackedBench::new(&[]);
    outcome.unwrap();
    let empty = (0, 0, 0, 0);
    let fresh = [1, 2, 3, 4].map(|next| ([0, next, 0, 0], 0, empty));
    assert_eq!(bench.bytes(), packed_record([0, 0, 0, 0], [1, 1], fresh));
    let (first, second, third) = (bench.fetch().unwrap(), bench.fetch().unwrap(), bench.fetch().unwrap());
    let mut entries = three_in_flight();
    assert_eq!(bench.bytes(), packed_record([4, 4, 0, 0], [1, 1], entries));
    // Two of them come back: their entries are the first free ones, in the order they came.
    bench.ring.complete(third, 7);
    bench.ring.complete(second, 7);
    assert_eq!(bench.bytes(), packed_record([4, 4, 0, 0], [1, 1], entries), "nothing is published");
    let _ = bench.ring.publish();
    (entries[3].0, entries[1].0, entries[2].0) = ([0, 1, 3, 1], [0, 2, 2, 2], [0, 4, 0, 0]);
    assert_eq!(bench.bytes(), packed_record([3, 3, 3, 3], [1, 1], entries));
    bench.ring.complete(first, 7);
    let _ = bench.ring.publish();
    entries[0].0 = [0, 3, 0, 1];
    assert_eq!(bench.bytes(), packed_record([0, 0, 0, 0], [0, 0], entries));
}

#[test]
fn what_another_back_end_left_of_a_packed_ring_is_fetched_from_the_record() {
    let (mut bench, outcome) = PackedBench::new(&packed_record([4, 4, 0, 0], [1, 1], three_in_flight()));
    outcome.unwrap();
    assert_eq!((bench.ring.left(), bench.ring.in_flight()), (3, 3));
    // Others' used elements have overwritten the offered descriptors.
    let ids: Vec<_> = std::iter::from_fn(|| bench.fetch().map(|head| head.id())).collect();
    assert_eq!(ids, [0, 1, 2]);
    // Another counter, another order; and a half-written batch counts or not, as the ring decides: here none is
    // published.
    let mut entries = three_in_flight();
    entries[3].1 = 0;
    entries[0].1 = 9;
    let (mut bench, outcome) = PackedBench::new(&packed_record([1, 4, 2, 0], [1, 1], entries));
    outcome.unwrap();
    assert_eq!(bench.bytes()[12..22], packed_record([4, 4, 0, 0], [1, 1], entries)[12..22]);
    let ids: Vec<_> = std::iter::from_fn(|| bench.fetch().map(|head| head.id())).collect();
    assert_eq!(ids, [2, 1, 0]);
}

#[test]
fn a_packed_record_that_makes_no_sense_is_refused_and_left_as_it_is() {
    let with = |index: usize, links: [u16; 4]| {
        let mut entries = three_in_flight();
        entries[index].0 = links;
        packed_record([4, 4, 0, 0], [1, 1], entries)
    };
    let mut short = packed_record([4, 4, 0, 0], [1, 1], three_in_flight());
    short[10] = 3;
    for (bytes, fault) in [
        (short, InflightFault::DescNum),
        (packed_record([4, 4, 0, 4], [1, 1], three_in_flight()), InflightFault::UsedOutOfRange),
        (packed_record([4, 4, 9, 0], [1, 1], three_in_flight()), InflightFault::UsedOutOfRange),
        (with(3, [0, 4, 3, 1]), InflightFault::EntryLost),
        (with(1, [1, 3, 2, 2]), InflightFault::ChainOutOfRange),
        (with(1, [1, 0, 0, 2]), InflightFault::ChainTwice),
        (with(1, [1, 9, 2, 2]), InflightFault::ChainOutOfRange),
        (with(3, [1, 4, 3, 0]), InflightFault::ChainOutOfRange),
    ] {
        let (bench, outcome) = PackedBench::new(&bytes);
        assert_eq!(outcome, Err(fault));
        assert_eq!(bench.bytes(), bytes, "{fault}");
    }
    let mut entries = three_in_flight();
    entries[2].0[1] = 2;
    let (_, outcome) = PackedBench::new(&packed_record([2, 2, 0, 0], [1, 1], entries));
    assert_eq!(outcome, Err(InflightFault::FreeLoop));
}

proptest! {
    /// The same for a packed record: for any content, no panic, and the ring continues or is broken.
    #[test]
    fn any_bytes_in_a_packed_record_do_no_harm(
        noise in proptest::collection::vec((12..160_usize, prop_oneof![0..6_u8, any::<u8>()]), 0..12),
    ) {
        let mut bytes = packed_record([4, 4, 0, 0], [1, 1], three_in_flight());
        for (at, byte) in noise {
            bytes[at] = byte;
        }
        let (mut bench, outcome) = PackedBench::new(&bytes);
        if outcome.is_err() {
            prop_assert_eq!(bench.bytes(), bytes);
            return Ok(());
        }
        let mut fetched = Vec::new();
        while let Ok(Some(head)) = bench.ring.fetch(bench.guest.memory(), &mut bench.chain) {
            fetched.push(head);
        }
        prop_assert!(fetched.len() <= 4);
        for head in fetched {
            bench.ring.complete(head, 0);
        }
        let _ = bench.ring.publish();
    }

    /// For any content of a record, no more chains are fetched than the ring has, none twice, and the ring continues.
    #[test]
    fn any_bytes_in_a_record_do_no_harm(
        mut bytes in proptest::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 144),
        version in 0..2_u8,
        used_ahead in 0..10_u8,
        offered in 0..=SIZE,
    ) {
        bytes[..8].fill(0);
        bytes[8..12].copy_from_slice(&[version, 0, 8, 0]);
        bytes[13] = 0;
        bytes[14..16].copy_from_slice(&[100 - used_ahead, 0]);
        let (mut bench, outcome) = Bench::new(offered, 100, &bytes);
        if outcome.is_err() {
            prop_assert_eq!(bench.bytes(144), bytes);
            return Ok(());
        }
        let mut seen = [false; SIZE as usize];
        let mut fetched = Vec::new();
        while let Ok(Some(head)) = bench.ring.fetch(bench.guest.memory(), &mut bench.chain) {
            prop_assert!(!std::mem::replace(&mut seen[usize::from(head.id())], true));
            fetched.push(head);
        }
        for head in fetched {
            bench.ring.complete(head, 0);
        }
        let _ = bench.ring.publish();
        prop_assert_eq!(bench.ring.in_flight(), 0);
    }
}
