"""What `engine bench speculation` asks: conversations of one or several turns, by kind."""

from __future__ import annotations

PROMPTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "stories": (
        ("Tell me a story about a girl and a silver drum.",),
        ("Tell me a story about a fox who finds a boat.",),
        ("Write a short story about an old man who plants a tree.",),
    ),
    "facts": (
        ("What is the capital of France? Name the days of the week as well.",),
        ("What is seven times eight?",),
        ("What colour is the sky, and what is the opposite of hot?",),
    ),
    "JSON": (
        ('Extract the name, the age and the city as JSON: "Anna is 31 years old and lives in Madrid."',),
        ('Extract the name, the age and the city as JSON: "Tom, who is 8, comes from Oslo."',),
        ('Write a JSON list of three fruits, each an object with the keys "name", "colour" and "price".',),
    ),
    "code": (
        (
            "Rename the variable `total` to `amount` and repeat the whole function:\n\n"
            "def add_all(values):\n    total = 0\n    for value in values:\n        total = total + value\n"
            "    return total\n",
        ),
        (
            "Repeat this text with every `get` changed to `fetch`:\n\n"
            "a = get(1)\nb = get(2)\nc = get(3)\nprint(get(a), get(b), get(c))\n",
        ),
        ("Write a Python function that returns the largest of three numbers, and one that returns the smallest.",),
    ),
    "multi-turn": (
        ("Tell me a story about a cat.", "Repeat the story.", "Who is the story about?"),
        ("My name is Ben and I live in Rome.", "What is my name?", "Where do I live?", "Say both again."),
    ),
}
"""Kind, conversations, what the user says in each turn. Answers are the model's own."""

WARM_UP = "Say hello."
"""Asked once before anything is measured."""
