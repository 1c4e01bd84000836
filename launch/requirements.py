"""Prints the requirements of extras, one a line: launch/requirements.py dev,plot."""

import re
import sys
import tomllib
from pathlib import Path

_OWN = re.compile(r"distca\[([\w,-]+)\]")


def requirements(extras: str, of_extras: dict[str, list[str]]) -> list[str]:
    """Returns the requirements of extras, those of the extras that they name included.

    Args:
        extras: names, separated by commas.
        of_extras: requirements by extra.
    """
    found: list[str] = []
    for extra in extras.split(","):
        for each in of_extras[extra]:
            own = _OWN.fullmatch(each)
            found += requirements(own[1], of_extras) if own else [each]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print("\n".join(requirements(sys.argv[1], project["optional-dependencies"])))
