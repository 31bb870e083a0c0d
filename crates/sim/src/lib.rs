//! The simulation: virtual time, seeded chance, and models of devices.
//!
//! An hour of virtual time takes a moment, and the same seed gives the same run to the bit. [`Events`] is clock and
//! calendar. A [`Model`] is an event machine with figures as data: a [`RotaryDisk`], [`Flash`], a [`FixedLatency`] with
//! a ceiling. A [`ModelPath`] is a network path, for policies that choose among several. A [`Modelled`]
//! device runs one under the real core, and stores the bytes; its queues use the time of their lane, so it also works
//! in real time. A [`ModelDevice`] times the commands of several queues, like NVMe.
//!
//! A seeded run ([`run_world`]) is drawn from its seed, runs the real queues on such a device, and judges the results.
//!
//! No thread is started and no clock is read here. The caller owns the loop: it takes the next event and passes it to
//! its target, which may add others.
#![forbid(unsafe_code)]

mod arguments;
mod chaos;
mod device;
mod disk;
mod events;
mod flash;
mod line;
mod model;
mod modelled;
mod path;
mod rng;
mod world;

pub use arguments::SimArguments;
pub use chaos::{ChaosConfig, ChaosCounts, ChaosDevice, ChaosEvent, ChaosQueue, ChaosStep};
pub use device::{DeviceEvent, DeviceModel, ModelDevice};
pub use disk::{DiskModel, RotaryDisk};
pub use events::Events;
pub use flash::{Flash, FlashModel};
pub use line::{FixedLatency, LineModel};
pub use model::{Access, Model, ModelEvent};
pub use modelled::{Keeps, Modelled, ModelledQueue};
pub use path::{ModelPath, PathBurst, PathLoss, PathModel, PathStall};
pub use rng::Rng;
pub use world::{WorldDevice, WorldOptions, WorldResult, WorldScheduler, run as run_world};
