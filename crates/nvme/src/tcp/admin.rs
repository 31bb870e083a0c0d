//! A connection before its Connect, and the admin queue of a controller, target's side.
//!
//! Commands come out with their data, and answers go in with theirs. What a command does is the owner's business:
//! before Connect it accepts no other one. Owned by the control path. The memory holds the data of one answer at a
//! time; others wait.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};

use super::{SendList, TcpEnd, TcpQueueSnapshot, TcpTargetEvent, TcpTargetOptions, TcpTargetQueue, TcpTransfer};
use crate::fabrics::FABRICS_OPCODE;
use crate::{AdminCompletion, NvmeStatus, PAGE, Sqe};

/// Maximum data of a command from the host: all that there are have less than a page.
const INPUT_BYTES: u32 = PAGE as u32;

/// Event of an admin queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpAdminEvent {
    /// The connection is initialized.
    Started,
    /// A command has come, with its data.
    Command {
        /// Its slot.
        slot: u16,
        /// The command.
        sqe: Sqe,
        /// Data from the host.
        data: Vec<u8>,
        /// Length of the host's buffer for data from the controller.
        room: usize,
    },
    /// The connection can be used no more.
    Ended(TcpEnd),
}

/// An admin queue, or a connection without a queue yet.
#[derive(Debug)]
pub struct TcpAdminQueue {
    tcp: TcpTargetQueue,
    memory: RegionTable,
    /// Maximum data of an answer.
    output_bytes: u32,
    /// Commands by slot.
    sqes: Vec<Sqe>,
    /// Answers with data that wait for the memory.
    waiting: VecDeque<AdminCompletion>,
    /// Slot of the answer whose data is in the memory.
    sending: Option<u16>,
}

impl TcpAdminQueue {
    /// A connection that has only room for its Connect.
    ///
    /// # Errors
    /// The system has no memory left.
    ///
    /// # Panics
    /// As for [`TcpTargetQueue::new`].
    pub fn new(options: TcpTargetOptions) -> io::Result<TcpAdminQueue> {
        let options = TcpTargetOptions { slots: 1, segments_max: 1, ..options };
        Ok(TcpAdminQueue {
            tcp: TcpTargetQueue::new(options),
            memory: memory_of(1, 0)?,
            output_bytes: 0,
            sqes: vec![Sqe::default()],
            waiting: VecDeque::new(),
            sending: None,
        })
    }

    /// A Connect was accepted, and this is the admin queue of a controller, with so many slots. An answer has at most
    /// `output_bytes`.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn open(&mut self, slots: u16, output_bytes: u32) -> io::Result<()> {
        self.memory = memory_of(slots, output_bytes)?;
        self.output_bytes = output_bytes;
        self.sqes.resize(usize::from(slots), Sqe::default());
        self.tcp.grow(slots, 1);
        Ok(())
    }

    /// See [`TcpTargetQueue::set_flow_control`].
    pub fn set_flow_control(&mut self, entries: u32) {
        self.tcp.set_flow_control(entries);
    }

    /// The queue of the connection, which is an I/O queue.
    pub fn into_queue(self) -> TcpTargetQueue {
        self.tcp
    }

    /// Saves the state, and adds the bytes that belong to it. Commands that were not answered come again. `None` if the
    /// connection has ended, something is to be sent, or a command with data waits for its answer.
    pub fn snapshot(&self, bytes: &mut Vec<u8>) -> Option<TcpQueueSnapshot> {
        if !self.waiting.is_empty() || self.sending.is_some() {
            return None;
        }
        self.tcp.snapshot(&self.memory, |slot| self.sqes[usize::from(slot)], bytes)
    }

    /// A connection with saved state, `open` with so many slots and output bytes if it is an admin queue. Takes the
    /// bytes that belong to its commands; those to be received first are next. `None` if the state is invalid, or the
    /// system has no memory left.
    ///
    /// # Panics
    /// As for [`TcpTargetQueue::new`].
    pub fn restore(
        options: TcpTargetOptions,
        open: Option<(u16, u32)>,
        saved: &TcpQueueSnapshot,
        bytes: &mut &[u8],
    ) -> Option<TcpAdminQueue> {
        let mut queue = TcpAdminQueue::new(options).ok()?;
        queue.tcp = TcpTargetQueue::restore(TcpTargetOptions { slots: 1, segments_max: 1, ..options }, saved)?;
        if let Some((slots, output_bytes)) = open {
            queue.open(slots, output_bytes).ok()?;
        }
        for requested in saved.requested() {
            let (slot, len) = (requested.slot(), requested.bytes());
            *queue.sqes.get_mut(usize::from(slot))? = *requested.sqe();
            let segment = Some(input_of(slot, len)).filter(|_| len <= INPUT_BYTES)?;
            let data = requested.take_data(bytes)?;
            let is_whole = queue.tcp.restore_command(requested, &queue.memory, std::iter::once(segment), data)?;
            if is_whole {
                return None;
            }
        }
        Some(queue)
    }

    /// Reason for the end of the connection.
    pub fn end(&self) -> Option<TcpEnd> {
        self.tcp.end()
    }

    /// See [`TcpTargetQueue::abandon`].
    pub fn abandon(&mut self, end: TcpEnd) {
        self.tcp.abandon(end);
    }

    /// Handles received bytes, taken from the front of `bytes`, until there is an event. `None` if all are taken, or
    /// the rest has to wait for a slot.
    pub fn receive(&mut self, bytes: &mut &[u8]) -> Option<TcpAdminEvent> {
        loop {
            let memory = &self.memory;
            let event = self.tcp.receive(bytes, |to, piece| {
                if let Some(span) = memory.resolve_region(to) {
                    span.copy_from_slice(piece);
                }
            });
            match event? {
                TcpTargetEvent::Started => return Some(TcpAdminEvent::Started),
                TcpTargetEvent::Ended(end) => return Some(TcpAdminEvent::Ended(end)),
                TcpTargetEvent::Released(slot) => {
                    if self.sending == Some(slot) {
                        self.sending = None;
                        self.send_waiting();
                    }
                }
                TcpTargetEvent::Command { slot, sqe, transfer } => {
                    if let Some(event) = self.begin(slot, sqe, transfer) {
                        return Some(event);
                    }
                }
                TcpTargetEvent::DataReady(slot) => {
                    let sqe = self.sqes[usize::from(slot)];
                    let mut data = vec![0; sqe.data()[1] as u32 as usize];
                    if let Some(span) = self.memory.resolve_region(input_of(slot, data.len() as u32)) {
                        span.copy_to_slice(&mut data);
                    }
                    return Some(TcpAdminEvent::Command { slot, sqe, data, room: 0 });
                }
            }
        }
    }

    /// Answers a command.
    ///
    /// # Panics
    /// If the owner does not have the command, or the data is longer than the host's buffer or than an answer may be.
    pub fn complete(&mut self, completion: AdminCompletion) {
        if completion.data.is_empty() {
            self.tcp.respond(completion.slot, completion.status, completion.result);
        } else {
            self.waiting.push_back(completion);
            self.send_waiting();
        }
    }

    /// See [`TcpTargetQueue::wants_send`].
    pub fn wants_send(&self) -> bool {
        self.tcp.wants_send()
    }

    /// Whether no command is being executed or answered.
    pub fn is_idle(&self) -> bool {
        self.tcp.in_use() == 0
    }

    /// See [`TcpTargetQueue::fill`].
    pub fn fill(&mut self, list: &mut SendList) -> Option<u64> {
        self.tcp.fill(&self.memory, list)
    }

    /// See [`TcpTargetQueue::sent`]. Afterwards, [`TcpAdminQueue::receive`] is to be called.
    pub fn sent(&mut self, number: u64) {
        self.tcp.sent(number);
    }

    /// The memory that lists point into.
    pub fn memory(&self) -> &RegionTable {
        &self.memory
    }

    /// Starts a command: the event of one that is complete.
    fn begin(&mut self, slot: u16, sqe: Sqe, transfer: TcpTransfer) -> Option<TcpAdminEvent> {
        let direction = if sqe.opcode() == FABRICS_OPCODE { sqe.nsid() as u8 } else { sqe.opcode() } & 3;
        let is_from_host = direction == 1;
        self.sqes[usize::from(slot)] = sqe;
        match transfer {
            TcpTransfer::InCapsule(bytes) | TcpTransfer::Transport(bytes) if is_from_host => {
                if bytes > INPUT_BYTES {
                    self.tcp.respond(slot, NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr(), 0);
                    return None;
                }
                let is_given = self.tcp.receive_data(&self.memory, slot, std::iter::once(input_of(slot, bytes)));
                debug_assert!(is_given, "each slot has memory for its data");
                None
            }
            // Data of a command that has none.
            TcpTransfer::InCapsule(_) => {
                self.tcp.respond(slot, NvmeStatus::INVALID_FIELD.with_dnr(), 0);
                None
            }
            TcpTransfer::Transport(bytes) => {
                let room = bytes.min(self.output_bytes) as usize;
                Some(TcpAdminEvent::Command { slot, sqe, data: Vec::new(), room })
            }
            TcpTransfer::None => Some(TcpAdminEvent::Command { slot, sqe, data: Vec::new(), room: 0 }),
        }
    }

    /// Sends the next answer with data, if the memory is free.
    fn send_waiting(&mut self) {
        if self.sending.is_some() {
            return;
        }
        let Some(AdminCompletion { slot, result, data, .. }) = self.waiting.pop_front() else { return };
        let offset = self.sqes.len() as u64 * u64::from(INPUT_BYTES);
        let segment = Segment { region: 0, offset, len: data.len() as u32 };
        if let Some(span) = self.memory.resolve_region(segment) {
            span.copy_from_slice(&data);
        }
        self.sending = Some(slot);
        let is_sent = self.tcp.respond_with(&self.memory, slot, std::iter::once(segment), result);
        assert!(is_sent, "an answer of {} bytes is too long", data.len());
    }
}

/// Memory for the input of so many slots, and for one answer.
fn memory_of(slots: u16, output_bytes: u32) -> io::Result<RegionTable> {
    let bytes = usize::from(slots) * INPUT_BYTES as usize + output_bytes as usize;
    let region: Arc<Region> = Region::anonymous(bytes)?;
    Ok(RegionTable::new(vec![region]))
}

fn input_of(slot: u16, len: u32) -> Segment {
    Segment { region: 0, offset: u64::from(slot) * u64::from(INPUT_BYTES), len }
}
