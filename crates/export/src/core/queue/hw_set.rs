//! The hardware queues that the client queues of a poller feed: one for each device of their export.
//!
//! An export usually has one device. A controller with several namespaces has one for each, and any of its client
//! queues may send a request to any of them ([`Bio::namespace`]). Each device has a hardware queue of its own, with its
//! own tags, scheduler, limits and flushes, so that a device which does not respond keeps no tag from another.
//!
//! Owned by a [`QueuePoller`](super::QueuePoller). A client queue fetches a request before it knows the device, so each
//! hardware queue has room for all bios of its client queues.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, DeviceInfo, Driver, HwQueue, HwSnapshot, HwStats, RateLimit, SchedulerConfig};

use super::kicks::DeviceEvents;
use super::protocol::QueueSession;

/// The hardware queues of an export's devices, by number of the device.
pub struct HwQueueSet<D> {
    /// One or more: each step of a round is one loop, and so compiled once into its caller.
    queues: Vec<HwQueue<D>>,
    /// Eventfds of several devices as one descriptor.
    events: Option<DeviceEvents>,
    /// Version of the memory: [`QueueSession::memory_version`].
    memory_version: u64,
}

impl<D> From<HwQueue<D>> for HwQueueSet<D> {
    fn from(hw: HwQueue<D>) -> HwQueueSet<D> {
        HwQueueSet { queues: vec![hw], events: None, memory_version: 0 }
    }
}

impl<D> fmt::Debug for HwQueueSet<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HwQueueSet").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

impl<D> HwQueueSet<D> {
    /// The hardware queues of several devices.
    ///
    /// # Errors
    /// The system has no descriptor for the events of several devices.
    ///
    /// # Panics
    /// If there is no hardware queue.
    pub fn new<Cx: ?Sized>(queues: Vec<HwQueue<D>>) -> io::Result<HwQueueSet<D>>
    where
        D: Driver<Cx>,
    {
        assert!(!queues.is_empty(), "an export without a device");
        let eventfds: Vec<_> = queues.iter().filter_map(HwQueue::eventfd).collect();
        let events = if queues.len() == 1 || eventfds.is_empty() { None } else { Some(DeviceEvents::new(&eventfds)?) };
        Ok(HwQueueSet { queues, events, memory_version: 0 })
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.queues.len()
    }

    /// Whether the scheduler of any device orders.
    pub fn orders(&self) -> bool {
        self.queues.iter().any(|hw| hw.scheduler().orders())
    }

    fn first(&self) -> &HwQueue<D> {
        &self.queues[0]
    }

    /// Properties of a device.
    pub(super) fn info(&self, device: u16) -> Option<&Arc<DeviceInfo>> {
        self.queues.get(usize::from(device)).map(HwQueue::info)
    }

    /// Time for which the devices may execute requests of a process that has died, ns.
    pub(super) fn silence_ns(&self) -> u64 {
        self.queues.iter().map(|hw| hw.info().silence_ns).max().unwrap_or(0)
    }

    pub(super) fn set_info(&mut self, device: u16, info: Arc<DeviceInfo>) {
        if let Some(hw) = self.queues.get_mut(usize::from(device)) {
            hw.set_info(0, info);
        }
    }

    pub(super) fn schedule(&mut self, device: u16, config: SchedulerConfig) {
        if let Some(hw) = self.queues.get_mut(usize::from(device)) {
            hw.schedule(0, config);
        }
    }

    pub(super) fn set_rates(&mut self, device: u16, limits: Vec<Arc<RateLimit>>) {
        if let Some(hw) = self.queues.get_mut(usize::from(device)) {
            hw.set_rates(0, limits);
        }
    }

    /// Limits the requests in flight of each device: to `one` if its scheduler orders, otherwise to `sum`. `changing`
    /// is a device whose scheduler is about to change, and whether the next one orders.
    pub(super) fn set_depth(&mut self, one: usize, sum: usize, changing: Option<(u16, bool)>) {
        for (number, hw) in self.queues.iter_mut().enumerate() {
            let next = changing.filter(|(device, _)| usize::from(*device) == number);
            let orders = next.map_or_else(|| hw.scheduler().orders(), |(_, orders)| orders);
            hw.set_depth(if orders { one } else { sum });
        }
    }

    /// Counts in these: by device, those of the first client queue and those of each by its number. The latter are
    /// empty for a single client queue.
    pub(super) fn set_stats(&mut self, first: &[Arc<HwStats>], members: &[&[Arc<HwStats>]]) {
        for (device, hw) in self.queues.iter_mut().enumerate() {
            let of_members = members.iter().map(|stats| Arc::clone(&stats[device])).collect();
            hw.set_stats(Arc::clone(&first[device]), of_members);
        }
    }

    /// Maximum requests in flight, of the device with most.
    pub(super) fn depth(&self) -> usize {
        self.queues.iter().map(HwQueue::depth).max().unwrap_or(1)
    }

    /// Number of bios that each device accepts.
    #[inline(always)]
    pub(super) fn room(&self) -> usize {
        self.queues.iter().map(HwQueue::room).min().unwrap_or(0)
    }

    /// Whether bios of a session can point into its memory here.
    pub(super) fn has_memory_of(&self, session: &impl QueueSession) -> bool {
        session.memory_version() < self.memory_version || self.first().memory().is_same(session.memory())
    }

    #[inline(always)]
    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(HwQueue::is_idle)
    }

    /// Whether a driver is to be polled although no request is in flight.
    #[inline(always)]
    pub(super) fn wants_poll<Cx: ?Sized>(&self) -> bool
    where
        D: Driver<Cx>,
    {
        self.queues.iter().any(HwQueue::wants_poll::<Cx>)
    }

    #[inline(always)]
    pub(super) fn has_work(&self) -> bool {
        self.queues.iter().any(HwQueue::has_work)
    }

    #[inline(always)]
    pub(super) fn is_rated(&self) -> bool {
        self.queues.iter().any(HwQueue::is_rated)
    }

    #[inline(always)]
    pub(super) fn is_in_hurry(&self) -> bool {
        self.first().is_in_hurry()
    }

    pub(super) fn set_hurry(&mut self, hurry: bool) {
        self.queues.iter_mut().for_each(|hw| hw.set_hurry(hurry));
    }

    /// Divides the bytes that may be copied in a turn among the devices.
    pub(super) fn set_turn_bytes(&mut self, bytes: u64) {
        let share = (bytes / self.devices() as u64).max(1);
        self.queues.iter_mut().for_each(|hw| hw.set_turn_bytes(share));
    }

    pub(super) fn mark_slow(&mut self, now_ns: u64) {
        self.queues.iter_mut().for_each(|hw| hw.mark_slow(now_ns));
    }

    /// Submits a bio to its device.
    #[inline(always)]
    pub(super) fn submit(&mut self, mut bio: Box<Bio>) {
        let device = std::mem::take(&mut bio.namespace);
        self.queues[usize::from(device)].submit(bio);
    }

    /// Takes back bios that no device has, of at most this number for which this is true: see [`HwQueue::cancel`].
    pub(super) fn cancel(&mut self, most: usize, mut is_its: impl FnMut(&Bio) -> bool) -> usize {
        let mut left = most;
        self.queues.iter_mut().map(|hw| if left > 0 { hw.cancel(&mut left, &mut is_its) } else { 0 }).sum()
    }

    /// Reaps the queues that are not idle, and those whose drivers have messages of their own to read.
    #[inline(always)]
    pub(super) fn reap<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize
    where
        D: Driver<Cx>,
    {
        let busy = self.queues.iter_mut().filter(|hw| !hw.is_idle() || hw.wants_poll::<Cx>());
        busy.map(|hw| hw.reap(cx, now_ns, sink)).sum()
    }

    #[inline(always)]
    pub(super) fn issue<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> usize
    where
        D: Driver<Cx>,
    {
        self.queues.iter_mut().map(|hw| hw.issue(cx, now_ns)).fold(0, usize::saturating_add)
    }

    /// Takes the memory of the first session that runs. No bio is in the queues.
    pub(super) fn set_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, session: &impl QueueSession)
    where
        D: Driver<Cx>,
    {
        self.memory_version = session.memory_version();
        self.queues.iter_mut().for_each(|hw| hw.set_memory(cx, Arc::clone(session.memory())));
    }

    /// Takes the memory of a session under bios in flight, if it is newer.
    pub(super) fn renew_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, session: &impl QueueSession)
    where
        D: Driver<Cx>,
    {
        if session.memory_version() > self.memory_version {
            self.memory_version = session.memory_version();
            self.queues.iter_mut().for_each(|hw| hw.change_memory(cx, Arc::clone(session.memory())));
        }
    }

    /// Drops the memory. No bio is in the queues.
    pub(super) fn clear_memory<Cx: ?Sized>(&mut self, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        self.memory_version = 0;
        let empty = Arc::new(RegionTable::default());
        self.queues.iter_mut().for_each(|hw| hw.set_memory(cx, Arc::clone(&empty)));
    }

    pub(super) fn arm<Cx: ?Sized>(&mut self) -> bool
    where
        D: Driver<Cx>,
    {
        // Each is armed, even if an earlier one has events.
        self.queues.iter_mut().fold(false, |pending, hw| hw.arm::<Cx>() | pending)
    }

    pub(super) fn disarm<Cx: ?Sized>(&mut self)
    where
        D: Driver<Cx>,
    {
        self.queues.iter_mut().for_each(HwQueue::disarm::<Cx>);
    }

    pub(super) fn eventfd<Cx: ?Sized>(&self) -> Option<BorrowedFd<'_>>
    where
        D: Driver<Cx>,
    {
        match &self.events {
            Some(events) => Some(events.as_fd()),
            None => self.first().eventfd::<Cx>(),
        }
    }

    pub(super) fn deadline_ns<Cx: ?Sized>(&self) -> Option<u64>
    where
        D: Driver<Cx>,
    {
        self.queues.iter().filter_map(HwQueue::deadline_ns::<Cx>).min()
    }

    /// State for inspection: sums over the devices, whose namespaces and requests are listed one after another.
    pub(super) fn snapshot(&self, now_ns: u64) -> HwSnapshot {
        let mut all = self.first().snapshot(now_ns);
        for (number, hw) in self.queues.iter().enumerate().skip(1) {
            let one = hw.snapshot(now_ns);
            all.depth += one.depth;
            all.depth_limit += one.depth_limit;
            all.reserved += one.reserved;
            all.tags_in_use += one.tags_in_use;
            all.in_flight += one.in_flight;
            all.dispatch += one.dispatch;
            all.bios += one.bios;
            all.dispatch_busy = all.dispatch_busy.max(one.dispatch_busy);
            all.frozen = all.frozen.max(one.frozen);
            all.quiesced = all.quiesced.max(one.quiesced);
            all.namespaces.extend(one.namespaces);
            all.requests.extend(one.requests.into_iter().map(|mut request| {
                request.namespace = number as u16;
                request
            }));
        }
        all
    }
}
