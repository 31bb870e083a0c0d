//! The daemon that takes over.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkyard::spec::SpecError;
use blkyard::{Device, ReceivedDevice};
use blkyard_export::BoundSocket;
use blkyard_mq::DeviceInfo;

use super::VERSION;
use super::handover::{DeviceExport, HandoverSettings, HandoverState, IdentityPart, PassedFiles, SocketPart, next};
use super::wire::{receive, send};
use crate::control::{ControlRequest, connect, parse_answer, request_line};
use crate::daemon::{ClientState, DiskPlan};
use crate::plan::Settings;

/// Time limit for the old daemon: to drain its exports, and to answer earlier requests.
const ANSWER_TIME: Duration = Duration::from_mins(1);
/// Upper bound of the handover state, bytes without descriptors: some kilobytes for each export.
const HANDOVER_BYTES_MAX: usize = 64 << 20;

/// A device's inherited resources.
#[derive(Debug)]
pub struct InheritedDevice {
    /// Its files.
    pub received: ReceivedDevice,
    capacity_sectors: u64,
    sectors_max: u32,
    identity: Option<IdentityPart>,
}

impl InheritedDevice {
    /// Checks that a namespace is the one that was served.
    ///
    /// # Errors
    /// It is another one, or guests would see a difference.
    pub fn check(&self, opened: &Device) -> Result<(), SpecError> {
        let Some(identity) = &self.identity else { return Ok(()) };
        let info = opened.info();
        let checked = identity.check(&IdentityPart::of(&opened.ids(), info));
        let is_smaller = info.capacity_sectors < self.capacity_sectors;
        let checked = checked.and(if is_smaller { Err("it has become smaller") } else { Ok(()) });
        checked.map_err(|cause| SpecError::new(&info.name, cause, "the other daemon continues; see the disk"))
    }

    /// The device as it was served.
    pub fn info(&self, opened: &DeviceInfo) -> DeviceInfo {
        let mut info = opened.clone();
        info.capacity_sectors = self.capacity_sectors;
        info.limits.sectors_max = self.sectors_max;
        info
    }
}

/// Inherited state, until it is known whether this daemon can continue with it. When dropped, the other daemon keeps
/// it.
#[derive(Debug)]
pub struct InheritedState {
    /// Its devices and exports.
    pub disks: Vec<DiskPlan>,
    /// Its lanes and other settings.
    pub settings: Settings,
    /// One for each disk.
    pub devices: VecDeque<InheritedDevice>,
    /// One for each export, in the order of their first disks.
    pub exports: VecDeque<ClientState>,
    control: BoundSocket,
    daemon: UnixStream,
    path: PathBuf,
    begin: Instant,
}

/// How long guests had to wait.
#[derive(Debug, Clone, Copy)]
pub struct Pause {
    /// Time until its requests in flight had completed.
    pub rest: Duration,
    /// In all.
    pub whole: Duration,
}

/// Asks the daemon at a control socket to hand over. It stays quiesced until this is [taken](InheritedState::taken) or
/// dropped.
///
/// # Errors
/// There is no daemon, or it refuses: it continues.
pub fn take(path: &Path) -> Result<InheritedState, SpecError> {
    let problem = |cause: String, cure: &str| SpecError::new(format!("takeover of {}", path.display()), cause, cure);
    let silent =
        |error: std::io::Error| problem(format!("no answer: {error}"), "check whether that daemon hangs or is ending");
    let daemon = connect(path, Instant::now() + ANSWER_TIME).map_err(|error| {
        let cure = "name the control socket of a running daemon, which it prints when it starts";
        problem(format!("no daemon listens there: {error}"), cure)
    })?;
    let begin = Instant::now();
    let request = request_line(&ControlRequest::Takeover { version: VERSION });
    send(&daemon, &PassedFiles::new(), &request, ANSWER_TIME).map_err(silent)?;
    let (mut files, line) = receive(&daemon, HANDOVER_BYTES_MAX, ANSWER_TIME).map_err(silent)?;
    let handover = parse_answer(&line).map_err(|said| {
        if said.contains("unknown variant") {
            problem(
                "that daemon is older and does not support takeover".into(),
                "stop it, and start this one without --takeover",
            )
        } else {
            problem(said, "that daemon continues")
        }
    })?;
    let odd = |why: String| {
        problem(format!("its handover state is invalid: {why}"), "that daemon continues; stop it instead")
    };
    let handover: HandoverState = serde_json::from_value(handover).map_err(|error| odd(error.to_string()))?;
    unpack(handover, &mut files, daemon, path, begin).map_err(odd)
}

fn unpack(
    handover: HandoverState,
    files: &mut PassedFiles,
    daemon: UnixStream,
    path: &Path,
    begin: Instant,
) -> Result<InheritedState, String> {
    let HandoverState { lanes, habits, control: SocketPart { path: control, identity }, devices: parts } = handover;
    let HandoverSettings { spin_us, stats, cpus, drain_s, log_format } = habits;
    let settings = Settings { lanes: Some(lanes), spin_us, stats, cpus, drain_s, log_format, ..Settings::default() };
    let control = BoundSocket::adopt(next(files)?, control, identity);
    let (mut disks, mut devices, mut exports) = (Vec::new(), VecDeque::new(), VecDeque::new());
    for part in parts {
        devices.push_back(InheritedDevice {
            received: ReceivedDevice {
                file: part.has_file.then(|| next(files)).transpose()?,
                claim: part.has_claim.then(|| next(files)).transpose()?,
                sync_failed: part.sync_failed,
            },
            capacity_sectors: part.capacity_sectors,
            sectors_max: part.sectors_max,
            identity: part.identity,
        });
        let mut specs = Vec::new();
        for export in part.exports {
            specs.push(match export {
                DeviceExport::Namespace { namespace } => namespace,
                DeviceExport::Whole(export) => {
                    let (spec, state) = export.unpack(files)?;
                    exports.push_back(state);
                    spec
                }
            });
        }
        disks.push(DiskPlan { device: part.spec, exports: specs });
    }
    if !files.is_empty() {
        return Err(format!("{} surplus descriptors", files.len()));
    }
    Ok(InheritedState { disks, settings, devices, exports, control, daemon, path: path.into(), begin })
}

impl InheritedState {
    /// Reports that all is prepared, and waits until the other daemon has let go. Returns its control socket, which is
    /// ours from then on.
    ///
    /// # Errors
    /// It did not let go, and continues.
    pub fn taken(self) -> Result<(BoundSocket, Pause), SpecError> {
        let kept = |why: String| {
            let object = format!("takeover of {}", self.path.display());
            SpecError::new(
                object,
                format!("that daemon did not release its exports: {why}"),
                "see its messages, and try again",
            )
        };
        let silent = |error: std::io::Error| kept(error.to_string());
        send(&self.daemon, &PassedFiles::new(), &request_line(&ControlRequest::Taken), ANSWER_TIME).map_err(silent)?;
        let (_, line) = receive(&self.daemon, HANDOVER_BYTES_MAX, ANSWER_TIME).map_err(silent)?;
        let rest_us = parse_answer(&line).map_err(kept)?;
        self.control.set_owned(true);
        let rest = Duration::from_micros(rest_us.as_u64().unwrap_or(0));
        Ok((self.control, Pause { rest, whole: self.begin.elapsed() }))
    }
}
