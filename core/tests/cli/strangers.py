"""Plugins by strangers, sound and broken, as metadata and modules in a folder that is on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

from engine.plugin.points import POINTS

CARDS = {
    "sound": "class Card(PointCard):\n    priority = -50\n    body = 'none:None'",
    "unfit": "class Card(PointCard):\n    @classmethod\n    def unsupported(cls, need):\n"
    "        return ['the moon is not full']",
    "broken": "import module_that_nobody_has",
    "syntax": "class Card(",
    "crashes": "import os\nos._exit(7)",
    "hangs": "import time\ntime.sleep(60)",
    "heavy": "import torch\n\nclass Card(PointCard):\n    priority = -60\n    body = 'none:None'",
    "slow": "import time\ntime.sleep(2.2)\n\nclass Card(PointCard):\n    priority = -70\n    body = 'none:None'",
    "stranger": "Card = 3",
    "raises": "class Card(PointCard):\n    @classmethod\n    def unsupported(cls, need):\n        return [{}['moon']]",
}
"""What a card's module holds, by the driver's name."""
OTHERS = {"deep": "class Card(PointCard):\n    needs = frozenset({'hidden_states'})"}
"""The same, of other points than `evictor`."""


def install(
    folder: Path, *names: str, major: int = 0, distribution: str = "engine-moon", point: str = "evictor"
) -> None:
    """Write a distribution with these drivers of a point."""
    card = POINTS[point].interface.partition(":")[2]
    for name in names:
        source = (CARDS | OTHERS)[name].replace("PointCard", card)
        (folder / f"moon_{name}.py").write_text(f"from engine.interfaces.{point} import {card}\n\n{source}\n")
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    entries = "\n".join(f"{name} = moon_{name}:Card" for name in names)
    (info / "entry_points.txt").write_text(f"[engine.{point}.v{major}]\n{entries}\n")
