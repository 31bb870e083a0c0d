//! Syncs in flight on one file description, by all its queues.
//!
//! A page that cannot be written back is reported to one sync of the description only. Another one that was in flight
//! at that time succeeds, although the write is lost. So a sync has succeeded once all those have ended that had begun
//! when the kernel answered it, and none of them has failed.
//!
//! Those that begin now are counted in one place, and earlier ones in the other, which therefore drains. The places
//! change their roles when that is empty. Whoever waits has seen each of them empty in the end, at any load.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Place where a sync is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SyncPlace(usize);

/// Counts of the syncs in flight.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// Where those that begin are counted.
    present: AtomicUsize,
    in_flight: [AtomicUsize; 2],
}

/// What a sync that the kernel has answered has seen: which places were empty since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SyncWait([bool; 2]);

impl Syncs {
    /// A sync begins. To be called before the kernel has it.
    pub(super) fn begin(&self) -> SyncPlace {
        let place = self.present.load(SeqCst);
        self.in_flight[place].fetch_add(1, SeqCst);
        SyncPlace(place)
    }

    /// It has ended. A failure is recorded before.
    pub(super) fn end(&self, place: SyncPlace) {
        self.in_flight[place.0].fetch_sub(1, SeqCst);
    }

    /// Whether all that were in flight at the first call have ended.
    pub(super) fn have_ended(&self, wait: &mut SyncWait) -> bool {
        let is_empty = |place: usize| self.in_flight[place].load(SeqCst) == 0;
        (0..2).for_each(|place| wait.0[place] |= is_empty(place));
        let present = self.present.load(SeqCst);
        if !wait.0[present] && is_empty(1 - present) {
            // Of several that do this at once one does.
            let _ = self.present.compare_exchange(present, 1 - present, SeqCst, SeqCst);
        }
        wait.0 == [true; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_is_for_all_that_were_in_flight_and_no_others() {
        let syncs = Syncs::default();
        assert!(syncs.have_ended(&mut SyncWait::default()));
        let first = syncs.begin();
        let mut wait = SyncWait::default();
        assert!(!syncs.have_ended(&mut wait));
        // Later ones come before the earlier have ended, without a pause.
        let mut later = syncs.begin();
        for _ in 0..10 {
            let next = syncs.begin();
            syncs.end(later);
            later = next;
            assert!(!syncs.have_ended(&mut wait));
        }
        let mut second = SyncWait::default();
        assert!(!syncs.have_ended(&mut second));
        syncs.end(first);
        assert!(syncs.have_ended(&mut wait), "the others began later");
        for _ in 0..3 {
            assert!(!syncs.have_ended(&mut second), "one of them was in flight");
        }
        for _ in 0..3 {
            let next = syncs.begin();
            syncs.end(later);
            later = next;
            syncs.have_ended(&mut second);
        }
        assert!(syncs.have_ended(&mut second), "all that were in flight have ended");
        syncs.end(later);
    }
}
