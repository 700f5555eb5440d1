"""Turns: what the environments of ENVIRONMENT_CLASS say to the policy, as token ids.

An environment is an object of a user's class, one for each completion. It begins an episode with
`reset(**columns)`. Then it either answers each text of the policy with `reply(text)`, or it has
tools, its other public methods, which the policy calls in the form `<tool_call>{json}</tool_call>`.
docs/turns.md describes the class. The objects live in a reward worker (runtime/reward_worker.py).

A completion is what the policy draws, then the environment's message with the markers of the chat
template, then what the policy draws next, and so on. Tokens that were drawn are never tokenized
again.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from data import SENTINEL, render_chats
from runtime.mistakes import UserMistake
from runtime.reward_worker import LOADING_S, RewardWorker

EVALUATION = 0  # the number of its round; those of training are counted from 1
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
