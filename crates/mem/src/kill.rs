//! Ends a thread's stores at a chosen one: leaves in shared memory what a process killed there would leave.
//!
//! For tests built with `--cfg kill`. A process that gets SIGKILL stops between two instructions: all its earlier
//! stores are done, no later one is. The instructions between two stores to shared memory make no difference to a
//! reader of that memory, so stopping before each store in turn covers every case. Counts the stores of
//! [`View`](crate::View) on one thread; bytes copied into a region are not counted.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Stores left before the thread is killed; `None` for unlimited.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Payload of the unwind that ends a life.
struct Killed;

/// Runs `life`, which is killed before its store number `stores`, counted from 0. Returns `None` if it was.
pub fn after<R>(stores: u64, life: impl FnOnce() -> R) -> Option<R> {
    LEFT.set(Some(stores));
    let end = catch_unwind(AssertUnwindSafe(life));
    LEFT.set(None);
    match end {
        Ok(value) => Some(value),
        Err(end) if end.is::<Killed>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// Runs code of another process during a life: its stores are not counted.
pub fn spared<R>(other: impl FnOnce() -> R) -> R {
    let left = LEFT.take();
    let value = other();
    LEFT.set(left);
    value
}

pub(crate) fn before_store() {
    match LEFT.get() {
        None => {}
        // Not a panic: no hook runs and no message is printed.
        Some(0) => resume_unwind(Box::new(Killed)),
        Some(left) => LEFT.set(Some(left - 1)),
    }
}
