//! The measured code: queue core, NVMe driver and rings, with our controller on a null device at the other end.
//!
//! One thread plays both sides. A round submits all bios of all devices, has the controller answer them, and takes the
//! completions. Submission and completion are separate phases; the controller's work is in neither. In measured rounds
//! it reads no data pointers, as a null device needs none: otherwise its walk of long lists would evict the driver's
//! memory from the CPU's cache. In others it parses all commands, so that each is valid.

use std::sync::Arc;

use blkyard_mem::{BufferAccess, Region, RegionTable, RegisteredBuffer, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, SECTOR_BYTES, SECTOR_SHIFT, Status};
use blkyard_nvme::{
    IdentifyController, IdentifyNamespace, LbaFormat, LoopbackBuffers, LoopbackController, NvmeLoopback,
    NvmeLoopbackConfig,
};
use blkyard_sim::Rng;

use super::{Bed, IoMemory};
use crate::study::measure::{RunPhase, run_uncounted};

/// Bytes of a page.
const PAGE: u32 = 4096;
/// Blocks of each device.
const BLOCKS: u64 = 1 << 31;
/// List pages beyond one for each command.
const LIST_PAGES: u16 = 5;

type NullServe = fn(&Bio, &RegionTable) -> Status;

/// Devices under load.
pub(crate) struct PremappedRig {
    devices: Vec<RigDevice>,
    bytes: u32,
    memory: IoMemory,
    rng: Rng,
    now_ns: u64,
}

/// One device with its bios.
struct RigDevice {
    hw: HwQueue<NvmeLoopback<NullServe>>,
    free: Vec<Box<Bio>>,
    /// Data of each bio, by its cookie.
    data: Vec<Segment>,
    _buffers: Vec<Arc<RegisteredBuffer>>,
}

impl PremappedRig {
    /// Idle devices, with a buffer of its own for each bio.
    ///
    /// # Panics
    /// If the system has no memory left.
    pub(crate) fn new(bed: Bed, bytes: u32, memory: IoMemory) -> PremappedRig {
        let devices = (0..bed.devices()).map(|_| RigDevice::new(bed.depth(), bytes, memory)).collect();
        PremappedRig { devices, bytes, memory, rng: Rng::new(1), now_ns: 0 }
    }

    /// I/Os of a round.
    pub(crate) fn ios(&self) -> u64 {
        self.devices.iter().map(|device| device.data.len() as u64).sum()
    }

    /// Each phase once, with so many bios for a call: submission and completion, as `run` measures them.
    pub(crate) fn round(&mut self, batch: usize, run: RunPhase<'_>) -> [u64; 2] {
        self.run(batch, run, LoopbackController::answer)
    }

    /// The same unmeasured. The controller parses each command.
    pub(crate) fn check(&mut self, batch: usize) {
        self.run(batch, &mut run_uncounted, LoopbackController::turn);
    }

    fn run(&mut self, batch: usize, run: RunPhase<'_>, execute: fn(&mut LoopbackController<NullServe>)) -> [u64; 2] {
        self.now_ns += 1000;
        let PremappedRig { devices, bytes, memory, rng, now_ns } = self;
        let submit =
            run(&mut || devices.iter_mut().for_each(|device| device.submit(batch, *bytes, *memory, rng, *now_ns)));
        devices.iter_mut().for_each(|device| execute(&mut device.hw.driver_mut().controller));
        let complete = run(&mut || devices.iter_mut().for_each(|device| device.reap(*now_ns)));
        assert!(devices.iter().all(|device| device.free.len() == device.data.len()), "an I/O was not completed");
        [submit, complete]
    }
}

impl RigDevice {
    fn new(depth: usize, bytes: u32, memory: IoMemory) -> RigDevice {
        let mut namespace = IdentifyNamespace { blocks: BLOCKS, capacity: BLOCKS, ..IdentifyNamespace::default() };
        namespace.set_lba_format(0, LbaFormat { block_shift: SECTOR_SHIFT as u8, ..LbaFormat::default() });
        let config = NvmeLoopbackConfig {
            controller: IdentifyController::default(),
            namespace,
            entries: depth as u16 + 1,
            list_pages: depth as u16 + LIST_PAGES,
            has_shadow: false,
            buffers: LoopbackBuffers::Scattered(u64::from(PAGE)),
        };
        let null: NullServe = |_, _| Status::Ok;
        let stride = u64::from(bytes.next_multiple_of(PAGE));
        let region = Region::shared(depth * stride as usize).unwrap_or_else(|error| panic!("memory of I/Os: {error}"));
        let loopback = NvmeLoopback::new(&config, null).unwrap_or_else(|error| panic!("a queue pair: {error}"));
        let info = Arc::new(loopback.info.clone());
        let config = HwQueueConfig { depth, bios_max: depth, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(loopback, info, config);
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        let place = |slot: usize| slot as u64 * stride;
        let mut buffers: Vec<Arc<RegisteredBuffer>> = Vec::new();
        if memory == IoMemory::Mapped {
            let register = |slot| RegisteredBuffer::new(&region, place(slot), stride, BufferAccess::ReadWrite);
            buffers.extend((0..depth).map(|slot| register(slot).unwrap_or_else(|error| panic!("{error}"))));
            let known = buffers.iter().filter(|buffer| hw.add_buffer(&mut (), buffer)).count();
            assert_eq!(known, depth, "the queue has the memory of all buffers");
        }
        let data = |slot: usize| match memory {
            IoMemory::Mapped => buffers[slot].segment(0, bytes),
            IoMemory::Plain | IoMemory::Registered => Segment { region: 0, offset: place(slot), len: bytes },
        };
        let bio = |slot| {
            let mut bio = Bio::with_capacity(bytes.div_ceil(PAGE) as usize);
            bio.cookie = slot;
            bio
        };
        RigDevice {
            hw,
            free: (0..depth as u64).map(bio).collect(),
            data: (0..depth).map(data).collect(),
            _buffers: buffers,
        }
    }

    #[inline]
    fn submit(&mut self, batch: usize, bytes: u32, memory: IoMemory, rng: &mut Rng, now_ns: u64) {
        let RigDevice { hw, free, data, .. } = self;
        let sectors = bytes / SECTOR_BYTES as u32;
        while !free.is_empty() {
            for _ in 0..batch {
                let Some(mut bio) = free.pop() else { break };
                let slot = bio.cookie;
                bio.reset();
                bio.cookie = slot;
                bio.op = Op::Read;
                bio.sector = rng.below(BLOCKS / u64::from(sectors)) * u64::from(sectors);
                bio.sectors = sectors;
                let data = data[slot as usize];
                if memory == IoMemory::Plain {
                    push_pages(&mut bio, data);
                } else {
                    bio.segments.push(data);
                }
                hw.submit(bio);
            }
            hw.issue(&mut (), now_ns);
        }
    }

    #[inline]
    fn reap(&mut self, now_ns: u64) {
        let RigDevice { hw, free, .. } = self;
        hw.reap(&mut (), now_ns, &mut |bio| {
            assert!(bio.status == Status::Ok, "the null device fails nothing");
            free.push(bio);
        });
    }
}

/// Names the data page by page, as memory that was pinned for this I/O.
fn push_pages(bio: &mut Bio, data: Segment) {
    let end = data.offset + u64::from(data.len);
    for offset in (data.offset..end).step_by(PAGE as usize) {
        bio.segments.push(Segment { offset, len: PAGE.min((end - offset) as u32), ..data });
    }
}
