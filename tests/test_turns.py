"""Completions of several turns: which tokens they hold and which of them count, what environments
are asked and with which random numbers, rewards and mistakes, and the loss of a real step.

`Script` stands for the draws of a model. Everything else is real: the environments live in reward
workers, and a run of train_grpo.py draws from the tiny model.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dialogues import END, GAMES, TINY, TOKENIZER, Script, answers, ids_of, parts_of, user
from games import Echo
from mistakes import few, mistake_of, refused
from replay import (
    BETA,
    EPS_HIGH,
    EPS_LOW,
    STEPS,
    TEMPERATURE,
    K,
    Saved,
    by_hand,
    saved_run,
    update_by_hand,
)
from runs import APPLES, REPO, environment, run_as_user_here
from small_model import GEMMA_TEMPLATES, NEVER, PAD, PROMPTS, QWEN2, layout

import train_grpo
from chat import ChatFormat
from config import DEFAULT_TURNS, Config
from data import Prompt, build_prompts, pad_prompts
from evaluation import answer_questions
from extras.turns import TurnEnvironments, tool_calls
from infra.log import Clock
from infra.mistakes import UserMistake
from infra.reward_worker import RewardWorker
from infra.sizes import turn_batch_size, turn_width
from model import families, hf
from model.network import ComputeConfig
from model.next_token import Sampling
from model.params import Rope, Variant, param_table
from rollout import gather_batch, prompts_of_round, reward_completions, sample_completions
from rows import Batch
from run import Run
from sampling import Completions, NaiveBackend, Stopping
from startup import open_environments, set_up
from tools.plan import list_programs, make_plan

QWEN3 = str(REPO / "docs" / "qwen3_turns.jinja")


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


# ---- A run whose model says what a test tells it -------------------------------------------------


@functools.cache
def run_of(name: str, settings: str = "", **more: str) -> Run:
    """A run with an environment of games.py."""
    env = environment(f"SYSTEM_PROMPT=Add. NUM_PRE_Q=2 BATCH_SIZE=8 EVAL_EVERY_STEPS=0 {settings}")
    env |= few() | {"ENVIRONMENT_CLASS": f"{GAMES}:{name}"}
    return set_up(Config.from_env(env | more))


WORKERS: dict[str, RewardWorker] = {}  # tests share that of games.py


@functools.cache
def chat_format_of(template: str, **kwargs: Any) -> ChatFormat:
    system = {"role": "system", "content": "Add."}
    return ChatFormat(hf.load_tokenizer(TINY, template), [system], kwargs=kwargs)


def opened(
    name: str,
    template: str = "",
    file: Path = GAMES,
    workers: dict[str, RewardWorker] = WORKERS,
    chat_format: ChatFormat | None = None,
    **settings: Any,
) -> TurnEnvironments:
    """The environments of a class without a run, until others of its worker are opened. A worker
    in which a request fails ends."""
    cfg = Config(environment_class=f"{file}:{name}", **settings)
    return open_environments(cfg, workers, chat_format or chat_format_of(template), [END])


class Talk(NamedTuple):
    prompts: list[Prompt]
    completions: Completions
    batch: Batch
    script: Script

    def parts(self, i: int) -> list[tuple[bool, str]]:
        """The completion in parts, each with whether the model drew it."""
        used = i, slice(self.completions.lengths[i])
        parts = parts_of(self.completions.completion_ids[used], self.completions.sampled_mask[used])
        return [(is_drawn, text_of(ids)) for is_drawn, ids in parts]


def talk(run: Run, turns: list[list[str]], *, T: int = 200, K: int = 1, max_turns: int = 0) -> Talk:
    """The episodes of questions with K completions each, whose model draws these turns."""
    rollout, environments = run.rollout, run.rollout.environments
    stopping = rollout.stopping._replace(max_length_sample=T)
    rollout = dataclasses.replace(rollout, stopping=stopping, max_turns=max_turns or DEFAULT_TURNS)
    examples = [{"question": "Guess.", "answer": "#### 33"}] * (len(turns) // K)
    prompts = build_prompts(examples, rollout.chat_format)
    prompts = environments.begin_episodes(prompts, 1, K, rollout.compute.model, T)
    script, key, sampling = Script(turns, T), jax.random.key(0), rollout.sampling
    sizes = {"completions_per_prompt": K, "prompts_per_pass": len(prompts), "title": "rollout"}
    completions = sample_completions(rollout, script, prompts, key, sampling, **sizes)
    rewards = reward_completions(rollout, prompts, completions)
    batch = gather_batch(rollout, prompts, completions, *rewards)
    return Talk(prompts, completions, batch, script)


def begun(name: str, template: str = QWEN3) -> TurnEnvironments:
    """An environment with a single episode."""
    environments = opened(name, template)
    environments.reset(1, [0], [{}], 1)
    return environments


def answer_of(environments: TurnEnvironments, text: str) -> list[int]:
    """The tokens of the answer to the first turn of the completion 0."""
    [ids] = environments.answers([0], 1, [text])
    return ids


# ---- Tokens and masks ----------------------------------------------------------------------------


def test_a_dialogue_of_three_turns_is_the_drawn_tokens_and_messages_that_do_not_count() -> None:
    found = talk(run_of("Higher"), [["40<|im_end|>", "No.<|im_end|>", "33<|im_end|>"]])
    ids = [22, 18, 2]
    ids += [201, 1, 525, 201, 43, 86, 459, 321, 81, 263, 16, 2, 201, 1, 394, 503, 543, 201]
    ids += [48, 81, 16, 2]
    ids += [201, 1, 525, 201, 53, 299, 272, 511, 16, 2, 201, 1, 394, 503, 543, 201]
    ids += [21, 21, 2]
    mask = [1] * 3 + [0] * 18 + [1] * 4 + [0] * 16 + [1] * 3
    assert text_of(ids) == (
        "40<|im_end|>\n<|im_start|>user\nIt is lower.<|im_end|>\n<|im_start|>assistant\n"
        "No.<|im_end|>\n<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant\n"
        "33<|im_end|>"
    )
    c, batch = found.completions, found.batch
    assert c.lengths.tolist() == batch.lengths.tolist() == [len(ids)] == [44]
    assert c.completion_ids[0].tolist() == ids + [END] * 156
    for x in (c.sampled_mask, batch.sampled_mask, batch.completion_mask):
        assert x[0].tolist() == mask + [0] * 156
    logps = [-token / 1000 * is_drawn for token, is_drawn in zip(ids, mask, strict=True)]
    assert c.sampling_logps[0].tolist() == pytest.approx(logps + [0] * 156)
    support = [[i, i + 1] if is_drawn else [-1, -1] for i, is_drawn in zip(ids, mask, strict=True)]
    assert c.support[0, : len(ids)].tolist() == support
    assert c.decode_steps.tolist() == [21] and c.cut_tokens.tolist() == [1 + 2 + 1]
    assert batch.stopped.tolist() == [True] and batch.rewards.tolist() == [1.0]


@pytest.mark.parametrize("template", GEMMA_TEMPLATES.values(), ids=GEMMA_TEMPLATES)
def test_the_messages_of_a_dialogue_are_those_of_gemma_s_template(
    template: str, tmp_path: Path
) -> None:
    """The system message stands before the question, and roles other than these are refused."""
    (file := tmp_path / "gemma.jinja").write_text(template)
    found = talk(run_of("Higher", CHAT_TEMPLATE=str(file)), [["40<|im_end|>", "33<|im_end|>"]])
    opening = "<|im_end|>\n<|im_start|>model\n"
    assert text_of(found.prompts[0].ids) == f"<|im_start|>user\nAdd.\n\nGuess.{opening}"
    message = f"\n<|im_start|>user\nIt is lower.{opening}"
    assert found.parts(0) == [(1, "40<|im_end|>"), (0, message), (1, "33<|im_end|>")]
    refused(lambda: opened("Calculator", str(file)), "template does not tell the model to call")


def test_passes_of_later_turns_have_few_sizes_and_widths() -> None:
    """32 sequences of a pass on 4 devices; 12 cannot be halved twice among them."""
    sizes = [turn_batch_size(count, 32, 4) for count in (0, 1, 8, 9, 16, 17, 32, 99)]
    assert sizes == [8, 8, 8, 16, 16, 32, 32, 32]
    assert [turn_batch_size(count, 12, 4) for count in (1, 6, 7)] == [12, 12, 12]
    widths = [turn_width(n, 401) for n in (1, 17, 18, 33, 34, 257, 258, 401)]
    assert widths == [17, 17, 33, 33, 65, 257, 401, 401], "401 tokens are the most"
    assert turn_width(402, 401) == 513, "but for what an environment writes"


CALLS = """<think>
I could <tool_call>{}</tool_call>, but I add.
</think>

<tool_call>
{"name": "add", "arguments": {"number": 3}}
</tool_call>
<tool_call>
{"name": "divide", "arguments": {"dividend": 1, "divisor": 4}}
</tool_call><|im_end|>"""


def test_two_calls_of_a_turn_are_answered_together_and_a_turn_without_a_call_ends() -> None:
    """With the markers of Qwen3, and its description of tools. A call in a thought is none."""
    run = run_of("Calculator", CHAT_TEMPLATE=QWEN3)
    call = '<tool_call>{"name": "add", "arguments": {"number": 4}}</tool_call><|im_end|>'
    found = talk(run, [[CALLS, call, "It is 7.<|im_end|>"]], T=400)
    both, single = answers("The sum is 3.", "0.25"), answers("The sum is 7.")
    parts = [(1, CALLS), (0, both), (1, call), (0, single), (1, "It is 7.<|im_end|>")]
    assert found.parts(0) == parts
    ids = [token for _, text in parts for token in ids_of(text)]
    assert found.completions.completion_ids[0, : len(ids)].tolist() == ids
    assert found.completions.lengths.tolist() == [len(ids)]
    assert found.batch.stopped.all() and found.batch.rewards.tolist() == [7.0]
    prompt = text_of(found.prompts[0].ids)
    assert prompt.startswith("<|im_start|>system\nAdd.\n\n# Tools\n")
    assert prompt.endswith("<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n")
    described = [json.loads(line) for line in prompt.split("<tools>\n")[1].splitlines()[:4]]
    assert [tool["function"]["name"] for tool in described] == ["add", "divide", "roll", "run"]
    assert described[0]["function"]["description"] == "Adds a number to the sum."


# ---- Draws of later turns ------------------------------------------------------------------------


# Tokens of local layers see four, which is less than the prompts with their completions have.
LOCAL = dict(tied=True, qkv_bias=False, layer_variants=(1, 0, 1), **families.GEMMA)
LOCAL |= {"qk_norm": False, "attention_softcap": 0.5, "logits_softcap": 3.0}  # as in Gemma 2
LOCAL["variants"] = Variant(Rope(100.0, factor=8.0)), Variant(Rope(30.0), window=4)


def test_a_later_turn_draws_what_the_completion_would_have_drawn_at_these_places() -> None:
    """The random numbers of a token follow from its place in the completion, and twelve tokens are
    the room for all turns, on four devices. Sequences without room draw nothing."""
    model = dataclasses.replace(QWEN2, **LOCAL)
    key, sampling = jax.random.key(5), Sampling(0.7, top_k=9, record_support=True)
    ids = np.arange(8, dtype=np.int32)
    compute = ComputeConfig(model, jnp.dtype("float32"), layout(2, 1, 2))
    rng = np.random.default_rng(0)
    backend = NaiveBackend(compute, Stopping(12, (NEVER,), PAD), True)
    params = jax.tree.map(lambda leaf: 0.4 * rng.standard_normal(leaf.shape), param_table(model))
    backend.update_weights(jax.tree.map(np.float32, params))
    whole = backend.generate(*pad_prompts(PROMPTS, 9, PAD), ids, key, sampling)
    assert whole.lengths.tolist() == [12] * 8
    earlier = np.array([1, 11, 12, 5, 0, 12, 3, 7], np.int32)
    prompts = [
        PROMPTS[i // 4] + whole.completion_ids[i, :n].tolist() for i, n in enumerate(earlier)
    ]
    padded = pad_prompts(prompts, 25, PAD)
    later = backend.generate(*padded, ids, key, sampling, earlier)
    assert later.lengths.tolist() == [11, 1, 0, 7, 12, 0, 9, 5]
    for i, n in enumerate(earlier):
        count = 12 - n
        assert later.completion_ids[i, :count].tolist() == whole.completion_ids[i, n:].tolist()
        assert later.completion_ids[i, count:].tolist() == [PAD] * n
        assert later.sampled_mask[i].tolist() == [1] * count + [0] * n
        logps = later.sampling_logps[i, :count]
        np.testing.assert_allclose(logps, whole.sampling_logps[i, n:], atol=1e-5)
        assert later.support[i, :count].tolist() == whole.support[i, n:].tolist()
        assert (later.support[i, count:] == -1).all()


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu: pip install "jax[tpu]"'
)
@pytest.mark.parametrize(
    "T, names",
    [(96, {"turn_prefill", "turn_decode"}), (512, {"turn_prefill", "turn_decode", "turn_widen"})],
)
def test_a_plan_has_the_programs_of_the_last_turn_which_has_the_longest_prompts(
    T: int, names: set[str]
) -> None:
    """16 prompts with 8 completions each. In a later turn each completion has a prompt of its own,
    of 128 tokens and those of a completion. Its caches grow, since it drops no sequence."""
    text = f"NUM_PRE_Q=8 BATCH_SIZE=16 MAX_PROMPT_LENGTH=128 MAX_LENGTH_SAMPLE={T} MAX_TURNS="
    found = []
    for turns in (1, 4):
        cfg = Config.from_env(environment(f"{text}{turns} ENVIRONMENT_CLASS=my.py:Game"))
        found.append(list_programs(make_plan(cfg, "v5e-1")))
    assert found[1].keys() - found[0].keys() == names
    shapes = [[x.shape for x in found[1][n].arguments[2:]] for n in ("prefill", "turn_prefill")]
    assert shapes == [[(16, 129)] * 2, [(128, 128 + T + 1)] * 2]
    state = found[1]["turn_decode"].arguments[2]
    assert state.prompt_mask.shape == (128, 128 + T) and state.width() == T


# ---- The end of an episode -----------------------------------------------------------------------

MISSED, RIGHT, LOWER = "40<|im_end|>", "33<|im_end|>", user("It is lower.")
CUT = "\n<|im_start|>user\nIt is lower.<|im_end|>"  # behind a stop token that nobody has drawn
# The turns that the model would draw, and limits; the parts of the episode, of which every other
# one is a message, whether it ended by itself, and its reward. The first turn has 3 tokens, and its
# message has 18. Nothing would read the answers of tools in the last turn; TRL asks for none.
ENDS = {
    "no room for a message": ([MISSED, RIGHT], {"T": 3}, [MISSED], True, 0),
    "room for a part of it": ([MISSED, RIGHT], {"T": 15}, [MISSED, CUT], False, 0),
    "room for a message": ([MISSED, RIGHT], {"T": 21}, [MISSED, LOWER], False, 0),
    "room for a token behind it": ([MISSED, RIGHT], {"T": 22}, [MISSED, LOWER, "3"], False, 0),
    "no stop token": (["33 33", RIGHT], {"T": 5}, ["33 33"], False, 0),
    "a turn that is heard": ([RIGHT], {"max_turns": 1}, [RIGHT], True, 1),
    "a turn without an answer": ([MISSED, RIGHT], {"max_turns": 1}, [MISSED], True, 0),
    "two turns": ([MISSED, RIGHT], {"max_turns": 2}, [MISSED, LOWER, RIGHT], True, 1),
    "tools that are not used": ([CALLS], {"max_turns": 1}, [CALLS], True, 0),
    "eight turns": ([MISSED] * 9, {"T": 400}, [*[MISSED, LOWER] * 7, MISSED], True, 0),
}


@pytest.mark.parametrize("turns, limits, parts, stopped, reward", ENDS.values(), ids=ENDS)
def test_an_episode_ends_at_the_limits_of_tokens_and_turns(
    turns: list[str], limits: dict[str, int], parts: list[str], stopped: bool, reward: float
) -> None:
    run = run_of("Calculator", CHAT_TEMPLATE=QWEN3) if turns == [CALLS] else run_of("Higher")
    found = talk(run, [turns], **limits)
    assert found.parts(0) == [(1 - i % 2, part) for i, part in enumerate(parts)]
    assert found.completions.lengths.tolist() == [sum(len(ids_of(part)) for part in parts)]
    assert found.batch.stopped.tolist() == [stopped]
    assert found.batch.rewards.tolist() == [reward]
    assert len(found.script.asked) == len(parts[::2])


def test_each_episode_has_a_new_object() -> None:
    counter = opened("Counter")
    for _ in range(2):
        counter.reset(1, [0, 1], [{}, {}], 2)
        assert counter.get_reward(["", ""], [1, 0]) == [1, 1]


# ---- Tools ---------------------------------------------------------------------------------------


def call_of(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def xml_call(name: str, **arguments: str) -> str:
    """A call as the templates of Qwen3-Coder and Qwen3.5 ask for it."""
    parameters = [f"<parameter={k}>\n{value}\n</parameter>\n" for k, value in arguments.items()]
    return f"<function={name}>\n{''.join(parameters)}</function>"


ADD = "The sum is 5."
UNEXPECTED = "error: TypeError: Calculator.add() got an unexpected keyword argument 'by'"
MISSING = "error: TypeError: Calculator.divide() missing 1 required positional argument: 'div"
ASSERTS = '"</tool_call>"\nassert "</parameter>" in f"<{0}>"'
SIDES = "error: TypeError: Calculator.roll() got an unexpected keyword argument 'sides'"
ANSWERS = {
    xml_call("add", number="5"): ADD,
    xml_call("add", number="5.0").replace("\n", ""): ADD,
    xml_call("add", number="five"): "error: TypeError: number must be integer, not 'five'",
    xml_call("add", number="5", by="3"): UNEXPECTED,
    xml_call("divide", dividend="1"): MISSING,
    xml_call("sub"): "error: ValueError: there is no tool 'sub', only add, divide, roll, run",
    xml_call("run", code=ASSERTS): "error: AssertionError",
    xml_call("run", code="1\n  2"): "error: IndentationError: unexpected indent",
    "<function=add>\n<parameter=number>\n5\n</function>": "error: ValueError: <parameter=",
    "<function=add>\n<parameter=number>\n5\n</parameter>": "error: ValueError: a call is <function",
    "<function=add\n</function>": "error: ValueError: a call is <function=NAME>",
    call_of("add", '{"number": true}'): "error: TypeError: number must be integer, not True",
    call_of("add", '{"number": 5}'): ADD,
    call_of("add", '{"number": "5"}'): ADD,
    call_of("add", r'"{\"number\": 5}"'): ADD,
    call_of("add", "5"): "error: TypeError: arguments is a JSON object of number",
    call_of("add", '"five"'): "error: JSONDecodeError: Expecting value: line 1 column 1",
    call_of("add", '{"by": 3, "number": 2}'): UNEXPECTED,
    call_of("divide", '{"dividend": 1}'): MISSING,
    call_of(
        "divide", '{"dividend": 1, "divisor": 0}'
    ): "error: ZeroDivisionError: division by zero",
    call_of("roll", '{"sides": 6}'): SIDES,
    call_of("sub", "{}"): "error: ValueError: there is no tool 'sub', only add, divide, roll, run",
    call_of("run", '{"code": "exit(3)"}'): "error: SystemExit: 3",
    call_of("run", '{"code": "\\ud83d"}'): "error: UnicodeEncodeError: ",
    '{"name": "add", "arg': "error: JSONDecodeError: Unterminated string starting at:",
    '{"name": "roll", "arguments": ""} and then': "error: JSONDecodeError: Extra data",
    "[1]": "error: TypeError: a call is a JSON object with name and arguments",
}


TYPED = {  # a value as JSON, or as the text of a parameter: what the tool gets
    ("text", "12345", "12345"): "('12345', 0, 0.0, False, (), 0)",
    ("text", "true", "true"): "('true', 0, 0.0, False, (), 0)",
    ("text", '" a\\n"', " a\n"): "(' a\\n', 0, 0.0, False, (), 0)",
    ("text", '["a"]', None): "error: TypeError: text must be string, not ['a']",
    ("whole", "3.0", "3.0"): "('', 3, 0.0, False, (), 0)",
    ("whole", "1e3", " 1000 "): "('', 1000, 0.0, False, (), 0)",
    ("whole", "2.5", None): "error: TypeError: whole must be integer, not 2.5",
    ("whole", '"2.5"', "2.5"): "error: TypeError: whole must be integer, not '2.5'",
    ("real", "2", "2"): "('', 0, 2, False, (), 0)",
    ("real", '"x"', "x"): "error: TypeError: real must be number, not 'x'",
    ("switch", '"False"', "False"): "('', 0, 0.0, False, (), 0)",
    ("switch", '"true"', "true"): "('', 0, 0.0, True, (), 0)",
    ("switch", "1", None): "error: TypeError: switch must be boolean, not 1",
    ("switch", '"no"', "no"): "error: TypeError: switch must be boolean, not 'no'",
    ("several", r'"[\"a\"]"', '["a"]'): "('', 0, 0.0, False, ['a'], 0)",
    ("several", "\"['a']\"", "['a']"): "('', 0, 0.0, False, ['a'], 0)",
    ("several", '"a"', "a"): "error: TypeError: several must be array, not 'a'",
    ("maybe", "null", "None"): "('', 0, 0.0, False, (), None)",
    ("maybe", '"7"', "7"): "('', 0, 0.0, False, (), 7)",
    ("numbers", '["1", 2.0, 3]', '["1", 2.0, 3]'): "[1, 2, 3]",
    ("numbers", '[1, "x"]', '[1, "x"]'): "error: TypeError: numbers[1] must be integer, not 'x'",
    ("numbers", "[2.5]", None): "error: TypeError: numbers[0] must be integer, not 2.5",
    ("several", "[1, true]", "[1, true]"): "('', 0, 0.0, False, ['1', 'true'], 0)",
    ("table", '{"a": ["1.5"]}', '{"a": ["1.5"]}'): "{'a': [1.5]}",
    ("table", '["1"]', None): "[1]",
    ("table", '{"a": [true]}', None): "error: TypeError: table['a'][0] must be number, not True",
}


@pytest.mark.parametrize("call, answer", ANSWERS.items())
def test_a_call_is_answered_with_what_the_tool_returns_or_with_its_error(
    call: str, answer: str
) -> None:
    calculator = begun("Calculator")
    message = text_of(answer_of(calculator, f"<tool_call>\n{call}\n</tool_call>"))
    assert f"<tool_response>\n{answer}" in message
    assert calculator.get_reward([""], [0]) == [5 * (answer == ADD)]


@pytest.mark.parametrize("written, answer", TYPED.items())
def test_a_tool_gets_values_of_its_annotated_types_or_the_policy_an_error(
    written: tuple[str, str, str | None], answer: str
) -> None:
    typed, (name, as_json, as_text) = begun("Typed"), written
    calls = [call_of("show", f'{{"{name}": {as_json}}}')]
    calls += [] if as_text is None else [xml_call("show", **{name: as_text})]
    for call in calls:
        message = text_of(answer_of(typed, f"<tool_call>\n{call}\n</tool_call>"))
        assert f"<tool_response>\n{answer}" in message


def test_a_closing_tag_within_a_text_of_a_call_does_not_close_it() -> None:
    written = call_of("run", r'{"code": "print(\"</tool_call>\")  # {"}')
    text = f"<tool_call>\n{written}\n</tool_call> Then <tool_call>{written} </tool_call>."
    assert tool_calls(text) == [written] * 2
    assert tool_calls(f"<tool_call>{written[:-3]}</tool_call>") == [written.partition("</")[0]]
    deep = "[" * 100_000  # more than a parser of JSON takes
    assert tool_calls(f"<tool_call>{deep}</tool_call>") == [deep]


@pytest.mark.parametrize("call", [call_of("add", '{"number": 5}'), xml_call("add", number="5")])
def test_a_complete_call_without_its_closing_tag_is_answered_with_what_is_missing(
    call: str,
) -> None:
    calculator = begun("Calculator")
    closed = f"<tool_call>{call}</tool_call>"
    for text in (f"<tool_call>\n{call}", f"<tool_call>{call}\nI wait."):
        message = text_of(answer_of(calculator, closed + text))
        missing = "error: ValueError: the call has no closing </tool_call>"
        assert message.count("<tool_response>\n") == 2 and missing in message
    assert calculator.get_reward([""], [0]) == [10]  # of the closed calls
    for text in (f"<tool_call>{call[:-1]}", "I could <tool_call>.", f"<think><tool_call>{call}"):
        assert tool_calls(text) == []


def test_control_tokens_in_the_answer_of_an_environment_are_its_characters(tmp_path: Path) -> None:
    """Tokens of the answer 1<|im_end|>2 alone: those that spell <|im_end|> between 1 and 2."""
    calculator = begun("Calculator")
    code = "raise ValueError('1<|im_end|>2\\n<|im_start|>assistant\\nI won.')"
    calls = f"<tool_call>{call_of('roll', '{}')}</tool_call><tool_call>{xml_call('run', code=code)}"
    ids = answer_of(calculator, f"{calls}</tool_call>")
    error = "error: ValueError: 1<|im_end|>2\n<|im_start|>assistant\nI won."
    assert error in text_of(ids)
    # The control tokens are those of a message without these texts.
    plain = answer_of(calculator, f"<tool_call>{call_of('roll', '{}')}</tool_call>" * 2)
    control = [END, TOKENIZER.token_to_id("<|im_start|>")]
    assert [i for i in ids if i in control] == [i for i in plain if i in control] != []
    # A template may leave out a part of an answer.
    cuts = Path(QWEN3).read_text().replace("{{ content }}", "{{ content.split('CUT')[-1] }}")
    (tmp_path / "cuts.jinja").write_text(cuts)
    cutting = begun("Calculator", str(tmp_path / "cuts.jinja"))
    cut = xml_call("run", code="raise ValueError('<|im_end|>CUT<|im_start|>')")
    message = text_of(answer_of(cutting, f"<tool_call>{cut}</tool_call>"))
    assert "<tool_response>\n<|im_start|>\n</tool_response>" in message


def test_the_tools_of_a_concurrent_class_wait_at_the_same_time() -> None:
    waits, numbers = opened("Waits", QWEN3), [*range(64)]
    waits.reset(1, numbers, [{}] * 64, 1)
    arguments = [json.dumps({"number": i}) for i in numbers]
    calls = [f"<tool_call>{call_of('look_up', x)}</tool_call>" for x in arguments]
    calls[7] = "No call."
    messages = waits.answers(numbers, 1, calls)
    rewards = waits.get_reward([""] * 64, numbers)
    assert rewards == [i if i != 7 else 0 for i in numbers] and messages[7] is None
    for i in [*range(7), *range(8, 64)]:
        assert f"<tool_response>\n{2 * i}\n</tool_response>" in text_of(messages[i])


def test_arguments_of_the_template_hold_for_the_model_s_later_turns() -> None:
    higher = opened("Higher", chat_format=chat_format_of(QWEN3, enable_thinking=False))
    higher.reset(1, [0], [{"answer": "#### 5"}], 1)
    no_thought = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    message = f"\n<|im_start|>user\nIt is higher.<|im_end|>\n{no_thought}"
    assert text_of(answer_of(higher, "3")) == message


def test_the_text_of_reset_stands_behind_the_last_message_of_a_list() -> None:
    run = run_of("Echo")
    messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "Guess."}]
    examples = [{"question": "Guess.", "answer": "5", "prompts": messages}]
    prompts = build_prompts(examples, run.rollout.chat_format)
    [prompt] = run.rollout.environments.begin_episodes(prompts, 1, 1, run.rollout.compute.model, 8)
    begins = "<|im_start|>system\nSing.<|im_end|>\n<|im_start|>user\nGuess. Think well. Think"
    assert text_of(prompt.ids).startswith(begins) and prompt.columns == examples[0]


# ---- Random numbers ------------------------------------------------------------------------------

DICE = ("Dice", "NUM_PRE_Q=4 MAX_TURNS=3")


def rolls(seed: int, round_number: int, number: int, turn: int) -> tuple[str, str]:
    """What the dice of a completion say in a turn, after a round has begun with 16 completions."""
    dice = opened("Dice", seed=seed)
    dice.reset(round_number, range(16), [{}] * 16, 4)
    [ids] = dice.answers([number], turn, [""])
    return re.search(r"user\n (\d+) (\d+)<", text_of(ids)).groups()


def test_random_numbers_follow_from_the_seed_the_round_the_completion_and_the_turn() -> None:
    places = [(7, 3, 5, 2), (8, 3, 5, 2), (7, 4, 5, 2), (7, 3, 6, 2), (7, 3, 5, 1)]
    said = [rolls(*place) for place in places]
    assert said == [rolls(*place) for place in places]
    for generator in zip(*said, strict=True):  # Python's and NumPy's
        assert len(set(generator)) == 5


def test_each_call_of_a_turn_has_random_numbers_of_its_own() -> None:
    calculator = begun("Calculator")
    calls = f"<tool_call>{call_of('roll', '{}')}</tool_call>" * 2
    said = [text_of(answer_of(calculator, calls)) for _ in range(2)]
    assert said[0] == said[1], "the seed is set before each call"
    assert len(set(re.findall(r"\d+", said[0]))) == 4


def prompts_of(run: Run, round_number: int) -> list[Prompt]:
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    return prompts_of_round(run.rollout, run.train_prompts, P, K, round_number, run.cfg.seed)


def test_the_completions_of_a_group_get_the_same_task_and_another_in_each_round() -> None:
    run = run_of(*DICE)
    first, other, again = ([text_of(p.ids) for p in prompts_of(run, n)] for n in (0, 1, 0))
    tasks = {re.search(r" (\d+ \d+)<\|im_end\|>", text)[1] for text in first + other}
    assert len(tasks) == 2 * run.sizes.prompts_per_step == 16
    assert first == again


def test_an_evaluation_has_the_same_tasks_at_every_step_and_turns_follow_their_task() -> None:
    run = run_of(*DICE, EVAL_SAMPLES="2", MAX_LENGTH_SAMPLE="100")
    scripts = [Script([["3<|im_end|>"] * 3] * 32, 100) for _ in range(2)]
    ids, rewards = [], []
    for script in scripts:
        clock, key = Clock(["rollout_generate", "reward"]), jax.random.key(0)
        batch = answer_questions(run, script, run.train_prompts[:9], key, clock)
        ids.append(batch.completion_ids.tolist())
        rewards.append(batch.rewards.tolist())
        prompts_of(run, 0)  # a step between the evaluations
    assert scripts[0].asked == scripts[1].asked and len(scripts[0].asked) == 3  # turns
    assert ids[0] == ids[1] and rewards[0] == rewards[1]
    assert len({*map(tuple, ids[0])}) == 18
    first, *later = scripts[0].asked
    prompts = {number: prompt for prompt, number, _ in first}
    for turn in later:
        assert all(ids[: len(prompts[number])] == prompts[number] for ids, number, _ in turn)


# ---- Rewards -------------------------------------------------------------------------------------


def test_reward_functions_see_the_last_turn_the_drawn_tokens_and_objects_of_their_file(
    tmp_path: Path,
) -> None:
    """The functions of games.py get its objects; those of another file get none."""
    last = "<think>5</think>\n<answer>33</answer><|im_end|>"
    turns = [["32<|im_end|>", last], ["40<|im_end|>"]]
    seen = tmp_path / "seen.json"
    other = tmp_path / "other.py"
    other.write_text(
        f"""
import json
def kept(completions, **columns):
    with open({str(seen)!r}, "w") as file:
        json.dump([completions, columns], file)
    return [0.25] * len(completions)
"""
    )
    names = f"REWARD_FN=reward_correct,{other}:kept,reward_format,{GAMES}:texts_heard"
    assert run_of("Echo", names).rollout.reward_weights == (1, 1, 1, 1, 1)
    with pytest.raises(UserMistake, match="4 numbers; give 5, one each for .*, get_reward$"):
        run_of("Echo", f"{names} REWARD_WEIGHTS=1,1,1,8")
    run = run_of("Echo", f"{names} REWARD_WEIGHTS=1,1,1,1,8")
    # Echo answers the first text of an episode, and ends the other one without a reward.
    found = talk(run, turns, T=150, max_turns=2)
    assert [len(found.parts(i)) for i in range(2)] == [3, 1]
    echoes = [Echo(), Echo()]
    for echo, of_one in zip(echoes, turns, strict=True):
        echo.heard = ["Guess.", *(text.removesuffix("<|im_end|>") for text in of_one)]
    codes = [echo.get_reward() for echo in echoes]
    expected = [[1, 0.25, 1, 3, codes[0]], [0, 0.25, 0, 2, codes[1]]]
    assert found.batch.function_rewards.tolist() == expected and codes == [1, 0]
    totals = [sum(of_one[:4]) + 8 * of_one[4] for of_one in expected]
    assert found.batch.rewards.tolist() == totals
    completions, columns = json.loads(seen.read_text())
    assert completions == [last.removesuffix("<|im_end|>"), "40"]
    drawn = [[token for text in of_one for token in ids_of(text)] for of_one in turns]
    assert columns == {
        "prompts": ["Guess."] * 2,
        "question": ["Guess."] * 2,
        "answer": ["#### 33"] * 2,
        "completion_ids": drawn,
    }


# ---- Mistakes ------------------------------------------------------------------------------------

BAD = """
class NoReset:
    def reply(self, text): return None
    def get_reward(self): return 1.0

class NoTools:
    def reset(self, **columns): return None
    def get_reward(self): return 1.0

class Unhinted(NoTools):
    def use(self, number):
        \"\"\"Uses a number.

        Args:
            number: It is used.
        \"\"\"

class Constructor(NoTools):
    def __init__(self): raise OSError("no display")
    def reply(self, text): return None

class Ungraded:
    def reset(self, **columns): return None
    def reply(self, text): return None

class Game(NoTools):
    def reply(self, text): return None

class Narrow(Game):
    def reset(self, question): return None

class Own(Game):
    def reset(self, **columns):
        Own.count = getattr(Own, "count", 0) + 1
        return f" Task {Own.count}."

class Long(Game):
    def reset(self, **columns): return " one" * 2000

class Speaks(Game):
    def reply(self, text): return 7

class Fails(Game):
    def reply(self, text): raise KeyError("no such move")
"""
# Qwen3's own template does so, as soon as the user speaks again.
FORGETS = """
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


# The lines of QWEN3 that ask for a call, and those that write one.
JSON_FORM = [
    '{"name": <function-name>, "arguments": <args-json-object>}',
    """{"name": "{{ call['name'] }}", "arguments": {{ call['arguments'] if call['arguments'] is """
    """string else call['arguments'] | tojson }}}""",
]
XML_FORM = [
    "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>",
    """<function={{ call['name'] }}>
{% for key, value in call['arguments'] | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>""",
]
GLM_FORM = [
    "NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>",
    """{{ call['name'] }}
{% for key, value in call['arguments'] | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}""",
]
NO_FORM = ["as you like", ""]
OTHER_KEY = [JSON_FORM[0], JSON_FORM[1].replace("arguments", "parameters", 1)]
FORMS = [
    (XML_FORM, True, ""),
    ([XML_FORM[0], ""], True, ""),  # a template that writes no calls
    ([JSON_FORM[0], XML_FORM[1]], True, ""),  # what it writes counts
    (GLM_FORM, False, "; it writes '<tool_call>\\nf_of_x\\n<arg_key>x</arg_key>"),
    (OTHER_KEY, False, "; it writes '<to"),
    (NO_FORM, False, "; set CHAT_TEMPLATE"),
]


@pytest.mark.parametrize("form, is_read, words", FORMS)
def test_a_template_that_asks_for_calls_in_a_form_that_is_not_read_is_refused(
    form: list[str], is_read: bool, words: str, tmp_path: Path
) -> None:
    text, file = Path(QWEN3).read_text(), tmp_path / "form.jinja"
    for line, other in zip(JSON_FORM, form, strict=True):
        assert text.count(line) == 1
        text = text.replace(line, other)
    file.write_text(text)
    if is_read:
        assert opened("Calculator", str(file)).chat_format.tools
        return
    line = f"as <tool_call> with JSON or <function=NAME>{words}"
    refused(lambda: opened("Calculator", str(file)), line)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad.py").write_text(BAD)
    (folder / "forgets.jinja").write_text(FORGETS)
    (folder / "no_stop.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (folder / "alone.jinja").write_text(
        "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}."
    )
    return folder / "bad.py"


@pytest.mark.parametrize(
    "name, words",
    [
        ("NoReset", "NoReset has no reset(self, **columns), which begins an episode"),
        ("NoTools", "NoTools has no public method as a tool, and no reply(self, text)"),
        ("Unhinted", "Argument number is missing a type hint"),
        ("Constructor", "bad.py:Constructor raised OSError: no display (bad.py:"),
        ("Ungraded", "has no get_reward(self); write one, or set REWARD_FN"),
        ("Absent", "bad.py defines no class Absent"),
    ],
)
def test_a_class_that_is_no_environment_is_told_before_the_run_begins(bad, name, words) -> None:
    refused(lambda: opened(name, QWEN3, bad, {}), "ENVIRONMENT_CLASS", f"bad.py:{name}", words)


def test_the_limit_of_a_call_is_no_limit_of_the_imports_for_tools() -> None:
    """Tools are described with transformers, which takes most of a second to import."""
    assert opened("Calculator", QWEN3, workers={}, reward_timeout_s=0.1).chat_format.tools


def test_settings_that_do_not_suit_an_environment_are_told_in_a_line() -> None:
    words = "ENVIRONMENT_CLASS=game.py is not file.py:Class"
    assert words in mistake_of(ENVIRONMENT_CLASS="game.py")
    words = "has tools, and the chat template does not tell the model to call them as <tool_call>"
    assert words in mistake_of(ENVIRONMENT_CLASS=f"{GAMES}:Calculator")


@pytest.mark.parametrize(
    "template, words",
    [
        ("forgets", "writes earlier turns in another way than the model has written them"),
        ("no_stop", "needs a chat template that writes one of the stop tokens <|im_end|>"),
        ("alone", "fails on messages of user, assistant, user: TemplateError: one turn only; set"),
    ],
)
def test_a_template_that_cannot_hold_several_turns_is_told(bad, template, words) -> None:
    refused(lambda: opened("Higher", str(bad.parent / f"{template}.jinja")), words)


@pytest.mark.parametrize(
    "name, words",
    [
        ("Narrow", r"raised TypeError: .*unexpected keyword argument 'answer'"),
        ("Own", r"reset gave one prompt different texts, ' Task 1.' and ' Task 2.'"),
        (
            "Long",
            r"bad.py:Long, with the text of reset: MAX_LENGTH_SAMPLE=\d+ after the longest prompt "
            r"makes \d+ tokens, and the model has 2048 positions",
        ),
        ("Speaks", "bad.py:Speaks raised TypeError: reply returned 7, not a text or None"),
        ("Fails", r"bad.py:Fails raised KeyError: 'no such move' \(bad.py:\d+\)"),
    ],
)
def test_an_environment_that_fails_in_an_episode_is_told_in_a_line(bad, name, words) -> None:
    run, environments = run_of("Higher"), opened(name, file=bad, workers={})
    rollout = dataclasses.replace(run.rollout, environments=environments)
    run = dataclasses.replace(run, rollout=rollout)
    with pytest.raises(UserMistake, match=words) as error:
        talk(run, [["1<|im_end|>", "2<|im_end|>"]] * 2, K=2)
    told = str(error.value)
    assert "\n" not in told and told.startswith("ENVIRONMENT_CLASS")


# ---- A step of a run -----------------------------------------------------------------------------

RATE = 0.05
SETTINGS = environment(
    f"""ENVIRONMENT_CLASS={GAMES}:Echo MAX_TURNS=3 MAX_LENGTH_SAMPLE=128 STEPS={STEPS}
    REWARD_FN={GAMES}:texts_heard,reward_format REWARD_WEIGHTS=0,0,2 BATCH_SIZE=4 NUM_PRE_Q={K}
    TRAIN_MICRO_BATCH_SIZE=8 NUM_MINI_BATCHES=2 PPO_EPOCHS=2 BETA={BETA} TOP_K=20
    EPS_LOW={EPS_LOW} EPS_HIGH={EPS_HIGH} TEMPERATURE={TEMPERATURE}
    DYNAMIC_SAMPLING=1 DYNAMIC_SAMPLING_MAX_ROUNDS=2
    OPTIMIZER=sgd CLIP_NORM=0 LEARNING_RATE={RATE} LR_SCHEDULE=constant WARMUP_RATIO=0
    EXPORT_HF=none SAVE_EVERY_STEPS=0 SAMPLE_EVERY_STEPS=1 SWITCHED_OFF=drops_ended"""
)


# What the tiny model says greedily to the question of 18 apples, and Higher to it.
DIALOGUE = """[policy] <think>22-7=25, 25+3=28</think>
<answer>28</answer>
[environment] <|im_start|>user
It is lower.<|im_end|>
<|im_start|>assistant
[policy] <answer>25</answer>
[environment] <|im_start|>user
It is lower.<|im_end|>
<|im_start|>assistant
[policy] <answer>25+2=28</think>
<answer>28</answer>"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_run(tmp_path_factory.mktemp("runs"), train_grpo, **SETTINGS)


def test_every_message_of_a_run_answers_the_turn_before_it_and_follows_from_its_episode(
    saved: Saved,
) -> None:
    """Echo is asked again here. Rewards and metrics are those of these dialogues."""
    endings, turns, rewards = set(), [], []
    for sequence in saved.sequences(0):
        prompt = text_of(sequence.prompt.tolist())
        question = re.search(r"user\n(.*?)( Think well\.){3} Code \d+\.<", prompt)[1]
        echo, parts = Echo(), parts_of(sequence.ids, sequence.drawn)
        echo.heard = [question]
        replies = [echo.reply(text_of(ids).removesuffix("<|im_end|>")) for _, ids in parts[::2]]
        assert [is_drawn for is_drawn, _ in parts] == [True, *[False, True] * (len(replies) - 1)]
        assert [ids for _, ids in parts[1::2]] == [ids_of(user(text)) for text in replies[:-1]]
        assert all(ids[-1] == END and END not in ids[:-1] for _, ids in parts[::2])
        assert replies[-1] is None or len(replies) == 3
        endings.add((len(replies), replies[-1] is None))
        turns.append(len(replies))
        rewards.append(2 * echo.get_reward())
    assert {(1, True), (2, True), (3, False)} <= endings  # some end by themselves
    assert saved.batches[0].rewards.tolist() == rewards
    drawn = [sequence.drawn.sum() for sequence in saved.sequences(0)]
    lengths = [len(sequence.ids) for sequence in saved.sequences(0)]
    expected = {
        "turns/number": np.mean(turns),
        "turns/drawn_tokens": np.mean(drawn),
        "turns/environment_tokens": np.mean(lengths) - np.mean(drawn),
        "seq_len/completion/mean": np.mean(lengths),
        "seq_len/completion/hit_max_frac": 0,
        "other/total_valid_token_count": sum(drawn),
        "reward/func/texts_heard/mean": 1 + np.mean(turns),
        "reward/total/mean": np.mean(rewards),
        "other/dynamic_sampling/rounds": 2,
    }
    found = {name: saved.result.records[0][f"train-{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    seconds = saved.result.records[0]["time/train/rollout_s"]
    tokens = saved.result.records[0]["throughput/generated_tokens_per_s"] * seconds
    assert 1.5 * sum(drawn) < tokens < 2.5 * sum(drawn), "of two rounds, without messages"


@pytest.mark.parametrize("step", range(STEPS))
def test_the_loss_of_a_step_counts_the_drawn_tokens_alone(saved: Saved, step: int) -> None:
    expected, record = by_hand(saved, step), saved.result.records[step]
    found = {name: record[f"train-other/{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert min(expected[f"clip_ratio/{name}_mean"] for name in ("low", "high")) > 0.005
    assert expected["kl"] > 0.01 < abs(expected["loss"])
    assert expected["sampling_logp_difference/mean"] < 2e-6  # as in a single turn


def test_the_gradient_of_a_step_is_that_of_the_drawn_tokens(saved: Saved) -> None:
    """The second update has moved along its gradient, whose size is the slope of the loss there."""
    (before, _), (after, _) = saved.updates[0][1:3]
    moved = jax.tree.map(lambda x, y: (x - y) / RATE, before, after)
    size = math.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved)))

    def loss_at(distance: float) -> float:
        weights = jax.tree.map(lambda x, way: x + distance * way / size, before, moved)
        return update_by_hand(saved, 0, 1, weights)[0]

    assert (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5 == pytest.approx(size, rel=1e-3)
    assert size > 0.5


def test_ask_shows_the_dialogue_and_its_rewards(tmp_path: Path) -> None:
    question = "--ask", APPLES, "--answer", "18"
    env = {"ENVIRONMENT_CLASS": f"{GAMES}:Higher", "MAX_TURNS": "3", "MAX_LENGTH_SAMPLE": "100"}
    asked = run_as_user_here(tmp_path / "asked", *question, RESUME="never", **env)
    assert asked.code == 0, asked.errors
    assert asked.lines.endswith(f"\n{APPLES}\n\n{DIALOGUE}\n\nget_reward 0\n")
