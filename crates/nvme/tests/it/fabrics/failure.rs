//! Lost connections, hung targets and refusals: error recovery, its timers, and fencing.

use blkyard_mq::{Cancellations, FenceEvidence, Op, PathGeneration, Status, TakenBio};
use blkyard_nvme::fabrics::{DISCOVERY_NQN, Nqn, fabrics_status};
use blkyard_nvme::{
    ControllerState, DiscoveryLog, FabricsHostError, FabricsHostEvent, FabricsIoQueue, FabricsQueueCommand,
    FabricsQueueReport, NvmeStatus,
};

use crate::fabrics::rig::{MS, Rig, config};

/// Submits a bio, and runs until the target has its command, which is not executed.
fn at_target(rig: &mut Rig, qid: u16, op: Op, block: u64, value: u8) {
    let had = rig.target.arrived.len();
    rig.submit(qid, op, block, value);
    for _ in 0..20 {
        rig.round();
    }
    assert_eq!(rig.target.arrived.len(), had + 1);
}

fn is_lost(event: &FabricsHostEvent) -> bool {
    matches!(event, FabricsHostEvent::Lost(_))
}

#[test]
fn requests_of_a_lost_association_are_sent_again_in_order() {
    let mut rig = Rig::live(config(), 1);
    for block in [5, 3, 9] {
        at_target(&mut rig, 1, Op::Write, block, block as u8);
    }
    rig.cut();
    rig.run_until(|rig| rig.ended.len() == 3);
    let blocks: Vec<u64> = rig.ended.iter().map(|(block, ..)| *block).collect();
    assert_eq!(blocks, [5, 3, 9]);
    assert_eq!(rig.statuses(), [Status::Ok; 3]);
    assert_eq!((rig.count(is_lost), rig.host.state()), (1, ControllerState::Live));
}

#[test]
fn an_unanswered_write_waits_for_the_fence_and_nothing_else_does() {
    for is_static in [true, false] {
        let mut rig = Rig::live(config(), 2);
        rig.target.behaviour.is_static = is_static;
        at_target(&mut rig, 1, Op::Write, 5, 7);
        at_target(&mut rig, 2, Op::Read, 6, 0);
        let lost_ns = rig.now_ns;
        // The target does not learn of it.
        let (association, _) = rig.admin.unwrap();
        rig.host.admin_lost(association, rig.now_ns);
        rig.control();
        // What the target still executes is not answered any more.
        rig.target.arrived.clear();
        rig.run_until(|rig| !rig.ended.is_empty());
        if !is_static {
            assert_eq!(rig.ended[0], (6, Op::Read, Status::Ok), "a read waits for no fence");
            assert!(rig.now_ns - lost_ns < 1000 * MS);
        }
        rig.run_until(|rig| rig.ended.len() == 2);
        let took_ms = (rig.now_ns - lost_ns) / MS;
        let evidence = if is_static { FenceEvidence::AssociationEnded } else { FenceEvidence::QuiesceElapsed };
        assert_eq!(rig.count(|event| *event == FabricsHostEvent::Fenced(1, evidence)), 1);
        assert!(if is_static { took_ms < 1000 } else { (10_000..11_000).contains(&took_ms) }, "{took_ms} ms");
        assert_eq!(rig.statuses(), [Status::Ok; 2]);
    }
}

#[test]
fn without_io_there_is_nothing_to_fence() {
    let mut rig = Rig::live(config(), 0);
    rig.cut();
    rig.run_until(|rig| rig.host.association() == 2 && rig.host.state() == ControllerState::Live);
    assert_eq!(rig.host.fenced_through(), 1);
}

#[test]
fn a_hung_queue_or_admin_queue_begins_error_recovery() {
    for queue in [0, 1] {
        let mut rig = Rig::live(config(), 1);
        let hangs = rig.target.connections.iter().position(|connection| connection.qid == queue).unwrap();
        rig.target.connections[hangs].hangs = true;
        let start_ns = rig.now_ns;
        rig.submit(1, Op::Write, 1, 1);
        rig.run_until(|rig| rig.count(is_lost) == 1);
        let took_ms = (rig.now_ns - start_ns) / MS;
        // Half of the keep-alive timeout, and the timeout; or that of I/O commands, with the scan's slack.
        let want = if queue == 0 { 5000..7700 } else { 30_000..32_000 };
        assert!(want.contains(&took_ms), "queue {queue}: {took_ms} ms");
        rig.run_until(|rig| rig.ended.len() == 1 && rig.host.state() == ControllerState::Live);
        assert_eq!(rig.statuses(), [Status::Ok]);
        let late = FabricsQueueReport::Late;
        assert_eq!(rig.lanes[0].reports.contains(&late), queue == 1);
    }
}

/// Writes block 0, which the target never executes, and other blocks meanwhile. Returns their number, once the write
/// has ended or the association was lost so often.
fn write_late_each_time(rig: &mut Rig, losses: usize) -> usize {
    rig.submit(1, Op::Write, 0, 1);
    let mut others = 0;
    while !rig.ended.iter().any(|(block, ..)| *block == 0) && rig.count(is_lost) < losses {
        if rig.ended.len() == others {
            rig.submit(1, Op::Write, 2, 1);
            others += 1;
        }
        for _ in 0..10 {
            rig.now_ns += 20 * MS;
            rig.round();
        }
        while let Some(at) = rig.target.arrived.iter().position(|arrived| arrived.sqe.slba() > 0) {
            rig.target.execute(at);
        }
    }
    others
}

#[test]
fn a_command_that_is_late_each_time_fails_and_no_other() {
    let mut rig = Rig::live(config(), 1);
    let others = write_late_each_time(&mut rig, 100);
    assert_eq!(rig.count(is_lost), usize::from(Cancellations::MAX) + 1);
    rig.submit(1, Op::Read, 3, 0);
    rig.run_until(|rig| rig.lanes[0].hw.is_idle());
    let failed: Vec<_> = rig.ended.iter().filter(|(.., status)| !status.is_ok()).collect();
    assert_eq!(failed, [&(0, Op::Write, Status::Io)]);
    assert!(others > 100, "{others}");
}

#[test]
fn late_commands_are_left_to_another_path_each_time() {
    let mut rig = Rig::new(config());
    rig.fails_over = true;
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    rig.open(1);
    write_late_each_time(&mut rig, 9);
    rig.run_until(|rig| rig.ended.iter().any(|(block, ..)| *block == 0));
    assert!(rig.statuses().iter().all(|status| status.is_ok()));
}

#[test]
fn many_losses_within_a_short_time_fail_no_request() {
    let mut rig = Rig::live(config(), 1);
    at_target(&mut rig, 1, Op::Write, 1, 1);
    for _ in 0..40 {
        rig.cut();
        while rig.target.arrived.is_empty() {
            rig.now_ns += 10 * MS;
            rig.round();
        }
    }
    assert!(rig.now_ns < Cancellations::TIME_NS, "{} ms", rig.now_ns / MS);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
}

#[test]
fn pauses_double_up_to_their_maximum_and_begin_anew() {
    let mut rig = Rig::live(config(), 1);
    rig.unreachable = true;
    rig.cut();
    rig.run_for(60_000);
    let mut pauses = vec![];
    let mut last_ns = 0;
    for event in &rig.events {
        if let FabricsHostEvent::Retry(until_ns) = event {
            pauses.push((until_ns - last_ns) / MS);
            last_ns = *until_ns;
        }
    }
    // The first is from the start of time; each attempt adds a step of the rig.
    let pauses: Vec<u64> = pauses[1..].iter().map(|pause| pause / 100).collect();
    assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 100, 100, 100, 100, 100]);
    rig.unreachable = false;
    rig.run_until(|rig| rig.host.is_started(1));
    let start_ns = rig.now_ns;
    rig.cut();
    rig.run_until(|rig| rig.count(is_lost) == 2);
    rig.run_until(|rig| rig.host.is_started(1));
    assert!(rig.now_ns - start_ns < 500 * MS);
}

#[test]
fn io_fails_fast_and_goes_on_when_the_target_is_back() {
    let mut config = config();
    config.fast_io_fail_ns = Some(3000 * MS);
    let mut rig = Rig::live(config, 1);
    at_target(&mut rig, 1, Op::Write, 1, 1);
    at_target(&mut rig, 1, Op::Read, 2, 0);
    rig.unreachable = true;
    rig.cut();
    rig.run_until(|rig| rig.count(is_lost) == 1);
    rig.submit(1, Op::Write, 3, 3);
    let start_ns = rig.now_ns;
    rig.run_until(|rig| rig.ended.len() == 3);
    assert!((2900..3200).contains(&((rig.now_ns - start_ns) / MS)));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::FastFail), 1);
    rig.ended.sort_by_key(|(block, ..)| *block);
    // The first may have been executed, or may yet be.
    assert_eq!(rig.statuses(), [Status::Timeout, Status::Path, Status::Path]);
    rig.submit(1, Op::Write, 4, 4);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Path], "later I/O fails at once");
    rig.unreachable = false;
    rig.run_until(|rig| rig.host.is_started(1));
    rig.submit(1, Op::Write, 4, 4);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
}

#[test]
fn after_ctrl_loss_the_association_is_given_up() {
    let mut config = config();
    config.ctrl_loss_ns = Some(30_000 * MS);
    let mut rig = Rig::live(config, 2);
    rig.run_for(40_000);
    at_target(&mut rig, 1, Op::Read, 1, 1);
    rig.unreachable = true;
    rig.cut();
    let start_ns = rig.now_ns;
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over) && rig.ended.len() == 1);
    assert!((29_900..30_500).contains(&((rig.now_ns - start_ns) / MS)));
    assert_eq!((rig.host.state(), rig.statuses()), (ControllerState::Dead, vec![Status::Path]));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::Failed(FabricsHostError::Unreachable)), 1);
    let associations = rig.host.association();
    rig.unreachable = false;
    rig.run_for(30_000);
    assert_eq!(rig.host.association(), associations);
}

#[test]
fn a_queue_that_nobody_runs_holds_up_no_other() {
    let mut rig = Rig::live(config(), 2);
    at_target(&mut rig, 2, Op::Write, 1, 1);
    rig.lanes[1].runs = false;
    rig.cut();
    let start_ns = rig.now_ns;
    rig.run_until(|rig| rig.host.association() == 2 && rig.host.is_started(1));
    assert!((rig.now_ns - start_ns) < 6000 * MS);
    rig.submit(1, Op::Write, 2, 2);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
    // It stays so for long.
    rig.run_for(700_000);
    assert_eq!(rig.host.state(), ControllerState::Live);
    rig.lanes[1].runs = true;
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
}

#[test]
fn a_refused_queue_is_tried_with_growing_pauses_and_ends_with_ctrl_loss() {
    let mut config = config();
    config.ctrl_loss_ns = Some(60_000 * MS);
    let mut rig = Rig::new(config);
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    rig.target.behaviour.refuse = vec![(1, fabrics_status::CONTROLLER_BUSY); 1000].into();
    rig.open(1);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    let error = FabricsHostError::QueueRefused { qid: 1, status: fabrics_status::CONTROLLER_BUSY };
    assert_eq!((rig.host.state(), rig.host.error()), (ControllerState::Dead, Some(error)));
    assert!((8..16).contains(&rig.host.association()), "{} attempts", rig.host.association());
}

#[test]
fn a_target_that_chooses_controllers_is_asked_again_at_once() {
    let mut rig = Rig::live(config(), 1);
    rig.target.behaviour.is_static = false;
    rig.target.log.clear();
    rig.cut();
    let start_ns = rig.now_ns;
    rig.run_until(|rig| rig.count(is_lost) == 1);
    rig.run_until(|rig| rig.host.is_started(1));
    let connects: Vec<_> = rig.target.log.iter().filter(|line| line.starts_with("connect")).cloned().collect();
    assert_eq!(connects, ["connect 0 1", "connect 0 ffff", "connect 1 2"]);
    assert!(rig.now_ns - start_ns < 500 * MS);
}

/// The first controller still has a write when the host is refused there once, connects to a second one, and to that
/// again.
#[test]
fn a_second_controller_proves_nothing_of_the_first() {
    let mut rig = Rig::live(config(), 1);
    at_target(&mut rig, 1, Op::Write, 1, 1);
    let lose = |rig: &mut Rig| {
        let (association, _) = rig.admin.unwrap();
        rig.host.admin_lost(association, rig.now_ns);
    };
    rig.target.behaviour.refuse.push_back((0, fabrics_status::CONTROLLER_BUSY));
    lose(&mut rig);
    rig.run_until(|rig| rig.host.controller_id() == Some(2));
    lose(&mut rig);
    rig.events.clear();
    let start_ns = rig.now_ns;
    rig.run_until(|rig| rig.host.is_started(1));
    let fenced: Vec<_> =
        rig.events.iter().filter(|event| matches!(event, FabricsHostEvent::Fenced(..))).cloned().collect();
    assert_eq!(fenced, [FabricsHostEvent::Fenced(1, FenceEvidence::QuiesceElapsed)]);
    assert!(rig.now_ns - start_ns > 9000 * MS, "the write could be executed so long");
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
    // After that a second association of a controller is evidence again.
    at_target(&mut rig, 1, Op::Write, 1, 2);
    lose(&mut rig);
    rig.run_until(|rig| rig.host.is_started(1) && rig.host.association() == 5);
    let ended = FabricsHostEvent::Fenced(4, FenceEvidence::AssociationEnded);
    assert_eq!(rig.count(|event| *event == ended), 1, "{:?}", rig.events);
}

#[test]
fn an_association_survives_a_cut_at_any_point_of_its_bring_up() {
    for rounds in 0..60 {
        let mut rig = Rig::new(config());
        rig.host.start(0);
        (0..rounds).for_each(|_| rig.round());
        rig.cut();
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        rig.open(1);
        (0..rounds / 4).for_each(|_| rig.round());
        rig.cut();
        rig.submit(1, Op::Write, 1, 1);
        rig.run_until(|rig| rig.ended.len() == 1);
        assert_eq!(rig.statuses(), [Status::Ok], "{rounds} rounds");
    }
}

#[test]
fn an_association_that_cannot_connect_yet_can_be_given_up() {
    let mut rig = Rig::new(config());
    rig.unreachable = true;
    rig.host.start(0);
    rig.run_for(1000);
    rig.host.disconnect(rig.now_ns);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    assert_eq!(rig.host.state(), ControllerState::DeletingNoIo);
}

#[test]
fn a_lost_path_gives_its_bios_to_another() {
    let mut rig = Rig::live(config(), 1);
    at_target(&mut rig, 1, Op::Write, 1, 1);
    at_target(&mut rig, 1, Op::Read, 2, 1);
    rig.unreachable = true;
    rig.cut();
    rig.run_until(|rig| rig.count(is_lost) == 1);
    // It was never sent.
    rig.submit(1, Op::Write, 3, 3);
    rig.run_until(|rig| rig.lanes[0].hw.in_flight() == 0);
    let hw = &mut rig.lanes[0].hw;
    hw.quiesce();
    let mut taken = vec![];
    hw.take_bios(PathGeneration { path: 0, generation: 1 }, &mut |bio| taken.push(bio));
    let kinds: Vec<_> = taken
        .iter()
        .map(|taken| match taken {
            TakenBio::Free(bio) => (bio.cookie, true),
            TakenBio::Unfenced(bio) => (bio.bio().cookie, false),
        })
        .collect();
    assert_eq!(kinds, [(1, false), (2, true), (3, true)]);
    assert!(hw.is_idle());
}

/// Statuses, results, properties, identify data and logs of a hostile target: nothing panics, and an honest target is
/// used afterwards.
#[test]
fn wrong_answers_of_a_target_do_no_harm() {
    let (mut live, mut dead) = (0, 0);
    for seed in 1..1500_u64 {
        let mut config = config();
        config.reconnect_ns = [100 * MS, 1000 * MS];
        if seed % 5 == 0 {
            config.subsystem = Nqn::new(DISCOVERY_NQN).unwrap();
        }
        let mut rig = Rig::new(config);
        rig.target.noise = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        rig.target.behaviour.ana = Some(vec![0; 4096]).filter(|_| seed % 3 == 0);
        rig.target.behaviour.discovery = Some(DiscoveryLog::new(7, &[]));
        rig.host.start(0);
        for round in 0..600_u64 {
            rig.now_ns += 10 * MS;
            rig.round();
            let is_ready = rig.host.state() == ControllerState::Live && !rig.host.namespaces().is_empty();
            if is_ready && rig.lanes.is_empty() {
                rig.open(1);
            }
            if !rig.lanes.is_empty() && round % 20 == 0 && rig.lanes[0].hw.room() > 0 {
                rig.submit(1, Op::Read, round % 8, 0);
            }
            if round % 50 == 0 {
                rig.target.event(seed.wrapping_mul(round) % 0x10_0000);
            }
            rig.target.execute_all();
        }
        rig.target.noise = 0;
        rig.target.behaviour.ana = None;
        rig.cut();
        rig.run_until(|rig| [ControllerState::Live, ControllerState::Dead].contains(&rig.host.state()));
        live += u32::from(rig.host.state() == ControllerState::Live);
        dead += u32::from(rig.host.state() == ControllerState::Dead);
    }
    assert!(live > 100 && dead > 100, "{live} live, {dead} dead");
}

#[test]
fn refused_access_is_waited_for_or_left_to_another_path() {
    for fails_over in [false, true] {
        let mut rig = Rig::new(config());
        rig.fails_over = fails_over;
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        rig.open(1);
        rig.target.behaviour.refuse_io = vec![NvmeStatus::ANA_TRANSITION; 3].into();
        let start_ns = rig.now_ns;
        rig.submit(1, Op::Write, 1, 1);
        rig.run_until(|rig| rig.ended.len() == 1);
        let took_ms = (rig.now_ns - start_ns) / MS;
        assert!(rig.lanes[0].reports.contains(&FabricsQueueReport::AccessChanged));
        if fails_over {
            assert_eq!((rig.statuses(), rig.target.behaviour.refuse_io.len()), (vec![Status::Path], 2));
            assert!(took_ms < 200);
        } else {
            assert_eq!(rig.statuses(), [Status::Ok]);
            assert!((6000..7000).contains(&took_ms), "{took_ms} ms");
        }
        // One that is lost for good is not waited for.
        rig.target.behaviour.refuse_io = vec![NvmeStatus::ANA_LOSS.with_dnr(); 1].into();
        rig.submit(1, Op::Write, 1, 1);
        rig.run_until(|rig| rig.ended.len() == 1);
        assert_eq!(rig.statuses(), [Status::Io]);
    }
}

#[test]
fn a_queue_can_be_dropped_with_requests_in_flight() {
    let mut rig = Rig::live(config(), 1);
    at_target(&mut rig, 1, Op::Write, 1, 1);
    rig.target.behaviour.refuse_io = vec![NvmeStatus::ANA_TRANSITION].into();
    rig.target.execute_all();
    at_target(&mut rig, 1, Op::Write, 2, 1);
    assert_eq!(rig.lanes[0].hw.in_flight(), 2);
    drop(rig);
}

#[test]
fn bytes_received_directly_before_the_queue_learns_of_an_end_are_dropped() {
    let close = |queue: &mut FabricsIoQueue| queue.command(FabricsQueueCommand::Close);
    for (ends, is_lost) in [(close as fn(&mut FabricsIoQueue), false), (FabricsIoQueue::lost, true)] {
        let mut rig = Rig::live(config(), 1);
        at_target(&mut rig, 1, Op::Read, 3, 0);
        rig.target.execute_all();
        let connection = &mut rig.target.connections[rig.lanes[0].connection.unwrap()];
        connection.pump();
        connection.to_host.deliver(100);
        let received = std::mem::take(&mut connection.to_host.received);
        let queue = &mut rig.lanes[0].hw.driver_mut().0;
        queue.receive(&received);
        let destination = queue.destination().expect("data is coming in");
        ends(queue);
        // The kernel had received before: its completion was reaped, and waited in the inbox.
        queue.received(destination.len);
        queue.receive(&[0; 4]);
        assert_eq!(queue.destination(), None);
        if is_lost {
            rig.run_until(|rig| rig.ended.len() == 1);
            assert_eq!(rig.statuses(), [Status::Ok], "it is sent again");
        }
    }
}
