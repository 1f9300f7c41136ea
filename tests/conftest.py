# SPDX-License-Identifier: BSD-3-Clause
# Skips what the machine or the build cannot run, with the reason.
import pytest
import torch

from torch_renaissance._ops import build_info


def pytest_collection_modifyitems(items):
    no_cuda = None
    if not torch.cuda.is_available():
        no_cuda = "needs a GPU"
    elif build_info()["cuda"] is None:
        no_cuda = "this build has no CUDA kernels (build with TORCH_RENAISSANCE_CUDA=1)"
    gpus = torch.cuda.device_count()
    for item in items:
        if no_cuda and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=no_cuda))
        if gpus < 2 and item.get_closest_marker("multigpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, found {gpus}"))
