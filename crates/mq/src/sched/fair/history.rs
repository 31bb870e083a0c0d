//! History of a stream: its think time between bios, and the distance between them.

use crate::Bio;

/// A bio that begins this far from where the one before ended, sectors, is far away (CFQ, `CFQQ_SEEK_THR`).
const FAR_SECTORS: u64 = 8 * 100;
/// So many of the last 32 bios that are far away make a stream that seeks (CFQ, `CFQQ_SEEKY`).
const FAR_MAX: u32 = 32 / 8;
/// Longest idling for a stream with short think times: CFQ's `slice_idle`.
pub(super) const IDLE_NS: u64 = 8_000_000;
/// How long one is waited for at least, if at all: a thought that is a little longer than usual must not cost two
/// seeks. BFQ does not wait for less.
const IDLE_MIN_NS: u64 = 2_000_000;
/// Thoughts that are longer count as this long, so that one long one is forgotten soon (CFQ: twice `slice_idle`).
const THINK_MAX_NS: u64 = 2 * IDLE_NS;
/// Samples before think times are used.
const THOUGHTS_MIN: u8 = 3;

/// See the head of the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamHistory {
    /// The sector behind the bio that came last.
    end: u64,
    /// When its last bio ended.
    ended_ns: u64,
    /// A bit for each of the last bios: whether it was far away.
    far: u32,
    /// Mean of its thoughts.
    think_ns: u32,
    thoughts: u8,
    known: bool,
}

impl StreamHistory {
    /// A bio has arrived; `alone` if no other of the stream waits or is in flight.
    #[inline]
    pub(super) fn came(&mut self, bio: &Bio, alone: bool, now_ns: u64) {
        let far = self.known && bio.sector.abs_diff(self.end) > FAR_SECTORS;
        self.far = self.far << 1 | u32::from(far);
        self.end = bio.end();
        if alone && self.known {
            let thought_ns = now_ns.saturating_sub(self.ended_ns).min(THINK_MAX_NS) as u32;
            self.think_ns = if self.thoughts == 0 {
                thought_ns
            } else {
                ((u64::from(self.think_ns) * 7 + u64::from(thought_ns)) / 8) as u32
            };
            self.thoughts = self.thoughts.saturating_add(1);
        }
        self.known = true;
    }

    #[inline]
    pub(super) fn ended(&mut self, now_ns: u64) {
        self.ended_ns = now_ns;
    }

    /// Whether it seeks.
    pub(super) fn seeks(&self) -> bool {
        self.far.count_ones() > FAR_MAX
    }

    /// How long it is waited for, if `most_ns` is the limit.
    pub(super) fn idle_ns(&self, most_ns: u64) -> u64 {
        let think_ns = u64::from(self.think_ns);
        if self.thoughts < THOUGHTS_MIN {
            most_ns
        } else if think_ns > most_ns {
            0
        } else {
            (2 * think_ns).max(IDLE_MIN_NS).min(most_ns)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bio(sector: u64) -> Box<Bio> {
        let mut bio = Bio::with_capacity(0);
        (bio.sector, bio.sectors) = (sector, 8);
        bio
    }

    #[test]
    fn who_reads_in_a_row_does_not_seek_and_who_jumps_about_does() {
        let mut history = StreamHistory::default();
        (0..100).for_each(|at| history.came(&bio(at * 8), false, 0));
        assert!(!history.seeks());
        (0..4).for_each(|at| history.came(&bio(1_000_000 * (1 + at % 2)), false, 0));
        assert!(!history.seeks(), "a jump now and then is no habit");
        history.came(&bio(5_000_000), false, 0);
        assert!(history.seeks());
        (0..32).for_each(|at| history.came(&bio(5_000_008 + at * 8), false, 0));
        assert!(!history.seeks(), "what was long ago is forgotten");
    }

    #[test]
    fn a_stream_is_waited_for_as_long_as_it_thinks() {
        let (mut history, mut now_ns) = (StreamHistory::default(), 0);
        let mut think = |history: &mut StreamHistory, times, thought_ns| {
            for _ in 0..times {
                history.ended(now_ns);
                now_ns += thought_ns;
                history.came(&bio(0), true, now_ns);
            }
        };
        assert_eq!(history.idle_ns(IDLE_NS), IDLE_NS, "nothing is known");
        think(&mut history, 40, 3_000_000);
        assert_eq!((history.idle_ns(IDLE_NS), history.idle_ns(0)), (6_000_000, 0));
        think(&mut history, 40, 50_000);
        assert_eq!(history.idle_ns(IDLE_NS), IDLE_MIN_NS);
        think(&mut history, 5, 1_000_000_000);
        assert!(history.idle_ns(IDLE_NS) > 0, "{history:?}");
        think(&mut history, 5, 1_000_000_000);
        assert_eq!(history.idle_ns(IDLE_NS), 0, "it thinks for longer than it is waited for");
        think(&mut history, 20, 50_000);
        assert_eq!(history.idle_ns(IDLE_NS), IDLE_MIN_NS, "that is forgiven");
    }
}
