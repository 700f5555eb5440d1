"""Asks one question of several models, and prints their greedy completions side by side.

    python tools/ask.py tiny runs/seed0/hf --number 1
    python tools/ask.py tiny --question "Kim has 5 pens and buys 8 more. How many pens are there?"

A model is a Hugging Face folder, such as the `hf` of a run, or the id of a model on the hub. The
prompt is that of a run: the chat template of the model, with the system prompt of rewards.py. The
settings DTYPE, CHAT_TEMPLATE, SYSTEM_PROMPT, QUESTION_COLUMN, ANSWER_COLUMN, EVAL_SPLIT and
DATASET_CONFIG count too. Every model is computed on one device.
"""

# ruff: noqa: E402 - the project's folder comes into sys.path before the imports from it

import argparse
import os
import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # Python looks for modules beside a script only, here in tools/.

import data
from config import load
from models import hf
from models.draw import Sampling
from models.model import Compute
from rewards import SYSTEM_PROMPT
from rollout import texts_of
from runtime.layout import ROLLOUT_BATCH_AXES, Layout, make_mesh
from runtime.mistakes import UserMistake, fail
from runtime.processes import start_jax
from runtime.sizes import prompt_width
from sampling import Stopping, generate


def complete(
    path: str,
    question: str,
    system_prompt: str,
    max_tokens: int,
    chat_template: str,
    setting: str = "auto",
) -> str:
    """The greedy completion of a model, with a <think> that its chat template has opened.

    path: a folder or an id of the hub. setting: DTYPE. Raises UserMistake for a model that cannot
    be read.
    """
    folder = hf.fetch_model(path)
    model, tokenizer = hf.read_model(folder, chat_template)
    (prompt,) = data.build_prompts([{"question": question}], tokenizer, system_prompt)
    mesh = make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    auto = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(auto if setting == "auto" else setting)
    stop_ids = hf.stop_ids(folder, tokenizer, model.vocab_size)
    room = model.max_positions - len(prompt.ids)
    if room < 1:
        raise UserMistake(
            f"{path}: the prompt has {len(prompt.ids)} tokens; the model has "
            f"{model.max_positions} positions"
        )
    completions = generate(
        hf.load_params(folder, model, mesh, dtype),
        Compute(model, dtype, Layout(mesh, ROLLOUT_BATCH_AXES)),
        *data.pad_prompts([prompt.ids], prompt_width(len(prompt.ids)), stop_ids[0]),
        np.zeros(1, np.int32),
        jax.random.key(0),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(min(max_tokens, room), stop_ids, pad_id=stop_ids[0]),
    )
    return texts_of(tokenizer, [prompt], completions)[0]


def side_by_side(texts: dict[str, str], width: int) -> str:
    """The texts as columns under their names; together they are at most `width` characters wide."""
    each = max(20, (width + 3) // len(texts) - 3)
    columns = [
        [part for line in [name, *text.splitlines()] for part in textwrap.wrap(line, each) or [""]]
        for name, text in texts.items()
    ]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join(" | ".join(part.ljust(each) for part in line).rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="Folder of a model, or its id.")
    parser.add_argument("--question", help="Question to ask; without it, --number counts.")
    parser.add_argument(
        "--number", type=int, default=1, help="Number of a held-out question, from 1."
    )
    parser.add_argument("--dataset", default=str(REPO / "tiny"), help="As the setting DATASET.")
    parser.add_argument("--system-prompt", default="", help="Instead of SYSTEM_PROMPT.")
    parser.add_argument("--max-tokens", type=int, default=512, help="Longest completion.")
    args = parser.parse_args()
    try:
        os.environ["DATASET"] = args.dataset
        cfg = load([]).cfg
        start_jax(cfg)
        if jax.process_count() > 1:
            raise UserMistake("ask.py computes on one host; start it without the other processes")
        example = {"question": args.question}
        if not args.question:
            columns = cfg.question_column, cfg.answer_column
            examples = data.load_examples(
                args.dataset, cfg.dataset_config, cfg.eval_split, *columns
            )
            if not 1 <= args.number <= len(examples):
                raise UserMistake(
                    f"--number {args.number}: the dataset has the questions 1 to {len(examples)}"
                )
            example = examples[args.number - 1]
        system_prompt = data.text_of(args.system_prompt or cfg.system_prompt) or SYSTEM_PROMPT
        print(*(example[name] for name in ("question", "answer") if name in example), sep="\n")
        settings = args.max_tokens, cfg.chat_template, cfg.dtype
        asked = example["question"], system_prompt
        texts = {path: complete(path, *asked, *settings) for path in args.models}
    except UserMistake as error:
        fail(error)
    print()
    print(side_by_side(texts, shutil.get_terminal_size().columns))


if __name__ == "__main__":
    main()
