//! The dreamed world: virtual time, seeded chance, and devices that exist in neither wood nor metal.
//!
//! Here an hour passes in a moment and the same seed makes the same hour, to the last bit. [`Events`] is clock and
//! calendar in one. A [`Model`] is a machine of events with figures for data: a [`RotaryDisk`] that turns, [`Flash`], a
//! [`FixedLatency`] of a given latency and ceiling. A [`Modelled`] device puts one under the real core, and keeps the
//! bytes; its queues are driven by whatever time their lane has, so it is at home in real time as well. A
//! [`ModelDevice`] is one with queue pairs, as NVMe has them: [`PairDriver`] drives one end of a [`queue_pair`].
//!
//! A world ([`run_world`]) is drawn from a seed, runs the real queues on such a device, and judges what comes of it.
//!
//! No thread is started and no clock is read here. Who dreams owns the loop: take the next event, hand it to whom it
//! concerns, let them add theirs.
#![forbid(unsafe_code)]

mod chaos;
mod device;
mod disk;
mod driver;
mod events;
mod flash;
mod line;
mod model;
mod modelled;
mod pair;
mod rng;
mod world;

pub use chaos::{ChaosConfig, ChaosCounts, ChaosDevice, ChaosEvent, ChaosQueue, ChaosStep};
pub use device::{DeviceEvent, DeviceModel, ModelDevice};
pub use disk::{DiskModel, RotaryDisk};
pub use driver::PairDriver;
pub use events::Events;
pub use flash::{Flash, FlashModel};
pub use line::{FixedLatency, LineModel};
pub use model::{Access, Model, ModelEvent};
pub use modelled::{Keeps, Modelled, ModelledQueue};
pub use pair::{Command, DeviceEnd, HostEnd, PairCompletion, queue_pair};
pub use rng::Rng;
pub use world::{WorldDevice, WorldOptions, WorldResult, WorldScheduler, run as run_world};
