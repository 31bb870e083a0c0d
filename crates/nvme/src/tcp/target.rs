//! The controller's side of one queue over one connection.
//!
//! Owned by the lane of the connection. A command is known by its slot, which the machine chooses. A buffer that the
//! owner gives for the data of a command belongs to the machine until [`TcpTargetEvent::Released`].
//!
//! ```text
//!  Command ─┬─ receive_data ──▶ DataReady ─┬─ respond ────────┬─▶ Released
//!           └──────────────────────────────┴─ respond_with ───┘
//! ```
//!
//! Before a slot is released, or the owner has said where in-capsule data belongs, no more bytes are taken: TCP holds
//! up the host. One R2T of a command is outstanding at most, for all of its data.

mod snapshot;

use std::collections::VecDeque;

use blkyard_mem::{RegionTable, Segment};
use blkyard_wire::nvme_tcp::{
    C2hData, DataLimits, FatalStatus, Framing, H2cData, IcReq, IcResp, Pdu, PduError, PduEvent, PduReader, PduSender,
    R2t, TermReq,
};

pub use self::snapshot::TcpQueueSnapshot;
use super::data::CommandData;
use super::list::SendList;
use super::{TcpEnd, sgl};
use crate::host::{SLOT_MASK, cid};
use crate::{Cqe, NvmeStatus, Psdt, Sqe};

/// Maximum data of one C2HData PDU, so that a long read holds up the others for a bounded time.
const C2H_DATA_MAX: u32 = 128 << 10;

/// Properties of a queue, controller side.
#[derive(Clone, Copy, Debug)]
pub struct TcpTargetOptions {
    /// Commands at the same time, at most 4096. A host that sends more violates the protocol, so they are at least as
    /// many as its queue has entries.
    pub slots: u16,
    /// Maximum segments of a command.
    pub segments_max: usize,
    /// Maximum in-capsule data, bytes.
    pub in_capsule: u32,
    /// Maximum data of one H2CData PDU, bytes: at least 4096, a multiple of 4.
    pub maxh2cdata: u32,
    /// Whether header digests are used if the host asks for them.
    pub header_digest: bool,
    /// Whether data digests are used if the host asks for them.
    pub data_digest: bool,
    /// Alignment of data that the host sends, dwords, 0's based (CPDA).
    pub alignment: u8,
}

/// Data of a command, as its SGL says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpTransfer {
    /// No data.
    None,
    /// Data in the capsule, bytes.
    InCapsule(u32),
    /// Data to be transferred in either direction, bytes. The number is the host's and has no bound.
    Transport(u32),
}

/// Event of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpTargetEvent {
    /// The connection is initialized.
    Started,
    /// A command has come.
    Command {
        /// Its slot.
        slot: u16,
        /// The command.
        sqe: Sqe,
        /// Its data.
        transfer: TcpTransfer,
    },
    /// All data of a command is in its buffer.
    DataReady(u16),
    /// The response was sent, or the connection has ended: the slot and its buffers are free.
    Released(u16),
    /// The connection can be used no more. Commands of the owner are still to be answered, which releases them.
    Ended(TcpEnd),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetSlotState {
    Free,
    /// With the owner, which may ask for the data of the host.
    Given,
    /// Waiting for data of the host.
    Receiving,
    /// With the owner, all data transferred.
    Executing,
    /// Answered.
    Responding,
}

#[derive(Debug)]
struct TargetSlot {
    /// Sequence; advances whenever a command of the slot has ended.
    sequence: u32,
    state: TargetSlotState,
    /// The host's identifier.
    cccid: u16,
    transfer: TcpTransfer,
    data: CommandData,
    /// Whether an R2T was sent.
    is_requested: bool,
    /// Whether received data had a wrong digest.
    is_damaged: bool,
    /// Whether the owner knows of it.
    is_reported: bool,
    answer: (NvmeStatus, u64),
}

impl TargetSlot {
    fn new(segments_max: usize) -> TargetSlot {
        TargetSlot {
            sequence: 0,
            state: TargetSlotState::Free,
            cccid: 0,
            transfer: TcpTransfer::None,
            data: CommandData::with_capacity(segments_max),
            is_requested: false,
            is_damaged: false,
            is_reported: false,
            answer: (NvmeStatus::SUCCESS, 0),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum TargetOutgoing {
    R2t(u16),
    Data(u16),
    Response(u16),
}

/// Destination of the data that is being received.
#[derive(Clone, Copy, Debug)]
enum TargetReceiving {
    /// The owner has not said where in-capsule data belongs.
    Undecided(u16),
    /// To the buffer of a slot.
    Slot(u16),
    /// Data of a command that was answered before.
    Dropped,
}

/// A queue over TCP, controller side.
#[derive(Debug)]
pub struct TcpTargetQueue {
    options: TcpTargetOptions,
    reader: PduReader,
    framing: Framing,
    initial: Option<Pdu>,
    term_req: Option<TermReq>,
    end: Option<TcpEnd>,
    slots: Vec<TargetSlot>,
    free: Vec<u16>,
    /// A command that waits for a free slot, and its in-capsule data.
    waiting: Option<(Sqe, u32)>,
    receiving: Option<TargetReceiving>,
    outgoing: VecDeque<TargetOutgoing>,
    /// Number of the last list filled.
    filled: u64,
    /// Number up to which the kernel is done.
    sent: u64,
    /// Slots whose response is in a list, with its number, in order.
    responses: VecDeque<(u64, u16)>,
    released: VecDeque<u16>,
    /// Entries of the submission queue, and its head; `None` without flow control.
    sq: Option<(u32, u32)>,
}

impl TcpTargetQueue {
    /// A queue at the start of its connection.
    ///
    /// # Panics
    /// If there are no slots or more than 4096, or the maximum data is none that a controller may have.
    pub fn new(options: TcpTargetOptions) -> TcpTargetQueue {
        let slots = usize::from(options.slots);
        assert!((1..=usize::from(SLOT_MASK) + 1).contains(&slots), "a queue of {slots} slots");
        assert!(options.maxh2cdata >= 4096 && options.maxh2cdata.is_multiple_of(4), "MAXH2CDATA");
        let limits = DataLimits { in_capsule: options.in_capsule, h2c: options.maxh2cdata };
        TcpTargetQueue {
            options,
            reader: PduReader::new(PduSender::Host, limits),
            framing: Framing::PLAIN,
            initial: None,
            term_req: None,
            end: None,
            slots: (0..slots).map(|_| TargetSlot::new(options.segments_max)).collect(),
            free: (0..options.slots).rev().collect(),
            waiting: None,
            receiving: None,
            outgoing: VecDeque::with_capacity(slots),
            filled: 0,
            sent: 0,
            responses: VecDeque::with_capacity(slots),
            released: VecDeque::with_capacity(slots),
            sq: None,
        }
    }

    /// Reason for the end of the connection.
    pub fn end(&self) -> Option<TcpEnd> {
        self.end
    }

    /// Commands that are not released.
    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds slots, once Connect has said how many entries the host's queue has. All slots, those in use too, have so
    /// many segments from now on.
    ///
    /// # Panics
    /// If there are more than 4096 slots then.
    pub fn grow(&mut self, slots: u16, segments_max: usize) {
        let present = self.slots.len() as u16;
        let slots = slots.max(present);
        assert!(slots <= SLOT_MASK + 1, "a queue of {slots} slots");
        self.slots.iter_mut().for_each(|slot| slot.data.reserve(segments_max));
        self.slots.extend((present..slots).map(|_| TargetSlot::new(segments_max)));
        let entries = usize::from(slots);
        self.free.reserve(entries);
        self.free.extend((present..slots).rev());
        self.outgoing.reserve(entries);
        self.responses.reserve(entries);
        self.released.reserve(entries);
    }

    /// A Connect was accepted: its queue has so many entries, and the head is reported to the host. Without this call
    /// there is no flow control, and reads may end without a response.
    pub fn set_flow_control(&mut self, entries: u32) {
        let entries = entries.max(1);
        self.sq = Some((entries, 1 % entries));
    }

    /// Says where the data of the host belongs, after [`TcpTargetEvent::Command`]. In-capsule data follows at once,
    /// other data is requested. False if the segments have another length, are too many, or lie outside the memory.
    ///
    /// # Panics
    /// If the command has no data, or was answered.
    pub fn receive_data(&mut self, memory: &RegionTable, slot: u16, segments: impl Iterator<Item = Segment>) -> bool {
        let entry = &mut self.slots[usize::from(slot)];
        assert!(entry.state == TargetSlotState::Given, "slot {slot} awaits no buffer");
        let (TcpTransfer::InCapsule(bytes) | TcpTransfer::Transport(bytes)) = entry.transfer else {
            panic!("slot {slot} has no data")
        };
        if !entry.data.set(memory, segments) || entry.data.bytes() != bytes {
            entry.data.clear();
            return false;
        }
        entry.state = TargetSlotState::Receiving;
        if self.end.is_some() {
            self.release(slot);
        } else if let TcpTransfer::Transport(_) = entry.transfer {
            self.outgoing.push_back(TargetOutgoing::R2t(slot));
        } else if let Some(TargetReceiving::Undecided(undecided)) = self.receiving
            && undecided == slot
        {
            self.receiving = Some(TargetReceiving::Slot(slot));
        }
        true
    }

    /// Answers a command without data to the host. In-capsule data that no buffer was given for is dropped.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn respond(&mut self, slot: u16, status: NvmeStatus, result: u64) {
        self.answer(slot, TargetOutgoing::Response(slot), status, result);
    }

    /// Answers a command successfully, with data. False if the segments are too many, longer than the host's buffer, or
    /// outside the memory: then it is not answered.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn respond_with(
        &mut self,
        memory: &RegionTable,
        slot: u16,
        segments: impl Iterator<Item = Segment>,
        result: u64,
    ) -> bool {
        let entry = &mut self.slots[usize::from(slot)];
        let TcpTransfer::Transport(bytes) = entry.transfer else { return false };
        if !entry.data.set(memory, segments) || entry.data.bytes() > bytes {
            entry.data.clear();
            return false;
        }
        let next = if entry.data.bytes() > 0 { TargetOutgoing::Data(slot) } else { TargetOutgoing::Response(slot) };
        self.answer(slot, next, NvmeStatus::SUCCESS, result);
        true
    }

    /// Whether [`TcpTargetQueue::fill`] has something to send.
    pub fn wants_send(&self) -> bool {
        self.initial.is_some() || self.term_req.is_some() || !self.outgoing.is_empty()
    }

    /// Adds PDUs to an empty list. Returns its number for [`TcpTargetQueue::sent`], or `None` if there are none.
    pub fn fill(&mut self, memory: &RegionTable, list: &mut SendList) -> Option<u64> {
        let number = self.filled + 1;
        if let Some(term) = self.term_req.take() {
            list.push_term_req(&Pdu::C2hTermReq(term).encode_term_req(self.reader.header_bytes()));
        }
        if let Some(pdu) = self.initial.take() {
            list.push(&pdu, Framing::PLAIN, memory, std::iter::empty());
        }
        while let Some(room) = list.room()
            && let Some(next) = self.outgoing.pop_front()
        {
            let (TargetOutgoing::R2t(slot) | TargetOutgoing::Data(slot) | TargetOutgoing::Response(slot)) = next;
            let entry = &mut self.slots[usize::from(slot)];
            let cccid = entry.cccid;
            match next {
                TargetOutgoing::R2t(_) => {
                    entry.is_requested = true;
                    let (ttag, len) = (cid(slot, entry.sequence), entry.data.bytes());
                    let pdu = Pdu::R2t(R2t { cccid, ttag, offset: 0, len });
                    list.push(&pdu, self.framing, memory, std::iter::empty());
                }
                TargetOutgoing::Data(_) => {
                    let offset = entry.data.done();
                    let len = entry.data.bytes_in(C2H_DATA_MAX, room);
                    let is_last = len == entry.data.left();
                    // A response would say nothing more.
                    let TcpTransfer::Transport(wanted) = entry.transfer else { continue };
                    let is_whole = entry.data.bytes() == wanted;
                    let is_success = is_last && is_whole && self.sq.is_none() && entry.answer.1 == 0;
                    let pdu = Pdu::C2hData(C2hData { cccid, offset, len, is_last, is_success });
                    list.push(&pdu, self.framing, memory, entry.data.pieces(len));
                    entry.data.skip(len);
                    if is_success {
                        self.responses.push_back((number, slot));
                    } else if is_last {
                        self.outgoing.push_front(TargetOutgoing::Response(slot));
                    } else {
                        self.outgoing.push_back(next);
                    }
                }
                TargetOutgoing::Response(_) => {
                    let head = self.sq.map_or(u16::MAX, |(_, head)| head as u16);
                    let (status, result) = entry.answer;
                    let cqe = Cqe::new(cccid, 0, head, status, result, false);
                    list.push(&Pdu::CapsuleResp(cqe.0), self.framing, memory, std::iter::empty());
                    self.responses.push_back((number, slot));
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
        while let Some((_, slot)) = self.responses.pop_front_if(|(list, _)| *list <= number) {
            self.release(slot);
        }
    }

    /// Handles received bytes, taken from the front of `bytes`, until there is an event. Calls `place` with each piece
    /// of data and its destination. `None` if all bytes are taken, or the rest has to wait: for a buffer, or for a slot
    /// that [`TcpTargetQueue::sent`] frees.
    pub fn receive(&mut self, bytes: &mut &[u8], mut place: impl FnMut(Segment, &[u8])) -> Option<TcpTargetEvent> {
        loop {
            if let Some(slot) = self.released.pop_front() {
                return Some(TcpTargetEvent::Released(slot));
            }
            if self.end.is_some() {
                *bytes = &[];
                return None;
            }
            if let Some((sqe, len)) = self.waiting {
                let Some(slot) = self.free.pop() else {
                    // A response may have reached the host before the kernel said that it was sent.
                    if self.slots.iter().any(|entry| entry.state == TargetSlotState::Responding) {
                        return None;
                    }
                    return Some(self.violate(PduError::new(FatalStatus::SequenceError, "more commands than slots")));
                };
                self.waiting = None;
                if let Some(event) = self.begin_command(slot, sqe, len) {
                    return Some(event);
                }
                continue;
            }
            if let Some(TargetReceiving::Undecided(_)) = self.receiving {
                return None;
            }
            let outcome = match self.reader.next(bytes) {
                Ok(None) => return None,
                Ok(Some(PduEvent::Header(pdu))) => self.handle(&pdu),
                Ok(Some(PduEvent::Data(mut piece))) => {
                    while let Some(TargetReceiving::Slot(slot)) = self.receiving
                        && !piece.is_empty()
                    {
                        let data = &mut self.slots[usize::from(slot)].data;
                        let to = data.next(piece.len() as u32);
                        let (now, rest) = piece.split_at(to.len as usize);
                        place(to, now);
                        data.advance(to.len);
                        piece = rest;
                    }
                    Ok(None)
                }
                Ok(Some(PduEvent::DataEnd { is_intact })) => Ok(self.end_data(is_intact)),
                Err(error) => Err(error),
            };
            match outcome {
                Ok(None) => {}
                Ok(Some(event)) => return Some(event),
                Err(error) => return Some(self.violate(error)),
            }
        }
    }

    /// The connection is closed, or its owner gives it up. Nothing more is sent except a TermReq. Lists that were
    /// filled are still to be reported as [sent](TcpTargetQueue::sent) once the kernel is done with them.
    pub fn abandon(&mut self, end: TcpEnd) {
        self.end.get_or_insert(end);
        (self.initial, self.waiting, self.receiving) = (None, None, None);
        self.outgoing.clear();
        for slot in 0..self.slots.len() as u16 {
            let is_in_list = self.responses.iter().any(|(_, other)| *other == slot);
            match self.slots[usize::from(slot)].state {
                // Data of earlier PDUs of the same response may still be with the kernel.
                TargetSlotState::Responding if is_in_list => {}
                TargetSlotState::Responding if self.sent < self.filled => self.responses.push_back((self.filled, slot)),
                TargetSlotState::Receiving | TargetSlotState::Responding => self.release(slot),
                _ => {}
            }
        }
    }

    fn violate(&mut self, error: PduError) -> TcpTargetEvent {
        self.abandon(TcpEnd::Violation(error));
        self.term_req = Some(error.into());
        TcpTargetEvent::Ended(TcpEnd::Violation(error))
    }

    fn handle(&mut self, pdu: &Pdu) -> Result<Option<TcpTargetEvent>, PduError> {
        match *pdu {
            Pdu::IcReq(request) => Ok(Some(self.start(request))),
            Pdu::H2cTermReq(term) => {
                self.abandon(TcpEnd::Terminated(term));
                Ok(Some(TcpTargetEvent::Ended(TcpEnd::Terminated(term))))
            }
            Pdu::CapsuleCmd { sqe, len } => {
                if let Some((entries, head)) = &mut self.sq {
                    *head = (*head + 1) % *entries;
                }
                self.waiting = Some((Sqe(sqe), len));
                Ok(None)
            }
            Pdu::H2cData(data) => self.begin_data(data).map(|()| None),
            // The reader refuses PDUs of controllers.
            _ => Ok(None),
        }
    }

    fn start(&mut self, request: IcReq) -> TcpTargetEvent {
        let header_digest = request.header_digest && self.options.header_digest;
        let data_digest = request.data_digest && self.options.data_digest;
        let TcpTargetOptions { alignment, maxh2cdata, .. } = self.options;
        self.initial = Some(Pdu::IcResp(IcResp { alignment, header_digest, data_digest, maxh2cdata }));
        self.reader.start(Framing { header_digest, data_digest, alignment });
        self.framing = Framing { header_digest, data_digest, alignment: request.alignment };
        TcpTargetEvent::Started
    }

    fn begin_command(&mut self, slot: u16, sqe: Sqe, len: u32) -> Option<TcpTargetEvent> {
        let transfer = parse_transfer(&sqe, len);
        let entry = &mut self.slots[usize::from(slot)];
        entry.data.clear();
        (entry.state, entry.cccid) = (TargetSlotState::Given, sqe.cid());
        (entry.is_requested, entry.is_damaged, entry.is_reported) = (false, false, transfer.is_ok());
        entry.transfer = transfer.unwrap_or(TcpTransfer::None);
        if len > 0 {
            self.receiving = Some(TargetReceiving::Undecided(slot));
        }
        match transfer {
            Ok(transfer) => Some(TcpTargetEvent::Command { slot, sqe, transfer }),
            Err(status) => {
                self.respond(slot, status.with_dnr(), 0);
                None
            }
        }
    }

    fn begin_data(&mut self, data: H2cData) -> Result<(), PduError> {
        let slot = data.ttag & SLOT_MASK;
        let entry = self.slots.get(usize::from(slot)).filter(|entry| {
            entry.state == TargetSlotState::Receiving && entry.is_requested && cid(slot, entry.sequence) == data.ttag
        });
        let Some(entry) = entry else { return Err(PduError::field(10, "transfer tag that is not outstanding")) };
        if entry.cccid != data.cccid {
            return Err(PduError::field(8, "command identifier of another command"));
        }
        let end = u64::from(data.offset) + u64::from(data.len);
        let bytes = u64::from(entry.data.bytes());
        if end > bytes {
            return Err(PduError::new(FatalStatus::OutOfRange, "data beyond the end of the R2T"));
        }
        if data.offset != entry.data.done() {
            return Err(PduError::field(12, "data out of order"));
        }
        if data.is_last != (end == bytes) {
            return Err(PduError::field(1, "last PDU flag does not match the R2T"));
        }
        self.receiving = Some(TargetReceiving::Slot(slot));
        Ok(())
    }

    fn end_data(&mut self, is_intact: bool) -> Option<TcpTargetEvent> {
        let Some(TargetReceiving::Slot(slot)) = self.receiving.take() else { return None };
        let entry = &mut self.slots[usize::from(slot)];
        entry.is_damaged |= !is_intact;
        if entry.data.left() > 0 {
            return None;
        }
        entry.state = TargetSlotState::Executing;
        if entry.is_damaged {
            self.respond(slot, NvmeStatus::TRANSIENT_TRANSPORT, 0);
            return None;
        }
        Some(TcpTargetEvent::DataReady(slot))
    }

    fn answer(&mut self, slot: u16, next: TargetOutgoing, status: NvmeStatus, result: u64) {
        let entry = &mut self.slots[usize::from(slot)];
        assert!(
            matches!(entry.state, TargetSlotState::Given | TargetSlotState::Executing),
            "slot {slot} is not with its owner"
        );
        (entry.state, entry.answer) = (TargetSlotState::Responding, (status, result));
        if let Some(TargetReceiving::Undecided(undecided)) = self.receiving
            && undecided == slot
        {
            self.receiving = Some(TargetReceiving::Dropped);
        }
        if self.end.is_some() {
            self.release(slot);
        } else {
            self.outgoing.push_back(next);
        }
    }

    fn release(&mut self, slot: u16) {
        let entry = &mut self.slots[usize::from(slot)];
        entry.state = TargetSlotState::Free;
        entry.sequence = entry.sequence.wrapping_add(1);
        entry.data.clear();
        self.free.push(slot);
        if entry.is_reported {
            self.released.push_back(slot);
        }
    }
}

/// The data of a command with `len` bytes of in-capsule data; the status of an invalid SGL.
fn parse_transfer(sqe: &Sqe, len: u32) -> Result<TcpTransfer, NvmeStatus> {
    if !matches!(sqe.psdt(), Some(Psdt::Sgl | Psdt::SglMetadata)) {
        return Err(NvmeStatus::INVALID_FIELD);
    }
    let [address, word] = sqe.data();
    let bytes = word as u32;
    match (word >> 56) as u8 {
        sgl::IN_CAPSULE if address != 0 => Err(NvmeStatus::INVALID_SGL_OFFSET),
        sgl::IN_CAPSULE if bytes != len => Err(NvmeStatus::INVALID_DATA_SGL_LENGTH),
        sgl::IN_CAPSULE if len > 0 => Ok(TcpTransfer::InCapsule(len)),
        sgl::TRANSPORT if len > 0 => Err(NvmeStatus::INVALID_DATA_SGL_LENGTH),
        sgl::TRANSPORT if bytes > 0 => Ok(TcpTransfer::Transport(bytes)),
        0 if len == 0 && bytes == 0 => Ok(TcpTransfer::None),
        sgl::IN_CAPSULE | sgl::TRANSPORT => Ok(TcpTransfer::None),
        _ => Err(NvmeStatus::INVALID_SGL_TYPE),
    }
}
