//! Schedulers alone, with ten thousand bios queued: cost of insertion, dispatch and completion.
//!
//! A round dispatches a batch, completes it, and inserts the same bios again. Time is simulated: each request takes so
//! long that a slice of time slices is a few dozen requests. With many streams each has few bios, the hardest case: all
//! memory is cold.

use blkyard_lab::floor::{RandomOffsets, Round};
use blkyard_mq::{
    Bio, DeadlineConfig, DeviceInfo, FairConfig, KyberConfig, Op, Scheduler, SchedulerConfig, Selected, TimesliceConfig,
};

/// Queued bios, and bios of a batch.
const QUEUED: usize = 10_000;
const BATCH: usize = 32;
/// How long a request takes.
const REQUEST_NS: u64 = 10_000;
/// Sectors of the device, in blocks of 4 KiB.
const BLOCKS: u32 = 1 << 24;

/// A scheduler, and its dispatched bios.
pub struct Queued {
    scheduler: Box<dyn Scheduler>,
    out: Vec<Box<Bio>>,
    places: RandomOffsets,
    /// Next sector of each sequence; random bios without any.
    rows: Vec<u64>,
    row: usize,
    now_ns: u64,
}

impl Queued {
    /// With the bios of so many streams, which come in turn.
    pub fn new(config: SchedulerConfig, streams: u32) -> Queued {
        let Some(scheduler) = config.build(BATCH, QUEUED, &DeviceInfo::default()) else {
            panic!("{} is no scheduler", config.name())
        };
        let out = Vec::with_capacity(BATCH);
        let mut queued = Queued { scheduler, out, places: RandomOffsets::new(), rows: Vec::new(), row: 0, now_ns: 0 };
        for number in 0..QUEUED as u32 {
            let mut bio = Bio::with_capacity(1);
            bio.stream = number % streams + 1;
            bio.op = if number % 4 == 0 { Op::Write } else { Op::Read };
            bio.sectors = 8;
            queued.insert(bio);
        }
        queued
    }

    /// With the bios of a guest: reads of so many interleaved sequences, or random ones.
    pub fn of_guest(config: SchedulerConfig, sequences: u64) -> Queued {
        let mut queued = Queued::new(config, 1);
        let scheduler = config.build(BATCH, QUEUED, &DeviceInfo::default());
        let mut bios = Vec::with_capacity(QUEUED);
        scheduler.map(|new| std::mem::replace(&mut queued.scheduler, new)).iter_mut().for_each(|old| {
            old.drain(&mut |bio| bios.push(bio));
        });
        queued.rows = (0..sequences).map(|row| row * u64::from(BLOCKS) * 8 / sequences).collect();
        for mut bio in bios {
            (bio.stream, bio.op) = (0, Op::Read);
            queued.insert(bio);
        }
        queued
    }

    fn insert(&mut self, mut bio: Box<Bio>) {
        bio.sector = match self.rows.get_mut(self.row) {
            Some(next) => {
                self.row += 1;
                std::mem::replace(next, *next + 8)
            }
            None => self.places.next(BLOCKS) * 8,
        };
        if self.row == self.rows.len() {
            self.row = 0;
        }
        self.scheduler.insert(bio, self.now_ns);
    }
}

impl Round for Queued {
    fn round(&mut self) -> u64 {
        while self.out.len() < BATCH {
            match self.scheduler.next(self.now_ns) {
                Selected::Bio(bio) => self.out.push(bio),
                Selected::Wait(_) => break,
            }
            self.now_ns += REQUEST_NS;
        }
        let count = self.out.len();
        let mut out = std::mem::take(&mut self.out);
        for bio in out.drain(..) {
            self.scheduler.ended(&bio, self.now_ns, self.now_ns);
            self.insert(bio);
        }
        self.out = out;
        count as u64
    }
}

/// `deadline` as it is by itself, with so many streams.
pub fn deadline(streams: u32) -> Queued {
    Queued::new(SchedulerConfig::Deadline(DeadlineConfig::default()), streams)
}

/// `kyber` as it is by itself.
pub fn kyber(streams: u32) -> Queued {
    Queued::new(SchedulerConfig::Kyber(KyberConfig::default()), streams)
}

/// `fair` with its defaults and so many streams: they mix, since completions at once show no seeks.
pub fn fair(streams: u32) -> Queued {
    Queued::new(SchedulerConfig::Fair(FairConfig::default()), streams)
}

/// `fair` with its defaults, behind which a guest reads so many sequences, or at random.
pub fn guest(sequences: u64) -> Queued {
    Queued::of_guest(SchedulerConfig::Fair(FairConfig::default()), sequences)
}

/// Slices of 250 µs.
pub fn slices() -> SchedulerConfig {
    SchedulerConfig::Timeslice(TimesliceConfig { slice_us: 250, ..TimesliceConfig::default() })
}
