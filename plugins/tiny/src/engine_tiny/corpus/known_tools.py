"""The tools that every assistant meets: weather, calculator, search, time."""

import random
from collections.abc import Callable

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Message, Split, assistant, pick, user
from engine_tiny.corpus.toolcase import Case, call, dump, make_tool, wordy


def weather(rng: random.Random, split: Split) -> Case:
    name = pick(rng, ("get_weather", "get_weather", "get_weather", "weather", "get_current_weather", "weather_lookup"))
    key, city = pick(rng, ("city", "city", "location", "place")), words.city(rng, split)
    parameters, arguments, tail = {key: "string"}, {key: city}, ""
    extra = rng.random()
    if extra < 0.2:
        unit_key = pick(rng, ("unit", "unit", "units"))
        parameters[unit_key] = "string"
        if rng.random() < 0.6:
            arguments[unit_key] = pick(rng, ("celsius", "fahrenheit"))
            tail = f" in {arguments[unit_key]}"
    elif extra < 0.35:
        day_key = pick(rng, ("day", "date"))
        parameters[day_key] = "string"
        if rng.random() < 0.7:
            arguments[day_key] = pick(rng, (*words.WEEKDAYS, "today", "tomorrow", "today", "tomorrow"))
            tail = pick(rng, (" {}", " on {}")).format(arguments[day_key])
            if "day" not in arguments[day_key].replace("today", ""):
                tail = f" {arguments[day_key]}"
    plain = list(parameters) == [key] or "unit" in " ".join(parameters)
    now = "" if tail or not plain else pick(rng, ("", "", " today", " now", " right now"))
    request = pick(
        rng,
        (
            f"What is the weather in {city}{tail}{now}?",
            f"What's the weather like in {city}{tail}{now}?",
            f"How is the weather in {city}{tail}{now}?",
            f"Tell me the weather in {city}{tail}.",
            f"What is the weather like in {city}{tail}{now}?",
            f"Get the weather for {city}{tail}.",
            f"Is it warm in {city}{tail}{now}?",
            f"Weather in {city}{tail}?",
            f"Can you check the weather in {city}{tail}?",
            f"How warm is it in {city}{tail}{now}?",
            f"I want to know the weather in {city}{tail}.",
            f"Please tell me the weather in {city}{tail}.",
            f"what is the weather in {city}{tail}{now}",
        ),
    )
    sky = pick(rng, ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "hot", "cold", "mild"))
    warmth = rng.randint(-15, 42)
    temperature = pick(rng, ("temperature", "temp", "temperature_c"))
    unit = arguments.get("unit", pick(rng, ("celsius", "C")))
    answer = f"It is {sky} and {warmth} degrees in {city}."
    if rng.random() < 0.75:
        result = pick(
            rng,
            (
                dump({temperature: warmth, pick(rng, ("condition", "conditions", "sky", "weather")): sky}),
                dump({"city": city, "temperature": warmth, "condition": sky}),
                dump({key: city, temperature: warmth, "unit": unit, "condition": sky}),
                dump({"condition": sky, temperature: warmth}),
                dump({temperature: warmth, "unit": unit, "condition": sky}),
                f"{sky}, {warmth} degrees",
                f"{warmth} C and {sky}",
                f"{sky.capitalize()}, {warmth} C",
                f"{city}: {sky}, {warmth} C",
                f"It is {sky} and {warmth} degrees.",
            ),
        )
    elif rng.random() < 0.6:
        answer = f"It is {warmth} degrees in {city}."
        result = pick(
            rng,
            (
                dump({temperature: warmth}),
                dump({temperature: str(warmth), "unit": unit}),
                f"{warmth} degrees",
                f"{warmth} C",
                dump({key: city, temperature: warmth}),
                dump({key: city, temperature: str(warmth), "unit": unit}),
                f"{warmth}",
            ),
        )
    else:
        answer = f"It is {sky} in {city}."
        result = pick(rng, (sky, dump({"condition": sky}), dump({"weather": sky}), sky.capitalize()))
    description = pick(
        rng,
        (
            "Get the weather.",
            "Get the current weather in a city.",
            "Get the weather for a city.",
            "",
            "Weather of a place.",
            "Get the current weather in a given location.",
            "Returns the weather. Use it when asked about the weather.",
        ),
    )
    return Case(
        make_tool(name, wordy(description, rng, split), parameters),
        request,
        arguments,
        result,
        answer,
        "weather",
    )


def _calculator(rng: random.Random, split: Split) -> Case:
    name = pick(rng, ("calculator", "calculator", "calculate", "calc", "evaluate"))
    key = pick(rng, ("expression", "expression", "expression", "formula", "input"))
    a, b = words.number(rng), words.number(rng)
    operator, word = pick(rng, (("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    written = f"{a} {operator} {b}"
    said = written if rng.random() < 0.5 else f"{a} {word} {b}"
    request = pick(rng, (
        f"What is {said}?", f"How much is {said}?", f"Calculate {said}.", f"Compute {said}.", f"What's {said}?",
        f"Please work out {said}.", f"Use the {name} for {said}.", f"{said}", f"Can you calculate {said}?",
    ))  # fmt: skip
    value = words.number(rng, 6)  # deliberately not the true value: the answer must come from the tool
    result = pick(rng, (dump({"result": value}), str(value), dump({"value": value}), f"{written} = {value}"))
    tool = make_tool(name, pick(rng, ("Evaluate an expression.", "Do arithmetic.", "Calculate.", "")), {key: "string"})
    return Case(tool, request, {key: written}, result, f"{written} = {value}", "calculator")


def _binary(rng: random.Random, split: Split) -> Case:
    name, operator, said = pick(
        rng,
        (
            ("add", "+", "{} plus {}"),
            ("add", "+", "the sum of {} and {}"),
            ("subtract", "-", "{} minus {}"),
            ("multiply", "*", "{} times {}"),
            ("multiply", "*", "the product of {} and {}"),
            ("divide", "/", "{} divided by {}"),
        ),
    )
    a, b = words.number(rng), words.number(rng)
    first, second = pick(rng, (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
    spoken = said.format(a, b) if rng.random() < 0.6 else f"{a} {operator} {b}"
    request = pick(rng, (f"What is {spoken}?", f"How much is {spoken}?", f"Compute {spoken}.", f"What's {spoken}?"))
    value = words.number(rng, 6)
    result = pick(rng, (dump({"result": value}), str(value)))
    tool = make_tool(
        name, pick(rng, (f"{name.capitalize()} two numbers.", "")), dict.fromkeys((first, second), "integer")
    )
    return Case(tool, request, {first: a, second: b}, result, f"{a} {operator} {b} = {value}", "calculator")


def search(rng: random.Random, split: Split) -> Case:
    name = pick(rng, ("search", "search", "web_search", "search_web", "lookup"))
    key = pick(rng, ("query", "query", "query", "q", "text"))
    query = words.phrase(rng, split) if rng.random() < 0.7 else words.person(rng, split)
    request = pick(
        rng,
        (
            f"Search for {query}.",
            f"Search for {query}",
            f"Look up {query}.",
            f"Find {query}.",
            f"Search the web for {query}.",
            f"Please search for {query}.",
            f"Can you look up {query}?",
            f"Find something about {query}.",
            f"Search: {query}",
            f"What can you find about {query}?",
        ),
    )
    found = pick(rng, (
        f"{words.proper(rng, split)} is a {pick(rng, words.JOBS)} from {words.city(rng, split)}.",
        f"{words.proper(rng, split)} was founded in {rng.randint(1200, 2020)}.",
        f"{words.number(rng)} {pick(rng, words.THINGS)} in {words.city(rng, split)}.", words.title(rng, split),
    ))  # fmt: skip
    result = pick(rng, (dump({"result": found}), found, dump({"results": [found]})))
    tool = make_tool(
        name,
        pick(rng, ("Search the web.", "Search for something.", "Look something up.", "")),
        {key: "string"},
    )
    return Case(tool, request, {key: query}, result, f"I found this: {found}", "search")


def time(rng: random.Random, split: Split) -> Case:
    name = pick(rng, ("get_time", "get_time", "time", "get_current_time", "clock"))
    key, city, clock = (
        pick(rng, ("city", "city", "place", "location", "timezone")),
        words.city(rng, split),
        words.clock(rng),
    )
    bare = rng.random() < 0.25
    where = "" if bare else f" in {city}"
    request = pick(rng, (
        f"What time is it{where}?", f"What is the time{where}?", f"Tell me the time{where}.", f"How late is it{where}?",
        f"What's the time{where} now?", f"what time is it{where}",
    ))  # fmt: skip
    result = pick(rng, (dump({"time": clock}), clock, dump({"result": clock})))
    tool = make_tool(name, pick(rng, ("Get the time.", "Get the current time.", "")), {} if bare else {key: "string"})
    return Case(tool, request, {} if bare else {key: city}, result, f"It is {clock}{where}.", "time")


KNOWN: tuple[Callable[[random.Random, Split], Case], ...] = (
    weather, weather, _calculator, _calculator, _binary, search, search, time,
)  # fmt: skip


def known_case(rng: random.Random, split: Split) -> Case:
    return pick(rng, KNOWN)(rng, split)


def weather_again(case: Case, rng: random.Random, split: Split) -> Case:
    """ "And in Rome?": the same tool, another place."""
    other = weather(rng, split)
    while len(other.arguments) > 1:
        other = weather(rng, split)
    key, place = next(iter(case.arguments)), next(iter(other.arguments.values()))
    form = pick(rng, ("And in {}?", "What about {}?", "And {}?", "How about {}?", "And what about {}?", "and in {}"))
    return Case(case.tool, form.format(place), {key: place}, other.result, other.answer, case.family)


def pair_of_calls(rng: random.Random, split: Split) -> tuple[Case, list[Message]]:
    """Two places in one question: two calls in one turn, then two results."""
    first = weather(rng, split)
    while len(first.arguments) > 1:
        first = weather(rng, split)
    second = weather_again(first, rng, split)
    key = next(iter(first.arguments))
    here, there = first.arguments[key], second.arguments[key]
    question = pick(
        rng, (f"What is the weather in {here} and {there}?", f"Compare the weather in {here} and in {there}.")
    )
    message = call(first)
    function = {"name": first.name, "arguments": {key: there}}
    message["tool_calls"] = [*message["tool_calls"], {"type": "function", "function": function}]
    results: list[Message] = [{"role": "tool", "content": case.result} for case in (first, second)]
    return first, [user(question), message, *results, assistant(f"{first.answer} {second.answer}")]
