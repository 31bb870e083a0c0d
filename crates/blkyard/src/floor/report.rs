//! What `floor` prints: a line a limit, for people or for programs, and what the limits add up to.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Limit, Samples};

#[derive(Serialize)]
struct Row {
    limit: &'static str,
    /// 10th percentile of the windows: what it costs when nobody disturbs.
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

/// Prints limits as they come.
pub(super) struct Report {
    json: bool,
    values: BTreeMap<&'static str, f64>,
}

impl Report {
    pub(super) fn new(json: bool) -> Report {
        if !json {
            println!("{:18} {:>9} {:>9} {:>9} {:>9}  ", "limit, ns", "10th", "median", "90th", "hand-off");
        }
        Report { json, values: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, limit: &Limit, samples: &Samples, hand_off: Option<&Samples>) {
        let [low, median, high] = [10.0, 50.0, 90.0].map(|percent| samples.percentile(percent));
        let hand_off = hand_off.map(Samples::cost);
        self.values.insert(limit.name, samples.cost());
        let row = Row { limit: limit.name, value: samples.cost(), unit: "ns", low, median, high, hand_off };
        if self.json {
            match serde_json::to_string(&row) {
                Ok(line) => println!("{line}"),
                Err(error) => eprintln!("{}: {error}", limit.name),
            }
            return;
        }
        let hand_off = hand_off.map_or("-".into(), |ns| format!("{ns:.1}"));
        println!("{:18} {low:>9.1} {median:>9.1} {high:>9.1} {hand_off:>9}  {}", limit.name, limit.sentence);
    }

    /// What a path costs, from its limits.
    pub(super) fn close(&self) {
        if !self.json {
            println!("\n{}", formula(&self.values));
        }
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
