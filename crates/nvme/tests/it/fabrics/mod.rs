//! The host side of fabrics against a target in memory: bring-up, failures and error recovery, discovery, and walks.

mod alloc;
mod bring_up;
mod cross_reset;
mod events;
mod failure;
mod real;
mod rig;
mod target;
mod walk;
