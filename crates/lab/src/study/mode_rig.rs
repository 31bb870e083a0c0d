//! A mode with the other end of its device and bios in flight, whose phases can be measured or counted.

use std::collections::VecDeque;
use std::hint::black_box;
use std::iter;
use std::sync::Arc;

use blkyard_mq::{Bio, Segment};
use blkyard_nvme::{Psdt, Sqe, io};
use blkyard_sim::{DeviceModel, Rng};

use super::bio::{BioEnd, BioQueue, Helper};
use super::end::{JobEnd, fill};
use super::job_flags::{JobFlag, cookie, slot_of};
use super::measure::{RunPhase, timed, whole_window};
use super::mq::MqEnd;
use super::pairs::{StudyController, StudyQueuePair, queue_pair};
use super::single::{Single, SingleEnd};
use super::world::RecordedSignal;

/// I/Os of one phase, where the queue has ids for two phases.
pub(super) const BURST: usize = 128;
/// Bios out while there is an id for each, unless the queue has fewer ids: two bursts, so that no phase runs dry.
const WITHIN: usize = 256;

/// The modes' names, within their ids and beyond, in the order of [`rigs`].
pub(super) const RIGS: [(&str, bool); 6] =
    [("bio", true), ("bio", false), ("single", true), ("single", false), ("mq", true), ("mq", false)];

/// I/Os of one phase in a queue of this many ids: a power of two, which all smaller batches divide, and at most half of
/// the ids.
pub(super) fn burst(ids: usize) -> usize {
    1 << (ids / 2).clamp(1, BURST).ilog2()
}

pub(super) fn rigs(model: DeviceModel, beyond: usize) -> [Box<dyn Windowed>; RIGS.len()] {
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

/// The phases of a round, in order.
pub(super) const PHASES: [&str; 4] = ["posts", "reaps", "turns", "passes"];

/// Nanoseconds of CPU for one step of each phase.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phases {
    pub(super) posts: f64,
    pub(super) reaps: f64,
    pub(super) turns: f64,
    pub(super) passes: f64,
}

/// Something that can be measured, with batches of this size.
pub(super) trait Windowed {
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
    use crate::study::costs::BATCHES;
    use crate::study::measure::run_uncounted;

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
}
