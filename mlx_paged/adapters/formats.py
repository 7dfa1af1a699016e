"""Adapters as ``mlx_lm.lora`` and PEFT write them: their configurations, and their tensors as
factors of a model's layers."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from mlx_paged.adapters.content import Content, numbers_of
from mlx_paged.adapters.tensor_file import stored_tensors
from mlx_paged.arguments import is_count, is_finite, shown
from mlx_paged.ops.low_rank_terms import StoredFactor, read_factors
from mlx_paged.runner.low_rank_places import Factors, Place

CONFIG = "adapter_config.json"
MLX_TENSORS, PEFT_TENSORS = "adapters.safetensors", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 1 << 20
MOST_COLUMNS = 512


def read_adapter(folder: Path, places: Mapping[str, Place]) -> Content:
    """The adapter in a folder, for the layers `places` of a model.

    Raises:
        ValueError: there is no adapter, or it asks for what a term of two factors cannot do, has
            unknown tensors, wrong shapes, or numbers that are not finite.
        OSError: a file cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}: expected a folder of mlx_lm.lora or of PEFT")
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} has more than {MOST_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    is_peft = "peft_type" in config
    scale_of = _peft_scale_of(config) if is_peft else _mlx_scale_of(config)
    file = folder / (PEFT_TENSORS if is_peft else MLX_TENSORS)
    pairs = _pairs(stored_tensors(file), places, _peft_path_of(places) if is_peft else None)
    stored = list[StoredFactor]()
    for own, pair in pairs.items():
        form = _form(places[own], pair, scale_of, is_peft)
        for name, tensor in sorted(pair.items()):
            scale, dtype = form.scale if name == "b" else 1.0, places[own].dtype
            transposes = form.transposes_first == (name == "a")
            stored.append((tensor.begin, tensor.dtype, tensor.shape, transposes, scale, dtype))
    try:
        numbers, arrays, bad = read_factors(str(file), stored)
    except RuntimeError as error:
        raise OSError(f"{file.name} cannot be read") from error
    if bad >= 0:
        raise _not_finite(list(pairs)[bad // 2])
    return Content(
        dict(zip(pairs, zip(arrays[::2], arrays[1::2], strict=True), strict=True)), numbers
    )


def content_of(
    arrays: Mapping[str, mx.array], places: Mapping[str, Place], scale: float
) -> Content:
    """The adapter that arrays by mlx-lm's names are. Raises ValueError as :func:`read_adapter`."""
    factors: Factors = {}
    for path, pair in _pairs(arrays, places, None).items():
        a = pair["a"]
        form = _form(places[path], pair, lambda *_: scale, is_peft=False)
        dtype = places[path].dtype
        b = pair["b"].astype(mx.float32) * form.scale
        a, b = (a.swapaxes(-1, -2), b) if form.transposes_first else (a, b.swapaxes(-1, -2))
        factors[path] = mx.contiguous(a.astype(dtype)), mx.contiguous(b.astype(dtype))
    numbers = numbers_of(factors)
    are_finite = {p: [mx.isfinite(each).all() for each in pair] for p, pair in factors.items()}
    mx.eval(list(factors.values()), list(are_finite.values()), numbers)
    for path, flags in are_finite.items():
        if not all(bool(each) for each in flags):
            raise _not_finite(path)
    return Content(factors, numbers)


def _not_finite(path: str) -> ValueError:
    return ValueError(f"the factors of {path} have NaN or infinity: expected finite numbers")


ScaleOf = Callable[[str, int], float]
"""The scale of a layer, by its path and the rank of its factors."""

PathOf = Callable[[str], str | None]
"""The path of a layer in the model, by its path in a file; None: the model has no such layer."""


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_Tensor = TypeVar("_Tensor", bound=_Shaped)


def _pairs(
    tensors: Mapping[str, _Tensor], places: Mapping[str, Place], peft_path_of: PathOf | None
) -> dict[str, dict[str, _Tensor]]:
    """The factors "a" and "b" of each layer, in the order of the paths, of tensors by mlx-lm's
    names, or with `peft_path_of` by PEFT's."""
    names = _MLX_NAME if peft_path_of is None else _PEFT_NAME
    path_of = peft_path_of or (lambda path: path if path in places else None)
    pairs: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        found = names.fullmatch(name)
        path = None if found is None else path_of(found["path"])
        if found is None or path is None:
            raise ValueError(
                f"tensor {name:.200} belongs to no linear layer of the model: expected an adapter "
                "of this model's linear layers"
            )
        pairs.setdefault(path, {})[found["factor"].lower()] = tensor
    if not pairs:
        raise ValueError("the adapter has no tensors: expected factors of at least one layer")
    for path, pair in pairs.items():
        if len(pair) != 2:
            raise ValueError(f"{path} has one factor: expected lora_a and lora_b")
    return dict(sorted(pairs.items()))


_MLX_NAME = re.compile(r"(?P<path>.+)\.lora_(?P<factor>a|b)")
_PEFT_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>A|B)\.weight")


class _Form(NamedTuple):
    """How the factors of a layer become those of a term: the first one or the second one is
    transposed, and the second one is multiplied by the scale in float32."""

    transposes_first: bool
    scale: float


def _form(place: Place, pair: Mapping[str, _Shaped], scale_of: ScaleOf, is_peft: bool) -> _Form:
    a, b = pair["a"].shape, pair["b"].shape
    if len(a) != len(b) or len(a) != len(place.shapes(1)[0]):
        raise ValueError(_shapes_of(place, a, b))
    is_first = not is_peft and place.experts is None
    own = (_swapped(a), b) if is_first else (a, _swapped(b))
    rank = own[0][-2]
    if own != place.shapes(rank) or not 1 <= rank <= MOST_COLUMNS:
        raise ValueError(_shapes_of(place, a, b))
    return _Form(is_first, scale_of(place.path, rank))


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _shapes_of(place: Place, a: tuple[int, ...], b: tuple[int, ...]) -> str:
    experts = "" if place.experts is None else f" and {place.experts} experts"
    return (
        f"{place.path} has factors of shapes {a} and {b}: expected a rank from 1 to "
        f"{MOST_COLUMNS} for {place.inputs} inputs and {place.outputs} outputs{experts}; is the "
        "adapter for another model?"
    )


def _number(config: Mapping[str, Any], name: str, where: str) -> float:
    value = config.get(name)
    if not is_finite(value):
        raise ValueError(f"{where} has {name} {shown(value)}: expected a finite number")
    return float(value)


def _refuse(name: str, value: object, expected: str) -> None:
    raise ValueError(f"{CONFIG} has {name} {shown(value)}: expected {expected}")


# mlx-lm

_PARAMETERS = {"rank", "scale", "dropout", "keys"}


def _mlx_scale_of(config: Mapping[str, Any]) -> ScaleOf:
    """mlx-lm: one rank and one scale for all layers."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        whole = " (load it with the model: --adapter-path)"
        _refuse("fine_tune_type", kind, f"'lora'{whole if kind in ('dora', 'full') else ''}")
    own = config.get("lora_parameters")
    if not isinstance(own, dict) or "num_layers" not in config:
        raise ValueError(f"{CONFIG} has no lora_parameters or num_layers: expected both")
    if unknown := sorted(own.keys() - _PARAMETERS):
        known = ", ".join(sorted(_PARAMETERS))
        raise ValueError(f"{CONFIG} has lora_parameters.{unknown[0]:.60}: expected only {known}")
    rank, scale = own.get("rank"), _number(own, "scale", CONFIG)
    if not is_count(rank, 1):
        raise ValueError(f"{CONFIG} has rank {shown(rank)}: expected an integer >= 1")

    def scale_of(path: str, found: int) -> float:
        if found != rank:
            raise ValueError(f"{path} has factors of rank {found}: expected {rank}")
        return scale

    return scale_of


# PEFT

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "peft_type"),
    *("peft_version", "qalora_group_size", "r", "lora_alpha", "use_rslora"),
    *(f"{of}_pattern" for of in ("rank", "alpha")),
    *("target_modules", "exclude_modules", "task_type", "bias"),
    *("init_lora_weights", "runtime_config", "ensure_weight_tying"),
}
"""Fields that say nothing beside the tensors, and those that are read below."""
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialize that leave the model's own weights as they are."""


@dataclass(frozen=True)
class _Pattern:
    """A number for the layers that a pattern names, as PEFT has it: a path or its end."""

    name: str
    value: Any

    def names(self, path: str) -> bool:
        return path == self.name or path.endswith(f".{self.name}")


def _patterns(config: Mapping[str, Any], of: str) -> list[_Pattern]:
    """The patterns of ranks or of alphas."""
    name = f"{of}_pattern"
    given = config.get(name) or {}
    if not isinstance(given, dict):
        _refuse(name, given, "an object of numbers")
    for pattern, value in given.items():
        if not is_finite(value) or not re.fullmatch(r"\^?[\w.]{1,400}", pattern):
            _refuse(name, {pattern: value}, "paths of layers and their numbers")
    return [_Pattern(pattern.removeprefix("^"), value) for pattern, value in given.items()]


def _peft_scale_of(config: Mapping[str, Any]) -> ScaleOf:
    """PEFT: ``alpha / r``, or ``alpha / sqrt(r)`` with rslora, by layer."""
    if config["peft_type"] != "LORA":
        _refuse("peft_type", config["peft_type"], "'LORA'")
    if config.get("bias", "none") != "none":
        _refuse("bias", config["bias"], "'none'")
    if config.get("init_lora_weights") not in _INITIAL:
        _refuse("init_lora_weights", config["init_lora_weights"], "one that leaves the base alone")
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            _refuse(name[:60], value, "none: a term of two factors cannot do this")
    rank, alpha = config.get("r"), _number(config, "lora_alpha", CONFIG)
    sizes, alphas = _patterns(config, "rank"), _patterns(config, "alpha")
    root = config.get("use_rslora", False)
    if not isinstance(root, bool):
        _refuse("use_rslora", root, "true or false")

    def scale_of(path: str, found: int) -> float:
        own = next((p.value for p in sizes if p.names(path)), rank)
        if found != own:
            raise ValueError(f"{path} has factors of rank {found}: expected {own!r:.20}")
        own_alpha = next((p.value for p in alphas if p.names(path)), alpha)
        return float(own_alpha) / (math.sqrt(found) if root else found)

    return scale_of


def _peft_path_of(places: Iterable[str]) -> PathOf:
    """Finds the path in the model of a path in a file of PEFT. What comes before the number of a
    layer may differ, because either model may be a part of another one. The rest of the path has to
    name one layer."""
    own, by_end = set(places), dict[str, list[str]]()
    for path in own:
        by_end.setdefault(_end(path), []).append(path)

    def path_of(path: str) -> str | None:
        if path in own:
            return path
        found = by_end.get(_end(path), ())
        return found[0] if len(found) == 1 else None

    return path_of


def _end(path: str) -> str:
    """The part of a path that begins with the number of a layer."""
    found = re.search(r"\.(\d+\..+)", path)
    return path if found is None else found[1]
