//! Figures of `cargo xtask bench`, cell by cell.
//!
//! `cargo bench --bench cells -- [CELL...] [--json] [--quick]` measures the cells whose names contain one of the
//! words, or all. Each line holds value, unit, 10th and 90th percentile of the windows, and what stands beside it:
//! the floor, which is what the machine takes for the same without us, and the baseline, which is what others take.
//!
//! It does not judge: goals live with whoever reads the figures.

#[path = "cells/core.rs"]
mod core;
#[path = "cells/file.rs"]
mod file;
#[path = "cells/report.rs"]
mod report;
#[path = "cells/shared.rs"]
mod shared;
#[path = "cells/windows.rs"]
mod windows;

use std::sync::OnceLock;
use std::time::Duration;

use blkyard_os::cpu_places;

use report::Report;
use windows::Plan;

fn main() {
    let (mut json, mut quick, mut filters) = (false, false, Vec::new());
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--quick" => quick = true,
            // Cargo says so to every bench it runs.
            "--bench" => {}
            flag if flag.starts_with('-') => {
                eprintln!("{flag}: no such flag; those known are --json and --quick");
                std::process::exit(2);
            }
            cell => filters.push(cell.to_string()),
        }
    }
    pin();
    let plan = if quick {
        Plan { window: Duration::from_millis(2), windows: 150, warm_up: 10 }
    } else {
        Plan { window: Duration::from_millis(3), windows: 400, warm_up: 20 }
    };
    let mut report = Report::new(filters, json);
    core::null_cells(plan, &mut report);
    shared::null_cells(plan, &mut report);
    core::ram_cells(plan, &mut report);
    file::tmpfs_cells(quick, &mut report);
}

/// Keeps this thread on one CPU, so that windows differ by their code and not by their place: the last it may use,
/// since the first serves most interrupts.
fn pin() {
    if let Some(cpu) = unpinned().last() {
        pin_to(*cpu);
    }
}

/// The CPUs this process could use before it was pinned.
fn unpinned() -> &'static [u32] {
    static CPUS: OnceLock<Vec<u32>> = OnceLock::new();
    CPUS.get_or_init(|| cpu_places().iter().map(|place| place.cpu).collect())
}

/// Keeps this thread on a CPU.
fn pin_to(cpu: u32) {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu as usize);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &cpus) {
        eprintln!("not pinned to a CPU, expect more noise: {error}");
    }
}
