//! Sessions of all kinds leave no descriptor and no mapping. A separate program, so that no other test opens any
//! meanwhile.

mod common;

use std::os::fd::AsFd;

use common::{Front, Gate, Ram, Raw, Request, Vq, World, event, one_queue, until, words64};
use vhost::vhost_user::VhostUserFrontend;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:guest")).count()
}

/// One session of every kind that ends well or badly.
fn sessions(world: &mut World) {
    let export = &world.exports[0];
    let (mut front, mut vq) = one_queue(export);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    // Its queue moves to lanes that come and go.
    for lanes in [3, 1, 2] {
        world.lanes.deal(lanes, |poller| (poller + lanes) % lanes).unwrap();
        assert_eq!(vq.write(0, &[1; 512]), 0);
    }
    // Everything replaced, some of it refused.
    for _ in 0..3 {
        let dimm = Ram::at(1 << 32, 1 << 20);
        front.add(&dimm).unwrap();
        front.share(&[&vq.ram]).unwrap();
        assert!(front.set_event(Request::SetVringCall, 0, Some(&event())));
        assert!(front.set_event(Request::SetVringErr, 0, Some(&event())));
        assert!(front.set_event(Request::SetVringKick, 0, Some(&event())));
        assert!(front.raw.accepts(Request::SetLogFd, &[], &[event().as_fd()]));
        let (channel, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        front.set_backend_request_fd(&channel).unwrap();
    }
    front.reset_device().unwrap();
    front.leave(export);
    let ram = Ram::new(1 << 20);
    for bad in 0..4 {
        let raw = Raw::connect(&export.path);
        raw.negotiate(common::SPLIT);
        let mut table = common::state(2, 0);
        table.extend(words64(&ram.words()));
        table.extend(words64(&ram.words()));
        let (_reader, pipe) = std::io::pipe().unwrap();
        match bad {
            0 => assert!(!raw.accepts(Request::SetMemTable, &table, &[ram.file.as_fd(); 2])),
            1 => assert!(!raw.accepts(Request::SetVringKick, &words64(&[0]), &[pipe.as_fd()])),
            2 => assert!(!raw.accepts(Request::SetFeatures, &words64(&[1 << 63]), &[])),
            _ => assert!(raw.send(&Raw::message(1, 1, &[]), &[pipe.as_fd(); 32])),
        }
        raw.wait_closed();
    }
    // Memory that goes away under a running ring.
    let mut front = Front::connect(export);
    let ram = Ram::new(1 << 20);
    front.share(&[&ram]).unwrap();
    let vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    ram.truncate(0);
    common::ring(&vq.kick);
    front.raw.wait_closed();
    drop(front);
    until("all are let go", || !export.status().is_connected());
}

#[test]
fn sessions_that_end_well_or_badly_leave_nothing_behind() {
    let gate = Gate::open();
    let mut world = World::gated(&gate);
    sessions(&mut world);
    // Lanes notice the end of an eventfd with a delay, so the initial count may be slightly too high: by less than
    // twenty times what one session of each kind could leave behind.
    let before = descriptors();
    (0..20).for_each(|_| sessions(&mut world));
    until("no more descriptors are open than before", || descriptors() <= before);
    until("no guest memory is mapped", || mappings() == 0);
    world.stop();
}
