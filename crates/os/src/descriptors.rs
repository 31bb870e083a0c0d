//! The number of descriptors that this process may have open.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit on open files to this process's maximum, and returns it: each queue of a guest takes a handful of
/// descriptors, and the usual limit is kept low for programs that use `select`.
///
/// # Errors
/// The system's error. The limit is unchanged then.
pub fn allow_all_descriptors() -> io::Result<Option<u64>> {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    Ok(most)
}
