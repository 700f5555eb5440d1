"""Times the steps of a run on the device of this machine, and prints a line of JSON.

    python tools/bench.py

It runs train_grpo.py and reads the times in its metrics.jsonl; docs/speed.md explains the line.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that it runs from any folder

from config import Config
from infra.log import read_lines, read_settings
from infra.mistakes import UserMistake, exit_with_mistakes
from model import hf
from model.params import init_params

# The model of a run without --model: tiny/config.json with these values has 5 million parameters.
RANDOM_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
QUESTIONS = 256
REWARD = """
import zlib

def reward(completions, **columns):
    return [zlib.crc32(text.encode()) % 101 / 100 for text in completions]
"""
# Small sizes, and nothing but steps. Settings of the user win.
DEFAULTS = {
    "EVAL_EVERY_STEPS": "0",
    "SAVE_EVERY_STEPS": "0",
    "EXPORT_HF": "none",
    "WANDB_MODE": "disabled",
    "ROLLOUT_GLOBAL_BATCH_SIZE": "8",
    "NUM_PRE_Q": "4",
    "MAX_LENGTH_SAMPLE": "128",
    "TRAIN_MICRO_BATCH_SIZE": "8",
}


# ---- The inputs of the run -----------------------------------------------------------------------


def make_random_model(source: Path, target: Path, changes: dict[str, int]) -> None:
    """Makes a folder with random weights in float32, and the config and the tokenizer of `source`.

    changes: new values for config.json.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.jsonl"))
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | changes))
    model = hf.read_config(target)
    tensors = dict(hf.hf_tensors(init_params(model, jax.random.key(0)), model))
    hf.save_tensors(tensors, target / hf.WEIGHTS)


def make_model(source: Path, target: Path, mean_tokens: int) -> None:
    """Makes a folder with the weights of a model and a tokenizer that makes a token of each word.

    The weights are links to `source`, which has to exist as long as `target`. mean_tokens: of this
    number of tokens one ends a completion; 0: no token does. Random weights give all tokens about
    the same probability, so that the lengths are geometric, with about this mean if none is cut
    off.
    """
    target.mkdir()
    for file in source.glob("*.safetensors*"):
        (target / file.name).symlink_to(file.resolve())
    V = hf.read_config(source).vocab_size
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stop_ids = [*range(0, V, mean_tokens)] if mean_tokens else [-1]  # no token has this id
    (target / "config.json").write_text(json.dumps(values | {"eos_token_id": stop_ids}))
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    # A prompt is SYSTEM_PROMPT, a single word, and the question.
    template = {"chat_template": "{{ messages[0]['content'] }} {{ messages[1]['content'] }}"}
    (target / "tokenizer_config.json").write_text(json.dumps(template))


def make_dataset(target: Path, V: int, prompt_tokens: int) -> None:
    """Makes a file with QUESTIONS questions, whose prompts have this number of tokens."""
    rng = random.Random(0)
    with target.open("w") as file:
        for _ in range(QUESTIONS):
            question = " ".join(f"t{rng.randrange(V)}" for _ in range(prompt_tokens - 1))
            file.write(json.dumps({"question": question, "answer": "0"}) + "\n")


# ---- The run -------------------------------------------------------------------------------------


def bench(
    args: argparse.Namespace, program: Sequence[str] = ("train_grpo.py",)
) -> dict[str, float | str]:
    """Trains in a temporary folder, and returns the fields of docs/speed.md. program: a script that
    trains, with its arguments."""
    if args.steps < 3:
        raise UserMistake(f"--steps {args.steps}: the first two do not count; take 3 or more")
    with tempfile.TemporaryDirectory() as name:
        folder, user_settings = Path(name), dict(args.settings)
        bench_settings = {
            "MODEL_PATH": str(folder / "model"),
            "SYSTEM_PROMPT": "t0",
            "DATASET": str(folder / "data.jsonl"),
            "OUTPUT_DIR": str(folder / "run"),
            "REWARD_FN": f"{folder / 'reward.py'}:reward",
            "STEPS": str(args.steps),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),  # empty, so that the run compiles
        }
        if both := [name for name in user_settings if name in bench_settings]:
            raise UserMistake(f"bench.py sets {both[0]}; leave it out")
        settings = DEFAULTS | user_settings | bench_settings
        Config.from_env(settings)  # raises UserMistake before a model is made
        if args.model:
            source = hf.fetch_model(args.model)
        else:
            source = folder / "random"
            jax.config.update("jax_platforms", "cpu")  # the run needs the devices
            make_random_model(REPO / "tiny", source, RANDOM_MODEL)
        make_model(source, folder / "model", args.mean_tokens)
        V = hf.read_config(source).vocab_size
        make_dataset(folder / "data.jsonl", V, args.prompt_tokens)
        (folder / "reward.py").write_text(REWARD)
        # As a user starts it. Settings in the environment of this process do not count.
        names = [field.name.upper() for field in dataclasses.fields(Config)]
        env = {name: text for name, text in os.environ.items() if name not in names} | settings
        command = [sys.executable, *program]
        if code := subprocess.run(command, cwd=REPO, env=env, stdout=sys.stderr).returncode:
            raise SystemExit(code)  # the run has said why
        lines = read_lines(folder / "run" / "metrics.jsonl")
        records = [record for record in lines if "time/train/step_s" in record]
        device = read_settings(folder / "run")["derived.device"]
    return measurements(records) | {"device": device}


# The fields of docs/speed.md that are medians, and the metrics of which they are.
MEDIANS = {
    "steady_rollout_s": "time/train/rollout_s",
    "steady_train_s": "time/train/update_s",
    "steady_step_s": "time/train/step_s",
    "tokens": "train-other/total_valid_token_count",
    "plen": "train-seq_len/prompt/mean",
    "clen": "train-seq_len/completion/mean",
    "rollout_computed_per_token": "throughput/rollout/computed_per_token",
    "update_computed_per_token": "throughput/update/computed_per_token",
    "update_mfu": "throughput/update/mfu",  # on known devices
}


def measurements(records: list[dict[str, Any]]) -> dict[str, float]:
    """The fields of docs/speed.md, from the records of steps. The first two steps do not count,
    because jax compiles in the first."""
    counted = records[2:]
    fields = {
        field: statistics.median(record[name] for record in counted)
        for field, name in MEDIANS.items()
        if name in counted[-1]
    }
    fields["steady_rollout_tok_s"] = fields["tokens"] / fields["steady_rollout_s"]
    fields["recompiled"] = sum(record["compile/programs"] for record in counted)
    fields["first_step_s"] = records[0]["time/train/step_s"]
    for name, key in (("rss", "host_peak_gib"), ("device", "device_peak_gib")):
        if gib := counted[-1].get(f"memory/{key}"):
            fields[f"peak_{name}_mib"] = 1024 * gib
    return {name: round(value, 6) for name, value in fields.items()}


# ---- Arguments -----------------------------------------------------------------------------------


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as REMAT=none")
    return name, value


def make_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [arguments] [NAME=VALUE ...]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder or hub id; without it, random weights, 5 million parameters")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="tokens of a prompt")
    add("--mean-tokens", type=int, default=0, metavar="N", help="one token of N ends a completion")
    add("--steps", type=int, default=8, metavar="N", help="steps of the run, 8 by default")
    add("settings", nargs="*", type=setting, metavar="NAME=VALUE", help="a setting of the run")
    return parser


def main() -> None:
    try:
        print(json.dumps(bench(make_parser().parse_args())))
    except UserMistake as error:
        exit_with_mistakes(error)


if __name__ == "__main__":
    main()
