//! Queues move from lane to lane under load: each request completes once and correctly, and the guest only sees a
//! pause.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use blkyard_mq::QueueMap;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{AnyDevice, Data, Ends, Front, Gate, PATIENCE, Ram, VQ_BYTES, Vq, World, kind, load, until};

const QUEUES: usize = 4;

#[test]
fn queues_move_under_a_guest_that_notices_nothing() {
    for (name, device) in [("at once", AnyDevice::ram(0)), ("slow", AnyDevice::ram(200_000))] {
        let mut world = World::new(vec![device], QUEUES, 2);
        let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
        let mut front = Front::connect(&world.exports[0]);
        front.share(&[&ram]).unwrap();
        let mut vqs: Vec<_> = (0..QUEUES as u64).map(|number| Vq::new(&ram, number)).collect();
        vqs.iter().enumerate().for_each(|(index, vq)| front.start(index, vq));
        let over = AtomicBool::new(false);
        let answered: Vec<AtomicU64> = (0..QUEUES).map(|_| AtomicU64::new(0)).collect();
        let mut longest = Vec::new();
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let guests = vqs.iter_mut().zip(&answered).enumerate();
            let guests: Vec<_> = guests
                .map(|(number, (vq, answered))| {
                    let over = &over;
                    scope.spawn(move || load(number, vq, answered, over))
                })
                .collect();
            let mut moves = 0;
            let dimm = Ram::at(1 << 32, 1 << 20);
            for round in 0.. {
                let count = [1, 4, 3, 2][round % 4];
                let map = QueueMap::even(QUEUES, count);
                let before: Vec<u64> = answered.iter().map(|count| count.load(SeqCst)).collect();
                let dealt = world.lanes.deal(count, |poller| map.queue_of(poller)).unwrap();
                moves += dealt.count;
                longest.push(dealt.longest);
                // The control path finds the queues wherever they are.
                if round % 2 == 0 {
                    front.add(&dimm).unwrap();
                } else {
                    front.remove(&dimm).unwrap();
                }
                until("all queues go on", || {
                    answered.iter().zip(&before).all(|(count, before)| count.load(SeqCst) > *before)
                });
                if moves > 200 {
                    break;
                }
            }
            over.store(true, SeqCst);
            let pauses: Vec<_> = guests.into_iter().map(|guest| guest.join().unwrap()).collect();
            longest.sort_unstable();
            println!("{name}: {moves} moves, longest {:?}; guests waited at most {pauses:?}", longest.last());
        });
        front.leave(&world.exports[0]);
        world.stop();
    }
}

/// Messages are sent while their queues are between two lanes.
#[test]
fn no_message_is_lost_on_a_queue_that_moves() {
    let mut world = World::pair();
    let ram = Ram::new(VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&over);
        // Each of these waits for an answer from the queue, or from two.
        let asking = scope.spawn(|| {
            let mut rounds = 0;
            while !over.load(SeqCst) {
                front.share(&[&ram]).unwrap();
                front.set_vring_enable(0, false).unwrap();
                front.set_vring_enable(0, true).unwrap();
                rounds += 1;
            }
            rounds
        });
        for round in 0..300 {
            world.lanes.deal(2, |poller| (poller + round) % 2).unwrap();
        }
        over.store(true, SeqCst);
        println!("{} rounds of messages", asking.join().unwrap());
    });
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn a_queue_whose_device_hangs_stays_and_is_answered_and_then_moves() {
    let gate = Gate::shut();
    let mut world = World::gated(&gate);
    world.lanes.set_rest_max(Duration::from_millis(30));
    let ram = Ram::new(VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the write is with the device", || gate.held() == 1);
    let error = world.lanes.deal(2, |poller| 1 - poller % 2).unwrap_err();
    world.lanes.set_rest_max(PATIENCE);
    assert!(error.to_string().contains("queue 0 was not drained"), "{error}");
    // It fetches again.
    vq.put(1, kind::OUT, 8, Data::Out(&[2; 512]));
    vq.publish();
    until("the next is with the device too", || gate.held() == 2);
    gate.set_shut(false);
    assert_eq!((vq.wait_used().0, vq.wait_used().0), (0, 3));
    world.lanes.deal(2, |poller| 1 - poller % 2).unwrap();
    assert_eq!(vq.write(16, &[3; 512]), 0);
    // Once more without a connection.
    front.leave(&world.exports[0]);
    world.lanes.deal(1, |_| 0).unwrap();
    world.stop();
}
