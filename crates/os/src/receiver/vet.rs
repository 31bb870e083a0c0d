//! Classifies a foreign descriptor without waiting for the process or file system behind it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::Duration;

use blkyard_mem::check_near;
use blkyard_sys::{fd_name, is_eventfd_name};
use rustix::fs::fcntl_get_seals;
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::thread::{Pid, gettid};

use super::table::STACK_BYTES;

/// Time limit for a file system to report its type. One on a disk of this machine answers from memory.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// Kind of a foreign descriptor.
pub(super) enum DescriptorKind {
    /// Can be used and closed without an answer of another process: an eventfd, or a file in memory or on a disk of
    /// this machine.
    Safe,
    /// A unix stream socket. Its unread bytes may carry any descriptor.
    Stream,
    /// Anything else, with the reason why it is not passed on.
    Refused(String),
}

/// Queries of file systems for one session.
#[derive(Debug, Default)]
pub(super) struct FileQueries {
    /// Threads whose query was not answered in time, and that are not [reported](super::EndedThreads) yet.
    pub(super) asking: Vec<Pid>,
    /// Whether there ever was one. No further file system is queried then, so each session has one such thread at most.
    has_hung: bool,
}

/// Classifies a descriptor. A refused one must stay open as long as its descriptor table: a query of its file system
/// may still be under way.
pub(super) fn kind(file: &OwnedFd, queries: &mut FileQueries) -> DescriptorKind {
    let name = match fd_name(file) {
        // A peer chooses the name, and it goes into the log.
        Ok(name) => name.escape_debug().to_string(),
        Err(error) => return DescriptorKind::Refused(format!("its type cannot be read from /proc: {error}")),
    };
    if is_eventfd_name(&name) {
        DescriptorKind::Safe
    } else if name.starts_with("socket:[") {
        if is_stream(file) {
            DescriptorKind::Stream
        } else {
            DescriptorKind::Refused("it is a socket, but not a unix stream socket".into())
        }
    } else if name.starts_with("pipe:[") || name.starts_with("anon_inode:") {
        DescriptorKind::Refused(format!("it is {name}"))
    } else if fcntl_get_seals(file).is_ok() {
        // A file in memory: the kernel has answered by itself.
        DescriptorKind::Safe
    } else if queries.has_hung {
        DescriptorKind::Refused(format!("{name}: the file system of an earlier one has not answered"))
    } else {
        match ask(file.as_fd(), queries) {
            Ok(()) => DescriptorKind::Safe,
            Err(why) => DescriptorKind::Refused(format!("{name}: {why}")),
        }
    }
}

/// Whether a descriptor is a unix stream socket. The kernel answers by itself.
pub(super) fn is_stream(file: &OwnedFd) -> bool {
    let kind = sockopt::socket_domain(file).ok().zip(sockopt::socket_type(file).ok());
    kind == Some((AddressFamily::UNIX, SocketType::STREAM))
}

/// Queries the file system, on a thread that may block without limit.
fn ask(file: BorrowedFd<'_>, queries: &mut FileQueries) -> Result<(), String> {
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
        queries.has_hung = true;
        queries.asking.extend(id.recv());
        Err(format!("its file system has not answered within {} s", ANSWER_TIME.as_secs()))
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
            assert!(matches!(kind(safe, &mut FileQueries::default()), DescriptorKind::Safe));
        }
        // Whether a temporary file is near depends on the machine; the answer must be that of the check.
        let is_near = check_near(file.as_fd()).is_ok();
        assert_eq!(matches!(kind(&file.into(), &mut FileQueries::default()), DescriptorKind::Safe), is_near);
        assert!(matches!(
            kind(&UnixStream::pair().unwrap().0.into(), &mut FileQueries::default()),
            DescriptorKind::Stream
        ));
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
            assert!(matches!(kind(&other, &mut FileQueries::default()), DescriptorKind::Refused(_)));
        }
    }

    #[test]
    fn no_file_system_is_queried_after_one_that_has_not_answered() {
        let mut queries = FileQueries { asking: Vec::new(), has_hung: true };
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("f")).unwrap();
        assert!(matches!(kind(&file.into(), &mut queries), DescriptorKind::Refused(why) if why.contains("earlier")));
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        for safe in [&memory, &event] {
            assert!(matches!(kind(safe, &mut queries), DescriptorKind::Safe));
        }
    }
}
