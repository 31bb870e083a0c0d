//! Threads that run the steps of endpoints, which may wait.
//!
//! A few threads are started as steps come. If one has waited for a thread for longer than [`GRACE`], the others are
//! held up, and there is one thread more. So there are at most as many as steps that wait, and a few; a step that waits
//! for its queue for ever delays others by [`GRACE`] once. A thread without work ends.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::control_loop::{EndpointRun, LoopShared};

/// Threads that are started without a step that had to wait for one.
const THREADS: usize = 4;
/// How long a step waits for a thread before there is one more: longer than a step takes that waits for nothing.
const GRACE: Duration = Duration::from_millis(5);
/// How long a thread stays without work.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// The threads.
pub(super) struct WorkerPool {
    shared: Arc<PoolShared>,
    /// It was said that there is no thread to be had.
    is_told: bool,
}

struct PoolShared {
    state: Mutex<PoolState>,
    changed: Condvar,
    control: Arc<LoopShared>,
}

#[derive(Default)]
struct PoolState {
    /// Steps without a thread, and since when.
    waiting: VecDeque<(EndpointRun, Instant)>,
    threads: usize,
    /// Threads without a step.
    idle: usize,
    is_closed: bool,
}

impl PoolShared {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs steps until there has been none for a while.
    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some((run, _)) = state.waiting.pop_front() {
                drop(state);
                // A panic ends the endpoint; whoever waits for that hears it, and it was logged when it happened.
                let _ = catch_unwind(AssertUnwindSafe(|| run.run(&self.control)));
                state = self.state();
                continue;
            }
            if state.is_closed {
                break;
            }
            state.idle += 1;
            let woken = self.changed.wait_timeout(state, IDLE_TIME).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            state.idle -= 1;
            if woken.1.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        // Who closes the pool waits for this. The other threads would wait anew.
        if state.is_closed {
            self.changed.notify_all();
        }
    }
}

impl WorkerPool {
    /// No thread yet. Steps go back to this loop.
    pub(super) fn new(control: Arc<LoopShared>) -> WorkerPool {
        let shared = PoolShared { state: Mutex::default(), changed: Condvar::new(), control };
        WorkerPool { shared: Arc::new(shared), is_told: false }
    }

    /// Has an endpoint run.
    pub(super) fn send(&mut self, run: EndpointRun) {
        let mut state = self.shared.state();
        state.waiting.push_back((run, Instant::now()));
        let is_short = state.waiting.len() > state.idle && state.threads < THREADS;
        drop(state);
        self.shared.changed.notify_one();
        if is_short {
            self.start_one();
        }
    }

    /// When to look whether a step has waited for too long.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.shared.state().waiting.front().map(|(_, since)| *since + GRACE)
    }

    /// Starts one more thread if a step has waited for too long.
    pub(super) fn look(&mut self, now: Instant) {
        let mut state = self.shared.state();
        let is_late = state.waiting.front().is_some_and(|(_, since)| *since + GRACE <= now);
        if !is_late {
            return;
        }
        // The next look is due after the same time.
        state.waiting.iter_mut().for_each(|(_, since)| *since = now);
        drop(state);
        self.start_one();
    }

    fn start_one(&mut self) {
        self.shared.state().threads += 1;
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new().name("export".into()).spawn(move || shared.work());
        match started {
            Ok(_) => self.is_told = false,
            Err(error) => {
                self.shared.state().threads -= 1;
                if !std::mem::replace(&mut self.is_told, true) {
                    tracing::error!("exports wait for a thread: {error}; raise the limit on threads");
                }
            }
        }
    }

    /// Waits until all steps have ended.
    pub(super) fn close(&mut self) {
        let mut state = self.shared.state();
        state.is_closed = true;
        self.shared.changed.notify_all();
        let ended = self.shared.changed.wait_while(state, |state| state.threads > 0);
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }
}
