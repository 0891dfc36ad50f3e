# ruff: noqa: SIM905 -- word lists read best as text
"""What stories are made of: heroes, places, things, and a few plots told in many ways."""

HEROES = tuple(
    """girl boy fox bear cat dog mouse rabbit owl frog duck hen goat pony squirrel hedgehog turtle elephant lion
    penguin bee robot dragon giant king queen farmer baker sailor""".split()
)
SHE = ("girl", "queen", "hen", "cat", "duck", "bee", "owl", "pony")
PLACES = tuple(
    """village|town|forest|valley|castle|farm|garden|harbor|mountain|river|lake|island|school|market|meadow|hill|
    city|beach|mill|cave""".replace("\n", "").split("|")
)
TREASURES = tuple(
    """ball kite hat key lamp boat drum book bell coat ring map basket clock stone flower apple cake spoon blanket
    mirror flute wagon doll coin candle""".split()
)
TRAITS = tuple("little old young brave kind clever shy curious merry quiet lazy proud gentle small happy".split())
COLOURS = tuple("red blue green yellow white black golden silver purple brown".split())

OPENINGS = (
    "Once upon a time, there was a {trait} {kind} named {hero} who lived in a {place}.",
    "Once there was a {trait} {kind} called {hero}. {He} lived near a {place}.",
    "In a {place} called {town} lived a {trait} {kind} named {hero}.",
    "{hero} was a {trait} {kind}. {He} lived in {town}, a small {place}.",
    "Long ago, in the {place} of {town}, there lived a {trait} {kind} whose name was {hero}.",
    "There was once a {kind} named {hero} who was very {trait}.",
)
HABITS = (
    "{He} had a {colour} {thing} and loved it very much.",
    "Every morning {he} went for a walk with {his} friend {friend}.",
    "{hero} liked to play with {his} {colour} {thing}.",
    "{His} best friend was {friend}, a {trait2} {kind2}.",
    "{He} loved the sun and the wind.",
    "Everybody in {town} knew {hero}.",
    "{He} liked to sing in the evening.",
    "Each day {he} played with {friend} the {kind2}.",
)
PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (  # lost and found
        (
            "One day, the {colour} {thing} was gone.",
            "One morning, {hero} could not find {his} {thing}.",
            "But one day {he} lost {his} {colour} {thing}.",
        ),
        (
            "{He} looked under the bed and behind the door, but it was not there.",
            "{He} looked everywhere and began to cry.",
            "{hero} was very sad and asked everybody about the {thing}.",
        ),
        (
            '"Do not be sad," said {friend}. "I will help you."',
            '"Let us look together," said {friend} the {kind2}.',
            '{friend} came and asked, "What is wrong, {hero}?"',
        ),
        (
            "They looked by the {place2} until it was dark.",
            "They walked to the {place2} and looked under every stone.",
            "Together they went to the {place2}.",
        ),
        (
            "There, under a tree, lay the {thing}!",
            "At last {friend} saw something {colour} in the grass. It was the {thing}!",
            "And there was the {colour} {thing}, behind a big stone.",
        ),
        (
            '"Thank you, {friend}!" said {hero}.',
            "{hero} was so happy that {he} jumped up and down.",
            "{hero} laughed and gave {friend} a hug.",
        ),
    ),
    (  # storm
        (
            "One night, a big storm came.",
            "One day, the sky turned dark and it began to rain.",
            "Then a terrible storm came over {town}.",
        ),
        (
            "The wind was loud and {hero} was afraid.",
            "The wind blew so hard that the trees fell down.",
            "The rain fell and fell, and the water rose.",
        ),
        (
            "{hero} heard somebody call for help. It was {friend}.",
            "{friend} the {kind2} had no place to go.",
            "The house of {friend} had lost its roof.",
        ),
        (
            '"Come in," said {hero}, "my house is warm and dry."',
            '"You can stay with me," said {hero}.',
            "{hero} opened the door and let {friend} in.",
        ),
        (
            "They sat by the fire and ate warm soup.",
            "They told each other stories until the storm was over.",
            "They lit a candle and sang until they fell asleep.",
        ),
        (
            "In the morning the sun was shining again.",
            "The next day the sky was blue.",
            "When they woke up, the storm was gone.",
        ),
    ),
    (  # the journey
        (
            "One day, {hero} wanted to see the {place2}.",
            'One morning {he} said, "Today I will go to the {place2}."',
            "{hero} had always wanted to see what was behind the {place2}.",
        ),
        (
            "{He} took {his} {thing} and some bread and began to walk.",
            "{He} packed a {colour} {thing} and said goodbye to {friend}.",
            "So {he} put on {his} shoes and left {town}.",
        ),
        (
            "The way was long and {he} was tired.",
            "{He} walked for two days and two nights.",
            "After a while {he} did not know the way any more.",
        ),
        (
            "Then {he} met {friend}, a {trait2} {kind2}.",
            "By the road sat a {trait2} {kind2} named {friend}.",
            "Behind a tree {he} found {friend} the {kind2}.",
        ),
        (
            '"I know the way," said {friend}. "Follow me."',
            '"Give me some bread and I will show you the way," said {friend}.',
            '"Are you lost?" asked {friend}. "I can help you."',
        ),
        (
            "Together they reached the {place2}, and it was beautiful.",
            "They came to the {place2} before the sun went down.",
            "When they saw the {place2}, they were very happy.",
        ),
    ),
    (  # sharing
        (
            "One day, {hero} found a {colour} {thing} near the {place2}.",
            "One day, {hero} got a new {colour} {thing}.",
            "For {his} birthday, {hero} got a {colour} {thing}.",
        ),
        (
            "{friend} saw it and wanted to have it too.",
            '"May I play with it?" asked {friend} the {kind2}.',
            '{friend} came and said, "What a nice {thing}!"',
        ),
        (
            '"No," said {hero}, "it is mine!"',
            "But {hero} did not want to share it.",
            "{hero} hid the {thing} and ran away.",
        ),
        (
            "{friend} was sad and went home.",
            "Then {friend} went away without a word.",
            "So {friend} sat alone under a tree.",
        ),
        (
            "Soon {hero} felt lonely. It was no fun to play alone.",
            "But playing alone was not much fun.",
            "After a while, {hero} felt sorry.",
        ),
        (
            '{He} went to {friend} and said, "Let us share the {thing}."',
            '"I am sorry," said {hero}. "Let us play together."',
            "{He} ran to {friend} and gave {friend} the {thing}.",
        ),
    ),
    (  # the contest
        (
            "One day, there was a race in {town}.",
            "Every summer there was a big race around the {place2}.",
            "The king wanted to know who was the fastest in {town}.",
        ),
        (
            '"I will win," said {friend} the {kind2}. "I am the fastest!"',
            "{friend} the {kind2} was very proud and laughed at {hero}.",
            "Everybody thought that {friend} would win.",
        ),
        (
            "{hero} was slow, but {he} did not give up.",
            "{hero} ran and ran, step by step.",
            "{hero} only smiled and began to run.",
        ),
        (
            "Half way, {friend} sat down to rest and fell asleep.",
            "But {friend} stopped to look at a {colour} {thing}.",
            "Then {friend} fell over a stone and hurt a foot.",
        ),
        (
            "{hero} stopped and helped {friend} to get up.",
            "{hero} passed by and came to the end first.",
            "{hero} did not stop, and {he} won.",
        ),
        (
            "The prize was a {colour} {thing}.",
            "Everybody clapped, and {hero} got a {colour} {thing}.",
            '"You are the best, {hero}!" said {friend}.',
        ),
    ),
    (  # the secret
        (
            "One day, {hero} found an old {thing} in the {place2}.",
            "Under a stone by the {place2}, {hero} found a {colour} {thing}.",
            "One night, {hero} saw a light in the {place2}.",
        ),
        (
            "It was {colour} and it could talk!",
            "When {he} touched it, it began to shine.",
            'Suddenly a voice said, "Hello, {hero}!"',
        ),
        (
            '"You have one wish," said the voice.',
            '"I can give you one thing," it said. "What do you want?"',
            '"Tell me your wish," it said.',
        ),
        (
            "{hero} thought for a long time.",
            "{hero} asked {friend} the {kind2} what to do.",
            "{hero} thought of gold, but then {he} thought of {friend}.",
        ),
        (
            '"I wish that {friend} is well again," said {hero}.',
            '"I want a friend," said {hero}.',
            '"I wish for rain, so that everybody in {town} can eat," said {hero}.',
        ),
        (
            "And so it was.",
            "The next day the wish came true.",
            "At once there was a loud sound, and the wish came true.",
        ),
    ),
)
ENDINGS = (
    "From that day on, {hero} and {friend} were best friends.",
    "And they lived happily ever after.",
    "{hero} never forgot that day.",
    "{hero} learned that it is good to have a friend.",
    "Then they went home together. The end.",
    "That night {hero} slept very well.",
    "And if you go to {town}, you can still see the {colour} {thing}.",
    "{hero} was glad, and so was {friend}.",
)
