//! Tests how configuration files are merged and which values they accept.

#[test]
fn unaccepted_client_reports_cause_warning() {
    use toolgate_config::Config;
    let tools =
        "[tools.look]\nkind = \"client\"\neffect = \"read\"\n[tools.act]\nkind = \"client\"\n";
    for rule in [
        "rule = \"require\"\ntools = [\"act\"]\nany_of = [\"look\"]",
        "rule = \"sequence\"\nafter = { act = [\"look\"] }",
    ] {
        for reported in [false, true] {
            let text = format!("{tools}[[policy]]\nname = \"r\"\n{rule}\nreported = {reported}\n");
            let agents = Config::parse("toolgate.toml", &text)
                .build_agents(None)
                .unwrap_or_else(|e| panic!("{}", e.render(false)));
            let warnings: Vec<&str> = agents
                .iter()
                .flat_map(|agent| agent.warnings())
                .map(|problem| problem.message.as_str())
                .collect();
            let expected: &[&str] = if reported {
                &[]
            } else {
                &["the client runs `look`, and results that a client reports do not count here"]
            };
            assert_eq!(warnings, expected, "{text}");
        }
    }
}

#[test]
fn retention_belongs_to_file_that_names_ledger() {
    use toolgate::SignedDuration;
    use toolgate_config::Config;
    let parse = |text: &str| {
        Config::parse("toolgate.toml", &format!("{text}[tools.look]\neffect = \"read\"\n"))
    };
    let days = |days: i64| Some(SignedDuration::from_hours(24 * days));
    let project = || parse("store = \"project.db\"\nretention = \"30d\"\n");
    assert_eq!(project().retention, days(30));
    assert_eq!(project().merge_under_user_config(parse("")).retention, days(30));
    assert_eq!(project().merge_under_user_config(parse("store = \"own.db\"\n")).retention, None);
    assert_eq!(
        project()
            .merge_under_user_config(parse("store = \"own.db\"\nretention = \"90d\"\n"))
            .retention,
        days(90)
    );
}

#[test]
fn equal_rules_of_user_and_project_are_merged() {
    use toolgate_config::Config;
    let parse = |file: &str, max: u32| {
        let rule = format!(
            "[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"act\"]\ncalls = {max}\n"
        );
        Config::parse(file, &format!("[tools.act]\nkind = \"client\"\n{rule}"))
    };
    let agents = parse("project.toml", 3)
        .merge_under_user_config(parse("own.toml", 3))
        .build_agents(None)
        .unwrap_or_else(|e| panic!("{}", e.render(false)));
    assert_eq!(agents.len(), 1);
    let error = parse("project.toml", 4)
        .merge_under_user_config(parse("own.toml", 3))
        .build_agents(None)
        .unwrap_err()
        .render(false);
    insta::assert_snapshot!(error, @r#"
    error: two policies have the name `few`
     --> project.toml:4:8
      |
    4 | name = "few"
      |        ^^^^^
      |
      = help: own.toml has a different rule of this name; rename one of them
    "#);
}

#[test]
fn missing_retry_settings_use_defaults() {
    use std::time::Duration;
    use toolgate::RetrySettings;
    use toolgate_config::Config;
    let defaults = RetrySettings { times: 2, delay: Duration::from_millis(100) };
    assert_eq!(RetrySettings::default(), defaults);
    for (setting, expected) in [
        ("", defaults),
        ("retry = {}", defaults),
        ("retry = { times = 5 }", RetrySettings { times: 5, ..defaults }),
        ("retry = { times = 0 }", RetrySettings { times: 0, ..defaults }),
        ("retry = { delay = \"1s\" }", RetrySettings { delay: Duration::from_secs(1), ..defaults }),
        (
            "retry = { times = 1, delay = \"250ms\" }",
            RetrySettings { times: 1, delay: Duration::from_millis(250) },
        ),
    ] {
        let text = format!(
            "[tools.ask]\nkind = \"http\"\neffect = \"read\"\nurl = \"https://example.com/\"\n{setting}\n"
        );
        let agents = Config::parse("toolgate.toml", &text)
            .build_agents(None)
            .unwrap_or_else(|e| panic!("{}", e.render(false)));
        let ask = agents.iter().flat_map(|agent| agent.tools()).next().unwrap();
        let read: RetrySettings =
            serde_json::from_value(serde_json::to_value(ask).unwrap()["retry"].clone()).unwrap();
        assert_eq!(read, expected, "{setting}");
    }
}

#[test]
fn duration_syntax_is_the_same_everywhere() {
    for (text, seconds) in [
        ("30s", Some(30)),
        ("15 minutes", Some(900)),
        ("1 hour", Some(3_600)),
        ("1.5h", Some(5_400)),
        ("1h 30m", Some(5_400)),
        ("7d", Some(604_800)),
        ("1 day", Some(86_400)),
        ("90 days", Some(7_776_000)),
        ("1d 12h", Some(129_600)),
        ("2w", Some(1_209_600)),
        (" 2 weeks ", Some(1_209_600)),
        // A duration of 2.7 million years is accepted.
        ("999999999d", Some(86_399_999_913_600)),
        ("0s", Some(0)),
        ("-5s", None),
        ("+5s", None),
        ("- 5s", None),
        ("-1d", None),
        ("1h ago", None),
        ("7 days ago", None),
        ("90 dayz", None),
        ("1 month", None),
        ("d", None),
        ("90", None),
        ("", None),
        ("99999999999999999999d", None),
    ] {
        assert_eq!(
            toolgate::clock::parse_duration(text).map(|length| length.as_secs()),
            seconds,
            "{text}"
        );
    }
}
