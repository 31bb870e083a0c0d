//! The control path of one vhost-user-blk export: handles the front-end's messages.
//!
//! Owned by its export, which handles one message at a time. It keeps the front-end's settings of each ring. A ring
//! runs while it is enabled and has size, addresses and a kick descriptor. Before a change under a running ring, mainly
//! of memory, the ring is suspended: it drains, and continues from the same position (see [`rings`]). Rings and
//! requests are never accessed here.

mod log;
mod messages;
mod rings;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkyard_mem::DmaMapping;
use blkyard_mq::DeviceInfo;
use blkyard_sys::EventFd;
use blkyard_virtio::{CACHE_MODE_AT, DirtyLog, Features, RingBase};
use vhost::vhost_user::GpuBackend;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend as FrontEndChannel, Error, Result, VhostUserBackendReqHandlerMut};

use crate::core::{Changed, ExportLog, PendingFlush};
use crate::vhost_user::advice;
use crate::vhost_user::channel::BackendChannel;
use crate::vhost_user::handover::SessionState;
use crate::vhost_user::inflight::{self, Records};
use crate::vhost_user::memory::{Announced, Memory, SLOTS_MAX, check_bytes};
use crate::vhost_user::view::{SessionView, VringView};
use crate::vhost_user::wire::Message;
use crate::vhost_user::{BackendConfig, VirtqueueRemote};

use rings::{Kick, Vring, may_have_size};

/// Maximum number of queues of an export, as for QEMU's vhost-user-blk device.
pub const QUEUES_MAX: u16 = 64;
/// Maximum ring size, entries: QEMU's bound for virtio devices.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Maximum data segments of a request: a ring of 128 less header and status, as in other back-ends.
pub const SEG_MAX: u32 = 126;

/// Supported protocol features.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE);

type RegionBase = vhost::VhostUserMemoryRegionBase;

pub(crate) struct Backend {
    config: BackendConfig,
    vrings: Vec<Vring>,
    memory: Memory,
    /// Keeps the memory mapped for the device, independent of its queues.
    mappings: Vec<DmaMapping>,
    /// Whether the memory was checked for signs of a running guest.
    memory_seen: bool,
    /// In-flight records of the queues, if the front-end keeps such memory.
    records: Option<Records>,
    /// Log of written pages, once the front-end has set it.
    log: Option<Arc<DirtyLog>>,
    /// Eventfd that announces log entries, if the front-end wants it.
    log_eventfd: Option<Arc<EventFd>>,
    /// Negotiated features; empty before negotiation.
    features: Features,
    /// Negotiated protocol features; and all that were ever negotiated, since earlier messages may depend on them.
    protocol: Option<u64>,
    protocol_ever: u64,
    /// Whether writes may need a flush; undefined before negotiation.
    write_back: Arc<AtomicBool>,
    /// The front-end has read or chosen the cache mode in this session. Otherwise its guest has that of an earlier one.
    knows_cache_mode: bool,
    connection: Arc<UnixStream>,
    /// Log of the export, for all lines except debug lines.
    lines: Arc<ExportLog>,
    /// Back-end channel to the front-end.
    channel: Option<BackendChannel>,
    /// The lane of a queue has ended: no session can continue or start.
    lane_gone: bool,
}

impl Backend {
    pub(crate) fn new(config: BackendConfig, connection: Arc<UnixStream>, lines: Arc<ExportLog>) -> Backend {
        let vrings = (0..config.disk.queues()).map(|_| Vring::default()).collect();
        Backend {
            vrings,
            lines,
            memory: Memory::default(),
            mappings: config.domains.iter().map(|domain| domain.map(Vec::new())).collect(),
            memory_seen: false,
            records: None,
            log: None,
            log_eventfd: None,
            features: Features::empty(),
            protocol: None,
            protocol_ever: 0,
            write_back: Arc::default(),
            knows_cache_mode: false,
            connection,
            channel: None,
            lane_gone: false,
            config,
        }
    }

    /// Drains the queues, releases the guest's memory, and returns the queues for the next session. Returns none if a
    /// lane has ended; queues on other lanes are drained in any case.
    pub(crate) fn end(mut self) -> (BackendConfig, Result<()>) {
        let _ = self.suspend_all();
        // A queue that did not drain has lost its lane and its poller.
        self.config.queues.iter().for_each(VirtqueueRemote::close);
        (self.config, if self.lane_gone { Err(Error::BackendInternalError) } else { Ok(()) })
    }

    pub(crate) fn config_mut(&mut self) -> &mut BackendConfig {
        &mut self.config
    }

    /// Sets the back-end channel.
    pub(crate) fn set_channel(&mut self, channel: BackendChannel) {
        self.channel = Some(channel);
    }

    /// Changes the device: queues drain, change and resume. The front-end is notified of a changed size.
    pub(crate) fn change(&mut self, info: &Arc<DeviceInfo>) -> std::result::Result<Changed, String> {
        let resized = info.capacity_sectors != self.config.disk.info().capacity_sectors;
        let running = self.suspend_all().map_err(|error| error.to_string())?;
        let changed = self.config.change(0, info);
        let again = running.into_iter().try_for_each(|index| self.run_if_ready(index));
        changed.and(again.map_err(|error| error.to_string()))?;
        if !resized {
            return Ok(Changed::Silent);
        }
        match self.channel.as_ref().map(BackendChannel::config_changed) {
            Some(Ok(())) => Ok(Changed::Told),
            Some(Err(error)) => {
                self.lines.warn(format_args!("the front-end cannot be notified of the new size: {error}; it reads the size when it connects again"));
                Ok(Changed::Untold)
            }
            None => Ok(Changed::Untold),
        }
    }

    /// Handover state of the session, with the received part of a message. The queues drain and stay quiesced; returns
    /// the indexes of those that ran.
    pub(crate) fn hand_over(&mut self, part: Message) -> (Vec<usize>, std::result::Result<SessionState, String>) {
        let running = match self.suspend_all() {
            Ok(running) => running,
            Err(error) => return (Vec::new(), Err(error.to_string())),
        };
        let state = || {
            let (setup, run) = self.session_messages()?;
            let connection = self.connection.try_clone()?.into();
            Ok(SessionState { connection, queues: self.vrings.len() as u16, part, setup, run })
        };
        (running, state().map_err(|error: std::io::Error| error.to_string()))
    }

    /// Resumes the queues after a failed handover.
    pub(crate) fn go_on(&mut self, running: Vec<usize>) {
        for index in running {
            if let Err(error) = self.run_if_ready(index) {
                self.lines.warn(format_args!("queue {index} could not be resumed: {error}"));
            }
        }
    }

    /// State of the session for inspection.
    pub(crate) fn view(&self) -> SessionView {
        let queue = |vring: &Vring| VringView { size: vring.size, enabled: vring.enabled, running: vring.running };
        let (regions, memory_bytes) = self.memory.extent();
        SessionView {
            features: self.features,
            regions,
            memory_bytes,
            has_channel: self.channel.is_some(),
            queues: self.vrings.iter().map(queue).collect(),
        }
    }

    fn offered(&self) -> Features {
        self.config.disk.features() | Features::PROTOCOL_FEATURES | Features::LOG_ALL
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let served = self.vrings.len();
        if index as usize >= served {
            return Err(self.refuse("a queue", advice::no_queue(index, served)));
        }
        Ok(&mut self.vrings[index as usize])
    }

    /// Logs the reason for a refused message; the front-end only learns of the refusal.
    fn refuse(&self, what: &str, why: impl std::fmt::Display) -> Error {
        self.lines.warn(format_args!("{what} refused: {why}"));
        Error::InvalidParam
    }

    /// Updates from the negotiated features whether writes need a flush to be durable (virtio 1.2, 5.2.5.1).
    fn update_write_back(&self) {
        let flush = self.features.contains(Features::FLUSH);
        let wce = self.config.disk.wce();
        let write_back = if self.features.contains(Features::CONFIG_WCE) { wce } else { flush };
        self.write_back.store(write_back, Ordering::Release);
    }

    /// Bytes of the memory with the in-flight records.
    fn record_bytes(&self) -> u64 {
        self.records.as_ref().map_or(0, Records::bytes)
    }

    /// Notes the cache mode for the next daemon, if the front-end keeps memory for that.
    fn note_cache_mode(&self) {
        self.records.iter().for_each(|records| records.note_write_back(self.config.disk.wce()));
    }

    /// Makes durable what was fetched before: a driver in write-through mode sends no more flushes. Each ring flushes
    /// what it had in flight, and the first one, running or not, what has completed.
    fn flush(&self) -> Result<()> {
        self.config.queues[0].open().map_err(|why| self.refuse("write-through mode", why))?;
        let running = (0..self.vrings.len()).filter(|index| *index == 0 || self.vrings[*index].running);
        let flushes = running.map(|index| self.config.queues[index].begin_flush());
        let results = flushes.collect::<std::result::Result<Vec<_>, _>>();
        let results = results.and_then(|flushes| flushes.into_iter().map(PendingFlush::wait).collect());
        let results: Vec<bool> = results.map_err(|_| Error::BackendInternalError)?;
        if results.into_iter().all(|is_durable| is_durable) {
            Ok(())
        } else {
            Err(self.refuse("write-through mode", "earlier writes cannot be made durable"))
        }
    }

    fn event(&self, what: &str, file: Option<File>) -> Result<Option<Arc<EventFd>>> {
        let event = file.map(EventFd::from_foreign).transpose().map_err(|error| self.refuse(what, error))?;
        Ok(event.map(Arc::new))
    }
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.suspend_all()?;
        for vring in &mut self.vrings {
            *vring = Vring { call: vring.call.take(), error: vring.error.take(), ..Vring::default() };
        }
        if let Some(records) = &self.records {
            records.forget(self.features);
        }
        self.features = Features::empty();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered().bits())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let offered = self.offered();
        let taken = Features::from_bits(features).filter(|taken| offered.contains(*taken));
        let taken = taken.ok_or_else(|| {
            self.refuse("the features", format!("{:#x} were never offered", features & !offered.bits()))
        })?;
        if taken != self.features {
            self.suspend_all()?;
            if (taken ^ self.features).contains(Features::RING_PACKED) {
                self.vrings.iter_mut().for_each(|vring| vring.change_format(taken));
            }
            self.features = taken;
            self.update_write_back();
        }
        // Without protocol features no message enables a ring.
        if !taken.contains(Features::PROTOCOL_FEATURES) {
            self.vrings.iter_mut().for_each(|vring| vring.enabled = true);
        }
        (0..self.vrings.len()).try_for_each(|index| self.run_if_ready(index))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !PROTOCOL_FEATURES.bits() {
            0 => {
                self.protocol = Some(features);
                self.protocol_ever |= features;
                Ok(())
            }
            more => Err(self.refuse("the protocol features", format!("{more:#x} were never offered"))),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<RegionBase>>> {
        if regions.len() != files.len() {
            return Err(self.refuse("the memory table", "its number of descriptors differs from its number of regions"));
        }
        let announced = regions.iter().map(|region| Announced {
            guest_addr: region.guest_phys_addr,
            user_addr: region.user_addr,
            len: region.memory_size,
            file_offset: region.mmap_offset,
        });
        let announced: Vec<_> = announced.zip(files).collect();
        self.change_memory(|_| Memory::table(&announced))?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(SLOTS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<RegionBase>> {
        let announced = single(region);
        self.change_memory(|memory| memory.with(announced, &file))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let announced = single(region);
        self.change_memory(|memory| memory.without(&announced))
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let features = self.features;
        let size = u16::try_from(num).ok().filter(|size| may_have_size(features, *size)).ok_or_else(|| {
            let what = if features.contains(Features::RING_PACKED) { "from 1" } else { "a power of two" };
            self.refuse("a ring size", format!("{num} is not {what} up to {QUEUE_SIZE_MAX}"))
        })?;
        self.change_vring(index, |vring| vring.size = size)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        self.change_vring(index, |vring| {
            vring.addresses = Some([descriptor, available, used]);
            vring.log_at = logged.then_some(log);
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        if !self.features.contains(Features::RING_PACKED) && base > u16::MAX.into() {
            return Err(self.refuse("a ring's base", format!("{base} is not an index of the ring")));
        }
        self.change_vring(index, |vring| vring.base = Some(RingBase::from_bits(base)))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.vring(index)?;
        self.suspend(index as usize)?;
        let features = self.features;
        let vring = self.vring(index)?;
        // Stops the ring; the next kick descriptor starts it again.
        vring.kick = Kick::Unknown;
        Ok(VhostUserVringState::new(index, vring.base(features).bits()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = usize::from(index);
        self.vring(index as u32)?;
        let event = file
            .map(EventFd::from_foreign_to_read)
            .transpose()
            .map_err(|error| self.refuse("a kick descriptor", error))?;
        self.suspend(index)?;
        self.vrings[index].kick = event.map_or(Kick::Polled, |event| Kick::Rung(Arc::new(event)));
        self.run_if_ready(index)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let event = self.event("a call descriptor", file)?;
        let vring = self.vring(u32::from(index))?;
        vring.call.clone_from(&event);
        if vring.running {
            let index = usize::from(index);
            self.config.queues[index].set_call(event).map_err(|gone| self.lost_lane(index, &gone))?;
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let event = self.event("an error descriptor", file)?;
        self.change_vring(u32::from(index), |vring| vring.error = event)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.enabled = enable;
        if enable { self.run_if_ready(index as usize) } else { self.suspend(index as usize) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        self.knows_cache_mode |= (offset..offset.saturating_add(size)).contains(&CACHE_MODE_AT);
        self.config.disk.read(offset, size).ok_or_else(|| {
            // The session continues after this message, so a warning would let the front-end fill the log.
            tracing::debug!("{}: {size} bytes at {offset} of the configuration are not there", self.config.name);
            Error::InvalidParam
        })
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        if !self.config.disk.write(offset, bytes) {
            let what = format!("{} bytes at {offset}: only the cache mode can be written, as 0 or 1", bytes.len());
            return Err(self.refuse("writing the configuration", what));
        }
        let was = self.write_back.load(Ordering::Relaxed);
        self.update_write_back();
        if was && !self.write_back.load(Ordering::Relaxed) {
            self.flush()?;
        }
        self.knows_cache_mode = true;
        self.note_cache_mode();
        Ok(())
    }

    fn set_backend_req_fd(&mut self, _channel: FrontEndChannel) {
        // Our duplicate can send messages that this one cannot: see `Backend::set_channel`.
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no display"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no objects are shared"))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let VhostUserInflight { num_queues, queue_size, .. } = *wanted;
        if usize::from(num_queues) > self.vrings.len() || queue_size > QUEUE_SIZE_MAX {
            let why = format!(
                "{num_queues} queues of {queue_size} entries exceed {} queues of {QUEUE_SIZE_MAX}",
                self.vrings.len()
            );
            return Err(self.refuse("the in-flight memory", why));
        }
        let made = inflight::make(self.features, num_queues, queue_size, self.config.disk.wce());
        let (file, bytes) = made.map_err(|error| self.refuse("the in-flight memory", error))?;
        Ok((VhostUserInflight::new(bytes, 0, num_queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *kept;
        check_bytes(&[self.memory.extent().1, self.log_bytes(), mmap_size])
            .map_err(|error| self.refuse("the in-flight memory", error))?;
        let records = Records::map(self.features, &file, mmap_offset, mmap_size, num_queues, queue_size)
            .map_err(|error| self.refuse("the in-flight memory", error))?;
        let running = self.suspend_all()?;
        if let Some(wce) = records.write_back().filter(|_| !self.knows_cache_mode) {
            self.config.disk.set_wce(wce);
            self.update_write_back();
        }
        self.records = Some(records);
        self.note_cache_mode();
        running.into_iter().try_for_each(|index| self.run_if_ready(index))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("device state was not offered"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("device state was not offered"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("shared memory regions were not offered"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        self.keep_log(log, &file)
    }
}

fn single(region: &VhostUserSingleMemoryRegion) -> Announced {
    Announced {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        len: region.memory_size,
        file_offset: region.mmap_offset,
    }
}
