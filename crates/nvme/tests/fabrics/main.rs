//! The host side of fabrics against a target in memory: bring-up, failures and error recovery, discovery, and walks.
#![forbid(unsafe_code)]

mod alloc;
mod bring_up;
mod failure;
mod real;
mod rig;
#[path = "../common/seeds.rs"]
mod seeds;
mod target;
mod walk;
