//! A scheduler driven by hand: bios are inserted, and dispatched ones checked, with a manual clock.

mod any;
mod deadline;
mod fair;
mod kyber;
mod timeslice;

use super::{Reach, Scheduler, SchedulerConfig, Selected};
use crate::{Bio, DeviceInfo, Op, Priority};

/// Nanoseconds in a millisecond.
const MS: u64 = 1_000_000;

/// A read of 4 KiB by a stream.
fn read(stream: u32, sector: u64) -> Box<Bio> {
    bio(Op::Read, stream, sector)
}

/// An asynchronous write of 4 KiB.
fn write(stream: u32, sector: u64) -> Box<Bio> {
    bio(Op::Write, stream, sector)
}

fn bio(op: Op, stream: u32, sector: u64) -> Box<Bio> {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.stream, bio.sector, bio.sectors) = (op, stream, sector, 8);
    bio.submitter = stream as u16;
    bio
}

fn with(mut bio: Box<Bio>, priority: Priority) -> Box<Bio> {
    bio.priority = priority;
    bio
}

/// A scheduler, its clock, and the bios it has handed out.
struct Hand {
    scheduler: Box<dyn Scheduler>,
    now_ns: u64,
    out: Vec<Box<Bio>>,
    /// Time of its latest `Wait`.
    until_ns: u64,
}

impl Hand {
    /// For a queue of 8 tags and 64 bios.
    fn new(config: SchedulerConfig) -> Hand {
        Hand::of(config, 64)
    }

    fn of(config: SchedulerConfig, bios_max: usize) -> Hand {
        let scheduler = config.build(8, bios_max, &DeviceInfo::default()).expect("there is a scheduler");
        Hand { scheduler, now_ns: 0, out: Vec::new(), until_ns: 0 }
    }

    fn at(&mut self, now_ns: u64) -> &mut Hand {
        self.now_ns = now_ns;
        self
    }

    fn insert(&mut self, bios: impl IntoIterator<Item = Box<Bio>>) -> &mut Hand {
        bios.into_iter().for_each(|bio| self.scheduler.insert(bio, self.now_ns));
        self
    }

    /// The first sector of the next bio.
    fn next(&mut self) -> Option<u64> {
        match self.scheduler.next(self.now_ns) {
            Selected::Bio(bio) => {
                let sector = bio.sector;
                self.out.push(bio);
                Some(sector)
            }
            Selected::Wait(until_ns) => {
                assert!(until_ns > self.now_ns, "it says to wait until {until_ns} at {}", self.now_ns);
                self.until_ns = until_ns;
                None
            }
        }
    }

    /// Those that come now, one after the other.
    fn take(&mut self, count: usize) -> Vec<u64> {
        std::iter::from_fn(|| self.next()).take(count).collect()
    }

    fn all(&mut self) -> Vec<u64> {
        self.take(usize::MAX)
    }

    /// Joins a bio adjacent to these sectors.
    fn join(&mut self, start: u64, end: u64) -> Option<u64> {
        let bio = self.scheduler.join(Reach { start, end }, &mut |_| true, self.now_ns)?;
        let sector = bio.sector;
        self.out.push(bio);
        Some(sector)
    }

    /// Ends the dispatched bio with this first sector.
    fn end(&mut self, sector: u64) -> &mut Hand {
        let at = self.out.iter().position(|bio| bio.sector == sector).expect("it is out");
        let bio = self.out.remove(at);
        self.scheduler.ended(&bio, self.now_ns, self.now_ns);
        self
    }

    /// Ends all dispatched bios, after this service time.
    fn end_all_after(&mut self, io_ns: u64) -> &mut Hand {
        for bio in std::mem::take(&mut self.out) {
            self.scheduler.ended(&bio, self.now_ns - io_ns, self.now_ns);
        }
        self
    }

    fn end_all(&mut self) -> &mut Hand {
        self.end_all_after(0)
    }

    fn fact(&self, name: &str) -> Option<u64> {
        let facts = self.scheduler.snapshot(self.now_ns).facts;
        facts.iter().find(|fact| fact.0 == name).map(|fact| fact.1)
    }
}
