//! `discover`: the subsystems that a discovery service names.

use std::fmt::Write as _;
use std::net::Ipv6Addr;
use std::time::Duration;

use blkyard::nvme::{DISCOVERY_PORT, DiscoveredLog, DiscoveryEntry, DiscoveryKind, SecureChannel, discover};

use super::json::JsonNode;
use super::{NvmeCommandError, OutputFormat};

/// Arguments of `discover`.
#[derive(Debug, clap::Args)]
pub struct DiscoverArgs {
    /// Transport: tcp.
    #[arg(short, long, default_value = "tcp")]
    transport: String,
    /// Address or name of the target.
    #[arg(short = 'a', long)]
    traddr: String,
    /// Port of the discovery service; exports of blkyard have it at their own port.
    #[arg(short = 's', long, default_value_t = DISCOVERY_PORT)]
    trsvcid: u16,
    /// NQN of this host. Default: that of /etc/nvme/hostnqn, or one made from the machine's identifier.
    #[arg(short = 'q', long)]
    hostnqn: Option<String>,
    /// Form of the output: normal or json.
    #[arg(short, long, value_enum, default_value_t)]
    output_format: OutputFormat,
    /// Time limit, ms.
    #[arg(long, default_value_t = 10_000)]
    timeout: u32,
}

/// Asks the service, and shows its log.
pub fn run(args: &DiscoverArgs) -> Result<Vec<u8>, NvmeCommandError> {
    if args.transport != "tcp" {
        let object = format!("-t {}", args.transport);
        return Err(NvmeCommandError::refused(object, "this transport is not supported", "use -t tcp"));
    }
    let host = &args.traddr;
    let host = if host.parse::<Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.clone() };
    let address = format!("{host}:{}", args.trsvcid);
    let read = || discover(&address, args.hostnqn.as_deref(), Duration::from_millis(args.timeout.into()));
    match args.output_format {
        OutputFormat::Normal => Ok(text(&read()?).into_bytes()),
        OutputFormat::Json => Ok(json(&read()?).document().into_bytes()),
        OutputFormat::Binary => Err(NvmeCommandError::refused("-o binary", "the log is not kept", "use -o json")),
    }
}

/// Names and values of an entry, as nvme-cli has them; without its flags.
fn fields(entry: &DiscoveryEntry) -> [(&'static str, String); 9] {
    let family = if entry.address.is_ipv4() { "ipv4" } else { "ipv6" };
    let kind = match entry.kind {
        DiscoveryKind::Referral => "discovery subsystem referral",
        DiscoveryKind::Subsystem => "nvme subsystem",
        DiscoveryKind::Current => "current discovery subsystem",
    };
    let channel = match entry.secure_channel {
        SecureChannel::NotSpecified => "not specified",
        SecureChannel::Required => "required",
        SecureChannel::NotRequired => "not required",
    };
    let flow = if entry.no_flow_control { ", sq flow control disable supported" } else { "" };
    [
        ("trtype", "tcp".into()),
        ("adrfam", family.into()),
        ("subtype", kind.into()),
        ("treq", format!("{channel}{flow}")),
        ("portid", entry.port_id.to_string()),
        ("trsvcid", entry.port.to_string()),
        ("subnqn", entry.subsystem.to_string()),
        ("traddr", entry.address.to_string()),
        ("sectype", if entry.has_tls { "tls13" } else { "none" }.into()),
    ]
}

fn text(log: &DiscoveredLog) -> String {
    let records = log.entries.len() + log.others;
    let mut text = format!("\nDiscovery Log Number of Records {records}, Generation counter {}\n", log.generation);
    for (number, entry) in log.entries.iter().enumerate() {
        let _ = writeln!(text, "=====Discovery Log Entry {number}======");
        for (name, value) in fields(entry) {
            let _ = writeln!(text, "{:8} {value}", format!("{name}:"));
        }
    }
    if log.others > 0 {
        let _ = writeln!(text, "not shown: {} of other transports, or invalid", log.others);
    }
    text
}

fn json(log: &DiscoveredLog) -> JsonNode {
    let record = |entry: &DiscoveryEntry| {
        let members = fields(entry).into_iter().map(|(name, value)| match name {
            "portid" => (name, u64::from(entry.port_id).into()),
            _ => (name, value.into()),
        });
        JsonNode::object(members)
    };
    let records = log.entries.iter().map(record).collect();
    JsonNode::object([("genctr", log.generation.into()), ("records", JsonNode::List(records))])
}
