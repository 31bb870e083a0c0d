//! Tells a service manager such as systemd that the daemon serves, and which process that is.
//!
//! One datagram to the socket that the manager names in the environment, by the protocol of `sd_notify(3)`. Without a
//! manager nothing is sent. A daemon that took over names itself as well, so the service goes on with it.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Time for a manager whose socket is full: the daemon serves all the same.
const LIMIT: Duration = Duration::from_secs(5);

/// Tells the manager, if there is one, that this process serves from now on. What goes wrong is logged.
pub(crate) fn ready() {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = tell(&socket, std::process::id()) {
        let socket = socket.display();
        tracing::warn!("the service manager was not told that the daemon is ready, at {socket}: {error}");
    }
}

fn tell(socket: &OsStr, process: u32) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(LIMIT))?;
    sender.send_to_addr(format!("READY=1\nMAINPID={process}").as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_told_at_a_path_or_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("@blkyard-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name.as_bytes()[1..]).unwrap();
        let managers = [UnixDatagram::bind(&path).unwrap(), UnixDatagram::bind_addr(&abstract_address).unwrap()];
        for (manager, socket) in managers.iter().zip([path.as_os_str(), OsStr::new(&name)]) {
            tell(socket, 7).unwrap();
            let mut said = [0; 64];
            let length = manager.recv(&mut said).unwrap();
            assert_eq!(&said[..length], b"READY=1\nMAINPID=7");
        }
        assert!(tell(folder.path().join("none").as_os_str(), 7).is_err());
    }
}
