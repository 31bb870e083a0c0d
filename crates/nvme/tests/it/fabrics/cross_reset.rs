//! Cross-controller reset, host side: what fences a lost association and what does not, and what is asked of a live
//! one.

use blkyard_mq::{FenceEvidence, Op, Status};
use blkyard_nvme::{
    ControllerInstance, ControllerState, CrossResetEntry, CrossResetState, FabricsHostEvent, NvmeStatus,
};

use crate::fabrics::rig::{MS, Rig, config};

const OTHER: ControllerInstance = ControllerInstance { id: 77, uniquifier: 3, random: 0x1234_5678 };

/// A rig with a queue, and a target whose controllers name their lives and are chosen by it.
fn rig() -> Rig {
    let mut rig = Rig::new(config());
    (rig.target.behaviour.has_lives, rig.target.behaviour.is_static) = (true, false);
    rig.target.behaviour.quiesce_ms = 2000;
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    rig.open(1);
    rig.run_until(|rig| rig.host.is_started(1));
    rig
}

/// Has a write at the target, and loses the association; the target does not learn of it.
fn lose_with_write(rig: &mut Rig) {
    rig.submit(1, Op::Write, 1, 1);
    (0..20).for_each(|_| rig.round());
    assert!(!rig.target.arrived.is_empty());
    let (association, _) = rig.admin.unwrap();
    rig.host.admin_lost(association, rig.now_ns);
    rig.control();
}

fn fences(rig: &Rig) -> Vec<FabricsHostEvent> {
    rig.events.iter().filter(|event| matches!(event, FabricsHostEvent::Fenced(..))).cloned().collect()
}

#[test]
fn a_reset_by_another_controller_fences_at_once() {
    let mut rig = rig();
    assert_eq!((rig.host.wants_reset(), rig.host.is_fenced()), (None, true));
    lose_with_write(&mut rig);
    let lost_ns = rig.now_ns;
    let instance = rig.host.wants_reset().unwrap();
    assert_eq!((instance.id, instance.random, rig.host.is_fenced()), (1, 1, false));
    // By then the host is connected again.
    rig.run_until(|rig| rig.host.controller_id() == Some(2));
    assert_eq!(rig.host.wants_reset(), Some(instance), "that of the lost association");
    rig.target.reset(instance);
    rig.host.was_reset(instance);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
    assert!(rig.now_ns - lost_ns < 1000 * MS);
    assert_eq!(fences(&rig), [FabricsHostEvent::Fenced(1, FenceEvidence::CrossControllerReset)]);
    assert_eq!((rig.host.wants_reset(), rig.host.is_fenced()), (None, true));
}

#[test]
fn the_reset_of_another_life_fences_nothing() {
    let mut rig = rig();
    lose_with_write(&mut rig);
    let lost_ns = rig.now_ns;
    let instance = rig.host.wants_reset().unwrap();
    for other in [
        ControllerInstance { random: instance.random + 1, ..instance },
        ControllerInstance { uniquifier: instance.uniquifier + 1, ..instance },
        ControllerInstance { id: instance.id + 1, ..instance },
    ] {
        rig.host.was_reset(other);
    }
    assert!(fences(&rig).is_empty());
    rig.target.arrived.clear();
    rig.run_until(|rig| rig.ended.len() == 1);
    // The keep-alive timeout and the quiesce time that the controller has declared.
    let took_ms = (rig.now_ns - lost_ns) / MS;
    assert!((7000..8000).contains(&took_ms), "{took_ms} ms");
    assert_eq!(fences(&rig), [FabricsHostEvent::Fenced(1, FenceEvidence::QuiesceElapsed)]);
    // Late news.
    rig.host.was_reset(instance);
    rig.control();
    assert_eq!(fences(&rig).len(), 1);
}

/// Its timer looks at intervals of the timeout for traffic.
#[test]
fn a_controller_that_counts_traffic_is_silent_an_interval_later() {
    let mut rig = rig();
    rig.target.behaviour.by_traffic = true;
    rig.host.reset(rig.now_ns);
    rig.run_until(|rig| rig.host.controller_id() == Some(2) && rig.host.is_started(1));
    lose_with_write(&mut rig);
    let lost_ns = rig.now_ns;
    rig.target.arrived.clear();
    rig.run_until(|rig| rig.ended.len() == 1);
    let took_ms = (rig.now_ns - lost_ns) / MS;
    assert!((12_000..13_000).contains(&took_ms), "{took_ms} ms");
}

#[test]
fn a_second_loss_has_no_reset_before_the_first_is_fenced() {
    let mut rig = rig();
    lose_with_write(&mut rig);
    let first = rig.host.wants_reset().unwrap();
    rig.target.arrived.clear();
    rig.run_until(|rig| rig.host.controller_id() == Some(2) && rig.host.state() == ControllerState::Live);
    // A queue without writes has started meanwhile.
    rig.open(2);
    rig.run_until(|rig| rig.host.is_started(2));
    let (association, _) = rig.admin.unwrap();
    rig.host.admin_lost(association, rig.now_ns);
    rig.control();
    assert_eq!(rig.host.wants_reset(), None);
    rig.host.was_reset(first);
    assert!(fences(&rig).is_empty(), "the second one may still execute commands");
    rig.run_until(|rig| rig.ended.len() == 1);
    // The target has refused one Connect between.
    assert_eq!(fences(&rig), [FabricsHostEvent::Fenced(3, FenceEvidence::QuiesceElapsed)]);
}

#[test]
fn a_live_association_has_another_controller_reset() {
    let mut rig = rig();
    let outcomes = |rig: &mut Rig| {
        let is_reset = |event: FabricsHostEvent| match event {
            FabricsHostEvent::OtherReset(instance, is_reset) => Some((instance, is_reset)),
            _ => None,
        };
        rig.events.drain(..).filter_map(is_reset).collect::<Vec<_>>()
    };
    let cases = [
        ((NvmeStatus::SUCCESS, 1), true),
        ((NvmeStatus::INVALID_FIELD.with_dnr(), 0), false),
        ((NvmeStatus::CROSS_RESET_RUNNING, 1), false),
    ];
    for (answer, is_reset) in cases {
        rig.target.behaviour.resets.push_back(answer);
        assert!(rig.host.reset_other(OTHER, rig.now_ns));
        assert!(!rig.host.reset_other(OTHER, rig.now_ns), "it runs already");
        rig.run_for(100);
        assert_eq!(outcomes(&mut rig), [(OTHER, is_reset)]);
    }
    assert!(rig.target.log.contains(&"reset 3004d 12345678".to_owned()));

    // In progress: the log is read until it names the end, though no notice comes.
    let entry = |uniquifier, state| CrossResetEntry { id: OTHER.id, uniquifier, asked: 1, state };
    let page = |state| CrossResetEntry::page([entry(9, CrossResetState::Succeeded), entry(OTHER.uniquifier, state)]);
    for (last, is_reset) in [
        (page(CrossResetState::Succeeded), true),
        (page(CrossResetState::Failed), false),
        (CrossResetEntry::page([entry(9, CrossResetState::Succeeded)]), false),
    ] {
        rig.target.behaviour.resets.push_back((NvmeStatus::SUCCESS, 0));
        let running = page(CrossResetState::Running);
        rig.target.behaviour.reset_logs = [running.clone(), running.clone(), running, last].into();
        assert!(rig.host.reset_other(OTHER, rig.now_ns));
        rig.run_for(100);
        assert_eq!(outcomes(&mut rig), []);
        rig.run_for(1000);
        assert_eq!(outcomes(&mut rig), [(OTHER, is_reset)]);
    }

    // What is asked of an association that is lost has failed.
    rig.target.behaviour.resets.push_back((NvmeStatus::SUCCESS, 0));
    rig.target.behaviour.reset_logs = vec![page(CrossResetState::Running); 100].into();
    assert!(rig.host.reset_other(OTHER, rig.now_ns));
    rig.run_for(50);
    rig.cut();
    rig.run_until(|rig| rig.count(|event| matches!(event, FabricsHostEvent::Lost(_))) == 1);
    assert!(!rig.host.reset_other(OTHER, rig.now_ns), "it is not live");
    rig.control();
    assert_eq!(outcomes(&mut rig), [(OTHER, false)]);
}

#[test]
fn disconnect_ends_the_resets_that_run() {
    let mut rig = rig();
    let entry =
        CrossResetEntry { id: OTHER.id, uniquifier: OTHER.uniquifier, asked: 1, state: CrossResetState::Running };
    rig.target.behaviour.resets.push_back((NvmeStatus::SUCCESS, 0));
    rig.target.behaviour.reset_logs = vec![CrossResetEntry::page([entry]); 100].into();
    assert!(rig.host.reset_other(OTHER, rig.now_ns));
    rig.run_for(50);
    rig.host.disconnect(rig.now_ns);
    // The target does not answer; the log would have been read by now.
    rig.now_ns += 1000 * MS;
    let due_ns = rig.host.advance(rig.now_ns).unwrap();
    assert!(due_ns > rig.now_ns, "the owner is to come again {} ns ago", rig.now_ns - due_ns);
    rig.control();
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::OtherReset(OTHER, false)), 1);
}

#[test]
fn a_controller_without_the_command_is_not_asked() {
    let mut rig = Rig::live(config(), 1);
    assert!(!rig.host.reset_other(OTHER, rig.now_ns));
    lose_with_write(&mut rig);
    assert_eq!((rig.host.wants_reset(), rig.host.is_fenced()), (None, false));
}
