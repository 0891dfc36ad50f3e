"""A chat template in place of the model's, variables for it, several names, and usage in every stream: vLLM's flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine import LLM
from engine.errors import ConfigError

from .conftest import Server

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }} {{ tone | default('dry') }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER: Any = [{"role": "user", "content": "Hello"}]


def test_a_server_with_flags_of_vllm(tmp_path: Path) -> None:
    (path := tmp_path / "mine.jinja").write_text(TEMPLATE)
    flags = ["--chat-template", str(path), "--default-chat-template-kwargs", '{"tone": "kind"}']
    flags += ["--served-model-name", "tiny, gpt-x", "--enable-force-include-usage"]
    server = Server("tiny", "--max-model-len", "256", *flags)
    try:
        create: Any = server.client().chat.completions.create
        asked: Any = {"model": "tiny", "messages": USER, "max_tokens": 2}
        told = {"return_prompt_text": True}
        assert create(**asked, extra_body=told).prompt_text == "<user kind>Hello\n<assistant>"
        own = {**told, "chat_template_kwargs": {"tone": "short"}}
        assert create(**asked, extra_body=own).prompt_text == "<user short>Hello\n<assistant>"
        ids = httpx.post(server.address + "/tokenize", json={"messages": USER}, timeout=30).json()["tokens"]
        shown = httpx.post(server.address + "/detokenize", json={"tokens": ids}, timeout=30).json()["prompt"]
        assert shown == "<user kind>Hello\n<assistant>"
        assert [model.id for model in server.client().models.list()] == ["tiny", "gpt-x"]
        for model in ("tiny", "gpt-x"):
            for stream in (
                create(**asked | {"model": model, "stream": True}),
                server.client().completions.create(model=model, prompt="Hi", max_tokens=2, stream=True),
            ):
                *_, last = stream
                assert last.model == model and last.choices == [] and last.usage.completion_tokens > 0
        with pytest.raises(openai.NotFoundError, match="tiny, gpt-x"):
            create(**asked | {"model": "other"})
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        body = {**asked, "tools": [tool]}
        refused = httpx.post(server.address + "/v1/chat/completions", json=body, timeout=30)
        assert refused.status_code == 400 and "no place for them" in refused.json()["error"]["message"]
    finally:
        assert server.stop() == 0, "".join(server.lines)


def test_offline_with_the_text_itself() -> None:
    settings = {"default_chat_template_kwargs": {"tone": "kind"}, "max_model_len": 64, "num_kv_pages": 100}
    llm = LLM("tiny", chat_template=TEMPLATE, **settings)
    try:
        (output,) = llm.chat(USER, use_tqdm=False)
        assert output.prompt == "<user kind>Hello\n<assistant>"
        (output,) = llm.chat(USER, use_tqdm=False, chat_template="{{ messages[0].content }}")
        assert output.prompt == "Hello"
    finally:
        llm.shutdown()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chat_template": "none.jinja"}, "as a file: No such file"),
        ({"chat_template": "{% for %}"}, "broken at line 1.*mend the template"),
        ({"chat_template": "{{ raise_exception('not you') }}"}, "refuses them: not you"),
        ({"default_chat_template_kwargs": {"messages": []}}, "made from the request; leave it out"),
        ({"default_chat_template_kwargs": "[1]"}, "it is no object"),
        ({"default_chat_template_kwargs": "{a"}, "it is no JSON"),
        ({"served_model_name": "a,,b"}, "one of the names is empty"),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("tiny", max_model_len=64, **settings)
    assert re.search(says, str(caught.value)), caught.value


def test_the_parsers_are_those_of_the_given_template() -> None:
    hermes = "{% for tool in tools or [] %}{{ tool }}<tool_call>arguments</tool_call>{% endfor %}" + TEMPLATE
    for template, parser in ((hermes, "hermes"), (TEMPLATE, None)):
        llm = LLM("tiny", chat_template=template, max_model_len=64, num_kv_pages=100)
        try:
            found = {one.point: one.candidate.name for one in llm.llm_engine.plan.selections}
            assert found.get("tool_parser") == parser
            assert llm.llm_engine.frontend.renders_tools == (parser is not None)
        finally:
            llm.shutdown()
