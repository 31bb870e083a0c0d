//! Results of a run in virtual time: I/Os, CPU time, latencies, and event counts.

use serde::Serialize;

use super::costs::CallCost;
use super::end::Moved;

/// Counts; from [`StudyMeter::start`] on for good.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StudyMeter {
    started_ns: Option<u64>,
    user_ns: f64,
    system_ns: f64,
    ios: u64,
    min_ns: u64,
    max_ns: u64,
    mean_ns: f64,
    /// Sum of the squares of the differences from the mean.
    squares: f64,
    wakes: u64,
    helper_wakes: u64,
    listed: u64,
}

/// The result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct StudyResult {
    pub(crate) iops: f64,
    /// CPU time of an I/O, nanoseconds.
    pub(crate) user_ns: f64,
    pub(crate) system_ns: f64,
    /// Latency, microseconds.
    pub(crate) min_us: f64,
    pub(crate) max_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) stdev_us: f64,
    /// How often a job was woken, an I/O.
    pub(crate) wakes: f64,
    /// How often the helper was, an I/O.
    pub(crate) helper_wakes: f64,
    /// Share of bios that had to wait on a list.
    pub(crate) listed: f64,
}

impl StudyResult {
    pub(crate) fn cpu_ns(&self) -> f64 {
        self.user_ns + self.system_ns
    }
}

impl StudyMeter {
    /// Drops earlier counts, and starts counting.
    pub(crate) fn start(&mut self, now_ns: u64) {
        *self = StudyMeter { started_ns: Some(now_ns), ..StudyMeter::default() };
    }

    pub(crate) fn is_on(&self) -> bool {
        self.started_ns.is_some()
    }

    pub(crate) fn ios(&self) -> u64 {
        self.ios
    }

    #[inline]
    pub(crate) fn charge(&mut self, cost: CallCost) {
        self.user_ns += cost.user_ns;
        self.system_ns += cost.system_ns;
    }

    #[inline]
    pub(crate) fn moved(&mut self, moved: &Moved) {
        self.listed += moved.listed as u64;
    }

    #[inline]
    pub(crate) fn woke(&mut self, helper: bool) {
        if helper {
            self.helper_wakes += 1;
        } else {
            self.wakes += 1;
        }
    }

    /// Adds the latency of an I/O. Mean and deviation by Welford's method, which is numerically stable.
    #[inline]
    pub(crate) fn ended(&mut self, took_ns: u64) {
        self.min_ns = if self.ios == 0 { took_ns } else { self.min_ns.min(took_ns) };
        self.max_ns = self.max_ns.max(took_ns);
        self.ios += 1;
        let off = took_ns as f64 - self.mean_ns;
        self.mean_ns += off / self.ios as f64;
        self.squares += off * (took_ns as f64 - self.mean_ns);
    }

    pub(crate) fn outcome(&self, now_ns: u64) -> StudyResult {
        let ran_ns = (now_ns - self.started_ns.unwrap_or(0)) as f64;
        let ios = self.ios.max(1) as f64;
        StudyResult {
            iops: self.ios as f64 / ran_ns * 1e9,
            user_ns: self.user_ns / ios,
            system_ns: self.system_ns / ios,
            min_us: self.min_ns as f64 / 1e3,
            max_us: self.max_ns as f64 / 1e3,
            mean_us: self.mean_ns / 1e3,
            stdev_us: (self.squares / ios).sqrt() / 1e3,
            wakes: self.wakes as f64 / ios,
            helper_wakes: self.helper_wakes as f64 / ios,
            listed: self.listed as f64 / ios,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_forgets_the_warm_up() {
        let mut meter = StudyMeter::default();
        meter.ended(1_000_000);
        meter.start(5_000);
        [1_000, 2_000, 3_000, 6_000].into_iter().for_each(|ns| meter.ended(ns));
        meter.charge(CallCost { user_ns: 40.0, system_ns: 400.0 });
        let outcome = meter.outcome(9_000);
        assert!((outcome.iops - 1e6).abs() < 1e-6 && (outcome.cpu_ns() - 110.0).abs() < 1e-9);
        assert!((outcome.mean_us - 3.0).abs() < 1e-9 && (outcome.stdev_us - 3.5_f64.sqrt()).abs() < 1e-9);
        assert!((outcome.min_us - 1.0).abs() < 1e-9 && (outcome.max_us - 6.0).abs() < 1e-9);
    }
}
