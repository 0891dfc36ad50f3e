"""Tool calls: which of the offered tools, with which arguments, and what to say about the result."""

import random

from engine_tiny.corpus.actions import unseen_case
from engine_tiny.corpus.base import Message, Split, assistant, pick, user
from engine_tiny.corpus.known_tools import known_case, pair_of_calls, search, time, weather, weather_again
from engine_tiny.corpus.toolcase import Case, Tool, call

__all__ = [
    "Case", "known_case", "no_tool_for_it", "offer", "pair_of_calls", "turns", "unseen_case", "weather_again",
]  # fmt: skip


def offer(cases: list[Case], rng: random.Random, split: Split) -> list[Tool]:
    """The tools of these cases, and some that nobody asks for."""
    tools = [case.tool for case in cases]
    families = {case.family for case in cases}
    others = [tool for case in cases for tool in case.rivals]
    for _ in range(pick(rng, (0, 0, 1, 1, 2, 3))):
        extra = known_case(rng, split) if rng.random() < 0.6 else unseen_case(rng, split)
        if extra.family == "action" or extra.family not in families:
            families.add(extra.family)
            others.append(extra.tool)
    names = {tool["function"]["name"] for tool in tools}
    for tool in others:
        if tool["function"]["name"] not in names:
            names.add(tool["function"]["name"])
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def turns(case: Case) -> list[Message]:
    return [user(case.request), call(case), {"role": "tool", "content": case.result}, assistant(case.answer)]


def no_tool_for_it(rng: random.Random, split: Split) -> list[Message]:
    case = pick(rng, (weather, search, time))(rng, split)
    return [user(case.request), assistant("I am sorry, I have no tool for that.")]
