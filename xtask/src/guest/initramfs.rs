//! The guest's root file system: busybox, the tests' programs with their libraries, and kernel modules.
//!
//! Kept twice: as the archive for the kernel, and as a tree for bootable images. It is not compressed, since the
//! emulated CPU unpacks slowly.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::kernel::{self, Modules};
use super::parts::{LIBRARIES, LIBRARIES_OF_CEPH, LOADER};
use crate::process::{run, succeed};

/// The first process; see the file.
const INIT: &str = include_str!("init");

/// Programs besides busybox, whose own versions lack needed options. busybox's shell prefers its own versions unless
/// the whole path is given.
const PROGRAMS: &[&str] = &[
    "usr/bin/fio",
    "usr/bin/setpriv",
    "usr/sbin/blkdiscard",
    "usr/sbin/blockdev",
    "usr/sbin/e2fsck",
    "usr/sbin/mkfs.ext4",
    "usr/sbin/nvme",
];

/// Modules for the task's input, its output, the disk under test and its file system; for a folder of the host; for
/// NVMe, by the kernel's driver or by programs in the guest; and for NVMe over TCP, with the kernel as host or target,
/// also with TLS, whose algorithms are loaded by name.
const MODULES: &[&str] = &[
    "qemu_fw_cfg",
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "ext4",
    "crc32c_generic",
    "crc32c_intel",
    "9p",
    "9pnet_virtio",
    "nvme",
    "vfio_pci",
    "vfio_iommu_type1",
    "virtio_net",
    "nvme_tcp",
    "nvmet_tcp",
    "brd",
    "tls",
    "gcm",
    "seqiv",
    "ghash_generic",
];

/// Modules of that list that newer kernels lack: their algorithms are built in.
const ALGORITHMS: &[&str] = &["crc32c_generic", "crc32c_intel", "ghash_generic"];

/// Loaded by name at run time, so no program lists it: needed for thread cancellation in the C library.
const HIDDEN_LIBRARIES: &[&str] = &["libgcc_s.so.1"];

const FOLDERS: &[&str] =
    &["dev", "etc", "proc", "root", "run", "sys", "sysroot", "tmp", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"];

/// Version of the recipe, incremented when the code below changes its result for the same list.
const VERSION: u32 = 2;

const TOOL_LIMIT: Duration = Duration::from_mins(2);

pub fn recipe() -> String {
    format!("version {VERSION}\n{} {}\n{INIT}", PROGRAMS.join(" "), MODULES.join(" "))
}

/// Makes the root for the kernel in this part of the guest.
pub fn build(guest: &Path, kernel: &str, new: &Path) -> Result<()> {
    let tree = new.join("tree");
    for folder in FOLDERS {
        fs::create_dir_all(tree.join(folder)).with_context(|| format!("cannot make {}", tree.display()))?;
    }
    for folder in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{folder}"), tree.join(folder))?;
    }
    fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    fs::write(tree.join("etc/group"), "root:x:0:\n")?;
    let init = tree.join("init");
    fs::write(&init, INIT)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;

    programs(&guest.join("userland"), &tree)?;
    modules(guest, &guest.join(kernel), &tree)?;
    archive(guest, &tree, &new.join("cpio"))
}

/// Copies the programs with the libraries found by their loader, then busybox under every remaining name.
fn programs(from: &Path, tree: &Path) -> Result<()> {
    let loader = Path::new(LOADER);
    copy(&from.join(loader), &tree.join(loader))?;
    let libraries = from.join(LIBRARIES);
    let mut needed: BTreeSet<PathBuf> = HIDDEN_LIBRARIES.iter().map(|name| libraries.join(name)).collect();
    for program in PROGRAMS {
        copy(&from.join(program), &tree.join(program))?;
        needed.extend(libraries_of(from, program)?);
    }
    fs::create_dir_all(tree.join(LIBRARIES))?;
    for library in needed {
        let name = library.file_name().context("a library without a name")?;
        copy(&library, &tree.join(LIBRARIES).join(name))?;
    }

    let busybox = tree.join("usr/bin/busybox");
    copy(&from.join("usr/bin/busybox"), &busybox)?;
    let mut list = Command::new(&busybox);
    list.arg("--list");
    for applet in succeed("busybox", &list, TOOL_LIMIT)?.lines() {
        let taken = ["usr/bin", "usr/sbin"].iter().any(|folder| tree.join(folder).join(applet).exists());
        if !taken {
            symlink("busybox", tree.join("usr/bin").join(applet))?;
        }
    }
    // The kernel runs modprobe by this path, and loads the checksum modules of file systems.
    symlink("../bin/busybox", tree.join("usr/sbin/modprobe"))?;
    Ok(())
}

/// The libraries that a program among these packages needs, found by their loader.
pub fn libraries_of(from: &Path, program: &str) -> Result<Vec<PathBuf>> {
    let search = format!("{}:{}", from.join(LIBRARIES).display(), from.join(LIBRARIES_OF_CEPH).display());
    let mut list = Command::new(from.join(LOADER));
    list.arg("--library-path").arg(&search).arg("--list").arg(from.join(program));
    Ok(listed_libraries(&succeed("the dynamic loader", &list, TOOL_LIMIT)?).collect())
}

/// The loader lists a library as `NAME => PATH (ADDRESS)`.
fn listed_libraries(listing: &str) -> impl Iterator<Item = PathBuf> + '_ {
    listing.lines().filter_map(|line| line.split_once(" => ")?.1.split(' ').next()).map(PathBuf::from)
}

fn modules(guest: &Path, kernel: &Path, tree: &Path) -> Result<()> {
    let version = kernel::version(kernel)?;
    let modules = Modules::read(kernel)?;
    let names: Vec<_> =
        MODULES.iter().copied().filter(|name| !ALGORITHMS.contains(name) || modules.has(name)).collect();
    let to = tree.join("usr/lib/modules").join(&version);
    for path in modules.closure(&names)? {
        let packed = to.join(&path);
        fs::create_dir_all(packed.parent().context("a module outside every folder")?)?;
        copy(&modules.folder().join(&path), &packed)?;
        if packed.extension().is_some_and(|extension| extension == "xz") {
            let mut xz = Command::new(guest.join("bin/xz"));
            succeed("xz", xz.args(["-d", "-q"]).arg(&packed), TOOL_LIMIT)?;
        }
    }
    for table in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        copy(&modules.folder().join(table), &to.join(table))?;
    }
    kernel::depmod(guest, tree, &version)
}

fn archive(guest: &Path, tree: &Path, to: &Path) -> Result<()> {
    let script = "find . -print0 | LC_ALL=C sort -z | \"$1\" --null --create --format=newc --owner=0:0 --quiet >\"$2\"";
    let mut command = Command::new("sh");
    command.args(["-ec", script, "archive"]).arg(guest.join("bin/cpio")).arg(to).current_dir(tree);
    let ended = run("cpio", &command, TOOL_LIMIT)?;
    let size = to.metadata().map_or(0, |metadata| metadata.len());
    ensure!(ended.status.success() && size > 0, "cpio failed ({}):\n{}", ended.status, ended.said());
    Ok(())
}

/// Copies the target of `from` with its permissions.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_path() {
        let listing = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /x/libc.so.6 (0x7f)\n\t/lib64/ld.so (0x7f)\n";
        assert_eq!(listed_libraries(listing).collect::<Vec<_>>(), [PathBuf::from("/x/libc.so.6")]);
    }
}
