//! The NVMe host of this project on the thread of a test, with several queues and all namespaces of its controller.

use std::collections::BTreeMap;
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

use super::PATIENCE;

pub const QUEUES: usize = 3;
/// Sectors of a bio: two pages of the buffer.
const SECTORS: u32 = 16;
pub const BIO_BYTES: u64 = SECTORS as u64 * 512;
/// Maximum number of namespaces.
pub const NAMESPACES: usize = 4;
/// Number of bios in the buffer, for each namespace.
pub const BIOS: u64 = 64;

/// The driver of one I/O queue of the host.
pub struct HostQueue {
    pub queue: IoQueue,
    /// Controller address of the buffer.
    pub base: u64,
    /// Whether a doorbell must be written by message or signalled.
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
pub struct Host {
    pub controller: HostController<VfioUserController>,
    pub queues: BTreeMap<u16, HwQueue<HostQueue>>,
    buffer: Arc<Region>,
    base: u64,
    _mapping: DmaMapping,
    began: Instant,
    pub in_flight: usize,
    /// Bios in flight of each namespace.
    pub in_flight_of: [usize; NAMESPACES],
    /// Namespace of the next bios, from 0. Each has its part of the buffer.
    pub namespace: u16,
}

impl Host {
    pub fn connect(path: &Path, has_shadow: bool) -> Host {
        Host::connect_with(path, has_shadow, true)
    }

    /// The same, with or without eventfds of doorbells.
    pub fn connect_with(path: &Path, has_shadow: bool, doorbell_eventfds: bool) -> Host {
        let config = VfioUserConfig::new(path, Arc::new(SystemClock)).unwrap();
        let transport = VfioUserController::open(&VfioUserConfig { doorbell_eventfds, ..config }).unwrap();
        let buffer = Region::shared(NAMESPACES * (BIOS * BIO_BYTES) as usize).unwrap();
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
        let mut host = Host {
            controller,
            queues,
            buffer,
            base,
            _mapping: mapping,
            began,
            in_flight: 0,
            in_flight_of: [0; NAMESPACES],
            namespace: 0,
        };
        let now_ns = host.now_ns();
        host.controller.start(now_ns);
        host.run("the controller is live", |host| host.controller.state() == ControllerState::Live);
        host
    }

    /// Offset of a bio's data in the buffer.
    fn offset(&self, number: u64) -> u64 {
        (u64::from(self.namespace) * BIOS + number % BIOS) * BIO_BYTES
    }

    pub fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64 + 1
    }

    /// Runs all parts once.
    pub fn round(&mut self) {
        let now_ns = self.now_ns();
        self.controller.advance(now_ns);
        while let Some(event) = self.controller.next_event() {
            match event {
                HostEvent::Queue(qid, command) => {
                    self.queues.get_mut(&qid).unwrap().driver_mut().queue.command(command);
                }
                HostEvent::NamespacesChanged => {
                    for (number, found) in (0..).zip(self.controller.namespaces()) {
                        let info = Arc::new(found.info.clone());
                        self.queues.values_mut().for_each(|hw| hw.set_info(number, Arc::clone(&info)));
                    }
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
                self.in_flight_of[usize::from(bio.namespace)] -= 1;
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

    pub fn run(&mut self, what: &str, holds: impl Fn(&Host) -> bool) {
        let limit = Instant::now() + PATIENCE;
        while !holds(self) {
            self.round();
            assert_eq!(self.controller.error(), None);
            assert!(Instant::now() < limit, "waited in vain: {what}; {:?}", self.controller.state());
            std::thread::yield_now();
        }
    }

    pub fn finish(&mut self) {
        self.run("all bios end", |host| host.in_flight == 0);
    }

    /// Submits bio `number`, with its part of the buffer and its range of the disk, to this queue.
    pub fn submit(&mut self, qid: u16, op: Op, number: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.namespace) = (op, BioFlags::NO_MERGE, self.namespace);
        if op != Op::Flush {
            (bio.sector, bio.sectors) = (number * u64::from(SECTORS), SECTORS);
        }
        if matches!(op, Op::Read | Op::Write) {
            bio.segments.push(Segment { region: 0, offset: self.offset(number), len: BIO_BYTES as u32 });
        }
        self.in_flight += 1;
        self.in_flight_of[usize::from(self.namespace)] += 1;
        self.queues.get_mut(&qid).unwrap().submit(bio);
    }

    /// Submits all bios, distributed over the queues from this one on.
    pub fn submit_all(&mut self, op: Op, first: u64) {
        for number in 0..BIOS {
            self.submit(1 + ((number + first) % QUEUES as u64) as u16, op, number);
        }
    }

    /// Leaves like a killed process: closes the connection with requests in flight.
    pub fn die(mut self) {
        // The drop of a queue would wait for its requests.
        std::mem::forget(std::mem::take(&mut self.queues));
    }

    pub fn fill(&self, seed: u8) {
        for number in 0..BIOS {
            self.buffer.span(self.offset(number), BIO_BYTES as usize).unwrap().copy_from_slice(&pattern(seed, number));
        }
    }

    /// Reads all written data, each bio by another queue than the write, and compares.
    pub fn verify(&mut self, seed: u8) {
        self.fill(!seed);
        self.submit_all(Op::Read, 1);
        self.finish();
        for number in 0..BIOS {
            self.compare(number, &pattern(seed, number));
        }
    }

    pub fn compare(&self, number: u64, expected: &[u8]) {
        let mut bytes = vec![0; BIO_BYTES as usize];
        self.buffer.span(self.offset(number), BIO_BYTES as usize).unwrap().copy_to_slice(&mut bytes);
        assert!(bytes == expected, "bio {number} is not what was written");
    }
}

/// Fills the buffer with bytes that differ between and within bios.
fn pattern(seed: u8, number: u64) -> Vec<u8> {
    (0..BIO_BYTES).map(|at| seed ^ (number * 131 + at / 512 * 17 + at) as u8).collect()
}
