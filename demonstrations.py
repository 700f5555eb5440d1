"""Demonstrations: the completions of a dataset as token ids, with a mask of those that are learnt.

The ChatFormat that renders prompts also renders conversations. Their texts are cut in front of each
turn of the assistant and behind the token that ends it, and tokenized piece by piece, because a
sampler continues the ids of its prompt. A turn is learnt with the token that ends it; the line
break behind this token is not learnt, since no sampler writes it.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import data
from data import ChatFormat, Example, Message
from infra.mistakes import UserMistake


class Demonstration(NamedTuple):
    """A data.Prompt with a completion to learn."""

    ids: list[int]  # of the prompt: all tokens in front of the first one that is learnt
    columns: Example
    completion_ids: list[int]
    completion_mask: list[int]  # 1 on the tokens that are learnt, 0 on those between the turns


def read_demonstration(
    place: str, columns: Mapping[str, Any], question: str, answer: str | None, *, completion: str
) -> Example:
    """The question and the answer of an example, as data.read_question_and_answer returns them, the
    messages of its `completion`, and its `place`: its file and number.

    completion: the column of a text, or of messages, that follow the question. "": the question's
    column has all messages, and the completion begins with the first message of the assistant. What
    follows the assistant's last message is left out. Raises UserMistake without such a message.
    """
    column = completion or question
    value = data.find_column(columns, column)
    messages = data.as_messages(value) or []
    if completion and value and not messages:
        messages = [{"role": "assistant", "content": value}]
    messages = data.read_messages(messages, f"{place}, column {column!r}")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserMistake(
            f"{place} has no message of the assistant in {column!r}, but {value!r:.80}; set "
            f"QUESTION_COLUMN to a column of conversations, or COMPLETION_COLUMN to one of "
            f"completions; its columns are {', '.join(columns)}"
        )
    first = 0 if completion else turns[0]
    if not completion:
        columns = {**columns, column: messages[:first]}
    texts = data.read_question_and_answer(place, columns, question, answer)
    name = place.rpartition("/")[2]  # without the folder, which may move while a run goes on
    return texts | {"completion": messages[first : turns[-1] + 1], "place": name}


def build_demonstrations(
    examples: list[Example], chat_format: ChatFormat, vocab_size: float = math.inf
) -> list[Demonstration]:
    """The demonstrations of examples that read_demonstration has read.

    vocab_size: rows of the model's embedding. Raises UserMistake, with the place of the example, if
    the chat template cannot write it, or if a token has no row.
    """
    end_id, tokenizer = data.end_of_turn_id(chat_format), chat_format.tokenizer
    end = tokenizer.eos_token if end_id is None else tokenizer.added_tokens_decoder[end_id].content
    if not end:
        why = "no token ends an answer, and the tokenizer has no EOS token, so that nothing would"
        raise UserMistake(f"MODEL_PATH (or CHAT_TEMPLATE): in its chat template {why}")
    chats = []
    for example in examples:
        completion = example["completion"]
        if end_id is None:  # a template for base models, without special tokens
            completion = [
                x | {"content": x["content"] + end} if x["role"] == "assistant" else x
                for x in completion
            ]
        chats.append(chat_format.messages_of(example) + completion)
    demonstrations = []
    for example, chat in zip(examples, data.checked_chats(chats, chat_format), strict=True):
        turns = sum(message["role"] == "assistant" for message in example["completion"])
        try:
            pieces = cut_at_turns(chat, chat_format)
            # Turns of the prompt, such as those of SYSTEM_PROMPT, are not learnt.
            texts = ["".join(pieces[:-turns])]
            for piece in pieces[-turns:]:
                turn, _, behind = piece.partition(end)
                texts += [turn + end, behind]
            ids, *parts = data.tokenize(texts[:-1], chat_format, vocab_size)
        except UserMistake as error:
            raise UserMistake(f"{example['place']}: {error}") from None
        mask = [1 - i % 2 for i, part in enumerate(parts) for _ in part]
        demonstrations.append(Demonstration(ids, example, sum(parts, []), mask))
    return demonstrations


def cut_at_turns(chat: list[Message], chat_format: ChatFormat) -> list[str]:
    """The text of the chat, cut where a turn of the assistant begins.

    A turn begins at the tag `{% generation %}` of the chat template or, without tags, where the
    prompt in front of it ends. Raises UserMistake if a template without tags writes the beginning
    of the chat otherwise when more messages follow.
    """
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    if data.GENERATION.search(chat_format.template()):
        [text] = chat_format.render([chat], add_generation_prompt=False, marked=True)
        pieces = text.split(data.TURN_MARK)
        if len(pieces) != len(turns) + 1:
            why = f"is around {len(pieces) - 1} of {len(turns)} turns of the assistant"
            raise UserMistake(f"{{% generation %}} of the chat template {why}")
        return pieces
    [text] = chat_format.render([chat], add_generation_prompt=False)
    starts = [0]
    for turn in turns:
        [prompt] = chat_format.render([chat[:turn]])
        [answered] = chat_format.render([chat[: turn + 1]], add_generation_prompt=False)
        if not (text.startswith(prompt) and text.startswith(answered)):
            raise UserMistake(
                f"the chat template writes the messages up to number {turn + 1} otherwise when "
                f"the assistant answers them or more messages follow, as templates do that drop "
                f"thoughts; give each example one turn, or CHAT_TEMPLATE one that keeps them"
            )
        starts.append(len(prompt))
    return [text[i:j] for i, j in itertools.pairwise([*starts, len(text)])]
