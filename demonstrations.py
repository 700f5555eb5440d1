"""Demonstrations: the completions of a dataset as token ids, with a mask of those to train on.

The ChatFormat that renders prompts also renders conversations. A turn of the assistant begins where
the prompt of the messages before it ends, and reaches to the token that ends it. A prompt is
tokenized without the turn after it, because a sampler continues the ids of its prompt. The line
break after a turn is not trained on, because no sampler writes it.
"""

import itertools
import math
import os

from chat import ChatFormat, Example, Message, checked_chats, end_of_turn_id
from data import Prompt, tokenize
from infra.log import progress_bar
from infra.mistakes import UserMistake


def build_demonstrations(
    examples: list[Example], chat_format: ChatFormat, vocab_size: float = math.inf
) -> list[Prompt]:
    """The demonstrations of examples that have `completions`, see data.load_examples.

    vocab_size: rows of the model's embedding. Raises UserMistake, with the example, if
    the chat template cannot write it, or if a token has no row.
    """
    end_id, tokenizer = end_of_turn_id(chat_format), chat_format.tokenizer
    end = tokenizer.eos_token if end_id is None else tokenizer.added_tokens_decoder[end_id].content
    if not end:
        reason = "its chat template ends answers with no token, and the tokenizer has no EOS token"
        raise UserMistake(f"MODEL_PATH (or CHAT_TEMPLATE): {reason}; set another CHAT_TEMPLATE")
    demonstrations = []
    with progress_bar("tokenizing", len(examples), "demonstrations") as bar:
        for example in examples:
            columns = {**example}
            completion, source = columns.pop("completions")
            # Turns of the prompt, such as those of SYSTEM_PROMPT, are not trained on.
            turns = sum(message["role"] == "assistant" for message in completion)
            chat = chat_format.messages_of(columns) + completion
            try:
                [chat] = checked_chats([chat], chat_format)
                pieces = cut_out_turns(chat, turns, chat_format, end, is_written=end_id is not None)
                ids, *parts = tokenize_pieces(pieces, chat_format, vocab_size)
            except UserMistake as error:
                raise UserMistake(f"{source}: {error}") from None
            mask = [1 - i % 2 for i, part in enumerate(parts) for _ in part]
            demonstrations.append(Prompt(ids, columns, sum(parts, []), mask, source))
            bar.update()
    return demonstrations


def cut_out_turns(
    chat: list[Message], count: int, chat_format: ChatFormat, end: str, is_written: bool
) -> list[str]:
    """The text of the chat in pieces: its last `count` turns of the assistant, each with the token
    that ends it, and the text before each of them.

    end: this token. is_written: whether the template writes it; if not, it is added to each turn.
    Raises UserMistake if a turn has no text, or does not have this token exactly once, or if the
    template writes messages differently when more of them follow.
    """
    [text] = chat_format.render([chat], add_generation_prompt=False)
    pieces, begin = [], 0
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"][-count:]
    for number, i in enumerate(turns, start=1):
        [prompt] = chat_format.render([chat[:i]])
        [answered] = chat_format.render([chat[: i + 1]], add_generation_prompt=False)
        turn = answered.removeprefix(prompt)
        turn = turn if is_written else turn.rstrip() + end
        name = f"turn {number} of the assistant"
        if answered.startswith(prompt) and turn.count(end) != 1:
            count = turn.count(end)
            reason = "but a turn of the assistant must have it once, at its end"
            raise UserMistake(f"{name} has the token {end!r} {count} times, {reason}")
        if not turn.partition(end)[0].strip():
            raise UserMistake(f"{name} has no text; leave the example out")
        if chat[i].get("weight") == 0:  # in data for OpenAI's fine-tuning
            raise UserMistake(f"{name} has the weight 0, but all are trained on; drop the example")
        # Phi-3's template writes one more token after the turn, unless messages follow.
        turn = turn.partition(end)[0]
        written = prompt + turn + end * is_written
        if not text.startswith(written):
            one, other, places = written, text, ("at the end", "before further messages")
            remedy = "give each example one turn, or set CHAT_TEMPLATE to one such as"
            if not answered.startswith(prompt):
                one, other, places = prompt, answered, ("in a prompt", "in a conversation")
                remedy = "change CHAT_TEMPLATE_KWARGS or the thoughts, or set CHAT_TEMPLATE to"
            same = len(os.path.commonprefix([one, other]).rstrip("<"))
            raise UserMistake(
                f"the chat template writes {name} or the messages before it as "
                f"{one[same:]!r:.40} {places[0]} and {other[same:]!r:.40} {places[1]}; "
                f"{remedy} docs/qwen3_turns.jinja"
            )
        pieces += [text[begin : len(prompt)], turn + end]
        begin = len(written)
    return pieces


def tokenize_pieces(
    pieces: list[str], chat_format: ChatFormat, vocab_size: float
) -> list[list[int]]:
    """The ids of each piece as a sampler would continue the ids of the piece before it.

    Tokenizers such as Llama 2's write a space before a text, but none inside. Where a token
    would cross the border of two pieces, each of them is tokenized by itself.
    """
    separate = tokenize(pieces, chat_format, vocab_size)
    pairs = [a + b for a, b in itertools.pairwise(pieces)]
    ids = separate[:1]
    for first, second, both in zip(
        separate[:-1], separate[1:], tokenize(pairs, chat_format, vocab_size), strict=True
    ):
        continues = both[: len(first)] == first
        ids.append(both[len(first) :] if continues else second)
    return ids
