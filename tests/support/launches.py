"""Launch scripts, run as sbatch or a user does."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(
    script: str, *flags: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script as sbatch or a user starts it, to its end."""
    command = ["bash", str(ROOT / "launch" / script), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def pretrain_flags(line: str) -> list[str]:
    words = shlex.split(line)
    return words[words.index("pretrain_gpt.py") + 1 :]
