//! The thread that runs a lane: it owns a ring, the pollers built on it, and the one place where they sleep.
//!
//! ```text
//!   ┌─▶ now ─▶ reap ─▶ unpark ─▶ commands ─▶ turn ─▶ watch parked ─▶ part ─┬─ Turn ──▶ submit ────────────┐
//!   │                                                                      ├─ Sleep ─▶ prepare ─▶         │
//!   │                                                                      │      watch active ─▶ sleep ──┤
//!   └──────────────────────────────────────────────────────────────────────┼──────────────────────────────┘
//!                                                                          └─ End ──▶ the thread ends, once
//!                                                                                     no command can come
//! ```
//!
//! Commands admit a poller, ask for one back, or let it stay after all; they come through a [`Mailbox`]. The eventfds
//! of a detached poller are forgotten before it is handed over: reading an eventfd resets it, and this lane must not
//! reset a signal that was meant for the next one.
//!
//! No wake-up is lost. A lane sleeps only after a turn in which every poller was armed, so that its eventfd is
//! signalled on work, and looked once more after that (`Lane::turn`); later work signals. Eventfds are
//! level-triggered and reset only by reading them before the next turn, so one signalled before the lane listens ends
//! the sleep as well. The kicks of several virtqueues are one epoll descriptor, which reports each kick once (`KickSet`
//! of `export`). Completions end it because the kernel counts those already in the ring. Calls of other threads go
//! through [`Waker`], whose flag is checked last of all.
//!
//! A parked poller is armed, and its eventfds are polled from the turn that parks it on, across any number of turns and
//! sleeps. It is unparked when one of them is reaped, if one cannot be polled, and at each call, with all others.
//!
//! A poller's eventfd may be replaced by another descriptor, even one of the same number, which is not visible here:
//! the poller has the old one [ignored](blkyard_mq::SignalEventfd::ignore) first.
//!
//! The work of pollers is unknown here.
//!
//! Unsafe: reading the CPU clock of a thread takes two calls of the C library.

mod commands;

use std::ops::Range;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use blkyard_mem::{Mailbox, OneshotSender};
use blkyard_mq::{Idle, IdlePolicy, Lane, Poller, Slot, TurnStats, Wake};

pub use self::commands::{Admission, MakePoller, NotAdmitted, PolicyChange, Release};
use self::commands::{LaneCommand, LaneCommands, take_make};
use crate::clock::{Clock, clock_ns, thread_cpu_use};
use crate::ring::{Ring, RingConfig, RingCounters, RingError};
use crate::slice::{LANE_SLICE_NS, shorten_slice};
use crate::wake::Waker;

/// How a lane thread is made.
#[derive(Clone, Debug, Default)]
pub struct LaneConfig {
    /// Name of the thread; the system shows its first 15 bytes.
    pub name: String,
    /// CPUs it may run on; `None` for all of the process.
    pub cpus: Option<Vec<u32>>,
    /// NUMA node of its memory; `None` if the kernel chooses. See [`node_of`](crate::node_of).
    pub node: Option<u32>,
    /// How long it turns without work before it sleeps.
    pub policy: IdlePolicy,
    /// Its ring.
    pub ring: RingConfig,
}

/// Why a lane thread did not start, or how it ended, or why a poller cannot come or go.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// It has no ring.
    #[error("lane {name}: {source}")]
    Ring {
        /// The lane.
        name: String,
        /// Why, and the cure.
        #[source]
        source: RingError,
    },
    /// It cannot be pinned to its CPUs.
    #[error("lane {name}: cannot be pinned to CPUs {cpus:?}: {source}; name CPUs that this process may run on")]
    Pin {
        /// The lane.
        name: String,
        /// Its CPUs.
        cpus: Vec<u32>,
        /// The system's error.
        source: std::io::Error,
    },
    /// More than it can listen to.
    #[error("lane {name}: {count} queues exceed its maximum of {max}; run more lanes")]
    Pollers {
        /// The lane.
        name: String,
        /// Number of pollers.
        count: usize,
        /// Upper bound.
        max: usize,
    },
    /// No thread, or no descriptor for it.
    #[error("lane {name}: its thread cannot be started: {source}; see the limits on threads and memory")]
    Thread {
        /// The lane.
        name: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A poller that is to leave has requests in flight that do not end.
    #[error(
        "queue {poller} was not drained within {limit:?} and stays on lane {name}: a request at its device does \
         not complete; try again later"
    )]
    Restless {
        /// The lane.
        name: String,
        /// The poller, by its number.
        poller: u32,
        /// How long it was given.
        limit: Duration,
    },
    /// Its thread is held up, as by a driver that blocks.
    #[error("lane {name}: it did not respond within {limit:?}, held up by one of its devices; see blkyard inspect")]
    Unresponsive {
        /// The lane.
        name: String,
        /// How long it was given.
        limit: Duration,
    },
    /// A lane that is gone neither gives nor takes pollers.
    #[error("lane {name}: its thread has ended; see the messages above")]
    Ended {
        /// The lane.
        name: String,
    },
    /// A bug of ours. Its queues are not served any more.
    #[error("lane {name} panicked: {message}")]
    Panicked {
        /// The lane.
        name: String,
        /// Its message.
        message: String,
    },
}

impl LaneError {
    /// Whether a poller that was to leave is gone with its lane. Otherwise it is where it was.
    pub fn is_poller_gone(&self) -> bool {
        !matches!(self, LaneError::Restless { .. } | LaneError::Unresponsive { .. })
    }
}

/// Number of the waker's eventfd; those of the pollers follow.
const OWN: usize = 0;
/// Eventfds of a poller: that of its feeder, and that of the device.
const EVENTFDS_EACH: usize = 2;

/// A running lane. It runs until all its pollers have ended and no command can come: dropping the handle does not stop
/// it, but lets it end.
pub struct LaneThread<S> {
    name: String,
    thread: JoinHandle<()>,
    commands: LaneCommands<S>,
    has_failed: Arc<AtomicBool>,
    ring: Arc<RingCounters>,
    turns: Arc<TurnStats>,
}

/// Ends the lane, since the kernel refuses its ring: its requests cannot complete and its queues are no longer served.
/// It unwinds, since only that releases [tags](blkyard_mq::Tag) in use.
#[cold]
fn give_up(error: std::io::Error) -> ! {
    let thread = std::thread::current();
    tracing::error!("lane {}: io_uring_enter failed: {error}; the lane ends", thread.name().unwrap_or_default());
    std::panic::resume_unwind(Box::new(RingError::Refused(error)))
}

/// Starts a thread, makes its ring and lets `build` make its first pollers there, in the order of their names. Returns
/// when they are made.
///
/// # Errors
/// See [`LaneError`]; no thread is left behind.
pub fn spawn<S, B>(config: LaneConfig, build: B) -> Result<LaneThread<S>, LaneError>
where
    S: Poller<Ring> + Send + 'static,
    B: FnOnce(&mut Ring) -> Vec<S> + Send + 'static,
{
    let name = config.name.clone();
    let failed = |source| LaneError::Thread { name: name.clone(), source };
    let waker = Waker::new().map_err(failed)?;
    let (told, started) = sync_channel(1);
    let mailbox = Arc::new(Mailbox::default());
    let has_failed = Arc::new(AtomicBool::new(false));
    let mail =
        Mail { mailbox: Arc::clone(&mailbox), asked: Vec::new(), has_failed: Arc::clone(&has_failed), closed: false };
    let on_thread = Arc::clone(&waker);
    let run = move || {
        let made = pin(&config).and_then(|()| {
            config.node.into_iter().for_each(blkyard_mem::prefer_node);
            if let Err(error) = shorten_slice(LANE_SLICE_NS) {
                tracing::debug!("lane {}: its time slice stays the default: {error}", config.name);
            }
            let made = Ring::new(config.ring);
            made.map_err(|source| LaneError::Ring { name: config.name.clone(), source })
        });
        match made {
            Err(error) => {
                let _ = told.send(Err(error));
            }
            Ok(mut ring) => {
                let pollers = build(&mut ring);
                let max = ring.view().pollers_max();
                if pollers.len() > max {
                    let _ = told.send(Err(LaneError::Pollers { name: config.name, count: pollers.len(), max }));
                    return;
                }
                let lane = Lane::new(config.policy, thread_cpu_use);
                let view = (Arc::clone(ring.view()), Arc::clone(lane.turns()));
                let mut turning = Turning { ring, lane, mail, waker: on_thread };
                pollers.into_iter().enumerate().for_each(|(name, poller)| turning.admit(name as u32, poller));
                // The spawner waits for this only; if it has ended, the lane runs all the same.
                let _ = told.send(Ok(view));
                turning.run();
            }
        }
    };
    let thread = std::thread::Builder::new().name(name.clone()).spawn(run).map_err(failed)?;
    match started.recv() {
        Ok(Ok((ring, turns))) => {
            Ok(LaneThread { name, thread, commands: LaneCommands { mailbox, waker }, has_failed, ring, turns })
        }
        Ok(Err(error)) => {
            let _ = thread.join();
            Err(error)
        }
        Err(_) => Err(panicked(&name, thread)),
    }
}

fn pin(config: &LaneConfig) -> Result<(), LaneError> {
    let Some(cpus) = &config.cpus else { return Ok(()) };
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|cpu| (**cpu as usize) < rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu as usize));
    rustix::thread::sched_setaffinity(None, &set).map_err(|errno| LaneError::Pin {
        name: config.name.clone(),
        cpus: cpus.clone(),
        source: errno.into(),
    })
}

/// The lane's end of the commands.
struct Mail<S> {
    mailbox: Arc<Mailbox<LaneCommand<S>>>,
    /// Who waits for which poller.
    asked: Vec<(u32, OneshotSender<Option<S>>)>,
    /// The kernel refuses the ring.
    has_failed: Arc<AtomicBool>,
    /// No command will come any more.
    closed: bool,
}

impl<S> Drop for Mail<S> {
    fn drop(&mut self) {
        self.mailbox.close();
    }
}

/// The ring goes first, also when a panic unwinds: it waits for I/O into memory that the pollers hold.
struct Turning<S> {
    ring: Ring,
    lane: Lane<S>,
    mail: Mail<S>,
    waker: Arc<Waker>,
}

impl<S: Poller<Ring>> Turning<S> {
    fn run(mut self) {
        let clock = Clock::new();
        loop {
            let now_ns = clock.now_ns();
            self.ring.reap();
            while let Some(index) = self.ring.next_signalled() {
                if let Some(slot) = slot_of(index) {
                    self.lane.unpark(slot);
                }
            }
            // Also of a lane that never sleeps: a parked poller learns of a command by a call only, and of events of
            // its streams not at all.
            if self.waker.flag().take_call() | self.ring.take_unattended() {
                self.lane.unpark_all();
            }
            if self.mail.mailbox.is_pending() {
                self.read_commands();
            }
            let idle = self.lane.turn(&mut self.ring, now_ns);
            self.watch_parked(now_ns);
            if let Some((slot, name, poller)) = self.lane.part(&mut self.ring) {
                self.hand_over(slot, name, poller);
                continue;
            }
            let deadline_ns = match idle {
                Idle::Turn => {
                    self.ring.submit();
                    if self.ring.has_failed() {
                        break;
                    }
                    continue;
                }
                Idle::End if self.mail.closed => break,
                Idle::End => None,
                Idle::Sleep(deadline_ns) => deadline_ns,
            };
            if !self.waker.flag().prepare_wait() {
                self.ring.submit();
                continue;
            }
            let listen_ns = self.watch_active(now_ns);
            self.ring.sleep([deadline_ns, listen_ns].into_iter().flatten().min());
            self.waker.flag().finish_wait();
            if self.ring.has_failed() {
                break;
            }
        }
        self.ring.submit();
        if let Some(error) = self.ring.take_failure() {
            // Set now: the ring is dropped only when the kernel has finished, which may never happen.
            self.mail.has_failed.store(true, Ordering::Relaxed);
            self.mail.mailbox.close();
            self.mail.asked.clear();
            give_up(error);
        }
    }

    /// Polls the eventfds of the pollers that the turn parked. A poller whose eventfd cannot be polled is unparked.
    #[inline]
    fn watch_parked(&mut self, now_ns: u64) {
        while let Some(slot) = self.lane.next_parked() {
            if self.watch(slot, now_ns) != Heard::All {
                self.lane.unpark(slot);
            }
        }
    }

    /// Polls the eventfds of the active pollers, except those signalled in vain: returns the time to poll the first of
    /// these again.
    fn watch_active(&mut self, now_ns: u64) -> Option<u64> {
        self.ring.watch(self.waker.eventfd(), OWN);
        let mut listen_ns = None;
        for index in 0..self.lane.active().len() {
            let slot = self.lane.active()[index];
            if let Heard::NotBefore(paused_until_ns) = self.watch(slot, now_ns) {
                listen_ns = [listen_ns, Some(paused_until_ns)].into_iter().flatten().min();
            }
        }
        listen_ns
    }

    /// Listens to the eventfds of a poller.
    fn watch(&mut self, slot: Slot, now_ns: u64) -> Heard {
        let (poller, worked) = self.lane.take_worked(slot);
        let mut heard = Heard::All;
        for (index, eventfd) in eventfds(slot).zip([poller.eventfd(), poller.device_eventfd()]) {
            let Some(eventfd) = eventfd else {
                self.ring.unwatch(index);
                continue;
            };
            let eventfd = match self.ring.watch_moderated(eventfd, index, worked, now_ns) {
                Some(paused_until_ns) => Heard::NotBefore(paused_until_ns),
                None if self.ring.is_listening(index) => Heard::All,
                None => Heard::NotAll,
            };
            heard = heard.min(eventfd);
        }
        heard
    }

    #[cold]
    fn read_commands(&mut self) {
        for command in self.mail.mailbox.take() {
            match command {
                LaneCommand::Admit(name, make, entered) => {
                    if let Some(make) = take_make(&make) {
                        self.admit(name, make());
                        let _ = entered.send(());
                    }
                }
                LaneCommand::Leave(name, answer) => {
                    if self.lane.ask_to_leave::<Ring>(name) {
                        self.mail.asked.push((name, answer));
                    } else {
                        let _ = answer.send(None);
                    }
                }
                LaneCommand::Stay(name) => {
                    self.lane.ask_to_stay::<Ring>(name);
                    let stays = self.mail.asked.extract_if(.., |(asked, _)| *asked == name);
                    stays.for_each(|(_, answer)| drop(answer.send(None)));
                }
                LaneCommand::Policy(policy, done) => {
                    self.lane.set_policy(policy);
                    let _ = done.send(());
                }
                LaneCommand::Close => self.mail.closed = true,
            }
        }
    }

    fn admit(&mut self, name: u32, poller: S) {
        let waker = Arc::clone(&self.waker) as Arc<dyn Wake>;
        self.lane.admit(&mut self.ring, &waker, name, poller);
    }

    /// Hands a detached poller to the thread that asked for it. From here on no event of it reaches this lane.
    #[cold]
    fn hand_over(&mut self, slot: Slot, name: u32, poller: S) {
        eventfds(slot).for_each(|index| self.ring.unwatch(index));
        self.ring.submit();
        let asked = self.mail.asked.iter().position(|(asked, _)| *asked == name);
        match asked.map(|index| self.mail.asked.swap_remove(index)) {
            Some((_, answer)) => {
                if let Err(Some(poller)) = answer.send(Some(poller)) {
                    // Whoever asked is gone. It is better served here than nowhere.
                    self.admit(name, poller);
                }
            }
            None => unreachable!("a poller leaves only when it is asked for"),
        }
    }
}

/// Slot of the poller with this eventfd index; `None` for the waker's.
fn slot_of(eventfd: usize) -> Option<Slot> {
    eventfd.checked_sub(OWN + 1).map(|eventfd| eventfd / EVENTFDS_EACH)
}

/// Numbers of a poller's eventfds.
fn eventfds(slot: Slot) -> Range<usize> {
    let first = OWN + 1 + slot * EVENTFDS_EACH;
    first..first + EVENTFDS_EACH
}

/// Whether the eventfds of a poller are listened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Heard {
    /// One is signalled in vain, and is listened to again at this time, ns.
    NotBefore(u64),
    /// One cannot be polled.
    NotAll,
    All,
}

impl<S> std::fmt::Debug for LaneThread<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneThread").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<S> LaneThread<S> {
    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Wakes the lane from any thread, after a message to one of its pollers or a new eventfd.
    pub fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.commands.waker) as Arc<dyn Wake>
    }

    /// Has a poller live here from now on, under a name that no other one here has. It is made, or unpacked, on the
    /// lane's thread.
    pub(crate) fn begin_admit(&self, name: u32, make: MakePoller<S>) -> Admission<S> {
        self.commands.admit(&self.name, name, make)
    }

    /// Asks for a poller back that lives here.
    pub(crate) fn begin_release(&self, name: u32) -> Release<S> {
        self.commands.release(&self.name, name)
    }

    /// Changes how long it turns without work before it sleeps; from its next turn on. Says what it is called, and
    /// where it answers.
    pub(crate) fn set_policy(&self, policy: IdlePolicy) -> (String, Receiver<()>) {
        (self.name.clone(), self.commands.set_policy(policy))
    }

    /// Counters of its ring.
    pub fn ring(&self) -> &Arc<RingCounters> {
        &self.ring
    }

    /// How long its turns take.
    pub fn turns(&self) -> &Arc<TurnStats> {
        &self.turns
    }

    /// CPU time used so far; `None` once it has ended.
    pub fn cpu_ns(&self) -> Option<u64> {
        let mut clock = 0;
        // SAFETY: the thread has not been joined, since we hold its handle, so its id is valid; `clock` is ours.
        let status = unsafe { libc::pthread_getcpuclockid(self.thread.as_pthread_t(), &raw mut clock) };
        if status == 0 { clock_ns(clock) } else { None }
    }

    /// Whether the thread has ended, or serves no queue any more since the kernel refuses its ring: then it ends once
    /// its I/O in flight has completed.
    pub fn is_finished(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed) || self.thread.is_finished()
    }

    /// Waits until all its pollers have ended; no more can be admitted.
    ///
    /// # Errors
    /// It panicked.
    pub fn join(self) -> Result<(), LaneError> {
        drop(self.commands);
        end(&self.name, self.thread)
    }
}

fn end(name: &str, thread: JoinHandle<()>) -> Result<(), LaneError> {
    thread.join().map_err(|panic| {
        let panic = match panic.downcast::<RingError>() {
            Ok(source) => return LaneError::Ring { name: name.into(), source: *source },
            Err(panic) => panic,
        };
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
        LaneError::Panicked { name: name.into(), message: message.unwrap_or_else(|| "no message".into()) }
    })
}

fn panicked(name: &str, thread: JoinHandle<()>) -> LaneError {
    match end(name, thread) {
        Err(error) => error,
        Ok(()) => unreachable!("a lane that does not panic tells whether it started"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mem::oneshot;
    use blkyard_mq::PollerState;
    use std::os::fd::{AsRawFd, BorrowedFd};
    use std::sync::mpsc::RecvTimeoutError;

    /// A poller that makes the kernel refuse the ring when it is run.
    struct Breaker(Option<std::sync::mpsc::Receiver<()>>);

    /// Waits, as I/O may that is in flight.
    impl Drop for Breaker {
        fn drop(&mut self) {
            if let Some(end) = &self.0 {
                let _ = end.recv();
            }
        }
    }

    impl Poller<Ring> for Breaker {
        fn run_once(&mut self, ring: &mut Ring, _: u64) -> PollerState {
            let null = std::fs::File::open("/dev/null").unwrap();
            // SAFETY: both are open; the ring's descriptor is a file of another kind from now on.
            let status = unsafe { libc::dup2(null.as_raw_fd(), ring.descriptor().as_raw_fd()) };
            assert!(status >= 0);
            PollerState::Idle
        }
        fn arm(&mut self) -> bool {
            false
        }
        fn disarm(&mut self) {}
        fn eventfd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
        fn deadline_ns(&self) -> Option<u64> {
            None
        }
        fn is_over(&self) -> bool {
            false
        }
        fn leave(&mut self, _: &mut Ring) -> bool {
            true
        }
        fn stay(&mut self) {}
    }

    #[test]
    fn lane_of_a_refused_ring_answers_before_its_io_is_over() {
        let (over, end) = std::sync::mpsc::channel();
        let config = LaneConfig { name: "stuck".into(), ..LaneConfig::default() };
        let lane = spawn(config, |_| vec![Breaker(Some(end))]).unwrap();
        let begin = std::time::Instant::now();
        while !lane.is_finished() {
            assert!(begin.elapsed() < Duration::from_secs(30), "nobody learns that the lane has failed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (answer, came) = oneshot();
        lane.commands.give(LaneCommand::Leave(0, answer));
        assert!(matches!(came.recv_timeout(Duration::from_secs(30)), Err(RecvTimeoutError::Disconnected)));
        assert!(!lane.thread.is_finished(), "its I/O is not over");
        drop(over);
        assert!(lane.join().is_err());
    }

    #[test]
    fn refused_ring_ends_its_lane_in_order() {
        let lane =
            spawn(LaneConfig { name: "broken".into(), ..LaneConfig::default() }, |_| vec![Breaker(None)]).unwrap();
        let begin = std::time::Instant::now();
        while !lane.is_finished() {
            assert!(begin.elapsed() < Duration::from_secs(30), "the lane goes on with a ring that the kernel refuses");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = lane.join().unwrap_err();
        assert!(matches!(&error, LaneError::Ring { source: RingError::Refused(_), .. }), "{error}");
        assert!(error.to_string().starts_with("lane broken: io_uring failed"), "{error}");
    }
}
