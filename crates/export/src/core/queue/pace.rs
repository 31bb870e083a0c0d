//! Number of available requests that a round takes from a queue whose device is idle.
//!
//! Half of them, and the rest in the next round: a device that completes at once has then completed one half while it
//! executes the other, so client and device overlap. A client and a lane that alternate on one CPU cannot overlap, and
//! more rounds only add cost. The queue therefore checks periodically whether the client submits requests between the
//! start of the first half and the end of the second; an alternating client can do so only while a signal has us give
//! the CPU to it, so what it submits during a signal does not count.
//!
//! A client on another CPU synchronises with us and submits at the same point of each round. That may be during our
//! completions, or while the lane serves another queue, so the check includes these times.
//!
//! Owned by its queue. Its estimate is a guess; a misbehaving client only slows down itself.

/// Minimum half: fewer requests are not worth a round.
const HALF_MIN: usize = 3;

/// Consecutive checks without a submission after which the client counts as alternating. Others submit sooner.
const LOOKS_MAX: u16 = 32;

/// Rounds for which a result is valid: checks and unneeded halves then add about a hundredth of their cost per round.
const ROUNDS_KEPT: u16 = 1024;

/// Pacing state of one queue.
#[derive(Debug)]
pub struct FetchPace {
    knows: Knows,
    /// The client's position at the start of the current check, if any.
    front: Option<u16>,
    /// Whether a check without a submission counts.
    counts: bool,
}

#[derive(Debug)]
enum Knows {
    /// Undecided, after this many checks without a submission.
    Nothing { in_vain: u16 },
    /// Decided for this many rounds.
    Whether { works: bool, rounds: u16 },
}

impl Default for FetchPace {
    fn default() -> FetchPace {
        FetchPace { knows: Knows::Nothing { in_vain: 0 }, front: None, counts: false }
    }
}

impl FetchPace {
    /// Starts a round that returns completions first; `front` returns the client's position.
    #[inline]
    pub fn resume(&mut self, front: impl FnOnce() -> u16) {
        // Not before a failed check: depth 1 is never checked.
        if self.front.is_none() && matches!(self.knows, Knows::Nothing { in_vain: 1.. }) {
            self.front = Some(front());
        }
    }

    /// Number of requests to take of `in_sight` available ones; `front` returns the client's position. The caller may
    /// pass any `in_sight` if the client [alternates](FetchPace::takes_turns).
    #[inline]
    pub fn begin(&mut self, in_sight: usize, front: impl FnOnce() -> u16) -> usize {
        let works = match &mut self.knows {
            Knows::Nothing { .. } if in_sight <= HALF_MIN => true,
            Knows::Nothing { .. } => {
                self.front.get_or_insert_with(front);
                self.counts = true;
                true
            }
            Knows::Whether { works, rounds } => {
                let works = *works;
                *rounds -= 1;
                if *rounds == 0 {
                    self.knows = Knows::Nothing { in_vain: 0 };
                }
                works
            }
        };
        if works { in_sight.div_ceil(2).max(HALF_MIN) } else { usize::MAX }
    }

    /// Whether the client is known to alternate with us on one CPU.
    #[inline]
    pub fn takes_turns(&self) -> bool {
        matches!(self.knows, Knows::Whether { works: false, .. })
    }

    /// Signals the client, which may run on our CPU meanwhile: what it submits only then does not count.
    #[inline]
    pub fn signal(&mut self, front: impl Fn() -> u16, signal: impl FnOnce()) {
        let has_not_moved = self.front.is_some_and(|before| before == front());
        signal();
        if has_not_moved {
            self.front = Some(front());
        }
    }

    /// Ends a round; `goes_on` says whether the rest is taken next.
    #[inline]
    pub fn end(&mut self, goes_on: bool, front: impl FnOnce() -> u16) {
        if !goes_on && let Some(before) = self.front.take() {
            self.learn(front() != before);
        }
    }

    #[cold]
    fn learn(&mut self, moved: bool) {
        let counts = std::mem::take(&mut self.counts);
        let Knows::Nothing { in_vain } = self.knows else { return };
        self.knows = match (moved, in_vain + u16::from(counts)) {
            (true, _) => Knows::Whether { works: true, rounds: ROUNDS_KEPT },
            (false, LOOKS_MAX..) => Knows::Whether { works: false, rounds: ROUNDS_KEPT },
            (false, in_vain) => Knows::Nothing { in_vain },
        };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Rounds with this number of available requests, in each of which the client submits some or none. Returns the
    /// number taken by each round, and the number of checks.
    fn rounds(pace: &mut FetchPace, count: u16, in_sight: usize, moves: bool) -> (Vec<usize>, usize) {
        let mut looks = 0;
        let took = (0..count).map(|_| {
            let took = pace.begin(in_sight, || 7).min(in_sight);
            pace.end(false, || {
                looks += 1;
                if moves { 8 } else { 7 }
            });
            took
        });
        (took.collect(), looks)
    }

    #[test]
    fn halves_end_with_a_guest_that_never_moves_meanwhile_and_are_tried_again() {
        let mut pace = FetchPace::default();
        for _ in 0..3 {
            assert_eq!(rounds(&mut pace, LOOKS_MAX, 16, false), (vec![8; LOOKS_MAX.into()], LOOKS_MAX.into()));
            assert!(pace.takes_turns());
            assert_eq!(rounds(&mut pace, ROUNDS_KEPT, 16, false), (vec![16; ROUNDS_KEPT.into()], 0));
        }
        // The client now has another CPU.
        assert_eq!(rounds(&mut pace, 1 + ROUNDS_KEPT, 16, true), (vec![8; (1 + ROUNDS_KEPT).into()], 1));
        assert!(!pace.takes_turns());
    }

    #[test]
    fn halves_go_on_with_a_guest_that_moves_now_and_then() {
        let mut pace = FetchPace::default();
        for _ in 0..3 {
            let rare = LOOKS_MAX - 1;
            assert_eq!(rounds(&mut pace, rare, 16, false).0, vec![8; rare.into()]);
            assert_eq!(rounds(&mut pace, 1, 16, true), (vec![8], 1));
            assert_eq!(rounds(&mut pace, ROUNDS_KEPT, 16, false), (vec![8; ROUNDS_KEPT.into()], 0));
        }
    }

    #[test]
    fn a_guest_that_moves_at_another_moment_than_the_first_half_is_seen() {
        // During the return of completions, and while the lane serves other queues between the halves.
        for (at_start, between) in [(7, 8), (7, 7)] {
            let mut pace = FetchPace::default();
            assert_eq!(pace.begin(16, || 7), 8);
            pace.end(false, || 7);
            pace.resume(|| at_start);
            assert_eq!(pace.begin(16, || 8), 8);
            pace.end(true, || between);
            pace.resume(|| 8);
            pace.end(false, || 8);
            assert!(matches!(pace.knows, Knows::Whether { works: true, .. }), "{pace:?}");
        }
        // The client may run between two of our turns.
        let mut pace = FetchPace::default();
        for turn in 0..LOOKS_MAX {
            pace.resume(|| turn);
            assert_eq!(pace.begin(16, || turn), 8);
            pace.end(true, || turn);
            pace.resume(|| turn);
            pace.end(false, || turn);
        }
        assert!(pace.takes_turns());
    }

    #[test]
    fn a_guest_that_moves_only_while_it_is_signalled_takes_turns() {
        let front = Cell::new(0);
        let run = |pace: &mut FetchPace, before, after| {
            pace.resume(|| front.get());
            pace.begin(16, || front.get());
            front.update(|front| front + before);
            pace.signal(|| front.get(), || front.update(|front| front + 1));
            front.update(|front| front + after);
            pace.end(false, || front.get());
        };
        let mut pace = FetchPace::default();
        (0..LOOKS_MAX).for_each(|_| run(&mut pace, 0, 0));
        assert!(pace.takes_turns());
        for (before, after) in [(1, 0), (0, 1)] {
            let mut pace = FetchPace::default();
            run(&mut pace, before, after);
            assert!(matches!(pace.knows, Knows::Whether { works: true, .. }), "{before}, {after}: {pace:?}");
        }
    }

    #[test]
    fn a_few_are_taken_together_and_say_nothing_of_the_guest() {
        let mut pace = FetchPace::default();
        let all = (vec![HALF_MIN; 100], 0);
        assert_eq!(rounds(&mut pace, 100, HALF_MIN, false), all);
        assert_eq!(rounds(&mut pace, 1, HALF_MIN + 1, false), (vec![HALF_MIN], 1));
        assert_eq!(rounds(&mut pace, 1, 16, false), (vec![8], 1));
    }
}
