"""The generation of a case's code for CUDA, without a GPU. Nothing runs, so only what cannot be compiled shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from fsdp_compile.debug import CudaCode, cuda_code

from .blocks import network
from .case import Call, Case, Evaluate, Freeze, Micro, Step
from .execute import call, shard


def generate(case: Case) -> CudaCode:
    """Generate the code of all graphs that a case goes through. The model is compiled as a whole, and states are not loaded."""
    case = replace(case, features=tuple(feature for feature in case.features if feature != "by block"))
    mesh_shape = dict(zip(("shard", "tp"), case.mesh, strict=True)) if "tensor parallel" in case.features else case.mesh

    def prepare(model: Any, mesh: DeviceMesh) -> None:
        shard(model, case, fsdp_compile.fully_shard, mesh)

    def step(compiled: Any, tokens: Tensor) -> None:
        model = compiled._orig_mod
        for event in case.events:
            if isinstance(event, Micro):
                model.skips = event.skips
                losses = [compiled(tokens.new_zeros(event.sizes[0])).square().mean() for _ in range(event.forwards)]
                for one in event.between:
                    call(model, one)
                sum(losses, tokens.new_zeros(())).backward()
            elif isinstance(event, Evaluate):
                with torch.no_grad():
                    compiled(tokens.new_zeros(event.sizes[0]))
            elif isinstance(event, Freeze):
                model.get_submodule(event.path).requires_grad_(event.requires_grad)
            elif isinstance(event, Call):
                call(model, event)
            elif isinstance(event, Step):
                model.zero_grad()

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=64):
        return cuda_code(
            network(case.model),
            torch.zeros(2, 5, dtype=torch.long),
            mesh_shape,
            shard=prepare,
            step=step,
            options=dict(case.options),
        )
