//! What asynchronous writes cost a device with seeks and a write cache.
//!
//! A disk with a write cache completes writes long before it makes them, so the time of a stream's turn says nothing of
//! them: it fills the cache in a moment with what takes the disk a second, or waits for what another stream has put
//! there. All the time that writes take together is known: their turns, and what reads lose to them. It is divided
//! among the streams by the price of their bios: bytes, and more for each that goes on elsewhere.

use super::SEEK_PRICE;
use crate::Bio;

/// After so much time the past counts half.
const MEMORY_NS: u64 = 4_000_000_000;

/// See the head of the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WriteCost {
    spent_ns: u64,
    price: u64,
}

/// Price of a write behind one that ended at `position`, bytes. What moves no data costs time, too, and has the price
/// of a seek.
pub(super) fn price(bio: &Bio, position: u64) -> u64 {
    let bytes = bio.moves_bytes();
    if bytes > 0 && bio.sector == position { bytes } else { bytes + SEEK_PRICE as u64 }
}

impl WriteCost {
    /// Reads have lost this time to earlier writes.
    pub(super) fn lost(&mut self, ns: u64) {
        self.spent_ns += ns;
    }

    /// A turn of writes of this price has taken so long. Returns what it is charged, ns.
    pub(super) fn wrote(&mut self, price: u64, used_ns: u64) -> u64 {
        self.spent_ns += used_ns;
        self.price += price;
        let charge_ns = scale(price, self.spent_ns, self.price);
        if self.spent_ns > MEMORY_NS {
            (self.spent_ns, self.price) = (self.spent_ns / 2, self.price / 2);
        }
        charge_ns
    }
}

fn scale(amount: u64, by: u64, of: u64) -> u64 {
    let scaled = u128::from(amount) * u128::from(by) / u128::from(of.max(1));
    scaled.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    fn bio(op: Op, sector: u64) -> Box<Bio> {
        let mut bio = Bio::with_capacity(0);
        (bio.op, bio.sector, bio.sectors) = (op, sector, 8);
        bio
    }

    #[test]
    fn nothing_is_free() {
        let seek = SEEK_PRICE as u64;
        assert_eq!(price(&bio(Op::Write, 8), 8), 4096);
        assert_eq!(price(&bio(Op::Write, 16), 8), 4096 + seek);
        assert_eq!(price(&bio(Op::Discard, 8), 8), seek);
    }

    #[test]
    fn the_time_of_all_writes_is_divided_by_price() {
        let mut cost = WriteCost::default();
        assert_eq!(cost.wrote(1000, 50), 50);
        cost.lost(150);
        // A turn with three quarters of the price pays three quarters of 50 + 150 + 200 ns.
        assert_eq!(cost.wrote(3000, 200), 300);
    }
}
