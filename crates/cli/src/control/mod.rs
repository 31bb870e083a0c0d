//! The control socket of a daemon: its path, its protocol, and both of its ends.
//!
//! A separate thread serves it, and passes each request to a given function. No I/O passes through it, and without
//! requests it costs nothing.
//!
//! It does not interpret requests: `answers.rs` does.

mod client;
mod place;
mod server;
mod target;
mod wire;

pub(crate) use client::connect;
pub use client::{AskError, INSPECT_TIMEOUT_S, SET_TIMEOUT_S, TIMEOUT_S_MAX, ask};
pub use place::ControlPlace;
pub use server::{Answer, ControlServer};
pub use target::{PartKind, Target};
pub use wire::ControlRequest;
pub(crate) use wire::{answer_line, parse_answer, parse_request, request_line};
