//! A queue pair, host side: commands enter the submission ring, completions leave the completion ring.
//!
//! Owned by one thread. A command is identified by its slot, chosen by the owner: the index of its tag. Its identifier
//! (cid) is the slot and four bits of a sequence that advances with each use of the slot.
//!
//! The controller is not trusted. Each completion is read once and checked against the slot before it is used; an
//! impossible one is refused and counted ([`CqeFault`]), and the command stays in flight. The submission queue head in
//! it is not used: commands in flight bound both rings, and a controller whose parts complete in parallel may report an
//! older head after a newer one.
//!
//! The completion queue head doorbell of a queue without interrupts is written once per several completions, since each
//! write moves a cache line, and with shadow doorbells waits for it.
//!
//! Never resets: the controller's owner cancels commands in flight once the device is proven silent.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use blkyard_mem::View;

use crate::doorbell::{Doorbell, Doorbells};
use crate::io_queue::reallocate;
use crate::{CQE_BYTES, Cqe, NvmeStatus, SQE_BYTES, Sqe};

/// Bits of a cid for the slot; the others are the sequence.
const SLOT_BITS: u32 = 12;
/// Bits of a cid for the slot.
pub(crate) const SLOT_MASK: u16 = (1 << SLOT_BITS) - 1;
/// Position of the phase bit in the second word of a completion.
const PHASE_BIT: u64 = 1 << 48;

/// The memory of a queue pair: both rings have the same number of entries.
#[derive(Clone, Debug)]
pub struct QueueRings {
    /// Submission ring.
    pub sq: View,
    /// Completion ring.
    pub cq: View,
    /// Entries of each.
    pub entries: u16,
}

impl QueueRings {
    /// Minimum entries: one of them always stays free.
    pub const ENTRIES_MIN: u16 = 2;
    /// Maximum entries, so that a slot fits a cid.
    pub const ENTRIES_MAX: u16 = 1 << SLOT_BITS;

    /// Bytes of both rings, the submission ring first.
    pub fn bytes(entries: u16) -> [usize; 2] {
        [usize::from(entries) * SQE_BYTES, usize::from(entries) * CQE_BYTES]
    }

    /// # Panics
    /// If there are too few or too many entries, or the memory is too short.
    fn check(&self) {
        let [sq, cq] = QueueRings::bytes(self.entries);
        assert!(
            (QueueRings::ENTRIES_MIN..=QueueRings::ENTRIES_MAX).contains(&self.entries)
                && self.sq.len() >= sq
                && self.cq.len() >= cq,
            "a queue pair of {} entries in {} and {} bytes",
            self.entries,
            self.sq.len(),
            self.cq.len()
        );
    }
}

/// Defines an enum of faults with names and counters.
macro_rules! faults {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)+) => {
        /// Reason for refusing a completion.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum CqeFault { $($(#[$doc])* $variant,)+ }

        impl CqeFault {
            /// Every fault.
            pub const ALL: &'static [CqeFault] = &[$(CqeFault::$variant,)+];

            /// Description of the fault.
            pub fn name(self) -> &'static str {
                match self { $(CqeFault::$variant => $text,)+ }
            }
        }
    };
}

faults! {
    /// The submission queue is not that of this pair.
    WrongQueue = "completion for another submission queue",
    /// A cid whose slot does not exist.
    SlotOutOfRange = "command identifier out of range",
    /// The slot of the cid has no command: repeated or invented.
    NotInFlight = "command identifier that is not in flight",
    /// The cid has the sequence of an earlier use of its slot: late or repeated.
    Stale = "command identifier of an earlier command",
    /// A command that the controller was not told of.
    NotAnnounced = "completion of a command that was not announced",
}

/// Fault counters of one queue pair. Written by its owner, readable by any thread.
#[derive(Debug, Default)]
pub struct CqeFaults([AtomicU64; CqeFault::ALL.len()]);

impl CqeFaults {
    fn count(&self, fault: CqeFault) {
        let counter = &self.0[fault as usize];
        // One writer: a plain load and store suffice.
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }

    /// All counts with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        CqeFault::ALL.iter().map(|fault| fault.name()).zip(self.0.iter().map(|counter| counter.load(Relaxed)))
    }

    /// Count of this fault.
    pub fn get(&self, fault: CqeFault) -> u64 {
        self.0[fault as usize].load(Relaxed)
    }

    /// Sum of all counts.
    pub fn total(&self) -> u64 {
        self.iter().map(|(_, count)| count).sum()
    }
}

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Its slot, which may be reused.
    pub slot: u16,
    /// Its status.
    pub status: NvmeStatus,
    /// Command-specific result.
    pub result: u64,
}

/// Positions of a queue pair and of its doorbells, for a report of commands that do not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePositions {
    /// Identifier of both queues.
    pub qid: u16,
    /// Ring index of the next command.
    pub sq_tail: u16,
    /// The last announced tail.
    pub announced_tail: u16,
    /// Ring index of the next completion.
    pub cq_head: u16,
    /// The last head that the doorbell was written with.
    pub acknowledged_head: u16,
    /// Whether a completion is available there.
    pub is_pending: bool,
    /// Commands in flight.
    pub in_flight: u16,
    /// Tail doorbell as the controller reads it, and its event index with shadow doorbells.
    pub sq_doorbell: (u32, Option<u32>),
    /// The same of the head doorbell.
    pub cq_doorbell: (u32, Option<u32>),
}

/// State of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct CommandSlot {
    /// Sequence; advances whenever a command of the slot has ended.
    sequence: u32,
    /// Number of the submission; never wraps.
    submission: u64,
    in_flight: bool,
}

/// A queue pair, host side.
#[derive(Debug)]
pub struct HostQueuePair {
    qid: u16,
    rings: QueueRings,
    /// Ring index of the next command, and its number.
    sq_tail: u16,
    submissions: u64,
    /// The last announced tail.
    announced_tail: u16,
    announced: u64,
    cq_head: u16,
    /// The last head that the doorbell was written with, and the completions since then.
    acknowledged_head: u16,
    unacknowledged: u16,
    /// Completions for a write of the head doorbell.
    acknowledge_at: u16,
    /// Phase bit of a new completion, in its position.
    phase: u64,
    sq_doorbell: Doorbell,
    cq_doorbell: Doorbell,
    slots: Box<[CommandSlot]>,
    in_flight: u16,
    /// Whether commands were cancelled: the controller's fetch position is unknown until the next reset.
    is_cancelled: bool,
    faults: Arc<CqeFaults>,
}

impl HostQueuePair {
    /// An empty queue pair over memory that the controller does not read yet. Fault counters are passed to later queue
    /// pairs.
    ///
    /// # Panics
    /// If the memory is too short; its layout is computed by this crate.
    pub fn new(qid: u16, rings: QueueRings, doorbells: &Doorbells, faults: Arc<CqeFaults>) -> HostQueuePair {
        let slots = rings.entries - 1;
        HostQueuePair::with_slots(qid, rings, doorbells, faults, slots)
    }

    /// The same with another number of slots. If it exceeds the depth, the owner must limit the slots in use.
    pub(crate) fn with_slots(
        qid: u16,
        rings: QueueRings,
        doorbells: &Doorbells,
        faults: Arc<CqeFaults>,
        slots: u16,
    ) -> HostQueuePair {
        rings.check();
        let slots = vec![CommandSlot::default(); usize::from(slots)].into();
        let (sq_doorbell, cq_doorbell) = (doorbells.sq_tail(qid), doorbells.cq_head(qid));
        let mut queue = HostQueuePair {
            qid,
            rings,
            sq_tail: 0,
            submissions: 0,
            announced_tail: 0,
            announced: 0,
            cq_head: 0,
            acknowledged_head: 0,
            unacknowledged: 0,
            acknowledge_at: 1,
            phase: PHASE_BIT,
            sq_doorbell,
            cq_doorbell,
            slots,
            in_flight: 0,
            is_cancelled: false,
            faults,
        };
        queue.reset();
        queue
    }

    /// Writes the completion queue head doorbell only after a part of the ring, or when the controller may need room.
    /// For queues without interrupts: a controller may merge these by the head.
    #[must_use]
    pub fn with_late_head(mut self) -> HostQueuePair {
        self.acknowledge_at = (self.rings.entries / 4).max(1);
        self
    }

    /// Empties both rings before the controller creates the queues again. Identifiers of earlier commands stay invalid.
    ///
    /// # Panics
    /// If commands are in flight: [cancel](HostQueuePair::cancel) them first.
    pub fn reset(&mut self) {
        assert!(self.in_flight == 0, "{} commands are in flight", self.in_flight);
        for entry in 0..usize::from(self.rings.entries) {
            self.rings.cq.store_u64s(entry * CQE_BYTES, [0, 0], Relaxed);
        }
        (self.sq_tail, self.announced_tail, self.cq_head) = (0, 0, 0);
        (self.acknowledged_head, self.unacknowledged) = (0, 0);
        self.announced = self.submissions;
        self.phase = PHASE_BIT;
        self.is_cancelled = false;
        self.sq_doorbell.clear_shadow();
        self.cq_doorbell.clear_shadow();
    }

    pub(crate) fn move_to_node(&mut self, node: u32) {
        self.rings.sq.prefer_node(node);
        self.rings.cq.prefer_node(node);
        reallocate(&mut self.slots);
    }

    /// Maximum commands in flight; slots of I/O queues are below it. One entry of a ring always stays free, so neither
    /// ring overflows.
    pub fn depth(&self) -> u16 {
        self.rings.entries - 1
    }

    /// Identifier of both queues.
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Fault counters of the controller.
    pub fn faults(&self) -> &Arc<CqeFaults> {
        &self.faults
    }

    /// Its positions, as this side and the memory have them now.
    pub fn positions(&self) -> QueuePositions {
        let HostQueuePair { qid, sq_tail, announced_tail, cq_head, acknowledged_head, in_flight, .. } = *self;
        let (sq_doorbell, cq_doorbell) = (self.sq_doorbell.words(), self.cq_doorbell.words());
        let is_pending = self.is_pending();
        QueuePositions {
            qid,
            sq_tail,
            announced_tail,
            cq_head,
            acknowledged_head,
            is_pending,
            in_flight,
            sq_doorbell,
            cq_doorbell,
        }
    }

    /// The cid of the command in a slot, for an Abort; `None` if there is none.
    pub fn cid(&self, slot: u16) -> Option<u16> {
        self.slots.get(usize::from(slot)).filter(|entry| entry.in_flight).map(|entry| cid(slot, entry.sequence))
    }

    /// The full sequence of a slot; it changes when the command in the slot has ended.
    pub fn sequence(&self, slot: u16) -> Option<u32> {
        self.slots.get(usize::from(slot)).map(|entry| entry.sequence)
    }

    /// Puts a command into the submission ring. The controller sees it with the next [`HostQueuePair::announce`].
    ///
    /// # Panics
    /// If the slot is in use or not below the depth, or commands were cancelled since the last reset.
    #[inline]
    pub fn push(&mut self, slot: u16, sqe: Sqe) {
        let entry = &mut self.slots[usize::from(slot)];
        assert!(!entry.in_flight && !self.is_cancelled, "slot {slot} is in use, or the queue pair not reset");
        (entry.in_flight, entry.submission) = (true, self.submissions);
        let sqe = sqe.with_cid(cid(slot, entry.sequence));
        self.rings.sq.store_u64s(usize::from(self.sq_tail) * SQE_BYTES, sqe.0, Relaxed);
        self.sq_tail = self.next(self.sq_tail);
        self.submissions += 1;
        self.in_flight += 1;
    }

    /// Announces all pushed commands by one doorbell. Returns whether the doorbell register was written: with shadow
    /// doorbells only if the controller has requested it.
    #[inline]
    pub fn announce(&mut self) -> bool {
        if self.announced == self.submissions {
            return false;
        }
        // The controller fetches a command only if its completion has an entry.
        let is_short = self.unacknowledged + self.in_flight > self.depth();
        let is_head_rung = is_short && self.acknowledge();
        let old = std::mem::replace(&mut self.announced_tail, self.sq_tail);
        self.announced = self.submissions;
        self.sq_doorbell.ring(old, self.sq_tail) | is_head_rung
    }

    /// Writes the completion queue head doorbell. Returns whether its register was written.
    #[inline]
    fn acknowledge(&mut self) -> bool {
        let old = std::mem::replace(&mut self.acknowledged_head, self.cq_head);
        self.unacknowledged = 0;
        // After a whole ring the index is the same: the controller learns of it with a later completion.
        old != self.cq_head && self.cq_doorbell.ring(old, self.cq_head)
    }

    /// Whether a completion is available.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.rings.cq.load_u64(usize::from(self.cq_head) * CQE_BYTES + 8, Relaxed) & PHASE_BIT == self.phase
    }

    /// Handles completions, at most one ring, and writes the completion queue's doorbell once. Returns whether its
    /// register was written.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Completed)) -> bool {
        let mut taken = 0;
        while taken < self.rings.entries {
            // The second word is read first, since it has the phase.
            let cqe = Cqe(self.rings.cq.load_u64s_back(usize::from(self.cq_head) * CQE_BYTES, Acquire));
            if cqe.0[1] & PHASE_BIT != self.phase {
                break;
            }
            self.cq_head += 1;
            if self.cq_head == self.rings.entries {
                self.cq_head = 0;
                self.phase ^= PHASE_BIT;
            }
            taken += 1;
            // A command will probably follow.
            let sqe = usize::from(self.sq_tail + taken - 1);
            let sqe = if sqe < usize::from(self.rings.entries) { sqe } else { sqe - usize::from(self.rings.entries) };
            self.rings.sq.warm(sqe * SQE_BYTES);
            match self.take(cqe) {
                Ok(completed) => each(completed),
                Err(fault) => self.faults.count(fault),
            }
        }
        self.unacknowledged += taken;
        taken > 0 && self.unacknowledged >= self.acknowledge_at && self.acknowledge()
    }

    /// Checks a completion; returns the fault of an invalid one.
    #[inline]
    fn take(&mut self, cqe: Cqe) -> Result<Completed, CqeFault> {
        if cqe.sq_id() != self.qid {
            return Err(CqeFault::WrongQueue);
        }
        let slot = cqe.cid() & SLOT_MASK;
        let entry = self.slots.get_mut(usize::from(slot)).ok_or(CqeFault::SlotOutOfRange)?;
        if !entry.in_flight {
            return Err(CqeFault::NotInFlight);
        }
        if cqe.cid() != cid(slot, entry.sequence) {
            return Err(CqeFault::Stale);
        }
        if entry.submission >= self.announced {
            return Err(CqeFault::NotAnnounced);
        }
        entry.in_flight = false;
        entry.sequence = entry.sequence.wrapping_add(1);
        self.in_flight -= 1;
        Ok(Completed { slot, status: cqe.status(), result: cqe.result() })
    }

    /// Cancels the command in a slot. The controller must be disabled or gone. Returns whether the slot had a command.
    /// Later completions of it are refused, and commands can be pushed only after a [reset](HostQueuePair::reset).
    pub fn cancel(&mut self, slot: u16) -> bool {
        let Some(entry) = self.slots.get_mut(usize::from(slot)).filter(|entry| entry.in_flight) else { return false };
        entry.in_flight = false;
        entry.sequence = entry.sequence.wrapping_add(1);
        self.in_flight -= 1;
        self.is_cancelled = true;
        true
    }

    #[inline]
    fn next(&self, index: u16) -> u16 {
        if index + 1 == self.rings.entries { 0 } else { index + 1 }
    }
}

/// The identifier of a command, by its slot and the slot's sequence.
#[inline]
pub(crate) const fn cid(slot: u16, sequence: u32) -> u16 {
    (sequence as u16) << SLOT_BITS | slot
}
