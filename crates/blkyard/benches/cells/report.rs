//! What is printed: a line a cell, for people or for programs. Knows which cells were asked for.

use serde::Serialize;

use crate::windows::Samples;

/// One measured cell.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Path and load.
    pub cell: String,
    /// The figure itself.
    pub value: f64,
    /// What it is counted in.
    pub unit: &'static str,
    /// 10th percentile of the windows.
    pub low: f64,
    /// 90th percentile of the windows.
    pub high: f64,
    /// What the machine itself takes for it, measured in the same minute.
    pub floor: Option<f64>,
    /// What others take for it, measured in the same minute.
    pub baseline: Option<f64>,
}

impl Figure {
    /// A cost in nanoseconds per I/O.
    pub fn cost(cell: String, samples: &Samples) -> Figure {
        let (low, high) = (samples.percentile(10.0), samples.percentile(90.0));
        Figure { cell, value: samples.cost(), unit: "ns/io", low, high, floor: None, baseline: None }
    }

    /// A figure of windows so long that the neighbours are in all of them: their median.
    pub fn median(cell: String, unit: &'static str, samples: &Samples) -> Figure {
        Figure { value: samples.percentile(50.0), unit, ..Figure::cost(cell, samples) }
    }

    /// How much more one costs than another; low and high are of windows side by side.
    pub fn difference(cell: String, more: &Samples, less: &Samples) -> Figure {
        let apart = more.more_than(less);
        Figure { value: more.cost() - less.cost(), ..Figure::cost(cell, &apart) }
    }

    /// Beside what it stands.
    pub fn against(self, floor: Option<f64>, baseline: Option<f64>) -> Figure {
        Figure { floor, baseline, ..self }
    }
}

/// Prints cells as they come.
#[derive(Debug)]
pub struct Report {
    filters: Vec<String>,
    json: bool,
    head: bool,
}

impl Report {
    /// Of the cells whose names hold one of the filters; of all, if there are none.
    pub fn new(filters: Vec<String>, json: bool) -> Report {
        Report { filters, json, head: false }
    }

    /// Whether a cell was asked for.
    pub fn wants(&self, cell: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| cell.contains(filter.as_str()))
    }

    /// Prints a cell, if it was asked for.
    pub fn add(&mut self, figure: Figure) {
        if !self.wants(&figure.cell) {
            return;
        }
        if self.json {
            match serde_json::to_string(&figure) {
                Ok(line) => println!("{line}"),
                Err(error) => eprintln!("{}: {error}", figure.cell),
            }
            return;
        }
        if !self.head {
            self.head = true;
            let [value, low, high, floor, baseline] = ["value", "low", "high", "floor", "baseline"];
            println!("{:32} {value:>10} {:8} {low:>10} {high:>10} {floor:>10} {baseline:>10}", "cell", "unit");
        }
        let Figure { cell, value, unit, low, high, floor, baseline } = figure;
        let [value, low, high] = [value, low, high].map(show);
        let [floor, baseline] = [floor, baseline].map(|beside| beside.map_or("-".into(), show));
        println!("{cell:32} {value:>10} {unit:8} {low:>10} {high:>10} {floor:>10} {baseline:>10}");
    }
}

/// Says that a cell that was asked for could not be measured, and why.
pub fn skip(cell: &str, why: &str) {
    eprintln!("{cell}: not measured: {why}");
}

fn show(value: f64) -> String {
    if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
