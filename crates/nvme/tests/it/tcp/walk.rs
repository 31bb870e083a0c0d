//! Host against target with the queue core, on streams cut at random, with damaged bytes, lost connections and failed
//! commands: no acknowledged write is lost, no read is torn, every bio ends.

use crate::seeds::seeds;
use crate::tcp::world::{Seen, World};

/// Walks per test run.
const SEEDS: u64 = 3000;
/// Steps with faults of one walk.
const STEPS: usize = 1500;

fn walk(seed: u64) -> Seen {
    let mut world = World::new(seed);
    world.has_faults = world.chance.one_in(2);
    for _ in 0..STEPS {
        if world.chance.one_in(12) {
            world.submit();
        }
        world.step();
    }
    world.finish();
    world.seen
}

#[test]
fn every_io_ends_with_the_right_data() {
    let asked = seeds();
    let mut all = Seen::default();
    for seed in asked.clone().unwrap_or(0..SEEDS) {
        let seen = std::panic::catch_unwind(|| walk(seed));
        let seen = seen.unwrap_or_else(|_| panic!("seed {seed}: repeat with BLKYARD_SEED={seed}"));
        all.bios += seen.bios;
        all.failed += seen.failed;
        all.cuts += seen.cuts;
        all.violations += seen.violations;
        all.transient += seen.transient;
        all.in_capsule += seen.in_capsule;
        all.transported += seen.transported;
        all.direct += seen.direct;
        all.stalls += seen.stalls;
        all.requeued += seen.requeued;
    }
    println!("{all:?}");
    if asked.is_none() {
        let met = [all.failed, all.cuts, all.violations, all.transient, all.in_capsule, all.transported, all.requeued];
        assert!(met.into_iter().all(|count| count > 50), "walks do not meet everything: {all:?}");
    }
}
