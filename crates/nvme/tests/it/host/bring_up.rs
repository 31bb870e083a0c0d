//! Bring-up from an untouched controller to queues and namespaces, and the handling of refusals.

use blkyard_mq::{Op, QueueCounts};
use blkyard_nvme::{
    AdminData, ControllerState, HostEvent, IdentifyController, NvmeHostConfig, NvmeHostError, NvmeStatus, QueueDemand,
    Sqe, admin, cns, feature,
};

use crate::host::fake::{FakeTransport, namespace};
use crate::host::rig::{MS, Rig, S, config};

fn live(change: impl FnOnce(&mut crate::host::fake::FakeController), config: NvmeHostConfig) -> Rig {
    let transport = FakeTransport::new();
    change(&mut transport.fake.borrow_mut());
    Rig::live(transport, config)
}

fn counts(rig: &Rig) -> [usize; 3] {
    rig.host.queue_counts().map_or([0; 3], |counts: QueueCounts| [counts.default, counts.read, counts.poll])
}

/// Admin commands as opcode and dword 10, without those of the scan.
fn commands(rig: &Rig) -> Vec<(u8, u32)> {
    let is_scan = |sqe: &&Sqe| sqe.opcode() != admin::IDENTIFY || [1, 6].contains(&(sqe.dword(10) as u8));
    rig.fake.borrow().log.iter().filter(is_scan).map(|sqe| (sqe.opcode(), sqe.dword(10))).collect()
}

#[test]
fn a_controller_comes_up_command_by_command() {
    let mut rig = live(|_| (), config(2));
    rig.round();
    let entries = 15 << 16;
    let want = [
        (admin::IDENTIFY, u32::from(cns::CONTROLLER)),
        (admin::IDENTIFY, u32::from(cns::CSI_CONTROLLER)),
        (admin::SET_FEATURES, u32::from(feature::QUEUES)),
        (admin::DOORBELL_BUFFER, 0),
        (admin::CREATE_CQ, 1 | entries),
        (admin::CREATE_SQ, 1 | entries),
        (admin::CREATE_CQ, 2 | entries),
        (admin::CREATE_SQ, 2 | entries),
        (admin::SET_FEATURES, u32::from(feature::ASYNC_EVENTS)),
        (admin::ASYNC_EVENT, 0),
    ];
    assert_eq!(commands(&rig), want);
    assert_eq!(rig.events, [HostEvent::NamespacesChanged, HostEvent::Live]);
    assert_eq!((rig.queues.len(), counts(&rig)), (2, [2, 0, 0]));
    // The reserved slot of the event, with the generation in the upper bits.
    let event = rig.fake.borrow().log.last().copied().unwrap();
    assert_eq!(event.cid() & 0xfff, 31);
    assert!(rig.fake.borrow().log.iter().rev().skip(1).all(|sqe| sqe.cid() & 0xfff < 30));
}

/// Such as beyond the limit on locked memory. The user was told after a minute.
#[test]
fn memory_that_cannot_be_mapped_is_told_at_once() {
    let transport = FakeTransport::new();
    transport.fake.borrow_mut().reaches_memory = false;
    let mut rig = Rig::new(transport, config(1));
    rig.start();
    assert_eq!((rig.host.state(), rig.host.error()), (ControllerState::Dead, Some(NvmeHostError::Memory)));
    assert!(rig.now_ns < S, "{} ns", rig.now_ns);
}

#[test]
fn reads_find_what_was_written_on_every_queue_and_namespace() {
    for (shares_doorbells, has_shadow) in [(true, true), (true, false)] {
        let two = |fake: &mut crate::host::fake::FakeController| {
            fake.shares_doorbells = shares_doorbells;
            fake.namespaces.insert(2, namespace(1 << 16, 9));
            fake.namespaces.insert(7, namespace(1 << 12, 12));
        };
        let mut rig = live(two, NvmeHostConfig { has_shadow, ..config(3) });
        for op in [Op::Write, Op::Read] {
            for block in 0..60 {
                let (qid, number) = (1 + block as u16 % 3, block as u16 % 3);
                assert!(rig.submit(qid, number, op, block).is_some());
            }
            rig.finish();
        }
        assert_eq!(rig.ended.len(), 120);
        assert!(rig.ended.iter().all(|(_, status)| status.is_ok()));
        assert_eq!(rig.fake.borrow().disk.len(), 60);
    }
}

#[test]
fn doorbells_that_are_not_shared_are_written_as_registers() {
    let mut rig = live(|fake| fake.shares_doorbells = false, NvmeHostConfig { has_shadow: false, ..config(1) });
    rig.submit(1, 0, Op::Write, 0).unwrap();
    rig.turn_queue(1);
    rig.turn_fake();
    assert_eq!(rig.fake.borrow().pending.len() + rig.fake.borrow().disk.len(), 0, "no register was written");
    let now_ns = rig.now_ns;
    rig.host.forward_doorbells(1, now_ns);
    rig.finish();
    assert_eq!(rig.fake.borrow().disk.len(), 1);
}

#[test]
fn only_doorbells_that_have_changed_are_forwarded() {
    let mut rig = live(|fake| fake.shares_doorbells = false, NvmeHostConfig { has_shadow: false, ..config(1) });
    rig.fake.borrow_mut().doorbell_writes.clear();
    for block in 0..4 {
        rig.submit(1, 0, Op::Write, block).unwrap();
        for _ in 0..2 {
            rig.turn_queue(1);
            let now_ns = rig.now_ns;
            rig.host.forward_doorbells(1, now_ns);
            rig.turn_fake();
        }
    }
    // Each tail of queue 1, and after a quarter of its 16 entries the head.
    assert_eq!(rig.fake.borrow().doorbell_writes, [(8, 1), (8, 2), (8, 3), (8, 4), (12, 4)]);
}

#[test]
fn queues_are_bounded_by_doorbells_that_are_not_shared() {
    let rig = live(|fake| (fake.shares_doorbells, fake.doorbell_bytes) = (false, 24), config(4));
    assert_eq!(rig.queues.len(), 2, "room for the admin queue and two more");
}

#[test]
fn fewer_queues_are_used_when_fewer_are_granted() {
    for (grant, wanted, queues) in [(8, 4, 4), (2, 4, 2), (1, 4, 1)] {
        let rig = live(|fake| fake.grant = Some(grant), config(wanted));
        assert_eq!(rig.queues.len(), queues);
        assert_eq!(rig.fake.borrow().queue_count(), queues);
    }
}

#[test]
fn a_failed_feature_leaves_the_admin_queue_alone() {
    let rig = live(|fake| fake.grant = None, config(4));
    assert_eq!((counts(&rig), rig.queues.len()), ([0; 3], 0));
    assert_eq!(rig.fake.borrow().count(admin::CREATE_CQ), 0);
    assert_eq!(rig.host.namespaces().len(), 1);
}

#[test]
fn rejected_queues_are_deleted_and_fewer_created() {
    let demand = QueueDemand { submitters: 4, write_queues: 2, poll_queues: 1 };
    for (reject_from, want) in [(8, [2, 4, 1]), (5, [2, 1, 1]), (3, [1, 0, 1]), (2, [1, 0, 0]), (1, [0; 3])] {
        let rig = live(|fake| fake.reject_from = Some(reject_from), NvmeHostConfig { queues: demand, ..config(4) });
        assert_eq!(counts(&rig), want, "from queue {reject_from}");
        assert_eq!(rig.fake.borrow().queue_count(), want.iter().sum::<usize>());
        let asked: Vec<u32> = {
            let fake = rig.fake.borrow();
            let features = fake.log.iter().filter(|sqe| sqe.opcode() == admin::SET_FEATURES && sqe.dword(10) == 7);
            features.map(|sqe| sqe.dword(11) & 0xffff).collect()
        };
        assert_eq!(asked, [6], "once a queue was created the number is fixed");
    }
}

#[test]
fn vectors_bound_the_queues_that_interrupt() {
    let demand = QueueDemand { submitters: 4, write_queues: 0, poll_queues: 1 };
    let rig = live(|fake| fake.vectors = 3, NvmeHostConfig { queues: demand, ..config(4) });
    assert_eq!(counts(&rig), [2, 0, 1]);
    assert_eq!([0, 1, 2, 3].map(|qid| rig.host.queue_vector(qid)), [None, Some(1), Some(2), None]);
    let fake = rig.fake.borrow();
    let creates = fake.log.iter().filter(|sqe| sqe.opcode() == admin::CREATE_CQ);
    // Interrupt enable and vector.
    let vectors: Vec<_> = creates.map(|sqe| (sqe.dword(11) >> 1 & 1, sqe.dword(11) >> 16)).collect();
    assert_eq!(vectors, [(1, 1), (1, 2), (0, 0)]);
}

#[test]
fn namespaces_are_scanned_over_pages_of_the_list() {
    let mut rig = live(
        |fake| {
            for nsid in 1..=1030 {
                fake.namespaces.insert(nsid * 3, namespace(100, 9));
            }
        },
        config(1),
    );
    // A page has 1024 identifiers. Namespace 1 was there before.
    assert_eq!(rig.host.namespaces().len(), 1031);
    let nsids: Vec<u32> = rig.host.namespaces().iter().map(|found| found.namespace.nsid).collect();
    assert!(nsids.is_sorted() && nsids[..3] == [1, 3, 6]);
    rig.round();
    rig.check();
}

#[test]
fn a_namespace_that_cannot_be_used_is_left_out() {
    let rig = live(
        |fake| {
            fake.namespaces.insert(2, namespace(100, 8));
            fake.namespaces.insert(3, namespace(0, 9));
            fake.namespaces.insert(4, namespace(100, 12));
            fake.uuids.insert(4, *b"0123456789abcdef");
        },
        config(1),
    );
    let found: Vec<_> =
        rig.host.namespaces().iter().map(|found| (found.namespace.nsid, found.info.capacity_sectors)).collect();
    assert_eq!(found, [(1, 1 << 16), (4, 800)]);
    assert_eq!(rig.host.namespaces()[1].ids.uuid, *b"0123456789abcdef");
}

#[test]
fn a_controller_without_a_list_is_asked_for_each_namespace() {
    let rig = live(
        |fake| {
            fake.has_active_list = false;
            fake.namespaces.insert(3, namespace(100, 9));
        },
        config(1),
    );
    let nsids: Vec<u32> = rig.host.namespaces().iter().map(|found| found.namespace.nsid).collect();
    assert_eq!(nsids, [1, 3]);
}

#[test]
fn limits_of_the_command_set_reach_the_queue_core() {
    // WZSL 2: 16 KiB. DMRL 4, DMRSL 100, DMSL 50.
    let limits = [0, 2, 0, 4, 100, 0, 0, 0, 50, 0, 0, 0, 0, 0, 0, 0];
    let rig = live(|fake| fake.nvm_limits = Some(limits), config(1));
    let found = rig.host.namespaces()[0].info.limits;
    assert_eq!((found.write_zeroes_sectors_max, found.discard_segments_max, found.discard_sectors_max), (32, 4, 50));
    assert_eq!(found.virt_boundary_mask, 4095);
}

#[test]
fn a_command_that_fails_ends_bring_up_with_its_name() {
    let transport = FakeTransport::new();
    transport.fake.borrow_mut().ignored.insert(admin::SET_FEATURES, 0);
    let mut rig = Rig::new(transport, config(1));
    rig.start();
    let error = NvmeHostError::Timeout("Set Features (number of queues)");
    assert_eq!((rig.host.state(), rig.host.error()), (ControllerState::Dead, Some(error)));
    assert_eq!(rig.events, [HostEvent::Failed(error), HostEvent::Over]);
    assert!(rig.now_ns > 60 * S, "it had its time");
    let text = error.to_string();
    assert_eq!(text, "NVMe controller: Set Features (number of queues) was not completed in time; reset the device");
}

/// Each command ends within its own time, and all of them together would take days.
#[test]
fn a_controller_that_is_slow_with_each_command_is_given_up() {
    let transport = FakeTransport::new();
    transport.fake.borrow_mut().namespaces = (1..=4096).map(|nsid| (nsid, namespace(8, 9))).collect();
    let mut rig = Rig::new(transport, config(8));
    rig.host.start(rig.now_ns);
    while rig.host.state() == ControllerState::Connecting {
        assert!(rig.now_ns < 600 * S, "{} commands so far", rig.fake.borrow().log.len());
        let is_enabled = rig.fake.borrow().enables > 0;
        rig.fake.borrow_mut().mute = true;
        rig.advance_host();
        rig.now_ns += if is_enabled { 50 * S } else { 10 * MS };
        rig.fake.borrow_mut().mute = false;
        rig.turn_fake();
    }
    let error = rig.host.error().unwrap();
    assert!(matches!(error, NvmeHostError::Timeout(_)), "{error}");
}

#[test]
fn events_lead_to_a_new_scan() {
    let mut rig = live(|_| (), config(1));
    rig.round();
    rig.events.clear();
    rig.fake.borrow_mut().namespaces.insert(5, namespace(100, 9));
    // A notice, namespaces changed, log page 4.
    assert!(rig.fake.borrow_mut().event(2 | 4 << 16));
    rig.run(|rig| rig.events == [HostEvent::NamespacesChanged], S);
    assert_eq!(rig.host.namespaces().len(), 2);
    rig.round();
    rig.round();
    assert_eq!(rig.fake.borrow().count(admin::GET_LOG_PAGE), 1, "the event is cleared");
    assert!(rig.fake.borrow_mut().event(1), "and asked for again");
    rig.run(|rig| rig.fake.borrow().count(admin::ASYNC_EVENT) == 3, S);
    assert_eq!(rig.events, [HostEvent::NamespacesChanged], "any other event changes nothing");
    rig.check();
}

#[test]
fn a_namespace_stays_when_identify_fails_for_the_moment() {
    // As often as one command is sent, and for ever.
    for failures in [1, 4, 8, u32::MAX] {
        let mut rig = live(|_| (), config(1));
        rig.round();
        rig.events.clear();
        rig.fake.borrow_mut().identify_failures = failures;
        assert!(rig.fake.borrow_mut().event(2 | 4 << 16));
        for _ in 0..30 {
            rig.round();
            rig.pass();
        }
        assert_eq!((rig.host.namespaces().len(), rig.events.len()), (1, 0), "{failures} failures");
    }
    // On the way up a failure that passes leaves no namespace out, either.
    assert_eq!(live(|fake| fake.identify_failures = 3, config(1)).host.namespaces().len(), 1);
}

#[test]
fn a_keep_alive_is_sent_at_half_its_time() {
    let with = NvmeHostConfig { keep_alive_ms: 10_000, ..config(1) };
    for (attributes, interval_s) in [(0, 5), (1 << 6, 2)] {
        let mut rig = live(|fake| (fake.identify.keep_alive, fake.identify.attributes) = (1, attributes), with);
        let start_ns = rig.now_ns;
        let sent = |rig: &Rig| rig.fake.borrow().count(admin::KEEP_ALIVE);
        rig.run(|rig| sent(rig) == 4, 100 * S);
        assert_eq!((rig.now_ns - start_ns) / S, interval_s * 4 + if interval_s == 2 { 2 } else { 0 });
        // Without an answer the controller is reset.
        rig.fake.borrow_mut().mute = true;
        rig.run(|rig| rig.host.state() == ControllerState::Resetting, 20 * S);
        rig.fake.borrow_mut().mute = false;
        rig.run(|rig| rig.host.state() == ControllerState::Live, 100 * S);
    }
}

#[test]
fn an_admin_queue_without_interrupts_is_polled() {
    for (vectors, command_ns, event_ns) in [(0, Some(MS), Some(S)), (3, Some(30 * S), None)] {
        let mut rig = live(|fake| fake.vectors = vectors, config(1));
        rig.round();
        let due_ns = |rig: &mut Rig| rig.host.advance(rig.now_ns).map(|due_ns| due_ns - rig.now_ns);
        assert_eq!(due_ns(&mut rig), event_ns, "{vectors} vectors");
        let sqe = Sqe::feature(admin::GET_FEATURES, feature::WRITE_CACHE, 0);
        rig.host.submit_admin(sqe, AdminData::None, 1, 30 * S, rig.now_ns).unwrap();
        assert_eq!(due_ns(&mut rig), command_ns, "{vectors} vectors");
    }
}

#[test]
fn a_keep_alive_is_sent_during_a_long_scan() {
    let transport = FakeTransport::new();
    {
        let mut fake = transport.fake.borrow_mut();
        fake.identify.keep_alive = 1;
        // The list of namespaces takes its time.
        fake.ignored.insert(admin::IDENTIFY, 2);
    }
    let mut rig = Rig::new(transport, NvmeHostConfig { keep_alive_ms: 10_000, ..config(1) });
    rig.host.start(rig.now_ns);
    while rig.now_ns < 27 * S {
        rig.round();
        let due_ns = rig.host.advance(rig.now_ns);
        assert!(due_ns.is_none_or(|due_ns| due_ns > rig.now_ns), "a time that is over, and nothing to do");
        rig.pass();
    }
    assert_eq!(rig.fake.borrow().count(admin::KEEP_ALIVE), 5);
    let token = {
        let mut fake = rig.fake.borrow_mut();
        fake.ignored.clear();
        fake.ignored_tokens[0]
    };
    rig.fake.borrow_mut().answer(token, NvmeStatus::SUCCESS, 0);
    rig.run(|rig| rig.host.state() == ControllerState::Live, S);
}

#[test]
fn a_queue_that_is_taken_late_knows_the_namespaces_of_then() {
    let mut rig = Rig::new(FakeTransport::new(), config(1));
    let come_up = |rig: &mut Rig| {
        while rig.host.state() != ControllerState::Live {
            rig.turn_fake();
            rig.host.advance(rig.now_ns);
            rig.now_ns += MS;
        }
    };
    rig.host.start(rig.now_ns);
    come_up(&mut rig);
    rig.fake.borrow_mut().namespaces.insert(2, namespace(1 << 16, 9));
    assert!(rig.host.reset(rig.now_ns));
    come_up(&mut rig);
    rig.round();
    rig.submit(1, 1, Op::Write, 0).unwrap();
    rig.finish();
    assert_eq!(rig.ended.len(), 1);
}

#[test]
fn a_command_of_the_user_is_passed_on() {
    let mut rig = live(|_| (), config(1));
    let ask = |rig: &mut Rig, sqe, data: AdminData<'_>| {
        rig.events.clear();
        rig.host.submit_admin(sqe, data, 77, S, rig.now_ns).unwrap();
        rig.run(|rig| !rig.events.is_empty(), 10 * S);
        rig.events.remove(0)
    };
    let status = NvmeStatus::INVALID_OPCODE.with_dnr();
    let unknown = Sqe::feature(admin::GET_FEATURES, feature::WRITE_CACHE, 0);
    let event = ask(&mut rig, unknown, AdminData::None);
    assert_eq!(event, HostEvent::Completed { user: 77, status, result: 0, data: None });
    let identify = Sqe::identify(cns::CONTROLLER, 0, 0, 0);
    let HostEvent::Completed { status, data: Some(data), .. } = ask(&mut rig, identify, AdminData::Read) else {
        panic!("a command without data")
    };
    assert_eq!((status, IdentifyController::parse(&data)), (NvmeStatus::SUCCESS, rig.fake.borrow().identify.clone()));
    // For data to the controller, the rest of the page is zero.
    let timestamp = Sqe::feature(admin::SET_FEATURES, feature::TIMESTAMP, 0);
    let event = ask(&mut rig, timestamp, AdminData::Write(&[1, 2, 3]));
    assert_eq!(event, HostEvent::Completed { user: 77, status: NvmeStatus::SUCCESS, result: 0, data: None });
    let mut want = [0; 4096];
    want[..3].copy_from_slice(&[1, 2, 3]);
    assert_eq!(rig.fake.borrow().written, want);
    // A reset returns the command with an error.
    rig.fake.borrow_mut().mute = true;
    let event = ask(&mut rig, unknown, AdminData::None);
    assert_eq!(event, HostEvent::Completed { user: 77, status: NvmeStatus::HOST_ABORTED, result: 0, data: None });
    // A controller that is not live accepts no command.
    assert_ne!(rig.host.state(), ControllerState::Live);
    assert_eq!(rig.host.submit_admin(unknown, AdminData::None, 78, S, rig.now_ns), Err(78));
}
