//! `timeslice`: the device serves one stream at a time, for a slice.
//!
//! After the patch "blk-mq: per software queue time slices" in the form of spec D.1. The stream with the current slice
//! is the owner: only its bios are dispatched, in order of arrival. A slice ends when its time is up; if the owner had
//! bios in it, it is extended, a few times. Then the next stream has a slice. A stream that had one waits until all
//! others had one, which is an epoch: at most one slice a stream in each epoch.
//!
//! The post's text and its code differ, and neither is always right. Each difference is an option:
//!
//! | | the post's text | its code | here |
//! |---|---|---|---|
//! | owner of a slice | software queue | software queue, by CPU | `key`: stream, or software queue |
//! | length of a slice | slice, extended up to 3 times | up to 5 units | `extensions`, 3 |
//! | the owner has no bio | the slice ends | all wait for its end | `idle_us`: they wait as in CFQ, 8 ms |
//! | unit of a slice | µs | ticks, rounded up: 4 ms at HZ 250 | ns; `tick_us` rounds up to ticks |
//! | others' requests in flight | | mixed with the owner's | `drain`: off, or waited for |
//! | next in an epoch | | the lowest number | `order`: arrival, or the lowest number |
//!
//! A seventh difference is the comparison of times: the code uses 32 bits that begin five minutes before they overflow,
//! and is off until then on 32-bit machines. Here times have 64 bits, and no slice is due at first.
//!
//! A slice of length 0 is no scheduler: see [`SchedulerConfig::build`](super::SchedulerConfig::build).

use std::collections::VecDeque;

use super::orders::{OrderList, OrderLists};
use super::slots::{List, Slots};
use super::streams::Streams;
use super::{Reach, Scheduler, SchedulerSnapshot, Selected, join_from};
use crate::Bio;

/// Owner of a slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceKey {
    /// A stream's: [`Bio::stream`].
    #[default]
    Stream,
    /// A software queue: one for each thread of a shared hardware queue, otherwise one for all.
    Queue,
}

/// Order within an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceOrder {
    /// Longest wait first.
    #[default]
    Arrival,
    /// The lowest number.
    Lowest,
}

/// Options of `timeslice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimesliceConfig {
    /// Length of a slice, microseconds; zero for no time slices.
    pub slice_us: u32,
    /// How often a slice in which the owner had something to do is extended by its length.
    pub extensions: u32,
    /// Wait for an owner without waiting bios and without requests in flight, µs, within its slice. The largest number:
    /// until the end of its slice.
    pub idle_us: u32,
    /// Slices are rounded up to multiples of this, microseconds, and end on one; zero if they are not.
    pub tick_us: u32,
    /// Owner of a slice.
    pub key: SliceKey,
    /// Order within an epoch.
    pub order: SliceOrder,
    /// Whether an owner waits until no request of others is in flight; its slice begins then.
    pub drain: bool,
}

impl Default for TimesliceConfig {
    fn default() -> TimesliceConfig {
        TimesliceConfig {
            // In the model of spec D.7 as good as CFQ on a disk that turns; the post's were too short to pay for a
            // seek.
            slice_us: 20_000,
            extensions: 3,
            // CFQ's value (slice_idle): most sequential readers return within it.
            idle_us: 8000,
            tick_us: 0,
            key: SliceKey::default(),
            order: SliceOrder::default(),
            drain: false,
        }
    }
}

impl TimesliceConfig {
    /// As the code of the post behaves, on a machine with ticks of this length.
    pub fn as_posted(slice_us: u32, tick_us: u32) -> TimesliceConfig {
        TimesliceConfig {
            slice_us,
            extensions: 4,
            idle_us: u32::MAX,
            tick_us,
            key: SliceKey::Queue,
            order: SliceOrder::Lowest,
            drain: false,
        }
    }

    /// End of a slice that begins now.
    fn end_ns(&self, now_ns: u64) -> u64 {
        let slice_ns = u64::from(self.slice_us) * 1000;
        match u64::from(self.tick_us) * 1000 {
            0 => now_ns.saturating_add(slice_ns),
            tick_ns => (now_ns / tick_ns).saturating_add(slice_ns.div_ceil(tick_ns)).saturating_mul(tick_ns),
        }
    }
}

/// Mark in the key of a stream whose submitter is unknown, beside the number of its queue.
const UNKNOWN_KEY: u64 = 1 << 32;

/// A stream with its bios.
#[derive(Clone, Copy, Debug, Default)]
struct TimesliceStream {
    bios: List,
    in_flight: u32,
    /// The epoch it was last served in.
    served: u64,
}

/// Streams that wait for a slice, by slot.
#[derive(Debug)]
enum Turns {
    /// In the order in which they came; each is in it once.
    Arrival(VecDeque<u32>),
    Lowest(OrderList),
}

/// See the head of the module.
#[derive(Debug)]
pub(crate) struct Timeslice {
    config: TimesliceConfig,
    slots: Slots,
    streams: Streams<TimesliceStream>,
    /// Stream slots, for the order by number.
    numbers: OrderLists,
    /// Those with bios that had no turn in this epoch.
    turn: Turns,
    /// Those with bios that had.
    later: Turns,
    waiting: usize,
    in_flight: usize,
    /// Counted from one.
    epoch: u64,
    owner: Option<Slice>,
}

/// The slice that lasts.
#[derive(Clone, Copy, Debug)]
struct Slice {
    /// Place of its owner.
    stream: u32,
    /// End of the slice, without extensions; `None` before it has begun.
    end_ns: Option<u64>,
    /// The owner had something to do since it began or was extended.
    used: bool,
    extended: u32,
    /// Time since which the owner has had no bio waiting or in flight.
    idle_since_ns: Option<u64>,
}

impl Slice {
    /// Until when an owner without bios keeps the others waiting.
    fn idle_until_ns(&mut self, config: &TimesliceConfig, owner: &TimesliceStream, end_ns: u64, now_ns: u64) -> u64 {
        if config.idle_us == u32::MAX || owner.in_flight > 0 {
            return end_ns;
        }
        let since_ns = *self.idle_since_ns.get_or_insert(now_ns);
        end_ns.min(since_ns.saturating_add(u64::from(config.idle_us) * 1000))
    }
}

impl Timeslice {
    pub(crate) fn new(config: TimesliceConfig, bios_max: usize) -> Timeslice {
        let streams = Streams::new(bios_max);
        let numbers = OrderLists::new(if config.order == SliceOrder::Lowest { streams.places() } else { 0 }, 2);
        let line = || match config.order {
            SliceOrder::Arrival => Turns::Arrival(VecDeque::with_capacity(bios_max)),
            SliceOrder::Lowest => Turns::Lowest(numbers.order()),
        };
        let (turn, later) = (line(), line());
        Timeslice {
            slots: Slots::new(bios_max),
            numbers,
            streams,
            turn,
            later,
            waiting: 0,
            in_flight: 0,
            epoch: 1,
            owner: None,
            config,
        }
    }

    #[inline]
    fn key(&self, bio: &Bio) -> u64 {
        match self.config.key {
            // Of an unknown submitter only the queue is known.
            SliceKey::Stream if bio.stream > 0 => bio.stream.into(),
            SliceKey::Stream => UNKNOWN_KEY | u64::from(bio.submitter),
            SliceKey::Queue => bio.submitter.into(),
        }
    }

    /// Queues a stream that has bios.
    fn line_up(&mut self, stream: u32) {
        let line = if self.streams.get(stream).served == self.epoch { &mut self.later } else { &mut self.turn };
        match line {
            Turns::Arrival(line) => line.push_back(stream),
            Turns::Lowest(order) => self.numbers.insert(order, stream, self.streams.stream(stream)),
        }
    }

    /// Takes a stream out of the line that it is in.
    fn leave_line(&mut self, stream: u32) {
        let line = if self.streams.get(stream).served == self.epoch { &mut self.later } else { &mut self.turn };
        match line {
            Turns::Arrival(line) => line.retain(|other| *other != stream),
            Turns::Lowest(order) => self.numbers.remove(order, stream, self.streams.stream(stream)),
        }
    }

    /// Next stream with bios, if any; begins a new epoch if all had a slice.
    fn next_in_line(&mut self) -> Option<u32> {
        for _ in 0..2 {
            let next = match &mut self.turn {
                Turns::Arrival(line) => line.pop_front(),
                Turns::Lowest(order) => self.numbers.pop_first(order),
            };
            if next.is_some() {
                return next;
            }
            self.epoch += 1;
            std::mem::swap(&mut self.turn, &mut self.later);
        }
        None
    }

    /// One step without a bio to return: a slice begins, is extended or passes on; or the time until which to wait for
    /// the owner.
    #[inline(never)]
    fn move_on(&mut self, now_ns: u64) -> Option<u64> {
        let Some(slice) = &mut self.owner else { return self.change_owner() };
        let stream = self.streams.get(slice.stream);
        let Some(end_ns) = slice.end_ns else {
            if self.config.drain && self.in_flight > stream.in_flight as usize {
                return Some(u64::MAX);
            }
            slice.end_ns = Some(self.config.end_ns(now_ns));
            return None;
        };
        if now_ns < end_ns {
            let until_ns = slice.idle_until_ns(&self.config, stream, end_ns, now_ns);
            if self.waiting == 0 {
                return Some(u64::MAX);
            }
            if now_ns < until_ns {
                return Some(until_ns);
            }
        } else if slice.used && slice.extended < self.config.extensions {
            slice.extended += 1;
            (slice.used, slice.end_ns) = (false, Some(self.config.end_ns(now_ns)));
            return None;
        }
        self.change_owner()
    }

    /// Passes the slice on. `None` if no stream waits, in which case no time helps.
    fn change_owner(&mut self) -> Option<u64> {
        if let Some(slice) = self.owner.take() {
            let stream = self.streams.get(slice.stream);
            if !stream.bios.is_empty() {
                self.line_up(slice.stream);
            } else if stream.in_flight == 0 {
                self.streams.rest(slice.stream);
            }
        }
        let Some(stream) = self.next_in_line() else { return Some(u64::MAX) };
        self.streams.get_mut(stream).served = self.epoch;
        self.owner = Some(Slice { stream, end_ns: None, used: false, extended: 0, idle_since_ns: None });
        None
    }

    /// A stream has something to do again.
    #[inline(never)]
    fn wake(&mut self, stream: u32) {
        self.streams.work(stream);
        match &mut self.owner {
            Some(slice) if slice.stream == stream => slice.idle_since_ns = None,
            _ => self.line_up(stream),
        }
    }
}

impl Scheduler for Timeslice {
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64) {
        let key = self.key(&bio);
        let at = self.streams.find_or_add(key);
        let stream = self.streams.get_mut(at);
        let first = stream.bios.is_empty();
        self.slots.push(&mut stream.bios, bio, now_ns);
        self.waiting += 1;
        if first {
            self.wake(at);
        }
    }

    fn next(&mut self, now_ns: u64) -> Selected {
        loop {
            if let Some(slice) = &mut self.owner
                && slice.end_ns.is_some_and(|end_ns| now_ns < end_ns)
                && let stream = self.streams.get_mut(slice.stream)
                && let Some((bio, _)) = self.slots.pop(&mut stream.bios)
            {
                (slice.used, slice.idle_since_ns) = (true, None);
                stream.in_flight += 1;
                self.in_flight += 1;
                self.waiting -= 1;
                return Selected::Bio(bio);
            }
            if let Some(until_ns) = self.move_on(now_ns) {
                return Selected::Wait(until_ns);
            }
        }
    }

    fn join(&mut self, reach: Reach, fits: &mut dyn FnMut(&Bio) -> bool, _now_ns: u64) -> Option<Box<Bio>> {
        let stream = self.streams.get_mut(self.owner?.stream);
        let (bio, _) = join_from(&mut self.slots, &mut stream.bios, reach, fits)?;
        stream.in_flight += 1;
        self.in_flight += 1;
        self.waiting -= 1;
        Some(bio)
    }

    fn ended(&mut self, bio: &Bio, _start_ns: u64, now_ns: u64) {
        self.in_flight -= 1;
        // The stream is known while a request of it is in flight.
        let Some(at) = self.streams.find(self.key(bio)) else { return };
        let stream = self.streams.get_mut(at);
        stream.in_flight -= 1;
        if stream.in_flight > 0 || !stream.bios.is_empty() {
            return;
        }
        match &mut self.owner {
            Some(slice) if slice.stream == at => slice.idle_since_ns = Some(now_ns),
            _ => self.streams.rest(at),
        }
    }

    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, _now_ns: u64) -> Option<Box<Bio>> {
        let place = self.slots.find(is_it)?;
        // The stream is known while a bio of it waits.
        let at = self.streams.find(self.key(self.slots.bio(place)))?;
        let stream = self.streams.get_mut(at);
        let bio = self.slots.remove(&mut stream.bios, place);
        self.waiting -= 1;
        if stream.bios.is_empty() && self.owner.is_none_or(|slice| slice.stream != at) {
            let is_over = stream.in_flight == 0;
            self.leave_line(at);
            if is_over {
                self.streams.rest(at);
            }
        }
        Some(bio)
    }

    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        self.slots.drain(each);
    }

    fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot {
        let TimesliceConfig { slice_us, extensions, idle_us, tick_us, key, order, drain } = self.config;
        let options = vec![
            ("slice_us", slice_us.to_string()),
            ("extensions", extensions.to_string()),
            ("idle_us", if idle_us == u32::MAX { "slice".into() } else { idle_us.to_string() }),
            ("tick_us", tick_us.to_string()),
            ("key", if key == SliceKey::Stream { "stream" } else { "queue" }.into()),
            ("order", if order == SliceOrder::Arrival { "arrival" } else { "lowest" }.into()),
            ("drain", if drain { "on" } else { "off" }.into()),
        ];
        let mut facts = vec![("epoch", self.epoch)];
        if let Some(slice) = self.owner {
            facts.push(("owner", self.streams.stream(slice.stream)));
            facts.push(("left_ns", slice.end_ns.map_or(0, |end_ns| end_ns.saturating_sub(now_ns))));
            facts.push(("extended", u64::from(slice.extended)));
        }
        SchedulerSnapshot {
            name: "timeslice",
            options,
            waiting: self.waiting,
            oldest_ns: self.slots.oldest_ns().map_or(0, |since_ns| now_ns.saturating_sub(since_ns)),
            facts,
        }
    }
}
