//! The number of descriptors that this process may have open.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Allows this process as many descriptors as it may allow itself, and returns how many: each queue of a guest takes a
/// handful, and the usual limit is kept low for programs that could not wait on larger numbers.
///
/// # Errors
/// What the system said. Nothing has changed then.
pub fn allow_all_descriptors() -> io::Result<Option<u64>> {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    Ok(most)
}
