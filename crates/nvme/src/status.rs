//! Status codes, and their mapping to those of the queue core.

use blkyard_mq::Status;

/// The status of a command, without the phase bit: code in bits 0-7, type in 8-10, retry delay in 11-12, "more" in 13,
/// "do not retry" in 14.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct NvmeStatus(pub u16);

const DNR: u16 = 0x4000;
const MORE: u16 = 0x2000;
const CODE: u16 = 0x7ff;
/// Status code type of path errors.
const PATH: u8 = 3;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)+) => {
        impl NvmeStatus {
            $($(#[$doc])* pub const $name: NvmeStatus = NvmeStatus($value);)+

            /// Description, for the codes named here.
            pub fn name(self) -> Option<&'static str> {
                match self.0 & CODE {
                    $($value => Some($text),)+
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// Successful completion.
    SUCCESS = 0x000, "success";
    /// Unknown opcode.
    INVALID_OPCODE = 0x001, "invalid opcode";
    /// A field has a value that is reserved or not supported.
    INVALID_FIELD = 0x002, "invalid field";
    /// The command identifier is already in use.
    CID_CONFLICT = 0x003, "command identifier conflict";
    /// Data or list could not be transferred.
    DATA_TRANSFER_ERROR = 0x004, "data transfer error";
    /// Aborted because of a loss of power.
    POWER_LOSS = 0x005, "aborted: power loss";
    /// Internal error.
    INTERNAL = 0x006, "internal error";
    /// Aborted by an Abort command.
    ABORT_REQUESTED = 0x007, "abort requested";
    /// The submission queue was deleted.
    SQ_DELETED = 0x008, "aborted: submission queue deleted";
    /// Namespace or its format is invalid.
    INVALID_NAMESPACE = 0x00b, "invalid namespace or format";
    /// Commands are out of sequence.
    COMMAND_SEQUENCE = 0x00c, "command sequence error";
    /// A segment or last-segment descriptor is invalid.
    INVALID_SGL_SEGMENT = 0x00d, "invalid SGL segment descriptor";
    /// A segment descriptor in an invalid position, or too many.
    INVALID_SGL_COUNT = 0x00e, "invalid number of SGL descriptors";
    /// The SGL's length differs from that of the data.
    INVALID_DATA_SGL_LENGTH = 0x00f, "data SGL length invalid";
    /// The metadata SGL's length differs from that of the metadata.
    INVALID_METADATA_SGL_LENGTH = 0x010, "metadata SGL length invalid";
    /// A descriptor type or subtype that is not supported.
    INVALID_SGL_TYPE = 0x011, "SGL descriptor type invalid";
    /// A PRP entry with an invalid offset.
    INVALID_PRP_OFFSET = 0x013, "PRP offset invalid";
    /// An offset in the capsule that the controller does not support.
    INVALID_SGL_OFFSET = 0x016, "SGL offset invalid";
    /// A data block's address or length is not a multiple of a dword.
    INVALID_SGL_GRANULARITY = 0x01e, "SGL data block granularity invalid";
    /// The namespace is write protected.
    WRITE_PROTECTED = 0x020, "namespace is write protected";
    /// Interrupted; the host is to retry.
    COMMAND_INTERRUPTED = 0x021, "command interrupted";
    /// A transfer failed, such as one with a wrong data digest; the host may retry.
    TRANSIENT_TRANSPORT = 0x022, "transient transport error";
    /// Beyond the end of the namespace.
    LBA_OUT_OF_RANGE = 0x080, "LBA out of range";
    /// The namespace has no capacity left.
    CAPACITY_EXCEEDED = 0x081, "capacity exceeded";
    /// The namespace is not ready.
    NAMESPACE_NOT_READY = 0x082, "namespace not ready";
    /// Another host holds a reservation.
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    /// Create I/O Submission Queue: the completion queue does not exist.
    INVALID_CQ = 0x100, "completion queue invalid";
    /// The queue identifier is in use or out of range.
    INVALID_QID = 0x101, "invalid queue identifier";
    /// The queue size is zero or too large.
    INVALID_QUEUE_SIZE = 0x102, "invalid queue size";
    /// More Abort commands than the controller accepts.
    ABORT_LIMIT = 0x103, "abort command limit exceeded";
    /// More Asynchronous Event Requests than the controller accepts.
    ASYNC_EVENT_LIMIT = 0x105, "asynchronous event request limit exceeded";
    /// The interrupt vector does not exist.
    INVALID_VECTOR = 0x108, "invalid interrupt vector";
    /// The log page does not exist.
    INVALID_LOG_PAGE = 0x109, "invalid log page";
    /// Delete I/O Completion Queue: submission queues still use it.
    INVALID_QUEUE_DELETION = 0x10c, "invalid queue deletion";
    /// The feature cannot be saved.
    FEATURE_NOT_SAVEABLE = 0x10d, "feature identifier not saveable";
    /// The feature cannot be changed.
    FEATURE_NOT_CHANGEABLE = 0x10e, "feature not changeable";
    /// The feature is not specific to a namespace.
    FEATURE_NOT_NAMESPACE = 0x10f, "feature not namespace specific";
    /// Cross-Controller Reset: another command has that controller reset already.
    CROSS_RESET_RUNNING = 0x13f, "cross-controller reset in progress";
    /// Cross-Controller Reset: the log page has no free entry.
    CROSS_RESET_LOG_FULL = 0x140, "cross-controller reset log page full";
    /// More Cross-Controller Reset commands than the controller accepts.
    CROSS_RESET_LIMIT = 0x141, "cross-controller reset limit exceeded";
    /// Attributes that conflict, such as overlapping ranges.
    CONFLICTING_ATTRIBUTES = 0x180, "conflicting attributes";
    /// Protection information that does not match the format.
    INVALID_PROTECTION = 0x181, "invalid protection information";
    /// A range that is read-only.
    READ_ONLY_RANGE = 0x182, "attempted write to read-only range";
    /// Too many active zones.
    ZONES_ACTIVE = 0x1bd, "too many active zones";
    /// Too many open zones.
    ZONES_OPEN = 0x1be, "too many open zones";
    /// The medium failed a write.
    WRITE_FAULT = 0x280, "write fault";
    /// The medium failed a read.
    UNRECOVERED_READ = 0x281, "unrecovered read error";
    /// Guard check of protection information.
    GUARD_CHECK = 0x282, "end-to-end guard check error";
    /// Application tag check.
    APP_TAG_CHECK = 0x283, "end-to-end application tag check error";
    /// Reference tag check.
    REF_TAG_CHECK = 0x284, "end-to-end reference tag check error";
    /// Compared data differs.
    COMPARE_FAILURE = 0x285, "compare failure";
    /// Access denied.
    ACCESS_DENIED = 0x286, "access denied";
    /// The block is deallocated or was never written, and reading it is configured as an error.
    DEALLOCATED = 0x287, "deallocated or unwritten logical block";
    /// Internal error of the path.
    PATH_INTERNAL = 0x300, "internal path error";
    /// ANA: persistent loss.
    ANA_LOSS = 0x301, "asymmetric access persistent loss";
    /// ANA: inaccessible.
    ANA_INACCESSIBLE = 0x302, "asymmetric access inaccessible";
    /// ANA: in transition.
    ANA_TRANSITION = 0x303, "asymmetric access transition";
    /// The controller detected a path error.
    CONTROLLER_PATH_ERROR = 0x360, "controller pathing error";
    /// The host detected a path error.
    HOST_PATH_ERROR = 0x370, "host pathing error";
    /// The host cancelled the command.
    HOST_ABORTED = 0x371, "aborted by the host";
}

impl NvmeStatus {
    /// Status code type.
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// Status code within its type.
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// Type and code only, for comparisons.
    #[must_use]
    pub const fn without_flags(self) -> NvmeStatus {
        NvmeStatus(self.0 & CODE)
    }

    /// Whether the command succeeded.
    #[inline]
    pub const fn is_success(self) -> bool {
        self.0 & CODE == 0
    }

    /// Index of the controller's retry delay (CRDT1 to CRDT3) before a retry; 0 for none.
    pub const fn retry_delay(self) -> u8 {
        (self.0 >> 11 & 3) as u8
    }

    /// Whether the error log has more information.
    pub const fn has_more(self) -> bool {
        self.0 & MORE != 0
    }

    /// Whether a retry will fail.
    pub const fn is_final(self) -> bool {
        self.0 & DNR != 0
    }

    /// Whether the path failed, not the command.
    pub const fn is_path_error(self) -> bool {
        self.code_type() == PATH
    }

    /// The same with "do not retry".
    #[must_use]
    pub const fn with_dnr(self) -> NvmeStatus {
        NvmeStatus(self.0 | DNR)
    }

    /// The corresponding status of the queue core. Linux's TARGET, PROTECTION, RESV_CONFLICT and zone statuses have no
    /// counterpart there and become [`Status::Io`]. So do a path error that is final, since no other path is to be
    /// tried, and a command that the host aborted, which may have been executed.
    pub fn to_status(self) -> Status {
        match self.without_flags() {
            NvmeStatus::HOST_ABORTED => Status::Io,
            _ if self.is_path_error() && !self.is_final() => Status::Path,
            NvmeStatus::SUCCESS => Status::Ok,
            NvmeStatus::CAPACITY_EXCEEDED => Status::NoSpace,
            NvmeStatus::CONFLICTING_ATTRIBUTES
            | NvmeStatus::INVALID_OPCODE
            | NvmeStatus::INVALID_FIELD
            | NvmeStatus::INVALID_NAMESPACE => Status::NotSupported,
            NvmeStatus::WRITE_FAULT
            | NvmeStatus::UNRECOVERED_READ
            | NvmeStatus::DEALLOCATED
            | NvmeStatus::ACCESS_DENIED
            | NvmeStatus::READ_ONLY_RANGE
            | NvmeStatus::COMPARE_FAILURE => Status::Medium,
            _ => Status::Io,
        }
    }

    /// The controller's status for one of the queue core, for a command that wrote: a medium error is a write fault.
    pub fn from_write_status(status: Status) -> NvmeStatus {
        if status == Status::Medium { NvmeStatus::WRITE_FAULT } else { NvmeStatus::from_status(status) }
    }

    /// The same with "more": the error log has an entry.
    #[must_use]
    pub const fn with_more(self) -> NvmeStatus {
        NvmeStatus(self.0 | MORE)
    }

    /// The controller's status for one of the queue core.
    pub fn from_status(status: Status) -> NvmeStatus {
        match status {
            Status::Ok => NvmeStatus::SUCCESS,
            Status::NotSupported => NvmeStatus::INVALID_OPCODE.with_dnr(),
            Status::Timeout | Status::Again => NvmeStatus::COMMAND_INTERRUPTED,
            Status::NoSpace => NvmeStatus::CAPACITY_EXCEEDED,
            Status::Medium => NvmeStatus::UNRECOVERED_READ,
            Status::Path => NvmeStatus::CONTROLLER_PATH_ERROR,
            Status::Io => NvmeStatus::INTERNAL,
            Status::Offline => NvmeStatus::NAMESPACE_NOT_READY,
            Status::Invalid => NvmeStatus::INVALID_FIELD.with_dnr(),
        }
    }
}

impl std::fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({:03x}h)", self.0 & CODE),
            None => write!(f, "status {:03x}h", self.0 & CODE),
        }
    }
}

impl std::fmt::Debug for NvmeStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NvmeStatus({:#06x}: {self})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_type_code_delay_and_flags() {
        let status = NvmeStatus(0x4000 | 0x2000 | 2 << 11 | 0x281);
        assert_eq!((status.code_type(), status.code(), status.retry_delay()), (2, 0x81, 2));
        assert!(status.is_final() && status.has_more() && !status.is_success() && !status.is_path_error());
        assert_eq!(status.without_flags(), NvmeStatus::UNRECOVERED_READ);
        assert!(NvmeStatus(0x2000).is_success(), "flags alone are no failure");
        assert!(NvmeStatus::ANA_TRANSITION.is_path_error());
        assert_eq!(NvmeStatus::INVALID_PRP_OFFSET.with_dnr().to_string(), "PRP offset invalid (013h)");
        assert_eq!(NvmeStatus(0x7c1).to_string(), "status 7c1h");
    }

    /// The table of Linux's driver, by number.
    #[test]
    fn each_status_maps_as_linux_maps_it_where_the_core_has_the_status() {
        use Status::{Io, Medium, NoSpace, NotSupported, Ok};
        let table = [
            (0x000, Ok),
            (0x001, NotSupported),
            (0x002, NotSupported),
            (0x00b, NotSupported),
            (0x180, NotSupported),
            (0x081, NoSpace),
            (0x280, Medium),
            (0x281, Medium),
            (0x287, Medium),
            (0x286, Medium),
            (0x182, Medium),
            (0x285, Medium),
            (0x080, Io),
            (0x021, Io),
            (0x082, Io),
            (0x282, Io),
            (0x283, Io),
            (0x284, Io),
            (0x181, Io),
            (0x083, Io),
            (0x371, Io),
            (0x007, Io),
            (0x006, Io),
            (0x7ff, Io),
        ];
        for (bits, status) in table {
            for flags in [0, DNR, MORE, 3 << 11] {
                assert_eq!(NvmeStatus(bits | flags).to_status(), status, "{bits:#x}");
            }
        }
    }

    #[test]
    fn a_path_error_is_for_another_path_unless_it_is_final() {
        for bits in [0x300, 0x301, 0x302, 0x303, 0x360, 0x370, 0x3ff] {
            assert_eq!(NvmeStatus(bits).to_status(), Status::Path, "{bits:#x}");
            assert_eq!(NvmeStatus(bits | MORE).to_status(), Status::Path, "{bits:#x}");
            assert_eq!(NvmeStatus(bits).with_dnr().to_status(), Status::Io, "{bits:#x}");
        }
    }

    #[test]
    fn a_failure_of_the_core_is_a_failure_to_the_host() {
        use Status::{Again, Invalid, Io, Medium, NoSpace, NotSupported, Offline, Ok, Path, Timeout};
        assert!(NvmeStatus::from_status(Ok).is_success());
        for status in [NotSupported, Timeout, NoSpace, Medium, Path, Io, Again, Offline, Invalid] {
            assert!(!NvmeStatus::from_status(status).to_status().is_ok(), "{status}");
        }
        for status in [NotSupported, NoSpace, Medium, Path, Io] {
            assert_eq!(NvmeStatus::from_status(status).to_status(), status);
        }
    }
}
