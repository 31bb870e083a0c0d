//! Names of devices and exports: `scheme:body?key=value&key=value`.
//!
//! Devices and exports have the same names on the command line, in a configuration file and in programs. A [`Spec`] is
//! the parsed name; its user takes the known options and refuses the rest, with the list of known ones.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// A name that could not be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {cause}; {cure}")]
pub struct SpecError {
    /// The name, as it was given.
    pub object: String,
    /// Cause.
    pub cause: String,
    /// Cure.
    pub cure: String,
}

impl SpecError {
    /// An error about the thing named `object`.
    pub fn new(object: impl Display, cause: impl Display, cure: impl Display) -> SpecError {
        SpecError { object: object.to_string(), cause: cause.to_string(), cure: cure.to_string() }
    }
}

/// Parser of a command-line flag that is a number from `min` to `max`: its error names both.
pub fn number(min: u64, max: u64) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (min..=max).contains(number));
        number.ok_or_else(|| format!("give a number from {min} to {max}"))
    }
}

/// A name taken apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// As it was given.
    pub name: String,
    /// Scheme, before the colon. Empty for a bare path.
    pub scheme: String,
    /// Which one: a path, a size.
    pub body: String,
    options: BTreeMap<String, String>,
    #[serde(skip)]
    known: Vec<&'static str>,
}

impl Spec {
    /// Parses a name. The part before the first colon is the scheme if it is a word; a path may be bare.
    ///
    /// # Errors
    /// The name is empty, or an option has no value or occurs twice.
    pub fn parse(name: &str) -> Result<Spec, SpecError> {
        let (thing, query) = name.split_once('?').unwrap_or((name, ""));
        let is_scheme =
            |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        let (scheme, body) = match thing.split_once(':') {
            Some((scheme, body)) if is_scheme(scheme) => (scheme, body),
            _ => ("", thing),
        };
        if body.is_empty() {
            return Err(SpecError::new(format!("'{name}'"), "the name is empty", "write it as scheme:name?key=value"));
        }
        let mut spec = Spec {
            name: name.into(),
            scheme: scheme.into(),
            body: body.into(),
            options: BTreeMap::new(),
            known: Vec::new(),
        };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (key, value) = option.split_once('=').ok_or_else(|| {
                SpecError::new(name, format!("option '{option}' has no value"), format!("write {option}=VALUE"))
            })?;
            spec.set(key, value)?;
        }
        Ok(spec)
    }

    /// Its name without options.
    pub fn address(&self) -> String {
        if self.scheme.is_empty() { self.body.clone() } else { format!("{}:{}", self.scheme, self.body) }
    }

    /// Options of a thing that is named otherwise.
    pub fn of_options(name: &str, options: BTreeMap<String, String>) -> Spec {
        Spec { name: name.into(), scheme: String::new(), body: String::new(), options, known: Vec::new() }
    }

    /// Adds an option that is given separately from the name, as in a configuration file.
    ///
    /// # Errors
    /// It exists already.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        match self.options.insert(key.into(), value.into()) {
            None => Ok(()),
            Some(_) => Err(SpecError::new(&self.name, format!("option '{key}' is given twice"), "keep one of them")),
        }
    }

    /// Replaces an option, or removes it.
    pub fn put(&mut self, key: &str, value: Option<impl Display>) {
        match value {
            Some(value) => self.options.insert(key.into(), value.to_string()),
            None => self.options.remove(key),
        };
    }

    /// Takes an option, if present.
    pub fn take(&mut self, key: &'static str) -> Option<String> {
        self.known.push(key);
        self.options.remove(key)
    }

    /// Takes an option through a parser; `wanted` describes its values.
    ///
    /// # Errors
    /// The parser refuses the value.
    pub fn take_with<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, SpecError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let wrong = || SpecError::new(&self.name, format!("{key}={value} is invalid"), format!("give {wanted}"));
        parse(&value).ok_or_else(wrong).map(Some)
    }

    /// Takes a number within bounds.
    ///
    /// # Errors
    /// It is no number, or out of bounds.
    pub fn take_number(&mut self, key: &'static str, min: u64, max: u64) -> Result<Option<u64>, SpecError> {
        let wanted = format!("a number from {min} to {max}");
        self.take_with(key, &wanted, |value| value.parse().ok().filter(|n| (min..=max).contains(n)))
    }

    /// Takes a switch: on or off.
    ///
    /// # Errors
    /// It is neither.
    pub fn take_switch(&mut self, key: &'static str) -> Result<Option<bool>, SpecError> {
        self.take_with(key, "on or off", |value| match value {
            "on" | "true" | "yes" | "1" => Some(true),
            "off" | "false" | "no" | "0" => Some(false),
            _ => None,
        })
    }

    /// Takes all other options.
    pub fn take_rest(&mut self) -> BTreeMap<String, String> {
        std::mem::take(&mut self.options)
    }

    /// Checks that all options have been taken.
    ///
    /// # Errors
    /// Names an option that was not taken, and the known ones.
    pub fn finish(self) -> Result<(), SpecError> {
        let Some(key) = self.options.keys().next() else { return Ok(()) };
        let known = if self.known.is_empty() { "none".into() } else { self.known.join(", ") };
        Err(SpecError::new(self.name, format!("unknown key '{key}'"), format!("the known keys are: {known}")))
    }
}

/// Parses a size: a number of bytes, or of KiB, MiB, GiB, TiB with the letters k, m, g, t (upper or lower case; `KiB`
/// and the like are accepted, too).
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// A size as a person would write it.
pub fn show_size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let exact = (1..units.len()).rev().find(|power| bytes > 0 && bytes.is_multiple_of(1 << (10 * power)));
    match exact {
        Some(power) => format!("{} {}", bytes >> (10 * power), units[power]),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        for (name, scheme, body) in [
            ("file:/a/b.img", "file", "/a/b.img"),
            ("/a/b:c.img", "", "/a/b:c.img"),
            ("disk.img?readonly=on", "", "disk.img"),
            ("ram:1G", "ram", "1G"),
            ("vhost-user-blk:./s.sock?queues=4&mode=0660", "vhost-user-blk", "./s.sock"),
            ("C:x", "", "C:x"),
        ] {
            let spec = Spec::parse(name).unwrap();
            assert_eq!((spec.scheme.as_str(), spec.body.as_str()), (scheme, body), "{name}");
        }
        assert!(Spec::parse("").is_err() && Spec::parse("ram:").is_err() && Spec::parse("ram:1G?x").is_err());
        assert!(Spec::parse("ram:1G?a=1&a=2").is_err());
    }

    #[test]
    fn what_nobody_took_is_an_error_that_lists_what_is_known() {
        let mut spec = Spec::parse("ram:1G?queus=4&readonly=on").unwrap();
        assert_eq!(spec.take_number("queues", 1, 64), Ok(None));
        assert_eq!(spec.take_switch("readonly"), Ok(Some(true)));
        let error = spec.finish().unwrap_err().to_string();
        assert_eq!(error, "ram:1G?queus=4&readonly=on: unknown key 'queus'; the known keys are: queues, readonly");
    }

    #[test]
    fn values_out_of_bounds_are_refused() {
        let mut spec = Spec::parse("ram:1G?queues=65&readonly=maybe").unwrap();
        let error = spec.take_number("queues", 1, 64).unwrap_err().to_string();
        assert!(error.contains("queues=65") && error.contains("from 1 to 64"), "{error}");
        assert!(spec.take_switch("readonly").is_err());
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("512", 512), ("4k", 4096), ("1M", 1 << 20), ("1GiB", 1 << 30), ("2t", 2 << 40)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "k", "1x", "-1", "1.5G", "99999999999999999999", "99999999999T"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
        assert_eq!([show_size(1 << 30), show_size(1536), show_size(3)], ["1 GiB", "1536 bytes", "3 bytes"]);
    }
}
