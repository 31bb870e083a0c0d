//! A vfio-user server that hangs, closes, sends wrong replies, or accesses memory by message: every call ends with a
//! specific error, and no byte outside mapped memory is accessed.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_attach::{VfioUserConfig, VfioUserController, VfioUserError};
use blkyard_mem::Region;
use blkyard_nvme::{ControllerTransport, DeviceGone};
use blkyard_os::SystemClock;
use blkyard_sys::{EventFd, PollFd, TimeSource};
use blkyard_wire::vfio_user::{
    Command, DeviceFlags, DeviceRegions, DmaAccess, FrameError, HEADER_BYTES, MessageError, MessageHeader, MessageKind,
    RegionFlags, RegionInfo, VfioCapabilities, VfioReply, VfioRequest, VfioVersion, region_index,
};

/// Time limit of the server's replies.
const LIMIT: Duration = Duration::from_mins(1);

/// Handles a command in place of the correct reply; `None` for the correct reply.
type Lie = Box<dyn FnMut(&VfioRequest<'_>, u16, &mut UnixStream) -> Option<Then> + Send>;

/// Next action of the server.
enum Then {
    /// Handle the next command.
    GoOn,
    /// Also send the correct reply.
    Honest,
    /// Stop reading; keep the connection open until the client closes it.
    Hang,
    /// Close the connection.
    Close,
}

/// Time that passes faster once a server hangs: no honest reply is late on a busy machine. Seconds it is ahead.
#[derive(Debug, Default)]
struct JumpingClock(AtomicU64);

impl JumpingClock {
    /// By more than any limit here.
    fn jump(&self) {
        self.advance(3600);
    }

    fn advance(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl TimeSource for JumpingClock {
    fn now(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    fn wait(&self, fds: &mut [PollFd<'_>], _deadline: Option<Instant>) -> io::Result<usize> {
        // Early returns are allowed.
        blkyard_sys::wait_for(fds, Some(Duration::from_millis(5)))
    }
}

fn read_message(stream: &mut UnixStream) -> Option<(MessageHeader, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = MessageHeader::parse(header, 1 << 21).unwrap();
    let mut payload = vec![0; header.payload_bytes as usize];
    stream.read_exact(&mut payload).ok()?;
    Some((header, payload))
}

/// The reply of a device with only a configuration space and BAR 0, all zeros.
fn honest<'a>(request: &VfioRequest<'_>, zeroes: &'a [u8]) -> VfioReply<'a> {
    match request {
        VfioRequest::Version(version) => VfioReply::Version(VfioVersion { ..version.clone() }),
        VfioRequest::DmaMap(_) => VfioReply::DmaMap,
        VfioRequest::DmaUnmap(unmap) => VfioReply::DmaUnmap(*unmap),
        VfioRequest::DeviceGetInfo => {
            VfioReply::DeviceGetInfo(DeviceRegions { flags: DeviceFlags::all(), regions: 9, irqs: 5 })
        }
        VfioRequest::DeviceGetRegionInfo { index, .. } => {
            let size = if *index == region_index::CONFIG { 256 } else { 0x2000 };
            let flags = RegionFlags::READ | RegionFlags::WRITE;
            VfioReply::DeviceGetRegionInfo(RegionInfo { index: *index, flags, size, offset: 0, sparse: None })
        }
        VfioRequest::RegionRead(access) => VfioReply::RegionRead(*access, &zeroes[..access.count as usize]),
        VfioRequest::RegionWrite(access, _) => VfioReply::RegionWrite(*access),
        VfioRequest::DeviceReset => VfioReply::DeviceReset,
        other => panic!("{} is not asked of this device", other.command()),
    }
}

/// A server for one client, on its thread. It ends when the client has closed the connection, and returns whether that
/// was at the end of a message.
fn serve(socket: &Path, mut lie: Lie) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while let Some((header, payload)) = read_message(&mut stream) {
            // A plain read drops descriptors, so their number is zero.
            let request = VfioRequest::parse(header.command, &payload, 0, 1 << 20).unwrap();
            match lie(&request, header.id, &mut stream) {
                Some(Then::GoOn) => continue,
                Some(Then::Hang) => {
                    while stream.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
                    return;
                }
                Some(Then::Close) => return,
                Some(Then::Honest) | None => {}
            }
            if stream.write_all(&honest(&request, &[0; 4096]).encode(header.id)).is_err() {
                return;
            }
        }
    })
}

fn open_with(lie: Lie, change: impl FnOnce(&mut VfioUserConfig)) -> Result<VfioUserController, VfioUserError> {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nvme.sock");
    let server = serve(&socket, lie);
    let mut config = VfioUserConfig::new(&socket, Arc::new(SystemClock)).unwrap();
    config.reply_max = LIMIT;
    change(&mut config);
    let opened = VfioUserController::open(&config);
    if opened.is_err() {
        server.join().expect("the server saw the end of the connection");
    }
    opened
}

fn open(lie: Lie) -> Result<VfioUserController, VfioUserError> {
    open_with(lie, |_| {})
}

/// A wrong reply to one command; all others get the correct reply.
fn about(command: Command, mut answer: impl FnMut(u16, &mut UnixStream) -> Then + Send + 'static) -> Lie {
    Box::new(move |request, id, stream| (request.command() == command).then(|| answer(id, stream)))
}

#[test]
fn an_honest_server_without_interrupts_is_polled() {
    let controller = open(Box::new(|_, _, _| None)).unwrap();
    assert!(controller.eventfds().is_empty() && controller.shared_doorbells().is_none());
    assert_eq!(controller.doorbell_bytes(), 0x1000);
}

/// Refuses so many accesses to BAR 0 after the first, and counts set-ups of the device.
fn refuses(mut left: usize, set_ups: &Arc<AtomicU64>) -> Lie {
    let (set_ups, mut is_first) = (Arc::clone(set_ups), true);
    Box::new(move |request, id, stream| match request {
        // The command register, written at the end of a set-up.
        VfioRequest::RegionWrite(access, _) if (access.region, access.offset) == (region_index::CONFIG, 4) => {
            set_ups.fetch_add(1, Ordering::Relaxed);
            None
        }
        VfioRequest::RegionRead(access) | VfioRequest::RegionWrite(access, _)
            if access.region == region_index::BAR0 =>
        {
            if std::mem::take(&mut is_first) || left == 0 {
                return None;
            }
            left -= 1;
            stream.write_all(&MessageHeader::encode_error(id, request.command() as u16, 22)).unwrap();
            Some(Then::GoOn)
        }
        _ => None,
    })
}

#[test]
fn device_that_refuses_registers_is_set_up_again() {
    let set_ups = Arc::default();
    let mut controller = open(refuses(1, &set_ups)).unwrap();
    assert_eq!(controller.read_register(0x1c), Ok(0));
    assert!(!controller.take_reset());
    assert_eq!(set_ups.load(Ordering::Relaxed), 1);
    assert_eq!(controller.write_register(0x1000, 1), Ok(()));
    assert_eq!(set_ups.load(Ordering::Relaxed), 2);
    assert!(controller.take_reset() && !controller.take_reset());
    assert_eq!(controller.failure(), None);
}

#[test]
fn device_that_still_refuses_registers_is_left() {
    let set_ups = Arc::default();
    let mut controller = open(refuses(2, &set_ups)).unwrap();
    assert_eq!(controller.read_register(0x1c), Ok(0));
    let refused = VfioUserError::Refused { request: Command::RegionRead, errno: 22 };
    assert_eq!(controller.read_register(0x1c), Err(refused.clone()));
    assert_eq!(set_ups.load(Ordering::Relaxed), 2);
    assert!(!controller.take_reset());
    // Otherwise the server would never be known to leave our memory alone.
    assert_eq!(controller.failure(), Some(refused));
    until_closed(&controller);
}

/// Waits until the server has closed its end.
fn until_closed(controller: &VfioUserController) {
    let start = Instant::now();
    while !controller.is_closed_by_server() {
        assert!(start.elapsed() < LIMIT, "the server keeps the connection");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_server_that_hangs_is_left_after_the_limit() {
    for command in [Command::Version, Command::DeviceGetInfo, Command::RegionWrite] {
        let clock = Arc::new(JumpingClock::default());
        let jumping = Arc::clone(&clock);
        let lie = about(command, move |_, _| {
            jumping.jump();
            Then::Hang
        });
        let late = open_with(lie, |config| config.clock = clock);
        assert_eq!(late.unwrap_err(), VfioUserError::Late { request: command, limit: LIMIT });
    }
}

#[test]
fn a_reply_is_not_awaited_once_the_device_is_let_go_of() {
    let end = Arc::new(EventFd::new().unwrap());
    end.signal();
    let left = open_with(about(Command::Version, |_, _| Then::Hang), |config| config.end = end);
    assert_eq!(left.unwrap_err(), VfioUserError::LetGo);
}

#[test]
fn a_server_that_closes_or_lies_is_named() {
    let refusal = |errno| {
        about(Command::DeviceGetInfo, move |id, stream| {
            stream.write_all(&MessageHeader::encode_error(id, 4, errno)).unwrap();
            Then::GoOn
        })
    };
    let says = |bytes: Vec<u8>| {
        about(Command::DeviceGetInfo, move |_, stream| {
            stream.write_all(&bytes).unwrap();
            Then::Hang
        })
    };
    let info = Command::DeviceGetInfo;
    for (lie, error) in [
        (about(info, |_, _| Then::Close), VfioUserError::Closed),
        (refusal(22), VfioUserError::Refused { request: info, errno: 22 }),
        (says(vec![0; 16]), FrameError::Size { size: 0, max: (1 << 20) + 4096 + 80 }.into()),
        (says(VfioReply::DmaMap.encode(99)), VfioUserError::UnknownReply { id: 99 }),
        (says(VfioReply::DmaMap.encode(1)), VfioUserError::OtherCommand { asked: info, came: 2 }),
        (says(VfioRequest::DeviceReset.encode(0, true)), MessageError::UnknownCommand(13).into()),
    ] {
        assert_eq!(open(lie).unwrap_err(), error);
    }
    let part = about(info, |_, stream| {
        stream.write_all(&[0; 7]).unwrap();
        Then::Close
    });
    assert_eq!(open(part).unwrap_err(), FrameError::Truncated { bytes: 7 }.into());
    let no_pci = about(info, |id, stream| {
        let device = DeviceRegions { flags: DeviceFlags::RESET, regions: 9, irqs: 5 };
        stream.write_all(&VfioReply::DeviceGetInfo(device).encode(id)).unwrap();
        Then::GoOn
    });
    assert_eq!(open(no_pci).unwrap_err(), VfioUserError::Device { what: "PCI regions" });
}

#[test]
fn capabilities_that_lead_in_a_circle_come_to_an_end() {
    let lie: Lie = Box::new(|request, id, stream| {
        let VfioRequest::RegionRead(access) = request else { return None };
        // The status register with a capability list in which every entry points to itself.
        let data = vec![0x50; access.count as usize];
        stream.write_all(&VfioReply::RegionRead(*access, &data).encode(id)).unwrap();
        Some(Then::GoOn)
    });
    assert!(open(lie).unwrap().eventfds().is_empty());
}

#[test]
fn replies_that_are_each_in_time_are_late_together() {
    let clock = Arc::new(JumpingClock::default());
    let slow = Arc::clone(&clock);
    let lie: Lie = Box::new(move |request, _, _| {
        slow.advance(if request.command() == Command::Version { 0 } else { LIMIT.as_secs() / 3 });
        None
    });
    let late = open_with(lie, |config| config.clock = clock).unwrap_err();
    assert!(matches!(late, VfioUserError::Late { limit, .. } if limit == LIMIT), "{late}");
}

#[test]
fn a_region_that_grows_with_each_reply_is_refused() {
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    let lie: Lie = Box::new(move |request, id, stream| {
        let VfioRequest::DeviceGetRegionInfo { argsz, index } = request else { return None };
        count.fetch_add(1, Ordering::Relaxed);
        let flags = RegionFlags::READ | RegionFlags::WRITE;
        let fixed = RegionInfo { index: *index, flags, size: 0x2000, offset: 0, sparse: None };
        stream.write_all(&VfioReply::RegionInfoCut { argsz: argsz + 1, fixed }.encode(id)).unwrap();
        Some(Then::GoOn)
    });
    assert_eq!(open(lie).unwrap_err(), VfioUserError::Device { what: "such region" });
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[test]
fn an_error_ends_the_connection_for_good() {
    let lie = about(Command::DeviceReset, |_, stream| {
        stream.write_all(&[0xff; 16]).unwrap();
        Then::Hang
    });
    let mut controller = open(lie).unwrap();
    let error = controller.reset_device().unwrap_err();
    assert!(matches!(error, VfioUserError::Frame(FrameError::Size { .. })), "{error}");
    assert_eq!(controller.read_register(0x1c), Err(error.clone()));
    assert_eq!(controller.failure(), Some(error));
    // The server has seen our end and closed its own; the host may reuse the memory from then on.
    for _ in 0..3000 {
        assert_eq!(controller.read32(0x1c), Err(DeviceGone));
        if controller.is_silent_when_gone() {
            assert!(controller.is_closed_by_server());
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the server did not see the end of the connection");
}

/// The server accesses memory by message while a command waits for its reply.
#[test]
fn mapped_memory_is_read_and_written_by_message_and_no_other() {
    let region = Region::shared(0x3000).unwrap();
    region.span(0x10, 5).unwrap().copy_from_slice(b"hello");
    let base = region.span(0, 1).unwrap().as_ptr().addr() as u64;
    let lie: Lie = Box::new(move |request, _, stream| {
        if !matches!(request, VfioRequest::DeviceReset) {
            return None;
        }
        let mut ask = |request: &VfioRequest<'_>, no_reply| {
            stream.write_all(&request.encode(7, no_reply)).unwrap();
            (!no_reply).then(|| read_message(stream).unwrap())
        };
        let (header, payload) =
            ask(&VfioRequest::DmaRead(DmaAccess { address: base + 0x10, count: 5 }), false).unwrap();
        assert_eq!((header.id, header.kind, &payload[16..]), (7, MessageKind::Reply, &b"hello"[..]));
        let access = DmaAccess { address: base + 0x20, count: 3 };
        let (header, payload) = ask(&VfioRequest::DmaWrite(access, b"abc"), false).unwrap();
        assert_eq!(VfioReply::parse(Command::DmaWrite, &payload, 0, 64), Ok(VfioReply::DmaWrite(access)));
        assert_eq!(header.kind, MessageKind::Reply);
        ask(&VfioRequest::DmaWrite(DmaAccess { address: base + 0x23, count: 3 }, b"def"), true);
        for (address, count) in [(base - 1, 1), (base + 0x3000, 1), (base + 0x2fff, 2), (0, 1), (u64::MAX - 4, 4)] {
            let access = DmaAccess { address, count };
            let data = vec![9; count as usize];
            for request in [VfioRequest::DmaRead(access), VfioRequest::DmaWrite(access, &data)] {
                let (header, _) = ask(&request, false).unwrap();
                assert_eq!((header.id, header.kind), (7, MessageKind::Error(14)), "{address:#x}");
            }
        }
        Some(Then::Honest)
    });
    let mut controller = open(lie).unwrap();
    let _mapping = controller.domain().map(vec![Arc::clone(&region)]);
    assert_eq!(controller.mapped_address(&region, 0x10), Some(base + 0x10));
    assert_eq!(controller.reset_device(), Ok(true));
    let mut bytes = [0; 6];
    region.span(0x20, 6).unwrap().copy_to_slice(&mut bytes);
    assert_eq!(&bytes, b"abcdef");
}

#[test]
fn a_refused_unmap_keeps_its_region_and_spares_the_others() {
    let lie = about(Command::DmaUnmap, |id, stream| {
        stream.write_all(&MessageHeader::encode_error(id, Command::DmaUnmap as u16, 16)).unwrap();
        Then::GoOn
    });
    let controller = open(lie).unwrap();
    let regions = [0, 1].map(|_| Region::shared(0x1000).unwrap());
    let map = |number: usize| controller.domain().map(vec![Arc::clone(&regions[number])]);
    let first = map(0);
    assert!(controller.mapped_address(&regions[0], 0).is_some());
    drop(first);
    let _second = map(1);
    for _ in 0..2 {
        assert!(controller.mapped_address(&regions[1], 0).is_some(), "another region is mapped all the same");
        assert_eq!(controller.mapped_address(&regions[0], 0), None);
    }
    assert_eq!((controller.failure(), Arc::strong_count(&regions[0])), (None, 2), "the server may still reach it");
    // The domain lists it again: it is mapped still.
    let _again = map(0);
    assert!(controller.mapped_address(&regions[0], 0).is_some());
}

/// A guest's memory that came when the server had no room is reached once another's has gone.
#[test]
fn memory_refused_for_want_of_room_is_mapped_when_there_is_some() {
    for (announced, taken) in [(2, 2), (u64::from(u16::MAX), 2)] {
        let mut mapped = 0;
        let lie: Lie = Box::new(move |request, id, stream| {
            match request {
                VfioRequest::Version(version) => {
                    let capabilities = VfioCapabilities { max_dma_maps: announced, ..version.capabilities.clone() };
                    let version = VfioVersion { capabilities, ..version.clone() };
                    stream.write_all(&VfioReply::Version(version).encode(id)).unwrap();
                    return Some(Then::GoOn);
                }
                VfioRequest::DmaMap(_) if mapped == taken => {
                    stream.write_all(&MessageHeader::encode_error(id, Command::DmaMap as u16, 28)).unwrap();
                    return Some(Then::GoOn);
                }
                VfioRequest::DmaMap(_) => mapped += 1,
                VfioRequest::DmaUnmap(_) => mapped -= 1,
                _ => {}
            }
            None
        });
        let controller = open(lie).unwrap();
        let regions = [0, 1, 2].map(|_| Region::shared(0x1000).unwrap());
        let mut mappings = regions.iter().map(|region| controller.domain().map(vec![Arc::clone(region)]));
        let first = mappings.next();
        assert!(controller.mapped_address(&regions[0], 0).is_some());
        let others: Vec<_> = mappings.collect();
        let reached = |number: usize| controller.mapped_address(&regions[number], 0).is_some();
        assert_eq!([0, 1, 2].map(reached), [true, true, false], "{announced} mappings are announced");
        drop(first);
        assert_eq!([1, 2].map(reached), [true, true], "{announced} mappings are announced");
        assert_eq!(controller.failure(), None);
        drop(others);
    }
}

/// A server that never stops asking, and never answers, is late like any other.
#[test]
fn a_server_that_only_asks_is_late() {
    let clock = Arc::new(JumpingClock::default());
    let jumping = Arc::clone(&clock);
    let lie = about(Command::DeviceReset, move |_, stream| {
        let ask = VfioRequest::DmaRead(DmaAccess { address: 0, count: 1 }).encode(1, false);
        for round in 0.. {
            if stream.write_all(&ask).is_err() {
                break;
            }
            if round == 100 {
                jumping.jump();
            }
        }
        Then::Close
    });
    let mut controller = open_with(lie, |config| config.clock = clock).unwrap();
    let late = controller.reset_device().unwrap_err();
    assert_eq!(late, VfioUserError::Late { request: Command::DeviceReset, limit: LIMIT });
}
