//! The lanes of the daemon, and the rule by which queues live on them.
//!
//! Each export has its queues spread evenly, beginning where those of the one before ended, unless it names lanes of
//! its own. The rule holds for any number of lanes, so the number can change while guests do I/O: only queues whose
//! place changes move, one after another, and each goes on where it stood.

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
pub fn deal(shares: &[Share], lanes: usize) -> Result<Vec<usize>, SpecError> {
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
                let cause = format!("there is no lane {lane}");
                let cure = format!("lanes are numbered 0 to {}: name others, or run more lanes", lanes - 1);
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

/// The lanes, running.
#[derive(Debug)]
pub struct ServedLanes {
    lanes: Lanes<VhostQueue<DeviceQueue>>,
    shares: Vec<Share>,
    /// By poller, in the order they came: the export it is of, and the numbers of its queues there.
    pollers: Vec<(usize, Range<usize>)>,
}

impl ServedLanes {
    /// Starts so many lanes for these exports; their queues are yet to come.
    ///
    /// # Errors
    /// A lane cannot be started.
    pub fn start(
        count: usize,
        shares: Vec<Share>,
        config: impl Fn(usize) -> LaneConfig + Send + Sync + 'static,
    ) -> Result<ServedLanes, LaneError> {
        let of_export = |(export, share): (usize, &Share)| {
            let each = if share.is_shared { share.queues } else { 1 };
            (0..share.queues).step_by(each.max(1)).map(move |queue| (export, queue..queue + each))
        };
        let pollers = shares.iter().enumerate().flat_map(of_export).collect();
        Ok(ServedLanes { lanes: Lanes::start(count, config)?, shares, pollers })
    }

    /// The next queue, or all of an export that share a hardware queue, in the order of the exports, to be made on its
    /// lane.
    ///
    /// # Errors
    /// The lane is full, or has ended.
    pub fn admit(
        &mut self,
        lane: usize,
        make: impl FnOnce() -> VhostQueue<DeviceQueue> + Send + 'static,
    ) -> Result<(), LaneError> {
        self.lanes.admit(lane, make)
    }

    /// One more queue of an export, to be made on its lane while all serve: on that which is the next one's of those
    /// the export names, where its others live if they share a hardware queue, or where the fewest live. Those that
    /// live already stay; when the number of lanes changes, all are dealt by the rule.
    ///
    /// # Errors
    /// The lane is full, or has ended.
    pub fn add(
        &mut self,
        export: usize,
        make: impl FnOnce() -> VhostQueue<DeviceQueue> + Send + 'static,
    ) -> Result<(), LaneError> {
        let Share { queues, named, is_shared, .. } = &self.shares[export];
        let (number, places) = (*queues, self.lanes.places());
        let crowd = |lane: &usize| places.iter().filter(|place| *place == lane).count();
        let emptiest = || (0..self.lanes.threads().len()).min_by_key(crowd).unwrap_or(0);
        let with_others = self.pollers.iter().position(|(of, _)| *of == export).filter(|_| *is_shared);
        let lane = match (with_others, named) {
            (Some(poller), _) => places[poller],
            (None, Some(named)) => named[number % named.len()],
            (None, None) => emptiest(),
        };
        self.lanes.admit(lane, make)?;
        self.pollers.push((export, number..number + 1));
        self.shares[export].queues += 1;
        Ok(())
    }

    /// Changes the number of lanes while they serve. Returns when every queue lives where it would if there had been so
    /// many from the start, and lanes that are too many have ended.
    ///
    /// # Errors
    /// The number is out of bounds, or an export names a lane that there would not be: nothing has changed. A queue
    /// does not come to rest, or a lane cannot be started or has ended: see [`Lanes::deal`]; trying again does what is
    /// left.
    pub fn set_lanes(&mut self, count: u64) -> Result<Moves, SetLanesError> {
        if !(1..=LANES_MAX).contains(&count) {
            let cause = format!("{count} is out of bounds");
            return Err(SpecError::new("lanes", cause, format!("give a number from 1 to {LANES_MAX}")).into());
        }
        let count = count as usize;
        let places = deal(&self.shares, count)?;
        let before = |export: usize| self.shares[..export].iter().map(|share| share.queues).sum::<usize>();
        let place = |poller: usize| places[before(self.pollers[poller].0) + self.pollers[poller].1.start];
        let was = self.places();
        let moves = self.lanes.deal(count, place).map_err(|error| match error {
            // Those who read it know queues by their export.
            LaneError::Restless { name, poller, limit } => {
                let object = self.name_of(poller as usize);
                let cause = format!(
                    "it did not come to rest within {limit:?} and stays on {name}, since its device has a request that \
                     does not end"
                );
                let cure = "queues that have moved stay where they are now; set the same lanes again when it has ended";
                SpecError::new(object, cause, cure).into()
            }
            error => SetLanesError::from(error),
        })?;
        // Pollers were counted, and some have several queues.
        let moved = was.iter().zip(self.places()).filter(|(was, is)| *was != is).count();
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

    /// What people call a poller.
    fn name_of(&self, poller: usize) -> String {
        let (export, numbers) = &self.pollers[poller];
        let name = &self.shares[*export].name;
        match numbers.len() {
            1 => format!("{name}, queue {}", numbers.start),
            _ => format!("{name}, queues {} to {}", numbers.start, numbers.end - 1),
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

    /// The lane of each queue, export by export.
    pub fn places(&self) -> Vec<usize> {
        let of_poller = |((export, numbers), lane): (&(usize, Range<usize>), &usize)| {
            let (export, lane) = (*export, *lane);
            numbers.clone().map(move |number| (export, number, lane))
        };
        let mut places: Vec<_> = self.pollers.iter().zip(self.lanes.places()).flat_map(of_poller).collect();
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

    /// Lanes with queues that nobody is connected to.
    fn served(count: usize, shares: Vec<Share>) -> (ServedLanes, Vec<QueueRemote>) {
        let places = deal(&shares, count).unwrap();
        let mut lanes = ServedLanes::start(count, shares, |_| LaneConfig::default()).unwrap();
        let mut remotes = Vec::new();
        for lane in places {
            let (remote, make) = queue();
            lanes.admit(lane, make).unwrap();
            remotes.push(remote);
        }
        (lanes, remotes)
    }

    fn queue() -> (QueueRemote, impl FnOnce() -> VhostQueue<DeviceQueue> + Send + 'static) {
        let device = Device::open("ram:1M").unwrap();
        let (remote, port) = queue_pair();
        let driver = device.queue(QueueKind::Default, 8).unwrap();
        let info = Arc::new(device.info().clone());
        let hw = HwQueue::new(driver, info, HwQueueConfig { depth: 8, ..Default::default() });
        (remote, move || VhostQueue::new(hw, SerialId::new("x").unwrap(), port))
    }

    #[test]
    fn a_queue_that_is_added_lives_where_fewest_do_and_is_dealt_with_its_export() {
        let (mut lanes, mut remotes) = served(2, vec![share(3, None), share(1, Some(vec![1, 0])), share(1, None)]);
        assert_eq!(lanes.places(), [0, 0, 1, 1, 0]);
        for (export, places) in
            [(0, vec![0, 0, 1, 1, 1, 0]), (1, vec![0, 0, 1, 1, 1, 0, 0]), (0, vec![0, 0, 1, 1, 1, 1, 0, 0])]
        {
            let (remote, make) = queue();
            lanes.add(export, make).unwrap();
            remotes.push(remote);
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
