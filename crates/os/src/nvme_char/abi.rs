//! The kernel's interface of passthrough by io_uring (`linux/nvme_ioctl.h`).

use io_uring::opcode::UringCmd80;
use io_uring::squeue::Entry128;
use io_uring::types::Fd;

/// Data is one buffer.
const NVME_URING_CMD_IO: u32 = request(0x80);
/// Data is a vector of buffers.
const NVME_URING_CMD_IO_VEC: u32 = request(0x81);
/// Bytes of `struct nvme_uring_cmd`.
const COMMAND_BYTES: u32 = 72;

/// `_IOWR('N', number, struct nvme_uring_cmd)`.
const fn request(number: u32) -> u32 {
    3 << 30 | COMMAND_BYTES << 16 | (b'N' as u32) << 8 | number
}

/// Data of a command, as the kernel is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CharCommandData {
    None,
    /// So many bytes at an address, if registered with the number of their piece.
    Buffer {
        address: u64,
        bytes: u32,
        piece: Option<u16>,
    },
    /// So many `iovec`s at an address.
    Vector {
        address: u64,
        count: u32,
    },
}

/// A command with the words of a submission queue entry. The kernel sets the identifier, the kind of the data pointer,
/// the data pointer and the metadata pointer; its default timeout applies.
#[inline]
pub(super) fn entry(file: i32, words: [u64; 8], data: CharCommandData) -> Entry128 {
    /// Opcode and namespace.
    const KEPT: u64 = 0xffff_ffff_0000_00ff;
    let (request, address, len, piece) = match data {
        CharCommandData::None => (NVME_URING_CMD_IO, 0, 0, None),
        CharCommandData::Buffer { address, bytes, piece } => (NVME_URING_CMD_IO, address, bytes, piece),
        CharCommandData::Vector { address, count } => (NVME_URING_CMD_IO_VEC, address, count, None),
    };
    // Metadata pointer, data pointer, lengths of metadata and data, dwords 10 to 15, timeout.
    let command: [u64; 10] =
        [words[0] & KEPT, words[1], 0, address, u64::from(len) << 32, words[5], words[6], words[7], 0, 0];
    let mut bytes = [0; 80];
    for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(command) {
        *to = word.to_le_bytes();
    }
    UringCmd80::new(Fd(file), request).cmd(bytes).buf_index(piece).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of an entry of 128 bytes.
    fn bytes(entry: &Entry128) -> [u8; 128] {
        // SAFETY: the type is 128 bytes of plain data, all initialized.
        unsafe { std::mem::transmute_copy(entry) }
    }

    /// A command with each dword set.
    const WORDS: [u64; 8] = [
        0x0a0b_0c0d_3456_c102,
        0x0303_0303_0202_0202,
        0x1111_1111_1111_1111,
        0x2222_2222_2222_2222,
        0x3333_3333_3333_3333,
        0x1b1b_1b1b_1a1a_1a1a,
        0x1d1d_1d1d_1c1c_1c1c,
        0x1f1f_1f1f_1e1e_1e1e,
    ];

    /// Checks the words of the command, from offset 48 of the entry on.
    fn check(data: CharCommandData, request: u32, address: u64, len: u64) -> [u8; 128] {
        let bytes = bytes(&entry(7, WORDS, data));
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(
            (bytes[0], word(0) >> 32, word(8) & 0xffff_ffff),
            (46, 7, u64::from(request)),
            "IORING_OP_URING_CMD"
        );
        let command: Vec<_> = (0..10).map(|number| word(48 + number * 8)).collect();
        // Neither identifier nor flags nor pointers.
        let want = [0x0a0b_0c0d_0000_0002, WORDS[1], 0, address, len << 32, WORDS[5], WORDS[6], WORDS[7], 0, 0];
        assert_eq!(command, want);
        bytes
    }

    #[test]
    fn a_command_is_as_the_kernels_header_has_it() {
        const IO: u32 = 0xc048_4e80;
        let (address, bytes) = (0x7777_0000_1234, 0x2_0000);
        assert_eq!(check(CharCommandData::None, IO, 0, 0)[28..30], [0, 0]);
        let plain = check(CharCommandData::Buffer { address, bytes, piece: None }, IO, address, bytes.into());
        assert_eq!((plain[28], plain[40]), (0, 0));
        let fixed = check(CharCommandData::Buffer { address, bytes, piece: Some(9) }, IO, address, bytes.into());
        assert_eq!((fixed[28], fixed[40]), (1, 9), "IORING_URING_CMD_FIXED and the index");
        check(CharCommandData::Vector { address, count: 3 }, 0xc048_4e81, address, 3);
    }
}
