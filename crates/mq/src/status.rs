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
    /// The medium cannot return the data.
    Medium = 7,
    /// Anything else that went wrong at the device.
    Io = 10,
    /// It would have had to wait, and is `NOWAIT`.
    Again = 12,
    /// The device is gone.
    Offline = 16,
    /// The request makes no sense: unaligned, beyond the end, without length, or in memory that is not there.
    Invalid = 19,
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
            110 | 62 => Status::Timeout, // ETIMEDOUT, ETIME
            11 => Status::Again,         // EAGAIN
            _ => Status::Io,
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
            Status::Medium => "medium error",
            Status::Io => "I/O error",
            Status::Again => "would have to wait",
            Status::Offline => "device offline",
            Status::Invalid => "invalid request",
        })
    }
}
