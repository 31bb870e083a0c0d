//! Handling of SIGBUS in mapped regions.
//!
//! A peer that shares a file may truncate it while it is mapped; the next access raises SIGBUS, which ends a process
//! that does not handle it. Here the whole region is replaced by private zero pages and marked as faulted. The thread
//! continues and reads zeroes, and its owner stops the export that the region belongs to. A SIGBUS anywhere else ends
//! the process as usual.
//!
//! The handler runs in the thread that accessed the page. It uses nothing but atomics and one system call, `mmap`. The
//! region that it looks up cannot be dropped meanwhile: the interrupted thread is inside an access that borrows it.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Regions that the client of one export may have mapped from files at one time: 64 slots, a record and a log, all of
/// them twice while they are replaced. Each kind of export is checked against it.
pub const EXPORT_REGIONS_MAX: usize = 2 * (64 + 2);

/// Regions mapped from files at one time, in the whole process: those of 64 exports. No client of one of them can use
/// them up for others.
const MAPPINGS_MAX: usize = 64 * EXPORT_REGIONS_MAX;

/// Bytes that the client of one export may have mapped from files, and of each region: 16 TiB, more than a guest has.
/// A file may be longer than its memory, so a client has no need for memory to use up addresses.
pub const EXPORT_BYTES_MAX: u64 = 1 << 44;

/// Bytes mapped from files at one time, in the whole process: seven eighths of the 128 TiB of addresses of x86-64. A
/// process without addresses for a stack or for its heap aborts.
const BYTES_MAX: usize = 7 << 44;

/// Bytes that are mapped from files, or are about to be.
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// The addresses of one mapping. Dropping it gives them back.
pub(crate) struct MappingBytes(usize);

impl MappingBytes {
    /// Takes them, before they are mapped.
    ///
    /// # Errors
    /// Too few are left.
    pub(crate) fn take(len: usize) -> io::Result<MappingBytes> {
        let add = |bytes: usize| bytes.checked_add(len).filter(|bytes| *bytes <= BYTES_MAX);
        let taken = BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        let too_many = |_| io::Error::other(format!("more than {BYTES_MAX} bytes of shared memory are mapped at once"));
        taken.map_err(too_many)?;
        Ok(MappingBytes(len))
    }
}

impl Drop for MappingBytes {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

struct MappingSlot {
    /// Zero when the slot is free; `BUSY` while it is being filled.
    start: AtomicUsize,
    len: AtomicUsize,
    faulted: AtomicPtr<AtomicBool>,
}

const FREE: usize = 0;
const BUSY: usize = 1;

static SLOTS: [MappingSlot; MAPPINGS_MAX] = [const {
    MappingSlot {
        start: AtomicUsize::new(FREE),
        len: AtomicUsize::new(0),
        faulted: AtomicPtr::new(std::ptr::null_mut()),
    }
}; MAPPINGS_MAX];

/// One registered mapping. Dropping it ends the registration; the mapping must still be there then.
pub(crate) struct WatchedMapping {
    slot: usize,
    faulted: Box<AtomicBool>,
}

impl WatchedMapping {
    /// Watches `len` bytes from `start`, a page-aligned mapping that belongs to the caller.
    ///
    /// # Errors
    /// All slots are taken, or the handler could not be installed.
    pub(crate) fn new(start: usize, len: usize) -> io::Result<WatchedMapping> {
        install()?;
        let faulted = Box::new(AtomicBool::new(false));
        for (index, slot) in SLOTS.iter().enumerate() {
            if slot.start.compare_exchange(FREE, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                // A reader of this length sees the slot busy, or later, when it checks the start again.
                slot.len.store(len, Ordering::Release);
                slot.faulted.store(std::ptr::from_ref(&*faulted).cast_mut(), Ordering::Relaxed);
                // Pairs with the handler's load: a reader of the start sees the length and the flag.
                slot.start.store(start, Ordering::Release);
                return Ok(WatchedMapping { slot: index, faulted });
            }
        }
        Err(io::Error::other(format!("more than {MAPPINGS_MAX} shared memory regions are mapped at once")))
    }

    pub(crate) fn faulted(&self) -> bool {
        self.faulted.load(Ordering::Relaxed)
    }

    /// Does what the handler does, before an access needs it.
    pub(crate) fn give_up(&self) {
        let slot = &SLOTS[self.slot];
        let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        // SAFETY: the mapping of this registration, which its owner still has.
        if unsafe { replace_by_zeroes(start, len) } {
            self.faulted.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for WatchedMapping {
    fn drop(&mut self) {
        SLOTS[self.slot].start.store(FREE, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    static INSTALLED: Once = Once::new();
    static FAILED: AtomicBool = AtomicBool::new(false);
    INSTALLED.call_once(|| {
        // SAFETY: an all-zero sigaction is a valid value to start from.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is initialised and the handler has the signature that SA_SIGINFO needs; it is
        // async-signal-safe.
        let status = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
        FAILED.store(status != 0, Ordering::Relaxed);
    });
    if FAILED.load(Ordering::Relaxed) {
        return Err(io::Error::other("the handler for SIGBUS could not be installed"));
    }
    Ok(())
}

/// Replaces pages by private zero pages. Returns whether that was done.
///
/// # Safety
/// The range is a mapping of ours, of memory that changes at any time anyway.
unsafe fn replace_by_zeroes(start: usize, len: usize) -> bool {
    // SAFETY: replacing its pages at the same address keeps every pointer into it valid.
    let replaced = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    replaced != libc::MAP_FAILED
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo, which for SIGBUS holds an address.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &SLOTS {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        // Another thread may be giving the slot to another region: start and length must be of one. Pairs with the
        // stores in `WatchedMapping::new`.
        if start <= BUSY || slot.start.load(Ordering::Acquire) != start || address < start || address - start >= len {
            continue;
        }
        // SAFETY: the range is a watched mapping of ours, and therefore alive.
        if !unsafe { replace_by_zeroes(start, len) } {
            break;
        }
        // SAFETY: the flag outlives the registration, which ends before the flag is freed.
        unsafe { (*slot.faulted.load(Ordering::Relaxed)).store(true, Ordering::Relaxed) };
        return;
    }
    // Not ours: let the default action take the process when the instruction is tried again.
    // SAFETY: setting the default disposition is always allowed, in a handler too.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_four_exports_may_have_all_the_memory_they_can_and_replace_it_at_the_same_time() {
        // No process has such addresses, so none is ever found.
        let places = (0..64 * 2 * 64).map(|place| 0xffff_8000_0000_0000 + place * 4096);
        let watched: io::Result<Vec<_>> = places.map(|start| WatchedMapping::new(start, 4096)).collect();
        assert!(watched.unwrap().iter().all(|watched| !watched.faulted()));
    }

    #[test]
    fn files_leave_the_process_addresses_for_itself() {
        assert!(MappingBytes::take(BYTES_MAX + 1).is_err() && MappingBytes::take(usize::MAX).is_err());
        // Other tests have some at the same time.
        let most = BYTES_MAX / 8 * 7;
        for _ in 0..2 {
            let taken = MappingBytes::take(most).unwrap();
            assert!(MappingBytes::take(most).is_err());
            drop(taken);
        }
    }
}
