//! `deadline`: order of sectors, in batches, with a deadline for each bio. After mq-deadline of Linux
//! (`block/mq-deadline.c`); spec A.26.
//!
//! Three priority classes, each with separate reads and writes, each of these in two orders: by sector and by age.
//!
//! 1. Class: the most urgent one with a bio waiting or in flight. A bio of a lower class goes first once it has waited
//!    longer than `prio_aging_expire`.
//! 2. Direction: that of the batch, while it has a next sector and is shorter than `fifo_batch`. Otherwise reads,
//!    unless waiting writes have been passed over `writes_starved` times.
//! 3. Start of a batch: the oldest bio, if its deadline has passed or no higher sector waits; otherwise the next higher
//!    sector.
//!
//! Bios adjacent to the one returned join its request, so a batch counts requests; front merges need `front_merges`.
//! Asynchronous writes use at most `async_depth` tags at a time, which leaves one for synchronous bios.
//!
//! Operations that are neither reads nor writes, such as discards, are treated as writes.

use super::orders::{OrderList, OrderLists};
use super::slots::{List, Slots};
use super::{Reach, Scheduler, SchedulerSnapshot, Selected};
use crate::{Bio, Op, Priority};

/// Options of `deadline`. The defaults are those of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadlineConfig {
    /// How long a read may wait before it goes first, milliseconds.
    pub read_expire_ms: u32,
    /// The same for a write.
    pub write_expire_ms: u32,
    /// How often writes are passed over for reads.
    pub writes_starved: u32,
    /// Requests of a batch.
    pub fifo_batch: u32,
    /// How long a bio of a lower class may wait before it goes first, milliseconds; zero for as long as it takes.
    pub prio_aging_expire_ms: u32,
    /// Whether bios join requests that begin where they end.
    pub front_merges: bool,
    /// Limit of asynchronous writes in flight; 0 for three quarters of the tags.
    pub async_depth: u32,
}

impl Default for DeadlineConfig {
    fn default() -> DeadlineConfig {
        DeadlineConfig {
            read_expire_ms: 500,
            write_expire_ms: 5000,
            writes_starved: 2,
            fifo_batch: 16,
            prio_aging_expire_ms: 10_000,
            front_merges: true,
            async_depth: 0,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Direction {
    #[default]
    Read,
    Write,
}

impl Direction {
    fn of(op: Op) -> Direction {
        if op == Op::Read { Direction::Read } else { Direction::Write }
    }
}

/// Bios of one class and direction.
#[derive(Debug)]
struct DeadlineQueue {
    sorted: OrderList,
    fifo: List,
    /// First sector of the bio returned last.
    position: u64,
}

/// See the head of the module.
#[derive(Debug)]
pub(crate) struct Deadline {
    config: DeadlineConfig,
    async_max: usize,
    slots: Slots,
    orders: OrderLists,
    /// By class and direction.
    queues: [[DeadlineQueue; 2]; 3],
    /// By class: bios here, and bios handed out that are not over.
    here: [usize; 3],
    out: [usize; 3],
    /// Asynchronous writes in flight.
    async_out: usize,
    direction: Direction,
    /// Requests of the batch so far.
    batch: u32,
    /// How often writes were passed over.
    starved: u32,
    /// Class and direction of the bio returned last.
    last: (usize, Direction),
}

/// Limit of asynchronous writes in flight, of so many tags.
fn async_max(config: &DeadlineConfig, depth: usize) -> usize {
    match config.async_depth {
        0 => (depth * 3 / 4).max(1),
        set => set as usize,
    }
}

impl Deadline {
    pub(crate) fn new(config: DeadlineConfig, depth: usize, bios_max: usize) -> Deadline {
        let orders = OrderLists::new(bios_max, 6);
        let queue = || DeadlineQueue { sorted: orders.order(), fifo: List::default(), position: 0 };
        let queues = [(); 3].map(|()| [queue(), queue()]);
        Deadline {
            async_max: async_max(&config, depth),
            slots: Slots::new(bios_max),
            orders,
            queues,
            here: [0; 3],
            out: [0; 3],
            async_out: 0,
            direction: Direction::Read,
            // No batch to continue.
            batch: config.fifo_batch,
            starved: 0,
            last: (0, Direction::Read),
            config,
        }
    }

    fn queue(&self, class: usize, direction: Direction) -> &DeadlineQueue {
        &self.queues[class][direction as usize]
    }

    /// Whether a bio may be dispatched: it is synchronous, or `async_depth` has room.
    fn is_free(&self, at: u32) -> bool {
        self.async_out < self.async_max || self.slots.bio(at).is_sync()
    }

    fn expire_ns(&self, direction: Direction) -> u64 {
        let expire_ms = match direction {
            Direction::Read => self.config.read_expire_ms,
            Direction::Write => self.config.write_expire_ms,
        };
        u64::from(expire_ms) * 1_000_000
    }

    /// The oldest bio of a lower class that waits for too long, while a more urgent one has anything.
    fn aged(&self, now_ns: u64) -> Option<(usize, Direction, u32)> {
        let aging_ns = u64::from(self.config.prio_aging_expire_ms) * 1_000_000;
        if aging_ns == 0 {
            return None;
        }
        let lower = (1..self.here.len())
            .filter(|class| self.here[*class] > 0 && (0..*class).any(|class| self.here[class] + self.out[class] > 0));
        for class in lower {
            for direction in [Direction::Read, Direction::Write] {
                let Some(first) = self.queue(class, direction).fifo.first() else { continue };
                if now_ns.saturating_sub(self.slots.since_ns(first)) > aging_ns && self.is_free(first) {
                    return Some((class, direction, first));
                }
            }
        }
        None
    }

    /// The next bio of a class, and whether it continues the batch.
    fn choose(&mut self, class: usize, now_ns: u64) -> Option<(Direction, u32)> {
        if self.batch < self.config.fifo_batch
            && let Some(at) = self.next_sector(class, self.direction)
        {
            return Some((self.direction, at));
        }
        let reads = self.start(class, Direction::Read, now_ns);
        let writes = self.start(class, Direction::Write, now_ns);
        let chosen = match (reads, writes) {
            (Some(_), Some(at)) if self.starved >= self.config.writes_starved => (Direction::Write, at),
            (Some(at), waits) => {
                self.starved += u32::from(waits.is_some());
                (Direction::Read, at)
            }
            (None, at) => (Direction::Write, at?),
        };
        if chosen.0 == Direction::Write {
            self.starved = 0;
        }
        (self.direction, self.batch) = (chosen.0, 0);
        Some(chosen)
    }

    fn next_sector(&self, class: usize, direction: Direction) -> Option<u32> {
        let queue = self.queue(class, direction);
        self.orders.first_from(&queue.sorted, queue.position).filter(|at| self.is_free(*at))
    }

    /// Where a batch in this direction begins.
    fn start(&self, class: usize, direction: Direction, now_ns: u64) -> Option<u32> {
        let first = self.queue(class, direction).fifo.first()?;
        let is_late = now_ns.saturating_sub(self.slots.since_ns(first)) >= self.expire_ns(direction);
        let next = if is_late { None } else { self.next_sector(class, direction) };
        next.or(Some(first).filter(|at| self.is_free(*at)))
    }

    fn remove(&mut self, class: usize, direction: Direction, at: u32) -> Box<Bio> {
        let queue = &mut self.queues[class][direction as usize];
        let bio = self.slots.remove(&mut queue.fifo, at);
        self.orders.remove(&mut queue.sorted, at, bio.sector);
        self.here[class] -= 1;
        bio
    }

    fn hand_out(&mut self, class: usize, direction: Direction, at: u32) -> Box<Bio> {
        let bio = self.remove(class, direction, at);
        self.queues[class][direction as usize].position = bio.sector;
        self.out[class] += 1;
        self.async_out += usize::from(!bio.is_sync());
        self.last = (class, direction);
        bio
    }
}

impl Scheduler for Deadline {
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64) {
        let (class, direction) = (bio.priority as usize, Direction::of(bio.op));
        let sector = bio.sector;
        let queue = &mut self.queues[class][direction as usize];
        let at = self.slots.push(&mut queue.fifo, bio, now_ns);
        self.orders.insert(&mut queue.sorted, at, sector);
        self.here[class] += 1;
    }

    fn next(&mut self, now_ns: u64) -> Selected {
        if let Some((class, direction, at)) = self.aged(now_ns) {
            return Selected::Bio(self.hand_out(class, direction, at));
        }
        for class in 0..self.here.len() {
            if self.here[class] > 0
                && let Some((direction, at)) = self.choose(class, now_ns)
            {
                self.batch += 1;
                return Selected::Bio(self.hand_out(class, direction, at));
            }
            if self.here[class] + self.out[class] > 0 {
                break;
            }
        }
        // The bios here wait for a more urgent one to end, or for `async_depth`; otherwise for their age.
        let aging_ns = u64::from(self.config.prio_aging_expire_ms) * 1_000_000;
        let lower = self.queues[1..].iter().flatten().filter_map(|queue| queue.fifo.first());
        let free = lower.filter(|at| aging_ns > 0 && self.is_free(*at));
        let aged_ns = free.map(|at| self.slots.since_ns(at).saturating_add(aging_ns + 1)).min();
        Selected::Wait(aged_ns.unwrap_or(u64::MAX))
    }

    fn join(&mut self, reach: Reach, fits: &mut dyn FnMut(&Bio) -> bool, _now_ns: u64) -> Option<Box<Bio>> {
        let (class, direction) = self.last;
        let sorted = &self.queue(class, direction).sorted;
        let behind = self.orders.first_from(sorted, reach.end);
        let before = if self.config.front_merges { self.orders.last_before(sorted, reach.start) } else { None };
        let joins = |at: &u32| {
            let bio = self.slots.bio(*at);
            reach.touches(bio) && self.is_free(*at) && fits(bio)
        };
        let at = behind.into_iter().chain(before).find(joins)?;
        Some(self.hand_out(class, direction, at))
    }

    fn ended(&mut self, bio: &Bio, _start_ns: u64, _now_ns: u64) {
        self.out[bio.priority as usize] -= 1;
        self.async_out -= usize::from(!bio.is_sync());
    }

    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, _now_ns: u64) -> Option<Box<Bio>> {
        let at = self.slots.find(is_it)?;
        let bio = self.slots.bio(at);
        Some(self.remove(bio.priority as usize, Direction::of(bio.op), at))
    }

    fn set_depth(&mut self, depth: usize) {
        self.async_max = async_max(&self.config, depth);
    }

    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        self.slots.drain(each);
    }

    fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot {
        let DeadlineConfig { read_expire_ms, write_expire_ms, writes_starved, fifo_batch, .. } = self.config;
        let options = vec![
            ("read_expire_ms", read_expire_ms.to_string()),
            ("write_expire_ms", write_expire_ms.to_string()),
            ("writes_starved", writes_starved.to_string()),
            ("fifo_batch", fifo_batch.to_string()),
            ("prio_aging_expire_ms", self.config.prio_aging_expire_ms.to_string()),
            ("front_merges", if self.config.front_merges { "on" } else { "off" }.into()),
            ("async_depth", self.async_max.to_string()),
        ];
        let of = |direction| self.queues.iter().map(|class| class[direction as usize].fifo.len() as u64).sum();
        let facts = vec![
            ("reads", of(Direction::Read)),
            ("writes", of(Direction::Write)),
            ("realtime", self.here[Priority::Realtime as usize] as u64),
            ("idle", self.here[Priority::Idle as usize] as u64),
            ("async_out", self.async_out as u64),
            ("batch", u64::from(self.batch)),
            ("writes_passed_over", u64::from(self.starved)),
        ];
        SchedulerSnapshot {
            name: "deadline",
            options,
            waiting: self.here.iter().sum(),
            oldest_ns: self.slots.oldest_ns().map_or(0, |since_ns| now_ns.saturating_sub(since_ns)),
            facts,
        }
    }
}
