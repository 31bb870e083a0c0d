//! The rig: submitters, the real queue core with its schedulers, and one device model, in virtual time.
//!
//! All parts are real: the queues are [`HwQueue`], over the driver of `model:` devices. A queue runs when a submitter
//! has submitted to it, when the device has an event, and at the time it named; not otherwise. No CPU time is charged
//! except a submitter's think time. The same scene and submitters give the same run, bit for bit.
//!
//! A part of the study defines the submitters ([`TimesliceSubmitter`]; usually
//! [`TimesliceJob`](super::job::TimesliceJob) and [`Reader`](super::reader::Reader)) and the device
//! ([`TimesliceScene`]), and gets each submitter's results ([`SubmitterTally`]). No data moves: all bios share the same
//! few bytes of memory.

use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Op, QueueLimits, SECTOR_SHIFT, SchedulerConfig,
};
use blkyard_sim::{DiskModel, Events, Flash, FlashModel, Keeps, Model, Modelled, ModelledQueue, Rng, RotaryDisk};
use hdrhistogram::Histogram;

use super::variation::wake_delay_ns;

/// Nanoseconds in a second and in a millisecond.
pub(super) const S: u64 = 1_000_000_000;
pub(super) const MS: u64 = 1_000_000;
/// Longest request, sectors.
pub(super) const REQUEST_SECTORS_MAX: u32 = 2048;
/// A queue that has work left although it has just turned does so again after this.
const AGAIN_NS: u64 = 100;
/// Largest latency with a bucket of its own; a minute.
const LATENCY_MAX_NS: u64 = 60 * S;

/// Device and length of a run.
#[derive(Debug)]
pub(super) struct TimesliceScene {
    pub(super) info: DeviceInfo,
    pub(super) model: Model,
    /// The hardware queues, all over the same device.
    pub(super) queues: Vec<HwQueueConfig>,
    /// Seed of the submitters.
    pub(super) seed: u64,
    /// Completions from this time on are counted.
    pub(super) from_ns: u64,
    /// End of the run, if not all submitters have ended before.
    pub(super) until_ns: u64,
    /// Whether submitters learn of completions as late as threads wake: [`wake_delay_ns`].
    pub(super) wakes_late: bool,
}

impl TimesliceScene {
    /// A disk with one queue of as many tags as it takes commands.
    pub(super) fn disk(model: DiskModel, scheduler: SchedulerConfig, seed: u64) -> TimesliceScene {
        let info = DeviceInfo {
            capacity_sectors: model.sectors,
            volatile_cache: model.write_cache_sectors > 0,
            rotational: true,
            ..info("disk")
        };
        let queue = HwQueueConfig { depth: model.depth, bios_max: 4096, scheduler, ..HwQueueConfig::default() };
        let model = Model::Disk(Box::new(RotaryDisk::new(model, seed)));
        TimesliceScene { info, model, queues: vec![queue], seed, from_ns: 0, until_ns: u64::MAX, wakes_late: false }
    }

    /// Flash of so many sectors, with queues of so many tags each.
    pub(super) fn flash(model: FlashModel, queues: usize, depth: usize, scheduler: SchedulerConfig) -> TimesliceScene {
        let info = DeviceInfo { capacity_sectors: 1 << 31, volatile_cache: true, fua: true, ..info("flash") };
        let queue = HwQueueConfig { depth, bios_max: 4096, scheduler, ..HwQueueConfig::default() };
        let model = Model::Flash(Box::new(Flash::new(model)));
        TimesliceScene {
            info,
            model,
            queues: vec![queue; queues],
            seed: 0,
            from_ns: 0,
            until_ns: u64::MAX,
            wakes_late: false,
        }
    }
}

fn info(name: &str) -> DeviceInfo {
    let limits = QueueLimits {
        physical_block_bytes: 4096,
        sectors_max: REQUEST_SECTORS_MAX,
        segments_max: 256,
        segment_bytes_max: 1 << 30,
        ..QueueLimits::default()
    };
    DeviceInfo { name: name.into(), limits, ..DeviceInfo::default() }
}

/// A request of a submitter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TimesliceRequest {
    pub(super) op: Op,
    pub(super) sector: u64,
    /// At most [`REQUEST_SECTORS_MAX`]; zero for a flush.
    pub(super) sectors: u32,
    /// Which hardware queue.
    pub(super) queue: usize,
    /// Stream, for schedulers.
    pub(super) stream: u32,
    /// Whether a write is synchronous.
    pub(super) sync: bool,
    /// The submitter's own word.
    pub(super) word: u64,
}

/// A submitter: an event-driven state machine.
pub(super) trait TimesliceSubmitter {
    /// It is the beginning (word zero), or a time has come that it asked for.
    fn wake(&mut self, word: u64, hands: &mut Hands<'_>);

    /// One of its requests has completed.
    fn ended(&mut self, request: &TimesliceRequest, hands: &mut Hands<'_>);

    /// It has all that it ever wanted. The run ends when everybody has.
    fn is_over(&self) -> bool {
        false
    }
}

/// Operations available to a submitter.
#[derive(Debug)]
pub(super) struct Hands<'a> {
    pub(super) now_ns: u64,
    pub(super) rng: &'a mut Rng,
    requests: &'a mut Vec<TimesliceRequest>,
    wakes: &'a mut Vec<(u64, u64)>,
}

impl Hands<'_> {
    /// Wants something.
    pub(super) fn submit(&mut self, request: TimesliceRequest) {
        self.requests.push(request);
    }

    /// Wants to be woken after some time, with a word.
    pub(super) fn wake_after(&mut self, delay_ns: u64, word: u64) {
        self.wakes.push((self.now_ns + delay_ns, word));
    }

    /// A random time within a fifth of this one, so that no submitter stays in step with the platter.
    pub(super) fn about(&mut self, ns: u64) -> u64 {
        ns - ns / 5 + self.rng.below(ns / 5 * 2 + 1)
    }
}

/// Results of a submitter in the counted time.
#[derive(Clone, Debug)]
pub(super) struct SubmitterTally {
    /// Completed I/Os. Those still in flight count for the latency only.
    pub(super) ios: u64,
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
    /// How long was counted.
    pub(super) span_ns: u64,
    latency: Histogram<u64>,
}

impl SubmitterTally {
    fn new() -> SubmitterTally {
        let Ok(latency) = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3) else {
            unreachable!("these bounds are good")
        };
        SubmitterTally { ios: 0, read_bytes: 0, written_bytes: 0, span_ns: 0, latency }
    }

    fn add(&mut self, request: &TimesliceRequest, took_ns: u64) {
        let bytes = u64::from(request.sectors) << SECTOR_SHIFT;
        match request.op {
            Op::Read => self.read_bytes += bytes,
            _ => self.written_bytes += bytes,
        }
        self.ios += 1;
        self.waited(took_ns);
    }

    fn waited(&mut self, ns: u64) {
        self.latency.saturating_record(ns.max(1));
    }

    /// Both directions, bytes per second.
    pub(super) fn bytes_per_s(&self) -> f64 {
        (self.read_bytes + self.written_bytes) as f64 * 1e9 / self.span_ns.max(1) as f64
    }

    pub(super) fn ios_per_s(&self) -> f64 {
        self.ios as f64 * 1e9 / self.span_ns.max(1) as f64
    }

    /// Latency percentile, ns: from the request to its end. Requests in flight at the end of the run count with their
    /// time until then. `None` without samples.
    pub(super) fn percentile_ns(&self, percent: f64) -> Option<u64> {
        (!self.latency.is_empty()).then(|| self.latency.value_at_quantile(percent / 100.0))
    }
}

struct TimesliceLane {
    queue: HwQueue<ModelledQueue>,
    /// Not to turn before this.
    from_ns: u64,
    /// Whether a submitter has submitted since its last run.
    rung: bool,
}

impl TimesliceLane {
    /// Time of its next run, without submissions.
    fn due_ns(&self) -> Option<u64> {
        if self.queue.is_idle() {
            return None;
        }
        let now = self.rung || self.queue.has_work();
        let due_ns = if now { Some(0) } else { self.queue.deadline_ns::<()>() };
        due_ns.map(|due_ns| due_ns.max(self.from_ns))
    }
}

/// A bio that is out.
#[derive(Clone, Copy)]
struct TimesliceBio {
    who: usize,
    request: TimesliceRequest,
    since_ns: u64,
}

/// Why a submitter runs.
enum Waking {
    /// A time that it asked for, with its word.
    Time(u64),
    /// One of its requests has completed.
    Ended(TimesliceRequest),
}

struct TimesliceWorld<'a, 'b> {
    submitters: &'a mut [&'b mut dyn TimesliceSubmitter],
    tallies: Vec<SubmitterTally>,
    events: Events<(usize, Waking)>,
    wakes_late: bool,
    now_ns: u64,
    lanes: Vec<TimesliceLane>,
    rng: Rng,
    /// Completions between these times are counted; after the second no more requests are made.
    from_ns: u64,
    until_ns: u64,
    /// By cookie.
    out: Vec<Option<TimesliceBio>>,
    free: Vec<u64>,
    spare: Vec<Box<Bio>>,
    // New requests of a submitter.
    requests: Vec<TimesliceRequest>,
    wakes: Vec<(u64, u64)>,
}

/// Runs submitters on a device until all have ended, or the scene has. Returns their results, in order.
///
/// # Errors
/// There is not enough memory.
///
/// # Panics
/// If no event is left though a submitter has requests, or a submitter makes an invalid request.
pub(super) fn run(
    scene: TimesliceScene,
    submitters: &mut [&mut dyn TimesliceSubmitter],
) -> io::Result<Vec<SubmitterTally>> {
    let TimesliceScene { info, model, queues, seed, from_ns, until_ns, wakes_late } = scene;
    let region = Region::anonymous((REQUEST_SECTORS_MAX as usize) << SECTOR_SHIFT)?;
    let memory = Arc::new(RegionTable::new(vec![region]));
    let device = Modelled::new(info.clone(), model, Keeps::Nothing)?;
    let info = Arc::new(info);
    let lane = |config: &HwQueueConfig| {
        let mut queue = HwQueue::new(device.queue(config.depth), Arc::clone(&info), *config);
        queue.set_memory(&mut (), Arc::clone(&memory));
        TimesliceLane { queue, from_ns: 0, rung: false }
    };
    let mut world = TimesliceWorld {
        tallies: submitters.iter().map(|_| SubmitterTally::new()).collect(),
        submitters,
        events: Events::default(),
        wakes_late,
        now_ns: 0,
        lanes: queues.iter().map(lane).collect(),
        rng: Rng::new(seed),
        from_ns,
        until_ns,
        out: Vec::new(),
        free: Vec::new(),
        spare: Vec::new(),
        requests: Vec::new(),
        wakes: Vec::new(),
    };
    world.run();
    let span_ns = world.now_ns.saturating_sub(from_ns);
    world.settle();
    let mut tallies = world.tallies;
    tallies.iter_mut().for_each(|tally| tally.span_ns = span_ns);
    Ok(tallies)
}

impl TimesliceWorld<'_, '_> {
    fn run(&mut self) {
        (0..self.submitters.len()).for_each(|who| self.events.at(0, (who, Waking::Time(0))));
        while !self.submitters.iter().all(|submitter| submitter.is_over()) {
            let next = self.next_turn();
            let lane_ns = next.map_or(u64::MAX, |(due_ns, _)| due_ns);
            let wake_ns = self.events.next_ns().unwrap_or(u64::MAX);
            let next_ns = wake_ns.min(lane_ns);
            if next_ns >= self.until_ns {
                let out = self.out.iter().flatten().count();
                assert!(next_ns < u64::MAX, "nothing will ever happen again with {out} bios out");
                self.now_ns = self.until_ns;
                return;
            }
            self.now_ns = next_ns;
            // Submitters that wake now make requests before queues run, so that concurrent requests form a plug.
            if wake_ns <= lane_ns {
                if let Some((who, why)) = self.events.advance() {
                    self.drive(who, |submitter, hands| match why {
                        Waking::Time(word) => submitter.wake(word, hands),
                        Waking::Ended(request) => submitter.ended(&request, hands),
                    });
                }
            } else if let Some((_, lane)) = next {
                self.turn(lane);
            }
        }
    }

    /// Completes all I/O in flight, which the core needs before it is dropped, and counts its latency.
    fn settle(&mut self) {
        self.until_ns = self.now_ns;
        while let Some((due_ns, lane)) = self.next_turn() {
            self.now_ns = due_ns;
            self.turn(lane);
        }
        let out = self.out.iter().flatten().count();
        assert!(out == 0, "{out} bios never come back");
    }

    /// Which queue turns next, and when.
    fn next_turn(&self) -> Option<(u64, usize)> {
        let due = |lane: usize| Some((self.lanes[lane].due_ns()?.max(self.now_ns), lane));
        (0..self.lanes.len()).filter_map(due).min()
    }

    /// One round of a queue.
    fn turn(&mut self, number: usize) {
        let now_ns = self.now_ns;
        let lane = &mut self.lanes[number];
        lane.rung = false;
        let mut over = Vec::new();
        lane.queue.reap(&mut (), now_ns, &mut |bio| over.push(bio));
        over.into_iter().for_each(|bio| self.end(bio));
        let lane = &mut self.lanes[number];
        lane.queue.issue(&mut (), now_ns);
        lane.rung = false;
        lane.from_ns = now_ns + AGAIN_NS;
    }

    fn end(&mut self, bio: Box<Bio>) {
        let out = self.out[bio.cookie as usize].take();
        let Some(TimesliceBio { who, request, since_ns }) = out else { panic!("a bio came back twice") };
        self.free.push(bio.cookie);
        assert!(bio.status.is_ok(), "{request:?} ended with {}", bio.status);
        self.spare.push(bio);
        if self.now_ns >= self.until_ns {
            return self.tallies[who].waited(self.now_ns - since_ns);
        }
        if self.now_ns >= self.from_ns {
            self.tallies[who].add(&request, self.now_ns - since_ns);
        }
        if self.wakes_late {
            let at_ns = self.now_ns + wake_delay_ns(&mut self.rng);
            return self.events.at(at_ns, (who, Waking::Ended(request)));
        }
        self.drive(who, |submitter, hands| submitter.ended(&request, hands));
    }

    /// Runs a submitter's handler, and submits its requests.
    fn drive(&mut self, who: usize, what: impl FnOnce(&mut dyn TimesliceSubmitter, &mut Hands<'_>)) {
        let TimesliceWorld { submitters, rng, requests, wakes, now_ns, .. } = self;
        what(submitters[who], &mut Hands { now_ns: *now_ns, rng, requests, wakes });
        self.wakes.drain(..).for_each(|(at_ns, word)| self.events.at(at_ns, (who, Waking::Time(word))));
        let mut requests = std::mem::take(&mut self.requests);
        requests.drain(..).for_each(|request| self.submit(who, request));
        self.requests = requests;
    }

    fn submit(&mut self, who: usize, request: TimesliceRequest) {
        let mut bio = self.spare.pop().unwrap_or_else(|| Bio::with_capacity(1));
        bio.reset();
        (bio.op, bio.sector, bio.sectors, bio.stream, bio.sync) =
            (request.op, request.sector, request.sectors, request.stream, request.sync);
        bio.cookie = self.free.pop().unwrap_or(self.out.len() as u64);
        if request.op.has_data() {
            bio.segments.push(Segment { region: 0, offset: 0, len: request.sectors << SECTOR_SHIFT });
        }
        let out = Some(TimesliceBio { who, request, since_ns: self.now_ns });
        match self.out.get_mut(bio.cookie as usize) {
            Some(place) => *place = out,
            None => self.out.push(out),
        }
        let lane = &mut self.lanes[request.queue];
        lane.queue.submit(bio);
        (lane.rung, lane.from_ns) = (true, self.now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::ts::job::TimesliceJob;
    use blkyard_mq::FairConfig;

    /// A lone reader on flash: IOPS and the largest latency.
    fn alone(seed: u64) -> (f64, u64) {
        let mut scene = TimesliceScene::flash(FlashModel::NVME_2018, 2, 64, SchedulerConfig::default());
        (scene.seed, scene.from_ns, scene.until_ns) = (seed, 10 * MS, 110 * MS);
        let mut jobs = [
            TimesliceJob::anywhere(1, 0, 1 << 30, 1),
            TimesliceJob { queue: 1, think_ns: MS, ..TimesliceJob::anywhere(2, 0, 1 << 30, 1) },
        ];
        let [one, other] = &mut jobs;
        let tallies = run(scene, &mut [one, other]).unwrap();
        assert!((60..130).contains(&tallies[1].ios), "it thinks: {}", tallies[1].ios);
        (tallies[0].ios_per_s(), tallies[0].percentile_ns(100.0).unwrap())
    }

    /// Makes one request at the start.
    struct Once(TimesliceRequest);

    impl TimesliceSubmitter for Once {
        fn wake(&mut self, _: u64, hands: &mut Hands<'_>) {
            hands.submit(self.0);
        }

        fn ended(&mut self, _: &TimesliceRequest, _: &mut Hands<'_>) {}
    }

    #[test]
    fn who_gets_nothing_until_the_end_is_not_one_who_waited_for_nothing() {
        // The device serves one request at a time, a second each; the run ends before the second one does.
        let mut queue = HwQueueConfig { depth: 1, ..HwQueueConfig::default() };
        queue.merging = blkyard_mq::Merging::Off;
        let line = blkyard_sim::LineModel { access_ns: S, bytes_per_s: 1 << 40, latency_ns: 0, jitter_ns: 0, depth: 1 };
        let scene = TimesliceScene {
            info: DeviceInfo { capacity_sectors: 1 << 20, ..info("slow") },
            model: Model::Line(blkyard_sim::FixedLatency::new(line, 1)),
            queues: vec![queue],
            seed: 1,
            from_ns: 0,
            until_ns: S + S / 2,
            wakes_late: false,
        };
        let request = TimesliceRequest { sectors: 8, ..TimesliceRequest::default() };
        let [mut first, mut second, mut never] =
            [0, 1000, 2000].map(|sector| Once(TimesliceRequest { sector, ..request }));
        let mut idle = TimesliceJob { bytes_max: 0, ..TimesliceJob::anywhere(4, 0, 1 << 10, 1) };
        let tallies = run(scene, &mut [&mut first, &mut second, &mut never, &mut idle]).unwrap();
        assert_eq!(tallies.iter().map(|tally| tally.ios).collect::<Vec<_>>(), [1, 0, 0, 0]);
        let took = |at: usize| tallies[at].percentile_ns(99.0).map(|ns| ns / MS);
        // Requests in flight count with at least the length of the run; a submitter without requests counts nothing.
        assert!(took(0) == Some(1000) && took(1) >= Some(1500) && took(2) >= Some(1500), "{tallies:?}");
        assert_eq!(took(3), None);
    }

    #[test]
    fn one_who_reads_from_flash_has_the_latency_of_its_data_sheet() {
        let (iops, longest_ns) = alone(1);
        assert!((1e9 / 60_000.0..1e9 / 55_000.0).contains(&iops), "{iops}");
        assert!((55_000..120_000).contains(&longest_ns), "{longest_ns}");
    }

    #[test]
    fn one_seed_is_one_run() {
        assert_eq!(alone(7), alone(7));
        assert_ne!(alone(7), alone(8));
    }

    #[test]
    fn a_run_ends_when_all_have_what_they_wanted() {
        let scene = TimesliceScene::disk(DiskModel::DESKTOP_2012, SchedulerConfig::Fair(FairConfig::default()), 3);
        let mut job = TimesliceJob { bytes_max: 1 << 20, ..TimesliceJob::in_a_row(1, 4096, 256, 2) };
        let tallies = run(scene, &mut [&mut job]).unwrap();
        assert_eq!((tallies[0].ios, tallies[0].read_bytes, tallies[0].written_bytes), (8, 1 << 20, 0));
        assert!((10 * MS..100 * MS).contains(&tallies[0].span_ns), "{}", tallies[0].span_ns);
    }
}
