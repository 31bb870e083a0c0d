//! Location of an I/O's bytes: segments, and the table of regions they point into.
//!
//! A [`Segment`] is three numbers and unchecked. It becomes a [`Span`] only through the [`RegionTable`] that its owner
//! holds, which checks it. So a segment may be copied and queued without counting references; the holder of the table
//! keeps the memory mapped.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{BufferId, BufferMap, PAGE_BYTES, Region, RegisteredBuffer};

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// A run of bytes in a region of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First byte, from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    /// Which region of the table; or a registered buffer, by its [id](crate::BufferId::number).
    pub region: u32,
}

/// The regions that the segments of one queue may point into. An index stays valid for the life of the table. A table
/// is replaced as a whole: when no segment in flight points into it, or by one in which those segments mean the same.
#[derive(Clone, Debug, Default)]
pub struct RegionTable {
    places: Vec<Option<Arc<Region>>>,
    /// The registered buffers that segments may name, all parts of regions of the table.
    buffers: BufferMap<TableBuffer>,
}

/// A registered buffer of a table.
#[derive(Clone, Debug, Default)]
struct TableBuffer {
    /// Set in every entry that is in use.
    buffer: Option<Arc<RegisteredBuffer>>,
    /// Its region in the table.
    region: u32,
}

impl RegionTable {
    /// A table of these regions, numbered from zero.
    pub fn new(regions: Vec<Arc<Region>>) -> RegionTable {
        RegionTable { places: regions.into_iter().map(Some).collect(), buffers: BufferMap::default() }
    }

    /// A table of the regions in these slots, some of which may be empty.
    pub fn of_slots(slots: Vec<Option<Arc<Region>>>) -> RegionTable {
        RegionTable { places: slots, buffers: BufferMap::default() }
    }

    /// Puts a region into the first free slot; returns its index.
    pub fn insert(&mut self, region: Arc<Region>) -> u32 {
        let free = self.places.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[index] = Some(region);
        index as u32
    }

    /// Removes the region from a slot, which stays empty; and its registered buffers.
    pub fn remove(&mut self, index: u32) -> Option<Arc<Region>> {
        let there = self.buffers.values().filter(|known| known.region == index);
        let ids: Vec<_> = there.filter_map(|known| Some(known.buffer.as_ref()?.id())).collect();
        ids.into_iter().for_each(|id| _ = self.buffers.remove(id));
        self.places.get_mut(index as usize)?.take()
    }

    /// The region in a slot.
    #[inline]
    pub fn region(&self, index: u32) -> Option<&Arc<Region>> {
        self.places.get(index as usize)?.as_ref()
    }

    /// Every region with its number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Arc<Region>)> {
        self.places.iter().enumerate().filter_map(|(index, place)| Some((index as u32, place.as_ref()?)))
    }

    /// Has segments name a registered buffer. False if its region is not in the table: then nothing changes.
    pub fn add_buffer(&mut self, buffer: &Arc<RegisteredBuffer>) -> bool {
        let Some((region, _)) = self.iter().find(|(_, region)| Arc::ptr_eq(region, buffer.region())) else {
            return false;
        };
        self.buffers.insert(buffer, TableBuffer { buffer: Some(Arc::clone(buffer)), region });
        true
    }

    /// Removes a registered buffer: segments that name it are outside the table.
    pub fn remove_buffer(&mut self, id: BufferId) -> Option<Arc<RegisteredBuffer>> {
        self.buffers.remove(id)?.buffer
    }

    /// The registered buffers, in no order.
    pub fn buffers(&self) -> impl Iterator<Item = &Arc<RegisteredBuffer>> {
        self.buffers.values().filter_map(|known| known.buffer.as_ref())
    }

    /// The same bytes, by the number of their region: a segment of a registered buffer is found by its id. `None` if
    /// that is stale, unknown here, or the bytes are not in the buffer. Other segments are returned as they are.
    #[inline]
    pub fn plain(&self, segment: Segment) -> Option<Segment> {
        if segment.is_registered() { self.plain_of_buffer(segment) } else { Some(segment) }
    }

    #[inline]
    fn plain_of_buffer(&self, segment: Segment) -> Option<Segment> {
        let (known, _) = self.buffers.get(segment)?;
        segment.is_registered().then_some(Segment { region: known.region, ..segment })
    }

    /// Whether a segment means the same bytes in both, other than by a registered buffer.
    pub fn is_same(&self, other: &RegionTable) -> bool {
        self.places.len() == other.places.len()
            && self.places.iter().zip(&other.places).all(|pair| match pair {
                (Some(one), Some(other)) => Arc::ptr_eq(one, other),
                (None, None) => true,
                _ => false,
            })
    }

    /// The bytes of a segment that names a region by its number. `None` if it points outside the table, or names a
    /// registered buffer, as no segment of a client does.
    #[inline]
    pub fn resolve_region(&self, segment: Segment) -> Option<Span<'_>> {
        self.region(segment.region)?.span(segment.offset, segment.len as usize)
    }

    /// The bytes of a segment, or `None` if it points outside the table.
    #[inline]
    pub fn resolve(&self, segment: Segment) -> Option<Span<'_>> {
        match self.region(segment.region) {
            Some(region) => region.span(segment.offset, segment.len as usize),
            None => self.resolve_buffer(segment),
        }
    }

    /// The same for what is no number of a region.
    #[inline(never)]
    fn resolve_buffer(&self, segment: Segment) -> Option<Span<'_>> {
        let plain = self.plain_of_buffer(segment)?;
        self.region(plain.region)?.span(plain.offset, plain.len as usize)
    }

    /// Whether the file behind any of the regions was cut short while mapped.
    pub fn is_faulted(&self) -> bool {
        self.places.iter().flatten().any(|region| region.is_faulted())
    }
}

/// Bytes inside a region, with checked bounds. Other processes may write them at any time: they are copied, never
/// referenced.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    start: NonNull<u8>,
    len: usize,
    region: PhantomData<&'a Region>,
}

impl Default for Span<'_> {
    /// No bytes.
    fn default() -> Self {
        Span { start: NonNull::dangling(), len: 0, region: PhantomData }
    }
}

impl Span<'_> {
    /// # Safety
    /// `len` bytes from `start` stay mapped, readable and writable, for the lifetime of the span.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Span { start, len, region: PhantomData }
    }

    /// Bytes in the span.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for the kernel or a device.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they do not lie inside the span: offsets are computed by us from lengths already checked.
    #[inline]
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        if offset > self.len || len > self.len - offset {
            outside(offset, len, self.len);
        }
        // SAFETY: the part lies inside the span, and lives as long.
        unsafe { Span::new(self.start.add(offset), len) }
    }

    /// Prefetches the cache line of a byte, to be read and written soon. A hint without side effects.
    #[inline]
    pub fn warm(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: the byte lies in the span.
            crate::view::warm_at(unsafe { self.start.add(offset) });
        }
    }

    /// Reads two words that follow each other, little-endian as virtio has them, at any alignment. Each is read once,
    /// and whole where it is aligned; others may write them meanwhile.
    ///
    /// # Panics
    /// If they do not lie inside the span.
    #[inline]
    pub fn u64s(&self, offset: usize) -> [u64; 2] {
        if self.len < 16 || offset > self.len - 16 {
            outside(offset, 16, self.len);
        }
        // SAFETY: 16 bytes from there on lie inside the span, which is alive.
        [0, 8].map(|word| unsafe { load_u64(self.start.add(offset + word)) })
    }

    /// Copies all bytes out into `to`, which is as long.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_to_slice(&self, to: &mut [u8]) {
        assert_eq!(self.len, to.len());
        // SAFETY: both sides are valid for `len` bytes and do not overlap, since no reference into a region exists.
        // Another writer may be at work: the bytes are plain data for which any value is valid.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), to.as_mut_ptr(), self.len) };
    }

    /// Copies `from`, which is as long, into the span.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_from_slice(&self, from: &[u8]) {
        assert_eq!(self.len, from.len());
        // SAFETY: as in `copy_to_slice`, the other way.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr(), self.len) };
    }

    /// Copies the bytes of another span, which is as long and may overlap, into this one.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_from(&self, from: &Span<'_>) {
        assert_eq!(self.len, from.len);
        // SAFETY: both spans are mapped for `len` bytes; `copy` allows overlap.
        unsafe { std::ptr::copy(from.start.as_ptr(), self.start.as_ptr(), self.len) };
    }

    /// Copies the bytes of another span of the same length into this one, and meanwhile prefetches the first lines of
    /// `next`: as many as it copies, at most a page. Overlapping spans give some mixture of both.
    ///
    /// The lines are fetched into the second-level cache, one for each line that is copied. In the first level they
    /// would evict lines that the copy itself needs.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_from_and_fetch(&self, from: &Span<'_>, next: &Span<'_>) {
        assert_eq!(self.len, from.len);
        let lines = self.len.min(next.len).min(PAGE_BYTES) / LINE_BYTES;
        let before = self.len - lines * LINE_BYTES;
        // With its way through the page tables.
        next.warm(0);
        // SAFETY: both spans are mapped for more bytes; `copy` allows overlap.
        unsafe { std::ptr::copy(from.start.as_ptr(), self.start.as_ptr(), before) };
        for line in 0..lines {
            let at = line * LINE_BYTES;
            // SAFETY: `next` has that many lines, and so have the other two behind the first bytes.
            unsafe {
                crate::view::fetch_at(next.start.add(at));
                let (from, to) = (from.start.add(before + at), self.start.add(before + at));
                // A length that the compiler knows makes no call.
                std::ptr::copy(from.as_ptr(), to.as_ptr(), LINE_BYTES);
            }
        }
    }

    /// Sets every byte.
    #[inline]
    pub fn fill(&self, byte: u8) {
        // SAFETY: the span is mapped and writable for `len` bytes.
        unsafe { std::ptr::write_bytes(self.start.as_ptr(), byte, self.len) };
    }
}

/// Reads a word once, little-endian, which others may write meanwhile. Not atomic: the peer chooses the alignment, and
/// a check of it would cost more than the load.
///
/// # Safety
/// Eight bytes from there on are mapped.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn load_u64(at: NonNull<u8>) -> u64 {
    let word: u64;
    // SAFETY: promised by the caller; the processor reads at any alignment, and the compiler makes no assumption.
    unsafe {
        std::arch::asm!(
            "mov {word}, qword ptr [{at}]",
            at = in(reg) at.as_ptr(),
            word = lateout(reg) word,
            options(nostack, preserves_flags, readonly)
        );
    }
    word
}

/// The same where the processor may not read at any alignment.
///
/// # Safety
/// As above.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn load_u64(at: NonNull<u8>) -> u64 {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    if at.addr().get().is_multiple_of(align_of::<AtomicU64>()) {
        // SAFETY: promised by the caller, and aligned; atomics allow other writers.
        return u64::from_le(unsafe { at.cast::<AtomicU64>().as_ref() }.load(Relaxed));
    }
    // SAFETY: promised by the caller; atomics allow other writers.
    let bytes = unsafe { at.cast::<[AtomicU8; 8]>().as_ref() };
    u64::from_le_bytes(bytes.each_ref().map(|byte| byte.load(Relaxed)))
}

/// Takes its arguments by value, so that the callers need not keep them in memory for a message.
#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize, of: usize) -> ! {
    panic!("the part {offset}+{len} of a span of {of} bytes lies outside it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_their_numbers_when_others_go() {
        let mut table = RegionTable::default();
        for len in [4096, 8192, 12288] {
            table.insert(Region::anonymous(len).unwrap());
        }
        table.remove(1);
        assert!(table.resolve(Segment { region: 1, offset: 0, len: 1 }).is_none());
        assert_eq!(table.region(2).unwrap().len(), 12288);
        assert_eq!(table.insert(Region::anonymous(4096).unwrap()), 1);
        assert_eq!(table.iter().count(), 3);
    }

    #[test]
    fn a_copy_is_whole_whatever_is_fetched_meanwhile() {
        let [from, to, next] = [0; 3].map(|_| Region::anonymous(3 * PAGE_BYTES).unwrap());
        let pattern: Vec<u8> = (0..3 * PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        from.span(0, 3 * PAGE_BYTES).unwrap().copy_from_slice(&pattern);
        let lens = [0, 1, 63, 64, 65, 512, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES + 100];
        for (len, next_len) in lens.iter().flat_map(|len| lens.map(|next_len| (*len, next_len))) {
            let all = to.span(0, 3 * PAGE_BYTES).unwrap();
            all.fill(0xee);
            let [source, place] = [(&from, 3), (&to, 5)].map(|(region, at)| region.span(at, len).unwrap());
            place.copy_from_and_fetch(&source, &next.span(7, next_len).unwrap());
            let mut bytes = vec![0; 3 * PAGE_BYTES];
            all.copy_to_slice(&mut bytes);
            assert_eq!(bytes[5..5 + len], pattern[3..3 + len], "{len} bytes beside {next_len}");
            assert!(bytes[..5].iter().chain(&bytes[5 + len..]).all(|byte| *byte == 0xee), "{len} beside {next_len}");
        }
    }

    #[test]
    fn two_words_are_read_at_any_alignment() {
        let region = Region::anonymous(PAGE_BYTES).unwrap();
        let span = region.span(0, 64).unwrap();
        let bytes: [u8; 64] = std::array::from_fn(|at| at as u8 + 1);
        span.copy_from_slice(&bytes);
        for offset in 0..=48 {
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            assert_eq!(span.u64s(offset), [word(offset), word(offset + 8)], "at {offset}");
        }
    }

    #[test]
    fn a_word_that_another_thread_writes_is_read_whole() {
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        let region = Region::anonymous(PAGE_BYTES).unwrap();
        let view = crate::View::new(Arc::clone(&region), 0, 16, 8).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..200_000_u64 {
                    let word = (round & 0xff) * 0x0101_0101_0101_0101;
                    view.store_u64s(0, [word, word], Relaxed);
                }
                over.store(true, Relaxed);
            });
            while !over.load(Relaxed) {
                for word in region.span(0, 16).unwrap().u64s(0) {
                    assert_eq!(word, (word & 0xff) * 0x0101_0101_0101_0101, "torn");
                }
            }
        });
    }

    #[test]
    fn a_segment_outside_the_table_is_no_span() {
        let table = RegionTable::new(vec![Region::anonymous(4096).unwrap()]);
        assert!(table.resolve(Segment { region: 0, offset: 4000, len: 96 }).is_some());
        assert!(table.resolve(Segment { region: 0, offset: 4000, len: 97 }).is_none());
        assert!(table.resolve(Segment { region: 7, offset: 0, len: 1 }).is_none());
    }
}
