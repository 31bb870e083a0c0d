//! Encrypted connections of NVMe/TCP hosts, by daemons and programs as a user starts them, and against strangers.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blkyard_nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN, Nqn, fabrics_status};
use blkyard_nvme::tls::{TlsDerivation, TlsIdentityVersion, TlsKey, TlsPsk};
use blkyard_nvme::{Sqe, cns};
use blkyard_tls::TlsChannel;

use crate::common::{Daemon, PATIENCE, inspect, program, run, succeed, wait_until};
use crate::nvme_auth::keep;
use crate::nvme_tcp::{free_address, pattern};
use crate::tcp_host::{TcpQueue, enabled};

const NQN: &str = "nqn.2026-11.test:disk";
const HOST: &str = "nqn.2026-11.test:host";
const OTHER: &str = "nqn.2026-11.test:other";
const OLD: &str = "nqn.2026-11.test:old";
const PLAIN: &str = "nqn.2026-11.test:plain";

fn new_key(folder: &Path, name: &str, hmac: &str) -> String {
    let text = succeed(folder, &["nvme", "gen-tls-key", "-m", hmac]);
    keep(folder, name, &text).trim().to_owned()
}

/// A daemon that knows the keys of HOST, OTHER and OLD, whose key is derived as libnvme did. PLAIN may connect without.
/// `options` are those of its device.
fn serve(folder: &Path, options: &str) -> (Daemon, SocketAddr) {
    let (host, other) = (new_key(folder, "host", "1"), new_key(folder, "other", "0"));
    keep(folder, "host-v1", &format!("{host} v1\n"));
    keep(folder, "host-compat", &format!("{host} compat\n"));
    keep(folder, "keys", &format!("{HOST} {host}\n{OTHER} {other}\n{OLD} {host} compat\n"));
    let address = free_address();
    let export = format!("nvme-tcp://{address}?nqn={NQN}&tls_keys=keys&hosts={PLAIN}");
    fs::File::create(folder.join("a.img")).unwrap().set_len(64 << 20).unwrap();
    let device = format!("file:a.img{options}");
    (Daemon::start(folder, &["--control", "c", "--lanes", "2", "--device", &device, "--export", &export]), address)
}

/// What two ends have sent each other.
type Wire = Arc<Mutex<Vec<u8>>>;

/// An address at which a plain connection becomes an encrypted one to the target, and what is between these two.
fn encrypted(target: SocketAddr, psk: TlsPsk) -> (SocketAddr, Wire) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (address, wire) = (listener.local_addr().unwrap(), Wire::default());
    let seen = Arc::clone(&wire);
    std::thread::spawn(move || {
        while let Ok((plain, _)) = listener.accept() {
            let socket = TcpStream::connect_timeout(&target, PATIENCE).unwrap();
            let channel = TlsChannel::client(&psk.identity, &psk.key).unwrap();
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || _ = carry(plain, socket, channel, &seen));
        }
    });
    (address, wire)
}

/// Carries bytes both ways until an end closes.
fn carry(mut plain: TcpStream, mut socket: TcpStream, mut channel: TlsChannel, seen: &Wire) -> std::io::Result<()> {
    for stream in [&plain, &socket] {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_millis(1)))?;
    }
    let mut bytes = vec![0; 64 << 10];
    let is_early = |error: &std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    loop {
        let is_open = channel.shake_hands();
        let outgoing = channel.outgoing().to_vec();
        channel.sent(outgoing.len());
        seen.lock().unwrap().extend_from_slice(&outgoing);
        socket.write_all(&outgoing)?;
        let Ok(is_open) = is_open else { break };
        if is_open {
            match plain.read(&mut bytes) {
                Ok(0) => break,
                Ok(read) => channel.write(&bytes[..read]).unwrap(),
                Err(error) if is_early(&error) => {}
                Err(_) => break,
            }
        }
        match socket.read(&mut bytes) {
            Ok(0) => break,
            Ok(read) => {
                seen.lock().unwrap().extend_from_slice(&bytes[..read]);
                channel.put(&bytes[..read]);
            }
            Err(error) if is_early(&error) => {}
            Err(_) => break,
        }
        while let Ok(read @ 1..) = channel.read(&mut bytes) {
            plain.write_all(&bytes[..read])?;
        }
    }
    plain.shutdown(Shutdown::Both)
}

/// The key in a file, for a host.
fn psk(folder: &Path, name: &str, host: &str) -> TlsPsk {
    let key = TlsKey::parse(&fs::read_to_string(folder.join(name)).unwrap()).unwrap();
    let names = [host, NQN].map(|name| Nqn::new(name).unwrap());
    key.psk((&names[0], &names[1]), TlsIdentityVersion::V1, TlsDerivation::Standard).unwrap()
}

#[test]
fn a_host_with_its_key_uses_a_disk_and_one_without_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder, "");
    let bench = |options: &str, load: &[&str]| {
        let device = format!("nvme-tcp://{address}/{NQN}?queues=2&host_nqn={options}");
        let words = ["--rw", "randwrite", "--verify", "crc32c", "--size", "8m", "--numjobs", "2"];
        run(folder, &[&["bench", &device][..], &words, load].concat())
    };
    let small = ["--bs", "4k", "--iodepth", "16"];
    let works = |options: &str, load: &[&str]| {
        let output = bench(options, load);
        assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
    };
    works(&format!("{HOST}&tls_key=host"), &small);
    works(&format!("{HOST}&tls_key=host-v1"), &small);
    works(&format!("{HOST}&tls_key=host&header_digest=on&data_digest=on"), &small);
    // More than sockets and lists take at once.
    works(&format!("{OTHER}&tls_key=other"), &["--bs", "128k", "--iodepth", "64"]);
    works(&format!("{OLD}&tls_key=host-compat"), &small);
    works(PLAIN, &small);
    for (options, cause) in [
        (HOST.to_owned(), "Connect failed"),
        (format!("{HOST}&tls_key=other"), "see whether the target knows this host, and has the same key"),
        (format!("{HOST}&tls_key=host-compat"), "see whether the target knows this host, and has the same key"),
        (format!("{PLAIN}&tls_key=host"), "see whether the target knows this host, and has the same key"),
        (format!("{HOST}&tls_key=keys"), "keys: it does not have the form NVMeTLSkey-1:hh:BASE64:"),
    ] {
        let output = bench(&options, &small);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(cause), "{options}: {said}");
        assert!(!said.contains("NVMeTLSkey-1:0"), "no key is printed: {said}");
    }
    // It goes on as before.
    works(&format!("{HOST}&tls_key=host"), &small);
    daemon.stop();
}

#[test]
fn a_key_is_of_one_host_and_what_it_protects_is_not_on_the_wire() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder, "");
    let greeting = daemon.greeting.join("\n");
    assert!(greeting.contains(&format!("-n {NQN} --tls")), "{greeting}");
    // Who has the key of one host has no other name.
    let (by_other, wire) = encrypted(address, psk(folder, "other", OTHER));
    let mut thief = TcpQueue::initialized(by_other);
    let refused = fabrics_status::INVALID_HOST.with_dnr();
    assert_eq!(thief.connect(NQN, HOST, 0, ANY_CONTROLLER, 0).status, refused);
    assert_eq!(thief.connect(NQN, PLAIN, 0, ANY_CONTROLLER, 0).status, refused);
    let mut other = thief;
    let answer = other.connect(NQN, OTHER, 0, ANY_CONTROLLER, 0);
    assert!(answer.status.is_success(), "{answer:?}");
    other.set_config(enabled());
    // Nobody adds a queue to its association without its key.
    let controller = answer.result as u16;
    let mut plain = TcpQueue::initialized(address);
    assert_eq!(plain.connect(NQN, OTHER, 1, controller, 0).status, refused);
    let mut queue = TcpQueue::initialized(by_other);
    assert!(queue.connect(NQN, OTHER, 1, controller, 0).status.is_success());
    queue.write(1, 0, &pattern(4096, 1));
    assert_eq!(queue.read(1, 0, 4096), pattern(4096, 1));
    let wire = wire.lock().unwrap().clone();
    let has = |bytes: &[u8]| wire.windows(bytes.len()).any(|seen| seen == bytes);
    assert!(wire.len() > 2 * 4096 && has(format!("{OTHER} {NQN}").as_bytes()), "the identity is sent in the clear");
    assert!(pattern(4096, 1).chunks(16).all(|piece| !has(piece)), "and the data is not");
    // The discovery service is for all, and says to a host that may use its subsystem what that wants.
    let mut discovery = TcpQueue::initialized(address);
    assert!(discovery.connect(DISCOVERY_NQN, "nqn.2026-11.test:anybody", 0, ANY_CONTROLLER, 0).status.is_success());
    let (ip, port) = (address.ip().to_string(), address.port().to_string());
    let told = succeed(folder, &["nvme", "discover", "-a", &ip, "-s", &port, "-q", HOST]);
    assert!(told.contains("treq:    required") && told.contains("tls13"), "{told}");
    let told = succeed(folder, &["nvme", "discover", "-a", &ip, "-s", &port, "-q", "nqn.2026-11.test:anybody"]);
    assert!(!told.contains(NQN), "a host without a key is shown it: {told}");
    daemon.stop();
}

#[test]
fn a_handshake_that_breaks_off_or_stands_still_costs_no_other_host_anything() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder, "");
    let mut honest = TcpQueue::initialized(encrypted(address, psk(folder, "host", HOST)).0);
    let answer = honest.connect(NQN, HOST, 0, ANY_CONTROLLER, 0);
    assert!(answer.status.is_success());
    honest.set_config(enabled());
    let psk = psk(folder, "host", HOST);
    let mut hello = TlsChannel::client(&psk.identity, &psk.key).unwrap();
    hello.shake_hands().unwrap();
    let hello = hello.outgoing().to_vec();
    let mut silent = Vec::new();
    for len in 1..hello.len() {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello[..len]).unwrap();
        if len % 8 == 0 {
            silent.push(stream);
        }
    }
    // One changed byte in each place, and noise.
    for at in 0..hello.len() {
        let mut bytes = hello.clone();
        bytes[at] ^= 1 << (at % 8);
        let mut stream = TcpStream::connect(address).unwrap();
        // The target may close it meanwhile.
        let _ = stream.write_all(&bytes);
    }
    let mut noise = TcpStream::connect(address).unwrap();
    let _ = noise.write_all(&vec![22; 100_000]);
    noise.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    // An alert, or a reset before it is read.
    let _ = noise.read_to_end(&mut bytes);
    honest.succeed(Sqe::identify(cns::CONTROLLER, 0, 0, 0), &[], 4096);
    drop(silent);
    daemon.stop();
}

#[test]
fn a_takeover_of_an_encrypted_target_is_a_pause() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemon, address) = serve(folder, "?bytes_per_s_max=10000000");
    let device = format!("nvme-tcp://{address}/{NQN}?queues=2&host_nqn={HOST}&tls_key=host&reconnect_delay_s=1");
    let words = ["--rw", "randwrite", "--verify", "crc32c", "--size", "16m", "--numjobs", "2", "--bs", "4k"];
    let mut client = program(folder, &[&["bench", &device][..], &words].concat());
    let mut client = client.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let queues = || inspect(folder, &[])["exports"][0]["session"]["io_queues"].as_u64();
    wait_until("the host has its queues", || queues() == Some(2));
    let log = fs::File::create(folder.join("log")).unwrap();
    let next = Daemon::launch(program(folder, &["serve", "--takeover", "c"]).stderr(log));
    wait_until("the host has its queues again", || queues() == Some(2));
    let status = client.wait().unwrap();
    let mut said = String::new();
    client.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success(), "{said}");
    // The next daemon was given no connection whose bytes it does not understand.
    let log = fs::read_to_string(folder.join("log")).unwrap();
    assert!(log.contains("is connected") && !log.contains("disconnected"), "{log}");
    next.stop();
    drop(daemon);
}
