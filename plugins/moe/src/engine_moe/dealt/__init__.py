"""Drivers of the point `experts` that deal whole experts over ranks: `gather`, `all_to_all` and `deepep`."""
