//! Reduces addresses to the parts that decide the destination.
//!
//! User names, ports, subdomains, tags and comments do not change the destination.

use std::borrow::Cow;

use unicode_normalization::UnicodeNormalization;

/// Visits the hosts that an address in a word may refer to, and their parent domains of at least
/// two labels.
pub(crate) fn visit_hosts(word: &str, f: &mut dyn FnMut(&str)) {
    let word: Cow<'_, str> =
        if word.is_ascii() { word.into() } else { word.nfkd().collect::<String>().into() };
    if !["//", "\\\\", "/\\", "\\/"].iter().any(|slashes| word.contains(slashes)) {
        return;
    }
    // Some programs read `\` as `/`, others do not.
    for slashes in [&['/'][..], &['/', '\\']] {
        for part in word.split(slashes) {
            let authority = part.split(['?', '#']).next().unwrap_or_default();
            let host = authority.rsplit('@').next().unwrap_or_default();
            let host = host.split(':').next().unwrap_or_default();
            let mut rest = host.trim_end_matches(LABEL_SEPARATORS);
            // A host name has at most 253 characters of up to 4 bytes.
            if rest.len() > 4 * 253 {
                continue;
            }
            while rest.contains(LABEL_SEPARATORS) {
                f(rest);
                rest = rest.split_once(LABEL_SEPARATORS).map_or("", |(_, above)| above);
            }
        }
    }
}

/// Separators between the labels of a host name.
const LABEL_SEPARATORS: [char; 2] = ['.', '\u{3002}'];

/// Removes the tag from a mail address: `name+tag@host` is delivered to `name@host`.
pub(crate) fn strip_mail_tag(word: &str) -> Option<String> {
    let (mailbox, host) = word.rsplit_once('@')?;
    let (name, _) = mailbox.split_once('+').filter(|(name, _)| !name.is_empty())?;
    Some(format!("{name}@{host}"))
}

/// Removes comments from mail addresses: `name(comment)@host` is `name@host`.
pub(crate) fn strip_mail_comments(text: &str) -> Option<String> {
    if !text.contains('@') || !text.contains('(') {
        return None;
    }
    let mut depth = 0usize;
    let outside = |c: &char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => return depth == 0,
        }
        false
    };
    Some(text.chars().filter(outside).collect())
}
