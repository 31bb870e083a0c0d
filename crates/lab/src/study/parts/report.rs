//! The report, as text and JSON. Pure formatting.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{Part, PartRow};
use crate::study::goals::{Goal, PostClaim};

/// All parts of a study.
#[derive(Debug)]
pub(crate) struct PartsReport {
    /// Name of the study.
    pub(crate) study: &'static str,
    /// Title of the picture.
    pub(crate) title: &'static str,
    /// What ran on what.
    pub(crate) head: &'static str,
    /// Author, list, month and subject of the post.
    pub(crate) post: &'static str,
    /// Year of the post.
    pub(crate) post_year: u32,
    pub(crate) seed: u64,
    pub(crate) parts: Vec<Part>,
}

impl PartsReport {
    /// Whether every goal is met.
    pub(crate) fn is_met(&self) -> bool {
        self.parts.iter().flat_map(|part| &part.goals).all(|goal| goal.met)
    }

    /// The tables.
    pub(crate) fn text(&self) -> String {
        let mut out = format!("study {}: {}; seed {}\n", self.study, self.head, self.seed);
        for part in &self.parts {
            table(&mut out, part);
        }
        let _ = writeln!(out, "\nclaims of the post");
        for PostClaim { what, found, reproduced, reason } in self.parts.iter().flat_map(|part| &part.claims) {
            let verdict = match (*reproduced, reason.is_empty()) {
                (true, true) => "reproduced".into(),
                (true, false) => format!("reproduced: {reason}"),
                (false, _) => format!("not reproduced: {reason}"),
            };
            let _ = writeln!(out, "  {what}: {found}; {verdict}");
        }
        let _ = writeln!(out, "\ngoals");
        for Goal { what, value, limit, at, met } in self.parts.iter().flat_map(|part| &part.goals) {
            let verdict = if *met { "met" } else { "MISSED" };
            let _ = writeln!(out, "  {verdict:6}  {what}: {value:.3} (goal {limit:.3}), {at}");
        }
        out
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let goals: Vec<_> = self.parts.iter().flat_map(|part| &part.goals).collect();
        let claims: Vec<_> = self.parts.iter().flat_map(|part| &part.claims).collect();
        let parts: Vec<Value> = self.parts.iter().map(json_part).collect();
        let whole = json!({ "study": self.study, "seed": self.seed, "parts": parts, "goals": goals, "claims": claims });
        format!("{whole:#}")
    }
}

fn table(out: &mut String, part: &Part) {
    let names = part.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(20);
    let _ = write!(out, "\n{}\n{:names$}", part.title, "");
    for column in &part.columns {
        let _ = write!(out, "{:>12}", column.head);
    }
    let _ = writeln!(out);
    for row in &part.rows {
        let _ = write!(out, "{:names$}", row.name);
        for (column, value) in part.columns.iter().zip(&row.values) {
            let _ = match value {
                Some(value) => write!(out, "{value:12.*}", column.digits),
                None => write!(out, "{:>12}", "-"),
            };
        }
        let _ = writeln!(out);
    }
    for note in &part.notes {
        let _ = writeln!(out, "  {note}");
    }
}

fn json_part(part: &Part) -> Value {
    let row = |row: &PartRow| {
        let mut object = Map::new();
        object.insert("name".into(), row.name.clone().into());
        for (column, value) in part.columns.iter().zip(&row.values) {
            object.insert(column.key.into(), json!(value));
        }
        Value::Object(object)
    };
    let rows: Vec<Value> = part.rows.iter().map(row).collect();
    json!({ "name": part.name, "title": part.title, "rows": rows, "notes": part.notes })
}
