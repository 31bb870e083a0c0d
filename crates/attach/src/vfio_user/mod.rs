//! vfio-user: how an NVMe controller that another process serves is reached.
//!
//! What is said is a state machine (`session.rs`), over a socket (`connection.rs`). The rest is what a PCI driver does
//! (`pci.rs`), the memory that the server maps (`memory.rs`), the controller (`device.rs`), and the same as a transport
//! of the NVMe host (`transport.rs`). The NVMe host itself is in crate `nvme`.

mod connection;
mod device;
mod error;
mod memory;
mod pci;
mod session;
mod transport;

pub use device::{VfioUserConfig, VfioUserController};
pub use error::VfioUserError;
