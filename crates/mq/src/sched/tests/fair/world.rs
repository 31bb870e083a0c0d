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
    // Progress.
    sent: u64,
    ended: u64,
    due_ns: Vec<u64>,
    waited_ns: Vec<u64>,
    over_ns: u64,
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
            sent: 0,
            ended: 0,
            due_ns: vec![0; depth],
            waited_ns: Vec::new(),
            over_ns: 0,
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

/// A device, and its requests with their ends.
struct Device {
    kind: Kind,
    places: usize,
    has: Vec<(Box<Bio>, u64)>,
    running: Vec<(Box<Bio>, u64, u64)>,
    head: u64,
    wire_ns: u64,
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
            let end_ns = match self.kind {
                Kind::Disk => {
                    let far = bio.sector.abs_diff(head) as f64 / 2e9;
                    let seek_ns = if far == 0.0 { 0.0 } else { 5.0e6 + 10.0e6 * far.sqrt() };
                    now_ns + 100 * US + seek_ns as u64 + bio.bytes() * 10
                }
                Kind::Flash { .. } => {
                    self.wire_ns = self.wire_ns.max(now_ns + 80 * US) + bio.bytes() / 2;
                    self.wire_ns
                }
            };
            self.head = bio.end();
            self.running.push((bio, start_ns, end_ns));
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
    let mut scheduler = config.build(places, 1024, &DeviceInfo::default()).unwrap();
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
                scheduler.insert(bio, now_ns);
            }
        }
        let mut wake_ns = u64::MAX;
        while device.has.len() + device.running.len() < device.places {
            match scheduler.next(now_ns) {
                Selected::Bio(bio) => device.has.push((bio, now_ns)),
                Selected::Wait(until_ns) => {
                    wake_ns = until_ns;
                    break;
                }
            }
        }
        device.start(now_ns);
        let ends = device.running.iter().map(|running| running.2);
        let dues = readers.iter().filter(|reader| reader.sent < reader.bios).flat_map(|reader| reader.due_ns.iter());
        let next_ns = ends.chain(dues.copied()).chain([wake_ns]).min().unwrap();
        assert!(next_ns < u64::MAX, "nothing will ever happen again");
        now_ns = next_ns.max(now_ns);
        while let Some(at) = device.running.iter().position(|running| running.2 <= now_ns) {
            let (bio, start_ns, _) = device.running.swap_remove(at);
            scheduler.ended(&bio, start_ns, now_ns);
            let reader = &mut readers[usize::from(bio.submitter)];
            reader.ended += 1;
            reader.waited_ns.push(now_ns - bio.cookie);
            reader.over_ns = now_ns;
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            reader.due_ns.push(now_ns + reader.think_ns * (80 + (chance >> 33) % 41) / 100);
        }
    }
    scheduler
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
