//! Ranges of the write cache that are not on the platters, each with the number of earlier flushes.
//!
//! Owned by the disk. A table of bounded size, ordered by position, as in a disk's firmware. It holds no data.

/// A range that is not on the platters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Flushes before it was written. A flush covers ranges with at most as many as were before itself.
    pub(super) epoch: u64,
}

#[derive(Debug)]
pub(super) struct Dirty {
    /// By position; ranges of one epoch never touch, and none overlap.
    extents: Vec<Extent>,
    extents_max: usize,
    sectors: u64,
    sectors_max: u64,
}

impl Dirty {
    pub(super) fn new(extents_max: usize, sectors_max: u64) -> Dirty {
        // A range may fill as many gaps, and one more, as there are extents.
        Dirty { extents: Vec::with_capacity(2 * extents_max + 1), extents_max, sectors: 0, sectors_max }
    }

    /// Sectors that are dirty.
    pub(super) fn sectors(&self) -> u64 {
        self.sectors
    }

    pub(super) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.extents.clear();
        self.sectors = 0;
    }

    /// Whether so much more fits.
    pub(super) fn has_room(&self, sectors: u64) -> bool {
        self.extents.len() < self.extents_max && (self.is_empty() || self.sectors + sectors <= self.sectors_max)
    }

    /// Adds a written range. Parts that were dirty before stay with their flush, which covers them.
    pub(super) fn insert(&mut self, start: u64, end: u64, epoch: u64) {
        let mut index = self.extents.partition_point(|extent| extent.end <= start);
        let mut at = start;
        while at < end {
            let next = self.extents.get(index).copied();
            if let Some(covered) = next.filter(|next| next.start <= at) {
                at = covered.end;
                index += 1;
                continue;
            }
            let to = next.map_or(end, |next| end.min(next.start));
            self.sectors += to - at;
            self.extents.insert(index, Extent { start: at, end: to, epoch });
            index = self.join(index);
            at = self.extents[index].end;
            index += 1;
        }
    }

    /// Joins an extent with its neighbours where they touch and are of one epoch. Returns where it is then.
    fn join(&mut self, mut index: usize) -> usize {
        let touch = |extents: &[Extent]| extents[0].end == extents[1].start && extents[0].epoch == extents[1].epoch;
        if self.extents.get(index..index + 2).is_some_and(touch) {
            self.extents[index].end = self.extents.remove(index + 1).end;
        }
        if index > 0 && touch(&self.extents[index - 1..=index]) {
            index -= 1;
            self.extents[index].end = self.extents.remove(index + 1).end;
        }
        index
    }

    /// Takes the next piece to destage: the first at or after `from`, or from the beginning if there is none; at most
    /// `sectors_max` long, and not later than `epoch`.
    pub(super) fn take(&mut self, from: u64, epoch: u64, sectors_max: u64) -> Option<Extent> {
        let first = self.extents.partition_point(|extent| extent.end <= from);
        let mut order = (first..self.extents.len()).chain(0..first);
        let index = order.find(|index| self.extents[*index].epoch <= epoch)?;
        let extent = &mut self.extents[index];
        let piece = Extent { end: extent.end.min(extent.start + sectors_max), ..*extent };
        extent.start = piece.end;
        if extent.start == extent.end {
            self.extents.remove(index);
        }
        self.sectors -= piece.end - piece.start;
        Some(piece)
    }

    /// Whether a range is here from end to end.
    pub(super) fn covers(&self, start: u64, end: u64) -> bool {
        let mut at = start;
        let mut index = self.extents.partition_point(|extent| extent.end <= start);
        while at < end {
            let Some(extent) = self.extents.get(index).filter(|extent| extent.start <= at) else { return false };
            at = extent.end;
            index += 1;
        }
        true
    }

    /// Whether anything is left that a flush of this epoch covers.
    pub(super) fn owes(&self, epoch: u64) -> bool {
        self.extents.iter().any(|extent| extent.epoch <= epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pieces_go_out_in_the_order_of_their_place_from_where_the_arm_is() {
        let mut dirty = Dirty::new(16, 1000);
        for start in [100, 300, 200] {
            dirty.insert(start, start + 50, 0);
        }
        let starts: Vec<_> = std::iter::from_fn(|| dirty.take(160, 0, 40)).map(|piece| piece.start).collect();
        assert_eq!(starts, [200, 240, 300, 340, 100, 140]);
        assert_eq!(dirty.sectors(), 0);
    }

    #[test]
    fn what_is_written_over_is_still_owed_to_the_flush_that_promised_it() {
        let mut dirty = Dirty::new(16, 1000);
        dirty.insert(0, 10, 0);
        dirty.insert(5, 15, 1);
        assert_eq!((dirty.sectors(), dirty.owes(0)), (15, true));
        assert_eq!(dirty.take(0, 0, 100), Some(Extent { start: 0, end: 10, epoch: 0 }));
        assert!(!dirty.owes(0) && dirty.owes(1) && dirty.covers(10, 15) && !dirty.covers(9, 15));
        assert_eq!(dirty.take(0, 0, 100), None);
    }

    proptest! {
        /// As a list of sectors, each with its epoch.
        #[test]
        fn the_table_is_the_list(writes in proptest::collection::vec((0_u64..200, 1_u64..40, any::<bool>()), 1..60)) {
            let (mut dirty, mut list, mut epoch) = (Dirty::new(1000, 10_000), [None; 240], 0);
            for (start, sectors, flush) in writes {
                epoch += u64::from(flush);
                dirty.insert(start, start + sectors, epoch);
                for sector in &mut list[start as usize..(start + sectors) as usize] {
                    sector.get_or_insert(epoch);
                }
                prop_assert_eq!(dirty.sectors(), list.iter().flatten().count() as u64);
                prop_assert_eq!(dirty.covers(start, start + sectors + 3), list[start as usize..].iter().take(sectors as usize + 3).filter(|s| s.is_some()).count() as u64 == sectors + 3);
                for pair in dirty.extents.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start || pair[0].end == pair[1].start && pair[0].epoch != pair[1].epoch);
                }
            }
            while let Some(piece) = dirty.take(100, epoch, 7) {
                for sector in piece.start..piece.end {
                    prop_assert_eq!(list[sector as usize].take(), Some(piece.epoch));
                }
            }
            prop_assert!(list.iter().all(Option::is_none));
        }
    }
}
