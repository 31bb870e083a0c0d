//! The driver of one I/O queue pair: requests become commands, completions become statuses.
//!
//! Owned by one thread, within the queue core's driver. It reports writes of the doorbell register and wakes no thread;
//! it knows neither registers nor clock. A request's slot is the index of its tag. The data stays in its segments; the
//! owner of the queue translates it to the controller's bus addresses. For registered buffers the queue keeps them.
//!
//! The owner of the controller stops and resumes the queue ([`IoQueueCommand`]), and receives late commands
//! ([`LateCommand`]); only it aborts and resets. A request whose command fails is retried as its status allows.

use std::sync::Arc;

use blkyard_mem::{BufferAddresses, BufferId, BufferMapping, RegisteredBuffer, Segment};
use blkyard_mq::{Batch, BioFlags, Done, Op, Request, Segments, Shortage, Status, Tag, TimedOut};

use crate::host::Retries;
use crate::lists::without_list;
use crate::registered::MappedBuffers;
use crate::{
    DmaSegment, DsmRange, HostQueuePair, ListError, ListPool, NvmeNamespace, PAGE, Psdt, RetryDelays, Sqe, control, io,
};

/// Command of the controller's owner to a queue. All except `Start` and `Fail` are answered by an [`IoQueueReport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoQueueCommand {
    /// Send no more commands; requests wait.
    Stop,
    /// Like `Stop`, but report when no command is in flight.
    Drain,
    /// The controller is silent: handle its completions, cancel the rest, and empty the rings.
    Cancel,
    /// The queue was created again: resume.
    Start,
    /// The controller is gone: fail all requests.
    Fail,
}

/// Report of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoQueueReport {
    /// It has stopped sending commands.
    Stopped,
    /// No command is in flight, and the rings are empty.
    Cancelled,
}

/// A command that has exceeded its timeout, as reported by its queue's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateCommand {
    /// Its queue.
    pub qid: u16,
    /// Its slot.
    pub slot: u16,
    /// Its identifier, for an Abort.
    pub cid: u16,
    /// Sequence of the slot; distinguishes the command from later ones in the same slot.
    pub sequence: u32,
    /// Number of starts of the queue.
    pub starts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueMode {
    Running,
    Stopped,
    Failed,
}

/// The host's side of one I/O queue, for the namespaces of one hardware queue.
#[derive(Debug)]
pub struct IoQueue {
    qid: u16,
    pair: HostQueuePair,
    lists: ListPool,
    buffers: MappedBuffers,
    /// Indexed by namespace number in the hardware queue.
    namespaces: Box<[NvmeNamespace]>,
    /// Tags of requests in flight, by slot.
    parked: Box<[Option<Tag>]>,
    retries: Retries,
    mode: QueueMode,
    /// Whether to report when no command is in flight.
    wants_drain: bool,
    /// Whether to cancel commands in flight at the next poll.
    wants_cancel: bool,
    /// Whether to fail waiting requests at the next poll.
    wants_fail: bool,
    report: Option<IoQueueReport>,
    late: Vec<LateCommand>,
    starts: u32,
}

/// Moves slots to memory that this thread allocates, and so has on the NUMA node that it prefers: a queue pair is made
/// by the thread of its controller, and used by a lane.
pub(crate) fn reallocate<T>(slots: &mut Box<[T]>) {
    let mut moved = Vec::with_capacity(slots.len());
    moved.extend(std::mem::take(slots));
    *slots = moved.into_boxed_slice();
}

impl IoQueue {
    /// A running queue over an empty queue pair, with lists for its [depth](HostQueuePair::depth).
    pub fn new(pair: HostQueuePair, lists: ListPool, namespaces: Box<[NvmeNamespace]>, delays: RetryDelays) -> IoQueue {
        let depth = pair.depth();
        IoQueue {
            qid: pair.qid(),
            pair,
            lists,
            buffers: MappedBuffers::default(),
            namespaces,
            parked: (0..depth).map(|_| None).collect(),
            retries: Retries::new(depth, delays),
            mode: QueueMode::Running,
            wants_drain: false,
            wants_cancel: false,
            wants_fail: false,
            report: None,
            late: Vec::with_capacity(usize::from(depth)),
            starts: 0,
        }
    }

    /// Has its memory on this NUMA node, which the calling thread prefers: rings and lists as far as they are not
    /// pinned by a device. For a queue without commands in flight.
    pub fn move_to_node(&mut self, node: u32) {
        self.pair.move_to_node(node);
        self.lists.move_to_node(node);
        self.retries.reallocate();
        reallocate(&mut self.parked);
    }

    /// Its identifier.
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Maximum requests in flight; the queue core has at most this number of tags.
    pub fn depth(&self) -> u16 {
        self.pair.depth()
    }

    /// Has later requests use a registered buffer by the addresses of its mapping in the controller's domain. Until
    /// then, and if its addresses cannot be used (false), its segments are translated like others. May be called again,
    /// with other addresses. The mapping is held until the buffer is removed.
    pub fn add_buffer(
        &mut self,
        buffer: &RegisteredBuffer,
        mapping: &Arc<BufferMapping>,
        addresses: &BufferAddresses,
    ) -> bool {
        self.buffers.add(buffer, mapping, addresses)
    }

    /// Forgets a registered buffer, which no request in flight names.
    pub fn remove_buffer(&mut self, id: BufferId) {
        self.buffers.remove(id);
    }

    /// Forgets all registered buffers, with no request in flight.
    pub fn clear_buffers(&mut self) {
        self.buffers.clear();
    }

    /// Submits requests of the batch and announces their commands together. `translate` returns the controller's bus
    /// address of a segment, or `None` if it cannot reach it; it is asked about segments of registered buffers that the
    /// queue [does not know](IoQueue::add_buffer), too. Returns whether the doorbell register was written.
    #[inline]
    pub fn queue(&mut self, batch: &mut Batch<'_>, translate: impl Fn(Segment) -> Option<u64> + Copy) -> bool {
        if self.mode != QueueMode::Running {
            self.refuse(batch);
            return false;
        }
        let has_retried = !self.retries.is_empty();
        while let Some((tag, request, segments)) = batch.take() {
            let slot = tag.index() as u16;
            if has_retried && !request.was_requeued() {
                // Left by a request that was taken to another queue.
                self.retries.forget(&tag);
            }
            let (op, sector, sectors, flags) = (request.op(), request.sector(), request.sectors(), request.flags());
            let bytes = request.bytes();
            // The hardware queue has only namespaces that its driver knows.
            let namespace = self.namespaces[usize::from(request.namespace())];
            let NvmeNamespace { nsid, sector_shift, sgl_threshold } = namespace;
            let (slba, blocks) = (sector >> sector_shift, sectors >> sector_shift);
            let fua = if flags.contains(BioFlags::FUA) { control::FUA } else { 0 };
            // An unmapped segment ends the iteration, so the lengths do not add up.
            let run = |segment: Segment| translate(segment).map(|addr| DmaSegment { addr, len: segment.len.into() });
            let made = match op {
                Op::Read | Op::Write => {
                    let (opcode, control) = if op == Op::Read { (io::READ, 0) } else { (io::WRITE, fua) };
                    let data = match segments.only() {
                        Some(segment) if segment.is_registered() => {
                            self.map_registered(slot, segment, op, sgl_threshold, run)
                        }
                        Some(segment) => match run(segment).and_then(|run| without_list(run, bytes)) {
                            Some(pointer) => Ok((Psdt::Prp, pointer)),
                            None => self.map_long(slot, bytes, segment, sgl_threshold, run),
                        },
                        None => {
                            debug_assert!(segments.clone().count() <= usize::from(request.segments()));
                            let (runs, count) = (segments.clone().map_while(run), u64::from(request.segments()));
                            match self.lists.map(slot, bytes, runs, count, sgl_threshold) {
                                Err(ListError::Length) => self.map_mixed(slot, request, segments, sgl_threshold, run),
                                made => made,
                            }
                        }
                    };
                    let sqe = Sqe::with_blocks(opcode, nsid, slba, blocks, control);
                    data.map(|(psdt, pointer)| sqe.with_data(psdt, pointer))
                }
                Op::Flush => Ok(Sqe::new(io::FLUSH, nsid)),
                Op::WriteZeroes => {
                    let deallocate = if flags.contains(BioFlags::NO_UNMAP) { 0 } else { control::DEAC };
                    Ok(Sqe::with_blocks(io::WRITE_ZEROES, nsid, slba, blocks, fua | deallocate))
                }
                Op::Discard => {
                    let ranges = batch.ranges(&tag).map(|(sector, sectors)| DsmRange {
                        slba: sector >> sector_shift,
                        blocks: sectors >> sector_shift,
                    });
                    let data = self.lists.ranges(slot, ranges);
                    data.map(|(count, pointer)| Sqe::deallocate(nsid, count).with_data(Psdt::Prp, pointer))
                }
            };
            match made {
                Ok(sqe) => {
                    self.pair.push(slot, sqe);
                    self.parked[usize::from(slot)] = Some(tag);
                }
                Err(ListError::NoPages) => {
                    batch.put_back(tag);
                    batch.short_of(Shortage::Device);
                    break;
                }
                Err(_) => {
                    self.retries.forget(&tag);
                    batch.complete(tag, Status::Invalid);
                }
            }
        }
        self.pair.announce()
    }

    /// The data pointer of a request whose data is one segment that needs a list, or is refused.
    #[inline(never)]
    fn map_long(
        &mut self,
        slot: u16,
        bytes: u64,
        segment: Segment,
        sgl_threshold: Option<u32>,
        run: impl Fn(Segment) -> Option<DmaSegment> + Copy,
    ) -> Result<(Psdt, [u64; 2]), ListError> {
        self.lists.map(slot, bytes, std::iter::once(segment).map_while(run), 1, sgl_threshold)
    }

    /// The data pointer of a request whose data is one segment of a registered buffer.
    #[inline]
    fn map_registered(
        &mut self,
        slot: u16,
        segment: Segment,
        op: Op,
        sgl_threshold: Option<u32>,
        run: impl Fn(Segment) -> Option<DmaSegment> + Copy,
    ) -> Result<(Psdt, [u64; 2]), ListError> {
        let takes_sgl = sgl_threshold.is_some_and(|threshold| threshold > 0);
        match self.buffers.get(segment) {
            Some((buffer, from))
                if !buffer.needs_sync
                    && let Some(pointer) = buffer.pointer(from, segment.len, takes_sgl) =>
            {
                Ok(pointer)
            }
            _ => self.map_registered_slow(slot, segment, op, sgl_threshold, run),
        }
    }

    /// The same for a list that does not fit its table page, a bounced buffer, or one that the queue does not know.
    #[cold]
    #[inline(never)]
    fn map_registered_slow(
        &mut self,
        slot: u16,
        segment: Segment,
        op: Op,
        sgl_threshold: Option<u32>,
        run: impl Fn(Segment) -> Option<DmaSegment> + Copy,
    ) -> Result<(Psdt, [u64; 2]), ListError> {
        let IoQueue { buffers, lists, .. } = self;
        let bytes = u64::from(segment.len);
        let Some((buffer, from)) = buffers.get(segment) else {
            return lists.map(slot, bytes, std::iter::once(segment).map_while(run), 1, sgl_threshold);
        };
        let takes_sgl = sgl_threshold.is_some_and(|threshold| threshold > 0);
        let pointer = match buffer.pointer(from, segment.len, takes_sgl) {
            Some(pointer) => pointer,
            None => lists.map(slot, bytes, buffer.runs(from, segment.len), runs_max(bytes, 1), sgl_threshold)?,
        };
        if buffer.needs_sync && op == Op::Write {
            buffers.sync_for_device(segment);
        } else if buffer.needs_sync {
            lists.needs_sync(slot);
        }
        Ok(pointer)
    }

    /// The same for a request of several segments, some of which may be in registered buffers: a part of a bio, several
    /// bios that were merged, or a bio of several segments.
    #[cold]
    #[inline(never)]
    fn map_mixed(
        &mut self,
        slot: u16,
        request: &Request,
        segments: Segments<'_>,
        sgl_threshold: Option<u32>,
        run: impl Fn(Segment) -> Option<DmaSegment> + Copy,
    ) -> Result<(Psdt, [u64; 2]), ListError> {
        let (op, bytes, count) = (request.op(), request.bytes(), u64::from(request.segments()));
        let is_whole = |segment: &Segment| segment.is_registered() && u64::from(segment.len) == bytes;
        if let Some(segment) = segments.clone().first().filter(is_whole) {
            return self.map_registered(slot, segment, op, sgl_threshold, run);
        }
        let IoQueue { buffers, lists, .. } = self;
        let runs = segments.clone().flat_map(|segment| {
            let known = buffers.runs(segment);
            let other = if known.is_none() { run(segment) } else { None };
            known.into_iter().flatten().chain(other)
        });
        let pointer = lists.map(slot, bytes, runs, runs_max(bytes, count), sgl_threshold)?;
        for segment in segments {
            match buffers.get(segment) {
                Some((buffer, _)) if buffer.needs_sync && op == Op::Write => buffers.sync_for_device(segment),
                Some((buffer, _)) if buffer.needs_sync => lists.needs_sync(slot),
                _ => {}
            }
        }
        Ok(pointer)
    }

    /// Handles requests that arrive while the queue is stopped or its controller gone.
    #[cold]
    fn refuse(&mut self, batch: &mut Batch<'_>) {
        if self.mode == QueueMode::Stopped {
            batch.short_of(Shortage::Device);
            return;
        }
        while let Some((tag, ..)) = batch.take() {
            self.retries.forget(&tag);
            batch.complete(tag, Status::Offline);
        }
    }

    /// Handles completions. Returns whether the doorbell register was written.
    #[inline]
    pub fn poll(&mut self, done: &mut Done<'_>, now_ns: u64) -> bool {
        self.retries.requeue_due(done, now_ns);
        let is_rung = self.reap(done, now_ns);
        if self.wants_drain | self.wants_cancel | self.wants_fail {
            self.carry_out(done, now_ns);
        }
        is_rung
    }

    /// Whether it must be polled without a command in flight, since a command of the owner is pending.
    #[inline]
    pub fn wants_poll(&self) -> bool {
        self.wants_cancel || self.wants_fail
    }

    #[inline]
    fn reap(&mut self, done: &mut Done<'_>, now_ns: u64) -> bool {
        let IoQueue { pair, lists, parked, retries, buffers, .. } = self;
        pair.poll(|completed| {
            let needs_sync = lists.release(completed.slot);
            // The queue pair returns only commands that were pushed.
            let Some(tag) = parked[usize::from(completed.slot)].take() else { return };
            if needs_sync {
                copy_back(buffers, done.request(&tag).1);
            }
            if completed.status.is_success() && retries.is_empty() {
                done.complete(tag, Status::Ok);
            } else {
                retries.finish(tag, completed.status, done, now_ns);
            }
        })
    }

    /// Whether a completion is available, or a command of the controller's owner is pending.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.wants_poll() || self.pair.is_pending()
    }

    /// Latest time of the next poll without an event: the end of a retry delay.
    #[inline]
    pub fn deadline_ns(&self) -> Option<u64> {
        self.retries.deadline_ns()
    }

    /// The request of this slot has exceeded its timeout without a completion. The owner of the controller
    /// [takes](IoQueue::take_late) it; until the controller is proven silent, the request stays in flight.
    pub fn timed_out(&mut self, slot: u16) -> TimedOut {
        if let (QueueMode::Running, Some(cid), Some(sequence)) =
            (self.mode, self.pair.cid(slot), self.pair.sequence(slot))
            && self.late.len() < self.late.capacity()
        {
            self.late.push(LateCommand { qid: self.qid, slot, cid, sequence, starts: self.starts });
        }
        TimedOut::MoreTime
    }

    /// Commands that have become late since the last call.
    pub fn take_late(&mut self) -> impl Iterator<Item = LateCommand> {
        self.late.drain(..)
    }

    /// The namespaces of its hardware queue, in place of those it was made with. No request is in flight.
    pub fn set_namespaces(&mut self, namespaces: Box<[NvmeNamespace]>) {
        self.namespaces = namespaces;
    }

    /// Whether it has no request, neither in flight nor waiting for a retry.
    pub fn is_idle(&self) -> bool {
        self.pair.in_flight() == 0 && self.retries.deadline_ns().is_none()
    }

    /// Takes over from the queue that its hardware queue had before, after that one's last command ended: requests go
    /// on with their retry counts, and those that wait for a retry there are submitted again here.
    #[cold]
    pub fn take_over(&mut self, old: &mut IoQueue, done: &mut Done<'_>) {
        old.retries.requeue_due(done, u64::MAX);
        self.retries.adopt(&mut old.retries);
    }

    /// Executes a command of the controller's owner. Parts that need the queue core follow at the next poll.
    pub fn command(&mut self, command: IoQueueCommand) {
        match command {
            IoQueueCommand::Stop => self.stopped(),
            IoQueueCommand::Drain if self.pair.in_flight() == 0 => self.stopped(),
            IoQueueCommand::Drain => {
                self.stop();
                self.wants_drain = true;
            }
            IoQueueCommand::Cancel if self.pair.in_flight() == 0 => self.cancelled(),
            IoQueueCommand::Cancel => self.wants_cancel = true,
            IoQueueCommand::Start => {
                self.mode = QueueMode::Running;
                self.starts = self.starts.wrapping_add(1);
            }
            IoQueueCommand::Fail => (self.mode, self.wants_fail) = (QueueMode::Failed, true),
        }
    }

    /// Takes the report since the last call.
    pub fn take_report(&mut self) -> Option<IoQueueReport> {
        self.report.take()
    }

    /// Sends no more commands. A queue whose controller was given up continues to fail requests.
    fn stop(&mut self) {
        if self.mode == QueueMode::Running {
            self.mode = QueueMode::Stopped;
        }
    }

    fn stopped(&mut self) {
        self.stop();
        self.wants_drain = false;
        self.report = Some(IoQueueReport::Stopped);
    }

    /// No command is in flight.
    fn cancelled(&mut self) {
        self.late.clear();
        self.pair.reset();
        self.report = Some(IoQueueReport::Cancelled);
    }

    /// Executes the pending command, after completions were handled.
    #[cold]
    fn carry_out(&mut self, done: &mut Done<'_>, now_ns: u64) {
        if self.wants_drain && self.pair.in_flight() == 0 {
            self.stopped();
        }
        if std::mem::take(&mut self.wants_cancel) {
            for slot in 0..self.parked.len() {
                let Some(tag) = self.parked[slot].take() else { continue };
                self.pair.cancel(slot as u16);
                self.lists.release(slot as u16);
                self.retries.finish_reset(tag, done, now_ns);
            }
            self.cancelled();
        }
        if std::mem::take(&mut self.wants_fail) {
            self.retries.fail_delayed(done);
        }
    }

    /// The queue pair, for read access.
    pub fn pair(&self) -> &HostQueuePair {
        &self.pair
    }
}

/// The most runs of `bytes` in this many segments, if some are scattered page by page.
fn runs_max(bytes: u64, segments: u64) -> u64 {
    bytes / PAGE + 2 * segments
}

/// Copies what was read into bounced buffers to where it belongs.
#[cold]
fn copy_back(buffers: &MappedBuffers, segments: Segments<'_>) {
    segments.for_each(|segment| buffers.sync_for_cpu(segment));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_are_moved_keep_their_contents_in_memory_of_their_own() {
        let mut slots: Box<[u64]> = (0..100).collect();
        let before = slots.as_ptr();
        reallocate(&mut slots);
        assert_ne!(slots.as_ptr(), before);
        assert!(slots.iter().copied().eq(0..100));
    }
}
