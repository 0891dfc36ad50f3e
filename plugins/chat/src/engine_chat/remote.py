"""A server answers, by OpenAI's protocol, with the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from engine.types.errors import ConfigError, EngineError, KVCacheTooSmallError, PromptTooLongError
from engine_chat.backend import Message, Piece

CONNECT_SECONDS = 10.0


class ServerError(EngineError, code="server_error"):
    """The server cannot be reached, refuses a request, or answers what cannot be understood."""


class RemoteBackend:
    """A server's `/chat/completions`.

    Args:
        url: of the API, e.g. "http://127.0.0.1:8000/v1".
        model: as the server calls it; None asks the server what it has.
        api_key: sent as a bearer token; None sends none.
        sampling: parameters of every answer, by their names in a request's body.

    Raises ServerError where the server does not tell its models.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.url = complete_url(url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = dict(sampling or {})
        served = self._models()
        self.limited = "max_tokens" in self._sampling or any(served.values())
        if model is None and not served:
            raise ServerError(f"chat with {self.url}", "the server serves no model", "name one with --model")
        self.model = next(iter(served)) if model is None else model

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._sampling}
        connection, response = self._send("POST", "/chat/completions", json.dumps(body).encode())
        try:
            for event in self._events(response):
                if "error" in event:
                    raise self._refusal(response.status, event)
                for choice in event.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content") or ""
                    yield Piece(text, choice.get("finish_reason"), choice.get("stop_reason"))
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()  # an unfinished answer ends on the server too

    def close(self) -> None:
        """Nothing is held between two answers."""

    def _models(self) -> dict[str, bool]:
        """Its models, and whether each has answers of a default length, as this engine's servers tell."""
        connection, response = self._send("GET", "/models")
        try:
            answer = json.loads(response.read())
            return {
                str(model["id"]): "max_tokens" in (model.get("default_sampling_params") or ())
                for model in answer["data"]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"ask {self.url} for its models", "its answer is none of OpenAI's protocol", "check --url"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt takes its time; Ctrl-C is at hand
            connection.request(method, parts.path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response.status, _refusal_body(response.read()))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Server-sent events. An answer that ends without "[DONE]" was broken off."""
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise ServerError(f"read an answer of {self.url}", f"an event is no JSON object: {data[:80]!r}")
            yield event
        raise ServerError(f"read an answer of {self.url}", "the server broke it off", "ask again, or see its log")

    def _refusal(self, status: int, answer: Mapping[str, Any]) -> EngineError:
        error = answer.get("error")
        told = error if isinstance(error, dict) else {}
        message = str(
            told.get("message") or answer.get("message") or answer.get("detail") or error or "no reason given"
        )
        asked = f"chat with {self.url}"
        if told.get("code") == PromptTooLongError.code or "context length" in message:
            return PromptTooLongError(asked, message)
        if told.get("code") == KVCacheTooSmallError.code:
            return KVCacheTooSmallError(asked, message)
        remedies = {
            401: "pass the server's key with --api-key, or set ENGINE_API_KEY",
            404: "check the path of --url (most servers end in /v1) and --model",
            429: "the server is busy: ask again in a while",
            503: "the server is starting, stopping or overloaded: ask again in a while",
        }
        return ServerError(asked, f"status {status}: {message}", remedies.get(status, ""))

    def _unreachable(self, error: Exception) -> ServerError:
        reason = str(error) or type(error).__name__
        return ServerError(f"reach {self.url}", reason, "is the server running? `engine serve` starts one")


def complete_url(url: str) -> str:
    """The API's address: "http://" and "/v1" may be left out. Raises ConfigError for what is no address."""
    url = url.strip()
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"chat with --url {url!r}", "it is no address of a server", "as in http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _refusal_body(text: bytes) -> dict[str, Any]:
    """The JSON of a refusal, or what a proxy says in plain words."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {} if text.lstrip().startswith(b"<") else {"message": text[:200].decode(errors="replace").strip()}
    return answer if isinstance(answer, dict) else {}
