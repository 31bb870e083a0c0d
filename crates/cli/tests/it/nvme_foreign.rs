//! An NVMe export over vfio-user, used by a client that others wrote: that of the crate `vfio_user`, which Cloud
//! Hypervisor has. The NVMe driver on it is a minimal one with one I/O queue, written from the specification, so that
//! no line of the host side is ours.
//!
//! Limits of that client, as of 0.1.7:
//!
//! - It ignores the errno of a reply: a refused DMA_MAP or DEVICE_SET_IRQS is seen by its effect only.
//! - It reads the fixed size of a successful reply, so that it waits forever for the rest of an error to a command
//!   whose reply has fields. Each client here is therefore limited in time: see [`with_client`].
//! - `Client::resettable` is the opposite of what the server says.
//! - It ignores the server's `max_msg_fds`, and sends the eventfds of all vectors with one message. The export takes
//!   them.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{RecvTimeoutError, channel};

use blkyard_mem::{Region, View};
use blkyard_sys::{EventFd, PollFlags, is_ready};
use vfio_user::Client;

use crate::common::{Daemon, PATIENCE, inspect, wait_until};

/// Regions and the interrupt type of a PCI device in VFIO.
const BAR0: u32 = 0;
const MSIX_TABLE: u32 = 4;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// `VFIO_REGION_INFO_FLAG_READ` and `_WRITE`; `_MMAP` and `_CAPS`.
const READ_WRITE: u32 = 3;
const SPARSE_MMAP: u32 = 4 | 8;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`, and the same with `VFIO_IRQ_SET_DATA_NONE`.
const EVENTFDS: u32 = 0x24;
const NO_EVENTFDS: u32 = 0x21;

/// Controller registers.
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// Enable, with submission entries of 64 and completion entries of 16 bytes.
const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;

/// Opcodes of admin commands.
const CREATE_SQ: u8 = 0x01;
const CREATE_CQ: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const SET_FEATURES: u8 = 0x09;
/// Opcodes of I/O commands.
const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
/// Status codes with their type, without the bits of phase, retry delay, More and Do Not Retry.
const SUCCESS: u16 = 0;
const DATA_TRANSFER_ERROR: u16 = 0x04;
const LBA_OUT_OF_RANGE: u16 = 0x80;

const PAGE: u64 = 4096;
/// Entries of each ring.
const ENTRIES: u16 = 8;
/// The memory of the rings, by page, and its address for the device.
const RINGS_AT: u64 = 0x1_0000_0000;
const RING_PAGES: u64 = 5;
const IDENTIFY_PAGE: u64 = 4;
/// The memory of the data: a page to write from and one to read to.
const DATA_AT: u64 = 0x7fff_0000;
const DATA_PAGES: u64 = 2;
/// Blocks of a page.
const BLOCKS: u32 = 8;

const IMAGE_BYTES: u64 = 16 << 20;

/// Submission and completion ring of one queue pair: one page each.
struct RingPair {
    qid: u16,
    sq: View,
    cq: View,
    tail: u16,
    head: u16,
    /// Phase of the next completion.
    phase: bool,
}

impl RingPair {
    fn new(qid: u16, memory: &Arc<Region>) -> RingPair {
        let page = |number: u64| View::new(Arc::clone(memory), number * PAGE, PAGE as usize, 64).unwrap();
        let first = 2 * u64::from(qid);
        let (sq, cq) = (page(first), page(first + 1));
        sq.span(0, PAGE as usize).unwrap().fill(0);
        cq.span(0, PAGE as usize).unwrap().fill(0);
        RingPair { qid, sq, cq, tail: 0, head: 0, phase: true }
    }

    fn sq_at(&self) -> u64 {
        RINGS_AT + 2 * u64::from(self.qid) * PAGE
    }

    fn cq_at(&self) -> u64 {
        self.sq_at() + PAGE
    }
}

/// An NVMe driver on the client.
struct ForeignHost {
    client: Client,
    /// Bytes from one doorbell to the next.
    stride: u64,
    /// Memory of the doorbells, if the export shares it.
    doorbells: Option<View>,
    rings: Arc<Region>,
    data: Arc<Region>,
    queues: Vec<RingPair>,
    eventfds: Vec<EventFd>,
    next_cid: u16,
}

impl ForeignHost {
    /// Connects, and sets everything up until the controller is enabled.
    fn connect(socket: &Path, vectors: u32) -> ForeignHost {
        let mut client = Client::new(socket).unwrap();
        let doorbells = map_doorbells(&client);
        let shared = |pages: u64| Region::shared((pages * PAGE) as usize).unwrap();
        let (rings, data) = (shared(RING_PAGES), shared(DATA_PAGES));
        map(&mut client, &rings, RINGS_AT);
        map(&mut client, &data, DATA_AT);
        let irqs = client.get_irq_info(MSIX).unwrap();
        // `VFIO_IRQ_INFO_EVENTFD`
        assert_eq!((irqs.index, irqs.flags & 1, irqs.count), (MSIX, 1, vectors));
        let eventfds: Vec<_> = (0..vectors).map(|_| EventFd::new().unwrap()).collect();
        let raw: Vec<_> = eventfds.iter().map(|eventfd| eventfd.as_fd().as_raw_fd()).collect();
        client.set_irqs(MSIX, EVENTFDS, 0, vectors, &raw).unwrap();
        // Memory space and bus master.
        client.region_write(CONFIG, 4, &6_u16.to_le_bytes()).unwrap();
        let mut host =
            ForeignHost { client, stride: 0, doorbells, rings, data, queues: Vec::new(), eventfds, next_cid: 0 };
        host.stride = 4 << (host.read8(CAP) >> 32 & 0xf);
        host.enable();
        host
    }

    fn read4(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.client.region_read(BAR0, offset, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn read8(&mut self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.client.region_read(BAR0, offset, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn write4(&mut self, offset: u64, value: u32) {
        self.client.region_write(BAR0, offset, &value.to_le_bytes()).unwrap();
    }

    fn write8(&mut self, offset: u64, value: u64) {
        self.client.region_write(BAR0, offset, &value.to_le_bytes()).unwrap();
    }

    /// Enables the controller with an empty admin queue.
    fn enable(&mut self) {
        assert_eq!((self.read4(CC) & 1, self.read4(CSTS) & 1), (0, 0), "the controller is disabled");
        let admin = RingPair::new(0, &self.rings);
        let (asq, acq, last) = (admin.sq_at(), admin.cq_at(), u32::from(ENTRIES - 1));
        self.queues = vec![admin];
        self.write4(AQA, last << 16 | last);
        self.write8(ASQ, asq);
        self.write8(ACQ, acq);
        assert_eq!((self.read8(ASQ), self.read8(ACQ)), (asq, acq));
        self.write4(CC, ENABLE);
        wait_until("the controller is ready", || {
            let status = self.read4(CSTS);
            assert_eq!(status & 2, 0, "Controller Fatal Status");
            status & 1 == 1
        });
    }

    /// Executes a command on a queue and waits for its interrupt. Returns its first result dword and its status.
    fn execute(&mut self, qid: u16, opcode: u8, nsid: u32, data: u64, command: [u32; 3]) -> (u32, u16) {
        let cid = self.next_cid;
        self.next_cid += 1;
        let mut sqe = [0; 64];
        sqe[0] = opcode;
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        sqe[4..8].copy_from_slice(&nsid.to_le_bytes());
        sqe[24..32].copy_from_slice(&data.to_le_bytes());
        for (at, dword) in (40..).step_by(4).zip(command) {
            sqe[at..at + 4].copy_from_slice(&dword.to_le_bytes());
        }
        let queue = &mut self.queues[usize::from(qid)];
        queue.sq.span(u64::from(queue.tail) * 64, 64).unwrap().copy_from_slice(&sqe);
        queue.tail = (queue.tail + 1) % ENTRIES;
        let tail = queue.tail;
        self.ring(2 * u64::from(qid), tail);
        wait_until("the queue's vector is signalled", || is_ready(&self.eventfds[usize::from(qid)], PollFlags::IN));
        assert!(self.eventfds[usize::from(qid)].take());
        let queue = &mut self.queues[usize::from(qid)];
        let at = usize::from(queue.head) * 16;
        let last = queue.cq.load_u32(at + 12, Acquire);
        assert_eq!(last >> 16 & 1 == 1, queue.phase, "the entry is written before the vector is signalled");
        assert_eq!(last as u16, cid);
        let positions = queue.cq.load_u32(at + 8, Acquire);
        assert_eq!((positions as u16, (positions >> 16) as u16), (tail, qid), "submission queue head and identifier");
        let result = queue.cq.load_u32(at, Acquire);
        queue.head = (queue.head + 1) % ENTRIES;
        queue.phase ^= queue.head == 0;
        let head = queue.head;
        self.ring(2 * u64::from(qid) + 1, head);
        (result, (last >> 17) as u16 & 0x7ff)
    }

    /// Writes the doorbell of this number: tails have even ones.
    fn ring(&mut self, number: u64, value: u16) {
        let offset = number * self.stride;
        match &self.doorbells {
            Some(doorbells) => doorbells.store_u32(offset as usize, value.into(), Release),
            None => self.write4(DOORBELLS + offset, value.into()),
        }
    }

    fn admin(&mut self, opcode: u8, data: u64, command: [u32; 3]) -> u32 {
        let nsid = u32::from(opcode == IDENTIFY && command[0] == 0);
        let (result, status) = self.execute(0, opcode, nsid, data, command);
        assert_eq!(status, SUCCESS, "admin command {opcode:#x}");
        result
    }

    fn identify(&mut self, cns: u32) -> Vec<u8> {
        self.admin(IDENTIFY, RINGS_AT + IDENTIFY_PAGE * PAGE, [cns, 0, 0]);
        let mut bytes = vec![0; PAGE as usize];
        self.rings.span(IDENTIFY_PAGE * PAGE, bytes.len()).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    /// Creates I/O queue 1, with interrupts by vector 1.
    fn create_queue(&mut self) {
        // Number of Queues: one of each kind.
        self.admin(SET_FEATURES, 0, [7, 0, 0]);
        let queue = RingPair::new(1, &self.rings);
        let (sq, cq, size) = (queue.sq_at(), queue.cq_at(), u32::from(ENTRIES - 1) << 16 | 1);
        self.admin(CREATE_CQ, cq, [size, 1 << 16 | 0b11, 0]);
        self.admin(CREATE_SQ, sq, [size, 1 << 16 | 0b01, 0]);
        self.queues.push(queue);
    }

    /// Reads or writes a page of blocks. Returns the status.
    fn transfer(&mut self, opcode: u8, slba: u64) -> u16 {
        let page = if opcode == READ { PAGE } else { 0 };
        self.execute(1, opcode, 1, DATA_AT + page, [slba as u32, (slba >> 32) as u32, BLOCKS - 1]).1
    }

    /// Writes a page of a pattern to blocks.
    fn write(&mut self, slba: u64, seed: u8) {
        self.data.span(0, PAGE as usize).unwrap().copy_from_slice(&pattern(seed));
        assert_eq!(self.transfer(WRITE, slba), SUCCESS);
    }

    /// Reads blocks, which must have this pattern.
    fn verify(&mut self, slba: u64, seed: u8) {
        let span = self.data.span(PAGE, PAGE as usize).unwrap();
        span.fill(!seed);
        assert_eq!(self.transfer(READ, slba), SUCCESS);
        let mut bytes = vec![0; PAGE as usize];
        self.data.span(PAGE, bytes.len()).unwrap().copy_to_slice(&mut bytes);
        assert!(bytes == pattern(seed), "block {slba} is not what was written");
    }

    /// What a driver does with a disk: writes and reads back, more often than a ring has entries.
    fn check(&mut self, seed: u8) {
        for number in 0..3 * u8::try_from(ENTRIES).unwrap() {
            self.write(u64::from(number) * 64, seed ^ number);
        }
        assert_eq!(self.execute(1, FLUSH, 1, 0, [0; 3]).1, SUCCESS);
        self.check_written(seed);
    }

    /// Reads what `check` wrote with this seed.
    fn check_written(&mut self, seed: u8) {
        for number in 0..3 * u8::try_from(ENTRIES).unwrap() {
            self.verify(u64::from(number) * 64, seed ^ number);
        }
    }
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..PAGE as usize).map(|at| (at / 512 * 31 + at) as u8 ^ seed).collect()
}

fn map(client: &mut Client, region: &Region, address: u64) {
    let (file, offset) = region.file().unwrap();
    client.dma_map(offset, address, region.len() as u64, file.as_raw_fd()).unwrap();
}

/// Maps the doorbells by the description of BAR 0, if the export shares them.
fn map_doorbells(client: &Client) -> Option<View> {
    let bar = client.region(BAR0).unwrap();
    let file = bar.file_offset.as_ref()?;
    assert_eq!((bar.flags, bar.sparse_areas.len()), (READ_WRITE | SPARSE_MMAP, 1));
    let area = bar.sparse_areas[0];
    assert!(area.offset == DOORBELLS && area.offset + area.size <= bar.size, "{area:?} of {} bytes", bar.size);
    let region = Region::map_file(file.file().as_fd(), file.start() + area.offset, area.size).unwrap();
    View::new(region, 0, area.size as usize, 4)
}

/// Runs a client on a thread, limited in time. A failed client ends the daemon, which ends the wait of the client.
fn with_client<T: Send + 'static>(daemon: Daemon, client: impl FnOnce() -> T + Send + 'static) -> (Daemon, T) {
    let (sender, done) = channel();
    let thread = std::thread::spawn(move || {
        let result = client();
        let _ = sender.send(());
        result
    });
    let ended = done.recv_timeout(PATIENCE);
    assert_ne!(ended, Err(RecvTimeoutError::Timeout), "the client waits for a reply");
    match thread.join() {
        Ok(result) => (daemon, result),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn serve(folder: &Path, options: &str) -> Daemon {
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(IMAGE_BYTES).unwrap();
    let export = format!("vfio-user:n?serial=foreign{options}");
    Daemon::start(folder, &["--control", "c", "--device", "file:disk.img", "--export", &export])
}

fn is_left(folder: &Path) -> bool {
    inspect(folder, &[])["exports"][0]["session"].is_null()
}

/// A session from the first message to a disconnection, and the next one of another client.
fn drive(options: &str, has_shared_doorbells: bool) {
    let folder = tempfile::tempdir().unwrap();
    let daemon = serve(folder.path(), &format!("&queues=2{options}"));
    let path = folder.path().to_owned();
    let (daemon, ()) = with_client(daemon, move || {
        let mut host = ForeignHost::connect(&path.join("n"), 3);
        assert_eq!(host.doorbells.is_some(), has_shared_doorbells);
        for (index, len) in [(MSIX_TABLE, 4096), (CONFIG, 4096), (1, 0)] {
            let region = host.client.region(index).unwrap();
            assert_eq!((region.size, region.file_offset.is_none()), (len, true), "region {index}");
            assert_eq!(region.flags, if len > 0 { READ_WRITE } else { 0 });
        }
        let mut class = [0; 3];
        host.client.region_read(CONFIG, 9, &mut class).unwrap();
        assert_eq!(class, [0x02, 0x08, 0x01], "an NVMe I/O controller");
        assert!(host.read4(VS) >= 0x0001_0400);

        let controller = host.identify(1);
        assert_eq!(controller[4..24], *b"foreign             ");
        let namespace = host.identify(0);
        assert_eq!(u64::from_le_bytes(namespace[..8].try_into().unwrap()), IMAGE_BYTES / 512);
        host.create_queue();
        host.check(1);
        assert_eq!(host.transfer(READ, IMAGE_BYTES / 512 - 1), LBA_OUT_OF_RANGE);
        let session = inspect(&path, &[])["exports"][0]["session"].clone();
        assert_eq!((&session["io_queues"], &session["regions"]), (&1.into(), &2.into()), "{session}");

        // The data is out of reach while it is not mapped, the rings are not.
        host.client.dma_unmap(DATA_AT, DATA_PAGES * PAGE).unwrap();
        assert_eq!(host.transfer(READ, 0), DATA_TRANSFER_ERROR);
        let data = Arc::clone(&host.data);
        map(&mut host.client, &data, DATA_AT);
        host.check_written(1);

        host.client.reset().unwrap();
        assert_eq!((host.read4(CC), host.read4(CSTS), host.read4(AQA)), (0, 0, 0));
        // A reset keeps neither queues nor the command register, but memory and eventfds.
        host.client.region_write(CONFIG, 4, &6_u16.to_le_bytes()).unwrap();
        host.enable();
        host.create_queue();
        host.check_written(1);
        host.check(2);
        // Vectors without eventfds are no error.
        host.client.set_irqs(MSIX, NO_EVENTFDS, 0, 0, &[]).unwrap();
        host.client.shutdown().unwrap();
    });
    wait_until("the client is gone", || is_left(folder.path()));
    let path = folder.path().to_owned();
    let (daemon, ()) = with_client(daemon, move || {
        let mut host = ForeignHost::connect(&path.join("n"), 3);
        host.create_queue();
        host.check_written(2);
        host.check(3);
    });
    wait_until("the client is gone", || is_left(folder.path()));
    daemon.stop();
}

#[test]
fn a_foreign_client_drives_the_controller() {
    drive("", false);
}

#[test]
fn a_foreign_client_maps_the_doorbells() {
    drive("&doorbells=shared", true);
}

#[test]
fn eventfds_of_all_vectors_come_with_one_message() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = serve(folder.path(), "&queues=64");
    let path = folder.path().to_owned();
    let (daemon, ()) = with_client(daemon, move || {
        let mut host = ForeignHost::connect(&path.join("n"), 65);
        host.create_queue();
        host.check(1);
    });
    daemon.stop();
}
