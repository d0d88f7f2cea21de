//! Redis's glob patterns: `*`, `?`, `[abc]`, `[^a-z]`, `\` escapes.

/// Whether the text matches the pattern. Takes at most pattern length × text length steps.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to resume when what follows the last star does not match: only the last star matters.
    let mut resume: Option<(usize, usize)> = None;
    loop {
        if p < pattern.len() && pattern[p] == b'*' {
            p += 1;
            resume = Some((p, t));
            continue;
        }
        if t == text.len() {
            if p == pattern.len() {
                return true;
            }
        } else if p < pattern.len()
            && let Some(next) = one(pattern, p, text[t])
        {
            p = next;
            t += 1;
            continue;
        }
        match resume {
            Some((after_star, from)) if from < text.len() => {
                resume = Some((after_star, from + 1));
                p = after_star;
                t = from + 1;
            }
            _ => return false,
        }
    }
}

/// Matches one byte against what stands at `p`; answers what comes next in the pattern.
fn one(pattern: &[u8], p: usize, byte: u8) -> Option<usize> {
    match pattern[p] {
        b'?' => Some(p + 1),
        b'\\' if p + 1 < pattern.len() => (pattern[p + 1] == byte).then_some(p + 2),
        b'[' => class(pattern, p + 1, byte),
        other => (other == byte).then_some(p + 1),
    }
}

fn class(pattern: &[u8], mut p: usize, byte: u8) -> Option<usize> {
    let negated = pattern.get(p) == Some(&b'^');
    if negated {
        p += 1;
    }
    let mut found = false;
    loop {
        match pattern.get(p) {
            // Redis closes an unclosed class at the pattern's end.
            None => break,
            Some(b']') => {
                p += 1;
                break;
            }
            Some(b'\\') if p + 1 < pattern.len() => {
                found |= pattern[p + 1] == byte;
                p += 2;
            }
            Some(low) => {
                if pattern.get(p + 1) == Some(&b'-') && p + 2 < pattern.len() {
                    let high = pattern[p + 2];
                    found |= (*low.min(&high)..=*low.max(&high)).contains(&byte);
                    p += 3;
                } else {
                    found |= *low == byte;
                    p += 1;
                }
            }
        }
    }
    (found != negated).then_some(p)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        let yes: [(&str, &str); 13] = [
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
        ];
        for (pattern, text) in yes {
            assert!(
                matches(pattern.as_bytes(), text.as_bytes()),
                "{pattern} {text}"
            );
        }
        let no: [(&str, &str); 8] = [
            ("", "a"),
            ("a?c", "ac"),
            ("[ab]x", "cx"),
            ("[^ab]x", "ax"),
            ("\\*", "a"),
            ("a*c", "abb"),
            ("?", ""),
            ("a", "ab"),
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
}
