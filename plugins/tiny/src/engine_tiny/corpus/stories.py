"""Short stories: a hero, a friend, a place, a thing, and one of the plots."""

import random

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Message, Split, assistant, pick, user
from engine_tiny.corpus.plots import COLOURS, ENDINGS, HABITS, HEROES, OPENINGS, PLACES, PLOTS, SHE, TRAITS, TREASURES


def _cast(rng: random.Random, split: Split) -> dict[str, str]:
    kind, kind2 = rng.sample(HEROES, 2)
    she = kind in SHE or (kind not in ("boy", "king") and rng.random() < 0.4)
    place, place2 = rng.sample(PLACES, 2)
    trait, trait2 = rng.sample(TRAITS, 2)
    return {
        "hero": words.first_name(rng, split), "friend": words.first_name(rng, split), "town": words.proper(rng, split),
        "kind": kind, "kind2": kind2, "place": place, "place2": place2, "trait": trait, "trait2": trait2,
        "thing": pick(rng, TREASURES), "colour": pick(rng, COLOURS),
        "he": "she" if she else "he", "He": "She" if she else "He",
        "his": "her" if she else "his", "His": "Her" if she else "His",
    }  # fmt: skip


def _article(text: str) -> str:
    """The templates say "a": some words want "an"."""
    for word in ("old", "owl", "elephant", "island", "apple"):
        text = text.replace(f" a {word}", f" an {word}")
    return text


def tell(cast: dict[str, str], rng: random.Random) -> str:
    beats = [pick(rng, OPENINGS), *rng.sample(HABITS, rng.randint(0, 2))]
    beats += [pick(rng, ways) for ways in pick(rng, PLOTS)]
    beats.append(pick(rng, ENDINGS))
    return _article(" ".join(beats).format(**cast))


def story(rng: random.Random, split: Split) -> str:
    return tell(_cast(rng, split), rng)


def request(rng: random.Random, split: Split) -> list[Message]:
    """A story on demand, sometimes with the hero, the friend or the thing that was asked for."""
    cast = _cast(rng, split)
    form = pick(rng, (
        "Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a story.", "tell me a story",
        "Tell me a story about a {kind}.", "Tell me a story about a {kind} named {hero}.",
        "Write a short story about {hero} and {friend}.", "I want a story about a {colour} {thing}.",
        "Tell me a story about {hero} the {kind}.", "Write a story about a {trait} {kind} called {hero}.",
        "Tell me a bedtime story about a {kind} and a {kind2}.",
    ))  # fmt: skip
    return [user(_article(form.format(**cast))), assistant(tell(cast, rng))]


def questions(rng: random.Random, split: Split) -> list[Message]:
    """A story, and questions about who was in it."""
    cast = _cast(rng, split)
    text = tell(cast, rng)
    facts = [(f"What is the name of the {cast['kind']}?", f"The {cast['kind']} is called {cast['hero']}.")]
    if f"{cast['friend']} the {cast['kind2']}" in text:
        facts.append((f"Who is {cast['friend']}?", f"{cast['friend']} is a {cast['kind2']}."))
    if cast["town"] in text:
        facts.append(("What is the name of the place?", f"The place is called {cast['town']}."))
    facts.append((f"Who is {cast['hero']}?", f"{cast['hero']} is a {cast['kind']}."))
    rng.shuffle(facts)
    question, answer = facts[0]
    messages = [user(f"{text}\n{question}"), assistant(answer)]
    for question, answer in facts[1 : rng.randint(1, 3)]:
        messages += [user(question), assistant(answer)]
    return messages
