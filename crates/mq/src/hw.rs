//! The hardware queue: one queue pair of a device, with its tags, its requests and the bios that wait for one.
//!
//! Owned by one lane at a time, through `&mut`. A round has two halves: [`HwQueue::reap`] completes bios,
//! [`HwQueue::issue`] dispatches waiting ones. The lane reads the clock once a turn, so that one timestamp
//! ends a batch and begins the next. The bios submitted between two calls of `issue` are a plug: they merge, and reach
//! the driver as one batch.
//!
//! ```text
//!            ┌─ merge ──────────┐
//!  submit ───┤                  ▼
//!  (room)    └▶ bios ──split──▶ dispatch ──▶ driver ──▶ done ──▶ sink
//!               waiting   tag   waiting     in flight  (tag back)
//!                 ▲                ▲           │         │
//!                 └─ flush ◀───────┴─ requeue ─┘         │
//!                      └─────────── next step ◀──────────┘
//! ```
//!
//! A bio is only accepted while there is room for it, and a request is only made when there is a tag: the queue holds
//! nothing that it has no slot for. After construction nothing here allocates.
//!
//! Several devices may live behind one queue pair, the namespaces of a controller. They share its tags fairly
//! (`namespace.rs`). Rare work is in separate files: making requests (`split.rs`), flushes (`flush.rs`), timeouts
//! (`timeout.rs`), scheduled bios (`scheduled.rs`), rate limits (`rated.rs`), changing a running queue (`control.rs`),
//! registered buffers (`buffers.rs`), taking bios out for another queue (`take.rs`), cancelled bios (`cancel.rs`),
//! inspecting a queue (`inspect.rs`), and the parts of a bio's wait (`wait.rs`).

mod buffers;
mod cancel;
mod control;
mod edges;
mod flush;
mod inspect;
mod namespace;
mod rated;
mod scheduled;
mod split;
mod take;
mod timeout;
mod wait;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{BufferId, RegionTable, RegisteredBuffer};

pub use self::inspect::{FlushSnapshot, HwSnapshot, NamespaceSnapshot, RequestSnapshot};
use self::namespace::Namespace;
use crate::bio::Wait;
use crate::driver::{Batch, DeviceInfo, Done, Driver, Shortage};
use crate::fifo::Fifo;
use crate::lane::POLLER_BYTES_MAX;
use crate::limits::FastPath;
use crate::request::{Look, Marks, Request, RequestState, RequestTable};
use crate::sched::SchedulerConfig;
use crate::stats::{HwStats, OpClass};
use crate::{Bio, BioFlags, BudgetShare, IoError, Op, SECTOR_SHIFT, Status, TagSet};

/// Which bios may share a request, as Linux's `nomerges` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Merging {
    /// No statistics.
    Off,
    /// With the bio that was submitted just before.
    Last,
    /// With any of the last few that wait.
    #[default]
    Recent,
}

/// How a hardware queue is made.
#[derive(Clone, Copy, Debug)]
pub struct HwQueueConfig {
    /// Requests in flight at one time: tags, with those reserved.
    pub depth: usize,
    /// Tags kept for bios that say [`RESERVED`](crate::BioFlags::RESERVED).
    pub reserved: usize,
    /// Bios in the queue at one time, waiting or in flight.
    pub bios_max: usize,
    /// Which bios may share a request.
    pub merging: Merging,
    /// Time after which the driver is asked about a request it has, unless the device says another
    /// ([`DeviceInfo::timeout_ns`]); zero for never.
    pub timeout_ns: u64,
    /// Age at which a request in flight counts as slow.
    pub slow_ns: u64,
    /// Whether I/O is counted and timed; off only to measure the cost of statistics.
    pub stats: bool,
    /// Scheduler of the waiting bios, for each namespace.
    pub scheduler: SchedulerConfig,
}

impl Default for HwQueueConfig {
    fn default() -> Self {
        HwQueueConfig {
            // A ring's worth for virtio disks.
            depth: 128,
            reserved: 0,
            bios_max: 256,
            merging: Merging::default(),
            // As in Linux (`blk_mq_alloc_tag_set`).
            timeout_ns: 30_000_000_000,
            // Far above the latency of a healthy disk, far below a guest's timeout.
            slow_ns: 5_000_000_000,
            stats: true,
            scheduler: SchedulerConfig::None,
        }
    }
}

/// A hardware queue over a driver.
#[derive(Debug)]
pub struct HwQueue<D> {
    driver: D,
    memory: Arc<RegionTable>,
    config: HwQueueConfig,
    namespaces: Box<[Namespace]>,
    /// Counters of the fast path, if enabled: those of the only or the first namespace.
    counted: Option<Arc<HwStats>>,
    /// Counters of each submitter, by [`Bio::submitter`] and namespace, if they are counted apart.
    submitters: Vec<Arc<HwStats>>,
    tags: TagSet,
    table: RequestTable,
    /// Bios in the queue, waiting or in flight.
    bios_held: usize,
    /// Limit of bios in the queue: 0 while it is frozen.
    bios_max: usize,
    /// The bios that become requests without further checks. Empty with several namespaces, or while requests are left
    /// over.
    fast_path: FastPath,
    /// Bios not yet split, of all namespaces, and bios that wait for a flush that is not issued.
    unsplit: usize,
    /// Namespace whose bios are split next.
    turn: usize,
    /// Requests made so far.
    order: u32,
    /// Where the request made last begins and ends, for merging; both beyond any device if it is not to be merged with.
    plug: Plug,
    /// Requests to be dispatched.
    dispatch: Fifo,
    /// Requests that the driver has completed.
    done: Vec<(u16, Status)>,
    /// Requests that the driver has requeued.
    requeued: Vec<u16>,
    /// Completed bios that had no request of their own, to be returned.
    over: VecDeque<Box<Bio>>,
    /// Budget from which each request needs a slot beside its tag before it is offered to the driver.
    budget: Option<BudgetShare>,
    /// Whether a round must check more than the waiting bios, because of other namespaces, a budget, or held requests
    /// now or lately. Set by the code that begins such a state; [`HwQueue::settle`] detects its end.
    slow_path: bool,
    /// Earliest retry of a refused batch, if no request completes before.
    retry_ns: Option<u64>,
    /// To be offered again in the next round: the driver waits for its lane alone, or something has come back since.
    again: bool,
    /// How often of late something was left over, as `dispatch_busy` of Linux has it: zero for not at all.
    busy: u32,
    /// Time after which the driver is asked about a request; the largest number for never.
    timeout_ns: u64,
    /// Time of the next timeout scan; never, with no request in flight.
    expire_ns: u64,
    /// Time of the last idle-namespace scan.
    looked_ns: u64,
    frozen: u32,
    quiesced: u32,
    /// Whether some namespace has limits, and whether they hold no bio now.
    rated: bool,
    hurry: bool,
    /// Bytes that the driver may copy in one turn, each way.
    turn_bytes: u64,
    /// A bio has joined a request that is left over, at a time not yet recorded.
    joined: bool,
    /// Registered buffers that are to go, and are named by requests at the driver.
    draining: Vec<BufferId>,
    /// Registered buffers whose regions are not in the present memory.
    absent: Vec<Arc<RegisteredBuffer>>,
    /// Completed requests that were refused for these, before a budget gave them a slot.
    refused: usize,
}

/// Fields that a request of the fast path copies from its bio.
#[derive(Clone, Copy, Debug)]
struct Head {
    op: Op,
    flags: BioFlags,
    sectors: u32,
    sector: u64,
}

impl Head {
    // Read once, before anything is written: adjacent fields would be read again as one word, which stalls while their
    // separate writes are in the store buffer.
    #[inline(always)]
    fn of(bio: &Bio) -> Head {
        Head { op: bio.op, flags: bio.flags, sectors: bio.sectors, sector: bio.sector }
    }
}

/// The range of the request made last.
#[derive(Clone, Copy, Debug)]
struct Plug {
    start: u64,
    end: u64,
}

impl Plug {
    const NONE: Plug = Plug { start: u64::MAX, end: u64::MAX };

    /// Whether a bio ends where the request begins, or begins where it ends.
    #[inline]
    fn touches(self, bio: &Bio) -> bool {
        bio.sector == self.end || bio.sector + u64::from(bio.sectors) == self.start
    }
}

impl<D> HwQueue<D> {
    /// A queue of a device over its driver, without memory yet: see [`HwQueue::set_memory`].
    pub fn new(driver: D, info: Arc<DeviceInfo>, config: HwQueueConfig) -> HwQueue<D> {
        HwQueue::with_namespaces(driver, vec![info], config)
    }

    /// A queue that several devices share over one driver. Bios say which they are for ([`Bio::namespace`]).
    ///
    /// # Panics
    /// If there is no device, or the depth makes no sense: see [`TagSet::new`].
    pub fn with_namespaces(driver: D, infos: Vec<Arc<DeviceInfo>>, config: HwQueueConfig) -> HwQueue<D> {
        assert!(!infos.is_empty(), "a hardware queue of no device");
        let (depth, several) = (config.depth, infos.len() > 1);
        let timeout_ns = [infos[0].timeout_ns, config.timeout_ns].into_iter().find(|ns| *ns > 0);
        let mut table = RequestTable::new(depth, config.bios_max, infos.len());
        infos.iter().enumerate().for_each(|(number, info)| table.set_limits(number, &info.limits));
        let namespaces: Box<[Namespace]> =
            infos.into_iter().map(|info| Namespace::new(info, config.bios_max, depth)).collect();
        let counted = config.stats.then(|| Arc::clone(&namespaces[0].stats));
        let mut queue = HwQueue {
            driver,
            memory: Arc::new(RegionTable::default()),
            config,
            namespaces,
            counted,
            submitters: Vec::new(),
            tags: TagSet::new(depth, config.reserved),
            table,
            bios_held: 0,
            bios_max: config.bios_max,
            fast_path: FastPath::NOTHING,
            unsplit: 0,
            turn: 0,
            order: 0,
            plug: Plug::NONE,
            dispatch: Fifo::new(depth),
            done: Vec::with_capacity(depth),
            requeued: Vec::with_capacity(depth),
            over: VecDeque::with_capacity(config.bios_max),
            budget: None,
            slow_path: several,
            retry_ns: None,
            again: false,
            busy: 0,
            timeout_ns: timeout_ns.unwrap_or(u64::MAX),
            expire_ns: u64::MAX,
            looked_ns: 0,
            frozen: 0,
            quiesced: 0,
            rated: false,
            hurry: false,
            turn_bytes: POLLER_BYTES_MAX,
            joined: false,
            draining: Vec::new(),
            absent: Vec::new(),
            refused: 0,
        };
        for number in 0..queue.namespaces.len() {
            queue.schedule(number as u16, config.scheduler);
        }
        queue.choose_plain();
        queue
    }

    /// Sets the fast path's conditions again. It is closed while requests are left over, since a bio may merge with any
    /// of them, and with a scheduler or a limit.
    fn choose_plain(&mut self) {
        self.fast_path = FastPath::NOTHING;
        if let [only] = &mut self.namespaces[..] {
            let plain = only.plain();
            match &mut only.scheduled {
                Some(scheduled) => scheduled.set_fast_path(plain),
                None if self.busy == 0 && only.rated.is_none() => self.fast_path = plain,
                None => {}
            }
        }
    }

    /// Properties of the device; of the first one with several namespaces.
    pub fn info(&self) -> &Arc<DeviceInfo> {
        &self.namespaces[0].info
    }

    /// The memory that segments point into.
    pub fn memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// Properties of each device behind the queue, by namespace.
    pub fn infos(&self) -> impl Iterator<Item = &Arc<DeviceInfo>> {
        self.namespaces.iter().map(|namespace| &namespace.info)
    }

    /// Scheduler of the waiting bios; of the first namespace.
    pub fn scheduler(&self) -> SchedulerConfig {
        self.namespaces[0].scheduler
    }

    /// Scheduler of each namespace.
    pub fn schedulers(&self) -> impl Iterator<Item = SchedulerConfig> {
        self.namespaces.iter().map(|namespace| namespace.scheduler)
    }

    /// The counters, readable by anyone; of several namespaces those of the first.
    pub fn stats(&self) -> &Arc<HwStats> {
        &self.namespaces[0].stats
    }

    /// The counters of a namespace, if there is one of that number.
    pub fn namespace_stats(&self, namespace: u16) -> Option<&Arc<HwStats>> {
        self.namespaces.get(usize::from(namespace)).map(|namespace| &namespace.stats)
    }

    /// The driver, for operations of its own kind.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Requests that can be in flight at one time: tags, with those reserved.
    pub fn depth(&self) -> usize {
        self.tags.depth()
    }

    /// Number of bios that the queue accepts; 0 while it is [frozen](HwQueue::freeze).
    #[inline]
    pub fn room(&self) -> usize {
        self.bios_max.saturating_sub(self.bios_held)
    }

    /// Whether no bio is in the queue.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.bios_held == 0
    }

    /// Whether the next round has work: bios to split, requests to issue, or bios to return.
    #[inline]
    pub fn has_work(&self) -> bool {
        !self.done.is_empty()
            || !self.over.is_empty()
            || (self.again && self.quiesced == 0)
            || (self.unsplit > 0 && self.can_split())
    }

    /// Requests that the device has.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.tags.in_use() - self.dispatch.len() - self.done.len() - self.requeued.len()
    }

    /// Accepts a bio; it always comes back through [`HwQueue::reap`].
    ///
    /// # Panics
    /// Without [room](HwQueue::room): the caller needs a free slot before it accepts a request.
    #[inline]
    pub fn submit(&mut self, bio: Box<Bio>) {
        self.accept(bio);
    }

    /// [`HwQueue::submit`] without a call, for loops that do little else.
    #[inline(always)]
    pub(crate) fn accept(&mut self, bio: Box<Bio>) {
        assert!(self.bios_held < self.bios_max, "a bio was submitted to a full queue");
        self.bios_held += 1;
        let head = Head::of(&bio);
        // With no waiting bio and a free tag, a fast-path bio that is not adjacent to the previous one becomes a
        // request.
        if self.unsplit == 0
            && self.fast_path.is(&bio)
            && !self.plug.touches(&bio)
            && let Some(tag) = self.tags.take()
        {
            self.enter_plain(tag, head, Marks::empty(), bio);
        } else {
            self.submit_other(bio);
        }
    }

    /// Makes requests of waiting bios while there are tags, and offers them to the driver. Returns how many it took.
    // Always inlined: for one I/O the call would be a tenth of all there is to do.
    #[inline(always)]
    pub fn issue<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> usize
    where
        D: Driver<Cx>,
    {
        let offered = if self.slow_path || self.unsplit > 0 { self.make_ready(now_ns) } else { self.dispatch.len() };
        self.plug = Plug::NONE;
        if offered == 0 {
            return 0;
        }
        let mut batch = Batch {
            offered: self.dispatch.first(offered),
            taken: 0,
            table: &mut self.table,
            done: &mut self.done,
            now_ns,
            shortage: Shortage::Device,
            bytes_left: self.turn_bytes,
        };
        self.driver.queue_rqs(cx, &self.memory, &mut batch);
        let (taken, shortage) = (batch.taken, batch.shortage);
        self.dispatch.take(taken);
        if let Some(stats) = &self.counted {
            stats.dispatched(taken);
        }
        if self.expire_ns == u64::MAX {
            self.expire_ns = now_ns.saturating_add(self.timeout_ns);
        }
        if !self.dispatch.rewind() || self.slow_path {
            self.settle(shortage, offered - taken, now_ns);
        }
        taken
    }

    /// Splits waiting bios, and returns how many requests may be offered to the driver now.
    #[inline(never)]
    fn make_ready(&mut self, now_ns: u64) -> usize {
        if self.unsplit > 0 || self.namespaces.len() > 1 {
            self.split(now_ns);
        }
        if !self.draining.is_empty() {
            self.refuse_draining(now_ns);
        }
        let held_back = self.quiesced > 0 || self.retry_ns.is_some_and(|retry_ns| now_ns < retry_ns);
        let wanted = if held_back { 0 } else { self.dispatch.len() };
        if held_back {
            self.note_left(now_ns);
        }
        let Some(budget) = &mut self.budget else { return wanted };
        // Takes 0 slots if it offers no request, so that others can have them.
        let offered = budget.take(wanted);
        if offered == 0 && wanted > 0 {
            self.settle(Shortage::Device, 0, now_ns);
        }
        offered
    }

    /// Reaps completions and returns each bio to `sink`. Returns the number of bios.
    #[inline]
    pub fn reap<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize
    where
        D: Driver<Cx>,
    {
        if !self.is_idle() || self.wants_poll::<Cx>() {
            let mut done = Done {
                ended: &mut self.done,
                requeued: &mut self.requeued,
                table: &mut self.table,
                bytes_left: self.turn_bytes,
            };
            self.driver.poll(cx, &self.memory, &mut done, now_ns);
        }
        if now_ns >= self.expire_ns {
            self.expire(cx, now_ns);
        }
        let mut ended = if self.done.is_empty() { 0 } else { self.finish_all(now_ns, sink) };
        if !self.requeued.is_empty() {
            self.requeue();
        }
        if !self.over.is_empty() {
            ended += self.give_back(sink);
        }
        ended
    }

    /// Whether the driver is to be polled although no request is in flight.
    #[inline]
    pub fn wants_poll<Cx: ?Sized>(&self) -> bool
    where
        D: Driver<Cx>,
    {
        self.driver.wants_poll()
    }

    /// Latest time of the queue's next round, even without a completion.
    pub fn deadline_ns<Cx: ?Sized>(&self) -> Option<u64>
    where
        D: Driver<Cx>,
    {
        if self.bios_held == 0 {
            return self.driver.deadline_ns();
        }
        let expire_ns = Some(self.expire_ns).filter(|ns| *ns < u64::MAX);
        // A quiesced queue issues no request; it is run after unquiesce.
        let retry_ns = self.retry_ns.filter(|_| self.quiesced == 0);
        let due_ns = [self.driver.deadline_ns(), retry_ns, expire_ns, self.waiting_due_ns()];
        due_ns.into_iter().flatten().min()
    }

    /// Asks the device to signal its eventfd from now on, if it has one. True if a completion came before the device
    /// saw that.
    #[inline]
    pub fn arm<Cx: ?Sized>(&mut self) -> bool
    where
        D: Driver<Cx>,
    {
        self.driver.arm()
    }

    /// The device need not ring any more.
    #[inline]
    pub fn disarm<Cx: ?Sized>(&mut self)
    where
        D: Driver<Cx>,
    {
        self.driver.disarm();
    }

    /// The event descriptor that the device rings, if it has one.
    #[inline]
    pub fn eventfd<Cx: ?Sized>(&self) -> Option<BorrowedFd<'_>>
    where
        D: Driver<Cx>,
    {
        self.driver.eventfd()
    }

    /// Gives the bios of everything done to `sink`. Plain requests are ended here, and those that are alike counted
    /// together.
    #[inline]
    fn finish_all(&mut self, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        if self.slow_path {
            self.make_room();
        }
        let (mut at, mut ended) = (0, 0);
        while let Some(&(number, status)) = self.done.get(at) {
            let request = &self.table.requests[usize::from(number)];
            let alike = if request.look.is_in_flight(Marks::empty()) && status.is_ok() {
                if self.submitters.is_empty() {
                    self.finish_alike::<false, false>(at, now_ns, sink)
                } else {
                    self.finish_alike::<false, true>(at, now_ns, sink)
                }
            } else if request.look.is_in_flight(Marks::SHARED) && status.is_ok() && self.namespaces.len() == 1 {
                self.finish_alike::<true, true>(at, now_ns, sink)
            } else {
                ended += self.finish_slow(number, status, now_ns, sink);
                at += 1;
                continue;
            };
            at += alike;
            ended += alike;
            self.bios_held -= alike;
        }
        self.done.clear();
        ended
    }

    /// Completes a fast-path request, with or without a scheduler, and all behind it of the same shape that were
    /// dispatched at the same time: they are counted together. With `APART` submitters may have separate counters.
    #[inline]
    fn finish_alike<const SCHEDULED: bool, const APART: bool>(
        &mut self,
        from: usize,
        now_ns: u64,
        sink: &mut impl FnMut(Box<Bio>),
    ) -> usize {
        let HwQueue { done, table, tags, namespaces, counted, submitters, .. } = self;
        let (requests, ended) = (&mut table.requests[..], &done[from..]);
        let first = &requests[usize::from(ended[0].0)];
        let (look, start_ns) = (first.look, first.start_ns);
        let submitter_of = |request: &Request| request.bio.as_ref().map_or(0, |bio| bio.submitter);
        let counted_apart = APART && !submitters.is_empty();
        let submitter = if counted_apart { submitter_of(first) } else { 0 };
        let (mut rest, mut sectors) = (ended, 0);
        while let [(number, status), behind @ ..] = rest {
            let number = *number;
            let request = &mut requests[usize::from(number)];
            if request.look != look || request.start_ns != start_ns || !status.is_ok() {
                break;
            }
            if counted_apart && submitter_of(request) != submitter {
                break;
            }
            rest = behind;
            sectors += u64::from(request.sectors);
            request.look = Look::default();
            let Some(mut bio) = request.bio.take() else { unreachable!("what has no marks is a whole bio") };
            tags.put_number(number);
            bio.status = Status::Ok;
            if SCHEDULED {
                namespaces[usize::from(bio.namespace)].tell_scheduler(&mut bio, start_ns, now_ns);
            }
            sink(bio);
        }
        let count = ended.len() - rest.len();
        if let Some(stats) = counted {
            let stats = if counted_apart { submitters.get(usize::from(submitter)).unwrap_or(stats) } else { stats };
            let latency_ns = now_ns.saturating_sub(start_ns);
            stats.completed(OpClass::of(look.op()), latency_ns, count as u64, sectors << SECTOR_SHIFT);
        }
        count
    }

    /// Where the I/O of a submitter is counted.
    #[inline]
    fn stats_of(&self, namespace: u16, submitter: u16) -> &HwStats {
        let (namespace, stride) = (usize::from(namespace), self.namespaces.len());
        self.submitters.get(usize::from(submitter) * stride + namespace).unwrap_or(&self.namespaces[namespace].stats)
    }

    /// Completions make room: for requests that the driver refused, and for other queues of the budget.
    #[inline(never)]
    fn make_room(&mut self) {
        self.retry_ns = None;
        // The last reap of a round sees it, too.
        self.again |= !self.dispatch.is_empty();
        if let Some(budget) = &mut self.budget {
            budget.give(self.done.len() - self.refused);
        }
        self.refused = 0;
    }

    /// The end of a request that is not simply one bio, or that failed.
    #[inline(never)]
    fn finish_slow(&mut self, number: u16, status: Status, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let request = &mut self.table.requests[usize::from(number)];
        assert!(request.state() == RequestState::InFlight, "request {number} ended twice");
        let look = std::mem::take(&mut request.look);
        self.tags.put_number(number);
        let start_ns = request.start_ns;
        let bytes = request.bytes();
        let (op, marks, namespace) = (look.op(), look.marks(), request.namespace);
        let (more, first) = (request.more, request.bio.take());
        request.taken_back = false;
        request.grace_ms = 0;
        let sector = request.sector;
        self.uncount_tag(usize::from(namespace));
        if !status.is_ok() {
            // An unsupported operation is no device error.
            let code = self.table.take_code(number);
            if status != Status::NotSupported {
                let errors = &self.namespaces[usize::from(namespace)].info.errors;
                errors.note(IoError { op, sector, bytes, status, code });
            }
        }
        if marks.contains(Marks::SLOW) {
            self.namespaces[usize::from(namespace)].stats.slow_ended();
        }
        if self.config.stats {
            let submitter = match &first {
                Some(bio) => bio.submitter,
                None if marks.contains(Marks::PART) => self.table.split_submitter(more),
                None => 0,
            };
            let stats = self.stats_of(namespace, submitter);
            stats.request(OpClass::of(op), bytes);
            if !status.is_ok() {
                stats.failed(OpClass::of(op));
            }
        }
        if marks.contains(Marks::FLUSH) {
            self.flushed(usize::from(namespace), status, now_ns);
            return 0;
        }
        let mut ended = 0;
        if marks.contains(Marks::PART) {
            if let Some((bio, first_ns)) = self.finish_part(more, status, start_ns) {
                ended += self.end_bio(bio, [first_ns, start_ns], now_ns, sink);
            }
        } else if let Some(mut bio) = first {
            bio.status = status;
            if !marks.intersects(Marks::HELD | Marks::SEQUENCE) {
                // It did not wait; the field may be of an earlier use.
                bio.wait = Wait::default();
            }
            ended += self.end_bio(bio, [start_ns; 2], now_ns, sink);
        }
        if marks.contains(Marks::CHAINED) {
            let mut at = more;
            while let Some((mut bio, next)) = self.table.unlink(at) {
                bio.status = status;
                ended += self.end_bio(bio, [start_ns; 2], now_ns, sink);
                at = next;
            }
        }
        ended
    }

    /// A bio's data has completed: so has the bio, unless it is in the middle of a flush sequence. Its first part was
    /// dispatched at `start_ns`, and the part that ended last at the second time.
    fn end_bio(
        &mut self,
        mut bio: Box<Bio>,
        [first_ns, start_ns]: [u64; 2],
        now_ns: u64,
        sink: &mut impl FnMut(Box<Bio>),
    ) -> usize {
        if bio.ticket != 0 {
            self.namespaces[usize::from(bio.namespace)].tell_scheduler(&mut bio, start_ns, now_ns);
        }
        let in_sequence = !bio.steps.is_empty();
        if in_sequence && bio.wait.since_ns == Wait::UNKNOWN {
            bio.wait.begin(first_ns, &[0; 3]);
        }
        let Some(bio) = self.leave_sequence(bio) else { return 0 };
        if in_sequence {
            self.count_sequence(&bio, now_ns);
        } else {
            self.count_latency(&bio, first_ns, now_ns);
        }
        self.bios_held -= 1;
        sink(bio);
        1
    }

    /// A part of a bio has completed. For the last one returns the bio, and the dispatch time of its first part.
    fn finish_part(&mut self, place: u16, status: Status, start_ns: u64) -> Option<(Box<Bio>, u64)> {
        let split = &mut self.table.bios.splits[usize::from(place)];
        split.parts_in_flight -= 1;
        split.start_ns = split.start_ns.min(start_ns);
        if let Some(bio) = &mut split.bio {
            bio.status = bio.status.and(status);
        }
        if split.parts_in_flight > 0 || split.unsplit { None } else { Some((split.bio.take()?, split.start_ns)) }
    }

    /// Returns bios that had no request.
    #[inline(never)]
    fn give_back(&mut self, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let mut ended = 0;
        while let Some(bio) = self.over.pop_front() {
            self.bios_held -= 1;
            ended += 1;
            sink(bio);
        }
        ended
    }
}
