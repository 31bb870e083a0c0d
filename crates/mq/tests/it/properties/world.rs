//! A hardware queue over a chaos device, driven through a plan, and everything that happens, in order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use blkyard_mq::{
    Batch, Bio, BioFlags, BlockDevice, Budget, Context, DeadlineConfig, DeviceInfo, Done, Driver, FairConfig,
    FairDevice, HwQueue, HwQueueConfig, HwSnapshot, KyberConfig, Merging, Op, Priority, QueueLimits, RateConfig,
    RateLimit, Region, RegionTable, SchedulerConfig, Segment, SliceKey, SliceOrder, Status, TimedOut, TimesliceConfig,
    Wake,
};
use blkyard_sim::{ChaosConfig, ChaosDevice, ChaosEvent, ChaosQueue};
use proptest::prelude::*;

use super::content::{Content, word};

/// Sectors of a namespace: few, so that bios meet.
pub const SECTORS: u64 = 160;
/// Longest bio, sectors.
const BIO_SECTORS_MAX: u64 = 40;
/// Memory that each bio has to itself: its data, torn apart.
const SLOT_BYTES: u64 = 64 * 1024;
/// Time between two turns.
const TURN_NS: u64 = 1000;
/// Turns after which a queue that is not idle never will be: losses cost a timeout each, and most of a plan may be
/// lost.
const TURNS_MAX: usize = 200_000;

/// Actions on a queue.
#[derive(Clone, Debug)]
pub enum Step {
    Submit {
        op: Op,
        flags: BioFlags,
        namespace: u16,
        sector: u64,
        sectors: u64,
        tear: u64,
    },
    Turn,
    /// Time passes.
    Pass(u64),
    Depth(usize),
    Freeze,
    Thaw,
    Quiesce,
    Unquiesce,
    /// Another scheduler from now on, in all namespaces.
    Scheduler(SchedulerConfig),
    /// All namespaces share this limit from now on.
    Rate(RateConfig),
}

/// A queue, a device, and the actions. Printed when a test fails, with its seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub chaos: ChaosConfig,
    pub config: HwQueueConfig,
    pub namespaces: usize,
    pub limits: QueueLimits,
    pub volatile_cache: bool,
    pub fua: bool,
    pub budget: Option<usize>,
    pub steps: Vec<Step>,
}

fn any_chaos() -> impl Strategy<Value = ChaosConfig> {
    let every = || prop_oneof![Just(0_u32), 2_u32..40];
    let ring = prop_oneof![Just(usize::MAX), 1_usize..8];
    let delay = prop_oneof![Just(0_u64), 1_u64..6_000_000];
    (any::<u64>(), ring, delay, (every(), every(), every(), every()), (every(), every(), every(), every())).prop_map(
        |(seed, ring, delay_ns_max, instant, wrong)| ChaosConfig {
            seed,
            ring,
            delay_ns_max,
            instant_every: instant.0,
            refuse_every: instant.1,
            put_back_every: instant.2,
            requeue_every: instant.3,
            fail_every: wrong.0,
            lose_every: wrong.1,
            repeat_every: wrong.2,
            forge_every: wrong.3,
        },
    )
}

pub fn any_limits() -> impl Strategy<Value = QueueLimits> {
    let lengths = (1_u32..5, 1_u16..5, 1_u32..5);
    let edges = (
        prop::sample::select(&[0_u32, 4095][..]),
        prop::sample::select(&[0_u32, 16][..]),
        prop::sample::select(&[512_u32, 4096][..]),
    );
    let others = (0_u32..3, 1_u16..4, 0_u32..3, 0_u32..2);
    let odd = (lengths, edges, others).prop_map(|(lengths, edges, others)| QueueLimits {
        logical_block_bytes: edges.2,
        physical_block_bytes: 4096,
        sectors_max: lengths.0 * 8,
        segments_max: lengths.1,
        segment_bytes_max: lengths.2 * 4096,
        chunk_sectors: edges.1,
        virt_boundary_mask: edges.0,
        discard_sectors_max: others.0 * 16,
        discard_granularity_bytes: 4096,
        discard_segments_max: others.1,
        write_zeroes_sectors_max: others.2 * 8,
        atomic_sectors_max: others.3 * 8,
        ..QueueLimits::default()
    });
    let plain = QueueLimits { discard_sectors_max: 64, write_zeroes_sectors_max: 64, ..QueueLimits::default() };
    prop_oneof![Just(plain), odd].prop_filter("limits that contradict each other", |limits| limits.check().is_ok())
}

fn any_flags() -> impl Strategy<Value = BioFlags> {
    prop_oneof![4 => Just(0), 1 => any::<u8>(), 2 => (0_u32..8).prop_map(|bit| 1 << bit)]
        .prop_map(BioFlags::from_bits_truncate)
}

/// Any scheduler, in a hurry: so that all its times come within a plan.
fn any_scheduler() -> impl Strategy<Value = SchedulerConfig> {
    let deadline = (0_u32..3, 0_u32..3, 1_u32..4, 0_u32..3, any::<bool>()).prop_map(
        |(expire_ms, writes_starved, fifo_batch, aging_ms, front_merges)| {
            SchedulerConfig::Deadline(DeadlineConfig {
                read_expire_ms: expire_ms,
                write_expire_ms: 2 * expire_ms,
                writes_starved,
                fifo_batch,
                prio_aging_expire_ms: aging_ms,
                front_merges,
                async_depth: writes_starved,
            })
        },
    );
    let slices = (1_u32..3000, 0_u32..5, prop::sample::select(&[0, 500, u32::MAX][..]), any::<[bool; 4]>()).prop_map(
        |(slice_us, extensions, idle_us, [queue, lowest, ticks, drain])| {
            SchedulerConfig::Timeslice(TimesliceConfig {
                slice_us,
                extensions,
                idle_us,
                tick_us: u32::from(ticks) * 100,
                key: if queue { SliceKey::Queue } else { SliceKey::Stream },
                order: if lowest { SliceOrder::Lowest } else { SliceOrder::Arrival },
                drain,
            })
        },
    );
    let kyber = (1_u32..3000, 1_u32..3000).prop_map(|(read_target_us, write_target_us)| {
        SchedulerConfig::Kyber(KyberConfig { read_target_us, write_target_us, discard_target_us: 1000 })
    });
    let kinds = vec![FairDevice::Measured, FairDevice::Seeks, FairDevice::Flat];
    let depths = prop::sample::select(&[0, 1, 24][..]);
    let fair = (1_u32..4, 0_u32..3, any::<bool>(), prop::sample::select(kinds), depths).prop_map(
        |(slice_ms, idle_ms, drain, device, in_flight_kib)| {
            let target_ms = 2 * slice_ms;
            let config =
                FairConfig { slice_ms, target_ms, idle_ms, drain, device, in_flight_kib, ..FairConfig::default() };
            SchedulerConfig::Fair(config)
        },
    );
    prop_oneof![2 => Just(SchedulerConfig::None), 1 => deadline, 1 => kyber, 1 => slices, 1 => fair]
}

/// Any limit with an effect, or none.
fn any_rate() -> impl Strategy<Value = RateConfig> {
    let rate = |from: u64, to: u64| prop_oneof![Just(0), from..to];
    (rate(500, 1_000_000), rate(1 << 20, 1 << 30), 1_u32..4).prop_map(|(iops, bytes_per_s, burst_ms)| RateConfig {
        iops,
        bytes_per_s,
        burst_ms,
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        4 => Just(Op::Write), 3 => Just(Op::Read), 1 => Just(Op::Flush), 1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes),
    ];
    // In rows, so that bios merge; else anywhere.
    let sector = prop_oneof![(0_u64..6).prop_map(|row| row * 8), 0_u64..SECTORS];
    let sectors = prop_oneof![2 => Just(8), 1 => 1_u64..=BIO_SECTORS_MAX];
    let submit = (op, any_flags(), 0_u16..4, sector, sectors, any::<u64>()).prop_map(
        |(op, flags, namespace, sector, sectors, tear)| Step::Submit { op, flags, namespace, sector, sectors, tear },
    );
    prop_oneof![
        60 => submit,
        30 => Just(Step::Turn),
        4 => (0_u64..5_000_000).prop_map(Step::Pass),
        2 => (1_usize..40).prop_map(Step::Depth),
        1 => Just(Step::Freeze),
        3 => Just(Step::Thaw),
        1 => Just(Step::Quiesce),
        3 => Just(Step::Unquiesce),
        2 => any_scheduler().prop_map(Step::Scheduler),
        2 => any_rate().prop_map(Step::Rate),
    ]
}

pub fn any_plan() -> impl Strategy<Value = Plan> {
    let config = (
        1_usize..24,
        0_usize..3,
        1_usize..40,
        prop::sample::select(&[Merging::Off, Merging::Last, Merging::Recent][..]),
        any_scheduler(),
    );
    let cache = prop::sample::select(&[(false, false), (true, false), (true, true)][..]);
    let budget = prop_oneof![2 => Just(None), 1 => (1_usize..6).prop_map(Some)];
    let steps = proptest::collection::vec(any_step(), 1..160);
    (any_chaos(), any_limits(), config, 1_usize..4, cache, budget, steps).prop_map(
        |(chaos, limits, config, namespaces, cache, budget, steps)| Plan {
            chaos,
            config: HwQueueConfig {
                depth: config.0 + config.1,
                reserved: config.1,
                bios_max: config.2,
                merging: config.3,
                timeout_ns: 3_000_000,
                scheduler: config.4,
                ..HwQueueConfig::default()
            },
            namespaces,
            limits,
            volatile_cache: cache.0,
            fua: cache.1,
            budget,
            steps,
        },
    )
}

/// Requests taken by the device's driver and not announced.
#[derive(Clone, Debug, Default)]
pub struct Doorbell(pub Arc<Mutex<Rung>>);

#[derive(Debug, Default)]
pub struct Rung {
    /// Batches the driver was offered.
    pub batches: u64,
    /// Requests it took that are not announced.
    pub unannounced: usize,
    /// Requests it took.
    pub taken: usize,
}

impl Context for Doorbell {
    fn commit(&mut self) {
        self.0.lock().unwrap().unannounced = 0;
    }

    fn collect(&mut self) {
        // The owner may go from here, and would not be heard of.
        assert_eq!(self.0.lock().unwrap().unannounced, 0, "taken and not announced");
    }
}

/// A chaos driver that leaves its doorbell to the lane.
#[derive(Debug)]
pub struct DoorbellDriver(pub ChaosQueue);

impl Driver<Doorbell> for DoorbellDriver {
    fn queue_rqs(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, batch: &mut Batch<'_>) {
        let offered = batch.len();
        self.0.queue_rqs(eventfd, memory, batch);
        let mut rung = eventfd.0.lock().unwrap();
        rung.batches += 1;
        rung.unannounced += offered - batch.len();
        rung.taken += offered - batch.len();
    }

    fn poll(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.0.poll(eventfd, memory, done, now_ns);
    }

    fn timed_out(
        &mut self,
        eventfd: &mut Doorbell,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        self.0.timed_out(eventfd, memory, place, done, now_ns)
    }

    fn deadline_ns(&self) -> Option<u64> {
        Driver::<Doorbell>::deadline_ns(&self.0)
    }
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Entry {
    Submitted,
    Device(ChaosEvent),
    Ended(u64, Status),
    /// The queue after a round, and its room before.
    Turned(Box<HwSnapshot>, usize),
}

/// A bio as it was submitted.
#[derive(Clone, Debug)]
pub struct Submission {
    pub op: Op,
    pub flags: BioFlags,
    pub namespace: u16,
    pub sector: u64,
    pub sectors: u64,
    /// When, in entries of the log.
    pub submitted: usize,
    slot: u64,
    pieces: Vec<Segment>,
}

impl Submission {
    /// Whether a request has to do with it: one that is of a kind and lies in its range, or around it.
    pub fn is_meant(&self, event: &ChaosEvent) -> bool {
        event.namespace == self.namespace
            && event.op == self.op
            && event.sector < self.sector + self.sectors
            && self.sector < event.sector + u64::from(event.sectors)
    }
}

/// Records that the budget has slots.
#[derive(Default)]
pub struct Waker(AtomicBool);

impl Wake for Waker {
    fn wake(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub struct World {
    pub plan: Plan,
    pub queue: HwQueue<DoorbellDriver>,
    pub device: ChaosDevice,
    pub eventfd: Doorbell,
    pub log: Vec<Entry>,
    pub submissions: Vec<Submission>,
    region: Arc<Region>,
    free_slots: Vec<u64>,
    content: Content,
    woken: Arc<Waker>,
    now_ns: u64,
    frozen: u32,
    quiesced: u32,
}

pub fn infos(plan: &Plan) -> Vec<Arc<DeviceInfo>> {
    let info = |number| DeviceInfo {
        name: format!("chaos {number}"),
        capacity_sectors: SECTORS,
        limits: plan.limits,
        read_only: false,
        volatile_cache: plan.volatile_cache,
        fua: plan.fua,
        ..DeviceInfo::default()
    };
    (0..plan.namespaces).map(|number| Arc::new(info(number))).collect()
}

impl Plan {
    /// The same without a scheduler, in order of submission.
    pub fn unscheduled(mut self) -> Plan {
        self.config.scheduler = SchedulerConfig::None;
        self.steps.retain(|step| !matches!(step, Step::Scheduler(_)));
        self
    }
}

impl World {
    pub fn new(plan: &Plan) -> World {
        let plan = plan.clone();
        let infos = infos(&plan);
        let device = ChaosDevice::new(infos.clone(), plan.chaos).unwrap();
        let driver = DoorbellDriver(device.queue(plan.config.depth));
        let content = Content::new(plan.namespaces, &infos[0]);
        let mut queue = HwQueue::with_namespaces(driver, infos, plan.config);
        let slots = plan.config.bios_max as u64;
        let region = Region::anonymous((slots * SLOT_BYTES) as usize).unwrap();
        let eventfd = Doorbell::default();
        queue.set_memory(&mut eventfd.clone(), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        let woken = Arc::new(Waker::default());
        if let Some(places) = plan.budget {
            queue.set_budget(Some(Budget::new(places, 1).join(Arc::clone(&woken) as Arc<dyn Wake>).unwrap()));
        }
        World {
            plan,
            queue,
            device,
            eventfd,
            log: Vec::new(),
            submissions: Vec::new(),
            region,
            free_slots: (0..slots).collect(),
            content,
            woken,
            now_ns: 0,
            frozen: 0,
            quiesced: 0,
        }
    }

    /// Does all that is planned, then lets the queue run until it is idle.
    pub fn run(plan: &Plan) -> World {
        let mut world = World::new(plan);
        for step in plan.steps.clone() {
            world.step(&step);
        }
        world.finish();
        world
    }

    pub fn finish(&mut self) {
        (0..self.frozen).for_each(|_| self.queue.thaw());
        (0..self.quiesced).for_each(|_| self.queue.unquiesce());
        (self.frozen, self.quiesced) = (0, 0);
        self.settle();
        self.content.check_stable(&self.device);
        let counts = self.device.counts();
        assert_eq!(counts.sent, counts.refused, "a forged completion came through");
    }

    pub fn step(&mut self, step: &Step) {
        match *step {
            Step::Submit { op, flags, namespace, sector, sectors, tear } => {
                self.submit(op, flags, namespace, sector, sectors, tear);
            }
            Step::Turn => self.turn(),
            Step::Pass(ns) => self.now_ns += ns,
            Step::Depth(depth) => {
                self.queue.set_depth(depth);
            }
            Step::Freeze => {
                self.queue.freeze();
                self.frozen += 1;
            }
            Step::Thaw if self.frozen > 0 => {
                self.queue.thaw();
                self.frozen -= 1;
            }
            Step::Quiesce => {
                self.queue.quiesce();
                self.quiesced += 1;
            }
            Step::Unquiesce if self.quiesced > 0 => {
                self.queue.unquiesce();
                self.quiesced -= 1;
            }
            Step::Scheduler(config) => {
                (0..self.plan.namespaces).for_each(|namespace| self.queue.schedule(namespace as u16, config));
            }
            Step::Rate(config) => {
                let limit = RateLimit::new(config).map(Arc::new);
                for namespace in 0..self.plan.namespaces {
                    self.queue.set_rates(namespace as u16, limit.iter().cloned().collect());
                }
            }
            Step::Thaw | Step::Unquiesce => {}
        }
    }

    /// Submits a bio, unless there is no room or its sectors are another's just now.
    pub fn submit(&mut self, op: Op, flags: BioFlags, namespace: u16, sector: u64, sectors: u64, tear: u64) {
        let block = u64::from(self.plan.limits.logical_block_bytes >> 9);
        let sector = sector / block * block;
        let sectors = if op == Op::Flush { 0 } else { sectors.next_multiple_of(block).min(SECTORS - sector) };
        let meets = |submission: &&Submission| {
            submission.namespace == namespace
                && submission.sector < sector + sectors
                && sector < submission.sector + submission.sectors
        };
        let running = self.submissions.iter().filter(|submission| submission.slot != u64::MAX);
        if self.queue.room() == 0 || running.into_iter().find(meets).is_some() {
            return;
        }
        let slot = self.free_slots.pop().unwrap();
        let id = self.submissions.len() as u64;
        let mut bio = Bio::with_capacity(4);
        (bio.op, bio.flags, bio.namespace, bio.sector) = (op, flags, namespace, sector);
        (bio.sectors, bio.cookie) = (sectors as u32, id);
        (bio.stream, bio.sync) = ((tear >> 8) as u32 % 4, tear >> 16 & 1 == 1);
        bio.priority = Priority::ALL[(tear >> 24) as usize % 3];
        if op.has_data() {
            bio.segments = tear_apart(slot, sectors * 512, tear);
        }
        let data: Vec<u8> = (0..sectors * 64).flat_map(|at| word(id, sector + at / 64).to_le_bytes()).collect();
        if op == Op::Write {
            self.copy(&bio.segments, |span, at| span.copy_from_slice(&data[at..at + span.len()]));
        }
        let pieces = bio.segments.clone();
        self.log.push(Entry::Submitted);
        let submitted = self.log.len();
        self.submissions.push(Submission { op, flags, namespace, sector, sectors, submitted, slot, pieces });
        self.content.submitted(&bio);
        self.queue.submit(bio);
    }

    fn copy(&self, segments: &[Segment], mut each: impl FnMut(blkyard_mq::Span<'_>, usize)) {
        let mut at = 0;
        for segment in segments {
            let span = self.region.span(segment.offset, segment.len as usize).unwrap();
            let len = span.len();
            each(span, at);
            at += len;
        }
    }

    /// One round, as a lane has it.
    pub fn turn(&mut self) {
        self.now_ns += TURN_NS;
        let (mut eventfd, device) = (self.eventfd.clone(), self.device.clone());
        self.woken.0.store(false, Ordering::Relaxed);
        // The device's events until then, and the bio.
        let mut ended = Vec::new();
        self.queue.reap(&mut eventfd, self.now_ns, &mut |bio| {
            let mut events = Vec::new();
            device.take_events(&mut events);
            ended.push((events, bio));
        });
        for (events, bio) in ended {
            self.log.extend(events.into_iter().map(Entry::Device));
            self.end(&bio);
        }
        self.hear();
        self.queue.issue(&mut eventfd, self.now_ns);
        self.hear();
        eventfd.commit();
        let snapshot = Box::new(self.queue.snapshot(self.now_ns));
        self.log.push(Entry::Turned(snapshot, self.queue.room()));
    }

    fn hear(&mut self) {
        let mut events = Vec::new();
        self.device.take_events(&mut events);
        self.log.extend(events.into_iter().map(Entry::Device));
    }

    fn end(&mut self, bio: &Bio) {
        let id = bio.cookie;
        self.log.push(Entry::Ended(id, bio.status));
        let now = self.log.len();
        let submission = self.submissions[id as usize].clone();
        assert_ne!(submission.slot, u64::MAX, "bio {id} came back twice");
        assert_eq!(
            (bio.op, bio.flags, bio.sector),
            (submission.op, submission.flags, submission.sector),
            "bio {id} came back as another"
        );
        assert!(bio.segments == submission.pieces, "bio {id} came back as another");
        let mut data = vec![0; (submission.sectors * 512) as usize];
        if submission.op == Op::Read {
            self.copy(&submission.pieces, |span, at| span.copy_to_slice(&mut data[at..at + span.len()]));
        }
        self.content.ended(bio, &data, submission.submitted, now);
        if bio.status.is_ok() && (bio.op == Op::Flush || bio.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH)) {
            self.content.check_stable(&self.device);
        }
        self.free_slots.push(submission.slot);
        self.submissions[id as usize].slot = u64::MAX;
    }

    /// Runs until the queue is idle, but only at its request: with work, at a time it named, or when woken for slots of
    /// its budget.
    pub fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            self.turn();
            if self.queue.is_idle() {
                return;
            }
            if self.queue.has_work() || self.woken.0.load(Ordering::Relaxed) {
                continue;
            }
            let Some(due_ns) = self.queue.deadline_ns::<Doorbell>() else {
                panic!("the queue sleeps for ever with bios in it: {:?}", self.queue.snapshot(self.now_ns));
            };
            self.now_ns = self.now_ns.max(due_ns);
        }
        panic!("the queue turns for ever: {:?}", self.queue.snapshot(self.now_ns));
    }
}

/// Up to four pieces of memory in a slot, which may touch or not, and go backwards.
fn tear_apart(slot: u64, bytes: u64, tear: u64) -> Vec<Segment> {
    let count = (tear % 4 + 1).min(bytes / 512);
    let unit = [512, 4096][(tear >> 2) as usize % 2];
    let each = (bytes / count).next_multiple_of(unit);
    let gap = [0, 4096, 512][(tear >> 3) as usize % 3];
    let mut left = bytes;
    let mut pieces = Vec::new();
    let mut offset = slot * SLOT_BYTES;
    while left > 0 {
        let len = each.min(left);
        pieces.push(Segment { region: 0, offset, len: len as u32 });
        offset += len + gap;
        left -= len;
    }
    if tear >> 6 & 1 == 1 {
        // The last first in memory, but the data in order.
        let places: Vec<u64> = pieces.iter().map(|piece| piece.offset).collect();
        if pieces.iter().all(|piece| piece.len == pieces[0].len) {
            pieces.iter_mut().zip(places.into_iter().rev()).for_each(|(piece, offset)| piece.offset = offset);
        }
    }
    pieces
}
