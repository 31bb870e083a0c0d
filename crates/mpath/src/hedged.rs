//! The hedged reads of one queue: which are late, and which copies are on their way.
//!
//! ```text
//!   sent ── late ──▶ hedge at another path ──┬─ original first ─▶ the hedge is dropped when it ends
//!     │                                      └─ hedge first ────▶ copied; the original is given up,
//!     └─ ended in time                                            and dropped when it ends
//! ```
//!
//! Both copies count as in flight at their paths until they have ended there, and both teach the policy.

use crate::hedge::{HedgeConfig, HedgeTimer};
use crate::policy::{PathChoice, PathIo};

/// Room for hedges and originals given up, of all paths.
const COPIES_MAX: usize = 256;

/// See the head of the module.
#[derive(Debug)]
pub(crate) struct HedgedReads {
    pub(crate) timer: HedgeTimer,
    is_on: bool,
    /// By slot.
    reads: Box<[SentRead]>,
    /// Reads that may become late.
    waiting: u32,
    /// No read is late before, ns.
    next_ns: u64,
    copies: Vec<ReadCopy>,
}

/// The I/O of a slot, as it was sent last.
#[derive(Clone, Copy, Debug, Default)]
struct SentRead {
    io: Option<PathIo>,
    start_ns: u64,
    /// When it is late, ns; `None` for one that is not hedged, or was already.
    late_ns: Option<u64>,
    is_hedged: bool,
}

/// A command of a path without a tag.
#[derive(Debug)]
pub(crate) struct ReadCopy {
    pub(crate) path: usize,
    /// Number that the path's driver has given it.
    pub(crate) number: u16,
    pub(crate) start_ns: u64,
    pub(crate) io: PathIo,
    pub(crate) kind: CopyKind,
    /// For the policy that made it.
    pub(crate) choice: Option<PathChoice>,
}

/// What a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// Of the read in this slot, as long as it is not answered.
    Hedge(Option<usize>),
    /// An original that was given up.
    Original,
}

impl HedgedReads {
    /// For a queue of this depth.
    pub(crate) fn new(config: HedgeConfig, depth: usize) -> HedgedReads {
        HedgedReads {
            timer: HedgeTimer::new(config),
            is_on: true,
            reads: vec![SentRead::default(); depth].into(),
            waiting: 0,
            next_ns: u64::MAX,
            copies: Vec::with_capacity(COPIES_MAX),
        }
    }

    /// An I/O goes to its path.
    #[inline]
    pub(crate) fn sent(&mut self, slot: usize, io: &PathIo, now_ns: u64) {
        let late_ns = if self.is_on { self.timer.due_ns(io, now_ns) } else { None };
        if let Some(late_ns) = late_ns {
            self.waiting += 1;
            self.next_ns = self.next_ns.min(late_ns);
        }
        self.reads[slot] = SentRead { io: Some(*io), start_ns: now_ns, late_ns, is_hedged: false };
    }

    /// It has left its path without an answer.
    #[inline]
    pub(crate) fn left(&mut self, slot: usize) {
        self.take(slot);
    }

    /// Its path has answered.
    #[inline]
    pub(crate) fn answered(&mut self, slot: usize, now_ns: u64) {
        let SentRead { io: Some(io), start_ns, .. } = self.take(slot) else { return };
        self.timer.completed(&io, Some(now_ns.saturating_sub(start_ns)));
    }

    /// What is known of the I/O in a slot, which is forgotten.
    #[inline]
    fn take(&mut self, slot: usize) -> SentRead {
        let read = std::mem::take(&mut self.reads[slot]);
        self.waiting -= u32::from(read.late_ns.is_some());
        if read.is_hedged {
            self.orphan(slot);
        }
        read
    }

    /// The hedge of a slot is not needed any more.
    #[cold]
    fn orphan(&mut self, slot: usize) {
        for copy in self.copies.iter_mut().filter(|copy| copy.kind == CopyKind::Hedge(Some(slot))) {
            copy.kind = CopyKind::Hedge(None);
        }
    }

    /// When the next read may be late.
    #[inline]
    pub(crate) fn next_ns(&self) -> Option<u64> {
        (self.waiting > 0).then_some(self.next_ns)
    }

    /// Slot and I/O of a read that is late; `None` when all are found.
    pub(crate) fn next_late(&mut self, now_ns: u64) -> Option<(usize, PathIo)> {
        self.next_ns = u64::MAX;
        for (slot, read) in self.reads.iter_mut().enumerate() {
            match (read.late_ns, read.io) {
                (Some(late_ns), Some(io)) if late_ns <= now_ns => {
                    read.late_ns = None;
                    self.waiting -= 1;
                    // The search goes on from here.
                    self.next_ns = 0;
                    return Some((slot, io));
                }
                (Some(late_ns), _) => self.next_ns = self.next_ns.min(late_ns),
                _ => {}
            }
        }
        None
    }

    /// A read that is late cannot be hedged now: it is looked at again when it has waited for twice as long.
    pub(crate) fn postpone(&mut self, slot: usize, now_ns: u64) {
        let read = &mut self.reads[slot];
        if read.io.is_some() && self.is_on {
            let late_ns = now_ns + now_ns.saturating_sub(read.start_ns).max(1);
            read.late_ns = Some(late_ns);
            self.waiting += 1;
        }
    }

    /// Whether there is room for the copies of another read.
    pub(crate) fn has_room(&self) -> bool {
        // Its original may become one, too.
        self.copies.len() + 1 < COPIES_MAX && self.timer.is_left()
    }

    /// A hedge was sent.
    pub(crate) fn hedged(&mut self, slot: usize, copy: ReadCopy) {
        self.timer.take();
        self.reads[slot].is_hedged = true;
        self.copies.push(copy);
    }

    /// A hedge has come first, and the original was given up, with this number.
    pub(crate) fn give_up(&mut self, slot: usize, path: usize, number: u16, choice: Option<PathChoice>) {
        if let SentRead { io: Some(io), start_ns, .. } = self.take(slot) {
            self.copies.push(ReadCopy { path, number, start_ns, io, kind: CopyKind::Original, choice });
        }
    }

    /// Whether a copy is on its way.
    #[inline]
    pub(crate) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether a path has copies.
    #[inline]
    pub(crate) fn is_at(&self, path: usize) -> bool {
        self.copies.iter().any(|copy| copy.path == path)
    }

    /// A copy that has ended.
    pub(crate) fn ended(&mut self, path: usize, number: u16) -> Option<ReadCopy> {
        let at = self.copies.iter().position(|copy| (copy.path, copy.number) == (path, number))?;
        Some(self.copies.swap_remove(at))
    }

    /// Reads are hedged so from now on: unset for not at all.
    pub(crate) fn follow(&mut self, config: Option<HedgeConfig>) {
        match config {
            Some(config) => (self.is_on, self.timer) = (true, HedgeTimer::new(config)),
            // Copies that are on their way end as before.
            None => self.stop(),
        }
    }

    fn stop(&mut self) {
        self.is_on = false;
        self.reads.iter_mut().for_each(|read| read.late_ns = None);
        self.waiting = 0;
    }

    /// The policy that has made the choices is gone.
    pub(crate) fn forget_choices(&mut self) {
        self.copies.iter_mut().for_each(|copy| copy.choice = None);
    }
}
