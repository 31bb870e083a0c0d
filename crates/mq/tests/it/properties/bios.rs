//! Bios: properties 5 and 6.

use blkyard_mq::{BioFlags, Merging, Op, Status};
use blkyard_sim::{ChaosConfig, ChaosStep};
use proptest::prelude::*;

use super::world::{Entry, Plan, Step, Submission, World, any_plan};

/// Events of the device for requests related to a bio, during its life.
fn told<'a>(world: &'a World, submission: &'a Submission, until: usize) -> impl Iterator<Item = Status> {
    let flushes = submission.op == Op::Flush || submission.flags.intersects(BioFlags::PREFLUSH | BioFlags::FUA);
    world.log[submission.submitted..until].iter().filter_map(move |entry| match entry {
        Entry::Device(event) => match event.step {
            ChaosStep::Ended(status) if submission.is_meant(event) => Some(status),
            ChaosStep::Ended(status) if flushes && event.op == Op::Flush && event.namespace == submission.namespace => {
                Some(status)
            }
            _ => None,
        },
        _ => None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // 5
    #[test]
    fn a_bio_ends_once_with_the_status_of_the_first_part_that_failed(plan in any_plan()) {
        let mut plan = plan;
        // The event of a discard with several ranges does not list them.
        plan.limits.discard_segments_max = 1;
        let world = World::run(&plan);
        let mut ended = vec![0; world.submissions.len()];
        for (at, entry) in world.log.iter().enumerate() {
            let Entry::Ended(id, status) = *entry else { continue };
            let submission = &world.submissions[id as usize];
            ended[id as usize] += 1;
            let own: Vec<Status> = {
                let of_kind = world.log[submission.submitted..at].iter().filter_map(|entry| match entry {
                    Entry::Device(event) if submission.is_meant(event) => Some(event.step),
                    _ => None,
                });
                of_kind.filter_map(|step| if let ChaosStep::Ended(status) = step { Some(status) } else { None }).collect()
            };
            let first_failed = own.iter().find(|status| !status.is_ok());
            match status {
                Status::Ok => {
                    prop_assert_eq!(first_failed, None, "bio {} failed in part: {:?}", id, submission);
                    let done: u64 = world.log[submission.submitted..at].iter().map(|entry| match entry {
                        Entry::Device(event) if submission.is_meant(event) && event.step == ChaosStep::Ended(Status::Ok) => {
                            let end = (event.sector + u64::from(event.sectors)).min(submission.sector + submission.sectors);
                            end - event.sector.max(submission.sector)
                        }
                        _ => 0,
                    }).sum();
                    prop_assert_eq!(done, submission.sectors, "bio {} was not done, or twice: {:?}", id, submission);
                }
                Status::Io | Status::Medium | Status::Timeout => {
                    let mut said = told(&world, submission, at);
                    prop_assert!(first_failed == Some(&status) || said.any(|other| other == status), "bio {id}: {status}");
                    if first_failed.is_some() && submission.op != Op::Flush && !submission.flags.intersects(BioFlags::PREFLUSH | BioFlags::FUA) {
                        prop_assert_eq!(first_failed, Some(&status));
                    }
                }
                Status::Again => prop_assert!(submission.flags.contains(BioFlags::NOWAIT) && own.is_empty(), "{submission:?}"),
                // Refused, before the device has heard of it; or split in part, and the rest cannot be.
                Status::Invalid | Status::NotSupported => {
                    prop_assert!(own.is_empty() || status == Status::Invalid, "{submission:?} {own:?}");
                }
                Status::NoSpace | Status::Path | Status::Offline => prop_assert!(false, "{submission:?} ended with {status}"),
            }
        }
        prop_assert!(ended.iter().all(|times| *times == 1));
    }

    // 6
    #[test]
    fn without_merges_and_requeues_requests_reach_the_device_in_the_order_of_submission(plan in any_plan()) {
        // No timeouts either: a late request may be taken back and repeated.
        let delay_ns_max = plan.chaos.delay_ns_max.min(1_000_000);
        let chaos = ChaosConfig { put_back_every: 0, requeue_every: 0, lose_every: 0, delay_ns_max, ..plan.chaos };
        let mut plan = Plan { chaos, ..plan }.unscheduled();
        plan.config.merging = Merging::Off;
        for step in &mut plan.steps {
            if let Step::Submit { op, flags, .. } = step {
                *flags &= BioFlags::NOWAIT | BioFlags::NO_MERGE;
                *op = if *op == Op::Flush { Op::Read } else { *op };
            }
        }
        let world = World::run(&plan);
        let mut last = vec![(0, 0); plan.namespaces];
        for (at, entry) in world.log.iter().enumerate() {
            let Entry::Device(event) = entry else { continue };
            if event.step != ChaosStep::Taken {
                continue;
            }
            // The newest that was there by then: ranges are no two bios' at one time.
            let found = world.submissions.iter().rposition(|submission| submission.submitted <= at && submission.is_meant(event));
            let now = (found.unwrap(), event.sector);
            let before = std::mem::replace(&mut last[usize::from(event.namespace)], now);
            prop_assert!(before < now || (before, now.0) == ((0, 0), 0), "{before:?} was passed by {now:?}");
        }
    }

    /// Refused and requeued requests are repeated in order of submission, too.
    #[test]
    fn what_comes_back_goes_before_what_came_later(plan in any_plan()) {
        let chaos = ChaosConfig { delay_ns_max: 0, lose_every: 0, instant_every: 0, ..plan.chaos };
        let mut plan = Plan { chaos, ..plan }.unscheduled();
        plan.config.merging = Merging::Off;
        for step in &mut plan.steps {
            if let Step::Submit { op, flags, sectors, .. } = step {
                (*op, *flags, *sectors) = (Op::Read, BioFlags::empty(), 1);
            }
        }
        let world = World::run(&plan);
        // Between two turns the driver is offered one batch: it takes from it in order, or puts one back for later.
        let mut last = vec![None; plan.namespaces];
        for (at, entry) in world.log.iter().enumerate() {
            match entry {
                Entry::Device(event) if event.step == ChaosStep::Taken => {
                    let found = world.submissions.iter().rposition(|submission| submission.submitted <= at && submission.is_meant(event));
                    let before = last[usize::from(event.namespace)].replace(found);
                    prop_assert!(before.is_none_or(|before| before < found), "{before:?} and {found:?}");
                }
                Entry::Turned(..) => last.fill(None),
                _ => {}
            }
        }
    }
}
