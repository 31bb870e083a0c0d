//! A deep load on many queues is answered in full. The rates are printed, not judged: they say little on a machine that
//! does other things as well.

use std::time::{Duration, Instant};

use crate::common::{AnyDevice, Data, Front, PATIENCE, Ram, VQ_BYTES, Vq, World, kind};

/// Keeps a queue full for a while; returns how many were answered.
fn drive(vq: &mut Vq, lasting: Duration) -> u64 {
    let start = Instant::now();
    let mut answered = 0;
    let mut out = 0_u16;
    for slot in 0..vq.slots() {
        vq.put(slot, kind::IN, u64::from(slot) * 8, Data::In(4096));
        out += 1;
    }
    vq.publish();
    while out > 0 {
        let (head, written) = vq.wait_used();
        assert_eq!((head % 3, written), (0, 4097));
        answered += 1;
        if start.elapsed() < lasting {
            vq.offer(head as u16);
            vq.publish();
        } else {
            out -= 1;
        }
        assert!(start.elapsed() < PATIENCE);
    }
    answered
}

#[test]
fn a_deep_load_on_all_queues_is_answered_in_full() {
    for (name, device) in [("null", AnyDevice::null(0)), ("ram", AnyDevice::ram(0)), ("slow", AnyDevice::ram(50_000))] {
        let world = World::new(vec![device], 4, 2);
        let ram = Ram::new(4 * VQ_BYTES);
        for event_idx in [false, true] {
            let mut front = Front::dial(&world.exports[0].path);
            front.negotiate(if event_idx { crate::common::SPLIT } else { crate::common::PLAIN });
            front.share(&[&ram]).unwrap();
            ram.write(0, &vec![0; 4 << 20]);
            let mut vqs: Vec<_> = (0..4).map(|number| Vq::new(&ram, number)).collect();
            for (index, vq) in vqs.iter_mut().enumerate() {
                vq.event_idx = event_idx;
                front.start(index, vq);
            }
            let lasting = Duration::from_millis(150);
            let before: Vec<u64> = (0..4).map(|index| ended(&world, index)).collect();
            let answered: Vec<u64> = std::thread::scope(|scope| {
                let threads: Vec<_> = vqs.iter_mut().map(|vq| scope.spawn(|| drive(vq, lasting))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let per_s = answered.iter().sum::<u64>() as f64 / lasting.as_secs_f64();
            println!("{name}, event indexes {event_idx}: {per_s:.0} a second");
            for index in 0..4 {
                assert_eq!(ended(&world, index) - before[index], answered[index], "queue {index} counts otherwise");
            }
            front.leave(&world.exports[0]);
        }
        world.stop();
    }
}

/// Requests completed by a queue's device, and bios that shared one.
fn ended(world: &World, queue: usize) -> u64 {
    let stats = world.exports[0].stats(queue).snapshot();
    stats.ops.iter().map(|op| op.ios).sum::<u64>() + stats.merged.iter().sum::<u64>()
}
