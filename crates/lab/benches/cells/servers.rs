//! Servers of vhost-user-blk to compare: our daemon, and qemu-storage-daemon with one I/O thread.
//!
//! Each is a process with one export, which ends with us or when it is dropped. `BLKYARD_PROGRAM` names our program and
//! `BLKYARD_QSD` the other. Both busy-poll for the same time.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_lab::floor::{STORE_BYTES, cpus};
use tempfile::TempDir;

/// Busy-polling of a server before it sleeps: longer than any round trip here, and than our daemon's default of 50.
const SPIN_US: u64 = 100;
const READY_LIMIT: Duration = Duration::from_secs(20);
/// The path may have any version, and versions differ by a factor of two.
const NO_QSD: &str =
    "BLKYARD_QSD does not say which qemu-storage-daemon to compare with: run cargo xtask bench, which does";
const NO_PROGRAM: &str = "BLKYARD_PROGRAM does not name the program blkyard: run cargo xtask bench, which builds it";
/// Memory that has a name: a folder on tmpfs.
const SHM: &str = "/dev/shm";

/// Backing of the server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CellStore {
    Null,
    /// qemu-storage-daemon has no such device, and serves a file on tmpfs instead.
    Ram,
    Tmpfs,
}

impl CellStore {
    pub fn name(self) -> &'static str {
        match self {
            CellStore::Null => "null",
            CellStore::Ram => "ram",
            CellStore::Tmpfs => "tmpfs",
        }
    }
}

/// How a disk is served over a socket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CellTransport {
    Vhost,
    /// NVMe.
    Vfio,
}

impl CellTransport {
    /// Kind of the export.
    fn export(self) -> &'static str {
        match self {
            CellTransport::Vhost => "vhost-user-blk",
            CellTransport::Vfio => "vfio-user",
        }
    }

    /// Kind of the device that attaches it.
    pub fn device(self) -> &'static str {
        match self {
            CellTransport::Vhost => "vhost-user",
            CellTransport::Vfio => "vfio-user",
        }
    }
}

/// Place of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CellFile {
    /// The folder of temporary files; opened with `O_DIRECT`.
    Disk,
    Tmpfs,
}

/// Server program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Ours,
    Theirs,
}

/// A folder for sockets, and a file on tmpfs once there is a server that wants it.
pub struct CellFolder {
    folder: TempDir,
    shm: TempDir,
}

impl CellFolder {
    pub fn new() -> Result<CellFolder, String> {
        let folder = |place: &Path| {
            let made = tempfile::Builder::new().prefix("blkyard-cell").tempdir_in(place);
            made.map_err(|error| format!("no folder in {}: {error}", place.display()))
        };
        Ok(CellFolder { folder: folder(&std::env::temp_dir())?, shm: folder(Path::new(SHM))? })
    }

    /// A path for a socket, without a listener yet.
    pub fn socket(&self) -> PathBuf {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        self.folder.path().join(COUNT.fetch_add(1, Relaxed).to_string())
    }

    /// A file on tmpfs of the size of all stores, every page of it there.
    fn file(&self, who: Who) -> Result<PathBuf, String> {
        self.file_in(CellFile::Tmpfs, who)
    }

    fn file_in(&self, place: CellFile, who: Who) -> Result<PathBuf, String> {
        let folder = if place == CellFile::Tmpfs { &self.shm } else { &self.folder };
        // Separate images: each is locked by its server.
        let path = folder.path().join(if who == Who::Ours { "ours" } else { "theirs" });
        if !path.exists() {
            let chunk: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let failed = |error| format!("{}: {error}", path.display());
            let mut file = File::create(&path).map_err(failed)?;
            (0..STORE_BYTES >> 20).try_for_each(|_| file.write_all(&chunk)).map_err(failed)?;
            file.sync_all().map_err(failed)?;
        }
        Ok(path)
    }
}

/// A server that listens.
pub struct ListeningServer {
    child: Child,
    /// Unset over TCP.
    pub socket: PathBuf,
}

impl ListeningServer {
    /// Starts one with so many queues, on one CPU or on all.
    pub fn start(
        ground: &CellFolder,
        who: Who,
        store: CellStore,
        queues: usize,
        cpu: Option<u32>,
    ) -> Result<ListeningServer, String> {
        match who {
            Who::Ours => {
                let device = match store {
                    CellStore::Null => format!("null:{STORE_BYTES}"),
                    CellStore::Ram => format!("ram:{STORE_BYTES}"),
                    CellStore::Tmpfs => format!("file:{}", ground.file(who)?.display()),
                };
                ListeningServer::ours(ground, &device, queues, cpu, Some(SPIN_US))
            }
            Who::Theirs => {
                let (mut command, socket) = (on(cpu), ground.socket());
                let node = match store {
                    CellStore::Null => format!("null-co,size={STORE_BYTES}"),
                    CellStore::Ram | CellStore::Tmpfs => format!("file,filename={}", ground.file(who)?.display()),
                };
                command.arg(std::env::var("BLKYARD_QSD").map_err(|_| NO_QSD)?);
                command.args(["--object", &format!("iothread,id=io,poll-max-ns={}", SPIN_US * 1000)]);
                command.args(["--blockdev", &format!("driver={node},node-name=disk"), "--export"]);
                command.arg(format!(
                    "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},iothread=io,\
                     addr.type=unix,addr.path={}",
                    socket.display()
                ));
                ListeningServer::run(&mut command, &socket)
            }
        }
    }

    /// Starts our daemon with this spin time, or the default.
    pub fn ours(
        ground: &CellFolder,
        device: &str,
        queues: usize,
        cpu: Option<u32>,
        spin_us: Option<u64>,
    ) -> Result<ListeningServer, String> {
        let (mut command, socket) = (on(cpu), ground.socket());
        command.arg(program()?).args(["serve", "--control", "none", "--device", device]);
        if let Some(spin_us) = spin_us {
            command.args(["--spin-us", &spin_us.to_string()]);
        }
        command.args(["--export", &format!("vhost-user-blk:{}?queues={queues}", socket.display())]);
        ListeningServer::run(&mut command, &socket)
    }

    /// Starts our daemon as users do, with these options on all CPUs, and one export that ends in `export`.
    pub fn usual(
        ground: &CellFolder,
        device: &str,
        transport: CellTransport,
        export: &str,
        options: &[&str],
    ) -> Result<ListeningServer, String> {
        let (mut command, socket) = (everywhere(), ground.socket());
        command.arg(program()?).args(["serve", "--control", "none", "--device", device]).args(options);
        command.args(["--export", &format!("{}:{}{export}", transport.export(), socket.display())]);
        ListeningServer::run(&mut command, &socket)
    }

    /// Starts a server of a file with its defaults.
    pub fn usual_file(ground: &CellFolder, who: Who, place: CellFile) -> Result<ListeningServer, String> {
        let file = ground.file_in(place, who)?;
        let is_direct = place == CellFile::Disk;
        if who == Who::Ours {
            let direct = if is_direct { "?direct=on" } else { "" };
            let device = format!("file:{}{direct}", file.display());
            return ListeningServer::usual(ground, &device, CellTransport::Vhost, "", &[]);
        }
        let (mut command, socket) = (everywhere(), ground.socket());
        let direct = if is_direct { ",cache.direct=on" } else { "" };
        command.arg(std::env::var("BLKYARD_QSD").map_err(|_| NO_QSD)?);
        command.args(["--blockdev", &format!("driver=file,filename={}{direct},node-name=disk", file.display())]);
        command.arg("--export").arg(format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        ));
        ListeningServer::run(&mut command, &socket)
    }

    /// Starts our daemon with an NVMe controller of so many I/O queues.
    pub fn nvme(
        ground: &CellFolder,
        store: CellStore,
        queues: usize,
        cpu: Option<u32>,
    ) -> Result<ListeningServer, String> {
        let device = match store {
            CellStore::Null => format!("null:{STORE_BYTES}"),
            CellStore::Ram => format!("ram:{STORE_BYTES}"),
            CellStore::Tmpfs => format!("file:{}", ground.file(Who::Ours)?.display()),
        };
        let (mut command, socket) = (on(cpu), ground.socket());
        command.arg(program()?).args(["serve", "--control", "none", "--device", &device]);
        command.args(["--spin-us", &SPIN_US.to_string()]);
        command.args(["--export", &format!("vfio-user:{}?queues={queues}", socket.display())]);
        ListeningServer::run(&mut command, &socket)
    }

    /// Starts our daemon with an NVMe subsystem of this name over TCP. Returns its address, too.
    pub fn tcp(store: CellStore, nqn: &str, cpu: Option<u32>) -> Result<(ListeningServer, SocketAddr), String> {
        let device = match store {
            CellStore::Null => format!("null:{STORE_BYTES}"),
            CellStore::Ram => format!("ram:{STORE_BYTES}"),
            CellStore::Tmpfs => return Err("no such cell".into()),
        };
        // Free a moment ago.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = free.map_err(|error| format!("no free port: {error}"))?;
        let mut command = on(cpu);
        command.arg(program()?).args(["serve", "--control", "none", "--device", &device]);
        command.args(["--spin-us", &SPIN_US.to_string()]);
        command.args(["--export", &format!("nvme-tcp://{address}?nqn={nqn}")]);
        let server = ListeningServer::spawn(&mut command, PathBuf::new())?;
        server.await_ready(&command, || TcpStream::connect(address).is_ok()).map(|server| (server, address))
    }

    /// Starts our daemon with one lane and two disks, one queue each: of this kind, and of memory. Returns the second
    /// one's socket, too.
    pub fn pair(ground: &CellFolder, store: CellStore, cpu: Option<u32>) -> Result<(ListeningServer, PathBuf), String> {
        let memory = format!("ram:{STORE_BYTES}");
        let first = match store {
            CellStore::Null => format!("null:{STORE_BYTES}"),
            CellStore::Ram => memory.clone(),
            CellStore::Tmpfs => format!("file:{}", ground.file(Who::Ours)?.display()),
        };
        let (mut command, sockets) = (on(cpu), [ground.socket(), ground.socket()]);
        command.arg(program()?).args(["serve", "--control", "none", "--lanes", "1"]);
        for (device, socket) in [first, memory].iter().zip(&sockets) {
            command.args(["--device", device, "--export"]);
            command.arg(format!("vhost-user-blk:{}?queues=1", socket.display()));
        }
        let [first, second] = sockets;
        let mut server = ListeningServer::run(&mut command, &second)?;
        server.socket = first;
        Ok((server, second))
    }

    /// Starts our daemon with one lane, an export of one queue of a null device, and beside it so many exports of
    /// `queues` queues each; and says where those are.
    pub fn with_idle(
        ground: &CellFolder,
        exports: usize,
        queues: usize,
        cpu: Option<u32>,
    ) -> Result<(ListeningServer, Vec<PathBuf>), String> {
        let (mut command, socket) = (on(cpu), ground.socket());
        let device = format!("null:{STORE_BYTES}");
        command.arg(program()?).args(["serve", "--control", "none", "--lanes", "1"]);
        command.args(["--spin-us", &SPIN_US.to_string()]);
        let idle: Vec<_> = (0..exports).map(|_| ground.socket()).collect();
        for (path, queues) in idle.iter().map(|path| (path, queues)).chain([(&socket, 1)]) {
            command.args(["--device", &device]);
            command.args(["--export", &format!("vhost-user-blk:{}?queues={queues}", path.display())]);
        }
        Ok((ListeningServer::run(&mut command, &socket)?, idle))
    }

    fn run(command: &mut Command, socket: &Path) -> Result<ListeningServer, String> {
        let server = ListeningServer::spawn(command, socket.to_path_buf())?;
        server.await_ready(command, || listens(socket))
    }

    fn spawn(command: &mut Command, socket: PathBuf) -> Result<ListeningServer, String> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(ListeningServer { child: child.map_err(|error| format!("{command:?}: {error}"))?, socket })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU time of its threads.
    pub fn cpu_ns(&self) -> Result<u64, String> {
        let path = format!("/proc/{}/task", self.child.id());
        let failed = |error| format!("{path}: {error}");
        let mut used_ns = 0;
        for thread in std::fs::read_dir(&path).map_err(failed)? {
            // A thread that has just ended is gone.
            let said = std::fs::read_to_string(thread.map_err(failed)?.path().join("schedstat")).unwrap_or_default();
            used_ns += said.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(used_ns)
    }

    fn await_ready(mut self, command: &Command, listens: impl Fn() -> bool) -> Result<ListeningServer, String> {
        let start = Instant::now();
        while !listens() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{command:?} ended with {status}"));
            }
            if start.elapsed() > READY_LIMIT {
                return Err(format!("{command:?} does not listen after {READY_LIMIT:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(self)
    }
}

/// The program `blkyard`.
pub fn program() -> Result<String, String> {
    std::env::var("BLKYARD_PROGRAM").map_err(|_| NO_PROGRAM.into())
}

/// A command to be completed, of a program that ends with us, on one CPU or on all.
fn on(cpu: Option<u32>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]);
    if let Some(cpu) = cpu {
        command.args(["taskset", "-c", &cpu.to_string()]);
    }
    command
}

/// As [`on`] all CPUs, also for one who is pinned.
pub fn everywhere() -> Command {
    let mut command = on(None);
    let cpus: Vec<_> = cpus().iter().map(ToString::to_string).collect();
    command.args(["taskset", "-c", &cpus.join(",")]);
    command
}

impl Drop for ListeningServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether someone listens at a socket: the kernel's table is asked, since a connection made to find out would count as
/// a client.
fn listens(socket: &Path) -> bool {
    /// `__SO_ACCEPTCON`.
    const LISTENS: &str = "00010000";
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.get(3) == Some(&LISTENS) && words.get(7).is_some_and(|path| Path::new(path) == socket)
    })
}
