"""Writes a model of the first layers of another one, with its norm and head, to draft for it.

python -m scripts.first_layers 2 draft
python -m mlx_paged.generate --draft-model draft -p 'def main():'
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_paged.cli import COUNT, Parser, demo_model_path

LAYER = re.compile(r"\blayers\.(\d+)\.")


def write_first_layers(source: Path, count: int, target: Path) -> int:
    """Write the model to `target`; returns how many bytes its weights take.

    Raises:
        ValueError: `source` has fewer layers.
    """
    config = json.loads((source / "config.json").read_text())
    if not count <= config["num_hidden_layers"]:
        layers = config["num_hidden_layers"]
        raise ValueError(f"LAYERS is {count}: expected at most {layers}, as many as {source} has")
    target.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            weights |= cast(dict[str, mx.array], mx.load(str(file)))
        elif file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target)
    kept = {
        name: weight
        for name, weight in weights.items()
        if (layer := LAYER.search(name)) is None or int(layer[1]) < count
    }
    mx.save_safetensors(str(target / "model.safetensors"), kept, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}, indent=2))
    return sum(weight.nbytes for weight in kept.values())


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="scripts.first_layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", type=COUNT, metavar="LAYERS")
    parser.add_argument("target", type=Path, metavar="DIR")
    parser.add_argument("--model", type=Path, help="a directory (default: the demo model)")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        size = write_first_layers(args.model or demo_model_path(), args.layers, args.target)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.target}: {args.layers} layers, {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
