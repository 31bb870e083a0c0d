//! The twelve properties of a queue core, each over a device that makes all the trouble it may.
//!
//! A plan says what the queue and its device are like and what is done to them: bios of every kind for several
//! namespaces, turns, time, depths, freezes and quiesces in between. A world carries it out and writes down all that
//! happens ([`world`]); what is on the device and in memory is checked as it goes ([`content`]). Each property is a
//! judge that reads what was written down, and bears its number. What several threads have part in is tried under all
//! kinds of schedules besides, in `shuttle_*.rs` and `loom_*.rs`.
#![cfg(not(any(loom, shuttle)))]

mod bios;
mod content;
mod control;
mod flush;
mod rates;
mod shared;
mod tags;
mod two_queues;
mod world;
