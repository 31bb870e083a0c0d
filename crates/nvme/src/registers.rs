//! Controller registers: offsets, fields, and the positions of doorbells.
//!
//! Values only; the owner of the mapping accesses the registers.

/// Controller capabilities, 64 bits.
pub const CAP: usize = 0x00;
/// Version, 32 bits: major << 16, minor << 8, tertiary.
pub const VS: usize = 0x08;
/// Interrupt mask set, for pin interrupts.
pub const INTMS: usize = 0x0c;
/// Interrupt mask clear, for pin interrupts.
pub const INTMC: usize = 0x10;
/// Controller configuration, 32 bits.
pub const CC: usize = 0x14;
/// Controller status, 32 bits.
pub const CSTS: usize = 0x1c;
/// NVM subsystem reset, 32 bits.
pub const NSSR: usize = 0x20;
/// Value written to [`NSSR`] to reset the subsystem: "NVMe".
pub const NSSR_RESET: u32 = 0x4e56_4d65;
/// Admin queue attributes, 32 bits.
pub const AQA: usize = 0x24;
/// Address of the admin submission queue, 64 bits, page-aligned.
pub const ASQ: usize = 0x28;
/// Address of the admin completion queue, 64 bits, page-aligned.
pub const ACQ: usize = 0x30;
/// Controller memory buffer location, 32 bits.
pub const CMBLOC: usize = 0x38;
/// Controller memory buffer size, 32 bits.
pub const CMBSZ: usize = 0x3c;
/// Controller ready timeouts, 32 bits.
pub const CRTO: usize = 0x68;
/// First doorbell.
pub const DOORBELLS: usize = 0x1000;

/// Offset of the tail doorbell of submission queue `qid` from the first doorbell. `stride` is CAP.DSTRD. The same
/// offset holds in the shadow doorbell and event index pages.
pub const fn sq_doorbell(qid: u16, stride: u8) -> usize {
    (2 * qid as usize) * (4 << stride)
}

/// Offset of the head doorbell of completion queue `qid` from the first doorbell.
pub const fn cq_doorbell(qid: u16, stride: u8) -> usize {
    (2 * qid as usize + 1) * (4 << stride)
}

/// CAP, in fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Maximum entries of an I/O queue (MQES + 1).
    pub queue_entries_max: u32,
    /// Whether queues must be physically contiguous (CQR).
    pub contiguous_queues: bool,
    /// Arbitration mechanisms besides round robin (AMS).
    pub arbitration: u8,
    /// Maximum time to become ready or idle, in units of 500 ms (TO).
    pub timeout_500ms: u8,
    /// Distance of doorbells: 4 << stride bytes (DSTRD).
    pub doorbell_stride: u8,
    /// Whether [`NSSR`] is supported (NSSRS).
    pub subsystem_reset: bool,
    /// Command sets (CSS): bit 0 NVM, bit 6 sets selected by CSI, bit 7 none.
    pub command_sets: u8,
    /// Minimum memory page: 4096 << value (MPSMIN).
    pub page_min: u8,
    /// Maximum memory page: 4096 << value (MPSMAX).
    pub page_max: u8,
    /// Whether there is a controller memory buffer (CMBS).
    pub memory_buffer: bool,
    /// Ready modes (CRMS): bit 0 with media, bit 1 independent of media.
    pub ready_modes: u8,
}

impl Capabilities {
    /// Decodes the register.
    pub const fn from_bits(bits: u64) -> Capabilities {
        Capabilities {
            queue_entries_max: (bits & 0xffff) as u32 + 1,
            contiguous_queues: bits >> 16 & 1 == 1,
            arbitration: (bits >> 17 & 3) as u8,
            timeout_500ms: (bits >> 24) as u8,
            doorbell_stride: (bits >> 32 & 0xf) as u8,
            subsystem_reset: bits >> 36 & 1 == 1,
            command_sets: (bits >> 37) as u8,
            page_min: (bits >> 48 & 0xf) as u8,
            page_max: (bits >> 52 & 0xf) as u8,
            memory_buffer: bits >> 57 & 1 == 1,
            ready_modes: (bits >> 59 & 3) as u8,
        }
    }

    /// Encodes the register. Values beyond the width of their field are truncated.
    pub const fn bits(self) -> u64 {
        (self.queue_entries_max.saturating_sub(1) & 0xffff) as u64
            | (self.contiguous_queues as u64) << 16
            | (self.arbitration as u64 & 3) << 17
            | (self.timeout_500ms as u64) << 24
            | (self.doorbell_stride as u64 & 0xf) << 32
            | (self.subsystem_reset as u64) << 36
            | (self.command_sets as u64) << 37
            | (self.page_min as u64 & 0xf) << 48
            | (self.page_max as u64 & 0xf) << 52
            | (self.memory_buffer as u64) << 57
            | (self.ready_modes as u64 & 3) << 59
    }
}

/// CC, in fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Whether the controller processes commands (EN).
    pub enabled: bool,
    /// Command set (CSS): 0 NVM, 6 all supported sets by CSI, 7 admin only.
    pub command_set: u8,
    /// Memory page: 4096 << value (MPS).
    pub page: u8,
    /// Arbitration mechanism (AMS): 0 round robin.
    pub arbitration: u8,
    /// Shutdown notification (SHN): 1 normal, 2 abrupt.
    pub shutdown: u8,
    /// Size of an SQE as a power of two (IOSQES): 6.
    pub sq_entry_shift: u8,
    /// Size of a CQE as a power of two (IOCQES): 4.
    pub cq_entry_shift: u8,
    /// Whether the controller becomes ready independent of media (CRIME).
    pub ready_independent: bool,
}

impl ControllerConfig {
    /// Decodes the register.
    pub const fn from_bits(bits: u32) -> ControllerConfig {
        ControllerConfig {
            enabled: bits & 1 == 1,
            command_set: (bits >> 4 & 7) as u8,
            page: (bits >> 7 & 0xf) as u8,
            arbitration: (bits >> 11 & 7) as u8,
            shutdown: (bits >> 14 & 3) as u8,
            sq_entry_shift: (bits >> 16 & 0xf) as u8,
            cq_entry_shift: (bits >> 20 & 0xf) as u8,
            ready_independent: bits >> 24 & 1 == 1,
        }
    }

    /// Encodes the register. Values beyond the width of their field are truncated.
    pub const fn bits(self) -> u32 {
        self.enabled as u32
            | (self.command_set as u32 & 7) << 4
            | (self.page as u32 & 0xf) << 7
            | (self.arbitration as u32 & 7) << 11
            | (self.shutdown as u32 & 3) << 14
            | (self.sq_entry_shift as u32 & 0xf) << 16
            | (self.cq_entry_shift as u32 & 0xf) << 20
            | (self.ready_independent as u32) << 24
    }
}

/// CSTS, in fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStatus {
    /// Commands are processed (RDY).
    pub ready: bool,
    /// Fatal error (CFS).
    pub fatal: bool,
    /// Shutdown status (SHST): 1 in progress, 2 complete.
    pub shutdown: u8,
    /// A subsystem reset occurred (NSSRO).
    pub subsystem_reset: bool,
    /// Processing is paused (PP).
    pub paused: bool,
}

impl ControllerStatus {
    /// Decodes the register; unset for all ones, which is read once the device is gone.
    pub const fn from_bits(bits: u32) -> Option<ControllerStatus> {
        if bits == u32::MAX {
            return None;
        }
        Some(ControllerStatus {
            ready: bits & 1 == 1,
            fatal: bits >> 1 & 1 == 1,
            shutdown: (bits >> 2 & 3) as u8,
            subsystem_reset: bits >> 4 & 1 == 1,
            paused: bits >> 5 & 1 == 1,
        })
    }

    /// Encodes the register.
    pub const fn bits(self) -> u32 {
        self.ready as u32
            | (self.fatal as u32) << 1
            | (self.shutdown as u32 & 3) << 2
            | (self.subsystem_reset as u32) << 4
            | (self.paused as u32) << 5
    }
}

/// CSTS.NSSRO: cleared by writing one.
pub const SUBSYSTEM_RESET: u32 = 1 << 4;
/// CSTS.SHST: a shutdown is running.
pub const SHUTDOWN_RUNNING: u8 = 1;
/// CSTS.SHST: a shutdown is complete.
pub const SHUTDOWN_COMPLETE: u8 = 2;

/// AQA for admin queues of these sizes, 1 to 4096 entries each.
pub const fn admin_queue_attributes(sq_entries: u16, cq_entries: u16) -> u32 {
    (sq_entries.saturating_sub(1) as u32 & 0xfff) | (cq_entries.saturating_sub(1) as u32 & 0xfff) << 16
}

/// Entries of the admin submission and completion queue, from AQA.
pub const fn admin_queue_entries(attributes: u32) -> (u16, u16) {
    ((attributes & 0xfff) as u16 + 1, (attributes >> 16 & 0xfff) as u16 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_are_where_the_stride_puts_them() {
        assert_eq!((DOORBELLS + sq_doorbell(0, 0), DOORBELLS + cq_doorbell(0, 0)), (0x1000, 0x1004));
        assert_eq!((DOORBELLS + sq_doorbell(3, 0), DOORBELLS + cq_doorbell(3, 0)), (0x1018, 0x101c));
        assert_eq!((DOORBELLS + sq_doorbell(3, 2), DOORBELLS + cq_doorbell(3, 2)), (0x1060, 0x1070));
    }

    #[test]
    fn each_field_of_a_register_has_its_own_bits() {
        let cap = |change: fn(&mut Capabilities)| {
            let mut cap = Capabilities { queue_entries_max: 1, ..Capabilities::default() };
            change(&mut cap);
            assert_eq!(Capabilities::from_bits(cap.bits()), cap);
            cap.bits()
        };
        assert_eq!(cap(|cap| cap.queue_entries_max = 1 << 16), 0xffff);
        assert_eq!(cap(|cap| cap.contiguous_queues = true), 1 << 16);
        assert_eq!(cap(|cap| cap.arbitration = 3), 3 << 17);
        assert_eq!(cap(|cap| cap.timeout_500ms = 255), 0xff << 24);
        assert_eq!(cap(|cap| cap.doorbell_stride = 15), 0xf << 32);
        assert_eq!(cap(|cap| cap.subsystem_reset = true), 1 << 36);
        assert_eq!(cap(|cap| cap.command_sets = 0x41), 1 << 37 | 1 << 43);
        assert_eq!(cap(|cap| cap.page_min = 15), 0xf << 48);
        assert_eq!(cap(|cap| cap.page_max = 15), 0xf << 52);
        assert_eq!(cap(|cap| cap.memory_buffer = true), 1 << 57);
        assert_eq!(cap(|cap| cap.ready_modes = 3), 3 << 59);

        let cc = |change: fn(&mut ControllerConfig)| {
            let mut cc = ControllerConfig::default();
            change(&mut cc);
            assert_eq!(ControllerConfig::from_bits(cc.bits()), cc);
            cc.bits()
        };
        assert_eq!(cc(|cc| cc.enabled = true), 1);
        assert_eq!(cc(|cc| cc.command_set = 7), 7 << 4);
        assert_eq!(cc(|cc| cc.page = 15), 0xf << 7);
        assert_eq!(cc(|cc| cc.arbitration = 7), 7 << 11);
        assert_eq!(cc(|cc| cc.shutdown = 2), 2 << 14);
        assert_eq!(cc(|cc| cc.sq_entry_shift = 6), 6 << 16);
        assert_eq!(cc(|cc| cc.cq_entry_shift = 4), 4 << 20);
        assert_eq!(cc(|cc| cc.ready_independent = true), 1 << 24);

        let csts = |change: fn(&mut ControllerStatus)| {
            let mut csts = ControllerStatus::default();
            change(&mut csts);
            assert_eq!(ControllerStatus::from_bits(csts.bits()), Some(csts));
            csts.bits()
        };
        assert_eq!(csts(|csts| csts.ready = true), 1);
        assert_eq!(csts(|csts| csts.fatal = true), 2);
        assert_eq!(csts(|csts| csts.shutdown = 2), 8);
        assert_eq!(csts(|csts| csts.subsystem_reset = true), 1 << 4);
        assert_eq!(csts(|csts| csts.paused = true), 1 << 5);
        assert_eq!(ControllerStatus::from_bits(u32::MAX), None);

        assert_eq!(admin_queue_attributes(32, 32), 31 | 31 << 16);
        assert_eq!(admin_queue_entries(admin_queue_attributes(4096, 2)), (4096, 2));
    }
}
