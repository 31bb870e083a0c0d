//! Counters of a job: number, bytes and latency for each direction.
//!
//! Plain words of the job's own thread. [`LiveCounters`] is the part that others may read while it runs, published once
//! a round; the rest is returned as a [`Summary`] at the end of the job.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkyard_mq::{Histogram, HistogramSnapshot, Op, OpClass};

/// Counters that anyone may read while the jobs run, by [`OpClass`].
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct LiveCounters {
    ios: [AtomicU64; 4],
    bytes: [AtomicU64; 4],
    first_ns: [AtomicU64; 4],
    last_ns: [AtomicU64; 4],
    in_flight: AtomicU64,
}

impl LiveCounters {
    /// Notes how many I/Os are in flight.
    #[inline]
    pub(crate) fn set_in_flight(&self, in_flight: usize) {
        self.in_flight.store(in_flight as u64, Relaxed);
    }

    /// I/Os in flight, as of the last round.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// Counters so far, without latencies, of a job that reports none.
    pub(crate) fn summary(&self) -> Summary {
        let class = |index: usize| ClassSummary {
            ios: self.ios[index].load(Relaxed),
            bytes: self.bytes[index].load(Relaxed),
            first_ns: self.first_ns[index].load(Relaxed),
            last_ns: self.last_ns[index].load(Relaxed),
            ..ClassSummary::default()
        };
        Summary { classes: std::array::from_fn(class), depths: [0; DEPTHS] }
    }

    /// I/Os and bytes of one class so far.
    pub(crate) fn of(&self, class: OpClass) -> (u64, u64) {
        (self.ios[class as usize].load(Relaxed), self.bytes[class as usize].load(Relaxed))
    }
}

/// One direction of one job.
#[derive(Debug, Default)]
struct DirectionTally {
    ios: u64,
    bytes: u64,
    errors: u64,
    sum_ns: u64,
    /// Of squares of nanoseconds; a float, since an integer would overflow.
    sum_ns2: f64,
    min_ns: u64,
    max_ns: u64,
    first_ns: u64,
    last_ns: u64,
    latency: Histogram,
}

/// Completions in a row that took as long: a batch shares its timestamps, so most do.
#[derive(Clone, Copy, Debug)]
struct LatencyRun {
    class: OpClass,
    latency_ns: u64,
    ios: u64,
}

/// Levels of the depth distribution: 1, 2, 4, ... 32, and 64 and more, as fio has them.
pub(crate) const DEPTHS: usize = 7;

/// All that one job counts.
#[derive(Debug)]
pub(crate) struct Tallies {
    classes: [DirectionTally; 4],
    run: LatencyRun,
    depths: [u64; DEPTHS],
    block_bytes: u64,
}

impl Tallies {
    pub(crate) fn new(block_bytes: u32) -> Tallies {
        Tallies {
            classes: std::array::from_fn(|_| DirectionTally::default()),
            run: LatencyRun { class: OpClass::Read, latency_ns: 0, ios: 0 },
            depths: [0; DEPTHS],
            block_bytes: block_bytes.into(),
        }
    }

    /// An I/O was submitted and is the `in_flight`th.
    #[inline]
    pub(crate) fn submitted(&mut self, op: Op, in_flight: usize, now_ns: u64) {
        self.depths[(in_flight.max(1).ilog2() as usize).min(DEPTHS - 1)] += 1;
        let tally = &mut self.classes[OpClass::of(op) as usize];
        if tally.first_ns == 0 {
            tally.first_ns = now_ns;
        }
    }

    /// An I/O was done.
    #[inline]
    pub(crate) fn ended(&mut self, op: Op, latency_ns: u64) {
        let class = OpClass::of(op);
        if self.run.class != class || self.run.latency_ns != latency_ns {
            self.flush();
            self.run = LatencyRun { class, latency_ns, ios: 0 };
        }
        self.run.ios += 1;
    }

    /// An I/O failed.
    pub(crate) fn failed(&mut self, op: Op) {
        self.classes[OpClass::of(op) as usize].errors += 1;
    }

    fn flush(&mut self) {
        let LatencyRun { class, latency_ns, ios } = self.run;
        if ios == 0 {
            return;
        }
        self.run.ios = 0;
        let tally = &mut self.classes[class as usize];
        tally.min_ns = if tally.ios == 0 { latency_ns } else { tally.min_ns.min(latency_ns) };
        tally.max_ns = tally.max_ns.max(latency_ns);
        tally.ios += ios;
        if class != OpClass::Flush {
            tally.bytes += ios * self.block_bytes;
        }
        tally.sum_ns += latency_ns * ios;
        tally.sum_ns2 += latency_ns as f64 * latency_ns as f64 * ios as f64;
        tally.latency.record(latency_ns, ios);
    }

    /// Ends a round: publishes the counters.
    #[inline]
    pub(crate) fn publish(&mut self, live: &LiveCounters, now_ns: u64) {
        self.flush();
        for (index, tally) in self.classes.iter_mut().enumerate() {
            if live.ios[index].load(Relaxed) != tally.ios {
                tally.last_ns = now_ns;
                live.ios[index].store(tally.ios, Relaxed);
                live.bytes[index].store(tally.bytes, Relaxed);
                live.first_ns[index].store(tally.first_ns, Relaxed);
                live.last_ns[index].store(tally.last_ns, Relaxed);
            }
        }
    }

    /// All counters, at the end of the job.
    pub(crate) fn summary(&self) -> Summary {
        Summary { classes: std::array::from_fn(|index| self.classes[index].summary()), depths: self.depths }
    }
}

impl DirectionTally {
    fn summary(&self) -> ClassSummary {
        ClassSummary {
            ios: self.ios,
            bytes: self.bytes,
            errors: self.errors,
            min_ns: self.min_ns,
            max_ns: self.max_ns,
            sum_ns: self.sum_ns as f64,
            sum_ns2: self.sum_ns2,
            first_ns: self.first_ns,
            last_ns: self.last_ns,
            latency: self.latency.snapshot(),
        }
    }
}

/// Results of one job, or several together, in one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClassSummary {
    pub(crate) ios: u64,
    pub(crate) bytes: u64,
    pub(crate) errors: u64,
    pub(crate) min_ns: u64,
    pub(crate) max_ns: u64,
    sum_ns: f64,
    sum_ns2: f64,
    first_ns: u64,
    last_ns: u64,
    pub(crate) latency: HistogramSnapshot,
}

impl ClassSummary {
    /// Time from the first submission to the last completion.
    pub(crate) fn ran_ns(&self) -> u64 {
        self.last_ns.saturating_sub(self.first_ns)
    }

    /// I/Os each second.
    pub(crate) fn iops(&self) -> f64 {
        per_second(self.ios, self.ran_ns())
    }

    /// Bytes each second.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        per_second(self.bytes, self.ran_ns())
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        if self.ios == 0 { 0.0 } else { self.sum_ns / self.ios as f64 }
    }

    /// Standard deviation of the sample.
    pub(crate) fn stddev_ns(&self) -> f64 {
        if self.ios < 2 {
            return 0.0;
        }
        let n = self.ios as f64;
        ((self.sum_ns2 - self.sum_ns * self.sum_ns / n) / (n - 1.0)).max(0.0).sqrt()
    }

    fn merge(&mut self, other: &ClassSummary) {
        if other.first_ns == 0 {
            return;
        }
        if self.first_ns == 0 {
            *self = other.clone();
            return;
        }
        self.min_ns = match (self.ios, other.ios) {
            (0, _) => other.min_ns,
            (_, 0) => self.min_ns,
            _ => self.min_ns.min(other.min_ns),
        };
        self.max_ns = self.max_ns.max(other.max_ns);
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.sum_ns += other.sum_ns;
        self.sum_ns2 += other.sum_ns2;
        self.first_ns = self.first_ns.min(other.first_ns);
        self.last_ns = self.last_ns.max(other.last_ns);
        self.latency.merge(&other.latency);
    }
}

fn per_second(count: u64, ns: u64) -> f64 {
    if ns == 0 { 0.0 } else { count as f64 * 1e9 / ns as f64 }
}

/// Results of one job, or several together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    classes: [ClassSummary; 4],
    pub(crate) depths: [u64; DEPTHS],
}

impl Summary {
    pub(crate) fn of(&self, class: OpClass) -> &ClassSummary {
        &self.classes[class as usize]
    }

    pub(crate) fn ios(&self) -> u64 {
        self.classes.iter().map(|class| class.ios).sum()
    }

    pub(crate) fn errors(&self) -> u64 {
        self.classes.iter().map(|class| class.errors).sum()
    }

    /// From the first submission of any job to the last completion.
    pub(crate) fn ran_ns(&self) -> u64 {
        let used = || self.classes.iter().filter(|class| class.first_ns > 0);
        let first = used().map(|class| class.first_ns).min().unwrap_or(0);
        used().map(|class| class.last_ns).max().unwrap_or(0).saturating_sub(first)
    }

    pub(crate) fn merge(&mut self, other: &Summary) {
        self.classes.iter_mut().zip(&other.classes).for_each(|(to, from)| to.merge(from));
        self.depths.iter_mut().zip(other.depths).for_each(|(to, from)| *to += from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tallied(latencies: &[u64], start_ns: u64) -> Summary {
        let (mut tallies, live) = (Tallies::new(512), LiveCounters::default());
        for latency in latencies {
            tallies.submitted(Op::Read, 1, start_ns);
            tallies.ended(Op::Read, *latency);
        }
        tallies.publish(&live, start_ns + 1000);
        assert_eq!(live.of(OpClass::Read), (latencies.len() as u64, latencies.len() as u64 * 512));
        tallies.summary()
    }

    #[test]
    fn jobs_together_are_as_if_one_had_done_it_all() {
        let mut together = Summary::default();
        together.merge(&tallied(&[10, 10, 20], 100));
        together.merge(&tallied(&[], 50));
        together.merge(&tallied(&[60], 600));
        let read = together.of(OpClass::Read);
        assert_eq!((read.ios, read.min_ns, read.max_ns, read.ran_ns()), (4, 10, 60, 1500));
        assert!((read.mean_ns() - 25.0).abs() < 1e-9);
        // Of 10, 10, 20, 60.
        assert!((read.stddev_ns() - 23.804_761).abs() < 1e-3, "{}", read.stddev_ns());
        assert!((read.iops() - 4.0 / 1500e-9).abs() < 1.0);
        assert_eq!(read.latency.samples(), 4);
    }

    #[test]
    fn depths_are_counted_as_fio_does() {
        let mut tallies = Tallies::new(512);
        [1, 2, 3, 4, 63, 64, 1000].into_iter().for_each(|depth| tallies.submitted(Op::Write, depth, 1));
        assert_eq!(tallies.summary().depths, [1, 2, 1, 0, 0, 1, 2]);
    }
}
