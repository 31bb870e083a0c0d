//! Takeover: a daemon replaces another, which ends (`serve --takeover SOCKET`).
//!
//! ```text
//!   new                                      old
//!    │── "takeover" ─────────────────────────▶│ every export drains
//!    │◀─ descriptors, and their description ──│
//!    │ opens, builds, sets everything up      │ waits; continues by itself after a timeout
//!    │── "taken" ────────────────────────────▶│
//!    │◀─ "yours" ─────────────────────────────│ releases everything, ends
//!    │ starts the queues                      │
//! ```
//!
//! Until it has sent "yours" the old daemon can continue unchanged, and does so if the new one refuses, dies or takes
//! too long. It sends it only while the new one is connected, and never runs a queue afterwards.

mod give;
mod handover;
mod take;
mod wire;

pub use give::{Given, give};
pub use take::{InheritedState, take};

/// Version of the handover format, incremented by every incompatible change.
pub const VERSION: u32 = 2;
