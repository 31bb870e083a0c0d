//! The figures as SVG: for each point of the grid, the post's value beside ours. Drawn by hand; needs only a browser.

use std::fmt::Write;

use super::grid::{GridRow, Ratios};
use super::report::StudyReport;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 70.0;
const PANEL: f64 = 190.0;
const GAP: f64 = 44.0;
const POST_COLOUR: &str = "#b35806";
const OUR_COLOUR: &str = "#2166ac";

/// One panel: a ratio over the grid.
struct Panel {
    title: &'static str,
    of: fn(&Ratios) -> f64,
    /// Lines across, of which the first and the last bound the panel. Logarithmic if the first is not zero.
    lines: &'static [f64],
}

const PANELS: [Panel; 3] = [
    Panel { title: "IOPS, mq/bio", of: |ratios| ratios.iops, lines: &[0.9, 0.95, 1.0, 1.05] },
    Panel { title: "CPU per I/O, mq/bio", of: |ratios| ratios.cpu, lines: &[0.0, 0.5, 1.0, 1.5] },
    Panel {
        title: "standard deviation of latency, mq/bio (logarithmic)",
        of: |ratios| ratios.stdev,
        lines: &[0.1, 0.3, 1.0, 3.0, 10.0, 30.0],
    },
];

impl Panel {
    /// Position of a value, 0 at the bottom and 1 at the top; values beyond are drawn at the edge.
    fn place(&self, value: f64) -> f64 {
        let (Some(low), Some(high)) = (self.lines.first(), self.lines.last()) else { return 0.0 };
        let logarithmic = high / low > 20.0 && *low > 0.0;
        let scale = |n: f64| if logarithmic { n.max(f64::MIN_POSITIVE).ln() } else { n };
        ((scale(value) - scale(*low)) / (scale(*high) - scale(*low))).clamp(0.0, 1.0)
    }

    fn y(&self, top: f64, value: f64) -> f64 {
        top + PANEL * (1.0 - self.place(value))
    }
}

/// The whole picture, SVG 1.1.
pub(crate) fn picture(report: &StudyReport) -> String {
    let height = TOP + PANELS.len() as f64 * (PANEL + GAP) + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"16\">NVMe on the multi-queue core against the bio-based driver</text>\n\
         <circle cx=\"{}\" cy=\"42\" r=\"5\" fill=\"none\" stroke=\"{POST_COLOUR}\" stroke-width=\"2\"/>\
         <text x=\"{}\" y=\"46\">post (2013)</text>\n\
         <circle cx=\"{}\" cy=\"42\" r=\"5\" fill=\"{OUR_COLOUR}\"/><text x=\"{}\" y=\"46\">here</text>\n",
        LEFT + 5.0,
        LEFT + 15.0,
        LEFT + 105.0,
        LEFT + 115.0
    );
    for (number, panel) in PANELS.iter().enumerate() {
        draw(&mut out, panel, TOP + number as f64 * (PANEL + GAP), &report.rows);
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel, top: f64, rows: &[GridRow]) {
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{}</text>", top - 6.0, panel.title);
    for line in panel.lines {
        let y = panel.y(top, *line);
        let colour = if (line - 1.0).abs() < f64::EPSILON { "#444" } else { "#ddd" };
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{line}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0
        );
    }
    let step = (WIDTH - LEFT - RIGHT) / rows.len().max(1) as f64;
    for (number, row) in rows.iter().enumerate() {
        let x = LEFT + (number as f64 + 0.5) * step;
        let (post, here) = ((panel.of)(&row.post_ratios()), (panel.of)(&row.ratios()));
        let (jobs, depth) = (row.post.jobs, row.post.depth);
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"none\" stroke=\"{POST_COLOUR}\" stroke-width=\"2\">\
             <title>{jobs} x {depth}, post: {post:.3}</title></circle>\
             <circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{OUR_COLOUR}\">\
             <title>{jobs} x {depth}, here: {here:.3}</title></circle>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{jobs}x{depth}</text>",
            x - 7.0,
            panel.y(top, post),
            x + 7.0,
            panel.y(top, here),
            top + PANEL + 16.0
        );
    }
}
