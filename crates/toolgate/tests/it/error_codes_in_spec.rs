//! Every code that the source gives stands in the specification, and the other way round.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;
use toolgate::ErrorCategory;
use toolgate::call::error_code;

/// In the table, and said by nobody yet.
const UNUSED_CODES: &[&str] = &[];

const ERRORS_PAGE: &str = include_str!("../../../../specs/errors.md");

/// The rows of a table of the page.
fn table_rows(name: &str) -> Vec<&'static str> {
    let (open, close) = (format!("<!-- {name} -->"), format!("<!-- /{name} -->"));
    let table =
        ERRORS_PAGE.split(open.as_str()).nth(1).and_then(|rest| rest.split(close.as_str()).next());
    let rows: Vec<_> =
        table.unwrap_or_default().lines().filter(|line| line.starts_with("| `")).collect();
    assert!(!rows.is_empty(), "the page has no table of {name}");
    rows
}

#[test]
fn code_table_equals_table_in_specification() {
    let expected: Vec<String> = error_code::ALL
        .iter()
        .map(|c| {
            format!(
                "| `{}` | {} | {} | {} |",
                c.name,
                c.category,
                if c.retryable { "yes" } else { "no" },
                c.meaning
            )
        })
        .collect();
    assert_eq!(table_rows("codes"), expected);
    for c in error_code::ALL {
        assert!(
            !c.retryable || c.category == ErrorCategory::Transient,
            "{}: only what passes by itself may be retried",
            c.name
        );
    }
}

/// What a source file says, without comments and tests.
fn source_without_tests(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The source of every crate. The tools of the demonstration have codes of their own, as anybody's
/// have.
fn all_sources() -> Vec<(PathBuf, String)> {
    fn collect_sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("demo") {
                collect_sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        let source = entry.unwrap().path().join("src");
        if source.is_dir() {
            collect_sources(&source, &mut found);
        }
    }
    found.retain(|path| !path.ends_with("toolgate/src/call/error_code.rs"));
    found.into_iter().map(|path| (path.clone(), source_without_tests(&path))).collect()
}

/// Codes that are named by their constants, other than to compare with them.
fn codes_used_by_constant(sources: &[(PathBuf, String)]) -> BTreeSet<String> {
    let named = Regex::new(r"(==|!=)?\s*\berror_code::([A-Z_]{3,})\b").unwrap();
    let mut said = BTreeSet::new();
    for (path, text) in sources {
        // A replay compares codes and returns none.
        if path.to_string_lossy().contains("/src/replay") {
            continue;
        }
        for found in named.captures_iter(text).filter(|found| found.get(1).is_none()) {
            said.insert(found[2].to_lowercase());
        }
    }
    said
}

/// Codes that are written out where an error is made, or in a constant beside it, each with its
/// categories.
fn codes_used_by_literal(sources: &[(PathBuf, String)]) -> BTreeMap<String, BTreeSet<String>> {
    let maker = r"(?:ToolError|Failure)::(?:new\(\s*(?:\w+::)*Category::(\w+),|(transient|validation|permission|business)\(|of\()|\brefused\(";
    let made =
        Regex::new(&format!(r#"(?:{maker})\s*(?:"([a-z0-9_]+)"|([A-Z_]{{3,}})\b)"#)).unwrap();
    let mut said: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in sources {
        for found in made.captures_iter(text) {
            let name = match (found.get(3), found.get(4)) {
                (Some(name), _) => name.as_str().to_owned(),
                (None, constant) => {
                    let constant = constant.map_or("", |constant| constant.as_str());
                    let declared = format!("const {constant}: &str = \"");
                    let value = text
                        .split(declared.as_str())
                        .nth(1)
                        .and_then(|rest| rest.split('"').next());
                    value
                        .unwrap_or_else(|| panic!("{}: what is `{constant}`?", path.display()))
                        .to_owned()
                }
            };
            let category =
                found.get(1).or(found.get(2)).map(|category| category.as_str().to_uppercase());
            said.entry(name).or_default().extend(category);
        }
    }
    said
}

#[test]
fn codes_in_source_equal_codes_in_specification() {
    let sources = all_sources();
    let (by_constant, by_name) =
        (codes_used_by_constant(&sources), codes_used_by_literal(&sources));
    // A look at nothing would find nothing wrong.
    assert!(
        sources.len() > 100
            && by_constant.contains("forbidden")
            && by_name.contains_key("definition_changed"),
        "{by_name:?}"
    );
    let own: BTreeSet<&str> = error_code::ALL.iter().map(|code| code.name).collect();
    let said: BTreeSet<&str> =
        by_constant.iter().chain(by_name.keys()).map(String::as_str).collect();

    let silent: Vec<&str> = own.difference(&said).copied().collect();
    assert_eq!(silent, UNUSED_CODES, "codes of the table that nobody says");
    for name in UNUSED_CODES {
        assert!(
            ERRORS_PAGE.contains(&format!(
                "`{name}` is in the table for policies to come; nothing comes to say it"
            )),
            "{name}"
        );
    }

    let others: BTreeSet<String> = by_name
        .iter()
        .filter(|(name, _)| !own.contains(name.as_str()))
        .map(|(name, categories)| {
            format!(
                "| `{name}` | {} |",
                categories.iter().cloned().collect::<Vec<_>>().join(" or ")
            )
        })
        .collect();
    let listed: BTreeSet<String> = table_rows("more codes")
        .iter()
        .map(|row| row.split_inclusive('|').take(3).collect())
        .collect();
    assert_eq!(listed, others, "codes that are not toolgate's own, on the page and in the source");

    for (name, categories) in &by_name {
        let Some(own) = error_code::find(name) else { continue };
        assert!(
            categories.iter().all(|category| *category == own.category.to_string()),
            "`{name}` is {}, and is said to be {categories:?}",
            own.category
        );
    }
    // A constant is a code by the name that it has.
    assert!(by_constant.iter().all(|name| own.contains(name.as_str())), "{by_constant:?}");
}
