//! JSON with keys in a given order and integers of up to 128 bits, as log pages have them.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JsonNode {
    /// An integer.
    Integer(u128),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<JsonNode>),
    /// An object, with its members in their order.
    Object(Vec<(String, JsonNode)>),
}

impl JsonNode {
    /// An object.
    pub fn object(members: impl IntoIterator<Item = (&'static str, JsonNode)>) -> JsonNode {
        JsonNode::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// As a document for people and programs.
    pub fn document(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

impl From<u128> for JsonNode {
    fn from(number: u128) -> JsonNode {
        JsonNode::Integer(number)
    }
}

impl From<u64> for JsonNode {
    fn from(number: u64) -> JsonNode {
        JsonNode::Integer(number.into())
    }
}

impl From<u32> for JsonNode {
    fn from(number: u32) -> JsonNode {
        JsonNode::Integer(number.into())
    }
}

impl From<u16> for JsonNode {
    fn from(number: u16) -> JsonNode {
        JsonNode::Integer(number.into())
    }
}

impl From<u8> for JsonNode {
    fn from(number: u8) -> JsonNode {
        JsonNode::Integer(number.into())
    }
}

impl From<bool> for JsonNode {
    fn from(flag: bool) -> JsonNode {
        JsonNode::Integer(flag.into())
    }
}

impl From<String> for JsonNode {
    fn from(text: String) -> JsonNode {
        JsonNode::Text(text)
    }
}

impl From<&str> for JsonNode {
    fn from(text: &str) -> JsonNode {
        JsonNode::Text(text.to_owned())
    }
}

impl Serialize for JsonNode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            JsonNode::Integer(number) => match u64::try_from(*number) {
                Ok(number) => serializer.serialize_u64(number),
                Err(_) => serializer.serialize_u128(*number),
            },
            JsonNode::Text(text) => serializer.serialize_str(text),
            JsonNode::List(values) => values.serialize(serializer),
            JsonNode::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (key, value) in members {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_integers_their_digits() {
        let node = JsonNode::object([
            ("z", JsonNode::from(u128::MAX)),
            ("a", JsonNode::List(vec!["\u{1b}[31m".into(), 1_u8.into()])),
        ]);
        let text = node.document();
        assert!(text.contains("\"z\": 340282366920938463463374607431768211455"), "{text}");
        assert!(text.find("\"z\"") < text.find("\"a\"") && text.contains("\\u001b[31m"), "{text}");
    }
}
