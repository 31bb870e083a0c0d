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

use std::sync::Arc;

use blkyard_mq::Bio;
use blkyard_os::{now_ns, thread_cpu_ns};
use blkyard_sim::DeviceModel;

use super::costs::{BATCHES, Curve, ModeCosts, StepCosts};
use super::instructions::SectionList;
use super::job_flags::{JobFlag, deliver};
use super::mode_rig::{BURST, PHASES, Phases, RIGS, burst, rigs};
use super::step_instructions::COUNTED_BATCHES;
use super::world::RecordedSignal;
use crate::floor::windows::Samples;

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

/// Executes a phase and returns its time in nanoseconds, if it is measured.
pub(crate) type RunPhase<'a> = &'a mut dyn FnMut(&mut dyn FnMut()) -> u64;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_ring_has_a_cost_for_every_batch() {
        let model = DeviceModel { ring_entries: 16, ..DeviceModel::NVME_2013 };
        let MeasuredModes { bio, single, mq, mail_ns } = modes(model, 64, 2);
        let curves = [bio, single, mq].map(|mode| [mode.within.collect, mode.within.submit, mode.beyond.collect]);
        assert!(curves.as_flattened().iter().all(|curve| curve.0.iter().all(|ns| ns.is_finite())), "{curves:?}");
        assert!(mq.within.submit.0[BATCHES.len() - 1] > 0.0 && mail_ns.is_finite());
    }
}
