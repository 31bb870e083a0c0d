//! The full field lists of identify data and log pages: name, format, byte offset and length of each field.
//!
//! For programs that show everything a controller reports. Names are those of the NVM Express specifications (Base 2.1,
//! NVM Command Set 1.1), in the spelling of nvme-cli 2.13, so that its users find them. A driver uses the few fields in
//! `identify.rs` instead. All bytes come from a controller and are not trusted: no value of a field is invalid here.

/// Format of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// Unsigned integer, shown in decimal.
    Decimal,
    /// Unsigned integer, shown in hexadecimal.
    Hex,
    /// ASCII, up to the first zero byte.
    Text,
    /// UUID.
    Uuid,
    /// IEEE OUI, an integer shown as six hexadecimal digits.
    Oui,
    /// Bytes, shown in hexadecimal in their order.
    Bytes,
    /// Integer number of percent.
    Percent,
    /// Temperature, K.
    Kelvin,
    /// Thousands of units of 512 bytes.
    DataUnits,
}

/// A field of a data structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeField {
    /// Its name.
    pub name: &'static str,
    /// Its name in text for people, if different.
    pub label: &'static str,
    /// Its format.
    pub kind: FieldKind,
    /// Offset of its first byte.
    pub offset: usize,
    /// Its bytes, at most 16 for an integer.
    pub len: usize,
}

impl NvmeField {
    /// Its bytes; missing ones are zero, and cut off at the end.
    pub fn bytes<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        let end = data.len().min(self.offset + self.len);
        data.get(self.offset..end).unwrap_or_default()
    }

    /// The little-endian integer in its bytes.
    pub fn number(&self, data: &[u8]) -> u128 {
        self.bytes(data).iter().take(16).rev().fold(0, |number, byte| number << 8 | u128::from(*byte))
    }

    /// The field of this name.
    pub fn find(fields: &[NvmeField], name: &str) -> Option<NvmeField> {
        fields.iter().find(|field| field.name == name).copied()
    }
}

macro_rules! fields {
    ($($(#[$doc:meta])* $list:ident { $($name:literal $($label:literal)?: $kind:ident = $offset:literal, $len:literal;)+ })+) => {
        $(
            $(#[$doc])*
            pub const $list: &[NvmeField] = &[
                $(NvmeField {
                    name: $name,
                    label: label($name, &[$($label)?]),
                    kind: FieldKind::$kind,
                    offset: $offset,
                    len: $len,
                },)+
            ];
        )+
    };
}

const fn label(name: &'static str, label: &[&'static str]) -> &'static str {
    match label {
        [label] => label,
        _ => name,
    }
}

/// Bytes of the SMART / health log page.
pub const SMART_LOG_BYTES: usize = 512;
/// Bytes of an entry of the error log page.
pub const ERROR_ENTRY_BYTES: usize = 64;

fields! {
    /// A controller (CNS 01h), without the power states.
    CONTROLLER_FIELDS {
        "vid": Hex = 0, 2;
        "ssvid": Hex = 2, 2;
        "sn": Text = 4, 20;
        "mn": Text = 24, 40;
        "fr": Text = 64, 8;
        "rab": Decimal = 72, 1;
        "ieee": Oui = 73, 3;
        "cmic": Hex = 76, 1;
        "mdts": Decimal = 77, 1;
        "cntlid": Hex = 78, 2;
        "ver": Hex = 80, 4;
        "rtd3r": Hex = 84, 4;
        "rtd3e": Hex = 88, 4;
        "oaes": Hex = 92, 4;
        "ctratt": Hex = 96, 4;
        "rrls": Hex = 100, 2;
        "bpcap": Hex = 102, 1;
        "nssl": Hex = 104, 4;
        "plsi": Decimal = 110, 1;
        "cntrltype": Decimal = 111, 1;
        "fguid": Uuid = 112, 16;
        "crdt1": Decimal = 128, 2;
        "crdt2": Decimal = 130, 2;
        "crdt3": Decimal = 132, 2;
        "crcap": Decimal = 134, 1;
        "nvmsr": Decimal = 253, 1;
        "vwci": Decimal = 254, 1;
        "mec": Decimal = 255, 1;
        "oacs": Hex = 256, 2;
        "acl": Decimal = 258, 1;
        "aerl": Decimal = 259, 1;
        "frmw": Hex = 260, 1;
        "lpa": Hex = 261, 1;
        "elpe": Decimal = 262, 1;
        "npss": Decimal = 263, 1;
        "avscc": Hex = 264, 1;
        "apsta": Hex = 265, 1;
        "wctemp": Decimal = 266, 2;
        "cctemp": Decimal = 268, 2;
        "mtfa": Decimal = 270, 2;
        "hmpre": Decimal = 272, 4;
        "hmmin": Decimal = 276, 4;
        "tnvmcap": Decimal = 280, 16;
        "unvmcap": Decimal = 296, 16;
        "rpmbs": Hex = 312, 4;
        "edstt": Decimal = 316, 2;
        "dsto": Decimal = 318, 1;
        "fwug": Decimal = 319, 1;
        "kas": Decimal = 320, 2;
        "hctma": Hex = 322, 2;
        "mntmt": Decimal = 324, 2;
        "mxtmt": Decimal = 326, 2;
        "sanicap": Hex = 328, 4;
        "hmminds": Decimal = 332, 4;
        "hmmaxd": Decimal = 336, 2;
        "nsetidmax": Decimal = 338, 2;
        "endgidmax": Decimal = 340, 2;
        "anatt": Decimal = 342, 1;
        "anacap": Decimal = 343, 1;
        "anagrpmax": Decimal = 344, 4;
        "nanagrpid": Decimal = 348, 4;
        "pels": Decimal = 352, 4;
        "domainid": Decimal = 356, 2;
        "kpioc": Decimal = 358, 1;
        "mptfawr": Decimal = 360, 2;
        "megcap": Decimal = 368, 16;
        "tmpthha": Hex = 384, 1;
        "cqt": Decimal = 386, 2;
        "sqes": Hex = 512, 1;
        "cqes": Hex = 513, 1;
        "maxcmd": Decimal = 514, 2;
        "nn": Decimal = 516, 4;
        "oncs": Hex = 520, 2;
        "fuses": Hex = 522, 2;
        "fna": Hex = 524, 1;
        "vwc": Hex = 525, 1;
        "awun": Decimal = 526, 2;
        "awupf": Decimal = 528, 2;
        "icsvscc": Decimal = 530, 1;
        "nwpc": Decimal = 531, 1;
        "acwu": Decimal = 532, 2;
        "ocfs": Hex = 534, 2;
        "sgls": Hex = 536, 4;
        "mnan": Decimal = 540, 4;
        "maxdna": Decimal = 544, 16;
        "maxcna": Decimal = 560, 4;
        "oaqd": Decimal = 564, 4;
        "rhiri": Decimal = 568, 1;
        "hirt": Decimal = 569, 1;
        "cmmrtd": Decimal = 570, 2;
        "nmmrtd": Decimal = 572, 2;
        "minmrtg": Decimal = 574, 1;
        "maxmrtg": Decimal = 575, 1;
        "trattr": Decimal = 576, 1;
        "mcudmq": Decimal = 578, 2;
        "mnsudmq": Decimal = 580, 2;
        "mcmr": Decimal = 582, 2;
        "nmcmr": Decimal = 584, 2;
        "mcdqpc": Decimal = 586, 2;
        "subnqn": Text = 768, 256;
        "ioccsz": Decimal = 1792, 4;
        "iorcsz": Decimal = 1796, 4;
        "icdoff": Decimal = 1800, 2;
        "fcatt": Hex = 1802, 1;
        "msdbd": Decimal = 1803, 1;
        "ofcs": Decimal = 1804, 2;
    }

    /// A namespace (CNS 00h), without the LBA formats.
    NAMESPACE_FIELDS {
        "nsze": Hex = 0, 8;
        "ncap": Hex = 8, 8;
        "nuse": Hex = 16, 8;
        "nsfeat": Hex = 24, 1;
        "nlbaf": Decimal = 25, 1;
        "flbas": Hex = 26, 1;
        "mc": Hex = 27, 1;
        "dpc": Hex = 28, 1;
        "dps": Hex = 29, 1;
        "nmic": Hex = 30, 1;
        "rescap": Hex = 31, 1;
        "fpi": Hex = 32, 1;
        "dlfeat": Decimal = 33, 1;
        "nawun": Decimal = 34, 2;
        "nawupf": Decimal = 36, 2;
        "nacwu": Decimal = 38, 2;
        "nabsn": Decimal = 40, 2;
        "nabo": Decimal = 42, 2;
        "nabspf": Decimal = 44, 2;
        "noiob": Decimal = 46, 2;
        "nvmcap": Decimal = 48, 16;
        "npwg": Decimal = 64, 2;
        "npwa": Decimal = 66, 2;
        "npdg": Decimal = 68, 2;
        "npda": Decimal = 70, 2;
        "nows": Decimal = 72, 2;
        "mssrl": Decimal = 74, 2;
        "mcl": Decimal = 76, 4;
        "msrc": Decimal = 80, 1;
        "kpios": Decimal = 81, 1;
        "nulbaf": Decimal = 82, 1;
        "kpiodaag": Decimal = 84, 4;
        "anagrpid": Decimal = 92, 4;
        "nsattr": Decimal = 99, 1;
        "nvmsetid": Decimal = 100, 2;
        "endgid": Decimal = 102, 2;
        "nguid": Bytes = 104, 16;
        "eui64": Bytes = 120, 8;
    }

    /// The SMART / health log page (02h). A sensor that reports zero does not exist.
    SMART_FIELDS {
        "critical_warning": Hex = 0, 1;
        "temperature": Kelvin = 1, 2;
        "avail_spare" "available_spare": Percent = 3, 1;
        "spare_thresh" "available_spare_threshold": Percent = 4, 1;
        "percent_used" "percentage_used": Percent = 5, 1;
        "endurance_grp_critical_warning_summary" "endurance group critical warning summary": Hex = 6, 1;
        "data_units_read" "Data Units Read": DataUnits = 32, 16;
        "data_units_written" "Data Units Written": DataUnits = 48, 16;
        "host_read_commands": Decimal = 64, 16;
        "host_write_commands": Decimal = 80, 16;
        "controller_busy_time": Decimal = 96, 16;
        "power_cycles": Decimal = 112, 16;
        "power_on_hours": Decimal = 128, 16;
        "unsafe_shutdowns": Decimal = 144, 16;
        "media_errors": Decimal = 160, 16;
        "num_err_log_entries": Decimal = 176, 16;
        "warning_temp_time" "Warning Temperature Time": Decimal = 192, 4;
        "critical_comp_time" "Critical Composite Temperature Time": Decimal = 196, 4;
        "temperature_sensor_1" "Temperature Sensor 1": Kelvin = 200, 2;
        "temperature_sensor_2" "Temperature Sensor 2": Kelvin = 202, 2;
        "temperature_sensor_3" "Temperature Sensor 3": Kelvin = 204, 2;
        "temperature_sensor_4" "Temperature Sensor 4": Kelvin = 206, 2;
        "temperature_sensor_5" "Temperature Sensor 5": Kelvin = 208, 2;
        "temperature_sensor_6" "Temperature Sensor 6": Kelvin = 210, 2;
        "temperature_sensor_7" "Temperature Sensor 7": Kelvin = 212, 2;
        "temperature_sensor_8" "Temperature Sensor 8": Kelvin = 214, 2;
        "thm_temp1_trans_count" "Thermal Management T1 Trans Count": Decimal = 216, 4;
        "thm_temp2_trans_count" "Thermal Management T2 Trans Count": Decimal = 220, 4;
        "thm_temp1_total_time" "Thermal Management T1 Total Time": Decimal = 224, 4;
        "thm_temp2_total_time" "Thermal Management T2 Total Time": Decimal = 228, 4;
    }
}

/// An entry of the error log page (01h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorLogEntry {
    /// Number of the error; zero for an unused entry.
    pub error_count: u64,
    /// Submission queue of the command.
    pub sqid: u16,
    /// Identifier of the command.
    pub command_id: u16,
    /// Status, with the phase bit in bit 0.
    pub status_field: u16,
    /// Byte and bit of the command that the error is about.
    pub parameter_location: u16,
    /// First block with the error.
    pub lba: u64,
    /// Namespace.
    pub nsid: u32,
    /// Identifier of a vendor's log page.
    pub vendor_log: u8,
    /// Transport type.
    pub transport: u8,
    /// Command set.
    pub command_set: u8,
    /// Opcode.
    pub opcode: u8,
    /// Information that depends on the command.
    pub command_specific: u64,
    /// Information that depends on the transport.
    pub transport_specific: u16,
    /// Version of the log page.
    pub version: u8,
}

impl ErrorLogEntry {
    /// Decodes an entry; missing bytes are zero.
    pub fn parse(entry: &[u8]) -> ErrorLogEntry {
        let number =
            |offset, len| NvmeField { name: "", label: "", kind: FieldKind::Decimal, offset, len }.number(entry);
        ErrorLogEntry {
            error_count: number(0, 8) as u64,
            sqid: number(8, 2) as u16,
            command_id: number(10, 2) as u16,
            status_field: number(12, 2) as u16,
            parameter_location: number(14, 2) as u16,
            lba: number(16, 8) as u64,
            nsid: number(24, 4) as u32,
            vendor_log: number(28, 1) as u8,
            transport: number(29, 1) as u8,
            command_set: number(30, 1) as u8,
            opcode: number(31, 1) as u8,
            command_specific: number(32, 8) as u64,
            transport_specific: number(40, 2) as u16,
            version: number(63, 1) as u8,
        }
    }
}

/// A power state descriptor of a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PowerState {
    /// Maximum power, 10 mW or 100 uW (MP).
    pub max_power: u16,
    /// Whether the unit is 100 uW (MXPS).
    pub is_fine_scale: bool,
    /// Whether it does no I/O (NOPS).
    pub is_non_operational: bool,
    /// Entry latency, us.
    pub entry_us: u32,
    /// Exit latency, us.
    pub exit_us: u32,
    /// Relative read throughput, read latency, write throughput and write latency.
    pub relative: [u8; 4],
    /// Idle power (IDLP) and its scale: 0 not reported, 1 for 100 uW, 2 for 10 mW.
    pub idle_power: (u16, u8),
    /// Active power (ACTP) and its scale.
    pub active_power: (u16, u8),
    /// Workload of the active power.
    pub workload: u8,
    /// Emergency power fail recovery time and its scale.
    pub recovery: (u8, u8),
    /// Forced quiescence vault time and its scale.
    pub quiescence: (u8, u8),
    /// Emergency power fail vault time and its scale.
    pub vault: (u8, u8),
}

impl PowerState {
    /// Decodes a descriptor; missing bytes are zero.
    pub fn parse(descriptor: &[u8]) -> PowerState {
        let byte = |at: usize| descriptor.get(at).copied().unwrap_or(0);
        let short = |at| u16::from_le_bytes([byte(at), byte(at + 1)]);
        let long = |at| u32::from(short(at)) | u32::from(short(at + 2)) << 16;
        PowerState {
            max_power: short(0),
            is_fine_scale: byte(3) & 1 != 0,
            is_non_operational: byte(3) & 2 != 0,
            entry_us: long(4),
            exit_us: long(8),
            relative: [12, 13, 14, 15].map(|at| byte(at) & 0x1f),
            idle_power: (short(16), byte(18) >> 6),
            active_power: (short(20), byte(22) >> 6),
            workload: byte(22) & 7,
            recovery: (byte(23), byte(26) & 0xf),
            quiescence: (byte(24), byte(26) >> 4),
            vault: (byte(25), byte(27) & 0xf),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IDENTIFY_BYTES, IdentifyController};

    #[test]
    fn fields_do_not_overlap_and_end_within_their_structure() {
        for (fields, bytes) in
            [(CONTROLLER_FIELDS, IDENTIFY_BYTES), (NAMESPACE_FIELDS, IDENTIFY_BYTES), (SMART_FIELDS, SMART_LOG_BYTES)]
        {
            for pair in fields.windows(2) {
                assert!(pair[0].offset + pair[0].len <= pair[1].offset, "{} overlaps {}", pair[0].name, pair[1].name);
            }
            assert!(fields.last().is_some_and(|field| field.offset + field.len <= bytes));
        }
    }

    #[test]
    fn a_field_has_the_value_that_a_controller_wrote() {
        let mut bytes = [0; IDENTIFY_BYTES];
        let identify = IdentifyController { mdts: 9, namespaces: 0x0102_0304, sgl: 7, ..IdentifyController::default() };
        identify.write(&mut bytes);
        for (name, value) in [("mdts", 9), ("nn", 0x0102_0304), ("sgls", 7), ("vid", 0)] {
            assert_eq!(NvmeField::find(CONTROLLER_FIELDS, name).unwrap().number(&bytes), value, "{name}");
        }
    }

    #[test]
    fn short_data_reads_as_zero() {
        for len in 0..=ERROR_ENTRY_BYTES {
            let data = vec![0xff; len];
            for field in CONTROLLER_FIELDS.iter().chain(NAMESPACE_FIELDS).chain(SMART_FIELDS) {
                let missing = field.offset >= len;
                assert!(!missing || field.number(&data) == 0, "{}", field.name);
            }
            let entry = ErrorLogEntry::parse(&data);
            assert_eq!(entry.version, if len == ERROR_ENTRY_BYTES { 0xff } else { 0 });
            PowerState::parse(&data);
        }
    }
}
