//! The lanes of the daemon, and the assignment of queues to hardware queues and lanes.
//!
//! [The rule](super::placement) gives each queue a lane; queues of an export on the same lane share a hardware queue.
//! The rule works for any number of lanes and any scheduler, so both can change while guests do I/O. Only queues whose
//! lane changes move, one after another, and each continues from the same position. If all client queues of a hardware
//! queue have the same new lane, the hardware queue moves as a whole; otherwise its client queues leave one by one. A
//! queue that is not served only has an assigned lane.
//!
//! Locks: the lock of an export is held while its queues are added, moved or removed. This waits for lanes, each time
//! for a bounded time, and affects no other export. All other locks are held briefly, never while waiting for a lane or
//! making a hardware queue: those of the lanes, of the shares, and of the [published state](ServedLanes::seen). They
//! are taken after the lock of an export. A change of a share requires the [change lock](super::ServedDevice::change)
//! of its device.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blkyard::DeviceQueue;
use blkyard::spec::SpecError;
use blkyard_export::{HwQueueSet, PartError};
use blkyard_mq::IdlePolicy;
use blkyard_os::{
    ANSWER_MAX, LaneConfig, LaneError, LaneThread, Lanes, MakePoller, Moves, NodeThreads, NotAdmitted, REST_MAX,
};

use super::placement::{Share, deal};
use super::protocols::{ClientMover, DetachedClient, ServedPoller};

/// Maximum number of lanes of one daemon, above the number of CPUs that one disk can use.
pub const LANES_MAX: u64 = 256;
/// Cure for a change after which only some queues have moved.
const SET_AGAIN: &str =
    "queues that have moved stay on their new lanes; set the same again when that request has completed";

/// Reason why queues were not placed, or only some of them.
#[derive(Debug, thiserror::Error)]
pub enum SetLanesError {
    /// The number is invalid, a queue does not drain, or the device has no more queues.
    #[error(transparent)]
    Refused(#[from] SpecError),
    /// A lane cannot be started, has ended, or does not respond.
    #[error(transparent)]
    Lane(#[from] LaneError),
}

/// Makes a hardware queue of each device of an export for this number of client queues.
pub(crate) type MakeHwQueue = Arc<dyn Fn(usize) -> Result<HwQueueSet<DeviceQueue>, String> + Send + Sync>;

/// The running lanes, and the placement of all queues. A queue has a lane from the start, and is served there only
/// while a front-end needs it (see [`blkyard_export::on_demand_queue`]).
pub struct ServedLanes {
    lanes: Mutex<Lanes<ServedPoller>>,
    /// Make queues on the NUMA nodes of their lanes.
    nodes: NodeThreads,
    exports: Vec<ExportPlacement>,
}

/// One export.
struct ExportPlacement {
    share: Mutex<Share>,
    placed: Mutex<PlacedExport>,
    seen: Mutex<SeenPlaces>,
}

/// The queues of an export, and the hardware queues that serve them.
struct PlacedExport {
    /// Its name, for messages.
    name: String,
    /// Unset until the export is bound.
    make: Option<MakeHwQueue>,
    queues: Vec<PlacedQueue>,
    /// Hardware queues, each a poller of its lane.
    hw_queues: Vec<PlacedHwQueue>,
}

/// Placement of a queue, served or not.
struct PlacedQueue {
    /// Its lane by the rule. A served queue is on the lane of its hardware queue until it moves or is opened again.
    lane: usize,
    /// Unset before the queue is made.
    mover: Option<ClientMover>,
}

/// A running hardware queue.
struct PlacedHwQueue {
    /// Poller number among all lanes.
    number: u32,
    lane: usize,
    /// Number of client queues it was made for.
    capacity: usize,
    /// Whether it was made with the tags of one client queue, for a scheduler that orders.
    is_narrow: bool,
    /// Indexes of the queues it serves.
    queues: Vec<usize>,
}

/// The placement of an export's queues after its last complete change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenPlaces {
    /// The lane of each queue.
    pub lanes: Vec<usize>,
    /// Indexes of the queues that share a hardware queue, or will once they are served. The hardware queue uses
    /// the counters of the first.
    pub hardware_queues: Vec<Vec<usize>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exclusive access to an export's queues during a change. Others see the state before the change.
struct Changing<'a> {
    placed: MutexGuard<'a, PlacedExport>,
    seen: &'a Mutex<SeenPlaces>,
}

impl Deref for Changing<'_> {
    type Target = PlacedExport;

    fn deref(&self) -> &PlacedExport {
        &self.placed
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut PlacedExport {
        &mut self.placed
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let seen = self.placed.seen();
        *lock(self.seen) = seen;
    }
}

impl PlacedExport {
    fn seen(&self) -> SeenPlaces {
        let lanes = (0..self.queues.len()).map(|queue| self.lane_of(queue)).collect();
        let mut groups: Vec<(usize, Vec<usize>)> =
            self.hw_queues.iter().map(|hw| (hw.lane, hw.queues.clone())).collect();
        for (queue, place) in self.queues.iter().enumerate() {
            if self.is_served(queue) {
                continue;
            }
            match groups.iter_mut().find(|(lane, _)| *lane == place.lane) {
                Some((_, queues)) => queues.push(queue),
                None => groups.push((place.lane, vec![queue])),
            }
        }
        SeenPlaces { lanes, hardware_queues: groups.into_iter().map(|(_, queues)| queues).collect() }
    }

    /// The lane of a queue.
    fn lane_of(&self, queue: usize) -> usize {
        let serving = self.hw_queues.iter().find(|hw| hw.queues.contains(&queue));
        serving.map_or(self.queues[queue].lane, |hw| hw.lane)
    }

    fn is_served(&self, queue: usize) -> bool {
        self.hw_queues.iter().any(|hw| hw.queues.contains(&queue))
    }

    /// Assigns lanes to the present queues. Served queues stay on their lane.
    fn plan(&mut self, lanes: &[usize]) {
        self.queues.truncate(lanes.len());
        let known = self.queues.len();
        self.queues.iter_mut().zip(lanes).for_each(|(place, lane)| place.lane = *lane);
        self.queues.extend(lanes.iter().skip(known).map(|lane| PlacedQueue { lane: *lane, mover: None }));
    }

    /// Number of queues assigned to a lane, served or not.
    fn planned(&self, lane: usize) -> usize {
        self.queues.iter().filter(|place| place.lane == lane).count()
    }

    fn index_of(&self, number: u32) -> Option<usize> {
        self.hw_queues.iter().position(|hw| hw.number == number)
    }

    /// Removes this client queue from its hardware queue.
    fn forget(&mut self, queue: usize) {
        self.hw_queues.iter_mut().for_each(|hw| hw.queues.retain(|other| *other != queue));
    }

    /// Name of a hardware queue in messages.
    fn name_of(&self, hw: &PlacedHwQueue) -> String {
        let mut queues = hw.queues.clone();
        queues.sort_unstable();
        let plural = if queues.len() == 1 { "" } else { "s" };
        let numbers: Vec<_> = queues.iter().map(ToString::to_string).collect();
        format!("{}, queue{plural} {}", self.name, numbers.join(", "))
    }

    /// Error text for a hardware queue that does not leave its lane.
    fn stays(&self, hw: &PlacedHwQueue, error: LaneError) -> SetLanesError {
        match error {
            LaneError::Restless { name, limit, .. } => {
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays on {name}, since its device has a request that \
                     does not end"
                );
                SpecError::new(self.name_of(hw), cause, SET_AGAIN).into()
            }
            error => error.into(),
        }
    }
}

impl ServedLanes {
    /// Starts lanes for these exports, and assigns lanes to their queues; no queue is served yet.
    ///
    /// # Errors
    /// An export names a lane that does not exist, or a lane cannot be started.
    pub fn start(
        count: usize,
        shares: Vec<Share>,
        config: impl Fn(usize) -> LaneConfig + Send + Sync + 'static,
    ) -> Result<ServedLanes, SetLanesError> {
        let mut places = deal(&shares, count)?.into_iter();
        let place = |share: Share| {
            let queues = places.by_ref().take(share.queues).map(|lane| PlacedQueue { lane, mover: None }).collect();
            let placed = PlacedExport { name: share.name.clone(), make: None, queues, hw_queues: Vec::new() };
            let seen = Mutex::new(placed.seen());
            ExportPlacement { share: Mutex::new(share), placed: Mutex::new(placed), seen }
        };
        let exports = shares.into_iter().map(place).collect();
        let nodes = NodeThreads::default();
        Ok(ServedLanes { lanes: Mutex::new(Lanes::start(count, config)?), nodes, exports })
    }

    /// The lanes, locked; to be held briefly.
    pub(crate) fn lanes(&self) -> MutexGuard<'_, Lanes<ServedPoller>> {
        lock(&self.lanes)
    }

    /// Runs `make` on a thread whose memory is on the NUMA node of this lane, if the lane has one.
    pub(crate) fn near<T: Send + 'static>(&self, lane: usize, make: impl FnOnce() -> T + Send + 'static) -> T {
        let node = self.lanes().config(lane).node;
        self.nodes.run(node, make)
    }

    /// Number of lanes.
    pub fn count(&self) -> usize {
        self.lanes().threads().len()
    }

    /// The placement of an export's queues, also during a change.
    pub fn seen(&self, export: usize) -> SeenPlaces {
        lock(&self.exports[export].seen).clone()
    }

    fn changing(&self, export: usize) -> Changing<'_> {
        let ExportPlacement { placed, seen, .. } = &self.exports[export];
        Changing { placed: lock(placed), seen }
    }

    fn share(&self, export: usize) -> Share {
        lock(&self.exports[export].share).clone()
    }

    fn shares(&self) -> Vec<Share> {
        (0..self.exports.len()).map(|export| self.share(export)).collect()
    }

    /// The lanes of each export's queues by the rule, for this number of lanes.
    fn deal(&self, count: usize) -> Result<Vec<Vec<usize>>, SpecError> {
        let shares = self.shares();
        let mut places = deal(&shares, count)?.into_iter();
        Ok(shares.iter().map(|share| places.by_ref().take(share.queues).collect()).collect())
    }

    /// Sets the maker of hardware queues for an export.
    pub(crate) fn make_by(&self, export: usize, make: MakeHwQueue) {
        self.changing(export).make = Some(make);
    }

    /// Sets the handle that moves a queue; required before the queue is served.
    pub fn move_by(&self, export: usize, queue: usize, mover: ClientMover) {
        self.changing(export).queues[queue].mover = Some(mover);
    }

    /// Serves a client queue on its lane by the hardware queue that its export has there.
    ///
    /// # Errors
    /// The device has no more queues, or the lane is full, has ended or does not respond: object, cause, cure.
    pub fn open(&self, export: usize, queue: usize, client: DetachedClient) -> Result<(), String> {
        let mut placed = self.changing(export);
        // Retries an earlier removal. A hardware queue that stays has no client queues and is skipped.
        let _ = self.remove_unused(&mut placed);
        let lane = placed.queues[queue].lane;
        self.serve(export, &mut placed, queue, lane, client)
    }

    /// Ends the service of a drained queue; its placement stays.
    ///
    /// # Errors
    /// The lane does not respond, or has ended.
    pub fn close(&self, export: usize, queue: usize) -> Result<(), LaneError> {
        let mut placed = self.changing(export);
        placed.forget(queue);
        self.remove_unused(&mut placed)
    }

    /// Serves a client queue on this lane, or on another hardware queue of its export if the device has no more queues.
    fn serve(
        &self,
        export: usize,
        placed: &mut PlacedExport,
        queue: usize,
        lane: usize,
        mut client: DetachedClient,
    ) -> Result<(), String> {
        let living = |hw: &PlacedHwQueue| !hw.queues.is_empty();
        let on_lane = placed.hw_queues.iter().position(|hw| living(hw) && hw.lane == lane);
        if let Some(hw) = on_lane {
            match adopt(placed, hw, queue, client) {
                Ok(()) => return Ok(()),
                // All client queues of that hardware queue are being closed, and it ends with them.
                Err((PartError::Gone, Some(back))) => client = back,
                Err((error, _)) => return Err(error.to_string()),
            }
        }
        match self.make(export, placed, lane, placed.planned(lane).max(1)) {
            Ok(made) => {
                let number = self.lanes().reserve(lane).map_err(|error| error.to_string())?;
                let admitted = self.admit(placed, queue, (number, lane), made, client);
                admitted.map_err(|NotAdmitted { error, .. }| {
                    self.lanes().forget(number);
                    error.to_string()
                })
            }
            // The device has no more queues: uses a hardware queue on another lane.
            Err(why) => {
                let other = placed.hw_queues.iter().position(living).ok_or(why)?;
                adopt(placed, other, queue, client).map_err(|(error, _)| error.to_string())
            }
        }
    }

    /// A hardware queue of an export's device for these client queues, made for this lane.
    fn make(&self, export: usize, placed: &PlacedExport, lane: usize, queues: usize) -> Result<MadeHwQueue, String> {
        let make = placed.make.clone().ok_or_else(|| format!("{}: it is not served yet; try again", placed.name))?;
        let share = self.share(export);
        // If a larger replacement is impossible, it is made for all planned client queues.
        let capacity = if share.is_limited() { share.queues } else { queues };
        let hw = self.near(lane, move || make(capacity))?;
        // The scheduler it was made with: the device's scheduler may have changed meanwhile.
        let is_narrow = hw.orders();
        Ok(MadeHwQueue { hw, capacity, is_narrow })
    }

    /// Adds a new hardware queue with its first client queue to a lane with reserved room.
    fn admit(
        &self,
        placed: &mut PlacedExport,
        queue: usize,
        (number, lane): (u32, usize),
        MadeHwQueue { hw, capacity, is_narrow }: MadeHwQueue,
        client: DetachedClient,
    ) -> Result<(), NotAdmitted<ServedPoller>> {
        let admission = self.lanes().begin_admit(number, Box::new(move || client.into_poller(hw)));
        admission.wait(ANSWER_MAX)?;
        placed.hw_queues.push(PlacedHwQueue { number, lane, capacity, is_narrow, queues: vec![queue] });
        Ok(())
    }

    /// Removes hardware queues without client queues from their lanes.
    fn remove_unused(&self, placed: &mut PlacedExport) -> Result<(), LaneError> {
        let mut removed = Ok(());
        placed.hw_queues.retain(|hw| {
            if !hw.queues.is_empty() {
                return true;
            }
            let release = self.lanes().begin_release(hw.number);
            match release.map(|release| release.wait(REST_MAX, ANSWER_MAX)) {
                Some(Err(error)) if !error.is_poller_gone() => {
                    removed = Err(error);
                    return true;
                }
                Some(Err(error)) => removed = Err(error),
                None | Some(Ok(_)) => {}
            }
            self.lanes().forget(hw.number);
            false
        });
        removed
    }

    /// Sets the number of queues of an export while all serve. The queues of its device's exports are assigned by the
    /// rule; served queues stay until they are [placed](ServedLanes::place_device) or opened again.
    ///
    /// # Errors
    /// The export names a lane that does not exist.
    pub fn set_queues(&self, export: usize, queues: usize) -> Result<(), SpecError> {
        let devices = {
            let mut share = lock(&self.exports[export].share);
            share.queues = queues;
            share.devices.clone()
        };
        for (export, lanes) in self.deal_devices(|share| devices.iter().any(|device| share.uses(device.pool)))? {
            self.changing(export).plan(&lanes);
        }
        Ok(())
    }

    /// The lanes of the queues of these exports by the rule.
    fn deal_devices(&self, which: impl Fn(&Share) -> bool) -> Result<Vec<(usize, Vec<usize>)>, SpecError> {
        let places = self.deal(self.count())?.into_iter().enumerate();
        Ok(places.filter(|(export, _)| which(&self.share(*export))).collect())
    }

    /// Changes the number of lanes under load. Returns when every queue is on its lane by the rule and surplus lanes
    /// have ended. Only served queues move.
    ///
    /// # Errors
    /// If the number is out of bounds, or an export names a lane beyond it, there is no change. If a queue does not
    /// drain, or a lane cannot be started or has ended, earlier moves stay, and another call completes the change.
    pub fn set_lanes(&self, count: u64) -> Result<Moves, SetLanesError> {
        if !(1..=LANES_MAX).contains(&count) {
            let cause = format!("{count} is out of range");
            return Err(SpecError::new("lanes", cause, format!("give a number from 1 to {LANES_MAX}")).into());
        }
        let count = count as usize;
        let places = self.deal(count)?.into_iter().enumerate().collect();
        let more = count.max(self.count());
        self.set_count(more)?;
        let moves = self.place(places)?;
        self.set_count(count)?;
        Ok(moves)
    }

    fn set_count(&self, count: usize) -> Result<(), LaneError> {
        let surplus = self.lanes().set_count(count)?;
        surplus.into_iter().try_for_each(LaneThread::join)
    }

    /// Records whether the scheduler of a device orders its queues, and places them by the rule.
    ///
    /// # Errors
    /// See [`ServedLanes::place_device`].
    pub fn set_orders(&self, device: usize, orders: bool) -> Result<Moves, SetLanesError> {
        let shares = self.exports.iter().map(|export| lock(&export.share));
        for mut share in shares {
            let known = share.devices.iter_mut().filter(|known| known.number == device);
            known.for_each(|known| known.orders = orders);
        }
        self.place_device(device)
    }

    /// Places the queues of a device by the rule, and those of devices of its pool. Queues of other devices stay.
    ///
    /// # Errors
    /// A queue does not drain, the device has no more queues, or a lane has ended or does not respond: earlier moves
    /// stay, and another call completes the change.
    pub fn place_device(&self, device: usize) -> Result<Moves, SetLanesError> {
        let known: Vec<_> = self.shares().into_iter().flat_map(|share| share.devices).collect();
        let pools: Vec<_> = known.iter().filter(|known| known.number == device).map(|known| known.pool).collect();
        self.place(self.deal_devices(|share| pools.iter().any(|pool| share.uses(*pool)))?)
    }

    /// Moves the queues of these exports to these lanes, where they share a hardware queue with others of their export.
    fn place(&self, places: Vec<(usize, Vec<usize>)>) -> Result<Moves, SetLanesError> {
        let mut places: Vec<_> = places
            .into_iter()
            .map(|(export, lanes)| {
                let placed = self.changing(export);
                let served = lanes.iter().enumerate().filter(|(queue, _)| placed.is_served(*queue));
                let wanted = served.map(|(_, lane)| lane).collect::<BTreeSet<_>>().len();
                (wanted as isize - placed.hw_queues.len() as isize, export, lanes)
            })
            .collect();
        // A device may have all its queues in use: exports that will need fewer queues go first.
        places.sort();
        let mut moves = Moves::default();
        for (_, export, lanes) in places {
            let mut placed = self.changing(export);
            let was = placed.seen().lanes;
            placed.plan(&lanes);
            let done = self.place_export(export, &mut placed, &mut moves.longest);
            let removed = self.remove_unused(&mut placed);
            let moved = was.iter().enumerate().filter(|(queue, lane)| {
                placed.queues.len() > *queue && placed.is_served(*queue) && placed.lane_of(*queue) != **lane
            });
            moves.count += moved.count();
            // Stops here: each further export of a hanging device would take the full time limit and delay control.
            done?;
            removed?;
        }
        Ok(moves)
    }

    /// Moves every served queue of an export to its lane by the rule.
    fn place_export(
        &self,
        export: usize,
        placed: &mut PlacedExport,
        longest: &mut Duration,
    ) -> Result<(), SetLanesError> {
        let mut by_lane = BTreeMap::<usize, Vec<usize>>::new();
        for queue in (0..placed.queues.len()).filter(|queue| placed.is_served(*queue)) {
            by_lane.entry(placed.queues[queue].lane).or_default().push(queue);
        }
        // Numbers of the hardware queues that stay or move whole, by lane.
        let mut homes = BTreeMap::<usize, u32>::new();
        for hw in placed.hw_queues.iter().filter(|hw| by_lane.contains_key(&hw.lane)) {
            homes.entry(hw.lane).or_insert(hw.number);
        }
        for (lane, queues) in &by_lane {
            if homes.contains_key(lane) {
                continue;
            }
            let is_free = |hw: &PlacedHwQueue| !homes.values().any(|home| *home == hw.number);
            let common = |hw: &PlacedHwQueue| hw.queues.iter().filter(|queue| queues.contains(queue)).count();
            let free = placed.hw_queues.iter().enumerate().filter(|(_, hw)| is_free(hw));
            let Some((index, hw)) = free.max_by_key(|(_, hw)| common(hw)) else { continue };
            homes.insert(*lane, hw.number);
            let carried = self.carry(hw.number, hw.lane, *lane).map_err(|error| placed.stays(hw, error))?;
            *longest = (*longest).max(carried);
            placed.hw_queues[index].lane = *lane;
        }
        for (lane, queues) in by_lane {
            // The hardware queue may have lost its last client queue to another lane.
            self.remove_unused(placed)?;
            let mut home = homes.get(&lane).copied().filter(|home| placed.index_of(*home).is_some());
            let orders = self.share(export).orders();
            let capacity = |hw: &PlacedHwQueue| if hw.is_narrow && !orders { 1 } else { hw.capacity };
            let capacity = home.and_then(|home| placed.index_of(home)).map_or(0, |hw| capacity(&placed.hw_queues[hw]));
            // Includes the lane's queues that are not served now.
            let planned = placed.planned(lane);
            let mut new = None;
            if capacity < planned {
                match self.make(export, placed, lane, planned) {
                    Ok(made) => (home, new) = (None, Some(made)),
                    // The existing hardware queue serves all of them, with its present capacity.
                    Err(_) if home.is_some() => {}
                    Err(why) => {
                        let cure = "queues that have moved stay on their new lanes; give the device more queues, and set the \
                                    same again";
                        return Err(SpecError::new(&placed.name, why, cure).into());
                    }
                }
            }
            for queue in queues {
                let is_home = |hw: &PlacedHwQueue| Some(hw.number) == home && hw.queues.contains(&queue);
                if !placed.hw_queues.iter().any(is_home) {
                    let begin = Instant::now();
                    home = self.transfer(export, placed, queue, lane, home, &mut new)?.or(home);
                    *longest = (*longest).max(begin.elapsed());
                }
            }
        }
        Ok(())
    }

    /// Moves a hardware queue whole; returns the time it was quiesced.
    fn carry(&self, number: u32, from: usize, to: usize) -> Result<Duration, LaneError> {
        let begin = Instant::now();
        let release = self.lanes().begin_carry(number, to)?;
        let carried = match release.wait(REST_MAX, ANSWER_MAX) {
            Ok(carried) => carried,
            Err(error) => {
                self.lanes().place_on(number, from);
                return Err(error);
            }
        };
        let admission = self.lanes().begin_admit(number, Box::new(move || carried));
        let Err(NotAdmitted { error, make }) = admission.wait(ANSWER_MAX) else { return Ok(begin.elapsed()) };
        if let Some(make) = make {
            self.put_back(number, from, make)?;
        }
        Err(error)
    }

    /// Returns a poller to its previous lane.
    fn put_back(&self, number: u32, lane: usize, make: MakePoller<ServedPoller>) -> Result<(), LaneError> {
        self.lanes().place_on(number, lane);
        let admission = self.lanes().begin_admit(number, make);
        admission.wait(ANSWER_MAX).map_err(|refused| refused.error)
    }

    /// Moves a client queue from its hardware queue to the one of this number, or to the new one. Returns the number,
    /// unless its session has ended meanwhile.
    fn transfer(
        &self,
        export: usize,
        placed: &mut PlacedExport,
        queue: usize,
        lane: usize,
        home: Option<u32>,
        new: &mut Option<MadeHwQueue>,
    ) -> Result<Option<u32>, SetLanesError> {
        let name = format!("{}, queue {queue}", placed.name);
        let failed = |error: PartError| match error {
            PartError::Undrained(limit) => {
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays where it is, since its device has a request \
                     that does not end"
                );
                SpecError::new(&name, cause, SET_AGAIN)
            }
            error => SpecError::new(&name, error, "see the messages of the daemon"),
        };
        let was = placed.lane_of(queue);
        // Before it leaves: the new lane must have room.
        let reserved = new.as_ref().map(|_| self.lanes().reserve(lane)).transpose()?;
        let mover = placed.queues[queue].mover.clone();
        let parted = mover.ok_or(PartError::Gone).and_then(|mover| mover.part(REST_MAX, ANSWER_MAX));
        let client = match parted {
            Ok(client) => client,
            Err(error) => {
                reserved.into_iter().for_each(|number| self.lanes().forget(number));
                let PartError::Gone = error else { return Err(failed(error).into()) };
                // The session ends: the queue is drained and closed next, and its hardware queue is no longer needed.
                placed.forget(queue);
                return Ok(None);
            }
        };
        placed.forget(queue);
        if let (Some(number), Some(made)) = (reserved, new.take()) {
            let (capacity, is_narrow) = (made.capacity, made.is_narrow);
            let admitted = self.admit(placed, queue, (number, lane), made, client);
            let Err(NotAdmitted { error, make }) = admitted else { return Ok(Some(number)) };
            match make {
                Some(make) => {
                    self.put_back(number, was, make)?;
                    placed.hw_queues.push(PlacedHwQueue {
                        number,
                        lane: was,
                        capacity,
                        is_narrow,
                        queues: vec![queue],
                    });
                }
                None => self.lanes().forget(number),
            }
            return Err(error.into());
        }
        let Some(index) = home.and_then(|home| placed.index_of(home)) else {
            unreachable!("a queue leaves for a hardware queue that is there")
        };
        let lost = |why: String| SpecError::new(&name, why, "see the messages of the daemon");
        match adopt(placed, index, queue, client) {
            Ok(()) => Ok(home),
            // The front-end closes the queues there, and this one next.
            Err((PartError::Gone, Some(client))) => {
                self.serve(export, placed, queue, lane, client).map_err(lost)?;
                Ok(placed.hw_queues.iter().find(|hw| hw.queues.contains(&queue)).map(|hw| hw.number))
            }
            Err((error, client)) => {
                // The hardware queue that it left may have the one of the device that it needs now.
                if let Err(error) = self.remove_unused(placed) {
                    tracing::warn!("{name}: {error}");
                }
                let back = client.map_or(Ok(()), |client| self.serve(export, placed, queue, was, client));
                back.map_err(lost)?;
                Err(failed(error).into())
            }
        }
    }

    /// Sets how long lanes busy-poll.
    ///
    /// # Errors
    /// A lane has ended by itself, or does not respond.
    pub fn set_idle_policy(&self, policy: IdlePolicy) -> Result<(), LaneError> {
        let change = self.lanes().set_policy(policy);
        change.wait(ANSWER_MAX)
    }

    /// How long lanes busy-poll.
    pub fn idle_policy(&self) -> IdlePolicy {
        self.lanes().config(0).policy
    }

    /// Waits until all queues are retired and the lanes have ended.
    ///
    /// # Errors
    /// One of them panicked.
    pub fn join(self) -> Result<(), LaneError> {
        self.lanes.into_inner().unwrap_or_else(PoisonError::into_inner).join()
    }
}

/// A hardware queue that has no lane yet.
struct MadeHwQueue {
    hw: HwQueueSet<DeviceQueue>,
    capacity: usize,
    is_narrow: bool,
}

/// Has a hardware queue serve one more client queue, through the first of its client queues that is not being closed.
fn adopt(
    placed: &mut PlacedExport,
    hw: usize,
    queue: usize,
    mut client: DetachedClient,
) -> Result<(), (PartError, Option<DetachedClient>)> {
    let PlacedExport { queues, hw_queues, .. } = placed;
    let members = hw_queues[hw].queues.iter();
    for member in members.filter_map(|member| queues[*member].mover.as_ref()) {
        match member.adopt(client, ANSWER_MAX) {
            Ok(()) => {
                hw_queues[hw].queues.push(queue);
                return Ok(());
            }
            Err((PartError::Gone, Some(back))) => client = back,
            failed => return failed,
        }
    }
    Err((PartError::Gone, Some(client)))
}

impl fmt::Debug for ServedLanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedLanes").field("lanes", &self.lanes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
