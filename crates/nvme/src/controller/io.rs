//! An I/O completion queue of a controller with its submission queues: commands become bios, bios become completions.
//!
//! Owned by a lane, apart from the admin side. The two meet by plain messages: the admin side sends a
//! [`ControllerQueueCommand`], the owner passes it to [`ControllerIoQueue::handle`] and carries each
//! [`ControllerQueueReply`] back. It starts no thread and signals no interrupt: [`ControllerIoQueue::publish`] returns
//! the vector to signal.
//!
//! ```text
//!  submission rings ──fetch──▶ bio ──▶ hardware queue ──end──▶ completion ring ──publish──▶ vector
//! ```
//!
//! A command is fetched only when its owner has a bio for it and its completion an entry. Some commands become several
//! bios, one such command at a time: ranges to deallocate, blocks to verify, a flush of all namespaces. Compare reads
//! into memory of the controller, one command at a time; the next one waits, and the queue with it.
//!
//! When the controller is reset, fetching ends at once and nothing more is written to the completion ring. The queue is
//! stopped when the last bio has come back: until then a device may write to the memory of the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, Op, SECTOR_SHIFT, Status};

use super::group::QueueGroup;
use super::logs::ErrorEntry;
use super::pair::Fetched;
use super::rings::{CompletionRing, DoorbellFault, SubmissionRing};
use super::{NamespaceTable, ServedNamespace};
use crate::doorbell::Doorbells;
use crate::{DmaMap, DsmRange, IoCommand, IoParser, NamespaceFormat, NvmeStatus, Sqe, io};

/// Limit of failed commands waiting to be reported to the admin side; further ones are not logged.
const FAILURES_MAX: usize = 8;

/// The memory that a controller reaches: that of the host, and its own for commands without a transfer.
#[derive(Clone, Debug)]
pub struct ControllerMemory {
    map: Arc<DmaMap>,
    /// Region of the controller's own memory: two parts of `transfer_bytes` for each completion queue.
    bounce: u32,
    transfer_bytes: u32,
}

impl ControllerMemory {
    pub(crate) fn new(map: DmaMap, bounce: u32, transfer_bytes: u32) -> ControllerMemory {
        ControllerMemory { map: Arc::new(map), bounce, transfer_bytes }
    }

    /// The regions that the segments of bios point into.
    pub fn table(&self) -> &Arc<RegionTable> {
        self.map.table()
    }

    /// The addresses of the host.
    pub(crate) fn map(&self) -> &DmaMap {
        &self.map
    }

    /// Part 0 (Compare) or 1 (Verify) of the memory of a completion queue.
    fn bounce(&self, cqid: u16, part: u64, len: u64) -> Segment {
        let offset = (2 * u64::from(cqid - 1) + part) * u64::from(self.transfer_bytes);
        Segment { region: self.bounce, offset, len: len as u32 }
    }
}

/// Counters of a queue's owner for the admin side, and one setting in the other direction. One writer each.
#[derive(Debug, Default)]
pub(crate) struct IoShared {
    /// The volatile write cache is disabled: each write is durable when it completes.
    pub(crate) write_through: AtomicBool,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) sectors_read: AtomicU64,
    pub(crate) sectors_written: AtomicU64,
    pub(crate) media_errors: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    // One writer: a plain load and store.
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// A submission queue for the owner of its completion queue.
#[derive(Debug)]
pub struct NewSubmissionQueue(pub(crate) SubmissionRing);

/// Command of the admin side to the owner of an I/O completion queue.
#[derive(Debug)]
pub enum ControllerQueueCommand {
    /// Serve one more submission queue.
    AddSubmissionQueue(NewSubmissionQueue),
    /// Fetch no more from this submission queue, and say when its commands are complete.
    DeleteSubmissionQueue(u16),
    /// The completion queue is deleted; it has no submission queue. The owner drops it after the reply.
    Delete,
    /// Abort a command, if that can still be done.
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
    /// The memory of the host has changed. Takes effect when no bio is out.
    SetMemory(ControllerMemory, Doorbells),
    /// The controller is reset or shut down. The owner drops the queue after the reply.
    Stop,
}

/// Reply of the owner of an I/O completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerQueueReply {
    /// A submission queue is gone.
    SubmissionQueueDeleted(u16),
    /// The completion queue may be dropped.
    Deleted,
    /// An abort is decided.
    AbortDone {
        /// Submission queue of the command.
        sqid: u16,
        /// Its identifier.
        cid: u16,
        /// Whether the command was aborted; its completion was written before.
        is_aborted: bool,
    },
    /// The shadow doorbells are in use.
    DoorbellsSet,
    /// The old memory is no longer used. False if a ring has no memory now: the queue has stopped.
    MemorySet(bool),
    /// The memory of the host is not written any more; the queue may be dropped.
    Stopped,
    /// A doorbell has a value that no honest host writes: the submission queue, or zero for the completion queue.
    Fault(u16, DoorbellFault),
    /// A command failed.
    Failed(ErrorEntry),
}

/// A command in flight, by token.
#[derive(Clone, Copy, Debug, Default)]
struct IoCommandState {
    opcode: u8,
    /// More bios are to come.
    is_expanding: bool,
    /// It ends with Abort Requested.
    is_aborted: bool,
    status: Status,
    /// Bios that are out.
    bios: u32,
    nsid: u32,
    slba: u64,
    sectors: u32,
}

/// The command that becomes several bios, and its rest.
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
    /// The number of the next namespace.
    FlushAll {
        next: usize,
    },
}

/// Result of [`ControllerIoQueue::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextBio {
    /// The bio is filled in. It is one of the command of this token: see [`ControllerIoQueue::end`].
    Bio(u16),
    /// A command was refused, begun or completed without one.
    Without,
    /// None is available.
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
    /// Set memory that waits for the bios that are out.
    next_memory: Option<(ControllerMemory, Doorbells)>,
    namespaces: Arc<NamespaceTable>,
    shared: Arc<IoShared>,
    commands: Box<[IoCommandState]>,
    bios_out: usize,
    expansion: Option<(u16, Expansion)>,
    /// A Compare that waits for the one before.
    parked: Option<Fetched>,
    /// The Compare in flight, and the host's data.
    compare: Option<u16>,
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
        let depth = depth.min(ring.depth());
        let parser = IoParser::new(u64::from(memory.transfer_bytes));
        let segments = parser.segments_max();
        ControllerIoQueue {
            cqid,
            vector,
            group: QueueGroup::new(ring, depth),
            parser,
            memory,
            next_memory: None,
            namespaces,
            shared,
            commands: vec![IoCommandState::default(); usize::from(depth)].into(),
            bios_out: 0,
            expansion: None,
            parked: None,
            compare: None,
            compare_segments: Vec::with_capacity(segments),
            is_stopping: false,
            replies: VecDeque::with_capacity(FAILURES_MAX),
            failures: 0,
        }
    }

    /// Identifier of the completion queue.
    pub fn cqid(&self) -> u16 {
        self.cqid
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

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.group.in_flight()
    }

    /// Most segments of a bio: one with room for so many never grows.
    pub fn segments_max(&self) -> usize {
        self.parser.segments_max()
    }

    /// Fetches the next bio, and fills `bio` in; its cookie is unchanged. A caller that bounds the work of a round
    /// counts commands without a bio, too: a host can send those without end.
    #[inline]
    pub fn fetch(&mut self, bio: &mut Bio) -> NextBio {
        if self.is_stopping || self.next_memory.is_some() {
            return NextBio::Unavailable;
        }
        let next = self.next_bio(bio);
        if let NextBio::Bio(token) = next {
            self.commands[usize::from(token)].bios += 1;
            self.bios_out += 1;
        }
        if let NextBio::Unavailable = next {
            self.take_faults();
        }
        next
    }

    /// A bio of this command has ended. The command is completed if it was the last one.
    ///
    /// # Panics
    /// If no bio of the command is out.
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
        if self.bios_out == 0 && self.next_memory.is_some() {
            self.change_memory();
        }
    }

    /// The vector to signal, if completions were written since the last call and the queue has interrupts.
    #[inline]
    pub fn publish(&mut self) -> Option<u16> {
        let is_posted = self.group.take_posted();
        self.vector.filter(|_| is_posted)
    }

    /// Asks the host to write doorbell registers, before the owner sleeps. Says whether there is something to fetch, or
    /// to reply, already.
    pub fn arm(&mut self) -> bool {
        if self.is_stopping || self.next_memory.is_some() {
            return !self.replies.is_empty();
        }
        let can_fetch = self.group.arm();
        self.take_faults();
        // A waiting Compare continues when the previous one is complete, and the rest of the queue behind it.
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
            ControllerQueueCommand::Abort { sqid, cid } => self.abort(sqid, cid),
            ControllerQueueCommand::SetDoorbells(doorbells) => {
                self.group.rebind(&doorbells, true);
                self.replies.push_back(ControllerQueueReply::DoorbellsSet);
            }
            ControllerQueueCommand::SetNamespaces(namespaces) => self.namespaces = namespaces,
            ControllerQueueCommand::SetMemory(memory, doorbells) => {
                if self.next_memory.replace((memory, doorbells)).is_some() {
                    // The answer for the one that was never used; one for this follows.
                    self.replies.push_back(ControllerQueueReply::MemorySet(true));
                }
                if self.bios_out == 0 {
                    self.change_memory();
                }
            }
            ControllerQueueCommand::Stop => {
                self.is_stopping = true;
                if self.bios_out == 0 {
                    self.replies.push_back(ControllerQueueReply::Stopped);
                }
            }
        }
    }

    /// The next answer for the admin side.
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
        let fetched = match parked {
            Some(fetched) if self.compare.is_some() => {
                self.parked = Some(fetched);
                return NextBio::Unavailable;
            }
            Some(fetched) => Some(fetched),
            None => self.group.fetch(),
        };
        let Some(Fetched { token, sqe }) = fetched else { return NextBio::Unavailable };
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

    /// Begins a command: fills in the bio, or returns the result without one.
    #[inline]
    fn begin(&mut self, token: u16, sqe: &Sqe, bio: &mut Bio) -> Result<NextBio, NvmeStatus> {
        if sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX && sqe.fused() == 0 {
            return Ok(self.begin_expansion(token, Expansion::FlushAll { next: 0 }));
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
            IoCommand::Deallocate => Ok(self.begin_expansion(token, Expansion::Deallocate { format, device })),
            IoCommand::Verify => {
                let range = DsmRange { slba: sqe.slba(), blocks: sqe.blocks() };
                Ok(self.begin_expansion(token, Expansion::Verify { format, device, range }))
            }
            IoCommand::Compare if self.compare.is_some() => {
                self.parked = Some(Fetched { token, sqe: *sqe });
                Ok(NextBio::Unavailable)
            }
            IoCommand::Compare => {
                self.compare = Some(token);
                std::mem::swap(&mut self.compare_segments, &mut bio.segments);
                bio.segments.clear();
                bio.segments.push(self.memory.bounce(self.cqid, 0, bio.bytes()));
                Ok(NextBio::Bio(token))
            }
        }
    }

    fn begin_expansion(&mut self, token: u16, expansion: Expansion) -> NextBio {
        self.commands[usize::from(token)].is_expanding = true;
        self.expansion = Some((token, expansion));
        NextBio::Without
    }

    /// Fills in the next bio of an expansion. Returns the rest; `None` if there was none.
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

    /// Completes a command whose bios are all back.
    #[inline]
    fn finish(&mut self, token: u16) {
        let IoCommandState { opcode, status, sectors, is_aborted, .. } = self.commands[usize::from(token)];
        let is_write = matches!(opcode, io::WRITE | io::WRITE_ZEROES | io::DSM | io::FLUSH);
        let mut result = if is_write { NvmeStatus::from_write_status(status) } else { NvmeStatus::from_status(status) };
        if self.compare == Some(token) {
            self.compare = None;
            if status.is_ok() {
                result = self.compare_data(sectors);
            }
        }
        if is_aborted {
            result = NvmeStatus::ABORT_REQUESTED;
        }
        let shared = &self.shared;
        if status == Status::Medium {
            count(&shared.media_errors, 1);
        }
        if result.is_success() {
            match opcode {
                io::READ | io::COMPARE => {
                    count(&shared.reads, 1);
                    count(&shared.sectors_read, u64::from(sectors));
                }
                io::VERIFY => count(&shared.reads, 1),
                io::WRITE => {
                    count(&shared.writes, 1);
                    count(&shared.sectors_written, u64::from(sectors));
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

    /// Compares data read with that of the host, each byte of which is read once.
    fn compare_data(&self, sectors: u32) -> NvmeStatus {
        const CHUNK: usize = 512;
        let (mut ours, mut theirs) = ([0; CHUNK], [0; CHUNK]);
        let table = self.memory.table();
        let mut own = self.memory.bounce(self.cqid, 0, u64::from(sectors) << SECTOR_SHIFT);
        for segment in &self.compare_segments {
            let mut rest = *segment;
            while rest.len > 0 {
                let len = rest.len.min(CHUNK as u32);
                let [one, other] = [own, rest].map(|run| table.resolve(Segment { len, ..run }));
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

    /// Aborts a command that is not at a device, or has bios still to come. Others continue: a device cannot take a
    /// request back.
    fn abort(&mut self, sqid: u16, cid: u16) {
        let Some(token) = self.group.find(sqid, cid) else {
            self.replies.push_back(ControllerQueueReply::AbortDone { sqid, cid, is_aborted: false });
            return;
        };
        let command = &mut self.commands[usize::from(token)];
        if self.parked.as_ref().is_some_and(|parked| parked.token == token) {
            self.parked = None;
            command.is_aborted = true;
        } else if self.expansion.as_ref().is_some_and(|(expanding, _)| *expanding == token) {
            self.expansion = None;
            command.is_aborted = true;
            command.is_expanding = false;
        } else {
            self.replies.push_back(ControllerQueueReply::AbortDone { sqid, cid, is_aborted: false });
            return;
        }
        if command.bios == 0 {
            self.finish(token);
        }
    }

    fn change_memory(&mut self) {
        let Some((memory, doorbells)) = self.next_memory.take() else { return };
        let is_mapped = self.group.remap(memory.map());
        self.group.rebind(&doorbells, false);
        self.memory = memory;
        self.is_stopping |= !is_mapped;
        self.replies.push_back(ControllerQueueReply::MemorySet(is_mapped));
    }

    fn take_faults(&mut self) {
        while let Some((qid, fault)) = self.group.take_fault() {
            self.replies.push_back(ControllerQueueReply::Fault(qid, fault));
        }
    }
}
