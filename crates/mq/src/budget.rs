//! The budget: slots at a device that several hardware queues share, on any lanes.
//!
//! Each queue has a [`BudgetShare`]. It takes slots from it before it offers requests to its driver, and gives them
//! back as requests complete, both in batches. While there are enough slots for all, that is one atomic word, and
//! queues do not notice each other.
//!
//! A queue that gets too few slots records how many it lacks and continues with other work, or sleeps. From then on
//! free slots go to the waiting queues, until none waits:
//!
//! ```text
//!                    a share comes out short
//!   open ─────────────────────────────────────────▶ short
//!   take: from the word                             take: records what it lacks ──┐
//!   give: to the word                               give: to the word ────────────┤ then deals, or sets the pending
//!     ▲                                                                           ▼ bit for the dealer
//!     └──────────── no share waits ──────────────── deal: slots go to waiting shares, in turn; they are woken
//! ```
//!
//! **No wake-up is lost.** A share records what it lacks, marks the word short by a read-modify-write, and then goes to
//! the ledger, which is under a [`Baton`]. A slot that was given back before the mark is in the word, and the holder of
//! the ledger finds it. One given back after it meets the mark, and its giver goes to the ledger too. The holder cannot
//! release the baton before it has taken the pending bit of all that came. It clears the mark only when no share waits;
//! a share that records its lack too late for that has set the pending bit, and is seen in the next round.
//!
//! **Fair, and no thundering herd.** No share overtakes the waiting ones. Slots are granted in lots, to each share in
//! turn, and only shares that were granted some are woken. So each waiting share makes progress, independent of the
//! others, and one slot wakes one thread.
//!
//! **The price**: a granted slot is idle until its share has woken up.
//!
//! The budget knows nothing of requests and tags, and does not define what a slot is: a tag of the whole host
//! (`BLK_MQ_F_TAG_HCTX_SHARED`), an entry of a device's queue (SCSI's budget), or memory.

use std::sync::{Arc, Mutex, PoisonError};

use blkyard_mem::Baton;
use blkyard_mem::sync::{AtomicU64, CachePadded, Ordering};

use crate::Wake;

/// Lowest bit of the word, below the number of free slots: some share waits, and free slots are distributed by the
/// ledger only.
const SHORT: u64 = 1;
/// Places that one share gets in its turn, if it lacks as many: four, below which Linux lets no user of shared tags
/// fall (`hctx_may_queue`), and enough to be worth a wake-up.
const LOT: u64 = 4;
/// In a member's word: slots lacking below, slots granted above.
const DEALT_SHIFT: u32 = 32;
const LACKING_MASK: u64 = (1 << DEALT_SHIFT) - 1;

/// Places at a device, for the shares of several hardware queues.
#[derive(Clone, Debug)]
pub struct Budget {
    books: Arc<Books>,
}

/// Why a queue cannot join a budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the budget of {places} places is shared by {shares} queues, as many as it was made for; make it for more")]
pub struct BudgetError {
    /// Places there are.
    pub places: usize,
    /// Queues that share them.
    pub shares: usize,
}

/// One hardware queue's share in a budget.
///
/// Owned by the queue. Dropping it with slots in use is a bug and panics: a request still uses them at the device.
pub struct BudgetShare {
    books: Arc<Books>,
    member: usize,
    /// Places taken and not given back.
    held: usize,
    /// We have said that we lack some.
    waiting: bool,
    /// Members to be woken.
    calls: Vec<usize>,
}

#[derive(Debug)]
struct Books {
    /// Free slots, and the `SHORT` bit.
    word: CachePadded<AtomicU64>,
    ledger: Baton<Ledger>,
    members: Box<[BudgetMember]>,
    places: usize,
}

#[derive(Debug)]
struct Ledger {
    /// Share that is served next.
    next: usize,
}

struct BudgetMember {
    /// Slots that its share lacks, written by the share; and slots granted, written by the ledger's holder, which
    /// reduces the other by as many.
    word: AtomicU64,
    /// Waker of the share's queue. Locked to join and leave and, for the time of a copy, to wake.
    waker: Mutex<Option<Arc<dyn Wake>>>,
}

impl Budget {
    /// Places that a budget may have.
    pub const PLACES_MAX: usize = u32::MAX as usize;

    /// A budget of `places` slots for up to `shares_max` queues.
    ///
    /// # Panics
    /// If `places` or `shares_max` is zero, or `places` exceeds [`Budget::PLACES_MAX`]: budgets are checked where they
    /// are configured.
    pub fn new(places: usize, shares_max: usize) -> Budget {
        assert!((1..=Budget::PLACES_MAX).contains(&places) && shares_max > 0, "a budget of {places} for {shares_max}");
        let member = |_| BudgetMember { word: AtomicU64::new(0), waker: Mutex::new(None) };
        let word = CachePadded(AtomicU64::new((places as u64) << 1));
        let members = (0..shares_max).map(member).collect();
        Budget { books: Arc::new(Books { word, ledger: Baton::new(Ledger { next: 0 }), members, places }) }
    }

    /// Number of slots.
    pub fn places(&self) -> usize {
        self.books.places
    }

    /// Number of free slots, for inspection.
    pub fn free(&self) -> usize {
        (self.books.word.0.load(Ordering::Relaxed) >> 1) as usize
    }

    /// A share for one more queue; `waker` wakes the thread that runs this queue.
    ///
    /// # Errors
    /// As many queues as the budget was made for have joined already.
    pub fn join(&self, waker: Arc<dyn Wake>) -> Result<BudgetShare, BudgetError> {
        let Books { members, places, .. } = &*self.books;
        for (member, place) in members.iter().enumerate() {
            let mut held = place.waker.lock().unwrap_or_else(PoisonError::into_inner);
            if held.is_none() {
                *held = Some(waker);
                let calls = Vec::with_capacity(members.len());
                return Ok(BudgetShare { books: Arc::clone(&self.books), member, held: 0, waiting: false, calls });
            }
        }
        Err(BudgetError { places: *places, shares: members.len() })
    }
}

impl BudgetShare {
    /// Takes up to `wanted` slots and returns how many it took. If that is less, the share waits for the rest: it is
    /// woken when slots are granted, and then takes again, with a new number. A share that wants 0 does not wait.
    #[inline]
    pub fn take(&mut self, wanted: usize) -> usize {
        let mut took = 0;
        if !self.waiting {
            took = self.books.take_open(wanted);
            if took == wanted {
                self.held += took;
                return took;
            }
        }
        took += self.take_short(wanted - took);
        self.held += took;
        took
    }

    /// Returns slots.
    ///
    /// # Panics
    /// If the share has not taken as many.
    #[inline]
    pub fn give(&mut self, count: usize) {
        assert!(count <= self.held, "{count} places were given back of {} taken", self.held);
        self.held -= count;
        if self.books.give(count as u64) {
            self.books.deal(None, &mut self.calls);
        }
    }

    /// Places taken and not given back.
    #[inline]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Whether the share came out short when it last took, and will be woken.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        self.waiting
    }

    #[inline(never)]
    fn take_short(&mut self, wanted: usize) -> usize {
        let wanted = wanted.min(Budget::PLACES_MAX) as u64;
        let mut took = self.settle(wanted);
        if took < wanted {
            // Recorded before the mark is set, see the module's head. Release, for a giver that meets the mark;
            // acquire, for slots returned before.
            self.books.word.0.fetch_or(SHORT, Ordering::AcqRel);
            self.books.deal(Some(self.member), &mut self.calls);
            took += self.settle(wanted - took);
        }
        self.waiting = took < wanted;
        took as usize
    }

    /// Takes granted slots, up to `wanted`, and records the number still lacking. Excess slots are returned.
    fn settle(&mut self, wanted: u64) -> u64 {
        let member = &self.books.members[self.member].word;
        let mut was = member.load(Ordering::Relaxed);
        let dealt = loop {
            let dealt = was >> DEALT_SHIFT;
            // Acquire pairs with the release in `BudgetMember::deal`. Release, so that the ledger's holder sees the
            // word as we left it; the baton guarantees that it looks.
            match member.compare_exchange(was, wanted.saturating_sub(dealt), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break dealt,
                Err(now) => was = now,
            }
        };
        if dealt > wanted && self.books.give(dealt - wanted) {
            self.books.deal(Some(self.member), &mut self.calls);
        }
        dealt.min(wanted)
    }
}

impl Books {
    /// Takes up to `wanted` slots that are free for all.
    #[inline]
    fn take_open(&self, wanted: usize) -> usize {
        let mut was = self.word.0.load(Ordering::Relaxed);
        loop {
            let free = if was & SHORT == 0 { was >> 1 } else { 0 };
            let took = free.min(wanted as u64);
            if took == 0 {
                return 0;
            }
            // Acquire pairs with the release in `give`: the use of a slot comes after its previous use.
            match self.word.0.compare_exchange_weak(was, was - (took << 1), Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return took as usize,
                Err(now) => was = now,
            }
        }
    }

    /// Returns slots to the word. True if a share waits, and the slots must be distributed.
    #[inline]
    fn give(&self, count: u64) -> bool {
        // Acquire: a thread that goes to the ledger because of the mark comes after the one that set it.
        count > 0 && self.word.0.fetch_add(count << 1, Ordering::AcqRel) & SHORT != 0
    }

    /// Distributes free slots to waiting shares, unless another thread is doing so, which then does it again. Wakes the
    /// shares, except `me`.
    #[inline(never)]
    fn deal(&self, me: Option<usize>, calls: &mut Vec<usize>) {
        let Some(mut ledger) = self.ledger.take() else { return };
        loop {
            ledger.take_pending();
            self.deal_out(&mut ledger, me, calls);
            match ledger.give_back() {
                Ok(()) => break,
                Err(still) => ledger = still,
            }
        }
        // Only now, since a wake-up may take its time.
        for member in calls.drain(..) {
            let waker = self.members[member].waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn deal_out(&self, ledger: &mut Ledger, me: Option<usize>, calls: &mut Vec<usize>) {
        loop {
            let waiting = self.members.iter().filter(|member| member.is_lacking()).count() as u64;
            if waiting == 0 {
                self.word.0.fetch_and(!SHORT, Ordering::AcqRel);
                return;
            }
            let mut places = self.word.0.swap(SHORT, Ordering::AcqRel) >> 1;
            if places == 0 {
                return;
            }
            let lot = places.div_ceil(waiting).max(LOT);
            let first = ledger.next;
            for step in 0..self.members.len() {
                let member = (first + step) % self.members.len();
                if places == 0 {
                    break;
                }
                let dealt = self.members[member].deal(lot.min(places));
                if dealt > 0 {
                    places -= dealt;
                    ledger.next = member + 1;
                    if me != Some(member) && !calls.contains(&member) {
                        calls.push(member);
                    }
                }
            }
            self.word.0.fetch_add(places << 1, Ordering::AcqRel);
        }
    }
}

impl BudgetMember {
    fn is_lacking(&self) -> bool {
        self.word.load(Ordering::Acquire) & LACKING_MASK != 0
    }

    /// Grants up to `places` slots; returns how many were lacking.
    fn deal(&self, places: u64) -> u64 {
        let mut was = self.word.load(Ordering::Relaxed);
        loop {
            let dealt = places.min(was & LACKING_MASK);
            if dealt == 0 {
                return 0;
            }
            let now = was - dealt + (dealt << DEALT_SHIFT);
            // Pairs with the exchange in `BudgetShare::settle`.
            match self.word.compare_exchange(was, now, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return dealt,
                Err(other) => was = other,
            }
        }
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.settle(0);
        // During a panic's unwinding no other code will return them.
        if self.books.give(held as u64) {
            self.books.deal(None, &mut self.calls);
        }
        *self.books.members[self.member].waker.lock().unwrap_or_else(PoisonError::into_inner) = None;
        assert!(held == 0 || std::thread::panicking(), "a share of a budget went with {held} places");
    }
}

impl std::fmt::Debug for BudgetShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BudgetShare")
            .field("member", &self.member)
            .field("held", &self.held)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for BudgetMember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("word", &self.word).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use proptest::prelude::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn join(budget: &Budget, count: usize) -> (Vec<BudgetShare>, Vec<Arc<Count>>) {
        let wakers: Vec<Arc<Count>> = (0..count).map(|_| Arc::default()).collect();
        let share = |waker: &Arc<Count>| budget.join(Arc::clone(waker) as Arc<dyn Wake>).unwrap();
        (wakers.iter().map(share).collect(), wakers)
    }

    fn calls(wakers: &[Arc<Count>]) -> Vec<usize> {
        wakers.iter().map(|waker| waker.0.swap(0, Ordering::Relaxed)).collect()
    }

    #[test]
    fn with_enough_for_all_nobody_is_woken() {
        let budget = Budget::new(8, 2);
        let (mut shares, wakers) = join(&budget, 2);
        assert_eq!((shares[0].take(4), shares[1].take(4), budget.free()), (4, 4, 0));
        shares[0].give(4);
        assert_eq!((shares[1].take(2), budget.free(), calls(&wakers)), (2, 2, vec![0, 0]));
        shares[1].give(6);
        assert_eq!(budget.free(), 8);
    }

    #[test]
    fn who_came_out_short_is_woken_and_nobody_passes_by() {
        let budget = Budget::new(2, 3);
        let (mut shares, wakers) = join(&budget, 3);
        assert_eq!((shares[0].take(2), shares[1].take(1)), (2, 0));
        shares[0].give(1);
        assert_eq!(calls(&wakers), [0, 1, 0]);
        assert_eq!(shares[2].take(1), 0, "the place was dealt to the one who waited");
        assert_eq!(shares[1].take(1), 1);
        shares[1].give(1);
        assert_eq!(calls(&wakers), [0, 0, 1]);
        assert_eq!(shares[2].take(1), 1);
        shares[2].give(1);
        shares[0].give(1);
        assert_eq!((budget.free(), shares.iter().any(BudgetShare::is_waiting)), (2, false));
    }

    #[test]
    fn places_are_dealt_in_turn() {
        let budget = Budget::new(8, 4);
        let (mut shares, wakers) = join(&budget, 4);
        assert_eq!(shares[0].take(8), 8);
        (1..4).for_each(|share| assert_eq!(shares[share].take(100), 0));
        shares[0].give(4);
        assert_eq!(calls(&wakers), [0, 1, 0, 0], "one lot is not worth three wake-ups");
        assert_eq!(shares[0].take(100), 0);
        shares[0].give(4);
        assert_eq!(calls(&wakers), [0, 0, 1, 0]);
        assert_eq!((shares[1].take(100), shares[2].take(100)), (4, 4));
        shares[1].give(4);
        assert_eq!(calls(&wakers), [0, 0, 0, 1]);
        shares[2].give(4);
        assert_eq!(calls(&wakers), [1, 0, 0, 0]);
        assert_eq!((shares[3].take(0), shares[0].take(4)), (0, 4));
        shares[0].give(4);
    }

    #[test]
    fn who_wants_no_more_gives_back_what_it_was_dealt() {
        let budget = Budget::new(4, 2);
        let (mut shares, wakers) = join(&budget, 2);
        assert_eq!((shares[0].take(4), shares[1].take(4)), (4, 0));
        shares[0].give(4);
        assert_eq!((calls(&wakers), budget.free()), (vec![0, 1], 0));
        assert_eq!((shares[1].take(0), budget.free(), shares[1].is_waiting()), (0, 4, false));
    }

    #[test]
    fn a_share_that_goes_leaves_nothing_behind() {
        let budget = Budget::new(4, 2);
        let (mut shares, wakers) = join(&budget, 2);
        assert_eq!((shares[0].take(4), shares[1].take(3)), (4, 0));
        shares[0].give(2);
        drop(shares.pop());
        assert_eq!((budget.free(), calls(&wakers)), (2, vec![0, 1]));
        assert_eq!(shares[0].take(2), 2, "nobody waits any more");
        shares[0].give(4);
        let (more, _) = join(&budget, 1);
        let full = budget.join(Arc::clone(&wakers[0]) as Arc<dyn Wake>).unwrap_err();
        assert_eq!(full, BudgetError { places: 4, shares: 2 });
        drop((more, shares));
        assert_eq!(join(&budget, 2).0.len(), 2);
    }

    #[test]
    #[should_panic(expected = "went with 1 places")]
    fn a_share_that_goes_with_places_is_loud() {
        let (mut shares, _) = join(&Budget::new(1, 1), 1);
        shares[0].take(1);
    }

    proptest! {
        /// For any order of calls the number of slots is constant, and a waiting share is woken when slots are
        /// returned.
        #[test]
        fn places_are_neither_made_nor_lost(
            places in 1_usize..12,
            steps in proptest::collection::vec((0_usize..4, 0_usize..8, any::<bool>()), 0..200),
        ) {
            let budget = Budget::new(places, 4);
            let (mut shares, wakers) = join(&budget, 4);
            for (share, count, takes) in steps {
                if takes {
                    let took = shares[share].take(count);
                    prop_assert!(took <= count);
                    prop_assert_eq!(shares[share].is_waiting(), took < count);
                } else {
                    let count = count.min(shares[share].held());
                    let waited = shares.iter().any(BudgetShare::is_waiting) && budget.free() == 0;
                    let dealt_before = wakers.iter().any(|waker| waker.0.load(Ordering::Relaxed) > 0);
                    shares[share].give(count);
                    let called = wakers.iter().any(|waker| waker.0.load(Ordering::Relaxed) > 0);
                    prop_assert!(!waited || count == 0 || called || dealt_before);
                }
                prop_assert!(shares.iter().map(BudgetShare::held).sum::<usize>() + budget.free() <= places);
            }
            for share in &mut shares {
                share.take(0);
                share.give(share.held());
            }
            prop_assert_eq!(budget.free(), places);
        }
    }
}
