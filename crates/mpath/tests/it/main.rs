//! The tests of this crate from outside, in one program.
#![forbid(unsafe_code)]

mod adaptive;
mod failover;
mod hedging;
mod paths;
mod siblings;
