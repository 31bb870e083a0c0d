//! Files with the secrets of NVMe hosts and targets, and with the keys of their encrypted connections.
//!
//! A device names a file with one secret, a target one with a line for each host: NQN, secret, and that of the target
//! towards this host if it authenticates itself. Keys are in files of the same kind, with words behind them that say
//! how they are derived. Files are read when device or export are opened. Secrets are in no name, so that no list of
//! processes shows them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::str::SplitWhitespace;
use std::sync::Arc;

use blkyard_nvme::auth::{AuthHash, AuthSecrets, AuthSeed, DhchapSecret, HostSecrets};
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::tls::{TlsDerivation, TlsHosts, TlsIdentityVersion, TlsKey};
use blkyard_nvme::{FabricsHostAuth, FabricsHostConfig};
use blkyard_sys::random_bytes;
use blkyard_tls::TlsChannel;

use crate::spec::{Spec, SpecError};

/// How a secret is made, for messages.
const MAKE: &str = "make one with blkyard nvme gen-dhchap-key";
/// How a key is made, for messages.
const MAKE_KEY: &str = "make a key with blkyard nvme gen-tls-key; behind it may be compat or v1";
const LONG_NAMES: &str = "the names of host and subsystem are too long for TLS, which has room for 200 bytes";
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

/// Names the files of a device's or an export's options by absolute paths, for a process in another folder.
///
/// # Errors
/// The current folder is not known.
pub fn make_files_absolute(spec: &mut Spec) -> std::io::Result<()> {
    for key in ["secret", "ctrl_secret", "tls_key", "secrets", "tls_keys"] {
        if let Some(path) = spec.take(key) {
            spec.put(key, Some(std::path::absolute(path)?.display()));
        }
    }
    Ok(())
}

/// Reads the hosts that a target authenticates.
///
/// # Errors
/// The file cannot be read, or a line of it is wrong.
pub fn read_host_secrets(object: &str, path: &str) -> Result<HostSecrets, SpecError> {
    let form = "write NQN SECRET, and the target's own secret if it has one";
    let mut hosts = HashMap::new();
    read_hosts(object, path, form, |host, words| {
        let mut secret = || words.next().map(DhchapSecret::parse).transpose().map_err(|why| why.to_string());
        let (own, controller) = (secret()?, secret()?);
        let own = own.ok_or("the secret is missing")?;
        hosts.insert(host.clone(), Arc::new(AuthSecrets { host: own, controller }));
        Ok(())
    })?;
    Ok(HostSecrets { hosts, seed: seed(object)? })
}

/// Takes the key of a host's connections, `tls_key=FILE`.
///
/// # Errors
/// The program has no TLS, or the file cannot be read or has no key.
pub(crate) fn take_tls_key(spec: &mut Spec, config: &mut FabricsHostConfig) -> Result<(), SpecError> {
    let Some(path) = spec.take("tls_key") else { return Ok(()) };
    let object = &spec.name;
    check_tls(object)?;
    let text = read(object, &path)?;
    let wrong = |why: String| SpecError::new(object, format!("{path}: {why}"), MAKE_KEY);
    let mut words = text.split_whitespace();
    let (key, derivation, version) = take_key(&mut words).map_err(wrong)?;
    if let Some(word) = words.next() {
        return Err(wrong(format!("'{word}' is no option of a key")));
    }
    let psk = key.psk((&config.host, &config.subsystem), version, derivation);
    config.tls = Some(Arc::new(psk.ok_or_else(|| wrong(LONG_NAMES.into()))?));
    Ok(())
}

/// Reads the hosts whose connections to a subsystem are encrypted.
///
/// # Errors
/// The program has no TLS, or the file cannot be read, or a line of it is wrong.
pub fn read_tls_hosts(object: &str, path: &str, subsystem: &Nqn) -> Result<TlsHosts, SpecError> {
    check_tls(object)?;
    let mut hosts = TlsHosts::default();
    read_hosts(object, path, "write NQN KEY", |host, words| {
        let (key, derivation, _) = take_key(words)?;
        if hosts.add((host, subsystem), &key, derivation) { Ok(()) } else { Err(LONG_NAMES.into()) }
    })?;
    Ok(hosts)
}

fn check_tls(object: &str) -> Result<(), SpecError> {
    if TlsChannel::IS_BUILT {
        return Ok(());
    }
    let cure = "build it with --features tls, which needs OpenSSL and its headers (Debian: libssl-dev)";
    Err(SpecError::new(object, "this program was built without TLS", cure))
}

/// Takes a key and its options.
fn take_key(words: &mut SplitWhitespace<'_>) -> Result<(TlsKey, TlsDerivation, TlsIdentityVersion), String> {
    let key = TlsKey::parse(words.next().ok_or("the key is missing")?).map_err(|why| why.to_string())?;
    if key.suite_hash() != AuthHash::Sha256 {
        return Err("a key of 48 bytes needs TLS_AES_256_GCM_SHA384, which is not supported".into());
    }
    let (mut derivation, mut version) = (TlsDerivation::default(), TlsIdentityVersion::default());
    loop {
        let rest = words.clone();
        match words.next() {
            Some("compat") => derivation = TlsDerivation::Compat,
            Some("v1") => version = TlsIdentityVersion::V1,
            _ => {
                *words = rest;
                return Ok((key, derivation, version));
            }
        }
    }
}

/// Reads a file with a line for each host: its NQN, and words that `take` takes.
fn read_hosts(
    object: &str,
    path: &str,
    form: &str,
    mut take: impl FnMut(&Nqn, &mut SplitWhitespace<'_>) -> Result<(), String>,
) -> Result<(), SpecError> {
    let text = read(object, path)?;
    let mut known = HashSet::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |cause: &str| SpecError::new(object, format!("{path}, line {}: {cause}", number + 1), form);
        let mut words = line.split_whitespace();
        let host = words.next().and_then(Nqn::new).ok_or_else(|| wrong("it does not begin with an NQN"))?;
        take(&host, &mut words).map_err(|why| wrong(&why))?;
        if words.next().is_some() {
            return Err(wrong("it has too many words"));
        }
        if !known.insert(host) {
            return Err(wrong("the host has a line already"));
        }
    }
    if known.is_empty() {
        return Err(SpecError::new(object, format!("{path}: it names no host"), form));
    }
    Ok(())
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
            (format!("nqn.a {good} {good} {good}"), 0o600, "too many words"),
            (format!("nqn.a {good}\nnqn.a {good}"), 0o600, "line 2: the host has a line already"),
        ] {
            let (_folder, path) = file(&text, mode);
            let error = read_host_secrets("export", &path).unwrap_err().to_string();
            assert!(error.contains(cause) && !error.contains("AQEB"), "{error}");
        }
        let error = read_host_secrets("export", "/nowhere/secrets").unwrap_err().to_string();
        assert!(error.contains("/nowhere/secrets"), "{error}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn each_wrong_file_of_keys_is_told_why_and_without_its_key() {
        let subsystem = Nqn::new("nqn.s").unwrap();
        let good = TlsKey::new(vec![1; 32], Some(AuthHash::Sha256)).unwrap().reveal();
        let long = TlsKey::new(vec![1; 48], None).unwrap().reveal();
        let (_folder, path) = file(&format!("# hosts\nnqn.a {good}\n nqn.b {good} compat\n"), 0o600);
        let hosts = read_tls_hosts("export", &path, &subsystem).unwrap();
        assert!(["nqn.a", "nqn.b"].iter().all(|name| hosts.contains(&Nqn::new(name).unwrap())));
        let name = "a".repeat(219);
        for (text, mode, cause) in [
            (format!("nqn.a {good}"), 0o604, "all users can read"),
            (String::new(), 0o600, "names no host"),
            ("nqn.a".to_owned(), 0o600, "line 1: the key is missing"),
            (format!("nqn.a {long}"), 0o600, "line 1: a key of 48 bytes needs TLS_AES_256_GCM_SHA384"),
            (format!("nqn.a {good} combat"), 0o600, "line 1: it has too many words"),
            (format!("nqn.a {good}\nnqn.a {good}"), 0o600, "line 2: the host has a line already"),
            (format!("nqn.{name} {good}"), 0o600, "line 1: the names of host and subsystem are too long"),
        ] {
            let (_folder, path) = file(&text, mode);
            let error = read_tls_hosts("export", &path, &subsystem).unwrap_err().to_string();
            assert!(error.contains(cause) && !error.contains("AQEB"), "{error}");
        }
    }
}
