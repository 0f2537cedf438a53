//! Tests that the error codes in the source and in the specification are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;
use toolgate::ErrorCategory;
use toolgate::call::error_code;

/// Codes of the table that no source uses yet.
const UNUSED_CODES: &[&str] = &[];

const ERRORS_PAGE: &str = include_str!("../../../../specs/errors.md");

/// Returns the rows of a table of the errors page.
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
            "{}: only a transient error is retryable",
            c.name
        );
    }
}

/// Reads a source file without comments and unit tests.
fn source_without_tests(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Reads the sources of all crates, except the demo, whose tools have their own codes.
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

/// Finds codes that are used by constant, except in comparisons.
fn codes_used_by_constant(sources: &[(PathBuf, String)]) -> BTreeSet<String> {
    let pattern = Regex::new(r"(==|!=)?\s*\berror_code::([A-Z_]{3,})\b").unwrap();
    let mut codes = BTreeSet::new();
    for (path, text) in sources {
        // A replay compares codes and returns none.
        if path.to_string_lossy().contains("/src/replay") {
            continue;
        }
        for found in pattern.captures_iter(text).filter(|found| found.get(1).is_none()) {
            codes.insert(found[2].to_lowercase());
        }
    }
    codes
}

/// Finds codes that are literals, or constants of the same file, with their categories.
fn codes_used_by_literal(sources: &[(PathBuf, String)]) -> BTreeMap<String, BTreeSet<String>> {
    let constructor = r"(?:ToolError|Failure)::(?:new\(\s*(?:\w+::)*Category::(\w+),|(transient|validation|permission|business)\(|of\()|\brefused\(";
    let pattern =
        Regex::new(&format!(r#"(?:{constructor})\s*(?:"([a-z0-9_]+)"|([A-Z_]{{3,}})\b)"#)).unwrap();
    let mut codes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in sources {
        for found in pattern.captures_iter(text) {
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
                        .unwrap_or_else(|| panic!("{}: `{constant}` has no value", path.display()))
                        .to_owned()
                }
            };
            let category =
                found.get(1).or(found.get(2)).map(|category| category.as_str().to_uppercase());
            codes.entry(name).or_default().extend(category);
        }
    }
    codes
}

#[test]
fn codes_in_source_equal_codes_in_specification() {
    let sources = all_sources();
    let (by_constant, by_name) =
        (codes_used_by_constant(&sources), codes_used_by_literal(&sources));
    // An empty search would pass, so check that the search finds codes.
    assert!(
        sources.len() > 100
            && by_constant.contains("forbidden")
            && by_name.contains_key("definition_changed"),
        "{by_name:?}"
    );
    let table_codes: BTreeSet<&str> = error_code::ALL.iter().map(|code| code.name).collect();
    let used_codes: BTreeSet<&str> =
        by_constant.iter().chain(by_name.keys()).map(String::as_str).collect();

    let unused: Vec<&str> = table_codes.difference(&used_codes).copied().collect();
    assert_eq!(unused, UNUSED_CODES, "codes of the table that no source uses");
    for name in UNUSED_CODES {
        assert!(
            ERRORS_PAGE
                .contains(&format!("`{name}` is reserved for future policies; no code uses it")),
            "{name}"
        );
    }

    let others: BTreeSet<String> = by_name
        .iter()
        .filter(|(name, _)| !table_codes.contains(name.as_str()))
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
    assert_eq!(listed, others, "further codes on the page and in the source");

    for (name, categories) in &by_name {
        let Some(entry) = error_code::find(name) else { continue };
        assert!(
            categories.iter().all(|category| *category == entry.category.to_string()),
            "`{name}` is {}, but the source uses {categories:?}",
            entry.category
        );
    }
    // The name of each used constant is a code.
    assert!(by_constant.iter().all(|name| table_codes.contains(name.as_str())), "{by_constant:?}");
}
