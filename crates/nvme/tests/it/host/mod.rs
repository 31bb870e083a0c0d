//! The host side of a controller against test controllers: registers, bring-up, failure and races.

mod bring_up;
mod enable;
mod failure;
mod fake;
mod passthrough;
mod peer;
mod real;
mod real_walk;
mod rig;
mod walk;
mod wide;
