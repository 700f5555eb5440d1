"""The function reward_model of REWARD_FN: the frozen model of REWARD_MODEL_PATH scores completions,
with one forward each.

A reward model (...ForSequenceClassification with one label) has the head score.weight [1, D]. The
score is its product with the final hidden state of TRL's token: the last one that is not the pad
token of the tokenizer, or without one the eos token. A judge is a language model that would say one
of JUDGE_WORDS next. The score is P(yes) / (P(yes) + P(no)), so the head is the difference of two
rows of its lm_head.

Dimensions: X texts of a program on all processes, of t tokens; D model, V vocabulary.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chat import SENTINEL, ChatFormat, Message, checked_chats
from config import Config
from data import Prompt, pad_prompts
from fingerprint import short_digest, weights_digest
from infra.chips import attribute_oom_to
from infra.log import mean_without_nan
from infra.mistakes import UserMistake, naming, reading
from infra.settings import read_text
from infra.sizes import MICRO_SIZES, Sizes, bucket_length
from model import hf
from model.attention import prompt_rows
from model.layout import constrain_batch, gather_processes, local_part, shard_batch
from model.logps import dot, softcap
from model.network import ComputeConfig, forward
from model.params import Params, lm_head
from model.placement import gib_per_device, num_params, plan_frozen, raise_if_too_long
from rewards import RewardFunction, Rewards

KWARGS = "judge_template_kwargs"


@dataclasses.dataclass(eq=False)
class Scorer:
    """The function reward_model, without weights until `prepare`."""

    cfg: Config
    folder: Path
    compute: ComputeConfig
    batch_size: int  # texts of a program on each process
    chat_format: ChatFormat  # its own, from `prepare` on with the messages of SYSTEM_PROMPT
    pad_id: int  # tokens of this id at the end of a text are not scored
    prompt: str  # the text of JUDGE_PROMPT; "": a reward model
    words: tuple[int, ...]  # the ids of JUDGE_WORDS; (): a reward model
    params: Params | None = None
    # Of each call since take_metrics [processes, texts]: the probability of both words together, 1
    # without words; NaN: the text is too long.
    measured: list[np.ndarray] = dataclasses.field(default_factory=list)
    has_noted: bool = False  # that the judge would say something else

    def as_reward_function(self) -> RewardFunction:
        return RewardFunction(
            "reward_model",
            self,
            reads_answer="{answer}" in self.prompt,
            prepare=self.prepare,
            fingerprint=self.fingerprint,
            take_metrics=self.take_metrics,
        )

    def fingerprint(self) -> dict[str, str]:
        """What determines the scores, for result_fingerprint."""
        values = {
            "the scorer's weights": weights_digest(self.folder),
            "the scorer's tokenizer": short_digest((self.folder / "tokenizer.json").read_bytes()),
            "the scorer's chat template": short_digest(self.chat_format.template().encode()),
        }
        if self.words:
            kwargs = json.dumps(self.cfg.template_kwargs(KWARGS), sort_keys=True)
            values["the text of JUDGE_PROMPT"] = short_digest(self.prompt.encode())
            values |= {"JUDGE_WORDS": self.cfg.judge_words, KWARGS.upper(): kwargs}
        return values

    def prepare(self, chat_format: ChatFormat, prompts: Sequence[Prompt]) -> None:
        """Reads the weights. Raises UserMistake if the longest prompt and completion are too long.
        chat_format: of the policy, with the messages of SYSTEM_PROMPT."""
        own, compute = self.chat_format, self.compute
        self.chat_format = chat_format._replace(tokenizer=own.tokenizer, kwargs=own.kwargs)
        columns = max(prompts, key=lambda prompt: len(prompt.ids)).columns
        [ids] = self.token_ids([""], {name: [value] for name, value in columns.items()})
        with naming("REWARD_MODEL_PATH", self.cfg.reward_model_path):
            raise_if_too_long(self.cfg.max_length_sample, compute.model, len(ids))
        place = compute.layout.mesh, compute.dtype, compute.layer_loop
        with attribute_oom_to(f"the scorer ({gib_per_device(compute):.2f} GiB on each device)"):
            self.params = hf.load_params(self.folder, compute.model, *place)
            jax.block_until_ready(self.params)

    def __call__(self, completions: list[str], **columns: Any) -> Rewards:
        """The scores; None for a text that is longer than the scorer takes. All processes call it
        with as many completions."""
        columns.pop("trainer_state", None)  # it has no value for each completion
        ids, compute = self.token_ids(completions, columns), self.compute
        is_long = [len(x) > compute.model.max_positions for x in ids]
        ids = [x[:1] if skip else x for x, skip in zip(ids, is_long, strict=True)]
        lengths, values = np.array([*map(len, ids)]), np.zeros((len(ids), 2), np.float32)
        order = np.argsort(-lengths, kind="stable")  # the longest first
        widths = gather_processes(lengths[order][None]).max(axis=0)  # [texts], on all processes
        for i in range(0, len(ids), self.batch_size):
            chosen = order[i : i + self.batch_size]
            texts = [ids[j] for j in np.resize(chosen, self.batch_size)]
            arrays = pad_prompts(texts, bucket_length(int(widths[i])), 0)
            with attribute_oom_to("the program of reward_model", MICRO_SIZES):
                batch = shard_batch(arrays, compute.layout)
                results = score_last_tokens(self.params, *batch, compute, self.words)
                values[chosen] = local_part(results)[: len(chosen)]
        self.measured.append(gather_processes(np.where(is_long, np.nan, values[:, 1])[None]))
        mean, words = mean_without_nan(self.measured[-1]), self.cfg.judge_words
        if mean < 0.5 and not self.has_noted:
            self.has_noted = True
            reason = "the judge would say something else; see JUDGE_TEMPLATE_KWARGS"
            print(f"note: JUDGE_WORDS={words} have probability {mean:.2g}: {reason}", flush=True)
        return [None if skip else float(x) for (x, _), skip in zip(values, is_long, strict=True)]

    def token_ids(self, completions: list[str], columns: dict[str, list]) -> list[list[int]]:
        """The tokens of the texts, up to those that are scored."""
        chats: list[list[Message]] = []
        for text, *row in zip(completions, *columns.values(), strict=True):
            example = dict(zip(columns, row, strict=True))
            if self.words:
                text = self.prompt.format(**{"answer": None} | example | {"completion": text})
                chats.append([{"role": "user", "content": text}])
            else:
                answer = {"role": "assistant", "content": text}
                chats.append([*self.chat_format.messages_of(example), answer])
        return [without_padding(ids, self.pad_id) for ids in self.render(chats)]

    def render(self, chats: list[list[Message]]) -> list[list[int]]:
        """The tokens of chats; the template writes all special ones. Raises UserMistake."""
        with naming("REWARD_MODEL_PATH", self.cfg.reward_model_path):
            chats = checked_chats(chats, self.chat_format)
            texts = self.chat_format.render(chats, add_generation_prompt=bool(self.words))
        return self.chat_format.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def take_metrics(self, count: int | None = None) -> dict[str, float]:
        """The metrics of the texts of all processes since the last call. count: the texts before
        those that fill the passes of an evaluation; None: all of them."""
        calls = self.measured
        if count:  # MAX_HOURS may have left those of a step that it gave up
            calls = calls[-math.ceil(count / calls[-1].size) :]
        probabilities = np.concatenate(calls, axis=1).reshape(-1)[:count]
        self.measured = []
        is_too_long = np.isnan(probabilities)
        metrics = {"too_long": is_too_long.sum(), "too_long_frac": is_too_long.mean()}
        words = {"words_probability": mean_without_nan(probabilities)} if self.words else {}
        return metrics | words


@functools.partial(jax.jit, static_argnames=("compute", "words"))
def score_last_tokens(
    params: Params, ids: jax.Array, mask: jax.Array, compute: ComputeConfig, words: tuple[int, ...]
) -> jax.Array:
    """[X, 2] float32: the scores of texts, and the probability of both words of a judge together,
    else 1. ids, mask: [X, t] int32, padded on the left."""
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [X, t]
    hidden, _ = forward(params, compute, ids, positions, prompt_rows(mask.astype(bool)))
    last, weights = hidden[:, -1], lm_head(params)  # [X, D], [1 or V, D]
    cap = compute.model.logits_softcap
    rows = weights[jnp.array(words or (0,))].astype(jnp.float32)  # [2 or 1, D]
    head = rows[:1] - rows[1:] if words else rows  # [1, D]
    scores = dot(last.astype(jnp.float32), head, 1, 1)[:, 0]  # [X]
    probability = jnp.ones_like(scores)
    if words:
        logits = softcap(dot(last, weights.astype(last.dtype), 1, 1), cap)  # [X, V]
        of_words = jax.nn.logsumexp(logits[:, jnp.array(words)], axis=1)
        probability = jnp.exp(of_words - jax.nn.logsumexp(logits, axis=1))
        if cap:  # the difference of two capped logits is not that of two rows times hidden
            yes, no = softcap(dot(last.astype(jnp.float32), rows, 1, 1), cap).T
            scores = yes - no
        scores = jax.nn.sigmoid(scores)
    return constrain_batch(jnp.stack([scores, probability], axis=1), compute.layout)


def without_padding(ids: list[int], pad_id: int) -> list[int]:
    return ids[: max((i + 1 for i, x in enumerate(ids) if x != pad_id), default=1)]


# ---- Reading the folder --------------------------------------------------------------------------


def read_scorer(cfg: Config, sizes: Sizes) -> Scorer:
    """The scorer of REWARD_MODEL_PATH; prints its size and reads no weight. Raises UserMistake for
    a model, a prompt or words that cannot score."""
    with naming("REWARD_MODEL_PATH", cfg.reward_model_path):
        folder = hf.fetch_model(cfg.reward_model_path)
        model, tokenizer = hf.read_config(folder), hf.load_tokenizer(folder)
        if any(name.startswith("score.") for name in hf.open_files(folder, hf.WEIGHTS)):
            model = dataclasses.replace(model, has_score=True, logits_divisor=1.0)
        hf.check_weights(folder, model, len(tokenizer))  # it refuses other heads
        compute = plan_frozen(cfg, model, sizes, 0, jax.devices())
        with reading("its chat template cannot be read"):
            arguments = ChatFormat(tokenizer, []).arguments()
    hf.raise_if_overwriting(cfg.export_hf, cfg.output_dir, folder, "REWARD_MODEL_PATH")
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    kwargs = {name: x for name, x in cfg.template_kwargs().items() if name in arguments}
    prompt, size = "", sizes.micro_batch_size
    words: tuple[int, ...] = ()
    if not model.has_score:
        (prompt, words, kwargs), pad_id = read_judge(cfg, tokenizer, arguments), -1
    elif cfg.judge_prompt or cfg.judge_template_kwargs:
        reason = "has score.weight and is no judge, so the settings of a judge do nothing"
        print(f"note: REWARD_MODEL_PATH={cfg.reward_model_path} {reason}", flush=True)
    chat_format = ChatFormat(tokenizer, [], kwargs=kwargs)
    scorer = Scorer(cfg, folder, compute, size, chat_format, pad_id, prompt, words)
    question = {"role": "user", "content": SENTINEL}
    chat = [question] if words else [question, question | {"role": "assistant"}]
    [ids], name = scorer.render([chat]), f"REWARD_MODEL_PATH={cfg.reward_model_path}"
    if tokenizer.decode(ids).count(SENTINEL) < len(chat):
        raise UserMistake(f"{name}: its chat template leaves out texts of {chat[-1]['role']}")
    if rest := tokenizer.decode(ids[len(kept := without_padding(ids, pad_id)) :]):
        reason = f"as in TRL the token before the final {rest!r}, its pad token, is scored"
        print(f"note: {name}: {reason}: here {tokenizer.decode(kept[-1:])!r}; see the model's card")
    memory = f"{num_params(model) / 1e6:.2f}M ({gib_per_device(compute):.2f} GiB on each device)"
    print(f"{'judge' if words else 'reward_model'}={folder} parameters={memory}")
    return scorer


def read_judge(
    cfg: Config, tokenizer: Any, arguments: set[str]
) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """The text of JUDGE_PROMPT, the ids of JUDGE_WORDS, and JUDGE_TEMPLATE_KWARGS. arguments: those
    that the judge's template reads. Raises UserMistake."""
    fields, kwargs = "{question}, {answer}, {completion}", cfg.template_kwargs(KWARGS)
    if not cfg.judge_prompt:
        reason = f"without score.weight is a judge; set JUDGE_PROMPT to a file with {fields}"
        raise UserMistake(f"REWARD_MODEL_PATH={cfg.reward_model_path} {reason}")
    prompt, name = read_text(cfg.judge_prompt, "JUDGE_PROMPT"), f"JUDGE_PROMPT={cfg.judge_prompt}"
    with reading(f"{name}: its fields are {fields}, and other braces are {{{{ and }}}}"):
        text = prompt.format(question="", answer="", completion=SENTINEL)
    if SENTINEL not in text:
        raise UserMistake(f"{name} has no {{completion}}, the text that is judged")
    ids = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in cfg.judge_words.split(",")]
    if [*map(len, ids)] != [1, 1] or ids[0] == ids[1]:
        parts = " and ".join(str([tokenizer.decode([i]) for i in x]) for x in ids)
        reason = f"its tokenizer makes {parts} of them; give two words of one token"
        raise UserMistake(f"JUDGE_WORDS={cfg.judge_words}: {reason}")
    if unknown := sorted(kwargs.keys() - arguments):
        used = ", ".join(sorted(arguments)) or "no others"
        reason = f"its template does not use {unknown[0]!r}; it uses {used}"
        raise UserMistake(f"{KWARGS.upper()}={cfg.judge_template_kwargs}: {reason}")
    return prompt, (ids[0][0], ids[1][0]), kwargs
