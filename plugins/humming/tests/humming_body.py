"""The body of driver `humming` over the double of its library."""

from __future__ import annotations

from typing import Any

import humming_double
import pytest

from engine_humming.body import HummingBody


class DoubleBody(HummingBody):
    """The driver's own, but for where the library comes from."""

    def __init__(self, context: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            humming_double.install(patch)
            super().__init__(context)
