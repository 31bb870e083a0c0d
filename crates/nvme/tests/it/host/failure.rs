//! Failure: late commands, resets, removal. Each race known from Linux's driver has a test with its name.

use blkyard_mq::{Op, Status};
use blkyard_nvme::{
    ControllerState, ControllerTransport, HostEvent, IoQueueCommand, LateAction, NvmeHostError, NvmeStatus,
    RETRIES_MAX, admin,
};

use crate::host::fake::{FakeController, FakeTransport, namespace};
use crate::host::peer::Peer as _;
use crate::host::rig::{MS, Rig, S, config};

/// A live controller whose I/O completes when the test says so.
fn slow(queues: u16, change: impl FnOnce(&mut FakeController)) -> Rig {
    let transport = FakeTransport::new();
    {
        let mut fake = transport.fake.borrow_mut();
        fake.is_prompt = false;
        change(&mut fake);
    }
    Rig::live(transport, config(queues))
}

fn prompt(rig: &Rig) {
    rig.fake.borrow_mut().is_prompt = true;
}

fn statuses(rig: &Rig) -> Vec<Status> {
    rig.ended.iter().map(|(_, status)| *status).collect()
}

/// Waits until the controller is live for the second time.
fn reset(rig: &mut Rig) {
    rig.run(|rig| rig.host.state() == ControllerState::Live && rig.fake.borrow().enables == 2, 100 * S);
}

/// Waits until this number of late commands were judged.
fn judged(rig: &mut Rig, count: usize) {
    rig.run(|rig| rig.actions.len() >= count, 200 * S);
}

#[test]
fn a_late_command_is_aborted_and_then_the_controller_reset() {
    let mut rig = slow(1, |fake| {
        // Aborts have no effect.
        fake.ignored.insert(admin::ABORT, 0);
    });
    rig.submit(1, 0, Op::Write, 3).unwrap();
    let start_ns = rig.now_ns;
    judged(&mut rig, 1);
    assert_eq!(rig.actions, [LateAction::Abort]);
    assert_eq!((rig.now_ns - start_ns) / S, 30);
    judged(&mut rig, 2);
    assert_eq!(rig.actions, [LateAction::Abort, LateAction::Reset]);
    reset(&mut rig);
    prompt(&rig);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Ok], "sent again");
    assert_eq!(rig.fake.borrow().enables, 2);
    assert_eq!(rig.host.state(), ControllerState::Live);
}

#[test]
fn an_abort_that_works_is_all_there_is() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 3).unwrap();
    judged(&mut rig, 1);
    prompt(&rig);
    rig.finish();
    assert_eq!((statuses(&rig), rig.fake.borrow().enables), (vec![Status::Ok], 1), "retried, no reset");
}

#[test]
fn the_abort_budget_is_kept() {
    let mut rig = slow(1, |fake| {
        fake.identify.abort_limit = 1;
        fake.ignored.insert(admin::ABORT, 0);
    });
    for block in 0..4 {
        rig.submit(1, 0, Op::Write, block).unwrap();
    }
    judged(&mut rig, 4);
    rig.round();
    rig.actions.sort_by_key(|action| format!("{action:?}"));
    assert_eq!(rig.actions, [LateAction::Abort, LateAction::Abort, LateAction::MoreTime, LateAction::MoreTime]);
    assert_eq!(rig.fake.borrow().count(admin::ABORT), 2);
    prompt(&rig);
    rig.finish();
}

#[test]
fn the_budget_comes_back_with_each_abort() {
    let mut rig = slow(1, |fake| fake.identify.abort_limit = 0);
    for round in 0..3 {
        rig.actions.clear();
        rig.submit(1, 0, Op::Write, round).unwrap();
        judged(&mut rig, 1);
        assert_eq!(rig.actions, [LateAction::Abort]);
        prompt(&rig);
        rig.finish();
        rig.fake.borrow_mut().is_prompt = false;
    }
    assert_eq!((rig.fake.borrow().count(admin::ABORT), rig.fake.borrow().enables), (3, 1));
}

#[test]
fn a_fatal_status_resets_at_the_first_late_command() {
    let mut rig = slow(1, |fake| fake.can_reset_function = true);
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    rig.fake.borrow_mut().fatal = true;
    judged(&mut rig, 1);
    assert_eq!(rig.actions, [LateAction::Reset]);
    rig.fake.borrow_mut().fatal = false;
    prompt(&rig);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Ok]);
    assert_eq!(rig.fake.borrow().count(admin::DELETE_SQ), 0, "a failed controller is asked for nothing");
}

#[test]
fn a_subsystem_reset_resets_the_controller_once() {
    for (is_supported, resets) in [(true, 1), (false, 0)] {
        let mut rig = slow(1, |fake| fake.cap.subsystem_reset = is_supported);
        rig.fake.borrow_mut().subsystem_reset = true;
        for _ in 0..3 {
            rig.host.check(rig.now_ns);
            rig.run(|rig| rig.host.state() == ControllerState::Live, 100 * S);
        }
        assert_eq!(rig.fake.borrow().enables, 1 + resets, "supported: {is_supported}");
    }
}

#[test]
fn controller_that_another_has_disabled_is_reset() {
    let mut rig = slow(1, |fake| fake.can_reset_function = true);
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    rig.fake.borrow_mut().reset_function();
    for _ in 0..3 {
        rig.host.check(rig.now_ns);
        // No command that would not be answered delays the reset.
        rig.run(|rig| rig.host.state() == ControllerState::Live, S);
    }
    assert_eq!(rig.fake.borrow().enables, 2);
    rig.run(|rig| rig.fake.borrow().pending.len() == 1, S);
    prompt(&rig);
    rig.finish();
    assert!(statuses(&rig).iter().all(|status| status.is_ok()));
}

#[test]
fn a_reset_deletes_disables_and_sends_again_in_order() {
    let mut rig = slow(2, |_| ());
    for block in 0..10 {
        rig.submit(1, 0, Op::Write, block).unwrap();
    }
    rig.round();
    rig.fake.borrow_mut().log.clear();
    assert!(rig.host.reset(rig.now_ns));
    assert!(!rig.host.reset(rig.now_ns), "one at a time");
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    let deletes: Vec<_> = {
        let fake = rig.fake.borrow();
        fake.log.iter().map(blkyard_nvme::Sqe::opcode).take_while(|code| *code != admin::IDENTIFY).collect()
    };
    let (sq, cq) = (admin::DELETE_SQ, admin::DELETE_CQ);
    assert_eq!(deletes, [sq, sq, cq, cq]);
    rig.run(|rig| rig.fake.borrow().pending.len() == 10, S);
    let again: Vec<u64> = rig.fake.borrow().pending.iter().map(|io| io.sqe.slba() / 8).collect();
    assert_eq!(again, (0..10).collect::<Vec<_>>());
    prompt(&rig);
    rig.finish();
    assert!(statuses(&rig).iter().all(|status| status.is_ok()));
}

#[test]
fn buffers_stay_lent_until_the_controller_is_silent() {
    let mut rig = slow(1, |_| ());
    for block in 0..10 {
        rig.submit(1, 0, Op::Read, block).unwrap();
    }
    for _ in 0..RETRIES_MAX {
        rig.run(|rig| rig.fake.borrow().pending.len() == 10, S);
        rig.now_ns += 7 * S;
        rig.host.reset(rig.now_ns);
        rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    }
    rig.now_ns += 7 * S;
    // One more reset after so long: requests end as soon as they are cancelled.
    rig.run(|rig| rig.fake.borrow().pending.len() == 10, S);
    let pending = rig.fake.borrow().pending.clone();
    rig.fake.borrow_mut().idle_delay_ns = 3 * S;
    rig.host.reset(rig.now_ns);
    let mut transfers = 0;
    while rig.ended.is_empty() {
        rig.round();
        // Until it is idle it may transfer data, although its queues are deleted.
        let mut fake = rig.fake.borrow_mut();
        if !fake.is_silent() {
            pending.iter().for_each(|io| assert!(fake.transfer(&io.sqe).is_success()));
            transfers += 1;
        }
        drop(fake);
        rig.pass();
    }
    rig.check();
    assert!(transfers > 1000, "it was looked at all the time");
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Io; 10]);
}

#[test]
fn admin_memory_stays_until_the_controller_is_silent() {
    // The memory of the test is two regions, the admin queue another.
    let mapped = |rig: &mut Rig| (rig.host.transport().dma_domain().regions().len(), rig.fake.borrow().is_silent());
    let mut rig = Rig::new(FakeTransport::new(), config(1));
    rig.host.start(rig.now_ns);
    rig.advance_host();
    // It becomes ready, and is removed before its host has noticed.
    rig.now_ns += S;
    rig.turn_fake();
    assert_eq!(mapped(&mut rig), (3, false));
    (rig.fake.borrow_mut().never_idle, rig.fake.borrow_mut().never_shut_down) = (true, true);
    rig.host.remove(rig.now_ns);
    for _ in 0..5 {
        rig.round();
        assert_eq!(mapped(&mut rig), (3, false));
        rig.pass();
    }
    rig.fake.borrow_mut().never_idle = false;
    rig.run(|rig| !rig.host.is_busy(), 100 * S);
    assert_eq!(mapped(&mut rig), (2, true));
}

#[test]
fn a_removal_does_not_wait_for_a_controller_that_is_gone() {
    for is_fatal in [false, true] {
        let mut rig = slow(1, |_| ());
        rig.submit(1, 0, Op::Read, 0).unwrap();
        rig.round();
        // Requests in flight have 30 s to end.
        rig.host.remove(rig.now_ns);
        rig.round();
        let start_ns = rig.now_ns;
        rig.fake.borrow_mut().gone = !is_fatal;
        rig.fake.borrow_mut().fatal = is_fatal;
        rig.host.check(rig.now_ns);
        rig.run(|rig| !rig.host.is_busy(), 100 * S);
        rig.finish();
        assert!(rig.now_ns - start_ns < S, "{} ns, fatal: {is_fatal}", rig.now_ns - start_ns);
        assert_eq!((statuses(&rig), rig.host.state()), (vec![Status::Offline], ControllerState::DeletingNoIo));
    }
}

#[test]
fn a_controller_that_cannot_be_disabled_keeps_its_requests() {
    let mut rig = slow(1, |fake| fake.never_idle = true);
    rig.submit(1, 0, Op::Read, 0).unwrap();
    rig.round();
    let pending = rig.fake.borrow().pending.clone();
    rig.host.reset(rig.now_ns);
    rig.run(|rig| rig.host.error().is_some(), 100 * S);
    assert_eq!(rig.host.error(), Some(NvmeHostError::NotIdle(5500)));
    let until_ns = rig.now_ns + 600 * S;
    while rig.now_ns < until_ns {
        rig.round();
        assert!(rig.fake.borrow_mut().transfer(&pending[0].sqe).is_success());
        rig.pass();
    }
    assert_eq!((statuses(&rig), rig.host.state()), (vec![], ControllerState::Deleting));
    rig.check();
    // At last it is unplugged.
    rig.fake.borrow_mut().gone = true;
    rig.run(|rig| rig.host.state() == ControllerState::Dead, 10 * S);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Offline]);
}

#[test]
fn retries_wait_as_long_as_the_controller_asks() {
    let mut rig = slow(1, |fake| fake.identify.retry_delay_2 = 7);
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    let start_ns = rig.now_ns;
    rig.fake.borrow_mut().complete(0, NvmeStatus(NvmeStatus::COMMAND_INTERRUPTED.0 | 2 << 11));
    rig.run(|rig| !rig.fake.borrow().pending.is_empty(), 10 * S);
    assert_eq!((rig.now_ns - start_ns) / MS, 700);
    prompt(&rig);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Ok]);
}

/// Resets the controller with a request in flight.
fn reset_in_flight(rig: &mut Rig) {
    rig.run(|rig| !rig.fake.borrow().pending.is_empty(), S);
    rig.host.reset(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
}

#[test]
fn resets_in_a_row_fail_no_request() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    for _ in 0..300 {
        reset_in_flight(&mut rig);
    }
    // Nor did they take a retry from it.
    for _ in 0..RETRIES_MAX {
        rig.run(|rig| !rig.fake.borrow().pending.is_empty(), S);
        rig.fake.borrow_mut().complete(0, NvmeStatus::INTERNAL);
        rig.round();
    }
    prompt(&rig);
    rig.finish();
    assert_eq!((statuses(&rig), rig.fake.borrow().enables), (vec![Status::Ok], 301));
}

#[test]
fn a_request_without_an_end_fails_by_many_resets_over_long() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    let mut resets = 0;
    while rig.ended.is_empty() {
        reset_in_flight(&mut rig);
        resets += 1;
        // In time: no command is late.
        rig.now_ns += 4 * S;
    }
    assert_eq!((statuses(&rig), resets, rig.actions.len()), (vec![Status::Io], 9, 0), "the first, and 32 s later");
}

#[test]
fn a_command_that_is_late_each_time_fails_and_no_other() {
    let mut rig = slow(1, |fake| {
        fake.ignored.insert(admin::ABORT, 0);
    });
    let stuck = rig.submit(1, 0, Op::Write, 0).unwrap();
    let mut others = 0;
    while !rig.ended.iter().any(|(cookie, _)| *cookie == stuck) {
        // The others take a second.
        let due = rig.now_ns + S;
        rig.run(|rig| rig.now_ns >= due, 10 * S);
        let number = rig.fake.borrow().pending.iter().position(|io| io.sqe.slba() > 0);
        if let Some(number) = number {
            rig.fake.borrow_mut().complete(number, NvmeStatus::SUCCESS);
        }
        // Refused while the last one is in flight.
        others += usize::from(rig.submit(1, 0, Op::Write, 1).is_some());
        assert!(rig.now_ns < 1000 * S, "it does not end");
    }
    let resets = rig.actions.iter().filter(|action| **action == LateAction::Reset).count();
    assert_eq!(resets, usize::from(RETRIES_MAX) + 1);
    prompt(&rig);
    rig.finish();
    let failed: Vec<_> = rig.ended.iter().filter(|(_, status)| !status.is_ok()).collect();
    assert_eq!(failed, [&(stuck, Status::Io)]);
    assert!(others > 100, "{others}");
}

#[test]
fn race_completion_between_timeout_and_abort() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    rig.now_ns += 31 * S;
    rig.turn_queue(1);
    assert_eq!(rig.late.len(), 1);
    rig.fake.borrow_mut().complete(0, NvmeStatus::SUCCESS);
    rig.turn_queue(1);
    assert_eq!(statuses(&rig), [Status::Ok]);
    // The same slot is reused.
    rig.submit(1, 0, Op::Write, 1).unwrap();
    rig.turn_queue(1);
    rig.deliver_late(0);
    assert_eq!(rig.actions, [LateAction::Abort], "the controller's owner cannot know");
    for _ in 0..6 {
        rig.round();
    }
    assert_eq!(rig.fake.borrow().pending.len(), 1, "the cid is of another generation: nothing was aborted");
    prompt(&rig);
    rig.finish();
    assert_eq!((statuses(&rig), rig.fake.borrow().enables), (vec![Status::Ok; 2], 1));
}

#[test]
fn race_abort_completes_after_the_command() {
    let mut rig = slow(1, |fake| {
        fake.identify.abort_limit = 0;
        fake.ignored.insert(admin::ABORT, 0);
    });
    rig.submit(1, 0, Op::Write, 0).unwrap();
    judged(&mut rig, 1);
    rig.round();
    rig.fake.borrow_mut().complete(0, NvmeStatus::SUCCESS);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Ok]);
    let token = rig.fake.borrow().ignored_tokens[0];
    rig.fake.borrow_mut().answer(token, NvmeStatus::SUCCESS, 1);
    rig.fake.borrow_mut().ignored.clear();
    rig.round();
    // The abort budget is restored.
    rig.submit(1, 0, Op::Write, 1).unwrap();
    judged(&mut rig, 2);
    assert_eq!(rig.actions, [LateAction::Abort; 2]);
    prompt(&rig);
    rig.finish();
}

#[test]
fn race_two_queues_time_out_at_once() {
    let mut rig = slow(2, |fake| {
        fake.ignored.insert(admin::ABORT, 0);
    });
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.submit(2, 0, Op::Write, 1).unwrap();
    judged(&mut rig, 4);
    assert_eq!(rig.actions, [LateAction::Abort, LateAction::Abort, LateAction::Reset, LateAction::MoreTime]);
    reset(&mut rig);
    prompt(&rig);
    rig.finish();
    assert_eq!((rig.fake.borrow().enables, statuses(&rig)), (2, vec![Status::Ok; 2]), "one reset");
}

#[test]
fn race_timeout_during_reset() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    rig.now_ns += 31 * S;
    rig.turn_queue(1);
    let late = rig.late[0];
    rig.host.reset(rig.now_ns);
    rig.deliver_late(0);
    assert_eq!(rig.actions, [LateAction::MoreTime]);
    rig.run(|rig| rig.host.state() == ControllerState::Connecting, 10 * S);
    rig.late.push(late);
    rig.deliver_late(0);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    rig.late.push(late);
    rig.deliver_late(0);
    assert_eq!(rig.actions[1..], [LateAction::Nothing; 2], "of before the reset");
    prompt(&rig);
    rig.finish();
    assert_eq!((rig.fake.borrow().enables, statuses(&rig)), (2, vec![Status::Ok]));
    assert_eq!(rig.fake.borrow().count(admin::ABORT), 0);
}

#[test]
fn race_admin_timeout_during_reset() {
    // The controller stops responding in each phase: a teardown ends, and a bring-up that hangs kills the controller.
    for (opcode, state) in [
        (admin::DELETE_SQ, ControllerState::Live),
        (admin::DELETE_CQ, ControllerState::Live),
        (admin::IDENTIFY, ControllerState::Dead),
        (admin::CREATE_SQ, ControllerState::Dead),
    ] {
        let mut rig = slow(2, |_| ());
        rig.submit(1, 0, Op::Write, 0).unwrap();
        rig.round();
        rig.fake.borrow_mut().ignored.insert(opcode, 0);
        rig.host.reset(rig.now_ns);
        rig.run(|rig| rig.host.state() == state, 300 * S);
        prompt(&rig);
        rig.finish();
        let want = if state == ControllerState::Live { Status::Ok } else { Status::Offline };
        assert_eq!(statuses(&rig), [want], "{opcode:#x}");
    }
}

#[test]
fn race_unplug_during_reset() {
    // Unplugged after this number of rounds of the reset.
    for rounds in 0..40 {
        let mut rig = slow(2, |_| ());
        rig.submit(1, 0, Op::Write, 0).unwrap();
        rig.round();
        rig.host.reset(rig.now_ns);
        for _ in 0..rounds {
            rig.round();
            rig.pass();
        }
        rig.fake.borrow_mut().gone = true;
        rig.host.check(rig.now_ns);
        rig.run(|rig| rig.host.state() == ControllerState::Dead, 300 * S);
        rig.finish();
        assert_eq!(statuses(&rig), [Status::Offline], "after {rounds} rounds");
        assert!(matches!(rig.host.error(), Some(NvmeHostError::Gone(_))));
    }
}

#[test]
fn race_unplug_under_load() {
    let mut rig = slow(2, |_| ());
    for block in 0..20 {
        rig.submit(1 + block as u16 % 2, 0, Op::Write, block).unwrap();
    }
    rig.round();
    rig.fake.borrow_mut().gone = true;
    // Without a hot-unplug event, the first late command detects it.
    rig.run(|rig| rig.host.state() == ControllerState::Dead, 300 * S);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Offline; 20]);
    assert_eq!(rig.submit(1, 0, Op::Read, 0), Some(21), "new requests fail as well");
    rig.finish();
    assert_eq!(rig.ended.last().unwrap().1, Status::Offline);
}

#[test]
fn a_controller_that_hangs_keeps_its_requests_until_its_process_ends() {
    let mut rig = slow(2, |_| ());
    for block in 0..10 {
        rig.submit(1 + block as u16 % 2, 0, Op::Read, block).unwrap();
    }
    rig.round();
    let pending = rig.fake.borrow().pending.clone();
    (rig.fake.borrow_mut().gone, rig.fake.borrow_mut().lingers) = (true, true);
    rig.host.check(rig.now_ns);
    let until_ns = rig.now_ns + 600 * S;
    while rig.now_ns < until_ns {
        rig.round();
        pending.iter().for_each(|io| assert!(rig.fake.borrow_mut().transfer(&io.sqe).is_success()));
        rig.pass();
    }
    rig.check();
    assert_eq!((rig.ended.len(), rig.host.state()), (0, ControllerState::Deleting));
    assert_eq!(rig.events.last(), Some(&HostEvent::Failed(blkyard_nvme::DeviceGone.into())), "told once");
    rig.fake.borrow_mut().lingers = false;
    rig.run(|rig| rig.host.state() == ControllerState::Dead, 10 * S);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Offline; 10]);
}

#[test]
fn race_completion_of_an_earlier_generation_after_a_reset() {
    let mut rig = slow(1, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    let cid = rig.fake.borrow().pending[0].sqe.cid();
    rig.host.reset(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    rig.run(|rig| !rig.fake.borrow().pending.is_empty(), S);
    let again = rig.fake.borrow().pending[0].sqe.cid();
    assert_eq!(again & 0xfff, cid & 0xfff, "the same slot");
    assert_ne!(again, cid);
    rig.fake.borrow_mut().complete_as(0, cid);
    rig.turn_queue(1);
    assert_eq!(rig.ended, [], "a late completion is refused");
    let faults = rig.queues.get_mut(&1).unwrap().driver_mut().queue.pair().faults().total();
    assert_eq!(faults, 1);
    // It has replaced a valid completion: the request is late, and is resubmitted by a reset.
    rig.host.reset(rig.now_ns);
    prompt(&rig);
    rig.finish();
}

#[test]
fn race_queue_count_changes_under_load() {
    let mut rig = slow(4, |fake| {
        fake.is_prompt = true;
        fake.namespaces.insert(2, namespace(1 << 16, 9));
    });
    let mut block = 0;
    for grant in [Some(4), Some(1), None, Some(4), Some(2), None, Some(4)] {
        rig.fake.borrow_mut().grant = grant;
        rig.host.reset(rig.now_ns);
        for _ in 0..50 {
            for qid in 1..=4 {
                block += 1;
                rig.submit(qid, block as u16 % 2, if block % 3 == 0 { Op::Read } else { Op::Write }, block % 64);
            }
            rig.round();
            rig.pass();
        }
        rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
        assert_eq!(rig.fake.borrow().queue_count(), usize::from(grant.unwrap_or(0)));
        if grant.is_none() {
            rig.finish();
            let last = rig.submit(1, 0, Op::Read, 100).unwrap();
            rig.finish();
            assert_eq!(rig.ended.last(), Some(&(last, Status::Offline)), "without queues there is no I/O");
        }
    }
    rig.finish();
    assert_eq!(rig.queues.len(), 4);
    let start = rig.ended.len();
    for qid in 1..=4 {
        rig.submit(qid, 0, Op::Write, u64::from(qid)).unwrap();
    }
    rig.finish();
    assert!(rig.ended[start..].iter().all(|(_, status)| status.is_ok()));
}

#[test]
fn a_removed_controller_is_shut_down() {
    let mut rig = slow(2, |_| ());
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.round();
    rig.host.remove(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::DeletingNoIo, 100 * S);
    rig.finish();
    assert_eq!((statuses(&rig), rig.fake.borrow().shutdowns), (vec![Status::Offline], 1));
    assert_eq!((rig.host.error(), rig.events.last()), (None, Some(&HostEvent::Over)));
}

#[test]
fn what_is_in_flight_may_end_before_a_removal() {
    let mut rig = slow(1, |_| ());
    for block in 0..3 {
        rig.submit(1, 0, Op::Write, block).unwrap();
    }
    rig.round();
    rig.host.remove(rig.now_ns);
    rig.round();
    rig.submit(1, 0, Op::Write, 9).unwrap();
    for _ in 0..3 {
        rig.now_ns += 5 * S;
        rig.round();
        assert_eq!(rig.fake.borrow().pending.len(), 3, "nothing is sent any more");
    }
    prompt(&rig);
    rig.finish();
    assert_eq!(statuses(&rig), [Status::Ok, Status::Ok, Status::Ok, Status::Offline]);
    rig.run(|rig| rig.host.state() == ControllerState::DeletingNoIo, S);
}

#[test]
fn a_suspended_controller_goes_on_where_it_was() {
    // Requests complete within the time limit, or they are resubmitted.
    for is_slow in [false, true] {
        let mut rig = slow(2, |_| ());
        for round in 0..8 {
            rig.submit(1, 0, Op::Write, round).unwrap();
            rig.round();
            rig.host.suspend(rig.now_ns);
            rig.submit(2, 0, Op::Write, 100 + round).unwrap();
            rig.round();
            assert!(!rig.host.is_suspended(), "a request is in flight");
            if !is_slow {
                prompt(&rig);
            }
            let before_ns = rig.now_ns;
            rig.run(|rig| rig.host.is_suspended(), 100 * S);
            let waited_s = (rig.now_ns - before_ns) / S;
            assert!(if is_slow { (30..35).contains(&waited_s) } else { waited_s < 2 }, "{waited_s} s");
            assert_eq!(rig.fake.borrow().shutdowns, round as u32 + 1);
            // Suspended for hours.
            for _ in 0..100 {
                rig.now_ns += 100 * S;
                rig.round();
            }
            assert_eq!(rig.ended.len(), if is_slow { 2 * round as usize } else { 2 * round as usize + 1 });
            rig.host.resume(rig.now_ns);
            rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
            prompt(&rig);
            rig.finish();
            rig.fake.borrow_mut().is_prompt = false;
        }
        assert_eq!(statuses(&rig), [Status::Ok; 16]);
        assert_eq!(rig.fake.borrow().count(admin::ABORT), 0);
    }
}

#[test]
fn a_suspended_controller_can_be_removed_or_unplugged() {
    for is_unplugged in [false, true] {
        let mut rig = slow(1, |_| ());
        rig.host.suspend(rig.now_ns);
        rig.submit(1, 0, Op::Write, 1).unwrap();
        rig.run(|rig| rig.host.is_suspended(), 10 * S);
        assert_eq!(rig.events.last(), Some(&HostEvent::Suspended));
        if is_unplugged {
            rig.fake.borrow_mut().gone = true;
            rig.host.check(rig.now_ns);
        } else {
            rig.host.remove(rig.now_ns);
        }
        rig.finish();
        assert_eq!((statuses(&rig), rig.events.last()), (vec![Status::Offline], Some(&HostEvent::Over)));
    }
}

#[test]
fn a_controller_on_its_way_is_suspended_or_resumed_on_the_way() {
    let mut rig = slow(1, |_| ());
    rig.host.reset(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::Connecting, 10 * S);
    rig.host.suspend(rig.now_ns);
    rig.run(|rig| rig.host.is_suspended(), 10 * S);
    rig.host.resume(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    rig.host.suspend(rig.now_ns);
    rig.round();
    rig.host.resume(rig.now_ns);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    assert_eq!(rig.events.iter().filter(|event| **event == HostEvent::Suspended).count(), 1);
}

#[test]
fn a_persistent_internal_error_resets_the_controller() {
    let mut rig = slow(1, |_| ());
    rig.round();
    assert!(rig.fake.borrow_mut().event(3 << 8));
    rig.run(|rig| rig.host.state() == ControllerState::Resetting, S);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
    assert_eq!(rig.fake.borrow().enables, 2);
}

#[test]
fn commands_are_told_in_their_order() {
    let mut rig = slow(1, |_| ());
    rig.round();
    rig.host.reset(rig.now_ns);
    rig.advance_host();
    assert_eq!(rig.commands, [(1, IoQueueCommand::Stop)]);
    // A queue without an answer is awaited, since it may still send commands.
    for _ in 0..50 {
        rig.turn_fake();
        rig.advance_host();
        rig.pass();
    }
    assert_eq!((rig.commands.len(), rig.fake.borrow().count(admin::DELETE_SQ)), (1, 0));
    rig.run(|rig| rig.host.state() == ControllerState::Live, 10 * S);
}
