"""How calls of tools are made sure of: a constraint for the grammar drivers at work, and who then reads the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.interfaces.tool_parser import CallForm, FunctionTool, ToolParser, ToolStream
from engine.plugin.hints import how_to_install
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.call_object import CallObject
from engine_kit.tool_text import ToolText, skip
from engine_server.conversation.tools import ToolRequest
from engine_server.errors import invalid

if TYPE_CHECKING:
    from engine_kit.request_checks import ConstraintCheck


class Plan(NamedTuple):
    """How a request's calls are had.

    Args:
        stream: makes what reads one completion; None where nothing does.
        constraint: on what the model may write; None for none.
    """

    stream: Callable[[], ToolStream] | None = None
    constraint: StructuredOutputsParams | None = None


def plan_calls(
    request: ToolRequest,
    parser: ToolParser | None,
    grammars: ConstraintCheck,
    answer: StructuredOutputsParams | None = None,
) -> Plan:
    """Decide how a request's calls are found, and made sure of. Required and named calls are enforced by the grammar
    driver: in the model's own form where parser and grammar can, else as bare JSON.

    Args:
        request: what it says of tools; its `choice` is not "none".
        parser: of the model's calls.
        grammars: what the drivers at work enforce.
        answer: what an answer that calls nothing must be. Where calls must come there is none, and it asks nothing.

    Raises:
        APIError: a 400, where there is nobody to do what is asked.
        InvalidRequestError: they refuse `answer`.
    """
    if answer is not None:
        _verify(answer, grammars)
    if request.choice == "auto":
        if parser is None:
            raise invalid(
                "tools",
                "no tool parser is at work, so that calls would not be found; start the server with "
                '--tool-call-parser NAME, or send tool_choice "required" or "none"',
            )
        constraint: StructuredOutputsParams | None = None
        if answer is not None:
            constraint = _answer_or_calls(request, parser, grammars, answer)
        elif any(tool.strict for tool in request.tools):
            constraint = _strict(request, parser, grammars)
        return Plan(lambda: parser.stream(request.tools), constraint)
    candidates: list[Plan] = []
    form = parser.form(request.callable) if parser is not None else None
    if parser is not None and form is not None:
        tag = _structural_tag(_format(request, form))
        candidates.append(Plan(lambda: parser.stream(request.tools), tag))
    if request.choice == "named":
        (tool,) = request.callable
        candidates.append(Plan(lambda: NamedCall(request.name), _constraint(json=schema_of(tool))))
    else:
        candidates.append(Plan(ListedCalls, _constraint(json=list_schema(request.tools, request.parallel))))
    return _first_served(candidates, grammars, "tool_choice", "calls that must come are enforced by a grammar")


def _strict(request: ToolRequest, parser: ToolParser, grammars: ConstraintCheck) -> StructuredOutputsParams | None:
    """For tools that may be called, and then strictly: the text is free up to a call."""
    form = parser.form(request.tools)
    if form is None or not form.trigger:
        raise invalid(
            "tools",
            "strict is only enforced here where calls must come, because of the form in which this model writes them; "
            'leave strict out, or send tool_choice "required"',
        )
    format_ = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": _tags(request, form),
        "at_least_one": False,
        "stop_after_first": not request.parallel,
    }
    plan = Plan(None, _structural_tag(format_))
    return _first_served([plan], grammars, "tools", "strict tools are enforced by a grammar").constraint


def _verify(answer: StructuredOutputsParams, grammars: ConstraintCheck) -> None:
    """That a grammar takes it, for which it is not asked once calls are written into it."""
    answer.verify()
    if answer.kinds[0] in grammars.kinds:
        try:
            grammars.verify(answer)
        except InvalidRequestError as error:
            raise answer.renamed(error) from error


def _answer_or_calls(
    request: ToolRequest, parser: ToolParser, grammars: ConstraintCheck, answer: StructuredOutputsParams
) -> StructuredOutputsParams | None:
    """For a model that calls tools, or answers in the form that is asked for: all that it writes is one of the two."""
    name = answer.asked_as or "structured_outputs"
    form, own = parser.form(request.tools), _answer_format(answer)
    if form is None or own is None:
        which = "the form in which this model writes calls" if form is None else f"such a {name}"
        raise invalid(
            name,
            f"{which} cannot be one of two things that a grammar lets the model write, an answer or calls; "
            f'leave {name} out, or send tool_choice "none" or "required"',
        )
    both = _structural_tag({"type": "or", "elements": [own, _format(request, form)]})
    return _first_served([Plan(None, both)], grammars, name, "beside tools it is enforced by a grammar").constraint


def _first_served(candidates: list[Plan], grammars: ConstraintCheck, parameter: str, why: str) -> Plan:
    refusal: InvalidRequestError | None = None
    for plan in candidates:
        assert plan.constraint is not None
        (kind,) = plan.constraint.kinds
        if kind not in grammars.kinds:
            continue
        try:
            plan.constraint.verify()
            grammars.verify(plan.constraint)
        except InvalidRequestError as error:
            refusal = refusal or error
            continue
        return plan
    if refusal is not None:
        raise invalid("tools", f"{why}, and the one at work ({grammars.names}) refuses: {refusal}")
    enforced = ", ".join(sorted(grammars.kinds)) or "nothing"
    others = {"tool_choice": 'send tool_choice "auto"', "tools": "leave strict out"}
    other = others.get(parameter, f"leave {parameter} out")
    raise invalid(
        parameter,
        f"{why}, and the one at work ({grammars.names}) enforces {enforced} only; "
        f"install a grammar that does: {how_to_install('grammar')}, or {other}",
    )


def _constraint(**kind: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind, asked_as="tools")


def _structural_tag(format_: dict[str, Any]) -> StructuredOutputsParams:
    return _constraint(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


def _format(request: ToolRequest, form: CallForm) -> dict[str, Any]:
    """Calls and nothing else, as a structural tag's format (the words are XGrammar's)."""
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": _tags(request, form),
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not request.parallel or request.choice == "named",
    }
    around = [calls]
    if form.before:
        around.insert(0, {"type": "const_string", "value": form.before})
    if form.after:
        around.append({"type": "const_string", "value": form.after})
    return calls if len(around) == 1 else {"type": "sequence", "elements": around}


def _tags(request: ToolRequest, form: CallForm) -> list[dict[str, Any]]:
    """A tag for each call that may come. One that only may come is held to its tool's schema where that is strict."""
    tools = {tool.name: tool for tool in request.tools}
    tags = []
    for tag in form.tags:
        tool = tools[tag.name]
        schema = {"type": "object"} if request.choice == "auto" and not tool.strict else schema_of(tool)
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": tag.begin, "content": content, "end": tag.end})
    return tags


def _answer_format(constraint: StructuredOutputsParams) -> dict[str, Any] | None:
    """A verified constraint as a format of structural tags (the words are XGrammar's); None for a structural tag in its
    older form, which has none."""
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.json is not None:
        return {"type": "json_schema", "json_schema": constraint.schema}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    if constraint.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in constraint.choice]
        return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
    form = constraint.schema.get("format")
    return form if isinstance(form, dict) else None


# -- calls as bare JSON: what a schema makes a model write, whatever its own form is ----------------------------------
def schema_of(tool: FunctionTool) -> dict[str, Any]:
    """The schema of a tool's arguments; a tool without parameters takes an empty object."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def list_schema(tools: Sequence[FunctionTool], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, at least one: the form that vLLM uses for required calls. What schemas define
    under `$defs` moves to the whole's."""
    defined: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = schema_of(tool)
        for key in ("$defs", "definitions"):
            defined.setdefault(key, {}).update(parameters.pop(key, {}))
        properties = {"name": {"type": "string", "enum": [tool.name]}, "parameters": parameters}
        required = ["name", "parameters"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "items": items, "minItems": 1} | ({} if parallel else {"maxItems": 1})
    return schema | {key: value for key, value in defined.items() if value}


class ListedCalls(ToolText):
    """Reads `[{"name": ..., "parameters": {...}}, ...]`, a `ToolStream`."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        return self._expect(text, position, "[", self.in_list)

    def in_list(self, text: str, position: int) -> int:
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        self.read_object(CallObject(), self.after_object)
        return position

    def after_object(self, text: str, position: int) -> int:
        if text[position] == "]":
            self.leave()
            return position + 1
        return self._expect(text, position, ",", self.in_list)

    def _expect(self, text: str, position: int, character: str, then: Any) -> int:
        if (after := skip(text, position)) > position:
            return after
        if text[position] != character:
            return self.give_up(text, position, position)
        self.state = then
        return position + 1


class NamedCall(ToolText):
    """Reads the arguments of one call whose name is known, a `ToolStream`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        self.announce(self._name)
        self.read_arguments(self.behind)
        return position

    def behind(self, text: str, position: int) -> int:
        self.leave()
        return position
