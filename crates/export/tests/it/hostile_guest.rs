//! A guest that writes arbitrary bytes into its rings: it harms its own queue only.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use blkyard_virtio::driver_model::{Descriptor, blk_header};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{
    AnyDevice, Bystander, Data, Ends, Front, Gate, Hand, PATIENCE, Ram, Request, Vq, World, event, kind, one_queue,
    readable, rung, until,
};

/// Two queues of one disk.
fn two_queues(world: &World) -> (Front, Vq, Vq) {
    let ram = Ram::new(2 << 20);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let (first, second) = (Vq::new(&ram, 0), Vq::new(&ram, 1));
    front.start(0, &first);
    front.start(1, &second);
    (front, first, second)
}

#[test]
fn a_ring_that_makes_no_sense_is_stopped_and_counted_and_the_other_queues_go_on() {
    type Break = fn(&mut Vq);
    let cases: [(&str, Break); 4] = [
        ("available index advanced", |vq| vq.avail.store_u16(2, vq.next_avail.wrapping_add(65), SeqCst)),
        ("available index advanced", |vq| vq.avail.store_u16(2, vq.next_avail.wrapping_sub(1), SeqCst)),
        ("head outside", |vq| {
            vq.offer(64);
            vq.publish_silently();
        }),
        ("head outside", |vq| {
            vq.offer(u16::MAX);
            vq.publish_silently();
        }),
    ];
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    for (number, (reason, break_it)) in cases.into_iter().enumerate() {
        let (mut front, mut broken, mut sound) = two_queues(&world);
        assert_eq!(broken.write(0, &[1; 512]), 0);
        let before = world.exports[0].refused(0, reason);
        break_it(&mut broken);
        crate::common::ring(&broken.kick);
        assert!(readable(&broken.err, PATIENCE), "case {number}: the error descriptor is not rung");
        assert_eq!(rung(&broken.err), 1);
        assert_eq!(world.exports[0].refused(0, reason), before + 1);
        // Kicking it does not make it live, nor the lane spin, nor the log long.
        (0..100).for_each(|_| crate::common::ring(&broken.kick));
        assert_eq!(sound.write(8, &[2; 512]), 0);
        assert_eq!(sound.read(8, 512), [2; 512]);
        bystander.goes_on();
        assert_eq!(rung(&broken.err), 0);
        assert_eq!(world.exports[0].refused(0, reason), before + 1);
        // The driver may set it up again.
        front.get_vring_base(0).unwrap();
        broken.ram.write(0, &vec![0; 64 << 10]);
        let mut again = Vq::new(&broken.ram, 0);
        front.set_vring_enable(0, false).unwrap();
        front.start(0, &again);
        assert_eq!(again.write(0, &[3; 512]), 0);
        front.leave(&world.exports[0]);
    }
    drop(bystander);
    world.stop();
}

#[test]
fn a_head_offered_again_while_it_is_out_stops_the_ring_and_what_was_fetched_still_ends() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.put(1, kind::OUT, 8, Data::Out(&[1; 512]));
    vq.offer(0);
    vq.publish();
    assert!(readable(&vq.err, PATIENCE));
    assert_eq!(world.exports[0].refused(0, "head offered again"), 1);
    assert_eq!(gate.held(), 2);
    gate.set_shut(false);
    assert_eq!(vq.wait_used(), (0, 1));
    assert_eq!(vq.wait_used(), (3, 1));
    assert_eq!(front.get_vring_base(0).unwrap(), 2);
    drop(front);
    world.stop();
}

#[test]
fn an_error_descriptor_that_comes_while_the_ring_runs_is_the_one_that_is_rung() {
    let world = World::pair();
    let (front, mut vq) = one_queue(&world.exports[0]);
    let old = std::mem::replace(&mut vq.err, event());
    assert!(front.set_event(Request::SetVringErr, 0, Some(&vq.err)));
    vq.offer(1000);
    vq.publish();
    assert!(readable(&vq.err, PATIENCE));
    assert_eq!(rung(&old), 0);
    drop(front);
    world.stop();
}

#[test]
fn requests_that_make_no_sense_are_answered_with_an_error_and_counted() {
    type Spoil = fn(&Vq, u64);
    /// Descriptor 0 is the header, 1 the data, 2 the status of a read of 512 bytes.
    const NEXT: u16 = Descriptor::NEXT;
    const WRITE: u16 = Descriptor::WRITE;
    // Fault, the status for the guest, the length of the used element, the counted reason.
    let cases: &[(Spoil, u8, u32, &str)] = &[
        (|vq, at| vq.descriptor(2, Descriptor { addr: at, len: 1, flags: WRITE | NEXT, next: 1 }), 0xff, 0, "loop"),
        (
            |vq, at| vq.descriptor(0, Descriptor { addr: at, len: 16, flags: NEXT, next: 64 }),
            0xff,
            0,
            "next descriptor",
        ),
        (
            |vq, _| vq.descriptor(1, Descriptor { addr: 8, len: 512, flags: WRITE | NEXT, next: 2 }),
            1,
            0,
            "outside guest",
        ),
        (
            |vq, _| vq.descriptor(1, Descriptor { addr: u64::MAX - 7, len: 512, flags: WRITE | NEXT, next: 2 }),
            1,
            0,
            "outside guest",
        ),
        (
            |vq, at| vq.descriptor(1, Descriptor { addr: at, len: 0, flags: WRITE | NEXT, next: 2 }),
            1,
            1,
            "without bytes",
        ),
        (
            |vq, at| vq.descriptor(1, Descriptor { addr: at, len: 511, flags: WRITE | NEXT, next: 2 }),
            1,
            0,
            "multiple of",
        ),
        (|vq, at| vq.descriptor(0, Descriptor { addr: at, len: 15, flags: NEXT, next: 1 }), 1, 0, "header too short"),
        (
            |vq, at| vq.descriptor(2, Descriptor { addr: at + 16, len: 1, flags: 0, next: 0 }),
            0xff,
            0,
            "readable buffer",
        ),
        (|vq, at| vq.descriptor(0, Descriptor { addr: at, len: 17, flags: NEXT, next: 1 }), 1, 0, "wrong direction"),
        (|vq, _| vq.ram.write(vq.header_at(0), &blk_header(77, 0)), 2, 0, "unknown request"),
        (|vq, _| vq.ram.write(vq.header_at(0), &blk_header(kind::IN, u64::MAX)), 1, 0, "wraps"),
    ];
    let world = World::pair();
    let (front, mut vq) = one_queue(&world.exports[0]);
    for (spoil, status, written, reason) in cases {
        let before = (world.exports[0].refused(0, reason), world.exports[0].refused_in_all(0));
        let head = vq.build(0, kind::IN, 0, Data::In(512), &Arc::clone(&vq.ram));
        spoil(&vq, vq.ram.guest_addr + vq.header_at(0));
        vq.offer(head);
        vq.publish();
        assert_eq!(vq.wait_used(), (0, *written), "{reason}");
        assert_eq!(vq.status(0), *status, "{reason}");
        let after = (world.exports[0].refused(0, reason), world.exports[0].refused_in_all(0));
        assert_eq!(after, (before.0 + 1, before.1 + 1), "{reason}");
        assert_eq!(vq.write(0, &[1; 512]), 0, "after {reason}");
    }
    assert!(!readable(&vq.err, Duration::ZERO), "a bad request is no reason to stop the ring");
    drop(front);
    world.stop();
}

#[test]
fn a_read_only_disk_keeps_what_it_holds() {
    let info = blkyard_mq::DeviceInfo { read_only: true, ..crate::common::disk_info() };
    let world = World::new(vec![AnyDevice::ram_with(info, 0)], 1, 1);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    assert_ne!(front.get_features().unwrap() & 1 << 5, 0, "it says that it is read-only");
    assert_eq!(front.get_features().unwrap() & (1 << 13 | 1 << 14), 0);
    let range = crate::common::range(0, 8, 0);
    assert_eq!(vq.write(0, &[1; 512]), 1);
    assert_eq!(vq.run(kind::DISCARD, 0, Data::Out(&range)).0, 2);
    assert_eq!(vq.run(kind::WRITE_ZEROES, 0, Data::Out(&range)).0, 2);
    // A driver that did not take the bit does not get around it.
    front.set_features(front.features & !(1 << 5)).unwrap();
    assert_eq!(vq.write(0, &[1; 512]), 2);
    assert_eq!(vq.read(0, 512), [0; 512]);
    front.features &= !(1 << 5);
    drop(front);
    world.stop();
}

#[test]
fn headers_and_descriptors_rewritten_while_requests_run_harm_nobody() {
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, mut vq) = one_queue(&world.exports[0]);
    let ending = AtomicBool::new(false);
    let wild = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let _ends = Ends(&ending);
        let (ram, header, table) = (Arc::clone(&vq.ram), vq.header_at(0), 0);
        // Anywhere in the memory and beyond it, except the rings: the device writes where the guest says, even over the
        // available index.
        let wild_at = header;
        let (ending, wild) = (&ending, &wild);
        scope.spawn(move || {
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            while !ending.load(Relaxed) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let value = random >> 16;
                // Type and sector of the header; address, length, flags and next of any descriptor.
                match value % 4 {
                    0 => ram.write(header, &blk_header((value >> 8) as u32 % 16, (value >> 16) % 20_000)),
                    1 => ram.write(table + (value >> 8) % 3 * 16 + 12, &((value >> 16) as u16 % 8).to_le_bytes()),
                    2 => ram.write(table + (value >> 8) % 3 * 16 + 8, &((value >> 16) as u32 % 2048).to_le_bytes()),
                    _ => ram.write(
                        table + (value >> 8) % 3 * 16,
                        &(ram.guest_addr + wild_at + (value >> 16) % (1 << 21)).to_le_bytes(),
                    ),
                }
                wild.fetch_add(1, Relaxed);
            }
        });
        let start = Instant::now();
        let mut answered = 0_u64;
        while start.elapsed() < Duration::from_millis(700) || answered < 1000 || wild.load(Relaxed) < 1000 {
            let head = vq.build(0, kind::OUT, 0, Data::Out(&[1; 512]), &Arc::clone(&vq.ram));
            vq.offer(head);
            vq.publish();
            // Its ring is valid, so each request completes exactly once, however it was parsed.
            assert_eq!(vq.wait_used().0, 0);
            assert_eq!(vq.poll(), None);
            answered += 1;
            if answered.is_multiple_of(500) {
                bystander.goes_on();
            }
        }
    });
    assert!(!readable(&vq.err, Duration::ZERO));
    drop((front, bystander));
    world.stop();
}

/// Offers requests that complete at once, without end: always some more than are fetched. The status byte of the first
/// of sixteen shows the device's progress, long before the used ring does. Earlier requests are a multiple of these.
fn flood(vq: &Vq, ending: &AtomicBool) {
    const LOT: u16 = 16;
    for slot in 0..LOT {
        let head = vq.build(slot, 77, 0, Data::None, &vq.ram);
        (0..4).for_each(|lot| vq.avail.store_u16(4 + 2 * usize::from(lot * LOT + slot), head, Relaxed));
    }
    let status = vq.ram.region.span(vq.status_at(0), 1).unwrap();
    let mut offered = vq.next_avail.wrapping_add(3 * LOT);
    vq.avail.store_u16(2, offered, SeqCst);
    crate::common::ring(&vq.kick);
    while !ending.load(Relaxed) {
        let mut byte = [0];
        status.copy_to_slice(&mut byte);
        if byte[0] == 0xff {
            std::hint::spin_loop();
            continue;
        }
        status.fill(0xff);
        offered = offered.wrapping_add(LOT);
        vq.avail.store_u16(2, offered, SeqCst);
        if vq.used.load_u16(0, SeqCst) & 1 == 0 {
            crate::common::ring(&vq.kick);
        }
    }
}

#[test]
fn a_guest_that_offers_without_end_keeps_nobody_else_from_the_lane() {
    // All on one lane.
    let world = World::new(vec![AnyDevice::ram(0), AnyDevice::ram(0)], 1, 1);
    let export = &world.exports[0];
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, vq) = one_queue(export);
    let ending = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&ending);
        scope.spawn(|| flood(&vq, &ending));
        until("the flood has begun", || export.refused_in_all(0) > 10_000);
        (0..200).for_each(|_| bystander.goes_on());
        let asking = (*front).clone();
        let asked = scope.spawn(move || asking.get_vring_base(0).unwrap());
        until("the ring is stopped in the middle of the flood", || asked.is_finished());
    });
    drop((front, bystander));
    world.stop();
}

/// Rounds under a flood from a guest that alternates, none of whose offers is deferred: those that took more than were
/// available at any time, and the largest.
fn rounds_in_a_flood() -> (usize, u64) {
    /// Rounds for which that is believed, and no more.
    const BELIEVED: usize = 900;
    let mut hand = Hand::new(0);
    let (front, mut vq) = hand.connect();
    hand.learn_that_it_takes_turns(&mut vq);
    let ending = AtomicBool::new(false);
    let (mut rounds, mut fed, mut most) = (0, 0, 0);
    std::thread::scope(|scope| {
        let _ends = Ends(&ending);
        scope.spawn(|| flood(&vq, &ending));
        let start = Instant::now();
        while rounds < BELIEVED {
            assert!(start.elapsed() < PATIENCE, "the flood has dried up at {}", hand.refused());
            let before = hand.refused();
            hand.turn();
            let took = hand.refused() - before;
            rounds += usize::from(took > 0);
            fed += usize::from(took > u64::from(vq.size));
            most = most.max(took);
        }
    });
    hand.stop();
    drop(front);
    (fed, most)
}

#[test]
fn one_round_takes_a_bounded_share_of_what_is_offered() {
    let (start, mut all) = (Instant::now(), 0);
    // Where guest and device have one CPU they seldom work at the same time.
    while all < 300 {
        let (fed, most) = rounds_in_a_flood();
        assert!(most <= 256, "{most} requests in one round, while other queues of the lane wait");
        all += fed;
        assert!(start.elapsed() < PATIENCE, "the guest offered more while we fetched in {all} rounds and no more");
    }
}
