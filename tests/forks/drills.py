"""The drills: changes that people often make to this project, as edits of its files.

test_forks.py applies them to copies of the project and trains. `python tests/forks/drills.py`
prints how many files and lines each drill touches.
"""

import difflib
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
TASKS = "docs/tasks.md"
OBJECTIVES = "docs/objectives.md"


class Edit(NamedTuple):
    """A text that a file holds once, and the text that takes its place.

    The old text of a new file is empty; a file of that name, which may be yours, does not matter.
    """

    file: str
    old: str
    new: str


class Drill(NamedTuple):
    """A change that somebody makes."""

    name: str
    edits: tuple[Edit, ...]
    row: str = ""  # the row of README's table "To change X, edit Y" that tells what to edit


def added(text: str, file: str, before: str) -> Edit:
    """The edit that writes more text in front of one that the file holds once."""
    return Edit(file, before, text + before)


def read(file: str, root: Path = REPO) -> str:
    """The text of a file of the project; it is empty if there is no such file."""
    return (root / file).read_text(encoding="utf-8") if (root / file).exists() else ""


BREVITY = '''\
def brevity(completions: list[str], **columns: list) -> Rewards:
    """Takes 0.01 for each character."""
    return [-len(text) / 100 for text in completions]


'''
BUILT_IN_REWARD = Drill(
    "a built-in reward",
    row="reward something else",
    edits=(
        added(BREVITY, "rewards.py", "# The functions that REWARD_FN may name, in addition to"),
        added("BUILT_IN += (brevity,)\n", "rewards.py", "EXTRACT_ANSWER = "),
    ),
)
DR_GRPO = Drill(
    "Dr. GRPO by hand",
    row="change the objective",
    edits=(
        Edit(
            "loss.py",
            """\
        spread = _std(groups, axis=1 if scale_rewards == "group" else None)
        advantages = centered if scale_rewards == "none" else centered / (spread + STD_EPS)
""",
            "        advantages = centered\n",
        ),
        Edit(
            "loss.py",
            '        "token-mean": num_tokens,\n',
            '        "token-mean": num_sequences * 32,\n',
        ),
    ),
)
FACTS, FUNCTION, NAME = (part.split("```")[0] for part in read(OBJECTIVES).split("```python\n")[1:])
OBJECTIVE = Drill(
    "an objective",
    edits=(
        added(FACTS, "objectives.py", '    "sft": '),
        added(f"{FUNCTION}\n\n", "loss.py", "TOKEN_LOSSES: "),
        added(NAME, "loss.py", '    "sft": '),
    ),
)
COUNTDOWN = Drill(
    "another task: countdown",
    edits=(Edit("countdown.py", "", read(TASKS).split("```python\n")[1].split("```")[0]),),
)
INVERSE_SQRT = """\
    if name == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / (step + 1))
"""
SCHEDULE = Drill(
    "a schedule of the learning rate",
    row="add a schedule of the learning rate",
    edits=(
        Edit(
            "config.py",
            'choices="warmup_cosine|linear|constant"',
            'choices="warmup_cosine|linear|constant|inverse_sqrt"',
        ),
        added(INVERSE_SQRT, "optimizer.py", '    if name == "constant":\n'),
    ),
)
SCALE = """\
    reward_scale: float = in_reward(1.0, "Number that multiplies all rewards.", above=0)
"""
SETTING = Drill(
    "a setting",
    row="add a setting",
    edits=(
        added(SCALE, "config.py", "    overlong_cache: int = in_reward("),
        added(
            "                rewards = rewards * cfg.reward_scale\n",
            "train_grpo.py",
            '                clock.lap("reward")\n',
        ),
    ),
)
FROZEN_EMBEDDING = Drill(
    "some of the weights only",
    row="train some of the weights only",
    edits=(
        added(
            "    grads = grads.replace(embed=jnp.zeros_like(grads.embed))\n",
            "optimizer.py",
            "    norm = optax.tree.norm(grads)\n",
        ),
        added(
            "    updates = updates.replace(embed=jnp.zeros_like(updates.embed))\n",
            "optimizer.py",
            "    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)\n",
        ),
    ),
)
MEDIAN = """\
    elif estimator == "median":
        advantages = groups - np.nanmedian(groups, axis=1, keepdims=True)
"""
ESTIMATOR = Drill(
    "an estimator of advantages",
    row="add an estimator of advantages",
    edits=(
        added(
            '    "median": EstimatorFacts(),\n', "objectives.py", '    "rloo": EstimatorFacts(),\n'
        ),
        added(MEDIAN, "loss.py", '    elif estimator == "rloo":\n'),
    ),
)
DRILLS = (BUILT_IN_REWARD, DR_GRPO, OBJECTIVE, ESTIMATOR, COUNTDOWN, SCHEDULE, SETTING)
DRILLS += (FROZEN_EMBEDDING,)


def edited(drill: Drill, root: Path = REPO) -> dict[str, str]:
    """{file: its text after the edits}. Raises AssertionError if an edit no longer fits."""
    texts: dict[str, str] = {}
    for file, old, new in drill.edits:
        text = texts.get(file, read(file, root)) if old else ""
        assert text.count(old) == 1, (
            f"{file} holds {text.count(old)} times what the drill {drill.name!r} replaces; update "
            f"it in tests/forks/drills.py, or delete tests/forks in a fork of yours:\n{old}"
        )
        texts[file] = text.replace(old, new)
    return texts


def new_lines(drill: Drill) -> dict[str, int]:
    """{file: how many of its lines are new or changed}."""
    found = {}
    new_files = {edit.file for edit in drill.edits if not edit.old}
    for file, text in edited(drill).items():
        before = "" if file in new_files else read(file)
        difference = difflib.ndiff(before.splitlines(), text.splitlines())
        found[file] = sum(line.startswith("+ ") for line in difference)
    return found


def make_fork(folder: Path, *drills: Drill) -> Path:
    """Copies the files that git tracks to a new folder and makes the edits there. Returns the
    folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True)
    assert listed.returncode == 0, f"the drills copy the files that git lists: {listed.stderr}"
    for file in listed.stdout.split("\0")[:-1]:
        if (REPO / file).exists():  # git also lists files that are deleted but not yet committed
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / file, folder / file)
    for drill in drills:
        texts = edited(drill, folder)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    return folder


def table() -> list[str]:
    """Lines of Markdown: what each drill touches."""
    lines = ["| to | edit | new or changed lines |", "|---|---|---|"]
    for drill in DRILLS:
        found = new_lines(drill)
        files = ", ".join(f"`{file}`" for file in found)
        lines.append(f"| {drill.name} | {files} | {', '.join(map(str, found.values()))} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
