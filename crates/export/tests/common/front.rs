//! A front-end with manners: the messages of the `vhost` crate, in the order a virtual machine sends them.

use std::net::Shutdown;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

use super::raw::{Raw, Request};
use super::{PATIENCE, Ram, Served, Vq};

/// All features for split rings without in-order completion and without a log of written pages.
pub const SPLIT: u64 = !(1 << 26 | 1 << 34 | 1 << 35);
/// The same without event indexes.
pub const PLAIN: u64 = SPLIT & !(1 << 29);

/// A connected front-end.
pub struct Front {
    polite: Frontend,
    /// The same connection, for messages that the other does not support.
    pub raw: Raw,
    pub features: u64,
    watchdog: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Deref for Front {
    type Target = Frontend;

    fn deref(&self) -> &Frontend {
        &self.polite
    }
}

impl DerefMut for Front {
    fn deref_mut(&mut self) -> &mut Frontend {
        &mut self.polite
    }
}

impl Front {
    /// Connects and negotiates [`PLAIN`].
    pub fn connect(export: &Served) -> Front {
        let mut front = Front::dial(&export.path);
        front.negotiate(PLAIN);
        front
    }

    /// Connects, without a message.
    pub fn dial(path: &Path) -> Front {
        let stream = UnixStream::connect(path).unwrap();
        let (for_frontend, for_watchdog) = (stream.try_clone().unwrap(), stream.try_clone().unwrap());
        let (alive, heard) = channel::<()>();
        // The message layer waits without a limit; a connection that is cut makes it fail.
        let watchdog = std::thread::spawn(move || {
            if heard.recv_timeout(3 * PATIENCE) == Err(RecvTimeoutError::Timeout) {
                eprintln!("a front-end was not answered; its connection is cut");
                let _ = for_watchdog.shutdown(Shutdown::Both);
            }
        });
        let polite = Frontend::from_stream(for_frontend, 64);
        Front { polite, raw: Raw::over(stream), features: 0, watchdog: Some((alive, watchdog)) }
    }

    /// Negotiates the offered ones of these features, and all protocol features.
    pub fn negotiate(&mut self, wanted: u64) {
        self.polite.set_owner().unwrap();
        self.features = self.polite.get_features().unwrap() & wanted;
        // Asked for in any case, so that answers are acknowledged.
        self.polite.set_features(self.features | 1 << 30).unwrap();
        let protocol = self.polite.get_protocol_features().unwrap();
        self.polite.set_protocol_features(protocol).unwrap();
        self.polite.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        self.polite.set_features(self.features).unwrap();
    }

    /// Shares these memories, all at once.
    pub fn share(&self, rams: &[&Ram]) -> vhost::Result<()> {
        let regions: Vec<_> = rams.iter().map(|ram| info(ram)).collect();
        self.polite.set_mem_table(&regions).map(|_| ())
    }

    pub fn add(&mut self, ram: &Ram) -> vhost::Result<()> {
        self.polite.add_mem_region(&info(ram)).map(|_| ())
    }

    pub fn remove(&mut self, ram: &Ram) -> vhost::Result<()> {
        self.polite.remove_mem_region(&info(ram))
    }

    /// Sends a ring's settings except its kick, and enables nothing.
    pub fn set_ring(&self, index: usize, vq: &Vq) {
        let [desc, avail, used] = vq.user_addrs();
        let config = VringConfigData {
            queue_max_size: vq.size,
            queue_size: vq.size,
            flags: 0,
            desc_table_addr: desc,
            used_ring_addr: used,
            avail_ring_addr: avail,
            log_addr: None,
        };
        self.polite.set_vring_num(index, vq.size).unwrap();
        self.polite.set_vring_base(index, vq.next_avail).unwrap();
        self.polite.set_vring_addr(index, &config).unwrap();
        assert!(self.set_event(Request::SetVringCall, index, Some(&vq.call)));
        assert!(self.set_event(Request::SetVringErr, index, Some(&vq.err)));
    }

    /// Sends a kick, call or error descriptor, or a message without one.
    pub fn set_event(&self, request: Request, index: usize, fd: Option<&OwnedFd>) -> bool {
        let word = index as u64 | if fd.is_some() { 0 } else { 0x100 };
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        self.raw.accepts(request, &word.to_ne_bytes(), &fds)
    }

    /// Sets a ring up and lets it run.
    pub fn start(&mut self, index: usize, vq: &Vq) {
        self.set_ring(index, vq);
        assert!(self.set_event(Request::SetVringKick, index, Some(&vq.kick)));
        self.polite.set_vring_enable(index, true).unwrap();
    }

    /// A part of the configuration space.
    pub fn config(&mut self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let room = vec![0; size as usize];
        self.polite.get_config(offset, size, VhostUserConfigFlags::WRITABLE, &room).ok().map(|(_, bytes)| bytes)
    }

    /// Switches the cache between write-back and write-through.
    pub fn set_wce(&mut self, wce: bool) {
        self.polite.set_config(32, VhostUserConfigFlags::WRITABLE, &[u8::from(wce)]).unwrap();
    }

    /// Disconnects, and waits until the export has let go.
    pub fn leave(self, export: &Served) {
        let sessions = export.status().sessions();
        drop(self);
        super::until("the front-end is disconnected", || {
            !export.status().is_connected() || export.status().sessions() > sessions
        });
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.raw.hang_up();
        if let Some((alive, watchdog)) = self.watchdog.take() {
            drop(alive);
            let _ = watchdog.join();
        }
    }
}

fn info(ram: &Ram) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: ram.guest_addr,
        memory_size: ram.len,
        userspace_addr: ram.user_addr,
        mmap_offset: 0,
        mmap_handle: ram.file.as_raw_fd(),
    }
}

/// A front-end of another export, which must not be affected.
pub struct Bystander {
    _front: Front,
    pub vq: Vq,
    round: u64,
}

impl Bystander {
    /// Connects to an export with all that is needed to use its first queue.
    pub fn new(export: &Served) -> Bystander {
        let ram = Ram::new(1 << 20);
        let mut front = Front::connect(export);
        front.share(&[&ram]).unwrap();
        let vq = Vq::new(&ram, 0);
        front.start(0, &vq);
        Bystander { _front: front, vq, round: 0 }
    }

    /// Writes and reads back something new.
    pub fn goes_on(&mut self) {
        self.round += 1;
        let sector = self.round % 1000 * 8;
        let bytes = vec![self.round as u8; 4096];
        assert_eq!(self.vq.write(sector, &bytes), 0);
        assert_eq!(self.vq.read(sector, 4096), bytes);
    }
}

/// A front-end with one running queue.
pub fn one_queue(export: &Served) -> (Front, Vq) {
    let ram = Ram::new(1 << 20);
    let mut front = Front::connect(export);
    front.share(&[&ram]).unwrap();
    let vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    (front, vq)
}
