//! Schedulers: the order in which bios that wait for a tag get one.
//!
//! Without a scheduler bios wait in order of arrival, and most do not wait at all. With one, the bios submitted between
//! two rounds are [inserted](Scheduler::insert) when the next round begins, and each tag goes to the bio that the
//! scheduler returns [next](Scheduler::next). It is called once for each free tag, so it may still reorder all bios
//! that it holds. Bios adjacent to the one returned last join its request without a tag ([`Scheduler::join`]).
//!
//! Some bios bypass the scheduler, because they are dispatched already: flushes, requeued requests, bios with a
//! reserved tag, the rest of a split bio.
//!
//! A scheduler belongs to one namespace of one hardware queue and shares no state. It allocates at start, for as many
//! bios as its queue accepts; it reads no clock and knows no tags. `docs/schedulers.md` has the rules of each.
//!
//! [spec A.26, D.1; Linux `block/elevator.h`]

mod deadline;
mod fair;
mod kyber;
mod orders;
mod sequences;
mod slots;
mod streams;
#[cfg(test)]
mod tests;
mod timeslice;

use std::fmt;

pub use self::deadline::DeadlineConfig;
pub use self::fair::{FAIR_WEIGHTS_MAX, FairConfig, FairDevice, SharedDepth, SharedTenure, StreamKey};
pub use self::kyber::KyberConfig;
pub use self::timeslice::{SliceKey, SliceOrder, TimesliceConfig};
use crate::{Bio, DeviceInfo};

/// Answer of a scheduler to a call of [`Scheduler::next`].
#[derive(Debug)]
pub enum Selected {
    /// This one.
    Bio(Box<Bio>),
    /// No bio before this time, ns, unless one is inserted or ends earlier; `u64::MAX` if only such an event helps.
    Wait(u64),
}

/// Decides which of the bios that wait for a tag is next.
pub trait Scheduler: fmt::Debug + Send {
    /// Takes a bio in. There is room: for as many as the scheduler was made for, those handed out among them.
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64);

    /// Hands out the next bio, for which there is a tag.
    fn next(&mut self, now_ns: u64) -> Selected;

    /// Returns a waiting bio that is adjacent to a request and for which `fits` is true: it joins that request, which
    /// was made of the bio returned last. `None` if there is no such bio, or it must not overtake others.
    fn join(&mut self, range: Reach, fits: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>>;

    /// A bio that this scheduler returned has ended. `start_ns`: dispatch of its last request to the driver, or
    /// `now_ns` if it had none.
    fn ended(&mut self, bio: &Bio, start_ns: u64, now_ns: u64);

    /// Takes out a waiting bio for which this is true, as if it had never come. `None` if there is none. For rare use:
    /// looks at each.
    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>>;

    /// Its queue has so many tags from now on.
    fn set_depth(&mut self, _depth: usize) {}

    /// Gives back all bios that were not handed out, in the order in which they came. It is not used any more
    /// afterwards.
    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>));

    /// State for inspection.
    fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot;
}

/// The sectors of a request: the first, and the one behind its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// First sector.
    pub start: u64,
    /// The sector behind the last.
    pub end: u64,
}

impl Reach {
    /// Whether a bio touches it.
    pub fn touches(self, bio: &Bio) -> bool {
        bio.sector == self.end || bio.end() == self.start
    }
}

/// A scheduler at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerSnapshot {
    /// Its name, as in [`SchedulerConfig`].
    pub name: &'static str,
    /// Options in effect.
    pub options: Vec<(&'static str, String)>,
    /// Bios that wait.
    pub waiting: usize,
    /// For how long the one does that has waited for longest.
    pub oldest_ns: u64,
    /// Further facts, by name.
    pub facts: Vec<(&'static str, u64)>,
}

/// Which scheduler, and its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulerConfig {
    /// No scheduler: order of arrival.
    #[default]
    None,
    /// Requests in the order of sectors, in batches, and each within its time: mq-deadline.
    Deadline(DeadlineConfig),
    /// A number of requests in flight that keeps latencies within targets.
    Kyber(KyberConfig),
    /// Each stream for a while, one after the other.
    Timeslice(TimesliceConfig),
    /// Streams share the device by the time they take of it.
    Fair(FairConfig),
}

impl SchedulerConfig {
    /// Builds the scheduler of a queue with `depth` tags and `bios_max` bios, on this device. Returns `None` for
    /// [`SchedulerConfig::None`] and for slices of length 0: these queues have no scheduler, and no cost of one.
    pub fn build(&self, depth: usize, bios_max: usize, info: &DeviceInfo) -> Option<Box<dyn Scheduler>> {
        match self {
            SchedulerConfig::None => None,
            SchedulerConfig::Deadline(config) => Some(Box::new(deadline::Deadline::new(*config, depth, bios_max))),
            SchedulerConfig::Kyber(config) => Some(Box::new(kyber::Kyber::new(*config, bios_max))),
            SchedulerConfig::Timeslice(config) if config.slice_us == 0 => None,
            SchedulerConfig::Timeslice(config) => Some(Box::new(timeslice::Timeslice::new(*config, bios_max))),
            SchedulerConfig::Fair(config) => Some(Box::new(fair::Fair::new(*config, bios_max, info))),
        }
    }

    /// Whether it orders bios by time or position. Such a scheduler must see all I/O of a device, so several queues in
    /// front of it should share one hardware queue.
    pub fn orders(&self) -> bool {
        match self {
            SchedulerConfig::None | SchedulerConfig::Kyber(_) => false,
            SchedulerConfig::Timeslice(config) => config.slice_us > 0,
            SchedulerConfig::Deadline(_) | SchedulerConfig::Fair(_) => true,
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            SchedulerConfig::None => "none",
            SchedulerConfig::Deadline(_) => "deadline",
            SchedulerConfig::Kyber(_) => "kyber",
            SchedulerConfig::Timeslice(_) => "timeslice",
            SchedulerConfig::Fair(_) => "fair",
        }
    }
}

/// Number of waiting bios examined for one that joins a request, if they are not sorted by sector (Linux
/// `blk_bio_list_merge`).
const LOOK_BACK: usize = 8;

/// Takes the first bio that is adjacent to a request and fits, among the first few of a list; also returns its time of
/// arrival.
fn join_from(
    slots: &mut slots::Slots,
    list: &mut slots::List,
    reach: Reach,
    fits: &mut dyn FnMut(&Bio) -> bool,
) -> Option<(Box<Bio>, u64)> {
    let mut first = slots.iter(list).take(LOOK_BACK);
    let at = first.find(|at| {
        let bio = slots.bio(*at);
        reach.touches(bio) && fits(bio)
    })?;
    drop(first);
    let since_ns = slots.since_ns(at);
    Some((slots.remove(list, at), since_ns))
}
