"""Chats: messages, the chat template that writes them as text, and checks of both.

A prompt is the text of its messages up to where the assistant begins to speak. A chat template may
drop, change or refuse what it is given, so each use is compared with what it has written.
"""

import contextlib
import itertools
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import jinja2.meta
import numpy as np

from infra.mistakes import UserMistake, reading
from infra.settings import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A chat template that prints today's date prints this date, because prompts must not change at
# midnight. It is the date that Llama 3.2's template prints by default.
DATE = datetime(2024, 7, 26)
DATE_CODES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBdmyYHMSpj"))
# Prepended to a template, it replaces the function that returns today's date.
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{code}', '{DATE.strftime(code)}')" for code in DATE_CODES)
    + " }}{% endmacro %}\n"
)
SENTINEL = "A text that is nowhere else."
# Tags around thoughts, which a chat template may write before an answer that has none.
THINK_TAGS = re.compile(r"[<\[]/?[\w:|]*(?:think|thought|reason)[\w:|]*[>\]]", re.IGNORECASE)
_TAIL = 16  # A tag and the white space after it have fewer tokens than this.
# The arguments and functions that transformers and this file give to every chat template.
GIVEN_TO_TEMPLATES = {"messages", "tools", "documents", "add_generation_prompt"}
GIVEN_TO_TEMPLATES |= {"raise_exception", "strftime_now"}
LONG_THOUGHT = 4096  # tokens; a lower MAX_LENGTH_SAMPLE truncates most answers of reasoning models

Example = dict[str, Any]  # the columns of an example: any values of JSON
Message = dict[str, Any]  # of a chat: `role` and `content` are texts


# ---- Messages ------------------------------------------------------------------------------------


def read_messages(value: list, source: str) -> list[Message]:
    """Messages as chat templates take them. Calls of tools need no content. Raises
    UserMistake if another message has no text as its content, or one has none as its role."""
    messages = []
    for number, message in enumerate(value, start=1):
        # Values that JSON lacks, such as times, become texts.
        copy = json.loads(json.dumps(message, default=str), object_hook=clean_fields)
        fields = copy if isinstance(copy, dict) else {}
        if fields.get("tool_calls"):
            fields = {"content": ""} | fields
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            example = '{"role": "user", "content": "a text"}'
            raise UserMistake(f"{source}: message {number} is {message!r:.80}, and not {example}")
        messages.append(fields)
    return messages


def clean_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, or of a part of it, without those that are null: Arrow adds
    them where others have a field. The arguments of a call, which OpenAI writes as a text of JSON,
    become what this text holds."""
    fields = {name: x for name, x in fields.items() if x is not None}
    if "name" in fields and isinstance(arguments := fields.get("arguments"), str):
        with contextlib.suppress(ValueError):  # a template may take any text
            fields["arguments"] = json.loads(arguments)
    return fields


def has_system_message(example: Example) -> bool:
    messages = example.get("prompts")
    return bool(messages and messages[0]["role"] == "system")


def read_prefix_messages(setting: str) -> list[Message]:
    """The messages of SYSTEM_PROMPT; none if it is empty. Raises UserMistake.

    The name of a .json file gives that file's messages, and that of a text file (*.txt, *.md,
    *.jinja, or any existing file) a system message with its text. Other values are the text."""
    is_file = os.path.isfile(setting) or re.fullmatch(r"\S+\.(txt|md|jinja|json)", setting)
    text = read_text(setting, "SYSTEM_PROMPT") if is_file else setting
    if not is_file or not setting.endswith(".json"):
        return [{"role": "system", "content": text}] if text else []
    with reading(f"SYSTEM_PROMPT={setting} is not JSON"):
        messages = json.loads(text)
    if not isinstance(messages, list) or not messages:
        raise UserMistake(f"SYSTEM_PROMPT={setting} is not a JSON list of messages")
    messages = read_messages(messages, f"SYSTEM_PROMPT={setting}")
    if messages[-1]["role"] == "user":
        reason = "the last message is the user's, and the question of an example follows it"
        raise UserMistake(f"SYSTEM_PROMPT={setting}: {reason}; add the assistant's answer")
    return messages


# ---- The chat template ---------------------------------------------------------------------------


class ChatFormat(NamedTuple):
    """What stands around a question in a prompt: messages, and the text of the chat template."""

    tokenizer: "PreTrainedTokenizerBase"
    prefix_messages: list[Message]  # the messages before each question, from SYSTEM_PROMPT
    default_prefix_messages: Sequence[Message] = ()  # of a text, if prefix_messages is empty
    tools: Sequence[dict[str, Any]] = ()  # their descriptions
    kwargs: Mapping[str, Any] = {}  # more arguments of the template: CHAT_TEMPLATE_KWARGS

    def template(self) -> str:
        """The chat template, which is the one for tools if there are tools and several templates.
        Raises ValueError if none of several is the default."""
        return self.tokenizer.get_chat_template(tools=[*self.tools] or None)

    def messages_of(self, example: Example) -> list[Message]:
        """prefix_messages, and the question or the messages of the example. A system message of the
        example replaces the one of prefix_messages."""
        messages = example.get("prompts")
        if not messages:
            question = {"role": "user", "content": example["question"]}
            return [*(self.prefix_messages or self.default_prefix_messages), question]
        if has_system_message(example):
            turns = [message for message in self.prefix_messages if message["role"] != "system"]
            return [messages[0], *turns, *messages[1:]]
        return [*self.prefix_messages, *messages]

    def render(self, chats: list[list[Message]], add_generation_prompt: bool = True) -> list[str]:
        """The text of each list of messages, with the same date on every day.

        add_generation_prompt: the text ends where the assistant begins to speak.
        Raises UserMistake if the template fails.
        """
        roles = ", ".join(message["role"] for message in chats[0])
        arguments = f" and CHAT_TEMPLATE_KWARGS={json.dumps(self.kwargs)}" if self.kwargs else ""
        reason = f"its chat template fails on messages of {roles}{arguments}"
        with reading(f"MODEL_PATH (or CHAT_TEMPLATE): {reason}"):
            texts = self.tokenizer.apply_chat_template(
                chats,
                tools=[*self.tools] or None,
                chat_template=FIXED_DATE + self.template(),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.kwargs,
            )
        return [*map(str, texts)]  # a list of chats gives a list of texts

    def arguments(self) -> set[str]:
        """The arguments that the chat template reads, but for those that every run sets."""
        # The tags around what the assistant says are an extension of transformers.
        source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", self.template())
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return names - {
            *GIVEN_TO_TEMPLATES,
            *environment.globals,
            *self.tokenizer.special_tokens_map,
        }


def checked_chats(chats: list[list[Message]], chat_format: ChatFormat) -> list[list[Message]]:
    """The messages as the chat template takes them. Raises UserMistake if a text is not
    Unicode."""
    for text in (message["content"] for chat in chats for message in chat):
        # JSON and the bytes of a shell can hold half a character.
        with reading(f"a question or SYSTEM_PROMPT is not Unicode: {text!r:.80}"):
            text.encode()
    systems = {chat[0]["content"] for chat in chats if chat[0]["role"] == "system"}
    changed = {content for content in systems if not writes_system_message(chat_format, content)}
    return [
        with_system_in_question(chat) if chat[0]["content"] in changed else chat for chat in chats
    ]


def with_system_in_question(chat: list[Message]) -> list[Message]:
    """The messages with the system message prepended to the text that follows it, for a
    chat template without a system role."""
    if chat[0]["role"] != "system":
        return chat
    system, question, *rest = chat
    return [question | {"content": f"{system['content']}\n\n{question['content']}"}, *rest]


def writes_system_message(chat_format: ChatFormat, content: str = "") -> bool:
    """Whether the chat template writes a system message as it is, but for switches such as
    /no_think. Some templates drop it, others raise an error, and SmolLM3's makes <> of </think>."""
    content = f"{SENTINEL} {content}"
    chat = [{"role": "system", "content": content}, {"role": "user", "content": "A question."}]
    try:
        text = chat_format.render([chat])[0]
    except UserMistake:
        return False
    return all(part.strip() in text for part in re.split(r"(?<!\S)/\w+(?!\S)", content))


def end_of_turn_id(chat_format: ChatFormat) -> int | None:
    """The added token that the chat template writes after an answer; None without such a
    token, and for a template that takes no answers."""
    tokenizer = chat_format.tokenizer
    ids = tokenizer(text_after_answer(chat_format), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def text_after_answer(chat_format: ChatFormat) -> str:
    """What the chat template writes after an answer, without white space around it; "" for a
    template that takes no answers."""
    question = {"role": "user", "content": "A question."}
    chat = [question, {"role": "assistant", "content": SENTINEL}]
    try:
        [text] = chat_format.render([chat], add_generation_prompt=False)
    except UserMistake:
        return ""
    return text.partition(SENTINEL)[2].strip()


def missing_header(chat_format: ChatFormat) -> str:
    """What the chat template writes between a question and its answer, but not at the end of a
    prompt, so that the model would have to write it; "" if there is nothing but thoughts."""
    question = {"role": "user", "content": "A question."}
    chat = [question, {"role": "assistant", "content": SENTINEL}]
    try:
        [text] = chat_format.render([chat], add_generation_prompt=False)
        [prompt] = chat_format.render([[question]])
    except UserMistake:
        return ""
    before, is_written, _ = text.partition(SENTINEL)
    header = before[len(os.path.commonprefix([before, prompt])) :] if is_written else ""
    header = THINK_TAGS.sub("", header).strip()
    # A template may write the last question of a prompt in another way.
    return "" if prompt.rstrip().endswith(header) else header


# ---- The text of a completion --------------------------------------------------------------------


def completion_parts(
    ids: np.ndarray, sampled_mask: np.ndarray, length: int
) -> list[tuple[int, list[int]]]:
    """The tokens of a completion, turn by turn: (1, tokens that the policy has sampled), then
    (0, tokens of the environment's message), and so on. ids, sampled_mask: [T]."""
    pairs = zip(sampled_mask[:length].tolist(), ids[:length].tolist(), strict=True)
    parts = itertools.groupby(pairs, key=operator.itemgetter(0))
    return [(is_sampled, [token for _, token in part]) for is_sampled, part in parts]


def completion_text(
    prompt_ids: list[int],
    ids: np.ndarray,
    sampled_mask: np.ndarray,
    length: int,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: tuple[int, ...],
) -> str:
    """The text that is scored: the last turn of a completion, preceded by <think> if the chat
    template opens this tag at the end of the prompt. ids, sampled_mask: [T]."""
    parts = completion_parts(ids, sampled_mask, length)
    last_turn = [part for is_sampled, part in parts if is_sampled][-1]
    return open_think_tag(prompt_ids, tokenizer) + decode_part(last_turn, tokenizer, stop_ids)


def decode_part(
    ids: list[int], tokenizer: "PreTrainedTokenizerBase", stop_ids: tuple[int, ...]
) -> str:
    """The text of a part of a completion, with its special tokens (<tool_call> may be one), but
    without the stop token that ends it."""
    return token_text(ids[:-1] if ids[-1] in stop_ids else ids, tokenizer)


def token_text(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of these tokens."""
    return str(tokenizer.decode(ids))  # a list of lists would give several texts


def open_think_tag(prompt_ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """The <think> at the end of the prompt, with the white space after the tag, or "".

    Some chat templates open this tag for the assistant. The completion then begins after the tag,
    so the caller prepends the tag to the completion for the reward functions.
    """
    tag = re.search(r"<think>\s*\Z", token_text(prompt_ids[-_TAIL:], tokenizer))
    return tag[0] if tag else ""


# ---- Checks at the start -------------------------------------------------------------------------


def check_chat_format(chat_format: ChatFormat, max_length_sample: float) -> None:
    """Prints what a user may not expect of the chat template. Raises UserMistake if it fails, or
    does not read a name in CHAT_TEMPLATE_KWARGS, which Jinja itself would ignore.

    max_length_sample: the most tokens of a completion; infinite if none is sampled.
    """
    with reading("MODEL_PATH (or CHAT_TEMPLATE): its chat template cannot be read"):
        arguments = chat_format.arguments()
    for name in sorted({*chat_format.kwargs} - arguments):
        reason = f"the chat template does not use {name!r}, or every run sets it"
        used = ", ".join(sorted(arguments)) or "no others"
        raise UserMistake(f"CHAT_TEMPLATE_KWARGS: {reason}; it uses {used}")
    # The template may also refuse a value, or only take lists of texts and images.
    question = chat_format.messages_of({"question": SENTINEL})
    [text] = chat_format.render(checked_chats([question], chat_format))
    if SENTINEL not in text:
        reason = "its chat template does not render the text of a message"
        raise UserMistake(
            f"MODEL_PATH (or CHAT_TEMPLATE): {reason}; set CHAT_TEMPLATE to one for texts"
        )
    if header := missing_header(chat_format):
        reason = f"its chat template writes {header!r} before an answer, but not after a prompt"
        remedy = "set CHAT_TEMPLATE to one that does so with add_generation_prompt"
        raise UserMistake(f"MODEL_PATH (or CHAT_TEMPLATE): {reason}; {remedy}")
    tokenizer = chat_format.tokenizer
    bos = token_text(tokenizer("")["input_ids"][:1], tokenizer)
    if bos == tokenizer.bos_token and not text.startswith(bos):
        reason = f"the tokenizer puts {bos} before a text, and the chat template does not"
        print(
            f"note: {reason}; if the model needs it, begin CHAT_TEMPLATE with {{{{ bos_token }}}}"
        )
    system = question[0]["content"] if question[0]["role"] == "system" else ""
    if not writes_system_message(chat_format, system):
        has_role = writes_system_message(chat_format)
        reason = "changes the system message" if has_role else "has no system role"
        change = "system messages are prepended to the question"
        print(f"note: the chat template {reason}; {change}", flush=True)
    thinks = chat_format.kwargs.get("enable_thinking") is not False
    if "enable_thinking" in arguments and thinks and max_length_sample < LONG_THOUGHT:
        cut = f"MAX_LENGTH_SAMPLE={max_length_sample} will truncate most completions"
        off = """CHAT_TEMPLATE_KWARGS='{"enable_thinking": false}'"""
        reason = f"the chat template lets the model think, and {cut}; {off} turns it off"
        print(f"note: {reason}", flush=True)


def check_messages(examples: list[Example], chat_format: ChatFormat, split: str) -> None:
    """Prints which fields of messages the chat template leaves out, and how many examples have
    special tokens. Raises UserMistake if it leaves out a role's texts or calls of tools."""
    chats = (chat_format.messages_of(e) + [*e.get("completions", ([],))[0]] for e in examples)
    unread = unread_fields(chats, chat_format)
    names = []
    for (role, field), always in sorted(unread.items()):
        if always and field in ("content", "tool_calls"):
            text = f"in the {split} split the chat template leaves out {role}.{field}"
            raise UserMistake(f"{text}; set CHAT_TEMPLATE to one that writes it")
        if field not in ("weight", "id", "tool_call_id"):
            names.append(f"{role}.{field}" if always else f"some {role}.{field}")
    if names:
        text = f"in the {split} split the chat template leaves out {', '.join(names)}"
        print(f"note: {text}", flush=True)
    tokens = chat_format.tokenizer.added_tokens_decoder.values()
    special = re.compile("|".join(re.escape(x.content) for x in tokens if x.special) or "(?!)")
    count = sum(special.search(text_not_sampled(example)) is not None for example in examples)
    if count:
        reason = "contain special tokens; give plain text that no chat template has rendered"
        print(f"note: {count} of {len(examples)} {split} examples {reason}", flush=True)


def text_not_sampled(example: Example) -> str:
    """The question and the messages of an example, but for those of the assistant."""
    messages = [*example.get("prompts", ()), *example.get("completions", ([],))[0]]
    texts = [message["content"] for message in messages if message["role"] != "assistant"]
    return "\n".join([example.get("question", ""), *texts])


def unread_fields(
    chats: Iterable[list[Message]], chat_format: ChatFormat
) -> dict[tuple[str, str], bool]:
    """The (role, field) pairs of messages that do not change what the template writes, and
    whether this holds for messages with calls of tools and without, if there are both.

    The last message of a kind decides, because templates drop the thoughts of earlier ones.
    """
    last: dict[tuple[str, bool, str], tuple[list[Message], int]] = {}
    for chat in chats:
        for i, message in enumerate(chat):
            kind = message["role"], bool(message.get("tool_calls"))
            last |= {(*kind, field): (chat, i) for field in message if message[field]}
    unread: dict[tuple[str, str], list[bool]] = {}
    for (role, _, field), (chat, i) in last.items():
        other = [*chat[:i], chat[i] | {field: SENTINEL}, *chat[i + 1 :]]
        try:
            texts = chat_format.render(checked_chats([chat, other], chat_format), False)
            is_unread = field != "role" and texts[0] == texts[1]
        except UserMistake:  # the template reads the field
            is_unread = False
        unread.setdefault((role, field), []).append(is_unread)
    return {names: all(kinds) for names, kinds in unread.items() if any(kinds)}
