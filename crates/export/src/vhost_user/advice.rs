//! Log lines for common mistakes of front-ends: unshared memory, and more queues than are served.
//!
//! Only logs; refusals are decided elsewhere.

use blkyard_virtio::RingSetupError;

use crate::core::SHARE;
use crate::vhost_user::backend::QUEUES_MAX;
use crate::vhost_user::memory::Memory;

/// Cause of a failed ring set-up.
pub(crate) fn no_ring(memory: &Memory, error: RingSetupError) -> String {
    match error {
        RingSetupError::Unreachable { what, addr, .. } if !memory.has_user_addr(addr) => {
            let (regions, bytes) = memory.extent();
            format!(
                "the guest's memory is not shared: the {what} at {addr:#x} lies in none of the {regions} regions, \
                 {bytes} bytes, that the front-end shares; {SHARE}"
            )
        }
        error => error.to_string(),
    }
}

/// Log text for a ring in zeroed guest memory.
pub(crate) fn blank_memory() -> String {
    // QEMU before 11 sends the descriptor of memory that it maps privately.
    format!(
        "the guest's memory is probably not shared: its first MiB reads as zeros, so the guest would wait for ever; {SHARE}"
    )
}

/// Log text for a queue beyond those served.
pub(crate) fn no_queue(index: u32, served: usize) -> String {
    let cure = more_queues(served);
    format!("no queue {index}: {served} are served; {cure}")
}

/// Log text for a front-end that disconnects after reading the number of queues.
pub(crate) fn left_at_queues(served: usize) -> String {
    let cure = more_queues(served);
    format!("the front-end disconnected after it read that {served} queues are served; if it needs more, {cure}")
}

fn more_queues(served: usize) -> String {
    format!(
        "start QEMU with num-queues={served}, or serve more with queues=N, up to {QUEUES_MAX}, behind the export's name"
    )
}
