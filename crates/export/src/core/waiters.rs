//! Front-ends that wait at the socket while another is connected: when to check for them, and the log line.
//!
//! Owned by the export while a front-end is connected. Accepts no connection.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use blkyard_sys::{PollFlags, is_ready};

use super::log::ExportLog;
use super::socket::BoundSocket;

/// Waiting time before a second front-end is logged: one that restarts may reconnect before its old connection ends.
const GRACE: Duration = Duration::from_millis(300);
/// Minimum interval of this log line while one front-end is connected.
const INTERVAL: Duration = Duration::from_mins(1);

/// Checks the socket of a connected front-end for waiting ones.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Process id of the connected front-end; 0 if unknown.
    connected: i32,
    /// Time when an unlogged waiting front-end was first seen.
    seen: Option<Instant>,
    told: Option<Instant>,
    /// Whether the export is to run when another front-end arrives at its socket, and the latest time of its next run.
    pub(super) looks: bool,
    pub(super) deadline: Option<Instant>,
}

impl Waiters {
    /// Waiters of an export whose connected front-end is this process.
    pub(super) fn beside(connected: i32) -> Waiters {
        Waiters { connected, ..Waiters::default() }
    }

    /// Checks the export's socket for waiting front-ends if a check is due, and logs them. Accepts none of them.
    pub(super) fn look_at(&mut self, socket: &BoundSocket, log: &ExportLog) {
        loop {
            let now = Instant::now();
            let (looks, time) = self.look(now);
            self.looks = looks && time.is_none();
            self.deadline = time.map(|time| now + time);
            if !looks {
                return;
            }
            let waits = is_ready(socket.listener(), PollFlags::IN);
            if self.found(waits, now) {
                log.warn(second_front_end(self.connected));
            } else if self.looks && !waits {
                // Until another front-end arrives.
                return;
            }
        }
    }

    /// Whether the socket is to be polled for events, and until when; otherwise the time of the next check.
    fn look(&self, now: Instant) -> (bool, Option<Duration>) {
        match (self.seen.map(|seen| seen + GRACE), self.told.map(|told| told + INTERVAL)) {
            (Some(due), _) => (now >= due, Some(due.saturating_duration_since(now))),
            (None, Some(due)) if now < due => (false, Some(due - now)),
            _ => (true, None),
        }
    }

    /// Handles the result of a poll. Returns whether to log a waiting front-end.
    fn found(&mut self, waits: bool, now: Instant) -> bool {
        let is_due = waits && self.seen.is_some();
        self.seen = (waits && !is_due).then_some(now);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }
}

/// Log text for a front-end that waits while that of this process is connected; 0 if unknown.
fn second_front_end(connected: i32) -> String {
    format!(
        "another front-end waits for this socket, and is served when {} leaves; end that one, or serve the second an \
         export of its own",
        peer(connected).unwrap_or_else(|| "the connected one".into())
    )
}

/// Description of this process.
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
