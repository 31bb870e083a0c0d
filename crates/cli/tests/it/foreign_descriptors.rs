//! `serve` as a process, with front-ends and back-ends that send descriptors whose close blocks. Each loses its own
//! session, and affects no other peer or export, nor the end of the daemon, nor the images of a killed one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use blkyard_sys::send_fds;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendFlags, sockopt};
use rustix::process::{Pid, Signal, kill_process};

use crate::back_end::{GET_CONFIG, GET_INFLIGHT_FD, agree};
use crate::common::{Daemon, Process, program, succeed};
use crate::fuse::{FLUSH, Fuse, STATFS};

/// Longer than any test on a busy machine, and shorter than the blocking close.
const PATIENCE: Duration = Duration::from_secs(30);

/// Messages, by their numbers.
const GET_FEATURES: u32 = 1;
const SET_VRING_CALL: u32 = 13;

/// A descriptor whose close blocks.
enum Weapon {
    /// A file whose server does not answer its close, or no query of it either.
    Fuse(Fuse),
    /// A socket with bytes that its peer does not read, and that is to wait for that when it is closed.
    Tcp(Vec<TcpStream>),
}

impl Weapon {
    /// All that can be had here.
    fn all(folder: &Path) -> Vec<(&'static str, Weapon)> {
        let fuse = |name: &'static str, silent| {
            let folder = folder.join(name);
            std::fs::create_dir(&folder).unwrap();
            Fuse::mount(&folder, silent).map(|fuse| (name, Weapon::Fuse(fuse)))
        };
        let fuses = [fuse("flush", &[FLUSH]), fuse("statfs", &[FLUSH, STATFS])];
        fuses.into_iter().flatten().chain([("tcp", Weapon::Tcp(Vec::new()))]).collect()
    }

    /// One whose only owner will be the receiver of the message.
    fn send(&mut self, to: &UnixStream, bytes: &[u8]) {
        let (variable, source, listener) = match self {
            Weapon::Fuse(fuse) => (FILE, fuse.file().into_os_string(), None),
            Weapon::Tcp(_) => {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                (ADDRESS, listener.local_addr().unwrap().to_string().into(), Some(listener))
            }
        };
        // By another process, which may hang when it ends. Here it would be inherited by each process that another
        // thread starts meanwhile, which then closes it last, and hangs before it runs its program.
        let mut sender = Command::new(std::env::current_exe().unwrap());
        sender
            .args(["--exact", "foreign_descriptors::sends_a_descriptor", "--nocapture"])
            .env(variable, source)
            .env(BYTES, text(bytes));
        sender.stdin(OwnedFd::from(to.try_clone().unwrap())).stdout(Stdio::piped());
        let mut sender = sender.spawn().unwrap();
        if let (Weapon::Tcp(peers), Some(listener)) = (self, listener) {
            peers.push(listener.accept().unwrap().0);
        }
        let mut lines = BufReader::new(sender.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with("sent")), "the descriptor cannot be sent");
        // It ends once the file system is aborted or the peer has left, and is reaped then.
        drop(std::thread::spawn(move || sender.wait()));
    }
}

/// For the process that sends a descriptor: the file or the TCP address to open, and the bytes that go with it.
const FILE: &str = "BLKYARD_TEST_FILE";
const ADDRESS: &str = "BLKYARD_TEST_ADDRESS";
const BYTES: &str = "BLKYARD_TEST_BYTES";

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" ")
}

/// Not a separate test: the process that sends a descriptor to its standard input.
#[test]
fn sends_a_descriptor() {
    let fd: OwnedFd = if let Some(path) = std::env::var_os(FILE) {
        std::fs::File::options().read(true).write(true).open(path).unwrap().into()
    } else if let Ok(address) = std::env::var(ADDRESS) {
        let near = TcpStream::connect(address).unwrap();
        near.set_nonblocking(true).unwrap();
        while (&near).write(&[7; 1 << 14]).is_ok() {}
        near.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&near, Some(PATIENCE * 20)).unwrap();
        near.into()
    } else {
        return;
    };
    let bytes: Vec<u8> = std::env::var(BYTES).unwrap().split_whitespace().map(|byte| byte.parse().unwrap()).collect();
    let to = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    send(&to, &bytes, &[fd.as_fd()]);
    println!("sent");
    std::process::exit(0);
}

fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    // A daemon that has closed the connection is no failure here.
    let _ = send_fds(to, bytes, fds, SendFlags::empty());
}

fn message(request: u32, body: &[u8]) -> Vec<u8> {
    let header = [request, 1, body.len() as u32];
    header.iter().flat_map(|word| word.to_ne_bytes()).chain(body.iter().copied()).collect()
}

/// Starts a daemon with two images at two sockets.
fn serve_images(folder: &Path) -> Process {
    serve(folder, "file:a.img")
}

/// Starts a daemon with a device and an image at two sockets.
fn serve(folder: &Path, device: &str) -> Process {
    Daemon::launch(&mut serving(folder, device)).process
}

/// The command that serves a device and an image at two sockets.
fn serving(folder: &Path, device: &str) -> Command {
    let mut command = program(folder, &["serve", "--control", "c"]);
    for (name, device) in [("a", device), ("b", "file:b.img")] {
        std::fs::File::create(folder.join(format!("{name}.img"))).unwrap().set_len(1 << 20).unwrap();
        command.args(["--device", device, "--export", &format!("vhost-user-blk:{name}?queues=1")]);
    }
    command
}

fn ended(daemon: &mut Process, how: &str) -> ExitStatus {
    daemon.ended_within(PATIENCE).unwrap_or_else(|| panic!("{how}: the daemon does not end"))
}

fn connect(folder: &Path, socket: &str) -> UnixStream {
    let stream = UnixStream::connect(folder.join(socket)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sees that a front-end is served.
fn is_served(folder: &Path, socket: &str, how: &str) -> UnixStream {
    let mut stream = connect(folder, socket);
    stream.write_all(&message(GET_FEATURES, &[])).unwrap();
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("{how}: {socket} serves nobody: {error}"));
    stream
}

/// Attacks in a way.
fn attack(folder: &Path, weapon: &mut Weapon, way: &str) {
    let attacked = || connect(folder, "a");
    let kick = message(SET_VRING_CALL, &0_u64.to_ne_bytes());
    match way {
        "with a message" => weapon.send(&attacked(), &kick),
        "left unread" => {
            let stream = attacked();
            // Undefined in this protocol: the rest is not read.
            send(&stream, &message(4000, &[1, 2, 3]), &[]);
            (0..3).for_each(|_| weapon.send(&stream, &kick));
        }
        "in the backlog" => {
            let honest = is_served(folder, "a", way);
            (0..3).for_each(|_| weapon.send(&attacked(), &kick));
            drop(honest);
        }
        "to the control socket" => weapon.send(&connect(folder, "c"), b"{"),
        way => unreachable!("{way}"),
    }
}

fn survives(ending: &str) {
    let ground = tempfile::tempdir().unwrap();
    for (name, mut weapon) in Weapon::all(ground.path()) {
        for way in ["with a message", "left unread", "in the backlog", "to the control socket"] {
            let how = format!("{name} {way}, {ending}");
            let folder = tempfile::tempdir_in(ground.path()).unwrap();
            let folder = folder.path();
            let mut daemon = serve_images(folder);
            attack(folder, &mut weapon, way);
            drop(is_served(folder, "a", &how));
            drop(is_served(folder, "b", &how));
            succeed(folder, &["inspect", "--control", "c"]);
            // Once more, so that it exists when the daemon ends.
            let busy = is_served(folder, "a", &how);
            weapon.send(&busy, &message(SET_VRING_CALL, &0_u64.to_ne_bytes()));
            weapon.send(&connect(folder, "a"), b"x");
            let signal = if ending == "stopped" { Signal::TERM } else { Signal::KILL };
            let begin = Instant::now();
            daemon.signal(signal);
            let status = ended(&mut daemon, &how);
            assert!(ending == "killed" || status.success(), "{how}: it ends badly: {status}");
            let ended = begin.elapsed();
            drop(serve_images(folder));
            println!("{how}: ended after {ended:?}, serves again after {:?}", begin.elapsed());
        }
    }
}

#[test]
fn a_descriptor_that_blocks_on_close_does_not_keep_a_daemon_from_ending() {
    survives("stopped");
}

#[test]
fn a_descriptor_that_blocks_on_close_does_not_keep_images_of_a_killed_daemon_locked() {
    survives("killed");
}

/// A message of vfio-user.
fn vfio_user_message(command: u16, payload: &[u8]) -> Vec<u8> {
    let size = 16 + payload.len() as u32;
    [&1_u16.to_le_bytes()[..], &command.to_le_bytes(), &size.to_le_bytes(), &[0; 8], payload].concat()
}

/// Reads a reply of vfio-user; whether it is an error.
fn is_vfio_user_error(mut stream: &UnixStream) -> bool {
    const ERROR: u8 = 1 << 5;
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let size = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
    stream.read_exact(&mut vec![0; size - header.len()]).unwrap();
    header[8] & ERROR != 0
}

#[test]
fn an_nvme_clients_descriptor_is_refused_and_holds_nobody() {
    let (version, map, set_interrupts) = (1, 2, 8);
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let messages = [
        // All of a page, readable and writable, at the address 1000h.
        (map, words(&[32, 3, 0, 0, 0x1000, 0, 0x1000, 0])),
        // The eventfd of the first MSI-X vector.
        (set_interrupts, words(&[20, 0x24, 2, 0, 1])),
    ];
    let ground = tempfile::tempdir().unwrap();
    for (name, mut weapon) in Weapon::all(ground.path()) {
        let folder = tempfile::tempdir_in(ground.path()).unwrap();
        let folder = folder.path();
        let mut daemon = serving(folder, "file:a.img");
        daemon.args(["--device", "ram:1M", "--export", "vfio-user:n?queues=1"]);
        let mut daemon = Daemon::launch(&mut daemon).process;
        let greeted = || {
            let mut stream = connect(folder, "n");
            stream.write_all(&vfio_user_message(version, b"\0\0\x01\0{}\0")).unwrap();
            assert!(!is_vfio_user_error(&stream), "{name}: the version is refused");
            stream
        };
        for (command, payload) in &messages {
            let stream = greeted();
            weapon.send(&stream, &vfio_user_message(*command, payload));
            assert!(is_vfio_user_error(&stream), "{name}: command {command} is accepted with it");
            // The next descriptor is judged by itself.
            let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&memory, 0x1000).unwrap();
            let (map, page) = &messages[0];
            send(&stream, &vfio_user_message(*map, page), &[memory.as_fd()]);
            assert!(!is_vfio_user_error(&stream), "{name}: memory after it is refused");
            // Unread, in the middle of a message.
            weapon.send(&stream, b"x");
            // The process that sent it may have the connection as well.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // Once more, so that it exists when the daemon ends.
        let stream = greeted();
        weapon.send(&stream, &vfio_user_message(map, &messages[0].1));
        drop(is_served(folder, "a", name));
        daemon.signal(Signal::TERM);
        let status = ended(&mut daemon, name);
        assert!(status.success(), "{name}: it ends badly: {status}");
    }
}

/// A back-end's sessions: an honest one that ends, an attacking one, and an honest one, which continues.
fn attack_as_back_end(listener: &UnixListener, weapon: &mut Weapon, way: &str) -> (UnixStream, UnixStream) {
    let honest = |stream: &UnixStream, _: u32, bytes: &[u8], file: Option<OwnedFd>| {
        send(stream, bytes, &file.iter().map(OwnedFd::as_fd).collect::<Vec<_>>());
    };
    let first = listener.accept().unwrap().0;
    agree(&first, GET_INFLIGHT_FD, |request, bytes, file| honest(&first, request, bytes, file)).unwrap();
    drop(first);
    let mut attacking = listener.accept().unwrap().0;
    if way == "before anything" {
        weapon.send(&attacking, b"x");
    }
    let channel = agree(&attacking, GET_CONFIG, |request, bytes, file| match way {
        "with an answer" if request == GET_CONFIG => weapon.send(&attacking, bytes),
        _ => honest(&attacking, request, bytes, file),
    });
    match way {
        "left unread" => (0..3).for_each(|_| weapon.send(&attacking, b"x")),
        "in its channel" => (0..3).for_each(|_| weapon.send(channel.as_ref().unwrap(), &CHANGED)),
        _ => {}
    }
    attacking.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = attacking.read_to_end(&mut Vec::new());
    drop((attacking, channel));
    let last = listener.accept().unwrap().0;
    let channel = agree(&last, GET_CONFIG, |request, bytes, file| honest(&last, request, bytes, file));
    (last, channel.expect("a session is set up"))
}

fn survives_back_ends(ending: &str) {
    let ground = tempfile::tempdir().unwrap();
    for (name, mut weapon) in Weapon::all(ground.path()) {
        for way in ["before anything", "with an answer", "left unread", "in its channel"] {
            let how = format!("{name} {way}, {ending}");
            let folder = tempfile::tempdir_in(ground.path()).unwrap();
            let folder = folder.path();
            let listener = UnixListener::bind(folder.join("disk")).unwrap();
            let (told, done) = channel();
            std::thread::spawn(move || {
                let last = attack_as_back_end(&listener, &mut weapon, way);
                let _ = told.send((last, weapon, listener));
            });
            let mut daemon = serve(folder, "vhost-user:disk");
            let attacked = done.recv_timeout(PATIENCE);
            let Ok((last, mut used, _listener)) = attacked else { panic!("{how}: it is not connected to again") };
            drop(is_served(folder, "a", &how));
            drop(is_served(folder, "b", &how));
            // Once more, so that it exists when the daemon ends.
            used.send(&last.1, &CHANGED);
            used.send(&last.0, b"x");
            let signal = if ending == "stopped" { Signal::TERM } else { Signal::KILL };
            daemon.signal(signal);
            let status = ended(&mut daemon, &how);
            assert!(ending == "killed" || status.success(), "{how}: it ends badly: {status}");
            drop(serve_images(folder));
            weapon = used;
        }
    }
}

/// A back-end says that its configuration has changed.
const CHANGED: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_back_ends_descriptor_does_not_keep_a_daemon_from_ending() {
    survives_back_ends("stopped");
}

#[test]
fn a_back_ends_descriptor_does_not_keep_images_of_a_killed_daemon_locked() {
    survives_back_ends("killed");
}

#[test]
fn foreign_in_flight_memory_is_refused_and_holds_nobody() {
    let ground = tempfile::tempdir().unwrap();
    for (name, mut weapon) in Weapon::all(ground.path()) {
        let folder = tempfile::tempdir_in(ground.path()).unwrap();
        let listener = UnixListener::bind(folder.path().join("disk")).unwrap();
        let mut daemon = Process::spawn(serving(folder.path(), "vhost-user:disk").stdout(Stdio::null()));
        std::thread::spawn(move || {
            let stream = listener.accept().unwrap().0;
            let answer = |request, bytes: &[u8], _| match request {
                GET_INFLIGHT_FD => weapon.send(&stream, bytes),
                _ => send(&stream, bytes, &[]),
            };
            let _ = agree(&stream, GET_INFLIGHT_FD, answer);
            // The descriptor stays one that hangs.
            let _ = (&stream).read_to_end(&mut Vec::new());
            std::thread::sleep(PATIENCE);
            drop(weapon);
        });
        assert!(!ended(&mut daemon, name).success(), "{name}: it is taken");
        drop(serve_images(folder.path()));
    }
}

/// Checks that no process of the daemons is left once the silent server is gone.
#[test]
fn nothing_is_left_once_whoever_should_answer_has_gone() {
    let folder = tempfile::tempdir().unwrap();
    let names = || {
        let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let of = |entry: std::fs::DirEntry| std::fs::read_link(entry.path().join("cwd")).ok();
        entries.filter_map(of).filter(|cwd| cwd == folder.path()).count()
    };
    let weapons = Weapon::all(folder.path());
    let mut daemon = serve_images(folder.path());
    assert!(names() >= 2, "the daemon and its receiver are there");
    let mut weapons = weapons;
    weapons.iter_mut().for_each(|(_, weapon)| attack(folder.path(), weapon, "with a message"));
    drop(is_served(folder.path(), "a", "all at once"));
    daemon.signal(Signal::TERM);
    assert!(ended(&mut daemon, "all at once").success());
    drop(weapons);
    let begin = Instant::now();
    while names() > 0 {
        assert!(begin.elapsed() < PATIENCE, "{} processes are left", names());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn sessions_that_never_end_are_bounded_and_the_daemon_says_so() {
    let ground = tempfile::tempdir().unwrap();
    let folder = ground.path().join("disks");
    std::fs::create_dir(&folder).unwrap();
    let mount = ground.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let Some(fuse) = Fuse::mount(&mount, &[FLUSH]) else { return };
    let mut weapon = Weapon::Fuse(fuse);
    let _daemon = serve_images(&folder);
    let begin = Instant::now();
    let refused = loop {
        let mut stream = connect(&folder, "a");
        stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        stream.write_all(&message(GET_FEATURES, &[])).unwrap();
        match stream.read_exact(&mut [0; 20]) {
            Ok(()) => weapon.send(&stream, &message(SET_VRING_CALL, &0_u64.to_ne_bytes())),
            Err(_) => break true,
        }
        if begin.elapsed() > PATIENCE {
            break false;
        }
    };
    assert!(refused, "any number of sessions may hang");
    drop(is_served(&folder, "b", "bounded"));
    // Once the server is gone they end, and the export serves again.
    drop(weapon);
    drop(is_served(&folder, "a", "bounded"));
}

#[test]
fn a_receiver_that_is_killed_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = serve_images(folder.path());
    let receivers = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.0.id())).unwrap().map_while(Result::ok);
        let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let children: String = tasks.map(of).collect();
        children.split_whitespace().filter_map(|id| Pid::from_raw(id.parse().unwrap())).collect::<Vec<_>>()
    };
    let mut stream = is_served(folder.path(), "a", "before");
    let first = receivers();
    assert_eq!(first.len(), 1, "one receiver");
    kill_process(first[0], Signal::KILL).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0, "its front-ends are lost");
    for socket in ["a", "b", "a"] {
        drop(is_served(folder.path(), socket, "after"));
    }
    // Signals of a terminal or a service manager are for the daemon.
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        receivers().into_iter().filter(|id| *id != first[0]).for_each(|id| kill_process(id, signal).unwrap());
    }
    drop(is_served(folder.path(), "a", "after signals"));
}

#[test]
fn refused_descriptors_do_not_fill_the_log() {
    const FRONT_ENDS: usize = 200;
    let folder = tempfile::tempdir().unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let mut command = program(folder.path(), &["serve", "--control", "none", "--log-format", "json"]);
    command.args(["--device", "ram:1M", "--export", "vhost-user-blk:a?queues=1"]).stderr(log);
    let mut daemon = Daemon::launch(&mut command).process;
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..FRONT_ENDS {
        let mut stream = connect(folder.path(), "a");
        send(&stream, &message(SET_VRING_CALL, &0_u64.to_ne_bytes()), &[null.as_fd()]);
        // Until it is disconnected.
        let _ = stream.read(&mut [0; 1]);
    }
    daemon.signal(Signal::TERM);
    assert!(ended(&mut daemon, "flooded").success());
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let told = log.lines().filter(|line| line.contains("a descriptor of a front-end is not taken")).count();
    assert!((1..FRONT_ENDS / 2).contains(&told), "{told} lines on {FRONT_ENDS} descriptors");
    assert!(log.lines().all(|line| line.starts_with('{')), "the receiver's lines have the daemon's format: {log}");
}
