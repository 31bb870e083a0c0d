//! A virtual machine that boots the test guest, does one task and ends.
//!
//! The task goes in through QEMU's firmware configuration; its output and its exit status come back through separate
//! serial ports, into files, so the kernel's messages never mix with them and the output so far can be read while the
//! machine runs. Emulated, since KVM cannot be relied on. Knows only the socket of a disk's server.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::guest::{Guest, Kernel};
use crate::process::{Running, tail};
use crate::qmp::Monitor;

/// Ends a guest that hangs. Start to end of an empty task is 3 s on an idle machine with two processors, 15 s on one
/// that compiles at the same time, and minutes where a guest's processors hardly get one.
const LIMIT: Duration = Duration::from_mins(10);

/// Enough for the root (80 MB), a file system's cache and fio's shared memory.
const MEMORY_MIB: u32 = 512;

/// Configuration of a machine.
pub struct Vm<'a> {
    guest: &'a Guest,
    kernel: Kernel,
    processors: u16,
    /// NUMA nodes, each with an equal share of processors and memory.
    nodes: u16,
    boot_from_disk: bool,
    may_reboot: bool,
    reconnect_ms: Option<u32>,
    online: Option<u16>,
    incoming: Option<PathBuf>,
    disks: Vec<VmDisk>,
    /// Sockets of NVMe controllers behind vfio-user.
    controllers: Vec<PathBuf>,
    /// Images behind NVMe controllers of QEMU's own.
    nvme_images: Vec<PathBuf>,
    /// Writes that each of those carries out in a second, if limited.
    nvme_writes: Option<u32>,
    /// Images of NVMe controllers of QEMU.
    nvme: Vec<PathBuf>,
    /// Image of a namespace with metadata.
    metadata_image: Option<PathBuf>,
    /// Folder of the host that the guest sees.
    folder: Option<PathBuf>,
    /// Options of QEMU's user network, if it has one.
    network: Option<String>,
}

/// A disk behind a vhost-user-blk socket.
struct VmDisk {
    socket: PathBuf,
    queues: u16,
    packed: bool,
    in_order: bool,
    in_port: bool,
}

/// Result of a task.
pub struct Outcome {
    /// The task's exit status.
    pub status: i32,
    /// Output of the task, both streams.
    pub output: String,
    /// Output of the kernel.
    pub console: String,
}

impl Outcome {
    /// The output of a task that must have succeeded.
    pub fn success(self) -> Result<String> {
        if self.status != 0 {
            bail!(
                "the guest's task ended with status {}; it said:\n{}\nand the guest's kernel:\n{}",
                self.status,
                tail(&self.output, 20),
                tail(&self.console, 10)
            );
        }
        Ok(self.output)
    }
}

impl<'a> Vm<'a> {
    pub fn new(guest: &'a Guest, processors: u16) -> Self {
        Self {
            guest,
            kernel: Kernel::default(),
            processors,
            nodes: 1,
            boot_from_disk: false,
            may_reboot: false,
            reconnect_ms: None,
            online: None,
            incoming: None,
            disks: Vec::new(),
            controllers: Vec::new(),
            nvme_images: Vec::new(),
            nvme_writes: None,
            nvme: Vec::new(),
            metadata_image: None,
            folder: None,
            network: None,
        }
    }

    /// Adds a network card, eth0, with the loopback of the host behind 10.0.2.2. Connections to an address of
    /// the host's loopback go to a port of the guest, each a pair of this list.
    pub fn network(mut self, forwarded: &[(SocketAddr, u16)]) -> Self {
        let forward = |(host, guest): &(SocketAddr, u16)| format!(",hostfwd=tcp:{host}-:{guest}");
        self.network = Some(forwarded.iter().map(forward).collect());
        self
    }

    /// Divides processors and memory between NUMA nodes. Such a machine has no disks over vhost-user.
    pub fn nodes(mut self, nodes: u16) -> Self {
        self.nodes = nodes;
        self
    }

    /// Adds an NVMe controller of QEMU with this image, behind an emulated IOMMU. The first one is at 0000:01:00.0, in
    /// a port from which it can be pulled, the next one at 0000:02:00.0.
    pub fn nvme(mut self, image: impl Into<PathBuf>) -> Self {
        self.nvme.push(image.into());
        self
    }

    /// Adds namespace 2 to the first controller of QEMU: 8 bytes of metadata for each block, in a separate buffer.
    pub fn nvme_metadata(mut self, image: impl Into<PathBuf>) -> Self {
        self.metadata_image = Some(image.into());
        self
    }

    /// Shares a folder of the host with the guest, there /host, read-only.
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Adds a disk behind a vhost-user-blk socket. The first one is /dev/vda.
    pub fn disk(mut self, socket: impl Into<PathBuf>, queues: u16) -> Self {
        self.disks.push(VmDisk { socket: socket.into(), queues, packed: false, in_order: false, in_port: false });
        self
    }

    /// The same, in a port of its own from which it can be pulled. Linux finds those after all the others.
    pub fn disk_in_port(mut self, socket: impl Into<PathBuf>, queues: u16) -> Self {
        self.disks.push(VmDisk { socket: socket.into(), queues, packed: false, in_order: false, in_port: true });
        self
    }

    /// Adds an NVMe controller behind a vfio-user socket. The first one is /dev/nvme0.
    pub fn controller(mut self, socket: impl Into<PathBuf>) -> Self {
        self.controllers.push(socket.into());
        self
    }

    /// Adds an NVMe controller of QEMU's, with an image as its namespace.
    pub fn nvme_image(mut self, image: impl Into<PathBuf>) -> Self {
        self.nvme_images.push(image.into());
        self
    }

    /// Has QEMU's NVMe controllers carry out so many writes a second; others wait there.
    pub fn nvme_writes_per_second(mut self, writes: u32) -> Self {
        self.nvme_writes = Some(writes);
        self
    }

    /// Gives the disks so far packed rings, if both ends can.
    pub fn packed(mut self) -> Self {
        self.disks.iter_mut().for_each(|disk| disk.packed = true);
        self
    }

    /// Has the disks so far answer in order, and the guest boot a kernel whose driver wants that.
    pub fn in_order(mut self) -> Self {
        self.disks.iter_mut().for_each(|disk| disk.in_order = true);
        self.kernel(Kernel::New)
    }

    /// Has the guest boot this kernel.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Starts so many of the processors; the others are there, and the task may start them. Many at once make a boot
    /// slow.
    pub fn online(mut self, processors: u16) -> Self {
        self.online = Some(processors);
        self
    }

    /// Waits at this socket for another machine of the same make to move in, instead of booting.
    pub fn incoming(mut self, socket: PathBuf) -> Self {
        self.incoming = Some(socket);
        self
    }

    /// Lets the guest change to a root on /dev/vda before it looks at its task.
    pub fn boot_from_disk(mut self) -> Self {
        self.boot_from_disk = true;
        self
    }

    /// Lets a reboot begin the same task anew, in the same QEMU, instead of ending the machine.
    pub fn may_reboot(mut self) -> Self {
        self.may_reboot = true;
        self
    }

    /// Has QEMU connect anew to a server that has gone, after so long each time.
    pub fn reconnects_every_ms(mut self, reconnect_ms: u32) -> Self {
        self.reconnect_ms = Some(reconnect_ms);
        self
    }

    /// Boots, runs `task` in the guest's shell, and waits for the end.
    pub fn run(&self, task: &str) -> Result<Outcome> {
        self.start(task)?.wait()
    }

    /// The same, for a task that must succeed.
    pub fn succeed(&self, task: &str) -> Result<String> {
        self.run(task)?.success()
    }

    /// Boots and leaves the machine running.
    pub fn start(&self, task: &str) -> Result<Machine> {
        let folder = folder()?;
        let mut prelude = String::new();
        if self.folder.is_some() {
            prelude.extend([MOUNT_FOLDER, "\n"]);
        }
        if self.network.is_some() {
            prelude.extend([START_NETWORK, "\n"]);
        }
        let task = &(prelude + task);
        let mut words = KERNEL_WORDS.to_owned();
        if self.boot_from_disk {
            words.push_str(" root=/dev/vda");
        }
        if !self.nvme.is_empty() {
            // On a busy machine the kernel finds the emulated timer too slow, and panics.
            words.push_str(" intel_iommu=on no_timer_check");
        }
        if let Some(online) = self.online {
            words.extend([" maxcpus=", &online.to_string()]);
        }
        let mut qemu = self.guest.command("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config"])
            .args(["-accel", "tcg,thread=multi", "-cpu", "max"])
            .args(["-smp", &self.processors.to_string(), "-m", &MEMORY_MIB.to_string()])
            .args(self.memory_options());
        if !self.nvme.is_empty() {
            // First, for the devices to be behind it.
            qemu.args(["-machine", "kernel-irqchip=split", "-device", "intel-iommu,intremap=on,caching-mode=on"]);
        }
        qemu.args(task_options(self.guest, self.kernel, folder.path(), task, &words)?);
        if !self.may_reboot {
            qemu.arg("-no-reboot");
        }
        if let Some(socket) = &self.incoming {
            qemu.args(["-incoming", &format!("unix:{}", socket.display())]);
        }
        for (index, image) in self.nvme.iter().enumerate() {
            // The ports of disks have lower numbers.
            let slot = 32 + index;
            qemu.args(["-device", &format!("pcie-root-port,id=nvmeport{index},slot={slot}")])
                .args(["-drive", &format!("file={},format=raw,if=none,id=nvmeimage{index}", image.display())])
                .args([
                    "-device",
                    &format!("nvme,id=nvme{index},serial=N{index},drive=nvmeimage{index},bus=nvmeport{index}"),
                ]);
        }
        if let Some(image) = &self.metadata_image {
            qemu.args(["-drive", &format!("file={},format=raw,if=none,id=metadata", image.display())])
                .args(["-device", "nvme-ns,bus=nvme0,drive=metadata,nsid=2,shared=off,ms=8,mset=0"]);
        }
        if let Some(folder) = &self.folder {
            let folder = format!("local,id=folder,path={},security_model=none,readonly=on", folder.display());
            qemu.args(["-fsdev", &folder, "-device", "virtio-9p-pci,fsdev=folder,mount_tag=host"]);
        }
        if let Some(options) = &self.network {
            qemu.args(["-netdev", &format!("user,id=network{options}")])
                .args(["-device", "virtio-net-pci,netdev=network,romfile="]);
        }
        let again = self.reconnect_ms.map(|ms| format!(",reconnect-ms={ms}")).unwrap_or_default();
        for (index, VmDisk { socket, queues, packed, in_order, in_port }) in self.disks.iter().enumerate() {
            let mut device = format!("vhost-user-blk-pci,id=disk{index},chardev=disk{index},num-queues={queues}");
            if *packed {
                device += ",packed=on";
            }
            if *in_order {
                device += ",in_order=on";
            }
            if *in_port {
                qemu.args(["-device", &format!("pcie-root-port,id=port{index},slot={index}")]);
                device.extend([",bus=port", &index.to_string()]);
            }
            qemu.args(["-chardev", &format!("socket,id=disk{index},path={}{again}", socket.display())])
                .args(["-device", &device]);
        }
        for socket in &self.controllers {
            qemu.args(["-device", &controller_option(socket)]);
        }
        let limit = self.nvme_writes.map(|writes| format!(",throttling.iops-write={writes}")).unwrap_or_default();
        for (index, image) in self.nvme_images.iter().enumerate() {
            qemu.args(["-drive", &format!("file={},if=none,format=raw,id=image{index}{limit}", image.display())])
                .args(["-device", &format!("nvme,serial=nvme-{index},drive=image{index}")]);
        }
        Ok(Machine { running: Running::start("the guest", &qemu)?, folder })
    }

    fn memory_options(&self) -> Vec<String> {
        if self.nodes == 1 {
            // The server of the disks maps the guest's memory, so it must be shareable.
            let memory = format!("memory-backend-memfd,id=memory,size={MEMORY_MIB}M,share=on");
            return ["-object", &memory, "-machine", "q35,memory-backend=memory"].map(str::to_owned).into();
        }
        let mut options = vec!["-machine".into(), "q35".into()];
        let (each, share) = (MEMORY_MIB / u32::from(self.nodes), self.processors / self.nodes);
        for node in 0..self.nodes {
            let (first, last) = (node * share, (node + 1) * share - 1);
            let memory = format!("memory-backend-ram,id=memory{node},size={each}M");
            let node = format!("node,nodeid={node},cpus={first}-{last},memdev=memory{node}");
            options.extend(["-object".into(), memory, "-numa".into(), node]);
        }
        options
    }
}

/// QEMU's option for an NVMe controller behind a vfio-user socket.
pub fn controller_option(socket: &Path) -> String {
    json!({ "driver": "vfio-user-pci", "socket": { "type": "unix", "path": socket } }).to_string()
}

/// Boots a machine by a given shell command line, with the test guest's kernel and a task added.
pub fn start_command_line(guest: &Guest, line: &str, task: &str) -> Result<Machine> {
    let folder = folder()?;
    let options = task_options(guest, Kernel::default(), folder.path(), task, KERNEL_WORDS)?;
    let mut shell = Command::new("sh");
    // Replaces the shell, so that ending the child ends the machine.
    shell.arg("-c").arg(format!("exec {line} \"$@\"")).arg("sh").args(options).arg("-no-reboot");
    // QEMU is found as by those who have it installed.
    shell.env("PATH", guest.search_path());
    Ok(Machine { running: Running::start("the guest", &shell)?, folder })
}

/// Gives the guest the folder of the host.
const MOUNT_FOLDER: &str = "modprobe -a 9p 9pnet_virtio && mkdir /host &&
    mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose host /host || exit 1";

/// Gives the guest the addresses of QEMU's user network.
const START_NETWORK: &str = "modprobe virtio_net && until test -e /sys/class/net/eth0; do sleep 0.1; done &&
    ip link set lo up && ip link set eth0 up && ip address add 10.0.2.15/24 dev eth0 || exit 1";

/// What the guest's kernel is told.
const KERNEL_WORDS: &str = "console=ttyS0 quiet panic=-1 mitigations=off init_on_alloc=0 apparmor=0";

fn folder() -> Result<TempDir> {
    tempfile::Builder::new().prefix("blkyard-vm-").tempdir().context("cannot make a temporary folder")
}

/// QEMU's options for a machine that boots the test guest without a screen and does a task; files that belong to it
/// lie in `folder`.
fn task_options(guest: &Guest, kernel: Kernel, folder: &Path, task: &str, words: &str) -> Result<Vec<OsString>> {
    fs::write(folder.join("task"), task).context("cannot write the guest's task")?;
    let path = |leaf: &str| folder.join(leaf).display().to_string();
    let mut options: Vec<OsString> = vec!["-kernel".into(), guest.kernel(kernel).into()];
    options.extend(["-initrd".into(), guest.initramfs(kernel).into()]);
    let mut add = |option: &str, value: String| options.extend([OsString::from(option), value.into()]);
    add("-append", words.into());
    add("-display", "none".into());
    add("-serial", format!("file:{}", path("console")));
    add("-fw_cfg", format!("name=opt/blkyard/task,file={}", path("task")));
    add("-device", "virtio-serial-pci".into());
    add("-qmp", format!("unix:{},server=on,wait=off", path("monitor")));
    for port in ["output", "status"] {
        add("-chardev", format!("file,id={port},path={}", path(port)));
        add("-device", format!("virtserialport,chardev={port},name=blkyard.{port}"));
    }
    Ok(options)
}

/// A machine that was started. Dropping it is pulling its plug.
pub struct Machine {
    running: Running,
    folder: TempDir,
}

impl Machine {
    /// What the task has written so far.
    pub fn output(&self) -> String {
        self.read("output")
    }

    /// Waits until `ready` is true of the task's output so far.
    pub fn wait_for_output(&mut self, mut ready: impl FnMut(&str) -> bool) -> Result<()> {
        let folder = self.folder.path().join("output");
        let seen = |_: &Running| Ok(ready(&String::from_utf8_lossy(&fs::read(&folder).unwrap_or_default())));
        if self.running.wait_until(LIMIT, seen)? {
            return Ok(());
        }
        bail!("the guest ended too early\n{}", self.account());
    }

    /// Waits until something is true beside the running machine.
    pub fn wait_until(&mut self, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
        if self.running.wait_until(LIMIT, |_| ready())? {
            return Ok(());
        }
        bail!("the guest ended too early\n{}", self.account());
    }

    /// Moves what runs here to the machine that waits at a socket, while it runs, and waits until it is there.
    pub fn migrate(&mut self, to: &Path) -> Result<()> {
        let mut monitor = self.monitor()?;
        // As fast as it goes, and what is left at the end at once: this machine is slow, and the guest never at rest.
        monitor.command("migrate-set-parameters", &json!({ "max-bandwidth": 1 << 30, "downtime-limit": 2000 }))?;
        monitor.command("migrate", &json!({ "uri": format!("unix:{}", to.display()) }))?;
        let mut state = Value::Null;
        let moved = self.running.wait_until(LIMIT, |_| {
            state = monitor.command("query-migrate", &json!({}))?;
            Ok(matches!(state["status"].as_str(), Some("completed" | "failed" | "cancelled")))
        })?;
        if moved && state["status"] == "completed" {
            return Ok(());
        }
        bail!("the machine did not move: {state}\n{}", self.account());
    }

    /// Pulls a disk out of its port: the guest's driver lets go of it, and then QEMU of its socket.
    pub fn pull(&mut self, index: usize) -> Result<()> {
        let id = format!("disk{index}");
        let mut monitor = self.monitor()?;
        monitor.command("device_del", &json!({ "id": id }))?;
        // Refused for as long as the guest has the disk.
        self.wait_until(|| Ok(monitor.command("chardev-remove", &json!({ "id": id })).is_ok()))
    }

    /// Asks the guest to let go of an NVMe controller, and waits until QEMU has taken it out.
    pub fn pull_nvme(&mut self, index: usize) -> Result<()> {
        let id = format!("nvme{index}");
        let mut monitor = self.monitor()?;
        monitor.command("device_del", &json!({ "id": id }))?;
        let folder = json!({ "path": "/machine/peripheral" });
        self.wait_until(|| {
            let devices = monitor.command("qom-list", &folder)?;
            Ok(devices.as_array().is_some_and(|devices| devices.iter().all(|device| device["name"] != id.as_str())))
        })
    }

    /// Puts a disk into a port that is empty.
    pub fn plug(&self, index: usize, socket: &Path, queues: u16) -> Result<()> {
        let (id, port) = (format!("disk{index}"), format!("port{index}"));
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        let mut monitor = self.monitor()?;
        monitor.command("chardev-add", &json!({ "id": id, "backend": backend }))?;
        let driver = "vhost-user-blk-pci";
        let device = json!({ "driver": driver, "id": id, "chardev": id, "num-queues": queues, "bus": port });
        monitor.command("device_add", &device)?;
        Ok(())
    }

    /// Presses the reset button. The guest boots anew if it may reboot.
    pub fn reset(&self) -> Result<()> {
        self.monitor()?.command("system_reset", &json!({}))?;
        Ok(())
    }

    /// Stops QEMU and everything in it, as a debugger does, or lets it go on.
    pub fn hang(&self, is_hung: bool) -> Result<()> {
        self.running.hang(is_hung)
    }

    fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.folder.path().join("monitor"))
    }

    /// Waits until the machine has powered itself off.
    pub fn wait(self) -> Result<Outcome> {
        let Self { mut running, folder } = self;
        let timed_out = running.wait_until(LIMIT, |_| Ok(false)).is_err();
        let machine = Self { running, folder };
        if timed_out {
            bail!("the guest was stopped after {LIMIT:?}\n{}", machine.account());
        }
        let Ok(status) = machine.read("status").trim().parse() else {
            bail!("the guest ended without an exit status\n{}", machine.account());
        };
        Ok(Outcome { status, output: machine.output(), console: machine.read("console") })
    }

    /// Everything that was said, for a message to a person.
    fn account(&self) -> String {
        let part = |title: &str, text: &str| match text.trim() {
            "" => format!("{title}: nothing\n"),
            _ => format!("{title}:\n{}\n", tail(text, 20)),
        };
        [
            part("its task said", &self.output()),
            part("its kernel said", &self.read("console")),
            part("QEMU said", &self.running.stderr().unwrap_or_default()),
        ]
        .concat()
    }

    fn read(&self, leaf: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join(leaf)).unwrap_or_default()).into_owned()
    }
}
