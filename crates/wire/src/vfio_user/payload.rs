//! Reading a payload field by field, and writing one.

use super::{Command, MessageError};

/// Fields of a payload, in order. A missing field is [`MessageError::Length`].
pub(super) struct PayloadReader<'a> {
    command: Command,
    whole: &'a [u8],
    left: &'a [u8],
}

impl<'a> PayloadReader<'a> {
    /// At the start of a payload that has at least `fixed` bytes.
    pub(super) fn new(command: Command, whole: &'a [u8], fixed: usize) -> Result<PayloadReader<'a>, MessageError> {
        let reader = PayloadReader { command, whole, left: whole };
        if whole.len() < fixed { Err(reader.length(fixed as u64)) } else { Ok(reader) }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let needed = (self.whole.len() - self.left.len() + N) as u64;
        let (field, left) = self.left.split_first_chunk::<N>().ok_or_else(|| self.length(needed))?;
        self.left = left;
        Ok(*field)
    }

    pub(super) fn u16(&mut self) -> Result<u16, MessageError> {
        self.take().map(u16::from_ne_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, MessageError> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, MessageError> {
        self.take().map(u64::from_ne_bytes)
    }

    /// `argsz`, at least `min`.
    pub(super) fn argsz(&mut self, min: usize) -> Result<u32, MessageError> {
        let argsz = self.u32()?;
        if (argsz as usize) < min {
            return Err(MessageError::Argsz { command: self.command, argsz });
        }
        Ok(argsz)
    }

    /// All remaining bytes.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.left)
    }

    /// All remaining bytes, which must be `count` bytes.
    pub(super) fn data(&mut self, count: u64) -> Result<&'a [u8], MessageError> {
        if self.left.len() as u64 != count {
            let fixed = (self.whole.len() - self.left.len()) as u64;
            return Err(self.length(fixed.saturating_add(count)));
        }
        Ok(self.rest())
    }

    /// Checks that no bytes are left.
    pub(super) fn end(&mut self) -> Result<(), MessageError> {
        self.data(0).map(|_| ())
    }

    fn length(&self, expected: u64) -> MessageError {
        MessageError::Length { command: self.command, bytes: self.whole.len(), expected }
    }
}

/// Checks that `start + len` can be counted.
pub(super) fn check_range(command: Command, start: u64, len: u64) -> Result<(), MessageError> {
    start.checked_add(len).map(|_| ()).ok_or(MessageError::Range { command, start, len })
}

/// Checks that at most `max` descriptors came.
pub(super) fn check_descriptors(command: Command, came: usize, max: usize) -> Result<(), MessageError> {
    if came > max { Err(MessageError::Descriptors { command, came, max }) } else { Ok(()) }
}

/// A payload of words of 32 and 64 bits.
macro_rules! payload {
    ($($word:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend_from_slice(&$word.to_ne_bytes());)*
        bytes
    }};
}
pub(super) use payload;
