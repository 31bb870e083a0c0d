//! An I/O completion queue of a controller with its submission queues: commands become bios, bios become completions.
//!
//! Owned by a lane, apart from the admin side. The two exchange plain messages: the admin side sends a
//! [`ControllerQueueCommand`], and the owner passes it to [`ControllerIoQueue::handle`] and returns each
//! [`ControllerQueueReply`]. It starts no thread and signals no interrupt: [`ControllerIoQueue::publish`] returns the
//! vector to signal.
//!
//! ```text
//!  submission rings ──fetch──▶ bio ──▶ hardware queue ──end──▶ completion ring ──publish──▶ vector
//! ```
//!
//! A command is fetched only when the owner has a free bio and the completion ring a free entry. Ranges to deallocate,
//! blocks to verify, and a flush of all namespaces need several bios, one such command at a time. Compare reads into
//! memory of the controller, one command at a time; a second one blocks the queue until the first is complete.
//!
//! When the host changes its memory, later commands use the new one at once. Bios in flight keep theirs, so each
//! command notes the regions of its bios.
//!
//! At a controller reset, fetching ends at once and no completion is written any more. The queue is stopped when the
//! last bio has returned: until then a device may write to the memory of the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, Op, SECTOR_SHIFT, Status};
use serde::{Deserialize, Serialize};

use super::group::{FetchOutcome, QueueGroup, QueueGroupSnapshot};
use super::logs::ErrorEntry;
use super::pair::Fetched;
use super::rings::{CompletionRing, DoorbellFault, SubmissionRing};
use super::{NamespaceTable, ServedNamespace};
use crate::dma::RegionSet;
use crate::doorbell::Doorbells;
use crate::{DmaMap, DsmRange, IoCommand, IoParser, NamespaceFormat, NvmeStatus, Sqe, io};

/// Maximum failed commands waiting to be reported to the admin side; further ones are not logged.
const FAILURES_MAX: usize = 8;

/// The memory accessible to a controller: that of the host, and its own for commands without a transfer.
#[derive(Clone, Debug)]
pub struct ControllerMemory {
    map: Arc<DmaMap>,
    /// Region of the controller's own memory: two parts of `transfer_bytes` for each completion queue.
    bounce: u32,
    transfer_bytes: u32,
    /// Number of changes before it.
    version: u64,
}

impl ControllerMemory {
    pub(crate) fn new(map: DmaMap, bounce: u32, transfer_bytes: u32) -> ControllerMemory {
        ControllerMemory { map: Arc::new(map), bounce, transfer_bytes, version: 0 }
    }

    /// The memory after a change of this one.
    pub(crate) fn changed(&self, map: DmaMap, bounce: u32) -> ControllerMemory {
        ControllerMemory { map: Arc::new(map), bounce, version: self.version + 1, ..*self }
    }

    /// Number of changes before it. A newer one has the regions of all bios in flight.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The regions that the segments of bios point into.
    pub fn table(&self) -> &Arc<RegionTable> {
        self.map.table()
    }

    /// The bus addresses of the host's memory.
    pub(crate) fn map(&self) -> &DmaMap {
        &self.map
    }

    /// Part 0 (Compare) or 1 (Verify) of a completion queue's memory.
    fn bounce(&self, cqid: u16, part: u64, len: u64) -> Segment {
        let offset = (2 * u64::from(cqid - 1) + part) * u64::from(self.transfer_bytes);
        Segment { region: self.bounce, offset, len: len as u32 }
    }
}

/// Counters of a queue's owner for the admin side, and one setting in the other direction. Each has a single writer.
#[derive(Debug, Default)]
pub(crate) struct IoShared {
    /// Whether the volatile write cache is disabled: each write is durable when it completes.
    pub(crate) write_through: AtomicBool,
    /// Over fabrics: time from which no further command is executed, ns by the controller's clock.
    pub(crate) serves_until_ns: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) sectors_read: AtomicU64,
    pub(crate) sectors_written: AtomicU64,
    pub(crate) media_errors: AtomicU64,
}

impl IoShared {
    /// Adds to one of its counters.
    pub(crate) fn count(counter: &AtomicU64, by: u64) {
        // One writer: a plain load and store suffice.
        counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
    }
}

/// A submission queue for the owner of its completion queue.
#[derive(Debug)]
pub struct NewSubmissionQueue(pub(crate) SubmissionRing);

/// Command of the admin side to the owner of an I/O completion queue.
#[derive(Debug)]
pub enum ControllerQueueCommand {
    /// Serve one more submission queue.
    AddSubmissionQueue(NewSubmissionQueue),
    /// Stop fetching from this submission queue, and report when its commands are complete.
    DeleteSubmissionQueue(u16),
    /// Delete the completion queue, which has no submission queues. The owner drops it after the reply.
    Delete,
    /// Abort a command, as far as it is not at a device: [`ControllerIoQueue::abort`] without bios to take back.
    Abort {
        /// Submission queue of the command.
        sqid: u16,
        /// Its identifier.
        cid: u16,
    },
    /// Use shadow doorbells from now on.
    SetDoorbells(Doorbells),
    /// The namespaces have changed.
    SetNamespaces(Arc<NamespaceTable>),
    /// Use the changed memory of the host for later commands. A ring that is not mapped pauses until a later change
    /// maps it.
    SetMemory(ControllerMemory, Doorbells),
    /// Stop for a reset or shutdown of the controller. The owner drops the queue after the reply.
    Stop,
}

/// Reply of the owner of an I/O completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerQueueReply {
    /// The completion queue is served.
    Created,
    /// The completion queue cannot be served, and was dropped.
    NotCreated,
    /// A submission queue was deleted.
    SubmissionQueueDeleted(u16),
    /// The completion queue may be dropped.
    Deleted,
    /// Result of an abort.
    AbortDone {
        /// Submission queue of the command.
        sqid: u16,
        /// Its identifier.
        cid: u16,
        /// Whether the command was aborted; its completion was written first.
        is_aborted: bool,
    },
    /// The shadow doorbells are in use.
    DoorbellsSet,
    /// The new memory is used, and no bio is in flight in a region that has no address there.
    MemorySet,
    /// The memory of the host is no longer written; the queue may be dropped.
    Stopped,
    /// Invalid doorbell value: the submission queue, or zero for the completion queue.
    Fault(u16, DoorbellFault),
    /// A command failed.
    Failed(ErrorEntry),
}

/// A command in flight, by token.
#[derive(Clone, Copy, Debug, Default)]
struct IoCommandState {
    opcode: u8,
    /// Further bios will follow.
    is_expanding: bool,
    /// Whether it ends with Abort Requested.
    is_aborted: bool,
    status: Status,
    /// Bios in flight.
    bios: u32,
    /// Regions of all its bios so far.
    regions: RegionSet,
    nsid: u32,
    slba: u64,
    sectors: u32,
}

/// The command that needs several bios, and its remaining part.
#[derive(Clone, Copy, Debug)]
enum Expansion {
    Deallocate {
        format: NamespaceFormat,
        device: u16,
    },
    Verify {
        format: NamespaceFormat,
        device: u16,
        range: DsmRange,
    },
    /// Index of the next namespace.
    FlushAll {
        next: usize,
    },
}

/// State of a stopped I/O completion queue with its submission queues.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct IoQueueSnapshot {
    pub(crate) cqid: u16,
    pub(crate) vector: Option<u16>,
    pub(crate) group: QueueGroupSnapshot,
    /// The fetched command that is not complete, if any, and its submission queue. It is executed again from its start:
    /// each command that needs several bios can be repeated while it is not complete.
    unfinished: Option<(u16, Sqe)>,
}

/// Result of [`ControllerIoQueue::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextBio {
    /// The bio is filled in for the command of this token: see [`ControllerIoQueue::end`].
    Bio(u16),
    /// A command was refused, started or completed without a bio.
    Without,
    /// No command is available.
    Unavailable,
}

/// An I/O completion queue with its submission queues.
#[derive(Debug)]
pub struct ControllerIoQueue {
    cqid: u16,
    vector: Option<u16>,
    group: QueueGroup,
    parser: IoParser,
    memory: ControllerMemory,
    /// Regions that have lost their addresses while bios named them.
    leaving: RegionSet,
    /// Changes of memory that are not answered because of these.
    memory_changes: u32,
    namespaces: Arc<NamespaceTable>,
    shared: Arc<IoShared>,
    commands: Box<[IoCommandState]>,
    bios_out: usize,
    expansion: Option<(u16, Expansion)>,
    /// The command of the last expansion.
    expanded: Sqe,
    /// A fetched command that is to be started: a Compare that waits for the previous one, or the command of a restored
    /// queue.
    parked: Option<Fetched>,
    /// The Compare in flight, its memory, and the host's data.
    compare: Option<(u16, ControllerMemory)>,
    compare_segments: Vec<Segment>,
    is_stopping: bool,
    replies: VecDeque<ControllerQueueReply>,
    failures: usize,
}

impl ControllerIoQueue {
    /// A queue without submission queues, with at most `depth` commands in flight.
    pub(crate) fn new(
        (cqid, ring): (u16, CompletionRing),
        vector: Option<u16>,
        depth: u16,
        memory: ControllerMemory,
        namespaces: Arc<NamespaceTable>,
        shared: Arc<IoShared>,
    ) -> ControllerIoQueue {
        ControllerIoQueue::of(cqid, QueueGroup::new(ring, depth), vector, depth, memory, namespaces, shared)
    }

    fn of(
        cqid: u16,
        group: QueueGroup,
        vector: Option<u16>,
        depth: u16,
        memory: ControllerMemory,
        namespaces: Arc<NamespaceTable>,
        shared: Arc<IoShared>,
    ) -> ControllerIoQueue {
        let depth = depth.min(group.entries() - 1);
        let parser = IoParser::new(u64::from(memory.transfer_bytes));
        let segments = parser.segments_max();
        ControllerIoQueue {
            cqid,
            vector,
            group,
            parser,
            memory,
            leaving: RegionSet::default(),
            memory_changes: 0,
            namespaces,
            shared,
            commands: vec![IoCommandState::default(); usize::from(depth)].into(),
            bios_out: 0,
            expansion: None,
            expanded: Sqe::default(),
            parked: None,
            compare: None,
            compare_segments: Vec::with_capacity(segments),
            is_stopping: false,
            replies: VecDeque::with_capacity(FAILURES_MAX),
            failures: 0,
        }
    }

    /// Saves its state; `None` unless it is stopped with all bios back and all replies taken.
    pub(super) fn snapshot(&self) -> Option<IoQueueSnapshot> {
        let started = self.expansion.map(|(token, _)| Fetched { token, sqe: self.expanded });
        let is_at_rest = self.bios_out == 0
            && self.memory_changes == 0
            && !self.is_stopping
            && self.compare.is_none()
            && self.replies.is_empty();
        let unfinished = match started.or(self.parked) {
            Some(Fetched { token, sqe }) => Some((self.group.sqid(token)?, sqe)),
            None => None,
        };
        let is_at_rest = is_at_rest && self.in_flight() == usize::from(unfinished.is_some());
        let (cqid, vector) = (self.cqid, self.vector);
        is_at_rest.then(|| IoQueueSnapshot { cqid, vector, group: self.group.snapshot(), unfinished })
    }

    /// A queue with saved state; `None` for an invalid state.
    pub(super) fn restore(
        saved: &IoQueueSnapshot,
        (entries_max, depth): (u16, u16),
        (memory, doorbells): (ControllerMemory, &Doorbells),
        namespaces: Arc<NamespaceTable>,
        shared: Arc<IoShared>,
    ) -> Option<ControllerIoQueue> {
        let IoQueueSnapshot { cqid, vector, group, unfinished } = saved;
        let group = QueueGroup::restore(group, (entries_max, depth), memory.map(), doorbells)?;
        let mut queue = ControllerIoQueue::of(*cqid, group, *vector, depth, memory, namespaces, shared);
        if let Some((sqid, sqe)) = unfinished {
            queue.parked = Some(Fetched { token: queue.group.claim(*sqid, sqe.cid())?, sqe: *sqe });
        }
        Some(queue)
    }

    /// Identifier of the completion queue.
    pub fn cqid(&self) -> u16 {
        self.cqid
    }

    /// Identifiers of its submission queues.
    pub fn submission_queues(&self) -> impl Iterator<Item = u16> {
        self.group.sqids()
    }

    /// The vector to signal; unset for a queue without interrupts.
    pub fn vector(&self) -> Option<u16> {
        self.vector
    }

    /// Entries of the completion queue.
    pub fn entries(&self) -> u16 {
        self.group.entries()
    }

    /// The regions that the segments of its bios point into.
    pub fn table(&self) -> &Arc<RegionTable> {
        self.memory.table()
    }

    /// The present memory.
    pub fn memory(&self) -> &ControllerMemory {
        &self.memory
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.group.in_flight()
    }

    /// Maximum segments of a bio: a bio with this capacity never grows.
    pub fn segments_max(&self) -> usize {
        self.parser.segments_max()
    }

    /// Fetches the next bio and fills `bio` in; its cookie is unchanged. A caller that bounds the work of a round must
    /// also count commands without a bio, since a host can send any number of them.
    #[inline]
    pub fn fetch(&mut self, bio: &mut Bio) -> NextBio {
        if self.is_stopping {
            return NextBio::Unavailable;
        }
        let next = self.next_bio(bio);
        if let NextBio::Bio(token) = next {
            let command = &mut self.commands[usize::from(token)];
            command.bios += 1;
            bio.segments.iter().for_each(|segment| command.regions.add(segment.region));
            self.bios_out += 1;
        }
        if let NextBio::Unavailable = next {
            self.take_faults();
        }
        next
    }

    /// Handles the end of a bio of this command. Completes the command after its last bio.
    ///
    /// # Panics
    /// If no bio of the command is in flight.
    #[inline]
    pub fn end(&mut self, token: u16, status: Status) {
        let command = &mut self.commands[usize::from(token)];
        assert!(command.bios > 0, "no bio of token {token} is out");
        command.bios -= 1;
        command.status = command.status.and(status);
        let is_over = command.bios == 0 && !command.is_expanding;
        self.bios_out -= 1;
        if self.is_stopping {
            if self.bios_out == 0 {
                self.replies.push_back(ControllerQueueReply::Stopped);
            }
            return;
        }
        if is_over {
            self.finish(token);
        }
        if self.memory_changes > 0 {
            self.answer_memory_changes();
        }
    }

    /// The vector to signal, if completions were written since the last call and the queue has interrupts.
    #[inline]
    pub fn publish(&mut self) -> Option<u16> {
        let is_posted = self.group.take_posted();
        self.vector.filter(|_| is_posted)
    }

    /// Requests doorbell writes from the host before the owner sleeps. Returns whether a command or reply is available.
    pub fn arm(&mut self) -> bool {
        if self.is_stopping {
            return !self.replies.is_empty();
        }
        let can_fetch = self.group.arm();
        self.take_faults();
        // A waiting Compare, and the queue behind it, continue when the previous one is complete.
        let can_go_on = match (&self.expansion, &self.parked) {
            (Some(_), _) => true,
            (None, Some(_)) => self.compare.is_none(),
            (None, None) => can_fetch,
        };
        can_go_on || !self.replies.is_empty()
    }

    /// Executes a command of the admin side.
    pub fn handle(&mut self, command: ControllerQueueCommand) {
        match command {
            ControllerQueueCommand::AddSubmissionQueue(NewSubmissionQueue(ring)) => self.group.add(ring),
            ControllerQueueCommand::DeleteSubmissionQueue(sqid) => {
                self.group.begin_removal(sqid);
                self.finish_removals();
            }
            ControllerQueueCommand::Delete => self.replies.push_back(ControllerQueueReply::Deleted),
            ControllerQueueCommand::Abort { sqid, cid } => self.abort(sqid, cid, |_, _| 0),
            ControllerQueueCommand::SetDoorbells(doorbells) => {
                self.group.bind(self.memory.map(), &doorbells, true);
                self.replies.push_back(ControllerQueueReply::DoorbellsSet);
            }
            ControllerQueueCommand::SetNamespaces(namespaces) => self.namespaces = namespaces,
            ControllerQueueCommand::SetMemory(memory, doorbells) => {
                self.leaving.add_lost(self.memory.map().regions(), memory.map().regions());
                self.memory_changes += 1;
                self.group.bind(memory.map(), &doorbells, false);
                self.memory = memory;
                self.answer_memory_changes();
            }
            ControllerQueueCommand::Stop => {
                self.is_stopping = true;
                if self.bios_out == 0 {
                    self.replies.push_back(ControllerQueueReply::Stopped);
                }
            }
        }
    }

    /// Aborts a command as far as it is not at a device, which cannot cancel a request: a Compare that waits for
    /// another, bios that are not submitted yet, and those that `take_back` takes back. It gets the token and the
    /// number of its bios in flight, and returns how many of these will return without having reached a device.
    ///
    /// An aborted command ends with Command Abort Requested once its other bios are back, followed by
    /// [`ControllerQueueReply::AbortDone`]. A command of which nothing is aborted continues, and the reply says so.
    #[cold]
    pub fn abort(&mut self, sqid: u16, cid: u16, take_back: impl FnOnce(u16, usize) -> usize) {
        let not_aborted = ControllerQueueReply::AbortDone { sqid, cid, is_aborted: false };
        let Some(token) = self.group.find(sqid, cid).filter(|_| !self.is_stopping) else {
            return self.replies.push_back(not_aborted);
        };
        let command = &mut self.commands[usize::from(token)];
        if command.is_aborted {
            // The reply to the earlier Abort is for both.
            return;
        }
        let is_parked = self.parked.take_if(|parked| parked.token == token).is_some();
        let is_expanding = self.expansion.take_if(|(expanding, _)| *expanding == token).is_some();
        command.is_expanding &= !is_expanding;
        let taken = if command.bios > 0 { take_back(token, command.bios as usize) } else { 0 };
        if !is_parked && !is_expanding && taken == 0 {
            return self.replies.push_back(not_aborted);
        }
        command.is_aborted = true;
        if command.bios == 0 {
            self.finish(token);
        }
    }

    /// The next reply for the admin side.
    pub fn take_reply(&mut self) -> Option<ControllerQueueReply> {
        let reply = self.replies.pop_front()?;
        self.failures -= usize::from(matches!(reply, ControllerQueueReply::Failed(_)));
        Some(reply)
    }

    fn next_bio(&mut self, bio: &mut Bio) -> NextBio {
        if let Some((token, expansion)) = self.expansion.take() {
            if let Some(rest) = self.expand(expansion, bio) {
                self.expansion = Some((token, rest));
                return NextBio::Bio(token);
            }
            let command = &mut self.commands[usize::from(token)];
            command.is_expanding = false;
            if command.bios == 0 {
                self.finish(token);
            }
            return NextBio::Without;
        }
        let parked = self.parked.take();
        let Fetched { token, sqe } = match parked {
            Some(fetched) if self.compare.is_some() => {
                self.parked = Some(fetched);
                return NextBio::Unavailable;
            }
            Some(fetched) => fetched,
            None => match self.group.fetch() {
                FetchOutcome::Command(fetched) => fetched,
                FetchOutcome::Refused => return NextBio::Without,
                FetchOutcome::Unavailable => return NextBio::Unavailable,
            },
        };
        self.commands[usize::from(token)] =
            IoCommandState { opcode: sqe.opcode(), nsid: sqe.nsid(), slba: sqe.slba(), ..IoCommandState::default() };
        match self.begin(token, &sqe, bio) {
            Ok(next) => next,
            Err(status) => {
                self.finish_with(token, status);
                NextBio::Without
            }
        }
    }

    /// Starts a command: fills in the bio, or returns the result without one.
    #[inline]
    fn begin(&mut self, token: u16, sqe: &Sqe, bio: &mut Bio) -> Result<NextBio, NvmeStatus> {
        if sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX && sqe.fused() == 0 {
            return Ok(self.begin_expansion(token, sqe, Expansion::FlushAll { next: 0 }));
        }
        let ControllerIoQueue { namespaces, parser, memory, .. } = self;
        let &ServedNamespace { ref format, device, .. } = namespaces.find(sqe.nsid())?;
        let parsed = parser.parse(sqe, format, memory.map(), bio)?;
        let format = *format;
        bio.namespace = device;
        self.commands[usize::from(token)].sectors = bio.sectors;
        match parsed {
            IoCommand::Bio => {
                if bio.op.is_write() && self.shared.write_through.load(Relaxed) {
                    bio.flags |= BioFlags::FUA;
                }
                Ok(NextBio::Bio(token))
            }
            IoCommand::Nothing => {
                self.finish(token);
                Ok(NextBio::Without)
            }
            IoCommand::Deallocate => Ok(self.begin_expansion(token, sqe, Expansion::Deallocate { format, device })),
            IoCommand::Verify => {
                let range = DsmRange { slba: sqe.slba(), blocks: sqe.blocks() };
                Ok(self.begin_expansion(token, sqe, Expansion::Verify { format, device, range }))
            }
            IoCommand::Compare if self.compare.is_some() => {
                self.parked = Some(Fetched { token, sqe: *sqe });
                Ok(NextBio::Unavailable)
            }
            IoCommand::Compare => {
                let regions = &mut self.commands[usize::from(token)].regions;
                bio.segments.iter().for_each(|segment| regions.add(segment.region));
                self.compare = Some((token, self.memory.clone()));
                std::mem::swap(&mut self.compare_segments, &mut bio.segments);
                bio.segments.clear();
                bio.segments.push(self.memory.bounce(self.cqid, 0, bio.bytes()));
                Ok(NextBio::Bio(token))
            }
        }
    }

    fn begin_expansion(&mut self, token: u16, sqe: &Sqe, expansion: Expansion) -> NextBio {
        self.expanded = *sqe;
        self.commands[usize::from(token)].is_expanding = true;
        self.expansion = Some((token, expansion));
        NextBio::Without
    }

    /// Fills in the next bio of a command with several. Returns the remaining part; `None` if there was none.
    fn expand(&mut self, expansion: Expansion, bio: &mut Bio) -> Option<Expansion> {
        match expansion {
            Expansion::Deallocate { format, device } => {
                let is_more = self.parser.discard(&format, bio);
                bio.namespace = device;
                is_more.then_some(expansion)
            }
            Expansion::Verify { format, device, range } => {
                let blocks = range.blocks.min(self.memory.transfer_bytes >> format.block_shift);
                if blocks == 0 {
                    return None;
                }
                bio.reset();
                bio.op = Op::Read;
                format.place(DsmRange { blocks, ..range }, bio);
                bio.namespace = device;
                bio.segments.push(self.memory.bounce(self.cqid, 1, bio.bytes()));
                let range = DsmRange { slba: range.slba + u64::from(blocks), blocks: range.blocks - blocks };
                Some(Expansion::Verify { format, device, range })
            }
            Expansion::FlushAll { next } => {
                let namespace = self.namespaces.iter().nth(next)?;
                bio.reset();
                bio.op = Op::Flush;
                bio.namespace = namespace.device;
                Some(Expansion::FlushAll { next: next + 1 })
            }
        }
    }

    /// Completes a command whose bios have all returned.
    #[inline]
    fn finish(&mut self, token: u16) {
        let IoCommandState { opcode, status, sectors, is_aborted, .. } = self.commands[usize::from(token)];
        let is_write = matches!(opcode, io::WRITE | io::WRITE_ZEROES | io::DSM | io::FLUSH);
        let mut result = if is_write { NvmeStatus::from_write_status(status) } else { NvmeStatus::from_status(status) };
        if let Some((_, memory)) = self.compare.take_if(|(comparing, _)| *comparing == token)
            && status.is_ok()
        {
            result = self.compare_data(&memory, sectors);
        }
        if is_aborted {
            result = NvmeStatus::ABORT_REQUESTED;
        }
        let shared = &self.shared;
        if status == Status::Medium {
            IoShared::count(&shared.media_errors, 1);
        }
        if result.is_success() {
            match opcode {
                io::READ | io::COMPARE => {
                    IoShared::count(&shared.reads, 1);
                    IoShared::count(&shared.sectors_read, u64::from(sectors));
                }
                io::VERIFY => IoShared::count(&shared.reads, 1),
                io::WRITE => {
                    IoShared::count(&shared.writes, 1);
                    IoShared::count(&shared.sectors_written, u64::from(sectors));
                }
                _ => {}
            }
        }
        self.finish_with(token, result);
    }

    fn finish_with(&mut self, token: u16, status: NvmeStatus) {
        let (sqid, cid) = self.group.complete(token, status, 0);
        let IoCommandState { nsid, slba, is_aborted, .. } = self.commands[usize::from(token)];
        if is_aborted {
            self.replies.push_back(ControllerQueueReply::AbortDone { sqid, cid, is_aborted });
        } else if !status.is_success() && self.failures < FAILURES_MAX {
            self.failures += 1;
            self.replies.push_back(ControllerQueueReply::Failed(ErrorEntry {
                sqid,
                cid,
                status,
                slba,
                nsid,
                ..ErrorEntry::default()
            }));
        }
        self.finish_removals();
    }

    fn finish_removals(&mut self) {
        while let Some(sqid) = self.group.finish_removal() {
            self.replies.push_back(ControllerQueueReply::SubmissionQueueDeleted(sqid));
        }
    }

    /// Compares read data with that of the host; each byte of the host is read once.
    fn compare_data(&self, memory: &ControllerMemory, sectors: u32) -> NvmeStatus {
        const CHUNK: usize = 512;
        let (mut ours, mut theirs) = ([0; CHUNK], [0; CHUNK]);
        let table = memory.table();
        let mut own = memory.bounce(self.cqid, 0, u64::from(sectors) << SECTOR_SHIFT);
        for segment in &self.compare_segments {
            let mut rest = *segment;
            while rest.len > 0 {
                let len = rest.len.min(CHUNK as u32);
                let [one, other] = [own, rest].map(|run| table.resolve_region(Segment { len, ..run }));
                let (Some(one), Some(other)) = (one, other) else {
                    return NvmeStatus::DATA_TRANSFER_ERROR.with_dnr();
                };
                let (ours, theirs) = (&mut ours[..len as usize], &mut theirs[..len as usize]);
                one.copy_to_slice(ours);
                other.copy_to_slice(theirs);
                if ours != theirs {
                    return NvmeStatus::COMPARE_FAILURE;
                }
                for run in [&mut own, &mut rest] {
                    (run.offset, run.len) = (run.offset + u64::from(len), run.len - len);
                }
            }
        }
        NvmeStatus::SUCCESS
    }

    /// Answers changes of memory once no bio names a region that they have taken away.
    #[cold]
    fn answer_memory_changes(&mut self) {
        let is_held = |command: &IoCommandState| command.bios > 0 && command.regions.meets(self.leaving);
        if self.commands.iter().any(is_held) {
            return;
        }
        self.leaving = RegionSet::default();
        for _ in 0..std::mem::take(&mut self.memory_changes) {
            self.replies.push_back(ControllerQueueReply::MemorySet);
        }
    }

    fn take_faults(&mut self) {
        while let Some((qid, fault)) = self.group.take_fault() {
            self.replies.push_back(ControllerQueueReply::Fault(qid, fault));
        }
    }
}
