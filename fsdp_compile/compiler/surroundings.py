"""Surroundings: what compiled code depends on, besides the model, its inputs and the options."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
import torch.distributed as dist

from passes.fx.torch_internals.aot import functorch_config
from passes.fx.torch_internals.dynamo import dynamo_config
from passes.fx.torch_internals.inductor import inductor_config

from .stored_graph import configuration

#: The name of the number of ranks among the surroundings.
RANKS = "number of ranks"


def surroundings() -> dict[str, str]:
    """Return the surroundings, by a name for messages."""
    configs = {"Dynamo": dynamo_config, "AOTAutograd": functorch_config, "Inductor": inductor_config}
    return {
        "version of Python": sys.version,
        "version of torch": f"{torch.__version__} ({torch.version.git_version})",
        "source of fsdp_compile": configuration(),
        "kind of processor": platform.machine(),
        "number of threads": str(torch.get_num_threads()),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "setting of torch.backends": str(_settings_of_backends()),
        RANKS: str(dist.get_world_size() if dist.is_initialized() else 1),
        **{f"configuration of {name}": _text_of_config(config) for name, config in configs.items()},
    }


def caches_are_on() -> bool:
    """Return whether the user lets torch store what is compiled."""
    are_on = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return are_on and not inductor_config.force_disable_caches


def _settings_of_backends() -> list[Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    convolution = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.mkldnn.enabled
    return [*attention, *convolution, torch.get_float32_matmul_precision()]


def _text_of_config(config: Any) -> str:
    """Return the settings of one of torch's configurations, in text that is equal in all processes."""
    return str([(name, _portable(value)) for name, value in sorted(config.save_config_portable().items())])


def _portable(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_portable, value)))
    if isinstance(value, dict):
        return str([(_portable(key), _portable(item)) for key, item in value.items()])
    return getattr(value, "__qualname__", "") or repr(value)
