//! The NVMe host drives a controller over vfio-user: set-up, verified I/O, reset with I/O in flight, shutdown. Each
//! wait ends by an interrupt or a deadline of the host.
//! The scenario `nvme-qemu-controller` has the controller of another program.

#[test]
fn our_controller_is_driven_over_a_foreign_transport() {
    for (shares_doorbells, has_shadow) in [(true, true), (true, false), (false, true), (false, false)] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nvme.sock");
        let server = crate::server::serve(&socket, shares_doorbells);
        crate::nvme_rig::exercise(&socket, has_shadow);
        server.join().unwrap();
    }
}
