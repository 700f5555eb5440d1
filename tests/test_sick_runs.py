"""The verdicts on real runs: ten that are sick, one for each rule, and four that are healthy.

All runs train the tiny model. A sick run is made so by its settings, data or rewards alone, but for
sampler_drift: no setting makes the sampler differ from the trainer.
"""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from test_train import REPO, Result, finish, start

COMMON = """
    ROLLOUT_GLOBAL_BATCH_SIZE=4 TRAIN_MICRO_BATCH_SIZE=32 SAVE_EVERY_STEPS=0 EXPORT_HF=none
    REWARD_FN= REWARD_WEIGHTS= DATASET={repo}/tiny
"""
STEADY = "LR_SCHEDULE=constant WARMUP_RATIO=0"
SICK_RUNS = {  # {out} is a folder with the files below
    "sampler_drift": "STEPS=12",
    "all_truncated": "STEPS=10 MAX_LENGTH_SAMPLE=8",
    "entropy_collapsed": (
        "STEPS=30 LEARNING_RATE=1e-3 REWARD_FN=reward_correct,{out}/mine.py:short "
        "REWARD_WEIGHTS=0,1"
    ),
    "no_signal": "STEPS=10 REWARD_FN={out}/mine.py:constant",
    "reward_hacked": (
        "STEPS=20 LEARNING_RATE=3e-4 EVAL_EVERY_STEPS=20 EVAL_PROMPTS=50 "
        "REWARD_FN=reward_correct,{out}/mine.py:nines REWARD_WEIGHTS=0,1"
    ),
    "format_only": (
        "STEPS=40 LEARNING_RATE=2e-4 TEMPERATURE=1.3 DATASET={out}/hard "
        "CHAT_TEMPLATE={out}/template.jinja"
    ),
    "held_out_below_train": (
        "STEPS=40 LEARNING_RATE=3e-4 EVAL_EVERY_STEPS=40 EVAL_PROMPTS=100 DATASET={out}/few"
    ),
    "never_clipped": "STEPS=10 LEARNING_RATE=1e-9 NUM_MINI_BATCHES=2 TRAIN_MICRO_BATCH_SIZE=16",
    "no_learning": "STEPS=50 LEARNING_RATE=1e-9 NUM_PRE_Q=4 TRAIN_MICRO_BATCH_SIZE=16",
}
HEALTHY_RUNS = {
    "seed 0": "SEED=0 ROLLOUT_GLOBAL_BATCH_SIZE=8",
    "seed 1": "SEED=1 ROLLOUT_GLOBAL_BATCH_SIZE=8",
    "dr_grpo": "LOSS_TYPE=dr_grpo SCALE_REWARDS=none",
    "gspo": (
        "LOSS_TYPE=gspo EPS_LOW=3e-4 EPS_HIGH=4e-4 NUM_MINI_BATCHES=4 TRAIN_MICRO_BATCH_SIZE=8"
    ),
}
HEALTHY_SETTINGS = "STEPS=50 EVAL_EVERY_STEPS=25 EVAL_PROMPTS=50"
REWARDS = """
def constant(completions, **columns):
    return [1.0] * len(completions)

def short(completions, **columns):
    return [-len(text) / 100 for text in completions]

def nines(completions, **columns):
    return [text.partition("<answer>")[2].count("9") / 3 for text in completions]
"""
# The tiny model does not know this form, in which it often leaves out <think>.
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}assistant\n"
# The sampler keeps the weights of the first step, as if those of later steps did not reach it.
STALE = f"""
import runpy, sys
import jax, jax.numpy as jnp
sys.path.insert(0, {str(REPO)!r})
from rollout import NaiveBackend
copy_weights, kept = NaiveBackend.update_weights, []
def update_weights(self, params):
    if not kept:
        copy_weights(self, params)
        kept.append(jax.tree.map(jnp.copy, self._weights))
    self._weights = kept[0]
NaiveBackend.update_weights = update_weights
runpy.run_path({str(REPO / "train_grpo.py")!r}, run_name="__main__")
"""


def write_inputs(out: Path) -> None:
    """Writes the reward functions, the chat template, the data and the stale sampler."""
    (out / "mine.py").write_text(REWARDS)
    (out / "template.jinja").write_text(TEMPLATE)
    (out / "stale").mkdir()
    (out / "stale" / "train_grpo.py").write_text(STALE)
    draw, lines = random.Random(0), []
    for _ in range(200):
        a, b, c = draw.randint(100, 999), draw.randint(100, 999), draw.randint(10, 99)
        question = f"A factory with {a} machines makes {b} screws per machine and hour. "
        question += f"How many screws does it make in {c} hours?"
        lines.append(json.dumps({"question": question, "answer": f"#### {a * b * c}"}) + "\n")
    tiny = {x: (REPO / "tiny" / f"{x}.jsonl").read_text() for x in ("train", "test")}
    eight = "".join(tiny["train"].splitlines(keepends=True)[:8])
    for name, train, test in (("few", eight, tiny["test"]), ("hard", "".join(lines), lines[0])):
        (out / name).mkdir()
        (out / name / "train.jsonl").write_text(train)
        (out / name / "test.jsonl").write_text(test)


def run_once(out: Path, name: str, text: str) -> Result:
    """A run with these settings in the folder `name`."""
    settings = dict(pair.split("=", 1) for pair in text.format(out=out, repo=REPO).split())
    repo = out / "stale" if name == "sampler_drift" else REPO
    return finish(start(out / name, settings, 1, repo), out / name)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Future[Result]]]]:
    """The folder of the runs, and the runs of the tests that were asked for, two at a time."""
    out = tmp_path_factory.mktemp("runs")
    write_inputs(out)
    texts = {name: f"{COMMON} {STEADY} {text}" for name, text in SICK_RUNS.items()}
    texts |= {name: f"{COMMON} {HEALTHY_SETTINGS} {x}" for name, x in HEALTHY_RUNS.items()}
    tests = [item for item in request.session.items if item.get_closest_marker("slow")]
    asked = [item.callspec.params.get("run_name") for item in tests if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield out, {x: pool.submit(run_once, out, x, texts[x]) for x in asked if x in texts}


def told(folder: Path, result: Result) -> list[str]:
    """The lines of the verdict, which stand right before DONE and in summary.json."""
    assert result.code == 0, result.errors
    lines = result.lines.splitlines()
    done = next(i for i, line in enumerate(lines) if line.startswith("DONE: "))
    found = [line for line in lines if line.startswith("verdict: ")]
    assert found and lines[done - len(found) : done] == found
    assert json.loads((folder / "summary.json").read_text())["verdict"] == found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run_name", SICK_RUNS)
def test_a_sick_run_is_named_rightly(
    runs: tuple[Path, dict[str, Future[Result]]], run_name: str
) -> None:
    lines = told(runs[0] / run_name, runs[1][run_name].result())
    assert run_name in [line.split(": ")[1] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("run_name", HEALTHY_RUNS)
def test_a_healthy_run_raises_no_alarm(
    runs: tuple[Path, dict[str, Future[Result]]], run_name: str
) -> None:
    result = runs[1][run_name].result()
    (line,) = told(runs[0] / run_name, result)
    assert line.startswith("verdict: no sign of trouble in 50 steps: accuracy 0.44")
    notes = re.findall(r"^note .*", result.lines, re.M)
    assert not [note for note in notes if "all advantages that count are 0" not in note]


@pytest.mark.slow
def test_a_run_that_ends_after_three_bad_steps_has_its_verdict_in_its_summary(
    tmp_path: Path,
) -> None:
    text = f"{COMMON} {STEADY} STEPS=20 LEARNING_RATE=1e38"
    assert run_once(tmp_path, "run", text).code == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["state"] == "failed"
    assert summary["verdict"][0].startswith("verdict: non_finite_steps: An update was not finite")
