//! Doorbells with eventfds: a client writes the memory of the registers and signals, and nothing that it does with
//! either holds up the export.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use blkyard_export::NvmeDoorbells;
use blkyard_mem::{Region, View};
use blkyard_nvme::{Psdt, Sqe, admin, io};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{Command, IoFd, IoFdKind, RegionIoFds, VfioReply, VfioRequest};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::common::nvme::read;
use crate::common::{AdminHost, AnyDevice, NvmeWorld, RawClient};

const EINVAL: u32 = 22;
/// After this time without work a lane sleeps, and a queue without a kick has been polled again.
const ASLEEP: Duration = Duration::from_millis(50);
/// Distance of the doorbells of an export with few queues.
const STRIDE: u64 = 0x40;

fn world(queues: usize) -> NvmeWorld {
    NvmeWorld::new(&AnyDevice::ram(0), queues, 2)
}

fn page(number: u64) -> u64 {
    AdminHost::BASE + number * 0x1000
}

/// A reply about descriptors of a region, or its errno, and the descriptors.
fn ask(client: &mut RawClient, argsz: u32, index: u32) -> (Result<VfioReply<'static>, u32>, Vec<OwnedFd>) {
    let command = Command::DeviceGetRegionIoFds;
    let payload = client.call(&VfioRequest::DeviceGetRegionIoFds { argsz, index }, &[]);
    let descriptors = client.take_descriptors();
    let reply = payload.map(|payload| match VfioReply::parse(command, &payload, descriptors.len(), 4096).unwrap() {
        VfioReply::DeviceGetRegionIoFds(fds) => VfioReply::DeviceGetRegionIoFds(fds),
        VfioReply::RegionIoFdsCut { argsz, index } => VfioReply::RegionIoFdsCut { argsz, index },
        other => panic!("{other:?}"),
    });
    (reply, descriptors)
}

/// A host with an admin queue, which has the memory of the doorbells and an eventfd for each queue.
struct SignallingHost {
    host: AdminHost,
    doorbells: View,
    eventfds: Vec<EventFd>,
}

impl SignallingHost {
    fn enable(world: &NvmeWorld) -> SignallingHost {
        SignallingHost::enable_with(world, 16)
    }

    /// The same with room for this many descriptors in a message.
    fn enable_with(world: &NvmeWorld, descriptors: u64) -> SignallingHost {
        let mut client = RawClient::greeted_with(&world.path, descriptors);
        let (_, descriptors) = ask(&mut client, 4096, 0);
        let mut descriptors = descriptors.into_iter();
        let file = descriptors.next().expect("the file of the doorbells");
        let doorbells = View::new(Region::map_file(file.as_fd(), 0x1000, 0x1000).unwrap(), 0, 0x1000, 4096).unwrap();
        let eventfds = descriptors.map(|eventfd| EventFd::from_foreign(eventfd).unwrap()).collect();
        SignallingHost { host: AdminHost::enable_by(client), doorbells, eventfds }
    }

    /// Writes the tail of a submission queue, and signals it.
    fn ring(&self, sqid: u16, tail: u32) {
        self.doorbells.store_u32(usize::from(sqid) * 2 * STRIDE as usize, tail, Release);
        self.eventfds[usize::from(sqid)].signal_shared();
    }

    /// Creates completion queue `cqid` in page 3, and submission queue `sqid` in page 2 that feeds it.
    fn create(&mut self, sqid: u16, cqid: u16) {
        assert_eq!(self.host.admin(Sqe::create_cq(cqid, 8, page(3), None)), Some(0));
        assert_eq!(self.host.admin(Sqe::create_sq(sqid, 8, page(2), cqid)), Some(0));
    }

    /// Puts a read into page 2.
    fn put_read(&self, index: u32) {
        let read = Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]);
        self.host.put(2, index, read.with_cid(index as u16));
    }

    fn await_read(&self, index: u32) {
        crate::common::until("the read is complete", || self.host.status(3, index) == Some(0));
    }

    /// Reads by a submission queue after its lane has gone to sleep.
    fn read_asleep(&self, sqid: u16, index: u32) {
        std::thread::sleep(ASLEEP);
        self.put_read(index);
        self.ring(sqid, index + 1);
        self.await_read(index);
    }
}

/// Checks that messages are answered.
fn assert_served(client: &mut RawClient) {
    assert_eq!(client.call(&read(0, 8, 4), &[]).unwrap()[16..], [0, 0, 2, 0]);
}

#[test]
fn a_client_is_told_of_an_eventfd_for_each_queue() {
    let world = world(2);
    let mut client = RawClient::greeted_with(&world.path, 16);
    let part = |queue: u64, word: u64| {
        let offset = 0x1000 + (2 * queue + word) * STRIDE;
        let kind = IoFdKind::ShadowEventFd { memory: 0, at: offset };
        IoFd { offset, size: 4, fd_index: queue as u32 + 1, kind, flags: 0, value: 0 }
    };
    let parts: Vec<_> = (0..3).flat_map(|queue| [part(queue, 0), part(queue, 1)]).collect();
    let bytes = 16 + 6 * 48;
    for argsz in [16, bytes - 1] {
        let (reply, descriptors) = ask(&mut client, argsz, 0);
        assert_eq!(reply, Ok(VfioReply::RegionIoFdsCut { argsz: bytes, index: 0 }));
        assert!(descriptors.is_empty());
    }
    for argsz in [bytes, bytes, 1 << 20] {
        let (reply, descriptors) = ask(&mut client, argsz, 0);
        assert_eq!(reply, Ok(VfioReply::DeviceGetRegionIoFds(RegionIoFds { index: 0, parts: parts.clone() })));
        assert_eq!(descriptors.len(), 4, "the file, and an eventfd for each queue");
    }
    let none = |index| (Ok(VfioReply::DeviceGetRegionIoFds(RegionIoFds { index, parts: vec![] })), 0);
    for index in [1, 7, 8] {
        let (reply, descriptors) = ask(&mut client, 4096, index);
        assert_eq!((reply, descriptors.len()), none(index));
    }
    assert_eq!(ask(&mut client, 4096, 9).0, Err(EINVAL));
    drop(client);
    // As many as the client takes, or none.
    for (max_msg_fds, queues) in [(3, 2), (1, 0), (0, 0)] {
        let mut client = RawClient::greeted_with(&world.path, max_msg_fds);
        let (reply, descriptors) = ask(&mut client, 4096, 0);
        let Ok(VfioReply::DeviceGetRegionIoFds(fds)) = reply else { panic!("{reply:?}") };
        let expected = if queues == 0 { 0 } else { queues + 1 };
        assert_eq!((fds.parts.len(), descriptors.len()), (2 * queues, expected), "{max_msg_fds} descriptors");
    }
    let mut host = AdminHost::enable_by(RawClient::greeted_with(&world.path, 16));
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(ask(&mut host.client, 4096, 0).0, Err(EINVAL), "a queue exists");
    drop(host);
    world.stop();
    let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, NvmeDoorbells::Shared);
    let (reply, descriptors) = ask(&mut RawClient::greeted_with(&world.path, 16), 4096, 0);
    assert_eq!((reply, descriptors.len()), none(0), "they are polled");
    world.stop();
}

#[test]
fn a_doorbell_with_an_eventfd_wakes_its_queue_without_a_message() {
    let world = world(2);
    let mut client = SignallingHost::enable(&world);
    client.create(1, 1);
    let mut was_unheard = false;
    for index in 0..7 {
        std::thread::sleep(ASLEEP);
        client.put_read(index);
        // Not signalled: a polled queue would have seen it soon.
        client.doorbells.store_u32(2 * STRIDE as usize, index + 1, Release);
        std::thread::sleep(ASLEEP);
        was_unheard |= client.host.status(3, index).is_none();
        client.ring(1, index + 1);
        client.await_read(index);
    }
    assert!(was_unheard, "the queue is polled");
    // The admin queue, too.
    let index = client.host.tail;
    client.host.put(0, index, Sqe::new(admin::KEEP_ALIVE, 0).with_cid(9));
    client.ring(0, index + 1);
    crate::common::until("the command is complete", || client.host.status(1, index) == Some(0));
    assert_served(&mut client.host.client);
    drop(client);
    world.stop();
}

#[test]
fn a_queue_fed_by_a_submission_queue_of_another_number_is_served() {
    // With an eventfd of its own for the completion queue, and without.
    for (sqid, cqid, descriptors) in [(3, 1, 16), (1, 2, 3)] {
        let world = world(3);
        let mut client = SignallingHost::enable_with(&world, descriptors);
        client.create(sqid, cqid);
        (0..4).for_each(|index| client.read_asleep(sqid, index));
        drop(client);
        world.stop();
    }
}

#[test]
fn eventfds_that_are_made_blocking_and_full_hold_nothing_up() {
    let world = world(2);
    let mut client = SignallingHost::enable(&world);
    client.create(1, 1);
    let fill = |client: &SignallingHost| {
        for eventfd in &client.eventfds {
            // Non-blocking first: filled twice, it must not hold up this test.
            fcntl_setfl(eventfd, OFlags::NONBLOCK).unwrap();
            let _ = rustix::io::write(eventfd, &(u64::MAX - 1).to_ne_bytes());
            fcntl_setfl(eventfd, OFlags::empty()).unwrap();
        }
    };
    for index in 0..7 {
        client.put_read(index);
        fill(&client);
        // By message, as a client without eventfds does.
        client.host.write(0x1000 + 2 * STRIDE, &(index + 1).to_le_bytes());
        client.await_read(index);
        fill(&client);
        assert_served(&mut client.host.client);
    }
    fill(&client);
    assert_eq!(client.host.client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    fill(&client);
    drop(client.host);
    // Its descriptors are still there.
    assert_served(&mut RawClient::greeted(&world.path));
    world.stop();
}

#[test]
fn any_value_of_a_doorbell_with_an_eventfd_stops_at_most_its_queue() {
    let world = world(2);
    let mut client = SignallingHost::enable(&world);
    client.create(1, 1);
    client.put_read(0);
    client.ring(1, 1);
    client.await_read(0);
    for value in [8, 0xffff, u32::MAX] {
        (0x80 / 4..1024).for_each(|number| client.doorbells.store_u32(number * 4, value, Release));
        client.eventfds.iter().for_each(EventFd::signal_shared);
        assert_served(&mut client.host.client);
    }
    client.ring(0, u32::MAX);
    assert_served(&mut client.host.client);
    assert_eq!(client.host.client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    assert_served(&mut client.host.client);
    drop(client);
    world.stop();
}
