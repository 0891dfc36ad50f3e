"""Operations in captured steps: what is replayed reads the buffers as they are then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from engine.interfaces.ops import MODEL_OPERATIONS, OpsCard
from engine.interfaces.platform import CaptureKey
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.ops.subject import OpsSubject

Inputs = list[torch.Tensor]
ROWS = 4


class CapturedOperations(OpsSubject):
    """Each of a model's operations, recorded by the platform and replayed on other inputs."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", MODEL_OPERATIONS)
    def test_captured(self, name: str, dtype: str) -> None:
        """The replay gives, bit by bit, what the operation gives for the new contents of its inputs."""
        operation = self.operation(name, dtype)
        require_capture(cast("type[OpsCard]", self.subject().card).captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        call, inputs = self._call(name, operation, dtype), [self._inputs(name, dtype, seed) for seed in (1, 2, 3)]
        buffers: Inputs = [x.clone() for x in inputs[0]]
        left: Inputs = []

        def step() -> None:
            left[:] = call(buffers)

        replay = platform.capture(step, CaptureKey(0, variant=(f"{name} {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        for given in inputs[::-1]:
            expected = [x.clone() for x in call([x.clone() for x in given])]
            for buffer, x in zip(buffers, given, strict=True):
                buffer.copy_(x)
            replay()
            for found, wanted in zip(left, expected, strict=True):
                assert torch.equal(found, wanted), (
                    "the replay leaves something else: it has kept a value, or an address"
                )

    def _inputs(self, name: str, dtype: str, seed: int) -> Inputs:
        """What changes from step to step."""
        ids = self.ints([(seed * 7 + i * 3) % 20 for i in range(ROWS)], torch.int32)
        x, y = self.tensor(ROWS, 64, dtype=dtype, seed=seed), self.tensor(ROWS, 64, dtype=dtype, seed=seed + 10)
        heads = self.tensor(ROWS, 4, 16, dtype=dtype, seed=seed), self.tensor(ROWS, 2, 16, dtype=dtype, seed=seed + 10)
        several: dict[str, Inputs] = {
            "embedding": [ids],
            "embedding_part": [ids],
            "gather_rows": [x, ids.long() % ROWS],
            "add": [x, y],
            "add_rms_norm": [x, y],
            "rope": [*heads, ids.long()],
            "qk_norm_rope": [*heads, ids.long()],
        }
        return several.get(name, [x])

    def _call(self, name: str, operation: Callable[..., Any], dtype: str) -> Callable[[Inputs], Inputs]:
        """The operation with what stays from step to step."""
        weight, bias = self.tensor(20, 64, dtype=dtype, seed=90), self.tensor(64, dtype=dtype, seed=91)
        table = self.tensor(20, 16, dtype="float32", seed=92)
        packed = self.operation("pack_linear", dtype)(weight, None) if name == "linear" else None
        constants: dict[str, tuple[Any, ...]] = {
            "embedding": (weight,), "embedding_part": (weight[3:9].clone(), 3), "scale": (0.3,), "soft_cap": (2.0,),
            "rms_norm": (bias, 1e-5), "add_rms_norm": (bias, 1e-5), "layer_norm": (bias, weight[0].clone(), 1e-5),
            "rope": (table,), "gelu": (False,), "gelu_mul": (True,), "relu": (True,), "linear": (packed,),
        }  # fmt: skip
        norms = (bias[:16].clone(), bias[16:32].clone(), 1e-5)

        def call(inputs: Inputs) -> Inputs:
            if name == "qk_norm_rope":
                q, k, positions = inputs
                return list(operation(q, k, *norms, positions, table))
            found = operation(*inputs, *constants.get(name, ()))
            return list(found) if isinstance(found, tuple) else [found]

        return call
