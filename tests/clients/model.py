"""A scripted model that replaces a paid Messages API in tests of real clients.

It listens on 127.0.0.1 and answers `POST /v1/messages` from a list of turns: as server-sent events
if the client asks for a stream, else as JSON. The model does not interpret anything. Turn n is the
answer to a conversation with n earlier tool requests. It keeps every request, so a test can see
what a model would have read.

    with Model([Tool("Bash", {"command": "true"}), "done"]) as model:
        run_client(base_url=model.url)
        model.results()

By hand: `python3 model.py '[{"name": "Bash", "input": {"command": "true"}}, "done"]'` prints its
address, then each request as a line of JSON.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Tool(NamedTuple):
    """A tool call.

    A turn is one of these, a list of them (made at once), or a string: the final text.
    """

    name: str
    input: dict


class Result(NamedTuple):
    """What the client sent back to the model for one tool call."""

    id: str
    text: str
    is_error: bool


class Request(NamedTuple):
    """A request as it arrived; `body` is None when it was not JSON."""

    method: str
    path: str
    body: object


class Model:
    """The server.

    Use it as a context manager. `url` is its address, and `requests` has all requests.
    """

    def __init__(self, turns):
        self.turns = list(turns)
        self.requests = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"model": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def record(self, request):
        with self._lock:
            self.requests.append(request)

    def answer(self, body):
        """Returns the content blocks and the stop reason for a conversation."""
        if not body.get("tools"):
            # Side calls, such as the one that names the session, have no tools and do not belong to
            # the script.
            return [{"type": "text", "text": "ok"}], "end_turn"
        made = sum(bool(_blocks({"messages": [m]}, "assistant", "tool_use")) for m in body.get("messages", []))
        turn = self.turns[made] if made < len(self.turns) else "The script has ended."
        if isinstance(turn, str):
            return [{"type": "text", "text": turn}], "end_turn"
        tools = [turn] if isinstance(turn, Tool) else turn
        return [
            {"type": "tool_use", "id": f"toolu_{made:02}{index:02}", "name": tool.name, "input": tool.input}
            for index, tool in enumerate(tools)
        ], "tool_use"

    def conversation(self):
        """Returns the longest conversation, which has everything that the model was sent."""
        with self._lock:
            bodies = [
                r.body
                for r in self.requests
                if r.method == "POST" and _path(r) == "/v1/messages" and isinstance(r.body, dict) and r.body.get("tools")
            ]
        return max(bodies, key=lambda body: len(body.get("messages", [])), default={})

    def results(self):
        """Returns the results that the model read, in the order of the calls."""
        return [
            Result(block.get("tool_use_id", ""), _text(block.get("content")), bool(block.get("is_error")))
            for block in _blocks(self.conversation(), "user", "tool_result")
        ]

    def other_text(self):
        """Returns all text besides tool results: prompt, reminders, and text from hooks."""
        return "\n".join(block.get("text", "") for block in _blocks(self.conversation(), None, "text"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    model = None

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._take()
        self._send(200, None)

    def do_GET(self):
        self._take()
        if self.path.startswith("/v1/models"):
            self._send(200, {"data": [], "has_more": False, "first_id": None, "last_id": None})
        else:
            self._send(404, _error("not_found_error", "The scripted model has no such page."))

    def do_POST(self):
        body = self._take()
        path = self.path.split("?")[0]
        if path == "/v1/messages/count_tokens":
            self._send(200, {"input_tokens": 10})
        elif path != "/v1/messages":
            self._send(404, _error("not_found_error", "The scripted model has no such page."))
        elif not isinstance(body, dict):
            self._send(400, _error("invalid_request_error", "The body is not a JSON object."))
        elif body.get("stream"):
            self._stream(body)
        else:
            content, stop = self.model.answer(body)
            self._send(200, _message(body, content, stop))

    def _take(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        self.model.record(Request(self.command, self.path, body))
        return body

    def _send(self, status, value):
        raw = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, body):
        content, stop = self.model.answer(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in _events(body, content, stop):
                self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        except OSError:
            pass
        self.close_connection = True


def _events(body, content, stop):
    """Yields the events of one streamed answer of the Messages API."""
    yield {"type": "message_start", "message": _message(body, [], None)}
    for index, block in enumerate(content):
        if block["type"] == "text":
            empty, kind, field, whole = {"type": "text", "text": ""}, "text_delta", "text", block["text"]
        else:
            empty, kind, field, whole = {**block, "input": {}}, "input_json_delta", "partial_json", json.dumps(block["input"])
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        middle = len(whole) // 2
        for piece in (whole[:middle], whole[middle:]):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: piece}}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 10}}
    yield {"type": "message_stop"}


def _message(body, content, stop):
    return {
        "id": f"msg_{len(body.get('messages', [])):04}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "scripted"),
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 10},
    }


def _error(kind, message):
    return {"type": "error", "error": {"type": kind, "message": message}}


def _path(request):
    return request.path.split("?")[0]


def _blocks(body, role, kind):
    """Returns the content blocks of one kind in a conversation, from one role or from all."""
    found = []
    for message in body.get("messages", []):
        if role is None or message.get("role") == role:
            content = message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            found += [block for block in blocks if block.get("type") == kind]
    return found


def _text(content):
    """Returns the content of a tool result as text."""
    if isinstance(content, list):
        return "\n".join(block.get("text", json.dumps(block)) for block in content)
    return content or ""


def main():
    turns = [turn if isinstance(turn, str) else Tool(turn["name"], turn["input"]) for turn in json.loads(sys.argv[1])]
    model = Model(turns)
    print(model.url, flush=True)
    model.record = lambda request: print(json.dumps(request._asdict()), flush=True)
    model._server.serve_forever()


if __name__ == "__main__":
    main()
