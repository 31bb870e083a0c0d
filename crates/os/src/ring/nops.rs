//! The cost of an empty operation of a ring: a limit of the machine, for measurements.
//!
//! Set up as the ring of a lane is, with one owner. Not on the I/O path.
//!
//! Unsafe: entries are pushed; these point to no memory.

use io_uring::{IoUring, opcode};

use super::setup::set_up;
use super::{RingConfig, RingError};

/// A ring for no-op entries.
pub struct NopRing {
    uring: IoUring,
}

impl NopRing {
    /// A ring whose batches have at most `batch_max` entries, for the calling thread.
    ///
    /// # Errors
    /// As for [`super::Ring::new`].
    pub fn new(batch_max: u32) -> Result<NopRing, RingError> {
        Ok(NopRing { uring: set_up(RingConfig { entries: batch_max, ..RingConfig::default() })? })
    }

    /// Hands `batch` operations to the kernel in one call and collects their completions. Returns how many came: all,
    /// or fewer if the kernel refused the call.
    #[inline]
    pub fn round(&mut self, batch: usize) -> usize {
        {
            let mut queue = self.uring.submission();
            for name in 0..batch {
                let entry = opcode::Nop::new().build().user_data(name as u64);
                // SAFETY: the entry points to no memory.
                if unsafe { queue.push(&entry) }.is_err() {
                    break;
                }
            }
        }
        let _ = self.uring.submit_and_wait(batch);
        self.uring.completion().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nop_of_a_batch_comes_back() {
        let mut ring = match NopRing::new(32) {
            Ok(ring) => ring,
            Err(error) => panic!("these tests need io_uring: {error}"),
        };
        for batch in [1, 32, 7] {
            assert_eq!(ring.round(batch), batch);
        }
    }
}
