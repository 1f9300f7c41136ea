# SPDX-License-Identifier: BSD-3-Clause
"""The curve of a schedule, drawn with matplotlib."""

from ._checks import check_count

_POINTS = 2_000  # more than a screen shows


def draw(schedule, steps: int | None, ax):
    """See `Schedule.plot`."""
    who = f"{type(schedule).__name__}.plot"
    steps = schedule.total_steps if steps is None else steps
    if steps is None:
        raise ValueError(f"{who}: this schedule has no end; pass steps=, how many to draw")
    check_count(who, "steps", steps)
    if ax is None:
        ax = _new_axes(who)
    chosen = [*range(0, steps, -(-steps // _POINTS)), steps]
    per_unit = schedule.steps_per_epoch or 1
    # Updates have one lr each, nothing in between.
    ax.step([s / per_unit for s in chosen], [schedule(s) for s in chosen], where="post")
    ax.set_xlabel("epoch" if schedule.steps_per_epoch else "step")
    ax.set_ylabel("lr")
    return ax


def _new_axes(who: str):
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            f"{who} needs matplotlib: `pip install matplotlib`, or install torch_renaissance with "
            "its extra `plot`"
        ) from error
    return pyplot.subplots()[1]
