//! One I/O queue over fabrics: requests become commands on a connection, completions become statuses.
//!
//! Owned by one lane, within the driver of its hardware queue. The owner of the association ([`FabricsHost`]) says when
//! to connect, to start, to close and to fail; the queue reports what has happened. It does no I/O: its owner does what
//! [`FabricsIoQueue::take_stream_request`] says, passes received bytes in, and sends lists.
//!
//! ```text
//!  Closed ── Connect ──▶ Opening ── opened ──▶ Initializing ── Connect done ──▶ Connected ── Start ──▶ Running
//!    ▲                      │                        │                             │                     │
//!    └────── closed ────────┴──────── Closing ◀──────┴───────── Close, lost ───────┴─────────────────────┘
//! ```
//!
//! Where the controller asks for it, Authenticating is between Initializing and Connected.
//!
//! Requests at a connection that is lost are given back once its stream is proven closed, without an answer if their
//! command was sent: until then the kernel may access their memory, and afterwards the target may still execute them.
//! A request whose commands are cancelled each time fails in place of being sent again ([`Cancellations`]). Where there
//! is another path, the queue over all paths counts.
//!
//! [`Cancellations`]: blkyard_mq::Cancellations
//!
//! [`FabricsHost`]: super::FabricsHost

mod hedges;

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mem::{BufferAccess, Region, RegionTable, RegisteredBuffer, Segment};
use blkyard_mq::{Batch, Done, HedgeDriver, Op, Shortage, Status, Tag, TimedOut};

use self::hedges::{HEDGE_BYTES_MAX, HEDGES_MAX, HedgeSlots};
use crate::auth::{AUTH_MESSAGE_BYTES_MAX, AuthHost, AuthStep};
use crate::fabrics::{
    CONNECT_AUTHENTICATION, CONNECT_BYTES, ConnectCommand, ConnectData, FabricsCommand, fabrics_status,
};
use crate::host::{Retries, SLOT_MASK};
use crate::tcp::{SendList, TcpDirection, TcpEnd, TcpHostEvent, TcpHostOptions, TcpHostQueue};
use crate::{Completed, DSM_RANGE_BYTES, NvmeNamespace, NvmeStatus, PAGE, RetryDelays, Sqe};

/// Slot of Connect and of the authentication, which no request has before they are complete.
const CONNECT_SLOT: u16 = 0;
/// Pause before a retry of a request that the controller has refused because of the state of its access, ns. Five of
/// them are the ten seconds that a transition takes at most by the defaults of targets (ANATT).
const ACCESS_RETRY_NS: u64 = 2_000_000_000;
/// Upper bound of slots: identifiers of commands have twelve bits for them.
const SLOTS_MAX: u16 = SLOT_MASK + 1;
/// Private memory of a slot: the ranges of a discard, or the data of Connect and of the authentication.
const SLOT_BYTES: u64 = PAGE;

/// Parameters of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricsConnect {
    /// Number of the association, in all reports about this connection.
    pub association: u64,
    /// The Connect command.
    pub command: ConnectCommand,
    /// Its data.
    pub data: ConnectData,
    /// The authentication of this queue, if the controller asks for it; unset if this host has no secret.
    pub auth: Option<AuthHost>,
    /// Maximum in-capsule data, bytes.
    pub in_capsule: u32,
    /// Retry delays of the controller.
    pub delays: RetryDelays,
    /// Time for the initialization of the connection, Connect and authentication, ns; also for the stream's connect.
    pub connect_ns: u64,
}

/// Command of the association's owner to a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FabricsQueueCommand {
    /// Connect, once the stream before is closed. Answered by `Connected` or `Lost`.
    Connect(Box<FabricsConnect>),
    /// Send requests.
    Start,
    /// Send no more, close the stream, and give requests back. Answered by `Closed`.
    Close,
    /// Fail all requests that wait, until the next `Start`.
    Fail,
}

/// Report of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricsQueueReport {
    /// The controller has accepted the Connect.
    Connected,
    /// The controller has refused it. The stream is being closed.
    Refused {
        /// Status of Connect.
        status: NvmeStatus,
    },
    /// The connection failed or was lost. The stream is being closed.
    Lost,
    /// A command has exceeded its timeout.
    Late,
    /// The controller has refused I/O because of the state of the namespace's access.
    AccessChanged,
    /// The stream is closed, and all requests were given back.
    Closed {
        /// Whether a write among them may still be executed.
        has_unanswered_writes: bool,
    },
}

/// What the owner of the stream is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRequest {
    /// Connect a stream, then call [`FabricsIoQueue::opened`], or [`FabricsIoQueue::closed`] if that fails.
    Open,
    /// Close the stream, then call [`FabricsIoQueue::closed`].
    Close,
}

/// Properties of a queue.
#[derive(Clone, Copy, Debug)]
pub struct FabricsIoQueueOptions {
    /// Its identifier, from one.
    pub qid: u16,
    /// Maximum requests in flight.
    pub depth: u16,
    /// Maximum segments of a request.
    pub segments_max: usize,
    /// Whether headers have a digest.
    pub header_digest: bool,
    /// Whether data has a digest.
    pub data_digest: bool,
    /// Whether it is one path of several: path errors end a request at once, for another path, instead of being retried
    /// here, and reads may be hedged.
    pub fails_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FabricsQueueState {
    Closed,
    Opening,
    Initializing,
    /// The step whose command is in flight: whether it sends.
    Authenticating {
        sends: bool,
    },
    Connected,
    Running,
    Closing,
}

/// The host's side of one I/O queue over fabrics.
#[derive(Debug)]
pub struct FabricsIoQueue {
    options: FabricsIoQueueOptions,
    queue: TcpHostQueue,
    state: FabricsQueueState,
    /// Whether waiting requests fail.
    is_failing: bool,
    /// Parameters of the present connection.
    connect: Option<Box<FabricsConnect>>,
    /// Those of the next one, while the stream before is closing.
    next: Option<Box<FabricsConnect>>,
    /// Indexed by namespace number in the hardware queue.
    namespaces: Box<[NvmeNamespace]>,
    /// Private memory, with the same number in every table.
    private: Arc<RegisteredBuffer>,
    private_region: Arc<Region>,
    memory: Arc<RegionTable>,
    /// Tags of requests in flight, by slot.
    parked: Box<[Option<Tag>]>,
    hedges: HedgeSlots,
    retries: Retries,
    /// When Connect must be complete.
    until_ns: Option<u64>,
    /// Ended commands of requests.
    ended: Vec<Completed>,
    /// Whether the stream is closed, and requests are to be given back.
    wants_cancel: bool,
    stream_request: Option<StreamRequest>,
    reports: VecDeque<(u64, FabricsQueueReport)>,
    /// Whether completions were seen since the last look.
    saw_traffic: bool,
}

impl FabricsIoQueue {
    /// A closed queue, without memory: see [`FabricsIoQueue::set_memory`].
    ///
    /// # Errors
    /// No memory for private data.
    pub fn new(options: FabricsIoQueueOptions, namespaces: Box<[NvmeNamespace]>) -> std::io::Result<FabricsIoQueue> {
        let depth = usize::from(options.depth);
        let extra = extra_slots(&options);
        let slots = depth as u64 + u64::from(extra);
        // One buffer for each hedge, and one for what comes for reads that were given up.
        let buffers = if extra == 0 { 0 } else { u64::from(extra) + 1 };
        let bytes = slots * SLOT_BYTES + buffers * u64::from(HEDGE_BYTES_MAX);
        let private_region = Region::anonymous(bytes as usize)?;
        let private = RegisteredBuffer::new(&private_region, 0, bytes, BufferAccess::ReadWrite)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        let mut queue = FabricsIoQueue {
            options,
            queue: TcpHostQueue::new(tcp_options(&options, 0)),
            state: FabricsQueueState::Closed,
            is_failing: false,
            connect: None,
            next: None,
            namespaces,
            private,
            private_region,
            memory: Arc::new(RegionTable::default()),
            parked: (0..slots).map(|_| None).collect(),
            hedges: HedgeSlots::new(options.depth, extra),
            retries: Retries::new(options.depth, RetryDelays::default()),
            until_ns: None,
            ended: Vec::with_capacity(slots as usize),
            wants_cancel: false,
            stream_request: None,
            reports: VecDeque::with_capacity(8),
            saw_traffic: false,
        };
        queue.set_memory(&RegionTable::default());
        Ok(queue)
    }

    /// Its identifier.
    pub fn qid(&self) -> u16 {
        self.options.qid
    }

    /// Number of the association that requests in flight were sent on; zero before the first.
    pub fn association(&self) -> u64 {
        self.connect.as_ref().map_or(0, |connect| connect.association)
    }

    /// Maximum requests in flight.
    pub fn depth(&self) -> u16 {
        self.options.depth
    }

    /// The memory that segments of requests point into. Those in flight keep theirs: the numbers of their regions stay.
    pub fn set_memory(&mut self, memory: &RegionTable) {
        let mut table = memory.clone();
        table.insert(Arc::clone(&self.private_region));
        table.add_buffer(&self.private);
        self.memory = Arc::new(table);
    }

    /// The same memory with the private region of this queue: the one of lists and destinations.
    pub fn memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// The namespaces of its hardware queue. No request is in flight.
    pub fn set_namespaces(&mut self, namespaces: Box<[NvmeNamespace]>) {
        self.namespaces = namespaces;
    }

    /// Executes a command of the association's owner.
    pub fn command(&mut self, command: FabricsQueueCommand) {
        match command {
            FabricsQueueCommand::Connect(connect) if self.state == FabricsQueueState::Closed && !self.wants_cancel => {
                self.open(connect);
            }
            FabricsQueueCommand::Connect(connect) => {
                self.next = Some(connect);
                self.close(TcpEnd::Closed);
            }
            FabricsQueueCommand::Start => {
                self.is_failing = false;
                if self.state == FabricsQueueState::Connected {
                    self.state = FabricsQueueState::Running;
                }
            }
            FabricsQueueCommand::Close => {
                self.next = None;
                if self.state == FabricsQueueState::Closed && !self.wants_cancel {
                    self.report(FabricsQueueReport::Closed { has_unanswered_writes: false });
                }
                self.close(TcpEnd::Closed);
            }
            FabricsQueueCommand::Fail => self.is_failing = true,
        }
    }

    /// The next report, with the number of its association.
    pub fn take_report(&mut self) -> Option<(u64, FabricsQueueReport)> {
        self.reports.pop_front()
    }

    /// What the owner of the stream is to do now.
    pub fn take_stream_request(&mut self) -> Option<StreamRequest> {
        self.stream_request.take()
    }

    /// Whether completions were seen since the last call: for keep-alive by traffic.
    pub fn take_traffic(&mut self) -> bool {
        std::mem::take(&mut self.saw_traffic)
    }

    fn report(&mut self, report: FabricsQueueReport) {
        let association = self.association();
        // Repeated ones say no more.
        if self.reports.back() != Some(&(association, report)) {
            self.reports.push_back((association, report));
        }
    }

    fn open(&mut self, connect: Box<FabricsConnect>) {
        self.queue = TcpHostQueue::new(tcp_options(&self.options, connect.in_capsule));
        self.retries.set_delays(connect.delays);
        self.connect = Some(connect);
        self.state = FabricsQueueState::Opening;
        self.stream_request = Some(StreamRequest::Open);
    }

    /// The stream is connected.
    pub fn opened(&mut self, now_ns: u64) {
        let (FabricsQueueState::Opening, Some(connect)) = (self.state, &self.connect) else { return };
        self.state = FabricsQueueState::Initializing;
        self.until_ns = Some(now_ns.saturating_add(connect.connect_ns));
        let mut bytes = [0; CONNECT_BYTES];
        connect.data.write(&mut bytes);
        let data = self.private.segment(0, CONNECT_BYTES as u32);
        if let Some(span) = self.memory.resolve(data) {
            span.copy_from_slice(&bytes);
        }
        let sqe = FabricsCommand::Connect(connect.command).sqe();
        // Sent behind the initialization of the connection.
        self.queue.push(&self.memory, CONNECT_SLOT, sqe, TcpDirection::Write, std::iter::once(data));
    }

    /// The stream is broken, or the controller has ended it. Its close follows.
    pub fn lost(&mut self) {
        if !matches!(self.state, FabricsQueueState::Closed | FabricsQueueState::Closing) {
            self.report_loss();
            self.close(TcpEnd::Closed);
        }
    }

    /// The stream is closed, or was not connected: the kernel accesses no memory of requests any more.
    pub fn closed(&mut self) {
        match self.state {
            FabricsQueueState::Closed => return,
            FabricsQueueState::Closing => {}
            _ => self.report_loss(),
        }
        self.queue.abandon(TcpEnd::Closed);
        (self.stream_request, self.until_ns) = (None, None);
        self.state = FabricsQueueState::Closed;
        self.wants_cancel = true;
    }

    fn close(&mut self, end: TcpEnd) {
        self.until_ns = None;
        match self.state {
            FabricsQueueState::Closed | FabricsQueueState::Closing => {}
            FabricsQueueState::Opening if self.stream_request == Some(StreamRequest::Open) => {
                // There is no stream yet.
                self.state = FabricsQueueState::Closing;
                self.closed();
            }
            _ => {
                if end == TcpEnd::Closed {
                    self.queue.abandon(end);
                }
                self.state = FabricsQueueState::Closing;
                self.stream_request = Some(StreamRequest::Close);
            }
        }
    }

    /// Submits requests of the batch, to be sent with the next list.
    #[inline]
    pub fn queue(&mut self, batch: &mut Batch<'_>) {
        if self.state != FabricsQueueState::Running {
            return self.refuse(batch);
        }
        while self.has_room()
            && let Some((tag, request, segments)) = batch.take()
        {
            let slot = self.hedges.slot(tag.index());
            if !self.retries.is_empty() {
                if !request.was_requeued() {
                    // Left by a request that was taken to another path.
                    self.retries.forget(&tag);
                } else if self.retries.is_exhausted(&tag) {
                    // Not sooner: now no earlier command of it is executed any more.
                    self.retries.forget(&tag);
                    batch.complete(tag, Status::Io);
                    continue;
                }
            }
            // The hardware queue has only namespaces that its driver knows.
            let namespace = self.namespaces[usize::from(request.namespace())];
            let (op, sector) = (request.op(), request.sector());
            let is_pushed = if op == Op::Discard {
                self.push_discard(slot, namespace, batch.ranges(&tag))
            } else {
                let direction = match op {
                    Op::Read => TcpDirection::Read,
                    Op::Write => TcpDirection::Write,
                    _ => TcpDirection::None,
                };
                let sqe = namespace.command(op, sector, request.sectors(), request.flags());
                self.queue.push(&self.memory, slot, sqe, direction, segments)
            };
            if is_pushed {
                self.parked[usize::from(slot)] = Some(tag);
            } else {
                self.retries.forget(&tag);
                batch.complete(tag, Status::Invalid);
            }
        }
    }

    #[cold]
    fn push_discard(&mut self, slot: u16, namespace: NvmeNamespace, ranges: impl Iterator<Item = (u64, u32)>) -> bool {
        let offset = u64::from(slot) * SLOT_BYTES;
        let mut count: u16 = 0;
        for range in ranges {
            let at = offset + u64::from(count) * DSM_RANGE_BYTES as u64;
            let Some(span) = self.private_region.span(at, DSM_RANGE_BYTES).filter(|_| count < Sqe::RANGES_MAX) else {
                return false;
            };
            let words = namespace.range(range).words();
            let bytes: [u8; DSM_RANGE_BYTES] = std::array::from_fn(|byte| words[byte / 8].to_le_bytes()[byte % 8]);
            span.copy_from_slice(&bytes);
            count += 1;
        }
        let len = u32::from(count) * DSM_RANGE_BYTES as u32;
        let data = self.private.segment(offset, len);
        let sqe = Sqe::deallocate(namespace.nsid, count);
        count > 0 && self.queue.push(&self.memory, slot, sqe, TcpDirection::Write, std::iter::once(data))
    }

    /// Handles requests that arrive without a connection.
    #[cold]
    fn refuse(&mut self, batch: &mut Batch<'_>) {
        if !self.is_failing {
            return batch.short_of(Shortage::Device);
        }
        while let Some((tag, request, _)) = batch.take() {
            let may_execute = request.is_unanswered() && request.op().is_write();
            self.retries.forget(&tag);
            batch.complete(tag, if may_execute { Status::Timeout } else { Status::Path });
        }
    }

    /// Completes requests.
    #[inline]
    pub fn poll(&mut self, done: &mut Done<'_>, now_ns: u64) {
        if self.until_ns.is_some_and(|until_ns| now_ns >= until_ns) {
            self.lost();
        }
        self.retries.requeue_due(done, now_ns);
        for at in 0..self.ended.len() {
            let Completed { slot, status, .. } = self.ended[at];
            let Some(tag) = self.parked[usize::from(slot)].take() else {
                self.hedges.end(slot, status.is_success());
                continue;
            };
            if status.is_success() && self.retries.is_empty() {
                done.complete(tag, Status::Ok);
            } else {
                self.finish(tag, status, done, now_ns);
            }
        }
        self.ended.clear();
        if self.wants_cancel {
            self.cancel(done, now_ns);
        }
    }

    #[cold]
    fn finish(&mut self, tag: Tag, status: NvmeStatus, done: &mut Done<'_>, now_ns: u64) {
        if status.is_path_error() {
            self.report(FabricsQueueReport::AccessChanged);
            if self.options.fails_over {
                self.retries.forget(&tag);
                return done.complete(tag, status.to_status());
            }
            if status.without_flags() != NvmeStatus::HOST_ABORTED {
                return self.retries.finish_after(tag, status, ACCESS_RETRY_NS, done, now_ns);
            }
        }
        self.retries.finish(tag, status, done, now_ns);
    }

    /// Gives back all requests of a connection whose stream is closed.
    #[cold]
    fn cancel(&mut self, done: &mut Done<'_>, now_ns: u64) {
        self.wants_cancel = false;
        let mut has_unanswered_writes = false;
        for slot in 0..self.queue.depth() {
            let was_sent = self.queue.was_sent(slot);
            self.queue.cancel(slot);
            let Some(tag) = self.parked[usize::from(slot)].take() else {
                self.hedges.end(slot, false);
                continue;
            };
            if was_sent {
                has_unanswered_writes |= done.request(&tag).0.op().is_write();
                if !self.options.fails_over {
                    self.retries.note_cancelled(&tag, now_ns);
                }
                done.requeue(tag);
            } else {
                done.requeue_answered(tag);
            }
        }
        // Answered before, and given back with the others, so that order is kept.
        self.retries.requeue_due(done, u64::MAX);
        self.report(FabricsQueueReport::Closed { has_unanswered_writes });
        if let Some(connect) = self.next.take() {
            self.open(connect);
        }
    }

    /// Whether [`FabricsIoQueue::poll`] has something to do.
    #[inline]
    pub fn wants_poll(&self) -> bool {
        self.wants_cancel || !self.ended.is_empty()
    }

    /// Whether the controller has room for another command: hedges and reads given up are beyond the depth of the
    /// hardware queue.
    #[inline]
    fn has_room(&self) -> bool {
        let extra = self.hedges.used();
        extra == 0 || self.in_flight() + extra < usize::from(self.options.depth)
    }

    /// What it offers for hedged reads, if it is a path.
    pub fn hedges(&mut self) -> Option<&mut dyn HedgeDriver> {
        if self.options.fails_over { Some(self) } else { None }
    }

    /// Requests at the connection.
    pub fn in_flight(&self) -> usize {
        self.parked.iter().flatten().count()
    }

    /// Latest time of the next poll without an event: the end of a retry delay, or of the time for Connect.
    pub fn deadline_ns(&self) -> Option<u64> {
        [self.retries.deadline_ns(), self.until_ns].into_iter().flatten().min()
    }

    /// The request of this slot has exceeded its timeout. It stays in flight until the stream is closed.
    pub fn timed_out(&mut self) -> TimedOut {
        if self.state == FabricsQueueState::Running {
            self.report(FabricsQueueReport::Late);
        }
        TimedOut::MoreTime
    }

    /// Whether [`FabricsIoQueue::fill`] has something to send.
    #[inline]
    pub fn wants_send(&self) -> bool {
        let is_open = !matches!(self.state, FabricsQueueState::Closed | FabricsQueueState::Opening);
        is_open && self.queue.wants_send()
    }

    /// Adds PDUs to an empty list. Returns its number, or `None` if there are none.
    pub fn fill(&mut self, list: &mut SendList) -> Option<u64> {
        self.queue.fill(&self.memory, list)
    }

    /// The kernel is done with the memory of all lists up to this number.
    pub fn sent(&mut self, number: u64) {
        self.queue.sent(number);
        self.receive(&[]);
    }

    /// Destination of the next bytes of the stream if they are data: they may be received into it directly. Not into
    /// memory of the queue: a hedge may be in flight when the queue leaves its lane, and a receive that is left behind
    /// there must not end in the buffer of a later one.
    pub fn destination(&self) -> Option<Segment> {
        let own = self.private.segment(0, 0).region;
        self.queue.destination().filter(|segment| segment.region != own)
    }

    /// So many bytes were received into the [destination](FabricsIoQueue::destination).
    pub fn received(&mut self, bytes: u32) {
        self.queue.received(&self.memory, bytes);
    }

    /// Takes received bytes, all of them.
    #[inline]
    pub fn receive(&mut self, mut bytes: &[u8]) {
        loop {
            let memory = &self.memory;
            let event = self.queue.receive(&mut bytes, |segment, piece| {
                if let Some(span) = memory.resolve(segment) {
                    span.copy_from_slice(piece);
                }
            });
            match event {
                None => return,
                Some(TcpHostEvent::Completed(completed)) if self.state == FabricsQueueState::Initializing => {
                    self.connected(completed);
                }
                Some(TcpHostEvent::Completed(completed))
                    if let FabricsQueueState::Authenticating { sends } = self.state =>
                {
                    self.auth_completed(completed, sends);
                }
                Some(TcpHostEvent::Completed(completed)) => {
                    self.saw_traffic = true;
                    self.ended.push(completed);
                }
                Some(TcpHostEvent::Started) => {}
                Some(TcpHostEvent::Ended(end)) => {
                    self.report_loss();
                    // A TermReq is sent first.
                    self.close(end);
                }
            }
        }
    }

    #[cold]
    fn connected(&mut self, completed: Completed) {
        if !completed.status.is_success() {
            return self.refused(completed.status);
        }
        let auth = self.connect.as_ref().and_then(|connect| connect.auth.as_ref());
        match AuthHost::after_connect(auth, completed.result & CONNECT_AUTHENTICATION != 0) {
            Ok(Some(first)) => self.authenticate(&AuthStep::Send(first)),
            Ok(None) => self.admitted(),
            Err(_) => self.refused(fabrics_status::AUTHENTICATION_REQUIRED.with_dnr()),
        }
    }

    fn admitted(&mut self) {
        self.until_ns = None;
        self.state = FabricsQueueState::Connected;
        self.report(FabricsQueueReport::Connected);
    }

    /// A controller may close the connection as soon as it is told that this host does not trust it.
    fn report_loss(&mut self) {
        let auth = self.connect.as_ref().and_then(|connect| connect.auth.as_ref());
        self.report(match auth.and_then(AuthHost::verdict) {
            Some(_) => FabricsQueueReport::Refused { status: fabrics_status::AUTHENTICATION_REQUIRED.with_dnr() },
            None => FabricsQueueReport::Lost,
        });
    }

    fn refused(&mut self, status: NvmeStatus) {
        self.report(FabricsQueueReport::Refused { status });
        self.close(TcpEnd::Closed);
    }

    /// A command of the authentication has ended.
    #[cold]
    fn auth_completed(&mut self, completed: Completed, has_sent: bool) {
        if !completed.status.is_success() {
            return self.refused(completed.status);
        }
        let mut bytes = [0; AUTH_MESSAGE_BYTES_MAX];
        if let Some(span) = self.memory.resolve(self.private.segment(0, bytes.len() as u32)) {
            span.copy_to_slice(&mut bytes);
        }
        let Some(auth) = self.connect.as_mut().and_then(|connect| connect.auth.as_mut()) else { return };
        let next = if has_sent { auth.sent() } else { auth.received(&bytes) };
        self.authenticate(&next);
    }

    /// Does the next step of the authentication.
    fn authenticate(&mut self, next: &AuthStep) {
        let (sqe, direction, len) = match next {
            AuthStep::Send(message) => {
                let len = message.len() as u32;
                if let Some(span) = self.memory.resolve(self.private.segment(0, len)) {
                    span.copy_from_slice(message);
                }
                (FabricsCommand::AuthSend(len).sqe(), TcpDirection::Write, len)
            }
            AuthStep::Receive => {
                let len = AUTH_MESSAGE_BYTES_MAX as u32;
                (FabricsCommand::AuthReceive(len).sqe(), TcpDirection::Read, len)
            }
            AuthStep::Done => return self.admitted(),
            AuthStep::Failed(_) => return self.refused(fabrics_status::AUTHENTICATION_REQUIRED.with_dnr()),
        };
        self.state = FabricsQueueState::Authenticating { sends: direction == TcpDirection::Write };
        let data = self.private.segment(0, len);
        self.queue.push(&self.memory, CONNECT_SLOT, sqe, direction, std::iter::once(data));
    }
}

/// A queue may be dropped with its hardware queue while requests are in flight: their submitter is gone. The owner of
/// the stream keeps what the kernel still reads or writes.
impl Drop for FabricsIoQueue {
    fn drop(&mut self) {
        self.parked.iter_mut().filter_map(Option::take).for_each(std::mem::forget);
        self.retries.abandon_delayed();
    }
}

/// Slots beyond those of tags.
fn extra_slots(options: &FabricsIoQueueOptions) -> u16 {
    if options.fails_over { HEDGES_MAX.min(SLOTS_MAX.saturating_sub(options.depth)) } else { 0 }
}

fn tcp_options(options: &FabricsIoQueueOptions, in_capsule: u32) -> TcpHostOptions {
    TcpHostOptions {
        depth: options.depth + extra_slots(options),
        segments_max: options.segments_max,
        in_capsule,
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        alignment: 0,
    }
}
