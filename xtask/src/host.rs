//! Programs and files that this machine needs, each with its Debian package.
//!
//! Missing ones are installed if we are root on Debian, with a message; otherwise all are named at once. Versions are
//! not checked.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::succeed;

const INSTALL_LIMIT: Duration = Duration::from_mins(10);

/// Makes sure of every program, or file with its whole path, in `(program, package)`.
pub fn require(programs: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<_> = programs.iter().filter(|(program, _)| !is_here(program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    let list = packages.join(" ");
    if !rustix::process::geteuid().is_root() || !is_here("apt-get") {
        let names: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
        bail!("missing on this machine: {}; install them (on Debian: apt-get install {list})", names.join(", "));
    }
    eprintln!("installing with apt-get: {list}");
    succeed("apt-get", &apt_get(&["update"]), INSTALL_LIMIT).context("cannot read the package lists")?;
    succeed(
        "apt-get",
        &apt_get(&[&["install", "-y", "--no-install-recommends"][..], &packages].concat()),
        INSTALL_LIMIT,
    )
    .with_context(|| format!("cannot install {list}"))?;
    Ok(())
}

fn apt_get(arguments: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    // A machine that has just started may be installing its updates.
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-oDPkg::Lock::Timeout=300"]).args(arguments);
    command
}

/// Whether a program can be found, also where only administrators usually look.
fn is_here(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .any(|folder| Path::new(&folder).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::is_here;

    #[test]
    fn the_shell_is_here_and_nonsense_is_not() {
        assert!(is_here("sh"));
        assert!(!is_here("no-such-program-anywhere"));
    }
}
