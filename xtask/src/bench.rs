//! `cargo xtask bench`: the benchmark cells, with fio, qemu-storage-daemon and clients of libblkio for comparison.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::guest::Guest;
use crate::repository;
use crate::test::build;

/// Runs the cells in the foreground; they report for themselves.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let guest = Guest::ensure(false).context("the benchmarks compare with programs that come with the test guest")?;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let root = repository()?;
    let log = tempfile::tempfile().context("cannot make a temporary file for the output of cargo")?;
    let program = build(true, &root, &log)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(&root)
        .args(["bench", "--quiet", "-p", "blkyard-lab", "--bench", "cells", "--"])
        .args(arguments)
        .env("BLKYARD_PROGRAM", program)
        .env("BLKYARD_FIO", guest.program("fio"))
        .env("BLKYARD_QSD", guest.program("qemu-storage-daemon"))
        .env("BLKYARD_QEMU_IMG", guest.program("qemu-img"))
        .env("BLKYARD_BLKIO", blkio_load(&guest, folder.path())?)
        .status()
        .context("cannot start cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the load on libblkio; returns the command that runs it, words with spaces between.
fn blkio_load(guest: &Guest, folder: &Path) -> Result<OsString> {
    let (source, program) = (folder.join("load.c"), folder.join("load"));
    fs::write(&source, include_str!("bench/blkio-load.c"))
        .with_context(|| format!("cannot write {}", source.display()))?;
    guest.build_with_libblkio(&source, &program)?;
    let command = guest.command_with_libblkio(&program);
    let mut words = command.get_program().to_owned();
    command.get_args().for_each(|word| words.extend([OsStr::new(" "), word]));
    Ok(words)
}
