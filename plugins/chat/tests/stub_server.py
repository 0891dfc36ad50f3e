"""A server that speaks just enough of OpenAI's protocol, in threads of this process."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub:
    """What the server does and saw.

    Attributes:
        requests: (path, headers, body) of every request.
        replies: question to what answers it: a list of pieces, (status, JSON) of a refusal, or "forever".
        gone: set when a client left an answer that has no end.
    """

    def __init__(self):
        self.requests = []
        self.replies = {}
        self.gone = threading.Event()
        self.models = {"data": [{"id": "stub-model"}]}
        self.url = ""

    def reply(self, handler):
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        self.requests.append((handler.path, dict(handler.headers), body))
        if body is None:
            return self._send(handler, 200, self.models)
        question = body["messages"][-1]["content"]
        reply = self.replies.get(question, ["re ", question])
        if isinstance(reply, tuple):
            return self._send(handler, *reply)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        if reply == "forever":
            return self._forever(handler)
        events = [e if isinstance(e, (bytes, dict)) else {"choices": [{"delta": {"content": e}}]} for e in reply]
        for event in [{"choices": [{"delta": {"role": "assistant"}}]}, *events]:
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            handler.wfile.write(data)
        if not any(isinstance(event, bytes) for event in events):
            handler.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        return None

    def _forever(self, handler):
        try:
            while not self.gone.wait(0.02):
                handler.wfile.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
        except OSError:
            self.gone.set()

    @staticmethod
    def _send(handler, status, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def serving():
    """A `Stub` that listens on `url`."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            stub.reply(self)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stub
    finally:
        stub.gone.set()
        server.shutdown()
        server.server_close()
