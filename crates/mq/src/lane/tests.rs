//! Turns, parking, leaving: the lane over scripted pollers.

use super::*;

#[derive(Default)]
struct Fake {
    work: u32,
    comes_while_arming: bool,
    armed: bool,
    over: bool,
    due: Option<u64>,
    leaving: bool,
    turn_bytes: u64,
    runs: u32,
}

impl Poller<()> for Fake {
    fn leave(&mut self, (): &mut ()) -> bool {
        self.leaving = true;
        self.work == 0
    }
    fn stay(&mut self) {
        self.leaving = false;
    }
    fn set_turn_bytes(&mut self, bytes: u64) {
        self.turn_bytes = bytes;
    }
    fn run_once(&mut self, (): &mut (), _: u64) -> PollerState {
        assert!(!self.armed, "run while armed");
        self.runs += 1;
        if self.work == 0 {
            return PollerState::Idle;
        }
        self.work -= 1;
        PollerState::Busy
    }
    fn arm(&mut self) -> bool {
        self.armed = true;
        std::mem::take(&mut self.comes_while_arming)
    }
    fn disarm(&mut self) {
        self.armed = false;
    }
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn deadline_ns(&self) -> Option<u64> {
        self.due
    }
    fn is_over(&self) -> bool {
        self.over
    }
}

fn waker() -> Arc<dyn Wake> {
    struct Nobody;
    impl Wake for Nobody {
        fn wake(&self) {}
    }
    Arc::new(Nobody)
}

fn lane(pollers: Vec<Fake>, spin_ns: u64) -> Lane<Fake> {
    let mut lane = Lane::new(IdlePolicy::up_to(spin_ns), CpuUse::default);
    for (name, poller) in pollers.into_iter().enumerate() {
        lane.admit(&mut (), &waker(), name as u32, poller);
    }
    lane
}

#[test]
fn a_lane_spins_for_a_bounded_time_after_work_then_sleeps() {
    let mut lane = lane(vec![Fake { work: 1, ..Fake::default() }, Fake::default()], 100);
    assert_eq!(lane.turn(&mut (), 1000), Idle::Turn);
    assert_eq!(lane.turn(&mut (), 1099), Idle::Turn);
    assert_eq!(lane.turn(&mut (), 1100), Idle::Sleep(None));
    assert!(lane.pollers().all(|s| s.armed));
    lane.turn(&mut (), 1100);
}

#[test]
fn turns_are_timed_in_which_something_moved() {
    let mut lane = lane(vec![Fake { work: 2, ..Fake::default() }], 0);
    for now_ns in [1000, 1300, 1500, 9000, 9900] {
        lane.turn(&mut (), now_ns);
    }
    let turns = lane.turns().snapshot();
    assert_eq!((turns.latency.samples(), turns.sum_ns, turns.max_ns), (2, 500, 300));
}

#[test]
fn work_that_comes_while_arming_is_not_slept_over() {
    let fakes = vec![Fake { comes_while_arming: true, ..Fake::default() }, Fake { due: Some(77), ..Fake::default() }];
    let mut lane = lane(fakes, 0);
    assert_eq!(lane.turn(&mut (), 5), Idle::Turn);
    assert_eq!(lane.turn(&mut (), 6), Idle::Sleep(Some(77)));
}

#[test]
fn a_lane_ends_when_all_its_pollers_are_over() {
    let mut lane = lane(vec![Fake { over: true, ..Fake::default() }], 50_000);
    assert_eq!(lane.turn(&mut (), 5), Idle::End);
}

#[test]
fn a_poller_that_is_to_leave_parts_once_at_rest_and_unarmed() {
    let mut lane = lane(vec![Fake { work: 2, ..Fake::default() }, Fake::default()], 0);
    assert!(lane.ask_to_leave::<()>(0) && lane.ask_to_leave::<()>(0) && !lane.ask_to_leave::<()>(7));
    assert_eq!(lane.turn(&mut (), 1), Idle::Turn);
    assert!(lane.part(&mut ()).is_none(), "parted with work in hand");
    lane.turn(&mut (), 2);
    assert_eq!(lane.turn(&mut (), 3), Idle::Sleep(None));
    let (_, name, poller) = lane.part(&mut ()).unwrap();
    assert!(name == 0 && !poller.armed && lane.pollers().count() == 1);
    assert!(lane.part(&mut ()).is_none(), "the other one was not asked");
    lane.turn(&mut (), 4);
}

/// Turns until a time, every 10 us.
fn turn_until(lane: &mut Lane<Fake>, from_ns: u64, to_ns: u64) {
    (from_ns..=to_ns).step_by(10_000).for_each(|now_ns| {
        lane.turn(&mut (), now_ns);
    });
}

fn fake(lane: &mut Lane<Fake>, slot: Slot) -> &mut Fake {
    &mut resident_mut(&mut lane.slots, slot).poller
}

fn parked(lane: &mut Lane<Fake>) -> Vec<Slot> {
    std::iter::from_fn(|| lane.next_parked()).collect()
}

#[test]
fn an_idle_poller_is_parked_and_costs_no_turn() {
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let mut lane = lane(vec![Fake::default(), busy, Fake::default()], 0);
    turn_until(&mut lane, 0, 50_000);
    assert!(parked(&mut lane).is_empty(), "parked early");
    turn_until(&mut lane, 60_000, 60_000);
    assert_eq!(parked(&mut lane), [2, 0]);
    assert!(fake(&mut lane, 0).armed && fake(&mut lane, 2).armed && !fake(&mut lane, 1).armed);
    let runs = fake(&mut lane, 0).runs;
    turn_until(&mut lane, 70_000, 500_000);
    assert_eq!(fake(&mut lane, 0).runs, runs);
}

#[test]
fn an_eventfd_brings_one_poller_back_and_a_call_all() {
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let mut lane = lane(vec![Fake::default(), Fake::default(), busy], 0);
    turn_until(&mut lane, 0, 100_000);
    assert_eq!(parked(&mut lane).len(), 2);
    lane.unpark::<()>(1);
    lane.unpark::<()>(1);
    assert_eq!(lane.active(), [2, 1]);
    assert!(!fake(&mut lane, 1).armed && fake(&mut lane, 0).armed);
    lane.unpark_all::<()>();
    turn_until(&mut lane, 110_000, 110_000);
    assert_eq!(lane.active().len(), 3);
    turn_until(&mut lane, 120_000, 200_000);
    assert_eq!(parked(&mut lane).len(), 2, "they are parked again");
}

#[test]
fn a_poller_that_finds_work_as_it_is_parked_goes_on() {
    let late = Fake { comes_while_arming: true, ..Fake::default() };
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let mut lane = lane(vec![late, busy], 0);
    turn_until(&mut lane, 0, 60_000);
    assert!(parked(&mut lane).is_empty() && !fake(&mut lane, 0).armed);
    turn_until(&mut lane, 70_000, 200_000);
    assert_eq!(parked(&mut lane), [0]);
}

#[test]
fn work_that_is_found_by_parking_is_not_slept_over() {
    let mut lane = lane(vec![Fake::default(), Fake::default()], 0);
    assert_eq!(lane.turn(&mut (), 0), Idle::Sleep(None));
    fake(&mut lane, 0).comes_while_arming = true;
    let runs = fake(&mut lane, 0).runs;
    // Taken in by the first look, it is not there at the second.
    assert_eq!(lane.turn(&mut (), 70_000), Idle::Turn);
    assert_eq!(lane.turn(&mut (), 70_001), Idle::Sleep(None));
    assert_eq!(fake(&mut lane, 0).runs, runs + 2);
}

#[test]
fn a_parked_poller_with_a_deadline_has_one_round_when_it_is_due() {
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let mut lane = lane(vec![Fake { due: Some(1_000_000), ..Fake::default() }, busy], 0);
    turn_until(&mut lane, 0, 60_000);
    assert_eq!(parked(&mut lane), [0]);
    let runs = fake(&mut lane, 0).runs;
    turn_until(&mut lane, 70_000, 990_000);
    assert_eq!(fake(&mut lane, 0).runs, runs);
    fake(&mut lane, 0).due = Some(1_500_000);
    turn_until(&mut lane, 1_000_000, 1_490_000);
    assert_eq!((fake(&mut lane, 0).runs, fake(&mut lane, 0).armed, lane.active()), (runs + 1, true, [1].as_slice()));
    fake(&mut lane, 0).work = 2;
    turn_until(&mut lane, 1_500_000, 1_520_000);
    assert_eq!((fake(&mut lane, 0).work, lane.active()), (0, [1, 0].as_slice()));
    assert!(!fake(&mut lane, 0).armed);
}

#[test]
fn a_sleep_ends_when_a_parked_poller_is_due() {
    let due = |due| Fake { due: Some(due), ..Fake::default() };
    let mut lane = lane(vec![due(1_000_000), due(1_000_000), Fake { work: 8, ..Fake::default() }], 0);
    turn_until(&mut lane, 0, 70_000);
    assert_eq!(parked(&mut lane).len(), 2);
    turn_until(&mut lane, 80_000, 190_000);
    // One wake-up for both.
    assert_eq!(lane.turn(&mut (), 200_000), Idle::Sleep(Some(1_000_000)));
    for slot in [0, 1] {
        fake(&mut lane, slot).due = None;
    }
    assert_eq!(lane.turn(&mut (), 1_000_000), Idle::Sleep(None));
    // Its earlier rounds are outdated.
    lane.unpark::<()>(0);
    assert_eq!(lane.turn(&mut (), 2_000_000), Idle::Sleep(None));
}

#[test]
fn many_due_pollers_do_not_delay_the_active_ones() {
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let idle = (0..1000).map(|_| Fake { due: Some(1_000_000), ..Fake::default() });
    let mut lane = lane(std::iter::once(busy).chain(idle).collect(), 0);
    turn_until(&mut lane, 0, 60_000);
    assert_eq!(parked(&mut lane).len(), 1000);
    for slot in 1..=1000 {
        fake(&mut lane, slot).due = Some(9_000_000);
    }
    let runs = |lane: &Lane<Fake>| lane.pollers().skip(1).map(|poller| poller.runs).sum::<u32>();
    let mut before = runs(&lane);
    for _ in 0..250 {
        lane.turn(&mut (), 1_000_000);
        let after = runs(&lane);
        assert_eq!(after - std::mem::replace(&mut before, after), 4);
    }
    lane.turn(&mut (), 1_000_000);
    assert_eq!((runs(&lane), lane.active()), (before, [0].as_slice()));
    assert!(lane.due.capacity() < 4096 && lane.due.len() == 1000);
}

#[test]
fn a_poller_with_a_due_deadline_and_the_latest_busy_one_are_not_parked() {
    let due = Fake { due: Some(1), ..Fake::default() };
    let mut lane = lane(vec![Fake::default(), due, Fake { work: 1, ..Fake::default() }], u64::MAX);
    // Without an end to spinning the upper bound holds.
    turn_until(&mut lane, 0, 1_000_000);
    assert!(parked(&mut lane).is_empty());
    turn_until(&mut lane, 1_010_000, 1_010_000);
    assert_eq!((parked(&mut lane).as_slice(), lane.active()), ([0].as_slice(), [1, 2].as_slice()));
    fake(&mut lane, 1).due = None;
    turn_until(&mut lane, 1_020_000, 4_000_000);
    assert_eq!(lane.active().len(), 1, "one stays");
}

#[test]
fn a_lane_ends_when_parked_pollers_and_active_ones_are_over() {
    let over = || Fake { over: true, ..Fake::default() };
    let mut lane = lane(vec![over(), Fake::default(), over()], 0);
    turn_until(&mut lane, 100_000, 100_000);
    assert_eq!(parked(&mut lane), [1, 0]);
    assert_ne!(lane.turn(&mut (), 300_000), Idle::End, "one is not over");
    fake(&mut lane, 1).over = true;
    lane.unpark_all::<()>();
    assert_eq!(lane.turn(&mut (), 400_000), Idle::End);
}

#[test]
fn a_slot_is_given_again_and_its_new_poller_turns() {
    let mut lane = lane(vec![Fake::default(), Fake { work: u32::MAX, ..Fake::default() }], 0);
    turn_until(&mut lane, 0, 100_000);
    assert!(lane.ask_to_leave::<()>(0) && lane.part(&mut ()).is_some());
    lane.admit(&mut (), &waker(), 9, Fake { work: 1, ..Fake::default() });
    // A late event of the previous poller's eventfd.
    lane.unpark::<()>(0);
    lane.unpark::<()>(7);
    turn_until(&mut lane, 110_000, 110_000);
    assert_eq!((fake(&mut lane, 0).work, lane.active()), (0, [1, 0].as_slice()));
}

#[test]
fn a_parked_poller_leaves_when_it_is_asked_to() {
    let busy = Fake { work: u32::MAX, ..Fake::default() };
    let mut lane = lane(vec![Fake::default(), busy], 0);
    turn_until(&mut lane, 0, 100_000);
    assert_eq!(parked(&mut lane), [0]);
    assert!(lane.ask_to_leave::<()>(0));
    let (slot, name, poller) = lane.part(&mut ()).unwrap();
    assert!(slot == 0 && name == 0 && !poller.armed);
    lane.turn(&mut (), 110_000);
}

#[test]
fn a_sleep_keeps_parked_pollers_armed() {
    let mut lane = lane(vec![Fake::default(), Fake { work: 8, ..Fake::default() }], 0);
    turn_until(&mut lane, 0, 70_000);
    assert_eq!(parked(&mut lane), [0]);
    assert_eq!(lane.turn(&mut (), 200_000), Idle::Sleep(None));
    assert!(fake(&mut lane, 0).armed && fake(&mut lane, 1).armed);
    assert_eq!(lane.turn(&mut (), 300_000), Idle::Sleep(None));
    // Woken from the sleep by the eventfd of the parked one.
    lane.unpark::<()>(0);
    fake(&mut lane, 0).work = 1;
    assert_eq!(lane.turn(&mut (), 400_000), Idle::Turn);
    assert!(!fake(&mut lane, 0).armed);
}

fn lane_of_busy_and_idle(busy: usize, idle: usize) -> Lane<Fake> {
    let busy = (0..busy).map(|_| Fake { work: u32::MAX, ..Fake::default() });
    lane(busy.chain((0..idle).map(|_| Fake::default())).collect(), 0)
}

#[test]
fn pollers_share_what_a_turn_may_copy() {
    let shares = |count: usize| {
        let lane = lane((0..count).map(|_| Fake::default()).collect(), 0);
        let shares: Vec<_> = lane.pollers().map(|poller| poller.turn_bytes).collect();
        assert!(shares.iter().all(|share| *share == shares[0]), "{shares:?}");
        shares[0]
    };
    assert_eq!([1, 8, 16, 32, 512].map(shares), [512 << 10, 512 << 10, 256 << 10, 128 << 10, 128 << 10]);
    let mut lane = lane((0..16).map(|_| Fake::default()).collect(), 0);
    for name in 0..8 {
        assert!(lane.ask_to_leave::<()>(name) && lane.part(&mut ()).is_some());
    }
    assert!(lane.pollers().all(|poller| poller.turn_bytes == 512 << 10), "those that left have no share");
    let mut lane = lane_of_busy_and_idle(9, 16);
    turn_until(&mut lane, 0, 100_000);
    assert_eq!(parked(&mut lane).len(), 16);
    assert_eq!(fake(&mut lane, 0).turn_bytes, (4 << 20) / 9, "those that are parked have no share");
    lane.unpark::<()>(24);
    let told = [fake(&mut lane, 0).turn_bytes, fake(&mut lane, 24).turn_bytes];
    assert_eq!(told, [(4 << 20) / 10; 2]);
}

#[test]
fn a_poller_that_may_stay_after_all_goes_on() {
    let mut lane = lane(vec![Fake { work: 9, ..Fake::default() }], 0);
    lane.ask_to_leave::<()>(0);
    lane.turn(&mut (), 1);
    assert!(lane.part(&mut ()).is_none() && lane.pollers().all(|s| s.leaving));
    lane.ask_to_stay::<()>(0);
    assert!(lane.pollers().all(|s| !s.leaving));
    for now_ns in 2..99 {
        lane.turn(&mut (), now_ns);
        assert!(lane.part(&mut ()).is_none());
    }
}
