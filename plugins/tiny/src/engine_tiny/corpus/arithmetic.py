"""Sums, differences and times tables, in figures and in words. A pair of numbers is held out as a whole."""

import random

from engine_tiny.corpus.base import Message, Split, assistant, is_held_out, pick, user

_WORDS = {"+": ("plus", "and"), "-": ("minus",), "*": ("times", "multiplied by")}


def _numbers(rng: random.Random) -> tuple[int, str, int]:
    operator = pick(rng, "+++---**")
    if operator == "*":
        return rng.randint(0, 10), operator, rng.randint(0, 10)
    limit = pick(rng, (10, 20, 100, 100, 100, 100))
    a, b = rng.randrange(limit), rng.randrange(limit)
    if operator == "-" and a < b and rng.random() < 0.85:
        a, b = b, a
    return a, operator, b


def problem(rng: random.Random, split: Split) -> tuple[int, str, int, int]:
    """Times tables are a table: all of it is learnt. Sums and differences are told apart by their numbers."""
    while True:
        a, operator, b = _numbers(rng)
        value = a + b if operator == "+" else a - b if operator == "-" else a * b
        if operator == "*" or is_held_out(f"sum {a} {operator} {b}") == (split == "held_out"):
            return a, operator, b, value


def exchange(rng: random.Random, split: Split) -> list[Message]:
    a, operator, b, value = problem(rng, split)
    word = pick(rng, _WORDS[operator])
    spoken = f"{a} {word if word != 'and' else 'plus'} {b}"
    written = f"{a} {operator} {b}" if rng.random() < 0.8 else f"{a}{operator}{b}"
    forms = [
        f"What is {written}?",
        f"What is {written}?",
        f"What is {spoken}?",
        f"What's {spoken}?",
        f"{written}",
        f"{written} =",
        f"How much is {written}?",
        f"How much is {spoken}?",
        f"Calculate {written}.",
        f"Compute {spoken}.",
        f"Can you work out {written}?",
        f"Tell me what {spoken} is.",
        f"{spoken}?",
        f"Solve {written}",
    ]
    if operator == "+":
        forms += [f"What is the sum of {a} and {b}?", f"Add {a} and {b}."]
    elif operator == "-":
        forms += [f"Subtract {b} from {a}.", f"What do I get when I take {b} from {a}?"]
    else:
        forms += [f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?", f"What is {a} x {b}?"]
    return [user(pick(rng, forms)), assistant(f"{a} {operator} {b} = {value}")]


def follow_up(rng: random.Random, split: Split) -> list[Message]:
    messages = exchange(rng, split)
    for _ in range(rng.randint(1, 3)):
        a, operator, b, value = problem(rng, split)
        form = pick(rng, ("And {}?", "What about {}?", "Now {}.", "{}", "and {}"))
        messages += [user(form.format(f"{a} {operator} {b}")), assistant(f"{a} {operator} {b} = {value}")]
    return messages
