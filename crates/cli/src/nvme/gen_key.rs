//! `gen-dhchap-key`: a secret for the authentication of a host or a target; `gen-tls-key`: a key for its connections.

use blkyard_nvme::auth::{AuthHash, DhchapSecret};
use blkyard_nvme::tls::TlsKey;
use blkyard_sys::random_bytes;

use super::NvmeCommandError;

/// Arguments of `gen-dhchap-key`.
#[derive(Debug, clap::Args)]
pub struct GenKeyArgs {
    /// Hash by which the secret is bound to the name of its owner: 0 none, 1 SHA-256, 2 SHA-384, 3 SHA-512.
    #[arg(short = 'm', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    hmac: u8,
    /// Bytes of the key: 32, 48 or 64. Default: those of the hash, or 32.
    #[arg(short = 'l', long)]
    key_length: Option<usize>,
}

/// Arguments of `gen-tls-key`.
#[derive(Debug, clap::Args)]
pub struct GenTlsKeyArgs {
    /// Hash by which the key is bound to the name of the host: 0 none, 1 SHA-256.
    #[arg(short = 'm', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    hmac: u8,
}

/// Prints a new key of 32 bytes, which goes with TLS_AES_128_GCM_SHA256.
pub(super) fn run_tls(args: &GenTlsKeyArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let random: [u8; 32] = random()?;
    let key = TlsKey::new(random.to_vec(), AuthHash::from_id(args.hmac));
    let Ok(key) = key else { unreachable!("keys may have 32 bytes") };
    Ok(format!("{}\n", key.reveal()).into_bytes())
}

fn random<const N: usize>() -> Result<[u8; N], NvmeCommandError> {
    random_bytes().map_err(|source| NvmeCommandError::File { object: "random numbers".into(), source })
}

/// Prints a new secret.
pub(super) fn run(args: &GenKeyArgs) -> Result<Vec<u8>, NvmeCommandError> {
    let hash = AuthHash::from_id(args.hmac);
    let len = args.key_length.unwrap_or_else(|| hash.map_or(32, AuthHash::bytes));
    let random: [u8; 64] = random()?;
    let object = format!("--key-length {len}");
    let key = random.get(..len).unwrap_or_default().to_vec();
    let secret = DhchapSecret::new(key, hash)
        .map_err(|_| NvmeCommandError::refused(object, "keys have no such length", "use 32, 48 or 64"))?;
    Ok(format!("{}\n", secret.reveal()).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_for_tls_can_be_parsed() {
        for hmac in [0, 1] {
            let text = String::from_utf8(run_tls(&GenTlsKeyArgs { hmac }).unwrap()).unwrap();
            assert!(text.starts_with(&format!("NVMeTLSkey-1:{hmac:02}:")) && TlsKey::parse(&text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_secret_has_the_length_that_was_asked_for() {
        for (hmac, key_length, chars) in [(0, None, 59), (2, None, 83), (3, Some(32), 59), (1, Some(64), 103)] {
            let text = String::from_utf8(run(&GenKeyArgs { hmac, key_length }).unwrap()).unwrap();
            assert_eq!((text.len(), DhchapSecret::parse(&text).is_ok()), (chars + 1, true), "{text}");
        }
        let error = run(&GenKeyArgs { hmac: 0, key_length: Some(33) }).unwrap_err();
        assert_eq!(error.to_string(), "--key-length 33: keys have no such length; use 32, 48 or 64");
    }
}
