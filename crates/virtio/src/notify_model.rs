//! No wake-up is lost: all interleavings of one side that publishes and one that goes to sleep, on a machine whose
//! stores are seen late.
//!
//! The same protocol runs in both directions of a ring: [`crate::SplitRing::publish`] against a driver that arms its
//! interrupt, a driver's kick against [`crate::SplitRing::enable_notify`]. The model has the steps of both, each a
//! single access, and a store buffer per side as on x86: a store waits there until it is drained, which may be at any
//! later step, while loads go ahead. A sequentially consistent store followed by a load is a store that is drained
//! before the load. The model is shown to have teeth: with any one precaution left out it finds a sleeper that nobody
//! wakes.

use std::collections::HashSet;

use crate::split::needs_event;

/// Elements that are published one by one.
const ELEMENTS: u16 = 3;
/// The index starts where it wraps within the run.
const START: u16 = 65534;

#[derive(Clone, Copy, Debug)]
struct Precautions {
    /// By event index, rather than by flag.
    event_idx: bool,
    publisher_drains: bool,
    sleeper_drains: bool,
    sleeper_looks_again: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Publisher {
    #[default]
    Store,
    LoadWish,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Sleeper {
    #[default]
    Disarm,
    Take,
    Arm,
    LookAgain,
    Asleep,
}

/// Everything, as it can differ between two moments.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct State {
    /// Shared memory.
    index: u16,
    wish: u16,
    /// Stores that only their own side has seen yet, oldest first.
    index_stores: Vec<u16>,
    wish_stores: Vec<u16>,
    publisher: Publisher,
    published: u16,
    sleeper: Sleeper,
    taken: u16,
    wake_up: bool,
}

impl State {
    fn start() -> State {
        State { index: START, published: START, taken: START, wish: START, ..State::default() }
    }

    /// All that can happen next.
    fn next(&self, how: Precautions) -> Vec<State> {
        let mut states = Vec::new();
        let mut can = |act: &dyn Fn(&mut State)| {
            let mut state = self.clone();
            act(&mut state);
            states.push(state);
        };
        if !self.index_stores.is_empty() {
            can(&|s| s.index = s.index_stores.remove(0));
        }
        if !self.wish_stores.is_empty() {
            can(&|s| s.wish = s.wish_stores.remove(0));
        }
        match self.publisher {
            Publisher::Store => can(&|s| {
                s.published = s.published.wrapping_add(1);
                s.index_stores.push(s.published);
                s.publisher = Publisher::LoadWish;
            }),
            Publisher::LoadWish if how.publisher_drains && !self.index_stores.is_empty() => {}
            Publisher::LoadWish => can(&|s| {
                let wanted = if how.event_idx {
                    needs_event(s.wish, s.published, s.published.wrapping_sub(1))
                } else {
                    s.wish != 0
                };
                s.wake_up |= wanted;
                let done = s.published == START.wrapping_add(ELEMENTS);
                s.publisher = if done { Publisher::Done } else { Publisher::Store };
            }),
            Publisher::Done => {}
        }
        match self.sleeper {
            Sleeper::Disarm => can(&|s| {
                if !how.event_idx {
                    s.wish_stores.push(0);
                }
                s.sleeper = Sleeper::Take;
            }),
            Sleeper::Take => can(&|s| {
                s.taken = s.index;
                s.sleeper = Sleeper::Arm;
            }),
            Sleeper::Arm => can(&|s| {
                s.wish_stores.push(if how.event_idx { s.taken } else { 1 });
                s.sleeper = if how.sleeper_looks_again { Sleeper::LookAgain } else { Sleeper::Asleep };
            }),
            Sleeper::LookAgain if how.sleeper_drains && !self.wish_stores.is_empty() => {}
            Sleeper::LookAgain => can(&|s| {
                s.sleeper = if s.index == s.taken { Sleeper::Asleep } else { Sleeper::Disarm };
            }),
            Sleeper::Asleep if self.wake_up => can(&|s| {
                s.wake_up = false;
                s.sleeper = Sleeper::Disarm;
            }),
            Sleeper::Asleep => {}
        }
        states
    }
}

/// Looks at every state that can be reached. Returns one in which nothing can happen any more though not all was
/// taken.
fn lost_wake_up(how: Precautions) -> Option<State> {
    let mut seen = HashSet::from([State::start()]);
    let mut open = vec![State::start()];
    while let Some(state) = open.pop() {
        let next = state.next(how);
        if next.is_empty() && state.taken != START.wrapping_add(ELEMENTS) {
            return Some(state);
        }
        open.extend(next.into_iter().filter(|state| seen.insert(state.clone())));
    }
    assert!(seen.len() > 200, "only {} states: the model does not move", seen.len());
    None
}

#[test]
fn no_wake_up_is_lost() {
    for event_idx in [true, false] {
        let all = Precautions { event_idx, publisher_drains: true, sleeper_drains: true, sleeper_looks_again: true };
        assert_eq!(lost_wake_up(all), None, "event index {event_idx}");
    }
}

#[test]
fn each_precaution_is_needed() {
    for event_idx in [true, false] {
        let all = Precautions { event_idx, publisher_drains: true, sleeper_drains: true, sleeper_looks_again: true };
        for less in [
            Precautions { publisher_drains: false, ..all },
            Precautions { sleeper_drains: false, ..all },
            Precautions { sleeper_looks_again: false, ..all },
        ] {
            assert!(lost_wake_up(less).is_some(), "{less:?} loses nothing");
        }
    }
}
