//! Commands of the user with up to the controller's maximum of data, and an I/O queue for them.
//!
//! A [`TransferBuffer`] is memory that is mapped for the controller, with the PRP list that describes it. The admin
//! queue holds it from the submission of its command until the command has ended, so a controller never writes to
//! memory that was released. A [`PassthroughQueue`] does the same for one I/O command at a time.
//!
//! Owned by the controller's owner. Neither interprets commands.

use std::sync::Arc;

use blkyard_mem::View;

use crate::host::memory::SharedBlock;
use crate::host::{Completed, ControllerState, ControllerTransport, HostController, HostQueuePair, NvmeHostError};
use crate::{
    DmaSegment, IoQueueCommand, IoQueueReport, LateCommand, ListPool, NvmeStatus, PAGE, Psdt, Sqe, TRANSFER_BYTES_MAX,
};

/// List pages of a buffer: enough for the maximum transfer.
const LIST_PAGES: u16 = 5;
/// The only slot of a passthrough queue.
const SLOT: u16 = 0;

/// Data and metadata of one command of the user, in memory shared with the controller.
#[derive(Debug)]
pub struct TransferBuffer {
    block: SharedBlock,
    data: BufferPart,
    metadata: BufferPart,
    /// Data pointer, and metadata pointer.
    pointer: [u64; 2],
    metadata_pointer: u64,
}

/// A part of a buffer, at the start of a page.
#[derive(Clone, Copy, Debug)]
struct BufferPart {
    offset: usize,
    bytes: usize,
}

impl BufferPart {
    /// A part after the given offset.
    fn after(end: usize, bytes: usize) -> BufferPart {
        BufferPart { offset: end.next_multiple_of(PAGE as usize), bytes }
    }

    fn end(self) -> usize {
        self.offset + self.bytes
    }

    fn view(self, block: &SharedBlock) -> View {
        block.view(self.offset, self.bytes.next_multiple_of(PAGE as usize))
    }

    /// Copies data into the part; what exceeds it is cut off.
    fn write(self, block: &SharedBlock, data: &[u8]) {
        let len = data.len().min(self.bytes);
        if len > 0
            && let Some(span) = self.view(block).span(0, len)
        {
            span.copy_from_slice(&data[..len]);
        }
    }

    fn read(self, block: &SharedBlock) -> Vec<u8> {
        let mut data = vec![0; self.bytes];
        if self.bytes > 0
            && let Some(span) = self.view(block).span(0, self.bytes)
        {
            span.copy_to_slice(&mut data);
        }
        data
    }
}

impl TransferBuffer {
    /// A zeroed buffer, mapped for the controller. One of data and metadata may be empty.
    fn new<T: ControllerTransport>(
        transport: &T,
        bytes: usize,
        metadata_bytes: usize,
    ) -> Result<TransferBuffer, NvmeHostError> {
        let data = BufferPart::after(ListPool::bytes(1, LIST_PAGES), bytes);
        let metadata = BufferPart::after(data.end(), metadata_bytes);
        let block = SharedBlock::new(transport, metadata.end())?;
        let addr = block.addr(transport).ok_or(NvmeHostError::Memory)?;
        let mut pointer = [0; 2];
        if bytes > 0 {
            let mut lists = ListPool::new(block.view(0, data.offset), addr, 1, LIST_PAGES);
            let segment = DmaSegment { addr: addr + data.offset as u64, len: bytes as u64 };
            let list = lists.prp(SLOT, bytes as u64, std::iter::once(segment));
            pointer = list.map_err(|_| NvmeHostError::Transfer { bytes: bytes as u64, max: TRANSFER_BYTES_MAX })?;
        }
        let metadata_pointer = if metadata_bytes > 0 { addr + metadata.offset as u64 } else { 0 };
        Ok(TransferBuffer { block, data, metadata, pointer, metadata_pointer })
    }

    /// Bytes of data.
    pub fn bytes(&self) -> usize {
        self.data.bytes
    }

    /// Copies data into the buffer; what exceeds it is cut off.
    pub fn write(&self, data: &[u8]) {
        self.data.write(&self.block, data);
    }

    /// Copies metadata into the buffer; what exceeds it is cut off.
    pub fn write_metadata(&self, metadata: &[u8]) {
        self.metadata.write(&self.block, metadata);
    }

    /// A copy of the data.
    pub fn read(&self) -> Vec<u8> {
        self.data.read(&self.block)
    }

    /// A copy of the metadata.
    pub fn read_metadata(&self) -> Vec<u8> {
        self.metadata.read(&self.block)
    }

    /// The command with this data and metadata.
    pub(crate) fn describe(&self, sqe: Sqe) -> Sqe {
        sqe.with_data(Psdt::Prp, self.pointer).with_metadata(self.metadata_pointer)
    }
}

/// An I/O queue for commands of the user, one at a time.
#[derive(Debug)]
pub struct PassthroughQueue {
    pair: HostQueuePair,
    /// Held until the command in flight has ended.
    buffer: Option<Arc<TransferBuffer>>,
    is_running: bool,
    wants_drain: bool,
    starts: u32,
    /// Result of a cancelled command.
    cancelled: Option<Completed>,
}

impl PassthroughQueue {
    fn new(pair: HostQueuePair) -> PassthroughQueue {
        PassthroughQueue { pair, buffer: None, is_running: true, wants_drain: false, starts: 0, cancelled: None }
    }

    /// Its identifier.
    pub fn qid(&self) -> u16 {
        self.pair.qid()
    }

    /// Whether a command can be submitted: none is in flight, and the controller is not being reset.
    pub fn is_ready(&self) -> bool {
        self.is_running && self.pair.in_flight() == 0
    }

    /// Submits a command. Returns whether the doorbell register was written.
    ///
    /// # Panics
    /// If the queue is not [ready](PassthroughQueue::is_ready).
    pub fn submit(&mut self, sqe: Sqe, buffer: Option<&Arc<TransferBuffer>>) -> bool {
        assert!(self.is_ready(), "a command is in flight");
        self.buffer = buffer.cloned();
        self.pair.push(SLOT, buffer.map_or(sqe, |buffer| buffer.describe(sqe)));
        self.pair.announce()
    }

    /// The result of the command, once it has ended, and whether the doorbell register was written.
    pub fn poll(&mut self) -> (Option<Completed>, bool) {
        let mut ended = self.cancelled.take();
        let is_rung = self.pair.poll(|completed| ended = Some(completed));
        if ended.is_some() {
            self.buffer = None;
        }
        (ended, is_rung)
    }

    /// The command in flight as a late one, for [`HostController::late_command`].
    pub fn late(&self) -> Option<LateCommand> {
        let (cid, sequence) = (self.pair.cid(SLOT)?, self.pair.sequence(SLOT)?);
        Some(LateCommand { qid: self.pair.qid(), slot: SLOT, cid, sequence, starts: self.starts })
    }

    /// Executes a command of the controller's owner. Returns the report for it, if it is due.
    pub fn command(&mut self, command: IoQueueCommand) -> Option<IoQueueReport> {
        match command {
            IoQueueCommand::Stop => self.is_running = false,
            IoQueueCommand::Drain => (self.is_running, self.wants_drain) = (false, true),
            IoQueueCommand::Start => {
                (self.is_running, self.wants_drain) = (true, false);
                self.starts = self.starts.wrapping_add(1);
                return None;
            }
            // Cancelled once the controller is silent.
            IoQueueCommand::Fail => {
                self.is_running = false;
                return None;
            }
            IoQueueCommand::Cancel => {
                let (ended, _) = self.poll();
                let status = NvmeStatus::HOST_ABORTED;
                let is_cancelled = self.pair.cancel(SLOT);
                self.cancelled = ended.or(is_cancelled.then_some(Completed { slot: SLOT, status, result: 0 }));
                self.pair.reset();
                return Some(IoQueueReport::Cancelled);
            }
        }
        if command == IoQueueCommand::Stop { Some(IoQueueReport::Stopped) } else { self.drained() }
    }

    /// The report of a queue that was told to drain, once no command is in flight.
    pub fn drained(&mut self) -> Option<IoQueueReport> {
        let is_drained = self.wants_drain && self.pair.in_flight() == 0;
        self.wants_drain &= !is_drained;
        is_drained.then_some(IoQueueReport::Stopped)
    }
}

impl<T: ControllerTransport> HostController<T> {
    /// Maximum data of a command, bytes: the controller's maximum (MDTS), at most [`TRANSFER_BYTES_MAX`].
    pub fn transfer_bytes_max(&self) -> u64 {
        let max = self.identify.transfer_bytes_max(self.capabilities.page_min);
        max.map_or(TRANSFER_BYTES_MAX, |max| max.min(TRANSFER_BYTES_MAX))
    }

    /// A buffer for the data and metadata of one command. The metadata is contiguous for the controller.
    ///
    /// # Errors
    /// [`NvmeHostError::Transfer`] if there is neither, or if the controller does not transfer that much at once, or
    /// [`NvmeHostError::Memory`].
    pub fn transfer_buffer(&self, bytes: usize, metadata_bytes: usize) -> Result<Arc<TransferBuffer>, NvmeHostError> {
        let max = self.transfer_bytes_max();
        let largest = bytes.max(metadata_bytes) as u64;
        if largest == 0 || largest > max {
            return Err(NvmeHostError::Transfer { bytes: largest, max });
        }
        TransferBuffer::new(&self.transport, bytes, metadata_bytes).map(Arc::new)
    }

    /// An I/O queue for commands of the user, which was created and not taken yet. It needs no namespace.
    pub fn take_passthrough_queue(&mut self) -> Option<PassthroughQueue> {
        if self.state != ControllerState::Live {
            return None;
        }
        let doorbells = self.doorbells.as_ref()?;
        let queue = self.queues.iter_mut().find(|queue| queue.is_created() && !queue.is_taken())?;
        Some(PassthroughQueue::new(queue.take_pair(doorbells)))
    }
}
