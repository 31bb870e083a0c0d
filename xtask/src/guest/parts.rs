//! Packages unpacked side by side, and small scripts that run programs from there.
//!
//! A program from one release does not find its libraries on another, so each is started by the
//! dynamic loader of its own tree with the library path of that tree. Does not know apt: see `apt`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::apt::Suite;
use super::remove;
use crate::process::succeed;

/// What the guest is made of, and what the host needs to put it together and to look at its disks.
const USERLAND: &[&str] =
    &["busybox-static", "cpio", "e2fsprogs", "fio", "kmod", "libgcc-s1", "util-linux", "xz-utils", "zstd"];

/// The emulator, its tools, and the block drivers that libblkio brings to them.
const QEMU: &[&str] = &["qemu-system-x86", "qemu-utils", "qemu-block-extra"];

/// What a program of ours needs to be built with libblkio, which is among what QEMU's packages bring.
const LIBBLKIO: &str = "libblkio-dev";

/// The programs offered to the host: where they lie, and the arguments they always need there.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("userland", "usr/bin/cpio", ""),
    ("userland", "usr/bin/fio", ""),
    ("userland", "usr/bin/xz", ""),
    ("userland", "usr/bin/zstd", ""),
    ("userland", "usr/sbin/debugfs", ""),
    ("userland", "usr/sbin/depmod", ""),
    ("userland", "usr/sbin/e2fsck", ""),
    ("userland", "usr/sbin/mke2fs", ""),
    ("qemu", "usr/bin/qemu-img", ""),
    ("qemu", "usr/bin/qemu-io", ""),
    ("qemu", "usr/bin/qemu-storage-daemon", ""),
    ("qemu", "usr/bin/qemu-system-x86_64", "-L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\""),
];

/// Where a part lists the packages it was made of.
pub const CONTENTS: &str = "packages";
/// Where Debian keeps libraries.
pub const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// fio and QEMU's tools can speak to Ceph, whose libraries find each other by a path outside our trees.
pub const LIBRARIES_OF_CEPH: &str = "usr/lib/x86_64-linux-gnu/ceph";

const UNPACK_LIMIT: Duration = Duration::from_mins(5);

pub fn userland_recipe() -> String {
    format!("{} {}\n", super::USERLAND_SUITE, USERLAND.join(" "))
}

pub fn qemu_recipe() -> String {
    format!("{} {}\n", super::QEMU_SUITE, QEMU.join(" "))
}

/// The library itself lies in `qemu`, of which `contents` tells the versions, and this has to go with it.
pub fn libblkio_recipe(contents: &str) -> String {
    let library = contents.lines().find(|package| package.starts_with("libblkio")).unwrap_or_default();
    format!("{} {LIBBLKIO} for {library}\n", super::QEMU_SUITE)
}

pub fn programs_recipe() -> String {
    PROGRAMS.iter().map(|(part, path, arguments)| wrapper(part, path, arguments)).collect()
}

pub fn userland(suite: &Suite, new: &Path) -> Result<()> {
    packages(suite, USERLAND, new)
}

pub fn qemu(suite: &Suite, new: &Path) -> Result<()> {
    packages(suite, QEMU, new)
}

pub fn libblkio(suite: &Suite, new: &Path) -> Result<()> {
    let archives = new.join("archives");
    unpack(&suite.fetch_alone(LIBBLKIO, &archives)?, new)?;
    remove(&archives)
}

fn packages(suite: &Suite, names: &[&str], new: &Path) -> Result<()> {
    let archives = new.join("archives");
    let debs = suite.fetch(names, &archives)?;
    unpack(&debs, new)?;
    remove(&archives)
}

/// Unpacks packages into `root`, and notes their names there.
pub fn unpack(debs: &[PathBuf], root: &Path) -> Result<()> {
    // On Debian these are links into /usr; made first, so that packages which still say /lib land there.
    for folder in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(folder))?;
        symlink(format!("usr/{folder}"), root.join(folder))
            .with_context(|| format!("cannot make links in {}", root.display()))?;
    }
    let mut contents = String::new();
    for deb in debs {
        let mut command = Command::new("sh");
        command
            .args(["-ec", "dpkg-deb --fsys-tarfile \"$1\" | tar -x -C \"$2\" --keep-directory-symlink --no-same-owner"])
            .arg("unpack")
            .arg(deb)
            .arg(root);
        succeed("dpkg-deb", &command, UNPACK_LIMIT).with_context(|| format!("cannot unpack {}", deb.display()))?;
        contents.push_str(&deb.file_name().unwrap_or_default().to_string_lossy());
        contents.push('\n');
    }
    fs::write(root.join(CONTENTS), contents).with_context(|| format!("cannot write into {}", root.display()))
}

/// Writes the scripts that run programs of the parts; they find the parts beside their own folder.
pub fn programs(guest: &Path, new: &Path) -> Result<()> {
    for (part, path, arguments) in PROGRAMS {
        let program = guest.join(part).join(path);
        if !program.exists() {
            bail!("the packages brought no {}", program.display());
        }
        let name = Path::new(path).file_name().unwrap_or_default();
        let script = new.join(name);
        fs::write(&script, wrapper(part, path, arguments))
            .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", script.display()))?;
    }
    Ok(())
}

fn wrapper(part: &str, path: &str, arguments: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    format!(
        r#"#!/bin/sh
# {name}, from Debian packages that are unpacked and not installed, with their own libraries.
guest=$(dirname "$(dirname "$(readlink -f "$0")")")
root=$guest/{part}
export QEMU_MODULE_DIR="$root/{LIBRARIES}/qemu"
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --argv0 {name} \
    --library-path "$root/{LIBRARIES}:$root/{LIBRARIES_OF_CEPH}" "$root/{path}" {arguments} "$@"
"#
    )
}
