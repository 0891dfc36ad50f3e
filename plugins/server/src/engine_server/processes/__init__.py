"""Several API processes in front of the same engine cores: `engine serve --api-workers N`.

The first process starts the cores and the others, holds what they share, and looks after all of them; it serves nobody
itself. Each of the others is a whole server: it listens on the port that all share, and talks to the cores by sockets
of its own.
"""
