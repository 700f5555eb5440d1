"""--probe N of train_grpo.py: what the first N questions of training give before any training, and
what would keep a run from learning from them; see docs/probe.md. K: completions of a question."""

import argparse
import contextlib
import inspect
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from chat import SENTINEL
from config import Config
from contracts import Backend
from data import batch_indices
from evaluation import answer_questions, pass_at, standard_error
from fingerprint import result_fingerprint, weights_digest
from infra import hosts, log, resume
from infra.mistakes import UserMistake, import_optional, writing
from metrics import PHASES, are_right, completion_entries, sample_table
from model.params import Params, combine_params
from rewards import (
    BUILT_IN,
    TAG_NAMES,
    rename_tags,
    repetition_penalty,
    reward_format,
    without_open_thought,
)
from rollout import choose_groups, completion_texts, has_enough_groups, have_equal_rewards
from rows import Batch
from run import Run
from startup import first_params, make_backend, open_teacher, set_up
from train_grpo import groups_of_updates, with_logps
from update import accumulate_gradients

Rows = list[dict[str, Any]]  # of a .jsonl file
RECORD, RATES = "probe.json", "rates.jsonl"  # in the folder of --out
PLACES = ("checkpoint_dir", "export_hf", "push_to_hub")  # with OUTPUT_DIR: where a run writes
FIRST_ROUND = 2**30  # round_number of the probe's first episodes, which no run reaches
# What to do about each cause; None: its rule in extras/report.py says it. Causes stand before what
# may follow from them.
CAUSES = {
    "no_generation_prompt": "Prompts do not begin the assistant's turn. Set another CHAT_TEMPLATE.",
    "no_accuracy": None,
    "never_stops": "Nearly all completions repeat themselves or go on after their turn, until they "
    "are cut off. Set CHAT_TEMPLATE to that of the model, or begin with train_sft.py.",
    "thinks_too_long": "Nearly all completions are cut off in <think>. Raise MAX_LENGTH_SAMPLE, or "
    """turn thinking off with CHAT_TEMPLATE_KWARGS='{"enable_thinking": false}'.""",
    "all_truncated": None,
    "constant_reward": "This shows the policy nothing. Check the function and what it reads.",
    "format_never": "No completion has the form of reward_format. Ask for it in SYSTEM_PROMPT, "
    "teach it with train_sft.py first, or set another REWARD_FN.",
    "too_hard": "Hardly any question has a right completion. Check the reward on this one; if it "
    "is right, take easier questions or a better model, such as one of train_sft.py.",
    "too_easy": "Nearly all completions are right. Check the reward on this one; if it is right, "
    "take harder questions, or those that --out keeps.",
    "no_signal": None,
}


def probe_command(cfg: Config, flags: argparse.Namespace) -> None:
    """Runs --probe: samples rounds of as many questions as in training, and prints what they say.
    It locks no folder, and writes into that of --out alone. Raises UserMistake."""
    ask = import_optional("tools.ask", "--probe")
    rules = import_optional("extras.report", "--probe")
    kept = {"steps": cfg.steps or 1, "eval_full_sweep": cfg.eval_full_sweep}
    places = [x for x in PLACES if getattr(cfg, x) not in ("", "none")]
    hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
    cfg = replace(ask.find_weights(cfg, required=False), **ask.NO_STEPS | kept)
    run = set_up(cfg)
    rollout = replace(run.rollout, eval_sampling=run.rollout.sampling)
    run = replace(run, cfg=replace(cfg, eval_samples=cfg.num_pre_q), rollout=rollout)
    pool, P, writes = run.train_prompts, run.sizes.prompts_per_step, jax.process_index() == 0
    indices = batch_indices(len(pool), min(flags.probe, len(pool)), 0, cfg.seed).tolist()
    with contextlib.closing(make_backend(run)) as backend:
        params, step = ask.load_weights(run)
        with hosts.raising_on_all_processes():
            start = (run, step, Path(flags.out), len(indices))
            entries = read_rates(*start) if flags.out and writes else []
        done = int(hosts.gather_texts(str(len(entries)))[0])
        began = time.perf_counter()
        backend.update_weights(params)
        for i in range(done, len(indices), P):
            batch = sample_round(run, backend, indices[i : i + P], i // P, step)
            entries += entries_of(run, batch, indices[i : i + P])
            if flags.out and writes:
                write_lines(Path(flags.out) / RATES, entries[i:], adds=True)
        backend.release()
        seconds = time.perf_counter() - began
        if writes:
            print(*describe(run, entries, step, seconds, rules), sep="\n", flush=True)
        step_s = time_step(run, backend, params) if flags.time else 0.0
    if writes:
        if step_s:
            left_out = "without compiling, the optimizer, evaluations and checkpoints"
            hours = cfg.steps * step_s / 3600
            print(f"probe step_s={step_s:.3f} steps={cfg.steps} hours={hours:.3f} {left_out}")
        if flags.out:
            text = write_dataset(run, entries, Path(flags.out), flags.config, places)
            print(text, flush=True)


def sample_round(run: Run, backend: Backend, indices: Any, number: int, step: int = 0) -> Batch:
    """The completions of a round and their rewards. The number of the round seeds them, so that
    they do not depend on passes and earlier rounds. indices: of questions in train_prompts."""
    # Training has the first key of such a split, and evaluations have the second.
    key = jax.random.fold_in(jax.random.split(jax.random.key(run.cfg.seed), 3)[2], number)
    prompts, clock = [run.train_prompts[i] for i in indices], log.Clock(PHASES)
    return answer_questions(run, backend, prompts, key, clock, step, FIRST_ROUND + number)


def time_step(run: Run, backend: Backend, params: Params) -> float:
    """The median seconds of three steps, after one that compiles. They change no weights."""
    cfg, P, advantage_config = run.cfg, run.sizes.prompts_per_step, run.advantage_config
    ref_params, seconds, number = None, [], 0
    if cfg.beta > 0:
        ref_params = combine_params(params, first_params(run, run.learner.compute.dtype))
    if run.teacher:
        run = replace(run, teacher=open_teacher(cfg).load_weights(run.teacher, run.teacher_folder))
    for step in range(4):
        began, rounds = time.perf_counter(), []
        backend.update_weights(params)
        while not has_enough_groups(rounds, advantage_config, cfg.max_rounds()):
            indices = batch_indices(len(run.train_prompts), P, number, cfg.seed)
            rounds.append(sample_round(run, backend, indices, number))
            number += 1
        backend.release()
        batch = choose_groups(rounds, advantage_config)
        # The seconds depend on which advantages are 0, and not on the others.
        has_signal = ~have_equal_rewards(batch, advantage_config)
        batch = batch._replace(advantages=np.repeat(has_signal, cfg.num_pre_q).astype(float))
        batch = with_logps(run, params, ref_params, batch)
        for groups in groups_of_updates(P, cfg.num_mini_batches, cfg.ppo_epochs, (cfg.seed, step)):
            accumulate_gradients(run.learner, params, batch.select_groups(groups))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


# ---- What the completions say --------------------------------------------------------------------


def entries_of(run: Run, batch: Batch, indices: list[int]) -> Rows:
    """The lines of rates.jsonl: for each question its index, its rate (the mean of the first
    function), if its rewards have a signal, and its completions. Their `symptom` is the cause of
    which a completion that was cut off is an example; "" if it was not. indices: as above."""
    rollout, K, symptoms = run.rollout, batch.completions_per_prompt(), []
    # What a completion has only after its end: special tokens, and the template's next turn.
    added = rollout.chat_format.tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    marks = {x for x in special if not any(word in x for word in ("think", "thought", "tool"))}
    chat = [{"role": role, "content": SENTINEL} for role in ("user", "assistant", "user")]
    with contextlib.suppress(UserMistake):  # the template takes a single question
        for between in rollout.chat_format.render([chat])[0].split(SENTINEL)[2:-1]:
            marks |= {line.strip() for line in between.splitlines() if line.strip()}
    texts = completion_texts(rollout, batch.prompts, batch)
    pairs = zip(batch.completion_ids, batch.sampled_mask, strict=True)
    penalties = repetition_penalty(texts, [ids[mask > 0].tolist() for ids, mask in pairs])
    for text, penalty, stopped in zip(texts, penalties, batch.stopped, strict=True):
        tagged = text, rename_tags(text, run.cfg.tag_names(), TAG_NAMES)
        is_open = any(without_open_thought(x) != x for x in tagged)
        name = "thinks_too_long" if is_open else "all_truncated"
        goes_on = penalty < -0.5 or any(mark in text for mark in marks)
        symptoms.append("" if stopped else "never_stops" if goes_on else name)
    entries = completion_entries(rollout, batch, "symptom", np.array(symptoms))
    is_equal = have_equal_rewards(batch, run.advantage_config)
    rates = map(log.mean_without_nan, batch.function_rewards[:, 0].reshape(-1, K))
    return [
        log.to_json_values({"index": i, "rate": rate, "signal": not equal}) | entry
        for i, rate, equal, entry in zip(indices, rates, is_equal, entries, strict=True)
    ]


def describe(run: Run, entries: Rows, step: int, seconds: float, rules: Any) -> list[str]:
    """A line about all completions, one for each reward function, and one for each of the first
    three causes that hold, with an example. step: of the weights. rules: extras/report.py."""
    rollout, K, functions = run.rollout, run.cfg.num_pre_q, run.rollout.functions
    completions = [completion for entry in entries for completion in entry["completions"]]
    rewards = reward_columns(run, entries)
    right = are_right(rewards).reshape(-1, K)  # [questions, K]
    signal = log.metric_values(entries, "signal")[:, None]  # [questions, 1]
    symptoms, tokens = ([x[name] for x in completions] for name in ("symptom", "tokens"))
    accuracy, pass_at_K, best = pass_at(right, 1), pass_at(right, K), right.max(axis=1)[:, None]
    truncated = 1 - symptoms.count("") / len(symptoms)
    lines = [
        f"probe questions={len(entries)} samples_per_question={K} signal_frac={signal.mean():.4f} "
        f"signal_frac_se={standard_error(signal):.4f} accuracy={accuracy:.4f} "
        f"accuracy_se={standard_error(right):.4f} accuracy_of={functions[0].name} "
        f"pass_at_{K}={pass_at_K:.4f} pass_at_{K}_se={standard_error(best):.4f} "
        f"truncated_frac={truncated:.4f} tokens_mean={np.mean(tokens):.1f} "
        f"tokens_p95={np.percentile(tokens, 95):.0f} t={seconds:.2f}s"
    ]
    constant, no_format = "", False
    for function, weight, column in zip(functions, rollout.reward_weights, rewards.T, strict=True):
        name, original = function.name, inspect.unwrap(function.call)  # without ANSWER_TAGS
        is_scored = ~np.isnan(column)
        x = column[is_scored] if is_scored.any() else column[:1]
        lines.append(
            f"probe reward={name} weight={weight:g} mean={x.mean():.4f} std={x.std():.4f} "
            f"min={x.min():g} max={x.max():g} scored_frac={is_scored.mean():.4f}"
        )
        is_constant = weight != 0 and x.min() == x.max()
        no_format |= is_constant and original is reward_format and x[0] == 0
        is_built_in = original in BUILT_IN or name == "soft_overlong_penalty"
        # Of a function behind the first, 0 may be a penalty that is never due, and 1 the best.
        is_suspect = function is functions[0] or x[0] not in (0, 1)
        if is_constant and is_suspect and not is_built_in:
            constant += f"{name} gives {x[0]:g} to every completion. "
    if len(entries) < rules.WINDOW:
        return [*lines, f"cause: none yet: it needs {rules.WINDOW} questions"]
    teacher = run.cfg.teacher_path  # of it every token is a signal, whatever the rewards are
    holds = {  # a comparison with NaN is False
        "no_accuracy": np.isnan(right).all(),
        max(sorted({*symptoms} - {""}), key=symptoms.count, default=""): truncated >= 0.9,
        "constant_reward": constant,
        "format_never": no_format,
        # Completions count as right from a reward of 1 on, which a graded reward may never give.
        "too_hard": pass_at_K <= 0.05 and np.nanmean(rewards[:, 0]) <= 0.05 and not teacher,
        "too_easy": accuracy >= 0.95,
    }
    causes = [name for name in CAUSES if holds.get(name)]
    causes = causes or ["no_signal"] * bool(signal.mean() <= 0.1 and not teacher)
    chat, render = [[{"role": "user", "content": SENTINEL}]], rollout.chat_format.render
    if (prompt := render(chat)) == render(chat, add_generation_prompt=False):
        # Alone it is no mistake, because some templates have nothing before an answer.
        ends = tuple(rollout.chat_format.tokenizer.all_special_tokens)
        if causes or prompt[0].rstrip().endswith(ends):
            causes.insert(0, "no_generation_prompt")
    for cause in causes[:3]:
        i = symptoms.index(cause) if cause in symptoms else 0
        text = CAUSES[cause] or rules.RULES[cause]
        lines.append(f"cause: {cause}: {constant if cause == 'constant_reward' else ''}{text}")
        lines.append(sample_table(step, entries[i // K] | {"completions": [completions[i]]}))
    return lines if causes else [*lines, "cause: none: no sign of trouble"]


def reward_columns(run: Run, entries: Rows) -> np.ndarray:
    """[completions, functions] float64 rewards; NaN: the function does not apply."""
    rewards = [completion["rewards"] for entry in entries for completion in entry["completions"]]
    names = [function.name for function in run.rollout.functions]
    return np.stack([log.metric_values(rewards, name) for name in names], axis=1)


# ---- The folder of --out -------------------------------------------------------------------------


def write_lines(file: Path, rows: Rows, adds: bool = False) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with writing(f"--out {file.parent}", UserMistake):
        if not adds:
            return log.replace_file(file, text)
        with file.open("a") as lines:
            lines.write(text)


def read_rates(run: Run, step: int, folder: Path, count: int) -> Rows:
    """Up to `count` entries that an earlier start of this probe has written into the folder, which
    is made if it is missing. step: of the weights. Raises UserMistake if the folder has other
    files, or those of another probe."""
    weights = f"{weights_digest(run.folder)}, RESUME={run.cfg.resume}, {step} steps"
    made_with = result_fingerprint(run) | {"the weights": weights}
    with writing(f"--out {folder}", UserMistake):
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(file.name for file in folder.iterdir())
    if files and RECORD not in files:
        raise UserMistake(f"--out {folder} has {files[0]}, but no {RECORD}; name a new folder")
    for record in log.read_lines(folder / RECORD):
        if changes := resume.describe_changes(record, made_with, f"the probe in {folder}"):
            raise UserMistake(f"{changes}; set it back, or name a new folder in --out")
    write_lines(folder / RECORD, [{"made_with": made_with}])
    entries = [*log.read_lines(folder / RATES)]
    if len(entries) < count:  # a kill may leave half a line, and the last round may have been small
        P = run.sizes.prompts_per_step
        entries = entries[: len(entries) // P * P]
        write_lines(folder / RATES, entries)
    return entries[:count]


def write_dataset(run: Run, entries: Rows, folder: Path, config: str, places: Sequence[str]) -> str:
    """Writes the questions with a rate between 0 and 1 as the training split of a dataset, or if
    the first function gives other rewards than 0 and 1 those with a signal; and the eval split.
    Returns a line with the command that trains on them. config: the file of --config, or "".
    places: those of PLACES that are set."""
    cfg, first = run.cfg, reward_columns(run, entries)[:, 0]
    is_graded = not np.isin(first[~np.isnan(first)], (0, 1)).all()
    kept = [x for x in entries if (x["signal"] if is_graded else 0 < (x["rate"] or 0) < 1)]
    train = [run.train_prompts[x["index"]].columns | {"rate": x["rate"]} for x in kept]
    test = [dict(prompt.columns) for prompt in run.eval_prompts]
    splits = {cfg.eval_split: test} if test else {}  # a run that never evaluates reads none
    for split, rows in (splits | {cfg.train_split: train}).items():
        for columns in rows:  # load_examples makes `prompts` of the messages in QUESTION_COLUMN
            messages = columns.pop("prompts", None)
            if messages and cfg.question_column in ("question", "prompts"):
                columns[cfg.question_column] = messages
        write_lines(folder / f"{split}.jsonl", rows)
    command = f"DATASET={shlex.quote(str(folder))}"
    has_weights = cfg.resume not in ("auto", "never")  # of a run
    begun = cfg.output_dir and Path(cfg.output_dir, "config.yaml").is_file()
    if has_weights or begun:  # Not where the run with these settings writes.
        command += f" OUTPUT_DIR={shlex.quote(f'{folder}/run')}"
        command += "".join(f" {name.upper()}=" for name in places)
    command += f" RESUME={shlex.quote(cfg.resume)}" * has_weights
    command += " python train_grpo.py" + f" --config {shlex.quote(config)}" * bool(config)
    advice = f"with the settings of this probe, {command} trains on them"
    return f"{folder} has {len(kept)} of {len(entries)} questions" + f"; {advice}" * bool(kept)
