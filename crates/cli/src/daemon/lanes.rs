//! The lanes of the daemon, and the rule by which queues live on them.
//!
//! Each export has its queues spread evenly, beginning where those of the one before ended, unless it names lanes of
//! its own. The rule holds for any number of lanes, so the number can change while guests do I/O: only queues whose
//! place changes move, one after another, and each goes on where it stood.

use std::collections::BTreeMap;
use std::ops::Range;

use blkyard::DeviceQueue;
use blkyard::spec::SpecError;
use blkyard_export::VhostQueue;
use blkyard_mq::{IdlePolicy, QueueMap};
use blkyard_os::{LaneConfig, LaneError, LaneThread, Lanes, Moves};

/// Lanes of one daemon. More than any machine we know has CPUs that one disk could use.
pub const LANES_MAX: u64 = 256;

/// What one export asks of the lanes.
#[derive(Clone, Debug)]
pub struct Share {
    /// The export, for messages.
    pub name: String,
    /// How many queues it has.
    pub queues: usize,
    /// The lanes they live on, in turn; spread evenly if none are named.
    pub named: Option<Vec<usize>>,
    /// Whether they share a hardware queue, and so live on one lane: on the first that is named.
    pub is_shared: bool,
}

/// The lane of each queue, export by export, with so many lanes.
///
/// # Errors
/// An export names a lane that there is not.
fn deal(shares: &[Share], lanes: usize) -> Result<Vec<usize>, SpecError> {
    let mut places = Vec::new();
    for (number, share) in shares.iter().enumerate() {
        // Where the queues so far end, so that small exports do not all share the first lane.
        let first = places.len();
        let map = QueueMap::even(share.queues, lanes);
        for queue in 0..share.queues {
            let lane = match &share.named {
                Some(named) if share.is_shared => named[0],
                Some(named) => named[queue % named.len()],
                None if share.is_shared => number % lanes,
                None => (map.queue_of(queue) + first) % lanes,
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

/// Why the number of lanes was not changed, or only in part.
#[derive(Debug, thiserror::Error)]
pub enum SetLanesError {
    /// The number does not do, or a queue does not come to rest.
    #[error(transparent)]
    Refused(#[from] SpecError),
    /// A lane cannot be started, or has ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
}

/// The lanes, running, and the places of all queues on them. A queue has its place from the start, and a poller there
/// only while a front-end needs it (see [`blkyard_export::on_demand_queues`]).
#[derive(Debug)]
pub struct ServedLanes {
    lanes: Lanes<VhostQueue<DeviceQueue>>,
    shares: Vec<Share>,
    /// In the order they were planned: all of the start, export by export, and then those that were added.
    pollers: Vec<PollerPlace>,
}

/// The place of a poller, whether it lives there now or not.
#[derive(Debug)]
struct PollerPlace {
    /// The export it is of, and the numbers of its queues there.
    export: usize,
    queues: Range<usize>,
    lane: usize,
    /// Its number among the pollers that live on the lanes.
    number: Option<u32>,
}

impl ServedLanes {
    /// Starts so many lanes for these exports, and places their queues; the pollers are yet to come.
    ///
    /// # Errors
    /// An export names a lane that there is not, or a lane cannot be started.
    pub fn start(
        count: usize,
        shares: Vec<Share>,
        config: impl Fn(usize) -> LaneConfig + Send + Sync + 'static,
    ) -> Result<ServedLanes, SetLanesError> {
        let mut places = deal(&shares, count)?.into_iter();
        let mut pollers = Vec::new();
        for (export, share) in shares.iter().enumerate() {
            let each = if share.is_shared { share.queues } else { 1 };
            for first in (0..share.queues).step_by(each.max(1)) {
                let lanes: Vec<_> = places.by_ref().take(each).collect();
                pollers.push(PollerPlace { export, queues: first..first + each, lane: lanes[0], number: None });
            }
        }
        Ok(ServedLanes { lanes: Lanes::start(count, config)?, shares, pollers })
    }

    /// Has a poller live on the lane where its place is.
    ///
    /// # Errors
    /// The lane is full, or has ended.
    pub fn admit(&mut self, poller: usize, queue: VhostQueue<DeviceQueue>) -> Result<(), LaneError> {
        let place = &mut self.pollers[poller];
        place.number = Some(self.lanes.admit(place.lane, move || queue)?);
        Ok(())
    }

    /// Takes a poller, which is at rest, off its lane; its place stays. None if it does not live there.
    ///
    /// # Errors
    /// The lane does not turn, or has ended.
    pub fn remove(&mut self, poller: usize) -> Result<Option<VhostQueue<DeviceQueue>>, LaneError> {
        self.pollers[poller].number.take().map_or(Ok(None), |number| self.lanes.remove(number))
    }

    /// Makes a place for one more queue of an export while all serve: on that lane which is the next one's of those the
    /// export names, where its others live if they share a hardware queue, or where the fewest live. Those that live
    /// already stay; when the number of lanes changes, all are dealt by the rule.
    pub fn add(&mut self, export: usize) -> usize {
        let Share { queues, named, is_shared, .. } = &self.shares[export];
        let number = *queues;
        let crowd = |lane: &usize| self.pollers.iter().filter(|place| place.lane == *lane).count();
        let emptiest = || (0..self.lanes.threads().len()).min_by_key(crowd).unwrap_or(0);
        let with_others = self.pollers.iter().find(|place| place.export == export).filter(|_| *is_shared);
        let lane = match (with_others, named) {
            (Some(other), _) => other.lane,
            (None, Some(named)) => named[number % named.len()],
            (None, None) => emptiest(),
        };
        self.pollers.push(PollerPlace { export, queues: number..number + 1, lane, number: None });
        self.shares[export].queues += 1;
        self.pollers.len() - 1
    }

    /// Takes back the place that was made last, which no poller has had.
    pub fn take_back(&mut self, poller: usize) {
        debug_assert!(poller + 1 == self.pollers.len(), "a place was taken back that is not the last");
        if let Some(place) = self.pollers.pop() {
            self.shares[place.export].queues -= 1;
        }
    }

    /// Changes the number of lanes while they serve. Returns when every queue has the place that it would have if there
    /// had been so many from the start, and lanes that are too many have ended. Only queues whose poller lives move.
    ///
    /// # Errors
    /// The number is out of bounds, or an export names a lane that there would not be: nothing has changed. A queue
    /// does not come to rest, or a lane cannot be started or has ended: see [`Lanes::deal`]; trying again does what is
    /// left.
    pub fn set_lanes(&mut self, count: u64) -> Result<Moves, SetLanesError> {
        if !(1..=LANES_MAX).contains(&count) {
            let cause = format!("{count} is out of range");
            return Err(SpecError::new("lanes", cause, format!("give a number from 1 to {LANES_MAX}")).into());
        }
        let count = count as usize;
        let places = deal(&self.shares, count)?;
        let firsts = self.shares.iter().scan(0, |sum, share| {
            let first = *sum;
            *sum += share.queues;
            Some(first)
        });
        let firsts: Vec<usize> = firsts.collect();
        let wanted: Vec<_> =
            self.pollers.iter().map(|place| places[firsts[place.export] + place.queues.start]).collect();
        let living = self.pollers.iter().zip(&wanted).filter_map(|(place, lane)| Some((place.number?, *lane)));
        let living: BTreeMap<_, _> = living.collect();
        let dealt = self.lanes.deal(count, |number| living[&(number as u32)]);
        let mut moved = 0;
        for (place, wanted) in self.pollers.iter_mut().zip(wanted) {
            let lane = match place.number {
                Some(number) => self.lanes.place(number).unwrap_or(place.lane),
                None if dealt.is_ok() => wanted,
                None => place.lane,
            };
            let queues = if place.number.is_some() { place.queues.len() } else { 0 };
            moved += if std::mem::replace(&mut place.lane, lane) == lane { 0 } else { queues };
        }
        let moves = dealt.map_err(|error| match error {
            // Those who read it know queues by their export.
            LaneError::Restless { name, poller, limit } => {
                let object = self.name_of(poller);
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays on {name}, since its device has a request that \
                     does not end"
                );
                let cure = "queues that have moved stay on their new lanes; set the same number of lanes again when that request has completed";
                SpecError::new(object, cause, cure).into()
            }
            error => SetLanesError::from(error),
        })?;
        // Pollers were counted, and some have several queues.
        Ok(Moves { count: moved, ..moves })
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
        let Some(place) = self.pollers.iter().find(|place| place.number == Some(number)) else {
            return format!("queue {number}");
        };
        let (name, queues) = (&self.shares[place.export].name, &place.queues);
        match queues.len() {
            1 => format!("{name}, queue {}", queues.start),
            _ => format!("{name}, queues {} to {}", queues.start, queues.end - 1),
        }
    }

    /// How a lane is made.
    pub fn config(&self, lane: usize) -> LaneConfig {
        self.lanes.config(lane)
    }

    /// The lanes, by their number.
    pub fn threads(&self) -> &[LaneThread<VhostQueue<DeviceQueue>>] {
        self.lanes.threads()
    }

    /// The numbers of the queues that each hardware queue of an export serves.
    pub fn hardware_queues(&self, export: usize) -> Vec<Vec<usize>> {
        let of_export = self.pollers.iter().filter(|place| place.export == export);
        of_export.map(|place| place.queues.clone().collect()).collect()
    }

    /// The lane of each queue, export by export.
    pub fn places(&self) -> Vec<usize> {
        let of_poller = |place: &PollerPlace| {
            let (export, lane) = (place.export, place.lane);
            place.queues.clone().map(move |number| (export, number, lane))
        };
        let mut places: Vec<_> = self.pollers.iter().flat_map(of_poller).collect();
        places.sort_unstable();
        places.into_iter().map(|(_, _, lane)| lane).collect()
    }

    /// Waits until all queues are retired and the lanes have ended.
    ///
    /// # Errors
    /// One of them panicked.
    pub fn join(self) -> Result<(), LaneError> {
        self.lanes.join()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard::Device;
    use blkyard_export::{QueueRemote, queue_pair};
    use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind};
    use blkyard_virtio::SerialId;
    use std::sync::Arc;

    fn share(queues: usize, named: Option<Vec<usize>>) -> Share {
        Share { name: format!("of {queues}"), queues, named, is_shared: false }
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

    /// Lanes on which every queue lives.
    fn served(count: usize, shares: Vec<Share>) -> (ServedLanes, Vec<QueueRemote>) {
        let queues: usize = shares.iter().map(|share| share.queues).sum();
        let mut lanes = ServedLanes::start(count, shares, |_| LaneConfig::default()).unwrap();
        let remotes = (0..queues).map(|place| admit(&mut lanes, place)).collect();
        (lanes, remotes)
    }

    fn admit(lanes: &mut ServedLanes, place: usize) -> QueueRemote {
        let device = Device::open("ram:1M").unwrap();
        let (remote, port) = queue_pair();
        let driver = device.queue(QueueKind::Default, 8).unwrap();
        let info = Arc::new(device.info().clone());
        let hw = HwQueue::new(driver, info, HwQueueConfig { depth: 8, ..Default::default() });
        lanes.admit(place, VhostQueue::new(hw, SerialId::new("x").unwrap(), port)).unwrap();
        remote
    }

    #[test]
    fn a_queue_that_is_added_lives_where_fewest_do_and_is_dealt_with_its_export() {
        let (mut lanes, mut remotes) = served(2, vec![share(3, None), share(1, Some(vec![1, 0])), share(1, None)]);
        assert_eq!(lanes.places(), [0, 0, 1, 1, 0]);
        for (export, places) in
            [(0, vec![0, 0, 1, 1, 1, 0]), (1, vec![0, 0, 1, 1, 1, 0, 0]), (0, vec![0, 0, 1, 1, 1, 1, 0, 0])]
        {
            let place = lanes.add(export);
            remotes.push(admit(&mut lanes, place));
            assert_eq!(lanes.places(), places);
        }
        assert_eq!([5, 6, 7].map(|poller| lanes.name_of(poller)), ["of 3, queue 3", "of 1, queue 1", "of 3, queue 4"]);
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
        let remote = admit(&mut lanes, first);
        for count in [4, 1, 3] {
            let was = lanes.places()[first];
            let moves = lanes.set_lanes(count).unwrap();
            assert_eq!(lanes.places(), deal(&shares, count as usize).unwrap());
            assert_eq!(moves.count, usize::from(lanes.places()[first] != was), "one poller lives");
        }
        assert!(lanes.remove(first).unwrap().is_some());
        assert!(lanes.remove(first).unwrap().is_none(), "it has left");
        let again = admit(&mut lanes, first);
        drop((remote, again));
        lanes.join().unwrap();
    }

    #[test]
    fn a_queue_is_called_by_its_export_and_its_number_there() {
        let (lanes, remotes) = served(1, vec![share(2, None), share(3, None)]);
        let names: Vec<_> = (0..5).map(|queue| lanes.name_of(queue)).collect();
        assert_eq!(names, ["of 2, queue 0", "of 2, queue 1", "of 3, queue 0", "of 3, queue 1", "of 3, queue 2"]);
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
