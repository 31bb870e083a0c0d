//! Measurement of each mode's steps on this machine: the code that runs in virtual time, against the clock.
//!
//! One thread, one CPU; the same thread plays the device. Costs are differences between phases that share the device's
//! part:
//!
//! ```text
//!   posts:    the device posts n                                            × 128/n
//!   reaps:    the device posts n, collect                                   × 128/n     collect = reaps - posts
//!   turns:    the device posts n, collect, fill in and submit n             × 128/n     submit  = turns - reaps
//!   passes:   the device posts n, collect, the helper serves the queue      × 128/n     pass    = passes - reaps
//! ```
//!
//! All modes take turns in short windows, so that a disturbance affects all; a figure is the 10th percentile of its
//! windows. The monotonic clock divides a window among its phases. The thread's CPU clock, which is too slow for that,
//! shows whether the thread ran all the time; otherwise the window is repeated. There is no system call in any of this,
//! so it is all user time.

use std::collections::VecDeque;
use std::hint::black_box;
use std::iter;
use std::sync::Arc;

use blkyard_mq::{Bio, Segment};
use blkyard_nvme::{Psdt, Sqe, io};
use blkyard_os::{now_ns, thread_cpu_ns};
use blkyard_sim::{DeviceModel, Rng};

use super::bio::{BioEnd, BioQueue, Helper};
use super::costs::{BATCHES, Curve, ModeCosts, StepCosts};
use super::end::{JobEnd, fill};
use super::instructions::SectionList;
use super::job_flags::{JobFlag, cookie, deliver, slot_of};
use super::mq::MqEnd;
use super::pairs::{StudyController, StudyQueuePair, queue_pair};
use super::single::{Single, SingleEnd};
use super::step_instructions::COUNTED_BATCHES;
use super::world::RecordedSignal;
use crate::floor::windows::Samples;

/// I/Os of one phase, where the queue has ids for two phases.
const BURST: usize = 128;
/// Bios out while there is an id for each, unless the queue has fewer ids: two bursts, so that no phase runs dry.
const WITHIN: usize = 256;
/// Length of one window.
const WINDOW_NS: u64 = 200_000;
/// Windows that do not count.
const WARM_UP: usize = 3;
/// Share of a window in which the thread must have run: the rest is the kernel's ticks.
const WHOLE: f64 = 0.95;
/// Where no window is whole, the machine is too busy to wait for one.
const TRIES_MAX: usize = 20;

/// Measured costs of the modes' own code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasuredModes {
    pub(crate) bio: ModeCosts,
    pub(crate) single: ModeCosts,
    pub(crate) mq: ModeCosts,
    pub(crate) mail_ns: f64,
}

/// Measures all steps of all modes, in so many windows each. `beyond` is how many bios are out when there are fewer
/// ids.
pub(crate) fn modes(model: DeviceModel, beyond: usize, windows: usize) -> MeasuredModes {
    let mut rigs = rigs(model, beyond);
    let mut samples: [[MeasuredWindows; BATCHES.len()]; RIGS.len()] = Default::default();
    let mut mail = WokenJobs::new();
    let mut mail_ns = Samples::default();
    let measured = BATCHES.partition_point(|batch| *batch <= burst(model.commands_max()));
    for window in 0..WARM_UP + windows {
        for (place, batch) in BATCHES.into_iter().enumerate().take(measured) {
            for (rig, samples) in rigs.iter_mut().zip(&mut samples) {
                let phases = rig.window(batch);
                if window >= WARM_UP {
                    samples[place].push(phases);
                }
            }
        }
        if window >= WARM_UP {
            mail_ns.push(mail.window());
        }
    }
    let [bio, bio_beyond, single, single_beyond, mq, mq_beyond] = samples.map(|samples| steps(&samples[..measured]));
    let each = |steps: StepCosts| Curve::each(steps.submit.0[1]);
    // Every bio goes by itself, and those beyond the ids go to the list.
    let bio = StepCosts { submit: each(bio), ..bio };
    let bio_beyond = StepCosts { submit: bio.submit, list: each(bio_beyond), ..bio_beyond };
    MeasuredModes {
        bio: ModeCosts {
            within: StepCosts { pass: bio_beyond.pass, list: bio_beyond.list, ..bio },
            beyond: bio_beyond,
        },
        single: ModeCosts { within: single, beyond: single_beyond },
        mq: ModeCosts { within: mq, beyond: mq_beyond },
        mail_ns: mail_ns.cost(),
    }
}

/// The modes' names, within their ids and beyond, in the order of [`rigs`].
pub(super) const RIGS: [(&str, bool); 6] =
    [("bio", true), ("bio", false), ("single", true), ("single", false), ("mq", true), ("mq", false)];

/// I/Os of one phase in a queue of this many ids: a power of two, which all smaller batches divide, and at most half of
/// the ids.
fn burst(ids: usize) -> usize {
    1 << (ids / 2).clamp(1, BURST).ilog2()
}

fn rigs(model: DeviceModel, beyond: usize) -> [Box<dyn Windowed>; RIGS.len()] {
    let ids = model.commands_max();
    [
        Box::new(bio_rig(model, ids, WITHIN.min(ids))),
        Box::new(bio_rig(model, ids, beyond)),
        Box::new(single_rig(model, ids, WITHIN.min(ids))),
        Box::new(single_rig(model, ids, beyond)),
        Box::new(mq_rig(model, ids, WITHIN.min(ids))),
        Box::new(mq_rig(model, ids, beyond)),
    ]
}

/// Executes each phase of each mode once, to have its instructions counted.
pub(crate) fn sections(model: DeviceModel, beyond: usize, list: &mut SectionList) {
    let burst = burst(model.commands_max());
    for (rig, (mode, within)) in rigs(model, beyond).iter_mut().zip(RIGS) {
        for batch in COUNTED_BATCHES.into_iter().filter(|batch| *batch <= burst) {
            (0..WARM_UP).for_each(|_| {
                rig.round(batch, &mut run_uncounted);
            });
            let mut phases = PHASES.into_iter();
            rig.round(batch, &mut |work| {
                let phase = phases.next().unwrap_or_default();
                list.run(&format!("{mode} {within} {batch} {phase}"), burst as u64, work);
                0
            });
        }
    }
}

/// Executes a phase without measuring it.
pub(crate) fn run_uncounted(work: &mut dyn FnMut()) -> u64 {
    work();
    0
}

/// Executes a phase; nanoseconds.
pub(crate) fn timed(work: &mut dyn FnMut()) -> u64 {
    let start_ns = now_ns();
    work();
    now_ns() - start_ns
}

/// The phases of a round, in order.
pub(super) const PHASES: [&str; 4] = ["posts", "reaps", "turns", "passes"];

/// Executes a phase and returns its time in nanoseconds, if it is measured.
pub(crate) type RunPhase<'a> = &'a mut dyn FnMut(&mut dyn FnMut()) -> u64;

/// Nanoseconds of CPU for one step of each phase.
#[derive(Clone, Copy, Debug, Default)]
struct Phases {
    posts: f64,
    reaps: f64,
    turns: f64,
    passes: f64,
}

/// The same, window by window.
#[derive(Clone, Debug, Default)]
struct MeasuredWindows {
    posts: Samples,
    reaps: Samples,
    turns: Samples,
    passes: Samples,
}

impl MeasuredWindows {
    fn push(&mut self, phases: Phases) {
        self.posts.push(phases.posts);
        self.reaps.push(phases.reaps);
        self.turns.push(phases.turns);
        self.passes.push(phases.passes);
    }
}

/// Costs by batch, from the windows of the batches that were measured: the first ones.
fn steps(windows: &[MeasuredWindows]) -> StepCosts {
    let mut costs = StepCosts::default();
    for (place, MeasuredWindows { posts, reaps, turns, passes }) in windows.iter().enumerate() {
        let [posts, reaps, turns, passes] = [posts, reaps, turns, passes].map(Samples::cost);
        costs.collect.0[place] = (reaps - posts).max(0.0);
        costs.submit.0[place] = (turns - reaps).max(0.0);
        costs.pass.0[place] = (passes - reaps).max(0.0);
    }
    for curve in [&mut costs.collect, &mut costs.submit, &mut costs.pass] {
        curve.extend(windows.len());
    }
    costs
}

/// Something that can be measured, with batches of this size.
trait Windowed {
    /// For a window.
    fn window(&mut self, batch: usize) -> Phases;

    /// Each phase once; nanoseconds.
    fn round(&mut self, batch: usize, run: RunPhase<'_>) -> [u64; 4];
}

/// A mode with the device's other end, and bios out.
struct ModeRig<M: JobEnd> {
    end: M,
    /// I/Os of one phase.
    burst: usize,
    controller: StudyController,
    /// For the device's part alone.
    idle: IdlePair,
    /// Tokens of the device's commands, in order.
    tokens: VecDeque<u16>,
    free: Vec<Box<Bio>>,
    batch: Vec<Box<Bio>>,
    rng: Rng,
    helper: Option<Helper>,
    /// Time passed to the mode: as late as the model's device would be.
    now_ns: u64,
}

/// A queue pair without a driver.
struct IdlePair {
    host: StudyQueuePair,
    controller: StudyController,
    tokens: VecDeque<u16>,
}

impl IdlePair {
    fn new(model: DeviceModel) -> IdlePair {
        let (host, controller) = queue_pair(model, BURST);
        IdlePair { host, controller, tokens: VecDeque::with_capacity(model.ring_entries) }
    }

    /// Has the controller fetch so many commands.
    fn fill(&mut self, commands: usize) {
        let StudyQueuePair { queue, .. } = &mut self.host;
        let Some(data) = queue.addr(Segment { len: 4096, ..Segment::default() }) else { unreachable!("mapped") };
        let sqe = Sqe::with_blocks(io::WRITE, queue.namespace.nsid, 0, 8, 0).with_data(Psdt::Prp, [data, 0]);
        (0..commands as u16).for_each(|slot| queue.pair.push(slot, sqe));
        let _ = queue.pair.announce();
        self.tokens.extend(iter::from_fn(|| self.controller.fetch()));
    }

    /// Completes so many of them, as the device does.
    #[inline]
    fn post(&mut self, batch: usize) {
        for _ in 0..batch {
            let Some(token) = self.tokens.pop_front() else { unreachable!("filled before") };
            self.controller.complete(token);
        }
    }

    /// Takes the completions.
    fn drain(&mut self) {
        let _ = self.host.queue.pair.poll(|_| ());
    }
}

fn eventfds() -> (Arc<[JobFlag]>, Arc<RecordedSignal>) {
    let job = JobFlag::new(BURST, Arc::new(RecordedSignal::default()));
    (Arc::new([job]), Arc::new(RecordedSignal::default()))
}

fn bio_rig(model: DeviceModel, ids: usize, bios: usize) -> ModeRig<BioEnd> {
    let (pair, controller) = queue_pair(model, bios);
    let (job_flags, eventfd) = eventfds();
    let queue = BioQueue::new(pair, ids, bios, job_flags, eventfd);
    let helper = (bios > ids).then(|| Helper::new(vec![Arc::clone(&queue)], bios));
    ModeRig::new(BioEnd::new(&queue, 0, bios), controller, model, bios, helper)
}

fn single_rig(model: DeviceModel, ids: usize, bios: usize) -> ModeRig<SingleEnd> {
    let (pair, controller) = queue_pair(model, bios);
    ModeRig::new(SingleEnd::new(&Single::new(pair, ids, bios, eventfds().0), 0, bios), controller, model, bios, None)
}

fn mq_rig(model: DeviceModel, ids: usize, bios: usize) -> ModeRig<MqEnd> {
    let (pair, controller) = queue_pair(model, bios);
    ModeRig::new(MqEnd::new(pair, ids, bios), controller, model, bios, None)
}

impl<M: JobEnd> ModeRig<M> {
    fn new(end: M, controller: StudyController, model: DeviceModel, bios: usize, helper: Option<Helper>) -> ModeRig<M> {
        let bio = |slot| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = cookie(0, slot);
            bio
        };
        let mut rig = ModeRig {
            end,
            burst: burst(model.commands_max()),
            controller,
            idle: IdlePair::new(model),
            tokens: VecDeque::with_capacity(model.ring_entries),
            free: (0..bios).map(bio).collect(),
            batch: Vec::with_capacity(BURST),
            rng: Rng::new(1),
            helper,
            now_ns: 0,
        };
        rig.settle();
        rig
    }

    /// Everything that is free goes out again, and the device has seen it. In batches, since the queue holds no more at
    /// once.
    fn settle(&mut self) {
        while !self.free.is_empty() {
            self.submit(self.burst);
            self.fetch();
        }
        if let Some(helper) = &mut self.helper {
            helper.look_after(0, self.now_ns);
        }
        self.fetch();
    }

    fn fetch(&mut self) {
        while let Some(token) = self.controller.fetch() {
            self.tokens.push_back(token);
        }
    }

    #[inline]
    fn post(&mut self, batch: usize) {
        for _ in 0..batch {
            let Some(token) = self.tokens.pop_front() else { unreachable!("more is out than a phase answers") };
            self.controller.complete(token);
            self.now_ns += DeviceModel::NVME_2013.serial_ns;
        }
    }

    #[inline]
    fn collect(&mut self) {
        black_box(self.end.collect(self.now_ns, &mut self.free));
    }

    /// Fills in and submits so many free bios.
    #[inline]
    fn submit(&mut self, batch: usize) {
        let mut left = batch.min(self.free.len());
        while left > 0 {
            for _ in 0..left.min(M::BATCH) {
                let Some(mut bio) = self.free.pop() else { unreachable!("counted before") };
                let slot = slot_of(&bio);
                fill(&mut bio, slot, &mut self.rng);
                self.batch.push(bio);
                left -= 1;
            }
            black_box(self.end.submit(&mut self.batch, self.now_ns));
        }
    }

    /// One phase: so many steps.
    #[inline]
    fn phase(&mut self, run: RunPhase<'_>, steps: usize, mut step: impl FnMut(&mut Self)) -> u64 {
        run(&mut || (0..steps).for_each(|_| step(self)))
    }
}

impl<M: JobEnd> Windowed for ModeRig<M> {
    fn window(&mut self, batch: usize) -> Phases {
        let steps = self.burst / batch.max(1);
        let (rounds, sums) = whole_window(|| self.round(batch, &mut timed));
        let [posts, reaps, turns, passes] = sums.map(|sum| sum as f64 / (rounds * steps) as f64);
        Phases { posts, reaps, turns, passes }
    }

    fn round(&mut self, batch: usize, run: RunPhase<'_>) -> [u64; 4] {
        let steps = self.burst / batch.max(1);
        self.idle.fill(steps * batch);
        let posts = self.phase(run, steps, |rig| rig.idle.post(batch));
        self.idle.drain();
        let reaps = self.phase(run, steps, |rig| {
            rig.post(batch);
            rig.collect();
        });
        self.settle();
        let turns = self.phase(run, steps, |rig| {
            rig.post(batch);
            rig.collect();
            rig.submit(batch);
        });
        self.settle();
        let mut passes = 0;
        if let Some(mut helper) = self.helper.take() {
            passes = self.phase(run, steps, |rig| {
                rig.post(batch);
                rig.collect();
                black_box(helper.look_after(0, rig.now_ns));
            });
            self.helper = Some(helper);
            self.settle();
        }
        [posts, reaps, turns, passes]
    }
}

/// Rounds for a window in which this thread had its CPU to itself; repeats it otherwise. Returns the number of rounds,
/// and the sums of their times.
pub(crate) fn whole_window<const N: usize>(mut round: impl FnMut() -> [u64; N]) -> (usize, [u64; N]) {
    let mut tries = 0;
    loop {
        let (start_ns, start_cpu_ns) = (now_ns(), thread_cpu_ns());
        let (mut rounds, mut sums) = (0, [0; N]);
        while now_ns() - start_ns < WINDOW_NS {
            rounds += 1;
            sums.iter_mut().zip(round()).for_each(|(sum, took)| *sum += took);
        }
        let (ran_ns, cpu_ns) = (now_ns() - start_ns, thread_cpu_ns() - start_cpu_ns);
        tries += 1;
        if cpu_ns as f64 >= ran_ns as f64 * WHOLE || tries == TRIES_MAX {
            return (rounds, sums);
        }
    }
}

/// Time to put a bio into another job's box, and to take it out there, ns.
pub(crate) fn mail_ns(windows: usize) -> f64 {
    let (mut mail, mut samples) = (WokenJobs::new(), Samples::default());
    (0..windows).for_each(|_| samples.push(mail.window()));
    samples.cost()
}

/// Two jobs, of which one delivers to the other.
struct WokenJobs {
    job_flags: [JobFlag; 1],
    bios: Vec<Box<Bio>>,
}

impl WokenJobs {
    fn new() -> WokenJobs {
        let bio = |_| Bio::with_capacity(1);
        WokenJobs {
            job_flags: [JobFlag::new(BURST, Arc::new(RecordedSignal::default()))],
            bios: (0..BURST).map(bio).collect(),
        }
    }

    /// Nanoseconds for one bio, delivered and taken. One at a time, as they come off the device.
    fn window(&mut self) -> f64 {
        let mut one = Vec::with_capacity(1);
        let (rounds, [sum]) = whole_window(|| {
            let start_ns = now_ns();
            for _ in 0..BURST {
                one.extend(self.bios.pop());
                deliver(&self.job_flags, &mut one);
                self.job_flags[0].take_mail(&mut one);
                self.bios.append(&mut one);
            }
            [now_ns() - start_ns]
        });
        sum as f64 / (rounds * BURST) as f64
    }
}

impl<M: JobEnd> Drop for ModeRig<M> {
    /// I/O in flight completes before a queue is dropped.
    fn drop(&mut self) {
        loop {
            self.fetch();
            if self.tokens.is_empty() {
                return;
            }
            self.post(self.tokens.len());
            self.collect();
            self.free.clear();
            if let Some(helper) = &mut self.helper {
                helper.look_after(0, self.now_ns);
            }
            // An empty batch; it submits the bios waiting in the queue.
            self.end.submit(&mut self.batch, self.now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds<M: JobEnd>(mut rig: ModeRig<M>, in_flight: usize) {
        let burst = rig.burst;
        for batch in BATCHES.into_iter().filter(|batch| *batch <= burst) {
            rig.round(batch, &mut run_uncounted);
            assert_eq!(rig.tokens.len(), in_flight, "commands at the device after batches of {batch}");
        }
    }

    #[test]
    fn every_bio_has_an_id_within_and_every_id_a_bio_beyond() {
        for ids in [1, 2, 3, 7, 63, 127, 255, 300, 1023] {
            let model = DeviceModel { ring_entries: ids + 1, ..DeviceModel::NVME_2013 };
            for bios in [WITHIN.min(ids), 2 * ids] {
                rounds(bio_rig(model, ids, bios), bios.min(ids));
                rounds(single_rig(model, ids, bios), bios.min(ids));
                rounds(mq_rig(model, ids, bios), bios.min(ids));
            }
        }
    }

    #[test]
    fn a_phase_uses_at_most_half_of_the_ids() {
        assert_eq!([1, 2, 3, 7, 63, 255, 256, 1023].map(burst), [1, 1, 1, 2, 16, 64, 128, 128]);
    }

    #[test]
    fn a_small_ring_has_a_cost_for_every_batch() {
        let model = DeviceModel { ring_entries: 16, ..DeviceModel::NVME_2013 };
        let MeasuredModes { bio, single, mq, mail_ns } = modes(model, 64, 2);
        let curves = [bio, single, mq].map(|mode| [mode.within.collect, mode.within.submit, mode.beyond.collect]);
        assert!(curves.as_flattened().iter().all(|curve| curve.0.iter().all(|ns| ns.is_finite())), "{curves:?}");
        assert!(mq.within.submit.0[BATCHES.len() - 1] > 0.0 && mail_ns.is_finite());
    }
}
