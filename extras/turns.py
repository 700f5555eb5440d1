"""Turns: what the environments of ENVIRONMENT_CLASS say to the policy, as token ids.

An environment is an object of a user's class, one for each completion. It begins an episode with
`reset(**columns)`. Then it either answers each text of the policy with `reply(text)`, or it has
tools, its other public methods, which the policy calls in the form `<tool_call>{json}</tool_call>`.
docs/turns.md describes the class. The objects live in a reward worker (infra/reward_worker.py).

A completion is what the policy draws, then the environment's message with the markers of the chat
template, then what the policy draws next, and so on. Tokens that were drawn are never tokenized
again.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import data
from data import SENTINEL, render_chats
from infra.hosts import gather_texts
from infra.mistakes import UserMistake
from infra.reward_worker import LOADING_S, RewardWorker
from infra.sizes import turn_sequences, turn_width
from model import placement
from model.layout import gather_processes
from model.next_token import Sampling
from rollout import Run, local_part_of, text_of
from sampling import Backend, Completions

THOUGHT_OR_CALL = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)
# Turns of a policy that thinks before it answers or calls a tool.
ANSWER = "<think>\nA thought.\n</think>\n\nAn answer."
CALL = '<think>\nA thought.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Environments:
    """The environments of a run: they live in the reward worker, and speak through the model's chat
    template."""

    def __init__(
        self, source: str, worker: RewardWorker, tokenizer: Any, stop_ids: Sequence[int], seed: int
    ) -> None:
        """source: "file.py:Class". Raises UserMistake if the class cannot be an environment, or if
        the chat template cannot hold several turns."""
        self._what, self._worker = f"ENVIRONMENT_CLASS {source}", worker
        self._tokenizer, self._seed = tokenizer, seed
        self._stop_texts = [tokenizer.decode([i]) for i in stop_ids]
        name = source.rpartition(":")[2]
        described = json.loads(worker.ask(self._what, "open", name, more_s=LOADING_S))
        self.tools: list[dict[str, Any]] = described["tools"]  # as chat templates take them
        self.has_reward: bool = described["has_reward"]
        self._stop_if_unsuitable()

    def _ask(self, request: str, *arguments: Any) -> Any:
        return self._worker.ask(self._what, request, *arguments)

    def reset(
        self, round_number: int, numbers: Sequence[int], columns: list[dict[str, Any]], shared: int
    ) -> list[str | None]:
        """Begins an episode for each completion of a round, and forgets those of other rounds. The
        texts [prompts] for the questions; None: no text.

        numbers: [b] of the completions. columns: [prompts] what the example of each holds. shared:
        how many completions have one question in common; they get the same random numbers in
        `reset`, and so the same task.
        """
        self._ask("begin_round", self._seed, round_number)
        texts = []
        for i, number in enumerate(numbers):
            first = i // shared * shared  # among the completions of the question
            text = self._ask("reset", number, numbers[first], columns[i // shared])
            if i == first:
                texts.append(text)
            elif text != texts[-1]:
                why = f"{texts[-1]!r:.80} and {text!r:.80}"
                raise UserMistake(f"{self._what}: reset gave one question two texts, {why}")
        return texts

    def answer(self, number: int, turn: int, text: str) -> list[int] | None:
        """The tokens between the policy's text of this turn, counted from 1, and what it draws
        next; None: the episode is over."""
        if self.tools:
            calls, role = tool_calls(text), "tool"
            texts = self._ask("use", number, turn, calls) if calls else []
        else:
            reply, role = self._ask("reply", number, turn, text), "user"
            texts = [] if reply is None else [reply]
        if not texts:
            return None
        _, behind = self._behind_answer([{"role": role, "content": text} for text in texts])
        return self._tokenizer(behind, add_special_tokens=False)["input_ids"]

    def get_reward(
        self, completions: list[str], environments: Sequence[int], **columns: list
    ) -> list[float | None]:
        """The rewards that the environments of the completions with these numbers give."""
        return [self._ask("get_reward", number) for number in environments]

    def _behind_answer(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """What the chat template writes behind an answer that these messages follow: the text of a
        stop token, and the rest."""
        answer = {"role": "assistant", "content": SENTINEL}
        behind = self._render([answer, *messages]).partition(SENTINEL)[2]
        for stop_text in self._stop_texts:
            if behind.startswith(stop_text):
                return stop_text, behind.removeprefix(stop_text)
        raise UserMistake(
            f"{self._what} needs a chat template that writes one of the stop tokens "
            f"{', '.join(self._stop_texts)} behind an answer, and it writes {behind!r:.40}; set "
            f"CHAT_TEMPLATE"
        )

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The text of a question and these messages, up to where the policy speaks."""
        chat = [{"role": "user", "content": "A question."}, *messages]
        try:
            return render_chats(self._tokenizer, [chat], self.tools)[0]
        except UserMistake as error:
            raise UserMistake(f"{self._what}: {error}; set CHAT_TEMPLATE") from None

    def _stop_if_unsuitable(self) -> None:
        """Raises UserMistake if the chat template does not know tools, or if it would write earlier
        turns in another way than the policy has drawn them."""
        start = self._render([])
        if self.tools and "<tool_call>" not in start:
            raise UserMistake(
                f"{self._what} has tools, and the chat template does not tell the model to call "
                f"them as <tool_call>; set CHAT_TEMPLATE, or give the class reply(self, text)"
            )
        opened = re.search(r"(<think>\s*)?\Z", start)[0]  # a tag that it writes for the policy
        turn, role = (CALL, "tool") if self.tools else (ANSWER, "user")
        messages = [{"role": role, "content": "Words."}] * (2 if self.tools else 1)
        dialogue = [{"role": "assistant", "content": turn}, *messages] * 2
        behind = "".join(self._behind_answer(messages)).removesuffix(opened)
        expected = start.removesuffix(opened) + (turn + behind) * 2
        if self._render(dialogue).removesuffix(opened) != expected:
            raise UserMistake(
                f"{self._what}: the chat template writes earlier turns in another way than the "
                f"model has written them (it may drop their <think> parts); set CHAT_TEMPLATE, for "
                f"Qwen3 to docs/qwen3_turns.jinja"
            )


def tool_calls(text: str) -> list[str]:
    """What stands within each closed <tool_call> of the text, but for thoughts: what a model writes
    within <think> is no call."""
    calls, at = [], 0
    while tag := THOUGHT_OR_CALL.search(text, at):
        at = tag.end()
        if tag[0].startswith("<tool_call>"):
            try:  # A text within the call's JSON may hold a closing tag.
                _, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):  # It is no JSON, or is nested too deeply.
                end = at
            if (close := text.find("</tool_call>", end)) == -1:
                break
            calls.append(text[at:close].strip())
            at = close
    return calls


# ---- The rounds of turns -------------------------------------------------------------------------


# Stands for the number of a place without a sequence. Results come in the order of the numbers, so
# that such places are the last ones.
NO_SEQUENCE = np.iinfo(np.int32).max


def begin_episodes(
    run: Run, prompts: list[data.Prompt], round_number: int, per_prompt: int
) -> list[data.Prompt]:
    """The prompts of all processes as the environment begins the episodes of their completions: the
    text that `reset` returns stands behind the question. Raises UserMistake."""
    if run.environments is None:
        return prompts
    numbers = local_part_of(range(len(prompts) * per_prompt))
    columns = [prompt.columns for prompt in local_part_of(prompts)]
    texts = run.environments.reset(round_number, numbers, columns, per_prompt)
    texts = [text for part in gather_texts(json.dumps(texts)) for text in json.loads(part)]
    examples = [
        prompt.columns | {"question": prompt.columns["question"] + (text or "")}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    model, tools = run.model, run.environments.tools
    begun = data.build_prompts(examples, run.tokenizer, run.system_prompt, tools, model.vocab_size)
    longest = max(len(prompt.ids) for prompt in begun)
    try:
        placement.stop_if_too_long(run.stopping.max_new_tokens, run.model, longest)
    except UserMistake as error:
        source = run.cfg.environment_class
        raise UserMistake(f"ENVIRONMENT_CLASS={source}, with the text of reset: {error}") from None
    pairs = zip(begun, prompts, strict=True)
    return [prompt._replace(columns=given.columns) for prompt, given in pairs]


def take_turns(
    run: Run,
    backend: Backend,
    prompts: list[data.Prompt],
    completions: Completions,
    key: jax.Array,
    sampling: Sampling,
    most: int,
) -> Completions:
    """The completions of this process's prompts after their later turns. A completion ends when its
    environment has nothing to say, after MAX_TURNS, or when it is full.

    most: sequences of a rollout pass of this process.
    """
    going = [*range(len(completions.lengths))]
    for turn in range(1, run.cfg.turns() + 1):
        going = [i for i in going if add_message(run, prompts, completions, i, turn)]
        earlier = [completions.completion_ids[i, : completions.lengths[i]].tolist() for i in going]
        of_prompts = [prompts[i * len(prompts) // len(completions.lengths)].ids for i in going]
        ids = [[*prompt, *tokens] for prompt, tokens in zip(of_prompts, earlier, strict=True)]
        # All processes compute the same number of passes, of the same shapes.
        sizes = np.array([[len(going), max(map(len, ids), default=1)]])
        count, longest = gather_processes(sizes).max(axis=0).tolist()
        if count == 0:
            break
        size = turn_sequences(count, most, jax.local_device_count())
        width = turn_width(longest, run.limits.longest_prompt + 1 + run.stopping.max_new_tokens)
        for first in range(0, count, size):
            run.stop.check()
            of_pass = going[first : first + size]
            # For an unused place no token is drawn, as if its completion were full.
            unused = size - len(of_pass)
            filled = ids[first : first + size] + [[run.stopping.pad_id]] * unused
            padded = data.pad_prompts(filled, width, run.stopping.pad_id)
            T = run.stopping.max_new_tokens
            numbers = np.append(completions.sequence_ids[of_pass], [NO_SEQUENCE] * unused)
            lengths = np.append(completions.lengths[of_pass], [T] * unused)
            numbers, lengths = numbers.astype(np.int32), lengths.astype(np.int32)
            drawn = backend.generate(*padded, numbers, key, sampling, lengths)
            for j, i in enumerate(of_pass):
                add_turn(completions, i, drawn, j)
    return completions


def add_message(
    run: Run, prompts: list[data.Prompt], completions: Completions, i: int, turn: int
) -> bool:
    """Whether completion i goes on after this turn: then it gets what its environment answers. A
    message that leaves no room for another token is cut, and ends the completion, which then counts
    as cut off, unless the stop token of its turn has taken the last place."""
    length, T = completions.lengths[i], run.stopping.max_new_tokens
    was_cut = completions.completion_ids[i, length - 1] not in run.stopping.stop_ids
    is_last = turn == run.cfg.turns()
    if was_cut or (is_last and run.environments.tools):  # Nobody would read what a tool answers.
        return False
    text = text_of(run, prompts, completions, i)
    ids = run.environments.answer(int(completions.sequence_ids[i]), turn, text)
    if ids is None or is_last:
        return False
    ids = ids[: T - length]
    completions.completion_ids[i, length : length + len(ids)] = ids
    completions.lengths[i] += len(ids)
    return completions.lengths[i] < T


def add_turn(completions: Completions, i: int, drawn: Completions, j: int) -> None:
    """Writes what was drawn in place j of a pass behind the tokens of completion i."""
    count = drawn.lengths[j]
    span = slice(completions.lengths[i], completions.lengths[i] + count)
    for name in Completions._fields:
        x, new = getattr(completions, name), getattr(drawn, name)
        if name == "sequence_ids" or x is None:
            continue
        if x.ndim > 1:  # of the tokens
            x[i, span] = new[j, :count]
        else:  # a sum over the tokens
            x[i] += new[j]
