//! Authentication of NVMe/TCP hosts and targets, by daemons and programs as a user starts them, and against strangers.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use blkyard_nvme::auth::{AuthError, AuthFailure, AuthHost, AuthSecrets, AuthSeed, AuthStep, DhchapSecret};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_AUTHENTICATION, DISCOVERY_NQN, FabricsCommand, Nqn, fabrics_status,
};
use blkyard_nvme::{NvmeStatus, Sqe, cns, io};

use crate::common::{Daemon, inspect, run, succeed};
use crate::nvme_tcp::{free_address, pattern};
use crate::tcp_host::{TcpHost, TcpQueue, enabled};

const NQN: &str = "nqn.2026-11.test:disk";
const HOST: &str = "nqn.2026-11.test:host";
const GUEST: &str = "nqn.2026-11.test:guest";

/// Writes a file that only its owner reads, and returns what is in it.
pub fn keep(folder: &Path, name: &str, text: &str) -> String {
    fs::write(folder.join(name), text).unwrap();
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o600)).unwrap();
    text.to_owned()
}

fn new_secret(folder: &Path, name: &str, words: &[&str]) -> String {
    let text = succeed(folder, &[&["nvme", "gen-dhchap-key"], words].concat());
    keep(folder, name, &text).trim().to_owned()
}

/// A daemon that authenticates HOST, and itself towards it. GUEST may connect as it is.
fn serve(folder: &Path) -> (Daemon, SocketAddr) {
    let host = new_secret(folder, "host", &["-m", "1"]);
    let target = new_secret(folder, "target", &[]);
    new_secret(folder, "other", &["-m", "3"]);
    keep(folder, "secrets", &format!("# of one host\n{HOST} {host} {target}\n"));
    let address = free_address();
    let export = format!("nvme-tcp://{address}?nqn={NQN}&secrets=secrets&hosts={GUEST}");
    fs::File::create(folder.join("a.img")).unwrap().set_len(64 << 20).unwrap();
    (Daemon::start(folder, &["--control", "c", "--lanes", "2", "--device", "a.img", "--export", &export]), address)
}

fn secrets(folder: &Path, host: &str) -> Arc<AuthSecrets> {
    let secret = |name: &str| DhchapSecret::parse(&fs::read_to_string(folder.join(name)).unwrap()).unwrap();
    Arc::new(AuthSecrets { host: secret(host), controller: Some(secret("target")) })
}

/// The authentication of HOST, with the secret of this file.
fn auth(folder: &Path, secret: &str, number: u64) -> AuthHost {
    let name = |name| Nqn::new(name).unwrap();
    AuthHost::new(name(HOST), name(NQN), secrets(folder, secret), &AuthSeed([5; 32]), number)
}

/// An authenticated admin queue with an enabled controller, and its identifier.
fn associate(folder: &Path, address: SocketAddr) -> (TcpQueue, u16) {
    let mut admin = TcpQueue::initialized(address);
    let answer = admin.connect(NQN, HOST, 0, ANY_CONTROLLER, 0);
    assert_eq!((answer.status, answer.result & CONNECT_AUTHENTICATION), (NvmeStatus::SUCCESS, CONNECT_AUTHENTICATION));
    assert_eq!(admin.authenticate(auth(folder, "host", 1)), AuthStep::Done);
    admin.set_config(enabled());
    (admin, answer.result as u16)
}

#[test]
fn a_host_with_its_secret_uses_a_disk_and_one_without_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder);
    let bench = |options: &str| {
        let device = format!("nvme-tcp://{address}/{NQN}?queues=2&host_nqn={options}");
        let load = ["--rw", "randwrite", "--verify", "crc32c", "--size", "4m", "--numjobs", "2", "--iodepth", "8"];
        run(folder, &[&["bench", &device][..], &load].concat())
    };
    for options in ["&secret=host", "&secret=host&ctrl_secret=target", "&secret=host&header_digest=on&data_digest=on"] {
        let output = bench(&format!("{HOST}{options}"));
        assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Named by hosts=, and so trusted without a secret.
    assert!(bench(GUEST).status.success());
    for (options, cause) in [
        (HOST.to_owned(), "the target asks for authentication; name the file with this host's secret"),
        (format!("{HOST}&secret=other"), "the target refuses the authentication"),
        (format!("{HOST}&secret=host&ctrl_secret=other"), "the target does not know its own secret"),
        (format!("{GUEST}&secret=other&ctrl_secret=target"), "the target does not authenticate itself"),
        (format!("{HOST}&ctrl_secret=target"), "ctrl_secret= is given without secret="),
        (format!("{HOST}&secret=secrets"), "secrets is no secret: it does not have the form"),
        ("nqn.2026-11.test:stranger&secret=host".to_owned(), "Connect failed"),
    ] {
        let output = bench(&options);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(cause), "{options}: {said}");
        assert!(!said.contains("DHHC-1:0"), "no secret is printed: {said}");
    }
    // It goes on as before.
    assert!(bench(&format!("{HOST}&secret=host")).status.success());
    daemon.stop();
}

#[test]
fn without_authentication_no_command_of_any_queue_is_executed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder);
    let required = fabrics_status::AUTHENTICATION_REQUIRED.with_dnr();
    let mut stranger = TcpQueue::initialized(address);
    assert!(stranger.connect(NQN, HOST, 0, ANY_CONTROLLER, 0).status.is_success());
    assert_eq!(stranger.run(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096).status, required);
    let get = FabricsCommand::PropertyGet { size: blkyard_nvme::fabrics::PropertySize::Four, offset: 0x1c };
    assert_eq!(stranger.run(get.sqe(), &[], 0).status, required);
    // Who knows all names of an association cannot add a queue to it, or end it.
    let (mut admin, controller) = associate(folder, address);
    let mut own = TcpQueue::initialized(address);
    assert!(own.connect(NQN, HOST, 1, controller, 0).status.is_success());
    assert_eq!(own.authenticate(auth(folder, "host", 2)), AuthStep::Done);
    own.write(1, 0, &pattern(4096, 1));
    let mut queue = TcpQueue::initialized(address);
    let answer = queue.connect(NQN, HOST, 2, controller, 0);
    assert_eq!(answer.result, u64::from(controller) | CONNECT_AUTHENTICATION);
    assert_eq!(queue.run(Sqe::with_blocks(io::READ, 1, 0, 8, 0), &[], 4096).status, required);
    let refused = AuthStep::Failed(AuthError::Refused(AuthFailure::Failed));
    assert_eq!(queue.authenticate(auth(folder, "other", 3)), refused);
    assert_eq!(queue.next(), None);
    let mut thief = TcpQueue::initialized(address);
    assert_eq!(thief.connect(NQN, HOST, 0, controller, 0).result, u64::from(controller) | CONNECT_AUTHENTICATION);
    assert_eq!(thief.authenticate(auth(folder, "other", 4)), refused);
    assert_eq!(thief.next(), None);
    assert_eq!(own.read(1, 0, 4096), pattern(4096, 1));
    admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    // The queue that was not authenticated is free again.
    let mut queue = TcpQueue::initialized(address);
    assert!(queue.connect(NQN, HOST, 2, controller, 0).status.is_success());
    assert_eq!(queue.authenticate(auth(folder, "host", 5)), AuthStep::Done);
    assert_eq!(queue.read(1, 0, 4096), pattern(4096, 1));
    daemon.stop();
}

#[test]
fn an_authenticated_host_ends_its_own_earlier_association() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder);
    let (mut old, controller) = associate(folder, address);
    let mut new = TcpQueue::initialized(address);
    assert!(new.connect(NQN, HOST, 0, controller, 0).status.is_success());
    old.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    assert_eq!(new.authenticate(auth(folder, "host", 2)), AuthStep::Done);
    assert_eq!(old.next(), None);
    new.set_config(enabled());
    new.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    // Once more on a live queue, as Linux does when a secret was changed there; a wrong one ends the association.
    assert_eq!(new.authenticate(auth(folder, "host", 3)), AuthStep::Done);
    new.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    assert!(matches!(new.authenticate(auth(folder, "other", 4)), AuthStep::Failed(_)));
    assert_eq!(new.next(), None);
    daemon.stop();
}

#[test]
fn each_malformed_message_has_its_status_and_costs_no_other_host() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder);
    let mut honest = TcpHost::connect(address, NQN, GUEST, None, 1);
    let begun = || {
        let mut queue = TcpQueue::initialized(address);
        assert!(queue.connect(NQN, HOST, 0, ANY_CONTROLLER, 0).status.is_success());
        queue
    };
    // Lengths that differ from those of the transfer; a room of one byte; no message; one without end.
    let length = NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr();
    for (command, data, room, status) in [
        (FabricsCommand::AuthSend(17), &[0; 16][..], 0, length),
        (FabricsCommand::AuthSend(0), &[], 0, length),
        (FabricsCommand::AuthReceive(4096), &[], 512, length),
        (FabricsCommand::AuthReceive(0), &[], 0, NvmeStatus::INVALID_FIELD.with_dnr()),
        (FabricsCommand::AuthReceive(1), &[], 1, NvmeStatus::INVALID_FIELD.with_dnr()),
    ] {
        let mut queue = begun();
        assert_eq!(queue.run(command.sqe(), data, room).status, status, "{command:?}");
        honest.io[0].write(1, 0, &pattern(4096, 2));
        // It is no end yet.
        assert_eq!(queue.authenticate(auth(folder, "host", 9)), AuthStep::Done, "{command:?}");
    }
    for bytes in [vec![0; 1], vec![0xff; 64], vec![0; 4096]] {
        let mut queue = begun();
        queue.succeed(FabricsCommand::AuthSend(bytes.len() as u32).sqe(), &bytes, 0);
        let failure = queue.succeed(FabricsCommand::AuthReceive(64).sqe(), &[], 64);
        assert_eq!(&failure[..2], &[0, 0xf1], "{failure:?}");
        assert_eq!(queue.next(), None);
    }
    // The discovery service tells nothing that needs it.
    assert_eq!(TcpQueue::initialized(address).connect(DISCOVERY_NQN, HOST, 0, ANY_CONTROLLER, 0).result >> 16, 0);
    assert_eq!(honest.io[0].read(1, 0, 4096), pattern(4096, 2));
    daemon.stop();
}

#[test]
fn a_takeover_asks_no_host_for_its_secret_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder);
    let (mut admin, controller) = associate(folder, address);
    let mut queue = TcpQueue::initialized(address);
    assert!(queue.connect(NQN, HOST, 1, controller, 0).status.is_success());
    assert_eq!(queue.authenticate(auth(folder, "host", 2)), AuthStep::Done);
    queue.write(1, 0, &pattern(4096, 3));
    // One that is in between connects again.
    let mut between = TcpQueue::initialized(address);
    assert!(between.connect(NQN, HOST, 2, controller, 0).status.is_success());
    // From another folder, where a file of the same name has other secrets.
    let elsewhere = folder.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    keep(&elsewhere, "secrets", &format!("{HOST} {}\n", fs::read_to_string(folder.join("other")).unwrap().trim()));
    let next = Daemon::start(&elsewhere, &["--takeover", "../c"]);
    assert_eq!(between.next(), None);
    assert_eq!(queue.read(1, 0, 4096), pattern(4096, 3));
    admin.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    // The next daemon has the secrets, too.
    assert_eq!(admin.authenticate(auth(folder, "host", 3)), AuthStep::Done);
    let mut stranger = TcpQueue::initialized(address);
    assert_eq!(
        stranger.connect(NQN, HOST, 0, ANY_CONTROLLER, 0).result & CONNECT_AUTHENTICATION,
        CONNECT_AUTHENTICATION
    );
    assert_eq!(inspect(folder, &[])["exports"][0]["session"]["io_queues"].as_u64(), Some(1));
    next.stop();
    drop(daemon);
}
