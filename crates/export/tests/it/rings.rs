//! Rings of every kind, in maximum number and size, enabled and disabled while they work.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use blkyard_mq::{SignalEventfd, SignalSlot};
use blkyard_virtio::Features;

use crate::common::{
    AnyDevice, Data, Ends, Front, Hand, LINE_BYTES, Line, PLAIN, Ram, Request, World, kind, kinds, state,
};

/// Connects and negotiates this kind of ring.
fn connect(world: &World, features: Features) -> Front {
    let mut front = Front::dial(&world.exports[0].path);
    front.negotiate(PLAIN | features.bits());
    front
}

#[test]
fn every_kind_of_ring_carries_data_whatever_its_size() {
    let world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    for features in kinds() {
        let packed = features.contains(Features::RING_PACKED);
        for size in if packed { [1, 3, 7, 100, 1024] } else { [1, 2, 8, 128, 1024] } {
            let front = connect(&world, features);
            let ram = Ram::new(LINE_BYTES);
            front.share(&[&ram]).unwrap();
            let mut line = Line::new(&ram, 0, size, features);
            for round in 0..3 {
                line.start(&front, 0, false);
                line.all(300, 40, kind::OUT, round);
                line.all(300, 40, kind::IN, round);
                // It continues from the same position next time.
                line.stop(&front, 0);
            }
            front.leave(&world.exports[0]);
        }
    }
    world.stop();
}

#[test]
fn a_ring_that_becomes_longer_while_it_runs_carries_as_much_as_one_that_was_so_from_the_start() {
    let world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    for features in kinds() {
        let front = connect(&world, features);
        let ram = Ram::new(LINE_BYTES);
        front.share(&[&ram]).unwrap();
        let mut short = Line::new(&ram, 0, 4, features);
        short.start(&front, 0, false);
        short.all(30, 40, kind::OUT, 1);
        for size in [8, 256, 1024] {
            assert!(front.raw.accepts(Request::SetVringNum, &state(0, size), &[]), "{features:?}");
        }
        assert!(front.raw.ask(Request::GetVringBase, &state(0, 0), &[]).is_some());
        ram.write(0, &vec![0; LINE_BYTES as usize]);
        let mut long = Line::new(&ram, 0, 1024, features);
        long.start(&front, 0, false);
        long.all(255, 40, kind::OUT, 2);
        long.all(255, 40, kind::IN, 2);
        long.stop(&front, 0);
        front.leave(&world.exports[0]);
    }
    world.stop();
}

#[test]
fn sizes_that_are_no_power_of_two_are_for_packed_rings() {
    let world = World::pair();
    for (features, size, accepted) in [
        (Features::empty(), 3, false),
        (Features::empty(), 1024, true),
        (Features::RING_PACKED, 3, true),
        (Features::RING_PACKED, 1024, true),
        (Features::RING_PACKED, 0, false),
        (Features::RING_PACKED, 1025, false),
    ] {
        let front = connect(&world, features);
        assert_eq!(front.raw.accepts(Request::SetVringNum, &state(0, size), &[]), accepted, "{features:?} {size}");
        front.leave(&world.exports[0]);
    }
    world.stop();
}

#[test]
fn sixty_four_queues_of_1024_all_carry_data() {
    for features in [Features::EVENT_IDX, Features::EVENT_IDX | Features::RING_PACKED | Features::IN_ORDER] {
        let world = World::new(vec![AnyDevice::ram(0)], 64, 2);
        let front = connect(&world, features);
        let ram = Ram::new(64 * LINE_BYTES);
        front.share(&[&ram]).unwrap();
        let mut lines: Vec<_> = (0..64).map(|number| Line::new(&ram, number, 1024, features)).collect();
        lines.iter().zip(0..).for_each(|(line, index)| line.start(&front, index, false));
        // Sixteen at a time: this process also has threads for the lanes.
        for kind in [kind::OUT, kind::IN] {
            for (group, lines) in lines.chunks_mut(16).enumerate() {
                std::thread::scope(|scope| {
                    for (line, number) in lines.iter_mut().zip(group as u64 * 16..) {
                        scope.spawn(move || line.all(255, number * 255, kind, number));
                    }
                });
            }
        }
        lines.iter().zip(0..).for_each(|(line, index)| line.stop(&front, index));
        drop(front);
        world.stop();
    }
}

#[test]
fn queues_are_disabled_and_enabled_and_memory_comes_and_goes_while_others_and_they_work() {
    for features in [Features::empty(), Features::RING_PACKED, Features::RING_PACKED | Features::IN_ORDER] {
        let world = World::new(vec![AnyDevice::ram(20_000)], 3, 2);
        let mut front = connect(&world, features);
        // Each queue has its own memory: adding and removing one region does not affect the others.
        let rams: Vec<_> = (1..=3).map(|n| Ram::at(n << 32, LINE_BYTES)).collect();
        let mut lines: Vec<_> = rams.iter().map(|ram| Line::new(ram, 0, 64, features)).collect();
        rams.iter().for_each(|ram| front.add(ram).unwrap());
        lines.iter().zip(0..).for_each(|(line, index)| line.start(&front, index, false));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let workers: Vec<_> = lines
                .iter_mut()
                .zip(0..)
                .map(|(line, number)| {
                    let over = &over;
                    scope.spawn(move || {
                        let mut rounds = 0;
                        while !over.load(Ordering::Relaxed) || rounds < 3 {
                            line.all(40, number * 40, kind::OUT, rounds);
                            line.all(40, number * 40, kind::IN, rounds);
                            rounds += 1;
                        }
                    })
                })
                .collect();
            let dimm = Ram::at(9 << 32, 1 << 20);
            for round in 0..30 {
                let index = round % 3;
                assert!(front.raw.accepts(Request::SetVringEnable, &state(index, 0), &[]));
                front.add(&dimm).unwrap();
                assert!(front.raw.accepts(Request::SetVringEnable, &state(index, 1), &[]));
                front.remove(&dimm).unwrap();
            }
            over.store(true, Ordering::Relaxed);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        lines.iter().zip(0..).for_each(|(line, index)| line.stop(&front, index));
        drop(front);
        world.stop();
    }
}

#[test]
fn a_device_that_answers_at_once_gives_half_back_before_it_takes_the_rest() {
    // Completions of eight requests offered together, by turns of one microsecond.
    let after_a_while = [[0; 10].as_slice(), &[4, 8]].concat();
    for (latency_ns, expected) in [(0, vec![0, 4, 8]), (10_000, after_a_while)] {
        let mut hand = Hand::new(latency_ns);
        let (front, mut vq) = hand.connect();
        (0..8).for_each(|slot| vq.put(slot, kind::IN, slot.into(), Data::In(512)));
        vq.publish_silently();
        let mut back = 0;
        for (turn, expected) in expected.into_iter().enumerate() {
            hand.turn();
            back += std::iter::from_fn(|| vq.poll()).count();
            assert_eq!(back, expected, "after turn {} with {latency_ns} ns", turn + 1);
        }
        hand.stop();
        drop(front);
    }
}

/// A guest that runs this when it is called.
struct Called<F>(F);

impl<F: FnMut()> SignalEventfd for Called<F> {
    fn signal(&mut self, _place: &mut SignalSlot, _eventfd: BorrowedFd<'_>) {
        (self.0)();
    }

    fn forget(&mut self, _place: &mut SignalSlot) {}
}

#[test]
fn halves_are_for_a_guest_that_works_while_the_device_does() {
    // Eight requests, resubmitted as they complete: when the guest is called, for which the lane gives its CPU away;
    // after each turn, while the lane may serve other queues; or after every second turn.
    for (called, after, most) in [(true, [false; 2], 8), (false, [true; 2], 3), (false, [false, true], 8)] {
        let mut hand = Hand::new(0);
        let (front, mut vq) = hand.connect();
        (0..8).for_each(|slot| vq.put(slot, kind::IN, slot.into(), Data::In(512)));
        vq.publish_silently();
        let mut back = Vec::new();
        for turn in 0..200 {
            let mut work = || {
                let heads: Vec<_> = std::iter::from_fn(|| vq.poll()).map(|(head, _)| head as u16).collect();
                back.push(heads.len());
                heads.into_iter().for_each(|head| vq.offer(head));
                vq.publish_silently();
            };
            hand.turn_with(&mut Called(|| {
                if called {
                    work();
                }
            }));
            if after[turn % 2] {
                work();
            }
        }
        assert!(back.len() > 90, "it worked {} times", back.len());
        assert_eq!(back.iter().rev().take(50).max(), Some(&most), "called: {called}, after: {after:?}, {back:?}");
        hand.stop();
        drop(front);
    }
}
