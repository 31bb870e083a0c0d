//! `cargo xtask sim`: the programs of the crates sim and stack, built and run.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::repository;

/// Runs simulations in the foreground; they report for themselves.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let (program, arguments) = match arguments.split_first() {
        Some((first, rest)) if first == "--stack" => ("blkyard-stack", rest),
        _ => ("blkyard-sim", arguments),
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(repository()?)
        .args(["run", "--quiet", "-p", program, "--"])
        .args(arguments)
        .status()
        .context("cannot start cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
