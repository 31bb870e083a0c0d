//! Where a thread sleeps under loom.
//!
//! A watch with a near deadline ends at once, time having passed: that it may end later is covered by the thread being
//! held up afterwards. The far deadline, the tick, never comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blkyard_mq::{Parker, Wake};
use loom::sync::Notify;

const FAR_NS: u64 = 100_000_000;

pub struct ModelParker {
    called: Notify,
    /// Not modelled: time is the same for all.
    clock: Arc<AtomicU64>,
}

impl ModelParker {
    pub fn beside(clock: &Arc<AtomicU64>) -> Arc<dyn Parker> {
        Arc::new(ModelParker { called: Notify::new(), clock: Arc::clone(clock) })
    }
}

impl Wake for ModelParker {
    fn wake(&self) {
        self.called.notify();
    }
}

impl Parker for ModelParker {
    fn sleep(&self) {
        self.called.wait();
    }

    fn watch(&self, deadline_ns: u64) {
        if deadline_ns.saturating_sub(self.clock.load(Ordering::Relaxed)) >= FAR_NS {
            self.called.wait();
        } else {
            self.clock.fetch_max(deadline_ns, Ordering::Relaxed);
        }
    }
}
