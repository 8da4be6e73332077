"""The places where a vendor's library may be, in the order in which they are tried.

If the user gives a path, no other place is tried. Otherwise a copy that is already in the process comes first, because
two copies do not know each other's handles. Then come the package of the Python environment, the loader's path, and
known folders, such as conda's and the vendor's own.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Literal

# (what messages call the place, the path or bare name, how to try it): see csrc/base/dynlib.h.
Candidate = tuple[str, str, Literal["usual", "loaded", "must"]]


def places(
    soname: str, said: str | None, variable: str, *, wheel: str = "", homes: Sequence[tuple[str, str]] = ()
) -> list[Candidate]:
    """The places for the library `soname`. said: the path that the user gave in the variable. wheel: its folder in
    site-packages. homes: known folders, each as (what messages call it, folder)."""
    if said:
        return [(variable, said, "must")]
    found: list[Candidate] = [("in this process", soname, "loaded")]
    if wheel:
        found.append(("site-packages", os.path.join(sysconfig.get_path("purelib"), wheel, soname), "usual"))
    found.append(("the loader's path", soname, "usual"))
    found += [(name, os.path.join(folder, soname), "usual") for name, folder in homes]
    return found


def homes(env: Mapping[str, str], *variables: str, below: Sequence[str] = ("lib64", "lib")) -> list[tuple[str, str]]:
    """The library folders that are below the folders that these variables name."""
    return [(name, os.path.join(env[name], folder)) for name in variables if env.get(name) for folder in below]
