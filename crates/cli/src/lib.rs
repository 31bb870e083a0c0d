//! The commands of the program `blkyard` for daemons: `serve` starts one, `inspect` shows it, `set` changes it, and
//! `serve --takeover` replaces it. `nvme` queries NVMe controllers.
//!
//! `main.rs` reads the command line. The other commands are in `blkyard-lab`.
#![forbid(unsafe_code)]

pub mod control;
pub mod daemon;
pub mod inspect;
pub mod log;
pub mod nvme;
pub mod plan;
pub mod serve;
pub mod set;
pub mod takeover;

mod answers;
mod ending;
mod error;
mod io_errors;
mod notify;
mod ports;
mod qemu;
mod ready;
mod receiver;
mod threads;
mod wanted;
mod watch;

pub use receiver::connector;
