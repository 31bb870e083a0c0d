//! vfio-user: access to an NVMe controller that another process serves.
//!
//! The protocol is a state machine (`session.rs`), over a socket (`connection.rs`). Further parts: the work of a PCI
//! driver (`pci.rs`), the memory that the server maps (`memory.rs`), doorbells with eventfds (`doorbells.rs`), the
//! controller (`device.rs`), and the transport of the NVMe host (`transport.rs`). The NVMe host itself is in crate
//! `nvme`.

mod connection;
mod device;
mod doorbells;
mod error;
mod memory;
mod pci;
mod session;
mod transport;

pub use device::{VfioUserConfig, VfioUserController};
pub use error::VfioUserError;
