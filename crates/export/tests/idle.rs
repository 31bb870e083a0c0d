//! Idle queues cost nothing, and wake on a kick. A separate program, so that no other test uses the CPUs meanwhile.

mod common;

use std::time::{Duration, Instant};

use common::{AnyDevice, Data, Front, Ram, Vq, World, kind, until};

#[test]
fn sixteen_idle_queues_use_no_measurable_time_and_hear_a_kick() {
    let world = World::new(vec![AnyDevice::ram(0)], 16, 2);
    let ram = Ram::new(16 << 20);
    for event_idx in [false, true] {
        let mut front = Front::dial(&world.exports[0].path);
        front.negotiate(if event_idx { common::SPLIT } else { common::PLAIN });
        front.share(&[&ram]).unwrap();
        ram.write(0, &vec![0; 16 << 20]);
        let mut vqs: Vec<_> = (0..16).map(|number| Vq::new(&ram, number)).collect();
        for (index, vq) in vqs.iter_mut().enumerate() {
            vq.event_idx = event_idx;
            front.start(index, vq);
            assert_eq!(vq.write(index as u64, &[1; 512]), 0);
        }
        // A lane that sleeps has asked to be kicked.
        until("all queues ask to be kicked", || vqs.iter().all(Vq::wants_kick));
        let used = || world.lanes.threads().iter().map(|lane| lane.cpu_ns().unwrap()).sum::<u64>();
        let is_idle = || {
            let (before, start) = (used(), Instant::now());
            std::thread::sleep(Duration::from_secs(1));
            let (spent, passed) = (used() - before, start.elapsed().as_nanos() as u64);
            println!("used {spent} ns of {passed} ns");
            spent * 100 <= passed
        };
        // A machine whose host takes the CPU away sometimes charges that to the running thread; the use of a lane that
        // does not sleep shows in every window.
        assert!((0..5).any(|_| is_idle()), "idle lanes use more than a hundredth of the time");
        for (index, vq) in vqs.iter_mut().enumerate() {
            vq.put(0, kind::IN, index as u64, Data::In(512));
            let kicked = vq.publish();
            assert!(kicked || index > 0, "lanes that sleep do not want to be kicked");
            assert_eq!(vq.wait_used(), (0, 513));
        }
        front.leave(&world.exports[0]);
    }
    world.stop();
}
