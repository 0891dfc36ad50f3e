"""Where keys and values of prompts came from, by a core's statistics: for its metrics, its log and its page."""

from __future__ import annotations

from engine.types.outputs import StepStats

DEVICE = "device"
BLENDED = "blended"
COMPUTED = "computed"


def prompt_sources(stats: StepStats) -> dict[str, int]:
    """Prompt tokens of requests when they were first admitted, since start, by source: "device" (its prefix cache),
    each connector by its name, "blended" (cached elsewhere than in a prefix; from the first on), "computed". Together
    they are all prompt tokens."""
    sources = {DEVICE: stats.prefix_hits}
    for connector, event, count in stats.kv_connectors:
        if event == "hit_tokens":
            sources[connector] = count
    if stats.reused_tokens:
        sources[BLENDED] = stats.reused_tokens
    looked_up = stats.prefix_queries or stats.prompt_tokens  # without a prefix cache nothing is looked up
    return sources | {COMPUTED: max(0, looked_up - sum(sources.values()))}


def shares(sources: dict[str, int]) -> str:
    """In a line: "device 25 %, file 10 %, computed 65 %"; "" where there were no prompts."""
    whole = sum(sources.values())
    return ", ".join(f"{name} {100 * count / whole:.1f} %" for name, count in sources.items()) if whole else ""
