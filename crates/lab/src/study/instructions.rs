//! Instructions of the sections of a study, counted by valgrind. They do not depend on other load of the machine.
//!
//! [`count`] starts this program again under valgrind, with `--count-instructions`. That run executes only the
//! sections, in a fixed order, and prints a line for each; callgrind writes a file for each. Without valgrind there are
//! no counts, and the report says so.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::folder::Folder;

/// A counted section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct SectionCount {
    pub(crate) label: String,
    pub(crate) instructions: u64,
    pub(crate) ios: u64,
}

impl SectionCount {
    pub(crate) fn per_io(&self) -> f64 {
        self.instructions as f64 / self.ios.max(1) as f64
    }
}

/// Executes sections, and lists them.
#[derive(Debug, Default)]
pub(crate) struct SectionList(String);

impl SectionList {
    /// Executes a section of so many I/Os.
    pub(crate) fn run(&mut self, label: &str, ios: u64, work: &mut dyn FnMut()) {
        dumped_section(work);
        let _ = writeln!(self.0, "{label}\t{ios}");
    }

    /// The list, for standard output.
    pub(crate) fn text(self) -> String {
        self.0
    }
}

/// Callgrind writes a file at its end; it finds this function and the next by their names.
#[inline(never)]
fn dumped_section(work: &mut dyn FnMut()) {
    counted_section(work);
}

/// The counted part.
#[inline(never)]
fn counted_section(work: &mut dyn FnMut()) {
    work();
}

/// Runs the sections of a study under valgrind.
///
/// # Errors
/// Why there are no counts, for the report.
pub(crate) fn count(study: &str, quick: bool) -> Result<Vec<SectionCount>, String> {
    let folder = Folder::new("instructions").map_err(|error| format!("no temporary folder: {error}"))?;
    let program = std::env::current_exe().map_err(|error| format!("this program was not found: {error}"))?;
    let out = folder.path().join("callgrind");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--toggle-collect=*counted_section*", "--dump-after=*dumped_section*"]);
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(program).args(["study", study, "--count-instructions"]).args(quick.then_some("--quick"));
    let ended = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "valgrind is not installed".into(),
        _ => format!("valgrind: {error}"),
    })?;
    if !ended.status.success() {
        return Err(format!("valgrind ended with {}", ended.status));
    }
    let list = String::from_utf8_lossy(&ended.stdout);
    list.lines().enumerate().map(|(number, line)| section(line, &out, number + 1)).collect()
}

fn section(line: &str, out: &Path, number: usize) -> Result<SectionCount, String> {
    let no_section = || format!("no section: {line}");
    let (label, ios) = line.split_once('\t').ok_or_else(no_section)?;
    let file = out.with_extension(number.to_string());
    let profile =
        fs::read_to_string(&file).map_err(|error| format!("callgrind wrote no {}: {error}", file.display()))?;
    let instructions = total(&profile).ok_or_else(|| format!("no total for {label}"))?;
    Ok(SectionCount { label: label.into(), instructions, ios: ios.parse().map_err(|_| no_section())? })
}

/// The number in callgrind's line `totals: 1234`.
fn total(profile: &str) -> Option<u64> {
    profile.lines().find_map(|line| line.strip_prefix("totals:")).and_then(|number| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_a_profile_is_found() {
        assert_eq!(total("version: 1\nevents: Ir\nsummary: 77\n\ntotals: 12345\n"), Some(12_345));
        assert_eq!(total("version: 1\n"), None);
    }

    #[test]
    fn sections_are_listed_in_their_order() {
        let (mut list, mut ran) = (SectionList::default(), 0);
        list.run("one", 8, &mut || ran += 1);
        list.run("two", 16, &mut || ran += 1);
        assert_eq!((list.text().as_str(), ran), ("one\t8\ntwo\t16\n", 2));
    }
}
