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
//! After construction nothing here allocates. This crate moves no I/O: failover and requeueing belong to the owner of
//! the paths' queues.
#![forbid(unsafe_code)]

mod adaptive;
mod hedge;
mod latency;
mod load;
mod path;
mod policy;
mod simple;

pub use adaptive::Adaptive;
pub use hedge::{HedgeConfig, HedgeTimer};
pub use latency::LatencyPolicy;
pub use path::{AccessState, ConnectionState, PATHS_MAX, PathClass, PathSet, PathState};
pub use policy::{ChoiceReason, PathChoice, PathIo, PathPolicy, PolicyKind, UnknownPolicy};
pub use simple::{NumaPolicy, QueueDepth, RoundRobin};
