"""Reference drivers: what makes the core work alone. Nobody imports them, they plug in through entry points."""
