"""How much a model may be asked to think."""

from __future__ import annotations

from typing import Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's words, and one of Anthropic's."""
