//! Exports of `serve` with connected idle front-ends, beside a busy one on the same lane: the busy one works, and an
//! idle one is served when it wakes, also after commands, moves and reconnects.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::{Daemon, PATIENCE, Stop, program, succeed};
use crate::guest::Guest;

const EXPORTS: usize = 24;
const QUEUES: usize = 4;

#[test]
fn idle_exports_answer_beside_a_busy_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut serve = program(folder, &["serve", "--control", "c", "--lanes", "1"]);
    for export in 0..=EXPORTS {
        serve.args(["--device", "ram:1M", "--export", &format!("vhost-user-blk:s{export}?queues={QUEUES}")]);
    }
    let daemon = Daemon::launch(&mut serve);
    let socket = |export: usize| folder.join(format!("s{export}"));
    let mut idle: Vec<_> = (0..EXPORTS).map(|export| Guest::connect(&socket(export), QUEUES)).collect();
    let mut busy = Guest::connect(&socket(EXPORTS), 1);
    let (stop, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    // Until the idle ones had time to be parked, and the busy one was served meanwhile.
    let rest = |checks: u64| {
        let (begin, before) = (Instant::now(), checked.load(Relaxed));
        while checked.load(Relaxed) < before + checks || begin.elapsed() < Duration::from_millis(20) {
            assert!(begin.elapsed() < PATIENCE, "the busy one is not served");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                busy.check(0, checked.load(Relaxed) % 256, checked.load(Relaxed));
                checked.fetch_add(1, Relaxed);
            }
        });
        // Stops the busy one even if an assertion fails here.
        let _stop = Stop(&stop);
        for round in 0..3 {
            rest(100);
            idle.iter_mut().for_each(|guest| guest.check_all(round));
        }
        rest(100);
        succeed(folder, &["inspect", "--control", "c"]);
        succeed(folder, &["set", "--control", "c", "export:0", "depth=3", "iops_max=100000"]);
        rest(100);
        idle.iter_mut().for_each(|guest| guest.check_all(3));
        // Front-ends leave and come, on queues that were parked.
        rest(100);
        for export in 0..3 {
            drop(idle.remove(0));
            idle.push(Guest::connect(&socket(export), QUEUES));
        }
        rest(100);
        idle.iter_mut().for_each(|guest| guest.check_all(4));
        // Parked queues move to another lane and back.
        for lanes in ["lanes=2", "lanes=1"] {
            rest(100);
            succeed(folder, &["set", "--control", "c", "daemon", lanes]);
            rest(100);
            idle.iter_mut().for_each(|guest| guest.check_all(5));
        }
    });
    drop((idle, busy));
    daemon.stop();
}
