//! `id-ctrl` and `id-ns`: identify data as text and JSON, field by field.

use std::fmt::Write as _;

use blkyard::nvme::{CONTROLLER_FIELDS, NAMESPACE_FIELDS, NvmeField, PowerState};

use super::bits::{CONTROLLER_BITS, NAMESPACE_BITS, bits_text};
use super::json::JsonNode;
use super::text::{dump, dump_characters, hex, json_value, string, text_value};

/// Offset of the power state descriptors, their size and maximum number.
const POWER_STATES_AT: usize = 2048;
const POWER_STATE_BYTES: usize = 32;
const POWER_STATES_MAX: usize = 32;
/// Offset of the LBA formats, and their maximum number.
const LBA_FORMATS_AT: usize = 128;
const LBA_FORMATS_MAX: usize = 64;
/// Offset of the vendor's part of controller and namespace data.
const CONTROLLER_VENDOR_AT: usize = 3072;
const NAMESPACE_VENDOR_AT: usize = 384;
/// Names of the relative performance of LBA formats.
const RELATIVE_PERFORMANCE: [&str; 4] = ["Best", "Better", "Good", "Degraded"];

/// What the text has besides the fields' values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdentifyDetails {
    /// The meaning of bits.
    pub has_bits: bool,
    /// A dump of the vendor's part.
    pub has_vendor: bool,
}

/// Controller data as text.
pub fn controller_text(data: &[u8], details: IdentifyDetails) -> String {
    let mut text = String::from("NVME Identify Controller:\n");
    for field in CONTROLLER_FIELDS {
        let _ = writeln!(text, "{:<10}: {}", field.label, text_value(field, data));
        if details.has_bits {
            text.push_str(&bits_text(CONTROLLER_BITS, field, data));
        }
    }
    for (number, state) in power_states(data).enumerate() {
        power_state_text(&mut text, number, &state);
    }
    if details.has_vendor {
        let _ = write!(text, "vs[]:\n{}", dump(data.get(CONTROLLER_VENDOR_AT..).unwrap_or_default()));
    }
    text
}

/// Controller data as JSON.
pub fn controller_json(data: &[u8]) -> JsonNode {
    let fields = CONTROLLER_FIELDS.iter();
    // An unset name of the subsystem is left out.
    let fields = fields.filter(|field| field.name != "subnqn" || !string(field.bytes(data)).is_empty());
    let mut members: Vec<_> = fields.map(|field| (field.name.to_owned(), json_value(field, data))).collect();
    let states = power_states(data).map(|state| power_state_json(&state)).collect();
    members.push(("psds".to_owned(), JsonNode::List(states)));
    JsonNode::Object(members)
}

/// Namespace data as text.
pub fn namespace_text(data: &[u8], nsid: u32, details: IdentifyDetails) -> String {
    let mut text = format!("NVME Identify Namespace {nsid}:\n");
    for field in namespace_fields(data) {
        // nvme-cli has a tab in one label.
        let label = if field.name == "nsattr" { "nsattr\t".to_owned() } else { format!("{:<8}", field.label) };
        let _ = write!(text, "{label}: {}", text_value(field, data));
        if details.has_bits {
            text.push_str(match field.name {
                "nsze" => "\tTotal size in logical blocks",
                "ncap" => "\tMaximum size in logical blocks",
                "nuse" => "\tCurrent size in logical blocks",
                _ => "",
            });
        }
        text.push('\n');
        if details.has_bits {
            text.push_str(&bits_text(NAMESPACE_BITS, field, data));
        }
    }
    let in_use = lba_format_in_use(data);
    for (number, [metadata, shift, performance]) in lba_formats(data, true).enumerate() {
        let mark = if number == in_use { "(in use)" } else { "" };
        let digits = hex(performance.into());
        let _ = if details.has_bits {
            let name = RELATIVE_PERFORMANCE[usize::from(performance & 3)];
            let bytes = 1_u64.checked_shl(shift.into()).unwrap_or(0);
            writeln!(
                text,
                "LBA Format {number:2} : Metadata Size: {metadata:<3} bytes - Data Size: {bytes:<2} bytes - Relative \
                 Performance: {digits} {name} {mark}"
            )
        } else {
            writeln!(text, "lbaf {number:2} : ms:{metadata:<3} lbads:{shift:<2} rp:{digits} {mark}")
        };
    }
    if details.has_vendor {
        let _ = write!(text, "vs[]:\n{}", dump(data.get(NAMESPACE_VENDOR_AT..).unwrap_or_default()));
    }
    text
}

/// Namespace data as JSON.
pub fn namespace_json(data: &[u8]) -> JsonNode {
    let fields = namespace_fields(data);
    let mut members: Vec<_> = fields.map(|field| (field.name.to_owned(), json_value(field, data))).collect();
    let formats = lba_formats(data, false).map(|[metadata, shift, performance]| {
        JsonNode::object([("ms", metadata.into()), ("ds", shift.into()), ("rp", performance.into())])
    });
    members.push(("lbafs".to_owned(), JsonNode::List(formats.collect())));
    let vendor = data.get(NAMESPACE_VENDOR_AT..).unwrap_or_default();
    let end = vendor.iter().position(|byte| *byte == 0).unwrap_or(vendor.len());
    members.push(("vs".to_owned(), dump_characters(&vendor[..end])));
    JsonNode::Object(members)
}

/// The fields that are valid, as NSFEAT tells.
fn namespace_fields(data: &[u8]) -> impl Iterator<Item = &'static NvmeField> {
    let features = number(NAMESPACE_FIELDS, "nsfeat", data);
    NAMESPACE_FIELDS.iter().filter(move |field| match field.name {
        "npwg" | "npwa" | "npda" | "nows" => features & 0x30 != 0,
        "npdg" => features & 0x10 != 0,
        _ => true,
    })
}

/// Metadata bytes, block size as a power of two, and relative performance of each format. A controller may report more
/// formats than the data has room for.
fn lba_formats(data: &[u8], has_unique: bool) -> impl Iterator<Item = [u16; 3]> {
    let unique = if has_unique { number(NAMESPACE_FIELDS, "nulbaf", data) } else { 0 };
    let count = number(NAMESPACE_FIELDS, "nlbaf", data) + unique + 1;
    let formats = data.get(LBA_FORMATS_AT..).unwrap_or_default().chunks_exact(4);
    let formats = formats.take(count.min(LBA_FORMATS_MAX));
    formats.map(|bytes| [u16::from_le_bytes([bytes[0], bytes[1]]), bytes[2].into(), (bytes[3] & 3).into()])
}

/// Bits 0 to 3 and 5 to 6 of FLBAS.
fn lba_format_in_use(data: &[u8]) -> usize {
    let format = number(NAMESPACE_FIELDS, "flbas", data);
    format & 0xf | format >> 1 & 0x30
}

fn number(fields: &[NvmeField], name: &str, data: &[u8]) -> usize {
    NvmeField::find(fields, name).map_or(0, |field| field.number(data) as usize)
}

/// The power states that the controller has, at most those that the data has room for.
fn power_states(data: &[u8]) -> impl Iterator<Item = PowerState> {
    let count = number(CONTROLLER_FIELDS, "npss", data) + 1;
    let descriptors = data.get(POWER_STATES_AT..).unwrap_or_default().chunks_exact(POWER_STATE_BYTES);
    descriptors.take(count.min(POWER_STATES_MAX)).map(PowerState::parse)
}

fn power_state_text(text: &mut String, number: usize, state: &PowerState) {
    let PowerState { max_power, entry_us, exit_us, relative: [rrt, rrl, rwt, rwl], .. } = *state;
    let power = watts(max_power, if state.is_fine_scale { 1 } else { 2 });
    let operational = if state.is_non_operational { "non-operational" } else { "operational" };
    let (idle, active) =
        (watts(state.idle_power.0, state.idle_power.1), watts(state.active_power.0, state.active_power.1));
    let workload = match state.workload {
        0 => "-",
        1 => "1MiB 32 RW, 30s idle",
        2 => "80K 128KiB SW",
        _ => "reserved",
    };
    let _ = writeln!(
        text,
        "ps   {number:4} : mp:{power} {operational} enlat:{entry_us} exlat:{exit_us} rrt:{rrt} rrl:{rrl}\n\
         {:12}rwt:{rwt} rwl:{rwl} idle_power:{idle} active_power:{active}\n\
         {:12}active_power_workload:{workload}",
        "", ""
    );
    for (name, (time, scale)) in [
        ("emergency power fail recovery time", state.recovery),
        ("forced quiescence vault time", state.quiescence),
        ("emergency power fail vault time", state.vault),
    ] {
        let _ = writeln!(text, "{:12}{name}: {}", "", scaled_time(time, scale));
    }
}

/// Power with its scale: 1 for units of 100 uW, 2 of 10 mW.
fn watts(power: u16, scale: u8) -> String {
    match scale {
        0 => "-".to_owned(),
        1 => format!("{}.{:04}W", power / 10000, power % 10000),
        2 => format!("{}.{:02}W", power / 100, power % 100),
        _ => "reserved".to_owned(),
    }
}

fn scaled_time(time: u8, scale: u8) -> String {
    const UNITS: [&str; 13] = [
        "1 microsecond",
        "10 microseconds",
        "100 microseconds",
        "1 millisecond",
        "10 milliseconds",
        "100 milliseconds",
        "1 second",
        "10 seconds",
        "100 seconds",
        "1,000 seconds",
        "10,000 seconds",
        "100,000 seconds",
        "1,000,000 seconds",
    ];
    match time {
        0 => "-".to_owned(),
        1..=99 => format!("{time} (unit: {})", UNITS.get(usize::from(scale)).unwrap_or(&"Reserved")),
        _ => "reserved".to_owned(),
    }
}

fn power_state_json(state: &PowerState) -> JsonNode {
    let PowerState { relative: [read_throughput, read_latency, write_throughput, write_latency], .. } = *state;
    JsonNode::object([
        ("max_power", state.max_power.into()),
        ("max_power_scale", state.is_fine_scale.into()),
        ("non-operational_state", state.is_non_operational.into()),
        ("entry_lat", state.entry_us.into()),
        ("exit_lat", state.exit_us.into()),
        ("read_tput", read_throughput.into()),
        ("read_lat", read_latency.into()),
        ("write_tput", write_throughput.into()),
        ("write_lat", write_latency.into()),
        ("idle_power", state.idle_power.0.into()),
        ("idle_scale", state.idle_power.1.into()),
        ("active_power", state.active_power.0.into()),
        ("active_power_work", state.workload.into()),
        ("active_scale", state.active_power.1.into()),
        ("emerg_power_fail_recover_time", state.recovery.0.into()),
        ("emerg_power_fail_recover_scale", state.recovery.1.into()),
        ("force_quiesce_vault_time", state.quiescence.0.into()),
        ("force_quiesce_vault_scale", state.quiescence.1.into()),
        ("emerg_power_fail_vault_time", state.vault.0.into()),
        ("emerg_power_fail_vault_scale", state.vault.1.into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: IdentifyDetails = IdentifyDetails { has_bits: false, has_vendor: false };
    const ALL: IdentifyDetails = IdentifyDetails { has_bits: true, has_vendor: true };

    #[test]
    fn absurd_and_truncated_data_is_shown_without_panic() {
        for byte in [0, 0x7f, 0xff] {
            for len in [0, 1, 25, 82, 127, 130, 263, 384, 2048, 2100, 4095, 4096] {
                let data = vec![byte; len];
                controller_text(&data, ALL);
                controller_json(&data).document();
                namespace_text(&data, u32::MAX, ALL);
                namespace_json(&data).document();
            }
        }
        let data = [0xff; 4096];
        assert_eq!(controller_text(&data, PLAIN).matches("ps  ").count(), POWER_STATES_MAX);
        assert_eq!(namespace_text(&data, 1, PLAIN).matches("\nlbaf ").count(), LBA_FORMATS_MAX);
    }

    #[test]
    fn a_namespace_shows_the_format_in_use() {
        let mut data = vec![0; 4096];
        (data[0], data[25], data[26]) = (16, 1, 1);
        data[LBA_FORMATS_AT..LBA_FORMATS_AT + 8].copy_from_slice(&[0, 0, 9, 0, 8, 0, 12, 2]);
        let text = namespace_text(&data, 3, PLAIN);
        assert!(text.starts_with("NVME Identify Namespace 3:\nnsze    : 0x10\nncap    : 0\n"), "{text}");
        assert!(
            text.ends_with("lbaf  0 : ms:0   lbads:9  rp:0 \nlbaf  1 : ms:8   lbads:12 rp:0x2 (in use)\n"),
            "{text}"
        );
        let text = namespace_text(&data, 3, IdentifyDetails { has_bits: true, ..PLAIN });
        assert!(
            text.contains("\nnuse    : 0\tCurrent size in logical blocks\nnsfeat  : 0\n  [7:7] : 0\tNPRG"),
            "{text}"
        );
        let format =
            "LBA Format  1 : Metadata Size: 8   bytes - Data Size: 4096 bytes - Relative Performance: 0x2 Good";
        assert!(text.ends_with(&format!("{format} (in use)\n")), "{text}");
        assert!(!text.contains("npwg") && !namespace_json(&data).document().contains("npwg"));
        data[24] = 0x10;
        assert!(namespace_text(&data, 3, PLAIN).contains("npwg    : 0\n"));
    }

    #[test]
    fn a_power_state_is_shown_with_its_units() {
        let mut data = vec![0; 4096];
        data[POWER_STATES_AT..POWER_STATES_AT + 12].copy_from_slice(&[0xc4, 9, 0, 0, 16, 0, 0, 0, 4, 0, 0, 0]);
        let text = controller_text(&data, PLAIN);
        let lines: Vec<_> = text.lines().rev().take(6).collect();
        assert_eq!(lines[5], "ps      0 : mp:25.00W operational enlat:16 exlat:4 rrt:0 rrl:0");
        assert_eq!(lines[4], "            rwt:0 rwl:0 idle_power:- active_power:-");
        assert_eq!(lines[0], "            emergency power fail vault time: -");
    }
}
