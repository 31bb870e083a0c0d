//! State that a scheduler keeps for each stream, for the active streams and some more.
//!
//! A stream is found by its number through a hash table with chains of slots. An idle stream keeps its slot until
//! another stream needs it; the one idle for longest is replaced first. There are more slots than bios in the queue, so
//! an idle one always exists, and nothing allocates.

use super::slots::NONE;

/// Slots beside those of the streams that can be active: enough that the streams served in a large epoch are remembered
/// until its end.
const SPARE: usize = 256;

/// Streams, by slot.
#[derive(Debug)]
pub(crate) struct Streams<T> {
    entries: Box<[StreamEntry<T>]>,
    /// By hash: the first of a chain.
    chains: Box<[u32]>,
    shift: u32,
    /// Stream of the last lookup, usually that of the next one, too.
    recent: u32,
    /// Places in use.
    used: u32,
    /// Idle streams: the one idle for longest, and the latest.
    first: u32,
    last: u32,
}

#[derive(Clone, Copy, Debug)]
struct StreamEntry<T> {
    state: T,
    stream: u64,
    /// The next of its chain.
    next: u32,
    /// Neighbours among idle streams.
    newer: u32,
    older: u32,
    at_rest: bool,
}

impl<T: Copy + Default> Streams<T> {
    /// For a queue of `bios_max` bios.
    pub(crate) fn new(bios_max: usize) -> Streams<T> {
        let count = bios_max + SPARE;
        assert!(count < NONE as usize, "a scheduler for {bios_max} bios");
        let entry =
            StreamEntry { state: T::default(), stream: 0, next: NONE, newer: NONE, older: NONE, at_rest: false };
        let chains = (2 * count).next_power_of_two();
        Streams {
            entries: vec![entry; count].into(),
            chains: vec![NONE; chains].into(),
            shift: u64::BITS - chains.trailing_zeros(),
            recent: NONE,
            used: 0,
            first: NONE,
            last: NONE,
        }
    }

    /// How many there can be.
    pub(crate) fn places(&self) -> usize {
        self.entries.len()
    }

    #[inline]
    fn chain(&self, stream: u64) -> usize {
        // Fibonacci hashing (Knuth, volume 3, 6.4): numbers in a row spread evenly.
        (stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Slot of a known stream.
    #[inline]
    pub(crate) fn find(&mut self, stream: u64) -> Option<u32> {
        let mut at = self.recent;
        if self.entries.get(at as usize).is_none_or(|entry| entry.stream != stream) {
            at = self.chains[self.chain(stream)];
            while self.entries.get(at as usize)?.stream != stream {
                at = self.entries[at as usize].next;
            }
            self.recent = at;
        }
        Some(at)
    }

    /// Slot of a stream. An unknown stream is added, new and idle.
    #[inline]
    pub(crate) fn find_or_add(&mut self, stream: u64) -> u32 {
        match self.find(stream) {
            Some(at) => at,
            None => self.add(stream),
        }
    }

    #[inline(never)]
    fn add(&mut self, stream: u64) -> u32 {
        let at = if (self.used as usize) < self.entries.len() {
            self.used += 1;
            self.used - 1
        } else {
            let at = self.first;
            assert!(at != NONE, "more streams at work than bios in the queue");
            self.work(at);
            self.forget(at);
            at
        };
        let chain = self.chain(stream);
        let entry = &mut self.entries[at as usize];
        (entry.state, entry.stream) = (T::default(), stream);
        entry.next = std::mem::replace(&mut self.chains[chain], at);
        self.rest(at);
        at
    }

    /// Takes a stream out of its chain.
    fn forget(&mut self, gone: u32) {
        let StreamEntry { stream, next, .. } = self.entries[gone as usize];
        let chain = self.chain(stream);
        let mut at = self.chains[chain];
        if at == gone {
            self.chains[chain] = next;
            return;
        }
        while self.entries[at as usize].next != gone {
            at = self.entries[at as usize].next;
        }
        self.entries[at as usize].next = next;
    }

    /// Marks a stream as active: it keeps its slot.
    #[inline]
    pub(crate) fn work(&mut self, at: u32) {
        let StreamEntry { newer, older, at_rest, .. } = self.entries[at as usize];
        if !at_rest {
            return;
        }
        self.entries[at as usize].at_rest = false;
        match older {
            NONE => self.first = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.last = older,
            newer => self.entries[newer as usize].older = older,
        }
    }

    /// Marks a stream as idle.
    #[inline]
    pub(crate) fn rest(&mut self, at: u32) {
        let last = self.last;
        let entry = &mut self.entries[at as usize];
        if entry.at_rest {
            return;
        }
        (entry.at_rest, entry.older, entry.newer) = (true, last, NONE);
        match last {
            NONE => self.first = at,
            last => self.entries[last as usize].newer = at,
        }
        self.last = at;
    }

    /// The number of a stream.
    #[inline]
    pub(crate) fn stream(&self, at: u32) -> u64 {
        self.entries[at as usize].stream
    }

    #[inline]
    pub(crate) fn get(&self, at: u32) -> &T {
        &self.entries[at as usize].state
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, at: u32) -> &mut T {
        &mut self.entries[at as usize].state
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Active streams keep slots and state; of idle ones the latest do.
        #[test]
        fn who_is_at_work_is_remembered(steps in prop::collection::vec((0_u64..2000, any::<bool>()), 1..2000)) {
            let mut streams = Streams::<u64>::new(8);
            let mut working: HashMap<u64, u32> = HashMap::new();
            let mut rested: Vec<u64> = Vec::new();
            for (number, work) in steps {
                // Few numbers, far apart, so that they come again.
                let stream = (number % 300).wrapping_mul(0x0101_0101_0101);
                let known = streams.find(stream);
                prop_assert_eq!(known.is_some(), working.contains_key(&stream) || rested.contains(&stream));
                let at = streams.find_or_add(stream);
                prop_assert_eq!((known.unwrap_or(at), streams.stream(at)), (at, stream));
                prop_assert_eq!(*streams.get(at), if known.is_some() { stream ^ 1 } else { 0 });
                *streams.get_mut(at) = stream ^ 1;
                if known.is_none() {
                    rested.push(stream);
                }
                if work && working.len() < 8 {
                    streams.work(at);
                    rested.retain(|other| *other != stream);
                    working.insert(stream, at);
                } else if !work && working.remove(&stream).is_some() {
                    streams.rest(at);
                    rested.push(stream);
                }
                let over = (working.len() + rested.len()).saturating_sub(8 + SPARE);
                rested.drain(..over);
                for (stream, at) in &working {
                    prop_assert_eq!(streams.find(*stream), Some(*at));
                }
            }
        }
    }
}
