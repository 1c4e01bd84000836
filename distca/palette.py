"""Colours of all pictures, distinct in print and for the colour-blind.

The named colours are from the palette by Okabe and Ito (2008). Those drawn beside each other also
differ in lightness, so that they are distinct in black and white.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BLUE = "#0072B2"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
GREY = "#CCCCCC"
BLACK = "#000000"
IN_TURN = (BLUE, ORANGE, GREEN, VERMILION, SKY_BLUE, BLACK)
"""Colours of lines and bars that are told apart by them alone."""


def colour_in_turn(*axes: Any) -> None:
    """Lets lines and bars of axes take the colours in turn, each axes from the first on."""
    for each in axes:
        each.set_prop_cycle(color=IN_TURN)


def spread_colours(count: int) -> Any:
    """Returns colours whose neighbours differ much, RGBA in float64 `[count, 4]`."""
    import matplotlib

    order = np.arange(count) * 0.618034 % 1.0
    return matplotlib.colormaps["viridis"](order)
