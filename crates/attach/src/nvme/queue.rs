//! One I/O queue of a controller as the driver of a hardware queue.
//!
//! Owned by its lane. It never waits: memory, stops and resets are answered by messages. Until the controller knows its
//! memory, and while the controller is reset or gone, it accepts no request.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::{BufferId, DmaDomain, DmaMapping, RegisteredBuffer};
use blkyard_mq::{Batch, Done, Driver, RegionTable, SIGNAL_AGAIN_NS, Shortage, SignalEventfd, SignalSlot, TimedOut};
use blkyard_nvme::IoQueueCommand;
use blkyard_sys::EventFd;

use crate::mailbox::ControlSender;
use crate::nvme::mailbox::{
    DoorbellListener, NvmeCommand, NvmeQueueMailbox, NvmeQueueMessage, OpenedIoQueue, ReachedBuffer, RunningQueue,
};

/// Polling interval of a queue without an interrupt vector while requests are in flight, ns.
const POLL_NS: u64 = 50_000;

/// One I/O queue of an attached namespace.
// On separate cache lines, whatever is beside it.
#[repr(align(128))]
pub struct NamespaceQueue {
    /// Unset only while it is dropped.
    running: Option<RunningQueue>,
    /// By region index: controller address, if the controller reaches it.
    addresses: Vec<Option<u64>>,
    /// Whether the addresses are those of the present memory.
    is_known: bool,
    /// Whether all requests fail, also before the memory is known.
    is_failing: bool,
    memory_number: u64,
    domain: Arc<DmaDomain>,
    /// Of the present memory.
    mapping: DmaMapping,
    mailbox: Arc<NvmeQueueMailbox>,
    number: usize,
    /// Time of the last poll, ns.
    polled_ns: u64,
    /// Wakes the control thread.
    wake: Arc<EventFd>,
    /// Of the listener to the doorbells.
    place: SignalSlot,
    /// When it is told again, which was impossible.
    ring_again_ns: Option<u64>,
    control: ControlSender<NvmeCommand>,
}

impl NamespaceQueue {
    pub(crate) fn new(
        opened: OpenedIoQueue,
        domain: &Arc<DmaDomain>,
        wake: &Arc<EventFd>,
        control: ControlSender<NvmeCommand>,
    ) -> NamespaceQueue {
        let OpenedIoQueue { number, mailbox, mut running } = opened;
        running.move_to_node();
        NamespaceQueue {
            running: Some(running),
            addresses: Vec::new(),
            is_known: false,
            is_failing: false,
            memory_number: 0,
            domain: Arc::clone(domain),
            mapping: domain.map(Vec::new()),
            mailbox,
            number,
            polled_ns: 0,
            wake: Arc::clone(wake),
            place: SignalSlot::default(),
            ring_again_ns: None,
            control,
        }
    }

    /// Handles the control thread's messages.
    #[cold]
    fn read_mail<Cx: ?Sized + SignalEventfd>(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        done: &mut Done<'_>,
        now_ns: u64,
    ) {
        for message in self.mailbox.take() {
            match message {
                NvmeQueueMessage::Command(command) => {
                    self.is_failing = match command {
                        IoQueueCommand::Fail => true,
                        IoQueueCommand::Start => false,
                        _ => self.is_failing,
                    };
                    self.running.iter_mut().for_each(|running| running.queue.command(command));
                }
                NvmeQueueMessage::Run(mut running) => {
                    (self.is_known, self.is_failing) = (false, false);
                    let old = self.running.take();
                    cx.forget(&mut self.place);
                    running.move_to_node();
                    let running = self.running.insert(running);
                    if let Some(mut old) = old {
                        // Carries out the cancellation that came before.
                        old.queue.poll(done, now_ns);
                        running.queue.take_over(&mut old.queue, done);
                    }
                }
                NvmeQueueMessage::Memory(number, addresses, buffers) if number == self.memory_number => {
                    (self.addresses, self.is_known) = (addresses, true);
                    buffers.iter().for_each(|buffer| self.map_buffer(memory, buffer));
                }
                NvmeQueueMessage::Buffer(buffer) => self.map_buffer(memory, &buffer),
                NvmeQueueMessage::Memory(..) => {}
            }
        }
    }

    /// Has the control thread map this memory, and look its addresses up. Requests wait until it has.
    fn tell_memory(&mut self, memory: &RegionTable, keeps_buffers: bool) {
        self.is_known = false;
        self.addresses.clear();
        let regions: Vec<_> = memory.iter().map(|(number, region)| (number, Arc::clone(region))).collect();
        self.mapping.replace(regions.iter().map(|(_, region)| Arc::clone(region)).collect());
        // Answers to earlier requests, which are by the indexes of the memory before, are ignored from now on.
        self.memory_number += 1;
        let (queue, number) = (self.number, self.memory_number);
        self.control.send(NvmeCommand::Memory { queue, number, regions, keeps_buffers });
    }

    /// Has the queue pair use a registered buffer by its addresses, unless it was removed meanwhile.
    fn map_buffer(&mut self, memory: &RegionTable, ReachedBuffer { buffer, mapping, addresses }: &ReachedBuffer) {
        if memory.plain(buffer.segment(0, 1)).is_some()
            && let Some(running) = &mut self.running
        {
            running.queue.add_buffer(buffer, mapping, addresses);
        }
    }

    /// Tells the listener that a doorbell was written.
    #[inline]
    fn ring<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        let was_owed = std::mem::take(&mut self.place.is_owed);
        match self.running.as_ref().map(|running| &running.listener) {
            Some(DoorbellListener::Controller(eventfd)) => cx.signal(&mut self.place, eventfd.as_fd()),
            Some(DoorbellListener::Control) if self.mailbox.post_doorbell() || was_owed => {
                cx.signal(&mut self.place, self.wake.as_fd());
            }
            _ => {}
        }
        // Both callers have set the time.
        self.ring_again_ns = self.place.is_owed.then(|| self.polled_ns + SIGNAL_AGAIN_NS);
    }
}

impl<Cx: ?Sized + SignalEventfd> Driver<Cx> for NamespaceQueue {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let Some(running) = self.running.as_mut().filter(|_| self.is_known || self.is_failing) else {
            return batch.short_of(Shortage::Device);
        };
        self.polled_ns = batch.now_ns();
        let addresses: &[Option<u64>] = &self.addresses;
        let rang = running.queue.queue(batch, |segment| {
            let segment = memory.plain(segment)?;
            let base = addresses.get(segment.region as usize).copied().flatten()?;
            memory.resolve_region(segment).map(|_| base + segment.offset)
        });
        if rang {
            self.ring(cx);
        }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        if self.mailbox.has_mail() {
            self.read_mail(cx, memory, done, now_ns);
        }
        let Some(running) = &mut self.running else { return };
        self.polled_ns = now_ns;
        let rang = running.queue.poll(done, now_ns);
        if let Some(report) = running.queue.take_report() {
            self.control.send(NvmeCommand::Report(self.number, running.session, report));
        }
        if rang || self.ring_again_ns.is_some_and(|again_ns| now_ns >= again_ns) {
            self.ring(cx);
        }
    }

    #[inline]
    fn wants_poll(&self) -> bool {
        self.mailbox.has_mail()
            || self.ring_again_ns.is_some()
            || self.running.as_ref().is_some_and(|running| running.queue.wants_poll())
    }

    /// Reports the command. Only the control thread aborts it, or resets the controller.
    fn timed_out(&mut self, _: &mut Cx, _: &RegionTable, place: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        let Some(RunningQueue { queue, session, .. }) = &mut self.running else { return TimedOut::MoreTime };
        let timed_out = queue.timed_out(place as u16);
        for late in queue.take_late() {
            self.control.send(NvmeCommand::Late(*session, late));
        }
        timed_out
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        if memory.iter().next().is_none() {
            // The next call may come from another lane.
            cx.forget(&mut self.place);
        }
        self.running.iter_mut().for_each(|running| running.queue.clear_buffers());
        self.tell_memory(memory, false);
    }

    fn change_memory(&mut self, _: &mut Cx, memory: &RegionTable) {
        self.tell_memory(memory, true);
    }

    /// The control thread maps the buffer, and looks its addresses up. Until it answers, and if the controller does not
    /// reach the buffer, its segments are translated like others.
    fn add_buffer(&mut self, _: &mut Cx, _: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        self.control.send(NvmeCommand::AddBuffer(self.number, Arc::clone(buffer)));
    }

    fn remove_buffer(&mut self, _: &mut Cx, buffer: BufferId) {
        self.running.iter_mut().for_each(|running| running.queue.remove_buffer(buffer));
        self.control.send(NvmeCommand::RemoveBuffer(self.number, buffer));
    }

    /// A controller always interrupts: signals of completions that were polled are discarded first.
    fn arm(&mut self) -> bool {
        if self.mailbox.is_polled {
            return false;
        }
        self.mailbox.eventfd.take();
        self.mailbox.has_mail() || self.running.as_ref().is_some_and(|running| running.queue.is_pending())
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.mailbox.is_polled).then(|| self.mailbox.eventfd.as_fd())
    }

    fn deadline_ns(&self) -> Option<u64> {
        let RunningQueue { queue, has_interrupt, .. } = self.running.as_ref()?;
        let is_waiting = !has_interrupt && !self.mailbox.is_polled && queue.pair().in_flight() > 0;
        let poll_ns = is_waiting.then(|| self.polled_ns.saturating_add(POLL_NS));
        [queue.deadline_ns(), poll_ns, self.ring_again_ns].into_iter().flatten().min()
    }
}

impl Drop for NamespaceQueue {
    fn drop(&mut self) {
        let mut running = self.running.take();
        if let Some(busy) = running.take_if(|running| !running.queue.is_idle()) {
            tracing::warn!(
                "NVMe queue {}: closed with requests in flight: their data may or may not have reached the disk",
                self.number + 1
            );
            // The controller may still reach the memory that the commands name.
            std::mem::forget(busy);
            std::mem::forget(std::mem::replace(&mut self.mapping, self.domain.map(Vec::new())));
        }
        self.control.send(NvmeCommand::Close(self.number, running));
    }
}

impl std::fmt::Debug for NamespaceQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NamespaceQueue")
            .field("number", &self.number)
            .field("is_known", &self.is_known)
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}
