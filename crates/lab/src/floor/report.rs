//! The output of `floor`: a line for each limit, as text or JSON, and sums of the limits.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::process::ExitCode;

use serde::Serialize;

use super::{MachineLimit, Samples};
use crate::Console;

#[derive(Serialize)]
struct FloorRow {
    limit: &'static str,
    /// 10th percentile of the windows: the cost without disturbances.
    value: f64,
    unit: &'static str,
    /// 10th percentile, median and 90th percentile of the windows.
    low: f64,
    median: f64,
    high: f64,
    /// Of a limit across CPUs: a line handed over, in windows that lie between.
    #[serde(skip_serializing_if = "Option::is_none")]
    hand_off: Option<f64>,
}

/// Prints limits as they come, until standard output fails.
pub(super) struct FloorReport {
    json: bool,
    console: Console,
    /// Success, until something cannot be printed.
    code: ExitCode,
    values: BTreeMap<&'static str, f64>,
}

impl FloorReport {
    pub(super) fn new(json: bool, console: Console) -> FloorReport {
        let mut report = FloorReport { json, console, code: ExitCode::SUCCESS, values: BTreeMap::new() };
        if !json {
            let [limit, low, median, high, hand_off] = ["limit, ns", "10th", "median", "90th", "hand-off"];
            report.print(format_args!("{limit:18} {low:>9} {median:>9} {high:>9} {hand_off:>9}  "));
        }
        report
    }

    fn print(&mut self, line: impl Display) {
        if !self.has_failed() {
            self.code = (self.console.print)(&format_args!("{line}\n"), self.code);
        }
    }

    /// Whether standard output has failed: the rest is not needed.
    pub(super) fn has_failed(&self) -> bool {
        self.code != ExitCode::SUCCESS
    }

    pub(super) fn add(&mut self, limit: &MachineLimit, samples: &Samples, hand_off: Option<&Samples>) {
        let [low, median, high] = [10.0, 50.0, 90.0].map(|percent| samples.percentile(percent));
        let hand_off = hand_off.map(Samples::cost);
        self.values.insert(limit.name, samples.cost());
        let row = FloorRow { limit: limit.name, value: samples.cost(), unit: "ns", low, median, high, hand_off };
        if self.json {
            match serde_json::to_string(&row) {
                Ok(line) => self.print(line),
                Err(error) => (self.console.note)(&format_args!("{}: {error}", limit.name)),
            }
            return;
        }
        let hand_off = hand_off.map_or("-".into(), |ns| format!("{ns:.1}"));
        let (name, sentence) = (limit.name, limit.sentence);
        self.print(format_args!("{name:18} {low:>9.1} {median:>9.1} {high:>9.1} {hand_off:>9}  {sentence}"));
    }

    /// Cost of a path, from its limits.
    pub(super) fn close(mut self) -> ExitCode {
        if !self.json {
            self.print(format_args!("\n{}", formula(&self.values)));
        }
        self.code
    }
}

fn formula(values: &BTreeMap<&'static str, f64>) -> String {
    let of = |name: &str| values.get(name).map_or("?".into(), |ns| format!("{ns:.1}"));
    format!(
        "time of an I/O at depth 1 = hand-offs x {} + software + 2 x {}, if both sides sleep\n\
         time per I/O at a depth   = max(time at depth 1 / depth, lines x {} + software) + copies + 2 x {} / batch",
        of("line-serial"),
        of("wake-up"),
        of("line-pipelined"),
        of("clock"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_names_what_was_not_measured() {
        let text = formula(&BTreeMap::from([("line-serial", 55.0), ("clock", 21.0)]));
        assert!(text.contains("hand-offs x 55.0 + software + 2 x ?") && text.contains("2 x 21.0 / batch"), "{text}");
    }
}
