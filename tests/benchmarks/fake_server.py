"""A server of the tests: it streams chats and counts instead of computing; its second word: how it goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from typing import Any

BUSY_AFTER = {"busy": 10, "half": 5}
"""Chats that one who will be busy answers: all of the warm-up, or half of it."""
_CHATS = itertools.count()


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    content = b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(content), content)


def _choice(content: str, end: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {"content": content}, "finish_reason": end}]


def _chat(body: dict[str, Any], fault: str) -> bytes:
    words = sum(len(message["content"].split()) for message in body["messages"])
    count = body["max_tokens"] - (fault == "short")
    events = [_event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])]
    events += [_event(_choice("word ")) for _ in range(count)]
    events.append(_event(_choice("", "stop" if fault == "stop" else "length")))
    usage = {"prompt_tokens": words + (fault == "template"), "completion_tokens": count}
    events.append(_event([], usage=usage))
    done = b"data: [DONE]\n\n"
    return b"".join([*events, b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done)])


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    sizes = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    body = await reader.readexactly(int(sizes[0]) if sizes else 0)
    path = head.split(b" ", 2)[1]
    status, kind, content = b"200 OK", b"content-type: application/json\r\n", b"{}"
    if path == b"/v1/models":
        content = b'{"data": [{"id": "fake"}]}'
    elif path == b"/v1/chat/completions" and fault in BUSY_AFTER and next(_CHATS) > BUSY_AFTER[fault]:
        status = b"503 Service Unavailable"
    elif path == b"/v1/chat/completions":
        kind, content = b"transfer-encoding: chunked\r\n", _chat(json.loads(body), fault)
    elif path != b"/health":
        status = b"404 Not Found"
    writer.write(b"HTTP/1.1 " + status + b"\r\n" + kind + b"connection: close\r\n\r\n" + content)
    writer.close()


async def _serve(port: int, fault: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with await asyncio.start_server(lambda r, w: _answer(r, w, fault), "127.0.0.1", port):
        await stopped.wait()


if __name__ == "__main__":
    if sys.argv[2] == "die":
        sys.exit("out of everything")
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
