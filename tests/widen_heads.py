"""Copies a Qwen2 or Llama model with wider heads, so that it computes the same.

    python tests/widen_heads.py tiny wide 128

The serving engine of ROLLOUT_BACKEND=sglang_jax needs a head_dim that 128 divides on a CPU. New
numbers in the projections are 0. Those of queries and keys lie where their rotary angles do not
matter, and the queries are scaled, because attention divides by the square root of head_dim.
"""
# ruff: noqa: E402 - the project's folder comes into sys.path before the imports from it

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from infra.mistakes import UserMistake, exit_with_mistakes
from model import hf


def widen_heads(source: Path, target: Path, head_dim: int) -> None:
    """Writes the copy. source: a model's folder with one safetensors file. Raises UserMistake."""
    model = hf.read_config(source)
    times, rest = divmod(head_dim, model.head_dim)
    if rest or not times:
        raise UserMistake(f"{head_dim} is not a multiple of the model's head_dim, {model.head_dim}")
    if model.qk_norm or model.variants[0].rope.llama3:
        raise UserMistake(f"{source}: norms of heads and Llama 3's angles change with head_dim")
    tensors = load_file(source / "model.safetensors")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps(values | {"head_dim": head_dim}, indent=1) + "\n"
    )

    # Pair i of a head, (i, i + half), turns by theta ** (-i / half). In a head that is `times` as
    # wide, pair times * i turns by the same angle.
    pairs = times * np.arange(model.head_dim // 2)
    places = np.concatenate([pairs, head_dim // 2 + pairs])  # [h] numbers of the wider head
    for name, x in tensors.items():
        if "self_attn." not in name:
            continue
        scale = math.sqrt(times) if ".q_proj." in name else 1.0
        x = x.T if ".o_proj." in name else x  # [heads * h, ...]
        heads = scale * x.reshape(-1, model.head_dim, *x.shape[1:])
        wide = np.zeros((len(heads), head_dim, *x.shape[1:]), x.dtype)
        wide[:, places] = heads
        x = wide.reshape(-1, *x.shape[1:])
        tensors[name] = np.ascontiguousarray(x.T if ".o_proj." in name else x)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="Folder of a model.")
    parser.add_argument("target", type=Path, help="Folder to make.")
    parser.add_argument("head_dim", type=int, help="Width of each head in the copy.")
    args = parser.parse_args()
    try:
        widen_heads(args.source, args.target, args.head_dim)
    except UserMistake as error:
        exit_with_mistakes(error)
    print(args.target)


if __name__ == "__main__":
    main()
