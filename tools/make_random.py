"""Makes a model of any size with random weights, from the config and tokenizer of another model.

    python tools/make_random.py tiny small hidden_size=64 num_hidden_layers=2
    MODEL_PATH=small DATASET=tiny python train_grpo.py

NAME=NUMBER replaces a value of config.json. The weights are float32.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from models import hf
from models.model import init_params
from runtime.mistakes import UserMistake, fail


def make_random(source: Path, target: Path, changes: dict[str, int]) -> None:
    """Writes a Hugging Face folder with random weights.

    source: a model's folder, whose weights are not needed. changes: new values for config.json.
    Raises UserMistake if `target` exists, or for a config that this project cannot compute.
    """
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed
    if target.exists():
        raise UserMistake(f"{target} exists; choose another folder")
    hf.read_config(source)  # for its mistakes
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if unknown := sorted(changes.keys() - values.keys()):
        raise UserMistake(f"{source}/config.json has no {', '.join(unknown)}; it has {[*values]}")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.jsonl"))
    (target / "config.json").write_text(json.dumps(values | changes, indent=1) + "\n")
    model = hf.read_config(target)
    tensors = dict(hf.hf_tensors(init_params(model, jax.random.key(0)), model))
    hf.save_tensors(tensors, target / hf.WEIGHTS)


def change(text: str) -> tuple[str, int]:
    """The name and the number of NAME=NUMBER."""
    name, _, number = text.partition("=")
    if not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, such as hidden_size=64")
    return name, int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="Folder of a model.")
    parser.add_argument("target", type=Path, help="Folder to make.")
    parser.add_argument("changes", nargs="*", type=change, metavar="NAME=NUMBER")
    args = parser.parse_args()
    try:
        make_random(args.source, args.target, dict(args.changes))
    except UserMistake as error:
        fail(error)
    print(args.target)


if __name__ == "__main__":
    main()
