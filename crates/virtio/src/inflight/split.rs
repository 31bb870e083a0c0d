//! The record of a split ring: one entry for each descriptor, of which those of heads count.
//!
//! ```text
//!   0 features u64 │ 8 version u16 │ 10 desc_num u16 │ 12 last_batch_head u16 │ 14 used_idx u16
//!  16 + 16·i       inflight u8, 5 unused, next u16, counter u64
//! ```
//!
//! The used ring's index says which chains the driver has been given, and is published with one store. So the record
//! need not be exact at every moment: while `used_idx` differs from that index, the entries of the last batch, a list
//! of as many from `last_batch_head` on, are no longer in flight, whatever their flags.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::fence;

use blkyard_mem::View;

use super::{DESC_NUM, FEATURES, Inflight, InflightFault, VERSION, VERSION_ONE};

const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;
const ENTRIES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// One byte, written together with the next one, which is unused.
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// Bytes a ring of `size` entries needs.
pub(super) fn bytes(size: u16) -> usize {
    ENTRIES + usize::from(size) * ENTRY_BYTES
}

fn entry(index: u16) -> usize {
    ENTRIES + usize::from(index) * ENTRY_BYTES
}

/// Chains in flight of a split ring.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    region: View,
    /// Of the next chain that is fetched.
    counter: u64,
    last_batch_head: u16,
    /// Heads completed and not published. As long as the ring from the start.
    batch: Vec<u16>,
}

impl SplitInflight {
    /// Continues from a region's record of a ring of `size` entries with this used index, or starts a fresh region.
    /// Returns with it the heads in flight, the one to fetch first last; `None` if the region is fresh.
    ///
    /// # Errors
    /// The region is inconsistent; nothing in it was changed.
    pub(crate) fn recover(
        part: Inflight,
        size: u16,
        used_idx: u16,
    ) -> Result<(SplitInflight, Option<Vec<u16>>), InflightFault> {
        let records = part.open(size, bytes)?;
        let region = part.0;
        let mut left = in_flight(&region, records.unwrap_or(0));
        let mut published = vec![false; usize::from(size)];
        if !left.is_empty() {
            if left.iter().any(|(_, index)| *index >= size) {
                return Err(InflightFault::HeadOutOfRange);
            }
            if records < Some(size) {
                return Err(InflightFault::DescNum);
            }
            note_published(&region, used_idx, &mut published)?;
            left.retain(|(_, index)| !published[usize::from(*index)]);
        }
        // The front-end can change counters, which affect the order only.
        left.sort_unstable();
        let inflight = SplitInflight {
            counter: left.last().map_or(0, |(counter, _)| counter.wrapping_add(1)),
            last_batch_head: region.load_u16(LAST_BATCH_HEAD, Relaxed),
            batch: Vec::with_capacity(usize::from(size)),
            region,
        };
        if left.is_empty() {
            inflight.begin(size, used_idx);
        } else {
            inflight.cross_out((0..size).filter(|index| published[usize::from(*index)]), used_idx);
        }
        let heads = left.into_iter().rev().map(|(_, index)| index).collect();
        Ok((inflight, records.map(|_| heads)))
    }

    /// Clears the record. The version comes last: until then a fresh region stays one.
    fn begin(&self, size: u16, used_idx: u16) {
        for index in 0..size {
            self.region.store_u16(entry(index) + INFLIGHT, 0, Relaxed);
        }
        self.region.store_u64(FEATURES, 0, Relaxed);
        self.region.store_u16(USED_IDX, used_idx, Relaxed);
        self.region.store_u16(DESC_NUM, size, Release);
        self.region.store_u16(VERSION, VERSION_ONE, Release);
    }

    /// This head was fetched. Comes before anything is done for it.
    #[inline]
    pub(crate) fn fetched(&mut self, head: u16) {
        self.region.store_u64(entry(head) + COUNTER, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.region.store_u16(entry(head) + INFLIGHT, 1, Release);
    }

    /// This head has its used element, which is not published yet.
    #[inline]
    pub(crate) fn completed(&mut self, head: u16) {
        self.region.store_u16(entry(head) + NEXT, self.last_batch_head, Relaxed);
        self.region.store_u16(LAST_BATCH_HEAD, head, Release);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// The completed chains are published, with this used index.
    #[inline]
    pub(crate) fn published(&mut self, used_idx: u16) {
        self.cross_out(self.batch.iter().copied(), used_idx);
        self.batch.clear();
    }

    #[inline]
    fn cross_out(&self, heads: impl Iterator<Item = u16>, used_idx: u16) {
        // None of this may be visible before the used ring's index: a chain would be lost to the driver.
        fence(Release);
        for head in heads {
            self.region.store_u16(entry(head) + INFLIGHT, 0, Relaxed);
        }
        // Last, since it marks the entries as exact.
        self.region.store_u16(USED_IDX, used_idx, Release);
    }
}

/// The entries that say they are in flight, with their counters.
fn in_flight(region: &View, records: u16) -> Vec<(u64, u16)> {
    let says_so = |index: &u16| region.load_u16(entry(*index) + INFLIGHT, Relaxed) & 0xff == 1;
    (0..records).filter(says_so).map(|index| (region.load_u64(entry(index) + COUNTER, Relaxed), index)).collect()
}

/// Records the entries that the used index has passed although their flags may still say in flight.
fn note_published(region: &View, used_idx: u16, published: &mut [bool]) -> Result<(), InflightFault> {
    let count = used_idx.wrapping_sub(region.load_u16(USED_IDX, Relaxed));
    if usize::from(count) > published.len() {
        return Err(InflightFault::UsedJumped);
    }
    let mut index = region.load_u16(LAST_BATCH_HEAD, Relaxed);
    for _ in 0..count {
        *published.get_mut(usize::from(index)).ok_or(InflightFault::BatchOutOfRange)? = true;
        index = region.load_u16(entry(index) + NEXT, Relaxed);
    }
    Ok(())
}
