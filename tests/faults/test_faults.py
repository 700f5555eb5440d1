"""random_faults.py: its checks find what is planted, and a disturbed run passes them."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from faults.random_faults import (
    HUNG,
    Damage,
    End,
    Fault,
    Totals,
    add_damage,
    mistakes_in,
    read_checkpoints,
    run_to_its_end,
    wrong_checkpoints,
    wrong_ends,
)
from runs import DEMANDING, environment

WHY = "error: checkpoint of step 3 cannot be written to /x: File too large"
TRACE = "Traceback (most recent call last):"
SAVED = "STOPPED: SIGINT steps=5 saved_step=5"
UNSAVED = "STOPPED: SIGINT steps=5 saved_step=3"
KILLED, NO_WHY = (-9, "", ""), "has exit code 1, and no line at the end says why"


@pytest.mark.parametrize(
    "kind, ends, says",
    [
        ("frozen", [(1, "", WHY)], "process 0 has ended with exit code 1"),
        ("starved", [(1, "", f"{TRACE}\n{WHY}")], None),
        ("starved", [(1, "", TRACE)], f"process 0 {NO_WHY}"),
        ("killed", [KILLED], None),
        ("killed", [(-9, "", HUNG)], f"process 0: {HUNG}"),
        ("starved", [KILLED], "process 0 has ended with exit code -9"),
        ("stopped", [(143, "", "")], None),
        ("stopped", [(143, "", TRACE)], "process 0 has printed a traceback"),
        ("stopped", [(0, "DONE: steps=6", "")], None),
        ("interrupted", [(130, SAVED, "")], None),
        ("interrupted", [(130, UNSAVED, "")], "process 0 has stopped after 5 steps and saved 3"),
        ("hung up", [(129, "", TRACE)], "process 0 has printed a traceback"),
        ("hung up", [(130, "", "")], "process 0 has ended with exit code 130"),
        ("damaged", [KILLED], None),
        ("damage", [(2, "", "error: run.json is damaged")], None),
        ("stopped", [(0, "step=5", "")], "process 0 has ended with exit code 0 and is not done"),
        # If one of two is killed, the other ends with a line, or by jax.
        ("killed", [KILLED, (1, "", WHY)], None),
        ("killed", [KILLED, (-6, "", TRACE)], None),
        ("killed", [(1, "", WHY), (1, "", "")], f"process 1 {NO_WHY}"),
    ],
)
def test_an_end_that_does_not_follow_from_the_fault_is_found(
    kind: str, ends: list[tuple], says: str | None
) -> None:
    found = wrong_ends([End(code, [last], errors) for code, last, errors in ends], {kind})
    assert found == ([says] if says else [])


def test_a_run_that_was_not_done_misses_files(tmp_path: Path) -> None:
    for name in ("hf/config.json", "hf/model.safetensors", "checkpoints/6/record/metadata"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).touch()
    (tmp_path / "b").mkdir()
    found = mistakes_in(tmp_path / "b", tmp_path / "a")
    assert len(found) == 8 and "hf/config.json is missing" in found


@pytest.mark.parametrize(
    "lines, before, damaged, says",
    [
        (["resumed after 6 of 9 steps"], {3: "", 6: ""}, None, []),
        (["resumed after 3 of 9 steps"], {3: "", 6: ""}, None, ["it had checkpoint 6 and resumed"]),
        (["resumed after 3 of 9 steps"], {3: "", 6: ""}, 6, []),
        (["step=0 loss=1"], {3: ""}, None, ["it had checkpoint 3 and resumed from none"]),
        (["checkpoint /x/6 is damaged and passed over: x"], {}, 6, []),
        (["checkpoint /x/6 is damaged and passed over: x"], {}, 3, ["checkpoint 6 was passed"]),
        (["step=7 loss=1"], {}, None, ["8 steps were done, and 0 are saved"]),
        (["step=4 loss=1"], {}, None, []),
    ],
)
def test_a_checkpoint_that_is_lost_is_found(
    tmp_path: Path, lines: list[str], before: dict, damaged: int | None, says: list[str]
) -> None:
    damages = [Damage(tmp_path / f"checkpoints/{damaged}/x", "emptied", b"1", b"")]
    end, damages = End(0, lines, ""), damages if damaged else []
    _, found = wrong_checkpoints(tmp_path, end, before, damages, 3)
    assert len(found) == len(says) and all(map(str.startswith, found, says))


def test_a_file_that_was_damaged_twice_is_put_back_as_it_was_at_first(tmp_path: Path) -> None:
    first = Damage(tmp_path / "a", "cut", b"whole", b"who")
    other, second = first._replace(file=tmp_path / "b"), Damage(first.file, "emptied", b"who", b"")
    damages = add_damage(add_damage([first], other), second)
    assert damages == [other, Damage(first.file, "emptied", b"whole", b"")]


@pytest.mark.slow
def test_a_disturbed_run_ends_like_the_undisturbed_one_and_what_is_planted_is_found(
    tmp_path: Path,
) -> None:
    """With this SEED each fault in a step comes less than 0.1 s after the first step of its start:
    the run is killed before its first checkpoint, and two signals save one."""
    undisturbed, disturbed, out = (tmp_path / name for name in ("b", "a", "planted"))
    totals = Totals()
    env = DEMANDING | environment("SEED=19869 SAVE_EVERY_STEPS=3")
    faults = [Fault("frozen", "evaluation"), Fault("killed", "step"), Fault("stopped", "step")]
    faults += [Fault("hung up", "step"), Fault("damaged", "export")]
    assert run_to_its_end(undisturbed, env, 1, iter(()), Totals()) == []
    assert run_to_its_end(disturbed, env, 1, iter(faults), totals) == []
    assert mistakes_in(disturbed, undisturbed) == []
    assert totals.struck == Counter(faults) and totals.codes[-9] in (1, 2) and totals.codes[0]
    assert totals.codes[143] == totals.codes[129] == 1
    assert totals.steps["computed"] >= totals.steps["counted"] == 6
    shutil.copytree(undisturbed, out)
    (out / "x.1.partial").touch()
    arrays = out / "checkpoints" / "6" / "arrays"
    shutil.rmtree(arrays)
    shutil.copytree(out / "checkpoints" / "3" / "arrays", arrays)
    assert read_checkpoints(out) == {3: "", 6: "an array has another checksum"}
    sentences = ["x.1.partial is left over", "checkpoint 6: ['state']['opt_state']"]
    for name, old, new, sentence in (
        ("metrics.jsonl", '"step": 4', '"step": 5', "metrics.jsonl: "),
        ("eval.jsonl", '"step": 3', '"step": 4', "eval.jsonl has other bytes"),
        ("hf/model.safetensors", "F32", "F16", "hf/model.safetensors has other bytes"),
        ("run.json", '"SEED": "', '"SEED": "2', "run.json: made_with"),
        ("summary.json", '"done"', '"died"', "summary.json: state"),
        ("checkpoints/6/record/metadata", '"rounds": ', '"rounds": 1', "checkpoints/6/record"),
    ):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
        sentences.append(sentence)
    mistakes = mistakes_in(out, undisturbed)
    for sentence in sentences:
        assert any(mistake.startswith(sentence) for mistake in mistakes), sentence
