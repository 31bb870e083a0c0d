//! Cells of a hardware queue that threads share: cost of rings and baton over the null device, for one thread and for
//! two.
//!
//! Threads poll and never sleep: wake-ups are a cost of the system, and `core-*` have none either.

use std::sync::Arc;

use blkyard_lab::floor::{HAND_OFF, MachineLimit, RandomOffsets, Round, WindowPlan, together, variant};
use blkyard_mq::{Bio, BlockDevice, HwQueue, HwQueueConfig, NullConfig, NullDevice, NullQueue, Parker, SwQueue, Wake};
use blkyard_os::Clock;

use crate::core::clock;
use crate::limits::measure_beside;
use crate::load::{bios, fill, info, null};
use crate::report::{self, CellReport, Figure};

const BATCH: usize = 32;

/// For threads that never sleep.
struct Restless;

impl Wake for Restless {
    fn wake(&self) {}
}

impl Parker for Restless {
    fn sleep(&self) {
        std::thread::yield_now();
    }

    fn watch(&self, _deadline_ns: u64) {
        std::thread::yield_now();
    }
}

/// One thread's load at its end of a shared queue.
struct SharedLoad {
    queue: SwQueue<NullQueue, ()>,
    clock: Clock,
    free: Vec<Box<Bio>>,
    places: RandomOffsets,
}

impl SharedLoad {
    /// Threads that share one queue.
    fn sharing(threads: usize) -> Vec<SharedLoad> {
        let device = NullDevice::new(info(), NullConfig::default());
        let depth = BATCH * threads;
        let config = HwQueueConfig { depth, bios_max: depth, ..HwQueueConfig::default() };
        let hw = HwQueue::new(device.queue(depth), Arc::new(info()), config);
        let parkers = (0..threads).map(|_| Arc::new(Restless) as Arc<dyn Parker>).collect();
        let load = |queue| SharedLoad { queue, clock: Clock::new(), free: bios(BATCH), places: RandomOffsets::new() };
        SwQueue::share(hw, (), BATCH, parkers).into_iter().map(load).collect()
    }
}

impl Round for SharedLoad {
    #[inline]
    fn round(&mut self) -> u64 {
        let SharedLoad { queue, clock, free, places } = self;
        let clock = &|| clock.now_ns();
        let ended = queue.poll(clock, &mut |bio| free.push(bio));
        if !free.is_empty() {
            for mut bio in free.drain(..) {
                fill(&mut bio, places);
                queue.submit(bio);
            }
            queue.ring(clock);
        }
        ended as u64
    }
}

impl Drop for SharedLoad {
    fn drop(&mut self) {
        while self.queue.in_flight() > 0 {
            self.queue.poll(&|| self.clock.now_ns(), &mut |_| ());
        }
    }
}

/// `shared-null-*`: the cost through a shared queue, and how many times one thread that owns its queue two are that
/// share one.
pub fn null_cells(plan: WindowPlan, report: &mut CellReport) {
    let (one, two, times) = ("shared-null-b32", "shared-null-b32-threads2", "shared-null-2x1-b32");
    if report.wants(one)
        && let Some(load) = SharedLoad::sharing(1).pop()
    {
        let ([shared], floors) = measure_beside(plan, &[one], [variant(load)]);
        report.add(Figure::cost(one, &shared).over(&floors));
    }
    if !report.wants(two) && !report.wants(times) {
        return;
    }
    let mut loads = SharedLoad::sharing(2);
    let (Some(ours), Some(theirs)) = (loads.pop(), loads.pop()) else { return };
    let limits = MachineLimit::of(HAND_OFF).map_or_else(|| Err("no such limit".into()), MachineLimit::variant);
    match together(ours, theirs).and_then(|shared| Ok((shared, limits?))) {
        Err(why) => report::skip(two, &why),
        Ok((shared, hand_off)) => {
            let variants = [shared, variant(null(BATCH, true, clock())), hand_off];
            let ([shared, alone, hand_off], floors) = measure_beside(plan, &[two], variants);
            report.add(Figure::cost(two, &shared).over(&floors).across(&hand_off));
            report.add(Figure::times(times, &alone, &shared).over(&floors).across(&hand_off));
        }
    }
}
