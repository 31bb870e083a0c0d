//! The namespaces of a controller, for its queues and its identify data.
//!
//! A table is replaced as a whole; queues keep the last one they were given.

use std::sync::Arc;

use blkyard_mq::{DeviceInfo, SECTOR_BYTES};

use crate::{AnaGroups, IDENTIFY_BYTES, IdentifyNamespace, LbaFormat, NamespaceFormat, NvmeStatus};

/// Types of namespace identification descriptors (CNS 03h).
mod descriptor {
    pub(super) const EUI64: u8 = 1;
    pub(super) const NGUID: u8 = 2;
    pub(super) const UUID: u8 = 3;
    pub(super) const CSI: u8 = 4;
}

/// A namespace served by a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedNamespace {
    /// Format for parsing its commands.
    pub format: NamespaceFormat,
    /// Index of its device: [`Bio::namespace`](blkyard_mq::Bio::namespace) of its bios.
    pub device: u16,
    /// Whether completed writes may be lost before a flush.
    pub has_cache: bool,
    /// Whether the device deallocates blocks.
    pub can_deallocate: bool,
    /// Whether the device writes zeroes without data.
    pub can_write_zeroes: bool,
    /// Granularity of deallocation, logical blocks.
    pub deallocate_blocks: u32,
    /// Physical block, logical blocks.
    pub physical_blocks: u32,
    /// ANA group, from 1; 0 without ANA.
    pub ana_group: u32,
    /// Globally unique identifier, big-endian; 0 if unset.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier, big-endian; 0 if unset.
    pub eui64: [u8; 8],
    /// UUID, big-endian; 0 if unset.
    pub uuid: [u8; 16],
}

impl ServedNamespace {
    /// A device as a namespace, without identifiers. `None` if its logical block is not 512 to 4096 bytes.
    pub fn new(nsid: u32, device: u16, info: &DeviceInfo) -> Option<ServedNamespace> {
        let block = info.limits.logical_block_bytes;
        if !block.is_power_of_two() {
            return None;
        }
        let block_shift = block.trailing_zeros() as u8;
        if !(LbaFormat { block_shift, ..LbaFormat::default() }).is_usable() {
            return None;
        }
        let blocks = info.capacity_sectors / (u64::from(block) / SECTOR_BYTES);
        Some(ServedNamespace {
            format: NamespaceFormat { nsid, blocks, block_shift, read_only: info.read_only },
            device,
            has_cache: info.volatile_cache,
            can_deallocate: info.limits.discard_sectors_max > 0,
            can_write_zeroes: info.limits.write_zeroes_sectors_max > 0,
            deallocate_blocks: info.limits.discard_granularity_bytes / block,
            physical_blocks: info.limits.physical_block_bytes / block,
            ..ServedNamespace::default()
        })
    }

    /// Identify data of the namespace (CNS 00h).
    pub(crate) fn identify(&self) -> IdentifyNamespace {
        let NamespaceFormat { blocks, block_shift, read_only, .. } = self.format;
        let zero_based = |blocks: u32| u16::try_from(blocks.max(1) - 1).unwrap_or(u16::MAX);
        let mut data = IdentifyNamespace {
            blocks,
            capacity: blocks,
            used: blocks,
            // The optimal sizes are valid.
            features: 1 << 4,
            // The content of deallocated blocks is unspecified (DLFEAT 0); Write Zeroes may deallocate.
            deallocate_features: 1 << 3,
            write_granularity: zero_based(self.physical_blocks),
            write_alignment: zero_based(self.physical_blocks),
            deallocate_granularity: zero_based(self.deallocate_blocks),
            deallocate_alignment: zero_based(self.deallocate_blocks),
            attributes: u8::from(read_only),
            ana_group: self.ana_group,
            nguid: self.nguid,
            eui64: self.eui64,
            ..IdentifyNamespace::default()
        };
        data.set_lba_format(0, LbaFormat { block_shift, ..LbaFormat::default() });
        data
    }

    /// Identification descriptors (CNS 03h).
    pub(crate) fn descriptors(&self, bytes: &mut [u8; IDENTIFY_BYTES]) {
        let mut at = 0;
        let mut put = |kind: u8, value: &[u8]| {
            (bytes[at], bytes[at + 1]) = (kind, value.len() as u8);
            bytes[at + 4..at + 4 + value.len()].copy_from_slice(value);
            at += 4 + value.len();
        };
        for (kind, value) in
            [(descriptor::EUI64, &self.eui64[..]), (descriptor::NGUID, &self.nguid), (descriptor::UUID, &self.uuid)]
        {
            if value.iter().any(|byte| *byte != 0) {
                put(kind, value);
            }
        }
        // The NVM command set.
        put(descriptor::CSI, &[0]);
    }
}

/// The namespaces of a controller by identifier, from 1.
#[derive(Clone, Debug, Default)]
pub struct NamespaceTable {
    places: Vec<Option<ServedNamespace>>,
    /// Unset without ANA.
    ana: Option<Arc<AnaGroups>>,
}

impl NamespaceTable {
    /// Maximum namespaces: a list of identifiers is one page.
    pub const NAMESPACES_MAX: u32 = 1024;

    /// A table for this number of identifiers (NN), at least one.
    ///
    /// # Panics
    /// If there are more than [`NamespaceTable::NAMESPACES_MAX`].
    pub fn new(identifiers: u32) -> NamespaceTable {
        assert!((1..=NamespaceTable::NAMESPACES_MAX).contains(&identifiers), "{identifiers} namespaces");
        NamespaceTable { places: vec![None; identifiers as usize], ana: None }
    }

    /// The same with ANA: each namespace is in one of these groups.
    ///
    /// # Panics
    /// If a namespace has no group.
    #[must_use]
    pub fn with_ana(self, groups: Arc<AnaGroups>) -> NamespaceTable {
        let is_group = |namespace: &ServedNamespace| (1..=AnaGroups::GROUPS_MAX).contains(&namespace.ana_group);
        assert!(self.iter().all(is_group), "a namespace without a group");
        NamespaceTable { ana: Some(groups), ..self }
    }

    /// The groups of a controller with ANA.
    pub(crate) fn ana(&self) -> Option<&Arc<AnaGroups>> {
        self.ana.as_ref()
    }

    /// Sets a namespace, or removes the one of this identifier.
    ///
    /// # Panics
    /// If the identifier is out of range.
    pub fn set(&mut self, nsid: u32, namespace: Option<ServedNamespace>) {
        assert!(namespace.as_ref().is_none_or(|namespace| namespace.format.nsid == nsid), "namespace {nsid}");
        self.places[nsid as usize - 1] = namespace;
    }

    /// Maximum valid identifier (NN).
    pub fn identifiers(&self) -> u32 {
        self.places.len() as u32
    }

    /// All active namespaces, in the order of their identifiers.
    pub fn iter(&self) -> impl Iterator<Item = &ServedNamespace> {
        self.places.iter().flatten()
    }

    /// The namespace of an identifier.
    ///
    /// # Errors
    /// Invalid Namespace or Format for an invalid identifier (zero, or above NN); Invalid Field for an inactive one.
    #[inline]
    pub fn find(&self, nsid: u32) -> Result<&ServedNamespace, NvmeStatus> {
        let place = (nsid as usize).checked_sub(1).and_then(|place| self.places.get(place));
        let place = place.ok_or(NvmeStatus::INVALID_NAMESPACE.with_dnr())?;
        place.as_ref().ok_or(NvmeStatus::INVALID_FIELD.with_dnr())
    }

    /// The namespace of an identifier, for I/O.
    ///
    /// # Errors
    /// As [`NamespaceTable::find`]; a path error if the namespace is not accessible by this port.
    #[inline]
    pub fn find_accessible(&self, nsid: u32) -> Result<&ServedNamespace, NvmeStatus> {
        let namespace = self.find(nsid)?;
        self.ana.as_ref().map_or(Ok(()), |groups| groups.check(namespace.ana_group))?;
        Ok(namespace)
    }

    /// Whether all namespaces are accessible by this port.
    ///
    /// # Errors
    /// The path error of the first one that is not.
    pub fn check_accessible(&self) -> Result<(), NvmeStatus> {
        let check = |groups: &AnaGroups| self.iter().try_for_each(|namespace| groups.check(namespace.ana_group));
        self.ana.as_deref().map_or(Ok(()), check)
    }
}
