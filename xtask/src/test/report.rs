//! Report of a test run: a line for each item as it ends, all failures again at the end, and a closing line for
//! programs: `N passed, N failed, N skipped`, with `: no verdict` after it if a quick run is incomplete.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::progress::{ItemPosition, Progress, WatchedOutput};

/// Start of the line with the command that runs only the failed items.
pub const RERUN: &str = "rerun: ";

/// Lines repeated at the end for one failure.
const TELLING_LINES: usize = 12;

/// Exit code of a quick run without failures in which an item did not run. 2 means wrong arguments.
const NO_VERDICT: u8 = 3;

/// Requirements of a run besides the absence of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completeness {
    /// Items that did not run are listed.
    Optional,
    /// Items that did not run make the run incomplete, without a verdict.
    ForVerdict,
    /// Items that did not run count as failed.
    Mandatory,
}

/// Result of an item that did not fail as a whole.
pub enum Verdict {
    /// Number of passed tests in it.
    Passed(usize),
    /// Passed, with measured values.
    Measured(String),
    /// Some of its tests failed.
    Mixed { passed: usize, failed: usize, skipped: usize, text: String },
    /// Not run, for this reason.
    Skipped(String),
}

impl Verdict {
    pub fn passed() -> Self {
        Self::Passed(1)
    }

    pub fn skipped(reason: impl Into<String>) -> Self {
        Self::Skipped(reason.into())
    }
}

pub struct Report {
    completeness: Completeness,
    start: Instant,
    /// Number of items, and number of started ones.
    items: usize,
    begun: usize,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Names and texts to repeat at the end.
    failures: Vec<(String, String)>,
    left_out: Vec<(String, String)>,
}

impl Report {
    /// A report for this number of items.
    pub fn new(completeness: Completeness, items: usize) -> Self {
        Self {
            completeness,
            start: Instant::now(),
            items,
            begun: 0,
            passed: 0,
            failed: 0,
            skipped: 0,
            failures: Vec::new(),
            left_out: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.passed + self.failed + self.skipped == 0
    }

    pub fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// Time since the start of the report.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Runs one item and prints its result, with progress on a terminal.
    pub fn item(&mut self, name: &str, watched: &WatchedOutput, run: impl FnOnce() -> Result<Verdict>) {
        // A terminal shows the running item; in a file, an incomplete line would mix with other output.
        let is_terminal = std::io::stdout().is_terminal();
        if is_terminal {
            print!("{name:24} ");
            let _ = std::io::stdout().flush();
        }
        let start = Instant::now();
        self.begun += 1;
        let place = ItemPosition { number: self.begun, of: self.items.max(self.begun), start: self.start };
        let progress = Progress::start(name, place, watched.clone());
        let verdict = run();
        drop(progress);
        let took = start.elapsed();
        let (word, text) = self.count(name, verdict);
        let start_of_line = if is_terminal { "\r\x1b[K" } else { "" };
        println!("{start_of_line}{name:24} {word:8} {}{text}", seconds(took));
        if self.completeness == Completeness::Mandatory && word == "skipped" {
            println!("{:24} CI is set, so this counts as failed", "");
        }
    }

    /// Records a verdict; returns its word and the rest of its line.
    fn count(&mut self, name: &str, verdict: Result<Verdict>) -> (&'static str, String) {
        match verdict {
            Ok(Verdict::Passed(1)) => {
                self.passed += 1;
                ("ok", String::new())
            }
            Ok(Verdict::Passed(count)) => {
                self.passed += count;
                ("ok", format!("  {count} tests"))
            }
            Ok(Verdict::Measured(what)) => {
                self.passed += 1;
                ("ok", format!("  {what}"))
            }
            Ok(Verdict::Mixed { passed, failed, skipped, text }) => {
                self.passed += passed;
                self.failed += failed;
                self.skipped += skipped;
                self.failures.push((name.to_owned(), text.clone()));
                ("FAILED", format!("  {passed} tests passed, {failed} failed\n{}", indent(&text)))
            }
            Ok(Verdict::Skipped(reason)) => {
                if self.completeness == Completeness::Mandatory {
                    self.failed += 1;
                } else {
                    self.skipped += 1;
                }
                self.left_out.push((name.to_owned(), reason.clone()));
                ("skipped", format!("  {reason}"))
            }
            Err(error) => {
                self.failed += 1;
                let text = format!("{error:#}");
                self.failures.push((name.to_owned(), text.clone()));
                ("FAILED", format!("\n{}", indent(&text)))
            }
        }
    }

    /// Prints the summary with the closing line.
    pub fn close(self) -> ExitCode {
        println!();
        for (name, reason) in &self.left_out {
            println!("did not run: {name}: {reason}");
        }
        for (name, text) in &self.failures {
            for line in telling(text) {
                println!("failed: {name}: {line}");
            }
        }
        println!("after {}:", seconds(self.start.elapsed()).trim());
        println!("{}", self.closing_line());
        ExitCode::from(self.exit_code())
    }

    fn closing_line(&self) -> String {
        let verdict = if self.exit_code() == NO_VERDICT { ": no verdict" } else { "" };
        format!("{} passed, {} failed, {} skipped{verdict}", self.passed, self.failed, self.skipped)
    }

    fn exit_code(&self) -> u8 {
        match (self.failed, self.skipped, self.completeness) {
            (1.., _, _) => 1,
            (0, 1.., Completeness::ForVerdict) => NO_VERDICT,
            _ => 0,
        }
    }
}

/// Lines of a failure with its cause: failed tests with their panics, their programs, and errors of a compiler or a
/// system call; the first line if there are none.
fn telling(text: &str) -> Vec<&str> {
    let mut is_message = false;
    let tells = |line: &&str| {
        let is_panic = line.contains("panicked at ");
        // The message is on the line after the place.
        let tells = std::mem::replace(&mut is_message, is_panic) || is_panic;
        tells
            || (line.starts_with("test ") && line.ends_with("FAILED"))
            || line.starts_with(RERUN)
            || line.starts_with("`-p ")
            || ["error:", "error[", "os error"].iter().any(|word| line.contains(word))
    };
    let mut lines: Vec<&str> = text.lines().map(str::trim).filter(tells).collect();
    lines.dedup();
    lines.truncate(TELLING_LINES);
    if lines.is_empty() { text.lines().take(1).collect() } else { lines }
}

fn seconds(time: Duration) -> String {
    format!("{:6.1} s", time.as_secs_f64())
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn counted(completeness: Completeness) -> Report {
        let mut report = Report::new(completeness, 5);
        report.count("a", Ok(Verdict::passed()));
        report.count("b", Ok(Verdict::Passed(5)));
        report.count("c", Ok(Verdict::skipped("no reason")));
        report.count("d", Err(anyhow!("broken")));
        report.count("e", Ok(Verdict::Mixed { passed: 2, failed: 1, skipped: 0, text: "one".into() }));
        report
    }

    #[test]
    fn everything_is_counted() {
        assert_eq!(counted(Completeness::Optional).closing_line(), "8 passed, 2 failed, 1 skipped");
        assert_eq!(counted(Completeness::Optional).failures.len(), 2);
    }

    #[test]
    fn a_failure_is_told_by_the_tests_that_failed_and_not_by_its_first_line() {
        let text =
            "test a ... ok\ntest b ... FAILED\nnoise\nerror: No space left on device (os error 28)\ntest result: ok.";
        assert_eq!(telling(text), ["test b ... FAILED", "error: No space left on device (os error 28)"]);
        assert_eq!(telling("broken\nall of it"), ["broken"]);
        let panic = "---- b stdout ----\nstarted\nthread 'b' panicked at b.rs:1:1:\ntoo late\nnote: run with\n";
        assert_eq!(telling(panic), ["thread 'b' panicked at b.rs:1:1:", "too late"]);
    }

    #[test]
    fn skipped_items_fail_a_run_in_which_all_are_mandatory() {
        assert_eq!(counted(Completeness::Mandatory).closing_line(), "8 passed, 3 failed, 0 skipped");
    }

    #[test]
    fn a_quick_run_with_skipped_items_has_no_verdict() {
        let ended = |completeness, verdicts: Vec<Result<Verdict>>| {
            let mut report = Report::new(completeness, verdicts.len());
            verdicts.into_iter().for_each(|verdict| drop(report.count("a", verdict)));
            (report.exit_code(), report.closing_line())
        };
        let passed = || Ok(Verdict::passed());
        let late = || Ok(Verdict::skipped("the time is over"));
        let quick = Completeness::ForVerdict;
        assert_eq!(ended(quick, vec![passed(), passed()]), (0, "2 passed, 0 failed, 0 skipped".into()));
        assert_eq!(ended(quick, vec![passed(), late()]), (3, "1 passed, 0 failed, 1 skipped: no verdict".into()));
        let failed = || Err(anyhow!("broken"));
        assert_eq!(ended(quick, vec![failed(), late()]), (1, "0 passed, 1 failed, 1 skipped".into()));
        assert_eq!(ended(Completeness::Optional, vec![passed(), late()]).0, 0);
        // Tests ignored by their program did not run, either.
        let ignored = Ok(Verdict::Mixed { passed: 3, failed: 0, skipped: 1, text: String::new() });
        assert_eq!(ended(quick, vec![ignored]).0, 3);
    }
}
