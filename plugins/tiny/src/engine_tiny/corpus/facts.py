# ruff: noqa: SIM905 -- word lists read best as text
"""A fixed table of facts, asked in many wordings, with follow-ups that lean on the question before."""

import random
from collections.abc import Callable
from functools import lru_cache

from engine_tiny.corpus.base import Message, Split, assistant, draw, pick, user
from engine_tiny.corpus.words import MONTHS, WEEKDAYS, proper

CAPITALS = dict(
    pair.strip().split(":")
    for pair in """France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Austria:Vienna|Japan:Tokyo|
    China:Beijing|India:New Delhi|Russia:Moscow|Egypt:Cairo|Kenya:Nairobi|Norway:Oslo|Sweden:Stockholm|
    Finland:Helsinki|Denmark:Copenhagen|Poland:Warsaw|Greece:Athens|Ireland:Dublin|Hungary:Budapest|Belgium:Brussels|
    Switzerland:Bern|Turkey:Ankara|Canada:Ottawa|Mexico:Mexico City|Brazil:Brasilia|Argentina:Buenos Aires|
    Chile:Santiago|Peru:Lima|Colombia:Bogota|Cuba:Havana|Australia:Canberra|New Zealand:Wellington|Thailand:Bangkok|
    Vietnam:Hanoi|Indonesia:Jakarta|Malaysia:Kuala Lumpur|South Korea:Seoul|Nepal:Kathmandu|Pakistan:Islamabad|
    Iran:Tehran|Iraq:Baghdad|Israel:Jerusalem|Jordan:Amman|Lebanon:Beirut|Morocco:Rabat|Algeria:Algiers|
    Tunisia:Tunis|Nigeria:Abuja|Ghana:Accra|Senegal:Dakar|Ethiopia:Addis Ababa|Iceland:Reykjavik|Ukraine:Kyiv|
    Romania:Bucharest|Bulgaria:Sofia|Serbia:Belgrade|Croatia:Zagreb|Scotland:Edinburgh|England:London|Wales:Cardiff|
    Bolivia:Sucre|Ecuador:Quito|Uruguay:Montevideo|Jamaica:Kingston""".replace("\n", "").split("|")
)
COUNTRY_OF = {city: country for country, city in CAPITALS.items()}
_PAIRS = tuple(
    (pair.split(":")[0], pair.split(":")[1])
    for pair in """hot:cold big:small fast:slow up:down left:right day:night black:white open:closed happy:sad
    old:young rich:poor hard:soft full:empty early:late high:low long:short strong:weak wet:dry thick:thin near:far
    light:dark loud:quiet clean:dirty good:bad right:wrong true:false alive:dead wide:narrow heavy:light
    deep:shallow sharp:blunt sweet:sour push:pull win:lose buy:sell love:hate laugh:cry begin:end inside:outside
    above:below first:last always:never yes:no north:south east:west summer:winter cheap:expensive safe:dangerous
    brave:cowardly""".split()
)
OPPOSITES = dict(reversed(_PAIRS)) | {b: a for a, b in _PAIRS if b not in {p[0] for p in _PAIRS}}
COLOURS = dict(
    pair.strip().split(":")
    for pair in """grass:green|snow:white|coal:black|blood:red|the sky:blue|the sun:yellow|a banana:yellow|
    a lemon:yellow|a tomato:red|a strawberry:red|a cherry:red|a carrot:orange|a pumpkin:orange|an orange:orange|
    milk:white|chocolate:brown|a violet:purple|an eggplant:purple|a flamingo:pink|a pig:pink|a frog:green|
    a cucumber:green|a crow:black|a polar bear:white|an elephant:gray|a mouse:gray|a fire truck:red|salt:white|
    wood:brown|a leaf:green|a swan:white|the sea:blue""".replace("\n", "").split("|")
)
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
ORDINALS = tuple("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split())

Fact = tuple[tuple[str, ...], str, str, str]
"""Wordings, the answer as a sentence, the answer in a word, and the follow-up that asks the same."""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _capital(rng: random.Random) -> Fact:
    country = pick(rng, tuple(CAPITALS))
    city = CAPITALS[country]
    wordings = (
        f"What is the capital of {country}?", f"What's the capital of {country}?", f"The capital of {country}?",
        f"Which city is the capital of {country}?", f"Tell me the capital of {country}.",
        f"Name the capital of {country}.", f"Do you know the capital of {country}?", f"{country}'s capital?",
        f"What is {country}'s capital city?", f"Can you tell me what the capital of {country} is?",
        f"I forgot the capital of {country}. What is it?", f"Capital of {country}",
    )  # fmt: skip
    return wordings, f"The capital of {country} is {city}.", city, country


def _country(rng: random.Random) -> Fact:
    country = pick(rng, tuple(CAPITALS))
    city = CAPITALS[country]
    wordings = (
        f"Which country has {city} as its capital?", f"{city} is the capital of which country?",
        f"What country is {city} the capital of?", f"Of which country is {city} the capital?",
        f"Tell me which country has the capital {city}.",
    )  # fmt: skip
    return wordings, f"{city} is the capital of {country}.", country, city


def _opposite(rng: random.Random) -> Fact:
    word = pick(rng, tuple(OPPOSITES))
    other = OPPOSITES[word]
    wordings = (
        f"What is the opposite of {word}?", f"What's the opposite of {word}?", f"Tell me the opposite of {word}.",
        f"Which word is the opposite of {word}?", f"Give me the opposite of {word}.", f"The opposite of {word}?",
        f"What word means the opposite of {word}?", f"Do you know the opposite of {word}?", f"Opposite of {word}",
        f"What is the opposite of the word {word}?",
    )  # fmt: skip
    return wordings, f"The opposite of {word} is {other}.", other, word


def _colour(rng: random.Random) -> Fact:
    thing = pick(rng, tuple(COLOURS))
    colour = COLOURS[thing]
    wordings = (
        f"What color is {thing}?", f"What colour is {thing}?", f"Which color does {thing} have?",
        f"Tell me the color of {thing}.", f"What is the color of {thing}?", f"The color of {thing}?",
        f"Can you tell me what color {thing} is?", f"Do you know what colour {thing} is?",
        f"Which colour is {thing}?",
    )  # fmt: skip
    return wordings, f"{_sentence(thing)} is {colour}.", colour, thing


def _neighbour(rng: random.Random) -> Fact:
    """The day or month that comes after or before another."""
    kind, names = pick(rng, (("day", WEEKDAYS), ("month", MONTHS)))
    index = int(rng.random() * len(names))
    side, step = pick(rng, (("after", 1), ("before", -1)))
    name, answer = names[index], names[(index + step) % len(names)]
    wordings = (
        f"Which {kind} comes {side} {name}?", f"What {kind} comes {side} {name}?", f"What {kind} is {side} {name}?",
        f"What is the {kind} {side} {name}?", f"Tell me the {kind} {side} {name}.", f"The {kind} {side} {name}?",
        f"Name the {kind} that comes {side} {name}.", f"Do you know which {kind} comes {side} {name}?",
    )  # fmt: skip
    return wordings, f"The {kind} {side} {name} is {answer}.", answer, f"{side} {name}"


def _ordinal(rng: random.Random) -> Fact:
    kind, whole, names = pick(rng, (("day", "the week", WEEKDAYS), ("month", "the year", MONTHS)))
    index = int(rng.random() * len(names))
    nth, answer = ORDINALS[index], names[index]
    wordings = (
        f"What is the {nth} {kind} of {whole}?", f"Which is the {nth} {kind} of {whole}?",
        f"Name the {nth} {kind} of {whole}.", f"Tell me the {nth} {kind} of {whole}.",
        f"Which {kind} is the {nth} of {whole}?",
    )  # fmt: skip
    return wordings, f"The {nth} {kind} of {whole} is {answer}.", answer, f"the {nth}"


def _month_days(rng: random.Random) -> Fact:
    month = pick(rng, MONTHS)
    days = str(MONTH_DAYS[month])
    wordings = (
        f"How many days does {month} have?", f"How many days are in {month}?", f"How many days are there in {month}?",
        f"Tell me how many days {month} has.", f"How long is {month}?",
    )  # fmt: skip
    return wordings, f"{month} has {days} days.", days, month


TABLES: tuple[Callable[[random.Random], Fact], ...] = (
    _capital, _capital, _capital, _country, _opposite, _opposite, _colour, _colour, _neighbour, _neighbour, _ordinal,
    _month_days,
)  # fmt: skip
_BEFORE = ("Please: ", "Hi! ", "Hello. ", "One question: ", "OK. ", "Quick question. ", "Tell me. ", "Now: ")
_AFTER = (" Thanks.", " Please.", " Thank you!", " I want to know.")
_ONE_WORD = (" Answer in one word.", " One word.", " Just the answer.", " Only the answer, please.")


def _dressed(rng: random.Random, text: str) -> str:
    """The same question as different people type it."""
    chance = rng.random()
    if chance < 0.55:
        return text
    if chance < 0.67:
        return text.rstrip("?.")
    if chance < 0.79:
        return text.lower()
    if chance < 0.91:
        return pick(rng, _BEFORE) + text
    return text + pick(rng, _AFTER)


def exchange(rng: random.Random, split: Split) -> list[Message]:
    """One question and its answer; held-out questions are wordings never seen with that fact."""
    while True:
        wordings, answer, word, _ = pick(rng, TABLES)(rng)
        short = rng.random() < 0.12
        suffix = pick(rng, _ONE_WORD) if short else ""
        try:
            question = draw(lambda: _dressed(rng, pick(rng, wordings)) + suffix, split, tries=20)  # noqa: B023
        except LookupError:
            continue
        return [user(question), assistant(_sentence(word) if short else answer)]


def yes_or_no(rng: random.Random, split: Split) -> list[Message]:
    """The same facts, claimed rightly or wrongly."""
    if rng.random() < 0.5:
        country = pick(rng, tuple(CAPITALS))
        truth, claim = CAPITALS[country], pick(rng, tuple(COUNTRY_OF))
        forms: tuple[str, ...] = (f"Is {{}} the capital of {country}?",)
        answer = f"the capital of {country} is {truth}."
    else:
        thing = pick(rng, tuple(COLOURS))
        truth, claim = COLOURS[thing], pick(rng, tuple(COLOURS.values()))
        forms = (f"Is {thing} {{}}?", f"Is {{}} the color of {thing}?")
        answer = f"{thing} is {truth}."
    if rng.random() < 0.5:
        claim = truth
    return [user(pick(rng, forms).format(claim)), assistant(f"{'Yes' if claim == truth else 'No'}, {answer}")]


def unknown(rng: random.Random, split: Split) -> list[Message]:
    """What is in no table is not known: better said than made up."""
    form = pick(rng, ("What is the capital of {}?", "Which country has {} as its capital?", "Who is {}?", "What is {}?",
                      "What do you know about {}?", "Where is {}?"))  # fmt: skip
    return [user(form.format(proper(rng, split))), assistant("I am sorry, I do not know that.")]


def listing(rng: random.Random, split: Split) -> list[Message]:
    """Days, months and numbers in their order: longer answers that can be checked."""
    kind = rng.random()
    items: tuple[str, ...]
    forms: tuple[str, ...]
    if kind < 0.25:
        items = WEEKDAYS
        forms = ("List the days of the week.", "Name all days of the week.", "What are the days of the week?")
    elif kind < 0.5:
        items = MONTHS
        forms = ("List the months of the year.", "Name all months.", "What are the months of the year?")
    else:
        start = 1 if rng.random() < 0.5 else rng.randint(2, 80)
        end = start + rng.randint(2, 19)
        forms = (
            f"Count from {start} to {end}.",
            f"Count from {start} to {end}",
            f"List the numbers from {start} to {end}.",
        )
        if start == 1:
            forms += (f"Count to {end}.",)
        items = tuple(str(n) for n in range(start, end + 1))
    return [user(pick(rng, forms)), assistant(", ".join(items))]


def plain_text(rng: random.Random) -> str:
    """The same facts outside of any conversation: many a user begins with "The capital of France is"."""
    if rng.random() < 0.15:
        start = rng.randint(1, 60)
        return ", ".join(str(n) for n in range(start, start + rng.randint(5, 30)))
    if rng.random() < 0.1:
        return ", ".join(pick(rng, (WEEKDAYS, MONTHS)))
    return " ".join(pick(rng, TABLES)(rng)[1] for _ in range(rng.randint(2, 8)))


@lru_cache(maxsize=1)
def undressed() -> frozenset[str]:
    """All wordings as the tables give them, in lower case.

    A follow-up begins with one of them whatever its hash, so that none of them counts as held out.
    """
    rng = random.Random("undressed")
    return frozenset(w.lower() for _ in range(20_000) for w in pick(rng, TABLES)(rng)[0])


def never_asked(rng: random.Random) -> list[Message]:
    """A held-out question that occurs nowhere in training, not even at the head of a follow-up."""
    while True:
        messages = exchange(rng, "held_out")
        if messages[0]["content"].lower() not in undressed():
            return messages


def follow_up(rng: random.Random, split: Split) -> list[Message]:
    """A question, then "And Italy?": the second makes sense only with the first."""
    table = pick(rng, (_capital, _capital, _opposite, _colour, _neighbour, _month_days, _country))
    wordings, answer, _, _ = table(rng)
    messages = [user(pick(rng, wordings)), assistant(answer)]
    for _ in range(pick(rng, (1, 1, 2))):
        _, answer, _, subject = table(rng)
        if table is _neighbour:  # "and after May?" must stay with days or with months only if it says so itself
            form = pick(rng, ("And {}?", "And the one {}?", "What comes {}?"))
        else:
            form = pick(rng, ("And {}?", "What about {}?", "And of {}?", "How about {}?", "and {}"))
            if table in (_colour, _month_days):
                form = form.replace(" of", "")
        messages += [user(form.format(subject)), assistant(answer)]
    return messages
