//! Daemons that are killed, as processes, again and again, under one front-end that keeps its memory and its records.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

use crate::common::{AnyDevice, DATA_MAX, Data, Front, PLAIN, Ram, Request, VQ_BYTES, Vq, World, kind};

/// Daemons that die, one after the other; or as many as this says.
const KILLS: u64 = 40;
const KILLS_WANTED: &str = "BLKYARD_TEST_KILLS";
const QUEUES: u16 = 2;
const IMAGE_BYTES: u64 = 4 << 20;

const IMAGE: &str = "BLKYARD_TEST_IMAGE_TO_SERVE";

/// Not a separate test: the daemon of the next one.
#[test]
fn another_process_serves() {
    let Some(path) = std::env::var_os(IMAGE) else { return };
    let world = World::new(vec![AnyDevice::file(Path::new(&path))], usize::from(QUEUES), 1);
    println!("\nserves {}", world.exports[0].path.display());
    loop {
        std::thread::park();
    }
}

/// A daemon that does not outlive its test.
struct Daemon {
    process: Child,
    socket: PathBuf,
}

impl Daemon {
    fn start(folder: &Path) -> Daemon {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::another_process_serves", "--nocapture"])
            .env(IMAGE, folder.join("image"))
            // Place of files that it cannot remove.
            .env("TMPDIR", folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let socket = lines.find_map(|line| line.unwrap().strip_prefix("serves ").map(PathBuf::from)).unwrap();
        Daemon { process, socket }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One queue's writes: at most one in each block, each with a unique number.
struct Writer {
    vq: Vq,
    number: u64,
    /// Content of each block, and whether it is being written.
    places: Vec<(u64, bool)>,
}

impl Writer {
    fn new(ram: &Arc<Ram>, number: u64) -> Writer {
        let vq = Vq::new(ram, number);
        let places = vec![(0, false); usize::from(vq.slots())];
        Writer { vq, number, places }
    }

    fn sector(&self, slot: u16) -> u64 {
        (self.number * 64 + u64::from(slot)) * (DATA_MAX >> 9)
    }

    fn bytes(&self, slot: u16, count: u64) -> Vec<u8> {
        [self.number, u64::from(slot), count, !count].map(u64::to_le_bytes).concat().repeat(DATA_MAX as usize / 32)
    }

    /// Takes completions; returns their number.
    fn take(&mut self) -> usize {
        let mut taken = 0;
        while let Some((head, written)) = self.vq.poll() {
            let slot = head as u16 / 3;
            let place = &mut self.places[usize::from(slot)];
            assert!(std::mem::replace(&mut place.1, false), "answered and not asked for: {head}");
            assert_eq!((self.vq.status(slot), written), (0, 1));
            taken += 1;
        }
        taken
    }

    /// Writes all blocks without a write in flight.
    fn put(&mut self) {
        for slot in 0..self.vq.slots() {
            let place = &mut self.places[usize::from(slot)];
            if !std::mem::replace(&mut place.1, true) {
                place.0 += 1;
                let count = place.0;
                let bytes = self.bytes(slot, count);
                self.vq.put(slot, kind::OUT, self.sector(slot), Data::Out(&bytes));
            }
        }
        self.vq.publish();
    }
}

/// State that a front-end keeps while daemons come and go.
struct Kept {
    ram: Arc<Ram>,
    record: Option<(VhostUserInflight, std::fs::File)>,
}

impl Kept {
    /// Connects to a daemon as QEMU does.
    fn connect(&mut self, daemon: &Daemon, writers: &[Writer]) -> Front {
        let mut front = Front::dial(&daemon.socket);
        front.negotiate(PLAIN);
        let wanted = VhostUserInflight::new(0, 0, QUEUES, 64);
        let record = self.record.get_or_insert_with(|| front.get_inflight_fd(&wanted).unwrap());
        front.set_inflight_fd(&record.0, record.1.as_raw_fd()).unwrap();
        front.share(&[&self.ram]).unwrap();
        for (index, Writer { vq, .. }) in writers.iter().enumerate() {
            front.set_ring(index, vq);
            // The only position known from the ring.
            front.set_vring_base(index, vq.used.load_u16(2, Acquire)).unwrap();
            assert!(front.set_event(Request::SetVringKick, index, Some(&vq.kick)));
            front.set_vring_enable(index, true).unwrap();
        }
        front
    }
}

#[test]
fn daemons_are_killed_amid_writes_and_each_write_is_answered_once() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::File::create(folder.path().join("image")).unwrap().set_len(IMAGE_BYTES).unwrap();
    let mut kept = Kept { ram: Ram::new(u64::from(QUEUES) * VQ_BYTES), record: None };
    let mut writers: Vec<_> = (0..QUEUES).map(|number| Writer::new(&kept.ram, number.into())).collect();
    let mut daemon = Daemon::start(folder.path());
    let mut front = kept.connect(&daemon, &writers);
    let mut pauses = Vec::new();
    let kills = std::env::var(KILLS_WANTED).ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    for kill in 0..kills {
        // Some die at once, some later; all with the largest number of requests in flight, or what is left of it.
        let enough = kill * 7 % 50;
        let mut done = 0;
        let start = Instant::now();
        while done < enough as usize {
            assert!(start.elapsed() < crate::common::PATIENCE, "nothing is answered after kill {kill}");
            writers.iter_mut().for_each(Writer::put);
            done += writers.iter_mut().map(Writer::take).sum::<usize>();
        }
        writers.iter_mut().for_each(Writer::put);
        std::thread::sleep(Duration::from_micros(kill * 37 % 400));
        let killed = Instant::now();
        drop(daemon);
        // Answered before the end.
        for writer in &mut writers {
            writer.take();
        }
        drop(front);
        daemon = Daemon::start(folder.path());
        front = kept.connect(&daemon, &writers);
        writers.iter_mut().for_each(Writer::put);
        crate::common::until("the next daemon answers", || writers.iter_mut().any(|writer| writer.take() > 0));
        pauses.push(killed.elapsed());
    }
    for writer in &mut writers {
        crate::common::until("all is answered", || {
            writer.take();
            writer.places.iter().all(|(_, is_written)| !is_written)
        });
        for slot in 0..writer.vq.slots() {
            let count = writer.places[usize::from(slot)].0;
            let found = writer.vq.read(writer.sector(slot), DATA_MAX as u32);
            assert!(found == writer.bytes(slot, count), "queue {}, place {slot}", writer.number);
        }
    }
    pauses.sort_unstable();
    println!("pauses: {:?} at the median, {:?} at most", pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    drop(front);
}
