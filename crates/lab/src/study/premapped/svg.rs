//! Submission over size, as SVG: CPU time of one device, one bio a call, for each kind of memory, beside K. Busch's
//! latencies.

use std::fmt::Write;

use super::post::SUBMISSION_NS;
use super::report::PremappedReport;
use super::{Bed, IoMemory, SIZES};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const MARGIN: f64 = 70.0;
/// Bounds of both axes: nanoseconds and bytes.
const NS: [f64; 2] = [10.0, 10_000.0];
const BYTES: [f64; 2] = [512.0, (1 << 20) as f64];
const COLOURS: [&str; 3] = ["#b35806", "#7b3294", "#2166ac"];

fn x(bytes: u32) -> f64 {
    MARGIN + share(f64::from(bytes), BYTES) * (WIDTH - 2.0 * MARGIN)
}

fn y(ns: f64) -> f64 {
    HEIGHT - MARGIN - share(ns, NS) * (HEIGHT - 2.0 * MARGIN)
}

/// Position on a logarithmic axis, 0 to 1; values beyond are drawn at the edge.
fn share(value: f64, [low, high]: [f64; 2]) -> f64 {
    ((value / low).ln() / (high / low).ln()).clamp(0.0, 1.0)
}

/// The whole picture, SVG 1.1.
pub(crate) fn picture(report: &PremappedReport) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"16\">Submission of an I/O, ns of CPU; hollow: K. Busch, strict IOMMU\
         </text>\n"
    );
    for ns in [10.0, 100.0, 1000.0, 10_000.0] {
        let (y, right) = (y(ns), WIDTH - MARGIN);
        let _ = writeln!(
            out,
            "<line x1=\"{MARGIN}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{y:.1}\" text-anchor=\"end\">{ns}</text>",
            MARGIN - 6.0
        );
    }
    for bytes in SIZES {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{bytes}</text>",
            x(bytes),
            HEIGHT - MARGIN + 18.0
        );
    }
    for (number, (memory, colour)) in IoMemory::ALL.into_iter().zip(COLOURS).enumerate() {
        let _ = writeln!(
            out,
            "<text x=\"{MARGIN}\" y=\"{}\" fill=\"{colour}\">{}</text>",
            44.0 + 14.0 * number as f64,
            memory.name()
        );
        for bytes in SIZES {
            let ns = report.rows().get(Bed::One, bytes, 1, memory).submit_ns.median;
            let _ = writeln!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>", x(bytes), y(ns));
        }
        for (bytes, theirs) in SUBMISSION_NS {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"none\" stroke=\"{colour}\"/>",
                x(bytes),
                y(theirs[number])
            );
        }
    }
    out.push_str("</svg>\n");
    out
}
