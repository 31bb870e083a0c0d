//! Errors of setting up a ring, and what they report about the system.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::FixedBuffers;

/// Why a ring could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The administrator switched it off, for all or for us.
    #[error(
        "io_uring is disabled: {cause}; set `sysctl kernel.io_uring_disabled=0`, or let the container's seccomp \
         profile allow io_uring_setup, io_uring_enter and io_uring_register"
    )]
    Disabled {
        /// Setting that disabled it, as far as known.
        cause: String,
    },
    /// The kernel lacks it, or a part that we cannot do without.
    #[error("io_uring of this kernel lacks {missing}: Linux 5.19 or later is needed")]
    TooOld {
        /// The part.
        missing: &'static str,
    },
    /// Rings count as locked memory on some kernels.
    #[error(
        "out of locked memory for an io_uring; raise the limit on locked memory (`ulimit -l`, LimitMEMLOCK=), or use \
         fewer entries"
    )]
    Memory,
    /// Something else.
    #[error("io_uring set-up failed: {0}; see the limits on memory and open files")]
    System(#[source] io::Error),
    /// The kernel refuses it. The state of its entries in flight is unknown.
    #[error("io_uring failed: {0}; see the kernel's log, and report a bug")]
    Refused(#[source] io::Error),
}

impl RingError {
    pub(crate) fn from_setup(error: io::Error) -> RingError {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
                let cause = match switch.trim() {
                    "1" => "kernel.io_uring_disabled is 1, for all but the members of kernel.io_uring_group".into(),
                    "2" => "kernel.io_uring_disabled is 2".into(),
                    _ => format!("the kernel answers {error}, most likely because of a seccomp filter"),
                };
                RingError::Disabled { cause }
            }
            Some(libc::ENOSYS) => {
                RingError::Disabled { cause: "the kernel lacks the system call, or a seccomp filter hides it".into() }
            }
            Some(libc::ENOMEM) => RingError::Memory,
            Some(libc::EINVAL) => RingError::TooOld { missing: "a set-up flag" },
            _ => RingError::System(error),
        }
    }
}

/// Resources that a ring holds for its queues. A queue that has left the lane counts in none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Inboxes of drivers.
    pub inboxes: u32,
    /// Files kept open for entries that name them.
    pub files: u32,
    /// Regions attached.
    pub regions: u32,
    /// Places of eventfds that pollers ring.
    pub signals: u32,
}

/// Counters of a ring for threads other than its owner.
#[derive(Debug, Default)]
pub struct RingCounters {
    buffers: Mutex<FixedBuffers>,
    strays: AtomicU64,
    inboxes: AtomicU32,
    files: AtomicU32,
    regions: AtomicU32,
    signals: AtomicU32,
    pollers_max: usize,
}

impl RingCounters {
    /// Counters of a ring with room for `pollers_max` pollers.
    pub(crate) fn of(pollers_max: usize) -> RingCounters {
        RingCounters { pollers_max, ..RingCounters::default() }
    }

    /// Number of pollers whose eventfds fit into the ring.
    pub fn pollers_max(&self) -> usize {
        self.pollers_max
    }

    /// Whether the private memory of the lane's queues is known to the kernel for good.
    pub fn buffers(&self) -> FixedBuffers {
        match self.buffers.lock() {
            Ok(buffers) => buffers.clone(),
            Err(poisoned) => poisoned.into_inner().clone(),
        }
    }

    pub(super) fn set_buffers(&self, buffers: FixedBuffers) {
        match self.buffers.lock() {
            Ok(mut now) => *now = buffers,
            Err(mut poisoned) => **poisoned.get_mut() = buffers,
        }
    }

    /// Completions without a request.
    pub fn strays(&self) -> u64 {
        self.strays.load(Relaxed)
    }

    /// Resources that the ring holds for its queues.
    pub fn holdings(&self) -> Holdings {
        Holdings {
            inboxes: self.inboxes.load(Relaxed),
            files: self.files.load(Relaxed),
            regions: self.regions.load(Relaxed),
            signals: self.signals.load(Relaxed),
        }
    }

    pub(super) fn count_inboxes(&self, more: i32) {
        self.inboxes.fetch_add(more.cast_unsigned(), Relaxed);
    }

    pub(super) fn count_files(&self, more: i32) {
        self.files.fetch_add(more.cast_unsigned(), Relaxed);
    }

    pub(super) fn count_signals(&self, more: i32) {
        self.signals.fetch_add(more.cast_unsigned(), Relaxed);
    }

    pub(super) fn set_regions(&self, count: usize) {
        self.regions.store(count as u32, Relaxed);
    }

    pub(crate) fn count_stray(&self) {
        self.strays.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_switch_and_the_cure() {
        for (errno, words) in [
            (libc::EPERM, ["disabled", "kernel.io_uring_disabled=0"]),
            (libc::ENOSYS, ["seccomp", "kernel.io_uring_disabled=0"]),
            (libc::ENOMEM, ["locked memory", "ulimit -l"]),
            (libc::EINVAL, ["lacks", "Linux 5.19"]),
        ] {
            let text = RingError::from_setup(io::Error::from_raw_os_error(errno)).to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}
