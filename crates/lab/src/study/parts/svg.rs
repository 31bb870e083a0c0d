//! All parts as one SVG: a bar for each row of each table, its deviation, and the figure that it is compared with as a
//! mark. Drawn by hand; needs only a browser.

use std::fmt::Write;

use super::{Part, PartsReport};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 300.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 50.0;
const BAR: f64 = 16.0;
const ROW: f64 = 22.0;
/// Above the bars of a part: its title and column.
const HEAD: f64 = 52.0;
const POST_COLOUR: &str = "#b35806";
const OUR_COLOUR: &str = "#2166ac";

impl PartsReport {
    /// The whole picture, SVG 1.1.
    pub(crate) fn picture(&self) -> String {
        picture(self)
    }
}

fn picture(report: &PartsReport) -> String {
    let height = TOP + report.parts.iter().map(|part| HEAD + ROW * part.rows.len() as f64).sum::<f64>() + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"20\" y=\"24\" font-size=\"16\">{} ({})</text>\n\
         <rect x=\"20\" y=\"34\" width=\"12\" height=\"10\" fill=\"{OUR_COLOUR}\"/><text x=\"36\" y=\"44\">here, with its deviation</text>\n\
         <line x1=\"200\" x2=\"200\" y1=\"32\" y2=\"46\" stroke=\"{POST_COLOUR}\" stroke-width=\"3\"/><text x=\"208\" y=\"44\">{}</text>\n",
        escape(report.title),
        report.time,
        report.mark
    );
    let mut top = TOP;
    for part in &report.parts {
        draw(&mut out, part, report.mark, top);
        top += HEAD + ROW * part.rows.len() as f64;
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, part: &Part, mark: &str, top: f64) {
    let head = part.columns.iter().find(|column| column.key == part.drawn.bar).map_or("", |column| column.head);
    let _ = writeln!(
        out,
        "<text x=\"20\" y=\"{}\" font-weight=\"bold\">{}</text><text x=\"{LEFT}\" y=\"{}\">{}</text>",
        top + 24.0,
        escape(&part.title),
        top + 42.0,
        escape(head)
    );
    let reach = |row| {
        let [bar, deviation, post] =
            [part.drawn.bar, part.drawn.deviation, part.drawn.post].map(|key| part.value(row, key).unwrap_or(0.0));
        (bar + deviation).max(post)
    };
    let most = part.rows.iter().map(reach).fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * (value / most).clamp(0.0, 1.0);
    for (number, row) in part.rows.iter().enumerate() {
        let y = top + HEAD + ROW * number as f64;
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 12.0,
            escape(&row.name)
        );
        if let Some(value) = part.value(row, part.drawn.bar) {
            let _ = writeln!(
                out,
                "<rect class=\"bar\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{OUR_COLOUR}\"/>\
                 <text x=\"{}\" y=\"{:.1}\">{value:.2}</text>",
                x(value) - LEFT,
                WIDTH - RIGHT + 10.0,
                y + 12.0
            );
            if let Some(deviation) = part.value(row, part.drawn.deviation) {
                let _ = writeln!(
                    out,
                    "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#222\"/>",
                    x(value - deviation),
                    x(value + deviation),
                    y + BAR / 2.0,
                    y + BAR / 2.0
                );
            }
        }
        if let Some(post) = part.value(row, part.drawn.post) {
            let _ = writeln!(
                out,
                "<line class=\"post\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{2:.1}\" stroke=\"{POST_COLOUR}\" stroke-width=\"3\">\
                 <title>{mark}: {post:.2}</title></line>",
                x(post),
                y - 2.0,
                y + BAR + 2.0
            );
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
