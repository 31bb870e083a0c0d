//! Names in the documents: files, types, functions and tests that a code span names must exist.
//!
//! Reads ARCHITECTURE.md, README.md, docs/ without the decisions, which are history, and documents beside code. A
//! file may be named by the end of its path. Does not read code blocks, links, or names of other projects.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::Finding;
use super::source::is_word;

/// Names of Linux in code spans.
const FOREIGN: &[&str] = &["abort_request", "blk_update_request", "nr_hw_queues", "nr_requests"];

/// Extensions by which a code span counts as the name of a file.
const FILES: &[&str] = &[".rs", ".md", ".toml", ".sh"];

/// The names to be found, and the code spans to be checked.
#[derive(Default)]
pub struct Names {
    known: HashSet<String>,
    spans: Vec<(PathBuf, usize, String)>,
}

impl Names {
    /// Adds the words of one Rust file.
    pub fn read_code(&mut self, text: &str) {
        let words = text.split(|next| !is_word(next)).filter(|word| !word.is_empty());
        for word in words {
            if !self.known.contains(word) {
                self.known.insert(word.to_owned());
            }
        }
    }

    /// Adds the code spans of one document.
    pub fn read_document(&mut self, file: &Path, text: &str) {
        if file.starts_with("docs/adr") || file.ends_with("CHANGELOG.md") {
            return;
        }
        let mut in_block = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_block = !in_block;
            } else if !in_block {
                let spans = line.split('`').skip(1).step_by(2);
                self.spans.extend(spans.map(|span| (file.to_owned(), index + 1, span.to_owned())));
            }
        }
    }

    /// Code spans that name a file, type, function or test that does not exist.
    pub fn missing(self, files: &[PathBuf], findings: &mut Vec<Finding>) {
        for (file, line, span) in &self.spans {
            let exists = if is_file(span) {
                files.iter().any(|known| known.ends_with(span))
            } else if is_identifier(span) {
                FOREIGN.contains(&span.as_str()) || span.split("::").all(|part| self.known.contains(part))
            } else {
                true
            };
            if !exists {
                findings.push(Finding::new(file, *line, format!("`{span}` does not exist: name what is there")));
            }
        }
    }
}

fn is_file(span: &str) -> bool {
    let path = |next: char| is_word(next) || "/.-".contains(next);
    FILES.iter().any(|extension| span.ends_with(extension)) && span.chars().all(path) && !span.starts_with('/')
}

/// Whether a span is the name of a type, a method, or a function or test of several words.
fn is_identifier(span: &str) -> bool {
    let is_type = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_uppercase()) && part.contains(|next: char| next.is_lowercase())
    };
    let is_function = |part: &str| {
        part.contains('_') && part.chars().all(|next| next.is_ascii_lowercase() || next.is_ascii_digit() || next == '_')
    };
    let is_plain = span.split("::").all(|part| !part.is_empty() && part.chars().all(is_word));
    is_plain && span.split("::").next().is_some_and(|first| is_type(first) || is_function(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(document: &str) -> Vec<String> {
        let (mut names, mut findings) = (Names::default(), Vec::new());
        names.read_code("struct HwQueue;\nfn both_nest() {}\nimpl HwQueue { fn issue() {} }\n");
        names.read_document(Path::new("docs/core.md"), document);
        names.missing(&[PathBuf::from("crates/mq/src/hw.rs")], &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_name_that_does_not_exist_is_found() {
        for (document, count) in [
            ("`hw.rs`, `mq/src/hw.rs` and `HwQueue::issue` by `both_nest`", 0),
            ("`queue.rs`", 1),
            ("`src/hw`", 0),
            ("`HwQueue::issues` and `Queue`", 2),
            ("`none_nests`", 1),
            ("`cargo xtask test`, `iops`, `NVME`, `nr_requests`", 0),
            ("none_nests\n```\n`none_nests`\n```", 0),
        ] {
            assert_eq!(missing(document).len(), count, "{document}: {:?}", missing(document));
        }
    }

    #[test]
    fn a_finding_names_the_line() {
        assert_eq!(missing("# Core\n\n`queue.rs`"), ["docs/core.md:3: `queue.rs` does not exist: name what is there"]);
    }
}
