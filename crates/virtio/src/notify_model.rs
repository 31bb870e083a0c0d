//! A model check that no wake-up is lost: all interleavings of one side that publishes and one that goes to sleep,
//! with delayed stores.
//!
//! The same protocol runs in both directions of a ring: [`crate::SplitRing::publish`] against a driver that arms its
//! interrupt, a driver's kick against [`crate::SplitRing::enable_notify`]. The model has the steps of both, each a
//! single access, and a store buffer for each side as on x86: a store waits there until it is drained, which may be at
//! any later step, while loads go ahead. A sequentially consistent store followed by a load is a store that is drained
//! before the load. The model also shows that it finds errors: with any one precaution left out, it finds a sleeper
//! that is never woken.

use std::collections::HashSet;

use crate::packed::{Position, request};
use crate::split::needs_event;

/// Elements that are published, in batches.
const ELEMENTS: u16 = 3;
/// Size of the packed ring: the number of elements in flight at a time, so that it wraps within the run.
const SIZE: u16 = ELEMENTS;
/// The index starts where it wraps within the run.
const START: u16 = 65534;

/// Format of a side's request for notifications.
#[derive(Clone, Copy, PartialEq, Debug)]
enum NotifyMode {
    /// A flag. [2.7.7]
    Flag,
    /// An event index. [2.7.7]
    Event,
    /// A packed ring's event area, one word: disabled, enabled, or with event indexes a position. [2.8.10]
    Packed { event_idx: bool },
}

/// Either side's: both formats' drivers and devices go by these rules when they publish and when they arm.
impl NotifyMode {
    const ALL: [NotifyMode; 4] = [
        NotifyMode::Flag,
        NotifyMode::Event,
        NotifyMode::Packed { event_idx: false },
        NotifyMode::Packed { event_idx: true },
    ];

    /// Request before the run.
    fn at_start(self) -> u32 {
        match self {
            NotifyMode::Flag => 0,
            NotifyMode::Event => START.into(),
            NotifyMode::Packed { .. } => request::DISABLE << 16,
        }
    }

    /// Value stored to disable notifications; `None` if the format has none.
    fn disarm(self) -> Option<u32> {
        match self {
            NotifyMode::Flag => Some(0),
            NotifyMode::Event => None,
            NotifyMode::Packed { .. } => Some(request::DISABLE << 16),
        }
    }

    /// Value stored after taking all up to an index.
    fn arm(self, taken: u16) -> u32 {
        match self {
            NotifyMode::Flag => 1,
            NotifyMode::Event => taken.into(),
            NotifyMode::Packed { event_idx: false } => request::ENABLE << 16,
            NotifyMode::Packed { event_idx: true } => request::DESC << 16 | u32::from(position(taken).word()),
        }
    }

    /// Whether a side that has published from `old` to `new` must notify.
    fn is_met(self, request: u32, old: u16, new: u16) -> bool {
        match self {
            NotifyMode::Flag => request != 0,
            NotifyMode::Event => needs_event(request as u16, new, old),
            NotifyMode::Packed { event_idx } => {
                request::is_met(request, event_idx, position(old), new.wrapping_sub(old), SIZE)
            }
        }
    }
}

/// Position of an element in a packed ring. The run begins at the second slot.
fn position(index: u16) -> Position {
    let mut position = Position::new(1, true);
    position.advance(index.wrapping_sub(START), SIZE);
    position
}

#[derive(Clone, Copy, Debug)]
struct Precautions {
    request: NotifyMode,
    /// Elements shown at once, at most.
    batch: u16,
    publisher_drains: bool,
    sleeper_drains: bool,
    sleeper_looks_again: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Publisher {
    #[default]
    Store,
    LoadRequest,
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
struct ModelState {
    /// Shared memory.
    index: u16,
    request: u32,
    /// Stores that only their own side has seen yet, oldest first.
    index_stores: Vec<u16>,
    request_stores: Vec<u32>,
    publisher: Publisher,
    published: u16,
    /// Before the last batch.
    old: u16,
    sleeper: Sleeper,
    taken: u16,
    wake_up: bool,
}

impl ModelState {
    fn start(how: Precautions) -> ModelState {
        ModelState {
            index: START,
            published: START,
            old: START,
            taken: START,
            request: how.request.at_start(),
            ..ModelState::default()
        }
    }

    /// All that can happen next.
    fn next(&self, how: Precautions) -> Vec<ModelState> {
        let mut states = Vec::new();
        let mut can = |act: &dyn Fn(&mut ModelState)| {
            let mut state = self.clone();
            act(&mut state);
            states.push(state);
        };
        if !self.index_stores.is_empty() {
            can(&|s| s.index = s.index_stores.remove(0));
        }
        if !self.request_stores.is_empty() {
            can(&|s| s.request = s.request_stores.remove(0));
        }
        match self.publisher {
            Publisher::Store => can(&|s| {
                s.old = s.published;
                s.published = s.old.wrapping_add(how.batch.min(START.wrapping_add(ELEMENTS).wrapping_sub(s.old)));
                s.index_stores.push(s.published);
                s.publisher = Publisher::LoadRequest;
            }),
            Publisher::LoadRequest if how.publisher_drains && !self.index_stores.is_empty() => {}
            Publisher::LoadRequest => can(&|s| {
                s.wake_up |= how.request.is_met(s.request, s.old, s.published);
                let done = s.published == START.wrapping_add(ELEMENTS);
                s.publisher = if done { Publisher::Done } else { Publisher::Store };
            }),
            Publisher::Done => {}
        }
        match self.sleeper {
            Sleeper::Disarm => can(&|s| {
                s.request_stores.extend(how.request.disarm());
                s.sleeper = Sleeper::Take;
            }),
            Sleeper::Take => can(&|s| {
                s.taken = s.index;
                s.sleeper = Sleeper::Arm;
            }),
            Sleeper::Arm => can(&|s| {
                s.request_stores.push(how.request.arm(s.taken));
                s.sleeper = if how.sleeper_looks_again { Sleeper::LookAgain } else { Sleeper::Asleep };
            }),
            Sleeper::LookAgain if how.sleeper_drains && !self.request_stores.is_empty() => {}
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

/// Explores every reachable state. Returns one without a next step though elements are left.
fn lost_wake_up(how: Precautions) -> Option<ModelState> {
    let mut seen = HashSet::from([ModelState::start(how)]);
    let mut open = vec![ModelState::start(how)];
    while let Some(state) = open.pop() {
        let next = state.next(how);
        if next.is_empty() && state.taken != START.wrapping_add(ELEMENTS) {
            return Some(state);
        }
        open.extend(next.into_iter().filter(|state| seen.insert(state.clone())));
    }
    let publications = usize::from(ELEMENTS.div_ceil(how.batch));
    assert!(seen.len() > 50 * publications, "only {} states: the model does not move", seen.len());
    None
}

/// All precautions, in each format and with each length of batches: but not all at once, which a sleeper could not
/// miss.
fn all() -> impl Iterator<Item = Precautions> {
    NotifyMode::ALL.into_iter().flat_map(|request| {
        let drains =
            Precautions { request, batch: 0, publisher_drains: true, sleeper_drains: true, sleeper_looks_again: true };
        (1..ELEMENTS).map(move |batch| Precautions { batch, ..drains })
    })
}

#[test]
fn no_wake_up_is_lost() {
    for all in all() {
        assert_eq!(lost_wake_up(all), None, "{all:?}");
    }
}

#[test]
fn each_precaution_is_needed() {
    for all in all() {
        for less in [
            Precautions { publisher_drains: false, ..all },
            Precautions { sleeper_drains: false, ..all },
            Precautions { sleeper_looks_again: false, ..all },
        ] {
            assert!(lost_wake_up(less).is_some(), "{less:?} loses nothing");
        }
    }
}
