//! Lanes under loom: requests, commands and kicks reach a poller that sleeps, is parked, enters, or moves to another
//! lane.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mq --test loom_lane`
//!
//! Lane, mailbox, wake flag and lane's waker are the real ones; the model adds a thread's loop in the order of that of
//! `os`, without a ring, and a poller that answers commands. A lane sleeps on loom's `Notify`, which keeps a signal as
//! an eventfd does; an eventfd is a flag that the loop reaps. A missed command is an order of events in which all
//! sleep, and fails the model. Each names its bound on preemptions and prints its number of orders.
#![cfg(loom)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkyard_mem::{Mailbox, WakeFlag};
use blkyard_mq::{CpuUse, Idle, IdlePolicy, Lane, LaneWaker, Poller, PollerState, Wake};
use loom::sync::Notify;
use loom::sync::atomic::{AtomicBool, fence};
use loom::thread;

/// Wakes a thread of the model.
struct Waker {
    flag: WakeFlag,
    signal: Notify,
}

impl Waker {
    fn new() -> Arc<Waker> {
        Arc::new(Waker { flag: WakeFlag::default(), signal: Notify::new() })
    }

    fn sleep(&self) {
        if self.flag.prepare_wait() {
            self.signal.wait();
            self.flag.finish_wait();
        }
    }
}

impl Wake for Waker {
    fn wake(&self) {
        self.flag.wake(|| self.signal.notify());
    }
}

/// One from each sender, so that a later one cannot hide a lost wake-up: the poller ends with the last.
struct Answer;

/// State shared by a queue and the control path.
struct Shared {
    mailbox: Mailbox<Answer>,
    waker: LaneWaker,
    /// Number of senders.
    senders: usize,
    /// Not modelled: checked at the end.
    answered: AtomicUsize,
    guest: Guest,
}

/// State shared by a virtqueue and its driver.
#[derive(Default)]
struct Guest {
    published: AtomicBool,
    kick_wanted: AtomicBool,
    /// Its kick: signalled, and not reaped.
    eventfd: AtomicBool,
}

impl Guest {
    /// Publishes an I/O and kicks if that is wanted, as virtio has it.
    fn submit(&self, lane: &Waker) {
        self.published.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.kick_wanted.load(Ordering::Relaxed) {
            self.eventfd.swap(true, Ordering::Release);
            lane.signal.notify();
        }
    }
}

impl Shared {
    fn new(senders: usize) -> Arc<Shared> {
        let (mailbox, waker, guest) = (Mailbox::default(), LaneWaker::default(), Guest::default());
        Arc::new(Shared { mailbox, waker, senders, answered: AtomicUsize::new(0), guest })
    }

    fn send(&self, command: Answer) {
        assert!(self.mailbox.send(command).is_ok());
        self.waker.wake();
    }
}

struct Queue {
    shared: Arc<Shared>,
    retired: bool,
    /// Turns in which it has work without a kick.
    busy: u32,
}

impl Poller<()> for Queue {
    fn enter(&mut self, (): &mut (), waker: &Arc<dyn Wake>) {
        self.shared.waker.register(waker);
    }

    fn leave(&mut self, (): &mut ()) -> bool {
        true
    }

    fn run_once(&mut self, (): &mut (), _: u64) -> PollerState {
        if self.busy > 0 {
            self.busy -= 1;
            return PollerState::Busy;
        }
        if self.shared.guest.published.load(Ordering::Acquire) {
            self.shared.guest.published.store(false, Ordering::Relaxed);
            self.shared.answered.fetch_add(1, Ordering::Relaxed);
            self.retired = true;
            return PollerState::Busy;
        }
        if !self.shared.mailbox.is_pending() {
            return PollerState::Idle;
        }
        for Answer in self.shared.mailbox.take() {
            self.retired = self.shared.answered.fetch_add(1, Ordering::Relaxed) + 1 == self.shared.senders;
        }
        PollerState::Busy
    }

    fn arm(&mut self) -> bool {
        self.shared.guest.kick_wanted.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.shared.guest.published.load(Ordering::Acquire) || self.shared.mailbox.is_pending()
    }

    fn disarm(&mut self) {
        self.shared.guest.kick_wanted.store(false, Ordering::Relaxed);
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_over(&self) -> bool {
        self.retired
    }
}

enum Order {
    Admit(u32, Queue),
    Leave,
    Close,
}

/// A lane's thread, as others see it.
struct End {
    mailbox: Mailbox<Order>,
    waker: Arc<Waker>,
}

impl End {
    fn new() -> Arc<End> {
        Arc::new(End { mailbox: Mailbox::default(), waker: Waker::new() })
    }

    fn give(&self, order: Order) {
        assert!(self.mailbox.send(order).is_ok());
        self.waker.wake();
    }
}

/// Longer than a poller may be idle and not be parked.
const STEP_NS: u64 = 10_000_000;

/// The loop of a lane's thread.
fn run(end: &End, hand_over: impl Fn(Queue)) {
    let waker = Arc::clone(&end.waker) as Arc<dyn Wake>;
    let mut lane = Lane::new(IdlePolicy::up_to(0), CpuUse::default);
    let (mut closed, mut now_ns) = (false, 0);
    // Polled eventfds, by slot.
    let mut eventfds: Vec<Option<Arc<Shared>>> = Vec::new();
    loop {
        now_ns += STEP_NS;
        for (slot, eventfd) in eventfds.iter_mut().enumerate() {
            if eventfd.take_if(|shared| shared.guest.eventfd.swap(false, Ordering::Acquire)).is_some() {
                lane.unpark(slot);
            }
        }
        if end.waker.flag.take_call() {
            lane.unpark_all();
        }
        if end.mailbox.is_pending() {
            for order in end.mailbox.take() {
                match order {
                    Order::Admit(name, queue) => lane.admit(&mut (), &waker, name, queue),
                    Order::Leave => assert!(lane.ask_to_leave(0)),
                    Order::Close => closed = true,
                }
            }
        }
        let idle = lane.turn(&mut (), now_ns);
        while let Some(slot) = lane.next_parked() {
            listen(&mut eventfds, &mut lane, slot);
        }
        if let Some((slot, _, queue)) = lane.part(&mut ()) {
            eventfds.get_mut(slot).map(Option::take);
            hand_over(queue);
            continue;
        }
        match idle {
            Idle::Turn => continue,
            Idle::End if closed => return,
            Idle::End | Idle::Sleep(_) => {}
        }
        for index in 0..lane.active().len() {
            let slot = lane.active()[index];
            listen(&mut eventfds, &mut lane, slot);
        }
        end.waker.sleep();
    }
}

fn listen(eventfds: &mut Vec<Option<Arc<Shared>>>, lane: &mut Lane<Queue>, slot: usize) {
    eventfds.resize_with(eventfds.len().max(slot + 1), || None);
    eventfds[slot] = Some(Arc::clone(&lane.take_worked(slot).0.shared));
}

fn model(name: &str, preemptions: usize, senders: usize, story: impl Fn(&Arc<Shared>, Queue) + Sync + Send + 'static) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let shared = Shared::new(senders);
        story(&shared, Queue { shared: Arc::clone(&shared), retired: false, busy: 0 });
        assert_eq!(shared.answered.load(Ordering::Relaxed), senders, "a command was lost, or done twice");
    });
    println!("{name}: {} orders, at most {preemptions} preemptions", orders.load(Ordering::Relaxed));
}

fn sender(shared: &Arc<Shared>) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || shared.send(Answer))
}

fn lane(end: &Arc<End>) -> thread::JoinHandle<()> {
    let end = Arc::clone(end);
    thread::spawn(move || run(&end, |_| unreachable!("it was not asked to leave")))
}

#[test]
fn orders_and_commands_end_the_sleep_of_a_lane() {
    model("one lane", 3, 1, |shared, queue| {
        let end = End::new();
        let (lane, sender) = (lane(&end), sender(shared));
        end.give(Order::Admit(0, queue));
        end.give(Order::Close);
        sender.join().unwrap();
        lane.join().unwrap();
    });
}

#[test]
fn a_second_sender_that_finds_the_waker_in_use_wakes_the_lane_as_well() {
    model("two senders", 2, 2, |shared, queue| {
        let end = End::new();
        end.give(Order::Admit(0, queue));
        end.give(Order::Close);
        let (lane, sender) = (lane(&end), sender(shared));
        shared.send(Answer);
        sender.join().unwrap();
        lane.join().unwrap();
    });
}

#[test]
fn a_command_finds_a_poller_that_moves_between_lanes() {
    model("two lanes", 3, 1, |shared, queue| {
        let (old, new) = (End::new(), End::new());
        old.give(Order::Admit(0, queue));
        old.give(Order::Leave);
        old.give(Order::Close);
        let (lane, sender) = (lane(&new), sender(shared));
        run(&old, |queue| {
            new.give(Order::Admit(0, queue));
            new.give(Order::Close);
        });
        sender.join().unwrap();
        lane.join().unwrap();
    });
}

/// A neighbour that keeps the lane busy for a while, so that the queue beside it is parked.
fn neighbour() -> Queue {
    Queue { shared: Shared::new(0), retired: true, busy: 2 }
}

#[test]
fn a_command_finds_a_parked_poller() {
    model("a parked poller and a command", 3, 1, |shared, queue| {
        let end = End::new();
        [(0, queue), (1, neighbour())].into_iter().for_each(|(name, queue)| end.give(Order::Admit(name, queue)));
        end.give(Order::Close);
        let sender = sender(shared);
        run(&end, |_| unreachable!("it was not asked to leave"));
        sender.join().unwrap();
    });
}

#[test]
fn a_kick_finds_a_parked_poller() {
    model("a parked poller and a kick", 3, 1, |shared, queue| {
        let end = End::new();
        [(0, queue), (1, neighbour())].into_iter().for_each(|(name, queue)| end.give(Order::Admit(name, queue)));
        end.give(Order::Close);
        let guest = {
            let (shared, waker) = (Arc::clone(shared), Arc::clone(&end.waker));
            thread::spawn(move || shared.guest.submit(&waker))
        };
        run(&end, |_| unreachable!("it was not asked to leave"));
        guest.join().unwrap();
    });
}

#[test]
fn a_parked_poller_leaves_with_its_command() {
    model("a parked poller that leaves", 2, 1, |shared, queue| {
        let (old, new) = (End::new(), End::new());
        [(0, queue), (1, neighbour())].into_iter().for_each(|(name, queue)| old.give(Order::Admit(name, queue)));
        let orders = {
            let old = Arc::clone(&old);
            thread::spawn(move || {
                old.give(Order::Leave);
                old.give(Order::Close);
            })
        };
        let sender = sender(shared);
        run(&old, |queue| {
            new.give(Order::Admit(0, queue));
            new.give(Order::Close);
        });
        run(&new, |_| unreachable!("it was not asked to leave"));
        [orders, sender].into_iter().for_each(|thread| thread.join().unwrap());
    });
}
