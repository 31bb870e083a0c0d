//! Claims of the post and of its analysis, each judged from the run, with a reason computed from it.
//!
//! A claim about several rows is reproduced if the row that shows it least does, in all runs.

use serde::Serialize;

use super::goals::ClaimVerdict;
use super::grid::{GridRow, Ratios, TICK_NS};
use super::judge::{GridRuns, RunRange};
use super::meter::StudyResult;
use super::post::POST;

/// A claim.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GridClaim {
    pub(crate) what: String,
    /// The post's figure.
    pub(crate) post: String,
    pub(crate) found: String,
    pub(crate) verdict: ClaimVerdict,
    /// Empty if the figures say all.
    pub(crate) reason: String,
}

/// Depths below the number of ids: every bio has one.
const IDS: usize = 1024;
/// Rows in which the bios of four jobs exceed the ids of a queue.
const CROWDED: [(usize, usize); 2] = [(4, 1024), (4, 2048)];

/// All claims, on a device with this ceiling.
pub(crate) fn claims(runs: GridRuns<'_>, ceiling_iops: f64) -> Vec<GridClaim> {
    let judge = ClaimJudge { runs, ceiling_iops };
    vec![
        judge.slower_alone(),
        judge.equal_or_higher(),
        judge.saturation(),
        judge.maxima(),
        judge.deviation(),
        judge.clustered_maxima(),
        judge.cpu_of_one_job(),
        judge.cpu_of_four_jobs(),
        judge.cpu_without_ids(),
        judge.system_time(),
        judge.tail(),
        judge.unfair_tail(),
        judge.reversed_deviation(),
        judge.milliseconds(),
        GridClaim {
            what: "left open: suspend and resume, one doorbell a batch, a \"queue suspended\" flag, several namespaces, page boundaries".into(),
            post: "open".into(),
            found: "no figures".into(),
            verdict: ClaimVerdict::NotApplicable,
            reason: "these are not measurements".into(),
        },
    ]
}

struct ClaimJudge<'a> {
    runs: GridRuns<'a>,
    ceiling_iops: f64,
}

/// Least and greatest of a figure over some rows.
struct RowSpan {
    post: String,
    least: RunRange,
    most: RunRange,
}

impl RowSpan {
    /// Of the main run, then of all runs.
    fn found(&self, digits: usize) -> String {
        let RowSpan { least, most, .. } = self;
        let main = span(least.value, most.value, digits);
        let all = span(least.low, most.high, digits);
        if main == all { main } else { format!("{main}; in all runs {all}") }
    }
}

impl ClaimJudge<'_> {
    /// A ratio over some rows, in the runs and in the post.
    fn span(&self, which: impl Fn(&GridRow) -> bool, ratio: impl Fn(&Ratios) -> f64, digits: usize) -> RowSpan {
        let posted: Vec<_> = self.rows(&which).map(|row| ratio(&row.post_ratios())).collect();
        RowSpan {
            post: least_to_most(&posted, digits),
            least: self.runs.least(&which, |row| ratio(&row.ratios())),
            most: self.runs.most(&which, |row| ratio(&row.ratios())),
        }
    }

    fn rows(&self, which: impl Fn(&GridRow) -> bool) -> impl Iterator<Item = &GridRow> {
        self.runs.main.iter().filter(move |row| which(row))
    }

    fn row(&self, jobs: usize, depth: usize) -> Option<&GridRow> {
        self.rows(is_at(&[(jobs, depth)])).next()
    }

    fn slower_alone(&self) -> GridClaim {
        let span = self.span(is_at(&[(1, 1), (1, 2)]), |ratios| ratios.iops, 3);
        let reason = self.row(1, 1).map(|GridRow { mq, bio, .. }| {
            let [mq_ns, bio_ns] = [mq, bio].map(StudyResult::cpu_ns);
            format!("an I/O of {:.2} us takes {mq_ns:.0} ns of CPU with mq and {bio_ns:.0} with bio", mq.mean_us)
        });
        GridClaim {
            what: "bio is faster at 1,1 and 1,2: IOPS, mq/bio".into(),
            found: span.found(3),
            verdict: span.most.is_at_most(0.99),
            post: span.post,
            reason: reason.unwrap_or_default(),
        }
    }

    fn equal_or_higher(&self) -> GridClaim {
        let span = self.span(|row| row.post.jobs * row.post.depth >= 4, |ratios| ratios.iops, 3);
        GridClaim {
            what: "equal or higher IOPS with four or more I/Os: mq/bio".into(),
            found: span.found(3),
            // The post's figures have three digits.
            verdict: span.least.is_at_least(0.995),
            post: span.post,
            reason: "the device's ceiling decides both".into(),
        }
    }

    fn saturation(&self) -> GridClaim {
        let is_saturated = |row: &GridRow| row.post.mq.iops >= 269_000.0 && row.post.bio.iops >= 265_000.0;
        let span = self.span(is_saturated, |ratios| ratios.iops, 3);
        let bio = self.rows(is_saturated).map(|row| row.bio.iops / self.ceiling_iops).fold(f64::INFINITY, f64::min);
        GridClaim {
            what: "IOPS of mq some 1.015 times bio's where the device is saturated".into(),
            found: span.found(3),
            verdict: span.least.is_at_least(1.01),
            post: span.post,
            reason: format!(
                "bio reaches at least {bio:.4} of the model's ceiling of {:.1} K, which leaves at most {:.4}",
                self.ceiling_iops / 1e3,
                1.0 / bio
            ),
        }
    }

    /// The post's maximum of mq is the lower one.
    fn maxima(&self) -> GridClaim {
        let is_lower = |row: &GridRow| row.post.mq.max_us < row.post.bio.max_us;
        let span = self.span(is_lower, |ratios| 1.0 / ratios.max, 2);
        GridClaim {
            what: format!("lower maxima in {} of {} rows: bio/mq", self.rows(is_lower).count(), POST.len()),
            found: span.found(2),
            // The post's least is 1.05.
            verdict: span.least.is_at_least(1.04),
            post: span.post,
            reason: self.no_pause(),
        }
    }

    fn deviation(&self) -> GridClaim {
        let span = self.span(|row| row.post.jobs * row.post.depth <= 2048, |ratios| 1.0 / ratios.stdev, 2);
        GridClaim {
            what: "deviation of latency at least 1.4 times lower up to 4,128: bio/mq".into(),
            found: span.found(2),
            verdict: span.least.is_at_least(1.4),
            post: span.post,
            reason: "see the maxima".into(),
        }
    }

    fn clustered_maxima(&self) -> GridClaim {
        let is_tick = |max_us: f64| (2_110.0..2_170.0).contains(&max_us);
        let which = |row: &GridRow| is_tick(row.post.bio.max_us);
        let found =
            self.runs.range(|rows| rows.iter().filter(|row| which(row) && is_tick(row.bio.max_us)).count() as f64);
        let rows = self.rows(which).count();
        GridClaim {
            what: "maxima of bio between 2.11 and 2.17 ms".into(),
            post: format!("{rows} rows"),
            found: format!("{} of these", found.text(0)),
            verdict: found.is_at_least(rows as f64),
            reason: "see the maxima".into(),
        }
    }

    /// What the baseline's lock and helper do where every bio has an id.
    fn no_pause(&self) -> String {
        let within = || self.rows(|row| row.post.depth < IDS);
        let most = |of: fn(&GridRow) -> f64| within().map(of).fold(0.0, f64::max);
        let (listed, longest) = (most(|row| row.bio.listed), most(|row| row.bio.max_us - row.bio_untimed.max_us));
        let found = format!(
            "below {IDS} ids, {:.0} % of bios wait on bio's list, and the helper's tick of {:.1} ms adds at most {longest:.2} us to \
             a maximum",
            listed * 100.0,
            TICK_NS as f64 / 1e6
        );
        if listed > 0.0 || longest > 1_000.0 {
            return found;
        }
        format!(
            "{found}: bio's lock and helper make no pause there, and the cause of the post's is unknown, a tick or timer"
        )
    }

    fn cpu_of_one_job(&self) -> GridClaim {
        let which = |row: &GridRow| row.post.jobs == 1 && row.post.depth < IDS;
        let span = self.span(which, |ratios| ratios.cpu, 2);
        let reason = self.row(1, 16).map(|GridRow { mq, bio, post, .. }| {
            let [mq_post, bio_post] = [post.mq, post.bio].map(|cell| cell.user_ns(1));
            format!(
                "user time at 1,16: mq {:.0} ns, bio {:.0}; the post's {mq_post:.0} and {bio_post:.0}, of which it states no cause",
                mq.user_ns, bio.user_ns
            )
        });
        GridClaim {
            what: "more CPU per I/O with one job up to 1,128: mq/bio".into(),
            found: span.found(2),
            verdict: span.least.is_at_least(1.0),
            post: span.post,
            reason: reason.unwrap_or_default(),
        }
    }

    fn cpu_of_four_jobs(&self) -> GridClaim {
        let which = |row: &GridRow| row.post.jobs == 4 && row.post.depth < IDS;
        let span = self.span(which, |ratios| ratios.cpu, 2);
        let one_lock = |row: &GridRow| row.bio_one_lock.map_or(f64::NAN, |bio| row.mq.cpu_ns() / bio.cpu_ns());
        let contended = RowSpan {
            post: String::new(),
            least: self.runs.least(which, one_lock),
            most: self.runs.most(which, one_lock),
        };
        GridClaim {
            what: "less CPU per I/O with four jobs up to 4,128: mq/bio".into(),
            found: span.found(2),
            verdict: span.most.is_at_most(1.0),
            post: span.post,
            reason: format!(
                "bio has a queue and a lock for each job; with one contended lock for all: {}",
                contended.found(2)
            ),
        }
    }

    fn cpu_without_ids(&self) -> GridClaim {
        let which = |row: &GridRow| row.post.depth >= IDS;
        let span = self.span(which, |ratios| ratios.cpu, 2);
        let of_post = self.runs.most(which, |row| row.ratios().cpu / row.post_ratios().cpu);
        let wakes = self
            .row(4, 2048)
            .map(|row| format!("at 4,2048 bio wakes its helper {:.2} times for an I/O", row.bio.helper_wakes));
        GridClaim {
            what: "less CPU per I/O at 1,1024, 1,2048, 4,1024 and 4,2048: mq/bio".into(),
            found: format!("{}; {} times the post's at most", span.found(2), of_post.text(2)),
            verdict: of_post.is_at_most(1.0),
            post: span.post,
            reason: wakes.unwrap_or_default(),
        }
    }

    fn system_time(&self) -> GridClaim {
        let which = is_at(&CROWDED);
        let of = |row: &GridRow| row.mq.system_ns / row.bio.system_ns;
        let posted: Vec<_> =
            self.rows(&which).map(|row| row.post.mq.system_ns(4) / row.post.bio.system_ns(4)).collect();
        let span = RowSpan {
            post: least_to_most(&posted, 2),
            least: self.runs.least(&which, of),
            most: self.runs.most(&which, of),
        };
        GridClaim {
            what: "a third of the system time per I/O at 4,1024 and 4,2048: mq/bio".into(),
            found: span.found(2),
            verdict: span.most.is_at_most(0.35),
            post: span.post,
            reason: "only sleep and wake-up call the system here, at measured costs".into(),
        }
    }

    fn tail(&self) -> GridClaim {
        let fair = |row: &GridRow| Some(row.mq);
        let (found, is_shown) = self.tail_of(fair);
        GridClaim {
            what: "a tail of mq at 4,1024 and 4,2048: stdev/mean, max/mean".into(),
            post: post_tail(),
            found,
            verdict: is_shown,
            reason: "a queue passes its tags on in the order of submission; that none occurs is the goal above".into(),
        }
    }

    fn unfair_tail(&self) -> GridClaim {
        let (found, is_shown) = self.tail_of(|row| row.unfair);
        GridClaim {
            what: "the same from its inferred cause, tags that jobs share and pass on unfairly (here: at random)".into(),
            post: post_tail(),
            found,
            verdict: is_shown,
            reason: "one queue for all jobs, not the product's order; a model of the tail's cause, which the post does not name".into(),
        }
    }

    /// Deviation and maximum over the mean in the crowded rows, and whether both reach the post's in both.
    fn tail_of(&self, mode: impl Fn(&GridRow) -> Option<StudyResult>) -> (String, ClaimVerdict) {
        let which = is_at(&CROWDED);
        let ratio =
            |row: &GridRow, of: fn(&StudyResult) -> f64| mode(row).map_or(f64::NAN, |mode| of(&mode) / mode.mean_us);
        let found: Vec<_> = self
            .rows(&which)
            .map(|row| format!("{:.2}, {:.1}", ratio(row, |mode| mode.stdev_us), ratio(row, |mode| mode.max_us)))
            .collect();
        let reached = self.runs.least(&which, |row| {
            let post = row.post.mq;
            let stdev = ratio(row, |mode| mode.stdev_us) / (post.stdev_us / post.mean_us);
            stdev.min(ratio(row, |mode| mode.max_us) / (post.max_us / post.mean_us))
        });
        (found.join(" and "), reached.is_at_least(1.0))
    }

    /// There the post's bio is the one with the lower deviation.
    fn reversed_deviation(&self) -> GridClaim {
        let span = self.span(is_at(&CROWDED), |ratios| 1.0 / ratios.stdev, 3);
        GridClaim {
            what: "there bio has the lower deviation: bio/mq".into(),
            found: span.found(3),
            verdict: span.most.is_at_most(0.5),
            post: span.post,
            reason: "mq has no tail here".into(),
        }
    }

    fn milliseconds(&self) -> GridClaim {
        let off = |ios: f64, iops: f64, mean_us: f64| (iops * mean_us / 1e6 / ios - 1.0).abs() * 100.0;
        let ios = |row: &GridRow| (row.post.jobs * row.post.depth) as f64;
        let post = self
            .rows(|_| true)
            .flat_map(|row| [row.post.mq, row.post.bio].map(|cell| off(ios(row), cell.iops, cell.mean_us)));
        let post = post.fold(0.0, f64::max);
        let found = self.runs.most(
            |_| true,
            |row| [row.mq, row.bio].map(|mode| off(ios(row), mode.iops, mode.mean_us)).into_iter().fold(0.0, f64::max),
        );
        GridClaim {
            what: "I/Os in flight = IOPS x mean latency, if 4,1024 (mq) and 4,2048 are in ms: largest difference"
                .into(),
            post: format!("{post:.1} %"),
            found: format!("{} %", found.text(1)),
            verdict: found.is_at_most(3.5),
            reason: String::new(),
        }
    }
}

/// A test for some jobs and depths.
fn is_at(points: &[(usize, usize)]) -> impl Fn(&GridRow) -> bool {
    |row| points.contains(&(row.post.jobs, row.post.depth))
}

fn post_tail() -> String {
    let rows = POST.iter().filter(|row| CROWDED.contains(&(row.jobs, row.depth)));
    let tails: Vec<_> = rows
        .map(|row| format!("{:.2}, {:.1}", row.mq.stdev_us / row.mq.mean_us, row.mq.max_us / row.mq.mean_us))
        .collect();
    tails.join(" and ")
}

fn least_to_most(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    span(least, most, digits)
}

/// Two figures, or one where both read the same.
fn span(low: f64, high: f64, digits: usize) -> String {
    let [low, high] = [low, high].map(|value| format!("{value:.digits$}"));
    if low == high { low } else { format!("{low} to {high}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::grid::tests::example_rows;

    fn found(rows: &[GridRow], repeats: &[Vec<GridRow>], what: &str) -> GridClaim {
        let claims = claims(GridRuns { main: rows, repeats }, 270_270.0);
        claims.into_iter().find(|claim| claim.what.starts_with(what)).unwrap()
    }

    #[test]
    fn figures_like_the_posts_reproduce_its_claims() {
        let mut rows = example_rows();
        let like = |cell: super::super::post::PostCell, jobs| StudyResult {
            iops: cell.iops,
            user_ns: cell.user_ns(jobs),
            system_ns: cell.system_ns(jobs),
            min_us: cell.min_us,
            max_us: cell.max_us,
            mean_us: cell.mean_us,
            stdev_us: cell.stdev_us,
            ..StudyResult::default()
        };
        for row in &mut rows {
            (row.mq, row.bio) = (like(row.post.mq, row.post.jobs), like(row.post.bio, row.post.jobs));
            row.unfair = Some(row.mq);
        }
        for claim in claims(GridRuns { main: &rows, repeats: &[] }, 270_270.0) {
            let is_figure = !claim.what.starts_with("left open");
            let expected = if is_figure { ClaimVerdict::Reproduced } else { ClaimVerdict::NotApplicable };
            assert_eq!(claim.verdict, expected, "{claim:?}");
        }
    }

    #[test]
    fn a_claim_is_undecided_when_repeats_disagree() {
        let rows = example_rows();
        let mut other = rows.clone();
        other.iter_mut().for_each(|row| row.mq.system_ns = 1000.0);
        assert_eq!(found(&rows, &[], "a third").verdict, ClaimVerdict::Reproduced);
        let claim = found(&rows, &[other], "a third");
        assert_eq!(claim.verdict, ClaimVerdict::Undecided);
        assert!(claim.found.contains("in all runs 0.34 to 0.53"), "{claim:?}");
    }

    #[test]
    fn every_claim_has_the_posts_figure_and_ours_and_no_nan() {
        let rows = example_rows();
        for claim in claims(GridRuns { main: &rows, repeats: &[] }, 270_270.0) {
            let text = format!("{} {} {}", claim.post, claim.found, claim.reason);
            assert!(!claim.post.is_empty() && !claim.found.is_empty(), "{claim:?}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{claim:?}");
        }
    }
}
