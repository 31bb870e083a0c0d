//! The end of a daemon: the main thread supervises the thread that serves, with bounded waits.
//!
//! ```text
//!   serving ── SIGINT, SIGTERM ──▶ draining ── all has completed ─────────▶ exit, 0
//!                                     └── drain_s, or a second signal ──▶ report requests in flight ──▶ exit, 1
//! ```
//!
//! The thread that serves may hang, in a device or in a file system; the main thread neither does I/O nor waits for a
//! lane. When the time is up it leaves the other threads running: no request is completed, no memory is unmapped, and
//! no image is unlocked by us. The front-ends' in-flight records stay unchanged, and the kernel keeps the images' locks
//! until it has completed the I/O (ADR 12). Only the sockets are removed.

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use blkyard_export::{BoundSocket, QueueView};
use blkyard_mq::RequestState;
use blkyard_os::{Signal, Signals};
use blkyard_sys::{PollFd, PollFlags, wait_until};

use crate::daemon::{ClientWatch, Daemon};
use crate::error::ServeError;
use crate::inspect::{request_node, show_time};

/// Time limit for the end of a daemon that does not serve yet: no request is in flight.
const START_TIME: Duration = Duration::from_secs(1);
/// Time limit for all queues together to report their requests in flight.
const LOOK_TIME: Duration = Duration::from_secs(1);
/// Requests of a queue that are reported one by one, the oldest first.
const REQUESTS_MAX: usize = 8;

/// State shared by both threads.
#[derive(Default)]
struct EndingState {
    requested: Mutex<bool>,
    changed: Condvar,
    serving: OnceLock<ServingDaemon>,
    /// Everything that was fetched is finished.
    drained: AtomicBool,
    /// Why the daemon ends, if it is not because it is to.
    broken: OnceLock<String>,
    sockets: Mutex<Vec<Weak<BoundSocket>>>,
}

impl EndingState {
    fn outcome(&self) -> Result<(), ServeError> {
        self.broken.get().map_or(Ok(()), |why| Err(ServeError::Broken(why.clone())))
    }
}

/// The served parts. Dropped before an orderly stop, it sets a deadline for the end: each part waits for its requests
/// in flight, and a device may hang.
pub(crate) struct Parts<'a, T> {
    stop: &'a StopToken,
    parts: Vec<T>,
}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(stop: &'a StopToken) -> Parts<'a, T> {
        Parts { stop, parts: Vec::new() }
    }

    pub(crate) fn push(&mut self, part: T) {
        self.parts.push(part);
    }

    pub(crate) fn take(&mut self) -> Vec<T> {
        std::mem::take(&mut self.parts)
    }
}

impl<T> std::ops::Deref for Parts<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.parts
    }
}

impl<T> Drop for Parts<'_, T> {
    fn drop(&mut self) {
        if !self.parts.is_empty() {
            self.stop.fails("the start failed, and the threads already started do not end");
            self.stop.stops();
        }
    }
}

/// A daemon that serves.
struct ServingDaemon {
    daemon: Weak<Daemon>,
    drain: Duration,
}

/// The serving thread's end: by this it hears that it is to stop, and says how far it is.
pub(crate) struct StopToken {
    shared: Arc<EndingState>,
    events: PipeWriter,
}

impl StopToken {
    /// Waits until the daemon is to stop, but no longer than this. True if it is.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let requested = lock(&self.shared.requested);
        let waited = self.shared.changed.wait_timeout_while(requested, timeout, |requested| !*requested);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Whether the daemon is to stop.
    pub(crate) fn is_requested(&self) -> bool {
        *lock(&self.shared.requested)
    }

    /// Registers a socket that is removed at the end in any case.
    pub(crate) fn track(&self, socket: BoundSocket) -> Arc<BoundSocket> {
        let socket = Arc::new(socket);
        lock(&self.shared.sockets).push(Arc::downgrade(&socket));
        socket
    }

    /// From here on requests may be in flight.
    pub(crate) fn serves(&self, daemon: &Arc<Daemon>) {
        let drain = Duration::from_secs(daemon.drain_s);
        let _ = self.shared.serving.set(ServingDaemon { daemon: Arc::downgrade(daemon), drain });
    }

    /// It stops, because it is to or for another reason. From here on it has as long as it may take to drain.
    pub(crate) fn stops(&self) {
        // The supervisor stays until the end.
        let _ = (&self.events).write(&[0]);
    }

    /// It ends because of this, which its exit status tells, however it ends.
    pub(crate) fn fails(&self, why: &str) {
        let _ = self.shared.broken.set(why.into());
    }

    /// All fetched requests have completed, and no more are fetched.
    pub(crate) fn drained(&self) {
        self.shared.drained.store(true, Ordering::Release);
    }
}

/// Events for the main thread.
enum MainEvent {
    Signal(Signal),
    Stops,
    Ended,
    Timeout,
}

/// Runs `serve` on a separate thread until it ends, or until a signal came and its time is up.
///
/// # Errors
/// Those of `serve`; or that it did not end in time, with the requests in flight.
pub(crate) fn supervise<F>(signals: &Signals, serve: F) -> Result<(), ServeError>
where
    F: FnOnce(&StopToken) -> Result<(), ServeError> + Send + 'static,
{
    let shared = Arc::new(EndingState::default());
    let (mut events, writer) = pipe()?;
    let token = StopToken { shared: Arc::clone(&shared), events: writer };
    let thread = std::thread::Builder::new().name("serve".into()).spawn(move || serve(&token))?;
    let drain = || shared.serving.get().map(|serving| serving.drain);
    let (mut is_asked, mut deadline) = (false, None);
    loop {
        match next_event(signals, &mut events, deadline) {
            MainEvent::Ended => {
                return thread
                    .join()
                    .unwrap_or_else(|_| Err(ServeError::Broken("the thread that serves panicked".into())));
            }
            MainEvent::Stops => deadline = Some(Instant::now() + drain().unwrap_or(START_TIME)),
            MainEvent::Signal(Signal::Hangup) => tracing::info!("SIGHUP is ignored: reload is not implemented"),
            MainEvent::Signal(_) if !is_asked => {
                is_asked = true;
                *lock(&shared.requested) = true;
                shared.changed.notify_all();
                deadline = Some(Instant::now() + drain().unwrap_or(START_TIME));
            }
            MainEvent::Signal(_) => return leave(&shared, "at a second signal"),
            MainEvent::Timeout => return leave(&shared, &format!("after {:?}", drain().unwrap_or(START_TIME))),
        }
    }
}

fn next_event(signals: &Signals, events: &mut PipeReader, deadline: Option<Instant>) -> MainEvent {
    loop {
        if let Some(signal) = signals.wait(Some(Duration::ZERO)) {
            return MainEvent::Signal(signal);
        }
        let now = Instant::now();
        let mut fds = [PollFd::new(&*events, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        // After an early end everything is checked again.
        let ready = wait_until(&mut fds, now, deadline).unwrap_or(0);
        if ready > 0 && !fds[0].revents().is_empty() {
            // The other end is closed when the thread ends, however it does.
            let said = events.read(&mut [0]).is_ok_and(|bytes| bytes > 0);
            return if said { MainEvent::Stops } else { MainEvent::Ended };
        }
        if ready == 0 && deadline.is_some_and(|deadline| now >= deadline) {
            return MainEvent::Timeout;
        }
    }
}

/// Leaves the threads of the daemon as they are: the process is about to exit.
fn leave(shared: &EndingState, when: &str) -> Result<(), ServeError> {
    lock(&shared.sockets).iter().filter_map(Weak::upgrade).for_each(|socket| socket.remove());
    let Some(serving) = shared.serving.get() else {
        tracing::info!("stopped before the first export was served");
        return shared.outcome();
    };
    let daemon = serving.daemon.upgrade().filter(|_| !shared.drained.load(Ordering::Acquire));
    let Some(daemon) = daemon else {
        tracing::warn!("all I/O has completed, but a device is not closed {when}: its back-end does not answer");
        return shared.outcome();
    };
    let left = Left::of(&daemon);
    left.lines.iter().for_each(|line| tracing::warn!("{line}"));
    let error = left.error(when);
    // Its drop would wait for the hanging thread.
    std::mem::forget(daemon);
    Err(error)
}

/// Requests that a daemon leaves in flight.
#[derive(Default)]
struct Left {
    /// Requests fetched and not answered, and those of them that no record tells of.
    requests: usize,
    unrecorded: usize,
    /// Queues that do not say.
    silent: usize,
    lines: Vec<String>,
}

impl Left {
    fn of(daemon: &Daemon) -> Left {
        let all: Vec<_> = daemon.exports.iter().map(|export| (export, export.queues())).collect();
        let asked: Vec<Vec<_>> = all.iter().map(|(_, queues)| queues.iter().map(ClientWatch::look).collect()).collect();
        let until = Instant::now() + LOOK_TIME;
        let mut left = Left::default();
        for ((export, _), asked) in all.iter().zip(asked) {
            let names: Vec<_> = export.devices.iter().map(|of| daemon.devices[of.device].info().name.clone()).collect();
            let (device, before) = (&names.join(", "), left.lines.len());
            // A queue whose lane has ended has no request in flight.
            for (number, view) in asked.into_iter().enumerate().filter_map(|(number, view)| Some((number, view?))) {
                match view.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(view) => left.add(&format!("{export}: queue {number}"), device, &view),
                    Err(RecvTimeoutError::Timeout) => {
                        left.silent += 1;
                        left.lines.push(format!("{export}: queue {number}: its lane does not answer"));
                    }
                    Err(RecvTimeoutError::Disconnected) => {}
                }
            }
            if export.front_end.is_connected() && before == left.lines.len() {
                left.lines.push(format!("{export}: no requests are in flight, but its session does not end"));
            }
        }
        left
    }

    /// Adds a queue's requests in flight.
    fn add(&mut self, queue: &str, device: &str, view: &QueueView) {
        let Some(ring) = view.ring.filter(|ring| ring.in_flight > 0) else { return };
        let unanswered = usize::from(ring.in_flight);
        self.requests += unanswered;
        self.unrecorded += if ring.is_recorded { 0 } else { unanswered };
        let mut requests: Vec<_> =
            view.hw.requests.iter().filter(|request| request.state == RequestState::InFlight).collect();
        let count = requests.len();
        self.lines.push(format!("{queue}: {} not answered, {count} with {device}", requests_of(unanswered)));
        requests.sort_by_key(|request| std::cmp::Reverse(request.age_ns));
        for request in requests.iter().take(REQUESTS_MAX) {
            let node = request_node(request);
            let age = node.age_ns.map_or_else(|| "an unknown time".into(), show_time);
            self.lines
                .push(format!("{queue}: {} of {} sectors at sector {}, for {age}", node.op, node.sectors, node.sector));
        }
        if count > REQUESTS_MAX {
            self.lines.push(format!("{queue}: and {} more", count - REQUESTS_MAX));
        }
    }

    fn error(&self, when: &str) -> ServeError {
        let what = match (self.requests, self.silent) {
            (0, 0) => "without I/O in flight, but not all sessions had ended".into(),
            (requests, 0) => format!("with {} in flight", requests_of(requests)),
            (requests, silent) => {
                format!("with {} in flight and {silent} queues that did not answer", requests_of(requests))
            }
        };
        let cure = match self.unrecorded {
            _ if self.requests + self.silent == 0 => "see the messages above".into(),
            _ if self.silent > 0 => {
                "what those have in flight, and whether their front-ends keep a record of it, is not known: start the daemon again, \
                 which does again what is recorded, and check the guests"
                    .into()
            }
            0 => "the front-ends keep the records: start the daemon again, and it submits these requests again".into(),
            unrecorded => format!(
                "the front-ends of {unrecorded} of these keep no record: their guests have to be reset; those with a \
                 record are done again when the daemon is started again"
            ),
        };
        ServeError::Unfinished { when: when.into(), what, cure }
    }
}

fn requests_of(count: usize) -> String {
    if count == 1 { "1 request".into() } else { format!("{count} requests") }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_that_do_not_answer_are_promised_nothing() {
        let left = Left { requests: 2, silent: 1, ..Left::default() };
        let error = left.error("after 1 s").to_string();
        assert!(error.contains("2 requests") && error.contains("not known"), "{error}");
        let left = Left { requests: 2, ..Left::default() };
        assert!(left.error("after 1 s").to_string().contains("submits these requests again"));
    }

    #[test]
    fn broken_daemon_fails_however_it_ends() {
        let shared = Arc::new(EndingState::default());
        let token = StopToken { shared: Arc::clone(&shared), events: pipe().unwrap().1 };
        assert!(leave(&shared, "after 1 s").is_ok());
        token.fails("thread lane7 panicked");
        token.fails("later");
        assert_eq!(
            leave(&shared, "after 1 s").unwrap_err().to_string().split(';').next(),
            Some("thread lane7 panicked")
        );
    }

    #[test]
    fn start_that_fails_late_and_hangs_has_a_deadline() {
        /// A part that does not end.
        struct Hangs;
        impl Drop for Hangs {
            fn drop(&mut self) {
                std::thread::park_timeout(Duration::from_mins(1));
            }
        }
        let signals = Signals::install().unwrap();
        let begin = Instant::now();
        let ended = supervise(&signals, |stop| {
            let mut parts = Parts::new(stop);
            parts.push(Hangs);
            Err(ServeError::Broken("a part of the daemon is missing".into()))
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(ended.unwrap_err().to_string().contains("do not end"));
    }
}
