"""Reference drivers, one of every point: nobody imports them, they plug in through entry points."""
