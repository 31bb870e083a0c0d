//! Registered buffers of an I/O queue: data pointers without a walk.
//!
//! Host side. An I/O in a registered buffer needs an addition, or a load for each PRP entry where addresses are not
//! contiguous; from three pages on its PRP list is a part of the buffer's table, which the controller reads in place.
//! A list that does not fit the rest of its table page is copied like any other ([`ListPool`](crate::ListPool)).
//!
//! Owned by one queue. A reset of the controller keeps the addresses; a controller that was opened again may have
//! others, and its queues are new.

use std::sync::Arc;

use blkyard_mem::{BufferAddresses, BufferId, BufferMap, BufferMapping, RegisteredBuffer, Segment};

use crate::lists::sgl;
use crate::{DmaSegment, PAGE, Psdt};

const PAGE_SHIFT: u32 = PAGE.trailing_zeros();
/// Entries of a table page, and those after which the other copy of the table is used.
const PAGE_SLOTS: u64 = PAGE / 8;
const COPY_SLOTS: u64 = PAGE_SLOTS / 2;

/// A registered buffer as its controller reaches it.
#[derive(Debug, Default)]
pub(crate) struct MappedBuffer {
    /// Address of the page with the first byte.
    base: u64,
    /// Address of slot 0 of copy A of the table; zero for none.
    table: u64,
    /// Addresses of the pages; empty if they are contiguous.
    pages: Arc<[u64]>,
    /// Slot 0 of copy B, from there.
    staggered: u32,
    /// Bytes of the first page before the first byte.
    lead: u16,
    /// Length of runs of contiguous addresses, as a power of two.
    run_shift: u8,
    pub(crate) needs_sync: bool,
}

const _: () = assert!(size_of::<MappedBuffer>() <= 40, "with its slot a buffer is a line of cache");

/// The registered buffers of a queue.
#[derive(Debug, Default)]
pub(crate) struct MappedBuffers {
    buffers: BufferMap<MappedBuffer>,
    /// Their mappings, by slot.
    mappings: Vec<Option<Arc<BufferMapping>>>,
}

impl MappedBuffers {
    /// Adds a buffer with its addresses in the controller's domain, or replaces those it had. False if none of its I/O
    /// is aligned there; the buffer is not there then.
    pub(crate) fn add(
        &mut self,
        buffer: &RegisteredBuffer,
        mapping: &Arc<BufferMapping>,
        addresses: &BufferAddresses,
    ) -> bool {
        // The alignment of an I/O is that of its offset.
        let is_aligned = buffer.offset().wrapping_sub(addresses.lead()).is_multiple_of(4);
        let Some(mapped) = MappedBuffer::new(mapping, addresses).filter(|_| is_aligned) else {
            self.remove(buffer.id());
            return false;
        };
        let slot = buffer.id().slot();
        if self.mappings.len() <= slot {
            self.mappings.resize(slot + 1, None);
        }
        self.buffers.insert(buffer, mapped);
        self.mappings[slot] = Some(Arc::clone(mapping));
        true
    }

    pub(crate) fn remove(&mut self, id: BufferId) {
        if self.buffers.remove(id).is_some() {
            self.mappings[id.slot()] = None;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.buffers.clear();
        self.mappings.clear();
    }

    /// Before the controller reads a segment: copies it there, if its buffer is bounced.
    pub(crate) fn sync_for_device(&self, segment: Segment) {
        if let Some(mapping) = self.bounced(segment) {
            mapping.sync_for_device(segment.offset, segment.len);
        }
    }

    /// After the controller has written it: copies it back.
    pub(crate) fn sync_for_cpu(&self, segment: Segment) {
        if let Some(mapping) = self.bounced(segment) {
            mapping.sync_for_cpu(segment.offset, segment.len);
        }
    }

    fn bounced(&self, segment: Segment) -> Option<&Arc<BufferMapping>> {
        let (slot, (buffer, _)) = (BufferId::of(segment)?.slot(), self.get(segment)?);
        self.mappings.get(slot)?.as_ref().filter(|_| buffer.needs_sync)
    }

    /// The buffer in which a segment lies, and where from its first page on; `None` if the id is stale or unknown, or
    /// the segment is not in it.
    #[inline]
    pub(crate) fn get(&self, segment: Segment) -> Option<(&MappedBuffer, u64)> {
        let (mapped, into) = self.buffers.get(segment)?;
        Some((mapped, into + u64::from(mapped.lead)))
    }

    /// The runs of addresses of a segment; `None` as for [`MappedBuffers::get`].
    pub(crate) fn runs(&self, segment: Segment) -> Option<BufferRuns<'_>> {
        let (buffer, from) = self.get(segment)?;
        Some(buffer.runs(from, segment.len))
    }
}

impl MappedBuffer {
    /// `None` if the buffer is too large: some tebibytes.
    fn new(mapping: &Arc<BufferMapping>, addresses: &BufferAddresses) -> Option<MappedBuffer> {
        let [table, copy] = addresses.tables().unwrap_or_default();
        Some(MappedBuffer {
            base: addresses.base(),
            table,
            pages: Arc::clone(addresses.pages()),
            staggered: u32::try_from(copy - table).ok()?,
            lead: addresses.lead() as u16,
            run_shift: addresses.run_shift() as u8,
            needs_sync: mapping.needs_sync(),
        })
    }

    #[inline]
    fn is_contiguous(&self) -> bool {
        self.pages.is_empty()
    }

    /// Address of a page of the buffer. The first one's is at hand.
    #[inline]
    fn page(&self, number: u64) -> u64 {
        if number == 0 {
            return self.base;
        }
        self.pages.get(number as usize).copied().unwrap_or_else(|| outside(number))
    }

    /// The data pointer of `len` bytes; `None` if they need a list of their own.
    #[inline]
    pub(crate) fn pointer(&self, from: u64, len: u32, takes_sgl: bool) -> Option<(Psdt, [u64; 2])> {
        let page = from >> PAGE_SHIFT;
        let end = (from & (PAGE - 1)) + u64::from(len);
        let first =
            if self.is_contiguous() { self.base.wrapping_add(from) } else { self.page(page) | (from & (PAGE - 1)) };
        if end <= PAGE {
            return Some((Psdt::Prp, [first, 0]));
        }
        if end <= 2 * PAGE {
            let second = if self.is_contiguous() { (first | (PAGE - 1)).wrapping_add(1) } else { self.page(page + 1) };
            return Some((Psdt::Prp, [first, second]));
        }
        if takes_sgl && self.is_one_run(from, len) {
            return Some((Psdt::Sgl, sgl::words(sgl::DATA_BLOCK, first, len)));
        }
        // The list begins with the second page, and has one pointer for each page but the first.
        let (slot, pointers) = (page + 1, (end - 1) >> PAGE_SHIFT);
        let staggered = if slot & COPY_SLOTS == 0 { 0 } else { u64::from(self.staggered) };
        // With one pointer more, the controller would take the last entry of the page for a link.
        let fits = slot % COPY_SLOTS + pointers <= PAGE_SLOTS;
        (fits && self.table != 0).then_some((Psdt::Prp, [first, self.table + staggered + slot * 8]))
    }

    /// Whether the addresses of `len` bytes are contiguous.
    #[inline]
    fn is_one_run(&self, from: u64, len: u32) -> bool {
        let first = (self.base & ((1 << self.run_shift) - 1)).wrapping_add(from);
        (first ^ first.wrapping_add(u64::from(len) - 1)) >> self.run_shift == 0
    }

    /// The runs of addresses of `len` bytes.
    pub(crate) fn runs(&self, from: u64, len: u32) -> BufferRuns<'_> {
        BufferRuns { buffer: self, from, left: len.into() }
    }
}

#[cold]
#[inline(never)]
fn outside(page: u64) -> ! {
    panic!("page {page} of a registered buffer that has fewer");
}

/// Iterator over the runs of addresses of a segment.
#[derive(Clone, Debug)]
pub(crate) struct BufferRuns<'a> {
    buffer: &'a MappedBuffer,
    from: u64,
    left: u64,
}

impl Iterator for BufferRuns<'_> {
    type Item = DmaSegment;

    fn next(&mut self) -> Option<DmaSegment> {
        if self.left == 0 {
            return None;
        }
        let (buffer, into) = (self.buffer, self.from & (PAGE - 1));
        let run = if buffer.is_contiguous() {
            DmaSegment { addr: buffer.base.wrapping_add(self.from), len: self.left }
        } else {
            DmaSegment { addr: buffer.page(self.from >> PAGE_SHIFT) | into, len: self.left.min(PAGE - into) }
        };
        self.from = self.from.wrapping_add(run.len);
        self.left -= run.len;
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mem::{BufferAccess, DmaDomain, Region, RegionTable};
    use proptest::prelude::*;

    use super::*;
    use crate::{DataWalker, DmaMap, DmaRange, ListPool, Sqe, io};

    /// Where data and tables are for the controller.
    const DATA: u64 = 1 << 40;
    const TABLES: u64 = 1 << 50;
    const LISTS: u64 = 1 << 52;

    /// A region with a registered part, whose pages of so many bytes are in reverse order if they are scattered.
    struct Mapped {
        region: Arc<Region>,
        buffer: Arc<RegisteredBuffer>,
        buffers: MappedBuffers,
        page: u64,
        is_scattered: bool,
        map: DmaMap,
        lists: ListPool,
    }

    impl Mapped {
        fn new(pages: u64, start: u64, len: u64, page: u64, is_scattered: bool) -> Mapped {
            let region = Region::shared((pages * PAGE) as usize).unwrap();
            let buffer = RegisteredBuffer::new(&region, start, len, BufferAccess::ReadWrite).unwrap();
            let domain = DmaDomain::new(|| ());
            let addr = |of: &Arc<Region>, offset: u64| {
                let is_data = Arc::ptr_eq(of, &region);
                Some(if is_data { data_addr(offset, pages, page, is_scattered) } else { TABLES + offset })
            };
            let mut buffers = MappedBuffers::default();
            let mapping = buffer.mapping(&domain).unwrap();
            assert!(buffers.add(&buffer, &mapping, &mapping.addresses(addr).unwrap()));
            let lists = Region::anonymous(ListPool::bytes(4, 5)).unwrap();
            let mut table = RegionTable::new(vec![Arc::clone(&region), Arc::clone(&lists)]);
            let mut ranges: Vec<_> = (0..pages)
                .map(|number| number * PAGE)
                .map(|offset| DmaRange {
                    addr: data_addr(offset, pages, page, is_scattered),
                    len: PAGE,
                    region: 0,
                    offset,
                })
                .collect();
            ranges.push(DmaRange { addr: LISTS, len: lists.len() as u64, region: 1, offset: 0 });
            if let Some((memory, _)) = mapping.table() {
                let number = table.insert(Arc::clone(memory));
                ranges.push(DmaRange { addr: TABLES, len: memory.len() as u64, region: number, offset: 0 });
            }
            let map = DmaMap::new(Arc::new(table), ranges).unwrap();
            let view = blkyard_mem::View::new(Arc::clone(&lists), 0, lists.len(), PAGE as usize).unwrap();
            let lists = ListPool::new(view, LISTS, 4, 5);
            Mapped { region, buffer, buffers, page, is_scattered, map, lists }
        }

        fn pointer(&self, segment: Segment, takes_sgl: bool) -> Option<(Psdt, [u64; 2])> {
            let (buffer, from) = self.buffers.get(segment).unwrap();
            buffer.pointer(from, segment.len, takes_sgl)
        }

        /// What the controller finds by a data pointer.
        fn walk(&self, (psdt, pointer): (Psdt, [u64; 2]), bytes: u32) -> Vec<Segment> {
            let mut segments = Vec::new();
            let sqe = Sqe::new(io::READ, 1).with_data(psdt, pointer);
            let mut walker = DataWalker::new(1 << 30, true);
            walker.walk(&self.map, &sqe, bytes.into(), &mut segments).unwrap();
            segments
        }

        /// The data pointer of a plain walk over the pages of the same bytes.
        fn plain(&mut self, offset: u64, len: u32) -> [u64; 2] {
            let pages = self.region.len() as u64 / PAGE;
            let (page, is_scattered) = (self.page, self.is_scattered);
            let end = offset + u64::from(len);
            let cuts = (offset / PAGE + 1..end.div_ceil(PAGE)).map(|number| number * PAGE);
            let starts = std::iter::once(offset).chain(cuts.clone());
            let runs = starts
                .zip(cuts.chain([end]))
                .map(|(from, to)| DmaSegment { addr: data_addr(from, pages, page, is_scattered), len: to - from });
            let pointer = self.lists.prp(0, len.into(), runs).unwrap();
            let _ = self.lists.release(0);
            pointer
        }
    }

    fn data_addr(offset: u64, pages: u64, page: u64, is_scattered: bool) -> u64 {
        let last = (pages * PAGE - 1) / page;
        DATA + if is_scattered { (last - offset / page) * 2 * page + offset % page } else { offset }
    }

    #[test]
    fn the_list_in_place_begins_at_the_entry_of_the_second_page() {
        let mapped = Mapped::new(2048, 0, 2048 * PAGE, PAGE, true);
        let pointer = |offset, len| mapped.pointer(mapped.buffer.segment(offset, len), false);
        let page = |number| data_addr(number * PAGE, 2048, PAGE, true);
        assert_eq!(pointer(512, 512), Some((Psdt::Prp, [page(0) + 512, 0])));
        assert_eq!(pointer(3 * PAGE + 512, 4096), Some((Psdt::Prp, [page(3) + 512, page(4)])));
        assert_eq!(pointer(3 * PAGE, 8192), Some((Psdt::Prp, [page(3), page(4)])));
        assert_eq!(pointer(3 * PAGE + 512, 8192), Some((Psdt::Prp, [page(3) + 512, TABLES + 4 * 8])));
        // Copy B, behind the four pages of copy A.
        let second = TABLES + 4 * PAGE + 2048;
        assert_eq!(pointer(255 * PAGE, 3 * 4096), Some((Psdt::Prp, [page(255), second + 256 * 8])));
        assert_eq!(pointer(511 * PAGE, 3 * 4096), Some((Psdt::Prp, [page(511), TABLES + 512 * 8])));
    }

    #[test]
    fn a_list_may_use_the_last_entry_of_a_table_page_and_no_further() {
        let mapped = Mapped::new(2048, 0, 2048 * PAGE, PAGE, true);
        let fits = |first_page: u64, pointers: u64| {
            let segment = mapped.buffer.segment(first_page * PAGE, ((pointers + 1) * PAGE) as u32);
            mapped.pointer(segment, false).is_some()
        };
        for slot in 1..1024 {
            let left = 512 - slot % 256;
            assert!(left >= 257, "1 MiB at any alignment is in place");
            assert!(fits(slot - 1, left), "the last pointer is in slot 511 of its page: slot {slot}");
            assert!(!fits(slot - 1, left + 1), "the controller would take slot 511 for a link: slot {slot}");
        }
    }

    #[test]
    fn a_contiguous_buffer_is_one_sgl_descriptor() {
        let mapped = Mapped::new(2048, 512, 2047 * PAGE, PAGE, false);
        let segment = mapped.buffer.segment(1024, 7 << 20);
        let pointer = mapped.pointer(segment, true).unwrap();
        assert_eq!(pointer, (Psdt::Sgl, sgl::words(sgl::DATA_BLOCK, DATA + 1536, 7 << 20)));
        assert_eq!(mapped.walk(pointer, 7 << 20), [Segment { region: 0, offset: 1536, len: 7 << 20 }]);
        let short = mapped.buffer.segment(0, 4096);
        assert_eq!(mapped.pointer(short, true).unwrap().0, Psdt::Prp);
    }

    #[test]
    fn any_length_inside_one_run_is_one_descriptor() {
        // Pages of the machine, huge ones among them, and a buffer that begins inside one.
        for (page, start) in [(65536, 0), (65536, 5 * PAGE + 512), (2 << 20, 0), (2 << 20, 300 * PAGE)] {
            let mut mapped = Mapped::new(2048, start, 1500 * PAGE, page, true);
            for (from, len) in [(0, 12288), (page - 16384, 16384), (page - 16384, 20480), (page, page), (512, page)] {
                // From this byte of the region on.
                let from = start.next_multiple_of(page) + from;
                let len = len as u32;
                let segment = mapped.buffer.segment(from - start, len);
                let is_one_run = from / page == (from + u64::from(len) - 1) / page;
                let Some((psdt, pointer)) = mapped.pointer(segment, true) else {
                    assert!(!is_one_run && len > 1 << 20, "a list that is copied: {len} bytes from {from}");
                    continue;
                };
                if is_one_run {
                    let address = data_addr(from, 2048, page, true);
                    assert_eq!((psdt, pointer), (Psdt::Sgl, sgl::words(sgl::DATA_BLOCK, address, len)));
                } else {
                    assert_eq!(psdt, Psdt::Prp, "{len} bytes from {from} in pages of {page}");
                }
                let plain = mapped.plain(from, len);
                assert_eq!(mapped.walk((psdt, pointer), len), mapped.walk((Psdt::Prp, plain), len));
            }
        }
    }

    #[test]
    fn registration_decides_all_that_does_not_depend_on_the_io() {
        let region = Region::shared(64 * PAGE as usize).unwrap();
        let buffer = RegisteredBuffer::new(&region, PAGE + 512, 32 * PAGE, BufferAccess::ReadOnly).unwrap();
        assert_eq!(
            (buffer.offset(), buffer.len(), buffer.id().access()),
            (PAGE + 512, 32 * PAGE, BufferAccess::ReadOnly)
        );
        let lookups = std::cell::Cell::new(0);
        let domains = [DmaDomain::new(|| ()), DmaDomain::bounced(|| ())];
        for (domain, needs_sync) in domains.iter().zip([false, true]) {
            let mapping = buffer.mapping(domain).unwrap();
            let addresses = mapping.addresses(|of, offset| {
                lookups.set(lookups.get() + 1);
                Some(
                    if mapping.table().is_some_and(|(table, _)| Arc::ptr_eq(of, table)) { TABLES } else { DATA }
                        + offset,
                )
            });
            let mut buffers = MappedBuffers::default();
            assert!(buffers.add(&buffer, &mapping, &addresses.unwrap()));
            let after = lookups.get();
            for at in 0..31 * 8 {
                let (mapped, from) = buffers.get(buffer.segment(at * 512, 4096)).unwrap();
                assert_eq!((mapped.needs_sync, mapped.is_contiguous()), (needs_sync, true));
                let (_, [first, _]) = mapped.pointer(from, 4096, true).unwrap();
                let start = if needs_sync { DATA + 512 } else { DATA + PAGE + 512 };
                assert_eq!(first, start + at * 512);
            }
            assert_eq!(lookups.get(), after, "no I/O looks an address up");
        }
    }

    #[test]
    fn a_stale_or_foreign_id_finds_nothing() {
        let mut mapped = Mapped::new(16, PAGE, 8 * PAGE, PAGE, true);
        let segment = mapped.buffer.segment(0, 4096);
        assert!(mapped.buffers.get(segment).is_some());
        for number in [segment.region ^ 1 << 14, segment.region ^ Segment::READ_ONLY_BIT, segment.region ^ 1] {
            assert!(mapped.buffers.get(Segment { region: number, ..segment }).is_none());
        }
        for (at, len) in [(u64::MAX, 1), (8 * PAGE, 1), (8 * PAGE - 1, 2), (0, u32::MAX), (u64::MAX - PAGE, 4096)] {
            assert!(mapped.buffers.get(mapped.buffer.segment(at, len)).is_none(), "{at} {len}");
        }
        mapped.buffers.remove(mapped.buffer.id());
        assert!(mapped.buffers.get(segment).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// The controller finds the same bytes as by the pointers of a plain walk, in the same order.
        #[test]
        fn a_registered_buffer_gives_the_addresses_of_a_plain_walk(
            start in 0_u64..3 * 1024, len in 1_u64..2000,
            page in prop::sample::select(&[4096_u64, 16384, 65536, 2 << 20][..]), is_scattered: bool, takes_sgl: bool,
            // Near the borders of table pages, or anywhere.
            slot in prop_oneof![0_u64..2000, Just(255), Just(256), Just(511), Just(512), Just(767), Just(1023)],
            into in prop_oneof![Just(0_u64), 0_u64..1024],
            count in prop_oneof![1_u32..40, 250_u32..530, 1_u32..2000], odd in 0_u32..2,
        ) {
            let pages = 2048;
            let (start, len) = (start * 4, len * PAGE);
            let mut mapped = Mapped::new(pages, start, len, page, is_scattered);
            let from = (slot * PAGE + into * 4) % len;
            let bytes = u64::from(count * 4096 - odd * 3584).min(len - from).min(8 << 20) as u32 & !3;
            prop_assume!(bytes > 0);
            let segment = mapped.buffer.segment(from, bytes);
            let plain = mapped.plain(segment.offset, bytes);
            let want = mapped.walk((Psdt::Prp, plain), bytes);
            prop_assert_eq!(&want[..], &[Segment { region: 0, offset: start + from, len: bytes }]);
            let pointer = if let Some(pointer) = mapped.pointer(segment, takes_sgl) {
                pointer
            } else {
                prop_assert!(bytes > 1 << 20, "up to 1 MiB nothing is copied");
                let pointer = mapped.lists.prp(1, bytes.into(), mapped.buffers.runs(segment).unwrap()).unwrap();
                (Psdt::Prp, pointer)
            };
            if pointer.0 == Psdt::Prp {
                prop_assert_eq!(pointer.1[0], plain[0]);
            }
            prop_assert_eq!(mapped.walk(pointer, bytes), want);
        }
    }
}
