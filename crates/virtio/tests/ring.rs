//! A ring from both sides: what is offered comes once, in order, and goes back once, wherever the indexes stand.
#![forbid(unsafe_code)]

mod common;

use std::collections::VecDeque;

use blkyard_mq::Op;
use blkyard_virtio::driver_model::{Buffer, Guest, USER_BASE, blk_header};
use blkyard_virtio::{Chain, RingLayout, RingSetupError, SplitRing};
use common::{Device, Outcome};

/// A guest that reads sector after sector with chains of three, direct and indirect in turn.
struct Reader {
    guest: Guest,
    places: Vec<(u64, u64)>,
    data: u64,
    sector: u64,
}

impl Reader {
    fn new(size: u16, event_idx: bool, start: u16) -> Reader {
        let mut guest = Guest::new(size, usize::from(size) * 128 + 0x2000, event_idx);
        guest.start_at(start);
        let data = guest.alloc(512, 512);
        let places = (0..size).map(|_| (guest.alloc(17, 1), guest.alloc(48, 1))).collect();
        Reader { guest, places, data, sector: 0 }
    }

    fn offer(&mut self) -> Option<u16> {
        let (header, table) = self.places[self.sector as usize % self.places.len()];
        self.guest.write(header, &blk_header(0, self.sector));
        let buffers = [
            Buffer { addr: header, len: 16, writable: false },
            Buffer { addr: self.data, len: 512, writable: true },
            Buffer { addr: header + 16, len: 1, writable: true },
        ];
        let direct = self.sector.is_multiple_of(2) && self.places.len() >= 3;
        let head = if direct { self.guest.chain(&buffers) } else { self.guest.chain_indirect(table, &buffers) }?;
        self.guest.offer(head);
        self.sector += 1;
        Some(head)
    }
}

#[test]
fn chains_go_round_whatever_the_size_and_wherever_the_indexes_stand() {
    for size in [1, 2, 4, 128, 32768] {
        for (event_idx, start) in [(true, 0), (false, 0), (true, 65535), (false, 65533), (true, 32767)] {
            let mut reader = Reader::new(size, event_idx, start);
            let mut device = Device::new(&reader.guest, true);
            let mut expected = 0;
            for round in 0..if size > 128 { 3 } else { 400_u64 } {
                let mut heads = VecDeque::new();
                // Full every time, or a few.
                let want = if round % 3 == 0 { u64::from(size) } else { 1 + round % u64::from(size) };
                while (heads.len() as u64) < want
                    && let Some(head) = reader.offer()
                {
                    heads.push_back(head);
                }
                reader.guest.publish();
                assert_eq!(usize::from(device.ring.available()), heads.len());
                for outcome in device.turn().unwrap() {
                    let Outcome::Io { op: Op::Read, sector, sectors: 1, .. } = outcome else { panic!("{outcome:?}") };
                    assert_eq!(sector, expected, "size {size}, start {start}");
                    expected += 1;
                }
                for head in heads {
                    assert_eq!(reader.guest.poll(), Some((u32::from(head), 513)), "size {size}, start {start}");
                }
                assert_eq!(reader.guest.poll(), None);
                assert_eq!(device.ring.in_flight(), 0);
            }
            assert_eq!(expected, reader.sector);
            assert_eq!(device.ring.next_avail(), start.wrapping_add(expected as u16));
        }
    }
}

#[test]
fn chains_come_back_in_any_order_and_places_are_used_again() {
    let mut reader = Reader::new(8, true, 65530);
    let mut device = Device::new(&reader.guest, true);
    let mut out = Vec::new();
    for round in 0..2000_usize {
        while reader.offer().is_some() {}
        reader.guest.publish();
        while let Some(head) = device.ring.fetch(&device.memory, &mut device.chain).unwrap() {
            out.push(head);
        }
        assert_eq!(usize::from(device.ring.in_flight()), out.len());
        for _ in 0..=round % out.len() {
            let head = out.swap_remove((round * 7) % out.len());
            let index = head.index();
            device.ring.complete(head, 1);
            assert_eq!(reader.guest.poll(), None, "not yet published");
            let _ = device.ring.publish();
            assert_eq!(reader.guest.poll(), Some((u32::from(index), 1)));
        }
    }
}

#[test]
fn a_ring_goes_on_where_an_earlier_device_left_it() {
    let mut reader = Reader::new(8, true, 0);
    let mut device = Device::new(&reader.guest, true);
    for _ in 0..3 {
        reader.offer();
    }
    reader.guest.publish();
    device.step().unwrap();
    let _ = device.ring.publish();
    assert_eq!(reader.guest.poll().map(|used| used.1), Some(513));
    let next_avail = device.ring.next_avail();
    assert_eq!(next_avail, 1);
    let layout = reader.guest.layout().clone();
    device.ring = SplitRing::new(layout, 8, true, true, next_avail).unwrap();
    assert_eq!(device.turn().unwrap().len(), 2);
    assert!(reader.guest.poll().is_some() && reader.guest.poll().is_some());
    // After a crash the base may be anything, yet used elements go on where the driver looks for them.
    reader.offer();
    reader.guest.publish();
    device.ring = SplitRing::new(reader.guest.layout().clone(), 8, true, true, 3).unwrap();
    assert_eq!(device.ring.in_flight(), 0);
    assert_eq!(device.turn().unwrap().len(), 1);
    assert!(reader.guest.poll().is_some());
}

#[test]
fn the_first_publish_calls_since_the_last_device_may_not_have() {
    for event_idx in [true, false] {
        let mut reader = Reader::new(8, event_idx, 0);
        reader.guest.disable_calls();
        // With event indexes: an event that was passed long ago.
        reader.guest.write(reader.guest.addrs()[1] + 4 + 16, &1000_u16.to_le_bytes());
        let mut device = Device::new(&reader.guest, true);
        assert!(!device.ring.publish(), "nothing to tell");
        for calls in [true, false] {
            reader.offer();
            reader.guest.publish();
            device.step().unwrap();
            assert_eq!(device.ring.publish(), calls);
        }
    }
}

#[test]
fn a_batch_is_one_call() {
    let mut reader = Reader::new(8, true, 0);
    let mut device = Device::new(&reader.guest, true);
    let _ = device.turn();
    for _ in 0..5 {
        reader.offer();
    }
    reader.guest.publish();
    while device.step().unwrap().is_some() {}
    assert!(device.ring.publish());
    assert!(!device.ring.publish(), "told once");
}

#[test]
#[should_panic(expected = "is not out of this ring")]
fn a_head_of_another_ring_is_not_taken() {
    let mut reader = Reader::new(4, true, 0);
    let mut device = Device::new(&reader.guest, true);
    reader.offer();
    reader.guest.publish();
    let head = device.ring.fetch(&device.memory, &mut device.chain).unwrap().unwrap();
    Device::new(&reader.guest, true).ring.complete(head, 0);
}

#[test]
fn rings_of_no_possible_shape_are_refused() {
    let guest = Guest::new(8, 0x1000, true);
    for size in [0, 3, 6, 100, 32769, 65535] {
        let layout = guest.layout().clone();
        assert_eq!(SplitRing::new(layout, size, true, true, 0).unwrap_err(), RingSetupError::Size(size));
    }
    let at = |part: usize, addr: u64| {
        let mut addrs = [USER_BASE, USER_BASE + 0x1000, USER_BASE + 0x2000];
        addrs[part] = addr;
        RingLayout::locate(guest.memory(), 8, addrs)
    };
    assert!(at(0, USER_BASE).is_ok());
    let end = USER_BASE + guest.memory().ranges()[0].len;
    for (part, addr) in [
        (0, USER_BASE + 8),
        (1, USER_BASE + 0x1001),
        (2, USER_BASE + 0x2002),
        (0, end - 112),
        (1, end - 20),
        (2, end - 68),
        (0, 0),
        (1, u64::MAX),
        (2, u64::MAX - 67),
        (0, USER_BASE - 16),
    ] {
        let error = at(part, addr).unwrap_err();
        assert!(matches!(error, RingSetupError::Unreachable { addr: told, .. } if told == addr), "{part}: {error}");
    }
    assert!(at(0, end - 128).is_ok() && at(1, end - 22).is_ok() && at(2, end - 72).is_ok());
}

#[test]
fn memory_in_many_ranges_is_walked_the_same() {
    use blkyard_mem::{Region, RegionTable, Segment};
    use blkyard_virtio::{GuestMemory, GuestRange};
    use std::sync::Arc;
    // The ring in one region; header, data, status and a table across borders of others, some of them far away.
    let guest = Guest::new(4, 0x1000, true);
    let mut table = RegionTable::new(vec![Arc::clone(guest.memory().table().region(0).unwrap())]);
    let mut ranges = guest.memory().ranges().to_vec();
    let base = 1_u64 << 32;
    for page in 0..4 {
        let region = table.insert(Region::anonymous(4096).unwrap());
        let guest_addr = base + page * 4096;
        ranges.push(GuestRange { guest_addr, user_addr: guest_addr, len: 4096, region, offset: 0 });
    }
    let memory = GuestMemory::new(Arc::new(table), ranges).unwrap();
    let put = |addr: u64, bytes: &[u8]| {
        for (at, byte) in (addr..).zip(bytes) {
            let region = memory.table().region(1 + ((at - base) / 4096) as u32).unwrap();
            region.span((at - base) % 4096, 1).unwrap().fill(*byte);
        }
    };
    let mut guest = guest;
    let (header, indirect, data) = (base + 4096 - 6, base + 2 * 4096 - 20, base + 3 * 4096 - 512);
    put(header, &blk_header(0, 77));
    let rows = [(header, 16, 1, 1), (data, 1024, 3, 2), (base + 100, 1, 2, 0)];
    for (index, (addr, len, flags, next)) in rows.into_iter().enumerate() {
        let descriptor = blkyard_virtio::driver_model::Descriptor { addr, len, flags, next };
        put(indirect + index as u64 * 16, &descriptor.to_bytes());
    }
    let head = blkyard_virtio::driver_model::Descriptor { addr: indirect, len: 48, flags: 4, next: 0 };
    guest.set_descriptor(guest.addrs()[0], 3, head);
    let mut ring = guest.device(true);
    let mut chain = Chain::new(8);
    for _ in 0..3 {
        guest.offer(3);
        guest.publish();
        let head = ring.fetch(&memory, &mut chain).unwrap().unwrap();
        assert_eq!(chain.fault(), None);
        let s = |region, offset, len| Segment { region, offset, len };
        assert_eq!(chain.readable(), [s(1, 4090, 6), s(2, 0, 10)]);
        assert_eq!(chain.writable(), [s(3, 3584, 512), s(4, 0, 512), s(1, 100, 1)]);
        assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (16, 1025));
        assert_eq!(chain.status_at(), Some(s(1, 100, 1)));
        ring.complete(head, 0);
        let _ = ring.publish();
        guest.poll().unwrap();
    }
}
