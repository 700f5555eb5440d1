"""The sizes of well-known models, so that a plan needs neither their weights nor the hub.

A model whose name has -Instruct, -Base, -it or -pt at its end has the same sizes; `positions` is
the smallest number among them.
"""

import re
from pathlib import Path

from models import hf
from models.model import Gemma3, ModelConfig

KNOWN = {  # V, D, F, L, H, N, h, tied, positions
    "Qwen/Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, 64, True, 32768),
    "Qwen/Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, 128, True, 32768),
    "Qwen/Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, 128, True, 32768),
    "Qwen/Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, 128, False, 32768),
    "Qwen/Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, True, 32768),
    "Qwen/Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128, True, 32768),
    "Qwen/Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128, True, 32768),
    "Qwen/Qwen3-4B-Instruct-2507": (151936, 2560, 9728, 36, 32, 8, 128, True, 262144),
    "Qwen/Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128, False, 32768),
    "meta-llama/Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, 64, True, 131072),
    "meta-llama/Llama-3.2-3B": (128256, 3072, 8192, 28, 24, 8, 128, True, 131072),
    "google/gemma-3-270m": (262144, 640, 2048, 18, 4, 1, 256, True, 32768),
    "google/gemma-3-1b": (262144, 1152, 6912, 26, 4, 1, 256, True, 32768),
    "google/gemma-3-4b": (262208, 2560, 10240, 34, 8, 4, 256, True, 131072),
}
ENDINGS = re.compile("-(Instruct|Base|it|pt)$")


def config_of(path: str, revision: str = "") -> ModelConfig:
    """The ModelConfig of a folder, of a model in KNOWN, or of a hub id; it needs no weights.

    For a model in KNOWN only the sizes are right; its rotary angles and the epsilon are not.
    """
    name = ENDINGS.sub("", path)
    known = [full for full in KNOWN if name in (full, full.rpartition("/")[2])]
    if Path(path).is_dir() or revision or not known:
        return hf.read_config(hf.fetch_model(path, revision, ["config.json"]))
    V, D, F, L, H, N, h, tied, positions = KNOWN[known[0]]
    bias, norm, gemma3 = "Qwen2" in name, "Qwen3" in name, None
    if "gemma-3" in name:
        window, local = 1024 if "4b" in name else 512, tuple((i + 1) % 6 > 0 for i in range(L))
        norm, gemma3 = True, Gemma3(h, 1.0, 1e4, window, local)
    settings = 1e-6, 1e6, None, tied, bias, norm, positions
    return ModelConfig(V, D, F, L, H, N, h, *settings, gemma3=gemma3)
