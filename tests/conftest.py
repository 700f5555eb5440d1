"""Eight CPU devices, set before jax is imported, so that sharded programs run anywhere.

XLA's older emitters compile in half the time; runs that tests start by themselves use its defaults.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
flags = os.environ.get("XLA_FLAGS", "")
flags += " --xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = flags.strip()
