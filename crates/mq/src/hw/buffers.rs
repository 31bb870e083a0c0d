//! Registered buffers of a running queue, and the regions that they bring.
//!
//! A queue is told of a buffer before segments name it, at any time; nothing waits. To unregister a buffer drains it:
//! from the first call on, requests that name it are refused with [`Status::Invalid`] instead of being offered to the
//! driver, and when the last one at the driver has completed, the buffer is gone from the queue. Later bios with its id
//! are refused by the driver, which finds no memory behind it.
//!
//! Nothing is counted per I/O. Requests in flight are few and in one table, and are looked at while a buffer drains.

use std::sync::Arc;

use blkyard_mem::{BufferId, Region, RegionTable, RegisteredBuffer, Segment};

use super::HwQueue;
use crate::Status;
use crate::driver::Driver;
use crate::request::{RequestState, RequestTable};

impl<D> HwQueue<D> {
    /// Has later bios name a registered buffer in the queue's memory. False if its region is not there: see
    /// [`HwQueue::set_memory`]. The queue need not be idle.
    pub fn add_buffer<Cx: ?Sized>(&mut self, cx: &mut Cx, buffer: &Arc<RegisteredBuffer>) -> bool
    where
        D: Driver<Cx>,
    {
        let is_added = Arc::make_mut(&mut self.memory).add_buffer(buffer);
        if is_added {
            // One that drains is used again.
            self.draining.retain(|draining| *draining != buffer.id());
            self.driver.add_buffer(cx, &self.memory, buffer);
        }
        is_added
    }

    /// Unregisters a buffer from this queue. True once it is gone. Until then requests that name it are at the driver:
    /// the owner runs the queue, and calls this again.
    pub fn remove_buffer<Cx: ?Sized>(&mut self, cx: &mut Cx, id: BufferId) -> bool
    where
        D: Driver<Cx>,
    {
        if self.is_any_in_flight(|segment| BufferId::of(segment) == Some(id)) {
            if !self.draining.contains(&id) {
                self.draining.push(id);
            }
            // Requests are looked at before they are offered.
            self.slow_path = true;
            return false;
        }
        self.draining.retain(|draining| *draining != id);
        self.absent.retain(|absent| absent.id() != id);
        if Arc::make_mut(&mut self.memory).remove_buffer(id).is_some() {
            self.driver.remove_buffer(cx, id);
        }
        true
    }

    /// Adds a region to the memory that segments point into, unless it is there. The queue need not be idle.
    pub fn add_region<Cx: ?Sized>(&mut self, cx: &mut Cx, region: &Arc<Region>)
    where
        D: Driver<Cx>,
    {
        if self.region_number(region).is_none() {
            Arc::make_mut(&mut self.memory).insert(Arc::clone(region));
            self.driver.change_memory(cx, &self.memory);
        }
    }

    /// Removes a region, whose buffers are unregistered. True once it is gone. Until then requests that name it are in
    /// flight: the owner runs the queue, and calls this again. Later bios that name its number are refused, or reach
    /// the region that has the number then.
    pub fn remove_region<Cx: ?Sized>(&mut self, cx: &mut Cx, region: &Arc<Region>) -> bool
    where
        D: Driver<Cx>,
    {
        let Some(number) = self.region_number(region) else { return true };
        if self.is_any_in_flight(|segment| segment.region == number) {
            return false;
        }
        Arc::make_mut(&mut self.memory).remove(number);
        self.driver.change_memory(cx, &self.memory);
        true
    }

    fn region_number(&self, region: &Arc<Region>) -> Option<u32> {
        self.memory.iter().find(|(_, known)| Arc::ptr_eq(known, region)).map(|(number, _)| number)
    }

    /// Whether any request that was made and not completed has such a segment.
    fn is_any_in_flight(&self, is: impl Fn(Segment) -> bool) -> bool {
        let RequestTable { requests, bios, .. } = &self.table;
        requests.iter().any(|request| request.state() != RequestState::Idle && bios.segments(request).any(&is))
    }

    /// Has the driver prepare the buffers of new memory: its own, those of the memory before, and those that were
    /// registered earlier and had no region there. A queue without memory for a while keeps its buffers.
    pub(super) fn keep_buffers<Cx: ?Sized>(&mut self, cx: &mut Cx, memory: &mut Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        let known: Vec<_> = self.memory.buffers().cloned().chain(self.absent.drain(..)).collect();
        if !known.is_empty() {
            let table = Arc::make_mut(memory);
            self.absent.extend(known.into_iter().filter(|buffer| !table.add_buffer(buffer)));
        }
        for buffer in memory.buffers() {
            self.driver.add_buffer(cx, memory, buffer);
        }
    }

    /// Refuses requests that wait for the driver and name a buffer that drains.
    #[cold]
    pub(super) fn refuse_draining(&mut self, now_ns: u64) {
        let HwQueue { dispatch, table, done, draining, refused, .. } = self;
        dispatch.retain(|number| {
            if !names_any(table, number, draining) {
                return true;
            }
            let request = &mut table.requests[usize::from(number)];
            request.look.set_state(RequestState::InFlight);
            request.start_ns = now_ns;
            done.push((number, Status::Invalid));
            *refused += 1;
            false
        });
    }
}

/// Whether any segment of a request names one of these buffers.
fn names_any(table: &RequestTable, number: u16, ids: &[BufferId]) -> bool {
    let mut segments = table.bios.segments(&table.requests[usize::from(number)]);
    segments.any(|segment| BufferId::of(segment).is_some_and(|id| ids.contains(&id)))
}
