//! A model of a guest: memory, one ring of either format, and the driver's side of it. For tests and benchmarks.
//!
//! Simple rather than fast. A test builds valid chains from free descriptors, or writes any bytes anywhere. Owned by
//! one thread, which may differ from the device's. It trusts the device where a real driver must not. It shares no
//! arithmetic with the device's side.

mod packed;
mod split;

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable};

use self::packed::PackedDriverModel;
use self::split::SplitDriverModel;
use crate::{DeviceRing, Features, GuestMemory, GuestRange, RingBase, RingLayout, packed_ring_bytes, ring_bytes};

/// Start of the guest's memory; no address below is mapped.
pub const GUEST_BASE: u64 = 0x10_0000;
/// Where the front-end's process would have it.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// A buffer, or a descriptor to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelBuffer {
    /// First byte, guest physical.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A descriptor as in a table. [2.7.5]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// First byte, guest physical.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// [`Descriptor::NEXT`] and the others.
    pub flags: u16,
    /// Index of the next descriptor; in a packed ring the id.
    pub next: u16,
}

impl Descriptor {
    /// The chain continues.
    pub const NEXT: u16 = 1;
    /// The device may write the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// As in the memory of a split ring.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }

    /// In the layout of a packed ring, with id and flags exchanged. [2.8.13]
    pub fn to_packed_bytes(self) -> [u8; 16] {
        Descriptor { flags: self.next, next: self.flags, ..self }.to_bytes()
    }
}

/// A guest with one virtqueue.
#[derive(Debug)]
pub struct ModelGuest {
    memory: Arc<GuestMemory>,
    layout: RingLayout,
    addrs: [u64; 3],
    size: u16,
    features: Features,
    driver: RingDriver,
    heap: u64,
}

/// The driver's side of a ring, wherever its memory is.
#[derive(Debug)]
pub struct RingDriver {
    features: Features,
    format: ModelFormat,
    /// With `IN_ORDER`: chains offered and not polled.
    offered: VecDeque<u16>,
    /// The last chain of a batch that is being polled, and the bytes written to it.
    batch: Option<(u32, u32)>,
}

#[derive(Debug)]
enum ModelFormat {
    Split(SplitDriverModel),
    Packed(PackedDriverModel),
}

/// Calls the same method of whichever driver it is.
macro_rules! driver {
    ($ring:ident, $driver:ident => $call:expr) => {
        match &mut $ring.format {
            ModelFormat::Split($driver) => $call,
            ModelFormat::Packed($driver) => $call,
        }
    };
}

impl RingDriver {
    /// An empty ring in these parts, all zero, of the kind the features say.
    pub fn new(layout: RingLayout, size: u16, features: Features) -> RingDriver {
        let event_idx = features.contains(Features::EVENT_IDX);
        let format = if features.contains(Features::RING_PACKED) {
            ModelFormat::Packed(PackedDriverModel::new(layout, size, event_idx))
        } else {
            ModelFormat::Split(SplitDriverModel::new(layout, size, event_idx))
        };
        RingDriver { features, format, offered: VecDeque::new(), batch: None }
    }

    /// See [`ModelGuest::start_at`].
    pub fn start_at(&mut self, index: u16) {
        driver!(self, driver => driver.start_at(index));
    }

    /// Where a device begins that has seen all there is.
    pub fn base(&self) -> RingBase {
        match &self.format {
            ModelFormat::Split(driver) => driver.base(),
            ModelFormat::Packed(driver) => driver.base(),
        }
    }

    /// Builds a chain of free descriptors; `None` without enough of them.
    pub fn chain(&mut self, buffers: &[ModelBuffer]) -> Option<u16> {
        driver!(self, driver => driver.chain(buffers))
    }

    /// One descriptor for a chain in an indirect table, in the format of [`RingDriver::table`].
    pub fn chain_indirect(&mut self, table: u64, buffers: &[ModelBuffer]) -> Option<u16> {
        driver!(self, driver => driver.chain_indirect(table, buffers))
    }

    /// The bytes of an indirect table.
    pub fn table(&self, buffers: &[ModelBuffer]) -> Vec<u8> {
        let is_packed = matches!(self.format, ModelFormat::Packed(_));
        let row = buffers.iter().enumerate().flat_map(|(at, buffer)| {
            // In a packed ring's table rows are consecutive.
            let next = (at + 1 < buffers.len() && !is_packed).then_some(at as u16 + 1);
            let descriptor = link(*buffer, next);
            if is_packed { descriptor.to_packed_bytes() } else { descriptor.to_bytes() }
        });
        row.collect()
    }

    /// Offers a chain. The device sees it with the next [`RingDriver::publish`].
    pub fn offer(&mut self, head: u16) {
        driver!(self, driver => driver.offer(head));
        if self.features.contains(Features::IN_ORDER) {
            self.offered.push_back(head);
        }
    }

    /// Publishes offered chains. Returns whether the device wants a notification.
    pub fn publish(&mut self) -> bool {
        driver!(self, driver => driver.publish())
    }

    /// Takes the next used chain: head and length. Its descriptors are free again.
    ///
    /// # Panics
    /// If an in-order device returns a chain that was not offered.
    pub fn poll(&mut self) -> Option<(u32, u32)> {
        let told = self.batch.take().or_else(|| driver!(self, driver => driver.look()));
        let (mut id, mut len) = told?;
        if self.features.contains(Features::IN_ORDER) {
            let first = self.offered.pop_front().expect("what comes back was offered");
            if u32::from(first) != id {
                // All before the last of a batch were filled.
                self.batch = told;
                (id, len) = (first.into(), driver!(self, driver => driver.room(first)));
            }
        }
        driver!(self, driver => driver.pass(id));
        Some((id, len))
    }

    /// Asks for a call with the next chain that comes back. Says whether there is one already.
    pub fn enable_calls(&mut self) -> bool {
        driver!(self, driver => driver.enable_calls()) || self.batch.is_some()
    }

    /// Asks for no calls; a hint, and with event indexes of a split ring not even that.
    pub fn disable_calls(&mut self) {
        driver!(self, driver => driver.disable_calls());
    }
}

impl ModelGuest {
    /// A guest with an empty split ring of `size` entries and `heap_bytes` of memory for buffers.
    ///
    /// # Panics
    /// If the size is not a power of two, or there is no memory.
    pub fn new(size: u16, heap_bytes: usize, event_idx: bool) -> ModelGuest {
        let features = if event_idx { Features::EVENT_IDX } else { Features::empty() };
        ModelGuest::with(features, size, heap_bytes)
    }

    /// A guest with an empty ring of the kind these features say.
    ///
    /// # Panics
    /// If no such ring has this size, or there is no memory.
    pub fn with(features: Features, size: u16, heap_bytes: usize) -> ModelGuest {
        let is_packed = features.contains(Features::RING_PACKED);
        let bytes = if is_packed { packed_ring_bytes(size) } else { ring_bytes(size) };
        let mut at = 0;
        let places = bytes.map(|(bytes, _)| {
            let place = at as u64;
            at = (at + bytes).next_multiple_of(4096);
            place
        });
        let region = Region::anonymous(at + heap_bytes).expect("there is memory for a test");
        let range =
            GuestRange { guest_addr: GUEST_BASE, user_addr: USER_BASE, len: region.len() as u64, region: 0, offset: 0 };
        let table = Arc::new(RegionTable::new(vec![region]));
        let memory = Arc::new(GuestMemory::new(table, vec![range]).expect("one range overlaps nothing"));
        let user_addrs = places.map(|place| USER_BASE + place);
        let layout = RingLayout::locate(&memory, features, size, user_addrs).expect("it was made to fit");
        let driver = RingDriver::new(layout.clone(), size, features);
        ModelGuest {
            memory,
            layout,
            addrs: places.map(|place| GUEST_BASE + place),
            size,
            features,
            driver,
            heap: GUEST_BASE + at as u64,
        }
    }

    /// Starts the ring as after so many chains, or slots of a packed ring.
    pub fn start_at(&mut self, index: u16) {
        self.driver.start_at(index);
    }

    /// The device's side of the ring, at the guest's current position.
    pub fn device(&self, indirect: bool) -> DeviceRing {
        self.device_at(indirect, self.driver.base())
    }

    /// The device's side of the ring, from anywhere.
    pub fn device_at(&self, indirect: bool, base: RingBase) -> DeviceRing {
        let mut features = self.features;
        features.set(Features::INDIRECT_DESC, indirect);
        DeviceRing::new(self.layout.clone(), self.size, features, base).expect("the size was checked")
    }

    /// Negotiated ring features.
    pub fn features(&self) -> Features {
        self.features
    }

    /// The memory, as the device gets it.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The parts of the ring, as the device gets them.
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Guest addresses of descriptors, available ring or driver's area, used ring or device's area.
    pub fn addrs(&self) -> [u64; 3] {
        self.addrs
    }

    /// Allocates `len` bytes for a buffer; they are never freed.
    ///
    /// # Panics
    /// If none are left.
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
    /// Outside of it.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let Some(region) = self.memory.table().region(0) else { unreachable!() };
        let span = addr.checked_sub(GUEST_BASE).and_then(|offset| region.span(offset, bytes.len()));
        span.expect("the address is in guest memory").copy_from_slice(bytes);
    }

    /// Reads bytes anywhere in the guest's memory.
    ///
    /// # Panics
    /// Outside of it.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(self.memory.read(addr, &mut bytes), "the address is in guest memory");
        bytes
    }

    /// Writes a descriptor into any table, in the manner of this ring.
    pub fn set_descriptor(&self, table: u64, index: u16, descriptor: Descriptor) {
        let is_packed = self.features.contains(Features::RING_PACKED);
        let bytes = if is_packed { descriptor.to_packed_bytes() } else { descriptor.to_bytes() };
        self.write(table + u64::from(index) * 16, &bytes);
    }

    /// See [`RingDriver::chain`].
    pub fn chain(&mut self, buffers: &[ModelBuffer]) -> Option<u16> {
        self.driver.chain(buffers)
    }

    /// Builds a chain in an indirect table, and one descriptor that points to it.
    pub fn chain_indirect(&mut self, table: u64, buffers: &[ModelBuffer]) -> Option<u16> {
        self.write(table, &self.driver.table(buffers));
        self.driver.chain_indirect(table, buffers)
    }

    /// See [`RingDriver::offer`]. In a split ring the head may be any number.
    pub fn offer(&mut self, head: u16) {
        self.driver.offer(head);
    }

    /// See [`RingDriver::publish`].
    pub fn publish(&mut self) -> bool {
        self.driver.publish()
    }

    /// See [`RingDriver::poll`].
    pub fn poll(&mut self) -> Option<(u32, u32)> {
        self.driver.poll()
    }

    /// See [`RingDriver::enable_calls`].
    pub fn enable_calls(&mut self) -> bool {
        self.driver.enable_calls()
    }

    /// See [`RingDriver::disable_calls`].
    pub fn disable_calls(&mut self) {
        self.driver.disable_calls();
    }
}

/// The descriptor of a buffer.
fn link(buffer: ModelBuffer, next: Option<u16>) -> Descriptor {
    let write = if buffer.writable { Descriptor::WRITE } else { 0 };
    let more = if next.is_some() { Descriptor::NEXT } else { 0 };
    Descriptor { addr: buffer.addr, len: buffer.len, flags: write | more, next: next.unwrap_or(0) }
}

/// Bytes the device may write.
fn room(buffers: &[ModelBuffer]) -> u32 {
    let writable = buffers.iter().filter(|buffer| buffer.writable);
    u32::try_from(writable.map(|buffer| u64::from(buffer.len)).sum::<u64>()).unwrap_or(u32::MAX)
}

/// The header of a virtio-blk request. [5.2.6]
pub fn blk_header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}
