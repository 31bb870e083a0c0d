//! Writeback credit: the bytes that streams which wait for room in a page cache may read, and each stream's part.
//!
//! A copy of a file reads until the cache is full of dirty pages; from then on it reads as much as is written back.
//! Without a rule one stream had two turns of that and the other one and a half, and the one whose file then ended had
//! to wait for another turn of writes. So a turn of writes without other waiting streams sets a credit: the bytes that
//! it writes. The other streams may read that much until the next one, and no turn is longer than its stream's part of
//! the remaining credit. Random streams do not wait for room; where they exist there is no credit.

use super::WEIGHT;
use super::line::MemberShare;

/// Upper bound of a stream's arrears, bytes: the amount a disk reads in a round.
const BEHIND_MAX: u64 = 32 << 20;

/// See the head of the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Bytes that may still be had.
    left: u64,
    /// Largest service of a stream in turns, in bytes at the default weight.
    most: u64,
    /// Whether random streams have had a turn since the last turn of writes.
    seeks_served: bool,
}

impl Room {
    /// A turn of writes has ended with `bytes` bytes; `alone` if no other stream waited when it began.
    pub(super) fn wrote(&mut self, bytes: u64, alone: bool) {
        self.left = if alone && !self.seeks_served { bytes } else { 0 };
        self.seeks_served = false;
    }

    /// Random streams have had a turn.
    pub(super) fn seek_group_served(&mut self) {
        self.seeks_served = true;
    }

    /// Limits the arrears of a stream that has arrived recently.
    pub(super) fn came(&self, share: &mut MemberShare) {
        share.served = share.served.max(self.most.saturating_sub(BEHIND_MAX));
    }

    /// A stream has used `bytes` bytes in its turn.
    pub(super) fn had(&mut self, share: &mut MemberShare, bytes: u64) {
        let bytes_by_weight = bytes.saturating_mul(u64::from(WEIGHT)) / u64::from(share.weight.max(1));
        share.served = share.served.saturating_add(bytes_by_weight);
        self.most = self.most.max(share.served);
        self.left = self.left.saturating_sub(bytes);
    }

    /// Bytes that a stream may use in its turn with `others` in the queue: its arrears, and its part of the credit left
    /// after that. The writer counts as one of them, so the credit and the lead of one stream become small at the end.
    /// Unlimited if no stream waits for room.
    pub(super) fn part(&self, share: &MemberShare, others: u32) -> u64 {
        if self.left == 0 {
            return u64::MAX;
        }
        let behind =
            self.most.saturating_sub(share.served).min(BEHIND_MAX) * u64::from(share.weight) / u64::from(WEIGHT);
        // At least 1: a turn of 0 would end before it begins.
        ((self.left + u64::from(others) * behind) / (u64::from(others) + 1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn those_who_wait_for_room_have_had_the_same_by_their_weights_when_it_is_used_up() {
        for weights in [[100, 100], [200, 100]] {
            let (mut room, mut shares) = (Room::default(), weights.map(MemberShare::new));
            room.had(&mut shares[0], 5 * MIB);
            for _ in 0..10 {
                room.wrote(27 * MIB, true);
                // A turn is 10 MiB at most, and a bio half a MiB.
                while room.left > 0 {
                    shares.sort_by_key(|share| share.served);
                    for share in &mut shares {
                        let most = room.part(share, 2).min(10 * MIB).next_multiple_of(MIB / 2);
                        room.had(share, most.min(room.left));
                    }
                }
            }
            let apart = shares[0].served.abs_diff(shares[1].served);
            assert!(apart <= MIB, "{apart} with {weights:?}");
        }
    }

    #[test]
    fn nothing_is_shared_out_where_somebody_did_not_wait_for_writes() {
        let (mut room, share) = (Room::default(), MemberShare::new(100));
        room.wrote(MIB, false);
        assert_eq!(room.part(&share, 1), u64::MAX);
        room.seek_group_served();
        room.wrote(MIB, true);
        assert_eq!(room.part(&share, 1), u64::MAX, "those who seek are there");
        room.wrote(MIB, true);
        assert_eq!((room.part(&share, 1), room.part(&share, u32::MAX)), (MIB / 2, 1), "never nothing");
    }
}
