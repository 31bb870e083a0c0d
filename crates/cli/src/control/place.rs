//! Paths of control sockets: made there by `serve`, and found there by `inspect` and `set`.
//!
//! `$XDG_RUNTIME_DIR/blkyard/PID.sock`, or `/run/blkyard/PID.sock`, or if neither folder can be made `SOCKET.control`
//! beside the first export's SOCKET, where it is only found from within that folder.

use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use blkyard_export::{BoundSocket, SocketConfig, SocketError};

use super::client::is_listened_at;

/// Suffix of a control socket beside an export's socket.
const BESIDE: &str = "control";

/// Path of the control socket of `serve`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ControlPlace {
    /// Wherever there is room for it.
    #[default]
    Anywhere,
    /// Here.
    At(PathBuf),
    /// Nowhere.
    None,
}

impl From<&str> for ControlPlace {
    fn from(text: &str) -> ControlPlace {
        if text == "none" { ControlPlace::None } else { ControlPlace::At(text.into()) }
    }
}

impl ControlPlace {
    /// Binds the socket; `None` if there is to be none. A default path is optional: if none can be used, that is
    /// logged.
    ///
    /// # Errors
    /// The path given by the user cannot be used.
    pub fn bind(&self, first_export: Option<&Path>) -> Result<Option<BoundSocket>, SocketError> {
        match self {
            ControlPlace::None => Ok(None),
            ControlPlace::At(path) => bind(path).map(Some),
            ControlPlace::Anywhere => Ok(bind_anywhere(first_export)),
        }
    }
}

fn bind(path: &Path) -> Result<BoundSocket, SocketError> {
    BoundSocket::bind(&SocketConfig { path: path.into(), mode: Some(0o600), group: None })
}

fn bind_anywhere(first_export: Option<&Path>) -> Option<BoundSocket> {
    let leaf = format!("{}.sock", std::process::id());
    for folder in folders() {
        // An existing folder may belong to another user; then the next line fails.
        let _ = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        if let Ok(socket) = bind(&folder.join(&leaf)) {
            sweep(&folder);
            return Some(socket);
        }
    }
    let beside = first_export.map(|export| {
        let mut name = export.as_os_str().to_owned();
        name.push(".");
        name.push(BESIDE);
        PathBuf::from(name)
    })?;
    bind(&beside)
        .map_err(|error| {
            tracing::warn!("no control socket: {error}; inspect and set do not work until the daemon is restarted");
        })
        .ok()
}

/// Folders in which sockets are named after their daemons.
pub fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let folders = runtime.into_iter().chain([PathBuf::from("/run")]);
    folders.map(|folder| folder.join("blkyard")).collect()
}

/// Sockets at which a daemon listens: those in the folders, and in the current folder those beside an export.
pub fn daemons() -> Vec<PathBuf> {
    let named = folders().into_iter().flat_map(|folder| sockets(&folder, "sock"));
    let all = named.chain(sockets(Path::new("."), BESIDE));
    all.filter(|path| is_listened_at(path)).collect()
}

/// Removes sockets of killed daemons.
fn sweep(folder: &Path) {
    for path in sockets(folder, "sock") {
        let ended = path.file_stem().is_some_and(|id| !Path::new("/proc").join(id).exists());
        let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if ended && is_socket && !is_listened_at(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

fn sockets(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_place_that_is_named_is_had_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here");
        let place = ControlPlace::from(path.to_str().unwrap());
        let socket = place.bind(None).unwrap().unwrap();
        assert_eq!(socket.path(), path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(place.bind(None).is_err(), "somebody listens there");
        assert!(ControlPlace::from("none").bind(None).unwrap().is_none());
        assert!(ControlPlace::from("/nonexistent/x").bind(None).is_err());
    }

    #[test]
    fn what_killed_daemons_left_is_swept_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |leaf: &str| folder.path().join(leaf);
        let own = format!("{}.sock", std::process::id());
        for leaf in ["4294967295.sock", own.as_str()] {
            drop(std::os::unix::net::UnixListener::bind(at(leaf)).unwrap());
        }
        std::fs::write(at("notes"), "mine").unwrap();
        let alive = std::os::unix::net::UnixListener::bind(at("4294967294.sock")).unwrap();
        sweep(folder.path());
        assert!(!at("4294967295.sock").exists());
        assert!(at(&own).exists() && at("notes").exists() && at("4294967294.sock").exists());
        drop(alive);
    }
}
