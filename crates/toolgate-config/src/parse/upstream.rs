//! Reads `[upstreams.NAME]` tables: MCP servers that provide tools.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::ConfigReader;
use crate::secret_ref::SecretRef;
use toolgate::call::error::CallEffects;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::table_reader::TomlTable;

use crate::mcp_servers_json::parse_mcp_servers;
use crate::upstream_config::{
    Credentials, ErrorPattern, TokenSource, UndeclaredToolPolicy, UpstreamConfig, UpstreamTransport,
};

impl ConfigReader<'_> {
    /// Reads all upstreams: those of this file, and those of files in the format of clients.
    pub(crate) fn read_upstreams(&self, table: &TomlTable<'_>) -> Vec<UpstreamConfig> {
        let mut found: Vec<UpstreamConfig> = Vec::new();
        if let Some(inner) = table.table("upstreams") {
            for name in inner.keys() {
                let Some(upstream) = inner.table(&name) else { continue };
                found.extend(self.read_upstream(&name, &upstream));
                upstream.reject_unknown_keys("an upstream");
            }
        }
        // Maps each server of another file to that file.
        let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
        for path in table.names("mcp_servers").unwrap_or_default() {
            let path = self.base_dir.join(path);
            self.included_files.borrow_mut().push(path.clone());
            match toolgate::policy::source::read_file::read_untrusted_text_file(&path)
                .map_err(|error| error.to_string())
                .and_then(|text| parse_mcp_servers(&text))
            {
                Ok(servers) => {
                    for server in servers {
                        let Some(known) = found.iter_mut().find(|known| known.name == server.name)
                        else {
                            files.insert(server.name.clone(), path.clone());
                            found.push(UpstreamConfig {
                                span: Some(table.span_of("mcp_servers")),
                                ..server
                            });
                            continue;
                        };
                        // This file takes precedence over other files, and identical servers in two
                        // files count as one.
                        if let Some(file) =
                            files.get(&server.name).filter(|_| !known.is_same_server(&server))
                        {
                            let (file, path, name) = (file.display(), path.display(), &server.name);
                            let problem = Diagnostic::new(format!(
                                "{file} and {path} both define a server `{name}`, but differently"
                            ));
                            let help = format!(
                                "rename one of them, or define the server here in `[upstreams.{name}]`"
                            );
                            table.report("mcp_servers", problem.with_help(help));
                        }
                    }
                }
                Err(reason) => {
                    let problem = Diagnostic::new(format!("{}: {reason}", path.display()));
                    table.report(
                        "mcp_servers",
                        problem.with_help("expected a JSON file with `mcpServers`, as clients use it, relative to this file"),
                    );
                }
            }
        }
        found
    }

    fn read_upstream(&self, name: &str, table: &TomlTable<'_>) -> Option<UpstreamConfig> {
        if !is_upstream_name(name) {
            let problem = Diagnostic::new(format!(
                "`{}` is not a valid upstream name",
                toolgate_text::escape_for_display(name)
            ));
            table.report("", problem.with_help("use 1 to 32 of a-z, 0-9, `_` and `-`"));
            table.mark_all_read();
            return None;
        }
        let transport = match (table.has_key("command"), table.has_key("url")) {
            (true, false) => self.read_child_transport(table),
            (false, true) => self.read_http_transport(table),
            (both, _) => {
                let message = if both {
                    "an upstream has a `command` or a `url`, not both"
                } else {
                    "an upstream needs a `command` or a `url`"
                };
                table.report(
                    if both { "url" } else { "" },
                    Diagnostic::new(message).with_help("like `command = \"mcp-server-git\"`"),
                );
                // Mark the keys of both transports, because either may be intended.
                UPSTREAM_KEYS.into_iter().for_each(|key| table.mark_read(key));
                None
            }
        };
        let mut upstream = UpstreamConfig {
            span: Some(table.span_of("")),
            ..UpstreamConfig::new(name, transport?)
        };
        if let Some(prefix) = table.text("prefix") {
            if prefix.is_empty() || is_upstream_name(prefix) {
                upstream.prefix = prefix.to_owned();
            } else {
                table.report(
                    "prefix",
                    Diagnostic::new("a prefix may contain only a-z, 0-9, `_` and `-`")
                        .with_help("like `prefix = \"git_\"`, or `\"\"`"),
                );
            }
        }
        let words = [
            ("deny", UndeclaredToolPolicy::Deny),
            ("ask", UndeclaredToolPolicy::Ask),
            ("open", UndeclaredToolPolicy::Open),
            ("read", UndeclaredToolPolicy::Read),
        ];
        upstream.undeclared = table.keyword("undeclared", &words).unwrap_or_default();
        // If undeclared tools are offered, prompts and resources are offered too.
        let shares = upstream.undeclared != UndeclaredToolPolicy::Deny;
        upstream.exposes_prompts = table.bool("prompts").unwrap_or(shares);
        upstream.exposes_resources = table.bool("resources").unwrap_or(shares);
        upstream.timeout = table.positive_std_duration("timeout").unwrap_or(upstream.timeout);
        if let Some(most) = table.concurrency("concurrency") {
            upstream.max_concurrency = most.min(4096);
        }
        upstream.errors = table.tables("errors").iter().filter_map(read_error_pattern).collect();
        upstream.detects_text_errors = !table.has_key("errors");
        Some(upstream)
    }

    fn read_child_transport(&self, table: &TomlTable<'_>) -> Option<UpstreamTransport> {
        let program = table.text("command")?;
        let words = table.names("args").unwrap_or_default();
        self.record_files_in_args(&words);
        let mut args = Vec::new();
        for word in words {
            match SecretRef::parse(word) {
                Ok(word) => args.push(word.with_span(table.span_of("args"))),
                Err(reason) => {
                    table.report("args", Diagnostic::new(reason).with_help("like `${HOME}/notes`"))
                }
            }
        }
        let inherit =
            table.names("inherit_env").unwrap_or_default().into_iter().map(str::to_owned).collect();
        let directory = table.text("directory").map(|path| self.base_dir.join(path));
        Some(UpstreamTransport::Command {
            program: self.resolve_program(program),
            args,
            env: self.read_references(table, "env"),
            inherit,
            directory,
        })
    }

    fn read_http_transport(&self, table: &TomlTable<'_>) -> Option<UpstreamTransport> {
        let url = self.read_reference(table, "url");
        let headers = self.read_references(table, "headers");
        table.mark_read("bearer");
        let credentials = match (table.has_key("bearer"), table.table("oauth")) {
            (true, None) => self.read_reference(table, "bearer").map(Credentials::Bearer),
            (false, Some(oauth)) => self.read_oauth(&oauth),
            (true, Some(oauth)) => {
                oauth.mark_all_read();
                table.report(
                    "bearer",
                    Diagnostic::new("an upstream has `bearer` or `oauth`, not both")
                        .with_help("remove one of them"),
                );
                None
            }
            (false, None) => Some(Credentials::None),
        };
        let sse = table.keyword("transport", &[("http", false), ("sse", true)]);
        Some(UpstreamTransport::Http { url: url?, headers, credentials: credentials?, sse })
    }

    fn read_oauth(&self, table: &TomlTable<'_>) -> Option<Credentials> {
        for key in ["client_id", "client_secret"] {
            if !table.has_key(key) {
                table.report(
                    key,
                    Diagnostic::new(format!("`oauth` needs a `{key}`"))
                        .with_help(format!("like `{key} = \"…\"`")),
                );
            }
        }
        let source = match (table.text("issuer"), table.text("token_url")) {
            (Some(issuer), None) => Some(TokenSource::Issuer(issuer.to_owned())),
            (None, Some(url)) => Some(TokenSource::Url(url.to_owned())),
            (None, None) => {
                let problem = Diagnostic::new("`oauth` needs an `issuer` or a `token_url`");
                table.report(
                    "issuer",
                    problem.with_help("like `issuer = \"https://auth.example.com\"`"),
                );
                None
            }
            (Some(_), Some(_)) => {
                table.report(
                    "token_url",
                    Diagnostic::new("`oauth` has an `issuer` or a `token_url`, not both")
                        .with_help("remove one of them"),
                );
                None
            }
        };
        let (client_id, client_secret) = (
            table.has_key("client_id").then(|| self.read_reference(table, "client_id")).flatten(),
            table
                .has_key("client_secret")
                .then(|| self.read_reference(table, "client_secret"))
                .flatten(),
        );
        let scope = table.text("scope").map(str::to_owned);
        table.reject_unknown_keys("`oauth`");
        Some(Credentials::ClientCredentials {
            source: source?,
            client_id: client_id?,
            client_secret: client_secret?,
            scope,
        })
    }
}

/// All keys of an upstream, for both transports.
const UPSTREAM_KEYS: [&str; 17] = [
    "command",
    "url",
    "args",
    "env",
    "inherit_env",
    "directory",
    "headers",
    "bearer",
    "oauth",
    "transport",
    "prefix",
    "undeclared",
    "prompts",
    "resources",
    "timeout",
    "concurrency",
    "errors",
];

/// Maximum length of an upstream name.
pub(crate) const MAX_UPSTREAM_NAME_CHARS: usize = 32;

fn is_upstream_name(name: &str) -> bool {
    name.len() <= MAX_UPSTREAM_NAME_CHARS && toolgate::tool::name::is_tool_name(name)
}

fn read_error_pattern(table: &TomlTable<'_>) -> Option<ErrorPattern> {
    for (key, example) in [
        ("matches", "matches = 'not found'"),
        ("category", "category = \"BUSINESS\""),
        ("code", "code = \"not_found\""),
    ] {
        if !table.has_key(key) {
            table.report(
                key,
                Diagnostic::new(format!("a pattern of `errors` needs a `{key}`"))
                    .with_help(format!("like `{example}`")),
            );
        }
    }
    let matches = table.text("matches").and_then(|text| match regex::Regex::new(text) {
        Ok(regex) => Some(regex),
        Err(_) => {
            let problem = Diagnostic::new(format!(
                "`{}` is not a valid regular expression",
                toolgate_text::escape_for_display(text)
            ));
            table.report("matches", problem.with_help("use the syntax of the `regex` crate"));
            None
        }
    });
    let category = table.category();
    let code = table.text("code").map(str::to_owned);
    let words = [
        ("none", CallEffects::None),
        ("done", CallEffects::Done),
        ("unknown", CallEffects::Unknown),
    ];
    let effects = table.keyword("effects", &words).unwrap_or(CallEffects::Done);
    table.reject_unknown_keys("a pattern of `errors`");
    Some(ErrorPattern { matches: matches?, category: category?, code: code?, effects })
}
