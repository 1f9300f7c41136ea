# SPDX-License-Identifier: BSD-3-Clause
# Weights in memory that numpy or a bytearray owns.
import pytest
import torch
from torch import nn

import torch_renaissance as tr


@pytest.mark.parametrize("gradients", ["gather", "flat"])
@pytest.mark.parametrize("kind", ["numpy", "bytearray"])
def test_memory_that_torch_did_not_allocate_stays_shared(kind, gradients):
    """Its owner sees each update, and what the owner writes is the weight."""
    numpy = pytest.importorskip("numpy")
    if kind == "numpy":
        owner = numpy.ones(4, numpy.float32)
        weight = torch.from_numpy(owner)
    else:
        owner = numpy.frombuffer(memory := bytearray(16), numpy.float32)
        owner[:] = 1
        weight = torch.frombuffer(memory, dtype=torch.float32)
    model = nn.ParameterDict({"w": nn.Parameter(weight), "b": nn.Parameter(torch.zeros(3))})
    del weight  # another tensor on the same storage would be a reason of its own
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    tr.accelerate(model, optimizer, gradients=gradients)
    assert list(tr.regions(optimizer).loose.values()) == ["its memory is not torch's own"]
    (model["w"].sum() + model["b"].sum()).backward()
    optimizer.step()
    assert owner.tolist() == [0.5] * 4 and model["b"].tolist() == [-0.5] * 3
    owner[:] = 7
    assert model["w"].tolist() == [7] * 4
    optimizer.step()
    assert owner.tolist() == [6.5] * 4
