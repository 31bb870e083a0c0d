//! The hardware queue: one queue pair of a device, with its tags, its requests and the bios that wait for one.
//!
//! Owned by one lane at a time, through `&mut`. A round has two halves: [`HwQueue::reap`] gives back what is over,
//! [`HwQueue::issue`] passes on what waits. The lane reads the clock once between rounds, so that one timestamp ends a batch and
//! begins the next.
//!
//! ```text
//!  submit ──▶ bios ──cut──▶ dispatch ──▶ driver ──▶ done ──▶ sink
//!  (room)    waiting   tag   waiting     in flight   (tag back)
//! ```
//!
//! A bio is only accepted while there is room for it, and a request only cut when there is a tag: nothing is held that
//! cannot be put down. After construction nothing here allocates.

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mem::RegionTable;

use crate::driver::{Batch, DeviceInfo, Done, Driver, Split};
use crate::fifo::Fifo;
use crate::limits::{Cursor, Plain};
use crate::request::Request;
use crate::stats::{HwStats, OpClass, Run};
use crate::{Bio, BioFlags, Op, QueueLimits, Status, Tag, TagSet};

/// How a hardware queue is made.
#[derive(Clone, Copy, Debug)]
pub struct HwQueueConfig {
    /// Requests in flight at one time: tags.
    pub depth: usize,
    /// Bios in the queue at one time, waiting or in flight.
    pub bios_max: usize,
    /// Age at which a request in flight counts as slow.
    pub slow_ns: u64,
    /// Whether I/O is counted and timed; off only to measure what that costs.
    pub stats: bool,
}

impl Default for HwQueueConfig {
    fn default() -> Self {
        // 128: a ring's worth for virtio disks. Five seconds: far beyond what a healthy disk takes, far below the
        // thirty after which a guest gives up on a request.
        HwQueueConfig { depth: 128, bios_max: 256, slow_ns: 5_000_000_000, stats: true }
    }
}

/// A hardware queue over a driver.
#[derive(Debug)]
pub struct HwQueue<D> {
    driver: D,
    info: Arc<DeviceInfo>,
    /// Copied from `info`, to be at hand.
    limits: QueueLimits,
    capacity_sectors: u64,
    plain: Plain,
    memory: Arc<RegionTable>,
    config: HwQueueConfig,
    tags: TagSet,
    requests: Box<[Request]>,
    splits: Box<[Split]>,
    /// Bios not yet cut, in the order they came. The first may be cut in part, up to `cut_to`.
    bios: VecDeque<Box<Bio>>,
    /// Set while the first of `bios` is cut in part: its place in `splits` and how far.
    partial: Option<(u16, Cursor)>,
    /// Bios in the queue, waiting or in flight.
    bios_held: usize,
    /// Bios that were not worth a request, on their way back.
    refused: Vec<Box<Bio>>,
    /// Requests on their way to the driver.
    dispatch: Fifo,
    done: Vec<(u16, Status)>,
    stats: Arc<HwStats>,
}

impl<D> HwQueue<D> {
    /// A queue of a device over its driver, without memory yet: see [`HwQueue::set_memory`].
    pub fn new(driver: D, info: Arc<DeviceInfo>, config: HwQueueConfig) -> HwQueue<D> {
        let depth = config.depth;
        let split = || Split { bio: None, parts_in_flight: 0, uncut: false };
        HwQueue {
            driver,
            limits: info.limits,
            plain: Plain::new(&info.limits, info.capacity_sectors, info.read_only, BioFlags::empty()),
            capacity_sectors: info.capacity_sectors,
            info,
            memory: Arc::new(RegionTable::default()),
            config,
            tags: TagSet::new(depth),
            requests: (0..depth).map(|_| Request::default()).collect(),
            // At most one bio is cut in part; every other split bio has a part in flight.
            splits: (0..=depth).map(|_| split()).collect(),
            bios: VecDeque::with_capacity(config.bios_max),
            partial: None,
            bios_held: 0,
            refused: Vec::with_capacity(config.bios_max),
            dispatch: Fifo::new(depth),
            done: Vec::with_capacity(depth),
            stats: Arc::new(HwStats::default()),
        }
    }

    /// What the device is.
    pub fn info(&self) -> &Arc<DeviceInfo> {
        &self.info
    }

    /// The memory that segments point into.
    pub fn memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// The queue's counters, readable by anyone.
    pub fn stats(&self) -> &Arc<HwStats> {
        &self.stats
    }

    /// The driver, for what only its kind can do.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Replaces the memory that segments point into, and lets the driver prepare for it.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): memory in use must stay.
    pub fn set_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, memory: Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        assert!(self.is_idle(), "memory was replaced under I/O in flight");
        self.driver.set_memory(cx, &memory);
        self.memory = memory;
    }

    /// How many more bios fit.
    #[inline]
    pub fn room(&self) -> usize {
        self.config.bios_max - self.bios_held
    }

    /// Whether no bio is in the queue.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.bios_held == 0
    }

    /// Whether the next round has work of our own making: something to cut, to offer or to give back.
    #[inline]
    pub fn has_work(&self) -> bool {
        !self.done.is_empty()
            || !self.refused.is_empty()
            || ((!self.bios.is_empty() || self.partial.is_some()) && self.tags.free() > 0)
    }

    /// Requests that the device has.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.tags.in_use() - self.dispatch.len()
    }

    /// Accepts a bio; it comes back through [`HwQueue::reap`], whatever happens.
    ///
    /// # Panics
    /// If there is no [room](HwQueue::room): the caller holds a place before it takes a wish.
    #[inline]
    pub fn submit(&mut self, bio: Box<Bio>) {
        assert!(self.room() > 0, "a bio was submitted to a full queue");
        self.bios_held += 1;
        if self.plain.is(&bio) && self.tags.free() > 0 && self.bios.is_empty() && self.partial.is_none() {
            self.enter_whole(bio);
        } else {
            self.submit_slow(bio);
        }
    }

    /// What is not plain, or has to wait.
    #[inline(never)]
    fn submit_slow(&mut self, mut bio: Box<Bio>) {
        let admitted = self.limits.admit(&bio, self.capacity_sectors);
        if let Err(status) = admitted.and_then(|()| self.permit(&bio)) {
            bio.status = status;
            self.refused.push(bio);
        } else if self.bios.is_empty() && self.partial.is_none() && self.tags.free() > 0 {
            self.cut_first(bio);
        } else {
            self.bios.push_back(bio);
        }
    }

    #[inline]
    fn permit(&self, bio: &Bio) -> Result<(), Status> {
        if self.info.read_only && bio.op.is_write() { Err(Status::NotSupported) } else { Ok(()) }
    }

    /// Cuts waiting bios into requests while there are tags, and offers them to the driver. Returns how many it took.
    #[inline]
    pub fn issue<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> usize
    where
        D: Driver<Cx>,
    {
        self.cut();
        if self.dispatch.is_empty() {
            return 0;
        }
        let mut batch = Batch {
            waiting: &mut self.dispatch,
            requests: &mut self.requests,
            splits: &self.splits,
            segment_bytes_max: self.limits.segment_bytes_max,
            done: &mut self.done,
            now_ns,
            taken: 0,
        };
        self.driver.queue_rqs(cx, &self.memory, &mut batch);
        let taken = batch.taken;
        if self.config.stats {
            self.stats.dispatched(taken);
        }
        taken
    }

    /// Collects what is over and gives each bio back to `sink`. Returns how many.
    #[inline]
    pub fn reap<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize
    where
        D: Driver<Cx>,
    {
        if self.tags.in_use() > self.dispatch.len() + self.done.len() {
            let mut done = Done {
                ended: &mut self.done,
                requests: &self.requests,
                splits: &self.splits,
                segment_bytes_max: self.limits.segment_bytes_max,
            };
            self.driver.poll(cx, &self.memory, &mut done, now_ns);
        }
        let mut ended = 0;
        while let Some(bio) = self.refused.pop() {
            self.bios_held -= 1;
            ended += 1;
            if self.config.stats {
                self.stats.refused();
            }
            sink(bio);
        }
        if self.done.is_empty() {
            return ended;
        }
        let mut run = Run::new(now_ns);
        let mut done = std::mem::take(&mut self.done);
        for (number, status) in done.drain(..) {
            ended += self.finish(Tag::pick_up(number), status, &mut run, sink);
        }
        self.done = done;
        run.flush(&self.stats);
        ended
    }

    /// When the driver must be polled next, at the latest.
    pub fn deadline_ns<Cx: ?Sized>(&self) -> Option<u64>
    where
        D: Driver<Cx>,
    {
        self.driver.deadline_ns()
    }

    /// Counts requests that have been with the device for too long, each once. For now and then, not for each round.
    pub fn mark_slow(&mut self, now_ns: u64) {
        let mut slow = 0;
        for request in self.requests.iter_mut().filter(|request| request.in_flight) {
            if now_ns.saturating_sub(request.start_ns) > self.config.slow_ns {
                slow += 1;
                if !request.slow {
                    request.slow = true;
                    self.stats.slow();
                }
            }
        }
        self.stats.set_slow_now(slow);
    }

    #[inline]
    fn finish(&mut self, tag: Tag, status: Status, run: &mut Run, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let request = &mut self.requests[tag.index()];
        assert!(request.in_flight, "request {} ended twice", tag.index());
        request.in_flight = false;
        if std::mem::take(&mut request.slow) {
            self.stats.slow_ended();
        }
        if self.config.stats {
            run.push(&self.stats, request.op, request.start_ns, request.sectors);
            if !status.is_ok() {
                self.stats.failed(OpClass::of(request.op));
            }
        }
        let (whole, part_of) = (request.whole.take(), request.part_of);
        self.tags.put(tag);
        let bio = match whole {
            Some(mut bio) => {
                bio.status = status;
                bio
            }
            None => match self.finish_part(part_of, status) {
                Some(bio) => bio,
                None => return 0,
            },
        };
        self.bios_held -= 1;
        sink(bio);
        1
    }

    fn finish_part(&mut self, place: u16, status: Status) -> Option<Box<Bio>> {
        let split = &mut self.splits[usize::from(place)];
        split.parts_in_flight -= 1;
        if let Some(bio) = &mut split.bio {
            bio.status = bio.status.and(status);
        }
        if split.parts_in_flight > 0 || split.uncut { None } else { split.bio.take() }
    }

    /// Turns waiting bios into requests, in order, while there are tags.
    #[inline]
    fn cut(&mut self) {
        while self.tags.free() > 0 {
            if let Some((place, from)) = self.partial {
                self.cut_part(place, from);
                continue;
            }
            let Some(bio) = self.bios.pop_front() else { return };
            self.cut_first(bio);
        }
    }

    /// Turns a bio into a request, or into the first of several. There is a tag.
    #[inline(always)]
    fn cut_first(&mut self, bio: Box<Bio>) {
        if self.limits.takes_whole(&bio) {
            self.enter_whole(bio);
        } else {
            self.cut_slow(bio);
        }
    }

    #[inline(never)]
    fn cut_slow(&mut self, bio: Box<Bio>) {
        match self.limits.cut(&bio, Cursor::default()) {
            Ok(cut) if cut.sectors == bio.sectors || bio.op == Op::Flush => self.enter_whole(bio),
            Ok(_) => {
                let place = self.split_place();
                let split = &mut self.splits[usize::from(place)];
                *split = Split { bio: Some(bio), parts_in_flight: 0, uncut: true };
                self.partial = Some((place, Cursor::default()));
            }
            Err(status) => self.refuse(bio, status),
        }
    }

    #[inline(always)]
    fn enter_whole(&mut self, bio: Box<Bio>) {
        let sectors = if bio.op == Op::Flush { 0 } else { bio.sectors };
        let request = self.enter(bio.op, bio.flags, bio.sector, sectors);
        request.whole = Some(bio);
    }

    /// Cuts the next request from the bio that is cut in part.
    fn cut_part(&mut self, place: u16, from: Cursor) {
        let split = &mut self.splits[usize::from(place)];
        let Some(bio) = &mut split.bio else { unreachable!("the bio being cut is in its place") };
        match self.limits.cut(bio, from) {
            Ok(cut) => {
                split.parts_in_flight += 1;
                split.uncut = cut.end.sectors < bio.sectors;
                self.partial = split.uncut.then_some((place, cut.end));
                let (op, flags, sector) = (bio.op, bio.flags, bio.sector + u64::from(from.sectors));
                let request = self.enter(op, flags, sector, cut.sectors);
                request.from = from;
                request.part_of = place;
            }
            Err(status) => {
                bio.status = bio.status.and(status);
                split.uncut = false;
                self.partial = None;
                if split.parts_in_flight == 0
                    && let Some(bio) = split.bio.take()
                {
                    let status = bio.status;
                    self.refuse(bio, status);
                }
            }
        }
    }

    fn refuse(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.status = status;
        self.refused.push(bio);
    }

    fn split_place(&self) -> u16 {
        let free = self.splits.iter().position(|split| split.bio.is_none());
        let Some(place) = free else { unreachable!("there are more places than requests") };
        place as u16
    }

    /// Makes a request and lists it for dispatch; the caller says what bio it is of.
    #[inline(always)]
    fn enter(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u32) -> &mut Request {
        let Some(tag) = self.tags.take() else { unreachable!("checked by the caller") };
        let request = &mut self.requests[tag.index()];
        request.op = op;
        request.flags = flags;
        request.sector = sector;
        request.sectors = sectors;
        self.dispatch.push(tag.put_down());
        request
    }
}
