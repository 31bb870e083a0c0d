//! What a queue on its lane and the control thread of its device leave for each other.
//!
//! The control thread puts letters behind the queue's door and rings its bell; the queue reads them when it is next at
//! work. The queue writes down the line, and nobody on a lane waits for an answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SendError, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use blkyard_mem::Region;
use blkyard_mq::QueueKind;
use blkyard_virtio::Complaints;
use blkyard_virtio::driver::BlkRing;

use crate::AttachError;
use crate::event::Event;

/// To a queue.
#[derive(Debug)]
pub(crate) enum Letter {
    /// From now on this is its ring, of this number. What the one before has in flight is to be done again.
    Run(Box<BlkRing>, Arc<Event>, u64),
    /// Its memory of this number is known to the back-end, or cannot be.
    Memory(u64, bool),
    /// Its back-end has died.
    Died,
    /// Another goes on in its ring, which it may have to be told.
    GoesOn,
    /// Nobody serves it any more: what it has and gets fails, until there is a ring again.
    Fail,
}

/// From whoever uses a device.
#[derive(Debug)]
pub(crate) enum Order {
    /// One more queue.
    Open(QueueKind, Sender<Result<Opened, AttachError>>),
    /// The memory of a queue is this from now on, under this number; nothing of the old is in flight.
    Memory(u16, u64, Vec<Arc<Region>>),
    /// The back-end broke this ring of a queue.
    Fault(u16, u64, String),
    /// A request has been with the back-end for too long.
    Late(u16),
    /// The queue is gone.
    Close(u16),
}

/// A queue that may be used.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) number: u16,
    pub(crate) door: Arc<Door>,
}

/// What others may see of a queue.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// `req.N`, or `req_poll.N` for one that is polled, as Linux names them.
    pub name: String,
    /// What the back-end did wrong on it, by reason.
    pub complaints: Arc<Complaints>,
    /// Back-ends that died one after the other while it had requests in flight, and answered none.
    pub deaths: Arc<AtomicU64>,
}

/// A queue's door. On lines of its own: neighbours are looked at by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Door {
    /// There are letters.
    mail: AtomicBool,
    letters: Mutex<Vec<Letter>>,
    /// Rung by the back-end, and for letters; the same one for all back-ends to come.
    pub(crate) bell: Event,
    pub(crate) polled: bool,
    pub(crate) view: QueueView,
}

impl Door {
    pub(crate) fn new(number: u16, kind: QueueKind) -> std::io::Result<Door> {
        let polled = kind == QueueKind::Poll;
        let name = format!("{}.{number}", if polled { "req_poll" } else { "req" });
        let view = QueueView { name, complaints: Arc::default(), deaths: Arc::default() };
        Ok(Door { mail: AtomicBool::new(false), letters: Mutex::default(), bell: Event::new()?, polled, view })
    }

    pub(crate) fn post(&self, letter: Letter) {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).push(letter);
        // Pairs with the swap in `take`: who sees the flag finds the letter. Before the bell: who was armed earlier
        // hears that, who arms later sees this.
        self.mail.store(true, Ordering::SeqCst);
        // Where nobody listens to it nobody would make it quiet, either.
        if !self.polled {
            self.bell.ring();
        }
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.mail.load(Ordering::Relaxed)
    }

    #[cold]
    pub(crate) fn take(&self) -> Vec<Letter> {
        self.mail.swap(false, Ordering::SeqCst);
        std::mem::take(&mut *self.letters.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The way to the control thread. It ends when all lines are gone.
#[derive(Debug)]
pub(crate) struct Line {
    orders: Option<Sender<Order>>,
    wake: Arc<Event>,
}

impl Line {
    pub(crate) fn new(orders: Sender<Order>, wake: &Arc<Event>) -> Line {
        Line { orders: Some(orders), wake: Arc::clone(wake) }
    }

    /// Whether all other lines are gone.
    pub(crate) fn is_last(&self) -> bool {
        // The control thread has one more, to sleep on.
        Arc::strong_count(&self.wake) <= 2
    }

    /// False if the control thread is gone.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.as_ref().is_some_and(|orders| !matches!(orders.send(order), Err(SendError(_))));
        self.wake.ring();
        sent
    }
}

impl Clone for Line {
    fn clone(&self) -> Line {
        Line { orders: self.orders.clone(), wake: Arc::clone(&self.wake) }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.orders = None;
        self.wake.ring();
    }
}
