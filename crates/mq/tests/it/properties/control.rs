//! Changes of a running queue, and its wake-ups meanwhile: properties 3, 7 and 8.

use blkyard_mq::Op;
use blkyard_sim::{ChaosConfig, ChaosStep};
use proptest::prelude::*;

use super::world::{Entry, Plan, Step, World, any_plan};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // 3: `World::settle` runs the queue only at its request, and detects a queue that sleeps without end.
    #[test]
    fn a_queue_with_bios_in_it_always_says_what_it_waits_for(plan in any_plan(), trouble in 2_u32..6) {
        let chaos = ChaosConfig { refuse_every: trouble, put_back_every: trouble, requeue_every: trouble, lose_every: trouble, ..plan.chaos };
        let mut world = World::new(&Plan { chaos, ..plan.clone() });
        for step in &plan.steps {
            world.step(step);
            if matches!(step, Step::Pass(_)) {
                world.finish();
            }
        }
        world.finish();
    }

    // 7
    #[test]
    fn after_quiesce_the_driver_is_offered_nothing(plan in any_plan(), quiesces in proptest::collection::vec(0_usize..160, 1..6)) {
        let mut plan = plan;
        plan.steps.retain(|step| !matches!(step, Step::Quiesce | Step::Unquiesce));
        let mut world = World::new(&plan);
        for (number, step) in plan.steps.iter().enumerate() {
            world.step(step);
            if !quiesces.contains(&number) {
                continue;
            }
            // Twice, since it nests; the device continues with its requests.
            world.queue.quiesce();
            world.queue.quiesce();
            let (from, batches) = (world.log.len(), world.eventfd.0.lock().unwrap().batches);
            for turn in 0..40_u64 {
                world.submit(Op::Write, blkyard_mq::BioFlags::empty(), 0, turn * 4, 2, turn);
                world.step(&Step::Pass(400_000));
                world.turn();
                if turn == 20 {
                    world.queue.unquiesce();
                }
            }
            prop_assert_eq!(world.eventfd.0.lock().unwrap().batches, batches);
            let taken = |entry: &Entry| matches!(entry, Entry::Device(event) if event.step == ChaosStep::Taken);
            prop_assert!(!world.log[from..].iter().any(taken));
            world.queue.unquiesce();
        }
        world.finish();
    }

    // 8
    #[test]
    fn a_frozen_queue_that_has_drained_has_no_request(plan in any_plan(), freezes in proptest::collection::vec(0_usize..160, 1..6)) {
        let mut plan = plan;
        plan.steps.retain(|step| !matches!(step, Step::Freeze | Step::Thaw | Step::Quiesce | Step::Unquiesce));
        let mut world = World::new(&plan);
        for (number, step) in plan.steps.iter().enumerate() {
            world.step(step);
            if !freezes.contains(&number) {
                continue;
            }
            world.queue.freeze();
            prop_assert_eq!(world.queue.room(), 0);
            let from = world.log.len();
            world.settle();
            for entry in &world.log[from..] {
                if let Entry::Turned(_, room) = entry {
                    prop_assert_eq!(*room, 0, "a bio may enter a frozen queue");
                }
            }
            let snapshot = world.queue.snapshot(0);
            prop_assert!(snapshot.requests.is_empty() && snapshot.tags_in_use == 0 && snapshot.bios == 0, "{snapshot:?}");
            let mut has = 0_i64;
            for entry in &world.log {
                if let Entry::Device(event) = entry {
                    has += if event.step == ChaosStep::Taken { 1 } else { -1 };
                }
            }
            prop_assert_eq!(has, 0, "the device still has some");
            // The purpose of freezing: memory and limits may be changed now.
            let (memory, info) = (world.queue.memory().clone(), world.queue.info().clone());
            world.queue.set_memory(&mut world.eventfd, memory);
            world.queue.set_info(0, info);
            world.queue.thaw();
        }
        world.finish();
    }
}
