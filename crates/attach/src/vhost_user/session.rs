//! One connection to a back-end: its negotiation, and the memory and rings it knows. [vhost-user protocol]
//!
//! Owned by the control thread of its device. `control.rs` decides what follows the end of a connection.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::Region;
use blkyard_mq::DeviceInfo;
use blkyard_sys::{EventFd, PollFd, PollFlags, is_ready};
use blkyard_virtio::Features;
use blkyard_virtio::driver::{BlkDisk, BlkLayout, BlkRing, DRIVER_FEATURES};
use rustix::fs::FileType;

use super::channel::BackendChannelReader;
use super::message::{Connection, DESCRIPTORS_MAX, FrontendMessage, state, words};
use super::rings::Rings;
use super::{AttachConfig, QUEUE_SIZE_MAX};
use crate::protocol::{NewRing, QueueShared, RemoteSession};
use crate::queues::has;
use crate::{AttachError, TalkError};

/// Protocol features, by bit.
mod protocol {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const BACKEND_REQ: u64 = 1 << 5;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// Supported protocol features.
    pub(super) const KNOWN: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// Bytes of the configuration space up to the last field that we read (`write_zeroes_may_unmap`, and its padding). Some
/// back-ends refuse to be asked for more than they have.
const CONFIG_BYTES: u32 = 60;
/// The queue's number in the messages about its descriptors is one byte.
const QUEUES_MAX: u64 = 256;

/// Memory in which a back-end records its requests in flight, for its successor.
#[derive(Debug)]
pub(crate) struct InflightMemory {
    file: OwnedFd,
    bytes: u64,
    offset: u64,
    queues: u16,
    queue_size: u16,
}

/// Where a ring lies: the same for us and the back-end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingPlace {
    /// First byte of the queue's memory.
    pub(crate) addr: u64,
    pub(crate) layout: BlkLayout,
    /// Position at which the back-end continues, in the protocol's format.
    pub(crate) base: u32,
}

/// A connection.
#[derive(Debug)]
pub struct BackendSession {
    talk: Connection,
    /// Where the back-end tells us of changes, if it does.
    channel: Option<BackendChannelReader>,
    /// Signalled by a back-end that thinks a ring is broken. One that is gone, and yet is not, still has that of
    /// another session.
    error: EventFd,
    protocol: u64,
    /// Its disk.
    disk: BlkDisk,
    layout: BlkLayout,
    /// Queues that we use.
    queues: u16,
    /// Regions it can know at one time.
    slots: usize,
    known: Vec<Arc<Region>>,
    /// The back-end serves rings.
    runs: bool,
}

impl BackendSession {
    fn agree(config: &AttachConfig, mut talk: Connection) -> Result<BackendSession, AttachError> {
        let failed = |source| AttachError::Talk { disk: config.name(), source };
        let missing = |feature, cure| AttachError::Feature { disk: config.name(), feature, cure };
        let system = |source| AttachError::System { disk: config.name(), source };
        talk.tell(FrontendMessage::SET_OWNER, &[], &[]).map_err(failed)?;
        let offered = talk.ask_number(FrontendMessage::GET_FEATURES).map_err(failed)?;
        if offered & Features::PROTOCOL_FEATURES.bits() == 0 {
            return Err(missing(
                "protocol features",
                "a disk needs them for its configuration; use a vhost-user-blk one",
            ));
        }
        let protocol = talk.ask_number(FrontendMessage::GET_PROTOCOL_FEATURES).map_err(failed)? & protocol::KNOWN;
        if protocol & protocol::CONFIG == 0 {
            return Err(missing("its configuration (CONFIG)", "it serves no disk; use a vhost-user-blk one"));
        }
        talk.tell(FrontendMessage::SET_PROTOCOL_FEATURES, &words(&[protocol]), &[]).map_err(failed)?;
        if protocol & protocol::REPLY_ACK != 0 {
            talk.acknowledge();
        }
        let mut features = Features::from_bits_truncate(offered) & DRIVER_FEATURES;
        if !config.packed {
            features.remove(Features::RING_PACKED);
        } else if !features.contains(Features::RING_PACKED) {
            return Err(missing(
                "packed rings (RING_PACKED)",
                "omit packed=on, or enable packed rings at the back-end",
            ));
        }
        let queues = if protocol & protocol::MQ == 0 {
            1
        } else {
            talk.ask_number(FrontendMessage::GET_QUEUE_NUM).map_err(failed)?
        };
        let slots = match protocol & protocol::CONFIGURE_MEM_SLOTS {
            0 => DESCRIPTORS_MAX,
            _ => talk.ask_number(FrontendMessage::GET_MAX_MEM_SLOTS).map_err(failed)?.try_into().unwrap_or(usize::MAX),
        };
        let channel = if protocol & protocol::BACKEND_REQ == 0 {
            None
        } else {
            let (channel, theirs) = BackendChannelReader::pair().map_err(system)?;
            talk.tell(FrontendMessage::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).map_err(failed)?;
            Some(channel)
        };
        let wire = features | Features::PROTOCOL_FEATURES;
        talk.tell(FrontendMessage::SET_FEATURES, &words(&[wire.bits()]), &[]).map_err(failed)?;
        let space = read_config(&talk).map_err(failed)?;
        let disk = BlkDisk::new(&config.name(), features, &space, config.queue_size)?;
        let have = queues.min(u64::from(disk.queues)).min(QUEUES_MAX) as u16;
        let wanted = config.queues.unwrap_or(have.max(1));
        if wanted > have {
            let cure = if have == 0 {
                "start the back-end with at least one queue"
            } else {
                "lower ?queues=N, or start the back-end with more queues"
            };
            return Err(AttachError::Queues { disk: config.name(), wanted: wanted.into(), have: have.into(), cure });
        }
        let (layout, error) = (BlkLayout::new(&disk, config.queue_size), EventFd::new().map_err(system)?);
        let (known, runs) = (Vec::new(), false);
        Ok(BackendSession { talk, channel, error, protocol, disk, layout, queues: wanted, slots, known, runs })
    }

    /// The same, in one message.
    fn set_table(&mut self, wanted: Vec<Arc<Region>>) -> Result<(), TalkError> {
        let wanted = fitting(wanted, &self.known, self.slots);
        if is_same(&wanted, &self.known) {
            return Ok(());
        }
        let mut payload = [wanted.len() as u32, 0].into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<_>>();
        wanted.iter().for_each(|region| payload.extend(words(&place(region))));
        let files: Vec<_> = wanted.iter().filter_map(|region| Some(region.file()?.0)).collect();
        self.talk.tell(FrontendMessage::SET_MEM_TABLE, &payload, &files)?;
        self.known = wanted;
        self.talk.settle()
    }

    /// Memory for the in-flight record, if the back-end keeps one.
    fn new_inflight(&self) -> Result<Option<InflightMemory>, TalkError> {
        if !self.is_tracked() {
            return Ok(None);
        }
        let queue_size = self.layout.size;
        let mut record = InflightMemory { file: self.dummy()?, bytes: 0, offset: 0, queues: self.queues, queue_size };
        let (answer, file) = self.talk.ask(FrontendMessage::GET_INFLIGHT_FD, &record.words())?;
        let word = |at: usize| answer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
        match (word(0), word(8), file) {
            (Some(bytes), Some(offset), Some(file)) if bytes > 0 && has_bytes(&file, offset, bytes) => {
                (record.bytes, record.offset, record.file) = (bytes, offset, file);
                Ok(Some(record))
            }
            _ => Err(TalkError::Nonsense { request: "GET_INFLIGHT_FD".into() }),
        }
    }

    /// Placeholder for a descriptor.
    fn dummy(&self) -> Result<OwnedFd, TalkError> {
        self.talk.as_fd().try_clone_to_owned().map_err(|error| TalkError::System(error.to_string()))
    }

    /// Passes the previous back-end's in-flight record, or memory for one.
    fn set_inflight(&self, record: &InflightMemory) -> Result<(), TalkError> {
        self.talk.tell(FrontendMessage::SET_INFLIGHT_FD, &record.words(), &[record.file.as_fd()])
    }

    /// Tells the back-end of a ring, which it serves once it is enabled.
    fn start_ring(&self, number: u16, ring: &RingPlace, kick: &EventFd, call: &EventFd) -> Result<(), TalkError> {
        let talk = &self.talk;
        let [desc, avail, used] = ring.layout.parts.map(|part| ring.addr + part as u64);
        talk.tell(FrontendMessage::SET_VRING_NUM, &state(number, ring.layout.size.into()), &[])?;
        talk.tell(FrontendMessage::SET_VRING_BASE, &state(number, ring.base), &[])?;
        let addresses = [state(number, 0), words(&[desc, used, avail, 0])].concat();
        talk.tell(FrontendMessage::SET_VRING_ADDR, &addresses, &[])?;
        for (request, event) in [
            (FrontendMessage::SET_VRING_CALL, call),
            (FrontendMessage::SET_VRING_ERR, &self.error),
            (FrontendMessage::SET_VRING_KICK, kick),
        ] {
            talk.tell(request, &words(&[number.into()]), &[event.as_fd()])?;
        }
        Ok(())
    }
}

impl RemoteSession for BackendSession {
    type Config = AttachConfig;
    type Agreed = BlkDisk;
    type Ring = BlkRing;
    type Rings = Rings;

    fn open(config: &AttachConfig, end: &Arc<EventFd>) -> Result<BackendSession, AttachError> {
        BackendSession::agree(config, connect(config, end)?)
    }

    fn agreed(&self) -> &BlkDisk {
        &self.disk
    }

    fn check_same(&self, old: &BlkDisk) -> Result<(), TalkError> {
        let new = &self.disk;
        let what = if new.features != old.features {
            format!("it offers features {:?} where {:?} were negotiated", new.features, old.features)
        } else if new.info.limits != old.info.limits {
            "it changed its limits".into()
        } else {
            return Ok(());
        };
        Err(TalkError::Changed { what })
    }

    fn info(&self) -> &DeviceInfo {
        &self.disk.info
    }

    fn read_info(&self, config: &AttachConfig) -> Result<DeviceInfo, AttachError> {
        let space = read_config(&self.talk).map_err(|source| AttachError::Talk { disk: config.name(), source })?;
        Ok(BlkDisk::new(&config.name(), self.disk.features, &space, config.queue_size)?.info)
    }

    fn queues(&self) -> usize {
        self.queues.into()
    }

    fn set_queues(&mut self, queues: usize) {
        self.queues = queues as u16;
    }

    fn depth_max(&self, config: &AttachConfig) -> usize {
        self.disk.depth(config.queue_size).into()
    }

    fn depth_cure() -> String {
        format!("lower the depth, or raise ?queue_size=N, up to {QUEUE_SIZE_MAX}")
    }

    fn is_tracked(&self) -> bool {
        self.protocol & protocol::INFLIGHT_SHMFD != 0
    }

    fn begin(&mut self) {
        self.talk.begin();
    }

    fn adds_regions(&self) -> bool {
        self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0
    }

    /// Without messages for single regions a table replaces the previous one, and some back-ends begin their session
    /// anew for that.
    fn must_quiesce(&self, wanted: &[Arc<Region>]) -> bool {
        !self.adds_regions() && !is_same(&fitting(wanted.to_vec(), &self.known, self.slots), &self.known)
    }

    fn set_regions(&mut self, wanted: Vec<Arc<Region>>) -> Result<(), TalkError> {
        if !self.adds_regions() {
            return self.set_table(wanted);
        }
        if is_same(&wanted, &self.known) {
            return Ok(());
        }
        let (stays, goes): (Vec<_>, _) =
            std::mem::take(&mut self.known).into_iter().partition(|known| has(&wanted, known));
        self.known = stays;
        for region in goes {
            let payload = [vec![0; 8], words(&place(&region))].concat();
            self.talk.tell(FrontendMessage::REM_MEM_REG, &payload, &[])?;
        }
        for region in wanted {
            if has(&self.known, &region) || self.known.len() >= self.slots {
                continue;
            }
            let payload = [vec![0; 8], words(&place(&region))].concat();
            let Some((file, _)) = region.file() else { continue };
            match self.talk.tell(FrontendMessage::ADD_MEM_REG, &payload, &[file]) {
                Ok(()) => {}
                Err(TalkError::Refused { .. }) => continue,
                Err(error) => return Err(error),
            }
            self.known.push(region);
        }
        self.talk.settle()
    }

    fn knows(&self, regions: &[Arc<Region>]) -> bool {
        regions.iter().all(|region| has(&self.known, region))
    }

    fn regions(&self) -> usize {
        self.known.len()
    }

    fn make_rings(&self, queues: &[QueueShared]) -> Result<(Rings, Vec<NewRing<BlkRing>>), TalkError> {
        let region = Region::shared(self.layout.bytes * queues.len()).map_err(system)?;
        let mut rings = Rings { region, record: self.new_inflight()?, kicks: Vec::new() };
        let mut new = Vec::with_capacity(queues.len());
        for (number, queue) in queues.iter().enumerate() {
            let (memory, violations) = (rings.memory(number, &self.layout), Arc::clone(&queue.violations));
            let ring = BlkRing::new(&self.disk, self.layout.size, &memory, violations).map_err(system)?;
            let kick = Arc::new(EventFd::new().map_err(system)?);
            rings.kicks.push(Arc::clone(&kick));
            new.push(NewRing { ring, kick });
        }
        Ok((rings, new))
    }

    fn ring_region(rings: &Rings) -> Option<&Arc<Region>> {
        Some(&rings.region)
    }

    fn is_recorded(rings: &Rings) -> bool {
        rings.record.is_some()
    }

    fn start_rings(&mut self, rings: &Rings, queues: &[QueueShared], resumed: bool) -> Result<(), TalkError> {
        rings.record.iter().try_for_each(|record| self.set_inflight(record))?;
        for (number, queue) in queues.iter().enumerate() {
            let place = rings.place(number, &self.layout, self.disk.features, resumed);
            // Also if the queue is polled and never asks for a call: libvhost-user panics without a call descriptor.
            self.start_ring(number as u16, &place, &rings.kicks[number], &queue.call)?;
        }
        for number in 0..self.queues {
            self.talk.tell(FrontendMessage::SET_VRING_ENABLE, &state(number, 1), &[])?;
        }
        self.talk.settle()?;
        self.runs = true;
        Ok(())
    }

    fn stop_rings(&mut self) -> Result<(), TalkError> {
        for number in 0..self.queues {
            self.talk.tell(FrontendMessage::SET_VRING_ENABLE, &state(number, 0), &[])?;
            self.talk.ask(FrontendMessage::GET_VRING_BASE, &state(number, 0))?;
        }
        self.runs = false;
        Ok(())
    }

    fn runs(&self) -> bool {
        self.runs
    }

    fn add_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.push(PollFd::new(&self.error, PollFlags::IN));
        fds.push(PollFd::new(&self.talk, PollFlags::IN | PollFlags::RDHUP));
        fds.extend(self.channel.iter().map(|channel| PollFd::new(channel, PollFlags::IN)));
    }

    fn look(&mut self) -> Result<bool, TalkError> {
        if self.error.take() {
            return Err(TalkError::RingError);
        }
        if is_ready(&self.talk, PollFlags::IN | PollFlags::RDHUP) {
            // All answers were read: this is the end, or nonsense.
            return Err(TalkError::HungUp);
        }
        match self.channel.as_mut().map(BackendChannelReader::read) {
            None => Ok(false),
            Some(Ok(changed)) => Ok(changed),
            Some(Err(_)) => {
                // No change of the disk will be reported any more.
                self.channel = None;
                Ok(false)
            }
        }
    }

    fn leave(self) -> OwnedFd {
        self.talk.hang_up()
    }
}

fn system(error: impl std::fmt::Display) -> TalkError {
    TalkError::System(error.to_string())
}

impl InflightMemory {
    fn words(&self) -> Vec<u8> {
        let mut payload = words(&[self.bytes, self.offset]);
        payload.extend(self.queues.to_ne_bytes());
        payload.extend(self.queue_size.to_ne_bytes());
        // As the compilers of C lay it out.
        payload.extend([0; 4]);
        payload
    }
}

/// Whether a descriptor is memory, or a file, with these bytes.
fn has_bytes(file: &OwnedFd, offset: u64, bytes: u64) -> bool {
    let end = offset.checked_add(bytes).and_then(|end| i64::try_from(end).ok());
    let stat = rustix::fs::fstat(file).ok().zip(end);
    stat.is_some_and(|(stat, end)| {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && end <= stat.st_size
    })
}

/// The words of a region: addresses, which are ours, size, and offset in its file.
fn place(region: &Region) -> [u64; 4] {
    let addr = addr_of(region);
    let offset = region.file().map_or(0, |(_, offset)| offset);
    [addr, region.len() as u64, addr, offset]
}

/// Where a region is for us, and so for every back-end.
pub(crate) fn addr_of(region: &Region) -> u64 {
    region.span(0, 1).map_or(0, |span| span.as_ptr() as u64)
}

/// As many of the regions as there is room for, known ones first: they may have I/O in flight.
fn fitting(mut wanted: Vec<Arc<Region>>, known: &[Arc<Region>], places: usize) -> Vec<Arc<Region>> {
    wanted.sort_by_key(|region| !has(known, region));
    wanted.truncate(places);
    wanted
}

fn is_same(some: &[Arc<Region>], others: &[Arc<Region>]) -> bool {
    some.len() == others.len() && some.iter().all(|region| has(others, region))
}

fn read_config(talk: &Connection) -> Result<Vec<u8>, TalkError> {
    let head = [0, CONFIG_BYTES, 0].into_iter().flat_map(u32::to_ne_bytes);
    let head_bytes = head.clone().count();
    let payload: Vec<u8> = head.chain([0; CONFIG_BYTES as usize]).collect();
    let (answer, _) = talk.ask(FrontendMessage::GET_CONFIG, &payload)?;
    if answer.len() != payload.len() || answer[..8] != payload[..8] {
        // An answer without a payload is how it says no.
        return Err(TalkError::Nonsense { request: "GET_CONFIG".into() });
    }
    Ok(answer[head_bytes..].to_vec())
}

fn connect(config: &AttachConfig, end: &Arc<EventFd>) -> Result<Connection, AttachError> {
    use std::io::ErrorKind;
    Connection::open(&*config.connector, &config.socket, config.reply_max, end, &config.clock).map_err(|error| {
        let cause = match error.kind() {
            ErrorKind::NotFound => "no such socket; start its back-end first, or correct the path".into(),
            ErrorKind::ConnectionRefused => "no process listens on it; start its back-end, or name another socket".into(),
            ErrorKind::PermissionDenied => "permission denied; check its mode and group".into(),
            ErrorKind::TimedOut => format!(
                "its back-end accepted no connection within {:?}: it hangs, or serves another front-end; end that front-end, or restart the back-end",
                config.reply_max
            ),
            ErrorKind::ResourceBusy => error.to_string(),
            _ => format!("connecting failed: {error}; name a stream socket whose path has at most 107 bytes"),
        };
        AttachError::Socket { disk: config.name(), cause }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_in_use_keeps_its_place_whoever_comes() {
        let regions: Vec<_> = (0..6).map(|_| Region::shared(1).unwrap()).collect();
        let numbers = |of: &[Arc<Region>]| -> Vec<_> {
            of.iter().map(|region| regions.iter().position(|other| Arc::ptr_eq(other, region)).unwrap()).collect()
        };
        assert_eq!(numbers(&fitting(regions.clone(), &[], 4)), [0, 1, 2, 3], "the rings come first");
        let known = [0, 4, 5].map(|number: usize| Arc::clone(&regions[number]));
        assert_eq!(numbers(&fitting(regions.clone(), &known, 4)), [0, 4, 5, 1]);
        assert_eq!(numbers(&fitting(regions.clone(), &known, 8)), [0, 4, 5, 1, 2, 3]);
    }
}
