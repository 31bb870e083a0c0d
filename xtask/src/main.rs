//! The chores of the house: `cargo xtask test`, `cargo xtask guest`, `cargo xtask bench`, `cargo xtask sim`.
//!
//! What a person needs beside Debian and cargo is fetched here, never asked for. Holds no code of
//! the product and may not be depended on by it.

#![forbid(unsafe_code)]

mod bench;
mod guest;
mod host;
mod instructions;
mod process;
mod qmp;
mod scenarios;
mod server;
mod sim;
mod test;
mod tidy;
mod vm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Chores of the blkyard workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Build the test guest from Debian packages, and a QEMU from Debian's source, where they are missing.
    ///
    /// It lives in $BLKYARD_GUEST, or in blkyard/guest of your cache folder, takes 1.6 GB, and needs no
    /// root rights. The programs in its folder bin (QEMU, fio and others) run on this machine.
    Guest {
        /// Fetch and build everything anew.
        #[arg(long)]
        rebuild: bool,
    },
    /// Run every test: format, lints, tidiness, documentation, unit tests, models, foreign clients, a guest.
    ///
    /// Builds what the tests need first. All steps run even when one fails; their output is kept in
    /// target/xtask-logs. The last line is "N passed, N failed, N skipped", and the exit status is 1 if
    /// anything failed. With CI set in the environment, what cannot run has failed.
    Test(test::TestOptions),
    /// Measure, with the benchmark cells of the crate lab; the arguments are theirs: [CELL..] [--json] [--quick].
    ///
    /// Each cell is shown as a multiple of a limit of this machine; `blkyard floor` shows the limits alone.
    Bench {
        /// Count the instructions of an I/O instead, and write down what `cargo xtask test instructions` compares with.
        #[arg(long)]
        record_instructions: bool,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run worlds drawn from seeds: the real queues, in virtual time, on a device that is a model, judged by an oracle.
    ///
    /// SEED, or FIRST..END for several, then [--seconds N] and options as key=value, which are drawn where they are not
    /// given. A run that fails prints how to do it again.
    ///
    /// With --stack first: the whole stack, from a guest's ring to the device of an NVMe/TCP target.
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().chore) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Result<ExitCode> {
    match chore {
        Chore::Guest { rebuild } => {
            let guest = guest::Guest::ensure(rebuild)?;
            println!("Linux {} in {}", guest.kernel_version()?, guest.folder().display());
            Ok(ExitCode::SUCCESS)
        }
        Chore::Test(options) => test::run(&options),
        Chore::Bench { record_instructions: true, .. } => {
            instructions::record()?;
            Ok(ExitCode::SUCCESS)
        }
        Chore::Sim { arguments } => sim::run(&arguments),
        Chore::Bench { arguments, .. } => bench::run(&arguments),
    }
}

/// The top of the checkout: the folder above this crate's.
fn repository() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("this crate should lie in a folder of the repository")?.to_owned())
}
