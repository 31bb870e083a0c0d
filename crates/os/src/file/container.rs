//! Image formats that a file may be meant to have, while disks here are raw.
//!
//! A file *named* as an image of another format is refused. One that *begins* like such an image is only reported: what
//! it begins with is in the hands of its guest, which must not decide whether a daemon starts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A format in which the file is not the disk.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) name: &'static str,
    /// Endings of file names.
    endings: &'static [&'static str],
    /// Where the file begins with what.
    magic: (usize, &'static [u8]),
    /// The program that unpacks it; unset for images, which QEMU converts.
    unpacked_by: Option<&'static str>,
}

impl Container {
    /// The command that makes a raw file of the one at this path.
    pub(super) fn cure(&self, path: &Path) -> String {
        let from = path.display();
        match self.unpacked_by {
            Some(program) => format!("{program} --keep {from}"),
            // It overwrites, and `disk.img` may be another disk.
            None => format!("qemu-img convert -O raw {from} {from}.raw"),
        }
    }
}

/// Magic numbers as in QEMU's docs/interop/qcow2.rst, VMware's "Virtual Disk Format 5.0", clause "Hosted Sparse
/// Extent", VirtualBox's `VDICore.h`, [MS-VHDX] 2.2.1, RFC 1952, RFC 8878 and the .xz file format 1.2.1.
const CONTAINERS: [Container; 7] = [
    Container { name: "qcow2 image", endings: &["qcow2", "qcow"], magic: (0, b"QFI\xfb"), unpacked_by: None },
    Container { name: "VMDK image", endings: &["vmdk"], magic: (0, b"KDMV"), unpacked_by: None },
    Container { name: "VDI image", endings: &["vdi"], magic: (64, b"\x7f\x10\xda\xbe"), unpacked_by: None },
    Container { name: "VHDX image", endings: &["vhdx"], magic: (0, b"vhdxfile"), unpacked_by: None },
    Container { name: "gzip archive", endings: &["gz"], magic: (0, b"\x1f\x8b\x08"), unpacked_by: Some("gunzip") },
    Container { name: "zstd archive", endings: &["zst"], magic: (0, b"\x28\xb5\x2f\xfd"), unpacked_by: Some("unzstd") },
    Container { name: "xz archive", endings: &["xz"], magic: (0, b"\xfd7zXZ\0"), unpacked_by: Some("unxz") },
];

/// Bytes at the beginning of a file that hold every magic number.
const BEGINNING: usize = 128;

/// The format that the file is named for.
pub(super) fn named(path: &Path) -> Option<&'static Container> {
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    // The part of a VMDK image that is a raw disk.
    let is_flat = path.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| stem.ends_with("-flat"));
    CONTAINERS.iter().find(|container| container.endings.contains(&ending.as_str())).filter(|_| !is_flat)
}

/// The format that the file begins like.
///
/// # Errors
/// It cannot be read.
pub(super) fn begun(path: &Path) -> io::Result<Option<&'static Container>> {
    let mut bytes = [0; BEGINNING];
    let length = File::open(path)?.read_at(&mut bytes, 0)?;
    Ok(begins(&bytes[..length]))
}

fn begins(bytes: &[u8]) -> Option<&'static Container> {
    CONTAINERS
        .iter()
        .find(|Container { magic: (at, magic), .. }| bytes.get(*at..).is_some_and(|b| b.starts_with(magic)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_a_format_and_a_raw_part_has_none() {
        for (name, format) in [
            ("debian.qcow2", Some("qcow2 image")),
            ("/a.b/Disk.VMDK", Some("VMDK image")),
            ("disk-flat.vmdk", None),
            ("disk.raw.xz", Some("xz archive")),
            ("disk.img", None),
            ("qcow2", None),
            ("/dev/vda", None),
        ] {
            assert_eq!(named(Path::new(name)).map(|container| container.name), format, "{name}");
        }
    }

    #[test]
    fn the_cure_is_a_command_for_the_file() {
        let cure = |name: &str| named(Path::new(name)).map(|container| container.cure(Path::new(name)));
        assert_eq!(cure("/d/a.qcow2").unwrap(), "qemu-img convert -O raw /d/a.qcow2 /d/a.qcow2.raw");
        assert_eq!(cure("a.raw.gz").unwrap(), "gunzip --keep a.raw.gz");
    }

    #[test]
    fn the_first_bytes_tell_a_format() {
        let mut vdi = [0; BEGINNING];
        vdi[64..68].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
        for (bytes, format) in [
            (b"QFI\xfb\0\0\0\x03".as_slice(), Some("qcow2 image")),
            (&vdi, Some("VDI image")),
            (&vdi[..66], None),
            (b"QFI", None),
            (b"", None),
            (&[0; BEGINNING], None),
        ] {
            assert_eq!(begins(bytes).map(|container| container.name), format, "{bytes:?}");
        }
    }
}
