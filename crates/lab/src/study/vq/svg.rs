//! The grid as SVG: IOPS over those of one job and one queue, by jobs, a line for each number of queues. Drawn by hand;
//! needs only a browser.

use std::fmt::Write;

use super::COUNTS;
use super::report::VqReport;
use super::world::Devices;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 380.0;
const TOP: f64 = 70.0;
const PANEL: f64 = 250.0;
const PANEL_WIDTH: f64 = 380.0;
const LEFTS: [f64; 2] = [70.0, 550.0];
/// Times the first point, at the top.
const TIMES_MAX: f64 = 4.5;
const COLOURS: [&str; 3] = ["#b35806", "#2166ac", "#1b7837"];

/// The whole picture, SVG 1.1.
pub(crate) fn picture(report: &VqReport) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"70\" y=\"24\" font-size=\"16\">Several virtqueues for a disk: IOPS by jobs, over one job and one queue (simulated)</text>\n"
    );
    for (devices, left) in [Devices::One, Devices::Each].into_iter().zip(LEFTS) {
        panel(&mut out, report, devices, left);
    }
    out.push_str("</svg>\n");
    out
}

fn y(times: f64) -> f64 {
    TOP + PANEL * (1.0 - (times / TIMES_MAX).clamp(0.0, 1.0))
}

fn panel(out: &mut String, report: &VqReport, devices: Devices, left: f64) {
    let _ = writeln!(out, "<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{}</text>", TOP - 12.0, devices.name());
    for times in 0..=4 {
        let y = y(f64::from(times));
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{times}</text>",
            left + PANEL_WIDTH,
            left - 8.0,
            y + 4.0
        );
    }
    let x = |jobs: usize| left + PANEL_WIDTH * (jobs as f64 - 0.5) / 4.0;
    for jobs in COUNTS {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{jobs} jobs</text>",
            x(jobs),
            TOP + PANEL + 18.0
        );
    }
    for (number, (queues, colour)) in COUNTS.into_iter().zip(COLOURS).enumerate() {
        let points = COUNTS.map(|jobs| (jobs, report.times(jobs, queues, devices)));
        let line: Vec<_> = points.iter().map(|(jobs, times)| format!("{:.1},{:.1}", x(*jobs), y(*times))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{queues} queues</text>",
            line.join(" "),
            left + 90.0 * number as f64,
            TOP + PANEL + 40.0
        );
        for (jobs, times) in points {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"><title>{jobs} jobs, {queues} queues: {times:.2}</title></circle>",
                x(jobs),
                y(times)
            );
        }
    }
}
