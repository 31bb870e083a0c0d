//! The bells of a lane: event descriptors that end its sleep.
//!
//! ```text
//!            watch                 rung (read, so that it is quiet)
//!   quiet ──────────▶ listening ──────────────────────────────────▶ quiet
//!     ▲                   │ forget, or another descriptor under the same number
//!     └───────────────────┘ (cancelled; the answer of an older generation is ignored)
//! ```
//!
//! Polls are level-triggered: a bell rung before we listen ends the next sleep all the same, so nothing is lost between
//! looking and sleeping. Holds a duplicate of each descriptor, since its owner may close it at any time and the number
//! may come to mean another file. One that cannot be duplicated, for want of descriptors, is tried again before each
//! sleep, and no sleep is long until then. Pushes nothing itself.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::{opcode, squeue, types};

use super::{KIND_BELL, name};

/// Bells of one lane: 8 exports of 64 queues with a bell on either side, and the lane's own.
pub const BELLS_MAX: usize = 1025;
/// Completions that bells may have outstanding: the poll, the poll that is being cancelled, and the cancellation; and
/// the same for the rings of others' bells.
pub(super) const COMPLETIONS_MAX: usize = 3 * BELLS_MAX + 3 * super::chimes::CHIMES_MAX;

#[derive(Debug, Default)]
struct Bell {
    /// Our duplicate, and the number it had with its owner.
    held: Option<(OwnedFd, i32)>,
    generation: u32,
    listening: bool,
    /// Could not be made quiet: listening again would never end.
    broken: bool,
    /// Could not be duplicated the last time.
    deaf: bool,
}

#[derive(Debug, Default)]
pub(super) struct Bells {
    bells: Vec<Bell>,
    /// How many could not be duplicated.
    deaf: usize,
}

/// What the ring does to listen to a bell.
pub(super) struct Step {
    /// The poll of the descriptor that this bell was before.
    pub(super) cancel: Option<u64>,
    pub(super) poll: squeue::Entry,
}

impl Bells {
    pub(super) fn len(&self) -> usize {
        self.bells.len()
    }

    /// Whether some bell cannot be heard until it is watched again.
    #[inline]
    pub(super) fn are_deaf(&self) -> bool {
        self.deaf > 0
    }

    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, index: usize) -> Option<Step> {
        assert!(index < BELLS_MAX, "bell {index} of a lane that may have {BELLS_MAX}");
        if self.bells.len() <= index {
            self.bells.resize_with(index + 1, Bell::default);
        }
        let same = self.bells[index].held.as_ref().is_some_and(|(_, number)| *number == fd.as_raw_fd());
        if same && (self.bells[index].listening || self.bells[index].broken) {
            return None;
        }
        let is_other = !same && self.bells[index].held.is_some();
        let cancel = if is_other { self.forget(index) } else { None };
        let bell = &mut self.bells[index];
        if bell.held.is_none() {
            match fd.try_clone_to_owned() {
                Ok(own) => {
                    bell.held = Some((own, fd.as_raw_fd()));
                    self.deaf -= usize::from(std::mem::take(&mut bell.deaf));
                }
                Err(error) => {
                    if !bell.deaf {
                        tracing::error!(%error, index, "a bell cannot be duplicated: its queue is looked at now and then");
                        bell.deaf = true;
                        self.deaf += 1;
                    }
                    return None;
                }
            }
        }
        let (own, _) = bell.held.as_ref()?;
        bell.listening = true;
        let poll = opcode::PollAdd::new(types::Fd(own.as_raw_fd()), libc::POLLIN as u32).build().user_data(name(
            KIND_BELL,
            index as u32,
            bell.generation,
        ));
        Some(Step { cancel, poll })
    }

    /// The number under which this descriptor is held.
    pub(super) fn index_of(&self, fd: BorrowedFd<'_>) -> Option<usize> {
        let number = fd.as_raw_fd();
        self.bells.iter().position(|bell| bell.held.as_ref().is_some_and(|(_, held)| *held == number))
    }

    /// Stops listening; returns the name of the poll to be cancelled.
    pub(super) fn forget(&mut self, index: usize) -> Option<u64> {
        let bell = self.bells.get_mut(index)?;
        let old = name(KIND_BELL, index as u32, bell.generation);
        let listened = bell.listening;
        self.deaf -= usize::from(bell.deaf);
        bell.generation = bell.generation.wrapping_add(1);
        *bell = Bell { generation: bell.generation, ..Bell::default() };
        listened.then_some(old)
    }

    /// A poll has ended. False if there never was one of this name.
    pub(super) fn rang(&mut self, index: usize, generation: u32, result: i32) -> bool {
        let Some(bell) = self.bells.get_mut(index) else { return false };
        if generation != bell.generation {
            return true; // Cancelled, or rung while it was being cancelled.
        }
        let known = std::mem::take(&mut bell.listening);
        if result == -libc::ECANCELED {
            return known; // The thread that listened is ending, or the ring.
        }
        bell.broken = result < 0 || bell.held.as_ref().is_none_or(|(own, _)| !quiet(own.as_fd()));
        if bell.broken {
            tracing::warn!(index, result, "a bell cannot be heard, so its queue is not served until it is replaced");
        }
        known
    }

    /// The polls that the kernel may have.
    pub(super) fn armed(&self) -> impl Iterator<Item = u64> {
        let listening = self.bells.iter().enumerate().filter(|(_, bell)| bell.listening);
        listening.map(|(index, bell)| name(KIND_BELL, index as u32, bell.generation))
    }
}

/// Reads the count of an event descriptor, without waiting for one. False if it is no such descriptor.
fn quiet(bell: BorrowedFd<'_>) -> bool {
    let mut count = [0_u8; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    // Its owner may have left the descriptor blocking, and may have read it first.
    match rustix::io::preadv2(bell, &mut buffers, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(8) | Err(rustix::io::Errno::AGAIN) => true,
        // Older than Linux 5.12: event descriptors had no such call.
        Err(rustix::io::Errno::OPNOTSUPP) => rustix::io::read(bell, &mut count) == Ok(8),
        _ => false,
    }
}
