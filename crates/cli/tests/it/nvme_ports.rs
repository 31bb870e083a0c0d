//! Several ports of one NVMe subsystem in a daemon: two paths to the same namespaces, with ANA states that change
//! while hosts are connected.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use blkyard_nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN};
use blkyard_nvme::{
    ANA_LOG, AnaLog, AnaState, DISCOVERY_LOG, DiscoveryEntry, DiscoveryKind, IdentifyController, IdentifyNamespace,
    NvmeStatus, Sqe, admin, cns, feature, io,
};
use blkyard_wire::nvme_tcp::Pdu;

use crate::common::{Daemon, inspect, run, succeed, wait_until};
use crate::tcp_host::{TcpHost, TcpQueue, enabled};

const NQN: &str = "nqn.2026-11.test:disk";
const HOST: &str = "nqn.2026-11.test:host";

/// A daemon with two ports of a subsystem, and their addresses.
fn two_ports(folder: &Path, options: [&str; 2]) -> (Daemon, [SocketAddr; 2]) {
    let exports = options.map(|options| format!("nvme-tcp://127.0.0.1:0?nqn={NQN}{options}"));
    let words = ["--control", "c", "--device", "ram:16M?share=on", "--export", &exports[0], "--export", &exports[1]];
    let daemon = Daemon::start(folder, &words);
    let address = |port: usize| {
        let tree = inspect(folder, &[]);
        tree["exports"][port]["session"]["target"]["address"].as_str().map(|address| address.parse().unwrap())
    };
    wait_until("both ports listen", || address(0).is_some() && address(1).is_some());
    (daemon, [0, 1].map(|port| address(port).unwrap()))
}

fn identify(host: &mut TcpHost, what: u8, nsid: u32) -> [u8; 4096] {
    host.admin.succeed(Sqe::identify(what, nsid, 0, 0), &[], 4096).try_into().unwrap()
}

/// State of each ANA group at a port, as a host reads it.
fn states(host: &mut TcpHost) -> Vec<(u32, AnaState)> {
    let page = host.admin.succeed(Sqe::get_log_page(ANA_LOG, 0, 0, 64, 0), &[], 256);
    AnaLog::parse(&page).unwrap().groups.iter().map(|group| (group.id, group.state)).collect()
}

#[test]
fn two_ports_are_one_subsystem() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), [""; 2]);
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 1));
    assert_ne!(hosts[0].controller, hosts[1].controller);
    let mut known = None;
    for host in &mut hosts {
        let controller = IdentifyController::parse(&identify(host, cns::CONTROLLER, 0));
        assert_eq!((controller.controller_id, controller.multipath), (host.controller, 0b1011));
        let namespace = IdentifyNamespace::parse(&identify(host, cns::NAMESPACE, 1));
        assert_eq!((namespace.sharing, namespace.ana_group), (1, 1));
        let same = (controller.serial, controller.subsystem, identify(host, cns::NAMESPACE_IDS, 1));
        assert_eq!(*known.get_or_insert(same), same);
    }
    hosts[0].io[0].write(1, 8, &[7; 4096]);
    assert_eq!(hosts[1].io[0].read(1, 8, 4096), [7; 4096]);
    daemon.stop();
}

#[test]
fn each_command_is_answered_while_its_queue_is_parked() {
    // Commands that are refused at once, at any time after the last one: also when the lane, which has another queue
    // that is busier, parks this one and then falls asleep.
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), [""; 2]);
    let mut hosts = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 2));
    for round in 0..4000_u32 {
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(u64::from(round / 4 % 64)) {
            std::hint::spin_loop();
        }
        let queue = &mut hosts[round as usize % 2].io[round as usize / 2 % 2];
        assert_eq!(queue.run(Sqe::new(0x99, 1), &[], 0).status, NvmeStatus::INVALID_OPCODE.with_dnr());
    }
    daemon.stop();
}

#[test]
fn each_port_names_all_ports_of_its_subsystem() {
    let folder = tempfile::tempdir().unwrap();
    let (daemon, addresses) = two_ports(folder.path(), ["", ""]);
    for [asked, other] in [addresses, [addresses[1], addresses[0]]] {
        let mut queue = TcpQueue::initialized(asked);
        assert!(queue.connect(DISCOVERY_NQN, HOST, 0, ANY_CONTROLLER, 0).status.is_success());
        queue.set_config(enabled());
        let log = queue.succeed(Sqe::get_log_page(DISCOVERY_LOG, 0, 0, 768, 0), &[], 3072);
        let entries =
            log.chunks_exact(1024).skip(1).map(|entry| DiscoveryEntry::parse(entry.try_into().unwrap()).unwrap());
        let named: Vec<_> = entries.map(|entry| (entry.kind, (entry.address, entry.port).into())).collect();
        assert_eq!(named, [(DiscoveryKind::Subsystem, asked), (DiscoveryKind::Subsystem, other)]);
    }
    daemon.stop();
}

#[test]
fn nvme_discover_shows_what_a_port_names() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, [one, other]) = two_ports(folder, ["&referrals=127.0.0.9:8009", ""]);
    let ask = |port: u16, more: &[&str]| {
        let port = port.to_string();
        run(folder, &[&["nvme", "discover", "-a", "127.0.0.1", "-s", &port, "-q", HOST], more].concat())
    };
    let said = ask(one.port(), &[]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let entry = |number: u32, subtype: &str, port: u16, nqn: &str, address: &str| {
        format!(
            "=====Discovery Log Entry {number}======\ntrtype:  tcp\nadrfam:  ipv4\nsubtype: {subtype}\n\
             treq:    not required, sq flow control disable supported\nportid:  {port}\ntrsvcid: {port}\n\
             subnqn:  {nqn}\ntraddr:  {address}\nsectype: none\n"
        )
    };
    let expected = [
        "\nDiscovery Log Number of Records 3, Generation counter 1\n".to_owned(),
        entry(0, "nvme subsystem", one.port(), NQN, "127.0.0.1"),
        entry(1, "nvme subsystem", other.port(), NQN, "127.0.0.1"),
        entry(2, "discovery subsystem referral", 8009, DISCOVERY_NQN, "127.0.0.9"),
    ];
    assert_eq!(String::from_utf8(said.stdout).unwrap(), expected.concat());
    let said: serde_json::Value = serde_json::from_slice(&ask(other.port(), &["-o", "json"]).stdout).unwrap();
    let records = said["records"].as_array().unwrap();
    let ports: Vec<_> = records.iter().map(|record| record["trsvcid"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ports, [other.port().to_string(), one.port().to_string()]);
    assert_eq!((&said["genctr"], &records[0]["subnqn"]), (&1.into(), &NQN.into()));
    let refused = |port: u16, more: &[&str]| {
        let said = ask(port, more);
        assert_eq!(said.status.code(), Some(1));
        String::from_utf8(said.stderr).unwrap()
    };
    // Its backlog takes connections, and nobody answers them.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let message = refused(port, &["--timeout", "300"]);
    assert!(message.contains("no discovery log within 300ms; check that it is an NVMe/TCP port"), "{message}");
    assert!(refused(one.port(), &["-t", "rdma"]).contains("-t rdma: this transport is not supported; use -t tcp"));
    let message = refused(1, &[]);
    assert!(message.contains("127.0.0.1:1: cannot connect"), "{message}");
    daemon.stop();
}

#[test]
fn ana_state_of_a_port_changes_while_hosts_are_connected() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, addresses) = two_ports(folder, ["&ana_group=3", "&ana_group=3&ana_state=non-optimized"]);
    let [mut one, mut other] = addresses.map(|address| TcpHost::connect(address, NQN, HOST, None, 2));
    assert_eq!(states(&mut one), [(3, AnaState::Optimized)]);
    assert_eq!(states(&mut other), [(3, AnaState::NonOptimized)]);
    for host in [&mut one, &mut other] {
        host.admin.succeed(Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 11), &[], 0);
        host.io[1].write(1, 0, &[5; 4096]);
    }
    for (state, status) in [
        (AnaState::Inaccessible, NvmeStatus::ANA_INACCESSIBLE),
        (AnaState::Change, NvmeStatus::ANA_TRANSITION),
        (AnaState::PersistentLoss, NvmeStatus::ANA_LOSS),
        (AnaState::Optimized, NvmeStatus::SUCCESS),
    ] {
        one.admin.submit(Sqe::new(admin::ASYNC_EVENT, 0), &[], 0);
        let setting = format!("ana_state={}", state.name());
        let said = succeed(folder, &["set", "--control", "c", "export:0", &setting]);
        assert!(said.contains(&format!("ANA group 3 is {}; hosts are notified", state.name())), "{said}");
        // In force at once, on each queue, and at this port only.
        for queue in &mut one.io {
            assert_eq!(queue.run(Sqe::with_blocks(io::WRITE, 1, 0, 8, 0), &[6; 4096], 0).status, status);
            assert_eq!(queue.run(Sqe::new(io::FLUSH, 1), &[], 0).status, status);
        }
        let expected = if status.is_success() { 6 } else { 5 };
        assert_eq!(other.io[0].read(1, 0, 4096), [expected; 4096], "{state:?}");
        let Some((Pdu::CapsuleResp(cqe), _)) = one.admin.next() else { panic!("no event") };
        assert_eq!(cqe[0] as u32, 2 | 3 << 8 | u32::from(ANA_LOG) << 16);
        assert_eq!(states(&mut one), [(3, state)]);
        let ana = &inspect(folder, &[])["exports"][0]["session"]["target"]["ana"];
        assert_eq!((ana[0]["group"].as_u64(), ana[0]["state"].as_str()), (Some(3), Some(state.name())));
    }
    let text = succeed(folder, &["inspect", "--control", "c"]);
    assert!(text.contains("ANA group 3 is non-optimized; namespaces 1"), "{text}");
    for (words, why) in [
        (&["ana_state=lost"][..], "persistent-loss"),
        (&["ana_group=3"], "add ana_state"),
        (&["ana_group=4", "ana_state=change"], "in [3]"),
    ] {
        let refused = run(folder, &[&["set", "--control", "c", "export:1"], words].concat());
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && error.contains(why), "{error}");
    }
    assert_eq!(states(&mut other), [(3, AnaState::NonOptimized)]);
    daemon.stop();
}
