//! Steps without a daemon: format, lints, tidiness, documentation, tests, models, instructions, and the build of the
//! product.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::report::{RERUN, Verdict};
use crate::process::{Ended, Running, tail};
use crate::{host, instructions, tidy};

/// Covers a first build of everything on two processors that others use as well; ends a test that hangs.
const CARGO_LIMIT: Duration = Duration::from_hours(1);

/// How much of a failed step's output is shown; the rest is in its log.
const SHOWN_LINES: usize = 40;

/// One call of cargo, or a family of them.
pub struct TestStep {
    pub name: &'static str,
    pub sentence: &'static str,
    kind: StepKind,
}

enum StepKind {
    /// Either fine or not.
    Check { arguments: &'static [&'static str], environment: &'static [(&'static str, &'static str)] },
    /// Rules that no tool of cargo checks.
    Tidy,
    /// Tests that count themselves: the programs that these arguments of cargo choose, and in them the tests with one
    /// of these words in their paths; all of them without words.
    Tests { programs: &'static [&'static str], paths: &'static [&'static str] },
    /// The program of this name, with as many seeds as half a minute allows.
    Simulation(&'static str),
    /// No more work for an I/O than was recorded.
    Instructions,
    /// The models in `tests/TOOL*.rs` of any crate, built with `--cfg TOOL`.
    Models(&'static str),
}

pub const ALL: &[TestStep] = &[
    TestStep {
        name: "format",
        sentence: "the source is as cargo fmt would have it",
        kind: StepKind::Check { arguments: &["fmt", "--all", "--", "--check", "--color=never"], environment: &[] },
    },
    TestStep {
        name: "clippy",
        sentence: "clippy has nothing to say",
        kind: StepKind::Check {
            arguments: &["clippy", "--workspace", "--features", ALL_FEATURES, "--all-targets", "--", "-D", "warnings"],
            environment: &[],
        },
    },
    TestStep {
        name: "tidy",
        sentence: "floors, unsafe code, sizes, heads and leftovers are as they should be",
        kind: StepKind::Tidy,
    },
    TestStep {
        name: "doc",
        sentence: "the documentation builds without warnings",
        kind: StepKind::Check {
            arguments: &["doc", "--no-deps", "--workspace", "--features", ALL_FEATURES],
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
        },
    },
    TestStep {
        name: "unit",
        sentence: "the tests of all crates pass",
        kind: StepKind::Tests { programs: &[], paths: &[] },
    },
    TestStep {
        name: "sim-queue",
        sentence: "worlds drawn from seeds come to a good end, as many as half a minute allows",
        kind: StepKind::Simulation("blkyard-sim"),
    },
    TestStep {
        name: "sim-stack",
        sentence: "whole stacks drawn from seeds lose no write and end all I/O, as many as half a minute allows",
        kind: StepKind::Simulation("blkyard-stack"),
    },
    TestStep {
        name: "loom",
        sentence: "the models of what threads share hold in every interleaving",
        kind: StepKind::Models("loom"),
    },
    TestStep {
        name: "shuttle",
        sentence: "the real code of what threads share holds in schedules drawn at random",
        kind: StepKind::Models("shuttle"),
    },
    TestStep {
        name: "kill",
        sentence: "what a daemon killed at any store leaves in shared memory is enough to go on from",
        kind: StepKind::Models("kill"),
    },
    TestStep {
        name: "instructions",
        sentence: "an I/O takes no more instructions than recorded",
        kind: StepKind::Instructions,
    },
];

/// What stands for `unit` where there is little time: what most often finds something first.
pub const QUICK_UNIT: &[TestStep] = &[
    TestStep {
        name: "quick-unit",
        sentence: "the tests inside of all crates pass",
        kind: StepKind::Tests { programs: &["--lib", "--bins"], paths: &[] },
    },
    TestStep {
        name: "quick-serve",
        sentence: "the daemon starts, refuses, ends and answers as it should",
        kind: StepKind::Tests {
            programs: &["--test", "it"],
            paths: &["serve::", "sessions::", "polite::", "advice::"],
        },
    },
    TestStep {
        name: "quick-rings",
        sentence: "rings and requests of both sides are as the virtio document has them",
        kind: StepKind::Tests {
            programs: &["--test", "it"],
            paths: &["blk::", "ring::", "packed::", "queue::", "inflight::"],
        },
    },
    TestStep {
        name: "quick-hostile",
        sentence: "hostile guests and front-ends bring nothing down",
        kind: StepKind::Tests {
            programs: &["--test", "it"],
            paths: &["hostile::", "hostile_guest::", "hostile_front_end::"],
        },
    },
];

/// Features that are off by default, since they need libraries of the system. Checks and tests have them; scenarios
/// have the product as its users build it.
const ALL_FEATURES: &str = "blkyard-cli/tls";
/// What they need: files, or programs, with their packages.
const OPENSSL: &[(&str, &str)] = &[("/usr/include/openssl/ssl.h", "libssl-dev"), ("pkg-config", "pkg-config")];

/// Steps of [`ALL`] that are quick themselves.
pub const QUICK: &[&str] = &["format", "tidy", "clippy"];

/// Runs a step. How many tests it has is noted in `tests` once it is known.
pub fn run(step: &TestStep, root: &Path, log: &File, tests: &AtomicUsize) -> Result<Verdict> {
    match &step.kind {
        StepKind::Check { arguments, environment } => {
            if arguments.contains(&ALL_FEATURES) {
                host::require(OPENSSL)?;
            }
            let mut command = cargo(root);
            command.args(*arguments).envs(environment.iter().copied());
            let ended = logged(step.name, &command, log)?;
            check(&ended)?;
            Ok(Verdict::passed())
        }
        StepKind::Tidy => {
            let findings: Vec<_> = tidy::check(root)?.iter().map(ToString::to_string).collect();
            ensure!(findings.is_empty(), "{}", findings.join("\n"));
            Ok(Verdict::passed())
        }
        StepKind::Tests { programs, paths } => {
            host::require(OPENSSL)?;
            let test = ["test", "--workspace", "--features", ALL_FEATURES];
            let mut command = cargo(root);
            command.args(test).arg("--no-fail-fast").args(*programs).arg("--").args(*paths);
            let mut list = cargo(root);
            list.args(test).args(*programs).args(["--", "--list"]).args(*paths);
            let listed = logged(step.name, &list, log)?;
            check(&listed)?;
            tests.store(listed.stdout.lines().filter(|line| line.ends_with(": test")).count(), Ordering::Relaxed);
            verdict(&command, &logged(step.name, &command, log)?)
        }
        StepKind::Simulation(program) => simulation(program, root, log),
        StepKind::Models(tool) => models(tool, root, log),
        StepKind::Instructions => instructions::test(root, log),
    }
}

/// Builds a program that runs worlds, and runs it.
fn simulation(program: &str, root: &Path, log: &File) -> Result<Verdict> {
    let mut command = Command::new(build_as_tested(program, root, log)?);
    command.args(["0..100000", "--seconds", "30"]);
    let ended = logged(program, &command, log)?;
    ensure!(ended.status.success(), "{program} ended with {}:\n{}", ended.status, tail(&ended.stdout, SHOWN_LINES));
    Ok(Verdict::passed())
}

/// Builds a program with the features that it has in `unit`, TLS among them; returns it.
pub fn build_as_tested(program: &str, root: &Path, log: &File) -> Result<PathBuf> {
    host::require(OPENSSL)?;
    let mut build = cargo(root);
    // All crates and a test, for the dependencies to have their features of `unit`, too: with those that one program
    // needs, 60 crates would be compiled a second time.
    build.args(["build", "--workspace", "--features", ALL_FEATURES, "--bin", program, "--test", "worlds"]);
    check(&logged("cargo build", &build, log)?)?;
    Ok(target_folder(root).join("debug").join(program))
}

/// Builds the product as its users do, or as its developers do, which is quicker; returns the program.
pub fn build(is_release: bool, root: &Path, log: &File) -> Result<PathBuf> {
    let mut command = cargo(root);
    command.args(["build", "-p", "blkyard-cli"]).args(is_release.then_some("--release"));
    check(&logged("cargo build", &command, log)?)?;
    let program = target_folder(root).join(if is_release { "release/blkyard" } else { "debug/blkyard" });
    ensure!(program.exists(), "cargo built no {}", program.display());
    Ok(program)
}

/// Cargo's build folder.
pub fn target_folder(root: &Path) -> PathBuf {
    root.join(env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

/// Runs all models, with cargo's output folder of their own: they are built with another flag, and would
/// otherwise drive everything else out of it.
fn models(tool: &str, root: &Path, log: &File) -> Result<Verdict> {
    let found = find_models(tool, root)?;
    if found.is_empty() {
        return Ok(Verdict::skipped(format!("no crate has a tests/{tool}*.rs")));
    }
    let mut flags = env::var_os("RUSTFLAGS").unwrap_or_default();
    if !flags.is_empty() {
        flags.push(" ");
    }
    flags.push("--cfg ");
    flags.push(tool);
    let mut command = cargo(root);
    command.args(["test", "--release", "--no-fail-fast"]);
    // In one call, so that all packages have the same features of their dependencies, which are then compiled once.
    for (package, tests) in &found {
        command.args(["-p", package]);
        for test in tests {
            command.args(["--test", test]);
        }
    }
    command.env("RUSTFLAGS", &flags).env("CARGO_TARGET_DIR", target_folder(root).join(tool));
    // The models should run fast, but need not be linked as the product is. Some rely on overflow checks.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    command.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
    verdict(&command, &logged(tool, &command, log)?)
}

/// Each package with models, and the names of the test targets that hold them.
fn find_models(tool: &str, root: &Path) -> Result<Vec<(String, Vec<String>)>> {
    let crates = root.join("crates");
    let mut found = Vec::new();
    for entry in fs::read_dir(&crates).with_context(|| format!("cannot read {}", crates.display()))? {
        let folder = entry?.path();
        let Ok(tests) = fs::read_dir(folder.join("tests")) else { continue };
        let mut names = Vec::new();
        for test in tests {
            let leaf = test?.file_name().to_string_lossy().into_owned();
            if let Some(name) = leaf.strip_suffix(".rs").filter(|name| name.starts_with(tool)) {
                names.push(name.to_owned());
            }
        }
        if !names.is_empty() {
            names.sort();
            found.push((package_name(&folder)?, names));
        }
    }
    found.sort();
    Ok(found)
}

fn package_name(folder: &Path) -> Result<String> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("cannot understand {}", path.display()))?;
    let name = manifest.get("package").and_then(|package| package.get("name")).and_then(toml::Value::as_str);
    Ok(name.with_context(|| format!("{} names no package", path.display()))?.to_owned())
}

pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.current_dir(root).env("CARGO_TERM_COLOR", "never");
    command
}

fn logged(name: &str, command: &Command, log: &File) -> Result<Ended> {
    Running::start_logged(name, command, log)?.wait(CARGO_LIMIT)
}

fn check(ended: &Ended) -> Result<()> {
    // Both streams go to the same log, so either has it all.
    ensure!(ended.status.success(), "cargo ended with {}:\n{}", ended.status, tail(&ended.stdout, SHOWN_LINES));
    Ok(())
}

/// Adds up what the test programs of one call of `cargo test` say of themselves.
fn verdict(command: &Command, ended: &Ended) -> Result<Verdict> {
    let (passed, failed, skipped) = add_up(&ended.stdout);
    if ended.status.success() && failed == 0 && skipped == 0 {
        return Ok(Verdict::Passed(passed));
    }
    if failed == 0 && skipped == 0 {
        // Something else than a test: it does not compile, or a test program died.
        check(ended).with_context(|| reruns(command, &ended.stdout).join("\n"))?;
    }
    // Thousands of lines of tests that passed may stand between one that failed and the end.
    let names: Vec<&str> = ended.stdout.lines().filter(|line| line.ends_with("... FAILED")).collect();
    let reruns = reruns(command, &ended.stdout).join("\n");
    let said = failed_output(&ended.stdout, SHOWN_LINES).unwrap_or_else(|| tail(&ended.stdout, SHOWN_LINES));
    let text = format!("{reruns}\n{}\n{said}", names.join("\n"));
    Ok(Verdict::Mixed { passed, failed, skipped, text })
}

/// What the failed tests printed, at most `lines` lines in all: each test has an equal part, which begins at its panic
/// if it printed more. Unset if no test printed anything.
fn failed_output(output: &str, lines: usize) -> Option<String> {
    let mut sections: Vec<Vec<&str>> = Vec::new();
    let mut is_inside = false;
    for line in output.lines() {
        if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            is_inside = true;
            sections.push(vec![line]);
        } else if ["failures:", "error: test failed", "test result: "].iter().any(|end| line.starts_with(end)) {
            is_inside = false;
        } else if is_inside && !line.trim().is_empty() {
            sections.last_mut()?.push(line);
        }
    }
    // A test's name and one line are the least that is of use.
    let part = (lines / sections.len().max(1)).max(2);
    let mut shown = Vec::new();
    for section in &sections {
        let (name, said) = section.split_first()?;
        let panic = said.iter().position(|line| line.contains("panicked at ")).unwrap_or(0);
        let from = if said.len() < part { 0 } else { panic.min(said.len() - part + 1) };
        shown.push(*name);
        shown.extend(said.iter().skip(from).take(part - 1));
    }
    shown.truncate(lines);
    (!shown.is_empty()).then(|| shown.join("\n"))
}

/// Commands for a shell, one for each test program that failed, which run only its tests that did; all of one that
/// died. `command` is the call of cargo that said `output`.
fn reruns(command: &Command, output: &str) -> Vec<String> {
    let ours = |(name, value): (&OsStr, Option<&OsStr>)| {
        let (name, value) = (name.to_string_lossy().into_owned(), value?.to_string_lossy().into_owned());
        (name != "CARGO_TERM_COLOR").then(|| format!("{name}='{value}' "))
    };
    let environment: String = command.get_envs().filter_map(ours).collect();
    let profile = if command.get_args().any(|word| word == "--release") { "--release " } else { "" };
    let (mut failed, mut reruns) = (Vec::new(), Vec::new());
    for line in output.lines().map(str::trim) {
        if line.starts_with("Running ") || line.starts_with("Doc-tests ") {
            failed.clear();
        } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            // Documentation tests have blanks in their names, and some tests say how they should fail.
            failed.push(format!("'{}'", name.strip_suffix(" - should panic").unwrap_or(name)));
        } else if let Some(rest) = line.strip_prefix("error: test failed, to rerun pass `")
            && let Some(target) = rest.strip_suffix('`')
        {
            let only = if failed.is_empty() { String::new() } else { format!(" -- --exact {}", failed.join(" ")) };
            reruns.push(format!("{RERUN}{environment}cargo test {profile}{target}{only}"));
            failed.clear();
        }
    }
    reruns
}

/// Sums of passed, failed and ignored over all lines `test result: …`.
fn add_up(output: &str) -> (usize, usize, usize) {
    let mut sums = (0, 0, 0);
    for line in output.lines().filter(|line| line.starts_with("test result: ")) {
        let count = |word: &str| {
            let before = line.split(word).next().unwrap_or_default();
            before.split_whitespace().next_back().and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        sums = (sums.0 + count("passed;"), sums.1 + count("failed;"), sums.2 + count("ignored;"));
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_add_up() {
        let output = "running 3 tests\n\
            test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
            noise\n\
            test result: FAILED. 10 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        assert_eq!(add_up(output), (13, 2, 1));
    }

    #[test]
    fn rerun_names_only_the_tests_that_failed() {
        let output = "     Running tests/a.rs (target/debug/deps/a-1)\n\
            test good ... ok\n\
            test bad ... FAILED\n\
            test inner::worse - should panic ... FAILED\n\
            error: test failed, to rerun pass `-p blkyard-mq --test a`\n\
            \x20    Running tests/b.rs (target/debug/deps/b-1)\n\
            test good ... ok\n\
            \x20    Running tests/c.rs (target/debug/deps/c-1)\n\
            test good ... ok\n\
            error: test failed, to rerun pass `-p blkyard-os --test c`\n\
            error: 2 targets failed:\n\
            \x20   `-p blkyard-mq --test a`\n";
        let mut command = cargo(Path::new("."));
        command.args(["test", "--workspace"]);
        let expected = [
            "rerun: cargo test -p blkyard-mq --test a -- --exact 'bad' 'inner::worse'",
            "rerun: cargo test -p blkyard-os --test c",
        ];
        assert_eq!(reruns(&command, output), expected);
        command.arg("--release").env("RUSTFLAGS", "--cfg loom");
        let with_flags = "rerun: RUSTFLAGS='--cfg loom' cargo test --release -p blkyard-os --test c";
        assert_eq!(reruns(&command, output)[1], with_flags);
    }

    #[test]
    fn failure_shows_what_the_failed_tests_printed() {
        let output = "running 3 tests\n\
            test good ... ok\n\
            test bad ... FAILED\n\
            \nfailures:\n\n\
            ---- bad stdout ----\n\
            server started\n\
            \nthread 'bad' (7) panicked at crates/mq/src/a.rs:1:2:\n\
            assertion `left == right` failed\n\
            \x20 left: 1\n\
            \n\nfailures:\n\
            \x20   bad\n\
            \ntest result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
            error: test failed, to rerun pass `-p blkyard-mq --lib`\n\
            \x20  Doc-tests blkyard\n\nrunning 0 tests\n";
        let all = "---- bad stdout ----\nserver started\nthread 'bad' (7) panicked at crates/mq/src/a.rs:1:2:\n\
            assertion `left == right` failed\n  left: 1";
        assert_eq!(failed_output(output, 40).unwrap(), all);
        let cut = "---- bad stdout ----\nthread 'bad' (7) panicked at crates/mq/src/a.rs:1:2:\n\
            assertion `left == right` failed";
        assert_eq!(failed_output(output, 3).unwrap(), cut, "a long output is cut before the panic");
        assert_eq!(failed_output("test good ... ok\n", 40), None);
    }

    #[test]
    fn output_of_many_failed_tests_is_shared_out() {
        let one =
            |number| format!("---- t{number} stdout ----\n{}panicked at x.rs\nwhy {number}\n", "noise\n".repeat(99));
        let output: String = (0..10).map(one).collect();
        let shown = failed_output(&output, 40).unwrap();
        assert_eq!(shown.lines().count(), 40);
        assert!(
            (0..10).all(|number| shown.contains(&format!("---- t{number} stdout ----\nnoise\npanicked"))),
            "{shown}"
        );
        assert!((0..10).all(|number| shown.contains(&format!("why {number}"))), "{shown}");
    }

    #[test]
    fn models_are_found_by_their_names() {
        let root = tempfile::tempdir().unwrap();
        let tests = root.path().join("crates/mq/tests");
        fs::create_dir_all(&tests).unwrap();
        fs::create_dir_all(root.path().join("crates/mem/tests")).unwrap();
        fs::write(root.path().join("crates/mq/Cargo.toml"), "[package]\nname = \"blkyard-mq\"\n").unwrap();
        for leaf in ["loom_queue.rs", "loom.rs", "other.rs", "loom.txt"] {
            fs::write(tests.join(leaf), "").unwrap();
        }
        let found = find_models("loom", root.path()).unwrap();
        assert_eq!(found, [("blkyard-mq".to_owned(), vec!["loom".to_owned(), "loom_queue".to_owned()])]);
    }
}
