//! Threads that allocate memory on the NUMA node of a lane.
//!
//! The tables of a queue are heap memory, made before the queue comes to its lane. An allocator serves each thread from
//! pages of its own, so what a thread of a node makes lies there, also when it is made in memory that another queue
//! gave back. Threads are started when they are needed and kept: one that waits for a device holds up no other.
//!
//! On a machine with one node no lane has a node, and work is done on the calling thread.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

type NodeWork = Box<dyn FnOnce() + Send>;

/// Idle threads by node. They end with this.
#[derive(Debug, Default)]
pub struct NodeThreads {
    idle: Mutex<BTreeMap<u32, Vec<Sender<NodeWork>>>>,
}

impl NodeThreads {
    /// Runs `make` on a thread that prefers this node, and waits for its result. Without a node, or if no thread can be
    /// started, on this thread.
    ///
    /// # Panics
    /// If `make` panics.
    pub fn run<T: Send + 'static>(&self, node: Option<u32>, make: impl FnOnce() -> T + Send + 'static) -> T {
        let Some((node, thread)) = node.and_then(|node| Some((node, self.thread(node)?))) else { return make() };
        let (answer, result) = channel();
        let work: NodeWork = Box::new(move || {
            // The receiver waits for as long as this runs.
            let _ = answer.send(catch_unwind(AssertUnwindSafe(make)));
        });
        let Ok(()) = thread.send(work) else { unreachable!("a thread of a node ends with its sender") };
        let Ok(made) = result.recv() else { unreachable!("a thread of a node answers") };
        self.idle().entry(node).or_default().push(thread);
        made.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Vec<Sender<NodeWork>>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thread(&self, node: u32) -> Option<Sender<NodeWork>> {
        if let Some(thread) = self.idle().get_mut(&node).and_then(Vec::pop) {
            return Some(thread);
        }
        let (sender, work) = channel::<NodeWork>();
        let run = move || {
            blkyard_mem::prefer_node(node);
            work.iter().for_each(|work| work());
        };
        std::thread::Builder::new().name(format!("node{node}")).spawn(run).ok().map(|_| sender)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn work_without_a_node_stays_on_its_thread() {
        let threads = NodeThreads::default();
        assert_eq!(threads.run(None, || thread::current().id()), thread::current().id());
        assert!(threads.idle().is_empty());
    }

    #[test]
    fn work_of_a_node_is_done_by_its_threads() {
        let threads = Arc::new(NodeThreads::default());
        let names = |node| {
            let named = || thread::current().name().map(str::to_owned);
            threads.run(Some(node), move || (named(), thread::current().id()))
        };
        let [first, second, other] = [0, 0, 1].map(names);
        assert_eq!((first.0.as_deref(), other.0.as_deref()), (Some("node0"), Some("node1")));
        assert_eq!(first, second, "an idle thread is used again");
        // A thread that waits holds up no other.
        let inner = Arc::clone(&threads);
        let id = || thread::current().id();
        let (outer, nested) = threads.run(Some(0), move || (id(), inner.run(Some(0), id)));
        assert_ne!(outer, nested);
        let panicked = catch_unwind(AssertUnwindSafe(|| threads.run(Some(0), || panic!("a bug"))));
        assert!(panicked.is_err());
        assert_eq!(threads.run(Some(0), || 7), 7);
    }
}
