//! The reasons why a file cannot be opened as a disk, each with object, cause and cure.

use std::io;
use std::path::PathBuf;

use super::Indirect;

/// Why a file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is not there.
    #[error("{path}: no such file; create an image with `truncate -s 1G {path}`", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A directory.
    #[error("{path} is a directory: name a file in it, or a block device", path = path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// Something that has no blocks.
    #[error("{path} is a {kind}: only regular files and block devices can be disks", path = path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// Its type.
        kind: &'static str,
    },
    /// Not for us.
    #[error(
        "{path}: permission denied. Give the user of this process {wanted} permission{hint}",
        path = path.display()
    )]
    Permission {
        /// The file.
        path: PathBuf,
        /// Missing property.
        wanted: &'static str,
        /// Further cure.
        hint: &'static str,
    },
    /// The file system, or the file on it, takes no writes.
    #[error("{path} cannot be written: {cause}; open it with ?readonly=on", path = path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// Cause.
        cause: &'static str,
    },
    /// Not a disk but an image of another format.
    #[error(
        "{path} {sign} a {format}, and a disk here is a raw file: make one of it with `{cure}`{hint}",
        path = path.display()
    )]
    Container {
        /// The file.
        path: PathBuf,
        /// How one knows.
        sign: &'static str,
        /// The format.
        format: &'static str,
        /// The command.
        cure: String,
        /// Further cure.
        hint: &'static str,
    },
    /// Empty file.
    #[error("{path} is empty: give it a size with `truncate -s 1G {path}`", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The last block is not whole.
    #[error(
        "{path} has {bytes} bytes, which is not a multiple of its block of {block}. Round it up with \
         `truncate -s %{block} {path}`",
        path = path.display()
    )]
    OddSize {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The logical block.
        block: u32,
    },
    /// No size for a block.
    #[error(
        "{path}: block size {asked} is invalid; give a power of two from 512 to {max}",
        path = path.display()
    )]
    Block {
        /// The file.
        path: PathBuf,
        /// Value of the option.
        asked: u32,
        /// The largest that can be.
        max: u32,
    },
    /// Direct I/O was asked for and cannot be had.
    #[error("{path}: no direct I/O ({reason}); open it with ?direct=off", path = path.display())]
    NotDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: Indirect,
    },
    /// The system reports inconsistent limits.
    #[error("{path}: inconsistent limits: {source}; open it with another ?block_size", path = path.display())]
    Limits {
        /// The file.
        path: PathBuf,
        /// Violated rule.
        source: blkyard_mq::LimitsError,
    },
    /// Someone else has it.
    #[error(
        "{path} is in use: {holder}. Stop that program (`fuser -v {path}` may name it){hint}",
        path = path.display()
    )]
    InUse {
        /// The image.
        path: PathBuf,
        /// Its owner, as far as known.
        holder: String,
        /// Further cure.
        hint: &'static str,
    },
    /// No owner of the lock is visible: the kernel has not completed the I/O of a process that died.
    #[error(
        "{path} is in use by a process that cannot be identified: one of another user or container holds a lock on it, \
         then stop that process; or I/O of a killed process is still in flight, then wait until it has completed",
        path = path.display()
    )]
    Held {
        /// The image.
        path: PathBuf,
    },
    /// Locks do not work there.
    #[error(
        "{path} cannot be locked: {source}. Keep images on a file system with locks; for NFS, mount it with \
         local_lock=posix if no other host uses the image",
        path = path.display()
    )]
    Lock {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Something else.
    #[error("{path}: {what}: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// Failed operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
