//! Redis's glob patterns: `*`, `?`, `[abc]`, `[^a-z]`, `\` escapes. A pattern is parsed once and
//! compared with many texts.

/// A parsed pattern.
#[derive(Clone, Debug)]
pub struct Pattern {
    tokens: Vec<Token>,
    classes: Vec<Class>,
    /// Bytes of the shortest text that may match.
    least: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    /// Any number of bytes. Never two in a row.
    Star,
    Any,
    Byte(u8),
    /// A byte of the class at this place in [`Pattern::classes`].
    Class(u32),
}

/// A set of bytes, a bit for each.
#[derive(Clone, Copy, Debug)]
struct Class([u64; 4]);

impl Class {
    fn add(&mut self, low: u8, high: u8) {
        for (at, word) in (0u32..).zip(&mut self.0) {
            let first = at * 64;
            let (from, to) = (u32::from(low).max(first), u32::from(high).min(first + 63));
            if from <= to {
                *word |= u64::MAX >> (63 - (to - from)) << (from - first);
            }
        }
    }

    fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }
}

impl Pattern {
    /// Parses a pattern of less than 4 GiB; every one means something. Where case does not matter,
    /// pattern and texts are to be in lower case.
    pub fn new(pattern: &[u8]) -> Pattern {
        let (mut tokens, mut classes) = (Vec::new(), Vec::new());
        let (mut least, mut p) = (0, 0);
        while let Some(byte) = pattern.get(p) {
            p += 1;
            let token = match byte {
                b'*' => {
                    if tokens.last() != Some(&Token::Star) {
                        tokens.push(Token::Star);
                    }
                    continue;
                }
                b'?' => Token::Any,
                b'\\' if p < pattern.len() => {
                    p += 1;
                    Token::Byte(pattern[p - 1])
                }
                b'[' => {
                    let (class, next) = class(pattern, p);
                    p = next;
                    classes.push(class);
                    Token::Class(classes.len() as u32 - 1)
                }
                other => Token::Byte(*other),
            };
            tokens.push(token);
            least += 1;
        }
        Pattern {
            tokens,
            classes,
            least,
        }
    }

    /// Whether the text matches the pattern. Takes at most pattern length × text length steps.
    pub fn matches(&self, text: &[u8]) -> bool {
        if text.len() < self.least {
            return false;
        }
        let (mut p, mut t) = (0, 0);
        // Where to resume when what follows the last star does not match: only the last star
        // matters.
        let mut resume: Option<(usize, usize)> = None;
        loop {
            match self.tokens.get(p) {
                Some(Token::Star) => {
                    p += 1;
                    if p == self.tokens.len() {
                        return true;
                    }
                    resume = Some((p, t));
                    continue;
                }
                // Where the text is too short from here on, it is so from any later byte on.
                token if t == text.len() => return token.is_none(),
                Some(token) if self.takes(*token, text[t]) => {
                    (p, t) = (p + 1, t + 1);
                    continue;
                }
                _ => {}
            }
            let Some((after_star, from)) = resume else {
                return false;
            };
            (p, t) = (after_star, from + 1);
            resume = Some((p, t));
        }
    }

    fn takes(&self, token: Token, byte: u8) -> bool {
        match token {
            Token::Star => false,
            Token::Any => true,
            Token::Byte(wanted) => wanted == byte,
            Token::Class(at) => self.classes[at as usize].has(byte),
        }
    }
}

/// The class whose first byte stands at `p`, and where the pattern goes on.
fn class(pattern: &[u8], mut p: usize) -> (Class, usize) {
    let mut class = Class([0; 4]);
    let negated = pattern.get(p) == Some(&b'^');
    if negated {
        p += 1;
    }
    loop {
        match pattern.get(p) {
            // Redis closes an unclosed class at the pattern's end.
            None => break,
            Some(b']') => {
                p += 1;
                break;
            }
            Some(b'\\') if p + 1 < pattern.len() => {
                class.add(pattern[p + 1], pattern[p + 1]);
                p += 2;
            }
            Some(&low) => {
                if pattern.get(p + 1) == Some(&b'-') && p + 2 < pattern.len() {
                    let high = pattern[p + 2];
                    class.add(low.min(high), low.max(high));
                    p += 3;
                } else {
                    class.add(low, low);
                    p += 1;
                }
            }
        }
    }
    if negated {
        class.0 = class.0.map(|word| !word);
    }
    (class, p)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::Pattern;

    fn matches(pattern: &[u8], text: &[u8]) -> bool {
        Pattern::new(pattern).matches(text)
    }

    #[test]
    fn patterns() {
        let yes: [(&str, &str); 19] = [
            ("*", ""),
            ("*", "abc"),
            ("a*c", "abbc"),
            ("a?c", "abc"),
            ("[ab]x", "bx"),
            ("[^ab]x", "cx"),
            ("[a-c]", "b"),
            ("[c-a]", "b"),
            ("\\*", "*"),
            ("*a*b*", "xxaxxbxx"),
            ("", ""),
            ("h[\\]]", "h]"),
            ("a**", "a"),
            // A class that nothing closes ends with the pattern; one that begins with its end is
            // empty.
            ("[ab", "b"),
            ("[a-]", "]"),
            ("[^]", "a"),
            ("a\\", "a\\"),
            ("[\\", "\\"),
            ("[?-@]", "@"),
        ];
        for (pattern, text) in yes {
            assert!(
                matches(pattern.as_bytes(), text.as_bytes()),
                "{pattern} {text}"
            );
        }
        let no: [(&str, &str); 11] = [
            ("", "a"),
            ("a?c", "ac"),
            ("[ab]x", "cx"),
            ("[^ab]x", "ax"),
            ("\\*", "a"),
            ("a*c", "abb"),
            ("?", ""),
            ("a", "ab"),
            ("[]", "]"),
            ("[", "["),
            ("[a-", "b"),
        ];
        for (pattern, text) in no {
            assert!(
                !matches(pattern.as_bytes(), text.as_bytes()),
                "{pattern} {text}"
            );
        }
        // Not exponential.
        assert!(!matches(
            &b"a*".repeat(50),
            &[b'a'; 40].iter().copied().chain(*b"b").collect::<Vec<_>>()[..40]
        ));
    }

    /// Looking through the class for each byte of the text would take minutes.
    #[test]
    fn a_long_class_is_looked_through_once() {
        let mut pattern = b"*[".to_vec();
        pattern.resize(1 << 20, 1);
        let begun = Instant::now();
        assert!(!matches(&pattern, &[b'a'; 64 << 10]));
        assert!(begun.elapsed() < Duration::from_secs(10));
    }

    /// What patterns mean, told without parsing them first.
    fn defined(pattern: &[u8], text: &[u8]) -> bool {
        let Some(byte) = text.first() else {
            return pattern.iter().all(|byte| *byte == b'*');
        };
        let rest = match pattern.first() {
            None => return false,
            Some(b'*') => return defined(&pattern[1..], text) || defined(pattern, &text[1..]),
            Some(b'?') => Some(&pattern[1..]),
            Some(b'\\') if pattern.len() > 1 => (pattern[1] == *byte).then_some(&pattern[2..]),
            Some(b'[') => defined_class(&pattern[1..], *byte),
            Some(other) => (other == byte).then_some(&pattern[1..]),
        };
        rest.is_some_and(|rest| defined(rest, &text[1..]))
    }

    /// What follows the class, if it has the byte.
    fn defined_class(pattern: &[u8], byte: u8) -> Option<&[u8]> {
        let (negated, mut rest) = match pattern {
            [b'^', rest @ ..] => (true, rest),
            _ => (false, pattern),
        };
        let mut found = false;
        let end = loop {
            let (low, high, behind) = match rest {
                [] => break rest,
                [b']', behind @ ..] => break behind,
                [b'\\', one, behind @ ..] => (one, one, behind),
                [low, b'-', high, behind @ ..] => (low.min(high), low.max(high), behind),
                [one, behind @ ..] => (one, one, behind),
            };
            found |= (low..=high).contains(&&byte);
            rest = behind;
        };
        (found != negated).then_some(end)
    }

    /// Of few bytes, so that texts match sometimes.
    fn bytes(of: &'static [u8], most: usize) -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(proptest::sample::select(of), 0..most)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn a_parsed_pattern_means_what_is_written(
            pattern in bytes(b"abc\xff**??[[]]^^--\\\\", 14),
            text in bytes(b"aabbcc\xff*?[]^-\\", 10),
        ) {
            prop_assert_eq!(matches(&pattern, &text), defined(&pattern, &text));
        }

        #[test]
        fn a_class_has_the_bytes_it_names(mut pattern in proptest::collection::vec(any::<u8>(), 0..12)) {
            pattern.insert(0, b'[');
            for byte in 0..=255 {
                prop_assert_eq!(matches(&pattern, &[byte]), defined(&pattern, &[byte]), "{}", byte);
            }
        }
    }
}
