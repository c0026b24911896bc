"""Sites as data: a YAML file that declares sites, its differences from the register, and their storage.

JSON is YAML, too. A site has the keys of `site show --json`; a key that is absent is as in `site add`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from briter_worker.accepted import refusal_text
from briter_worker.cluster import sites
from briter_worker.cluster.sites import Site
from briter_worker.errors import DeclinedError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_NAMED = 10
_MAX_DEPTH = 64
_KEYS = ("remote", "branch", "adapter", "allowedPaths", "settings", "credentials")


class _DeclaredSite(BaseModel):
    """A site as the file has it."""

    model_config = ConfigDict(strict=True, extra="forbid", alias_generator=to_camel)

    remote: str
    branch: str | None = None
    adapter: str | None = None
    allowed_paths: Annotated[list[str], Field(default_factory=list)]
    settings: Annotated[dict[str, Any], Field(default_factory=dict)]
    credentials: dict[str, str] | None = None


class _SitesFile(BaseModel):
    """The whole file: sites by name."""

    model_config = ConfigDict(strict=True, extra="forbid")

    sites: dict[str, _DeclaredSite]


@dataclass(frozen=True, slots=True)
class Differences:
    """The changes that make the register what the file declares."""

    added: Sequence[Site]
    changed: Mapping[str, Mapping[str, tuple[object, object]]]
    """The old and the new value of each key that differs, by site."""
    removed: Sequence[str]
    unchanged: int
    undeclared: int
    """The number of sites that the file does not name, and that stay."""
    replaced: Sequence[Site] = ()
    """The changed sites, as they are to be."""

    def to_json(self) -> dict[str, Any]:
        """Return the differences for programs, in camelCase."""
        return {
            "added": [site.name for site in self.added],
            "changed": self.changed,
            "removed": list(self.removed),
            "unchanged": self.unchanged,
            "undeclared": self.undeclared,
        }


def read_sites(text: str, node: Settings, *, source: str) -> list[Site]:
    """Return the sites that a file declares.

    Raises UsageError, which names `source`, the sites that are refused and what is accepted.
    """
    depth = 0
    try:
        for event in yaml.parse(text, _Loader):  # the loader in C has no limit, and ends the process
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise UsageError(f"{source}: nested deeper than {_MAX_DEPTH} levels")
        document = yaml.load(text, _Loader)  # noqa: S506 - derived from the safe loader
        declared = _SitesFile.model_validate({"sites": {}} if document is None else document).sites
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{source}{where}: not valid YAML: {one_line(str(error.problem))}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"{source}: {one_line(where)} {refusal_text(first)}",
            f"sites: and below each name some of {', '.join(_KEYS)}; site export prints such a file",
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # a number may have too many digits
        raise UsageError(f"{source}: not valid YAML: {one_line(str(error))}") from None
    found, refused = [], list[UsageError]()
    for name, each in declared.items():
        # A default is stored in the row, so that all nodes agree.
        site = Site(
            name,
            each.remote,
            each.branch or node.git_branch,
            each.adapter or node.adapter,
            tuple(each.allowed_paths),
            each.settings,
            each.credentials,
        )
        try:
            found.append(sites.check_site(site, node))
        except UsageError as error:
            refused.append(UsageError(f"the site {one_line(name, 80)!r}: {error.message}", error.fix))
    if refused:
        messages = [each.message for each in refused[:_NAMED]]
        more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise UsageError(f"{source}: {'; '.join(messages)}{more}", refused[0].fix)
    return found


def compare(registered: Iterable[Site], declared: Iterable[Site], *, prune: bool) -> Differences:
    """Return what differs; with `prune`, sites that the file does not name are removed."""
    old, new = {site.name: site for site in registered}, {site.name: site for site in declared}
    changed: dict[str, Mapping[str, tuple[object, object]]] = {}
    for name in sorted(old.keys() & new.keys()):
        before, after = _declaration(old[name]), _declaration(new[name])
        if before != after:
            changed[name] = {key: (before[key], after[key]) for key in _KEYS if before[key] != after[key]}
    undeclared = sorted(old.keys() - new.keys())
    return Differences(
        added=[new[name] for name in sorted(new.keys() - old.keys())],
        changed=changed,
        removed=undeclared if prune else (),
        unchanged=len(old.keys() & new.keys()) - len(changed),
        undeclared=0 if prune else len(undeclared),
        replaced=[replace(new[name], created_at=old[name].created_at) for name in changed],
    )


def apply(database: Database, differences: Differences, by: str) -> None:
    """Store all differences or none, as changes of a user. Raises DeclinedError if a site still has jobs."""
    now = database.read_clock()
    with database.transaction() as connection:
        for site in differences.added:
            if sites.store(connection, replace(site, created_at=now, changed_by=by)) is not None:
                raise DeclinedError(f"a site {site.name!r} was added meanwhile", "repeat the command")
        for site in differences.replaced:
            sites.replace_stored(connection, replace(site, changed_by=by))
        for name in differences.removed:
            sites.remove(connection, name, discard=False, by=by)


def declare(registered: Iterable[Site]) -> dict[str, Any]:
    """Return the document that declares these sites."""
    found = ((site.name, _declaration(site).items()) for site in registered)
    return {"sites": {name: {key: value for key, value in items if value} for name, items in found}}


def dump(document: Mapping[str, Any]) -> str:
    """Return the document as YAML."""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _declaration(site: Site) -> dict[str, Any]:
    document = site.to_json()
    return {key: document[key] for key in _KEYS}


class _Loader(yaml.CSafeLoader):
    """The safe loader, which also refuses a key that occurs twice: one of two sites would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - as the base class has it
        """Return the mapping. Raises ConstructorError for a key that occurs twice."""
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [key.value for key, _ in node.value]
            pairs = enumerate(node.value)
            twice = next((key for number, (key, _) in pairs if key.value in keys[:number]), node)
            raise yaml.constructor.ConstructorError(
                problem=f"the key {one_line(str(twice.value), 80)!r} occurs twice",
                problem_mark=twice.start_mark,
            )
        return mapping
