//! State of a queue for another process that continues with its connection: commands and bytes that lead to it.
//!
//! A command that was not answered is begun again there. Its capsule is among the bytes that are received first; the
//! host does not notice. Only a command whose data the host was asked for keeps its slot, for the host names that with
//! its data, and what has come of the data. A PDU that has not ended begins again, too.
//!
//! The queue is at rest: all that it had to send is sent, or has become bytes that its owner hands over.

use blkyard_mem::{RegionTable, Segment};
use blkyard_wire::nvme_tcp::{ALIGNMENT_MAX, Framing, Pdu};
use serde::{Deserialize, Serialize};

use super::{TargetReceiving, TargetSlotState, TcpTargetOptions, TcpTargetQueue, TcpTransfer};
use crate::Sqe;
use crate::tcp::{SendList, SendPiece};

/// State of a queue beside its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpQueueSnapshot {
    /// Whether the connection is initialized.
    is_started: bool,
    header_digest: bool,
    data_digest: bool,
    /// Alignment of data for the host (HPDA).
    alignment: u8,
    /// Entries of the submission queue, and its head.
    sq: Option<(u32, u32)>,
    requested: Vec<RequestedSnapshot>,
    /// Bytes to be received first.
    input: u32,
    /// Bytes of the stream behind those that belong to no command any more.
    dropped: u32,
}

/// A command whose data the host was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedSnapshot {
    slot: u16,
    sequence: u32,
    sqe: Sqe,
    is_damaged: bool,
    /// Bytes of its data that have come.
    data: u32,
}

impl RequestedSnapshot {
    /// Its slot.
    pub(in crate::tcp) fn slot(&self) -> u16 {
        self.slot
    }

    /// The command.
    pub(in crate::tcp) fn sqe(&self) -> &Sqe {
        &self.sqe
    }

    /// Length of its data.
    pub(in crate::tcp) fn bytes(&self) -> u32 {
        self.sqe.data()[1] as u32
    }

    /// Takes what has come of its data; `None` if there is less.
    pub(in crate::tcp) fn take_data<'a>(&self, bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
        take(bytes, self.data)
    }
}

impl TcpQueueSnapshot {
    /// The commands whose data the host was asked for.
    pub(in crate::tcp) fn requested(&self) -> &[RequestedSnapshot] {
        &self.requested
    }

    /// Takes the bytes that are to be received first; `None` if there are too few.
    pub fn take_input<'a>(&self, bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
        take(bytes, self.input)
    }

    /// Bytes of the stream that are to be dropped behind them.
    pub fn dropped(&self) -> u32 {
        self.dropped
    }
}

impl TcpTargetQueue {
    /// Saves the state; `sqe_of` is the command in a slot. Adds the bytes that belong to it. `None` if the connection
    /// has ended, or something is to be sent.
    pub(in crate::tcp) fn snapshot(
        &self,
        memory: &RegionTable,
        sqe_of: impl Fn(u16) -> Sqe,
        bytes: &mut Vec<u8>,
    ) -> Option<TcpQueueSnapshot> {
        let is_undecided = matches!(self.receiving, Some(TargetReceiving::Undecided(_))) || self.waiting.is_some();
        if self.end.is_some() || self.wants_send() || !self.responses.is_empty() || is_undecided {
            return None;
        }
        let framing = Framing { alignment: self.options.alignment, ..self.framing };
        let unfinished = self.reader.unfinished();
        // Capsules, and the data of the present PDU.
        let (mut input, mut part) = (Vec::new(), Vec::new());
        let (mut requested, mut begun) = (Vec::new(), 0);
        for (slot, entry) in (0..).zip(&self.slots) {
            let is_present = matches!(self.receiving, Some(TargetReceiving::Slot(present)) if present == slot);
            match (entry.state, entry.transfer) {
                (TargetSlotState::Free, _) => {}
                (TargetSlotState::Responding, _) => return None,
                (_, TcpTransfer::Transport(_)) if entry.is_requested => {
                    let data = read(memory, entry.data.received());
                    let again = if is_present { unfinished.data as usize } else { 0 };
                    let (kept, again) = data.split_at(data.len().checked_sub(again)?);
                    bytes.extend_from_slice(kept);
                    part.extend_from_slice(again);
                    let (sequence, is_damaged, data) = (entry.sequence, entry.is_damaged, kept.len() as u32);
                    requested.push(RequestedSnapshot { slot, sequence, sqe: sqe_of(slot), is_damaged, data });
                }
                (TargetSlotState::Receiving, TcpTransfer::InCapsule(_)) => {
                    // The present PDU is its capsule.
                    part = read(memory, entry.data.received());
                    begun += 1;
                }
                (_, transfer) => {
                    let len = if let TcpTransfer::InCapsule(len) = transfer { len } else { 0 };
                    let mut list = SendList::new(SendList::PIECES_MIN);
                    list.push(&Pdu::CapsuleCmd { sqe: sqe_of(slot).0, len }, framing, memory, entry.data.received());
                    for piece in list.pieces() {
                        match piece {
                            SendPiece::Bytes(bytes) => input.extend_from_slice(bytes),
                            SendPiece::Data(segment) => input.extend(read(memory, std::iter::once(segment))),
                        }
                    }
                    begun += 1;
                }
            }
        }
        let is_dropped = matches!(self.receiving, Some(TargetReceiving::Dropped));
        if !is_dropped {
            input.extend([&unfinished.header[..], &part, &unfinished.digest].concat());
        }
        bytes.extend_from_slice(&input);
        Some(TcpQueueSnapshot {
            is_started: self.reader.is_started(),
            header_digest: self.framing.header_digest,
            data_digest: self.framing.data_digest,
            alignment: self.framing.alignment,
            // The capsules are counted when they come again.
            sq: self.sq.map(|(entries, head)| (entries, (head + entries - begun % entries) % entries)),
            requested,
            input: input.len() as u32,
            dropped: if is_dropped { unfinished.left } else { 0 },
        })
    }

    /// A queue with saved state, without its commands. `None` if the state is invalid for these options.
    ///
    /// # Panics
    /// As for [`TcpTargetQueue::new`].
    pub fn restore(options: TcpTargetOptions, saved: &TcpQueueSnapshot) -> Option<TcpTargetQueue> {
        let &TcpQueueSnapshot { is_started, header_digest, data_digest, alignment, sq, .. } = saved;
        let has_digests = (header_digest && !options.header_digest) || (data_digest && !options.data_digest);
        let is_sq = sq.is_none_or(|(entries, head)| head < entries && entries <= u32::from(u16::MAX) + 1);
        if has_digests || alignment > ALIGNMENT_MAX || !is_sq {
            return None;
        }
        let mut queue = TcpTargetQueue::new(options);
        if is_started {
            queue.reader.start(Framing { header_digest, data_digest, alignment: options.alignment });
            queue.framing = Framing { header_digest, data_digest, alignment };
        }
        queue.sq = sq;
        Some(queue)
    }

    /// Restores a command whose data the host was asked for, with memory for it and what has come. Returns whether that
    /// is all; `None` if the state is invalid.
    pub(in crate::tcp) fn restore_command(
        &mut self,
        saved: &RequestedSnapshot,
        memory: &RegionTable,
        segments: impl Iterator<Item = Segment>,
        data: &[u8],
    ) -> Option<bool> {
        let place = self.free.iter().position(|slot| *slot == saved.slot)?;
        let entry = &mut self.slots[usize::from(saved.slot)];
        let is_set = entry.data.set(memory, segments) && entry.data.bytes() == saved.bytes();
        if !is_set || data.len() as u64 > u64::from(saved.bytes()) {
            return None;
        }
        let mut rest = data;
        for piece in entry.data.pieces(data.len() as u32) {
            memory.resolve(piece)?.copy_from_slice(take(&mut rest, piece.len)?);
        }
        entry.data.skip(data.len() as u32);
        let is_whole = entry.data.left() == 0;
        entry.state = if is_whole { TargetSlotState::Executing } else { TargetSlotState::Receiving };
        (entry.sequence, entry.cccid) = (saved.sequence, saved.sqe.cid());
        entry.transfer = TcpTransfer::Transport(saved.bytes());
        (entry.is_requested, entry.is_damaged, entry.is_reported) = (true, saved.is_damaged, true);
        self.free.remove(place);
        Some(is_whole)
    }
}

fn read(memory: &RegionTable, segments: impl Iterator<Item = Segment>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in segments {
        let start = bytes.len();
        bytes.resize(start + segment.len as usize, 0);
        if let Some(span) = memory.resolve(segment) {
            span.copy_to_slice(&mut bytes[start..]);
        }
    }
    bytes
}

fn take<'a>(bytes: &mut &'a [u8], len: u32) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(len as usize)?;
    *bytes = rest;
    Some(taken)
}
