//! A subsystem over fabrics: each Connect with its exact status, and the controllers of associations.

use std::sync::Arc;

use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, DISCOVERY_NQN, Nqn, PropertySize, fabrics_status,
};
use blkyard_nvme::registers::{CAP, CC, CRTO, CSTS, ControllerConfig, VS};
use blkyard_nvme::{
    ANA_LOG, AdminCompletion, AnaGroup, AnaGroups, AnaLog, AnaState, ConnectRefusal, Connected, Controller,
    ControllerOptions, ControllerQueueCommand, ControllerQueueReply, ControllerRequest, DISCOVERY_LOG, DiscoveryEntry,
    DiscoveryHeader, DiscoveryKind, FabricsOptions, FabricsSubsystem, IDENTIFY_BYTES, IdentifyController,
    IdentifyNamespace, KEEP_ALIVE_LATE_NS, NamespaceTable, NvmeStatus, Psdt, ServedNamespace, Sqe, SubsystemOptions,
    admin, cns, feature,
};

pub const FIRST_ID: u16 = 2001;
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
pub const HOST: &str = "nqn.2026-11.test:host";
const NS_PER_MS: u64 = 1_000_000;

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

fn entry() -> DiscoveryEntry {
    DiscoveryEntry {
        kind: DiscoveryKind::Subsystem,
        subsystem: nqn(SUBSYSTEM),
        address: "127.0.0.1".parse().unwrap(),
        port: 4420,
        port_id: 1,
        controller_id: ANY_CONTROLLER,
        admin_entries: 32,
        no_flow_control: true,
        secure_channel: blkyard_nvme::SecureChannel::NotRequired,
        has_tls: false,
    }
}

fn referral() -> DiscoveryEntry {
    DiscoveryEntry { kind: DiscoveryKind::Referral, subsystem: nqn(DISCOVERY_NQN), port: 8009, ..entry() }
}

pub fn subsystem(hosts: Option<Vec<Nqn>>) -> FabricsSubsystem {
    let controller = ControllerOptions {
        controller_id: FIRST_ID,
        io_queues: 4,
        queue_entries: 128,
        vectors: 1,
        fabrics: Some(FabricsOptions { in_capsule: 8192, ..FabricsOptions::default() }),
        ..crate::machine::options()
    };
    let options = SubsystemOptions {
        nqn: nqn(SUBSYSTEM),
        hosts,
        auth: None,
        controller,
        controllers_max: 3,
        admin_entries: 32,
        discovery: vec![entry(), referral()],
        instance_seed: Some(7),
    };
    FabricsSubsystem::new(options, crate::machine::namespaces())
}

fn command(qid: u16, sq_size: u16) -> ConnectCommand {
    ConnectCommand { qid, sq_size, no_flow_control: false, keep_alive_ms: 5000 }
}

fn data(subsystem: &str, host: &str, controller_id: u16) -> [u8; CONNECT_BYTES] {
    let mut bytes = [0; CONNECT_BYTES];
    let data = ConnectData { host_id: [9; 16], controller_id, subsystem: nqn(subsystem), host: nqn(host) };
    data.write(&mut bytes);
    bytes
}

pub fn connect(target: &mut FabricsSubsystem, host: &str, id: u16) -> Result<Connected, ConnectRefusal> {
    target.connect(&command(0, 31), &data(SUBSYSTEM, host, id), 0)
}

pub fn admin_id(connected: Result<Connected, ConnectRefusal>) -> u16 {
    match connected {
        Ok(Connected::Admin(id)) => id,
        other => panic!("{other:?}"),
    }
}

pub fn enable(controller: &mut Controller) {
    let config =
        ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() };
    controller.set_property(PropertySize::Four, CC as u32, config.bits().into()).unwrap();
    assert_eq!(controller.property(PropertySize::Four, CSTS as u32), Ok(1));
}

/// Executes an admin command with a buffer of `room` bytes that is complete at once.
pub fn run(controller: &mut Controller, sqe: Sqe, room: usize) -> AdminCompletion {
    controller.submit(3, &sqe.with_data(Psdt::Sgl, [0, 0]), Vec::new(), room, 0);
    controller.take_completion().unwrap()
}

/// A subsystem with an enabled controller of an association.
pub fn associated() -> (FabricsSubsystem, u16) {
    let mut target = subsystem(None);
    let id = admin_id(connect(&mut target, HOST, ANY_CONTROLLER));
    enable(&mut target.association(id).unwrap().controller);
    (target, id)
}

#[test]
fn each_wrong_field_of_a_connect_has_its_status() {
    let parameters = |offset: u64, in_data: bool| {
        let result = offset | u64::from(in_data) << 16;
        ConnectRefusal { status: fabrics_status::INVALID_PARAMETERS.with_dnr(), result }
    };
    let plain = |status: NvmeStatus| ConnectRefusal { status, result: 0 };
    let good = |id| data(SUBSYSTEM, HOST, id);
    let mut unterminated = good(ANY_CONTROLLER);
    unterminated[256..512].fill(b'n');
    let mut no_host = good(ANY_CONTROLLER);
    no_host[512] = 0;
    let mut other_id = good(FIRST_ID);
    other_id[..16].fill(1);
    let cases: Vec<(&str, ConnectCommand, Vec<u8>, ConnectRefusal)> = vec![
        ("short data", command(0, 31), vec![0; 1023], plain(NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())),
        ("long data", command(0, 31), vec![0; 1025], plain(NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())),
        ("no end of the subsystem's name", command(0, 31), unterminated.into(), parameters(256, true)),
        ("no name of the host", command(0, 31), no_host.into(), parameters(512, true)),
        ("unknown subsystem", command(0, 31), data("nqn.x", HOST, ANY_CONTROLLER).into(), parameters(256, true)),
        (
            "host that is not allowed",
            command(0, 31),
            data(SUBSYSTEM, "nqn.other", ANY_CONTROLLER).into(),
            ConnectRefusal { status: fabrics_status::INVALID_HOST.with_dnr(), result: 512 | 1 << 16 },
        ),
        ("no entries", command(0, 0), good(ANY_CONTROLLER).into(), parameters(44, false)),
        ("too many admin entries", command(0, 32), good(ANY_CONTROLLER).into(), parameters(44, false)),
        ("too many I/O entries", command(1, 128), good(FIRST_ID).into(), parameters(44, false)),
        ("controller out of range", command(0, 31), good(FIRST_ID - 1).into(), parameters(16, true)),
        ("controller beyond the last", command(0, 31), good(FIRST_ID + 1000).into(), parameters(16, true)),
        // FreeBSD CVE-2026-4652.
        ("invented controller", command(1, 31), good(FIRST_ID + 1).into(), parameters(16, true)),
        ("any controller for I/O", command(1, 31), good(ANY_CONTROLLER).into(), parameters(16, true)),
        ("I/O queue of another host", command(1, 31), data(SUBSYSTEM, "nqn.b", FIRST_ID).into(), parameters(512, true)),
        ("I/O queue of another host id", command(1, 31), other_id.into(), parameters(0, true)),
        ("queue out of range", command(5, 31), good(FIRST_ID).into(), parameters(42, false)),
        ("queue in use", command(2, 31), good(FIRST_ID).into(), plain(NvmeStatus::COMMAND_SEQUENCE.with_dnr())),
        (
            "discovery of that controller",
            command(1, 31),
            data(DISCOVERY_NQN, HOST, FIRST_ID).into(),
            parameters(16, true),
        ),
        (
            "another host's controller",
            command(0, 31),
            data(SUBSYSTEM, "nqn.b", FIRST_ID).into(),
            plain(fabrics_status::CONTROLLER_BUSY),
        ),
    ];
    let mut target = subsystem(Some(vec![nqn(HOST), nqn("nqn.b")]));
    let id = admin_id(connect(&mut target, HOST, ANY_CONTROLLER));
    let early = target.connect(&command(1, 31), &good(id), 0).unwrap_err();
    assert_eq!(early, plain(NvmeStatus::COMMAND_SEQUENCE.with_dnr()), "before the controller is enabled");
    enable(&mut target.association(id).unwrap().controller);
    assert!(matches!(target.connect(&command(2, 127), &good(id), 0), Ok(Connected::Io(FIRST_ID, _))));
    for (name, command, data, refusal) in cases {
        assert_eq!(target.connect(&command, &data, 0).unwrap_err(), refusal, "{name}");
    }
    assert_eq!(target.associations().count(), 1);
}

#[test]
fn connect_to_the_same_controller_ends_the_old_association_first() {
    let (mut target, id) = associated();
    assert!(matches!(connect(&mut target, HOST, id), Ok(Connected::Replaces(FIRST_ID))));
    target.remove(id);
    assert_eq!(admin_id(connect(&mut target, HOST, id)), id);
    // A new association, which has no queues and is disabled.
    assert_eq!(target.association(id).unwrap().controller.property(PropertySize::Four, CSTS as u32), Ok(0));
    // Any other Connect has a controller of its own, up to the maximum.
    let others = [0, 1].map(|_| admin_id(connect(&mut target, HOST, ANY_CONTROLLER)));
    assert_eq!(others, [FIRST_ID + 1, FIRST_ID + 2]);
    let refusal = connect(&mut target, HOST, ANY_CONTROLLER).unwrap_err();
    assert_eq!(refusal, fabrics_status::CONTROLLER_BUSY.into());
    target.remove(FIRST_ID + 1);
    assert_eq!(admin_id(connect(&mut target, HOST, ANY_CONTROLLER)), FIRST_ID + 3, "no identifier returns at once");
}

#[test]
fn each_property_has_its_size() {
    let (mut target, id) = associated();
    let controller = &mut target.association(id).unwrap().controller;
    let (four, eight) = (PropertySize::Four, PropertySize::Eight);
    assert_eq!(controller.property(eight, CAP as u32).unwrap() & 0xffff, 127);
    assert_eq!(controller.property(four, VS as u32), Ok(0x2_0000));
    assert_eq!(controller.property(four, CRTO as u32), Ok(120));
    let invalid = Err(NvmeStatus::INVALID_FIELD.with_dnr());
    for (size, offset) in
        [(four, CAP), (eight, VS), (eight, CC), (four, 4), (four, 0x24), (eight, 0x28), (four, 0x1000)]
    {
        assert_eq!(controller.property(size, offset as u32), invalid, "{offset:x}");
    }
    for (size, offset) in [(four, CAP), (four, CSTS), (eight, CC), (four, 0x24), (four, 0x1000), (four, 0xffff_fffc)] {
        assert_eq!(controller.set_property(size, offset as u32, 0), invalid.map(|_: u64| ()), "{offset:x}");
    }
}

#[test]
fn admin_commands_come_in_capsules() {
    let (mut target, id) = associated();
    let controller = &mut target.association(id).unwrap().controller;
    let identify = |cns, nsid| Sqe::identify(cns, nsid, 0, 0);
    let page = run(controller, identify(cns::CONTROLLER, 0), IDENTIFY_BYTES);
    let data = IdentifyController::parse(&page.data.try_into().unwrap());
    assert_eq!((data.controller_id, data.controller_type, data.multipath), (FIRST_ID, 1, 2));
    assert_eq!((data.in_capsule_bytes(), data.response_capsule, data.commands_max), (8192, 1, 128));
    assert!(data.has_sgl() && !data.has_shadow_doorbells() && data.keep_alive > 0);
    assert_eq!(data.nvm_commands & (1 | 1 << 5 | 1 << 7), 0, "Compare, reservations, Verify");
    let page = run(controller, identify(cns::NAMESPACE, 1), IDENTIFY_BYTES);
    assert_eq!(IdentifyNamespace::parse(&page.data.try_into().unwrap()).sharing, 1);
    let short = run(controller, identify(cns::CONTROLLER, 0), IDENTIFY_BYTES - 4);
    assert_eq!((short.status.without_flags(), short.data.len()), (NvmeStatus::INVALID_DATA_SGL_LENGTH, 0));
    let queues = run(controller, Sqe::feature(admin::SET_FEATURES, feature::QUEUES, 1 | 1 << 16), 0);
    assert_eq!((queues.status, queues.result), (NvmeStatus::SUCCESS, 1 | 1 << 16));
    let mut timestamp = Sqe::feature(admin::SET_FEATURES, feature::TIMESTAMP, 0).with_data(Psdt::Sgl, [0, 0]);
    timestamp.0[0] |= 5 << 16;
    controller.submit(4, &timestamp, vec![1; 7], 0, 0);
    let refused = controller.take_completion().unwrap();
    assert_eq!((refused.slot, refused.status.without_flags()), (4, NvmeStatus::INVALID_DATA_SGL_LENGTH));
    controller.submit(4, &timestamp, vec![1; 8], 0, 0);
    assert_eq!(controller.take_completion().unwrap().status, NvmeStatus::SUCCESS);
    for opcode in [admin::CREATE_CQ, admin::CREATE_SQ, admin::DELETE_SQ, admin::DELETE_CQ, admin::DOORBELL_BUFFER, 0x80]
    {
        let refused = run(controller, Sqe::new(opcode, 0), 4096);
        assert_eq!(refused.status.without_flags(), NvmeStatus::INVALID_OPCODE, "{opcode:x}");
    }
}

#[test]
fn discovery_controller_has_the_log() {
    let mut target = subsystem(Some(vec![nqn(HOST)]));
    let connected = target.connect(&command(0, 31), &data(DISCOVERY_NQN, HOST, ANY_CONTROLLER), 0);
    let id = admin_id(connected);
    let io = target.connect(&command(1, 31), &data(DISCOVERY_NQN, HOST, id), 0).unwrap_err();
    assert_eq!(io.result, 42, "it has no I/O queues");
    let controller = &mut target.association(id).unwrap().controller;
    let log = |from: u64, dwords| Sqe::get_log_page(DISCOVERY_LOG, 0, 0, dwords, from);
    let early = run(controller, log(0, 256), 1024);
    assert_eq!(early.status, NvmeStatus::COMMAND_SEQUENCE.with_dnr());
    enable(controller);
    let page = run(controller, Sqe::identify(cns::CONTROLLER, 0, 0, 0), IDENTIFY_BYTES);
    let identify = IdentifyController::parse(&page.data.try_into().unwrap());
    assert_eq!((identify.controller_type, identify.namespaces), (2, 0));
    assert_eq!(identify.subsystem[..DISCOVERY_NQN.len()], *DISCOVERY_NQN.as_bytes());
    let header = run(controller, log(0, 256), 1024).data;
    assert_eq!(DiscoveryHeader::parse(&header), Some(DiscoveryHeader { generation: 1, entries: 2 }));
    for (at, entry) in [(1024, entry()), (2048, referral())] {
        let bytes = run(controller, log(at, 256), 1024).data;
        assert_eq!(DiscoveryEntry::parse(&bytes.try_into().unwrap()), Ok(entry));
    }
    // CVE-2026-64320.
    for offset in [3076, 1 << 32, u64::MAX - 3] {
        assert_eq!(run(controller, log(offset, 256), 1024).status.without_flags(), NvmeStatus::INVALID_FIELD);
    }
    for cns in [cns::NAMESPACE, cns::ACTIVE_NAMESPACES, cns::NAMESPACE_IDS] {
        let refused = run(controller, Sqe::identify(cns, 1, 0, 0), IDENTIFY_BYTES);
        assert_eq!(refused.status.without_flags(), NvmeStatus::INVALID_FIELD, "{cns}");
    }
    let smart = run(controller, Sqe::get_log_page(2, 0, 0, 128, 0), 512);
    assert_eq!(smart.status.without_flags(), NvmeStatus::INVALID_LOG_PAGE);
}

#[test]
fn discovery_service_takes_no_association_from_hosts() {
    let mut target = subsystem(Some(vec![nqn(HOST)]));
    let discover = |target: &mut FabricsSubsystem| {
        target.connect(&command(0, 31), &data(DISCOVERY_NQN, "nqn.stranger", ANY_CONTROLLER), 0)
    };
    (0..3).for_each(|_| _ = admin_id(discover(&mut target)));
    // Who comes later is not kept out: the oldest ends each time.
    for oldest in FIRST_ID..FIRST_ID + 5 {
        let full = discover(&mut target).unwrap();
        assert!(matches!(full, Connected::Replaces(id) if id == oldest), "{full:?}");
        target.remove(oldest);
        assert_eq!(admin_id(discover(&mut target)), oldest + 3);
    }
    (0..3).for_each(|_| _ = admin_id(connect(&mut target, HOST, ANY_CONTROLLER)));
    assert_eq!(connect(&mut target, HOST, ANY_CONTROLLER).unwrap_err(), fabrics_status::CONTROLLER_BUSY.into());
    // All of them are handed over.
    let mut other = subsystem(Some(vec![nqn(HOST)]));
    other.restore(&target.snapshot().unwrap()).unwrap();
    assert_eq!(other.associations().count(), 6);
}

#[test]
fn association_that_has_ended_connects_no_io_queue() {
    let (mut target, id) = associated();
    let io = |target: &mut FabricsSubsystem, qid| target.connect(&command(qid, 31), &data(SUBSYSTEM, HOST, id), 0);
    assert!(matches!(io(&mut target, 1), Ok(Connected::Io(FIRST_ID, _))));
    // Its first queue drains.
    target.association(id).unwrap().controller.end_service(0);
    assert_eq!(io(&mut target, 2).unwrap_err(), NvmeStatus::COMMAND_SEQUENCE.with_dnr().into());
}

#[test]
fn a_host_that_may_not_connect_is_shown_no_subsystem() {
    let mut target = subsystem(Some(vec![]));
    let connected = target.connect(&command(0, 31), &data(DISCOVERY_NQN, HOST, ANY_CONTROLLER), 0);
    let id = admin_id(connected);
    let controller = &mut target.association(id).unwrap().controller;
    enable(controller);
    let log = |from: u64| Sqe::get_log_page(DISCOVERY_LOG, 0, 0, 256, from);
    let header = run(controller, log(0), 1024).data;
    assert_eq!(DiscoveryHeader::parse(&header), Some(DiscoveryHeader { generation: 1, entries: 1 }));
    let bytes = run(controller, log(1024), 1024).data;
    assert_eq!(DiscoveryEntry::parse(&bytes.try_into().unwrap()), Ok(referral()));
}

#[test]
fn events_are_reported_over_fabrics() {
    let (mut target, id) = associated();
    let controller = &mut target.association(id).unwrap().controller;
    assert!(run(controller, Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 8), 0).status.is_success());
    for slot in 10..14 {
        controller.submit(slot, &Sqe::new(admin::ASYNC_EVENT, 0).with_cid(slot + 100), Vec::new(), 0, 0);
    }
    controller.submit(14, &Sqe::new(admin::ASYNC_EVENT, 0).with_cid(1), Vec::new(), 0, 0);
    let fifth = controller.take_completion().unwrap();
    assert_eq!((fifth.slot, fifth.status.without_flags()), (14, NvmeStatus::ASYNC_EVENT_LIMIT));
    let aborted = run(controller, Sqe::abort(0, 113), 0);
    assert_eq!((aborted.slot, aborted.status), (13, NvmeStatus::ABORT_REQUESTED));
    assert_eq!(controller.take_completion().unwrap().result, 0);
    let mut table = NamespaceTable::new(8);
    table.set(1, crate::machine::namespaces().find(1).ok().cloned());
    target.set_namespaces(&table);
    let controller = &mut target.association(id).unwrap().controller;
    controller.poll(0);
    let event = controller.take_completion().unwrap();
    assert_eq!((event.slot, event.result), (10, 2 | 4 << 16));
    // A reset completes the others.
    controller.set_property(PropertySize::Four, CC as u32, 0).unwrap();
    let mut left = [(); 2].map(|()| controller.take_completion().unwrap());
    left.sort_by_key(|completion| completion.slot);
    assert_eq!(
        left.map(|completion| (completion.slot, completion.status)),
        [(11, NvmeStatus::SQ_DELETED), (12, NvmeStatus::SQ_DELETED)]
    );
}

#[test]
fn keep_alive_timeout_ends_the_association() {
    let (mut target, id) = associated();
    let controller = &mut target.association(id).unwrap().controller;
    assert_eq!(controller.deadline_ns(), Some(5000 * NS_PER_MS));
    controller.submit(1, &Sqe::new(admin::KEEP_ALIVE, 0), Vec::new(), 0, 3000 * NS_PER_MS);
    assert!(controller.take_completion().unwrap().status.is_success());
    // A reset keeps the timeout of the Connect.
    controller.set_property(PropertySize::Four, CC as u32, 0).unwrap();
    controller.poll(8000 * NS_PER_MS - 1);
    assert!(!controller.is_expired());
    controller.poll(8000 * NS_PER_MS);
    assert!(controller.is_expired() && controller.deadline_ns().is_none());
}

/// A host counts on the end of the timer, whenever the target looks at it.
#[test]
fn a_keep_alive_long_after_the_timer_ends_the_association() {
    for (late_ns, is_in_time) in [(KEEP_ALIVE_LATE_NS - 1, true), (KEEP_ALIVE_LATE_NS, false)] {
        let (mut target, id) = associated();
        let controller = &mut target.association(id).unwrap().controller;
        let now_ns = 5000 * NS_PER_MS + late_ns;
        assert_eq!(controller.is_overdue(now_ns), !is_in_time);
        controller.submit(1, &Sqe::new(admin::KEEP_ALIVE, 0), Vec::new(), 0, now_ns);
        assert_eq!(controller.take_completion().unwrap().status.is_success(), is_in_time);
        assert_eq!(controller.is_expired(), !is_in_time);
        // Of its end others may count the time from the end of the timer.
        let since_ns = if is_in_time { now_ns } else { 5000 * NS_PER_MS };
        assert_eq!(controller.end_service(now_ns), since_ns);
    }
}

#[test]
fn reset_waits_for_each_queue() {
    let (mut target, id) = associated();
    for qid in [1, 3] {
        assert!(matches!(target.connect(&command(qid, 31), &data(SUBSYSTEM, HOST, id), 0), Ok(Connected::Io(..))));
    }
    let controller = &mut target.association(id).unwrap().controller;
    let status = |controller: &Controller| controller.property(PropertySize::Four, CSTS as u32).unwrap();
    controller.set_property(PropertySize::Four, CC as u32, 0).unwrap();
    let stopped: Vec<u16> = std::iter::from_fn(|| controller.take_request())
        .map(|request| match request {
            ControllerRequest::Queue(qid, ControllerQueueCommand::Stop) => qid,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(stopped, [1, 3]);
    controller.reply(1, ControllerQueueReply::Stopped);
    assert_eq!(status(controller), 1, "a queue still runs");
    controller.reply(3, ControllerQueueReply::Stopped);
    assert_eq!(status(controller), 0);
    // The admin queue goes on, for the next enable.
    enable(controller);
    assert!(matches!(target.connect(&command(1, 31), &data(SUBSYSTEM, HOST, id), 0), Ok(Connected::Io(..))));
    // A queue whose connection is closed can be connected again.
    target.association(id).unwrap().controller.reply(1, ControllerQueueReply::Stopped);
    assert!(matches!(target.connect(&command(1, 31), &data(SUBSYSTEM, HOST, id), 0), Ok(Connected::Io(..))));
}

#[test]
fn controllers_report_ana_groups_and_their_changes() {
    let groups = Arc::new(AnaGroups::default());
    let mut table = NamespaceTable::new(8);
    for (nsid, ana_group) in [(1, 7), (2, 5), (4, 7)] {
        let served = crate::machine::namespaces().find(nsid).unwrap().clone();
        table.set(nsid, Some(ServedNamespace { ana_group, ..served }));
    }
    let mut target = subsystem(None);
    target.set_namespaces(&table.with_ana(Arc::clone(&groups)));
    let id = admin_id(connect(&mut target, HOST, ANY_CONTROLLER));
    let controller = &mut target.association(id).unwrap().controller;
    enable(controller);
    let identify = |controller: &mut Controller, what, nsid| -> [u8; IDENTIFY_BYTES] {
        run(controller, Sqe::identify(what, nsid, 0, 0), IDENTIFY_BYTES).data.try_into().unwrap()
    };
    let found = IdentifyController::parse(&identify(controller, cns::CONTROLLER, 0));
    assert_eq!((found.multipath, found.async_events), (0b1011, 1 << 8 | 1 << 11 | 1 << 20));
    assert_eq!((found.ana, found.ana_group_max, found.ana_groups), (0x5f, 128, 128));
    assert!(found.ana_transition_s > 0);
    let namespace = IdentifyNamespace::parse(&identify(controller, cns::NAMESPACE, 4));
    assert_eq!((namespace.ana_group, namespace.sharing), (7, 1));
    let independent = identify(controller, cns::INDEPENDENT_NAMESPACE, 2);
    assert_eq!((independent[1], &independent[4..8]), (1, &[5, 0, 0, 0][..]));
    let pages = run(controller, Sqe::get_log_page(0, 0, 0, 256, 0), 1024);
    assert_eq!(pages.data[usize::from(ANA_LOG) * 4], 1);

    let log = |controller: &mut Controller| {
        let answer = run(controller, Sqe::get_log_page(ANA_LOG, 0, 0, 64, 0), 256);
        AnaLog::parse(&answer.data).unwrap()
    };
    let group = |id, state, namespaces| AnaGroup { id, state, namespaces };
    let before = vec![group(5, AnaState::Optimized, vec![2]), group(7, AnaState::Optimized, vec![1, 4])];
    assert_eq!(log(controller), AnaLog { change_count: 0, groups: before });

    // Changes are told to hosts that asked for that, one event until the page is read.
    groups.set(7, AnaState::Inaccessible);
    target.ana_changed();
    let controller = &mut target.association(id).unwrap().controller;
    controller.submit(10, &Sqe::new(admin::ASYNC_EVENT, 0).with_cid(100), Vec::new(), 0, 0);
    controller.submit(11, &Sqe::new(admin::ASYNC_EVENT, 0).with_cid(101), Vec::new(), 0, 0);
    controller.poll(0);
    assert_eq!(controller.take_completion(), None, "the notice is not enabled");
    let enabled = Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 11);
    assert!(run(controller, enabled, 0).status.is_success());
    for state in [AnaState::Change, AnaState::NonOptimized] {
        groups.set(7, state);
        target.ana_changed();
        target.association(id).unwrap().controller.poll(0);
    }
    let controller = &mut target.association(id).unwrap().controller;
    let event = controller.take_completion().unwrap();
    assert_eq!((event.slot, event.result), (10, 2 | 3 << 8 | u64::from(ANA_LOG) << 16));
    controller.poll(0);
    assert_eq!(controller.take_completion(), None);
    let after = vec![group(5, AnaState::Optimized, vec![2]), group(7, AnaState::NonOptimized, vec![1, 4])];
    assert_eq!(log(controller), AnaLog { change_count: 3, groups: after });
}
