//! How much of what is offered a round takes of a queue whose device has nothing to do.
//!
//! Half of it, and the rest in the next round: a device that answers on the spot has then given the one half back while
//! it is at the other, so that guest and device work at the same time. Where they take turns on one CPU nobody works
//! meanwhile, and more rounds only cost more. So in some rounds the queue looks whether the guest offers anything
//! between beginning and end: one that takes turns with us cannot.
//!
//! Owned by its queue. What it is told of the guest's doing is a guess, and a guest that feigns slows down itself.

/// Half of what is offered, but no less than this: less is not worth a round.
const HALF_MIN: usize = 3;

/// Rounds of half in a row in which the guest offered nothing, after which it seems to take turns with us. One on
/// another CPU offers something sooner.
const LOOKS_MAX: u16 = 16;

/// Rounds for which an answer holds: so many that looking, and halves in vain, cost hardly a hundredth of what they
/// cost in each.
const ROUNDS_KEPT: u16 = 1024;

/// The pace of one queue.
#[derive(Debug)]
pub struct Pace {
    knows: Knows,
    /// How far the guest had offered when the round began, if that is to be compared at its end.
    front: Option<u16>,
}

#[derive(Debug)]
enum Knows {
    /// Not yet whether the guest works meanwhile; it did not in so many rounds.
    Nothing { in_vain: u16 },
    /// That it does or does not, which holds for so many rounds.
    Whether { works: bool, rounds: u16 },
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { knows: Knows::Nothing { in_vain: 0 }, front: None }
    }
}

impl Pace {
    /// How many chains the round takes when so many are in sight; `front` tells how far the guest has offered.
    #[inline]
    pub fn begin(&mut self, in_sight: usize, front: impl FnOnce() -> u16) -> usize {
        if in_sight <= HALF_MIN {
            return HALF_MIN;
        }
        let works = match &mut self.knows {
            Knows::Nothing { .. } => {
                self.front = Some(front());
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

    /// Whether the guest is known to take turns with us: it never works while we do.
    #[inline]
    pub fn takes_turns(&self) -> bool {
        matches!(self.knows, Knows::Whether { works: false, .. })
    }

    /// The round is over.
    #[inline]
    pub fn end(&mut self, front: impl FnOnce() -> u16) {
        if let Some(before) = self.front.take() {
            self.learn(front() != before);
        }
    }

    #[cold]
    fn learn(&mut self, moved: bool) {
        let Knows::Nothing { in_vain } = self.knows else { return };
        self.knows = match (moved, in_vain + 1) {
            (true, _) => Knows::Whether { works: true, rounds: ROUNDS_KEPT },
            (false, LOOKS_MAX) => Knows::Whether { works: false, rounds: ROUNDS_KEPT },
            (false, in_vain) => Knows::Nothing { in_vain },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds with so many in sight, each of which the guest offers something in or not: what each took of them, and
    /// how often was looked.
    fn rounds(pace: &mut Pace, count: u16, in_sight: usize, moves: bool) -> (Vec<usize>, usize) {
        let mut looks = 0;
        let took = (0..count).map(|_| {
            let took = pace.begin(in_sight, || 7).min(in_sight);
            pace.end(|| {
                looks += 1;
                if moves { 8 } else { 7 }
            });
            took
        });
        (took.collect(), looks)
    }

    #[test]
    fn halves_end_with_a_guest_that_never_moves_meanwhile_and_are_tried_again() {
        let mut pace = Pace::default();
        for _ in 0..3 {
            assert_eq!(rounds(&mut pace, LOOKS_MAX, 16, false), (vec![8; LOOKS_MAX.into()], LOOKS_MAX.into()));
            assert!(pace.takes_turns());
            assert_eq!(rounds(&mut pace, ROUNDS_KEPT, 16, false), (vec![16; ROUNDS_KEPT.into()], 0));
        }
        // It has another CPU now.
        assert_eq!(rounds(&mut pace, 1 + ROUNDS_KEPT, 16, true), (vec![8; (1 + ROUNDS_KEPT).into()], 1));
        assert!(!pace.takes_turns());
    }

    #[test]
    fn halves_go_on_with_a_guest_that_moves_now_and_then() {
        let mut pace = Pace::default();
        for _ in 0..3 {
            let rare = LOOKS_MAX - 1;
            assert_eq!(rounds(&mut pace, rare, 16, false).0, vec![8; rare.into()]);
            assert_eq!(rounds(&mut pace, 1, 16, true), (vec![8], 1));
            assert_eq!(rounds(&mut pace, ROUNDS_KEPT, 16, false), (vec![8; ROUNDS_KEPT.into()], 0));
        }
    }

    #[test]
    fn a_few_are_taken_together_and_say_nothing_of_the_guest() {
        let mut pace = Pace::default();
        let all = (vec![HALF_MIN; 100], 0);
        assert_eq!(rounds(&mut pace, 100, HALF_MIN, false), all);
        assert_eq!(rounds(&mut pace, 1, HALF_MIN + 1, false), (vec![HALF_MIN], 1));
        assert_eq!(rounds(&mut pace, 1, 16, false), (vec![8], 1));
    }
}
