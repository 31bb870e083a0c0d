//! Front-ends connect and leave, the daemon stops, lanes end: fetched requests complete first, and every wait is
//! bounded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_mq::Op;
use vhost::VhostBackend;

use crate::common::{
    AnyDevice, Bystander, Data, Front, Gate, PATIENCE, Raw, Request, Seen, World, kind, one_queue, until,
};

#[test]
fn a_second_front_end_waits_and_is_served_when_the_first_leaves() {
    let world = World::pair();
    let (first, mut vq) = one_queue(&world.exports[0]);
    let mut second = Front::dial(&world.exports[0].path);
    let waiting = std::thread::spawn(move || {
        second.negotiate(crate::common::PLAIN);
        second
    });
    for sector in 0..50 {
        assert_eq!(vq.write(sector, &[1; 512]), 0);
    }
    assert!(!waiting.is_finished(), "two front-ends at one disk");
    drop(first);
    let mut second = waiting.join().unwrap();
    assert_eq!(second.config(0, 8).unwrap(), 16384_u64.to_le_bytes());
    drop(second);
    world.stop();
}

#[test]
fn an_export_that_is_dropped_ends_and_takes_its_socket_along() {
    let mut world = World::pair();
    let dropped = world.exports.remove(0);
    let path = dropped.path.clone();
    let front = Front::dial(&path);
    drop(dropped);
    assert!(!path.exists(), "the socket is left behind");
    drop(front);
    world.stop();
}

#[test]
fn a_front_end_that_leaves_in_the_middle_has_its_writes_finished_before_memory_goes() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, mut vq) = one_queue(&world.exports[0]);
    for slot in 0..8 {
        vq.put(slot, kind::OUT, u64::from(slot) * 2, Data::Out(&[1; 512]));
    }
    vq.publish();
    until("the writes are with the device", || gate.held() == 8);
    let connection = front.raw.0.try_clone().unwrap();
    drop(front);
    drop(connection);
    std::thread::sleep(Duration::from_millis(20));
    bystander.goes_on();
    assert!(world.exports[0].status().is_connected(), "let go of with writes in flight");
    assert_eq!(gate.seen().last(), Some(&Seen::Taken(Op::Write, blkyard_mq::BioFlags::empty(), 14)));
    gate.set_shut(false);
    until("the front-end is disconnected", || !world.exports[0].status().is_connected());
    let seen = gate.seen();
    let gone = seen.iter().rposition(|seen| *seen == Seen::Memory(0)).unwrap();
    let ended = seen.iter().filter(|seen| matches!(seen, Seen::Ended(Op::Write, _))).count();
    assert_eq!(ended, 8);
    assert_eq!(gone, seen.len() - 1, "something ended after its memory was let go of");
    assert_eq!(std::iter::from_fn(|| vq.poll()).count(), 8, "the guest finds all answers");
    drop(bystander);
    world.stop();
}

#[test]
fn stopping_finishes_what_is_in_flight_and_fetches_no_more() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    for slot in 0..8 {
        vq.put(slot, kind::OUT, u64::from(slot) * 2, Data::Out(&[1; 512]));
    }
    vq.publish();
    until("the writes are with the device", || gate.held() == 8);
    let server = world.exports[0].server();
    server.ask_to_stop();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!server.is_finished(), "ended with writes in flight");
    gate.set_shut(false);
    // The connection ends only after all requests are complete, so a front-end may read the ring then.
    front.raw.wait_closed();
    assert_eq!(std::iter::from_fn(|| vq.poll()).count(), 8);
    until("the export ends", || server.is_finished());
    assert!(Raw::try_connect(&world.exports[0].path).is_none(), "a front-end was taken while stopping");
    drop(front);
    world.stop();
}

#[test]
fn a_front_end_that_asks_and_never_reads_does_not_keep_the_daemon_from_stopping() {
    let world = World::pair();
    let raw = Raw::connect(&world.exports[0].path);
    raw.negotiate(crate::common::SPLIT);
    // Far more requests than both socket buffers can hold replies for.
    raw.0.set_nonblocking(true).unwrap();
    let question = Raw::message(Request::GetFeatures as u32, 1, &[]);
    let start = Instant::now();
    let mut full_since = None;
    while full_since.is_none_or(|since: Instant| since.elapsed() < Duration::from_millis(50)) {
        assert!(start.elapsed() < PATIENCE, "the export never stops listening");
        if std::io::Write::write(&mut &raw.0, &question).is_ok() {
            full_since = None;
        } else {
            full_since.get_or_insert_with(Instant::now);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let mut bystander = Bystander::new(&world.exports[1]);
    bystander.goes_on();
    drop(bystander);
    world.stop();
    drop(raw);
}

#[test]
fn a_front_end_that_connects_and_says_nothing_does_not_keep_the_daemon_from_stopping() {
    let world = World::pair();
    let silent = Raw::connect(&world.exports[0].path);
    until("it is connected", || world.exports[0].status().is_connected());
    let (front, mut vq) = one_queue(&world.exports[1]);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    world.stop();
    drop((silent, front));
}

#[test]
fn exports_on_one_lane_stop_one_by_one() {
    let world = World::new(vec![AnyDevice::ram(0), AnyDevice::ram(0)], 2, 1);
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, mut vq) = one_queue(&world.exports[0]);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    world.exports[0].server().ask_to_stop();
    until("the export ends", || world.exports[0].server().is_finished());
    (0..100).for_each(|_| bystander.goes_on());
    drop((front, bystander));
    world.stop();
}

#[test]
fn when_a_lane_ends_by_a_bug_its_exports_end_and_the_others_go_on() {
    let gate = Gate::open();
    // Queue 0 of the first export is on lane 0 with queue 0 of the second; the others are on lane 1.
    let world = World::new(vec![AnyDevice::gated(&gate), AnyDevice::ram(0)], 2, 2);
    let ram = crate::common::Ram::new(2 << 20);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let (mut on_lane_0, mut on_lane_1) = (crate::common::Vq::new(&ram, 0), crate::common::Vq::new(&ram, 1));
    front.start(0, &on_lane_0);
    front.start(1, &on_lane_1);
    assert_eq!(on_lane_0.write(0, &[1; 512]), 0);
    gate.set_shut(true);
    on_lane_1.put(0, kind::OUT, 8, Data::Out(&[1; 512]));
    on_lane_1.publish();
    until("the write is with the device", || gate.held() == 1);
    gate.plant_bug();
    on_lane_0.put(0, kind::OUT, 16, Data::Out(&[1; 512]));
    on_lane_0.publish();
    until("the lane ends", || world.lanes.threads()[0].is_finished());
    // The control thread detects it at the next message; the write on the other lane completes before the session ends.
    let asking = (*front).clone();
    let asked = std::thread::spawn(move || asking.get_vring_base(0).is_err());
    std::thread::sleep(Duration::from_millis(10));
    gate.set_shut(false);
    assert!(asked.join().unwrap(), "a ring of a lane that is gone stands nowhere");
    until("the export ends", || world.exports[0].server().is_finished());
    assert_eq!(on_lane_1.poll(), Some((0, 1)));
    assert!(gate.seen().contains(&Seen::Memory(0)), "the memory of a guest is held by an export that ended");
    // An export with queues on another lane; its lanes end with it.
    world.exports[1].server().ask_to_stop();
    until("the other export ends", || world.exports[1].server().is_finished());
    let error = crate::common::end(world.lanes).unwrap_err().to_string();
    assert!(error.contains("lane lane0 panicked: a bug that the test planted"), "{error}");
    drop(front);
}

#[test]
fn front_ends_that_come_and_go_quickly_are_all_let_go() {
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    for round in 0..100 {
        let raw = Raw::connect(&world.exports[0].path);
        match round % 3 {
            0 => raw.negotiate(crate::common::SPLIT),
            1 => assert!(raw.tell(Request::GetFeatures, &[], &[])),
            _ => {}
        }
    }
    until("all were served", || world.exports[0].status().sessions() == 100);
    bystander.goes_on();
    let (front, mut vq) = one_queue(&world.exports[0]);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    let shared = Arc::clone(&vq.ram);
    drop((front, bystander));
    world.stop();
    assert_eq!(Arc::strong_count(&shared), 2, "the guest's memory is held by nobody but the test");
}
