"""Demonstrations: completions of a dataset as token ids, with a mask of those that are learnt.

A demonstration is rendered by the ChatFormat that renders prompts, and its text is cut into pieces:
what stands in front of a turn of the assistant, the turn, what stands behind it, and so on. Each
piece is tokenized alone, because a sampler continues the ids of its prompt. The turns are learnt up
to and including the token that ends them. A line break behind that token is not learnt, since no
sampler writes it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import data
from data import ChatFormat, Example, Message
from infra.mistakes import UserMistake


class Demonstration(NamedTuple):
    """A data.Prompt with the completion that is learnt."""

    ids: list[int]  # of the prompt: all tokens in front of the first one that is learnt
    columns: Example
    completion_ids: list[int]  # up to the last one that is learnt
    completion_mask: list[int]  # 1 on the tokens that are learnt, 0 on those between the turns


def read_demonstration(
    place: str, columns: Mapping[str, Any], question: str, answer: str | None, *, completion: str
) -> Example:
    """The question and the answer of an example, as data.read_question_and_answer returns them, the
    messages of its `completion`, and its `place`.

    completion: the column of a text, or of messages, that follow the question. "": the question's
    column has all messages, and the completion begins with the first message of the assistant. What
    follows the assistant's last message is left out. Raises UserMistake without such a message.
    """
    column = completion or question
    value = data.find_column(columns, column)
    messages = [{"role": "assistant", "content": value}] if completion and value else []
    if isinstance(value, list):
        messages = value
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
    return texts | {"completion": messages[first : turns[-1] + 1], "place": place}


def build_demonstrations(
    examples: list[Example], chat_format: ChatFormat, vocab_size: float = math.inf
) -> list[Demonstration]:
    """The demonstration of each example of read_demonstration. vocab_size: rows of the model's
    embedding. Raises UserMistake if the chat template cannot write an example."""
    end_id = data.end_of_turn_id(chat_format)
    if end_id is None:
        why = "no token ends an answer, and a model that learns such answers would not stop"
        raise UserMistake(f"MODEL_PATH (or CHAT_TEMPLATE): in its chat template {why}")
    end = chat_format.tokenizer.added_tokens_decoder[end_id].content
    chats = [chat_format.messages_of(example) + example["completion"] for example in examples]
    demonstrations = []
    for example, chat in zip(examples, data.checked_chats(chats, chat_format), strict=True):
        turns = sum(message["role"] == "assistant" for message in example["completion"])
        try:
            pieces = split_at_turns(chat, chat_format)
            # Turns of the prompt, such as those of SYSTEM_PROMPT, are not learnt.
            first = len(pieces) - 2 * turns
            pieces = end_turns_at(end, ["".join(pieces[:first]), *pieces[first:]])
            ids, *parts = data.tokenize(pieces, chat_format, vocab_size)
        except UserMistake as error:
            raise UserMistake(f"{example['place']}: {error}") from None
        completion_ids = [token for part in parts[:-1] for token in part]
        mask = [1 - i % 2 for i, part in enumerate(parts[:-1]) for _ in part]
        demonstrations.append(Demonstration(ids, example, completion_ids, mask))
    return demonstrations


def split_at_turns(chat: list[Message], chat_format: ChatFormat) -> list[str]:
    """The text of the chat in pieces, of which every second one is a turn of the assistant.

    The turns are what the tags `{% generation %}` of the chat template enclose. Without tags a turn
    is what the template adds to the prompt in front of it. Raises UserMistake if a template without
    tags writes the beginning of a chat otherwise when more messages follow.
    """
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    if data.GENERATION.search(chat_format.template()):
        [text] = chat_format.render([chat], add_generation_prompt=False, marked=True)
        pieces = text.split(data.TURN_MARK)
        if len(pieces) != 2 * len(turns) + 1:
            why = f"encloses {len(pieces) // 2} of {len(turns)} turns of the assistant"
            raise UserMistake(f"{{% generation %}} of the chat template {why}")
        return pieces
    [text] = chat_format.render([chat], add_generation_prompt=False)
    pieces, place = [], 0
    for turn in turns:
        [prompt] = chat_format.render([chat[:turn]])
        [answered] = chat_format.render([chat[: turn + 1]], add_generation_prompt=False)
        if not (text.startswith(prompt) and text.startswith(answered)):
            raise UserMistake(
                f"the chat template writes the messages up to number {turn + 1} otherwise when "
                f"the assistant answers them or more messages follow, as templates do that drop "
                f"thoughts; give each example one turn, or CHAT_TEMPLATE one that keeps them"
            )
        pieces += [text[place : len(prompt)], text[len(prompt) : len(answered)]]
        place = len(answered)
    return [*pieces, text[place:]]


def end_turns_at(end: str, pieces: list[str]) -> list[str]:
    """The pieces in which each turn ends with `end`, the text of the token that ends a turn. Tags
    may enclose it or not. Raises UserMistake if a turn has no such end."""
    for i in range(1, len(pieces), 2):
        turn, behind = pieces[i : i + 2]
        if end in turn:
            length = turn.rindex(end) + len(end)
        elif behind.lstrip().startswith(end):
            length = len(turn) + behind.index(end) + len(end)
        else:
            raise UserMistake(f"the chat template does not end a turn with {end}")
        pieces[i : i + 2] = (turn + behind)[:length], (turn + behind)[length:]
    return pieces


def drop_long_demonstrations(
    demonstrations: list[Demonstration], limit: int, positions: int, split: str
) -> list[Demonstration]:
    """The demonstrations whose completions have at most `limit` tokens, and prints how many are
    longer. positions: of the model. split: its name in messages. Raises UserMistake if none is
    left, and for one that is longer than the model's positions."""
    kept = [x for x in demonstrations if len(x.completion_ids) <= limit]
    dropped = f"{len(demonstrations) - len(kept)} of {len(demonstrations)} {split} completions"
    if not kept:
        raise UserMistake(f"MAX_LENGTH_SAMPLE={limit}: {dropped} are longer; raise it")
    if len(kept) < len(demonstrations):
        print(f"skipped {dropped}: longer than MAX_LENGTH_SAMPLE={limit} tokens", flush=True)
    for x in kept:
        if (length := len(x.ids) + len(x.completion_ids)) > positions:
            raise UserMistake(
                f"{x.columns['place']} has {length} tokens, and the model has {positions} "
                f"positions; lower MAX_LENGTH_SAMPLE or set MAX_PROMPT_LENGTH"
            )
    return kept
