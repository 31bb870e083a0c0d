//! Costs of the steps of driver and device on this machine, measured one after another on one thread:
//!
//! ```text
//!   job: fill n ─▶ driver: requests, chains, publish ─▶ device: fetch, parse, copy
//!                                        ... ◀─ driver: reap n ◀─ complete, publish ◀┘
//! ```
//!
//! Each step is between two clock reads, whose own cost is measured in the same windows and subtracted. Rigs and
//! batches take turns; a figure is the 10th percentile of its windows. A window in which the thread was off its CPU is
//! repeated.

use std::hint::black_box;
use std::io;

use blkyard_mq::{Bio, BlockDevice, Driver, RamDevice};
use blkyard_os::now_ns;
use blkyard_sim::Rng;
use serde::Serialize;

use super::rig::{self, Half, RING, Tie, VqRigQueue, part, tie};
use crate::floor::windows::Samples;
use crate::study::costs::{BATCHES, Curve};
use crate::study::measure::whole_window;

/// Rounds between two checks of the window's end.
const CYCLES: usize = 16;

/// Nanoseconds for each step by its batch.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct BatchCosts {
    /// The job makes its bios.
    pub(crate) fill: Curve,
    /// The driver's queue takes them: requests, chains, one publish that decides on a kick.
    pub(crate) submit: Curve,
    /// The device's turn, with the copy.
    pub(crate) turn: Curve,
    /// The same without the copy: fetch, parse, answer, publish.
    pub(crate) turn_null: Curve,
    /// The driver's queue returns used chains.
    pub(crate) reap: Curve,
}

/// The sections of a cycle.
const SECTIONS: usize = 6;
/// Two more phases: a round of the device without work, and a clock read alone.
const IDLE: usize = 4;
const CLOCK: usize = 5;

/// A queue with separated halves. The connection is dropped last.
struct DetachedRig<D: Driver<()>> {
    queue: VqRigQueue<D>,
    device: Half<D>,
    /// All bios; those that are out are not in it.
    free: Vec<Box<Bio>>,
    batch: Vec<Box<Bio>>,
    rng: Rng,
    _tie: Tie<D>,
}

impl<D: Driver<()>> DetachedRig<D> {
    fn new<B: BlockDevice<Queue = D>>(name: &str, device: &B, seed: u64) -> io::Result<DetachedRig<D>> {
        let bios = usize::from(RING);
        let (tie, queues) = tie(name, device, &[bios])?;
        let [mut queue] = <[_; 1]>::try_from(queues).map_err(|_| io::Error::other("not one queue"))?;
        let device = part(&mut queue)?;
        let bio = |slot| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = slot;
            bio
        };
        let free: Vec<_> = (0..bios as u64).map(bio).collect();
        Ok(DetachedRig { queue, device, free, batch: Vec::with_capacity(bios), rng: Rng::new(seed), _tie: tie })
    }

    /// One window with batches of this size; nanoseconds of each section of one cycle, the clock's own last.
    fn window(&mut self, batch: usize) -> [f64; SECTIONS] {
        let (rounds, sums) = whole_window(|| {
            let mut sums = [0; SECTIONS];
            for _ in 0..CYCLES {
                sums.iter_mut().zip(self.cycle(batch)).for_each(|(sum, took)| *sum += took);
            }
            sums
        });
        sums.map(|sum| sum as f64 / (rounds * CYCLES) as f64)
    }

    #[inline]
    fn cycle(&mut self, batch: usize) -> [u64; SECTIONS] {
        let start = now_ns();
        // Those that have waited longest, so that the buffers are as cold as the batch is large.
        for mut bio in self.free.drain(..batch) {
            let buffer = bio.cookie as usize;
            rig::fill(&mut bio, buffer, &mut self.rng);
            self.batch.push(bio);
        }
        let filled = now_ns();
        self.batch.drain(..).for_each(|bio| self.queue.submit(bio));
        self.queue.issue(&mut (), start);
        let submitted = now_ns();
        // As many rounds as needed, and one without work.
        while self.device.run_once(&mut (), submitted) {}
        let turned = now_ns();
        self.device.run_once(&mut (), submitted);
        let idled = now_ns();
        let free = &mut self.free;
        black_box(self.queue.reap(&mut (), idled, &mut |bio| free.push(bio)));
        let reaped = now_ns();
        let over = now_ns();
        [filled - start, submitted - filled, turned - submitted, reaped - idled, idled - turned, over - reaped]
    }
}

/// Measures all steps in so many windows each.
///
/// # Errors
/// There is no memory.
pub(super) fn steps(ram: &RamDevice, windows: usize, seed: u64) -> io::Result<BatchCosts> {
    let (mut ram, mut null) =
        (DetachedRig::new("steps-ram", ram, seed)?, DetachedRig::new("steps-null", &rig::null(), seed)?);
    let mut samples: [[[Samples; SECTIONS]; 2]; BATCHES.len()] = Default::default();
    for _ in 0..windows {
        for (batch, of_batch) in BATCHES.into_iter().zip(&mut samples) {
            for (sections, of_rig) in [ram.window(batch), null.window(batch)].into_iter().zip(of_batch) {
                of_rig.iter_mut().zip(sections).for_each(|(samples, value)| samples.push(value));
            }
        }
    }
    let mut steps = BatchCosts::default();
    for (place, [of_ram, of_null]) in samples.iter().enumerate() {
        let less = |of: &[Samples; SECTIONS], at: usize, other: usize| (of[at].cost() - of[other].cost()).max(0.0);
        let section = |of: &[Samples; SECTIONS], at: usize| less(of, at, CLOCK);
        steps.fill.0[place] = section(of_ram, 0);
        steps.submit.0[place] = section(of_ram, 1);
        steps.turn.0[place] = less(of_ram, 2, IDLE);
        steps.turn_null.0[place] = less(of_null, 2, IDLE);
        steps.reap.0[place] = section(of_ram, 3);
    }
    Ok(steps)
}
