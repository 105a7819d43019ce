"""Numbers of numpy, such as 1 / np.sqrt(D), reach a kernel as Python's: a launch knows no others (variant.py)."""

import importlib

import numpy as np
import pytest
import torch
from paths import World, gates, inputs

from specker.kernels.kv_calibrate import rope_table
from specker.kernels.variant import Variant

attention = importlib.import_module("specker.kernels.tree_attention")
clusters = importlib.import_module("specker.kernels.cluster_topk")
delta = importlib.import_module("specker.kernels.delta_rows")
kv = importlib.import_module("specker.kernels.kv_calibrate")
project = importlib.import_module("specker.kernels.kv_project")
residual = importlib.import_module("specker.kernels.residual_merge")
sample = importlib.import_module("specker.kernels.sample_rows")
topk = importlib.import_module("specker.kernels.vocab_topk")

ROWS, INTS = torch.ones(2, 16), torch.arange(2)
ROPE, CACHES = rope_table(torch.ones(4), 1.0, 2, torch.float32), torch.zeros(2, 1, 2, 1, 8)
PLACES = INTS, INTS, ROPE, *CACHES, torch.ones(1, 8), torch.ones(1, 8), np.float64(1e-6)
SEED, HEAT = np.int64(3), np.float32(0.5)
NOISE = (torch.ones(16), np.float64(1e-6)), (SEED, INTS, HEAT)


def attended():
    q, (k, v) = torch.ones(1, 1, 8), CACHES
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [1], [1], [0, 1])]
    attention.launch(q, k, v, *ints, torch.ones(1, 1, dtype=torch.int64), 1 / np.sqrt(8), 0, np.float32(3))


def ruled():
    world = World(delta.launch, inputs(2, 1, 1, 16, 16, torch.float32), gate=gates(2, 1, 16, torch.float32))
    *args, _ = world.arguments([0, 1], 0, INTS, None)
    delta.launch(*args, np.float64(1e-6))


@pytest.mark.parametrize(
    "launch",
    [
        attended,
        ruled,
        lambda: kv.launch(torch.ones(2, 32), *PLACES),
        lambda: project.launch(ROWS, torch.ones(32, 16), None, *PLACES),
        lambda: residual.launch(ROWS, ROWS[None], torch.ones(1, 16), np.float64(1e-6)),
        lambda: sample.launch(ROWS, HEAT, 5, np.float64(0.5), SEED, INTS),
        lambda: sample.launch(ROWS, HEAT, 0, 1.0, SEED, INTS),
        lambda: topk.launch(ROWS, ROWS, None, 1, *NOISE, True),
        lambda: clusters.launch(ROWS, ROWS, ROWS, INTS[:, None], 1, 1, *NOISE, True),
    ],
)
def test_a_launch_gets_numbers_of_python(monkeypatch, launch):
    given = []
    monkeypatch.setattr(Variant, "__call__", lambda self, grid, *arguments: given.extend(arguments))
    launch()
    kinds = {type(x) for x in given}
    assert float in kinds and kinds <= {int, float, torch.Tensor, type(None)}
