//! A ring from both sides: each offered chain comes once, in order, and returns once, at all index positions.

use std::collections::{HashMap, VecDeque};

use blkyard_mq::Op;
use blkyard_virtio::driver_model::{ModelBuffer, ModelGuest, USER_BASE, blk_header};
use blkyard_virtio::{Chain, DeviceRing, Features, RingBase, RingLayout, RingSetupError};

use crate::common::{Device, Outcome, kinds};

/// A guest that reads sector after sector with chains of three, direct and indirect in turn.
struct Reader {
    guest: ModelGuest,
    places: Vec<(u64, u64)>,
    data: u64,
    sector: u64,
    /// Chains so far, or slots of a packed ring.
    passed: u64,
}

impl Reader {
    fn new(features: Features, size: u16, start: u16) -> Reader {
        let mut guest = ModelGuest::with(features, size, usize::from(size) * 128 + 0x2000);
        guest.start_at(start);
        let data = guest.alloc(512, 512);
        let places = (0..size).map(|_| (guest.alloc(17, 1), guest.alloc(48, 1))).collect();
        Reader { guest, places, data, sector: 0, passed: start.into() }
    }

    fn offer(&mut self) -> Option<u16> {
        let (header, table) = self.places[self.sector as usize % self.places.len()];
        self.guest.write(header, &blk_header(0, self.sector));
        let buffers = [
            ModelBuffer { addr: header, len: 16, writable: false },
            ModelBuffer { addr: self.data, len: 512, writable: true },
            ModelBuffer { addr: header + 16, len: 1, writable: true },
        ];
        let direct = self.sector.is_multiple_of(2) && self.places.len() >= 3;
        let head = if direct { self.guest.chain(&buffers) } else { self.guest.chain_indirect(table, &buffers) }?;
        self.guest.offer(head);
        self.sector += 1;
        self.passed += if direct && is_packed(&self.guest) { 3 } else { 1 };
        Some(head)
    }

    /// Position of the ring at the end, by counting.
    fn base(&self) -> RingBase {
        if !is_packed(&self.guest) {
            return RingBase::from_bits(u32::from(self.passed as u16));
        }
        let size = self.places.len() as u64;
        let word = (self.passed % size) as u32 | u32::from((self.passed / size).is_multiple_of(2)) << 15;
        RingBase::from_bits(word | word << 16)
    }
}

fn is_packed(guest: &ModelGuest) -> bool {
    guest.features().contains(Features::RING_PACKED)
}

#[test]
fn chains_go_round_whatever_the_size_and_wherever_the_ring_stands() {
    for features in kinds() {
        let packed = features.contains(Features::RING_PACKED);
        for size in if packed { &[1, 2, 3, 5, 100, 32767, 32768][..] } else { &[1, 2, 4, 128, 32768] } {
            for start in [0, 65535, 65533, 32767] {
                go_round(features, *size, start);
            }
        }
    }
}

fn go_round(features: Features, size: u16, start: u16) {
    let mut reader = Reader::new(features, size, start);
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
        for outcome in device.turn().unwrap() {
            let Outcome::Io { op: Op::Read, sector, sectors: 1, .. } = outcome else { panic!("{outcome:?}") };
            assert_eq!(sector, expected, "{features:?}, size {size}, start {start}");
            expected += 1;
        }
        assert_eq!(expected, reader.sector);
        for head in heads {
            assert_eq!(reader.guest.poll(), Some((u32::from(head), 513)), "{features:?}, size {size}, start {start}");
        }
        assert_eq!(reader.guest.poll(), None);
        assert_eq!(device.ring.in_flight(), 0);
    }
    assert_eq!(device.ring.base(), reader.base(), "{features:?}, size {size}, start {start}");
}

#[test]
fn chains_come_back_in_any_order_and_places_are_used_again() {
    for (features, size) in [(Features::empty(), 8), (Features::RING_PACKED, 8), (Features::RING_PACKED, 7)] {
        let mut reader = Reader::new(features | Features::EVENT_IDX, size, 65530);
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
                let id = head.id();
                device.ring.complete(head, 1);
                assert_eq!(reader.guest.poll(), None, "not yet published");
                let _ = device.ring.publish();
                assert_eq!(reader.guest.poll(), Some((u32::from(id), 1)));
            }
        }
    }
}

#[test]
fn chains_come_back_in_order_if_that_was_agreed_on() {
    for (features, size) in [(Features::empty(), 8), (Features::RING_PACKED, 8), (Features::RING_PACKED, 7)] {
        let mut reader = Reader::new(features | Features::IN_ORDER, size, 65530);
        let mut device = Device::new(&reader.guest, true);
        let (mut out, mut fetched, mut lengths) = (Vec::new(), VecDeque::new(), HashMap::new());
        let mut told = 0;
        for round in 0..2000_usize {
            while reader.offer().is_some() {}
            reader.guest.publish();
            while let Some(head) = device.ring.fetch(&device.memory, &mut device.chain).unwrap() {
                fetched.push_back(head.id());
                out.push(head);
            }
            for _ in 0..round % (out.len() + 1) {
                let head = out.swap_remove((round * 7) % out.len());
                // Some fail: then the written length is unknown, and no later one may cover them.
                let written = if (round + out.len()).is_multiple_of(5) { 0 } else { 513 };
                lengths.insert(head.id(), written);
                device.ring.complete(head, written);
            }
            let _ = device.ring.publish();
            while let Some(written) = fetched.front().and_then(|id| lengths.remove(id)) {
                assert_eq!(reader.guest.poll(), Some((u32::from(fetched.pop_front().unwrap()), written)));
                told += 1;
            }
            assert_eq!(reader.guest.poll(), None, "one before it is not done");
        }
        assert!(told > 2000, "only {told} came back");
    }
}

#[test]
fn a_batch_in_order_is_one_used_element() {
    for features in [Features::empty(), Features::RING_PACKED] {
        let mut reader = Reader::new(features | Features::IN_ORDER, 16, 0);
        let mut device = Device::new(&reader.guest, true);
        let heads: Vec<_> = (0..4).map(|_| reader.offer().unwrap()).collect();
        reader.guest.publish();
        let packed = is_packed(&reader.guest);
        let ring = reader.guest.addrs()[if packed { 0 } else { 2 }];
        let before = reader.guest.read(ring, 256);
        device.turn().unwrap();
        let after = reader.guest.read(ring, 256);
        let changed: Vec<_> = (0..256).filter(|at| before[*at] != after[*at]).collect();
        // The index of a split ring, and the first element; or the second half of the first descriptor.
        let allowed = if packed { 8..16 } else { 2..12 };
        assert!(changed.iter().all(|at| allowed.contains(at)), "{changed:?}");
        for head in heads {
            assert_eq!(reader.guest.poll(), Some((u32::from(head), 513)));
        }
    }
}

#[test]
fn a_ring_goes_on_where_an_earlier_device_left_it() {
    for features in kinds() {
        let mut reader = Reader::new(features, 8, 3);
        let mut device = Device::new(&reader.guest, true);
        for _ in 0..3 {
            reader.offer();
        }
        reader.guest.publish();
        device.step().unwrap();
        let _ = device.ring.publish();
        assert_eq!(reader.guest.poll().map(|used| used.1), Some(513));
        let base = device.ring.base();
        device.ring = reader.guest.device_at(true, RingBase::from_bits(base.bits()));
        assert_eq!(device.ring.base(), base);
        assert_eq!(device.turn().unwrap().len(), 2);
        assert!(reader.guest.poll().is_some() && reader.guest.poll().is_some());
        assert_eq!(device.ring.base(), reader.base());
    }
}

#[test]
fn used_elements_of_a_split_ring_go_on_where_the_driver_looks_for_them() {
    // After a crash the base may be anything.
    let mut reader = Reader::new(Features::EVENT_IDX, 8, 3);
    let mut device = Device::new(&reader.guest, true);
    reader.offer();
    reader.guest.publish();
    device.turn().unwrap();
    assert!(reader.guest.poll().is_some());
    reader.offer();
    reader.offer();
    reader.guest.publish();
    device.ring = reader.guest.device_at(true, RingBase::from_bits(5));
    assert_eq!(device.ring.in_flight(), 0);
    assert_eq!(device.turn().unwrap().len(), 1);
    assert!(reader.guest.poll().is_some());
}

#[test]
fn the_first_publish_calls_since_the_last_device_may_not_have() {
    for features in kinds() {
        let mut reader = Reader::new(features, 8, 0);
        reader.guest.disable_calls();
        if features & (Features::EVENT_IDX | Features::RING_PACKED) == Features::EVENT_IDX {
            // An event that was passed long ago.
            reader.guest.write(reader.guest.addrs()[1] + 4 + 16, &1000_u16.to_le_bytes());
        }
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
    for features in kinds() {
        let mut reader = Reader::new(features, 16, 0);
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
}

#[test]
#[should_panic(expected = "is not out of this ring")]
fn a_head_of_another_ring_is_not_taken() {
    give_to_another(Features::empty());
}

#[test]
#[should_panic(expected = "is not out of this ring")]
fn a_head_of_another_packed_ring_is_not_taken() {
    give_to_another(Features::RING_PACKED);
}

fn give_to_another(features: Features) {
    let mut reader = Reader::new(features, 4, 0);
    let mut device = Device::new(&reader.guest, true);
    reader.offer();
    reader.guest.publish();
    let head = device.ring.fetch(&device.memory, &mut device.chain).unwrap().unwrap();
    Device::new(&reader.guest, true).ring.complete(head, 0);
}

#[test]
fn rings_of_no_possible_shape_are_refused() {
    let guest = ModelGuest::new(8, 0x1000, true);
    let new = |features, size, base| {
        DeviceRing::new(guest.layout().clone(), size, features, RingBase::from_bits(base)).map(|_| ())
    };
    for size in [0, 3, 6, 100, 32769, 65535] {
        assert_eq!(new(Features::empty(), size, 0), Err(RingSetupError::Size(size)));
    }
    for size in [0, 32769, 65535] {
        assert_eq!(new(Features::RING_PACKED, size, 0), Err(RingSetupError::PackedSize(size)));
    }
    for base in [3, 0x8003, 3 << 16, 0x8003 << 16, 0x7fff, u32::MAX] {
        assert_eq!(new(Features::RING_PACKED, 3, base), Err(RingSetupError::Base { base, size: 3 }));
    }
    assert_eq!(new(Features::RING_PACKED, 3, 0x8002_0002), Ok(()));
    let at = |part: usize, addr: u64| {
        let mut addrs = [USER_BASE, USER_BASE + 0x1000, USER_BASE + 0x2000];
        addrs[part] = addr;
        RingLayout::locate(guest.memory(), Features::empty(), 8, addrs)
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
    let guest = ModelGuest::new(4, 0x1000, true);
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

#[test]
fn a_table_of_three_rows_is_read_as_the_same_rows_in_the_ring() {
    use blkyard_virtio::driver_model::{Descriptor, GUEST_BASE};
    let mut guest = ModelGuest::new(8, 0x4000, true);
    let (data, table) = (guest.alloc(4096, 4096), guest.alloc(48, 16));
    let row = |addr, len, flags, next| Descriptor { addr, len, flags, next };
    let read = [row(data, 16, 1, 1), row(data + 512, 1024, 3, 2), row(data + 16, 1, 2, 0)];
    let mut chains = vec![read, [read[0], row(data + 512, 1024, 1, 2), read[2]]];
    for at in 0..3 {
        let mut with = |change: &dyn Fn(&mut Descriptor)| {
            let mut rows = read;
            change(&mut rows[at]);
            chains.push(rows);
        };
        with(&|row| row.len = 0);
        with(&|row| row.addr = GUEST_BASE - 8);
        with(&|row| row.len = u32::MAX);
        with(&|row| row.flags ^= Descriptor::WRITE);
        with(&|row| row.flags ^= Descriptor::NEXT);
        with(&|row| row.flags |= 0x100);
        with(&|row| row.next ^= 3);
    }
    let seen = |guest: &mut ModelGuest, device: &mut DeviceRing, head| {
        let mut chain = Chain::new(8);
        guest.offer(head);
        guest.publish();
        let fetched = device.fetch(guest.memory(), &mut chain).unwrap().unwrap();
        device.complete(fetched, 0);
        let _ = device.publish();
        guest.poll().unwrap();
        let lists = || {
            [(chain.readable().to_vec(), chain.readable_bytes()), (chain.writable().to_vec(), chain.writable_bytes())]
        };
        // A circle is found sooner in a shorter table, and so another fault may be the first.
        (chain.fault().is_none().then(lists), chain.status_at())
    };
    for rows in chains {
        let mut guest = ModelGuest::new(8, 0x4000, true);
        assert_eq!((guest.alloc(4096, 4096), guest.alloc(48, 16)), (data, table));
        let ring = guest.addrs()[0];
        for (index, row) in (0..).zip(rows) {
            guest.set_descriptor(ring, index, row);
            guest.set_descriptor(table, index, row);
        }
        guest.set_descriptor(ring, 7, row(table, 48, Descriptor::INDIRECT, 0));
        // The same behind a descriptor that lies in the ring in both.
        for (place, next) in [(4, 0), (5, 7)] {
            guest.set_descriptor(ring, place, row(data + 2048, 8, Descriptor::NEXT, next));
        }
        let mut device = guest.device(true);
        for (in_ring, in_table) in [(0, 7), (4, 5)] {
            let seen = [in_ring, in_table].map(|head| seen(&mut guest, &mut device, head));
            assert_eq!(seen[0], seen[1], "{rows:?}");
        }
    }
}
