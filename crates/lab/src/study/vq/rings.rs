//! The queues of a simulation: the real core, driver, ring and back-end of `rig.rs`, which a simulated thread runs when
//! its time has come. Full rings, suppressed kicks and calls, and the order of completions are theirs.
//!
//! The disk completes each request at once, counts it, and copies nothing: how long that takes is the simulation's
//! decision. A round of the device shows the completions of the round before and fetches up to half of what it sees.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use blkyard_mq::{Batch, Bio, BlockDevice, DeviceInfo, Done, Driver, RegionTable, SignalEventfd, SignalSlot, Status};
use blkyard_os::now_ns;

use super::rig::{DEPTH, Half, RING, Tie, VqRigQueue, fill_apart, info, part, tie};
use crate::study::job_flags::{cookie, lock, slot_of};

/// Remembers whether an eventfd was signalled: a kick during a step of the driver, a call during one of the device.
#[derive(Debug, Default)]
struct SignalRecord(bool);

impl SignalRecord {
    fn take(&mut self) -> bool {
        std::mem::take(&mut self.0)
    }
}

impl SignalEventfd for SignalRecord {
    fn signal(&mut self, _: &mut SignalSlot, _: BorrowedFd<'_>) {
        self.0 = true;
    }

    fn forget(&mut self, _: &mut SignalSlot) {}
}

/// A disk that counts the requests of each queue.
struct CountedDisk {
    info: DeviceInfo,
    taken: Mutex<Vec<Arc<AtomicUsize>>>,
}

struct CountedQueue {
    taken: Arc<AtomicUsize>,
}

impl BlockDevice for CountedDisk {
    type Queue = CountedQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn queue(&self, _: usize) -> CountedQueue {
        let taken = Arc::new(AtomicUsize::new(0));
        lock(&self.taken).push(Arc::clone(&taken));
        CountedQueue { taken }
    }
}

impl<Cx: ?Sized> Driver<Cx> for CountedQueue {
    fn queue_rqs(&mut self, _: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, _, _)) = batch.take() {
            self.taken.fetch_add(1, Ordering::Relaxed);
            batch.complete(tag, Status::Ok);
        }
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, _: &mut Done<'_>, _: u64) {}
}

/// Result of a round of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceRound {
    /// Requests that were available.
    pub(super) offered: usize,
    /// Those it fetched.
    pub(super) taken: usize,
    /// Completions it showed.
    pub(super) shown: usize,
    /// Whether the driver wants a call for them.
    pub(super) call: bool,
}

/// A queue of the simulation, with its ring.
pub(super) struct SimulatedQueue {
    hw: VqRigQueue<CountedQueue>,
    /// `None` if the driver's thread runs the device as well.
    device: Option<Half<CountedQueue>>,
    signals: SignalRecord,
    taken: Arc<AtomicUsize>,
    /// Of the disk's count, what preceded the simulation.
    taken_before: usize,
    /// Real time at the start of virtual time: the set-up has used the real clock.
    start_ns: u64,
    now_ns: u64,
    /// Bios and requests so far: given to the core, put into the ring, completed by the device, taken back.
    submitted: usize,
    issued: usize,
    shown: usize,
    reaped: usize,
    /// For distinct positions.
    filled: u64,
}

impl SimulatedQueue {
    fn at(&mut self, now_ns: u64) -> u64 {
        self.now_ns = self.start_ns + now_ns;
        self.now_ns
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed) - self.taken_before
    }

    /// Bios that the ring has no room for.
    pub(super) fn waiting(&self) -> usize {
        self.submitted - self.issued
    }

    /// Requests that the ring still has room for.
    pub(super) fn room(&self) -> usize {
        usize::from(RING) - (self.issued - self.reaped)
    }

    /// Whether a poll of the queue would find a completion.
    pub(super) fn has_news(&self) -> bool {
        // A driver that runs the device itself finds all that is out.
        let shown = if self.device.is_some() { self.shown } else { self.issued };
        shown > self.reaped
    }

    /// Submits bios, and puts as many into the ring as it has room for. Returns whether the device wants a kick.
    pub(super) fn submit(&mut self, bios: impl Iterator<Item = Box<Bio>>, now_ns: u64) -> bool {
        for mut bio in bios {
            let slot = slot_of(&bio);
            fill_apart(&mut bio, slot, self.filled);
            self.filled += 1;
            self.submitted += 1;
            self.hw.submit(bio);
        }
        self.issue(now_ns)
    }

    /// Puts waiting bios into the ring. Returns whether the device wants a kick.
    pub(super) fn issue(&mut self, now_ns: u64) -> bool {
        let now_ns = self.at(now_ns);
        self.issued += self.hw.issue(&mut self.signals, now_ns);
        self.signals.take()
    }

    /// Takes completions. Returns how many.
    pub(super) fn reap(&mut self, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let now_ns = self.at(now_ns);
        let reaped = self.hw.reap(&mut self.signals, now_ns, &mut |bio: Box<Bio>| {
            assert!(bio.status == Status::Ok, "the simulated disk fails nothing");
            sink(bio);
        });
        self.reaped += reaped;
        self.signals.take();
        reaped
    }

    /// Requests that the driver's thread served in its last poll, and those that were available, if it runs the device.
    pub(super) fn reap_and_serve(&mut self, now_ns: u64, sink: &mut impl FnMut(Box<Bio>)) -> (usize, usize) {
        let before = self.taken();
        let reaped = self.reap(now_ns, sink);
        (reaped, self.taken() - before)
    }

    /// A round of the device.
    pub(super) fn run_device(&mut self, now_ns: u64) -> DeviceRound {
        let now_ns = self.at(now_ns);
        let before = self.taken();
        let offered = self.issued - before;
        if let Some(device) = &mut self.device {
            device.run_once(&mut self.signals, now_ns);
        }
        // What it had taken earlier is complete.
        let shown = before - std::mem::replace(&mut self.shown, before);
        DeviceRound { offered, taken: self.taken() - before, shown, call: self.signals.take() }
    }

    /// Before the device sleeps: asks for a kick. False if it must not sleep.
    pub(super) fn device_may_sleep(&mut self) -> bool {
        !self.device.as_mut().is_some_and(Half::arm::<SignalRecord>)
    }

    pub(super) fn device_wakes(&mut self) {
        self.device.iter_mut().for_each(Half::disarm::<SignalRecord>);
    }

    /// At the end of an interrupt: asks for the next call. False if there are completions already.
    pub(super) fn driver_may_sleep(&mut self) -> bool {
        !self.hw.arm::<SignalRecord>()
    }

    pub(super) fn driver_wakes(&mut self) {
        self.hw.disarm::<SignalRecord>();
    }
}

/// Number of the next simulation: those of several threads have separate folders.
static SIMULATION: AtomicUsize = AtomicUsize::new(0);

/// All queues of a simulation. The connection is dropped last.
pub(super) struct SimulatedQueues {
    pub(super) queues: Vec<SimulatedQueue>,
    _tie: Tie<CountedQueue>,
}

impl SimulatedQueues {
    /// Queues for so many jobs, job `n` on queue `n` modulo their number. With `is_apart` the device has threads of its
    /// own.
    ///
    /// # Errors
    /// The system refuses memory, threads or descriptors.
    pub(super) fn new(jobs: usize, queues: usize, is_apart: bool) -> io::Result<SimulatedQueues> {
        let disk = CountedDisk { info: info(), taken: Mutex::default() };
        let ios: Vec<_> = (0..queues).map(|queue| DEPTH * (queue..jobs).step_by(queues).len().max(1)).collect();
        let name = format!("simulated-{}", SIMULATION.fetch_add(1, Ordering::Relaxed));
        let (tie, rigs) = tie(&name, &disk, &ios)?;
        let start_ns = now_ns();
        let mut simulated = Vec::with_capacity(queues);
        for (mut hw, taken) in rigs.into_iter().zip(lock(&disk.taken).iter()) {
            let device = if is_apart { Some(part(&mut hw)?) } else { None };
            simulated.push(SimulatedQueue {
                hw,
                device,
                signals: SignalRecord::default(),
                taken_before: taken.load(Ordering::Relaxed),
                taken: Arc::clone(taken),
                start_ns,
                now_ns: start_ns,
                submitted: 0,
                issued: 0,
                shown: 0,
                reaped: 0,
                filled: 0,
            });
        }
        Ok(SimulatedQueues { queues: simulated, _tie: tie })
    }
}

impl Drop for SimulatedQueues {
    /// Requests of all queues complete before the first one is closed: its device would wait for the others.
    fn drop(&mut self) {
        for queue in &mut self.queues {
            while !queue.hw.is_idle() {
                if let Some(device) = &mut queue.device {
                    device.run_once(&mut queue.signals, queue.now_ns);
                }
                queue.hw.issue(&mut queue.signals, queue.now_ns);
                queue.hw.reap(&mut queue.signals, queue.now_ns, &mut drop);
            }
        }
    }
}

/// The bios of a job.
pub(super) fn bios_of(job: usize) -> VecDeque<Box<Bio>> {
    let bio = |slot| {
        let mut bio = Bio::with_capacity(1);
        bio.cookie = cookie(job, slot);
        bio
    };
    (0..DEPTH).map(bio).collect()
}
