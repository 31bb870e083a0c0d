//! Cross-controller reset at the controller that is asked: statuses, results, the log page and the notice.

use blkyard_nvme::{
    CROSS_RESET_LOG, Controller, ControllerInstance, CrossResetEntry, CrossResetState, FabricsSubsystem,
    IdentifyController, NvmeStatus, Psdt, Sqe, admin, cns, feature,
};

use crate::subsystem::{FIRST_ID, HOST, admin_id, associated, connect, enable, run};

const MS: u64 = 1_000_000;

fn other(number: u16) -> ControllerInstance {
    ControllerInstance { id: 40_000 + number, uniquifier: 7, random: 9 }
}

fn controller(target: &mut FabricsSubsystem, id: u16) -> &mut Controller {
    &mut target.association(id).unwrap().controller
}

/// Submits the command in a slot.
fn ask(controller: &mut Controller, slot: u16, instance: ControllerInstance, now_ns: u64) {
    let sqe = instance.reset_command().with_cid(slot).with_data(Psdt::Sgl, [0, 0]);
    controller.submit(slot, &sqe, Vec::new(), 0, now_ns);
}

/// Slot, status and result of the next completion.
fn answer(controller: &mut Controller) -> Option<(u16, NvmeStatus, u64)> {
    controller.take_completion().map(|done| (done.slot, done.status, done.result))
}

fn log(controller: &mut Controller, lsp: u8) -> Vec<CrossResetEntry> {
    let page = run(controller, Sqe::get_log_page(CROSS_RESET_LOG, 0, lsp, 1024, 0), 4096);
    CrossResetEntry::parse(&page.data.try_into().unwrap())
}

#[test]
fn each_association_is_a_new_instance() {
    let (mut target, first) = associated();
    let second = admin_id(connect(&mut target, HOST, 0xffff));
    let mut seen = vec![];
    for id in [first, second] {
        enable(controller(&mut target, id));
        let page = run(controller(&mut target, id), Sqe::identify(cns::CONTROLLER, 0, 0, 0), 4096);
        let identify = IdentifyController::parse(&page.data.try_into().unwrap());
        assert_eq!((identify.cross_resets, identify.quiesce_ms), (4, 5000));
        assert_ne!(identify.async_events & 1 << 20, 0);
        let instance = ControllerInstance::of(&identify).unwrap();
        assert_eq!(Some(instance), controller(&mut target, id).instance());
        seen.push(instance);
    }
    target.remove(first);
    assert_eq!(admin_id(connect(&mut target, HOST, first)), first);
    seen.push(controller(&mut target, first).instance().unwrap());
    assert_eq!((seen[0].id, seen[2].id), (FIRST_ID, FIRST_ID));
    assert!(seen[0].random != seen[1].random && seen[0].random != seen[2].random && seen[0] != seen[2]);
}

#[test]
fn a_wrong_command_has_its_status_and_resets_nothing() {
    let (mut target, id) = associated();
    let controller = controller(&mut target, id);
    let own = controller.instance().unwrap();
    let no_uniquifier = ControllerInstance { uniquifier: 0, ..other(1) };
    let no_random = ControllerInstance { random: 0, ..other(1) };
    for wrong in [own, ControllerInstance { random: 1, ..own }, no_uniquifier, no_random] {
        ask(controller, 3, wrong, 0);
        let status = NvmeStatus::INVALID_FIELD.with_dnr().with_more();
        assert_eq!(answer(controller), Some((3, status, 0)), "{wrong:?}");
    }
    assert_eq!(controller.take_cross_reset(), None);
    // Four at the same time, each controller once.
    for number in 0..4 {
        ask(controller, 10 + number, other(number), 0);
        assert_eq!((answer(controller), controller.take_cross_reset()), (None, Some(other(number))));
    }
    ask(controller, 20, other(2), 0);
    assert_eq!(answer(controller), Some((20, NvmeStatus::CROSS_RESET_RUNNING.with_more(), 0)));
    ask(controller, 21, other(9), 0);
    assert_eq!(answer(controller), Some((21, NvmeStatus::CROSS_RESET_LIMIT.with_more(), 0)));
    assert_eq!(controller.take_cross_reset(), None);
}

#[test]
fn a_fast_reset_is_answered_by_its_command() {
    let (mut target, id) = associated();
    let controller = controller(&mut target, id);
    for (outcome, status, result) in [
        (Ok(()), NvmeStatus::SUCCESS, 1),
        (Err(NvmeStatus::INVALID_FIELD.with_dnr()), NvmeStatus::INVALID_FIELD.with_dnr(), 0),
    ] {
        ask(controller, 5, other(1), 0);
        controller.poll(19 * MS);
        assert_eq!(answer(controller), None);
        controller.other_reset(other(2), outcome);
        assert_eq!(answer(controller), None, "another one");
        controller.other_reset(other(1), outcome);
        assert_eq!(answer(controller), Some((5, status, result)));
        assert_eq!(log(controller, 0), []);
    }
    // An answer that nobody waits for any more.
    controller.other_reset(other(1), Ok(()));
    assert_eq!((answer(controller), log(controller, 0)), (None, vec![]));
}

#[test]
fn a_slow_reset_is_told_by_log_and_notice() {
    for (outcome, state) in [(Ok(()), CrossResetState::Succeeded), (Err(NvmeStatus::INTERNAL), CrossResetState::Failed)]
    {
        let (mut target, id) = associated();
        let controller = controller(&mut target, id);
        let enabled = Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 20);
        assert!(run(controller, enabled, 0).status.is_success());
        controller.submit(8, &Sqe::new(admin::ASYNC_EVENT, 0).with_cid(100), Vec::new(), 0, 0);
        ask(controller, 5, other(1), 0);
        assert_eq!(controller.deadline_ns(), Some(20 * MS));
        controller.poll(20 * MS);
        assert_eq!(answer(controller), Some((5, NvmeStatus::SUCCESS, 0)), "in progress");
        assert_eq!(controller.deadline_ns(), Some(5000 * MS), "the keep-alive timer is left");
        let entry = |state| CrossResetEntry { id: other(1).id, uniquifier: 7, asked: id, state };
        assert_eq!(log(controller, 1), [entry(CrossResetState::Running)]);
        controller.other_reset(other(1), outcome);
        controller.poll(21 * MS);
        assert_eq!(answer(controller), Some((8, NvmeStatus::SUCCESS, 2 | 0xf4 << 8 | 0x1e << 16)));
        assert_eq!(log(controller, 0), [entry(state)], "kept");
        assert_eq!(log(controller, 1), [entry(state)], "removed by this read");
        assert_eq!(log(controller, 0), []);
    }
}

#[test]
fn unread_resets_fill_the_log_and_no_more() {
    let (mut target, id) = associated();
    let controller = controller(&mut target, id);
    for number in 0..511 {
        ask(controller, 5, other(number), 0);
        assert_eq!(controller.take_cross_reset(), Some(other(number)));
        controller.poll(20 * MS);
        controller.other_reset(other(number), Ok(()));
        assert_eq!(answer(controller), Some((5, NvmeStatus::SUCCESS, 0)));
    }
    ask(controller, 5, other(600), 0);
    assert_eq!(answer(controller), Some((5, NvmeStatus::CROSS_RESET_LOG_FULL.with_more(), 0)));
    assert_eq!(log(controller, 1).len(), 511);
    ask(controller, 5, other(600), 0);
    assert_eq!(controller.take_cross_reset(), Some(other(600)));
}
