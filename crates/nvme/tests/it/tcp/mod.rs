//! Queues over TCP: both sides against each other on byte streams, and each side against a hostile peer.

mod alloc;
mod divert;
mod hostile_host;
mod hostile_target;
mod io_queue;
mod walk;
mod world;
