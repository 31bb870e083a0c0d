//! The receiver between a peer and a daemon: descriptors that pass, refusals, and waits.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use blkyard_os::{AcceptedConnection, Receiver};
use blkyard_sys::{PASSED_FDS_MAX, PollFd, PollFlags, recv_fds, send_fds, wait_for};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::net::{RecvFlags, SendFlags, sockopt};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// A listening socket and its receiver.
struct Ground {
    receiver: Receiver,
    listener: UnixListener,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Ground {
    fn new() -> Ground {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Ground { receiver: Receiver::thread().unwrap(), listener, path, _folder: folder }
    }

    /// The same where the daemon has connected to the peer.
    fn connect_to_peer(&self) -> (UnixStream, UnixStream) {
        let daemon = self.receiver.connect(&self.path).unwrap().unwrap().stream;
        let peer = self.listener.accept().unwrap().0;
        [&peer, &daemon].into_iter().for_each(|end| end.set_read_timeout(Some(PATIENCE)).unwrap());
        (peer, daemon)
    }

    /// A peer's end, and the daemon's.
    fn connect(&self) -> (UnixStream, UnixStream) {
        let peer = UnixStream::connect(&self.path).unwrap();
        let AcceptedConnection { stream, uid, pid } =
            self.receiver.accept(&self.path, self.listener.as_fd()).unwrap().unwrap();
        assert_eq!((uid, pid), (rustix::process::getuid().as_raw(), std::process::id().cast_signed()));
        [&peer, &stream].into_iter().for_each(|end| end.set_read_timeout(Some(PATIENCE)).unwrap());
        (peer, stream)
    }
}

fn put(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    assert_eq!(send_fds(to, bytes, fds, SendFlags::empty()), Ok(bytes.len()));
}

fn get(from: &UnixStream, bytes_max: usize) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; bytes_max];
    let received = recv_fds(from, &mut bytes, PASSED_FDS_MAX, RecvFlags::empty()).unwrap();
    bytes.truncate(received.bytes);
    (bytes, received.fds)
}

fn same(one: impl AsFd, other: impl AsFd) -> bool {
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino, stat.st_rdev);
    identity(fstat(one).unwrap()) == identity(fstat(other).unwrap())
}

/// A TCP socket whose close lingers, and its other end, which reads nothing.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    while (&near).write(&[7; 1 << 14]).is_ok() {}
    near.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&near, Some(PATIENCE * 10)).unwrap();
    (near, far)
}

#[test]
fn bytes_pass_both_ways_and_safe_descriptors_with_them() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let memory = memfd_create("m", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    put(&peer, b"plain", &[]);
    put(&peer, b"with", &[memory.as_fd(), event.as_fd()]);
    assert_eq!(get(&daemon, 5).0, b"plain");
    let (bytes, files) = get(&daemon, 100);
    assert!(bytes == b"with" && files.len() == 2 && same(&files[0], &memory));
    rustix::io::write(&files[1], &3_u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3);
    // Descriptors of the daemon are trusted.
    let (pipe, _writer) = std::io::pipe().unwrap();
    put(&daemon, b"answer", &[pipe.as_fd()]);
    let (bytes, files) = get(&peer, 100);
    assert!(bytes == b"answer" && same(&files[0], &pipe));
}

#[test]
fn other_descriptors_are_replaced_by_dev_null() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let (near, _far) = lingering();
    put(&peer, b"x", &[near.as_fd()]);
    let (bytes, files) = get(&daemon, 100);
    assert!(bytes == b"x" && same(&files[0], std::fs::File::open("/dev/null").unwrap()));
}

#[test]
fn a_unix_stream_is_replaced_by_one_that_leads_there() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let (theirs, mut far) = UnixStream::pair().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    put(&peer, b"x", &[theirs.as_fd()]);
    drop(theirs);
    let (_, mut files) = get(&daemon, 100);
    let mut ours = UnixStream::from(files.remove(0));
    // More than any buffer on the way has room for.
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
    let expected = sent.clone();
    let sender = std::thread::spawn(move || {
        ours.write_all(&sent).unwrap();
        ours
    });
    let mut came = vec![0; expected.len()];
    far.read_exact(&mut came).unwrap();
    assert!(came == expected);
    let mut ours = sender.join().unwrap();
    drop(far);
    let begin = Instant::now();
    while ours.write_all(b"x").is_ok() {
        assert!(begin.elapsed() < PATIENCE, "the daemon never learns that its channel is gone");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn stream_that_the_daemon_closes_ends_for_the_peer() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let (theirs, mut far) = UnixStream::pair().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    put(&peer, b"x", &[theirs.as_fd()]);
    drop(theirs);
    let (_, mut files) = get(&daemon, 1);
    UnixStream::from(files.remove(0)).write_all(b"last").unwrap();
    let mut said = Vec::new();
    far.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"last");
}

#[test]
fn streams_of_a_session_are_bounded_for_good() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let null = std::fs::File::open("/dev/null").unwrap();
    for count in 0..20 {
        let (theirs, mut far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        put(&peer, b"x", &[theirs.as_fd()]);
        drop(theirs);
        let (_, files) = get(&daemon, 1);
        assert_eq!(same(&files[0], &null), count >= 16, "stream {count}");
        drop(files);
        if count < 16 {
            assert_eq!(far.read(&mut [0; 1]).unwrap(), 0, "stream {count}");
        }
    }
}

#[test]
fn peer_that_sends_many_refused_descriptors_is_let_go() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let null = std::fs::File::open("/dev/null").unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    for _ in 0..64 {
        put(&peer, b"x", &[pipe.as_fd()]);
        let (bytes, files) = get(&daemon, 1);
        assert!(bytes == b"x" && same(&files[0], &null));
    }
    put(&peer, b"x", &[pipe.as_fd()]);
    assert_eq!((&daemon).read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn either_side_sees_the_other_leave() {
    let ground = Ground::new();
    let (peer, mut daemon) = ground.connect();
    put(&peer, b"last", &[]);
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = Vec::new();
    daemon.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"last");
    daemon.write_all(b"answer").unwrap();
    drop(daemon);
    (&peer).read_to_end(&mut said).unwrap();
    assert_eq!(said, b"lastanswer");
    let (peer, daemon) = ground.connect();
    daemon.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!((&peer).read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn a_socket_that_lingers_keeps_nobody_from_anything() {
    let ground = Ground::new();
    let begin = Instant::now();
    let mut held = Vec::new();
    for way in ["taken", "unread", "backlog"] {
        for _ in 0..20 {
            let (near, far) = lingering();
            held.push(far);
            let peer = UnixStream::connect(&ground.path).unwrap();
            put(&peer, b"x", &[near.as_fd()]);
            drop(std::thread::spawn(move || drop(near)));
            if way == "backlog" {
                continue;
            }
            let daemon = ground.receiver.accept(&ground.path, ground.listener.as_fd()).unwrap().unwrap().stream;
            if way == "taken" {
                assert_eq!(get(&daemon, 1).1.len(), 1);
            }
        }
    }
    let Ground { receiver, listener, path, .. } = ground;
    receiver.close(&path, listener.into());
    drop(receiver);
    assert!(begin.elapsed() < PATIENCE, "somebody lingered");
    // A full backlog is refused with another error than a socket that is closed.
    let is_closed = || UnixStream::connect(&path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    while !is_closed() {
        assert!(begin.elapsed() < PATIENCE, "the socket stays open");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_a_connection_there_is_nothing_to_take() {
    let ground = Ground::new();
    assert!(ground.receiver.accept(&ground.path, ground.listener.as_fd()).unwrap().is_none());
    drop(ground.connect());
}

#[test]
fn a_peer_that_never_reads_is_left_with_the_daemon() {
    let ground = Ground::new();
    let (peer, mut daemon) = ground.connect();
    daemon.set_nonblocking(true).unwrap();
    while daemon.write(&[1; 4096]).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(daemon);
    // The session gives up, and with it goes the last of the other end.
    let begin = Instant::now();
    while rustix::net::send(&peer, b"x", SendFlags::NOSIGNAL).is_ok() {
        assert!(begin.elapsed() < PATIENCE, "its session never ends");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Descriptors that lie unread in a socket of this process.
fn unread_files(socket: &UnixStream) -> usize {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", socket.as_raw_fd())).unwrap();
    info.lines().find_map(|line| line.strip_prefix("scm_fds:")).unwrap().trim().parse().unwrap()
}

#[test]
fn few_descriptors_are_in_flight_whoever_does_not_read() {
    const PIECES: usize = 40;
    const FILES: usize = 30;
    let ground = Ground::new();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for to_peer in [false, true] {
        let (peer, daemon) = ground.connect();
        let (from, to) = if to_peer { (daemon, peer) } else { (peer, daemon) };
        (0..PIECES).for_each(|_| put(&from, b"x", &[event.as_fd(); FILES]));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            assert!(unread_files(&to) <= 32, "{} descriptors are in flight", unread_files(&to));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(unread_files(&to) > 0);
        let mut came = 0;
        for _ in 0..PIECES {
            let (bytes, files) = get(&to, 1);
            assert!(bytes == b"x" && unread_files(&to) <= 32);
            came += files.len();
        }
        assert_eq!(came, PIECES * FILES, "each comes once it is read");
    }
}

#[test]
fn peer_that_sends_more_descriptors_than_a_message_has_is_let_go() {
    let ground = Ground::new();
    let (peer, mut daemon) = ground.connect();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    put(&peer, b"x", &[event.as_fd(); 66]);
    assert_eq!(daemon.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!((&peer).read(&mut [0; 1]).unwrap_or(0), 0);
    let (peer, daemon) = ground.connect();
    put(&peer, b"x", &[event.as_fd(); 32]);
    assert_eq!(get(&daemon, 1).1.len(), 32);
}

#[test]
fn message_with_an_eventfd_for_each_vector_comes_alone() {
    const VECTORS: usize = 65;
    let ground = Ground::new();
    let (peer, daemon) = ground.connect();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for files in [1, VECTORS, VECTORS, 1] {
        put(&peer, b"x", &[event.as_fd(); VECTORS][..files]);
    }
    for files in [1, VECTORS, VECTORS, 1] {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(50) {
            assert!(unread_files(&daemon) <= VECTORS, "{} descriptors are in flight", unread_files(&daemon));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(get(&daemon, 1).1.len(), files);
    }
}

#[test]
fn a_connection_to_a_peer_is_closed_in_halves() {
    let ground = Ground::new();
    let (mut peer, mut daemon) = ground.connect_to_peer();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    put(&daemon, b"question", &[event.as_fd()]);
    let (bytes, files) = get(&peer, 100);
    assert!(bytes == b"question" && same(&files[0], &event));
    daemon.write_all(b"last").unwrap();
    daemon.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = Vec::new();
    peer.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"last");
    daemon.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let open = daemon.read(&mut [0]).unwrap_err();
    assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the peer has not closed");
    daemon.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.write_all(b"done").unwrap();
    drop(peer);
    said.clear();
    daemon.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"done");
}

#[test]
fn only_a_close_of_the_peer_is_seen_as_a_close() {
    let ground = Ground::new();
    let is_closed = |daemon: &UnixStream, limit: Duration| {
        let mut fds = [PollFd::new(daemon, PollFlags::empty())];
        wait_for(&mut fds, Some(limit)).unwrap();
        fds[0].revents().contains(PollFlags::HUP)
    };
    for ends_first in [true, false] {
        let (peer, mut daemon) = ground.connect_to_peer();
        put(&peer, b"last", &[]);
        if ends_first {
            peer.shutdown(std::net::Shutdown::Write).unwrap();
            let mut said = Vec::new();
            daemon.read_to_end(&mut said).unwrap();
            assert_eq!(said, b"last");
            assert!(!is_closed(&daemon, Duration::from_millis(50)), "it has ended its sending only");
        }
        drop(peer);
        assert!(is_closed(&daemon, PATIENCE));
        assert_eq!(get(&daemon, 100).0, if ends_first { &b""[..] } else { b"last" });
    }
}

#[test]
fn a_stream_for_a_peer_is_relayed_until_descriptors_come() {
    let ground = Ground::new();
    let (peer, daemon) = ground.connect_to_peer();
    let (mut near, far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(PATIENCE)).unwrap();
    put(&daemon, b"x", &[far.as_fd()]);
    let identity = far.try_clone().unwrap();
    drop(far);
    let (_, mut files) = get(&peer, 1);
    let channel = UnixStream::from(files.remove(0));
    channel.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(!same(&channel, &identity), "the peer has a stream of the daemon itself");
    drop(identity);
    let mut bytes = [0; 4];
    for (mut from, mut to, said) in [(&channel, &near, b"ping"), (&near, &channel, b"pong")] {
        from.write_all(said).unwrap();
        to.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, said);
    }
    let (weapon, _far) = lingering();
    put(&channel, b"y", &[weapon.as_fd()]);
    drop(std::thread::spawn(move || drop(weapon)));
    assert_eq!(near.read(&mut [0]).unwrap_or(0), 0, "the stream goes on");
    put(&peer, b"z", &[]);
    assert_eq!(get(&daemon, 1).0, b"z", "the connection goes on");
}

#[test]
fn a_peer_that_cannot_be_connected_to_is_an_error_of_the_system() {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    let ground = Ground::new();
    let error = |path: &std::path::Path| ground.receiver.connect(path).unwrap_err().kind();
    assert_eq!(error(&ground.path.with_extension("missing")), NotFound);
    let stale = ground.path.with_extension("stale");
    drop(UnixListener::bind(&stale).unwrap());
    assert_eq!(error(&stale), ConnectionRefused);
    let full = ground.path.with_extension("full");
    let listener = UnixListener::bind(&full).unwrap();
    // The backlog has room for one.
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting = ground.receiver.connect(&full).unwrap().unwrap();
    assert!(ground.receiver.connect(&full).unwrap().is_none());
}
