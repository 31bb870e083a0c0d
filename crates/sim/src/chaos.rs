//! The chaos device: a disk in memory that does, at random, all that a device or a driver may do, and some things that
//! no device should.
//!
//! For tests of the layers above. It completes in any order, at once or late, and moves data at the start or the end of
//! a request. It takes only a part of a batch, takes requests and puts them back, requeues them, fails them, and loses
//! some until they time out. Behind its ids it completes requests a second time, and ids that never existed: both must
//! be refused, and are counted ([`ChaosCounts`]). With a volatile cache it also reports the data that a power failure
//! would leave ([`ChaosDevice::read_stable`]).
//!
//! All is drawn from a seed and from the time arguments: the same calls give the same events. After construction
//! nothing here allocates. A test can read the events in order ([`ChaosDevice::take_events`]) and judge them.
//!
//! Its queues share the store and the events, under a lock: it is not a device to measure with.

mod queue;
mod store;

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mq::{BioFlags, BlockDevice, DeviceInfo, Op, Request, Status};

pub use self::queue::ChaosQueue;
use self::store::Store;

/// Events kept until they are read; the oldest are dropped first. More than the deepest queue makes in one round.
const EVENTS_MAX: usize = 4096;

/// How a chaos device behaves. Each `_every` is the mean distance between two such events, counted in occasions: one
/// for each request, unless it says otherwise. Zero is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChaosConfig {
    /// Where all chance comes from.
    pub seed: u64,
    /// Requests that one queue of the device takes at one time.
    pub ring: usize,
    /// Longest time from start to completion; each request draws its own.
    pub delay_ns_max: u64,
    /// Completes on the spot.
    pub instant_every: u32,
    /// Leaves the rest of the batch with the core, for any [`Shortage`](blkyard_mq::Shortage).
    pub refuse_every: u32,
    /// Takes a request, takes others after it, and puts it back.
    pub put_back_every: u32,
    /// Hands a request back instead of completing it.
    pub requeue_every: u32,
    /// Completes with an error; data may have moved, wholly or not at all.
    pub fail_every: u32,
    /// Does not complete before the driver is asked about it, if then. The queue must have a timeout.
    pub lose_every: u32,
    /// Repeats a completion.
    pub repeat_every: u32,
    /// Completes an id that is not in flight; one occasion a poll.
    pub forge_every: u32,
}

impl ChaosConfig {
    /// No faults: in order, at once.
    pub fn quiet(seed: u64) -> ChaosConfig {
        ChaosConfig {
            seed,
            ring: usize::MAX,
            delay_ns_max: 0,
            instant_every: 1,
            refuse_every: 0,
            put_back_every: 0,
            requeue_every: 0,
            fail_every: 0,
            lose_every: 0,
            repeat_every: 0,
            forge_every: 0,
        }
    }

    /// Everything now and then, except failed and lost requests: the layer above sees a disk without errors.
    pub fn wild(seed: u64) -> ChaosConfig {
        ChaosConfig {
            delay_ns_max: 1_000_000,
            instant_every: 8,
            refuse_every: 16,
            put_back_every: 16,
            requeue_every: 16,
            repeat_every: 8,
            forge_every: 4,
            ..ChaosConfig::quiet(seed)
        }
    }
}

/// Something that a chaos device did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChaosEvent {
    /// Time, as passed to the driver.
    pub now_ns: u64,
    /// Kind of event.
    pub step: ChaosStep,
    /// Tag of the request.
    pub tag: usize,
    /// Operation.
    pub op: Op,
    /// How.
    pub flags: BioFlags,
    /// Which namespace it is for.
    pub namespace: u16,
    /// First sector.
    pub sector: u64,
    /// Length in sectors of 512 bytes.
    pub sectors: u32,
}

/// Event of a request at a chaos device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChaosStep {
    /// Began it.
    Taken,
    /// Requeued.
    Requeued,
    /// Completed it.
    Ended(Status),
}

/// Completions that no device should send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChaosCounts {
    /// How many were sent.
    pub sent: u64,
    /// How many were refused. All, or an id was good that should not have been.
    pub refused: u64,
}

/// A disk in memory that means ill.
#[derive(Clone, Debug)]
pub struct ChaosDevice {
    infos: Arc<[Arc<DeviceInfo>]>,
    config: ChaosConfig,
    shared: Arc<Shared>,
}

/// State shared by the queues of a device.
#[derive(Debug)]
struct Shared {
    store: Store,
    story: Mutex<Story>,
}

#[derive(Debug)]
struct Story {
    events: VecDeque<ChaosEvent>,
    counts: ChaosCounts,
    /// Queues opened so far: each has a separate random sequence.
    queues: u64,
}

impl ChaosDevice {
    /// A disk with a namespace for each of `infos`, all zeroes. Memory is taken as it is written.
    ///
    /// # Errors
    /// The address space has no room for it.
    ///
    /// # Panics
    /// If there is no namespace.
    pub fn new(infos: Vec<Arc<DeviceInfo>>, config: ChaosConfig) -> io::Result<ChaosDevice> {
        assert!(!infos.is_empty(), "a device of no namespace");
        let store = Store::new(&infos)?;
        let story = Story { events: VecDeque::with_capacity(EVENTS_MAX), counts: ChaosCounts::default(), queues: 0 };
        Ok(ChaosDevice { infos: infos.into(), config, shared: Arc::new(Shared { store, story: Mutex::new(story) }) })
    }

    /// Properties of its namespaces, by number.
    pub fn infos(&self) -> &[Arc<DeviceInfo>] {
        &self.infos
    }

    /// How it behaves.
    pub fn config(&self) -> &ChaosConfig {
        &self.config
    }

    /// Appends the events since the last call.
    pub fn take_events(&self, to: &mut Vec<ChaosEvent>) {
        to.extend(self.shared.story().events.drain(..));
    }

    /// The completions so far that no device should send.
    pub fn counts(&self) -> ChaosCounts {
        self.shared.story().counts
    }

    /// Reads one sector as the device would answer now, past its queues.
    ///
    /// # Panics
    /// If there is no such sector.
    pub fn read(&self, namespace: u16, sector: u64, to: &mut [u8; 512]) {
        self.shared.store.read(namespace, sector, false, to);
    }

    /// Reads one sector as it would be after a power failure now.
    ///
    /// # Panics
    /// If there is no such sector.
    pub fn read_stable(&self, namespace: u16, sector: u64, to: &mut [u8; 512]) {
        self.shared.store.read(namespace, sector, true, to);
    }
}

impl BlockDevice for ChaosDevice {
    type Queue = ChaosQueue;

    fn info(&self) -> &DeviceInfo {
        &self.infos[0]
    }

    fn queue(&self, depth: usize) -> ChaosQueue {
        let number = {
            let mut story = self.shared.story();
            story.queues += 1;
            story.queues
        };
        ChaosQueue::new(Arc::clone(&self.shared), self.config, number, depth)
    }
}

impl Shared {
    fn story(&self) -> MutexGuard<'_, Story> {
        self.story.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Story {
    fn tell(&mut self, now_ns: u64, step: ChaosStep, tag: usize, request: &Request) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(ChaosEvent {
            now_ns,
            step,
            tag,
            op: request.op(),
            flags: request.flags(),
            namespace: request.namespace(),
            sector: request.sector(),
            sectors: request.sectors(),
        });
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mem::{Region, RegionTable, Segment};
    use blkyard_mq::{Bio, HwQueue, HwQueueConfig};

    use super::*;

    const SECTORS: u64 = 64;

    struct Bench {
        device: ChaosDevice,
        queue: HwQueue<ChaosQueue>,
        memory: Arc<Region>,
        now_ns: u64,
    }

    impl Bench {
        fn new(config: ChaosConfig) -> Bench {
            let info = DeviceInfo { capacity_sectors: SECTORS, volatile_cache: true, ..DeviceInfo::default() };
            let device = ChaosDevice::new(vec![Arc::new(info)], config).unwrap();
            let hw = HwQueueConfig { depth: 8, bios_max: 64, timeout_ns: 5_000_000, ..HwQueueConfig::default() };
            let mut queue = HwQueue::new(device.queue(8), Arc::clone(&device.infos()[0]), hw);
            let memory = Region::anonymous(SECTORS as usize * 512).unwrap();
            queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&memory)])));
            Bench { device, queue, memory, now_ns: 0 }
        }

        fn submit(&mut self, op: Op, sector: u64) {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.sector, bio.flags) = (op, sector, BioFlags::NO_MERGE);
            if op != Op::Flush {
                bio.sectors = 1;
                bio.segments.push(Segment { region: 0, offset: sector * 512, len: 512 });
            }
            self.queue.submit(bio);
        }

        /// Runs until no bio is left; returns the failed ones.
        fn drain(&mut self) -> usize {
            let mut failed = 0;
            for _ in 0..100_000 {
                self.now_ns += 10_000;
                self.queue.reap(&mut (), self.now_ns, &mut |bio| failed += usize::from(!bio.status.is_ok()));
                self.queue.issue(&mut (), self.now_ns);
                if self.queue.is_idle() {
                    return failed;
                }
            }
            panic!("the queue does not come to rest: {:?}", self.queue.snapshot(self.now_ns));
        }

        fn write_all(&mut self, byte: u8) -> usize {
            self.memory.span(0, self.memory.len()).unwrap().fill(byte);
            (0..SECTORS).for_each(|sector| self.submit(Op::Write, sector));
            self.drain()
        }

        fn bytes(&self, stable: bool) -> Vec<u8> {
            let byte = |sector| {
                let mut bytes = [0; 512];
                let read = if stable { ChaosDevice::read_stable } else { ChaosDevice::read };
                read(&self.device, 0, sector, &mut bytes);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {sector} is torn");
                bytes[0]
            };
            (0..SECTORS).map(byte).collect()
        }
    }

    #[test]
    fn the_same_seed_makes_the_same_story_and_another_makes_another() {
        let story = |seed| {
            let mut bench = Bench::new(ChaosConfig { fail_every: 9, lose_every: 9, ..ChaosConfig::wild(seed) });
            bench.write_all(1);
            let mut events = Vec::new();
            bench.device.take_events(&mut events);
            (events, bench.device.counts())
        };
        assert!(story(1) == story(1) && story(1) != story(2));
    }

    #[test]
    fn the_queues_of_a_device_have_chances_of_their_own() {
        let bench = Bench::new(ChaosConfig::wild(1));
        let mut queues = [bench.device.queue(1), bench.device.queue(1)];
        let [one, two] = queues.each_mut().map(|queue| (0..8).map(|_| queue.shortage()).collect::<Vec<_>>());
        assert_ne!(one, two);
    }

    #[test]
    fn a_power_failure_leaves_what_was_flushed_and_what_was_written_over_since() {
        for seed in 0..20 {
            let mut bench = Bench::new(ChaosConfig::wild(seed));
            assert_eq!((bench.write_all(1), bench.bytes(false)[7], bench.bytes(true)), (0, 1, vec![0; 64]));
            bench.submit(Op::Flush, 0);
            assert_eq!((bench.drain(), bench.bytes(true)), (0, vec![1; 64]));
            assert_eq!((bench.write_all(2), bench.bytes(false), bench.bytes(true)), (0, vec![2; 64], vec![1; 64]));
            assert_eq!((bench.write_all(3), bench.bytes(true)), (0, vec![2; 64]));
        }
    }

    #[test]
    fn what_no_device_should_send_is_refused_and_counted() {
        let config = ChaosConfig { lose_every: 4, repeat_every: 2, forge_every: 1, ..ChaosConfig::wild(3) };
        let mut bench = Bench::new(config);
        (1..9).for_each(|byte| {
            bench.write_all(byte);
        });
        let counts = bench.device.counts();
        assert!(counts.sent > 200 && counts.sent == counts.refused, "{counts:?}");
    }

    #[test]
    fn every_kind_of_trouble_comes_to_pass() {
        let config = ChaosConfig { ring: 3, fail_every: 9, lose_every: 9, ..ChaosConfig::wild(5) };
        let mut bench = Bench::new(config);
        let failed: usize = (1..9).map(|byte| bench.write_all(byte)).sum();
        let mut events = Vec::new();
        bench.device.take_events(&mut events);
        let all: Vec<ChaosStep> = events.iter().map(|event| event.step).collect();
        for step in [ChaosStep::Taken, ChaosStep::Requeued] {
            assert!(all.contains(&step), "{step:?}");
        }
        for status in [Status::Ok, Status::Io, Status::Medium, Status::Timeout] {
            assert!(all.contains(&ChaosStep::Ended(status)), "{status}");
        }
        let bad = all.iter().filter(|step| matches!(step, ChaosStep::Ended(status) if !status.is_ok())).count();
        assert_eq!(bad, failed);
        let ended: Vec<u64> =
            events.iter().filter(|e| matches!(e.step, ChaosStep::Ended(_))).map(|e| e.sector).collect();
        assert_eq!(ended.len(), 8 * 64);
        assert!(!ended.is_sorted_by_key(|sector| sector % SECTORS), "out of order");
    }
}
