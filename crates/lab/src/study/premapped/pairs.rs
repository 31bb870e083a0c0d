//! Pairs that are measured without a model: memory that is prepared for each I/O against memory prepared once.
//!
//! Windows of both alternate; a sample is the pair's windows next to each other. Ratios are taken sample by sample.

use std::fmt::Write;

use serde::Serialize;

use super::interval::MedianInterval;
use super::report::size;
use super::verdicts::PremappedVerdict;

/// One window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealWindow {
    pub(crate) ios: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) elapsed_ns: u64,
}

/// Figures of one kind of memory.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RealFigures {
    /// CPU time of an I/O, ns.
    pub(crate) cpu_ns: MedianInterval,
    pub(crate) iops: MedianInterval,
}

/// A size, with memory prepared for each I/O and once.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RealPair {
    pub(crate) bytes: u32,
    pub(crate) samples: usize,
    pub(crate) each: RealFigures,
    pub(crate) once: RealFigures,
    /// Once over each.
    pub(crate) cpu_ratio: MedianInterval,
    pub(crate) iops_ratio: MedianInterval,
    /// Whether memory prepared once takes less CPU.
    pub(crate) saves_cpu: PremappedVerdict,
    /// Whether it gives more I/O.
    pub(crate) is_faster: PremappedVerdict,
}

impl RealPair {
    /// Of windows in pairs: prepared for each I/O, and once.
    pub(crate) fn new(bytes: u32, windows: &[[RealWindow; 2]]) -> RealPair {
        let cpu = |window: &RealWindow| window.cpu_ns as f64 / window.ios.max(1) as f64;
        let iops = |window: &RealWindow| window.ios as f64 * 1e9 / window.elapsed_ns.max(1) as f64;
        let figures = |kind: usize| RealFigures {
            cpu_ns: MedianInterval::of(windows.iter().map(|pair| cpu(&pair[kind]))),
            iops: MedianInterval::of(windows.iter().map(|pair| iops(&pair[kind]))),
        };
        let cpu_ratio = MedianInterval::of(windows.iter().map(|[each, once]| cpu(once) / cpu(each)));
        let iops_ratio = MedianInterval::of(windows.iter().map(|[each, once]| iops(once) / iops(each)));
        RealPair {
            bytes,
            samples: windows.len(),
            each: figures(0),
            once: figures(1),
            cpu_ratio,
            iops_ratio,
            saves_cpu: is_below_one(cpu_ratio),
            is_faster: is_below_one(MedianInterval {
                low: 1.0 / iops_ratio.high,
                median: 1.0 / iops_ratio.median,
                high: 1.0 / iops_ratio.low,
            }),
        }
    }
}

/// Undecided if the interval has one.
fn is_below_one(ratio: MedianInterval) -> PremappedVerdict {
    if ratio.high < 1.0 {
        PremappedVerdict::Yes
    } else if ratio.low > 1.0 {
        PremappedVerdict::No
    } else {
        PremappedVerdict::Undecided
    }
}

/// The table of some pairs, with the names of both kinds of memory.
pub(crate) fn table(pairs: &[RealPair], [each, once]: [&str; 2]) -> String {
    let word = |verdict, words: [&'static str; 2]| match verdict {
        PremappedVerdict::Yes => words[0],
        PremappedVerdict::No => words[1],
        _ => "undecided",
    };
    let mut out = format!(
        "{:>8} {:^21} {:^33} {:^21}  ratio\n{:>8} {each:>10} {once:>10} {:^33} {each:>10} {once:>10}\n",
        "size", "CPU ns for each I/O", "ratio", "IOPS", "", ""
    );
    let spread = |MedianInterval { low, median, high }| format!("{median:.3} ({low:.3} to {high:.3})");
    for pair in pairs {
        let _ = write!(
            out,
            "{:>8} {:>10.0} {:>10.0} {:>23} {:9} {:>10.0} {:>10.0} {:>23} {:9}",
            size(pair.bytes),
            pair.each.cpu_ns.median,
            pair.once.cpu_ns.median,
            spread(pair.cpu_ratio),
            word(pair.saves_cpu, ["less", "more"]),
            pair.each.iops.median,
            pair.once.iops.median,
            spread(pair.iops_ratio),
            word(pair.is_faster, ["faster", "slower"]),
        );
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(cpu_ns: [[u64; 2]; 6]) -> Vec<[RealWindow; 2]> {
        let window = |cpu_ns| RealWindow { ios: 10, cpu_ns, elapsed_ns: 2 * cpu_ns };
        cpu_ns.map(|pair| pair.map(window)).into()
    }

    #[test]
    fn a_pair_is_decided_only_beyond_its_noise() {
        let less = RealPair::new(512, &windows([[100, 90], [110, 100], [90, 80], [100, 99], [100, 95], [120, 100]]));
        assert_eq!((less.saves_cpu, less.is_faster), (PremappedVerdict::Yes, PremappedVerdict::Yes));
        assert!((less.each.cpu_ns.median - 10.0).abs() < 1e-9 && (less.once.iops.low - 5e7).abs() < 1.0);
        let noise = RealPair::new(512, &windows([[100, 90], [110, 120], [90, 80], [100, 99], [100, 95], [120, 100]]));
        assert_eq!((noise.saves_cpu, noise.is_faster), (PremappedVerdict::Undecided, PremappedVerdict::Undecided));
        let more = RealPair::new(512, &windows([[90, 100]; 6]));
        assert_eq!((more.saves_cpu, more.is_faster), (PremappedVerdict::No, PremappedVerdict::No));
        let text = table(&[less, noise, more], ["plain", "fixed"]);
        assert!(text.contains("less") && text.contains("undecided") && text.contains("slower"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 130 && !line.ends_with(' ')), "{text}");
    }
}
