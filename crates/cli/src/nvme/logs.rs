//! `smart-log` and `error-log`: log pages as text and JSON.

use std::fmt::Write as _;

use blkyard::nvme::{ERROR_ENTRY_BYTES, ErrorLogEntry, FieldKind, NvmeStatus, SMART_FIELDS};

use super::json::JsonNode;
use super::text::{hex, json_value, text_value};

/// Names of the bits of the critical warning, in text and JSON.
const WARNINGS: [(&str, &str); 6] = [
    ("Available Spare", "available_spare"),
    ("Temp. Threshold", "temp_threshold"),
    ("NVM subsystem Reliability", "reliability_degraded"),
    ("Read-only", "ro"),
    ("Volatile mem. backup failed", "vmbu_failed"),
    ("Persistent Mem. RO", "pmr_ro"),
];
const CRITICAL_WARNING: &str = "critical_warning";
const SEPARATOR: &str = ".................";

/// The SMART / health log page as text.
pub fn smart_text(data: &[u8], device: &str, nsid: u32, is_readable: bool) -> String {
    let mut text = format!("Smart Log for NVME device:{device} namespace-id:{nsid:x}\n");
    for field in SMART_FIELDS.iter().filter(|field| is_present(field, data)) {
        let _ = writeln!(text, "{}: {}", tabbed(field.label, 40), text_value(field, data));
        if field.name == CRITICAL_WARNING && is_readable {
            for (bit, (name, _)) in WARNINGS.iter().enumerate() {
                let _ = writeln!(text, "      {:<31}: {}", format!("{name}[{bit}]"), field.number(data) >> bit & 1);
            }
        }
    }
    text
}

/// The SMART / health log page as JSON.
pub fn smart_json(data: &[u8], is_readable: bool) -> JsonNode {
    let fields = SMART_FIELDS.iter().filter(|field| is_present(field, data));
    let members = fields.map(|field| {
        if field.name != CRITICAL_WARNING || !is_readable {
            return (field.name.to_owned(), json_value(field, data));
        }
        let value = field.number(data);
        let bits = WARNINGS.iter().enumerate().map(|(bit, (_, key))| (*key, JsonNode::from(value >> bit & 1)));
        (field.name.to_owned(), JsonNode::object([("value", value.into())].into_iter().chain(bits)))
    });
    JsonNode::Object(members.collect())
}

/// A temperature sensor that reports zero does not exist.
fn is_present(field: &blkyard::nvme::NvmeField, data: &[u8]) -> bool {
    field.kind != FieldKind::Kelvin || field.name == "temperature" || field.number(data) != 0
}

/// The label, filled up to a column with tabs of eight.
fn tabbed(label: &str, column: usize) -> String {
    let tabs = column.saturating_sub(label.len()).div_ceil(8);
    format!("{label}{}", "\t".repeat(tabs))
}

/// The entries of an error log page as text.
pub fn errors_text(data: &[u8], device: &str) -> String {
    let count = data.chunks(ERROR_ENTRY_BYTES).len();
    let mut text = format!("Error Log Entries for device:{device} entries:{count}\n{SEPARATOR}\n");
    for (number, entry) in data.chunks(ERROR_ENTRY_BYTES).map(ErrorLogEntry::parse).enumerate() {
        let status = NvmeStatus(entry.status_field >> 1);
        let transport = match entry.transport {
            0 => "not indicated, or not related to the transport",
            1 => "RDMA",
            2 => "Fibre Channel",
            3 => "TCP",
            254 => "intra-host",
            _ => "reserved",
        };
        let name = status.name().unwrap_or("unknown");
        let rows = [
            ("error_count", entry.error_count.to_string()),
            ("sqid", entry.sqid.to_string()),
            ("cmdid", hex(entry.command_id.into())),
            ("status_field", format!("{} ({name})", hex(status.0.into()))),
            ("phase_tag", hex((entry.status_field & 1).into())),
            ("parm_err_loc", hex(entry.parameter_location.into())),
            ("lba", hex(entry.lba.into())),
            ("nsid", hex(entry.nsid.into())),
            ("vs", entry.vendor_log.to_string()),
            ("trtype", format!("{} ({transport})", hex(entry.transport.into()))),
            ("csi", entry.command_set.to_string()),
            ("opcode", hex(entry.opcode.into())),
            ("cs", hex(entry.command_specific.into())),
            ("trtype_spec_info", hex(entry.transport_specific.into())),
            ("log_page_version", entry.version.to_string()),
        ];
        let _ = writeln!(text, " Entry[{number:2}]\n{SEPARATOR}");
        for (label, value) in rows {
            let _ = writeln!(text, "{}: {value}", tabbed(label, 16));
        }
        let _ = writeln!(text, "{SEPARATOR}");
    }
    text
}

/// The entries of an error log page as JSON.
pub fn errors_json(data: &[u8]) -> JsonNode {
    let entries = data.chunks(ERROR_ENTRY_BYTES).map(|bytes| {
        let entry = ErrorLogEntry::parse(bytes);
        JsonNode::object([
            ("error_count", entry.error_count.into()),
            ("sqid", entry.sqid.into()),
            ("cmdid", entry.command_id.into()),
            ("status_field", (entry.status_field >> 1).into()),
            ("phase_tag", (entry.status_field & 1).into()),
            ("parm_error_location", entry.parameter_location.into()),
            ("lba", entry.lba.into()),
            ("nsid", entry.nsid.into()),
            ("vs", entry.vendor_log.into()),
            ("trtype", entry.transport.into()),
            ("cs", entry.command_specific.into()),
            ("trtype_spec_info", entry.transport_specific.into()),
        ])
    });
    JsonNode::object([("errors", JsonNode::List(entries.collect()))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_and_truncated_logs_are_shown_without_panic() {
        for byte in [0, 0x80, 0xff] {
            for len in [0, 1, 2, 31, 33, 63, 64, 65, 199, 201, 511, 512, 1000] {
                let data = vec![byte; len];
                for is_readable in [false, true] {
                    smart_text(&data, "x", u32::MAX, is_readable);
                    smart_json(&data, is_readable).document();
                }
                errors_text(&data, "x");
                errors_json(&data).document();
            }
        }
    }

    #[test]
    fn a_smart_log_shows_existing_sensors() {
        let mut data = vec![0; 512];
        (data[0], data[1], data[2], data[3]) = (0b10, 0x43, 1, 100);
        (data[202], data[203]) = (0x2c, 1);
        let text = smart_text(&data, "nvme0", u32::MAX, true);
        let expected = "Smart Log for NVME device:nvme0 namespace-id:ffffffff\n\
            critical_warning\t\t\t: 0x2\n      Available Spare[0]             : 0\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("temperature\t\t\t\t: 50 °C (323 K)\n"), "{text}");
        assert!(text.contains("Temperature Sensor 2\t\t\t: 27 °C (300 K)\n"), "{text}");
        assert_eq!(text.matches("Sensor").count(), 1);
        let json: serde_json::Value = serde_json::from_str(&smart_json(&data, true).document()).unwrap();
        assert_eq!(json["critical_warning"]["temp_threshold"], 1);
        assert_eq!((&json["temperature"], &json["temperature_sensor_2"]), (&323.into(), &300.into()));
        assert!(json.get("temperature_sensor_1").is_none());
    }

    #[test]
    fn an_error_is_shown_with_the_name_of_its_status() {
        let mut data = vec![0; 128];
        (data[0], data[8], data[12], data[13]) = (7, 1, 4, 0x80);
        let text = errors_text(&data, "nvme0");
        assert!(
            text.starts_with("Error Log Entries for device:nvme0 entries:2\n.................\n Entry[ 0]\n"),
            "{text}"
        );
        assert!(text.contains("status_field\t: 0x4002 (invalid field)\n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&errors_json(&data).document()).unwrap();
        assert_eq!(
            (&json["errors"][0]["error_count"], &json["errors"][0]["status_field"]),
            (&7.into(), &0x4002.into())
        );
    }
}
