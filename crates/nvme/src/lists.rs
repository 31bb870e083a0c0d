//! Data pointers of commands, host side: PRP entries and lists, SGL descriptors, and the ranges of a deallocation.
//!
//! Lists are written into memory that is shared with the controller from the start ([`ListPool`]). Each slot of a queue
//! has a small block; longer lists take pages from a shared pool. No memory is allocated per I/O.
//!
//! ```text
//!  ┌────────┬────────┬─  ─┬─────────┬─────────┬─
//!  │ page 0 │ page 1 │ …  │ block 0 │ block 1 │ …     4096 bytes a page, 256 a block
//!  └────────┴────────┴─  ─┴─────────┴─────────┴─
//! ```

use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::View;

use crate::io_queue::reallocate;
use crate::{DmaSegment, DsmRange, PAGE, Psdt};

/// Maximum transfer, bytes: the capacity of five list pages at any alignment, as in Linux's driver.
pub const TRANSFER_BYTES_MAX: u64 = 8 << 20;
/// Maximum SGL descriptors of a command: one page of them.
pub const SGL_DESCRIPTORS_MAX: usize = PAGE as usize / SGL_BYTES;

/// Bytes of a PRP entry.
const PRP_BYTES: usize = 8;
/// PRP entries of a page.
const PAGE_PRPS: u64 = PAGE / PRP_BYTES as u64;
/// Bytes of an SGL descriptor.
pub(crate) const SGL_BYTES: usize = 16;
/// Bytes of a small block. Aligned to its size, it never crosses a page.
const BLOCK_BYTES: usize = 256;
/// Maximum list pages of one command: 8 MiB starting within a page have 2048 pointers, in pages of 511 and a link.
const PAGES_MAX: usize = 5;

/// Kinds of SGL descriptors, as in the last byte of one.
pub(crate) mod sgl {
    pub(crate) const DATA_BLOCK: u8 = 0x00;
    pub(crate) const SEGMENT: u8 = 0x20;
    pub(crate) const LAST_SEGMENT: u8 = 0x30;

    /// An SGL descriptor as two words of memory.
    pub(crate) const fn words(kind: u8, addr: u64, len: u32) -> [u64; 2] {
        [addr, len as u64 | (kind as u64) << 56]
    }
}

/// Reason why a command's data cannot be described by a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// The pages for long lists are in use: a request must complete first.
    #[error("all list pages are in use")]
    NoPages,
    /// The data is not aligned to a dword.
    #[error("data is not aligned to a dword")]
    Unaligned,
    /// Two segments do not meet on a page boundary.
    #[error("segments do not meet on page boundaries")]
    Gap,
    /// More than [`TRANSFER_BYTES_MAX`].
    #[error("data is longer than a command may transfer")]
    TooLong,
    /// More segments than [`SGL_DESCRIPTORS_MAX`].
    #[error("more segments than an SGL may have")]
    TooMany,
    /// The lengths of the segments do not add up to that of the command, or there are no segments.
    #[error("segments do not add up to the length of the command")]
    Length,
}

/// The PRP entries for `bytes` of data that are one segment, if they need no list: most I/O takes this path only.
#[inline]
pub(crate) fn without_list(segment: DmaSegment, bytes: u64) -> Option<[u64; 2]> {
    let DmaSegment { addr, len } = segment;
    let end = addr % PAGE + bytes;
    let needs_none = addr.is_multiple_of(4) && len == bytes && end <= 2 * PAGE;
    needs_none.then(|| [addr, if end > PAGE { next_page(addr) } else { 0 }])
}

/// Iterator over segments that joins contiguous ones.
#[derive(Clone, Debug)]
struct JoinedSegments<I> {
    segments: I,
    next: Option<DmaSegment>,
}

impl<I: Iterator<Item = DmaSegment>> JoinedSegments<I> {
    fn new(mut segments: I) -> JoinedSegments<I> {
        let next = segments.next();
        JoinedSegments { segments, next }
    }
}

impl<I: Iterator<Item = DmaSegment>> Iterator for JoinedSegments<I> {
    type Item = DmaSegment;

    #[inline]
    fn next(&mut self) -> Option<DmaSegment> {
        let mut run = self.next?;
        loop {
            self.next = self.segments.next();
            match self.next {
                Some(next) if run.addr.wrapping_add(run.len) == next.addr => run.len += next.len,
                _ => return Some(run),
            }
        }
    }
}

/// List pages held by a slot.
#[derive(Clone, Copy, Debug, Default)]
struct HeldPages {
    pages: [u16; PAGES_MAX],
    count: u8,
    /// Its data is to be copied back when the command has completed.
    needs_sync: bool,
}

impl HeldPages {
    /// Whether anything is to be done at the end of the command.
    #[inline]
    fn is_empty(self) -> bool {
        self.count == 0 && !self.needs_sync
    }
}

/// Memory for the lists of one queue.
#[derive(Debug)]
pub struct ListPool {
    view: View,
    addr: u64,
    /// Offset of the small blocks.
    blocks_at: usize,
    free_pages: Vec<u16>,
    held: Box<[HeldPages]>,
}

impl ListPool {
    pub(crate) fn move_to_node(&mut self, node: u32) {
        self.view.prefer_node(node);
        reallocate(&mut self.held);
    }

    /// Bytes for `slots` commands and `pages` list pages.
    pub fn bytes(slots: u16, pages: u16) -> usize {
        (usize::from(pages) * PAGE as usize + usize::from(slots) * BLOCK_BYTES).next_multiple_of(PAGE as usize)
    }

    /// Lists in this memory, which the controller accesses at `addr`. The maximum transfer needs at least five pages.
    ///
    /// # Panics
    /// If the memory is too short or not page-aligned, or the pages do not suffice: the caller computes the layout.
    pub fn new(view: View, addr: u64, slots: u16, pages: u16) -> ListPool {
        assert!(
            view.len() >= ListPool::bytes(slots, pages) && addr.is_multiple_of(PAGE),
            "lists in {} bytes at {addr:#x}",
            view.len()
        );
        assert!(usize::from(pages) >= PAGES_MAX, "{pages} list pages");
        ListPool {
            view,
            addr,
            blocks_at: usize::from(pages) * PAGE as usize,
            free_pages: (0..pages).rev().collect(),
            held: vec![HeldPages::default(); usize::from(slots)].into(),
        }
    }

    /// The data pointer of a command for `bytes` of data in these segments, which are at most `count`. A controller
    /// with an SGL threshold accepts SGLs. They are used where PRP entries are impossible and, if the threshold is not
    /// zero, for more than two pages where the average segment has at least that many bytes. Uses the slot's lists
    /// until [`ListPool::release`].
    ///
    /// The segments are walked once, and again only if two of them meet within a page.
    ///
    /// # Errors
    /// See [`ListError`]; the slot holds no list then.
    #[inline]
    pub fn map(
        &mut self,
        slot: u16,
        bytes: u64,
        segments: impl Iterator<Item = DmaSegment> + Clone,
        count: u64,
        sgl_threshold: Option<u32>,
    ) -> Result<(Psdt, [u64; 2]), ListError> {
        let takes_sgl = sgl_threshold.is_some();
        let prefers_sgl = bytes > 2 * PAGE
            && count <= SGL_DESCRIPTORS_MAX as u64
            && sgl_threshold.is_some_and(|threshold| threshold > 0 && bytes >= u64::from(threshold) * count);
        if !prefers_sgl {
            match self.prp(slot, bytes, segments.clone()) {
                Err(ListError::Gap) if takes_sgl => {}
                made => return made.map(|pointer| (Psdt::Prp, pointer)),
            }
        }
        self.sgl(slot, bytes, segments, count).map(|pointer| (Psdt::Sgl, pointer))
    }

    /// Two PRP entries for these segments; the second may be the address of a list.
    ///
    /// # Errors
    /// See [`ListError`]; the slot holds no list then.
    #[inline]
    pub fn prp(
        &mut self,
        slot: u16,
        bytes: u64,
        segments: impl Iterator<Item = DmaSegment>,
    ) -> Result<[u64; 2], ListError> {
        let mut runs = JoinedSegments::new(segments);
        let first = runs.next().ok_or(ListError::Length)?;
        if first.addr & 3 != 0 {
            return Err(ListError::Unaligned);
        }
        if let Some(entries) = without_list(first, bytes).filter(|_| runs.next.is_none()) {
            return Ok(entries);
        }
        self.prp_list(slot, bytes, first, runs).inspect_err(|_| _ = self.release(slot))
    }

    fn prp_list(
        &mut self,
        slot: u16,
        bytes: u64,
        first: DmaSegment,
        runs: impl Iterator<Item = DmaSegment>,
    ) -> Result<[u64; 2], ListError> {
        if bytes > TRANSFER_BYTES_MAX {
            return Err(ListError::TooLong);
        }
        // Only the first segment starts within a page and only the last one ends within one, so this is the number of
        // pointers.
        let pointers = (first.addr % PAGE + bytes).div_ceil(PAGE) - 1;
        let mut list = self.begin_list(slot, pointers)?;
        let (mut left, mut second, mut total, mut run) = (pointers, 0, 0, first);
        let mut at = next_page(run.addr);
        let mut rest = runs;
        loop {
            total += run.len;
            let end = run.addr.wrapping_add(run.len);
            // Counted by length, since the last page has no successor.
            let mut covered = at.wrapping_sub(run.addr);
            while covered < run.len {
                if left == 0 {
                    return Err(ListError::Length);
                }
                if pointers == 1 {
                    second = at;
                } else {
                    self.put_pointer(slot, &mut list, at, left);
                }
                left -= 1;
                at = at.wrapping_add(PAGE);
                covered += PAGE;
            }
            let Some(next) = rest.next() else { break };
            if (end | next.addr) & (PAGE - 1) != 0 {
                return Err(ListError::Gap);
            }
            run = next;
            at = run.addr;
        }
        if left > 0 || total != bytes {
            return Err(ListError::Length);
        }
        Ok([first.addr, if pointers > 1 { self.addr + list.start as u64 } else { second }])
    }

    /// An SGL for these segments, which are at most `count`: a single descriptor, or a list of descriptors.
    ///
    /// # Errors
    /// See [`ListError`]; the slot holds no list then.
    pub fn sgl(
        &mut self,
        slot: u16,
        bytes: u64,
        segments: impl Iterator<Item = DmaSegment>,
        count: u64,
    ) -> Result<[u64; 2], ListError> {
        self.sgl_list(slot, bytes, segments, count).inspect_err(|_| _ = self.release(slot))
    }

    fn sgl_list(
        &mut self,
        slot: u16,
        bytes: u64,
        segments: impl Iterator<Item = DmaSegment>,
        count: u64,
    ) -> Result<[u64; 2], ListError> {
        if bytes > TRANSFER_BYTES_MAX {
            return Err(ListError::TooLong);
        }
        let room = count.min(SGL_DESCRIPTORS_MAX as u64) as usize;
        let start = self.room(slot, room, SGL_BYTES)?;
        let (mut used, mut total, mut bits, mut only) = (0, 0, 0, [0; 2]);
        for run in JoinedSegments::new(segments) {
            if used == room {
                return Err(ListError::TooMany);
            }
            only = sgl::words(sgl::DATA_BLOCK, run.addr, run.len as u32);
            self.view.store_u64s(start + used * SGL_BYTES, only, Relaxed);
            (used, total, bits) = (used + 1, total + run.len, bits | run.addr | run.len);
            if total > bytes {
                return Err(ListError::Length);
            }
        }
        if total < bytes || used == 0 {
            return Err(ListError::Length);
        }
        if bits & 3 != 0 {
            return Err(ListError::Unaligned);
        }
        match used {
            1 => Ok(only),
            _ => Ok(sgl::words(sgl::LAST_SEGMENT, self.addr + start as u64, (used * SGL_BYTES) as u32)),
        }
    }

    /// Writes the ranges of a deallocation. Returns their number and the two PRP entries.
    ///
    /// # Errors
    /// [`ListError::NoPages`], or [`ListError::TooMany`] for more than 256.
    pub fn ranges(
        &mut self,
        slot: u16,
        ranges: impl Iterator<Item = DsmRange> + Clone,
    ) -> Result<(u16, [u64; 2]), ListError> {
        let count = ranges.clone().count();
        let at = self.room(slot, count, size_of::<[u64; 2]>())?;
        for (number, range) in ranges.enumerate() {
            self.view.store_u64s(at + number * size_of::<[u64; 2]>(), range.words(), Relaxed);
        }
        Ok((count as u16, [self.addr + at as u64, 0]))
    }

    /// Frees the lists of a slot after the end of its command. Returns whether its data [needs to be
    /// copied](blkyard_mem::BufferMapping::sync_for_cpu).
    #[inline]
    pub fn release(&mut self, slot: u16) -> bool {
        let held = &mut self.held[usize::from(slot)];
        if held.is_empty() {
            return false;
        }
        self.free_pages.extend(&held.pages[..usize::from(held.count)]);
        held.count = 0;
        std::mem::take(&mut held.needs_sync)
    }

    /// The data of the command in this slot is to be copied after its end.
    pub(crate) fn needs_sync(&mut self, slot: u16) {
        self.held[usize::from(slot)].needs_sync = true;
    }

    /// Number of free list pages.
    pub fn free_pages(&self) -> usize {
        self.free_pages.len()
    }

    /// Offset of a slot's small block.
    fn block(&self, slot: u16) -> usize {
        self.blocks_at + usize::from(slot) * BLOCK_BYTES
    }

    /// Room for `count` entries: the slot's block or a page.
    fn room(&mut self, slot: u16, count: usize, entry_bytes: usize) -> Result<usize, ListError> {
        if count * entry_bytes <= BLOCK_BYTES {
            return Ok(self.block(slot));
        }
        if count * entry_bytes > PAGE as usize {
            return Err(ListError::TooMany);
        }
        self.take_pages(slot, 1)?;
        Ok(self.page(slot, 0))
    }

    /// Room for this number of pointers.
    fn begin_list(&mut self, slot: u16, pointers: u64) -> Result<PrpList, ListError> {
        let start = if pointers <= (BLOCK_BYTES / PRP_BYTES) as u64 {
            self.block(slot)
        } else {
            // Each page except the last has a link in its last entry.
            let links = (pointers - 2) / (PAGE_PRPS - 1);
            self.take_pages(slot, links as usize + 1)?;
            self.page(slot, 0)
        };
        Ok(PrpList { start, at: start, page: 0 })
    }

    /// Writes the next pointer of a list; `left` pointers remain, including this one.
    #[inline]
    fn put_pointer(&self, slot: u16, list: &mut PrpList, pointer: u64, left: u64) {
        let is_last_entry = list.at % PAGE as usize == PAGE as usize - PRP_BYTES;
        if is_last_entry && left > 1 {
            list.page += 1;
            let next = self.page(slot, list.page);
            self.view.store_u64(list.at, self.addr + next as u64, Relaxed);
            list.at = next;
        }
        self.view.store_u64(list.at, pointer, Relaxed);
        list.at += PRP_BYTES;
    }

    fn take_pages(&mut self, slot: u16, count: usize) -> Result<(), ListError> {
        if self.free_pages.len() < count {
            return Err(ListError::NoPages);
        }
        let held = &mut self.held[usize::from(slot)];
        assert!(held.count == 0, "slot {slot} holds list pages already");
        for place in &mut held.pages[..count] {
            *place = self.free_pages.pop().unwrap_or_default();
        }
        held.count = count as u8;
        Ok(())
    }

    /// Offset of a page held by a slot.
    fn page(&self, slot: u16, number: usize) -> usize {
        usize::from(self.held[usize::from(slot)].pages[number]) * PAGE as usize
    }
}

/// A PRP list being written. Offsets are relative to the pool.
struct PrpList {
    start: usize,
    at: usize,
    /// Index of the page among the slot's pages.
    page: usize,
}

/// First address after this page.
#[inline]
const fn next_page(addr: u64) -> u64 {
    (addr | (PAGE - 1)).wrapping_add(1)
}
