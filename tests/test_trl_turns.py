"""Claims that environments and rewards for TRL's GRPOTrainer run here unchanged, and about the chat
template docs/qwen3_turns.jinja, which TRL's copies of Qwen3's templates check.

Both trainers begin a step with their own code. Only what the model draws is given: for each of K
completions of one question the text of each turn, behind which stands a stop token.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from boxes import Boxes, write_calls
from dialogues import Script, answers, parts_of

from config import Config
from model import hf
from rollout import prompts_of_round, reward_completions, sample_completions
from startup import set_up

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::FutureWarning")]
datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

REPO = Path(__file__).resolve().parent.parent
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN3 = TEMPLATES / "qwen3.jinja"  # TRL knows the form of calls from the text of this template
SYSTEM = "Use the tools."
STOP, T = "<|im_end|>", 1000


class Episode(NamedTuple):
    """What is left of an episode."""

    tokens: list[int]  # of the prompt and the completion
    prompt: str
    parts: list[str]  # the completion: what the model drew, a message, what it drew, and so on
    reward: float  # by the last reward function


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL would tell its makers of each run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@functools.cache
def tokenizer() -> Any:
    return hf.load_tokenizer(REPO / "tiny", str(QWEN3))


def episode(prompt: list[int], ids: list[int], drawn: list[int], reward: float) -> Episode:
    """drawn: for each token of the completion 1 if the model drew it, else 0."""
    assert drawn[0] == 1 and len(drawn) == len(ids)
    decode = tokenizer().decode
    parts = [decode(part) for _, part in parts_of(ids, drawn)]
    return Episode([*prompt, *ids], decode(prompt), parts, float(reward))


# ---- In TRL's trainer ----------------------------------------------------------------------------


def model_that_says(texts: list[list[str]]) -> Any:
    """A small Qwen3. texts: [K] those of the turns of each completion."""
    tok = tokenizer()

    class Model(transformers.Qwen3ForCausalLM):
        def generate(self, input_ids: Any, **others: Any) -> Any:
            left, rows = [*texts], []
            for prompt in tok.batch_decode(input_ids):
                turns = prompt.split("<|im_start|>assistant\n")[1:-1]
                said = [turn.partition(STOP)[0] for turn in turns]
                mine = next(each for each in left if each[: len(said)] == said)
                left.remove(mine)
                rows.append(tok(mine[len(said)] + STOP)["input_ids"])
            longest = max(map(len, rows))
            padded = [row + [tok.pad_token_id] * (longest - len(row)) for row in rows]
            return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tok)}
    return Model(transformers.Qwen3Config(**sizes))


def in_trl(
    environment: type | None, reward: Any, columns: dict[str, Any], texts: list, folder: Path
) -> list[Episode]:
    """Takes a step of TRL's trainer. columns: of the example. texts: see model_that_says. Without
    an environment the prompt is the question, as a text."""
    kept: dict[str, Any] = {}

    class Trainer(trl.GRPOTrainer):
        def _generate(self, prompts: list) -> tuple:
            kept["generated"] = super()._generate(prompts)
            return kept["generated"]

        def _calculate_rewards(self, *inputs: Any) -> Any:
            kept["rewards"] = super()._calculate_rewards(*inputs)
            return kept["rewards"]

    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": columns["question"]},
    ]
    args = trl.GRPOConfig(
        str(folder / "trl"),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=len(texts),
        num_generations=len(texts),
        max_completion_length=T,
        report_to="none",
        save_strategy="no",
    )
    Trainer(
        model_that_says(texts),
        reward,
        args=args,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": messages if environment else columns["question"], **columns}]
        ),
        processing_class=tokenizer(),
        environment_factory=environment,
    ).train()
    prompts, ids, drawn, *_ = kept["generated"]
    drawn = drawn if environment else [[1] * len(each) for each in ids]
    return [episode(*of) for of in zip(prompts, ids, drawn, kept["rewards"][:, -1], strict=True)]


# ---- In this trainer -----------------------------------------------------------------------------


def here(
    source: str, reward: str, columns: dict[str, Any], texts: list[list[str]], folder: Path
) -> list[Episode]:
    """Samples as a training step does. source, reward: ENVIRONMENT_CLASS and REWARD_FN."""
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(columns) + "\n")
    settings = {
        "MODEL_PATH": str(REPO / "tiny"),
        "DATASET": str(folder),
        "SYSTEM_PROMPT": SYSTEM,
        "CHAT_TEMPLATE": str(QWEN3),
        "ENVIRONMENT_CLASS": source,
        "REWARD_FN": reward,
        "ROLLOUT_GLOBAL_BATCH_SIZE": "1",
        "NUM_PRE_Q": str(len(texts)),
        "MAX_LENGTH_SAMPLE": str(T),
    }
    run = set_up(Config.from_env(settings))
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    prompts = prompts_of_round(run.rollout, run.train_prompts, P, K, 0, run.cfg.seed)
    script = Script([[text + STOP for text in turns] for turns in texts], T)
    made = sample_completions(
        run.rollout,
        script,
        prompts,
        jax.random.key(0),
        run.rollout.sampling,
        completions_per_prompt=len(texts),
        prompts_per_pass=1,
        title="rollout",
    )
    _, rewards = reward_completions(run.rollout, prompts, made)
    used = [slice(length) for length in made.lengths]
    return [
        episode(
            prompts[0].ids,
            made.completion_ids[i, used[i]].tolist(),
            made.sampled_mask[i, used[i]].tolist(),
            rewards[i, -1],
        )
        for i in range(len(texts))
    ]


# ---- The same environment in both ----------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(texts: list[list[str]], folder: Path) -> tuple[list[Episode], list[Episode], list, list]:
    """The episodes of the game in TRL and here, then what its methods were called with there and
    here. texts: [K] those of the turns of each completion."""
    boxes = REPO / "tests" / "boxes.py"
    files = folder / "theirs.json", folder / "ours.json"
    theirs, ours = (
        {"question": "Move them.", "answer": "-", "coins": [4, 0, 2], "calls_file": str(file)}
        for file in files
    )
    return (
        in_trl(Boxes, write_calls, theirs, texts, folder),
        here(f"{boxes}:Boxes", f"{boxes}:write_calls", ours, texts, folder),
        *(json.loads(file.read_text()) for file in files),
    )


# For each completion the texts of its turns, and the calls that the game gets.
GAME = [
    (
        [
            "<think>\nHow many?\n</think>\n\n" + call("look", box=0) + "\n" + call("look", box=2),
            call("move", source=0, target=1, number=2),
            "Done.",
        ],
        [["look", 0], ["look", 2], ["move", 0, 1, 2]],
    ),
    (
        ["First " + call("move", source=2, target=1) + call("look", box=1) + " then", "Well."],
        [["move", 2, 1, 1], ["look", 1]],
    ),
    ([*[call("look", box=i % 3) for i in range(5)], "So."], [["look", i % 3] for i in range(5)]),
    (
        ['<tool_call>{"id": 3, "name": "look", "arguments": {"box": 1}}</tool_call>', "So?"],
        [["look", 1]],
    ),
    ([call("move", source="0", target=2, number="3"), "No."], [["move", 0, 2, 3]]),
    (["<think>\nI could " + call("look", box=0) + "\n</think>\n\nNo."], []),
    (["<think>\nI could " + call("look", box=0)], []),
    (['<tool_call>{"name": "look", "arguments": {"box": 1}'], []),
]


def test_a_game_gets_the_calls_that_it_gets_in_trl_and_the_tokens_and_rewards_are_the_same(
    tmp_path: Path,
) -> None:
    texts, calls = map(list, zip(*GAME, strict=True))
    theirs, ours, their_calls, our_calls = play(texts, tmp_path)
    assert our_calls == their_calls == calls
    assert ours == theirs
    thought, move, last = texts[0]
    parts = [thought + STOP, answers("4 coins", "2 coins"), move + STOP]
    parts += [answers("2 coins are in box 1 now"), last + STOP]
    assert ours[0].parts == parts
    assert [each.reward for each in ours] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert [len(each.parts) for each in ours] == [5, 3, 11, 3, 3, 1, 1, 1]
    assert f"<|im_start|>user\nMove them. There are 3 boxes.{STOP}\n" in ours[0].prompt


LACKS = "Boxes.look() missing 1 required positional argument: 'box'"
OTHER = "Boxes.look() got an unexpected keyword argument 'room'"
NOT_JSON = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
NAMELESS = "ValueError: there is no tool None, only look, move"
# A turn with a wrong call, the error in TRL (None: it ends the episode), and the error here.
WRONG = [
    (call("look", box=7), "list index out of range", "IndexError: list index out of range"),
    (call("move", source=1, target=0), "box 1 has 0 coins", "ValueError: box 1 has 0 coins"),
    (call("fly"), "Tool fly not found.", "ValueError: there is no tool 'fly', only look, move"),
    (call("look"), LACKS, f"TypeError: {LACKS}"),
    (call("look").replace("{}", "null"), LACKS, f"TypeError: {LACKS}"),
    (call("look", box=1, room=2), OTHER, f"TypeError: {OTHER}"),
    ("<tool_call>{bad}</tool_call>", None, f"JSONDecodeError: {NOT_JSON}"),
    ('<tool_call>{"arguments": {"box": 1}}</tool_call>', None, NAMELESS),
]


def test_wrong_calls_end_as_in_trl_but_those_that_are_no_call_are_answered_and_errors_have_a_type(
    tmp_path: Path,
) -> None:
    texts = [[turn, "Oh."] for turn, _, _ in WRONG]
    theirs, ours, their_calls, our_calls = play(texts, tmp_path)
    assert our_calls == their_calls == [[["look", 7]], [["move", 1, 0, 1]], [], [], [], [], [], []]
    for (turn, known, error), their, our in zip(WRONG, theirs, ours, strict=True):
        answered = [answers(str({"error": known})), "Oh." + STOP] if known else []
        assert their.parts == [turn + STOP, *answered]
        assert our.parts == [turn + STOP, answers(f"error: {error}"), "Oh." + STOP]
        assert our.prompt == their.prompt and our.reward == their.reward == 0


# ---- The same reward in both ---------------------------------------------------------------------

REWARDS = """
def score(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **_):
    log_extra("length", [len(completion) for completion in completions])
    log_metric("count", float(len(completions)))
    return [
        100 * len(prompt) + 10 * len(completion) + len(ids) + float(right in completion)
        for prompt, completion, ids, right in zip(prompts, completions, completion_ids, answer)
    ]
"""


def test_a_reward_function_gets_the_arguments_that_it_gets_in_trl(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    exec(REWARDS, scope := {})
    columns, texts = {"question": "What is 2+2?", "answer": "4"}, [["It is 4."], ["Five?"]] * 4
    theirs = in_trl(None, scope["score"], columns, texts, tmp_path)
    ours = here("", f"{tmp_path}/mine.py:score", columns, texts, tmp_path)
    tokens = [len(tokenizer()(text + STOP)["input_ids"]) for (text,) in texts]
    expected = [1200 + 80 + tokens[0] + 1, 1200 + 50 + tokens[1]] * 4
    assert [each.reward for each in ours] == [each.reward for each in theirs] == expected


# ---- The chat template ---------------------------------------------------------------------------

TURNS = REPO / "docs" / "qwen3_turns.jinja"
OPENING = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "<Ä> & 'b'"}]
THOUGHT = "<think>\nSo many.\n</think>\n\n"
TOOLS = [transformers.utils.get_json_schema(tool) for tool in (Boxes().look, Boxes().move)]
LOOKS = [
    {"type": "function", "function": {"name": "look", "arguments": {"box": 1, "room": "é"}}},
    {"name": "look", "arguments": '{"box": 2}'},
]


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def told(*texts: str, role: str = "tool") -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for text in texts]


# It has no thoughts before the last user message.
PLAIN = [
    *OPENING,
    *(said(" Five.\n"), *told("And now?", role="user")),
    *(said(f"{call('look', box=1)}\n{call('look', box=2)}"), *told("4", "5")),
    *(said(None, tool_calls=LOOKS), *told("4", "5\n"), said("So."), *told("6")),
    *(said("See:", tool_calls=LOOKS), *told("4", "5"), said("9."), *told("?", role="user")),
    *(said(""), *told("More.", role="system"), *told("", role="user")),
]
# It has thoughts behind the last user message, which Qwen3's own template keeps.
THOUGHTS = [
    *OPENING,
    *(said(THOUGHT + call("look", box=1)), *told("4")),
    *(said(THOUGHT, tool_calls=LOOKS), *told("4", "5")),
    *(said(THOUGHT + "See:", tool_calls=LOOKS), *told("4", "5")),
    *(said("\nSee:", reasoning_content="\nSo many.", tool_calls=LOOKS), *told("4", "5")),
    *(said(None, reasoning_content="So many.", tool_calls=LOOKS), *told("4", "5")),
    *(said(THOUGHT + "So."), *told("5")),
]


def rendered(template: Path, messages: list[dict], **how: Any) -> str:
    how = {"add_generation_prompt": True, "chat_template": template.read_text("utf-8")} | how
    return tokenizer().apply_chat_template(messages, tokenize=False, **how)


def beginnings(dialogues: list[list[dict]]) -> list[list[dict]]:
    """The messages before each turn of the model."""
    parts = [messages[:n] for messages in dialogues for n in range(1, len(messages) + 1)]
    return [messages for messages in parts if messages[-1]["role"] in ("user", "tool")]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "name, dialogues",
    [("qwen3", [PLAIN, PLAIN[1:], THOUGHTS]), ("qwen3_instruct_2507", [PLAIN, PLAIN[1:]])],
)
def test_the_template_writes_what_qwen3_s_own_template_writes(
    name: str, dialogues: list[list[dict]], tools: list[dict] | None
) -> None:
    """Before each turn of the model."""
    thinks = [{}, {"enable_thinking": True}]
    for messages in beginnings(dialogues):
        for how in thinks if name == "qwen3" else thinks[:1]:
            for prompted in (True, False):
                how |= {"tools": tools, "add_generation_prompt": prompted}
                expected = rendered(TEMPLATES / f"{name}.jinja", messages, **how)
                assert rendered(TURNS, messages, **how) == expected


def test_without_thinking_each_turn_keeps_the_empty_thought_after_which_it_was_written() -> None:
    """Qwen3's own template writes it in front of the turn that comes next alone."""
    turn, off = "<|im_start|>assistant\n", {"enable_thinking": False, "tools": TOOLS}
    for messages in beginnings([PLAIN]):
        expected = rendered(QWEN3, messages, tools=TOOLS).replace(
            turn, f"{turn}<think>\n\n</think>\n\n"
        )
        assert rendered(TURNS, messages, **off) == expected
    assert rendered(QWEN3, OPENING, **off) == rendered(TURNS, OPENING, **off)


def test_the_template_keeps_what_qwen3_s_own_template_removes_when_a_user_speaks() -> None:
    turns = [said(THOUGHT + "Four?"), *told("More.", role="user")] * 2
    qwen3 = "<|im_start|>assistant\nFour?<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n"
    kept = qwen3.replace("Four?", f"{THOUGHT}Four?")
    begun, end = rendered(TURNS, OPENING, add_generation_prompt=False), "<|im_start|>assistant\n"
    assert rendered(TURNS, OPENING + turns) == begun + kept * 2 + end
    assert rendered(QWEN3, OPENING + turns) == begun + qwen3 * 2 + end
