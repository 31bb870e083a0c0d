//! The rule that assigns queues to lanes.
//!
//! The queues of each export are spread evenly, starting after those of the previous export, unless the export names
//! lanes. All are on one lane if a scheduler orders them, or if the device has too few queues. The lanes of an export
//! depend only on the number of queues of the exports before it and on the other exports of its device.
//!
//! Only computes; moves no queue.

use std::collections::{BTreeMap, BTreeSet};

use blkyard::spec::SpecError;
use blkyard_mq::QueueMap;

/// Placement parameters of one export.
#[derive(Clone, Debug)]
pub struct Share {
    /// Name of the export, for messages.
    pub name: String,
    /// Number of queues.
    pub queues: usize,
    /// Lanes for the queues, in turn; empty to spread them evenly.
    pub named: Option<Vec<usize>>,
    /// Number of its device.
    pub device: usize,
    /// Maximum open queues of the device, for all exports.
    pub device_queues: usize,
    /// Whether the device's scheduler orders by time or position, and so needs all queues on one lane, the first of the
    /// export's named lanes.
    pub orders: bool,
}

/// The lane of each queue by export, for this number of lanes.
///
/// # Errors
/// An export names a lane that does not exist.
pub fn deal(shares: &[Share], lanes: usize) -> Result<Vec<usize>, SpecError> {
    let mut places = Vec::new();
    let mut used = BTreeMap::<usize, usize>::new();
    for (number, share) in shares.iter().enumerate() {
        // End of the queues so far, so that small exports do not all share the first lane.
        let first = places.len();
        let map = QueueMap::even(share.queues, lanes);
        let spread = |queue: usize| match &share.named {
            Some(named) => named[queue % named.len()],
            None => (map.queue_of(queue) + first) % lanes,
        };
        let wanted = (0..share.queues).map(spread).collect::<BTreeSet<_>>().len();
        // Each later export of the device needs a lane as well.
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn share(queues: usize, named: Option<Vec<usize>>) -> Share {
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
}
