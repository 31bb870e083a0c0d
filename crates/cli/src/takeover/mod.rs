//! A daemon that takes the place of another, which ends: `serve --takeover SOCKET`.
//!
//! ```text
//!   new                                      old
//!    │── "takeover" ─────────────────────────▶│ every export comes to rest
//!    │◀─ descriptors, and what they are ──────│
//!    │ opens, builds, sets everything up      │ waits; goes on by itself if nobody speaks
//!    │── "taken" ────────────────────────────▶│
//!    │◀─ "yours" ─────────────────────────────│ lets go, ends
//!    │ lets the queues run                    │
//! ```
//!
//! Until it has said "yours" the old daemon can go on as if nothing had happened, and does so if the new one refuses,
//! dies or takes too long. It says so only while the new one listens, and never runs a queue afterwards.

mod give;
mod handover;
mod take;
mod wire;

pub use give::{Given, give};
pub use take::{InheritedState, take};

/// The version of what is handed over. A change that another program would misread gets the next number.
pub const VERSION: u32 = 2;
