//! The text report, in fio's style. Pure formatting.

use std::fmt::Write;

use blkyard_mq::OpClass;

use super::report::{BenchReport, DEPTH_NAMES, PERCENTILES, percentile_ns};
use super::tally::ClassSummary;

/// The whole block.
pub(crate) fn text(report: &BenchReport) -> String {
    let mut out = String::new();
    let options = ["rw", "bs", "iodepth", "queues"].map(|key| format!("{key}={}", report.options[key])).join(", ");
    let jobs = report.jobs;
    let verdict = if report.is_good() { "no errors" } else { "ERRORS, see below" };
    let _ = writeln!(out, "bench: {}: {options}, jobs={jobs}: {verdict}", report.device);
    for (name, class) in [("read", OpClass::Read), ("write", OpClass::Write), ("trim", OpClass::Trim)] {
        direction(&mut out, name, report.summary.of(class));
    }
    let sync = report.summary.of(OpClass::Flush);
    if sync.ios > 0 {
        let _ = writeln!(out, "  sync: {} flushes", count(sync.ios as f64));
        latency(&mut out, sync);
    }
    let (user, system) = report.cpu_percent();
    let per_io = match report.cpu_ns_per_io() {
        0.0 => "too short to show per I/O".into(),
        ns => format!("{ns:.0} ns per I/O"),
    };
    let _ = writeln!(out, "  cpu          : usr={user:.2}%, sys={system:.2}%, {per_io}");
    let idle = report.idle_percent();
    if idle > 50.0 && report.ios() > 0 && !report.options.contains_key("spin_us") {
        let hint = "with --spin_us 200 they would look for completions";
        let _ = writeln!(out, "  idle         : jobs slept for {idle:.0}% of the run; {hint}");
    }
    let depths = report.depth_percent();
    let levels: Vec<_> =
        DEPTH_NAMES.iter().zip(depths).map(|(level, percent)| format!("{level}={percent:.1}%")).collect();
    let _ = writeln!(out, "  IO depths    : {}", levels.join(", "));
    if report.checked > 0 {
        let _ = writeln!(out, "  verify       : {} blocks checked, {} differ", report.checked, report.mismatches);
    }
    if report.errors() > 0 {
        let _ = writeln!(out, "  errors       : {} I/Os failed", report.errors());
    }
    if report.outstanding() > 0 {
        let _ = writeln!(out, "  outstanding  : {} I/Os were submitted and have not completed", report.outstanding());
    }
    for violation in &report.violations {
        let _ = writeln!(out, "  {violation}");
    }
    out
}

fn direction(out: &mut String, name: &str, class: &ClassSummary) {
    if class.ios == 0 {
        return;
    }
    let per_s = class.bytes_per_s();
    let _ = writeln!(
        out,
        "  {name}: IOPS={}, BW={:.1}MiB/s ({:.1}MB/s)({}/{:.0}msec)",
        count(class.iops()),
        per_s / f64::from(1 << 20),
        per_s / 1e6,
        bytes(class.bytes),
        class.ran_ns() as f64 / 1e6
    );
    latency(out, class);
}

fn latency(out: &mut String, class: &ClassSummary) {
    let (unit, per_unit) = match class.mean_ns() {
        mean if mean < 10_000.0 => ("nsec", 1.0),
        mean if mean < 10_000_000.0 => ("usec", 1e3),
        _ => ("msec", 1e6),
    };
    let show = |ns: f64| if per_unit > 1.0 { format!("{:.2}", ns / per_unit) } else { format!("{ns:.0}") };
    let _ = writeln!(
        out,
        "    lat ({unit}): min={}, max={}, avg={}, stdev={}",
        show(class.min_ns as f64),
        show(class.max_ns as f64),
        show(class.mean_ns()),
        show(class.stddev_ns())
    );
    let _ = writeln!(out, "    lat percentiles ({unit}) of {} samples:", class.ios);
    for row in PERCENTILES.chunks(3) {
        let cells: Vec<_> = row
            .iter()
            .map(|percent| format!("{percent:>5.2}th=[{:>10}]", show(percentile_ns(class, *percent) as f64)))
            .collect();
        let _ = writeln!(out, "     | {}", cells.join(", "));
    }
}

/// A number as fio writes it: 912, 12.3k, 4.57M.
pub(crate) fn count(n: f64) -> String {
    match n {
        n if n >= 1e9 => format!("{:.2}G", n / 1e9),
        n if n >= 1e6 => format!("{:.2}M", n / 1e6),
        n if n >= 1e3 => format!("{:.1}k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

fn bytes(n: u64) -> String {
    let n = n as f64;
    match n {
        n if n >= 1024.0 * 1024.0 * 1024.0 => format!("{:.2}GiB", n / 1024.0 / 1024.0 / 1024.0),
        n if n >= 1024.0 * 1024.0 => format!("{:.1}MiB", n / 1024.0 / 1024.0),
        n => format!("{:.1}KiB", n / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([912.0, 12_345.0, 4_567_890.0].map(count), ["912", "12.3k", "4.57M"]);
        assert_eq!([2048, 3 << 20, 5 << 30].map(bytes), ["2.0KiB", "3.0MiB", "5.00GiB"]);
    }
}
