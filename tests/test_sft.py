"""train_sft.py: its updates are TRL's, it learns the assistant's turns with the tokens that end
them, and a run of it is refused as one of train_grpo.py. test_max_hours.py stops one.

goldens/sft.npz and sft.json have three steps of TRL 1.16's SFTTrainer: its labels, losses, norms of
gradients and weights.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import refused
from runs import REPO, Result, environment, few_examples, run_as_user, train, train_two
from safetensors.numpy import save_file
from small_model import GEMMA_TEMPLATES, train_layout, write_gemma
from tokenizers.normalizers import Prepend

from chat import ChatFormat
from config import Config, describe, load
from data import Prompt, load_examples, read_question_and_answer
from demonstrations import build_demonstrations
from fingerprint import result_fingerprint
from infra.resume import describe_changes
from loss import Objective
from model import hf
from model.attention import prompt_rows
from model.logps import softcap
from model.network import ComputeConfig, forward
from model.params import arrange_layers
from optimizer import Optimizer, init_state
from rows import RowLimits
from run import Run
from startup import set_up
from train_sft import batch_of, customize_settings
from update import LearnerConfig, pack_to_devices, train_on_mini_batch

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "sft.json").read_text(encoding="utf-8"))
ARRAYS = dict(np.load(GOLDENS / "sft.npz"))
T = 13


# ---- The updates are TRL's -----------------------------------------------------------------------


def demonstrations_of(rows: list[list[list[int]]]) -> list[Prompt]:
    """Demonstrations of TRL's ids and labels. A prompt ends with the last token before a label."""
    made = []
    for ids, labels in rows:
        # A whole sequence has a label in its first place, too, which nothing predicts.
        first = next(i for i, label in enumerate(labels) if label >= 0 and i > 0)
        mask = [int(label >= 0) for label in labels[first:]]
        made.append(Prompt(ids[:first], {}, ids[first:], mask, ""))
    return made


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("name", ["ga1", "ga2_wd", "whole_sequence"])
def test_three_steps_are_those_of_trl_in_one_micro_batch_or_in_several(
    name: str, sequences: int, tmp_path: Path
) -> None:
    """The micro-batches have unequal numbers of tokens, as those of accumulation have in TRL."""
    case = TRL["cases"][name]
    (tmp_path / "config.json").write_text(json.dumps(TRL["config"]))
    first = {key.removeprefix("w0."): x for key, x in ARRAYS.items() if key.startswith("w0.")}
    save_file(first, tmp_path / hf.WEIGHTS)
    model, layout = hf.read_config(tmp_path), train_layout(1, 1, 1)
    optimizer = Optimizer("adamw", case["weight_decay"], case["clip_norm"])
    learner = LearnerConfig(
        compute=ComputeConfig(model, jnp.dtype("float32"), layout, "none"),
        objective=Objective("sft"),
        optimizer=optimizer,
        temperature=1.0,
        limits=RowLimits(1, sequences, 1, T, longest_prompt_slots=16),
        pad_id=0,
        accumulates=True,
        skips_zero_advantages=True,
    )
    params = hf.load_params(tmp_path, model, layout.mesh, jnp.float32)
    state = init_state(params, optimizer=optimizer, model=model)
    batches = TRL["batches"][case["batches"]]
    for step, rows in enumerate(batches):
        batch = batch_of(demonstrations_of(rows), T)
        micro_batches = pack_to_devices(learner, batch, np.arange(len(rows)))
        counts = [int(x.completion_mask.sum()) for x in micro_batches]
        assert len({*counts}) > 1 if sequences == 1 else len(counts) == 1
        state, metrics = train_on_mini_batch(learner, state, batch, case["learning_rate"][step])
        assert metrics["loss"] == pytest.approx(case["loss"][step], abs=2e-6)
        assert metrics["grad_norm"] == pytest.approx(case["grad_norm"][step], rel=1e-5)
    for key, x in hf.hf_tensors(state.params, model):
        np.testing.assert_allclose(x, ARRAYS[f"{name}.w_final.{key}"], atol=2e-5)


# ---- What is learnt ------------------------------------------------------------------------------

# Templates of ours for the tokenizer in tiny/. MARKED encloses a turn without its line break.
MARKED = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\
{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
# A turn ends behind its tags, or with the line break that TRL's templates enclose.
SHORT_MARKS = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
LONG_MARKS = MARKED.replace("{% endif %}{{ '\\n' }}", "{{ '\\n' }}{% endif %}").replace(
    "{% endgeneration %}", "{{ '\\n' }}{%- endgeneration -%}"
)
# THINKING drops the thoughts of earlier turns, as Qwen3's does.
THINKING = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>\
{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.index0 < ns.last %}\
{{ m['content'].split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m['content'] }}{% endif %}\
<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}\
{% endif %}"""
USER, PENS, MORE = "user", "How many pens?", "And 4 more?"
SHORT, LONG = "<answer>3</answer>", "<think>\n3+4\n</think>\n\n<answer>7</answer>"
# Their ids, as TRL has them, up to the line break behind the last turn.
ASKED = [1, 525, 201, 42, 273, 279, 334, 33, 2, 201, 1, 394, 503, 543, 201]
SHORT_IDS, LONG_IDS = [556, 21, 557, 2], [554, 201, 21, 13, 22, 201, 555, 201, 201, 556, 25, 557, 2]
BETWEEN = [201, 1, 525, 201, 35, 363, 223, 22, 315, 33, 2, 201, 1, 394, 503, 543, 201]


def write_lines(file: Path, examples: list[dict]) -> None:
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of the user and of the assistant in turn."""
    return [
        {"role": "assistant" if i % 2 else USER, "content": text} for i, text in enumerate(texts)
    ]


def learnt(
    question: object,
    completion: object = None,
    template: str = "",
    prefix_messages: list | None = None,
    **kwargs: Any,
) -> Prompt:
    """The demonstration of a question with a completion, or of a conversation."""
    tokenizer = hf.load_tokenizer(REPO / "tiny")
    tokenizer.chat_template = template or tokenizer.chat_template
    columns = {"question": question, "completion": completion}
    column = "" if completion is None else "completion"
    place = "f example 1"
    example = read_question_and_answer(place, columns, "question", None, column)
    chat_format = ChatFormat(tokenizer, prefix_messages or [], kwargs=kwargs)
    return build_demonstrations([example], chat_format, 600)[0]


def texts_of(made: Prompt) -> tuple[str, str, str]:
    """The prompt, what is learnt after it, and what is not."""
    decode, ids = hf.load_tokenizer(REPO / "tiny").decode, np.array(made.completion_ids)
    mask = np.array(made.completion_mask)
    return decode(made.ids), decode(ids[mask == 1]), decode(ids[mask == 0])


@pytest.mark.parametrize("template", ["", MARKED, SHORT_MARKS, LONG_MARKS])
def test_every_turn_of_a_conversation_is_learnt_with_its_stop_token_and_no_line_break(
    template: str,
) -> None:
    """TRL also learns the line break behind a turn without tags, which no sampler writes."""
    made = learnt(chat(PENS, SHORT, MORE, LONG, "Thanks."), template=template)
    assert made.ids == ASKED and made.completion_ids == SHORT_IDS + BETWEEN + LONG_IDS
    assert made.completion_mask == [1] * 4 + [0] * len(BETWEEN) + [1] * 13


@pytest.mark.parametrize("template", GEMMA_TEMPLATES.values(), ids=GEMMA_TEMPLATES)
def test_with_gemma_s_templates_a_system_message_stands_before_the_first_question(
    template: str,
) -> None:
    """Their role of the assistant is `model`, and they trim texts, as a sampler would not."""
    system = {"role": "system", "content": "Be brief."}
    made = learnt([system, *chat(PENS, SHORT, f" {MORE}", f"\n{LONG} ")], template=template)
    asked = f"<|im_start|>user\nBe brief.\n\n{PENS}<|im_end|>\n<|im_start|>model\n"
    between = f"\n<|im_start|>user\n{MORE}<|im_end|>\n<|im_start|>model\n"
    assert texts_of(made)[::2] == (asked, between)
    learnt_ids = np.array(made.completion_ids)[np.array(made.completion_mask) == 1]
    assert learnt_ids.tolist() == SHORT_IDS + LONG_IDS
    with_tool = [*chat(PENS, SHORT), {"role": "tool", "content": "7"}, chat(PENS, LONG)[1]]
    refused(lambda: learnt(with_tool, template=template), "Conversation roles must alternate")


def test_of_a_question_with_a_completion_the_completion_alone_is_learnt() -> None:
    made = learnt(chat(PENS), SHORT)
    assert made[0] == ASKED and made[2:] == (SHORT_IDS, [1] * 4, "f example 1")
    assert learnt(PENS, 0)[2:] == learnt(PENS, "0")[2:]
    answer = [{"role": "assistant", "content": SHORT}]
    assert learnt(chat(PENS), answer) == learnt(json.dumps(chat(PENS)), json.dumps(answer))
    assert learnt(chat(PENS), answer)[2:] == made[2:]
    made = learnt(chat(PENS, SHORT, MORE), LONG)
    assert made[0] == ASKED + SHORT_IDS + BETWEEN and made[2:4] == (LONG_IDS, [1] * 13)
    made = learnt([{"role": "assistant", "content": "Hi."}, *chat(PENS, SHORT)])  # a greeting
    assert made[0][-len(ASKED) :] == ASKED and made[2:4] == (SHORT_IDS, [1] * 4)
    worked_example = chat(PENS, SHORT)  # of a SYSTEM_PROMPT
    made = learnt(MORE, LONG, prefix_messages=worked_example)
    assert made[0] == ASKED + SHORT_IDS + BETWEEN and made[2:4] == (LONG_IDS, [1] * 13)


def test_a_prompt_has_the_ids_that_a_sampler_continues() -> None:
    """TRL tokenizes texts together, learns the token ` many` and takes `man` from the prompt."""
    plain = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>"
    made = learnt("Ana has how man", "y pens?", template=plain + "{% endif %}{% endfor %}")
    assert made.ids == [500, 382, 286, 273, 268, 259]
    assert made.completion_ids == [91, 334, 33, 2]
    grpo = set_up(Config.from_env({"DATASET": str(few_examples(32, 32)), "EVAL_EVERY_STEPS": "0"}))
    assert [x.ids for x in run_of().train_prompts] == [x.ids for x in grpo.train_prompts]


def test_a_turn_has_the_tokens_of_the_whole_text_if_the_tokenizer_begins_with_a_space() -> None:
    """Tokenizers such as Llama 2's write a space in front of a text, but not of a turn."""
    tokenizer = hf.load_tokenizer(REPO / "tiny")
    tokenizer.backend_tokenizer.normalizer = Prepend(" ")
    chat_format = ChatFormat(tokenizer, [])
    columns = {"question": chat(PENS, SHORT, MORE, "7")}
    example = read_question_and_answer("f example 1", columns, "question", None, "")
    [made] = build_demonstrations([example], chat_format)
    [text] = chat_format.render([columns["question"]], add_generation_prompt=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = made.ids + made.completion_ids
    assert ids == expected[: len(ids)]


def test_a_template_without_special_tokens_gets_the_eos_token_behind_what_is_learnt() -> None:
    template = (REPO / "docs" / "chat_template.jinja").read_text(encoding="utf-8")
    made = learnt(chat("1 + 2", "3", "And 4?", "7"), template=template)
    assert texts_of(made) == (
        "User: 1 + 2\n\nAssistant:",
        " 3<|im_end|> 7<|im_end|>",
        "\n\nUser: And 4?\n\nAssistant:",
    )


# The prompts of both end with an empty thought.
OFF = {"enable_thinking": False}
KEPT = THINKING.replace(
    "{% else %}",
    "{% elif m['role'] == 'assistant' %}<think>\n\n</think>\n\n{{ m['content'] }}{% else %}",
)
IN_TAGS = MARKED.replace("{% generation %}", "{% generation %}<think>\n\n</think>\n\n").replace(
    "assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("template, kwargs", [(KEPT, OFF), (IN_TAGS, {})])
def test_an_empty_thought_of_the_prompt_is_not_learnt(template: str, kwargs: dict) -> None:
    """Neither if an argument of the template asks for it, nor if the tags enclose it."""
    made = learnt(PENS, SHORT, template=template, **kwargs)
    assert made.ids == [*ASKED, 554, 201, 201, 555, 201, 201] and made.completion_ids == SHORT_IDS


# A call of a tool ends with a token of its own, as in gpt-oss, and a conversation with another.
CALLS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% if m['tool_calls'] %}f()<|endoftext|>{% else %}<|im_end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>\
{% endif %}"""
PLAIN = """{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['tool_calls'] %}f()\
{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
CALLED = [*chat(PENS), CALL, {"role": "tool", "content": "7"}, chat(PENS, "7")[1]]


def test_a_turn_does_not_reach_beyond_what_the_assistant_adds() -> None:
    made = learnt(chat(PENS, "3", MORE, "7"), template=CALLS)  # without the last <|endoftext|>
    assert texts_of(made)[1] == "3<|im_end|>7<|im_end|>" and made.completion_mask[-1] == 1
    made = learnt(CALLED, template=PLAIN)
    assert texts_of(made)[1:] == (" f()<|im_end|> 7<|im_end|>", "\ntool: 7\nassistant:")


def test_columns_keep_their_names_and_a_held_out_answer_counts_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.jsonl"
    answers = ["3", "4", "5", "3"] + ["3"] * 16  # the last two are held out
    answers[-1] = "6"
    columns = {"place": "here", "completion": "none", "tools": ["a tool"]}
    write_lines(file, [{"messages": chat(PENS, x)} | columns for x in answers])
    [example] = load_examples(str(file), "", "test", "messages", None, completion="")
    assert example["completions"] == (chat(PENS, "6")[1:], f"{file} example 20")
    assert example["question"] == PENS and example["prompts"] == chat(PENS)
    [made] = build_demonstrations([example], ChatFormat(hf.load_tokenizer(REPO / "tiny"), []))
    assert (made.columns["place"], made.columns["completion"]) == ("here", "none")
    assert "completions" not in made.columns, "rewards get those that are sampled"
    settings = {"DATASET": str(file), "COMPLETION_COLUMN": "", "EVAL_EVERY_STEPS": "1"}
    assert len(run_of(**settings).eval_prompts) == 1
    lines = capsys.readouterr().out
    assert "note: the test prompts are written without column 'tools'" in lines
    assert "left out 1 of 2 held-out questions" in lines


# ---- What is refused -----------------------------------------------------------------------------

NO_TURN = " has no answer of the assistant in 'question', but "
NO_TEXT = " has no answer of the assistant in 'completion', but ''; set"
NOT_ONCE = ": turn 1 of the assistant has the token '<|im_end|>'"
AS = ": the chat template writes turn 1 of the assistant or the messages before it as "
AT_END = " before further messages; give each example one"
IN_PROMPT = " in a conversation; change CHAT_TEMPLATE_KW"
EMPTY, THOUGHT = r"'<think>\n\n</think>\n\n3<|im_end|>'", r"'<think>\n3+4\n</think>\n\n<answer>7<"
WEIGHTLESS = [{"role": "assistant", "content": SHORT, "weight": 0}]
# Qwen3's template writes an empty thought in the last turn of an example without thoughts.
LAST_THOUGHT = THINKING.replace(
    "{% else %}{{ m['content'] }}",
    "{% elif m['role'] == 'assistant' and '<think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{{ m['content'] }}{% else %}{{ m['content'] }}",
)
OPENED = MARKED.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
BAD_EXAMPLES = [  # a question, a completion, a template and its arguments, what follows its place
    (chat(PENS), None, {}, [f"{NO_TURN}[{{'role': 'user'"]),
    ("Why?", None, {}, [f"{NO_TURN}'Why?'; set QUESTION_COLUMN to a column of conversations"]),
    (None, None, {}, [f"{NO_TURN}None; set QUESTION_COLUMN"]),
    ("Why?", "", {}, [NO_TEXT]),
    (None, SHORT, {}, [" has no text in 'question', but None; write it as text"]),
    (chat(PENS, SHORT)[1:], None, {}, [f"{NO_TURN}[{{'role': 'assistant'"]),
    ([{"role": "system", "content": "Hi."}, *chat(PENS, SHORT)[1:]], None, {}, [NO_TURN]),
    (chat(PENS, 3), None, {}, [", column 'question': message 2 is {'role': 'assis"]),
    (chat(PENS, SHORT, MORE, " "), None, {}, [": turn 2 of the assistant has no text"]),
    (PENS, WEIGHTLESS, {}, [": turn 1 of the assistant has the weight 0"]),
    (PENS, "3<|im_end|>4", {}, [f"{NOT_ONCE} 2 times, but"]),
    (CALLED, None, {"template": CALLS}, [f"{NOT_ONCE} 0 times, but"]),
    ("Why?", "\ud800", {}, [": a question or SYSTEM_PROMPT is not Unicode: '\\ud800'"]),
    # What a template writes in two ways is refused with both.
    (chat(PENS, "3", MORE, "7"), None, {"template": LAST_THOUGHT}, [f"{AS}{EMPTY}", AT_END]),
    (chat(PENS, "3", MORE, "7"), None, {"template": LAST_THOUGHT} | OFF, [f"{AS}{EMPTY}", AT_END]),
    (chat(PENS, LONG, MORE, SHORT), None, {"template": THINKING}, [f"{AS}{THOUGHT}", AT_END]),
    (PENS, SHORT, {"template": THINKING} | OFF, [AS, IN_PROMPT]),
    (chat(PENS, LONG), None, {"template": THINKING} | OFF, [rf"{AS}'\n</think>\n\n'", IN_PROMPT]),
    (chat(PENS, "3"), None, {"template": OPENED}, [f"{AS}'<think>'", IN_PROMPT]),
]


@pytest.mark.parametrize("question, completion, kwargs, parts", BAD_EXAMPLES)
def test_an_example_that_cannot_be_learnt_is_one_line_with_its_place(
    question: object, completion: object, kwargs: dict, parts: list[str]
) -> None:
    refused(lambda: learnt(question, completion, **kwargs), f"f example 1{parts[0]}", *parts)


def test_a_template_that_leaves_out_calls_of_tools_is_the_reason_and_not_an_example(
    tmp_path: Path,
) -> None:
    template = tmp_path / "chat.jinja"
    file = tmp_path / "calls.jsonl"
    write_lines(file, [{"messages": CALLED}] * 20)
    template.write_text(PLAIN.replace("f()", ""))
    data = {"DATASET": str(file), "COMPLETION_COLUMN": "", "CHAT_TEMPLATE": str(template)}
    line = "in the train split the chat template leaves out assistant.tool_calls; set CHAT_TEMPLATE"
    refused(lambda: run_of(**data), line)
    template.write_text(PLAIN.replace("f()", "{{ m['tool_calls'][0]['function']['name'] }}()"))
    assert len(run_of(**data).train_prompts) == 18


def settings(text: str = "", **env: str) -> tuple[Config, list[str]]:
    """The settings of train_sft.py and the lines that it prints about them."""
    data = {"MODEL_PATH": f"{REPO}/tiny", "DATASET": str(few_examples(32, 32)), "STEPS": "3"}
    data |= {"COMPLETION_COLUMN": "answer", "MAX_LENGTH_SAMPLE": "64", "EVAL_EVERY_STEPS": "0"}
    cfg, _, lines = load([], data | environment(text) | env, customize_settings)
    return cfg, lines


def run_of(text: str = "", **env: str) -> Run:
    return set_up(settings(text, **env)[0])


def test_what_is_too_long_is_counted_and_left_out_or_refused_by_its_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.jsonl"
    lengths = [(3, 3), (30, 3), (3, 30), (4, 3), (1, 1)]  # words of questions and completions
    examples = [{"messages": chat("a " * q, "b " * c)} for q, c in lengths]
    write_lines(file, examples)
    given = {"DATASET": str(file), "COMPLETION_COLUMN": ""}
    run = run_of("MAX_PROMPT_LENGTH=40 MAX_LENGTH_SAMPLE=20", **given)
    assert [x.source[-9:] for x in run.train_prompts] == ["example 1", "example 4"]
    lines = capsys.readouterr().out
    assert "skipped 1 of 4 train prompts: longer than MAX_PROMPT_LENGTH=40 tokens\n" in lines
    assert "skipped 1 of 3 train completions: longer than MAX_LENGTH_SAMPLE=20 tokens\n" in lines
    refused(lambda: run_of("MAX_PROMPT_LENGTH=9", **given), "every train prompt is longer")
    line = "every train completion is longer; the shortest has 5"
    refused(lambda: run_of("MAX_LENGTH_SAMPLE=2", **given), line)
    write_lines(file, [{"messages": chat("a " * 1100, "b " * 1100)}, *examples])
    line = "my.jsonl example 1 has "
    refused(lambda: run_of("MAX_LENGTH_SAMPLE=2000", **given), line, "and the model has 2048 pos")


# ---- An update, however it is computed -----------------------------------------------------------


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 conversations of one to three turns, and a tenth of them for evaluations."""
    file = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    lines = (REPO / "tiny" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    examples, made = [json.loads(line) for line in lines[:150]], []
    for i in range(72):
        turns = examples[2 * i : 2 * i + 1 + i % 3]
        texts = [text for e in turns for text in (e["question"], e["answer"][-6 * (i % 5 + 1) :])]
        made.append({"messages": chat(*texts), "answer": turns[0]["answer"]})
    write_lines(file, made)
    return file


def test_micro_batches_packing_and_meshes_do_not_change_an_update(
    conversations: Path, tmp_path: Path
) -> None:
    """Also if a row is wide enough for several conversations, and a device gets none. The loss is
    that of a forward of each conversation alone, with Gemma's windows of 16 tokens and softcaps."""
    given = {"DATASET": str(conversations), "COMPLETION_COLUMN": "", "MAX_LENGTH_SAMPLE": "256"}
    given["MODEL_PATH"] = str(write_gemma(tmp_path / "gemma2", "gemma2"))
    found = []
    for text in ("8,1,1 TRAIN_MICRO_BATCH_SIZE=16", "2,2,2 TRAIN_MICRO_BATCH_SIZE=8", "1,1,1"):
        mesh, *others = text.split()
        run = run_of("ROLLOUT_GLOBAL_BATCH_SIZE=16 " + " ".join([*others]), **given)
        learner, sizes = run.learner, [int(size) for size in mesh.split(",")]
        compute = learner.compute._replace(layout=train_layout(*sizes))
        limits = learner.limits._replace(
            shards=compute.layout.batch_shards, full_length_sequences_per_shard=3
        )
        learner = dataclasses.replace(learner, compute=compute, limits=limits)
        model, mesh = compute.model, compute.layout.mesh
        params = hf.load_params(run.folder, model, mesh, jnp.float32)
        state = init_state(params, optimizer=learner.optimizer, model=model)
        batch = batch_of(run.train_prompts[:16], 256)
        assert (np.diff(batch.completion_mask, axis=1) > 0).any(), "a mask has a hole"
        state, metrics = train_on_mini_batch(learner, state, batch, 1e-3)
        found.append({name: metrics[name] for name in ("loss", "grad_norm", "param_norm")})
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[1] == pytest.approx(found[2], rel=1e-5)
    params = hf.load_params(run.folder, model, mesh, jnp.float32)
    layers, losses = arrange_layers(params, "scan", compute.dtype), []
    at, everywhere = np.arange(512)[None], np.ones((1, 512), bool)
    hidden_of = jax.jit(lambda ids: forward(layers, compute, ids, at, prompt_rows(everywhere))[0])
    for made in run.train_prompts[:16]:  # each alone, padded behind its end
        ids = [*made.ids, *made.completion_ids]
        hidden = hidden_of(np.array([ids + [0] * (512 - len(ids))]))[0, len(made.ids) - 1 :]
        logps = jax.nn.log_softmax(softcap(hidden @ params.embed.T, model.logits_softcap))
        logps = np.asarray(logps)[np.arange(len(made.completion_ids)), made.completion_ids]
        losses += [-logps[np.array(made.completion_mask) == 1]]
    expected = float(np.concatenate(losses).mean())
    assert found[2]["loss"] == pytest.approx(expected, rel=1e-5)


# ---- Settings ------------------------------------------------------------------------------------


def test_defaults_of_its_own_are_shown_and_what_it_does_not_read_is_told() -> None:
    cfg, lines = settings(
        "NUM_PRE_Q=4 TOP_P=0.9 BETA=0.1 PPO_EPOCHS=2 EVAL_SAMPLES=4 DYNAMIC_SAMPLING=1",
        REWARD_WEIGHTS="1,2",
    )
    assert "LEARNING_RATE=2e-05 (train_sft.py)" in lines[0] and "NUM_PRE_Q=1 (train_" in lines[0]
    assert (cfg.loss_type, cfg.num_pre_q, cfg.top_p, cfg.beta) == ("sft", 1, 1.0, 0.0)
    told = [line for line in lines if "train_sft.py" in line][1:]
    names = "REWARD_WEIGHTS=1.0,2.0 NUM_PRE_Q=4 TOP_P=0.9 BETA=0.1 PPO_EPOCHS=2 EVAL_SAMPLES=4"
    unread = [f"note: {x} does nothing in train_sft.py" for x in names.split()]
    assert {*told} == {*unread, "note: DYNAMIC_SAMPLING=true does nothing in train_sft.py"}
    assert settings("LORA_RANK=4")[0].learning_rate == 2e-4
    assert settings("LORA_RANK=4 LEARNING_RATE=1e-3")[0].learning_rate == 1e-3
    note = "note: REWARD_FN=reward_correct does nothing with no evaluation"
    assert note in settings(REWARD_FN="reward_correct")[1]
    assert note not in settings("EVAL_EVERY_STEPS=1", REWARD_FN="reward_correct")[1]
    assert settings(COMPLETION_COLUMN="")[0].question_column == "messages"
    assert settings()[0].question_column == "question"


def test_each_script_tells_what_belongs_to_the_other_one(tmp_path: Path) -> None:
    out = tmp_path / "sft"
    out.mkdir()
    (out / "config.yaml").write_text(describe(settings()[0]))
    Config.from_env({}, out / "config.yaml")  # config.py and the set-up of a TPU VM read it
    result = run_as_user(out, "--eval-only")
    words = "LOSS_TYPE=sft needs train_sft.py; for GRPO after it set MODEL_PATH to its export"
    assert result.code == 2 and words in result.errors
    result = run_as_user(out, "--ask", "1 + 1?", SCRIPT="train_sft.py")
    words = "belong to train_grpo.py; run it without OUTPUT_DIR, and with the export as MODEL_PATH"
    assert result.code == 2 and words in result.errors
    lines = load([], {"COMPLETION_COLUMN": "answer"})[2]
    assert "note: COMPLETION_COLUMN=answer does nothing with train_grpo.py" in lines
    lines = load([], {"COMPLETION_COLUMN": "answer"}, customize_settings)[2]
    assert "NUM_PRE_Q=1 (train_sft.py)" in lines[0], "not that of recipes/tiny.yaml"
    assert [line for line in lines if "does nothing" in line] == []


# ---- Runs ----------------------------------------------------------------------------------------


def test_a_resumed_run_may_find_its_dataset_in_another_folder_but_not_train_on_other_tokens(
    conversations: Path, tmp_path: Path
) -> None:
    moved = shutil.copy(conversations, tmp_path / "moved.jsonl")
    files = [{"DATASET": str(file), "COMPLETION_COLUMN": ""} for file in (conversations, moved)]
    run, after = (run_of("MAX_LENGTH_SAMPLE=256", **x) for x in files)
    before, prompts = result_fingerprint(run), list(run.train_prompts)
    assert before == result_fingerprint(after)
    prompts[0] = prompts[0]._replace(completion_mask=[0, *prompts[0].completion_mask[1:]])
    masked = result_fingerprint(dataclasses.replace(run, train_prompts=prompts))
    assert {name for name in before if masked[name] != before[name]} == {"the tokenized prompts"}


def test_a_folder_of_one_script_is_refused_by_the_other_by_the_name_of_the_objective() -> None:
    data = {"MODEL_PATH": f"{REPO}/tiny", "DATASET": str(few_examples(32, 32)), "STEPS": "3"}
    ours, theirs = (result_fingerprint(run) for run in (run_of(), set_up(Config.from_env(data))))
    line = describe_changes({"made_with": ours}, theirs, "step 1")
    assert line.startswith("step 1 was made with other settings or files: ")
    assert "LOSS_TYPE was sft and is dapo" in line
    assert "REWARD_WEIGHTS was empty and is 1.0,0.5,0.5" in line
    line = describe_changes({"made_with": theirs}, ours, "step 1")
    assert "LOSS_TYPE was dapo and is sft" in line


# With so small micro-batches the rows of all steps have one shape, compiled once.
SETTINGS = environment(
    """REWARD_FN= REWARD_WEIGHTS= COMPLETION_COLUMN= MAX_LENGTH_SAMPLE=256
    ROLLOUT_GLOBAL_BATCH_SIZE=16 TRAIN_MICRO_BATCH_SIZE=2 STEPS=10 LEARNING_RATE=1e-3 REMAT=none
    EVAL_EVERY_STEPS=5"""
)


@pytest.fixture(scope="module")
def undisturbed(conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    return train(out, SCRIPT="train_sft.py", **SETTINGS, DATASET=str(conversations))


def test_a_run_learns_evaluates_and_exports_and_its_records_say_so(undisturbed: Result) -> None:
    lines, records = undisturbed.lines, undisturbed.records
    assert re.search(r"^step=0 loss=[\d.]+ tokens=\d+ dt=[\d.]+s$", lines, re.M)
    pattern = r"^eval step=5 split=test demonstrations=7 tokens=\d+ loss=([\d.]+) t=[\d.]+s$"
    assert float(re.search(pattern, lines, re.M)[1]) == pytest.approx(
        next(r["eval/loss"] for r in records if r["step"] == 5 and "eval/loss" in r), abs=1e-6
    )
    assert re.search(
        r"^first demonstration, .*conversations.jsonl example \d+: .*<\|im_end\|>$", lines, re.M
    )
    losses = [r["train-other/loss"] for r in records if "train-other/loss" in r]
    held_out = [r["eval/loss"] for r in records if "eval/loss" in r]
    assert len(losses) == 10 and len(held_out) == 3
    assert losses[-1] < 0.7 * losses[0] and held_out[-1] < 0.7 * held_out[0]
    assert (undisturbed.out / "hf" / "model.safetensors").is_file()
    assert re.search(r"^verdict: no sign of trouble in 10 steps: loss ", lines, re.M)


@pytest.mark.slow
def test_two_processes_with_four_devices_each_do_not_change_a_run(
    undisturbed: Result, conversations: Path, tmp_path: Path
) -> None:
    """Five steps at the learning rates of ten, with the evaluations at 0 and 5."""
    settings = SETTINGS | {"SCRIPT": "train_sft.py", "DATASET": str(conversations), "STEPS": "5"}
    settings |= {"MESH_SHAPE": "2,2,2", "TRAIN_MICRO_BATCH_SIZE": "4", "LR_DECAY_STEPS": "10"}
    result, other = train_two(tmp_path, 4, **settings)
    assert not other.records and "process=1/2 device_count=8" in other.lines
    for name in ("train-other/loss", "train-other/grad_norm", "eval/loss"):
        ours, theirs = ([r[name] for r in x.records if name in r] for x in (result, undisturbed))
        assert len(ours) == (2 if name == "eval/loss" else 5)
        assert ours == pytest.approx(theirs[: len(ours)], rel=1e-4), name


@pytest.mark.slow
def test_adapters_are_trained_and_grpo_goes_on_with_the_export(
    conversations: Path, tmp_path: Path
) -> None:
    """With a REWARD_FN evaluations also answer the questions."""
    settings = SETTINGS | {"DATASET": str(conversations), "LORA_RANK": "4", "STEPS": "2"}
    settings |= {"REWARD_FN": "reward_correct", "EVAL_EVERY_STEPS": "2"}
    result = train(tmp_path / "sft", SCRIPT="train_sft.py", **settings)
    assert re.search(r"^eval step=2 split=test questions=7 accuracy=0\.\d+ ", result.lines, re.M)
    export = str(result.out / "hf")
    result = train(tmp_path / "grpo", MODEL_PATH=export, BATCH_SIZE="2", NUM_PRE_Q="4")
    assert "lora rank=4" in result.lines and "\nDONE: steps=1 " in result.lines
