//! Debian packages by name, through a private apt state: nothing is installed, no root needed.
//!
//! Uses the archive address of this machine's apt, including its mirrors and proxies. Dependencies are complete, since
//! no package counts as installed in the private state. Packages are unpacked in `parts`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::succeed;

/// Time limit for a slow mirror; the largest selection is 250 MB.
const DOWNLOAD_LIMIT: Duration = Duration::from_mins(15);

/// One release of Debian, with the release that its backports depend on, ready for queries.
pub struct Suite {
    name: &'static str,
    options: Vec<String>,
    /// List of apt's sources.
    sources: PathBuf,
}

impl Suite {
    /// Reads the package lists of `name` into a state below `folder`.
    pub fn open(folder: &Path, name: &'static str) -> Result<Self> {
        let folder = folder.join(name);
        let empty =
            |path: PathBuf| fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()));
        empty(folder.join("lists/partial"))?;
        empty(folder.join("cache/archives/partial"))?;
        let file = |leaf: &str, text: &str| {
            let path = folder.join(leaf);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok::<_, anyhow::Error>(path)
        };
        let sources = file("suite.sources", &sources(&archive_address()?, name, "deb"))?;
        // No package counts as installed.
        let status = file("status", "")?;
        let here = folder.display();
        let options = [
            format!("Dir::Etc::sourcelist={}", sources.display()),
            "Dir::Etc::sourceparts=/dev/null".into(),
            "Dir::Etc::preferences=/dev/null".into(),
            "Dir::Etc::preferencesparts=/dev/null".into(),
            format!("Dir::State={here}"),
            format!("Dir::State::lists={here}/lists"),
            format!("Dir::State::status={}", status.display()),
            format!("Dir::Cache={here}/cache"),
            "APT::Architecture=amd64".into(),
            "APT::Architectures=amd64".into(),
            "APT::Install-Recommends=false".into(),
            // apt's download user may have no access to a folder in a home directory.
            "APT::Sandbox::User=".into(),
            "Acquire::Languages=none".into(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".into(),
            "Acquire::Retries=3".into(),
            // An incomplete list would be noticed only by missing packages.
            "APT::Update::Error-Mode=any".into(),
            "Debug::NoLocking=true".into(),
        ]
        .map(|option| format!("-o{option}"))
        .to_vec();
        let suite = Self { name, options, sources };
        succeed(&format!("apt-get update for {name}"), &suite.apt_get(&["update"]), DOWNLOAD_LIMIT)
            .with_context(|| format!("cannot read the package lists of Debian {name}: is the archive reachable?"))?;
        Ok(suite)
    }

    /// Downloads the packages and all their dependencies into `folder`.
    pub fn fetch(&self, packages: &[&str], folder: &Path) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(folder.join("partial")).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut command = self.apt_get(&["-y", "--download-only"]);
        command.arg(format!("-oDir::Cache::archives={}", folder.display())).arg("install").args(packages);
        self.download(&command, packages)?;
        debs(folder)
    }

    /// Downloads one package into `folder` without its dependencies.
    pub fn fetch_alone(&self, package: &str, folder: &Path) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut command = self.apt_get(&["download", package]);
        command.current_dir(folder);
        self.download(&command, &[package])?;
        debs(folder)
    }

    /// Downloads the archive of a source package into `folder`, without Debian's changes to it.
    pub fn fetch_source(&self, package: &str, folder: &Path) -> Result<PathBuf> {
        // Lists of source packages are read here only: nothing else needs them, and not every mirror has them.
        fs::write(&self.sources, sources(&archive_address()?, self.name, "deb deb-src"))
            .with_context(|| format!("cannot write {}", self.sources.display()))?;
        succeed("apt-get update", &self.apt_get(&["update"]), DOWNLOAD_LIMIT)
            .with_context(|| format!("cannot read the lists of source packages of Debian {}", self.name))?;
        let mut command = self.apt_get(&["source", "--only-source", "--download-only", "--tar-only", package]);
        command.current_dir(folder);
        self.download(&command, &[package])?;
        files(folder, |path| path.display().to_string().contains(".orig.tar."))
            .and_then(|found| found.into_iter().next().with_context(|| format!("{package} has no source archive")))
    }

    /// The names of all packages that installing `package` would install.
    pub fn selection(&self, package: &str) -> Result<Vec<String>> {
        let said = succeed("apt-get", &self.apt_get(&["-s", "install", package]), DOWNLOAD_LIMIT)
            .with_context(|| format!("Debian {} has no package {package}", self.name))?;
        Ok(said.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next()).map(str::to_owned).collect())
    }

    fn download(&self, command: &Command, packages: &[&str]) -> Result<()> {
        succeed("apt-get", command, DOWNLOAD_LIMIT)
            .with_context(|| format!("cannot fetch from Debian {}: {}", self.name, packages.join(" ")))?;
        Ok(())
    }

    fn apt_get(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        command.args(&self.options).args(["-q", "-t", self.name]).args(arguments);
        command
    }
}

/// The source entry of a suite for these types of packages; backports depend on their base release.
fn sources(address: &str, suite: &str, types: &str) -> String {
    const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let suites = match suite.strip_suffix("-backports") {
        Some(base) => format!("{base} {suite}"),
        None => suite.to_owned(),
    };
    let mut text = format!("Types: {types}\nURIs: {address}\nSuites: {suites}\nComponents: main\n");
    if Path::new(KEYRING).exists() {
        text.push_str("Signed-By: ");
        text.push_str(KEYRING);
        text.push('\n');
    }
    text
}

/// Address of Debian in this machine's apt configuration. All suites are in the same archive.
fn archive_address() -> Result<String> {
    let mut command = Command::new("apt-get");
    // The release information is not used, so that this works before the first `apt-get update`.
    command.args(["indextargets", "--no-release-info", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]);
    let targets = succeed("apt-get indextargets", &command, Duration::from_mins(1))?;
    let codename = fs::read_to_string("/etc/os-release")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned());
    choose_address(&targets, codename.as_deref())
}

/// Address of the entry for this release, or for a release under its usual names.
fn choose_address(targets: &str, codename: Option<&str>) -> Result<String> {
    let pairs: Vec<_> = targets.lines().filter_map(|line| line.split_once(' ')).collect();
    let usual = ["stable", "testing", "unstable", "sid", "oldstable", "trixie", "bookworm"];
    let wanted = codename.into_iter().chain(usual);
    for name in wanted {
        if let Some((_, address)) = pairs.iter().find(|(release, _)| *release == name) {
            return Ok((*address).to_owned());
        }
    }
    bail!(
        "cannot tell where to find Debian packages: apt has no source for {}; \
         add Debian's archive to /etc/apt/sources.list.d and try again",
        codename.unwrap_or("a Debian release")
    )
}

/// The packages in a folder, in a stable order.
fn debs(folder: &Path) -> Result<Vec<PathBuf>> {
    let found = files(folder, |path| path.extension().is_some_and(|extension| extension == "deb"))?;
    if found.is_empty() {
        bail!("apt-get reported success but left no package in {}", folder.display());
    }
    Ok(found)
}

/// The wanted files of a folder, in a stable order.
fn files(folder: &Path, is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if is_wanted(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_release_wins() {
        let targets = "stable http://a/\nfoo http://b/\nbookworm-security http://c/\n";
        assert_eq!(choose_address(targets, Some("foo")).unwrap(), "http://b/");
        assert_eq!(choose_address(targets, Some("bar")).unwrap(), "http://a/");
        assert_eq!(choose_address(targets, None).unwrap(), "http://a/");
    }

    #[test]
    fn no_source_is_an_error_with_a_cure() {
        let error = choose_address("noble http://u/\n", Some("noblest")).unwrap_err().to_string();
        assert!(error.contains("noblest") && error.contains("sources.list.d"), "{error}");
    }

    #[test]
    fn backports_lean_on_their_release() {
        assert!(sources("http://a/", "trixie-backports", "deb").contains("Suites: trixie trixie-backports\n"));
        let with_sources = sources("http://a/", "trixie", "deb deb-src");
        assert!(with_sources.starts_with("Types: deb deb-src\n") && with_sources.contains("Suites: trixie\n"));
    }
}
