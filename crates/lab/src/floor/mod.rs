//! `blkyard floor`: limits of the machine it runs on.
//!
//! A figure of a path means little without its limit. [`LIMITS`] are those: cache lines passed from one CPU to another,
//! copies, wake-ups, the clock, system calls, and the minimum cost of a queue core. The benchmark cells measure them
//! beside each path. All are measured with plain loads and stores; none uses our rings, queues or core, since a slow
//! one would lower its own floor.

pub(crate) mod cpus;
mod lines;
mod mock;
mod report;
mod sockets;
mod system;
pub(crate) mod windows;

use std::process::ExitCode;

use self::report::FloorReport;
use self::sockets::AnswerForm;
use self::system::{CopyOrder, From};
use crate::Console;

pub use self::cpus::{cpus, led, partner_cpu, pin, together};
pub use self::mock::{Mock, Stamps};
pub use self::system::{STORE_BYTES, touched};
pub use self::windows::{Round, Samples, Variant, WindowPlan, measure, variant};

/// Command-line options of `floor`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct FloorArgs {
    /// One JSON object for each limit: limit, value, unit, low, median, high, and the hand-off of the same run.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter windows: a few seconds in all, and noisier.
    #[arg(long)]
    pub quick: bool,
}

/// Something the machine cannot do faster.
#[derive(Clone, Copy)]
pub struct MachineLimit {
    /// Name.
    pub name: &'static str,
    /// Operation that is measured.
    pub sentence: &'static str,
    /// Whether two CPUs exchange lines. A host that moves virtual CPUs changes such figures from one minute to the
    /// next, so each is measured in turn with a single-line transfer.
    pub across: bool,
    make: fn() -> Result<Variant<'static>, String>,
}

impl MachineLimit {
    /// The limit of this name.
    pub fn of(name: &str) -> Option<&'static MachineLimit> {
        LIMITS.iter().find(|limit| limit.name == name)
    }

    /// Ready to be measured, in nanoseconds.
    ///
    /// # Errors
    /// Why this machine cannot do it at all.
    pub fn variant(&self) -> Result<Variant<'static>, String> {
        (self.make)()
    }
}

/// The limit that every other across CPUs is measured in turn with.
pub const HAND_OFF: &str = "line-serial";

macro_rules! limits {
    ($($name:literal, $sentence:literal, $across:literal, $make:expr;)*) => {
        &[$(MachineLimit { name: $name, sentence: $sentence, across: $across, make: || $make }),*]
    };
}

/// All limits, each of one thread on one CPU unless it says otherwise.
pub const LIMITS: &[MachineLimit] = limits! {
    "line-serial", "a cache line handed to another CPU, one after the other", true, lines::serial();
    "line-pipelined", "the same in a stream", true, lines::pipelined();
    "pair-qd1", "a command through an NVMe queue pair in shared memory, depth 1", true, lines::queue_pair(1);
    "pair-qd128", "the same at depth 128", true, lines::queue_pair(128);
    "virtio-qd1", "a request through a virtio split ring, depth 1", true, lines::virtqueue(1);
    "virtio-qd128", "the same at depth 128", true, lines::virtqueue(128);
    "sockets-qd1", "a read of 4 KiB over NVMe/TCP as plain sockets on loopback would do it, depth 1", true,
        sockets::reads(1, AnswerForm::Data);
    "sockets-qd32", "the same at depth 32", true, sockets::reads(32, AnswerForm::Data);
    "sockets-qd128", "the same at depth 128", true, sockets::reads(128, AnswerForm::Data);
    "sockets-qd128-cqe", "the same with a response behind the data", true,
        sockets::reads(128, AnswerForm::DataAndResponse);
    "wake-up", "a thread asleep on another CPU, woken", false, system::wake_up();
    "copy-4k-l2", "a copy of 4 KiB from the second-level cache", false, system::copy(From::L2, CopyOrder::Unknown);
    "copy-4k-l3", "the same from the third level", false, system::copy(From::L3, CopyOrder::Unknown);
    "copy-4k-dram", "the same from memory, at random in 1 GiB", false, system::copy(From::Dram, CopyOrder::Unknown);
    "copy-4k-dram-ahead", "the same, the next fetched meanwhile", false, system::copy(From::Dram, CopyOrder::Known);
    "clock", "one reading of the system's clock (clock_gettime)", false, Ok(system::clock());
    "clock-lane", "the same of a lane's, by the time-stamp counter where that can be trusted", false, Ok(system::lane_clock());
    "locked-add", "a locked addition to a word that nobody else uses", false, Ok(system::locked_add());
    "uring-b1", "an io_uring operation that does nothing, one to a call", false, system::nops(1);
    "uring-b8", "the same, 8 to a call", false, system::nops(8);
    "uring-b32", "the same, 32 to a call", false, system::nops(32);
    "uring-b128", "the same, 128 to a call", false, system::nops(128);
    "mock-b1", "a mock of a queue core, alone, one stamp and a histogram for each", false, Ok(mock(1, Stamps::Batch));
    "mock-b8", "the same in batches of 8", false, Ok(mock(8, Stamps::Batch));
    "mock-b32", "the same in batches of 32", false, Ok(mock(32, Stamps::Batch));
    "mock-b1-nostats", "the mock one at a time without statistics", false, Ok(mock(1, Stamps::None));
    "mock-b8-nostats", "the same in batches of 8", false, Ok(mock(8, Stamps::None));
    "mock-b32-nostats", "the same in batches of 32", false, Ok(mock(32, Stamps::None));
    "mock-b32-stamps", "the mock in batches of 32, two stamps for each I/O", false, Ok(mock(32, Stamps::Io));
};

fn mock(batch: u16, stamps: Stamps) -> Variant<'static> {
    variant(Mock::new(batch, stamps))
}

/// Measures every limit and prints it. A limit that this machine does not have is named with the reason.
pub fn run(args: FloorArgs, console: Console) -> ExitCode {
    let plan = if args.quick {
        WindowPlan { window_ns: 1_000_000, windows: 60, warm_up: 5 }
    } else {
        WindowPlan { window_ns: 3_000_000, windows: 300, warm_up: 20 }
    };
    pin();
    let mut report = FloorReport::new(args.json, console);
    for limit in LIMITS {
        match one(limit, plan) {
            Ok((samples, hand_off)) => report.add(limit, &samples, hand_off.as_ref()),
            Err(why) => (console.note)(&format_args!("{}: not measured: {why}", limit.name)),
        }
        if report.has_failed() {
            break;
        }
    }
    report.close()
}

/// Windows of a limit, and those of the single-line transfer in turn with it, if it is one across CPUs.
fn one(limit: &MachineLimit, plan: WindowPlan) -> Result<(Samples, Option<Samples>), String> {
    let mut variants = vec![limit.variant()?];
    if limit.across
        && let Some(hand_off) = MachineLimit::of(HAND_OFF).filter(|it| it.name != limit.name)
    {
        variants.push(hand_off.variant()?);
    }
    let mut samples = measure(plan, &mut variants).into_iter();
    Ok((samples.next().unwrap_or_default(), samples.next()))
}

/// Bytes of an I/O, here and in the cells.
pub const IO_BYTES: u32 = 4096;

/// Random positions, the same sequence for every user, as cheap as possible: a multiplication and an addition.
#[derive(Clone, Copy, Debug)]
pub struct RandomOffsets(u64);

impl RandomOffsets {
    /// From the start.
    #[expect(clippy::new_without_default, reason = "a default would say nothing of where it starts")]
    pub fn new() -> RandomOffsets {
        RandomOffsets(0x9e37_79b9_7f4a_7c15)
    }

    /// The next, below `count`.
    #[inline]
    pub fn next(&mut self, count: u32) -> u64 {
        // Multiplier and increment: Knuth, The Art of Computer Programming 2, 3.3.4 (MMIX). The upper half is the
        // random one.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 32) * u64::from(count)) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_that_this_machine_has_can_be_measured() {
        let plan = WindowPlan { window_ns: 1000, windows: 1, warm_up: 0 };
        for limit in LIMITS.iter().filter(|limit| !limit.name.starts_with("copy-4k-dram")) {
            match one(limit, plan) {
                Ok((samples, hand_off)) => {
                    assert!(samples.cost() > 0.0, "{} takes {} ns", limit.name, samples.cost());
                    assert_eq!(hand_off.is_some(), limit.across && limit.name != HAND_OFF);
                }
                Err(why) => assert!(why.contains("one CPU"), "{}: {why}", limit.name),
            }
        }
    }

    #[test]
    fn names_are_given_once() {
        for (place, limit) in LIMITS.iter().enumerate() {
            assert!(LIMITS[..place].iter().all(|other| other.name != limit.name), "{}", limit.name);
        }
        assert!(MachineLimit::of(HAND_OFF).is_some());
    }

    #[test]
    fn places_stay_below_their_count_and_reach_all_of_it() {
        let mut places = RandomOffsets::new();
        let mut seen = [0_u32; 8];
        (0..8000).for_each(|_| seen[places.next(8) as usize] += 1);
        assert!(seen.iter().all(|count| (800..1200).contains(count)), "{seen:?}");
    }
}
