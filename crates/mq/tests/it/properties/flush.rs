//! Flushes: property 10. Every world checks during its run that flushed data survives a power failure.

use std::collections::BTreeMap;

use blkyard_mq::{BioFlags, Op, Status};
use blkyard_sim::ChaosStep;
use proptest::prelude::*;

use super::world::{Entry, Plan, Step, World, any_plan};

/// The flushes of the device that went well: namespace, and the entries of the log at which each was begun and over.
fn good_flushes(world: &World) -> Vec<(u16, usize, usize)> {
    let mut begun = BTreeMap::new();
    let mut flushes = Vec::new();
    for (at, entry) in world.log.iter().enumerate() {
        let Entry::Device(event) = entry else { continue };
        match event.step {
            ChaosStep::Taken if event.op == Op::Flush => {
                begun.insert(event.tag, at);
            }
            ChaosStep::Ended(Status::Ok) if event.op == Op::Flush => {
                flushes.push((event.namespace, begun[&event.tag], at));
            }
            _ => {}
        }
    }
    flushes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // 10
    #[test]
    fn who_rides_on_a_flush_is_over_only_after_one_that_was_issued_since_it_came(plan in any_plan(), fua: bool) {
        let mut plan = Plan { volatile_cache: true, fua, ..plan };
        for (number, step) in plan.steps.iter_mut().enumerate() {
            if let Step::Submit { op, flags, .. } = step {
                match number % 5 {
                    0 => *op = Op::Flush,
                    1 => *flags |= BioFlags::PREFLUSH,
                    2 => *flags |= BioFlags::FUA,
                    _ => {}
                }
            }
        }
        let world = World::run(&plan);
        let flushes = good_flushes(&world);
        for (at, entry) in world.log.iter().enumerate() {
            let Entry::Ended(id, Status::Ok) = *entry else { continue };
            let submission = &world.submissions[id as usize];
            let own = |place: &usize, step: ChaosStep| match &world.log[*place] {
                Entry::Device(event) => submission.is_meant(event) && event.step == step,
                _ => false,
            };
            let first_taken = (submission.submitted..at).find(|place| own(place, ChaosStep::Taken));
            let last_ended = (submission.submitted..at).rfind(|place| own(place, ChaosStep::Ended(Status::Ok)));
            let between = |from: usize, to: usize| {
                flushes.iter().any(|flush| flush.0 == submission.namespace && flush.1 >= from && flush.2 < to)
            };
            if submission.op == Op::Flush {
                prop_assert!(between(submission.submitted, at), "flush {id} was over without one");
            } else if submission.flags.contains(BioFlags::PREFLUSH) {
                prop_assert!(between(submission.submitted, first_taken.unwrap()), "the data of {id} was not held back");
            }
            if submission.op != Op::Flush && submission.flags.contains(BioFlags::FUA) {
                if plan.fua {
                    let with_fua = world.log[submission.submitted..at].iter().all(|entry| match entry {
                        Entry::Device(event) => !submission.is_meant(event) || event.flags.contains(BioFlags::FUA),
                        _ => true,
                    });
                    prop_assert!(with_fua, "the device was not told of the FUA of {id}");
                } else {
                    prop_assert!(between(last_ended.unwrap(), at), "bio {id} is not durable");
                }
            }
        }
    }
}
