"""Claims about recipes/judge.py: what it asks an endpoint, and what it keeps. The endpoint is a
stand-in on this machine, which is slow, fails and answers nonsense; the reward worker is real."""

import dataclasses
import gc
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from runs import REPO, environment, finish, metric_records, run_here, start, wait_for

import train_grpo
from chat import ChatFormat
from data import Prompt
from infra.hosts import StopSignal
from infra.mistakes import UserMistake
from model.hf import load_tokenizer
from rewards import RewardFunction, load_reward_functions
from rollout import RolloutConfig, begin_rewards, reward_completions, sample_completions
from sampling import Completions, Stopping

FILE = REPO / "recipes" / "judge.py"
KEY = "sk-0123456789"
CHECK = "1 + 1?"  # the question of the request that is made when the file is loaded
CUT = "cut short"  # a body that ends before its length
STUCK = "stuck"  # a body that comes a second after the headers
SHORT_WAITS = ("(0.25, 0.5, 1, 2, 4, 8, 16, 32)", "(0.02, 0.04, 0.08)")


class Endpoint(ThreadingHTTPServer):
    """Replies with `reply(completion, number of its requests)`: the judge's answer, or a choice of
    answers as JSON, or a status and a body, or None to close the connection."""

    request_queue_size = 64
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Callable[[str, int], str | dict | tuple[int, str] | None]
        self.reply = lambda *_: "Score: 1"
        self.delay_s, self.at_once, self.most_at_once = 0.0, 0, 0
        self.asked: Counter[str] = Counter()  # requests of each completion
        self.checks, self.lock, self.last = 0, threading.Lock(), {}
        self.ended = threading.Event()  # the test has ended

    def handle_error(self, *_: object) -> None:
        """A request whose client has gone is no error."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def hang(self, *_: object) -> None:
        """A reply that does not come."""
        self.ended.wait(9)


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        completion = text.partition("student's answer: ")[2].partition("\n\nReason")[0]
        server = self.server
        if CHECK in text:
            server.checks += 1
            return self.send(200, {"choices": [{"message": {"content": "OK"}}]})
        with server.lock:
            server.asked[completion] += 1
            number = server.asked[completion]
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            server.last = {"path": self.path, "key": self.headers["Authorization"], **body}
        time.sleep(server.delay_s)
        reply = server.reply(completion, number)
        with server.lock:
            server.at_once -= 1
        if isinstance(reply, str):
            reply = {"message": {"content": reply}, "finish_reason": "stop"}
        if isinstance(reply, dict):
            self.send(200, {"choices": [reply]})
        elif reply:
            self.send(*reply)

    def send(self, status: int, body: object) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + 9 * (body == CUT)))
        self.end_headers()
        self.wfile.flush()
        time.sleep(body == STUCK)
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The stand-in, and the settings that lead to it. The cache is in tmp_path."""
    gc.freeze()  # a collection of all that earlier tests have left would stop it for seconds
    monkeypatch.chdir(tmp_path)
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", server.url)
        monkeypatch.setenv("JUDGE_MODEL", "stand-in")
        monkeypatch.setenv("JUDGE_API_KEY", KEY)
        monkeypatch.delenv("JUDGE_CONCURRENCY", raising=False)
        yield server
        server.ended.set()
        server.shutdown()
    gc.unfreeze()


@contextmanager
def loaded(
    file: Path = FILE, names: str = "judge", timeout_s: float = 30
) -> Iterator[list[RewardFunction]]:
    workers, sources = {}, [f"{file}:{name}" for name in names.split()]
    try:
        yield load_reward_functions(",".join(sources), timeout_s, 9, 2, workers)
    finally:
        for worker in workers.values():
            worker.close()


def edited(folder: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the recipe in which a user has replaced texts."""
    text = FILE.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "judge.py").write_text(text, encoding="utf-8")
    return folder / "judge.py"


def impatient(folder: Path) -> Path:
    return edited(folder, SHORT_WAITS)


def columns(count: int) -> dict[str, list[str]]:
    return {"question": ["2 * 3?"] * count, "answer": ["#### 6"] * count}


# ---- What is asked -------------------------------------------------------------------------------


def test_requests_are_made_at_the_same_time_and_equal_completions_ask_once(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_CONCURRENCY", "4")
    endpoint.delay_s = 0.05
    endpoint.reply = lambda completion, _: f"Score: 0.{completion}"
    with loaded() as [judge]:
        assert judge([*"12345678"] * 3, **columns(24)) == [x / 10 for x in range(1, 9)] * 3
    assert endpoint.most_at_once == 4 and endpoint.checks == 1
    assert endpoint.asked == Counter("12345678")


def test_the_request_has_the_question_the_right_answer_the_completion_and_the_key(
    endpoint: Endpoint,
) -> None:
    with loaded() as [judge]:
        judge(["{6} √"], **columns(1))
    assert endpoint.last.pop("messages") == [
        {
            "role": "user",
            "content": "Judge the student's answer to this question: 2 * 3?\n\n"
            "The right answer: #### 6\n\nThe student's answer: {6} √\n\n"
            "Reason briefly. Then end with a line of this form, where X is a number from 0 (wrong) "
            "to 1 (right):\nScore: X",
        }
    ]
    assert endpoint.last == {
        "path": "/v1/chat/completions",
        "key": f"Bearer {KEY}",
        "model": "stand-in",
        "temperature": 0,
        "max_tokens": 1024,
    }


def test_a_judge_reads_lists_of_messages_like_their_texts(endpoint: Endpoint) -> None:
    with loaded() as [judge]:
        judge(["6"], question=["Be brief.\n\n2 * 3?"], answer=["6"])
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 * 3?"}]
        assert judge(["6"], prompts=[prompt], question=["2 * 3?"], answer=["6"]) == [1.0]
        prompt[:1] = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
        assert judge(["6"], prompts=[prompt], question=["2 * 3?"], answer=["6"]) == [1.0]
        assert endpoint.asked == {"6": 1}  # the cache has the answer to the other requests
        prompt[:1] = [{"role": "assistant", "content": None, "tool_calls": []}]
        judge(["6"], prompts=[prompt], question=["2 * 3?"], answer=["6"])
    assert "to this question: \n\n2 * 3?\n" in endpoint.last["messages"][0]["content"]


# ---- What is answered ----------------------------------------------------------------------------

ANSWERS = {
    "Score: 1": 1.0,
    "It is right.\n\n**Score:** 0.75\n": 0.75,
    "Score: 0.2? No.\nFinal score: 0.5.": 0.5,
    "**Score**: 1": 1.0,
    "Score: 0\n\nRubric:\n1": 0.0,
    "<think>The answer 7 is wrong.</think>\n\n0": 0.0,
    "Score: 1\n</think>\n\n**Score: 0**": 0.0,  # some chat templates write <think> themselves
    " 1.\n": 1.0,
    "<think>\nScore: 1\n</think> It is wrong.": None,
    "<think>\nScore: 1\n": None,
    "Let x =\n1\nso x = 1": None,
    "1.\n\nIt has no answer.": None,
    "Score: 1\nScore: unclear": None,
    "Score: 1.0\n\nIt is right, because 2 * 3 = 6.": 1.0,
    "Score: .5": 0.5,
    "I cannot judge this.": None,
    "Score: 8/10": 0.8,
    "Score:\n8/10": 0.8,
    "Score: 1/10": 0.1,
    "**Score: 7.5 / 10**": 0.75,
    "Final score: **4** out of 5.": 0.8,
    "0.5 out of 1": 0.5,
    "9/10": 0.9,
    "Score: 0/10": 0.0,
    "Of the 3 steps 1 is wrong: 2 * 3 = 5.": None,
    "": None,
}
NO_SCORES = "11/10;0/0;8;8 out of;1/2/3;99999/99999;1.5;-1;1%".split(";")
ANSWERS |= {f"Score: {text}": None for text in NO_SCORES}


def test_a_score_is_a_number_or_x_of_y_alone_in_its_line_and_the_rest_is_none_and_counted(
    endpoint: Endpoint, capfd: pytest.CaptureFixture
) -> None:
    endpoint.reply = lambda completion, _: completion
    with loaded() as [judge]:
        scores = judge([*ANSWERS], **columns(len(ANSWERS)))
        assert dict(zip(ANSWERS, scores, strict=True)) == ANSWERS
        line = (
            "judge: no score for 17 of 35, such as '<think>\\nScore: 1\\n</think> It is wrong.'\n"
        )
        assert capfd.readouterr() == ("", line)
        assert judge([*ANSWERS], **columns(len(ANSWERS))) == scores  # None is in the cache, too
        assert capfd.readouterr() == ("", line)
    assert set(endpoint.asked.values()) == {1}


def test_a_missing_or_cut_answer_is_none_and_the_line_has_its_finish_reason_in_later_runs_too(
    endpoint: Endpoint, capfd: pytest.CaptureFixture
) -> None:
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Score: 0.5"}]
    choices = {
        "parts": {"message": {"content": parts}, "finish_reason": "stop"},
        "missing": {"message": {"role": "assistant"}, "finish_reason": "content_filter"},
        "null": {"message": {"content": None}, "finish_reason": "length"},
        "cut": {"message": {"content": "Score: 1? Let me think"}, "finish_reason": "length"},
        "cut thought": {"message": {"content": "Score: 1\nNo"}, "finish_reason": "length"},
    }
    endpoint.reply = lambda completion, _: choices[completion]
    for _ in range(2):
        with loaded() as [judge]:
            assert judge([*choices], **columns(5)) == [0.5, None, None, None, None]
            assert capfd.readouterr().err == (
                "judge: no score for 4 of 5, such as "
                "'\\nScore: none, finish_reason=content_filter, max_tokens may be too low'\n"
            )
    assert set(endpoint.asked.values()) == {1}


def test_a_request_that_fails_is_made_again(endpoint: Endpoint, tmp_path: Path) -> None:
    faults = [(500, "down"), (429, "slow down"), (200, "<html>"), (200, "{}"), (200, CUT), None]
    endpoint.reply = lambda text, number: faults[int(text)] if number < 3 else "Score: 1"
    with loaded(impatient(tmp_path)) as [judge]:
        assert judge([*"012345"], **columns(6)) == [1.0] * 6
    assert endpoint.asked == dict.fromkeys("012345", 3)


# ---- What is kept --------------------------------------------------------------------------------


def test_a_later_process_reads_the_answers_and_a_changed_prompt_or_model_asks_again(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter(range(99))
    endpoint.reply = lambda *_: f"Score: {next(asked) / 100}"  # It never says the same twice.
    changed = edited(tmp_path, ("Reason briefly.", "Reason briefly, please."))
    with loaded() as [judge]:
        first = judge([*"abc"], **columns(3))
    with loaded() as [judge]:
        assert judge([*"cab"], **columns(3)) == [first[2], first[0], first[1]]
    assert endpoint.asked == dict.fromkeys("abc", 1) and endpoint.checks == 2
    with loaded(changed) as [judge]:
        judge([*"abc"], **columns(3))
    assert endpoint.asked == dict.fromkeys("abc", 2)
    monkeypatch.setenv("JUDGE_MODEL", "other")
    with loaded() as [judge]:
        judge([*"abc"], **columns(3))
    assert endpoint.asked == dict.fromkeys("abc", 3)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_the_endpoint_refuses_has_no_score_and_is_asked_again_in_a_later_call(
    status: int, endpoint: Endpoint, capfd: pytest.CaptureFixture
) -> None:
    body = f'{{"Score: 1": "{KEY}"}}\nScore: 1'
    endpoint.reply = lambda text, _: (status, body) if text in ("2", "3") else "Score: 1"
    with loaded() as [judge]:
        assert judge([*"123214"], **columns(6)) == [1.0, None, None, None, 1.0, 1.0]
        line = f"judge: no score for 3 of 6, such as 'Score: none, HTTP Error {status}:"
        printed = capfd.readouterr().err
        assert printed.startswith(line) and printed.count("\n") == 1 and KEY not in printed
        assert judge([*"12"], **columns(2)) == [1.0, None]
    assert endpoint.asked == {"1": 1, "2": 2, "3": 1, "4": 1}


@pytest.mark.parametrize("status, refused", [(401, "2"), (403, "2"), (404, "2"), (400, "123")])
def test_a_wrong_key_or_model_and_the_same_status_for_every_text_end_the_run_at_once(
    status: int, refused: str, endpoint: Endpoint
) -> None:
    """While other requests hang."""
    endpoint.reply = lambda text, _: (status, "too large") if text in refused else endpoint.hang()
    line = rf"raised ConnectionError: JUDGE_URL=.*stand-in: HTTP Error {status}: .* b'too large'"
    with loaded() as [judge]:
        start = time.monotonic()
        with pytest.raises(UserMistake, match=line):
            judge([*"1231"], **columns(4))
        assert time.monotonic() - start < 5
    assert {*refused} <= endpoint.asked.keys() and {*endpoint.asked.values()} == {1}


@pytest.mark.parametrize("reply, requests", [((401, f"no {KEY}\nhere"), 1), ((503, KEY), 4)])
def test_a_request_that_keeps_failing_ends_the_call_in_a_line_and_the_other_answers_are_kept(
    reply: tuple[int, str],
    requests: int,
    endpoint: Endpoint,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    texts = [*map(str, range(400))]
    endpoint.delay_s = 0.01
    endpoint.reply = lambda completion, _: reply if completion == "20" else "Score: 0.5"
    with loaded(impatient(tmp_path)) as [judge], pytest.raises(UserMistake) as error:
        judge(texts, **columns(400))
    address = f"JUDGE_URL={endpoint.url} JUDGE_MODEL=stand-in: HTTP Error"
    assert f"judge.py:judge raised ConnectionError: {address} {reply[0]}" in str(error.value)
    printed = "".join(capfd.readouterr()) + str(error.value)
    assert KEY not in printed and "\n" not in printed
    assert endpoint.asked.pop("20") == requests
    before = set(endpoint.asked)
    assert {*texts[:20]} <= before and len(before) < 399  # The last are not asked any more.
    kept = sum(not file.suffix for file in (tmp_path / "runs" / "judge_cache").iterdir())
    assert kept >= len(before) - 16  # Other requests were still in flight.

    endpoint.asked.clear()
    endpoint.reply = lambda *_: "Score: 0.5"
    with loaded(impatient(tmp_path)) as [judge]:
        assert judge(texts, **columns(400)) == [0.5] * 400
    assert len(endpoint.asked) == 400 - kept


TIMED_OUT = "TimeoutError: timed out"


@pytest.mark.parametrize(
    "reply, requests, reason",
    [
        (None, 4, TIMED_OUT),
        ((200, STUCK), 4, TIMED_OUT),
        ((400, STUCK), 1, "HTTP Error 400: Bad Request"),
    ],
)
def test_an_answer_or_a_body_that_does_not_come_is_named_after_all_tries_and_a_refusal_at_once(
    reply: tuple[int, str] | None, requests: int, reason: str, endpoint: Endpoint, tmp_path: Path
) -> None:
    """Before the time limit of the call."""
    endpoint.reply = lambda *_: reply or endpoint.hang()
    file = edited(tmp_path, SHORT_WAITS, ("REQUEST_S = 60", "REQUEST_S = 0.1"))
    with loaded(file, timeout_s=0.2) as [judge], pytest.raises(UserMistake) as error:
        judge(["1"], **columns(1))
    line = f"raised ConnectionError: JUDGE_URL={endpoint.url} JUDGE_MODEL=stand-in: {reason}"
    assert line in str(error.value)
    assert endpoint.asked == {"1": requests}


def test_a_judge_that_is_killed_during_a_call_has_kept_what_was_answered(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_CONCURRENCY", "2")
    workers = {}

    def reply(completion: str, _: int) -> str | None:
        if completion < "6":
            return "Score: 1"
        if endpoint.asked.total() == 7:
            os.kill(worker._process.pid, 9)
        return endpoint.hang()

    endpoint.reply = reply
    [judge] = load_reward_functions(f"{FILE}:judge", 30, 9, 2, workers)
    with closing(*workers.values()) as worker, pytest.raises(UserMistake, match="died"):
        judge([*"123456789"], **columns(9))
    assert endpoint.asked == Counter("1234567")  # two wait for an answer

    endpoint.reply = lambda *_: "Score: 0"
    with loaded() as [judge]:
        assert judge([*"123456789"], **columns(9)) == [1.0] * 5 + [0.0] * 4
    assert endpoint.asked == Counter("123456789" + "67")


# ---- prefetch ------------------------------------------------------------------------------------


class RandomBackend:
    """Samples completions of random tokens. wait: is called in each pass, with the number of the
    completions of earlier ones."""

    def __init__(self, wait: Callable[[int], None]) -> None:
        self.wait, self.rng = wait, np.random.default_rng(0)

    def generate(
        self, prompt_ids, prompt_mask, sequence_ids, key, sampling, earlier
    ) -> Completions:
        self.wait(sequence_ids[0])
        ids = self.rng.integers(100, 500, (len(sequence_ids), 6)).astype(np.int32)
        lengths = np.full(len(ids), 6, np.int32)
        return Completions(sequence_ids, ids, np.ones_like(ids), lengths, ids * 0.0, lengths)


def rollout_of(*functions: RewardFunction) -> RolloutConfig:
    """With what sampling by RandomBackend and rewards need."""
    names = [field.name for field in dataclasses.fields(RolloutConfig)]
    chat_format = ChatFormat(load_tokenizer(REPO / "tiny"), [])
    given: dict = {"chat_format": chat_format, "functions": [*functions]}
    given |= {"stopping": Stopping(6, (2,), 2), "stop_signal": StopSignal(), "global_length": 0}
    return RolloutConfig(
        **dict.fromkeys(names) | given | {"reward_weights": (1.0,) * len(functions)}
    )


def sample(
    rollout: RolloutConfig, passes: int, wait: Callable[[int], None] = lambda _: None
) -> tuple[list[Prompt], Completions]:
    """Passes of two prompts with 16 completions each."""
    prompts = [Prompt([5, 6, 7], {"question": "2 * 3?", "answer": "6"})] * 2 * passes
    sizes = {"completions_per_prompt": 16, "prompts_per_pass": 2, "title": "rollout"}
    backend = RandomBackend(wait)
    return prompts, sample_completions(rollout, backend, prompts, None, None, **sizes)


def test_all_rewards_but_those_of_the_last_pass_are_given_while_the_next_is_sampled(
    endpoint: Endpoint,
) -> None:
    """A pass is sampled until the completions of the earlier ones have their answers."""
    endpoint.delay_s = 0.05

    def wait(earlier: int) -> None:
        end, answered = time.monotonic() + 20, -1
        while answered < earlier:
            assert time.monotonic() < end, f"{answered} of {earlier} completions have an answer"
            time.sleep(0.01)
            with endpoint.lock:
                answered = endpoint.asked.total() - endpoint.at_once

    with loaded() as [judge]:
        rollout = rollout_of(judge)
        prompts, completions = sample(rollout, 4, wait)
        rewards, _ = reward_completions(rollout, prompts, completions)
    assert (rewards == 1).all() and len(rewards) == 128
    assert endpoint.asked.total() == len(endpoint.asked) == 128, "each text once"
    assert endpoint.most_at_once == 16


PREFETCHES = """
BEGUN, CALLS = [], []
def prefetch(completions, completion_ids, **columns):
    BEGUN.append([*completions, *sorted(columns)])
    if "fail" in completions:
        raise ValueError("two\\nlines")
    while "hang" in completions:
        pass
def first(completions, **columns):
    CALLS.append(len(completions))
    return [float(len(BEGUN))] * len(completions)
def second(completions, **columns):
    return [float(BEGUN[-1] == [*completions[-32:], *sorted(columns)][:-1]) for _ in completions]
"""


def test_prefetch_of_a_file_is_called_once_with_each_pass(tmp_path: Path) -> None:
    """Also if two of its functions are named, and not with environments, whose worker is busy."""
    (tmp_path / "mine.py").write_text(PREFETCHES)
    with loaded(tmp_path / "mine.py", "first second") as functions:
        rollout = rollout_of(*functions)
        prompts, completions = sample(rollout, 3)
        _, rewards = reward_completions(rollout, prompts, completions)
        assert (rewards[:, 0] == 3).all()
        rollout = dataclasses.replace(rollout, environments=object())
        begin_rewards(rollout, prompts, completions)
        assert functions[0](["a"]) == [3.0]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("fail", "raised ValueError: two lines (mine.py:6)"),
        ("hang", "is not done after 1 s; raise REWARD_TIMEOUT_S=1 or speed it up"),
    ],
)
def test_a_prefetch_that_fails_or_hangs_is_one_line_that_names_it(
    text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PREFETCHES)
    with loaded(tmp_path / "mine.py", "first", timeout_s=1) as [function]:
        with pytest.raises(UserMistake) as error:
            function.prefetch([text], completion_ids=[[1]])
    assert str(error.value) == f"REWARD_FN {tmp_path}/mine.py:prefetch {reason}"


FOUR_PASSES = environment(
    """STEPS=2 BATCH_SIZE=2 ROLLOUT_GLOBAL_BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=16
    EVAL_EVERY_STEPS=1 EVAL_PROMPTS=20 TRAIN_MICRO_BATCH_SIZE=8 TEMPERATURE=3"""
)


def test_a_run_with_prefetch_has_the_records_of_one_without(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.reply = lambda text, _: f"Score: {zlib.crc32(text.encode()) % 11 / 10}"
    called, ends = "(completions, prompts, answer)\n    futures", []
    renamed = [("def prefetch(", "def begin("), (f"prefetch{called}", f"begin{called}")]
    for name, edits in (("with", []), ("without", renamed)):
        (tmp_path / name).mkdir()
        file = edited(tmp_path / name, ("runs/judge_cache", str(tmp_path / name)), *edits)
        env = FOUR_PASSES | {"REWARD_FN": f"{file}:judge"}
        done = run_here(tmp_path / name / "run", train_grpo, env)
        assert done.code == 0, done.errors
        ends.append((metric_records(done.out), (done.out / "samples.jsonl").read_text()))
        ends[-1] += (endpoint.asked.total(),)
        endpoint.asked.clear()
    assert ends[0] == ends[1] and len(ends[0][0]) == 5


def test_a_signal_saves_while_answers_are_awaited(endpoint: Endpoint, tmp_path: Path) -> None:
    """A step of 48 passes has begun its first requests, each of which takes a minute."""
    env = environment("BATCH_SIZE=1 ROLLOUT_GLOBAL_BATCH_SIZE=48 NUM_PRE_Q=2 EVAL_EVERY_STEPS=0")
    env |= environment("STEPS=9 TEMPERATURE=3 PREEMPTION_GRACE_S=20 MAX_LENGTH_SAMPLE=32")
    env |= {"REWARD_FN": f"{FILE}:judge", "REWARD_WEIGHTS": "1"}
    out = tmp_path / "run"
    process = start(out, env | {"JUDGE_URL": endpoint.url, "JUDGE_MODEL": "stand-in"}, 1)
    wait_for(process, r"^step=0 ")
    endpoint.delay_s = 60
    while not endpoint.at_once and process.poll() is None:
        time.sleep(0.01)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, out)
    assert stopped.code == 143 and "STOPPED: SIGTERM steps=1 saved_step=1" in stopped.lines
    assert time.monotonic() - began < 20


# ---- Mistakes ------------------------------------------------------------------------------------

HAS_AT = "JUDGE_URL has an @: write a key into JUDGE_API_KEY, which is never printed"
MISTAKES = {
    "JUDGE_URL=": "JUDGE_URL='' and JUDGE_MODEL='stand-in' must both be set",
    "JUDGE_MODEL=": "and JUDGE_MODEL='' must both be set",
    "JUDGE_CONCURRENCY=many": "JUDGE_CONCURRENCY='many' is not a whole number of at least 1",
    "JUDGE_CONCURRENCY=0": "JUDGE_CONCURRENCY='0' is not a whole number of at least 1",
    "JUDGE_URL=http://127.0.0.1:9/v1": ":9/v1 JUDGE_MODEL=stand-in: URLError: ",
    "JUDGE_URL=http://127.0.0.1:{silent}/v1": f":{{silent}}/v1 JUDGE_MODEL=stand-in: {TIMED_OUT}",
    "JUDGE_URL=127.0.0.1:9/v1": "unknown url type",
    "JUDGE_URL=http://user:secret@127.0.0.1:9/v1 JUDGE_MODEL=": HAS_AT,
    "JUDGE_URL=user:secret@127.0.0.1:9 JUDGE_MODEL=": HAS_AT,
}


@pytest.mark.parametrize("settings", MISTAKES)
def test_a_mistake_is_a_line_before_the_first_call_without_a_password(
    settings: str, endpoint: Endpoint, tmp_path: Path, monkeypatch, capfd
) -> None:
    file = edited(tmp_path, SHORT_WAITS, ("WAITS_S[:1], 25)", "WAITS_S[:1], 0.1)"))
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        silent = server.getsockname()[1]
        for name, value in environment(settings.format(silent=silent)).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserMistake) as error, loaded(file):
            pass
    line = str(error.value)
    assert MISTAKES[settings].format(silent=silent) in line
    assert "\n" not in line and "secret" not in line and "".join(capfd.readouterr()) == ""


# ---- A run ---------------------------------------------------------------------------------------

TWO_STEPS = environment(
    """STEPS=2 BATCH_SIZE=4 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=16 TEMPERATURE=3 EVAL_EVERY_STEPS=0
    TRAIN_MICRO_BATCH_SIZE=8"""
)


@pytest.mark.slow
def test_a_run_whose_judge_failed_goes_on_and_a_run_with_its_answers_has_the_same_numbers(
    endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    asked, fails_at = iter(range(10**6)), 20

    def reply(*_: object) -> str | tuple[int, str]:
        """No answer is given twice. A step has 16 requests."""
        return (404, "broken") if (n := next(asked)) == fails_at else f"Score: {n / 100}"

    endpoint.reply = reply
    file = edited(tmp_path, ("runs/judge_cache", str(tmp_path)))
    env = TWO_STEPS | {"REWARD_FN": f"{file}:judge"}
    failed = run_here(tmp_path / "first", train_grpo, env)
    [error] = failed.errors.splitlines()
    assert failed.code == 2 and "HTTP Error 404: Not Found b'broken'" in error
    assert error.startswith(f"error: REWARD_FN {file}:judge raised ConnectionError: JUDGE_URL=")

    first = run_here(tmp_path / "first", train_grpo, env)
    assert first.code == 0, first.errors
    requests = endpoint.asked.total()
    second = run_here(tmp_path / "second", train_grpo, env)
    assert second.code == 0, second.errors
    assert endpoint.asked.total() == requests and endpoint.checks == 3
    records = metric_records(first.out)
    assert metric_records(second.out) == records and [x["step"] for x in records] == [0, 1]
    assert len({record["train-reward/total/mean"] for record in records}) == 2

    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    printed = "".join(capfd.readouterr()) + first.errors
    assert KEY not in printed + first.lines + error and "JUDGE" not in printed
    assert not any(KEY.encode() in text for text in written)
