//! The thread that runs a lane: it owns a ring, the stations built on it, and the one place where they sleep.
//!
//! ```text
//!   ┌─▶ now ─▶ reap ─▶ turn ─┬─ Turn ──▶ submit ────────────────────────────────┐
//!   │                        ├─ Sleep ─▶ settle ─▶ watch all bells ─▶ sleep ────┤
//!   └────────────────────────┼──────────────────────────────────────────────────┘
//!                            └─ End ──▶ the thread ends
//! ```
//!
//! No wake-up is lost. A lane sleeps only after a turn in which every station was asked to have its bell rung from
//! now on, and looked once more after asking (`Lane::turn`); what comes later rings. Bells are level-triggered and
//! quieted only by reading them before the next turn, so one that rings before we listen ends the sleep as well.
//! Completions end it because the kernel counts those already in the ring. Calls of other threads go through
//! [`Waker`], whose flags are checked last of all.
//!
//! A station's bell may be replaced by another descriptor, even one of the same number, which cannot be told from
//! here. Whoever replaces it calls the lane's waker; after a call all bells are listened to anew.
//!
//! Knows nothing of what the stations do.
//!
//! Unsafe: asking for the clock of a thread takes two calls of the C library.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use blkyard_mq::{Idle, IdlePolicy, Lane, Station, Wake};

use crate::clock::{clock_ns, now_ns};
use crate::ring::{BELLS_MAX, FixedBuffers, Ring, RingConfig, RingError, RingView};
use crate::wake::Waker;

/// How a lane thread is made.
#[derive(Clone, Debug, Default)]
pub struct LaneConfig {
    /// Name of the thread; the system shows its first 15 bytes.
    pub name: String,
    /// CPUs it may run on; any that the process may, if none are named.
    pub cpus: Option<Vec<u32>>,
    /// How long it turns without work before it sleeps.
    pub policy: IdlePolicy,
    /// Its ring.
    pub ring: RingConfig,
}

/// Why a lane thread did not start, or how it ended.
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
    /// It may not run where it was told to.
    #[error("lane {name} cannot be pinned to CPUs {cpus:?}: {source}. Name CPUs that this process may run on")]
    Pin {
        /// The lane.
        name: String,
        /// Where it was told to run.
        cpus: Vec<u32>,
        /// What the system said.
        source: std::io::Error,
    },
    /// More than it can listen to.
    #[error("lane {name} was given {count} queues and can listen to {max}: run more lanes", max = BELLS_MAX - 1)]
    Stations {
        /// The lane.
        name: String,
        /// What it was given.
        count: usize,
    },
    /// No thread, or no descriptor for it.
    #[error("lane {name} cannot be started: {source}")]
    Thread {
        /// The lane.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A bug of ours. Its queues are not served any more.
    #[error("lane {name} panicked: {message}")]
    Panicked {
        /// The lane.
        name: String,
        /// What it said.
        message: String,
    },
}

/// A running lane. It runs until all its stations are over; dropping the handle does not stop it.
#[derive(Debug)]
pub struct LaneThread {
    name: String,
    thread: JoinHandle<()>,
    waker: Arc<Waker>,
    ring: Arc<RingView>,
}

/// Starts a thread, makes its ring and lets `build` make its stations there, so that they need not be `Send`. Returns
/// when they are made.
///
/// # Errors
/// See [`LaneError`]; no thread is left behind.
pub fn spawn<S, B>(config: LaneConfig, build: B) -> Result<LaneThread, LaneError>
where
    S: Station<Ring> + 'static,
    B: FnOnce(&mut Ring) -> Vec<S> + Send + 'static,
{
    let name = config.name.clone();
    let failed = |source| LaneError::Thread { name: name.clone(), source };
    let waker = Waker::new().map_err(failed)?;
    let (told, started) = sync_channel(1);
    let on_thread = Arc::clone(&waker);
    let run = move || {
        let made = pin(&config).and_then(|()| {
            let made = Ring::new(config.ring);
            made.map_err(|source| LaneError::Ring { name: config.name.clone(), source })
        });
        match made {
            Err(error) => {
                let _ = told.send(Err(error));
            }
            Ok(mut ring) => {
                let stations = build(&mut ring);
                // One bell is the waker's.
                if stations.len() >= BELLS_MAX {
                    let _ = told.send(Err(LaneError::Stations { name: config.name, count: stations.len() }));
                    return;
                }
                let view = Arc::clone(ring.view());
                let turning = Turning { ring, lane: Lane::new(stations, config.policy) };
                // The spawner waits for this and nothing else; should it be gone, we run all the same.
                let _ = told.send(Ok(view));
                turning.run(&on_thread);
            }
        }
    };
    let thread = std::thread::Builder::new().name(name.clone()).spawn(run).map_err(failed)?;
    match started.recv() {
        Ok(Ok(ring)) => Ok(LaneThread { name, thread, waker, ring }),
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

/// The ring goes first, also when a panic unwinds: it waits for I/O into memory that the stations hold.
struct Turning<S> {
    ring: Ring,
    lane: Lane<S>,
}

impl<S: Station<Ring>> Turning<S> {
    fn run(mut self, waker: &Waker) {
        /// The waker's bell comes before those of the stations.
        const OWN: usize = 0;
        let Turning { ring, lane } = &mut self;
        let mut was_called = false;
        loop {
            let now_ns = now_ns();
            ring.reap();
            match lane.turn(ring, now_ns) {
                Idle::Turn => ring.submit(),
                Idle::End => break,
                Idle::Sleep(deadline_ns) => {
                    if waker.settle() {
                        was_called = true;
                        ring.submit();
                        continue;
                    }
                    if std::mem::take(&mut was_called) {
                        ring.unwatch_all();
                    }
                    ring.watch(waker.bell(), OWN);
                    for (index, station) in lane.stations().iter().enumerate() {
                        match station.bell() {
                            Some(bell) => ring.watch(bell, OWN + 1 + index),
                            None => ring.unwatch(OWN + 1 + index),
                        }
                    }
                    ring.sleep(deadline_ns);
                    waker.rise();
                }
            }
        }
        ring.submit();
    }
}

impl LaneThread {
    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Wakes the lane from any thread: for who has published something to one of its stations, or replaced a bell.
    pub fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.waker) as Arc<dyn Wake>
    }

    /// Whether the memory of its queues is known to the kernel for good.
    pub fn buffers(&self) -> FixedBuffers {
        self.ring.buffers()
    }

    /// What else can be seen of its ring.
    pub fn ring(&self) -> &Arc<RingView> {
        &self.ring
    }

    /// CPU time it has used so far; nothing once it has ended.
    pub fn cpu_ns(&self) -> Option<u64> {
        let mut clock = 0;
        // SAFETY: the thread has not been joined, since we hold its handle, so its id is valid; `clock` is ours.
        let status = unsafe { libc::pthread_getcpuclockid(self.thread.as_pthread_t(), &raw mut clock) };
        if status == 0 { clock_ns(clock) } else { None }
    }

    /// Whether the thread has ended, one way or the other.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until all its stations are over.
    ///
    /// # Errors
    /// It panicked.
    pub fn join(self) -> Result<(), LaneError> {
        end(&self.name, self.thread)
    }
}

fn end(name: &str, thread: JoinHandle<()>) -> Result<(), LaneError> {
    thread.join().map_err(|panic| {
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
