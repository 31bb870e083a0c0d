//! The command `set`: changes settings of a running daemon.

mod apply;
mod size;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use blkyard::spec::number;

use crate::control::{AskError, ControlRequest, SET_TIMEOUT_S, TIMEOUT_S_MAX, ask};
use crate::log::print;
pub use apply::apply;

/// Arguments of `set`.
#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// The daemon's control socket. Default: that of the only daemon there is.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// How long to wait for the daemon's answer, seconds. A change that is under way
    /// is not undone after that.
    #[arg(long, value_name = "SECONDS", default_value_t = SET_TIMEOUT_S, value_parser = number(1, TIMEOUT_S_MAX))]
    pub timeout_s: u64,
    /// Part to change: device:0 or export:0 by its number, its name or the end of its name; or daemon.
    #[arg(value_name = "PART")]
    pub part: String,
    /// What it is to be.
    ///
    /// Of a device: size=2G (a file that is shorter is grown; a longer one keeps its length), size=probe (the file was
    /// grown from outside), force=on (shrink it although it is attached), sectors_max=N (longest request), depth=N
    /// (requests in flight of each queue), scheduler=none|deadline|kyber|timeslice|fair with its options (what orders
    /// the I/O that waits), policy=NAME (what chooses among its paths), hedged_reads=on|off (late reads are sent on a
    /// second path, too), suspended=on|off (its NVMe controller is shut down meanwhile, and I/O waits), iops_max=N,
    /// bytes_per_s_max=SIZE, burst_ms=N (what its exports together do not exceed; off for any number), tracker=on|off
    /// (mean latency by node, see inspect), tracker_window_us=N, tracker_samples_min=N (below so many a window counts
    /// as idle), tracker_decay=PERCENT (kept in an idle window). Of an export: queues=N (from the next front-end on;
    /// not over NVMe/TCP), depth=N, iops_max, bytes_per_s_max, burst_ms, scheduler_weight=N (beside others of its
    /// device); over NVMe/TCP, ana_state=optimized|non-optimized|inaccessible|persistent-loss|change of all its ANA
    /// groups, or of ana_group=N.
    /// Of the daemon: stats=SECONDS (0 for none), lanes=N (threads that do the work; queues move to them one by one),
    /// spin_us=N (how long each looks for work before it sleeps, at most; auto for as long as it pays).
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = pair)]
    pub values: Vec<(String, String)>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write it as key=value")?;
    Ok((key.into(), value.into()))
}

/// Reason of a failure.
#[derive(Debug, thiserror::Error)]
pub enum SetError {
    /// No daemon, or it said no.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// A key is given twice.
    #[error("{part}: {key} is given twice; keep one of them")]
    Twice {
        /// Part.
        part: String,
        /// The key.
        key: String,
    },
}

/// Asks a daemon for a change, and prints the result.
///
/// # Errors
/// See [`SetError`].
pub fn run(args: &SetArgs) -> Result<ExitCode, SetError> {
    let mut values = BTreeMap::new();
    for (key, value) in &args.values {
        if values.insert(key.clone(), value.clone()).is_some() {
            return Err(SetError::Twice { part: args.part.clone(), key: key.clone() });
        }
    }
    let request = ControlRequest::Set { what: args.part.clone(), values };
    let done = ask(args.control.as_deref(), &request, Duration::from_secs(args.timeout_s))?;
    let lines = done.as_array().into_iter().flatten().filter_map(|line| line.as_str());
    Ok(print(lines.flat_map(|line| [line, "\n"]).collect::<String>(), ExitCode::SUCCESS))
}
