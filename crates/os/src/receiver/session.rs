//! One connection: relays bytes both ways between a peer and the daemon, and of the peer's descriptors only those
//! whose use and close cannot block.
//!
//! Runs on a thread with a private descriptor table, which holds the refused descriptors until it ends. It knows
//! nothing of the protocol: instead of a refused descriptor the daemon gets /dev/null, and refuses that itself. A unix
//! stream is replaced by one end of a new pair, and its bytes are relayed both ways. That applies to streams that a
//! peer sends and, where the daemon has connected to the peer, to those that the daemon sends: the peer may send
//! descriptors into them, too.
//!
//! Unsafe: the process at the other end is 0 if it is in another namespace, which the safe call cannot represent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_sys::{PollFd, PollFlags, wait_until};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, send, shutdown,
    socket_with, socketpair,
};
use rustix::thread::gettid;

use super::EndedThreads;
use super::lines::say;
use super::reply::Reply;
use super::stream::{PIECE_FILES_MAX, Piece, SendQueue};
use super::table::{Foreign, leave};
use super::vet::{self, DescriptorKind, FileQueries};

/// How long the peer may take to read the last answers after the daemon has closed.
const LAST_ANSWER_TIME: Duration = Duration::from_secs(5);
/// Streams that a peer may send in its life. A front-end has one at a time, and few in all.
const STREAMS_MAX: usize = 16;
/// Refused descriptors after which a peer's session ends.
const REFUSED_MAX: usize = 64;
/// Pause after a ready socket had no data, or between checks of unread descriptors, which only an odd peer causes.
const ODD_TIME: Duration = Duration::from_millis(1);

/// The session's connection to the receiver's log and its list of threads.
pub(super) struct Outside {
    /// Where lines for the log go.
    pub(super) report: OwnedFd,
    /// Threads of this listener's ended sessions, which still hold their descriptors.
    pub(super) ended: Arc<EndedThreads>,
    /// Path of the socket, for the log.
    pub(super) path: PathBuf,
}

/// Takes the next connection of a listener, or connects to the path, and serves that until either side leaves.
pub(super) fn run(listener: Option<OwnedFd>, channel: OwnedFd, outside: Outside) {
    let has_connected = listener.is_none();
    let peer = match &listener {
        Some(listener) => accept_with(listener, SocketFlags::CLOEXEC),
        None => connect_to(&outside.path),
    };
    // Not the last of its socket: the receiver keeps one.
    drop(listener);
    let peer = match peer {
        Ok(peer) => Foreign::new(peer),
        Err(Errno::AGAIN) => return refuse(&channel, Reply::None),
        Err(error) => return refuse(&channel, Reply::System(error)),
    };
    let mut session = RelaySession {
        peer,
        daemon: channel,
        to_daemon: SendQueue::default(),
        to_peer: SendQueue::default(),
        peer_ended: false,
        daemon_ended: false,
        daemon_left: None,
        has_connected,
        streams: Vec::new(),
        streams_taken: 0,
        refused: 0,
        queries: FileQueries::default(),
        outside,
    };
    if session.begin().is_ok() {
        session.relay();
    }
    session.end();
}

/// Connects to a peer, which may not be waited for: its backlog may be full.
fn connect_to(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Says that no connection can be had.
pub(super) fn refuse(channel: &OwnedFd, why: Reply) {
    let _ = send(channel, &why.to_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// The user and process at the other end; the process is 0 if it cannot be seen from here.
fn credentials(peer: &OwnedFd) -> (u32, i32) {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut found).cast();
    // SAFETY: `found` has the size that is passed. After a failure it stays 0.
    unsafe { libc::getsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut bytes) };
    (found.uid, found.pid)
}

struct RelaySession {
    peer: Foreign,
    daemon: OwnedFd,
    /// Pieces to be sent in each direction. Reading continues when all have been sent.
    to_daemon: SendQueue,
    to_peer: SendQueue,
    /// The peer's stream has ended.
    peer_ended: bool,
    /// The daemon's stream has ended; it may still read.
    daemon_ended: bool,
    /// When the daemon was seen to have closed.
    daemon_left: Option<Instant>,
    /// The daemon asked for this connection, and did not take it.
    has_connected: bool,
    streams: Vec<Stream>,
    /// Number of streams so far. Ended ones stay open until the thread ends.
    streams_taken: usize,
    refused: usize,
    queries: FileQueries,
    outside: Outside,
}

/// A stream beside the connection, whose plain bytes are relayed both ways.
struct Stream {
    /// Leads to the daemon, which sends no descriptors there.
    ours: OwnedFd,
    /// Leads to the peer.
    theirs: Foreign,
    /// Bytes that have no room yet, in each direction.
    to_theirs: Vec<u8>,
    to_ours: Vec<u8>,
}

impl RelaySession {
    /// Tells the daemon the peer's credentials. Plain bytes that have arrived are sent along: the daemon finds them at
    /// once.
    fn begin(&mut self) -> io::Result<()> {
        let (uid, pid) = credentials(&self.peer);
        let mut pieces = VecDeque::from([Piece::plain(Reply::Taken { uid, pid }.to_bytes().to_vec())]);
        let received = Piece::receive(&self.peer, &mut pieces);
        pieces.pop_front().into_iter().for_each(|piece| self.to_daemon.push(piece));
        self.send_to_daemon()?;
        self.take_in(pieces)?;
        match received {
            Ok(()) => self.send_to_daemon(),
            Err(error) => Err(self.let_go(error)),
        }
    }

    /// Relays both ways, until one side has closed and the other has all its bytes.
    fn relay(&mut self) {
        loop {
            let last = self.daemon_left.map(|left| left + LAST_ANSWER_TIME);
            if last.is_some_and(|last| Instant::now() >= last) {
                return;
            }
            let Ok(ready) = self.wait(last) else { return };
            let mut ends = ready[2..].chunks_exact(2);
            self.streams.retain_mut(|stream| match ends.next() {
                Some(&[ours, theirs]) => {
                    let goes_on = stream.pass_on(ours, theirs).unwrap_or(false);
                    if !goes_on {
                        // It stays open with the thread; its other end sees the shutdown.
                        let _ = shutdown(&*stream.theirs, Shutdown::Both);
                    }
                    goes_on
                }
                _ => true,
            });
            if self.serve_daemon(ready[0]).and_then(|()| self.serve_peer(ready[1])).is_err() {
                return;
            }
        }
    }

    /// Waits until a descriptor is ready: the daemon, the peer, then each stream's two ends. An unneeded side is polled
    /// only for its hang-up.
    fn wait(&self, last: Option<Instant>) -> io::Result<Vec<PollFlags>> {
        let wanted = |reads: bool, writes: bool| {
            let reads = if reads { PollFlags::IN } else { PollFlags::empty() };
            reads | if writes { PollFlags::OUT } else { PollFlags::empty() }
        };
        let has_next = |queue: &SendQueue| !queue.is_empty() && !queue.is_held();
        let daemon = wanted(!self.daemon_ended && self.to_peer.is_empty(), has_next(&self.to_daemon));
        let peer = wanted(!self.peer_ended && self.to_daemon.is_empty(), has_next(&self.to_peer));
        let ends = [
            (&self.daemon, daemon, daemon.is_empty() && self.daemon_left.is_some()),
            // Once it has ended its stream, its close is awaited.
            (&*self.peer, peer, peer.is_empty() && !(self.peer_ended && self.to_daemon.is_empty())),
        ];
        let streams = self.streams.iter().flat_map(|stream| {
            let ours = wanted(stream.to_theirs.is_empty(), !stream.to_ours.is_empty());
            let theirs = wanted(stream.to_ours.is_empty(), !stream.to_theirs.is_empty());
            [(&stream.ours, ours, ours.is_empty()), (&*stream.theirs, theirs, false)]
        });
        let all: Vec<_> = ends.into_iter().chain(streams).collect();
        let looked_at = all.iter().filter(|(.., ignored)| !ignored);
        let mut fds: Vec<_> = looked_at.map(|(fd, flags, _)| PollFd::new(*fd, *flags)).collect();
        let is_held = self.to_daemon.is_held() || self.to_peer.is_held();
        let now = Instant::now();
        let deadline = if is_held { Some(now + ODD_TIME) } else { last };
        wait_until(&mut fds, now, deadline)?;
        let mut found = fds.iter().map(PollFd::revents);
        let of = |ignored: &bool| if *ignored { None } else { found.next() };
        Ok(all.iter().map(|(.., ignored)| ignored).map(of).map(|ready| ready.unwrap_or(PollFlags::empty())).collect())
    }

    /// Deals with the daemon's side. Errors end the session.
    fn serve_daemon(&mut self, ready: PollFlags) -> io::Result<()> {
        if ready.intersects(PollFlags::HUP | PollFlags::ERR) && self.daemon_left.is_none() {
            self.daemon_left = Some(Instant::now());
            self.note_end();
        }
        if self.to_daemon.is_held() || !ready.is_empty() {
            self.send_to_daemon()?;
        }
        let may_come = !self.daemon_ended || self.daemon_left.is_some();
        if may_come && self.to_peer.is_empty() && !ready.is_empty() {
            let mut pieces = VecDeque::new();
            match Piece::receive(&self.daemon, &mut pieces) {
                Ok(()) if pieces.is_empty() && self.daemon_left.is_some() => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(()) if pieces.is_empty() => {
                    self.daemon_ended = true;
                    let _ = shutdown(&*self.peer, Shutdown::Write);
                }
                Ok(()) => {
                    self.take_out(pieces)?;
                    self.send_to_peer()?;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Deals with the peer's side. Errors end the session.
    fn serve_peer(&mut self, ready: PollFlags) -> io::Result<()> {
        if self.to_peer.is_held() || !ready.is_empty() {
            self.send_to_peer()?;
        }
        if !self.to_daemon.is_empty() || ready.is_empty() {
            return Ok(());
        }
        let has_closed = ready.intersects(PollFlags::HUP);
        if self.peer_ended {
            return if has_closed { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) };
        }
        let mut pieces = VecDeque::new();
        let received = Piece::receive(&self.peer, &mut pieces);
        let is_over = pieces.is_empty();
        self.take_in(pieces)?;
        match received {
            // The daemon sees a close as such, since a peer that has only ended its sending may still use its memory.
            Ok(()) if is_over && has_closed => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(()) if is_over => {
                self.peer_ended = true;
                let _ = shutdown(&self.daemon, Shutdown::Write);
            }
            // A reset is said once, before the end.
            Ok(()) | Err(Errno::INTR | Errno::CONNRESET) => {}
            // Ready without data is odd, and must not become a busy loop.
            Err(Errno::AGAIN) => std::thread::sleep(ODD_TIME),
            Err(error) => return Err(self.let_go(error)),
        }
        self.send_to_daemon()
    }

    /// Vets the peer's pieces, and queues them.
    fn take_in(&mut self, mut pieces: VecDeque<Piece>) -> io::Result<()> {
        while let Some(mut piece) = pieces.pop_front() {
            match self.vetted(std::mem::take(&mut piece.files)) {
                Ok(files) => {
                    piece.files = files;
                    self.to_daemon.push(piece);
                }
                Err(error) => {
                    pieces.into_iter().for_each(Piece::leave_files);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn send_to_daemon(&mut self) -> io::Result<()> {
        match self.to_daemon.send(&self.daemon) {
            Ok(()) => Ok(()),
            // It has left: its earlier bytes are still sent.
            Err(Errno::PIPE | Errno::CONNRESET) => {
                self.peer_ended = true;
                Ok(())
            }
            Err(error) => Err(self.let_go(error)),
        }
    }

    fn send_to_peer(&mut self) -> io::Result<()> {
        match self.to_peer.send(&self.peer) {
            // A peer that has left gets no bytes.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(self.let_go(error)),
        }
    }

    /// Says why the session ends.
    fn let_go(&self, error: Errno) -> io::Error {
        let cause = match error {
            Errno::TOOMANYREFS => format!(
                "more than {PIECE_FILES_MAX} descriptors come with a message, or the limit on open files is reached"
            ),
            error => error.to_string(),
        };
        self.say(&format!("a connection is let go: {cause}"));
        error.into()
    }

    /// Queues the daemon's pieces. If the daemon has connected to the peer, streams that it sends are replaced.
    fn take_out(&mut self, pieces: VecDeque<Piece>) -> io::Result<()> {
        for mut piece in pieces {
            for file in piece.files.iter_mut().filter(|file| self.has_connected && vet::is_stream(file)) {
                if self.streams_taken >= STREAMS_MAX {
                    return Err(io::ErrorKind::QuotaExceeded.into());
                }
                self.streams_taken += 1;
                let (inner, outer) = pair()?;
                self.streams.push(Stream::new(std::mem::replace(file, outer), inner));
            }
            self.to_peer.push(piece);
        }
        Ok(())
    }

    /// The daemon's replacements of a piece's descriptors.
    fn vetted(&mut self, files: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
        let mut files = files.into_iter();
        let vetted = files.by_ref().map(|file| self.vet(file)).collect();
        // After an error the remaining descriptors count as foreign.
        files.for_each(leave);
        vetted
    }

    fn vet(&mut self, file: OwnedFd) -> io::Result<OwnedFd> {
        match vet::kind(&file, &mut self.queries) {
            DescriptorKind::Safe => Ok(file),
            DescriptorKind::Stream if self.streams_taken < STREAMS_MAX => {
                self.streams_taken += 1;
                match pair() {
                    Ok((ours, daemons)) => {
                        self.streams.push(Stream::new(ours, file));
                        Ok(daemons)
                    }
                    Err(error) => {
                        leave(file);
                        Err(error.into())
                    }
                }
            }
            DescriptorKind::Stream => self.refuse(file, "more sockets come than a session has"),
            DescriptorKind::Refused(why) => self.refuse(file, &why),
        }
    }

    fn refuse(&mut self, file: OwnedFd, why: &str) -> io::Result<OwnedFd> {
        leave(file);
        if self.refused == 0 {
            let peer = if self.has_connected { "back-end" } else { "front-end" };
            self.say(&format!("a descriptor of a {peer} is not taken: {why}"));
        }
        self.refused += 1;
        if self.refused > REFUSED_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // Ours: /dev/null.
        Ok(rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?)
    }

    fn say(&self, what: &str) {
        say(&self.outside.report, &self.outside.path, what);
    }

    /// This thread, and those that it has started, are to be gone soon.
    fn note_end(&mut self) {
        self.outside.ended.note(self.queries.asking.drain(..).chain([gettid()]));
    }

    /// Leaves both sides. Foreign descriptors go with the thread: an ending thread does not linger on a socket, and one
    /// that hangs delays no other.
    fn end(mut self) {
        self.note_end();
        let RelaySession { peer, daemon, to_daemon, to_peer, streams, outside, .. } = self;
        let _ = shutdown(&*peer, Shutdown::Both);
        // From here on only our own or vetted descriptors are closed.
        drop((to_daemon, to_peer, daemon, streams, outside));
    }
}

impl Stream {
    fn new(ours: OwnedFd, theirs: OwnedFd) -> Stream {
        Stream { ours, theirs: Foreign::new(theirs), to_theirs: Vec::new(), to_ours: Vec::new() }
    }

    /// Relays available bytes. False once either end has left, or descriptors came, which are not allowed here: then
    /// both see the end.
    fn pass_on(&mut self, ours: PollFlags, theirs: PollFlags) -> Result<bool, Errno> {
        if theirs.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Ok(false);
        }
        Ok(pass(&self.ours, &self.theirs, &mut self.to_theirs, ours)?
            && pass(&self.theirs, &self.ours, &mut self.to_ours, theirs)?)
    }
}

/// Relays in one direction: waiting bytes, or else new ones. False at the end.
fn pass(from: &OwnedFd, to: &OwnedFd, waiting: &mut Vec<u8>, ready: PollFlags) -> Result<bool, Errno> {
    if waiting.is_empty() && ready.intersects(PollFlags::IN | PollFlags::HUP) {
        let mut pieces = VecDeque::new();
        match Piece::receive(from, &mut pieces) {
            Ok(()) if pieces.is_empty() => return Ok(false),
            Ok(()) => {}
            // Ready without data is odd, and must not become a busy loop.
            Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(ODD_TIME),
            Err(error) => {
                pieces.into_iter().for_each(Piece::leave_files);
                return Err(error);
            }
        }
        let plain: Vec<_> = pieces.into_iter().map(Piece::into_plain).collect();
        let Some(plain) = plain.into_iter().collect::<Option<Vec<_>>>() else { return Ok(false) };
        *waiting = plain.concat();
    }
    if !waiting.is_empty() {
        match send(to, waiting, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => drop(waiting.drain(..sent)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}
