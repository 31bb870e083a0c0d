//! The command `inspect`: shows the devices, exports and lanes of a running daemon.

mod collect;
mod text;
mod tree;
mod window;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkyard::spec::number;
use serde_json::Value;

use crate::control::{AskError, ControlRequest, INSPECT_TIMEOUT_S, PartKind, TIMEOUT_S_MAX, Target, ask};
use crate::log::print;
pub(crate) use collect::request_node;
pub use collect::{collect, limits_by_name, op_name};
pub use text::show_time;
pub use tree::Tree;

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The daemon's control socket. Default: that of the only daemon there is.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Print JSON, for programs.
    #[arg(long)]
    pub json: bool,
    /// Show the counters of the next N seconds, instead of those since the start of the daemon.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub window: Option<u32>,
    /// How long to wait for the daemon's answer, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = INSPECT_TIMEOUT_S, value_parser = number(1, TIMEOUT_S_MAX))]
    pub timeout_s: u64,
    /// Show only these: daemon, devices, exports, lanes, or one of them as device:0, export:0, lane:0. Repeat for more.
    ///
    /// A device or an export may also be called as it was for serve, or by the end of that.
    #[arg(value_name = "PART")]
    pub parts: Vec<Target>,
}

/// Reason of a failure.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// No daemon, or no answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// Another version of the program, most likely.
    #[error("the daemon's answer is invalid: {0}; use the program that the daemon was started from, or --json")]
    Tree(#[from] serde_json::Error),
    /// Another daemon answered the second time.
    #[error("the daemon with process ID {then} was replaced by one with {now} during the window; repeat the command")]
    Replaced {
        /// Process ID of the first.
        then: u32,
        /// Process ID of the second.
        now: u32,
    },
    /// There is no such part.
    #[error("{0}: the daemon has no part of that name; blkyard inspect without a name lists all")]
    Absent(Target),
}

/// Asks a daemon and prints its answer.
///
/// # Errors
/// See [`InspectError`].
pub fn run(args: &InspectArgs) -> Result<ExitCode, InspectError> {
    let mut tree = match args.window {
        None => ask(args.control.as_deref(), &ControlRequest::Inspect, Duration::from_secs(args.timeout_s))?,
        Some(seconds) => look_twice(args, Duration::from_secs(seconds.into()))?,
    };
    if !args.parts.is_empty() {
        select(&mut tree, &args.parts).map_err(|part| InspectError::Absent(part.clone()))?;
    }
    let text = if args.json {
        format!("{tree:#}\n")
    } else {
        let whole = args.parts.is_empty() || args.parts.iter().any(|part| part.kind == PartKind::Daemon);
        text::text(&serde_json::from_value(tree)?, whole)
    };
    Ok(print(text, ExitCode::SUCCESS))
}

/// Asks a daemon twice, and returns the counters in between.
fn look_twice(args: &InspectArgs, window: Duration) -> Result<Value, InspectError> {
    let look = || -> Result<(Tree, Instant), InspectError> {
        let tree = ask(args.control.as_deref(), &ControlRequest::Inspect, Duration::from_secs(args.timeout_s))?;
        Ok((serde_json::from_value(tree)?, Instant::now()))
    };
    let (then, from) = look()?;
    std::thread::sleep(window);
    let (now, to) = look()?;
    Ok(serde_json::to_value(window::between(&then, now, (to - from).as_secs_f64())?)?)
}

/// Reduces the tree to these parts. Returns a part that does not exist.
fn select<'a>(tree: &mut Value, parts: &'a [Target]) -> Result<(), &'a Target> {
    let mut found = vec![false; parts.len()];
    for (kind, list, name) in [
        (PartKind::Device, "devices", "name"),
        (PartKind::Export, "exports", "name"),
        (PartKind::Lane, "lanes", "thread"),
    ] {
        let Some(nodes) = tree[list].as_array_mut() else { continue };
        nodes.retain(|node| {
            let number = node["number"].as_u64().map_or(usize::MAX, |number| number as usize);
            let name = node[name].as_str().unwrap_or_default();
            let means = |part: &Target| part.kind == kind && part.means(number, name);
            let mut meant = false;
            for (part, found) in parts.iter().zip(&mut found) {
                *found |= part.kind == PartKind::Daemon || means(part);
                meant |= means(part);
            }
            meant
        });
    }
    found.iter().position(|found| !found).map_or(Ok(()), |absent| Err(&parts[absent]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_parts_that_were_asked_for_are_left() {
        let tree = serde_json::json!({
            "daemon": {},
            "devices": [{"number": 0, "name": "a.img"}, {"number": 1, "name": "b.img"}],
            "exports": [{"number": 0, "name": "vhost-user-blk:a.sock"}],
            "lanes": [{"number": 0, "thread": "lane0"}],
        });
        let selected = |parts: &[&str]| {
            let parts: Vec<Target> = parts.iter().map(|part| part.parse().unwrap()).collect();
            let mut tree = tree.clone();
            select(&mut tree, &parts).map_err(ToString::to_string)?;
            let count = |list: &str| tree[list].as_array().unwrap().len();
            Ok((count("devices"), count("exports"), count("lanes")))
        };
        assert_eq!(selected(&["devices"]), Ok((2, 0, 0)));
        assert_eq!(selected(&["device:b.img", "lane:0"]), Ok((1, 0, 1)));
        assert_eq!(selected(&["daemon"]), Ok((0, 0, 0)));
        assert_eq!(selected(&["device:c.img"]), Err::<_, String>("device:c.img".into()));
    }
}
