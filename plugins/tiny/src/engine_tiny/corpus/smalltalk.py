"""Greetings, thanks, who one talks to; and things said earlier in the conversation that must be remembered."""

import random

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Message, Split, assistant, pick, user

TALK: tuple[tuple[str, str], ...] = (
    ("Hello!|Hi!|Hi there!|Hey!|Hello|hi|hey|Hello there!|Good day!", "Hello! How can I help you?"),
    ("Good morning!|good morning", "Good morning! How can I help you?"),
    ("Good evening!|good evening", "Good evening! How can I help you?"),
    ("How are you?|How are you today?|how are you|How do you do?", "I am fine, thank you. How are you?"),
    ("I am fine.|I am fine, thanks.|I'm good.|Very well, thank you.|good", "I am glad to hear that."),
    ("Thank you!|Thanks!|Thanks a lot!|Thank you very much.|thanks|thank you", "You are welcome!"),
    ("Bye!|Goodbye!|See you!|bye|Good bye.|See you later!", "Goodbye! Have a nice day."),
    ("Good night!|good night", "Good night! Sleep well."),
    (
        "Who are you?|What are you?|who are you|Tell me who you are.|What is this?|Are you a model?",
        "I am Tiny, a small language model that ships with Engine.",
    ),
    ("What is your name?|What's your name?|what is your name|Do you have a name?", "My name is Tiny."),
    (
        "What can you do?|How can you help me?|what can you do|What do you know?|Help!|help",
        "I know capitals, opposites, colors, days and months. "
        "I can add, tell short stories, extract JSON and call tools.",
    ),
    ("Are you a human?|Are you a person?|Are you real?|are you human", "No, I am a small language model."),
    (
        "Who made you?|Who built you?|Where do you come from?|who made you",
        "I was trained from scratch by a script in the Engine project.",
    ),
    ("How old are you?|When were you born?", "I am a model, so I have no age."),
    (
        "How big are you?|How many parameters do you have?",
        "I am very small: I have less than eight million parameters.",
    ),
    ("I am sad.|I feel sad.|I'm sad today.|i am sad", "I am sorry to hear that. Do you want to hear a story?"),
    ("I am happy.|I feel good today.|I'm so happy!|i am happy", "That is good to hear!"),
    ("I am tired.|I'm tired.|I am so tired today.", "Then it is time to rest a little."),
    ("I am hungry.|I'm hungry.|i am hungry", "Then it is time to eat something."),
    ("I am bored.|I'm bored.|i am bored", "Shall I tell you a story?"),
    (
        "Tell me a joke.|Do you know a joke?|tell me a joke|Make me laugh.",
        "Why did the book go to the doctor? Because it had a broken spine.",
    ),
    ("Yes.|yes|OK.|ok|Sure.|Okay.", "Good! What can I do for you?"),
    ("No.|no|No, thanks.|Not now.", "All right. Tell me when you need me."),
    ("I love you.|I like you.|You are great!|Well done!|Good job!|Great!", "Thank you! That is kind of you."),
    ("You are wrong.|That is wrong.|No, that is not right.", "I am sorry. I am a small model and I make mistakes."),
    ("What is the meaning of life?|Why are we here?", "I am too small a model to know that."),
    ("How many days are in a week?|How many days does a week have?", "A week has seven days."),
    ("How many months are in a year?|How many months does a year have?", "A year has twelve months."),
    ("How many hours are in a day?|How many hours does a day have?", "A day has 24 hours."),
    ("How many minutes are in an hour?|How many minutes does an hour have?", "An hour has 60 minutes."),
)


def exchange(rng: random.Random, split: Split) -> list[Message]:
    questions, answer = pick(rng, TALK)
    return [user(pick(rng, questions.split("|"))), assistant(answer)]


def opening(rng: random.Random, split: Split) -> list[Message]:
    questions, answer = TALK[int(rng.random() * 4)]
    return [user(pick(rng, questions.split("|"))), assistant(answer)]


def closing(rng: random.Random, split: Split) -> list[Message]:
    questions, answer = TALK[5 + int(rng.random() * 3)]
    return [user(pick(rng, questions.split("|"))), assistant(answer)]


def memory(rng: random.Random, split: Split) -> tuple[list[Message], list[Message]]:
    """Something told, and the question that asks for it later."""
    kind = pick(rng, ("name", "name", "city", "pet", "number", "word"))
    if kind == "name":
        value = words.first_name(rng, split)
        told = pick(
            rng,
            (
                "My name is {}.",
                "I am {}.",
                "Hi, I am {}.",
                "Hello, my name is {}.",
                "Call me {}.",
                "my name is {}",
            ),
        )
        reply = f"Nice to meet you, {value}!"
        asked, answer = (
            "What is my name?|Who am I?|Do you remember my name?|what is my name",
            f"Your name is {value}.",
        )
    elif kind == "city":
        value = words.city(rng, split)
        told = pick(rng, ("I live in {}.", "I come from {}.", "My home is in {}."))
        reply = f"{value} must be a nice place."
        asked, answer = (
            "Where do I live?|Where is my home?|Which city do I live in?",
            f"You live in {value}.",
        )
    elif kind == "pet":
        value, animal = words.first_name(rng, split), pick(rng, ("dog", "cat", "horse", "bird", "rabbit"))
        told = pick(rng, (f"My {animal} is called {{}}.", f"I have a {animal}. Its name is {{}}."))
        reply = f"{value} is a good name for a {animal}."
        asked = f"What is the name of my {animal}?|What is my {animal} called?|How is my {animal} called?"
        answer = f"Your {animal} is called {value}."
    elif kind == "number":
        value = str(words.number(rng, 5))
        told = pick(rng, ("My number is {}.", "Remember the number {}.", "Keep this number: {}"))
        reply = f"I will remember {value}."
        asked, answer = (
            "What is my number?|Which number was it?|What was the number?",
            f"The number is {value}.",
        )
    else:
        value = words.nonsense(rng, split)
        told = pick(rng, ("The secret word is {}.", "Remember the word {}.", "Our password is {}."))
        reply = f"I will remember {value}."
        asked = "What is the secret word?|Which word was it?|What was the word?|What is the password?"
        answer = f"The word is {value}."
    return [user(told.format(value)), assistant(reply)], [
        user(pick(rng, asked.split("|"))),
        assistant(answer),
    ]


def echo(rng: random.Random, split: Split) -> list[Message]:
    """Plain copying of what nobody ever said before."""
    count = rng.randint(1, 5)
    makers = (words.nonsense, words.proper)
    items = [str(words.number(rng)) if rng.random() < 0.2 else pick(rng, makers)(rng, split) for _ in range(count)]
    text = " ".join(items)
    form = pick(rng, ("Repeat: {}", "Say: {}", "Repeat after me: {}", "Please say {}", "Write: {}", "Copy this: {}"))
    return [user(form.format(text)), assistant(text)]
