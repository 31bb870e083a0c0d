//! QEMU's NVMe controller behind vfio-user, built from Debian's source package: Debian's builds leave that server out.
//!
//! The build has this one device and no emulated CPU. Its tools and headers are packages, unpacked for the build and
//! removed after it; the compiler is the one that links Rust programs here. The result runs with the libraries of the
//! userland, which has the same release.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::apt::Suite;
use super::parts::{self, LIBRARIES, LOADER, write, write_script};
use super::remove;
use crate::process::succeed;

/// The program in its part.
pub const PROGRAM: &str = "qemu-system-x86_64";

const SOURCE: &str = "qemu";
/// Build tools, and headers with their libraries.
const PACKAGES: &[&str] =
    &["libcmocka-dev", "libglib2.0-dev", "libjson-c-dev", "meson", "ninja-build", "pkgconf", "python3", "zlib1g-dev"];
/// Programs of these packages that the build runs.
const TOOLS: &[&str] = &["ninja", "pkgconf", "python3"];

/// Parts of the source that no target of this build needs.
const LEFT_OUT: &[&str] = &["*/roms", "*/tests/data", "*/tests/tcg"];
/// Descriptions of firmware images, which Debian's source lacks, and of tests that need them.
const EMPTIED: &[&str] = &["pc-bios/meson.build", "tests/meson.build"];

/// Name and content of the list of devices.
const DEVICES: (&str, &str) =
    ("vfio-user", "CONFIG_PCI_EXPRESS=y\nCONFIG_MULTIPROCESS=y\nCONFIG_VFIO_USER_SERVER=y\nCONFIG_NVME_PCI=y\n");

/// Options of the build: no feature that is not named, one program, and little work for the compiler.
const OPTIONS: &[&str] = &[
    "--wrap-mode=nodownload",
    "-Dauto_features=disabled",
    "-Ddefault_devices=false",
    "-Dtcg=disabled",
    "-Dkvm=enabled",
    "-Dmultiprocess=enabled",
    "-Dvfio_user_server=enabled",
    "-Dtools=disabled",
    "-Dguest_agent=disabled",
    "-Ddocs=disabled",
    "-Dinstall_blobs=false",
    "-Dtrace_backends=nop",
    "-Dlibvfio-user:default_library=static",
    "-Dbuildtype=plain",
    "-Doptimization=1",
    "-Ddebug=false",
    "-Dwerror=false",
];

/// The build takes 165 s of CPU time, on all CPUs.
const BUILD_LIMIT: Duration = Duration::from_mins(30);

/// `userland` is the list of the userland's packages.
pub fn recipe(userland: &str) -> String {
    let (packages, left_out, emptied) = (PACKAGES.join(" "), LEFT_OUT.join(" "), EMPTIED.join(" "));
    let (suite, options, (_, devices)) = (super::USERLAND_SUITE, OPTIONS.join(" "), DEVICES);
    format!("{suite} {SOURCE} with {packages}\nwithout {left_out} {emptied}\n{options}\n{devices}{userland}")
}

/// Builds the program in `new`.
pub fn build(suite: &Suite, guest: &Path, new: &Path) -> Result<()> {
    let (archives, tree, source, build) =
        (new.join("archives"), new.join("tree"), new.join("source"), new.join("build"));
    for folder in [&tree, &source, &build] {
        fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    parts::unpack(&suite.fetch(PACKAGES, &archives)?, &tree)?;
    unpack_source(&suite.fetch_source(SOURCE, &archives)?, guest, &source)?;
    let tools = write_tools(new, &tree)?;
    configure(&tools, &tree, &source, &build)?;
    let mut ninja = Command::new(tools.join("ninja"));
    succeed("ninja", in_build(&mut ninja, &tools, &tree, &build).arg(PROGRAM), BUILD_LIMIT)?;
    let (from, to) = (build.join(PROGRAM), new.join(PROGRAM));
    fs::rename(&from, &to).with_context(|| format!("the build left no {}", from.display()))?;
    [archives, tree, source, build, tools].iter().try_for_each(|folder| remove(folder))
}

fn unpack_source(archive: &Path, guest: &Path, to: &Path) -> Result<()> {
    let left_out: Vec<_> = LEFT_OUT.iter().map(|pattern| format!("--exclude={pattern}")).collect();
    parts::unpack_source(archive, guest, to, left_out.iter().map(String::as_str))?;
    let (name, devices) = DEVICES;
    let list = format!("configs/devices/x86_64-softmmu/{name}.mak");
    for (path, content) in EMPTIED.iter().map(|path| (*path, "")).chain([(list.as_str(), devices)]) {
        write(&to.join(path), content)?;
    }
    Ok(())
}

/// Writes a script for each tool, which runs it with the libraries of its own tree, and returns their folder.
fn write_tools(new: &Path, tree: &Path) -> Result<PathBuf> {
    let folder = new.join("tools");
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for tool in TOOLS {
        let (path, tree) = (folder.join(tool), tree.display());
        let text = format!(
            "#!/bin/sh\n\
             export PYTHONHOME='{tree}/usr'\n\
             exec '{tree}/{LOADER}' --argv0 \"$0\" --library-path '{tree}/{LIBRARIES}' '{tree}/usr/bin/{tool}' \"$@\"\n"
        );
        write_script(&path, &text)?;
    }
    Ok(folder)
}

/// QEMU's `configure` would look for Python packages that only its tests need, so meson is called as it does.
fn configure(tools: &Path, tree: &Path, source: &Path, build: &Path) -> Result<()> {
    write(&build.join("config-host.mak"), "TARGET_DIRS=x86_64-softmmu\nGDB=\nGENISOIMAGE=\n")?;
    let machine = build.join("machine.ini");
    let (tree_name, pkgconf) = (tree.display(), tools.join("pkgconf"));
    // The compiler looks for libraries beside itself before it looks in the system root.
    let compiler = format!("'cc', '--sysroot={tree_name}', '-B{tree_name}/{LIBRARIES}', '-L{tree_name}/{LIBRARIES}'");
    write(
        &machine,
        &format!(
            "[properties]\nx86_64-softmmu = '{}'\n[binaries]\nc = [{compiler}]\npkg-config = '{}'\n",
            DEVICES.0,
            pkgconf.display()
        ),
    )?;
    let mut meson = Command::new(tools.join("python3"));
    meson.args(["-m", "mesonbuild.mesonmain", "setup", "--native-file"]).arg(&machine);
    meson.args(OPTIONS).arg(build).arg(source);
    succeed("meson", in_build(&mut meson, tools, tree, build), BUILD_LIMIT).context("cannot configure QEMU")?;
    Ok(())
}

/// The command in the build's folder, with the tools first in its path and only the libraries of the tree.
fn in_build<'a>(command: &'a mut Command, tools: &Path, tree: &Path, build: &Path) -> &'a mut Command {
    let mut path = tools.as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    command.env("PATH", path).env("NINJA", tools.join("ninja")).env("PKG_CONFIG_SYSROOT_DIR", tree);
    command.env("PKG_CONFIG_LIBDIR", tree.join(LIBRARIES).join("pkgconfig")).current_dir(build)
}
