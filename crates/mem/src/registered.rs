//! Registered buffers: memory that is used for I/O again and again, checked and described once.
//!
//! A [`RegisteredBuffer`] is an immutable description of a part of a region. Its [`BufferId`] stands in segments in the
//! place of the region's number, and so in bios: the segment names the same bytes, and says that a driver may use what
//! it prepared for this buffer instead of translating addresses. The id has a generation: one that outlived its buffer
//! names nothing.
//!
//! One registration serves any number of devices. Each DMA domain has one mapping of it, made when the first queue of
//! that domain is told of the buffer ([`RegisteredBuffer::mapping`]), and undone when its last queue drops it. No I/O
//! path comes here: a queue keeps what it needs by the id's slot, a small number.
//!
//! Registering pins nothing. Whether the pages behind a mapping are pinned, and whose memory may be, is decided where
//! the mapping is made (ADR 28, ADR 34).

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::{BufferMapping, DmaDomain, Region, Segment, Span};

/// Registered buffers of a process at one time, as a ring of Linux has at most.
pub const BUFFERS_MAX: usize = 1 << SLOT_BITS;

const SLOT_BITS: u32 = 14;
const GENERATION_BITS: u32 = 16;
/// Marks the number of a registered buffer among those of regions.
const REGISTERED: u32 = 1 << 31;
/// Marks a buffer that devices only read.
const READ_ONLY: u32 = 1 << 30;
const _: () = assert!(SLOT_BITS + GENERATION_BITS == 30, "slot, generation and two marks are a number");
/// Free slots kept before one is used again, so that it takes long until a generation recurs.
const FREE_SLOTS_MIN: usize = 64;

/// What devices may do with a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferAccess {
    /// Source of writes and destination of reads.
    #[default]
    ReadWrite,
    /// Source of writes; a read into it is refused.
    ReadOnly,
}

/// Name of a registered buffer (a cookie): slot, generation and access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(u32);

impl BufferId {
    fn new(slot: usize, generation: u16, access: BufferAccess) -> BufferId {
        let read_only = if access == BufferAccess::ReadOnly { READ_ONLY } else { 0 };
        BufferId(REGISTERED | read_only | u32::from(generation) << SLOT_BITS | slot as u32)
    }

    /// The id that a segment carries; `None` if it names a region by its number.
    #[inline]
    pub fn of(segment: Segment) -> Option<BufferId> {
        segment.is_registered().then_some(BufferId(segment.region))
    }

    /// The number that stands in [`Segment::region`].
    #[inline]
    pub fn number(self) -> u32 {
        self.0
    }

    /// Index of its slot, less than [`BUFFERS_MAX`]; small for the first buffers of a process.
    #[inline]
    pub fn slot(self) -> usize {
        (self.0 & (BUFFERS_MAX as u32 - 1)) as usize
    }

    /// What devices may do with the buffer.
    #[inline]
    pub fn access(self) -> BufferAccess {
        if self.0 & READ_ONLY == 0 { BufferAccess::ReadWrite } else { BufferAccess::ReadOnly }
    }
}

impl Segment {
    /// The bit of [`Segment::region`] that only read-only registered buffers have.
    pub const READ_ONLY_BIT: u32 = READ_ONLY;

    /// Whether it names a registered buffer instead of a region's number.
    #[inline]
    pub fn is_registered(self) -> bool {
        self.region & REGISTERED != 0
    }

    /// Whether it is in a registered buffer that devices only read.
    #[inline]
    pub fn is_read_only(self) -> bool {
        self.region & READ_ONLY != 0
    }
}

/// Why memory cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// Not a part of its region.
    #[error("registered buffer: {len} bytes at offset {offset} do not lie in a region of {region_len} bytes")]
    Extent {
        /// First byte, from the start of the region.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the region.
        region_len: u64,
    },
    /// All slots are in use.
    #[error("registered buffer: {BUFFERS_MAX} buffers are registered; unregister some, or register larger ones")]
    Full,
}

/// Slots of a process: which are free, and the generation of each.
#[derive(Debug)]
struct BufferSlots {
    generations: Vec<u16>,
    /// Those freed longest ago first.
    free: VecDeque<u16>,
}

static SLOTS: Mutex<BufferSlots> = Mutex::new(BufferSlots { generations: Vec::new(), free: VecDeque::new() });

fn slots() -> MutexGuard<'static, BufferSlots> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BufferSlots {
    /// A free slot, and its generation.
    fn take(&mut self) -> Option<(usize, u16)> {
        if self.free.len() <= FREE_SLOTS_MIN && self.generations.len() < BUFFERS_MAX {
            self.generations.push(0);
            return Some((self.generations.len() - 1, 0));
        }
        let slot = usize::from(self.free.pop_front()?);
        Some((slot, self.generations[slot]))
    }

    fn give_back(&mut self, slot: usize) {
        self.generations[slot] = self.generations[slot].wrapping_add(1);
        self.free.push_back(slot as u16);
    }
}

/// Data that is kept for registered buffers, by slot.
#[derive(Clone, Debug, Default)]
pub struct BufferMap<T> {
    entries: Vec<BufferEntry<T>>,
}

/// What is kept for the buffer of a slot.
#[derive(Clone, Debug)]
struct BufferEntry<T> {
    /// Number of its id; zero for none.
    id: u32,
    /// Its first byte, from the start of the region.
    start: u64,
    len: u64,
    value: T,
}

impl<T: Default> BufferMap<T> {
    /// Keeps something for a buffer.
    pub fn insert(&mut self, buffer: &RegisteredBuffer, value: T) {
        let slot = buffer.id().slot();
        if self.entries.len() <= slot {
            let empty = || BufferEntry { id: 0, start: 0, len: 0, value: T::default() };
            self.entries.resize_with(slot + 1, empty);
        }
        let (start, len) = (buffer.offset(), buffer.len());
        self.entries[slot] = BufferEntry { id: buffer.id().number(), start, len, value };
    }

    /// Removes what is kept for a buffer.
    pub fn remove(&mut self, id: BufferId) -> Option<T> {
        let entry = self.entries.get_mut(id.slot()).filter(|entry| entry.id == id.number())?;
        (entry.id, entry.len) = (0, 0);
        Some(std::mem::take(&mut entry.value))
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// What is kept for the buffer in which a segment lies, and where it begins there. `None` if the id is stale or
    /// unknown, or the segment is not in the buffer.
    #[inline]
    pub fn get(&self, segment: Segment) -> Option<(&T, u64)> {
        let slot = segment.region as usize & (BUFFERS_MAX - 1);
        let entry = self.entries.get(slot).filter(|entry| entry.id == segment.region)?;
        let last = entry.len.checked_sub(u64::from(segment.len))?;
        let into = segment.offset.wrapping_sub(entry.start);
        (into <= last).then_some((&entry.value, into))
    }

    /// All that is kept.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter(|entry| entry.id != 0).map(|entry| &entry.value)
    }
}

/// A part of a region, registered for I/O until the last holder drops this: the program, and the queues that were told
/// of it.
#[derive(Debug)]
pub struct RegisteredBuffer {
    id: BufferId,
    region: Arc<Region>,
    offset: u64,
    len: u64,
    /// One for each domain that uses it. The users hold them.
    mappings: Mutex<Vec<Weak<BufferMapping>>>,
}

impl RegisteredBuffer {
    /// Registers `len` bytes at `offset` of a region.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn new(
        region: &Arc<Region>,
        offset: u64,
        len: u64,
        access: BufferAccess,
    ) -> Result<Arc<RegisteredBuffer>, RegisterError> {
        let region_len = region.len() as u64;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(RegisterError::Extent { offset, len, region_len });
        }
        let (slot, generation) = slots().take().ok_or(RegisterError::Full)?;
        let id = BufferId::new(slot, generation, access);
        Ok(Arc::new(RegisteredBuffer { id, region: Arc::clone(region), offset, len, mappings: Mutex::default() }))
    }

    /// Its id.
    pub fn id(&self) -> BufferId {
        self.id
    }

    /// The region that it is a part of.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Its first byte, from the start of the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The segment of `len` bytes, `at` bytes behind the buffer's first one. It is not checked here: one beyond the
    /// buffer is refused like any other segment outside the memory of its queue.
    #[inline]
    pub fn segment(&self, at: u64, len: u32) -> Segment {
        Segment { region: self.id.number(), offset: self.offset.wrapping_add(at), len }
    }

    /// The bytes of a segment of the buffer. `None` if it names another, or is not in it.
    pub fn span(&self, segment: Segment) -> Option<Span<'_>> {
        let into = segment.offset.checked_sub(self.offset).filter(|_| segment.region == self.id.number())?;
        let left = self.len.checked_sub(into)?;
        if u64::from(segment.len) > left {
            return None;
        }
        self.region.span(segment.offset, segment.len as usize)
    }

    /// The mapping in this domain, made now if there is none. It lasts as long as any of its holders, which a device
    /// that is closed is not.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn mapping(&self, domain: &Arc<DmaDomain>) -> io::Result<Arc<BufferMapping>> {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        mappings.retain(|mapping| mapping.strong_count() > 0);
        let mut known = mappings.iter().filter_map(Weak::upgrade);
        if let Some(mapping) = known.find(|mapping| Arc::ptr_eq(mapping.domain(), domain)) {
            return Ok(mapping);
        }
        drop(known);
        let mapping = Arc::new(BufferMapping::new(domain, &self.region, self.offset, self.len)?);
        mappings.push(Arc::downgrade(&mapping));
        Ok(mapping)
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        slots().give_back(self.id.slot());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionTable;

    fn register(region: &Arc<Region>, offset: u64, len: u64) -> Arc<RegisteredBuffer> {
        RegisteredBuffer::new(region, offset, len, BufferAccess::ReadWrite).unwrap()
    }

    #[test]
    fn a_registered_segment_names_the_bytes_of_its_region() {
        let region = Region::anonymous(16384).unwrap();
        let buffer = register(&region, 4096, 8192);
        let mut table = RegionTable::new(vec![Region::anonymous(4096).unwrap(), Arc::clone(&region)]);
        assert!(table.resolve(buffer.segment(0, 1)).is_none(), "the table was not told");
        assert!(table.add_buffer(&buffer));
        let segment = buffer.segment(512, 1024);
        assert_eq!(table.plain(segment), Some(Segment { region: 1, offset: 4608, len: 1024 }));
        assert_eq!(table.resolve(segment).unwrap().as_ptr(), region.span(4608, 1).unwrap().as_ptr());
        let plain = Segment { region: 0, offset: 5, len: 6 };
        assert_eq!(table.plain(plain), Some(plain));
        // To the last byte, and no further; not in front of it either.
        assert!(table.resolve(buffer.segment(8191, 1)).is_some() && table.resolve(buffer.segment(0, 8192)).is_some());
        for (at, len) in [(8192, 1), (8191, 2), (0, 8193), (u64::MAX, 1), (u64::MAX - 4095, 1), (u64::MAX, u32::MAX)] {
            assert!(table.resolve(buffer.segment(at, len)).is_none(), "{at} {len}");
            assert!(buffer.span(buffer.segment(at, len)).is_none(), "{at} {len}");
        }
        assert_eq!(buffer.span(segment).unwrap().as_ptr(), region.span(4608, 1).unwrap().as_ptr());
        assert!(buffer.span(Segment { region: 1, ..segment }).is_none());
    }

    #[test]
    fn a_table_without_the_region_takes_no_buffer() {
        let buffer = register(&Region::anonymous(4096).unwrap(), 0, 4096);
        let mut table = RegionTable::new(vec![Region::anonymous(4096).unwrap()]);
        assert!(!table.add_buffer(&buffer));
        assert!(table.resolve(buffer.segment(0, 1)).is_none());
    }

    #[test]
    fn a_stale_id_names_nothing() {
        let region = Region::anonymous(4096).unwrap();
        let mut table = RegionTable::new(vec![Arc::clone(&region)]);
        let mut stale = Vec::new();
        // Many more than slots that wait before they are used again.
        for _ in 0..10 * FREE_SLOTS_MIN {
            let buffer = register(&region, 0, 4096);
            assert!(table.add_buffer(&buffer) && table.resolve(buffer.segment(0, 4096)).is_some());
            assert!(stale.iter().all(|stale| table.resolve(*stale).is_none()));
            table.remove_buffer(buffer.id());
            assert!(table.resolve(buffer.segment(0, 4096)).is_none());
            stale.push(buffer.segment(0, 4096));
        }
        let distinct: std::collections::HashSet<_> = stale.iter().map(|segment| segment.region).collect();
        assert_eq!(distinct.len(), stale.len());
    }

    #[test]
    fn an_id_says_its_access() {
        let region = Region::anonymous(4096).unwrap();
        for access in [BufferAccess::ReadWrite, BufferAccess::ReadOnly] {
            let buffer = RegisteredBuffer::new(&region, 0, 4096, access).unwrap();
            let segment = buffer.segment(0, 4096);
            assert_eq!((buffer.id().access(), BufferId::of(segment)), (access, Some(buffer.id())));
            assert_eq!(segment.is_read_only(), access == BufferAccess::ReadOnly);
        }
        assert_eq!(BufferId::of(Segment { region: 7, offset: 0, len: 1 }), None);
    }

    #[test]
    fn a_buffer_lies_in_its_region() {
        let region = Region::anonymous(4096).unwrap();
        for (offset, len) in [(0, 0), (0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let refused = RegisteredBuffer::new(&region, offset, len, BufferAccess::ReadWrite);
            assert!(matches!(refused, Err(RegisterError::Extent { .. })), "{offset} {len}");
        }
    }

    #[test]
    fn one_mapping_serves_all_queues_of_a_domain() {
        let region = Region::shared(65536).unwrap();
        let domains = [DmaDomain::new(|| ()), DmaDomain::new(|| ())];
        let buffer = register(&region, 0, 65536);
        let mapped = domains.each_ref().map(|domain| buffer.mapping(domain).unwrap());
        assert!(Arc::ptr_eq(&mapped[0], &buffer.mapping(&domains[0]).unwrap()) && !Arc::ptr_eq(&mapped[0], &mapped[1]));
        assert!(domains.iter().all(|domain| domain.regions().iter().any(|mapped| Arc::ptr_eq(mapped, &region))));
        drop(mapped);
        assert!(domains.iter().all(|domain| domain.regions().is_empty()), "unmapped while the program has the buffer");
    }

    #[test]
    fn a_device_that_is_closed_leaves_nothing_with_a_buffer() {
        let region = Region::shared(1 << 20).unwrap();
        let buffer = register(&region, 0, 1 << 20);
        for _ in 0..100 {
            let domain = DmaDomain::new(|| ());
            let closed = Arc::downgrade(&domain);
            let tables = buffer.mapping(&domain).unwrap().table().map(|(region, _)| Arc::downgrade(region));
            drop(domain);
            assert!(closed.upgrade().is_none() && tables.unwrap().upgrade().is_none());
        }
        assert_eq!(buffer.mappings.lock().unwrap().len(), 1, "only the last one is remembered, and is gone");
        assert_eq!(Arc::strong_count(&region), 2);
    }
}
