"""Claims about extras/trackers.py: a run that is killed and resumed is one run in each tracker.

Most tests put a stand-in into the place of the package wandb, which notes what it gets. That of
`pytest -m parity` has the real packages, and a stand-in for W&B's service.
"""

import http.server
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import TIMES, environment, finish, start, wait_for

from config import Config
from extras.trackers import Trackers
from infra.log import RunLog
from infra.mistakes import UserMistake
from startup import open_trackers

STEP_S = "time/train/step_s"


class StandIn:
    """The package wandb and its run, which has the steps below starting_step. fails_at: the first
    step whose row it does not take; -1: it does not even start."""

    def __init__(self, starting_step: int = 0, fails_at: float = math.inf) -> None:
        self.starting_step, self.fails_at = starting_step, fails_at
        self.asked, self.rows, self.summary = {}, {}, {}

    def init(self, **asked: Any) -> "StandIn":
        self.asked = asked
        self.log({}, step=-1, commit=False)
        return self

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        if step >= self.fails_at:
            raise ConnectionError("service\nis gone")
        if commit:
            assert step not in self.rows
            self.rows[step] = values

    def finish(self) -> None:
        self.summary["finished"] = True


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:
    """Opens the log of a run of 5 steps, with a stand-in for W&B."""

    def open_log(lengths: dict[str, int] | None = None, **facts: Any) -> tuple[StandIn, RunLog]:
        stand_in = StandIn(**facts)
        monkeypatch.setitem(sys.modules, "wandb", stand_in)
        log = RunLog(tmp_path, steps=5, lengths=lengths, writes=True)
        log.trackers = Trackers("wandb", tmp_path, {"mode": "online", "id": "abc"}, log.print_line)
        return stand_in, log

    return open_log


@pytest.mark.parametrize(
    "record, finished, sent",
    [
        ({"eval/accuracy": 0.5}, False, [2]),  # a resumed run makes step 3 again
        ({"eval/accuracy": 0.5}, True, [2, 3]),
        ({STEP_S: 1.0}, False, [2, 3]),
    ],
)
def test_a_row_has_all_records_of_a_step_and_is_sent_when_no_run_can_make_the_step_again(
    opened, record: dict, finished: bool, sent: list[int]
) -> None:
    wandb, log = opened()
    log.record_metrics(2, {"eval/accuracy": 0.5})
    assert wandb.rows == {}
    log.record_metrics(2, {"loss": 1.0, STEP_S: 2.0})
    mean = {"time/train/step_avg_last10_s": 2.0}
    assert wandb.rows == {2: {"eval/accuracy": 0.5, "loss": 1.0, STEP_S: 2.0} | mean}
    log.record_metrics(3, record)
    log.close({"state": "done"}, finished=finished)
    assert [*wandb.rows] == sent and wandb.summary == {"state": "done", "finished": True}


@pytest.mark.parametrize("known", [0, 2, 4])
def test_a_resumed_run_sends_the_steps_that_wandb_does_not_have(opened, known: int) -> None:
    """It was killed in step 4, after the checkpoint of step 3; W&B has the steps below `known`."""

    def take_step(log: RunLog, step: int) -> None:
        log.record_metrics(step, {"eval/accuracy": step / 4})
        log.record_metrics(step, {STEP_S: float(step)})

    _, log = opened()
    for step in range(3):
        take_step(log, step)
    lengths = log.file_lengths()
    take_step(log, 3)
    log.record_metrics(4, {"eval/accuracy": 1.0})
    wandb, log = opened(lengths, starting_step=known)
    assert wandb.asked["id"] == "abc" and wandb.asked["resume"] == "allow"
    for step in (3, 4):
        take_step(log, step)
    log.record_metrics(5, {"eval/accuracy": 1.25})
    log.close(finished=True)
    assert [*wandb.rows] == [*range(known, 6)]
    for step, row in wandb.rows.items():
        assert row["eval/accuracy"] == step / 4
        assert row.get(STEP_S) == (step if step < 5 else None)


@pytest.mark.parametrize("fails_at", [-1, 0, 2])  # at the start, in a row of the file, at the end
def test_a_run_goes_on_without_wandb_after_one_line_whenever_wandb_fails(
    opened, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails_at: int
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "{STEP_S}": 1.0}}\n')
    _, log = opened(fails_at=fails_at)
    log.record_metrics(1, {STEP_S: 1.0})
    log.record_metrics(2, {"eval/accuracy": 0.5})
    log.close({"state": "done"}, finished=True)
    assert capsys.readouterr().out == (
        f"W&B: service is gone; the run continues without it, and {tmp_path}/metrics.jsonl has the "
        f"records\n"
    )
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_that_fails_takes_nothing_from_the_others(
    opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # its import fails now
    monkeypatch.setitem(sys.modules, f"{name}.summary", None)
    wandb, log = opened()
    settings = {"mode": "online", "id": "abc", "project": "p", "name": "n"}
    log.trackers = Trackers(f"{name},wandb", tmp_path, settings, log.print_line)
    log.record_metrics(0, {STEP_S: 1.0})
    log.close(finished=True)
    assert capsys.readouterr().out.startswith(f"{name}: import of {name}")
    assert [*wandb.rows] == [0] and wandb.summary == {"finished": True}


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_a_setting_names_needs_its_package(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb fails now
    monkeypatch.setitem(sys.modules, name, None)
    cfg, needs = Config(report_to=name), f"needs {name}: pip install {name} "
    with pytest.raises(UserMistake, match=f"^REPORT_TO={name} {needs}"):
        open_trackers(cfg)
    with pytest.raises(UserMistake, match="^WANDB_MODE=offline needs wandb: pip install wandb "):
        open_trackers(Config(wandb_mode="offline"))
    assert open_trackers(Config()) is None and open_trackers(Config(wandb_mode="disabled")) is None


def test_wandb_needs_a_key_if_a_setting_names_it_and_a_key_alone_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    log = RunLog(tmp_path, steps=1, writes=True)
    log.trackers = open_trackers(Config()).Trackers(
        "wandb", tmp_path, {"mode": "online"}, log.print_line
    )
    log.close(finished=True)
    assert capsys.readouterr().out.startswith("W&B: import of wandb halted")
    for key, words in (("", "there is no API key; set WANDB_API_KEY"), ("short", "5 characters")):
        package = SimpleNamespace(api=SimpleNamespace(api_key=key))
        monkeypatch.setitem(sys.modules, "wandb", package)
        for cfg in (Config(wandb_mode="online"), Config(report_to="wandb")):
            begins = "REPORT_TO=wandb" if cfg.report_to else "WANDB_MODE=online"
            with pytest.raises(UserMistake, match=f"^{begins}: .*{words}") as error:
                open_trackers(cfg)
            assert "short" not in str(error.value)
        assert open_trackers(Config(report_to="wandb", wandb_mode="offline"))


# ---- The real packages ---------------------------------------------------------------------------


def kill_and_finish(out: Path, env: dict[str, str], *steps: int) -> None:
    """Kills a run in each of these steps, and starts it again. The last kill also hits the process
    of W&B, so that W&B may lack steps that are done."""
    for step in steps:
        process = start(out, env, 1)
        wait_for(process, f"^step={step} ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        for number in [process.pid, *map(int, children if step == steps[-1] else ())]:
            os.kill(number, signal.SIGKILL)
        process.communicate()
    result = finish(start(out, env, 1), out)
    assert result.code == 0 and "\nresumed after " in result.lines, result.errors
    assert not re.search(r"^\*|continues without it", result.lines, re.M), result.lines


def metrics_rows(out: Path) -> dict[int, dict[str, Any]]:
    """{step: {metric: value}} of metrics.jsonl."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        rows.setdefault(record.pop("step"), {}).update(record)
    return rows


def trackio_rows(out: Path, env: dict[str, str]) -> list[tuple[int, dict[str, Any]]]:
    """(step, {metric: value}) of each row of a run, as trackio's own command gives them."""
    name = f"same-{json.loads((out / 'run.json').read_text())['run_id']}"
    query = f"SELECT step, metrics FROM metrics WHERE run_name = '{name}' ORDER BY step"
    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", "grpo"]
    done = subprocess.run(
        [*command, "--sql", query, "--json"], env=os.environ | env, check=True, capture_output=True
    )
    return [(row["step"], json.loads(row["metrics"])) for row in json.loads(done.stdout)["rows"]]


def assert_tensorboard_has(rows: dict[int, dict[str, Any]], out: Path) -> None:
    """Its reader finds each number once, as float32, and nothing else: no texts, and no nulls."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    reader = EventAccumulator(str(out / "tensorboard"), {"tensors": 0}).Reload()
    numbers = {
        step: {name: value for name, value in row.items() if isinstance(value, int | float)}
        for step, row in rows.items()
    }
    names = {name for row in numbers.values() for name in row}
    assert {*reader.Tags()["tensors"]} == names
    for name in names:
        events = [(e.step, float(make_ndarray(e.tensor_proto))) for e in reader.Tensors(name)]
        values = [(step, row[name]) for step, row in numbers.items() if name in row]
        assert events == [(step, float(np.float32(value))) for step, value in values]


@pytest.mark.parity
def test_a_run_that_is_killed_twice_has_each_step_once_in_each_tracker_and_so_has_a_fork_offline(
    tmp_path: Path,
) -> None:
    """W&B's summary has the published names. The fork has the steps after those of its parent, in
    one folder, as `wandb sync` sends them. The values are those of metrics.jsonl; online W&B keeps
    the times of steps that were made twice."""
    for name in ("wandb", "trackio", "tensorboard"):
        pytest.importorskip(name, reason="an optional package")
    service, out, fork = WandbService(), tmp_path / "run", tmp_path / "fork"
    slow = "import time\ndef slow(completions, **columns):\n    time.sleep(0.5)\n"
    (tmp_path / "slow.py").write_text(slow + "    return [1.0] * len(completions)\n")
    env = environment(
        f"""STEPS=7 SAVE_EVERY_STEPS=2 EXPORT_HF=none BATCH_SIZE=2 MAX_LENGTH_SAMPLE=8
        LR_SCHEDULE=constant WARMUP_RATIO=0 EVAL_EVERY_STEPS=3 EVAL_PROMPTS=4 EVAL_FULL_SWEEP=1
        REWARD_FN={tmp_path}/slow.py:slow REWARD_WEIGHTS=1 HOME={tmp_path} WANDB_SILENT=true
        WANDB_BASE_URL={service.url} WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL=1
        WANDB_API_KEY={"a" * 40} TRACKIO_DIR={tmp_path}/trackio WANDB_NAME=same
        REPORT_TO=wandb,trackio,tensorboard"""
    )
    kill_and_finish(out, env, 3, 5)
    recorded = metrics_rows(out)
    assert_tensorboard_has(recorded, out)
    (rows,) = service.rows.values()
    for row in rows:
        values = recorded[row["_step"]].items()
        assert {(k, v) for k, v in values if not k.startswith(TIMES)} <= {*row.items()}
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [row["_step"] for row in rows if STEP_S in row] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["_step"] for row in rows if "eval/accuracy" in row] == [0, 3, 6, 7]
    last = json.loads((out / "summary.json").read_text())["last"] | {"state": "done"}
    published = "eval_full/accuracy eval_full/accuracy/pass_at_1 time/eval_full/step_s state"
    for name in (*published.split(), STEP_S, "time/train/step_avg_last10_s"):
        assert service.summary[name] == last[name]

    parent = f"{out}/checkpoints/7"
    env |= {"RESUME": parent, "WANDB_MODE": "offline", "STEPS": "11"}
    kill_and_finish(fork, env, 9)
    [folder] = (fork / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    names = "ppo_epochs derived.global_batch derived.commit verdict forked_from".split()
    assert all(name.encode() in file.read_bytes() for name in (*names, parent))
    sync = [sys.executable, "-m", "wandb", "sync", str(folder)]
    subprocess.run(sync, env=os.environ | env, check=True)
    _, rows = service.rows.values()
    assert [row["_step"] for row in rows] == [7, 8, 9, 10, 11]
    recorded = metrics_rows(fork)
    assert all(recorded[row["_step"]].items() <= row.items() for row in rows)
    for folder in (out, fork):  # both have the same WANDB_NAME
        assert trackio_rows(folder, env) == [*metrics_rows(folder).items()]
    assert_tensorboard_has(recorded, fork)
    assert [row["_step"] for row in rows if STEP_S in row] == [7, 8, 9, 10]


# ---- The service ---------------------------------------------------------------------------------


class WandbService:
    """A stand-in for the service of W&B, at `url`.

    rows: of each run, as it has received them; summary: the newest of a run.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.summary: dict[str, Any] = {}
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            log_message = lambda self, *_: None  # noqa: E731

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = json.dumps(service.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_PUT = do_POST

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *_: None  # a client that is killed is no news
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request for a path: to a query of GraphQL, or to new rows of a run."""
        if stream := re.search(r"/([^/]+)/file_stream$", path):
            files = json.loads(body).get("files") or {}
            if summary := files.get("wandb-summary.json"):
                self.summary = json.loads(summary["content"][-1])
            if history := files.get("wandb-history.jsonl"):
                rows = self.rows[stream[1]]
                rows[history["offset"] :] = map(json.loads, history["content"])
        if not path.endswith("graphql"):
            return {}
        asked, project = json.loads(body), {"id": "1", "name": "p", "entity": {"name": "us"}}
        query = re.search(r"(?:query|mutation) (\w+)", asked["query"])[1]
        variables = asked.get("variables") or {}
        name, data = variables.get("name"), {}
        if query == "RunResumeStatus":
            bucket = None
            if rows := self.rows.get(name):
                bucket = {"id": "1", "name": name, "config": "{}", "wandbConfig": '{"t": 1}'}
                bucket |= {"historyTail": json.dumps([json.dumps(rows[-1])]), "eventsTail": "[]"}
                bucket |= {"historyLineCount": len(rows), "summaryMetrics": json.dumps(rows[-1])}
                bucket |= {"logLineCount": 0, "eventsLineCount": 0}
            data = {"model": project | {"bucket": bucket}}
        elif query == "UpsertBucket":
            rows = self.rows.setdefault(name, [])
            bucket = {"id": "1", "name": name, "project": project, "historyLineCount": len(rows)}
            data = {"upsertBucket": {"bucket": bucket, "inserted": not rows}}
        elif query == "CreateRunFiles":
            urls = [{"name": x, "uploadUrl": f"{self.url}/{x}"} for x in variables["files"]]
            data = {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": urls}}
        return {"data": data}
