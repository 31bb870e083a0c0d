//! A hostile guest, line by line: each malformed chain ends in an error status, or in a used element of length zero
//! without a status byte, or stops the queue. Earlier and later chains are served.
//!
//! The classes follow faults of other devices: trusted lengths, numbers used as indexes, unchecked directions, headers
//! read twice, more requests than slots.
#![expect(clippy::unreadable_literal, reason = "bytes as they lie in memory")]

use blkyard_mq::Op;
use blkyard_virtio::ChainFault::*;
use blkyard_virtio::driver_model::{Descriptor, GUEST_BASE, ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{Chain, ChainFault, Refusal, RingFault, VirtioStatus};

use crate::common::{Device, Outcome, SEGMENTS};

const SIZE: u16 = 16;
/// Pages of the guest's heap.
const HEAP: u64 = GUEST_BASE + 0x3000;
/// A header that reads sector 8.
const HEADER: u64 = HEAP;
const DATA: u64 = HEAP + 0x1000;
const STATUS: u64 = HEAP + 0x2000;
const TABLE: u64 = HEAP + 0x3000;
const END: u64 = HEAP + 0x10000;
const NOWHERE: u64 = 0x4000_0000;
const NEXT: u16 = Descriptor::NEXT;
const WRITE: u16 = Descriptor::WRITE;
const INDIRECT: u16 = Descriptor::INDIRECT;

type Row = (u64, u32, u16, u16);
const H: Row = (HEADER, 16, NEXT, 1);
const D: Row = (DATA, 512, NEXT | WRITE, 2);
const S: Row = (STATUS, 1, WRITE, 0);
/// An indirect descriptor to a table of three.
const I: Row = (TABLE, 48, INDIRECT, 0);

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
    // name, descriptors of the ring from 0 on, descriptors of the table, outcome
    let table: &[(&str, &[Row], &[Row], Want)] = &[
        ("a descriptor that follows itself", &[(HEADER, 16, NEXT, 0)], &[], Silence(Loop)),
        ("a loop of two", &[H, (DATA, 512, NEXT | WRITE, 1)], &[], Silence(Loop)),
        ("a loop back to a readable one", &[H, (DATA, 512, NEXT | WRITE, 0)], &[], Silence(ReadableAfterWritable)),
        ("next is the size of the ring", &[(HEADER, 16, NEXT, SIZE)], &[], Silence(NextOutOfRange)),
        ("next is 65535", &[H, (DATA, 512, NEXT | WRITE, 65535)], &[], Silence(NextOutOfRange)),
        ("no bytes in the header", &[(HEADER, 0, NEXT, 1), D, S], &[], Error(ZeroLength)),
        ("no bytes in the data", &[H, (DATA, 0, NEXT | WRITE, 2), S], &[], Error(ZeroLength)),
        ("no bytes in the status", &[H, D, (STATUS, 0, WRITE, 0)], &[], Silence(ZeroLength)),
        ("header outside memory", &[(NOWHERE, 16, NEXT, 1), D, S], &[], Error(NotMapped)),
        ("data outside memory", &[H, (NOWHERE, 512, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        ("data at address zero", &[H, (0, 512, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        ("status outside memory", &[H, D, (NOWHERE, 1, WRITE, 0)], &[], Silence(NotMapped)),
        ("data over the end of memory", &[H, (END - 256, 512, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        ("data from before memory", &[H, (GUEST_BASE - 1, 512, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        ("data around the last address", &[H, (u64::MAX - 255, 512, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        ("data of 4 GiB less one", &[H, (DATA, u32::MAX, NEXT | WRITE, 2), S], &[], Error(NotMapped)),
        (
            "readable data after the status",
            &[H, (STATUS, 1, NEXT | WRITE, 2), (DATA, 512, 0, 0)],
            &[],
            Silence(ReadableAfterWritable),
        ),
        (
            "header after the data",
            &[(DATA, 512, NEXT | WRITE, 1), (HEADER, 16, NEXT, 2), S],
            &[],
            Error(ReadableAfterWritable),
        ),
        ("an indirect table outside memory", &[(NOWHERE, 48, INDIRECT, 0)], &[], Silence(IndirectNotMapped)),
        ("an indirect table over the end", &[(END - 16, 48, INDIRECT, 0)], &[], Silence(IndirectNotMapped)),
        (
            "an indirect table around the last address",
            &[(u64::MAX - 15, 48, INDIRECT, 0)],
            &[],
            Silence(IndirectNotMapped),
        ),
        ("an indirect table of no bytes", &[(TABLE, 0, INDIRECT, 0)], &[], Silence(IndirectLength)),
        ("an indirect table of 47 bytes", &[(TABLE, 47, INDIRECT, 0)], &[], Silence(IndirectLength)),
        ("an indirect table of 8 bytes", &[(TABLE, 8, INDIRECT, 0)], &[], Silence(IndirectLength)),
        ("an indirect table of 32769", &[(TABLE, 0x80010, INDIRECT, 0)], &[], Silence(IndirectLength)),
        ("an indirect table of 4 GiB less 16", &[(TABLE, 0xfffffff0, INDIRECT, 0)], &[], Silence(IndirectLength)),
        (
            "an indirect descriptor that goes on",
            &[(TABLE, 48, INDIRECT | NEXT, 1), S],
            &[H, D, S],
            Silence(IndirectWithNext),
        ),
        ("an indirect table in an indirect table", &[I], &[(TABLE, 48, INDIRECT, 0)], Silence(IndirectNested)),
        ("the same further on", &[I], &[H, (TABLE, 48, INDIRECT, 0)], Silence(IndirectNested)),
        (
            "the same with everything set",
            &[I],
            &[H, (TABLE, 48, INDIRECT | NEXT | WRITE, 2), S],
            Silence(IndirectNested),
        ),
        ("next beyond the indirect table", &[I], &[H, (DATA, 512, NEXT | WRITE, 3), S], Silence(NextOutOfRange)),
        ("next beyond the table, within the ring", &[(TABLE, 16, INDIRECT, 0)], &[H, D, S], Silence(NextOutOfRange)),
        ("a loop in an indirect table", &[I], &[H, D, (STATUS, 1, NEXT | WRITE, 1)], Silence(Loop)),
        ("a loop to the start of the table", &[I], &[(HEADER, 16, NEXT, 0)], Silence(Loop)),
        ("data outside memory, indirect", &[I], &[H, (NOWHERE, 512, NEXT | WRITE, 2), S], Error(NotMapped)),
        ("header last, indirect", &[I], &[S_NEXT, (HEADER, 16, 0, 0)], Silence(ReadableAfterWritable)),
        ("a direct head, then a bad table", &[H, (TABLE, 0, INDIRECT, 0)], &[], Silence(IndirectLength)),
        (
            "faults twice: the first counts",
            &[H, (NOWHERE, 512, NEXT | WRITE, 2), (STATUS, 0, WRITE, 0)],
            &[],
            Silence(NotMapped),
        ),
        ("unmapped, then out of range", &[H, (NOWHERE, 512, NEXT | WRITE, 900)], &[], Silence(NotMapped)),
    ];
    for (name, ring, indirect, want) in table {
        let (mut guest, mut device) = set_up(true);
        describe(&guest, ring, indirect);
        let (fault, answered) = match want {
            Error(fault) => (*fault, true),
            Silence(fault) => (*fault, false),
        };
        serve(&mut guest, &mut device, name);
        guest.write(STATUS, &[0xaa]);
        guest.offer(0);
        guest.publish();
        let got = device.turn().unwrap();
        let reason = Refusal::Chain(fault);
        assert_eq!(got, [Outcome::Reject { status: VirtioStatus::IoErr, answered, reason }], "{name}");
        let (id, len) = guest.poll().unwrap();
        assert_eq!(id, 0, "{name}");
        assert!(len <= u32::from(answered), "{name}: {len} bytes were never written");
        let status = if answered { 1 } else { 0xaa };
        assert_eq!(guest.read(STATUS, 1), [status], "{name}");
        assert_eq!(device.ring.in_flight(), 0, "{name}");
        assert_eq!(device.refusals.iter().find(|(_, count)| *count > 0), Some((fault.name(), 1)), "{name}");
        serve(&mut guest, &mut device, name);
    }
}

const S_NEXT: Row = (STATUS, 1, NEXT | WRITE, 1);

#[test]
fn more_than_there_is_room_for_still_finds_its_status() {
    let (mut guest, mut device) = set_up(true);
    device.chain = Chain::new(SEGMENTS + 2);
    for (descriptors, fits) in [(8, true), (9, false), (300, false), (2000, false)] {
        let mut buffers = vec![ModelBuffer { addr: HEADER, len: 16, writable: false }];
        buffers.extend((0..descriptors).map(|_| ModelBuffer { addr: DATA, len: 512, writable: true }));
        buffers.push(ModelBuffer { addr: STATUS, len: 1, writable: true });
        guest.write(STATUS, &[0xaa]);
        let head = guest.chain_indirect(TABLE, &buffers).unwrap();
        guest.offer(head);
        guest.publish();
        let got = device.turn().unwrap();
        assert_eq!(matches!(got[..], [Outcome::Io { .. }]), fits, "{descriptors}: {got:?}");
        assert_eq!(guest.read(STATUS, 1), [u8::from(!fits)]);
        guest.poll().unwrap();
    }
    // A chain that fits, with data that does not fit the bio.
    device.chain = Chain::new(100);
    let mut buffers = vec![ModelBuffer { addr: HEADER, len: 16, writable: false }];
    buffers.extend((0..9).map(|_| ModelBuffer { addr: DATA, len: 512, writable: true }));
    buffers.push(ModelBuffer { addr: STATUS, len: 1, writable: true });
    let head = guest.chain_indirect(TABLE, &buffers).unwrap();
    guest.offer(head);
    guest.publish();
    let reason = Refusal::Request(blkyard_virtio::RequestFault::TooManySegments);
    let want = Outcome::Reject { status: VirtioStatus::IoErr, answered: true, reason };
    assert_eq!(device.turn().unwrap(), [want]);
}

#[test]
fn an_indirect_descriptor_that_was_not_negotiated_is_refused() {
    let (mut guest, mut device) = set_up(false);
    describe(&guest, &[I], &[H, D, S]);
    guest.offer(0);
    guest.publish();
    let reason = Refusal::Chain(IndirectNotNegotiated);
    let want = Outcome::Reject { status: VirtioStatus::IoErr, answered: false, reason };
    assert_eq!(device.turn().unwrap(), [want]);
}

#[test]
fn a_chain_of_more_than_4_gib_is_refused() {
    // No one buffer is too long, but all together are: each names the same MiB.
    let mut guest = ModelGuest::new(2, 4 << 20, false);
    let mut device = Device::new(&guest, true);
    device.chain = Chain::new(u16::MAX);
    let header = guest.alloc(16, 16);
    let data = guest.alloc(1 << 20, 16);
    let status = guest.alloc(1, 1);
    let table = guest.alloc(32768 * 16, 16);
    for (count, too_long) in [(4095, false), (4096, true)] {
        let mut buffers = vec![ModelBuffer { addr: header, len: 16, writable: false }];
        buffers.extend((0..count).map(|_| ModelBuffer { addr: data, len: 1 << 20, writable: true }));
        buffers.push(ModelBuffer { addr: status, len: 1, writable: true });
        let head = guest.chain_indirect(table, &buffers).unwrap();
        offer_all(&mut guest, &[head]);
        let got = device.turn().unwrap();
        let refused = matches!(got[..], [Outcome::Reject { reason: Refusal::Chain(TooLong), answered: true, .. }]);
        assert_eq!(refused, too_long, "{got:?}");
        guest.poll().unwrap();
    }
}

#[test]
fn a_ring_that_makes_no_sense_stops_the_queue_for_good() {
    type Act = fn(&mut ModelGuest);
    let table: &[(&str, Act, RingFault)] = &[
        ("the index jumps one too far", |guest| set_avail(guest, 1 + SIZE + 1), RingFault::AvailJumped),
        ("the index goes back", |guest| set_avail(guest, 0), RingFault::AvailJumped),
        ("the index jumps half around", |guest| set_avail(guest, 0x8001), RingFault::AvailJumped),
        ("a head beyond the ring", |guest| offer_all(guest, &[SIZE]), RingFault::HeadOutOfRange),
        ("a head of 65535", |guest| offer_all(guest, &[65535]), RingFault::HeadOutOfRange),
    ];
    for (name, act, fault) in table {
        let (mut guest, mut device) = set_up(true);
        serve(&mut guest, &mut device, name);
        act(&mut guest);
        assert_eq!(device.turn(), Err(*fault), "{name}");
        // A correction does not help: further faults cannot be known.
        set_avail(&mut guest, 2);
        offer_all(&mut guest, &[0]);
        assert_eq!(device.turn(), Err(*fault), "{name}");
        assert!(!device.ring.enable_notify(), "{name}: nothing will be fetched, so nothing is there");
        assert_eq!(device.ring.fault(), Some(*fault));
    }
}

#[test]
fn a_head_that_is_out_is_not_served_twice() {
    let (mut guest, mut device) = set_up(true);
    describe(&guest, &[H, D, S], &[]);
    offer_all(&mut guest, &[0, 0]);
    let head = device.ring.fetch(&device.memory, &mut device.chain).unwrap().unwrap();
    assert_eq!(device.ring.fetch(&device.memory, &mut device.chain), Err(RingFault::HeadTwice));
    assert_eq!(device.ring.in_flight(), 1);
    device.ring.complete(head, 0);
    assert!(device.ring.publish());
    assert_eq!(guest.poll(), Some((0, 0)), "what was out before comes back");
    assert_eq!(guest.poll(), None);
}

#[test]
fn a_header_that_changes_after_it_was_fetched_makes_no_difference() {
    let (mut guest, mut device) = set_up(true);
    describe(&guest, &[H, D, S], &[]);
    offer_all(&mut guest, &[0]);
    let head = device.ring.fetch(&device.memory, &mut device.chain).unwrap().unwrap();
    // The descriptors change under a chain that was fetched.
    describe(&guest, &[(NOWHERE, u32::MAX, INDIRECT | NEXT, 0), (0, 0, 0, 0), (0, 0, 0, 0)], &[]);
    let parsed = blkyard_virtio::parse(&device.chain, &device.memory, &device.context, &mut device.bio);
    guest.write(HEADER, &blk_header(13, u64::MAX));
    assert!(matches!(parsed, blkyard_virtio::Parsed::Io { .. }));
    assert_eq!((device.bio.op, device.bio.sector, device.bio.sectors), (Op::Read, 8, 1));
    device.ring.complete(head, 0);
}

fn set_up(indirect: bool) -> (ModelGuest, Device) {
    let guest = ModelGuest::new(SIZE, 0x10000, true);
    assert_eq!(guest.memory().ranges()[0].guest_addr + guest.memory().ranges()[0].len, END);
    guest.write(HEADER, &blk_header(0, 8));
    // The last descriptor in memory continues with one beyond.
    guest.set_descriptor(END - 16, 0, Descriptor { addr: HEADER, len: 16, flags: NEXT, next: 1 });
    let mut device = Device::new(&guest, indirect);
    device.chain = Chain::new(SIZE);
    (guest, device)
}

fn describe(guest: &ModelGuest, ring: &[Row], indirect: &[Row]) {
    for (table, rows) in [(guest.addrs()[0], ring), (TABLE, indirect)] {
        for (index, (addr, len, flags, next)) in rows.iter().copied().enumerate() {
            guest.set_descriptor(table, index as u16, Descriptor { addr, len, flags, next });
        }
    }
}

/// A good request, from descriptors that no row uses.
fn serve(guest: &mut ModelGuest, device: &mut Device, name: &str) {
    let status = HEAP + 0x6000;
    let rows: [Row; 3] = [(HEADER, 16, NEXT, 14), (HEAP + 0x5000, 512, NEXT | WRITE, 15), (status, 1, WRITE, 0)];
    for (index, (addr, len, flags, next)) in rows.into_iter().enumerate() {
        guest.set_descriptor(guest.addrs()[0], 13 + index as u16, Descriptor { addr, len, flags, next });
    }
    guest.write(status, &[0xbb]);
    offer_all(guest, &[13]);
    let got = device.turn().unwrap();
    assert!(matches!(got[..], [Outcome::Io { op: Op::Read, sector: 8, sectors: 1, .. }]), "{name}: {got:?}");
    assert_eq!(guest.poll(), Some((13, 513)), "{name}");
    assert_eq!(guest.read(status, 1), [0], "{name}");
}

fn offer_all(guest: &mut ModelGuest, heads: &[u16]) {
    heads.iter().for_each(|head| guest.offer(*head));
    guest.publish();
}

fn set_avail(guest: &mut ModelGuest, index: u16) {
    guest.write(guest.addrs()[1] + 2, &index.to_le_bytes());
}
