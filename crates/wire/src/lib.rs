//! Message formats of the protocols that blkyard speaks: bytes in, bytes out, both sides.
//!
//! One module a protocol. A parser checks each length, count and offset before it uses it, and its result cannot hold
//! what the specification forbids. This crate does no I/O and reads no clock; it allocates no more than the bytes that
//! have arrived, and imports nothing of the project.
#![forbid(unsafe_code)]

pub mod vfio_user;
