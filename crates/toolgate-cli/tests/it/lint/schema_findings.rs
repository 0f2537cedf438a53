//! Tests the findings of `lint` about schemas and paths in them.

use serde_json::Value;

use crate::hook::TestProject;

#[test]
fn lint_reports_unknown_schema_keywords() {
    let project = TestProject::new();
    for (schema, expected) in [
        (
            "{ propertes = { a = {} } }",
            Some(
                "has `propertes`, which is not a JSON Schema keyword (did you mean `properties`?)",
            ),
        ),
        (
            "{ require = [] }",
            Some("has `require`, which is not a JSON Schema keyword (did you mean `required`?)"),
        ),
        (
            "{ zzz = 1 }",
            Some(
                "has `zzz`, which is not a JSON Schema keyword (remove it, or prefix its name with `x-`)",
            ),
        ),
        (
            "{ properties = { a = { typ = \"string\" } } }",
            Some(
                "has `typ` in `/properties/a`, which is not a JSON Schema keyword (did you mean `type`?)",
            ),
        ),
        (
            "{ properties = { a = { items = { maximun = 1 } } } }",
            Some(
                "has `maximun` in `/properties/a/items`, which is not a JSON Schema keyword (did you mean `maximum`?)",
            ),
        ),
        (
            "{ anyOf = [{ minimun = 1 }] }",
            Some(
                "has `minimun` in `/anyOf/0`, which is not a JSON Schema keyword (did you mean `minimum`?)",
            ),
        ),
        (
            "{ properties = { customer_id = {} }, required = [\"custmer_id\"] }",
            Some(
                "requires `custmer_id`, which is not declared in its properties (did you mean `customer_id`?)",
            ),
        ),
        ("{ properties = { typ = {}, require = {} }, required = [\"typ\"] }", None),
        ("{ required = [\"a\"] }", None),
        ("{ properties = { a = {} }, required = [\"b\"], additionalProperties = true }", None),
        (
            "{ properties = { a = {}, b = {} }, anyOf = [{ properties = { a = { const = 1 } }, required = [\"b\"] }] }",
            None,
        ),
        ("{ enum = [{ typ = 1 }], default = { typ = 1 }, x-mine = 1, \"$comment\" = \"x\" }", None),
    ] {
        for key in ["input", "output"] {
            // An output may have any type, but an input is an object.
            let schema = schema.replacen('{', "{ type = \"object\",", 1);
            let text = format!(
                "[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\n{key} = {schema}\n"
            );
            project.write("project/toolgate.toml", &text);
            let (code, json, stderr) = project.run(&["lint", "--format", "json"], "");
            let found: Value =
                serde_json::from_str(&json).unwrap_or_else(|_| panic!("{text}{json}{stderr}"));
            let findings = found["findings"].as_array().unwrap().iter().map(|finding| {
                assert_eq!(finding["code"], "unknown_keyword", "{text}{json}");
                format!(
                    "{} ({})",
                    finding["message"].as_str().unwrap(),
                    finding["help"].as_str().unwrap()
                )
            });
            let findings: Vec<String> = findings.collect();
            let expected: Vec<String> =
                expected.iter().map(|expected| format!("the {key} of `look` {expected}")).collect();
            assert_eq!((code, findings), (0, expected), "{text}");
        }
    }
}

#[test]
fn lint_reports_secret_paths_that_match_nothing() {
    let project = TestProject::new();
    let input = "input = { type = \"object\", properties = { password = { type = \"string\" }, of = { type = \"array\", items = { type = \"object\", properties = { pin = {} } } } } }";
    let closed = "output = { type = \"object\", properties = { token = { type = \"string\" } }, additionalProperties = false }";
    let open = "output = { type = \"object\", properties = { token = { type = \"string\" } } }";
    let neither = |path: &str| {
        format!("`look` neither accepts nor returns a `{path}`: the entry hides nothing")
    };
    let not_taken = |path: &str| {
        format!(
            "`look` does not accept a `{path}`: unless the result contains it, the entry hides nothing"
        )
    };
    let none = Vec::<String>::new();
    for (secrets, schemas, expected) in [
        ("[\"/password\", \"/of/*/pin\", \"token\"]", format!("{input}\n{closed}"), none.clone()),
        (
            "[\"/password\", \"/pasword\"]",
            format!("{input}\n{closed}"),
            vec![format!(
                "warning 4:25 {} (did you mean `password`?) \"/password\"",
                neither("/pasword")
            )],
        ),
        (
            "'/tokn'",
            format!("{input}\n{closed}"),
            vec![format!("warning 4:11 {} (did you mean `token`?) '/token'", neither("/tokn"))],
        ),
        (
            "\"/of/0/pn\"",
            format!("{input}\n{closed}"),
            vec![format!("warning 4:11 {} (did you mean `pin`?) -", neither("/of/0/pn"))],
        ),
        (
            "\"/zzz\"",
            format!("{input}\n{closed}"),
            vec![format!(
                "warning 4:11 {} (name a field of the arguments or of the result, or remove it) -",
                neither("/zzz")
            )],
        ),
        // The output schema is missing or open.
        (
            "\"/pasword\"",
            input.to_owned(),
            vec![format!("note 4:11 {} (did you mean `password`?) -", not_taken("/pasword"))],
        ),
        (
            "\"/zzz\"",
            format!("{input}\n{open}"),
            vec![format!(
                "note 4:11 {} (if the result contains it, declare it in `output`) -",
                not_taken("/zzz")
            )],
        ),
        ("\"/token\"", format!("{input}\n{open}"), none.clone()),
        // The input schema is missing or open.
        ("\"/pasword\"", String::new(), none.clone()),
        ("\"/pasword\"", format!("{input}\nextra = \"pass\""), none.clone()),
    ] {
        let text = format!(
            "[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\nsecrets = {secrets}\n{schemas}\n"
        );
        project.write("project/toolgate.toml", &text);
        let (code, json, stderr) = project.run(&["lint", "--format", "json"], "");
        let found: Value =
            serde_json::from_str(&json).unwrap_or_else(|_| panic!("{text}{json}{stderr}"));
        let findings = found["findings"].as_array().unwrap().iter().map(|finding| {
            assert_eq!(finding["code"], "unknown_secret", "{text}{json}");
            let field = |key: &str| finding[key].as_str().unwrap_or("-").to_owned();
            let (line, column) = (&finding["place"]["line"], &finding["place"]["column"]);
            format!(
                "{} {line}:{column} {} ({}) {}",
                field("severity"),
                field("message"),
                field("help"),
                field("fix")
            )
        });
        assert_eq!((code, findings.collect::<Vec<_>>()), (0, expected), "{text}");
    }
    // A second fix changes nothing. A note is neither fixed nor a warning.
    let text = |secret: &str| {
        format!(
            "[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\nsecrets = [ \"{secret}\", ] # here\r\n{input}\n{closed}\n"
        )
    };
    project.write("project/toolgate.toml", &text("/pasword"));
    assert!(
        project
            .masked_output(&["lint", "--fix"], "")
            .contains("toolgate.toml:4: \"/pasword\" -> \"/password\"")
    );
    assert_eq!(project.read("project/toolgate.toml"), text("/password"));
    assert_eq!(project.masked_output(&["lint", "--fix"], ""), "exit 0\nno findings\n");
    project.write("project/toolgate.toml", &text("/pasword").replace(closed, ""));
    assert!(
        project.masked_output(&["lint", "--fix"], "").ends_with("0 errors, 0 warnings, 1 note\n")
    );
    let (_, github, _) = project.run(&["lint", "--format", "github"], "");
    assert!(
        github.starts_with("::notice file=toolgate.toml,line=4,col=13,title=unknown_secret::"),
        "{github}"
    );
    let (_, sarif, _) = project.run(&["lint", "--format", "sarif"], "");
    let sarif: Value = serde_json::from_str(&sarif).unwrap();
    assert_eq!(sarif["runs"][0]["results"][0]["level"], "note");
}
