//! `cargo xtask test`: every check, in order, all of them even when one fails.
//!
//! Checks that did not run are named with the reason, and where CI is set none may be left out. The checks themselves
//! are elsewhere: those of the source in `steps`, those of the running daemon in `scenarios`.

mod progress;
mod report;
mod steps;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use self::progress::WatchedOutput;
pub use self::report::Verdict;
use self::report::{Completeness, RERUN, Report};
use self::steps::TestStep;
pub use self::steps::{build, build_as_tested, cargo};
use crate::guest::Guest;
use crate::scenarios::{self, Missing, RunsIn, Scenario, ScenarioContext};
use crate::server::Program;
use crate::{process, repository};

/// Free space after a run below which the disk was probably full during a link.
const SCANT_BYTES: u64 = 2 << 30;

/// Scenarios of a quick run: foreign clients, a user's first steps, and a guest whose daemon is restarted.
const QUICK_SCENARIOS: &[&str] =
    &["pasted-line", "first-mistakes", "daemon-sigterm", "daemon-second-client", "daemon-options", "pasted-line-guest"];
/// No check of a quick run is begun after this time; none takes a minute.
const QUICK_TIME: Duration = Duration::from_mins(4);

#[derive(clap::Args)]
pub struct TestOptions {
    /// Leave out the scenarios that boot a guest. Refused where CI is set.
    #[arg(long)]
    no_guest: bool,
    /// Tell the scenarios of qemu-storage-daemon and not of blkyard. One that fails here is wrong itself.
    #[arg(long)]
    foreign_server: bool,
    /// Run the checks that most often find something, within five minutes on two idle CPUs once all is built.
    ///
    /// The checks that are left out are named, and none is begun after four minutes. The exit status is 0 if every
    /// chosen check ran and passed, 1 if one failed, and 3, with the words "no verdict" on the last line, if one did
    /// not run. Refused where CI is set.
    #[arg(long, conflicts_with_all = ["filter", "foreign_server"])]
    quick: bool,
    /// Say what there is, and run nothing.
    #[arg(long)]
    list: bool,
    /// Run only the step or scenario of this name, or all with it in their names if none is called so.
    filter: Vec<String>,
}

impl TestOptions {
    fn wants(&self, name: &str) -> bool {
        if self.quick {
            return steps::QUICK.contains(&name) || QUICK_SCENARIOS.contains(&name);
        }
        let is_meant = |part: &str| name == part || (!is_name(part) && name.contains(part));
        self.filter.is_empty() || self.filter.iter().any(|part| is_meant(part))
    }

    /// All that runs without a daemon, in order.
    fn steps(&self) -> Vec<&'static TestStep> {
        let chosen = steps::ALL.iter().filter(|step| self.wants(step.name));
        // Left out of a whole run, in which `unit` has their tests.
        let is_named = |step: &&TestStep| self.quick || self.filter.iter().any(|name| name == step.name);
        chosen.chain(steps::QUICK_UNIT.iter().filter(is_named)).collect()
    }

    fn scenarios(&self) -> Vec<&'static Scenario> {
        scenarios::all().filter(|scenario| self.wants(scenario.name)).collect()
    }

    /// What `quick` leaves out, by name.
    fn left_out(&self) -> Vec<&'static str> {
        let steps = steps::ALL.iter().map(|step| step.name);
        let all = steps.chain(scenarios::all().map(|scenario| scenario.name));
        all.filter(|name| self.quick && !self.wants(name)).collect()
    }
}

/// Whether a step or scenario is called so.
fn is_name(name: &str) -> bool {
    steps::ALL.iter().chain(steps::QUICK_UNIT).any(|step| step.name == name)
        || scenarios::all().any(|scenario| scenario.name == name)
}

/// Whether this is a run in which nothing is optional.
fn is_strict() -> bool {
    std::env::var("CI").is_ok_and(|value| !value.is_empty() && value != "false" && value != "0")
}

pub fn run(options: &TestOptions) -> Result<ExitCode> {
    if options.list {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        !(is_strict() && options.no_guest),
        "--no-guest is refused because CI is set: there the guest is not optional"
    );
    ensure!(!(is_strict() && options.quick), "--quick is refused because CI is set: there nothing is optional");
    let root = repository()?;
    let logs = steps::target_folder(&root).join("xtask-logs");
    fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let (steps, scenarios) = (options.steps(), options.scenarios());
    let completeness = match (is_strict(), options.quick) {
        (true, _) => Completeness::Mandatory,
        (false, true) => Completeness::ForVerdict,
        (false, false) => Completeness::Optional,
    };
    // The guest and the program are prepared before scenarios.
    let items = steps.len() + scenarios.len() + if scenarios.is_empty() { 0 } else { 2 };
    let mut run = Run { options, root, logs, report: Report::new(completeness, items) };

    run.steps(steps)?;
    run.scenarios(scenarios)?;
    ensure!(
        !run.report.is_empty(),
        "no step and no scenario has {} in its name; see --list",
        options.filter.join(" or ")
    );
    if run.report.has_failed() {
        let system = rustix::fs::statvfs(&run.logs);
        let system = system.with_context(|| format!("cannot ask how full {} is", run.logs.display()))?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        full_disk(&run.logs, free).into_iter().for_each(|words| println!("{words}"));
    }
    let left_out = options.left_out();
    if !left_out.is_empty() {
        println!("\nleft out by --quick: {}", left_out.join(", "));
    }
    Ok(run.report.close())
}

/// What there is to say of a disk with so many bytes free after a run that failed: one that filled up makes anything
/// fail, and few programs say that this is why.
fn full_disk(folder: &Path, free: u64) -> Option<String> {
    (free < SCANT_BYTES).then(|| {
        format!(
            "only {} MiB are free where {} lies, and a whole run takes some 4 GiB: what failed may have failed of that; \
             free some, or have CARGO_TARGET_DIR name a folder elsewhere",
            free >> 20,
            folder.display()
        )
    })
}

fn list() {
    for step in steps::ALL {
        println!("{:24} {}", step.name, step.sentence);
    }
    for scenario in scenarios::all() {
        println!("{:24} {}", scenario.name, scenario.sentence);
    }
}

struct Run<'a> {
    options: &'a TestOptions,
    root: PathBuf,
    logs: PathBuf,
    report: Report,
}

impl Run<'_> {
    /// Steps without a daemon.
    fn steps(&mut self, wanted: Vec<&TestStep>) -> Result<()> {
        for step in wanted {
            let log = self.log(step.name)?;
            let watched = WatchedOutput { log: Some(self.log_path(step.name)), ..WatchedOutput::default() };
            let (late, root) = (self.is_late(), &self.root);
            self.report.item(step.name, &watched, || match late {
                Some(reason) => Ok(Verdict::skipped(reason)),
                None => steps::run(step, root, &log, &watched.tests)
                    .map_err(|error| anyhow!("{error:#}\n{RERUN}cargo xtask test {}", step.name)),
            });
        }
        Ok(())
    }

    /// Reason why no further check is begun, if the time of a quick run is over.
    fn is_late(&self) -> Option<&'static str> {
        let is_late = self.options.quick && self.report.elapsed() > QUICK_TIME;
        is_late.then_some("the time of --quick is over; run cargo xtask test with this name")
    }

    fn scenarios(&mut self, wanted: Vec<&Scenario>) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let mut guest = None;
        let unwatched = WatchedOutput::default();
        self.report.item("prepare-guest", &unwatched, || {
            guest = Some(Guest::ensure(false)?);
            Ok(Verdict::passed())
        });
        let mut program = None;
        if !self.options.foreign_server {
            let name = if self.options.quick { "prepare-program" } else { "prepare-release" };
            let log = self.log(name)?;
            let watched = WatchedOutput { log: Some(self.log_path(name)), ..WatchedOutput::default() };
            self.report.item(name, &watched, || {
                let path = steps::build(!self.options.quick, &self.root, &log)?;
                program = Some(Program::Blkyard(path));
                Ok(Verdict::passed())
            });
        } else if let Some(guest) = &guest {
            program = Some(Program::Foreign(guest.program("qemu-storage-daemon")));
        }
        for scenario in wanted {
            let missing = match (&guest, &program) {
                (None, _) => Some("the test guest and its programs could not be prepared"),
                (_, None) => Some("the program could not be built"),
                _ if self.is_late().is_some() => self.is_late(),
                _ if scenario.place == RunsIn::Guest && self.options.no_guest => Some("--no-guest was given"),
                (_, Some(program)) if scenario.ours && !program.is_ours() => Some("a promise of blkyard alone"),
                _ => None,
            };
            if let Some(reason) = missing {
                self.report.item(scenario.name, &unwatched, || Ok(Verdict::skipped(reason)));
            } else if let (Some(guest), Some(program)) = (&guest, &program) {
                let path = self.log_path(scenario.name);
                let rerun = self.rerun(scenario.name);
                let told = || tell(scenario, program, guest, &path).map_err(|error| anyhow!("{error:#}\n{rerun}"));
                self.report.item(scenario.name, &unwatched, told);
            }
        }
        Ok(())
    }

    /// The line with the command that runs a scenario alone.
    fn rerun(&self, scenario: &str) -> String {
        let server = if self.options.foreign_server { "--foreign-server " } else { "" };
        format!("{RERUN}cargo xtask test {server}{scenario}")
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    fn log(&self, name: &str) -> Result<File> {
        create_log(&self.log_path(name))
    }
}

/// Runs one scenario; a failure brings the server's last words with it.
fn tell(scenario: &Scenario, program: &Program, guest: &Guest, log: &Path) -> Result<Verdict> {
    let ground = ScenarioContext::new(program, guest, create_log(log)?)?;
    let told =
        (scenario.tell)(&ground).map(|()| ground.take_measured().map_or_else(Verdict::passed, Verdict::Measured));
    told.or_else(|error| {
        if let Some(missing) = error.downcast_ref::<Missing>() {
            return Ok(Verdict::skipped(missing.to_string()));
        }
        let said = fs::read_to_string(log).unwrap_or_default();
        let server =
            if said.is_empty() { String::new() } else { format!("\nthe server said:\n{}", process::tail(&said, 15)) };
        bail!("should show that {}\n{error:#}{server}", scenario.sentence)
    })
}

fn create_log(path: &Path) -> Result<File> {
    // Readable too: the output of a started program is read from it.
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_names_all_that_it_leaves_out() {
        let options =
            TestOptions { no_guest: false, foreign_server: false, list: false, quick: true, filter: Vec::new() };
        let left_out = options.left_out();
        for name in steps::QUICK.iter().chain(QUICK_SCENARIOS) {
            let is_there = steps::ALL.iter().any(|step| step.name == *name)
                || scenarios::all().any(|scenario| scenario.name == *name);
            assert!(is_there, "nothing is called {name}");
        }
        assert!(["unit", "loom", "guest-in-order"].iter().all(|name| left_out.contains(name)), "{left_out:?}");
        let chosen = steps::QUICK.len() + QUICK_SCENARIOS.len();
        assert_eq!(left_out.len() + chosen, steps::ALL.len() + scenarios::all().count());
    }

    #[test]
    fn name_of_a_scenario_chooses_only_that() {
        let chosen = |filter: &str| {
            let filter = vec![filter.into()];
            let options = TestOptions { no_guest: false, foreign_server: false, list: false, quick: false, filter };
            let steps = options.steps().into_iter().map(|step| step.name);
            steps.chain(options.scenarios().into_iter().map(|scenario| scenario.name)).collect::<Vec<_>>()
        };
        assert_eq!(chosen("pasted-line"), ["pasted-line"]);
        assert_eq!(chosen("quick-hostile"), ["quick-hostile"]);
        assert!(chosen("pasted").len() > 1, "a part of names chooses all of them");
    }

    #[test]
    fn a_disk_that_is_nearly_full_is_named_with_what_helps_and_another_is_not() {
        let folder = Path::new("/some/target/xtask-logs");
        assert_eq!(full_disk(folder, SCANT_BYTES), None);
        let words = full_disk(folder, SCANT_BYTES - 1).unwrap();
        for word in ["only 2047 MiB", "/some/target/xtask-logs", "free some", "CARGO_TARGET_DIR"] {
            assert!(words.contains(word), "'{word}' is missing in: {words}");
        }
    }
}
