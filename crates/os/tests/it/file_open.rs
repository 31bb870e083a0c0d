//! Opening: files that can be disks, refusals with their cause, and locked files.

use std::fs;
use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blkyard_mq::{BlockDevice, HwQueue, HwQueueConfig, RegionTable};
use blkyard_os::{Direct, FileConfig, FileDevice, Indirect, Mode, OpenError, Ring, RingConfig};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::common::{folders, image, open};
use crate::loop_device::Loop;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

fn refusal(config: FileConfig) -> OpenError {
    let path = config.path.clone();
    let error = FileDevice::open(config).expect_err("it can be no disk");
    assert!(error.to_string().contains(&*path.to_string_lossy()), "names the object: {error}");
    error
}

fn read_only(path: &Path) -> FileConfig {
    FileConfig { read_only: true, ..FileConfig::new(path) }
}

#[test]
fn what_can_be_no_disk_is_told_why_and_what_to_do() {
    let folder = &folders()[0];
    let place = |name: &str| folder.path().join(name);
    assert!(matches!(refusal(FileConfig::new(place("none"))), OpenError::Missing { .. }));
    assert!(refusal(FileConfig::new(place("none"))).to_string().contains("truncate -s 1G"));
    assert!(matches!(refusal(FileConfig::new(folder.path())), OpenError::Directory { .. }));
    let kind = |path: &Path| match refusal(FileConfig::new(path)) {
        OpenError::Kind { kind, .. } => kind,
        other => panic!("{other}"),
    };
    rustix::fs::mknodat(rustix::fs::CWD, place("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert_eq!(kind(&place("pipe")), "pipe");
    let _socket = std::os::unix::net::UnixListener::bind(place("socket")).unwrap();
    assert_eq!(kind(&place("socket")), "socket");
    assert_eq!(kind(Path::new("/dev/null")), "character device");
    fs::write(place("empty"), "").unwrap();
    assert!(matches!(refusal(FileConfig::new(place("empty"))), OpenError::Empty { .. }));
    fs::write(place("odd"), [0; 4097]).unwrap();
    let odd = refusal(FileConfig { direct: Direct::Off, ..FileConfig::new(place("odd")) }).to_string();
    assert!(odd.contains("4097 bytes") && odd.contains("truncate -s %512"), "{odd}");
}

/// Its first bytes are in the hands of the guest, which must not keep a daemon from starting.
#[test]
fn an_image_of_another_format_is_refused_by_its_name_but_not_by_what_its_guest_wrote() {
    let folder = &folders()[0];
    let write = |name: &str, bytes: u64| {
        let path = folder.path().join(name);
        fs::write(&path, b"QFI\xfb\0\0\0\x03").unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        path
    };
    let named = write("debian.qcow2", 196_608);
    let error = refusal(FileConfig::new(&named)).to_string();
    assert!(error.contains("named as a qcow2 image") && error.contains("qemu-img convert -O raw"), "{error}");
    assert!(matches!(refusal(FileConfig::new(folder.path().join("none.qcow2"))), OpenError::Missing { .. }));
    // A size that no disk has; it is not to be rounded up.
    let odd = refusal(FileConfig::new(write("odd", 196_624))).to_string();
    assert!(odd.contains("begins like a qcow2 image") && !odd.contains("truncate"), "{odd}");
    assert_eq!(open(FileConfig::new(write("disk.img", 196_608))).info().capacity_sectors, 384);
}

#[test]
fn the_block_is_what_was_asked_or_512() {
    for folder in folders() {
        let path = image(&folder, 1 << 20);
        let block = |direct, block_bytes| {
            let config = FileConfig { direct, block_bytes, ..FileConfig::new(&path) };
            FileDevice::open(config).map(|device| device.info().limits.logical_block_bytes)
        };
        for direct in [Direct::Auto, Direct::Off] {
            assert_eq!(block(direct, None).unwrap(), 512);
            assert_eq!(block(direct, Some(4096)).unwrap(), 4096);
        }
        for asked in [0, 256, 1000, 1 << 20] {
            assert!(matches!(block(Direct::Auto, Some(asked)), Err(OpenError::Block { .. })), "{asked}");
        }
        open(FileConfig::new(&path)).info().limits.check().unwrap();
    }
}

#[test]
fn the_block_of_an_image_does_not_depend_on_the_disk_below() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = Loop::new(&image(&folder, 32 << 20), &["--sector-size", "4096"]) else { return };
    let run = |name: &str, words: &[&Path]| assert!(Command::new(name).args(words).status().unwrap().success());
    run("mkfs.ext4", &[Path::new("-q"), &disk.0]);
    let mounted = tempfile::tempdir().unwrap();
    run("mount", &[&disk.0, mounted.path()]);
    let path = image(&mounted, 1 << 20);
    let mode = |direct, block_bytes| {
        let device = FileDevice::open(FileConfig { direct, block_bytes, ..FileConfig::new(&path) })?;
        Ok((device.info().limits.logical_block_bytes, device.mode().clone()))
    };
    let found: [Result<_, OpenError>; 3] =
        [mode(Direct::Auto, None), mode(Direct::Auto, Some(4096)), mode(Direct::On, None)];
    run("umount", &[mounted.path()]);
    let [auto, asked, on] = found;
    assert_eq!(auto.unwrap(), (512, Mode::Buffered { reason: Indirect::Blocks(4096) }));
    assert!(matches!(asked.unwrap(), (4096, Mode::Direct { offset_align: 4096, .. })));
    assert!(on.unwrap_err().to_string().contains("?block_size=4096"));
}

#[test]
fn the_mode_is_told() {
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    let mode = |direct| open(FileConfig { direct, ..FileConfig::new(&path) }).mode().clone();
    assert_eq!(mode(Direct::Off), Mode::Buffered { reason: Indirect::Asked });
    if let Mode::Direct { memory_align, offset_align } = mode(Direct::Auto) {
        assert!(memory_align.is_power_of_two() && offset_align.is_power_of_two());
        assert_eq!(mode(Direct::On), mode(Direct::Auto));
    }
}

#[test]
fn a_file_without_permission_is_told_apart() {
    use std::os::unix::fs::PermissionsExt;
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(folder.path(), 0o755);
    mode(&path, 0o444);
    let (locked, unseen) = (folder.path().join("locked.img"), folder.path().join("closed/unseen.img"));
    fs::write(&locked, [0; 512]).unwrap();
    mode(&locked, 0);
    fs::create_dir(folder.path().join("closed")).unwrap();
    mode(&folder.path().join("closed"), 0);
    // The superuser may do all of this; the user nobody may not. The change affects this thread only.
    let nobody = rustix::process::Uid::from_raw(65_534);
    let _ = rustix::thread::set_thread_res_uid(nobody, nobody, nobody);
    let error = refusal(FileConfig::new(&path)).to_string();
    assert!(error.contains("write permission") && error.contains("?readonly=on"), "{error}");
    open(read_only(&path));
    assert!(matches!(refusal(read_only(&locked)), OpenError::Permission { wanted: "read", .. }));
    let error = refusal(FileConfig::new(&locked));
    assert!(matches!(error, OpenError::Permission { wanted: "read and write", .. }), "{error}");
    assert!(matches!(refusal(FileConfig::new(&unseen)), OpenError::Permission { wanted: "search", .. }));
}

#[test]
fn one_writer_or_any_number_of_readers() {
    for folder in folders() {
        let path = image(&folder, 1 << 20);
        let writer = open(FileConfig::new(&path));
        let error = refusal(FileConfig::new(&path));
        assert!(matches!(error, OpenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("?readonly=on"), "{error}");
        assert!(matches!(refusal(read_only(&path)), OpenError::InUse { .. }));
        drop(writer);
        let readers = [open(read_only(&path)), open(read_only(&path))];
        assert!(matches!(refusal(FileConfig::new(&path)), OpenError::InUse { .. }));
        drop(readers);
        open(FileConfig::new(&path));
    }
}

/// Locks single bytes shared, as QEMU does.
fn lock_bytes(file: &fs::File, bytes: &[i64]) -> bool {
    bytes.iter().all(|byte| {
        // SAFETY: an all-zero flock is a valid value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_start, lock.l_len) = (libc::F_RDLCK as i16, *byte, 1);
        // SAFETY: the command reads one flock, which `lock` is.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) == 0 }
    })
}

/// Whether another process has locked any of these bytes, as QEMU tests it.
fn others_hold(file: &fs::File, bytes: &[i64]) -> bool {
    bytes.iter().any(|byte| {
        // SAFETY: an all-zero flock is a valid value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_start, lock.l_len) = (libc::F_WRLCK as i16, *byte, 1);
        // SAFETY: the command reads and writes one flock, which `lock` is.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) }, 0);
        lock.l_type != libc::F_UNLCK as i16
    })
}

/// QEMU's locks for a disk: permissions it uses, and those it denies to others (`block/file-posix.c`). Then the bytes
/// that must be free.
const WRITER: (&[i64], &[i64]) = (&[100, 101, 103, 201, 203], &[200, 201, 203, 101, 103]);
const READER: (&[i64], &[i64]) = (&[100, 201, 203], &[200, 101, 103]);

#[test]
fn an_image_that_qemu_writes_or_reads_is_in_use_for_us_as_for_qemu() {
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    let qemu = |locks: &[i64]| {
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(lock_bytes(&file, locks));
        file
    };
    let held = qemu(WRITER.0);
    assert!(matches!(refusal(FileConfig::new(&path)), OpenError::InUse { .. }));
    assert!(matches!(refusal(read_only(&path)), OpenError::InUse { .. }));
    drop(held);
    let held = qemu(READER.0);
    assert!(matches!(refusal(FileConfig::new(&path)), OpenError::InUse { .. }));
    open(read_only(&path));
    drop(held);

    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let qemu_gets_it = |(locks, free): (&[i64], &[i64])| {
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        lock_bytes(&file, locks) && !others_hold(&file, free)
    };
    // A child of a test beside this one holds our files, and their locks, until it has begun its own program.
    let qemu_gets_it_soon = |wanted| {
        let start = Instant::now();
        while !qemu_gets_it(wanted) {
            assert!(start.elapsed() < PATIENCE, "QEMU is kept out for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let ours = open(FileConfig::new(&path));
    assert!(!qemu_gets_it(WRITER) && !qemu_gets_it(READER));
    drop(ours);
    let ours = open(read_only(&path));
    assert!(!qemu_gets_it(WRITER));
    qemu_gets_it_soon(READER);
    drop(ours);
    qemu_gets_it_soon(WRITER);
    drop(file);
}

const HELD: &str = "BLKYARD_TEST_HELD_IMAGE";

/// Not a separate test: the other process of the next one.
#[test]
fn another_process_holds_an_image() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let device = open(FileConfig::new(path));
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let mut queue = HwQueue::new(device.queue(4), device.info().clone().into(), HwQueueConfig::default());
    queue.set_memory(&mut ring, RegionTable::default().into());
    println!("\nheld");
    ring.sleep(None);
}

fn holder(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "file_open::another_process_holds_an_image", "--nocapture"])
        .env(HELD, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "held"));
    child
}

#[test]
fn an_image_of_another_process_is_in_use_until_that_is_gone() {
    for folder in folders() {
        let path = image(&folder, 1 << 20);
        let mut child = holder(&path);
        let error = refusal(FileConfig::new(&path));
        assert!(matches!(error, OpenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains(&format!("process {}", child.id())), "names who has it: {error}");
        assert!(matches!(refusal(read_only(&path)), OpenError::InUse { .. }));
        child.kill().unwrap();
        child.wait().unwrap();
        // The kernel may still be taking the ring apart, which holds the file. Opening waits for that, though not as
        // long as the kernel may need on a busy machine.
        let start = Instant::now();
        while let Err(error) = FileDevice::open(FileConfig::new(&path)) {
            assert!(matches!(error, OpenError::Held { .. }), "{error}");
            assert!(start.elapsed() < PATIENCE, "{error}");
        }
    }
}

#[test]
fn an_image_that_nobody_alive_has_is_held_until_the_kernel_lets_go() {
    for folder in folders() {
        let path = image(&folder, 1 << 20);
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        assert!(lock_bytes(&file, &[0]));
        // A descriptor in flight through a socket belongs to no process, like the file of a dead one with I/O in
        // flight.
        let (near, far) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sent = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        sendmsg(&near, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        drop(file);
        assert!(matches!(refusal(FileConfig::new(&path)), OpenError::Held { .. }));
        drop((near, far));
        open(FileConfig::new(&path));
    }
}
