"""A sentence in, JSON out: the fields that were asked for, in the order that they were asked in."""

import json
import random
from collections.abc import Callable
from typing import Any

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Message, Split, assistant, pick, user

Fields = dict[str, Any]
Schema = tuple[Fields, tuple[str, ...]]
"""The values by key, and the ways to say all of them in a sentence."""


def _person(rng: random.Random, split: Split) -> Schema:
    name, age, city, job = (
        words.person(rng, split),
        rng.randint(1, 99),
        words.city(rng, split),
        pick(rng, words.JOBS),
    )
    values = {"name": name, "age": age, "city": city, "job": job}
    return values, (
        f"{name} is {age} years old, lives in {city} and works as a {job}.",
        f"{name} is a {job} from {city} and is {age} years old.",
        f"The {job} {name}, aged {age}, lives in {city}.",
        f"In {city} there lives a {job} called {name}, who is {age}.",
        f"My name is {name}, I am {age} and I work as a {job} in {city}.",
        f"{name} ({age}) is a {job} in {city}.",
        f"At {age}, {name} still works as a {job} in {city}.",
    )


def _resident(rng: random.Random, split: Split) -> Schema:
    name, age, city = words.person(rng, split), rng.randint(1, 99), words.city(rng, split)
    return {"name": name, "age": age, "city": city}, (
        f"{name} is {age} years old and lives in {city}.",
        f"{name}, {age}, lives in {city}.",
        f"My friend {name} from {city} is {age} years old.",
        f"{name} from {city} turned {age} today.",
        f"I am {name}, I am {age} years old and I live in {city}.",
        f"{name} was born in {city} and is now {age}.",
    )


def _age(rng: random.Random, split: Split) -> Schema:
    name, age = words.person(rng, split), rng.randint(1, 99)
    return {"name": name, "age": age}, (
        f"{name} is {age} years old.", f"{name} is {age}.", f"My name is {name} and I am {age} years old.",
        f"I am {name} and I am {age}.", f"{name}, aged {age}, came by.", f"{name} turned {age} yesterday.",
    )  # fmt: skip


def _order(rng: random.Random, split: Split) -> Schema:
    name, thing, count, price = (
        words.person(rng, split), pick(rng, words.THINGS), rng.randint(2, 60), rng.randint(1, 300),
    )  # fmt: skip
    if rng.random() < 0.4:
        thing = words.nonsense(rng, split) + "s"
    return {"customer": name, "item": thing, "quantity": count, "price": price}, (
        f"{name} bought {count} {thing} for {price} dollars.",
        f"{name} ordered {count} {thing} and paid {price} euros.",
        f"{count} {thing} were sold to {name} for {price} dollars.",
        f"For {price} dollars, {name} got {count} {thing}.",
        f"Order: {count} {thing}, {price} dollars, customer {name}.",
    )


def _event(rng: random.Random, split: Split) -> Schema:
    kind = pick(rng, ("party", "meeting", "concert", "lesson", "lunch", "dinner", "race", "talk", "fair", "wedding"))
    title = f"{words.proper(rng, split)} {kind}"
    day, time, place = pick(rng, words.WEEKDAYS), words.clock(rng), words.city(rng, split)
    return {"event": title, "day": day, "time": time, "place": place}, (
        f"The {title} is on {day} at {time} in {place}.",
        f"On {day} at {time} we go to the {title} in {place}.",
        f"Do not forget the {title} in {place}: {day}, {time}.",
        f"{place} holds the {title} on {day} at {time}.",
    )


def _book(rng: random.Random, split: Split) -> Schema:
    title, author, year = words.title(rng, split), words.person(rng, split), rng.randint(1500, 2030)
    return {"title": title, "author": author, "year": year}, (
        f"{author} wrote {title} in {year}.",
        f"The book {title} by {author} came out in {year}.",
        f"{title} was written by {author} in {year}.",
        f"In {year}, {author} published {title}.",
    )


def _contact(rng: random.Random, split: Split) -> Schema:
    name, host = words.person(rng, split), words.nonsense(rng, split)
    email = f"{words.nonsense(rng, split)}@{host}.{pick(rng, ('com', 'org', 'net'))}"
    phone = f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return {"name": name, "email": email, "phone": phone}, (
        f"You can reach {name} at {email} or {phone}.",
        f"{name} has the phone number {phone} and the email {email}.",
        f"Write to {name} at {email} or call {phone}.",
        f"Contact: {name}, {phone}, {email}.",
    )


def _animal(rng: random.Random, split: Split) -> Schema:
    kind = pick(rng, ("dog", "cat", "horse", "rabbit", "parrot", "goat", "cow", "hamster", "turtle", "duck"))
    name, owner, age = words.first_name(rng, split), words.person(rng, split), rng.randint(1, 30)
    return {"name": name, "animal": kind, "age": age, "owner": owner}, (
        f"{owner} has a {kind} called {name}, which is {age} years old.",
        f"{name} is a {kind} of {age} years and belongs to {owner}.",
        f"The {kind} {name} is {age} and its owner is {owner}.",
        f"{owner}'s {kind} {name} is {age} years old.",
    )


def _trip(rng: random.Random, split: Split) -> Schema:
    name, start, goal = words.person(rng, split), words.city(rng, split), words.city(rng, split)
    by, day = pick(rng, ("train", "bus", "car", "plane", "boat", "bike")), pick(rng, words.WEEKDAYS)
    return {"traveler": name, "from": start, "to": goal, "day": day, "vehicle": by}, (
        f"{name} travels from {start} to {goal} by {by} on {day}.",
        f"On {day}, {name} takes the {by} from {start} to {goal}.",
        f"{name} will go to {goal} from {start} on {day} by {by}.",
    )


def _invented(rng: random.Random, split: Split) -> Schema:
    """Keys that mean nothing: only the sentence says which value is whose."""
    values: Fields = {}
    while len(values) < rng.randint(2, 4):
        key = words.nonsense(rng, split)
        values[key] = words.number(rng, 3) if rng.random() < 0.4 else words.proper(rng, split)
    parts = [f"the {key} is {value}" for key, value in values.items()]
    told = ", ".join(parts[:-1]) + " and " + parts[-1] + "."
    return values, (told[0].upper() + told[1:], ", ".join(f"{k}: {v}" for k, v in values.items()))


SCHEMAS: tuple[Callable[[random.Random, Split], Schema], ...] = (
    _person, _resident, _resident, _age, _order, _event, _book, _contact, _animal, _trip, _invented,
)  # fmt: skip


def _listed(keys: list[str], rng: random.Random) -> str:
    if len(keys) == 1 or rng.random() < 0.3:
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def exchange(rng: random.Random, split: Split) -> list[Message]:
    values, sentences = pick(rng, SCHEMAS)(rng, split)
    keys = list(values)
    if rng.random() < 0.45:
        rng.shuffle(keys)
        keys = keys[: rng.randint(1, len(keys))]
    text, names = pick(rng, sentences), _listed(keys, rng)
    forms = (
        f"Extract the {names} as JSON: {text}",
        f"Extract {names} as JSON.\n{text}",
        f"{text}\nExtract {names} as JSON.",
        f"Give me {names} as JSON: {text}",
        f"Turn this into JSON with {names}: {text}",
        f"{text} Return JSON with the keys {names}.",
        f"Return a JSON object with {names}. Text: {text}",
        f"Read the text and answer with JSON ({names}).\n{text}",
        f"Extract the {names} from this sentence as JSON: {text}",
        f"Extract {names} from: {text}",
        f"{text}\nGive me the {names} as a JSON object.",
        f"Answer in JSON with {names}: {text}",
    )
    chosen = {key: values[key] for key in keys}
    return [user(pick(rng, forms)), assistant(json.dumps(chosen, ensure_ascii=False))]


def reading(rng: random.Random, split: Split) -> list[Message]:
    """A sentence, then questions about it: the same copying, answered in a word."""
    values, sentences = pick(rng, SCHEMAS)(rng, split)
    keys = list(values)
    rng.shuffle(keys)
    messages: list[Message] = []
    for key in keys[: rng.randint(1, 2)]:
        question = pick(rng, (f"What is the {key}?", f"What is the {key} in the text?", f"Which {key} is it?"))
        if not messages:
            question = pick(rng, (f"{pick(rng, sentences)} {question}", f"Text: {pick(rng, sentences)}\n{question}"))
        messages += [user(question), assistant(f"The {key} is {values[key]}.")]
    return messages
