"""Starts train_grpo.py as a user does, and reads the files and the lines of the run."""

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parent.parent
JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3])
# Newer versions have only the other emitters, and end a program at an unknown flag.
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false" if JAXLIB < (0, 11, 1) else ""
# With XLA's older emitters, with few passes of LLVM, and with one part for LLVM instead of many,
# programs compile in a third of the CPU time. They run slower.
FLAGS = f"--xla_cpu_parallel_codegen_split_count=1 {OLDER_EMITTERS}"
FASTER_TO_COMPILE = {"XLA_FLAGS": FLAGS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start_script(script: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> Popen[bytes]:
    """Starts a script as a user does. Its output is not buffered here, so that communicate() gives
    all lines that `wait_for` has not read."""
    command = [sys.executable, str(script), *arguments]
    return Popen(command, cwd=cwd, env=env, bufsize=0, stdout=PIPE, stderr=PIPE)


# A reward function of weight 0 that writes every completion and its answer to a file.
RECORDER = """
import json
import os
def record(completions, answer, **columns):
    with open(os.environ["RECORD_TO"], "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(pair) + "\\n" for pair in zip(answer, completions)))
    return [0.0] * len(completions)
"""


@functools.cache
def few_examples(train: int = 300, test: int = 500) -> Path:
    """A folder with a part of the tiny dataset, because a run makes the prompts of all examples."""
    folder = Path(tempfile.mkdtemp(prefix="few_"))
    atexit.register(shutil.rmtree, folder)
    for split, count in (("train", train), ("test", test)):
        lines = (REPO / "tiny" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    return folder


class Result(NamedTuple):
    code: int
    lines: str  # stdout
    errors: str  # stderr
    records: list[dict]  # metrics.jsonl
    completions: list  # (answer, text) of each sequence, in their order
    out: Path


def with_defaults(out: Path, env: dict[str, str]) -> dict[str, str]:
    """The settings of a run of one step on few examples, which records its completions."""
    recorder = out.parent / "recorder.py"
    recorder.parent.mkdir(parents=True, exist_ok=True)
    recorder.write_text(RECORDER)
    return {
        "REWARD_FN": f"reward_correct,reward_format,tag_count_reward,{recorder}:record",
        "REWARD_WEIGHTS": "1,0.5,0.5,0",
        "RECORD_TO": str(out / "completions.jsonl"),
        "OUTPUT_DIR": str(out),
        "DATASET": str(few_examples()),
        "STEPS": "1",
        "EVAL_EVERY_STEPS": "0",
        "MAX_LENGTH_SAMPLE": "32",
    } | env


def start(
    out: Path, env: dict[str, str], devices: int, repo: Path = REPO, changes: str = ""
) -> Popen[bytes]:
    """Starts train_grpo.py, or SCRIPT in `env`, for one step on few examples without evaluation,
    unless `env` says otherwise.

    changes: what a script first does to the imported module train_grpo. SWITCHED_OFF in `env` names
    methods of Config, such as `drops_ended`, each of which then returns False.
    """
    out.mkdir(parents=True, exist_ok=True)
    keep = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}",
    }
    env = keep | FASTER_TO_COMPILE | settings | with_defaults(out, env)
    for name in env.get("SWITCHED_OFF", "").split():
        method = f"train_grpo.Config.{name}"
        changes += f"\nassert callable({method})\n{method} = lambda cfg: False"
    script = repo / env.get("SCRIPT", "train_grpo.py")
    if changes:
        script = out / "changed.py"
        script.write_text(
            f"import sys\nsys.path[0] = {str(REPO)!r}\nimport train_grpo\n"
            f"cfg = train_grpo.load([])[0]\n{changes}\ntrain_grpo.main(cfg)\n"
        )
    return start_script(script, cwd=repo, env=env)


def finish(process: Popen[bytes], out: Path) -> Result:
    """Waits for the end of a process that `start` has started with the folder `out`."""
    lines, errors = (text.decode() for text in process.communicate(timeout=600))
    return result_of(out, process.returncode, lines, errors)


def result_of(out: Path, code: int, lines: str, errors: str) -> Result:
    """What a run has left in its folder, with its exit code and what it has printed."""

    def read(name: str) -> list:
        file = out / name
        return [json.loads(line) for line in file.open()] if file.exists() else []

    return Result(code, lines, errors, read("metrics.jsonl"), read("completions.jsonl"), out)


def copy_at_call(
    patch: Any, script: Any, name: str, number: int, out: Path, step: int, to: Path
) -> None:
    """Copies the folder of a run when a function of the script is called for the `number`th time
    and the checkpoint of this step is complete: what is left if the run is killed then.

    patch: a MonkeyPatch.
    """
    function, calls = getattr(script, name), []

    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            end = time.monotonic() + 60
            while latest_checkpoint(out) < step:
                assert time.monotonic() < end, f"no checkpoint of step {step}"
                time.sleep(0.01)
            shutil.copytree(out, to)
        return function(*arguments, **named)

    patch.setattr(script, name, called)


def in_this_process(out: Path, run: Callable[[Any], None]) -> Result:
    """What a function leaves and prints that runs a script in this process and on one of its
    devices, without locks, which the process would keep, and without signals. What an earlier run
    has compiled is not compiled again.

    run: is called with a MonkeyPatch, which is undone after it.
    """
    import jax
    import pytest

    from infra import hosts, resume

    lines, errors, code, device = io.StringIO(), io.StringIO(), 0, jax.devices()[:1]

    def end_process(code: int, line: str = "") -> None:
        print(line, end="\n" if line else "", file=sys.stderr)
        raise SystemExit(code)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(lines),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(hosts, "end_process", end_process)
        for owner, name in (
            (hosts, "start_jax"),
            (hosts.StopSignal, "watch"),
            (resume, "lock_folder"),
        ):
            patch.setattr(owner, name, lambda *arguments: None)
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *arguments: device)
            patch.setattr(jax, name.replace("devices", "device_count"), lambda *arguments: 1)
        try:
            run(patch)
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # Python prints it
                print(code, file=sys.stderr)
                code = 1
    return result_of(out, code, lines.getvalue(), errors.getvalue())


def run_here(out: Path, script: Any, env: dict[str, str]) -> Result:
    """Runs the main function of a script, such as train_grpo, as `in_this_process` says."""
    import config

    env = {"DATASET": str(few_examples(32, 32))} | env | {"OUTPUT_DIR": str(out)}
    customize = getattr(script, "customize_settings", None)

    def run(patch: Any) -> None:
        patch.chdir(REPO)
        patch.setenv("RECORD_TO", env.pop("RECORD_TO", ""))
        for name in env.pop("SWITCHED_OFF", "").split():
            patch.setattr(config.Config, name, lambda cfg: False)
        cfg, _, notes = config.load([], env, customize=customize)
        print(*notes, sep="\n")
        script.main(cfg)

    return in_this_process(out, run)


def train(out: Path, devices: int = 1, changes: str = "", here: bool = True, **env: str) -> Result:
    """A run as `start` starts it. One of one device and of settings takes place in this process.

    here: False: in a process of its own, whose numbers are those of other processes to the bit.
    """
    names = names_of_settings() - {"ROLLOUT_BACKEND"} | {"SWITCHED_OFF", "SCRIPT"}
    if not here or devices > 1 or changes or not env.keys() <= names:
        result = finish(start(out, env, devices, changes=changes), out)
    else:
        out.mkdir(parents=True, exist_ok=True)
        env = with_defaults(out, env)
        script = importlib.import_module(env.pop("SCRIPT", "train_grpo.py").removesuffix(".py"))
        result = run_here(out, script, env)
    assert result.code == 0, result.errors
    return result


def start_two(
    outs: list[Path],
    devices: int,
    *each: dict[str, str],
    repos: tuple[Path, Path] = (REPO, REPO),
    changes: str = "",
    **env: str,
) -> list[Popen[bytes]]:
    """Starts two processes of one run on this machine.

    each: more settings for each process. repos: the folder of the code of each process. changes: as
    in `start`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    both["OUTPUT_DIR"] = str(outs[0])
    each = [{"JAX_PROCESS_ID": str(i)} | more for i, more in enumerate(each or ({}, {}))]
    return [
        start(out, env | both | more, devices, repo, changes)
        for out, more, repo in zip(outs, each, repos, strict=True)
    ]


def copy_repository(to: Path) -> Path:
    """Copies the code, the recipes and the tiny model; returns the folder of the copy."""
    to.mkdir()
    for file in REPO.glob("*.py"):
        shutil.copy(file, to)
    for folder in ("model", "infra", "extras", "tools", "recipes", "tiny"):
        shutil.copytree(REPO / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def train_two(out: Path, devices: int, changes: str = "", **env: str) -> list[Result]:
    outs = [out / str(i) for i in range(2)]
    running = start_two(outs, devices, changes=changes, **env)
    results = [finish(process, o) for process, o in zip(running, outs, strict=True)]
    for result in results:
        assert result.code == 0, result.errors
    return results


def names_of_settings() -> set[str]:
    """The variables of a shell that are settings, but for the cache of compiled programs."""
    from config import Config  # faults/random_faults.py does not have its folder

    names = {field.name.upper() for field in dataclasses.fields(Config)}
    return names - {"JAX_COMPILATION_CACHE_DIR"}


def run_as_user(out: Path, *flags: str, **env: str) -> Result:
    """A run of train_grpo.py, or SCRIPT, with these settings and no others, also not those of this
    shell, but for the cache of compiled programs."""
    of_tests = {"XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    shell = {k: v for k, v in os.environ.items() if k not in names_of_settings() | of_tests}
    env = {"JAX_PLATFORMS": "cpu", "OUTPUT_DIR": str(out)} | FASTER_TO_COMPILE | env
    script = REPO / env.pop("SCRIPT", "train_grpo.py")
    return finish(start_script(script, *flags, cwd=out.parent, env=shell | env), out)


def run_as_user_here(out: Path, *flags: str, **env: str) -> Result:
    """As `run_as_user`, and as `in_this_process` says: the script runs from its first line on."""

    def run(patch: Any) -> None:
        for name in names_of_settings() & os.environ.keys():
            patch.delenv(name)
        script = str(REPO / env.pop("SCRIPT", "train_grpo.py"))
        for name, value in ({"OUTPUT_DIR": str(out)} | env).items():
            patch.setenv(name, value)
        patch.chdir(out.parent)
        patch.setattr(sys, "argv", [script, *flags])
        patch.setattr(signal, "signal", lambda *arguments: None)
        runpy.run_path(script, run_name="__main__")

    return in_this_process(out, run)


def environment(text: str) -> dict[str, str]:
    """Variables of a text such as "STEPS=6 SEED=1"."""
    return dict(setting.split("=") for setting in text.split())


def wait_for(process: Popen[bytes], words: str) -> None:
    """Reads the lines of a process up to a line in which the pattern `words` occurs."""
    for line in process.stdout:
        if re.search(words, line.decode()):
            return


# ---- Runs that are compared to the bit ---------------------------------------------------------

STEPS = 6
# With these settings all that a checkpoint holds changes: a step has four updates, and some steps
# need a second round of sampling.
DEMANDING = environment(
    f"""STEPS={STEPS} BATCH_SIZE=4 NUM_PRE_Q=4 TRAIN_MICRO_BATCH_SIZE=8 PPO_EPOCHS=2 BETA=0.05
    NUM_MINI_BATCHES=2 DYNAMIC_SAMPLING=1 DYNAMIC_SAMPLING_MAX_ROUNDS=2
    LEARNING_RATE=3e-4 WEIGHT_DECAY=0.01 EVAL_EVERY_STEPS=3 EVAL_PROMPTS=16 SAVE_EVERY_STEPS=1"""
)
TIMES = ("time/", "throughput/", "memory/", "compile/")  # metrics that depend on the clock


def latest_checkpoint(folder: Path) -> int:
    """The step of the newest complete checkpoint, or -1."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def metric_records(out: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without the values that depend on the clock."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        for line in lines
    ]


def checkpoint_arrays(out: Path, step: int) -> dict[str, np.ndarray]:
    """{path: array} of a run's checkpoint, as orbax reads them without our code."""
    import jax
    import orbax.checkpoint as ocp

    folder, reader = out / "checkpoints" / str(step) / "arrays", ocp.PyTreeCheckpointer()
    saved = reader.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    leaves = jax.tree.leaves_with_path(reader.restore(folder, restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same_run(a: Path, b: Path, steps: int = STEPS) -> None:
    """Arrays of the last checkpoint, metrics, samples and evaluations are equal to the bit."""
    ours, theirs = checkpoint_arrays(a, steps), checkpoint_arrays(b, steps)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("['state']['params']") for name in ours)
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    assert metric_records(a) == metric_records(b)
    for name in ("samples.jsonl", "eval.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


APPLES = "Grace had 22 apples, lost 7 and then found 3. How many apples does Grace have now?"
GREEDY = "<think>22-7=25, 25+3=28</think>\n<answer>28</answer>"  # of the tiny model
