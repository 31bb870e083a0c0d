//! The output: a line for each cell, as text or JSON. Knows the selected cells.

use blkyard_lab::floor::Samples;
use serde::Serialize;

use crate::limits::{Floors, beside};

/// One measured cell.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Path and load.
    pub cell: String,
    /// The figure itself.
    pub value: f64,
    /// Unit.
    pub unit: &'static str,
    /// 10th percentile of the windows.
    pub low: f64,
    /// 90th percentile of the windows.
    pub high: f64,
    /// Limit of the machine, measured in the same minute.
    pub floor: Option<f64>,
    /// Value of another program or state, measured in the same minute.
    pub baseline: Option<f64>,
    /// Of a cell across CPUs: a cache line handed over, nanoseconds, in windows that lie between.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hand_off: Option<f64>,
}

impl Figure {
    /// A cost in nanoseconds per I/O.
    pub fn cost(cell: &str, samples: &Samples) -> Figure {
        let (low, high) = (samples.percentile(10.0), samples.percentile(90.0));
        let (cell, value) = (cell.to_string(), samples.cost());
        Figure { cell, value, unit: "ns/io", low, high, floor: None, baseline: None, hand_off: None }
    }

    /// A figure of windows so long that the neighbours are in all of them: their median.
    pub fn median(cell: &str, unit: &'static str, samples: &Samples) -> Figure {
        Figure { value: samples.percentile(50.0), unit, ..Figure::cost(cell, samples) }
    }

    /// How much more one costs than another; low and high are of windows side by side.
    pub fn difference(cell: &str, more: &Samples, less: &Samples) -> Figure {
        let apart = more.more_than(less);
        Figure { value: more.cost() - less.cost(), ..Figure::cost(cell, &apart) }
    }

    /// How many times one the other does in the same time; low and high are of windows side by side.
    pub fn times(cell: &str, one: &Samples, other: &Samples) -> Figure {
        Figure { value: one.cost() / other.cost(), unit: "times", ..Figure::cost(cell, &one.over(other)) }
    }

    /// Beside the limit that the table names for it.
    pub fn over(self, floors: &Floors) -> Figure {
        let nanoseconds = floors.of(&self.cell);
        let floor = if self.unit == "iops" { nanoseconds.map(|ns| 1e9 / ns) } else { nanoseconds };
        Figure { floor, ..self }
    }

    /// Measured across CPUs that were as far apart as this says.
    pub fn across(self, hand_off: &Samples) -> Figure {
        Figure { hand_off: Some(hand_off.cost()), ..self }
    }

    /// How many times longer it takes than its limit.
    fn multiple(&self) -> Option<f64> {
        let floor = self.floor?;
        Some(if self.unit == "ns/io" { self.value / floor } else { floor / self.value })
    }

    /// Beside a limit that the cell measured itself.
    pub fn at_least(self, floor: f64) -> Figure {
        Figure { floor: Some(floor), ..self }
    }

    /// Adds the baseline.
    pub fn beside(self, baseline: Option<f64>) -> Figure {
        Figure { baseline, ..self }
    }
}

/// Prints cells as they come.
#[derive(Debug)]
pub struct CellReport {
    filters: Vec<String>,
    json: bool,
    head: bool,
}

impl CellReport {
    /// For the cells whose names contain one of the filters; for all without filters.
    pub fn new(filters: Vec<String>, json: bool) -> CellReport {
        CellReport { filters, json, head: false }
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
            let [value, low, high, floor, multiple, baseline] =
                ["value", "low", "high", "floor", "x floor", "baseline"].map(|head| format!("{head:>9}"));
            println!("{:32} {value} {:6}{low} {high} {floor} {multiple} {baseline}  floor is", "cell", "unit");
        }
        let dash = |beside: Option<f64>| beside.map_or("-".into(), show);
        let multiple = dash(figure.multiple());
        let Figure { cell, value, unit, low, high, floor, baseline, hand_off } = figure;
        let [value, low, high] = [value, low, high].map(show);
        let [floor, baseline] = [floor, baseline].map(dash);
        let mut why = beside(&cell).map_or(String::new(), |beside| beside.why.into());
        if let Some(ns) = hand_off {
            why = format!("{why} (a line handed over: {} ns)", show(ns));
        }
        println!("{cell:32} {value:>9} {unit:6}{low:>9} {high:>9} {floor:>9} {multiple:>9} {baseline:>9}  {why}");
    }
}

/// Says that a cell that was asked for could not be measured, and why.
pub fn skip(cell: &str, why: &str) {
    eprintln!("{cell}: not measured: {why}");
}

fn show(value: f64) -> String {
    if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
