"""What jumping ahead is worth: JSON of a schema with long property names, one request after the other, by the bundled
model. `python docs/benchmarks/measure_jump_forward.py [DRIVER ...]`; the drivers are those of point grammar."""

from __future__ import annotations

import statistics
import sys
import time

from engine import LLM, SamplingParams, StructuredOutputsParams

NAMES = ("name_of_the_customer", "number_of_the_order", "date_of_the_delivery", "reason_for_the_complaint")
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no", "unknown"]} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
ROUNDS = 9


def measure(driver: str, jump: bool) -> tuple[float, float, tuple[int, ...]]:
    """Tokens per second, steps for each token, and the tokens."""
    options = {"grammar.max_whitespace": 0}
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with LLM("tiny", grammar=driver, enable_jump_forward=jump, num_kv_pages=64, **options) as llm:
        rates, steps = [], 0
        for _ in range(1 + ROUNDS):  # the first round compiles
            before, began = llm.llm_engine.stats().step_id, time.perf_counter()
            (output,) = llm.generate("The complaint, as JSON: ", params, use_tqdm=False)
            tokens = tuple(output.outputs[0].token_ids)
            rates.append(len(tokens) / (time.perf_counter() - began))
            steps = llm.llm_engine.stats().step_id - before
    return statistics.median(rates[1:]), steps / len(tokens), tokens


def main() -> None:
    """Print a line for each driver."""
    for driver in sys.argv[1:] or ("xgrammar", "llguidance"):
        (plain, each, tokens), (jumping, fewer, same) = measure(driver, False), measure(driver, True)
        assert tokens == same, "the answer is another"
        print(
            f"{driver:12} {len(tokens)} tokens: {plain:5.0f} tokens/s, {each:.2f} steps a token; "
            f"jumping ahead {jumping:5.0f} tokens/s, {fewer:.2f}"
        )


if __name__ == "__main__":
    main()
