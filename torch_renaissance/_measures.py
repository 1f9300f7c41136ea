# SPDX-License-Identifier: BSD-3-Clause
"""What an evaluation measures: summed up on the device, read once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """What an `Evaluator` returns.

    Attributes:
        loss: mean over the samples.
        accuracy: for each k the share of samples whose label is among the k largest outputs, from 0
            to 1. `top1` and so on are short for `accuracy[1]`.
        samples: labels that were counted.
    """

    loss: float
    accuracy: dict[int, float]
    samples: int

    def __getattr__(self, name: str) -> float:
        if name.startswith("top") and name[3:].isdecimal() and int(name[3:]) in self.accuracy:
            return self.accuracy[int(name[3:])]
        raise AttributeError(
            f"Evaluation has no {name!r}; topk=(1, 5) of the Evaluator makes top1 and top5"
        )

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        parts += [f"top-{k} {100 * share:.2f} %" for k, share in self.accuracy.items()]
        return ", ".join([*parts, f"{self.samples:,} samples"])


class Submitted:
    """An evaluation that the device may still be at; see `Evaluator.submit`."""

    def __init__(
        self, values: Tensor, topk: tuple[int, ...], event: torch.cuda.Event | None = None
    ):
        self._values, self._topk = values, topk
        self.event = event  # recorded when `values` are there; None: they are

    def done(self) -> bool:
        """Whether `result` needn't wait."""
        return self.event is None or self.event.query()

    def result(self) -> Evaluation:
        """The evaluation, the same at each call. Waits for the device.

        Raises:
            ValueError: where there were no samples.
            IndexError: for labels that are neither a class nor ignored.
        """
        if self.event is not None:
            self.event.synchronize()
        samples, bad, *correct = self._values[1:].tolist()
        if bad:
            raise IndexError(
                f"Evaluator: {bad:,} of {samples:,} labels are no class of the model's "
                "output, i.e. not in [0, C); an ignore_index of the loss_fn leaves a label out"
            )
        if not samples:
            raise ValueError("Evaluator: there are no samples; the loader is empty or all ignored")
        accuracy = {k: c / samples for k, c in zip(self._topk, correct, strict=True)}
        loss = self._values[:1].view(torch.float64).item() / samples
        return Evaluation(loss, accuracy, samples)


class Sums:
    """The loss in fp64 and counts in int64, of all batches since `zero_`, in one tensor.

    Args:
        topk: the numbers of classes among which a label may be.
        classes: whether integer targets are labels of classes even if there is no topk.
    """

    def __init__(self, device: torch.device, topk: tuple[int, ...], classes: bool):
        self.device, self._topk, self._classes = device, topk, classes or bool(topk)
        # the bits of the loss, then: samples, labels that are no class, correct ones for each k
        self._all = torch.zeros(3 + len(topk), dtype=torch.int64, device=device)
        self._loss, self._counts = self._all[:1].view(torch.float64), self._all[1:]

    def zero_(self) -> None:
        self._all.zero_()

    def add(self, loss: Tensor, output: Tensor, target: Tensor, ignore_index: int) -> None:
        """Adds a batch. Waits for nothing.

        Args:
            loss: mean over the batch, of one element.
            output: (N, C) or (N, C, d1, ...) scores of C classes; anything if there is no topk.
            target: (N) or (N, d1, ...) integer labels; anything of N rows if there is no topk.
            ignore_index: the label of samples that aren't counted.
        """
        if are_labels(output, target):
            classes, target = output.shape[1], target.long()
            counted = (target != ignore_index).sum()
            valid = (target != ignore_index) & (target >= 0) & (target < classes)
            n_valid = valid.sum()
            correct = [
                (_among_largest(output, target, k) & valid).sum() if k < classes else n_valid
                for k in self._topk
            ]
            bad = counted - n_valid if self._classes else torch.zeros_like(counted)
            self._counts.add_(torch.stack([counted, bad, *correct]))
        else:
            counted = torch.full((), len(target), dtype=torch.int64, device=self.device)
            self._counts[0].add_(counted)
        # Where nothing is counted, a mean is not a number.
        weighted = loss.detach().reshape(1).double() * counted
        self._loss.add_(weighted.masked_fill(counted == 0, 0.0))

    def submit(self) -> Submitted:
        """What has been summed up so far. Waits for nothing."""
        if self.device.type != "cuda":
            return Submitted(self._all.clone(), self._topk)
        values = torch.empty_like(self._all, device="cpu", pin_memory=True)
        values.copy_(self._all, non_blocking=True)
        return Submitted(values, self._topk, torch.cuda.current_stream(self.device).record_event())


def are_labels(output: Tensor, target: Tensor) -> bool:
    """Whether a target has an integer label for each distribution over dim 1 of the output."""
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    return integer and output.ndim >= 2 and target.shape == output.shape[:1] + output.shape[2:]


def _among_largest(output: Tensor, target: Tensor, k: int) -> Tensor:
    if k == 1:
        return output.argmax(1) == target
    largest = output.topk(k, dim=1, sorted=False).indices
    return (largest == target.unsqueeze(1)).any(1)
