//! `cargo xtask bench`: the benchmark cells, with fio at hand as the one to compare with.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::guest::Guest;
use crate::repository;

/// Runs the cells in the foreground; they report for themselves.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let guest = Guest::ensure(false).context("the benchmarks compare with fio, which comes with the test guest")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(repository()?)
        .args(["bench", "--quiet", "-p", "blkyard", "--bench", "cells", "--"])
        .args(arguments)
        .env("BLKYARD_FIO", guest.program("fio"))
        .status()
        .context("cannot start cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
