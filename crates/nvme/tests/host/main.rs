//! The host's side of a controller against one that the tests control: registers, bring-up, failure and races.
#![forbid(unsafe_code)]

mod bring_up;
mod enable;
mod failure;
mod fake;
mod peer;
mod real;

mod rig;
mod walk;
