//! The lanes of the daemon, and the rule by which queues live on them.
//!
//! Each export has its queues spread evenly, beginning where those of the one before ended, unless it names lanes of
//! its own. Those on one lane share a hardware queue. All are on one lane where a scheduler orders them, or where the
//! device has too few queues.
//!
//! The rule holds for any number of lanes, and for any scheduler, so both can change while guests do I/O: only queues
//! whose place changes move, one after another, and each goes on where it stood. A hardware queue moves whole where
//! that does; else its virtqueues leave it one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use blkyard::DeviceQueue;
use blkyard::spec::SpecError;
use blkyard_export::{DetachedVirtqueue, PartError, VirtqueueMover, VirtqueuePoller};
use blkyard_mq::{HwQueue, IdlePolicy, QueueMap};
use blkyard_os::{LaneConfig, LaneError, LaneThread, Lanes, Moves};

/// Lanes of one daemon. More than any machine we know has CPUs that one disk could use.
pub const LANES_MAX: u64 = 256;
/// How long a virtqueue may take to be drained before it stays at its hardware queue. A guest gives up on a request
/// after thirty seconds, and should find its queue fetching again before.
const PART_MAX: Duration = Duration::from_secs(10);

/// What one export asks of the lanes.
#[derive(Clone, Debug)]
pub struct Share {
    /// The export, for messages.
    pub name: String,
    /// How many queues it has.
    pub queues: usize,
    /// The lanes they live on, in turn; spread evenly if none are named.
    pub named: Option<Vec<usize>>,
    /// Number of its device.
    pub device: usize,
    /// Queues that its device can have open, for all exports.
    pub device_queues: usize,
    /// Whether the device's scheduler orders by time or place, and so needs all queues on one lane: on the first that
    /// is named.
    pub orders: bool,
}

/// The lane of each queue, export by export, with so many lanes.
///
/// # Errors
/// An export names a lane that there is not.
pub fn deal(shares: &[Share], lanes: usize) -> Result<Vec<usize>, SpecError> {
    let mut places = Vec::new();
    let mut used = BTreeMap::<usize, usize>::new();
    for (number, share) in shares.iter().enumerate() {
        // Where the queues so far end, so that small exports do not all share the first lane.
        let first = places.len();
        let map = QueueMap::even(share.queues, lanes);
        let spread = |queue: usize| match &share.named {
            Some(named) => named[queue % named.len()],
            None => (map.queue_of(queue) + first) % lanes,
        };
        let wanted = (0..share.queues).map(spread).collect::<BTreeSet<_>>().len();
        // Each export after it needs one as well.
        let others = shares[number + 1..].iter().filter(|other| other.device == share.device).count();
        let used = used.entry(share.device).or_default();
        let is_one = share.orders || wanted > share.device_queues.saturating_sub(*used + others);
        *used += if is_one { 1 } else { wanted };
        for queue in 0..share.queues {
            let lane = match &share.named {
                Some(named) if is_one => named[0],
                None if is_one => number % lanes,
                _ => spread(queue),
            };
            if lane >= lanes {
                let cause = format!("no lane {lane}");
                let cure = format!("name lanes from 0 to {}, or run more lanes", lanes - 1);
                return Err(SpecError::new(&share.name, cause, cure));
            }
            places.push(lane);
        }
    }
    Ok(places)
}

/// Why queues were not placed anew, or only in part.
#[derive(Debug, thiserror::Error)]
pub enum SetLanesError {
    /// The number does not do, a queue does not come to rest, or the device has no more queues.
    #[error(transparent)]
    Refused(#[from] SpecError),
    /// A lane cannot be started, or has ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
}

/// Makes a hardware queue of an export's device, for so many virtqueues.
pub(crate) type MakeHwQueue = Box<dyn Fn(usize) -> Result<HwQueue<DeviceQueue>, String> + Send>;

/// The lanes, running, and the places of all queues on them. A queue has its place from the start, and is served there
/// only while a front-end needs it (see [`blkyard_export::on_demand_queue`]).
pub struct ServedLanes {
    lanes: Lanes<VirtqueuePoller<DeviceQueue>>,
    exports: Vec<PlacedExport>,
    /// Those that live, each a poller of its lane.
    hw_queues: Vec<PlacedHwQueue>,
}

struct PlacedExport {
    share: Share,
    /// Unset until the export is bound.
    make: Option<MakeHwQueue>,
    queues: Vec<PlacedQueue>,
}

/// The place of a queue, whether it is served there now or not.
struct PlacedQueue {
    lane: usize,
    /// Unset before it is known.
    mover: Option<VirtqueueMover>,
}

/// A hardware queue that lives.
struct PlacedHwQueue {
    /// Its number among the pollers of the lanes.
    number: u32,
    export: usize,
    lane: usize,
    /// The virtqueues it was made for.
    capacity: usize,
    /// Whether it was made with the tags of one virtqueue, for a scheduler that orders.
    is_narrow: bool,
    /// The numbers of the queues it serves.
    queues: Vec<usize>,
}

impl ServedLanes {
    /// Starts so many lanes for these exports, and places their queues; none is served yet.
    ///
    /// # Errors
    /// An export names a lane that there is not, or a lane cannot be started.
    pub fn start(
        count: usize,
        shares: Vec<Share>,
        config: impl Fn(usize) -> LaneConfig + Send + Sync + 'static,
    ) -> Result<ServedLanes, SetLanesError> {
        let mut places = deal(&shares, count)?.into_iter();
        let place = |share: Share| {
            let queues = places.by_ref().take(share.queues).map(|lane| PlacedQueue { lane, mover: None }).collect();
            PlacedExport { share, make: None, queues }
        };
        let exports = shares.into_iter().map(place).collect();
        Ok(ServedLanes { lanes: Lanes::start(count, config)?, exports, hw_queues: Vec::new() })
    }

    /// Says how the hardware queues of an export are made.
    pub(crate) fn make_by(&mut self, export: usize, make: MakeHwQueue) {
        self.exports[export].make = Some(make);
    }

    /// Says how a queue is moved. To be known before it is served.
    pub fn move_by(&mut self, export: usize, queue: usize, mover: VirtqueueMover) {
        self.exports[export].queues[queue].mover = Some(mover);
    }

    /// Has a virtqueue served from now on, on its lane, by the hardware queue that its export has there.
    ///
    /// # Errors
    /// The device has no more queues, the lane is full, or has ended: object, cause, cure.
    pub fn open(&mut self, export: usize, queue: usize, virtqueue: DetachedVirtqueue) -> Result<(), String> {
        // One that could not be removed before serves nothing; should it stay once more, it is passed over.
        let _ = self.remove_unused();
        let lane = self.exports[export].queues[queue].lane;
        let of_export = |hw: &PlacedHwQueue| hw.export == export && !hw.queues.is_empty();
        if let Some(hw) = self.hw_queues.iter().position(|hw| of_export(hw) && hw.lane == lane) {
            return self.adopt(hw, queue, virtqueue).map_err(|error| error.to_string());
        }
        let planned = self.exports[export].queues.iter().filter(|place| place.lane == lane).count();
        match self.make(export, planned) {
            Ok((hw, capacity)) => {
                self.admit(export, queue, lane, (hw, capacity), virtqueue).map_err(|error| error.to_string())
            }
            // The device has no more: another lane has one.
            Err(why) => {
                let other = self.hw_queues.iter().position(of_export).ok_or(why)?;
                self.exports[export].queues[queue].lane = self.hw_queues[other].lane;
                self.adopt(other, queue, virtqueue).map_err(|error| error.to_string())
            }
        }
    }

    /// Has a queue, which is at rest, served no more; its place stays.
    ///
    /// # Errors
    /// The lane does not turn, or has ended.
    pub fn close(&mut self, export: usize, queue: usize) -> Result<(), LaneError> {
        let serves = |hw: &PlacedHwQueue| hw.export == export && hw.queues.contains(&queue);
        let Some(index) = self.hw_queues.iter().position(serves) else { return Ok(()) };
        self.hw_queues[index].queues.retain(|other| *other != queue);
        self.remove_unused()
    }

    /// A hardware queue of an export's device for these virtqueues, and how many it is made for.
    fn make(&self, export: usize, queues: usize) -> Result<(HwQueue<DeviceQueue>, usize), String> {
        let PlacedExport { share, make, .. } = &self.exports[export];
        let make = make.as_ref().ok_or_else(|| format!("{}: it is not served yet; try again", share.name))?;
        // Where it cannot be replaced by a larger one it is made for all that may come.
        let capacity = if share.device_queues < usize::MAX { share.queues } else { queues };
        Ok((make(capacity)?, capacity))
    }

    /// Has a new hardware queue live on a lane, with its first virtqueue.
    fn admit(
        &mut self,
        export: usize,
        queue: usize,
        lane: usize,
        (hw, capacity): (HwQueue<DeviceQueue>, usize),
        virtqueue: DetachedVirtqueue,
    ) -> Result<(), LaneError> {
        let number = self.lanes.admit(lane, move || VirtqueuePoller::of_detached(hw, virtqueue))?;
        let is_narrow = self.exports[export].share.orders;
        self.hw_queues.push(PlacedHwQueue { number, export, lane, capacity, is_narrow, queues: vec![queue] });
        Ok(())
    }

    /// Has a hardware queue serve one more virtqueue.
    fn adopt(&mut self, hw: usize, queue: usize, virtqueue: DetachedVirtqueue) -> Result<(), PartError> {
        let PlacedHwQueue { export, queues, .. } = &mut self.hw_queues[hw];
        let member = queues.first().and_then(|first| self.exports[*export].queues[*first].mover.as_ref());
        member.ok_or(PartError::Gone)?.adopt(virtqueue)?;
        queues.push(queue);
        Ok(())
    }

    /// Takes hardware queues off their lanes that serve nothing.
    fn remove_unused(&mut self) -> Result<(), LaneError> {
        let ServedLanes { lanes, hw_queues, .. } = self;
        let mut removed = Ok(());
        hw_queues.retain(|hw| {
            let result = if hw.queues.is_empty() { lanes.remove(hw.number).map(|_| ()) } else { return true };
            let stays = matches!(result, Err(LaneError::Restless { .. }));
            if result.is_err() {
                removed = result;
            }
            stays
        });
        removed
    }

    /// Makes a place for one more queue of an export while all serve, and says its number: on that lane which is the
    /// next one's of those the export names, or where the fewest live; where its others live if a scheduler orders them
    /// or the device has a bounded number of queues. Those that live already stay; when the number of lanes changes,
    /// all are dealt by the rule.
    pub fn add(&mut self, export: usize) -> usize {
        let PlacedExport { share, queues, .. } = &self.exports[export];
        let (number, crowds) = (queues.len(), self.places());
        let crowd = |lane: &usize| crowds.iter().filter(|place| *place == lane).count();
        let with_others = share.orders || share.device_queues < usize::MAX;
        let lane = match &share.named {
            _ if with_others => queues.iter().map(|place| place.lane).min_by_key(crowd),
            Some(named) => Some(named[number % named.len()]),
            None => (0..self.lanes.threads().len()).min_by_key(crowd),
        };
        let PlacedExport { share, queues, .. } = &mut self.exports[export];
        queues.push(PlacedQueue { lane: lane.unwrap_or(0), mover: None });
        share.queues += 1;
        number
    }

    /// Takes back the place of an export that was made last, which no queue has had.
    pub fn take_back(&mut self, export: usize) {
        let PlacedExport { share, queues, .. } = &mut self.exports[export];
        queues.pop();
        share.queues = queues.len();
    }

    /// Changes the number of lanes while they serve. Returns when every queue has the place that it would have if there
    /// had been so many from the start, and lanes that are too many have ended. Only queues that are served move.
    ///
    /// # Errors
    /// The number is out of bounds, or an export names a lane that there would not be: nothing has changed. A queue
    /// does not come to rest, or a lane cannot be started or has ended: what has moved stays there, and trying again
    /// does what is left.
    pub fn set_lanes(&mut self, count: u64) -> Result<Moves, SetLanesError> {
        if !(1..=LANES_MAX).contains(&count) {
            let cause = format!("{count} is out of range");
            return Err(SpecError::new("lanes", cause, format!("give a number from 1 to {LANES_MAX}")).into());
        }
        let count = count as usize;
        let places = deal(&self.shares(), count)?;
        self.carry(count.max(self.lanes.threads().len()), None)?;
        let moves = self.place(&places)?;
        self.carry(count, None)?;
        Ok(moves)
    }

    /// Notes that the scheduler of a device orders its queues, or does not, and places them by the rule.
    ///
    /// # Errors
    /// A queue does not come to rest, the device has no more queues, or a lane has ended: what has moved stays there,
    /// and trying again does what is left.
    pub fn set_orders(&mut self, device: usize, orders: bool) -> Result<Moves, SetLanesError> {
        let of_device = self.exports.iter_mut().filter(|export| export.share.device == device);
        of_device.for_each(|export| export.share.orders = orders);
        let places = deal(&self.shares(), self.lanes.threads().len())?;
        self.place(&places)
    }

    fn shares(&self) -> Vec<Share> {
        self.exports.iter().map(|export| export.share.clone()).collect()
    }

    /// Changes the number of lanes, and has one hardware queue move there. The others stay.
    fn carry(&mut self, count: usize, moved: Option<(usize, usize)>) -> Result<Moves, SetLanesError> {
        let lane = |(index, hw): (usize, &PlacedHwQueue)| match moved {
            Some((moved, lane)) if moved == index => (hw.number, lane),
            _ => (hw.number, hw.lane),
        };
        let places: BTreeMap<u32, usize> = self.hw_queues.iter().enumerate().map(lane).collect();
        let moves = self.lanes.deal(count, |number| places[&(number as u32)]);
        let moves = moves.map_err(|error| match error {
            // Those who read it know queues by their export.
            LaneError::Restless { name, poller, limit } => {
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays on {name}, since its device has a request that \
                     does not end"
                );
                let cure = "queues that have moved stay on their new lanes; set the same again when that request has completed";
                SpecError::new(self.name_of(poller), cause, cure).into()
            }
            error => SetLanesError::from(error),
        })?;
        if let Some((index, lane)) = moved {
            self.hw_queues[index].lane = lane;
        }
        Ok(moves)
    }

    /// Has every queue live on its lane of these, export by export, and share a hardware queue with those of its export
    /// there.
    fn place(&mut self, places: &[usize]) -> Result<Moves, SetLanesError> {
        let was = self.places();
        let mut places = places.iter().copied();
        let mut wanted = Vec::new();
        for export in 0..self.exports.len() {
            let lanes: Vec<usize> = places.by_ref().take(self.exports[export].queues.len()).collect();
            let mut by_lane = BTreeMap::<usize, Vec<usize>>::new();
            for (queue, lane) in lanes.into_iter().enumerate() {
                if self.hw_queues.iter().any(|hw| hw.export == export && hw.queues.contains(&queue)) {
                    by_lane.entry(lane).or_default().push(queue);
                } else {
                    self.exports[export].queues[queue].lane = lane;
                }
            }
            let now = self.hw_queues.iter().filter(|hw| hw.export == export).count();
            wanted.push((by_lane.len() as isize - now as isize, export, by_lane));
        }
        // A device may have as many queues as are in use: first those exports that need fewer.
        wanted.sort();
        let mut longest = Duration::ZERO;
        for (_, export, by_lane) in wanted {
            let placed = self.place_export(export, &by_lane, &mut longest);
            let removed = self.remove_unused();
            // No further: each export of a device that hangs would take its time, and all control waits meanwhile.
            placed?;
            removed?;
        }
        let served = |place: usize| self.is_served(place);
        let moved = was.iter().zip(self.places()).enumerate();
        let count = moved.filter(|(place, (was, is))| *was != is && served(*place)).count();
        Ok(Moves { count, longest })
    }

    /// Whether the queue of this place, counted export by export, is served.
    fn is_served(&self, place: usize) -> bool {
        let mut first = 0;
        self.exports.iter().enumerate().any(|(export, placed)| {
            let queue = place.wrapping_sub(first);
            first += placed.queues.len();
            self.hw_queues.iter().any(|hw| hw.export == export && hw.queues.contains(&queue))
        })
    }

    /// The same for the served queues of one export, given by lane.
    fn place_export(
        &mut self,
        export: usize,
        by_lane: &BTreeMap<usize, Vec<usize>>,
        longest: &mut Duration,
    ) -> Result<(), SetLanesError> {
        // Numbers of the hardware queues that stay, or move whole, by lane.
        let mut homes = BTreeMap::<usize, u32>::new();
        for hw in self.hw_queues.iter().filter(|hw| hw.export == export && by_lane.contains_key(&hw.lane)) {
            homes.entry(hw.lane).or_insert(hw.number);
        }
        for (lane, queues) in by_lane {
            if homes.contains_key(lane) {
                continue;
            }
            let is_free = |hw: &PlacedHwQueue| hw.export == export && !homes.values().any(|home| *home == hw.number);
            let common = |hw: &PlacedHwQueue| hw.queues.iter().filter(|queue| queues.contains(queue)).count();
            let free = self.hw_queues.iter().enumerate().filter(|(_, hw)| is_free(hw));
            let Some((index, hw)) = free.max_by_key(|(_, hw)| common(hw)) else { continue };
            homes.insert(*lane, hw.number);
            let moves = self.carry(self.lanes.threads().len(), Some((index, *lane)))?;
            *longest = (*longest).max(moves.longest);
            self.note_lanes();
        }
        for (lane, queues) in by_lane {
            // It may have lost its last virtqueue to another lane.
            self.remove_unused()?;
            let mut home = homes.get(lane).copied().filter(|home| self.hw_queues.iter().any(|hw| hw.number == *home));
            let orders = self.exports[export].share.orders;
            let capacity = |hw: &PlacedHwQueue| if hw.is_narrow && !orders { 1 } else { hw.capacity };
            let capacity = self.hw_queues.iter().find(|hw| Some(hw.number) == home).map_or(0, capacity);
            let mut new = None;
            if capacity < queues.len() {
                match self.make(export, queues.len()) {
                    Ok(made) => (home, new) = (None, Some(made)),
                    // It serves them all the same, with what it has.
                    Err(_) if home.is_some() => {}
                    Err(why) => {
                        let cure = "queues that have moved stay on their new lanes; give the device more queues, and set the \
                                    same again";
                        return Err(SpecError::new(&self.exports[export].share.name, why, cure).into());
                    }
                }
            }
            for queue in queues {
                let is_home = |hw: &PlacedHwQueue| Some(hw.number) == home && hw.queues.contains(queue);
                if !self.hw_queues.iter().any(is_home) {
                    let begin = Instant::now();
                    home = self.transfer(export, *queue, *lane, home, &mut new)?.or(home);
                    *longest = (*longest).max(begin.elapsed());
                }
            }
        }
        Ok(())
    }

    /// Has a virtqueue leave its hardware queue for that of this number, or for the new one; says the number, if its
    /// session has not ended meanwhile.
    fn transfer(
        &mut self,
        export: usize,
        queue: usize,
        lane: usize,
        home: Option<u32>,
        new: &mut Option<(HwQueue<DeviceQueue>, usize)>,
    ) -> Result<Option<u32>, SetLanesError> {
        let name = format!("{}, queue {queue}", self.exports[export].share.name);
        let failed = |error: PartError| match error {
            PartError::Undrained(limit) => {
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays where it is, since its device has a request \
                     that does not end"
                );
                let cure = "queues that have moved stay on their new lanes; set the same again when that request has completed";
                SpecError::new(&name, cause, cure)
            }
            error => SpecError::new(&name, error, "see the messages of the daemon"),
        };
        // Before it leaves: there is a place for it.
        let living = self.hw_queues.iter().filter(|hw| hw.lane == lane).count();
        let pollers_max = self.lanes.threads()[lane].ring().pollers_max();
        if new.is_some() && living >= pollers_max {
            let cause = format!("lane {lane} has {pollers_max} hardware queues, its maximum");
            return Err(SpecError::new(&name, cause, "run more lanes").into());
        }
        let mover = self.exports[export].queues[queue].mover.clone();
        let virtqueue = match mover.ok_or(PartError::Gone).and_then(|mover| mover.part(PART_MAX)) {
            Err(PartError::Gone) => {
                // Its session ends: it is at rest, and closed next. What served it is needed no longer.
                self.forget(export, queue);
                self.exports[export].queues[queue].lane = lane;
                return Ok(None);
            }
            parted => parted.map_err(failed)?,
        };
        self.forget(export, queue);
        match (self.hw_queues.iter().position(|hw| Some(hw.number) == home), new.take()) {
            (_, Some(made)) => self.admit(export, queue, lane, made, virtqueue)?,
            (Some(index), None) => self.adopt(index, queue, virtqueue).map_err(failed)?,
            // The session ends: the virtqueue is at rest, and closed next.
            (None, None) => return Ok(None),
        }
        self.exports[export].queues[queue].lane = lane;
        let number = self.hw_queues.iter().find(|hw| hw.export == export && hw.queues.contains(&queue));
        Ok(number.map(|hw| hw.number))
    }

    /// No hardware queue serves this virtqueue any more.
    fn forget(&mut self, export: usize, queue: usize) {
        let of_export = self.hw_queues.iter_mut().filter(|hw| hw.export == export);
        of_export.for_each(|hw| hw.queues.retain(|other| *other != queue));
    }

    /// The places of queues that are served are those of their hardware queues.
    fn note_lanes(&mut self) {
        for hw in &self.hw_queues {
            hw.queues.iter().for_each(|queue| self.exports[hw.export].queues[*queue].lane = hw.lane);
        }
    }

    /// Changes how long lanes look for work before they sleep, microseconds.
    ///
    /// # Errors
    /// A lane has ended by itself.
    pub fn set_spin_us(&mut self, spin_us: u64) -> Result<(), LaneError> {
        self.lanes.set_policy(IdlePolicy { spin_ns: spin_us * 1000 })
    }

    /// How long lanes look for work before they sleep, microseconds.
    pub fn spin_us(&self) -> u64 {
        self.lanes.config(0).policy.spin_ns / 1000
    }

    /// What people call a poller that lives.
    fn name_of(&self, number: u32) -> String {
        let Some(hw) = self.hw_queues.iter().find(|hw| hw.number == number) else {
            return format!("queue {number}");
        };
        let mut queues = hw.queues.clone();
        queues.sort_unstable();
        let plural = if queues.len() == 1 { "" } else { "s" };
        let numbers: Vec<_> = queues.iter().map(ToString::to_string).collect();
        format!("{}, queue{plural} {}", self.exports[hw.export].share.name, numbers.join(", "))
    }

    /// How a lane is made.
    pub fn config(&self, lane: usize) -> LaneConfig {
        self.lanes.config(lane)
    }

    /// The lanes, by their number.
    pub fn threads(&self) -> &[LaneThread<VirtqueuePoller<DeviceQueue>>] {
        self.lanes.threads()
    }

    /// The numbers of the queues of an export that share a hardware queue, or will once they are served; the first is
    /// the one that the hardware queue counts with.
    pub fn hardware_queues(&self, export: usize) -> Vec<Vec<usize>> {
        let living = self.hw_queues.iter().filter(|hw| hw.export == export);
        let mut groups: Vec<(usize, Vec<usize>)> = living.map(|hw| (hw.lane, hw.queues.clone())).collect();
        for (queue, place) in self.exports[export].queues.iter().enumerate() {
            if groups.iter().any(|(_, queues)| queues.contains(&queue)) {
                continue;
            }
            match groups.iter_mut().find(|(lane, _)| *lane == place.lane) {
                Some((_, queues)) => queues.push(queue),
                None => groups.push((place.lane, vec![queue])),
            }
        }
        groups.into_iter().map(|(_, queues)| queues).collect()
    }

    /// The lane of each queue, export by export.
    pub fn places(&self) -> Vec<usize> {
        self.exports.iter().flat_map(|export| &export.queues).map(|place| place.lane).collect()
    }

    /// Waits until all queues are retired and the lanes have ended.
    ///
    /// # Errors
    /// One of them panicked.
    pub fn join(self) -> Result<(), LaneError> {
        self.lanes.join()
    }
}

impl fmt::Debug for ServedLanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedLanes").field("lanes", &self.lanes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard::Device;
    use blkyard_export::{QueueShare, VirtqueueRemote, queue_pair};
    use blkyard_mq::{HwQueueConfig, QueueKind};
    use blkyard_virtio::SerialId;
    use std::sync::Arc;

    fn share(queues: usize, named: Option<Vec<usize>>) -> Share {
        Share { name: format!("of {queues}"), queues, named, device: 0, device_queues: usize::MAX, orders: false }
    }

    #[test]
    fn queues_are_dealt_evenly_and_the_next_export_begins_where_the_last_ended() {
        let shares = [share(4, None), share(1, None), share(2, None)];
        assert_eq!(deal(&shares, 1).unwrap(), [0; 7]);
        assert_eq!(deal(&shares, 2).unwrap(), [0, 0, 1, 1, 0, 1, 0]);
        assert_eq!(deal(&shares, 4).unwrap(), [0, 1, 2, 3, 0, 1, 2]);
    }

    #[test]
    fn lanes_that_are_named_are_taken_in_turn_and_must_be_there() {
        let shares = [share(1, None), share(3, Some(vec![2, 0]))];
        assert_eq!(deal(&shares, 3).unwrap(), [0, 2, 0, 2]);
        let error = deal(&shares, 2).unwrap_err().to_string();
        assert!(error.contains("of 3") && error.contains("no lane 2") && error.contains("0 to 1"), "{error}");
    }

    /// Lanes on which every queue is served.
    fn served(count: usize, shares: Vec<Share>) -> (ServedLanes, Vec<VirtqueueRemote>) {
        let queues: Vec<usize> = shares.iter().map(|share| share.queues).collect();
        let mut lanes = ServedLanes::start(count, shares, |_| LaneConfig::default()).unwrap();
        let all =
            queues.into_iter().enumerate().flat_map(|(export, queues)| (0..queues).map(move |queue| (export, queue)));
        let remotes = all.map(|(export, queue)| open(&mut lanes, export, queue)).collect();
        (lanes, remotes)
    }

    fn open(lanes: &mut ServedLanes, export: usize, queue: usize) -> VirtqueueRemote {
        let (remote, port) = queue_pair();
        lanes.make_by(
            export,
            Box::new(|queues| {
                let device = Device::open("ram:1M").unwrap();
                let config = HwQueueConfig { depth: 8 * queues, ..HwQueueConfig::default() };
                let driver = device.queue(QueueKind::Default, config.depth).unwrap();
                Ok(HwQueue::new(driver, Arc::new(device.info().clone()), config))
            }),
        );
        lanes.move_by(export, queue, remote.mover());
        let share = QueueShare { bios: 8, depth: 8 };
        let virtqueue = DetachedVirtqueue::new(SerialId::new("x").unwrap(), port, share, 0).unwrap();
        lanes.open(export, queue, virtqueue).unwrap();
        remote
    }

    #[test]
    fn a_queue_that_is_added_lives_where_fewest_do_and_is_dealt_with_its_export() {
        let (mut lanes, mut remotes) = served(2, vec![share(3, None), share(1, Some(vec![1, 0])), share(1, None)]);
        assert_eq!(lanes.places(), [0, 0, 1, 1, 0]);
        for (export, places) in
            [(0, vec![0, 0, 1, 1, 1, 0]), (1, vec![0, 0, 1, 1, 1, 0, 0]), (0, vec![0, 0, 1, 1, 1, 1, 0, 0])]
        {
            let queue = lanes.add(export);
            remotes.push(open(&mut lanes, export, queue));
            assert_eq!(lanes.places(), places);
        }
        assert_eq!(
            [0, 1].map(|export| lanes.hardware_queues(export)),
            [vec![vec![0, 1], vec![2, 3, 4]], vec![vec![0], vec![1]]]
        );
        lanes.set_lanes(5).unwrap();
        assert_eq!(lanes.places(), deal(&[share(5, None), share(2, Some(vec![1, 0])), share(1, None)], 5).unwrap());
        drop(remotes);
        lanes.join().unwrap();
    }

    #[test]
    fn the_number_of_lanes_changes_and_each_queue_lives_where_the_rule_says() {
        let shares = vec![share(4, None), share(3, None)];
        let (mut lanes, remotes) = served(2, shares.clone());
        for count in [4, 1, 3, 8, 2] {
            let before = lanes.places();
            let moves = lanes.set_lanes(count).unwrap();
            let places = deal(&shares, count as usize).unwrap();
            assert_eq!((lanes.threads().len(), &lanes.places()), (count as usize, &places));
            assert_eq!(moves.count, before.iter().zip(&places).filter(|(was, is)| was != is).count());
        }
        drop(remotes);
        lanes.join().unwrap();
    }

    #[test]
    fn places_without_a_poller_change_with_the_lanes() {
        let shares = vec![share(4, None), share(3, None)];
        let mut lanes = ServedLanes::start(2, shares.clone(), |_| LaneConfig::default()).unwrap();
        let first = 4;
        let remote = open(&mut lanes, 1, 0);
        for count in [4, 1, 3] {
            let was = lanes.places()[first];
            let moves = lanes.set_lanes(count).unwrap();
            assert_eq!(lanes.places(), deal(&shares, count as usize).unwrap());
            assert_eq!(moves.count, usize::from(lanes.places()[first] != was), "one queue is served");
        }
        lanes.close(1, 0).unwrap();
        assert!(lanes.hw_queues.is_empty());
        lanes.close(1, 0).unwrap();
        let again = open(&mut lanes, 1, 0);
        drop((remote, again));
        lanes.join().unwrap();
    }

    #[test]
    fn hardware_queue_is_called_by_its_export_and_its_queues() {
        let (lanes, remotes) = served(2, vec![share(2, None), share(3, None)]);
        let names: Vec<_> = (0..4).map(|number| lanes.name_of(number)).collect();
        assert_eq!(names, ["of 2, queue 0", "of 2, queue 1", "of 3, queues 0, 1", "of 3, queue 2"]);
        drop(remotes);
        lanes.join().unwrap();
    }

    /// The hardware queues of an export: the lane of each, its capacity and its queues, by their first queue.
    fn shape(lanes: &ServedLanes, export: usize) -> Vec<(usize, usize, Vec<usize>)> {
        let of_export = lanes.hw_queues.iter().filter(|hw| hw.export == export);
        let mut shape: Vec<_> = of_export
            .map(|hw| {
                let mut queues = hw.queues.clone();
                queues.sort_unstable();
                (hw.lane, hw.capacity, queues)
            })
            .collect();
        shape.sort_by(|one, other| one.2.cmp(&other.2));
        shape
    }

    #[test]
    fn queues_of_an_export_share_on_each_lane() {
        let (mut lanes, remotes) = served(2, vec![share(4, None)]);
        assert_eq!(shape(&lanes, 0), [(0, 2, vec![0, 1]), (1, 2, vec![2, 3])]);
        lanes.set_lanes(4).unwrap();
        assert_eq!(
            shape(&lanes, 0).iter().map(|(lane, _, queues)| (*lane, queues[0])).collect::<Vec<_>>(),
            [(0, 0), (1, 1), (2, 2), (3, 3)]
        );
        lanes.set_lanes(1).unwrap();
        assert_eq!(shape(&lanes, 0), [(0, 4, vec![0, 1, 2, 3])], "it has room for all");
        lanes.set_lanes(2).unwrap();
        assert_eq!(lanes.set_orders(0, true).unwrap().count, 2);
        assert_eq!(shape(&lanes, 0), [(0, 4, vec![0, 1, 2, 3])]);
        lanes.set_orders(0, false).unwrap();
        assert_eq!(shape(&lanes, 0), [(0, 4, vec![0, 1]), (1, 2, vec![2, 3])]);
        drop(remotes);
        lanes.join().unwrap();
    }

    #[test]
    fn device_with_few_queues_bounds_the_lanes_of_its_exports() {
        let few = |queues, device_queues| Share { device_queues, ..share(queues, None) };
        assert_eq!(deal(&[few(4, 1)], 2).unwrap(), [0; 4]);
        assert_eq!(deal(&[few(4, 2)], 2).unwrap(), [0, 0, 1, 1]);
        assert_eq!(deal(&[few(4, 3), few(2, 3)], 2).unwrap(), [0, 0, 1, 1, 1, 1], "the second has one left");
        assert_eq!(deal(&[few(2, 2), few(2, 2)], 2).unwrap(), [0, 0, 1, 1], "one is kept for the second");
        let other = Share { device: 1, ..few(2, 2) };
        assert_eq!(deal(&[few(2, 2), other], 2).unwrap(), [0, 1, 0, 1]);
        let (mut lanes, remotes) = served(2, vec![few(4, 2)]);
        for count in [3, 1, 2, 4, 2] {
            lanes.set_lanes(count).unwrap();
            assert!(shape(&lanes, 0).len() <= 2, "{:?}", shape(&lanes, 0));
        }
        drop(remotes);
        lanes.join().unwrap();
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused_and_change_nothing() {
        let (mut lanes, remotes) = served(2, vec![share(2, Some(vec![0, 1]))]);
        for (count, words) in [(0, "1 to 256"), (257, "1 to 256"), (1, "no lane 1")] {
            let error = lanes.set_lanes(count).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert_eq!((lanes.threads().len(), lanes.places()), (2, vec![0, 1]));
        }
        drop(remotes);
        lanes.join().unwrap();
    }
}
