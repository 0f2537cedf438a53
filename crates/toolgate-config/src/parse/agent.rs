//! Reads one agent of a configuration.

use crate::agent_config::{AgentConfig, ToolConfig};
use crate::config::{ConfigReader, read_rate_limit};
use crate::parse::tool::read_tool;
use toolgate::call::error::ErrorDialect;
use toolgate::limits::{Budget, Limits};
use toolgate::policy::source::CANARY_AGENT;
use toolgate::policy::source::rule_table;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::policy::{Diagnostic, SourceSpan};
use toolgate::tool::Tool;
use toolgate_json::Pointer;

/// Built-in tools that need a file system.
const FILE_SYSTEM_TOOLS: [&str; 3] = ["read_file", "write_file", "list_files"];

impl ConfigReader<'_> {
    pub(crate) fn read_agent(&self, name: String, table: &TomlTable<'_>) -> AgentConfig {
        if name == CANARY_AGENT {
            let problem = Diagnostic::new(format!(
                "`{CANARY_AGENT}` is reserved for the self-test of the gateway"
            ));
            // At the top level the `name` key is at fault, elsewhere the table itself.
            table.report("name", problem.with_help("choose another name"));
        }
        let principals: Option<Vec<String>> =
            table.names("principals").map(|names| names.into_iter().map(str::to_owned).collect());
        let max_output = table.count("max_output").and_then(|bytes| usize::try_from(bytes).ok());
        let dialect = table.keyword(
            "dialect",
            &[("standard", ErrorDialect::Standard), ("bucket", ErrorDialect::Bucket)],
        );
        let (limits, mut shut) =
            table.table("limits").map(|limits| read_limits(&limits)).unwrap_or_default();
        if principals.as_ref().is_some_and(Vec::is_empty) {
            shut.push(table.span_of("principals"));
        }
        let files = table.text("files").filter(|path| {
            if path.trim().is_empty() {
                let problem = Diagnostic::new("`files` is empty; it must name a directory");
                table.report(
                    "files",
                    problem.with_help("like `files = \"workspace\"`, relative to this file"),
                );
            }
            !path.trim().is_empty()
        });
        let files = files.map(|path| (self.base_dir.join(path), table.span_of("files")));
        // At the top level, `upstreams` declares the servers themselves.
        let upstreams: Option<Vec<String>> = match table.is_table("upstreams") {
            true => None,
            false => {
                table.names("upstreams").map(|names| names.into_iter().map(str::to_owned).collect())
            }
        };
        let named = |name: &String| (name.clone(), table.span_of("upstreams"));
        self.named_upstreams.borrow_mut().extend(upstreams.iter().flatten().map(named));
        let (mut tools, mut grants) = (Vec::new(), Vec::new());
        if let Some(declared) = table.table("tools") {
            for name in declared.keys() {
                let Some(inner) = declared.table(&name) else { continue };
                let place = self.file.span_at(inner.span());
                if !toolgate::tool::name::is_tool_name(&name) {
                    // Tools of clients keep all of their letters, because clients tell them apart
                    // by these.
                    let mapped = match inner.text("kind") == Some("client") {
                        true => Some(toolgate::tool::name::tool_name_from_client(&name))
                            .filter(|name| !name.is_empty()),
                        false => toolgate::tool::name::map_foreign_names([name.as_str()])
                            .names
                            .into_keys()
                            .next(),
                    };
                    let problem = Diagnostic::new(format!(
                        "`{}` is not a valid tool name: use 1 to 64 of a-z, 0-9, `_` and `-`",
                        toolgate_text::escape_for_display(&name)
                    ));
                    let help = mapped.map_or_else(
                        || "use other characters".to_owned(),
                        |mapped| {
                            format!("write `{mapped}`; names that clients use are mapped onto it")
                        },
                    );
                    inner.report("", problem.with_help(help));
                    inner.mark_all_read();
                    continue;
                }
                if inner.bool("skip_client_prompt") == Some(true) {
                    grants.push(name.clone());
                }
                let on_files = inner.text("kind") == Some("builtin")
                    && FILE_SYSTEM_TOOLS.contains(&name.as_str());
                if files.is_none() && on_files {
                    let problem = Diagnostic::new(format!(
                        "`{name}` works on files, but its agent has no `files`"
                    ));
                    inner.report(
                        "kind",
                        problem.with_help(
                            "set a directory: `files = \"workspace\"`, next to `[tools]`",
                        ),
                    );
                }
                match read_tool(&name, &inner, self) {
                    Some((tool, backend)) => {
                        let (section, secrets) = (
                            inner.text("section").map(str::to_owned),
                            self.locate_secrets(&inner, &tool),
                        );
                        tools.push(ToolConfig {
                            tool,
                            span: place,
                            section,
                            backend,
                            secrets,
                            uses_agent_files: on_files,
                        });
                    }
                    // The problem is reported already, and the remaining keys were not read.
                    None => inner.mark_all_read(),
                }
                inner.reject_unknown_keys("a tool");
            }
        }
        let mut included: Vec<(String, String)> = Vec::new();
        for path in table.names("include").unwrap_or_default() {
            let path = self.base_dir.join(path);
            self.included_files.borrow_mut().push(path.clone());
            match toolgate::policy::source::read_file::read_untrusted_text_file(&path) {
                Ok(text) => included.push((path.display().to_string(), text)),
                Err(error) => table.report(
                    "include",
                    Diagnostic::new(format!("{}: {error}", path.display()))
                        .with_help("a path is relative to this file"),
                ),
            }
        }
        let rules = rule_table::read_rules(
            self.file,
            &table.tables("policy"),
            included.iter().map(|(name, text)| (name.as_str(), text.as_str())),
        );
        let tables = table.tables("hooks");
        let hook_places = tables
            .iter()
            .filter_map(|hook| {
                Some((hook.text("name")?.to_owned(), self.file.span_at(hook.span())))
            })
            .collect();
        let hooks = tables.iter().filter_map(|hook| self.read_hook(hook)).collect();
        let (opened, for_client) = (None, false);
        AgentConfig {
            name,
            principals,
            limits,
            zero_limits: shut,
            max_output,
            dialect,
            files,
            open_files: opened,
            is_for_client: for_client,
            tools,
            upstreams,
            granted_tools: grants,
            hooks,
            hook_spans: hook_places,
            rules,
        }
    }

    /// Returns the secrets of a tool with their positions.
    fn locate_secrets(&self, table: &TomlTable<'_>, tool: &Tool) -> Vec<(Pointer, SourceSpan)> {
        let parts = table.part_spans();
        let place = |index: usize| {
            parts.get(&format!("secrets.{index}")).or_else(|| parts.get("secrets")).cloned()
        };
        let named = tool.spec().secrets.iter().enumerate();
        named
            .filter_map(|(index, path)| Some((path.clone(), self.file.span_at(place(index)?))))
            .collect()
    }
}

/// Reads the limits, and collects those of 0 calls.
fn read_limits(table: &TomlTable<'_>) -> (Limits, Vec<SourceSpan>) {
    let budget = |key: &str| {
        let budget = table.table(key).map(|inner| {
            let budget = Budget {
                calls: inner.count("calls"),
                tokens: inner.count("tokens"),
                money: inner.non_negative("money"),
                wall: inner.positive_std_duration("wall_time"),
            };
            inner.reject_unknown_keys("a budget");
            budget
        });
        budget.unwrap_or_default()
    };
    let (session, mut principal) = (budget("session"), budget("principal"));
    if principal.wall.take().is_some()
        && let Some(inner) = table.table("principal")
    {
        let problem = Diagnostic::new(
            "`wall_time` cannot limit a principal, because a principal has no start time",
        );
        inner.report(
            "wall_time",
            problem
                .with_help("set `wall_time` under `session`, or use a `limit` rule with `within`"),
        );
    }
    let rate = read_rate_limit(table);
    table.reject_unknown_keys("limits");
    let most = [
        ("session", session.calls),
        ("principal", principal.calls),
        ("rate", rate.map(|rate| u64::from(rate.calls))),
    ];
    let none = most.into_iter().filter(|(_, calls)| *calls == Some(0));
    let shut =
        none.filter_map(|(key, _)| table.table(key).map(|inner| inner.span_of("calls"))).collect();
    (Limits { session, principal, rate }, shut)
}
