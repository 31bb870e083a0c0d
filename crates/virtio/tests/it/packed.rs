//! Packed rings, byte by byte: descriptors, used elements and event areas of the specification; and a hostile guest,
//! line by line.

use blkyard_mq::Op;
use blkyard_virtio::ChainFault::*;
use blkyard_virtio::driver_model::{Descriptor, GUEST_BASE, ModelGuest, blk_header};
use blkyard_virtio::{Chain, ChainFault, Features, Refusal, RingFault, VirtioStatus};
use proptest::prelude::*;

use crate::common::{Device, Outcome};

const HEAP: u64 = GUEST_BASE + 0x3000;
/// A header that reads sector 8.
const HEADER: u64 = HEAP;
const DATA: u64 = HEAP + 0x1000;
const STATUS: u64 = HEAP + 0x2000;
const TABLE: u64 = HEAP + 0x3000;
const NOWHERE: u64 = 0x4000_0000;
const NEXT: u16 = Descriptor::NEXT;
const WRITE: u16 = Descriptor::WRITE;
const INDIRECT: u16 = Descriptor::INDIRECT;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Any id, larger than every ring here.
const ID: u16 = 0xbeef;

/// Address, length, flags; ids are noise but for the last of a chain.
type Row = (u64, u32, u16);
const H: Row = (HEADER, 16, NEXT);
const D: Row = (DATA, 512, NEXT | WRITE);
const S: Row = (STATUS, 1, WRITE);

/// A guest that writes descriptors slot by slot.
struct Bench {
    guest: ModelGuest,
    device: Device,
    size: u16,
    /// Places filled so far.
    filled: u64,
}

impl Bench {
    fn new(size: u16, features: Features) -> Bench {
        let guest = ModelGuest::with(features | Features::RING_PACKED, size, 0x10000);
        guest.write(HEADER, &blk_header(0, 8));
        let mut device = Device::new(&guest, features.contains(Features::INDIRECT_DESC));
        device.chain = Chain::new(16);
        Bench { guest, device, size, filled: 0 }
    }

    /// Mark of an available descriptor in the next slot.
    fn mark(&self) -> u16 {
        if (self.filled / u64::from(self.size)).is_multiple_of(2) { AVAIL } else { USED }
    }

    /// Fills the next slots with a chain, the first one's flags last.
    fn offer(&mut self, rows: &[Row]) {
        for (at, (addr, len, flags)) in rows.iter().enumerate() {
            let next = if at + 1 == rows.len() { ID } else { 0x1111 };
            let place = (self.filled % u64::from(self.size)) as u16;
            let descriptor = Descriptor { addr: *addr, len: *len, flags: flags | self.mark(), next };
            self.guest.set_descriptor(self.guest.addrs()[0], place, descriptor);
            self.filled += 1;
        }
    }

    /// Address, length, id and flags of a slot.
    fn place(&self, place: u64) -> (u64, u32, u16, u16) {
        let bytes = self.guest.read(self.guest.addrs()[0] + place * 16, 16);
        let word = u128::from_le_bytes(bytes.try_into().unwrap());
        (word as u64, (word >> 64) as u32, (word >> 96) as u16, (word >> 112) as u16)
    }

    /// The driver's request for calls: position with wrap counter, and flags.
    fn request(&self, off_wrap: u16, flags: u16) {
        self.guest.write(self.guest.addrs()[1], &(u32::from(off_wrap) | u32::from(flags) << 16).to_le_bytes());
    }

    /// The device's request for kicks: position with wrap counter, and flags.
    fn asked(&self) -> (u16, u16) {
        let word = u32::from_le_bytes(self.guest.read(self.guest.addrs()[2], 4).try_into().unwrap());
        (word as u16, (word >> 16) as u16)
    }
}

#[test]
fn a_used_element_lies_where_the_specification_puts_it() {
    let mut bench = Bench::new(5, Features::empty());
    bench.offer(&[H, D, S]);
    bench.device.turn().unwrap();
    // At the chain's first slot, with the id of its last; the address is unused.
    assert_eq!(bench.place(0), (HEADER, 513, ID, AVAIL | USED | WRITE));
    assert_eq!(bench.place(1).3 & USED, 0, "the others are left as they are");
    // The second chain goes over the end: its element lies in this lap, the next in the other.
    bench.offer(&[H, D, S]);
    bench.device.turn().unwrap();
    assert_eq!(bench.place(3), (HEADER, 513, ID, AVAIL | USED | WRITE));
    bench.offer(&[(HEADER, 16, 0)]);
    bench.device.turn().unwrap();
    // No byte was written, by a separate flag; the lap's marks are both clear.
    assert_eq!(bench.place(1), (HEADER, 0, ID, 0));
    assert_eq!(bench.device.ring.base().bits(), 0x0002_0002);
}

#[test]
fn a_batch_is_seen_when_its_first_element_is() {
    let mut bench = Bench::new(8, Features::empty());
    (0..2).for_each(|_| bench.offer(&[H, D, S]));
    while bench.device.step().unwrap().is_some() {}
    assert_eq!(bench.place(0).3 & USED, 0, "the driver looks here, and no further");
    assert!(bench.device.ring.publish());
    assert_eq!((bench.place(0).3, bench.place(3).3), (AVAIL | USED | WRITE, AVAIL | USED | WRITE));
}

#[test]
fn marks_of_another_lap_offer_nothing() {
    let mut bench = Bench::new(2, Features::empty());
    for _ in 0..6 {
        let not = if bench.mark() == AVAIL { [USED, 0, AVAIL | USED] } else { [AVAIL, 0, AVAIL | USED] };
        for marks in not {
            let place = (bench.filled % 2) as u16;
            let descriptor = Descriptor { addr: STATUS, len: 1, flags: marks | WRITE, next: ID };
            bench.guest.set_descriptor(bench.guest.addrs()[0], place, descriptor);
            assert_eq!(bench.device.step(), Ok(None), "{marks:#x}");
        }
        bench.offer(&[(HEADER, 16, 0)]);
        assert_eq!(bench.device.turn().unwrap().len(), 1);
    }
}

#[test]
fn calls_come_when_the_driver_wants_them() {
    // The driver's request, and whether each of two chains of three slots in a ring of 5, from slot 0 and from slot 3,
    // needs a call. Slot 4 and then, in the other lap, slot 0 belong to the second chain.
    let lap = 1 << 15;
    let table: &[(&str, bool, u16, u16, [bool; 2])] = &[
        ("everything", true, 77, 0, [true, true]),
        ("nothing", true, 0, 1, [false, false]),
        ("nothing, whatever the place", true, lap, 1, [false, false]),
        ("the first place", true, lap, 2, [true, false]),
        ("a place within the first chain", true, lap | 2, 2, [true, false]),
        ("the first place of the second chain", true, lap | 3, 2, [false, true]),
        ("a place within it", true, lap | 4, 2, [false, true]),
        ("a place within it, over the end", true, 0, 2, [false, true]),
        ("the place after it", true, 1, 2, [false, false]),
        ("a place of an earlier lap", true, 4, 2, [false, false]),
        ("a place that the ring does not have", true, lap | 0x7fff, 2, [false, false]),
        ("a place, though that was not agreed on", false, lap | 1, 2, [true, true]),
        ("nothing, without event indexes", false, 0, 1, [false, false]),
        ("flags nobody knows", true, 0, 3, [true, true]),
    ];
    for (name, event_idx, off_wrap, flags, want) in table {
        let features = if *event_idx { Features::EVENT_IDX } else { Features::empty() };
        let mut bench = Bench::new(5, features);
        // The first publish calls in any case: one lap and back to where we began.
        for _ in 0..10 {
            bench.offer(&[(HEADER, 16, 0)]);
            bench.device.turn().unwrap();
        }
        bench.request(*off_wrap, *flags);
        for want in want {
            bench.offer(&[H, D, S]);
            while bench.device.step().unwrap().is_some() {}
            assert_eq!(bench.device.ring.publish(), *want, "{name}");
        }
    }
}

#[test]
fn kicks_are_asked_for_from_the_next_place_on() {
    for event_idx in [true, false] {
        let mut bench = Bench::new(5, if event_idx { Features::EVENT_IDX } else { Features::empty() });
        for round in 0..12_u64 {
            bench.device.ring.disable_notify();
            assert_eq!(bench.asked().1, 1);
            assert!(!bench.device.ring.enable_notify());
            let word = (round % 5) as u16 | u16::from((round / 5).is_multiple_of(2)) << 15;
            assert_eq!(bench.asked(), if event_idx { (word, 2) } else { (0, 0) });
            bench.offer(&[(HEADER, 16, 0)]);
            assert!(bench.device.ring.enable_notify(), "one is there already");
            bench.device.turn().unwrap();
        }
    }
}

/// Expected result of a chain.
enum Want {
    /// An error status is written.
    Error(ChainFault),
    /// A used element of length zero, no byte written.
    Silence(ChainFault),
}
use Want::{Error, Silence};

#[test]
fn malformed_chains_end_in_an_error_and_harm_nobody() {
    let table = |len| (TABLE, len, INDIRECT);
    let rows: &[(&str, &[Row], &[Row], Want)] = &[
        ("no bytes in the header", &[(HEADER, 0, NEXT), D, S], &[], Error(ZeroLength)),
        ("no bytes in the status", &[H, D, (STATUS, 0, WRITE)], &[], Silence(ZeroLength)),
        ("data outside memory", &[H, (NOWHERE, 512, NEXT | WRITE), S], &[], Error(NotMapped)),
        ("status outside memory", &[H, D, (NOWHERE, 1, WRITE)], &[], Silence(NotMapped)),
        ("header after the data", &[D, H, S], &[], Error(ReadableAfterWritable)),
        ("a table of no bytes", &[table(0)], &[], Silence(IndirectLength)),
        ("a table of 47 bytes", &[table(47)], &[], Silence(IndirectLength)),
        ("a table of 32769", &[table(0x80010)], &[], Silence(IndirectLength)),
        ("a table outside memory", &[(NOWHERE, 48, INDIRECT)], &[], Silence(IndirectNotMapped)),
        ("a table around the last address", &[(u64::MAX - 15, 48, INDIRECT)], &[], Silence(IndirectNotMapped)),
        ("a table that goes on", &[(TABLE, 48, INDIRECT | NEXT), S], &[H, D, S], Silence(IndirectWithNext)),
        ("a table at the end of a chain", &[H, table(48)], &[H, D, S], Silence(IndirectWithNext)),
        ("a table within a chain", &[H, (TABLE, 48, INDIRECT | NEXT), S], &[H, D, S], Silence(IndirectWithNext)),
        ("data outside memory, in a table", &[table(48)], &[H, (NOWHERE, 512, WRITE), S], Error(NotMapped)),
        ("no bytes in the status, in a table", &[table(48)], &[H, D, (STATUS, 0, WRITE)], Silence(ZeroLength)),
        ("a table of one readable", &[table(32)], &[(STATUS, 1, WRITE), H], Silence(ReadableAfterWritable)),
    ];
    for size in [16, 7] {
        let mut bench = Bench::new(size, Features::INDIRECT_DESC);
        let mut refused = 0;
        for (name, ring, indirect, want) in rows {
            let (fault, answered) = match want {
                Error(fault) => (*fault, true),
                Silence(fault) => (*fault, false),
            };
            for (index, (addr, len, flags)) in indirect.iter().copied().enumerate() {
                bench.guest.set_descriptor(TABLE, index as u16, Descriptor { addr, len, flags, next: 0 });
            }
            bench.guest.write(STATUS, &[0xaa]);
            let first = bench.filled % u64::from(size);
            bench.offer(ring);
            // Behind it, a chain as it should be: where it begins is certain.
            bench.offer(&[H, (DATA, 512, NEXT | WRITE), (STATUS + 1, 1, WRITE)]);
            let got = bench.device.turn().unwrap();
            let reject = Outcome::Reject { status: VirtioStatus::IoErr, answered, reason: Refusal::Chain(fault) };
            assert_eq!(got[0], reject, "{name}");
            assert!(matches!(got[1..], [Outcome::Io { op: Op::Read, sector: 8, sectors: 1, .. }]), "{name}: {got:?}");
            assert_eq!(bench.guest.read(STATUS, 1), [if answered { 1 } else { 0xaa }], "{name}");
            assert!(bench.place(first).1 <= u32::from(answered), "{name}");
            assert_eq!(bench.place(first).2, ID, "{name}");
            refused += 1;
            assert_eq!(bench.device.refusals.total(), refused);
        }
    }
}

#[test]
fn flags_in_an_indirect_table_mean_nothing_but_the_direction() {
    let mut bench = Bench::new(4, Features::INDIRECT_DESC);
    let noise = !(WRITE | AVAIL);
    for (index, (addr, len, flags)) in [H, D, S].into_iter().enumerate() {
        let flags = flags & WRITE | noise;
        bench.guest.set_descriptor(TABLE, index as u16, Descriptor { addr, len, flags, next: 0xffff });
    }
    bench.offer(&[(TABLE, 48, INDIRECT | WRITE)]);
    let got = bench.device.turn().unwrap();
    assert!(matches!(got[..], [Outcome::Io { op: Op::Read, sector: 8, sectors: 1, .. }]), "{got:?}");
}

#[test]
fn a_table_that_was_not_agreed_on_is_refused() {
    let mut bench = Bench::new(4, Features::empty());
    bench.offer(&[(TABLE, 48, INDIRECT)]);
    let reason = Refusal::Chain(IndirectNotNegotiated);
    assert_eq!(
        bench.device.turn().unwrap(),
        [Outcome::Reject { status: VirtioStatus::IoErr, answered: false, reason }]
    );
}

#[test]
fn a_chain_without_an_end_stops_the_queue_for_good() {
    for size in [1, 2, 5, 16] {
        let mut bench = Bench::new(size, Features::empty());
        bench.offer(&[(HEADER, 16, 0)]);
        bench.device.turn().unwrap();
        let endless = vec![(HEADER, 16, NEXT); usize::from(size)];
        bench.offer(&endless);
        assert_eq!(bench.device.turn(), Err(RingFault::ChainOverrun), "size {size}");
        bench.offer(&[(HEADER, 16, 0)]);
        assert_eq!(bench.device.turn(), Err(RingFault::ChainOverrun), "and stays so");
        assert!(!bench.device.ring.enable_notify(), "nothing will be fetched, so nothing is there");
        assert_eq!(bench.device.ring.fault(), Some(RingFault::ChainOverrun));
    }
}

#[test]
fn places_that_are_out_are_not_taken_again() {
    let fetch = |bench: &mut Bench| bench.device.ring.fetch(&bench.device.memory, &mut bench.device.chain);
    // All of them out, and the first offered again.
    let mut bench = Bench::new(3, Features::empty());
    bench.offer(&[H, D, S]);
    let head = fetch(&mut bench).unwrap().unwrap();
    bench.offer(&[(HEADER, 16, 0)]);
    assert_eq!(fetch(&mut bench), Err(RingFault::AvailJumped));
    bench.device.ring.complete(head, 0);
    assert!(bench.device.ring.publish(), "what was out before comes back");
    // Some out, and a chain that runs into them.
    let mut bench = Bench::new(4, Features::empty());
    bench.offer(&[H, D, S]);
    let head = fetch(&mut bench).unwrap().unwrap();
    bench.offer(&[H, D, S]);
    assert_eq!(fetch(&mut bench), Err(RingFault::ChainOverrun));
    bench.device.ring.complete(head, 0);
    // Completed, and not published: they are not the driver's yet.
    let mut bench = Bench::new(1, Features::empty());
    bench.offer(&[(HEADER, 16, 0)]);
    let head = fetch(&mut bench).unwrap().unwrap();
    bench.device.ring.complete(head, 0);
    bench.offer(&[(HEADER, 16, 0)]);
    assert_eq!(fetch(&mut bench), Err(RingFault::AvailJumped));
}

#[test]
fn descriptors_that_change_after_they_were_fetched_make_no_difference() {
    let mut bench = Bench::new(8, Features::empty());
    bench.offer(&[H, D, S]);
    let head = bench.device.ring.fetch(&bench.device.memory, &mut bench.device.chain).unwrap().unwrap();
    for place in 0..3 {
        let descriptor = Descriptor { addr: NOWHERE, len: u32::MAX, flags: NEXT | INDIRECT, next: 0 };
        bench.guest.set_descriptor(bench.guest.addrs()[0], place, descriptor);
    }
    let device = &mut bench.device;
    let parsed = blkyard_virtio::parse(&device.chain, &device.memory, &device.context, &mut device.bio);
    assert!(matches!(parsed, blkyard_virtio::Parsed::Io { .. }));
    device.ring.complete(head, 513);
    let _ = device.ring.publish();
    let (_, len, id, flags) = bench.place(0);
    assert_eq!((len, id, flags), (513, ID, AVAIL | USED | WRITE));
}

/// A descriptor into the little memory there is, with any marks.
fn descriptor() -> impl Strategy<Value = Descriptor> {
    let marks = prop_oneof![Just(AVAIL), Just(USED), Just(0), Just(AVAIL | USED)];
    (0_u64..0x800, 0_u32..2100, 0_u16..8, marks, any::<u16>()).prop_map(|(at, len, flags, marks, next)| Descriptor {
        addr: GUEST_BASE + at * 16,
        len: len.next_multiple_of(8),
        flags: flags | marks,
        next,
    })
}

/// The same ring in its simplest form: a copy of the memory, and counters that never wrap. Returns its next chain:
/// slots and id, none, or a chain without an end.
fn reference(bench: &Bench, fetched: u64, free: u64) -> Option<Result<(u64, u16), ()>> {
    let size = u64::from(bench.size);
    let lap = if (fetched / size).is_multiple_of(2) { AVAIL } else { USED };
    (bench.place(fetched % size).3 & (AVAIL | USED) == lap).then(|| {
        let end = (0..free).find(|ahead| bench.place((fetched + ahead) % size).3 & NEXT == 0);
        end.map(|ahead| (ahead + 1, bench.place((fetched + ahead) % size).2)).ok_or(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Arbitrary descriptors: no panic, no unbounded work, and exactly the reference's chains are fetched.
    #[test]
    fn any_ring_is_survived(
        size in 1_u16..9,
        laps in prop::collection::vec(prop::collection::vec(descriptor(), 8), 1..12),
        features in 0_u64..8,
        keep in any::<u64>(),
    ) {
        let bits = [Features::EVENT_IDX, Features::INDIRECT_DESC, Features::IN_ORDER];
        let some = (0..3).filter(|bit| features >> bit & 1 == 1);
        let mut bench = Bench::new(size, some.fold(Features::empty(), |all, bit| all | bits[bit]));
        let (mut fetched, mut held) = (0, Vec::new());
        for (lap, rows) in laps.iter().enumerate() {
            for (place, row) in rows.iter().take(size.into()).enumerate() {
                bench.guest.set_descriptor(bench.guest.addrs()[0], place as u16, *row);
            }
            loop {
                let out: u64 = held.iter().map(|(_, slots)| slots).sum();
                let expected = reference(&bench, fetched, u64::from(size) - out);
                let got = bench.device.ring.fetch(&bench.device.memory, &mut bench.device.chain);
                match (expected, got) {
                    (None, Ok(None)) => break,
                    (Some(Ok((slots, id))), Ok(Some(head))) => {
                        prop_assert_eq!(head.id(), id);
                        fetched += slots;
                        held.push((head, slots));
                    }
                    (Some(Err(())), Err(fault)) => {
                        let full = out == u64::from(size);
                        prop_assert_eq!(fault, if full { RingFault::AvailJumped } else { RingFault::ChainOverrun });
                        for (head, _) in held {
                            bench.device.ring.complete(head, 1);
                        }
                        let _ = bench.device.ring.publish();
                        prop_assert_eq!(bench.device.ring.in_flight(), 0);
                        return Ok(());
                    }
                    (expected, got) => prop_assert!(false, "expected {expected:?}, got {got:?}"),
                }
            }
            // Some stay out for a lap or more. In order, all that ended before them stays the device's, too.
            if keep >> lap & 1 == 0 {
                held.drain(..).for_each(|(head, _)| bench.device.ring.complete(head, 1));
            }
            let _ = bench.device.ring.publish();
            bench.device.ring.enable_notify();
            bench.device.ring.disable_notify();
            prop_assert_eq!(usize::from(bench.device.ring.in_flight()), held.len());
        }
    }
}
