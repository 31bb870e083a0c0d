//! The namespace scan: the active namespaces, and the properties of those in its scope for the queue core.
//!
//! Pages of the active namespace list, 1024 identifiers each, until a page is not full; then for each namespace in
//! scope its identification descriptors and its data. On a controller without the list namespaces are tried one by
//! one. The controller's answers are bounded here: at most [`NAMESPACES_MAX`], in ascending order.
//!
//! A command that fails for the moment is sent again; a namespace that still cannot be read is kept as it was known.

use blkyard_mq::DeviceInfo;

use crate::host::nvm_limits::NvmLimits;
use crate::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, NvmeNamespace, NvmeStatus, Sqe, cns};

/// Maximum number of scanned namespaces.
pub const NAMESPACES_MAX: usize = 4096;
/// Identifiers on a page of the list.
const PAGE_IDS: usize = IDENTIFY_BYTES / 4;
/// How often a command is sent again.
const SCAN_RETRIES_MAX: u8 = 3;
/// The NVM command set.
const CSI_NVM: u8 = 0;

/// Identity of a namespace; unset identifiers are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NamespaceIds {
    /// IEEE extended unique identifier, big-endian.
    pub eui64: [u8; 8],
    /// Globally unique identifier, big-endian.
    pub nguid: [u8; 16],
    /// UUID, big-endian.
    pub uuid: [u8; 16],
    /// Command set.
    pub csi: u8,
}

impl NamespaceIds {
    /// Parses a list of identification descriptors up to the first malformed one.
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> NamespaceIds {
        let mut ids = NamespaceIds::default();
        let mut rest = &bytes[..];
        while let [kind, len, _, _, after @ ..] = rest {
            let value = after.split_at_checked(usize::from(*len)).filter(|_| *kind > 0 && *len > 0);
            let Some((value, next)) = value else { break };
            match (kind, value.len()) {
                (1, 8) => ids.eui64.copy_from_slice(value),
                (2, 16) => ids.nguid.copy_from_slice(value),
                (3, 16) => ids.uuid.copy_from_slice(value),
                (4, 1) => ids.csi = value[0],
                _ => {}
            }
            rest = next;
        }
        ids
    }
}

/// A usable namespace.
#[derive(Clone, Debug)]
pub struct ScannedNamespace {
    /// Its identity.
    pub ids: NamespaceIds,
    /// Properties for the driver of a queue.
    pub namespace: NvmeNamespace,
    /// Properties for the queue core.
    pub info: DeviceInfo,
    /// Its group of asymmetric access; zero without one.
    pub ana_group: u32,
}

impl ScannedNamespace {
    /// Whether it is the same namespace with unchanged properties.
    pub fn is_same(&self, other: &ScannedNamespace) -> bool {
        let look = |scanned: &ScannedNamespace| {
            let info = &scanned.info;
            (info.capacity_sectors, info.limits, info.read_only, info.volatile_cache, info.fua)
        };
        self.ids == other.ids && self.namespace == other.namespace && look(self) == look(other)
    }
}

/// Namespaces that a scan identifies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NamespaceScope {
    /// All active ones.
    #[default]
    All,
    /// The one with this identifier, if it is active.
    One(u32),
    /// None: there is no scan.
    Nothing,
}

/// A command of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanStep {
    /// Only identifiers above this one.
    List(u32),
    Ids(u32),
    Data(u32),
}

impl ScanStep {
    pub(crate) fn sqe(self) -> Sqe {
        match self {
            ScanStep::List(after) => Sqe::identify(cns::ACTIVE_NAMESPACES, after, 0, 0),
            ScanStep::Ids(nsid) => Sqe::identify(cns::NAMESPACE_IDS, nsid, 0, 0),
            ScanStep::Data(nsid) => Sqe::identify(cns::NAMESPACE, nsid, 0, 0),
        }
    }
}

/// Whether a command has failed for the moment: neither a success, nor a statement about the controller or the
/// namespace, which some controllers make without a DNR bit.
fn is_passing(status: NvmeStatus) -> bool {
    let is_answer = [NvmeStatus::INVALID_OPCODE, NvmeStatus::INVALID_FIELD, NvmeStatus::INVALID_NAMESPACE];
    !status.is_success() && !status.is_final() && !is_answer.contains(&status.without_flags())
}

/// A scan in progress: one command at a time.
#[derive(Debug)]
pub(crate) struct Scan {
    scope: NamespaceScope,
    step: Option<ScanStep>,
    /// Identifiers of all active namespaces, ascending.
    active: Vec<u32>,
    /// Remaining namespaces, the next one last.
    nsids: Vec<u32>,
    ids: NamespaceIds,
    found: Vec<ScannedNamespace>,
    /// Namespaces of the scan before.
    known: Vec<ScannedNamespace>,
    /// How often the current command was sent again.
    retries: u8,
}

impl Scan {
    /// A scan after one that has found these.
    pub(crate) fn new(scope: NamespaceScope, known: Vec<ScannedNamespace>) -> Scan {
        let (active, nsids, ids, found) = (vec![], vec![], NamespaceIds::default(), vec![]);
        let step = (scope != NamespaceScope::Nothing).then_some(ScanStep::List(0));
        Scan { scope, step, active, nsids, ids, found, known, retries: 0 }
    }

    /// The next command; `None` once the scan is complete.
    pub(crate) fn step(&self) -> Option<ScanStep> {
        self.step
    }

    /// Whether it has several namespaces to identify.
    pub(crate) fn has_many(&self) -> bool {
        self.active.len() > 1
    }

    /// The namespaces found, and the identifiers of all active ones.
    pub(crate) fn into_found(self) -> (Vec<ScannedNamespace>, Vec<u32>) {
        (self.found, self.active)
    }

    /// Takes the answer to the current command.
    pub(crate) fn completed(
        &mut self,
        status: NvmeStatus,
        bytes: &[u8; IDENTIFY_BYTES],
        controller: &IdentifyController,
        limits: &NvmLimits,
    ) {
        let Some(step) = self.step else { return };
        let is_ok = status.is_success();
        let is_passing = is_passing(status);
        if is_passing && self.retries < SCAN_RETRIES_MAX {
            self.retries += 1;
            return;
        }
        self.retries = 0;
        self.step = match step {
            ScanStep::List(after) if is_ok => self.list(after, bytes),
            ScanStep::List(_) if is_passing && !self.known.is_empty() => {
                self.found = std::mem::take(&mut self.known);
                self.active = self.found.iter().map(|found| found.namespace.nsid).collect();
                None
            }
            ScanStep::List(_) => {
                // Before version 1.1 there is no list.
                let count = controller.namespaces.min(NAMESPACES_MAX as u32);
                self.active = (1..=count).collect();
                self.first_namespace()
            }
            ScanStep::Ids(nsid) | ScanStep::Data(nsid) if is_passing && self.keep(nsid) => self.next_namespace(),
            ScanStep::Ids(nsid) => {
                // Before version 1.3 there are no descriptors.
                self.ids = if is_ok { NamespaceIds::parse(bytes) } else { NamespaceIds::default() };
                Some(ScanStep::Data(nsid))
            }
            ScanStep::Data(nsid) => {
                if is_ok {
                    self.data(nsid, bytes, controller, limits);
                }
                self.next_namespace()
            }
        };
    }

    fn list(&mut self, after: u32, bytes: &[u8; IDENTIFY_BYTES]) -> Option<ScanStep> {
        let mut last = after;
        let mut count = 0;
        for id in bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)) {
            if id <= last || self.active.len() == NAMESPACES_MAX {
                break;
            }
            self.active.push(id);
            (last, count) = (id, count + 1);
        }
        if count == PAGE_IDS && self.active.len() < NAMESPACES_MAX {
            return Some(ScanStep::List(last));
        }
        self.first_namespace()
    }

    /// Begins with the namespaces in scope.
    fn first_namespace(&mut self) -> Option<ScanStep> {
        let scope = self.scope;
        let is_wanted = |nsid: &u32| scope == NamespaceScope::All || scope == NamespaceScope::One(*nsid);
        self.nsids = self.active.iter().rev().copied().filter(is_wanted).collect();
        self.next_namespace()
    }

    /// Keeps a namespace as it was known. Returns false if it was not.
    fn keep(&mut self, nsid: u32) -> bool {
        let known = self.known.iter().find(|known| known.namespace.nsid == nsid);
        self.found.extend(known.cloned());
        known.is_some()
    }

    fn next_namespace(&mut self) -> Option<ScanStep> {
        self.nsids.pop().map(ScanStep::Ids)
    }

    fn data(&mut self, nsid: u32, bytes: &[u8; IDENTIFY_BYTES], controller: &IdentifyController, limits: &NvmLimits) {
        let data = IdentifyNamespace::parse(bytes);
        let mut ids = self.ids;
        if ids.nguid == [0; 16] {
            ids.nguid = data.nguid;
        }
        if ids.eui64 == [0; 8] {
            ids.eui64 = data.eui64;
        }
        if ids.csi != CSI_NVM {
            return;
        }
        if let Some((namespace, mut info)) = NvmeNamespace::new(nsid, controller, &data, limits) {
            info.name = format!("namespace {nsid}");
            self.found.push(ScannedNamespace { ids, namespace, info, ana_group: data.ana_group });
        }
    }
}
