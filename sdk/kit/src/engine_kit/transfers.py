"""Transfers of KV pages by connectors: before a step's own work, between its layers, and behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.interfaces.kv_connector import KVConnectorWorker
from engine.interfaces.step import LayerListener, StepOutput, StepPart, StepView, TargetStep
from engine.types.plan import StepPlan, StepResult
from engine.types.start import WorkerStart


class Transfers(StepPart, LayerListener):
    """Hands each connector its section of the plan, and puts what it has to tell into the result.

    Args:
        start: whose layers these are.
        connectors: by driver, bound to the pool before the first step.
        layerwise: which of them are called before and after each layer.
    """

    def __init__(
        self,
        start: WorkerStart,
        connectors: Mapping[str, KVConnectorWorker],
        layerwise: frozenset[str] = frozenset(),
    ) -> None:
        self._connectors = connectors
        self._layerwise = layerwise
        layers = start.place.stage.layers(start.model.num_layers)
        self._sites: dict[int, list[int]] = {layer: [] for layer in layers}
        for site, spec in enumerate(start.model.sites):
            if spec.layer in self._sites:
                self._sites[spec.layer].append(site)
        self._of_step: dict[str, KVConnectorWorker] = {}
        self._by_layer: list[KVConnectorWorker] = []

    def begin(self, plan: StepPlan) -> StepPlan:
        """All pages are read before any is filled."""
        sections = {name: content for name, content in (plan.sections or {}).items() if name in self._connectors}
        self._of_step = {name: self._connectors[name] for name in sections}
        for name, content in sections.items():
            self._connectors[name].begin(plan.step_id, content or None)
        for connector in self._of_step.values():
            connector.load(plan.step_id)
        self._by_layer = [connector for name, connector in self._of_step.items() if name in self._layerwise]
        if self._by_layer and not self.hears(plan):
            for layer in self._sites:
                self.before(layer)
        return plan

    def listeners(self) -> Sequence[LayerListener]:
        """Itself, where a connector goes layer by layer."""
        return [self] if self._layerwise else []

    def hears(self, plan: StepPlan) -> bool:
        """Prompts: a step of decodes alone may be captured, and waits for all layers before it."""
        return bool(self._by_layer) and plan.num_rows > plan.num_decodes

    def before(self, layer: int, view: StepView | None = None) -> None:
        """Its keys and values have to be there."""
        for connector in self._by_layer:
            for site in self._sites[layer]:
                connector.before_layer(site)

    def after(self, layer: int, view: StepView | None = None) -> None:
        """Those of this step are."""
        for connector in self._by_layer:
            for site in self._sites[layer]:
                connector.after_layer(site)

    def launched(self, step: TargetStep) -> StepOutput | None:
        """The news are taken when the result is."""
        put = self.ended(step.plan)
        return None if put is None else StepOutput((), put)

    def ended(self, plan: StepPlan) -> Callable[[StepResult, list[np.ndarray]], None] | None:
        """All that the step computes is queued: what puts the news into its result, given no arrays."""
        connectors = self._of_step
        if self._by_layer and not self.hears(plan):
            for layer in self._sites:
                self.after(layer)
        for connector in connectors.values():
            connector.end(plan.step_id)

        def put(result: StepResult, arrays: list[np.ndarray]) -> None:
            news = {name: [told] for name, connector in connectors.items() if (told := connector.news()) is not None}
            result.news = news or None

        self._of_step = {}
        return put if connectors else None

    def steady(self) -> bool:
        """Nothing is transferred."""
        return not self._of_step
