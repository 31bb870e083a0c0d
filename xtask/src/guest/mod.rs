//! The test guest: a kernel, an initramfs and the programs that drive them, all from Debian packages, and one program
//! and some modules of a kernel that Debian has as source only.
//!
//! Nothing is installed and no root rights are needed. Each part is built in a temporary folder, moved to its place as
//! a whole, and stamped afterwards, so an interrupted build is never used. A stamp holds the part's recipe; a part
//! whose recipe changed is rebuilt. Booting is in `vm`.

mod apt;
mod controller;
mod initramfs;
mod iommufd;
mod kernel;
mod parts;

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::apt::Suite;
use crate::host;
use crate::process::succeed;

/// The release the guest's kernel and programs come from.
const USERLAND_SUITE: &str = "trixie";
/// The first release whose QEMU tools support vhost-user-blk as tested here (QEMU 11.1 with libblkio).
const QEMU_SUITE: &str = "trixie-backports";

/// The first release whose kernel supports in-order rings (VIRTIO_F_IN_ORDER): Linux 7.3 does, 6.12 does not.
const NEW_KERNEL_SUITE: &str = QEMU_SUITE;

/// The oldest release whose kernel is tested: Linux 6.1.
const OLD_KERNEL_SUITE: &str = "bookworm";

/// The part with the modules of VFIO and iommufd.
const IOMMUFD: &str = "iommufd";

/// Time limit for a busy machine to build one small file.
const COMPILER_LIMIT: Duration = Duration::from_mins(2);

/// A kernel for the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// The kernel of the guest's release.
    #[default]
    Usual,
    /// A newer one.
    New,
    /// The oldest that is tested.
    Old,
}

impl Kernel {
    const ALL: [Kernel; 3] = [Kernel::Usual, Kernel::New, Kernel::Old];

    /// The parts with the kernel, and the part with its initramfs.
    fn parts(self) -> [&'static str; 2] {
        match self {
            Kernel::Usual => ["kernel", "initramfs"],
            Kernel::New => ["kernel-new", "initramfs-new"],
            Kernel::Old => ["kernel-old", "initramfs-old"],
        }
    }
}

/// A folder that holds a finished guest.
pub struct Guest {
    folder: PathBuf,
}

impl Guest {
    /// The guest; missing parts are built first, and all parts if `rebuild` is set.
    pub fn ensure(rebuild: bool) -> Result<Self> {
        let folder = folder()?;
        Builder::new(&folder)?.build(rebuild)?;
        Ok(Self { folder })
    }

    /// A program of the guest's packages, for use on the host.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Copies a program of the guest's packages with its libraries, and these further ones, to a folder for the guest:
    /// for few tasks, so that not each guest has to unpack it.
    pub fn copy_program(&self, program: &str, libraries: &[&str], to: &Path) -> Result<()> {
        let userland = self.folder.join("userland");
        let further = libraries.iter().map(|name| userland.join(parts::LIBRARIES).join(name));
        let all = initramfs::libraries_of(&userland, program)?;
        for from in all.into_iter().chain(further).chain([userland.join(program)]) {
            let name = from.file_name().context("a file without a name")?;
            fs::copy(&from, to.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Ok(())
    }

    /// Copies the modules of VFIO with iommufd for [`Kernel::New`] to a folder for the guest, and returns their names
    /// in the order in which they are loaded.
    pub fn copy_iommufd(&self, to: &Path) -> Result<Vec<String>> {
        let copy = |from: PathBuf| {
            let name = from.file_name().context("a module without a name")?.to_string_lossy().into_owned();
            fs::copy(&from, to.join(&name)).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(name)
        };
        iommufd::modules(&self.folder.join(IOMMUFD)).into_iter().map(copy).collect()
    }

    /// Search path for programs of the guest, with precedence over the machine's.
    pub fn search_path(&self) -> OsString {
        let mut path = self.folder.join("bin").into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path
    }

    /// The same, as a command without arguments.
    pub fn command(&self, name: &str) -> Command {
        Command::new(self.program(name))
    }

    /// The uncompressed kernel: emulated CPUs unpack slowly.
    pub fn kernel(&self, which: Kernel) -> PathBuf {
        self.folder.join(which.parts()[0]).join("vmlinux")
    }

    pub fn initramfs(&self, of: Kernel) -> PathBuf {
        self.folder.join(of.parts()[1]).join("cpio")
    }

    /// The initramfs as a tree, for bootable images.
    pub fn root_tree(&self) -> PathBuf {
        self.folder.join("initramfs/tree")
    }

    /// Builds a C program that uses libblkio, with Rust's linker driver.
    pub fn build_with_libblkio(&self, source: &Path, program: &Path) -> Result<()> {
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-O1", "-Wall", "-I"]).arg(self.folder.join("libblkio/usr/include")).arg(source);
        // Linked with this machine's C library, which may lack symbols that libblkio finds in its own.
        cc.arg(self.libraries_of_qemu().join("libblkio.so.1")).arg("-Wl,--allow-shlib-undefined");
        succeed("the C compiler", cc.arg("-o").arg(program), COMPILER_LIMIT)?;
        Ok(())
    }

    /// A program built by that, as a command without arguments: libblkio needs the C library of its release.
    pub fn command_with_libblkio(&self, program: &Path) -> Command {
        let mut command = Command::new(self.folder.join("qemu").join(parts::LOADER));
        command.arg("--library-path").arg(self.libraries_of_qemu()).arg(program);
        command
    }

    /// QEMU with its server for vfio-user and an NVMe controller, as a command without arguments.
    pub fn command_of_controller(&self) -> Command {
        let userland = self.folder.join("userland");
        let mut command = Command::new(userland.join(parts::LOADER));
        command.arg("--library-path").arg(userland.join(parts::LIBRARIES));
        command.arg(self.folder.join("controller").join(controller::PROGRAM));
        command
    }

    fn libraries_of_qemu(&self) -> PathBuf {
        self.folder.join("qemu").join(parts::LIBRARIES)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The release string of the kernel.
    pub fn kernel_version(&self) -> Result<String> {
        kernel::version(&self.folder.join("kernel"))
    }
}

/// Folder of the guest: `$BLKYARD_GUEST`, or a folder in the user's cache.
fn folder() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let chosen = match (set("BLKYARD_GUEST"), set("XDG_CACHE_HOME"), set("HOME")) {
        (Some(folder), _, _) => folder,
        (None, Some(cache), _) => cache.join("blkyard/guest"),
        (None, None, Some(home)) => home.join(".cache/blkyard/guest"),
        (None, None, None) => bail!("nowhere to keep the test guest: set BLKYARD_GUEST to a folder with 2 GB of room"),
    };
    std::path::absolute(&chosen).with_context(|| format!("cannot tell where {} is", chosen.display()))
}

/// Builds missing parts in order; holds the folder's lock.
struct Builder<'a> {
    folder: &'a Path,
    userland: OnceCell<Suite>,
    qemu: OnceCell<Suite>,
    old: OnceCell<Suite>,
    _lock: File,
}

impl<'a> Builder<'a> {
    fn new(folder: &'a Path) -> Result<Self> {
        fs::create_dir_all(folder.join("stamps"))
            .with_context(|| format!("cannot make {}: choose another folder with BLKYARD_GUEST", folder.display()))?;
        let path = folder.join("lock");
        let lock = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        if lock.try_lock().is_err() {
            eprintln!("guest: waiting for another build in {}", folder.display());
            lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        let [userland, qemu, old] = [const { OnceCell::new() }; 3];
        Ok(Self { folder, userland, qemu, old, _lock: lock })
    }

    fn build(&self, rebuild: bool) -> Result<()> {
        if rebuild {
            remove(&self.folder.join("stamps"))?;
            fs::create_dir_all(self.folder.join("stamps"))?;
        }
        let mut made = false;
        made |= self.part("userland", &parts::userland_recipe(), |new| parts::userland(self.userland()?, new))?;
        made |= self.part("qemu", &parts::qemu_recipe(), |new| parts::qemu(self.qemu()?, new))?;
        let recipe = parts::libblkio_recipe(&self.folder_contents("qemu")?);
        made |= self.part("libblkio", &recipe, |new| parts::libblkio(self.qemu()?, new))?;
        made |= self.part("bin", &parts::programs_recipe(), |new| parts::programs(self.folder, new))?;
        let recipe = controller::recipe(&self.folder_contents("userland")?);
        made |= self.part("controller", &recipe, |new| controller::build(self.userland()?, self.folder, new))?;
        for which in Kernel::ALL {
            let [kernel, initramfs] = which.parts();
            let (suite, open) = match which {
                Kernel::Usual => (USERLAND_SUITE, Builder::userland as fn(&Self) -> Result<&Suite>),
                Kernel::New => (NEW_KERNEL_SUITE, Builder::qemu as fn(&Self) -> Result<&Suite>),
                Kernel::Old => (OLD_KERNEL_SUITE, Builder::old as fn(&Self) -> Result<&Suite>),
            };
            made |= self.part(kernel, &kernel::recipe(suite), |new| kernel::build(open(self)?, self.folder, new))?;
            let mut recipe = initramfs::recipe();
            for part in ["userland", kernel] {
                recipe.push_str(&self.folder_contents(part)?);
            }
            made |= self.part(initramfs, &recipe, |new| initramfs::build(self.folder, kernel, new))?;
        }
        let [kernel, _] = Kernel::New.parts();
        let recipe = iommufd::recipe(&self.folder_contents(kernel)?);
        let kernel = self.folder.join(kernel);
        made |= self.part(IOMMUFD, &recipe, |new| iommufd::build(self.qemu()?, self.folder, &kernel, new))?;
        if made {
            // Half of the size, and not needed after unpacking.
            remove(&self.folder.join("apt"))?;
        }
        Ok(())
    }

    /// Builds the part `name` unless its stamp has this recipe.
    fn part(&self, name: &str, recipe: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<bool> {
        let stamp = self.folder.join("stamps").join(name);
        let place = self.folder.join(name);
        if place.is_dir() && fs::read_to_string(&stamp).is_ok_and(|made_from| made_from == recipe) {
            return Ok(false);
        }
        let start = Instant::now();
        eprintln!("guest: making {name}");
        let new = self.folder.join(format!("{name}.new"));
        remove(&new)?;
        fs::create_dir(&new).with_context(|| format!("cannot make {}", new.display()))?;
        make(&new)
            .with_context(|| format!("cannot make the test guest's part '{name}' in {}", self.folder.display()))?;
        // The old stamp is removed first and the new one written last, so a stamp never describes another content.
        remove(&stamp)?;
        remove(&place)?;
        fs::rename(&new, &place).with_context(|| format!("cannot move {} into place", new.display()))?;
        // Synced, since after a crash the stamp could otherwise survive without its content.
        let whole = File::open(&place).with_context(|| format!("cannot open {}", place.display()))?;
        rustix::fs::syncfs(&whole).with_context(|| format!("cannot write {} out", place.display()))?;
        let stamp_new = self.folder.join(format!("stamps/{name}.new"));
        fs::write(&stamp_new, recipe).with_context(|| format!("cannot write {}", stamp_new.display()))?;
        fs::rename(&stamp_new, &stamp).with_context(|| format!("cannot write {}", stamp.display()))?;
        eprintln!("guest: made {name} in {:.1} s", start.elapsed().as_secs_f64());
        Ok(true)
    }

    /// Packages of a part, with their versions.
    fn folder_contents(&self, part: &str) -> Result<String> {
        parts::contents(&self.folder.join(part))
    }

    fn userland(&self) -> Result<&Suite> {
        self.suite(&self.userland, USERLAND_SUITE)
    }

    fn qemu(&self) -> Result<&Suite> {
        self.suite(&self.qemu, QEMU_SUITE)
    }

    fn old(&self) -> Result<&Suite> {
        self.suite(&self.old, OLD_KERNEL_SUITE)
    }

    fn suite<'s>(&self, cell: &'s OnceCell<Suite>, name: &'static str) -> Result<&'s Suite> {
        if let Some(suite) = cell.get() {
            return Ok(suite);
        }
        if std::env::consts::ARCH != "x86_64" {
            bail!("the test guest is for x86-64 and this machine is {}", std::env::consts::ARCH);
        }
        host::require(&[("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("tar", "tar")])?;
        eprintln!("guest: reading the package lists of Debian {name}");
        let suite = Suite::open(&self.folder.join("apt"), name)?;
        Ok(cell.get_or_init(|| suite))
    }
}

/// Removes a file or a tree, if it is there.
fn remove(path: &Path) -> Result<()> {
    let done = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    done.with_context(|| format!("cannot remove {}", path.display()))
}
