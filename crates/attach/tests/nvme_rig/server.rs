//! Our own controller with a disk in memory, behind the server of the `vfio_user` crate. One thread handles messages,
//! another polls the queues.
#![expect(clippy::default_trait_access, reason = "the crate vfio_user does not export the types of its fields")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use blkyard_mem::{Region, RegionTable, View};
use blkyard_mq::{Bio, DeviceInfo, Op, Status};
use blkyard_nvme::registers::CC;
use blkyard_nvme::{
    Controller, ControllerIoQueue, ControllerOptions, ControllerQueueCommand, ControllerQueueReply, ControllerRequest,
    DmaMap, DmaRange, NamespaceTable, NextBio, ServedNamespace,
};
use blkyard_os::now_ns;
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea};

const DOORBELLS_AT: u64 = 0x1000;
/// Command register in configuration space, and its bit for the decoding of memory.
const COMMAND_AT: usize = 4;
const COMMAND_MEMORY: u8 = 1 << 1;
const MSIX_TABLE_AT: u64 = 0x2000;
const BAR0_BYTES: u64 = 0x3000;
const DISK_BYTES: usize = 8 << 20;
const VECTORS: u16 = 3;

/// Faults of a server, to be set while it serves.
#[derive(Debug, Default)]
pub struct ServerFaults {
    /// One command in so many is not completed before its queue ends; zero: none.
    pub hold_every: AtomicU64,
    /// Messages are not answered, and no command is executed.
    pub hangs: AtomicBool,
    /// Invalid entries fill all completion rings once.
    pub writes_nonsense: AtomicBool,
    /// The device is reset once: the controller is disabled, and decodes no memory.
    pub resets: AtomicBool,
}

/// The controller with its queues and disk.
struct Machine {
    faults: Arc<ServerFaults>,
    commands: u64,
    /// Commands that are not completed: completion queue and token.
    held: Vec<(u16, u16)>,
    /// Address of the admin submission queue.
    asq: u64,
    controller: Controller,
    queues: BTreeMap<u16, ControllerIoQueue>,
    disk: Arc<Region>,
    config: Vec<u8>,
    mapped: Vec<(u64, u64, Arc<Region>)>,
    eventfds: Vec<File>,
}

impl Machine {
    fn new(doorbells: View, faults: Arc<ServerFaults>) -> Machine {
        let options = ControllerOptions {
            vendor: 0,
            serial: "S1".into(),
            model: "test model".into(),
            firmware: "1.0".into(),
            subsystem: "nqn.2026-11.test:1".into(),
            controller_id: 1,
            io_queues: 2,
            queue_entries: 64,
            depth: 32,
            vectors: VECTORS,
            transfer_bytes: 64 << 10,
            has_shadow: true,
            fabrics: None,
            doorbell_stride: 0,
        };
        let info =
            DeviceInfo { capacity_sectors: DISK_BYTES as u64 / 512, volatile_cache: true, ..DeviceInfo::default() };
        let mut namespaces = NamespaceTable::new(1);
        namespaces.set(1, ServedNamespace::new(1, 0, &info));
        let controller = Controller::new(options, doorbells, &DmaMap::default(), namespaces).unwrap();
        let mut config = vec![0; 256];
        config[0x06] = 0x10;
        config[0x34] = 0x40;
        config[0x40..0x4c].copy_from_slice(&[0x11, 0, (VECTORS - 1) as u8, 0, 0, 0x20, 0, 0, 0, 0x28, 0, 0]);
        let disk = Region::anonymous(DISK_BYTES).unwrap();
        Machine {
            faults,
            commands: 0,
            held: Vec::new(),
            asq: 0,
            controller,
            queues: BTreeMap::new(),
            disk,
            config,
            mapped: Vec::new(),
            eventfds: Vec::new(),
        }
    }

    /// Refuses accesses to BAR 0 until memory is decoded.
    fn check_decodes(&self) -> io::Result<()> {
        let decodes = self.config[COMMAND_AT] & COMMAND_MEMORY != 0;
        if decodes { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    fn signal(&self, vector: u16) {
        // Unset before the client has set it.
        if let Some(mut eventfd) = self.eventfds.get(usize::from(vector)) {
            let _ = eventfd.write_all(&1_u64.to_ne_bytes());
        }
    }

    /// One turn. Returns whether any part had work.
    fn turn(&mut self) -> bool {
        if self.faults.hangs.load(Ordering::Relaxed) {
            return false;
        }
        if self.faults.writes_nonsense.swap(false, Ordering::Relaxed) {
            self.write_nonsense();
        }
        if self.faults.resets.swap(false, Ordering::Relaxed) {
            self.config[COMMAND_AT] = 0;
            self.controller.write_register(CC as u64, 4, 0).unwrap();
        }
        let mut is_busy = self.controller.poll(now_ns());
        if is_busy {
            self.signal(0);
        }
        while let Some(request) = self.controller.take_request() {
            is_busy = true;
            match request {
                ControllerRequest::Create(queue) => {
                    let cqid = queue.cqid();
                    assert!(self.queues.insert(cqid, *queue).is_none());
                    self.controller.reply(cqid, ControllerQueueReply::Created);
                }
                ControllerRequest::Queue(cqid, command) => {
                    if !matches!(command, ControllerQueueCommand::Abort { .. }) {
                        self.end_held();
                    }
                    self.queues.get_mut(&cqid).unwrap().handle(command);
                }
                ControllerRequest::Flush(number) => self.controller.flushed(number),
            }
        }
        let mut over = Vec::new();
        for cqid in self.queues.keys().copied().collect::<Vec<_>>() {
            let queue = self.queues.get_mut(&cqid).unwrap();
            let mut bio = Bio::with_capacity(queue.segments_max());
            loop {
                match queue.fetch(&mut bio) {
                    NextBio::Bio(token) => {
                        self.commands += 1;
                        let hold_every = self.faults.hold_every.load(Ordering::Relaxed);
                        if hold_every > 0 && self.commands.is_multiple_of(hold_every) {
                            self.held.push((cqid, token));
                            continue;
                        }
                        queue.end(token, carry_out(&self.disk, &bio, queue.table()));
                    }
                    NextBio::Without => {}
                    NextBio::Unavailable => break,
                }
                is_busy = true;
            }
            let vector = queue.publish();
            while let Some(reply) = queue.take_reply() {
                is_busy = true;
                if matches!(reply, ControllerQueueReply::Stopped | ControllerQueueReply::Deleted) {
                    over.push(cqid);
                }
                self.controller.reply(cqid, reply);
            }
            is_busy |= queue.arm();
            vector.into_iter().for_each(|vector| self.signal(vector));
        }
        over.iter().for_each(|cqid| drop(self.queues.remove(cqid)));
        is_busy | self.controller.arm()
    }

    /// Ends held commands, since their queues end.
    fn end_held(&mut self) {
        for (cqid, token) in self.held.drain(..) {
            if let Some(queue) = self.queues.get_mut(&cqid) {
                queue.end(token, Status::Io);
            }
        }
    }

    /// Fills the completion rings that the admin queue was told of with entries for no command.
    fn write_nonsense(&self) {
        let find = |addr: u64, len: usize| {
            let (start, _, region) =
                self.mapped.iter().find(|(start, size, _)| (*start..start + size).contains(&addr))?;
            region.span(addr - start, len)
        };
        for slot in 0..32 {
            let mut sqe = [0; 64];
            find(self.asq + 64 * slot, 64).unwrap().copy_to_slice(&mut sqe);
            // Create I/O Completion Queue.
            if sqe[0] != 5 {
                continue;
            }
            let addr = u64::from_le_bytes(sqe[24..32].try_into().unwrap());
            let entries = usize::from(u16::from_le_bytes([sqe[42], sqe[43]])) + 1;
            for entry in 0..entries {
                // Another queue, an identifier out of range, a phase of either value.
                let words = [7_u64 << 40, 77 << 16 | 0xffff << 32 | (entry as u64 % 3 % 2) << 48];
                let bytes = [words[0].to_le_bytes(), words[1].to_le_bytes()].concat();
                find(addr + 16 * entry as u64, 16).unwrap().copy_from_slice(&bytes);
            }
        }
    }

    /// Maps the present memory for the controller; no queue uses the previous memory afterwards.
    fn remap(&mut self) {
        let regions = self.mapped.iter().map(|(.., region)| Arc::clone(region)).collect();
        let ranges = self.mapped.iter().zip(0..);
        let ranges = ranges.map(|((addr, len, _), region)| DmaRange { addr: *addr, len: *len, region, offset: 0 });
        let map = DmaMap::new(Arc::new(RegionTable::new(regions)), ranges.collect()).unwrap();
        self.controller.set_memory(&map);
        while self.controller.is_remapping() {
            self.turn();
        }
    }
}

/// Executes a bio on the disk.
fn carry_out(disk: &Arc<Region>, bio: &Bio, memory: &RegionTable) -> Status {
    let Some(place) = disk.span(bio.sector * 512, bio.bytes() as usize) else { return Status::Invalid };
    let mut done = 0;
    for segment in &bio.segments {
        let span = memory.resolve(*segment).unwrap();
        let part = place.part(done, span.len());
        match bio.op {
            Op::Read => span.copy_from(&part),
            _ => part.copy_from(&span),
        }
        done += span.len();
    }
    Status::Ok
}

struct Backend(Arc<Mutex<Machine>>);

impl Backend {
    /// Keeps a client waiting.
    fn hang(&self) {
        let faults = Arc::clone(&self.0.lock().unwrap().faults);
        while faults.hangs.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), io::Error> {
        self.hang();
        let machine = self.0.lock().unwrap();
        if region == 7 {
            data.copy_from_slice(&machine.config[offset as usize..offset as usize + data.len()]);
            return Ok(());
        }
        machine.check_decodes()?;
        let value = machine.controller.read_register(offset, data.len());
        let value = value.map_err(|_| io::ErrorKind::InvalidInput)?;
        data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        self.hang();
        let mut machine = self.0.lock().unwrap();
        if region == 7 {
            machine.config[offset as usize..offset as usize + data.len()].copy_from_slice(data);
            return Ok(());
        }
        machine.check_decodes()?;
        if offset < MSIX_TABLE_AT {
            let mut value = [0; 8];
            value[..data.len()].copy_from_slice(data);
            match (offset, data.len()) {
                (0x28, 8) => machine.asq = u64::from_le_bytes(value),
                (0x28, _) => machine.asq = u64::from(u32::from_le_bytes(value[..4].try_into().unwrap())),
                (0x2c, _) => machine.asq |= u64::from(u32::from_le_bytes(value[..4].try_into().unwrap())) << 32,
                _ => {}
            }
            let written = machine.controller.write_register(offset, data.len(), u64::from_le_bytes(value));
            written.map_err(|_| io::ErrorKind::InvalidInput)?;
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        _flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> Result<(), io::Error> {
        let region = Region::map_file(fd.unwrap().as_fd(), offset, size).map_err(io::Error::other)?;
        let mut machine = self.0.lock().unwrap();
        machine.mapped.push((address, size, region));
        machine.remap();
        Ok(())
    }

    fn dma_unmap(&mut self, _flags: DmaUnmapFlags, address: u64, _size: u64) -> Result<(), io::Error> {
        let mut machine = self.0.lock().unwrap();
        machine.mapped.retain(|mapped| mapped.0 != address);
        machine.remap();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), io::Error> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn set_irqs(&mut self, _index: u32, flags: u32, _start: u32, _count: u32, fds: Vec<File>) -> Result<(), io::Error> {
        if flags == 0x24 {
            self.0.lock().unwrap().eventfds.extend(fds);
        }
        Ok(())
    }
}

/// Serves one client; the thread ends with it.
pub fn serve(socket: &Path, shares_doorbells: bool) -> JoinHandle<()> {
    serve_with(socket, shares_doorbells, Arc::default())
}

/// The same with faults.
pub fn serve_with(socket: &Path, shares_doorbells: bool, faults: Arc<ServerFaults>) -> JoinHandle<()> {
    let memory = Region::shared(BAR0_BYTES as usize).unwrap();
    let doorbells = View::new(Arc::clone(&memory), DOORBELLS_AT, 0x1000, 4096).unwrap();
    let machine = Arc::new(Mutex::new(Machine::new(doorbells, faults)));
    let region = |index: u32, size: u64| {
        let mut region = ServerRegion { region_info: Default::default(), sparse_areas: Vec::new(), mmap_fd: None };
        region.region_info.argsz = 32;
        region.region_info.index = index;
        region.region_info.size = size;
        region.region_info.flags = 3;
        region
    };
    let mut regions: Vec<_> = (0..9).map(|index| region(index, 0)).collect();
    regions[0] = region(0, BAR0_BYTES);
    regions[7] = region(7, 256);
    if shares_doorbells {
        regions[0].region_info.flags |= 4;
        regions[0].mmap_fd = Some(memory.file().unwrap().0.as_raw_fd());
        let mut area = SparseArea { area: Default::default() };
        area.area.offset = DOORBELLS_AT;
        area.area.size = 0x1000;
        regions[0].sparse_areas.push(area);
    }
    let irqs = (0..5).map(|index| IrqInfo { index, flags: 1, count: if index == 2 { VECTORS.into() } else { 0 } });
    let server = Server::new(socket, false, irqs.collect(), regions).unwrap();
    std::thread::spawn(move || {
        let over = Arc::new(AtomicBool::new(false));
        let poller = {
            let (machine, over) = (Arc::clone(&machine), Arc::clone(&over));
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    if !machine.lock().unwrap().turn() {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                }
            })
        };
        server.run(&mut Backend(machine)).unwrap();
        over.store(true, Ordering::Relaxed);
        poller.join().unwrap();
        drop(memory);
    })
}
