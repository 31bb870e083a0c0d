//! A guest in a box: memory, one split ring, and the driver's side of it. For tests and benchmarks.
//!
//! Small and plain rather than fast, and as honest as a test wants it: chains are built properly from free
//! descriptors, or any bytes are written anywhere. Owned by one thread, which may be another one than the device's.
//! It trusts the device where a real driver must not.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use blkyard_mem::{Region, RegionTable};

use crate::split::needs_event;
use crate::{GuestMemory, GuestRange, RingLayout, SplitRing, ring_bytes};

/// Where the guest's memory begins; nothing is mapped below.
pub const GUEST_BASE: u64 = 0x10_0000;
/// Where the front-end's process would have it.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// A buffer, or a descriptor to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// First byte, guest physical.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A descriptor as it stands in a table. [2.7.5]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// First byte, guest physical.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// [`Descriptor::NEXT`] and the others.
    pub flags: u16,
    /// Place of the next descriptor.
    pub next: u16,
}

impl Descriptor {
    /// The chain goes on.
    pub const NEXT: u16 = 1;
    /// The device may write the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// As in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A guest with one virtqueue.
#[derive(Debug)]
pub struct Guest {
    memory: Arc<GuestMemory>,
    layout: RingLayout,
    addrs: [u64; 3],
    size: u16,
    event_idx: bool,
    avail: u16,
    avail_published: u16,
    used_seen: u16,
    free: Vec<u16>,
    /// Descriptors of the chain that begins at each place, by the driver's own account.
    chains: Vec<Vec<u16>>,
    heap: u64,
}

impl Guest {
    /// A guest with an empty ring of `size` entries and `heap_bytes` of memory for buffers.
    ///
    /// # Panics
    /// If the size is not a power of two, or there is no memory.
    pub fn new(size: u16, heap_bytes: usize, event_idx: bool) -> Guest {
        let mut at = 0;
        let places = ring_bytes(size).map(|(bytes, _)| {
            let place = at as u64;
            at = (at + bytes).next_multiple_of(4096);
            place
        });
        let region = Region::anonymous(at + heap_bytes).expect("there is memory for a test");
        let range =
            GuestRange { guest_addr: GUEST_BASE, user_addr: USER_BASE, len: region.len() as u64, region: 0, offset: 0 };
        let table = Arc::new(RegionTable::new(vec![region]));
        let memory = Arc::new(GuestMemory::new(table, vec![range]).expect("one range overlaps nothing"));
        let layout =
            RingLayout::locate(&memory, size, places.map(|place| USER_BASE + place)).expect("it was made to fit");
        Guest {
            memory,
            layout,
            addrs: places.map(|place| GUEST_BASE + place),
            size,
            event_idx,
            avail: 0,
            avail_published: 0,
            used_seen: 0,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            heap: GUEST_BASE + at as u64,
        }
    }

    /// Lets both indexes begin at `index`, as if that many chains had gone round already.
    pub fn start_at(&mut self, index: u16) {
        (self.avail, self.avail_published, self.used_seen) = (index, index, index);
        self.layout.avail.store_u16(2, index, Relaxed);
        self.layout.used.store_u16(2, index, Relaxed);
    }

    /// The device's side of the ring, from where the guest stands.
    pub fn device(&self, indirect: bool) -> SplitRing {
        let ring = SplitRing::new(self.layout.clone(), self.size, self.event_idx, indirect, self.avail_published);
        ring.expect("the size was checked")
    }

    /// The memory, as the device gets it.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The parts of the ring, as the device gets them.
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Guest addresses of descriptor table, available ring and used ring.
    pub fn addrs(&self) -> [u64; 3] {
        self.addrs
    }

    /// Takes `len` bytes for a buffer; they are never given back.
    ///
    /// # Panics
    /// If there are none left.
    pub fn alloc(&mut self, len: u32, align: u64) -> u64 {
        let addr = self.heap.next_multiple_of(align);
        self.heap = addr + u64::from(len);
        let end = self.memory.ranges()[0].len + GUEST_BASE;
        assert!(self.heap <= end, "the guest's heap is used up");
        addr
    }

    /// Writes bytes anywhere in the guest's memory.
    ///
    /// # Panics
    /// If there is none.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let Some(region) = self.memory.table().region(0) else { unreachable!() };
        let span = addr.checked_sub(GUEST_BASE).and_then(|offset| region.span(offset, bytes.len()));
        span.expect("the address is in guest memory").copy_from_slice(bytes);
    }

    /// Reads bytes anywhere in the guest's memory.
    ///
    /// # Panics
    /// If there is none.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(self.memory.read(addr, &mut bytes), "the address is in guest memory");
        bytes
    }

    /// Writes a descriptor into any table.
    pub fn set_descriptor(&self, table: u64, index: u16, descriptor: Descriptor) {
        self.write(table + u64::from(index) * 16, &descriptor.to_bytes());
    }

    /// Builds a chain of free descriptors; nothing if there are not enough.
    pub fn chain(&mut self, buffers: &[Buffer]) -> Option<u16> {
        let rest = self.free.len().checked_sub(buffers.len())?;
        let mut places = self.free.split_off(rest);
        places.reverse();
        for (at, buffer) in buffers.iter().enumerate() {
            self.set_descriptor(self.addrs[0], places[at], link(*buffer, places.get(at + 1).copied()));
        }
        let head = *places.first()?;
        self.chains[usize::from(head)] = places;
        Some(head)
    }

    /// Builds a chain in a table of its own, and one descriptor that points to it.
    pub fn chain_indirect(&mut self, table: u64, buffers: &[Buffer]) -> Option<u16> {
        let head = self.free.pop()?;
        for (at, buffer) in buffers.iter().enumerate() {
            let next = (at + 1 < buffers.len()).then_some(at as u16 + 1);
            self.set_descriptor(table, at as u16, link(*buffer, next));
        }
        let len = buffers.len() as u32 * 16;
        let descriptor = Descriptor { addr: table, len, flags: Descriptor::INDIRECT, next: 0 };
        self.set_descriptor(self.addrs[0], head, descriptor);
        self.chains[usize::from(head)] = vec![head];
        Some(head)
    }

    /// Puts a head, any number, into the available ring. The device sees it with the next [`Guest::publish`].
    pub fn offer(&mut self, head: u16) {
        let place = usize::from(self.avail & (self.size - 1));
        self.layout.avail.store_u16(4 + 2 * place, head, Relaxed);
        self.avail = self.avail.wrapping_add(1);
    }

    /// Shows the device what was offered. Says whether it wants to be notified.
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.avail_published, self.avail);
        // The other side of `SplitRing::enable_notify`.
        self.layout.avail.store_u16(2, self.avail, SeqCst);
        if self.event_idx {
            let event = self.layout.used.load_u16(4 + 8 * usize::from(self.size), SeqCst);
            needs_event(event, self.avail, old)
        } else {
            self.layout.used.load_u16(0, SeqCst) & 1 == 0
        }
    }

    /// Takes the next used element: head and length. Its descriptors are free again.
    pub fn poll(&mut self) -> Option<(u32, u32)> {
        if self.layout.used.load_u16(2, Acquire) == self.used_seen {
            return None;
        }
        let place = 4 + 8 * usize::from(self.used_seen & (self.size - 1));
        self.used_seen = self.used_seen.wrapping_add(1);
        let (id, len) = (self.layout.used.load_u32(place, Relaxed), self.layout.used.load_u32(place + 4, Relaxed));
        if let Some(chain) = self.chains.get_mut(id as usize) {
            self.free.append(chain);
        }
        Some((id, len))
    }

    /// Asks for a call with the next used element. Says whether there is one already.
    pub fn enable_calls(&mut self) -> bool {
        // The other side of `SplitRing::publish`.
        if self.event_idx {
            self.layout.avail.store_u16(4 + 2 * usize::from(self.size), self.used_seen, SeqCst);
        } else {
            self.layout.avail.store_u16(0, 0, SeqCst);
        }
        self.layout.used.load_u16(2, SeqCst) != self.used_seen
    }

    /// Asks for no calls; a hint, and with event indexes not even that.
    pub fn disable_calls(&mut self) {
        if !self.event_idx {
            self.layout.avail.store_u16(0, 1, Release);
        }
    }
}

/// The descriptor of a buffer.
fn link(buffer: Buffer, next: Option<u16>) -> Descriptor {
    let write = if buffer.writable { Descriptor::WRITE } else { 0 };
    let more = if next.is_some() { Descriptor::NEXT } else { 0 };
    Descriptor { addr: buffer.addr, len: buffer.len, flags: write | more, next: next.unwrap_or(0) }
}

/// The header of a virtio-blk request. [5.2.6]
pub fn blk_header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}
