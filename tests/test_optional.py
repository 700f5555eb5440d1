"""Each optional file can be deleted, and a run loses nothing but the setting that needs it."""

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess, run

import pytest
from runs import (
    FASTER_TO_COMPILE,
    REPO,
    copy_repository,
    environment,
    few_examples,
    run_as_user_here,
)

OPTIONAL_FILES = sorted(
    str(file.relative_to(REPO))
    for file in (*REPO.glob("extras/*"), *REPO.glob("tools/*"), REPO / "loss_pallas.py")
    if file.suffix in (".py", ".sh") and file.stem != "__init__"
)
# For each optional file: settings and flags that need it; the line about it begins with the first.
# A command that nobody else calls, such as tools/bench.py, has none.
NEEDED_BY = {
    "extras/sglang.py": "ROLLOUT_BACKEND=sglang_jax",
    "extras/turns.py": "ENVIRONMENT_CLASS=recipes/guess.py:Guess",
    "extras/hub.py": "PUSH_TO_HUB=me/model",
    "extras/scorer.py": "REWARD_MODEL_PATH=tiny REWARD_FN=reward_correct,reward_model",
    "extras/teacher.py": "TEACHER_PATH=tiny",
    "extras/trackers.py": "REPORT_TO=tensorboard",
    "loss_pallas.py": "POLICY_LOSS_IMPL=pallas --plan v6e-1",
    "tools/ask.py": "--ask 1+2?",
    "tools/probe.py": "--probe 9",
    "tools/plan.py": "--plan v6e-1",
}
NO_TRACKERS = "\nnote: without extras/trackers.py W&B gets no records\n"
NO_REPORT = "note: without extras/report.py the run has no report and no verdict\n"


def run_in(repo: Path, out: Path, program: list[str], **env: str) -> CompletedProcess[str]:
    """Runs a program in a copy of the project."""
    settings = {"JAX_PLATFORMS": "cpu", "STEPS": "1", "EVAL_EVERY_STEPS": "0"}
    settings |= {"OUTPUT_DIR": str(out), "DATASET": str(few_examples(32, 32))}
    env = os.environ | FASTER_TO_COMPILE | settings | env
    return run([sys.executable, *program], cwd=repo, env=env, text=True, capture_output=True)


@pytest.mark.slow
def test_a_run_needs_no_optional_file(tmp_path: Path) -> None:
    """A key of W&B alone ends no run that lacks the trackers."""
    repo = copy_repository(tmp_path / "repo")
    for file in OPTIONAL_FILES:
        (repo / file).unlink()
    done = run_in(repo, tmp_path / "run", ["train_grpo.py"], WANDB_API_KEY="a" * 40)
    assert done.returncode == 0 and "\nDONE: steps=1 " in done.stdout, done.stderr
    assert NO_TRACKERS in done.stdout and NO_REPORT in done.stdout
    assert "\nverdict: " not in done.stdout
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("file", NEEDED_BY)
def test_what_needs_an_optional_file_names_it_in_a_line(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are there. Without its file Python finds no module."""
    if file == "loss_pallas.py":  # the plan of a TPU needs its compiler, which ARM does not have
        pytest.importorskip("libtpu", reason='libtpu: pip install "jax[tpu]"')
    monkeypatch.setitem(sys.modules, file.removesuffix(".py").replace("/", "."), None)
    words = NEEDED_BY[file].split()
    settings = [f"DATASET={few_examples(32, 32)}", *(word for word in words if "=" in word)]
    flags = [word for word in words if "=" not in word]
    done = run_as_user_here(tmp_path / "run", *flags, **environment(" ".join(settings)))
    remedy = f"restore it, or leave {words[0].partition('=')[0]} out"
    line = f"error: {words[0]} needs {file}, which is not in this folder; {remedy}\n"
    assert (done.code, done.errors) == (2, line), done


# What remains imported at the end of a run.
IMPORTED = """
import runpy, sys
runpy.run_path("train_grpo.py", run_name="__main__")
rooms = ("extras", "tools", "loss_pallas")
print("imported:", *sorted(name for name in sys.modules if name.partition(".")[0] in rooms))
"""


def test_a_plain_run_imports_of_the_optional_files_the_report_alone(tmp_path: Path) -> None:
    done = run_in(REPO, tmp_path / "run", ["-c", IMPORTED])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: extras extras.report"
    assert {"summary.json", "report.html"} <= {file.name for file in (tmp_path / "run").iterdir()}
    assert "\nverdict: none yet: it needs 10 steps, and the run has 1\n" in done.stdout
