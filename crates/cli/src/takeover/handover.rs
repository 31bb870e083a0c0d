//! Handover state as plain data beside descriptors, which are identified by their order.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use blkyard::spec::Spec;
use blkyard_export::{
    ExportState, MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message, NVME_TCP_STATE_VERSION, NvmeTcpState, QUEUES_MAX,
    SessionState, VFIO_STATE_VERSION, VfioSessionState,
};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::NamespaceIds;
use blkyard_os::now_ns;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::daemon::{ByProtocol, ClientSessionState, ClientState};
use crate::inspect::limits_by_name;
use crate::log::LogFormat;

/// All of a daemon. Its descriptors: the control socket, then those of each device.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct HandoverState {
    pub(super) lanes: u64,
    #[serde(flatten)]
    pub(super) habits: HandoverSettings,
    pub(super) control: SocketPart,
    pub(super) devices: Vec<DevicePart>,
}

/// Settings of a daemon, by the names of its flags. Settings that an older daemon does not send get their defaults.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct HandoverSettings {
    pub(super) spin_us: Option<u64>,
    pub(super) stats: Option<u64>,
    pub(super) cpus: Option<Vec<u32>>,
    pub(super) drain_s: Option<u64>,
    pub(super) log_format: Option<LogFormat>,
}

/// A socket that is listened at. One descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SocketPart {
    pub(super) path: PathBuf,
    /// Device and inode.
    pub(super) identity: (u64, u64),
}

/// A device and its exports. Its descriptors: its file and what claims it, if it has these, then those of each export.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DevicePart {
    pub(super) spec: Spec,
    pub(super) has_file: bool,
    /// A program that does not know claims refuses the state because of surplus descriptors.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) has_claim: bool,
    pub(super) sync_failed: bool,
    /// As it is served now.
    pub(super) capacity_sectors: u64,
    pub(super) sectors_max: u32,
    /// Of a namespace of an NVMe controller.
    #[serde(default, rename = "remote", skip_serializing_if = "Option::is_none")]
    pub(super) identity: Option<IdentityPart>,
    pub(super) exports: Vec<DeviceExport>,
}

/// A namespace of an NVMe controller as it was served: what the next daemon has to find there.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct IdentityPart {
    eui64: [u8; 8],
    nguid: [u8; 16],
    uuid: [u8; 16],
    /// By their names.
    limits: BTreeMap<String, u64>,
    read_only: bool,
    volatile_cache: bool,
    fua: bool,
}

impl IdentityPart {
    pub(super) fn of(ids: &NamespaceIds, info: &DeviceInfo) -> IdentityPart {
        IdentityPart {
            eui64: ids.eui64,
            nguid: ids.nguid,
            uuid: ids.uuid,
            limits: limits_by_name(&info.limits),
            read_only: info.read_only,
            volatile_cache: info.volatile_cache,
            fua: info.fua,
        }
    }

    /// Whether that disk was found again. The error is a cause.
    pub(super) fn check(&self, found: &IdentityPart) -> Result<(), &'static str> {
        let ids = |part: &IdentityPart| (part.eui64, part.nguid, part.uuid);
        if ids(self) != ids(found) {
            return Err("it is another disk: its NGUID, UUID or EUI-64 differ from those that the other daemon found");
        }
        // Limits that only one of the two programs knows are not compared.
        let is_equal = |(name, value)| found.limits.get(name).is_none_or(|other| other == value);
        let flags = |part: &IdentityPart| (part.read_only, part.volatile_cache, part.fua);
        if !self.limits.iter().all(is_equal) || flags(self) != flags(found) {
            return Err("its limits, write protection or cache differ from those that guests were told");
        }
        Ok(())
    }
}

/// An export of a device, or the device as a namespace of a controller that is an export of an earlier device. A
/// program that does not know namespaces refuses the state.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum DeviceExport {
    Whole(Box<ExportPart>),
    Namespace { namespace: Spec },
}

/// An export. Its descriptors: its socket, then the connection and those of its session.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ExportPart {
    pub(super) spec: Spec,
    pub(super) socket: SocketPart,
    made: u16,
    offered: u16,
    depth: Option<usize>,
    wce: bool,
    /// A vhost-user session.
    session: Option<SessionPart>,
    /// A vfio-user session, which an older daemon does not send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nvme: Option<NvmePart>,
    /// All of an NVMe/TCP export, which an older daemon does not send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target: Option<TargetPart>,
}

/// An NVMe/TCP export. Its record has a version of its own.
#[derive(Debug, Serialize, Deserialize)]
struct TargetPart {
    version: u32,
    files: usize,
    record: Value,
    /// Start of its clock by the monotonic clock of the system, ns.
    began_ns: u64,
}

/// A vfio-user session. Its record has a version of its own.
#[derive(Debug, Serialize, Deserialize)]
struct NvmePart {
    version: u32,
    files: usize,
    record: Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct SessionPart {
    queues: u16,
    part: MessagePart,
    setup: Vec<MessagePart>,
    run: Vec<MessagePart>,
}

#[derive(Debug, Serialize, Deserialize)]
struct MessagePart {
    bytes: Vec<u8>,
    files: usize,
}

/// Descriptors, in their order.
pub(super) type PassedFiles = VecDeque<OwnedFd>;

/// The next descriptor.
///
/// # Errors
/// There is none.
pub(super) fn next(files: &mut PassedFiles) -> Result<OwnedFd, String> {
    files.pop_front().ok_or_else(|| "descriptors are missing".into())
}

/// So many of the next descriptors.
fn next_all(files: &mut PassedFiles, count: usize) -> Result<Vec<OwnedFd>, String> {
    // No more than there are.
    let all = (0..count).map_while(|_| files.pop_front()).collect::<Vec<_>>();
    if all.len() < count { Err("descriptors are missing".into()) } else { Ok(all) }
}

impl ExportPart {
    pub(super) fn pack(spec: Spec, state: ClientState, files: &mut PassedFiles) -> Result<ExportPart, String> {
        let ExportState { listener, path, identity, made, offered, depth, wce, session } = state;
        files.push_back(listener);
        let (session, nvme, target) = match session {
            None => (None, None, None),
            Some(ByProtocol::VhostUser(session)) => (Some(SessionPart::pack(session, files)), None, None),
            Some(ByProtocol::VfioUser(session)) => (None, Some(NvmePart::pack(session, files)?), None),
            Some(ByProtocol::NvmeTcp(state)) => (None, None, Some(TargetPart::pack(state, files)?)),
        };
        Ok(ExportPart { spec, socket: SocketPart { path, identity }, made, offered, depth, wce, session, nvme, target })
    }

    pub(super) fn unpack(self, files: &mut PassedFiles) -> Result<(Spec, ClientState), String> {
        let ExportPart { spec, socket, made, offered, depth, wce, session, nvme, target } = self;
        let SocketPart { path, identity } = socket;
        if !(1..=QUEUES_MAX).contains(&made) {
            return Err(format!("an export has {made} queues"));
        }
        let listener = next(files)?;
        let session: Option<ClientSessionState> = match (session, nvme, target) {
            (None, None, None) => None,
            (Some(session), None, None) => Some(ByProtocol::VhostUser(session.unpack(files)?)),
            (None, Some(nvme), None) => Some(ByProtocol::VfioUser(nvme.unpack(files)?)),
            (None, None, Some(target)) => Some(ByProtocol::NvmeTcp(target.unpack(files)?)),
            _ => return Err("an export has sessions of two protocols".into()),
        };
        Ok((spec, ExportState { listener, path, identity, made, offered, depth, wce, session }))
    }
}

impl SessionPart {
    fn pack(state: SessionState, files: &mut PassedFiles) -> SessionPart {
        let SessionState { connection, queues, part, setup, run } = state;
        files.push_back(connection);
        let part = MessagePart::pack(part, files);
        let mut all = |messages: Vec<Message>| messages.into_iter().map(|m| MessagePart::pack(m, files)).collect();
        SessionPart { queues, part, setup: all(setup), run: all(run) }
    }

    fn unpack(self, files: &mut PassedFiles) -> Result<SessionState, String> {
        let SessionPart { queues, part, setup, run } = self;
        let connection = next(files)?;
        let part = part.unpack(files)?;
        let mut all = |messages: Vec<MessagePart>| {
            messages.into_iter().map(|message| message.unpack(files)).collect::<Result<Vec<_>, _>>()
        };
        let (setup, run) = (all(setup)?, all(run)?);
        Ok(SessionState { connection, queues, part, setup, run })
    }
}

impl NvmePart {
    fn pack(state: VfioSessionState, files: &mut PassedFiles) -> Result<NvmePart, String> {
        let VfioSessionState { connection, record, files: of_session } = state;
        let record = serde_json::to_value(record).map_err(|error| error.to_string())?;
        let part = NvmePart { version: VFIO_STATE_VERSION, files: of_session.len(), record };
        files.push_back(connection);
        files.extend(of_session);
        Ok(part)
    }

    fn unpack(self, files: &mut PassedFiles) -> Result<VfioSessionState, String> {
        let NvmePart { version, files: count, record } = self;
        if version != VFIO_STATE_VERSION {
            return Err(format!("a vfio-user session has version {version}, and {VFIO_STATE_VERSION} is supported"));
        }
        let record = serde_json::from_value(record).map_err(|error| format!("a vfio-user session: {error}"))?;
        let connection = next(files)?;
        let files = next_all(files, count)?;
        Ok(VfioSessionState { connection, record, files })
    }
}

impl TargetPart {
    fn pack(state: NvmeTcpState, files: &mut PassedFiles) -> Result<TargetPart, String> {
        let NvmeTcpState { began, record, files: of_export } = state;
        let record = serde_json::to_value(record).map_err(|error| error.to_string())?;
        let began_ns = now_ns().saturating_sub(began.elapsed().as_nanos() as u64);
        let part = TargetPart { version: NVME_TCP_STATE_VERSION, files: of_export.len(), record, began_ns };
        files.extend(of_export);
        Ok(part)
    }

    fn unpack(self, files: &mut PassedFiles) -> Result<NvmeTcpState, String> {
        let TargetPart { version, files: count, record, began_ns } = self;
        if version != NVME_TCP_STATE_VERSION {
            return Err(format!("an NVMe/TCP export has version {version}, and {NVME_TCP_STATE_VERSION} is supported"));
        }
        let record = serde_json::from_value(record).map_err(|error| format!("an NVMe/TCP export: {error}"))?;
        let age = Duration::from_nanos(now_ns().saturating_sub(began_ns));
        let began = Instant::now().checked_sub(age).ok_or("the clock of an NVMe/TCP export is invalid")?;
        Ok(NvmeTcpState { began, record, files: next_all(files, count)? })
    }
}

impl MessagePart {
    fn pack(message: Message, files: &mut PassedFiles) -> MessagePart {
        let part = MessagePart { bytes: message.bytes, files: message.files.len() };
        files.extend(message.files);
        part
    }

    fn unpack(self, files: &mut PassedFiles) -> Result<Message, String> {
        let MessagePart { bytes, files: count } = self;
        if bytes.len() > MESSAGE_BYTES_MAX || count > MESSAGE_FILES_MAX {
            return Err(format!("a message has {} bytes and {count} descriptors", bytes.len()));
        }
        let files = (0..count).map(|_| next(files)).collect::<Result<_, _>>()?;
        Ok(Message { bytes, files })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn end() -> OwnedFd {
        UnixStream::pair().unwrap().0.into()
    }

    fn message(files: usize) -> Message {
        Message { bytes: vec![1, 2, files as u8], files: (0..files).map(|_| end()).collect() }
    }

    fn number(file: &OwnedFd) -> i32 {
        use std::os::fd::AsRawFd;
        file.as_raw_fd()
    }

    #[test]
    fn an_export_comes_back_as_it_went_with_each_descriptor_in_its_place() {
        let session = SessionState {
            connection: end(),
            queues: 3,
            part: message(1),
            setup: vec![message(0), message(2)],
            run: vec![message(1)],
        };
        let numbers = |state: &ClientState| {
            let Some(ByProtocol::VhostUser(session)) = &state.session else { panic!("no session") };
            let messages = [&session.part].into_iter().chain(&session.setup).chain(&session.run);
            let files = messages.flat_map(|message| message.files.iter());
            [&state.listener, &session.connection].into_iter().chain(files).map(number).collect::<Vec<_>>()
        };
        let state = ClientState {
            listener: end(),
            path: "/x".into(),
            identity: (1, 2),
            made: 6,
            offered: 4,
            depth: Some(3),
            wce: true,
            session: Some(ByProtocol::VhostUser(session)),
        };
        let before = numbers(&state);
        let mut files = PassedFiles::new();
        let spec = Spec::parse("vhost-user-blk:/x?queues=4").unwrap();
        let part = ExportPart::pack(spec.clone(), state, &mut files).unwrap();
        let text = serde_json::to_string(&part).unwrap();
        let unpack =
            |text: &str, files: &mut PassedFiles| serde_json::from_str::<ExportPart>(text).unwrap().unpack(files);
        let (spec_back, back) = unpack(&text, &mut files).unwrap();
        assert_eq!((spec_back, numbers(&back), files.len()), (spec, before, 0));
        assert_eq!((back.made, back.offered, back.depth, back.wce), (6, 4, Some(3), true));
        let Some(ByProtocol::VhostUser(session)) = back.session else { panic!("no session") };
        assert_eq!(session.setup[1].bytes, [1, 2, 2]);
        assert!(unpack(&text, &mut files).unwrap_err().contains("descriptors are missing"));
        for made in ["0", "65"] {
            let odd = text.replace("\"made\":6", &format!("\"made\":{made}"));
            assert!(unpack(&odd, &mut PassedFiles::new()).unwrap_err().contains("queues"));
        }
        let newer = text.replace(",\"session\":", ",\"nvme\":{\"version\":9,\"files\":0,\"record\":{}},\"session\":");
        assert!(unpack(&newer, &mut (0..9).map(|_| end()).collect()).unwrap_err().contains("two protocols"));
        for version in [1, 2, 9] {
            let other = text.split(",\"session\":").next().unwrap().to_owned()
                + &format!(",\"session\":null,\"nvme\":{{\"version\":{version},\"files\":0,\"record\":{{}}}}}}");
            let refused = unpack(&other, &mut (0..9).map(|_| end()).collect()).unwrap_err();
            assert_eq!(refused, format!("a vfio-user session has version {version}, and 3 is supported"));
        }
        let many = text.replace("\"files\":2", "\"files\":200");
        assert!(unpack(&many, &mut (0..300).map(|_| end()).collect()).unwrap_err().contains("200 descriptors"));
    }
}
