"""`python tests/recording`, from anywhere: every import comes from this checkout."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path[:] = [
        *map(str, (HERE.parents[1], HERE.parent)),
        *(path for path in sys.path if Path(path).resolve() != HERE),
    ]
    from recording.commands import main

    sys.exit(main())
