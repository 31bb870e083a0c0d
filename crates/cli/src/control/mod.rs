//! The control socket of a daemon: where it is, what is said over it, and both of its ends.
//!
//! A thread of its own serves it, and gives each request to a function that is passed in. No I/O passes through it, and
//! while no request comes it costs nothing.
//!
//! It does not know what the requests are about: `answers.rs` does.

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
