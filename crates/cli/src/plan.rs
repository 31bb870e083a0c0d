//! Configuration of a daemon, from the command line or a file: checked names, no device opened yet.

use std::path::{Path, PathBuf};

use blkyard::spec::{Spec, SpecError};
use serde::Deserialize;

use crate::control::ControlPlace;
use crate::daemon::DiskPlan;
use crate::log::LogFormat;

/// The key of a socket's permissions, which are octal wherever they are text.
pub(crate) const MODE_KEY: &str = "mode";
/// Upper bound of permissions: no other bits apply to a socket.
const MODE_MAX: u32 = 0o777;
/// How permissions are written, for messages.
pub(crate) const MODE_WANTED: &str =
    "give octal permissions: ?mode=0660 after a name, mode = \"0660\" or mode = 0o660 in a file";

/// All that a configuration file says.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The disks.
    pub disks: Vec<DiskPlan>,
    /// Other settings; each is the flag of the same name.
    pub settings: Settings,
}

/// Settings of the whole daemon. The command line has precedence.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Threads that do the work.
    pub lanes: Option<u64>,
    /// CPUs they are kept on.
    pub cpus: Option<Vec<u32>>,
    /// Longest busy-polling of a lane before it sleeps, us.
    pub spin_us: Option<u64>,
    /// Seconds between lines of statistics.
    pub stats: Option<u64>,
    /// Path of the control socket.
    pub control: Option<ControlPlace>,
    /// How long to wait for an image that a daemon which died still has, seconds.
    pub lock_wait_s: Option<u64>,
    /// Time limit for requests in flight at the end of the daemon, seconds.
    pub drain_s: Option<u64>,
    /// Format of log lines.
    pub log_format: Option<LogFormat>,
}

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read.
    #[error("configuration {}: {source}; name a file that exists and can be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Invalid file.
    #[error("configuration {}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Fault and position.
        source: Box<toml::de::Error>,
    },
    /// A name in it, or on the command line, is not understood.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// One argument of the command line, in order.
#[derive(Debug, Clone)]
pub enum Word {
    /// `--device`
    Device(String),
    /// `--export`
    Export(String),
}

/// Puts devices and exports together: an export serves the device named last before it.
///
/// # Errors
/// An export without a device, no device, a name that is not understood.
pub fn from_words(words: &[Word]) -> Result<Vec<DiskPlan>, PlanError> {
    let mut disks: Vec<DiskPlan> = Vec::new();
    for word in words {
        match word {
            Word::Device(name) => disks.push(DiskPlan { device: Spec::parse(name)?, exports: Vec::new() }),
            Word::Export(name) => {
                let export = Spec::parse(name)?;
                let cause = "no device precedes this export";
                let cure = "write --device SPEC before the exports that serve it";
                let disk = disks.last_mut().ok_or_else(|| SpecError::new(name, cause, cure))?;
                disk.exports.push(export);
            }
        }
    }
    some_device_is_named(disks)
}

/// Keys of the whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    device: Vec<Entry>,
    lanes: Option<u64>,
    cpus: Option<Vec<u32>>,
    spin_us: Option<u64>,
    stats: Option<u64>,
    control: Option<String>,
    lock_wait_s: Option<u64>,
    drain_s: Option<u64>,
    log_format: Option<LogFormat>,
}

/// A device or an export: its name, its options as keys, and for a device its exports.
#[derive(Debug, Deserialize)]
struct Entry {
    spec: String,
    #[serde(default)]
    export: Vec<Entry>,
    #[serde(flatten)]
    options: std::collections::BTreeMap<String, toml::Value>,
}

/// Reads a configuration file:
///
/// ```toml
/// lanes = 2        # all of these may be left out
/// cpus = [0, 1]
/// spin_us = 50
/// stats = 1
/// control = "/run/blkyard/disks.sock"
///
/// [[device]]
/// spec = "file:disk.img"
/// readonly = true
///
/// [[device.export]]
/// spec = "vhost-user-blk:/run/blkyard/disk.sock"
/// queues = 4
/// ```
///
/// # Errors
/// See [`PlanError`].
pub fn from_file(path: &Path) -> Result<Plan, PlanError> {
    let text = std::fs::read_to_string(path).map_err(|source| PlanError::Read { path: path.into(), source })?;
    from_toml(&text, path)
}

fn from_toml(text: &str, path: &Path) -> Result<Plan, PlanError> {
    let file: File =
        toml::from_str(text).map_err(|source| PlanError::Parse { path: path.into(), source: Box::new(source) })?;
    let mut disks = Vec::new();
    for entry in file.device {
        let exports = entry.export.iter().map(|export| {
            if export.export.is_empty() {
                return entry_spec(export);
            }
            Err(SpecError::new(&export.spec, "an export cannot have exports", "list it under its device"))
        });
        let exports = exports.collect::<Result<_, _>>()?;
        disks.push(DiskPlan { device: entry_spec(&entry)?, exports });
    }
    let settings = Settings {
        lanes: file.lanes,
        cpus: file.cpus,
        spin_us: file.spin_us,
        stats: file.stats,
        control: file.control.map(|place| place.as_str().into()),
        lock_wait_s: file.lock_wait_s,
        drain_s: file.drain_s,
        log_format: file.log_format,
    };
    Ok(Plan { disks: some_device_is_named(disks)?, settings })
}

fn entry_spec(entry: &Entry) -> Result<Spec, SpecError> {
    let mut spec = Spec::parse(&entry.spec)?;
    for (key, value) in &entry.options {
        let value = match value {
            _ if key == MODE_KEY && !value.is_str() => show_mode(&entry.spec, value)?,
            toml::Value::Array(list) => {
                let elements = list.iter().map(|element| show_scalar(&entry.spec, key, element));
                elements.collect::<Result<Vec<_>, _>>()?.join(",")
            }
            value => show_scalar(&entry.spec, key, value)?,
        };
        spec.set(key, &value)?;
    }
    Ok(spec)
}

/// A value of a file, or an element of a list, as it is written behind a name.
fn show_scalar(object: &str, key: &str, value: &toml::Value) -> Result<String, SpecError> {
    match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Boolean(switch) => Ok(switch.to_string()),
        other => {
            let cause = format!("the value of '{key}' has a {}", other.type_str());
            Err(SpecError::new(object, cause, "give a string, a number, true, false or a list of these"))
        }
    }
}

/// Parses permissions of a socket, written in octal as for `chmod`.
pub(crate) fn parse_mode(text: &str) -> Option<u32> {
    let octal = text.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
    u32::from_str_radix(text, 8).ok().filter(|mode| octal && *mode <= MODE_MAX)
}

/// The permissions that a value of a file means, if it is no text: as they are written behind a name.
fn show_mode(object: &str, value: &toml::Value) -> Result<String, SpecError> {
    let cause = match value {
        toml::Value::Integer(mode) if (0..=i64::from(MODE_MAX)).contains(mode) => return Ok(format!("{mode:04o}")),
        toml::Value::Integer(mode) => format!("{MODE_KEY} = {mode} is not from 0o000 to 0o777"),
        other => format!("the value of '{MODE_KEY}' is a {}", other.type_str()),
    };
    Err(SpecError::new(object, cause, format!("give {MODE_WANTED}")))
}

fn some_device_is_named(disks: Vec<DiskPlan>) -> Result<Vec<DiskPlan>, PlanError> {
    if disks.is_empty() {
        return Err(SpecError::new(
            "nothing",
            "no device is named",
            "name one with --device, or [[device]] in the file",
        )
        .into());
    }
    Ok(disks)
}

/// A device without an export. Reported once the device is open, since errors of its name come first.
pub(crate) fn unserved(device: &str) -> SpecError {
    let cure =
        "add --export vhost-user-blk:SOCKET or --export vfio-user:SOCKET after it, or [[device.export]] in the file";
    SpecError::new(device, "no export serves this device", cure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_serves_the_device_before_it() {
        let words = [
            Word::Device("a.img".into()),
            Word::Export("vhost-user-blk:a.sock?queues=2".into()),
            Word::Device("ram:1G".into()),
            Word::Export("vhost-user-blk:b.sock".into()),
            Word::Export("vhost-user-blk:c.sock".into()),
        ];
        let disks = from_words(&words).unwrap();
        let shape: Vec<_> = disks.iter().map(|disk| (disk.device.name.as_str(), disk.exports.len())).collect();
        assert_eq!(shape, [("a.img", 1), ("ram:1G", 2)]);
        assert!(from_words(&words[1..]).unwrap_err().to_string().contains("--device SPEC before"));
        assert!(from_words(&words[..1]).unwrap()[0].exports.is_empty());
        assert!(unserved("a.img").to_string().contains("--export"));
    }

    #[test]
    fn a_file_says_the_same_with_keys() {
        let text = r#"
            [[device]]
            spec = "file:disk.img"
            readonly = true
            [[device.export]]
            spec = "vhost-user-blk:/run/a.sock"
            queues = 4
            lanes = [0, 1]
        "#;
        let mut disks = from_toml(text, Path::new("x.toml")).unwrap().disks;
        assert_eq!(disks[0].device.take_switch("readonly"), Ok(Some(true)));
        let export = &mut disks[0].exports[0];
        assert_eq!(export.take_number("queues", 1, 64), Ok(Some(4)));
        assert_eq!(export.take("lanes").as_deref(), Some("0,1"));
    }

    #[test]
    fn a_mode_is_the_same_as_text_and_as_a_number() {
        let mode = |value: &str| {
            let text =
                format!("[[device]]\nspec = 'ram:1G'\n[[device.export]]\nspec = 'vhost-user-blk:s'\nmode = {value}");
            let mut plan = from_toml(&text, Path::new("x.toml")).map_err(|error| error.to_string())?;
            Ok::<_, String>(plan.disks[0].exports[0].take("mode").unwrap())
        };
        for same in ["\"0660\"", "0o660", "432", "0x1b0"] {
            assert_eq!(mode(same).as_deref(), Ok("0660"), "{same}");
        }
        assert_eq!(mode("0").as_deref(), Ok("0000"));
        for wrong in ["660", "-1", "0o1000", "9223372036854775807"] {
            let error = mode(wrong).unwrap_err();
            assert!(error.contains("mode = \"0660\"") && error.contains("mode = 0o660"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_list_of_strings_is_the_same_as_their_text() {
        let hosts = |value: &str| {
            let text =
                format!("[[device]]\nspec = 'ram:1G'\n[[device.export]]\nspec = 'nvme-tcp://:1'\nhosts = {value}");
            let mut plan = from_toml(&text, Path::new("x.toml")).map_err(|error| error.to_string())?;
            Ok::<_, String>(plan.disks[0].exports[0].take("hosts").unwrap())
        };
        assert_eq!(hosts("'nqn.a,nqn.b'").as_deref(), Ok("nqn.a,nqn.b"));
        assert_eq!(hosts("['nqn.a', \"nqn.b\"]").as_deref(), Ok("nqn.a,nqn.b"));
        for wrong in ["1.5", "[1.5]", "[['nqn.a']]", "{}"] {
            let error = hosts(wrong).unwrap_err();
            assert!(error.contains("'hosts'") && error.contains("give a string"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_file_with_an_unknown_key_or_no_device_is_refused() {
        for (text, word) in [
            ("lane = 3", "lane"),
            ("lanes = \"many\"", "lanes"),
            ("", "no device"),
            ("[[device]]\nspec = \"ram:1G\"\nreadonly = {}", "readonly"),
            ("[[device]]\n", "spec"),
        ] {
            let error = from_toml(text, Path::new("x.toml")).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(from_file(Path::new("/nonexistent.toml")).unwrap_err().to_string().contains("/nonexistent.toml"));
    }
}
