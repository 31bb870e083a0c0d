//! Changes of a serving export: its size, its depth, the queues it offers. No fetched request is lost, and unaffected
//! front-ends notice nothing.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use blkyard_export::Changed;
use blkyard_mq::{DeviceInfo, Op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{
    AnyDevice, Bystander, Data, Ends, Front, Gate, PATIENCE, Ram, Raw, Request, VQ_BYTES, Vq, World, disk_info, kind,
    one_queue, until,
};

/// The disk of all tests, of another size.
fn sized(capacity_sectors: u64) -> DeviceInfo {
    DeviceInfo { capacity_sectors, ..disk_info() }
}

/// A world with a disk that has room to grow, and a second one.
fn world() -> World {
    let mut device = AnyDevice::ram_with(sized(65_536), 0);
    device.info = disk_info();
    World::new(vec![device, AnyDevice::ram(0)], 2, 2)
}

/// A back-end channel; returns the front-end's end.
fn channel(front: &mut Front) -> UnixStream {
    let (end, far_end) = UnixStream::pair().unwrap();
    front.set_backend_request_fd(&far_end).unwrap();
    end.set_read_timeout(Some(PATIENCE)).unwrap();
    end
}

#[test]
fn a_disk_that_has_grown_says_so_and_takes_writes_where_there_was_nothing() {
    let world = world();
    let (mut front, mut vq) = one_queue(&world.exports[0]);
    let mut end = channel(&mut front);
    let hand = world.exports[0].server().hand();
    assert_ne!(vq.write(16_384, &[1; 512]), 0, "beyond the end");
    let answer = hand.change(0, Arc::new(sized(32_768)));
    assert_eq!(answer.recv_timeout(PATIENCE).unwrap(), Ok(Changed::Told));
    let mut message = [0; 12];
    end.read_exact(&mut message).unwrap();
    let words: Vec<_> = message.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words, [2, 1, 0], "a configuration change that wants no answer");
    assert_eq!(front.config(0, 8).unwrap(), 32_768_u64.to_le_bytes());
    assert_eq!(vq.write(32_767, &[1; 512]), 0);
    assert_ne!(vq.write(32_768, &[1; 512]), 0, "beyond the new end");
    // Other limits are not announced.
    let mut limited = sized(32_768);
    limited.limits.sectors_max = 8;
    assert_eq!(hand.change(0, Arc::new(limited)).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Silent));
    assert_eq!(vq.write(0, &[2; 8192]), 0, "in two requests");
    assert_eq!(world.exports[0].stats(0).snapshot().ops[1].ios, 3);
    front.leave(&world.exports[0]);
    assert_eq!(hand.change(0, Arc::new(sized(16_384))).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Unseen));
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(front.config(0, 8).unwrap(), 16_384_u64.to_le_bytes());
    assert_eq!(
        hand.change(0, Arc::new(sized(8))).recv_timeout(PATIENCE).unwrap(),
        Ok(Changed::Untold),
        "it gave no channel"
    );
    drop(front);
    world.stop();
}

#[test]
fn a_load_does_not_notice_that_its_disk_changes() {
    let world = world();
    let ram = Ram::new(2 * VQ_BYTES);
    let mut front = Front::connect(&world.exports[0]);
    front.share(&[&ram]).unwrap();
    let mut vqs: Vec<_> = (0..2).map(|number| Vq::new(&ram, number)).collect();
    vqs.iter_mut().enumerate().for_each(|(index, vq)| front.start(index, vq));
    let hand = world.exports[0].server().hand();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        for vq in &mut vqs {
            let stop = &stop;
            scope.spawn(move || {
                let slots = vq.slots();
                for slot in 0..slots {
                    vq.put(slot, kind::OUT, u64::from(slot) * 8, Data::Out(&[slot as u8; 4096]));
                }
                vq.publish();
                let mut out = slots;
                while out > 0 {
                    let (head, _) = vq.wait_used();
                    assert_eq!(vq.status(head as u16 / 3), 0);
                    if stop.load(Relaxed) {
                        out -= 1;
                    } else {
                        vq.offer(head as u16);
                        vq.publish();
                    }
                }
            });
        }
        for round in 0..50 {
            let info = Arc::new(sized(16_384 + round * 8));
            hand.change(0, info).recv_timeout(PATIENCE).unwrap().unwrap();
            let depth = 1 + round as usize * 5 % 128;
            assert_eq!(hand.set_depth(depth).recv_timeout(PATIENCE).unwrap(), Ok(depth));
        }
        stop.store(true, Relaxed);
    });
    drop(front);
    world.stop();
}

#[test]
fn a_change_waits_for_what_was_fetched_and_holds_up_nobody_else() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let mut bystander = Bystander::new(&world.exports[1]);
    let (front, mut vq) = one_queue(&world.exports[0]);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the write is with the device", || gate.held() == 1);
    let answer = world.exports[0].server().hand().change(0, Arc::new(sized(8)));
    assert!(answer.recv_timeout(Duration::from_millis(50)).is_err());
    bystander.goes_on();
    gate.set_shut(false);
    assert_eq!(answer.recv_timeout(PATIENCE).unwrap(), Ok(Changed::Untold));
    assert_eq!((vq.wait_used().0, vq.status(0)), (0, 0));
    drop((front, bystander));
    world.stop();
}

#[test]
fn a_front_end_that_stops_in_the_middle_of_a_message_delays_no_change() {
    use std::io::Write;
    let world = world();
    let mut front = Front::connect(&world.exports[0]);
    let mut connection = front.raw.0.try_clone().unwrap();
    // The first third of a header.
    connection.write_all(&1_u32.to_ne_bytes()).unwrap();
    let changed = world.exports[0].server().hand().change(0, Arc::new(sized(8)));
    assert!(changed.recv_timeout(PATIENCE).unwrap().is_ok());
    connection.write_all(&[1_u32.to_ne_bytes(), 0_u32.to_ne_bytes()].concat()).unwrap();
    connection.read_exact(&mut [0; 20]).unwrap();
    assert_eq!(front.config(0, 8).unwrap(), 8_u64.to_le_bytes());
    drop(front);
    world.stop();
}

#[test]
fn a_front_end_that_asks_and_never_reads_delays_no_change() {
    use std::io::Write;
    let world = world();
    let front = Front::connect(&world.exports[0]);
    front.raw.0.set_nonblocking(true).unwrap();
    let question = Raw::message(Request::GetFeatures as u32, 1, &[]);
    let has_room = || {
        let fds = &mut [PollFd::new(&front.raw.0, PollFlags::OUT)];
        poll(fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 })).unwrap() > 0
    };
    while has_room() {
        // In part, at the end: the other half never comes.
        let _ = (&front.raw.0).write(&question);
    }
    let changed = world.exports[0].server().hand().change(0, Arc::new(sized(8)));
    assert!(changed.recv_timeout(PATIENCE).unwrap().is_ok());
    drop(front);
    world.stop();
}

#[test]
fn the_next_front_end_is_offered_another_number_of_queues() {
    let world = world();
    let hand = world.exports[0].server().hand();
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(front.get_queue_num().unwrap(), 2);
    assert_eq!(hand.offer(1, Vec::new()).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Silent));
    assert_eq!(front.get_queue_num().unwrap(), 2, "the connected one keeps its queues");
    front.leave(&world.exports[0]);
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(
        (front.get_queue_num().unwrap(), front.features >> 12 & 1),
        (1, 0),
        "one queue, and so no more than one"
    );
    front.leave(&world.exports[0]);
    assert_eq!(hand.offer(2, Vec::new()).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Unseen));
    for number in [0, 3] {
        let refused = hand.offer(number, Vec::new()).recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert!(refused.contains("only 2 exist"), "{refused}");
    }
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(front.get_queue_num().unwrap(), 2);
    drop(front);
    world.stop();
}

#[test]
fn who_looks_at_a_queue_sees_what_it_does() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let look = || world.exports[0].watch(0).look().unwrap().recv_timeout(PATIENCE).unwrap();
    assert!(look().ring.is_none());
    let (front, mut vq) = one_queue(&world.exports[0]);
    for slot in 0..3 {
        vq.put(slot, kind::OUT, 0, Data::Out(&[1; 512]));
    }
    vq.publish();
    until("the writes are with the device", || gate.held() == 3);
    let view = look();
    let ring = view.ring.unwrap();
    assert_eq!((ring.size, ring.in_flight, ring.next, ring.is_broken), (vq.size, 3, 3, false));
    assert_eq!((view.hw.in_flight, view.hw.bios, view.hw.tags_in_use, view.is_suspending), (3, 3, 3, false));
    assert!(view.hw.requests.iter().all(|request| (request.op, request.sectors) == (Op::Write, 1)));
    // The front-end is answered before the session is noted.
    let noted = || world.exports[0].status().session().filter(|session| session.queues[0].running);
    until("the session is noted", || noted().is_some());
    let session = noted().unwrap();
    assert_eq!((session.regions, session.memory_bytes, session.queues[0].running), (1, 1 << 20, true));
    gate.set_shut(false);
    until("all is answered", || look().hw.in_flight == 0);
    front.leave(&world.exports[0]);
    assert!(world.exports[0].status().session().is_none());
    let watch = world.exports[0].watch(0).clone();
    world.stop();
    assert!(
        watch.look().is_none_or(|answer| answer.recv_timeout(PATIENCE).is_err()),
        "it is gone, and we did not keep it"
    );
}
