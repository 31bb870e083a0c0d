//! Violations of the protocol, as a TermReq reports them.

/// Fatal error status (FES) of a TermReq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalStatus {
    /// A header field is invalid; the information is its offset.
    InvalidHeaderField = 1,
    /// A PDU that is not allowed in this state of the connection.
    SequenceError = 2,
    /// The header digest is wrong; the information is the digest received.
    HeaderDigest = 3,
    /// Data beyond the end of the command's buffer.
    OutOfRange = 4,
    /// To a host: more data in a PDU than allowed. To a controller: more R2Ts for a command than allowed.
    LimitExceeded = 5,
    /// A parameter that is not supported; the information is its offset.
    UnsupportedParameter = 6,
}

impl FatalStatus {
    /// By its number.
    pub fn from_number(number: u16) -> Option<FatalStatus> {
        use FatalStatus::{
            HeaderDigest, InvalidHeaderField, LimitExceeded, OutOfRange, SequenceError, UnsupportedParameter,
        };
        [InvalidHeaderField, SequenceError, HeaderDigest, OutOfRange, LimitExceeded, UnsupportedParameter]
            .into_iter()
            .find(|status| *status as u16 == number)
    }
}

/// A violation that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} (FES {:02x}h, FEI {information:x}h)", *.status as u16)]
pub struct PduError {
    /// Fatal error status.
    pub status: FatalStatus,
    /// Fatal error information.
    pub information: u32,
    /// Description.
    pub what: &'static str,
}

impl PduError {
    /// An invalid header field at this offset.
    pub const fn field(offset: u32, what: &'static str) -> PduError {
        PduError { status: FatalStatus::InvalidHeaderField, information: offset, what }
    }

    /// A violation without further information.
    pub const fn new(status: FatalStatus, what: &'static str) -> PduError {
        PduError { status, information: 0, what }
    }
}
