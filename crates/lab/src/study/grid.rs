//! The post's grid, played in every mode: once for the tables, and several times with single measurements of the steps,
//! which show the noise.

use std::sync::Arc;
use std::thread;

use blkyard_mq::Wake;
use blkyard_sim::DeviceModel;
use serde::Serialize;

use super::bio::{BioEnd, BioQueue, Helper};
use super::costs::{Costs, ModeCosts, StepCosts};
use super::job_flags::JobFlag;
use super::meter::StudyResult;
use super::mq::MqEnd;
use super::pairs::StudyControllers;
use super::post::{POST, PostRow};
use super::single::{Single, SingleEnd};
use super::unfair::{UnfairEnd, UnfairQueue};
use super::world::{Cast, RecordedSignal, Scene, StudyWorld};

/// Period of the helper's tick. Fitted: in 7 of the post's 16 rows the longest latency of the bio driver lies between
/// 2.11 and 2.17 ms.
pub(crate) const TICK_NS: u64 = 2_100_000;

/// How long each point is played.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GridLength {
    /// I/Os at least.
    pub(crate) ios: u64,
    /// Least number of times that every slot is used.
    pub(crate) rounds: u64,
}

impl GridLength {
    /// Length of a repeated run: what varies there is the costs.
    pub(crate) fn of_a_repeat(self) -> GridLength {
        GridLength { ios: self.ios / 4, rounds: self.rounds.min(8) }
    }
}

/// One point of the grid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridRow {
    pub(crate) post: PostRow,
    /// With the tick.
    pub(crate) bio: StudyResult,
    /// Without it: the helper is only called.
    pub(crate) bio_untimed: StudyResult,
    pub(crate) single: StudyResult,
    pub(crate) mq: StudyResult,
    /// `bio` with one queue, and so one lock, for all jobs; in rows of several jobs.
    pub(crate) bio_one_lock: Option<StudyResult>,
    /// Tags shared by all jobs and passed on at random; where the jobs' bios are twice the ids or more.
    pub(crate) unfair: Option<StudyResult>,
}

/// One figure of mq over the same of bio.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ratios {
    pub(crate) iops: f64,
    pub(crate) cpu: f64,
    pub(crate) max: f64,
    pub(crate) stdev: f64,
}

impl GridRow {
    /// Ratios of this run.
    pub(crate) fn ratios(&self) -> Ratios {
        Ratios::of(&self.mq, &self.bio)
    }

    /// The result in one line.
    pub(crate) fn summary(&self) -> String {
        let Ratios { iops, cpu, .. } = self.ratios();
        let Ratios { iops: post_iops, cpu: post_cpu, .. } = self.post_ratios();
        let PostRow { jobs, depth, .. } = self.post;
        format!("{jobs} x {depth}: mq/bio IOPS {iops:.3} (post {post_iops:.3}), CPU {cpu:.2} (post {post_cpu:.2})")
    }

    /// Ratios of the post.
    pub(crate) fn post_ratios(&self) -> Ratios {
        let PostRow { jobs, mq, bio, .. } = self.post;
        Ratios {
            iops: mq.iops / bio.iops,
            cpu: mq.cpu_ns(jobs) / bio.cpu_ns(jobs),
            max: mq.max_us / bio.max_us,
            stdev: mq.stdev_us / bio.stdev_us,
        }
    }
}

impl Ratios {
    pub(crate) fn of(mq: &StudyResult, bio: &StudyResult) -> Ratios {
        Ratios {
            iops: mq.iops / bio.iops,
            cpu: mq.cpu_ns() / bio.cpu_ns(),
            max: mq.max_us / bio.max_us,
            stdev: mq.stdev_us / bio.stdev_us,
        }
    }
}

/// Plays every point in every mode. `done` receives each point when it ends.
pub(crate) fn play(
    model: DeviceModel,
    costs: &Costs,
    length: GridLength,
    seed: u64,
    done: impl Fn(&GridRow),
) -> Vec<GridRow> {
    let point = |post: &PostRow| {
        let point = GridPoint { model, costs, length, seed, jobs: post.jobs, depth: post.depth };
        let row = GridRow {
            post: *post,
            bio: point.bio(Some(TICK_NS)),
            bio_untimed: point.bio(None),
            single: point.single(),
            mq: point.mq(),
            bio_one_lock: (post.jobs > 1).then(|| point.bio_one_lock(Some(TICK_NS))),
            unfair: (post.jobs * post.depth >= 2 * model.commands_max() && post.jobs > 1).then(|| point.unfair()),
        };
        done(&row);
        row
    };
    POST.iter().map(point).collect()
}

/// Plays the grid once with each measurement of the costs, each with another seed.
pub(crate) fn repeat(model: DeviceModel, measured: &[Costs], length: GridLength, seed: u64) -> Vec<Vec<GridRow>> {
    let length = length.of_a_repeat();
    let seeds = (1..).map(|number| seed.wrapping_add(number));
    thread::scope(|scope| {
        let runs = measured.iter().zip(seeds);
        let runs: Vec<_> =
            runs.map(|(costs, seed)| scope.spawn(move || play(model, costs, length, seed, |_| ()))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// One point, with all it takes to play it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridPoint<'a> {
    pub(crate) model: DeviceModel,
    pub(crate) costs: &'a Costs,
    pub(crate) length: GridLength,
    pub(crate) seed: u64,
    pub(crate) jobs: usize,
    pub(crate) depth: usize,
}

impl GridPoint<'_> {
    /// A queue for each job, all with one helper.
    pub(crate) fn bio(&self, tick_ns: Option<u64>) -> StudyResult {
        self.bio_on(self.jobs, tick_ns)
    }

    /// One queue for all jobs: its lock is contended.
    pub(crate) fn bio_one_lock(&self, tick_ns: Option<u64>) -> StudyResult {
        self.bio_on(1, tick_ns)
    }

    fn bio_on(&self, queues: usize, tick_ns: Option<u64>) -> StudyResult {
        let (ids, GridPoint { jobs, depth, .. }) = (self.model.commands_max(), *self);
        let bios = depth * jobs / queues;
        let scene = self.scene(self.steps(&self.costs.bio, bios), tick_ns);
        let cast = |pairs: &mut StudyControllers, eventfds: &[Arc<RecordedSignal>]| {
            let job_flags = self.job_flags(eventfds);
            let helper: Arc<dyn Wake> = eventfds[jobs].clone();
            let open = |_| BioQueue::new(pairs.open(depth), ids, bios, Arc::clone(&job_flags), Arc::clone(&helper));
            let queues: Vec<_> = (0..queues).map(open).collect();
            let queue_of: Vec<_> = (0..jobs).map(|job| job % queues.len()).collect();
            Cast {
                ends: (0..jobs).map(|job| BioEnd::new(&queues[queue_of[job]], job, bios)).collect(),
                queue_of,
                helper: Some(Helper::new(queues, jobs * depth)),
            }
        };
        StudyWorld::new(scene, cast).run()
    }

    /// One queue for all jobs.
    pub(crate) fn single(&self) -> StudyResult {
        let (ids, bios) = (self.model.commands_max(), self.jobs * self.depth);
        let scene = self.scene(self.steps(&self.costs.single, bios), None);
        let cast = |pairs: &mut StudyControllers, eventfds: &[Arc<RecordedSignal>]| {
            let queue = Single::new(pairs.open(self.depth), ids, bios, self.job_flags(eventfds));
            let ends = (0..self.jobs).map(|job| SingleEnd::new(&queue, job, bios)).collect();
            Cast { ends, queue_of: vec![0; self.jobs], helper: None }
        };
        StudyWorld::new(scene, cast).run()
    }

    /// One queue for all jobs, whose tags are passed on at random.
    pub(crate) fn unfair(&self) -> StudyResult {
        let (ids, bios) = (self.model.commands_max(), self.jobs * self.depth);
        let scene = self.scene(self.steps(&self.costs.single, bios), None);
        let cast = |pairs: &mut StudyControllers, eventfds: &[Arc<RecordedSignal>]| {
            let queue = UnfairQueue::new(pairs.open(self.depth), ids, bios, self.job_flags(eventfds), self.seed);
            let ends = (0..self.jobs).map(|job| UnfairEnd::new(&queue, job, bios)).collect();
            Cast { ends, queue_of: vec![0; self.jobs], helper: None }
        };
        StudyWorld::new(scene, cast).run()
    }

    /// A queue for each job, which owns it.
    pub(crate) fn mq(&self) -> StudyResult {
        let ids = self.model.commands_max();
        let scene = self.scene(self.steps(&self.costs.mq, self.depth), None);
        let cast = |pairs: &mut StudyControllers, _: &[Arc<RecordedSignal>]| {
            let ends = (0..self.jobs).map(|_| MqEnd::new(pairs.open(self.depth), ids, self.depth)).collect();
            Cast { ends, queue_of: (0..self.jobs).collect(), helper: None }
        };
        StudyWorld::new(scene, cast).run()
    }

    /// Costs of a queue's steps with so many bios on it.
    fn steps<'a>(&self, mode: &'a ModeCosts, bios: usize) -> &'a StepCosts {
        if bios > self.model.commands_max() { &mode.beyond } else { &mode.within }
    }

    fn scene<'a>(&'a self, steps: &'a StepCosts, tick_ns: Option<u64>) -> Scene<'a> {
        let GridPoint { model, costs, length, seed, jobs, depth } = *self;
        let places = (jobs * depth) as u64;
        Scene {
            model,
            jobs,
            depth,
            ios: length.ios.max(length.rounds * places),
            warm_up: (length.ios / 10).max(2 * places),
            seed,
            steps,
            costs,
            tick_ns,
        }
    }

    fn job_flags(&self, eventfds: &[Arc<RecordedSignal>]) -> Arc<[JobFlag]> {
        eventfds[..self.jobs].iter().map(|eventfd| JobFlag::new(self.depth, eventfd.clone())).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::study::costs::CallCost;

    /// The whole grid, as if each mode reached the post's IOPS of mq, with plausible figures.
    pub(crate) fn example_rows() -> Vec<GridRow> {
        let result = |post: &PostRow, user_ns: f64, system_ns: f64, share: f64| StudyResult {
            iops: post.mq.iops,
            user_ns,
            system_ns,
            min_us: post.mq.mean_us * (1.0 - share),
            max_us: post.mq.mean_us * (1.0 + share),
            mean_us: post.mq.mean_us,
            stdev_us: post.mq.mean_us * share / 10.0,
            ..StudyResult::default()
        };
        let row = |post: &PostRow| GridRow {
            post: *post,
            bio: result(post, 100.0, 1900.0, 0.5),
            bio_untimed: result(post, 100.0, 1900.0, 0.5),
            single: result(post, 90.0, 640.0, 0.5),
            mq: result(post, 80.0, 640.0, 0.5),
            bio_one_lock: (post.jobs > 1).then(|| result(post, 400.0, 1900.0, 0.5)),
            unfair: (post.jobs * post.depth > 2048).then(|| result(post, 90.0, 640.0, 9.0)),
        };
        POST.iter().map(row).collect()
    }

    fn point(costs: &Costs, jobs: usize, depth: usize) -> GridPoint<'_> {
        let length = GridLength { ios: 20_000, rounds: 4 };
        GridPoint { model: DeviceModel::NVME_2013, costs, length, seed: 1, jobs, depth }
    }

    #[test]
    fn one_seed_is_one_outcome_to_the_bit_in_every_mode() {
        let costs = Costs::example();
        let point = point(&costs, 4, 300);
        assert_eq!(point.mq(), point.mq());
        assert_eq!(point.single(), point.single());
        assert_eq!(point.bio(Some(TICK_NS)), point.bio(Some(TICK_NS)));
        assert_ne!(point.mq(), GridPoint { seed: 2, ..point }.mq());
    }

    #[test]
    fn alone_an_io_takes_the_device_and_the_steps_around_it() {
        let costs = Costs { sleep: CallCost::default(), ..Costs::example() };
        let mq = point(&costs, 1, 1).mq();
        // Submit 40 ns, the device 11.9 us, collect 30 ns; all whole nanoseconds.
        assert!((mq.mean_us - 11.97).abs() < 0.02, "{mq:?}");
        assert!((mq.iops * mq.mean_us / 1e6 - 1.0).abs() < 0.01);
        assert!((mq.cpu_ns() - 80.0).abs() < 1.0, "with one look for nothing: {mq:?}");
    }

    #[test]
    fn littles_law_holds_in_every_mode() {
        let costs = Costs::example();
        for (jobs, depth) in [(1, 16), (1, 2048), (4, 1024), (4, 8)] {
            let point = point(&costs, jobs, depth);
            for (mode, outcome) in [
                ("mq", point.mq()),
                ("single", point.single()),
                ("bio", point.bio(Some(TICK_NS))),
                ("untimed", point.bio(None)),
            ] {
                let out = outcome.iops * outcome.mean_us / 1e6;
                let want = (jobs * depth) as f64;
                assert!((out / want - 1.0).abs() < 0.05, "{mode} {jobs} x {depth}: {out}");
                assert!(outcome.iops < 270_500.0, "{mode} {jobs} x {depth}: {outcome:?}");
            }
        }
    }

    #[test]
    fn bios_wait_on_a_list_and_the_helper_runs_only_when_ids_run_out() {
        let costs = Costs::example();
        let within = point(&costs, 1, 1023).bio(None);
        assert_eq!((within.listed, within.helper_wakes), (0.0, 0.0));
        let beyond = point(&costs, 1, 1024).bio(None);
        assert!(beyond.listed > 0.5 && beyond.helper_wakes > 0.0, "{beyond:?}");
        assert!(beyond.cpu_ns() > within.cpu_ns() * 1.3);
        // The tick alone wakes the helper once in 2.1 ms.
        let ticked = point(&costs, 1, 1).bio(Some(TICK_NS));
        let period_us = 1e6 / (ticked.helper_wakes * ticked.iops);
        assert!((period_us - 2100.0).abs() < 100.0, "{period_us}");
    }

    #[test]
    fn one_lock_for_all_jobs_costs_more_than_one_each() {
        let costs = Costs::example();
        let point = point(&costs, 4, 16);
        let (own, shared) = (point.bio(None), point.bio_one_lock(None));
        assert!(shared.cpu_ns() > own.cpu_ns(), "{shared:?} {own:?}");
        assert!((shared.iops * shared.mean_us / 1e6 / 64.0 - 1.0).abs() < 0.05, "{shared:?}");
    }

    #[test]
    fn tags_passed_on_at_random_have_a_tail_at_the_same_mean() {
        let costs = Costs::example();
        let point = point(&costs, 4, 1024);
        let (fair, unfair) = (point.single(), point.unfair());
        assert!((unfair.mean_us / fair.mean_us - 1.0).abs() < 0.1, "{unfair:?} {fair:?}");
        assert!(unfair.stdev_us > 0.5 * unfair.mean_us && unfair.max_us > 5.0 * unfair.mean_us, "{unfair:?}");
    }

    #[test]
    fn a_repeat_is_shorter_and_has_every_point() {
        let (costs, length) = (Costs::example(), GridLength { ios: 400, rounds: 1 });
        let runs = repeat(DeviceModel::NVME_2013, &[costs.clone(), costs], length, 1);
        assert_eq!(runs.iter().map(Vec::len).collect::<Vec<_>>(), [POST.len(); 2]);
        assert_ne!(runs[0][0].mq, runs[1][0].mq, "each has a seed of its own");
    }

    #[test]
    fn tags_are_handed_over_first_come_first_served() {
        let costs = Costs::example();
        for depth in [1024, 2048] {
            let mq = point(&costs, 4, depth).mq();
            assert!(mq.stdev_us / mq.mean_us < 0.1 && mq.max_us < 2.5 * mq.mean_us, "{depth}: {mq:?}");
        }
    }
}
