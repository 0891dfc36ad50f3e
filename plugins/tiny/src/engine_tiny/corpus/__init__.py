"""The text that the bundled model learns from: generated here, by seed, from tables and templates.

Every generator takes a `random.Random` and a split. Held-out questions, words and tool names are told apart
by a hash of their text, so the two splits never share them whatever the seed.
"""
