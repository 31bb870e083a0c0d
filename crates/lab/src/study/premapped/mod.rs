//! `premapped`: buffers registered and mapped once for many I/Os (K. Busch, measured by J. Axboe, linux-nvme, August
//! 2022).
//!
//! Measured: CPU time and instructions of the product's queue core, NVMe driver and rings, with our controller on a
//! null device (`rig.rs`). Modelled: the cost of mapping pages for a device (`mapping.rs`), and a link between the
//! devices and the host. Samples of all kinds of memory alternate, so that other load of the machine affects all. Each
//! sample has rings, tables and bios at other addresses: which of them meet in a set of a cache is chance, and would
//! else be the same for a row and be taken for its cost.
//!
//! Without a model: io_uring with O_DIRECT on a file (`host.rs`), and a device of the user's choice (`device.rs`).

mod device;
mod follow_up;
mod host;
mod interval;
mod mapping;
mod pairs;
mod post;
mod report;
mod rig;
pub(super) mod svg;
mod verdicts;

use std::io;
use std::sync::Arc;
use std::thread;

use blkyard_mem::Region;
use blkyard_sim::Rng;
use serde::Serialize;

pub(super) use self::device::run as run_on_device;
use self::host::HostPairs;
use self::interval::{MedianInterval, SAMPLES_MIN};
use self::report::PremappedReport;
use self::rig::PremappedRig;

use super::StudyError;
use super::costs::CallCost;
use super::instructions::{self, SectionCount, SectionList};
use super::measure::{run_uncounted, timed, whole_window};
use super::wakes;
use crate::floor::cpus;
use crate::floor::windows::Samples;

/// Sizes of an I/O, bytes.
pub(crate) const SIZES: [u32; 6] = [512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20];
/// Bios submitted by a call.
pub(crate) const BATCHES: [usize; 4] = [1, 2, 8, 31];
/// Rounds before instructions are counted.
const WARM_UP: usize = 3;

/// How the memory of an I/O is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IoMemory {
    /// By its pages, as if they were pinned for this I/O.
    Plain,
    /// Pinned once. Each I/O walks it, and maps its pages.
    Registered,
    /// Pinned and mapped once. An I/O names the mapping.
    Mapped,
}

impl IoMemory {
    pub(crate) const ALL: [IoMemory; 3] = [IoMemory::Plain, IoMemory::Registered, IoMemory::Mapped];

    pub(crate) fn name(self) -> &'static str {
        match self {
            IoMemory::Plain => "plain",
            IoMemory::Registered => "registered",
            IoMemory::Mapped => "mapped",
        }
    }
}

/// Devices under one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bed {
    /// One device.
    One,
    /// As in the post: 24 behind a link.
    Many,
}

impl Bed {
    pub(crate) const ALL: [Bed; 2] = [Bed::One, Bed::Many];

    pub(crate) fn devices(self) -> usize {
        match self {
            Bed::One => 1,
            Bed::Many => 24,
        }
    }

    /// I/Os in flight at each device. Of one device a whole number of all batches, of many as in the post.
    pub(crate) fn depth(self) -> usize {
        match self {
            Bed::One => 248,
            Bed::Many => 8,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Bed::One => "1 device",
            Bed::Many => "24 devices, depth 8",
        }
    }
}

/// How long.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PremappedLength {
    /// Samples of each figure.
    pub(crate) samples: usize,
    /// Windows of each sample; it is their 10th percentile.
    pub(crate) windows: usize,
    /// Whether the instructions of all cells are counted, or of one device only.
    #[serde(skip)]
    pub(crate) quick: bool,
}

impl PremappedLength {
    pub(crate) fn new(quick: bool) -> PremappedLength {
        if quick {
            PremappedLength { samples: SAMPLES_MIN, windows: 4, quick }
        } else {
            PremappedLength { samples: 20, windows: 12, quick }
        }
    }

    fn beds(self) -> &'static [Bed] {
        if self.quick { &Bed::ALL[..1] } else { &Bed::ALL }
    }
}

/// CPU time of an I/O, nanoseconds, by sample.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PhaseSamples {
    pub(crate) submit_ns: Vec<f64>,
    pub(crate) complete_ns: Vec<f64>,
}

impl PhaseSamples {
    /// Of both phases together.
    pub(crate) fn total_ns(&self) -> impl Iterator<Item = f64> {
        self.submit_ns.iter().zip(&self.complete_ns).map(|(submit, complete)| submit + complete)
    }
}

/// One row: a load with one kind of memory.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PremappedRow {
    pub(crate) bed: Bed,
    pub(crate) bytes: u32,
    pub(crate) batch: usize,
    pub(crate) memory: IoMemory,
    pub(crate) samples: PhaseSamples,
    pub(crate) submit_ns: MedianInterval,
    /// Submission and completion, polled.
    pub(crate) polled_ns: MedianInterval,
    /// The same with one interrupt for a batch.
    pub(crate) interrupt_ns: MedianInterval,
    /// Instructions of submission and completion of an I/O, if they were counted.
    pub(crate) instructions: Option<[f64; 2]>,
}

/// All that was measured.
#[derive(Debug)]
pub(crate) struct PremappedRows {
    rows: Vec<PremappedRow>,
    /// Sleep until an interrupt and wake-up.
    pub(crate) sleep: CallCost,
}

impl PremappedRows {
    pub(crate) fn all(&self) -> &[PremappedRow] {
        &self.rows
    }

    /// The row of a load.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn get(&self, bed: Bed, bytes: u32, batch: usize, memory: IoMemory) -> &PremappedRow {
        let is_it = |row: &&PremappedRow| (row.bed, row.bytes, row.batch, row.memory) == (bed, bytes, batch, memory);
        let Some(row) = self.rows.iter().find(is_it) else { panic!("no row of {bytes} bytes in batches of {batch}") };
        row
    }
}

/// Measures everything.
///
/// # Errors
/// The machine has no threads or descriptors left.
pub(super) fn run(length: PremappedLength, say: impl Fn(String)) -> Result<PremappedReport, StudyError> {
    say("counting instructions ...".into());
    let counts = instructions::count("premapped", length.quick);
    say(format!("measuring, {} samples of each row ...", length.samples));
    let measuring = thread::Builder::new().spawn(move || {
        cpus::pin();
        let (sleep, _) = wakes::sleep_and_ring(length.samples * length.windows)?;
        Ok::<_, io::Error>((measure(length), sleep, host::measure(length)))
    })?;
    let measured = measuring.join().unwrap_or_else(|_| Err(io::Error::other("a measuring thread panicked")));
    let (measured, sleep, host) = measured?;
    Ok(report(length, measured, sleep, host, counts))
}

fn report(
    length: PremappedLength,
    measured: Vec<(Cell, PhaseSamples)>,
    sleep: CallCost,
    host: Result<HostPairs, String>,
    counts: Result<Vec<SectionCount>, String>,
) -> PremappedReport {
    let (counts, not_counted) = match counts {
        Ok(counts) => (counts, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let rows = measured.into_iter().map(|(cell, samples)| row(cell, samples, sleep, &counts)).collect();
    PremappedReport::new(length, PremappedRows { rows, sleep }, host, not_counted)
}

type Cell = (Bed, u32, usize, IoMemory);

fn row(
    (bed, bytes, batch, memory): Cell,
    samples: PhaseSamples,
    sleep: CallCost,
    counts: &[SectionCount],
) -> PremappedRow {
    let count = |phase: usize| {
        let label = label((bed, bytes, batch, memory), phase);
        counts.iter().find(|count| count.label == label).map(SectionCount::per_io)
    };
    // Completions of a call are taken after one interrupt, those of more than a device has after one for each device.
    let wake_ns = sleep.total_ns() / batch.min(bed.depth()) as f64;
    PremappedRow {
        bed,
        bytes,
        batch,
        memory,
        submit_ns: MedianInterval::of(samples.submit_ns.iter().copied()),
        polled_ns: MedianInterval::of(samples.total_ns()),
        interrupt_ns: MedianInterval::of(samples.total_ns().map(|ns| ns + wake_ns)),
        instructions: count(0).zip(count(1)).map(|(submit, complete)| [submit, complete]),
        samples,
    }
}

/// Samples of all cells.
fn measure(length: PremappedLength) -> Vec<(Cell, PhaseSamples)> {
    let mut measured = Vec::new();
    let mut rng = Rng::new(1);
    for bed in Bed::ALL {
        for bytes in SIZES {
            let mut of_size = BATCHES.map(|_| IoMemory::ALL.map(|_| PhaseSamples::default()));
            for _ in 0..length.samples {
                let _gaps = AddressGaps::new(&mut rng);
                let mut rigs = IoMemory::ALL.map(|memory| PremappedRig::new(bed, bytes, memory));
                for (batch, samples) in BATCHES.into_iter().zip(&mut of_size) {
                    let windows = sample(&mut rigs, batch, length.windows);
                    for (samples, [submit, complete]) in samples.iter_mut().zip(windows) {
                        samples.submit_ns.push(submit.cost());
                        samples.complete_ns.push(complete.cost());
                    }
                }
            }
            for (batch, samples) in BATCHES.into_iter().zip(of_size) {
                let cells = IoMemory::ALL.map(|memory| (bed, bytes, batch, memory));
                measured.extend(cells.into_iter().zip(samples));
            }
        }
    }
    measured
}

/// Memory of the heap and of mappings that is left unused, so that what comes after it has other addresses.
struct AddressGaps(#[expect(dead_code, reason = "only taken up")] (Vec<Vec<u8>>, Option<Arc<Region>>));

impl AddressGaps {
    fn new(rng: &mut Rng) -> AddressGaps {
        /// Blocks of the heap, of a few cache lines each: free ones of any size are used up first.
        const BLOCKS: usize = 256;
        let blocks = (0..BLOCKS).map(|_| Vec::with_capacity(64 * (1 + rng.below(64) as usize))).collect();
        // Without it the addresses of mappings are those of the last sample, which is still a sample.
        let pages = Region::anonymous(4096 * (1 + rng.below(512) as usize)).ok();
        AddressGaps((blocks, pages))
    }
}

/// Windows of one sample of each kind of memory, in turn.
fn sample(rigs: &mut [PremappedRig; 3], batch: usize, windows: usize) -> [[Samples; 2]; 3] {
    let mut samples: [[Samples; 2]; 3] = Default::default();
    for _ in 0..windows {
        for (rig, samples) in rigs.iter_mut().zip(&mut samples) {
            rig.check(batch);
            rig.round(batch, &mut run_uncounted);
            let (rounds, sums) = whole_window(|| rig.round(batch, &mut timed));
            let ios = rounds as f64 * rig.ios() as f64;
            samples.iter_mut().zip(sums).for_each(|(samples, sum)| samples.push(sum as f64 / ios));
        }
    }
    samples
}

/// Executes each phase of each cell once, to have its instructions counted.
pub(super) fn sections(quick: bool, list: &mut SectionList) {
    for bed in PremappedLength::new(quick).beds() {
        for bytes in SIZES {
            for memory in IoMemory::ALL {
                let mut rig = PremappedRig::new(*bed, bytes, memory);
                for batch in BATCHES {
                    rig.check(batch);
                    (0..WARM_UP).for_each(|_| _ = rig.round(batch, &mut run_uncounted));
                    let (ios, mut phase) = (rig.ios(), 0);
                    rig.round(batch, &mut |work| {
                        list.run(&label((*bed, bytes, batch, memory), phase), ios, work);
                        phase += 1;
                        0
                    });
                }
            }
        }
    }
}

/// Name of a counted section: phase 0 is submission, 1 completion.
fn label((bed, bytes, batch, memory): Cell, phase: usize) -> String {
    format!("{} {bytes} {batch} {} {phase}", bed.devices(), memory.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_completes_with_every_kind_of_memory() {
        for bed in Bed::ALL {
            for bytes in SIZES {
                for memory in IoMemory::ALL {
                    let mut rig = PremappedRig::new(bed, bytes, memory);
                    BATCHES.into_iter().for_each(|batch| rig.check(batch));
                    assert_eq!(rig.ios() as usize, bed.devices() * bed.depth());
                }
            }
        }
    }

    #[test]
    fn the_report_has_verdicts_first_and_no_undefined_figure() {
        let length = PremappedLength { samples: SAMPLES_MIN, windows: 1, quick: true };
        let sleep = CallCost { user_ns: 0.0, system_ns: 500.0 };
        let report = report(length, measure(length), sleep, Err("no disk".into()), Err("no".into()));
        let text = report.text();
        let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is missing"));
        assert!(place("\ngoals") < place("\nclaims") && place("\nclaims") < place("1 device: CPU"));
        assert!(!text.contains("NaN"));
        assert!(place("dma-buf, strict IOMMU: mapped once has 8.8 times") > place("\nlater figures"), "{text}");
        assert_eq!(text.matches("  not applicable: depth").count(), 6, "{text}");
        assert!(text.contains("without a model: not measured, no disk"), "{text}");
        assert!(text.lines().skip(7).all(|line| line.chars().count() <= 130), "{text}");
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["rows"].as_array().unwrap().len(), 2 * SIZES.len() * BATCHES.len() * IoMemory::ALL.len());
        let picture = svg::picture(&report);
        assert_eq!(picture.matches("<circle").count(), 3 * (SIZES.len() + 3));
    }
}
