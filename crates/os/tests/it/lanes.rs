//! Lanes that come and go under load: pollers move from one to another, no bio is lost, and a lane keeps nothing of a
//! poller that has left.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blkyard_mq::{IdlePolicy, Poller, PollerState, QueueMap, Wake};
use blkyard_os::{FileConfig, Holdings, LaneConfig, LaneError, LaneThread, Lanes, Ring, RingConfig};
use blkyard_sys::EventFd;

use crate::common::mover::{BLOCKS, Mover, Tally};
use crate::common::{folders, image, open};

const PATIENCE: Duration = Duration::from_secs(30);

fn lane(number: usize) -> LaneConfig {
    LaneConfig { name: format!("lane{number}"), policy: IdlePolicy::up_to(5_000), ..LaneConfig::default() }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Pollers on a file, each with a separate tally.
fn movers(lanes: &mut Lanes<Mover>, folder: &tempfile::TempDir, count: usize) -> Vec<Arc<Tally>> {
    let path = image(folder, count as u64 * BLOCKS * 4096);
    let device = Arc::new(open(FileConfig::new(&path)));
    let tallies: Vec<Arc<Tally>> = (0..count).map(|_| Arc::default()).collect();
    let map = QueueMap::even(count, lanes.threads().len());
    for (number, tally) in tallies.iter().enumerate() {
        let (device, tally) = (Arc::clone(&device), Arc::clone(tally));
        lanes.admit(map.queue_of(number), move || Mover::new(&device, number as u64, &tally)).unwrap();
    }
    tallies
}

fn ended(tallies: &[Arc<Tally>]) -> Vec<u64> {
    tallies.iter().map(|tally| tally.ended.load(SeqCst)).collect()
}

#[test]
fn queues_move_between_lanes_under_load_and_no_request_is_lost_repeated_or_wrong() {
    const QUEUES: usize = 6;
    for folder in folders() {
        let mut lanes = Lanes::start(2, lane).unwrap();
        let tallies = movers(&mut lanes, &folder, QUEUES);
        let (mut moves, mut longest) = (0, Vec::new());
        for round in 0.. {
            let count = [4, 1, 3, 6, 2, 1, 5][round % 7];
            let map = QueueMap::even(QUEUES, count);
            // Now and then the other way round.
            let place = |poller| if round % 3 == 2 { count - 1 - map.queue_of(poller) } else { map.queue_of(poller) };
            let before = ended(&tallies);
            let dealt = lanes.deal(count, place).unwrap();
            assert_eq!(lanes.threads().len(), count);
            assert!((0..QUEUES).all(|poller| lanes.places()[poller] == place(poller)));
            moves += dealt.count;
            longest.push(dealt.longest);
            until("all queues go on", || ended(&tallies).iter().zip(&before).all(|(now, before)| now > before));
            if moves > 200 {
                break;
            }
        }
        let entered: u64 = tallies.iter().map(|tally| tally.entered.load(SeqCst)).sum();
        assert_eq!(entered as usize, QUEUES + moves, "only what has to move does");
        longest.sort_unstable();
        println!(
            "{moves} moves; the longest of a deal: median {:?}, all {:?}",
            longest[longest.len() / 2],
            longest.last()
        );
        // All on one lane, then all on the other: the first keeps nothing of them.
        lanes.deal(2, |_| 0).unwrap();
        let all = Holdings { inboxes: QUEUES as u32, files: 1, regions: QUEUES as u32, signals: 0 };
        assert_eq!(lanes.threads()[0].ring().holdings(), all);
        lanes.deal(2, |_| 1).unwrap();
        assert_eq!(lanes.threads()[0].ring().holdings(), Holdings::default());
        assert_eq!(lanes.threads()[1].ring().holdings(), all);
        assert!(lanes.threads().iter().all(|lane| lane.ring().strays() == 0));
        tallies.iter().for_each(|tally| tally.over.store(true, SeqCst));
        lanes.threads().iter().for_each(|lane| lane.waker().wake());
        lanes.join().unwrap();
    }
}

/// Answers requests; sleeps until its eventfd is signalled.
struct Ringer {
    shared: Arc<Shared>,
    seen: u64,
    leaving: bool,
    /// Does not drain while this is set.
    restless: Arc<AtomicBool>,
}

struct Shared {
    eventfd: EventFd,
    asked: AtomicU64,
    answered: AtomicU64,
    eventfd_wanted: AtomicBool,
    over: AtomicBool,
    panics: AtomicBool,
    /// Its eventfd is not listened to.
    deaf: AtomicBool,
    /// It always has something to do.
    busy: AtomicBool,
    /// Its next turn waits for the other end to be dropped, and holds up its lane.
    blocks: Mutex<Option<Receiver<()>>>,
}

impl Shared {
    fn new() -> Arc<Shared> {
        Arc::new(Shared {
            eventfd: EventFd::new().unwrap(),
            asked: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            eventfd_wanted: AtomicBool::new(false),
            over: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            blocks: Mutex::default(),
        })
    }

    /// Asks, and rings if that is wanted, as a guest does.
    fn ask(&self, n: u64) {
        self.asked.store(n, SeqCst);
        if self.eventfd_wanted.load(SeqCst) {
            self.eventfd.signal();
        }
    }

    fn await_answer(&self, n: u64) {
        let start = Instant::now();
        while self.answered.load(SeqCst) < n {
            assert!(start.elapsed() < PATIENCE, "call {n} is slept through");
            std::thread::yield_now();
        }
    }
}

impl Poller<Ring> for Ringer {
    fn enter(&mut self, _ring: &mut Ring, _waker: &Arc<dyn Wake>) {
        self.leaving = false;
    }

    fn leave(&mut self, _ring: &mut Ring) -> bool {
        self.leaving = true;
        !self.restless.load(SeqCst)
    }

    fn stay(&mut self) {
        self.leaving = false;
    }

    fn run_once(&mut self, _ring: &mut Ring, _now_ns: u64) -> PollerState {
        assert!(!self.shared.panics.load(SeqCst), "a bug that the test planted");
        let blocks = self.shared.blocks.lock().unwrap().take();
        blocks.iter().for_each(|wait| assert!(wait.recv().is_err()));
        if self.shared.busy.load(SeqCst) {
            return PollerState::Busy;
        }
        let asked = self.shared.asked.load(SeqCst);
        if self.leaving || asked == self.seen {
            return PollerState::Idle;
        }
        self.seen = asked;
        self.shared.answered.store(asked, SeqCst);
        PollerState::Busy
    }

    fn arm(&mut self) -> bool {
        self.shared.eventfd_wanted.store(true, SeqCst);
        !self.leaving && self.shared.asked.load(SeqCst) != self.seen
    }

    fn disarm(&mut self) {
        self.shared.eventfd_wanted.store(false, SeqCst);
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.shared.deaf.load(SeqCst)).then(|| self.shared.eventfd.as_fd())
    }

    fn is_over(&self) -> bool {
        self.shared.over.load(SeqCst)
    }
}

impl Ringer {
    fn new(shared: &Arc<Shared>, restless: &Arc<AtomicBool>) -> Ringer {
        Ringer { shared: Arc::clone(shared), seen: 0, leaving: false, restless: Arc::clone(restless) }
    }
}

/// Two lanes with one poller.
fn ringing(shared: &Arc<Shared>, restless: &Arc<AtomicBool>) -> Lanes<Ringer> {
    let mut lanes = Lanes::start(2, |number| LaneConfig { policy: IdlePolicy::up_to(0), ..lane(number) }).unwrap();
    let (shared, restless) = (Arc::clone(shared), Arc::clone(restless));
    lanes.admit(0, move || Ringer::new(&shared, &restless)).unwrap();
    lanes
}

fn end(shared: &Shared, lanes: Lanes<Ringer>) -> Result<(), LaneError> {
    shared.over.store(true, SeqCst);
    lanes.threads().iter().for_each(|lane| lane.waker().wake());
    lanes.join()
}

/// A poller that has moved leaves its lane unarmed: its new lane polls it before it sleeps. But its old lane must not
/// reset the eventfd that signals the new one.
#[test]
fn no_eventfd_is_slept_through_while_its_poller_moves() {
    let shared = Shared::new();
    let mut lanes = ringing(&shared, &Arc::default());
    let ended = Arc::new(AtomicBool::new(false));
    let asking = std::thread::spawn({
        let (shared, ended) = (Arc::clone(&shared), Arc::clone(&ended));
        move || {
            let mut n = 0_u64;
            while !ended.load(SeqCst) {
                n += 1;
                shared.ask(n);
                shared.await_answer(n);
                (0..n.wrapping_mul(2_654_435_761) % 4000).for_each(|_| std::hint::spin_loop());
            }
            n
        }
    });
    for round in 0..300 {
        lanes.deal(2, |_| 1 - round % 2).unwrap();
        // Some of these find the new lane asleep, and the old one must not answer for it.
        let answered = shared.answered.load(SeqCst);
        shared.await_answer(answered + 20);
    }
    ended.store(true, SeqCst);
    assert!(asking.join().unwrap() >= 300 * 20);
    end(&shared, lanes).unwrap();
}

#[test]
fn a_lane_that_a_poller_has_left_does_not_answer_its_eventfd() {
    let shared = Shared::new();
    let mut lanes = ringing(&shared, &Arc::default());
    // One that stays keeps the old lane from sleeping, for before a sleep it listens to all eventfds anew.
    let stays = Shared::new();
    let poller = Arc::clone(&stays);
    lanes.admit(0, move || Ringer::new(&poller, &Arc::default())).unwrap();
    until("the lane listens", || shared.eventfd_wanted.load(SeqCst));
    std::thread::sleep(Duration::from_millis(20));
    stays.busy.store(true, SeqCst);
    lanes.threads()[0].waker().wake();
    // Its new lane does not poll it: a reset of the eventfd can only come from the old lane.
    shared.deaf.store(true, SeqCst);
    lanes.deal(2, |poller| usize::from(poller == 0)).unwrap();
    rustix::io::write(&shared.eventfd, &5_u64.to_ne_bytes()).unwrap();
    // Time for the old lane to handle all events.
    std::thread::sleep(Duration::from_millis(50));
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(&shared.eventfd, &mut count), Ok(8), "the old lane has made it quiet");
    assert_eq!(u64::from_ne_bytes(count), 5);
    stays.busy.store(false, SeqCst);
    stays.over.store(true, SeqCst);
    end(&shared, lanes).unwrap();
}

#[test]
fn a_poller_that_does_not_come_to_rest_stays_and_goes_on_and_may_move_later() {
    let shared = Shared::new();
    let restless = Arc::new(AtomicBool::new(true));
    let mut lanes = ringing(&shared, &restless);
    lanes.deal(1, |_| 0).unwrap();
    lanes.set_rest_max(Duration::from_millis(20));
    let error = lanes.deal(3, |_| 2).unwrap_err();
    lanes.set_rest_max(PATIENCE);
    assert!(matches!(error, LaneError::Restless { poller: 0, .. }), "{error}");
    assert!(error.to_string().contains("stays on lane lane0"), "{error}");
    // The lanes that were started for it are there; it lives where it did.
    assert_eq!((lanes.threads().len(), lanes.places()), (3, vec![0]));
    shared.ask(1);
    shared.await_answer(1);
    restless.store(false, SeqCst);
    lanes.deal(3, |_| 2).unwrap();
    shared.ask(2);
    shared.await_answer(2);
    // An empty lane goes when it is not wanted; the one with the poller cannot.
    restless.store(true, SeqCst);
    lanes.set_rest_max(Duration::from_millis(20));
    lanes.deal(1, |_| 0).unwrap_err();
    lanes.set_rest_max(PATIENCE);
    assert_eq!(lanes.threads().len(), 3);
    restless.store(false, SeqCst);
    lanes.deal(1, |_| 0).unwrap();
    assert_eq!(lanes.threads().len(), 1);
    shared.ask(3);
    shared.await_answer(3);
    end(&shared, lanes).unwrap();
}

/// A lane that never sleeps never arms its eventfd; one that does answers only after a signal.
#[test]
fn how_long_lanes_look_for_work_changes_while_they_run() {
    let shared = Shared::new();
    let mut lanes = ringing(&shared, &Arc::default());
    until("the lane sleeps", || shared.eventfd_wanted.load(SeqCst));
    lanes.set_policy(IdlePolicy::up_to(u64::MAX)).wait(PATIENCE).unwrap();
    for n in 1..50 {
        shared.asked.store(n, SeqCst);
        shared.await_answer(n);
        std::thread::sleep(Duration::from_millis(1));
    }
    lanes.set_policy(IdlePolicy::up_to(0)).wait(PATIENCE).unwrap();
    until("the lane sleeps again", || shared.eventfd_wanted.load(SeqCst));
    // One that is started later knows of it.
    lanes.set_policy(IdlePolicy::up_to(u64::MAX)).wait(PATIENCE).unwrap();
    lanes.deal(4, |_| 3).unwrap();
    for n in 50..100 {
        shared.asked.store(n, SeqCst);
        shared.await_answer(n);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(lanes.config(9).policy.spin_ns, u64::MAX);
    end(&shared, lanes).unwrap();
}

#[test]
fn a_lane_that_fell_over_gives_nothing_and_takes_nothing() {
    let shared = Shared::new();
    let mut lanes = ringing(&shared, &Arc::default());
    shared.panics.store(true, SeqCst);
    lanes.threads()[0].waker().wake();
    until("the lane ends", || lanes.threads()[0].is_finished());
    assert!(!lanes.threads()[1].is_finished(), "a lane without pollers waits for some");
    let error = lanes.deal(2, |_| 1).unwrap_err();
    assert!(matches!(&error, LaneError::Ended { name } if name == "lane0"), "{error}");
    let late = lanes.admit(0, || unreachable!("nobody is there to make it"));
    assert!(matches!(late, Err(LaneError::Ended { .. })));
    let end = lanes.join().unwrap_err();
    assert!(end.to_string().contains("lane lane0 panicked: a bug that the test planted"), "{end}");
}

#[test]
fn more_pollers_than_a_lane_can_listen_to_are_refused_before_anything_moves() {
    let shared = Shared::new();
    let mut lanes = ringing(&shared, &Arc::default());
    for number in 1..RingConfig::default().pollers_max as usize + 10 {
        let shared = Arc::clone(&shared);
        lanes.admit(number % 2, move || Ringer::new(&shared, &Arc::default())).unwrap();
    }
    let before = lanes.places();
    let error = lanes.deal(1, |_| 0).unwrap_err();
    assert!(error.to_string().contains("522 queues exceed its maximum of 512"), "{error}");
    assert!(lanes.places() == before && lanes.threads().len() == 2);
    assert!(lanes.threads().iter().all(|lane| !LaneThread::is_finished(lane)));
    end(&shared, lanes).unwrap();
}

#[test]
fn lane_that_is_held_up_is_waited_for_as_long_as_was_said() {
    let limit = Duration::from_millis(20);
    let (shared, moved, late) = (Shared::new(), Shared::new(), Shared::new());
    let mut lanes = ringing(&shared, &Arc::default());
    let ringer = |shared: &Arc<Shared>| {
        let shared = Arc::clone(shared);
        move || Ringer::new(&shared, &Arc::default())
    };
    let other = lanes.admit(1, ringer(&moved)).unwrap();
    let (go, wait) = channel();
    *shared.blocks.lock().unwrap() = Some(wait);
    lanes.threads()[0].waker().wake();
    until("the lane blocks", || shared.blocks.lock().unwrap().is_none());
    lanes.set_rest_max(limit);
    lanes.set_answer_max(limit);
    let is_held_up = |error: LaneError| {
        assert!(matches!(error, LaneError::Unresponsive { .. }), "{error}");
        assert!(error.to_string().contains("lane lane0: it did not respond"), "{error}");
    };
    is_held_up(lanes.set_policy(IdlePolicy::up_to(0)).wait(limit).unwrap_err());
    is_held_up(lanes.admit(0, ringer(&late)).unwrap_err());
    assert_eq!(Arc::strong_count(&late), 1, "it is not on its way any more");
    is_held_up(lanes.remove(0).err().unwrap());
    is_held_up(lanes.deal(2, |_| 1).unwrap_err());
    lanes.set_rest_max(PATIENCE);
    is_held_up(lanes.deal(2, |_| 0).unwrap_err());
    assert_eq!((lanes.place(0), lanes.place(other)), (Some(0), Some(1)), "both are where they were");
    moved.ask(1);
    moved.await_answer(1);
    drop(go);
    lanes.set_answer_max(PATIENCE);
    shared.ask(1);
    shared.await_answer(1);
    lanes.deal(1, |_| 0).unwrap();
    moved.ask(2);
    moved.await_answer(2);
    moved.over.store(true, SeqCst);
    end(&shared, lanes).unwrap();
}
