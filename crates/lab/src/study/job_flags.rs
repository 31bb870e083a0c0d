//! A job's flags for the sharers of its queue: a box for its completions that other threads found, and an eventfd.
//!
//! For the modes with a lock. A thread that takes another job's completion off the device puts it into that job's box,
//! and signals once. Sleep is unknown here: an eventfd is anything that [wakes](Wake).

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use blkyard_mq::{Bio, Wake};

/// A bio's cookie in flight: the job above, the job's own number below.
const JOB_SHIFT: u32 = 32;

/// The cookie of a bio of this job.
#[inline]
pub(crate) fn cookie(job: usize, slot: usize) -> u64 {
    (job as u64) << JOB_SHIFT | slot as u64
}

/// Job of a bio.
#[inline]
pub(crate) fn job_of(bio: &Bio) -> usize {
    (bio.cookie >> JOB_SHIFT) as usize
}

/// The job's own number for it.
#[inline]
pub(crate) fn slot_of(bio: &Bio) -> usize {
    (bio.cookie & ((1 << JOB_SHIFT) - 1)) as usize
}

/// One job.
pub(crate) struct JobFlag {
    mail: Mutex<Vec<Box<Bio>>>,
    has_mail: AtomicBool,
    eventfd: Arc<dyn Wake>,
}

impl std::fmt::Debug for JobFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("has_mail", &self.has_mail).finish_non_exhaustive()
    }
}

impl JobFlag {
    /// A job for a job with this many bios.
    pub(crate) fn new(bios: usize, eventfd: Arc<dyn Wake>) -> JobFlag {
        JobFlag { mail: Mutex::new(Vec::with_capacity(bios)), has_mail: AtomicBool::new(false), eventfd }
    }

    /// Takes the completions that others have delivered. Returns how many.
    #[inline]
    pub(crate) fn take_mail(&self, out: &mut Vec<Box<Bio>>) -> usize {
        if !self.has_mail.load(Ordering::Acquire) {
            return 0;
        }
        let mut mail = lock(&self.mail);
        self.has_mail.store(false, Ordering::Relaxed);
        let count = mail.len();
        out.append(&mut mail);
        count
    }
}

/// Delivers bios of other jobs, and signals each job once for a run of its own.
pub(crate) fn deliver(job_flags: &[JobFlag], bios: &mut Vec<Box<Bio>>) {
    let mut rest = bios.drain(..).peekable();
    while let Some(first) = rest.next() {
        let number = job_of(&first);
        let job = &job_flags[number];
        let mut mail = lock(&job.mail);
        mail.push(first);
        while let Some(bio) = rest.next_if(|bio| job_of(bio) == number) {
            mail.push(bio);
        }
        job.has_mail.store(true, Ordering::Release);
        drop(mail);
        job.eventfd.wake();
    }
}

/// Takes a lock. That another holder panicked ends the study anyway.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a spin lock, as a kernel driver does: polls until it is free, and never sleeps.
#[inline]
pub(crate) fn spin_lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    loop {
        match mutex.try_lock() {
            Ok(held) => return held,
            Err(TryLockError::Poisoned(held)) => return held.into_inner(),
            Err(TryLockError::WouldBlock) => hint::spin_loop(),
        }
    }
}
