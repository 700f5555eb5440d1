"""Multi-turn completions: the policy and an environment of ENVIRONMENT_CLASS take turns.

An environment is an object of a user's class; each completion has its own. `reset(**columns)`
begins an episode. Then the environment either answers each text of the policy with `reply(text)`,
or its other public methods are tools, which the policy calls by `<tool_call>`, see parse_call.
docs/turns.md describes the class. The objects live in a reward worker (infra/reward_worker.py).

A completion consists of the tokens that the policy draws in its first turn, the tokens of the
environment's message with the markers of the chat template, the tokens of the policy's second turn,
and so on. Tokens that the policy has sampled are never decoded and tokenized again.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import data
from chat import SENTINEL, ChatFormat, Message, completion_text, token_text
from contracts import Pass
from infra.hosts import gather_texts
from infra.mistakes import UserMistake, naming
from infra.reward_worker import LOADING_S, RewardWorker, parse_call
from infra.sizes import turn_batch_size, turn_width
from model.layout import gather_processes, slice_of_process
from model.params import ModelConfig
from model.placement import raise_if_too_long
from sampling import Completions, Stopping

# The sequence_id of an unused slot in a pass. A pass returns its sequences in the order of their
# sequence_ids, so unused slots come last.
NO_SEQUENCE = np.iinfo(np.int32).max
THOUGHT_OR_CALL = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)
FORM_OF_CALL = re.compile(r"<tool_call>\s*(\{|<function=)")
# Examples of a turn in which the policy thinks and then answers, or calls a tool in either form.
THOUGHT = "<think>\nA thought.\n</think>\n\n"
ANSWER = THOUGHT + "An answer."
JSON_CALL = THOUGHT + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
XML_CALL = THOUGHT + "<tool_call>\n<function=f>\n</function>\n</tool_call>"


class TurnEnvironments:
    """The environments of a run. Their messages become token ids by the model's chat template."""

    def __init__(
        self,
        source: str,
        worker: RewardWorker,
        chat_format: ChatFormat,
        stop_ids: Sequence[int],
        seed: int,
    ) -> None:
        """source: "file.py:Class". Raises UserMistake if the class cannot be an environment, or if
        the chat template cannot hold several turns."""
        self._source, self._label = source, f"ENVIRONMENT_CLASS {source}"  # names it in errors
        self._worker, self._seed = worker, seed
        self._stop_texts = [token_text([i], chat_format.tokenizer) for i in stop_ids]
        tokens = chat_format.tokenizer.added_tokens_decoder.values()
        special = "|".join(re.escape(token.content) for token in tokens if token.special)
        self._special_token = re.compile(special or "(?!)")
        name = source.rpartition(":")[2]
        described = json.loads(worker.ask(self._label, "open", name, more_s=LOADING_S))
        self.chat_format = chat_format._replace(tools=described["tools"])
        self.has_reward: bool = described["has_reward"]
        self._is_concurrent: bool = described["is_concurrent"]
        self.teacher: tuple[str, ModelConfig] | None = None
        self._raise_if_unsuitable()

    def _ask(self, request: str, *arguments: Any) -> Any:
        return self._worker.ask(self._label, request, *arguments)

    def _ask_for_each(self, request: str, arguments: list[list]) -> list[Any]:
        """The replies to a request for several completions, one request after the other or, if the
        class is concurrent, all of them at the same time. arguments: those of each completion."""
        if self._is_concurrent and arguments:
            return self._ask("run_in_threads", request, arguments)
        return [self._ask(request, *values) for values in arguments]

    def reset(
        self,
        round_number: int,
        sequence_ids: Sequence[int],
        examples: list[dict[str, Any]],
        completions_per_prompt: int,
    ) -> list[str | None]:
        """Begins an episode for each completion of a round, and forgets those of earlier rounds.
        Returns the text that `reset` adds to the question of each example; None: no text.

        sequence_ids: of the completions. examples: the columns of each prompt. The completions of
        a prompt get the same random numbers in `reset`, and so the same task.
        """
        self._ask("begin_round", self._seed, round_number)
        K = completions_per_prompt
        arguments = [  # sequence_ids[i // K * K] is the first completion of the prompt
            [sequence_id, sequence_ids[i // K * K], examples[i // K]]
            for i, sequence_id in enumerate(sequence_ids)
        ]
        texts = self._ask_for_each("reset", arguments)
        for i, text in enumerate(texts):
            if text != (first := texts[i // K * K]):
                reason = f"{first!r:.80} and {text!r:.80}"
                raise UserMistake(f"{self._label}: reset gave one prompt different texts, {reason}")
        return texts[::K]

    def answers(
        self, sequence_ids: Sequence[int], turn: int, texts: list[str]
    ) -> list[list[int] | None]:
        """The token ids of the environment's message to the text of each completion, with the
        markers of the chat template; None: the episode is over. turn: the index of the policy's
        turn, from 1."""
        has_tools = bool(self.chat_format.tools)
        requests = [*map(tool_calls, texts)] if has_tools else texts
        arguments = [[i, turn, x] for i, x in zip(sequence_ids, requests, strict=True)]
        replies = self._ask_for_each("use" if has_tools else "reply", arguments)
        return [self._message_ids(reply if has_tools else [reply]) for reply in replies]

    def _message_ids(self, texts: list[str] | list[None]) -> list[int] | None:
        """The token ids of messages with these texts after an answer of the policy; None without
        a text. A special token in a text is tokenized as the characters that spell it."""
        texts = [text for text in texts if text is not None]
        if not texts:
            return None
        role = "tool" if self.chat_format.tools else "user"
        tokens, numbers = self._special_token.findall("\n".join(texts)), itertools.count()
        contents = [
            self._special_token.sub(lambda _: f"{SENTINEL}{next(numbers)};", text) for text in texts
        ]
        _, message = self._text_after_answer([{"role": role, "content": x} for x in contents])
        first, *parts = re.split(rf"{re.escape(SENTINEL)}(\d+);", message)
        ids = self._encode(first)
        for number, part in zip(parts[::2], parts[1::2], strict=True):
            ids += self._encode(tokens[int(number)], split_special_tokens=True)
            ids += self._encode(part)
        return ids

    def _encode(self, text: str, **options: bool) -> list[int]:
        return self.chat_format.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def get_reward(
        self, completions: list[str], environments: Sequence[int], **columns: list
    ) -> list[float | None]:
        """The rewards that the environments give. environments: the sequence_ids of completions."""
        return self._ask_for_each("get_reward", [[sequence_id] for sequence_id in environments])

    def _text_after_answer(self, messages: list[Message]) -> tuple[str, str]:
        """The text that the chat template writes after an answer of the policy if these messages
        follow it: the stop token of the answer, and the rest."""
        answer = {"role": "assistant", "content": SENTINEL}
        text = self._render([answer, *messages]).partition(SENTINEL)[2]
        for stop_text in self._stop_texts:
            if text.startswith(stop_text):
                return stop_text, text.removeprefix(stop_text)
        raise UserMistake(
            f"{self._label} needs a chat template that writes one of the stop tokens "
            f"{', '.join(self._stop_texts)} after an answer, and it writes {text!r:.40}; set "
            f"CHAT_TEMPLATE"
        )

    def _render(self, messages: list[Message]) -> str:
        """The text of a question and these messages, with the beginning of the policy's turn."""
        chat = [{"role": "user", "content": "A question."}, *messages]
        try:
            return self.chat_format.render([chat])[0]
        except UserMistake as error:
            raise UserMistake(f"{self._label}: {error}; set CHAT_TEMPLATE") from None

    def _raise_if_unsuitable(self) -> None:
        """Raises UserMistake if the chat template does not describe tools to the model, or if it
        renders earlier turns with other tokens than the policy has sampled."""
        start, has_tools = self._render([]), bool(self.chat_format.tools)
        think_tag = "".join(re.findall(r"<think>\s*\Z", start))  # opened by the template, or ""
        turn, role = (self._turn_with_call(start), "tool") if has_tools else (ANSWER, "user")
        messages = [{"role": role, "content": "Words."}] * (2 if has_tools else 1)
        dialogue = [{"role": "assistant", "content": turn}, *messages] * 2
        after_turn = "".join(self._text_after_answer(messages)).removesuffix(think_tag)
        expected = start.removesuffix(think_tag) + (turn + after_turn) * 2
        if self._render(dialogue).removesuffix(think_tag) != expected:
            raise UserMistake(
                f"{self._label}: the chat template writes earlier turns in another way than the "
                f"model has written them (it may drop their <think> parts); set CHAT_TEMPLATE, for "
                f"Qwen3 to docs/qwen3_turns.jinja"
            )

    def _turn_with_call(self, start: str) -> str:
        """JSON_CALL or XML_CALL, as the chat template writes a call or, if it writes none, as it
        describes calls at the start of a dialogue. Raises UserMistake if the form is neither."""
        function = {"name": "f_of_x", "arguments": {"x": "1"}}
        call = {"type": "function", "function": function}
        try:
            text = self._render([{"role": "assistant", "content": "", "tool_calls": [call]}])
        except UserMistake:  # no run renders such a message
            text = start
        same = re.sub(r"<[^<>]*\Z", "", os.path.commonprefix([text, start]))  # whole tags
        written = text.removeprefix(same)
        written = written if "f_of_x" in written else ""
        form = FORM_OF_CALL.search(written or start) if "<tool_call>" in start else None
        calls = [parse_call(x) for x in tool_calls(written)] if form else []
        if not form or (written and calls != [(*function.values(),)]):
            instead = f"; it writes {written.strip()!r:.120}" if written else ""
            raise UserMistake(
                f"{self._label} has tools, and the chat template does not tell the model to call "
                f"them as <tool_call> with JSON or <function=NAME>{instead}; set CHAT_TEMPLATE, "
                f"or give the class reply(self, text)"
            )
        return XML_CALL if form[1] == "<function=" else JSON_CALL

    # ---- Rounds of turns -------------------------------------------------------------------------

    def begin_episodes(
        self,
        prompts: list[data.Prompt],
        round_number: int,
        completions_per_prompt: int,
        model: ModelConfig,
        max_length_sample: int,
    ) -> list[data.Prompt]:
        """Begins the episodes of a round. Returns the prompts of all processes, with the texts of
        `reset` after the questions. Raises UserMistake.

        round_number: from 1 on in training, 0 in evaluations.
        """
        sequence_ids = slice_of_process(range(len(prompts) * completions_per_prompt))
        local_examples = [prompt.columns for prompt in slice_of_process(prompts)]
        local_texts = self.reset(round_number, sequence_ids, local_examples, completions_per_prompt)
        parts = gather_texts(json.dumps(local_texts))  # of all processes
        texts = [text for part in parts for text in json.loads(part)]
        examples = [
            data.append_to_question(prompt.columns, text or "")
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        new_prompts = data.build_prompts(examples, self.chat_format, model.vocab_size)
        longest = max(len(prompt.ids) for prompt in new_prompts)
        try:
            raise_if_too_long(max_length_sample, model, longest)
            if self.teacher and round_number:  # it judges no evaluation
                path, model = self.teacher
                with naming("TEACHER_PATH", path):
                    raise_if_too_long(max_length_sample, model, longest)
        except UserMistake as error:
            raise UserMistake(
                f"ENVIRONMENT_CLASS={self._source}, with the text of reset: {error}"
            ) from None
        # Rewards get the question as the dataset has it.
        pairs = zip(new_prompts, prompts, strict=True)
        return [new_prompt._replace(columns=prompt.columns) for new_prompt, prompt in pairs]

    def take_turns(
        self,
        run_pass: Pass,
        prompts: Sequence[data.Prompt],
        completions: Completions,
        sequences_per_pass: int,
        *,
        stopping: Stopping,
        max_turns: int,
        max_prompt_width: int,
    ) -> Completions:
        """Adds the later turns to completions that have their first turn, and returns them. A
        completion ends if its environment has no answer, after MAX_TURNS, or with T tokens.

        prompts: of this process. sequences_per_pass: the most sequences of a pass on this process.
        """
        pad_id, T = stopping.pad_id, stopping.max_length_sample
        unfinished = [*range(len(completions.lengths))]
        for turn in range(1, max_turns + 1):
            unfinished = self._add_messages(
                prompts, completions, unfinished, turn, max_turns, stopping
            )
            ids = []  # the prompt and the completion so far, of each unfinished sequence
            for i in unfinished:
                prompt = prompts[i * len(prompts) // len(completions.lengths)]
                completion = completions.completion_ids[i, : completions.lengths[i]].tolist()
                ids.append([*prompt.ids, *completion])
            # All processes run the same number of passes, with the same shapes.
            sizes = np.array([[len(unfinished), max(map(len, ids), default=1)]])
            count, longest = gather_processes(sizes).max(axis=0).tolist()
            if count == 0:
                break
            size = turn_batch_size(count, sequences_per_pass, jax.local_device_count())
            width = turn_width(longest, max_prompt_width + T)
            for start in range(0, count, size):
                members = unfinished[start : start + size]
                # An unused slot gets the length T, so that no token is sampled for it.
                unused = size - len(members)
                filled = ids[start : start + size] + [[pad_id]] * unused
                sequence_ids = np.append(completions.sequence_ids[members], [NO_SEQUENCE] * unused)
                sequence_ids = sequence_ids.astype(np.int32)
                lengths = np.append(completions.lengths[members], [T] * unused).astype(np.int32)
                turns = run_pass(filled, width, sequence_ids, lengths)
                for j, i in enumerate(members):
                    append_turn(completions, i, turns, j)
        return completions

    def _add_messages(
        self,
        prompts: Sequence[data.Prompt],
        completions: Completions,
        unfinished: list[int],
        turn: int,
        max_turns: int,
        stopping: Stopping,
    ) -> list[int]:
        """Appends the environment's answers to this turn of the unfinished completions. Returns
        those that continue.

        A message that leaves no room for another token is cut and ends the completion. It then
        counts as cut off, unless the stop token of the turn is already its last token.
        """
        lengths, T = completions.lengths, stopping.max_length_sample
        is_last = turn == max_turns
        if is_last and self.chat_format.tools:  # The policy could not read the answer of a tool.
            return []
        last_ids = completions.completion_ids[unfinished, lengths[unfinished] - 1]
        has_stopped = np.isin(last_ids, stopping.stop_ids)  # else the turn was cut off
        stopped = [i for i, x in zip(unfinished, has_stopped, strict=True) if x]
        sequence_ids = completions.sequence_ids[stopped].tolist()
        K, arguments = len(lengths) // len(prompts), (self.chat_format.tokenizer, stopping.stop_ids)
        ids, mask = completions.completion_ids, completions.sampled_mask
        texts = [
            completion_text(prompts[i // K].ids, ids[i], mask[i], lengths[i], *arguments)
            for i in stopped
        ]
        messages = self.answers(sequence_ids, turn, texts)
        if is_last:
            return []
        going_on = []
        for i, message in zip(stopped, messages, strict=True):
            if message is None:
                continue
            message = message[: T - lengths[i]]
            ids[i, lengths[i] : lengths[i] + len(message)] = message
            lengths[i] += len(message)
            if lengths[i] < T:
                going_on.append(i)
        return going_on


def append_turn(completions: Completions, i: int, turns: Completions, j: int) -> None:
    """Appends turn j of a pass to completion i."""
    length = turns.lengths[j]
    span = slice(completions.lengths[i], completions.lengths[i] + length)
    for name in Completions._fields:
        x, new = getattr(completions, name), getattr(turns, name)
        if name == "sequence_ids" or x is None:
            continue
        if x.ndim > 1:  # an array with a value for each token
            x[i, span] = new[j, :length]
        else:  # a sum over tokens
            x[i] += new[j]


def tool_calls(text: str) -> list[str]:
    """The contents of the <tool_call> tags of a text. Tags within <think> are no calls. A complete
    call whose closing tag is missing has its opening tag, and parse_call names what is missing."""
    calls, at = [], 0
    while tag := THOUGHT_OR_CALL.search(text, at):
        at = end = tag.end()
        if tag[0].startswith("<tool_call>"):
            if text.startswith("<function=", at):
                end = max(at, text.find("</function>", at))
            elif text.startswith("{", at):
                with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested deeply
                    # A string in the call's JSON may contain a closing tag.
                    _, end = json.JSONDecoder().raw_decode(text, at)
            if (close := text.find("</tool_call>", end)) == -1:
                calls += [tag[0] + text[at:].strip()] if end > at else []
                break
            calls.append(text[at:close].strip())
            at = close
    return calls
