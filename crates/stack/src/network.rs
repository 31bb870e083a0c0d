//! TCP between hosts and targets, in virtual time: bytes of a stream come in order, late, in pieces, or not at all.
//!
//! An end that is closed by a reset loses bytes on their way; one whose process has died leaves them to its kernel,
//! which goes on sending. Bytes of a stream that was reset are gone [`LATE_NS`] later: what an association's proof by
//! time relies on.
//!
//! Shared by all ends, which are on one thread. Nothing happens by itself: the world calls [`Network::deliver`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_sim::Rng;

/// Time after which bytes of a stream that was reset arrive no more, ns: below the quiesce time of targets.
pub(crate) const LATE_NS: u64 = 4_000_000_000;
/// Bytes of a direction on their way or not read, above which nothing more is taken.
const WINDOW_BYTES: usize = 96 << 10;
/// Least latency of a piece, and what chance adds, ns.
const LATENCY_NS: u64 = 20_000;
const JITTER_NS: u64 = 60_000;
/// Longest time from the end of a path's stall to that of a stream, ns.
const RESEND_NS: u64 = 400_000_000;

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Host = 0,
    Target = 1,
}

impl Side {
    fn other(self) -> Side {
        if self == Side::Host { Side::Target } else { Side::Host }
    }
}

/// How an end is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The other end sees the end of the stream behind all bytes.
    Fin,
    /// A reset: bytes on their way may be lost.
    Reset,
    /// The process has died: an end of the stream, or a reset if bytes were not read.
    Death,
    /// The machine has lost its power, and says nothing.
    Silence,
}

/// State of a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connecting {
    Waiting,
    Open,
    Refused,
}

/// What an end can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readable {
    Bytes,
    Nothing,
    End,
    Broken,
}

#[derive(Debug, Default)]
struct Pipe {
    /// Pieces on their way, and when they arrive, in order.
    pieces: VecDeque<(u64, Vec<u8>)>,
    last_ns: u64,
    /// Until then nothing arrives.
    stalled_ns: u64,
    arrived: Vec<u8>,
    /// When the end of the stream, or a reset, arrives; and whether it has.
    fin_ns: Option<u64>,
    is_ended: bool,
    reset_ns: Option<u64>,
    is_reset: bool,
}

impl Pipe {
    fn next_ns(&self) -> Option<u64> {
        let piece_ns = self.pieces.front().map(|(at_ns, _)| *at_ns);
        [piece_ns, self.fin_ns, self.reset_ns].into_iter().flatten().min()
    }

    fn unread(&self) -> usize {
        self.arrived.len() + self.pieces.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    /// Drops what has not arrived, and all that comes.
    fn silence(&mut self) {
        self.pieces.clear();
        (self.fin_ns, self.reset_ns) = (None, None);
    }

    fn stall(&mut self, until_ns: u64) {
        self.stalled_ns = self.stalled_ns.max(until_ns);
        for at_ns in self.pieces.iter_mut().map(|(at_ns, _)| at_ns) {
            *at_ns = (*at_ns).max(until_ns);
        }
        self.last_ns = self.last_ns.max(until_ns);
        for at_ns in [&mut self.fin_ns, &mut self.reset_ns].into_iter().flatten() {
            *at_ns = (*at_ns).max(until_ns);
        }
    }
}

#[derive(Debug)]
struct WorldConnection {
    port: usize,
    /// From the host, and from the target.
    pipes: [Pipe; 2],
    is_open: [bool; 2],
    connecting: Connecting,
    /// When the connect is decided.
    decided_ns: Option<u64>,
}

/// A port of a target.
#[derive(Debug, Default)]
struct NetworkPort {
    is_listening: bool,
    /// Whether its machine answers at all.
    is_up: bool,
    /// Until then nothing of this path arrives, either way.
    stalled_ns: u64,
    accepted: VecDeque<u64>,
}

#[derive(Debug)]
struct NetworkState {
    rng: Rng,
    now_ns: u64,
    connections: BTreeMap<u64, WorldConnection>,
    next: u64,
    ports: Vec<NetworkPort>,
    late_ns: u64,
    /// Changes so far that an end can see.
    changes: u64,
    /// Fingerprint of all bytes delivered.
    trace: u64,
}

/// The network, for all who use it.
#[derive(Clone, Debug)]
pub(crate) struct Network(Arc<Mutex<NetworkState>>);

impl Network {
    /// A network with so many ports. Bytes of a stream that was reset arrive for `late_ns` more.
    pub(crate) fn new(rng: Rng, ports: usize, late_ns: u64) -> Network {
        let ports = (0..ports).map(|_| NetworkPort { is_up: true, ..NetworkPort::default() }).collect();
        let connections = BTreeMap::new();
        let shared = NetworkState { rng, now_ns: 0, connections, next: 0, ports, late_ns, changes: 0, trace: 0 };
        Network(Arc::new(Mutex::new(shared)))
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.lock().now_ns
    }

    /// Number of changes that an end could see.
    pub(crate) fn changes(&self) -> u64 {
        self.lock().changes
    }

    pub(crate) fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// Connections that either end still has.
    pub(crate) fn open(&self) -> usize {
        self.lock().connections.values().filter(|one| one.is_open[0] || one.is_open[1]).count()
    }

    /// Whether this end of a connection is open.
    pub(crate) fn is_open(&self, number: u64, side: Side) -> bool {
        self.lock().connections.get(&number).is_some_and(|one| one.is_open[side as usize])
    }

    /// When something arrives next.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let shared = self.lock();
        let all = shared
            .connections
            .values()
            .flat_map(|one| one.pipes.iter().filter_map(Pipe::next_ns).chain(one.decided_ns));
        all.min()
    }

    /// Lets arrive all that is due.
    pub(crate) fn deliver(&self, now_ns: u64) {
        let mut shared = self.lock();
        let NetworkState { connections, ports, changes, trace, now_ns: now, .. } = &mut *shared;
        *now = now_ns;
        for (number, connection) in connections.iter_mut() {
            if connection.decided_ns.is_some_and(|at_ns| at_ns <= now_ns) {
                connection.decided_ns = None;
                let port = &mut ports[connection.port];
                // A machine that is down does not answer.
                if port.is_up {
                    *changes += 1;
                    connection.connecting = if port.is_listening { Connecting::Open } else { Connecting::Refused };
                    if port.is_listening && connection.is_open[0] {
                        connection.is_open[1] = true;
                        port.accepted.push_back(*number);
                    }
                }
            }
            for (side, pipe) in connection.pipes.iter_mut().enumerate() {
                while pipe.pieces.front().is_some_and(|(at_ns, _)| *at_ns <= now_ns) {
                    let Some((_, bytes)) = pipe.pieces.pop_front() else { break };
                    *changes += 1;
                    *trace = fold(*trace, [now_ns, *number, side as u64, bytes.len() as u64]);
                    // An end that is closed drops what comes, and answers with a reset.
                    if connection.is_open[1 - side] && !pipe.is_reset {
                        pipe.arrived.extend_from_slice(&bytes);
                    }
                }
                if pipe.fin_ns.is_some_and(|at_ns| at_ns <= now_ns && pipe.pieces.is_empty()) {
                    (pipe.fin_ns, pipe.is_ended) = (None, true);
                    *changes += 1;
                }
                if pipe.reset_ns.is_some_and(|at_ns| at_ns <= now_ns) {
                    (pipe.reset_ns, pipe.is_reset) = (None, true);
                    pipe.silence();
                    *changes += 1;
                }
            }
        }
        connections
            .retain(|_, one| one.is_open[0] || one.is_open[1] || one.pipes.iter().any(|pipe| pipe.next_ns().is_some()));
    }

    /// The host connects to a port.
    pub(crate) fn connect(&self, port: usize) -> u64 {
        let mut shared = self.lock();
        let number = shared.next;
        shared.next += 1;
        let now_ns = shared.now_ns;
        let latency_ns = 2 * LATENCY_NS + shared.rng.below(JITTER_NS);
        let stalled_ns = shared.ports[port].stalled_ns;
        let resent_ns = if stalled_ns > now_ns { stalled_ns + shared.rng.below(2 * RESEND_NS) } else { 0 };
        let decided_ns = Some((now_ns + latency_ns).max(resent_ns));
        let connection = WorldConnection {
            port,
            pipes: Default::default(),
            is_open: [true, false],
            connecting: Connecting::Waiting,
            decided_ns,
        };
        shared.connections.insert(number, connection);
        number
    }

    pub(crate) fn connecting(&self, number: u64) -> Connecting {
        self.lock().connections.get(&number).map_or(Connecting::Refused, |one| one.connecting)
    }

    /// The next connection of a port.
    pub(crate) fn accept(&self, port: usize) -> Option<u64> {
        self.lock().ports[port].accepted.pop_front()
    }

    /// Whether a port accepts, and whether its machine answers. One that stops resets what was not accepted.
    pub(crate) fn set_port(&self, port: usize, is_listening: bool, is_up: bool) {
        let mut shared = self.lock();
        let new = &mut shared.ports[port];
        (new.is_listening, new.is_up) = (is_listening, is_up);
        let waiting = if is_listening { VecDeque::new() } else { std::mem::take(&mut new.accepted) };
        drop(shared);
        for number in waiting {
            self.close(number, Side::Target, if is_up { Ending::Reset } else { Ending::Silence });
        }
    }

    /// Takes bytes to be sent, and returns how many: zero if the other end does not read.
    pub(crate) fn write(&self, number: u64, side: Side, bytes: &[u8]) -> usize {
        let mut shared = self.lock();
        let now_ns = shared.now_ns;
        let (latency_ns, split) = (LATENCY_NS + shared.rng.below(JITTER_NS), shared.rng.below(8));
        let cut = shared.rng.below(bytes.len().max(1) as u64) as usize;
        let Some(connection) = shared.connections.get_mut(&number) else { return bytes.len() };
        let path_up = connection.port;
        let pipe = &mut connection.pipes[side as usize];
        if pipe.reset_ns.is_some() || pipe.is_reset {
            // Behind the cut nothing arrives.
            return bytes.len();
        }
        let taken = bytes.len().min(WINDOW_BYTES.saturating_sub(pipe.unread()));
        if taken == 0 {
            return 0;
        }
        let at_ns = (now_ns + latency_ns).max(pipe.last_ns).max(pipe.stalled_ns);
        let bytes = &bytes[..taken];
        let is_heard = connection.is_open[side.other() as usize];
        let stalled_ns = shared.ports[path_up].stalled_ns;
        let is_up = shared.ports[path_up].is_up;
        let Some(connection) = shared.connections.get_mut(&number) else { return taken };
        let at_ns = at_ns.max(stalled_ns);
        if !is_heard {
            // The other end is gone: its machine answers with a reset, if it is there.
            if is_up {
                let back = &mut connection.pipes[side.other() as usize];
                back.reset_ns.get_or_insert(at_ns + latency_ns);
            }
            return taken;
        }
        let pipe = &mut connection.pipes[side as usize];
        if split == 0 && cut > 0 && cut < taken {
            pipe.pieces.push_back((at_ns, bytes[..cut].to_vec()));
            pipe.pieces.push_back((at_ns + latency_ns, bytes[cut..].to_vec()));
            pipe.last_ns = at_ns + latency_ns;
        } else {
            pipe.pieces.push_back((at_ns, bytes.to_vec()));
            pipe.last_ns = at_ns;
        }
        taken
    }

    /// What this end can read.
    pub(crate) fn readable(&self, number: u64, side: Side) -> Readable {
        let shared = self.lock();
        let Some(connection) = shared.connections.get(&number) else { return Readable::Broken };
        let pipe = &connection.pipes[side.other() as usize];
        if !pipe.arrived.is_empty() {
            Readable::Bytes
        } else if pipe.is_reset {
            Readable::Broken
        } else if pipe.is_ended {
            Readable::End
        } else {
            Readable::Nothing
        }
    }

    /// Reads at most so many bytes.
    pub(crate) fn read(&self, number: u64, side: Side, most: usize) -> Vec<u8> {
        let mut shared = self.lock();
        shared.changes += 1;
        let Some(connection) = shared.connections.get_mut(&number) else { return Vec::new() };
        let arrived = &mut connection.pipes[side.other() as usize].arrived;
        let len = arrived.len().min(most);
        arrived.drain(..len).collect()
    }

    /// Closes an end.
    pub(crate) fn close(&self, number: u64, side: Side, ending: Ending) {
        let mut shared = self.lock();
        let (now_ns, late_ns) = (shared.now_ns, shared.late_ns);
        let (is_lossy, kept) = (shared.rng.below(2) == 0, shared.rng.draw());
        let Some(connection) = shared.connections.get_mut(&number) else { return };
        if !connection.is_open[side as usize] {
            return;
        }
        connection.is_open[side as usize] = false;
        let incoming = &mut connection.pipes[side.other() as usize];
        let is_unread = !incoming.arrived.is_empty();
        incoming.arrived.clear();
        let pipe = &mut connection.pipes[side as usize];
        match ending {
            Ending::Silence => pipe.silence(),
            Ending::Death if !is_unread => pipe.fin_ns = Some((now_ns + LATENCY_NS).max(pipe.last_ns)),
            Ending::Fin => pipe.fin_ns = Some((now_ns + LATENCY_NS).max(pipe.last_ns)),
            Ending::Death | Ending::Reset => {
                let last_ns = now_ns.saturating_add(late_ns);
                pipe.pieces.retain(|(at_ns, _)| *at_ns <= last_ns);
                if is_lossy {
                    let kept = (kept % (pipe.pieces.len() as u64 + 1)) as usize;
                    pipe.pieces.truncate(kept);
                }
                let behind_ns = pipe.pieces.back().map_or(0, |(at_ns, _)| *at_ns);
                pipe.fin_ns = None;
                pipe.reset_ns = Some((now_ns + LATENCY_NS).max(behind_ns).max(pipe.stalled_ns));
            }
        }
    }

    /// Ends sending of an end that goes on reading.
    pub(crate) fn shut_down(&self, number: u64, side: Side) {
        let mut shared = self.lock();
        let now_ns = shared.now_ns;
        let Some(connection) = shared.connections.get_mut(&number) else { return };
        let pipe = &mut connection.pipes[side as usize];
        if !pipe.is_ended {
            pipe.fin_ns = Some((now_ns + LATENCY_NS).max(pipe.last_ns));
        }
    }

    /// Nothing of a path arrives until then, either way.
    pub(crate) fn stall_path(&self, port: usize, until_ns: u64) {
        let mut shared = self.lock();
        let NetworkState { ports, connections, rng, .. } = &mut *shared;
        ports[port].stalled_ns = until_ns;
        for connection in connections.values_mut().filter(|one| one.port == port) {
            // Each stream has a time of its own for the next attempt.
            connection.pipes.iter_mut().for_each(|pipe| pipe.stall(until_ns + rng.below(RESEND_NS)));
            if let Some(at_ns) = &mut connection.decided_ns {
                *at_ns = (*at_ns).max(until_ns + rng.below(2 * RESEND_NS));
            }
        }
    }

    /// Stalls one direction of one connection that chance picks, or cuts both of it half-way in what is on its way.
    pub(crate) fn trouble_one(&self, stall_ns: Option<u64>) {
        let mut shared = self.lock();
        let now_ns = shared.now_ns;
        let open: Vec<u64> =
            shared.connections.iter().filter(|(_, one)| one.is_open == [true; 2]).map(|(n, _)| *n).collect();
        if open.is_empty() {
            return;
        }
        let number = open[shared.rng.below(open.len() as u64) as usize];
        let (side, cut) = (shared.rng.below(2) as usize, shared.rng.draw());
        let Some(connection) = shared.connections.get_mut(&number) else { return };
        if let Some(stall_ns) = stall_ns {
            connection.pipes[side].stall(now_ns + stall_ns);
            return;
        }
        for pipe in &mut connection.pipes {
            // The next piece arrives in part.
            if let Some((_, bytes)) = pipe.pieces.front_mut() {
                bytes.truncate((cut % bytes.len().max(1) as u64) as usize);
            }
            pipe.pieces.truncate(1);
            pipe.fin_ns = None;
            let behind_ns = pipe.pieces.back().map_or(0, |(at_ns, _)| *at_ns);
            pipe.reset_ns = Some((now_ns + LATENCY_NS).max(behind_ns));
        }
    }
}

/// Adds words to a fingerprint.
pub(crate) fn fold(mut trace: u64, words: impl IntoIterator<Item = u64>) -> u64 {
    for word in words {
        trace = (trace ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
    }
    trace
}
