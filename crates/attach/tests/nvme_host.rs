//! The NVMe host drives a controller over vfio-user: set-up, verified I/O, reset with I/O in flight, shutdown. Each
//! wait ends by an interrupt or a deadline of the host.
//!
//! With `VFIO_USER_NVME=PROGRAM` in the environment against that server: it is started with a socket and an image, and
//! ends with its client. QEMU's controller behind its `x-vfio-user-server` is one.
#![forbid(unsafe_code)]
#![expect(clippy::default_trait_access, reason = "the crate vfio_user does not export the types of its fields")]

mod nvme_rig;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nvme_rig::NvmeRig;

fn exercise(socket: &Path, has_shadow: bool) {
    let mut rig = NvmeRig::start(socket, has_shadow);
    let blocks = rig.blocks();
    rig.write_and_verify(0..200, 1);
    rig.write_and_verify((0..200).map(|number| number * 7919 % blocks), 77);
    rig.flush();
    rig.reset_under_load();
    rig.write_and_verify((0..100).rev(), 3);
    assert!(rig.interrupts > 0 && rig.ended == 1009, "{} I/Os, {} interrupts", rig.ended, rig.interrupts);
    rig.remove();
}

#[test]
fn our_controller_is_driven_over_a_foreign_transport() {
    for (shares_doorbells, has_shadow) in [(true, true), (true, false), (false, true), (false, false)] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nvme.sock");
        let server = nvme_rig::server::serve(&socket, shares_doorbells);
        exercise(&socket, has_shadow);
        server.join().unwrap();
    }
}

#[test]
fn a_controller_of_another_program_is_driven() {
    let Some(program) = std::env::var_os("VFIO_USER_NVME") else { return };
    for has_shadow in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (socket, image) = (folder.path().join("nvme.sock"), folder.path().join("disk.img"));
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let mut server = Command::new(&program).arg(&socket).arg(&image).spawn().unwrap();
        let start = Instant::now();
        while !socket.exists() {
            assert!(start.elapsed() < Duration::from_mins(1), "the server makes no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        exercise(&socket, has_shadow);
        server.wait().unwrap();
    }
}
