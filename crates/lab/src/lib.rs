//! Instruments: the commands `bench`, `floor` and `study` of the program `blkyard`, and the benchmark cells.
//!
//! Each command is a function from its arguments to an exit code. It writes through the [`Console`] that it is given,
//! so it neither owns a stream nor knows the log of the program that runs it.
#![forbid(unsafe_code)]

pub mod bench;
pub mod floor;
pub mod study;

use std::fmt::Display;
use std::process::ExitCode;

/// Output of a command, as the program that runs it does it.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// Prints a report, or a part of one. Returns the exit code that is passed in, or failure if the report cannot be
    /// written.
    pub print: fn(&dyn Display, ExitCode) -> ExitCode,
    /// Prints a line of progress, which may be lost.
    pub note: fn(&dyn Display),
}
