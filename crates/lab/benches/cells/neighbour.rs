//! `*-greedy-neighbour-*`: effect of a guest with the largest possible load on another one on the same lane.
//!
//! The daemon has one lane, on the other CPU, and two disks. On one a greedy client keeps 21 reads of 64 MiB in flight;
//! on the other, in memory, the neighbour reads 4 KiB at random, one at a time. Its latency lasts from submission until
//! it sees the completion; both clients are one thread that never sleeps. The baseline is the same without the greedy
//! load, in alternating windows.
//!
//! The greedy client's disk is memory (`ram`), or a file on tmpfs (`tmpfs`), which the kernel copies when the lane
//! enters it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_lab::floor::{IO_BYTES, RandomOffsets, Samples, partner_cpu};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, QueueKind, SECTOR_SHIFT};
use blkyard_os::{Clock, SystemClock};

use crate::lines::{DirectSignals, first_answer};
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, CellStore, ListeningServer};

/// Reads of the greedy client under way at one time.
const GREEDY_DEPTH: usize = 21;
const GREEDY_BYTES: u32 = 64 << 20;

pub fn neighbour_cells(quick: bool, report: &mut CellReport) {
    let (window, windows) = if quick { (Duration::from_millis(300), 3) } else { (Duration::from_secs(1), 10) };
    for store in [CellStore::Ram, CellStore::Tmpfs] {
        let name = |what: &str| format!("{}-4k-greedy-neighbour-{what}", store.name());
        if !["p50", "p99"].iter().any(|what| report.wants(&name(what))) {
            continue;
        }
        match measure(store, window, windows) {
            Ok([quiet, greedy]) => {
                for (place, what) in ["p50", "p99"].into_iter().enumerate() {
                    let figure = Figure::median(&name(what), "ns", &greedy[place]);
                    report.add(figure.beside(Some(quiet[place].percentile(50.0))));
                }
            }
            Err(why) => report::skip(&name("p99"), &why),
        }
    }
}

/// The neighbour's p50 and p99: alone, and with the greedy client.
fn measure(store: CellStore, window: Duration, windows: usize) -> Result<[[Samples; 2]; 2], String> {
    let (ground, cpu) = (CellFolder::new()?, Some(partner_cpu()?));
    let (server, socket) = ListeningServer::pair(&ground, store, cpu)?;
    let mut greedy = PolledClient::of(&server.socket, GREEDY_DEPTH, GREEDY_BYTES)?;
    let mut neighbour = PolledClient::of(&socket, 1, IO_BYTES)?;
    // All pages are there once something was read into each.
    for client in [&mut greedy, &mut neighbour] {
        client.ask();
        first_answer(|| client.look())?;
    }
    let clock = Clock::new();
    let mut figures = <[[Samples; 2]; 2]>::default();
    let mut latencies = Vec::new();
    for _ in 0..windows {
        for (with_greedy, figures) in [false, true].into_iter().zip(&mut figures) {
            latencies.clear();
            let start_ns = clock.now_ns();
            let until_ns = start_ns + window.as_nanos() as u64;
            let mut asked_ns = start_ns;
            neighbour.ask();
            while !neighbour.is_idle() {
                if with_greedy && asked_ns < until_ns {
                    greedy.ask();
                }
                greedy.look();
                if neighbour.look() > 0 {
                    let now_ns = clock.now_ns();
                    latencies.push(now_ns - asked_ns);
                    if now_ns < until_ns {
                        asked_ns = now_ns;
                        neighbour.ask();
                    }
                }
            }
            while !greedy.is_idle() {
                greedy.look();
            }
            latencies.sort_unstable();
            for (samples, percent) in figures.iter_mut().zip([50, 99]) {
                samples.push(latencies[(latencies.len() - 1) * percent / 100] as f64);
            }
        }
    }
    Ok(figures)
}

/// One queue of a disk, and a thread that polls it.
struct PolledClient {
    /// Goes before the disk.
    queue: HwQueue<AttachedQueue>,
    free: Vec<Box<Bio>>,
    bytes: u32,
    blocks: u32,
    places: RandomOffsets,
    _disk: Attached,
}

impl PolledClient {
    fn of(socket: &Path, depth: usize, bytes: u32) -> Result<PolledClient, String> {
        let disk =
            Attached::open(AttachConfig::new(socket, Arc::new(SystemClock))).map_err(|error| error.to_string())?;
        let driver = disk.queue(QueueKind::Poll, depth.max(2)).map_err(|error| error.to_string())?;
        let mut info = disk.info().clone();
        // One request each, as a guest may send them.
        info.limits.sectors_max = info.limits.sectors_max.max(bytes >> SECTOR_SHIFT);
        let blocks = (info.capacity_sectors / u64::from(bytes >> SECTOR_SHIFT)) as u32;
        let config = HwQueueConfig { depth: depth.max(2), bios_max: depth.max(2), ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(driver, Arc::new(info), config);
        // All into the same memory: the data is not used.
        let memory = Region::shared(bytes as usize).map_err(|error| error.to_string())?;
        queue.set_memory(&mut DirectSignals, Arc::new(RegionTable::new(vec![memory])));
        let free = (0..depth).map(|_| Bio::with_capacity(1)).collect();
        Ok(PolledClient { queue, free, bytes, blocks, places: RandomOffsets::new(), _disk: disk })
    }

    fn is_idle(&self) -> bool {
        self.queue.is_idle()
    }

    /// Asks for as much as may be under way.
    fn ask(&mut self) {
        for mut bio in self.free.drain(..) {
            bio.reset();
            (bio.op, bio.sectors) = (Op::Read, self.bytes >> SECTOR_SHIFT);
            bio.sector = self.places.next(self.blocks) * u64::from(bio.sectors);
            bio.segments.push(Segment { region: 0, offset: 0, len: self.bytes });
            self.queue.submit(bio);
        }
    }

    /// Returns how many came back.
    fn look(&mut self) -> u64 {
        let PolledClient { queue, free, .. } = self;
        let now_ns = blkyard_os::now_ns();
        queue.issue(&mut DirectSignals, now_ns);
        queue.reap(&mut DirectSignals, now_ns, &mut |bio| free.push(bio)) as u64
    }
}
