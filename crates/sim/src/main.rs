//! Runs simulations: `blkyard-sim SEED|FIRST..END [--seconds N] [key=value..]`, usually by `cargo xtask sim`.
//!
//! Options not given are drawn from the seed. A failing run prints the complete command that repeats it; the exit
//! status is 1 then. The clock is read only to end after the given time.

#![forbid(unsafe_code)]

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

use blkyard_sim::{SimArguments, WorldOptions, run_world};

fn main() -> ExitCode {
    let arguments = match SimArguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let alone = arguments.is_of_one();
    let (begun, mut worlds, mut bios) = (Instant::now(), 0, 0);
    for seed in arguments.seeds {
        if worlds > 0 && begun.elapsed() > arguments.limit {
            break;
        }
        let mut options = WorldOptions::draw(seed);
        if let Err(error) = arguments.options.iter().try_for_each(|option| options.set(option)) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
        if alone {
            println!("seed {seed}: {options}");
        }
        let Ok(outcome) = catch_unwind(move || run_world(seed, options)) else {
            eprintln!("seed {seed} failed; again: cargo xtask sim {seed} {options}");
            return ExitCode::FAILURE;
        };
        worlds += 1;
        bios += outcome.bios;
        if alone {
            let seconds = outcome.took_ns as f64 / 1e9;
            println!(
                "{} bios, {} of them failed, {} power failures, {seconds:.3} s; all well; fingerprint {:016x}",
                outcome.bios, outcome.failed, outcome.cuts, outcome.fingerprint
            );
        }
    }
    if !alone {
        println!("{worlds} worlds, {bios} bios, all well");
    }
    ExitCode::SUCCESS
}
