//! The rules that one file keeps or breaks by itself.

use std::path::Path;

use super::Finding;
use super::source::{Source, is_word};

/// The crates in which memory has more than one writer or the system is called; the only ones with
/// unsafe code.
const UNSAFE_FOLDERS: &[&str] = &["crates/mem", "crates/os"];

/// A file that decides too much grows; at this length it is to be split by the question it answers.
const LINES_MAX: usize = 800;

/// Where rustfmt breaks code; comments, which it leaves alone, end there, too.
const COLUMNS_MAX: usize = 120;

/// Leftovers in code, each with what to do instead.
const LEFTOVERS: &[(&str, &str)] = &[
    ("todo!", "todo!: write it or leave it out"),
    ("unimplemented!", "unimplemented!: write it or leave it out"),
    ("#[ignore", "#[ignore]: a test runs or goes"),
    ("dbg!", "dbg!: left over from a search"),
];

/// Parts of paths that exist on someone's machine only. Put together here, so as not to be found here.
const MACHINE_PATHS: &[&str] = &[concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];

pub fn check(file: &Path, text: &str, findings: &mut Vec<Finding>) {
    let lines = text.lines().count();
    if lines > LINES_MAX {
        findings.push(Finding::new(
            file,
            0,
            format!("has {lines} lines, more than {LINES_MAX}: split it by the question it answers"),
        ));
    }
    machine_paths(file, text, findings);
    if file.extension().is_some_and(|extension| extension == "rs") {
        let source = Source::split(text);
        head(file, text, findings);
        leftovers(file, &source, findings);
        wide_comments(file, &source, findings);
        waivers(file, &source, findings);
        if UNSAFE_FOLDERS.iter().any(|folder| file.starts_with(folder)) {
            safety(file, &source, findings);
        } else {
            no_unsafe(file, &source, findings);
        }
    }
}

fn machine_paths(file: &Path, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(text.lines()) {
        if let Some(path) = MACHINE_PATHS.iter().find(|path| line.contains(**path)) {
            findings.push(Finding::new(file, number, format!("{path} is a path of someone's machine")));
        }
    }
}

/// The head names the module's purpose, owner, assumptions and limits.
fn head(file: &Path, text: &str, findings: &mut Vec<Finding>) {
    if !text.starts_with("//!") {
        findings.push(Finding::new(
            file,
            1,
            "does not start with a //! head that says what this is and what it does not do",
        ));
    }
}

fn leftovers(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(source.code.iter().map(String::as_str)) {
        for (leftover, advice) in LEFTOVERS {
            let starts_word = leftover.starts_with(is_word);
            let hit = line.match_indices(leftover).any(|(at, _)| !(starts_word && line[..at].ends_with(is_word)));
            if hit {
                findings.push(Finding::new(file, number, *advice));
            }
        }
    }
    for (number, line) in numbered(source.comments.iter().map(String::as_str)) {
        if has_word(line, "FIXME") || has_word(line, "TODO") {
            findings.push(Finding::new(file, number, "FIXME and TODO: do it, or open an issue"));
        }
    }
}

fn wide_comments(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(source.comments.iter().map(String::as_str)) {
        let columns = line.trim_end().chars().count();
        if columns > COLUMNS_MAX {
            let text = format!("a comment ends in column {columns}: break it at {COLUMNS_MAX}, as code is");
            findings.push(Finding::new(file, number, text));
        }
    }
}

/// A lint is waived by an expectation with a reason, which complains once it is over.
fn waivers(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    // Compiled into several test programs that each use a part of it: what one expects, another does not meet.
    let shared = file.ancestors().any(|folder| folder.ends_with("tests/common"));
    let all = source.code.join("\n");
    for (opening, allows) in [("[allow(", true), ("[expect(", false)] {
        for (at, _) in all.match_indices(opening) {
            let number = all[..at].matches('\n').count() + 1;
            let attribute = all[at..].split(']').next().unwrap_or_default();
            if allows && !shared {
                findings.push(Finding::new(file, number, "a lint is allowed: use #[expect(…, reason = \"…\")]"));
            } else if !has_word(attribute, "reason") {
                findings.push(Finding::new(file, number, "a lint is waived without a reason"));
            }
        }
    }
}

fn no_unsafe(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(source.code.iter().map(String::as_str)) {
        if has_word(line, "unsafe") {
            let text = format!("unsafe code lives in {} only", UNSAFE_FOLDERS.join(" and "));
            findings.push(Finding::new(file, number, text));
        }
    }
    let is_root = file.ends_with("src/lib.rs") || file.ends_with("src/main.rs");
    let forbids = source.code.iter().any(|line| line.trim() == "#![forbid(unsafe_code)]");
    if is_root && !forbids {
        findings.push(Finding::new(file, 0, "does not say #![forbid(unsafe_code)]"));
    }
}

/// Every unsafe block and implementation says right above it why it is sound.
fn safety(file: &Path, source: &Source, findings: &mut Vec<Finding>) {
    let all = source.code.join("\n");
    for (at, _) in all.match_indices("unsafe") {
        let before = all[..at].chars().next_back();
        let rest = &all[at + "unsafe".len()..];
        if before.is_some_and(is_word) || rest.starts_with(is_word) {
            continue;
        }
        let next = rest.trim_start();
        let needs_reason = next.starts_with('{') || (next.starts_with("impl") && !next[4..].starts_with(is_word));
        let line = all[..at].matches('\n').count();
        if needs_reason && !explained(source, line) {
            findings.push(Finding::new(file, line + 1, "unsafe without a // SAFETY: comment right above"));
        }
    }
}

/// Whether the statement that `line` belongs to has a comment with its safety right above, or on the
/// line itself.
fn explained(source: &Source, line: usize) -> bool {
    let says = |line: usize| source.comments[line].contains("SAFETY:");
    if says(line) {
        return true;
    }
    let mut above = line;
    while above > 0 {
        above -= 1;
        let code = source.code[above].trim();
        if code.is_empty() {
            if source.comments[above].trim().is_empty() {
                return false;
            }
            // A block of comment lines: the word may stand in any of them.
            return (0..=above)
                .rev()
                .take_while(|&line| source.code[line].trim().is_empty() && !source.comments[line].trim().is_empty())
                .any(says);
        }
        // Still the same statement, or an attribute of it.
        let ended = code.ends_with([';', '{', '}', ',']);
        if ended {
            return false;
        }
    }
    false
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(is_word) && !line[at + word.len()..].starts_with(is_word))
}

fn numbered<'a>(lines: impl Iterator<Item = &'a str>) -> impl Iterator<Item = (usize, &'a str)> {
    lines.enumerate().map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines at which a file breaks a rule.
    fn broken(file: &str, text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        check(Path::new(file), text, &mut findings);
        findings.iter().map(|finding| finding.line).collect()
    }

    const QUEUES: &str = "crates/mq/src/tag.rs";
    const MEMORY: &str = "crates/mem/src/region.rs";

    #[test]
    fn a_tidy_file_passes() {
        let text = "//! Head.\n\n/// unsafe, todo!, `#[allow(x)]`: only words.\nfn f() -> &'static str { \"unsafe todo!()\" }\n";
        assert!(broken(QUEUES, text).is_empty());
        assert!(broken("README.md", "# Title\n").is_empty());
    }

    #[test]
    fn a_head_is_asked_for() {
        assert_eq!(broken(QUEUES, "// Not a head.\n"), [1]);
        assert_eq!(broken(QUEUES, "use std::fs;\n//! Late.\n"), [1]);
    }

    #[test]
    fn leftovers_are_found() {
        for text in [
            "fn f() { todo!() }",
            "fn f() { unimplemented!(\"x\") }",
            "#[ignore]",
            "#[ignore = \"slow\"]",
            "#[allow(dead_code)]",
            "#![allow(dead_code)]",
            "#[expect(dead_code)]",
            "#[expect(\n    dead_code\n)]",
            "fn f() { dbg!(1); }",
            "// FIXME later",
            "/* TODO */",
        ] {
            assert_eq!(broken(QUEUES, &format!("//! Head.\n{text}\n")), [2], "{text}");
        }
        for text in [
            "#[expect(dead_code, reason = \"kept for tests\")]",
            "#[expect(\n    dead_code,\n    reason = \"x\"\n)]",
            "fn my_todo!()",
        ] {
            assert!(broken(QUEUES, &format!("//! Head.\n{text}\n")).is_empty(), "{text}");
        }
    }

    #[test]
    fn comments_are_as_wide_as_code_may_be() {
        let wide = |columns: usize| format!("//! Head.\n// {}\n", "x".repeat(columns - 3));
        assert!(broken(QUEUES, &wide(COLUMNS_MAX)).is_empty());
        assert_eq!(broken(QUEUES, &wide(COLUMNS_MAX + 1)), [2]);
        let code = format!("//! Head.\nconst X: &str = \"{}\";\n", "x".repeat(COLUMNS_MAX));
        assert!(broken(QUEUES, &code).is_empty(), "rustfmt leaves a long word alone, and so do we");
    }

    #[test]
    fn helpers_that_tests_share_may_allow_for_a_reason() {
        let shared = "crates/os/tests/common/mod.rs";
        assert!(broken(shared, "//! Head.\n#![allow(dead_code, reason = \"each uses a part\")]\n").is_empty());
        assert_eq!(broken(shared, "//! Head.\n#![allow(dead_code)]\n"), [2]);
    }

    #[test]
    fn unsafe_has_its_place() {
        for text in
            ["fn f() { unsafe { g() } }", "unsafe impl Send for X {}", "unsafe fn f() {}", "#[unsafe(no_mangle)]"]
        {
            assert_eq!(broken(QUEUES, &format!("//! Head.\n// SAFETY: so it says.\n{text}\n")), [3], "{text}");
        }
        assert!(broken(QUEUES, "//! Head.\n#![deny(unsafe_op_in_unsafe_fn)]\n").is_empty());
        assert_eq!(broken("crates/mq/src/lib.rs", "//! Head.\n"), [0]);
        assert_eq!(broken("crates/mq/src/lib.rs", "//! Head.\n// #![forbid(unsafe_code)]\n"), [0]);
        assert!(broken("crates/mq/src/lib.rs", "//! Head.\n#![forbid(unsafe_code)]\n").is_empty());
        assert!(broken("crates/mem/src/lib.rs", "//! Head.\n").is_empty());
    }

    #[test]
    fn unsafe_says_why_it_is_sound() {
        for text in [
            "// SAFETY: sound.\nunsafe { g() }",
            "// SAFETY: sound,\n// for two lines' worth of reasons.\nlet x = unsafe { g() };",
            "// SAFETY: sound.\nlet x =\n    unsafe { g() };",
            "// SAFETY: sound.\n#[inline]\nunsafe impl Send for X {}",
            "let x = unsafe { g() }; // SAFETY: sound.",
            "/// # Safety\n/// As C has it.\npub unsafe fn f() {}",
            "unsafe extern \"C\" {}",
        ] {
            assert!(broken(MEMORY, &format!("//! Head.\n{text}\n")).is_empty(), "{text}");
        }
        for (text, line) in [
            ("unsafe { g() }", 2),
            ("// Sound.\nunsafe { g() }", 3),
            ("// SAFETY: of another.\nf();\nunsafe { g() }", 4),
            ("// SAFETY: too far.\n\nunsafe { g() }", 4),
            ("f(\n    // SAFETY: of the first.\n    unsafe { g() },\n    unsafe { h() },\n);", 5),
            ("unsafe\n{ g() }", 2),
            ("unsafe impl<T> Sync for X<T> {}", 2),
        ] {
            assert_eq!(broken(MEMORY, &format!("//! Head.\n{text}\n")), [line], "{text}");
        }
    }

    #[test]
    fn long_files_and_machine_paths_are_found() {
        assert_eq!(broken("docs/a.md", &"x\n".repeat(LINES_MAX + 1)), [0]);
        assert!(broken("docs/a.md", &"x\n".repeat(LINES_MAX)).is_empty());
        for path in MACHINE_PATHS {
            assert_eq!(broken("README.md", &format!("one\nsee {path}someone\n")), [2]);
        }
    }
}
