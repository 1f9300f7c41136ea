# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW, drop-ins for torch's; the formula is csrc/math/adam.h."""

from weakref import ref

import torch

from ..regions import Plane
from ._fused import Fused, module_groups
from ._rule import Options, Rule


def _needed(group: dict) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())


_RULE = Rule(
    name="adam",
    planes={"exp_avg": Plane.M, "exp_avg_sq": Plane.V, "max_exp_avg_sq": Plane.VMAX},
    needed=_needed,
    shows_step=True,
)


class Adam(Fused, torch.optim.Adam):
    """torch.optim.Adam (https://arxiv.org/abs/1412.6980) as one launch for all tensors and groups.

    Arguments, defaults, errors, hooks and `state_dict` are torch.optim.Adam's; `foreach`, `fused`
    and `capturable` are accepted and change nothing but where `state_dict` puts `step`. Besides
    parameters or groups, `params` may be an `nn.Module`: its weights become one group and its
    biases and norm layers' parameters another, without decay.
    """

    _rule, _native = _RULE, torch.optim.Adam

    def __init__(self, params, *args, **kwargs):
        groups, known = module_groups(params)
        super().__init__(groups, *args, **kwargs)
        self._model = ref(params) if known else None
        self._options = Options(known=known, model=self._model)


class AdamW(Fused, torch.optim.AdamW):
    """torch.optim.AdamW (https://arxiv.org/abs/1711.05101), as `Adam` is torch.optim.Adam."""

    _rule, _native = _RULE, torch.optim.AdamW

    def __init__(self, params, *args, **kwargs):
        groups, known = module_groups(params)
        super().__init__(groups, *args, **kwargs)
        self._model = ref(params) if known else None
        self._options = Options(known=known, model=self._model)
