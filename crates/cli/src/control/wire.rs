//! The protocol of a control socket: one JSON object a line, a request, then its answer.
//!
//! ```text
//! {"blkyard":1,"do":"inspect"}                                       {"blkyard":1,"ok":{"daemon":{..},..}}
//! {"blkyard":1,"do":"set","what":"device:0","values":{"size":"2G"}}  {"blkyard":1,"ok":["device:0: .."]}
//! {"blkyard":7}                                                      {"blkyard":1,"error":".."}
//! ```
//!
//! Both sides bound their input. Knows no sockets: bytes in, lines out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the language, in every line. It is incremented by every incompatible change; fields that are added do
/// not.
pub const VERSION: u32 = 1;

/// Bytes of the longest request, its line end included: several paths of the greatest length.
pub const REQUEST_BYTES_MAX: usize = 16 << 10;

/// Bytes of the longest answer: 256 lanes and 10,000 queues with full histograms stay well below.
pub const ANSWER_BYTES_MAX: usize = 256 << 20;

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum ControlRequest {
    /// The whole tree that `inspect` shows.
    Inspect,
    /// Change values of a part.
    Set {
        /// Which one: see [`Target`](super::Target).
        what: String,
        /// New values.
        values: BTreeMap<String, String>,
    },
    /// Hand everything over.
    Takeover {
        /// Version of the handover format.
        version: u32,
    },
    /// The new daemon has set everything up. Valid during a handover only.
    Taken,
}

impl ControlRequest {
    /// Whether it changes anything: then no other such request is served meanwhile.
    pub(super) fn changes(&self) -> bool {
        !matches!(self, ControlRequest::Inspect)
    }
}

#[derive(Deserialize)]
struct Versioned {
    blkyard: u32,
}

/// The line of a request.
pub fn request_line(request: &ControlRequest) -> String {
    line(&Tagged { blkyard: VERSION, body: request })
}

/// Parses a request.
///
/// # Errors
/// The fault, for the client.
pub fn parse_request(line: &[u8]) -> Result<ControlRequest, String> {
    let not_ours = |error| {
        format!(
            "the request is not of blkyard's protocol: {error}; write {}",
            request_line(&ControlRequest::Inspect).trim_end()
        )
    };
    let Versioned { blkyard } = serde_json::from_slice(line).map_err(not_ours)?;
    if blkyard != VERSION {
        return Err(format!(
            "the request has protocol version {blkyard} and this daemon has {VERSION}; use the blkyard program that the daemon was started from"
        ));
    }
    serde_json::from_slice(line).map_err(|error| format!("the request is invalid: {error}"))
}

/// The line of an answer: a result, or an error.
pub fn answer_line(outcome: &Result<Value, String>) -> String {
    let (key, value) = match outcome {
        Ok(value) => ("ok", value.clone()),
        Err(error) => ("error", Value::from(error.as_str())),
    };
    line(&Tagged { blkyard: VERSION, body: BTreeMap::from([(key, value)]) })
}

/// Parses an answer.
///
/// # Errors
/// The daemon's error, or the fault of its answer.
pub fn parse_answer(line: &[u8]) -> Result<Value, String> {
    let odd = || "the answer is not from a blkyard daemon; check which program listens there".to_owned();
    let mut answer: BTreeMap<String, Value> = serde_json::from_slice(line).map_err(|_| odd())?;
    match (answer.get("blkyard").and_then(Value::as_u64), answer.remove("ok"), answer.remove("error")) {
        (Some(_), Some(value), None) => Ok(value),
        (Some(_), None, Some(Value::String(error))) => Err(error),
        _ => Err(odd()),
    }
}

#[derive(Serialize)]
struct Tagged<T> {
    blkyard: u32,
    #[serde(flatten)]
    body: T,
}

fn line(value: &impl Serialize) -> String {
    let mut line = serde_json::to_string(value).unwrap_or_else(|error| unreachable!("plain data is JSON: {error}"));
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_come_back_as_they_went() {
        let values = BTreeMap::from([("size".to_owned(), "2G".to_owned())]);
        for (request, text) in [
            (ControlRequest::Inspect, "{\"blkyard\":1,\"do\":\"inspect\"}\n"),
            (
                ControlRequest::Set { what: "device:0".into(), values },
                "{\"blkyard\":1,\"do\":\"set\",\"what\":\"device:0\",\"values\":{\"size\":\"2G\"}}\n",
            ),
        ] {
            assert_eq!(request_line(&request), text);
            assert_eq!(parse_request(text.as_bytes()), Ok(request));
        }
        for outcome in [Ok(serde_json::json!({"a": [1, 2]})), Err("why\nnot".to_owned())] {
            let line = answer_line(&outcome);
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert_eq!(parse_answer(line.as_bytes()), outcome);
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_the_reason() {
        for (line, words) in [
            ("", ["not of blkyard's protocol", "\"do\":\"inspect\""]),
            ("inspect", ["not of blkyard's protocol", "\"do\":\"inspect\""]),
            ("{\"do\":\"inspect\"}", ["missing field `blkyard`", "write"]),
            ("{\"blkyard\":2,\"do\":\"inspect\"}", ["version 2", "this daemon has 1"]),
            ("{\"blkyard\":1,\"do\":\"dance\"}", ["dance", "inspect"]),
            ("{\"blkyard\":1}", ["is invalid", "do"]),
        ] {
            let error = parse_request(line.as_bytes()).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        }
        let deep = [b"{\"blkyard\":1,\"x\":".as_slice(), &b"[".repeat(10_000)].concat();
        assert!(parse_request(&deep).is_err());
        for line in
            ["", "HTTP/1.1 400 Bad Request", "{}", "{\"blkyard\":1}", "{\"ok\":1}", "{\"blkyard\":1,\"error\":3}"]
        {
            assert!(parse_answer(line.as_bytes()).unwrap_err().contains("not from a blkyard daemon"), "{line}");
        }
    }
}
