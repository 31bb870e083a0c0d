//! The commands of the program `blkyard` that have to do with a daemon: it is started by `serve`, looked at by
//! `inspect`, changed by `set`, and replaced by another with `serve --takeover`.
//!
//! `main.rs` reads the command line. The other commands live in `blkyard-lab`.
#![forbid(unsafe_code)]

pub mod control;
pub mod daemon;
pub mod inspect;
pub mod log;
pub mod plan;
pub mod serve;
pub mod set;
pub mod takeover;

mod answers;
mod ending;
mod error;
mod io_errors;
mod qemu;
mod receiver;
mod threads;
mod watch;

pub use receiver::connector;
