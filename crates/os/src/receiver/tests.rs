//! A receiver for which the system refuses calls.
//!
//! Unsafe: installing a seccomp filter.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};

use super::client::tests::{end, let_pause_end, started};
use super::reply::REPLY_BYTES;
use super::*;

/// Has these system calls fail with an error, on a separate thread and on those that it starts.
fn with_refused<T: Send>(calls: &[libc::c_long], error: Errno, work: impl FnOnce() -> T + Send) -> T {
    let statement = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let ret = libc::BPF_RET | libc::BPF_K;
    // The number of the call is the first word.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for call in calls {
        filter.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, *call as u32));
        filter.push(statement(ret, 0, 0, libc::SECCOMP_RET_ERRNO | error.raw_os_error() as u32));
    }
    filter.push(statement(ret, 0, 0, libc::SECCOMP_RET_ALLOW));
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program is valid during the call; the filter concerns this thread and those that it starts.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        assert!(!failed, "no seccomp: {}", std::io::Error::last_os_error());
        work()
    };
    std::thread::scope(|scope| scope.spawn(install).join().unwrap())
}

/// A hub with a listening socket, and the path of that.
fn hub() -> (Hub, tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (_, report) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut hub = Hub { listeners: HashMap::new(), connected: HashMap::new(), report };
    hub.keep(path.clone(), listener.into());
    (hub, folder, path)
}

/// A hub's answer to a request for a connection.
fn reply(hub: &Hub, path: &Path) -> Reply {
    let (mut near, far) = UnixStream::pair().unwrap();
    hub.accept(path.into(), far.into());
    let mut bytes = [0; REPLY_BYTES];
    near.read_exact(&mut bytes).unwrap();
    Reply::from_bytes(bytes)
}

#[test]
fn missing_thread_is_not_taken_for_a_missing_connection() {
    let (hub, _folder, path) = hub();
    assert_eq!(reply(&hub, &path), Reply::None);
    let _peer = UnixStream::connect(&path).unwrap();
    let refused = with_refused(&[libc::SYS_clone, libc::SYS_clone3], Errno::AGAIN, || reply(&hub, &path));
    assert_eq!(refused, Reply::System(Errno::AGAIN));
    assert!(matches!(reply(&hub, &path), Reply::Taken { .. }), "it comes later");
}

#[test]
fn refused_descriptors_are_told_to_the_daemon() {
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let thread = std::thread::spawn(move || run(&far).unwrap());
    let next = || {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let (_, count) = recv(&near, &mut bytes[..], RecvFlags::empty()).unwrap();
        ReceiverLine::from_bytes(&bytes[..count]).unwrap()
    };
    assert_eq!(next(), ReceiverLine::Ready);
    let (listener, path, _folder) = listening();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let peer = UnixStream::connect(&path).unwrap();
    let bytes = [&[Kind::Accept as u8], path.as_os_str().as_bytes()].concat();
    client::tests::send(&near, &bytes, &[listener.as_fd(), theirs.as_fd()]);
    let null = std::fs::File::open("/dev/null").unwrap();
    client::tests::send(&peer.into(), b"x", &[null.as_fd()]);
    let ReceiverLine::Line(about, text) = next() else { panic!("no line") };
    assert!(about == path && text.contains("/dev/null"), "{text}");
    drop((near, ours));
    thread.join().unwrap();
}

#[test]
fn too_many_sessions_that_do_not_go_are_told() {
    let (hub, _folder, path) = hub();
    let (told, ids) = std::sync::mpsc::channel();
    let threads: Vec<_> = (0..STUCK_MAX)
        .map(|_| {
            let (go, end) = std::sync::mpsc::channel::<()>();
            let told = told.clone();
            let thread = std::thread::spawn(move || {
                told.send(rustix::thread::gettid()).unwrap();
                let _ = end.recv();
            });
            (go, thread)
        })
        .collect();
    hub.listeners[&path].ended.note(ids.iter().take(STUCK_MAX));
    assert_eq!(reply(&hub, &path), Reply::Busy);
    for (go, thread) in threads {
        drop(go);
        thread.join().unwrap();
    }
    // A joined thread may still be seen for a moment.
    let begin = std::time::Instant::now();
    while reply(&hub, &path) != Reply::None {
        assert!(begin.elapsed().as_secs() < 30, "threads that are gone still count");
    }
}

/// A listening socket, its path, and the folder of that.
fn listening() -> (UnixListener, std::path::PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    (listener, path, folder)
}

#[test]
fn receiver_stays_after_an_error_of_one_command() {
    let (listener, path, _folder) = listening();
    let receiver = Receiver::thread().unwrap();
    receiver.listen(&path, listener.as_fd()).unwrap();
    for error in [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM] {
        let accept = || receiver.accept(&path, listener.as_fd()).map(drop);
        let refused = with_refused(&[libc::SYS_sendmsg], error, accept).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(error.raw_os_error()));
        let peer = UnixStream::connect(&path).unwrap();
        assert!(receiver.accept(&path, listener.as_fd()).unwrap().is_some());
        drop(peer);
    }
    assert_eq!(started(&receiver), 1);
}

#[test]
fn receiver_that_ends_is_started_again_but_not_at_once() {
    let (listener, path, _folder) = listening();
    let receiver = Receiver::thread().unwrap();
    end(&receiver);
    for _ in 0..10 {
        let error = receiver.accept(&path, listener.as_fd()).unwrap_err();
        assert!(error.to_string().contains("started again after 1 s"), "{error}");
    }
    assert_eq!(started(&receiver), 1);
    let_pause_end(&receiver);
    let _peer = UnixStream::connect(&path).unwrap();
    assert!(receiver.accept(&path, listener.as_fd()).unwrap().is_some());
    assert_eq!(started(&receiver), 2);
    end(&receiver);
    assert!(receiver.listen(&path, listener.as_fd()).is_err());
    assert_eq!(started(&receiver), 2);
}

#[test]
fn receiver_works_where_unshare_is_refused() {
    let (listener, path, _folder) = listening();
    let _peer = UnixStream::connect(&path).unwrap();
    let taken = with_refused(&[libc::SYS_unshare], Errno::PERM, || {
        let receiver = Receiver::thread().unwrap();
        receiver.accept(&path, listener.as_fd()).unwrap().is_some()
    });
    assert!(taken);
}

#[test]
fn receiver_without_a_table_is_said_at_the_start() {
    let error = with_refused(&[libc::SYS_close_range], Errno::PERM, || Receiver::thread().map(drop)).unwrap_err();
    assert!(error.to_string().contains("close_range") && error.to_string().contains("seccomp"), "{error}");
}
