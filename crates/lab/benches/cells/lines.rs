//! Our virtio-blk driver under load: by itself, for a server elsewhere, and with one on the same thread.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_export::{
    BackendConfig, BoundSocket, DetachedVirtqueue, QueueShare, SEG_MAX, SocketConfig, VirtqueuePoller, queue_pair,
};
use blkyard_lab::floor::{IO_BYTES, Round};
use blkyard_mem::Region;
use blkyard_mq::{
    BlockDevice, HwQueue, HwQueueConfig, NullConfig, NullDevice, NullQueue, Poller, QueueKind, SignalEventfd,
    SignalSlot,
};
use blkyard_os::SystemClock;
use blkyard_virtio::{BlkConfig, SerialId};
use tempfile::TempDir;

use crate::load::{Load, info};

/// A request that takes longer than this is not going to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Signals eventfds at once, as a thread without a lane does.
#[derive(Debug)]
pub struct DirectSignals;

impl SignalEventfd for DirectSignals {
    fn signal(&mut self, _place: &mut SignalSlot, eventfd: BorrowedFd<'_>) {
        let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
    }

    fn forget(&mut self, _place: &mut SignalSlot) {}
}

/// Our driver's queues of one disk, each with this depth, driven by one thread.
pub struct Lines<C: FnMut() -> u64> {
    loads: Vec<Load<AttachedQueue, C, DirectSignals>>,
    _disk: Attached,
}

impl<C: FnMut() -> u64> Lines<C> {
    /// Takes completions, without new submissions. True once no I/O is in flight.
    pub fn is_answered(&mut self) -> bool {
        self.loads.iter_mut().map(Load::drains).fold(true, |all, one| all & one)
    }
}

impl<C: FnMut() -> u64> Round for Lines<C> {
    #[inline]
    fn round(&mut self) -> u64 {
        self.loads.iter_mut().map(Round::round).sum()
    }
}

pub fn lines<C: FnMut() -> u64>(
    socket: &Path,
    queues: usize,
    depth: usize,
    packed: bool,
    clock: impl Fn() -> C,
) -> Result<Lines<C>, String> {
    let disk = attach(socket, packed)?;
    let load = |_| {
        let queue = disk.queue(QueueKind::Poll, depth.max(2)).map_err(|error| error.to_string())?;
        let memory = Region::shared(depth * IO_BYTES as usize).map_err(|error| error.to_string())?;
        memory.span(0, memory.len()).inspect(|all| all.fill(0xa5));
        Ok(Load::on(DirectSignals, queue, disk.info(), memory, depth, true, clock()))
    };
    let loads = (0..queues).map(load).collect::<Result<_, String>>()?;
    let mut lines = Lines { loads, _disk: disk };
    first_answer(|| lines.round())?;
    Ok(lines)
}

pub fn attach(socket: &Path, packed: bool) -> Result<Attached, String> {
    Attached::open(AttachConfig { packed, ..AttachConfig::new(socket, Arc::new(SystemClock)) })
        .map_err(|error| error.to_string())
}

/// Goes round until something comes back: only then all is set up.
pub fn first_answer(mut round: impl FnMut() -> u64) -> Result<(), String> {
    let start = Instant::now();
    while round() == 0 {
        if start.elapsed() > PATIENCE {
            return Err(format!("nothing came back in {PATIENCE:?}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Driver and server on one thread: both cores, both sides of the ring, and the null device, run in turn.
pub struct OneCore<C: FnMut() -> u64> {
    /// Dropped before the driver, which would wait for an answer on its end.
    device: VirtqueuePoller<NullQueue>,
    lines: Lines<C>,
    clock: C,
    _server: blkyard_export::VhostUserServer,
    _folder: TempDir,
}

impl<C: FnMut() -> u64> Round for OneCore<C> {
    #[inline]
    fn round(&mut self) -> u64 {
        let ended = self.lines.round();
        // Fetched in one turn and shown in the next.
        for _ in 0..2 {
            let now_ns = (self.clock)();
            let _ = self.device.run_once(&mut DirectSignals, now_ns);
        }
        ended
    }
}

impl<C: FnMut() -> u64> OneCore<C> {
    /// Runs both sides until no I/O is in flight.
    fn drain(&mut self) {
        while !self.lines.is_answered() {
            let _ = self.device.run_once(&mut DirectSignals, 0);
            std::thread::yield_now();
        }
    }
}

impl<C: FnMut() -> u64> Drop for OneCore<C> {
    fn drop(&mut self) {
        self.drain();
    }
}

/// The same with so many virtqueues, which share the hardware queue, each with this depth.
pub fn one_core<C: FnMut() -> u64 + Send>(
    queues: usize,
    depth: usize,
    packed: bool,
    clock: impl Fn() -> C + Sync,
) -> Result<OneCore<C>, String> {
    let folder = tempfile::Builder::new().prefix("blkyard-cell").tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("socket");
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: None, group: None });
    let info = info();
    let (remotes, mut ports): (Vec<_>, Vec<_>) = (0..queues).map(|_| queue_pair()).unzip();
    let others = ports.split_off(1);
    let port = ports.pop().ok_or("no queue")?;
    let mover = remotes[0].mover();
    let disk = BlkConfig::new(&info, queues as u16, SEG_MAX, true);
    let config = BackendConfig { name: "cell".into(), disk, queues: remotes, domains: Vec::new() };
    let server = blkyard_export::VhostUserServer::start(socket.map_err(|error| error.to_string())?, config);
    let server = server.map_err(|error| error.to_string())?;
    let config = HwQueueConfig::default();
    let share = QueueShare { bios: config.bios_max / queues, depth: config.depth / queues, devices: 1 };
    let driver = NullDevice::new(info.clone(), NullConfig::default()).queue(config.depth);
    let serial: SerialId = "cell".parse().map_err(|_| "no serial number")?;
    let mut device = VirtqueuePoller::new(HwQueue::new(driver, Arc::new(info), config), serial, port);
    // The control path waits for a queue that turns.
    let lines = std::thread::scope(|scope| {
        let lines = scope.spawn(|| {
            for port in others {
                let virtqueue = DetachedVirtqueue::new(serial, port, share);
                let virtqueue = virtqueue.map_err(|error| error.to_string())?;
                mover.adopt(virtqueue, PATIENCE).map_err(|(error, _)| error.to_string())?;
            }
            lines(&path, queues, depth, packed, &clock)
        });
        while !lines.is_finished() {
            let _ = device.run_once(&mut DirectSignals, 0);
            // Yields the CPU: the sleeper's own polling is not to be counted.
            std::thread::yield_now();
        }
        lines.join().unwrap_or_else(|_| Err("the driver panicked".into()))
    })?;
    let mut all = OneCore { device, lines, clock: clock(), _server: server, _folder: folder };
    // When the first virtqueue answers, another may still wait for its set-up, and how many requests are in which ring
    // depends on the other threads. From rings without requests on, every round is the same in every run.
    all.drain();
    Ok(all)
}
