//! A registered buffer in one DMA domain: the addresses by which devices reach it.
//!
//! Device addresses are looked up once for each device page of 4096 bytes. Contiguous ones are kept as the first,
//! others as a list. Both stand besides in a table that devices read, so that a part of it can serve as the PRP list of
//! a command, in two copies:
//!
//! ```text
//!   copy A   │0 … 255│256 … 511│512 … 767│768 … 1023│      slot s at 8 s
//!   copy B   │  –    │0 … 255  │256 … 511│512 … 767 │…     slot s at 8 s, 2048 bytes into a page
//!            └──── a page ─────┴────── a page ──────┘
//! ```
//!
//! Copy A is used for slots whose bit 8 is clear, copy B for the others. So at least 257 slots follow in the same page,
//! whatever the slot, and a list of that many pointers needs no copy.
//!
//! A domain may [bounce](DmaDomain::bounced): then devices reach a copy of the buffer, and its owner says when bytes
//! are copied, for exactly the range of each I/O.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use crate::tables::TableMemory;
use crate::{DmaDomain, DmaMapping, PAGE_BYTES, Region, Span, View};

/// Bytes of a table entry.
const SLOT_BYTES: usize = 8;
/// Entries of a table page.
const PAGE_SLOTS: usize = PAGE_BYTES / SLOT_BYTES;
/// Slots by which copy B is staggered.
const STAGGER: usize = PAGE_SLOTS / 2;
/// Pages that a command names without a list.
const PAGES_WITHOUT_LIST: u64 = 2;

/// [`BufferAddresses::run_shift`] of a buffer that is one run.
const WHOLE_SHIFT: u32 = 63;

/// The memory of a registered buffer, mapped in a domain for as long as this lives: until the last queue of the domain
/// has dropped it.
#[derive(Debug)]
pub struct BufferMapping {
    domain: Arc<DmaDomain>,
    region: Arc<Region>,
    offset: u64,
    len: u64,
    bounce: Option<BounceCopy>,
    /// Both copies of the table. Unset if the buffer needs none.
    table: Option<TableMemory>,
    /// Those found last.
    addresses: Mutex<Option<Arc<BufferAddresses>>>,
    _mapping: DmaMapping,
}

/// What devices reach in the place of a buffer.
#[derive(Debug)]
struct BounceCopy {
    region: Arc<Region>,
    /// Of the buffer's first byte; at the same place in its page.
    offset: u64,
}

/// Device addresses of a mapped buffer.
#[derive(Debug)]
pub struct BufferAddresses {
    /// Address of the page with the first byte.
    base: u64,
    /// Bytes of that page before the first byte.
    lead: u64,
    /// Address of each page; empty if they are contiguous.
    pages: Arc<[u64]>,
    /// Address of slot 0 of copy A. Unset if devices do not reach the table.
    table: Option<u64>,
    /// Slot 0 of copy B, from there.
    staggered: u64,
    /// Whether the buffer needs a table.
    needs_table: bool,
    run_shift: u32,
}

impl BufferMapping {
    pub(crate) fn new(
        domain: &Arc<DmaDomain>,
        region: &Arc<Region>,
        offset: u64,
        len: u64,
    ) -> io::Result<BufferMapping> {
        // At any place in its first page.
        let pages = len.div_ceil(PAGE_BYTES as u64) + 1;
        let has_table = pages > PAGES_WITHOUT_LIST;
        let table = has_table.then(|| TableMemory::new(domain, table_bytes(pages).1)).transpose()?;
        let bounce = if domain.is_bounced() {
            let offset = offset % PAGE_BYTES as u64;
            let bytes = (offset + len).next_multiple_of(PAGE_BYTES as u64);
            Some(BounceCopy { region: Region::shared(bytes as usize)?, offset })
        } else {
            None
        };
        let reached = bounce.as_ref().map_or(region, |bounce| &bounce.region);
        let tables = table.iter().map(|table| &table.region);
        let mapping = domain.map([reached].into_iter().chain(tables).map(Arc::clone).collect());
        Ok(BufferMapping {
            domain: Arc::clone(domain),
            region: Arc::clone(region),
            offset,
            len,
            bounce,
            table,
            addresses: Mutex::default(),
            _mapping: mapping,
        })
    }

    /// Its domain.
    pub fn domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// First byte of the buffer, from the start of its region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the buffer.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Region of the table that devices read, if there is one, and its first byte there. Tables of other buffers are in
    /// the same region.
    pub fn table(&self) -> Option<(&Arc<Region>, u64)> {
        self.table.as_ref().map(|table| (&table.region, table.offset as u64))
    }

    /// Whether devices reach a copy: see [`BufferMapping::sync_for_device`].
    pub fn needs_sync(&self) -> bool {
        self.bounce.is_some()
    }

    /// The device addresses, looked up by `addr`: of a byte of a region, or `None` as long as devices do not reach it.
    /// `None` as long as any of them is missing, or if one is not at the place in its page that the others require.
    ///
    /// They are kept for the other queues of the domain, and looked up again when the device has others, after it was
    /// opened again. Then the table is written anew: no request that names it is in flight. This takes some time for
    /// each page, and is not for a thread with I/O.
    pub fn addresses(&self, addr: impl Fn(&Arc<Region>, u64) -> Option<u64>) -> Option<Arc<BufferAddresses>> {
        let mut known = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|known| self.is_elsewhere(known, &addr)) {
            *known = self.look_up(addr).map(Arc::new);
        }
        known.clone()
    }

    /// Whether the first or last byte, or the table, has another address now, or none.
    fn is_elsewhere(&self, known: &BufferAddresses, addr: impl Fn(&Arc<Region>, u64) -> Option<u64>) -> bool {
        let (region, offset) = self.reached();
        let last = known.lead + self.len - 1;
        let page = known.pages.get((last / PAGE_BYTES as u64) as usize);
        let last_addr = page.map_or(known.base.wrapping_add(last), |page| page + last % PAGE_BYTES as u64);
        addr(region, offset) != known.base.checked_add(known.lead)
            || addr(region, offset + self.len - 1) != Some(last_addr)
            || self.table_addr(addr, known.page_count(self.len)) != known.table
    }

    /// Address of the table, if the buffer needs one and the device reaches all of it in a row.
    fn table_addr(&self, addr: impl Fn(&Arc<Region>, u64) -> Option<u64>, pages: u64) -> Option<u64> {
        let table = self.table.as_ref().filter(|_| pages > PAGES_WITHOUT_LIST)?;
        let start = addr(&table.region, table.offset as u64).filter(|at| at.is_multiple_of(PAGE_BYTES as u64))?;
        let in_a_row = |at: usize| addr(&table.region, (table.offset + at) as u64) == start.checked_add(at as u64);
        (0..table.len).step_by(PAGE_BYTES).all(in_a_row).then_some(start)
    }

    /// What devices reach: the buffer or its copy, and its first byte there.
    fn reached(&self) -> (&Arc<Region>, u64) {
        match &self.bounce {
            Some(bounce) => (&bounce.region, bounce.offset),
            None => (&self.region, self.offset),
        }
    }

    fn look_up(&self, addr: impl Fn(&Arc<Region>, u64) -> Option<u64>) -> Option<BufferAddresses> {
        let page = PAGE_BYTES as u64;
        let (region, offset) = self.reached();
        let first = addr(region, offset)?;
        let lead = first % page;
        let count = (lead + self.len).div_ceil(page);
        let mut pages = Vec::with_capacity(count as usize);
        pages.push(first - lead);
        for number in 1..count {
            pages.push(addr(region, offset + number * page - lead).filter(|addr| addr.is_multiple_of(page))?);
        }
        let base = pages[0];
        // Where one run ends and another begins.
        let breaks = (1..).zip(pages.windows(2)).filter(|(_, pair)| pair[0].wrapping_add(page) != pair[1]);
        let run_shift = breaks.map(|(number, _)| base.wrapping_add(number * page).trailing_zeros()).min();
        let run_shift = run_shift.unwrap_or(WHOLE_SHIFT);
        let (staggered, _) = table_bytes(count);
        let table = self.table_addr(&addr, count).filter(|_| self.fill_table(&pages, staggered));
        if run_shift == WHOLE_SHIFT {
            pages.clear();
        }
        let needs_table = count > PAGES_WITHOUT_LIST;
        Some(BufferAddresses {
            base,
            lead,
            pages: pages.into(),
            table,
            staggered: staggered as u64,
            needs_table,
            run_shift,
        })
    }

    /// Writes both copies of the table. False if there is none.
    fn fill_table(&self, pages: &[u64], staggered: usize) -> bool {
        let Some(table) = &self.table else { return false };
        let view = View::new(Arc::clone(&table.region), table.offset as u64, table.len, PAGE_BYTES);
        let Some(view) = view else { return false };
        for (slot, page) in pages.iter().enumerate() {
            view.store_u64(slot * SLOT_BYTES, *page, Relaxed);
            view.store_u64(staggered + slot * SLOT_BYTES, *page, Relaxed);
        }
        true
    }

    /// Before a device reads: copies these bytes to where it reads them. `at` counts from the start of the region, and
    /// the bytes lie in the buffer. Does nothing unless the mapping [needs it](BufferMapping::needs_sync).
    pub fn sync_for_device(&self, at: u64, len: u32) {
        if let Some((ours, device)) = self.both(at, len) {
            device.copy_from(&ours);
        }
    }

    /// After a device has written: copies these bytes back, as above.
    pub fn sync_for_cpu(&self, at: u64, len: u32) {
        if let Some((ours, device)) = self.both(at, len) {
            ours.copy_from(&device);
        }
    }

    fn both(&self, at: u64, len: u32) -> Option<(Span<'_>, Span<'_>)> {
        let bounce = self.bounce.as_ref()?;
        let into = at.checked_sub(self.offset).filter(|into| into + u64::from(len) <= self.len)?;
        let len = len as usize;
        self.region.span(at, len).zip(bounce.region.span(bounce.offset + into, len))
    }
}

/// Where copy B begins, and the bytes of both, for this number of pages.
fn table_bytes(pages: u64) -> (usize, usize) {
    let copy = (pages as usize * SLOT_BYTES).next_multiple_of(PAGE_BYTES);
    let staggered = copy + STAGGER * SLOT_BYTES;
    (staggered, (staggered + pages as usize * SLOT_BYTES).next_multiple_of(PAGE_BYTES))
}

impl BufferAddresses {
    /// Address of the page with the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes of that page before the buffer.
    pub fn lead(&self) -> u64 {
        self.lead
    }

    /// Whether the addresses of all pages are contiguous.
    pub fn is_contiguous(&self) -> bool {
        self.pages.is_empty()
    }

    /// Runs of contiguous addresses, as a power of two: bytes whose distances from address zero, counted on from the
    /// [base](BufferAddresses::base) as if all were contiguous, are equal when shifted by this, are contiguous.
    pub fn run_shift(&self) -> u32 {
        self.run_shift
    }

    /// Addresses of the pages; empty if they are contiguous.
    pub fn pages(&self) -> &Arc<[u64]> {
        &self.pages
    }

    /// Whether devices do not reach the table that the buffer needs.
    pub fn lacks_table(&self) -> bool {
        self.needs_table && self.table.is_none()
    }

    /// Pages of a buffer of so many bytes.
    fn page_count(&self, len: u64) -> u64 {
        (self.lead + len).div_ceil(PAGE_BYTES as u64)
    }

    /// Addresses of slot 0 of both copies of the table, A and B. Unset if there is none.
    pub fn tables(&self) -> Option<[u64; 2]> {
        self.table.map(|table| [table, table + self.staggered])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BufferAccess, RegisteredBuffer};

    fn mapping(domain: &Arc<DmaDomain>, len: usize, offset: u64, bytes: u64) -> (Arc<Region>, Arc<BufferMapping>) {
        let region = Region::shared(len).unwrap();
        let buffer = RegisteredBuffer::new(&region, offset, bytes, BufferAccess::ReadWrite).unwrap();
        (region, buffer.mapping(domain).unwrap())
    }

    /// Addresses as processes have them.
    fn own(region: &Arc<Region>, offset: u64) -> Option<u64> {
        Some(region.span(offset, 1)?.as_ptr().addr() as u64)
    }

    /// Reads a word of memory that is known by its address.
    fn word(region: &Arc<Region>, base: u64, at: u64) -> u64 {
        View::new(Arc::clone(region), 0, region.len(), 8).unwrap().load_u64((at - base) as usize, Relaxed)
    }

    #[test]
    fn both_copies_of_the_table_have_each_page_in_its_slot() {
        let domain = DmaDomain::new(|| ());
        for pages in [3, 256, 257, 511, 512, 513, 1100] {
            let (region, mapping) = mapping(&domain, pages * PAGE_BYTES, 0, (pages * PAGE_BYTES) as u64);
            let addresses = mapping.addresses(own).unwrap();
            assert!(addresses.is_contiguous() && addresses.lead() == 0);
            assert_eq!(addresses.base(), own(&region, 0).unwrap());
            let (table, _) = mapping.table().unwrap();
            let start = own(table, 0).unwrap();
            let [a, b] = addresses.tables().unwrap();
            assert_eq!((a % 4096, b % 4096), (0, 2048));
            for slot in 0..pages as u64 {
                let page = addresses.base() + slot * 4096;
                assert_eq!((word(table, start, a + 8 * slot), word(table, start, b + 8 * slot)), (page, page));
            }
        }
    }

    #[test]
    fn a_table_slot_has_257_others_behind_it_in_its_page() {
        for slot in 0..4096_u64 {
            let at = if slot & 256 == 0 { 8 * slot } else { 2048 + 8 * slot };
            let left = (4096 - at % 4096) / 8;
            assert!(left >= 257 && left == 512 - (slot & 255), "slot {slot}");
        }
    }

    #[test]
    fn addresses_are_known_once_all_are() {
        let domain = DmaDomain::new(|| ());
        let (region, mapping) = mapping(&domain, 3 * PAGE_BYTES, 100, 8192);
        assert!(mapping.addresses(|_, _| None).is_none());
        assert!(mapping.addresses(|of, at| own(of, at).filter(|_| at < 8192)).is_none());
        // Pages are not at the same place on both sides.
        assert!(mapping.addresses(|_, at| Some(0x1_0000 + at / 4096 * 0x3008)).is_none());
        let scattered = |of: &Arc<Region>, at: u64| {
            let is_data = Arc::ptr_eq(of, &region);
            Some(if is_data { 0x10_0000 - at / 4096 * 0x2000 + at % 4096 } else { 0x20_0000 + at })
        };
        let addresses = mapping.addresses(scattered).unwrap();
        assert_eq!((addresses.lead(), &addresses.pages()[..]), (100, &[0x10_0000, 0xf_e000, 0xf_c000][..]));
        assert_eq!(addresses.tables(), Some([0x20_0000, 0x20_0000 + 4096 + 2048]));
        assert!(Arc::ptr_eq(&mapping.addresses(scattered).unwrap(), &addresses), "they are kept");
    }

    #[test]
    fn addresses_are_looked_up_again_when_a_device_has_others() {
        let domain = DmaDomain::new(|| ());
        let (region, mapping) = mapping(&domain, 600 * PAGE_BYTES, 4096, 599 * 4096);
        let at = |data: u64, table: u64| {
            let region = Arc::clone(&region);
            move |of: &Arc<Region>, at: u64| Some(at + if Arc::ptr_eq(of, &region) { data } else { table })
        };
        let (memory, _) = mapping.table().unwrap();
        for (data, table) in [(1_u64 << 40, 1_u64 << 50), (1 << 41, 1 << 50), (1 << 41, 1 << 51), (1 << 40, 1 << 50)] {
            let addresses = mapping.addresses(at(data, table)).unwrap();
            let [a, b] = addresses.tables().unwrap();
            assert_eq!((addresses.base(), a), (data + 4096, table));
            for slot in [0, 1, 255, 256, 598] {
                let page = data + 4096 + slot * 4096;
                assert_eq!([a, b].map(|copy| word(memory, table, copy + 8 * slot)), [page; 2], "slot {slot}");
            }
        }
        // A device that no longer has room for the table, or for the buffer.
        let without_table = |of: &Arc<Region>, at: u64| Arc::ptr_eq(of, &region).then_some((1 << 40) + at);
        assert_eq!(mapping.addresses(without_table).unwrap().tables(), None);
        assert!(mapping.addresses(|_, _| None).is_none());
        assert!(mapping.addresses(at(1 << 40, 1 << 50)).unwrap().tables().is_some());
    }

    #[test]
    fn a_table_that_devices_do_not_reach_in_a_row_is_not_used() {
        let domain = DmaDomain::new(|| ());
        let (region, mapping) = mapping(&domain, 1100 * PAGE_BYTES, 0, 1100 * PAGE_BYTES as u64);
        let torn =
            |of: &Arc<Region>, at: u64| if Arc::ptr_eq(of, &region) { own(of, at) } else { Some((at / 4096) << 20) };
        assert_eq!(mapping.addresses(torn).unwrap().tables(), None);
    }

    #[test]
    fn a_bounced_buffer_is_copied_byte_by_byte_as_asked() {
        let domain = DmaDomain::bounced(|| ());
        let (region, mapping) = mapping(&domain, 4 * PAGE_BYTES, 100, 3 * 4096);
        assert!(mapping.needs_sync() && domain.regions().iter().all(|mapped| !Arc::ptr_eq(mapped, &region)));
        let bounce = &mapping.bounce.as_ref().unwrap().region;
        let ours = region.span(100, 3 * 4096).unwrap();
        let device = bounce.span(100, 3 * 4096).unwrap();
        let copied = |span: &Span<'_>| {
            let mut bytes = vec![0; span.len()];
            span.copy_to_slice(&mut bytes);
            bytes
        };
        for (at, len) in [(0, 1), (0, 12288), (3995, 2), (4000, 5000), (12287, 1), (1, 4095), (3996, 8192)] {
            let asked = at as usize..(at + u64::from(len)) as usize;
            ours.fill(1);
            device.fill(2);
            mapping.sync_for_device(100 + at, len);
            let bytes = copied(&device);
            assert!(bytes.iter().enumerate().all(|(n, byte)| *byte == if asked.contains(&n) { 1 } else { 2 }), "{at}");
            ours.fill(1);
            device.fill(2);
            mapping.sync_for_cpu(100 + at, len);
            let bytes = copied(&ours);
            assert!(bytes.iter().enumerate().all(|(n, byte)| *byte == if asked.contains(&n) { 2 } else { 1 }), "{at}");
        }
    }
}
