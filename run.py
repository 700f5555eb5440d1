"""The inputs of a run, as startup.py makes them."""

import dataclasses
from pathlib import Path

from config import Config
from data import Prompt
from infra.sizes import Sizes
from loss import AdvantageConfig
from optimizer import Schedule
from rollout import RolloutConfig
from update import LearnerConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """The inputs of a run and the choices that were made for it; it does not change."""

    cfg: Config
    sizes: Sizes
    folder: Path  # the folder of the model; with LoRA that of the base
    adapters: Path | None  # the folder of the first adapters; None: new ones, or no LoRA
    train_prompts: list[Prompt]  # in a run of train_sft.py they are demonstrations
    eval_prompts: list[Prompt]  # empty if the run never evaluates
    rollout: RolloutConfig
    learner: LearnerConfig
    schedule: Schedule  # of the learning rate
    teacher: LearnerConfig | None  # its base has the teacher's weights; None: no teacher
    teacher_folder: Path | None
    mesh_reason: str  # why ROLLOUT_MESH_SHAPE=auto has chosen its mesh, for a line of the log

    @property
    def advantage_config(self) -> AdvantageConfig:
        weights = self.rollout.reward_weights
        return AdvantageConfig(self.cfg.adv_estimator, self.cfg.scale_rewards, weights)
