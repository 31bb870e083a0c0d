//! The admin queue over fabrics, host side: commands with a purpose, data and a deadline each, on one connection.
//!
//! The queue has 32 entries, one of which always stays free. Slots 0 to 28 are for commands with at most 4096 bytes of
//! data each, slot 29 is for the page of a log, and slot 30 for the Asynchronous Event Request, which has no deadline.

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};

use crate::host::NvmeHostError;
use crate::tcp::{SendList, TcpDirection, TcpEnd, TcpHostEvent, TcpHostOptions, TcpHostQueue};
use crate::{Completed, IDENTIFY_BYTES, NvmeStatus, PAGE, Sqe, admin};

/// Entries of the queue.
pub(super) const ADMIN_ENTRIES: u16 = 32;
const COMMAND_SLOTS: u16 = 29;
const LOG_SLOT: u16 = 29;
const EVENT_SLOT: u16 = 30;
/// Maximum in-capsule data of an admin command, bytes.
const ADMIN_IN_CAPSULE: u32 = 8192;
/// Maximum bytes of a log page read at once: the ANA log of 1000 groups and 8000 namespaces.
pub(super) const LOG_BYTES_MAX: u32 = 64 << 10;

/// Data of an admin command over fabrics.
#[derive(Clone, Copy, Debug)]
pub enum FabricsData<'a> {
    /// No data.
    None,
    /// So many bytes from the controller, at most 4096.
    Read(u32),
    /// At most 4096 bytes to the controller.
    Write(&'a [u8]),
}

#[derive(Debug)]
struct AdminEntry<P> {
    purpose: P,
    deadline_ns: u64,
}

/// A completed command.
#[derive(Debug)]
pub(super) struct FabricsCompleted<P> {
    pub(super) slot: u16,
    /// Unset for an asynchronous event.
    pub(super) purpose: Option<P>,
    pub(super) status: NvmeStatus,
    pub(super) result: u64,
}

/// Event of the admin connection.
#[derive(Debug)]
pub(super) enum FabricsAdminEvent<P> {
    Started,
    Completed(FabricsCompleted<P>),
    Ended(TcpEnd),
}

/// The admin queue of one association. `P` is the purpose of a command.
#[derive(Debug)]
pub(super) struct FabricsAdmin<P> {
    queue: TcpHostQueue,
    region: Arc<Region>,
    memory: Arc<RegionTable>,
    commands: Box<[Option<AdminEntry<P>>]>,
    awaits_event: bool,
}

impl<P> FabricsAdmin<P> {
    pub(super) fn new(header_digest: bool, data_digest: bool) -> Result<FabricsAdmin<P>, NvmeHostError> {
        let options = TcpHostOptions {
            depth: ADMIN_ENTRIES - 1,
            segments_max: 1,
            in_capsule: ADMIN_IN_CAPSULE,
            header_digest,
            data_digest,
            alignment: 0,
        };
        let bytes = usize::from(COMMAND_SLOTS) * PAGE as usize + LOG_BYTES_MAX as usize;
        let region = Region::anonymous(bytes).map_err(|_| NvmeHostError::Memory)?;
        Ok(FabricsAdmin {
            queue: TcpHostQueue::new(options),
            memory: Arc::new(RegionTable::new(vec![Arc::clone(&region)])),
            region,
            commands: (0..=LOG_SLOT).map(|_| None).collect(),
            awaits_event: false,
        })
    }

    /// Memory of lists.
    pub(super) fn memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// Sends a command. False if all slots are in use.
    pub(super) fn submit(&mut self, sqe: Sqe, data: FabricsData<'_>, purpose: P, deadline_ns: u64) -> bool {
        let free = self.commands[..usize::from(COMMAND_SLOTS)].iter().position(Option::is_none);
        let Some(slot) = free else { return false };
        let offset = slot as u64 * PAGE;
        let (direction, len) = match data {
            FabricsData::None => (TcpDirection::None, 0),
            FabricsData::Read(len) => (TcpDirection::Read, len.min(PAGE as u32)),
            FabricsData::Write(bytes) => {
                let len = bytes.len().min(PAGE as usize);
                if let Some(span) = self.region.span(offset, len) {
                    span.copy_from_slice(&bytes[..len]);
                }
                (TcpDirection::Write, len as u32)
            }
        };
        self.push(slot as u16, sqe, direction, Segment { region: 0, offset, len }, purpose, deadline_ns)
    }

    /// Reads a log page of at most [`LOG_BYTES_MAX`]. False while another one is being read.
    pub(super) fn submit_log(&mut self, sqe: Sqe, bytes: u32, purpose: P, deadline_ns: u64) -> bool {
        let segment = Segment { region: 0, offset: u64::from(LOG_SLOT) * PAGE, len: bytes.min(LOG_BYTES_MAX) };
        self.commands[usize::from(LOG_SLOT)].is_none()
            && self.push(LOG_SLOT, sqe, TcpDirection::Read, segment, purpose, deadline_ns)
    }

    fn push(
        &mut self,
        slot: u16,
        sqe: Sqe,
        direction: TcpDirection,
        data: Segment,
        purpose: P,
        deadline_ns: u64,
    ) -> bool {
        let segments = Some(data).filter(|data| data.len > 0).into_iter();
        let is_pushed = self.queue.push(&self.memory, slot, sqe, direction, segments);
        if is_pushed {
            self.commands[usize::from(slot)] = Some(AdminEntry { purpose, deadline_ns });
        }
        is_pushed
    }

    /// Sends the Asynchronous Event Request, unless it is outstanding.
    pub(super) fn arm_event(&mut self) {
        if !std::mem::replace(&mut self.awaits_event, true) {
            let sqe = Sqe::new(admin::ASYNC_EVENT, 0);
            self.queue.push(&self.memory, EVENT_SLOT, sqe, TcpDirection::None, std::iter::empty());
        }
    }

    /// A copy of the data of a command that has just ended.
    pub(super) fn data(&self, slot: u16) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut bytes = Box::new([0; IDENTIFY_BYTES]);
        if let Some(span) = self.region.span(u64::from(slot) * PAGE, IDENTIFY_BYTES) {
            span.copy_to_slice(&mut bytes[..]);
        }
        bytes
    }

    /// A copy of so many bytes of the log that was just read.
    pub(super) fn log(&self, bytes: u32) -> Vec<u8> {
        let mut copy = vec![0; bytes.min(LOG_BYTES_MAX) as usize];
        if let Some(span) = self.region.span(u64::from(LOG_SLOT) * PAGE, copy.len()) {
            span.copy_to_slice(&mut copy);
        }
        copy
    }

    /// Earliest deadline of a command.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.commands.iter().flatten().map(|command| command.deadline_ns).min()
    }

    /// A command that has exceeded its deadline.
    pub(super) fn late(&self, now_ns: u64) -> Option<&P> {
        self.commands.iter().flatten().find(|command| command.deadline_ns <= now_ns).map(|command| &command.purpose)
    }

    /// Purposes of the commands in flight, which is given up.
    pub(super) fn into_purposes(self) -> impl Iterator<Item = P> {
        self.commands.into_iter().flatten().map(|command| command.purpose)
    }

    pub(super) fn wants_send(&self) -> bool {
        self.queue.wants_send()
    }

    pub(super) fn fill(&mut self, list: &mut SendList) -> Option<u64> {
        self.queue.fill(&self.memory, list)
    }

    pub(super) fn sent(&mut self, number: u64) {
        self.queue.sent(number);
    }

    /// Handles received bytes until there is an event; see [`TcpHostQueue::receive`].
    pub(super) fn receive(&mut self, bytes: &mut &[u8]) -> Option<FabricsAdminEvent<P>> {
        let FabricsAdmin { queue, memory, .. } = self;
        let event = queue.receive(bytes, |segment, piece| {
            if let Some(span) = memory.resolve(segment) {
                span.copy_from_slice(piece);
            }
        })?;
        Some(match event {
            TcpHostEvent::Started => FabricsAdminEvent::Started,
            TcpHostEvent::Ended(end) => FabricsAdminEvent::Ended(end),
            TcpHostEvent::Completed(Completed { slot, status, result }) => {
                self.awaits_event &= slot != EVENT_SLOT;
                let command = self.commands.get_mut(usize::from(slot)).and_then(Option::take);
                let purpose = command.map(|command| command.purpose);
                FabricsAdminEvent::Completed(FabricsCompleted { slot, purpose, status, result })
            }
        })
    }

    /// The connection is given up.
    pub(super) fn abandon(&mut self) {
        self.queue.abandon(TcpEnd::Closed);
    }
}
