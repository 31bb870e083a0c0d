//! A disk by its name, for the threads of a program.
//!
//! [`Disk::open`] takes the names that `serve` and `bench` take, with their options except `share` and `tracker`, which
//! are of the daemon, and makes the queues;
//! [`Disk::run`] starts the threads that use them. A thread has a [`Submitter`] to itself: it fills in bios, submits
//! them, and gets them back.
//!
//! ```
//! use blkyard::{Bio, Disk, DiskConfig, Op, Status};
//!
//! let mut disk = Disk::open("ram:1M", DiskConfig { threads: 1, ..DiskConfig::default() })?;
//! let statuses = disk.run(|queue| {
//!     let mut bio = Bio::with_capacity(1);
//!     (bio.op, bio.sector, bio.sectors) = (Op::Write, 8, 8);
//!     bio.segments.push(queue.buffer(0, 4096));
//!     queue.data(bio.segments[0]).copy_from_slice(&[7; 4096]);
//!     queue.submit(bio);
//!     let mut status = Status::default();
//!     queue.wait(|bio| status = bio.status);
//!     status
//! });
//! assert_eq!(statuses, [Status::Ok]);
//! # Ok::<(), blkyard::DiskError>(())
//! ```
//!
//! `bench` makes its queues here, too ([`Queues`]). It does not choose how many I/Os are worth having out, and does not
//! verify data.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Barrier, PoisonError, RwLock};
use std::thread::{Builder, ScopedJoinHandle};

use blkyard_mq::{
    Bio, BufferAccess, DeviceInfo, HwQueue, HwQueueConfig, Parker, QueueCounts, QueueFactory, QueueKind, QueuesError,
    RateLimit, Region, RegionTable, RegisterError, RegisteredBuffer, SchedulerConfig, Segment, Span, TagSet,
};
use blkyard_os::{Clock, Ring, RingConfig, RingError, RingParker, cpu_places};

use crate::rate::take_own_rate;
use crate::scheduler::take_device_scheduler;
use crate::spec::Spec;
use crate::{Device, DeviceError, DeviceQueue, DiskBuffers, DiskQueues};

/// Why a disk cannot be opened, or have other queues.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The device cannot be opened, or has no more queues.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A queue has no ring.
    #[error("{name}: io_uring set-up failed: {source}")]
    Ring {
        /// The device's name.
        name: String,
        /// Why, and the cure.
        source: RingError,
    },
    /// There is no memory for buffers.
    #[error("{name}: {bytes} bytes of buffers for a thread: {source}; lower `depth` or `buffer_bytes`")]
    Memory {
        /// The device's name.
        name: String,
        /// Bytes for one thread.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// Memory cannot be registered.
    #[error("{name}: {source}")]
    Register {
        /// The device's name.
        name: String,
        /// Why, and the cure.
        source: RegisterError,
    },
    /// There is no descriptor for a thread to sleep on.
    #[error("{name}: no eventfd for a thread: {source}; see the limit on open files")]
    Parker {
        /// The device's name.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// Such queues cannot be had, for a reason of their number.
    #[error("{0}")]
    Queues(String),
}

impl From<QueuesError<DiskError>> for DiskError {
    fn from(error: QueuesError<DiskError>) -> DiskError {
        match error {
            QueuesError::Make(error) => error,
            other => DiskError::Queues(other.to_string()),
        }
    }
}

/// How a program uses a disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskConfig {
    /// Threads that submit, at least one.
    pub threads: usize,
    /// Bios that each may have out, at least one.
    pub depth: usize,
    /// Bytes of each of a thread's `depth` buffers: a multiple of the disk's block; 0 for no buffers.
    pub buffer_bytes: usize,
    /// Hardware queues of each kind: no more than threads are made, and no more than the device has. Of those the
    /// default kind has the first, then reads.
    pub queues: QueueCounts,
}

impl Default for DiskConfig {
    /// A thread and a queue for each CPU, with 32 buffers of 128 KiB.
    fn default() -> DiskConfig {
        let cpus = cpu_places().len().max(1);
        DiskConfig { threads: cpus, depth: 32, buffer_bytes: 128 << 10, queues: QueueCounts::only(cpus) }
    }
}

/// An open disk, with its queues, and the threads' ways there.
#[derive(Debug)]
pub struct Disk {
    info: Arc<DeviceInfo>,
    queues: Arc<blkyard_mq::SharedDisk<Queues<Arc<Device>>>>,
    submitters: Vec<Submitter>,
}

impl Disk {
    /// Opens a disk by its name, as `blkyard bench` does: see README for the names and their options.
    ///
    /// # Errors
    /// See [`DiskError`]: each names device, cause and cure.
    ///
    /// # Panics
    /// Without threads, or with a depth of 0.
    pub fn open(name: &str, config: DiskConfig) -> Result<Disk, DiskError> {
        Disk::with_buffers(name, config, &[])
    }

    /// [`Disk::open`] with further memory for I/O: registered buffers, which may be used with several disks. Bios name
    /// them by [`RegisteredBuffer::segment`]. More can be registered later: see [`Disk::buffers`]. A disk that another
    /// process serves reaches those in memory that can be shared ([`Region::shared`](blkyard_mq::Region::shared)).
    ///
    /// # Errors
    /// See [`DiskError`].
    ///
    /// # Panics
    /// As [`Disk::open`].
    pub fn with_buffers(name: &str, config: DiskConfig, buffers: &[Arc<RegisteredBuffer>]) -> Result<Disk, DiskError> {
        let mut spec = Spec::parse(name).map_err(DeviceError::from)?;
        let scheduler = take_device_scheduler(&mut spec).map_err(DeviceError::from)?;
        let rate = take_own_rate(&mut spec).map_err(DeviceError::from)?;
        Device::ask_queues(&mut spec, config.queues.up_to(config.threads));
        let device = Arc::new(Device::from_spec(spec)?);
        let info = Arc::new(device.info().clone());
        let bytes = config.buffer_bytes.saturating_mul(config.depth);
        // There is no memory without bytes.
        let parts = device.memory(config.threads, bytes.max(1));
        let parts = parts.map_err(|source| DiskError::Memory { name: info.name.clone(), bytes, source })?;
        // The threads' own buffers are registered like those of the program.
        let own = parts
            .iter()
            .map(|(region, first)| RegisteredBuffer::new(region, *first, bytes.max(1) as u64, BufferAccess::ReadWrite));
        let own: Result<Vec<_>, _> = own.collect();
        let own = own.map_err(|source| DiskError::Register { name: info.name.clone(), source })?;
        let (mut memory, _): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        for buffer in buffers {
            if !memory.iter().any(|region: &Arc<Region>| Arc::ptr_eq(region, buffer.region())) {
                memory.push(Arc::clone(buffer.region()));
            }
        }
        let counts = fitting(config.queues.up_to(config.threads), device.queues_max());
        let queues = Queues {
            device,
            info: Arc::clone(&info),
            memory: Arc::new(RegionTable::new(memory)),
            buffers: own.iter().chain(buffers).map(Arc::clone).collect(),
            registers_memory: true,
            bios: config.depth,
            tags: config.depth,
            scheduler,
            rates: RateLimit::new(rate).map(Arc::new).into_iter().collect(),
        };
        let (queues, ways) = blkyard_mq::SharedDisk::open(queues, config.threads, config.depth, counts)?;
        let submitters = ways.into_iter().zip(own).enumerate();
        let submitters = submitters.map(|(number, (way, buffers))| Submitter {
            way,
            clock: Clock::new(),
            number,
            buffers,
            buffer_bytes: config.buffer_bytes,
        });
        Ok(Disk { info, queues: Arc::new(queues), submitters: submitters.collect() })
    }

    /// Properties of the disk: size, limits, features.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its queues: how many there are, their counters; and to change how many there are, also while threads
    /// [run](Disk::run).
    pub fn queues(&self) -> DiskQueues {
        DiskQueues::new(&self.queues)
    }

    /// Registers further buffers, and unregisters them, also while threads [run](Disk::run).
    pub fn buffers(&self) -> DiskBuffers {
        DiskBuffers::new(&self.queues)
    }

    /// Runs the same work on each of the disk's threads, and returns the results in the order of the threads' numbers.
    /// Bios left in flight are waited for, and dropped. May be called repeatedly.
    ///
    /// Each thread stays until all I/O has completed: the kernel cancels a thread's requests when it ends, and a thread
    /// that finds a queue idle issues I/O for all.
    ///
    /// # Panics
    /// If `work` panics, when all threads have ended; if the system does not give a thread for each, before any works.
    pub fn run<T: Send>(&mut self, work: impl Fn(&mut Submitter) -> T + Sync) -> Vec<T> {
        let all_over = &Barrier::new(self.submitters.len());
        let all_there = &RwLock::new(false);
        let work = &work;
        let ends: Vec<_> = std::thread::scope(|scope| {
            // Held until the result is known: readers wait.
            let mut begin = all_there.write().unwrap_or_else(PoisonError::into_inner);
            let threads = self.submitters.iter_mut().map(|queue| {
                Builder::new().spawn_scoped(scope, move || {
                    // With a thread missing, the others would wait for it without end.
                    if !*all_there.read().unwrap_or_else(PoisonError::into_inner) {
                        return None;
                    }
                    // Meets the others also while a panic unwinds: they must not wait for this one in vain.
                    let _meet = Meet(all_over);
                    let made = work(queue);
                    while queue.wait(|_| ()) > 0 {}
                    Some(made)
                })
            });
            let threads: io::Result<Vec<_>> = threads.collect();
            *begin = threads.is_ok();
            drop(begin);
            threads.map(|threads| threads.into_iter().map(ScopedJoinHandle::join).collect())
        })
        .unwrap_or_else(|error| panic!("{}: a thread for each submitter cannot be had: {error}", self.info.name));
        if ends.iter().any(Result::is_err) {
            // Bios of a thread that panicked.
            self.submitters.iter_mut().for_each(|queue| while queue.wait(|_| ()) > 0 {});
        }
        ends.into_iter().filter_map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    }
}

/// So many queues of each kind as a device has that has no more than these.
fn fitting(asked: QueueCounts, queues_max: usize) -> QueueCounts {
    let default = asked.default.min(queues_max);
    let read = asked.read.min(queues_max - default);
    QueueCounts { default, read, poll: asked.poll.min(queues_max - default - read) }
}

/// Waits for the other threads in the end.
#[derive(Debug)]
pub struct Meet<'a>(pub &'a Barrier);

impl Drop for Meet<'_> {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// One thread's access to a [`Disk`], and its buffers.
///
/// A returned bio may be filled in and submitted again, so that the I/O path allocates nothing.
#[derive(Debug)]
pub struct Submitter {
    way: blkyard_mq::SharedSubmitter<DeviceQueue, Ring>,
    clock: Clock,
    number: usize,
    /// Its buffers, one behind the other.
    buffers: Arc<RegisteredBuffer>,
    buffer_bytes: usize,
}

impl Submitter {
    /// The thread's number, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The first bytes of one of this thread's buffers, 0 to `depth` - 1, for a bio's segments.
    ///
    /// # Panics
    /// If buffers are not as large, or it is more than a segment can have, four gibibytes less one.
    pub fn buffer(&self, buffer: usize, bytes: usize) -> Segment {
        let len = u32::try_from(bytes).ok().filter(|_| bytes <= self.buffer_bytes);
        let Some(len) = len else { panic!("{bytes} bytes of a buffer that has {}", self.buffer_bytes) };
        // One that is not there lies outside the memory, however far.
        self.buffers.segment((buffer as u64).saturating_mul(self.buffer_bytes as u64), len)
    }

    /// The bytes of a segment of this thread's buffers, to be read or written while no bio with that segment is out.
    /// For other registered buffers see [`RegisteredBuffer::span`].
    ///
    /// # Panics
    /// If there is no such buffer.
    pub fn data(&self, segment: Segment) -> Span<'_> {
        self.buffers.span(segment).expect("a segment of one of the thread's buffers")
    }

    /// How many more bios may be submitted before one comes back.
    pub fn room(&self) -> usize {
        self.way.room()
    }

    /// Bios submitted and not given back.
    pub fn in_flight(&self) -> usize {
        self.way.in_flight()
    }

    /// Accepts a bio, which the disk sees with [`Submitter::ring`] or [`Submitter::wait`]: bios submitted until then
    /// merge, and go to the device as one batch. It always comes back through [`Submitter::poll`] or
    /// [`Submitter::wait`], with its status.
    ///
    /// # Panics
    /// Without [room](Submitter::room).
    pub fn submit(&mut self, bio: Box<Bio>) {
        self.way.submit(bio);
    }

    /// Dispatches submitted bios to the device.
    pub fn ring(&mut self) {
        let Submitter { way, clock, .. } = self;
        way.ring(&|| clock.now_ns());
    }

    /// Returns completed bios, without waiting, and their number. If `sink` panics, those behind are dropped.
    pub fn poll(&mut self, mut sink: impl FnMut(Box<Bio>)) -> usize {
        let Submitter { way, clock, .. } = self;
        way.poll(&|| clock.now_ns(), &mut sink)
    }

    /// Dispatches submitted bios, and sleeps until at least one bio completes. Returns the number of completed bios: 0
    /// only if none is in flight.
    pub fn wait(&mut self, mut sink: impl FnMut(Box<Bio>)) -> usize {
        let Submitter { way, clock, .. } = self;
        way.wait(&|| clock.now_ns(), &mut sink)
    }
}

/// Makes queues of a device for threads that share them, each with a ring of system calls that changes owners. All have
/// one table of memory.
#[derive(Debug)]
pub struct Queues<R> {
    /// The device.
    pub device: R,
    /// Its description.
    pub info: Arc<DeviceInfo>,
    /// All memory that bios name.
    pub memory: Arc<RegionTable>,
    /// Registered buffers in that memory.
    pub buffers: Vec<Arc<RegisteredBuffer>>,
    /// Whether private memory is registered with the kernel.
    pub registers_memory: bool,
    /// Bios that a thread may have out.
    pub bios: usize,
    /// Requests that these are cut into.
    pub tags: usize,
    /// Scheduler of each queue.
    pub scheduler: SchedulerConfig,
    /// Rate limits of all queues together.
    pub rates: Vec<Arc<RateLimit>>,
}

impl<R: Deref<Target = Device>> QueueFactory for Queues<R> {
    type Driver = DeviceQueue;
    type Cx = Ring;
    type Error = DiskError;

    fn queue(
        &mut self,
        kind: QueueKind,
        _number: usize,
        threads: usize,
    ) -> Result<(HwQueue<DeviceQueue>, Ring), DiskError> {
        let registers_memory = self.registers_memory;
        let ring = Ring::new(RingConfig { registers_memory, single_owner: false, ..RingConfig::default() });
        let mut ring = ring.map_err(|source| DiskError::Ring { name: self.info.name.clone(), source })?;
        let depth = queue_depth(&self.device, self.scheduler, self.tags * threads);
        let config = HwQueueConfig {
            depth,
            bios_max: self.bios * threads,
            scheduler: self.scheduler,
            ..HwQueueConfig::default()
        };
        let mut hw = HwQueue::new(self.device.queue(kind, depth)?, Arc::clone(&self.info), config);
        hw.set_memory(&mut ring, Arc::clone(&self.memory));
        self.buffers.iter().for_each(|buffer| _ = hw.add_buffer(&mut ring, buffer));
        hw.set_rates(0, self.rates.clone());
        Ok((hw, ring))
    }

    fn parker(&mut self, beside: &[&Ring]) -> Result<Arc<dyn Parker>, DiskError> {
        let parker = RingParker::beside(beside);
        Ok(parker.map_err(|source| DiskError::Parker { name: self.info.name.clone(), source })?)
    }
}

/// Tags for a queue that wants so many. With a scheduler no more than a device is served with, so that there is
/// something to order.
pub fn queue_depth(device: &Device, scheduler: SchedulerConfig, wanted: usize) -> usize {
    let is_ordered = scheduler != SchedulerConfig::None;
    let depth_max = if is_ordered { HwQueueConfig::default().depth } else { TagSet::DEPTH_MAX };
    wanted.min(depth_max).min(device.depth_max())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use blkyard_mq::{Op, SECTOR_BYTES, Status};

    use super::*;

    const BLOCK: u32 = 4096;

    fn small(threads: usize) -> DiskConfig {
        DiskConfig { threads, depth: 4, buffer_bytes: BLOCK as usize, queues: QueueCounts::only(2) }
    }

    /// Each thread's own block.
    fn block(queue: &Submitter, op: Op) -> Box<Bio> {
        let mut bio = Bio::with_capacity(1);
        bio.op = op;
        bio.sectors = BLOCK / SECTOR_BYTES as u32;
        bio.sector = queue.number() as u64 * u64::from(bio.sectors);
        bio.segments.push(queue.buffer(0, BLOCK as usize));
        bio
    }

    #[test]
    fn a_buffer_is_registered_once_for_several_disks() {
        let region = Region::shared(1 << 20).unwrap();
        let buffer = RegisteredBuffer::new(&region, 4096, 65536, BufferAccess::ReadWrite).unwrap();
        let source = RegisteredBuffer::new(&region, 131_072, 4096, BufferAccess::ReadOnly).unwrap();
        region.span(131_072, 4096).unwrap().fill(9);
        let buffers = [Arc::clone(&buffer), Arc::clone(&source)];
        for name in ["ram:1M", "null:1M"] {
            let mut disk = Disk::with_buffers(name, small(1), &buffers).unwrap();
            let statuses = disk.run(|queue| {
                let mut one = |op, segment: Segment| {
                    let mut bio = Bio::with_capacity(1);
                    (bio.op, bio.sectors) = (op, segment.len / SECTOR_BYTES as u32);
                    bio.segments.push(segment);
                    queue.submit(bio);
                    let mut status = Status::default();
                    queue.wait(|bio| status = bio.status);
                    status
                };
                [
                    one(Op::Write, source.segment(0, 4096)),
                    one(Op::Read, buffer.segment(8192, 4096)),
                    one(Op::Read, source.segment(0, 4096)),
                ]
            });
            assert_eq!(statuses, [[Status::Ok, Status::Ok, Status::Invalid]]);
        }
        let mut bytes = [0; 4096];
        region.span(12288, 4096).unwrap().copy_to_slice(&mut bytes);
        assert_eq!(bytes, [9; 4096]);
        assert_eq!(Arc::strong_count(&buffer), 2, "the disks have let go of it");
    }

    /// A bio with its data in one segment.
    fn bio_of(op: Op, sector: u64, segment: Segment) -> Box<Bio> {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.sector, bio.sectors) = (op, sector, segment.len / SECTOR_BYTES as u32);
        bio.segments.push(segment);
        bio
    }

    fn one(queue: &mut Submitter, bio: Box<Bio>) -> Status {
        queue.submit(bio);
        let mut status = Status::default();
        queue.wait(|bio| status = bio.status);
        status
    }

    #[test]
    fn one_registration_serves_disks_of_different_kinds_that_are_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let region = Region::shared(1 << 20).unwrap();
        let buffer = RegisteredBuffer::new(&region, 4096, 65536, BufferAccess::ReadWrite).unwrap();
        let names = [file.path().to_str().unwrap(), "ram:1M", "chaos:1M?latency_us=10", "model:flash?size=1M"];
        let mut disks = names.map(|name| Disk::open(name, small(2)).unwrap());
        disks.iter().for_each(|disk| disk.buffers().register(&buffer));
        for (byte, disk) in (1..).zip(&mut disks) {
            let name = disk.info().name.clone();
            let statuses = disk.run(|queue| {
                if queue.number() > 0 {
                    return [Status::Ok; 2];
                }
                buffer.span(buffer.segment(0, 8192)).unwrap().fill(byte);
                let wrote = one(queue, bio_of(Op::Write, 8, buffer.segment(512, 4096)));
                buffer.span(buffer.segment(0, 8192)).unwrap().fill(0);
                [wrote, one(queue, bio_of(Op::Read, 8, buffer.segment(4096, 4096)))]
            });
            assert_eq!(statuses, [[Status::Ok; 2]; 2], "{name}");
            let mut bytes = [0; 4096];
            buffer.span(buffer.segment(4096, 4096)).unwrap().copy_to_slice(&mut bytes);
            assert_eq!(bytes, [byte; 4096], "{name}");
        }
        // Queues that are made later know it, too.
        for disk in &mut disks {
            disk.queues().set(QueueCounts::only(1)).unwrap();
            let statuses = disk.run(|queue| one(queue, bio_of(Op::Read, 8, buffer.segment(0, 4096))));
            assert_eq!(statuses, [Status::Ok; 2]);
            disk.buffers().unregister(&buffer);
            let statuses = disk.run(|queue| one(queue, bio_of(Op::Read, 8, buffer.segment(0, 4096))));
            assert_eq!(statuses, [Status::Invalid; 2], "a stale cookie is refused");
        }
        assert_eq!((Arc::strong_count(&buffer), Arc::strong_count(&region)), (1, 2), "the disks have let go of both");
    }

    struct SetAtEnd<'a>(&'a AtomicBool);

    impl Drop for SetAtEnd<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    #[test]
    fn unregistering_drains_and_leaves_other_io_alone() {
        for name in ["ram:1M?latency_us=3000", "chaos:1M?latency_us=3000"] {
            let mut disk = Disk::open(name, small(2)).unwrap();
            let buffers = disk.buffers();
            let region = Region::shared(1 << 20).unwrap();
            let over = AtomicBool::new(false);
            let ended = disk.run(|queue| {
                let mut statuses = Vec::new();
                if queue.number() == 1 {
                    while !over.load(Relaxed) {
                        let bio = block(queue, Op::Read);
                        statuses.push(one(queue, bio));
                    }
                    return statuses;
                }
                // Also when this thread panics.
                let _over = SetAtEnd(&over);
                for _ in 0..20 {
                    let buffer = RegisteredBuffer::new(&region, 0, 65536, BufferAccess::ReadWrite).unwrap();
                    buffers.register(&buffer);
                    for at in 0..4 {
                        queue.submit(bio_of(Op::Read, at * 8, buffer.segment(at * 8192, 4096)));
                    }
                    queue.ring();
                    // With this thread's own I/O in flight, which nobody else reaps for it.
                    buffers.unregister(&buffer);
                    assert_eq!(Arc::strong_count(&buffer), 1, "no queue has it");
                    while queue.wait(|bio| statuses.push(bio.status)) > 0 {}
                    assert_eq!(one(queue, bio_of(Op::Read, 0, buffer.segment(0, 4096))), Status::Invalid);
                }
                statuses
            });
            assert_eq!(ended[0].len(), 80, "{name}");
            // Those that waited for the device may be refused. Those that it had are not.
            assert!(ended[0].iter().all(|status| matches!(status, Status::Ok | Status::Invalid)), "{name}");
            assert!(ended[0].iter().filter(|status| status.is_ok()).count() >= 20, "{name}: {:?}", ended[0]);
            assert!(ended[1].iter().all(|status| status.is_ok()), "{name}: I/O in other memory goes on");
            assert_eq!(Arc::strong_count(&region), 1);
        }
    }

    #[test]
    fn what_each_thread_wrote_is_there_in_the_next_run_on_every_kind_of_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        for name in [file.path().to_str().unwrap(), "ram:1M", "chaos:1M?latency_us=10", "model:flash?size=1M"] {
            let mut disk = Disk::open(name, small(3)).unwrap();
            let wrote = disk.run(|queue| {
                let bio = block(queue, Op::Write);
                queue.data(bio.segments[0]).fill(b'a' + queue.number() as u8);
                queue.submit(bio);
                let mut status = None;
                while queue.poll(|bio| status = Some(bio.status)) == 0 {
                    queue.ring();
                }
                status
            });
            assert_eq!(wrote, [Some(Status::Ok); 3], "{name}");
            let read = disk.run(|queue| {
                let bio = block(queue, Op::Read);
                let buffer = bio.segments[0];
                queue.data(buffer).fill(0);
                queue.submit(bio);
                queue.wait(|bio| assert_eq!(bio.status, Status::Ok));
                let mut bytes = [0; BLOCK as usize];
                queue.data(buffer).copy_to_slice(&mut bytes);
                bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
            });
            assert_eq!(read, [Some(b'a'), Some(b'b'), Some(b'c')], "{name}");
        }
    }

    #[test]
    fn what_a_thread_leaves_in_flight_is_waited_for() {
        let mut disk = Disk::open("null:1M?latency_us=20000", small(2)).unwrap();
        disk.run(|queue| {
            let bio = block(queue, Op::Read);
            queue.submit(bio);
            queue.ring();
        });
        assert_eq!(disk.run(|queue| queue.in_flight()), [0, 0]);
    }

    #[test]
    fn a_thread_that_panics_holds_up_no_other_and_its_panic_is_passed_on() {
        let mut disk = Disk::open("null:1M?latency_us=2000", small(2)).unwrap();
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            disk.run(|queue| {
                let bio = block(queue, Op::Read);
                queue.submit(bio);
                queue.ring();
                assert_eq!(queue.number(), 0, "as it should");
            })
        }));
        assert!(run.is_err());
        assert_eq!(disk.run(|queue| queue.in_flight()), [0, 0], "and the disk can be used again");
    }

    #[test]
    fn queues_can_be_more_or_fewer_while_threads_run_and_never_more_than_threads() {
        let mut disk = Disk::open("ram:1M", small(3)).unwrap();
        let queues = disk.queues();
        assert_eq!(queues.counts(), QueueCounts::only(2));
        let changing = AtomicBool::new(true);
        let done = disk.run(|queue| {
            if queue.number() == 0 {
                let set = |count| queues.set(QueueCounts::only(count)).unwrap();
                (0..20)
                    .for_each(|round| assert_eq!(set([9, 1, 2][round % 3]), QueueCounts::only([3, 1, 2][round % 3])));
                changing.store(false, Relaxed);
            }
            let mut done = 0;
            while changing.load(Relaxed) || done == 0 {
                queue.submit(block(queue, Op::Read));
                done += queue.wait(|bio| assert_eq!(bio.status, Status::Ok));
            }
            done
        });
        assert!(done.iter().all(|done| *done > 0), "{done:?}");
    }

    #[test]
    fn buffers_that_cannot_be_are_errors_and_none_at_all_are_fine() {
        let huge = DiskConfig { buffer_bytes: usize::MAX / 2, ..small(1) };
        let error = Disk::open("null:1M", huge).unwrap_err().to_string();
        assert!(error.contains("null:1M") && error.contains("lower `depth` or `buffer_bytes`"), "{error}");
        let mut disk = Disk::open("ram:1M", DiskConfig { buffer_bytes: 0, ..small(1) }).unwrap();
        let flushed = disk.run(|queue| {
            let mut bio = Bio::with_capacity(0);
            bio.op = Op::Flush;
            queue.submit(bio);
            let mut status = None;
            queue.wait(|bio| status = Some(bio.status));
            status
        });
        assert_eq!(flushed, [Some(Status::Ok)]);
    }

    #[test]
    fn a_buffer_that_is_not_there_is_in_no_memory() {
        let mut disk = Disk::open("ram:1M", small(1)).unwrap();
        disk.run(|queue| {
            let mut bio = block(queue, Op::Write);
            for buffer in [4, 1 << 52, usize::MAX] {
                // As it is, in two pieces, and as one of several requests.
                let all = queue.buffer(buffer, BLOCK as usize);
                let half = Segment { len: BLOCK / 2, ..all };
                let (first, rest) = (vec![all], vec![half, Segment { offset: all.offset.wrapping_add(2048), ..half }]);
                for segments in [first, rest, vec![queue.buffer(0, BLOCK as usize), all]] {
                    bio.sectors = segments.iter().map(|segment| segment.len).sum::<u32>() / SECTOR_BYTES as u32;
                    bio.segments = segments;
                    queue.submit(bio);
                    let mut back = None;
                    queue.wait(|bio| back = Some(bio));
                    bio = back.unwrap();
                    assert_eq!(bio.status, Status::Invalid, "buffer {buffer}: {:?}", bio.segments);
                }
            }
        });
    }

    #[test]
    fn queues_of_all_kinds_together_are_no_more_than_the_device_has() {
        let all = QueueCounts { default: 4, read: 2, poll: 2 };
        assert_eq!(fitting(all, usize::MAX), all);
        for (queues_max, [default, read, poll]) in [(8, [4, 2, 2]), (7, [4, 2, 1]), (5, [4, 1, 0]), (3, [3, 0, 0])] {
            assert_eq!(fitting(all, queues_max), QueueCounts { default, read, poll }, "of {queues_max}");
        }
    }

    #[test]
    fn names_take_the_options_they_take_elsewhere_and_errors_name_the_device() {
        for (name, word) in [
            ("ram:1M?scheduler=fare", "scheduler"),
            ("ram:1M?burst_ms=5", "burst_ms"),
            ("/no/such/disk.img", "/no/such/disk.img"),
            ("ram:1M?nothing=1", "nothing"),
        ] {
            let error = Disk::open(name, small(1)).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let none = DiskConfig { queues: QueueCounts::only(0), ..small(1) };
        let error = Disk::open("ram:1M", none).unwrap_err().to_string();
        assert!(error.contains("at least 1"), "{error}");
    }
}
