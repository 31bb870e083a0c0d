//! Namespaces of the kernel's NVMe driver by passthrough: `/dev/ngXnY`, with commands in an io_uring.
//!
//! [`NvmeCharDevice`] opens and claims a namespace; [`NvmeCharQueue`] submits commands from a lane and returns their
//! results. Both know commands only as the words of a submission queue entry: formats, limits of the controller and
//! the meaning of statuses belong to their user.

mod abi;
mod device;
mod error;
mod queue;

pub use device::{NvmeCharConfig, NvmeCharDevice, NvmeCharLimits};
pub use error::NvmeCharError;
pub use queue::{NvmeCharData, NvmeCharQueue};
