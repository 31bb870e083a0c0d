//! Files with the secrets of NVMe hosts and targets.
//!
//! A device names a file with one secret, a target one with a line for each host: NQN, secret, and that of the target
//! towards this host if it authenticates itself. They are read when device or export are opened. Secrets are in no
//! name, so that no list of processes shows them.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use blkyard_nvme::auth::{AuthSecrets, AuthSeed, DhchapSecret, HostSecrets};
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{FabricsHostAuth, FabricsHostConfig};
use blkyard_sys::random_bytes;

use crate::spec::{Spec, SpecError};

/// How a secret is made, for messages.
const MAKE: &str = "make one with blkyard nvme gen-dhchap-key";
/// Longest file with secrets, bytes: of some thousand hosts.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Takes the secrets of a host, `secret=FILE` and `ctrl_secret=FILE`.
///
/// # Errors
/// A file cannot be read or has no secret, or there is only that of the target.
pub(crate) fn take_secrets(spec: &mut Spec, config: &mut FabricsHostConfig) -> Result<(), SpecError> {
    let name = spec.name.clone();
    let mut secret = |key| spec.take(key).map(|path| read_secret(&name, &path)).transpose();
    let (host, controller) = (secret("secret")?, secret("ctrl_secret")?);
    match (host, controller) {
        (Some(host), controller) => {
            let (secrets, seed) = (Arc::new(AuthSecrets { host, controller }), seed(&name)?);
            config.auth = Some(FabricsHostAuth { secrets, seed });
            Ok(())
        }
        (None, None) => Ok(()),
        (None, Some(_)) => {
            let cause = "ctrl_secret= is given without secret=";
            Err(SpecError::new(&name, cause, "give this host's own secret, too: a target answers no stranger"))
        }
    }
}

/// Reads the hosts that a target authenticates.
///
/// # Errors
/// The file cannot be read, or a line of it is wrong.
pub fn read_host_secrets(object: &str, path: &str) -> Result<HostSecrets, SpecError> {
    let text = read(object, path)?;
    let mut hosts = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |cause: &str| {
            let cause = format!("{path}, line {}: {cause}", number + 1);
            SpecError::new(object, cause, "write NQN SECRET, and the target's own secret if it has one")
        };
        let mut words = line.split_whitespace();
        let host = words.next().and_then(Nqn::new).ok_or_else(|| wrong("it does not begin with an NQN"))?;
        let mut secret = || words.next().map(DhchapSecret::parse).transpose().map_err(|why| wrong(&why.to_string()));
        let (own, controller) = (secret()?, secret()?);
        let own = own.ok_or_else(|| wrong("the secret is missing"))?;
        if words.next().is_some() {
            return Err(wrong("it has more than three words"));
        }
        if hosts.insert(host, Arc::new(AuthSecrets { host: own, controller })).is_some() {
            return Err(wrong("the host has a line already"));
        }
    }
    if hosts.is_empty() {
        return Err(SpecError::new(object, format!("{path}: it names no host"), "write a line for each: NQN SECRET"));
    }
    Ok(HostSecrets { hosts, seed: seed(object)? })
}

fn read_secret(object: &str, path: &str) -> Result<DhchapSecret, SpecError> {
    let text = read(object, path)?;
    DhchapSecret::parse(&text).map_err(|why| SpecError::new(object, format!("{path} is no secret: {why}"), MAKE))
}

/// Reads a file that not everybody can read.
fn read(object: &str, path: &str) -> Result<String, SpecError> {
    let unread = |cause: String| SpecError::new(object, format!("{path}: {cause}"), "name a file with secrets");
    let file = File::open(path).map_err(|error| unread(error.to_string()))?;
    let mode = file.metadata().map_err(|error| unread(error.to_string()))?.permissions().mode();
    if mode & 0o007 != 0 {
        let cause = format!("{path}: all users can read or change it");
        let cure = "name another file, or have only its owner read it and make new secrets";
        return Err(SpecError::new(object, cause, cure));
    }
    let mut text = String::new();
    let read = file.take(FILE_BYTES_MAX).read_to_string(&mut text);
    read.map(|_| text).map_err(|error| unread(error.to_string()))
}

fn seed(object: &str) -> Result<AuthSeed, SpecError> {
    let random = random_bytes();
    random.map(AuthSeed).map_err(|error| SpecError::new(object, format!("no random numbers: {error}"), "try again"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn secret(byte: u8) -> String {
        DhchapSecret::new(vec![byte; 32], None).unwrap().reveal()
    }

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secrets");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (folder, path.display().to_string())
    }

    #[test]
    fn a_line_has_a_host_and_its_secrets() {
        let text = format!("# hosts\n\nnqn.a {}\n nqn.b  {} {} \n", secret(1), secret(2), secret(3));
        let (_folder, path) = file(&text, 0o600);
        let secrets = read_host_secrets("export", &path).unwrap();
        let of = |name| &secrets.hosts[&Nqn::new(name).unwrap()];
        assert_eq!(of("nqn.a").controller, None);
        assert_eq!(of("nqn.b").host.reveal(), secret(2));
        assert_eq!(of("nqn.b").controller.as_ref().map(DhchapSecret::reveal), Some(secret(3)));
    }

    #[test]
    fn each_wrong_file_is_told_why_and_without_its_secret() {
        let good = secret(1);
        for (text, mode, cause) in [
            (format!("nqn.a {good}"), 0o644, "all users can read"),
            (String::new(), 0o600, "names no host"),
            (format!("host {good}"), 0o600, "line 1: it does not begin with an NQN"),
            ("\nnqn.a".to_owned(), 0o600, "line 2: the secret is missing"),
            (format!("nqn.a {}", &good[..40]), 0o600, "line 1: it does not have the form"),
            (format!("nqn.a {good} {good} {good}"), 0o600, "more than three words"),
            (format!("nqn.a {good}\nnqn.a {good}"), 0o600, "line 2: the host has a line already"),
        ] {
            let (_folder, path) = file(&text, mode);
            let error = read_host_secrets("export", &path).unwrap_err().to_string();
            assert!(error.contains(cause) && !error.contains("AQEB"), "{error}");
        }
        let error = read_host_secrets("export", "/nowhere/secrets").unwrap_err().to_string();
        assert!(error.contains("/nowhere/secrets"), "{error}");
    }
}
