//! The command `nvme`: queries NVMe controllers, and passes commands through to them.
//!
//! Commands, options and output are those of nvme-cli 2.13, so that people and programs find what they know. Errors are
//! this program's: object, cause, cure. The exit code is 0 for success and 1 for any error, as nvme-cli's.
//!
//! Devices are opened by the library, which knows their transports.

mod bits;
mod discover;
mod features;
mod gen_key;
mod identify;
mod json;
mod list;
mod logs;
mod passthru;
mod text;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use blkyard::nvme::{
    CONTROLLER_FIELDS, ERROR_ENTRY_BYTES, NvmeError, NvmeField, NvmePassthrough, NvmeStatus, PassthroughData,
    PassthroughTarget, SMART_LOG_BYTES, Sqe, admin, cns, list_nvme, open_nvme,
};
use clap::ValueEnum;

use crate::log;
use features::{FeatureValue, Select};
use identify::IdentifyDetails;
use json::JsonNode;
use passthru::PassthruArgs;

/// Log pages.
const ERROR_LOG: u8 = 0x01;
const SMART_LOG: u8 = 0x02;
/// The namespace identifier that stands for all, or for the controller.
const ALL_NAMESPACES: u32 = u32::MAX;

/// Arguments of `nvme`.
#[derive(Debug, clap::Args)]
pub struct NvmeArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: NvmeSubcommand,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum NvmeSubcommand {
    /// List the namespaces of the kernel's driver.
    List(ListArgs),
    /// Show the subsystems that a discovery service names.
    Discover(discover::DiscoverArgs),
    /// Make a secret for the authentication of a host or a target.
    GenDhchapKey(gen_key::GenKeyArgs),
    /// Make a key for the encrypted connections of a host.
    GenTlsKey(gen_key::GenTlsKeyArgs),
    /// Show what a controller is and supports.
    IdCtrl(IdentifyArgs),
    /// Show size and format of a namespace.
    IdNs(NamespaceArgs),
    /// Show the health of a controller.
    SmartLog(SmartArgs),
    /// Show the latest errors of a controller.
    ErrorLog(ErrorLogArgs),
    /// Show one feature of a controller, or all.
    GetFeature(FeatureArgs),
    /// Send a command to the admin queue.
    #[command(visible_alias = "passthru")]
    AdminPassthru(PassthruArgs),
    /// Send a command to an I/O queue.
    IoPassthru(PassthruArgs),
}

/// Form of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    #[default]
    Normal,
    /// JSON.
    Json,
    /// The data as the controller sent it.
    Binary,
}

/// The device, and how to ask it.
#[derive(Debug, clap::Args)]
pub struct DeviceArgs {
    /// vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN, pci:ADDRESS, /dev/nvmeX, /dev/nvmeXnY or /dev/ngXnY.
    pub device: String,
    /// Form of the output.
    #[arg(short, long, value_enum, default_value_t)]
    pub output_format: OutputFormat,
    /// Time limit of a command, ms. Default: 60 s, or the kernel driver's.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    pub timeout: u32,
    /// Print the data as the controller sent it, as -o binary.
    #[arg(short = 'b', long)]
    pub raw_binary: bool,
}

/// What identify data is shown with.
#[derive(Debug, clap::Args)]
struct DetailArgs {
    /// Dump the vendor's part as well.
    #[arg(short = 'V', long)]
    vendor_specific: bool,
    /// Show the meaning of bits.
    #[arg(short = 'H', long)]
    human_readable: bool,
}

/// Arguments of `list`.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// Form of the output: normal or json.
    #[arg(short, long, value_enum, default_value_t)]
    pub output_format: OutputFormat,
}

/// Arguments of `id-ctrl`.
#[derive(Debug, clap::Args)]
pub struct IdentifyArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    details: DetailArgs,
}

/// Arguments of `id-ns`.
#[derive(Debug, clap::Args)]
pub struct NamespaceArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace. Default: that of the device, or the controller's first.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    namespace_id: u32,
    #[command(flatten)]
    details: DetailArgs,
}

/// Arguments of `smart-log`.
#[derive(Debug, clap::Args)]
pub struct SmartArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace. Default: the controller as a whole.
    #[arg(short, long, value_parser = number32, default_value = "0xffffffff")]
    namespace_id: u32,
    /// Show the meaning of bits.
    #[arg(short = 'H', long)]
    human_readable: bool,
}

/// Arguments of `error-log`.
#[derive(Debug, clap::Args)]
pub struct ErrorLogArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Number of entries; no more than the controller keeps.
    #[arg(short = 'e', long, value_parser = number32, default_value = "64")]
    log_entries: u32,
}

/// Arguments of `get-feature`.
#[derive(Debug, clap::Args)]
pub struct FeatureArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Feature. Default: all that the controller supports.
    #[arg(short, long, value_parser = number8, default_value = "0")]
    feature_id: u8,
    /// Namespace. Default: that of the device, or the controller as a whole.
    #[arg(short, long, value_parser = number32)]
    namespace_id: Option<u32>,
    /// Which value, 0 to 3: current, default, saved, supported capabilities.
    #[arg(short, long, value_parser = number8, default_value = "0")]
    sel: u8,
    /// Bytes of the feature's data. Default: as specified.
    #[arg(short = 'l', long, value_parser = number32, default_value = "0")]
    data_len: u32,
    /// Command dword 11.
    #[arg(short, long, value_parser = number32, default_value = "0")]
    cdw11: u32,
    /// Show the fields of the value.
    #[arg(short = 'H', long)]
    human_readable: bool,
}

/// Reason of a failure.
#[derive(Debug, thiserror::Error)]
pub enum NvmeCommandError {
    /// The device or the command failed.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
    /// Arguments that cannot be used.
    #[error("{object}: {cause}; {cure}")]
    Refused {
        /// What was asked for.
        object: String,
        /// Why it is not done.
        cause: String,
        /// What to do.
        cure: &'static str,
    },
    /// A file cannot be read or written.
    #[error("{object}: {source}; correct the path")]
    File {
        /// The file.
        object: String,
        /// The system's error.
        source: io::Error,
    },
}

impl NvmeCommandError {
    fn file(path: &Path, source: io::Error) -> NvmeCommandError {
        NvmeCommandError::File { object: path.display().to_string(), source }
    }

    fn refused(object: impl Into<String>, cause: &str, cure: &'static str) -> NvmeCommandError {
        NvmeCommandError::Refused { object: object.into(), cause: cause.to_owned(), cure }
    }
}

/// Executes a command and prints its output.
///
/// # Errors
/// See [`NvmeCommandError`].
pub fn run(args: &NvmeArgs) -> Result<ExitCode, NvmeCommandError> {
    let output = match &args.command {
        NvmeSubcommand::List(args) => list(args)?,
        NvmeSubcommand::Discover(args) => discover::run(args)?,
        NvmeSubcommand::GenDhchapKey(args) => gen_key::run(args)?,
        NvmeSubcommand::GenTlsKey(args) => gen_key::run_tls(args)?,
        NvmeSubcommand::IdCtrl(args) => controller(args)?,
        NvmeSubcommand::IdNs(args) => namespace(args)?,
        NvmeSubcommand::SmartLog(args) => smart_log(args)?,
        NvmeSubcommand::ErrorLog(args) => error_log(args)?,
        NvmeSubcommand::GetFeature(args) => get_feature(args)?,
        NvmeSubcommand::AdminPassthru(args) => passthru::run(args, PassthroughTarget::Admin, || open(&args.device))?,
        NvmeSubcommand::IoPassthru(args) => passthru::run(args, PassthroughTarget::Io, || open(&args.device))?,
    };
    Ok(passthru::print_bytes(&output).map_or_else(|error| log::unwritten(&error), |()| ExitCode::SUCCESS))
}

fn open(name: &str) -> Result<Box<dyn NvmePassthrough>, NvmeCommandError> {
    Ok(open_nvme(name)?)
}

impl DetailArgs {
    fn shown(&self) -> IdentifyDetails {
        IdentifyDetails { has_bits: self.human_readable, has_vendor: self.vendor_specific }
    }
}

impl DeviceArgs {
    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout.into())
    }

    /// The device as output names it.
    fn leaf(&self) -> &str {
        self.device.strip_prefix("/dev/").unwrap_or(&self.device)
    }

    /// The data in the chosen form.
    fn form(&self, data: &[u8], text: impl FnOnce() -> String, json: impl FnOnce() -> JsonNode) -> Vec<u8> {
        match self.output_format {
            OutputFormat::Binary => data.to_vec(),
            _ if self.raw_binary => data.to_vec(),
            OutputFormat::Normal => text().into_bytes(),
            OutputFormat::Json => json().document().into_bytes(),
        }
    }
}

fn list(args: &ListArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let entries = list_nvme().map_err(|source| NvmeCommandError::file("/sys/block".as_ref(), source))?;
    match args.output_format {
        OutputFormat::Normal => Ok(list::text(&entries).into_bytes()),
        OutputFormat::Json => Ok(list::json(&entries).document().into_bytes()),
        OutputFormat::Binary => Err(NvmeCommandError::refused("-o binary", "a list has no binary form", "use -o json")),
    }
}

fn controller(args: &IdentifyArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let data = open(&args.device.device)?.identify(cns::CONTROLLER, 0, args.device.timeout())?;
    let text = || identify::controller_text(&data, args.details.shown());
    Ok(args.device.form(&data, text, || identify::controller_json(&data)))
}

fn namespace(args: &NamespaceArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let (mut device, timeout) = (open(&args.device.device)?, args.device.timeout());
    let nsid = match (args.namespace_id, device.namespace_id()) {
        (0, None) => first_namespace(&mut *device, timeout)?,
        (0, Some(nsid)) | (nsid, _) => nsid,
    };
    let data = device.identify(cns::NAMESPACE, nsid, timeout)?;
    let text = || identify::namespace_text(&data, nsid, args.details.shown());
    Ok(args.device.form(&data, text, || identify::namespace_json(&data)))
}

/// The first active namespace.
fn first_namespace(device: &mut dyn NvmePassthrough, timeout: Duration) -> Result<u32, NvmeCommandError> {
    let data = device.identify(cns::ACTIVE_NAMESPACES, 0, timeout)?;
    match data.first_chunk().copied().map(u32::from_le_bytes) {
        None | Some(0) => {
            Err(NvmeCommandError::refused(device.name(), "the controller has no active namespace", "give one with -n"))
        }
        Some(nsid) => Ok(nsid),
    }
}

fn smart_log(args: &SmartArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let (nsid, is_readable) = (args.namespace_id, args.human_readable);
    let data = open(&args.device.device)?.log_page(SMART_LOG, nsid, SMART_LOG_BYTES, args.device.timeout())?;
    let text = || logs::smart_text(&data, args.device.leaf(), nsid, is_readable);
    Ok(args.device.form(&data, text, || logs::smart_json(&data, is_readable)))
}

fn error_log(args: &ErrorLogArgs) -> Result<Vec<u8>, NvmeCommandError> {
    if args.log_entries == 0 {
        return Err(NvmeCommandError::refused("-e 0", "no entries to show", "give a number from 1 on"));
    }
    let (mut device, timeout) = (open(&args.device.device)?, args.device.timeout());
    let identify = device.identify(cns::CONTROLLER, 0, timeout)?;
    let kept = NvmeField::find(CONTROLLER_FIELDS, "elpe").map_or(0, |field| field.number(&identify) as u32) + 1;
    let bytes = args.log_entries.min(kept) as usize * ERROR_ENTRY_BYTES;
    let data = device.log_page(ERROR_LOG, ALL_NAMESPACES, bytes, timeout)?;
    Ok(args.device.form(&data, || logs::errors_text(&data, args.device.leaf()), || logs::errors_json(&data)))
}

fn get_feature(args: &FeatureArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let Some(select) = Select::from_number(args.sel) else {
        return Err(NvmeCommandError::refused(format!("-s {}", args.sel), "not a kind of value", "give 0 to 3"));
    };
    let mut device = open(&args.device.device)?;
    let nsid = args.namespace_id.or(device.namespace_id()).unwrap_or(ALL_NAMESPACES);
    let wants_all = args.feature_id == 0;
    let mut values = vec![];
    for fid in if wants_all { 0..=u8::MAX } else { args.feature_id..=args.feature_id } {
        match feature(args, &mut *device, fid, select, nsid) {
            Ok(value) => values.push(value),
            Err(NvmeCommandError::Nvme(NvmeError::Status { status, .. })) if wants_all && is_absent(status) => {}
            Err(error) => return Err(error),
        }
    }
    let data: Vec<u8> = values.iter().flat_map(|value| value.data.iter().copied()).collect();
    if args.device.raw_binary && data.is_empty() {
        // A feature without data is shown, as nvme-cli shows it.
        return Ok(values.iter().map(|value| value.text(args.human_readable)).collect::<String>().into_bytes());
    }
    let text = || values.iter().map(|value| value.text(args.human_readable)).collect();
    let json = || JsonNode::Object(values.iter().flat_map(FeatureValue::json).collect());
    Ok(args.device.form(&data, text, json))
}

/// Whether a controller says by this status that it does not have the feature, or not for all namespaces.
fn is_absent(status: NvmeStatus) -> bool {
    [NvmeStatus::INVALID_FIELD, NvmeStatus::INVALID_NAMESPACE].contains(&status.without_flags())
}

fn feature(
    args: &FeatureArgs,
    device: &mut dyn NvmePassthrough,
    fid: u8,
    select: Select,
    nsid: u32,
) -> Result<FeatureValue, NvmeCommandError> {
    let bytes = match (select, args.data_len) {
        (Select::Supported, _) => 0,
        (_, 0) => features::data_bytes(fid, args.cdw11),
        (_, bytes) => bytes as usize,
    };
    let mut dwords = Sqe::new(admin::GET_FEATURES, nsid).dwords();
    (dwords[10], dwords[11]) = (u32::from(fid) | u32::from(args.sel) << 8, args.cdw11);
    let mut data = vec![0; bytes];
    let transfer = if bytes == 0 { PassthroughData::None } else { PassthroughData::Read(&mut data) };
    let result = device.admin("Get Features", Sqe::from_dwords(dwords), transfer, args.device.timeout())?;
    Ok(FeatureValue { fid, select, result: result as u32, data })
}

/// A number as C reads it: decimal, hexadecimal with 0x, or octal with 0.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) if digits.starts_with('+') => None,
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text.starts_with('+') => None,
        None if text.len() > 1 && text.starts_with('0') => u64::from_str_radix(&text[1..], 8).ok(),
        None => u64::from_str(text).ok(),
    }
}

macro_rules! number_parsers {
    ($($name:ident: $int:ident;)+) => {$(
        fn $name(text: &str) -> Result<$int, String> {
            let number = number(text).and_then(|number| $int::try_from(number).ok());
            number.ok_or_else(|| format!("give a number from 0 to {:#x}", $int::MAX))
        }
    )+};
}
number_parsers! {
    number8: u8;
    number16: u16;
    number32: u32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_c_reads_them() {
        for (text, number) in [("0", 0), ("10", 10), ("0x10", 16), ("0XfF", 255), ("010", 8)] {
            assert_eq!(number8(text), Ok(number), "{text}");
        }
        for text in ["", "-1", "+1", "0x", "0x+1", "09", "256", "1k", "0x100", "99999999999999999999"] {
            assert!(number8(text).is_err(), "{text}");
        }
        assert_eq!(number32("0xffffffff"), Ok(u32::MAX));
    }
}
