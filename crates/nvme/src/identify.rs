//! Identify data: the fields that a block driver uses, by their byte offsets.
//!
//! Both sides: the host parses a controller's data, a controller writes its own. Fields not listed are ignored and
//! written as zero.

use blkyard_mq::SECTOR_BYTES;

use crate::SQE_BYTES;

/// Bytes of every identify data structure.
pub const IDENTIFY_BYTES: usize = 4096;

/// A field that is encoded at a byte offset.
trait IdentifyField: Sized {
    fn get(bytes: &[u8]) -> Self;
    fn put(&self, bytes: &mut [u8]);
}

macro_rules! integers {
    ($($int:ty),+) => {$(
        impl IdentifyField for $int {
            fn get(bytes: &[u8]) -> $int {
                let mut value = [0; size_of::<$int>()];
                value.copy_from_slice(&bytes[..size_of::<$int>()]);
                <$int>::from_le_bytes(value)
            }

            fn put(&self, bytes: &mut [u8]) {
                bytes[..size_of::<$int>()].copy_from_slice(&self.to_le_bytes());
            }
        }
    )+};
}
integers!(u8, u16, u32, u64);

impl<const N: usize> IdentifyField for [u8; N] {
    fn get(bytes: &[u8]) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&bytes[..N]);
        value
    }

    fn put(&self, bytes: &mut [u8]) {
        bytes[..N].copy_from_slice(self);
    }
}

/// Defines a structure with fields at byte offsets of identify data.
macro_rules! identify {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $kind:ty = $at:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$doc])* pub $field: $kind,)+ }

        impl $name {
            /// Byte offset and length of each field.
            #[cfg(test)]
            const FIELDS: &'static [(&'static str, usize, usize)] =
                &[$((stringify!($field), $at, size_of::<$kind>()),)+];

            /// Decodes identify data.
            pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> $name {
                $name { $($field: IdentifyField::get(&bytes[$at..]),)+ }
            }

            /// Encodes identify data.
            pub fn write(&self, bytes: &mut [u8; IDENTIFY_BYTES]) {
                bytes.fill(0);
                $(IdentifyField::put(&self.$field, &mut bytes[$at..]);)+
            }
        }

        impl Default for $name {
            fn default() -> $name {
                $name::parse(&[0; IDENTIFY_BYTES])
            }
        }
    };
}

identify! {
    /// A controller (CNS 01h).
    IdentifyController {
        /// PCI vendor id (VID).
        vendor: u16 = 0,
        /// PCI subsystem vendor id (SSVID).
        subsystem_vendor: u16 = 2,
        /// Serial number, ASCII, padded with blanks (SN).
        serial: [u8; 20] = 4,
        /// Model number, ASCII, padded with blanks (MN).
        model: [u8; 40] = 24,
        /// Firmware revision, ASCII, padded with blanks (FR).
        firmware: [u8; 8] = 64,
        /// Several controllers (bit 1), asymmetric access (bit 3) (CMIC).
        multipath: u8 = 76,
        /// Maximum transfer: minimum page << value; zero for unlimited (MDTS).
        mdts: u8 = 77,
        /// Controller identifier (CNTLID).
        controller_id: u16 = 78,
        /// Version, as in the register (VER).
        version: u32 = 80,
        /// Latency of becoming ready after a power loss, us (RTD3R).
        resume_us: u32 = 84,
        /// Latency of entering shutdown, us (RTD3E).
        shutdown_us: u32 = 88,
        /// Asynchronous events (OAES).
        async_events: u32 = 92,
        /// Controller attributes (CTRATT): bit 6 keep-alive by traffic.
        attributes: u32 = 96,
        /// Controller type (CNTRLTYPE).
        controller_type: u8 = 111,
        /// First retry delay, 100 ms (CRDT1).
        retry_delay_1: u16 = 128,
        /// Second retry delay, 100 ms (CRDT2).
        retry_delay_2: u16 = 130,
        /// Third retry delay, 100 ms (CRDT3).
        retry_delay_3: u16 = 132,
        /// Controller instance uniquifier (CIU); zero for none.
        uniquifier: u8 = 135,
        /// Controller instance random number (CIRN); zero for none.
        random: u64 = 136,
        /// Optional admin commands (OACS): bit 3 namespace management, bit 8 shadow doorbells.
        admin_commands: u16 = 256,
        /// Maximum concurrent Abort commands, less one (ACL).
        abort_limit: u8 = 258,
        /// Maximum concurrent asynchronous event requests, less one (AERL).
        async_event_limit: u8 = 259,
        /// Firmware updates (FRMW): bit 0 slot 1 read-only, bits 1-3 number of slots.
        firmware_updates: u8 = 260,
        /// Log page attributes (LPA): bit 0 SMART by namespace, bit 1 commands supported and effects, bit 2 offsets.
        log_attributes: u8 = 261,
        /// Entries of the error log, less one (ELPE).
        error_log_entries: u8 = 262,
        /// Power states, less one (NPSS).
        power_states: u8 = 263,
        /// Autonomous power state transitions (APSTA).
        autonomous_power: u8 = 265,
        /// Warning temperature, K (WCTEMP).
        warning_kelvin: u16 = 266,
        /// Critical temperature, K (CCTEMP).
        critical_kelvin: u16 = 268,
        /// Preferred host memory buffer, 4 KiB (HMPRE).
        host_memory_preferred: u32 = 272,
        /// Minimum host memory buffer, 4 KiB (HMMIN).
        host_memory_min: u32 = 276,
        /// Granularity of the keep-alive timer, 100 ms (KAS).
        keep_alive: u16 = 320,
        /// Maximum ANA transition time, s (ANATT).
        ana_transition_s: u8 = 342,
        /// ANA capabilities (ANACAP).
        ana: u8 = 343,
        /// Maximum ANA group identifier (ANAGRPMAX).
        ana_group_max: u32 = 344,
        /// ANA groups (NANAGRPID).
        ana_groups: u32 = 348,
        /// Time that commands may still be executed after the keep-alive timer has expired, ms (CQT); zero if unknown.
        quiesce_ms: u16 = 386,
        /// SQE sizes as powers of two: required in bits 0-3, maximum in 4-7 (SQES).
        sq_entry_shifts: u8 = 512,
        /// CQE sizes as powers of two: required in bits 0-3, maximum in 4-7 (CQES).
        cq_entry_shifts: u8 = 513,
        /// Maximum outstanding commands, for fabrics (MAXCMD).
        commands_max: u16 = 514,
        /// Maximum namespace identifier (NN).
        namespaces: u32 = 516,
        /// Optional NVM commands (ONCS): bit 0 compare, bit 2 dataset management, bit 3 write zeroes, bit 4 save and
        /// select of features, bit 5 reservations, bit 6 timestamp, bit 7 verify.
        nvm_commands: u16 = 520,
        /// Volatile write cache (VWC): bit 0 present, bits 1-2 11b if a Flush may be for all namespaces.
        write_cache: u8 = 525,
        /// Atomic write unit, blocks, less one (AWUN).
        atomic_blocks: u16 = 526,
        /// Atomic write unit at power failure, blocks, less one (AWUPF).
        atomic_power_fail_blocks: u16 = 528,
        /// SGL support (SGLS): bits 0-1, 10b with dword granularity.
        sgl: u32 = 536,
        /// Maximum number of allowed namespaces (MNAN).
        namespaces_max: u32 = 540,
        /// NQN of the subsystem, UTF-8, ended by a zero byte (SUBNQN).
        subsystem: [u8; 256] = 768,
        /// Maximum command capsule, 16 bytes, for fabrics (IOCCSZ).
        command_capsule: u32 = 1792,
        /// Maximum response capsule, 16 bytes, for fabrics (IORCSZ).
        response_capsule: u32 = 1796,
        /// Offset of data in a capsule, 16 bytes, for fabrics (ICDOFF).
        capsule_data_offset: u16 = 1800,
        /// Fabrics controller attributes (FCATT): bit 0, the controllers are static.
        fabrics_attributes: u8 = 1802,
        /// Maximum SGL descriptors in a capsule, for fabrics (MSDBD).
        sgl_descriptors_max: u8 = 1803,
        /// Optional fabrics commands (OFCS): bit 0 Disconnect.
        fabrics_commands: u16 = 1804,
        /// Maximum concurrent Cross-Controller Reset commands, for fabrics (CCRL); zero without the command.
        cross_resets: u8 = 1807,
    }
}

impl IdentifyController {
    /// Offset of the power state descriptors.
    pub const POWER_STATES_AT: usize = 2048;
    /// Bytes of a power state descriptor.
    pub const POWER_STATE_BYTES: usize = 32;

    /// Whether any command restarts the keep-alive timer.
    pub fn keeps_alive_by_traffic(&self) -> bool {
        self.attributes & 1 << 6 != 0
    }

    /// Maximum transfer, bytes, with pages of 4096 << `page_min` bytes; `None` for unlimited.
    pub fn transfer_bytes_max(&self, page_min: u8) -> Option<u64> {
        let shift = 12 + u32::from(page_min) + u32::from(self.mdts);
        (self.mdts > 0).then(|| 1_u64.checked_shl(shift).unwrap_or(u64::MAX))
    }

    /// Whether Doorbell Buffer Config is supported.
    pub fn has_shadow_doorbells(&self) -> bool {
        self.admin_commands & 1 << 8 != 0
    }

    /// Maximum in-capsule data of I/O commands, bytes. Zero if it would not be right behind the command.
    pub fn in_capsule_bytes(&self) -> u32 {
        let capsule = if self.capsule_data_offset == 0 { self.command_capsule } else { 0 };
        capsule.saturating_mul(16).saturating_sub(SQE_BYTES as u32)
    }

    /// Whether SGLs are supported for I/O commands.
    pub fn has_sgl(&self) -> bool {
        matches!(self.sgl & 3, 1 | 2)
    }
}

identify! {
    /// A namespace (CNS 00h).
    IdentifyNamespace {
        /// Size, blocks (NSZE).
        blocks: u64 = 0,
        /// Maximum allocated blocks (NCAP). Zero if the namespace is inactive.
        capacity: u64 = 8,
        /// Allocated blocks (NUSE).
        used: u64 = 16,
        /// Features (NSFEAT): bit 4, the optimal sizes are valid.
        features: u8 = 24,
        /// LBA formats, less one (NLBAF).
        formats: u8 = 25,
        /// Current LBA format in bits 0-3; bit 4, metadata at the end of the data (FLBAS).
        format: u8 = 26,
        /// Metadata capabilities (MC).
        metadata: u8 = 27,
        /// Protection capabilities (DPC).
        protection: u8 = 28,
        /// Protection settings (DPS).
        protection_type: u8 = 29,
        /// Bit 0: shared by several controllers (NMIC).
        sharing: u8 = 30,
        /// Deallocation (DLFEAT): bits 0-2 value of deallocated blocks, bit 3 Write Zeroes may deallocate.
        deallocate_features: u8 = 33,
        /// Atomic write unit, blocks, less one (NAWUN).
        atomic_blocks: u16 = 34,
        /// Atomic write unit at power failure, blocks, less one (NAWUPF).
        atomic_power_fail_blocks: u16 = 36,
        /// Offset of the first atomic boundary, blocks (NABO).
        atomic_offset: u16 = 42,
        /// Boundary that I/O should not cross, blocks; 0 for none (NOIOB).
        optimal_boundary: u16 = 46,
        /// Preferred write granularity, blocks, less one (NPWG).
        write_granularity: u16 = 64,
        /// Preferred write alignment, blocks, less one (NPWA).
        write_alignment: u16 = 66,
        /// Preferred deallocate granularity, blocks, less one (NPDG).
        deallocate_granularity: u16 = 68,
        /// Preferred deallocate alignment, blocks, less one (NPDA).
        deallocate_alignment: u16 = 70,
        /// Optimal write size, blocks, less one (NOWS).
        optimal_write: u16 = 72,
        /// ANA group (ANAGRPID).
        ana_group: u32 = 92,
        /// Attributes (NSATTR): bit 0 write protected.
        attributes: u8 = 99,
        /// Globally unique identifier, big-endian (NGUID).
        nguid: [u8; 16] = 104,
        /// IEEE extended unique identifier, big-endian (EUI64).
        eui64: [u8; 8] = 120,
        /// The LBA formats (LBAF0 to LBAF15).
        lba_formats: [u8; 64] = 128,
    }
}

/// An LBA format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LbaFormat {
    /// Bytes of metadata for each block.
    pub metadata_bytes: u16,
    /// Size of a block as a power of two (LBADS).
    pub block_shift: u8,
    /// Relative performance, 0 best to 3.
    pub performance: u8,
}

impl LbaFormat {
    /// Minimum block, 512 bytes, as a power of two. Formats below it are unused.
    const BLOCK_SHIFT_MIN: u8 = 9;
    /// Maximum supported block, one page, as a power of two.
    const BLOCK_SHIFT_MAX: u8 = 12;

    /// Whether blocks are 512 bytes to one page, as the queue core requires.
    pub fn is_usable(self) -> bool {
        (LbaFormat::BLOCK_SHIFT_MIN..=LbaFormat::BLOCK_SHIFT_MAX).contains(&self.block_shift)
    }
}

impl IdentifyNamespace {
    /// Formats of a namespace with 16 formats, as before version 2.0.
    const FORMATS: u8 = 16;

    /// The LBA format of this index.
    pub fn lba_format(&self, index: u8) -> Option<LbaFormat> {
        let at = usize::from(index) * 4;
        let &[metadata_low, metadata_high, block_shift, performance] = self.lba_formats.get(at..at + 4)? else {
            return None;
        };
        Some(LbaFormat {
            metadata_bytes: u16::from_le_bytes([metadata_low, metadata_high]),
            block_shift,
            performance: performance & 3,
        })
    }

    /// Sets the LBA format of this index.
    ///
    /// # Panics
    /// If the index is out of range.
    pub fn set_lba_format(&mut self, index: u8, format: LbaFormat) {
        assert!(index < IdentifyNamespace::FORMATS, "LBA format {index}");
        let [low, high] = format.metadata_bytes.to_le_bytes();
        let at = usize::from(index) * 4;
        self.lba_formats[at..at + 4].copy_from_slice(&[low, high, format.block_shift, format.performance & 3]);
    }

    /// The LBA format in use, if valid.
    pub fn current_format(&self) -> Option<LbaFormat> {
        let index = self.format & 0xf;
        if index <= self.formats { self.lba_format(index) } else { None }
    }

    /// Size in sectors of 512 bytes; `None` if the namespace is inactive, or its format or size is unusable.
    pub fn capacity_sectors(&self) -> Option<u64> {
        let format = self.current_format().filter(|format| format.is_usable())?;
        let sectors = self.blocks.checked_mul((1 << format.block_shift) / SECTOR_BYTES)?;
        // The size in bytes must not overflow, either.
        (self.capacity > 0 && sectors.checked_mul(SECTOR_BYTES).is_some()).then_some(sectors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset and length of each field as the specification lists them, in its order.
    const CONTROLLER: &[(usize, usize)] = &[
        (0, 2),
        (2, 2),
        (4, 20),
        (24, 40),
        (64, 8),
        (76, 1),
        (77, 1),
        (78, 2),
        (80, 4),
        (84, 4),
        (88, 4),
        (92, 4),
        (96, 4),
        (111, 1),
        (128, 2),
        (130, 2),
        (132, 2),
        (135, 1),
        (136, 8),
        (256, 2),
        (258, 1),
        (259, 1),
        (260, 1),
        (261, 1),
        (262, 1),
        (263, 1),
        (265, 1),
        (266, 2),
        (268, 2),
        (272, 4),
        (276, 4),
        (320, 2),
        (342, 1),
        (343, 1),
        (344, 4),
        (348, 4),
        (386, 2),
        (512, 1),
        (513, 1),
        (514, 2),
        (516, 4),
        (520, 2),
        (525, 1),
        (526, 2),
        (528, 2),
        (536, 4),
        (540, 4),
        (768, 256),
        (1792, 4),
        (1796, 4),
        (1800, 2),
        (1802, 1),
        (1803, 1),
        (1804, 2),
        (1807, 1),
    ];
    const NAMESPACE: &[(usize, usize)] = &[
        (0, 8),
        (8, 8),
        (16, 8),
        (24, 1),
        (25, 1),
        (26, 1),
        (27, 1),
        (28, 1),
        (29, 1),
        (30, 1),
        (33, 1),
        (34, 2),
        (36, 2),
        (42, 2),
        (46, 2),
        (64, 2),
        (66, 2),
        (68, 2),
        (70, 2),
        (72, 2),
        (92, 4),
        (99, 1),
        (104, 16),
        (120, 8),
        (128, 64),
    ];

    #[test]
    fn fields_stand_where_the_specification_has_them() {
        for (fields, places) in [(IdentifyController::FIELDS, CONTROLLER), (IdentifyNamespace::FIELDS, NAMESPACE)] {
            let found: Vec<_> = fields.iter().map(|(_, at, len)| (*at, *len)).collect();
            assert_eq!(found, places);
            for pair in fields.windows(2) {
                assert!(pair[0].1 + pair[0].2 <= pair[1].1, "{} overlaps {}", pair[0].0, pair[1].0);
            }
        }
    }

    #[test]
    fn what_is_written_is_parsed_byte_for_byte() {
        let mut bytes = [0_u8; IDENTIFY_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = (at % 251) as u8;
        }
        let mut written = [0xff; IDENTIFY_BYTES];
        IdentifyController::parse(&bytes).write(&mut written);
        check(&bytes, &written, CONTROLLER);
        written.fill(0xff);
        IdentifyNamespace::parse(&bytes).write(&mut written);
        check(&bytes, &written, NAMESPACE);
    }

    fn check(bytes: &[u8], written: &[u8], fields: &[(usize, usize)]) {
        for (at, byte) in written.iter().enumerate() {
            let is_field = fields.iter().any(|(field, len)| (*field..field + len).contains(&at));
            assert_eq!(*byte, if is_field { bytes[at] } else { 0 }, "byte {at}");
        }
    }

    #[test]
    fn a_controller_says_what_it_can() {
        let mut controller = IdentifyController { mdts: 5, admin_commands: 1 << 8, ..Default::default() };
        assert_eq!(controller.transfer_bytes_max(0), Some(128 << 10));
        assert_eq!(controller.transfer_bytes_max(2), Some(512 << 10));
        assert!(controller.has_shadow_doorbells() && !controller.has_sgl());
        (controller.mdts, controller.sgl) = (0, 2);
        assert_eq!(controller.transfer_bytes_max(0), None);
        assert!(controller.has_sgl());
        assert_eq!(controller.in_capsule_bytes(), 0, "no fabrics");
        for (capsule, offset, bytes) in
            [(4, 0, 0), (3, 0, 0), (516, 0, 8192), (516, 1, 0), (u32::MAX, 0, u32::MAX - 64)]
        {
            (controller.command_capsule, controller.capsule_data_offset) = (capsule, offset);
            assert_eq!(controller.in_capsule_bytes(), bytes);
        }
        for mdts in [52, 60, 255] {
            controller.mdts = mdts;
            assert_eq!(controller.transfer_bytes_max(0), Some(u64::MAX), "an absurd limit is none");
        }
    }

    #[test]
    fn a_namespace_has_a_size_if_its_format_is_usable() {
        let mut namespace = IdentifyNamespace { blocks: 1000, capacity: 1000, formats: 1, ..Default::default() };
        assert_eq!(namespace.capacity_sectors(), None, "blocks of one byte");
        namespace.set_lba_format(1, LbaFormat { metadata_bytes: 8, block_shift: 12, performance: 2 });
        namespace.format = 1;
        assert_eq!(namespace.capacity_sectors(), Some(8000));
        assert_eq!(namespace.lba_formats[4..8], [8, 0, 12, 2]);
        for block_shift in [0, 8, 13, 63, 255] {
            namespace.set_lba_format(1, LbaFormat { block_shift, ..LbaFormat::default() });
            assert_eq!(namespace.capacity_sectors(), None, "blocks of 2^{block_shift} bytes");
        }
        namespace.set_lba_format(1, LbaFormat { block_shift: 9, ..LbaFormat::default() });
        assert_eq!(namespace.capacity_sectors(), Some(1000));
        namespace.format = 2;
        assert_eq!(namespace.capacity_sectors(), None, "a format that does not exist");
        (namespace.format, namespace.capacity) = (1, 0);
        assert_eq!(namespace.capacity_sectors(), None, "inactive");
        (namespace.capacity, namespace.blocks) = (1, u64::MAX / 512 + 1);
        assert_eq!(namespace.capacity_sectors(), None, "longer than bytes can be counted");
    }
}
