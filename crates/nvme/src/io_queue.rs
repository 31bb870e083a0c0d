//! The driver of one I/O queue pair: requests become commands, completions become statuses.
//!
//! Owned by one thread, inside whatever is the queue core's driver. It says when the doorbell register was written and
//! wakes nobody; it knows no registers and no clock. A request's slot is the place of its tag. The data stays where its
//! segments point, and whoever owns the queue says at which bus address the controller finds that.
//!
//! Does not time out, abort or retry: requests of a controller that is reset are taken back
//! ([`IoQueue::take_in_flight`]) once it is proven silent.

use blkyard_mem::Segment;
use blkyard_mq::{Batch, BioFlags, Done, Op, Shortage, Status, Tag};

use crate::{DmaSegment, DsmRange, HostQueuePair, ListError, ListPool, NvmeNamespace, Psdt, Sqe, control, io};

/// The host's side of one I/O queue, for the namespaces of one hardware queue.
#[derive(Debug)]
pub struct IoQueue {
    pair: HostQueuePair,
    lists: ListPool,
    /// By number of the namespace in the hardware queue.
    namespaces: Box<[NvmeNamespace]>,
    /// The tags of requests in flight, by slot.
    parked: Box<[Option<Tag>]>,
    is_over: bool,
}

impl IoQueue {
    /// A queue over an empty queue pair, with lists for its [depth](HostQueuePair::depth).
    pub fn new(pair: HostQueuePair, lists: ListPool, namespaces: Box<[NvmeNamespace]>) -> IoQueue {
        let parked = (0..pair.depth()).map(|_| None).collect();
        IoQueue { pair, lists, namespaces, parked, is_over: false }
    }

    /// Requests that may be in flight at one time: the queue core has as many tags, or fewer.
    pub fn depth(&self) -> u16 {
        self.pair.depth()
    }

    /// Takes requests from the batch and announces their commands, all at once. `translate` says at which bus address
    /// the controller finds the bytes of a segment, or nothing if it does not reach them. Says whether the doorbell
    /// register was written.
    #[inline]
    pub fn queue(&mut self, batch: &mut Batch<'_>, translate: impl Fn(Segment) -> Option<u64> + Copy) -> bool {
        if self.is_over {
            batch.short_of(Shortage::Device);
            return false;
        }
        while let Some((tag, request, segments)) = batch.take() {
            let slot = tag.index() as u16;
            let (op, sector, sectors, flags) = (request.op(), request.sector(), request.sectors(), request.flags());
            let bytes = request.bytes();
            // A hardware queue has no namespace that its driver does not know.
            let namespace = self.namespaces[usize::from(request.namespace())];
            let NvmeNamespace { nsid, sector_shift, sgl_threshold } = namespace;
            let (slba, blocks) = (sector >> sector_shift, sectors >> sector_shift);
            let fua = if flags.contains(BioFlags::FUA) { control::FUA } else { 0 };
            // A segment that is not reached ends the walk, and the rest does not add up.
            let run = |segment: Segment| translate(segment).map(|addr| DmaSegment { addr, len: segment.len.into() });
            let made = match op {
                Op::Read | Op::Write => {
                    let (opcode, control) = if op == Op::Read { (io::READ, 0) } else { (io::WRITE, fua) };
                    let data = match segments.only() {
                        Some(segment) => {
                            self.lists.map(slot, bytes, std::iter::once(segment).map_while(run), sgl_threshold)
                        }
                        None => self.lists.map(slot, bytes, segments.map_while(run), sgl_threshold),
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
                Err(_) => batch.complete(tag, Status::Invalid),
            }
        }
        self.pair.announce()
    }

    /// Hands over what the controller has completed. Says whether the doorbell register was written.
    #[inline]
    pub fn poll(&mut self, done: &mut Done<'_>) -> bool {
        let IoQueue { pair, lists, parked, .. } = self;
        pair.poll(|completed| {
            lists.release(completed.slot);
            // The queue pair hands over only what was pushed.
            let Some(tag) = parked[usize::from(completed.slot)].take() else { return };
            done.complete(tag, completed.status.to_status());
        })
    }

    /// Whether a completion is there to be polled.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pair.is_pending()
    }

    /// Takes back the tags of all requests in flight, to be done again elsewhere or failed. From then on nothing is
    /// taken from a batch. The controller must have let go of the memory: it is disabled or gone.
    pub fn take_in_flight(&mut self) -> impl Iterator<Item = Tag> {
        self.is_over = true;
        let IoQueue { pair, lists, parked, .. } = self;
        parked.iter_mut().enumerate().filter_map(move |(slot, tag)| {
            let tag = tag.take()?;
            pair.cancel(slot as u16);
            lists.release(slot as u16);
            Some(tag)
        })
    }

    /// Goes on after [`IoQueue::take_in_flight`], over rings that are emptied for the controller to create anew.
    ///
    /// # Panics
    /// If requests are in flight.
    pub fn reset(&mut self) {
        self.pair.reset();
        self.is_over = false;
    }

    /// The queue pair, for what only it knows.
    pub fn pair(&self) -> &HostQueuePair {
        &self.pair
    }
}
