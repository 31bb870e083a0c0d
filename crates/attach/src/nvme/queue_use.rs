//! One I/O queue on the side of the control thread: on a lane, or spare.

use std::sync::Arc;

use blkyard_mem::{BufferId, BufferMapping, DmaDomain, Region, RegisteredBuffer};
use blkyard_mq::QueueKind;
use blkyard_nvme::{IoQueueCommand, IoQueueReport, ScannedNamespace};
use blkyard_sys::EventFd;

use crate::nvme::mailbox::{NvmeQueueMailbox, NvmeQueueMessage, OpenedIoQueue, ReachedBuffer, RunningQueue};

/// Regions of a queue's memory, by index.
pub(crate) type QueueMemory = Vec<(u32, Arc<Region>)>;

/// Controller address of a byte of a region.
pub(crate) type AddressOf<'a> = dyn Fn(&Arc<Region>, u64) -> Option<u64> + 'a;

/// A registered buffer and its mapping for the controller.
type BufferOfQueue = (Arc<RegisteredBuffer>, Arc<BufferMapping>);

/// How much of a queue's memory the controller does not reach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unreached {
    /// Regions.
    pub(crate) regions: usize,
    /// Of these.
    pub(crate) all: usize,
    /// Tables of registered buffers.
    pub(crate) tables: usize,
}

/// An I/O queue of the controller, across all sessions.
#[derive(Debug)]
pub(crate) struct QueueUse {
    /// Signalled by its interrupt.
    pub(crate) eventfd: Arc<EventFd>,
    /// Mailbox of the queue on its lane.
    user: Option<Arc<NvmeQueueMailbox>>,
    /// Indexes of the namespaces that it serves there.
    namespaces: Box<[usize]>,
    /// The queue pair, if no lane has it. Neither is set if it was dropped with requests in flight.
    spare: Option<RunningQueue>,
    /// Memory of the queue on its lane, with its number.
    memory: Option<(u64, QueueMemory)>,
    /// The registered buffers there, mapped for as long as the queue has them.
    mapped: Vec<BufferOfQueue>,
    /// Whether the controller does not reach a part of it.
    is_partly_unreached: bool,
}

impl QueueUse {
    /// A queue that is not used.
    pub(crate) fn new(eventfd: Arc<EventFd>) -> QueueUse {
        let (user, spare, memory) = (None, None, None);
        let namespaces = Box::default();
        QueueUse { eventfd, user, namespaces, spare, memory, mapped: Vec::new(), is_partly_unreached: false }
    }

    /// The mailbox of the queue on its lane.
    pub(crate) fn user(&self) -> Option<&Arc<NvmeQueueMailbox>> {
        self.user.as_ref()
    }

    /// Whether it can be opened, and signals interrupts then.
    pub(crate) fn is_free(&self, has_interrupt: bool) -> bool {
        self.spare.as_ref().is_some_and(|spare| spare.has_interrupt == has_interrupt)
    }

    /// Gives the queue to a lane, for the namespaces of these indexes, in the order in which requests number them.
    pub(crate) fn open(
        &mut self,
        number: usize,
        kind: QueueKind,
        indexes: Box<[usize]>,
        all: &[ScannedNamespace],
    ) -> Option<OpenedIoQueue> {
        let mut running = self.spare.take()?;
        running.queue.set_namespaces(indexes.iter().map(|index| all[*index].namespace).collect());
        self.namespaces = indexes;
        let mailbox = Arc::new(NvmeQueueMailbox::new(kind, &self.eventfd));
        self.user = Some(Arc::clone(&mailbox));
        Some(OpenedIoQueue { number, mailbox, running })
    }

    /// Takes the queue back from its lane, with the messages that were not read there. Returns a report of it.
    pub(crate) fn close(&mut self, running: Option<RunningQueue>) -> Option<(u64, IoQueueReport)> {
        (self.spare, self.memory) = (running, None);
        if let Some(spare) = &mut self.spare {
            spare.queue.clear_buffers();
        }
        self.mapped.clear();
        for message in self.user.take().into_iter().flat_map(|mailbox| mailbox.take()) {
            match message {
                NvmeQueueMessage::Run(running) => self.spare = Some(running),
                NvmeQueueMessage::Command(command) => {
                    self.spare.iter_mut().for_each(|spare| spare.queue.command(command));
                }
                NvmeQueueMessage::Memory(..) | NvmeQueueMessage::Buffer(..) => {}
            }
        }
        let spare = self.spare.as_mut()?;
        Some((spare.session, spare.queue.take_report()?))
    }

    /// Passes a command of the controller on, or executes it. Returns the report if no lane will send one.
    pub(crate) fn command(&mut self, command: IoQueueCommand) -> Option<IoQueueReport> {
        if let Some(user) = &self.user {
            user.post(NvmeQueueMessage::Command(command));
            return None;
        }
        if let Some(spare) = &mut self.spare {
            spare.queue.command(command);
            return spare.queue.take_report();
        }
        match command {
            IoQueueCommand::Stop | IoQueueCommand::Drain => Some(IoQueueReport::Stopped),
            IoQueueCommand::Cancel => Some(IoQueueReport::Cancelled),
            IoQueueCommand::Start | IoQueueCommand::Fail => None,
        }
    }

    /// Whether a lane has it for the namespace of this index.
    pub(crate) fn serves(&self, namespace: usize) -> bool {
        self.user.is_some() && self.namespaces.contains(&namespace)
    }

    /// Replaces the queue pair by that of a new session, with these namespaces.
    pub(crate) fn run(&mut self, mut running: RunningQueue, all: &[ScannedNamespace]) {
        let Some(user) = &self.user else {
            self.spare = Some(running);
            return;
        };
        running.queue.set_namespaces(self.namespaces.iter().map(|index| all[*index].namespace).collect());
        user.replace_pair(running);
    }

    /// Memory of the queue on its lane, under this number.
    pub(crate) fn set_memory(&mut self, number: u64, memory: QueueMemory, keeps_buffers: bool) {
        self.memory = Some((number, memory));
        if !keeps_buffers {
            self.mapped.clear();
        }
    }

    /// Maps a registered buffer of the queue. Without memory for its table it is translated like other memory.
    pub(crate) fn add_buffer(&mut self, buffer: Arc<RegisteredBuffer>, domain: &Arc<DmaDomain>) {
        if self.user.is_some()
            && let Ok(mapping) = buffer.mapping(domain)
        {
            self.mapped.push((buffer, mapping));
        }
    }

    /// Drops the mapping of a registered buffer that the queue has dropped.
    pub(crate) fn remove_buffer(&mut self, buffer: BufferId) {
        self.mapped.retain(|(mapped, _)| mapped.id() != buffer);
    }

    /// Tells the lane the controller's addresses of its memory. Returns what the controller does not reach. `address`
    /// returns that of a byte of a region.
    pub(crate) fn announce_memory(&mut self, address: &AddressOf<'_>) -> Unreached {
        let (Some(user), Some((number, memory))) = (&self.user, &self.memory) else { return Unreached::default() };
        let mut addresses = Vec::new();
        let mut unreached = Unreached { all: memory.len(), ..Unreached::default() };
        for (index, region) in memory {
            let index = *index as usize;
            if addresses.len() <= index {
                addresses.resize(index + 1, None);
            }
            addresses[index] = whole_address(region, address);
            unreached.regions += usize::from(addresses[index].is_none());
        }
        let buffers: Vec<_> = self.mapped.iter().filter_map(|mapped| reached(mapped, address)).collect();
        unreached.tables = buffers.iter().filter(|reached| reached.addresses.lacks_table()).count();
        self.is_partly_unreached = unreached.regions + unreached.tables > 0;
        user.post(NvmeQueueMessage::Memory(*number, addresses, buffers));
        unreached
    }

    /// Tells the lane the controller's addresses of the buffer that was added last, as above.
    pub(crate) fn announce_buffer(&mut self, address: &AddressOf<'_>) -> Unreached {
        let reached = self.mapped.last().and_then(|mapped| reached(mapped, address));
        let (Some(user), Some(reached)) = (&self.user, reached) else { return Unreached::default() };
        let tables = usize::from(reached.addresses.lacks_table());
        self.is_partly_unreached |= tables > 0;
        user.post(NvmeQueueMessage::Buffer(reached));
        Unreached { tables, ..Unreached::default() }
    }

    /// Number of regions that only this process can have: an export names some in no request to the device.
    pub(crate) fn private_regions(&self) -> usize {
        let regions = self.memory.iter().flat_map(|(_, regions)| regions);
        regions.filter(|(_, region)| region.file().is_none()).count()
    }

    /// Number of regions that the domain lists no more: their owner has dropped them, and announces other memory.
    pub(crate) fn dropped_regions(&self, listed: &[Arc<Region>]) -> usize {
        self.memory.as_ref().map_or(0, |(_, memory)| dropped(memory, listed))
    }

    /// Whether the controller did not reach a part of the memory.
    pub(crate) fn is_partly_unreached(&self) -> bool {
        self.user.is_some() && self.is_partly_unreached
    }
}

fn dropped(memory: &QueueMemory, listed: &[Arc<Region>]) -> usize {
    memory.iter().filter(|(_, region)| !listed.iter().any(|listed| Arc::ptr_eq(listed, region))).count()
}

/// Controller address of a region that the controller reaches in full.
fn whole_address(region: &Arc<Region>, address: &AddressOf<'_>) -> Option<u64> {
    address(region, region.len().checked_sub(1)? as u64)?;
    address(region, 0)
}

/// A registered buffer with its addresses; unset if the controller does not reach all of it.
fn reached((buffer, mapping): &BufferOfQueue, address: &AddressOf<'_>) -> Option<ReachedBuffer> {
    let addresses = mapping.addresses(address)?;
    Some(ReachedBuffer { buffer: Arc::clone(buffer), mapping: Arc::clone(mapping), addresses })
}

#[cfg(test)]
mod tests {
    use blkyard_mem::DmaDomain;

    use super::*;

    #[test]
    fn memory_dropped_before_its_announcement_is_not_missed() {
        let domain = DmaDomain::new(|| {});
        let memory: QueueMemory = (0..2).map(|number| (number, Region::shared(4096).unwrap())).collect();
        let mut mapping = domain.map(memory.iter().map(|(_, region)| Arc::clone(region)).collect());
        assert_eq!(dropped(&memory, &domain.regions()), 0);
        mapping.replace(vec![Arc::clone(&memory[1].1)]);
        assert_eq!(dropped(&memory, &domain.regions()), 1);
        drop(mapping);
        assert_eq!(dropped(&memory, &domain.regions()), 2);
    }
}
