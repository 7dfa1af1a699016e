"""The options of an engine: values, checks, flags and texts. Knows no mlx, so that a command shows
its help at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_paged.arguments import GB, MAX_INT32, is_whole, one_of, require, shown
from mlx_paged.option_kinds import (
    Bytes,
    Choice,
    Directory,
    Gigabytes,
    Kind,
    Milliseconds,
    Name,
    NamedPaths,
    OnOff,
    Option,
    OptionFlag,
    Part,
    Path,
    PathOrAuto,
    Paths,
    SomeBytes,
    Whole,
)

if TYPE_CHECKING:
    import mlx.nn as nn

_T = TypeVar("_T")

KVBits = int | str | None
KV_BITS = (8, 6, 4)
"""Values of ``kv_bits`` beside None, each with a storage format in :mod:`mlx_paged.ops.formats`."""

BLOCK_SIZE = 16
"""Token slots in a block, where a caller does not say."""

MAX_DRAFTS = 15
"""The largest number of drafts of a request in a step. With the request's newest token, 16 rows of
one sequence are attended together."""

GUESSERS = ("ngram",)
"""Values of ``speculate`` beside None."""


class Policy(StrEnum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # lower numbers first, then by arrival
    SHORTEST = "shortest"  # shorter prompts first; waiting makes a prompt count as shorter
    FAIR = "fair"  # clients take turns by tokens computed


class PreemptionPolicy(StrEnum):
    """Which running request is preempted. It is computed again later, with the same result."""

    NEWEST = "newest"  # the last to arrive: repeats the fewest steps, and no request starves
    LONGEST = "longest"  # the most tokens in the pool: causes the fewest preemptions
    FEWEST_GENERATED = "fewest-generated"  # delays the request with the least visible progress


def checked_bits(where: str, kv_bits: KVBits) -> int | None:
    """`kv_bits` as one of :data:`KV_BITS`, or None. Raises ValueError if there is no such
    format."""
    if kv_bits is None or (type(kv_bits) is int and kv_bits in KV_BITS):
        return kv_bits
    name = kv_bits.replace(" ", "") if isinstance(kv_bits, str) else ""
    if name in ("8,8", *map(str, KV_BITS)):
        return int(name[0])
    raise ValueError(
        f"[{where}] kv_bits is {shown(kv_bits)}: expected 8, 6 or 4. Other numbers of bits"
        " change the output more than these: docs/kv-quantization.md"
    )


class Bits(Kind):
    """Values of ``kv_bits``."""

    def check(self, op: str, name: str, value: Any) -> int | None:
        return checked_bits(op, value)

    def read(self, text: str) -> int | None:
        try:
            return checked_bits("Engine", text)
        except ValueError as error:
            raise ValueError(str(error).partition("] ")[2]) from None


class EightBits(Kind):
    """Values of ``snapshot_bits``."""

    def check(self, op: str, name: str, value: Any) -> int | None:
        require(value is None or (is_whole(value) and value == 8), op, name, value, "8 or None")
        return None if value is None else 8

    def read(self, text: str) -> int:
        if text != "8":
            raise ValueError(f"expected 8, got {text!r}")
        return 8


def option(default: _T, kind: Kind, text: str, flag: OptionFlag | None = None) -> _T:
    """A field of the table."""
    return field(default=default, metadata={"option": Option(kind, text, flag)})


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The options of an engine that decide how its model and pool are made.

    Raises:
        ValueError: an option is of a wrong kind or out of range.
    """

    block_size: int = option(
        BLOCK_SIZE,
        Whole(1, MAX_INT32),
        "token slots in a block.",
        OptionFlag("--kv-block-size", "tokens per KV block", "N"),
    )
    kv_memory: int | None = option(
        None,
        Bytes(1),
        "bytes for the pool; default: leaves room for others (docs/on-a-mac.md).",
        OptionFlag(
            "--kv-memory", "size of the KV pool in GB (default: leaves room for others)", "GB"
        ),
    )
    num_blocks: int | None = option(
        None,
        Whole(1, is_optional=True),
        "size of the pool in blocks of all layers, instead of `kv_memory`.",
    )
    kv_bits: KVBits = option(
        None,
        Bits(),
        "8 or 6 to store K/V with that many bits an element, 4 to store keys with 6 and values with"
        " 4 bits; docs/kv-quantization.md has the differences. Default: as the model computes it.",
        OptionFlag(
            "--kv-bits",
            "quantize stored keys and values to so many bits (default: not quantized)",
            "8|6|4",
        ),
    )
    max_kv_tokens: int | None = option(
        None,
        Whole(1, is_optional=True),
        "without `kv_memory` and `num_blocks`, the pool has room for no more than these tokens.",
    )
    cache_limit: int | None = option(
        None,
        Bytes(0),
        "bytes of freed buffers that MLX keeps on a GPU while the engine lives; less if MLX's limit"
        " is. Default: a tenth of the GPU's memory, less if `kv_memory` or `num_blocks` sets a"
        " small pool, but at least the arrays of a step.",
        OptionFlag(
            "--cache-limit",
            "GB of freed buffers that MLX keeps (default: a tenth of GPU memory)",
            "GB",
        ),
    )
    wired: bool | None = option(
        None,
        OnOff(may_choose=True),
        "raise MLX's wired limit while the engine lives (docs/on-a-mac.md has reports of kernel"
        " panics with it). None: if MLX_PAGED_WIRED is 1.",
        OptionFlag("--wired", "raise MLX's wired limit on a Mac (default: off)"),
    )
    max_running: int = option(
        32,
        Whole(1),
        "the largest number of requests that are computed together.",
        OptionFlag("--max-running", "maximum number of sequences in a batch", "N"),
    )
    prefill_chunk: int = option(
        512,
        Whole(1),
        "the largest number of prompt tokens in a step, in addition to the running requests. On a"
        " GPU, a prompt takes up to four times as many while no other request runs or waits: at"
        " most 2,048, or `prefill_chunk` if that is larger.",
        OptionFlag("--prefill-chunk --prefill-step-size", "maximum prompt tokens in a step", "N"),
    )
    prefix_cache: bool = option(
        True,
        OnOff(),
        "share the K/V of prompts that start with the same tokens.",
        OptionFlag("--no-prefix-cache", "do not share the K/V of equal prefixes"),
    )
    max_pinned: float = option(
        0.25,
        Part(),
        "the part of the pool that one owner, a `cache_salt`, may pin. All together may pin half of"
        " the pool.",
        OptionFlag("--max-pinned", "part of the pool that one cache_salt may pin", "SHARE"),
    )
    snapshot_memory: int | None = option(
        None,
        Bytes(0),
        "bytes for copies of the states of recurrent layers. Models with such layers need these"
        " copies to share prefixes; 0: they do not share them. Default: four copies for each"
        " running request, but at most a quarter of the memory that the device can spare.",
    )
    snapshot_bits: int | None = option(
        None,
        EightBits(),
        "8 to store these copies with 8 bits an element: a third of float32's bytes or less."
        " A prompt that continues from such a copy may get other tokens; docs/engine.md has the"
        " differences. Default: as the model computes them.",
        OptionFlag(
            "--snapshot-bits",
            "store kept states of recurrent layers in so many bits (default: not quantized)",
            "8",
        ),
    )
    compile: bool | None = option(
        None,
        OnOff(may_choose=True),
        "compute the steps that only decode by graphs that MLX has traced before, if it can"
        " (docs/compiled-decodes.md). None: if they take less time: measured now.",
        OptionFlag("--compile", "decode with compiled graphs (default: if that is faster)"),
    )
    cpu_linear: bool | None = option(
        None,
        OnOff(may_choose=True),
        "compute linear layers on a CPU by this package's kernels (docs/cpu-linear.md). None:"
        " unless MLX_PAGED_CPU_LINEAR is 0. GPUs keep MLX's.",
        OptionFlag("--cpu-linear", "own CPU kernels for linear layers (default: on)"),
    )
    cascade: bool = option(
        True,
        OnOff(),
        "let decodes whose contexts begin with the same blocks attend to these blocks together:"
        " forks, samples, requests with one system prompt. On a CPU every token stays the same.",
        OptionFlag("--cascade", "read the K/V of a shared prefix once per step"),
    )
    kv_disk: str | PathLike[str] | None = option(
        None,
        Directory(),
        "a directory in which K/V outlives the pool and the process (docs/kv-disk.md)."
        " :meth:`close` writes what is missing there. Default: none.",
        OptionFlag("--kv-disk", "also keep K/V in this directory, for later processes", "DIR"),
    )
    adapters: Mapping[str, str | PathLike[str]] | None = option(
        None,
        NamedPaths(),
        "folders of adapters by the names that requests give (docs/adapters.md). None: requests"
        " have no adapters; {}: :meth:`load_adapter` adds all.",
        OptionFlag("--adapter", "an adapter that requests may name; may be repeated", "NAME=PATH"),
    )
    adapter_memory: int = option(
        GB,
        SomeBytes(1),
        "bytes for the adapters that are in memory. One step may need more, if each of its requests"
        " has another adapter.",
        OptionFlag("--adapter-memory", "GB for adapters that are in memory (default: 1)", "GB"),
    )

    def __post_init__(self) -> None:
        """Check each option; NumPy's numbers become Python's."""
        for each in fields(self):
            kind = each.metadata["option"].kind
            value = kind.check("Engine", each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
        can_share = self.prefix_cache or self.kv_disk is None
        require(can_share, "Engine", "prefix_cache", self.prefix_cache, "True with kv_disk")
        keeps = self.prefix_cache and self.snapshot_memory != 0
        expected = "None with prefix_cache=False or snapshot_memory=0"
        is_used = keeps or self.snapshot_bits is None
        require(is_used, "Engine", "snapshot_bits", self.snapshot_bits, expected)

    @property
    def transfers_blocks(self) -> bool:
        """Whether blocks leave the pool and come back."""
        return self.kv_disk is not None

    def of_pool(self, **others: Any) -> PoolConfig:
        """The options of another pool: these ones, with other values of some fields."""
        return PoolConfig(**{f.name: getattr(self, f.name) for f in fields(PoolConfig)} | others)

    def of_another_model(self, **others: Any) -> PoolConfig:
        """The options of a pool of another model, to which what was given for this model does not
        belong, with other values of some fields."""
        own = {f.name: f.default for f in fields(PoolConfig) if f.name in OF_ONE_MODEL}
        return self.of_pool(**own | others)


GUESSER = f"None or, without a draft model, {one_of(GUESSERS)}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(PoolConfig):
    """All options of :class:`mlx_paged.Engine`.

    Raises:
        ValueError: an option is of a wrong kind or out of range.
    """

    max_stall_ms: float | None = option(
        None,
        Milliseconds(),
        "the longest time of a step while streams run, so that a long prompt does not delay them"
        " longer. A cost model, fitted to every step, plans steps that take no longer."
        " None: only `prefill_chunk` limits a step, and its tokens do not depend on the clock.",
        OptionFlag(
            "--max-stall-ms",
            "upper limit for the time of a step while requests are decoding (default: no limit)",
            "MS",
        ),
    )
    policy: Policy | str = option(
        Policy.FCFS,
        Choice(Policy),
        'order of waiting requests: "fcfs", "priority", "shortest" or "fair".',
        OptionFlag("--policy", "order in which waiting requests start"),
    )
    preempt: PreemptionPolicy | str = option(
        PreemptionPolicy.NEWEST,
        Choice(PreemptionPolicy),
        'which request is preempted when no block is free: "newest", "longest" or'
        ' "fewest-generated". Its tokens are computed again, with the same result.',
        OptionFlag("--preempt", "request that gives up K/V when the pool is full"),
    )
    seed: int | None = option(
        None,
        Whole(0, is_optional=True, largest_read=2**63),
        "seed of the random streams of requests that have none of their own.",
        OptionFlag("--seed", "seed for requests without a seed (default: random)", "N"),
    )
    lookahead: bool = option(
        True,
        OnOff(),
        "launch each step before the previous step has been read. The device then hardly waits"
        " for the host, and every token is seen one step later.",
        OptionFlag("--lookahead", "launch a step before the last step's tokens are read"),
    )
    prewarm: bool | None = option(
        True,
        OnOff(may_choose=True),
        "compile the GPU pipelines and trace the decodes now, so that the first requests do not"
        " wait; None: when an :class:`EngineService` starts, whose thread needs its own traces."
        " ``stats.prewarm_seconds`` says how long the pipelines took; None on a CPU.",
        OptionFlag("--no-prewarm", "compile GPU pipelines and decode graphs at first use"),
    )
    speculate: str | None = option(
        None,
        Name(GUESSERS, GUESSER),
        'speculative decoding: "ngram" proposes the tokens that followed the same tokens earlier in'
        " a request; None: off. The output stays the same. Steps with drafts are read before the"
        " next step is launched. Models that compute one sequence at a time compute no drafts.",
        OptionFlag("--speculate", "speculative decoding by n-grams; same output"),
    )
    draft_model: nn.Module | None = option(
        None,
        Kind(),
        "a smaller mlx-lm model with the same vocabulary, which proposes tokens instead. Its pool"
        " is a part of `kv_memory`, or has as many blocks as `num_blocks` says.",
        OptionFlag(
            "--draft-model",
            "speculative decoding with this smaller model",
            "PATH",
            not_beside=("speculate",),
            is_model=True,
        ),
    )
    draft_head: str | PathLike[str] | None = option(
        None,
        PathOrAuto("the head"),
        "a head of this model, which proposes tokens instead or, with `speculate`, where its drafts"
        " promise more: a folder with an EAGLE-3 head, a file of `mlx_paged head extract`, or a"
        " checkpoint with an MTP head (docs/speculation.md).",
        OptionFlag(
            "--draft-head",
            "speculative decoding with this head of the model; auto: the one in the model's folder",
            "FILE|CHECKPOINT|auto",
            not_beside=("draft_model",),
        ),
    )
    num_draft_tokens: int = option(
        3,
        Whole(1, MAX_DRAFTS),
        "the largest number of tokens that a draft model or head proposes for a request in a step.",
        OptionFlag(
            "--num-draft-tokens",
            "draft tokens of a request per step",
            "N",
            beside=("draft_model", "draft_head"),
        ),
    )
    profile: bool = option(
        False,
        OnOff(),
        "synchronise between the phases of every step and time each phase, without lookahead. All"
        " steps are slower then.",
        OptionFlag("--profile", "time each phase of every step; steps get slower"),
    )
    metrics_jsonl: str | PathLike[str] | None = option(
        None,
        Path(),
        "write one line for every tick to this file.",
        OptionFlag("--metrics-jsonl", "write one JSON line after each step", "FILE"),
    )
    spike_ms: float | None = option(
        None,
        Milliseconds(),
        "longer steps are listed as spikes; default: three times the usual time, at least 50 ms.",
        OptionFlag(
            "--spike-ms",
            "report longer steps as spikes (default: 3 times the usual time, at least 50 ms)",
            "MS",
        ),
    )
    kv_disk_gb: float = option(
        20.0,
        Gigabytes(),
        "the largest size of the directory `kv_disk`, in GB.",
        OptionFlag(
            "--kv-disk-gb",
            "maximum size of that directory (default: 20 GB)",
            "GB",
            default=None,
            beside=("kv_disk",),
        ),
    )
    model_files: Sequence[str | PathLike[str]] = option(
        (),
        Paths(),
        "directories that the model was loaded from. Their hash is kept in `kv_disk` while they do"
        " not change; without them every start hashes all weights.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one = self.speculate is None or self.draft_model is None
        require(is_one, "Engine", "speculate", self.speculate, GUESSER)
        is_one = self.draft_head is None or self.draft_model is None
        require(is_one, "Engine", "draft_head", self.draft_head, "None beside draft_model")
        if self.profile:  # the phases of a compiled step cannot be told apart
            object.__setattr__(self, "compile", False)
            object.__setattr__(self, "lookahead", False)


OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata["option"] for each in fields(EngineConfig)
}
"""The options by their names, which are those of the keywords of :class:`mlx_paged.Engine`."""

DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(EngineConfig)}

MEMORY_FLAGS = ("kv_memory", "cache_limit", "wired", "kv_bits", "snapshot_bits")
"""Options of memory that all commands with an engine have flags for, in the order of their help."""

STEP_FLAGS = (
    *("max_stall_ms", "policy", "preempt", "compile", "cpu_linear", "cascade"),
    *("prefix_cache", "max_pinned", "kv_disk", "kv_disk_gb", "speculate"),
    *("draft_model", "draft_head", "num_draft_tokens", "adapters", "adapter_memory"),
)
"""The other options that all commands with an engine have flags for, in the order of their help."""

OF_ONE_PROCESS = ("kv_disk", "draft_head")
"""Options that are None where several processes compute a model."""

OF_ONE_MODEL = (
    *("adapters", "draft_model", "draft_head", "num_draft_tokens", "kv_disk", "kv_disk_gb"),
    "snapshot_bits",
)
"""Options whose values belong to the model of ``--model``: another model has none of them."""
