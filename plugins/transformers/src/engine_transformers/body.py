"""The body: transformers' modules, built without weights, with the engine's layers and attention in them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import Embedding, ModelBody, Module
from engine.types.errors import EngineError, UnsupportedModelError
from engine_transformers.attention import ATTRIBUTE, NAME, Attentions
from engine_transformers.card import FULL, SLIDING
from engine_transformers.layers import Held, InPlace, divided, head, look_up_by
from engine_transformers.loading import Conversion

_ELSE = "install a driver that is made for the model"
_ONE_RANK = "leave --tensor-parallel-size out, or install a driver that is made for the model"
_TRIED = 16
"""Tokens that are computed when the weights are there."""
_APART = 0.05
"""Of their hidden states' length: so far apart are no results of one computation."""
_BUILDING = threading.Lock()
"""Ranks may be threads of a process, which has one default dtype."""


class TransformersBody(ModelBody):
    """See `engine.interfaces.model.Model`: a decoder of transformers.

    Its linear layers, embedding and head are the engine's; what lies between, norms and experts among it, is computed
    by transformers' own modules. When its weights are loaded it computes some tokens, which tells what each layer asks
    of attention, and that nothing but attention looks at other tokens.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._model = build(context)
        self._conversion = Conversion(self._model)
        description, model = context.description, self._model
        base = model.base_model
        if description.generates == (base is model):
            raise _refusal(context, f"transformers' {type(model).__name__} has no decoder {model.base_model_prefix!r}")
        names = {module: name for name, module in model.named_modules()}
        plan = _plan(context, model, names[base])
        self.replaced: list[Module] = []
        embedding, last = model.get_input_embeddings(), model.get_output_embeddings()
        table: Embedding | None = None
        if isinstance(embedding, nn.Embedding):
            table = Embedding(context, embedding.num_embeddings, embedding.embedding_dim, names[embedding])
        if type(last) is nn.Linear:
            made = head(context, last, names[last], table if last.weight is embedding.weight else None)
            self._replace(last, names, InPlace(context, made), made)
        if table is not None:
            in_place = InPlace(context, table, rows=0)
            if type(embedding) is nn.Embedding:
                self._replace(embedding, names, in_place, table)
            else:
                look_up_by(embedding, in_place)
                self.replaced.append(table)
        built_in = built_dtype(context)
        for module, name in names.items():
            if type(module) is nn.Linear and module is not last and module.weight.dtype == built_in:
                layer = divided(context, plan.get(_generic(name)), module, name)
                self._replace(module, names, InPlace(context, layer), layer)
        self._check_plan(plan)
        self._attentions = Attentions(context)
        for module in model.modules():
            setattr(module, ATTRIBUTE, self._attentions)
        self.replaced.append(Held(context, model, built_in))
        self._base = base  # torch modules are none of the parts that are looked through for weights
        if base is not model:
            setattr(model, model.base_model_prefix, _Given())

    def _replace(self, module: nn.Module, names: dict[nn.Module, str], by: nn.Module, part: Module) -> None:
        parent, _, attribute = names[module].rpartition(".")
        setattr(self._model.get_submodule(parent), attribute, by)
        self.replaced.append(part)

    def _check_plan(self, plan: dict[str, str]) -> None:
        """Raises UnsupportedModelError where the plan divides weights of modules that are transformers' own."""
        for place, own in [*self._model.named_modules(), *self._model.named_parameters()]:
            style = plan.get(_generic(place))
            if style is not None and not isinstance(own, InPlace):
                found = f"transformers' plan for ranks says {style!r} of {place}, which its own module computes"
                raise _refusal(self.context, found, _ONE_RANK)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`, by transformers' names and its conversions of them; then the model is tried.

        Raises:
            CheckpointError: see there.
            UnsupportedModelError: what the modules ask is not what the description says, or not to be had.
        """
        asked = f"load the weights of {self.context.description.architecture}"
        super().load_weights(self._conversion(weights, asked))
        self._try()

    @torch.inference_mode()
    def _try(self) -> None:
        """Compute tokens that see themselves alone, then the same in the other order: a token's result is to depend on
        its id and its position. A step holds tokens of many requests, in chunks, one after the other."""
        context = self.context
        vocab_size = context.description.vocab_size
        tokens = torch.arange(min(_TRIED, vocab_size, context.max_model_len), device=context.device)
        turned = tokens.flip(0)
        try:
            hidden = self.forward(State(token_ids=tokens.int(), positions=tokens), unfollowed)
            logits = self.logits(hidden) if context.description.generates else None
            self._attentions.finish()
            again = self.forward(State(token_ids=turned.int(), positions=turned), unfollowed)
        except EngineError:
            raise
        except Exception as error:
            name = f"{type(error).__name__}: {error}"
            raise _refusal(context, f"transformers' modules fail with the engine's layers in them ({name})") from error
        self._attentions.alone = False
        if logits is not None and logits.shape[-1] != vocab_size:
            raise _refusal(context, f"it gives {logits.shape[-1]} logits, and config.json has vocab_size {vocab_size}")
        if (again.flip(0) - hidden).float().norm() > _APART * hidden.float().norm():
            found = "beside its attention a module looks at other tokens of the step, or counts positions by itself"
            raise _refusal(context, found)

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The final hidden states [T, hidden_size]; `walk` is not used."""
        out = self._base(
            input_ids=state["token_ids"].long()[None], position_ids=state["positions"][None], use_cache=False
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], by the class with the head, which scales or caps them."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def unfollowed(layers: Iterable[Any], state: State) -> Any:
    """A walk that nobody follows."""
    return iter(layers)


@dataclass
class _Output(ModelOutput):
    """What classes with heads read of what their decoder gives."""

    last_hidden_state: torch.Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _Given(nn.Module):
    """In the decoder's place below a head: gives the hidden states that it is given."""

    @property
    def decoder(self) -> _Given:
        """Some heads ask not the model below them, but the decoder in that."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **more: Any) -> _Output:
        """inputs_embeds [1, R, hidden_size]."""
        return _Output(last_hidden_state=inputs_embeds)


def build(context: ModelContext) -> PreTrainedModel:
    """transformers' model of the description's config: weights on the meta device, and on the context's what buffers no
    checkpoint has. Raises UnsupportedModelError where transformers has no such model, or reads the config otherwise."""
    description = context.description
    found = getattr(transformers, description.architecture, None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise _refusal(context, f"transformers {transformers.__version__} has no {description.architecture}")
    kind: Any = found
    try:
        config = kind.config_class.from_dict(dict(description.config))
        _check(context, config)
        config._attn_implementation = NAME
        if context.dtype == torch.float64:
            config._experts_implementation = "eager"  # the others multiply nothing so wide
        config.dtype = context.dtype
        config.return_dict = True
        model = _on_meta(kind, config, built_dtype(context))
    except EngineError:
        raise
    except Exception as error:
        why = f"transformers' {description.architecture} cannot be built ({type(error).__name__}: {error})"
        raise _refusal(context, why, "correct the model's config.json") from error
    if not model._supports_attention_backend and not model._can_set_attn_implementation():
        raise _refusal(context, "its modules compute their attention themselves, by no function that could be replaced")
    _make_buffers(context, model)
    return model


def built_dtype(context: ModelContext) -> torch.dtype:
    """In which a model is built: its own, but modules count in float32 at most (their positions, say)."""
    return min(context.dtype, torch.float32, key=lambda dtype: dtype.itemsize)


def _on_meta(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Without memory, in a dtype, but for what transformers keeps in another one."""
    with _BUILDING:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model = kind(config).eval()
        finally:
            torch.set_default_dtype(before)
    wide = set(model._keep_in_fp32_modules_strict or ()) if dtype.itemsize < 4 else set()
    if dtype == torch.float16:
        wide |= set(model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not wide.isdisjoint(name.split(".")):
            weight.data = weight.data.float()
    return model


def _check(context: ModelContext, config: PreTrainedConfig) -> None:
    """What the config class says of sizes has to be what the card read."""
    model = context.description
    sizes = {
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_q_heads,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
    }
    for key, expected in sizes.items():
        found = getattr(config, key, expected)
        if found != expected:
            raise _refusal(context, f"transformers reads {key} = {found} in its config, and the card {expected}")
    types = getattr(config, "layer_types", None)
    own = [FULL if spec.kind == "full" else SLIDING for spec in model.kv_specs]
    if types is not None and list(types) != own:
        raise _refusal(
            context,
            f"its layers are of types {', '.join(dict.fromkeys(types))} for transformers, and by the keys of "
            f"config.json {', '.join(dict.fromkeys(own))}",
            "write layer_types into config.json",
        )


def _make_buffers(context: ModelContext, model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, as transformers does it after loading."""
    for name, module in model.named_modules():
        keys = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        found: list[dict[str, torch.Tensor]] = []
        for before in (0, 1) if keys else ():  # what is different afterwards was not computed
            for key in keys:
                module._buffers[key] = torch.full_like(module._buffers[key], before, device=context.device)
            with torch.no_grad():
                model._init_weights(module)
            found.append({key: module._buffers[key] for key in keys})
        unset = [key for key in keys if not torch.equal(found[0][key], found[1][key])]
        if unset:
            raise _refusal(context, f"transformers does not say what its buffer {name}.{unset[0]} begins with")


_REPLICATED = frozenset({"replicated_with_grad_allreduce", "replicate"})
"""Styles of plans that divide nothing."""


def _plan(context: ModelContext, model: PreTrainedModel, base: str) -> dict[str, str]:
    """A module's generic name -> how transformers divides it; nothing for one rank."""
    if context.tp_size == 1:
        return {}
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise _refusal(
            context,
            f"it is asked for {context.tp_size} ranks, and transformers has no tensor parallel plan "
            f"(base_model_tp_plan) for {type(model.config).__name__}",
            _ONE_RANK,
        )
    divided_so = {name: style for name, style in plan.items() if style not in _REPLICATED}
    return {f"{base}.{name}" if base else name: style for name, style in divided_so.items()}


def _generic(name: str) -> str:
    """A module's name with "*" for numbers, as plans have it."""
    return re.sub(r"\b\d+\b", "*", name)


def _refusal(context: ModelContext, found: str, remedy: str = _ELSE) -> UnsupportedModelError:
    return UnsupportedModelError(f"serve {context.description.architecture} by transformers", found, remedy)
