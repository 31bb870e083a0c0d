//! The thread of a control socket: accepts a bounded number of clients and answers their requests.
//!
//! A request that may wait for the daemon's queues is a [job](Answer::Run) on a thread of its own. Jobs, and all else
//! that changes the daemon, are done one after another, in the order in which they came; a look is answered meanwhile.
//! A bounded number waits, and none whose client has left.
//!
//! A slow, silent, endless or closed client delays only itself, and only for a bounded time. While its answer is not
//! sent it is not read from, so its buffers are bounded as well. A new client replaces the one without a request for
//! longest, so thousands of idle connections block no client; one whose request has arrived by then is answered.
//!
//! Does not interpret the requests.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_export::BoundSocket;
use blkyard_mq::{HeldBack, LogLimit};
use blkyard_sys::{EventFd, PollFd, PollFlags, wait_until};
use serde_json::Value;

use super::wire::{ControlRequest, REQUEST_BYTES_MAX, answer_line, parse_request};

/// Clients at a time. The next replaces an idle one, and waits in the socket's backlog while there is none.
pub const CLIENTS_MAX: usize = 32;

/// Changes that may wait for others. The rest of the clients can still look.
const WAITING_MAX: usize = 16;

/// Connections taken in one round: some are always answered before the next are taken.
const ACCEPTS_MAX: usize = 256;

/// Pause after a connection that failed: the process is out of descriptors, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a client may take from one request to the next, and to read an answer. People do not type here.
pub const CLIENT_TIME: Duration = Duration::from_secs(10);

/// Answer to a request.
pub enum Answer {
    /// This, and the next request may come.
    Say(Result<Value, String>),
    /// The result of a job, which runs on a thread of its own.
    Run(Box<dyn FnOnce() -> Result<Value, String> + Send>),
    /// The request was answered over the connection itself; the server ends.
    Last,
}

/// A control socket that is answered.
#[derive(Debug)]
pub struct ControlServer {
    thread: Option<JoinHandle<()>>,
    stop: Arc<EventFd>,
}

impl ControlServer {
    /// Answers at a socket, from now on, through `answer`.
    ///
    /// # Errors
    /// The system gives no thread or descriptor.
    pub fn start<A>(socket: Arc<BoundSocket>, answer: A) -> io::Result<ControlServer>
    where
        A: FnMut(ControlRequest, &UnixStream) -> Answer + Send + 'static,
    {
        ControlServer::start_with(socket, CLIENT_TIME, answer)
    }

    fn start_with<A>(socket: Arc<BoundSocket>, client_time: Duration, answer: A) -> io::Result<ControlServer>
    where
        A: FnMut(ControlRequest, &UnixStream) -> Answer + Send + 'static,
    {
        let stop = Arc::new(EventFd::new()?);
        socket.listener().set_nonblocking(true)?;
        let limit = LogLimit::default();
        let serving = ServingControl {
            socket,
            stop: Arc::clone(&stop),
            clients: Vec::new(),
            next_client: 0,
            job: None,
            job_ended: Arc::new(EventFd::new()?),
            waiting: VecDeque::new(),
            client_time,
            accept_at: None,
            limit,
            answer,
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || serving.run())?;
        Ok(ControlServer { thread: Some(thread), stop })
    }

    /// Whether its thread has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Ends the thread, and removes the socket. A request under way is finished first.
impl Drop for ControlServer {
    fn drop(&mut self) {
        self.stop.signal();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the control socket panicked");
        }
    }
}

struct ServingControl<A> {
    socket: Arc<BoundSocket>,
    stop: Arc<EventFd>,
    clients: Vec<ControlClient>,
    /// Number of the next client.
    next_client: u64,
    /// The job that runs: the client that asked for it, and where its answer comes.
    job: Option<(u64, Receiver<Result<Value, String>>)>,
    /// Signalled when it has ended.
    job_ended: Arc<EventFd>,
    /// Requests that wait for its end, with their clients.
    waiting: VecDeque<(u64, ControlRequest)>,
    client_time: Duration,
    /// When connections are taken again, after one that failed.
    accept_at: Option<Instant>,
    /// Of the log lines that clients cause.
    limit: LogLimit,
    answer: A,
}

struct ControlClient {
    number: u64,
    stream: UnixStream,
    /// Its request is a job, or waits for the end of one. It is not read from meanwhile.
    is_pending: bool,
    /// Received bytes of the next request.
    input: Vec<u8>,
    /// The answer that is being sent, and how much of it was.
    output: Vec<u8>,
    sent: usize,
    /// When its last request was answered.
    since: Instant,
    /// It gets its answer and no more.
    closing: bool,
}

/// Result of a client's turn.
enum ClientTurn {
    /// Waits until it is readable or writable again.
    Wait,
    /// A whole request.
    Request(Vec<u8>),
    /// Ended.
    Gone,
}

/// State of a client after its turn.
enum Fate {
    Stays,
    Leaves,
    /// The server ends, and with it all clients.
    Ends,
}

impl<A: FnMut(ControlRequest, &UnixStream) -> Answer> ServingControl<A> {
    fn run(mut self) {
        while !self.wait() {
            self.end_job();
            // A change whose client has left before it began is not made.
            self.clients.retain(|client| !client.is_pending || !client.has_left());
            self.waiting.retain(|(number, _)| self.clients.iter().any(|client| client.number == *number));
            if self.accept_at.is_none_or(|at| Instant::now() >= at) {
                self.accept_at = None;
                self.accept();
            }
            while self.job.is_none()
                && let Some((client, request)) = self.waiting.pop_front()
            {
                let Some(index) = self.clients.iter().position(|other| other.number == client) else { continue };
                match self.obey(index, request) {
                    Fate::Stays => {}
                    Fate::Leaves => drop(self.clients.swap_remove(index)),
                    Fate::Ends => return,
                }
            }
            let mut index = 0;
            while index < self.clients.len() {
                match self.turn(index) {
                    Fate::Stays => index += 1,
                    Fate::Leaves => drop(self.clients.swap_remove(index)),
                    Fate::Ends => return,
                }
            }
            let (now, time) = (Instant::now(), self.client_time);
            self.clients.retain(|client| client.is_pending || now.duration_since(client.since) < time);
        }
        if let Some((client, answer)) = self.job.take() {
            self.reply_to(client, &answer.recv().unwrap_or_else(|_| Err(JOB_PANICKED.into())));
        }
    }

    /// Answers who asked for a job that has ended.
    fn end_job(&mut self) {
        self.job_ended.take();
        if let Some((client, answer)) = &self.job {
            let (client, outcome) = match answer.try_recv() {
                Ok(outcome) => (*client, outcome),
                Err(TryRecvError::Disconnected) => (*client, Err(JOB_PANICKED.into())),
                Err(TryRecvError::Empty) => return,
            };
            self.job = None;
            self.reply_to(client, &outcome);
        }
    }

    fn reply_to(&mut self, client: u64, outcome: &Result<Value, String>) {
        if let Some(index) = self.clients.iter().position(|other| other.number == client)
            && let Fate::Leaves = self.reply(index, outcome)
        {
            drop(self.clients.swap_remove(index));
        }
    }

    fn reply(&mut self, index: usize, outcome: &Result<Value, String>) -> Fate {
        let client = &mut self.clients[index];
        client.is_pending = false;
        client.since = Instant::now();
        client.owe(answer_line(outcome));
        match client.send() {
            ClientTurn::Gone => Fate::Leaves,
            _ => Fate::Stays,
        }
    }

    /// Waits until there is something to do; true if that is to end.
    fn wait(&self) -> bool {
        let now = Instant::now();
        let due = |client: &ControlClient| if client.has_request() { now } else { client.since + self.client_time };
        let clients = self.clients.iter().filter(|client| !client.is_pending);
        let deadline = clients.map(due).chain(self.accept_at).min();
        let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN), PollFd::new(&*self.job_ended, PollFlags::IN)];
        let has_room = self.clients.len() < CLIENTS_MAX || self.clients.iter().any(ControlClient::is_idle);
        if has_room && self.accept_at.is_none() {
            fds.push(PollFd::new(self.socket.listener(), PollFlags::IN));
        }
        for client in &self.clients {
            let flags = match client {
                // That it leaves is reported always.
                ControlClient { is_pending: true, .. } => PollFlags::empty(),
                client if client.is_owed() => PollFlags::OUT,
                _ => PollFlags::IN,
            };
            fds.push(PollFd::from_borrowed_fd(client.stream.as_fd(), flags));
        }
        match wait_until(&mut fds, now, deadline) {
            Ok(_) => !fds[0].revents().is_empty(),
            Err(error) => {
                tracing::error!(
                    "the control socket is closed: {error}; inspect and set do not work until the daemon is restarted"
                );
                true
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            if self.clients.len() >= CLIENTS_MAX && !self.make_room() {
                return;
            }
            match self.socket.accept() {
                Ok(Some(taken)) if is_ours(taken.uid) && taken.stream.set_nonblocking(true).is_ok() => {
                    let mut client = ControlClient::new(self.next_client, taken.stream);
                    self.next_client += 1;
                    // Its request may have arrived while it waited: then it is not replaced before it is answered.
                    client.read_ahead();
                    self.clients.push(client);
                }
                Ok(Some(_)) => self.warn("a process of another user was refused"),
                Ok(None) => return,
                Err(error) => {
                    self.warn(format_args!(
                        "a connection could not be accepted: {error}; check the limit on open files"
                    ));
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn warn(&mut self, line: impl Display) {
        if let Some(held_back) = self.limit.pass(Instant::now()).map(HeldBack) {
            tracing::warn!("the control socket: {line}{held_back}");
        }
    }

    /// Drops the client that has been idle for longest. False if there is none.
    fn make_room(&mut self) -> bool {
        loop {
            let idle = self.clients.iter().enumerate().filter(|(_, client)| client.is_idle());
            let Some((index, _)) = idle.min_by_key(|(_, client)| client.since) else { return false };
            self.clients[index].read_ahead();
            if self.clients[index].is_idle() {
                drop(self.clients.swap_remove(index));
                return true;
            }
        }
    }

    /// Takes a client as far as it goes without waiting, but no further than one request.
    fn turn(&mut self, index: usize) -> Fate {
        match self.clients[index].advance() {
            ClientTurn::Wait => Fate::Stays,
            ClientTurn::Gone => Fate::Leaves,
            ClientTurn::Request(line) => match parse_request(&line) {
                Ok(request) if request.changes() && (self.job.is_some() || !self.waiting.is_empty()) => {
                    if self.waiting.len() >= WAITING_MAX {
                        return self.reply(index, &Err(TOO_MANY_WAIT.into()));
                    }
                    let client = &mut self.clients[index];
                    client.is_pending = true;
                    self.waiting.push_back((client.number, request));
                    Fate::Stays
                }
                Ok(request) => self.obey(index, request),
                Err(error) => self.reply(index, &Err(error)),
            },
        }
    }

    fn obey(&mut self, index: usize, request: ControlRequest) -> Fate {
        let begin = Instant::now();
        let outcome = match (self.answer)(request, &self.clients[index].stream) {
            Answer::Say(outcome) => outcome,
            Answer::Last => return Fate::Ends,
            Answer::Run(job) => match run(job, Arc::clone(&self.job_ended)) {
                Ok(answer) => {
                    let client = &mut self.clients[index];
                    client.is_pending = true;
                    self.job = Some((client.number, answer));
                    return Fate::Stays;
                }
                Err(error) => Err(format!("no thread: {error}; see the limits on threads and memory")),
            },
        };
        // The time we took is not theirs.
        let spent = begin.elapsed();
        self.clients.iter_mut().for_each(|client| client.since += spent);
        self.reply(index, &outcome)
    }
}

/// What a client is told that would be one too many.
const TOO_MANY_WAIT: &str = "16 other changes wait for one that has not completed; try again later";

/// What a client is told whose job panicked.
const JOB_PANICKED: &str = "the thread of this request panicked; see the daemon's log";

/// Runs a job on a thread of its own, and signals when it has ended.
fn run(
    job: Box<dyn FnOnce() -> Result<Value, String> + Send>,
    ended: Arc<EventFd>,
) -> io::Result<Receiver<Result<Value, String>>> {
    /// Also when a panic unwinds.
    struct Signal(Arc<EventFd>);
    impl Drop for Signal {
        fn drop(&mut self) {
            self.0.signal();
        }
    }
    let (told, answer) = channel();
    let run = move || {
        let _signal = Signal(ended);
        // Sent, or dropped by a panic, before the signal.
        let told = told;
        let _ = told.send(job());
    };
    std::thread::Builder::new().name("set".into()).spawn(run)?;
    Ok(answer)
}

/// Whether the other end is a process of the same user, or of root: between the making of a socket and the setting of
/// its mode others may have slipped in.
fn is_ours(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl ControlClient {
    fn new(number: u64, stream: UnixStream) -> ControlClient {
        ControlClient {
            number,
            stream,
            is_pending: false,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            since: Instant::now(),
            closing: false,
        }
    }

    /// Whether part of an answer is still to be sent.
    fn is_owed(&self) -> bool {
        self.sent < self.output.len()
    }

    fn owe(&mut self, line: String) {
        self.output = line.into_bytes();
        self.sent = 0;
    }

    /// Whether a whole request was read and not yet answered.
    fn has_request(&self) -> bool {
        !self.is_pending && !self.is_owed() && !self.closing && self.input.contains(&b'\n')
    }

    /// Whether it has no request that is still to be answered.
    fn is_idle(&self) -> bool {
        !self.is_pending && !self.is_owed() && !self.has_request()
    }

    /// Whether the other end has been closed.
    fn has_left(&self) -> bool {
        let now = Instant::now();
        let mut fds = [PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::empty())];
        wait_until(&mut fds, now, Some(now)).is_ok() && !fds[0].revents().is_empty()
    }

    /// Reads available bytes, unless a request waits already. Errors of the connection are handled in its turn.
    fn read_ahead(&mut self) {
        let mut bytes = [0; 4096];
        while self.is_idle() && self.input.len() < REQUEST_BYTES_MAX {
            let room = bytes.len().min(REQUEST_BYTES_MAX - self.input.len());
            match self.stream.read(&mut bytes[..room]) {
                Ok(n) if n > 0 => self.input.extend_from_slice(&bytes[..n]),
                _ => return,
            }
        }
    }

    /// Sends the answer, as far as possible.
    fn send(&mut self) -> ClientTurn {
        while self.is_owed() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return ClientTurn::Gone,
                Ok(n) => self.sent += n,
                Err(error) => return ClientTurn::after(&error),
            }
            if !self.is_owed() {
                self.output = Vec::new();
                self.sent = 0;
                self.since = Instant::now();
            }
        }
        if self.closing { ClientTurn::Gone } else { ClientTurn::Wait }
    }

    fn advance(&mut self) -> ClientTurn {
        if self.is_pending {
            return ClientTurn::Wait;
        }
        match self.send() {
            ClientTurn::Wait if !self.is_owed() => {}
            turn => return turn,
        }
        loop {
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let rest = self.input.split_off(end + 1);
                return ClientTurn::Request(std::mem::replace(&mut self.input, rest));
            }
            if self.input.len() >= REQUEST_BYTES_MAX {
                self.closing = true;
                self.owe(answer_line(&Err(format!(
                    "the request exceeds {REQUEST_BYTES_MAX} bytes; send a shorter one"
                ))));
                return self.send();
            }
            let mut bytes = [0; 4096];
            let room = bytes.len().min(REQUEST_BYTES_MAX - self.input.len());
            match self.stream.read(&mut bytes[..room]) {
                Ok(0) => return ClientTurn::Gone,
                Ok(n) => self.input.extend_from_slice(&bytes[..n]),
                Err(error) => return ClientTurn::after(&error),
            }
        }
    }
}

impl ClientTurn {
    fn after(error: &io::Error) -> ClientTurn {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => ClientTurn::Wait,
            _ => ClientTurn::Gone,
        }
    }
}

#[cfg(test)]
mod tests;
