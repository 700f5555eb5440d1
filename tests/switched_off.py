"""Starts train_grpo.py without what a run decides by itself, to compare it with a run that has it.

SWITCHED_OFF in the environment names methods of Config, such as `packs skips`; each returns False.
"""

import os
import runpy
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from config import Config  # noqa: E402 - the project's folder comes into sys.path before

for name in os.environ["SWITCHED_OFF"].split():
    assert callable(getattr(Config, name)), name
    setattr(Config, name, lambda cfg: False)
runpy.run_path(str(REPO / "train_grpo.py"), run_name="__main__")
