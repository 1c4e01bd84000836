"""Colours of all pictures, distinct in print and for the colour-blind.

The named colours are from the palette by Okabe and Ito (2008). Those drawn beside each other also
differ in lightness, so that they are distinct in black and white.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


BLUE = "#0072B2"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#CCCCCC"
BLACK = "#000000"
IN_TURN = (BLUE, ORANGE, GREEN, VERMILION, SKY_BLUE, BLACK)
"""Colours of lines and bars that only their colours distinguish."""
HIGHLIGHTS = (BLUE, ORANGE, VERMILION, SKY_BLUE, GREEN)
"""Colours of servers that are highlighted among grey ones."""


def colour_in_turn(*axes: Axes) -> None:
    """Lets lines and bars of axes take the colours in turn, each axes from the first on."""
    for each in axes:
        each.set_prop_cycle(color=IN_TURN)


def server_colours(count: int, highlighted: Sequence[int]) -> NDArray[np.float64]:
    """Returns the colours of servers, RGBA in float64 `[count, 4]`.

    Nobody tells sixteen colours apart. So a few servers have colours of their own, and all others
    are grey.

    Args:
        count: number of servers.
        highlighted: servers with a colour of their own; those beyond the number of colours have
            none.
    """
    from matplotlib.colors import to_rgba

    colours = np.tile(to_rgba(GREY), (count, 1))
    for server, colour in zip(highlighted, HIGHLIGHTS, strict=False):
        colours[server] = to_rgba(colour)
    return colours
