//! The bits of identify data with their meaning, as `-H` shows them.
//!
//! Lines are nvme-cli's, with its alignment. Its slips are not repeated: values of `nvmsr`, `vwci`, `mec` and `fuses`
//! that are masked or shifted wrongly, and reserved values of `cntrltype` and `bpcap`.

mod controller;
mod namespace;

use std::fmt::Write as _;

use blkyard::nvme::NvmeField;

use super::text::{hex, kelvin};
pub use controller::CONTROLLER_BITS;
pub use namespace::NAMESPACE_BITS;

/// A part of a field, on a line of its own.
pub struct BitField {
    /// Start of its line, with the highest and lowest bit: `  [3:1] : `.
    head: &'static str,
    meaning: BitMeaning,
    shown: BitsShown,
}

/// When a line is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BitsShown {
    Always,
    /// If the value is not zero, or one of these bits of the field is set.
    NotZeroOr(u32),
    /// If the value is zero.
    Zero,
}

enum BitMeaning {
    /// The value says what the text names.
    Value(&'static str),
    /// A text for each value; the last one for all further values.
    Choice(&'static [&'static str]),
    /// Something that is supported or not.
    Support(&'static str),
    /// Percent, before the end of a bracket.
    Percent(&'static str),
    /// Temperature, K.
    Temperature(&'static str),
    /// Number of entries, less one.
    ZeroBased(&'static str),
    /// Bytes, as a power of two.
    Power(&'static str),
    /// Bytes, with the text on the next line.
    Capacity(&'static str),
}

const fn field(head: &'static str, meaning: BitMeaning) -> BitField {
    BitField { head, meaning, shown: BitsShown::Always }
}

/// Shown if it is not zero.
const fn reserved(head: &'static str) -> BitField {
    BitField { shown: BitsShown::NotZeroOr(0), ..value(head, "Reserved") }
}

const fn value(head: &'static str, text: &'static str) -> BitField {
    field(head, BitMeaning::Value(text))
}

const fn choice(head: &'static str, texts: &'static [&'static str]) -> BitField {
    field(head, BitMeaning::Choice(texts))
}

const fn support(head: &'static str, what: &'static str) -> BitField {
    field(head, BitMeaning::Support(what))
}

/// As [`support`], shown if it is not zero or one of the bits is set.
const fn support_by(bits: u32, head: &'static str, what: &'static str) -> BitField {
    BitField { shown: BitsShown::NotZeroOr(bits), ..support(head, what) }
}

/// Fields and their parts.
pub type BitTable = [(&'static str, &'static [BitField])];

/// The lines of a field's bits, with an empty line at the end; nothing if the table does not have the field.
pub fn bits_text(table: &BitTable, field: &NvmeField, data: &[u8]) -> String {
    let Some((_, parts)) = table.iter().find(|(name, _)| *name == field.name) else { return String::new() };
    let number = field.number(data);
    let mut text = String::new();
    for part in *parts {
        part.write(number, &mut text);
    }
    // nvme-cli has no empty line here.
    if field.name != "cntrltype" {
        text.push('\n');
    }
    text
}

impl BitField {
    fn write(&self, number: u128, text: &mut String) {
        let (high, low) = self.range();
        let value = number >> low & (u128::MAX >> (127 - (high - low)));
        let is_shown = match self.shown {
            BitsShown::Always => true,
            BitsShown::NotZeroOr(bits) => value != 0 || number & u128::from(bits) != 0,
            BitsShown::Zero => value == 0,
        };
        if !is_shown {
            return;
        }
        let (head, digits) = (self.head, hex(value));
        let _ = match self.meaning {
            BitMeaning::Value(what) => writeln!(text, "{head}{digits}\t{what}"),
            BitMeaning::Choice(texts) => {
                let last = texts.len().saturating_sub(1);
                let chosen = usize::try_from(value).map_or(last, |value| value.min(last));
                writeln!(text, "{head}{digits}\t{}", texts.get(chosen).unwrap_or(&""))
            }
            BitMeaning::Support(what) => {
                let not = if value == 0 { "Not " } else { "" };
                writeln!(text, "{head}{digits}\t{what} {not}Supported")
            }
            BitMeaning::Percent(what) => writeln!(text, "{head}{digits}\t{what}{value}%)"),
            BitMeaning::Temperature(what) => writeln!(text, "{head}{}\t{what}", kelvin(value as u64)),
            BitMeaning::ZeroBased(what) => writeln!(text, "{head}{value} (0's based)\t{what}"),
            BitMeaning::Power(what) => writeln!(text, "{head}{digits}\t{what} ({})", 1_u64 << (value & 0x3f)),
            BitMeaning::Capacity(what) => writeln!(text, "{head}{value}\n\t{what}"),
        };
    }

    /// Its highest and lowest bit.
    fn range(&self) -> (u32, u32) {
        let bits = self.head.split(['[', ']']).nth(1).and_then(|bits| bits.split_once(':'));
        let number = |digits: &str| digits.parse().unwrap_or(0);
        bits.map_or((0, 0), |(high, low)| (number(high), number(low)))
    }
}

#[cfg(test)]
mod tests {
    use blkyard::nvme::{CONTROLLER_FIELDS, FieldKind, NAMESPACE_FIELDS};

    use super::*;

    fn shown(table: &BitTable, fields: &[NvmeField], name: &str, bytes: &[u8]) -> String {
        let field = NvmeField { offset: 0, ..NvmeField::find(fields, name).unwrap() };
        bits_text(table, &field, bytes)
    }

    #[test]
    fn parts_cover_all_bits_of_their_field_once() {
        let tables = [(CONTROLLER_BITS, CONTROLLER_FIELDS), (NAMESPACE_BITS, NAMESPACE_FIELDS)];
        for (name, parts, fields) in
            tables.iter().flat_map(|(table, fields)| table.iter().map(move |(n, p)| (n, p, fields)))
        {
            let field = NvmeField::find(fields, name).unwrap_or_else(|| panic!("no field {name}"));
            let mut next = field.len as u32 * 8;
            for part in parts.iter().filter(|part| part.shown != BitsShown::Zero) {
                let (high, low) = part.range();
                assert_eq!(high + 1, next, "{name}: {}", part.head);
                assert!(low <= high, "{name}: {}", part.head);
                if let BitMeaning::Choice(texts) = part.meaning {
                    assert!(texts.len() >= 2 && texts.len() <= 1 << (high - low + 1), "{name}: {}", part.head);
                }
                next = low;
            }
            assert_eq!(next, 0, "{name}");
        }
    }

    #[test]
    fn lines_are_those_of_nvme_cli() {
        let controller = |name, bytes: &[u8]| shown(CONTROLLER_BITS, CONTROLLER_FIELDS, name, bytes);
        let namespace = |name, bytes: &[u8]| shown(NAMESPACE_BITS, NAMESPACE_FIELDS, name, bytes);
        assert_eq!(
            controller("cmic", &[0x12]),
            "  [7:4] : 0x1\tReserved\n  [3:3] : 0\tANA not supported\n  [2:2] : 0\tPCI\n  [1:1] : 0x1\tMulti Controller\n  \
             [0:0] : 0\tSingle Port\n\n"
        );
        assert_eq!(
            controller("wctemp", &[0x57, 1]),
            " [15:0] : 70 °C (343 K)\tWarning Composite Temperature Threshold (WCTEMP)\n\n"
        );
        assert_eq!(controller("tnvmcap", &[0, 1]), "[127:0] : 256\n\tTotal NVM Capacity (TNVMCAP)\n\n");
        assert_eq!(controller("elpe", &[3]), "  [7:0] : 3 (0's based)\tError Log Page Entries (ELPE)\n\n");
        assert_eq!(
            controller("sqes", &[0x66]),
            "  [7:4] : 0x6\tMax SQ Entry Size (64)\n  [3:0] : 0x6\tMin SQ Entry Size (64)\n\n"
        );
        assert_eq!(controller("cntrltype", &[1]), "  [7:2] : 0\tReserved\n  [1:0] : 0x1\tI/O Controller\n");
        assert_eq!(namespace("fpi", &[0]), "  [7:7] : 0\tFormat Progress Indicator Not Supported\n\n");
        assert!(namespace("fpi", &[0x85]).ends_with("  [6:0] : 0x5\tFormat Progress Indicator (Remaining 5%)\n\n"));
        assert!(namespace("dps", &[7]).ends_with("  [2:0] : 0x7\tProtection Information Reserved Enabled\n\n"));
        assert_eq!(namespace("nlbaf", &[7]), "");
    }

    #[test]
    fn parts_of_sgls_are_shown_if_there_are_sgls() {
        let sgls = |number: u32| shown(CONTROLLER_BITS, CONTROLLER_FIELDS, "sgls", &number.to_le_bytes());
        assert_eq!(
            sgls(0),
            " [15:8] : 0\tSGL Descriptor Threshold\n [1:0]  : 0\tScatter-Gather Lists Not Supported\n\n"
        );
        assert!(sgls(1).contains(" [16:16]: 0\tSGL Bit-Bucket Not Supported\n"), "{}", sgls(1));
        assert!(sgls(1 << 16).starts_with(" [16:16]: 0x1\tSGL Bit-Bucket Supported\n"), "{}", sgls(1 << 16));
    }

    #[test]
    fn any_value_is_shown_without_panic() {
        for (table, fields) in [(CONTROLLER_BITS, CONTROLLER_FIELDS), (NAMESPACE_BITS, NAMESPACE_FIELDS)] {
            for field in fields {
                assert!(!matches!(field.kind, FieldKind::Text) || bits_text(table, field, &[]).is_empty());
                for byte in [0, 1, 0x7f, 0x80, 0xff] {
                    bits_text(table, field, &[byte; 4096]);
                }
            }
        }
    }
}
