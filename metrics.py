"""What a run leaves behind: the lines people parse, metrics.jsonl, samples.jsonl and W&B.

Every process prints its lines; only process 0 writes files and W&B.
"""

import collections
import contextlib
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

WANDB_LIMIT_S = 30  # for W&B to answer at the start


class Clock:
    """Seconds by phase of one step; `lap` ends a phase."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self.started

    def train_seconds(self) -> dict[str, float]:
        """The phases in the order they are logged; rollout is rollout_sync + rollout_generate."""
        names = ("rollout_sync", "rollout_generate", "reward", "advantages", "shard", "update")
        phases = {name: self.seconds[name] for name in names}
        return {"rollout": phases["rollout_sync"] + phases["rollout_generate"], **phases}


def check_wandb(mode: str) -> None:
    """Raises ValueError for a WANDB_MODE that cannot work here; asks no server and no user."""
    if mode == "disabled":
        return
    try:
        import wandb
    except Exception as error:  # ImportError, or what a half-installed one raises
        why = "" if isinstance(error, ImportError) else f" ({_in_one_line(error)})"
        raise ValueError(f"WANDB_MODE={mode} needs wandb: pip install wandb{why}") from None
    if mode == "offline" or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    with contextlib.redirect_stderr(io.StringIO()):  # it warns that it is old; wandb.login asks
        key = wandb.api.api_key or ""  # of WANDB_API_KEY, or what `wandb login` has left
    if len(key) < 40:
        found = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise ValueError(
            f"WANDB_MODE=online: {found if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


class RunLog:
    """The run's outputs; `out` is its folder, on process 0 created here.

    Once it is open nothing outside takes the run down: what a full disk or W&B does not take costs
    one line.
    """

    def __init__(
        self, out: Path, *, steps: int, writes: bool, wandb: dict[str, Any] | None,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """first_step: of a run that goes on; what it logged of this and later steps is dropped."""
        self._recent: collections.deque[float] = collections.deque(maxlen=10)
        self._bar = tqdm(
            total=steps, initial=first_step, unit="step", disable=None if writes else True
        )  # None: unless on a terminal
        self._out, self._files = out, {}
        self._lost: set[str] = set()  # what does not take what it is given
        self._wandb, self.wandb_id = None, ""
        self._unsent: list[str] = []  # what W&B does not have, for the end
        self._step = first_step  # of the newest record
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_steps_before(first_step, out / name)
            self._files[name] = open(out / name, "a", encoding="utf-8")
        if wandb:
            self._start_wandb(out, wandb)

    def line(self, text: str) -> None:
        """Prints one line; above the progress bar where there is one."""
        try:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except OSError as error:  # a full disk; stderr may be elsewhere
            if "stdout" not in self._lost:
                self._lost.add("stdout")
                print(f"the log cannot be written: {error.strerror}", file=sys.stderr)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and to W&B."""
        self._step = step
        if "time/train/step_s" in values:
            self._recent.append(values["time/train/step_s"])
            values = values | {"time/train/step_avg_last10_s": np.mean(self._recent)}
        values = {name: _plain(value) for name, value in values.items()}
        self._write("metrics.jsonl", [{"step": step, **values}])
        if self._wandb:
            try:
                self._wandb.log(values, step=step)
            except Exception as error:
                self._lose_wandb(error, step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Appends whole texts to samples.jsonl: a look at what is rewarded."""
        self._write("samples.jsonl", [{"step": step, **sample} for sample in samples])

    def arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Writes an .npz file into the run's folder."""
        if self._files:
            try:
                np.savez_compressed(self._out / name, **arrays)
            except OSError as error:
                self.line(f"{self._out / name} cannot be written: {error.strerror}")

    def step_done(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
        for name in self._files:
            self._write(name, [])
        if self._wandb:
            try:
                self._wandb.finish()
            except Exception as error:
                self._lose_wandb(error, self._step)
        for line in self._unsent:
            self.line(line)

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        """Appends lines; those that a full disk does not take wait in the file's buffer."""
        file = self._files.get(name)
        if file is None:
            return
        try:
            for record in records:
                file.write(json.dumps(record, default=str) + "\n")
            file.flush()
        except OSError as error:
            if name not in self._lost:
                self._lost.add(name)
                self.line(f"{file.name} cannot be written: {error.strerror}; the run goes on")

    def _start_wandb(self, out: Path, settings: dict[str, Any]) -> None:
        """Without an answer of W&B's server its records go to a file, which can be sent later."""
        import wandb

        limit = wandb.Settings(init_timeout=WANDB_LIMIT_S, login_timeout=WANDB_LIMIT_S)
        settings = {"dir": os.fspath(out), "settings": limit} | settings
        try:
            self._wandb = wandb.init(**settings)
        except Exception as error:  # W&B's, its transports' and its service's
            if settings["mode"] == "offline":
                self._lose_wandb(error, 0)
                return
            self.line(
                f"W&B: {_in_one_line(error)}; the run is logged for it in {out}/wandb instead"
            )
            try:
                self._wandb = wandb.init(**settings | {"mode": "offline"})
            except Exception as again:
                self._lose_wandb(again, 0)
                return
            folder = Path(self._wandb.dir).parent
            self._unsent.append(f"W&B does not have this run; upload it by: wandb sync {folder}")
        self.wandb_id = self._wandb.id

    def _lose_wandb(self, error: Exception, step: int) -> None:
        self.line(f"W&B: {_in_one_line(error)}; the run goes on without it")
        self._unsent.append(
            f"W&B may have no records from step {step} on; {self._out}/metrics.jsonl has them all"
        )
        self._wandb = None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def keep_steps_before(step: int, file: Path) -> None:
    """Drops the records of this and later steps, and a last line that was cut off."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and record.get("step", step) < step:
            kept.append(line)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(file)


def _plain(value: Any) -> Any:
    """A JSON value; what is not finite becomes null, which JSON has and NaN is not."""
    if isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if np.isfinite(value) else None


# ---- A step --------------------------------------------------------------------------------------


class StepRows(NamedTuple):
    """Every sequence of a step, of all processes, on every process."""

    rewards: np.ndarray  # [B] float64, weighted total
    prompt_lengths: np.ndarray  # [B] tokens
    completion_lengths: np.ndarray  # [B] tokens, stop token included
    stopped: np.ndarray  # [B] 1: ended by a stop token, 0: cut off
    per_function: np.ndarray  # [B, F] float64, NaN where one does not apply

    @classmethod
    def of(cls, table: np.ndarray) -> "StepRows":
        """From the columns [B, 4+F] in this order."""
        return cls(*table[:, :4].T, table[:, 4:])

    def equal_groups(self, num_pre_q: int, by_function: bool = False) -> np.ndarray:
        """[P] bool: all rewards of the group are the same; by_function: those of each function."""
        columns = self.per_function if by_function else self.rewards[:, None]
        groups = columns.reshape(-1, num_pre_q, columns.shape[1])  # [P, K, F or 1]
        differ = np.fmin.reduce(groups, axis=1) < np.fmax.reduce(groups, axis=1)  # past NaN
        return ~differ.any(axis=1)


def not_finite(metrics: dict[str, float]) -> str:
    """The loss or the gradient's norm with its value, if it is infinite or no number; else ""."""
    wrong = [n for n in ("loss", "grad_norm") if not math.isfinite(metrics[n])]
    return f"{wrong[0]} is {metrics[wrong[0]]}" if wrong else ""


def step_lines(
    step: int, means: dict[str, float], rows: StepRows, teaches: bool, clock: Clock, phases: bool
) -> list[str]:
    """The line people parse, then a line for each thing to note about the step.

    phases: the line ends in PRINT_TRAIN_TIME_BREAKDOWN's seconds and lengths. teaches: some
    completion that counts has an advantage.
    """
    lengths, seconds = rows.completion_lengths, clock.train_seconds()
    text = (
        f"step={step} loss={means['loss']:.6f} entropy={means['entropy']:.4f} "
        f"reward_mean={mean_of(rows.rewards):.4f} dt={clock.total():.2f}s"
    )
    if phases:
        text += "".join(f" {phase}={value:.2f}s" for phase, value in seconds.items())
        text += (
            f" prompt_len_mean={rows.prompt_lengths.mean():.1f} "
            f"completion_len_mean={lengths.mean():.1f} completion_len_max={lengths.max():.0f} "
            f"completion_hit_max_frac={1 - rows.stopped.mean():.4f}"
        )
    lines, note = [text], f"note step={step}"
    if "dynamic_sampling/rounds" in means:
        rounds, kept = (means[f"dynamic_sampling/{name}"] for name in ("rounds", "kept_frac"))
        lines.append(f"dynamic_sampling step={step} rounds={rounds:.0f} kept={kept:.4f}")
    if not teaches:
        lines.append(f"{note}: no completion that counts has an advantage: no policy gradient")
    if wrong := not_finite(means):
        lines.append(f"{note}: its update was not applied: {wrong}")
    return lines


def step_records(
    means: dict[str, float], rows: StepRows, advantages: np.ndarray, clock: Clock, num_pre_q: int,
    names: list[str],
) -> dict[str, float]:  # fmt: skip
    """The step's record in metrics.jsonl. means: of the update; names: of the reward functions."""
    seconds, tokens = clock.train_seconds(), rows.completion_lengths.sum()
    total = rows.prompt_lengths + rows.completion_lengths
    records = {f"train-other/{name}": value for name, value in means.items()}
    records["train-other/batch_global"] = len(rows.rewards)
    records["train-other/total_valid_token_count"] = tokens
    records["train-other/frac_reward_zero_std"] = rows.equal_groups(num_pre_q).mean()
    records |= _rewards("train-reward", rows.rewards, rows.per_function, names)
    records |= _spread("train-reward/advantage", advantages, "mean", "std", "min", "max")
    records |= _spread("train-seq_len/prompt", rows.prompt_lengths, "mean", "max")
    records |= _spread("train-seq_len/completion", rows.completion_lengths, "mean", "max")
    records |= _spread("train-seq_len/total", total, "mean", "max")
    records["train-seq_len/completion/hit_max_frac"] = 1 - rows.stopped.mean()
    records |= {f"time/train/{phase}_s": value for phase, value in seconds.items()}
    records["time/train/step_s"] = clock.total()
    records["throughput/train/valid_tokens_per_s"] = tokens / clock.total()
    records["throughput/train/valid_tokens_per_s_update"] = tokens / seconds["update"]
    return records


def sampling_metrics(rounds: int, equal: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Of DYNAMIC_SAMPLING. equal: bool, of each group sampled in the step; rewards: of each row."""
    kept, mean = 1 - equal.mean(), mean_of(rewards)
    metrics = {"rounds": rounds, "kept_frac": kept, "reward_mean": mean}
    return {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()}


def sample_records(
    tokenizer: Any, prompts: list[Any], completions: list[str], rewards: list[float]
) -> list[dict[str, Any]]:
    """A completion of each of these data.Prompts, in full."""
    return [
        {
            "prompt": tokenizer.decode(prompt.ids),
            "completion": completion,
            "answer": prompt.columns["answer"],
            "reward": float(reward),
        }
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True)
    ]


# ---- An evaluation -------------------------------------------------------------------------------


class AccuracyRule(NamedTuple):
    """A completion is right if this reward function gives it at least the threshold."""

    function: str  # its name
    threshold: float


def evaluation(
    step: int,
    split: str,
    table: np.ndarray,
    samples: int,
    names: list[str],
    rule: AccuracyRule,
    clock: Clock,
    full: bool,
) -> tuple[str, dict[str, Any]]:
    """The line and the record of one evaluation; full: of EVAL_FULL_SWEEP's.

    table: [questions * samples, 1+F] float64: weighted reward, and the reward of each function in
    `names`, NaN where it does not apply. accuracy is the share of right completions, over all
    samples of all questions to which the rule's function applies.
    """
    reward = table[:, 1 + names.index(rule.function)].reshape(-1, samples)
    correct = np.where(np.isnan(reward), np.nan, reward >= rule.threshold)
    questions, seconds = len(correct), clock.total()
    accuracy, solved = mean_of(correct), mean_of(correct.max(axis=1))
    found = f"accuracy={accuracy:.4f} accuracy_of={rule.function}"
    found += f" pass_at_{samples}={solved:.4f}" if samples > 1 else ""
    if full:
        line = (
            f"eval_full split={split} questions={questions} samples_per_question={samples} "
            f"{found} t={seconds:.2f}s"
        )
        return line, {
            "eval_full/split": split,
            "eval_full/questions_global": questions,
            "eval_full/samples_per_question": samples,
            "eval_full/accuracy": accuracy,
            "eval_full/accuracy/pass_at_1": accuracy,
            f"eval_full/accuracy/pass_at_{samples}": solved,
            "time/eval_full/step_s": seconds,
            "time/eval_full/s_per_question": seconds / questions,
        }
    records = _rewards("eval/reward", table[:, 0], table[:, 1:], names)
    records |= {"eval/accuracy": accuracy, f"eval/pass_at_{samples}": solved}
    records |= {f"time/eval/{phase}_s": value for phase, value in clock.seconds.items()}
    records["time/eval/rollout_s"] = clock.seconds["rollout_generate"]
    records["time/eval/step_s"] = seconds
    return f"eval step={step} split={split} questions={questions} {found} t={seconds:.2f}s", records


def mean_of(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN when none is left."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def _spread(name: str, values: np.ndarray, *which: str) -> dict[str, float]:
    """{name/mean: ..., ...} of the values that are not NaN; NaN when none is left."""
    values = values[~np.isnan(values)]
    values = values if values.size else np.array([np.nan])
    return {f"{name}/{statistic}": getattr(np, statistic)(values) for statistic in which}


def _rewards(
    group: str, rewards: np.ndarray, per_function: np.ndarray, names: list[str]
) -> dict[str, float]:
    records = _spread(f"{group}/total", rewards, "mean", "std", "min", "max")
    for name, column in zip(names, per_function.T, strict=True):
        records |= _spread(f"{group}/func/{name}", column, "mean")
    return records
