//! The report, as text and JSON: verdicts first. Pure formatting.

use std::fmt::Write;

use serde::Serialize;

use super::follow_up::follow_up;
use super::host::HostPairs;
use super::interval::MedianInterval;
use super::mapping::{MODELS, MappingModel};
use super::pairs::table;
use super::post::{FOLLOW_UP, FollowUpLoad, LINK_128K_IOPS, POST, PostedRatio, SUBMISSION_NS};
use super::verdicts::{PremappedClaim, PremappedGoal, PremappedVerdict, claims, goals};
use super::{BATCHES, Bed, IoMemory, PremappedLength, PremappedRow, PremappedRows, SIZES};
use crate::study::costs::CallCost;
use crate::study::goals::GoalVerdict;

/// Parts that are the product's code.
const REAL: &str = "queue core, NVMe driver, PRP entries and lists, registered buffers, rings and doorbells in memory";
/// Parts that are a model.
const MODELLED: &str = "the cost of mapping pages; the link's ceiling, which is the post's; one interrupt for each \
                        batch; pinning of plain memory is not charged";

/// Everything.
#[derive(Debug)]
pub(crate) struct PremappedReport {
    length: PremappedLength,
    rows: PremappedRows,
    /// Pairs on a file of this machine, or why there are none.
    host: Result<HostPairs, String>,
    /// Why instructions were not counted.
    not_counted: Option<String>,
    goals: Vec<PremappedGoal>,
    claims: Vec<PremappedClaim>,
    /// Later figures.
    follow_up: Vec<PremappedClaim>,
}

impl PremappedReport {
    pub(crate) fn new(
        length: PremappedLength,
        rows: PremappedRows,
        host: Result<HostPairs, String>,
        not_counted: Option<String>,
    ) -> PremappedReport {
        let (goals, claims, follow_up) = (goals(&rows), claims(&rows), follow_up(&rows, &host));
        PremappedReport { length, rows, host, not_counted, goals, claims, follow_up }
    }

    pub(crate) fn rows(&self) -> &PremappedRows {
        &self.rows
    }

    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.goals.iter().map(|goal| match goal.verdict {
            PremappedVerdict::Yes => GoalVerdict::Met,
            PremappedVerdict::No => GoalVerdict::Missed,
            PremappedVerdict::Undecided => GoalVerdict::Undecided,
            PremappedVerdict::BuiltIn | PremappedVerdict::NotShown | PremappedVerdict::NotApplicable => {
                GoalVerdict::ByConstruction
            }
        })
    }

    /// Verdicts, then the tables.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let PremappedLength { samples, windows, .. } = self.length;
        let _ = writeln!(
            out,
            "study premapped: buffers registered and mapped once (K. Busch, J. Axboe, linux-nvme, August 2022)\n\
             real: {REAL};\n      our controller on a null device, on the same thread, is in no figure\n\
             model: {}\n\
             {samples} samples a row, each the 10th percentile of {windows} windows; median and 95 % interval\n",
            MODELLED.replace("batch; ", "batch;\n       ")
        );
        self.write_verdicts(&mut out);
        for bed in Bed::ALL {
            self.cpu(&mut out, bed);
        }
        self.modelled(&mut out);
        self.link(&mut out);
        posted(&mut out);
        out
    }

    fn write_verdicts(&self, out: &mut String) {
        let _ = writeln!(out, "goals");
        for PremappedGoal { what, goal, value, at, by_instructions, verdict } in &self.goals {
            let verdict = match verdict {
                PremappedVerdict::Yes => "met",
                PremappedVerdict::No => "MISSED",
                PremappedVerdict::Undecided => "undecided",
                PremappedVerdict::BuiltIn => "built into the model",
                PremappedVerdict::NotShown => "not shown",
                PremappedVerdict::NotApplicable => "not applicable",
            };
            let counted =
                by_instructions.map_or(String::new(), |ratio| format!("; at worst {ratio:.3} by instructions"));
            let _ = writeln!(out, "  {verdict}: {what}\n      {} ({goal}), the worst at {at}{counted}", spread(*value));
        }
        let _ = writeln!(out, "\nclaims of the post and its follow-up");
        write_claims(out, &self.claims);
        let _ = writeln!(
            out,
            "\nlater figures: K. Busch, 31 August 2022, strict IOMMU; the dma-buf series of 2025\n  \
             ours are of one device, in batches of 1 for depth 1, of 8 for depth 16, of 31 for dma-buf"
        );
        write_claims(out, &self.follow_up);
        let _ = match &self.host {
            Ok(HostPairs { folder, depth, pairs }) => writeln!(
                out,
                "\nwithout a model: io_uring, reads with O_DIRECT of a file in {}, {depth} in flight; one thread's CPU\n  \
                 time with its system calls, without interrupts; ratios are fixed over plain buffers\n\n{}",
                folder.display(),
                table(pairs, ["plain", "fixed"])
            ),
            Err(why) => writeln!(out, "\nwithout a model: not measured, {why}\n"),
        };
        let _ = writeln!(out, "memory mapped for each I/O by VFIO: see blkyard study premapped --device pci:ADDRESS\n");
    }

    fn cpu(&self, out: &mut String, bed: Bed) {
        let counted = match &self.not_counted {
            Some(why) => format!("instructions: not counted, {why}"),
            None => "instructions of the submission, by valgrind".into(),
        };
        let CallCost { user_ns, system_ns } = self.rows.sleep;
        let _ = writeln!(
            out,
            "{}: CPU ns for each I/O, no cost of mapping; {counted}\n  \
             p plain, r registered, m registered and mapped; an interrupt costs {:.0} ns for a batch\n\n\
             {:>8}{:>6} {:^21}  {:^21}  {:^21}  {:^21}",
            bed.name(),
            user_ns + system_ns,
            "size",
            "batch",
            "submission",
            "all, polled",
            "all, by interrupt",
            "instructions"
        );
        let three = format!("{:>7}{:>7}{:>7}", "p", "r", "m");
        let _ = writeln!(out, "{:14} {three}  {three}  {three}  {three}", "");
        for bytes in SIZES {
            for (number, batch) in BATCHES.into_iter().enumerate() {
                let rows = IoMemory::ALL.map(|memory| self.rows.get(bed, bytes, batch, memory));
                let name = if number == 0 { size(bytes) } else { String::new() };
                let _ = write!(out, "{name:>8}{batch:>6} ");
                let figures: [fn(&PremappedRow) -> f64; 3] =
                    [|row| row.submit_ns.median, |row| row.polled_ns.median, |row| row.interrupt_ns.median];
                for figure in figures {
                    rows.iter().for_each(|row| _ = write!(out, "{:>7.1}", figure(row)));
                    out.push_str("  ");
                }
                for row in rows {
                    let counted = row.instructions.map_or("-".into(), |[submit, _]| format!("{submit:.0}"));
                    let _ = write!(out, "{counted:>7}");
                }
                out.push('\n');
            }
        }
        out.push('\n');
    }

    fn modelled(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "1 device, polled, batches of 31, with the modelled cost of mapping: CPU ns for each I/O, and mapped/registered\n\n\
             {:>8} {:^24}  {:^24}  {:^24}\n{:8} {}",
            "size",
            MODELS[0].name,
            MODELS[1].name,
            MODELS[2].name,
            "",
            format!("{:>9}{:>8}{:>7}  ", "r", "m", "m/r").repeat(MODELS.len()).trim_end()
        );
        for bytes in SIZES {
            let [registered, mapped] = [IoMemory::Registered, IoMemory::Mapped]
                .map(|memory| self.rows.get(Bed::One, bytes, 31, memory).polled_ns.median);
            let _ = write!(out, "{:>8} ", size(bytes));
            for model in MODELS {
                let registered = registered + model.total_ns(bytes);
                let _ = write!(out, "{registered:>9.1}{mapped:>8.1}{:>7.3}  ", mapped / registered);
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        out.push('\n');
    }

    fn link(&self, out: &mut String) {
        let bytes_per_s = link_bytes_per_s();
        let _ = writeln!(
            out,
            "24 devices, polled, behind a link of {:.1} GB/s: one core at its limit, and cores to fill the link\n  \
             batches of 2 up to 4 KiB, of 31 above, as in the post; no cost of mapping\n\n\
             {:>8} {:>13} {:>11} {:>14} {:>9}",
            bytes_per_s / 1e9,
            "size",
            "memory",
            "M IOPS",
            "GB/s",
            "cores"
        );
        for row in self.link_rows() {
            let _ = writeln!(
                out,
                "{:>8} {:>13} {:>11.2} {:>14.1} {:>9.3}",
                size(row.bytes),
                row.memory.name(),
                row.iops / 1e6,
                row.iops * f64::from(row.bytes) / 1e9,
                row.cores
            );
        }
        out.push('\n');
    }

    fn link_rows(&self) -> Vec<LinkRow> {
        let row = |bytes: u32, memory: IoMemory| {
            let batch = if bytes <= 4 << 10 { 2 } else { 31 };
            let ns = self.rows.get(Bed::Many, bytes, batch, memory).polled_ns.median;
            let ceiling = link_bytes_per_s() / f64::from(bytes);
            LinkRow { bytes, memory, iops: ceiling.min(1e9 / ns), cores: ceiling * ns / 1e9 }
        };
        SIZES.into_iter().flat_map(|bytes| IoMemory::ALL.map(|memory| row(bytes, memory))).collect()
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let whole = PremappedJson {
            study: "premapped",
            real: REAL,
            modelled: MODELLED,
            length: self.length,
            not_counted: self.not_counted.as_ref(),
            sleep: self.rows.sleep,
            models: &MODELS,
            goals: &self.goals,
            claims: &self.claims,
            follow_up: &self.follow_up,
            rows: self.rows.all(),
            host: self.host.as_ref().ok(),
            no_host: self.host.as_ref().err(),
            link: self.link_rows(),
            post: &POST,
            loads: &FOLLOW_UP,
        };
        serde_json::to_string_pretty(&whole).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }
}

/// Figures behind the link.
#[derive(Debug, Serialize)]
struct LinkRow {
    bytes: u32,
    memory: IoMemory,
    /// Of one core, at most what the link carries.
    iops: f64,
    /// Cores that fill the link.
    cores: f64,
}

fn link_bytes_per_s() -> f64 {
    LINK_128K_IOPS * f64::from(128 << 10)
}

fn posted(out: &mut String) {
    let _ = writeln!(out, "the post\n\n{:28} {:>26} {:>26} {:>7}", "", "registered", "mapped", "ratio");
    for PostedRatio { load, registered, mapped, ratio } in POST {
        let _ = writeln!(out, "{load:28} {registered:>26} {mapped:>26} {ratio:>7.3}");
    }
    let _ = writeln!(
        out,
        "\nK. Busch, fio at depth 1, strict IOMMU: submission latency, ns (the strict model is fitted to it)\n"
    );
    for (bytes, [plain, registered, mapped]) in SUBMISSION_NS {
        let _ = writeln!(out, "{:>8} plain {plain:.0}, registered {registered:.0}, mapped {mapped:.0}", size(bytes));
    }
}

fn write_claims(out: &mut String, claims: &[PremappedClaim]) {
    for PremappedClaim { what, found, verdict, reason } in claims {
        let verdict = match verdict {
            PremappedVerdict::Yes => "reproduced",
            PremappedVerdict::No => "not reproduced",
            PremappedVerdict::Undecided => "undecided",
            PremappedVerdict::BuiltIn => "built into the model",
            PremappedVerdict::NotShown => "not shown",
            PremappedVerdict::NotApplicable => "not applicable",
        };
        let reason = if reason.is_empty() { String::new() } else { format!(";\n      {reason}") };
        let _ = writeln!(out, "  {verdict}: {what}\n      {found}{reason}");
    }
}

pub(crate) fn spread(MedianInterval { low, median, high }: MedianInterval) -> String {
    format!("{median:.3} ({low:.3} to {high:.3})")
}

pub(crate) fn size(bytes: u32) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

#[derive(Serialize)]
struct PremappedJson<'a> {
    study: &'static str,
    /// Parts that are the product's code.
    real: &'static str,
    /// Parts that are a model.
    modelled: &'static str,
    length: PremappedLength,
    /// Why there are no counts of instructions.
    not_counted: Option<&'a String>,
    sleep: CallCost,
    models: &'a [MappingModel],
    goals: &'a [PremappedGoal],
    claims: &'a [PremappedClaim],
    /// Later figures.
    follow_up: &'a [PremappedClaim],
    rows: &'a [PremappedRow],
    /// Pairs on a file of this machine.
    host: Option<&'a HostPairs>,
    /// Why there are none.
    no_host: Option<&'a String>,
    link: Vec<LinkRow>,
    post: &'a [PostedRatio],
    /// Loads of the later figures.
    loads: &'a [FollowUpLoad],
}
