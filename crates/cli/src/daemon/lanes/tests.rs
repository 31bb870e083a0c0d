//! Tests of the lanes of a daemon, with queues on devices in memory.

use super::super::placement::ShareDevice;
use super::super::placement::tests::share;
use super::super::protocols::ByProtocol;
use super::*;
use blkyard::{Device, DeviceQueue};
use blkyard_export::{
    DetachedVirtqueue, QueueHost, QueueShare, VirtqueuePort, VirtqueueRemote, VirtqueueSession, on_demand_queue,
    queue_pair,
};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind};
use blkyard_virtio::SerialId;

/// The device of this number, with so many queues.
fn of(number: usize, queues: usize) -> Vec<ShareDevice> {
    vec![ShareDevice { number, pool: number, queues, orders: false }]
}

/// Lanes with every queue served.
fn served(count: usize, shares: Vec<Share>) -> (ServedLanes, Vec<VirtqueueRemote>) {
    let queues: Vec<usize> = shares.iter().map(|share| share.queues).collect();
    let lanes = ServedLanes::start(count, shares, |_| LaneConfig::default()).unwrap();
    let all = queues.into_iter().enumerate().flat_map(|(export, queues)| (0..queues).map(move |queue| (export, queue)));
    let remotes = all.map(|(export, queue)| open(&lanes, export, queue)).collect();
    (lanes, remotes)
}

fn open(lanes: &ServedLanes, export: usize, queue: usize) -> VirtqueueRemote {
    let (remote, port) = queue_pair();
    make_by_ram(lanes, export);
    lanes.move_by(export, queue, ByProtocol::VhostUser(remote.mover()));
    lanes.open(export, queue, virtqueue(port)).unwrap();
    remote
}

fn make_by_ram(lanes: &ServedLanes, export: usize) {
    lanes.make_by(export, Arc::new(|queues| Ok(ram_queue(queues).into())));
}

fn ram_queue(queues: usize) -> HwQueue<DeviceQueue> {
    let device = Device::open("ram:1M").unwrap();
    let config = HwQueueConfig { depth: 8 * queues, ..HwQueueConfig::default() };
    let driver = device.queue(QueueKind::Default, config.depth).unwrap();
    HwQueue::new(driver, Arc::new(device.info().clone()), config)
}

#[test]
fn hardware_queues_are_made_on_the_node_of_their_lane() {
    // The nodes of lanes 0 to 5; lane 2 has none.
    let nodes = [Some(0), Some(1), None, Some(3), Some(2), Some(1)];
    let config = move |lane: usize| LaneConfig { node: nodes[lane], ..LaneConfig::default() };
    let lanes = ServedLanes::start(6, vec![share(6, None)], config).unwrap();
    let made: Arc<Mutex<Vec<String>>> = Arc::default();
    let makers = Arc::clone(&made);
    let make = move |queues| {
        makers.lock().unwrap().push(std::thread::current().name().unwrap_or_default().to_owned());
        Ok(ram_queue(queues).into())
    };
    lanes.make_by(0, Arc::new(make));
    let mut remotes = Vec::new();
    for queue in 0..6 {
        let (remote, port) = queue_pair();
        lanes.move_by(0, queue, ByProtocol::VhostUser(remote.mover()));
        lanes.open(0, queue, virtqueue(port)).unwrap();
        remotes.push(remote);
    }
    let here = std::thread::current().name().unwrap_or_default().to_owned();
    assert_eq!(*made.lock().unwrap(), ["node0", "node1", &here, "node3", "node2", "node1"]);
}

fn virtqueue(port: VirtqueuePort) -> DetachedClient {
    let share = QueueShare { bios: 8, depth: 8, devices: 1 };
    ByProtocol::VhostUser(DetachedVirtqueue::new(SerialId::new("x").unwrap(), port, share).unwrap())
}

/// Serves queues of the first export on demand, and closes them with a delay.
struct SlowHost(Arc<ServedLanes>, usize);

impl QueueHost<VirtqueueSession> for SlowHost {
    fn open(&self, port: VirtqueuePort) -> Result<(), String> {
        self.0.open(0, self.1, virtqueue(port))
    }

    fn close(&self) {}
}

fn open_by_slow_host(lanes: &Arc<ServedLanes>, queue: usize) -> VirtqueueRemote {
    let remote = on_demand_queue(Box::new(SlowHost(Arc::clone(lanes), queue)));
    lanes.move_by(0, queue, ByProtocol::VhostUser(remote.mover()));
    remote.open().unwrap();
    remote
}

#[test]
fn queue_opens_beside_queues_that_are_closing() {
    let lanes = Arc::new(ServedLanes::start(1, vec![share(4, None)], |_| LaneConfig::default()).unwrap());
    make_by_ram(&lanes, 0);
    let open = |queue| open_by_slow_host(&lanes, queue);
    let (first, second) = (open(0), open(1));
    drop(first);
    let third = open(2);
    assert_eq!(shape(&lanes, 0), [(0, 4, vec![0, 1, 2])], "by the one that stays");
    drop((second, third));
    let fourth = open(3);
    let mut queues: Vec<_> = shape(&lanes, 0).into_iter().map(|(_, _, queues)| queues).collect();
    queues.sort_unstable();
    assert_eq!(queues, [vec![0, 1, 2], vec![3]], "by a hardware queue of its own");
    drop(fourth);
    (0..4).for_each(|queue| lanes.close(0, queue).unwrap());
    Arc::into_inner(lanes).unwrap().join().unwrap();
}

/// The lane of each queue, export by export.
fn places(lanes: &ServedLanes) -> Vec<usize> {
    (0..lanes.exports.len()).flat_map(|export| lanes.seen(export).lanes).collect()
}

#[test]
fn lanes_change_while_a_front_end_closes_its_queues() {
    let lanes = Arc::new(ServedLanes::start(2, vec![share(2, None)], |_| LaneConfig::default()).unwrap());
    make_by_ram(&lanes, 0);
    let mut remotes: Vec<_> = (0..2).map(|queue| open_by_slow_host(&lanes, queue)).collect();
    assert_eq!(places(&lanes), [0, 1]);
    drop(remotes.remove(0));
    lanes.set_lanes(1).unwrap();
    assert_eq!(places(&lanes), [0, 0]);
    drop(remotes);
    (0..2).for_each(|queue| lanes.close(0, queue).unwrap());
    Arc::into_inner(lanes).unwrap().join().unwrap();
}

#[test]
fn queues_that_are_added_are_dealt_by_the_rule_once_they_are_opened() {
    let shares = [share(2, None), Share { devices: of(1, usize::MAX), ..share(1, None) }];
    let (lanes, mut remotes) = served(2, shares.to_vec());
    assert_eq!(places(&lanes), [0, 1, 0]);
    lanes.set_queues(0, 4).unwrap();
    assert_eq!(places(&lanes), [0, 1, 1, 1, 0], "those that are served stay, and so do those of other devices");
    // The queue is opened for the next front-end.
    (0..2).for_each(|queue| lanes.close(0, queue).unwrap());
    remotes.drain(..2);
    assert_eq!(places(&lanes), [0, 0, 1, 1, 0]);
    remotes.push(open(&lanes, 0, 0));
    assert_eq!(shape(&lanes, 0), [(0, 2, vec![0])], "it is made for both of its lane");
    remotes.extend((1..4).map(|queue| open(&lanes, 0, queue)));
    assert_eq!(shape(&lanes, 0), [(0, 2, vec![0, 1]), (1, 2, vec![2, 3])]);
    lanes.set_queues(0, 3).unwrap();
    lanes.set_lanes(5).unwrap();
    assert_eq!(places(&lanes), deal(&[share(3, None), share(1, None)], 5).unwrap());
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn queues_of_a_device_with_few_are_dealt_while_they_are_served() {
    let few = |queues| Share { devices: of(0, 2), ..share(queues, None) };
    let (lanes, mut remotes) = served(2, vec![few(1)]);
    lanes.set_queues(0, 4).unwrap();
    remotes.extend((1..4).map(|queue| open(&lanes, 0, queue)));
    lanes.place_device(0).unwrap();
    assert_eq!(places(&lanes), deal(&[few(4)], 2).unwrap());
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn hardware_queue_is_made_for_queues_that_are_not_served_yet() {
    let lanes = ServedLanes::start(2, vec![share(4, None)], |_| LaneConfig::default()).unwrap();
    let mut remotes = vec![open(&lanes, 0, 0)];
    lanes.set_lanes(1).unwrap();
    assert_eq!(shape(&lanes, 0), [(0, 4, vec![0])], "three are to come");
    remotes.extend((1..4).map(|queue| open(&lanes, 0, queue)));
    assert_eq!(shape(&lanes, 0), [(0, 4, vec![0, 1, 2, 3])]);
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn scheduler_of_a_device_places_its_own_exports_only() {
    let other = Share { devices: of(1, usize::MAX), ..share(2, None) };
    let (lanes, remotes) = served(2, vec![share(2, None), other]);
    // A lane that the rule would not choose any more.
    lanes.exports[1].share.lock().unwrap().named = Some(vec![1]);
    let before = lanes.seen(1);
    assert_eq!(lanes.set_orders(0, true).unwrap().count, 1);
    assert_eq!((places(&lanes), lanes.seen(1)), (vec![0, 0, 0, 1], before));
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn the_number_of_lanes_changes_and_each_queue_lives_where_the_rule_says() {
    let shares = vec![share(4, None), share(3, None)];
    let (lanes, remotes) = served(2, shares.clone());
    for count in [4, 1, 3, 8, 2] {
        let before = places(&lanes);
        let moves = lanes.set_lanes(count).unwrap();
        let wanted = deal(&shares, count as usize).unwrap();
        assert_eq!((lanes.count(), &places(&lanes)), (count as usize, &wanted));
        assert_eq!(moves.count, before.iter().zip(&wanted).filter(|(was, is)| was != is).count());
    }
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn places_without_a_poller_change_with_the_lanes() {
    let shares = vec![share(4, None), share(3, None)];
    let lanes = ServedLanes::start(2, shares.clone(), |_| LaneConfig::default()).unwrap();
    let first = 4;
    let remote = open(&lanes, 1, 0);
    for count in [4, 1, 3] {
        let was = places(&lanes)[first];
        let moves = lanes.set_lanes(count).unwrap();
        assert_eq!(places(&lanes), deal(&shares, count as usize).unwrap());
        assert_eq!(moves.count, usize::from(places(&lanes)[first] != was), "one queue is served");
    }
    lanes.close(1, 0).unwrap();
    assert!(lanes.changing(1).hw_queues.is_empty());
    lanes.close(1, 0).unwrap();
    let again = open(&lanes, 1, 0);
    drop((remote, again));
    lanes.join().unwrap();
}

#[test]
fn hardware_queue_is_called_by_its_export_and_its_queues() {
    let (lanes, remotes) = served(2, vec![share(2, None), share(3, None)]);
    let names = |export: usize| {
        let placed = lanes.changing(export);
        placed.hw_queues.iter().map(|hw| placed.name_of(hw)).collect::<Vec<_>>()
    };
    let names = [names(0), names(1)].concat();
    assert_eq!(names, ["of 2, queue 0", "of 2, queue 1", "of 3, queues 0, 1", "of 3, queue 2"]);
    drop(remotes);
    lanes.join().unwrap();
}

/// The hardware queues of an export by first queue: lane, capacity and queues.
fn shape(lanes: &ServedLanes, export: usize) -> Vec<(usize, usize, Vec<usize>)> {
    let placed = lanes.changing(export);
    let mut shape: Vec<_> = placed
        .hw_queues
        .iter()
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
    let (lanes, remotes) = served(2, vec![share(4, None)]);
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
    let few = |queues, device_queues| Share { devices: of(0, device_queues), ..share(queues, None) };
    assert_eq!(deal(&[few(4, 1)], 2).unwrap(), [0; 4]);
    assert_eq!(deal(&[few(4, 2)], 2).unwrap(), [0, 0, 1, 1]);
    assert_eq!(deal(&[few(4, 3), few(2, 3)], 2).unwrap(), [0, 0, 1, 1, 1, 1], "the second has one left");
    assert_eq!(deal(&[few(2, 2), few(2, 2)], 2).unwrap(), [0, 0, 1, 1], "one is kept for the second");
    let other = Share { devices: of(1, 2), ..few(2, 2) };
    assert_eq!(deal(&[few(2, 2), other], 2).unwrap(), [0, 1, 0, 1]);
    let (lanes, remotes) = served(2, vec![few(4, 2)]);
    for count in [3, 1, 2, 4, 2] {
        lanes.set_lanes(count).unwrap();
        assert!(shape(&lanes, 0).len() <= 2, "{:?}", shape(&lanes, 0));
    }
    drop(remotes);
    lanes.join().unwrap();
}

#[test]
fn numbers_that_make_no_sense_are_refused_and_change_nothing() {
    let (lanes, remotes) = served(2, vec![share(2, Some(vec![0, 1]))]);
    for (count, words) in [(0, "1 to 256"), (257, "1 to 256"), (1, "no lane 1")] {
        let error = lanes.set_lanes(count).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!((lanes.count(), places(&lanes)), (2, vec![0, 1]));
    }
    drop(remotes);
    lanes.join().unwrap();
}
