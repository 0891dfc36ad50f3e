"""Where chat templates are kept in a folder. Light: a card may ask, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.types.errors import TokenizerError
from engine_kit.tokenizer_files import TEMPLATES


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Every chat template of a folder, by name.

    Files win over tokenizer_config.json, as in transformers: `chat_template.jinja` is the default, a folder of
    others may stand beside it. tokenizer_config.json holds one source, or a list of {"name", "template"};
    `chat_template.json` is what older processors wrote.

    Raises TokenizerError for a file that is no text, or a config entry of another form.
    """
    templates: dict[str, str] = {}
    default = folder / "chat_template.jinja"
    if default.is_file():
        templates["default"] = _read(default)
    for name in TEMPLATES:
        for path in sorted((folder / name).glob("*.jinja")):
            templates.setdefault(path.stem, _read(path))
    if templates:
        return templates
    for source in (config.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            return {"default": source}
        if isinstance(source, dict) and all(isinstance(text, str) for text in source.values()):
            return dict(source)
        if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
            return {str(entry.get("name", "default")): str(entry.get("template", "")) for entry in source}
        if source is not None:
            raise TokenizerError(
                f"read the chat template of '{folder}'",
                f"tokenizer_config.json holds a {type(source).__name__} there",
                "make it a string, or a list of objects with 'name' and 'template'",
            )
    return {}


def template_of(folder: Path, with_tools: bool) -> str:
    """The source of the template that renders a conversation, with tools or without; "" where there is none. Raises
    TokenizerError as `find_templates`."""
    templates = find_templates(folder, read_json(folder / "tokenizer_config.json"))
    default = templates.get("default", "")
    return templates.get("tool_use", default) if with_tools else default


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"read the chat template '{path}'", str(error), "download or save it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises TokenizerError for broken JSON."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TokenizerError(f"read '{path}'", f"it is no JSON object: {error}", "download or save it again") from error
