//! Drives an NVMe controller that any program serves over vfio-user: set-up, verified I/O, reset with I/O in flight,
//! shutdown, with shadow doorbells if there is a second word. Overwrites the disk.
//!
//! `cargo run -p blkyard-attach --example drive_nvme -- SOCKET [shadow]`. Panics if something is not as it should be.
#![forbid(unsafe_code)]

#[path = "../tests/nvme_rig/mod.rs"]
mod nvme_rig;

fn main() {
    let mut words = std::env::args().skip(1);
    let Some(socket) = words.next() else { panic!("give the socket of a vfio-user server with an NVMe controller") };
    nvme_rig::exercise(socket.as_ref(), words.next().is_some());
}
