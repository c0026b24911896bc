"""Let a process wait for Postgres only shortly: the folder is on its PYTHONPATH."""

from types import ModuleType
from typing import Any

from briter_worker.cluster import node
from briter_worker.queues.postgres import database
from briter_worker.web import cluster, server

LIMITS: dict[ModuleType, dict[str, Any]] = {
    node: {"_REPORT_WITHIN_S": 0.5, "_REPORT_S": 0.5},
    # connect_timeout: the least of libpq
    database: {"_CONNECT_TIMEOUT_S": 0.5, "_CLIENT": {**vars(database)["_CLIENT"], "connect_timeout": "2"}},
    cluster: {"_ANSWER_S": 0.5, "_PATIENCE_S": 0.5},
    server: {"READY_S": 0.5, "_END_S": 2.0},
}
for module, limits in LIMITS.items():
    assert limits.keys() <= vars(module).keys(), "the limits have other names"
    vars(module).update(limits)
