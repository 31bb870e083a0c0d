//! `multi-vq`: every virtqueue a hardware queue (M. Lei, linux-kernel, June 2014), driver and device both ours.
//!
//! Simulated: the costs of driver and device are measured step by step (`steps.rs`), and charged in virtual time on as
//! many CPUs as there are threads (`world.rs`), with the post's one thread behind all queues and with one for each. The
//! real queues and rings carry the requests there (`rings.rs`), and in a guest of 2014 with kicks and interrupts at
//! declared costs (`guest.rs`, `guest_costs.rs`), for a share of the post's gains (`gains.rs`). In real time:
//! the variants that two CPUs can run (`live.rs`), with the code that a daemon and its client run on both sides; driver
//! and device apart also give the extra cost of a ring between two CPUs. In processes: our driver over a socket, at our
//! daemon and at another's (`served.rs`).

mod gains;
mod guest;
mod guest_costs;
mod live;
mod report;
mod rig;
mod rings;
mod served;
mod steps;
mod tables;
mod verdicts;
mod world;

use std::io;
use std::path::Path;
use std::thread;

use self::live::VqLive;
use self::report::{VqFigures, VqReport};
use self::served::ServedWindows;
use self::steps::BatchCosts;
use self::world::{Devices, Prices, VqResult, VqScene, play};

use super::StudyError;
use super::costs::CallCost;
use super::measure::mail_ns;
use super::wakes;
use crate::floor::cpus;

/// Jobs and queues of the post's grid, as far as the issue goes.
pub(crate) const COUNTS: [usize; 3] = [1, 2, 4];
/// The largest number.
const QUEUES_MAX: usize = COUNTS[COUNTS.len() - 1];
/// CPUs that are simulated.
const CPUS: [usize; 5] = [1, 2, 4, 8, 16];

/// The post's figures, all for two queues over one: with two jobs, with four, and the best of each over all jobs.
/// Random read 4 KiB, depth 64, a guest with four CPUs.
pub(crate) const POST: [(&str, f64); 3] =
    [("2 jobs, 2 queues over 1", 1.33), ("4 jobs, 2 queues over 1", 2.0), ("the best, 2 queues over 1", 1.39)];

/// How long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VqLength {
    /// Windows of each figure.
    pub(crate) windows: usize,
    /// I/Os of each point in virtual time.
    pub(crate) ios: u64,
    /// I/Os of each of the guest's some hundred points.
    pub(crate) guest_ios: u64,
    /// Windows of each point in separate processes.
    pub(crate) served: ServedWindows,
}

impl VqLength {
    /// Seconds on the project's own machine.
    fn about_s(self) -> u64 {
        let windows = (self.served.count as u64 + 1) * (COUNTS.len() * COUNTS.len() * served::BACK_ENDS.len()) as u64;
        let served_s = windows * (self.served.window_ms + 30) / 1000;
        let simulated_s = self.ios * 60 / 1_500_000 + self.guest_ios * 150 / 1_000_000;
        // The steps and the real time of live.rs.
        let measured_s = self.windows as u64 / 12;
        (served_s + simulated_s + measured_s + 5).next_multiple_of(5)
    }

    pub(crate) fn new(quick: bool) -> VqLength {
        if quick {
            VqLength { windows: 40, ios: 30_000, guest_ios: 6_000, served: ServedWindows { count: 3, window_ms: 100 } }
        } else {
            VqLength {
                windows: 200,
                ios: 300_000,
                guest_ios: 30_000,
                served: ServedWindows { count: 15, window_ms: 250 },
            }
        }
    }
}

/// All that was measured.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct VqCosts {
    pub(crate) steps: BatchCosts,
    pub(crate) mail_ns: f64,
    /// Unknown, and not charged, where there is one CPU.
    pub(crate) hand_over_ns: Option<f64>,
    /// Extra cost of an I/O on both sides with driver and device on two CPUs: such that one job on one queue takes its
    /// measured time in virtual time. Unknown, and not charged, with one CPU.
    pub(crate) lines_ns: Option<f64>,
    /// To signal the eventfd of a sleeper: printed, and not charged, since there are no sleepers.
    pub(crate) ring: CallCost,
    pub(crate) live: VqLive,
}

impl VqCosts {
    fn prices(&self) -> Prices<'_> {
        Prices {
            steps: &self.steps,
            mail_ns: self.mail_ns,
            hand_over_ns: self.hand_over_ns.unwrap_or(0.0),
            lines_ns: self.lines_ns.unwrap_or(0.0),
        }
    }
}

/// A scene and its result.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(crate) struct VqPoint {
    #[serde(flatten)]
    pub(crate) scene: VqScene,
    pub(crate) cpus: usize,
    #[serde(flatten)]
    pub(crate) outcome: VqResult,
}

/// Measures and plays everything.
///
/// # Errors
/// The machine has no memory or threads left, our own daemon does not serve, or a signal came.
pub(super) fn run(length: VqLength, qemu: &Path, seed: u64, say: impl Fn(String)) -> Result<VqReport, StudyError> {
    say(format!("about {} s with all back-ends; four parts", length.about_s()));
    say("the steps of driver and device, and what two CPUs can run ...".into());
    let costs = measure(length.windows, seed)?;
    if let Some(two_queues) = costs.live.two_queues {
        say(format!("done: two threads, two queues over one: {:.2}", two_queues.median));
    }
    say("virtual time: a guest ...".into());
    let guest = gains::analyse(length.guest_ios, seed)?;
    let [two, four, best] = guest.ratios.map(|ratio| ratio.median);
    say(format!(
        "done: two queues over one: {two:.2} with two jobs (calibrated), {four:.2} with four, {best:.2} at best"
    ));
    say("virtual time: drivers that poll ...".into());
    let point = |scene: VqScene| -> io::Result<VqPoint> {
        Ok(VqPoint { scene, cpus: scene.cpus(), outcome: play(scene, costs.prices(), length.ios)? })
    };
    let grid = [Devices::One, Devices::Each].into_iter().flat_map(|devices| {
        COUNTS.into_iter().flat_map(move |jobs| COUNTS.map(|queues| VqScene { jobs, queues, devices }))
    });
    let grid: Vec<_> = grid.map(point).collect::<Result<_, _>>()?;
    let cpus = CPUS.into_iter().flat_map(on_cpus).map(point).collect::<Result<_, _>>()?;
    let mut simulated_live = [0.0; LIVE_SCENES.len()];
    for (iops, scene) in simulated_live.iter_mut().zip(LIVE_SCENES) {
        *iops = point(scene)?.outcome.iops;
    }
    let [two, four, best] = verdicts::ratios(&grid, Devices::One);
    say(format!("done: with one device thread {two:.2}, {four:.2}, {best:.2}"));
    say("real time, driver and back-end in processes of their own ...".into());
    let served = served::measure(qemu, length.served, seed)?;
    Ok(VqReport::new(VqFigures { length, costs, guest, grid, cpus, simulated_live, served }, seed))
}

/// The forms of `live.rs`, in its order.
const LIVE_SCENES: [VqScene; 4] = [
    VqScene { jobs: 1, queues: 1, devices: Devices::Jobs },
    VqScene { jobs: 2, queues: 1, devices: Devices::Jobs },
    VqScene { jobs: 2, queues: 2, devices: Devices::Jobs },
    VqScene { jobs: 1, queues: 1, devices: Devices::Each },
];

/// The ways to use so many CPUs.
fn on_cpus(cpus: usize) -> Vec<VqScene> {
    let (jobs, half) = (cpus - 1, cpus / 2);
    let mut scenes = vec![VqScene { jobs: cpus, queues: cpus, devices: Devices::Jobs }];
    if cpus > 1 {
        scenes.push(VqScene { jobs: half, queues: half, devices: Devices::Each });
        scenes.push(VqScene { jobs, queues: jobs, devices: Devices::One });
        scenes.push(VqScene { jobs, queues: 1, devices: Devices::Each });
    }
    scenes
}

/// Measures on a separate thread, which is pinned to one CPU.
fn measure(windows: usize, seed: u64) -> io::Result<VqCosts> {
    let measuring = thread::Builder::new().spawn(move || {
        let hand_over_ns = wakes::hand_over_ns(windows)?;
        cpus::pin();
        let (_, ring) = wakes::sleep_and_ring(windows)?;
        let ram = rig::ram()?;
        let steps = steps::steps(&ram, windows, seed)?;
        let live = live::live(&ram, windows, seed)?;
        let mut costs = VqCosts { steps, mail_ns: mail_ns(windows), hand_over_ns, lines_ns: None, ring, live };
        costs.lines_ns = live.apart_ns.map(|apart_ns| lines_ns(&costs, apart_ns)).transpose()?;
        Ok(costs)
    })?;
    measuring.join().unwrap_or_else(|_| Err(io::Error::other("a measuring thread panicked")))
}

/// Cost of cache lines on both sides with which one job on one queue takes this time in virtual time. 0 if it takes as
/// long without.
fn lines_ns(costs: &VqCosts, apart_ns: f64) -> io::Result<f64> {
    let scene = VqScene { jobs: 1, queues: 1, devices: Devices::Each };
    let ios = VqLength::new(true).ios;
    let (mut low, mut high) = (0.0, apart_ns);
    // To a thousandth of a nanosecond.
    for _ in 0..20 {
        let lines_ns = f64::midpoint(low, high);
        let takes_ns = 1e9 / play(scene, Prices { lines_ns, ..costs.prices() }, ios)?.iops;
        *if takes_ns < apart_ns { &mut low } else { &mut high } = lines_ns;
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_use_cpus_uses_no_more_than_there_are() {
        for cpus in CPUS {
            for scene in on_cpus(cpus) {
                assert!(scene.cpus() <= cpus && scene.jobs > 0, "{cpus}: {scene:?}");
            }
        }
    }
}
