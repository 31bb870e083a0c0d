//! Runs the whole stack: `blkyard-stack SEED|FIRST..END [--seconds N] [key=value..]`, usually by `cargo xtask sim
//! --stack`.
//!
//! Options not given are drawn from the seed. A failing run prints the complete command that repeats it; the exit
//! status is 1 then. The clock is read only to end after the given time.

#![forbid(unsafe_code)]

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

use blkyard_sim::SimArguments;
use blkyard_stack::{FAULT_KINDS, StackOptions, run_stack};

fn main() -> ExitCode {
    let arguments = match SimArguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let alone = arguments.is_of_one();
    let (begun, mut worlds, mut ios, mut failed, mut faults) = (Instant::now(), 0, 0, 0, [0; FAULT_KINDS]);
    let (mut ghosts, mut hedges, mut hedges_won, mut handovers) = (0, 0, 0, 0);
    for seed in arguments.seeds {
        if worlds > 0 && begun.elapsed() > arguments.limit {
            break;
        }
        let mut options = StackOptions::draw(seed);
        if let Err(error) = arguments.options.iter().try_for_each(|option| options.set(option)) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
        if alone {
            println!("seed {seed}: {options}");
        }
        let Ok(result) = catch_unwind(move || run_stack(seed, options)) else {
            eprintln!("seed {seed} failed; again: cargo xtask sim --stack {seed} {options}");
            return ExitCode::FAILURE;
        };
        worlds += 1;
        ios += result.ios;
        failed += result.failed;
        ghosts += result.ghosts;
        handovers += result.handovers;
        hedges += result.hedges;
        hedges_won += result.hedges_won;
        faults.iter_mut().zip(result.faults).for_each(|(sum, one)| *sum += one);
        if alone {
            println!(
                "{} requests, {} of them failed, {} executed, faults {:?}, {:.3} s, longest {:.3} s; fingerprint {:016x}",
                result.ios,
                result.failed,
                result.executed,
                result.faults,
                result.took_ns as f64 / 1e9,
                result.longest_ns as f64 / 1e9,
                result.fingerprint
            );
        }
    }
    if !alone {
        println!(
            "{worlds} worlds, {ios} requests, {failed} of them failed, {ghosts} late pieces, {hedges} hedged reads of which \
             {hedges_won} were first, {handovers} daemons replaced, faults by kind {faults:?}, all well"
        );
    }
    ExitCode::SUCCESS
}
