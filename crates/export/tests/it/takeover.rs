//! Handover of exports while guests use them: each request is completed once with the correct result, and the guest
//! only sees a pause.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use blkyard_export::{BackendConfig, BoundSocket, Message, SEG_MAX, VhostUserServer, queue_pair};
use blkyard_mq::IdlePolicy;
use blkyard_virtio::{BlkConfig, Features};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};

use crate::common::{
    AnyDevice, Data, Ends, Front, Gate, LINE_BYTES, Line, PATIENCE, PLAIN, Ram, Raw, Request, SPLIT, VQ_BYTES, Vq,
    World, kind, load, ring, rung, until,
};

const QUEUES: usize = 4;

/// A front-end with running rings on an export's queues; with in-flight records if `tracked`.
fn attach(world: &World, ram: &std::sync::Arc<Ram>, features: u64, tracked: bool) -> (Front, Vec<Vq>) {
    let mut front = Front::dial(&world.exports[0].path);
    front.negotiate(features);
    front.share(&[ram]).unwrap();
    if tracked {
        let wanted = VhostUserInflight::new(0, 0, QUEUES as u16, 1024);
        let (kept, file) = front.get_inflight_fd(&wanted).unwrap();
        front.set_inflight_fd(&kept, std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
    }
    let mut vqs: Vec<_> = (0..QUEUES as u64).map(|number| Vq::new(ram, number)).collect();
    for (index, vq) in vqs.iter_mut().enumerate() {
        vq.event_idx = features == SPLIT;
        front.start(index, vq);
    }
    (front, vqs)
}

#[test]
fn exports_change_hands_under_a_guest_that_notices_nothing() {
    for (name, latency_ns, features, tracked) in
        [("at once", 0, PLAIN, false), ("slow", 200_000, SPLIT, false), ("recorded", 50_000, PLAIN, true)]
    {
        let devices = [AnyDevice::ram(latency_ns)];
        let world = World::new(devices.to_vec(), QUEUES, 2);
        let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
        let (mut front, mut vqs) = attach(&world, &ram, features, tracked);
        let over = AtomicBool::new(false);
        let answered: Vec<AtomicU64> = (0..QUEUES).map(|_| AtomicU64::new(0)).collect();
        let world = std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let mut world = world;
            let guests = vqs.iter_mut().zip(&answered).enumerate();
            let guests: Vec<_> = guests
                .map(|(number, (vq, answered))| {
                    let over = &over;
                    scope.spawn(move || load(number, vq, answered, over))
                })
                .collect();
            let dimm = Ram::at(1 << 32, 1 << 20);
            let mut pauses = Vec::new();
            for round in 0..12 {
                let before: Vec<u64> = answered.iter().map(|count| count.load(SeqCst)).collect();
                let (heir, pause) = world.hand_over(&devices, QUEUES, 1 + round % 3);
                world = heir;
                pauses.push(pause);
                until("all queues go on", || {
                    answered.iter().zip(&before).all(|(count, before)| count.load(SeqCst) > *before)
                });
                // The new message layer has the features negotiated with the old one.
                if round % 2 == 0 {
                    front.add(&dimm).unwrap();
                } else {
                    front.remove(&dimm).unwrap();
                }
                assert_eq!(front.config(0, 8).unwrap(), (16384_u64).to_le_bytes());
            }
            over.store(true, SeqCst);
            let waited: Vec<_> = guests.into_iter().map(|guest| guest.join().unwrap()).collect();
            pauses.sort_unstable();
            println!("{name}: rested at most {:?}; guests waited at most {waited:?}", pauses.last());
            world
        });
        assert_eq!(world.exports[0].status().sessions(), 1);
        front.leave(&world.exports[0]);
        // The next front-end is served as usual.
        let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
        let (front, mut vqs) = attach(&world, &ram, features, false);
        assert_eq!(vqs[0].write(0, &[7; 512]), 0);
        front.leave(&world.exports[0]);
        world.stop();
    }
}

#[test]
fn an_export_that_nobody_takes_goes_on() {
    let world = World::new(vec![AnyDevice::ram(20_000)], QUEUES, 2);
    let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
    let (front, mut vqs) = attach(&world, &ram, PLAIN, false);
    let over = AtomicBool::new(false);
    let answered: Vec<AtomicU64> = (0..QUEUES).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let _ends = Ends(&over);
        for (number, (vq, answered)) in vqs.iter_mut().zip(&answered).enumerate() {
            let over = &over;
            scope.spawn(move || load(number, vq, answered, over));
        }
        for round in 0..30 {
            let before: Vec<u64> = answered.iter().map(|count| count.load(SeqCst)).collect();
            let asked = world.exports[0].server().hand().hand_over();
            // The handover is either received and cancelled, or its requester no longer waits.
            if round % 3 > 0 {
                drop(asked.recv_timeout(PATIENCE).unwrap().unwrap());
            } else {
                drop(asked);
            }
            until("all queues go on", || {
                answered.iter().zip(&before).all(|(count, before)| count.load(SeqCst) > *before)
            });
        }
        over.store(true, SeqCst);
    });
    front.leave(&world.exports[0]);
    world.stop();
}

/// Configuration of an export without lanes that takes over, for refusals.
fn config(queues: usize) -> BackendConfig {
    let disk = BlkConfig::new(&AnyDevice::ram(0).info, queues as u16, SEG_MAX, true);
    let queues = (0..queues).map(|_| queue_pair().0).collect();
    BackendConfig { name: "heir".into(), disk, queues, domains: Vec::new() }
}

#[test]
fn what_makes_no_session_is_refused_and_the_old_export_goes_on() {
    let world = World::new(vec![AnyDevice::ram(0)], QUEUES, 2);
    let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
    let (front, mut vqs) = attach(&world, &ram, PLAIN, false);
    for (spoil, words) in [("queues", "4 queues"), ("a message", "invalid message"), ("half a message", "")] {
        let handed = world.exports[0].server().hand().hand_over().recv_timeout(PATIENCE).unwrap().unwrap();
        let mut state = handed.state;
        let session = state.session.as_mut().unwrap();
        match spoil {
            "a message" => session.setup.push(Message { bytes: vec![0xff; 12], files: Vec::new() }),
            "half a message" => session.setup.push(Message { bytes: vec![0; 3], files: Vec::new() }),
            _ => {}
        }
        let made = if spoil == "queues" { 2 } else { QUEUES };
        let offered = made as u16;
        let socket = BoundSocket::adopt(state.listener, state.path, state.identity);
        let refused = VhostUserServer::take_over(socket, config(made), offered, state.wce, state.session);
        let why = refused.err().unwrap_or_else(|| panic!("{spoil} is taken"));
        assert!(why.contains(words), "{spoil}: {why}");
        drop(handed.rest);
        assert!(world.exports[0].path.exists());
        assert_eq!(vqs[0].write(0, &[1; 512]), 0);
    }
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn memory_that_was_cut_short_and_is_used_by_nobody_is_not_taken_over_and_the_old_export_goes_on() {
    let world = World::new(vec![AnyDevice::ram(0)], QUEUES, 2);
    let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
    let (mut front, mut vqs) = attach(&world, &ram, PLAIN, false);
    let dimm = Ram::at(1 << 32, 1 << 20);
    front.add(&dimm).unwrap();
    dimm.truncate(0);
    for _ in 0..3 {
        let handed = world.exports[0].server().hand().hand_over().recv_timeout(PATIENCE).unwrap().unwrap();
        let state = handed.state;
        let socket = BoundSocket::adopt(state.listener, state.path, state.identity);
        let refused = VhostUserServer::take_over(socket, config(QUEUES), QUEUES as u16, state.wce, state.session);
        assert!(refused.is_err(), "memory that is not there is taken over");
        drop(handed.rest);
        assert_eq!(vqs[0].write(0, &[1; 512]), 0);
    }
    // After cancelling by the requester, the export continues.
    front.remove(&dimm).unwrap();
    let world = world.hand_over(&[AnyDevice::ram(0)], QUEUES, 2).0;
    assert_eq!(vqs[0].write(0, &[2; 512]), 0);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn a_message_of_which_half_has_come_is_finished_elsewhere() {
    let devices = [AnyDevice::ram(0)];
    let mut world = World::new(devices.to_vec(), 2, 1);
    let raw = Raw::connect(&world.exports[0].path);
    let ask = Raw::message(Request::GetFeatures as u32, 1, &[]);
    for cut in 0..ask.len() {
        assert!(raw.send(&ask[..cut], &[]));
        until("it is connected", || world.exports[0].status().is_connected());
        world = world.hand_over(&devices, 2, 1).0;
        assert!(raw.send(&ask[cut..], &[]));
        assert_eq!(raw.reply(Request::GetFeatures).map(|features| features.len()), Some(8));
    }
    drop(raw);
    world.stop();
}

#[test]
fn who_waits_to_be_let_in_is_let_in_elsewhere() {
    let devices = [AnyDevice::ram(0)];
    let world = World::new(devices.to_vec(), QUEUES, 1);
    let world = world.hand_over(&devices, QUEUES, 1).0;
    let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
    let (front, _vqs) = attach(&world, &ram, PLAIN, false);
    let path = world.exports[0].path.clone();
    let waiting = std::thread::spawn(move || {
        let mut front = Front::dial(&path);
        front.negotiate(PLAIN);
        front
    });
    let world = world.hand_over(&devices, QUEUES, 1).0;
    front.leave(&world.exports[0]);
    drop(waiting.join().unwrap());
    world.stop();
}

#[test]
fn what_is_in_flight_is_finished_before_anything_is_handed_over() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let ram = Ram::new(VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the write is with the device", || gate.held() == 1);
    let asked = world.exports[0].server().hand().hand_over();
    assert!(asked.recv_timeout(Duration::from_millis(50)).is_err(), "handed over with a write in flight");
    gate.set_shut(false);
    let handed = asked.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(vq.wait_used(), (0, 1));
    drop(handed);
    assert_eq!(vq.write(8, &[2; 512]), 0);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn a_kick_for_who_goes_on_is_not_taken_by_who_has_let_go() {
    let mut world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    let ram = Ram::new(VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    // A sleeping lane waits for the kick; a lane that no longer sleeps has no reminder of it.
    let used_ns = || world.lanes.threads()[0].cpu_ns().unwrap();
    until("the lane sleeps", || {
        let before_ns = used_ns();
        std::thread::sleep(Duration::from_millis(20));
        used_ns() == before_ns
    });
    world.lanes.set_policy(IdlePolicy::up_to(u64::MAX)).wait(PATIENCE).unwrap();
    let handed = world.exports[0].server().hand().hand_over().recv_timeout(PATIENCE).unwrap().unwrap();
    ring(&vq.kick);
    for _ in 0..1000 {
        world.exports[0].watch(0).look().unwrap().recv_timeout(PATIENCE).unwrap();
    }
    assert_eq!(rung(&vq.kick), 1, "somebody else has heard it");
    drop(handed);
    assert_eq!(vq.write(8, &[2; 512]), 0);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn rings_of_a_format_that_was_left_keep_nobody_from_going_on() {
    let devices = [AnyDevice::ram(0)];
    let mut world = World::new(devices.to_vec(), 1, 1);
    let ram = Ram::new(LINE_BYTES);
    let mut front = Front::dial(&world.exports[0].path);
    front.negotiate(PLAIN | Features::RING_PACKED.bits());
    front.share(&[&ram]).unwrap();
    let mut packed = Line::new(&ram, 0, 3, Features::RING_PACKED);
    packed.start(&front, 0, false);
    packed.all(10, 0, kind::OUT, 1);
    packed.stop(&front, 0);
    // Like firmware after a guest's driver.
    front.set_features(front.features & !Features::RING_PACKED.bits()).unwrap();
    world = world.hand_over(&devices, 1, 1).0;
    ram.write(0, &vec![0; LINE_BYTES as usize]);
    let mut split = Line::new(&ram, 0, 8, Features::empty());
    split.start(&front, 0, false);
    split.all(10, 0, kind::IN, 1);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn what_was_set_up_with_features_that_were_given_back_is_handed_over() {
    let devices = [AnyDevice::ram(0)];
    let mut world = World::new(devices.to_vec(), QUEUES, 1);
    let ram = Ram::new(QUEUES as u64 * VQ_BYTES);
    let (mut front, mut vqs) = attach(&world, &ram, PLAIN, true);
    front.set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::MQ).unwrap();
    world = world.hand_over(&devices, QUEUES, 1).0;
    assert_eq!(vqs[0].write(0, &[1; 512]), 0);
    front.leave(&world.exports[0]);
    world.stop();
}
