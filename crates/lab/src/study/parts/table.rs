//! Text of at most [`WIDTH`] columns: wrapped lines, and tables whose columns continue in a further block.

use std::fmt::Write;

use super::Part;

/// Longest line of a report.
pub(super) const WIDTH: usize = 110;

/// A figure; a dash where the run has none.
pub(crate) fn figure(value: impl Into<Option<f64>>, digits: usize) -> String {
    value.into().filter(|value| value.is_finite()).map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
}

/// Writes a text that begins with `first`; further lines are indented by `hang`.
pub(crate) fn wrapped(out: &mut String, first: &str, hang: usize, text: &str) {
    let mut line = first.to_owned();
    let mut is_fresh = true;
    for word in text.split_whitespace() {
        if !is_fresh && line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(out, "{line}");
            line = " ".repeat(hang);
            is_fresh = true;
        }
        if !is_fresh {
            line.push(' ');
        }
        line.push_str(word);
        is_fresh = false;
    }
    let _ = writeln!(out, "{line}");
}

/// Title, figures and remarks of a part.
pub(super) fn table(out: &mut String, part: &Part) {
    out.push('\n');
    wrapped(out, "", 2, &part.title);
    let names = part.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let cells = |at: usize| part.rows.iter().map(move |row| figure(row.values[at], part.columns[at].digits));
    let width = |at: usize| {
        let longest = cells(at).map(|cell| cell.len()).max().unwrap_or(0);
        2 + longest.max(part.columns[at].head.chars().count())
    };
    let mut from = 0;
    while from < part.columns.len() {
        let (mut to, mut used) = (from, names);
        while to < part.columns.len() && (to == from || used + width(to) <= WIDTH) {
            used += width(to);
            to += 1;
        }
        let _ = write!(out, "{:names$}", "");
        for at in from..to {
            let _ = write!(out, "{:>1$}", part.columns[at].head, width(at));
        }
        out.push('\n');
        for row in &part.rows {
            let _ = write!(out, "{:names$}", row.name);
            for at in from..to {
                let _ = write!(out, "{:>1$}", figure(row.values[at], part.columns[at].digits), width(at));
            }
            out.push('\n');
        }
        from = to;
    }
    for note in &part.notes {
        wrapped(out, "  ", 2, note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::goals::PostClaim;
    use crate::study::parts::{PartsReport, column};

    #[test]
    fn a_report_has_verdicts_first_and_no_line_above_110_columns_and_no_nan() {
        let columns = ["round-robin", "queue-depth", "adaptive", "best split", "bound", "over bound", "stdev / rr"];
        let mut part = Part { title: "a load ".repeat(40), ..Part::default() };
        part.columns = columns.into_iter().chain(columns).map(|head| column("key", head, 1)).collect();
        part.row("a path that degrades and recovers every second", vec![Some(f64::NAN); 14]);
        part.row("two", vec![None; 14]);
        part.notes.push("a remark ".repeat(40));
        part.at_most("a figure ".repeat(20), f64::NAN, 1.0, "at a place ".repeat(10));
        part.claims.push(PostClaim {
            what: "a claim ".repeat(20),
            found: "a figure ".repeat(20),
            verdict: false.into(),
            reason: "".into(),
        });
        let report = PartsReport {
            study: "s",
            title: "",
            head: "",
            post: "author, list",
            time: "simulated",
            mark: "post",
            seed: 1,
            parts: vec![part],
        };
        let text = report.text();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(!text.contains("NaN"), "{text}");
        let place = |word: &str| text.find(word).unwrap();
        assert!(place("post: author") < place("goals:") && place("goals:") < place("claims of the post"), "{text}");
        assert!(place("claims of the post") < place("a load a load"), "{text}");
        assert!(!report.json().contains("NaN") && !report.picture().contains("NaN"));
    }
}
