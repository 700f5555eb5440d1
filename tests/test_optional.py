"""Each optional file can be deleted, and a run loses nothing but the setting that needs it."""

import os
import sys
from pathlib import Path
from subprocess import run
from typing import NamedTuple

import pytest
from runs import FASTER_TO_COMPILE, REPO, copy_repository, few_examples, run_as_user_here

OPTIONAL_FILES = sorted(
    str(file.relative_to(REPO))
    for file in (*REPO.glob("extras/*"), *REPO.glob("tools/*"), REPO / "loss_pallas.py")
    if file.suffix in (".py", ".sh") and file.stem != "__init__"
)
# For each optional file: settings and flags that need it, and how the line about it begins. A
# command that nobody else calls, such as tools/bench.py, has none.
NEEDED_BY = {
    "extras/sglang.py": ({"ROLLOUT_BACKEND": "sglang_jax"}, [], "ROLLOUT_BACKEND=sglang_jax"),
    "extras/turns.py": (
        {"ENVIRONMENT_CLASS": "recipes/guess.py:Guess"},
        [],
        "ENVIRONMENT_CLASS=recipes/guess.py:Guess",
    ),
    "extras/hub.py": ({"PUSH_TO_HUB": "me/model"}, [], "PUSH_TO_HUB=me/model"),
    "extras/scorer.py": (
        {"REWARD_MODEL_PATH": "tiny", "REWARD_FN": "reward_correct,reward_model"},
        [],
        "REWARD_MODEL_PATH=tiny",
    ),
    "extras/teacher.py": ({"TEACHER_PATH": "tiny"}, [], "TEACHER_PATH=tiny"),
    "extras/trackers.py": ({"REPORT_TO": "tensorboard"}, [], "REPORT_TO=tensorboard"),
    "loss_pallas.py": (
        {"POLICY_LOSS_IMPL": "pallas"},
        ["--plan", "v6e-1"],
        "POLICY_LOSS_IMPL=pallas",
    ),
    "tools/ask.py": ({}, ["--ask", "1+2?"], "--ask"),
    "tools/probe.py": ({}, ["--probe", "9"], "--probe"),
    "tools/plan.py": ({}, ["--plan", "v6e-1"], "--plan"),
}
NO_TRACKERS = "\nnote: without extras/trackers.py W&B gets no records\n"
NO_REPORT = "note: without extras/report.py the run has no report and no verdict\n"


class Ended(NamedTuple):
    code: int
    lines: str
    errors: str


def start(repo: Path, out: Path, program: list[str], **env: str) -> Ended:
    """The end of a program that runs in a copy of the project."""
    settings = {"JAX_PLATFORMS": "cpu", "STEPS": "1", "EVAL_EVERY_STEPS": "0"}
    settings |= {"OUTPUT_DIR": str(out), "DATASET": str(few_examples(32, 32))}
    env = os.environ | FASTER_TO_COMPILE | settings | env
    done = run([sys.executable, *program], cwd=repo, env=env, capture_output=True)
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.slow
def test_a_run_needs_no_optional_file(tmp_path: Path) -> None:
    """A key of W&B alone ends no run that lacks the trackers."""
    repo = copy_repository(tmp_path / "repo")
    for file in OPTIONAL_FILES:
        (repo / file).unlink()
    done = start(repo, tmp_path / "run", ["train_grpo.py"], WANDB_API_KEY="a" * 40)
    assert done.code == 0 and "\nDONE: steps=1 " in done.lines, done.errors
    assert NO_TRACKERS in done.lines and NO_REPORT in done.lines
    assert "\nverdict: " not in done.lines
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("file", NEEDED_BY)
def test_what_needs_an_optional_file_names_it_in_a_line(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are there. Without its file Python finds no module."""
    if file == "loss_pallas.py":  # the plan of a TPU needs its compiler, which ARM does not have
        pytest.importorskip("libtpu", reason='libtpu: pip install "jax[tpu]"')
    monkeypatch.setitem(sys.modules, file.removesuffix(".py").replace("/", "."), None)
    env, flags, begins = NEEDED_BY[file]
    data = {"DATASET": str(few_examples(32, 32))}
    ended = run_as_user_here(tmp_path / "run", *flags, **data | env)
    assert ended.code == 2, ended
    assert ended.errors == (
        f"error: {begins} needs {file}, which is not in this folder; restore it, or leave "
        f"{begins.partition('=')[0]} out\n"
    )


# What remains imported at the end of a run.
IMPORTED = """
import runpy, sys
runpy.run_path("train_grpo.py", run_name="__main__")
rooms = ("extras", "tools", "loss_pallas")
print("imported:", *sorted(name for name in sys.modules if name.partition(".")[0] in rooms))
"""


def test_a_plain_run_imports_of_the_optional_files_the_report_alone(tmp_path: Path) -> None:
    done = start(REPO, tmp_path / "run", ["-c", IMPORTED])
    assert done.code == 0, done.errors
    assert done.lines.splitlines()[-1] == "imported: extras extras.report"
    assert {"summary.json", "report.html"} <= {file.name for file in (tmp_path / "run").iterdir()}
    assert "\nverdict: none yet: it needs 10 steps, and the run has 1\n" in done.lines
