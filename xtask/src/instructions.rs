//! Instructions for each I/O, counted by valgrind and compared with the recorded ones.
//!
//! Time depends on the neighbours, instructions do not: the same program executes as many each time. So this finds
//! changes that a benchmark on a busy machine cannot. The record is valid for one compiler and one architecture; with
//! another compiler it is not compared.
//!
//! The duration of an instruction is unknown here.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{Running, succeed, tail};
use crate::test::{Verdict, cargo};
use crate::{host, repository};

/// Excess over the record that is an error. Smaller differences come from a new version of the C library or a moved
/// branch.
const EXCESS_MAX: f64 = 0.03;
/// Rounds of the shorter and the longer run of a case. Their difference makes an error of one instruction a round
/// visible, and valgrind takes a second for both.
const ROUNDS: [u64; 2] = [1000, 5000];
/// One run under valgrind; some 20 times its usual length.
const RUN_LIMIT: Duration = Duration::from_mins(1);
/// A first build of everything on a busy machine.
const BUILD_LIMIT: Duration = Duration::from_mins(15);

const RECORD: &str = "xtask/instructions.toml";
const ANEW: &str = "cargo xtask bench --record-instructions";

/// Instructions for each I/O, by case.
type Counts = BTreeMap<String, f64>;

/// The record, and where it is valid.
#[derive(Debug, PartialEq)]
struct Record {
    rustc: String,
    arch: String,
    counts: Counts,
}

/// The test: no case may take more instructions than recorded.
pub fn test(root: &Path, log: &File) -> Result<Verdict> {
    let path = root.join(RECORD);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let record =
        Record::parse(&text).with_context(|| format!("cannot understand {}; write it with {ANEW}", path.display()))?;
    let (rustc, arch) = (rustc_version()?, std::env::consts::ARCH);
    if record.rustc != rustc || record.arch != arch {
        return Ok(Verdict::skipped(format!(
            "{RECORD} was recorded with rustc {} on {}, and this is rustc {rustc} on {arch}; {ANEW} records anew",
            record.rustc, record.arch
        )));
    }
    let counts = count(root, log)?;
    let violations = compare(&record.counts, &counts);
    ensure!(
        violations.is_empty(),
        "{}\nIf that is the price of something wanted, record anew: {ANEW}",
        violations.join("\n")
    );
    Ok(Verdict::Passed(counts.len()))
}

/// Counts, and writes the record.
pub fn record() -> Result<()> {
    let root = repository()?;
    let log = tempfile::tempfile().context("cannot make a temporary file for the output of cargo")?;
    let counts = count(&root, &log)?;
    let record = Record { rustc: rustc_version()?, arch: std::env::consts::ARCH.into(), counts };
    let text = record.text();
    let path = root.join(RECORD);
    fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    print!("{text}");
    Ok(())
}

fn compare(recorded: &Counts, counted: &Counts) -> Vec<String> {
    let mut violations = Vec::new();
    for (case, count) in counted {
        match recorded.get(case) {
            None => violations.push(format!("{case}: {count:.1} instructions, and {RECORD} has no such case")),
            Some(old) if *count > old * (1.0 + EXCESS_MAX) => violations.push(format!(
                "{case}: {count:.1} instructions for each I/O, {:.1} % more than the {old:.1} in {RECORD}",
                (count / old - 1.0) * 100.0
            )),
            Some(_) => {}
        }
    }
    let gone = recorded.keys().filter(|case| !counted.contains_key(*case));
    violations.extend(gone.map(|case| format!("{case}: in {RECORD}, and no longer a case")));
    violations
}

impl Record {
    fn parse(text: &str) -> Result<Record> {
        let table: toml::Table = text.parse()?;
        let string = |key: &str| {
            let value = table.get(key).and_then(toml::Value::as_str);
            value.map(ToOwned::to_owned).with_context(|| format!("`{key}` is missing, or no string"))
        };
        let cases = table.get("instructions_per_io").and_then(toml::Value::as_table);
        let cases = cases.context("the table `instructions_per_io` is missing")?;
        let number = |(case, value): (&String, &toml::Value)| {
            let count = value.as_float().filter(|count| *count > 0.0);
            Ok((case.clone(), count.with_context(|| format!("`{case}` is no number such as 120.5"))?))
        };
        let counts = cases.iter().map(number).collect::<Result<_>>()?;
        Ok(Record { rustc: string("rustc")?, arch: string("arch")?, counts })
    }

    fn text(&self) -> String {
        let mut text = format!(
            "# Instructions for each I/O, load included, as valgrind counts them. Written by `{ANEW}`.\n\n\
             rustc = \"{}\"\narch = \"{}\"\n\n[instructions_per_io]\n",
            self.rustc, self.arch
        );
        for (case, count) in &self.counts {
            let _ = writeln!(text, "{case} = {count:.1}");
        }
        text
    }
}

/// Counts every case that the program has.
fn count(root: &Path, log: &File) -> Result<Counts> {
    host::require(&[("valgrind", "valgrind")])?;
    let program = build(root, log)?;
    let cases = succeed("the cases", &Command::new(&program), RUN_LIMIT)?;
    let cases: Vec<&str> = cases.lines().collect();
    // Each under its own valgrind, which emulates one CPU: as many at a time as there are CPUs.
    let at_a_time = std::thread::available_parallelism()?.get();
    let next = AtomicUsize::new(0);
    let count_next = || -> Result<Counts> {
        let mut counts = Counts::new();
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            counts.insert((*case).to_owned(), count_case(&program, case)?);
        }
        Ok(counts)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_a_time).map(|_| scope.spawn(count_next)).collect();
        let counts = threads.into_iter().map(|thread| thread.join().expect("no thread panics"));
        counts.collect::<Result<Vec<_>>>().map(|counts| counts.into_iter().flatten().collect())
    })
}

/// Instructions for each I/O of a case.
fn count_case(program: &Path, case: &str) -> Result<f64> {
    let [(ios, instructions), (more_ios, more_instructions)] =
        [run(program, case, ROUNDS[0])?, run(program, case, ROUNDS[1])?];
    ensure!(more_ios > ios && more_instructions > instructions, "{case} did nothing in its further rounds");
    Ok((more_instructions - instructions) as f64 / (more_ios - ios) as f64)
}

/// Builds the program as the product is built, and finds it.
fn build(root: &Path, log: &File) -> Result<PathBuf> {
    let mut command = cargo(root);
    // With the product's package, for the crates of both to have the same features and to be compiled once.
    command.args(["bench", "--no-run", "-p", "blkyard-lab", "-p", "blkyard-cli"]);
    command.args(["--bench", "instructions", "--message-format=json"]);
    let ended = Running::start_logged("cargo bench --no-run", &command, log)?.wait(BUILD_LIMIT)?;
    ensure!(ended.status.success(), "cargo ended with {}:\n{}", ended.status, tail(&ended.stdout, 40));
    let messages = ended.stdout.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut ours = messages.filter(|message| message["target"]["name"] == "instructions");
    let program = ours.find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    program.context("cargo names no program of the benchmark `instructions`")
}

/// I/Os and instructions of one run.
fn run(program: &Path, case: &str, rounds: u64) -> Result<(u64, u64)> {
    let mut command = Command::new("valgrind");
    // By thread: instructions of other threads do not count.
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*counted_rounds*"]);
    command.arg(program).arg(case).arg(rounds.to_string());
    let ended = Running::start("valgrind", &command)?.wait(RUN_LIMIT)?;
    ensure!(ended.status.success(), "{case} under valgrind ended with {}:\n{}", ended.status, tail(&ended.said(), 20));
    let ios = ended.stdout.trim().parse().with_context(|| format!("{case} does not say how many I/Os it did"))?;
    Ok((ios, instructions(&ended.stderr)?))
}

/// The number in callgrind's line `==1== Collected : 1234`.
fn instructions(said: &str) -> Result<u64> {
    for line in said.lines() {
        if let Some((_, number)) = line.split_once("Collected :") {
            return number.trim().parse().with_context(|| format!("no number in: {line}"));
        }
    }
    bail!("valgrind counted nothing; it said:\n{}", tail(said, 20))
}

fn rustc_version() -> Result<String> {
    let said = succeed("rustc", Command::new("rustc").arg("--version"), RUN_LIMIT)?;
    let version = said.split_whitespace().nth(1).with_context(|| format!("rustc --version says {said:?}"))?;
    Ok(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(cases: &[(&str, f64)]) -> Counts {
        cases.iter().map(|(case, count)| ((*case).to_owned(), *count)).collect()
    }

    #[test]
    fn three_percent_more_is_noise_and_beyond_is_an_error() {
        let recorded = counts(&[("a", 100.0), ("b", 100.0), ("c", 100.0)]);
        assert!(compare(&recorded, &counts(&[("a", 102.9), ("b", 40.0), ("c", 100.0)])).is_empty());
        let violations = compare(&recorded, &counts(&[("a", 103.1), ("b", 100.0), ("d", 1.0)]));
        assert_eq!(violations.len(), 3, "{violations:?}");
        assert!(violations[0].starts_with("a: 103.1 instructions for each I/O, 3.1 % more"), "{violations:?}");
        assert!(violations[1].starts_with("d: ") && violations[2].starts_with("c: "), "{violations:?}");
    }

    #[test]
    fn the_record_is_read_as_it_was_written() {
        let counts = counts(&[("core-null-b1", 205.3), ("virtio-walk-direct-b32", 90.0)]);
        let record = Record { rustc: "1.95.0".into(), arch: "x86_64".into(), counts };
        assert_eq!(Record::parse(&record.text()).unwrap(), record);
        assert!(Record::parse("rustc = \"1\"\narch = \"x\"\n[instructions_per_io]\na = \"b\"\n").is_err());
    }

    #[test]
    fn the_count_is_found_in_what_callgrind_says() {
        let said = "==1== Events    : Ir\n==1== Collected : 12345678\n==1== \n==1== I   refs:      12,345,678\n";
        assert_eq!(instructions(said).unwrap(), 12_345_678);
        assert!(instructions("valgrind: no such tool\n").is_err());
    }
}
