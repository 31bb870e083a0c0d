//! Sequences: which bios of an unknown submitter continue each other.
//!
//! A guest's kernel hides its processes, and these move between CPUs and so between queues. A sequential process shows
//! in the addresses. Bios that cover an interval without holes, in any order and through any queue, are a candidate,
//! and after [`CONTINUED_MIN`] continuations a sequence with a number. A sequence tolerates gaps of read-ahead and bios
//! that overtook each other. It ends when it has passed much more than it has read, as random bios in a small area do
//! that meet it by chance.
//!
//! The table is bounded, and a lookup reads two sets of it. A sequence is kept in the set of the 2 MiB in which it
//! ended last, and moves with them. In a full set it replaces the candidate, or else the sequence, that has been idle
//! for longest. A candidate replaces no sequence that was active within [`KEPT_TICKS`], so random bios displace none.
//! More sequences than the table holds have no number.

/// Sets of the table, a power of two: 16 KiB, half of a usual L1 cache.
const SETS: usize = 128;
/// Entries of a set.
const WAYS: usize = 4;
/// Sectors of which the ends share a set, as a power of two: 2 MiB. Twice [`NEAR`], so two sets have all ends near a
/// sector.
const RANGE_SHIFT: u32 = 12;
/// Longest distance from the end of a sequence to a bio that continues it, sectors: 1 MiB, a usual read-ahead window.
/// Also the most that it may have passed without reading it.
const NEAR: u64 = 1 << (RANGE_SHIFT - 1);
/// What a new sequence is taken to have passed, sectors: one that began by chance ends with the next bio or two that
/// meet it. The rest is enough for the first four bios of 128 KiB in any order.
const UNREAD_AT_FIRST: u32 = (NEAR / 2) as u32;
/// Continuations that make a candidate a sequence. A range has four candidates, so of random bios of 4 KiB in a small
/// area one in 64 continues one, and one in 262 144 makes a sequence.
const CONTINUED_MIN: u32 = 3;
/// Nanoseconds of a unit of the times in the table, as a power of two: a microsecond, in which few bios are queued.
const TICK_SHIFT: u32 = 10;
/// Time for which no candidate replaces an idle sequence, ticks: a second, longer than the longest turn of another
/// stream.
const KEPT_TICKS: u32 = 1_000_000;
/// Key of a free entry; not that of a submitter.
const FREE: u64 = u64::MAX;

/// Recent sequences of all submitters of a queue.
#[derive(Debug)]
pub(crate) struct Sequences {
    sets: Box<[SequenceSet; SETS]>,
    /// Number of the latest sequence.
    latest: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(128))]
struct SequenceSet {
    /// The sector behind the furthest bio of each.
    ends: [u64; WAYS],
    /// Submitter and direction.
    keys: [u64; WAYS],
    /// Number of a sequence, above [`CONTINUED_MIN`]; continuations of a candidate.
    numbers: [u32; WAYS],
    /// Of a candidate its length, of a sequence what it has passed and not made up for by reading, sectors.
    sectors: [u32; WAYS],
    /// Time when its end moved last, ticks, modulo 2^32.
    seen: [u32; WAYS],
}

#[derive(Clone, Copy)]
struct SequenceEntry {
    end: u64,
    key: u64,
    number: u32,
    sectors: u32,
    seen: u32,
}

impl SequenceSet {
    const EMPTY: SequenceSet =
        SequenceSet { ends: [0; WAYS], keys: [FREE; WAYS], numbers: [0; WAYS], sectors: [0; WAYS], seen: [0; WAYS] };

    /// The entry that a bio of this key continues: of several the one that ended nearest.
    #[inline]
    fn find(&self, key: u64, start: u64, end: u64) -> Option<usize> {
        let (mut found, mut nearest) = (None, NEAR + 1);
        for way in 0..WAYS {
            let distance = start.abs_diff(self.ends[way]);
            if distance >= nearest || self.keys[way] != key {
                continue;
            }
            let is_sequence = self.numbers[way] > CONTINUED_MIN;
            let precedes = || end.wrapping_add(u64::from(self.sectors[way])) == self.ends[way];
            if is_sequence || distance == 0 || precedes() {
                (found, nearest) = (Some(way), distance);
            }
        }
        found
    }

    /// The entry to be replaced: a free one, or the candidate that has been idle for longest, or else the sequence.
    #[inline]
    fn replaced(&self, now: u32) -> usize {
        let (mut replaced, mut most) = (0, 0);
        for way in 0..WAYS {
            let is_candidate = self.numbers[way] <= CONTINUED_MIN;
            let age = u64::from(now.wrapping_sub(self.seen[way])) | u64::from(is_candidate) << u32::BITS;
            let age = if self.keys[way] == FREE { u64::MAX } else { age };
            if age > most {
                (replaced, most) = (way, age);
            }
        }
        replaced
    }

    #[inline]
    fn put(&mut self, way: usize, entry: SequenceEntry) {
        (self.ends[way], self.keys[way]) = (entry.end, entry.key);
        (self.numbers[way], self.sectors[way], self.seen[way]) = (entry.number, entry.sectors, entry.seen);
    }

    /// The candidate of this entry with a bio, and with the other candidate of which that fills the hole, if any.
    #[cold]
    fn extended(&mut self, way: usize, start: u64, end: u64, now: u32) -> SequenceEntry {
        let key = self.keys[way];
        let (mut number, mut first, mut last) = (self.numbers[way] + 1, start, end);
        self.absorb(way, &mut first, &mut last);
        for other in 0..WAYS {
            let is_candidate = other != way && self.keys[other] == key && self.numbers[other] <= CONTINUED_MIN;
            if is_candidate && self.absorb(other, &mut first, &mut last) {
                number += self.numbers[other] + 1;
                self.keys[other] = FREE;
            }
        }
        let sectors = u32::try_from(last - first).unwrap_or(u32::MAX);
        SequenceEntry { end: last, key, number: number.min(CONTINUED_MIN), sectors, seen: now }
    }

    /// Adds a candidate to an interval at the beginning or end of which it is; whether it was.
    fn absorb(&self, way: usize, first: &mut u64, last: &mut u64) -> bool {
        let begin = self.ends[way].saturating_sub(u64::from(self.sectors[way]));
        let touches = self.ends[way] == *first || begin == *last;
        if touches {
            (*first, *last) = ((*first).min(begin), (*last).max(self.ends[way]));
        }
        touches
    }
}

/// The set of the range of this number.
#[inline]
fn set_of(key: u64, range: u64) -> usize {
    // Fibonacci hashing (Knuth, volume 3, 6.4): files at multiples of a power of two spread evenly.
    ((range ^ key << 24).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SETS.trailing_zeros())) as usize
}

impl Sequences {
    pub(crate) fn new() -> Sequences {
        Sequences { sets: Box::new([SequenceSet::EMPTY; SETS]), latest: CONTINUED_MIN }
    }

    /// The sequence of a bio from `start` to `end`, sectors; `None` if it has no number, or not yet. `key` says
    /// submitter and direction.
    #[inline]
    pub(crate) fn find(&mut self, key: u64, start: u64, end: u64, now_ns: u64) -> Option<u32> {
        let range = start >> RANGE_SHIFT;
        let beside = if start >> (RANGE_SHIFT - 1) & 1 == 0 { range.wrapping_sub(1) } else { range.wrapping_add(1) };
        let now = (now_ns >> TICK_SHIFT) as u32;
        for range in [range, beside] {
            let set = set_of(key, range);
            if let Some(way) = self.sets[set].find(key, start, end) {
                return self.go_on(set, way, start, end, now);
            }
        }
        let set = &mut self.sets[set_of(key, end >> RANGE_SHIFT)];
        let way = set.replaced(now);
        let idle = now.wrapping_sub(set.seen[way]);
        if set.keys[way] == FREE || set.numbers[way] <= CONTINUED_MIN || idle > KEPT_TICKS {
            set.put(way, SequenceEntry::of_bio(key, start, end, now));
        }
        None
    }

    /// A bio continues an entry.
    fn go_on(&mut self, set: usize, way: usize, start: u64, end: u64, now: u32) -> Option<u32> {
        let from = &mut self.sets[set];
        let (key, number, reached) = (from.keys[way], from.numbers[way], from.ends[way]);
        let entry = if number > CONTINUED_MIN {
            let unread = u64::from(from.sectors[way]) + start.saturating_sub(reached);
            let sectors = unread.saturating_sub(end - start) as u32;
            if unread > NEAR {
                SequenceEntry::of_bio(key, start, end, now)
            } else if end > reached {
                SequenceEntry { end, key, number, sectors, seen: now }
            } else if now.wrapping_sub(from.seen[way]) > KEPT_TICKS {
                SequenceEntry::of_bio(key, start, end, now)
            } else {
                from.sectors[way] = sectors;
                return Some(number);
            }
        } else {
            let mut entry = from.extended(way, start, end, now);
            if entry.number == CONTINUED_MIN {
                self.latest = self.latest.wrapping_add(1).max(CONTINUED_MIN + 1);
                (entry.number, entry.sectors) = (self.latest, UNREAD_AT_FIRST);
            }
            entry
        };
        let to = set_of(key, entry.end >> RANGE_SHIFT);
        if to == set {
            from.put(way, entry);
        } else {
            from.keys[way] = FREE;
            let to = &mut self.sets[to];
            to.put(to.replaced(now), entry);
        }
        (entry.number > CONTINUED_MIN).then_some(entry.number)
    }
}

impl SequenceEntry {
    /// The candidate of one bio.
    fn of_bio(key: u64, start: u64, end: u64, seen: u32) -> SequenceEntry {
        let sectors = u32::try_from(end - start).unwrap_or(u32::MAX);
        SequenceEntry { end, key, number: 0, sectors, seen }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    /// The numbers that bios of one submitter get, `sectors` each, 1 ms apart.
    fn numbers(sequences: &mut Sequences, sectors: u64, starts: impl IntoIterator<Item = u64>) -> Vec<Option<u32>> {
        let find = |(at, sector)| sequences.find(1, sector, sector + sectors, at as u64 * MS);
        starts.into_iter().enumerate().map(find).collect()
    }

    /// One number from the fourth bio on.
    fn is_one(numbers: &[Option<u32>]) -> bool {
        numbers[3].is_some() && numbers[3..].iter().all(|number| *number == numbers[3])
    }

    #[test]
    fn bios_in_a_row_are_one_sequence_from_the_fourth_on() {
        for sectors in [1, 8, 256, 2048, 65536] {
            let found = numbers(&mut Sequences::new(), sectors, (0..1000).map(|at| 77 + at * sectors));
            assert!(found[..3] == [None; 3] && is_one(&found), "{sectors}: {found:?}");
        }
    }

    #[test]
    fn interleaved_sequences_are_told_apart() {
        let mut sequences = Sequences::new();
        for count in [2_u64, 7, 30] {
            let starts = (0..count * 100).map(|at| (at % count) * 9_999_999 + at / count * 8);
            let found = numbers(&mut sequences, 8, starts);
            for reader in 0..count as usize {
                let own: Vec<_> = found.iter().skip(reader).step_by(count as usize).copied().collect();
                assert!(is_one(&own), "{reader} of {count}: {own:?}");
            }
            let all: HashSet<_> = found.into_iter().flatten().collect();
            assert_eq!(all.len() as u64, count);
        }
    }

    #[test]
    fn gaps_and_bios_that_overtook_others_do_not_end_a_sequence() {
        // Four queues are fetched in turn: of each four bios the order is another one.
        let turns = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
        let mixed = (0..400_u64).map(|at| at / 4 * 4 + turns[at as usize / 4 % 4][at as usize % 4]);
        assert!(is_one(&numbers(&mut Sequences::new(), 8, mixed.clone().map(|at| at * 8))));
        assert!(is_one(&numbers(
            &mut Sequences::new(),
            256,
            (0..8).chain(mixed.clone().map(|at| 8 + at)).map(|at| at * 256)
        )));
        assert!(is_one(&numbers(&mut Sequences::new(), 256, mixed.map(|at| at * 256))));
        // Every second one of 64 KiB is skipped, once it is a sequence.
        assert!(is_one(&numbers(&mut Sequences::new(), 128, (0..4).chain((5..100).step_by(2)).map(|at| at * 128))));
    }

    /// Of so many random bios of this size within an area, those that were taken for a sequence's; `beside` may add
    /// others.
    fn by_chance(bios: u64, sectors: u64, area: u64, mut beside: impl FnMut(&mut Sequences, u64)) -> usize {
        let mut sequences = Sequences::new();
        let (mut chance, mut by_chance) = (1_u64, 0);
        for at in 0..bios {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let start = (chance >> 32) % area / sectors * sectors;
            by_chance += usize::from(sequences.find(1, start, start + sectors, at * 100_000).is_some());
            beside(&mut sequences, at);
        }
        by_chance
    }

    #[test]
    fn random_bios_displace_no_sequence() {
        let found = by_chance(20_000, 8, 1 << 25, |sequences, at| {
            if at % 50 == 0 && at > 100 {
                // A reader has a bio each five milliseconds.
                let start = (1 << 26) + at / 50 * 8;
                let number = sequences.find(1, start, start + 8, at * 100_000);
                assert!(at < 300 || number.is_some(), "lost after {at}");
            }
        });
        assert_eq!(found, 0);
    }

    #[test]
    fn random_bios_in_a_small_area_are_no_sequence() {
        // Of thousands of bios of 4, 16 and 64 KiB: the larger, the fewer other places there are in the area.
        for (mib, most) in [(16, [50, 80, 150]), (64, [1, 15, 80]), (1024, [1, 1, 2]), (65_536, [0, 0, 0])] {
            for (sectors, most) in [8, 32, 128].into_iter().zip(most) {
                let found = by_chance(100_000, sectors, mib << 11, |_, _| ());
                assert!(found <= 100 * most, "{found} of 100000 bios of {sectors} sectors in {mib} MiB");
            }
        }
    }

    #[test]
    fn a_sequence_ends_after_bios_that_met_it_by_chance() {
        let mut sequences = Sequences::new();
        assert!(is_one(&numbers(&mut sequences, 8, (0..200).map(|at| at * 8))));
        // Half a megabyte forwards and then backwards again: nobody reads so.
        let found = numbers(&mut sequences, 8, (0..9).flat_map(|at| [2600 + at * 1000, 2280 + at * 1000]));
        assert!(found[..4].iter().all(Option::is_some) && found[4..].iter().all(Option::is_none), "{found:?}");
    }

    #[test]
    fn submitters_and_directions_have_separate_sequences() {
        let mut sequences = Sequences::new();
        for at in 0..10_u64 {
            let found = [1, 2].map(|key| sequences.find(key, at * 8, at * 8 + 8, 0));
            assert_eq!(found[0].is_some(), at >= 3);
            assert!(at < 3 || found[0] != found[1], "{found:?}");
        }
    }

    #[test]
    fn too_many_sequences_have_no_numbers() {
        const COUNT: u64 = 65_536;
        let mut sequences = Sequences::new();
        let found = numbers(&mut sequences, 8, (0..COUNT * 4).map(|at| at % COUNT * 1_000_003 + at / COUNT * 8));
        assert!(found.iter().all(Option::is_none));
        // And after them a reader is recognised at once.
        assert!(is_one(&numbers(&mut sequences, 8, (0..100).map(|at| 5 + at * 8))));
    }

    #[test]
    fn the_numbers_wrap_and_so_do_times() {
        let mut sequences = Sequences { latest: u32::MAX - 1, ..Sequences::new() };
        for round in 0..4_u64 {
            let now_ns = (u64::from(u32::MAX) - 1 + round) * MS;
            let start = round << 40;
            let find = |at: u64| sequences.find(1, start + at * 8, start + at * 8 + 8, now_ns);
            let found: Vec<_> = (0..5).map(find).collect();
            assert!(is_one(&found) && found[3] > Some(CONTINUED_MIN), "{found:?}");
        }
    }

    proptest! {
        /// Any sector and length, also at the end of the numbers.
        #[test]
        fn any_bio_is_taken(bios in prop::collection::vec((any::<u64>(), any::<u32>(), 0_u64..3, any::<u64>()), 1..300)) {
            let mut sequences = Sequences::new();
            for (sector, sectors, key, now_ns) in bios {
                let end = sector.saturating_add(u64::from(sectors));
                sequences.find(key, sector, end, now_ns);
                sequences.find(key, end, u64::MAX, now_ns);
            }
        }
    }
}
