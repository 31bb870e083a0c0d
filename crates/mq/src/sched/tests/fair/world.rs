//! `fair` over devices with service times: a disk with an arm and a platter, and one without. Not a prediction of
//! times, but a check of the rules' guarantees.

use crate::sched::tests::MS;
use crate::sched::{FairConfig, FairDevice, Scheduler, SchedulerConfig, Selected, StreamKey};
use crate::{Bio, DeviceInfo, Op};

const US: u64 = 1000;

/// Kind of device.
#[derive(Clone, Copy)]
enum Kind {
    /// One arm: a seek and half a revolution to another position, then 100 bytes in a microsecond. The next one upwards
    /// goes first, for 50 ms.
    Disk,
    /// So many at one time, 80 us each and 2000 bytes in a microsecond on one wire.
    Flash { ways: usize },
}

/// A reader.
#[derive(Clone)]
struct Reader {
    bios: u64,
    sectors: u32,
    /// Between the end of one and the next.
    think_ns: u64,
    /// How far apart its bios begin: in a row, or anywhere.
    random: bool,
    op: Op,
    /// Its bios name no submitter.
    unknown: bool,
    /// Hardware queue through which it reads.
    queue: usize,
    // Progress.
    sent: u64,
    ended: u64,
    due_ns: Vec<u64>,
    waited_ns: Vec<u64>,
    over_ns: u64,
    /// Time that the device spent on it.
    served_ns: u64,
}

impl Reader {
    fn new(bios: u64, sectors: u32, depth: usize) -> Reader {
        Reader {
            bios,
            sectors,
            think_ns: 50 * US,
            random: false,
            op: Op::Read,
            unknown: false,
            queue: 0,
            sent: 0,
            ended: 0,
            due_ns: vec![0; depth],
            waited_ns: Vec::new(),
            over_ns: 0,
            served_ns: 0,
        }
    }

    fn random(bios: u64, sectors: u32, depth: usize) -> Reader {
        Reader { random: true, ..Reader::new(bios, sectors, depth) }
    }

    fn is_over(&self) -> bool {
        self.ended == self.bios
    }

    fn percentile_ns(&self, permille: usize) -> u64 {
        let mut waited = self.waited_ns.clone();
        waited.sort_unstable();
        waited[(waited.len() * permille / 1000).min(waited.len() - 1)]
    }

    fn per_s(&self) -> f64 {
        self.ended as f64 * 1e9 / self.over_ns as f64
    }
}

/// A request that the device executes.
struct Running {
    bio: Box<Bio>,
    start_ns: u64,
    end_ns: u64,
    /// Time of the device that it takes.
    service_ns: u64,
}

/// A device, and its requests with their ends.
struct Device {
    kind: Kind,
    places: usize,
    has: Vec<(Box<Bio>, u64)>,
    running: Vec<Running>,
    head: u64,
    wire_ns: u64,
}

/// A hardware queue: its scheduler, the number of its waiting bios and of its requests, and the time until which the
/// scheduler is not asked.
struct HwQueue {
    scheduler: Box<dyn Scheduler>,
    waiting: usize,
    in_flight: usize,
    kept_until_ns: Option<u64>,
}

impl Device {
    fn start(&mut self, now_ns: u64) {
        let ways = match self.kind {
            Kind::Disk => 1,
            Kind::Flash { ways } => ways,
        };
        while self.running.len() < ways && !self.has.is_empty() {
            let head = self.head;
            let is_old = now_ns - self.has[0].1 > 50 * MS;
            let nearest = (0..self.has.len()).min_by_key(|at| self.has[*at].0.sector.wrapping_sub(head));
            let at = nearest.filter(|_| matches!(self.kind, Kind::Disk) && !is_old).unwrap_or(0);
            let (bio, start_ns) = self.has.remove(at);
            let (end_ns, service_ns) = match self.kind {
                Kind::Disk => {
                    let far = bio.sector.abs_diff(head) as f64 / 2e9;
                    let seek_ns = if far == 0.0 { 0.0 } else { 5.0e6 + 10.0e6 * far.sqrt() };
                    let service_ns = 100 * US + seek_ns as u64 + bio.bytes() * 10;
                    (now_ns + service_ns, service_ns)
                }
                Kind::Flash { ways } => {
                    let wire_ns = bio.bytes() / 2;
                    self.wire_ns = self.wire_ns.max(now_ns + 80 * US) + wire_ns;
                    (self.wire_ns, wire_ns.max(80 * US / ways as u64))
                }
            };
            self.head = bio.end();
            self.running.push(Running { bio, start_ns, end_ns, service_ns });
        }
    }
}

/// Lets readers have a device until `until` says so. Their streams are numbered from one, and begin 20 GB apart.
fn run(
    config: SchedulerConfig,
    kind: Kind,
    places: usize,
    readers: &mut [Reader],
    until: impl Fn(&[Reader]) -> bool,
) -> Box<dyn Scheduler> {
    run_queues(&[config], kind, places, readers, until).remove(0)
}

/// The same with several hardware queues, each with as many requests at the device.
fn run_queues(
    configs: &[SchedulerConfig],
    kind: Kind,
    places: usize,
    readers: &mut [Reader],
    until: impl Fn(&[Reader]) -> bool,
) -> Vec<Box<dyn Scheduler>> {
    let info = DeviceInfo::default();
    let open = |config: &SchedulerConfig| HwQueue {
        scheduler: config.build(places, 1024, &info).unwrap(),
        waiting: 0,
        in_flight: 0,
        kept_until_ns: None,
    };
    let mut queues: Vec<_> = configs.iter().map(open).collect();
    let mut device = Device { kind, places, has: Vec::new(), running: Vec::new(), head: 0, wire_ns: 0 };
    let (mut now_ns, mut chance) = (0_u64, 1_u64);
    while !until(readers) {
        for (number, reader) in readers.iter_mut().enumerate() {
            while let Some(at) = reader.due_ns.iter().position(|due_ns| *due_ns <= now_ns) {
                reader.due_ns.swap_remove(at);
                if reader.sent == reader.bios {
                    continue;
                }
                let mut bio = Bio::with_capacity(0);
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let place = if reader.random { (chance >> 33) % 1_000_000 } else { reader.sent };
                bio.sector = (number as u64 + 1) * 40_000_000 + place * u64::from(reader.sectors);
                (bio.op, bio.sectors, bio.cookie) = (reader.op, reader.sectors, now_ns);
                bio.stream = if reader.unknown { 0 } else { number as u32 + 1 };
                bio.submitter = number as u16;
                reader.sent += 1;
                let queue = &mut queues[reader.queue];
                queue.scheduler.insert(bio, now_ns);
                (queue.waiting, queue.kept_until_ns) = (queue.waiting + 1, None);
            }
        }
        let mut wake_ns = u64::MAX;
        for queue in &mut queues {
            queue.kept_until_ns = queue.kept_until_ns.filter(|until_ns| now_ns < *until_ns);
            while queue.waiting > 0 && queue.in_flight < device.places && queue.kept_until_ns.is_none() {
                match queue.scheduler.next(now_ns) {
                    Selected::Bio(bio) => {
                        device.has.push((bio, now_ns));
                        (queue.waiting, queue.in_flight) = (queue.waiting - 1, queue.in_flight + 1);
                    }
                    Selected::Wait(until_ns) => queue.kept_until_ns = Some(until_ns),
                }
            }
            wake_ns = queue.kept_until_ns.map_or(wake_ns, |until_ns| wake_ns.min(until_ns));
        }
        device.start(now_ns);
        let ends = device.running.iter().map(|running| running.end_ns);
        let dues = readers.iter().filter(|reader| reader.sent < reader.bios).flat_map(|reader| reader.due_ns.iter());
        let next_ns = ends.chain(dues.copied()).chain([wake_ns]).min().unwrap();
        assert!(next_ns < u64::MAX, "nothing will ever happen again");
        now_ns = next_ns.max(now_ns);
        while let Some(at) = device.running.iter().position(|running| running.end_ns <= now_ns) {
            let Running { bio, start_ns, service_ns, .. } = device.running.swap_remove(at);
            let reader = &mut readers[usize::from(bio.submitter)];
            let queue = &mut queues[reader.queue];
            queue.scheduler.ended(&bio, start_ns, now_ns);
            (queue.in_flight, queue.kept_until_ns) = (queue.in_flight - 1, None);
            reader.ended += 1;
            reader.served_ns += service_ns;
            reader.waited_ns.push(now_ns - bio.cookie);
            reader.over_ns = now_ns;
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            reader.due_ns.push(now_ns + reader.think_ns * (80 + (chance >> 33) % 41) / 100);
        }
    }
    queues.into_iter().map(|queue| queue.scheduler).collect()
}

fn fair(device: FairDevice) -> SchedulerConfig {
    SchedulerConfig::Fair(FairConfig { device, ..FairConfig::default() })
}

fn all_over(readers: &[Reader]) -> bool {
    readers.iter().all(Reader::is_over)
}

/// A copy's reader: 128 KiB at a time, two in flight.
fn copy(megabytes: u64) -> Reader {
    Reader::new(megabytes * 8, 256, 2)
}

#[test]
fn a_stream_alone_has_the_raw_rate() {
    for (kind, device, raw) in [
        (Kind::Disk, FairDevice::Seeks, 98.0e6),
        (Kind::Disk, FairDevice::Measured, 98.0e6),
        (Kind::Flash { ways: 32 }, FairDevice::Measured, 2000.0e6),
    ] {
        let mut readers = [Reader::new(4000, 256, 16)];
        run(fair(device), kind, 32, &mut readers, all_over);
        let rate = readers[0].per_s() * 131_072.0;
        // The difference from the disk's 100 MB/s is the 0.1 ms of each command.
        assert!(rate > 0.92 * raw, "{rate}");
    }
}

#[test]
fn two_streams_on_a_disk_go_on_alike_and_at_nearly_its_rate() {
    for device in [FairDevice::Seeks, FairDevice::Measured] {
        let mut readers = [copy(300), copy(300)];
        run(fair(device), Kind::Disk, 32, &mut readers, all_over);
        let over = readers.each_ref().map(|reader| reader.over_ns);
        assert!(over[0].abs_diff(over[1]) < 200 * MS, "{over:?} {device:?}");
        let rate = 600.0 * 1_048_576.0 * 1e9 / over[0].max(over[1]) as f64;
        assert!(rate > 82.0e6, "{rate} {device:?}");
    }
}

#[test]
fn readers_behind_one_queue_are_told_apart() {
    let ends = |stream| {
        let reader = || Reader { unknown: true, ..Reader::new(300 * 8, 256, 1) };
        let mut readers = [reader(), reader()];
        let config = FairConfig { device: FairDevice::Seeks, stream, ..FairConfig::default() };
        run(SchedulerConfig::Fair(config), Kind::Disk, 32, &mut readers, all_over);
        readers.map(|reader| reader.over_ns)
    };
    let over = ends(StreamKey::Sequence);
    assert!(over[0].abs_diff(over[1]) < 200 * MS, "{over:?}");
    let rate = 600.0 * 1_048_576.0 * 1e9 / over[0].max(over[1]) as f64;
    assert!(rate > 82.0e6, "{rate}");
    assert!(ends(StreamKey::Export)[1] > 2 * over[1]);
}

#[test]
fn backlogged_submitters_have_their_weights() {
    for (kind, device) in [(Kind::Disk, FairDevice::Seeks), (Kind::Flash { ways: 32 }, FairDevice::Flat)] {
        for (op, sectors, random) in
            [(Op::Read, 64, false), (Op::Write, 64, false), (Op::Write, 8, false), (Op::Write, 8, true)]
        {
            let reader = || Reader { random, op, ..Reader::new(u64::MAX, sectors, 64) };
            let mut readers = [reader(), reader(), reader()];
            let mut config = FairConfig { device, ..FairConfig::default() };
            config.weights[..3].copy_from_slice(&[(1, 100), (2, 200), (3, 400)]);
            let end_ns = if device == FairDevice::Seeks { 60_000 * MS } else { 2000 * MS };
            run(SchedulerConfig::Fair(config), kind, 32, &mut readers, |readers| readers[0].over_ns > end_ns);
            let all: u64 = readers.iter().map(|reader| reader.ended).sum();
            for (reader, weight) in readers.iter().zip([1.0, 2.0, 4.0]) {
                let share = reader.ended as f64 / all as f64 * 7.0 / weight;
                assert!((0.9..1.1).contains(&share), "{share} of {weight}: {op:?} of {sectors}, {random}, {device:?}");
            }
        }
    }
}

#[test]
fn two_queues_of_a_disk_read_at_nearly_its_rate() {
    let readers = |queue| [Reader { unknown: true, ..copy(300) }, Reader { unknown: true, queue, ..copy(300) }];
    let ends = |readers: &mut [Reader; 2]| {
        run_queues(&[fair(FairDevice::Seeks); 2], Kind::Disk, 32, readers, all_over);
        readers.each_ref().map(|reader| reader.over_ns)
    };
    let [one, two] = [ends(&mut readers(0)), ends(&mut readers(1))];
    assert!(two[0].abs_diff(two[1]) < 200 * MS, "{two:?}");
    assert!(two[1].max(two[0]) as f64 <= 1.05 * one[0].max(one[1]) as f64, "{two:?} with two queues, {one:?} with one");
}

#[test]
fn a_queue_whose_reader_thinks_costs_another_no_more_than_in_one_queue() {
    for think_ms in [1, 4, 12, 30] {
        let rate = |queue| {
            let thinks = Reader { think_ns: think_ms * MS, queue, unknown: true, ..Reader::random(u64::MAX, 8, 1) };
            let mut readers = [Reader { unknown: true, ..copy(100_000) }, thinks];
            let end = |readers: &[Reader]| readers[0].over_ns > 20_000 * MS;
            run_queues(&[fair(FairDevice::Seeks); 2], Kind::Disk, 32, &mut readers, end);
            readers.map(|reader| reader.per_s())
        };
        let [one, two] = [rate(0), rate(1)];
        assert!(two[0] >= 0.95 * one[0], "{think_ms} ms: {one:.1?} in one queue, {two:.1?} in two");
    }
}

#[test]
fn a_queue_that_floods_a_disk_leaves_half_of_it_to_one_that_reads_a_block_at_a_time() {
    let mut alone = [Reader::random(300, 8, 1)];
    run(fair(FairDevice::Seeks), Kind::Disk, 32, &mut alone, all_over);
    let flood = |op, sectors, random| Reader { op, random, unknown: true, ..Reader::new(u64::MAX, sectors, 128) };
    let mut readers = [
        Reader { queue: 1, ..Reader::random(u64::MAX, 8, 1) },
        flood(Op::Read, 256, false),
        flood(Op::Read, 8, true),
        flood(Op::Write, 2048, false),
        flood(Op::Write, 8, true),
    ];
    let end = |readers: &[Reader]| readers[0].over_ns > 60_000 * MS;
    run_queues(&[fair(FairDevice::Seeks); 2], Kind::Disk, 32, &mut readers, end);
    let [one, ..] = &readers;
    let told = format!("{} of {}, {} ms", one.per_s(), alone[0].per_s(), one.percentile_ns(999) / MS);
    assert!(one.per_s() > 0.4 * alone[0].per_s() && one.percentile_ns(999) <= 400 * MS, "{told}");
}

/// Lets the readers of queues with these weights have a device, and asserts that its time is shared by the weights.
fn check_weights(kind: Kind, device: FairDevice, weights: &[u16], readers: &mut [Reader], told: &str) {
    let config = |weight: &u16| SchedulerConfig::Fair(FairConfig { device, weight: *weight, ..FairConfig::default() });
    let configs: Vec<_> = weights.iter().map(config).collect();
    let end_ns = if device == FairDevice::Seeks { 60_000 * MS } else { 6000 * MS };
    run_queues(&configs, kind, 32, readers, |readers| readers.iter().any(|reader| reader.over_ns > end_ns));
    let of = |queue| readers.iter().filter(|reader| reader.queue == queue).map(|reader| reader.served_ns).sum::<u64>();
    let all: u64 = readers.iter().map(|reader| reader.served_ns).sum();
    let sum: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
    let share = |(queue, weight): (usize, &u16)| of(queue) as f64 / all as f64 * sum / f64::from(*weight);
    let shares: Vec<_> = weights.iter().enumerate().map(share).collect();
    assert!(shares.iter().all(|share| (0.9..1.1).contains(share)), "{weights:?} have {shares:.2?}: {told}");
}

const KINDS: [(Kind, FairDevice); 2] = [(Kind::Disk, FairDevice::Seeks), (Kind::Flash { ways: 32 }, FairDevice::Flat)];

#[test]
fn queues_have_their_weights_however_many_streams_they_have() {
    for (kind, device) in KINDS {
        for (op, sectors, random) in [
            (Op::Read, 64, false),
            (Op::Read, 256, false),
            (Op::Read, 8, true),
            (Op::Write, 64, false),
            (Op::Write, 8, true),
        ] {
            let reader = |queue| Reader { random, op, unknown: true, queue, ..Reader::new(u64::MAX, sectors, 64) };
            let mut readers = [0, 0, 0, 1, 2, 2].map(reader);
            let told = format!("{op:?} of {sectors}, random {random}, {device:?}");
            check_weights(kind, device, &[100, 200, 400], &mut readers, &told);
        }
    }
}

#[test]
fn a_queue_of_many_light_streams_has_no_more_than_its_weight() {
    for (kind, device) in KINDS {
        let light = |_| Reader { unknown: true, ..Reader::new(u64::MAX, 64, 1) };
        let deep = Reader { queue: 1, unknown: true, ..Reader::new(u64::MAX, 64, 64) };
        let mut readers: Vec<_> = (0..60).map(light).chain([deep]).collect();
        check_weights(kind, device, &[50, 400], &mut readers, &format!("{device:?}"));
    }
}

#[test]
fn queues_have_their_weights_whatever_they_do() {
    for seed in 0..16 {
        let mut chance = seed;
        let mut draw = |count: u64| {
            chance = u64::wrapping_add(chance, 0x9e37_79b9_7f4a_7c15);
            let mixed = (chance ^ chance >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) % count
        };
        let (kind, device) = KINDS[draw(2) as usize];
        let weights: Vec<u16> = (0..2 + draw(5)).map(|_| 50 + draw(350) as u16).collect();
        // On flash a share is of bytes and bios, so they are alike.
        let (alike, mut readers) = (8 << draw(6), Vec::new());
        for queue in 0..weights.len() {
            for _ in 0..=draw(4) {
                let sectors = if device == FairDevice::Seeks { 8 << draw(9) } else { alike };
                let (random, op) = (draw(2) > 0, if draw(3) > 0 { Op::Read } else { Op::Write });
                readers.push(Reader { random, op, unknown: true, queue, ..Reader::new(u64::MAX, sectors, 32) });
            }
        }
        check_weights(kind, device, &weights, &mut readers, &format!("seed {seed}, {device:?}"));
    }
}

#[test]
fn one_who_seeks_beside_two_streams_keeps_a_fifth_and_does_not_wait_for_long() {
    let mut alone = [Reader::random(300, 8, 1)];
    run(fair(FairDevice::Seeks), Kind::Disk, 32, &mut alone, all_over);
    let mut readers = [Reader::random(u64::MAX, 8, 1), copy(100_000), copy(100_000)];
    run(fair(FairDevice::Seeks), Kind::Disk, 32, &mut readers, |readers| readers[0].over_ns > 60_000 * MS);
    let [one, copies @ ..] = &readers;
    assert!(one.per_s() > 0.2 * alone[0].per_s(), "{} of {}", one.per_s(), alone[0].per_s());
    assert!(one.percentile_ns(990) <= 300 * MS, "{}", one.percentile_ns(990) / MS);
    let rate = copies.iter().map(Reader::per_s).sum::<f64>() * 131_072.0;
    println!("{} of {} a second, {rate}", one.per_s(), alone[0].per_s());
    assert!(rate > 45.0e6, "{rate}");
}

#[test]
fn writes_nobody_waits_for_get_less_than_readers_and_something() {
    let mut writer = Reader::new(1_000_000, 128, 64);
    writer.op = Op::Write;
    let mut readers = [copy(100_000), writer];
    run(fair(FairDevice::Seeks), Kind::Disk, 32, &mut readers, |readers| readers[0].over_ns > 20_000 * MS);
    let rates = [readers[0].per_s() * 2.0, readers[1].per_s()];
    let share = rates[1] / (rates[0] + rates[1]);
    assert!((0.2..0.4).contains(&share), "{share}");
    assert!(readers[1].percentile_ns(1000) < 2000 * MS);
}

#[test]
fn which_kind_of_device_it_is_is_found_out() {
    let mut readers = [copy(50), copy(50)];
    let scheduler = run(fair(FairDevice::Measured), Kind::Disk, 32, &mut readers, all_over);
    assert!(scheduler.snapshot(0).facts.contains(&("seeks", 1)));
    let mut readers = [Reader::random(3000, 8, 1), copy(200), copy(200)];
    let scheduler = run(fair(FairDevice::Measured), Kind::Flash { ways: 32 }, 32, &mut readers, all_over);
    assert!(scheduler.snapshot(0).facts.contains(&("seeks", 0)));
}

#[test]
fn one_who_wants_little_of_flash_beside_two_streams_hardly_notices() {
    let kind = Kind::Flash { ways: 32 };
    let mut alone = [Reader::random(20_000, 8, 1)];
    run(fair(FairDevice::Measured), kind, 128, &mut alone, all_over);
    let deep = || Reader::new(u64::MAX, 256, 32);
    let mut two = [deep(), deep()];
    run(fair(FairDevice::Measured), kind, 128, &mut two, |readers| readers[0].over_ns > 4000 * MS);
    let mut readers = [deep(), deep(), Reader::random(u64::MAX, 8, 1)];
    let end = |readers: &[Reader]| readers[0].over_ns > 8000 * MS;
    let scheduler = run(fair(FairDevice::Measured), kind, 128, &mut readers, end);
    let one = &mut readers[2];
    // Until the depth is found.
    one.waited_ns.drain(..one.waited_ns.len() / 2);
    let (with, without) = (one.percentile_ns(999), alone[0].percentile_ns(999));
    let rates = [&two[..], &readers[..2]].map(|streams| streams.iter().map(Reader::per_s).sum::<f64>());
    let told = format!("{with} ns beside {without}, {rates:?} bios, {:?}", scheduler.snapshot(0).facts);
    assert!(rates[1] > 0.9 * rates[0], "{told}");
    // The wire takes 64 us for each bio of 128 KiB, and three in flight keep it busy.
    assert!(with <= without + 5 * 64 * US, "{told}");
    println!("{told}");
}
