"""Set the clock of a process's Python: the folder is on its PYTHONPATH, and SKEW_S says how far."""

import os
import time

_true_time, _skew = time.time, float(os.environ["SKEW_S"])
time.time = lambda: _true_time() + _skew
