//! An allocator that counts, for tests that prove that the data path allocates nothing.
//!
//! A test program makes it its global allocator and compares the counts before and after code that must not allocate.
//! Each thread has a separate count, so that neither the test's harness nor other tests disturb it. Only tests use it.
//!
//! Unsafe: implementing an allocator is.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Without a destructor, so that it can be used from the first allocation of a thread to the last.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
#[derive(Debug)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// How often this thread has asked for memory, or for more of it; zero if this is not the allocator in use.
    pub fn count() -> u64 {
        COUNT.get()
    }
}

// SAFETY: all calls are passed on to the system's allocator unchanged, and so are its results.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}
