//! A filter for the sectors at which waiting bios begin and end.
//!
//! Most bios have no neighbour to merge with, and searching for one costs more than all other work on them. So the
//! edges are counted by hash (a counting filter: Fan and others, 2000), and the queue searches for neighbours only
//! where one may be. The filter misses a neighbour in one case only, which is harmless: when more bios begin at one
//! sector than a count can hold.

use crate::Bio;
use crate::sched::Reach;

/// Counters for each bio that can wait: with all of them waiting, three of four lookups for an absent edge are skipped.
const COUNTS_PER_BIO: usize = 4;
/// And no fewer than this, which is little memory and spares nearly all where few can wait.
const COUNTS_MIN: usize = 1024;

/// See the head of the module.
#[derive(Debug)]
pub(super) struct Edges {
    counts: Box<[u8]>,
    shift: u32,
}

impl Edges {
    /// For up to `bios_max` bios.
    pub(super) fn new(bios_max: usize) -> Edges {
        let counts = (COUNTS_PER_BIO * bios_max).next_power_of_two().max(COUNTS_MIN);
        Edges { counts: vec![0; counts].into(), shift: u64::BITS - counts.trailing_zeros() }
    }

    #[inline]
    fn at(&mut self, sector: u64) -> &mut u8 {
        // Fibonacci hashing (Knuth, volume 3, 6.4).
        &mut self.counts[(sector.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize]
    }

    /// A bio waits from now on.
    #[inline]
    pub(super) fn add(&mut self, bio: &Bio) {
        for sector in [bio.sector, bio.end()] {
            let count = self.at(sector);
            *count = count.wrapping_add(1);
        }
    }

    /// A bio that waited does so no more.
    #[inline]
    pub(super) fn remove(&mut self, bio: &Bio) {
        for sector in [bio.sector, bio.end()] {
            let count = self.at(sector);
            *count = count.wrapping_sub(1);
        }
    }

    /// Whether there may be a bio that waits and touches this.
    #[inline]
    pub(super) fn may_touch(&mut self, reach: Reach) -> bool {
        *self.at(reach.start) | *self.at(reach.end) != 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bio(sector: u64, sectors: u32) -> Bio {
        Bio { sector, sectors, ..Bio::default() }
    }

    proptest! {
        /// For any insertions and removals a waiting neighbour is never denied; an empty filter reports none.
        #[test]
        fn a_neighbour_is_never_denied(
            steps in prop::collection::vec((any::<bool>(), 0_u64..60, 1_u32..9), 1..100), start in 0_u64..60, sectors in 1_u64..9,
        ) {
            let (mut edges, mut waiting) = (Edges::new(32), Vec::new());
            let reach = Reach { start, end: start + sectors };
            for (add, sector, sectors) in steps {
                if add && waiting.len() < 32 {
                    waiting.push(bio(sector, sectors));
                    edges.add(&bio(sector, sectors));
                } else if let Some(gone) = waiting.pop() {
                    edges.remove(&gone);
                }
                let touches = waiting.iter().any(|bio| reach.touches(bio));
                prop_assert!(!touches || edges.may_touch(reach));
                prop_assert!(!waiting.is_empty() || !edges.may_touch(reach));
            }
        }
    }

    #[test]
    fn few_are_said_to_be_there_that_are_not() {
        let mut edges = Edges::new(1000);
        (0..1000).for_each(|at| edges.add(&bio(at * 1_000_003, 8)));
        let wrong =
            (0..1000_u64).filter(|at| edges.may_touch(Reach { start: at * 777_777 + 5, end: at * 777_777 + 13 }));
        assert!(wrong.count() < 500);
    }
}
