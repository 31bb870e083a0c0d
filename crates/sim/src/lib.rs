//! The dreamed world: virtual time, seeded chance, and devices that exist in neither wood nor metal.
//!
//! Here an hour passes in a moment and the same seed makes the same hour, to the last bit. [`Events`] is clock and calendar in
//! one; a [`ModelDevice`] is data ([`DeviceModel`]) with an arm that moves when its events are due. What runs on it is the real
//! core: [`PairDriver`] is a driver like any other, over one end of a [`queue_pair`].
//!
//! No thread is started and no clock is read here. Who dreams owns the loop: take the next event, hand it to whom it concerns,
//! let them add theirs.
#![forbid(unsafe_code)]

mod device;
mod driver;
mod events;
mod pair;
mod rng;

pub use device::{DeviceEvent, DeviceModel, ModelDevice};
pub use driver::PairDriver;
pub use events::Events;
pub use pair::{Command, Completion, DeviceEnd, HostEnd, queue_pair};
pub use rng::Rng;
