"""The life of a run without a model."""

import time
from pathlib import Path

from infra.checkpoint import Checkpoints, Progress
from infra.hosts import StopSignal
from infra.lifecycle import Lifecycle
from infra.log import RunLog


def life_of(out: Path, **settings: int) -> Lifecycle:
    return Lifecycle(
        **{"steps": 4, "eval_every_steps": 0, "save_every_steps": 0} | settings,
        out=out,
        log=RunLog(out, steps=4, writes=True),
        checkpoints=Checkpoints(f"{out}/checkpoints"),
        progress=Progress(),
        review=lambda state, reason: {},
        began=time.perf_counter(),
        stop_signal=StopSignal(),
    )
