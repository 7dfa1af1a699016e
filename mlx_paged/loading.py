"""Models of the commands, loaded from the names that flags give."""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path, load_config

from mlx_paged.cli import demo_model_path, flag_default
from mlx_paged.launched import rank
from mlx_paged.model_folders import check_model
from mlx_paged.option_kinds import Option, PathOrAuto
from mlx_paged.options import OF_ONE_MODEL, OPTIONS
from mlx_paged.runner.positions import positions
from mlx_paged.vision.host import load_seeing


def _loaded(option: Option, value: Any, model: str | None) -> Any:
    """The value of an option whose flag has `value` beside ``--model``: a model that the flag names
    is loaded, and "auto" is the model's folder."""
    flag, kind = option.flag, option.kind
    if flag is not None and flag.is_model:
        try:
            return load_model(value)[0]
        except ValueError as error:
            raise ValueError(f"{flag.names}: {error}") from error
    if isinstance(kind, PathOrAuto) and kind.is_auto(value):
        folder = Path(str(model))
        return folder if folder.is_dir() else Path(hf_repo_to_path(str(model)))
    return value


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :class:`Engine` that the flags of a command give, by name, after
    ``cli.check_flags`` has checked the flags. Loads the models that the flags name.

    Raises:
        ValueError: a model that cannot be loaded.
    """
    options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    for name, option in OPTIONS.items():  # a flag that was not given leaves the option's default
        if option.flag is not None and option.flag.default is None and options.get(name) is None:
            options.pop(name, None)
    for name, value in options.items():
        if value is not None:
            options[name] = _loaded(OPTIONS[name], value, args.model)
    model_files = [args.model or demo_model_path(), args.adapter_path]
    options["model_files"] = [path for path in model_files if path is not None]
    return options


def of_another_model(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of a command for another model than that of ``--model``, to which the adapter
    and the options :data:`OF_ONE_MODEL` belong."""
    others = {name: flag_default(name) for name in OF_ONE_MODEL}
    return argparse.Namespace(**vars(args) | {"adapter_path": None} | others)


def load_model(
    name: str | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    sees: bool = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model. If it
    `sees`, mlx-vlm loads it. Raises ValueError if the model or the adapter does not exist or cannot
    be loaded."""
    path = str(demo_model_path()) if name is None else name
    return load_with_config(path, adapter_path, trust_remote_code, sees)[:2]


def load_with_config(
    path: str,
    adapter_path: str | None,
    trust_remote_code: bool,
    sees: bool = False,
    is_lazy: bool = False,
    **tokenizer_config: str,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A model, its tokenizer and its configuration. The weights of a model of mlx-lm are read when
    they are used if it `is_lazy`, and under mlx.launch. Raises ValueError as :func:`load_model`."""
    check_model(path, adapter_path)
    if sees and adapter_path is not None:
        raise ValueError("--adapter-path is given beside --vision: expected one of them")
    if sees and trust_remote_code:
        raise ValueError("--trust-remote-code is given beside --vision: expected one of them")
    try:
        if sees:
            return load_seeing(path, **tokenizer_config)
        loaded: tuple[nn.Module, TokenizerWrapper, dict[str, Any]] = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code} | tokenizer_config,
            return_config=True,
            trust_remote_code=trust_remote_code,
            lazy=is_lazy or rank() is not None,
        )
        loaded[1].encode(".")  # some mistakes of its files show only here
    except Exception as error:
        detail = f"({type(error).__name__}: {_reason(error)})"
        if Path(path).exists():
            raise ValueError(f"model {path}: cannot be loaded {detail}") from error
        message = f"model {path}: not here and not from the hub {detail}"
        if isinstance(error, FileNotFoundError | ConnectionError):  # the hub did not answer
            message += ": expected a folder, or the name of a model on the hub and a network"
        raise ValueError(message) from error
    finally:
        # Each layer that is made draws weights, lazily, which the file's weights replace. MLX's
        # random state would keep the graph of all these draws: 2 KB a layer of every model loaded.
        mx.eval(mx.random.state)
    return loaded


def _reason(error: Exception) -> str:
    """One line of an error's message: the first. An error of a hub has the status of HTTP there and
    the reason, such as "Access to model X is restricted", in its last line."""
    lines = [line.strip() for line in str(error).splitlines()]
    first, *others = [line for line in lines if line and line[:12] != "(Request ID:"] or [""]
    last = (others or [first])[-1].removesuffix(".")
    if isinstance(error, GatedRepoError):
        return f"{last}; `hf auth login` logs in"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or you may not read it; `hf auth login` logs in"
    return f"{first}; {last}" if others and isinstance(error, HfHubHTTPError) else first


def context_length(name: str | None) -> int | None:
    """Tokens of prompt and completion that a loaded model has positions for; None: no limit."""
    path = Path(demo_model_path() if name is None else name)
    return positions(load_config(path if path.exists() else Path(hf_repo_to_path(str(name)))))
