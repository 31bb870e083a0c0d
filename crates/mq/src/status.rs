//! Status of an I/O: one byte, a closed set.

/// The outcome of a bio or request. The numbers are our own; the names and errnos follow the block layer of
/// Linux (`blk_status_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done as asked.
    #[default]
    Ok = 0,
    /// The device does not do this operation.
    NotSupported = 1,
    /// The device did not answer in time, and the request was taken back.
    Timeout = 2,
    /// No room left behind the device.
    NoSpace = 3,
    /// The path to the device failed or refused the I/O, which was not executed and will not be: another path may do
    /// better. An I/O that the device may still execute never ends with this status.
    Path = 4,
    /// The medium cannot return the data.
    Medium = 7,
    /// Anything else that went wrong at the device.
    Io = 10,
    /// It would have had to wait, and is `NOWAIT` or was [cancelled](crate::HwQueue::cancel).
    Again = 12,
    /// The device is gone.
    Offline = 16,
    /// The request makes no sense: unaligned, beyond the end, without length, or in memory that is not there.
    Invalid = 19,
}

/// Whether another attempt at an I/O is worth it, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// Every path would give the same answer, or the I/O is done.
    Never,
    /// On another path at once: the device does not execute this one.
    Elsewhere,
    /// On another path, a write only once this one is fenced ([`Fenced`](crate::Fenced)): the device may execute it.
    ElsewhereFenced,
    /// On the same path once it can wait: it was `NOWAIT`.
    Later,
}

impl Status {
    /// Status for an errno of an I/O from the operating system; [`Status::Io`] for an unknown one.
    pub fn from_errno(errno: i32) -> Status {
        // Numbers as on every Linux architecture we build for (asm-generic/errno.h).
        match errno {
            0 => Status::Ok,
            95 => Status::NotSupported,  // EOPNOTSUPP
            28 | 122 => Status::NoSpace, // ENOSPC, EDQUOT
            61 => Status::Medium,        // ENODATA
            19 | 6 => Status::Offline,   // ENODEV, ENXIO
            22 => Status::Invalid,       // EINVAL
            67 => Status::Path,          // ENOLINK
            110 | 62 => Status::Timeout, // ETIMEDOUT, ETIME
            11 => Status::Again,         // EAGAIN
            _ => Status::Io,
        }
    }

    /// Whether another attempt is worth it, and when: the path-type statuses of Linux (`blk_path_error`), with
    /// [`Status::Offline`], since a device that is gone on one path may be there on another.
    pub fn retry(self) -> Retry {
        match self {
            Status::Path => Retry::Elsewhere,
            Status::Timeout | Status::Io | Status::Offline => Retry::ElsewhereFenced,
            Status::Again => Retry::Later,
            Status::Ok | Status::NotSupported | Status::NoSpace | Status::Medium | Status::Invalid => Retry::Never,
        }
    }

    /// Whether the I/O was done.
    pub fn is_ok(self) -> bool {
        self == Status::Ok
    }

    /// The first failure of the two, if any: parts of one bio are joined this way.
    #[must_use]
    pub fn and(self, later: Status) -> Status {
        if self.is_ok() { later } else { self }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Status::Ok => "ok",
            Status::NotSupported => "not supported",
            Status::Timeout => "timed out",
            Status::NoSpace => "no space",
            Status::Path => "path error",
            Status::Medium => "medium error",
            Status::Io => "I/O error",
            Status::Again => "would have to wait",
            Status::Offline => "device offline",
            Status::Invalid => "invalid request",
        })
    }
}
