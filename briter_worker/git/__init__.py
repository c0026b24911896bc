"""Publish through git: one worker, one branch, one remote.

GitPython hands on the whole environment of this process, and obeys some of it itself. So variables of git are
deleted before it is loaded.
"""

import logging
import os

INHERITED = tuple(name for name in os.environ if name.startswith("GIT_"))
"""Variables of git in the environment of this process, which the worker does not use."""
for _name in INHERITED:
    del os.environ[_name]
# GitPython would run the first git in PATH as it is loaded, and that may be one of the work tree.
os.environ |= {"GIT_PYTHON_REFRESH": "quiet", "GIT_PYTHON_GIT_EXECUTABLE": "/nonexistent/git"}

# GitPython logs git's output, which may hold credentials; without a handler Python prints such entries.
logging.getLogger("git").addHandler(logging.NullHandler())
logging.getLogger("git").propagate = False
