//! Answers list requests: tools, prompts, resources and resource templates, in pages.

use std::collections::HashSet;

use rmcp::model::*;
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};

use crate::mcp_convert;
use crate::resources;
use crate::server::handler::McpServer;

/// Maximum number of entries on a page of a list.
const MAX_PAGE_ENTRIES: usize = 200;

impl McpServer {
    /// Returns a page of the tools of an agent that the caller sees and this process runs.
    pub(super) async fn tools_page(
        &self,
        request: Option<PaginatedRequestParams>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let running = self.gateway.active_config();
        let (principal, name) = self.principal_and_agent(&running, context)?;
        let agent = running
            .runtime
            .agent(&name)
            .ok_or_else(|| ErrorData::invalid_request("unknown agent", None))?;
        let specs: Vec<_> =
            agent.tools_for(&principal).filter(|spec| !spec.is_run_by_client()).collect();
        let (specs, next) = paginate(&specs, request.as_ref())?;
        let tools = specs.into_iter().map(|spec| {
            let remote =
                running.exposed.get(&(name.clone(), spec.name().to_owned())).and_then(|exposed| {
                    let link = running.upstreams.supervisor(&exposed.upstream)?;
                    link.catalog().tools.iter().find(|tool| tool.name == exposed.tool).cloned()
                });
            mcp_convert::render_tool(spec, remote.as_ref())
        });
        let mut result = ListToolsResult::with_all_items(tools.collect());
        result.next_cursor = next;
        Ok(result)
    }

    /// Returns a page of the prompts of all upstreams of an agent.
    pub(super) async fn prompts_page(
        &self,
        request: Option<PaginatedRequestParams>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, context).await?;
        let links = running
            .upstreams_by_agent
            .get(&agent)
            .into_iter()
            .flatten()
            .filter(|link| link.upstream.exposes_prompts);
        let catalogs: Vec<_> = links.map(|link| (link, link.catalog())).collect();
        let (mut names, mut found) = (HashSet::new(), Vec::new());
        for (link, catalog) in &catalogs {
            for prompt in &catalog.prompts {
                let name = format!("{}{}", link.upstream.prefix, prompt.name);
                // Of several prompts with one name, `get_prompt` uses the first.
                if names.insert(name.clone()) {
                    found.push((name, prompt));
                }
            }
        }
        let (found, next) = paginate(&found, request.as_ref())?;
        let named = found.into_iter().map(|(name, prompt)| {
            let mut prompt = prompt.clone();
            prompt.name = name;
            prompt.meta = prompt.meta.map(mcp_convert::strip_reserved_keys);
            prompt
        });
        let mut result = ListPromptsResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }

    /// Returns a page of the resources of all upstreams of an agent.
    pub(super) async fn resources_page(
        &self,
        request: Option<PaginatedRequestParams>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, context).await?;
        let links = running
            .upstreams_by_agent
            .get(&agent)
            .into_iter()
            .flatten()
            .filter(|link| link.upstream.exposes_resources);
        let catalogs: Vec<_> = links.map(|link| (link, link.catalog())).collect();
        let mut found = Vec::new();
        for (link, catalog) in &catalogs {
            found.extend(
                catalog
                    .resources
                    .iter()
                    .filter(|resource| resources::is_allowed_uri(link, &resource.uri))
                    .map(|resource| (*link, resource)),
            );
        }
        let (found, next) = paginate(&found, request.as_ref())?;
        let named = found.into_iter().map(|(link, resource)| {
            let mut resource = resource.clone();
            resource.uri = resources::client_address(link, &resource.uri);
            resource.meta = resource.meta.map(mcp_convert::strip_reserved_keys);
            resource
        });
        let mut result = ListResourcesResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }

    /// Returns a page of the resource templates of all upstreams of an agent.
    pub(super) async fn resource_templates_page(
        &self,
        request: Option<PaginatedRequestParams>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, context).await?;
        let links = running
            .upstreams_by_agent
            .get(&agent)
            .into_iter()
            .flatten()
            .filter(|link| link.upstream.exposes_resources);
        let catalogs: Vec<_> = links.map(|link| (link, link.catalog())).collect();
        let mut found = Vec::new();
        for (link, catalog) in &catalogs {
            found.extend(
                catalog
                    .templates
                    .iter()
                    .filter(|template| resources::is_allowed_uri(link, &template.uri_template))
                    .map(|template| (*link, template)),
            );
        }
        let (found, next) = paginate(&found, request.as_ref())?;
        let named = found.into_iter().map(|(link, template)| {
            let mut template = template.clone();
            template.uri_template = resources::client_address(link, &template.uri_template);
            template.meta = template.meta.map(mcp_convert::strip_reserved_keys);
            template
        });
        let mut result = ListResourceTemplatesResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }
}

/// Returns one page of a list and the cursor of the next page.
fn paginate<T: Clone>(
    all: &[T],
    request: Option<&PaginatedRequestParams>,
) -> Result<(Vec<T>, Option<String>), ErrorData> {
    let begin = match request.and_then(|request| request.cursor.as_deref()) {
        None => 0,
        Some(cursor) => cursor
            .parse::<usize>()
            .ok()
            .filter(|at| *at <= all.len())
            .ok_or_else(|| ErrorData::invalid_params("unknown cursor", None))?,
    };
    let part: Vec<T> = all.iter().skip(begin).take(MAX_PAGE_ENTRIES).cloned().collect();
    let next = begin + part.len();
    Ok((part, (next < all.len()).then(|| next.to_string())))
}
