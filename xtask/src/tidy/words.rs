//! The rules of ARCHITECTURE.md's glossary for the whole tree: a type name occurs once, and retired words do not occur.
//!
//! Checks definitions and identifiers, and retired words of one meaning also in comments and documents. Test-only types
//! may share a name, and so may the few that Rust qualifies by their module. Does not judge sentences.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Finding;
use super::source::{Source, is_word};

/// Names that Rust qualifies by their module by habit.
const QUALIFIED_BY_HABIT: &[&str] = &["Cli", "Command", "Config", "Error"];

/// Nouns that this project once coined, as segments of identifiers, with the field's word for each.
const RETIRED: &[(&str, &str)] = &[
    ("bell", "eventfd"),
    ("chime", "signal"),
    ("complaint", "violation"),
    ("crank", "run_once"),
    ("desk", "context"),
    ("door", "mailbox"),
    ("happening", "event"),
    ("heed", "take_pending"),
    ("heritage", "inherited state"),
    ("letters", "commands"),
    ("parcel", "handover state"),
    ("seat", "submitter, member or slot"),
    ("station", "poller"),
    ("whereabouts", "location"),
    ("wish", "request"),
    ("yard", "shared hardware queue"),
];

/// Retired words that have no other use in comments and documents.
const RETIRED_IN_PROSE: &[&str] = &["bell", "chime", "crank", "heed", "heritage", "parcel", "whereabouts", "yard"];

/// The decision on words and the index of the decisions name retired words.
const EXCEPTIONS: &[&str] = &["docs/adr/README.md", "docs/adr/0032-the-fields-words.md", "tidy/words.rs"];

/// The types defined so far.
#[derive(Default)]
pub struct Words {
    types: BTreeMap<String, Vec<(PathBuf, usize)>>,
}

impl Words {
    /// Takes in one Rust file.
    pub fn read(&mut self, file: &Path, text: &str, findings: &mut Vec<Finding>) {
        let source = Source::split(text);
        if !is_exception(file) {
            retired(file, &source, findings);
            let comments = source.comments.iter().map(String::as_str);
            retired_in_prose(file, comments, findings);
        }
        if is_test(file) {
            return;
        }
        for (index, line) in source.code.iter().enumerate() {
            if line.starts_with("mod tests {") {
                break;
            }
            if let Some(name) = defined_type(line) {
                self.types.entry(name.to_owned()).or_default().push((file.to_owned(), index + 1));
            }
        }
    }

    /// Type names that occur more than once.
    pub fn repeated(self, findings: &mut Vec<Finding>) {
        for (name, places) in self.types {
            let Some(((first, _), others)) = places.split_first() else { continue };
            if QUALIFIED_BY_HABIT.contains(&name.as_str()) {
                continue;
            }
            for (file, line) in others {
                let text = format!("type {name} is defined in {} too: one type name stands once", first.display());
                findings.push(Finding::new(file, *line, text));
            }
        }
    }
}

/// Checks the words of one document.
pub fn check_document(file: &Path, text: &str, findings: &mut Vec<Finding>) {
    if !is_exception(file) {
        retired_in_prose(file, text.lines(), findings);
    }
}

fn is_exception(file: &Path) -> bool {
    EXCEPTIONS.iter().any(|exception| file.ends_with(exception))
}

fn retired_in_prose<'a>(file: &Path, lines: impl Iterator<Item = &'a str>, findings: &mut Vec<Finding>) {
    for (index, line) in lines.enumerate() {
        for word in line.split(|character| !is_word(character)) {
            let lower = word.to_lowercase();
            let is_retired = |old: &&&str| lower == **old || lower.strip_suffix('s') == Some(**old);
            if let Some(old) = RETIRED_IN_PROSE.iter().find(is_retired) {
                findings.push(Finding::new(file, index + 1, format!("{old} is a retired word: say it in the field's")));
            }
        }
    }
}

fn is_test(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "tests") || file.ends_with("tests.rs")
}

/// The name in a definition of a type; `None` inside a function or a trait.
pub fn defined_type(line: &str) -> Option<&str> {
    let (word, rest) = line.split_once(' ')?;
    let definition = if word.starts_with("pub") { rest } else { line };
    let (keyword, rest) = definition.strip_prefix("unsafe ").unwrap_or(definition).split_once(' ')?;
    let end = rest.find(|next| !is_word(next)).unwrap_or(rest.len());
    ["struct", "enum", "trait", "type", "union"].contains(&keyword).then_some(&rest[..end])
}

fn retired(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    for (index, line) in source.code.iter().enumerate() {
        for word in line.split(|character| !is_word(character)) {
            for segment in segments(word) {
                let found = RETIRED.iter().find(|(old, _)| segment == *old || segment.strip_suffix('s') == Some(old));
                if let Some((old, new)) = found {
                    let text = format!("{word}: {old} is a retired word; the field says {new}");
                    findings.push(Finding::new(file, index + 1, text));
                }
            }
        }
    }
}

/// The words that an identifier is made of, in lower case.
fn segments(identifier: &str) -> impl Iterator<Item = String> + '_ {
    identifier.split('_').flat_map(|part| {
        let shouts = !part.chars().any(char::is_lowercase);
        let mut words: Vec<String> = Vec::new();
        for character in part.chars() {
            match words.last_mut() {
                Some(word) if shouts || !character.is_uppercase() => word.extend(character.to_lowercase()),
                _ => words.push(character.to_lowercase().collect()),
            }
        }
        words
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let (mut words, mut findings) = (Words::default(), Vec::new());
        for (file, text) in files {
            words.read(Path::new(file), text, &mut findings);
        }
        words.repeated(&mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_type_name_that_stands_twice_is_found() {
        let found = findings(&[
            ("crates/a/src/one.rs", "pub(crate) struct Line<T>(T);\nenum Error {}\n"),
            ("crates/b/src/two.rs", "//! Two.\npub enum Line {}\nenum Error {}\n"),
            ("crates/b/tests/two.rs", "struct Line;\n"),
            ("crates/b/src/three.rs", "struct Three;\n#[cfg(test)]\nmod tests {\n    struct Line;\n}\n"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("crates/b/src/two.rs:2: type Line"), "{found:?}");
    }

    #[test]
    fn a_retired_word_is_found_wherever_it_stands_in_an_identifier() {
        for (text, count) in [
            ("let kick_bell = 1;", 1),
            ("const BELLS_MAX: u32 = 1;", 1),
            ("struct RingBell;", 1),
            ("fn no_wish_is_lost() {}", 1),
            ("let doorbell = 1;", 0),
            ("// The bell of a door.", 1),
            ("/// Cranks whoever heeds it.", 2),
            ("// The doorbell of a device.", 0),
            ("let text = \"bell\";", 0),
        ] {
            assert_eq!(findings(&[("crates/a/src/a.rs", text)]).len(), count, "{text}");
        }
    }
}
