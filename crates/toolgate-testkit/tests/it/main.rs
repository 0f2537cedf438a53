//! Checks rules of the whole workspace: names, sizes, words, and the references of ARCHITECTURE.md.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Type names that may stand for several things.
const SHARED_TYPE_NAMES: [&str; 3] = ["Args", "Error", "Inner"];
const MAX_FILE_LINES: usize = 500;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns all Rust files of the workspace, with their paths from its root.
fn rust_files() -> Vec<(String, String)> {
    fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let (root, mut found) = (workspace(), Vec::new());
    for directory in ["crates", "examples", "fuzz/fuzz_targets"] {
        collect(&root.join(directory), &mut found);
    }
    let relative = |path: &PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
    let mut files: Vec<(String, String)> =
        found.iter().map(|path| (relative(path), std::fs::read_to_string(path).unwrap())).collect();
    files.sort();
    files
}

/// Returns the name that a line defines after one of these keywords.
fn defined_name<'l>(line: &'l str, keywords: &[&str]) -> Option<&'l str> {
    let mut words = line.split_whitespace().filter(|word| {
        !word.starts_with("pub") && !["const", "async", "unsafe", "mut", "extern"].contains(word)
            || keywords.contains(word)
    });
    let keyword = words.next()?;
    let name = words.next().filter(|_| keywords.contains(&keyword))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    name.get(..end).filter(|name| !name.is_empty())
}

#[test]
fn type_names_are_unique() {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in rust_files() {
        for (n, line) in text.lines().enumerate() {
            // An associated type is indented and has no body of its own.
            let is_alias = line.trim_start().starts_with("type ") && line.starts_with(' ');
            if let Some(name) = defined_name(line, &["struct", "enum", "trait", "union", "type"])
                && !is_alias
                && !line.trim_start().starts_with("//")
            {
                let place = format!("{file}:{}", n + 1);
                places.entry(name.to_owned()).or_default().insert(place);
            }
        }
    }
    assert!(places.len() > 500, "{}", places.len());
    let shared: Vec<_> = places
        .iter()
        .filter(|(name, places)| places.len() > 1 && !SHARED_TYPE_NAMES.contains(&name.as_str()))
        .collect();
    assert!(shared.is_empty(), "{shared:#?}");
}

#[test]
fn files_have_at_most_500_lines() {
    let long: Vec<(String, usize)> = rust_files()
        .into_iter()
        .map(|(file, text)| (file, text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_FILE_LINES)
        .collect();
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn no_module_is_included_by_path() {
    let included: Vec<String> = rust_files()
        .into_iter()
        .filter(|(file, _)| !file.starts_with("crates/toolgate-testkit/tests"))
        .filter(|(_, text)| text.lines().any(|line| line.trim_start().starts_with("#[path")))
        .map(|(file, _)| file)
        .collect();
    assert!(included.is_empty(), "{included:?}");
}

/// Checks references such as `crates/toolgate/src/pipeline/mod.rs:run_pipeline`.
#[test]
fn architecture_references_exist() {
    let text = std::fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    let mut checked = 0;
    for reference in text.split('`').skip(1).step_by(2).filter(|text| text.contains(".rs:")) {
        let (file, name) = reference.split_once(".rs:").unwrap();
        let path = workspace().join(format!("{file}.rs"));
        let source = std::fs::read_to_string(&path);
        let source = source.unwrap_or_else(|error| panic!("{reference}: {error}"));
        let keywords =
            ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "macro_rules!"];
        let is_defined = source.lines().any(|line| {
            keywords.iter().any(|keyword| defined_name(line, &[*keyword]) == Some(name))
        });
        assert!(is_defined, "{reference}: `{name}` is not defined in the file");
        checked += 1;
    }
    assert!(checked > 50, "{checked}");
}
