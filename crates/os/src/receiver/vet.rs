//! What a descriptor from outside is, found out without waiting for whoever stands behind it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::Duration;

use blkyard_mem::check_near;
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::thread::{Pid, gettid};

use super::table::STACK_BYTES;

/// How long a file system may take to say what it is. A disk of this machine answers from memory.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// What a descriptor is.
pub(super) enum DescriptorKind {
    /// Nobody has to answer when it is used or closed: an eventfd, or a file in memory or on a disk of this machine.
    Safe,
    /// A unix stream socket. What lies in it unread may be anything.
    Stream,
    /// Anything else, and why it is not passed on.
    Refused(String),
}

/// Looks at a descriptor. One that is refused must stay open as long as its table: a file system that has not answered
/// may still be asked, by a thread that `asking` then names.
pub(super) fn kind(file: &OwnedFd, asking: &mut Vec<Pid>) -> DescriptorKind {
    // The name alone: the file system is not asked for it. The thread has a table of its own.
    let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", file.as_raw_fd()));
    let link = match &link {
        // A peer chooses the name, and it goes into the log.
        Ok(link) => link.to_string_lossy().escape_debug().to_string(),
        Err(error) => return DescriptorKind::Refused(format!("it cannot be looked at: {error}")),
    };
    if link.starts_with("anon_inode:[eventfd") {
        DescriptorKind::Safe
    } else if link.starts_with("socket:[") {
        if is_stream(file) {
            DescriptorKind::Stream
        } else {
            DescriptorKind::Refused("it is a socket, and no unix stream".into())
        }
    } else if link.starts_with("pipe:[") || link.starts_with("anon_inode:") {
        DescriptorKind::Refused(format!("it is {link}"))
    } else {
        match ask(file.as_fd(), asking) {
            Ok(()) => DescriptorKind::Safe,
            Err(why) => DescriptorKind::Refused(format!("{link}: {why}")),
        }
    }
}

/// Whether a descriptor is a unix stream socket. That is known to this machine.
pub(super) fn is_stream(file: &OwnedFd) -> bool {
    let kind = sockopt::socket_domain(file).ok().zip(sockopt::socket_type(file).ok());
    kind == Some((AddressFamily::UNIX, SocketType::STREAM))
}

/// Asks the file system, in a thread that may wait for ever.
fn ask(file: BorrowedFd<'_>, asking: &mut Vec<Pid>) -> Result<(), String> {
    let number = file.as_raw_fd();
    let (begun, id) = channel();
    let (told, came) = channel();
    let ask = move || {
        let _ = begun.send(gettid());
        // SAFETY: a thread shares the table of the one that starts it, where the descriptor stays open until this one
        // has answered, or as long as the table.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let _ = told.send(check_near(file).map_err(|error| error.to_string()));
    };
    let thread = std::thread::Builder::new().name("ask".into()).stack_size(STACK_BYTES).spawn(ask);
    thread.map_err(|error: io::Error| error.to_string())?;
    came.recv_timeout(ANSWER_TIME).unwrap_or_else(|_| {
        asking.extend(id.recv());
        Err(format!("its file system has not answered for {} s", ANSWER_TIME.as_secs()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn safe_descriptors_are_told_from_others() {
        use std::os::unix::net::{UnixDatagram, UnixStream};
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("f")).unwrap();
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        for safe in [&memory, &event] {
            assert!(matches!(kind(safe, &mut Vec::new()), DescriptorKind::Safe));
        }
        // Whether a temporary file is near depends on the machine; the answer must be that of the check.
        let is_near = check_near(file.as_fd()).is_ok();
        assert_eq!(matches!(kind(&file.into(), &mut Vec::new()), DescriptorKind::Safe), is_near);
        assert!(matches!(kind(&UnixStream::pair().unwrap().0.into(), &mut Vec::new()), DescriptorKind::Stream));
        let null = std::fs::File::open("/dev/null").unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let others: [OwnedFd; 5] = [
            UnixDatagram::pair().unwrap().0.into(),
            tcp.into(),
            std::io::pipe().unwrap().0.into(),
            null.into(),
            std::fs::File::open(folder.path()).unwrap().into(),
        ];
        for other in others {
            assert!(matches!(kind(&other, &mut Vec::new()), DescriptorKind::Refused(_)));
        }
    }
}
