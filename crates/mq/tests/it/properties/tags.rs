//! Tags and requests: properties 1, 2, 4 and 12.

use std::collections::{BTreeMap, BTreeSet};

use blkyard_mq::{BioFlags, HwSnapshot, Merging, Op, RequestState};
use blkyard_sim::{ChaosConfig, ChaosStep};
use proptest::prelude::*;

use super::world::{Entry, Plan, Step, World, any_plan};

fn snapshots(world: &World) -> impl Iterator<Item = &HwSnapshot> {
    world.log.iter().filter_map(|entry| match entry {
        Entry::Turned(snapshot, ..) => Some(&**snapshot),
        _ => None,
    })
}

/// Requests at the device, one by one: panics if one begins twice, or ends without being there.
fn check_turns_with_the_device(world: &World) {
    let mut held = BTreeMap::new();
    for entry in &world.log {
        let Entry::Device(event) = entry else { continue };
        let request = (event.op, event.flags, event.namespace, event.sector, event.sectors);
        let other = match event.step {
            ChaosStep::Taken => held.insert(event.tag, request).map(|other| (other, "begun twice")),
            _ => match held.remove(&event.tag) {
                Some(taken) => (taken != request).then_some((taken, "exchanged")),
                None => Some((request, "ended without having begun")),
            },
        };
        assert!(other.is_none(), "{event:?} was {other:?}");
    }
    assert!(held.is_empty(), "the device has {held:?}, and the queue is idle");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // 1
    #[test]
    fn no_tag_is_owned_by_two_requests(plan in any_plan()) {
        let world = World::run(&plan);
        for snapshot in snapshots(&world) {
            let tags: BTreeSet<usize> = snapshot.requests.iter().map(|request| request.tag).collect();
            prop_assert_eq!(tags.len(), snapshot.requests.len());
            prop_assert!(tags.last().is_none_or(|tag| *tag < snapshot.depth));
            // Waiting ones are all different, too: none is listed twice.
            let waiting = snapshot.requests.iter().filter(|request| request.state == RequestState::Idle).count();
            prop_assert_eq!(waiting, snapshot.dispatch);
        }
        // A request with a reserved tag is of a bio that asked for one.
        for entry in &world.log {
            if let Entry::Device(event) = entry
                && event.tag < plan.config.reserved
            {
                let mut asked = world.submissions.iter().filter(|submission| submission.flags.contains(BioFlags::RESERVED));
                prop_assert!(asked.any(|submission| submission.namespace == event.namespace && submission.op == event.op), "{event:?}");
            }
        }
    }

    // 2
    #[test]
    fn the_tags_that_are_out_are_those_of_the_requests_there_are(plan in any_plan()) {
        let world = World::run(&plan);
        for snapshot in snapshots(&world) {
            prop_assert_eq!(snapshot.tags_in_use, snapshot.requests.len());
            prop_assert!(snapshot.tags_in_use <= snapshot.depth);
            prop_assert_eq!(snapshot.tags_in_use == 0, snapshot.requests.is_empty());
            if plan.namespaces > 1 {
                let held: usize = snapshot.namespaces.iter().map(|namespace| namespace.tags_held).sum();
                prop_assert_eq!(held, snapshot.tags_in_use);
            }
        }
        let last = snapshots(&world).last().unwrap();
        prop_assert_eq!((last.tags_in_use, last.in_flight, last.dispatch, last.bios), (0, 0, 0, 0));
    }

    // 4
    #[test]
    fn a_request_is_handed_to_the_driver_once_until_it_is_handed_back(plan in any_plan()) {
        check_turns_with_the_device(&World::run(&plan));
    }

    // 12
    #[test]
    fn every_active_namespace_gets_its_share_of_the_tags(
        plan in any_plan(), busy in 2_u16..5, depth in 1_usize..33, seed: u64, lost in prop::bool::ANY,
    ) {
        // With all lost no completion comes before the timeout.
        let chaos = ChaosConfig { seed, lose_every: u32::from(lost), ring: usize::MAX, ..plan.chaos };
        let steps = (0..u64::from(busy) * 40).map(|at| Step::Submit {
            op: Op::Read,
            flags: BioFlags::empty(),
            namespace: (at % u64::from(busy)) as u16,
            sector: at / u64::from(busy) * 8 % 160,
            sectors: 1,
            // One stream, which no scheduler holds back for others.
            tear: 1 << 8,
        });
        let steps = steps.flat_map(|step| [step, Step::Turn]).collect();
        let mut plan = Plan { namespaces: usize::from(busy), chaos, budget: None, steps, ..plan };
        plan.config.depth = depth + plan.config.reserved;
        (plan.config.bios_max, plan.config.merging) = (256, Merging::Off);
        let world = World::run(&plan);
        let mut before = vec![0; usize::from(busy)];
        for snapshot in snapshots(&world) {
            let active = snapshot.namespaces.iter().filter(|namespace| namespace.active).count().max(1);
            let share = if active == 1 { depth } else { depth.div_ceil(active).max(4).min(depth) };
            for (number, namespace) in snapshot.namespaces.iter().enumerate() {
                prop_assert_eq!(namespace.tags_max, share);
                // A waiting namespace has its share, or no tag is free.
                let stopped = namespace.tags_held >= share || snapshot.tags_in_use >= depth;
                prop_assert!(namespace.waiting == 0 || stopped, "{namespace:?} of {snapshot:?}");
                // A larger number dates from the time before it had to share.
                prop_assert!(namespace.tags_held <= share.max(before[number]), "{namespace:?}");
                before[number] = namespace.tags_held;
            }
        }
        // With a share for each, all reach it while all are active.
        if lost && depth >= 4 * usize::from(busy) {
            let reached = |number: usize| snapshots(&world).map(|s| s.namespaces[number].tags_held).max();
            prop_assert!((0..usize::from(busy)).all(|number| reached(number).unwrap() >= depth / usize::from(busy)));
        }
    }
}
