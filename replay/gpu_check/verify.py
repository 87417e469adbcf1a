"""The expert kernels of a GPU against float64, on the bytes that a replay uses."""

from functools import partial

import torch

from replay.devices.cuda import CudaDevice
from replay.devices.gpu import Task
from replay.devices.stage import Stage
from replay.gpu_check.baselines import fill
from replay.model.network import expert_output
from sim.results.metrics import Row

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Relative error of the sum of experts, in the 2-norm: inner activations and weights have 8 or 24 bits."""


def verify(stage: Stage, device: CudaDevice, experts: int) -> Row:
    """One token through that many experts, as a decoded token goes; overwrites the first slots."""
    network, profile = stage.network, stage.network.profile
    assert stage.gpu
    assert stage.launches
    experts = min(experts, len(device.pool), stage.store.distinct)
    fill(device, experts, stage.store.expert_bytes)
    hidden = torch.randn(profile.hidden_size, generator=torch.Generator().manual_seed(1)).to(network.hidden.dtype)
    network.hidden[0].copy_(hidden)
    network.experts_out.zero_()
    fused = stage.launches.experts
    tasks: list[Task] = [partial(network.expert, network.weights(device.pool[slot]), 1) for slot in range(experts)]
    if fused:
        tasks = [partial(fused, device.pool, list(range(experts)))]
    stream = stage.gpu.compute_stream()
    stage.gpu.synchronize()
    for task in tasks:
        stream.run(task)
    stage.gpu.synchronize()
    found = network.experts_out[0].double().cpu()
    network.experts_out.zero_()
    token = hidden.to(network.expert_dtype).double()[None]
    exact = torch.zeros(profile.hidden_size, dtype=torch.float64)
    for expert in range(experts):
        first, down = network.weights(torch.from_numpy(stage.host[expert]))
        exact += expert_output((first.double(), down.double()), token, profile.expert_matrices)[0]
    exact *= network.router_weight
    error = float((found - exact).norm() / exact.norm())
    return {
        "model": profile.name,
        "kernel": "fused" if fused else "matmul",
        "experts": experts,
        "relative_error": error,
        "tolerance": TOLERANCE[network.expert_dtype],
    }
