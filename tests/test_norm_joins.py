# SPDX-License-Identifier: BSD-3-Clause
# What batch norm's nodes tell autograd, on a CPU with emulated launches: whatever joins, and
# however gradients are asked for, they are those of separate operations, to the bit. Kernels are
# tested in test_train_step_batch_norm.py and its like, on a GPU.

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "emulated" / "norms.py"


@pytest.fixture(scope="module")
def results():
    done = subprocess.run([sys.executable, "-W", "ignore", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_gradients_are_those_of_separate_operations(results):
    # Three gradients of one tensor, or more, may be added in another order; and a second
    # derivative's.
    ordered = {name for name in results if name.startswith("many_uses") or name.endswith("second")}
    bounds = {name: 1e-3 if name in ordered else 0.0 for name in results}
    assert len(results) > 150
    assert {n: d for n, (d, *_) in results.items() if isinstance(d, str) or d > bounds[n]} == {}


def test_gradients_are_torchs(results):
    # Three blocks in 16 bits, each with a ReLU whose kink rounding may cross.
    assert {n: d for n, (*_, d) in results.items() if isinstance(d, str) or d > 0.05} == {}


# Joins, gradients added by a kernel, and kernels that mask nothing, by output, by result.
JOINED = {
    "norm_relu": [1, 0, 0, 1, 0],
    "norm_add_relu": [2, 0, 0, 0, 1],
    "sum_of_norms": [2, 0, 1, 0, 1],
    "blocks": [6, 2, 0, 0, 3],
    "plain_blocks": [3, 2, 0, 3, 3],
    "saved_elsewhere": [6, 2, 0, 0, 3],
    "relu_alone": [0, 0, 0, 1, 0],
    "relu_of_sum_of_norms": [1, 0, 1, 0, 1],
    "a_hook_on_relus_result": [0, 0, 0, 1, 0],
}


@pytest.mark.parametrize("name", JOINED)
def test_what_joins(name, results):
    assert results[f"{name}, backward"][1] == JOINED[name]


SEPARATE = ["relus_input_is_used", "relu_twice", "relus_input_changes", "a_view"]
SEPARATE += ["a_hook_between", "a_hook_on_relus_input", "a_hook_after_relus_node"]


@pytest.mark.parametrize("name", SEPARATE)
def test_what_somebody_could_tell_does_not(name, results):
    assert results[f"{name}, backward"][1] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("name", ["a_hook_on_a_residual", "a_retained_gradient"])
def test_a_gradient_that_somebody_sees_is_whole(name, results):
    assert results[f"{name}, backward"][1] == [4, 0, 0, 0, 2]
