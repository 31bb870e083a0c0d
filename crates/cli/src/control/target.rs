//! Names of a daemon's parts: `device:0`, `export:/run/vm1.sock`, `lane:1`, `daemon`; in the plural all of a kind.

use std::fmt;
use std::str::FromStr;

use blkyard::spec::SpecError;

/// A kind of part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// The daemon itself.
    Daemon,
    /// A device.
    Device,
    /// An export.
    Export,
    /// A thread that does the work.
    Lane,
}

/// Some parts of a daemon: all of a kind, or those of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Their kind.
    pub kind: PartKind,
    name: Option<String>,
}

impl Target {
    /// Whether a part of this kind is meant. It may be called by its number, its name, or the end of its name.
    pub fn means(&self, number: usize, name: &str) -> bool {
        match &self.name {
            None => true,
            Some(wanted) if wanted.parse() == Ok(number) => true,
            // A number is not searched among the names.
            Some(wanted) => wanted.parse::<usize>().is_err() && name.ends_with(wanted.as_str()),
        }
    }
}

impl FromStr for Target {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Target, SpecError> {
        let (kind, name) = match text.split_once(':') {
            Some((kind, name)) if !name.is_empty() => (kind, Some(name)),
            Some((kind, _)) => (kind, None),
            None => (text, None),
        };
        let kind = match kind {
            "daemon" => PartKind::Daemon,
            "device" | "devices" => PartKind::Device,
            "export" | "exports" => PartKind::Export,
            "lane" | "lanes" => PartKind::Lane,
            _ => {
                let cure = "name daemon, devices, exports, lanes, or one of them as device:0, export:NAME, lane:0";
                return Err(SpecError::new(format!("'{text}'"), "a daemon has no such part", cure));
            }
        };
        Ok(Target { kind, name: name.map(Into::into) })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            PartKind::Daemon => "daemon",
            PartKind::Device => "device",
            PartKind::Export => "export",
            PartKind::Lane => "lane",
        };
        match &self.name {
            None => f.write_str(kind),
            Some(name) => write!(f, "{kind}:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_called_by_number_name_or_the_end_of_it() {
        let name = "vhost-user-blk:/run/vm1.sock";
        for (text, means) in [
            ("exports", true),
            ("export:", true),
            ("export:1", true),
            ("export:0", false),
            ("export:vhost-user-blk:/run/vm1.sock", true),
            ("export:/run/vm1.sock", true),
            ("export:vm1.sock", true),
            ("export:vm2.sock", false),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.kind, target.means(1, name)), (PartKind::Export, means), "{text}");
        }
        assert!(!"device:5".parse::<Target>().unwrap().means(1, "disk5"), "a number is a number");
        let error = "floor:1".parse::<Target>().unwrap_err().to_string();
        assert!(error.contains("floor:1") && error.contains("export:NAME"), "{error}");
    }
}
