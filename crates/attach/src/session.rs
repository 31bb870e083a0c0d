//! One connection to a back-end: what was agreed on it, and which memory and rings it knows. [vhost-user protocol]
//!
//! Owned by the control thread of its device. What is done after a connection ends is decided elsewhere (`control.rs`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::Region;
use blkyard_sys::EventFd;
use blkyard_virtio::Features;
use blkyard_virtio::driver::{BlkDisk, BlkLayout, DRIVER_FEATURES};
use rustix::fs::FileType;

use crate::channel::BackendChannelReader;
use crate::message::{Connection, DESCRIPTORS_MAX, FrontendMessage, state, words};
use crate::{AttachConfig, AttachError, TalkError};

/// Protocol features, by bit.
mod protocol {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const BACKEND_REQ: u64 = 1 << 5;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// Those we know what to do with.
    pub(super) const KNOWN: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// Bytes of the configuration space up to the last field that we read (`write_zeroes_may_unmap`, and its padding). Some
/// back-ends refuse to be asked for more than they have.
const CONFIG_BYTES: u32 = 60;
/// The queue's number in the messages about its descriptors is one byte.
const QUEUES_MAX: u64 = 256;

/// Memory in which a back-end keeps what it has in flight, for the one after it.
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
    /// Where the back-end goes on, in the words of the protocol.
    pub(crate) base: u32,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct BackendSession {
    talk: Connection,
    /// Where the back-end tells us of changes, if it does.
    pub(crate) channel: Option<BackendChannelReader>,
    protocol: u64,
    /// What it serves.
    pub(crate) disk: BlkDisk,
    /// Queues that we may use.
    pub(crate) queues: u16,
    /// Regions it can know at one time.
    slots: usize,
    known: Vec<Arc<Region>>,
    /// The back-end serves rings.
    runs: bool,
}

impl BackendSession {
    /// Connects, and agrees on all but rings and memory.
    pub(crate) fn open(config: &AttachConfig, end: &Arc<EventFd>) -> Result<BackendSession, AttachError> {
        let talk = connect(config, end)?;
        BackendSession::agree(config, talk)
    }

    fn agree(config: &AttachConfig, mut talk: Connection) -> Result<BackendSession, AttachError> {
        let path = || config.socket.clone();
        let failed = |source| AttachError::Talk { path: path(), source };
        let missing = |feature, cure| AttachError::Feature { path: path(), feature, cure };
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
            return Err(missing("packed rings (RING_PACKED)", "leave out packed=on, or switch them on there"));
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
            let system = |source| AttachError::System { path: path(), source };
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
            let cure = if have == 0 { "start it with at least one" } else { "ask for fewer, or start it with more" };
            return Err(AttachError::Queues { path: path(), wanted: wanted.into(), have: have.into(), cure });
        }
        Ok(BackendSession { talk, channel, protocol, disk, queues: wanted, slots, known: Vec::new(), runs: false })
    }

    /// Begins a conversation: the back-end has all its time again.
    pub(crate) fn begin(&mut self) {
        self.talk.begin();
    }

    /// Hangs up. What remains is to be looked at until the back-end has closed its end, too.
    pub(crate) fn leave(self) -> Connection {
        self.talk.hang_up();
        self.talk
    }

    /// Whether memory comes and goes region by region, and rings may run meanwhile. Otherwise a table takes the place
    /// of the one before, and there are back-ends that begin their session anew for it.
    pub(crate) fn adds_regions(&self) -> bool {
        self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0
    }

    /// Whether the back-end would get another table for these regions.
    pub(crate) fn needs_table(&self, wanted: &[Arc<Region>]) -> bool {
        !self.adds_regions() && !is_same(&fitting(wanted.to_vec(), &self.known, self.slots), &self.known)
    }

    /// What the back-end serves now.
    pub(crate) fn read_disk(&self, config: &AttachConfig) -> Result<BlkDisk, AttachError> {
        let space =
            read_config(&self.talk).map_err(|source| AttachError::Talk { path: config.socket.clone(), source })?;
        Ok(BlkDisk::new(&config.name(), self.disk.features, &space, config.queue_size)?)
    }

    /// Has the back-end know these regions and no others, or as many of them as it can.
    pub(crate) fn set_regions(&mut self, wanted: Vec<Arc<Region>>) -> Result<(), TalkError> {
        if !self.adds_regions() {
            return self.set_table(wanted);
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

    /// Whether the back-end knows all of these.
    pub(crate) fn knows(&self, regions: &[Arc<Region>]) -> bool {
        regions.iter().all(|region| has(&self.known, region))
    }

    /// Regions it knows.
    pub(crate) fn regions(&self) -> usize {
        self.known.len()
    }

    /// Whether it keeps what is in flight for the one after it.
    pub(crate) fn tracks(&self) -> bool {
        self.protocol & protocol::INFLIGHT_SHMFD != 0
    }

    /// Memory for what will be in flight, if the back-end keeps that.
    pub(crate) fn new_inflight(&self, queue_size: u16) -> Result<Option<InflightMemory>, TalkError> {
        if !self.tracks() {
            return Ok(None);
        }
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

    /// Something to stand where a descriptor will be.
    fn dummy(&self) -> Result<OwnedFd, TalkError> {
        self.talk.as_fd().try_clone_to_owned().map_err(|error| TalkError::System(error.to_string()))
    }

    /// Hands over what the one before had in flight, or memory for it.
    pub(crate) fn set_inflight(&self, record: &InflightMemory) -> Result<(), TalkError> {
        self.talk.tell(FrontendMessage::SET_INFLIGHT_FD, &record.words(), &[record.file.as_fd()])
    }

    /// Tells the back-end of a ring, which it serves once it is [enabled](BackendSession::enable_rings).
    pub(crate) fn start_ring(
        &self,
        number: u16,
        ring: &RingPlace,
        kick: &EventFd,
        call: &EventFd,
        error: &EventFd,
    ) -> Result<(), TalkError> {
        let talk = &self.talk;
        let [desc, avail, used] = ring.layout.parts.map(|part| ring.addr + part as u64);
        talk.tell(FrontendMessage::SET_VRING_NUM, &state(number, ring.layout.size.into()), &[])?;
        talk.tell(FrontendMessage::SET_VRING_BASE, &state(number, ring.base), &[])?;
        let addresses = [state(number, 0), words(&[desc, used, avail, 0])].concat();
        talk.tell(FrontendMessage::SET_VRING_ADDR, &addresses, &[])?;
        for (request, event) in [
            (FrontendMessage::SET_VRING_CALL, call),
            (FrontendMessage::SET_VRING_ERR, error),
            (FrontendMessage::SET_VRING_KICK, kick),
        ] {
            talk.tell(request, &words(&[number.into()]), &[event.as_fd()])?;
        }
        Ok(())
    }

    /// Has the back-end serve all rings.
    pub(crate) fn enable_rings(&mut self) -> Result<(), TalkError> {
        for number in 0..self.queues {
            self.talk.tell(FrontendMessage::SET_VRING_ENABLE, &state(number, 1), &[])?;
        }
        self.talk.settle()?;
        self.runs = true;
        Ok(())
    }

    /// Has the back-end let go of all rings.
    pub(crate) fn stop_rings(&mut self) -> Result<(), TalkError> {
        for number in 0..self.queues {
            self.talk.tell(FrontendMessage::SET_VRING_ENABLE, &state(number, 0), &[])?;
            self.talk.ask(FrontendMessage::GET_VRING_BASE, &state(number, 0))?;
        }
        self.runs = false;
        Ok(())
    }

    /// Whether the back-end serves rings.
    pub(crate) fn runs(&self) -> bool {
        self.runs
    }

    /// Readable when the back-end hangs up, or says what nobody asked for.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.talk.as_fd()
    }
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

/// The words of a region: addresses, which are ours, size, and place in its file.
fn place(region: &Region) -> [u64; 4] {
    let addr = addr_of(region);
    let offset = region.file().map_or(0, |(_, offset)| offset);
    [addr, region.len() as u64, addr, offset]
}

/// Where a region is for us, and so for every back-end.
pub(crate) fn addr_of(region: &Region) -> u64 {
    region.span(0, 1).map_or(0, |span| span.as_ptr() as u64)
}

/// As many of the regions as there are places, those that are known first: somebody may have I/O in them.
fn fitting(mut wanted: Vec<Arc<Region>>, known: &[Arc<Region>], places: usize) -> Vec<Arc<Region>> {
    wanted.sort_by_key(|region| !has(known, region));
    wanted.truncate(places);
    wanted
}

fn is_same(some: &[Arc<Region>], others: &[Arc<Region>]) -> bool {
    some.len() == others.len() && some.iter().all(|region| has(others, region))
}

pub(crate) fn has(regions: &[Arc<Region>], region: &Arc<Region>) -> bool {
    regions.iter().any(|known| Arc::ptr_eq(known, region))
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
            ErrorKind::NotFound => "there is no such socket: start its back-end first, or correct the path".into(),
            ErrorKind::ConnectionRefused => "nobody listens there: start its back-end, or name a socket".into(),
            ErrorKind::PermissionDenied => "it may not be used by this user: see its mode and group".into(),
            ErrorKind::TimedOut => format!(
                "its back-end took no connection within {:?}: it hangs, or serves others; end those, or start it anew",
                config.reply_max
            ),
            ErrorKind::ResourceBusy => error.to_string(),
            _ => format!("it cannot be connected to: {error}; name a socket of at most 107 bytes"),
        };
        AttachError::Socket { path: config.socket.clone(), cause }
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
