//! Features of a controller: Set Features and Get Features.
//!
//! No feature can be saved: each has its default after a reset.

use serde::{Deserialize, Serialize};

use super::logs::lid;
use crate::{NvmeStatus, Sqe, feature};

/// All features, with their scope in a Feature Identifiers Effects log: bit 0 namespace, bit 1 controller.
pub(crate) const SUPPORTED: [(u8, u8); 12] = [
    (feature::ARBITRATION, 2),
    (feature::POWER, 2),
    (feature::TEMPERATURE, 2),
    (feature::ERROR_RECOVERY, 1),
    (feature::WRITE_CACHE, 2),
    (feature::QUEUES, 2),
    (feature::COALESCING, 2),
    (feature::VECTOR, 2),
    (feature::WRITE_ATOMICITY, 2),
    (feature::ASYNC_EVENTS, 2),
    (feature::TIMESTAMP, 2),
    (feature::KEEP_ALIVE, 2),
];
const _: () = assert!(lid::FEATURE_EFFECTS == 0x12);

/// Bytes of the data of the Timestamp feature.
pub(crate) const TIMESTAMP_BYTES: usize = 8;
/// Initial temperature thresholds, K: never crossed in either direction.
const OVER_KELVIN: u16 = super::capabilities::WARNING_KELVIN;
/// Number of power states that dword 11 can encode.
const POWER_STATES: u32 = 32;
/// Set Features: save.
const SAVE: u32 = 1 << 31;
const NANOS_PER_MILLI: u64 = 1_000_000;

/// Requested value of a feature (SEL).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeatureSelect {
    Current,
    /// Saved values equal the defaults.
    Default,
    Capabilities,
}

/// Other state used by feature commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeatureContext {
    /// Whether any namespace has a volatile cache.
    pub(crate) has_cache: bool,
    /// Largest valid namespace identifier.
    pub(crate) identifiers: u32,
    /// Bits of the configuration of asynchronous events that may be set.
    pub(crate) async_events: u32,
    pub(crate) now_ns: u64,
}

/// Side effect of a feature command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FeatureEffect {
    /// No side effect.
    Nothing,
    /// The volatile write cache was enabled or disabled.
    WriteCache(bool),
    /// The keep-alive timer restarts.
    KeepAlive,
    /// Get Features: the timestamp is to be transferred.
    SendTimestamp([u8; TIMESTAMP_BYTES]),
}

/// The values of all features.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Features {
    arbitration: u32,
    /// Over and under threshold of the composite temperature, K.
    thresholds: [u16; 2],
    error_recovery: u32,
    pub(crate) write_cache: bool,
    /// I/O submission and completion queues that the host may create.
    queues: [u16; 2],
    queues_max: u16,
    /// An I/O queue was created since the reset: their number is fixed until the next one.
    had_queues: bool,
    coalescing: u32,
    /// Coalescing disabled, by vector.
    vectors: Vec<bool>,
    atomicity: u32,
    pub(crate) async_events: u32,
    /// Milliseconds since 1970 and the time when they were set; whether the host has set them.
    timestamp: (u64, u64, bool),
    keep_alive_ms: u32,
}

impl Features {
    pub(crate) fn new(queues_max: u16, vectors: u16) -> Features {
        Features {
            arbitration: 0,
            thresholds: [OVER_KELVIN, 0],
            error_recovery: 0,
            write_cache: true,
            queues: [queues_max; 2],
            queues_max,
            had_queues: false,
            coalescing: 0,
            vectors: vec![false; usize::from(vectors)],
            atomicity: 0,
            async_events: 0,
            timestamp: (0, 0, false),
            keep_alive_ms: 0,
        }
    }

    /// Whether these are features of a controller with this number of queues and vectors.
    pub(crate) fn are_of(&self, queues_max: u16, vectors: u16) -> bool {
        let are_queues = self.queues.iter().all(|queues| (1..=queues_max).contains(queues));
        are_queues && self.queues_max == queues_max && self.vectors.len() == usize::from(vectors)
    }

    /// Maximum submission and completion queues of the host.
    pub(crate) fn queues(&self) -> [u16; 2] {
        self.queues
    }

    /// An I/O queue was created.
    pub(crate) fn queue_created(&mut self) {
        self.had_queues = true;
    }

    /// Sets the keep-alive timeout of an association, ms.
    pub(crate) fn set_keep_alive(&mut self, timeout_ms: u32) {
        self.keep_alive_ms = timeout_ms;
    }

    /// Keep-alive timeout, ms; zero if there is none.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms
    }

    /// Keep-alive timeout, ns, if there is one.
    pub(crate) fn keep_alive_ns(&self) -> Option<u64> {
        (self.keep_alive_ms > 0).then(|| u64::from(self.keep_alive_ms) * NANOS_PER_MILLI)
    }

    /// Bytes of the data of a Set Features command, if any.
    pub(crate) fn set_bytes(sqe: &Sqe) -> usize {
        if sqe.dword(10) as u8 == feature::TIMESTAMP { TIMESTAMP_BYTES } else { 0 }
    }

    /// Set Features with the command's `data`. Returns dword 0 of the completion.
    pub(crate) fn set(
        &mut self,
        sqe: &Sqe,
        data: [u8; TIMESTAMP_BYTES],
        context: &FeatureContext,
    ) -> Result<(u32, FeatureEffect), NvmeStatus> {
        let (fid, value) = (sqe.dword(10) as u8, sqe.dword(11));
        let invalid = NvmeStatus::INVALID_FIELD.with_dnr();
        check_known(fid, context)?;
        if sqe.dword(10) & SAVE != 0 {
            return Err(NvmeStatus::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        check_namespace(fid, sqe.nsid(), context)?;
        let mut effect = FeatureEffect::Nothing;
        let mut result = 0;
        match fid {
            feature::ARBITRATION => self.arbitration = value,
            // Only one power state exists.
            feature::POWER if value % POWER_STATES == 0 => {}
            feature::TEMPERATURE => self.thresholds[threshold(value)?] = value as u16,
            // Deallocated blocks read without an error (DULBE).
            feature::ERROR_RECOVERY if value & 1 << 16 == 0 => self.error_recovery = value & 0xffff,
            feature::WRITE_CACHE => {
                self.write_cache = value & 1 != 0;
                effect = FeatureEffect::WriteCache(self.write_cache);
            }
            feature::QUEUES => {
                let wanted = [value as u16, (value >> 16) as u16];
                if wanted.contains(&u16::MAX) {
                    return Err(invalid);
                }
                if self.had_queues {
                    return Err(NvmeStatus::COMMAND_SEQUENCE.with_dnr());
                }
                self.queues = wanted.map(|wanted| (wanted + 1).min(self.queues_max));
                result = zero_based(self.queues);
            }
            feature::COALESCING => self.coalescing = value & 0xffff,
            feature::VECTOR => {
                let vector = self.vectors.get_mut(usize::from(value as u16)).ok_or(invalid)?;
                *vector = value & 1 << 16 != 0;
            }
            feature::WRITE_ATOMICITY => self.atomicity = value & 1,
            feature::ASYNC_EVENTS if value & !context.async_events == 0 => self.async_events = value,
            feature::TIMESTAMP => {
                // The upper two bytes are reserved.
                self.timestamp = (u64::from_le_bytes(data) & 0xffff_ffff_ffff, context.now_ns, true);
            }
            feature::KEEP_ALIVE => {
                self.keep_alive_ms = value;
                effect = FeatureEffect::KeepAlive;
            }
            _ => return Err(invalid),
        }
        Ok((result, effect))
    }

    /// Get Features. Returns dword 0 of the completion.
    pub(crate) fn get(&self, sqe: &Sqe, context: &FeatureContext) -> Result<(u32, FeatureEffect), NvmeStatus> {
        let (fid, value) = (sqe.dword(10) as u8, sqe.dword(11));
        let select = match sqe.dword(10) >> 8 & 7 {
            0 => FeatureSelect::Current,
            1 | 2 => FeatureSelect::Default,
            3 => FeatureSelect::Capabilities,
            _ => return Err(NvmeStatus::INVALID_FIELD.with_dnr()),
        };
        check_known(fid, context)?;
        check_namespace(fid, sqe.nsid(), context)?;
        if select == FeatureSelect::Capabilities {
            // Bit 0 saveable, bit 1 by namespace, bit 2 changeable.
            return Ok((4 | u32::from(is_of_namespace(fid)) << 1, FeatureEffect::Nothing));
        }
        let defaults = Features::new(self.queues_max, self.vectors.len() as u16);
        let features = if select == FeatureSelect::Default { &defaults } else { self };
        let result = match fid {
            feature::ARBITRATION => features.arbitration,
            feature::TEMPERATURE => u32::from(features.thresholds[threshold(value)?]),
            feature::ERROR_RECOVERY => features.error_recovery,
            feature::WRITE_CACHE => u32::from(features.write_cache),
            feature::QUEUES => zero_based(features.queues),
            feature::COALESCING => features.coalescing,
            feature::VECTOR => {
                let number = usize::from(value as u16);
                let vector = features.vectors.get(number).ok_or(NvmeStatus::INVALID_FIELD.with_dnr())?;
                value & 0xffff | u32::from(*vector) << 16
            }
            feature::WRITE_ATOMICITY => features.atomicity,
            feature::ASYNC_EVENTS => features.async_events,
            feature::TIMESTAMP => return Ok((0, FeatureEffect::SendTimestamp(features.timestamp(context.now_ns)))),
            feature::KEEP_ALIVE => features.keep_alive_ms,
            // The only power state.
            _ => 0,
        };
        Ok((result, FeatureEffect::Nothing))
    }

    fn timestamp(&self, now_ns: u64) -> [u8; TIMESTAMP_BYTES] {
        let (set_ms, at_ns, by_host) = self.timestamp;
        let now_ms = set_ms.wrapping_add(now_ns.saturating_sub(at_ns) / NANOS_PER_MILLI) & 0xffff_ffff_ffff;
        // Origin in bits 49-51: 0 since the last reset, 1 set by the host.
        (now_ms | u64::from(by_host) << 49).to_le_bytes()
    }
}

fn is_of_namespace(fid: u8) -> bool {
    fid == feature::ERROR_RECOVERY
}

fn check_known(fid: u8, context: &FeatureContext) -> Result<(), NvmeStatus> {
    let is_known = SUPPORTED.iter().any(|(known, _)| *known == fid);
    let has = fid != feature::WRITE_CACHE || context.has_cache;
    if is_known && has { Ok(()) } else { Err(NvmeStatus::INVALID_FIELD.with_dnr()) }
}

fn check_namespace(fid: u8, nsid: u32, context: &FeatureContext) -> Result<(), NvmeStatus> {
    match nsid {
        0 if is_of_namespace(fid) => Err(NvmeStatus::INVALID_NAMESPACE.with_dnr()),
        0 | u32::MAX => Ok(()),
        _ if nsid > context.identifiers => Err(NvmeStatus::INVALID_NAMESPACE.with_dnr()),
        _ if is_of_namespace(fid) => Ok(()),
        _ => Err(NvmeStatus::FEATURE_NOT_NAMESPACE.with_dnr()),
    }
}

/// Selected threshold: over (0) or under (1), of the composite temperature or of all sensors.
fn threshold(value: u32) -> Result<usize, NvmeStatus> {
    match (value >> 16 & 0xf, value >> 20 & 3) {
        (0 | 0xf, kind @ (0 | 1)) => Ok(kind as usize),
        _ => Err(NvmeStatus::INVALID_FIELD.with_dnr()),
    }
}

fn zero_based([submission, completion]: [u16; 2]) -> u32 {
    u32::from(submission - 1) | u32::from(completion - 1) << 16
}
