//! Log pages of a controller, and their counters.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::io::IoShared;
use super::{ControllerOptions, NamespaceTable, capabilities};
use crate::{ANA_LOG, CROSS_RESET_LOG, DISCOVERY_LOG, NvmeStatus, admin, io};

/// Log page identifiers.
pub(crate) mod lid {
    pub(crate) const SUPPORTED: u8 = 0x00;
    pub(crate) const ERROR: u8 = 0x01;
    pub(crate) const SMART: u8 = 0x02;
    pub(crate) const FIRMWARE: u8 = 0x03;
    pub(crate) const CHANGED_NAMESPACES: u8 = 0x04;
    pub(crate) const EFFECTS: u8 = 0x05;
    pub(crate) const FEATURE_EFFECTS: u8 = 0x12;
}

/// All log pages but those of ANA and of cross-controller resets.
const SUPPORTED: [u8; 7] = [
    lid::SUPPORTED,
    lid::ERROR,
    lid::SMART,
    lid::FIRMWARE,
    lid::CHANGED_NAMESPACES,
    lid::EFFECTS,
    lid::FEATURE_EFFECTS,
];

/// Bytes of an error log entry.
const ERROR_BYTES: usize = 64;
/// Entries of the error log.
pub(crate) const ERRORS_MAX: usize = 64;
/// Identifiers in a list of changed namespaces.
const CHANGED_MAX: usize = 1024;
/// Reported composite temperature, K; there is no sensor.
const KELVIN: u16 = 313;
/// 512-byte units in one data unit of the SMART log.
const DATA_UNIT: u64 = 1000;

/// An entry of the error log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorEntry {
    /// Submission queue of the command.
    pub sqid: u16,
    /// Identifier of the command; all ones for a failure without a command.
    pub cid: u16,
    /// Its status.
    pub status: NvmeStatus,
    /// Invalid byte of the command in bits 0-7, and bit in 8-10; all ones if unknown.
    pub location: u16,
    /// First logical block of the command.
    pub slba: u64,
    /// Namespace of the command.
    pub nsid: u32,
}

/// The last failures, and their total number.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CommandErrorLog {
    /// Latest failure first, with its number.
    entries: VecDeque<(u64, ErrorEntry)>,
    count: u64,
}

impl CommandErrorLog {
    pub(crate) fn push(&mut self, entry: ErrorEntry) {
        self.count += 1;
        self.entries.truncate(ERRORS_MAX - 1);
        self.entries.push_front((self.count, entry));
    }

    fn page(&self) -> Vec<u8> {
        let mut page = vec![0; ERRORS_MAX * ERROR_BYTES];
        for (bytes, (number, entry)) in page.chunks_exact_mut(ERROR_BYTES).zip(&self.entries) {
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            bytes[8..10].copy_from_slice(&entry.sqid.to_le_bytes());
            bytes[10..12].copy_from_slice(&entry.cid.to_le_bytes());
            bytes[12..14].copy_from_slice(&(entry.status.0 << 1).to_le_bytes());
            bytes[14..16].copy_from_slice(&entry.location.to_le_bytes());
            bytes[16..24].copy_from_slice(&entry.slba.to_le_bytes());
            bytes[24..28].copy_from_slice(&entry.nsid.to_le_bytes());
        }
        page
    }
}

/// Totals of deleted queues for the SMART log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct IoTotals {
    reads: u64,
    writes: u64,
    sectors_read: u64,
    sectors_written: u64,
    media_errors: u64,
}

impl IoTotals {
    /// Adds a queue's counts.
    pub(crate) fn add(&mut self, shared: &IoShared) {
        for (total, counter) in [
            (&mut self.reads, &shared.reads),
            (&mut self.writes, &shared.writes),
            (&mut self.sectors_read, &shared.sectors_read),
            (&mut self.sectors_written, &shared.sectors_written),
            (&mut self.media_errors, &shared.media_errors),
        ] {
            *total += counter.load(Relaxed);
        }
    }
}

/// State shown by the log pages.
#[derive(Debug)]
pub(crate) struct ControllerLogs {
    pub(crate) errors: CommandErrorLog,
    /// Totals of deleted queues.
    pub(crate) totals: IoTotals,
    /// Namespaces changed since the page was last read.
    pub(crate) changed: Vec<u32>,
    firmware: [u8; 8],
}

impl ControllerLogs {
    pub(crate) fn new(firmware: [u8; 8]) -> ControllerLogs {
        ControllerLogs {
            errors: CommandErrorLog::default(),
            totals: IoTotals::default(),
            changed: Vec::new(),
            firmware,
        }
    }

    /// Records namespaces that differ between two tables. Returns whether any do.
    pub(crate) fn compare(&mut self, old: &NamespaceTable, new: &NamespaceTable) -> bool {
        let mut is_changed = false;
        for nsid in 1..=old.identifiers().max(new.identifiers()) {
            if old.find(nsid).ok() != new.find(nsid).ok() {
                is_changed = true;
                if let Err(place) = self.changed.binary_search(&nsid) {
                    self.changed.insert(place, nsid);
                }
            }
        }
        is_changed
    }

    /// A log page; `None` for an unknown identifier.
    pub(crate) fn page<'a>(
        &self,
        id: u8,
        queues: impl Iterator<Item = &'a Arc<IoShared>>,
        namespaces: &NamespaceTable,
        options: &ControllerOptions,
    ) -> Option<Vec<u8>> {
        if let Some(log) = options.discovery() {
            return match id {
                lid::SUPPORTED => Some(supported([lid::SUPPORTED, DISCOVERY_LOG])),
                DISCOVERY_LOG => Some(log.bytes().to_vec()),
                _ => None,
            };
        }
        Some(match id {
            lid::SUPPORTED => {
                let ana = namespaces.ana().map(|_| ANA_LOG);
                let resets = options.instance().map(|_| CROSS_RESET_LOG);
                supported(SUPPORTED.into_iter().chain(ana).chain(resets))
            }
            lid::ERROR => self.errors.page(),
            lid::SMART => self.smart(queues),
            lid::FIRMWARE => {
                let mut page = vec![0; 512];
                // Slot 1 is active.
                page[0] = 1;
                page[8..16].copy_from_slice(&self.firmware);
                page
            }
            lid::CHANGED_NAMESPACES => {
                let mut page = vec![0; CHANGED_MAX * 4];
                for (bytes, nsid) in page.chunks_exact_mut(4).zip(&self.changed) {
                    bytes.copy_from_slice(&nsid.to_le_bytes());
                }
                page
            }
            lid::EFFECTS => effects(options, capabilities::nvm_commands(namespaces)),
            lid::FEATURE_EFFECTS => {
                let mut page = vec![0; 256 * 4];
                for (id, scope) in super::features::SUPPORTED {
                    page[usize::from(id) * 4] = 1;
                    // Feature scope: bit 20 + 0 namespace, + 1 controller.
                    page[usize::from(id) * 4 + 2] = scope << 4;
                }
                page
            }
            _ => return None,
        })
    }

    /// Clears the events of a page that the host has read without retaining them.
    pub(crate) fn was_read(&mut self, id: u8) {
        if id == lid::CHANGED_NAMESPACES {
            self.changed.clear();
        }
    }

    fn smart<'a>(&self, queues: impl Iterator<Item = &'a Arc<IoShared>>) -> Vec<u8> {
        let mut totals = self.totals.clone();
        queues.for_each(|shared| totals.add(shared));
        let mut page = vec![0; 512];
        page[1..3].copy_from_slice(&KELVIN.to_le_bytes());
        // Available spare and its threshold, percent.
        (page[3], page[4]) = (100, 10);
        for (at, value) in [
            (32, totals.sectors_read.div_ceil(DATA_UNIT)),
            (48, totals.sectors_written.div_ceil(DATA_UNIT)),
            (64, totals.reads),
            (80, totals.writes),
            (160, totals.media_errors),
            (176, self.errors.count),
        ] {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        page
    }
}

/// The page of supported log pages.
fn supported(pages: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut page = vec![0; 256 * 4];
    for id in pages {
        page[usize::from(id) * 4] = 1;
    }
    page
}

/// Supported commands, and their effects: data (bit 1) or capabilities of a controller (bit 3).
fn effects(options: &ControllerOptions, nvm_commands: u16) -> Vec<u8> {
    const SUPPORTED: u8 = 1;
    const CHANGES_DATA: u8 = 2;
    let mut page = vec![0; 4096];
    for opcode in options.admin_opcodes() {
        page[usize::from(opcode) * 4] = SUPPORTED;
    }
    let is_fabrics = options.fabrics.is_some();
    for opcode in [io::FLUSH, io::READ].into_iter().chain([io::COMPARE, io::VERIFY].into_iter().filter(|_| !is_fabrics))
    {
        page[1024 + usize::from(opcode) * 4] = SUPPORTED;
    }
    for (opcode, bit) in [(io::WRITE_ZEROES, capabilities::ONCS_WRITE_ZEROES), (io::DSM, capabilities::ONCS_DSM)] {
        if nvm_commands & bit != 0 {
            page[1024 + usize::from(opcode) * 4] = SUPPORTED | CHANGES_DATA;
        }
    }
    page[1024 + usize::from(io::WRITE) * 4] = SUPPORTED | CHANGES_DATA;
    debug_assert!(page[usize::from(admin::FORMAT) * 4] == 0);
    page
}
