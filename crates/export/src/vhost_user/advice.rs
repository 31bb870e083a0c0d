//! What a front-end gets wrong at its first try, and the words that put it right: memory that is not shared, more
//! queues than are served, a socket that is in use.
//!
//! Only says so in the log. What is refused, and when, is decided elsewhere.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use blkyard_virtio::RingSetupError;

use crate::vhost_user::backend::QUEUES_MAX;
use crate::vhost_user::memory::Memory;

/// How QEMU is told to share a guest's memory.
const SHARE: &str = "start QEMU with -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem, \
                     where SIZE is that of -m";

/// Why a ring cannot be set up.
pub(crate) fn no_ring(memory: &Memory, error: RingSetupError) -> String {
    match error {
        RingSetupError::Unreachable { what, addr, .. } if !memory.has_user_addr(addr) => {
            let (regions, bytes) = memory.extent();
            format!(
                "the guest's memory is not shared: the {what} at {addr:#x} lies in none of the {regions} regions, \
                 {bytes} bytes, that the front-end shares; {SHARE}"
            )
        }
        error => error.to_string(),
    }
}

/// What there is to say of memory in which a guest has set up a ring, and which is blank.
pub(crate) fn blank_memory() -> String {
    // QEMU before 11 sends the descriptor of memory that it maps for itself alone.
    format!(
        "the guest's memory is probably not shared: its first MiB reads as zeros, so the guest would wait for ever; {SHARE}"
    )
}

/// What there is to say of a queue that is not served.
pub(crate) fn no_queue(index: u32, served: usize) -> String {
    let cure = more_queues(served);
    format!("no queue {index}: {served} are served; {cure}")
}

/// What there is to say of a front-end that leaves as soon as it is told how many queues are served.
pub(crate) fn left_at_queues(served: usize) -> String {
    let cure = more_queues(served);
    format!("the front-end disconnected after it read that {served} queues are served; if it needs more, {cure}")
}

fn more_queues(served: usize) -> String {
    format!(
        "start QEMU with num-queues={served}, or serve more with queues=N, up to {QUEUES_MAX}, behind the export's name"
    )
}

/// How long another front-end may wait before it is said: one that is restarted may come back before its end is seen.
const GRACE: Duration = Duration::from_millis(300);
/// How often it is said, at most, while one front-end is connected.
const INTERVAL: Duration = Duration::from_mins(1);

/// Looks at the socket of a connected front-end for others that wait there.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// The process of the front-end that is connected; 0 if it is not known.
    connected: i32,
    /// When one was first seen that still may have to be told of.
    seen: Option<Instant>,
    told: Option<Instant>,
}

impl Waiters {
    /// Those beside a front-end of this process.
    pub(crate) fn beside(connected: i32) -> Waiters {
        Waiters { connected, ..Waiters::default() }
    }

    /// The process of the front-end that is connected; 0 if it is not known.
    pub(crate) fn connected(&self) -> i32 {
        self.connected
    }

    /// Whether the socket is to be looked at now, and for how long, at most; else how long not.
    pub(crate) fn look(&self, now: Instant) -> (bool, Option<Duration>) {
        match (self.seen.map(|seen| seen + GRACE), self.told.map(|told| told + INTERVAL)) {
            (Some(due), _) => (now >= due, Some(due.saturating_duration_since(now))),
            (None, Some(due)) if now < due => (false, Some(due - now)),
            _ => (true, None),
        }
    }

    /// What a look has found. True if it is to be said that another front-end waits.
    pub(crate) fn found(&mut self, waits: bool, now: Instant) -> bool {
        let is_due = waits && self.seen.is_some();
        self.seen = (waits && !is_due).then_some(now);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }
}

/// What there is to say of another front-end that waits while that of this process is connected; 0 if it is not known.
pub(crate) fn second_front_end(connected: i32) -> String {
    format!(
        "another front-end waits for this socket, and is served when {} leaves; end that one, or serve the second an \
         export of its own",
        peer(connected).unwrap_or_else(|| "the connected one".into())
    )
}

/// Who this process is.
fn peer(pid: i32) -> Option<String> {
    let comm = std::fs::read_to_string(PathBuf::from(format!("/proc/{pid}/comm"))).ok()?;
    Some(format!("process {pid} ({})", comm.trim().escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_is_told_of_once_it_has_waited_and_again_after_the_interval() {
        let begin = Instant::now();
        let mut waiters = Waiters::default();
        assert_eq!(waiters.look(begin), (true, None));
        assert!(!waiters.found(true, begin), "it has only just come");
        assert_eq!(waiters.look(begin), (false, Some(GRACE)));
        let due = begin + GRACE;
        assert_eq!(waiters.look(due), (true, Some(Duration::ZERO)));
        assert!(waiters.found(true, due));
        assert_eq!(waiters.look(due), (false, Some(INTERVAL)));
        let later = due + INTERVAL;
        assert_eq!(waiters.look(later), (true, None));
        assert!(!waiters.found(true, later));
        assert!(waiters.found(true, later + GRACE));
    }

    #[test]
    fn a_front_end_that_is_served_within_the_grace_is_not_told_of() {
        let begin = Instant::now();
        let mut waiters = Waiters::default();
        assert!(!waiters.found(true, begin));
        assert!(!waiters.found(false, begin + GRACE));
        assert_eq!(waiters.look(begin + GRACE), (true, None));
    }
}
