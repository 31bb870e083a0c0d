//! NVMe over TCP: the PDUs of a connection, as bytes.
//!
//! Source: NVMe TCP Transport Specification 1.0. A [`PduReader`] parses the byte stream of one direction in pieces of
//! any size. It buffers headers only; data is passed through in the pieces in which it comes, and its digest is
//! computed on the way. [`Pdu::encode`] makes the bytes before the data.
//!
//! A violation is a [`PduError`] with the fatal error status and information of the specification, for the
//! [`TermReq`] that ends the connection. A wrong data digest is none: it fails one command.
//!
//! Not here: which commands are outstanding, and where their data is. All numbers are little-endian.

mod digest;
mod error;
mod pdu;
mod reader;

pub use digest::{Crc32c, DIGEST_BYTES};
pub use error::{FatalStatus, PduError};
pub use pdu::{C2hData, EncodedPdu, Framing, H2cData, IcReq, IcResp, Pdu, PduType, R2t, TermReq};
pub use reader::{DataLimits, PduEvent, PduReader, PduSender, UnfinishedPdu};

/// Bytes of the common header, with which each PDU begins.
pub const COMMON_BYTES: usize = 8;
/// Maximum bytes of a header (HLEN).
pub const HEADER_BYTES_MAX: usize = 128;
/// Maximum bytes of a TermReq: its header, and that of the PDU in error.
pub const TERM_REQ_BYTES_MAX: usize = 152;
/// Minimum of MAXH2CDATA, bytes.
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Maximum of HPDA and CPDA, in dwords, 0's based.
pub const ALIGNMENT_MAX: u8 = 31;
