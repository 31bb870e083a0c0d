//! A controller over vfio-user, served by the `vfio_user` crate: set-up as by a PCI driver, registers, shared
//! doorbells, memory, interrupts and reset.
#![expect(clippy::default_trait_access, reason = "the crate does not export the types of its fields")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use blkyard_attach::{VfioUserConfig, VfioUserController, VfioUserError};
use blkyard_mem::Region;
use blkyard_os::SystemClock;
use blkyard_wire::vfio_user::Command;
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea};

/// Bytes of BAR 0: registers, a page of doorbells, a page with the MSI-X table.
const BAR0_BYTES: usize = 0x3000;
const MSIX_TABLE_AT: usize = 0x2000;
const VECTORS: u32 = 3;
/// `VFIO_REGION_INFO_FLAG_READ`, `_WRITE`, `_MMAP`.
const READ_WRITE: u32 = 3;
const MMAP: u32 = 4;

/// State of the server: the device, and what it received.
#[derive(Debug, Default)]
struct Seen {
    config: Vec<u8>,
    bar0: Vec<u8>,
    /// Offset in the file, address, size, file.
    mapped: Vec<(u64, u64, u64, File)>,
    unmapped: Vec<(u64, u64)>,
    eventfds: Vec<File>,
    unmasked: u32,
    resets: u32,
    refuses_unmask: bool,
    refuses_maps: bool,
}

impl Seen {
    /// After power-on: a list of capabilities with MSI-X as the second.
    fn power_on(&mut self) {
        let mut config = vec![0; 256];
        config[0x06] = 0x10;
        config[0x10] = 0b100;
        config[0x34] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x01, 0x50]);
        config[0x50..0x5c].copy_from_slice(&[0x11, 0, (VECTORS - 1) as u8, 0x40, 0, 0x20, 0, 0, 0, 0x28, 0, 0]);
        self.config = config;
        self.bar0 = vec![0; BAR0_BYTES];
        for vector in 0..VECTORS as usize {
            self.bar0[MSIX_TABLE_AT + 16 * vector + 12] = 1;
        }
    }
}

struct Backend(Arc<Mutex<Seen>>);

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), io::Error> {
        let seen = self.0.lock().unwrap();
        let bytes = if region == 7 { &seen.config } else { &seen.bar0 };
        let range = bytes.get(offset as usize..offset as usize + data.len());
        data.copy_from_slice(range.ok_or(io::ErrorKind::InvalidInput)?);
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        let mut seen = self.0.lock().unwrap();
        let bytes = if region == 7 { &mut seen.config } else { &mut seen.bar0 };
        let range = bytes.get_mut(offset as usize..offset as usize + data.len());
        range.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(data);
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> Result<(), io::Error> {
        let mut seen = self.0.lock().unwrap();
        if seen.refuses_maps || flags != DmaMapFlags::READ_WRITE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        seen.mapped.push((offset, address, size, fd.ok_or(io::ErrorKind::InvalidInput)?));
        Ok(())
    }

    fn dma_unmap(&mut self, _flags: DmaUnmapFlags, address: u64, size: u64) -> Result<(), io::Error> {
        let mut seen = self.0.lock().unwrap();
        seen.mapped.retain(|mapped| mapped.1 != address);
        seen.unmapped.push((address, size));
        Ok(())
    }

    fn reset(&mut self) -> Result<(), io::Error> {
        let mut seen = self.0.lock().unwrap();
        seen.resets += 1;
        seen.power_on();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> Result<(), io::Error> {
        let mut seen = self.0.lock().unwrap();
        assert_eq!(index, 2);
        match flags {
            0x24 => {
                assert_eq!((start as usize, fds.len()), (seen.eventfds.len(), count as usize));
                seen.eventfds.extend(fds);
            }
            0x11 if !seen.refuses_unmask => seen.unmasked = count,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(())
    }
}

/// A server for one client, on its thread.
fn serve(socket: &Path, seen: &Arc<Mutex<Seen>>, doorbells: Option<&File>) -> JoinHandle<()> {
    seen.lock().unwrap().power_on();
    let region = |index: u32, size: u64, flags: u32| {
        let mut region = ServerRegion { region_info: Default::default(), sparse_areas: Vec::new(), mmap_fd: None };
        region.region_info.argsz = 32;
        region.region_info.index = index;
        region.region_info.size = size;
        region.region_info.flags = flags;
        region
    };
    let mut regions: Vec<_> = (0..9).map(|index| region(index, 0, 0)).collect();
    regions[0] = region(0, BAR0_BYTES as u64, READ_WRITE);
    regions[7] = region(7, 256, READ_WRITE);
    if let Some(file) = doorbells {
        regions[0].region_info.flags |= MMAP;
        regions[0].mmap_fd = Some(file.as_raw_fd());
        let mut area = SparseArea { area: Default::default() };
        area.area.offset = 0x1000;
        area.area.size = 0x1000;
        regions[0].sparse_areas.push(area);
    }
    let irqs = (0..5).map(|index| IrqInfo { index, flags: 1, count: if index == 2 { VECTORS } else { 0 } }).collect();
    let server = Server::new(socket, true, irqs, regions).unwrap();
    let mut backend = Backend(Arc::clone(seen));
    std::thread::spawn(move || server.run(&mut backend).unwrap())
}

fn open(socket: &Path) -> Result<VfioUserController, VfioUserError> {
    VfioUserController::open(&VfioUserConfig::new(socket, Arc::new(SystemClock)).unwrap())
}

/// A controller of such a server, and the state of the server.
fn controller(
    folder: &Path,
    seen: Seen,
    doorbells: Option<&File>,
) -> (VfioUserController, Arc<Mutex<Seen>>, JoinHandle<()>) {
    let (socket, seen) = (folder.join("nvme.sock"), Arc::new(Mutex::new(seen)));
    let server = serve(&socket, &seen, doorbells);
    (open(&socket).unwrap(), seen, server)
}

fn assert_is_prepared(seen: &Seen) {
    assert_eq!(seen.config[4] & 6, 6, "memory space and bus master");
    assert_ne!(seen.config[0x10..0x14], [0; 4], "BAR 0 has an address");
    assert_eq!(seen.config[0x53] & 0xc0, 0x80, "MSI-X is enabled and not masked");
}

#[test]
fn a_device_is_prepared_as_by_a_pci_driver() {
    let folder = tempfile::tempdir().unwrap();
    let (controller, seen, server) = controller(folder.path(), Seen::default(), None);
    {
        let seen = seen.lock().unwrap();
        assert_is_prepared(&seen);
        assert_eq!((seen.eventfds.len(), seen.unmasked), (VECTORS as usize, VECTORS));
    }
    assert!(controller.shared_doorbells().is_none());
    assert_eq!(controller.doorbell_bytes(), 0x1000, "the MSI-X table ends them");
    assert_eq!(controller.eventfds().len(), VECTORS as usize);
    drop(controller);
    server.join().unwrap();
}

#[test]
fn registers_are_read_and_written_by_message() {
    let folder = tempfile::tempdir().unwrap();
    let (mut controller, seen, server) = controller(folder.path(), Seen::default(), None);
    controller.write_register(0x14, 0x0046_0001).unwrap();
    assert_eq!(seen.lock().unwrap().bar0[0x14..0x18], 0x0046_0001_u32.to_le_bytes());
    assert_eq!(controller.read_register(0x14), Ok(0x0046_0001));
    let refused = VfioUserError::Refused { request: Command::RegionRead, errno: 0 };
    assert_eq!(controller.read_register(BAR0_BYTES as u64), Err(refused));
    assert_eq!((controller.read_register(0x14), controller.failure()), (Ok(0x0046_0001), None), "it goes on");
    drop(controller);
    server.join().unwrap();
}

#[test]
fn doorbells_are_shared_where_the_server_offers_them() {
    let folder = tempfile::tempdir().unwrap();
    let memory = Region::shared(BAR0_BYTES).unwrap();
    let file = File::from(memory.file().unwrap().0.try_clone_to_owned().unwrap());
    let (controller, _seen, server) = controller(folder.path(), Seen::default(), Some(&file));
    let doorbells = controller.shared_doorbells().unwrap();
    assert_eq!((doorbells.len(), controller.doorbell_bytes()), (0x1000, 0x1000));
    doorbells.store_u32(8, 77, Ordering::Release);
    let mut word = [0; 4];
    file.read_exact_at(&mut word, 0x1008).unwrap();
    assert_eq!(u32::from_le_bytes(word), 77);
    drop(controller);
    server.join().unwrap();
}

#[test]
fn memory_is_mapped_by_descriptor_and_let_go_of() {
    let folder = tempfile::tempdir().unwrap();
    let (controller, seen, server) = controller(folder.path(), Seen::default(), None);
    let (shared, private) = (Region::shared(0x4000).unwrap(), Region::anonymous(0x4000).unwrap());
    shared.span(0x1003, 5).unwrap().copy_from_slice(b"hello");
    let mapping = controller.domain().map(vec![Arc::clone(&shared), Arc::clone(&private)]);
    assert!(blkyard_sys::is_ready(controller.dma_changed(), blkyard_sys::PollFlags::IN));
    let address = controller.mapped_address(&shared, 0x1003).unwrap();
    assert_eq!(controller.mapped_address(&shared, 0x4000), None);
    assert_eq!(controller.mapped_address(&private, 0), None, "private memory has no descriptor");
    {
        let seen = seen.lock().unwrap();
        let (offset, base, size, file) = &seen.mapped[0];
        assert_eq!((seen.mapped.len(), *size), (1, 0x4000));
        let mut bytes = [0; 5];
        file.read_exact_at(&mut bytes, offset + (address - base)).unwrap();
        assert_eq!(&bytes, b"hello");
        assert_eq!(address % 4096, 3, "the offset in a page is the same on both sides");
    }
    drop(mapping);
    assert_eq!(Arc::strong_count(&shared), 2, "kept until the server has let go of it");
    controller.sync_dma().unwrap();
    assert_eq!(Arc::strong_count(&shared), 1);
    assert_eq!(seen.lock().unwrap().unmapped, [(address - 0x1003, 0x4000)]);
    assert_eq!(controller.mapped_address(&shared, 0), None);
    drop(controller);
    server.join().unwrap();
}

#[test]
fn memory_that_the_server_refuses_has_no_address() {
    let folder = tempfile::tempdir().unwrap();
    let seen = Seen { refuses_maps: true, ..Seen::default() };
    let (controller, _seen, server) = controller(folder.path(), seen, None);
    let region = Region::shared(0x1000).unwrap();
    let _mapping = controller.domain().map(vec![Arc::clone(&region)]);
    assert_eq!((controller.mapped_address(&region, 0), controller.failure()), (None, None));
    drop(controller);
    server.join().unwrap();
}

#[test]
fn interrupts_come_by_eventfd() {
    let folder = tempfile::tempdir().unwrap();
    let (controller, seen, server) = controller(folder.path(), Seen::default(), None);
    let fired = |vector: usize| controller.eventfds()[vector].take();
    assert!((0..3).all(|vector| !fired(vector)));
    io::Write::write_all(&mut &seen.lock().unwrap().eventfds[1], &1_u64.to_ne_bytes()).unwrap();
    assert!(!fired(0) && fired(1) && !fired(2));
    drop(controller);
    server.join().unwrap();
}

#[test]
fn vectors_are_unmasked_in_the_table_where_no_message_does_it() {
    let folder = tempfile::tempdir().unwrap();
    let seen = Seen { refuses_unmask: true, ..Seen::default() };
    let (controller, seen, server) = controller(folder.path(), seen, None);
    let seen = seen.lock().unwrap();
    assert!((0..VECTORS as usize).all(|vector| seen.bar0[MSIX_TABLE_AT + 16 * vector + 12] == 0));
    drop(seen);
    drop(controller);
    server.join().unwrap();
}

#[test]
fn a_reset_device_is_prepared_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut controller, seen, server) = controller(folder.path(), Seen::default(), None);
    controller.write_register(0x14, 1).unwrap();
    let eventfds = std::mem::take(&mut seen.lock().unwrap().eventfds);
    assert_eq!(controller.reset_device(), Ok(true));
    assert_eq!(controller.read_register(0x14), Ok(0));
    {
        let seen = seen.lock().unwrap();
        assert_eq!((seen.resets, seen.eventfds.len()), (1, eventfds.len()));
        assert_is_prepared(&seen);
    }
    drop(controller);
    server.join().unwrap();
}

#[test]
fn a_socket_without_a_server_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = open(&folder.path().join("none.sock")).unwrap_err();
    assert!(matches!(&error, VfioUserError::Socket { socket, .. } if socket.ends_with("none.sock")), "{error}");
}
