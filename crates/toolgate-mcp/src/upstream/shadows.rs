//! Tools whose words speak of another upstream's: whoever reads them may do there what the other never asked for.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use toolgate::Timestamp;
use toolgate::config::Upstream;

use super::pins::Pins;

/// What is seen within this time came together: who was first is chance.
const TOGETHER: Duration = Duration::from_secs(60);

/// How long a name is that is looked for, and of how many words: however many tools there are, a text is read once.
const LONGEST: usize = 128;
const MOST_WORDS: usize = 8;

/// The names of all upstreams' tools, in small letters.
pub(super) struct Names<'a>(HashMap<String, Vec<Named<'a>>>);

/// Whose name it is.
struct Named<'a> {
    upstream: &'a str,
    /// As it is written.
    name: String,
    first: Timestamp,
    /// Models know the tool by it; else only its upstream does.
    here: bool,
}

impl<'a> Names<'a> {
    pub(super) fn of(all: impl IntoIterator<Item = (&'a Upstream, &'a Pins)>) -> Self {
        let mut names = Self(HashMap::new());
        for (upstream, pins) in all {
            for (name, first) in pins.first_seen() {
                let here = format!("{}{name}", upstream.prefix);
                let legal = toolgate::names::map_foreign([here.as_str()]).names.into_keys();
                legal.chain([here]).for_each(|here| names.add(upstream, here, first, true));
                if !upstream.prefix.is_empty() {
                    names.add(upstream, name, first, false);
                }
            }
        }
        names
    }

    fn add(&mut self, upstream: &'a Upstream, name: String, first: Timestamp, here: bool) {
        let bare = name.trim_matches(|c: char| !is_letter(c));
        // A common word is no name.
        let telling = (6..=LONGEST).contains(&bare.len()) && bare.contains(['_', '-', '.']);
        if !telling || bare.split(|c: char| !is_letter(c)).count() > MOST_WORDS {
            return;
        }
        let known = self.0.entry(bare.to_ascii_lowercase()).or_default();
        match known.iter_mut().find(|known| known.upstream == upstream.name && known.here == here) {
            Some(known) => known.first = known.first.min(first),
            None => known.push(Named { upstream: &upstream.name, name, first, here }),
        }
    }

    /// The first tool of another upstream that words name, if it was there before them or came with them.
    pub(super) fn another(&self, own: &Upstream, since: Timestamp, words: &str) -> Option<String> {
        let words = words.to_ascii_lowercase();
        // Where the last words begin: a name may be of several, as `mail.send` is.
        let (mut begun, mut inside) = (VecDeque::new(), false);
        // Behind the last letter nothing goes on.
        for (at, c) in words.char_indices().chain([(words.len(), ' ')]) {
            match (is_letter(c), inside) {
                (true, false) => {
                    begun.truncate(MOST_WORDS - 1);
                    begun.push_front(at);
                }
                (false, true) => {
                    let mut spelled = begun.iter().rev().filter(|from| at - **from <= LONGEST).filter_map(|from| words.get(*from..at));
                    if let Some(found) = spelled.find_map(|name| self.of_another(own, since, name)) {
                        return Some(found.to_owned());
                    }
                }
                _ => {}
            }
            inside = is_letter(c);
        }
        None
    }

    fn of_another(&self, own: &Upstream, since: Timestamp, name: &str) -> Option<&str> {
        let known = self.0.get(name)?;
        let is_own = |here: bool| known.iter().any(|known| known.upstream == own.name && known.here == here);
        // What it calls by that name itself may be what it means, unless models know another tool by it.
        let (here, there) = (is_own(true), is_own(false));
        let counts = |known: &&Named<'_>| {
            let together = known.first.checked_sub(TOGETHER).unwrap_or(known.first);
            known.upstream != own.name && !here && (known.here || !there) && since >= together
        };
        known.iter().find(counts).map(|known| known.name.as_str())
    }
}

/// Of what a word of a name consists.
fn is_letter(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '-'
}

/// Looks through what is known of upstreams, without asking them, for tools whose words speak of another's: they are held back, and where
/// they are already, that is said of them.
pub fn look_for_shadows(all: &[(&Upstream, Pins)]) {
    let names = Names::of(all.iter().map(|(upstream, pins)| (*upstream, pins)));
    all.iter().for_each(|(upstream, pins)| pins.hold_shadows(upstream, &names));
}

#[cfg(test)]
mod tests {
    use rmcp::model::Tool;
    use serde_json::json;

    use super::super::scan::Suspicion;
    use super::*;

    fn tool(name: &str, description: &str) -> Tool {
        serde_json::from_value(json!({"name": name, "description": description, "inputSchema": {"type": "object"}})).unwrap()
    }

    fn two(prefix: &str) -> Vec<Upstream> {
        let text = format!("[upstreams.a]\ncommand = \"a\"\n[upstreams.m]\ncommand = \"m\"\nprefix = \"{prefix}\"\n");
        toolgate::config::Config::parse("toolgate.toml", &text).upstreams
    }

    /// What is held back, and of which tools it speaks.
    fn held(pins: &Pins) -> Vec<(String, Vec<String>)> {
        let spoken = |why: Suspicion| match why {
            Suspicion::Shadow { tool } => tool,
            other => format!("{other:?}"),
        };
        pins.changes().into_iter().map(|change| (change.tool, change.why.into_iter().map(spoken).collect())).collect()
    }

    #[test]
    fn who_is_spoken_of() {
        for (prefix, theirs, words, own, expected) in [
            ("m_", "send_mail", "Use send_mail first.", None, Some("send_mail")),
            ("m_", "send_mail", "Use m_send_mail first.", None, Some("m_send_mail")),
            ("m_", "send_mail", "Use SEND_MAIL, then go on.", None, Some("send_mail")),
            ("m_", "Send_Mail", "`send_mail`", None, Some("Send_Mail")),
            ("m_", "send_mail", "Use other.send_mail/x", None, Some("send_mail")),
            ("m_", "send_mail", "send_mail", None, Some("send_mail")),
            ("m_", "mail.send", "After mail.send, this.", None, Some("mail.send")),
            ("m_", "mail.send", "After m_mail_send, this.", None, Some("m_mail_send")),
            ("m_", "mail.send", "After mail. send this.", None, None),
            ("m_", "send_mail", "Use resend_mail, send_mailing or send_mail-x first.", None, None),
            ("m_", "send_mail", "Ésend_mail", None, None),
            ("m_", "search", "To search is to find.", None, None),
            // It may mean its own; but not where models know another's by that name.
            ("m_", "send_mail", "Use send_mail first.", Some("send_mail"), None),
            ("m_", "send_mail", "Use a_send_mail first.", Some("send_mail"), None),
            ("m_", "send_mail", "Use m_send_mail first.", Some("send_mail"), Some("m_send_mail")),
            ("m_", "send_mail", "Use m_send_mail first.", Some("m_send_mail"), Some("m_send_mail")),
            ("", "send_mail", "Use send_mail first.", Some("send_mail"), Some("send_mail")),
            ("", "a_send_mail", "Use a_send_mail first.", Some("send_mail"), None),
        ] {
            let all = two(prefix);
            let pins: Vec<Pins> = all.iter().map(|upstream| Pins::open(None, upstream).unwrap()).collect();
            let mut tools = vec![tool("weather", words)];
            tools.extend(own.map(|name| tool(name, "Does.")));
            pins[0].note(&tools).unwrap();
            pins[1].note(&[tool(theirs, "Sends.")]).unwrap();
            let all: Vec<(&Upstream, Pins)> = all.iter().zip(pins).collect();
            // Once is enough.
            for _ in 0..2 {
                look_for_shadows(&all);
            }
            let expected: Vec<_> = expected.iter().map(|name| ("weather".to_owned(), vec![(*name).to_owned()])).collect();
            assert_eq!(held(&all[0].1), expected, "{prefix} {theirs} {words} {own:?}");
            assert!(held(&all[1].1).is_empty(), "{prefix} {theirs} {words} {own:?}");
        }
    }

    #[test]
    fn what_has_changed_is_looked_through_too() {
        let home = tempfile::tempdir().unwrap();
        let all = two("m_");
        let opened = || all.iter().map(|upstream| (upstream, Pins::open(Some(home.path()), upstream).unwrap())).collect::<Vec<_>>();
        let before = opened();
        before[0].1.note(&[tool("weather", "Tells the weather.")]).unwrap();
        before[1].1.note(&[tool("send_mail", "Sends.")]).unwrap();
        look_for_shadows(&before);
        assert!(held(&before[0].1).is_empty());
        before[0].1.note(&[tool("weather", "After send_mail, this.")]).unwrap();
        // Whoever looks at what was written down finds it.
        let after = opened();
        look_for_shadows(&after);
        let speaks = [("weather".to_owned(), vec!["send_mail".to_owned()])];
        assert_eq!(held(&after[0].1), speaks);
        assert!(after[0].1.changes()[0].before.is_some());
        // It is not forgotten when it is seen again.
        after[0].1.note(&[tool("weather", "After send_mail, this.")]).unwrap();
        assert_eq!(held(&after[0].1), speaks);
        // Who has seen that and accepts it is not asked again.
        after[0].1.show().unwrap();
        assert_eq!(after[0].1.accept(None).unwrap().tools, ["weather"]);
        look_for_shadows(&after);
        assert!(held(&after[0].1).is_empty());
    }

    /// Each of many names all of the others; what is held back is written down once.
    #[test]
    fn many_are_held_back_at_once() {
        let home = tempfile::tempdir().unwrap();
        let all = two("m_");
        let all: Vec<(&Upstream, Pins)> = all.iter().map(|upstream| (upstream, Pins::open(Some(home.path()), upstream).unwrap())).collect();
        let many = 1_500;
        let speaks = |number: usize| tool(&format!("own_{number}"), &format!("Now {}other_{number}.", "m_none ".repeat(20)));
        all[0].1.note(&(0..many).map(speaks).collect::<Vec<_>>()).unwrap();
        all[1].1.note(&(0..many).map(|number| tool(&format!("other_{number}"), "Does.")).collect::<Vec<_>>()).unwrap();
        look_for_shadows(&all);
        let held = held(&all[0].1);
        assert_eq!(held.len(), many);
        assert!(held.iter().all(|(tool, why)| *why == [tool.replace("own", "other")]), "{held:?}");
        // It is kept.
        assert_eq!(Pins::open(Some(home.path()), all[0].0).unwrap().changes().len(), many);
    }
}
