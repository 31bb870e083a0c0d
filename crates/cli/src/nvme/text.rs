//! Values of fields for people and as JSON, and dumps of bytes.
//!
//! A controller is not trusted: its strings are printed without control characters.

use std::fmt::Write as _;

use blkyard::nvme::{FieldKind, NvmeField};

use super::json::JsonNode;

/// Zero of the Celsius scale, K.
const ZERO_CELSIUS: i64 = 273;
/// Bytes of a line of a dump.
const DUMP_WIDTH: usize = 16;
/// Decimal prefixes, from the third power of ten on.
const PREFIXES: [&str; 10] = ["k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q"];

/// Hexadecimal as C's `%#x`: zero has no prefix.
pub fn hex(number: u128) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}

/// The characters up to the first zero byte.
pub fn string(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Text without control characters, for a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '.' } else { char }).collect()
}

/// A temperature in Celsius and Kelvin.
pub fn kelvin(kelvin: u64) -> String {
    format!("{} °C ({kelvin} K)", celsius(kelvin))
}

/// A temperature in Celsius.
pub fn celsius(kelvin: u64) -> i64 {
    kelvin.cast_signed() - ZERO_CELSIUS
}

/// A number with a decimal prefix.
pub fn scaled(number: f64) -> (f64, &'static str) {
    let mut best = (number, "");
    let mut unit = 1e3;
    for prefix in PREFIXES {
        if number >= unit {
            best = (number / unit, prefix);
        }
        unit *= 1e3;
    }
    best
}

/// A field's value, for people.
pub fn text_value(field: &NvmeField, data: &[u8]) -> String {
    let number = field.number(data);
    match field.kind {
        FieldKind::Decimal => number.to_string(),
        FieldKind::Hex => hex(number),
        FieldKind::Text => printable(&string(field.bytes(data))),
        FieldKind::Uuid => uuid(field.bytes(data)),
        FieldKind::Oui => format!("{number:06x}"),
        FieldKind::Bytes => hex_bytes(field.bytes(data)),
        FieldKind::Percent => format!("{number}%"),
        FieldKind::Kelvin => kelvin(number as u64),
        FieldKind::DataUnits => {
            let (value, prefix) = scaled(number as f64 * 512_000.0);
            format!("{number} ({value:.2} {prefix}B)")
        }
    }
}

/// A field's value as JSON.
pub fn json_value(field: &NvmeField, data: &[u8]) -> JsonNode {
    match field.kind {
        FieldKind::Text => string(field.bytes(data)).into(),
        FieldKind::Uuid => uuid(field.bytes(data)).into(),
        FieldKind::Bytes => hex_bytes(field.bytes(data)).into(),
        _ => field.number(data).into(),
    }
}

fn hex_bytes(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn uuid(bytes: &[u8]) -> String {
    let digits = hex_bytes(bytes);
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    parts.map(|part| digits.get(part).unwrap_or_default()).join("-")
}

/// A dump with offsets and characters.
pub fn dump(bytes: &[u8]) -> String {
    let mut text = String::from("     ");
    for column in 0..DUMP_WIDTH {
        let _ = write!(text, "{column:3x}");
    }
    for (number, line) in bytes.chunks(DUMP_WIDTH).enumerate() {
        let _ = write!(text, "\n{:04x}:", number * DUMP_WIDTH);
        for byte in line {
            let _ = write!(text, " {byte:02x}");
        }
        let characters: String = line.iter().map(|byte| visible(*byte)).collect();
        let missing = DUMP_WIDTH - line.len();
        let _ = match missing {
            0 => write!(text, " \"{characters}\""),
            _ => write!(text, " {:width$} \"{characters}\"", "", width = 3 * missing),
        };
    }
    text.push('\n');
    text
}

/// The characters of a dump as JSON, a string for each line.
pub fn dump_characters(bytes: &[u8]) -> JsonNode {
    let lines = bytes.chunks(DUMP_WIDTH);
    JsonNode::List(lines.map(|line| line.iter().map(|byte| visible(*byte)).collect::<String>().into()).collect())
}

fn visible(byte: u8) -> char {
    if byte.is_ascii_graphic() { char::from(byte) } else { '.' }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(kind: FieldKind, len: usize) -> NvmeField {
        NvmeField { name: "x", label: "x", kind, offset: 0, len }
    }

    #[test]
    fn each_kind_is_shown_as_nvme_cli_shows_it() {
        let shown = |kind, bytes: &[u8]| text_value(&field(kind, bytes.len()), bytes);
        assert_eq!(shown(FieldKind::Decimal, &[1, 2]), "513");
        assert_eq!((shown(FieldKind::Hex, &[0, 0]), shown(FieldKind::Hex, &[1, 2])), ("0".into(), "0x201".into()));
        assert_eq!(shown(FieldKind::Text, b"ab  \0cd"), "ab  ");
        assert_eq!(shown(FieldKind::Oui, &[0x02, 0x54, 0x00]), "005402");
        assert_eq!(shown(FieldKind::Bytes, &[0, 0xff]), "00ff");
        assert_eq!(shown(FieldKind::Percent, &[100]), "100%");
        assert_eq!(shown(FieldKind::Kelvin, &[0x43, 1]), "50 °C (323 K)");
        assert_eq!(shown(FieldKind::Kelvin, &[0, 0]), "-273 °C (0 K)");
        assert_eq!(shown(FieldKind::DataUnits, &[0]), "0 (0.00 B)");
        assert_eq!(shown(FieldKind::DataUnits, &[4]), "4 (2.05 MB)");
        assert_eq!(shown(FieldKind::DataUnits, &[0xff; 16]).split_once(' ').unwrap().0, u128::MAX.to_string());
        let uuid: Vec<u8> = (0..16).collect();
        assert_eq!(shown(FieldKind::Uuid, &uuid), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn hostile_text_does_not_reach_the_terminal() {
        let bytes = b"\x1b[2Jx\x07\xff\n";
        assert_eq!(text_value(&field(FieldKind::Text, bytes.len()), bytes), ".[2Jx.\u{fffd}.");
    }

    #[test]
    fn missing_bytes_are_shown_without_panic() {
        for kind in [FieldKind::Text, FieldKind::Uuid, FieldKind::Bytes, FieldKind::Kelvin, FieldKind::DataUnits] {
            for len in 0..20 {
                text_value(&field(kind, 16), &vec![0xff; len]);
                json_value(&field(kind, 16), &vec![0xff; len]);
            }
        }
    }

    #[test]
    fn a_dump_has_offsets_bytes_and_characters() {
        let text = dump(b"0123456789abcdef\x00!");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "       0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f");
        assert_eq!(lines[1], "0000: 30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66 \"0123456789abcdef\"");
        assert_eq!(lines[2], format!("0010: 00 21 {:42} \".!\"", ""));
    }
}
