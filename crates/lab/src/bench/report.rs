//! The result of a run, and its JSON: with fio's keys where fio has them, so that the same programs read both.

use std::collections::BTreeMap;

use blkyard_mq::OpClass;
use serde::Serialize;

use super::args::{BenchArgs, BenchPlan};
use super::cpu::CpuTime;
use super::tally::{ClassSummary, DEPTHS, Summary};

/// Percentiles that are reported, as fio does by default.
pub(crate) const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];
/// Names of the depth levels.
pub(crate) const DEPTH_NAMES: [&str; DEPTHS] = ["1", "2", "4", "8", "16", "32", ">=64"];

/// Result of a run of `bench`.
#[derive(Clone, Debug)]
pub struct BenchReport {
    pub(crate) device: String,
    pub(crate) options: BTreeMap<&'static str, String>,
    pub(crate) jobs: usize,
    pub(crate) summary: Summary,
    pub(crate) cpu: CpuTime,
    /// Blocks read back and checked.
    pub(crate) checked: u64,
    pub(crate) mismatches: u64,
    pub(crate) violations: Vec<String>,
    /// I/Os that were submitted and not finished.
    pub(crate) outstanding: u64,
    /// A signal ended it early.
    pub(crate) is_cut_short: bool,
}

impl BenchReport {
    /// Whether a signal ended the run before its time.
    pub fn is_cut_short(&self) -> bool {
        self.is_cut_short
    }

    /// I/Os each second, of all directions.
    pub fn iops(&self) -> f64 {
        self.ios() as f64 * 1e9 / self.summary.ran_ns().max(1) as f64
    }

    /// I/Os that failed.
    pub fn errors(&self) -> u64 {
        self.summary.errors()
    }

    /// Number of mismatching blocks.
    pub fn mismatches(&self) -> u64 {
        self.mismatches
    }

    /// I/Os that were submitted and not finished a moment after a signal had ended the run.
    pub fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Whether no I/O failed, mismatched or is outstanding.
    pub fn is_good(&self) -> bool {
        self.errors() == 0 && self.mismatches == 0 && self.outstanding == 0
    }

    /// I/Os done, of all directions.
    pub fn ios(&self) -> u64 {
        self.summary.ios()
    }

    /// CPU time per I/O, nanoseconds.
    pub fn cpu_ns_per_io(&self) -> f64 {
        let used = (self.cpu.user_ns + self.cpu.system_ns) as f64;
        if self.ios() == 0 { 0.0 } else { used / self.ios() as f64 }
    }

    /// Shares of the run's time that were spent in user and system mode, percent; 100 for each job that never slept.
    pub(crate) fn cpu_percent(&self) -> (f64, f64) {
        let whole = self.summary.ran_ns().max(1) as f64;
        (self.cpu.user_ns as f64 * 100.0 / whole, self.cpu.system_ns as f64 * 100.0 / whole)
    }

    /// Share of the run's time in which a job slept, or waited for a CPU, percent.
    pub(crate) fn idle_percent(&self) -> f64 {
        let (user, system) = self.cpu_percent();
        (100.0 - (user + system) / self.jobs.max(1) as f64).max(0.0)
    }

    /// Share of the I/Os that were submitted at each depth, percent.
    pub(crate) fn depth_percent(&self) -> [f64; DEPTHS] {
        let all: u64 = self.summary.depths.iter().sum();
        self.summary.depths.map(|count| count as f64 * 100.0 / all.max(1) as f64)
    }

    /// fio's JSON, with `cpu_ns_per_io`, `outstanding` and `verify` added.
    pub fn json(&self) -> String {
        let (usr_cpu, sys_cpu) = self.cpu_percent();
        let whole = BenchJson {
            version: concat!("blkyard-", env!("CARGO_PKG_VERSION")),
            global_options: BTreeMap::from([("filename", self.device.as_str())]),
            jobs: [Group {
                jobname: "bench",
                groupid: 0,
                error: i32::from(!self.is_good()),
                job_options: &self.options,
                read: self.direction(OpClass::Read),
                write: self.direction(OpClass::Write),
                trim: self.direction(OpClass::Trim),
                sync: Sync::of(self.summary.of(OpClass::Flush)),
                job_runtime: self.summary.ran_ns() / 1_000_000,
                usr_cpu,
                sys_cpu,
                cpu_ns_per_io: self.cpu_ns_per_io(),
                iodepth_level: Ordered(DEPTH_NAMES.into_iter().zip(self.depth_percent()).collect()),
                total_err: self.errors(),
                outstanding: self.outstanding,
                verify: Checked { blocks: self.checked, mismatches: self.mismatches },
                violations: &self.violations,
            }],
        };
        serde_json::to_string_pretty(&whole).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }

    fn direction(&self, class: OpClass) -> DirectionReport {
        let class = self.summary.of(class);
        DirectionReport {
            io_bytes: class.bytes,
            io_kbytes: class.bytes >> 10,
            bw_bytes: class.bytes_per_s() as u64,
            bw: class.bytes_per_s() as u64 >> 10,
            iops: class.iops(),
            runtime: class.ran_ns() / 1_000_000,
            total_ios: class.ios,
            total_err: class.errors,
            clat_ns: Latency::of(class),
            lat_ns: Latency::of(class),
        }
    }
}

/// The options as given, by fio's names, for the report.
pub(crate) fn options(args: &BenchArgs, plan: &BenchPlan) -> BTreeMap<&'static str, String> {
    let mut options = BTreeMap::from([
        ("rw", plan.pattern.name()),
        ("bs", args.bs.clone()),
        ("iodepth", plan.iodepth.to_string()),
        ("numjobs", plan.jobs.to_string()),
        ("queues", plan.queues.default.to_string()),
        ("size", args.size.clone()),
        ("randseed", plan.seed.to_string()),
    ]);
    let given = [
        ("runtime", args.runtime.clone()),
        ("rwmixread", args.rwmixread.map(|percent| percent.to_string())),
        ("read_queues", (plan.queues.read > 0).then(|| plan.queues.read.to_string())),
        ("poll_queues", (plan.queues.poll > 0).then(|| plan.queues.poll.to_string())),
        ("hipri", plan.polled.then(|| "1".into())),
        ("verify", plan.verify.then(|| "crc32c".into())),
        ("spin_us", (args.spin_us > 0).then(|| args.spin_us.to_string())),
        ("fsync", (plan.fsync > 0).then(|| plan.fsync.to_string())),
        ("iodepth_batch", (plan.batch > 1).then(|| plan.batch.to_string())),
    ];
    options.extend(given.into_iter().filter_map(|(key, value)| Some((key, value?))));
    options
}

#[derive(Serialize)]
struct BenchJson<'a> {
    #[serde(rename = "fio version")]
    version: &'static str,
    #[serde(rename = "global options")]
    global_options: BTreeMap<&'static str, &'a str>,
    jobs: [Group<'a>; 1],
}

#[derive(Serialize)]
struct Group<'a> {
    jobname: &'static str,
    groupid: u32,
    error: i32,
    #[serde(rename = "job options")]
    job_options: &'a BTreeMap<&'static str, String>,
    read: DirectionReport,
    write: DirectionReport,
    trim: DirectionReport,
    sync: Sync,
    /// Milliseconds.
    job_runtime: u64,
    usr_cpu: f64,
    sys_cpu: f64,
    cpu_ns_per_io: f64,
    iodepth_level: Ordered<&'static str, f64>,
    total_err: u64,
    outstanding: u64,
    verify: Checked,
    violations: &'a [String],
}

#[derive(Serialize)]
struct DirectionReport {
    io_bytes: u64,
    io_kbytes: u64,
    bw_bytes: u64,
    /// KiB/s.
    bw: u64,
    iops: f64,
    /// Milliseconds.
    runtime: u64,
    total_ios: u64,
    total_err: u64,
    /// From submission to completion, as in fio; submission itself takes no measurable time.
    clat_ns: Latency,
    /// The whole, which is the same.
    lat_ns: Latency,
}

#[derive(Serialize)]
struct Sync {
    total_ios: u64,
    lat_ns: Latency,
}

impl Sync {
    fn of(class: &ClassSummary) -> Sync {
        Sync { total_ios: class.ios, lat_ns: Latency::of(class) }
    }
}

/// A map in insertion order, which for numeric keys differs from the order of strings.
struct Ordered<K, V>(Vec<(K, V)>);

impl<K: Serialize, V: Serialize> Serialize for Ordered<K, V> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

#[derive(Serialize)]
struct Latency {
    min: u64,
    max: u64,
    mean: f64,
    stddev: f64,
    #[serde(rename = "N")]
    samples: u64,
    percentile: Ordered<String, u64>,
}

impl Latency {
    fn of(class: &ClassSummary) -> Latency {
        let shown = if class.ios > 0 { &PERCENTILES[..] } else { &[] };
        let percentile = shown.iter().map(|percent| (format!("{percent:.6}"), percentile_ns(class, *percent)));
        Latency {
            min: class.min_ns,
            max: class.max_ns,
            mean: class.mean_ns(),
            stddev: class.stddev_ns(),
            samples: class.ios,
            percentile: Ordered(percentile.collect()),
        }
    }
}

/// The end of the percentile's bucket, at most the maximum.
pub(crate) fn percentile_ns(class: &ClassSummary, percent: f64) -> u64 {
    class.latency.percentile_ns(percent).min(class.max_ns)
}

#[derive(Serialize)]
struct Checked {
    blocks: u64,
    mismatches: u64,
}
