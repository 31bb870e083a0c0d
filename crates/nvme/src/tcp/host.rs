//! The host's side of one queue over one connection.
//!
//! Owned by the lane of the connection. A command is known by its slot, which its submitter chooses; its identifier has
//! a sequence besides, so that late answers are recognised. Data goes to the segments of the command, and comes from
//! them.
//!
//! ```text
//!  push ──▶ fill ──▶ SendList ──▶ kernel ──▶ sent
//!  bytes received ──▶ receive ──▶ data to segments, TcpHostEvent
//! ```
//!
//! A command is complete when its answer has come and the kernel is done with its data. After the end of the connection
//! its commands stay in flight until the owner cancels them, once the path is [fenced](TcpHostQueue::cancel).

use std::collections::VecDeque;

use blkyard_mem::{RegionTable, Segment};
use blkyard_wire::nvme_tcp::{
    C2hData, DataLimits, FatalStatus, Framing, H2cData, IcReq, IcResp, Pdu, PduError, PduEvent, PduReader, PduSender,
    R2t, TermReq,
};

use super::data::CommandData;
use super::list::{SendList, update_digest};
use super::{TcpEnd, sgl};
use crate::host::{SLOT_MASK, cid};
use crate::{Completed, Cqe, NvmeStatus, Psdt, Sqe};

/// Direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpDirection {
    /// No data.
    None,
    /// To the controller.
    Write,
    /// From the controller.
    Read,
}

/// Properties of a queue, host side.
#[derive(Clone, Copy, Debug)]
pub struct TcpHostOptions {
    /// Maximum commands in flight, at most 4096.
    pub depth: u16,
    /// Maximum segments of a command.
    pub segments_max: usize,
    /// Maximum in-capsule data, bytes: 8192 on an admin queue, else from [IOCCSZ](crate::IdentifyController).
    pub in_capsule: u32,
    /// Whether to ask for header digests.
    pub header_digest: bool,
    /// Whether to ask for data digests.
    pub data_digest: bool,
    /// Alignment of data that the controller sends, dwords, 0's based (HPDA).
    pub alignment: u8,
}

/// Event of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpHostEvent {
    /// The connection is initialized; commands are sent.
    Started,
    /// A command is complete.
    Completed(Completed),
    /// The connection can be used no more.
    Ended(TcpEnd),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostSlotState {
    Free,
    /// To be sent.
    Queued,
    /// Sent, and not answered.
    Sent,
    /// Answered; the kernel may still have its data.
    Answered,
}

#[derive(Debug)]
struct HostSlot {
    /// Sequence; advances whenever a command of the slot has ended.
    sequence: u32,
    state: HostSlotState,
    sqe: Sqe,
    direction: TcpDirection,
    is_in_capsule: bool,
    /// Its data. The cursor is behind what was received, or handed over to be sent.
    data: CommandData,
    /// End of the data that the controller has asked for.
    granted: u32,
    ttag: u16,
    /// Number of the list with the last of its data.
    list: u64,
    /// Whether received data had a wrong digest.
    is_damaged: bool,
    /// Whether the controller has said that no more data comes.
    has_last: bool,
    answer: (NvmeStatus, u64),
}

#[derive(Clone, Copy, Debug)]
enum HostOutgoing {
    Command(u16),
    Data(u16),
}

/// Data that is being received.
#[derive(Clone, Copy, Debug)]
struct HostReceiving {
    slot: u16,
    is_success: bool,
}

/// A queue over TCP, host side.
#[derive(Debug)]
pub struct TcpHostQueue {
    options: TcpHostOptions,
    reader: PduReader,
    /// Framing and maximum data of PDUs sent; set by the controller.
    framing: Framing,
    maxh2cdata: u32,
    is_started: bool,
    /// PDU of the connection, to be sent first.
    initial: Option<Pdu>,
    term_req: Option<TermReq>,
    end: Option<TcpEnd>,
    slots: Box<[HostSlot]>,
    outgoing: VecDeque<HostOutgoing>,
    receiving: Option<HostReceiving>,
    /// Numbers of the last list filled, and of the last one sent.
    filled: u64,
    sent: u64,
    /// Slots that are answered, with data in a list that was not sent.
    unsent: Vec<u16>,
    /// Completions to be returned.
    completed: VecDeque<Completed>,
}

impl TcpHostQueue {
    /// A queue at the start of its connection.
    ///
    /// # Panics
    /// If the depth is zero or above 4096.
    pub fn new(options: TcpHostOptions) -> TcpHostQueue {
        let depth = usize::from(options.depth);
        assert!((1..=usize::from(SLOT_MASK) + 1).contains(&depth), "a queue of {depth} slots");
        let slot = |_| HostSlot {
            sequence: 0,
            state: HostSlotState::Free,
            sqe: Sqe::default(),
            direction: TcpDirection::None,
            is_in_capsule: false,
            data: CommandData::with_capacity(options.segments_max),
            granted: 0,
            ttag: 0,
            list: 0,
            is_damaged: false,
            has_last: false,
            answer: (NvmeStatus::SUCCESS, 0),
        };
        let initial = Pdu::IcReq(IcReq {
            alignment: options.alignment,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            maxr2t: 0,
        });
        TcpHostQueue {
            options,
            reader: PduReader::new(PduSender::Controller, DataLimits { in_capsule: 0, h2c: 0 }),
            framing: Framing::PLAIN,
            maxh2cdata: 0,
            is_started: false,
            initial: Some(initial),
            term_req: None,
            end: None,
            slots: (0..depth).map(slot).collect(),
            outgoing: VecDeque::with_capacity(depth),
            receiving: None,
            filled: 0,
            sent: 0,
            unsent: Vec::with_capacity(depth),
            completed: VecDeque::with_capacity(depth),
        }
    }

    /// Maximum commands in flight.
    pub fn depth(&self) -> u16 {
        self.options.depth
    }

    /// Sets the maximum in-capsule data of later commands, bytes.
    pub fn set_in_capsule(&mut self, bytes: u32) {
        self.options.in_capsule = bytes;
    }

    /// Reason for the end of the connection.
    pub fn end(&self) -> Option<TcpEnd> {
        self.end
    }

    /// The identifier of the command in a slot, for an Abort.
    pub fn cid(&self, slot: u16) -> Option<u16> {
        let entry = self.slots.get(usize::from(slot)).filter(|entry| entry.state != HostSlotState::Free)?;
        Some(cid(slot, entry.sequence))
    }

    /// Takes a command, to be sent by the next [`TcpHostQueue::fill`]. Its identifier and data pointer are set here.
    /// False if its data has too many segments or lies outside the memory: then nothing was taken.
    ///
    /// # Panics
    /// If the slot is in use or not below the depth.
    pub fn push(
        &mut self,
        memory: &RegionTable,
        slot: u16,
        sqe: Sqe,
        direction: TcpDirection,
        segments: impl Iterator<Item = Segment>,
    ) -> bool {
        let entry = &mut self.slots[usize::from(slot)];
        assert!(entry.state == HostSlotState::Free, "slot {slot} is in use");
        if !entry.data.set(memory, segments) {
            return false;
        }
        let bytes = entry.data.bytes();
        let fits = bytes <= self.options.in_capsule && entry.data.segments() <= SendList::DATA_PIECES_MIN;
        entry.is_in_capsule = direction == TcpDirection::Write && bytes > 0 && fits;
        let kind = if entry.is_in_capsule { sgl::IN_CAPSULE } else { sgl::TRANSPORT };
        entry.sqe = sqe.with_cid(cid(slot, entry.sequence)).with_data(Psdt::Sgl, sgl::words(kind, bytes));
        entry.direction = if bytes == 0 { TcpDirection::None } else { direction };
        (entry.granted, entry.ttag, entry.list) = (0, 0, 0);
        (entry.is_damaged, entry.has_last) = (false, false);
        entry.state = HostSlotState::Queued;
        self.outgoing.push_back(HostOutgoing::Command(slot));
        true
    }

    /// Whether [`TcpHostQueue::fill`] has something to send.
    pub fn wants_send(&self) -> bool {
        self.initial.is_some() || self.term_req.is_some() || (self.is_started && !self.outgoing.is_empty())
    }

    /// Adds PDUs to an empty list. Returns its number for [`TcpHostQueue::sent`], or `None` if there are none.
    pub fn fill(&mut self, memory: &RegionTable, list: &mut SendList) -> Option<u64> {
        let number = self.filled + 1;
        if let Some(term) = self.term_req.take() {
            list.push_term_req(&Pdu::H2cTermReq(term).encode_term_req(self.reader.header_bytes()));
        }
        if let Some(pdu) = self.initial.take() {
            list.push(&pdu, Framing::PLAIN, memory, std::iter::empty());
        }
        while self.is_started
            && let Some(room) = list.room()
            && let Some(next) = self.outgoing.pop_front()
        {
            let (HostOutgoing::Command(slot) | HostOutgoing::Data(slot)) = next;
            let entry = &mut self.slots[usize::from(slot)];
            match next {
                HostOutgoing::Command(_) => {
                    let len = if entry.is_in_capsule { entry.data.bytes() } else { 0 };
                    let pdu = Pdu::CapsuleCmd { sqe: entry.sqe.0, len };
                    list.push(&pdu, self.framing, memory, entry.data.pieces(len));
                    entry.data.skip(len);
                    entry.state = HostSlotState::Sent;
                    if len > 0 {
                        entry.list = number;
                    }
                }
                HostOutgoing::Data(_) => {
                    let offset = entry.data.done();
                    let len = entry.data.bytes_in((entry.granted - offset).min(self.maxh2cdata), room);
                    let is_last = offset + len == entry.granted;
                    let (cccid, ttag) = (cid(slot, entry.sequence), entry.ttag);
                    let pdu = Pdu::H2cData(H2cData { cccid, ttag, offset, len, is_last });
                    list.push(&pdu, self.framing, memory, entry.data.pieces(len));
                    entry.data.skip(len);
                    entry.list = number;
                    if !is_last {
                        // Behind the others: a long write holds up no command.
                        self.outgoing.push_back(next);
                    }
                }
            }
        }
        if list.is_empty() {
            return None;
        }
        self.filled = number;
        Some(number)
    }

    /// The kernel is done with the memory of all lists up to this number.
    pub fn sent(&mut self, number: u64) {
        self.sent = self.sent.max(number);
        let mut at = 0;
        while at < self.unsent.len() {
            let slot = self.unsent[at];
            if self.is_handed_over(slot) {
                self.unsent.swap_remove(at);
                self.complete(slot);
            } else {
                at += 1;
            }
        }
    }

    /// Handles received bytes, taken from the front of `bytes`, until there is an event. Calls `place` with each piece
    /// of data and its destination. `None` if all bytes are taken. Called without bytes after [`TcpHostQueue::sent`],
    /// too.
    pub fn receive(&mut self, bytes: &mut &[u8], mut place: impl FnMut(Segment, &[u8])) -> Option<TcpHostEvent> {
        loop {
            if let Some(completed) = self.completed.pop_front() {
                return Some(TcpHostEvent::Completed(completed));
            }
            if self.end.is_some() {
                *bytes = &[];
                return None;
            }
            let outcome = match self.reader.next(bytes) {
                Ok(None) => return None,
                Ok(Some(PduEvent::Header(pdu))) => self.handle(&pdu),
                Ok(Some(PduEvent::Data(mut piece))) => {
                    while let Some(receiving) = self.receiving.filter(|_| !piece.is_empty()) {
                        let data = &mut self.slots[usize::from(receiving.slot)].data;
                        let to = data.next(piece.len() as u32);
                        let (now, rest) = piece.split_at(to.len as usize);
                        place(to, now);
                        data.advance(to.len);
                        piece = rest;
                    }
                    Ok(None)
                }
                Ok(Some(PduEvent::DataEnd { is_intact })) => {
                    self.end_data(is_intact);
                    Ok(None)
                }
                Err(error) => Err(error),
            };
            match outcome {
                Ok(None) => {}
                Ok(Some(event)) => return Some(event),
                Err(error) => return Some(self.violate(error)),
            }
        }
    }

    /// Destination of the next bytes of the stream if they are data, as far as it is contiguous: they may be received
    /// into it directly.
    pub fn destination(&self) -> Option<Segment> {
        let receiving = self.receiving?;
        let left = self.reader.data_left();
        (left > 0).then(|| self.slots[usize::from(receiving.slot)].data.next(left))
    }

    /// So many bytes were received into the [destination](TcpHostQueue::destination). Those of a connection that was
    /// [given up](TcpHostQueue::abandon) meanwhile are dropped: they came before its owner could know.
    ///
    /// # Panics
    /// If they are more than it has.
    pub fn received(&mut self, memory: &RegionTable, bytes: u32) {
        if self.end.is_some() {
            return;
        }
        let destination = self.destination().unwrap_or_default();
        assert!(bytes <= destination.len, "{bytes} bytes for a destination of {}", destination.len);
        if let Some(digest) = self.reader.skip_data(bytes) {
            update_digest(digest, memory, Segment { len: bytes, ..destination });
        }
        if let Some(receiving) = self.receiving {
            self.slots[usize::from(receiving.slot)].data.advance(bytes);
        }
    }

    /// Gives up the read in a slot: what still comes of its data goes to `waste`. It completes as any other, and until
    /// then the slot is in use. False, and nothing is changed, while its data is being received, if it is longer than
    /// `waste`, or no read.
    pub fn divert(&mut self, slot: u16, waste: Segment) -> bool {
        let is_receiving = self.receiving.is_some_and(|receiving| receiving.slot == slot);
        let Some(entry) = self.slots.get_mut(usize::from(slot)).filter(|_| !is_receiving) else { return false };
        let is_waiting = matches!(entry.state, HostSlotState::Queued | HostSlotState::Sent);
        if !is_waiting || entry.direction != TcpDirection::Read || entry.data.bytes() > waste.len {
            return false;
        }
        entry.data.divert(waste);
        true
    }

    /// Whether the command in a slot was handed over to be sent: the controller may execute it.
    pub fn was_sent(&self, slot: u16) -> bool {
        let entry = self.slots.get(usize::from(slot));
        entry.is_some_and(|entry| !matches!(entry.state, HostSlotState::Free | HostSlotState::Queued))
    }

    /// Forgets the command in a slot, whose connection has ended. The owner has proof that neither the kernel nor the
    /// controller will touch its data any more. Returns whether the slot had a command.
    ///
    /// # Panics
    /// If the connection has not [ended](TcpHostQueue::abandon).
    pub fn cancel(&mut self, slot: u16) -> bool {
        assert!(self.end.is_some(), "commands of a connection that has not ended");
        let Some(entry) = self.slots.get_mut(usize::from(slot)).filter(|entry| entry.state != HostSlotState::Free)
        else {
            return false;
        };
        entry.state = HostSlotState::Free;
        entry.sequence = entry.sequence.wrapping_add(1);
        entry.data.clear();
        self.unsent.retain(|other| *other != slot);
        true
    }

    /// The connection is closed, or its owner gives it up.
    pub fn abandon(&mut self, end: TcpEnd) {
        self.end.get_or_insert(end);
        self.is_started = false;
        self.initial = None;
        self.receiving = None;
        self.outgoing.clear();
    }

    fn violate(&mut self, error: PduError) -> TcpHostEvent {
        self.abandon(TcpEnd::Violation(error));
        self.term_req = Some(error.into());
        TcpHostEvent::Ended(TcpEnd::Violation(error))
    }

    fn handle(&mut self, pdu: &Pdu) -> Result<Option<TcpHostEvent>, PduError> {
        match *pdu {
            Pdu::IcResp(response) => self.start(response).map(Some),
            Pdu::C2hTermReq(term) => {
                self.abandon(TcpEnd::Terminated(term));
                Ok(Some(TcpHostEvent::Ended(TcpEnd::Terminated(term))))
            }
            Pdu::CapsuleResp(cqe) => self.answer(Cqe(cqe)).map(|()| None),
            Pdu::C2hData(data) => self.begin_data(data).map(|()| None),
            Pdu::R2t(r2t) => self.grant(r2t).map(|()| None),
            // The reader refuses PDUs of hosts.
            _ => Ok(None),
        }
    }

    fn start(&mut self, response: IcResp) -> Result<TcpHostEvent, PduError> {
        let IcResp { alignment, header_digest, data_digest, maxh2cdata } = response;
        if (header_digest, data_digest) != (self.options.header_digest, self.options.data_digest) {
            return Err(PduError::field(11, "digests differ from those requested"));
        }
        self.reader.start(Framing { header_digest, data_digest, alignment: self.options.alignment });
        self.framing = Framing { header_digest, data_digest, alignment };
        self.maxh2cdata = maxh2cdata;
        self.is_started = true;
        Ok(TcpHostEvent::Started)
    }

    /// The slot of an outstanding command that is named at this offset of a header.
    fn find(&mut self, id: u16, offset: u32) -> Result<u16, PduError> {
        let slot = id & SLOT_MASK;
        match self.slots.get(usize::from(slot)) {
            Some(entry) if entry.state == HostSlotState::Sent && cid(slot, entry.sequence) == id => Ok(slot),
            _ => Err(PduError::field(offset, "command identifier that is not outstanding")),
        }
    }

    fn answer(&mut self, cqe: Cqe) -> Result<(), PduError> {
        let slot = self.find(cqe.cid(), 8 + 12)?;
        let entry = &mut self.slots[usize::from(slot)];
        let mut status = cqe.status();
        if entry.data.left() > 0 && status.is_success() {
            match entry.direction {
                TcpDirection::Write => {
                    return Err(PduError::new(FatalStatus::SequenceError, "success of a write before its data"));
                }
                // The data is short: no success for its user.
                TcpDirection::Read => status = NvmeStatus::DATA_TRANSFER_ERROR,
                TcpDirection::None => {}
            }
        }
        self.end_command(slot, status, cqe.result());
        Ok(())
    }

    fn begin_data(&mut self, data: C2hData) -> Result<(), PduError> {
        let slot = self.find(data.cccid, 8)?;
        let entry = &mut self.slots[usize::from(slot)];
        if entry.direction != TcpDirection::Read {
            return Err(PduError::field(8, "data of a command that reads none"));
        }
        let end = u64::from(data.offset) + u64::from(data.len);
        if end > u64::from(entry.data.bytes()) {
            return Err(PduError::new(FatalStatus::OutOfRange, "data beyond the end of the buffer"));
        }
        if data.offset != entry.data.done() {
            return Err(PduError::field(12, "data out of order"));
        }
        if entry.has_last {
            return Err(PduError::new(FatalStatus::SequenceError, "data after the last PDU of a command"));
        }
        if data.is_success && data.len != entry.data.left() {
            return Err(PduError::field(1, "success before all data"));
        }
        entry.has_last = data.is_last;
        self.receiving = Some(HostReceiving { slot, is_success: data.is_success });
        Ok(())
    }

    fn end_data(&mut self, is_intact: bool) {
        let Some(HostReceiving { slot, is_success }) = self.receiving.take() else { return };
        self.slots[usize::from(slot)].is_damaged |= !is_intact;
        if is_success {
            self.end_command(slot, NvmeStatus::SUCCESS, 0);
        }
    }

    fn grant(&mut self, r2t: R2t) -> Result<(), PduError> {
        let slot = self.find(r2t.cccid, 8)?;
        let entry = &mut self.slots[usize::from(slot)];
        if entry.direction != TcpDirection::Write || entry.is_in_capsule {
            return Err(PduError::field(8, "R2T for a command without data to transfer"));
        }
        if entry.granted != entry.data.done() {
            return Err(PduError::new(FatalStatus::LimitExceeded, "second R2T of a command"));
        }
        let end = u64::from(r2t.offset) + u64::from(r2t.len);
        if end > u64::from(entry.data.bytes()) {
            return Err(PduError::new(FatalStatus::OutOfRange, "R2T beyond the end of the buffer"));
        }
        if r2t.offset != entry.data.done() {
            return Err(PduError::field(12, "R2T out of order"));
        }
        (entry.granted, entry.ttag) = (r2t.offset + r2t.len, r2t.ttag);
        self.outgoing.push_back(HostOutgoing::Data(slot));
        Ok(())
    }

    /// The controller has answered: the command is complete once the kernel is done with its data.
    fn end_command(&mut self, slot: u16, status: NvmeStatus, result: u64) {
        let entry = &mut self.slots[usize::from(slot)];
        let is_damaged = entry.is_damaged && status.is_success();
        let status = if is_damaged { NvmeStatus::TRANSIENT_TRANSPORT } else { status };
        (entry.state, entry.answer) = (HostSlotState::Answered, (status, result));
        if self.is_handed_over(slot) {
            self.complete(slot);
        } else {
            self.unsent.push(slot);
        }
    }

    /// Whether all data that the controller has asked for was sent. A controller that fails a command early still gets
    /// it.
    fn is_handed_over(&self, slot: u16) -> bool {
        let entry = &self.slots[usize::from(slot)];
        entry.list <= self.sent && entry.granted <= entry.data.done()
    }

    fn complete(&mut self, slot: u16) {
        let entry = &mut self.slots[usize::from(slot)];
        entry.state = HostSlotState::Free;
        entry.sequence = entry.sequence.wrapping_add(1);
        entry.data.clear();
        let (status, result) = entry.answer;
        self.completed.push_back(Completed { slot, status, result });
    }
}
