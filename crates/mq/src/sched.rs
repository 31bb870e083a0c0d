//! Schedulers: which of the bios that wait for a tag gets the next one.
//!
//! Without a scheduler bios wait in the order in which they came, and most do not wait at all. With one, whatever is
//! submitted between two rounds is [inserted](Scheduler::insert) when the round begins, and each tag goes to the bio
//! that the scheduler hands out [next](Scheduler::next). It is asked for no more than there are tags for: what it has
//! not handed out it may still order anew. Bios that lie beside the one that was handed out last join its request
//! without a tag ([`Scheduler::join`]).
//!
//! What is on its way already does not come here: flushes, requests that are handed back, bios with a reserved tag, the
//! rest of a bio that is cut in parts.
//!
//! A scheduler belongs to one namespace of one hardware queue, so nothing here is shared. It allocates at start, for as
//! many bios as its queue takes; it reads no clock and knows of no tags. `docs/schedulers.md` has the rules of each.
//!
//! [spec A.26, D.1; Linux `block/elevator.h`]

mod deadline;
mod fair;
mod kyber;
mod orders;
mod slots;
mod streams;
#[cfg(test)]
mod tests;
mod timeslice;

use std::fmt;

pub use self::deadline::DeadlineConfig;
pub use self::fair::{FAIR_WEIGHTS_MAX, FairConfig, FairDevice, SharedDepth};
pub use self::kyber::KyberConfig;
pub use self::timeslice::{SliceKey, SliceOrder, TimesliceConfig};
use crate::{Bio, DeviceInfo};

/// What a scheduler says when it is asked for a bio.
#[derive(Debug)]
pub enum Selected {
    /// This one.
    Bio(Box<Bio>),
    /// None before this time, nanoseconds, unless one comes or ends before; the largest number if no time helps.
    Wait(u64),
}

/// Decides which of the bios that wait for a tag is next.
pub trait Scheduler: fmt::Debug + Send {
    /// Takes a bio in. There is room: for as many as the scheduler was made for, those handed out among them.
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64);

    /// Hands out the next bio, for which there is a tag.
    fn next(&mut self, now_ns: u64) -> Selected;

    /// Hands out a bio that begins or ends where a request ends or begins, and for which `fits` is true: it joins that
    /// request, which was made of what was handed out last. None if there is none, or none that may go before others.
    fn join(&mut self, range: Reach, fits: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>>;

    /// A bio that this scheduler handed out is over. The driver had the last of its requests since `start_ns`, if it
    /// had any: else that is `now_ns`.
    fn ended(&mut self, bio: &Bio, start_ns: u64, now_ns: u64);

    /// Gives back all bios that were not handed out, in the order in which they came. It is not used any more
    /// afterwards.
    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>));

    /// How it stands.
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
    /// What it was told.
    pub options: Vec<(&'static str, String)>,
    /// Bios that wait.
    pub waiting: usize,
    /// For how long the one does that has waited for longest.
    pub oldest_ns: u64,
    /// What else there is to know, by name.
    pub facts: Vec<(&'static str, u64)>,
}

/// Which scheduler, and its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulerConfig {
    /// None: bios go in the order in which they come.
    #[default]
    None,
    /// Requests in the order of sectors, in batches, and each within its time: mq-deadline.
    Deadline(DeadlineConfig),
    /// As many requests on their way as keep latencies what they should be.
    Kyber(KyberConfig),
    /// Each stream for a while, one after the other.
    Timeslice(TimesliceConfig),
    /// Streams share the device by the time they take of it.
    Fair(FairConfig),
}

impl SchedulerConfig {
    /// Makes the scheduler of a queue of so many tags and bios, of this device. There is none to make for
    /// [`SchedulerConfig::None`], nor for slices of no length: which so cost nothing.
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

    /// Whether it orders bios by time or place. Such a scheduler has to see all that goes to a device: several queues
    /// in front of it do better to share one hardware queue.
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

/// How many of those that wait are looked at for one that joins a request, where they are in no order of sectors (Linux
/// `blk_bio_list_merge`).
const LOOK_BACK: usize = 8;

/// Takes the first bio out of the first few of a list that touches a request and fits; also says when it came.
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
