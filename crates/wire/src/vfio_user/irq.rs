//! Interrupts: the types of a device, and the actions on them: trigger, mask, unmask.

use super::payload::{PayloadReader, check_descriptors, payload};
use super::{Command, MessageError};

/// Bytes of DEVICE_GET_IRQ_INFO, both ways.
pub(super) const INFO_BYTES: usize = 16;
/// Bytes of DEVICE_SET_IRQS without data.
const SET_BYTES: usize = 20;

const DATA_NONE: u32 = 1;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
const ACTION_MASK: u32 = 1 << 3;
const ACTION_UNMASK: u32 = 1 << 4;
const ACTION_TRIGGER: u32 = 1 << 5;

bitflags::bitflags! {
    /// Features of an interrupt type. Bits without a name are kept.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IrqFlags: u32 {
        /// The type signals eventfds.
        const EVENTFD = 1;
        /// The type can be masked and unmasked.
        const MASKABLE = 2;
        /// The type masks itself when triggered.
        const AUTOMASKED = 4;
        /// Its interrupts can only be set up together.
        const NORESIZE = 8;
    }
}

/// An interrupt type of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Its number.
    pub index: u32,
    /// Its features.
    pub flags: IrqFlags,
    /// Number of interrupts.
    pub count: u32,
}

/// Interrupts of one type. Their end can be counted in 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqRange {
    /// Number of the type.
    pub index: u32,
    /// The first one.
    pub start: u32,
    /// Number of interrupts.
    pub count: u32,
}

/// Action on interrupts, or cause of an eventfd's signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask.
    Mask,
    /// Unmask.
    Unmask,
    /// Trigger.
    Trigger,
}

/// Selection of interrupts in a range, or their new eventfds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All of them. An empty range at 0 with [`IrqAction::Trigger`] disables the type.
    All,
    /// Interrupts whose byte is not zero: one byte each.
    Some(&'a [u8]),
    /// An eventfd each is set; the descriptors came with the message.
    SetEventfds,
    /// Their eventfds are removed.
    RemoveEventfds,
}

/// A request to act on interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqSetRequest<'a> {
    /// The interrupts.
    pub range: IrqRange,
    /// The action.
    pub action: IrqAction,
    /// Selection, or new eventfds.
    pub data: IrqData<'a>,
}

impl IrqInfo {
    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<IrqInfo, MessageError> {
        let command = Command::DeviceGetIrqInfo;
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, INFO_BYTES)?;
        fields.argsz(INFO_BYTES)?;
        let flags = IrqFlags::from_bits_retain(fields.u32()?);
        Ok(IrqInfo { index: fields.u32()?, flags, count: fields.u32()? })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        payload![INFO_BYTES as u32, self.flags.bits(), self.index, self.count]
    }
}

impl<'a> IrqSetRequest<'a> {
    pub(super) fn parse(payload: &'a [u8], descriptors: usize) -> Result<IrqSetRequest<'a>, MessageError> {
        let command = Command::DeviceSetIrqs;
        let mut fields = PayloadReader::new(command, payload, SET_BYTES)?;
        let argsz = fields.argsz(SET_BYTES)?;
        if argsz as usize != payload.len() {
            return Err(MessageError::Argsz { command, argsz });
        }
        let flags = fields.u32()?;
        let (index, start, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if start.checked_add(count).is_none() {
            return Err(MessageError::Range { command, start: u64::from(start), len: u64::from(count) });
        }
        let action = match flags & !DATA_MASK {
            ACTION_MASK => IrqAction::Mask,
            ACTION_UNMASK => IrqAction::Unmask,
            ACTION_TRIGGER => IrqAction::Trigger,
            _ => return Err(MessageError::Flags { command, flags }),
        };
        let is_disable = start == 0 && action == IrqAction::Trigger && flags & DATA_MASK == DATA_NONE;
        if count == 0 && !is_disable {
            return Err(MessageError::Count { command, count: 0 });
        }
        let data = match flags & DATA_MASK {
            DATA_NONE => IrqData::All,
            DATA_BOOL => IrqData::Some(fields.data(u64::from(count))?),
            DATA_EVENTFD if descriptors == 0 => IrqData::RemoveEventfds,
            DATA_EVENTFD if descriptors == count as usize => IrqData::SetEventfds,
            DATA_EVENTFD => {
                return Err(MessageError::Descriptors { command, came: descriptors, max: count as usize });
            }
            _ => return Err(MessageError::Flags { command, flags }),
        };
        if !matches!(data, IrqData::SetEventfds) {
            check_descriptors(command, descriptors, 0)?;
        }
        fields.end()?;
        Ok(IrqSetRequest { range: IrqRange { index, start, count }, action, data })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let action = match self.action {
            IrqAction::Mask => ACTION_MASK,
            IrqAction::Unmask => ACTION_UNMASK,
            IrqAction::Trigger => ACTION_TRIGGER,
        };
        let (data, bytes) = match self.data {
            IrqData::All => (DATA_NONE, &[][..]),
            IrqData::Some(bytes) => (DATA_BOOL, bytes),
            IrqData::SetEventfds | IrqData::RemoveEventfds => (DATA_EVENTFD, &[][..]),
        };
        let IrqRange { index, start, count } = self.range;
        let mut payload = payload![(SET_BYTES + bytes.len()) as u32, data | action, index, start, count];
        payload.extend_from_slice(bytes);
        payload
    }
}
