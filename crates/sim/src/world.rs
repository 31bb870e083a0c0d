//! A seeded simulation: submitters with separate random sequences, the real queue core, a device, and an oracle that
//! judges the results.
//!
//! All parts are real: the queues are [`HwQueue`] and [`SwQueue`], over the drivers of other users. Time is the
//! calendar's. A lane turns when a submitter has submitted, when it has work left or at the time it named, and not
//! otherwise: one that forgets a wake-up stops, which is detected. Threads that share a queue take steps in a random
//! order. Power fails, queues change under load, devices inject faults, as the [options](WorldOptions) say.
//!
//! Judged are: data that is read, and data that a power failure leaves ([`Oracle`]); that each bio comes back once,
//! unchanged, without an error that was not injected; that no bio waits longer than `PATIENCE_NS`; and that the run
//! does not stop.
//!
//! The same seed and options give the same run: [`WorldResult`] has a hash of all events and times.

mod device;
mod options;
mod oracle;

use std::cell::Cell;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{
    Bio, BioFlags, DeviceInfo, HwQueue, HwQueueConfig, Op, Parker, Priority, QueueLimits, RateConfig, RateLimit,
    Status, SwQueue, Wake,
};

use self::device::{SimDevice, SimDeviceQueue};
pub use self::options::{WorldDevice, WorldOptions, WorldScheduler};
use self::oracle::{Oracle, word};
use crate::{Events, Rng};

/// Longest time that a bio may take. The slowest device here takes a second for all that a queue holds; one that loses
/// requests takes a timeout for each loss in a row.
const PATIENCE_NS: u64 = 120_000_000_000;
/// Limit of a run's events: far more than any terminating run needs.
const EVENTS_MAX: u64 = 50_000_000;
/// How long a submitter waits that found no room, and a thread before it polls again; twice that at most.
const AGAIN_NS: u64 = 50_000;

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldResult {
    /// Bios that came back, and how many of them failed.
    pub bios: u64,
    /// As above.
    pub failed: u64,
    /// Power failures.
    pub cuts: u64,
    /// Virtual time that passed.
    pub took_ns: u64,
    /// Of all that came back, how and when: the same for the same run.
    pub fingerprint: u64,
}

#[derive(Debug)]
enum WorldEvent {
    Submit(usize),
    /// Of a queue that a lane has.
    Turn(usize),
    /// Of a submitter that shares one.
    Poll(usize),
    Change,
    Cut,
}

/// How submitters reach their queue.
enum SubmitPath {
    /// The queues are lanes'.
    Lanes(Vec<SimLane>),
    /// Each submitter has its end.
    Shared(Vec<SwQueue<SimDeviceQueue, ()>>),
}

struct SimLane {
    queue: HwQueue<SimDeviceQueue>,
    /// When it turns next.
    planned_ns: u64,
    frozen: bool,
    quiesced: bool,
}

#[derive(Clone, Copy, Default)]
struct SimSubmitter {
    queue: usize,
    out: u64,
    polls: bool,
}

/// A bio that is out.
#[derive(Clone, Debug)]
struct SubmittedBio {
    submitter: usize,
    slot: u64,
    since_ns: u64,
    /// As the oracle counts.
    begun: u64,
    op: Op,
    sector: u64,
    sectors: u32,
    pieces: Vec<Segment>,
}

/// The whole.
struct World {
    options: WorldOptions,
    rng: Rng,
    events: Events<WorldEvent>,
    device: SimDevice,
    way: SubmitPath,
    submitters: Vec<SimSubmitter>,
    region: Arc<Region>,
    free_slots: Vec<u64>,
    /// By bio; `None` once it has completed.
    submitted: Vec<Option<SubmittedBio>>,
    out: u64,
    oracle: Oracle,
    outcome: WorldResult,
}

/// A limit of which little is saved up, if it is any.
fn limit(iops: u64, bytes_per_s: u64) -> Option<Arc<RateLimit>> {
    RateLimit::new(RateConfig { iops, bytes_per_s, burst_ms: 2 }).map(Arc::new)
}

/// Runs a simulation until all its bios have completed.
///
/// # Panics
/// If a check fails; says which.
pub fn run(seed: u64, options: WorldOptions) -> WorldResult {
    let mut world = World::new(seed, options);
    world.run();
    world.outcome
}

/// Threads never sleep here: they poll.
struct NoParker;

impl Wake for NoParker {
    fn wake(&self) {}
}

impl Parker for NoParker {
    fn sleep(&self) {
        panic!("a thread went to sleep with nothing in flight");
    }

    fn watch(&self, _deadline_ns: u64) {
        panic!("a thread keeps watch with nothing in flight");
    }
}

impl World {
    fn new(seed: u64, options: WorldOptions) -> World {
        let limits = QueueLimits {
            sectors_max: options.sectors_max.max(1) as u32,
            segments_max: options.segments_max.max(1) as u16,
            chunk_sectors: options.chunk_sectors as u32,
            discard_sectors_max: 64,
            write_zeroes_sectors_max: 64,
            ..QueueLimits::default()
        };
        let info = Arc::new(DeviceInfo {
            name: "world".into(),
            capacity_sectors: options.sectors.max(1),
            limits,
            volatile_cache: options.cache,
            fua: options.fua,
            ..DeviceInfo::default()
        });
        let device = SimDevice::new(&info, &options, seed);
        let (queues, each) = (options.queues.max(1) as usize, options.submitters.max(1) as usize);
        let slots = (queues * each) as u64 * options.window.max(1);
        let region =
            Region::anonymous((slots * slot_bytes(&options)) as usize).unwrap_or_else(|error| panic!("{error}"));
        let config = HwQueueConfig {
            depth: options.depth.max(1) as usize,
            bios_max: options.bios_max.max(1) as usize,
            merging: options.merging,
            timeout_ns: if options.device == WorldDevice::Chaos { 3_000_000 } else { 30_000_000_000 },
            ..HwQueueConfig::default()
        };
        let memory = Arc::new(RegionTable::new(vec![Arc::clone(&region)]));
        let limits: Vec<_> = limit(options.iops_max, options.bytes_per_s_max).into_iter().collect();
        let queue = |_| {
            let mut queue = HwQueue::new(device.queue(config.depth), Arc::clone(&info), config);
            queue.set_memory(&mut (), Arc::clone(&memory));
            queue.schedule(0, options.scheduler.config(&options));
            queue.set_rates(0, limits.clone());
            queue
        };
        let hw = (0..queues).map(queue);
        let way = if options.shared {
            let parkers = || (0..each).map(|_| Arc::new(NoParker) as Arc<dyn Parker>).collect();
            let places = options.window.max(1) as usize;
            SubmitPath::Shared(hw.flat_map(|queue| SwQueue::share(queue, (), places, parkers())).collect())
        } else {
            let lane = |queue| SimLane { queue, planned_ns: u64::MAX, frozen: false, quiesced: false };
            SubmitPath::Lanes(hw.map(lane).collect())
        };
        World {
            rng: Rng::new(seed),
            events: Events::default(),
            device,
            way,
            submitters: (0..queues * each)
                .map(|number| SimSubmitter { queue: number / each, ..SimSubmitter::default() })
                .collect(),
            region,
            free_slots: (0..slots).collect(),
            submitted: Vec::new(),
            out: 0,
            oracle: Oracle::new(info.capacity_sectors, options.cache),
            outcome: WorldResult { bios: 0, failed: 0, cuts: 0, took_ns: 0, fingerprint: 0xcbf2_9ce4_8422_2325 },
            options,
        }
    }

    fn run(&mut self) {
        (0..self.submitters.len()).for_each(|submitter| self.events.at(0, WorldEvent::Submit(submitter)));
        if self.options.changes_us > 0 && !self.options.shared {
            self.events.at(self.options.changes_us * 1000, WorldEvent::Change);
        }
        if self.options.cuts_us > 0 {
            self.events.at(self.options.cuts_us * 1000, WorldEvent::Cut);
        }
        for events in 0_u64.. {
            assert!(events < EVENTS_MAX, "it turns for ever with {} bios out", self.out);
            let Some(event) = self.events.advance() else { break };
            match event {
                WorldEvent::Submit(submitter) => self.submit(submitter),
                WorldEvent::Turn(lane) => self.turn(lane),
                WorldEvent::Poll(submitter) => self.poll(submitter),
                WorldEvent::Change => self.change(),
                WorldEvent::Cut => self.cut(),
            }
        }
        let left = self.submitted.iter().flatten().next();
        assert!(left.is_none(), "the world stands still with {} bios out, of them {left:?}", self.out);
        if let SubmitPath::Shared(ends) = &mut self.way {
            let now_ns = self.events.now_ns();
            ends.drain(..).for_each(|end| end.leave(&|| now_ns, &mut |_| unreachable!("all are over")));
        }
        self.outcome.took_ns = self.events.now_ns();
        self.device.check_honest();
        self.fail_power();
    }

    fn is_over(&self) -> bool {
        self.submitted.len() as u64 >= self.options.bios
    }

    fn again(&mut self) -> u64 {
        AGAIN_NS + self.rng.below(AGAIN_NS)
    }

    /// A submitter's turn to want something.
    fn submit(&mut self, submitter: usize) {
        if self.is_over() {
            return;
        }
        let SimSubmitter { queue, out, .. } = self.submitters[submitter];
        let room = match &self.way {
            SubmitPath::Lanes(lanes) => lanes[queue].queue.room(),
            SubmitPath::Shared(ends) => ends[submitter].room(),
        };
        if room == 0 || out >= self.options.window.max(1) {
            let again_ns = self.again();
            return self.events.after(again_ns, WorldEvent::Submit(submitter));
        }
        let bio = self.make(submitter);
        self.out += 1;
        self.submitters[submitter].out += 1;
        let think_ns = self.rng.below(self.options.think_us * 1000 + 1);
        self.events.after(think_ns, WorldEvent::Submit(submitter));
        match &mut self.way {
            SubmitPath::Lanes(lanes) => {
                lanes[queue].queue.submit(bio);
                self.plan(queue, self.events.now_ns());
            }
            SubmitPath::Shared(ends) => {
                ends[submitter].submit(bio);
                // Now and then several at once.
                if self.rng.below(3) > 0 {
                    let clock = clock(self.events.now_ns());
                    ends[submitter].ring(&clock);
                }
                if !std::mem::replace(&mut self.submitters[submitter].polls, true) {
                    let again_ns = self.again();
                    self.events.after(again_ns, WorldEvent::Poll(submitter));
                }
            }
        }
    }

    /// A bio of some kind, for somewhere.
    fn make(&mut self, submitter: usize) -> Box<Bio> {
        let options = self.options;
        let mut percent = self.rng.below(100);
        let mut falls_to = |share: u64| {
            let falls = percent < share;
            percent = percent.saturating_sub(share);
            falls
        };
        let mut bio = Bio::with_capacity(3);
        bio.op = if falls_to(options.flushes) {
            Op::Flush
        } else if falls_to(options.zeroes) {
            [Op::Discard, Op::WriteZeroes][self.rng.below(2) as usize]
        } else if falls_to(options.reads) {
            Op::Read
        } else {
            Op::Write
        };
        if bio.op == Op::Write && self.rng.below(100) < options.forced {
            bio.flags =
                [BioFlags::FUA, BioFlags::PREFLUSH, BioFlags::FUA | BioFlags::PREFLUSH][self.rng.below(3) as usize];
        }
        if bio.op != Op::Flush {
            bio.sectors = (1 + self.rng.below(options.bio_sectors.clamp(1, options.sectors.max(1)))) as u32;
            bio.sector = self.rng.below(options.sectors.max(1) - u64::from(bio.sectors) + 1);
        }
        if options.classed > 0 && self.rng.below(100) < options.classed {
            bio.priority = [Priority::Realtime, Priority::Idle][self.rng.below(2) as usize];
        }
        if options.nowait > 0 && self.rng.below(100) < options.nowait {
            bio.flags |= BioFlags::NOWAIT;
        }
        bio.cookie = self.submitted.len() as u64;
        bio.stream = submitter as u32;
        let Some(slot) = self.free_slots.pop() else { unreachable!("one for each place of a window") };
        if bio.op.has_data() {
            self.tear(&mut bio, slot);
        }
        if bio.op == Op::Write {
            let data: Vec<u8> = (0..u64::from(bio.sectors) * 64)
                .flat_map(|at| word(bio.cookie, bio.sector + at / 64).to_le_bytes())
                .collect();
            self.copy(&bio.segments, |span, at| span.copy_from_slice(&data[at..at + span.len()]));
        }
        let begun = self.oracle.submitted(&bio);
        self.submitted.push(Some(SubmittedBio {
            submitter,
            slot,
            since_ns: self.events.now_ns(),
            begun,
            op: bio.op,
            sector: bio.sector,
            sectors: bio.sectors,
            pieces: bio.segments.clone(),
        }));
        bio
    }

    /// Gives a bio up to three pieces of its slot, which touch or not.
    fn tear(&mut self, bio: &mut Bio, slot: u64) {
        let mut left = u64::from(bio.sectors);
        let mut offset = slot * slot_bytes(&self.options);
        for pieces_left in (0..3).rev() {
            let sectors = if pieces_left == 0 { left } else { (1 + self.rng.below(left * 2)).min(left) };
            bio.segments.push(Segment { region: 0, offset, len: (sectors * 512) as u32 });
            left -= sectors;
            offset += (sectors + self.rng.below(2)) * 512;
            if left == 0 {
                return;
            }
        }
    }

    fn copy(&self, pieces: &[Segment], mut each: impl FnMut(blkyard_mem::Span<'_>, usize)) {
        let mut at = 0;
        for piece in pieces {
            let Some(span) = self.region.span(piece.offset, piece.len as usize) else { unreachable!("in its slot") };
            each(span, at);
            at += piece.len as usize;
        }
    }

    /// Has a lane turn at a time, if it does not before.
    fn plan(&mut self, lane: usize, at_ns: u64) {
        let SubmitPath::Lanes(lanes) = &mut self.way else { return };
        let at_ns = at_ns.max(self.events.now_ns()) + self.rng.below(2000);
        if at_ns < lanes[lane].planned_ns {
            lanes[lane].planned_ns = at_ns;
            self.events.at(at_ns, WorldEvent::Turn(lane));
        }
    }

    /// One round of a lane.
    fn turn(&mut self, number: usize) {
        let now_ns = self.events.now_ns();
        let SubmitPath::Lanes(lanes) = &mut self.way else { return };
        let lane = &mut lanes[number];
        if now_ns < lane.planned_ns {
            // It has turned since, and plans anew.
            return;
        }
        lane.planned_ns = u64::MAX;
        let mut over = Vec::new();
        lane.queue.reap(&mut (), now_ns, &mut |bio| over.push(bio));
        lane.queue.issue(&mut (), now_ns);
        let next_ns = if lane.queue.has_work() { Some(now_ns + 100) } else { lane.queue.deadline_ns::<()>() };
        if let Some(next_ns) = next_ns.filter(|_| !lane.queue.is_idle()) {
            self.plan(number, next_ns.max(now_ns + 1));
        }
        over.into_iter().for_each(|bio| self.end(&bio));
    }

    /// A thread polls for completions.
    fn poll(&mut self, submitter: usize) {
        let SubmitPath::Shared(ends) = &mut self.way else { return };
        let clock = clock(self.events.now_ns());
        let mut over = Vec::new();
        ends[submitter].ring(&clock);
        ends[submitter].poll(&clock, &mut |bio| over.push(bio));
        over.into_iter().for_each(|bio| self.end(&bio));
        self.submitters[submitter].polls = self.submitters[submitter].out > 0;
        if self.submitters[submitter].polls {
            let longest_ns =
                self.submitted.iter().flatten().map(|submitted| self.events.now_ns() - submitted.since_ns).max();
            assert!(
                longest_ns.is_none_or(|longest_ns| longest_ns < PATIENCE_NS),
                "a bio has been out for {longest_ns:?} ns"
            );
            let again_ns = self.again();
            self.events.after(again_ns, WorldEvent::Poll(submitter));
        }
    }

    /// A bio is back.
    fn end(&mut self, bio: &Bio) {
        let now_ns = self.events.now_ns();
        let Some(submitted) = self.submitted[bio.cookie as usize].take() else {
            panic!("bio {} came back twice", bio.cookie)
        };
        let as_it_was = (bio.op, bio.sector, bio.sectors) == (submitted.op, submitted.sector, submitted.sectors);
        assert!(
            as_it_was && bio.segments == submitted.pieces,
            "bio {} came back as another: {submitted:?}",
            bio.cookie
        );
        let took_ns = now_ns - submitted.since_ns;
        assert!(took_ns < PATIENCE_NS, "bio {} took {took_ns} ns: {submitted:?}", bio.cookie);
        let fails = match bio.status {
            Status::Ok => true,
            Status::Io => self.options.errors > 0 || self.outcome.cuts > 0,
            Status::Medium => self.options.errors > 0,
            Status::Timeout => self.options.losses > 0,
            Status::Again => bio.flags.contains(BioFlags::NOWAIT),
            _ => false,
        };
        assert!(fails, "bio {} ended with {}: {submitted:?}", bio.cookie, bio.status);
        let mut data = vec![0; if submitted.op == Op::Read { submitted.sectors as usize * 512 } else { 0 }];
        if submitted.op == Op::Read {
            self.copy(&submitted.pieces, |span, at| span.copy_to_slice(&mut data[at..at + span.len()]));
        }
        self.oracle.ended(bio, submitted.begun, &data);
        self.free_slots.push(submitted.slot);
        self.submitters[submitted.submitter].out -= 1;
        self.out -= 1;
        self.outcome.bios += 1;
        self.outcome.failed += u64::from(!matches!(bio.status, Status::Ok | Status::Again));
        for part in [bio.cookie, bio.status as u64, now_ns] {
            self.outcome.fingerprint = (self.outcome.fingerprint ^ part).wrapping_mul(0x100_0000_01b3);
        }
    }

    /// Changes a queue under load; restores it once no more bios are submitted.
    fn change(&mut self) {
        let over = self.is_over();
        let SubmitPath::Lanes(lanes) = &mut self.way else { return };
        let drawn = self.rng.below(lanes.len() as u64) as usize;
        let what = self.rng.below(5);
        for (number, lane) in lanes.iter_mut().enumerate() {
            let mine = number == drawn && !over;
            if mine && what == 0 {
                lane.queue.set_depth(1 + self.rng.below(self.options.depth.max(1)) as usize);
            }
            if mine && what == 3 {
                let next = WorldScheduler::ALL[self.rng.below(5) as usize].config(&self.options);
                lane.queue.schedule(0, next);
            }
            if mine && what == 4 {
                let iops = [0, 1000, 30_000][self.rng.below(3) as usize];
                lane.queue.set_rates(0, limit(iops, 0).into_iter().collect());
            }
            if lane.frozen && over || mine && what == 1 {
                lane.frozen = !lane.frozen;
                if lane.frozen { lane.queue.freeze() } else { lane.queue.thaw() }
            }
            if lane.quiesced && over || mine && what == 2 {
                lane.quiesced = !lane.quiesced;
                if lane.quiesced { lane.queue.quiesce() } else { lane.queue.unquiesce() }
            }
        }
        (0..lanes.len()).for_each(|lane| self.plan(lane, self.events.now_ns()));
        if !over {
            self.events.after(self.options.changes_us * 1000, WorldEvent::Change);
        }
    }

    fn cut(&mut self) {
        if self.is_over() {
            return;
        }
        self.outcome.cuts += 1;
        self.fail_power();
        (0..self.options.queues.max(1) as usize).for_each(|lane| self.plan(lane, self.events.now_ns()));
        self.events.after(self.options.cuts_us * 1000, WorldEvent::Cut);
    }

    /// Power fails; the remaining data is judged.
    fn fail_power(&mut self) {
        self.device.cut_power(self.events.now_ns());
        let device = &self.device;
        self.oracle.power_failed(|sector| device.word(sector));
    }
}

/// Memory of one bio: its data, and the gaps between its pieces.
fn slot_bytes(options: &WorldOptions) -> u64 {
    (options.bio_sectors.max(1) + 3) * 512
}

/// A clock that moves on a little whenever it is read, as clocks do.
fn clock(now_ns: u64) -> impl Fn() -> u64 {
    let now_ns = Cell::new(now_ns);
    move || {
        now_ns.set(now_ns.get() + 1);
        now_ns.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_of_all_kinds_come_to_a_good_end() {
        let (mut cuts, mut failed) = (0, 0);
        for seed in 0..60 {
            let outcome = run(seed, WorldOptions::draw(seed));
            assert_eq!(outcome.bios, WorldOptions::draw(seed).bios, "seed {seed}");
            cuts += outcome.cuts;
            failed += outcome.failed;
        }
        assert!(cuts > 20 && failed > 20, "{cuts} {failed}");
    }

    /// A run that has failed once, and why.
    fn again(seed: u64, said: &str) {
        let mut options = WorldOptions::draw(seed);
        said.split(' ').for_each(|option| options.set(option).unwrap());
        assert_eq!(run(seed, options).bios, options.bios);
    }

    #[test]
    fn a_chaos_device_keeps_what_a_flush_has_promised_of_two_writes_at_one_time() {
        again(
            230,
            "device=chaos shared=on queues=3 submitters=1 bios=778 window=8 think_us=200 sectors=256 bio_sectors=5 depth=10 \
             bios_max=27 merging=off scheduler=deadline sectors_max=2048 segments_max=2 chunk_sectors=0 cache=on fua=on reads=20 \
             flushes=4 zeroes=6 forced=3 errors=0 requeues=17 losses=118 changes_us=0 cuts_us=0 iops_max=0 bytes_per_s_max=0",
        );
    }

    #[test]
    fn one_seed_is_one_run_to_the_bit() {
        for seed in 0..12 {
            let options = WorldOptions::draw(seed);
            assert_eq!(run(seed, options), run(seed, options), "seed {seed}");
            assert_ne!(run(seed, options).fingerprint, run(seed + 1, options).fingerprint, "seed {seed}");
        }
    }
}
