//! Threads that run steps that may block.
//!
//! A few threads are started as steps arrive. When a step has waited for a thread for longer than [`GRACE`], more are
//! started: as many as are blocked, at least one, at most one for each step without a free thread. The number of
//! threads thus grows by a factor while steps block, and `n` blocked steps delay the others by `GRACE` times the
//! logarithm of `n`. The number of threads never exceeds the number of steps plus a few. An idle thread ends, except
//! for the last one, so that steps run although the system has no more threads.
//!
//! The content of a step is unknown here.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of threads started before any step has waited.
const THREADS: usize = 4;
/// Waiting time of a step after which more threads are started; longer than any step that does not block.
const GRACE: Duration = Duration::from_millis(5);
/// Idle time after which a thread ends.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// One step.
pub(super) type Step = Box<dyn FnOnce() + Send>;

/// The thread pool.
pub(super) struct WorkerPool {
    shared: Arc<PoolShared>,
    /// Whether the failure to start a thread was logged.
    is_told: bool,
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// Steps waiting for a thread, and since when.
    waiting: VecDeque<(Step, Instant)>,
    threads: usize,
    /// Threads without a step.
    idle: usize,
    /// Number of checks that found an overdue step.
    looks: u64,
    /// Threads whose step began before the last such check, [`GRACE`] ago or longer.
    blocked: usize,
    /// Threads whose step began after the last such check.
    recent: usize,
    is_closed: bool,
}

impl PoolShared {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs steps until none has arrived for [`IDLE_TIME`] and another thread is there for the next.
    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some((step, _)) = state.waiting.pop_front() {
                let began = state.looks;
                state.recent += 1;
                drop(state);
                // A panic ends the endpoint. It was already logged, and waiters are notified by the drop.
                let _ = catch_unwind(AssertUnwindSafe(step));
                state = self.state();
                *(if began == state.looks { &mut state.recent } else { &mut state.blocked }) -= 1;
                continue;
            }
            if state.is_closed {
                break;
            }
            state.idle += 1;
            if state.threads == 1 {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            }
            let woken = self.changed.wait_timeout(state, IDLE_TIME).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            state.idle -= 1;
            if woken.1.timed_out() && state.waiting.is_empty() && state.threads > 1 {
                break;
            }
        }
        state.threads -= 1;
        // The closing thread waits for this; any other thread would only wait again.
        if state.is_closed {
            self.changed.notify_all();
        }
    }
}

impl WorkerPool {
    /// A pool with one thread.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn start() -> io::Result<WorkerPool> {
        let pool = WorkerPool { shared: Arc::default(), is_told: false };
        pool.try_start_one()?;
        Ok(pool)
    }

    /// Queues a step.
    pub(super) fn send(&mut self, step: Step) {
        let mut state = self.shared.state();
        state.waiting.push_back((step, Instant::now()));
        let is_short = state.waiting.len() > state.idle && state.threads < THREADS;
        drop(state);
        self.shared.changed.notify_one();
        if is_short {
            self.start_one();
        }
    }

    /// Time of the next check for an overdue step.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.shared.state().waiting.front().map(|(_, since)| *since + GRACE)
    }

    /// Starts more threads if a step has waited for too long.
    pub(super) fn look(&mut self, now: Instant) {
        let mut state = self.shared.state();
        let is_late = state.waiting.front().is_some_and(|(_, since)| *since + GRACE <= now);
        if !is_late {
            return;
        }
        // The next check is due after the same interval.
        state.waiting.iter_mut().for_each(|(_, since)| *since = now);
        // A thread that is idle or new takes a step, and only waits for a CPU.
        let free = state.threads - state.blocked - state.recent;
        let short = state.waiting.len().saturating_sub(free);
        let more = state.blocked.max(1).min(short);
        state.looks += 1;
        state.blocked += std::mem::take(&mut state.recent);
        drop(state);
        for _ in 0..more {
            if !self.start_one() {
                return;
            }
        }
    }

    fn try_start_one(&self) -> io::Result<()> {
        self.shared.state().threads += 1;
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new().name("export".into()).spawn(move || shared.work());
        started.map(drop).inspect_err(|_| self.shared.state().threads -= 1)
    }

    /// Returns false if the system refuses a thread.
    fn start_one(&mut self) -> bool {
        let started = self.try_start_one();
        match &started {
            Ok(()) => self.is_told = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_told, true) {
                    tracing::error!("exports wait for a thread: {error}; raise the limit on threads");
                }
            }
        }
        started.is_ok()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// The time is virtual: each check comes `GRACE` after the previous one, once every thread runs a step.
    #[test]
    fn blocked_steps_delay_others_by_their_logarithm() {
        const BLOCKED: usize = 300;
        let mut pool = WorkerPool::start().unwrap();
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..BLOCKED {
            let wait = Arc::clone(&wait);
            pool.send(Box::new(move || assert!(wait.lock().unwrap().recv().is_err())));
        }
        let (told, done) = channel();
        pool.send(Box::new(move || told.send(()).unwrap()));
        let mut now = Instant::now();
        let mut looks = 0;
        while !pool.shared.state().waiting.is_empty() {
            let begin = Instant::now();
            let settled = |state: &PoolState| state.waiting.is_empty() || state.recent + state.blocked == state.threads;
            while !settled(&pool.shared.state()) {
                assert!(begin.elapsed() < PATIENCE, "a thread has no step");
                std::thread::yield_now();
            }
            now += GRACE;
            pool.look(now);
            looks += 1;
            assert!(looks <= 20, "the last step still waits after {:?}", GRACE * looks);
        }
        done.recv_timeout(PATIENCE).unwrap();
        assert!(pool.shared.state().threads <= BLOCKED + THREADS);
        drop(go);
        pool.close();
    }

    #[test]
    fn last_idle_thread_stays() {
        let mut pool = WorkerPool::start().unwrap();
        let (told, done) = channel();
        for _ in 0..THREADS {
            let told = told.clone();
            pool.send(Box::new(move || told.send(()).unwrap()));
        }
        (0..THREADS).for_each(|_| done.recv_timeout(PATIENCE).unwrap());
        let begin = Instant::now();
        while pool.shared.state().threads > 1 {
            assert!(begin.elapsed() < PATIENCE, "idle threads do not end");
            std::thread::sleep(GRACE);
        }
        std::thread::sleep(IDLE_TIME * 3 / 2);
        assert_eq!(pool.shared.state().threads, 1);
        pool.close();
    }

    /// Under load an idle thread may get no CPU for longer than that. Another one would get none either.
    #[test]
    fn late_step_starts_no_thread_while_one_is_idle() {
        let mut pool = WorkerPool { shared: Arc::default(), is_told: false };
        {
            let mut state = pool.shared.state();
            (state.threads, state.idle) = (1, 1);
            state.waiting.push_back((Box::new(|| {}), Instant::now()));
        }
        let now = Instant::now();
        for look in 1..=10 {
            pool.look(now + GRACE * look);
            assert!(pool.deadline() > Some(now + GRACE * look), "the next check is later");
        }
        assert_eq!(pool.shared.state().threads, 1);
        // A second step has no thread.
        pool.shared.state().waiting.push_back((Box::new(|| {}), now));
        pool.look(now + GRACE * 20);
        assert_eq!(pool.shared.state().threads, 2);
    }

    #[test]
    fn late_step_starts_one_thread_if_none_is_blocked() {
        let mut pool = WorkerPool::start().unwrap();
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..THREADS * 3 {
            let wait = Arc::clone(&wait);
            pool.send(Box::new(move || assert!(wait.lock().unwrap().recv().is_err())));
        }
        pool.look(Instant::now() + GRACE);
        assert_eq!(pool.shared.state().threads, THREADS + 1, "their steps have only begun");
        drop(go);
        pool.close();
    }
}
