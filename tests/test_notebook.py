"""Claims about notebooks/grpo.ipynb, whose cells a real kernel executes on the CPU. The machines of
Colab and Kaggle are not here, but the sizes of their runs are computed."""

import dataclasses
import html
import json
import os
import re
import shlex
import shutil
import site
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from runs import APPLES, FASTER_TO_COMPILE, GREEDY, REPO, copy_repository

from config import Config
from infra.settings import parse_command_line
from infra.sizes import derive_sizes

TEXT = (REPO / "notebooks" / "grpo.ipynb").read_text(encoding="utf-8")
BOOK = json.loads(TEXT)
CODE = {
    cell["id"]: "".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"
}
SESSION = [name for name in CODE if name.startswith("session-")]
SETTINGS = {field.name.upper() for field in dataclasses.fields(Config)}


def test_the_file_is_a_notebook_without_outputs_whose_differences_can_be_read() -> None:
    """Keys are sorted, and a line of a cell is a line of the file."""
    import nbformat  # not in all environments of CI

    nbformat.validate(nbformat.reads(TEXT, as_version=nbformat.NO_CONVERT))
    assert json.dumps(BOOK, indent=1, sort_keys=True, ensure_ascii=False) + "\n" == TEXT
    assert [*BOOK["metadata"]] == ["kernelspec"]
    for cell in BOOK["cells"]:
        assert cell["metadata"] == {} and cell["source"]
        assert all(line.count("\n") <= 1 for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]


def test_every_file_and_every_setting_that_the_notebook_names_exists() -> None:
    text = "".join("".join(cell["source"]) for cell in BOOK["cells"])
    files = {*re.findall(r"(?:\w+/)*\w[\w.-]*\.(?:py|md|txt|yaml)\b", text)}
    assert {"README.md", "requirements.txt", "docs/plan.md", "train_grpo.py"} < files
    assert {file for file in files if not (REPO / file).exists()} == {"my_rewards.py"}
    settings = {*re.findall(r"\b([A-Z][A-Z_]+)=", text)}
    assert {"STEPS", "DTYPE", "LORA_RANK"} < settings <= SETTINGS


THREE_B = ("Qwen/Qwen2.5-3B-Instruct", 16, 8, 2, 128, 16, 8)


@pytest.mark.parametrize(
    "machine, devices, sizes",
    [
        ("T4", 1, ("Qwen/Qwen2.5-1.5B-Instruct", 16, 4, 2, 64, 4, 16)),
        ("T4", 2, ("Qwen/Qwen2.5-1.5B-Instruct", 16, 8, 1, 64, 8, 8)),
        ("L4", 1, THREE_B),
        ("v5e-1", 1, THREE_B),
        ("v5e-8", 8, ("Qwen/Qwen2.5-7B-Instruct", 16, 16, 1, 128, 32, 4)),
    ],
)
def test_each_machine_gets_its_model_its_batches_and_its_folder(
    machine: str, devices: int, sizes: tuple
) -> None:
    """sizes: the model, the rank, prompts per pass, passes, the sequences of a step and of a
    micro-step, micro-steps."""
    begin, _, command = CODE[f"real-{machine.lower()}"].partition("!")
    assert begin == f'if MACHINE == "{machine}":\n    ' and f'"{machine}"' in CODE["real-machine"]
    words = shlex.split(command.replace("{KEPT}", "runs").replace("\\\n", ""))
    python = words.index("python")
    assert words[python + 1] == "train_grpo.py"
    file = parse_command_line(words[python + 2 :]).config
    settings = dict(word.split("=", 1) for word in words[:python])
    cfg = Config.from_env(settings, REPO / file if file else "")
    made = derive_sizes(cfg, 1, devices)
    rollout = (made.prompt_batch_size, made.passes_per_step, made.local_batch)
    update = (made.micro_batch_size, made.grad_accum_steps)
    assert (cfg.model_path, cfg.lora_rank, *rollout, *update) == sizes
    assert (cfg.output_dir, cfg.save_every_steps) == (f"runs/{machine}", 10)


# pip prints its arguments, and what the environment of a cell lacks it gets from that of the tests.
PIP = """#!/bin/sh
echo pip "$@"
if [ "$1" = --python ]; then
  echo "{packages}" > "$("$2" -c "import site; print(site.getsitepackages()[0])")/tests.pth"
fi
"""


def execute(folder: Path, names: Collection[str], **env: str) -> dict[str, list]:
    """{id: outputs} of code cells, which a kernel executes in a folder, with fewer and smaller
    steps and no evaluations. pip is a stand-in, and /kaggle and /tmp are in the folder. A last cell
    looks for jax."""
    import nbclient
    import nbformat

    (folder / "bin").mkdir()
    pip = folder / "bin" / "pip"
    pip.write_text(PIP.format(packages="\n".join(site.getsitepackages())))
    pip.chmod(0o755)
    # A test in this process may have compiled for a TPU, which sets TPU_ACCELERATOR_TYPE.
    others = SETTINGS - {"JAX_COMPILATION_CACHE_DIR"} | {"TPU_ACCELERATOR_TYPE"}
    env = {name: value for name, value in os.environ.items() if name not in others} | env
    env["PATH"] = f"{folder}/bin:{Path(sys.executable).parent}:{env['PATH']}"
    # One micro-step, since a plan compiles all larger micro-batches.
    env |= {"EVAL_EVERY_STEPS": "0", "BATCH_SIZE": "4", "GRAD_ACCUM_STEPS": "1"}
    env |= FASTER_TO_COMPILE
    shorter = {name: re.sub(r"STEPS = \d+", "STEPS = 2", CODE[name]) for name in names}
    shorter = {name: code.replace('"/tmp/', f'"{folder}/') for name, code in shorter.items()}
    shorter = {
        name: re.sub('"/kaggle(?=[/"])', f'"{folder}/kaggle', code)
        for name, code in shorter.items()
    }
    shorter["has-jax"] = 'print("jax" in sys.modules)'
    cells = [nbformat.v4.new_code_cell(code, id=name) for name, code in shorter.items()]
    book = nbformat.v4.new_notebook(cells=cells, metadata=BOOK["metadata"])
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=300, resources=place).execute(env=env)
    return {cell["id"]: cell["outputs"] for cell in book["cells"]}


def printed_by(outputs: dict[str, list]) -> dict[str, str]:
    """What a terminal shows of each cell: a line overwrites a progress bar that ends with \\r."""
    texts = {name: "".join(each.get("text", "") for each in cell) for name, cell in outputs.items()}
    return {
        name: re.sub(r".*\r(?!\n)", "", text).replace("\r\n", "\n") for name, text in texts.items()
    }


@pytest.mark.slow
def test_the_cells_run_in_their_order_and_train_and_show_the_reports(tmp_path: Path) -> None:
    folder = copy_repository(tmp_path / "grpo")
    outputs = execute(folder, [name for name in CODE if name not in SESSION])
    printed = printed_by(outputs)
    assert printed["code"] == f"The code is in {folder}\n"
    pip = f"pip --python {folder}/grpo-venv/bin/python install --quiet pip -r requirements.txt\n"
    assert printed["install"].endswith(pip)
    assert re.search(r"^step=1 loss=.*^DONE: steps=2 ", printed["demo-train"], re.M | re.S)
    before, after = printed["demo-ask"].split("reward_correct ")[:2]
    assert before.endswith(f"\n{APPLES}\n\n{GREEDY}\n\n")
    assert f"weights={folder}/runs/demo/checkpoints/2\n" in after
    assert "DONE: steps=2 " in printed["reward-train"]
    assert "\nv5e-1: fits, " in printed["pipeline-plan"]
    assert printed["pipeline-train"].count("DONE: steps=2 ") == 2
    assert " base=shared int8\n" in printed["pipeline-train"]
    assert printed["pipeline-ask"].count("reward_correct ") == 2
    assert f"weights={folder}/runs/adapters/checkpoints/2\n" in printed["pipeline-ask"]
    lines = (folder / "runs" / "near_answer" / "metrics.jsonl").read_text().splitlines()
    means = [json.loads(line).get("train-reward/func/near_answer/mean") for line in lines]
    # The tiny model is wrong in about half of its answers, and most of these are 10 off.
    assert [0.3 < mean < 0.9 for mean in means if mean is not None] == [True, True]
    for name, run in (("demo-report", "demo"), ("reward-train", "near_answer")):
        report = (folder / "runs" / run / "report.html").read_text(encoding="utf-8")
        [shown] = [each for each in outputs[name] if each["output_type"] == "display_data"]
        page = re.search('srcdoc="(.*?)"', shown["data"]["text/html"], re.S)[1]
        assert "<polyline" in report and html.unescape(page) == report
    assert [printed[name] for name in printed if name.startswith("real-")] == [""] * 6
    assert "runs/demo/checkpoints/2\n" in printed["go-on"]
    assert printed["has-jax"] == "False\n"  # it would take the memory of the GPU


@pytest.mark.parametrize("kept", [(), ("demo",), ("tiny",), ("demo", "tiny"), ("tiny.part",)])
def test_section_6_copies_each_saved_run_that_the_folder_does_not_have(
    tmp_path: Path, kept: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """kept: the runs in the folder, which an earlier session or an earlier cell has written; .part
    is of a copy that was interrupted."""
    saved, here = tmp_path / "input/mine/grpo_runs", tmp_path / "working/grpo_runs"
    here.parent.mkdir(parents=True)
    for folder in (*(saved / name for name in ("demo", "tiny")), *(here / name for name in kept)):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "run.json").write_text(folder.parent.parent.name)
    exec(CODE["keep"].replace('"/kaggle/', f'"{tmp_path}/'), {"Path": Path, "shutil": shutil})
    assert {file.parent.name: file.read_text() for file in here.glob("*/run.json")} == {
        name: "working" if name in kept else "mine" for name in ("demo", "tiny")
    }
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" exists,")[0] for line in lines[:-1]] == [
        str(here / name) if name in kept else f"Copied {saved / name}" for name in ("demo", "tiny")
    ]
    assert (here / "tiny/checkpoints").is_dir()


@pytest.mark.slow
def test_a_session_ends_in_time_and_the_next_goes_on_from_its_saved_output(tmp_path: Path) -> None:
    """What a version of a notebook of Kaggle has saved is an input of its next version."""
    first, second = (copy_repository(tmp_path / name) for name in ("first", "second"))
    (kept := first / "kaggle" / "working" / "grpo_runs").parent.mkdir(parents=True)
    (second / "kaggle" / "working").mkdir(parents=True)
    # A schedule of the learning rate that allows other numbers of steps.
    env = {"LR_SCHEDULE": "constant", "WARMUP_RATIO": "0", "STEPS": "4000"}
    begin, run = ["code", "install", "keep"], CODE["session-recipe"]
    assert "\nHOURS = 8.5 " in run
    CODE["session-recipe"] = run.replace("HOURS = 8.5", f"HOURS = {45 / 3600}")
    printed = printed_by(execute(first, [*begin, *SESSION], **env))
    CODE["session-recipe"] = run
    assert printed["keep"] == f"The runs of sections 7 and 9 write into {kept}\n"
    assert "\nv5e-8: fits, " in printed["session-plan"]
    assert "\ncause: none" in printed["session-probe"]
    assert "\nprobe step_s=" in printed["session-probe"]
    stop = r"^STOPPED: MAX_HOURS steps=(\d+) saved_step=\1$"
    steps = int(re.search(stop, printed["session-train"], re.M)[1])
    assert printed["session-result"].count("reward_correct ") == 1
    saved = second / "kaggle" / "input" / "notebooks" / "kim" / "my-notebook" / "grpo_runs"
    shutil.move(kept, saved)
    goes_on = [*begin, "session-recipe", "session-train"]
    printed = printed_by(execute(second, goes_on, **env | {"STEPS": str(steps + 2)}))
    assert printed["keep"].startswith(f"Copied {saved}/tiny\n")
    assert f"\nDONE: steps={steps + 2} " in printed["session-train"]
    numbers = [int(number) for number in re.findall(r"^step=(\d+)", printed["session-train"], re.M)]
    assert numbers == [steps, steps + 1]
