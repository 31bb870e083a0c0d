//! Several paths to one device: the states of paths, and the policies that choose a path for each I/O.
//!
//! A [`PathSet`] holds the states. A [`PathPolicy`] chooses a path for an I/O and is told when it completed. Both
//! belong to one lane: no lock, no shared cache line. Time is an argument.
//!
//! | policy | choice |
//! |---|---|
//! | `numa` | the nearest path, until a path changes |
//! | `round-robin` | the next path in the list |
//! | `queue-depth` | the path with the fewest I/Os in flight |
//! | `latency` | the path with the lowest mean latency of the last window, as posted in April 2024 |
//! | `adaptive` | the path with the lowest expected cost, by service time, load and capacity; default |
//!
//! A [`MultipathQueue`] is the driver of a hardware queue over the drivers of its paths: it chooses, and moves requests
//! off a path that is lost. The owner of a path's connection tells its state and its proofs by a [`PathMonitor`].
//!
//! After construction nothing here allocates, except for other rules ([`PathRules`]).
#![forbid(unsafe_code)]

mod adaptive;
mod hedge;
mod hedged;
mod latency;
mod load;
mod monitor;
mod path;
mod policy;
mod queue;
mod settings;
mod simple;
mod stats;

pub use adaptive::Adaptive;
pub use hedge::{HedgeConfig, HedgeTimer};
pub use latency::LatencyPolicy;
pub use monitor::PathMonitor;
pub use path::{AccessState, ConnectionState, PATHS_MAX, PathClass, PathSet, PathState};
pub use policy::{ChoiceReason, PathChoice, PathIo, PathPolicy, PolicyKind, UnknownPolicy};
pub use queue::{MultipathQueue, QueuePath};
pub use settings::{MultipathSettings, PathRules};
pub use simple::{NumaPolicy, QueueDepth, RoundRobin};
pub use stats::{MultipathStats, PathCounters};
