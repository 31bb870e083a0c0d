//! The control thread: waits for all exports of a daemon at once, and has workers run the steps of ready exports.
//!
//! ```text
//!                    a descriptor is ready, a deadline has passed, or a call
//!   waiting, in the epoll set ─────────────────────────────────────────────────▶ out, with a worker
//!              ▲                                                                     │       │
//!              └───────────────────────── its step has ended ────────────────────────┘       └─ it has ended ─▶ gone
//! ```
//!
//! An [`Endpoint`] is a state machine. Its step never waits for a peer. It may wait for the export's own queues, their
//! lanes and the receiver, so no step runs on this thread, which waits only for its epoll set. An endpoint that is with
//! a worker has no descriptor in that set, so its step may close and replace descriptors. If it is called meanwhile, it
//! runs once more afterwards.
//!
//! The content of a step is unknown here.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_sys::{Epoll, EventFd, EventFlags, Registered};

use super::workers::WorkerPool;

/// Epoll token of the loop's own eventfd. Endpoints are numbered from 0.
const OWN: u64 = u64::MAX;
/// Polling interval of an endpoint whose descriptors cannot be polled.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// Descriptor that an endpoint waits for.
pub type AwaitedFd = Arc<dyn AsFd + Send + Sync>;

/// The control path of one export, as a state machine.
pub(crate) trait Endpoint: Send {
    /// Handles due work, and returns when to run next. May be called without work. May wait for queues, never for
    /// peers.
    fn step(&mut self) -> EndpointState;

    /// Descriptors to wait for in the present state.
    fn interests(&self) -> Vec<(AwaitedFd, EventFlags)>;
}

/// State of an endpoint after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndpointState {
    /// Runs again when a descriptor is ready, when it is called, or at this time.
    Waiting(Option<Instant>),
    /// Ended: it is dropped.
    Over,
}

/// Runs an endpoint without a ready descriptor. Holds no strong reference.
#[derive(Clone)]
pub(crate) struct EndpointCaller {
    shared: Arc<LoopShared>,
    number: u64,
}

impl EndpointCaller {
    /// Has the endpoint run once more.
    pub(crate) fn call(&self) {
        self.shared.send(LoopEvent::Called(self.number));
    }
}

/// End flag of an endpoint, for its waiters.
#[derive(Debug, Default)]
pub(crate) struct EndpointEnd {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl EndpointEnd {
    fn is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self) {
        *self.is_over() = true;
        self.changed.notify_all();
    }

    /// Whether the endpoint has ended and was dropped.
    pub(crate) fn is_set(&self) -> bool {
        *self.is_over()
    }

    /// Waits until the endpoint has ended and was dropped.
    pub(crate) fn wait(&self) {
        drop(self.changed.wait_while(self.is_over(), |is_over| !*is_over).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Reports the end of an endpoint on drop, for any cause.
pub(crate) struct EndGuard(Arc<EndpointEnd>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// An endpoint during its step on a worker.
pub(crate) struct EndpointRun {
    number: u64,
    /// Dropped first, so the guard reports a complete end.
    endpoint: Box<dyn Endpoint>,
    _end: EndGuard,
}

impl EndpointRun {
    /// Runs a step on a thread that may block, and returns the endpoint to its loop. After a panic the loop forgets it.
    pub(crate) fn run(self, shared: &LoopShared) {
        /// Reports to the loop, also when a panic unwinds.
        struct Return<'a>(&'a LoopShared, u64, Option<(EndpointRun, Option<Instant>)>);
        impl Drop for Return<'_> {
            fn drop(&mut self) {
                self.0.send(LoopEvent::Returned(self.1, self.2.take()));
            }
        }
        let mut run = self;
        let mut back = Return(shared, run.number, None);
        match run.endpoint.step() {
            EndpointState::Waiting(deadline) => back.2 = Some((run, deadline)),
            EndpointState::Over => drop(run),
        }
    }
}

/// Events from other threads.
enum LoopEvent {
    Added(EndpointRun),
    Called(u64),
    /// A step has ended: the endpoint and the time of its next step; `None` if the endpoint has ended.
    Returned(u64, Option<(EndpointRun, Option<Instant>)>),
    /// No more endpoints will be added.
    Closed,
}

/// State shared by the loop and its callers.
pub(crate) struct LoopShared {
    eventfd: EventFd,
    /// `None` once the loop has ended.
    events: Mutex<Option<Vec<LoopEvent>>>,
}

impl AsFd for LoopShared {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

impl LoopShared {
    fn events(&self) -> MutexGuard<'_, Option<Vec<LoopEvent>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, event: LoopEvent) {
        let refused = match &mut *self.events() {
            Some(events) => {
                events.push(event);
                None
            }
            None => Some(event),
        };
        // Dropped outside of the lock, since the drop of an endpoint may take long.
        drop(refused);
        self.eventfd.signal();
    }
}

/// A control thread for any number of exports. Ends with the last handle and the last export.
#[derive(Clone)]
pub struct ControlLoop(Arc<LoopHandle>);

struct LoopHandle {
    shared: Arc<LoopShared>,
    next: Mutex<u64>,
    thread: Option<JoinHandle<()>>,
}

impl ControlLoop {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub fn start() -> io::Result<ControlLoop> {
        let shared = Arc::new(LoopShared { eventfd: EventFd::new()?, events: Mutex::new(Some(Vec::new())) });
        let set = Epoll::new()?;
        let own: AwaitedFd = Arc::clone(&shared) as _;
        let waiting = EndpointSet {
            _own: set.register(own, OWN, EventFlags::IN)?,
            set,
            shared: Arc::clone(&shared),
            workers: WorkerPool::start()?,
            slots: HashMap::new(),
            deadlines: BTreeSet::new(),
            is_closed: false,
        };
        let thread = std::thread::Builder::new().name("exports".into()).spawn(move || waiting.run())?;
        Ok(ControlLoop(Arc::new(LoopHandle { shared, next: Mutex::new(0), thread: Some(thread) })))
    }

    /// Adds an endpoint, which is made with its caller; returns its end flag.
    pub(crate) fn add<E: Endpoint + 'static>(
        &self,
        make: impl FnOnce(EndpointCaller) -> E,
    ) -> (EndpointCaller, Arc<EndpointEnd>) {
        let number = {
            let mut next = self.0.next.lock().unwrap_or_else(PoisonError::into_inner);
            *next += 1;
            *next - 1
        };
        let caller = EndpointCaller { shared: Arc::clone(&self.0.shared), number };
        let end = Arc::new(EndpointEnd::default());
        let endpoint = Box::new(make(caller.clone()));
        let run = EndpointRun { number, endpoint, _end: EndGuard(Arc::clone(&end)) };
        self.0.shared.send(LoopEvent::Added(run));
        (caller, end)
    }
}

impl Drop for LoopHandle {
    fn drop(&mut self) {
        self.shared.send(LoopEvent::Closed);
        // After a panic an endpoint may never drain.
        if !std::thread::panicking()
            && let Some(thread) = self.thread.take()
        {
            // A panic of that thread was already logged.
            let _ = thread.join();
        }
    }
}

/// Entry of an endpoint in the loop.
struct EndpointSlot {
    /// `None` while it is with a worker.
    waiting: Option<EndpointRun>,
    /// Registered descriptors; empty while it is with a worker.
    awaited: Vec<Registered<AwaitedFd>>,
    deadline: Option<Instant>,
    /// Whether it was called while with a worker.
    is_called: bool,
}

/// State of the control thread with all endpoints.
struct EndpointSet {
    /// The loop's own eventfd.
    _own: Registered<AwaitedFd>,
    set: Epoll,
    shared: Arc<LoopShared>,
    workers: WorkerPool,
    slots: HashMap<u64, EndpointSlot>,
    deadlines: BTreeSet<(Instant, u64)>,
    is_closed: bool,
}

impl EndpointSet {
    fn run(mut self) {
        while !(self.is_closed && self.slots.is_empty()) {
            if let Err(error) = self.turn() {
                tracing::error!("the control thread of the exports cannot wait: {error}; the exports end");
                break;
            }
        }
    }

    /// Waits once, and handles all events.
    fn turn(&mut self) -> io::Result<()> {
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        let until = [deadline, self.workers.deadline()].into_iter().flatten().min();
        for ready in self.set.wait(Instant::now(), until)? {
            match ready.token {
                OWN => self.read_events(),
                // An endpoint that is with a worker is polled again on its return: readiness persists.
                number => self.send_out(number),
            }
        }
        let now = Instant::now();
        while let Some((deadline, number)) = self.deadlines.first().copied().filter(|(deadline, _)| *deadline <= now) {
            self.deadlines.remove(&(deadline, number));
            self.send_out(number);
        }
        self.workers.look(now);
        Ok(())
    }

    fn read_events(&mut self) {
        // Cleared before the events are read: a later event signals again.
        self.shared.eventfd.take();
        let events = self.shared.events().as_mut().map_or_else(Vec::new, std::mem::take);
        for event in events {
            match event {
                LoopEvent::Added(run) => {
                    let number = run.number;
                    let slot =
                        EndpointSlot { waiting: Some(run), awaited: Vec::new(), deadline: None, is_called: false };
                    self.slots.insert(number, slot);
                    self.send_out(number);
                }
                LoopEvent::Called(number) => match self.slots.get_mut(&number) {
                    Some(slot) if slot.waiting.is_none() => slot.is_called = true,
                    _ => self.send_out(number),
                },
                LoopEvent::Returned(number, Some((run, deadline))) => self.take_back(number, run, deadline),
                LoopEvent::Returned(number, None) => drop(self.slots.remove(&number)),
                LoopEvent::Closed => self.is_closed = true,
            }
        }
    }

    /// Has a worker run an endpoint, unless one already does.
    fn send_out(&mut self, number: u64) {
        let Some(slot) = self.slots.get_mut(&number) else { return };
        let Some(run) = slot.waiting.take() else { return };
        if let Some(deadline) = slot.deadline.take() {
            self.deadlines.remove(&(deadline, number));
        }
        slot.is_called = false;
        slot.awaited.clear();
        let shared = Arc::clone(&self.shared);
        self.workers.send(Box::new(move || run.run(&shared)));
    }

    /// Handles the return of an endpoint from its step.
    fn take_back(&mut self, number: u64, run: EndpointRun, deadline: Option<Instant>) {
        let Some(slot) = self.slots.get_mut(&number) else { return };
        let mut look = None;
        for (fd, flags) in run.endpoint.interests() {
            match self.set.register(fd, number, flags) {
                Ok(registered) => slot.awaited.push(registered),
                Err(error) => {
                    tracing::error!("an export cannot be waited for: {error}; it is looked at every second");
                    look = Some(Instant::now() + LOOK_TIME);
                }
            }
        }
        slot.deadline = [deadline, look].into_iter().flatten().min();
        slot.waiting = Some(run);
        self.deadlines.extend(slot.deadline.map(|deadline| (deadline, number)));
        if slot.is_called {
            self.send_out(number);
        }
    }
}

impl Drop for EndpointSet {
    /// Also after an error or panic: waiters of an export must see its end.
    fn drop(&mut self) {
        let left = self.shared.events().take();
        drop(left);
        self.slots.clear();
        self.workers.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Reads bytes of a peer and reports them: waits after `w` and reports `W`, panics at `p`, ends at end of file.
    struct Reader {
        peer: Arc<UnixStream>,
        told: Sender<u8>,
        wait: Receiver<()>,
        steps: Arc<AtomicUsize>,
    }

    impl Endpoint for Reader {
        fn step(&mut self) -> EndpointState {
            self.steps.fetch_add(1, Ordering::Relaxed);
            let mut byte = [0];
            match rustix::net::recv(&*self.peer, &mut byte[..], rustix::net::RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return EndpointState::Over,
                Ok(_) if byte == *b"w" => {
                    let _ = self.told.send(b'W');
                    let _ = self.wait.recv();
                }
                Ok(_) => assert!(byte != *b"p", "as planned"),
                Err(_) => return EndpointState::Waiting(None),
            }
            let _ = self.told.send(byte[0]);
            EndpointState::Waiting(None)
        }

        fn interests(&self) -> Vec<(AwaitedFd, EventFlags)> {
            vec![(Arc::clone(&self.peer) as _, EventFlags::IN)]
        }
    }

    struct Peer {
        near: UnixStream,
        read: Receiver<u8>,
        go: Sender<()>,
        end: Arc<EndpointEnd>,
        steps: Arc<AtomicUsize>,
        caller: EndpointCaller,
    }

    impl Peer {
        fn of(control: &ControlLoop) -> Peer {
            let (near, peer) = UnixStream::pair().unwrap();
            let ((told, read), (go, wait)) = (channel(), channel());
            let steps = Arc::new(AtomicUsize::new(0));
            let reader = Reader { peer: Arc::new(peer), told, wait, steps: Arc::clone(&steps) };
            let (caller, end) = control.add(|_| reader);
            Peer { near, read, go, end, steps, caller }
        }

        fn says(&self, byte: u8) {
            rustix::io::write(&self.near, &[byte]).unwrap();
        }

        fn is_read(&self, byte: u8) {
            assert_eq!(self.read.recv_timeout(PATIENCE), Ok(byte));
        }
    }

    #[test]
    fn steps_that_wait_hold_up_no_other_endpoint() {
        let control = ControlLoop::start().unwrap();
        let waiting: Vec<_> = (0..40).map(|_| Peer::of(&control)).collect();
        let busy = Peer::of(&control);
        for (count, peer) in waiting.iter().enumerate() {
            peer.says(b'w');
            peer.is_read(b'W');
            peer.says(count as u8);
            busy.says(count as u8);
            busy.is_read(count as u8);
        }
        assert!(waiting.iter().all(|peer| peer.read.try_recv().is_err()), "they wait");
        waiting.iter().for_each(|peer| peer.go.send(()).unwrap());
        for (count, peer) in waiting.iter().enumerate() {
            peer.is_read(b'w');
            peer.is_read(count as u8);
        }
    }

    #[test]
    fn endpoint_that_was_called_while_out_runs_again() {
        let control = ControlLoop::start().unwrap();
        let peer = Peer::of(&control);
        peer.says(b'w');
        peer.is_read(b'W');
        let before = peer.steps.load(Ordering::Relaxed);
        peer.caller.call();
        peer.go.send(()).unwrap();
        peer.is_read(b'w');
        let begin = Instant::now();
        while peer.steps.load(Ordering::Relaxed) == before {
            assert!(begin.elapsed() < PATIENCE, "the call was lost");
            std::thread::yield_now();
        }
    }

    #[test]
    fn ended_and_panicked_endpoints_are_over_and_others_go_on() {
        let control = ControlLoop::start().unwrap();
        let [ends, panics, stays] = [0; 3].map(|_| Peer::of(&control));
        drop(ends.near);
        ends.end.wait();
        panics.says(b'p');
        panics.end.wait();
        assert!(!stays.end.is_set());
        stays.says(b's');
        stays.is_read(b's');
        drop(stays.near);
        stays.end.wait();
    }

    #[test]
    fn loop_ends_with_its_last_endpoint() {
        let control = ControlLoop::start().unwrap();
        let peer = Peer::of(&control);
        let (told, ended) = channel();
        std::thread::spawn(move || {
            drop(control);
            let _ = told.send(());
        });
        peer.says(b's');
        peer.is_read(b's');
        assert!(ended.try_recv().is_err(), "it has an endpoint yet");
        drop(peer.near);
        ended.recv_timeout(PATIENCE).expect("it ends");
    }
}
