//! `cargo xtask test`: every check there is, in order, all of them even when one fails.
//!
//! Nothing is silent: what did not run is named with its reason, and where CI is set nothing may be
//! left out. The checks themselves live elsewhere: those of the source in `steps`, stories about the running
//! daemon in `scenarios`.

mod report;
mod steps;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use self::report::Report;
pub use self::report::Verdict;
pub use self::steps::cargo;
use crate::guest::Guest;
use crate::scenarios::{self, Ground, Missing, Place, Scenario};
use crate::server::Program;
use crate::{process, repository};

/// Less than this free after a run, and it was probably none while something was linked.
const SCANT_BYTES: u64 = 2 << 30;

#[derive(clap::Args)]
pub struct Options {
    /// Leave out the scenarios that boot a guest. Refused where CI is set.
    #[arg(long)]
    no_guest: bool,
    /// Tell the scenarios of qemu-storage-daemon and not of blkyard. One that fails here is wrong itself.
    #[arg(long)]
    foreign_server: bool,
    /// Say what there is, and run nothing.
    #[arg(long)]
    list: bool,
    /// Run only steps and scenarios with one of these in their names.
    filter: Vec<String>,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|part| name.contains(part.as_str()))
    }
}

/// Whether this is a run in which nothing is optional.
fn is_strict() -> bool {
    std::env::var("CI").is_ok_and(|value| !value.is_empty() && value != "false" && value != "0")
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if options.list {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        !(is_strict() && options.no_guest),
        "--no-guest is refused because CI is set: there the guest is not optional"
    );
    let root = repository()?;
    let logs = steps::target_folder(&root).join("xtask-logs");
    fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let mut run = Run { options, root, logs, report: Report::new(is_strict()) };

    run.steps()?;
    run.scenarios()?;
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
    options: &'a Options,
    root: PathBuf,
    logs: PathBuf,
    report: Report,
}

impl Run<'_> {
    /// What needs no daemon.
    fn steps(&mut self) -> Result<()> {
        for step in steps::ALL.iter().filter(|step| self.options.wants(step.name)) {
            let log = self.log(step.name)?;
            self.report.item(step.name, || steps::run(step, &self.root, &log));
        }
        Ok(())
    }

    fn scenarios(&mut self) -> Result<()> {
        let wanted: Vec<_> = scenarios::all().filter(|scenario| self.options.wants(scenario.name)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut guest = None;
        self.report.item("prepare-guest", || {
            guest = Some(Guest::ensure(false)?);
            Ok(Verdict::passed())
        });
        let mut program = None;
        if !self.options.foreign_server {
            let log = self.log("prepare-release")?;
            self.report.item("prepare-release", || {
                let path = steps::release(&self.root, &log)?;
                program = Some(Program::Blkyard(path));
                Ok(Verdict::passed())
            });
        } else if let Some(guest) = &guest {
            program = Some(Program::Foreign(guest.program("qemu-storage-daemon")));
        }
        for scenario in wanted {
            let missing = match (&guest, &program) {
                (None, _) => Some("the test guest and its programs could not be prepared"),
                (_, None) => Some("there is no release build"),
                _ if scenario.place == Place::Guest && self.options.no_guest => Some("--no-guest was given"),
                (_, Some(program)) if scenario.ours && !program.is_ours() => Some("a promise of blkyard alone"),
                _ => None,
            };
            if let Some(reason) = missing {
                self.report.item(scenario.name, || Ok(Verdict::skipped(reason)));
            } else if let (Some(guest), Some(program)) = (&guest, &program) {
                let path = self.log_path(scenario.name);
                self.report.item(scenario.name, || tell(scenario, program, guest, &path));
            }
        }
        Ok(())
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
    let ground = Ground::new(program, guest, create_log(log)?)?;
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
    // Readable too: whoever starts a program with it looks at what the program has said so far.
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
    fn a_disk_that_is_nearly_full_is_named_with_what_helps_and_another_is_not() {
        let folder = Path::new("/some/target/xtask-logs");
        assert_eq!(full_disk(folder, SCANT_BYTES), None);
        let words = full_disk(folder, SCANT_BYTES - 1).unwrap();
        for word in ["only 2047 MiB", "/some/target/xtask-logs", "free some", "CARGO_TARGET_DIR"] {
            assert!(words.contains(word), "'{word}' is missing in: {words}");
        }
    }
}
