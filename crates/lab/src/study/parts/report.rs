//! The report, as text and JSON. Pure formatting.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::table::{figure, table, wrapped};
use super::{Part, PartRow};
use crate::study::goals::{Goal, GoalVerdict, PostClaim};

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
    /// Kind of its time, for the picture.
    pub(crate) time: &'static str,
    /// What is marked in the picture beside the bars.
    pub(crate) mark: &'static str,
    pub(crate) seed: u64,
    pub(crate) parts: Vec<Part>,
}

impl PartsReport {
    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.goals().map(|goal| goal.verdict)
    }

    fn goals(&self) -> impl Iterator<Item = &Goal> {
        self.parts.iter().flat_map(|part| &part.goals)
    }

    /// Goals, the post's claims, then the tables.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        wrapped(&mut out, "", 2, &format!("study {}: {}; seed {}", self.study, self.head, self.seed));
        wrapped(&mut out, "", 2, &format!("post: {}", self.post));
        let count = |verdict| self.verdicts().filter(|one| *one == verdict).count();
        let counts = [GoalVerdict::Met, GoalVerdict::Missed, GoalVerdict::Undecided, GoalVerdict::ByConstruction]
            .map(|verdict| format!("{} {}", count(verdict), verdict.word().to_lowercase()));
        let _ = writeln!(out, "\ngoals: {}", counts.join(", "));
        for Goal { what, value, limit, at, verdict } in self.goals() {
            let first = format!("  {:17}", verdict.word());
            let (value, limit) = (figure(*value, 3), figure(*limit, 3));
            let at = if at.is_empty() { String::new() } else { format!(", {at}") };
            wrapped(&mut out, &first, first.len(), &format!("{what}: {value} (goal {limit}){at}"));
        }
        if self.parts.iter().any(|part| !part.claims.is_empty()) {
            out.push_str("\nclaims of the post\n");
        }
        for PostClaim { what, found, verdict, reason } in self.parts.iter().flat_map(|part| &part.claims) {
            let first = format!("  {:17}", verdict.word());
            let reason = if reason.is_empty() { String::new() } else { format!("; {reason}") };
            wrapped(&mut out, &first, first.len(), &format!("{what}: {found}{reason}"));
        }
        for part in &self.parts {
            table(&mut out, part);
        }
        out
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let goals: Vec<_> = self.parts.iter().flat_map(|part| &part.goals).collect();
        let claims: Vec<_> = self.parts.iter().flat_map(|part| &part.claims).collect();
        let parts: Vec<Value> = self.parts.iter().map(json_part).collect();
        let whole = json!({ "study": self.study, "post": self.post, "seed": self.seed, "parts": parts, "goals": goals, "claims": claims });
        format!("{whole:#}")
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
