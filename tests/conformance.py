"""Whether an API keeps to its own description, whatever it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import schemathesis
from dashboards import TOKEN, Dashboard
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

if TYPE_CHECKING:
    from collections.abc import Sequence

_SLOW = ("/events", "/doctor", "/metrics")


def check_conformance(
    dashboard: Dashboard, *, loose: Sequence[str], site: str = "", examples: int = 4
) -> set[str]:
    """Send each operation valid and invalid requests; return the paths.

    `loose`: paths whose bodies may have unknown keys, or texts, that the description cannot say all of.
    `site`: the only site that is asked for. Raises AssertionError for an answer that is not described, and
    for each 500.
    """
    described = dashboard.json("/openapi.json")
    slow = [path for path in described["paths"] if path.endswith(_SLOW)]
    schema = schemathesis.openapi.from_dict(described).exclude(path=slow)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    for operation in operations:
        # The same examples in every run, so that CI finds nothing that a developer cannot.
        @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def keeps_to_it(case: schemathesis.Case[Any]) -> None:
            if "site" in case.path_parameters:
                case.path_parameters["site"] = site
            case.call_and_validate(
                base_url=dashboard.base,
                headers={"Authorization": f"Bearer {TOKEN}"},
                excluded_checks=[positive_data_acceptance] if case.path in loose else [],
                timeout=30,
            )

        keeps_to_it()
    return {operation.path for operation in operations}
