//! Errors of controller management, and the result of a state machine's step.

use crate::{DeviceGone, NvmeStatus};

/// Next step of a state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum HostStep {
    /// Call again at this time, or earlier after an event.
    Wait {
        /// Time of the next call, ns.
        deadline_ns: u64,
    },
    /// The sequence is complete.
    Done,
    /// The sequence has failed.
    Failed(NvmeHostError),
}

/// Reason why a controller cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmeHostError {
    /// The controller does not respond.
    #[error(transparent)]
    Gone(#[from] DeviceGone),
    /// Its minimum page is larger than ours.
    #[error("NVMe controller: its smallest page is {0} bytes; only controllers with pages of 4096 bytes are supported")]
    PageSize(u64),
    /// It has no NVM command set.
    #[error("NVMe controller: offers no I/O command set; an administrative controller has no namespaces to use")]
    NoCommandSet,
    /// Its queues are too short.
    #[error("NVMe controller: its queues have {0} entries; at least 2 are needed")]
    QueueEntries(u32),
    /// RDY did not become one.
    #[error("NVMe controller: not ready {0} ms after it was enabled; reset the device or look into its log")]
    NotReady(u64),
    /// RDY did not become zero. It may still reach the memory of its queues.
    #[error("NVMe controller: still active {0} ms after it was disabled; reset the device")]
    NotIdle(u64),
    /// CSTS.CFS
    #[error("NVMe controller: reports a fatal error; reset the device or look into its log")]
    Fatal,
    /// A command needed for bring-up has failed.
    #[error("NVMe controller: {command} failed, {status}; look into its error log")]
    Command {
        /// Name of the command.
        command: &'static str,
        /// Status of the controller.
        status: NvmeStatus,
    },
    /// A command needed for bring-up was not completed.
    #[error("NVMe controller: {0} was not completed in time; reset the device")]
    Timeout(&'static str),
    /// The memory of the queues cannot be allocated or mapped.
    #[error("NVMe controller: memory for its queues cannot be mapped; check limits on shared and locked memory")]
    Memory,
    /// A command of the user has more data than the controller transfers at once.
    #[error("NVMe controller: {bytes} bytes of data; a command transfers 1 to {max} bytes")]
    Transfer {
        /// Bytes of the command.
        bytes: u64,
        /// The controller's maximum.
        max: u64,
    },
    /// A queue did not answer during a reset.
    #[error(
        "NVMe controller: a queue was not run during a reset; run all queues that are open, or close those not in use"
    )]
    Queues,
    /// The user has removed it.
    #[error("NVMe controller: is being removed; open it again")]
    Removed,
}
