//! Guest memory that comes, goes and shrinks while rings run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_mem::DmaDomain;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{
    AnyDevice, Bystander, Data, Front, Gate, Ram, Request, Seen, VQ_BYTES, Vq, World, kind, one_queue, until,
};

/// Keeps writing and reading back until the other side of the work is done.
fn under_load(vq: &mut Vq, work: impl FnOnce() + Send) -> u64 {
    std::thread::scope(|scope| {
        let work = scope.spawn(work);
        let mut rounds = 0;
        while !work.is_finished() || rounds < 10 {
            let bytes = vec![rounds as u8; 4096];
            for slot in 0..8_u16 {
                vq.put(slot, kind::OUT, u64::from(slot) * 8, Data::Out(&bytes));
            }
            vq.publish();
            (0..8).for_each(|_| assert_eq!(vq.wait_used().1, 1));
            assert!((0..8).all(|slot| vq.status(slot) == 0), "a write failed in round {rounds}");
            assert_eq!(vq.read(rounds % 8 * 8, 4096), bytes);
            rounds += 1;
        }
        work.join().unwrap();
        rounds
    })
}

#[test]
fn the_memory_table_is_replaced_under_running_rings() {
    let world = World::new(vec![AnyDevice::ram(100_000)], 1, 1);
    let (front, mut vq) = one_queue(&world.exports[0]);
    let ram = Arc::clone(&vq.ram);
    under_load(&mut vq, || {
        for round in 0..20 {
            let more = Ram::at(0x8000_0000, 1 << 20);
            // The same memory in other company, and in another order.
            let rams: &[&Ram] = if round % 2 == 0 { &[&ram, &more] } else { &[&more, &ram] };
            front.share(rams).unwrap();
        }
    });
    drop(front);
    world.stop();
}

#[test]
fn regions_are_added_and_removed_under_running_rings() {
    let world = World::new(vec![AnyDevice::ram(100_000)], 1, 1);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let dimms: Vec<_> = (1..=4).map(|n| Ram::at(n << 32, 1 << 20)).collect();
    under_load(&mut vq, || {
        for _ in 0..5 {
            dimms.iter().for_each(|dimm| front.add(dimm).unwrap());
            dimms.iter().rev().for_each(|dimm| front.remove(dimm).unwrap());
        }
    });
    // Data in a region that was added later.
    front.add(&dimms[2]).unwrap();
    let head = vq.build(1, kind::OUT, 64, Data::Out(&[0x5a; 4096]), &dimms[2]);
    vq.offer(head);
    vq.publish();
    assert_eq!((vq.wait_used(), vq.status(1)), ((3, 1), 0));
    assert_eq!(vq.read(64, 4096), [0x5a; 4096]);
    // And in one that has gone again.
    front.remove(&dimms[2]).unwrap();
    vq.offer(head);
    vq.publish();
    assert_eq!((vq.wait_used(), vq.status(1)), ((3, 1), 1));
    assert_eq!(world.exports[0].refused(0, "buffer outside guest memory"), 1);
    drop(front);
    world.stop();
}

#[test]
fn memory_that_comes_slot_by_slot_before_the_rings_serves_them() {
    let world = World::pair();
    let mut front = Front::connect(&world.exports[0]);
    let slots = front.get_max_mem_slots().unwrap();
    let ram = Ram::new(2 << 20);
    front.add(&ram).unwrap();
    let dimms: Vec<_> = (1..slots).map(|n| Ram::at(n << 32, 64 << 10)).collect();
    dimms.iter().for_each(|dimm| front.add(dimm).unwrap());
    let mut vqs = [Vq::new(&ram, 0), Vq::new(&ram, 1)];
    (0..2).for_each(|index| front.start(index, &vqs[index]));
    for vq in &mut vqs {
        assert_eq!(vq.write(0, &[3; 4096]), 0);
    }
    // One more than there are slots ends the session, as every refused change of memory does.
    assert!(front.add(&Ram::at(slots << 32, 4096)).is_err());
    front.raw.wait_closed();
    drop(front);
    world.stop();
}

#[test]
fn removing_a_region_waits_for_those_who_use_it() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let dimm = Ram::at(1 << 32, 1 << 20);
    front.add(&dimm).unwrap();
    let head = vq.build(0, kind::IN, 0, Data::In(4096), &dimm);
    vq.offer(head);
    vq.publish();
    until("the read is with the device", || gate.held() == 1);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| front.remove(&dimm));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!removing.is_finished(), "memory was taken from under a read");
        gate.set_shut(false);
        removing.join().unwrap().unwrap();
    });
    let seen = gate.seen();
    let at = |wanted| seen.iter().rposition(|seen| *seen == wanted);
    assert!(at(Seen::Ended(blkyard_mq::Op::Read, 0)) < at(Seen::Memory(1)), "{seen:?}");
    assert_eq!(vq.wait_used(), (0, 4097));
    drop(front);
    world.stop();
}

#[test]
fn a_region_that_is_removed_is_unmapped() {
    let world = World::pair();
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let dimm = Ram::at(1 << 32, 64 << 20);
    let inode = rustix::fs::fstat(&dimm.file).unwrap().st_ino.to_string();
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // Files of other file systems have the same numbers.
        let memory = maps.lines().filter(|line| line.contains("memfd:guest"));
        memory.filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
    };
    assert_eq!(mapped(), 1, "the guest's own");
    front.add(&dimm).unwrap();
    assert_eq!(mapped(), 2);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    front.remove(&dimm).unwrap();
    assert_eq!(mapped(), 1);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    drop(front);
    world.stop();
}

#[test]
fn a_descriptor_that_comes_with_a_removal_is_closed() {
    let world = World::pair();
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let dimm = Ram::at(1 << 32, 1 << 20);
    front.add(&dimm).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut payload = vec![0; 8];
    payload.extend(crate::common::words64(&dimm.words()));
    let fd = std::os::fd::AsFd::as_fd(&writer);
    assert!(front.raw.accepts(Request::RemMemReg, &payload, &[fd]));
    drop(writer);
    assert!(crate::common::readable(&reader, crate::common::PATIENCE), "the pipe's other end is still held");
    assert_eq!(vq.write(0, &[1; 512]), 0);
    drop(front);
    world.stop();
}

/// The result of every truncation: that session ends, the other export continues, the next front-end is served.
fn truncation(prepare: impl FnOnce(&mut Front, &mut Vq), touch: impl FnOnce(&mut Front, &mut Vq)) {
    let world = World::new(vec![AnyDevice::ram(0), AnyDevice::ram(0)], 2, 1);
    let export = &world.exports[0];
    let mut bystander = Bystander::new(&world.exports[1]);
    bystander.goes_on();
    let mut front = Front::connect(export);
    // The guest's own mapping is not watched by the test: it writes by the file.
    let ram = Ram::new(1 << 20);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.set_ring(0, &vq);
    prepare(&mut front, &mut vq);
    let start = Instant::now();
    ram.truncate(0);
    touch(&mut front, &mut vq);
    front.raw.wait_closed();
    until("the front-end is disconnected", || !export.status().is_connected());
    assert!(start.elapsed() < crate::common::PATIENCE);
    assert_eq!(export.refused_in_all(0), 0, "a ring that was cut off is not the guest's mistake");
    bystander.goes_on();
    let (next, mut vq) = one_queue(export);
    assert_eq!(vq.write(0, &[1; 4096]), 0);
    assert_eq!(vq.read(0, 4096), [1; 4096]);
    drop((next, front, bystander));
    world.stop();
}

fn go(front: &mut Front, vq: &mut Vq) {
    assert!(front.set_event(Request::SetVringKick, 0, Some(&vq.kick)));
    front.set_vring_enable(0, true).unwrap();
}

#[test]
fn memory_truncated_while_the_ring_runs_ends_that_session_only() {
    truncation(
        |front, vq| {
            go(front, vq);
            for sector in 0..10 {
                assert_eq!(vq.write(sector, &[1; 512]), 0);
            }
        },
        |_, vq| crate::common::ring(&vq.kick),
    );
}

#[test]
fn memory_truncated_under_a_ring_that_nothing_came_from_yet_ends_that_session_only() {
    truncation(go, |_, vq| crate::common::ring(&vq.kick));
}

#[test]
fn memory_truncated_before_anything_ran_ends_that_session_only() {
    truncation(
        |_, _| {},
        |front, vq| {
            let _ = front.set_event(Request::SetVringKick, 0, Some(&vq.kick));
            let _ = front.set_vring_enable(0, true);
        },
    );
}

#[test]
fn memory_truncated_while_a_ring_is_looked_at_by_itself_ends_that_session_only() {
    truncation(
        |front, _| {
            assert!(front.set_event(Request::SetVringKick, 0, None));
            front.set_vring_enable(0, true).unwrap();
        },
        |_, _| {},
    );
}

#[test]
fn memory_truncated_under_requests_in_flight_ends_that_session_only() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, mut vq) = one_queue(&world.exports[0]);
    let dimm = Ram::at(1 << 32, 1 << 20);
    let mut front = front;
    front.add(&dimm).unwrap();
    for slot in 0..4 {
        let head = vq.build(slot, kind::IN, 0, Data::In(4096), &dimm);
        vq.offer(head);
    }
    vq.publish();
    until("the reads are with the device", || gate.held() == 4);
    vq.ram.truncate(0);
    gate.set_shut(false);
    front.raw.wait_closed();
    until("the front-end is disconnected", || !world.exports[0].status().is_connected());
    bystander.goes_on();
    drop((front, bystander));
    world.stop();
}

#[test]
fn memory_is_mapped_once_for_all_queues_of_a_device() {
    const QUEUES: u64 = 4;
    let told = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&told);
    let domain = DmaDomain::new(move || {
        counter.fetch_add(1, Relaxed);
    });
    let mut device = AnyDevice::ram(0);
    device.domains.push(Arc::clone(&domain));
    let world = World::new(vec![device], QUEUES as usize, 2);
    let (mut front, ram) = (Front::connect(&world.exports[0]), Ram::new(QUEUES * VQ_BYTES));
    front.share(&[&ram]).unwrap();
    let mut vqs: Vec<_> = (0..QUEUES).map(|number| Vq::new(&ram, number)).collect();
    vqs.iter().enumerate().for_each(|(index, vq)| front.start(index, vq));
    let mapped = || (domain.regions().len(), told.load(Relaxed));
    let mut all_are_served = || {
        vqs.iter_mut().for_each(|vq| assert_eq!(vq.read(0, 512).len(), 512));
        mapped()
    };
    assert_eq!(all_are_served(), (1, 1));
    // A queue stops and continues, and then all of them at once.
    front.set_vring_enable(2, false).unwrap();
    front.set_vring_enable(2, true).unwrap();
    front.share(&[&ram, &Ram::at(1 << 32, 1 << 20)]).unwrap();
    // The whole table is new memory, though it is the same file: one change.
    assert_eq!(all_are_served(), (2, 2));
    let dimm = Ram::at(2 << 32, 1 << 20);
    front.add(&dimm).unwrap();
    assert_eq!(all_are_served(), (3, 3));
    front.remove(&dimm).unwrap();
    assert_eq!(all_are_served(), (2, 4));
    front.leave(&world.exports[0]);
    until("the memory is unmapped", || mapped() == (0, 5));
    world.stop();
}
