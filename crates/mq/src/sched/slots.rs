//! Slots for the bios that a scheduler holds, and lists of them.
//!
//! Made at start for as many bios as the queue accepts. A bio is known by its slot number. Lists, and those of
//! [`OrderLists`](super::orders::OrderLists), consist of such numbers, so queueing a bio allocates nothing, and removal
//! from the middle of a list costs as much as from its end.

use crate::Bio;

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// Places, by number.
#[derive(Debug)]
pub(crate) struct Slots {
    places: Box<[SchedSlot]>,
    free: u32,
    /// Bios put in so far.
    order: u64,
}

#[derive(Debug)]
struct SchedSlot {
    bio: Option<Box<Bio>>,
    /// When it came.
    since_ns: u64,
    /// How many came before it.
    order: u64,
    /// Next in its list. `prev` is undefined for the first of a list and for free slots.
    next: u32,
    prev: u32,
}

/// Places in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    /// Of no meaning if the list is empty.
    last: u32,
    len: u32,
}

impl Default for List {
    fn default() -> List {
        List { first: NONE, last: NONE, len: 0 }
    }
}

impl List {
    #[inline]
    pub(crate) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }
}

impl Slots {
    pub(crate) fn new(count: usize) -> Slots {
        assert!(count < NONE as usize, "a scheduler for {count} bios");
        let after = |at: u32| if (at as usize) < count { at } else { NONE };
        let slot = |at| SchedSlot { bio: None, since_ns: 0, order: 0, next: after(at + 1), prev: NONE };
        Slots { places: (0..count as u32).map(slot).collect(), free: after(0), order: 0 }
    }

    /// Appends a bio to a list, in a free slot.
    ///
    /// # Panics
    /// Without a free slot: a queue holds no more bios than its scheduler was made for.
    #[inline]
    pub(crate) fn push(&mut self, list: &mut List, bio: Box<Bio>, now_ns: u64) -> u32 {
        let at = self.free;
        let slot = &mut self.places[at as usize];
        self.free = slot.next;
        (slot.next, slot.prev) = (NONE, list.last);
        (slot.since_ns, slot.order) = (now_ns, self.order);
        // The slot was empty. Forgotten rather than dropped, which would check for a value.
        std::mem::forget(slot.bio.replace(bio));
        self.order += 1;
        if list.is_empty() {
            list.first = at;
        } else {
            self.places[list.last as usize].next = at;
        }
        list.last = at;
        list.len += 1;
        at
    }

    /// Removes the first bio of a list, if any, with its time of arrival. Prefetches the slot that the next call reads.
    #[inline]
    pub(crate) fn pop(&mut self, list: &mut List) -> Option<(Box<Bio>, u64)> {
        let at = list.first()?;
        let slot = &mut self.places[at as usize];
        let (bio, since_ns) = (slot.bio.take()?, slot.since_ns);
        list.first = std::mem::replace(&mut slot.next, self.free);
        list.len -= 1;
        self.free = at;
        if let Some(next) = self.places.get(list.first as usize) {
            if let Some(bio) = &next.bio {
                blkyard_mem::warm(&**bio);
            }
            if let Some(after) = self.places.get(next.next as usize) {
                blkyard_mem::warm(after);
            }
        }
        Some((bio, since_ns))
    }

    /// Takes a bio out of the list it is in.
    #[inline]
    pub(crate) fn remove(&mut self, list: &mut List, at: u32) -> Box<Bio> {
        let slot = &mut self.places[at as usize];
        let Some(bio) = slot.bio.take() else { unreachable!("a place in a list holds a bio") };
        let (prev, next) = (slot.prev, std::mem::replace(&mut slot.next, self.free));
        self.free = at;
        if list.first == at {
            list.first = next;
        } else {
            self.places[prev as usize].next = next;
        }
        if list.last == at {
            list.last = prev;
        } else {
            self.places[next as usize].prev = prev;
        }
        list.len -= 1;
        bio
    }

    /// The bio in a slot that is in use.
    #[inline]
    pub(crate) fn bio(&self, at: u32) -> &Bio {
        let Some(bio) = &self.places[at as usize].bio else { unreachable!("a place in a list holds a bio") };
        bio
    }

    /// Time of arrival of the bio in a slot.
    #[inline]
    pub(crate) fn since_ns(&self, at: u32) -> u64 {
        self.places[at as usize].since_ns
    }

    /// Slots of a list, from the front.
    pub(crate) fn iter(&self, list: &List) -> impl Iterator<Item = u32> {
        std::iter::successors(list.first(), |at| Some(self.places[*at as usize].next).filter(|next| *next != NONE))
    }

    /// Slot of the first bio for which this is true, if there is one.
    pub(crate) fn find(&self, is_it: &mut dyn FnMut(&Bio) -> bool) -> Option<u32> {
        self.places.iter().position(|slot| slot.bio.as_ref().is_some_and(|bio| is_it(bio))).map(|at| at as u32)
    }

    /// When the bio came that has been here for longest.
    pub(crate) fn oldest_ns(&self) -> Option<u64> {
        self.places.iter().filter(|slot| slot.bio.is_some()).map(|slot| slot.since_ns).min()
    }

    /// Gives all bios away in the order in which they came. Their lists are of no meaning any more.
    pub(crate) fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        let mut used: Vec<&mut SchedSlot> = self.places.iter_mut().filter(|slot| slot.bio.is_some()).collect();
        used.sort_unstable_by_key(|slot| slot.order);
        used.into_iter().filter_map(|slot| slot.bio.take()).for_each(each);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Two lists over the same slots behave like two deques, for removals at any position.
        #[test]
        fn lists_are_deques_that_give_from_the_middle(steps in prop::collection::vec((any::<bool>(), 0_usize..12, 0..2_usize), 1..200)) {
            let mut slots = Slots::new(16);
            let mut lists = [List::default(); 2];
            let mut wanted: [VecDeque<(u32, u64)>; 2] = Default::default();
            for (id, (push, from, which)) in steps.into_iter().enumerate() {
                let held = wanted[0].len() + wanted[1].len();
                if push && held < 16 {
                    let mut bio = Bio::with_capacity(0);
                    bio.cookie = id as u64;
                    let at = slots.push(&mut lists[which], bio, id as u64);
                    wanted[which].push_back((at, id as u64));
                } else if !wanted[which].is_empty() {
                    let from = from % wanted[which].len();
                    let (at, id) = wanted[which].remove(from).unwrap();
                    let bio = if push || from > 0 {
                        slots.remove(&mut lists[which], at)
                    } else {
                        let (bio, since_ns) = slots.pop(&mut lists[which]).unwrap();
                        prop_assert_eq!(since_ns, id);
                        bio
                    };
                    prop_assert_eq!(bio.cookie, id);
                }
                for (list, wanted) in lists.iter().zip(&wanted) {
                    let found: Vec<_> = slots.iter(list).map(|at| (at, slots.bio(at).cookie)).collect();
                    prop_assert_eq!(&found, &wanted.iter().copied().collect::<Vec<_>>());
                    prop_assert_eq!((list.len(), list.is_empty()), (wanted.len(), wanted.is_empty()));
                }
                let oldest = wanted.iter().flatten().map(|(_, id)| *id).min();
                prop_assert_eq!(slots.oldest_ns(), oldest);
            }
            let mut left: Vec<u64> = wanted.iter().flatten().map(|(_, id)| *id).collect();
            left.sort_unstable();
            let mut drained = Vec::new();
            slots.drain(&mut |bio| drained.push(bio.cookie));
            prop_assert_eq!(drained, left);
        }
    }
}
