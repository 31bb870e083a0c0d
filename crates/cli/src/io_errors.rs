//! The log lines on I/O errors of the daemon's devices: the first at once, then few, with the number of errors since.

use std::time::{Duration, Instant};

use blkyard_mq::{DeviceInfo, ErrorCode, LogLimit, Op};
use blkyard_nvme::NvmeStatus;

use crate::daemon::Daemon;

/// Time between two lines on one device.
const INTERVAL: Duration = Duration::from_secs(5);

/// Log of each device's I/O errors.
pub struct ErrorLog {
    limits: Vec<LogLimit>,
}

impl ErrorLog {
    /// For so many devices.
    pub fn new(devices: usize) -> ErrorLog {
        ErrorLog { limits: (0..devices).map(|_| LogLimit::new(1, INTERVAL)).collect() }
    }

    /// Logs the errors since the last line of each device, if it may have another line. To be called every second.
    pub fn tell(&mut self, daemon: &Daemon) {
        for (served, limit) in daemon.devices.iter().zip(&mut self.limits) {
            let info = served.info();
            if info.errors.is_pending() && limit.pass(Instant::now()).is_some() {
                tell(&info);
            }
        }
    }
}

/// Logs the errors since the last line of each device, limit or not: the daemon ends.
pub fn tell_rest(daemon: &Daemon) {
    daemon.devices.iter().for_each(|served| tell(&served.info()));
}

fn tell(info: &DeviceInfo) {
    let Some((first, count)) = info.errors.take() else { return };
    let Some(error) = first else {
        tracing::error!(device = %info.name, errors = count, "I/O error");
        return;
    };
    let (errno, nvme_status, cause) = match error.code {
        Some(ErrorCode::Errno(errno)) => (Some(errno), None, std::io::Error::from_raw_os_error(errno).to_string()),
        Some(ErrorCode::Nvme(status)) => (None, Some(status), NvmeStatus(status).to_string()),
        None => (None, None, error.status.to_string()),
    };
    tracing::error!(
        device = %info.name,
        operation = name_of(error.op),
        sector = error.sector,
        bytes = error.bytes,
        errno,
        nvme_status,
        cause,
        errors = count,
        "I/O error"
    );
}

fn name_of(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write zeroes",
    }
}
