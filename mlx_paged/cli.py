"""Arguments that the commands share, and what all their parsers are made of."""

import argparse
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import mlx.nn as nn
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.scheduler.policies import Policy, PreemptionPolicy

GB = 10**9
KV_BLOCK_SIZES = (8, 16, 32)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def number(
    parse: Callable[[str], float], low: float, high: float, expected: str
) -> Callable[[str], float]:
    """An argument type: a number in [low, high]."""

    def convert(text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


COUNT = number(int, 1, 2**31, "a whole number >= 1")
COUNT_OR_NONE = number(int, 0, 2**31, "a whole number >= 0")
FRACTION = number(float, 0, 1, "a number from 0 to 1")
MILLISECONDS = number(float, 1e-3, 1e9, "a number of milliseconds above 0")


def add_model(group: argparse._ArgumentGroup) -> None:
    """What to load."""
    group.add_argument(
        "--model", help="model directory or hub id (default: the built-in demo model)"
    )
    group.add_argument("--adapter-path", help="directory with trained adapter weights")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="let the tokenizer run its own code"
    )


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """What both commands let a user say about sampling."""
    group.add_argument(
        "--temp",
        type=number(float, 0, 1e6, "a number >= 0"),
        default=0.0,
        help="temperature; 0 is greedy (default: %(default)s)",
    )
    group.add_argument("--top-p", type=FRACTION, default=1.0, help="nucleus mass")
    group.add_argument(
        "--top-k", type=COUNT_OR_NONE, default=0, help="most likely tokens kept; 0 keeps all"
    )
    group.add_argument("--min-p", type=FRACTION, default=0.0, help="minimum relative probability")


def add_seed(group: argparse._ArgumentGroup, meaning: str) -> None:
    group.add_argument("--seed", type=number(int, 0, 2**63, "a whole number >= 0"), help=meaning)


def add_engine(group: argparse._ArgumentGroup) -> None:
    """The pool and the scheduler."""
    group.add_argument(
        "--kv-memory",
        type=number(float, 1e-9, 1e6, "a number of GB above 0"),
        metavar="GB",
        help="memory for the KV pool (default: what the device can spare)",
    )
    group.add_argument(
        "--max-stall-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="time that a step may take while streams run, kept by a cost model that learns from "
        "every step (default: only the prefill chunk bounds a step)",
    )
    group.add_argument(
        "--policy",
        choices=_values(Policy),
        default=str(Policy.FCFS),
        help="order of waiting requests (default: %(default)s)",
    )
    group.add_argument(
        "--preempt",
        choices=_values(PreemptionPolicy),
        default=str(PreemptionPolicy.NEWEST),
        help="whose blocks are taken when none are left (default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="share no K/V between prompts that start alike",
    )


def add_metrics(group: argparse._ArgumentGroup) -> None:
    """What is measured, and where it goes."""
    group.add_argument(
        "--metrics-jsonl", metavar="FILE", help="write a line for every step, as it happens"
    )
    group.add_argument(
        "--spike-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="steps that take longer are counted as spikes, with their causes (default: three times"
        " the usual step, at least 50)",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="synchronise between the phases of every step and time each; slower than a normal run",
    )


def metrics_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :class:`Engine`."""
    return {
        "profile": args.profile,
        "metrics_jsonl": args.metrics_jsonl,
        "spike_ms": args.spike_ms,
    }


def _values(choices: type[StrEnum]) -> list[str]:
    """Plain text: argparse shows choices by their repr."""
    return [str(choice) for choice in choices]


def demo_model_path() -> Path:
    """Directory of the small Python-writing model that ships with the package."""
    return Path(str(files("mlx_paged") / "demo_model"))


def load_model(
    name: str | None = None, adapter_path: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model.

    Raises:
        ValueError: there is no such directory and the hub does not give it either, or what is there
            cannot be loaded.
    """
    path = str(demo_model_path()) if name is None else name
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not Path(path).exists() and not _may_be_hub_id(path):
        raise ValueError(f"model {path}: no such directory")
    try:
        model, tokenizer, *_ = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        kind = "cannot be loaded" if Path(path).exists() else "not here and not from the hub"
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {path}: {kind} ({type(error).__name__}: {detail})") from error
    return model, tokenizer


def _may_be_hub_id(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and not name.startswith((".", "~"))
