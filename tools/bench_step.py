"""`bench.py step`: the arguments, the inputs of a run, the run in another process, and the table.

The model is a given folder or has random weights. The tokenizer is replaced by a tokenizer of
words, so that a question of N words is a prompt of exactly N tokens. No token ends a completion, so
that every completion has MAX_LENGTH_SAMPLE tokens, unless --mean-tokens makes many tokens end it.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences, T completion tokens, V
vocabulary.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from config import Config
from models import hf
from runtime.mistakes import UserMistake, other_name
from runtime.parsing import REPO
from tools.make_random import make_random

# The default model has 5 million parameters.
RANDOM_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
SETTINGS = [field.name.upper() for field in dataclasses.fields(Config)]
ARGUMENTS = {  # the settings that an argument of bench.py sets
    "MODEL_PATH": "--model",
    "ROLLOUT_GLOBAL_BATCH_SIZE": "--prompts",
    "NUM_PRE_Q": "--completions",
    "MAX_LENGTH_SAMPLE": "--new-tokens",
    "TRAIN_MICRO_BATCH_SIZE": "--micro",
    "STEPS": "--steps",
}
REWARD = """
import zlib

def reward(completions, **columns):
    return [zlib.crc32(text.encode()) % 101 / 100 for text in completions]
"""


class StepShape(NamedTuple):
    """The sizes of a step."""

    prompts: int  # P
    completions: int  # K
    prompt_tokens: int
    new_tokens: int  # T
    micro: int  # sequences of a micro-batch
    mean_tokens: int = 0  # N: one token of N ends a completion; 0: no token does


SHAPES = {"A": StepShape(8, 4, 64, 128, 8), "B": StepShape(4, 8, 384, 256, 8)}
SCALE = {  # the rows of the table
    "B": (8, 16, 32, 64, 128),
    "T": (64, 128, 256, 512, 1024),
    "V": (4096, 16384, 65536, 151936),
}
MIDDLE = (32, 128, 4096)  # B, T and V of the table where another of them varies
COLUMNS = "B | T | V | rollout tok/s | rollout s | update s | step s | peak MiB | update / peak"


# ---- The inputs of a run -------------------------------------------------------------------------


def make_model(source: Path, target: Path, mean_tokens: int) -> int:
    """Makes a folder with the weights of a model and a tokenizer of V words; returns V.

    The weights are links to `source`, which has to exist as long as `target`. mean_tokens: as in
    StepShape. Random weights give all tokens about the same probability, so that the lengths are
    geometric, with about this mean if they are not cut off.
    """
    target.mkdir()
    for file in source.glob("*.safetensors*"):
        (target / file.name).symlink_to(file.resolve())
    V = hf.read_config(source).vocab_size
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stop_ids = [*range(0, V, mean_tokens)] if mean_tokens else []
    (target / "config.json").write_text(json.dumps(values | {"eos_token_id": stop_ids}))
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    template = {"chat_template": "{{ messages[-1]['content'] }}"}  # the question alone
    (target / "tokenizer_config.json").write_text(json.dumps(template))
    return V


def make_dataset(target: Path, V: int, shape: StepShape, steps: int) -> None:
    """Makes a folder with a question of shape.prompt_tokens tokens for each prompt of each step."""
    rng = random.Random(0)
    target.mkdir()
    for split, count in (("train", shape.prompts * steps), ("test", 1)):
        with (target / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                question = " ".join(f"t{rng.randrange(V)}" for _ in range(shape.prompt_tokens))
                file.write(json.dumps({"question": question, "answer": "0"}) + "\n")


def settings_of(folder: Path, shape: StepShape, steps: int) -> dict[str, str]:
    """The settings of the run whose inputs and outputs are in the folder."""
    return {
        "MODEL_PATH": str(folder / "model"),
        "DATASET": str(folder / "data"),
        "OUTPUT_DIR": str(folder / "run"),
        "REWARD_FN": f"{folder / 'reward.py'}:reward",
        "ROLLOUT_GLOBAL_BATCH_SIZE": str(shape.prompts),
        "NUM_PRE_Q": str(shape.completions),
        "MAX_LENGTH_SAMPLE": str(shape.new_tokens),
        "TRAIN_MICRO_BATCH_SIZE": str(shape.micro),
        "STEPS": str(steps),
        "EVAL_EVERY_STEPS": "0",
        "SAVE_EVERY_STEPS": "0",
        "EXPORT_HF": "none",
    }


def check_settings(settings: dict[str, str]) -> None:
    """Raises UserMistake for a name that is no setting, or that bench.py sets."""
    for name in settings:
        if name not in SETTINGS:
            mistake = other_name(name, [name], {known: known for known in SETTINGS})
            unknown = f"there is no setting {name} (`python config.py` lists all)"
            raise UserMistake(mistake.text if mistake else unknown)
        if name in ARGUMENTS:
            raise UserMistake(f"{name} is {ARGUMENTS[name]} here")
        if name in settings_of(Path(), SHAPES["A"], 1):
            raise UserMistake(f"bench.py sets {name}; leave it out")


# ---- A run ---------------------------------------------------------------------------------------


def measure(
    model: Path,
    shape: StepShape,
    steps: int,
    settings: dict[str, str],
    log: IO[str],
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """What bench_run.py measures in a run of so many steps.

    settings: more settings of the run; those in the environment do not count. log: a file that gets
    the lines of the run.
    Raises UserMistake for a mistake in the settings, CalledProcessError if the run fails, and
    TimeoutExpired after timeout_s.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        V = make_model(model, folder / "model", shape.mean_tokens)
        make_dataset(folder / "data", V, shape, steps)
        (folder / "reward.py").write_text(REWARD)
        env = {name: text for name, text in os.environ.items() if name not in SETTINGS}
        env["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")  # empty, so that the run compiles
        env["WANDB_MODE"] = "disabled"
        env |= settings_of(folder, shape, steps) | settings
        Config.from_env(env)
        subprocess.run(
            [sys.executable, str(REPO / "tools" / "bench_run.py"), str(folder / "result.json")],
            env=env,
            stdout=log,
            stderr=log,
            timeout=timeout_s,
            check=True,
        )
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))


# ---- The table of sizes --------------------------------------------------------------------------


def print_table(
    lists: Sequence[Sequence[int]],
    shape: StepShape,
    steps: int,
    settings: dict[str, str],
    minutes: float,
) -> None:
    """Prints a row for each B, each V and each T; the other two have the values of MIDDLE.

    lists: the values of B, of T and of V. minutes: how long the table may take; a run that does not
    end in this time is stopped, and the rows that follow say that they were not measured.
    """
    deadline = time.monotonic() + 60 * minutes
    print(
        f"This takes at most {minutes:g} minutes. K={shape.completions}, prompts of "
        f"{shape.prompt_tokens} tokens, micro-batches of up to {shape.micro} sequences, {steps} "
        f"steps.\n\n| {COLUMNS} |\n|{'---|' * len(COLUMNS.split('|'))}",
        flush=True,
    )
    # The longest completions come last, so that they are lost if the time is not enough.
    varied = [(*MIDDLE[:i], n, *MIDDLE[i + 1 :]) for i in (0, 2, 1) for n in lists[i]]
    with tempfile.TemporaryDirectory() as folder:
        for B, T, V in dict.fromkeys(varied):
            sized = shape._replace(
                prompts=B // shape.completions, new_tokens=T, micro=min(shape.micro, B)
            )
            cells = measured_cells(Path(folder) / str(V), V, sized, steps, settings, deadline)
            print(f"| {B} | {T} | {V} | {cells} |", flush=True)


def measured_cells(
    model: Path, V: int, shape: StepShape, steps: int, settings: dict[str, str], deadline: float
) -> str:
    """The measured columns of a row, or why they are not there.

    model: the folder of a model with a vocabulary of V; the first row with this V makes it.
    deadline: when the row has to end, by time.monotonic().
    """
    empty = " |" * (len(COLUMNS.split("|")) - 4)
    if not model.exists() and time.monotonic() < deadline:
        make_random(REPO / "tiny", model, RANDOM_MODEL | {"vocab_size": V})
    if (timeout_s := deadline - time.monotonic()) <= 0:
        return "not measured, the time is over" + empty
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            found = measure(model, shape, steps, settings, log, timeout_s)
        except subprocess.TimeoutExpired:
            return "stopped, the time is over" + empty
        except subprocess.CalledProcessError as error:
            log.seek(0)
            last = (log.read().splitlines() or [""])[-1].replace("|", "/")
            return f"exit code {error.returncode}: {last}{empty}"
    memory = found.get("peak_device_mib", found["peak_rss_mib"])
    seconds = [found[f"steady_{name}_s"] for name in ("rollout", "train", "step")]
    columns = [f"{found['steady_rollout_tok_s']:.0f}", *(f"{x:.2f}" for x in seconds)]
    columns += [f"{memory:.0f}", f"{found['update_fraction_of_peak']:.2f}"]
    return " | ".join(columns)


# ---- Arguments -----------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def setting(text: str) -> tuple[str, str]:
    """The name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as REMAT=none")
    return name, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench.py step`."""
    A = SHAPES["A"]
    add = parser.add_argument
    add("--model", help="folder or hub id; without it, random weights, 5 million parameters")
    add("--shape", choices=SHAPES, default="A", help="sizes that the next six arguments replace")
    add("--prompts", type=positive, help=f"P, prompts of a step; A: {A.prompts}")
    add("--completions", type=positive, help=f"K, completions of each; A: {A.completions}")
    add("--prompt-tokens", type=positive, help=f"tokens of a prompt; A: {A.prompt_tokens}")
    add("--new-tokens", type=positive, help=f"T, tokens of a completion; A: {A.new_tokens}")
    add(
        "--mean-tokens",
        type=positive,
        metavar="N",
        help="every N-th token of the vocabulary ends a completion",
    )
    add("--micro", type=positive, help=f"sequences of a micro-batch; A: {A.micro}")
    add("--steps", type=positive, help="steps of a run; the default is 8, with --scale 3")
    add("--scale", action="store_true", help="print a table over B = P*K, T and the vocabulary V")
    add("--minutes", type=positive, help="with --scale: when the table ends, 10 by default")
    for name, values in SCALE.items():
        text = ",".join(map(str, values))
        add(f"-{name}", type=positives, metavar="N,N", help=f"with --scale: by default {text}")
    add("settings", nargs="*", type=setting, metavar="NAME=VALUE", help="a setting of the run")


def bench_step(args: argparse.Namespace) -> None:
    """Prints what a run takes on the device of this machine: a line of JSON, or a table."""
    settings = dict(args.settings)
    changes = {name: getattr(args, name) for name in StepShape._fields if getattr(args, name)}
    shape = SHAPES[args.shape]._replace(**changes)
    check_settings(settings)
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise UserMistake("bench.py times one host; unset JAX_COORDINATOR_ADDRESS")
    if args.steps == 1:
        raise UserMistake("--steps 1: the first step compiles and does not count; take 2 or more")
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the other process
    if args.scale:
        if args.model or {"prompts", "new_tokens"} & changes.keys():
            raise UserMistake("--scale has its own models, prompts and lengths; set -B, -T or -V")
        lists = [getattr(args, name) or values for name, values in SCALE.items()]
        if wrong := [B for B in (*lists[0], MIDDLE[0]) if B % shape.completions]:
            raise UserMistake(
                f"--completions {shape.completions} must divide each B of the table, such as "
                f"{wrong[0]}"
            )
        print_table(lists, shape, args.steps or 3, settings, args.minutes or 10)
        return
    if args.minutes or args.B or args.T or args.V:
        raise UserMistake("--minutes, -B, -T and -V are only for --scale")
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            model = hf.fetch_model(args.model)
        else:
            model = Path(folder) / "model"
            make_random(REPO / "tiny", model, RANDOM_MODEL)
        try:
            found = measure(model, shape, args.steps or 8, settings, sys.stderr)
        except subprocess.CalledProcessError as error:  # the run has said why
            raise SystemExit(error.returncode) from None
    print(json.dumps(found))
