//! Sorted lists by a number, mostly sectors, over the slots of bios or streams.
//!
//! Each list is a sequence of runs, and each run a few entries in contiguous memory. A lookup is a binary search for
//! the run and then for the entry: some dozen steps in a few cache lines, where a tree has a line for each step. An
//! insertion or a removal moves a part of one run. A full run is split in two, two small neighbours are joined. Cost
//! does not depend on the keys, and nothing allocates. Equal keys keep their order of insertion.

use std::cell::Cell;

/// Entries of a run: as many as are moved in the time that a miss in the cache takes.
const RUN: usize = 64;
/// Largest sum of two neighbours that are joined. Less than a half, so that the halves of a split are not soon joined
/// again.
const JOINED_MAX: usize = RUN / 2;

/// One order.
#[derive(Debug)]
pub(crate) struct OrderList {
    runs: Vec<OrderRun>,
}

#[derive(Clone, Copy, Debug)]
struct OrderRun {
    /// The key of its first entry.
    first: u64,
    /// Which of the runs of all orders it is.
    at: u32,
    /// Number of entries, at least 1.
    len: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct OrderEntry {
    key: u64,
    place: u32,
}

/// Position of an entry: run of its list, and index in the run.
type Spot = (usize, usize);

/// The entries of all orders.
#[derive(Debug)]
pub(crate) struct OrderLists {
    /// By run.
    entries: Box<[[OrderEntry; RUN]]>,
    free: Vec<u32>,
    /// Entry found last, usually the next one to be removed.
    found: Cell<Spot>,
}

impl OrderLists {
    /// For `places` slots at a time, in `orders` lists.
    pub(crate) fn new(places: usize, orders: usize) -> OrderLists {
        // Of two neighbours in an order at least one is not small.
        let runs = 2 * places / (JOINED_MAX + 1) + orders;
        OrderLists {
            entries: vec![[OrderEntry::default(); RUN]; runs].into(),
            free: (0..runs as u32).collect(),
            found: Cell::default(),
        }
    }

    /// An empty list.
    pub(crate) fn order(&self) -> OrderList {
        OrderList { runs: Vec::with_capacity(self.entries.len()) }
    }

    #[inline]
    fn entries(&self, run: OrderRun) -> &[OrderEntry] {
        &self.entries[run.at as usize][..run.len as usize]
    }

    /// First position with this key or a larger one; it may be the end of a run.
    #[inline]
    fn find(&self, order: &OrderList, key: u64) -> Spot {
        let run = order.runs.partition_point(|run| run.first < key).saturating_sub(1);
        let at = order.runs.get(run).map_or(0, |run| self.entries(*run).partition_point(|entry| entry.key < key));
        (run, at)
    }

    /// Inserts a slot, which is in no list, by its key; `u64::MAX` is not a key.
    pub(crate) fn insert(&mut self, order: &mut OrderList, place: u32, key: u64) {
        let (mut run, mut at) = self.find(order, key + 1);
        match order.runs.get(run) {
            None => order.runs.push(OrderRun { first: key, at: self.take_run(), len: 0 }),
            Some(full) if full.len as usize == RUN => {
                self.halve(order, run);
                if at > RUN / 2 {
                    (run, at) = (run + 1, at - RUN / 2);
                }
            }
            Some(_) => {}
        }
        let run = &mut order.runs[run];
        let entries = &mut self.entries[run.at as usize];
        entries.copy_within(at..run.len as usize, at + 1);
        entries[at] = OrderEntry { key, place };
        run.len += 1;
        run.first = entries[0].key;
    }

    fn get(&self, order: &OrderList, (run, at): Spot) -> Option<u32> {
        Some(self.entries(*order.runs.get(run)?).get(at)?.place)
    }

    /// Removes a slot from its list, in which it has this key.
    pub(crate) fn remove(&mut self, order: &mut OrderList, place: u32, key: u64) {
        let found = Some(self.found.get()).filter(|spot| self.get(order, *spot) == Some(place));
        let (mut run, mut from) = found.unwrap_or_else(|| self.find(order, key));
        loop {
            assert!(run < order.runs.len(), "a place was taken out of an order that it is not in");
            let mut equal = self.entries(order.runs[run])[from..].iter();
            if let Some(at) = equal.position(|entry| entry.place == place) {
                return self.remove_at(order, (run, from + at));
            }
            (run, from) = (run + 1, 0);
        }
    }

    /// First slot with this key or a larger one.
    pub(crate) fn first_from(&self, order: &OrderList, key: u64) -> Option<u32> {
        let mut spot = self.find(order, key);
        if order.runs.get(spot.0)?.len as usize == spot.1 {
            spot = (spot.0 + 1, 0);
        }
        self.found.set(spot);
        self.get(order, spot)
    }

    /// Last slot with a smaller key.
    pub(crate) fn last_before(&self, order: &OrderList, key: u64) -> Option<u32> {
        let (run, at) = self.find(order, key);
        // Were that another run's last entry, `find` would have found the end of that one.
        let before = at.checked_sub(1)?;
        Some(self.entries(order.runs[run])[before].place)
    }

    /// Removes and returns the slot with the smallest key.
    pub(crate) fn pop_first(&mut self, order: &mut OrderList) -> Option<u32> {
        let first = self.entries(*order.runs.first()?)[0].place;
        self.remove_at(order, (0, 0));
        Some(first)
    }

    fn remove_at(&mut self, order: &mut OrderList, (number, at): Spot) {
        let run = &mut order.runs[number];
        let entries = &mut self.entries[run.at as usize];
        entries.copy_within(at + 1..run.len as usize, at);
        run.len -= 1;
        run.first = entries[0].key;
        if run.len == 0 {
            self.free.push(order.runs.remove(number).at);
        } else if run.len as usize <= JOINED_MAX {
            self.join(order, number);
            self.join(order, number.wrapping_sub(1));
        }
    }

    /// Makes a run and the one behind it one, if both are there and small.
    fn join(&mut self, order: &mut OrderList, number: usize) {
        let (Some(&run), Some(&next)) = (order.runs.get(number), order.runs.get(number.wrapping_add(1))) else {
            return;
        };
        let len = run.len as usize;
        if len + next.len as usize > JOINED_MAX {
            return;
        }
        let moved = self.entries[next.at as usize];
        self.entries[run.at as usize][len..len + next.len as usize].copy_from_slice(&moved[..next.len as usize]);
        order.runs[number].len += next.len;
        order.runs.remove(number + 1);
        self.free.push(next.at);
    }

    /// Splits a full run: its second half becomes the next run.
    #[inline(never)]
    fn halve(&mut self, order: &mut OrderList, number: usize) {
        let full = &mut order.runs[number];
        full.len = RUN as u32 / 2;
        let moved = self.entries[full.at as usize];
        let at = self.take_run();
        self.entries[at as usize][..RUN / 2].copy_from_slice(&moved[RUN / 2..]);
        order.runs.insert(number + 1, OrderRun { first: moved[RUN / 2].key, at, len: RUN as u32 / 2 });
    }

    fn take_run(&mut self) -> u32 {
        let Some(at) = self.free.pop() else { unreachable!("there are more runs than so many places can use") };
        at
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// No run is empty, and no two neighbours are both small: so there are enough of them.
    fn check(orders: &OrderLists, order: &OrderList) {
        let lens: Vec<usize> = order.runs.iter().map(|run| run.len as usize).collect();
        assert!(lens.iter().all(|len| (1..=RUN).contains(len)), "{lens:?}");
        assert!(lens.windows(2).all(|two| two[0] + two[1] > JOINED_MAX), "{lens:?}");
        assert!(order.runs.iter().all(|run| run.first == orders.entries(*run)[0].key), "{order:?}");
    }

    proptest! {
        /// Compares two lists over the same slots with sorted maps, through random insertions and removals.
        #[test]
        fn an_order_is_a_map_that_keeps_order(
            keys in prop::sample::select(&[20_u64, 1 << 40][..]),
            steps in prop::collection::vec((any::<u64>(), 0..2_usize), 1..1500), ends in any::<u64>(),
        ) {
            const PLACES: u32 = 400;
            let mut orders = OrderLists::new(PLACES as usize, 2);
            let mut both = [orders.order(), orders.order()];
            let mut wanted: [BTreeMap<(u64, usize), u32>; 2] = Default::default();
            let mut free: Vec<u32> = (0..PLACES).collect();
            for (count, (drawn, which)) in steps.iter().enumerate() {
                let (order, wanted, key) = (&mut both[*which], &mut wanted[*which], (drawn >> 8) % keys);
                // More comes than goes at first, and then the other way round.
                let comes = drawn % 100 < if count % 1000 < 600 { 85 } else { 15 };
                if comes && let Some(place) = free.pop() {
                    orders.insert(order, place, key);
                    wanted.insert((key, count), place);
                } else if drawn % 2 == 0 && let Some((&at, &place)) = wanted.range((key, 0)..).next() {
                    wanted.remove(&at);
                    orders.remove(order, place, at.0);
                    free.push(place);
                } else if drawn % 3 == 0 && let Some((&at, &place)) = wanted.range(..(key, 0)).next_back() {
                    wanted.remove(&at);
                    orders.remove(order, place, at.0);
                    free.push(place);
                } else {
                    let first = wanted.pop_first().map(|(_, place)| place);
                    prop_assert_eq!(orders.pop_first(order), first);
                    free.extend(first);
                }
                check(&orders, order);
                for key in [0, key, key + 1, ends % keys, u64::MAX] {
                    let from = wanted.range((key, 0)..).next().map(|(_, place)| *place);
                    let before = wanted.range(..(key, 0)).next_back().map(|(_, place)| *place);
                    prop_assert_eq!((orders.first_from(order, key), orders.last_before(order, key)), (from, before));
                }
            }
        }
    }

    #[test]
    fn there_are_runs_for_all_whatever_the_keys() {
        let keys: [fn(u64) -> u64; 4] = [|at| at, |at| 10_000 - at, |_| 7, |at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)];
        for key in keys {
            let mut orders = OrderLists::new(10_000, 1);
            let mut order = orders.order();
            // All but every fortieth go again, and others come.
            for round in 0..5 {
                let places = (0..10_000).filter(|place| round == 0 || place % 40 != round);
                places.clone().for_each(|place| orders.insert(&mut order, place, key(u64::from(place))));
                let go = (0..10_000).filter(|place| place % 40 != round + 1);
                go.for_each(|place| orders.remove(&mut order, place, key(u64::from(place))));
                check(&orders, &order);
                assert!(order.runs.len() <= 17, "{}", order.runs.len());
            }
        }
    }
}
