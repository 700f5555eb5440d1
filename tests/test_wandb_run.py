"""Claims about runtime/wandb_run.py: a run that is killed and resumed is one run in W&B.

Most tests put a stand-in into the place of the package wandb, which notes what it gets. Those of
`pytest -m parity` read back the files of the real package.
"""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train import finish, start
from wandb_service import WandbService

from runtime import wandb_run
from runtime.mistakes import UserMistake
from runtime.processes import commit_of
from runtime.run_log import RunLog
from test_smoke import REPO

STEP_S = "time/train/step_s"
NAMES = ["first", "second"]
GROUP = {
    "question": "1+1?",
    "prompt": "<user>1+1?",
    "answer": "#### 2",
    "completions": [
        {
            "text": text,
            "reward": reward,
            "rewards": dict(zip(NAMES, (reward, None), strict=True)),
            "advantage": reward - 0.5,
            "tokens": tokens,
            "ended": ended,
        }
        for text, reward, tokens, ended in (
            ("2", 1.0, 2, "stop token"),
            ("3 é", 0.0, 16, "MAX_LENGTH_SAMPLE"),
        )
    ],
}


class StandIn:
    """The package wandb and its run, which knows the steps below starting_step."""

    def __init__(self, folder: Path, starting_step: int = 0, fails_at: float = math.inf) -> None:
        self.dir, self.id, self.starting_step = str(folder / "files"), "abc", starting_step
        self.fails_at, self.refuses_tables = fails_at, False
        self.asked, self.rows, self.summary = {}, [], {}
        self.Settings = self.Table = dict

    def init(self, **asked: Any) -> "StandIn":
        self.asked = asked
        return self

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        if step >= self.fails_at or ("samples" in values and self.refuses_tables):
            raise ConnectionError("service is gone")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.rows.append("end")


Opener = Callable[..., tuple[StandIn, RunLog]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens the log of a run of 5 steps, with a stand-in for W&B."""

    def open_log(first_step: int = 0, mode: str = "online", **facts: Any) -> tuple:
        stand_in = StandIn(tmp_path / "wandb" / "offline-run-2-abc", **facts)
        monkeypatch.setitem(sys.modules, "wandb", stand_in)
        wandb = {"mode": mode} | ({"id": "abc"} if first_step else {})
        log = RunLog(tmp_path, steps=5, first_step=first_step, writes=True, wandb=wandb)
        return stand_in, log

    return open_log


def test_a_row_has_all_records_of_a_step_and_is_sent_when_the_next_step_begins(opened) -> None:
    wandb, log = opened()
    log.record(0, {"eval/accuracy": 0.5})
    log.record(0, {"loss": 1.0})
    assert wandb.rows == []
    log.record(1, {"loss": 2.0})
    assert wandb.rows == [(0, {"eval/accuracy": 0.5, "loss": 1.0})]


EVALUATED = {"eval_full/accuracy": 0.5, "eval_full/accuracy_se": None}  # a value is not finite


@pytest.mark.parametrize(
    "records, finished, last",
    [
        ([EVALUATED], False, 2),  # the step after it is made again
        ([EVALUATED], True, 3),
        ([EVALUATED, {STEP_S: 1.0}], False, 3),
    ],
)
def test_a_step_that_a_resumed_run_makes_again_is_not_sent_before(
    opened, records: list[dict], finished: bool, last: int
) -> None:
    wandb, log = opened()
    log.record(2, {STEP_S: 1.0})
    for record in records:
        log.record(3, record)
    log.close({"accuracy": 0.75}, finished=finished)
    *rows, end = wandb.rows
    assert [step for step, _ in rows] == list(range(2, last + 1)) and end == "end"
    assert wandb.summary == {"accuracy": 0.75, "eval_full/accuracy": 0.5}


def test_the_summary_has_an_evaluation_at_once_and_however_the_run_ends(opened) -> None:
    wandb, log = opened()
    log.record(2, {STEP_S: 1.0})
    log.record(3, EVALUATED)
    assert [step for step, _ in wandb.rows] == [2]
    assert wandb.summary == {"eval_full/accuracy": 0.5}


@pytest.mark.parametrize("known", [0, 2, 4])
def test_a_resumed_run_sends_the_steps_that_wandb_does_not_have(opened, known: int) -> None:
    """It was killed in step 4, after the checkpoint of step 3; W&B has the steps below `known`."""
    _, log = opened()
    for step in range(4):
        log.record(step, {"eval/accuracy": step / 4})
        log.record(step, {STEP_S: float(step)})
        log.samples(step, [GROUP])
    log.record(4, {"eval/accuracy": 1.0})
    del log  # killed
    wandb, log = opened(first_step=3, starting_step=known)
    assert wandb.asked["id"] == "abc" and wandb.asked["resume"] == "allow"
    for step in (3, 4):
        log.record(step, {"eval/accuracy": step / 4})
        log.record(step, {STEP_S: float(step)})
        log.samples(step, [GROUP])
    log.record(5, {"eval/accuracy": 1.25})
    log.close(finished=True)
    *rows, _ = wandb.rows
    assert [step for step, _ in rows] == list(range(known, 6))
    for step, row in rows:
        assert row["eval/accuracy"] == step / 4
        assert (row.get(STEP_S), "samples" in row) == ((step, True) if step < 5 else (None, False))


def test_files_for_wandb_sync_have_all_steps_and_replace_those_of_earlier_starts(
    opened, tmp_path: Path
) -> None:
    names = ("offline-run-1-abc", "offline-run-2-abc", "offline-run-1-other", "run-1-abc")
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
    for step in range(3):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, STEP_S: 1.0}) + "\n")
    wandb, log = opened(first_step=3, mode="offline")
    assert wandb.asked["id"] == "abc" and "resume" not in wandb.asked
    log.close()
    assert [step for step, _ in wandb.rows[:-1]] == [0, 1, 2]
    assert {path.name for path in (tmp_path / "wandb").iterdir()} == {*names[1:]}


def test_samples_are_a_table_with_a_row_for_each_completion(opened, tmp_path: Path) -> None:
    wandb, log = opened()
    log.samples(0, [GROUP, {"completion": "a text in an older form"}])
    log.record(1, {})
    log.close()
    assert wandb.rows[0][1]["samples"] == {
        "columns": ["step", "question", "answer", "completion", "reward", *NAMES]
        + ["advantage", "tokens", "ended"],
        "data": [
            [0, "1+1?", "#### 2", "2", 1.0, 1.0, None, 0.5, 2, "stop token"],
            [0, "1+1?", "#### 2", "3 é", 0.0, 0.0, None, -0.5, 16, "MAX_LENGTH_SAMPLE"],
        ],
    }
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {"step": 0} | GROUP and len(lines) == 2


def test_a_table_that_wandb_refuses_gets_a_line_and_the_row_is_kept(opened, capsys) -> None:
    wandb, log = opened()
    wandb.refuses_tables = True
    log.record(0, {"loss": 1.0})
    log.samples(0, [GROUP])
    log.record(1, {STEP_S: 1.0})
    log.close()
    assert [row.keys() for _, row in wandb.rows[:-1]] == [
        {"loss"},
        {STEP_S, "time/train/step_avg_last10_s"},
    ]
    said = capsys.readouterr().out
    assert said == "W&B: service is gone; it has no samples of step 0\n"


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_run_continues_when_wandb_fails_and_says_so_again_at_its_end(
    opened, tmp_path: Path, capsys: pytest.CaptureFixture[str], first_step: int
) -> None:
    """Also if it fails while a resumed run sends the rows of earlier steps."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 0, "loss": 1}\n')
    _, log = opened(first_step, fails_at=0)
    for step in range(first_step, 3):
        log.record(step, {"a": step})
        log.samples(step, [GROUP])
    log.line("DONE: ")
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "W&B: service is gone; the run goes on without it",
        "DONE: ",
        f"W&B may have no records from step 0 on; {tmp_path}/metrics.jsonl has them all",
    ]


# ---- WANDB_MODE ----------------------------------------------------------------------------------


def test_a_missing_wandb_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb fails now
    for mode in ("", "disabled"):
        wandb_run.check_wandb(mode)
    with pytest.raises(UserMistake, match="WANDB_MODE=offline needs wandb: pip install wandb"):
        wandb_run.check_wandb("offline")


def test_an_api_key_alone_means_online_and_without_the_package_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert wandb_run.chosen_mode("") == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert [wandb_run.chosen_mode(mode) for mode in ("offline", "disabled")] == [
        "offline",
        "disabled",
    ]
    assert capsys.readouterr().out == ""
    assert wandb_run.chosen_mode("") == "disabled"
    assert capsys.readouterr().out == (
        "W&B: there is a WANDB_API_KEY, but the run goes on without W&B: WANDB_MODE=online needs "
        "wandb: pip install wandb\n"
    )


def test_the_commit_is_that_of_the_folder_and_says_if_a_tracked_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()

    assert commit_of(tmp_path) == ""
    git("init")
    assert commit_of(tmp_path) == ""  # no commit yet
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "other.py").write_text("2")  # git does not track this file
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and commit_of(tmp_path) == head
    (tmp_path / "code.py").write_text("3")
    assert commit_of(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) == ""


# ---- The real package ----------------------------------------------------------------------------


def rows_in(file: Path) -> list[dict[str, Any]]:
    """The rows of a .wandb file."""
    return [values_in(record.history.item) for record in records_in(file, "history")]


def summary_in(file: Path) -> dict[str, Any]:
    """What a .wandb file says of the summary, besides the values of all rows."""
    told: dict[str, Any] = {}
    for record in records_in(file, "summary"):
        told |= values_in(record.summary.update)
    return told


def values_in(items: Any) -> dict[str, Any]:
    return {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}


def records_in(file: Path, kind_of_record: str) -> list[Any]:
    """The records of one kind in a .wandb file, which is a log of LevelDB with protobuf in it.

    After 7 bytes there are blocks of 32 KiB. They hold parts of records: 4 bytes of checksum, 2 of
    length, and 1 of kind: 1 is a complete record, 2 its first part, 3 a middle part, 4 its end.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            record, part = Record.FromString(part), b""
            if record.WhichOneof("record_type") == kind_of_record:
                found.append(record)
    return found


@pytest.mark.parity
def test_a_killed_and_resumed_run_has_one_offline_folder_with_each_step_once(
    tmp_path: Path,
) -> None:
    """The second kill also hits the process of W&B which writes its files."""
    pytest.importorskip("wandb", reason="an optional package")
    out = tmp_path / "run"
    env = {"OUTPUT_DIR": str(out), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "STEPS": "7"}
    env |= {
        "BATCH_SIZE": "2",
        "MAX_LENGTH_SAMPLE": "8",
        "SAVE_EVERY_STEPS": "2",
        "HOME": str(tmp_path),
    }
    env |= {"EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "4", "EXPORT_HF": "none"}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"} | env
    command = [sys.executable, str(REPO / "train_grpo.py")]

    def rows() -> list[dict[str, Any]]:
        (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
        return rows_in(file)

    for killed_in in (3, 5):
        process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
        while not process.stdout.readline().startswith(f"step={killed_in} "):
            assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        for number in [process.pid, *map(int, children if killed_in == 5 else ())]:
            os.kill(number, signal.SIGKILL)
        process.communicate()
        time.sleep(0.5)
        steps = [row["_step"] for row in rows()]  # `wandb sync` can upload them now
        assert steps == list(range(len(steps)))
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stderr
    assert [row["_step"] for row in rows()] == list(range(8))
    assert [row["_step"] for row in rows() if STEP_S in row] == list(range(7))
    assert [row["_step"] for row in rows() if "eval/accuracy" in row] == [0, 3, 6, 7]


@pytest.mark.parity
def test_a_run_whose_export_fails_has_its_evaluations_in_the_summary_and_sends_them_once(
    tmp_path: Path,
) -> None:
    """The same command, which evaluates again, sends the step of the last evaluations."""
    pytest.importorskip("wandb", reason="an optional package")
    out, hf = tmp_path / "run", tmp_path / "hf"
    (tmp_path / "fills.py").write_text(
        "import os\n"
        "def fills(completions, **columns):\n"
        f"    os.environ['FILLS'] and open({str(hf)!r}, 'w').close()\n"
        "    return [1.0] * len(completions)\n"
    )
    env = {"REWARD_FN": f"{tmp_path}/fills.py:fills", "REWARD_WEIGHTS": "1", "BATCH_SIZE": "2"}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path), "STEPS": "2"}
    env |= {"EXPORT_HF": str(hf), "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "2"}
    env |= {"EVAL_FULL_SWEEP": "1", "MAX_LENGTH_SAMPLE": "8"}
    published = {
        "eval_full/accuracy",
        "eval_full/accuracy/pass_at_1",
        "time/eval_full/step_s",
        "time/train/step_s",
        "time/train/step_avg_last10_s",
    }

    def told() -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """The rows, the complete summary in W&B, and the last values in summary.json."""
        (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
        rows, summary = rows_in(file), {}
        for row in rows:
            summary |= row
        last = json.loads((out / "summary.json").read_text())["last"]
        return rows, summary | summary_in(file), last

    failed = finish(start(out, env | {"FILLS": "1"}, 1), out)
    assert failed.code == 1 and f"error: EXPORT_HF={hf} cannot be written" in failed.errors
    rows, summary, last = told()
    assert [row["_step"] for row in rows] == [0, 1] and summary["state"] == "failed"
    assert {name: summary[name] for name in published} == {name: last[name] for name in published}
    hf.unlink()
    done = finish(start(out, env | {"FILLS": ""}, 1), out)
    assert done.code == 0 and "resumed after step 2" in done.lines, done.errors
    rows, summary, last = told()
    assert [row["_step"] for row in rows] == [0, 1, 2] and summary["state"] == "done"
    assert {name: summary[name] for name in published} == {name: last[name] for name in published}
    assert rows[2]["eval_full/accuracy"] == summary["eval_full/accuracy"] == 1.0


ONLINE = """
import os, signal, sys, time
from pathlib import Path
from runtime.run_log import RunLog
from test_wandb_run import GROUP, STEP_S

first_step, last_step, known = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
wandb = {"mode": "online", "name": "n", "config": {"steps": 9}} | ({"id": known} if known else {})
log = RunLog(Path("run"), steps=9, first_step=first_step, writes=True, wandb=wandb)
print(log.wandb_id, flush=True)
for step in range(first_step, last_step):
    log.record(step, {"eval/accuracy": step / 8})
    log.record(step, {STEP_S: 1.0})
    log.samples(step, [GROUP])
    time.sleep(0.5)
if last_step < 9:
    os.kill(os.getpid(), signal.SIGKILL)
log.record(9, {"eval/accuracy": 9 / 8})
log.close({"best": 1.0}, finished=True)
"""


@pytest.mark.parity
def test_a_killed_and_resumed_run_is_one_run_of_the_service_with_each_step_once(
    tmp_path: Path,
) -> None:
    """The service has some of the steps that the second start makes again, and lacks others."""
    pytest.importorskip("wandb", reason="an optional package")
    service = WandbService()
    where = {"HOME": str(tmp_path), "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    key = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": "a" * 40}
    env = os.environ | where | key | {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}

    def start(first_step: int, last_step: int, known: str) -> str:
        command = [sys.executable, "-c", ONLINE, str(first_step), str(last_step), known]
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert "W&B: " not in done.stdout and "Traceback" not in done.stderr, done
        return done.stdout.split()[0]

    try:
        name = start(0, 7, "")
        time.sleep(0.5)
        sent = [row["_step"] for row in service.rows[name]]
        assert sent == list(range(len(sent))) and 2 <= len(sent) < 7
        assert start(2, 9, name) == name
    finally:
        service.close()
    rows = service.rows[name]
    assert [row["_step"] for row in rows] == list(range(10))
    assert [row["eval/accuracy"] for row in rows] == [step / 8 for step in range(10)]
    assert [row["_step"] for row in rows if STEP_S in row and "samples" in row] == list(range(9))
    assert len({*service.rows}) == 1
