//! The I/O queues of a controller on the side of the controller's owner.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use crate::host::memory::{IoQueueLayout, SharedBlock};
use crate::host::negotiate::vector;
use crate::host::{
    ControllerState, ControllerTransport, HostController, HostEvent, HostPhase, HostQueuePair, NvmeHostError,
};
use crate::registers::{DOORBELLS, cq_doorbell, sq_doorbell};
use crate::{Doorbells, IoQueue, IoQueueCommand, IoQueueReport, ListPool, NvmeNamespace, RetryDelays, Sqe, admin};

/// Last command to the owner of an I/O queue, and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueRun {
    /// No command is in flight, and none will be sent.
    Drained,
    Running,
    Stopping,
    Stopped,
    Cancelling,
}

/// State of one I/O queue.
#[derive(Debug)]
pub(crate) struct IoQueueSlot {
    pub(crate) qid: u16,
    pub(crate) run: QueueRun,
    pub(crate) has_cq: bool,
    pub(crate) has_sq: bool,
    /// Number of start commands to its owner.
    pub(crate) starts: u32,
    /// By slot: sequence of the command that an Abort was sent for.
    pub(crate) aborted: Box<[Option<u32>]>,
    layout: IoQueueLayout,
    /// Memory of the queue, mapped until the controller is dropped.
    block: SharedBlock,
    is_taken: bool,
    /// Doorbells as they were forwarded last, of submission and completion queue; zero when both are created.
    forwarded: [u32; 2],
}

impl IoQueueSlot {
    /// Whether it was created on the controller, in full.
    pub(crate) fn is_created(&self) -> bool {
        self.has_cq && self.has_sq
    }

    /// Whether the queue was handed over to an owner.
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken
    }

    /// The command that creates one half of the queue.
    pub(crate) fn create<T: ControllerTransport>(
        &self,
        transport: &T,
        vector: Option<u16>,
        is_sq: bool,
    ) -> Option<Sqe> {
        let addr = self.block.addr(transport)?;
        let entries = u32::from(self.layout.entries);
        Some(if is_sq {
            Sqe::create_sq(self.qid, entries, addr, self.qid)
        } else {
            Sqe::create_cq(self.qid, entries, addr + self.layout.cq_at as u64, vector)
        })
    }

    /// The command that deletes one half of the queue.
    pub(crate) fn delete(&self, is_sq: bool) -> Sqe {
        Sqe::delete_queue(if is_sq { admin::DELETE_SQ } else { admin::DELETE_CQ }, self.qid)
    }

    /// Hands a new queue over to its owner. From then on it runs.
    fn hand_over<T: ControllerTransport>(
        &mut self,
        transport: &T,
        doorbells: &Doorbells,
        has_interrupt: bool,
        namespaces: Box<[NvmeNamespace]>,
        delays: RetryDelays,
    ) -> Option<IoQueue> {
        let lists: ListPool = self.layout.lists(&self.block, self.block.addr(transport)?);
        let pair = self.take_pair(doorbells);
        let pair = if has_interrupt { pair } else { pair.with_late_head() };
        Some(IoQueue::new(pair, lists, namespaces, delays))
    }

    /// Hands the rings of a new queue over to its owner. From then on it runs.
    pub(crate) fn take_pair(&mut self, doorbells: &Doorbells) -> HostQueuePair {
        (self.is_taken, self.run) = (true, QueueRun::Running);
        HostQueuePair::new(self.qid, self.layout.rings(&self.block), doorbells, Arc::default())
    }
}

impl<T: ControllerTransport> HostController<T> {
    /// Handles a report of an I/O queue's owner.
    pub fn queue_report(&mut self, qid: u16, report: IoQueueReport) {
        let Some(queue) = self.queue_mut(qid) else { return };
        queue.run = match (queue.run, report) {
            (QueueRun::Stopping, IoQueueReport::Stopped) => QueueRun::Stopped,
            (QueueRun::Cancelling, IoQueueReport::Cancelled) => QueueRun::Drained,
            (run, _) => run,
        };
    }

    pub(crate) fn queue_mut(&mut self, qid: u16) -> Option<&mut IoQueueSlot> {
        self.queues.get_mut(usize::from(qid).checked_sub(1)?)
    }

    /// An I/O queue that was created and not taken yet, in the order of their identifiers. It knows the present
    /// [namespaces](HostController::namespaces); while there are none no queue is handed over.
    pub fn take_queue(&mut self) -> Option<IoQueue> {
        if self.state != ControllerState::Live || self.namespaces.is_empty() {
            return None;
        }
        let (doorbells, vectors, counts) = (self.doorbells.as_ref()?, self.transport.vectors(), self.counts?);
        let queue = self.queues.iter_mut().find(|queue| queue.is_created() && !queue.is_taken)?;
        let namespaces = self.namespaces.iter().map(|scanned| scanned.namespace).collect();
        let has_interrupt = vector(queue.qid - 1, vectors, counts).is_some();
        queue.hand_over(&self.transport, doorbells, has_interrupt, namespaces, RetryDelays::new(&self.identify))
    }

    /// Allocates memory for an I/O queue, unless it has some.
    pub(crate) fn prepare_queue(&mut self, qid: u16, entries: u16) -> Result<(), NvmeHostError> {
        if let Some(queue) = self.queue_mut(qid) {
            // Its owner has rings of this size.
            return if queue.layout.entries <= entries {
                Ok(())
            } else {
                Err(NvmeHostError::QueueEntries(u32::from(entries)))
            };
        }
        let layout = IoQueueLayout::new(entries, self.config.list_pages);
        let block = SharedBlock::new(&self.transport, layout.bytes)?;
        self.queues.push(IoQueueSlot {
            qid,
            run: QueueRun::Drained,
            has_cq: false,
            has_sq: false,
            starts: 0,
            aborted: vec![None; usize::from(entries - 1)].into(),
            layout,
            block,
            is_taken: false,
            forwarded: [0; 2],
        });
        Ok(())
    }

    /// The controller is live: its queues run, and others fail if it has none at all.
    pub(crate) fn start_queues(&mut self) {
        let has_queues = self.queues.iter().any(IoQueueSlot::is_created);
        for queue in &mut self.queues {
            queue.aborted.fill(None);
            match (queue.is_created(), queue.is_taken) {
                (true, true) => {
                    queue.run = QueueRun::Running;
                    queue.starts = queue.starts.wrapping_add(1);
                    self.events.push_back(HostEvent::Queue(queue.qid, IoQueueCommand::Start));
                }
                (false, true) if !has_queues => {
                    self.events.push_back(HostEvent::Queue(queue.qid, IoQueueCommand::Fail));
                }
                // It is taken when its owner wants it, or its requests wait for it to come back.
                _ => {}
            }
        }
    }

    /// Stops running queues with this command.
    pub(crate) fn stop_queues(&mut self, command: IoQueueCommand) {
        for queue in self.queues.iter_mut().filter(|queue| queue.run == QueueRun::Running) {
            queue.run = QueueRun::Stopping;
            self.events.push_back(HostEvent::Queue(queue.qid, command));
        }
    }

    /// Stops queues that are still draining.
    pub(crate) fn hurry_queues(&mut self) {
        for queue in self.queues.iter().filter(|queue| queue.run == QueueRun::Stopping) {
            self.events.push_back(HostEvent::Queue(queue.qid, IoQueueCommand::Stop));
        }
    }

    /// The controller is silent: stopped queues cancel their requests in flight, and those that have not answered do
    /// when they stop.
    pub(crate) fn cancel_queues(&mut self) {
        for queue in &mut self.queues {
            (queue.has_cq, queue.has_sq, queue.forwarded) = (false, false, [0; 2]);
            if matches!(queue.run, QueueRun::Stopped | QueueRun::Stopping) {
                queue.run = QueueRun::Cancelling;
                self.events.push_back(HostEvent::Queue(queue.qid, IoQueueCommand::Cancel));
            }
        }
    }

    /// The controller has ended: fails all requests.
    pub(crate) fn fail_queues(&mut self) {
        for queue in self.queues.iter_mut().filter(|queue| queue.is_taken) {
            self.events.push_back(HostEvent::Queue(queue.qid, IoQueueCommand::Fail));
        }
    }

    /// Whether any queue is in this state.
    pub(crate) fn any_queue(&self, run: QueueRun) -> bool {
        self.queues.iter().any(|queue| queue.run == run)
    }

    /// Writes the doorbell registers of an I/O queue that have changed, for a transport that does not share them; for
    /// one that does, signals them. Its owner has this done when the queue says that a register was written. Nothing is
    /// done for a queue that the controller does not have.
    ///
    /// With shadow doorbells few indexes come here, and a tail may be the same as the last one that did, a ring later:
    /// then the controller waits for it. It is always written, with the value of the shadow doorbell.
    pub fn forward_doorbells(&mut self, qid: u16, now_ns: u64) {
        let HostController { transport, registers, doorbells, capabilities, queues, .. } = self;
        let queue = usize::from(qid).checked_sub(1).and_then(|number| queues.get_mut(number));
        let (Some(queue), Some(registers)) = (queue, registers) else { return };
        if !queue.is_created() {
            return;
        }
        if transport.doorbells().is_some() {
            return transport.signal_doorbell(qid);
        }
        let stride = capabilities.doorbell_stride;
        let shadow = doorbells.as_ref().and_then(Doorbells::shadow);
        let places = [(sq_doorbell(qid, stride), shadow.is_some()), (cq_doorbell(qid, stride), false)];
        for ((at, is_forced), forwarded) in places.into_iter().zip(&mut queue.forwarded) {
            let index = shadow.map_or(&*registers, |shadow| &shadow.doorbells).load_u32(at, Acquire);
            if std::mem::replace(forwarded, index) == index && !is_forced {
                continue;
            }
            if let Err(gone) = transport.write32(DOORBELLS + at, index) {
                return self.end(gone.into(), now_ns);
            }
        }
    }

    /// The interrupt vector of an I/O queue; unset for a polled queue. The owner waits for its
    /// [`ControllerTransport::eventfd`].
    pub fn queue_vector(&self, qid: u16) -> Option<u16> {
        vector(qid.checked_sub(1)?, self.transport.vectors(), self.counts?)
    }

    /// Whether a bring-up or teardown is in progress.
    pub fn is_busy(&self) -> bool {
        !matches!(self.phase, HostPhase::Idle)
    }
}
