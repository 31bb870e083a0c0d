//! The bits of namespace data.

use super::{BitField, BitMeaning, BitTable, BitsShown, choice, reserved, support, value};

/// Bit of FPI that says that the indicator is supported.
const FPI_SUPPORTED: u32 = 1 << 7;

/// Bits of namespace data.
pub const NAMESPACE_BITS: &BitTable = &[
    (
        "nsfeat",
        &[
            support("  [7:7] : ", "NPRG, NPRA and NORS are"),
            choice(
                "  [6:6] : ",
                &[
                    "Single Atomicity Mode applies to write operations",
                    "Multiple Atomicity Mode applies to write operations",
                ],
            ),
            choice(
                "  [5:4] : ",
                &[
                    "NPWG, NPWA, NPDG, NPDGL, NPDA, and NOWS are Not Supported",
                    "NPWG, NPWA, NPDG, NPDA, and NOWS are Supported",
                    "NPWG, NPWA, NPDGL, NPDA, and NOWS are Supported",
                    "NPWG, NPWA, NPDG, NPDGL, NPDA, and NOWS are Supported",
                ],
            ),
            choice(
                "  [3:3] : ",
                &["NGUID and EUI64 fields if non-zero, Reused", "NGUID and EUI64 fields if non-zero, Never Reused"],
            ),
            support("  [2:2] : ", "Deallocated or Unwritten Logical Block error"),
            choice("  [1:1] : ", &["Namespace uses AWUN, AWUPF, and ACWU", "Namespace uses NAWUN, NAWUPF, and NACWU"]),
            support("  [0:0] : ", "Thin Provisioning"),
        ],
    ),
    (
        "flbas",
        &[
            reserved("  [7:7] : "),
            value("  [6:5] : ", "Most significant 2 bits of Current LBA Format Selected"),
            choice(
                "  [4:4] : ",
                &["Metadata Transferred in Separate Contiguous Buffer", "Metadata Transferred at End of Data LBA"],
            ),
            value("  [3:0] : ", "Least significant 4 bits of Current LBA Format Selected"),
        ],
    ),
    (
        "mc",
        &[
            reserved("  [7:2] : "),
            support("  [1:1] : ", "Metadata Pointer"),
            support("  [0:0] : ", "Metadata as Part of Extended Data LBA"),
        ],
    ),
    (
        "dpc",
        &[
            reserved("  [7:5] : "),
            support("  [4:4] : ", "Protection Information Transferred as Last Bytes of Metadata"),
            support("  [3:3] : ", "Protection Information Transferred as First Bytes of Metadata"),
            support("  [2:2] : ", "Protection Information Type 3"),
            support("  [1:1] : ", "Protection Information Type 2"),
            support("  [0:0] : ", "Protection Information Type 1"),
        ],
    ),
    (
        "dps",
        &[
            reserved("  [7:4] : "),
            choice(
                "  [3:3] : ",
                &[
                    "Protection Information is Transferred as Last Bytes of Metadata",
                    "Protection Information is Transferred as First Bytes of Metadata",
                ],
            ),
            choice(
                "  [2:0] : ",
                &[
                    "Protection Information Disabled",
                    "Protection Information Type 1 Enabled",
                    "Protection Information Type 2 Enabled",
                    "Protection Information Type 3 Enabled",
                    "Protection Information Reserved Enabled",
                ],
            ),
        ],
    ),
    (
        "nmic",
        &[
            reserved("  [7:2] : "),
            choice("  [1:1] : ", &["Namespace is Not a Dispersed Namespace", "Namespace is a Dispersed Namespace"]),
            choice("  [0:0] : ", &["Namespace Multipath Not Capable", "Namespace Multipath Capable"]),
        ],
    ),
    (
        "rescap",
        &[
            choice(
                "  [7:7] : ",
                &[
                    "Ignore Existing Key - Used as defined in revision 1.2.1 or earlier",
                    "Ignore Existing Key - Used as defined in revision 1.3 or later",
                ],
            ),
            support("  [6:6] : ", "Exclusive Access - All Registrants"),
            support("  [5:5] : ", "Write Exclusive - All Registrants"),
            support("  [4:4] : ", "Exclusive Access - Registrants Only"),
            support("  [3:3] : ", "Write Exclusive - Registrants Only"),
            support("  [2:2] : ", "Exclusive Access"),
            support("  [1:1] : ", "Write Exclusive"),
            support("  [0:0] : ", "Persist Through Power Loss"),
        ],
    ),
    (
        "fpi",
        &[
            support("  [7:7] : ", "Format Progress Indicator"),
            BitField {
                head: "  [6:0] : ",
                meaning: BitMeaning::Percent("Format Progress Indicator (Remaining "),
                shown: BitsShown::NotZeroOr(FPI_SUPPORTED),
            },
        ],
    ),
    (
        "dlfeat",
        &[
            reserved("  [7:5] : "),
            choice(
                "  [4:4] : ",
                &[
                    "Guard Field of Deallocated Logical Blocks is set to 0xFFFF",
                    "Guard Field of Deallocated Logical Blocks is set to CRC of The Value Read",
                ],
            ),
            support("  [3:3] : ", "Deallocate Bit in the Write Zeroes Command is"),
            choice(
                "  [2:0] : ",
                &[
                    "Bytes Read From a Deallocated Logical Block and its Metadata are Not Reported",
                    "Bytes Read From a Deallocated Logical Block and its Metadata are 0x00",
                    "Bytes Read From a Deallocated Logical Block and its Metadata are 0xFF",
                    "Bytes Read From a Deallocated Logical Block and its Metadata are Reserved Value",
                ],
            ),
        ],
    ),
    (
        "kpios",
        &[
            reserved("  [7:2] : "),
            support("  [1:1] : ", "Key Per I/O Capability"),
            choice("  [0:0] : ", &["Key Per I/O Capability Disabled", "Key Per I/O Capability Enabled"]),
        ],
    ),
    (
        "nsattr",
        &[
            reserved("  [7:1] : "),
            choice("  [0:0] : ", &["Namespace Not Write Protected", "Namespace Write Protected"]),
        ],
    ),
];
