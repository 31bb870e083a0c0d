//! An I/O queue of a controller over one connection: commands become bios, bios become responses.
//!
//! Owned by the lane of the connection. Each slot has memory for in-capsule data, which any command up to that size
//! uses. Longer commands share a pool of pages. A command that finds too few pages waits in order, while the stream
//! goes on: the data that others wait for is behind it.
//!
//! ```text
//!  stream ──receive──▶ command ─┬─(data)─▶ ready ──fetch──▶ bio ──▶ hardware queue ──end──▶ response ──fill──▶ stream
//!                               └─ refused ──────────────────────────────────────────────────▲
//! ```
//!
//! When the connection ends or the controller stops, no further bio is fetched. The memory is in use until the last bio
//! is back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, Op, Retry, Status};

use super::{SendList, TcpEnd, TcpQueueSnapshot, TcpTargetEvent, TcpTargetQueue, TcpTransfer};
use crate::controller::IoShared;
use crate::fabrics::{FABRICS_OPCODE, FabricsCommand, fabrics_status};
use crate::{
    ConnectedQueue, DSM_RANGE_BYTES, IoCommand, IoParser, NamespaceFormat, NamespaceTable, NextBio, NvmeStatus, PAGE,
    ServedNamespace, Sqe, io,
};

/// Memory of a queue for the data of its commands.
#[derive(Clone, Debug)]
pub struct TcpDataMemory {
    /// Its regions.
    pub table: Arc<RegionTable>,
    /// Region of the memory, and its first byte there, a multiple of 4096.
    pub region: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes: [`TcpIoQueue::memory_bytes`].
    pub bytes: u64,
}

/// Options of an I/O queue.
#[derive(Clone, Copy, Debug)]
pub struct TcpIoQueueOptions {
    /// Entries of the host's queue, at most 4096.
    pub entries: u16,
    /// Whether the head of the queue is reported to the host.
    pub has_flow_control: bool,
    /// Maximum in-capsule data, bytes: a multiple of 4096, that of the connection.
    pub in_capsule: u32,
    /// Maximum transfer (MDTS), bytes.
    pub transfer_bytes: u32,
    /// Bytes of the pool for longer commands, at least a transfer.
    pub pool_bytes: u32,
}

/// A command in flight, by slot.
#[derive(Debug, Default)]
struct TcpIoCommand {
    sqe: Sqe,
    /// Memory of its data.
    segments: Vec<Segment>,
    /// Whether that is of the pool.
    is_pooled: bool,
    /// Whether it transfers data to the host.
    is_read: bool,
    status: Status,
    /// Bios in flight.
    bios: u32,
    is_expanding: bool,
}

/// The command that needs several bios.
#[derive(Clone, Copy, Debug)]
enum TcpExpansion {
    Deallocate {
        format: NamespaceFormat,
        device: u16,
    },
    /// Index of the next namespace.
    FlushAll {
        next: usize,
    },
}

/// An I/O queue over TCP, controller side.
#[derive(Debug)]
pub struct TcpIoQueue {
    tcp: TcpTargetQueue,
    qid: u16,
    options: TcpIoQueueOptions,
    memory: TcpDataMemory,
    namespaces: Arc<NamespaceTable>,
    shared: Arc<IoShared>,
    parser: IoParser,
    commands: Box<[TcpIoCommand]>,
    /// Commands with their data, in order.
    ready: VecDeque<u16>,
    /// Those before them that wait for the end of commands at their devices, in order.
    held: VecDeque<u16>,
    /// Commands that wait for pages of the pool, in order.
    starved: VecDeque<u16>,
    /// Free pages of the pool.
    pages: Vec<u32>,
    expansion: Option<(u16, TcpExpansion)>,
    bios_out: usize,
    /// Whether a bio came back that its device may still execute.
    is_uncertain: bool,
    is_stopped: bool,
    /// For checks of commands.
    scratch: Bio,
}

impl TcpIoQueue {
    /// Bytes of memory that a queue with these options needs.
    pub fn memory_bytes(options: &TcpIoQueueOptions) -> u64 {
        u64::from(options.entries) * u64::from(options.in_capsule) + u64::from(options.pool_bytes)
    }

    /// A queue whose Connect is in a slot of `tcp` and is to be answered with [`TcpIoQueue::accept`].
    ///
    /// # Panics
    /// If options are out of range or the memory is too short; they come from the caller.
    pub fn new(
        mut tcp: TcpTargetQueue,
        connected: ConnectedQueue,
        options: TcpIoQueueOptions,
        memory: TcpDataMemory,
    ) -> TcpIoQueue {
        let TcpIoQueueOptions { entries, in_capsule, transfer_bytes, pool_bytes, .. } = options;
        let is_whole =
            [in_capsule, transfer_bytes, pool_bytes].iter().all(|bytes| u64::from(*bytes).is_multiple_of(PAGE));
        let is_right = is_whole && memory.offset.is_multiple_of(PAGE) && pool_bytes >= transfer_bytes && in_capsule > 0;
        assert!(is_right && memory.bytes >= TcpIoQueue::memory_bytes(&options), "{options:?} in {memory:?}");
        let segments_max = (transfer_bytes / PAGE as u32) as usize;
        tcp.grow(entries, segments_max);
        let command = || TcpIoCommand { segments: Vec::with_capacity(segments_max), ..TcpIoCommand::default() };
        let slots = usize::from(entries);
        TcpIoQueue {
            tcp,
            qid: connected.qid,
            options,
            memory,
            namespaces: connected.namespaces,
            shared: connected.shared,
            parser: IoParser::new(transfer_bytes.into()),
            commands: std::iter::repeat_with(command).take(slots).collect(),
            ready: VecDeque::with_capacity(slots),
            held: VecDeque::with_capacity(slots),
            starved: VecDeque::with_capacity(slots),
            // Taken from the end: ascending.
            pages: (0..pool_bytes / PAGE as u32).rev().collect(),
            expansion: None,
            bios_out: 0,
            is_uncertain: false,
            is_stopped: false,
            scratch: Bio::default(),
        }
    }

    /// Answers the Connect in this slot.
    pub fn accept(&mut self, slot: u16, controller_id: u16) {
        self.tcp.respond(slot, NvmeStatus::SUCCESS, controller_id.into());
        if self.options.has_flow_control {
            self.tcp.set_flow_control(self.options.entries.into());
        }
    }

    /// Time from which the queue is to execute no further command, ns by the clock of its controller: to be compared
    /// before bios are fetched or given to a device.
    #[inline]
    pub fn serves_until_ns(&self) -> u64 {
        self.shared.serves_until_ns.load(Relaxed)
    }

    /// Identifier of the queue.
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Entries of the host's queue.
    pub fn entries(&self) -> u16 {
        self.options.entries
    }

    /// Whether the head of the queue is reported to the host.
    pub fn has_flow_control(&self) -> bool {
        self.options.has_flow_control
    }

    /// Its memory.
    pub fn memory(&self) -> &TcpDataMemory {
        &self.memory
    }

    /// Commands that are not released.
    pub fn in_flight(&self) -> usize {
        self.tcp.in_use()
    }

    /// Bios in flight.
    pub fn bios_out(&self) -> usize {
        self.bios_out
    }

    /// Whether a bio has come back without an answer of its device, which may still execute it.
    pub fn is_uncertain(&self) -> bool {
        self.is_uncertain
    }

    /// Reason for the end of the connection.
    pub fn end_reason(&self) -> Option<TcpEnd> {
        self.tcp.end()
    }

    /// Replaces the namespaces.
    pub fn set_namespaces(&mut self, namespaces: Arc<NamespaceTable>) {
        self.namespaces = namespaces;
    }

    /// Handles received bytes, taken from the front of `bytes`. Those that are left wait for a slot. To be called after
    /// [`TcpIoQueue::sent`], too.
    pub fn receive(&mut self, bytes: &mut &[u8]) {
        loop {
            let table = &self.memory.table;
            let event = self.tcp.receive(bytes, |to, piece| {
                if let Some(span) = table.resolve_region(to) {
                    span.copy_from_slice(piece);
                }
            });
            match event {
                None => return,
                Some(TcpTargetEvent::Command { slot, sqe, transfer }) => self.begin(slot, sqe, transfer),
                Some(TcpTargetEvent::DataReady(slot)) => self.ready.push_back(slot),
                Some(TcpTargetEvent::Released(slot)) => self.release(slot),
                Some(TcpTargetEvent::Ended(_)) => self.stop(),
                Some(TcpTargetEvent::Started) => {}
            }
        }
    }

    /// Fetches the next bio and fills `bio` in; its cookie is unchanged. A caller that bounds the work of a round must
    /// also count commands without a bio.
    #[inline]
    pub fn fetch(&mut self, bio: &mut Bio) -> NextBio {
        let next = self.next_bio(bio);
        if let NextBio::Bio(slot) = next {
            self.commands[usize::from(slot)].bios += 1;
            self.bios_out += 1;
        }
        next
    }

    /// Whether [`TcpIoQueue::fetch`] has something.
    pub fn has_ready(&self) -> bool {
        !self.is_stopped && (self.expansion.is_some() || !self.ready.is_empty())
    }

    /// Holds back, in order, the commands for these devices that have not begun, and no others. Devices are bits, by
    /// number modulo 64.
    #[cold]
    pub fn hold(&mut self, devices: u64) {
        self.held.append(&mut self.ready);
        for _ in 0..self.held.len() {
            let Some(slot) = self.held.pop_front() else { return };
            let is_held = self.devices_of(slot) & devices > 0;
            if is_held { self.held.push_back(slot) } else { self.ready.push_back(slot) }
        }
    }

    /// Devices that have its commands, as bits modulo 64.
    #[cold]
    pub fn devices_out(&self) -> u64 {
        let out = (0..self.options.entries).filter(|slot| self.commands[usize::from(*slot)].bios > 0);
        out.fold(0, |all, slot| all | self.devices_of(slot))
    }

    /// Devices of a command: one, or all.
    fn devices_of(&self, slot: u16) -> u64 {
        let namespace = self.namespaces.find(self.commands[usize::from(slot)].sqe.nsid());
        namespace.map_or(u64::MAX, |namespace| 1 << (namespace.device % 64))
    }

    /// Handles the end of a bio of the command in this slot. Answers the command after its last bio.
    ///
    /// # Panics
    /// If no bio of the command is in flight.
    #[inline]
    pub fn end(&mut self, slot: u16, status: Status) {
        let command = &mut self.commands[usize::from(slot)];
        assert!(command.bios > 0, "no bio of slot {slot} is out");
        command.bios -= 1;
        command.status = command.status.and(status);
        // Its device may still execute it.
        self.is_uncertain |= status.retry() == Retry::ElsewhereFenced;
        self.bios_out -= 1;
        if command.bios == 0 && !command.is_expanding {
            self.finish(slot);
        }
    }

    /// See [`TcpTargetQueue::wants_send`].
    pub fn wants_send(&self) -> bool {
        self.tcp.wants_send()
    }

    /// See [`TcpTargetQueue::fill`].
    pub fn fill(&mut self, list: &mut SendList) -> Option<u64> {
        self.tcp.fill(&self.memory.table, list)
    }

    /// See [`TcpTargetQueue::sent`].
    pub fn sent(&mut self, number: u64) {
        self.tcp.sent(number);
    }

    /// The connection is closed, or is to be: no command is executed any more that has not begun.
    pub fn abandon(&mut self, end: TcpEnd) {
        self.tcp.abandon(end);
        self.stop();
    }

    /// Saves the state of a queue without bios in flight, and adds the bytes that belong to it. Commands that were not
    /// answered are executed again from their start. `None` if it has ended, or something is to be sent.
    pub fn snapshot(&self, bytes: &mut Vec<u8>) -> Option<TcpQueueSnapshot> {
        if self.is_stopped || self.bios_out > 0 {
            return None;
        }
        let sqe_of = |slot: u16| self.commands[usize::from(slot)].sqe;
        self.tcp.snapshot(&self.memory.table, sqe_of, bytes)
    }

    /// Restores commands of a queue that was made with the [restored](TcpTargetQueue::restore) connection. Takes the
    /// bytes that belong to them; those to be received first are next. `None` if the state is invalid.
    pub fn restore_commands(&mut self, saved: &TcpQueueSnapshot, bytes: &mut &[u8]) -> Option<()> {
        for requested in saved.requested() {
            let (slot, len) = (requested.slot(), requested.bytes());
            let command = self.commands.get_mut(usize::from(slot))?;
            (command.sqe, command.status) = (*requested.sqe(), Status::Ok);
            if !(1..=self.options.transfer_bytes).contains(&len) || !self.reserve(slot, len) {
                return None;
            }
            let segments = self.commands[usize::from(slot)].segments.iter().copied();
            let data = requested.take_data(bytes)?;
            if self.tcp.restore_command(requested, &self.memory.table, segments, data)? {
                self.ready.push_back(slot);
            }
        }
        Some(())
    }

    /// A bio has come back without an answer of its device before the state was saved.
    pub fn set_uncertain(&mut self, is_uncertain: bool) {
        self.is_uncertain = is_uncertain;
    }

    /// Drops the commands that are not with the device.
    fn stop(&mut self) {
        self.is_stopped = true;
        if let Some((slot, _)) = self.expansion.take() {
            let command = &mut self.commands[usize::from(slot)];
            command.is_expanding = false;
            if command.bios == 0 {
                self.finish_with(slot, NvmeStatus::SQ_DELETED);
            }
        }
        for slot in self.held.drain(..).chain(self.ready.drain(..)).chain(self.starved.drain(..)) {
            self.tcp.respond(slot, NvmeStatus::SQ_DELETED, 0);
        }
    }

    fn next_bio(&mut self, bio: &mut Bio) -> NextBio {
        if self.is_stopped {
            return NextBio::Unavailable;
        }
        if let Some((slot, expansion)) = self.expansion.take() {
            if let Some(rest) = self.expand(expansion, bio) {
                self.expansion = Some((slot, rest));
                return NextBio::Bio(slot);
            }
            let command = &mut self.commands[usize::from(slot)];
            command.is_expanding = false;
            if command.bios == 0 {
                self.finish(slot);
            }
            return NextBio::Without;
        }
        let Some(slot) = self.ready.pop_front() else { return NextBio::Unavailable };
        match self.start(slot, bio) {
            Ok(next) => next,
            Err(status) => {
                self.finish_with(slot, status);
                NextBio::Without
            }
        }
    }

    /// Starts a command that has its data: fills in the bio, or returns the result without one.
    #[inline]
    fn start(&mut self, slot: u16, bio: &mut Bio) -> Result<NextBio, NvmeStatus> {
        let TcpIoQueue { commands, namespaces, parser, memory, shared, .. } = self;
        let command = &mut commands[usize::from(slot)];
        let sqe = &command.sqe;
        if sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX {
            namespaces.check_accessible()?;
            command.is_expanding = true;
            self.expansion = Some((slot, TcpExpansion::FlushAll { next: 0 }));
            return Ok(NextBio::Without);
        }
        // The namespaces and their ANA states may have changed since the command came.
        let &ServedNamespace { format, device, .. } = namespaces.find_accessible(sqe.nsid())?;
        let (parsed, _) = IoParser::check(sqe, &format, bio)?;
        bio.namespace = device;
        bio.segments.extend_from_slice(&command.segments);
        if bio.op.is_write() && shared.write_through.load(Relaxed) {
            bio.flags |= BioFlags::FUA;
        }
        match parsed {
            IoCommand::Bio => Ok(NextBio::Bio(slot)),
            IoCommand::Deallocate => {
                parser.read_ranges(sqe, &format, &memory.table, &mut bio.segments)?;
                command.is_expanding = true;
                self.expansion = Some((slot, TcpExpansion::Deallocate { format, device }));
                Ok(NextBio::Without)
            }
            IoCommand::Nothing => {
                self.finish(slot);
                Ok(NextBio::Without)
            }
            IoCommand::Compare | IoCommand::Verify => Err(NvmeStatus::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Fills in the next bio of a command with several. Returns the remaining part; `None` if there was none.
    fn expand(&mut self, expansion: TcpExpansion, bio: &mut Bio) -> Option<TcpExpansion> {
        match expansion {
            TcpExpansion::Deallocate { format, device } => {
                let is_more = self.parser.discard(&format, bio);
                bio.namespace = device;
                is_more.then_some(expansion)
            }
            TcpExpansion::FlushAll { next } => {
                let namespace = self.namespaces.iter().nth(next)?;
                bio.reset();
                bio.op = Op::Flush;
                bio.namespace = namespace.device;
                Some(TcpExpansion::FlushAll { next: next + 1 })
            }
        }
    }

    /// Handles a command that has come.
    fn begin(&mut self, slot: u16, sqe: Sqe, transfer: TcpTransfer) {
        let command = &mut self.commands[usize::from(slot)];
        (command.sqe, command.status, command.is_read, command.is_pooled) = (sqe, Status::Ok, false, false);
        command.segments.clear();
        match self.check(&sqe, transfer) {
            Ok(0) => self.ready.push_back(slot),
            Ok(bytes) => {
                self.commands[usize::from(slot)].is_read = sqe.opcode() == io::READ;
                self.provide(slot, bytes);
            }
            Err(status) => self.tcp.respond(slot, status, 0),
        }
    }

    /// Checks a command and the length of its data, which is returned.
    fn check(&mut self, sqe: &Sqe, transfer: TcpTransfer) -> Result<u32, NvmeStatus> {
        if sqe.opcode() == FABRICS_OPCODE {
            return Err(match FabricsCommand::parse(sqe)? {
                FabricsCommand::Connect(_) => NvmeStatus::COMMAND_SEQUENCE,
                FabricsCommand::PropertyGet { .. } | FabricsCommand::PropertySet { .. } => {
                    fabrics_status::INVALID_QUEUE_TYPE
                }
                // Authenticated before it became a queue, and not again.
                FabricsCommand::AuthSend(_) | FabricsCommand::AuthReceive(_) | FabricsCommand::Disconnect => {
                    NvmeStatus::INVALID_OPCODE
                }
            }
            .with_dnr());
        }
        let bytes = if sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX && sqe.fused() == 0 {
            self.namespaces.check_accessible()?;
            0
        } else {
            let namespace = self.namespaces.find_accessible(sqe.nsid())?;
            let (command, bytes) = IoParser::check(sqe, &namespace.format, &mut self.scratch)?;
            if matches!(command, IoCommand::Compare | IoCommand::Verify) {
                return Err(NvmeStatus::INVALID_OPCODE.with_dnr());
            }
            // Ranges come with hints, too.
            if sqe.opcode() == io::DSM { u64::from(sqe.ranges()) * DSM_RANGE_BYTES as u64 } else { bytes }
        };
        if bytes > u64::from(self.options.transfer_bytes) {
            return Err(NvmeStatus::INVALID_FIELD.with_dnr());
        }
        let is_read = sqe.opcode() == io::READ;
        let given = match transfer {
            TcpTransfer::None => 0,
            // Data of the host for a command that has none.
            TcpTransfer::InCapsule(_) if is_read => return Err(NvmeStatus::INVALID_FIELD.with_dnr()),
            TcpTransfer::InCapsule(given) | TcpTransfer::Transport(given) => given,
        };
        // Linux gives the ranges of Dataset Management a buffer of the most there can be, whatever their number.
        let most = if sqe.opcode() == io::DSM { u64::from(Sqe::RANGES_MAX) * DSM_RANGE_BYTES as u64 } else { bytes };
        if (bytes..=most).contains(&u64::from(given)) {
            Ok(given)
        } else {
            Err(NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())
        }
    }

    /// Gives a command memory for its data, or has it wait.
    fn provide(&mut self, slot: u16, bytes: u32) {
        let may_take = bytes <= self.options.in_capsule || self.starved.is_empty();
        if may_take && self.reserve(slot, bytes) {
            self.transfer(slot);
        } else {
            self.starved.push_back(slot);
        }
    }

    /// Takes memory for the data of a command. False if there are too few pages.
    fn reserve(&mut self, slot: u16, bytes: u32) -> bool {
        let in_capsule = self.options.in_capsule;
        if bytes > in_capsule {
            return self.take_pages(slot, bytes);
        }
        let offset = self.memory.offset + u64::from(slot) * u64::from(in_capsule);
        let segment = Segment { region: self.memory.region, offset, len: bytes };
        self.commands[usize::from(slot)].segments.push(segment);
        true
    }

    /// Gives a command pages of the pool. False if there are too few.
    fn take_pages(&mut self, slot: u16, bytes: u32) -> bool {
        const PAGE_BYTES: u32 = PAGE as u32;
        let TcpIoQueue { pages, commands, memory, options, .. } = self;
        let wanted = bytes.div_ceil(PAGE_BYTES) as usize;
        let Some(first) = pages.len().checked_sub(wanted) else { return false };
        let pool = memory.offset + u64::from(options.entries) * u64::from(options.in_capsule);
        let command = &mut commands[usize::from(slot)];
        let mut left = bytes;
        for page in pages.drain(first..).rev() {
            let (offset, len) = (pool + u64::from(page) * PAGE, left.min(PAGE_BYTES));
            left -= len;
            match command.segments.last_mut() {
                Some(last) if last.offset + u64::from(last.len) == offset => last.len += len,
                _ => command.segments.push(Segment { region: memory.region, offset, len }),
            }
        }
        command.is_pooled = true;
        true
    }

    /// Continues with a command that has memory.
    fn transfer(&mut self, slot: u16) {
        let command = &self.commands[usize::from(slot)];
        if command.is_read {
            self.ready.push_back(slot);
        } else {
            let segments = command.segments.iter().copied();
            let is_given = self.tcp.receive_data(&self.memory.table, slot, segments);
            debug_assert!(is_given, "memory of the queue has the length of the data");
        }
    }

    /// The memory of a command is free.
    fn release(&mut self, slot: u16) {
        const PAGE_BYTES: u32 = PAGE as u32;
        let command = &mut self.commands[usize::from(slot)];
        if std::mem::take(&mut command.is_pooled) {
            let pool = self.memory.offset + u64::from(self.options.entries) * u64::from(self.options.in_capsule);
            for segment in command.segments.iter().rev() {
                let first = ((segment.offset - pool) / PAGE) as u32;
                self.pages.extend((first..first + segment.len.div_ceil(PAGE_BYTES)).rev());
            }
        }
        command.segments.clear();
        while let Some(next) = self.starved.front().copied() {
            let bytes = self.commands[usize::from(next)].sqe.data()[1] as u32;
            if !self.take_pages(next, bytes) {
                break;
            }
            self.starved.pop_front();
            self.transfer(next);
        }
    }

    /// Answers a command whose bios have all returned.
    #[inline]
    fn finish(&mut self, slot: u16) {
        let TcpIoCommand { ref sqe, status, .. } = self.commands[usize::from(slot)];
        let opcode = sqe.opcode();
        let result =
            if opcode == io::READ { NvmeStatus::from_status(status) } else { NvmeStatus::from_write_status(status) };
        if status == Status::Medium {
            IoShared::count(&self.shared.media_errors, 1);
        }
        let sectors =
            self.commands[usize::from(slot)].segments.iter().map(|segment| u64::from(segment.len)).sum::<u64>()
                / blkyard_mq::SECTOR_BYTES;
        match opcode {
            io::READ if result.is_success() => {
                IoShared::count(&self.shared.reads, 1);
                IoShared::count(&self.shared.sectors_read, sectors);
            }
            io::WRITE if result.is_success() => {
                IoShared::count(&self.shared.writes, 1);
                IoShared::count(&self.shared.sectors_written, sectors);
            }
            _ => {}
        }
        self.finish_with(slot, result);
    }

    fn finish_with(&mut self, slot: u16, status: NvmeStatus) {
        let command = &self.commands[usize::from(slot)];
        if command.is_read && status.is_success() {
            let segments = command.segments.iter().copied();
            let is_sent = self.tcp.respond_with(&self.memory.table, slot, segments, 0);
            debug_assert!(is_sent, "memory of the queue has the length of the data");
        } else {
            self.tcp.respond(slot, status, 0);
        }
    }
}
