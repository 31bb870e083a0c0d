//! Statistics, always on: counters and a latency histogram for each hardware queue.
//!
//! One writer, the queue's owner, with plain loads and stores; any number of readers, who see each number whole and the
//! set of them a moment apart. Completions of one batch share their timestamp, so runs of equal latencies are counted
//! together.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Op;
use crate::limits::Merge;

/// Kinds of operation with separate counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum OpClass {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards and writes of zeroes.
    Trim,
}

impl OpClass {
    /// All of them, in the order of their numbers.
    pub const ALL: [OpClass; 4] = [OpClass::Read, OpClass::Write, OpClass::Flush, OpClass::Trim];

    /// The class of an operation.
    #[inline]
    pub fn of(op: Op) -> OpClass {
        match op {
            Op::Read => OpClass::Read,
            Op::Write => OpClass::Write,
            Op::Flush => OpClass::Flush,
            Op::Discard | Op::WriteZeroes => OpClass::Trim,
        }
    }
}

/// Causes that hold a bio before dispatch: see `hw/wait.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Held {
    /// A limit on I/Os or bytes a second.
    Limit,
    /// A scheduler that could have passed it on.
    Scheduler,
    /// No free tag.
    Tag,
    /// A driver that does not take its request, or handed it back.
    Dispatch,
}

impl Held {
    /// All of them, in the order of their numbers.
    pub const ALL: [Held; 4] = [Held::Limit, Held::Scheduler, Held::Tag, Held::Dispatch];

    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Held::Limit => "limit",
            Held::Scheduler => "scheduler",
            Held::Tag => "tag",
            Held::Dispatch => "dispatch",
        }
    }
}

/// Adds without a locked instruction: there is one writer.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Number of bits of a byte, as a table: faster than the bit-scan instruction of some processors.
const BITS: [u8; 33] = {
    let (mut bits, mut n) = ([0; 33], 1);
    while n < bits.len() {
        bits[n] = n.ilog2() as u8 + 1;
        n += 1;
    }
    bits
};

const SUB_BITS: u32 = 5;
/// Values from here on fall into the last bucket: 2^37 ns, more than two minutes.
const VALUE_BITS: u32 = 37;
const BUCKETS: usize = ((VALUE_BITS - SUB_BITS + 1) as usize) << SUB_BITS;
/// Of a word with a bucket and a count, those of the count.
const COUNT_BITS: u32 = 48;

/// A log-linear histogram of nanoseconds: exact below 32, then 32 buckets to each power of two, so that a value is off
/// by at most 1/32. The layout is that of HdrHistogram.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64; BUCKETS]>,
    /// The latest record, stored into its bucket when the next one comes: bucket and count, as made by
    /// [`Histogram::late`]. The bucket's address depends on the clock that was just read; a store to it would delay
    /// later instructions.
    last: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: Box::new([const { AtomicU64::new(0) }; BUCKETS]), last: AtomicU64::new(0) }
    }
}

impl Histogram {
    #[inline]
    fn index(value: u64) -> usize {
        let shift = (value | 1 << SUB_BITS).ilog2() - SUB_BITS;
        (((shift as usize) << SUB_BITS) + (value >> shift) as usize).min(BUCKETS - 1)
    }

    /// The largest value that falls into the bucket.
    fn upper(index: usize) -> u64 {
        let shift = (index >> SUB_BITS).saturating_sub(1) as u32;
        (((index - ((shift as usize) << SUB_BITS)) as u64 + 1) << shift) - 1
    }

    /// Counts a value `n` times, fewer than 2^48.
    #[inline]
    pub fn record(&self, value: u64, n: u64) {
        let last = self.last.load(Relaxed);
        self.last.store((Histogram::index(value) as u64) << COUNT_BITS | n, Relaxed);
        let (index, n) = Histogram::late(last);
        add(&self.buckets[index], n);
    }

    /// Bucket and count of the record that is not in its bucket yet.
    #[inline]
    fn late(last: u64) -> (usize, u64) {
        ((last >> COUNT_BITS) as usize, last & ((1 << COUNT_BITS) - 1))
    }

    /// Counts so far. During concurrent updates the latest record may be missing.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let mut counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).collect();
        let (index, n) = Histogram::late(self.last.load(Relaxed));
        counts[index] += n;
        HistogramSnapshot { counts }
    }
}

/// The counts of a [`Histogram`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    counts: Vec<u64>,
}

impl Default for HistogramSnapshot {
    fn default() -> Self {
        HistogramSnapshot { counts: vec![0; BUCKETS] }
    }
}

impl HistogramSnapshot {
    /// How many values were counted.
    pub fn samples(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The value that `percent` of the samples do not exceed, in nanoseconds, rounded up to its bucket's end; zero
    /// without samples.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        let samples = self.samples();
        let rank = ((samples as f64 * percent / 100.0).ceil() as u64).clamp(1, samples.max(1));
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Histogram::upper(index);
            }
        }
        0
    }

    /// Each bucket that holds samples: its largest value and its count.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(i, count)| (Histogram::upper(i), *count))
    }

    /// Adds the counts of another.
    pub fn merge(&mut self, other: &HistogramSnapshot) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(to, from)| *to += from);
    }

    /// Counts since an earlier snapshot of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &HistogramSnapshot) -> HistogramSnapshot {
        // A record pending at the earlier snapshot may be missing in the later one.
        let counts = self.counts.iter().zip(&earlier.counts).map(|(now, then)| now.saturating_sub(*then)).collect();
        HistogramSnapshot { counts }
    }

    /// Bounds of the smallest and the largest sample; `None` without samples.
    fn bounds_ns(&self) -> Option<(u64, u64)> {
        let first = self.counts.iter().position(|count| *count > 0)?;
        let last = self.counts.iter().rposition(|count| *count > 0)?;
        // The last bucket takes all that is longer.
        let upper = if last == BUCKETS - 1 { u64::MAX } else { Histogram::upper(last) };
        Some((if first == 0 { 0 } else { Histogram::upper(first - 1) + 1 }, upper))
    }
}

/// From pairs as [`HistogramSnapshot::iter`] gives them.
impl FromIterator<(u64, u64)> for HistogramSnapshot {
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(pairs: I) -> HistogramSnapshot {
        let mut snapshot = HistogramSnapshot::default();
        pairs.into_iter().for_each(|(value, count)| snapshot.counts[Histogram::index(value)] += count);
        snapshot
    }
}

// The counters of every I/O share one cache line, and the size is a power of two.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct OpStats {
    ios: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    sum_ns: AtomicU64,
    min_ns_inverted: AtomicU64,
    max_ns: AtomicU64,
    latency: Histogram,
    /// Sums of waiting times, by [`Held`].
    held_ns: [AtomicU64; 4],
    /// Latencies counted beyond one for each request, wrapping: bios that share a request, less the parts of split
    /// ones.
    uneven: AtomicU64,
}

impl OpStats {
    /// Counts latencies that are equal.
    #[inline]
    fn record(&self, latency_ns: u64, count: u64) {
        add(&self.sum_ns, latency_ns.wrapping_mul(count));
        if latency_ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(latency_ns, Relaxed);
        }
        // Kept inverted, so that zero means unset.
        if !latency_ns > self.min_ns_inverted.load(Relaxed) {
            self.min_ns_inverted.store(!latency_ns, Relaxed);
        }
        self.latency.record(latency_ns, count);
    }
}

impl OpStats {
    fn snapshot(&self) -> OpSnapshot {
        OpSnapshot {
            ios: self.ios.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            sum_ns: self.sum_ns.load(Relaxed),
            min_ns: !self.min_ns_inverted.load(Relaxed),
            max_ns: self.max_ns.load(Relaxed),
            latency: self.latency.snapshot(),
            held_ns: std::array::from_fn(|i| self.held_ns[i].load(Relaxed)),
        }
    }
}

/// Length of a lane's turns with work, written by the lane alone. Completions that arrive during a turn are found in
/// the next one.
#[derive(Debug, Default)]
pub struct TurnStats(OpStats);

impl TurnStats {
    /// Adds the length of a turn.
    #[inline]
    pub(crate) fn record(&self, turn_ns: u64) {
        self.0.record(turn_ns, 1);
    }

    /// The times so far, as latencies.
    pub fn snapshot(&self) -> OpSnapshot {
        self.0.snapshot()
    }
}

/// The counters of one hardware queue, written by its owner alone.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct HwStats {
    ops: [OpStats; 4],
    refused: AtomicU64,
    slow: AtomicU64,
    slow_now: AtomicU64,
    /// Bios merged into requests: behind, before, discards.
    merged: [AtomicU64; 3],
    requeued: AtomicU64,
    timed_out: AtomicU64,
    flushes: AtomicU64,
    held: AtomicU64,
    held_ns: AtomicU64,
    /// Requests taken by the driver in one call: 0, 1, 2, 4, 8, 16, 32 and more, as blk-mq's `dispatched` has them.
    dispatched: [AtomicU64; 7],
}

impl HwStats {
    /// Counts requests that took equally long, and the bytes of all.
    #[inline]
    pub(crate) fn completed(&self, class: OpClass, latency_ns: u64, ios: u64, bytes: u64) {
        let op = &self.ops[class as usize];
        add(&op.ios, ios);
        add(&op.bytes, bytes);
        op.record(latency_ns, ios);
    }

    /// I/Os completed so far, of all kinds, wrapping.
    pub fn ios(&self) -> u64 {
        self.ops.iter().fold(0, |sum, op| sum.wrapping_add(op.ios.load(Relaxed)))
    }

    /// Counts a request whose bios are counted separately.
    pub(crate) fn request(&self, class: OpClass, bytes: u64) {
        let op = &self.ops[class as usize];
        add(&op.ios, 1);
        add(&op.bytes, bytes);
        add(&op.uneven, 1_u64.wrapping_neg());
    }

    /// Counts a bio that has ended, and for how long it was held, by [`Held`].
    pub(crate) fn ended(&self, class: OpClass, latency_ns: u64, held_ns: [u64; 4]) {
        let op = &self.ops[class as usize];
        op.record(latency_ns, 1);
        add(&op.uneven, 1);
        op.held_ns.iter().zip(held_ns).for_each(|(sum, ns)| add(sum, ns));
    }

    #[inline]
    pub(crate) fn failed(&self, class: OpClass) {
        add(&self.ops[class as usize].errors, 1);
    }

    #[inline]
    pub(crate) fn refused(&self) {
        add(&self.refused, 1);
    }

    /// A request is slow; seen so for the first time, or again.
    pub(crate) fn slow(&self, first: bool) {
        add(&self.slow, u64::from(first));
        add(&self.slow_now, 1);
    }

    /// A bio was merged into a request.
    pub(crate) fn merged(&self, merge: Merge) {
        add(&self.merged[merge as usize], 1);
    }

    /// The driver requeued a request.
    pub(crate) fn requeued(&self) {
        add(&self.requeued, 1);
    }

    /// The driver was asked about a request that has timed out.
    pub(crate) fn timed_out(&self) {
        add(&self.timed_out, 1);
    }

    /// A flush was issued for all bios that wait for one.
    pub(crate) fn flush_issued(&self) {
        add(&self.flushes, 1);
    }

    /// A limit holds waiting bios.
    pub(crate) fn held(&self) {
        add(&self.held, 1);
    }

    /// The hold has ended, after this time.
    pub(crate) fn held_for(&self, ns: u64) {
        add(&self.held_ns, ns);
    }

    #[inline]
    pub(crate) fn slow_ended(&self) {
        self.slow_now.store(self.slow_now.load(Relaxed).saturating_sub(1), Relaxed);
    }

    pub(crate) fn set_slow_now(&self, n: u64) {
        self.slow_now.store(n, Relaxed);
    }

    #[inline]
    pub(crate) fn dispatched(&self, n: usize) {
        add(&self.dispatched[usize::from(BITS[n.min(BITS.len() - 1)])], 1);
    }

    /// Time at the device of all operations of a class so far, without what held them before. Far cheaper than a
    /// snapshot: for those who ask often.
    pub fn device_time(&self, class: OpClass) -> DeviceTime {
        let op = &self.ops[class as usize];
        let samples = op.ios.load(Relaxed).wrapping_add(op.uneven.load(Relaxed));
        let held_ns = op.held_ns.iter().fold(0, |sum: u64, held_ns| sum.wrapping_add(held_ns.load(Relaxed)));
        DeviceTime { sum_ns: op.sum_ns.load(Relaxed).wrapping_sub(held_ns), samples }
    }

    /// The numbers so far.
    pub fn snapshot(&self) -> StatsSnapshot {
        StatsSnapshot {
            ops: OpClass::ALL.map(|class| self.ops[class as usize].snapshot()),
            refused: self.refused.load(Relaxed),
            slow: self.slow.load(Relaxed),
            slow_now: self.slow_now.load(Relaxed),
            merged: std::array::from_fn(|i| self.merged[i].load(Relaxed)),
            requeued: self.requeued.load(Relaxed),
            timed_out: self.timed_out.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            held: self.held.load(Relaxed),
            held_ns: self.held_ns.load(Relaxed),
            dispatched: std::array::from_fn(|i| self.dispatched[i].load(Relaxed)),
        }
    }
}

/// Latencies of a device, added up. The parts are read one after another, so that an operation which ends meanwhile may
/// be in one of them only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceTime {
    /// Their sum, ns.
    pub sum_ns: u64,
    /// Their number.
    pub samples: u64,
}

impl DeviceTime {
    /// What came since an earlier look at the same counters.
    #[must_use]
    pub fn since(self, earlier: DeviceTime) -> DeviceTime {
        // Torn reads may go backwards for a moment.
        let since = |now: u64, then: u64| (now.wrapping_sub(then) as i64).max(0) as u64;
        DeviceTime { sum_ns: since(self.sum_ns, earlier.sum_ns), samples: since(self.samples, earlier.samples) }
    }
}

/// The counters of one class of operations at one moment.
#[derive(Clone, Debug)]
pub struct OpSnapshot {
    /// Requests completed, well or not.
    pub ios: u64,
    /// Bytes of their ranges.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Sum of the latencies of completed bios, each from its arrival in the queue to its end.
    pub sum_ns: u64,
    /// Shortest latency; `u64::MAX` without samples.
    pub min_ns: u64,
    /// Longest.
    pub max_ns: u64,
    /// All of them.
    pub latency: HistogramSnapshot,
    /// Part of the sum before dispatch, by [`Held`]; the rest was at the device.
    pub held_ns: [u64; 4],
}

impl Default for OpSnapshot {
    fn default() -> Self {
        OpSnapshot {
            ios: 0,
            bytes: 0,
            errors: 0,
            sum_ns: 0,
            min_ns: u64::MAX,
            max_ns: 0,
            latency: HistogramSnapshot::default(),
            held_ns: [0; 4],
        }
    }
}

impl OpSnapshot {
    /// The value that `percent` of the latencies do not exceed, nanoseconds: the end of its bucket, but never beyond
    /// the longest that was recorded.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        self.latency.percentile_ns(percent).min(self.max_ns)
    }

    /// Arithmetic mean, nanoseconds; zero without samples.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns / self.latency.samples().max(1)
    }

    /// Adds the numbers of another queue.
    pub fn merge(&mut self, other: &OpSnapshot) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.latency.merge(&other.latency);
        self.held_ns.iter_mut().zip(other.held_ns).for_each(|(to, from)| *to = to.wrapping_add(from));
    }

    /// Parts of the sum by name, ns: causes that held bios, by [`Held`], and last the device.
    pub fn parts_ns(&self) -> [(&'static str, u64); 5] {
        let [limit, scheduler, tag, dispatch] = Held::ALL.map(|held| (held.name(), self.held_ns[held as usize]));
        [limit, scheduler, tag, dispatch, ("device", self.device_ns())]
    }

    /// Part of the sum at the device, ns.
    pub fn device_ns(&self) -> u64 {
        self.sum_ns.saturating_sub(self.held_ns.iter().sum())
    }

    /// Counts since an earlier snapshot of the same counters. Shortest and longest are the bounds of the buckets hit
    /// since, within those of all time.
    #[must_use]
    pub fn since(&self, earlier: &OpSnapshot) -> OpSnapshot {
        let latency = self.latency.since(&earlier.latency);
        let (min_ns, max_ns) = latency.bounds_ns().unwrap_or((u64::MAX, 0));
        OpSnapshot {
            ios: self.ios.saturating_sub(earlier.ios),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            errors: self.errors.saturating_sub(earlier.errors),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
            min_ns: min_ns.max(self.min_ns),
            max_ns: max_ns.min(self.max_ns),
            latency,
            held_ns: std::array::from_fn(|i| self.held_ns[i].saturating_sub(earlier.held_ns[i])),
        }
    }
}

/// The numbers of one queue, or of several added up, at one moment.
#[derive(Clone, Debug, Default)]
pub struct StatsSnapshot {
    /// By class, in the order of [`OpClass::ALL`].
    pub ops: [OpSnapshot; 4],
    /// Bios given back without reaching the device.
    pub refused: u64,
    /// Requests that were, or are, slow; one that is done again may be so again.
    pub slow: u64,
    /// Requests that are slow and still with the device.
    pub slow_now: u64,
    /// Bios that share a request with another: put behind it, before it, and discards joined to others.
    pub merged: [u64; 3],
    /// Requests that the driver requeued.
    pub requeued: u64,
    /// Number of times the driver was asked about a request that has timed out.
    pub timed_out: u64,
    /// Flushes issued, each for all bios that waited for one.
    pub flushes: u64,
    /// Number of times a limit held waiting bios.
    pub held: u64,
    /// For how long, all in all.
    pub held_ns: u64,
    /// Calls to the driver by how many requests it took: 0, 1, 2, 4, 8, 16, 32 and more.
    pub dispatched: [u64; 7],
}

impl StatsSnapshot {
    /// The numbers of one class.
    pub fn op(&self, class: OpClass) -> &OpSnapshot {
        &self.ops[class as usize]
    }

    /// Adds the numbers of another queue.
    pub fn merge(&mut self, other: &StatsSnapshot) {
        self.ops.iter_mut().zip(&other.ops).for_each(|(to, from)| to.merge(from));
        self.refused += other.refused;
        self.slow += other.slow;
        self.slow_now += other.slow_now;
        self.merged.iter_mut().zip(other.merged).for_each(|(to, from)| *to += from);
        self.requeued += other.requeued;
        self.timed_out += other.timed_out;
        self.flushes += other.flushes;
        self.held += other.held;
        self.held_ns += other.held_ns;
        self.dispatched.iter_mut().zip(other.dispatched).for_each(|(to, from)| *to += from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_took_equally_long_is_counted_as_if_one_by_one() {
        let stats = HwStats::default();
        for (class, ns, ios) in [(OpClass::Read, 100, 2), (OpClass::Write, 100, 1), (OpClass::Read, 7000, 1)] {
            stats.completed(class, ns, ios, 512 * ios);
        }
        let now = stats.snapshot();
        let read = now.op(OpClass::Read);
        assert_eq!((read.ios, read.bytes, read.sum_ns, read.min_ns, read.max_ns), (3, 1536, 7200, 100, 7000));
        assert_eq!(now.op(OpClass::Write).ios, 1);
        assert_eq!(read.latency.samples(), 3);
        assert_eq!(now.op(OpClass::Flush).min_ns, u64::MAX);
    }

    #[test]
    fn the_devices_time_counts_each_bio_once_and_not_what_held_it() {
        let stats = HwStats::default();
        stats.completed(OpClass::Read, 100, 3, 4096);
        let before = stats.device_time(OpClass::Read);
        assert_eq!(before, DeviceTime { sum_ns: 300, samples: 3 });
        // Two bios that share a request, and one that was split into three.
        stats.request(OpClass::Read, 4096);
        [50, 70].into_iter().for_each(|ns| stats.ended(OpClass::Read, ns, [0, 20, 0, 0]));
        (0..3).for_each(|_| stats.request(OpClass::Read, 4096));
        stats.ended(OpClass::Read, 1000, [0, 0, 400, 0]);
        let now = stats.device_time(OpClass::Read);
        assert_eq!(now.since(before), DeviceTime { sum_ns: 30 + 50 + 600, samples: 3 });
        assert_eq!(before.since(now), DeviceTime::default());
        assert_eq!(stats.device_time(OpClass::Write), DeviceTime::default());
    }

    #[test]
    fn what_came_last_is_counted_as_soon_as_what_came_before() {
        let histogram = Histogram::default();
        let mut before = histogram.snapshot();
        for (value, n, samples) in [(7, 3, 3), (7, 2, 5), (40, 1, 6), (u64::MAX, 32, 38)] {
            histogram.record(value, n);
            let now = histogram.snapshot();
            assert_eq!((now.samples(), now.since(&before).samples()), (samples, n));
            before = now;
        }
        assert_eq!(before.iter().map(|(_, n)| n).collect::<Vec<_>>(), [5, 1, 32]);
    }

    #[test]
    fn percentiles_of_a_known_set() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.record(us * 1000, 1));
        let snapshot = histogram.snapshot();
        for (percent, want) in [(50.0, 500_000.0), (99.0, 990_000.0), (99.9, 999_000.0), (100.0, 1_000_000.0)] {
            let got = snapshot.percentile_ns(percent) as f64;
            assert!(got >= want && got <= want * (1.0 + 1.0 / 32.0), "{percent}: {got}");
        }
        assert_eq!(HistogramSnapshot::default().percentile_ns(50.0), 0);
    }

    #[test]
    fn no_percentile_exceeds_the_longest() {
        let stats = HwStats::default();
        [1_000_003, 1_000_001, 5].into_iter().for_each(|ns| stats.completed(OpClass::Read, ns, 1, 512));
        let read = stats.snapshot().op(OpClass::Read).clone();
        assert!(read.latency.percentile_ns(99.0) > 1_000_003, "the bucket ends beyond it");
        assert_eq!((read.percentile_ns(50.0), read.percentile_ns(99.0)), (1_000_003, 1_000_003));
        assert_eq!((read.mean_ns(), OpSnapshot::default().mean_ns()), (666_669, 0));
    }

    #[test]
    fn a_window_counts_what_came_in_it_and_nothing_else() {
        let stats = HwStats::default();
        stats.completed(OpClass::Read, 40_000_000, 7, 4096);
        let before = stats.snapshot();
        let empty = stats.snapshot().op(OpClass::Read).since(before.op(OpClass::Read));
        assert_eq!((empty.ios, empty.sum_ns, empty.min_ns, empty.max_ns), (0, 0, u64::MAX, 0));
        [3000, 5000].into_iter().for_each(|ns| stats.completed(OpClass::Read, ns, 1, 512));
        let now = stats.snapshot();
        let window = now.op(OpClass::Read).since(before.op(OpClass::Read));
        assert_eq!((window.ios, window.bytes, window.mean_ns(), window.min_ns), (2, 1024, 4000, 3000));
        let range = 5000..=5000 + 5000 / 32;
        assert!(range.contains(&window.max_ns) && range.contains(&window.percentile_ns(99.0)), "{window:?}");
        assert_eq!(now.op(OpClass::Read).percentile_ns(100.0), 40_000_000);
        let pairs: HistogramSnapshot = window.latency.iter().collect();
        assert_eq!(pairs, window.latency);
    }

    #[test]
    fn dispatch_batches_fall_into_powers_of_two() {
        let stats = HwStats::default();
        [0, 1, 2, 3, 4, 8, 31, 32, 500].into_iter().for_each(|n| stats.dispatched(n));
        assert_eq!(stats.snapshot().dispatched, [1, 1, 2, 1, 1, 1, 2]);
    }

    proptest! {
        #[test]
        fn a_value_lies_within_one_thirty_second_of_its_bucket(value in 0_u64..1 << VALUE_BITS) {
            let upper = Histogram::upper(Histogram::index(value));
            prop_assert!(upper >= value && upper - value <= value / 32);
        }
    }
}
