"""The rules that a git host applies to a push, asked of its API: GitHub, GitLab, Gitea and Forgejo."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from briter_worker.doctor.finding import Finding, error, ok, warning
from briter_worker.errors import FixableError
from briter_worker.sinks.webhooks import UndeliveredError, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings

    Ask = Callable[[str], Any]
    """Takes a path below the API's address; returns its JSON. Raises FixableError."""

_DEADLINE_S = 10.0
_MAX_BYTES = 1 << 20
_OK = 200
_REMOTE = re.compile(r"(?:\w+://)?(?:[^@/]*@)?([A-Za-z0-9][\w.-]+)(?::\d+(?=/))?[:/]/*(.+?)(?:\.git)?/*")
_APIS = {"github": "v3", "gitlab": "v4", "gitea": "v1", "forgejo": "v1", "codeberg": "v1"}
"""The version of the API, by a word in the host's name."""
_HARMLESS = {"creation", "deletion", "non_fast_forward", "required_linear_history"}
"""Types of GitHub's rules that no push of the worker breaks."""
_PROTECTIONS = (
    *("required_pull_request_reviews", "required_status_checks", "required_signatures"),
    *("restrictions", "lock_branch"),
)
"""Keys of GitHub's older branch protection that refuse a push."""
_SIGNATURES = "required signatures"
SET_API = "set BRITER_GIT_HOST_API to the host's own API, such as https://git.example.org/api/v4"


def check_rules(settings: Settings, remote: str) -> Finding:
    """Report what the host says of a push to the branch by the token's user."""
    branch = settings.git_branch
    parts = None if remote.startswith(("/", ".", "file:")) else _REMOTE.fullmatch(remote)
    if parts is None:
        message = "the remote is no address of a git host, which could be asked for its rules"
        return warning("rules", message, "unset BRITER_GIT_HOST_TOKEN")
    host = re.sub(r"^(?:alt)?ssh\.", "", parts[1].lower())  # where ssh is at port 443
    try:
        api = _api_of(host, settings)
        prefix, _, version = api.partition("/api/")
        path = parts[2].removeprefix(urlsplit(prefix).path.strip("/") + "/")
        look = {"v4": _ask_gitlab, "v1": _ask_gitea}.get(version, _ask_github)
        token, deadline = settings.git_host_token, time.monotonic() + _DEADLINE_S
        may_push, rules = look(lambda place: _get(api + place, token, deadline), path, branch)
    except FixableError as problem:
        return warning("rules", f"{host} was not asked for its rules: {problem.message}", problem.fix)
    except Exception:  # noqa: BLE001 - an answer can be anything
        return warning("rules", f"{host} was asked for its rules; the answer is not of a known API", SET_API)
    if not may_push:
        message = f"{branch} is protected on {host}, and the token's user may not push to it"
        return error("rules", message, f"on {host}, let the account that pushes push to {branch}")
    rules = [rule for rule in rules if rule != _SIGNATURES or not settings.git_signing_key]
    if rules:
        fix = "sign the commits: set BRITER_GIT_SIGNING_KEY" if _SIGNATURES in rules else ""
        fix = fix or f"on {host}, let the account that pushes bypass these rules"
        return warning("rules", f"{branch} has rules on {host} that refuse pushes: {', '.join(rules)}", fix)
    return ok("rules", f"{host} was asked: it has no rule that refuses a push to {branch}")


def _api_of(host: str, settings: Settings) -> str:
    """Return the address of the host's API. Raises FixableError rather than send the token elsewhere."""
    version = next((version for word, version in _APIS.items() if word in host), "")
    api = settings.git_host_api.rstrip("/")
    # In a cluster, who adds a site would choose who gets the token.
    if not api and version and not settings.database_url:
        api = "https://api.github.com" if host == "github.com" else f"https://{host}/api/{version}"
    if not api:
        raise FixableError("the address of its API is not known", SET_API)
    if urlsplit(api).hostname not in {host, f"api.{host}"}:
        raise FixableError("BRITER_GIT_HOST_API is the address of another host", SET_API)
    return api


def _get(url: str, token: str, deadline: float) -> Any:  # noqa: ANN401 - any JSON
    """Return the JSON of an answer.

    Raises FixableError, and ValueError or RecursionError for an answer that is no JSON.
    """
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    left = max(0.01, deadline - time.monotonic())
    try:
        answer, body = request("GET", url, headers, allow_private=True, within=left, max_bytes=_MAX_BYTES)
    except UndeliveredError as problem:
        raise FixableError(
            f"its API gave no answer: {problem}", "look whether this machine reaches it"
        ) from None
    if len(body) > _MAX_BYTES:
        raise FixableError(f"its API sent more than {_MAX_BYTES} bytes", SET_API)
    if answer.status != _OK:
        fix = (
            "give BRITER_GIT_HOST_TOKEN a token that may read the repository, or correct BRITER_GIT_HOST_API"
        )
        raise FixableError(f"its API answered {answer.status}", fix)
    return json.loads(body)


def _if_permitted(ask: Ask, place: str) -> Any:  # noqa: ANN401 - any JSON
    """Return what only some tokens may see; {} if this one may not, or there is none."""
    try:
        return ask(place)
    except FixableError:
        return {}


def _ask_github(ask: Ask, path: str, branch: str) -> tuple[bool, list[str]]:
    """Return the rulesets' rules that the token's user cannot bypass, and those of the protection."""
    place = f"/repos/{quote(path)}"
    rules = ask(f"{place}/rules/branches/{quote(branch, safe='')}?per_page=100")
    rules = [(int(each["ruleset_id"]), str(each["type"])) for each in rules if each["type"] not in _HARMLESS]
    sets = {number: _if_permitted(ask, f"{place}/rulesets/{number}") for number, _ in rules}
    found = [
        name.replace("_", " ")
        for number, name in rules
        if sets[number].get("current_user_can_bypass") not in {"always", "exempt"}
    ]
    place += f"/branches/{quote(branch, safe='')}"
    answer = ask(place)
    if answer.get("protection", {}).get("enabled", answer["protected"]):
        protection = _if_permitted(ask, f"{place}/protection")
        found += [
            key.replace("_", " ")
            for key in _PROTECTIONS
            if key in protection and protection[key].get("enabled", True)
        ]
        found += [] if protection else ["a branch protection that this token may not read"]
    return True, list(dict.fromkeys(found))


def _ask_gitlab(ask: Ask, path: str, branch: str) -> tuple[bool, list[str]]:
    place = f"/projects/{quote(path, safe='')}"
    answer = ask(f"{place}/repository/branches/{quote(branch, safe='')}")
    signed = _if_permitted(ask, f"{place}/push_rule").get("reject_unsigned_commits")
    return not answer["protected"] or bool(answer["can_push"]), [_SIGNATURES] if signed else []


def _ask_gitea(ask: Ask, path: str, branch: str) -> tuple[bool, list[str]]:
    place = f"/repos/{quote(path)}"
    answer = ask(f"{place}/branches/{quote(branch, safe='')}")
    if not answer["protected"]:
        return True, []
    rule = quote(answer.get("effective_branch_protection_name") or branch, safe="")
    signed = _if_permitted(ask, f"{place}/branch_protections/{rule}").get("require_signed_commits")
    return bool(answer["user_can_push"]), [_SIGNATURES] if signed else []
