//! A driver's ring and a device's ring over one memory, both run by the test.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod disk;

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Span, View};
use blkyard_virtio::driver::{Buffer, DriverRing, Tables};
use blkyard_virtio::{
    Chain, ChainHead, DeviceRing, Features, GuestMemory, GuestRange, RingBase, RingLayout, packed_ring_bytes,
    ring_bytes,
};

/// Where the device finds the memory; for us it begins at zero.
pub const BASE: u64 = 0x10_0000;
/// Rows of each table.
pub const ROWS: u16 = 8;
/// Bytes of each table, with a gap.
const STRIDE: usize = 160;
const HEAP_BYTES: usize = 0x1_0000;

/// Every format there is: packed or split, with or without tables and event indexes.
pub fn formats() -> impl Iterator<Item = Features> {
    let features = [Features::RING_PACKED, Features::INDIRECT_DESC, Features::EVENT_IDX];
    (0..8).map(move |bits| {
        let chosen = features.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1);
        chosen.fold(Features::VERSION_1, |all, (_, feature)| all | *feature)
    })
}

pub struct Rig {
    pub driver: DriverRing,
    pub device: DeviceRing,
    pub memory: Arc<GuestMemory>,
    pub chain: Chain,
    /// Offsets of the ring's parts.
    pub parts: [usize; 3],
    /// Where buffers may be.
    pub heap: usize,
    pub region: Arc<Region>,
}

impl Rig {
    /// An empty ring that both sides begin at `start`: an index, or for a packed ring a position and wrap counter.
    pub fn new(features: Features, size: u16, start: u16) -> Rig {
        let packed = features.contains(Features::RING_PACKED);
        let mut at = 0;
        let bytes = if packed { packed_ring_bytes(size) } else { ring_bytes(size) };
        let parts = bytes.map(|(bytes, _)| {
            let part = at;
            at = (at + bytes).next_multiple_of(64);
            part
        });
        let tables_at = at;
        let heap = tables_at + usize::from(size) * STRIDE;
        let region = Region::anonymous(heap + HEAP_BYTES).unwrap();
        let view = |at: usize, len| View::new(Arc::clone(&region), at as u64, len, 16).unwrap();
        let layout = || RingLayout {
            desc: view(parts[0], bytes[0].0),
            avail: view(parts[1], bytes[1].0),
            used: view(parts[2], bytes[2].0),
        };
        let tables = features
            .contains(Features::INDIRECT_DESC)
            .then(|| Tables::new(view(tables_at, heap - tables_at), BASE + tables_at as u64, STRIDE, ROWS));
        let base = RingBase::from_bits(u32::from(start) | if packed { u32::from(start) << 16 } else { 0 });
        let range = GuestRange { guest_addr: BASE, user_addr: BASE, len: region.len() as u64, region: 0, offset: 0 };
        let table = Arc::new(RegionTable::new(vec![Arc::clone(&region)]));
        Rig {
            driver: DriverRing::new(layout(), size, features, tables, base).unwrap(),
            device: DeviceRing::new(layout(), size, features, base).unwrap(),
            memory: Arc::new(GuestMemory::new(table, vec![range]).unwrap()),
            chain: Chain::new(64),
            parts,
            heap,
            region,
        }
    }

    /// A ring that begins where a new one does.
    pub fn fresh(features: Features, size: u16) -> Rig {
        Rig::new(features, size, if features.contains(Features::RING_PACKED) { 1 << 15 } else { 0 })
    }

    /// The address of a byte of the heap.
    pub fn at(&self, offset: usize) -> u64 {
        BASE + (self.heap + offset) as u64
    }

    /// Buffers of these lengths, one after the other from `offset` of the heap on.
    pub fn buffers(&self, offset: usize, readable: &[u32], writable: &[u32]) -> Vec<Buffer> {
        let mut addr = self.at(offset);
        let lens = readable.iter().map(|len| (*len, false)).chain(writable.iter().map(|len| (*len, true)));
        lens.map(|(len, writable)| {
            let buffer = Buffer { addr, len, writable };
            addr += u64::from(len);
            buffer
        })
        .collect()
    }

    /// The device fetches one chain; returns its buffers.
    pub fn fetch(&mut self) -> Option<(ChainHead, Vec<Buffer>)> {
        let head = self.device.fetch(&self.memory, &mut self.chain).unwrap()?;
        assert_eq!(self.chain.fault(), None);
        let list = |segments: &[blkyard_mem::Segment], writable| -> Vec<Buffer> {
            segments.iter().map(|s| Buffer { addr: BASE + s.offset, len: s.len, writable }).collect()
        };
        let mut seen = list(self.chain.readable(), false);
        seen.extend(list(self.chain.writable(), true));
        Some((head, seen))
    }

    /// The bytes of a part of the ring.
    pub fn part(&self, part: usize, at: usize, len: usize) -> Span<'_> {
        self.region.span((self.parts[part] + at) as u64, len).unwrap()
    }

    /// Write of a hostile device.
    pub fn put_u16(&self, part: usize, at: usize, value: u16) {
        self.part(part, at, 2).copy_from_slice(&value.to_le_bytes());
    }

    pub fn put_u32(&self, part: usize, at: usize, value: u32) {
        self.part(part, at, 4).copy_from_slice(&value.to_le_bytes());
    }
}
