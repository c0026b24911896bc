"""Publish through git: one worker, one branch, one remote.

GitPython hands on the whole environment of this process, and obeys some of it itself. So variables of git are
deleted before it is loaded, and it does not start git to look for it.
"""

import logging
import os

for _name in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[_name]
os.environ["GIT_PYTHON_REFRESH"] = "quiet"

# GitPython logs git's output, which may hold credentials; without a handler Python prints such entries.
logging.getLogger("git").addHandler(logging.NullHandler())
logging.getLogger("git").propagate = False
