"""Chat templates: the same prompts as transformers', wherever the template is kept, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.interfaces.context import FrontContext
from engine.types.errors import TokenizerError
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody

USER = {"role": "user", "content": "What's the weather in Köln <now> & tomorrow?"}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": " Rainy. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}],
}
RESULT = {"role": "tool", "content": "12 °C"}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning": "hm\n"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "tools": [SYSTEM, USER, CALL, RESULT],
    "thought": [USER, THOUGHT],
    "loop": [USER, {"role": "skip", "content": "x"}, ANSWER, {"role": "stop", "content": "y"}, USER],
}


@pytest.fixture(scope="module")
def templates(load_helper: Any) -> ModuleType:
    return load_helper("templates")


@pytest.fixture(scope="module")
def folder(builders: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.save(
        builders.byte_level(), tmp_path_factory.mktemp("plain"), bos_token="<|bos|>", eos_token="<|eos|>"
    )


def make_body(folder: Path) -> HFTokenizerBody:
    return HFTokenizerBody(FrontContext(folder=str(folder), files=None, model=None))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def body(folder: Path) -> HFTokenizerBody:
    return make_body(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral", "phi"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("generation", [False, True])
def test_same_prompt_as_transformers(
    body: HFTokenizerBody,
    oracle: Any,
    templates: ModuleType,
    name: str,
    conversation: str,
    with_tools: bool,
    generation: bool,
) -> None:
    messages = CONVERSATIONS[conversation]
    tools = TOOLS if with_tools else None
    variables: dict[str, Any] = {"enable_thinking": False} if name == "qwen" and generation else {}
    try:
        expected = oracle.apply_chat_template(
            messages, tools=tools, chat_template=templates.ALL[name], add_generation_prompt=generation, tokenize=False,
            **variables,
        )  # fmt: skip
    except Exception as error:
        with pytest.raises(TokenizerError) as caught:
            body.render_chat(messages, tools=tools, template=templates.ALL[name], add_generation_prompt=generation)
        assert str(error) in str(caught.value)
        return
    mine = body.render_chat(
        messages, tools=tools, template=templates.ALL[name], add_generation_prompt=generation, variables=variables
    )
    assert mine == expected


def test_refusals_are_typed(body: HFTokenizerBody, templates: ModuleType) -> None:
    with pytest.raises(TokenizerError, match="must alternate user/assistant"):
        body.render_chat([USER, USER], template=templates.MISTRAL)
    with pytest.raises(TokenizerError, match="TypeError"):
        body.render_chat([{"role": "user", "content": 3}], template="{{ 'a' + messages[0].content }}")
    with pytest.raises(TokenizerError, match="broken at line 2"):
        body.render_chat([USER], template="a\n{% if %}")
    with pytest.raises(TokenizerError, match=r"no chat template.*; pass chat_template"):
        body.render_chat([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ messages[0].update(a=1) }}",
    ],
)
def test_sandbox(body: HFTokenizerBody, source: str) -> None:
    with pytest.raises(TokenizerError):
        body.render_chat([USER], template=source)


def test_messages_are_not_changed_and_may_be_rich(body: HFTokenizerBody) -> None:
    class Part:
        def model_dump(self) -> dict[str, str]:
            return {"text": "hi"}

    message = {"role": "user", "content": "", "seen": [Part(), object()], "name": None}
    source = "{{ messages[0].seen[0].text }}{{ messages[0].seen[1] }}{{ messages[0].name is defined }}"
    assert body.render_chat([message], template=source) == "hi<object>False"
    assert message["name"] is None


# -- where templates are kept ----------------------------------------------------------------------------------------
def place(builders: ModuleType, folder: Path, **config: Any) -> Path:
    return builders.save(builders.byte_level(), folder, **config)


def test_config_string(builders: ModuleType, tmp_path: Path) -> None:
    assert make_body(place(builders, tmp_path, chat_template="C{{ bos_token }}")).render_chat([USER]) == "C"
    body = make_body(place(builders, tmp_path, chat_template="C{{ bos_token }}", bos_token="<|bos|>"))
    assert body.render_chat([USER]) == "C<|bos|>"


def test_file_wins_over_config(builders: ModuleType, tmp_path: Path) -> None:
    place(builders, tmp_path, chat_template="C")
    (tmp_path / "chat_template.jinja").write_text("FÜ", encoding="utf-8")
    assert make_body(tmp_path).render_chat([USER]) == "FÜ"


def test_named_list(builders: ModuleType, tmp_path: Path) -> None:
    named = [{"name": name, "template": text} for name, text in (("default", "D"), ("tool_use", "T"), ("rag", "R"))]
    body = make_body(place(builders, tmp_path, chat_template=named))
    assert body.render_chat([USER]) == "D"
    assert body.render_chat([USER], tools=TOOLS) == "T"
    assert body.render_chat([USER], template="rag") == "R"
    assert body.render_chat([USER], template="literal {{ 1 }}") == "literal 1"
    body = make_body(place(builders, tmp_path, chat_template=named[2:]))
    with pytest.raises(TokenizerError, match="named rag, and no default"):
        body.render_chat([USER])


@pytest.mark.parametrize("name", ["additional_chat_templates", "chat_templates"])
def test_folder_of_templates(builders: ModuleType, tmp_path: Path, name: str) -> None:
    place(builders, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("D")
    (tmp_path / name).mkdir()
    (tmp_path / name / "tool_use.jinja").write_text("T")
    body = make_body(tmp_path)
    assert body.render_chat([USER]) == "D"
    assert body.render_chat([USER], tools=TOOLS) == "T"


def test_processor_json(builders: ModuleType, tmp_path: Path) -> None:
    place(builders, tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert make_body(tmp_path).render_chat([USER]) == "J"


def test_saved_by_transformers(oracle: Any, templates: ModuleType, tmp_path: Path) -> None:
    oracle.chat_template = {"default": templates.MISTRAL, "tool_use": templates.QWEN}
    oracle.save_pretrained(tmp_path)
    oracle.chat_template = None
    body = make_body(tmp_path)
    assert body.render_chat([USER]).startswith("<|bos|>[INST] ")
    assert "<tools>" in body.render_chat([USER], tools=TOOLS)


def test_bad_forms(builders: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="holds a int there"):
        make_body(place(builders, tmp_path, chat_template=3))
    place(builders, tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        make_body(tmp_path)
