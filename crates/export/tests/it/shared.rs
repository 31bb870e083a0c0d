//! Virtqueues that share a hardware queue: each is served like with a private one, and drains, stops and starts alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use blkyard_export::PartError;
use blkyard_mq::OpClass;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{AnyDevice, Data, Ends, Front, Gate, Ram, VQ_BYTES, Vq, World, kind, load, until};

const QUEUES: usize = 4;

fn connect(world: &World, queues: usize) -> (std::sync::Arc<Ram>, Front, Vec<Vq>) {
    let ram = Ram::new(queues as u64 * VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let vqs: Vec<_> = (0..queues as u64).map(|number| Vq::new(&ram, number)).collect();
    vqs.iter().enumerate().for_each(|(index, vq)| front.start(index, vq));
    (ram, front, vqs)
}

#[test]
fn virtqueue_drains_beside_io_of_another() {
    let gate = Gate::shut();
    let world = World::shared(&AnyDevice::gated(&gate), 2, 1);
    let (_ram, mut front, mut vqs) = connect(&world, 2);
    vqs[0].put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vqs[0].publish();
    until("the write is with the device", || gate.held() == 1);
    // Drains and restarts with the same memory while the hardware queue is busy.
    for _ in 0..3 {
        front.set_vring_enable(1, false).unwrap();
        front.set_vring_enable(1, true).unwrap();
    }
    vqs[1].put(0, kind::OUT, 8, Data::Out(&[2; 512]));
    vqs[1].publish();
    until("the other write is with the device", || gate.held() == 2);
    let seen = world.exports[0].watch(1).look().unwrap().recv().unwrap();
    assert_eq!(seen.ring.unwrap().in_flight, 1, "each shows its own ring");
    gate.set_shut(false);
    assert_eq!([vqs[0].wait_used(), vqs[1].wait_used()], [(0, 1); 2]);
    assert_eq!(vqs.iter().map(|vq| vq.status(0)).collect::<Vec<_>>(), [0; 2]);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn kick_of_each_virtqueue_wakes_the_lane() {
    let world = World::shared(&AnyDevice::ram(0), QUEUES, 1);
    let (_ram, front, mut vqs) = connect(&world, QUEUES);
    for round in 0..200 {
        // The lane sleeps periodically.
        if round % 10 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let bytes = [round as u8; 512];
        assert_eq!(vqs[round % QUEUES].write(8, &bytes), 0);
        assert_eq!(vqs[(round + 1) % QUEUES].read(8, 512), bytes);
    }
    front.get_vring_base(2).unwrap();
    assert_eq!(vqs[1].read(8, 512), [199; 512]);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn broken_ring_stops_its_virtqueue_only() {
    let world = World::shared(&AnyDevice::ram(0), 2, 1);
    let (_ram, front, mut vqs) = connect(&world, 2);
    vqs[0].offer(u16::MAX);
    vqs[0].publish();
    until("the ring is stopped", || world.exports[0].refused_in_all(0) == 1);
    assert_eq!(vqs[1].write(0, &[7; 512]), 0);
    assert_eq!(world.exports[0].refused_in_all(1), 0);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn shared_hardware_queue_moves_and_changes_memory_under_load() {
    for device in [AnyDevice::ram(0), AnyDevice::ram(200_000)] {
        let mut world = World::shared(&device, QUEUES, 2);
        let (_ram, mut front, mut vqs) = connect(&world, QUEUES);
        let over = AtomicBool::new(false);
        let answered: Vec<AtomicU64> = (0..QUEUES).map(|_| AtomicU64::new(0)).collect();
        let dimm = Ram::at(1 << 32, 1 << 20);
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            for (number, (vq, answered)) in vqs.iter_mut().zip(&answered).enumerate() {
                let over = &over;
                scope.spawn(move || load(number, vq, answered, over));
            }
            for round in 0..40 {
                let before: Vec<u64> = answered.iter().map(|count| count.load(SeqCst)).collect();
                world.lanes.deal(2, |_| round % 2).unwrap();
                if round % 4 == 0 {
                    front.add(&dimm).unwrap();
                } else if round % 4 == 2 {
                    front.remove(&dimm).unwrap();
                }
                // One queue drains while the others continue.
                front.set_vring_enable(round % QUEUES, false).unwrap();
                front.set_vring_enable(round % QUEUES, true).unwrap();
                until("all virtqueues go on", || {
                    answered.iter().zip(&before).all(|(count, before)| count.load(SeqCst) > *before)
                });
            }
            over.store(true, SeqCst);
        });
        front.leave(&world.exports[0]);
        world.stop();
    }
}

#[test]
fn virtqueue_leaves_and_joins_beside_io_of_another() {
    let gate = Gate::shut();
    let device = AnyDevice::gated(&gate);
    let mut world = World::shared(&device, 3, 2);
    let (_ram, front, mut vqs) = connect(&world, 3);
    // The first and the last stay, so members with higher numbers and requests in flight get another index.
    for index in [0, 2] {
        vqs[index].put(0, kind::OUT, 8 * index as u64, Data::Out(&[1; 512]));
        vqs[index].publish();
        until("the write is with the device", || gate.held() == index.max(1));
    }
    world.carry_apart(&device, 1, 1);
    vqs[1].put(0, kind::OUT, 8, Data::Out(&[2; 512]));
    vqs[1].publish();
    until("the write of the other lane is with the device", || gate.held() == 3);
    // A queue with requests in flight cannot leave, and continues.
    let limit = std::time::Duration::from_millis(10);
    let left = world.exports[0].mover(0).part(limit, crate::common::PATIENCE);
    assert!(matches!(left, Err(PartError::Undrained(_))));
    gate.set_shut(false);
    let used: Vec<_> = vqs.iter_mut().map(Vq::wait_used).collect();
    assert_eq!(used, [(0, 1); 3]);
    gate.set_shut(true);
    vqs[2].put(0, kind::OUT, 16, Data::Out(&[3; 512]));
    vqs[2].publish();
    until("a write is in flight again", || gate.held() == 1);
    world.carry_to(1, 2);
    world.carry_to(0, 1);
    gate.set_shut(false);
    assert_eq!(vqs[2].wait_used(), (0, 1));
    for vq in &mut vqs {
        assert_eq!(vq.write(0, &[7; 512]), 0);
    }
    let counted = |queue| world.exports[0].stats(queue).snapshot().op(OpClass::Write).ios;
    assert_eq!([0, 1, 2].map(counted), [2, 2, 3], "each has its own counters, wherever it is");
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn virtqueues_change_hardware_queues_under_load() {
    for device in [AnyDevice::ram(0), AnyDevice::ram(200_000)] {
        let mut world = World::shared(&device, QUEUES, 2);
        let (_ram, mut front, mut vqs) = connect(&world, QUEUES);
        let over = AtomicBool::new(false);
        let answered: Vec<AtomicU64> = (0..QUEUES).map(|_| AtomicU64::new(0)).collect();
        let dimm = Ram::at(1 << 32, 1 << 20);
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            for (number, (vq, answered)) in vqs.iter_mut().zip(&answered).enumerate() {
                let over = &over;
                scope.spawn(move || load(number, vq, answered, over));
            }
            for round in 0..24 {
                let before: Vec<u64> = answered.iter().map(|count| count.load(SeqCst)).collect();
                // All on one hardware queue, then each on its own, then in pairs; the lanes alternate.
                match round % 3 {
                    0 => (1..QUEUES).for_each(|queue| world.carry_apart(&device, queue, (round + queue) % 2)),
                    1 => [(1, 0), (3, 2)].into_iter().for_each(|(queue, other)| world.carry_to(queue, other)),
                    _ => (1..QUEUES).for_each(|queue| world.carry_to(queue, 0)),
                }
                if round % 4 == 0 {
                    front.add(&dimm).unwrap();
                } else if round % 4 == 2 {
                    front.remove(&dimm).unwrap();
                }
                front.set_vring_enable(round % QUEUES, false).unwrap();
                front.set_vring_enable(round % QUEUES, true).unwrap();
                until("all virtqueues go on", || {
                    answered.iter().zip(&before).all(|(count, before)| count.load(SeqCst) > *before)
                });
            }
            over.store(true, SeqCst);
        });
        front.leave(&world.exports[0]);
        world.stop();
    }
}
