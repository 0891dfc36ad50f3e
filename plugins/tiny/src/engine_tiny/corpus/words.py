# ruff: noqa: SIM905 -- word lists read best as text
"""Names, places and nonsense words: so many that a model must copy them, for it cannot remember them."""

import random

from engine_tiny.corpus.base import Split, draw, pick

FIRST_NAMES = tuple(
    """Ada Alan Alice Amir Amy Anna Anton Aria Arthur Bella Ben Bert Bianca Bob Bruno Cara Carl Carlos Clara
    Cleo Dan Dana David Diego Dora Ed Eli Elif Ella Emil Emma Erik Eva Felix Fiona Flora Frank Freya George Grace
    Greta Hana Hans Hugo Ida Igor Ines Iris Ivan Ivy Jack Jane Jim Joan Joe John Jonas Julia Kai Karl Kate Kim Kofi
    Lara Leo Lena Lily Lina Lisa Liu Luca Lucy Luis Maja Mara Maria Mark Marta Mary Max Mei Mia Mike Mila Milo Mina
    Nadia Nick Nina Noah Nora Olga Oli Omar Oscar Otto Paul Pedro Petra Pia Rafa Ravi Rita Rosa Ruth Sam Sara Sofia
    Sven Tara Theo Tim Tina Tom Uma Vera Victor Wanda Will Yara Yuki Zara Zoe""".split()
)
CITIES = tuple(
    """Paris|London|Berlin|Rome|Madrid|Lisbon|Vienna|Prague|Tokyo|Cairo|Oslo|Dublin|Athens|Delhi|Moscow|Lima|Boston|
    Chicago|New York|San Francisco|Los Angeles|Seattle|Toronto|Sydney|Mumbai|Shanghai|Seoul|Munich|Hamburg|Milan|
    Geneva|Zurich|Barcelona|Amsterdam|Brussels|Warsaw|Budapest|Helsinki|Stockholm|Copenhagen|Nairobi|Lagos|Dakar|
    Mexico City|Rio de Janeiro|Hong Kong|Singapore|Bangkok|Hanoi|Istanbul|Dubai|Denver|Dallas|Austin|Miami""".replace(
        "\n", ""
    ).split("|")
)
CITIES = tuple(city.strip() for city in CITIES)
THINGS = tuple(
    """apples books candles chairs cups doors eggs flowers forks gloves hats jars keys lamps lemons maps mirrors
    pears pens pencils pillows plates pots ropes shirts shoes spoons stamps stones tables tents tickets towels toys
    umbrellas vases watches bottles baskets blankets brushes buttons coats clocks carpets drums kites""".split()
)
JOBS = tuple(
    """baker teacher doctor nurse pilot farmer painter singer writer lawyer judge cook driver sailor
    gardener plumber dentist engineer carpenter tailor waiter librarian mechanic photographer actor dancer""".split()
)
ONSETS = tuple(
    "b bl br c ch d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn st t th tr v w y z".split()
)
VOWELS = tuple("a e i o u a e i o u ai ea ee oo ou ia".split())
CODAS = (
    "",
    "",
    "",
    "n",
    "r",
    "l",
    "s",
    "t",
    "k",
    "m",
    "nd",
    "rk",
    "st",
    "ck",
    "ll",
    "x",
    "th",
    "d",
    "p",
    "g",
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def _syllables(rng: random.Random) -> str:
    count = pick(rng, (1, 2, 2, 2, 3))
    return "".join(pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, CODAS) for _ in range(count))


def nonsense(rng: random.Random, split: Split) -> str:
    """A word that means nothing, in lower case; held-out words never occur in training."""
    return draw(lambda: _syllables(rng), split)


def proper(rng: random.Random, split: Split) -> str:
    return nonsense(rng, split).capitalize()


def person(rng: random.Random, split: Split) -> str:
    """A first name, mostly with a family name, often both of them never seen again."""
    chance = rng.random()
    if chance < 0.25:
        return f"{pick(rng, FIRST_NAMES)} {proper(rng, split)}"
    if chance < 0.6:
        return f"{proper(rng, split)} {proper(rng, split)}"
    if chance < 0.75 and split == "train":
        return str(pick(rng, FIRST_NAMES))
    return proper(rng, split)


def first_name(rng: random.Random, split: Split) -> str:
    return str(pick(rng, FIRST_NAMES)) if rng.random() < 0.4 else proper(rng, split)


def city(rng: random.Random, split: Split) -> str:
    chance = rng.random()
    if chance < 0.35:
        return str(pick(rng, CITIES))
    if chance < 0.45:
        return f"{pick(rng, ('San', 'New', 'Port', 'Saint', 'North', 'South', 'Old', 'Fort'))} {proper(rng, split)}"
    if chance < 0.5:
        return f"{proper(rng, split)}, {proper(rng, split)}"
    return proper(rng, split)


def phrase(rng: random.Random, split: Split) -> str:
    """A few words in lower case, as one types them into a search box."""
    words = [nonsense(rng, split) if rng.random() < 0.6 else pick(rng, THINGS) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        words.append(str(rng.randint(1, 2030)))
    return " ".join(words)


def title(rng: random.Random, split: Split) -> str:
    return f"The {proper(rng, split)}" if rng.random() < 0.5 else f"{proper(rng, split)} {proper(rng, split)}"


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def number(rng: random.Random, digits: int = 4) -> int:
    """Every length is as likely as any other."""
    return rng.randint(0, 10 ** rng.randint(1, digits) - 1)
