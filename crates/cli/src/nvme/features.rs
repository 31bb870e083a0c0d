//! `get-feature`: features with their names and values.

use std::fmt::Write as _;

use blkyard::nvme::feature;

use super::json::JsonNode;
use super::text::{celsius, printable};

/// Features with names, and the bytes of their data.
const FEATURES: &[(u8, &str, usize)] = &[
    (feature::ARBITRATION, "Arbitration", 0),
    (feature::POWER, "Power Management", 0),
    (LBA_RANGE, "LBA Range Type", 4096),
    (feature::TEMPERATURE, "Temperature Threshold", 0),
    (feature::ERROR_RECOVERY, "Error Recovery", 0),
    (feature::WRITE_CACHE, "Volatile Write Cache", 0),
    (feature::QUEUES, "Number of Queues", 0),
    (feature::COALESCING, "Interrupt Coalescing", 0),
    (feature::VECTOR, "Interrupt Vector Configuration", 0),
    (feature::WRITE_ATOMICITY, "Write Atomicity Normal", 0),
    (feature::ASYNC_EVENTS, "Async Event Configuration", 0),
    (feature::AUTONOMOUS_POWER, "Autonomous Power State Transition", 256),
    (feature::HOST_MEMORY, "Host Memory Buffer", 4096),
    (feature::TIMESTAMP, "Timestamp", 8),
    (feature::KEEP_ALIVE, "Keep Alive Timer", 0),
    (THERMAL, "Host Controlled Thermal Management", 0),
    (NON_OPERATIONAL, "Non-Operational Power State Config", 0),
    (READ_RECOVERY, "Read Recovery Level", 0),
    (0x13, "Predictable Latency Mode Config", 512),
    (0x14, "Predictable Latency Mode Window", 0),
    (LBA_STATUS, "LBA Status Interval", 0),
    (feature::HOST_BEHAVIOUR, "Host Behavior", 512),
    (SANITIZE, "Sanitize", 0),
    (0x18, "Endurance Event Group Configuration", 0),
    (0x19, "I/O Command Set Profile", 0),
    (0x1a, "Spinup Control", 0),
    (0x1b, "Power Loss Signaling Config", 0),
    (0x1c, "Performance Characteristics", 4096),
    (0x1d, "Flexible Direct Placement", 0),
    (0x1e, "Flexible Direct Placement Events", 0),
    (0x1f, "Namespace Admin Label", 0),
    (0x20, "Key Value Configuration", 0),
    (0x21, "Controller Data Queue", 0),
    (0x78, "Embedded Management Controller Address", 512),
    (0x79, "Host Management Agent Address", 512),
    (0x7d, "Enhanced Controller Metadata", 4096),
    (0x7e, "Controller Metadata", 4096),
    (0x7f, "Namespace Metadata", 4096),
    (SOFTWARE_PROGRESS, "Software Progress", 0),
    (HOST_ID, "Host Identifier", 8),
    (RESERVATION_MASK, "Reservation Notification Mask", 0),
    (RESERVATION_PERSISTENCE, "Reservation Persistence", 0),
    (WRITE_PROTECT, "Namespace Write Protect", 0),
    (0x85, "Boot Partition Write Protection Config", 0),
];

const LBA_RANGE: u8 = 0x03;
const THERMAL: u8 = 0x10;
const NON_OPERATIONAL: u8 = 0x11;
const READ_RECOVERY: u8 = 0x12;
const LBA_STATUS: u8 = 0x15;
const SANITIZE: u8 = 0x17;
const SOFTWARE_PROGRESS: u8 = 0x80;
const HOST_ID: u8 = 0x81;
const RESERVATION_MASK: u8 = 0x82;
const RESERVATION_PERSISTENCE: u8 = 0x83;
const WRITE_PROTECT: u8 = 0x84;
/// Bytes of a host identifier if bit 0 of dword 11 asks for the extended one.
const EXTENDED_HOST_ID_BYTES: usize = 16;

/// Asynchronous events, by their bit in the feature.
const EVENTS: &[(u32, &str)] = &[
    (31, "Discovery Log Page Change Notices"),
    (30, "Host Discovery Log Page Change Notification"),
    (29, "AVE Discovery Log Page Change Notification"),
    (28, "Pull Model DDC Request Log Page Change Notification"),
    (27, "Zone Descriptor Changed Notices"),
    (18, "Reachability Group"),
    (17, "Reachability Association"),
    (15, "Normal NVM Subsystem Shutdown"),
    (14, "Endurance Group Event Aggregate Log Change Notices"),
    (13, "LBA Status Information Notices"),
    (12, "Predictable Latency Event Aggregate Log Change Notices"),
    (11, "Asymmetric Namespace Access Change Notices"),
    (10, "Telemetry Log Notices"),
    (9, "Firmware Activation Notices"),
    (8, "Namespace Attribute Notices"),
];

/// Bits of events that are in the text and not in JSON, and their places among the others.
const TEXT_EVENTS: [(u32, &str, usize); 2] =
    [(19, "Allocated Namespace Attribute Notices", 5), (16, "Temperature Threshold Hysteresis Recovery", 8)];
/// A field of the host's behaviour that only JSON has.
const HOST_BEHAVIOUR_TITLE: &str = "Host Behavior Support";
/// A list, in text blocks of lines.
const TRANSITIONS_TITLE: &str = "Auto PST Entries";
/// Columns of an event's name.
const EVENT_WIDTH: usize = 58;

/// Names of fields that nvme-cli writes otherwise in text than in JSON.
const TEXT_NAMES: &[(&str, &str)] = &[
    ("High Priority Weight (HPW)", "High Priority Weight   (HPW)"),
    ("Low Priority Weight (LPW)", "Low Priority Weight    (LPW)"),
    ("Arbitration Burst (AB)", "Arbitration Burst       (AB)"),
    ("Power State (PS)", "Power State   (PS)"),
    ("Temperature Threshold Hysteresis (TMPTHH)", "Temperature Threshold Hysteresis(TMPTHH)"),
    ("Threshold Type Select (THSEL)", "Threshold Type Select         (THSEL)"),
    ("Temperature Threshold (TMPTH)", "Temperature Threshold         (TMPTH)"),
    ("Time Limited Error Recovery (TLER)", "Time Limited Error Recovery                          (TLER)"),
    ("Aggregation Time (TIME)", "Aggregation Time     (TIME)"),
    ("Interrupt Vector (IV)", "Interrupt Vector   (IV)"),
    ("Host Memory Descriptor List Address (HMDLAU)", "Host Memory Descriptor List Address     (HMDLAU)"),
    ("Host Memory Descriptor List Address (HMDLAL)", "Host Memory Descriptor List Address     (HMDLAL)"),
    ("Host Memory Buffer Size (HSIZE)", "Host Memory Buffer Size                  (HSIZE)"),
    ("Thermal Management Temperature 1 (TMT1)", "Thermal Management Temperature 1 (TMT1) "),
    ("Thermal Management Temperature 2", "Thermal Management Temperature 2 (TMT2) "),
    ("LBA Status Information Poll Interval (LSIPI)", "LBA Status Information Poll Interval (LSIPI)  "),
    ("Host Dispersed Namespace Support (HDISNS)", "Host Dispersed Namespace Support (HDISNS) "),
    ("Copy Descriptor Format 2h Enable (CDF2E)", "Copy Descriptor Format 2h Enabled (CDF2E) "),
    ("Copy Descriptor Format 3h Enable (CDF3E)", "Copy Descriptor Format 3h Enabled (CDF3E) "),
    ("Copy Descriptor Format 4h Enable (CDF4E)", "Copy Descriptor Format 4h Enabled (CDF4E) "),
    ("No-Deallocate Response Mode (NODRM)", "No-Deallocate Response Mode (NODRM) "),
    ("Mask Reservation Preempted Notification (RESPRE)", "Mask Reservation Preempted Notification  (RESPRE)"),
    ("Mask Reservation Released Notification (RESREL)", "Mask Reservation Released Notification   (RESREL)"),
];

/// Which value of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// In use.
    Current,
    /// After manufacturing.
    Default,
    /// After a reset.
    Saved,
    /// What can be changed, instead of a value.
    Supported,
}

impl Select {
    /// The value of this number.
    pub fn from_number(number: u8) -> Option<Select> {
        [Select::Current, Select::Default, Select::Saved, Select::Supported].get(usize::from(number)).copied()
    }

    fn name(self) -> &'static str {
        match self {
            Select::Current => "Current",
            Select::Default => "Default",
            Select::Saved => "Saved",
            Select::Supported => "Supported capabilities",
        }
    }
}

/// A feature as the controller reported it.
#[derive(Debug)]
pub struct FeatureValue {
    /// Its identifier.
    pub fid: u8,
    /// Which value.
    pub select: Select,
    /// The command's result.
    pub result: u32,
    /// The data, if it has some.
    pub data: Vec<u8>,
}

/// Bytes of a feature's data.
pub fn data_bytes(fid: u8, dword11: u32) -> usize {
    if fid == HOST_ID && dword11 & 1 != 0 {
        return EXTENDED_HOST_ID_BYTES;
    }
    FEATURES.iter().find(|(known, ..)| *known == fid).map_or(0, |(.., bytes)| *bytes)
}

/// A feature's name.
pub fn name(fid: u8) -> &'static str {
    FEATURES.iter().find(|(known, ..)| *known == fid).map_or("Unknown", |(_, name, _)| name)
}

/// Its identifier as C's `%#04x`.
fn identifier(fid: u8) -> String {
    if fid == 0 { "00".to_owned() } else { format!("{fid:#04x}") }
}

fn sent(is_sent: bool) -> &'static str {
    if is_sent { "Send async event" } else { "Do not send async event" }
}

fn value(result: u32) -> String {
    if result == 0 { "00000000".to_owned() } else { format!("{result:#010x}") }
}

impl FeatureValue {
    /// As text: the value, and its fields or a dump of the data.
    pub fn text(&self, is_readable: bool) -> String {
        let FeatureValue { fid, select, result, data } = self;
        let (id, name, value) = (identifier(*fid), name(*fid), value(*result));
        let mut text = format!("get-feature:{id} ({name}), {} value:{value}\n", select.name());
        if *select == Select::Supported {
            for capability in capabilities(*result) {
                let _ = writeln!(text, "  Feature is {capability}");
            }
        } else if is_readable {
            for (key, value) in self.text_fields() {
                let _ = writeln!(text, "\t{key}: {}", printable(&value));
            }
            if *fid == feature::AUTONOMOUS_POWER {
                self.show_transitions(&mut text);
            }
        } else if !data.is_empty() {
            text.push_str(&super::text::dump(data));
        }
        text
    }

    /// As members of a JSON object.
    pub fn json(&self) -> [(String, JsonNode); 2] {
        let FeatureValue { fid, select, result, .. } = self;
        let summary = [("name", name(*fid).into()), (select.name(), value(*result).into())];
        let id = identifier(*fid);
        let second = if *select == Select::Supported {
            let list = capabilities(*result).map(JsonNode::from).collect();
            (format!("Feature: {id}: select"), JsonNode::List(list))
        } else {
            (format!("Feature: {id}"), JsonNode::List(vec![JsonNode::Object(self.fields())]))
        };
        [(format!("feature: {id}"), JsonNode::List(vec![JsonNode::object(summary)])), second]
    }

    /// The fields as they are in text: a description or another unit is on the line of its value. Without lists.
    fn text_fields(&self) -> Vec<(String, String)> {
        let mut fields = self.fields();
        if self.fid == feature::ASYNC_EVENTS {
            for (bit, name, place) in TEXT_EVENTS {
                fields.insert(place, (name.to_owned(), sent(self.result >> bit & 1 == 1).into()));
            }
            fields.iter_mut().for_each(|(name, _)| *name = format!("{name:EVENT_WIDTH$}"));
        }
        fields.retain(|(name, _)| name != HOST_BEHAVIOUR_TITLE);
        let mut lines: Vec<(String, String)> = Vec::with_capacity(fields.len());
        for (name, value) in fields {
            let value = match value {
                JsonNode::Integer(number) => number.to_string(),
                JsonNode::Text(text) => text,
                JsonNode::List(_) | JsonNode::Object(_) => continue,
            };
            match (lines.last_mut(), name.rsplit(' ').next()) {
                (Some((_, last)), Some("description")) => *last = format!("{last} - {value}"),
                (Some((_, last)), Some("kelvin" | "celsius")) => {
                    *last = format!("{last} ({value})").replace(" Celsius", " °C");
                }
                _ => {
                    let shown = TEXT_NAMES.iter().find(|(field, _)| *field == name).map_or(&*name, |(_, shown)| shown);
                    lines.push((shown.to_owned(), value));
                }
            }
        }
        lines
    }

    /// The fields of the value and the data.
    fn fields(&self) -> Vec<(String, JsonNode)> {
        let result = self.result;
        let bits = |from: u32, count: u32| result >> from & (u32::MAX >> (32 - count));
        let truth = |bit| JsonNode::from(if bits(bit, 1) == 1 { "True" } else { "False" });
        let enabled = |bit| JsonNode::from(if bits(bit, 1) == 1 { "Enabled" } else { "Disabled" });
        let short = |from| u64::from(bits(from, 16));
        let fields: Vec<(&str, JsonNode)> = match self.fid {
            feature::ARBITRATION => vec![
                ("High Priority Weight (HPW)", (bits(24, 8) + 1).into()),
                ("Medium Priority Weight (MPW)", (bits(16, 8) + 1).into()),
                ("Low Priority Weight (LPW)", (bits(8, 8) + 1).into()),
                (
                    "Arbitration Burst (AB)",
                    if bits(0, 3) == 7 { "No limit".into() } else { (1 << bits(0, 3)).to_string().into() },
                ),
            ],
            feature::POWER => {
                let hint = match bits(5, 3) {
                    0 => "No Workload",
                    1 => "Extended Idle Period with a Burst of Random Writes",
                    2 => "Heavy Sequential Writes",
                    _ => "Reserved",
                };
                vec![
                    ("Workload Hint (WH)", bits(5, 3).into()),
                    ("WH description", hint.into()),
                    ("Power State (PS)", bits(0, 5).into()),
                ]
            }
            LBA_RANGE => vec![("Number of LBA Ranges (NUM)", (bits(0, 6) + 1).into())],
            feature::TEMPERATURE => temperature_fields(result),
            feature::ERROR_RECOVERY => vec![
                ("Deallocated or Unwritten Logical Block Error Enable (DULBE)", enabled(16)),
                ("Time Limited Error Recovery (TLER)", format!("{} ms", short(0) * 100).into()),
            ],
            feature::WRITE_CACHE => vec![("Volatile Write Cache Enable (WCE)", enabled(0))],
            feature::QUEUES => vec![
                ("Number of IO Completion Queues Allocated (NCQA)", (short(16) + 1).into()),
                ("Number of IO Submission Queues Allocated (NSQA)", (short(0) + 1).into()),
            ],
            feature::COALESCING => vec![
                ("Aggregation Time (TIME)", format!("{} usec", bits(8, 8) * 100).into()),
                ("Aggregation Threshold (THR)", (bits(0, 8) + 1).into()),
            ],
            feature::VECTOR => vec![("Coalescing Disable (CD)", truth(16)), ("Interrupt Vector (IV)", short(0).into())],
            feature::WRITE_ATOMICITY => vec![("Disable Normal (DN)", truth(0))],
            feature::ASYNC_EVENTS => {
                let events = EVENTS.iter().map(|(bit, name)| (*name, sent(bits(*bit, 1) == 1).into()));
                events.chain([("SMART / Health Critical Warnings", sent(bits(0, 8) != 0).into())]).collect()
            }
            feature::AUTONOMOUS_POWER => vec![
                ("Autonomous Power State Transition Enable (APSTE)", enabled(0)),
                (TRANSITIONS_TITLE, JsonNode::List(self.transitions().map(PowerTransition::json).collect())),
            ],
            feature::HOST_MEMORY => vec![
                ("Enable Host Memory (EHM)", enabled(0)),
                ("Host Memory Non-operational Access Restriction Enable (HMNARE)", truth(2)),
                ("Host Memory Non-operational Access Restricted (HMNAR)", truth(3)),
                ("Host Memory Descriptor List Entry Count (HMDLEC)", self.integer(12, 4).into()),
                ("Host Memory Descriptor List Address (HMDLAU)", format!("{:#x}", self.integer(8, 4)).into()),
                ("Host Memory Descriptor List Address (HMDLAL)", format!("{:#x}", self.integer(4, 4)).into()),
                ("Host Memory Buffer Size (HSIZE)", self.integer(0, 4).into()),
            ],
            feature::TIMESTAMP => {
                let attributes = self.integer(6, 1);
                vec![
                    ("timestamp", self.integer(0, 6).into()),
                    (
                        "timestamp origin",
                        if attributes & 2 != 0 { "Set Features" } else { "Controller Level Reset" }.into(),
                    ),
                    ("synch", if attributes & 1 != 0 { "may have stopped" } else { "counted continuously" }.into()),
                ]
            }
            feature::KEEP_ALIVE => vec![("Keep Alive Timeout (KATO) in milliseconds", result.into())],
            THERMAL => vec![
                ("Thermal Management Temperature 1 (TMT1)", format!("{} K", short(16)).into()),
                ("TMT1 celsius", format!("{} Celsius", celsius(short(16))).into()),
                ("Thermal Management Temperature 2", format!("{} K", short(0)).into()),
                ("TMT2 celsius", format!("{} Celsius", celsius(short(0))).into()),
            ],
            NON_OPERATIONAL => vec![("Non-Operational Power State Permissive Mode Enable (NOPPME)", truth(0))],
            READ_RECOVERY => vec![("Read Recovery Level (RRL)", bits(0, 4).into())],
            LBA_STATUS => vec![
                ("LBA Status Information Poll Interval (LSIPI)", short(16).into()),
                ("LBA Status Information Report Interval (LSIRI)", short(0).into()),
            ],
            feature::HOST_BEHAVIOUR => {
                let truth = |is_set| JsonNode::from(if is_set { "True" } else { "False" });
                let (bytes, formats) = ([0, 1, 2].map(|at| self.integer(at, 1)), self.integer(4, 2));
                vec![
                    (HOST_BEHAVIOUR_TITLE, truth(bytes[0] & 1 != 0)),
                    ("Advanced Command Retry Enable (ACRE)", truth(bytes[0] != 0)),
                    ("Extended Telemetry Data Area 4 Supported (ETDAS)", truth(bytes[1] != 0)),
                    ("LBA Format Extension Enable (LBAFEE)", truth(bytes[2] != 0)),
                    (
                        "Host Dispersed Namespace Support (HDISNS)",
                        if self.integer(3, 1) != 0 { "Enabled" } else { "Disabled" }.into(),
                    ),
                    ("Copy Descriptor Format 2h Enable (CDF2E)", truth(formats & 1 << 2 != 0)),
                    ("Copy Descriptor Format 3h Enable (CDF3E)", truth(formats & 1 << 3 != 0)),
                    ("Copy Descriptor Format 4h Enable (CDF4E)", truth(formats & 1 << 4 != 0)),
                ]
            }
            SANITIZE => vec![("No-Deallocate Response Mode (NODRM)", bits(0, 1).into())],
            SOFTWARE_PROGRESS => vec![("Pre-boot Software Load Count (PBSLC)", bits(0, 8).into())],
            HOST_ID => vec![("Host Identifier (HOSTID)", self.integer(0, 8).into())],
            RESERVATION_MASK => vec![
                ("Mask Reservation Preempted Notification (RESPRE)", truth(3)),
                ("Mask Reservation Released Notification (RESREL)", truth(2)),
                ("Mask Registration Preempted Notification (REGPRE)", truth(1)),
            ],
            RESERVATION_PERSISTENCE => vec![("Persist Through Power Loss (PTPL)", truth(0))],
            WRITE_PROTECT => {
                let state = match bits(0, 3) {
                    0 => "No Write Protect",
                    1 => "Write Protect",
                    2 => "Write Protect Until Power Cycle",
                    3 => "Permanent Write Protect",
                    _ => "Reserved",
                };
                vec![("Namespace Write Protect", state.into())]
            }
            _ => vec![],
        };
        fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// A little-endian integer of the data; missing bytes are zero.
    fn integer(&self, at: usize, len: usize) -> u64 {
        let bytes = self.data.iter().skip(at).take(len).rev();
        bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Entries of the autonomous power state transitions. [Base 2.1, feature 0Ch]
    fn transitions(&self) -> impl Iterator<Item = PowerTransition> {
        (0..self.data.len() / 8).map(|entry| {
            let bits = self.integer(entry * 8, 8);
            PowerTransition { entry, idle_ms: bits >> 8 & 0xff_ffff, state: bits >> 3 & 0x1f }
        })
    }

    fn show_transitions(&self, text: &mut String) {
        const RULE: &str = "\t.................";
        let _ = writeln!(text, "\t{TRANSITIONS_TITLE}{RULE}");
        for PowerTransition { entry, idle_ms, state } in self.transitions() {
            let _ = writeln!(text, "\tEntry[{entry:2}]   \n{RULE}");
            let _ = writeln!(text, "\tIdle Time Prior to Transition (ITPT): {idle_ms} ms");
            let _ = writeln!(text, "\tIdle Transition Power State   (ITPS): {state}\n{RULE}");
        }
    }
}

/// When a controller enters another power state by itself.
struct PowerTransition {
    /// The power state that it leaves.
    entry: usize,
    /// For so long it was idle.
    idle_ms: u64,
    /// The state that it enters.
    state: u64,
}

impl PowerTransition {
    fn json(self) -> JsonNode {
        JsonNode::object([
            ("entry", format!("{:2}", self.entry).into()),
            ("Idle Time Prior to Transition (ITPT)", format!("{} ms", self.idle_ms).into()),
            ("Idle Transition Power State (ITPS)", self.state.into()),
        ])
    }
}

fn temperature_fields(result: u32) -> Vec<(&'static str, JsonNode)> {
    let (hysteresis, kind, sensor, threshold) =
        (result >> 22 & 7, result >> 20 & 3, result >> 16 & 0xf, result & 0xffff);
    let kind_name = match kind {
        0 => "Over Temperature Threshold",
        1 => "Under Temperature Threshold",
        _ => "Reserved",
    };
    let sensor_name = match sensor {
        0 => "Composite Temperature".to_owned(),
        1..=8 => format!("Temperature Sensor {sensor}"),
        _ => "Reserved".to_owned(),
    };
    vec![
        ("Temperature Threshold Hysteresis (TMPTHH)", format!("{} Celsius", celsius(hysteresis.into())).into()),
        ("TMPTHH kelvin", format!("{hysteresis} K").into()),
        ("Threshold Type Select (THSEL)", kind.into()),
        ("THSEL description", kind_name.into()),
        ("Threshold Temperature Select (TMPSEL)", sensor.into()),
        ("TMPSEL description", sensor_name.into()),
        ("Temperature Threshold (TMPTH)", format!("{} Celsius", celsius(threshold.into())).into()),
        ("TMPTH kelvin", format!("{threshold} K").into()),
    ]
}

/// What can be done with a feature.
fn capabilities(result: u32) -> impl Iterator<Item = &'static str> {
    let names = ["saveable", "per-namespace", "changeable"];
    names.into_iter().enumerate().filter(move |(bit, _)| result >> bit & 1 == 1).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(fid: u8, result: u32, data: &[u8]) -> FeatureValue {
        FeatureValue { fid, select: Select::Current, result, data: data.to_vec() }
    }

    #[test]
    fn every_feature_is_shown_for_any_value() {
        for fid in 0..=u8::MAX {
            for result in [0, 1, 0x5555_5555, 0x8000_0000, u32::MAX] {
                for data in [&[][..], &[0xff; 3], &[0xff; 300]] {
                    for select in (0..4).filter_map(Select::from_number) {
                        let shown = FeatureValue { select, ..value(fid, result, data) };
                        shown.text(true);
                        shown.text(false);
                        for (_, node) in shown.json() {
                            node.document();
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn text_has_a_description_and_another_unit_on_one_line() {
        let text = value(feature::TEMPERATURE, 0x0051_014c, &[]).text(true);
        let lines: Vec<_> = text.lines().skip(1).collect();
        let expected = [
            "\tTemperature Threshold Hysteresis(TMPTHH): -272 °C (1 K)",
            "\tThreshold Type Select         (THSEL): 1 - Under Temperature Threshold",
            "\tThreshold Temperature Select (TMPSEL): 1 - Temperature Sensor 1",
            "\tTemperature Threshold         (TMPTH): 59 °C (332 K)",
        ];
        assert_eq!(lines, expected);
        let text = value(THERMAL, 0x0140_0150, &[]).text(true);
        assert!(text.contains("\tThermal Management Temperature 2 (TMT2) : 336 K (63 °C)\n"), "{text}");
        let text = value(feature::ASYNC_EVENTS, 1 << 19, &[]).text(true);
        let line = format!("\t{:58}: Send async event", "Allocated Namespace Attribute Notices");
        assert_eq!(text.lines().nth(6), Some(&*line), "{text}");
        assert_eq!(text.matches(": Send async event").count(), 1);
    }

    #[test]
    fn transitions_of_power_states_are_blocks_of_lines() {
        // To state 3 after 1500 ms, then to state 4 after 8500 ms.
        let data = [(1500_u64 << 8 | 3 << 3).to_le_bytes(), (8500_u64 << 8 | 4 << 3).to_le_bytes()].concat();
        let shown = value(feature::AUTONOMOUS_POWER, 1, &data);
        let block = |entry, idle_ms, state| {
            format!(
                "\tEntry[{entry}]   \n\t.................\n\tIdle Time Prior to Transition (ITPT): {idle_ms} ms\n\
                 \tIdle Transition Power State   (ITPS): {state}\n\t.................\n"
            )
        };
        let expected = [
            "get-feature:0x0c (Autonomous Power State Transition), Current value:0x00000001\n",
            "\tAutonomous Power State Transition Enable (APSTE): Enabled\n\tAuto PST Entries\t.................\n",
            &block(" 0", 1500, 3),
            &block(" 1", 8500, 4),
        ];
        assert_eq!(shown.text(true), expected.concat());
        let document = shown.json()[1].1.document();
        assert!(document.contains("\"Idle Time Prior to Transition (ITPT)\": \"8500 ms\""), "{document}");
    }

    #[test]
    fn a_feature_has_its_name_and_fields() {
        let shown = value(feature::QUEUES, 0x0003_0003, &[]);
        assert_eq!(shown.text(false), "get-feature:0x07 (Number of Queues), Current value:0x00030003\n");
        assert!(shown.text(true).ends_with("\tNumber of IO Submission Queues Allocated (NSQA): 4\n"));
        let [(first, summary), (second, fields)] = shown.json();
        assert_eq!((first.as_str(), second.as_str()), ("feature: 0x07", "Feature: 0x07"));
        let JsonNode::List(summary) = summary else { panic!("{summary:?}") };
        let members = [("name", "Number of Queues".into()), ("Current", "0x00030003".into())];
        assert_eq!(summary, [JsonNode::object(members)]);
        assert!(fields.document().contains("\"Number of IO Completion Queues Allocated (NCQA)\": 4"));
        assert_eq!(
            value(feature::WRITE_CACHE, 0, &[]).text(false).lines().last().unwrap().rsplit(':').next(),
            Some("00000000")
        );
    }

    #[test]
    fn capabilities_stand_for_a_value() {
        let shown = FeatureValue { select: Select::Supported, ..value(feature::WRITE_CACHE, 5, &[]) };
        assert!(shown.text(false).ends_with("  Feature is saveable\n  Feature is changeable\n"));
        assert_eq!(shown.json()[1].0, "Feature: 0x06: select");
    }
}
