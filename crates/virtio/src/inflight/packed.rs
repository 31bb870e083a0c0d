//! The record of a packed ring: copies of the descriptors in flight, since used elements overwrite them in the ring.
//!
//! ```text
//!   0 features u64 │ 8 version u16 │ 10 desc_num u16 │ 12 free_head u16 │ 14 old_free_head u16
//!  16 used_idx u16 │ 18 old_used_idx u16 │ 20 used_wrap_counter u8 │ 21 old_used_wrap_counter u8
//!  32 + 32·i       inflight u8, unused u8, next u16, last u16, num u16, counter u64,
//!                  id u16, flags u16, len u32, addr u64
//! ```
//!
//! A chain takes entries from a list of free ones and returns them when it is published. The published position is
//! stored twice: the fields without `old_` are stored before the ring shows the batch, those with it afterwards. While
//! they differ, the ring decides: if the slot at `old_used_idx` has been given to the driver, the newer fields hold,
//! and otherwise the older ones. The document compares used indexes only, which are equal after a batch as long as the
//! ring; and it stores the fields one by one, so that a daemon killed in between leaves an index of one time beside a
//! wrap counter of another. Here fields that belong together are stored at once, and compared so.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::fence;

use blkyard_mem::{Region, View};

use super::{DESC_NUM, FEATURES, Inflight, InflightFault, VERSION, VERSION_ONE};
use crate::descriptor::DESC_BYTES;
use crate::packed::{MARKS, Position};

/// `free_head` and `old_free_head`, stored at once.
const FREE: usize = 12;
/// Both used indexes and both wrap counters, and two unused bytes, stored at once.
const USED: usize = 16;
const ENTRIES: usize = 32;
const ENTRY_BYTES: usize = 32;
/// In flight, next, last and num.
const LINKS: usize = 0;
const NEXT: usize = 2;
const COUNTER: usize = 8;
/// Id, flags and length.
const REST: usize = 16;
const ADDR: usize = 24;
const _: () = assert!(LINKS == 0 && COUNTER == 8 && REST == 16 && ADDR == 24, "an entry is written as four words");

/// Bytes a ring of `size` entries needs.
pub(super) fn bytes(size: u16) -> usize {
    ENTRIES + usize::from(size) * ENTRY_BYTES
}

fn entry(index: u16) -> usize {
    ENTRIES + usize::from(index) * ENTRY_BYTES
}

/// Private copy of an entry.
#[derive(Clone, Copy, Debug, Default)]
struct Links {
    /// Of a free entry the next free one, of others the next of the same chain.
    next: u16,
    /// Of the first entry of a chain: the last one.
    last: u16,
    /// Of the first entry of a chain: how many there are.
    num: u16,
}

impl Links {
    fn word(self, in_flight: bool) -> u64 {
        u64::from(in_flight) | u64::from(self.next) << 16 | u64::from(self.last) << 32 | u64::from(self.num) << 48
    }

    /// From a word, with whether the entry is in flight.
    fn from_word(word: u64) -> (Links, bool) {
        let field = |at: u32| (word >> at) as u16;
        (Links { next: field(16), last: field(32), num: field(48) }, word & 0xff == 1)
    }
}

/// A chain that was in flight before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftChain {
    /// Its first entry.
    pub(crate) record: u16,
    /// Descriptors it takes in the ring.
    pub(crate) slots: u16,
    /// Where its descriptors begin among the copies.
    pub(crate) at: u16,
}

/// Chains left in flight.
#[derive(Debug)]
pub(crate) struct LeftInRecord {
    /// The one fetched first last.
    pub(crate) chains: Vec<LeftChain>,
    /// Copies of their descriptors, in private memory, as in a ring.
    pub(crate) copies: View,
    /// Descriptors of all chains together.
    pub(crate) slots: u16,
    /// Position of the next used element.
    pub(crate) next_used: Position,
}

/// Chains in flight of a packed ring.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    region: View,
    links: Box<[Links]>,
    /// The first free entry.
    free: u16,
    /// Of the next chain that is fetched.
    counter: u64,
    /// Published position of used elements.
    used: Position,
    /// First entries of chains completed and not published. As long as the ring from the start.
    batch: Vec<u16>,
}

impl PackedInflight {
    /// Continues from a region's record of a ring of `size` descriptors in `ring`, or starts a fresh region: then used
    /// elements continue at `used`. Returns with it the chains in flight; `None` if the region is fresh.
    ///
    /// # Errors
    /// The region is inconsistent; neither it nor the ring was changed.
    pub(crate) fn recover(
        part: Inflight,
        size: u16,
        ring: &View,
        used: Position,
    ) -> Result<(PackedInflight, Option<LeftInRecord>), InflightFault> {
        let Some(records) = part.open(size, bytes)? else {
            return Ok((PackedInflight::begin(part.0, size, used), None));
        };
        let region = part.0;
        let copy = Copy::read(&region, records);
        if !copy.entries.iter().any(|(_, in_flight)| *in_flight) {
            // A record of a ring of another size does not apply to this one.
            let stood = copy.decide(size, ring).ok().filter(|_| records == size);
            let next_used = stood.map_or(used, |(_, next_used)| next_used);
            let inflight = PackedInflight::begin(region, size, next_used);
            let left = inflight.copy_out(Vec::new(), next_used)?;
            return Ok((inflight, Some(left)));
        }
        if records != size {
            return Err(InflightFault::DescNum);
        }
        let (free, next_used) = copy.decide(size, ring)?;
        let (chains, is_free) = copy.chains(free)?;
        let links = copy.entries.iter().map(|(links, _)| *links).collect();
        let batch = Vec::with_capacity(usize::from(size));
        let counter = chains.iter().map(|(counter, ..)| *counter).max().map_or(0, |last| last.wrapping_add(1));
        let inflight = PackedInflight { region, links, free, counter, used: next_used, batch };
        let left = inflight.copy_out(chains, next_used)?;
        hide_unpublished(ring, size, next_used, left.slots);
        inflight.settle(next_used);
        for index in (0..size).filter(|index| is_free[usize::from(*index)]) {
            inflight.cross_out(index);
        }
        Ok((inflight, Some(left)))
    }

    /// Initialises a region for a ring without chains in flight. The version comes last: until then a fresh region
    /// stays one.
    fn begin(region: View, size: u16, used: Position) -> PackedInflight {
        // The last one leads beyond the end.
        let links: Box<[Links]> = (1..=size).map(|next| Links { next, ..Links::default() }).collect();
        for (index, links) in links.iter().enumerate() {
            region.store_u64(entry(index as u16) + LINKS, links.word(false), Relaxed);
        }
        let batch = Vec::with_capacity(usize::from(size));
        let inflight = PackedInflight { region, links, free: 0, counter: 0, used, batch };
        inflight.region.store_u64(FEATURES, 0, Relaxed);
        inflight.settle(used);
        inflight.region.store_u16(DESC_NUM, size, Release);
        inflight.region.store_u16(VERSION, VERSION_ONE, Release);
        inflight
    }

    /// Copies the descriptors of chains out of the record, in the order they were fetched.
    fn copy_out(&self, mut chains: Vec<(u64, u16)>, next_used: Position) -> Result<LeftInRecord, InflightFault> {
        // The front-end can change counters, which affect the order only.
        chains.sort_unstable();
        let slots = chains.iter().map(|(_, head)| self.links[usize::from(*head)].num).sum::<u16>();
        let memory = Region::anonymous((usize::from(slots) * DESC_BYTES).max(DESC_BYTES))
            .map_err(|_| InflightFault::NoMemory)?;
        let len = memory.len();
        let copies = View::new(memory, 0, len, DESC_BYTES).ok_or(InflightFault::NoMemory)?;
        let mut at = 0;
        let mut take = |(_, record): (u64, u16)| {
            let chain = LeftChain { record, slots: self.links[usize::from(record)].num, at };
            let mut index = record;
            for _ in 0..chain.slots {
                let place = usize::from(at) * DESC_BYTES;
                let rest = self.region.load_u64(entry(index) + REST, Relaxed);
                copies.store_u64(place, self.region.load_u64(entry(index) + ADDR, Relaxed), Relaxed);
                // Id, flags, length there; length, id, flags in a ring.
                copies.store_u64(place + 8, rest.rotate_left(32), Relaxed);
                index = self.links[usize::from(index)].next;
                at += 1;
            }
            chain
        };
        let mut chains: Vec<_> = chains.into_iter().map(&mut take).collect();
        chains.reverse();
        Ok(LeftInRecord { chains, copies, slots, next_used })
    }

    /// A chain of one descriptor was fetched, which is this: as [`PackedInflight::fetched`].
    #[inline(always)]
    pub(crate) fn fetched_one(&mut self, [addr, rest]: [u64; 2]) -> u16 {
        let head = self.free;
        let links = &mut self.links[usize::from(head)];
        (links.last, links.num) = (head, 1);
        let (next, counter) = (links.next, self.counter);
        self.region.store_u64s(entry(head), [links.word(true), counter, rest.rotate_right(32), addr], Relaxed);
        self.take_entries(next);
        head
    }

    /// A chain was fetched: `read` gives the two words of each of its descriptors in turn. Returns its first entry.
    /// Comes before anything is done for it, and after the last batch was published.
    pub(crate) fn fetched(&mut self, slots: u16, read: impl Fn(u16) -> [u64; 2]) -> u16 {
        let head = self.free;
        let (mut last, mut next) = (head, head);
        for slot in 0..slots {
            let [addr, rest] = read(slot);
            last = next;
            next = self.links[usize::from(last)].next;
            self.region.store_u64(entry(last) + ADDR, addr, Relaxed);
            self.region.store_u64(entry(last) + REST, rest.rotate_right(32), Relaxed);
        }
        let links = &mut self.links[usize::from(head)];
        (links.last, links.num) = (last, slots);
        self.region.store_u64(entry(head) + COUNTER, self.counter, Relaxed);
        self.region.store_u64(entry(head) + LINKS, links.word(true), Relaxed);
        self.take_entries(next);
        head
    }

    /// Allocates the entries of a chain; `first_free` is the next free one. Until now they are free, whatever they
    /// contain.
    #[inline]
    fn take_entries(&mut self, next: u16) {
        self.counter = self.counter.wrapping_add(1);
        self.free = next;
        self.region.store_u32(FREE, u32::from(next) | u32::from(next) << 16, Release);
    }

    /// The chain with this first entry has its used element, or is in a batch that has one; it is not published yet.
    #[inline]
    pub(crate) fn completed(&mut self, record: u16) {
        self.batch.push(record);
    }

    /// Before the completed chains are published: used elements continue at this position afterwards.
    #[inline]
    pub(crate) fn publishing(&mut self, used: Position) {
        let old_free = self.free;
        let mut free = old_free;
        // From the end: chains that end in the order they were fetched follow each other still.
        for record in self.batch.iter().rev() {
            let next = std::mem::replace(&mut free, *record);
            let last = self.links[usize::from(*record)].last;
            let links = &mut self.links[usize::from(last)];
            if links.next != next {
                links.next = next;
                self.region.store_u16(entry(last) + NEXT, next, Relaxed);
            }
        }
        self.free = free;
        self.region.store_u32(FREE, u32::from(self.free) | u32::from(old_free) << 16, Release);
        self.region.store_u64(USED, used_word(used, self.used), Release);
        self.used = used;
    }

    /// The completed chains are published.
    #[inline]
    pub(crate) fn published(&mut self) {
        // None of this may be visible before the ring's elements: a chain would be lost to the driver.
        fence(Release);
        self.batch.iter().for_each(|record| self.cross_out(*record));
        self.batch.clear();
        self.settle(self.used);
    }

    #[inline]
    fn cross_out(&self, record: u16) {
        self.region.store_u16(entry(record) + LINKS, 0, Relaxed);
    }

    /// No publication is in progress.
    #[inline]
    fn settle(&self, used: Position) {
        self.region.store_u32(FREE, u32::from(self.free) | u32::from(self.free) << 16, Release);
        // Last: as long as the two differ, the ring is asked.
        self.region.store_u64(USED, used_word(used, used), Release);
    }
}

/// New and old position of used elements, in the record's format.
fn used_word(used: Position, old: Position) -> u64 {
    u64::from(used.place) | u64::from(old.place) << 16 | u64::from(used.wrap()) << 32 | u64::from(old.wrap()) << 40
}

/// A record, read once.
struct Copy {
    free: u32,
    used: u64,
    entries: Vec<(Links, bool)>,
    counters: Vec<u64>,
}

impl Copy {
    fn read(region: &View, records: u16) -> Copy {
        let word = |index: u16, at| region.load_u64(entry(index) + at, Relaxed);
        Copy {
            free: region.load_u32(FREE, Relaxed),
            used: region.load_u64(USED, Relaxed),
            entries: (0..records).map(|index| Links::from_word(word(index, LINKS))).collect(),
            counters: (0..records).map(|index| word(index, COUNTER)).collect(),
        }
    }

    /// The first free entry, and the position of used elements, after the ring has decided between the two.
    fn decide(&self, size: u16, ring: &View) -> Result<(u16, Position), InflightFault> {
        let position = |place: u64, wrap: u64| {
            let position = Position::new(place as u16, wrap & 0xff != 0);
            (position.place < size).then_some(position).ok_or(InflightFault::UsedOutOfRange)
        };
        let used = position(self.used, self.used >> 32)?;
        let old = position(self.used >> 16, self.used >> 40)?;
        let is_published = used != old && !old.is_available(ring.load_u64(old.offset() + 8, Relaxed));
        Ok(if is_published { (self.free as u16, used) } else { ((self.free >> 16) as u16, old) })
    }

    /// The chains in flight, by counter and first entry; and which entries are free.
    fn chains(&self, free: u16) -> Result<(Vec<(u64, u16)>, Vec<bool>), InflightFault> {
        let mut is_free = vec![false; self.entries.len()];
        let mut index = usize::from(free);
        // The list leads beyond the end.
        while let Some(seen) = is_free.get_mut(index) {
            if std::mem::replace(seen, true) {
                return Err(InflightFault::FreeLoop);
            }
            index = usize::from(self.entries[index].0.next);
        }
        let mut taken = is_free.clone();
        let mut chains = Vec::new();
        for (head, (links, in_flight)) in self.entries.iter().enumerate() {
            if is_free[head] || !in_flight {
                continue;
            }
            let (mut index, mut last) = (head, head);
            for _ in 0..links.num {
                let seen = taken.get_mut(index).ok_or(InflightFault::ChainOutOfRange)?;
                if std::mem::replace(seen, true) {
                    return Err(InflightFault::ChainTwice);
                }
                last = index;
                index = usize::from(self.entries[index].0.next);
            }
            if links.num == 0 || last != usize::from(links.last) {
                return Err(InflightFault::ChainOutOfRange);
            }
            chains.push((self.counters[head], head as u16));
        }
        if taken.iter().all(|taken| *taken) { Ok((chains, is_free)) } else { Err(InflightFault::EntryLost) }
    }
}

/// Takes back used elements that were written and never shown: a driver comes upon them once it is shown those before.
fn hide_unpublished(ring: &View, size: u16, from: Position, slots: u16) {
    let mut at = from;
    for _ in 0..slots {
        let rest = ring.load_u64(at.offset() + 8, Relaxed);
        if at.is_used(rest) {
            let others = rest & !(u64::from(MARKS) << 48);
            ring.store_u64(at.offset() + 8, others | u64::from(at.available()) << 48, Release);
        }
        at.advance(1, size);
    }
}
