//! What the programs that run worlds are told: `SEED|FIRST..END [--seconds N] [key=value..]`.

use std::ops::Range;
use std::time::Duration;

const USAGE: &str = "use SEED, or FIRST..END for several, then [--seconds N] and options as key=value";

/// Arguments of a program that runs worlds.
#[derive(Debug, PartialEq, Eq)]
pub struct SimArguments {
    /// One world each.
    pub seeds: Range<u64>,
    /// No world begins after that, except the first.
    pub limit: Duration,
    /// Options of each world, as `key=value`.
    pub options: Vec<String>,
}

impl SimArguments {
    /// Reads them, without the name of the program.
    ///
    /// # Errors
    /// What is wrong, and what is right.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<SimArguments, String> {
        let (mut seeds, mut limit, mut options) = (None, Duration::MAX, Vec::new());
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            if argument == "--seconds" {
                let seconds = arguments.next().and_then(|seconds| seconds.parse().ok());
                limit = Duration::from_secs(seconds.ok_or("--seconds wants a number")?);
            } else if argument.contains('=') {
                options.push(argument);
            } else if seeds.is_none() {
                let range = match argument.split_once("..") {
                    Some((first, end)) => first.parse().ok().zip(end.parse().ok()),
                    None => argument.parse::<u64>().ok().and_then(|seed| Some((seed, seed.checked_add(1)?))),
                };
                let (first, end) =
                    range.filter(|(first, end)| first < end).ok_or_else(|| format!("'{argument}': {USAGE}"))?;
                seeds = Some(first..end);
            } else {
                return Err(format!("'{argument}': {USAGE}"));
            }
        }
        Ok(SimArguments { seeds: seeds.ok_or(USAGE)?, limit, options })
    }

    /// Whether they name one world.
    pub fn is_of_one(&self) -> bool {
        self.seeds.end - self.seeds.start == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SimArguments, String> {
        SimArguments::parse(text.split_whitespace().map(String::from))
    }

    #[test]
    fn seeds_time_and_options_are_read_in_any_order() {
        let all = parse("lanes=2 5..8 --seconds 0 depth=4").unwrap();
        assert_eq!((&all.seeds, all.limit, all.is_of_one()), (&(5..8), Duration::ZERO, false));
        assert_eq!(all.options, ["lanes=2", "depth=4"]);
        let one = parse("7").unwrap();
        assert_eq!((&one.seeds, one.limit, one.is_of_one()), (&(7..8), Duration::MAX, true));
    }

    #[test]
    fn what_is_no_argument_is_named() {
        for (text, named) in [
            ("", "use SEED"),
            ("8..5", "'8..5'"),
            ("1 2", "'2'"),
            ("x", "'x'"),
            ("1 --seconds", "--seconds wants a number"),
            ("18446744073709551615", "'18446744073709551615'"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
