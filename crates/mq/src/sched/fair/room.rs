//! What streams may have that wait for room in a page cache, and each one's part of it.
//!
//! Who copies files reads until the cache is full of what is not written yet, and from then on as much as is written.
//! That is not a whole number of turns: one had two of them and the other one and a half, and whose file then ended had
//! to wait for another turn of writes. So when a turn of writes begins that nobody else waits beside, as many bytes as
//! it writes are what the others may have until the next one, and no turn is longer than its stream's part of what is
//! left of them. Those who seek wait for no room: where they are nothing is shared out.

use super::WEIGHT;
use super::line::MemberShare;

/// Who has had less than others counts as behind them by no more than this: what a disk reads in a round.
const BEHIND_MAX: u64 = 32 << 20;

/// See the head of the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Bytes that may still be had.
    left: u64,
    /// The most that anybody has had in turns, in bytes at a usual weight.
    most: u64,
    /// Those who seek have had a turn since writes had one.
    crowded: bool,
}

impl Room {
    /// A turn of writes is over, in which so much was written; `alone` if nobody else wanted anything when it began.
    pub(super) fn wrote(&mut self, bytes: u64, alone: bool) {
        self.left = if alone && !self.crowded { bytes } else { 0 };
        self.crowded = false;
    }

    /// Those who seek have had a turn.
    pub(super) fn crowd(&mut self) {
        self.crowded = true;
    }

    /// Who has not been there for long is not behind by all that others have had.
    pub(super) fn came(&self, share: &mut MemberShare) {
        share.served = share.served.max(self.most.saturating_sub(BEHIND_MAX));
    }

    /// Somebody has had so much in its turn.
    pub(super) fn had(&mut self, share: &mut MemberShare, bytes: u64) {
        let bytes_by_weight = bytes.saturating_mul(u64::from(WEIGHT)) / u64::from(share.weight.max(1));
        share.served = share.served.saturating_add(bytes_by_weight);
        self.most = self.most.max(share.served);
        self.left = self.left.saturating_sub(bytes);
    }

    /// What somebody may have in its turn, with so many others in line: as much as it is behind, and its part of what
    /// is left then. Who writes is one of them, so what is left at last is little, and so is what one has of it before
    /// the others. All it wants, if nobody waits for room.
    pub(super) fn part(&self, share: &MemberShare, others: u32) -> u64 {
        if self.left == 0 {
            return u64::MAX;
        }
        let behind =
            self.most.saturating_sub(share.served).min(BEHIND_MAX) * u64::from(share.weight) / u64::from(WEIGHT);
        // Never nothing, or a turn would be over before it begins.
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
        room.crowd();
        room.wrote(MIB, true);
        assert_eq!(room.part(&share, 1), u64::MAX, "those who seek are there");
        room.wrote(MIB, true);
        assert_eq!((room.part(&share, 1), room.part(&share, u32::MAX)), (MIB / 2, 1), "never nothing");
    }
}
