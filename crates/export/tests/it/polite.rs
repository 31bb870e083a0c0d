//! Correct front-ends and guests get correct results.

use std::time::{Duration, Instant};

use blkyard_mq::{BioFlags, HwQueueConfig, Op};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use crate::common::{
    AnyDevice, Data, Front, Gate, Hand, Ram, Request, SERIAL, Seen, Vq, World, event, kind, one_queue, range, readable,
    rung, until,
};

/// Features of a writable disk: all known ones except read-only.
const ALL: u64 = 0xd_7400_7e44;

#[test]
fn a_disk_tells_what_it_is_and_can_do() {
    let world = World::pair();
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(front.get_features().unwrap(), ALL);
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE;
    assert_eq!(front.get_protocol_features().unwrap(), wanted);
    assert_eq!(front.get_queue_num().unwrap(), 2);
    assert_eq!(front.get_max_mem_slots().unwrap(), 64);
    assert_eq!(front.config(0, 8).unwrap(), 16384_u64.to_le_bytes());
    assert_eq!(front.config(32, 4).unwrap(), [1, 0, 2, 0], "cache mode and number of queues");
    assert_eq!(front.config(255, 1).unwrap(), [0]);
    world.stop();
}

#[test]
fn the_cache_mode_decides_whether_writes_are_durable_at_once() {
    let gate = Gate::open();
    let world = World::gated(&gate);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let flags_of = |vq: &mut Vq| {
        gate.forget();
        assert_eq!(vq.write(8, &[1; 512]), 0);
        let zeroes = range(0, 8, 1);
        assert_eq!(vq.run(kind::WRITE_ZEROES, 0, Data::Out(&zeroes)), (0, 1));
        let taken = gate.seen().into_iter().filter_map(|seen| match seen {
            Seen::Taken(_, flags, _) => Some(flags),
            _ => None,
        });
        taken.collect::<Vec<_>>()
    };
    assert_eq!(flags_of(&mut vq), [BioFlags::empty(); 2]);
    gate.forget();
    front.set_wce(false);
    // A driver in write-through mode sends no flush, so earlier writes are made durable at the change.
    assert!(matches!(gate.seen()[..], [Seen::Taken(Op::Flush, ..), Seen::Ended(Op::Flush, _)]), "{:?}", gate.seen());
    assert_eq!(front.config(32, 1).unwrap(), [0]);
    assert_eq!(flags_of(&mut vq), [BioFlags::FUA; 2]);
    front.set_wce(true);
    assert_eq!(flags_of(&mut vq), [BioFlags::empty(); 2]);
    // A driver that cannot flush gets write-through, independent of the field.
    front.set_features(front.features & !(1 << 9 | 1 << 11)).unwrap();
    assert_eq!(flags_of(&mut vq), [BioFlags::FUA; 2]);
    drop(front);
    world.stop();
}

#[test]
fn writes_of_stopped_queues_are_flushed_when_the_cache_becomes_write_through() {
    let gate = Gate::open();
    let world = World::gated(&gate);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    assert_eq!(vq.write(8, &[1; 512]), 0);
    front.get_vring_base(0).unwrap();
    gate.forget();
    front.set_wce(false);
    assert!(matches!(gate.seen()[..], [.., Seen::Ended(Op::Flush, _)]), "{:?}", gate.seen());
    // Nor does the change wait for a ring that never ran.
    front.leave(&world.exports[0]);
    let mut front = Front::connect(&world.exports[0]);
    front.set_wce(true);
    gate.forget();
    front.set_wce(false);
    assert!(matches!(gate.seen()[..], [.., Seen::Ended(Op::Flush, _)]), "{:?}", gate.seen());
    drop(front);
    world.stop();
}

#[test]
fn writes_in_flight_are_flushed_when_the_cache_becomes_write_through() {
    let gate = Gate::open();
    let world = World::gated(&gate);
    let ram = Ram::new(4 << 20);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let [first, mut second] = [0, 1].map(|index| {
        let vq = Vq::new(&ram, index);
        front.start(index as usize, &vq);
        vq
    });
    gate.set_shut(true);
    gate.forget();
    second.put(0, kind::OUT, 8, Data::Out(&[1; 512]));
    second.publish();
    until("the write is in flight", || gate.held() == 1);
    let ask = std::thread::spawn(move || {
        front.set_wce(false);
        front
    });
    // Time for a flush that does not wait for it.
    std::thread::sleep(Duration::from_millis(300));
    gate.set_shut(false);
    let front = ask.join().unwrap();
    let seen = gate.seen();
    let ended = seen.iter().position(|seen| matches!(seen, Seen::Ended(Op::Write, 8))).unwrap();
    let flushed = seen.iter().rposition(|seen| matches!(seen, Seen::Taken(Op::Flush, ..))).unwrap();
    assert!(ended < flushed, "it ended after the last flush began: {seen:?}");
    drop((front, first, second));
    world.stop();
}

#[test]
fn the_cache_mode_changes_while_as_much_is_in_flight_as_there_is_room_for() {
    // Four requests at a time of 5 us each, in turns of 1 us, with twice as many always available.
    let mut hand = Hand::of(5_000, HwQueueConfig { bios_max: 4, ..HwQueueConfig::default() });
    let (mut front, mut vq) = hand.connect();
    let ask = std::thread::spawn(move || {
        front.set_wce(false);
        front
    });
    let (mut offered, mut back) = (0, 0);
    while !ask.is_finished() || back < offered {
        if !ask.is_finished() {
            for number in offered..back + 8 {
                vq.put(number % 8, kind::IN, 0, Data::In(512));
            }
            offered = back + 8;
            vq.publish_silently();
        }
        hand.turn();
        back += std::iter::from_fn(|| vq.poll()).count() as u16;
    }
    drop(ask.join().unwrap());
    hand.stop();
}

#[test]
fn the_serial_number_is_told() {
    let world = World::pair();
    let (front, mut vq) = one_queue(&world.exports[0]);
    let mut want = [0; 20];
    want[..SERIAL.len()].copy_from_slice(SERIAL.as_bytes());
    assert_eq!(vq.run(kind::GET_ID, 0, Data::In(20)), (0, 21));
    assert_eq!(vq.ram.read(vq.data_at(0), 20), want);
    // A longer buffer has a gap before the status, which the used length must not include.
    assert_eq!(vq.run(kind::GET_ID, 0, Data::In(64)), (0, 20));
    drop(front);
    world.stop();
}

#[test]
fn what_is_written_is_read_back_and_what_is_trimmed_is_gone() {
    let world = World::pair();
    let (front, mut vq) = one_queue(&world.exports[0]);
    let pattern: Vec<u8> = (0..8192_u32).map(|i| (i * 7 % 251) as u8).collect();
    assert_eq!(vq.write(16, &pattern), 0);
    assert_eq!(vq.run(kind::FLUSH, 0, Data::None), (0, 1));
    assert_eq!(vq.read(16, 8192), pattern);
    assert_eq!(vq.run(kind::DISCARD, 0, Data::Out(&range(16, 2, 0))), (0, 1));
    assert_eq!(vq.run(kind::WRITE_ZEROES, 0, Data::Out(&range(20, 2, 0))), (0, 1));
    let mut want = pattern.clone();
    want[..1024].fill(0);
    want[2048..3072].fill(0);
    assert_eq!(vq.read(16, 8192), want);
    // The last sector, and the first sector past the end.
    assert_eq!(vq.write(16383, &[9; 512]), 0);
    assert_eq!(vq.read(16383, 512), [9; 512]);
    assert_eq!(vq.run(kind::IN, 16384, Data::In(512)), (1, 0), "a failed read promises no bytes");
    assert_eq!(world.exports[0].refused_in_all(0), 0);
    drop(front);
    world.stop();
}

#[test]
fn all_queues_see_one_disk_and_each_counts_for_itself() {
    let world = World::new(vec![AnyDevice::ram(0)], 4, 2);
    let export = &world.exports[0];
    let ram = Ram::new(4 << 20);
    let mut front = Front::connect(export);
    front.share(&[&ram]).unwrap();
    let mut vqs: Vec<_> = (0..4).map(|number| Vq::new(&ram, number)).collect();
    (0..4).for_each(|index| front.start(index, &vqs[index]));
    for (index, vq) in vqs.iter_mut().enumerate() {
        let sector = index as u64 * 8;
        for slot in 0..8 {
            vq.put(slot, kind::OUT, sector + u64::from(slot), Data::Out(&[index as u8 + 1; 512]));
        }
        vq.publish();
    }
    for vq in &mut vqs {
        (0..8).for_each(|_| assert_eq!(vq.wait_used().1, 1));
    }
    for index in 0..4 {
        assert_eq!(vqs[3 - index].read(index as u64 * 8, 4096), [index as u8 + 1; 4096]);
        // Consecutive writes may be merged.
        let stats = export.stats(3 - index).snapshot();
        assert_eq!(stats.ops.iter().map(|op| op.ios).sum::<u64>() + stats.merged.iter().sum::<u64>(), 9);
    }
    drop(front);
    world.stop();
}

#[test]
fn with_event_indexes_the_guest_is_called_where_it_asked_to_be() {
    let world = World::pair();
    let ram = Ram::new(1 << 20);
    let mut front = Front::dial(&world.exports[0].path);
    front.negotiate(crate::common::SPLIT);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    vq.event_idx = true;
    front.start(0, &vq);
    // The first completion always calls, since earlier calls are unknown. The call follows the completion, so the test
    // waits for it: a late call would look like an extra one.
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the first request is answered", || vq.poll().is_some());
    assert!(readable(&vq.call, crate::common::PATIENCE), "the first answer is not told");
    assert_eq!(rung(&vq.call), 1);
    for wanted_after in [1_u16, 5, 3] {
        // Requests a call after this number of further completions; they complete one at a time.
        let event = vq.used_seen.wrapping_add(wanted_after - 1);
        vq.avail.store_u16(4 + 2 * 64, event, std::sync::atomic::Ordering::SeqCst);
        for n in 1..=wanted_after {
            assert_eq!(rung(&vq.call), 0, "called before it was wanted");
            vq.put(0, kind::IN, 0, Data::In(512));
            vq.publish();
            let mut element = None;
            until("a request is answered", || {
                element = vq.poll();
                element.is_some()
            });
            assert_eq!(element, Some((0, 513)), "request {n}");
        }
        assert!(readable(&vq.call, crate::common::PATIENCE), "not called when it was wanted");
        assert_eq!(rung(&vq.call), 1);
    }
    drop(front);
    world.stop();
}

#[test]
fn kicks_are_asked_for_only_by_a_queue_that_sleeps() {
    let world = World::pair();
    for event_idx in [false, true] {
        let ram = Ram::new(1 << 20);
        let mut front = Front::dial(&world.exports[0].path);
        front.negotiate(if event_idx { crate::common::SPLIT } else { crate::common::PLAIN });
        front.share(&[&ram]).unwrap();
        let mut vq = Vq::new(&ram, 0);
        vq.event_idx = event_idx;
        front.start(0, &vq);
        for round in 0..50 {
            // Whether the lane is asleep or not: a driver that kicks only on request is always served.
            if round % 5 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(vq.write(round, &[round as u8; 512]), 0);
        }
        front.leave(&world.exports[0]);
    }
    world.stop();
}

#[test]
fn a_call_descriptor_can_be_replaced_while_the_queue_runs() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the request is with the device", || gate.held() == 1);
    let old = std::mem::replace(&mut vq.call, event());
    rung(&old);
    assert!(front.set_event(Request::SetVringCall, 0, Some(&vq.call)));
    assert!(readable(&vq.call, crate::common::PATIENCE), "what went to the old one may have been missed");
    rung(&vq.call);
    gate.set_shut(false);
    assert_eq!(vq.wait_used(), (0, 1));
    assert_eq!(rung(&old), 0);
    // The call descriptor can be removed: the guest polls then.
    assert!(front.set_event(Request::SetVringCall, 0, None));
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("a request is answered without a call", || vq.poll().is_some());
    drop(front);
    world.stop();
}

#[test]
fn a_disabled_ring_does_nothing_and_keeps_its_requests() {
    let gate = Gate::open();
    let world = World::gated(&gate);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    front.set_vring_enable(0, false).unwrap();
    gate.forget();
    for slot in 0..4 {
        vq.put(slot, kind::OUT, u64::from(slot) * 2, Data::Out(&[1; 512]));
    }
    crate::common::ring(&vq.kick);
    vq.publish();
    // The disk's other queue continued, so the lanes had their turns.
    let more = Ram::at(0x4000_0000, 1 << 20);
    let mut other = Vq::new(&more, 0);
    front.add(&more).unwrap();
    front.start(1, &other);
    (0..20).for_each(|_| assert_eq!(other.write(100, &[2; 512]), 0));
    assert!(!gate.seen().iter().any(|seen| matches!(seen, Seen::Taken(_, _, 0..8))), "a disabled ring was served");
    assert!(vq.poll().is_none());
    front.set_vring_enable(0, true).unwrap();
    (0..4).for_each(|_| assert_eq!(vq.wait_used().1, 1));
    assert_eq!(gate.seen().iter().filter(|seen| matches!(seen, Seen::Ended(Op::Write, 0..8))).count(), 4);
    drop(front);
    world.stop();
}

#[test]
fn a_ring_without_a_kick_descriptor_is_looked_at_by_itself() {
    let world = World::pair();
    let ram = Ram::new(1 << 20);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.set_ring(0, &vq);
    assert!(front.set_event(Request::SetVringKick, 0, None));
    front.set_vring_enable(0, true).unwrap();
    for sector in 0..10 {
        std::thread::sleep(Duration::from_millis(1));
        vq.put(0, kind::OUT, sector, Data::Out(&[3; 512]));
        vq.publish_silently();
        assert_eq!(vq.wait_used(), (0, 1));
    }
    drop(front);
    world.stop();
}

#[test]
fn rings_run_without_protocol_features_however_little_is_negotiated() {
    let world = World::pair();
    for features in [1 << 32, 0] {
        let ram = Ram::new(1 << 20);
        let front = Front::dial(&world.exports[0].path);
        front.set_owner().unwrap();
        assert_ne!(front.get_features().unwrap() & 1 << 30, 0);
        front.set_features(features).unwrap();
        front.share(&[&ram]).unwrap();
        let mut vq = Vq::new(&ram, 0);
        let [desc, avail, used] = vq.user_addrs();
        assert!(front.raw.tell(Request::SetVringNum, &crate::common::state(0, 64), &[]));
        assert!(front.raw.tell(Request::SetVringBase, &crate::common::state(0, 0), &[]));
        assert!(front.raw.tell(Request::SetVringAddr, &crate::common::addresses(0, [desc, avail, used]), &[]));
        let fd = std::os::fd::AsFd::as_fd;
        assert!(front.raw.tell(Request::SetVringCall, &0_u64.to_ne_bytes(), &[fd(&vq.call)]));
        assert!(front.raw.tell(Request::SetVringKick, &0_u64.to_ne_bytes(), &[fd(&vq.kick)]));
        assert_eq!(vq.write(3, &[5; 512]), 0, "features {features:#x}");
        front.leave(&world.exports[0]);
    }
    world.stop();
}

#[test]
fn asking_where_a_ring_stands_waits_until_all_that_was_fetched_is_finished() {
    // The time when the command reaches the lane is not observable. A request offered after a pause is either a case of
    // this test or was offered too early; then the pause was too short for this machine.
    let pauses = (0..10).map(|n| Duration::from_millis(20 << n));
    assert!(pauses.into_iter().any(stands_where_it_was_asked), "a ring that is being stopped is fetched from");
}

/// Asks for the ring position, and offers one more request after a pause. False if that request was fetched.
fn stands_where_it_was_asked(pause: Duration) -> bool {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    for slot in 0..3 {
        vq.put(slot, kind::OUT, u64::from(slot) * 2, Data::Out(&[1; 512]));
    }
    vq.publish();
    until("the requests are with the device", || gate.held() == 3);
    let asking = (*front).clone();
    let asked = std::thread::spawn(move || asking.get_vring_base(0).unwrap());
    std::thread::sleep(pause);
    // This request stays in the ring. The lane sleeps meanwhile although the ring is not empty.
    vq.put(3, kind::OUT, 3, Data::Out(&[1; 512]));
    vq.publish();
    crate::common::ring(&vq.kick);
    let (start, before) = (Instant::now(), gate.polls());
    std::thread::sleep(Duration::from_millis(50));
    let (polls, passed_ms) = (gate.polls() - before, start.elapsed().as_millis());
    // The device requests polling five times per millisecond.
    assert!((polls as u128) < 40 * passed_ms, "the lane spins while it waits: {polls} looks in {passed_ms} ms");
    assert!(!asked.is_finished(), "answered while requests were with the device");
    let stayed = gate.held() == 3;
    gate.set_shut(false);
    let finished: u16 = if stayed { 3 } else { 4 };
    assert_eq!(asked.join().unwrap(), u32::from(finished));
    let used = std::iter::from_fn(|| vq.poll()).count();
    assert_eq!(used, usize::from(finished), "the used ring shows them all when the answer comes");
    assert!((0..finished).all(|slot| vq.status(slot) == 0));
    assert!((finished..4).all(|slot| vq.status(slot) == 0xff));
    drop(front);
    world.stop();
    stayed
}

#[test]
fn whoever_comes_back_finds_the_disk_and_goes_on_where_the_ring_stood() {
    let world = World::new(vec![AnyDevice::ram(2_000_000)], 1, 1);
    let export = &world.exports[0];
    let (mut front, mut vq) = one_queue(export);
    for round in 0..5_u8 {
        assert_eq!(vq.write(u64::from(round), &[round; 512]), 0);
        // The front-end leaves with requests in flight, some of them not fetched.
        for slot in 0..4 {
            vq.put(slot, kind::OUT, 100 + u64::from(slot), Data::Out(&[round; 512]));
        }
        vq.publish();
        let ram = std::sync::Arc::clone(&vq.ram);
        front.leave(export);
        let finished = std::iter::from_fn(|| vq.poll()).count() as u16;
        // The next session fetches the requests that were not fetched; the guest still waits for them.
        let offered = vq.next_avail;
        vq.next_avail = offered.wrapping_sub(4 - finished);
        front = Front::connect(export);
        front.share(&[&ram]).unwrap();
        front.start(0, &vq);
        vq.next_avail = offered;
        (finished..4).for_each(|_| assert_eq!(vq.wait_used().1, 1));
        assert_eq!(vq.read(u64::from(round), 512), [round; 512]);
        assert_eq!(vq.read(103, 512), [round; 512]);
    }
    assert_eq!(export.status().sessions(), 6);
    drop(front);
    world.stop();
}

#[test]
fn a_ring_that_is_moved_while_it_runs_goes_on_in_its_new_place() {
    let world = World::pair();
    let ram = Ram::new(2 << 20);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    let mut moved = Vq::new(&ram, 1);
    moved.avail.store_u16(2, 1, std::sync::atomic::Ordering::SeqCst);
    moved.used.store_u16(2, 1, std::sync::atomic::Ordering::SeqCst);
    (moved.next_avail, moved.used_seen) = (1, 1);
    (moved.kick, moved.call) = (vq.kick, vq.call);
    assert!(front.raw.accepts(Request::SetVringAddr, &crate::common::addresses(0, moved.user_addrs()), &[]));
    assert_eq!(moved.write(8, &[2; 512]), 0);
    assert_eq!(moved.read(0, 512), [1; 512]);
    assert_eq!(vq.used.load_u16(2, std::sync::atomic::Ordering::SeqCst), 1);
    drop(front);
    world.stop();
}

#[test]
fn a_reset_stops_all_rings_and_keeps_memory() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the request is with the device", || gate.held() == 1);
    let mut resetting = (*front).clone();
    let reset = std::thread::spawn(move || resetting.reset_device().unwrap());
    std::thread::sleep(Duration::from_millis(10));
    assert!(!reset.is_finished(), "reset under a request in flight");
    gate.set_shut(false);
    reset.join().unwrap();
    assert_eq!(vq.poll(), Some((0, 1)));
    vq.put(1, kind::OUT, 1, Data::Out(&[1; 512]));
    vq.publish();
    crate::common::ring(&vq.kick);
    // The guest reboots: new rings in the memory that is still shared.
    vq.ram.write(0, &vec![0; 64 << 10]);
    let mut again = Vq::new(&vq.ram, 0);
    front.set_features(front.features).unwrap();
    front.start(0, &again);
    assert_eq!(again.write(5, &[4; 512]), 0);
    assert!(!gate.seen().contains(&Seen::Taken(Op::Write, BioFlags::empty(), 1)), "served after a reset");
    drop(front);
    world.stop();
}
