//! The flags of `bench`, with fio's names, and the plan made from them.
//!
//! Everything is checked here, against itself and against the device; the code that runs later has nothing left to
//! refuse.

use std::sync::Arc;

use blkyard::rate::take_own_rate;
use blkyard::scheduler::take_device_scheduler;
use blkyard::spec::{Spec, SpecError, number, parse_size, show_size};
use blkyard_mq::{DeviceInfo, IdlePolicy, QueueCounts, RateLimit, SECTOR_SHIFT, SchedulerConfig};
use clap::ValueEnum;

/// Command-line options of `bench`. Names and meanings follow fio; where they differ the text says so.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// The device: ram:SIZE, null:SIZE, model:NAME, file:PATH or a bare path, vhost-user:SOCKET, vfio-user:SOCKET,
    /// nvme:/dev/ngXnY, nvme-tcp://HOST:PORT/NQN, pci:ADDRESS, chaos:SIZE, multipath:DEVICE,DEVICE,
    /// nvme-discover://HOST:PORT/NQN. Write load destroys its content.
    ///
    /// Options follow as ?key=value, as for `serve`, such as 'ram:1G?latency_us=100&scheduler=fair'.
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Pattern: read, write, randread, randwrite, rw (half reads, half writes), randrw, trim, randtrim.
    ///
    /// Sequential jobs each have a slice of the device and start over at its end; random ones share all of it.
    #[arg(long, visible_alias = "readwrite", value_enum, value_name = "PATTERN", default_value_t = Pattern::Read)]
    pub rw: Pattern,
    /// Bytes per I/O: 4k, 128k, 1m.
    #[arg(long, visible_alias = "blocksize", value_name = "SIZE", default_value = "4k")]
    pub bs: String,
    /// I/Os that each job keeps in flight. 1 measures latency; 32 or more, throughput.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub iodepth: u32,
    /// Submit new I/Os only once this many slots are free, as one batch.
    #[arg(long = "iodepth_batch", visible_alias = "iodepth-batch", value_name = "N", default_value_t = 1)]
    pub iodepth_batch: u32,
    /// Jobs, each a thread with its own stream of I/O.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub numjobs: u32,
    /// Hardware queues. With fewer than jobs, jobs share them. Default: one a job, at most the number of CPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub queues: Option<u32>,
    /// Hardware queues for reads alone, beside --queues for the rest. Jobs then share the device's queues.
    #[arg(long = "read_queues", visible_alias = "read-queues", value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=256))]
    pub read_queues: Option<u32>,
    /// Poll for reads and writes, on poll queues. Uses a whole CPU for each job.
    #[arg(long)]
    pub hipri: bool,
    /// Hardware queues for --hipri. Default: as many as --queues.
    #[arg(long = "poll_queues", visible_alias = "poll-queues", value_name = "N", requires = "hipri",
        value_parser = clap::value_parser!(u32).range(1..=256))]
    pub poll_queues: Option<u32>,
    /// Run time: 10, 10s, 2m, 1h. Jobs start over at their end, as with fio's time_based.
    ///
    /// Default: one pass over --size.
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<String>,
    /// Part of the device to use, from its start: 512m, or 10%. For all jobs together, unlike fio. Default: all of it.
    #[arg(long, value_name = "SIZE", default_value = "100%")]
    pub size: String,
    /// Percentage of reads in rw and randrw.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub rwmixread: Option<u32>,
    /// Write a header with position, origin and checksum into every block, and check it on reads.
    ///
    /// write and randwrite write all of --size once (or what --runtime allows), then read it all back; read and
    /// randread check the data of an earlier run with the same --bs. A mismatching block is reported with its sector
    /// and the difference, and the exit code is 1.
    #[arg(long, value_enum, value_name = "METHOD")]
    pub verify: Option<Verify>,
    /// Seed of all random choices: positions, mix, contents. The same seed gives the same I/O.
    #[arg(long, value_name = "SEED", default_value_t = 0x0062_6c6b_7961_7264)]
    pub randseed: u64,
    /// Flush after every N writes of a job. The flush is queued like any other I/O; 0 for never.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync: u64,
    /// Busy-polling of a thread without work before it sleeps, microseconds.
    ///
    /// 0 sleeps at once, as fio's io_uring engine does. A longer time shortens latency where the device has a CPU of
    /// its own and completes sooner than a sleeper wakes; elsewhere it takes the device's CPU away.
    #[arg(long = "spin_us", visible_alias = "spin-us", value_name = "US", default_value_t = 0,
        value_parser = number(0, IdlePolicy::SPIN_US_MAX))]
    pub spin_us: u64,
    /// Translate the memory of each I/O, instead of registering it once. Only to compare.
    #[arg(long = "no-registered")]
    pub no_registered: bool,
    /// Format of the report: text, or JSON with fio's keys.
    #[arg(long = "output-format", value_enum, value_name = "FORMAT", default_value_t = ReportFormat::Normal)]
    pub output_format: ReportFormat,
}

impl BenchArgs {
    /// Random reads of 4 KiB by one job, over the whole device and without end.
    pub(crate) fn random_reads(device: String, depth: u32, seed: u64) -> BenchArgs {
        BenchArgs {
            device,
            rw: Pattern::RandRead,
            bs: "4k".into(),
            iodepth: depth,
            iodepth_batch: 1,
            numjobs: 1,
            queues: None,
            read_queues: None,
            hipri: false,
            poll_queues: None,
            runtime: None,
            size: "100%".into(),
            rwmixread: None,
            verify: None,
            randseed: seed,
            fsync: 0,
            spin_us: 0,
            no_registered: false,
            output_format: ReportFormat::Normal,
        }
    }
}

/// Patterns of I/O, by fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
#[expect(missing_docs, reason = "the names are fio's and say it")]
pub enum Pattern {
    Read,
    Write,
    RandRead,
    RandWrite,
    #[value(alias = "readwrite")]
    Rw,
    RandRw,
    Trim,
    RandTrim,
}

impl Pattern {
    /// Whether positions are random.
    pub fn is_random(self) -> bool {
        matches!(self, Pattern::RandRead | Pattern::RandWrite | Pattern::RandRw | Pattern::RandTrim)
    }

    /// Whether it changes the medium.
    pub fn is_write(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::RandRead)
    }

    /// fio's name.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default()
    }
}

/// How blocks are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Verify {
    /// A header with the CRC-32C of the block.
    Crc32c,
}

/// Format of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum ReportFormat {
    /// Text.
    Normal,
    /// fio's JSON.
    Json,
}

/// The options, checked and worked out.
#[derive(Clone, Debug)]
pub(crate) struct BenchPlan {
    pub(crate) pattern: Pattern,
    pub(crate) block_bytes: u32,
    /// Blocks of the used part.
    pub(crate) blocks: u64,
    pub(crate) iodepth: usize,
    pub(crate) batch: usize,
    pub(crate) jobs: usize,
    pub(crate) queues: QueueCounts,
    /// Reads and writes are polled for.
    pub(crate) polled: bool,
    pub(crate) runtime_ns: Option<u64>,
    pub(crate) read_percent: u32,
    pub(crate) verify: bool,
    pub(crate) seed: u64,
    /// Buffers are registered.
    pub(crate) is_registered: bool,
    pub(crate) fsync: u64,
    pub(crate) scheduler: SchedulerConfig,
    /// Rate limits of all jobs together.
    pub(crate) rates: Vec<Arc<RateLimit>>,
}

impl BenchArgs {
    /// Hardware queues for other I/O than that of poll queues, on so many CPUs.
    fn queues(&self, cpus: usize) -> usize {
        self.queues.map_or((self.numjobs as usize).min(cpus), |queues| queues as usize).max(1)
    }

    /// Hardware queues of each kind, no more than jobs.
    pub(crate) fn queue_counts(&self, cpus: usize) -> QueueCounts {
        let default = self.queues(cpus);
        let read = self.read_queues.map_or(0, |queues| queues as usize);
        let poll = self.poll_queues.map_or(if self.hipri { default } else { 0 }, |queues| queues as usize);
        QueueCounts { default, read, poll }.up_to(self.numjobs as usize)
    }
}

impl BenchPlan {
    pub(crate) fn new(args: &BenchArgs, info: &DeviceInfo, cpus: usize) -> Result<BenchPlan, SpecError> {
        let block_bytes = block_bytes(args, info)?;
        let capacity = info.capacity_sectors << SECTOR_SHIFT;
        let bytes = part_bytes(&args.size, capacity)?;
        let blocks = bytes / u64::from(block_bytes);
        let runtime_ns = args.runtime.as_deref().map(runtime_ns).transpose()?;
        let (jobs, pattern) = (args.numjobs as usize, args.rw);
        let wrong = |object: &str, cause: String, cure: &str| Err(SpecError::new(object, cause, cure));
        if pattern.is_write() && info.read_only {
            return wrong(
                &info.name,
                format!("--rw {} on a read-only device", pattern.name()),
                "use --rw read or randread",
            );
        }
        if matches!(pattern, Pattern::Trim | Pattern::RandTrim) && info.limits.discard_sectors_max == 0 {
            return wrong(&info.name, "the device cannot discard".into(), "choose another --rw");
        }
        let mixed = matches!(pattern, Pattern::Rw | Pattern::RandRw);
        if args.rwmixread.is_some() && !mixed {
            let cause = format!("--rw {} is not a mix of reads and writes", pattern.name());
            return wrong("--rwmixread", cause, "use --rw rw or randrw");
        }
        if args.verify.is_some() && (mixed || matches!(pattern, Pattern::Trim | Pattern::RandTrim)) {
            let cause = format!("--rw {} cannot be verified", pattern.name());
            return wrong("--verify", cause, "use write, randwrite, read or randread");
        }
        if args.iodepth_batch == 0 || args.iodepth_batch > args.iodepth {
            let cause = format!("{} is not from 1 to --iodepth, which is {}", args.iodepth_batch, args.iodepth);
            return wrong("--iodepth_batch", cause, "give a number in that range");
        }
        let sliced = !pattern.is_random() || args.verify.is_some();
        if blocks == 0 || (sliced && blocks < jobs as u64) {
            let cause = format!("{} holds {blocks} blocks of {}", show_size(bytes), show_size(block_bytes.into()));
            return wrong("--size", cause, "choose a larger --size or device, a smaller --bs or fewer --numjobs");
        }
        Ok(BenchPlan {
            pattern,
            block_bytes,
            blocks,
            iodepth: args.iodepth as usize,
            batch: args.iodepth_batch as usize,
            jobs,
            queues: args.queue_counts(cpus),
            polled: args.hipri,
            runtime_ns,
            read_percent: args.rwmixread.unwrap_or(50),
            verify: args.verify.is_some(),
            seed: args.randseed,
            is_registered: !args.no_registered,
            fsync: args.fsync,
            scheduler: take_device_scheduler(&mut Spec::parse(&args.device)?)?,
            rates: RateLimit::new(take_own_rate(&mut Spec::parse(&args.device)?)?).map(Arc::new).into_iter().collect(),
        })
    }

    /// Whether jobs share queues, or use several.
    pub(crate) fn shares(&self) -> bool {
        self.jobs > self.queues.default || self.queues.total() > self.queues.default
    }

    /// The blocks of one job: first, and how many. Random jobs without verification share all.
    pub(crate) fn slice(&self, job: usize) -> (u64, u64) {
        if self.pattern.is_random() && !self.verify {
            return (0, self.blocks);
        }
        let at = |job: usize| (u128::from(self.blocks) * job as u128 / self.jobs as u128) as u64;
        (at(job), at(job + 1) - at(job))
    }

    /// Blocks of one pass of a job, unless it runs for a time.
    pub(crate) fn share(&self, job: usize) -> u64 {
        let at = |job: usize| (u128::from(self.blocks) * job as u128 / self.jobs as u128) as u64;
        at(job + 1) - at(job)
    }

    /// Tags of one job: one for each request of its split bios.
    pub(crate) fn tags(&self, info: &DeviceInfo) -> usize {
        let parts = self.block_bytes.div_ceil(info.limits.sectors_max << SECTOR_SHIFT).max(1);
        self.iodepth * parts as usize
    }
}

fn block_bytes(args: &BenchArgs, info: &DeviceInfo) -> Result<u32, SpecError> {
    /// A bio's length has 32 bits; this leaves room and exceeds all useful sizes.
    const BLOCK_BYTES_MAX: u64 = 1 << 30;
    let object = format!("--bs {}", args.bs);
    let lbs = u64::from(info.limits.logical_block_bytes);
    let cure = format!("give a multiple of the device's block of {lbs} bytes, such as 4k or 1m, up to 1g");
    let bytes = parse_size(&args.bs).ok_or_else(|| SpecError::new(&object, "this is not a size", &cure))?;
    if bytes == 0 || bytes > BLOCK_BYTES_MAX || !bytes.is_multiple_of(lbs) {
        return Err(SpecError::new(&object, format!("{} cannot do I/O of this size", info.name), &cure));
    }
    Ok(bytes as u32)
}

fn part_bytes(size: &str, capacity: u64) -> Result<u64, SpecError> {
    let object = format!("--size {size}");
    let cure = "give a size such as 512m, or a percentage such as 10%";
    let bytes = match size.strip_suffix('%') {
        Some(percent) => {
            let percent = percent.parse::<u64>().ok().filter(|percent| (1..=100).contains(percent));
            percent.map(|percent| (u128::from(capacity) * u128::from(percent) / 100) as u64)
        }
        None => parse_size(size),
    };
    let bytes = bytes.ok_or_else(|| SpecError::new(&object, "this is neither a size nor a percentage", cure))?;
    if bytes > capacity {
        return Err(SpecError::new(&object, format!("the device has {}", show_size(capacity)), cure));
    }
    Ok(bytes)
}

fn runtime_ns(text: &str) -> Result<u64, SpecError> {
    const S: u64 = 1_000_000_000;
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ns = match unit {
        "" | "s" => S,
        "ms" => S / 1000,
        "m" => 60 * S,
        "h" => 3600 * S,
        _ => 0,
    };
    let ns = number.parse::<f64>().map_or(0.0, |number| number * unit_ns as f64);
    // A year; beyond, it is a slip of the keyboard.
    if !(1.0..=3.2e16).contains(&ns) {
        let object = format!("--runtime {text}");
        return Err(SpecError::new(object, "this is not a length of time", "write it as 10, 10s, 500ms, 2m or 1h"));
    }
    Ok(ns as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mq::QueueLimits;
    use clap::Parser;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn info() -> DeviceInfo {
        DeviceInfo {
            name: "ram:1M".into(),
            capacity_sectors: 2048,
            limits: QueueLimits::default(),
            read_only: false,
            volatile_cache: false,
            fua: false,
            ..DeviceInfo::default()
        }
    }

    fn plan(line: &str) -> Result<BenchPlan, String> {
        let words = ["bench", "ram:1M"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        BenchPlan::new(&cli.bench, &info(), 2).map_err(|error| error.to_string())
    }

    #[test]
    fn fio_flags_mean_what_they_mean() {
        let got = plan("--rw randrw --rwmixread=70 --bs 8k --iodepth 32 --numjobs 3 --runtime 2m --size 50%").unwrap();
        assert_eq!((got.block_bytes, got.blocks, got.read_percent), (8192, 64, 70));
        assert_eq!((got.queues, got.runtime_ns), (QueueCounts::only(2), Some(120_000_000_000)));
        assert_eq!(plan("--rw readwrite --blocksize=1m --iodepth-batch 1").unwrap().blocks, 1);
        assert_eq!(plan("--runtime 500ms").unwrap().runtime_ns, Some(500_000_000));
    }

    #[test]
    fn what_does_not_go_together_says_what_would() {
        for (line, words) in [
            ("--bs 4097", ["--bs 4097", "multiple"]),
            ("--bs 0", ["--bs 0", "4k"]),
            ("--size 2m", ["--size 2m", "has 1 MiB"]),
            ("--size 101%", ["--size 101%", "percentage"]),
            ("--runtime soon", ["--runtime soon", "10s"]),
            ("--rwmixread 50", ["--rwmixread", "randrw"]),
            ("--rw trim", ["cannot discard", "--rw"]),
            ("--rw rw --verify crc32c", ["--verify", "randwrite"]),
            ("--iodepth 4 --iodepth_batch 5", ["--iodepth_batch", "1 to --iodepth"]),
            ("--bs 1m --numjobs 2", ["--numjobs", "1 blocks"]),
        ] {
            let error = plan(line).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        }
    }

    #[test]
    fn slices_cover_the_part_and_keep_apart() {
        let plan = plan("--rw write --numjobs 3").unwrap();
        let slices: Vec<_> = (0..3).map(|job| plan.slice(job)).collect();
        assert_eq!(slices, [(0, 85), (85, 85), (170, 86)]);
    }
}
