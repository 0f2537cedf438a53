"""Scripts around third-party MCP libraries: clients, and a server."""

# Each script takes its work as one JSON argument, and prints its observations as JSON.
PYTHON = """
import asyncio, json, sys
from mcp import Client, StdioServerParameters

work = json.loads(sys.argv[1])

async def main():
    server = work.get("url") or StdioServerParameters(command=work["command"][0], args=work["command"][1:], env=work["env"])
    async with Client(server, mode=work["mode"]) as client:
        tools = {tool.name: tool.output_schema is not None for tool in (await client.list_tools()).tools}
        results = []
        for name, arguments in work["calls"]:
            try:
                result = await client.call_tool(name, arguments)
            except Exception as error:
                results.append({"thrown": f"{type(error).__name__}: {error}"})
            else:
                text = "\\n".join(block.text for block in result.content)
                results.append({"isError": result.is_error, "structured": result.structured_content, "text": text})
        print(json.dumps({"revision": client.protocol_version, "tools": tools, "results": results}))

asyncio.run(main())
"""

EARLIER_PYTHON = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

work = json.loads(sys.argv[1])

async def main():
    if "url" in work:
        transport = streamable_http_client(work["url"])
    else:
        transport = stdio_client(StdioServerParameters(command=work["command"][0], args=work["command"][1:], env=work["env"]))
    async with transport as streams, ClientSession(streams[0], streams[1]) as client:
        hello = await client.initialize()
        tools = {tool.name: tool.outputSchema is not None for tool in (await client.list_tools()).tools}
        results = []
        for name, arguments in work["calls"]:
            try:
                result = await client.call_tool(name, arguments)
            except Exception as error:
                results.append({"thrown": f"{type(error).__name__}: {error}"})
            else:
                text = "\\n".join(block.text for block in result.content)
                results.append({"isError": result.isError, "structured": result.structuredContent, "text": text})
        print(json.dumps({"revision": hello.protocolVersion, "tools": tools, "results": results}))

asyncio.run(main())
"""

FASTMCP = """
import asyncio, json, sys
from fastmcp import Client
from fastmcp.client.transports import StdioTransport

work = json.loads(sys.argv[1])

async def main():
    server = work.get("url") or StdioTransport(work["command"][0], work["command"][1:], env=work["env"], keep_alive=False)
    async with Client(server) as client:
        tools = {tool.name: tool.output_schema is not None for tool in await client.list_tools()}
        results = []
        for name, arguments in work["calls"]:
            try:
                result = await client.call_tool(name, arguments, raise_on_error=False)
            except Exception as error:
                results.append({"thrown": f"{type(error).__name__}: {error}"})
            else:
                text = "\\n".join(block.text for block in result.content)
                results.append({"isError": result.is_error, "structured": result.structured_content, "text": text})
        print(json.dumps({"revision": client.protocol_version, "tools": tools, "results": results}))

asyncio.run(main())
"""

TYPESCRIPT = """
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const work = JSON.parse(process.argv[2]);
const transport = work.url
  ? new StreamableHTTPClientTransport(new URL(work.url))
  : new StdioClientTransport({ command: work.command[0], args: work.command.slice(1), env: work.env });
let revision = null;
const setVersion = transport.setProtocolVersion?.bind(transport);
transport.setProtocolVersion = (version) => { revision = version; setVersion?.(version); };
const client = new Client({ name: "test", version: "1" });
await client.connect(transport);
const tools = {};
for (const tool of (await client.listTools()).tools) tools[tool.name] = tool.outputSchema !== undefined;
const results = [];
for (const [name, args] of work.calls) {
  try {
    const result = await client.callTool({ name, arguments: args });
    const text = result.content.map((block) => block.text).join("\\n");
    results.push({ isError: result.isError ?? false, structured: result.structuredContent ?? null, text });
  } catch (error) {
    results.push({ thrown: `${error.constructor.name}: ${error.message}` });
  }
}
await client.close();
console.log(JSON.stringify({ revision, tools, results }));
"""

# A server that answers each call with a protocol error.
STRICT = """
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { CallToolRequestSchema, ErrorCode, ListToolsRequestSchema, McpError } from "@modelcontextprotocol/sdk/types.js";

const server = new Server({ name: "strict", version: "1" }, { capabilities: { tools: {} } });
const inputSchema = { type: "object", properties: { word: { type: "string" } } };
server.setRequestHandler(ListToolsRequestSchema, () => ({ tools: [{ name: "look", description: "Looks a word up.", inputSchema }] }));
server.setRequestHandler(CallToolRequestSchema, (request) => {
  throw new McpError(ErrorCode.InvalidParams, `no such word: ${request.params.arguments.word}`);
});
await server.connect(new StdioServerTransport());
"""
