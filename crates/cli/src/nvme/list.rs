//! `list`: the namespaces of the kernel's driver.

use std::fmt::Write as _;

use blkyard::nvme::NvmeListEntry;

use super::json::JsonNode;
use super::text::{printable, scaled};

/// Headings and widths of the table.
const COLUMNS: [(&str, usize); 8] = [
    ("Node", 21),
    ("Generic", 21),
    ("SN", 20),
    ("Model", 40),
    ("Namespace", 10),
    ("Usage", 26),
    ("Format", 16),
    ("FW Rev", 8),
];
/// Binary prefixes, from the first power of 1024 on.
const PREFIXES: [&str; 3] = ["Ki", "Mi", "Gi"];

/// The namespaces as a table.
pub fn text(entries: &[NvmeListEntry]) -> String {
    let mut text = row(&COLUMNS.map(|(heading, _)| heading.to_owned()));
    text.push_str(&row(&COLUMNS.map(|(_, width)| "-".repeat(width))));
    for entry in entries {
        let block = f64::from(entry.block_bytes);
        let ((used, used_prefix), (size, size_prefix)) =
            (scaled(entry.used as f64 * block), scaled(entry.blocks as f64 * block));
        let (format, format_prefix) = binary(entry.block_bytes);
        text.push_str(&row(&[
            entry.device.display().to_string(),
            entry.generic.display().to_string(),
            printable(&entry.serial),
            printable(&entry.model),
            format!("{:#x}", entry.nsid),
            format!("{used:6.2} {used_prefix:>2}B / {size:6.2} {size_prefix:>2}B"),
            format!("{format:3} {format_prefix:>2}B + {:2} B", entry.metadata_bytes),
            printable(&entry.firmware),
        ]));
    }
    text
}

fn row(cells: &[String; 8]) -> String {
    let mut text = String::new();
    for (cell, (_, width)) in cells.iter().zip(COLUMNS) {
        let _ = write!(text, "{cell:width$} ");
    }
    text.pop();
    text.push('\n');
    text
}

/// Bytes with a binary prefix, rounded.
fn binary(bytes: u32) -> (u32, &'static str) {
    let mut best = (bytes, "");
    for (power, prefix) in PREFIXES.into_iter().enumerate() {
        let unit = 1024_u32 << (10 * power);
        if bytes >= unit {
            best = ((u64::from(bytes) + u64::from(unit) / 2) as u32 / unit, prefix);
        }
    }
    best
}

/// The namespaces as JSON.
pub fn json(entries: &[NvmeListEntry]) -> JsonNode {
    let entries = entries.iter().map(|entry| {
        let block = u128::from(entry.block_bytes);
        JsonNode::object([
            ("NameSpace", entry.nsid.into()),
            ("DevicePath", entry.device.display().to_string().into()),
            ("GenericPath", entry.generic.display().to_string().into()),
            ("Firmware", entry.firmware.clone().into()),
            ("ModelNumber", entry.model.clone().into()),
            ("SerialNumber", entry.serial.clone().into()),
            ("UsedBytes", (u128::from(entry.used) * block).into()),
            ("MaximumLBA", entry.blocks.into()),
            ("PhysicalSize", (u128::from(entry.blocks) * block).into()),
            ("SectorSize", entry.block_bytes.into()),
        ])
    });
    JsonNode::object([("Devices", JsonNode::List(entries.collect()))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_a_row() {
        let entry = NvmeListEntry {
            device: "/dev/nvme0n1".into(),
            generic: "/dev/ng0n1".into(),
            nsid: 1,
            serial: "S1".into(),
            model: "A disk".into(),
            firmware: "1.0".into(),
            blocks: 1 << 18,
            used: 1 << 17,
            block_bytes: 4096,
            metadata_bytes: 8,
        };
        let shown = text(std::slice::from_ref(&entry));
        let lines: Vec<_> = shown.lines().collect();
        assert!(lines[0].starts_with("Node                  Generic"), "{shown}");
        let usage = "0x1        536.87  MB /   1.07  GB      4 KiB +  8 B";
        assert!(
            lines[2].starts_with("/dev/nvme0n1") && lines[2].contains(usage) && lines[2].ends_with(" 1.0     "),
            "{shown}"
        );
        let json: serde_json::Value = serde_json::from_str(&json(&[entry]).document()).unwrap();
        assert_eq!(json["Devices"][0]["PhysicalSize"], 1_u64 << 30);
        let absurd =
            NvmeListEntry { blocks: u64::MAX, used: u64::MAX, block_bytes: u32::MAX, ..NvmeListEntry::default() };
        text(&[absurd]);
    }
}
