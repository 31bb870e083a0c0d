//! Message formats of the protocols that blkyard implements: parsing and encoding, for both sides.
//!
//! One module per protocol. A parser checks each length, count and offset before use, and its result cannot hold values
//! that the specification forbids. This crate does no I/O and reads no clock; it allocates at most as many bytes as
//! have arrived, and imports no other crate of the project.
#![forbid(unsafe_code)]

pub mod nvme_tcp;
pub mod vfio_user;
