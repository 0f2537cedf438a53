//! Tests that suggestions agree with `difflib` of Python.

use std::io::Write;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use toolgate_text::suggest::{find_closest, similarity_ratio};

const PYTHON_SCRIPT: &str = r"
import difflib, json, sys
for line in sys.stdin:
    word, names = json.loads(line)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    ratio = difflib.SequenceMatcher(None, names[0], word).ratio()
    print(json.dumps([close[0] if close else None, ratio]))
";

/// Generates 10,000 words, each with near, distant or equal names.
fn word_pairs() -> Vec<(String, Vec<String>)> {
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]),
    );
    let name = "[a-e_]{1,12}|[a-z_-]{1,24}|(read|write|list|get|verify)_(file|order|customer|output)s?|[a-zé日]{0,6}";
    let edits = prop::collection::vec((0..24usize, "[a-z_]?"), 0..4);
    let strategy =
        (name, prop::collection::vec(name, 1..6), edits).prop_map(|(word, mut names, edits)| {
            // One of the names is the word with a few letters changed, dropped or added.
            let mut near: Vec<char> = word.chars().collect();
            for (at, letter) in edits {
                let at = at.min(near.len());
                near.splice(at..(at + 1).min(near.len()), letter.chars());
            }
            names.push(near.into_iter().collect());
            (word, names)
        });
    (0..10_000).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

#[test]
fn suggestions_agree_with_difflib_on_ten_thousand_pairs() {
    let pairs = word_pairs();
    let mut python = Command::new("python3")
        .arg("-c")
        .arg(PYTHON_SCRIPT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is installed by `make test`");
    let mut stdin = python.stdin.take().unwrap();
    let lines: String =
        pairs.iter().map(|pair| serde_json::to_string(pair).unwrap() + "\n").collect();
    let feeder = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
    let output = python.wait_with_output().unwrap();
    feeder.join().unwrap().unwrap();
    let answers: Vec<(Option<String>, f64)> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(answers.len(), pairs.len());
    let mut suggested = 0;
    for ((word, names), (close, ratio)) in pairs.iter().zip(answers) {
        assert_eq!(
            find_closest(word, names.iter().map(String::as_str)),
            close.as_deref(),
            "{word} among {names:?}"
        );
        assert!(
            (similarity_ratio(&names[0], word) - ratio).abs() < 1e-12,
            "{word} and {}",
            names[0]
        );
        suggested += usize::from(close.is_some());
    }
    assert!((1_000..9_900).contains(&suggested), "unexpected number of suggestions: {suggested}");
}
