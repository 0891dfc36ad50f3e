# ruff: noqa: SIM905 -- word lists read best as text
"""Tools that nobody saw before: verbs and nouns, real or not, with parameters of any name."""

import json
import random
from typing import Any

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Split, is_held_out, pick
from engine_tiny.corpus.toolcase import Case, dump, make_tool, wordy

VERBS = tuple(
    """book order play open close start stop send check track reserve print create delete update cancel buy sell
    rent paint clean fix move copy share save load read list count draw wash cook pack lock scan sort test
    set make write add remove turn plan post call rate""".split()
)
NOUNS = tuple(
    """table taxi song ticket room recipe movie lamp door window alarm email message note file photo video car bike
    boat train flight hotel order parcel letter report meeting task timer light garden robot machine game pizza
    coffee cake dress phone camera printer account invoice event map route""".split()
)
Slot = tuple[tuple[str, ...], str, str]
"""Names a parameter of this kind may have, its JSON type, and how a request says its value."""
SLOTS: dict[str, Slot] = {
    "place": (("city", "place", "location", "where"), "string", "in {}"),
    "goal": (("destination", "target", "to", "city"), "string", "to {}"),
    "origin": (("origin", "from", "start", "departure"), "string", "from {}"),
    "recipient": (("recipient", "to", "receiver", "person"), "string", "to {}"),
    "topic": (("topic", "subject", "title", "about"), "string", "about {}"),
    "text": (("text", "message", "body", "content"), "string", "{says} {}"),
    "minutes": (("minutes", "duration", "time"), "integer", "for {} minutes"),
    "price": (("price", "cost", "budget"), "integer", "for {} dollars"),
    "person": (("person", "name", "customer", "owner", "user"), "string", "for {}"),
    "time": (("time", "hour", "clock"), "string", "at {}"),
    "day": (("day", "date", "weekday"), "string", "on {}"),
    "times": (("times", "count", "number", "amount"), "integer", "{} times"),
    "code": (("id", "code", "key"), "string", "with {name} {}"),
}


def _slot_value(kind: str, rng: random.Random, split: Split) -> Any:
    if kind in ("place", "goal", "origin"):
        return words.city(rng, split)
    if kind in ("person", "recipient"):
        return words.person(rng, split)
    if kind in ("topic", "text"):
        return words.phrase(rng, split)
    if kind == "time":
        return words.clock(rng)
    if kind == "day":
        return pick(rng, words.WEEKDAYS)
    if kind in ("times", "minutes", "price"):
        return rng.randint(2, 999 if kind == "price" else 99)
    return f"{pick(rng, 'ABCDEFGHKLMNPRSTVWXYZ')}{words.number(rng)}"


def _join(verb: str, noun: str, style: int) -> str:
    return (f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}")[style]


def unseen_case(rng: random.Random, split: Split) -> Case:
    """A tool that nobody saw before: a verb and a noun, real or not, and parameters told by prepositions or by name."""
    style = pick(rng, (0, 0, 0, 1, 2))
    while True:
        verb = pick(rng, VERBS) if rng.random() < 0.6 else words.nonsense(rng, split)
        noun = pick(rng, NOUNS) if rng.random() < 0.5 else words.nonsense(rng, split)
        name = _join(verb, noun, style)
        if is_held_out(f"{verb} {noun}") == (split == "held_out"):
            break
    properties: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    told: list[str] = []
    kinds = rng.sample(sorted(SLOTS), pick(rng, (1, 1, 1, 2, 2, 3)))
    if "goal" in kinds and "recipient" in kinds:  # both say "to": nobody could tell which is meant
        kinds.remove("goal")
    for kind in sorted(kinds, key=lambda kind: kind == "text"):  # a text comes last: it has no end of its own
        names, json_type, form = SLOTS[kind]
        if json_type == "integer" and rng.random() < 0.2:
            json_type = "number"
        form = form.replace("{says}", pick(rng, ("saying", "with the text", "that says")))
        key, value = pick(rng, names), _slot_value(kind, rng, split)
        if rng.random() < 0.4:
            key, form = (
                words.nonsense(rng, split),
                pick(rng, ("with {name} {}", "with {name} set to {}", "with {name} = {}")),
            )
        if key not in properties:
            properties[key], arguments[key] = json_type, value
            told.append(form.format(value, name=key))
    what = pick(rng, ("a ", "a ", "the ", "the ", "my ", "")) + noun
    request = pick(
        rng,
        (
            "Please {verb} {what} {told}.",
            "{Verb} {what} {told}",
            "Could you {verb} {what} {told}?",
            "{Verb} {what} {told}.",
            "Can you {verb} {what} {told}?",
            "I want to {verb} {what} {told}.",
            "Use {name} {told}.",
            "Call {name} {told}.",
            "{verb} {what} {told}",
        ),
    ).format(verb=verb, Verb=verb.capitalize(), what=what, told=" ".join(told), name=name)
    order = list(properties)
    rng.shuffle(order)
    description = pick(rng, (f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.", ""))
    code = f"{pick(rng, 'ABCDEFGHKLMNPRSTVWXYZ')}{words.number(rng)}"
    result, answer = pick(
        rng,
        (
            (dump({"status": "ok"}), "Done."),
            ("ok", "Done."),
            ("done", "Done."),
            (dump({"result": "done"}), "Done."),
            (dump({"status": "ok", "id": code}), f"Done. The id is {code}."),
            (dump({"error": f"{words.nonsense(rng, split)} not found"}), ""),
            (dump({"result": code}), f"The result is {code}."),
        ),
    )
    if not answer:
        answer = f"That did not work: {json.loads(result)['error']}."
    rivals = []
    if rng.random() < 0.5:  # the same verb or the same noun, so that half a look at the name is not enough
        other = words.nonsense(rng, split) if rng.random() < 0.5 else pick(rng, NOUNS)
        rival = _join(verb, other, style) if rng.random() < 0.5 else _join(pick(rng, VERBS), noun, style)
        if rival != name:
            rivals.append(make_tool(rival, "", {pick(rng, SLOTS["place"][0]): "string"}))
    tool = make_tool(name, wordy(description, rng, split), {key: properties[key] for key in order})
    return Case(tool, request, {key: arguments[key] for key in order}, result, answer, "action", rivals)
