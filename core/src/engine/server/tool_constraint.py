"""How calls of tools are made sure of: a constraint for the grammar driver at work, and who then reads the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from engine.interfaces.tool_parser import CallForm, ToolParser, ToolStream
from engine.plugin.known import how_to_install
from engine.server.errors import APIError
from engine.server.json_calls import ListedCalls, NamedCall, list_schema, schema_of
from engine.server.tool_request import ToolRequest
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.interfaces.grammar import GrammarCard
    from engine.plugin import Selection

NewStream = Callable[[], ToolStream]
INSTALL = f"install a grammar that does: {how_to_install('grammar')}"


class Plan(NamedTuple):
    """How a request's calls are had.

    Args:
        stream: makes what reads one completion; None where nothing does.
        constraint: on what the model may write; None for none.
    """

    stream: NewStream | None = None
    constraint: StructuredOutputsParams | None = None


def plan_calls(request: ToolRequest, parser: ToolParser | None, grammar: Selection) -> Plan:
    """Decide how a request's calls are found, and made sure of. Required and named calls are enforced by the grammar
    driver: in the model's own form where parser and grammar can, else as bare JSON.

    Raises APIError, a 400, where there is nobody to do what is asked.
    """
    if request.choice == "none":
        return Plan()
    if request.choice == "auto":
        if parser is None:
            raise APIError(
                400,
                "tools: no tool parser is at work, so that calls would not be found; start the server with "
                '--tool-call-parser NAME, or send tool_choice "required" or "none"',
                param="tools",
            )
        constraint = _strict(request, parser, grammar) if any(tool.strict for tool in request.tools) else None
        return Plan(lambda: parser.stream(request.tools), constraint)
    candidates: list[Plan] = []
    form = parser.form(request.callable) if parser is not None else None
    if parser is not None and form is not None:
        tag = {"type": "structural_tag", "format": _format(request, form)}
        candidates.append(Plan(lambda: parser.stream(request.tools), _constraint(structural_tag=json.dumps(tag))))
    if request.choice == "named":
        (tool,) = request.callable
        candidates.append(Plan(lambda: NamedCall(request.name), _constraint(json=schema_of(tool))))
    else:
        schema = list_schema(request.tools, request.parallel)
        candidates.append(Plan(ListedCalls, _constraint(json=schema)))
    return _first_served(candidates, grammar, "tool_choice", "calls that must come are enforced by a grammar")


def _strict(request: ToolRequest, parser: ToolParser, grammar: Selection) -> StructuredOutputsParams | None:
    """For tools that may be called, and then strictly: the text is free up to a call."""
    form = parser.form(request.tools)
    if form is None or not form.trigger:
        raise APIError(
            400,
            "tools: strict is only enforced here where calls must come, because of the form in which this model writes "
            'them; leave strict out, or send tool_choice "required"',
            param="tools",
        )
    strict = {tool.name for tool in request.tools if tool.strict}
    tags = [_tag(request, form, tag.name, free=tag.name not in strict) for tag in form.tags]
    format_ = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not request.parallel,
    }
    constraint = _constraint(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))
    return _first_served(
        [Plan(None, constraint)], grammar, "tools", "strict tools are enforced by a grammar"
    ).constraint


def _first_served(candidates: list[Plan], grammar: Selection, parameter: str, why: str) -> Plan:
    card = cast("type[GrammarCard]", grammar.card)
    refusal: InvalidRequestError | None = None
    for plan in candidates:
        assert plan.constraint is not None
        (kind,) = plan.constraint.kinds
        if kind not in card.constraints:
            continue
        try:
            plan.constraint.verify()
            card.verify(plan.constraint)
        except InvalidRequestError as error:
            refusal = refusal or error
            continue
        return plan
    if refusal is not None:
        raise APIError(400, f"tools: {why}, and '{grammar.candidate.name}' refuses: {refusal}", param="tools")
    enforced = ", ".join(sorted(card.constraints)) or "nothing"
    raise APIError(
        400,
        f"{parameter}: {why}, and '{grammar.candidate.name}', which is at work, enforces {enforced} only; {INSTALL}, "
        + ('or send tool_choice "auto"' if parameter == "tool_choice" else "or leave strict out"),
        param=parameter,
    )


def _constraint(**kind: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind, asked_as="tools")


def _format(request: ToolRequest, form: CallForm) -> dict[str, Any]:
    """Calls and nothing else, as a structural tag's format (the words are XGrammar's)."""
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_tag(request, form, tag.name) for tag in form.tags],
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


def _tag(request: ToolRequest, form: CallForm, name: str, *, free: bool = False) -> dict[str, Any]:
    (tag,) = (tag for tag in form.tags if tag.name == name)
    (tool,) = (tool for tool in request.tools if tool.name == name)
    schema = {"type": "object"} if free else schema_of(tool)
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": tag.begin, "content": content, "end": tag.end}
