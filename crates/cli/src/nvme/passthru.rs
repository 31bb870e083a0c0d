//! `admin-passthru` and `io-passthru`: a command as it is given.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkyard::nvme::{
    NvmePassthrough, PassthroughData, PassthroughResult, PassthroughTarget, Sqe, admin, io as io_opcode,
};

use super::text::dump;
use super::{NvmeCommandError, number8, number16, number32};
use crate::log;

/// Admin commands that erase a disk or a namespace.
const SANITIZE: u8 = 0x84;
const ERASING: [u8; 2] = [admin::FORMAT, SANITIZE];

/// Names of admin commands.
const ADMIN_NAMES: &[(u8, &str)] = &[
    (admin::DELETE_SQ, "Delete I/O Submission Queue"),
    (admin::CREATE_SQ, "Create I/O Submission Queue"),
    (admin::GET_LOG_PAGE, "Get Log Page"),
    (admin::DELETE_CQ, "Delete I/O Completion Queue"),
    (admin::CREATE_CQ, "Create I/O Completion Queue"),
    (admin::IDENTIFY, "Identify"),
    (admin::ABORT, "Abort"),
    (admin::SET_FEATURES, "Set Features"),
    (admin::GET_FEATURES, "Get Features"),
    (admin::ASYNC_EVENT, "Asynchronous Event Request"),
    (0x0d, "Namespace Management"),
    (0x10, "Firmware Commit"),
    (0x11, "Firmware Image Download"),
    (0x14, "Device Self-test"),
    (0x15, "Namespace Attachment"),
    (admin::KEEP_ALIVE, "Keep Alive"),
    (0x19, "Directive Send"),
    (0x1a, "Directive Receive"),
    (0x1c, "Virtualization Management"),
    (admin::DOORBELL_BUFFER, "Doorbell Buffer Config"),
    (admin::FORMAT, "Format NVM"),
    (0x81, "Security Send"),
    (0x82, "Security Receive"),
    (SANITIZE, "Sanitize"),
    (0x86, "Get LBA Status"),
];

/// Names of I/O commands.
const IO_NAMES: &[(u8, &str)] = &[
    (io_opcode::FLUSH, "Flush"),
    (io_opcode::WRITE, "Write"),
    (io_opcode::READ, "Read"),
    (io_opcode::WRITE_UNCORRECTABLE, "Write Uncorrectable"),
    (io_opcode::COMPARE, "Compare"),
    (io_opcode::WRITE_ZEROES, "Write Zeroes"),
    (io_opcode::DSM, "Dataset Management"),
    (io_opcode::VERIFY, "Verify"),
    (0x0d, "Reservation Register"),
    (0x0e, "Reservation Report"),
    (0x11, "Reservation Acquire"),
    (0x15, "Reservation Release"),
    (0x19, "Copy"),
];

/// Arguments of a command that is passed through. The options are nvme-cli's.
#[derive(Debug, clap::Args)]
pub struct PassthruArgs {
    /// vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN, pci:ADDRESS, /dev/nvmeX, /dev/nvmeXnY or /dev/ngXnY.
    pub device: String,
    /// Opcode.
    #[arg(short = 'O', long, value_parser = number8)]
    pub opcode: u8,
    /// Flags of the command.
    #[arg(short, long, value_parser = number8, default_value = "0")]
    pub flags: u8,
    /// Fill the data with this byte first.
    #[arg(short, long, value_parser = number8, default_value = "0")]
    pub prefill: u8,
    /// Reserved field; only zero can be sent.
    #[arg(short = 'R', long, value_parser = number16, default_value = "0", hide = true)]
    pub rsvd: u16,
    /// Namespace.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    pub namespace_id: u32,
    /// Bytes of data.
    #[arg(short = 'l', long, value_parser = number32, default_value = "0")]
    pub data_len: u32,
    /// Bytes of metadata, in a buffer of its own.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    pub metadata_len: u32,
    /// Command dword 2.
    #[arg(short = '2', long, value_parser = number32, default_value = "0")]
    pub cdw2: u32,
    /// Command dword 3.
    #[arg(short = '3', long, value_parser = number32, default_value = "0")]
    pub cdw3: u32,
    /// Command dword 10.
    #[arg(short = '4', long, value_parser = number32, default_value = "0")]
    pub cdw10: u32,
    /// Command dword 11.
    #[arg(short = '5', long, value_parser = number32, default_value = "0")]
    pub cdw11: u32,
    /// Command dword 12.
    #[arg(short = '6', long, value_parser = number32, default_value = "0")]
    pub cdw12: u32,
    /// Command dword 13.
    #[arg(short = '7', long, value_parser = number32, default_value = "0")]
    pub cdw13: u32,
    /// Command dword 14.
    #[arg(short = '8', long, value_parser = number32, default_value = "0")]
    pub cdw14: u32,
    /// Command dword 15.
    #[arg(short = '9', long, value_parser = number32, default_value = "0")]
    pub cdw15: u32,
    /// File with the data to send, or for the data received. Default: standard input or output.
    #[arg(short, long, value_name = "FILE")]
    pub input_file: Option<PathBuf>,
    /// File with the metadata to send, or for the metadata received. Default: standard input, before the data, or
    /// output, after it.
    #[arg(short = 'M', long, value_name = "FILE")]
    pub metadata: Option<PathBuf>,
    /// Print the data received as it is.
    #[arg(short = 'b', long)]
    pub raw_binary: bool,
    /// Print the command before it is sent.
    #[arg(short, long)]
    pub show_command: bool,
    /// Print the command and do not send it.
    #[arg(short, long)]
    pub dry_run: bool,
    /// The command has data from the controller. Default: as the opcode tells.
    #[arg(short, long)]
    pub read: bool,
    /// The command has data to the controller. Default: as the opcode tells.
    #[arg(short, long)]
    pub write: bool,
    /// Print the time that the command took.
    #[arg(short = 'T', long)]
    pub latency: bool,
    /// Time limit, ms. Default: 60 s, or the kernel driver's.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    pub timeout: u32,
    /// Send a command that erases the disk: Format NVM, Sanitize.
    #[arg(long)]
    pub force: bool,
}

impl PassthruArgs {
    /// The command.
    fn sqe(&self) -> Sqe {
        let mut dwords = [0; 16];
        dwords[0] = u32::from(self.opcode) | u32::from(self.flags) << 8;
        (dwords[1], dwords[2], dwords[3]) = (self.namespace_id, self.cdw2, self.cdw3);
        let last = [self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15];
        dwords[10..].copy_from_slice(&last);
        Sqe::from_dwords(dwords)
    }

    /// Whether the controller sends data, and whether it gets some. Bits 0 and 1 of an opcode tell.
    fn directions(&self) -> (bool, bool) {
        (self.read || self.opcode & 2 != 0, self.write || self.opcode & 1 != 0)
    }

    /// Fails if the command must not, or cannot, be sent.
    fn check(&self, target: PassthroughTarget) -> Result<(), NvmeCommandError> {
        let refuse = |cause: String, cure| {
            Err(NvmeCommandError::Refused { object: format!("opcode {:02x}h", self.opcode), cause, cure })
        };
        if target == PassthroughTarget::Admin && ERASING.contains(&self.opcode) && !self.force {
            let name = command_name(target, self.opcode);
            return refuse(format!("{name} erases data that cannot be recovered"), "add --force to send it");
        }
        if self.rsvd != 0 {
            return refuse("the reserved field cannot be sent".to_owned(), "leave --rsvd at 0");
        }
        // Bits 6 and 7 choose the kind of the data pointer, which is set here.
        if self.flags & 0xc0 != 0 {
            return refuse(format!("flags {:#x} choose an SGL", self.flags), "use flags up to 0x3f");
        }
        if (self.data_len, self.metadata_len) != (0, 0) && self.directions() == (false, false) {
            return refuse("data without a direction".to_owned(), "add --read or --write");
        }
        Ok(())
    }

    fn shown(&self) -> String {
        let rows = [
            ("opcode", format!("{:02x}", self.opcode)),
            ("flags", format!("{:02x}", self.flags)),
            ("rsvd1", format!("{:04x}", self.rsvd)),
            ("nsid", format!("{:08x}", self.namespace_id)),
            ("cdw2", format!("{:08x}", self.cdw2)),
            ("cdw3", format!("{:08x}", self.cdw3)),
            ("data_len", format!("{:08x}", self.data_len)),
            ("metadata_len", format!("{:08x}", self.metadata_len)),
            ("cdw10", format!("{:08x}", self.cdw10)),
            ("cdw11", format!("{:08x}", self.cdw11)),
            ("cdw12", format!("{:08x}", self.cdw12)),
            ("cdw13", format!("{:08x}", self.cdw13)),
            ("cdw14", format!("{:08x}", self.cdw14)),
            ("cdw15", format!("{:08x}", self.cdw15)),
            ("timeout_ms", format!("{:08x}", self.timeout)),
        ];
        rows.iter().fold(String::new(), |mut text, (name, value)| {
            let _ = writeln!(text, "{name:<13}: {value}");
            text
        })
    }
}

/// A command's name.
fn command_name(target: PassthroughTarget, opcode: u8) -> &'static str {
    let names = if target == PassthroughTarget::Admin { ADMIN_NAMES } else { IO_NAMES };
    names.iter().find(|(known, _)| *known == opcode).map_or("Vendor Specific", |(_, name)| name)
}

/// Executes the command. Returns what is to be printed. The device is opened only once the command is known to be sent.
pub fn run(
    args: &PassthruArgs,
    target: PassthroughTarget,
    open: impl FnOnce() -> Result<Box<dyn NvmePassthrough>, NvmeCommandError>,
) -> Result<Vec<u8>, NvmeCommandError> {
    args.check(target)?;
    let (is_read, is_write) = args.directions();
    let mut output = if args.show_command || args.dry_run { args.shown().into_bytes() } else { vec![] };
    if args.dry_run {
        return Ok(output);
    }
    let mut metadata = vec![args.prefill; args.metadata_len as usize];
    let mut data = vec![args.prefill; args.data_len as usize];
    if is_write {
        read_data(args.metadata.as_deref(), &mut metadata)?;
        read_data(args.input_file.as_deref(), &mut data)?;
    }
    let mut device = open()?;
    let transfers = [&mut data, &mut metadata].map(|bytes| match (bytes.is_empty(), is_write) {
        (true, _) => PassthroughData::None,
        (_, true) => PassthroughData::Write(bytes),
        (_, false) => PassthroughData::Read(bytes),
    });
    let name = command_name(target, args.opcode);
    let start = Instant::now();
    let timeout = Duration::from_millis(args.timeout.into());
    let [transfer, metadata_transfer] = transfers;
    let ended = device.submit(target, args.sqe(), transfer, metadata_transfer, timeout)?;
    let PassthroughResult { status, result } = ended;
    let kind = if target == PassthroughTarget::Admin { "Admin" } else { "IO" };
    if args.latency {
        let line = format!("{kind} Command {name} latency: {} us\n", start.elapsed().as_micros());
        output.extend_from_slice(line.as_bytes());
    }
    if !status.is_success() {
        return Err(blkyard::nvme::NvmeError::Status { name: device.name().to_owned(), command: name, status }.into());
    }
    log::note(format_args!("{kind} Command {name} is Success and result: {:#010x}", result as u32));
    if is_read && !is_write {
        for (bytes, file) in [(&data, &args.input_file), (&metadata, &args.metadata)] {
            match file {
                _ if bytes.is_empty() => {}
                Some(path) => fs::write(path, bytes).map_err(|source| NvmeCommandError::file(path, source))?,
                None if args.raw_binary => output.extend_from_slice(bytes),
                None => output.extend_from_slice(dump(bytes).as_bytes()),
            }
        }
    }
    Ok(output)
}

/// Reads the bytes to be sent from a file or standard input; what a short file lacks keeps the prefill.
fn read_data(file: Option<&Path>, bytes: &mut [u8]) -> Result<(), NvmeCommandError> {
    let read = |from: &mut dyn Read, bytes: &mut [u8]| {
        let mut at = 0;
        while at < bytes.len() {
            match from.read(&mut bytes[at..]) {
                Ok(0) => break,
                Ok(count) => at += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    if bytes.is_empty() {
        return Ok(());
    }
    match file {
        Some(path) => File::open(path)
            .and_then(|mut file| read(&mut file, bytes))
            .map_err(|source| NvmeCommandError::file(path, source)),
        None => read(&mut io::stdin().lock(), bytes)
            .map_err(|source| NvmeCommandError::file("standard input".as_ref(), source)),
    }
}

/// Writes bytes to standard output.
pub fn print_bytes(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()
}
