"""A reward from a judge at an endpoint of OpenAI's chat completions. Edit PROMPT for your task.

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B \
        REWARD_FN=recipes/judge.py:judge python train_grpo.py
"""

import contextlib
import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PROMPT = """\
Judge the student's answer to this question: {question}

The right answer: {answer}

The student's answer: {completion}

Reason briefly. Then end with a line of this form, where X is a number from 0 (wrong) to 1 (right):
Score: X"""
OPTIONS = {"temperature": 0, "max_tokens": 1024}
CACHE = Path("runs/judge_cache")  # a file for each answer, under a digest of the request
REQUEST_S = 60  # the time limit for connecting, and again for the answer
WAITS_S = (0.25, 0.5, 1, 2, 4, 8, 16, 32)  # before each retry: more than a minute in all
SECONDS_FOR_EACH_COMPLETION = 2 * REQUEST_S * (1 + len(WAITS_S)) + sum(WAITS_S)  # all its tries
URL, MODEL = os.environ.get("JUDGE_URL", "").rstrip("/"), os.environ.get("JUDGE_MODEL", "")
KEY = "".join(os.environ.get("JUDGE_API_KEY", "").split()) or "EMPTY"
ADDRESS = f"JUDGE_URL={URL} JUDGE_MODEL={MODEL}: "  # begins each error
CONCURRENCY = os.environ.get("JUDGE_CONCURRENCY", "16")  # the most requests at the same time


def judge(completions: list, prompts: list, answer: list, **columns: list) -> list[float | None]:
    """The judge's scores, from 0 to 1, or None. Raises ConnectionError once a request fails, but
    for a text that the endpoint refuses only if it refuses all of them."""
    requests = [*map(make_request, prompts, answer, completions)]
    prefetch(completions, prompts, answer)
    futures = {BEGUN.pop(request): request for request in dict.fromkeys(requests)}
    answers, refused = {}, []
    for future in as_completed(futures):
        try:
            answers[futures[future]] = future.result()
        except ConnectionError as error:
            status = getattr(error.__cause__, "code", 0)
            refused.append(status)
            is_of_text = 400 <= status < 500 and status not in (401, 402, 403, 404, 405, 408, 429)
            if not is_of_text or refused == [status] * len(futures):
                raise
            answers[futures[future]] = f"Score: none, {error}".replace(ADDRESS, "")[:80]
    scores = [parse_score(answers[request]) for request in requests]
    if None in scores:
        example = answers[requests[scores.index(None)]][-80:]
        print(f"judge: no score for {scores.count(None)} of {len(scores)}, such as {example!r}")
    return scores


def prefetch(completions: list, prompts: list, answer: list, **columns: list) -> None:
    """Begins the requests of a pass, while the next one is sampled."""
    for request in map(make_request, prompts, answer, completions):
        if request not in BEGUN:
            BEGUN[request] = POOL.submit(read_or_ask, request)


def make_request(prompt: str | list, answer: str, completion: str | list) -> str:
    text = PROMPT.format(question=as_text(prompt), answer=answer, completion=as_text(completion))
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **OPTIONS})


def as_text(value: str | list[dict] | None) -> str:
    if isinstance(value, list):  # messages, or the parts of a message's content
        return "\n\n".join(as_text(part.get("content", part.get("text"))) for part in value)
    return value or ""


def parse_score(text: str) -> float | None:
    """X of the last "Score: X", or of a text that is only X, from 0 to 1. X may be 8/10 or 8 out of
    10. Thoughts do not count."""
    verdict = re.sub(r"(?s)^.*</think>|<think>.*", "", text)
    ends = re.findall(r"(?i)score[\s*]*:\s*(.*)", verdict) or [verdict]
    number = r"[\s*]*(\d{1,4}(?:\.\d+)?|\.\d+)[\s*]*"
    score = re.fullmatch(rf"{number}(?:(?:/|out of){number})?[\s*.]*", ends[-1])
    x, most = (float(part or 1) for part in score.groups()) if score else (0.0, 0.0)
    return x / most if x <= most and most else None


def read_or_ask(request: str) -> str:
    """The judge's answer, from the cache if it is there."""
    file = CACHE / hashlib.sha256(request.encode()).hexdigest()
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")  # A kill or another run leaves no half answer.
        part.write_text(ask(request), "utf-8", "replace")
        part.replace(file)
    return file.read_text("utf-8")


def ask(body: str, waits_s: tuple[float, ...] = WAITS_S, limit_s: float = REQUEST_S) -> str:
    """The judge's answer. Raises ConnectionError with a message that never has the key."""
    post = Request(f"{URL}/chat/completions", body.encode(), {"Content-Type": "application/json"})
    post.add_unredirected_header("Authorization", f"Bearer {KEY}")  # only for this host
    cause = None
    for wait_s in (*waits_s, 0):
        try:
            with urlopen(post, timeout=limit_s) as reply:
                choice = json.load(reply)["choices"][0]
            text, reason = as_text([choice["message"]]), choice.get("finish_reason")
            if not text or reason == "length":
                text += f"\nScore: none, finish_reason={reason}, max_tokens may be too low"
            return text
        except HTTPError as error:
            reason, cause = str(error), error
            if error.code < 500 and error.code not in (408, 429):  # Retries would not help.
                with contextlib.suppress(OSError, HTTPException):  # The body may never come.
                    reason += f" {error.read(1000)!r}"
                break
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        time.sleep(wait_s)
    raise ConnectionError(f"{ADDRESS}{reason.replace(KEY, '(key)')}") from cause


# The reward process imports this file before the first step, and so a mistake shows then.
if "@" in URL:
    raise ValueError("JUDGE_URL has an @: write a key into JUDGE_API_KEY, which is never printed")
if not (URL and MODEL):
    raise ValueError(f"JUDGE_URL={URL!r} and JUDGE_MODEL={MODEL!r} must both be set")
if not re.fullmatch(r"[1-9]\d*", CONCURRENCY):
    raise ValueError(f"JUDGE_CONCURRENCY={CONCURRENCY!r} is not a whole number of at least 1")
ask(make_request("1 + 1?", "2", "2"), WAITS_S[:1], 25)  # Loading may take 60 s in all.
CACHE.mkdir(parents=True, exist_ok=True)
BEGUN: dict = {}  # {request: its future} until `judge` has used it
POOL = ThreadPoolExecutor(int(CONCURRENCY))
