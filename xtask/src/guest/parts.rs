//! Packages unpacked side by side, and small scripts that run programs from there.
//!
//! A program of one release does not find its libraries on another, so each is started by the dynamic loader of its own
//! tree with that tree's library path. Packages are downloaded in `apt`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::apt::Suite;
use super::remove;
use crate::process::succeed;

/// Packages for the guest, and for building it and checking its disks on the host.
const USERLAND: &[&str] = &[
    "busybox-static",
    "cpio",
    "e2fsprogs",
    "fio",
    "kmod",
    "ktls-utils",
    "libgcc-s1",
    "nvme-cli",
    "util-linux",
    "xz-utils",
    "zstd",
];

/// The emulator, its tools, and the block drivers that libblkio brings to them.
const QEMU: &[&str] = &["qemu-system-x86", "qemu-utils", "qemu-block-extra"];

/// Packages needed to build programs with libblkio, which comes with QEMU's packages.
const LIBBLKIO: &str = "libblkio-dev";

/// Programs for the host: their paths and fixed arguments.
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

/// File in a part with the list of its packages.
pub const CONTENTS: &str = "packages";
/// Dynamic loader of a tree.
pub const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// Library folder of Debian.
pub const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// fio and QEMU's tools support Ceph, whose libraries find each other by a path outside these trees.
pub const LIBRARIES_OF_CEPH: &str = "usr/lib/x86_64-linux-gnu/ceph";

const UNPACK_LIMIT: Duration = Duration::from_mins(5);

pub fn userland_recipe() -> String {
    format!("{} {}\n", super::USERLAND_SUITE, USERLAND.join(" "))
}

pub fn qemu_recipe() -> String {
    format!("{} {}\n", super::QEMU_SUITE, QEMU.join(" "))
}

/// The library itself is in `qemu`, whose versions are in `contents`, and must match this package.
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

/// Unpacks packages into `root`, and records their names there.
pub fn unpack(debs: &[PathBuf], root: &Path) -> Result<()> {
    // On Debian these are links into /usr; made first, so that packages with /lib paths follow them.
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

/// Unpacks an archive of a source into `to`, as these arguments of tar choose.
pub fn unpack_source<'a>(
    archive: &Path,
    guest: &Path,
    to: &Path,
    choice: impl IntoIterator<Item = &'a str>,
) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-x").arg("-f").arg(archive).arg("-C").arg(to).args(["--strip-components=1", "--no-same-owner"]);
    tar.arg(format!("--use-compress-program={}", guest.join("bin/xz").display())).arg("--wildcards").args(choice);
    succeed("tar", &tar, UNPACK_LIMIT).with_context(|| format!("cannot unpack {}", archive.display()))?;
    Ok(())
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a script that can be run.
pub fn write_script(path: &Path, text: &str) -> Result<()> {
    write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

/// Packages of a part, with their versions.
pub fn contents(part: &Path) -> Result<String> {
    let path = part.join(CONTENTS);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes the scripts that run programs of the parts; they find the parts relative to their own folder.
pub fn programs(guest: &Path, new: &Path) -> Result<()> {
    for (part, path, arguments) in PROGRAMS {
        let program = guest.join(part).join(path);
        if !program.exists() {
            bail!("the packages brought no {}", program.display());
        }
        let name = Path::new(path).file_name().unwrap_or_default();
        let script = new.join(name);
        write_script(&script, &wrapper(part, path, arguments))?;
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
exec "$root/{LOADER}" --argv0 {name} \
    --library-path "$root/{LIBRARIES}:$root/{LIBRARIES_OF_CEPH}" "$root/{path}" {arguments} "$@"
"#
    )
}
