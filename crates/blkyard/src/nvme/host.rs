//! Commands to a controller that this process brings up itself.
//!
//! All parts run on the caller's thread, during a call: the controller's state machine, one I/O queue, and the
//! transport's messages. The queues have no interrupts and are polled, at growing intervals up to 1 ms.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{NvmeTransport, VfioUserConfig, VfioUserController};
use blkyard_nvme::{
    AdminData, ControllerState, ControllerTransport, HostController, HostEvent, LateAction, NvmeHostConfig,
    NvmeHostError, NvmeStatus, PassthroughQueue, QueueDemand, Sqe, TransferBuffer,
};
use blkyard_os::{SystemClock, now_ns};
use blkyard_sys::{PollFd, PollFlags, wait_for};

use crate::devices::pci::{self, PciController};
use crate::nvme::{NvmeError, NvmePassthrough, PassthroughData, PassthroughResult, PassthroughTarget, TIMEOUT_DEFAULT};

/// Time for a command to end after it was aborted.
const ABORT_GRACE: Duration = Duration::from_secs(5);
/// Time for a late command to end, with an abort and a reset.
const LATE_MAX: Duration = Duration::from_mins(3);
/// Time for the controller's shutdown at the end.
const SHUTDOWN_MAX: Duration = Duration::from_secs(10);
/// First and longest interval of polling.
const POLL_MIN: Duration = Duration::from_micros(20);
const POLL_MAX: Duration = Duration::from_millis(1);

/// Waits this long, less if the transport has messages, and handles those. Returns whether the controller may be gone.
type TransportWait<T> = Box<dyn FnMut(&mut T, Duration) -> bool>;

/// A controller that this process drives.
pub struct HostPassthrough<T: ControllerTransport> {
    name: String,
    controller: HostController<T>,
    queue: Option<PassthroughQueue>,
    wait: TransportWait<T>,
    /// Number of the last admin command.
    commands: u64,
    /// The admin command that has ended.
    ended: Option<(u64, PassthroughResult)>,
    poll: Duration,
}

/// Opens the controller of a vfio-user server.
pub fn open_vfio_user(name: &str, socket: &str) -> Result<HostPassthrough<VfioUserController>, NvmeError> {
    let system = |source| NvmeError::Open { name: name.to_owned(), source };
    let server = |source| NvmeError::Server { name: name.to_owned(), source };
    let mut config = VfioUserConfig::new(socket, Arc::new(SystemClock)).map_err(system)?;
    config.vectors_max = 0;
    let transport = VfioUserController::open(&config).map_err(server)?;
    let wait = |transport: &mut VfioUserController, time| {
        let mut sockets = [PollFd::from_borrowed_fd(transport.socket(), PollFlags::IN)];
        let is_readable = wait_for(&mut sockets, Some(time)).is_ok_and(|ready| ready > 0);
        is_readable && transport.look().is_err()
    };
    HostPassthrough::open(name, transport, Box::new(wait))
}

/// Opens a controller of this machine through VFIO.
pub(super) fn open_pci(name: &str) -> Result<HostPassthrough<PciController>, NvmeError> {
    let transport = pci::open_controller(name)?;
    let wait = |transport: &mut PciController, time| {
        std::thread::sleep(time);
        !transport.look()
    };
    HostPassthrough::open(name, transport, Box::new(wait))
}

impl<T: ControllerTransport> HostPassthrough<T> {
    /// Brings the controller of a transport up. `wait` waits at most this long, handles the transport's messages, and
    /// returns whether the controller may be gone.
    ///
    /// # Errors
    /// See [`NvmeError`].
    pub fn open(name: &str, transport: T, wait: TransportWait<T>) -> Result<HostPassthrough<T>, NvmeError> {
        let queues = QueueDemand { submitters: 1, write_queues: 0, poll_queues: 0 };
        // Commands come one by one, and a shutdown follows them soon.
        let config = NvmeHostConfig { queues, ring_entries: 8, has_shadow: false, ..NvmeHostConfig::default() };
        let mut host = HostPassthrough {
            name: name.to_owned(),
            controller: HostController::new(transport, config),
            queue: None,
            wait,
            commands: 0,
            ended: None,
            poll: POLL_MIN,
        };
        host.controller.start(now_ns());
        host.turn()?;
        while host.controller.state() != ControllerState::Live {
            host.pause();
            host.turn()?;
        }
        host.queue = host.controller.take_passthrough_queue();
        Ok(host)
    }

    /// Runs all parts once.
    fn turn(&mut self) -> Result<(), NvmeError> {
        self.controller.advance(now_ns());
        let mut failure = None;
        while let Some(event) = self.controller.next_event() {
            match event {
                HostEvent::Queue(qid, command) => {
                    if let Some(queue) = self.queue.as_mut().filter(|queue| queue.qid() == qid)
                        && let Some(report) = queue.command(command)
                    {
                        self.controller.queue_report(qid, report);
                    }
                }
                HostEvent::Completed { user, status, result, .. } => {
                    self.ended = Some((user, PassthroughResult { status, result }));
                }
                HostEvent::Failed(source) => failure = Some(source),
                _ => {}
            }
        }
        if let Some(queue) = &mut self.queue
            && let Some(report) = queue.drained()
        {
            self.controller.queue_report(queue.qid(), report);
        }
        match failure {
            Some(source) => Err(self.failed(source)),
            None => Ok(()),
        }
    }

    /// Waits for the controller.
    fn pause(&mut self) {
        let time = self.poll;
        self.poll = (time * 2).min(POLL_MAX);
        if (self.wait)(self.controller.transport(), time) {
            self.controller.check(now_ns());
        }
    }

    fn failed(&self, source: NvmeHostError) -> NvmeError {
        NvmeError::Controller { name: self.name.clone(), source }
    }

    /// The controller's failure, or that it is not usable now.
    fn not_live(&self) -> NvmeError {
        self.failed(self.controller.error().unwrap_or(NvmeHostError::Removed))
    }

    fn admin(
        &mut self,
        sqe: Sqe,
        buffer: Option<&Arc<TransferBuffer>>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError> {
        self.commands += 1;
        let (user, start_ns) = (self.commands, now_ns());
        let data = buffer.map_or(AdminData::None, AdminData::Buffer);
        let sent = self.controller.submit_admin(sqe, data, user, nanoseconds(timeout), start_ns);
        sent.map_err(|_| self.not_live())?;
        loop {
            self.turn()?;
            if let Some((ended, result)) = self.ended.take()
                && ended == user
            {
                return Ok(result);
            }
            if now_ns() > start_ns.saturating_add(nanoseconds(timeout + LATE_MAX)) {
                return Err(NvmeError::Stuck(self.name.clone()));
            }
            self.pause();
        }
    }

    fn io(
        &mut self,
        sqe: Sqe,
        buffer: Option<&Arc<TransferBuffer>>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError> {
        let start_ns = now_ns();
        let mut deadline_ns = start_ns.saturating_add(nanoseconds(timeout));
        let Some(queue) = self.queue.as_mut() else { return Err(NvmeError::NoQueue(self.name.clone())) };
        if !queue.is_ready() {
            return Err(self.not_live());
        }
        let qid = queue.qid();
        if queue.submit(sqe, buffer) {
            self.controller.forward_doorbells(qid, start_ns);
        }
        loop {
            self.turn()?;
            let Some(queue) = self.queue.as_mut() else { return Err(NvmeError::NoQueue(self.name.clone())) };
            let (ended, is_rung) = queue.poll();
            let late = queue.late();
            let now = now_ns();
            if is_rung {
                self.controller.forward_doorbells(qid, now);
            }
            if let Some(completed) = ended {
                return Ok(PassthroughResult { status: completed.status, result: completed.result });
            }
            if let Some(late) = late.filter(|_| now >= deadline_ns) {
                deadline_ns = now.saturating_add(nanoseconds(ABORT_GRACE));
                if self.controller.late_command(late, now) == LateAction::GiveUp {
                    return Err(self.not_live());
                }
            }
            if now > start_ns.saturating_add(nanoseconds(timeout + LATE_MAX)) {
                return Err(NvmeError::Stuck(self.name.clone()));
            }
            self.pause();
        }
    }

    /// Waits until the controller is live, after a reset by a late command.
    fn settle(&mut self) -> Result<(), NvmeError> {
        let limit_ns = now_ns().saturating_add(nanoseconds(LATE_MAX));
        while self.controller.state() != ControllerState::Live {
            if self.controller.error().is_some() || now_ns() > limit_ns {
                return Err(self.not_live());
            }
            self.turn()?;
            self.pause();
        }
        Ok(())
    }
}

impl<T: ControllerTransport> NvmePassthrough for HostPassthrough<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn namespace_id(&self) -> Option<u32> {
        None
    }

    fn submit(
        &mut self,
        target: PassthroughTarget,
        sqe: Sqe,
        data: PassthroughData<'_>,
        metadata: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError> {
        let timeout = if timeout.is_zero() { TIMEOUT_DEFAULT } else { timeout };
        self.settle()?;
        self.poll = POLL_MIN;
        let buffer = match (data.len(), metadata.len()) {
            (0, 0) => None,
            (bytes, metadata_bytes) => {
                let buffer = self.controller.transfer_buffer(bytes, metadata_bytes);
                Some(buffer.map_err(|source| self.failed(source))?)
            }
        };
        if let Some(buffer) = &buffer {
            if let PassthroughData::Write(bytes) = &data {
                buffer.write(bytes);
            }
            if let PassthroughData::Write(bytes) = &metadata {
                buffer.write_metadata(bytes);
            }
        }
        let ended = match target {
            PassthroughTarget::Admin => self.admin(sqe, buffer.as_ref(), timeout)?,
            PassthroughTarget::Io => self.io(sqe, buffer.as_ref(), timeout)?,
        };
        // A cancelled command may leave parts of its data behind.
        if let (Some(buffer), NvmeStatus::SUCCESS) = (buffer, ended.status.without_flags()) {
            if let PassthroughData::Read(bytes) = data {
                bytes.copy_from_slice(&buffer.read());
            }
            if let PassthroughData::Read(bytes) = metadata {
                bytes.copy_from_slice(&buffer.read_metadata());
            }
        }
        Ok(ended)
    }
}

impl<T: ControllerTransport> Drop for HostPassthrough<T> {
    fn drop(&mut self) {
        let limit_ns = now_ns().saturating_add(nanoseconds(SHUTDOWN_MAX));
        self.controller.remove(now_ns());
        self.poll = POLL_MIN;
        // A controller that fails now is not used any more.
        while self.turn().is_ok() && self.controller.is_busy() && now_ns() < limit_ns {
            self.pause();
        }
    }
}

impl<T: ControllerTransport> Debug for HostPassthrough<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPassthrough").field("name", &self.name).field("queue", &self.queue).finish_non_exhaustive()
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
