//! An NVMe export over vfio-user, used by the NVMe host of this project: written data is read back over several queues,
//! through a reset, and after a reconnection.
#![forbid(unsafe_code)]

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use blkyard_attach::{VfioUserConfig, VfioUserController};
use blkyard_mem::{DmaMapping, Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, BioFlags, Done, Driver, HwQueue, HwQueueConfig, Op, Status, TimedOut};
use blkyard_nvme::{
    ControllerState, ControllerTransport, HostController, HostEvent, IoQueue, NvmeHostConfig, QueueDemand,
};
use blkyard_os::SystemClock;
use blkyard_sys::{PollFlags, is_ready};
use common::{AnyDevice, NvmeWorld, PATIENCE, SERIAL};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const QUEUES: usize = 3;
/// Sectors of a bio: two pages of the buffer.
const SECTORS: u32 = 16;
const BIO_BYTES: u64 = SECTORS as u64 * 512;
/// Number of bios in the buffer.
const BIOS: u64 = 64;

/// The driver of one I/O queue of the host.
struct HostQueue {
    queue: IoQueue,
    /// Controller address of the buffer.
    base: u64,
    /// Whether a doorbell must be written by message.
    is_rung: bool,
}

impl Driver<()> for HostQueue {
    fn queue_rqs(&mut self, (): &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let base = self.base;
        self.is_rung |= self.queue.queue(batch, |segment| Some(base + segment.offset));
    }

    fn poll(&mut self, (): &mut (), _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.is_rung |= self.queue.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.queue.wants_poll()
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, place: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.queue.timed_out(place as u16)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns()
    }
}

/// A host on the test's thread.
struct Host {
    controller: HostController<VfioUserController>,
    queues: BTreeMap<u16, HwQueue<HostQueue>>,
    buffer: Arc<Region>,
    base: u64,
    _mapping: DmaMapping,
    began: Instant,
    in_flight: usize,
}

impl Host {
    fn connect(path: &Path, has_shadow: bool) -> Host {
        let transport = VfioUserController::open(&VfioUserConfig::new(path, Arc::new(SystemClock)).unwrap()).unwrap();
        let buffer = Region::shared((BIOS * BIO_BYTES) as usize).unwrap();
        let mapping = transport.domain().map(vec![Arc::clone(&buffer)]);
        let base = transport.dma_addr(&buffer, 0).unwrap();
        let config = NvmeHostConfig {
            queues: QueueDemand { submitters: QUEUES as u16, write_queues: 0, poll_queues: 0 },
            ring_entries: 32,
            has_shadow,
            ..NvmeHostConfig::default()
        };
        let controller = HostController::new(transport, config);
        let (queues, began) = (BTreeMap::new(), Instant::now());
        let mut host = Host { controller, queues, buffer, base, _mapping: mapping, began, in_flight: 0 };
        let now_ns = host.now_ns();
        host.controller.start(now_ns);
        host.run("the controller is live", |host| host.controller.state() == ControllerState::Live);
        host
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64 + 1
    }

    /// Runs all parts once.
    fn round(&mut self) {
        let now_ns = self.now_ns();
        self.controller.advance(now_ns);
        while let Some(event) = self.controller.next_event() {
            match event {
                HostEvent::Queue(qid, command) => {
                    self.queues.get_mut(&qid).unwrap().driver_mut().queue.command(command);
                }
                HostEvent::NamespacesChanged => {
                    let info = Arc::new(self.controller.namespaces()[0].info.clone());
                    self.queues.values_mut().for_each(|hw| hw.set_info(0, Arc::clone(&info)));
                }
                _ => {}
            }
        }
        while let Some(queue) = self.controller.take_queue() {
            let infos = self.controller.namespaces().iter().map(|found| Arc::new(found.info.clone())).collect();
            let (qid, depth) = (queue.qid(), usize::from(queue.depth()));
            let driver = HostQueue { queue, base: self.base, is_rung: false };
            let config = HwQueueConfig { depth, bios_max: 64, ..HwQueueConfig::default() };
            let mut hw = HwQueue::with_namespaces(driver, infos, config);
            hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&self.buffer)])));
            self.queues.insert(qid, hw);
        }
        for (qid, hw) in &mut self.queues {
            hw.reap(&mut (), now_ns, &mut |bio| {
                assert_eq!(bio.status, Status::Ok, "{:?} at {}", bio.op, bio.sector);
                self.in_flight -= 1;
            });
            hw.issue(&mut (), now_ns);
            if std::mem::take(&mut hw.driver_mut().is_rung) {
                self.controller.forward_doorbells(*qid, now_ns);
            }
            if let Some(report) = hw.driver_mut().queue.take_report() {
                self.controller.queue_report(*qid, report);
            }
            assert_eq!(hw.driver_mut().queue.take_late().count(), 0, "a command is late");
        }
    }

    fn run(&mut self, what: &str, holds: impl Fn(&Host) -> bool) {
        let limit = Instant::now() + PATIENCE;
        while !holds(self) {
            self.round();
            assert_eq!(self.controller.error(), None);
            assert!(Instant::now() < limit, "waited in vain: {what}; {:?}", self.controller.state());
            std::thread::yield_now();
        }
    }

    fn finish(&mut self) {
        self.run("all bios end", |host| host.in_flight == 0);
    }

    /// Submits bio `number`, with its part of the buffer and its range of the disk, to this queue.
    fn submit(&mut self, qid: u16, op: Op, number: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags) = (op, BioFlags::NO_MERGE);
        if op != Op::Flush {
            (bio.sector, bio.sectors) = (number * u64::from(SECTORS), SECTORS);
        }
        if matches!(op, Op::Read | Op::Write) {
            bio.segments.push(Segment { region: 0, offset: number % BIOS * BIO_BYTES, len: BIO_BYTES as u32 });
        }
        self.in_flight += 1;
        self.queues.get_mut(&qid).unwrap().submit(bio);
    }

    /// Submits all bios, distributed over the queues from this one on.
    fn submit_all(&mut self, op: Op, first: u64) {
        for number in 0..BIOS {
            self.submit(1 + ((number + first) % QUEUES as u64) as u16, op, number);
        }
    }

    /// Leaves like a killed process: closes the connection with requests in flight.
    fn die(mut self) {
        // The drop of a queue would wait for its requests.
        std::mem::forget(std::mem::take(&mut self.queues));
    }

    fn fill(&self, seed: u8) {
        for number in 0..BIOS {
            self.buffer.span(number * BIO_BYTES, BIO_BYTES as usize).unwrap().copy_from_slice(&pattern(seed, number));
        }
    }

    /// Reads all written data, each bio by another queue than the write, and compares.
    fn verify(&mut self, seed: u8) {
        self.fill(!seed);
        self.submit_all(Op::Read, 1);
        self.finish();
        for number in 0..BIOS {
            self.compare(number, &pattern(seed, number));
        }
    }

    fn compare(&self, number: u64, expected: &[u8]) {
        let mut bytes = vec![0; BIO_BYTES as usize];
        self.buffer.span(number * BIO_BYTES, BIO_BYTES as usize).unwrap().copy_to_slice(&mut bytes);
        assert!(bytes == expected, "bio {number} is not what was written");
    }
}

/// Fills the buffer with bytes that differ between and within bios.
fn pattern(seed: u8, number: u64) -> Vec<u8> {
    (0..BIO_BYTES).map(|at| seed ^ (number * 131 + at / 512 * 17 + at) as u8).collect()
}

#[test]
fn what_is_written_by_one_queue_is_read_by_another() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 2);
    for (seed, has_shadow) in [(1, false), (2, true)] {
        let mut host = Host::connect(&world.path, has_shadow);
        assert_eq!(host.queues.len(), QUEUES, "one for each lane's queue");
        assert_eq!(host.controller.identify().serial[..SERIAL.len()], *SERIAL.as_bytes());
        let found = &host.controller.namespaces()[0].info;
        assert_eq!((found.capacity_sectors, found.volatile_cache), (16384, true));
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.finish();
        host.verify(seed);
        host.submit(1, Op::Flush, 0);
        host.submit(2, Op::Discard, 0);
        host.submit(3, Op::WriteZeroes, 1);
        host.finish();
        host.submit(1, Op::Read, 1);
        host.finish();
        host.compare(1, &[0; BIO_BYTES as usize]);
        assert_eq!(world.server().status().session().unwrap().io_queues, QUEUES);
    }
    world.stop();
}

#[test]
fn completions_interrupt_the_vector_of_their_queue() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let vectors = host.controller.transport().vectors();
    assert_eq!(vectors, QUEUES as u16 + 1);
    let fired = |host: &mut Host, vector| is_ready(host.controller.transport().eventfd(vector).unwrap(), PollFlags::IN);
    assert!(fired(&mut host, 0), "the admin queue's");
    for qid in 1..=QUEUES as u16 {
        assert!(!fired(&mut host, qid), "nothing was completed yet");
        host.submit(qid, Op::Read, 0);
        host.finish();
        // The completion is written before the interrupt is signalled.
        common::until("the interrupt comes", || {
            is_ready(host.controller.transport().eventfd(qid).unwrap(), PollFlags::IN)
        });
    }
    drop(host);
    world.stop();
}

#[test]
fn a_reset_under_load_loses_nothing() {
    // Slow enough for commands to be in flight.
    let world = NvmeWorld::new(&AnyDevice::ram(2_000_000), QUEUES, 2);
    let mut host = Host::connect(&world.path, true);
    for seed in 10..14 {
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.round();
        assert!(host.in_flight > 0);
        let now_ns = host.now_ns();
        assert!(host.controller.reset(now_ns));
        host.finish();
        host.run("the controller is live again", |host| host.controller.state() == ControllerState::Live);
        host.verify(seed);
    }
    drop(host);
    world.stop();
}

#[test]
fn a_host_that_leaves_under_load_comes_again() {
    let world = NvmeWorld::new(&AnyDevice::ram(2_000_000), QUEUES, 2);
    for seed in 20..23 {
        let mut host = Host::connect(&world.path, true);
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.finish();
        host.verify(seed);
        // Its memory is unmapped while the device writes to it.
        host.submit_all(Op::Read, 0);
        host.round();
        host.die();
    }
    let mut host = Host::connect(&world.path, false);
    host.verify(22);
    drop(host);
    assert_eq!(world.server().status().sessions(), 4);
    world.stop();
}

#[test]
fn memory_that_is_truncated_under_a_queue_ends_that_session_alone() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let file = memfd_create("host", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BIO_BYTES).unwrap();
    let region = Region::map_file(file.as_fd(), 0, BIO_BYTES).unwrap();
    let _mapping = host.controller.transport().domain().map(vec![Arc::clone(&region)]);
    let base = host.controller.transport().dma_addr(&region, 0).unwrap();
    ftruncate(&file, 0).unwrap();
    host.queues.get_mut(&1).unwrap().driver_mut().base = base;
    host.submit(1, Op::Write, 0);
    host.round();
    common::until("the server closes the connection", || host.controller.transport().is_closed_by_server());
    host.die();
    let mut host = Host::connect(&world.path, true);
    host.fill(1);
    host.submit_all(Op::Write, 0);
    host.finish();
    host.verify(1);
    drop(host);
    world.stop();
}

#[test]
fn a_device_that_grows_is_a_namespace_that_grows() {
    let world = NvmeWorld::new(&AnyDevice::null(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let mut info = common::disk_info();
    info.capacity_sectors *= 2;
    let changed = world.server().hand().change(Arc::new(info)).recv_timeout(PATIENCE).unwrap();
    assert_eq!(changed, Ok(blkyard_export::Changed::Told));
    host.run("the namespace grows", |host| host.controller.namespaces()[0].info.capacity_sectors == 2 * 16384);
    host.submit(1, Op::Read, 1500);
    host.finish();
    drop(host);
    world.stop();
}
