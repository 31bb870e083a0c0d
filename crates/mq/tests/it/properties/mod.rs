//! The twelve properties of a queue core, each over a chaos device with all its faults.
//!
//! A plan describes the queue, its device and the events: bios of every kind for several namespaces, rounds, time,
//! depths, freezes and quiesces. A world executes it and records everything ([`world`]); the data on the device and in
//! memory is checked during the run ([`content`]). Each property is a judge that reads the record, and has its number.
//! Properties that involve several threads are also tested under many schedules, in `shuttle_*.rs` and `loom_*.rs`.

mod bios;
mod content;
mod control;
mod flush;
mod rates;
mod shared;
mod tags;
mod two_queues;
mod world;
