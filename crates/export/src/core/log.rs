//! Log lines caused by the front-ends of one export, limited in number.
//!
//! Shared by the export and its queues, on the slow path only.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use blkyard_mq::{HeldBack, LogLimit};

/// QEMU's options for shared guest memory.
pub(crate) const SHARE: &str = "start QEMU with -object memory-backend-memfd,id=mem,size=SIZE,share=on \
                                -machine memory-backend=mem, where SIZE is that of -m";

/// The log of one export.
#[derive(Debug)]
pub struct ExportLog {
    name: String,
    limit: Mutex<LogLimit>,
}

impl ExportLog {
    pub(crate) fn new(name: String) -> ExportLog {
        ExportLog { name, limit: Mutex::new(LogLimit::default()) }
    }

    /// Logs a line, unless the rate limit is exceeded.
    pub fn info(&self, line: impl Display) {
        if let Some(held_back) = self.pass() {
            tracing::info!("{}: {line}{held_back}", self.name);
        }
    }

    /// Logs a warning, unless the rate limit is exceeded.
    pub fn warn(&self, line: impl Display) {
        if let Some(held_back) = self.pass() {
            tracing::warn!("{}: {line}{held_back}", self.name);
        }
    }

    /// Logs the number of suppressed lines, once a line is allowed again.
    pub(crate) fn tell_held_back(&self) {
        let count = self.limit.lock().unwrap_or_else(PoisonError::into_inner).pass_held_back(Instant::now());
        if let Some(count) = count {
            tracing::warn!("{}: {count} more lines about its front-ends were left out", self.name);
        }
    }

    fn pass(&self) -> Option<HeldBack> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner).pass(Instant::now()).map(HeldBack)
    }
}
