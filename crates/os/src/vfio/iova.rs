//! Device addresses (IOVAs) of an I/O address space: which are free.
//!
//! Addresses of a process may lie beyond what an IOMMU translates, or where it has its interrupts, so they are not used
//! as device addresses.

/// Lowest address that is given out: a null pointer of a driver must fault.
const FIRST: u64 = 1 << 20;

/// The addresses that an IOMMU translates, and those in use.
#[derive(Debug)]
pub(super) struct IovaSpace {
    /// First and last address of each usable range, in order.
    ranges: Vec<(u64, u64)>,
    /// Start and length of each range in use, in order.
    used: Vec<(u64, u64)>,
}

impl IovaSpace {
    pub(super) fn new(mut ranges: Vec<(u64, u64)>) -> IovaSpace {
        ranges.sort_unstable();
        IovaSpace { ranges, used: Vec::new() }
    }

    /// Takes the first free range of `len` bytes whose start is `offset` behind a multiple of `align`, a power of two.
    pub(super) fn take(&mut self, len: u64, align: u64, offset: u64) -> Option<u64> {
        for &(first, last) in &self.ranges {
            let mut at = first.max(FIRST);
            loop {
                let multiple = at.checked_sub(offset).map_or(Some(0), |at| at.checked_next_multiple_of(align))?;
                let start = multiple.checked_add(offset)?;
                let end = start.checked_add(len)?;
                if end - 1 > last {
                    break;
                }
                let taken = self.used.iter().find(|(used, used_len)| *used < end && start < used + used_len);
                let Some((used, used_len)) = taken else {
                    let place = self.used.partition_point(|(used, _)| *used < start);
                    self.used.insert(place, (start, len));
                    return Some(start);
                };
                at = used + used_len;
            }
        }
        None
    }

    /// Gives a range back.
    pub(super) fn give_back(&mut self, start: u64) {
        self.used.retain(|(used, _)| *used != start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE: u64 = 2 << 20;

    #[test]
    fn ranges_are_aligned_apart_and_reused() {
        let mut space = IovaSpace::new(vec![(0xfef0_0000, u64::MAX >> 25), (0, 0xfedf_ffff)]);
        assert_eq!(space.take(0x3000, 0x1000, 0), Some(FIRST));
        assert_eq!(space.take(HUGE, HUGE, 0x5000), Some(HUGE + 0x5000));
        assert_eq!(space.take(0x1000, 0x1000, 0), Some(FIRST + 0x3000));
        space.give_back(FIRST);
        assert_eq!(space.take(0x4000, 0x1000, 0), Some(FIRST + 0x4000));
        assert_eq!(space.take(0x3000, 0x1000, 0), Some(FIRST));
    }

    #[test]
    fn no_range_crosses_the_window_of_interrupts() {
        let mut space = IovaSpace::new(vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)]);
        assert_eq!(space.take(0xfe00_0000, 0x1000, 0), Some(FIRST));
        assert_eq!(space.take(HUGE * 4, 0x1000, 0), Some(0xfe10_0000));
        assert_eq!(space.take(HUGE * 4, 0x1000, 0), Some(0xfef0_0000));
        assert_eq!(space.take(u64::MAX, 0x1000, 0), None);
        assert_eq!(space.take(0x80_0000_0000, 0x1000, 0), None);
    }

    #[test]
    fn nothing_fits_behind_the_last_address() {
        let mut space = IovaSpace::new(vec![(u64::MAX - 5, u64::MAX)]);
        assert_eq!(space.take(0x1000, 0x1000, 0), None);
        assert_eq!(space.take(HUGE, HUGE, HUGE - 0x1000), None);
    }
}
