"""Communication-efficient sequence parallelism (CSPS).

* heads: `head_scatter.py` scatters them over ranks with whole weights, `layouts.py` shares rows
  where ranks split the weights;
* dropped keys: `levels.py` says how near ranks are, `sparsity.py` what share of far keys stays,
  `pipeline.py` plans which keys travel in which step;
* the choice of a sparsity: `degradation.py` predicts what dropping changes, `calibration_file.py`
  keeps what was measured, `configure.py` finds the fastest one within a bound.

All are pure functions of values.
"""

from distca.schedule.serving.csps.levels import LEVELS, NODE_PARTS, Levels, NodeParts
from distca.schedule.serving.csps.sparsity import Sparsity, kept_count

__all__ = ["LEVELS", "NODE_PARTS", "Levels", "NodeParts", "Sparsity", "kept_count"]
