//! Atomics, cells and locks that model checkers can replace.
//!
//! Shared state of several threads goes through here, in this crate and above, so that `--cfg loom` and `--cfg
//! shuttle` substitute checked types. loom tries every order of a small model, weak memory included; shuttle draws
//! orders of a large one. An ordinary build uses the plain types.

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// A cell whose content is accessed through closures, like loom's.
#[cfg(not(loom))]
#[derive(Debug)]
#[repr(transparent)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// A cell with this content.
    pub const fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Lends the content for reading. The caller proves each use of the pointer.
    #[inline(always)]
    pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Lends the content for writing. The caller proves each use of the pointer.
    #[inline(always)]
    pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// Something that has its cache lines to itself.
///
/// 128 bytes: two lines of 64, since x86 fetches them in pairs; one line on others.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CachePadded<T>(pub T);
