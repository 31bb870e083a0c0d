//! Lanes under loom: orders and commands reach a poller that sleeps, that enters, and that moves to another lane.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mq --test loom_lane`
//!
//! Lane, mailbox, wake flag and lane's waker are the real ones; the model's are a thread's loop in the order of that of
//! `os`, without a ring, and a poller that answers commands. A lane sleeps on loom's `Notify`, which keeps a signal as
//! an eventfd does. A command that nobody looks at is an order of events in which all sleep, and fails the model. Each
//! names its bound on preemptions and prints how many orders it has.
#![cfg(loom)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkyard_mem::{Mailbox, WakeFlag};
use blkyard_mq::{Idle, IdlePolicy, Lane, LaneWaker, Poller, PollerState, Wake};
use loom::sync::Notify;
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

/// One from each sender, so that no later one makes up for a lost wake-up: the poller is over with the last.
struct Answer;

/// What a queue shares with the control path.
struct Shared {
    mailbox: Mailbox<Answer>,
    waker: LaneWaker,
    /// Number of senders.
    senders: usize,
    /// Not modelled: looked at when all is over.
    answered: AtomicUsize,
}

impl Shared {
    fn send(&self, command: Answer) {
        assert!(self.mailbox.send(command).is_ok());
        self.waker.wake();
    }
}

struct Queue {
    shared: Arc<Shared>,
    retired: bool,
}

impl Poller<()> for Queue {
    fn enter(&mut self, (): &mut (), waker: &Arc<dyn Wake>) {
        self.shared.waker.register(waker);
    }

    fn leave(&mut self, (): &mut ()) -> bool {
        true
    }

    fn run_once(&mut self, (): &mut (), _: u64) -> PollerState {
        if !self.shared.mailbox.is_pending() {
            return PollerState::Idle;
        }
        for Answer in self.shared.mailbox.take() {
            self.retired = self.shared.answered.fetch_add(1, Ordering::Relaxed) + 1 == self.shared.senders;
        }
        PollerState::Busy
    }

    fn arm(&mut self) -> bool {
        self.shared.mailbox.is_pending()
    }

    fn disarm(&mut self) {}

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_over(&self) -> bool {
        self.retired
    }
}

enum Order {
    Admit(Queue),
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

/// The loop of a lane's thread.
fn run(end: &End, hand_over: impl Fn(Queue)) {
    let waker = Arc::clone(&end.waker) as Arc<dyn Wake>;
    let mut lane = Lane::new(IdlePolicy { spin_ns: 0 });
    let mut closed = false;
    loop {
        if end.mailbox.is_pending() {
            for order in end.mailbox.take() {
                match order {
                    Order::Admit(queue) => lane.admit(&mut (), &waker, 0, queue),
                    Order::Leave => assert!(lane.ask_to_leave(0)),
                    Order::Close => closed = true,
                }
            }
        }
        let idle = lane.turn(&mut (), 0);
        if let Some((_, queue)) = lane.part(&mut ()) {
            hand_over(queue);
            continue;
        }
        match idle {
            Idle::Turn => continue,
            Idle::End if closed => return,
            Idle::End | Idle::Sleep(_) => {}
        }
        end.waker.sleep();
    }
}

fn model(name: &str, preemptions: usize, senders: usize, story: impl Fn(&Arc<Shared>, Queue) + Sync + Send + 'static) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let (mailbox, waker, answered) = (Mailbox::default(), LaneWaker::default(), AtomicUsize::new(0));
        let shared = Arc::new(Shared { mailbox, waker, senders, answered });
        story(&shared, Queue { shared: Arc::clone(&shared), retired: false });
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
        end.give(Order::Admit(queue));
        end.give(Order::Close);
        sender.join().unwrap();
        lane.join().unwrap();
    });
}

#[test]
fn a_second_sender_that_finds_the_waker_in_use_wakes_the_lane_as_well() {
    model("two senders", 2, 2, |shared, queue| {
        let end = End::new();
        end.give(Order::Admit(queue));
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
        old.give(Order::Admit(queue));
        old.give(Order::Leave);
        old.give(Order::Close);
        let (lane, sender) = (lane(&new), sender(shared));
        run(&old, |queue| {
            new.give(Order::Admit(queue));
            new.give(Order::Close);
        });
        sender.join().unwrap();
        lane.join().unwrap();
    });
}
