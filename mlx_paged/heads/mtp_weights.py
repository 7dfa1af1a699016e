"""The weights of an MTP head out of a published checkpoint, as mlx-lm's layer classes want them."""

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_paged.heads.checkpoint import Checkpoint
from mlx_paged.heads.mtp import MTPHead
from mlx_paged.heads.mtp_layouts import OPTIONAL, layout_of

Shape = tuple[int, ...]
LAYER = "layers.0"
FLOATS = ("F32", "F16", "BF16")
FP8 = "F8_E4M3"
SCALE = "weight_scale_inv"
IGNORED = "rotary_emb.inv_freq"
"""Frequencies that some checkpoints have beside the weights."""
EXPERT = re.compile(rf"{LAYER}\.mlp\.experts\.\d+\.(?:gate|up|down)_proj\.weight")
MADE_OF = {"switch_mlp": "experts.*", "embed_q": "kv_b_proj", "unembed_out": "kv_b_proj"}
"""What a checkpoint has in the place of these parts of a layer."""
BASE = {"embed_tokens": "model.embed_tokens.weight", "output": "lm_head.weight"}
"""The model's own tensors in the place of those that a head may have."""


def head_of(checkpoint: Checkpoint) -> MTPHead:
    """The head of a checkpoint. Only the tensors of the head are read, when they are evaluated.

    Raises:
        ValueError: there is none, or it is not as the checkpoint's configuration says.
    """
    return _Reader(checkpoint).head()


class _Reader:
    """Reads the tensors of a head by the names that they have in :class:`MTPHead`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, config = checkpoint, checkpoint.config
        self.layout = layout_of(checkpoint.model_type)
        num_layers = config.get("num_hidden_layers")
        if not isinstance(num_layers, int):
            raise ValueError(f"{checkpoint.folder}: config.json has no num_hidden_layers")
        patterns = {**self.layout.parts, LAYER: self.layout.layer}
        self.prefixes = {name: text.format(layer=num_layers) for name, text in patterns.items()}
        self.names = {self._own_name(name): name for name in checkpoint.files}
        self.names.pop("", None)
        if not self.names:
            expected = " and ".join(f"{self.prefixes[name]}.*" for name in ("projection", LAYER))
            raise ValueError(f"{checkpoint.folder}: it has no head: expected tensors {expected}")
        self._require_published()
        self.stored = {
            own: checkpoint.stored([name])[name] for own, name in sorted(self.names.items())
        }
        own = {name for name in OPTIONAL if f"{name}.weight" in self.names}
        self.built = MTPHead(checkpoint.model_type, config, own - self._copies(own))
        parameters = tree_flatten(self.built.parameters(), destination={})
        self.expected: dict[str, Shape] = {name: a.shape for name, a in parameters.items()}

    def head(self) -> MTPHead:
        arrays = self.checkpoint.load(self.names.values())
        self.arrays = {own: arrays[name] for own, name in self.names.items()}
        weights: dict[str, mx.array] = {}
        if any(EXPERT.fullmatch(name) for name in self.names):
            weights |= self._stacked()
        if f"{LAYER}.mlp.experts.gate_up_proj" in self.names:
            weights |= self._split_experts()
        if f"{LAYER}.self_attn.kv_b_proj.weight" in self.names:
            weights |= self._absorbed()
        for name in sorted(self.expected.keys() - weights.keys()):
            weights[name] = self._taken(name, self.expected[name])
        left = [name for name in self.arrays if not name.endswith(IGNORED)]
        if left:
            raise ValueError(self._says(left[0], "is no part of the head"))
        if self.layout.norms_less_one:
            weights |= {n: w + 1 for n, w in weights.items() if re.search(r"norm\w*\.weight$", n)}
        self.built.load_weights([*weights.items()])
        return self.built

    def _own_name(self, name: str) -> str:
        """Its name in the head; "" if it is another part of the checkpoint."""
        for own, prefix in self.prefixes.items():  # the layer's is the last
            if name.startswith(f"{prefix}."):
                return own + name.removeprefix(prefix)
        return ""

    def _says(self, own: str, what: str) -> str:
        part: str = max((p for p in self.prefixes if own.startswith(f"{p}.")), key=len)
        rest = ".".join(MADE_OF.get(word, word) for word in own.removeprefix(part).split("."))
        name = self.prefixes[part] + rest
        return f"{self.checkpoint.folder}: {name} {what}"

    def _require_published(self) -> None:
        """Raise ValueError if it is unknown whether norms are stored less 1, or if the head has
        embeddings that are not read."""
        folder = self.checkpoint.folder
        if not self.layout.norms_less_one:
            return
        if self.checkpoint.config.get("mtp_use_dedicated_embeddings"):
            raise ValueError(f"{folder}: a head with embeddings of its own is not read")
        for name in self.checkpoint.files:
            if name.endswith("conv1d.weight"):
                # mlx-lm moves this axis, and adds 1 to the norms, of the model but not of the head.
                if self.checkpoint.stored([name])[name].shape[-1] == 1:
                    raise ValueError(
                        f"{folder}: it is converted for mlx-lm, so whether 1 was added to the norms"
                        " of its head is unknown: expected the checkpoint as it was published"
                    )
                return

    def _copies(self, names: Iterable[str]) -> set[str]:
        """Those of the head's embeddings and output that equal the model's. They are dropped."""
        copies = set()
        for name in names:
            own, base = self.names[f"{name}.weight"], BASE[name]
            if base not in self.checkpoint.files:
                continue
            stored = self.checkpoint.stored([own, base])
            if stored[own] != stored[base] or stored[own].dtype not in FLOATS:
                continue
            arrays = self.checkpoint.load([own, base])
            if mx.array_equal(arrays[own], arrays[base]):
                copies.add(name)
                del self.names[f"{name}.weight"]
        return copies

    def _taken(self, name: str, shape: Shape) -> mx.array:
        """The tensor `name`, dequantized. It leaves `arrays`: what is left there is no part of the
        head."""
        if name not in self.arrays:
            raise ValueError(self._says(name, "is missing"))
        stored, array = self.stored[name], self.arrays.pop(name)
        if stored.shape != shape:
            raise ValueError(self._says(name, f"has shape {stored.shape}: expected {shape}"))
        if stored.dtype == FP8:
            return self._dequantized(name, array)
        if stored.dtype not in FLOATS:
            raise ValueError(
                self._says(name, f"is of {stored.dtype}: expected {', '.join((*FLOATS, FP8))}")
            )
        return array

    def _dequantized(self, name: str, array: mx.array) -> mx.array:
        """Blocks of FP8 (e4m3), each times its scale, in bfloat16."""
        factor = name.removesuffix("weight") + SCALE
        if factor not in self.arrays or array.ndim != 2:
            raise ValueError(self._says(name, f"is of {FP8} without {SCALE} of its blocks"))
        rows, columns = self._block_size()
        expected = (-(-array.shape[0] // rows), -(-array.shape[1] // columns))
        if self.stored[factor].shape != expected or self.stored[factor].dtype not in FLOATS:
            raise ValueError(
                self._says(factor, f"has shape {self.stored[factor].shape}: expected {expected}")
            )
        scale = self.arrays.pop(factor).astype(mx.float32)
        scale = mx.repeat(scale, rows, axis=0)[: array.shape[0]]
        scale = mx.repeat(scale, columns, axis=1)[:, : array.shape[1]]
        return (mx.from_fp8(array, dtype=mx.float32) * scale).astype(mx.bfloat16)

    def _block_size(self) -> tuple[int, int]:
        given: Any = self.checkpoint.config.get("quantization_config") or {}
        size = given.get("weight_block_size", [128, 128]) if isinstance(given, dict) else None
        match size:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise ValueError(f"{self.checkpoint.folder}: weight_block_size is {size}: expected [m, n]")

    def _stacked(self) -> dict[str, mx.array]:
        """The experts' matrices, one array for all experts."""
        count = getattr(self.built.arguments, self.layout.num_experts, None)
        if not isinstance(count, int):
            raise ValueError(f"{self.checkpoint.folder}: config.json counts no experts")
        found = {}
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"{LAYER}.mlp.switch_mlp.{projection}.weight"
            if name not in self.expected:
                break  # experts are no part of this layer, which the caller says
            each = [
                self._taken(f"{LAYER}.mlp.experts.{e}.{projection}.weight", self.expected[name][1:])
                for e in range(count)
            ]
            found[name] = mx.stack(each)
        return found

    def _split_experts(self) -> dict[str, mx.array]:
        """The experts' matrices, of which a checkpoint has gate and up projections in one array."""
        switch, experts = f"{LAYER}.mlp.switch_mlp", f"{LAYER}.mlp.experts"
        gate = self.expected.get(f"{switch}.gate_proj.weight")
        down = self.expected.get(f"{switch}.down_proj.weight")
        if gate is None or down is None:
            return {}
        both = self._taken(f"{experts}.gate_up_proj", (gate[0], 2 * gate[1], gate[2]))
        return {
            f"{switch}.gate_proj.weight": both[:, : gate[1]],
            f"{switch}.up_proj.weight": both[:, gate[1] :],
            f"{switch}.down_proj.weight": self._taken(f"{experts}.down_proj", down),
        }

    def _absorbed(self) -> dict[str, mx.array]:
        """The projection of latent keys and values, for mlx-lm's two matrices of each head."""
        attention = f"{LAYER}.self_attn"
        keys = self.expected.get(f"{attention}.embed_q.weight")
        values = self.expected.get(f"{attention}.unembed_out.weight")
        if keys is None or values is None:
            return {}
        heads, latent, key_width = keys
        rows = heads * (key_width + values[1])
        both = self._taken(f"{attention}.kv_b_proj.weight", (rows, latent))
        both = both.reshape(heads, -1, latent)
        return {
            f"{attention}.embed_q.weight": both[:, :key_width].swapaxes(-1, -2),
            f"{attention}.unembed_out.weight": both[:, key_width:],
        }
