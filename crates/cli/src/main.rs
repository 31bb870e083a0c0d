//! The program `blkyard`: reads the command line and runs one command.
#![forbid(unsafe_code)]

use std::panic::catch_unwind;
use std::process::ExitCode;

use blkyard_cli::plan::Word;
use blkyard_cli::{connector, inspect, log, nvme, serve, set};
use blkyard_lab::{bench, floor, study};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Multi-queue disks for virtual machines, hosts and programs, from user space.
#[derive(Debug, Parser)]
#[command(name = "blkyard", version, arg_required_else_help = true)]
struct Cli {
    /// Log more, on standard error.
    #[arg(long, short, global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve disks to virtual machines, until Ctrl-C.
    ///
    /// Without arguments: makes a 1 GiB sparse image and a socket in this folder, and serves the one on the other.
    Serve(serve::ServeArgs),
    /// Run load on a device, with a report like fio's.
    ///
    /// Devices have the same names as for serve. Writing patterns overwrite it without asking.
    Bench(bench::BenchArgs),
    /// Show the devices, exports and lanes of a running daemon.
    ///
    /// With queues, requests and latencies; as text or JSON.
    Inspect(inspect::InspectArgs),
    /// Change settings of a running daemon: sizes, limits, queues, lanes.
    ///
    /// A guest sees its disk grow.
    Set(set::SetArgs),
    /// Query NVMe controllers, and send commands to them; options and output are those of nvme-cli.
    Nvme(nvme::NvmeArgs),
    /// Measure the limits of this machine: cache-line transfers, copies, wake-ups, system calls.
    ///
    /// Uses two CPUs, 1 GiB of memory, and half a minute.
    Floor(floor::FloorArgs),
    /// Repeat a published measurement, and print its figures beside ours.
    ///
    /// Costs of the code are measured on this machine; the rest is simulated in virtual time.
    Study(study::StudyArgs),
    /// Accept connections and their descriptors for a daemon, which starts this process.
    #[command(hide = true)]
    Receiver,
}

/// Exit code of a Rust program whose main thread panicked.
const PANICKED: u8 = 101;

fn main() -> ExitCode {
    let code = catch_unwind(run).unwrap_or(ExitCode::from(PANICKED));
    log::flush();
    code
}

fn run() -> ExitCode {
    let parsed = Cli::command().try_get_matches().and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let code = ExitCode::from(error.exit_code() as u8);
            return match error.print() {
                Err(unwritten) if !error.use_stderr() => log::unwritten(&unwritten),
                _ => code,
            };
        }
    };
    let level = match cli.command {
        _ if cli.verbose => tracing::Level::DEBUG,
        // Connects and ends many back-ends, about which its report says what matters.
        Command::Study(_) => tracing::Level::ERROR,
        _ => tracing::Level::INFO,
    };
    log::install(level);
    match cli.command {
        Command::Serve(args) => {
            let words = matches.subcommand_matches("serve").map(words).unwrap_or_default();
            report(serve::run(&args, &words).map(|()| ExitCode::SUCCESS))
        }
        Command::Bench(args) => report(bench::run(&args, log::console(), connector)),
        Command::Inspect(args) => report(inspect::run(&args)),
        Command::Set(args) => report(set::run(&args)),
        Command::Nvme(args) => report(nvme::run(&args)),
        Command::Floor(args) => floor::run(args, log::console()),
        Command::Study(args) => report(study::run(&args, log::console())),
        Command::Receiver => report(blkyard_os::receive_for_daemon().map(|()| ExitCode::SUCCESS)),
    }
}

fn report<E: std::fmt::Display>(result: Result<ExitCode, E>) -> ExitCode {
    result.unwrap_or_else(|error| {
        log::fail(error);
        ExitCode::FAILURE
    })
}

/// Devices and exports in the order of the command line, which groups them.
fn words(matches: &ArgMatches) -> Vec<Word> {
    let of = |id: &str, make: fn(String) -> Word| {
        let places = matches.indices_of(id).into_iter().flatten();
        let values = matches.get_many::<String>(id).into_iter().flatten().cloned();
        places.zip(values.map(make)).collect::<Vec<_>>()
    };
    let mut words = [of("device", Word::Device), of("export", Word::Export)].concat();
    words.sort_by_key(|(place, _)| *place);
    words.into_iter().map(|(_, word)| word).collect()
}
