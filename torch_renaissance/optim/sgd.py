# SPDX-License-Identifier: BSD-3-Clause
"""SGD, a drop-in for torch's, with decoupled decay besides; the formula is csrc/math/sgd.h."""

from weakref import ref

import torch

from ..regions import Plane
from ._fused import Fused, module_groups
from ._rule import Options, Rule


def _needed(group: dict) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


class SGD(Fused, torch.optim.SGD):
    """torch.optim.SGD as one launch for all tensors and groups.

    Arguments, defaults, errors, hooks and `state_dict` are torch.optim.SGD's; `foreach` and `fused`
    are accepted and change nothing. Besides parameters or groups, `params` may be an `nn.Module`:
    its weights become one group and its biases and norm layers' parameters another, without decay.

    Args:
        decoupled_weight_decay: decay apart from the gradient, w * (1 - lr * weight_decay) before
            the step (https://arxiv.org/abs/1711.05101), instead of adding weight_decay * w to it.
    """

    _rule = Rule("sgd", {"momentum_buffer": Plane.M}, _needed, shows_step=False)
    _native = torch.optim.SGD

    def __init__(self, params, *args, decoupled_weight_decay: bool = False, **kwargs):
        groups, known = module_groups(params)
        super().__init__(groups, *args, **kwargs)
        self._model = ref(params) if known else None
        self._options = Options(known=known, model=self._model)
        if decoupled_weight_decay:  # torch's groups have no such key, so ours only where it is on
            self.defaults["decoupled_weight_decay"] = True
            for group in self.param_groups:
                group.setdefault("decoupled_weight_decay", True)
