"""Times the steps of a run, or says how much memory the log-probabilities need on a TPU.

    python tools/bench.py step              # times a run on the device of this machine
    python tools/bench.py loss --tpu v6e    # compiles for a TPU that is not here; needs libtpu

`step` runs train_grpo.py, reads the times in its metrics.jsonl, and prints a line of JSON;
docs/speed.md explains it. `loss` is the log-probabilities and entropies of tokens from hidden
states, and the gradients with respect to the hidden states and the lm_head. Its implementations are
`full`, which keeps all logits in memory, and `jax` and `pallas`, the values of POLICY_LOSS_IMPL.

Dimensions: P prompts of a step, K completions per prompt, T completion tokens, D model, V
vocabulary, n tokens of a device.
"""
# ruff: noqa: E402 - the folder of the project has to be on the path before its modules are imported

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that it runs from any folder

from config import Config
from models import hf
from models.logps import token_logps, token_logps_reference
from models.model import ModelConfig
from models.placement import update_flops
from runtime.chips import CHIPS
from runtime.mistakes import UserMistake, fail
from runtime.processes import start_jax
from startup import logps_kernel
from tools.programs import array, slice_devices

IMPLEMENTATIONS = ("full", "jax", "pallas")


# ---- bench.py step: the inputs of a run ----------------------------------------------------------

SETTINGS = [field.name.upper() for field in dataclasses.fields(Config)]
# The model of a run without --model: these values of tiny/config.json make 5 million parameters.
RANDOM_MODEL = (
    "hidden_size=256",
    "intermediate_size=1024",
    "num_hidden_layers=4",
    "num_attention_heads=4",
    "num_key_value_heads=2",
    "vocab_size=4096",
    "max_position_embeddings=4096",
)
QUESTIONS = 256
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
    mean_tokens: int = 0  # N: one token of N ends a completion; 0: no token does


A, B = StepShape(8, 4, 64, 128), StepShape(4, 8, 384, 256)
SHAPES = {"A": A, "B": B, "D": B._replace(mean_tokens=64)}  # docs/speed.md has the command of C


def make_model(source: Path, target: Path, mean_tokens: int) -> None:
    """Makes a folder with the weights of a model and a tokenizer that makes a token of each word.

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


def make_dataset(target: Path, V: int, prompt_tokens: int) -> None:
    """Makes a folder with QUESTIONS questions of so many tokens, in either split."""
    rng = random.Random(0)
    target.mkdir()
    for split in ("train", "test"):
        with (target / f"{split}.jsonl").open("w") as file:
            for _ in range(QUESTIONS):
                question = " ".join(f"t{rng.randrange(V)}" for _ in range(prompt_tokens))
                file.write(json.dumps({"question": question, "answer": "0"}) + "\n")


# ---- bench.py step: the run ----------------------------------------------------------------------


def settings_of(
    folder: Path, shape: StepShape, steps: int, given: dict[str, str]
) -> dict[str, str]:
    """The settings of the run whose inputs and outputs are in the folder.

    given: settings of the user, which win over the sizes of the shape. Raises UserMistake.
    """
    ours = {
        "MODEL_PATH": str(folder / "model"),
        "DATASET": str(folder / "data"),
        "OUTPUT_DIR": str(folder / "run"),
        "REWARD_FN": f"{folder / 'reward.py'}:reward",
        "STEPS": str(steps),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),  # empty, so that the run compiles
    }
    if taken := [name for name in given if name in ours]:
        raise UserMistake(f"bench.py sets {taken[0]}; leave it out")
    sizes = {
        "ROLLOUT_GLOBAL_BATCH_SIZE": str(shape.prompts),
        "NUM_PRE_Q": str(shape.completions),
        "MAX_LENGTH_SAMPLE": str(shape.new_tokens),
        "TRAIN_MICRO_BATCH_SIZE": "8",
        "EVAL_EVERY_STEPS": "0",
        "SAVE_EVERY_STEPS": "0",
        "EXPORT_HF": "none",
        "WANDB_MODE": "disabled",
    }
    return sizes | given | ours


def bench_step(args: argparse.Namespace) -> None:
    """Runs train_grpo.py in a folder that goes afterwards, and prints a line of JSON.

    jax starts in this process only after the run, because a TPU belongs to one process at a time.
    """
    shape = SHAPES[args.shape]
    if args.prompt_tokens:
        shape = shape._replace(prompt_tokens=args.prompt_tokens)
    if args.steps < 3:
        raise UserMistake(f"--steps {args.steps}: the first two do not count; take 3 or more")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(folder, shape, args.steps, dict(args.settings))
        env = {name: text for name, text in os.environ.items() if name not in SETTINGS} | settings
        cfg = Config.from_env(env)
        if args.model:
            source = hf.fetch_model(args.model)
        else:
            source = folder / "random"
            command = [sys.executable, REPO / "tools" / "make_random.py", REPO / "tiny", source]
            subprocess.run([*command, *RANDOM_MODEL], stdout=sys.stderr, check=True)
        make_model(source, folder / "model", shape.mean_tokens)
        make_dataset(folder / "data", hf.read_config(source).vocab_size, shape.prompt_tokens)
        (folder / "reward.py").write_text(REWARD)

        began = time.perf_counter()
        run = subprocess.run([sys.executable, REPO / "train_grpo.py"], env=env, stdout=sys.stderr)
        wall_s = time.perf_counter() - began
        if run.returncode:  # the run has said why
            raise SystemExit(run.returncode)
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "time/train/step_s" in record]
        with contextlib.redirect_stdout(sys.stderr):  # stdout gets the line of JSON alone
            start_jax(cfg)
        found = measurements(records, hf.read_config(source), cfg) | {"wall_s": wall_s}
    found = {name: round(value, 6) for name, value in found.items()}
    print(json.dumps(found | {"device": jax.devices()[0].device_kind}))


def measurements(
    records: list[dict[str, Any]], model: ModelConfig, cfg: Config
) -> dict[str, float]:
    """The fields of docs/speed.md, from the steps of metrics.jsonl and the speed of a matmul.

    All but the first two steps count: jax compiles in the first one.
    """
    counted = records[2:]

    def median(name: str) -> float:
        return statistics.median(record[name] for record in counted)

    rollout_s, update_s = median("time/train/rollout_s"), median("time/train/update_s")
    tokens = median("train-other/total_valid_token_count")
    S, T = median("train-seq_len/prompt/mean"), median("train-seq_len/completion/mean")
    found = {
        "steady_rollout_s": rollout_s,
        "steady_rollout_tok_s": tokens / rollout_s,
        "steady_train_s": update_s,
        "steady_step_s": median("time/train/step_s"),
        "recompiled": sum(record["compile/programs"] for record in counted),
        "first_step_s": records[0]["time/train/step_s"],
        "tokens": tokens,
        "plen": S,
        "clen": T,
        "rollout_computed_per_token": median("throughput/rollout/computed_per_token"),
        "update_computed_per_token": median("throughput/update/computed_per_token"),
    }
    for name, key in (("rss", "host_peak_gib"), ("device", "device_peak_gib")):
        if gib := records[-1].get(f"memory/{key}"):
            found[f"peak_{name}_mib"] = 1024 * gib
    K = cfg.num_pre_q
    P = records[0]["train-other/batch_global"] // K
    # The last token of a prompt is computed with each of its completions, which lack their last.
    flops = cfg.ppo_epochs * update_flops(model, np.full(P, S - 1), np.full((P, K), T))
    peak = matmul_gflops()
    # The devices that jax shows of a CPU share its cores.
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
    fraction = flops / update_s / (peak * 1e9 * devices)
    found |= {"update_flops": flops, "matmul_peak_gflops": peak}
    return found | {"update_fraction_of_peak": fraction}


def matmul_gflops() -> float:
    """The rate of a large matmul on one device: float32 on a CPU, else bfloat16.

    It is the median of 20 calls after two that do not count."""
    rows, inner, columns, dtype, calls = 8192, 4096, 8192, jnp.bfloat16, 10
    if jax.default_backend() == "cpu":
        rows, inner, columns, dtype, calls = 4096, 256, 1024, jnp.float32, 1
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (rows, inner), dtype)
    b = jax.random.normal(keys[1], (inner, columns), dtype)
    matmul = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(22):
        began = time.perf_counter()
        jax.block_until_ready([matmul(a, b) for _ in range(calls)])
        seconds.append(time.perf_counter() - began)
    return 2 * rows * inner * columns * calls / statistics.median(seconds[2:]) / 1e9


# ---- bench.py loss -------------------------------------------------------------------------------


class LossShape(NamedTuple):
    """The sizes of the loss."""

    n: int  # tokens of a device
    D: int
    V: int


def compile_loss(impl: str, backward: bool, shape: LossShape, name: str) -> Any:
    """The sum of log-probabilities and entropies, or with `backward` its gradients with respect to
    hidden and lm_head, compiled for the slice NAME-8.

    fsdp splits the batch and the weights; each device has 16 sequences. Raises UserMistake if D is
    too wide for the kernel.
    """
    devices = slice_devices(f"{name}-8")
    mesh = Mesh(np.array(devices).reshape(1, -1, 1), ("dp", "fsdp", "tp"))
    R, T = 16 * len(devices), shape.n // 16
    hidden = array(mesh, (R, T, shape.D), jnp.bfloat16, ("dp", "fsdp"))
    lm_head = array(mesh, (shape.V, shape.D), jnp.float32, "tp", "fsdp")
    ids = array(mesh, (R, T), jnp.int32, ("dp", "fsdp"))

    def loss(hidden: Any, lm_head: Any, ids: Any) -> Any:
        if impl == "full":
            logps, entropy = token_logps_reference(hidden, lm_head, ids)
        else:
            kernel = logps_kernel(impl, shape.D, devices[0].device_kind)
            logps, entropy = token_logps(hidden, lm_head, ids, mesh=mesh, kernel=kernel)
        return logps.sum() + 0.01 * entropy.sum()

    program = jax.grad(loss, (0, 1)) if backward else loss
    out_shardings = (hidden.sharding, lm_head.sharding) if backward else None
    return jax.jit(program, out_shardings=out_shardings).lower(hidden, lm_head, ids).compile()


def plan_loss(shape: LossShape, name: str) -> None:
    """Prints a table of the memory that the compiler of the TPU plans for each implementation."""
    print(f"{name}: {shape.n} tokens per device, D {shape.D}, V {shape.V}")
    print("| | temporaries GiB: forward | with gradient |\n|---|---|---|")
    for impl in IMPLEMENTATIONS:
        compiled = [compile_loss(impl, backward, shape, name) for backward in (False, True)]
        memory = [c.memory_analysis().temp_size_in_bytes / 2**30 for c in compiled]
        print(f"| {impl} | {memory[0]:.2f} | {memory[1]:.2f} |", flush=True)


# ---- Arguments -----------------------------------------------------------------------------------


def setting(text: str) -> tuple[str, str]:
    """The name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as REMAT=none")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True, help="the benchmark")
    usage = "%(prog)s [arguments] [NAME=VALUE ...]"
    add = what.add_parser("step", usage=usage, help="the steps of a run").add_argument
    add("--model", help="folder or hub id; without it, random weights, 5 million parameters")
    add("--shape", choices=SHAPES, default="A", help="sizes of the step: see docs/speed.md")
    add("--prompt-tokens", type=int, metavar="N", help="tokens of a prompt, instead of the shape's")
    add("--steps", type=int, default=8, metavar="N", help="steps of the run, 8 by default")
    add("settings", nargs="*", type=setting, metavar="NAME=VALUE", help="a setting of the run")
    add = what.add_parser("loss", help="memory of the log-probabilities").add_argument
    add("--tpu", choices=CHIPS, required=True, help="the TPU to compile for")
    add("--tokens", type=int, default=16 * 1024, help="tokens per device")
    add("-D", type=int, default=2048, help="width of the model")  # those of Qwen2.5-3B
    add("-V", type=int, default=151936, help="size of the vocabulary")
    args = parser.parse_args()
    try:
        if args.what == "step":
            bench_step(args)
        else:
            plan_loss(LossShape(args.tokens, args.D, args.V), args.tpu)
    except UserMistake as error:
        fail(error)


if __name__ == "__main__":
    main()
