"""--probe of train_grpo.py: what it says of planted causes, what it writes, and what it leaves."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import REPO, Result, environment, few_examples, finish, run_as_user_here, start_two
from transformers import AutoTokenizer

from config import Config
from data import load_examples
from evaluation import answer_questions
from infra.log import Clock
from infra.mistakes import UserMistake
from infra.settings import parse_command_line
from metrics import PHASES
from sampling import Completions
from startup import set_up
from tools import probe

TOKENIZER = AutoTokenizer.from_pretrained(REPO / "tiny")
RIGHT, WRONG = (f"<think>a</think>\n<answer>{x}</answer>" for x in (7, -1))
BOTH = [f"{RIGHT}<|im_end|>", f"{WRONG}<|im_end|>"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


class Speaker:
    """Says texts instead of sampling them: the completion with number i says texts[i % ...]; each
    <|im_end|> at the end of a text is the stop token, and a text without it is cut off."""

    def __init__(self, texts: list[str], T: int) -> None:
        self.texts, self.T = texts, T

    def update_weights(self, params: Any) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...

    def generate(
        self, prompt_ids: Any, prompt_mask: Any, sequence_ids: np.ndarray, *_: Any
    ) -> Completions:
        count, T = len(sequence_ids), self.T
        ids, mask = np.zeros((count, T), np.int32), np.zeros((count, T), np.int32)
        for row, number in enumerate(sequence_ids):
            text = self.texts[number % len(self.texts)]
            tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"][:T]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        logps, lengths = -np.ones((count, T), np.float32), mask.sum(axis=1).astype(np.int32)
        return Completions(sequence_ids, ids, mask, lengths, logps, lengths)


RUN_LINE = (
    r"probe questions=(\d+) samples_per_question=(\d+) signal_frac=([\d.]+) "
    r"signal_frac_se=([\d.]+) accuracy=([\d.]+) accuracy_se=([\d.]+) accuracy_of=reward_correct "
    r"pass_at_8=([\d.]+) pass_at_8_se=([\d.]+) truncated_frac=([\d.]+) tokens_mean=([\d.]+) "
    r"tokens_p95=(\d+) t=[\d.]+s"
)
MINE = """
def none(completions, **_): return [None] * len(completions)
def half(completions, **_): return [0.5] * len(completions)
def never(completions, **_): return [0.0] * len(completions)
def odd_question(completions, question, **_): return [float(len(text) % 2) for text in question]
def graded(completions, completion_ids, **_): return [len(ids) / 64 for ids in completion_ids]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Reward functions, a chat template that never begins the assistant's turn, and the tiny model
    as one whose files and template do not name its stop token."""
    (tmp_path / "mine.py").write_text(MINE)
    sevens = [{"question": f"{i} + {7 - i} = ?", "answer": "7"} for i in range(20)]
    (tmp_path / "sevens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sevens))
    only_users = CHATML.replace(" %}", " if m.role != 'assistant' %}", 1)
    only_users = only_users.replace("END", "<|im_end|>")
    (tmp_path / "only_users.jinja").write_text(only_users)
    shutil.copytree(REPO / "tiny", tmp_path / "endless")
    template = CHATML.replace("END", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}") + START
    tokens = {"eos_token": "<|endoftext|>", "chat_template": template}
    for name, changes in (("config", {"eos_token_id": 0}), ("tokenizer_config", tokens)):
        file = tmp_path / "endless" / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path


def probe_here(monkeypatch, says: list[str], *flags: str, **env: str) -> None:
    """Runs the probe of 16 questions in this process. says: see Speaker; []: the model samples."""
    small = {"DATASET": str(few_examples(32, 32)), "NUM_PRE_Q": "4", "MAX_LENGTH_SAMPLE": "32"}
    cfg = Config.from_env(small | {"EVAL_EVERY_STEPS": "0"} | env)
    if says:
        speaker = Speaker(says, cfg.max_length_sample)
        monkeypatch.setattr(probe, "make_backend", lambda run: speaker)
    monkeypatch.setattr(probe.hosts, "start_jax", lambda *_: None)  # it runs here
    probe.probe_command(cfg, parse_command_line(["--probe", "16", *flags]))


TAGS = {"ANSWER_TAGS": "reasoning,answer"}
PLANTED = [
    ("no_generation_prompt", [], {"CHAT_TEMPLATE": "{}/only_users.jinja"}),
    ("no_accuracy", [], {"REWARD_FN": "{}/mine.py:none"}),
    ("never_stops", [], {"MODEL_PATH": "{}/endless", "ROLLOUT_BATCH_SIZE": "64"}),
    ("never_stops", ["<think>1+1=2" + " 1+1" * 30], {}),
    ("never_stops", ["<answer>1</answer><|im_start|>user\nAnd 1+2, if 3 of them were lost?"], {}),
    ("thinks_too_long", [], {"MAX_LENGTH_SAMPLE": "10"}),
    ("thinks_too_long", ["<reasoning>1+2=3, 4+5=9, 6+7=13, 8-3=5, 9-6=3, 2+9=11"], TAGS),
    ("all_truncated", ["The apples are 5 and the pens are 7, so that we get 12, but some are"], {}),
    ("constant_reward", [], {"REWARD_FN": "{}/mine.py:half"}),
    ("constant_reward", [], {"REWARD_FN": "{}/mine.py:never"}),
    ("constant_reward", [], {"REWARD_FN": "reward_correct,{}/mine.py:half"}),
    ("format_never", ["It is 26<|im_end|>", "It is 28<|im_end|>", "It is 33<|im_end|>"], {}),
    ("format_never", ["It is 26<|im_end|>", "It is 28<|im_end|>", "It is 33<|im_end|>"], TAGS),
    ("too_hard", [f"{WRONG}<|im_end|>", "It is -1<|im_end|>"], {}),
    ("too_easy", [f"{RIGHT}<|im_end|>"], {"DATASET": "{}/sevens.jsonl"}),
    ("no_signal", [], {"REWARD_FN": "{}/mine.py:odd_question"}),
]


@pytest.mark.parametrize(("cause", "says", "env"), PLANTED)
def test_the_probe_names_a_planted_cause_first_with_a_remedy_and_an_example(
    folder: Path, monkeypatch, capsys, cause: str, says: list[str], env: dict[str, str]
) -> None:
    env = {name: value.format(folder) for name, value in env.items()}
    probe_here(monkeypatch, says, **env)
    lines = capsys.readouterr().out.splitlines()
    named = [i for i, line in enumerate(lines) if line.startswith("cause: ")]
    assert lines[named[0]].startswith(f"cause: {cause}: ") and len(named) <= 3
    assert re.search(r"\b(Set|set|Raise|Check|take|may be) \w+", lines[named[0]])
    assert lines[named[0] + 1].startswith("sample step=0 question: ")
    assert re.match(r"  reward=.* ended=(stop token|MAX_LENGTH_SAMPLE)$", lines[named[0] + 2])
    if cause in ("never_stops", "thinks_too_long", "all_truncated"):
        assert lines[named[0] + 2].endswith("ended=MAX_LENGTH_SAMPLE")
    if cause == "constant_reward":
        name = env["REWARD_FN"].rpartition(":")[2]
        assert f": {name} gives {'0.5' if name == 'half' else '0'} to every " in lines[named[0]]


def test_a_template_that_begins_no_answer_is_refused_before_sampling(tmp_path, monkeypatch) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML.replace("END", "<|im_end|>"))
    with pytest.raises(UserMistake, match="'<|im_start|>assistant' before an answer, but not"):
        probe_here(monkeypatch, [], CHAT_TEMPLATE=f"{tmp_path}/chat.jinja")


NO_CAUSE = [  # what the model says, the reward, the number of questions, and the last line
    ([f"{WRONG}<|im_end|>"], "reward_correct", "9", "none yet: it needs 10 questions"),
    # A penalty that is never due, and a form that all have.
    (BOTH, "reward_correct,{}/mine.py:never", "16", "none: no sign of trouble"),
    # A graded reward never counts as right.
    (
        [f"{RIGHT} 1<|im_end|>", "1 and 1 and 1<|im_end|>"],
        "{}/mine.py:graded",
        "16",
        "none: no sign of trouble",
    ),
]


@pytest.mark.parametrize(("says", "reward", "count", "line"), NO_CAUSE)
def test_a_reward_from_which_the_policy_learns_is_no_cause_and_few_questions_tell_none(
    folder: Path, monkeypatch, capsys, says: list[str], reward: str, count: str, line: str
) -> None:
    data = {"DATASET": str(folder / "sevens.jsonl"), "REWARD_FN": reward.format(folder)}
    probe_here(monkeypatch, says, "--probe", count, **data)
    assert capsys.readouterr().out.splitlines()[-1] == f"cause: {line}"


# ---- What it measures and leaves ----------------------------------------------------------------


def dataset() -> str:
    return str(few_examples(300, 8))


def settings_of(**more: str) -> dict[str, str]:
    few = {"DATASET": dataset(), "MAX_LENGTH_SAMPLE": "32"}
    few |= environment("STEPS=1 EVAL_EVERY_STEPS=1 EVAL_PROMPTS=8 ROLLOUT_GLOBAL_BATCH_SIZE=8")
    return few | {"MODEL_PATH": str(REPO / "tiny")} | more


def entries_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rates.jsonl").open(encoding="utf-8")]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A probe before the run in the same OUTPUT_DIR; `out` is the folder of --out."""
    out = tmp_path_factory.mktemp("probe") / "rates"
    flags = "--probe", "24", "--time", "--out", str(out)
    done = run_as_user_here(out.parent / "run", *flags, **settings_of())
    assert (done.code, done.errors) == (0, ""), done.errors
    assert [*out.parent.iterdir()] == [out], "it leaves the folder of the run to the run"
    return done._replace(out=out)


def test_a_probe_says_what_its_rates_say_and_finds_no_cause_in_the_demo(probed: Result) -> None:
    entries = entries_in(probed.out)
    rewards = [[x["rewards"]["reward_correct"] for x in e["completions"]] for e in entries]
    totals = [[x["reward"] for x in e["completions"]] for e in entries]
    assert [e["rate"] for e in entries] == [sum(x) / 8 for x in rewards]
    assert [e["signal"] for e in entries] == [len(set(x)) > 1 for x in totals]
    rates, signal = np.array([e["rate"] for e in entries]), [e["signal"] for e in entries]
    passed = [max(x) for x in rewards]
    tokens = [x["tokens"] for e in entries for x in e["completions"]]

    def mean_and_error(values: Any) -> list[float]:
        return [np.mean(values), np.std(values, ddof=1) / 24**0.5]

    line = re.search(RUN_LINE, probed.lines)
    expected = [24, 8, *mean_and_error(signal), *mean_and_error(rates), *mean_and_error(passed)]
    expected += [0, np.mean(tokens), np.percentile(tokens, 95)]
    assert [*map(float, line.groups())] == pytest.approx(expected, abs=0.06)
    assert [*map(float, line.groups()[2:8])] == pytest.approx(expected[2:8], abs=6e-5)
    spread = f"mean={rates.mean():.4f} std={np.std(rewards):.4f} min=0 max=1 scored_frac=1.0000"
    assert f"probe reward=reward_correct weight=1 {spread}\n" in probed.lines
    assert "\ncause: none: no sign of trouble\n" in probed.lines
    assert re.search(r"^probe step_s=\d+\.\d{3} steps=1 hours=0\.\d{3} without", probed.lines, re.M)


def test_the_useful_questions_are_a_dataset_and_the_printed_command_trains_on_it(
    probed: Result, tmp_path: Path
) -> None:
    entries = entries_in(probed.out)
    rows = load_examples(str(probed.out), "", "train")
    all_rows = {row["question"]: row for row in load_examples(dataset(), "", "train")}
    assert rows == [
        all_rows[e["question"]] | {"rate": e["rate"]} for e in entries if 0 < e["rate"] < 1
    ]
    assert 0 < len(rows) < 24
    assert load_examples(str(probed.out), "", "test") == load_examples(dataset(), "", "test")
    text = f"{probed.out} has {len(rows)} of 24 questions; with the settings of this probe, "
    [command] = re.findall(f"^{re.escape(text)}(.*) trains on them$", probed.lines, re.M)
    assert command == f"DATASET={probed.out} python train_grpo.py"
    done = run_as_user_here(tmp_path / "run", **settings_of(DATASET=str(probed.out)))
    assert done.code == 0 and f" train={len(rows)} test=8 " in done.lines, done.errors


def test_a_probe_that_was_killed_goes_on_with_the_same_rates_in_other_passes(
    probed: Result, tmp_path: Path
) -> None:
    """It was killed while it wrote the second round."""
    shutil.copytree(probed.out, tmp_path / "rates")
    lines = (probed.out / "rates.jsonl").read_text(encoding="utf-8").splitlines(True)
    (tmp_path / "rates" / "rates.jsonl").write_text("".join(lines[:9]) + lines[9][:50])
    flags = "--probe", "24", "--out", str(tmp_path / "rates")
    done = run_as_user_here(tmp_path / "run", *flags, **settings_of(BATCH_SIZE="2"))
    assert done.code == 0, done.errors
    for name in ("rates.jsonl", "train.jsonl", "test.jsonl"):
        assert (tmp_path / "rates" / name).read_bytes() == (probed.out / name).read_bytes()


@pytest.mark.slow
def test_two_processes_measure_the_same_rates(probed: Result, tmp_path: Path) -> None:
    """With more questions it goes on after those of the first probe."""
    shutil.copytree(probed.out, tmp_path / "more")
    rates = [tmp_path / "more", tmp_path / "two"]
    flags = "--probe", "30", "--out"
    assert run_as_user_here(tmp_path / "a", *flags, str(rates[0]), **settings_of()).code == 0
    changes = f"""
import sys
from infra.settings import parse_command_line
from tools.probe import probe_command
flags = parse_command_line([*{flags!r}, {str(rates[1])!r}])
train_grpo.main = lambda cfg: probe_command(cfg, flags)
"""
    outs = [tmp_path / "0", tmp_path / "1"]
    env = settings_of() | {"REWARD_FN": "", "REWARD_WEIGHTS": ""}
    running = start_two(outs, 1, changes=changes, **env)
    for process, out in zip(running, outs, strict=True):
        done = finish(process, out)
        assert done.code == 0, done.errors
    assert len(entries_in(rates[0])) == 30
    assert (rates[1] / "rates.jsonl").read_bytes() == (rates[0] / "rates.jsonl").read_bytes()


def test_episodes_of_a_probe_are_those_of_no_other_round(tmp_path: Path) -> None:
    games = {"ENVIRONMENT_CLASS": f"{REPO}/tests/games.py:Dice", "SYSTEM_PROMPT": "Add."}
    env = {"DATASET": dataset(), "NUM_PRE_Q": "2", "BATCH_SIZE": "8", "EVAL_SAMPLES": "2"}
    run = set_up(Config.from_env(env | games))
    speaker, clock = Speaker(["5<|im_end|>"], 1024), Clock(PHASES)
    batches = [probe.sample_round(run, speaker, range(8), number) for number in (0, 1, 0)]
    questions = run.train_prompts[:8]
    batches.append(answer_questions(run, speaker, questions, jax.random.key(0), clock))
    first, second, again, evaluated = ([p.ids for p in batch.prompts] for batch in batches)
    assert first == again and len({*map(str, (first, second, evaluated))}) == 3


def test_a_question_of_messages_stays_one_and_a_graded_reward_keeps_groups_that_differ(
    folder: Path, monkeypatch, capsys
) -> None:
    system, user = {"role": "system", "content": "Add."}, {"role": "user"}
    chats = [[system, user | {"content": f"{i}+1"}] for i in range(18)]
    rows = [{"question": chat, "answer": "1", "level": 3} for chat in chats]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = ["1<|im_end|>"] * 5 + ["1 1<|im_end|>"] * 11  # the second of 4 groups of a round differs
    env = {"DATASET": str(folder / "chats.jsonl"), "REWARD_FN": f"{folder}/mine.py:graded"}
    env |= {"ROLLOUT_BATCH_SIZE": "16", "EVAL_EVERY_STEPS": "1"}
    probe_here(monkeypatch, says, "--out", str(folder / "rates"), **env)
    kept = load_examples(str(folder / "rates"), "", "train")
    given = load_examples(str(folder / "chats.jsonl"), "", "train")
    assert len(kept) == 4 and {row.pop("rate") for row in kept} == {3.5 / 64}
    assert all(row in given for row in kept) and kept[0]["prompts"][0]["content"] == "Add."
    assert load_examples(str(folder / "rates"), "", "test") == load_examples(
        str(folder / "chats.jsonl"), "", "test"
    )


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("mine.jsonl", "{}", "has mine.jsonl, but no probe.json; name a new folder"),
        ("probe.json", '{"made_with": {}}\n', "was made with other settings or files: .*set it b"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch, file: str, text: str, words: str
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UserMistake, match=words):
        probe_here(monkeypatch, ["1<|im_end|>"], "--out", str(tmp_path))
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [(file, text)]


def test_a_probe_after_steps_has_the_settings_and_the_weights_of_the_run(
    probed: Result, tmp_path: Path
) -> None:
    """The run is in the OUTPUT_DIR of an earlier probe."""
    run, flags = probed.out.parent / "run", ("--probe", "12", "--out", str(tmp_path / "rates"))
    assert run_as_user_here(run, **settings_of()).code == 0
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    done = run_as_user_here(run, *flags)
    assert done.code == 0 and f"weights={run}/checkpoints/1\n" in done.lines, done.errors
    assert f" MAX_LENGTH_SAMPLE=32 ({run}/config.yaml) " in done.lines
    command = f"DATASET={tmp_path}/rates OUTPUT_DIR={tmp_path}/rates/run RESUME={run}/checkpoints "
    assert f", {command}python train_grpo.py --config {run}/config.yaml trains on" in done.lines
    assert {x: x.stat().st_mtime_ns for x in run.rglob("*") if x.is_file()} == before
    changed = run_as_user_here(run, *flags, SEED="1")
    assert changed.code == 2 and "SEED was 0 and is 1; set it back, or name" in changed.errors


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_printed_command_does_not_write_where_the_run_with_these_settings_writes(
    folder: Path, monkeypatch, capsys, has_begun: bool
) -> None:
    """It may be alive, and have no checkpoint yet."""
    env = {"DATASET": str(folder / "sevens.jsonl"), "OUTPUT_DIR": f"{folder}/x"}
    env |= {"CHECKPOINT_DIR": f"{folder}/c", "EXPORT_HF": f"{folder}/e"}
    if has_begun:
        (folder / "x").mkdir()
        (folder / "x" / "config.yaml").touch()
    flags = "--out", f"{folder}/rates"
    probe_here(monkeypatch, BOTH, *flags, **env)
    elsewhere = f"OUTPUT_DIR={folder}/rates/run CHECKPOINT_DIR= EXPORT_HF= " * has_begun
    command = f"DATASET={folder}/rates {elsewhere}python train_grpo.py trains"
    assert f"with the settings of this probe, {command}" in capsys.readouterr().out
