//! Memory shared by host and controller: the mapping of bus addresses to bytes of regions.
//!
//! Used by both sides: the host translates segments to addresses, the controller addresses to segments. A map is
//! immutable and replaced as a whole.

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment, View};

use crate::PAGE;

/// Alignment of shared fields: that of a completion queue entry.
const SHARED_ALIGN: usize = 16;

/// A contiguous range of bus addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaSegment {
    /// First bus address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// How a controller accesses memory of the host, or may do so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DmaRights {
    /// Reads it.
    ReadOnly,
    /// Writes it.
    WriteOnly,
    /// Reads and writes it.
    #[default]
    ReadWrite,
}

impl DmaRights {
    /// Whether they include this access.
    #[inline]
    fn allow(self, access: DmaRights) -> bool {
        self == DmaRights::ReadWrite || self == access
    }
}

/// A part of a region with its bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// First bus address; a multiple of 4096.
    pub addr: u64,
    /// Bytes; a multiple of 4096.
    pub len: u64,
    /// Index of the region in its table.
    pub region: u32,
    /// First byte in the region; a multiple of 4096, so the offset in a page is the same on both sides.
    pub offset: u64,
}

/// Regions by number. Numbers with a distance of [`RegionSet::EXACT`] cannot be told apart: a set that has one of them
/// meets sets with the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionSet([u64; 4]);

impl RegionSet {
    /// Numbers below this are told apart.
    pub const EXACT: u32 = 256;

    /// Adds a region.
    #[inline]
    pub(crate) fn add(&mut self, region: u32) {
        self.0[(region % RegionSet::EXACT / u64::BITS) as usize] |= 1 << (region % u64::BITS);
    }

    /// Adds those that one set has and another lacks.
    pub(crate) fn add_lost(&mut self, before: RegionSet, after: RegionSet) {
        for (word, (before, after)) in self.0.iter_mut().zip(before.0.into_iter().zip(after.0)) {
            *word |= before & !after;
        }
    }

    /// Whether both have a region.
    pub(crate) fn meets(self, other: RegionSet) -> bool {
        self.0.into_iter().zip(other.0).any(|(one, other)| one & other != 0)
    }
}

/// Reason why ranges are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaMapError {
    /// An address, length or offset is no multiple of a page, or the length is zero.
    #[error("DMA range at {0:#x}: address, length and offset must be multiples of 4096 and the length not zero")]
    Unaligned(u64),
    /// The range ends beyond its region, or the region does not exist.
    #[error("DMA range at {0:#x}: lies outside its memory region")]
    OutsideRegion(u64),
    /// The range ends beyond the last address, or overlaps another.
    #[error("DMA range at {0:#x}: overlaps with another range or with the end of the address space")]
    Overlap(u64),
}

/// Ranges of bus addresses with their memory.
#[derive(Clone, Debug, Default)]
pub struct DmaMap {
    table: Arc<RegionTable>,
    /// Sorted by address.
    ranges: Vec<(DmaRange, DmaRights)>,
    /// The same, sorted by region and offset.
    by_region: Vec<DmaRange>,
}

impl DmaMap {
    /// A map of these ranges, in any order, which the controller reads and writes.
    ///
    /// # Errors
    /// See [`DmaMapError`].
    pub fn new(table: Arc<RegionTable>, ranges: Vec<DmaRange>) -> Result<DmaMap, DmaMapError> {
        DmaMap::with_rights(table, ranges.into_iter().map(|range| (range, DmaRights::ReadWrite)).collect())
    }

    /// The same with the controller's rights for each range.
    ///
    /// # Errors
    /// See [`DmaMapError`].
    pub fn with_rights(table: Arc<RegionTable>, mut ranges: Vec<(DmaRange, DmaRights)>) -> Result<DmaMap, DmaMapError> {
        for (range, _) in &ranges {
            if range.len == 0 || (range.addr | range.len | range.offset) & (PAGE - 1) != 0 {
                return Err(DmaMapError::Unaligned(range.addr));
            }
            if range.addr.checked_add(range.len).is_none() {
                return Err(DmaMapError::Overlap(range.addr));
            }
            let region_bytes = table.region(range.region).map_or(0, |region| region.len() as u64);
            if range.offset.checked_add(range.len).is_none_or(|end| end > region_bytes) {
                return Err(DmaMapError::OutsideRegion(range.addr));
            }
        }
        ranges.sort_unstable_by_key(|(range, _)| range.addr);
        let mut by_region: Vec<_> = ranges.iter().map(|(range, _)| *range).collect();
        if let Some(pair) = by_region.windows(2).find(|pair| pair[0].addr + pair[0].len > pair[1].addr) {
            return Err(DmaMapError::Overlap(pair[1].addr));
        }
        by_region.sort_unstable_by_key(|range| (range.region, range.offset));
        Ok(DmaMap { table, ranges, by_region })
    }

    /// The regions that the segments point into.
    pub fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// The regions with an address.
    pub(crate) fn regions(&self) -> RegionSet {
        let mut regions = RegionSet::default();
        self.ranges.iter().for_each(|(range, _)| regions.add(range.region));
        regions
    }

    /// Bus address of a segment; `None` if it is not mapped contiguously.
    #[inline]
    pub fn addr(&self, segment: Segment) -> Option<u64> {
        let key = (segment.region, segment.offset);
        let after = self.by_region.partition_point(|range| (range.region, range.offset) <= key);
        let range = self.by_region[..after].last().filter(|range| range.region == segment.region)?;
        let skip = segment.offset - range.offset;
        (skip < range.len && u64::from(segment.len) <= range.len - skip).then(|| range.addr + skip)
    }

    /// The mapped bytes from `addr` on in one range, at most `len`; `None` if the address is not mapped for this
    /// access.
    #[inline]
    pub fn segment(&self, addr: u64, len: u32, access: DmaRights) -> Option<Segment> {
        let after = self.ranges.partition_point(|(range, _)| range.addr <= addr);
        let (range, rights) = self.ranges[..after].last()?;
        let skip = addr - range.addr;
        if skip >= range.len || !rights.allow(access) {
            return None;
        }
        let len = (range.len - skip).min(u64::from(len)) as u32;
        Some(Segment { region: range.region, offset: range.offset + skip, len })
    }

    /// The bytes from `addr` as shared fields; `None` if they are not mapped contiguously for this access.
    pub fn view(&self, addr: u64, len: usize, access: DmaRights) -> Option<View> {
        let segment = self.segment(addr, u32::try_from(len).ok()?, access)?;
        let region = self.table.region(segment.region).filter(|_| segment.len as usize == len)?;
        View::new(Arc::clone(region), segment.offset, len, SHARED_ALIGN)
    }

    /// The same ranges, with one more region in the first free slot of the table that has no address; and its index.
    #[must_use]
    pub fn with_region(&self, region: Arc<Region>) -> (DmaMap, u32) {
        let mut table = RegionTable::clone(&self.table);
        let number = table.insert(region);
        (DmaMap { table: Arc::new(table), ..self.clone() }, number)
    }

    /// Copies bytes from `addr` on, each read once. Returns whether all are mapped and may be read.
    #[must_use]
    pub fn read(&self, mut addr: u64, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let Some(segment) = self.segment(addr, len, DmaRights::ReadOnly) else { return false };
            let Some(span) = self.table.resolve_region(segment) else { return false };
            let (now, rest) = bytes.split_at_mut(span.len());
            span.copy_to_slice(now);
            // At the last address, the loop ends or finds no further range.
            addr = addr.wrapping_add(u64::from(segment.len));
            bytes = rest;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: DmaRights = DmaRights::ReadOnly;

    fn map(ranges: &[(u64, u64, u32, u64)]) -> Result<DmaMap, DmaMapError> {
        let regions = vec![Region::anonymous(0x4000).unwrap(), Region::anonymous(0x4000).unwrap()];
        let range = |(addr, len, region, offset): &(u64, u64, u32, u64)| DmaRange {
            addr: *addr,
            len: *len,
            region: *region,
            offset: *offset,
        };
        DmaMap::new(Arc::new(RegionTable::new(regions)), ranges.iter().map(range).collect())
    }

    #[test]
    fn an_address_and_a_segment_name_the_same_bytes() {
        let map = map(&[(0x9000, 0x1000, 0, 0x3000), (0x1000, 0x3000, 1, 0x1000), (0x8000, 0x1000, 1, 0)]).unwrap();
        for (addr, region, offset, len) in
            [(0x1000, 1, 0x1000, 0x3000), (0x1234, 1, 0x1234, 8), (0x8fff, 1, 0xfff, 1), (0x9000, 0, 0x3000, 0x1000)]
        {
            let segment = Segment { region, offset, len };
            assert_eq!((map.addr(segment), map.segment(addr, len, READ)), (Some(addr), Some(segment)));
        }
        for (region, offset, len) in [(0, 0x2fff, 1), (0, 0x3fff, 2), (1, 0xfff, 2), (2, 0, 1), (1, 0x4000, 1)] {
            assert_eq!(map.addr(Segment { region, offset, len }), None, "{region} {offset:#x} {len}");
        }
        assert_eq!(map.segment(0x8ff0, 0x100, READ).unwrap().len, 0x10, "cut where the range ends");
        for addr in [0, 0xfff, 0x4000, 0x7fff, 0xa000, u64::MAX] {
            assert_eq!(map.segment(addr, 1, READ), None, "{addr:#x}");
        }
    }

    #[test]
    fn bytes_are_read_across_ranges() {
        let map = map(&[(0x1000, 0x1000, 0, 0x1000), (0x2000, 0x1000, 1, 0)]).unwrap();
        map.table().region(0).unwrap().span(0x1ffe, 2).unwrap().copy_from_slice(&[1, 2]);
        map.table().region(1).unwrap().span(0, 2).unwrap().copy_from_slice(&[3, 4]);
        let mut bytes = [0; 4];
        assert!(map.read(0x1ffe, &mut bytes));
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert!(!map.read(0x2ffe, &mut bytes) && !map.read(0x5000, &mut bytes));
    }

    #[test]
    fn memory_is_found_for_the_access_that_its_range_allows() {
        use DmaRights::{ReadOnly, ReadWrite, WriteOnly};
        let table = Arc::new(RegionTable::new(vec![Region::anonymous(0x4000).unwrap()]));
        let range = |page: u64| DmaRange { addr: page << 12, len: 0x1000, region: 0, offset: page << 12 };
        let ranges = vec![(range(2), ReadWrite), (range(0), ReadOnly), (range(1), WriteOnly)];
        let map = DmaMap::with_rights(table, ranges).unwrap();
        for (access, found) in [
            (ReadOnly, [true, false, true, false]),
            (WriteOnly, [false, true, true, false]),
            (ReadWrite, [false, false, true, false]),
        ] {
            let segment = |page: u64| map.segment(page << 12, 8, access).is_some();
            let view = |page: u64| map.view(page << 12, 16, access).is_some();
            assert_eq!([0, 1, 2, 3].map(segment), found, "{access:?}");
            assert_eq!([0, 1, 2, 3].map(view), found, "{access:?}");
        }
        let reads = |addr: u64| map.read(addr, &mut [0; 16]);
        assert_eq!([0, 0xff8, 0x1000, 0x1ff8, 0x2000].map(reads), [true, false, false, false, true]);
    }

    #[test]
    fn ranges_that_make_no_sense_are_refused() {
        use DmaMapError::{OutsideRegion, Overlap, Unaligned};
        for (ranges, error) in [
            (&[(0x1000, 0, 0, 0)][..], Unaligned(0x1000)),
            (&[(0x1001, 0x1000, 0, 0)], Unaligned(0x1001)),
            (&[(0x1000, 0x1800, 0, 0)], Unaligned(0x1000)),
            (&[(0x1000, 0x5000, 0, 0)], OutsideRegion(0x1000)),
            (&[(0x1000, 0x1000, 0, 0x800)], Unaligned(0x1000)),
            (&[(0x1000, 0x1000, 0, !0xfff)], OutsideRegion(0x1000)),
            (&[(0x1000, 0x1000, 2, 0)], OutsideRegion(0x1000)),
            (&[(!0xfff, 0x1000, 0, 0)], Overlap(!0xfff)),
            (&[(0x2000, 0x1000, 0, 0), (0x1000, 0x2000, 1, 0)], Overlap(0x2000)),
        ] {
            assert_eq!(map(ranges).err(), Some(error));
        }
    }
}
