"""Answers as the models write them, by their own chat templates, and what is in them."""
# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """A text, its content, and its calls as (name, arguments)."""

    text: str
    content: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()


ROME = ("get_weather", {"city": "Rome"})
PARIS = ("get_weather", {"city": 'Paris "é"\n', "days": 3})
NOW = ("now", {})

HERMES = [
    Sample('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", (ROME,)),
    Sample('<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>', "", (ROME,)),
    Sample('I look.\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n', "I look.", (NOW,)),
    Sample('<tool_call>{"name": "now"}</tool_call>', "", (NOW,)),
    Sample('<tool_call>{"name": "now", "arguments": {}}', "", (NOW,)),
    Sample('<tool_call>{"name": "now", "arguments": {}}</tool', "", (NOW,)),
    Sample(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris \\"\\u00e9\\"\\n", "days": 3}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        (PARIS, NOW),
    ),
    Sample('<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}', "", (NOW, NOW)),
    # slips that are mended: a line break, and a backslash that escapes nothing, inside a string
    Sample('<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d"}}</tool_call>', "", (("f", {"a": "x\ny\\d"}),)),
    # tags inside strings are text
    Sample(
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "", (("f", {"a": "</tool_call>"}),)
    ),
    Sample('a <tool_call>{"name": "now", "arguments": {}}</tool_call> b', "a b", (NOW,)),
]
LLAMA3 = [
    Sample('{"name": "get_weather", "parameters": {"city": "Rome"}}', "", (ROME,)),
    Sample('\n<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", (NOW,)),
    Sample(
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "arguments": {"city": "Rome"}}', "", (NOW, ROME)
    ),
    Sample('{"name": "now", "parameters": {}} Done.', " Done.", (NOW,)),
    Sample('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'),
    Sample('{"name": "now", "age": 7}', '{"name": "now", "age": 7}'),
    Sample('Sure: {"name": "now", "parameters": {}}', 'Sure: {"name": "now", "parameters": {}}'),
]
MISTRAL = [
    Sample('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]', "", (ROME,)),
    Sample(
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]',
        "",
        (NOW, ROME),
    ),
    Sample('[TOOL_CALLS]get_weather{"city": "Rome"}', "", (ROME,)),
    Sample('[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', "", (NOW, ROME)),
    Sample('Hm. [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}', "Hm.", (ROME,)),
]
QWEN = [
    *HERMES,
    Sample(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "",
        (ROME,),
    ),
    Sample(
        'I look.\n<function=get_weather>\n<parameter=city>\nPa\n"ri</para\\s\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>",
        "I look.",
        (("get_weather", {"city": 'Pa\n"ri</para\\s', "days": 3}),),
    ),
    Sample(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=save>\n<parameter=rows>\n"
        '[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>',
        "",
        (NOW, ("save", {"rows": [1, {"a": None}]})),
    ),
    Sample(
        "<tool_call><function=save><parameter=rows>no list</parameter><parameter=other>7</parameter></function>",
        "",
        (("save", {"rows": "no list", "other": "7"}),),
    ),
    Sample("<tool_call><function=save><parameter=rows>True</parameter></function>", "", (("save", {"rows": True}),)),
]
PYTHONIC = [
    Sample('[get_weather(city="Rome")]', "", (ROME,)),
    Sample("[get_weather(city='Paris \"é\"\\n', days=3), now()]", "", (PARIS, NOW)),
    Sample(" <|python_start|>[now( )]<|python_end|>", "", (NOW,)),
    Sample(
        "[save(rows=[1, -2.5, .5, 1_000, (True, None), {'a': {}, 'b': [],},],)]",
        "",
        (("save", {"rows": [1, -2.5, 0.5, 1000, [True, None], {"a": {}, "b": []}]}),),
    ),
    Sample("[save(rows='\\x41\\u00e9\\q\\'')]", "", (("save", {"rows": "Aé\\q'"}),)),
    Sample("[now()", "", (NOW,)),
    Sample("[1, 2, 3]", "[1, 2, 3]"),
    Sample("[unknown(a=1)]", "[unknown(a=1)]"),
    Sample("[now()] and more", " and more", (NOW,)),
]
DEEPSEEK = [
    Sample(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (ROME, NOW),
    ),
    Sample(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "I look.",
        (ROME,),
    ),
    Sample("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", (NOW,)),
]
SAMPLES = {
    "hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL, "qwen": QWEN, "pythonic": PYTHONIC,
    "deepseek": DEEPSEEK,
}  # fmt: skip

MALFORMED = {
    "hermes": [
        "<tool_call>", "<tool_call>now</tool_call>", '<tool_call>{"name": "now"', '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": []}</tool_call>', '<tool_call>{"name": "now", "arguments": {"a": }}',
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', '<tool_call>{"name": "now", "name": "now"}',
        '<tool_call>{"name": "now", "arguments": {"a": "\\u12"}}</tool_call>', "x < y <tool", "<tool_call>" * 3,
        '<tool_call>{"name": "now", "arguments": {"a": 1',
    ],
    "llama3_json": ['{"name": "now"', '{"name": "now", "parameters": {"a": tru', "<|python_tag|>print(1)", "{", "{}"],
    "mistral": [
        "[TOOL_CALLS]", "[TOOL_CALLS] now", "[TOOL_CALLS] [now]", '[TOOL_CALLS] [{"name": "now"',
        "[TOOL_CALLS]now[ARGS][]", "[TOOL_CALLS]now and then", "[TOOL_CALLS]" + "n" * 300 + "{}", "[TOOL_CALLS]{}",
        "[TOOL_CALLS]now[ARGS]{", "[TOOL_CALLS]now[CALL_ID]{}{}"
    ],
    "qwen": [
        "<tool_call><function=", "<function=now", "<function=now>\nrest", "<function=now><parameter=a>\nv\n",
        "<function=save><parameter=rows>\n[1, 2", "<function=now><parameter=a>1</parameter><parameter=a>2</parameter>",
        "<function=now><parameter=" + "a" * 300 + ">1</parameter></function>", "<tool_call>x",
        "<function=></function>", "<function=now><parameter=a",
    ],
    "pythonic": [
        "[", "[now", "[now(", "[now(a", "[now(a=1", "[now(a=1, a=2)]", "[now(1)]", "[now(a=[1,, 2])]", "[now(a=b)]",
        "[now(a='x", "[now(a={1: 2})]", "[now(a=[1)]]", "[now(a=" + "1" * 600 + ")]", "[now(a='\\x4z')]",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>now", "<｜tool▁call▁begin｜>now", "<｜tool▁calls▁begin｜><｜tool▁call",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```python\n",
        "<｜tool▁call▁begin｜>" + "n" * 300, "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
    ],
}  # fmt: skip
"""Texts without a call, or with one that does not end: all of each is content in the end."""
