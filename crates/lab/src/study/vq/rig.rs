//! The real code of the study: the core over our vhost-user driver, a ring in shared memory, our back-end's queue, and
//! the core again over a disk in memory. They are connected over a socket as usual, by their own threads; then no
//! thread sleeps, kicks and calls are off, and the variant decides which thread runs each half, without the lane.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_export::{BackendConfig, BoundSocket, SEG_MAX, SocketConfig, VhostUserServer, VirtqueuePoller, queue_pair};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{
    Batch, Bio, BlockDevice, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, NullConfig, NullDevice, Op, Poller,
    PollerState, QueueKind, RamDevice, SECTOR_SHIFT, SignalEventfd, TimedOut,
};
use blkyard_os::{SystemClock, now_ns};
use blkyard_sim::Rng;
use blkyard_virtio::BlkConfig;

use crate::floor::IO_BYTES;
use crate::study::end::config;
use crate::study::folder::Folder;

/// I/Os that each job keeps in flight, as in the post.
pub(super) const DEPTH: usize = 64;
/// Entries of a ring: a request each, for four jobs that share one.
pub(super) const RING: u16 = 256;
/// Requests in flight of the device's half: the daemon's default.
pub(super) const TAGS: usize = 128;
/// The disk: larger than a second-level cache and small enough for a busy machine.
pub(super) const STORE_BYTES: u64 = 1 << 28;
const IO_SECTORS: u32 = IO_BYTES >> SECTOR_SHIFT;
const BLOCKS: u64 = STORE_BYTES / IO_BYTES as u64;
/// Halves that have not found each other by then never will: a few messages, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// A disk in memory, every page of it there.
pub(super) fn ram() -> io::Result<RamDevice> {
    let device = RamDevice::new(info(), NullConfig::default())?;
    let memory = Arc::new(RegionTable::new(vec![Region::anonymous(IO_BYTES as usize)?]));
    let mut hw = HwQueue::new(device.queue(1), Arc::new(info()), config(1, 1));
    hw.set_memory(&mut (), memory);
    let mut bio = Some(Bio::with_capacity(1));
    for block in 0..BLOCKS {
        let Some(mut write) = bio.take() else { return Err(io::Error::other("the RAM disk did not complete a bio")) };
        aim(&mut write, Op::Write, block, 0);
        hw.submit(write);
        hw.issue(&mut (), 0);
        hw.reap(&mut (), 0, &mut |ended| bio = Some(ended));
    }
    Ok(device)
}

/// A null disk.
pub(super) fn null() -> NullDevice {
    NullDevice::new(info(), NullConfig::default())
}

pub(super) fn info() -> DeviceInfo {
    DeviceInfo { name: "study".into(), capacity_sectors: STORE_BYTES >> SECTOR_SHIFT, ..DeviceInfo::default() }
}

/// Makes a random read of a bio, into the buffer of this number. The cookie stays.
#[inline]
pub(super) fn fill(bio: &mut Bio, buffer: usize, rng: &mut Rng) {
    aim(bio, Op::Read, rng.below(BLOCKS), buffer);
}

/// Makes a read of the block after next, counted from this number on: neighbours in this order are never merged.
pub(super) fn fill_apart(bio: &mut Bio, buffer: usize, number: u64) {
    aim(bio, Op::Read, number * 2 % BLOCKS, buffer);
}

#[inline]
fn aim(bio: &mut Bio, op: Op, block: u64, buffer: usize) {
    bio.reset();
    bio.op = op;
    bio.sector = block * u64::from(IO_SECTORS);
    bio.sectors = IO_SECTORS;
    bio.segments.push(Segment { region: 0, offset: buffer as u64 * u64::from(IO_BYTES), len: IO_BYTES });
}

/// Our device's half of a virtqueue. Dropped, it goes home, where it is turned until all have parted in good order.
pub(super) struct Half<D> {
    queue: Option<VirtqueuePoller<D>>,
    home: Sender<VirtqueuePoller<D>>,
}

impl<D> Half<D> {
    /// Completes finished requests, fetches half of the available ones or all, and issues them. Immediate completions
    /// are returned with the next round. Returns whether there was work.
    #[inline]
    pub(super) fn run_once<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx, now_ns: u64) -> bool
    where
        D: Driver<Cx>,
    {
        self.queue.as_mut().is_some_and(|queue| queue.run_once(cx, now_ns) == PollerState::Busy)
    }

    /// Asks the driver for a kick. True if there is work already.
    pub(super) fn arm<Cx: ?Sized + SignalEventfd>(&mut self) -> bool
    where
        D: Driver<Cx>,
    {
        self.queue.as_mut().is_some_and(Poller::<Cx>::arm)
    }

    /// The driver need not kick any more.
    pub(super) fn disarm<Cx: ?Sized + SignalEventfd>(&mut self)
    where
        D: Driver<Cx>,
    {
        self.queue.iter_mut().for_each(Poller::<Cx>::disarm);
    }
}

impl<D> Drop for Half<D> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            // Without a receiver it ends here.
            let _ = self.home.send(queue);
        }
    }
}

/// Both halves of a virtqueue, on one thread: the device has its turn when the driver is polled.
pub(super) struct RingPair<D> {
    front: AttachedQueue,
    /// `None` once it has been [separated](part) from the driver.
    device: Option<Half<D>>,
}

impl<Cx: ?Sized + SignalEventfd, D: Driver<Cx>> Driver<Cx> for RingPair<D> {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        self.front.queue_rqs(cx, memory, batch);
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        if let Some(device) = &mut self.device {
            // Fetched in one turn and shown in the next.
            for _ in 0..2 {
                device.run_once(cx, now_ns);
            }
        }
        self.front.poll(cx, memory, done, now_ns);
    }

    fn timed_out(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        self.front.timed_out(cx, memory, place, done, now_ns)
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        self.front.set_memory(cx, memory);
    }

    fn arm(&mut self) -> bool {
        Driver::<Cx>::arm(&mut self.front)
    }

    fn disarm(&mut self) {
        Driver::<Cx>::disarm(&mut self.front);
    }
}

/// The core over both halves of a virtqueue.
pub(super) type VqRigQueue<D> = HwQueue<RingPair<D>>;

/// Takes the device's half, to be turned elsewhere.
pub(super) fn part<D>(queue: &mut VqRigQueue<D>) -> io::Result<Half<D>> {
    queue.driver_mut().device.take().ok_or_else(|| io::Error::other("the halves of this queue are separated already"))
}

/// Keeps the halves of some virtqueues connected: the export of one, the attachment of the other. To be dropped after
/// the queues.
pub(super) struct Tie<D: Driver<()>> {
    home: Receiver<VirtqueuePoller<D>>,
    ends: Option<(Attached, VhostUserServer)>,
    _folder: Folder,
}

/// Virtqueues of a disk that are ready, each with memory for so many I/Os.
///
/// # Errors
/// The system refuses memory, threads or descriptors, or the halves do not find each other.
pub(super) fn tie<B>(name: &str, device: &B, ios: &[usize]) -> io::Result<(Tie<B::Queue>, Vec<VqRigQueue<B::Queue>>)>
where
    B: BlockDevice,
    B::Queue: Driver<()>,
{
    let folder = Folder::new(name)?;
    let path = folder.path().join("disk.sock");
    let info = Arc::new(device.info().clone());
    let serial = "study".parse().map_err(io::Error::other)?;
    let half = |_: &usize| {
        let (remote, port) = queue_pair();
        let config = HwQueueConfig { depth: TAGS, ..HwQueueConfig::default() };
        let hw = HwQueue::new(device.queue(config.depth), Arc::clone(&info), config);
        (remote, VirtqueuePoller::new(hw, serial, port))
    };
    let (remotes, mut halves): (Vec<_>, Vec<_>) = ios.iter().map(half).unzip();
    let disk = BlkConfig::new(&info, ios.len() as u16, SEG_MAX, false);
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: None, group: None });
    let backend = BackendConfig { name: name.into(), disk, queues: remotes, domains: Vec::new() };
    let server = VhostUserServer::start(socket.map_err(io::Error::other)?, backend)?;
    let count = ios.len();
    let opening = thread::Builder::new().spawn(move || {
        let config = AttachConfig {
            queues: Some(count as u16),
            queue_size: RING,
            ..AttachConfig::new(path, Arc::new(SystemClock))
        };
        let attached = Attached::open(config)?;
        let fronts =
            (0..count).map(|_| attached.queue(QueueKind::Default, RING.into())).collect::<Result<Vec<_>, _>>()?;
        Ok((attached, fronts))
    })?;
    while !opening.is_finished() {
        halves.iter_mut().for_each(|half| _ = half.run_once(&mut (), now_ns()));
    }
    let opened: Result<_, blkyard_attach::AttachError> =
        opening.join().map_err(|_| io::Error::other("a thread that attaches a disk panicked"))?;
    let (attached, fronts) = opened.map_err(io::Error::other)?;
    let info = Arc::new(attached.info().clone());
    let (sender, home) = channel();
    let tie = Tie { home, ends: Some((attached, server)), _folder: folder };
    let mut queues = Vec::with_capacity(count);
    for ((front, half), ios) in fronts.into_iter().zip(halves).zip(ios) {
        let device = Some(Half { queue: Some(half), home: sender.clone() });
        let bios = usize::from(RING).max(*ios);
        let mut queue = HwQueue::new(RingPair { front, device }, Arc::clone(&info), config(RING.into(), bios));
        let memory = Region::shared(ios * IO_BYTES as usize)?;
        queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![memory])));
        queues.push(queue);
    }
    begin(&mut queues)?;
    Ok((tie, queues))
}

/// Has each queue do an I/O, which it can once the device knows its ring and its memory.
fn begin<D: Driver<()>>(queues: &mut [VqRigQueue<D>]) -> io::Result<()> {
    for queue in &mut *queues {
        let mut bio = Bio::with_capacity(1);
        aim(&mut bio, Op::Read, 0, 0);
        queue.submit(bio);
    }
    let (mut missing, limit) = (queues.len(), Instant::now() + READY_LIMIT);
    while missing > 0 {
        if Instant::now() > limit {
            return Err(io::Error::other("driver and device did not connect"));
        }
        let now_ns = now_ns();
        for queue in &mut *queues {
            queue.issue(&mut (), now_ns);
            if let Some(device) = &mut queue.driver_mut().device {
                device.run_once(&mut (), now_ns);
            }
            missing -= queue.reap(&mut (), now_ns, &mut |_| ());
        }
    }
    Ok(())
}

impl<D: Driver<()>> Drop for Tie<D> {
    /// Both sides take leave of each other, for which the device's halves must turn.
    fn drop(&mut self) {
        let Some((attached, server)) = self.ends.take() else { return };
        let mut halves: Vec<_> = self.home.try_iter().collect();
        let leaving = thread::spawn(move || {
            drop(attached);
            server.ask_to_stop();
            server.join();
        });
        while !leaving.is_finished() {
            halves.iter_mut().for_each(|half| _ = half.run_once(&mut (), now_ns()));
        }
    }
}
