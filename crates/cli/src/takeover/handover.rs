//! Handover state as plain data beside descriptors, which are identified by their order.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use blkyard::spec::Spec;
use blkyard_export::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message, QUEUES_MAX, SessionState, VhostUserState};
use serde::{Deserialize, Serialize};

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
}

/// A socket that is listened at. One descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SocketPart {
    pub(super) path: PathBuf,
    /// Device and inode.
    pub(super) identity: (u64, u64),
}

/// A device and its exports. Its descriptors: its file if it has one, then those of each export.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DevicePart {
    pub(super) spec: Spec,
    pub(super) has_file: bool,
    pub(super) sync_failed: bool,
    /// As it is served now.
    pub(super) capacity_sectors: u64,
    pub(super) sectors_max: u32,
    pub(super) exports: Vec<ExportPart>,
}

/// An export. Its descriptors: its socket, then the connection and those of its messages.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ExportPart {
    pub(super) spec: Spec,
    pub(super) socket: SocketPart,
    made: u16,
    offered: u16,
    depth: Option<usize>,
    wce: bool,
    session: Option<SessionPart>,
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

impl ExportPart {
    pub(super) fn pack(spec: Spec, state: VhostUserState, files: &mut PassedFiles) -> ExportPart {
        let VhostUserState { listener, path, identity, made, offered, depth, wce, session } = state;
        files.push_back(listener);
        let session = session.map(|SessionState { connection, queues, part, setup, run }| {
            files.push_back(connection);
            let part = MessagePart::pack(part, files);
            let mut all = |messages: Vec<Message>| messages.into_iter().map(|m| MessagePart::pack(m, files)).collect();
            SessionPart { queues, part, setup: all(setup), run: all(run) }
        });
        ExportPart { spec, socket: SocketPart { path, identity }, made, offered, depth, wce, session }
    }

    pub(super) fn unpack(self, files: &mut PassedFiles) -> Result<(Spec, VhostUserState), String> {
        let ExportPart { spec, socket: SocketPart { path, identity }, made, offered, depth, wce, session } = self;
        if !(1..=QUEUES_MAX).contains(&made) {
            return Err(format!("an export has {made} queues"));
        }
        let listener = next(files)?;
        let session = match session {
            None => None,
            Some(SessionPart { queues, part, setup, run }) => {
                let connection = next(files)?;
                let part = part.unpack(files)?;
                let mut all = |messages: Vec<MessagePart>| {
                    messages.into_iter().map(|message| message.unpack(files)).collect::<Result<Vec<_>, _>>()
                };
                let (setup, run) = (all(setup)?, all(run)?);
                Some(SessionState { connection, queues, part, setup, run })
            }
        };
        Ok((spec, VhostUserState { listener, path, identity, made, offered, depth, wce, session }))
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
        let numbers = |state: &VhostUserState| {
            let session = state.session.as_ref().unwrap();
            let messages = [&session.part].into_iter().chain(&session.setup).chain(&session.run);
            let files = messages.flat_map(|message| message.files.iter());
            [&state.listener, &session.connection].into_iter().chain(files).map(number).collect::<Vec<_>>()
        };
        let state = VhostUserState {
            listener: end(),
            path: "/x".into(),
            identity: (1, 2),
            made: 6,
            offered: 4,
            depth: Some(3),
            wce: true,
            session: Some(session),
        };
        let before = numbers(&state);
        let mut files = PassedFiles::new();
        let spec = Spec::parse("vhost-user-blk:/x?queues=4").unwrap();
        let part = ExportPart::pack(spec.clone(), state, &mut files);
        let text = serde_json::to_string(&part).unwrap();
        let unpack =
            |text: &str, files: &mut PassedFiles| serde_json::from_str::<ExportPart>(text).unwrap().unpack(files);
        let (spec_back, back) = unpack(&text, &mut files).unwrap();
        assert_eq!((spec_back, numbers(&back), files.len()), (spec, before, 0));
        assert_eq!((back.made, back.offered, back.depth, back.wce), (6, 4, Some(3), true));
        assert_eq!(back.session.unwrap().setup[1].bytes, [1, 2, 2]);
        assert!(unpack(&text, &mut files).unwrap_err().contains("descriptors are missing"));
        for made in ["0", "65"] {
            let odd = text.replace("\"made\":6", &format!("\"made\":{made}"));
            assert!(unpack(&odd, &mut PassedFiles::new()).unwrap_err().contains("queues"));
        }
        let many = text.replace("\"files\":2", "\"files\":200");
        assert!(unpack(&many, &mut (0..300).map(|_| end()).collect()).unwrap_err().contains("200 descriptors"));
    }
}
