//! Rust source taken apart into code and comments, line by line.
//!
//! Knows just enough of the language not to mistake a string for code or a comment: both views have
//! the lines of the original, with blanks where the other view has text and where a literal was.
//! Does not parse.

/// The two views of a file.
pub struct Source {
    pub code: Vec<String>,
    pub comments: Vec<String>,
}

impl Source {
    pub fn split(text: &str) -> Self {
        let mut splitter = Splitter { rest: text, code: String::new(), comments: String::new() };
        splitter.run();
        let lines = |view: &str| view.lines().map(str::to_owned).collect();
        Self { code: lines(&splitter.code), comments: lines(&splitter.comments) }
    }
}

/// Where a stretch of text belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Code,
    Comment,
    Literal,
}

struct Splitter<'a> {
    rest: &'a str,
    code: String,
    comments: String,
}

impl Splitter<'_> {
    fn run(&mut self) {
        while let Some(first) = self.rest.chars().next() {
            if self.rest.starts_with("//") {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.take(end, TextKind::Comment);
            } else if self.rest.starts_with("/*") {
                self.take(block_comment_length(self.rest), TextKind::Comment);
            } else if let Some(length) = literal_length(self.rest) {
                self.take(length, TextKind::Literal);
            } else if is_word(first) {
                // A whole word at a time, so that an `r` at its end starts no raw string.
                let end = self.rest.find(|next| !is_word(next)).unwrap_or(self.rest.len());
                self.take(end, TextKind::Code);
            } else {
                self.take(first.len_utf8(), TextKind::Code);
            }
        }
    }

    /// Moves the next `length` bytes into a view, and as much blank space into the other.
    fn take(&mut self, length: usize, view: TextKind) {
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        for character in taken.chars() {
            let blank = if character == '\n' { '\n' } else { ' ' };
            self.code.push(if view == TextKind::Code { character } else { blank });
            self.comments.push(if view == TextKind::Comment { character } else { blank });
        }
    }
}

pub fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Block comments nest.
fn block_comment_length(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// The length of the string or character literal that `text` starts with.
fn literal_length(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        let rest = text.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.starts_with(['"', '\'']) || (prefix.ends_with('r') && raw_hashes(rest).is_some()))
    })?;
    let rest = &text[prefix.len()..];
    let length = if prefix.ends_with('r') {
        let hashes = raw_hashes(rest)?;
        let close = format!("\"{}", "#".repeat(hashes));
        let body = &rest[hashes + 1..];
        hashes + 1 + body.find(&close).map_or(body.len(), |at| at + close.len())
    } else if rest.starts_with('"') {
        quoted_length(rest, '"')
    } else {
        // A lifetime or a label has no second quote where a character would have it.
        let mut characters = rest.char_indices().skip(1);
        match characters.next() {
            Some((_, '\\')) => quoted_length(rest, '\''),
            Some(_) if characters.next().is_some_and(|(_, next)| next == '\'') => quoted_length(rest, '\''),
            _ => return None,
        }
    };
    Some(prefix.len() + length)
}

/// The number of `#` before the quote of a raw string.
fn raw_hashes(text: &str) -> Option<usize> {
    let hashes = text.bytes().take_while(|&byte| byte == b'#').count();
    text[hashes..].starts_with('"').then_some(hashes)
}

/// The length of a literal between two quotes, where a backslash escapes.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + character.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::split(text).code.join("\n")
    }

    fn words(text: &str) -> Vec<String> {
        code(text).split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        for text in [
            "// x",
            "/* x */",
            "/* /* x */ x */",
            "\"x\"",
            "\"\\\"x\"",
            "\"\\\\\" \"x\"",
            "r\"x\"",
            "r#\"x \" x\"#",
            "br##\"x \"# x\"##",
            "b\"x\"",
            "c\"x\"",
            "b'x'",
            "'x'",
            "'\\'' \"x\"",
            "\"a\nx\nb\"",
            "\"// \" /* x */",
        ] {
            assert!(!code(text).contains('x'), "{text}: {}", code(text));
        }
    }

    #[test]
    fn code_is_kept_where_it_was() {
        assert_eq!(code("ab \"s\" cd // e\nf"), "ab     cd     \nf");
        assert_eq!(words("fn f<'a>(x: &'a str) -> &'static str { x }").len(), 10);
        assert_eq!(words("'outer: loop { y() }"), ["'outer:", "loop", "{", "y()", "}"]);
        assert_eq!(words("var\"s\" y"), ["var", "y"]);
        assert_eq!(words("r#type x"), ["r#type", "x"]);
        assert_eq!(words("'é' x"), ["x"]);
    }

    #[test]
    fn comments_are_kept_apart() {
        let source = Source::split("a // one\n\"// no\" /* two\nthree */ b");
        assert_eq!(source.comments[0].trim(), "// one");
        assert_eq!(source.comments[1].trim(), "/* two");
        assert_eq!(source.comments[2].trim(), "three */");
        assert_eq!(source.code[2].trim(), "b");
    }

    #[test]
    fn what_never_ends_ends_with_the_file() {
        for text in ["\"x", "/* x", "r#\"x", "'", "'\\", "b'"] {
            let _ = Source::split(text);
        }
    }
}
