//! The report: verdicts, then tables, as text, JSON and picture. Pure formatting.

use blkyard_os::cpu_places;
use serde::Serialize;

use super::gains::GuestAnalysis;
use super::rig::DEPTH;
use super::served::{BackendTable, ServedWindows};
use super::verdicts::{claims, goals, ratios};
use super::world::Devices;
use super::{POST, VqCosts, VqLength, VqPoint, tables};
use crate::study::costs::BATCHES;
use crate::study::goals::{Goal, GoalVerdict, PostClaim};
use crate::study::parts::{Part, PartsReport};

/// All that was measured and simulated.
#[derive(Debug)]
pub(super) struct VqFigures {
    pub(super) length: VqLength,
    pub(super) costs: VqCosts,
    pub(super) guest: GuestAnalysis,
    pub(super) grid: Vec<VqPoint>,
    pub(super) cpus: Vec<VqPoint>,
    /// What virtual time makes of the forms of `costs.live`.
    pub(super) simulated_live: [f64; 4],
    pub(super) served: Vec<BackendTable>,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct VqReport {
    figures: VqFigures,
    tables: PartsReport,
}

impl VqReport {
    pub(super) fn new(figures: VqFigures, seed: u64) -> VqReport {
        let cpus_here = cpu_places().len();
        let VqFigures { costs, guest, grid, served, .. } = &figures;
        let verdicts = Part {
            goals: goals(grid, &costs.live, served, cpus_here),
            claims: claims(guest, grid, served, cpus_here),
            ..tables::gains(guest)
        };
        let parts = std::iter::once(verdicts).chain(tables::others(&figures)).collect();
        let tables = PartsReport {
            study: "multi-vq",
            title: "Several virtqueues for a disk",
            head: "4 KiB random reads, depth 64 a job, split rings",
            post: "Ming Lei, linux-kernel, June 2014: several virtqueues for a virtio-blk device. The gains of two queues over \
                   one are +33 % with two jobs, +100 % with four, +39 % at best. +33 % is calibrated, and counts as no claim",
            time: "simulated",
            mark: "post (2014)",
            seed,
            parts,
        };
        VqReport { figures, tables }
    }

    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.tables.verdicts()
    }

    /// Verdicts and tables.
    pub(crate) fn text(&self) -> String {
        self.tables.text()
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let VqReport { figures, tables } = self;
        let VqFigures { length, costs, guest, grid, cpus, served, .. } = figures;
        let goals: Vec<_> = tables.parts.iter().flat_map(|part| &part.goals).collect();
        let claims: Vec<_> = tables.parts.iter().flat_map(|part| &part.claims).collect();
        let [one, each] = [Devices::One, Devices::Each].map(|devices| ratios(grid, devices));
        let whole = VqJson {
            study: "multi-vq",
            source: tables.post,
            depth: DEPTH,
            windows: length.windows,
            ios: length.ios,
            seed: tables.seed,
            batches: &BATCHES,
            costs,
            fitted: ["lines_ns", "call_ns"],
            guest,
            simulated_grid: grid,
            simulated_cpus: cpus,
            served_windows: length.served,
            served,
            post: POST.map(|(what, ratio)| VqPost { what, ratio }),
            ratios_one_device_thread: one,
            ratios_thread_per_queue: each,
            claims,
            goals,
        };
        serde_json::to_string_pretty(&whole).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }

    /// A bar for each row of each table, with the post's points.
    pub(crate) fn picture(&self) -> String {
        self.tables.picture()
    }
}

#[derive(Serialize)]
struct VqJson<'a> {
    study: &'static str,
    /// The post.
    source: &'static str,
    depth: usize,
    windows: usize,
    ios: u64,
    seed: u64,
    /// The sizes of batch that the curves in `costs` are of.
    batches: &'a [usize],
    /// Measurements in real time.
    costs: &'a VqCosts,
    /// Parameters that are set so that a figure is met: that of driver and device apart, and the post's +33 %.
    fitted: [&'static str; 2],
    guest: &'a GuestAnalysis,
    simulated_grid: &'a [VqPoint],
    simulated_cpus: &'a [VqPoint],
    served_windows: ServedWindows,
    /// In separate processes, in real time.
    served: &'a [BackendTable],
    post: [VqPost; 3],
    /// In the post's order.
    ratios_one_device_thread: [f64; 3],
    ratios_thread_per_queue: [f64; 3],
    claims: Vec<&'a PostClaim>,
    goals: Vec<&'a Goal>,
}

#[derive(Serialize)]
struct VqPost {
    what: &'static str,
    ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::super::live::VqLive;
    use super::super::served::{BACK_ENDS, Found};
    use super::*;
    use crate::study::costs::CallCost;
    use crate::study::vq::steps::BatchCosts;

    /// A run on one CPU without another's back-end: many figures are missing.
    fn sparse() -> VqReport {
        let live = VqLive { alone_ns: 500.0, shared_ns: None, own_ns: None, apart_ns: None, two_queues: None };
        let costs = VqCosts {
            steps: BatchCosts::default(),
            mail_ns: 10.0,
            hand_over_ns: None,
            lines_ns: None,
            ring: CallCost::default(),
            live,
        };
        let missing =
            |back_end| BackendTable { back_end, found: Found::NotMeasured("it is not installed ".repeat(12)) };
        let figures = VqFigures {
            length: VqLength::new(true),
            costs,
            guest: GuestAnalysis::example(),
            grid: Vec::new(),
            cpus: Vec::new(),
            simulated_live: [f64::NAN; 4],
            served: BACK_ENDS.map(missing).into(),
        };
        VqReport::new(figures, 1)
    }

    #[test]
    fn the_report_has_no_line_above_110_columns_and_no_nan() {
        let report = sparse();
        let text = report.text();
        assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
        for out in [&text, &report.json(), &report.picture()] {
            assert!(!out.contains("NaN") && !out.contains("inf "), "{out}");
        }
        let place = |words: &str| text.find(words).unwrap_or_else(|| panic!("no {words}: {text}"));
        assert!(place("Ming Lei") < place("goals:") && place("goals:") < place("claims of the post"));
        assert!(place("claims of the post") < place("SIMULATED"));
    }

    #[test]
    fn the_picture_has_the_points_of_the_post() {
        let picture = sparse().picture();
        // Three gains, and four points of the curves that they imply.
        assert_eq!(picture.matches("class=\"post\"").count(), 3 + 4, "{picture}");
    }
}
