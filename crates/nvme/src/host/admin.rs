//! The admin queue, host side: commands with a purpose, data and a deadline each.
//!
//! The ring has 32 entries, one of which always stays free. Slots 0 to 29 are for commands; slot 31 is for the
//! Asynchronous Event Request, which has no deadline. Each command may use the data page of its slot, or a buffer of
//! its own, which is held until the command has ended.
//!
//! Owned by the controller's owner, which decides about late commands and resets.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::View;

use crate::host::memory::SharedBlock;
use crate::host::{AdminRings, ControllerTransport, HostQueuePair, NvmeHostError, QueueRings, TransferBuffer};
use crate::registers::{DOORBELLS, cq_doorbell, sq_doorbell};
use crate::{Doorbells, IDENTIFY_BYTES, NvmeStatus, PAGE, Psdt, ShadowDoorbells, Sqe, admin};

/// Entries of each admin ring.
const ADMIN_ENTRIES: u16 = 32;
/// Maximum concurrent commands.
pub(crate) const ADMIN_SLOTS: u16 = 30;
/// Slot of the Asynchronous Event Request.
const EVENT_SLOT: u16 = 31;
/// Timeout of an admin command, ns: 60 s, as in Linux.
pub(crate) const ADMIN_TIMEOUT_NS: u64 = 60_000_000_000;

const PAGE_BYTES: usize = PAGE as usize;
/// Pages of the block: two rings, two pages of shadow doorbells, one data page for each slot.
const CQ_PAGE: usize = 1;
const SHADOW_PAGE: usize = 2;
const DATA_PAGE: usize = 4;
const PAGES: usize = DATA_PAGE + ADMIN_SLOTS as usize;

/// Data of an admin command.
#[derive(Clone, Copy, Debug)]
pub enum AdminData<'a> {
    /// No data.
    None,
    /// At most a page, from the controller to the host.
    Read,
    /// At most a page, from the host to the controller; bytes beyond it are cut off.
    Write(&'a [u8]),
    /// Any amount in either direction, up to the controller's maximum.
    Buffer(&'a Arc<TransferBuffer>),
}

/// A completed or cancelled command.
#[derive(Debug)]
pub(crate) struct AdminCompleted<P> {
    pub(crate) slot: u16,
    /// Unset for an asynchronous event.
    pub(crate) purpose: Option<P>,
    pub(crate) status: NvmeStatus,
    pub(crate) result: u64,
}

#[derive(Debug)]
struct AdminCommand<P> {
    purpose: P,
    deadline_ns: u64,
    is_aborted: bool,
    /// Held until the command has ended.
    _buffer: Option<Arc<TransferBuffer>>,
}

/// The admin queue. `P` is the purpose of a command.
#[derive(Debug)]
pub(crate) struct AdminQueue<P> {
    pair: HostQueuePair,
    block: SharedBlock,
    addr: u64,
    registers: View,
    stride: u8,
    /// Whether `registers` must be forwarded, since the controller does not share them.
    is_forwarded: bool,
    commands: Box<[Option<AdminCommand<P>>]>,
    free: Vec<u16>,
}

/// The memory of an admin queue, before its controller is enabled.
#[derive(Debug)]
pub(crate) struct AdminMemory {
    block: SharedBlock,
}

impl AdminMemory {
    pub(crate) fn new<T: ControllerTransport + ?Sized>(transport: &T) -> Result<AdminMemory, NvmeHostError> {
        Ok(AdminMemory { block: SharedBlock::new(transport, PAGES * PAGE_BYTES)? })
    }

    /// The rings; `None` until they are mapped.
    pub(crate) fn rings<T: ControllerTransport + ?Sized>(&self, transport: &T) -> Option<AdminRings> {
        let sq_addr = self.block.addr(transport)?;
        Some(AdminRings { sq_addr, cq_addr: sq_addr + (CQ_PAGE * PAGE_BYTES) as u64, entries: ADMIN_ENTRIES })
    }
}

impl<P> AdminQueue<P> {
    /// The queue of a controller that was enabled with these rings. `doorbells` are the registers, or memory in their
    /// place if the controller does not share them.
    pub(crate) fn new(memory: AdminMemory, rings: AdminRings, doorbells: View, is_forwarded: bool, stride: u8) -> Self {
        let AdminMemory { block } = memory;
        let [sq_bytes, cq_bytes] = QueueRings::bytes(ADMIN_ENTRIES);
        let views = QueueRings {
            sq: block.view(0, sq_bytes),
            cq: block.view(CQ_PAGE * PAGE_BYTES, cq_bytes),
            entries: ADMIN_ENTRIES,
        };
        let pair = HostQueuePair::with_slots(
            0,
            views,
            &Doorbells::new(doorbells.clone(), stride, None),
            Arc::default(),
            EVENT_SLOT + 1,
        );
        AdminQueue {
            pair,
            block,
            addr: rings.sq_addr,
            registers: doorbells,
            stride,
            is_forwarded,
            commands: (0..ADMIN_SLOTS).map(|_| None).collect(),
            free: (0..ADMIN_SLOTS).rev().collect(),
        }
    }

    /// The rings, for enabling the controller again.
    pub(crate) fn rings(&self) -> AdminRings {
        let cq_addr = self.addr + (CQ_PAGE * PAGE_BYTES) as u64;
        AdminRings { sq_addr: self.addr, cq_addr, entries: ADMIN_ENTRIES }
    }

    /// Pages of shadow doorbells and event indexes, with their addresses.
    pub(crate) fn shadow(&self) -> (ShadowDoorbells, [u64; 2]) {
        let page = |number: usize| self.block.view((SHADOW_PAGE + number) * PAGE_BYTES, PAGE_BYTES);
        let addr = |number: usize| self.addr + ((SHADOW_PAGE + number) * PAGE_BYTES) as u64;
        (ShadowDoorbells { doorbells: page(0), events: page(1) }, [addr(0), addr(1)])
    }

    /// Zeroes the pages of shadow doorbells before the controller is told their addresses.
    pub(crate) fn clear_shadow(&self) {
        let view = self.block.view(SHADOW_PAGE * PAGE_BYTES, 2 * PAGE_BYTES);
        for at in (0..view.len()).step_by(8) {
            view.store_u64(at, 0, Relaxed);
        }
    }

    /// Sends a command, with the data page of its slot if it has data. Returns the purpose if all slots are in use.
    pub(crate) fn submit(&mut self, sqe: Sqe, data: AdminData<'_>, purpose: P, deadline_ns: u64) -> Result<u16, P> {
        let Some(slot) = self.free.pop() else { return Err(purpose) };
        let (sqe, buffer) = match data {
            AdminData::None => (sqe, None),
            AdminData::Buffer(buffer) => (buffer.describe(sqe), Some(Arc::clone(buffer))),
            AdminData::Read | AdminData::Write(_) => (sqe.with_data(Psdt::Prp, [self.data_addr(slot), 0]), None),
        };
        if let (AdminData::Write(bytes), Some(span)) = (data, self.page(slot).span(0, PAGE_BYTES)) {
            let len = bytes.len().min(PAGE_BYTES);
            span.fill(0);
            span.part(0, len).copy_from_slice(&bytes[..len]);
        }
        self.commands[usize::from(slot)] =
            Some(AdminCommand { purpose, deadline_ns, is_aborted: false, _buffer: buffer });
        self.pair.push(slot, sqe);
        Ok(slot)
    }

    /// Sends the Asynchronous Event Request, unless it is pending.
    pub(crate) fn arm_event(&mut self) {
        if !self.awaits_event() {
            self.pair.push(EVENT_SLOT, Sqe::new(admin::ASYNC_EVENT, 0));
        }
    }

    /// Whether the Asynchronous Event Request is out.
    pub(crate) fn awaits_event(&self) -> bool {
        self.pair.cid(EVENT_SLOT).is_some()
    }

    /// Announces sent commands to the controller. False if it is known to be gone.
    pub(crate) fn announce<T: ControllerTransport + ?Sized>(&mut self, transport: &mut T) -> bool {
        !self.pair.announce() || self.forward(transport, sq_doorbell(0, self.stride))
    }

    /// Handles completions.
    pub(crate) fn poll<T: ControllerTransport + ?Sized>(
        &mut self,
        transport: &mut T,
        completions: &mut Vec<AdminCompleted<P>>,
    ) {
        let AdminQueue { pair, commands, free, .. } = self;
        let is_rung = pair.poll(|completed| {
            let slot = completed.slot;
            let purpose = commands.get_mut(usize::from(slot)).and_then(Option::take).map(|command| command.purpose);
            if slot < ADMIN_SLOTS {
                free.push(slot);
            }
            completions.push(AdminCompleted { slot, purpose, status: completed.status, result: completed.result });
        });
        if is_rung {
            self.forward(transport, cq_doorbell(0, self.stride));
        }
    }

    /// A copy of the data of a command that has just ended.
    pub(crate) fn data(&self, slot: u16) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut bytes = Box::new([0; IDENTIFY_BYTES]);
        if let Some(span) = self.page(slot).span(0, IDENTIFY_BYTES) {
            span.copy_to_slice(&mut bytes[..]);
        }
        bytes
    }

    /// Earliest deadline of a command.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        self.commands.iter().flatten().map(|command| command.deadline_ns).min()
    }

    /// A command that has exceeded its deadline.
    pub(crate) fn late(&self, now_ns: u64) -> Option<&P> {
        self.commands.iter().flatten().find(|command| command.deadline_ns <= now_ns).map(|command| &command.purpose)
    }

    /// Extends the deadline of a late command, once. Returns its identifier, for an Abort.
    pub(crate) fn grant_time(&mut self, now_ns: u64, deadline_ns: u64) -> Option<u16> {
        let mut commands = self.commands.iter_mut().enumerate();
        let (slot, command) =
            commands.find_map(|(slot, command)| Some((slot, command.as_mut().filter(|c| c.deadline_ns <= now_ns)?)))?;
        if command.is_aborted {
            return None;
        }
        (command.is_aborted, command.deadline_ns) = (true, deadline_ns);
        self.pair.cid(slot as u16)
    }

    /// Cancels all commands of a silent controller, and empties the rings.
    pub(crate) fn cancel(&mut self) -> Vec<P> {
        let mut purposes = vec![];
        for slot in 0..ADMIN_SLOTS {
            if let Some(command) = self.commands[usize::from(slot)].take() {
                purposes.push(command.purpose);
                self.free.push(slot);
                self.pair.cancel(slot);
            }
        }
        self.pair.cancel(EVENT_SLOT);
        self.pair.reset();
        purposes
    }

    fn forward<T: ControllerTransport + ?Sized>(&self, transport: &mut T, at: usize) -> bool {
        if self.is_forwarded {
            return transport.write32(DOORBELLS + at, self.registers.load_u32(at, Relaxed)).is_ok();
        }
        transport.signal_doorbell(0);
        true
    }

    fn page(&self, slot: u16) -> View {
        self.block.view((DATA_PAGE + usize::from(slot)) * PAGE_BYTES, PAGE_BYTES)
    }

    fn data_addr(&self, slot: u16) -> u64 {
        self.addr + ((DATA_PAGE + usize::from(slot)) * PAGE_BYTES) as u64
    }
}
