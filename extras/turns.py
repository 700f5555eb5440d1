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
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import data
from infra.hosts import gather_texts
from infra.mistakes import UserMistake
from infra.reward_worker import LOADING_S, RewardWorker
from infra.sizes import turn_batch_size, turn_width
from model.layout import gather_processes
from model.next_token import Sampling
from model.placement import raise_if_too_long
from rollout import Rollout, slice_of_process, text_of
from sampling import Backend, Completions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The number of a place without a sequence. Results are ordered by the sequences' numbers, so that
# such places come last.
NO_SEQUENCE = np.iinfo(np.int32).max
THOUGHT_OR_CALL = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)
# Turns of a policy that thinks before it answers or calls a tool.
ANSWER = "<think>\nA thought.\n</think>\n\nAn answer."
CALL = '<think>\nA thought.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Environments:
    """The environments of a run: they live in the reward worker, and speak through the model's chat
    template."""

    def __init__(
        self,
        source: str,
        worker: RewardWorker,
        tokenizer: "PreTrainedTokenizerBase",
        stop_ids: Sequence[int],
        seed: int,
    ) -> None:
        """source: "file.py:Class". Raises UserMistake if the class cannot be an environment, or if
        the chat template cannot hold several turns."""
        self._source, self._label = source, f"ENVIRONMENT_CLASS {source}"  # in messages
        self._worker, self._tokenizer, self._seed = worker, tokenizer, seed
        self._stop_texts = [tokenizer.decode([i]) for i in stop_ids]
        name = source.rpartition(":")[2]
        described = json.loads(worker.ask(self._label, "open", name, more_s=LOADING_S))
        self.tools: list[dict[str, Any]] = described["tools"]  # as chat templates take them
        self.has_reward: bool = described["has_reward"]
        self._raise_if_unsuitable()

    def _ask(self, request: str, *arguments: Any) -> Any:
        return self._worker.ask(self._label, request, *arguments)

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
                raise UserMistake(f"{self._label}: reset gave one question two texts, {why}")
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
        answer = {"role": "assistant", "content": data.SENTINEL}
        behind = self._render([answer, *messages]).partition(data.SENTINEL)[2]
        for stop_text in self._stop_texts:
            if behind.startswith(stop_text):
                return stop_text, behind.removeprefix(stop_text)
        raise UserMistake(
            f"{self._label} needs a chat template that writes one of the stop tokens "
            f"{', '.join(self._stop_texts)} behind an answer, and it writes {behind!r:.40}; set "
            f"CHAT_TEMPLATE"
        )

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The text of a question and these messages, up to where the policy speaks."""
        chat = [{"role": "user", "content": "A question."}, *messages]
        try:
            return data.render_chats(self._tokenizer, [chat], self.tools)[0]
        except UserMistake as error:
            raise UserMistake(f"{self._label}: {error}; set CHAT_TEMPLATE") from None

    def _raise_if_unsuitable(self) -> None:
        """Raises UserMistake if the chat template does not know tools, or if it would write earlier
        turns in another way than the policy has drawn them."""
        start = self._render([])
        if self.tools and "<tool_call>" not in start:
            raise UserMistake(
                f"{self._label} has tools, and the chat template does not tell the model to call "
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
                f"{self._label}: the chat template writes earlier turns in another way than the "
                f"model has written them (it may drop their <think> parts); set CHAT_TEMPLATE, for "
                f"Qwen3 to docs/qwen3_turns.jinja"
            )

    # ---- Rounds of turns -------------------------------------------------------------------------

    def begin_episodes(
        self,
        rollout: Rollout,
        prompts: list[data.Prompt],
        round_number: int,
        completions_per_prompt: int,
    ) -> list[data.Prompt]:
        """The prompts of all processes with the text that `reset` returns behind the question.
        Raises UserMistake.

        round_number: of training from 1 on; that of evaluations is 0.
        """
        model = rollout.compute.model
        sequence_ids = slice_of_process(range(len(prompts) * completions_per_prompt))
        columns = [prompt.columns for prompt in slice_of_process(prompts)]
        local_texts = self.reset(round_number, sequence_ids, columns, completions_per_prompt)
        texts = [
            text for part in gather_texts(json.dumps(local_texts)) for text in json.loads(part)
        ]
        examples = [
            prompt.columns | {"question": prompt.columns["question"] + (text or "")}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        begun = data.build_prompts(
            examples, rollout.tokenizer, rollout.system_prompt, self.tools, model.vocab_size
        )
        longest = max(len(prompt.ids) for prompt in begun)
        try:
            raise_if_too_long(rollout.stopping.max_length_sample, model, longest)
        except UserMistake as error:
            raise UserMistake(
                f"ENVIRONMENT_CLASS={self._source}, with the text of reset: {error}"
            ) from None
        pairs = zip(begun, prompts, strict=True)
        return [prompt._replace(columns=dataset.columns) for prompt, dataset in pairs]

    def take_turns(
        self,
        rollout: Rollout,
        backend: Backend,
        prompts: list[data.Prompt],
        completions: Completions,
        key: jax.Array,
        sampling: Sampling,
        sequences_per_pass: int,
    ) -> Completions:
        """The completions of this process's prompts after their later turns. A completion ends when
        its environment has no answer, after MAX_TURNS, or when it is full.

        sequences_per_pass: the most sequences of a rollout pass of this process.
        """
        pad_id, T = rollout.stopping.pad_id, rollout.stopping.max_length_sample
        unfinished = [*range(len(completions.lengths))]
        for turn in range(1, rollout.max_turns + 1):
            unfinished = [
                i for i in unfinished if self._add_message(rollout, prompts, completions, i, turn)
            ]
            ids = []  # of each unfinished sequence: its prompt and its completion so far
            for i in unfinished:
                prompt = prompts[i * len(prompts) // len(completions.lengths)]
                drawn_ids = completions.completion_ids[i, : completions.lengths[i]].tolist()
                ids.append([*prompt.ids, *drawn_ids])
            # All processes compute the same number of passes, of the same shapes.
            sizes = np.array([[len(unfinished), max(map(len, ids), default=1)]])
            count, longest = gather_processes(sizes).max(axis=0).tolist()
            if count == 0:
                break
            size = turn_batch_size(count, sequences_per_pass, jax.local_device_count())
            width = turn_width(longest, rollout.max_prompt_width + T)
            for start in range(0, count, size):
                rollout.stop.raise_if_stopped()
                of_pass = unfinished[start : start + size]
                # In a place without a sequence no token is drawn, as if its completion were full.
                unused = size - len(of_pass)
                filled = ids[start : start + size] + [[pad_id]] * unused
                prompt_ids, prompt_mask = data.pad_prompts(filled, width, pad_id)
                sequence_ids = np.append(completions.sequence_ids[of_pass], [NO_SEQUENCE] * unused)
                lengths = np.append(completions.lengths[of_pass], [T] * unused)
                drawn = backend.generate(
                    prompt_ids,
                    prompt_mask,
                    sequence_ids.astype(np.int32),
                    key,
                    sampling,
                    lengths.astype(np.int32),
                )
                for j, i in enumerate(of_pass):
                    append_turn(completions, i, drawn, j)
        return completions

    def _add_message(
        self,
        rollout: Rollout,
        prompts: list[data.Prompt],
        completions: Completions,
        i: int,
        turn: int,
    ) -> bool:
        """Appends the environment's answer to completion i after this turn; whether the completion
        goes on. A message that leaves no room for another token is cut and ends the completion,
        which then counts as cut off, unless its turn's stop token has taken the last place."""
        length, T = completions.lengths[i], rollout.stopping.max_length_sample
        was_cut = completions.completion_ids[i, length - 1] not in rollout.stopping.stop_ids
        is_last = turn == rollout.max_turns
        if was_cut or (is_last and self.tools):  # Nobody would read the answer of a tool.
            return False
        text = text_of(rollout, prompts, completions, i)
        ids = self.answer(int(completions.sequence_ids[i]), turn, text)
        if ids is None or is_last:
            return False
        ids = ids[: T - length]
        completions.completion_ids[i, length : length + len(ids)] = ids
        completions.lengths[i] += len(ids)
        return completions.lengths[i] < T


def append_turn(completions: Completions, i: int, drawn: Completions, j: int) -> None:
    """Appends sequence j of a pass to completion i."""
    length = drawn.lengths[j]
    span = slice(completions.lengths[i], completions.lengths[i] + length)
    for name in Completions._fields:
        x, new = getattr(completions, name), getattr(drawn, name)
        if name == "sequence_ids" or x is None:
            continue
        if x.ndim > 1:  # of the tokens
            x[i, span] = new[j, :length]
        else:  # a sum over the tokens
            x[i] += new[j]


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
