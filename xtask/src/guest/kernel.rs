//! Debian's kernel: its unpacked image, and the dependencies of modules.
//!
//! Uses only the kernel's package, without the parts for machines that boot from a disk. The guest's modules are chosen
//! in `initramfs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::apt::Suite;
use super::{parts, remove};
use crate::process::succeed;

/// The package that depends on the current kernel of a release.
const METAPACKAGE: &str = "linux-image-amd64";

/// Programs that unpack a kernel, and the first bytes of what they unpack: newer releases use zstd.
const UNPACKERS: [(&str, &[u8]); 2] = [("zstd", &[0x28, 0xb5, 0x2f, 0xfd]), ("xz", &[0xfd, b'7', b'z', b'X', b'Z', 0])];

const TOOL_LIMIT: Duration = Duration::from_mins(2);

pub fn recipe(suite: &str) -> String {
    format!("{suite} {METAPACKAGE}\n")
}

/// Unpacks the kernel into `new`, with `vmlinux` at its top and the module table up to date.
pub fn build(suite: &Suite, guest: &Path, new: &Path) -> Result<()> {
    let archives = new.join("archives");
    let mut debs = Vec::new();
    for package in suite.selection(METAPACKAGE)?.iter().filter(|name| holds_kernel(name)) {
        debs = suite.fetch_alone(package, &archives)?;
    }
    ensure!(!debs.is_empty(), "{METAPACKAGE} depends on no package that holds a kernel");
    parts::unpack(&debs, new)?;
    remove(&archives)?;

    let version = version(new)?;
    // Newer packages have it beside the modules.
    let places = [format!("boot/vmlinuz-{version}"), format!("usr/lib/modules/{version}/vmlinuz")];
    let image = places.iter().map(|place| new.join(place)).find(|place| place.exists());
    let image = image.with_context(|| format!("the kernel is at none of {places:?}"))?;
    let bytes = fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
    let payload = payload(&bytes).with_context(|| format!("cannot unpack {}", image.display()))?;
    let unpack = UNPACKERS.iter().find(|(_, magic)| payload.starts_with(magic));
    let (program, _) = unpack.with_context(|| format!("{} is compressed with neither zstd nor xz", image.display()))?;
    let packed = new.join("vmlinux.packed");
    fs::write(&packed, payload).with_context(|| format!("cannot write {}", packed.display()))?;
    let mut unpack = Command::new("sh");
    unpack.args(["-ec", "\"$1\" -dqc \"$2\" >\"$3\"", "unpack"]).arg(guest.join("bin").join(program));
    succeed(program, unpack.arg(&packed).arg(new.join("vmlinux")), TOOL_LIMIT)?;
    remove(&packed)?;
    depmod(guest, new, &version)
}

/// Writes the table of modules of the tree at `root`.
pub fn depmod(guest: &Path, root: &Path, version: &str) -> Result<()> {
    let mut depmod = Command::new(guest.join("bin/depmod"));
    depmod.arg("-b").arg(root).arg(version);
    succeed("depmod", &depmod, TOOL_LIMIT)?;
    Ok(())
}

/// The release string of the only kernel in the tree at `root`.
pub fn version(root: &Path) -> Result<String> {
    let modules = root.join("usr/lib/modules");
    let mut names = Vec::new();
    for entry in fs::read_dir(&modules).with_context(|| format!("cannot read {}", modules.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    match names.as_slice() {
        [name] => Ok(name.clone()),
        _ => bail!("there should be one kernel in {}, and there are {}", modules.display(), names.len()),
    }
}

/// A kernel's package has the version in its name; newer releases split it.
fn holds_kernel(package: &str) -> bool {
    ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"]
        .iter()
        .filter_map(|prefix| package.strip_prefix(prefix))
        .any(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

/// The compressed kernel inside a self-extracting image.
///
/// [Linux, Documentation/arch/x86/boot.rst: `setup_sects`, `payload_offset`, `payload_length`]
fn payload(image: &[u8]) -> Result<&[u8]> {
    const SETUP_SECTORS: usize = 0x1f1;
    const PAYLOAD_OFFSET: usize = 0x248;
    const PAYLOAD_LENGTH: usize = 0x24c;
    let word = |at: usize| {
        let bytes = image.get(at..at + 4).context("the image ends within its header")?;
        Ok::<_, anyhow::Error>(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let sectors = *image.get(SETUP_SECTORS).context("the image ends within its header")? as usize;
    let start = (sectors + 1) * 512 + word(PAYLOAD_OFFSET)?;
    // The last word is the unpacked size, which the program would read as the start of another frame.
    let length = word(PAYLOAD_LENGTH)?.checked_sub(4).context("the payload is empty")?;
    image.get(start..start + length).context("the payload ends beyond the image")
}

/// Module dependencies from `depmod`.
pub struct Modules {
    folder: PathBuf,
    /// Path of each module by its name, with the paths of all modules it needs.
    table: BTreeMap<String, (String, Vec<String>)>,
    built_in: BTreeSet<String>,
}

impl Modules {
    pub fn read(root: &Path) -> Result<Self> {
        let folder = root.join("usr/lib/modules").join(version(root)?);
        let read = |leaf: &str| {
            let path = folder.join(leaf);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let (table, built_in) = (parse_table(&read("modules.dep")?), read("modules.builtin")?);
        let built_in = built_in.lines().map(module_name).collect();
        Ok(Self { folder, table, built_in })
    }

    /// Folder of the modules; paths below are relative to it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether there is a module of this name, in a file or built in.
    pub fn has(&self, name: &str) -> bool {
        self.table.contains_key(&module_name(name)) || self.built_in.contains(&module_name(name))
    }

    /// The paths of the named modules and all they need. A name that is built in needs no file.
    pub fn closure(&self, names: &[&str]) -> Result<BTreeSet<String>> {
        let mut paths = BTreeSet::new();
        for name in names {
            if let Some((path, needs)) = self.table.get(&module_name(name)) {
                paths.insert(path.clone());
                paths.extend(needs.iter().cloned());
            } else if !self.built_in.contains(&module_name(name)) {
                bail!("the kernel in {} has no module {name}", self.folder.display());
            }
        }
        Ok(paths)
    }
}

/// `modules.dep` has a line a module: its path, a colon, and the paths of all it needs.
fn parse_table(text: &str) -> BTreeMap<String, (String, Vec<String>)> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let entry = |(path, needs): (&str, &str)| {
        let needs = needs.split_whitespace().map(str::to_owned).collect();
        (module_name(path), (path.to_owned(), needs))
    };
    lines.map(entry).collect()
}

/// `kernel/arch/x86/crypto/crc32c-intel.ko.xz` is the module `crc32c_intel`.
fn module_name(path: &str) -> String {
    let leaf = path.rsplit('/').next().unwrap_or(path);
    leaf.split(".ko").next().unwrap_or(leaf).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_with_a_version_hold_a_kernel() {
        assert!(holds_kernel("linux-image-6.12.1+deb13-amd64"));
        assert!(holds_kernel("linux-modules-7.2.1-amd64"));
        assert!(!holds_kernel("linux-image-amd64"));
        assert!(holds_kernel("linux-base-7.3.4+deb13-amd64"));
        assert!(!holds_kernel("linux-base"));
        assert!(!holds_kernel("linux-base-amd64"));
    }

    #[test]
    fn the_payload_lies_where_the_header_says() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&12u32.to_le_bytes());
        image[1040..1048].copy_from_slice(b"a kernel");
        assert_eq!(payload(&image).unwrap(), b"a kernel");
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(payload(&image).is_err());
        assert!(payload(&image[..600]).is_err());
        assert!(payload(&[]).is_err());
    }

    #[test]
    fn a_closure_has_what_a_module_needs() {
        let text = "a/x-y.ko.xz: b/z.ko.xz\nb/z.ko.xz:\nc/w.ko:\n";
        let modules =
            Modules { folder: "/m".into(), table: parse_table(text), built_in: BTreeSet::from(["inside".to_owned()]) };
        let paths: Vec<_> = modules.closure(&["x_y", "inside"]).unwrap().into_iter().collect();
        assert_eq!(paths, ["a/x-y.ko.xz", "b/z.ko.xz"]);
        assert!(modules.has("x_y") && modules.has("inside") && !modules.has("absent"));
        assert!(modules.closure(&["absent"]).is_err());
    }
}
