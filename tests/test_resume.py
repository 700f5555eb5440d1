"""infra/resume.py: whose a folder is, which checkpoint a run begins with, what it refuses."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import (
    DEMANDING,
    Result,
    assert_same_run,
    copy_at_call,
    few_examples,
    metric_records,
    run_here,
)

import train_grpo
from config import Config
from fingerprint import result_fingerprint
from infra import hosts
from infra.checkpoint import Checkpoints, Progress, array_names, raise_if_arrays_differ
from infra.mistakes import UserMistake
from infra.resume import (
    begin_or_resume,
    describe_changes,
    lock_folder,
    open_checkpoints,
    read_run,
    write_run,
)
from infra.reward_worker import imported_files
from infra.settings import REPO
from optimizer import TrainState
from run import Run
from startup import set_up

# ---- Whose a folder is ---------------------------------------------------------------------------

FINGERPRINT = {"SEED": "0"}


def arrays_after(step: int) -> dict:
    return {"x": jnp.full((4, 4), step, jnp.float32)}


LIKE = arrays_after(0)["x"]
WANTED = {"x": jax.ShapeDtypeStruct(LIKE.shape, LIKE.dtype, sharding=LIKE.sharding)}


def begun(fingerprint: dict = FINGERPRINT, out: str = "new", **settings) -> tuple:
    """The step and the value with which a run with these settings begins in this folder of the
    working directory, its id and its origin."""
    cfg = Config(**{"steps": 6} | settings)
    checkpoints = Checkpoints(cfg.checkpoint_dir or f"{out}/checkpoints")
    arrays, progress = begin_or_resume(
        Path.cwd() / out, checkpoints, fingerprint, WANTED, resume=cfg.resume, steps=cfg.steps
    )
    value = None if arrays is None else int(arrays["x"][0, 0])
    return progress.step, value, progress.run_id, progress.forked_from


def make_run(out: Path, *steps: int, began: str = "", at: str = "") -> str:
    """Writes what a run leaves that has saved these steps, and returns its id. at: the folder of
    its checkpoints."""
    out.mkdir(parents=True)
    progress = Progress(FINGERPRINT, forked_from=began, run_id=out.name)
    checkpoints = open_checkpoints(out, at, 0, 1)
    for step in steps:
        progress.step = step
        checkpoints.save(arrays_after(step), progress)
    checkpoints.wait_until_saved()
    write_run(out, progress, has_saved=bool(steps))
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(5)))
    return progress.run_id


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `a` that has checkpoints of the steps 2 and 4, a run `b` that has ended
    before its first checkpoint, one whose checkpoints are `gone`, and one that was `copied` without
    the checkpoints and the hidden files."""
    folder = tmp_path_factory.mktemp("made")
    for name, *steps in (("a", 2, 4), ("b",), ("gone", 2), ("copied", 2)):
        make_run(folder / name, *steps)
    for name in ("gone", "copied"):
        shutil.rmtree(folder / name / "checkpoints")
    (folder / "copied" / ".saved").unlink()
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these runs in the working directory, for a test to change."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def test_a_run_goes_on_from_its_own_newest_checkpoint_whatever_resume_names(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for resume in ("auto", "a/checkpoints/2", "nowhere"):
        assert begun(out="a", resume=resume) == (4, 4, "a", "")
        note = f"note: RESUME={resume} is ignored, because OUTPUT_DIR={runs}/a holds a run\n"
        assert (note in capsys.readouterr().out) == (resume != "auto")
    shutil.rmtree(runs / "a")  # the disk of a machine that was made anew is empty
    run_id = make_run(runs / "c", 2, at=f"{runs}/bucket")
    assert begun(out="a", checkpoint_dir="bucket") == (2, 2, run_id, "")


def test_a_run_without_a_checkpoint_begins_again_and_is_the_same_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(out="b")
    note = f"note: OUTPUT_DIR={runs}/b has records and no checkpoint: the run begins again, and "
    assert capsys.readouterr().out == f"{note}replaces them\n"
    assert begun(out="b") == begun(out="b", resume="a") == (0, None, "b", "")
    make_run(runs / "early")
    for name in (".lock", "metrics.jsonl"):  # it has ended before its first record
        (runs / "early" / name).write_text("")
    assert begun({"SEED": "1"}, out="early", resume="never")[:2] == (0, None)


def test_a_fork_needs_an_empty_folder_and_then_goes_on_with_its_own_checkpoints(runs: Path) -> None:
    source = f"{runs}/a/checkpoints"
    for resume, step in (("a", 4), ("a/checkpoints/2", 2), ("b/../a/", 4), (source, 4)):
        fork = begun(resume=resume)
        assert fork[:2] == (step, step) and fork[3] == f"{source}/{step}"
        assert fork[2] != "a"
    make_run(runs / "f", began=f"{source}/2")  # with SAVE_EVERY_STEPS=0
    for resume in ("a/checkpoints/2", "a", "auto"):  # also if a has gone on since then
        assert begun(out="f", resume=resume) == (2, 2, "f", f"{source}/2")
    make_run(runs / "g", 3, began=f"{source}/2")
    shutil.rmtree(runs / "a")
    assert begun(out="g", resume="a") == (3, 3, "g", f"{source}/2")


OF_A = {"checkpoint_dir": "a/checkpoints"}


@pytest.mark.parametrize(
    "out, settings, line",
    [
        ("old", {}, "OUTPUT_DIR={}/old has records, such as eval.jsonl, but no run.json, which sa"),
        ("a", {"resume": "never"}, "OUTPUT_DIR={}/a holds a run, and RESUME=never begins a new"),
        ("b", {"resume": "never"}, "OUTPUT_DIR={}/b holds a run, and RESUME=never begins a new"),
        ("new", OF_A | {"resume": "never"}, "CHECKPOINT_DIR={}/a/checkpoints holds a run, and RES"),
        ("b", OF_A, "OUTPUT_DIR={}/b holds a run, and CHECKPOINT_DIR={}/a/checkpoints holds an"),
        ("gone", {}, "OUTPUT_DIR={}/gone holds a run, and no checkpoint of it is in {}/gone/check"),
        ("copied", {}, "OUTPUT_DIR={}/copied holds a run, and no checkpoint of it is in {}/copied"),
        ("new", {"resume": "nowhere"}, "RESUME=nowhere is not the folder of a complete checkpoint"),
        ("lost", {}, "RESUME={}/a/checkpoints/3 is not the folder of a complete checkpoint"),
        ("a", {"steps": 3}, "STEPS=3, but 4 steps are done already; raise it"),
    ],
)
def test_what_is_no_folder_of_this_run_is_refused_and_nothing_in_it_changes(
    runs: Path, out: str, settings: dict, line: str
) -> None:
    (runs / "old").mkdir()
    (runs / "old" / "eval.jsonl").write_text('{"step": 0}\n')
    make_run(runs / "lost", began=f"{runs}/a/checkpoints/3")

    def files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in runs.rglob("*") if file.is_file()}

    before = files()
    with pytest.raises(UserMistake) as error:
        begun(out=out, **settings)
    assert line.replace("{}", str(runs)) in str(error.value)
    assert files() == before


def test_a_damaged_run_json_is_one_line_and_the_checkpoints_can_be_forked(runs: Path) -> None:
    line = "its run.json is damaged, as after a loss of power; choose a new OUTPUT_DIR, with RESUME"
    damaged = (b"", b'{"run_id": "a", "forked_fr', b"\0" * 300, b"\xff\xfe{")
    for content in (*damaged, b"null", b"{}", b'["run_id"]'):
        (runs / "a" / "run.json").write_bytes(content)
        with pytest.raises(UserMistake) as error:
            begun(out="a")
        assert str(error.value).startswith(f"OUTPUT_DIR={runs}/a: {line}={runs}/a if there are")
    assert begun(resume=f"{runs}/a")[:2] == (4, 4)


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("notes")
    links = ((Path.symlink_to, "mine"), (Path.hardlink_to, "mine"), (Path.symlink_to, "nothing"))
    for i, (make_link, target) in enumerate(links):
        lock = tmp_path / str(i) / ".lock"
        lock.parent.mkdir()
        make_link(lock, tmp_path / target)
        with pytest.raises(UserMistake, match=f"^A=b: {lock} is a link to another file; delete it"):
            lock_folder(lock.parent, "A=b")
    assert (tmp_path / "mine").read_text() == "notes" and not (tmp_path / "nothing").exists()


def test_other_settings_are_refused_by_name_before_and_after_the_first_checkpoint(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "was made with other settings or files: SEED was 0 and is 1"
    for out in ("a", "b"):
        with pytest.raises(UserMistake, match=line):
            begun({"SEED": "1"}, out=out)
    begun({"SEED": "1"}, resume="a")
    assert f"RESUME=a: step 4 {line}\n" in capsys.readouterr().out


def test_a_checkpoint_with_an_array_that_the_run_does_not_have_is_refused_in_one_line() -> None:
    state = TrainState(params=np.zeros(3), opt_state=())
    arrays = [*array_names({"state": state}), "['state'].step int32[]"]
    with pytest.raises(UserMistake, match=r"step 3 has \['state'\].step int32\[\], unused"):
        raise_if_arrays_differ({"state": state}, {"step": 3, "arrays": arrays})
    with pytest.raises(UserMistake, match=r"has no array \['state'\].params"):
        raise_if_arrays_differ({"state": state}, {"step": 3, "arrays": []})


# ---- What the results follow from ----------------------------------------------------------------

SMALL = {"MODEL_PATH": str(REPO / "tiny"), "BATCH_SIZE": "8", "NUM_PRE_Q": "4", "STEPS": "3"}


def set_up_run(**env: str) -> Run:
    return set_up(Config.from_env(SMALL | {"DATASET": str(few_examples(32, 32))} | env))


def fingerprint(**env: str) -> dict[str, str]:
    return result_fingerprint(set_up_run(**env))


@pytest.fixture(scope="module")
def plain() -> Run:
    return set_up_run()


@pytest.fixture(scope="module")
def before(plain: Run) -> dict[str, str]:
    return result_fingerprint(plain)


@pytest.mark.parametrize(
    "setting, name",
    [
        ("LEARNING_RATE=1e-5", "LEARNING_RATE"),
        ("BATCH_SIZE=16", "prompts per step"),
        ("SYSTEM_PROMPT=Short.", "the tokenized prompts"),
        (
            f"CHAT_TEMPLATE={REPO}/docs/qwen3_turns.jinja "
            'CHAT_TEMPLATE_KWARGS={"enable_thinking":false}',
            "CHAT_TEMPLATE_KWARGS and the tokenized prompts",
        ),
        ("STEPS=4", "LR_DECAY_STEPS (else STEPS)"),
        ("STEPS=4 LR_DECAY_STEPS=3", ""),
        ("DTYPE=bfloat16", "DTYPE"),
        ("LORA_RANK=4", "LORA_RANK and the model's weights"),
        ("REWARD_WEIGHTS=1,0,0", "REWARD_WEIGHTS"),
        ("TRAIN_MICRO_BATCH_SIZE=8 REMAT=none MESH_SHAPE=1,4,2 SAVE_EVERY_STEPS=3", ""),
        ("EVAL_SPLIT=train EVAL_PROMPTS=4 EXPORT_HF=none", ""),
    ],
)
def test_what_decides_results_is_compared_by_name_and_what_does_not_is_free(
    before: dict[str, str], setting: str, name: str
) -> None:
    after = fingerprint(**dict(pair.split("=") for pair in setting.split()))
    assert {n for n in before | after if before.get(n) != after.get(n)} == {
        *name.split(" and ")
    } - {""}


@pytest.mark.parametrize(
    "name, value, default",
    [
        ("JAX_DEFAULT_PRNG_IMPL", "unsafe_rbg", "threefry2x32"),
        ("JAX_THREEFRY_PARTITIONABLE", False, True),
        ("JAX_RANDOM_SEED_OFFSET", 7, 0),
    ],
)
def test_other_random_numbers_of_jax_are_compared_and_the_usual_ones_change_no_fingerprint(
    plain: Run,
    before: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: object,
    default: object,
) -> None:
    assert not any(key.startswith("JAX_") for key in before)
    jax.config.update(name.lower(), value)
    try:
        assert result_fingerprint(plain) == before | {name: str(value)}
        hosts.start_jax("", 60)
    finally:
        jax.config.update(name.lower(), default)
    line = f"note: {name}={value} makes other random numbers, so a resumed run must keep it\n"
    assert line in capsys.readouterr().out


def test_a_run_with_a_reference_must_find_the_same_weights_in_its_model(tmp_path: Path) -> None:
    """The reference is no part of a checkpoint."""
    model = Path(shutil.copytree(REPO / "tiny", tmp_path / "model"))
    values = [fingerprint(MODEL_PATH=str(model), BETA="0.1")]
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-7] + b"changed")
    values.append(fingerprint(MODEL_PATH=str(model), BETA="0.1"))
    line = describe_changes({"made_with": values[0]}, values[1], "step 1")
    assert line.startswith("step 1 was made with other settings or files: the model's weights was ")
    assert ";" not in line


def test_what_only_the_record_or_only_the_run_has_is_a_change() -> None:
    record, now = {"seed": "1", "teacher": ""}, {"seed": "1", "remat": "full"}
    assert describe_changes({"made_with": record}, now, "x") == (
        "x was made with other settings or files: teacher was empty and is not there; "
        "remat was not there and is full"
    )


REWARD = "def {}(completions, **columns):\n{}    return [0.0] * len(completions)\n"
USER_FILES = {  # and by which name a change in the file is noticed
    "math/reward.py": ("import helper\n" + REWARD.format("right", ""), "reward.py"),
    "math/helper.py": ("import reward\n", "helper.py"),
    "math/unused.py": ("", ""),
    "form/reward.py": (REWARD.format("brief", "    from pkg import x, grade\n"), "reward.py"),
    "form/pkg/__init__.py": ("x = 0\n", "pkg/__init__.py"),
    "form/pkg/grade.py": ("from . import words\nfrom .rules import *\n", "pkg/grade.py"),
    "form/pkg/words.py": ("import numpy, top.near\n", "pkg/words.py"),
    "form/pkg/rules.py": ("", "pkg/rules.py"),
    "form/top/near.py": ("", "top/near.py"),  # a folder without __init__.py
    "form/words.py": ("", ""),
}


@pytest.fixture(scope="module")
def of_two_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The folder of USER_FILES, and a run with the rewards of the two files reward.py."""
    folder = tmp_path_factory.mktemp("rewards")
    for name, (text, _) in USER_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    named = f"{folder}/math/reward.py:right,{folder}/form/reward.py:brief"
    return folder, set_up_run(REWARD_FN=named)


@pytest.mark.parametrize("name", USER_FILES)
def test_a_change_in_a_user_s_file_or_in_one_that_it_imports_is_noticed_by_name(
    of_two_files: tuple[Path, Run], name: str
) -> None:
    (folder, run), (text, noticed) = of_two_files, USER_FILES[name]
    before = result_fingerprint(run)
    (folder / name).write_text(text + "# changed\n")
    after = result_fingerprint(run)
    (folder / name).write_text(text)
    changed = {n for n in before | after if before.get(n) != after.get(n)}
    assert changed == ({f"the file of REWARD_FN {noticed}"} if noticed else set())
    assert result_fingerprint(run) == before


def test_the_folders_of_a_user_s_files_may_move(
    of_two_files: tuple[Path, Run], tmp_path: Path
) -> None:
    folder, run = of_two_files
    shutil.copytree(folder, tmp_path / "moved")
    named = run.cfg.reward_fn.replace(str(folder), f"{tmp_path}/moved")
    moved = dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, reward_fn=named))
    assert result_fingerprint(moved) == result_fingerprint(run)
    played = f"{folder}/form/reward.py:Game"
    game = dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, environment_class=played))
    assert "the file of ENVIRONMENT_CLASS pkg/rules.py" in result_fingerprint(game)


def test_a_neighbour_for_another_version_of_python_counts_and_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("try:\n    import old\nexcept SyntaxError:\n    old = None\n")
    (tmp_path / "old.py").write_text("print 'hello'\n")
    assert imported_files(tmp_path / "mine.py") == [tmp_path / "mine.py", tmp_path / "old.py"]


def test_our_rewards_py_is_no_file_of_the_user() -> None:
    files = imported_files(REPO / "startup.py")
    assert REPO / "data.py" in files and REPO / "rewards.py" not in files


# ---- Going on ------------------------------------------------------------------------------------

THREE = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3", "MAX_LENGTH_SAMPLE": "32"}


def run(folder: Path, **env: str) -> Result:
    return run_here(folder, train_grpo, DEMANDING | THREE | env)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("runs") / "original"
    assert run(folder).code == 0
    return folder


@pytest.fixture
def short(original: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test to change."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    original: Path, short: Path
) -> None:
    (short / "checkpoints" / "3" / "arrays" / "manifest.ocdbt").write_bytes(b"")
    (short / "checkpoints" / "4.orbax-checkpoint-tmp-17").mkdir()
    result = run(short)
    assert result.code == 0, result.errors
    assert re.search(
        r"^checkpoint \S+/checkpoints/3 is damaged and passed over: ", result.lines, re.M
    )
    assert "resumed after 2 of 3 steps" in result.lines
    assert_same_run(short, original, steps=3)


def test_a_finished_run_that_is_started_again_makes_what_is_asked_and_loses_no_evaluation(
    short: Path,
) -> None:
    env = {"STEPS": "4", "LR_DECAY_STEPS": "3", "EVAL_EVERY_STEPS": "4", "EVAL_PROMPTS": "4"}

    def evaluations() -> list[tuple[int, bool]]:
        records = [r for r in metric_records(short) if "train-other/loss" not in r]
        return [(r["step"], "eval_full/accuracy" in r) for r in records]

    last, both = [(4, False)], [(4, False), (4, True)]
    for before, asked, evaluated in (
        (3, {"EVAL_FULL_SWEEP": "0"}, last),
        (4, {"EVAL_FULL_SWEEP": "1"}, both),
        (4, {"EVAL_FULL_SWEEP": "1", "EXPORT_HF": f"{short}/new"}, both),
        (4, {"EVAL_FULL_SWEEP": "0"}, both),
    ):
        result = run(short, **env | asked)
        assert result.code == 0 and f"resumed after {before} of 4 steps" in result.lines
        assert evaluations() == evaluated, asked
    weights = [short / name / "model.safetensors" for name in ("hf", "new")]
    assert len({file.read_bytes() for file in weights}) == 1


def test_a_fork_that_is_killed_goes_on_by_the_same_command(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill in its second step leaves is copied; the fork has a checkpoint of its own before
    its first record."""
    longer = {"STEPS": "5", "LR_DECAY_STEPS": "3", "RESUME": f"{short}/checkpoints/2"}
    straight, fork = tmp_path / "straight", tmp_path / "fork"
    before = sorted((file, file.stat().st_mtime_ns) for file in short.rglob("*"))
    with monkeypatch.context() as patch:
        copy_at_call(patch, train_grpo, "update_policy", 2, straight, 3, fork)
        assert run(straight, **longer).code == 0
    assert read_run(fork)["has_saved"] and (fork / "checkpoints" / "2").is_dir()
    result = run(fork, **longer)
    assert result.code == 0, result.errors
    assert "\nresumed after 3 of 5 steps" in result.lines
    assert [r["step"] for r in metric_records(fork)] == [2, 3, 4]
    assert_same_run(fork, straight, steps=5)
    assert sorted((file, file.stat().st_mtime_ns) for file in short.rglob("*")) == before
