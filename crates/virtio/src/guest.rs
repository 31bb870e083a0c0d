//! Translation of the guest's addresses to mapped memory.
//!
//! An immutable snapshot, shared by the queues of one device and replaced as a whole when the guest's memory changes.
//! Ranges are checked when the snapshot is made, so that a translated address always has bytes behind it. It copies no
//! data and stores nothing between calls: the caller remembers the range hit last.

use std::sync::Arc;

use blkyard_mem::{RegionTable, Segment, Span, View};

/// A run of guest memory and the region that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    /// First byte as the guest's devices see it (guest physical).
    pub guest_addr: u64,
    /// First byte as the front-end's process sees it; ring addresses of vhost-user are of this kind.
    pub user_addr: u64,
    /// Bytes.
    pub len: u64,
    /// Which region of the table holds it.
    pub region: u32,
    /// Where in that region it begins.
    pub offset: u64,
}

/// Ranges that no snapshot can be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// A range without bytes, or one that runs beyond the last address.
    #[error("the range of {len} bytes at {guest_addr:#x} is empty or runs beyond the last address")]
    Extent {
        /// First byte, guest physical.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Two ranges claim the same address.
    #[error("the ranges at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// First byte of the lower range.
        first: u64,
        /// First byte of the higher range.
        second: u64,
    },
    /// Two ranges claim the same address of the front-end's process.
    #[error(
        "the ranges at {first:#x} and {second:#x} overlap in the front-end's own addresses, {first_user:#x} and \
         {second_user:#x}; each user address may belong to one range"
    )]
    UserOverlap {
        /// First byte of the range at the lower user address, guest physical.
        first: u64,
        /// First byte of the other one, guest physical.
        second: u64,
        /// First byte of the first range, in the front-end's process.
        first_user: u64,
        /// First byte of the second range, in the front-end's process.
        second_user: u64,
    },
    /// The range is longer than its region, or there is no such region.
    #[error("the range at {guest_addr:#x} does not lie in its region")]
    Region {
        /// First byte, guest physical.
        guest_addr: u64,
    },
}

/// Why guest addresses became no segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TranslateError {
    /// Some of the bytes are not in guest memory.
    #[error("not in guest memory")]
    NotMapped,
    /// The list of segments is full.
    #[error("more segments than fit in a bio")]
    Full,
}

/// The memory a guest shares with us.
#[derive(Debug)]
pub struct GuestMemory {
    table: Arc<RegionTable>,
    /// By guest address, without overlap.
    ranges: Box<[GuestRange]>,
    /// The bytes of each range, without the detour by the table.
    views: Box<[View]>,
}

impl GuestMemory {
    /// A snapshot of these ranges of the table's regions.
    ///
    /// # Errors
    /// A range is empty, wraps, overlaps another, or does not lie in its region.
    pub fn new(table: Arc<RegionTable>, mut ranges: Vec<GuestRange>) -> Result<GuestMemory, RangeError> {
        ranges.sort_by_key(|range| range.guest_addr);
        let mut views = Vec::with_capacity(ranges.len());
        for range in &ranges {
            let (guest_addr, len) = (range.guest_addr, range.len);
            let last = len.checked_sub(1).ok_or(RangeError::Extent { guest_addr, len })?;
            if guest_addr.checked_add(last).is_none() || range.user_addr.checked_add(last).is_none() {
                return Err(RangeError::Extent { guest_addr, len });
            }
            let region = table.region(range.region).ok_or(RangeError::Region { guest_addr })?;
            let view = usize::try_from(len).ok().and_then(|len| View::new(Arc::clone(region), range.offset, len, 1));
            views.push(view.ok_or(RangeError::Region { guest_addr })?);
        }
        for pair in ranges.windows(2) {
            if pair[1].guest_addr - pair[0].guest_addr < pair[0].len {
                return Err(RangeError::Overlap { first: pair[0].guest_addr, second: pair[1].guest_addr });
            }
        }
        let mut by_user = ranges.clone();
        by_user.sort_by_key(|range| range.user_addr);
        for pair in by_user.windows(2) {
            if pair[1].user_addr - pair[0].user_addr < pair[0].len {
                return Err(RangeError::UserOverlap {
                    first: pair[0].guest_addr,
                    second: pair[1].guest_addr,
                    first_user: pair[0].user_addr,
                    second_user: pair[1].user_addr,
                });
            }
        }
        Ok(GuestMemory { table, ranges: ranges.into(), views: views.into() })
    }

    /// The regions that translated segments point into.
    #[inline]
    pub fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// The ranges, by guest address.
    pub fn ranges(&self) -> &[GuestRange] {
        &self.ranges
    }

    /// Whether the file behind any of the memory was cut short while mapped.
    #[inline]
    pub fn is_faulted(&self) -> bool {
        self.table.is_faulted()
    }

    /// Appends the segments that hold `len` bytes from guest address `addr` on: one, or several where ranges meet.
    /// `hint` is any number at first and afterwards the caller's memory of the range hit last. The list of segments
    /// never grows beyond its capacity.
    ///
    /// # Errors Not all bytes are in guest memory, or the list is full; the list is unchanged then.
    pub fn translate(
        &self,
        addr: u64,
        len: u32,
        hint: &mut usize,
        out: &mut Vec<Segment>,
    ) -> Result<(), TranslateError> {
        let before = out.len();
        let room = out.capacity();
        let outcome = self.for_each(addr, len, hint, |segment| {
            let fits = out.len() < room;
            if fits {
                out.push(segment);
            }
            fits
        });
        if outcome.is_err() {
            out.truncate(before);
        }
        outcome
    }

    /// The same into a slice; returns the number of entries filled.
    pub(crate) fn translate_into(
        &self,
        addr: u64,
        len: u32,
        hint: &mut usize,
        room: &mut [Segment],
    ) -> Result<usize, TranslateError> {
        let mut filled = 0;
        self.for_each(addr, len, hint, |segment| {
            let Some(place) = room.get_mut(filled) else { return false };
            *place = segment;
            filled += 1;
            true
        })?;
        Ok(filled)
    }

    /// Calls `put` with each segment until it returns that there is no more room.
    #[inline]
    fn for_each(
        &self,
        mut addr: u64,
        mut len: u32,
        hint: &mut usize,
        mut put: impl FnMut(Segment) -> bool,
    ) -> Result<(), TranslateError> {
        // Each turn moves on to the next range or ends: as many turns as there are ranges, at most.
        while len > 0 {
            let index = self.find(addr).ok_or(TranslateError::NotMapped)?;
            *hint = index;
            let range = &self.ranges[index];
            let left = range.len - (addr - range.guest_addr);
            let here = u32::try_from(left).map_or(len, |left| left.min(len));
            let segment = range.segment(addr, here).ok_or(TranslateError::NotMapped)?;
            if !put(segment) {
                return Err(TranslateError::Full);
            }
            len -= here;
            match addr.checked_add(u64::from(here)) {
                Some(next) => addr = next,
                None if len > 0 => return Err(TranslateError::NotMapped),
                None => {}
            }
        }
        Ok(())
    }

    /// The range of a hint; empty without one.
    #[inline]
    pub(crate) fn range(&self, hint: usize) -> &GuestRange {
        const NONE: &GuestRange = &GuestRange { guest_addr: 0, user_addr: 0, len: 0, region: 0, offset: 0 };
        self.ranges.get(hint).unwrap_or(NONE)
    }

    /// `len` bytes at an address, if they lie in the range of a hint.
    #[inline]
    pub(crate) fn span(&self, hint: usize, addr: u64, len: u32) -> Option<Span<'_>> {
        self.views.get(hint)?.span(addr.wrapping_sub(self.range(hint).guest_addr), len as usize)
    }

    /// Guest address and bytes of a hint's range; empty without one.
    #[inline]
    pub(crate) fn bytes_of(&self, hint: usize) -> (u64, Span<'_>) {
        let span = self.views.get(hint).and_then(|view| view.span(0, view.len()));
        (self.range(hint).guest_addr, span.unwrap_or_default())
    }

    /// The one segment that holds `len` bytes at `addr`, if they lie in one range; `hint` is known not to be it.
    #[inline(never)]
    pub(crate) fn segment_elsewhere(&self, addr: u64, len: u32, hint: &mut usize) -> Option<Segment> {
        let index = self.find(addr)?;
        *hint = index;
        self.ranges[index].segment(addr, len)
    }

    /// Copies bytes out of guest memory, across ranges if necessary. False if not all are mapped; `to` is undefined
    /// then.
    pub(crate) fn read(&self, mut addr: u64, mut to: &mut [u8]) -> bool {
        while !to.is_empty() {
            let Some(index) = self.find(addr) else { return false };
            let range = &self.ranges[index];
            let left = range.len - (addr - range.guest_addr);
            let here = usize::try_from(left).map_or(to.len(), |left| left.min(to.len()));
            let (part, rest) = to.split_at_mut(here);
            let Some(span) = range.segment(addr, here as u32).and_then(|segment| self.table.resolve_region(segment))
            else {
                return false;
            };
            span.copy_to_slice(part);
            to = rest;
            addr = match addr.checked_add(here as u64) {
                Some(next) => next,
                None => return to.is_empty(),
            };
        }
        true
    }

    /// The fields at an address of the front-end's process, if `len` bytes from it lie in one range and it is a
    /// multiple of `align` in our memory.
    pub fn view_user(&self, user_addr: u64, len: usize, align: usize) -> Option<View> {
        let holds = |range: &&GuestRange| {
            let into = user_addr.wrapping_sub(range.user_addr);
            into < range.len && len as u64 <= range.len - into
        };
        let range = self.ranges.iter().find(holds)?;
        let region = self.table.region(range.region)?;
        View::new(Arc::clone(region), range.offset + (user_addr - range.user_addr), len, align)
    }

    /// The guest address of a segment's first byte, if it lies in one range.
    pub fn guest_addr(&self, segment: Segment) -> Option<u64> {
        let holds = |range: &&GuestRange| {
            let into = segment.offset.wrapping_sub(range.offset);
            range.region == segment.region && into < range.len && u64::from(segment.len) <= range.len - into
        };
        let range = self.ranges.iter().find(holds)?;
        Some(range.guest_addr + (segment.offset - range.offset))
    }

    /// Guest address for an address of the front-end's process.
    pub fn guest_addr_of_user(&self, user_addr: u64) -> Option<u64> {
        let into = |range: &GuestRange| user_addr.wrapping_sub(range.user_addr);
        let range = self.ranges.iter().find(|range| into(range) < range.len)?;
        Some(range.guest_addr + into(range))
    }

    fn find(&self, addr: u64) -> Option<usize> {
        let index = self.ranges.partition_point(|range| range.guest_addr <= addr).checked_sub(1)?;
        (addr - self.ranges[index].guest_addr < self.ranges[index].len).then_some(index)
    }
}

impl GuestRange {
    /// The segment of `len` bytes at guest address `addr`, if they lie in this range.
    #[inline]
    pub(crate) fn segment(&self, addr: u64, len: u32) -> Option<Segment> {
        let into = addr.wrapping_sub(self.guest_addr);
        (into < self.len && u64::from(len) <= self.len - into).then(|| Segment {
            offset: self.offset + into,
            len,
            region: self.region,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mem::Region;

    /// Three regions: 64 KiB at 0x10000; 4 KiB right after it, from the middle of its region; 8 KiB at the very top.
    fn memory() -> GuestMemory {
        let regions = [0x10000, 0x3000, 0x2000].map(|len| Region::anonymous(len).unwrap());
        let range =
            |guest_addr, user_addr, len, region, offset| GuestRange { guest_addr, user_addr, len, region, offset };
        GuestMemory::new(
            Arc::new(RegionTable::new(regions.into())),
            vec![
                range(u64::MAX - 0x1fff, 0x9000_0000, 0x2000, 2, 0),
                range(0x2_0000, 0x7000_0000, 0x1000, 1, 0x1000),
                range(0x1_0000, 0x8000_0000, 0x1_0000, 0, 0),
            ],
        )
        .unwrap()
    }

    #[test]
    fn addresses_become_segments() {
        const TOP: u64 = u64::MAX - 0x1fff;
        let s = |region, offset, len| Segment { region, offset, len };
        let no = Err(TranslateError::NotMapped);
        let table: &[(&str, u64, u32, Result<Vec<Segment>, TranslateError>)] = &[
            ("first byte", 0x1_0000, 1, Ok(vec![s(0, 0, 1)])),
            ("a whole range", 0x1_0000, 0x1_0000, Ok(vec![s(0, 0, 0x1_0000)])),
            ("the byte before", 0xffff, 1, no.clone()),
            ("in from before", 0xffff, 2, no.clone()),
            ("across two ranges", 0x1_fff0, 0x20, Ok(vec![s(0, 0xfff0, 0x10), s(1, 0x1000, 0x10)])),
            ("both ranges", 0x1_0000, 0x1_1000, Ok(vec![s(0, 0, 0x1_0000), s(1, 0x1000, 0x1000)])),
            ("out at the end", 0x2_0fff, 2, no.clone()),
            ("across both and out", 0x1_fff0, 0x1011, no.clone()),
            ("the last byte of all", u64::MAX, 1, Ok(vec![s(2, 0x1fff, 1)])),
            ("up to the last byte of all", TOP, 0x2000, Ok(vec![s(2, 0, 0x2000)])),
            ("around to zero", u64::MAX, 2, no.clone()),
            ("around to zero, longest", TOP, u32::MAX, no.clone()),
            ("zero", 0, 1, no.clone()),
            ("longest", 0x1_0000, u32::MAX, no.clone()),
        ];
        let memory = memory();
        for (name, addr, len, want) in table {
            for hint in [0, 1, 2, 3, usize::MAX] {
                let mut out = Vec::with_capacity(4);
                let got = memory.translate(*addr, *len, &mut { hint }, &mut out);
                assert_eq!(got.map(|()| out.clone()), *want, "{name}, hint {hint}");
                assert!(want.is_ok() || out.is_empty(), "{name}: what failed leaves nothing behind");
            }
        }
    }

    #[test]
    fn a_full_list_is_not_grown() {
        let memory = memory();
        let mut out = Vec::with_capacity(3);
        let room = out.capacity();
        for _ in 0..room - 1 {
            memory.translate(0x1_0000, 1, &mut 0, &mut out).unwrap();
        }
        assert_eq!(memory.translate(0x1_ffff, 2, &mut 0, &mut out), Err(TranslateError::Full));
        assert_eq!(out.len(), room - 1);
        memory.translate(0x1_0000, 1, &mut 0, &mut out).unwrap();
        assert_eq!(memory.translate(0x1_0000, 1, &mut 0, &mut out), Err(TranslateError::Full));
        assert_eq!(out.capacity(), room);
    }

    #[test]
    fn bytes_are_read_across_ranges() {
        let memory = memory();
        memory.table().region(0).unwrap().span(0xfffe, 2).unwrap().copy_from_slice(b"ab");
        memory.table().region(1).unwrap().span(0x1000, 2).unwrap().copy_from_slice(b"cd");
        let mut bytes = [0; 4];
        assert!(memory.read(0x1_fffe, &mut bytes));
        assert_eq!(&bytes, b"abcd");
        assert!(!memory.read(0x2_0ffe, &mut bytes));
        assert!(!memory.read(u64::MAX - 2, &mut bytes));
        assert!(memory.read(u64::MAX - 3, &mut bytes));
    }

    #[test]
    fn views_lie_in_one_range_and_are_aligned() {
        let memory = memory();
        assert!(memory.view_user(0x8000_0000, 0x1_0000, 4096).is_some());
        assert!(memory.view_user(0x8000_0000, 0x1_0001, 16).is_none());
        assert!(memory.view_user(0x8000_0008, 16, 16).is_none());
        assert!(memory.view_user(0x7000_0000, 0x1000, 16).is_some());
        assert!(memory.view_user(0x7000_0000, 0x1001, 16).is_none(), "the region goes on, the range does not");
        assert!(memory.view_user(0x1_0000, 16, 16).is_none(), "guest addresses are not user addresses");
        assert!(memory.view_user(u64::MAX, 16, 1).is_none());
        assert!(memory.view_user(0x8000_0000, usize::MAX, 1).is_none());
    }

    #[test]
    fn ranges_that_contradict_each_other_are_refused() {
        let table = Arc::new(RegionTable::new(vec![Region::anonymous(0x2000).unwrap()]));
        let range = |guest_addr, len, region, offset| GuestRange { guest_addr, user_addr: 0, len, region, offset };
        let table_of: &[(&str, Vec<GuestRange>, RangeError)] = &[
            ("empty", vec![range(8, 0, 0, 0)], RangeError::Extent { guest_addr: 8, len: 0 }),
            ("wraps", vec![range(u64::MAX, 2, 0, 0)], RangeError::Extent { guest_addr: u64::MAX, len: 2 }),
            ("no region", vec![range(8, 1, 1, 0)], RangeError::Region { guest_addr: 8 }),
            ("beyond its region", vec![range(8, 0x1001, 0, 0x1000)], RangeError::Region { guest_addr: 8 }),
            ("offset wraps", vec![range(8, 1, 0, u64::MAX)], RangeError::Region { guest_addr: 8 }),
            (
                "overlap by a byte",
                vec![range(0x17ff, 8, 0, 0), range(0x1000, 0x800, 0, 0)],
                RangeError::Overlap { first: 0x1000, second: 0x17ff },
            ),
            (
                "twice the same",
                vec![range(0x1000, 8, 0, 0), range(0x1000, 8, 0, 8)],
                RangeError::Overlap { first: 0x1000, second: 0x1000 },
            ),
        ];
        let user = |guest_addr, user_addr, len| GuestRange { guest_addr, user_addr, len, region: 0, offset: 0 };
        let overlap = |first, second, first_user, second_user| {
            let error = GuestMemory::new(Arc::clone(&table), vec![first, second]).unwrap_err();
            let (first, second) = (first.guest_addr.min(second.guest_addr), first.guest_addr.max(second.guest_addr));
            assert_eq!(error, RangeError::UserOverlap { first, second, first_user, second_user });
            let said = error.to_string();
            assert!([first, second, first_user, second_user].iter().all(|at| said.contains(&format!("{at:#x}"))));
        };
        overlap(user(0x9000, 0x7000, 8), user(0x1000, 0x7000, 8), 0x7000, 0x7000);
        overlap(user(0x9000, 0x77ff, 8), user(0x1000, 0x7000, 0x800), 0x7000, 0x77ff);
        let beside = vec![user(0x9000, 0x7800, 8), user(0x1000, 0x7000, 0x800)];
        assert!(GuestMemory::new(Arc::clone(&table), beside).is_ok(), "neighbours do not overlap");
        for (name, ranges, want) in table_of {
            assert_eq!(GuestMemory::new(Arc::clone(&table), ranges.clone()).unwrap_err(), *want, "{name}");
        }
        assert!(GuestMemory::new(table, Vec::new()).is_ok(), "no memory is memory without addresses");
    }
}
