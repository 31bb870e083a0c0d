//! The bits of controller data.

use super::{BitField, BitMeaning, BitTable, BitsShown, choice, field, reserved, support, support_by, value};

/// Bits of SGLS that say that SGLs are supported.
const SGLS_SUPPORTED: u32 = 3;

/// Bits of controller data.
pub const CONTROLLER_BITS: &BitTable = &[
    (
        "cmic",
        &[
            reserved("  [7:4] : "),
            choice("  [3:3] : ", &["ANA not supported", "ANA supported"]),
            choice("  [2:2] : ", &["PCI", "SR-IOV"]),
            choice("  [1:1] : ", &["Single Controller", "Multi Controller"]),
            choice("  [0:0] : ", &["Single Port", "Multi Port"]),
        ],
    ),
    (
        "oaes",
        &[
            support("  [31:31] : ", "Discovery Log Change Notice"),
            reserved("  [30:28] : "),
            support("  [27:27] : ", "Zone Descriptor Changed Notices"),
            reserved("  [26:20] : "),
            support("  [19:19] : ", "Allocated Namespace Attribute Notices"),
            reserved("  [18:18] : "),
            support("  [17:17] : ", "Reachability Groups Change Notices"),
            support("  [16:16] : ", "Temperature Threshold Hysteresis Recovery"),
            support("  [15:15] : ", "Normal NSS Shutdown Event"),
            support("  [14:14] : ", "Endurance Group Event Aggregate Log Page Change Notice"),
            support("  [13:13] : ", "LBA Status Information Notices"),
            support("  [12:12] : ", "Predictable Latency Event Aggregate Log Change Notices"),
            support("  [11:11] : ", "Asymmetric Namespace Access Change Notices"),
            reserved("  [10:10] : "),
            support("  [9:9] : ", "Firmware Activation Notices"),
            support("  [8:8] : ", "Namespace Attribute Changed Event"),
            reserved("  [7:0] : "),
        ],
    ),
    (
        "ctratt",
        &[
            reserved(" [31:20] : "),
            support("  [19:19] : ", "Flexible Data Placement"),
            support("  [18:18] : ", "Reservations and Host Identifier Interaction"),
            support("  [17:17] : ", "HMB Restrict Non-Operational Power State Access"),
            support("  [16:16] : ", "MDTS and Size Limits Exclude Metadata"),
            support("  [15:15] : ", "Extended LBA Formats"),
            support("  [14:14] : ", "Delete NVM Set"),
            support("  [13:13] : ", "Delete Endurance Group"),
            support("  [12:12] : ", "Variable Capacity Management"),
            support("  [11:11] : ", "Fixed Capacity Management"),
            support("  [10:10] : ", "Multi Domain Subsystem"),
            support("  [9:9] : ", "UUID List"),
            support("  [8:8] : ", "SQ Associations"),
            support("  [7:7] : ", "Namespace Granularity"),
            support("  [6:6] : ", "Traffic Based Keep Alive"),
            support("  [5:5] : ", "Predictable Latency Mode"),
            support("  [4:4] : ", "Endurance Groups"),
            support("  [3:3] : ", "Read Recovery Levels"),
            support("  [2:2] : ", "NVM Sets"),
            support("  [1:1] : ", "Non-Operational Power State Permissive"),
            support("  [0:0] : ", "128-bit Host Identifier"),
        ],
    ),
    (
        "bpcap",
        &[
            reserved(" [7:3] : "),
            support("  [2:2] : ", "Set Features Boot Partition Write Protection"),
            choice(
                "  [1:0] : ",
                &[
                    "RPMB Boot Partition Write Protection Support Not Specified",
                    "RPMB Boot Partition Write Protection Not Supported",
                    "RPMB Boot Partition Write Protection Supported",
                    "RPMB Boot Partition Write Protection Reserved",
                ],
            ),
        ],
    ),
    (
        "plsi",
        &[
            reserved(" [7:2] : "),
            support("  [1:1] : ", "Power Loss Signaling with Forced Quiescence"),
            support("  [0:0] : ", "Power Loss Signaling with Emergency Power Fail"),
        ],
    ),
    (
        "cntrltype",
        &[
            value("  [7:2] : ", "Reserved"),
            choice(
                "  [1:0] : ",
                &[
                    "Controller type not reported",
                    "I/O Controller",
                    "Discovery Controller",
                    "Administrative Controller",
                ],
            ),
        ],
    ),
    (
        "crcap",
        &[
            reserved(" [7:2] : "),
            choice(
                "  [1:1] : ",
                &[
                    "RGRPID may change while the namespace is attached to any controller.",
                    "RGRPID does not change while the namespace is attached to any controller.",
                ],
            ),
            support("  [0:0] : ", "Reachability Reporting"),
        ],
    ),
    (
        "nvmsr",
        &[
            reserved(" [7:2] : "),
            choice("  [1:1] : ", &["NVM subsystem Not part of an Enclosure", "NVM subsystem part of an Enclosure"]),
            choice(
                "  [0:0] : ",
                &["NVM subsystem Not part of a Storage Device", "NVM subsystem part of a Storage Device"],
            ),
        ],
    ),
    (
        "vwci",
        &[
            choice(
                "  [7:7] : ",
                &["VPD Write Cycles Remaining field is Not valid.", "VPD Write Cycles Remaining field is valid."],
            ),
            value("  [6:0] : ", "VPD Write Cycles Remaining"),
        ],
    ),
    (
        "mec",
        &[
            reserved(" [7:2] : "),
            choice(
                "  [1:1] : ",
                &[
                    "NVM subsystem Not contains a Management Endpoint on a PCIe port",
                    "NVM subsystem contains a Management Endpoint on a PCIe port",
                ],
            ),
            choice(
                "  [0:0] : ",
                &[
                    "NVM subsystem Not contains a Management Endpoint on an SMBus/I2C port",
                    "NVM subsystem contains a Management Endpoint on an SMBus/I2C port",
                ],
            ),
        ],
    ),
    (
        "oacs",
        &[
            reserved(" [15:12] : "),
            support("  [11:11] : ", "Host Managed Live Migration"),
            support("  [10:10] : ", "Lockdown Command and Feature"),
            support("  [9:9] : ", "Get LBA Status Capability"),
            support("  [8:8] : ", "Doorbell Buffer Config"),
            support("  [7:7] : ", "Virtualization Management"),
            support("  [6:6] : ", "NVMe-MI Send and Receive"),
            support("  [5:5] : ", "Directives"),
            support("  [4:4] : ", "Device Self-test"),
            support("  [3:3] : ", "NS Management and Attachment"),
            support("  [2:2] : ", "FW Commit and Download"),
            support("  [1:1] : ", "Format NVM"),
            support("  [0:0] : ", "Security Send and Receive"),
        ],
    ),
    (
        "frmw",
        &[
            reserved("  [7:6] : "),
            support("  [5:5] : ", "Multiple FW or Boot Update Detection"),
            support("  [4:4] : ", "Firmware Activate Without Reset"),
            value("  [3:1] : ", "Number of Firmware Slots"),
            choice("  [0:0] : ", &["Firmware Slot 1 Read/Write", "Firmware Slot 1 Read-Only"]),
        ],
    ),
    (
        "lpa",
        &[
            reserved("  [7:7] : "),
            support("  [6:6] : ", "Telemetry Log Data Area 4"),
            support("  [5:5] : ", "LID 0x0, Scope of each command in LID 0x5, 0x12, 0x13"),
            support("  [4:4] : ", "Persistent Event log"),
            support("  [3:3] : ", "Telemetry host/controller initiated log page"),
            support("  [2:2] : ", "Extended data for Get Log Page"),
            support("  [1:1] : ", "Command Effects Log Page"),
            support("  [0:0] : ", "SMART/Health Log Page per NS"),
        ],
    ),
    ("elpe", &[field("  [7:0] : ", BitMeaning::ZeroBased("Error Log Page Entries (ELPE)"))]),
    ("npss", &[field("  [7:0] : ", BitMeaning::ZeroBased("Number of Power States Support (NPSS)"))]),
    (
        "avscc",
        &[
            reserved("  [7:1] : "),
            choice(
                "  [0:0] : ",
                &[
                    "Admin Vendor Specific Commands uses Vendor Specific Format",
                    "Admin Vendor Specific Commands uses NVMe Format",
                ],
            ),
        ],
    ),
    ("apsta", &[reserved("  [7:1] : "), support("  [0:0] : ", "Autonomous Power State Transitions")]),
    ("wctemp", &[field(" [15:0] : ", BitMeaning::Temperature("Warning Composite Temperature Threshold (WCTEMP)"))]),
    ("cctemp", &[field(" [15:0] : ", BitMeaning::Temperature("Critical Composite Temperature Threshold (CCTEMP)"))]),
    ("tnvmcap", &[field("[127:0] : ", BitMeaning::Capacity("Total NVM Capacity (TNVMCAP)"))]),
    ("unvmcap", &[field("[127:0] : ", BitMeaning::Capacity("Unallocated NVM Capacity (UNVMCAP)"))]),
    (
        "rpmbs",
        &[
            value(" [31:24]: ", "Access Size"),
            value(" [23:16]: ", "Total Size"),
            reserved(" [15:6] : "),
            value("  [5:3] : ", "Authentication Method"),
            value("  [2:0] : ", "Number of RPMB Units"),
        ],
    ),
    (
        "dsto",
        &[
            reserved("  [7:2] : "),
            support("  [1:1] : ", "Host-Initiated Refresh capability"),
            choice(
                "  [0:0] : ",
                &[
                    "NVM subsystem supports one device self-test operation per controller at a time",
                    "NVM subsystem supports only one device self-test operation in progress at a time",
                ],
            ),
        ],
    ),
    ("hctma", &[reserved(" [15:1] : "), support("  [0:0] : ", "Host Controlled Thermal Management")]),
    ("mntmt", &[field(" [15:0] : ", BitMeaning::Temperature("Minimum Thermal Management Temperature (MNTMT)"))]),
    ("mxtmt", &[field(" [15:0] : ", BitMeaning::Temperature("Maximum Thermal Management Temperature (MXTMT)"))]),
    (
        "sanicap",
        &[
            choice(
                "  [31:30] : ",
                &[
                    "Additional media modification after sanitize operation completes successfully is not defined",
                    "Media is not additionally modified after sanitize operation completes successfully",
                    "Media is additionally modified after sanitize operation completes successfully",
                    "Reserved",
                ],
            ),
            choice(
                "  [29:29] : ",
                &[
                    "No-Deallocate After Sanitize bit in Sanitize command Supported",
                    "No-Deallocate After Sanitize bit in Sanitize command Not Supported",
                ],
            ),
            reserved("  [28:4] : "),
            support("  [3:3] : ", "Media Verification and Post-Verification Deallocation state"),
            support("  [2:2] : ", "Overwrite Sanitize Operation"),
            support("  [1:1] : ", "Block Erase Sanitize Operation"),
            support("  [0:0] : ", "Crypto Erase Sanitize Operation"),
        ],
    ),
    (
        "anacap",
        &[
            support("  [7:7] : ", "Non-zero group ID"),
            choice("  [6:6] : ", &["Group ID does change", "Group ID does not change"]),
            reserved(" [5:5] : "),
            support("  [4:4] : ", "ANA Change state"),
            support("  [3:3] : ", "ANA Persistent Loss state"),
            support("  [2:2] : ", "ANA Inaccessible state"),
            support("  [1:1] : ", "ANA Non-optimized state"),
            support("  [0:0] : ", "ANA Optimized state"),
        ],
    ),
    (
        "kpioc",
        &[
            reserved(" [7:2] : "),
            choice(
                "  [1:1] : ",
                &[
                    "Key Per I/O capability Not apply to all namespaces",
                    "Key Per I/O capability applies to all namespaces",
                ],
            ),
            support("  [0:0] : ", "Key Per I/O capability"),
        ],
    ),
    ("tmpthha", &[reserved("  [7:3] : "), value("  [2:0] : ", "Temperature Threshold Maximum Hysteresis")]),
    (
        "sqes",
        &[
            field("  [7:4] : ", BitMeaning::Power("Max SQ Entry Size")),
            field("  [3:0] : ", BitMeaning::Power("Min SQ Entry Size")),
        ],
    ),
    (
        "cqes",
        &[
            field("  [7:4] : ", BitMeaning::Power("Max CQ Entry Size")),
            field("  [3:0] : ", BitMeaning::Power("Min CQ Entry Size")),
        ],
    ),
    (
        "oncs",
        &[
            reserved("  [15:13] : "),
            support("  [12:12] : ", "Namespace Zeroes"),
            support("  [11:11] : ", "Maximum Write Zeroes with Deallocate"),
            support("  [10:10] : ", "All Fast Copy"),
            support("  [9:9] : ", "Copy Single Atomicity"),
            support("  [8:8] : ", "Copy"),
            support("  [7:7] : ", "Verify"),
            support("  [6:6] : ", "Timestamp"),
            support("  [5:5] : ", "Reservations"),
            support("  [4:4] : ", "Save and Select"),
            support("  [3:3] : ", "Write Zeroes"),
            support("  [2:2] : ", "Data Set Management"),
            support("  [1:1] : ", "Write Uncorrectable"),
            support("  [0:0] : ", "Compare"),
        ],
    ),
    ("fuses", &[reserved(" [15:1] : "), support("  [0:0] : ", "Fused Compare and Write")]),
    (
        "fna",
        &[
            reserved("  [7:4] : "),
            choice(
                "  [3:3] : ",
                &[
                    "Format NVM Broadcast NSID (FFFFFFFFh) Supported",
                    "Format NVM Broadcast NSID (FFFFFFFFh) Not Supported",
                ],
            ),
            choice(
                "  [2:2] : ",
                &[
                    "Crypto Erase Not Supported as part of Secure Erase",
                    "Crypto Erase Supported as part of Secure Erase",
                ],
            ),
            choice(
                "  [1:1] : ",
                &["Crypto Erase Applies to Single Namespace(s)", "Crypto Erase Applies to All Namespace(s)"],
            ),
            choice("  [0:0] : ", &["Format Applies to Single Namespace(s)", "Format Applies to All Namespace(s)"]),
        ],
    ),
    (
        "vwc",
        &[
            reserved("  [7:3] : "),
            choice(
                "  [2:1] : ",
                &[
                    "Support for the NSID field set to FFFFFFFFh is not indicated",
                    "Reserved",
                    "The Flush command does not support NSID set to FFFFFFFFh",
                    "The Flush command supports NSID set to FFFFFFFFh",
                ],
            ),
            choice("  [0:0] : ", &["Volatile Write Cache Not Present", "Volatile Write Cache Present"]),
        ],
    ),
    (
        "icsvscc",
        &[
            reserved("  [7:1] : "),
            choice(
                "  [0:0] : ",
                &[
                    "NVM Vendor Specific Commands uses Vendor Specific Format",
                    "NVM Vendor Specific Commands uses NVMe Format",
                ],
            ),
        ],
    ),
    (
        "nwpc",
        &[
            reserved("  [7:3] : "),
            support("  [2:2] : ", "Permanent Write Protect"),
            support("  [1:1] : ", "Write Protect Until Power Supply"),
            support("  [0:0] : ", "No Write Protect and Write Protect Namespace"),
        ],
    ),
    (
        "ocfs",
        &[
            reserved("  [15:4] : "),
            support("  [3:3] : ", "Controller Copy Format 3h"),
            support("  [2:2] : ", "Controller Copy Format 2h"),
            support("  [1:1] : ", "Controller Copy Format 1h"),
            support("  [0:0] : ", "Controller Copy Format 0h"),
        ],
    ),
    (
        "sgls",
        &[
            reserved(" [31:22]: "),
            support_by(SGLS_SUPPORTED, " [21:21]: ", "Transport SGL Data Block Descriptor"),
            support_by(SGLS_SUPPORTED, " [20:20]: ", "Address Offsets"),
            support_by(SGLS_SUPPORTED, " [19:19]: ", "Metadata Pointer Containing SGL Descriptor is"),
            support_by(SGLS_SUPPORTED, " [18:18]: ", "SGL Length Larger than Buffer"),
            support_by(SGLS_SUPPORTED, " [17:17]: ", "Byte-Aligned Contig. MD Buffer"),
            support_by(SGLS_SUPPORTED, " [16:16]: ", "SGL Bit-Bucket"),
            value(" [15:8] : ", "SGL Descriptor Threshold"),
            reserved(" [7:3] : "),
            support_by(SGLS_SUPPORTED, "  [2:2] : ", "Keyed SGL Data Block descriptor"),
            // The alignment differs.
            BitField { shown: BitsShown::Zero, ..value(" [1:0]  : ", "Scatter-Gather Lists Not Supported") },
            BitField {
                shown: BitsShown::NotZeroOr(0),
                ..choice(
                    "  [1:0] : ",
                    &[
                        "Scatter-Gather Lists Not Supported",
                        "Scatter-Gather Lists Supported. No Dword alignment required.",
                        "Scatter-Gather Lists Supported. Dword alignment required.",
                        "Reserved",
                    ],
                )
            },
        ],
    ),
    (
        "trattr",
        &[
            reserved(" [7:3] : "),
            value("  [2:2] : ", "Memory Range Tracking Length Limit"),
            support("  [1:1] : ", "Tracking User Data Changes"),
            support("  [0:0] : ", "Track Host Memory Changes"),
        ],
    ),
    (
        "fcatt",
        &[reserved("  [7:1] : "), choice("  [0:0] : ", &["Dynamic Controller Model", "Static Controller Model"])],
    ),
    (
        "ofcs",
        &[
            reserved("  [15:1] : "),
            choice("  [0:0] : ", &["Disconnect command Not Supported", "Disconnect command  Supported"]),
        ],
    ),
];
