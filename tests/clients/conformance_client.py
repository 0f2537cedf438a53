"""A client of the gateway, which the MCP conformance suite starts when the suite is a server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

from common import Failed, expect, short
from place import COMMAND_SECONDS

CLIENT_SECONDS, ANSWER_SECONDS = 30, 15
OLD, NEW = "2025-11-25", "2026-07-28"

# Streams end after a second. The tool of the suite takes longer, over every transport.
CONFIG = """
store = "ledger.db"

[gateway]
stream_timeout = "1s"

[upstreams.fix]
{connection}
prefix = ""
undeclared = "read"
"""


class Client:
    """A client over the standard streams of a gateway, with the old or the new revision."""

    def __init__(self, process, revision):
        self.process, self.revision, self.number = process, revision, 0
        self.answers, self.arrived, self.has_exited = {}, threading.Condition(), False
        self.on_input_request = lambda: None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            message = json.loads(line)
            if "method" in message and "id" in message:
                # Answering may need another request, so it must not block this thread.
                threading.Thread(target=self._answer, args=[message], daemon=True).start()
            elif "id" in message:
                with self.arrived:
                    self.answers[message["id"]] = message
                    self.arrived.notify_all()
        with self.arrived:
            self.has_exited = True
            self.arrived.notify_all()

    def _send(self, **message):
        line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
        with self.arrived:
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _answer(self, message):
        try:
            result = self.input(message)
        except Failed as error:
            self._send(id=message["id"], error={"code": -32601, "message": str(error)})
        else:
            self._send(id=message["id"], result=result)

    def input(self, request):
        """Answers like a user who accepts the defaults."""
        if request["method"] == "ping":
            return {}
        if request["method"] != "elicitation/create":
            raise Failed(f"unsupported request {request['method']}")
        self.on_input_request()
        fields = request["params"]["requestedSchema"]["properties"]
        content = {name: field.get("default", True) for name, field in fields.items()}
        return {"action": "accept", "content": content}

    def request(self, method, **params):
        """Returns the result of a request, and answers its input requests.

        An error is a failure.
        """
        for _ in range(5):
            result = self._once(method, params)
            if result.get("resultType") != "input_required":
                return result
            requests = result.get("inputRequests") or {}
            params = {**params, "inputResponses": {name: self.input(request) for name, request in requests.items()}}
            params.pop("requestState", None)
            if "requestState" in result:
                params["requestState"] = result["requestState"]
        raise Failed(f"{method} requests input too often")

    def _once(self, method, params):
        if self.revision == NEW:
            meta = {"protocolVersion": NEW, "clientInfo": {"name": "test", "version": "1"}, "clientCapabilities": {"elicitation": {}}}
            params = {**params, "_meta": {f"io.modelcontextprotocol/{name}": value for name, value in meta.items()}}
        with self.arrived:
            self.number += 1
            number = self.number
        self._send(id=number, method=method, params=params)
        with self.arrived:
            is_answered = self.arrived.wait_for(lambda: number in self.answers or self.has_exited, ANSWER_SECONDS)
            answer = self.answers.pop(number, None)
        expect(is_answered, f"no answer to {method} within {ANSWER_SECONDS} s")
        expect(answer, f"the gateway exited before it answered {method}")
        print(f"{method} {json.dumps(params)}\n  {json.dumps(answer)}", flush=True)
        expect("result" in answer, f"{method}: {answer.get('error')}")
        return answer["result"]

    def greet(self):
        if self.revision == NEW:
            return self.request("server/discover")
        client_info = {"name": "test", "version": "1"}
        answer = self.request("initialize", protocolVersion=OLD, capabilities={"elicitation": {}}, clientInfo=client_info)
        self._send(method="notifications/initialized")
        return answer

    def tools(self, expected=None):
        """Returns the offered tools once the expected one is among them."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            tools = {tool["name"]: tool for tool in self.request("tools/list")["tools"]}
            if expected is None or expected in tools:
                return tools
            expect(time.monotonic() < deadline, f"`{expected}` is not offered, but {list(tools)}")
            time.sleep(0.05)

    def call(self, tool, arguments=None):
        """Makes a call that must succeed."""
        result = self.request("tools/call", name=tool, arguments=arguments or {})
        expect(not result.get("isError"), f"{tool}: {json.dumps(result)}")
        return result


def play(scenario, client, context):
    """Performs the requests of a scenario."""
    if scenario == "tools_call":
        client.tools("add_numbers")
        client.call("add_numbers", {"a": 5, "b": 3})
    elif scenario == "elicitation-sep1034-client-defaults":
        client.tools("test_client_elicitation_defaults")
        client.call("test_client_elicitation_defaults")
    elif scenario == "sse-retry":
        client.tools("test_reconnection")
        client.call("test_reconnection")
    elif scenario == "sep-2322-client-request-state":
        client.tools("test_mrtr_echo_state")
        # Another call is made while the first one waits for its user.
        client.on_input_request = lambda: client.call("test_mrtr_unrelated")
        client.call("test_mrtr_echo_state")
        client.on_input_request = lambda: None
        client.call("test_mrtr_no_state")
        client.call("test_mrtr_no_result_type")
    elif scenario == "http-standard-headers":
        client.tools("test_headers")
        for tool in ("test_headers", "my-hyphenated-tool"):
            client.call(tool)
        for resource in client.request("resources/list")["resources"]:
            client.request("resources/read", uri=resource["uri"])
        for prompt in client.request("prompts/list")["prompts"]:
            client.request("prompts/get", name=prompt["name"])
    elif scenario == "http-custom-headers":
        client.tools("test_custom_headers")
        for call in context["toolCalls"]:
            # The gate rejects null as a boolean. An omitted value must not be sent as a header
            # either.
            client.call(call["name"], {name: value for name, value in call["arguments"].items() if value is not None})
    elif scenario == "http-invalid-tool-headers":
        offered = [tool for tool in client.tools("valid_tool") if tool != "valid_tool"]
        expect(not offered, f"invalid tools are offered: {offered}")
        client.call("valid_tool", {"region": "us-west1"})
    elif scenario == "json-schema-2020-12-preservation":
        tool = client.tools("json_schema_2020_12_tool")["json_schema_2020_12_tool"]
        client.call("json_schema_echo", {"schema": tool["inputSchema"]})
    else:
        client.tools()


def as_client(toolgate, revision, url):
    """Entry point for the suite: starts a gateway with the suite's server as upstream, and a client
    of the gateway.
    """
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"FAILED  the client took more than {CLIENT_SECONDS} s"))
    signal.alarm(CLIENT_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "toolgate.toml")
        context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
        settings = f'url = "{url}"'
        if "client_secret" in context:
            settings += f"\noauth = {{ issuer = {json.dumps(issuer(url))}, client_id = {json.dumps(context['client_id'])}"
            settings += f", client_secret = {json.dumps(context['client_secret'])} }}"
        config.write_text(CONFIG.format(connection=settings))
        command = [toolgate, "serve", "--stdio", "--verbose", "--config", config]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        gateway = subprocess.Popen(command, env={**os.environ, "TOOLGATE_STATE": f"{folder}/state"}, **streams)
        try:
            down_lines = wait_for_upstream(gateway)
            client = Client(gateway, revision)
            client.greet()
            play(os.environ["MCP_CONFORMANCE_SCENARIO"], client, context)
            gateway.stdin.close()
            code = gateway.wait(COMMAND_SECONDS)
            expect(code == 0, f"the gateway exited with {code}")
            expect(not down_lines, f"the upstream was unavailable at first: {down_lines}")
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            sys.exit(f"FAILED  {short(str(error))}")
        finally:
            gateway.kill()
            gateway.wait()


def issuer(url):
    """Returns the token issuer of the suite's server. A real configuration states it."""
    location = urllib.parse.urlsplit(url)
    with urllib.request.urlopen(f"{location.scheme}://{location.netloc}/.well-known/oauth-protected-resource{location.path}") as response:
        return json.load(response)["authorization_servers"][0]


def wait_for_upstream(gateway):
    """Waits until the gateway logs that its upstream is available, and returns earlier log lines
    that it is not.
    """
    down_lines, is_up = [], threading.Event()

    def listen():
        for line in gateway.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if "upstream is down" in line and not is_up.is_set():
                down_lines.append(line)
            if "upstream is up" in line:
                is_up.set()

    threading.Thread(target=listen, daemon=True).start()
    expect(is_up.wait(ANSWER_SECONDS), f"the upstream was not available within {ANSWER_SECONDS} s: {down_lines}")
    return " ".join(down_lines)
