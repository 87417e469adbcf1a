"""The CUDA device, where there is one."""

import dataclasses

import pytest
import torch

from policies.contract import Shape
from policies.registry import parse
from replay.cuda import CudaDevice
from replay.driver import Plan, play
from replay.network import Network
from replay.store import HostStore
from sim.cells import Requests
from sim.models import model
from traces.synthetic import synthetic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

L, E, K = 4, 8, 2


@pytest.mark.parametrize("policy", ["lru", "eamc", "lru+popular:n=4"])
@pytest.mark.parametrize("cold", [False, True])
def test_every_slot_holds_its_expert_whenever_it_computes(policy: str, cold: bool) -> None:
    profile = dataclasses.replace(model("olmoe-1b-7b"), moe_layers=L, experts=E, top_k=K)
    network = Network(profile, torch.device("cuda"), max_tokens=16, seed=0)
    store = HostStore(L * E, profile.expert_bytes, network.expert_dtype, seed=0)
    trace = synthetic(3, 12, layers=L, experts=E, top_k=K, seed=1, prompt_tokens=5)
    device = CudaDevice(store, network, 10, verify=True)
    try:
        plan = Plan(Requests(trace), Shape(L, E), 10, parse(policy), profile.expert_bytes, 1 << 20, cold)
        log = play(plan, device)
    finally:
        device.close()
    assert network.finite()
    assert log.demand_transfers.sum() == log.misses.sum() > 0
