//! Commands of a vfio-user client that need a silent device, while the device hangs: only their own replies wait.

use std::os::fd::AsFd;

use blkyard_mq::Op;
use blkyard_wire::vfio_user::{DmaUnmapRequest, RegionAccess, VfioRequest};

use crate::common::nvme::{file, map, read};
use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, PATIENCE, RawClient, Seen, until};

/// The pending change of the connected client.
fn waits(world: &NvmeWorld) -> Option<&'static str> {
    Some(world.server().status().session()?.waits?.0)
}

/// Sends a command without waiting for its reply.
fn begin(host: &AdminHost, id: u16, request: &VfioRequest<'_>) {
    host.client.send(&request.encode(id, false), &[]);
}

/// Takes the next reply, which must be a success, and returns its id.
fn replied(host: &AdminHost) -> u16 {
    let (id, result) = host.client.receive().expect("the connection is open");
    result.unwrap();
    id
}

#[test]
fn registers_are_served_while_an_unmap_waits() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    begin(&host, 1000, &VfioRequest::DmaUnmap(DmaUnmapRequest::All));
    until("the unmap waits", || waits(&world) == Some("a change of the client's memory"));
    // Replies come with their own ids: that of the unmap is not among them.
    assert_eq!(host.csts(), 1);
    // A controller reset is accepted, and waits for the device, too.
    host.write(0x14, &[0, 0, 0x46, 0]);
    (0..20).for_each(|_| assert_eq!(host.csts(), 1));
    let view = world.server().status().session().unwrap();
    assert_eq!((view.dma_maps, gate.held()), (1, 1), "the memory of the write is mapped");
    // Commands that change the memory, or reset the function, have their turn.
    begin(&host, 1001, &VfioRequest::DeviceReset);
    let memory = file(0x1000);
    host.client.send(&map(AdminHost::BASE, 0x1000, 0).encode(1002, false), &[memory.as_fd()]);
    begin(&host, 1003, &read(0, 0x1c, 4));
    assert!(!host.client.is_readable(std::time::Duration::from_millis(100)));
    assert_eq!(gate.held(), 1);
    gate.set_shut(false);
    assert_eq!([(); 4].map(|()| replied(&host)), [1000, 1001, 1002, 1003]);
    assert_eq!(waits(&world), None);
    let ended = gate.seen().iter().position(|seen| *seen == Seen::Ended(Op::Write, 0)).unwrap();
    let unmapped = gate.seen().iter().rposition(|seen| *seen == Seen::Memory(0)).unwrap();
    assert!(ended < unmapped, "{:?}", gate.seen());
    drop(host);
    world.stop();
}

#[test]
fn client_that_leaves_is_noticed_while_its_unmap_waits() {
    for commands in 0..3 {
        let gate = Gate::shut();
        let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
        let host = AdminHost::stuck(&world, &gate);
        (0..commands).for_each(|id| begin(&host, id, &VfioRequest::DmaUnmap(DmaUnmapRequest::All)));
        if commands > 0 {
            until("the unmap waits", || waits(&world).is_some());
        }
        drop(host);
        until("its end is noticed", || waits(&world) == Some("the end of the session"));
        // The next client is served when the device is silent.
        let next = RawClient::connect(&world.path);
        next.send(&RawClient::version(0, 1).encode(1, false), &[]);
        assert!(!next.is_readable(std::time::Duration::from_millis(100)));
        assert_eq!((gate.held(), world.server().status().sessions()), (1, 1));
        gate.set_shut(false);
        assert!(next.receive().unwrap().1.is_ok());
        drop(next);
        world.stop();
    }
}

/// Nobody is there for the reply, so it must not be sent before the export is handed over.
#[test]
fn takeover_goes_on_after_a_client_left_while_its_unmap_waited() {
    for commands in 1..3 {
        let gate = Gate::shut();
        let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
        let host = AdminHost::stuck(&world, &gate);
        (0..commands).for_each(|id| begin(&host, id, &VfioRequest::DmaUnmap(DmaUnmapRequest::All)));
        until("the unmap waits", || waits(&world).is_some());
        drop(host);
        until("its end is noticed", || waits(&world) == Some("the end of the session"));
        let asked = world.server().hand().hand_over();
        // The queues drain meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(100));
        gate.set_shut(false);
        let handed = asked.recv_timeout(PATIENCE).unwrap();
        // Nobody takes it, so the export goes on.
        assert_eq!(handed.map(drop), Ok(()), "{commands} commands");
        drop(RawClient::greeted(&world.path));
        world.stop();
    }
}

/// It would keep all others from the next process as well.
#[test]
fn takeover_goes_on_without_a_client_that_reads_no_reply() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let host = AdminHost::stuck(&world, &gate);
    begin(&host, 1, &VfioRequest::DmaUnmap(DmaUnmapRequest::All));
    until("the unmap waits", || waits(&world).is_some());
    let config_space = read(7, 0, 4096).encode(2, false);
    // Until the export reads no more messages, since their replies have no room.
    let is_full = || {
        while host.client.try_send(&config_space) {}
        std::thread::sleep(std::time::Duration::from_millis(20));
        !host.client.try_send(&config_space)
    };
    until("the replies have no room", || is_full() && is_full());
    gate.set_shut(false);
    let handed = world.server().hand().hand_over().recv_timeout(PATIENCE).unwrap();
    assert_eq!(handed.map(drop), Ok(()));
    drop(RawClient::greeted(&world.path));
    drop(host);
    world.stop();
}

#[test]
fn export_ends_while_a_change_waits() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let host = AdminHost::stuck(&world, &gate);
    begin(&host, 1, &VfioRequest::DeviceReset);
    until("the reset waits", || waits(&world) == Some("a reset by the client"));
    world.server().ask_to_stop();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!world.server().is_finished(), "the write is in flight");
    gate.set_shut(false);
    world.stop();
    drop(host);
}

#[test]
fn doorbells_ring_no_queue_while_a_reset_waits() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let host = AdminHost::stuck(&world, &gate);
    begin(&host, 1, &VfioRequest::DeviceReset);
    until("the reset waits", || waits(&world).is_some());
    host.put(2, 1, blkyard_nvme::Sqe::new(blkyard_nvme::io::FLUSH, 1).with_cid(7));
    let doorbell = RegionAccess { offset: 0x1080, region: 0, count: 4 };
    begin(&host, 2, &VfioRequest::RegionWrite(doorbell, &[2, 0, 0, 0]));
    assert_eq!(replied(&host), 2);
    gate.set_shut(false);
    assert_eq!(replied(&host), 1);
    // The flush is not executed: its queue is gone.
    assert_eq!(host.status(3, 1), None);
    assert!(gate.seen().iter().all(|seen| !matches!(seen, Seen::Taken(Op::Flush, ..))));
    drop(host);
    world.stop();
}
