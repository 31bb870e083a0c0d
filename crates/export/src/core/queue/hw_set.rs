//! The hardware queues that the client queues of a poller feed: those of the devices of their export.
//!
//! An export usually has one device. A controller with several namespaces has one for each, and any of its client
//! queues may send a request to any of them ([`Bio::namespace`]). Each device has a hardware queue of its own, with its
//! own tags, scheduler, limits and flushes, so that a device which does not respond keeps no tag from another. Only
//! devices that must share a driver, as namespaces of a controller with few queue pairs, share a hardware queue, and
//! its tags fairly.
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

/// The hardware queues of an export's devices.
pub struct HwQueueSet<D> {
    /// One or more: each step of a round is one loop, and so compiled once into its caller.
    queues: Vec<HwQueue<D>>,
    /// By number of the device. The first device is the first namespace of the first queue.
    places: Vec<DevicePlace>,
    /// Eventfds of several queues as one descriptor.
    events: Option<DeviceEvents>,
    /// Version of the memory: [`QueueSession::memory_version`].
    memory_version: u64,
    /// Whether no client queue fetches any more in this round.
    is_round_spent: bool,
}

/// Where a device has its bios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DevicePlace {
    queue: u16,
    /// Its number among the devices behind that queue.
    namespace: u16,
}

impl<D> From<HwQueue<D>> for HwQueueSet<D> {
    fn from(hw: HwQueue<D>) -> HwQueueSet<D> {
        let places = (0..hw.infos().count() as u16).map(|namespace| DevicePlace { queue: 0, namespace }).collect();
        HwQueueSet { queues: vec![hw], places, events: None, memory_version: 0, is_round_spent: false }
    }
}

impl<D> fmt::Debug for HwQueueSet<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HwQueueSet").field("places", &self.places).finish_non_exhaustive()
    }
}

impl<D> HwQueueSet<D> {
    /// The hardware queues of several devices, one each.
    ///
    /// # Errors
    /// The system has no descriptor for the events of several queues.
    ///
    /// # Panics
    /// If there is no hardware queue.
    pub fn new<Cx: ?Sized>(queues: Vec<HwQueue<D>>) -> io::Result<HwQueueSet<D>>
    where
        D: Driver<Cx>,
    {
        HwQueueSet::sharing(queues.into_iter().zip(0..).map(|(hw, number)| (hw, vec![number])).collect())
    }

    /// Hardware queues of one or several devices each, with their numbers by namespace.
    ///
    /// # Errors
    /// The system has no descriptor for the events of several queues.
    ///
    /// # Panics
    /// Unless each number from 0 on is that of one device, and 0 the first of the first queue.
    pub fn sharing<Cx: ?Sized>(queues: Vec<(HwQueue<D>, Vec<u16>)>) -> io::Result<HwQueueSet<D>>
    where
        D: Driver<Cx>,
    {
        let of_queue = |(queue, (hw, devices)): (usize, &(HwQueue<D>, Vec<u16>))| {
            assert_eq!(hw.infos().count(), devices.len(), "a number for each device of a queue");
            let place =
                |(namespace, device)| (device, DevicePlace { queue: queue as u16, namespace: namespace as u16 });
            devices.iter().copied().enumerate().map(place).collect::<Vec<_>>()
        };
        let mut placed: Vec<_> = queues.iter().enumerate().flat_map(of_queue).collect();
        placed.sort_unstable_by_key(|(device, _)| *device);
        assert!(placed.iter().map(|(device, _)| *device).eq(0..placed.len() as u16), "devices are numbered from 0");
        let places: Vec<_> = placed.into_iter().map(|(_, place)| place).collect();
        assert_eq!(places.first(), Some(&DevicePlace { queue: 0, namespace: 0 }), "the first device is first");
        let queues: Vec<_> = queues.into_iter().map(|(hw, _)| hw).collect();
        let eventfds: Vec<_> = queues.iter().filter_map(HwQueue::eventfd).collect();
        let events = if queues.len() == 1 || eventfds.is_empty() { None } else { Some(DeviceEvents::new(&eventfds)?) };
        Ok(HwQueueSet { queues, places, events, memory_version: 0, is_round_spent: false })
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.places.len()
    }

    /// Whether the scheduler of any device orders.
    pub fn orders(&self) -> bool {
        self.queues.iter().flat_map(HwQueue::schedulers).any(|scheduler| scheduler.orders())
    }

    fn first(&self) -> &HwQueue<D> {
        &self.queues[0]
    }

    /// The hardware queue of a device, and its number there.
    fn of_device(&mut self, device: u16) -> Option<(&mut HwQueue<D>, u16)> {
        let DevicePlace { queue, namespace } = *self.places.get(usize::from(device))?;
        Some((&mut self.queues[usize::from(queue)], namespace))
    }

    /// Properties of a device.
    pub(super) fn info(&self, device: u16) -> Option<&Arc<DeviceInfo>> {
        let DevicePlace { queue, namespace } = *self.places.get(usize::from(device))?;
        self.queues[usize::from(queue)].infos().nth(usize::from(namespace))
    }

    /// Time for which the devices may execute requests of a process that has died, ns.
    pub(super) fn silence_ns(&self) -> u64 {
        self.queues.iter().flat_map(HwQueue::infos).map(|info| info.silence_ns).max().unwrap_or(0)
    }

    pub(super) fn set_info(&mut self, device: u16, info: Arc<DeviceInfo>) {
        if let Some((hw, namespace)) = self.of_device(device) {
            hw.set_info(namespace, info);
        }
    }

    pub(super) fn schedule(&mut self, device: u16, config: SchedulerConfig) {
        if let Some((hw, namespace)) = self.of_device(device) {
            hw.schedule(namespace, config);
        }
    }

    pub(super) fn set_rates(&mut self, device: u16, limits: Vec<Arc<RateLimit>>) {
        if let Some((hw, namespace)) = self.of_device(device) {
            hw.set_rates(namespace, limits);
        }
    }

    /// The numbers of the devices of a hardware queue, by namespace.
    fn devices_of(&self, queue: usize) -> Vec<usize> {
        let here = self.places.iter().enumerate().filter(|(_, place)| usize::from(place.queue) == queue);
        let mut here: Vec<_> = here.map(|(device, place)| (place.namespace, device)).collect();
        here.sort_unstable();
        here.into_iter().map(|(_, device)| device).collect()
    }

    /// Limits the requests in flight of each hardware queue: to `one` if a scheduler there orders, otherwise to `sum`.
    /// `changing` is a device whose scheduler is about to change, and whether the next one orders.
    pub(super) fn set_depth(&mut self, one: usize, sum: usize, changing: Option<(u16, bool)>) {
        let changing = changing.and_then(|(device, orders)| Some((*self.places.get(usize::from(device))?, orders)));
        for (number, hw) in self.queues.iter_mut().enumerate() {
            let next = changing.filter(|(place, _)| usize::from(place.queue) == number);
            let orders = hw.schedulers().enumerate().any(|(namespace, scheduler)| {
                let next = next.filter(|(place, _)| usize::from(place.namespace) == namespace);
                next.map_or_else(|| scheduler.orders(), |(_, orders)| orders)
            });
            hw.set_depth(if orders { one } else { sum });
        }
    }

    /// Counts in these: by device, those of the first client queue and those of each by its number. The latter are
    /// empty for a single client queue.
    pub(super) fn set_stats(&mut self, first: &[Arc<HwStats>], members: &[&[Arc<HwStats>]]) {
        for number in 0..self.queues.len() {
            let devices = self.devices_of(number);
            let here =
                |stats: &[Arc<HwStats>]| -> Vec<_> { devices.iter().map(|at| Arc::clone(&stats[*at])).collect() };
            let of_members = members.iter().flat_map(|stats| here(stats)).collect();
            self.queues[number].set_stats(&here(first), of_members);
        }
    }

    /// Maximum requests in flight, of the hardware queue with most.
    pub(super) fn depth(&self) -> usize {
        self.queues.iter().map(HwQueue::depth).max().unwrap_or(1)
    }

    pub(super) fn set_round_spent(&mut self, is_spent: bool) {
        self.is_round_spent = is_spent;
    }

    /// Whether a request has used up the fetches of this round.
    #[inline(always)]
    pub(super) fn is_round_spent(&self) -> bool {
        self.is_round_spent
    }

    /// Number of bios that each hardware queue accepts.
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

    /// Divides the bytes that may be copied in a turn among the hardware queues.
    pub(super) fn set_turn_bytes(&mut self, bytes: u64) {
        let share = (bytes / self.queues.len() as u64).max(1);
        self.queues.iter_mut().for_each(|hw| hw.set_turn_bytes(share));
    }

    pub(super) fn mark_slow(&mut self, now_ns: u64) {
        self.queues.iter_mut().for_each(|hw| hw.mark_slow(now_ns));
    }

    /// Submits a bio to its device.
    #[inline(always)]
    pub(super) fn submit(&mut self, mut bio: Box<Bio>) {
        // Most bios are for the first device, whose place is known.
        let queue = match bio.namespace {
            0 => 0,
            device => {
                let place = self.places[usize::from(device)];
                bio.namespace = place.namespace;
                usize::from(place.queue)
            }
        };
        self.queues[queue].submit(bio);
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

    /// Takes the memory of the first session that runs.
    pub(super) fn set_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, session: &impl QueueSession)
    where
        D: Driver<Cx>,
    {
        self.memory_version = session.memory_version();
        self.replace_memory(cx, session.memory());
    }

    /// Replaces the memory while no session runs. The flush of a member at rest may be in flight: it names no memory.
    fn replace_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, memory: &Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        for hw in &mut self.queues {
            if hw.is_idle() {
                hw.set_memory(cx, Arc::clone(memory));
            } else {
                hw.change_memory(cx, Arc::clone(memory));
            }
        }
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

    /// Drops the memory: no session runs.
    pub(super) fn clear_memory<Cx: ?Sized>(&mut self, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        self.memory_version = 0;
        self.replace_memory(cx, &Arc::new(RegionTable::default()));
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

    /// State for inspection: sums over the hardware queues, and namespaces and requests by number of the device.
    pub(super) fn snapshot(&self, now_ns: u64) -> HwSnapshot {
        let mut all = self.first().snapshot(now_ns);
        if let [_] = self.places[..] {
            return all;
        }
        let mut namespaces = Vec::new();
        for (number, hw) in self.queues.iter().enumerate() {
            let (one, devices) = (hw.snapshot(now_ns), self.devices_of(number));
            namespaces.extend(devices.iter().copied().zip(one.namespaces));
            let requests = one.requests.into_iter().map(|mut request| {
                request.namespace = devices[usize::from(request.namespace)] as u16;
                request
            });
            if number == 0 {
                all.requests = requests.collect();
                continue;
            }
            all.requests.extend(requests);
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
        }
        namespaces.sort_by_key(|(device, _)| *device);
        all.namespaces = namespaces.into_iter().map(|(_, namespace)| namespace).collect();
        all
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mq::{BlockDevice, DeadlineConfig, HwQueueConfig, NullConfig, NullDevice, NullQueue, Op, OpClass};

    use super::*;

    const BIOS: usize = 8;

    fn info(number: u64) -> DeviceInfo {
        DeviceInfo { capacity_sectors: 100 + number, ..DeviceInfo::default() }
    }

    /// A hardware queue of these devices.
    fn queue(devices: &[u16]) -> (HwQueue<NullQueue>, Vec<u16>) {
        let infos: Vec<_> = devices.iter().map(|number| Arc::new(info(u64::from(*number)))).collect();
        let driver = NullDevice::new(info(0), NullConfig::default()).queue(BIOS);
        let config = HwQueueConfig { depth: BIOS, bios_max: BIOS, ..HwQueueConfig::default() };
        let mut hw = HwQueue::with_namespaces(driver, infos, config);
        let region = blkyard_mem::Region::shared(4096).unwrap();
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![region])));
        (hw, devices.to_vec())
    }

    fn stats(count: usize) -> Vec<Arc<HwStats>> {
        (0..count).map(|_| Arc::default()).collect()
    }

    #[test]
    fn devices_that_share_a_hardware_queue_keep_their_numbers_settings_and_counters() {
        let mut set = HwQueueSet::sharing::<()>(vec![queue(&[0, 2]), queue(&[1])]).unwrap();
        assert_eq!(set.devices(), 3);
        let sizes = |set: &HwQueueSet<_>| [0, 1, 2].map(|device| set.info(device).unwrap().capacity_sectors);
        assert_eq!(sizes(&set), [100, 101, 102]);
        set.set_info(2, Arc::new(info(50)));
        assert_eq!((sizes(&set), set.info(3).is_none()), ([100, 101, 150], true));
        let (first, members) = (stats(3), [stats(3), stats(3)]);
        set.set_stats(&first, &members.each_ref().map(|stats| &stats[..]));
        for (device, submitter, bios) in [(0, 0, 1), (1, 0, 2), (2, 0, 3), (0, 1, 4), (1, 1, 5), (2, 1, 6)] {
            for _ in 0..bios {
                let mut bio = Bio::with_capacity(1);
                (bio.op, bio.sectors, bio.namespace, bio.submitter) = (Op::Read, 8, device, submitter);
                bio.segments.push(blkyard_mq::Segment { region: 0, offset: 0, len: 4096 });
                set.submit(bio);
                set.issue(&mut (), 1);
                let mut ended = 0;
                set.reap(&mut (), 2, &mut |_| ended += 1);
                assert_eq!(ended, 1);
            }
        }
        let ios = |stats: &[Arc<HwStats>]| {
            stats.iter().map(|stats| stats.snapshot().op(OpClass::Read).ios).collect::<Vec<_>>()
        };
        assert_eq!((ios(&members[0]), ios(&members[1])), (vec![1, 2, 3], vec![4, 5, 6]));
        assert_eq!(ios(&first), [0; 3]);
        // A scheduler that orders bounds the hardware queue of its device, and no other.
        set.set_depth(2, 6, Some((2, true)));
        assert_eq!([0, 1].map(|number| set.queues[number].snapshot(3).depth_limit), [2, 6]);
        set.set_depth(2, 6, None);
        set.schedule(1, SchedulerConfig::Deadline(DeadlineConfig::default()));
        assert!(set.orders());
        let view = set.snapshot(3);
        let listed: Vec<_> = view.namespaces.iter().map(|namespace| namespace.info.capacity_sectors).collect();
        assert_eq!(listed, [100, 101, 150]);
        let scheduled: Vec<_> = view.namespaces.iter().map(|namespace| namespace.scheduler.is_some()).collect();
        assert_eq!(scheduled, [false, true, false]);
    }
}
