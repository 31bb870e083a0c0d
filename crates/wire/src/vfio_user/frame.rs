//! Frames: messages of a byte stream, each with its descriptors.
//!
//! A socket keeps the boundaries of descriptors only as far as the reader does: bytes beyond the end of a message may
//! bring descriptors of the next one. So the reader of the socket asks for [`FrameReader::wanted`] bytes at most, and
//! never reads over the end of a message.

use super::{FrameError, HEADER_BYTES, MessageHeader};

/// Bytes of one read of the socket at most. Memory for a message grows with the received bytes, not with the size in
/// its header.
pub const READ_BYTES_MAX: usize = 64 << 10;

/// A receiver's limits for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// Bytes, header included.
    pub bytes_max: u32,
    /// Descriptors.
    pub descriptors_max: usize,
}

impl FrameLimits {
    /// Limits for a receiver of these data bytes and descriptors with one message. They include a version message and
    /// the structure before the data.
    pub fn for_data(data_bytes_max: u32, descriptors_max: usize) -> FrameLimits {
        let fixed = (HEADER_BYTES + super::VERSION_BYTES_MAX + 64) as u32;
        FrameLimits { bytes_max: data_bytes_max.saturating_add(fixed), descriptors_max }
    }
}

/// A whole message, its payload not parsed.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<D> {
    /// Its header.
    pub header: MessageHeader,
    /// Bytes after the header; as many as the header says.
    pub payload: Vec<u8>,
    /// Descriptors, in the order in which they came.
    pub descriptors: Vec<D>,
}

/// Collects the bytes of one message after the other.
#[derive(Debug)]
pub struct FrameReader<D> {
    limits: FrameLimits,
    /// The header's bytes first.
    bytes: Vec<u8>,
    /// Set once its bytes have arrived.
    header: Option<MessageHeader>,
    descriptors: Vec<D>,
}

impl<D> FrameReader<D> {
    /// A reader at the start of a stream.
    pub fn new(limits: FrameLimits) -> FrameReader<D> {
        FrameReader { limits, bytes: Vec::new(), header: None, descriptors: Vec::new() }
    }

    /// Descriptors that are taken with one message at most.
    pub fn descriptors_max(&self) -> usize {
        self.limits.descriptors_max
    }

    /// Sets that.
    pub fn set_descriptors_max(&mut self, descriptors_max: usize) {
        self.limits.descriptors_max = descriptors_max;
    }

    /// Bytes that may be read next, at least one. All of them belong to one message.
    pub fn wanted(&self) -> usize {
        let whole = HEADER_BYTES + self.header.map_or(0, |header| header.payload_bytes as usize);
        (whole - self.bytes.len()).min(READ_BYTES_MAX)
    }

    /// Adds the result of one read. Returns the message if it is whole now.
    ///
    /// # Errors
    /// A [`FrameError`] ends the stream: later bytes are meaningless.
    ///
    /// # Panics
    /// If more than [`FrameReader::wanted`] bytes were read.
    pub fn push(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = D>,
    ) -> Result<Option<Frame<D>>, FrameError> {
        assert!(bytes.len() <= self.wanted(), "{} bytes were read, {} wanted", bytes.len(), self.wanted());
        self.bytes.extend_from_slice(bytes);
        for descriptor in descriptors {
            if self.descriptors.len() == self.limits.descriptors_max {
                return Err(FrameError::Descriptors { max: self.limits.descriptors_max });
            }
            self.descriptors.push(descriptor);
        }
        if self.header.is_none()
            && let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>()
        {
            self.header = Some(MessageHeader::parse(*header, self.limits.bytes_max)?);
        }
        let Some(header) = self.header else { return Ok(None) };
        if self.bytes.len() < HEADER_BYTES + header.payload_bytes as usize {
            return Ok(None);
        }
        let payload = self.bytes.split_off(HEADER_BYTES);
        self.bytes.clear();
        self.header = None;
        Ok(Some(Frame { header, payload, descriptors: std::mem::take(&mut self.descriptors) }))
    }

    /// The received part of a message, and its descriptors.
    pub fn part(&self) -> (&[u8], &[D]) {
        (&self.bytes, &self.descriptors)
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// It ended inside a message.
    pub fn end(&self) -> Result<(), FrameError> {
        match self.bytes.len() {
            0 => Ok(()),
            bytes => Err(FrameError::Truncated { bytes }),
        }
    }
}
