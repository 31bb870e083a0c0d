//! Bring-up, discovery, events, keep-alive and disconnect.

use std::sync::Arc;

use blkyard_mq::{FenceEvidence, Op, QueueCounts, Status};
use blkyard_nvme::auth::{AuthError, AuthFailure, AuthHost, AuthSecrets, AuthSeed, DhchapSecret};
use blkyard_nvme::fabrics::{ANY_CONTROLLER, ConnectCommand, ConnectData, DISCOVERY_NQN, Nqn, fabrics_status};
use blkyard_nvme::tcp::SendList;
use blkyard_nvme::{
    AnaState, ControllerState, Cqe, DiscoveredLog, DiscoveryEntry, DiscoveryKind, DiscoveryLog, FabricsConnect,
    FabricsData, FabricsHostAuth, FabricsHostConfig, FabricsHostError, FabricsHostEvent, FabricsIoQueue,
    FabricsQueueCommand, FabricsQueueReport, NamespaceScope, NvmeStatus, RetryDelays, Sqe, admin,
};
use blkyard_wire::nvme_tcp::{Framing, IcResp, Pdu};

use crate::fabrics::rig::{MS, Rig, config};
use crate::fabrics::target::BLOCKS;

fn ana(states: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes[8] = states.len() as u8;
    for (number, state) in states.iter().enumerate() {
        let mut group = [0; 32];
        (group[0], group[16]) = (number as u8 + 1, *state);
        bytes.extend(group);
    }
    bytes
}

#[test]
fn a_controller_is_brought_up_step_by_step() {
    let mut rig = Rig::live(config(), 2);
    let want = [
        "connect 0 ffff",
        "identify 1",
        "identify 6",
        "feature 7",
        "feature 11",
        "identify 2",
        "identify 3",
        "identify 0",
        "connect 1 1",
        "connect 2 1",
    ];
    assert_eq!(rig.target.log, want);
    assert_eq!((rig.host.queue_counts(), rig.host.controller_id()), (Some(QueueCounts::only(2)), Some(1)));
    assert_eq!(rig.host.namespaces()[0].info.capacity_sectors, BLOCKS);
    rig.submit(1, Op::Write, 3, 0xab);
    rig.submit(2, Op::Write, 4, 0xcd);
    rig.run_until(|rig| rig.ended.len() == 2);
    rig.submit(2, Op::Read, 3, 0);
    rig.submit(1, Op::Read, 4, 0);
    rig.submit(1, Op::Flush, 0, 0);
    rig.run_until(|rig| rig.ended.len() == 5);
    assert_eq!(rig.statuses(), [Status::Ok; 5]);
    assert_eq!((rig.value(2, 3), rig.value(1, 4)), (0xab, 0xcd));
}

#[test]
fn digests_are_used_on_all_queues() {
    let mut config = config();
    (config.header_digest, config.data_digest) = (true, true);
    let mut rig = Rig::live(config, 1);
    rig.submit(1, Op::Write, 3, 0xab);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Ok]);
}

#[test]
fn keep_alive_is_sent_at_half_its_timeout_or_without_traffic() {
    for by_traffic in [false, true] {
        let mut rig = Rig::new(config());
        rig.target.behaviour.by_traffic = by_traffic;
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        rig.run_for(60_000);
        let sent = rig.target.controllers[&1].keep_alives;
        // A minute with 5 s of keep-alive: each 2.5 s, or 1.25 s.
        let want = if by_traffic { 40..=50 } else { 20..=25 };
        assert!(want.contains(&sent), "{sent} with by_traffic {by_traffic}");
        assert_eq!(rig.host.state(), ControllerState::Live);
    }
}

#[test]
fn events_rescan_namespaces_and_read_the_ana_log() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.ana = Some(ana(&[1, 2]));
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    assert_eq!(rig.host.ana_state(1), Some(AnaState::Optimized));
    rig.run_for(100);
    rig.target.behaviour.namespaces = vec![1, 2];
    rig.target.event(2 | 4 << 16);
    rig.run_until(|rig| rig.host.namespaces().len() == 2);
    assert_eq!(
        [1, 2, 3].map(|nsid| rig.host.ana_state(nsid)),
        [Some(AnaState::Optimized), Some(AnaState::NonOptimized), None]
    );
    rig.target.behaviour.ana = Some(ana(&[3, 1]));
    rig.run_for(100);
    rig.target.event(2 | 3 << 8 | 0x0c << 16);
    rig.run_until(|rig| rig.host.ana_state(1) == Some(AnaState::Inaccessible));
    assert_eq!(rig.host.ana_state(2), Some(AnaState::Optimized));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::AnaChanged), 1);
    // In transition for longer than twice ANATT: the association is made anew.
    rig.target.behaviour.ana = Some(ana(&[0xf, 1]));
    rig.run_for(100);
    rig.target.event(2 | 3 << 8 | 0x0c << 16);
    rig.run_until(|rig| rig.count(|event| *event == FabricsHostEvent::Lost(FabricsHostError::AnaTransition)) == 1);
    rig.target.behaviour.ana = Some(ana(&[1, 1]));
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
}

#[test]
fn a_malformed_ana_log_is_no_association() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.ana = Some(ana(&[1, 9]));
    rig.host.start(0);
    rig.run_for(5000);
    assert_eq!(rig.host.error(), Some(FabricsHostError::Malformed("ANA log")));
    assert_eq!(rig.host.state(), ControllerState::Connecting);
}

#[test]
fn a_disconnect_shuts_the_controller_down_first() {
    let mut rig = Rig::live(config(), 2);
    rig.host.disconnect(rig.now_ns);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    assert_eq!((rig.host.state(), rig.target.controllers[&1].shutdowns), (ControllerState::DeletingNoIo, 1));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::Fenced(1, FenceEvidence::AssociationEnded)), 1);
    rig.submit(1, Op::Read, 0, 0);
    rig.run_until(|rig| rig.ended.len() == 1);
    assert_eq!(rig.statuses(), [Status::Path]);
}

#[test]
fn a_hung_target_delays_a_disconnect_for_a_bounded_time() {
    let mut rig = Rig::live(config(), 1);
    rig.target.connections.iter_mut().for_each(|connection| connection.hangs = true);
    let start_ns = rig.now_ns;
    rig.host.disconnect(rig.now_ns);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    assert!(rig.now_ns - start_ns < 12_000 * MS);
    assert_eq!(rig.count(|event| matches!(event, FabricsHostEvent::Fenced(..))), 0, "the target has not answered");
}

#[test]
fn a_final_refusal_ends_it_and_others_are_retried() {
    let refuse = |statuses: &[NvmeStatus]| {
        let mut rig = Rig::new(config());
        rig.target.behaviour.refuse = statuses.iter().map(|status| (0, *status)).collect();
        rig.host.start(0);
        rig.run_for(8000);
        rig
    };
    let rig = refuse(&[fabrics_status::CONTROLLER_BUSY; 5]);
    assert_eq!((rig.host.state(), rig.host.association()), (ControllerState::Live, 6));
    let status = fabrics_status::INVALID_HOST.with_dnr();
    let rig = refuse(&[status]);
    let error = FabricsHostError::Command { command: "Connect", status };
    assert_eq!((rig.host.state(), rig.host.error(), rig.host.association()), (ControllerState::Dead, Some(error), 1));
    assert_eq!(rig.events.last(), Some(&FabricsHostEvent::Over));
}

fn with_secrets(controller: Option<DhchapSecret>) -> FabricsHostConfig {
    let secrets = Arc::new(AuthSecrets { host: DhchapSecret::new(vec![1; 32], None).unwrap(), controller });
    let auth = Some(FabricsHostAuth { secrets, seed: AuthSeed([1; 32]) });
    FabricsHostConfig { auth, ..config() }
}

#[test]
fn a_target_that_wants_authentication_is_left() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.authenticates = Some(0);
    rig.host.start(0);
    rig.run_for(1000);
    assert_eq!(rig.host.error(), Some(FabricsHostError::Authentication(AuthError::NoSecret)));
}

#[test]
fn a_target_that_closes_when_it_is_told_that_it_fails_does_not_hide_why() {
    let mut rig = Rig::new(with_secrets(None));
    rig.target.behaviour.authenticates = Some(0);
    rig.host.start(0);
    rig.run_for(1000);
    let error = FabricsHostError::Authentication(AuthError::Malformed(AuthFailure::Protocol));
    assert_eq!((rig.host.state(), rig.host.error(), rig.host.association()), (ControllerState::Dead, Some(error), 1));
}

#[test]
fn an_io_queue_whose_authentication_fails_is_refused_and_not_lost() {
    let mut rig = Rig::live(with_secrets(None), 0);
    rig.target.behaviour.authenticates = Some(1);
    rig.open(1);
    rig.run_until(|rig| rig.host.error().is_some());
    let status = fabrics_status::AUTHENTICATION_REQUIRED.with_dnr();
    assert_eq!(rig.host.error(), Some(FabricsHostError::QueueRefused { qid: 1, status }));
}

/// Otherwise whoever answers at its address would get the data.
#[test]
fn a_target_that_is_to_authenticate_itself_and_asks_for_nothing_is_left() {
    let secret = DhchapSecret::new(vec![1; 32], None).unwrap();
    for (controller, error) in [(None, None), (Some(secret), Some(AuthError::OneSided))] {
        let mut rig = Rig::new(with_secrets(controller));
        rig.host.start(0);
        rig.run_for(1000);
        assert_eq!(rig.host.error(), error.map(FabricsHostError::Authentication));
    }
}

/// The admin queue may have reached the target, and this one somebody else.
#[test]
fn an_io_queue_of_a_target_that_is_to_authenticate_itself_and_asks_for_nothing_is_refused() {
    let nqn = |name| Nqn::new(name).unwrap();
    let [host, subsystem] = [nqn("nqn.2026-11.example:host"), nqn("nqn.2026-11.example:disk")];
    let secret = || DhchapSecret::new(vec![1; 32], None).unwrap();
    let status = fabrics_status::AUTHENTICATION_REQUIRED.with_dnr();
    let refused = FabricsQueueReport::Refused { status };
    for (controller, report) in [(None, FabricsQueueReport::Connected), (Some(secret()), refused)] {
        let secrets = Arc::new(AuthSecrets { host: secret(), controller });
        let auth = AuthHost::new(host.clone(), subsystem.clone(), secrets, &AuthSeed([1; 32]), 1);
        let options = Rig::new(config()).host.queue_options(1, 1, false);
        let mut queue = FabricsIoQueue::new(options, [].into()).unwrap();
        let data = ConnectData { host_id: [7; 16], controller_id: 1, subsystem: subsystem.clone(), host: host.clone() };
        queue.command(FabricsQueueCommand::Connect(Box::new(FabricsConnect {
            association: 1,
            command: ConnectCommand { qid: 1, sq_size: 1, no_flow_control: true, keep_alive_ms: 0 },
            data,
            auth: Some(auth),
            in_capsule: 8192,
            delays: RetryDelays::default(),
            connect_ns: MS,
        })));
        queue.opened(0);
        let initialized = IcResp { alignment: 0, header_digest: false, data_digest: false, maxh2cdata: 4096 };
        let accepted = Cqe::new(0, 0, u16::MAX, NvmeStatus::SUCCESS, 1, false);
        for answer in [Pdu::IcResp(initialized), Pdu::CapsuleResp(accepted.0)] {
            let mut list = SendList::new(SendList::PIECES_MIN);
            let sent = queue.fill(&mut list).unwrap();
            queue.sent(sent);
            queue.receive(answer.encode(Framing::PLAIN).bytes());
        }
        assert_eq!(queue.take_report(), Some((1, report)));
    }
}

#[test]
fn a_controller_that_does_not_become_ready_is_tried_again() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.never_ready = true;
    rig.host.start(0);
    rig.run_for(20_000);
    assert_eq!(rig.host.state(), ControllerState::Connecting);
    assert!((4..=14).contains(&rig.host.association()), "{}", rig.host.association());
    rig.target.behaviour.never_ready = false;
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
}

/// Each answer comes within the time of its command, and all together would take hours.
#[test]
fn a_bring_up_with_slow_answers_ends_after_its_time() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.identify_ns = 2000 * MS;
    rig.target.behaviour.namespaces = (1..=4096).collect();
    rig.host.start(0);
    rig.run_until(|rig| rig.host.error().is_some());
    let error = rig.host.error().unwrap();
    let text = "NVMe/TCP: the controller was not brought up within 60s, and Identify (namespaces) is not complete; see why \
                the target answers slowly, and name the namespace by ?namespace=N";
    assert_eq!(error.to_string(), text);
    assert!((60_000 * MS..61_000 * MS).contains(&rig.now_ns), "{} ms", rig.now_ns / MS);
    assert_eq!(rig.host.state(), ControllerState::Connecting);
    rig.run_until(|rig| rig.host.association() == 3);
    // The next attempts end in the same way, until the target recovers.
    rig.target.behaviour.identify_ns = 0;
    rig.target.behaviour.namespaces = vec![1];
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    rig.run_for(200_000);
    assert_eq!((rig.host.state(), rig.host.association()), (ControllerState::Live, 3));
}

#[test]
fn of_many_namespaces_only_those_in_scope_are_identified() {
    let identified = |scope, nsids: &[u32]| {
        let mut rig = Rig::new(FabricsHostConfig { scope, ..config() });
        rig.target.behaviour.namespaces = nsids.to_vec();
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        let found: Vec<_> = rig.host.namespaces().iter().map(|found| found.namespace.nsid).collect();
        let count = |name| rig.target.log.iter().filter(|command| *command == name).count();
        (found, rig.host.active_namespaces().to_vec(), ["identify 2", "identify 3", "identify 0"].map(count))
    };
    let (few, many) = ([3, 5, 9], (1..=2000).collect::<Vec<_>>());
    assert_eq!(identified(NamespaceScope::All, &few), (few.to_vec(), few.to_vec(), [1, 3, 3]));
    assert_eq!(identified(NamespaceScope::One(5), &few), (vec![5], few.to_vec(), [1, 1, 1]));
    assert_eq!(identified(NamespaceScope::One(4), &few), (vec![], few.to_vec(), [1, 0, 0]));
    assert_eq!(identified(NamespaceScope::One(1999), &many), (vec![1999], many.clone(), [2, 1, 1]));
    assert_eq!(identified(NamespaceScope::Nothing, &many), (vec![], vec![], [0, 0, 0]));
}

#[test]
fn scope_that_is_narrowed_leaves_other_namespaces_out() {
    let mut rig = Rig::new(config());
    rig.target.behaviour.namespaces = vec![1, 2, 3];
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    rig.host.narrow_scope(2);
    let found = |rig: &Rig| rig.host.namespaces().iter().map(|found| found.namespace.nsid).collect::<Vec<_>>();
    assert_eq!(found(&rig), [2]);
    rig.run_for(100);
    let (log, events) = (rig.target.log.len(), rig.events.len());
    rig.target.event(2 | 4 << 16);
    rig.run_for(100);
    assert_eq!(rig.target.log[log..], ["log 4", "identify 2", "identify 3", "identify 0"]);
    assert_eq!((rig.events.len(), found(&rig)), (events, vec![2]), "nothing has changed");
    rig.target.behaviour.namespaces = vec![1, 3];
    rig.target.event(2 | 4 << 16);
    rig.run_until(|rig| rig.host.namespaces().is_empty());
    assert_eq!(rig.events.last(), Some(&FabricsHostEvent::NamespacesChanged));
}

#[test]
fn time_to_become_ready_does_not_count_for_a_bring_up() {
    // The controller names 1.5 s for becoming ready. Five commands follow, of a quarter of a second or a whole one.
    for (identify_ms, is_live) in [(50, true), (200, false)] {
        let mut config = config();
        config.bring_up_ns = 800 * MS;
        let mut rig = Rig::new(config);
        rig.target.behaviour.ready_ns = 1400 * MS;
        rig.target.behaviour.identify_ns = identify_ms * MS;
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live || rig.host.error().is_some());
        assert_eq!(rig.host.state() == ControllerState::Live, is_live, "{identify_ms} ms: {:?}", rig.host.error());
        assert!(rig.now_ns < 2500 * MS, "{identify_ms} ms");
    }
}

#[test]
fn a_slow_bring_up_that_is_given_up_after_ctrl_loss_is_told_as_such() {
    let mut config = config();
    config.ctrl_loss_ns = Some(4000 * MS);
    let mut rig = Rig::new(config);
    rig.target.behaviour.identify_ns = 10_000 * MS;
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Dead);
    assert_eq!(rig.host.error(), Some(FabricsHostError::Timeout("Identify (controller)")));
}

#[test]
fn admin_commands_of_the_user_end_also_with_the_association() {
    let mut rig = Rig::live(config(), 0);
    let identify = Sqe::identify(1, 0, 0, 0);
    rig.host.submit_admin(identify, FabricsData::Read(4096), 5, 1000 * MS, rig.now_ns).unwrap();
    rig.run_until(|rig| rig.count(|event| matches!(event, FabricsHostEvent::Completed { user: 5, .. })) == 1);
    let event = |rig: &Rig| rig.events.last().cloned().unwrap();
    assert!(matches!(event(&rig), FabricsHostEvent::Completed { data: Some(_), status: NvmeStatus::SUCCESS, .. }));
    // An event request never ends by itself.
    rig.host.submit_admin(Sqe::new(admin::ASYNC_EVENT, 0), FabricsData::None, 6, 100_000 * MS, rig.now_ns).unwrap();
    rig.run_for(100);
    rig.cut();
    rig.run_until(|rig| rig.count(|event| matches!(event, FabricsHostEvent::Completed { user: 6, .. })) == 1);
    assert_eq!(rig.host.submit_admin(identify, FabricsData::None, 7, 1, rig.now_ns), Err(7));
}

#[test]
fn a_discovery_log_is_read_in_parts_and_unusable_entries_are_counted() {
    let entry = DiscoveryEntry {
        kind: DiscoveryKind::Subsystem,
        subsystem: Nqn::new("nqn.2026-11.example:disk").unwrap(),
        address: "192.0.2.1".parse().unwrap(),
        port: 4420,
        port_id: 1,
        controller_id: ANY_CONTROLLER,
        admin_entries: 32,
        no_flow_control: false,
        secure_channel: blkyard_nvme::SecureChannel::NotRequired,
        has_tls: false,
    };
    for (count, mdts) in [(0, 0), (1, 0), (64, 0), (130, 0), (130, 1)] {
        let mut config = config();
        config.subsystem = Nqn::new(DISCOVERY_NQN).unwrap();
        let mut rig = Rig::new(config);
        let entries: Vec<_> = (0..count).map(|port| DiscoveryEntry { port: port + 1, ..entry.clone() }).collect();
        rig.target.behaviour.discovery = Some(DiscoveryLog::new(7, &entries));
        rig.target.behaviour.mdts = mdts;
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        let found = rig.events.iter().find_map(|event| match event {
            FabricsHostEvent::Discovered(found) => Some(found.clone()),
            _ => None,
        });
        assert_eq!(found, Some(DiscoveredLog { generation: 7, entries, others: 0 }), "{count} entries");
    }
}
