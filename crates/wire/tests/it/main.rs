//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
#![forbid(unsafe_code)]

mod nvme_tcp_random;
mod nvme_tcp_vectors;
mod vfio_user_random;
mod vfio_user_vectors;
