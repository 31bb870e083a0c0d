//! Modules of VFIO with iommufd for the newer kernel, built from Debian's source of it: Debian's kernels have none.
//!
//! iommufd needs nothing of the kernel itself but one small iterator, so its module, and those of VFIO with the same
//! configuration, run in Debian's kernel. They replace its own. Tools and headers are packages, unpacked for the build
//! and removed after it; the compiler is the one that links Rust programs here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::apt::Suite;
use super::parts::{self, LIBRARIES, LOADER, write, write_script};
use super::{kernel, remove};
use crate::host;
use crate::process::succeed;

/// The modules, in the order in which they are loaded, with their places below the source's folder of drivers.
const MODULES: &[(&str, &str)] = &[
    ("iommufd", "iommu/iommufd"),
    ("vfio", "vfio"),
    ("vfio_iommu_type1", "vfio"),
    ("vfio-pci-core", "vfio/pci"),
    ("vfio-pci", "vfio/pci"),
];

/// Parts of the source that the modules are built from.
const SOURCES: &[&str] = &["*/drivers/iommu/*.h", "*/drivers/iommu/iommufd", "*/drivers/vfio", "*/lib/interval_tree.c"];

/// The configuration that Debian's kernel lacks, for make and for the compiler.
const SET: &[(&str, &str)] = &[("CONFIG_IOMMUFD", "m"), ("CONFIG_VFIO_DEVICE_CDEV", "y")];
/// What Debian's configuration has and this build leaves out: other drivers, information for debuggers, and an option
/// of the compiler that older ones lack.
const UNSET: &[&str] = &[
    "CONFIG_VFIO_MDEV",
    "CONFIG_VFIO_PLATFORM_BASE",
    "CONFIG_VFIO_CDX",
    "CONFIG_DEBUG_INFO",
    "CONFIG_DEBUG_INFO_BTF_MODULES",
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT",
];
const DEFINED: &str = "-DCONFIG_IOMMUFD_MODULE=1 -DCONFIG_VFIO_DEVICE_CDEV=1 -DCONFIG_INTERVAL_TREE_SPAN_ITER=1";

/// Programs of the kernel's build that need the libraries of their release, below the folder of kbuild.
const TOOLS: &[&str] = &["scripts/mod/modpost.real-lsb-64", "tools/objtool/objtool.real-x86"];

/// The iterator that Debian's kernel leaves out, with the tree that it walks: both become part of iommufd, and export
/// nothing.
const SPAN: &str = "#include <linux/export.h>\n\
                    #undef EXPORT_SYMBOL_GPL\n\
                    #define EXPORT_SYMBOL_GPL(symbol)\n\
                    #include \"../../../lib/interval_tree.c\"\n";

/// The build takes 38 s of CPU time, on all CPUs.
const BUILD_LIMIT: Duration = Duration::from_mins(15);

/// `kernel` is the list of the kernel's packages.
pub fn recipe(kernel: &str) -> String {
    let modules: Vec<_> = MODULES.iter().map(|(name, place)| format!("{place}/{name}")).collect();
    let set: Vec<_> = SET.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let (suite, modules, set, unset) = (super::NEW_KERNEL_SUITE, modules.join(" "), set.join(" "), UNSET.join(" "));
    format!("{suite} {modules} with {set} {DEFINED}\nwithout {unset}\n{SPAN}{kernel}")
}

/// The modules of the part, in the order in which they are loaded.
pub fn modules(part: &Path) -> Vec<PathBuf> {
    MODULES.iter().map(|(name, _)| part.join(format!("{name}.ko"))).collect()
}

/// Builds the modules for this kernel in `new`. The tools run with QEMU's libraries, which have the same release.
pub fn build(suite: &Suite, guest: &Path, kernel: &Path, new: &Path) -> Result<()> {
    host::require(&[("make", "make")])?;
    let [archives, tree, source] = ["archives", "tree", "source"].map(|name| new.join(name));
    for folder in [&tree, &source] {
        fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let release = kernel::version(kernel)?;
    let packages = packages(&release, &parts::contents(kernel)?)?;
    let mut debs = Vec::new();
    for package in &packages {
        debs = suite.fetch_alone(package, &archives).context("older kernels leave the archive; rebuild the guest")?;
    }
    parts::unpack(&debs, &tree)?;
    unpack_source(guest, &tree, &source)?;
    wrap_tools(guest, &tree)?;
    make(&tree, &release, &source)?;
    for ((name, place), to) in MODULES.iter().zip(modules(new)) {
        let from = source.join("drivers").join(place).join(format!("{name}.ko"));
        fs::rename(&from, &to).with_context(|| format!("the build left no {}", from.display()))?;
    }
    [archives, tree, source].iter().try_for_each(|folder| remove(folder))
}

/// Headers, tools and source of a kernel, each of the version that its packages have.
///
/// The release is such as `7.3.4+deb13-amd64`, the source of which is `linux-source-7.3`.
fn packages(release: &str, contents: &str) -> Result<Vec<String>> {
    let of_kernel = contents.lines().find(|package| package.contains(release));
    let version = of_kernel.and_then(|package| package.split('_').nth(1)).map(|version| version.replace("%3a", ":"));
    let version = version.with_context(|| format!("no package of the kernel {release} has a version"))?;
    let base = release.strip_suffix("-amd64").with_context(|| format!("{release} is not a kernel for amd64"))?;
    let series: Vec<_> = base.splitn(3, '.').take(2).collect();
    ensure!(series.len() == 2, "the kernel {release} is of no series");
    let names = [
        format!("linux-headers-{release}"),
        format!("linux-headers-{base}-common"),
        format!("linux-kbuild-{base}"),
        format!("linux-source-{}", series.join(".")),
    ];
    Ok(names.into_iter().map(|name| format!("{name}={version}")).collect())
}

/// Unpacks the parts of the source that are needed, and adds the iterator to iommufd.
fn unpack_source(guest: &Path, tree: &Path, to: &Path) -> Result<()> {
    let archive = entry(&tree.join("usr/src"), "linux-source-", ".tar.xz")?;
    parts::unpack_source(&archive, guest, to, SOURCES.iter().copied())?;
    let drivers = to.join("drivers");
    write(&drivers.join("Kbuild"), "obj-m += iommu/iommufd/ vfio/\n")?;
    let makefile = drivers.join("iommu/iommufd/Makefile");
    let text = fs::read_to_string(&makefile).with_context(|| format!("cannot read {}", makefile.display()))?;
    write(&makefile, &format!("{text}\niommufd-y += span.o\n"))?;
    write(&drivers.join("iommu/iommufd/span.c"), SPAN)
}

/// Puts scripts in the place of tools, which run them with the libraries of their release.
fn wrap_tools(guest: &Path, tree: &Path) -> Result<()> {
    let kbuild = entry(&tree.join("usr/lib"), "linux-kbuild-", "")?;
    let libraries = guest.join("qemu");
    for tool in TOOLS {
        let (path, program) = (kbuild.join(tool), kbuild.join(format!("{tool}.bin")));
        fs::rename(&path, &program).with_context(|| format!("the packages brought no {}", path.display()))?;
        let (libraries, program) = (libraries.display(), program.display());
        let text = format!(
            "#!/bin/sh\n\
             exec '{libraries}/{LOADER}' --library-path '{libraries}/{LIBRARIES}' '{program}' \"$@\"\n"
        );
        write_script(&path, &text)?;
    }
    Ok(())
}

fn make(tree: &Path, release: &str, source: &Path) -> Result<()> {
    let headers = tree.join("usr/src").join(format!("linux-headers-{release}"));
    let common = entry(&tree.join("usr/src"), "linux-headers-", "-common")?;
    // Debian's has the name of its compiler.
    write(&headers.join(".kernelvariables"), &format!("override ARCH = x86\noverride KERNELRELEASE = {release}\n"))?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = Command::new("make");
    make.arg("-C").arg(&headers).arg("-f").arg(common.join("Makefile")).arg(format!("-j{jobs}"));
    make.arg(format!("KBUILD_OUTPUT={}", headers.display())).arg(format!("M={}", source.join("drivers").display()));
    make.args(["CC=cc".into(), format!("KCFLAGS={DEFINED}")]);
    make.args(SET.iter().map(|(key, value)| format!("{key}={value}")));
    make.args(UNSET.iter().map(|key| format!("{key}=")));
    succeed("make", make.arg("modules"), BUILD_LIMIT).context("cannot build the modules")?;
    Ok(())
}

/// The entry of a folder with such a name.
fn entry(folder: &Path, start: &str, end: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let name = names.find(|name| name.starts_with(start) && name.ends_with(end));
    name.map(|name| folder.join(name)).with_context(|| format!("the packages brought no {start}*{end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_the_version_of_the_kernel() {
        let contents = "linux-base_4.17_all.deb\nlinux-binary-7.3.4+deb13-amd64_7.3.4-1~bpo13+1_amd64.deb\n";
        let found = packages("7.3.4+deb13-amd64", contents).unwrap();
        let wanted = [
            "linux-headers-7.3.4+deb13-amd64=7.3.4-1~bpo13+1",
            "linux-headers-7.3.4+deb13-common=7.3.4-1~bpo13+1",
            "linux-kbuild-7.3.4+deb13=7.3.4-1~bpo13+1",
            "linux-source-7.3=7.3.4-1~bpo13+1",
        ];
        assert_eq!(found, wanted);
        assert!(packages("7.3.4+deb13-arm64", contents).is_err());
        assert!(packages("7.3.5+deb13-amd64", contents).is_err());
    }
}
