# SPDX-License-Identifier: BSD-3-Clause
"""What a schedule's settings of its warm-up must be."""

from ._checks import check_count, check_number


def check(schedule) -> None:
    """Raises TypeError or ValueError, as `Schedule` says."""
    who = type(schedule).__name__
    warmup, steps = schedule.warmup, schedule.warmup_steps
    lr, factor = schedule.warmup_lr, schedule.warmup_factor
    check_count(who, "warmup", warmup, least=0)
    check_count(who, "warmup_steps", steps, least=0)
    if warmup and steps:
        raise ValueError(
            f"{who}: warmup={warmup} and warmup_steps={steps} both say how long the warm-up is; "
            "pass one of them"
        )
    if steps and schedule.by == "epoch":
        raise ValueError(
            f"{who}: warmup_steps={steps} changes the lr within an epoch, which by='epoch' rules "
            "out; pass warmup= in epochs, or by='batch'"
        )
    _check_start(who, "warmup_lr", lr, schedule.lr)
    _check_start(who, "warmup_factor", factor, 1.0)
    if lr is not None and factor is not None:
        raise ValueError(
            f"{who}: warmup_lr={lr!r} and warmup_factor={factor!r} both say where the warm-up "
            "starts; pass one of them"
        )
    if not (warmup or steps) and not (lr is None and factor is None):
        raise ValueError(
            f"{who}: warmup_lr or warmup_factor says where a warm-up starts, but there is none; "
            "pass warmup= or warmup_steps= too, or leave it out"
        )


def _check_start(who: str, name: str, value, most: float) -> None:
    if value is None:
        return
    check_number(who, name, value)
    if value > most:
        raise ValueError(
            f"{who}: {name} must be at most {most!r}, where the warm-up ends, got {value!r}"
        )
