# SPDX-License-Identifier: BSD-3-Clause
# What the tests of batch norms in Dynamo's graphs share: a model with one, its input and a
# residual, and what joined it.

import torch
from compiling import Model, random
from torch import nn

from torch_renaissance._compiled import norms

X = random(4, 8, 3, 3, channels_last=True)
R = random(4, 8, 3, 3, channels_last=True, seed=2)
NCHW = torch.contiguous_format


def model(function, norm=None, **others):
    torch.manual_seed(0)
    norm = norm or nn.BatchNorm2d(8)
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return Model(function, norm=norm, **others)


def joined(graph):
    """What each batch norm of ours does besides: "residual bias relu", or less of it."""
    words = ("residual", "bias", "relu")
    calls = [node.args[7:10] for node in graph.nodes if node.target is norms.batch_norm]
    return [" ".join(w for w, v in zip(words, c, strict=True) if v) for c in calls]
