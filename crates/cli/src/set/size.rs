//! Decides whether a device may have another size, and which steps it needs. Changes nothing.
//!
//! A size is the served size. A shorter file is grown to it, as users expect; a longer one is never truncated, since a
//! typing error would cost data: its rest is kept and not served. A disk of another program has the size that it has
//! there, which is followed: another one would be undone at once.

use blkyard::Backing;
use blkyard::spec::{SpecError, parse_size, show_size};

/// Steps of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The size to serve.
    pub bytes: u64,
    /// The file has to be grown to it first.
    pub grows_file: bool,
}

/// A device whose size is to change.
#[derive(Debug, Clone, Copy)]
pub struct Resize<'a> {
    /// Its name, for messages.
    pub object: &'a str,
    /// The size it is served with.
    pub now_bytes: u64,
    /// Sizes are multiples of this.
    pub block_bytes: u32,
    /// Its backing.
    pub backing: Backing,
    /// Whether a front-end has it attached.
    pub in_use: bool,
    /// They may lose the end of it.
    pub force: bool,
}

impl Resize<'_> {
    /// Decides about `size=REQUEST`: a size, or `probe` for the file's present length.
    ///
    /// # Errors
    /// Names device, cause and cure.
    pub fn decide(&self, request: &str) -> Result<Decision, SpecError> {
        let no = |cause: String, cure: &str| Err(SpecError::new(self.object, cause, cure));
        let bytes = match (request, self.backing) {
            ("probe", Backing::File { bytes, .. } | Backing::Remote { bytes, .. }) => bytes,
            ("probe", _) => return no("the device has no file to probe".into(), "give a size, such as size=2G"),
            _ => match parse_size(request) {
                Some(bytes) => bytes,
                None => return no(format!("size={request} is invalid"), "give a size, such as 2G, or probe"),
            },
        };
        if bytes == 0 || !bytes.is_multiple_of(u64::from(self.block_bytes)) {
            let cause = format!("{bytes} bytes are not a multiple of its blocks of {}", self.block_bytes);
            return no(cause, "choose a multiple of the block; a file can be rounded up with truncate -s %4096");
        }
        let grows_file = match self.backing {
            Backing::File { bytes: file_bytes, fixed } if bytes > file_bytes => match fixed {
                Some((cause, cure)) => return no(format!("it has {} and {cause}", show_size(file_bytes)), cure),
                None => true,
            },
            Backing::Remote { bytes: there, fixed: (cause, cure) } if bytes != there => {
                return no(format!("it has {} and {cause}", show_size(there)), cure);
            }
            Backing::Memory(made_bytes) if bytes > made_bytes => {
                let cause = format!("its memory of {} was allocated at start", show_size(made_bytes));
                return no(cause, "start the daemon with a larger one, or serve a file");
            }
            _ => false,
        };
        if bytes < self.now_bytes && self.in_use && !self.force {
            let cause =
                format!("it is attached and would shrink from {} to {}", show_size(self.now_bytes), show_size(bytes));
            return no(
                cause,
                "shrink its file systems in the guest first, detach it, or add force=on if the data at its end may be lost",
            );
        }
        Ok(Decision { bytes, grows_file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Resize<'static> = Resize {
        object: "device:0",
        now_bytes: 1 << 20,
        block_bytes: 4096,
        backing: Backing::File { bytes: 1 << 20, fixed: None },
        in_use: true,
        force: false,
    };

    fn longer(bytes: u64) -> Backing {
        Backing::File { bytes, fixed: Some(("is a block device", "grow it and then size=probe")) }
    }

    #[test]
    fn growing_grows_the_file_where_it_is_too_short() {
        assert_eq!(FILE.decide("2M"), Ok(Decision { bytes: 2 << 20, grows_file: true }));
        let long = Resize { backing: longer(2 << 20), ..FILE };
        assert_eq!(long.decide("2M"), Ok(Decision { bytes: 2 << 20, grows_file: false }));
        assert_eq!(long.decide("probe"), Ok(Decision { bytes: 2 << 20, grows_file: false }));
        assert_eq!(FILE.decide("probe"), Ok(Decision { bytes: 1 << 20, grows_file: false }));
        let null = Resize { backing: Backing::Nothing, ..FILE };
        assert_eq!(null.decide("8T"), Ok(Decision { bytes: 8 << 40, grows_file: false }));
    }

    #[test]
    fn what_cannot_be_names_the_device_the_cause_and_the_cure() {
        let memory = Resize { backing: Backing::Memory(1 << 20), ..FILE };
        for (resize, request, words) in [
            (FILE, "lots", ["size=lots", "2G"]),
            (FILE, "0", ["0 bytes", "multiple"]),
            (FILE, "1000", ["blocks of 4096", "multiple"]),
            (memory, "2M", ["1 MiB was allocated at start", "larger"]),
            (memory, "probe", ["no file", "size=2G"]),
            (Resize { backing: longer(1 << 20), ..FILE }, "2M", ["1 MiB and is a block device", "size=probe"]),
            (FILE, "512k", ["from 1 MiB to 512 KiB", "force=on"]),
        ] {
            let error = resize.decide(request).unwrap_err().to_string();
            assert!(error.starts_with("device:0: ") && words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn a_remote_disk_has_the_size_that_it_has_there() {
        let fixed = ("is served by another process", "resize it there");
        let remote = Resize { backing: Backing::Remote { bytes: 2 << 20, fixed }, ..FILE };
        for request in ["1M", "512k", "4M"] {
            let error = Resize { force: true, ..remote }.decide(request).unwrap_err().to_string();
            assert_eq!(error, "device:0: it has 2 MiB and is served by another process; resize it there");
        }
        for request in ["2M", "probe"] {
            assert_eq!(remote.decide(request), Ok(Decision { bytes: 2 << 20, grows_file: false }));
        }
    }

    #[test]
    fn shrinking_takes_force_while_somebody_has_it() {
        let smaller = Ok(Decision { bytes: 512 << 10, grows_file: false });
        assert!(FILE.decide("512k").is_err());
        assert_eq!(Resize { force: true, ..FILE }.decide("512k"), smaller);
        assert_eq!(Resize { in_use: false, ..FILE }.decide("512k"), smaller);
        // Another process has truncated the file already: the lost part cannot be kept.
        let cut = Resize { backing: Backing::File { bytes: 512 << 10, fixed: None }, ..FILE };
        assert!(cut.decide("probe").is_err());
        assert_eq!(Resize { force: true, ..cut }.decide("probe"), smaller);
    }
}
