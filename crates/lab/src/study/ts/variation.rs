//! What makes two runs on one machine differ, beside where files lie: threads that wake late, and other I/O.
//!
//! Nothing is published about the post's machine, so both amounts are assumed. The times of a wake-up are those of an
//! idle Linux machine without real-time settings: some tens of microseconds, now and then the rest of a tick that
//! another thread has. The other I/O is that of a desktop's services: a log, a database of mail, a page of a program,
//! from ten accesses a second in one run to one in three seconds in another.

use blkyard_mq::Op;
use blkyard_sim::Rng;

use super::rig::{Hands, MS, TimesliceRequest, TimesliceSubmitter};

/// Mean time from a completion to its thread's next step, and its bounds: none, and twice as much.
const WAKE_NS: u64 = 20_000;
/// One wake-up in so many waits for another thread, until the next tick at most (250 a second).
const BUSY_ONE_IN: u64 = 1000;
const TICK_NS: u64 = 4 * MS;
/// Shortest mean time between two accesses; each power of two up to 32 times as long is as likely.
const GAP_NS: u64 = 100 * MS;
const GAP_LOG2_MAX: u64 = 5;
/// Where the other I/O is: the first 64 GB.
const RANGE_SECTORS: u64 = 125_000_000;
/// Largest access in units of 4 KiB.
const UNITS_MAX: u64 = 16;
/// Stream of the other I/O.
const STREAM: u32 = 9;

/// Time until a thread that waited for a completion runs, ns.
pub(super) fn wake_delay_ns(rng: &mut Rng) -> u64 {
    let busy_ns = if rng.below(BUSY_ONE_IN) == 0 { rng.below(TICK_NS) } else { 0 };
    rng.below(2 * WAKE_NS) + busy_ns
}

/// The machine's other I/O: single reads and synchronous writes anywhere, for as long as the others run.
#[derive(Debug)]
pub(super) struct OtherIo {
    /// Mean time between two accesses.
    gap_ns: u64,
}

impl OtherIo {
    /// As much as this run has by its seed.
    pub(super) fn new(seed: u64) -> OtherIo {
        OtherIo { gap_ns: GAP_NS << Rng::new(seed ^ 0x6f74_6865_7269_6f21).below(GAP_LOG2_MAX + 1) }
    }

    fn sleep(&self, hands: &mut Hands<'_>) {
        let delay_ns = hands.rng.below(2 * self.gap_ns);
        hands.wake_after(delay_ns, 1);
    }
}

impl TimesliceSubmitter for OtherIo {
    fn wake(&mut self, word: u64, hands: &mut Hands<'_>) {
        if word > 0 {
            let writes = hands.rng.below(2) == 0;
            let sectors = 8 * (1 + hands.rng.below(UNITS_MAX));
            let sector = hands.rng.below((RANGE_SECTORS - sectors) / 8) * 8;
            hands.submit(TimesliceRequest {
                op: if writes { Op::Write } else { Op::Read },
                sector,
                sectors: sectors as u32,
                stream: STREAM,
                sync: true,
                ..TimesliceRequest::default()
            });
        }
        self.sleep(hands);
    }

    fn ended(&mut self, _: &TimesliceRequest, _: &mut Hands<'_>) {}

    fn is_over(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::ts::job::TimesliceJob;
    use crate::study::ts::rig::{S, TimesliceScene, run};
    use blkyard_mq::SchedulerConfig;
    use blkyard_sim::DiskModel;

    #[test]
    fn runs_have_other_io_in_different_amounts() {
        let accesses = |seed| {
            let mut scene = TimesliceScene::disk(DiskModel::DESKTOP_2012, SchedulerConfig::None, seed);
            (scene.wakes_late, scene.until_ns) = (true, 60 * S);
            let mut job = TimesliceJob::in_a_row(1, 1 << 28, 256, 1);
            run(scene, &mut [&mut job, &mut OtherIo::new(seed)]).unwrap()[1].ios
        };
        let all: Vec<_> = (0..12).map(accesses).collect();
        let (least, most) = (*all.iter().min().unwrap(), *all.iter().max().unwrap());
        assert!((10..60).contains(&least) && (200..900).contains(&most), "{all:?}");
    }

    #[test]
    fn a_thread_wakes_within_microseconds_and_seldom_a_tick_later() {
        let mut rng = Rng::new(1);
        let mut all: Vec<_> = (0..100_000).map(|_| wake_delay_ns(&mut rng)).collect();
        all.sort_unstable();
        let late = all.iter().filter(|ns| **ns > 2 * WAKE_NS).count();
        assert!((15_000..25_000).contains(&all[50_000]) && (50..150).contains(&late), "{} {late}", all[50_000]);
        assert!(all[99_999] < TICK_NS + 2 * WAKE_NS);
    }
}
