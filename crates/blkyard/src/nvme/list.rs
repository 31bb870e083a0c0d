//! The namespaces of the kernel's NVMe driver, from sysfs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use blkyard_mq::SECTOR_BYTES;
use blkyard_nvme::{NAMESPACE_FIELDS, NvmeField, cns};

use crate::nvme::{KernelPassthrough, NvmePassthrough};

/// Time limit for a device to report its allocated blocks.
const USED_MAX: Duration = Duration::from_secs(5);

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeListEntry {
    /// Its block device.
    pub device: PathBuf,
    /// Its character device.
    pub generic: PathBuf,
    /// Its identifier.
    pub nsid: u32,
    /// Serial number of the subsystem.
    pub serial: String,
    /// Model of the subsystem.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Size, blocks.
    pub blocks: u64,
    /// Allocated blocks.
    pub used: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Bytes of a block's metadata.
    pub metadata_bytes: u32,
}

/// The namespaces of this machine, in the order of their names.
///
/// # Errors
/// /sys cannot be read.
pub fn list_nvme() -> io::Result<Vec<NvmeListEntry>> {
    let mut entries = list_in(Path::new("/sys"))?;
    for entry in &mut entries {
        entry.used = used_blocks(entry).unwrap_or(entry.used);
    }
    Ok(entries)
}

/// Allocated blocks, asked from the device: kernels before 6.8 do not have them in sysfs.
fn used_blocks(entry: &NvmeListEntry) -> Option<u64> {
    let mut node = KernelPassthrough::open(&entry.device).ok()?;
    let node: &mut dyn NvmePassthrough = &mut node;
    let data = node.identify(cns::NAMESPACE, entry.nsid, USED_MAX).ok()?;
    NvmeField::find(NAMESPACE_FIELDS, "nuse").map(|field| field.number(&data) as u64)
}

/// The namespaces of a sysfs at this place.
fn list_in(sys: &Path) -> io::Result<Vec<NvmeListEntry>> {
    let folder = sys.join("block");
    let mut entries: Vec<((u32, u32), NvmeListEntry)> = vec![];
    let listing = match fs::read_dir(&folder) {
        // No block device at all.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        listing => listing?,
    };
    for found in listing {
        let name = found?.file_name().to_string_lossy().into_owned();
        // Paths of a multipath device, nvme0c0n1, are hidden behind nvme0n1.
        let Some(numbers) = name.strip_prefix("nvme").and_then(namespace_numbers) else { continue };
        entries.push((numbers, entry(&folder.join(&name), &name)));
    }
    entries.sort_by_key(|(numbers, _)| *numbers);
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}

/// `0n1` as a pair.
fn namespace_numbers(text: &str) -> Option<(u32, u32)> {
    let (controller, namespace) = text.split_once('n')?;
    Some((controller.parse().ok()?, namespace.parse().ok()?))
}

fn entry(folder: &Path, name: &str) -> NvmeListEntry {
    let text = |leaf: &str| fs::read_to_string(folder.join(leaf)).unwrap_or_default().trim().to_owned();
    let block_bytes = number::<u32>(&text("queue/logical_block_size")).unwrap_or(512).max(512);
    let blocks = number::<u64>(&text("size")).unwrap_or(0) / (u64::from(block_bytes) / SECTOR_BYTES);
    NvmeListEntry {
        device: Path::new("/dev").join(name),
        generic: Path::new("/dev").join(name.replacen("nvme", "ng", 1)),
        nsid: number(&text("nsid")).unwrap_or(0),
        serial: text("device/serial"),
        model: text("device/model"),
        firmware: text("device/firmware_rev"),
        blocks,
        used: number(&text("nuse")).unwrap_or(blocks),
        block_bytes,
        metadata_bytes: number(&text("metadata_bytes")).unwrap_or(0),
    }
}

fn number<N: FromStr>(text: &str) -> Option<N> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_listed_in_order_with_their_attributes() {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = sys.path().join("block").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for name in ["nvme10n1", "nvme2n1", "nvme2n3", "sda", "nvme0c0n1"] {
            put(&format!("{name}/size"), "2048\n");
        }
        put("nvme2n1/queue/logical_block_size", "4096\n");
        put("nvme2n1/nsid", "1\n");
        put("nvme2n1/nuse", "7\n");
        put("nvme2n1/device/serial", "S1  \n");
        put("nvme2n1/device/model", "A disk\n");
        put("nvme2n3/queue/logical_block_size", "0\n");
        put("nvme2n3/nsid", "absurd\n");
        let found = list_in(sys.path()).unwrap();
        let names: Vec<_> = found.iter().map(|entry| entry.device.to_str().unwrap()).collect();
        assert_eq!(names, ["/dev/nvme2n1", "/dev/nvme2n3", "/dev/nvme10n1"]);
        let expected = NvmeListEntry {
            device: "/dev/nvme2n1".into(),
            generic: "/dev/ng2n1".into(),
            nsid: 1,
            serial: "S1".into(),
            model: "A disk".into(),
            blocks: 256,
            used: 7,
            block_bytes: 4096,
            ..NvmeListEntry::default()
        };
        assert_eq!(found[0], expected);
        assert_eq!((found[1].nsid, found[1].block_bytes, found[1].used), (0, 512, 2048));
        assert!(list_in(&sys.path().join("absent")).unwrap().is_empty());
    }
}
