"""tools/ask.py: it prints a question and what each model answers, and mistakes in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.ask import complete, side_by_side
from tools.make_random import make_random

REPO = Path(__file__).resolve().parent.parent
APPLES = "Grace had 22 apples, lost 7 and then found 3. How many apples does Grace have now?"
BEFORE = "<think>22-7=25, 25+3=28</think>\n<answer>28</answer>"  # with the forgotten borrows


def ask(cache: Path, *args: str, cwd: Path = REPO) -> tuple[int, str, str]:
    keep = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "ask.py"), *args],
        cwd=cwd,
        env=keep | {"COLUMNS": "80", "JAX_COMPILATION_CACHE_DIR": str(cache)},
        text=True,
        capture_output=True,
        timeout=300,
    )
    return done.returncode, done.stdout.partition("\n")[2], done.stderr  # without backend=...


def test_the_readme_shows_what_the_tiny_model_answers_to_a_held_out_question(cache: Path) -> None:
    code, text, errors = ask(cache, "tiny", "--number", "4")
    assert (code, errors) == (0, "")
    answer = "22-7 = <<22-7=15>>15\n15+3 = <<15+3=18>>18\n#### 18"
    assert text == f"{APPLES}\n{answer}\n\ntiny\n{BEFORE}\n"
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    command, shown = readme.partition("python tools/ask.py tiny runs/seed0/hf --number 4\n")[1:]
    lines = [line.partition(" | ")[0].rstrip() for line in shown.splitlines()]
    assert command and "\n".join(lines[: len(text.splitlines())]) == text.rstrip()


def test_several_models_answer_a_question_of_the_user_s_side_by_side(
    cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(REPO / "tiny", tmp_path / "copy")
    models = (str(REPO / "tiny"), "copy")
    code, text, errors = ask(cache, *models, "--question", APPLES, cwd=tmp_path)
    assert code == 0, errors
    question, _, names, *answers = text.splitlines()
    assert question == APPLES and names.split()[-1] == "copy"
    assert [[part.rstrip() for part in line.split(" | ")] for line in answers[-2:]] == [
        [line, line] for line in BEFORE.split("\n")
    ]


def test_the_system_prompt_the_dataset_and_the_limit_are_those_of_the_command(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = json.dumps({"question": APPLES, "answer": "#### 18"})
    (tmp_path / "two.jsonl").write_text(f"{example}\n{example}\n")
    models = (str(REPO / "tiny"), "--dataset", str(tmp_path / "two.jsonl"))
    code, text, _ = ask(cache, *models, "--max-tokens", "8")
    *_, short = text.splitlines()
    assert code == 0 and text.startswith(f"{APPLES}\n#### 18\n") and "</answer>" not in short
    assert short != "" and BEFORE.startswith(short)
    code, other, _ = ask(cache, *models, "--max-tokens", "8", "--system-prompt", "Answer: 3 ")
    assert code == 0 and other.splitlines()[-1] != short
    monkeypatch.setenv("SYSTEM_PROMPT", "Answer: 3 ")  # the setting, as in a run
    assert ask(cache, *models, "--max-tokens", "8")[:2] == (0, other)


@pytest.mark.parametrize(
    "args, words",
    [
        (("./nowhere",), "./nowhere: this folder does not exist"),
        (("docs",), "docs has no config.json; give a Hugging Face folder"),
        (("tiny", "--number", "501"), "--number 501: the dataset has the questions 1 to 500"),
        (("tiny", "--question", "a " * 3000), "tokens; the model has 2048 positions"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    cache: Path, args: tuple[str, ...], words: str
) -> None:
    code, _, errors = ask(cache, *args)
    *_, last = errors.splitlines()  # transformers warns of a long text in a line before
    assert code == 2 and errors.count("error: ") == 1 and "Traceback" not in errors
    assert last.startswith("error: ") and words in last


def test_long_texts_are_wrapped_into_columns() -> None:
    text = "one two three four five six seven eight\n\nnine"
    assert side_by_side({"left": text, "right": "ten"}, 43) == (
        "left                 | right\n"
        "one two three four   | ten\n"
        "five six seven eight |\n"
        "                     |\n"
        "nine                 |"
    )


def test_dtype_is_the_dtype_in_which_the_models_are_computed(tmp_path: Path) -> None:
    """With random weights, rounding leads to another token somewhere among 200 greedy ones."""
    model, sizes = tmp_path / "random", {"hidden_size": 32, "num_hidden_layers": 2}
    make_random(REPO / "tiny", model, sizes | {"tie_word_embeddings": False})
    dtypes = ("auto", "float32", "bfloat16")
    answers = [complete(str(model), APPLES, "s", 200, "", dtype) for dtype in dtypes]
    assert answers[0] == answers[1] != answers[2]
