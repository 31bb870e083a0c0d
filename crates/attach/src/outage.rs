//! The time without a back-end: reconnection, and failure of I/O.
//!
//! Time rules only, with the time as an argument; `control.rs` connects and tells the queues.

use std::time::{Duration, Instant};

use crate::left_peer::{LeftPeer, PeerState};

/// First pause before a reconnection. An attempt without a listener costs microseconds.
pub(crate) const PAUSE_MIN: Duration = Duration::from_millis(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// In between a pause is this share of the time that the back-end has been away.
const PAUSE_SHARE: u32 = 8;
/// Consecutive broken rings after which requests in flight fail, since they may be the cause.
const FAULTS_MAX: u32 = 3;
/// A back-end that has served for so long is good again.
const GOOD_AFTER: Duration = Duration::from_secs(10);

/// How the last sessions ended.
#[derive(Debug, Default)]
pub(crate) struct LossHistory {
    /// Sessions lost in a row that were not good.
    losses: u32,
    /// Rings broken in a row.
    faults: u32,
}

impl LossHistory {
    /// A session was lost that had served for so long; `broken` if its back-end broke a ring. Returns the pause before
    /// the next connection.
    pub(crate) fn lost(&mut self, served: Duration, broken: bool) -> Duration {
        if served >= GOOD_AFTER {
            *self = LossHistory::default();
        }
        let pause = match self.losses {
            _ if broken => PAUSE_MAX,
            0 => Duration::ZERO,
            losses => PAUSE_MAX.min(PAUSE_MIN * 2_u32.saturating_pow(losses)),
        };
        self.losses += 1;
        self.faults += u32::from(broken);
        pause
    }

    /// Whether the requests in flight may be the cause of the broken rings.
    pub(crate) fn has_too_many_faults(&self) -> bool {
        self.faults >= FAULTS_MAX
    }
}

/// A time without a back-end.
#[derive(Debug)]
pub(crate) struct Outage {
    since: Instant,
    /// Time of the next connection attempt.
    try_at: Instant,
    /// The old connection, until the back-end has closed its end: until then it may execute requests, and none is
    /// submitted again.
    left: Option<LeftPeer>,
    /// Whether it sends more than one check reads.
    floods: bool,
    /// I/O fails.
    gave_up: bool,
    /// Latest error, so that it is logged once.
    said: String,
}

/// Next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutageStep {
    /// No step is due.
    Wait,
    /// Connect to the back-end.
    Connect,
    /// I/O is to fail.
    Fail,
}

impl Outage {
    /// Connects after the pause.
    pub(crate) fn new(now: Instant, pause: Duration) -> Outage {
        Outage { since: now, try_at: now + pause, left: None, floods: false, gave_up: false, said: String::new() }
    }

    /// Keeps the old connection, whose other side may still use our memory.
    pub(crate) fn set_left(&mut self, left: LeftPeer) {
        self.left = Some(left);
    }

    /// Latest time of the next [check](Outage::look).
    pub(crate) fn deadline(&self, now: Instant, gone_max: Duration) -> Instant {
        match self.left {
            None => self.try_at,
            // Its data would wake us without end.
            Some(_) if self.floods => (self.since + gone_max).min(now + PAUSE_MIN),
            Some(_) => self.since + gone_max,
        }
    }

    /// The connection to wait for.
    pub(crate) fn awaited(&self) -> Option<&LeftPeer> {
        self.left.as_ref().filter(|_| !self.floods)
    }

    /// Checks the old connection, and the time.
    pub(crate) fn look(&mut self, now: Instant, gone_max: Duration) -> OutageStep {
        let is_over = self.away(now) >= gone_max;
        let peer = self.left.as_ref().map(LeftPeer::look);
        self.floods = peer == Some(PeerState::Talking);
        match peer {
            Some(peer) if is_over || peer == PeerState::Closed => {
                self.left = None;
                if is_over && !self.gave_up { OutageStep::Fail } else { OutageStep::Wait }
            }
            None if now >= self.try_at => OutageStep::Connect,
            _ => OutageStep::Wait,
        }
    }

    /// A connection attempt failed, for this reason. Returns the next step and whether the reason is new.
    pub(crate) fn try_later(&mut self, now: Instant, gone_max: Duration, why: &str) -> (OutageStep, bool) {
        let away = self.away(now);
        self.try_at = now + (away / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX);
        let is_news = self.said != why;
        if is_news {
            self.said = why.into();
        }
        (if away >= gone_max && !self.gave_up { OutageStep::Fail } else { OutageStep::Wait }, is_news)
    }

    /// How long it has lasted.
    pub(crate) fn away(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Whether I/O fails.
    pub(crate) fn gave_up(&self) -> bool {
        self.gave_up
    }

    /// I/O fails from now on.
    pub(crate) fn give_up(&mut self) {
        self.gave_up = true;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pause_grows_with_each_lost_session() {
        let mut history = LossHistory::default();
        let pauses_ms: Vec<_> = (0..10).map(|_| history.lost(Duration::ZERO, false).as_millis()).collect();
        assert_eq!(pauses_ms, [0, 2, 4, 8, 16, 32, 64, 128, 256, 500]);
        assert_eq!(history.lost(GOOD_AFTER.saturating_sub(MS), false), PAUSE_MAX);
        assert_eq!(history.lost(GOOD_AFTER, false), Duration::ZERO, "a good session is a new beginning");
    }

    #[test]
    fn broken_rings_in_a_row_are_too_many_after_three() {
        let mut history = LossHistory::default();
        for _ in 0..FAULTS_MAX {
            assert!(!history.has_too_many_faults());
            assert_eq!(history.lost(Duration::ZERO, true), PAUSE_MAX);
        }
        assert!(history.has_too_many_faults());
        history.lost(GOOD_AFTER, true);
        assert!(!history.has_too_many_faults());
    }

    #[test]
    fn back_end_is_looked_for_ever_less_often_and_io_fails_once() {
        let start = Instant::now();
        let mut outage = Outage::new(start, Duration::ZERO);
        let (mut now, mut tries, mut failed) = (start, 0, Vec::new());
        while outage.away(now) < 2 * MINUTE {
            assert_eq!(outage.look(now, MINUTE), OutageStep::Connect);
            tries += 1;
            let (step, is_news) = outage.try_later(now, MINUTE, "nobody listens");
            assert_eq!(is_news, tries == 1);
            if step == OutageStep::Fail {
                outage.give_up();
                failed.push(outage.away(now));
            }
            let deadline = outage.deadline(now, MINUTE);
            assert_eq!(outage.look(deadline.checked_sub(MS / 2).unwrap(), MINUTE), OutageStep::Wait);
            // I/O waits hardly longer than the back-end was away.
            let pause = deadline - now;
            assert!((PAUSE_MIN..=PAUSE_MAX).contains(&pause) && pause <= (outage.away(now) / 8).max(PAUSE_MIN));
            now = deadline;
        }
        assert!(failed.len() == 1 && (MINUTE..MINUTE + PAUSE_MAX).contains(&failed[0]), "{failed:?}");
        assert!((250..350).contains(&tries), "{tries} tries");
        assert!(outage.gave_up());
    }

    #[test]
    fn nothing_is_tried_before_the_old_connection_is_closed() {
        let start = Instant::now();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut outage = Outage::new(start, Duration::ZERO);
        outage.set_left(LeftPeer(ours.into()));
        assert_eq!(outage.deadline(start, MINUTE), start + MINUTE);
        assert!(outage.awaited().is_some());
        assert_eq!(outage.look(start + MINUTE.saturating_sub(MS), MINUTE), OutageStep::Wait);
        drop(theirs);
        assert_eq!(outage.look(start + MINUTE.saturating_sub(MS), MINUTE), OutageStep::Wait, "seen to be closed");
        assert_eq!(outage.look(start + MINUTE.saturating_sub(MS), MINUTE), OutageStep::Connect);
    }

    #[test]
    fn a_connection_that_never_closes_fails_io_before_the_next_try() {
        let start = Instant::now();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut outage = Outage::new(start, Duration::ZERO);
        outage.set_left(LeftPeer(ours.into()));
        assert_eq!(outage.look(start + MINUTE, MINUTE), OutageStep::Fail);
        outage.give_up();
        assert_eq!(outage.look(start + MINUTE, MINUTE), OutageStep::Connect);
        assert_eq!(outage.try_later(start + MINUTE, MINUTE, "gone"), (OutageStep::Wait, true), "it fails already");
    }

    #[test]
    fn a_flood_is_looked_at_by_the_clock_and_not_by_its_descriptor() {
        let start = Instant::now();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut outage = Outage::new(start, Duration::ZERO);
        outage.set_left(LeftPeer(ours.into()));
        theirs.set_nonblocking(true).unwrap();
        while theirs.write(&[7; 1024]).is_ok() {}
        assert_eq!(outage.look(start, MINUTE), OutageStep::Wait);
        assert!(outage.awaited().is_none());
        assert_eq!(outage.deadline(start, MINUTE), start + PAUSE_MIN);
        let late = start + MINUTE.saturating_sub(MS / 2);
        assert_eq!(outage.deadline(late, MINUTE), start + MINUTE, "the end of its time comes first");
    }
}
