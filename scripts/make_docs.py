"""Write docs/reference from the models: make_docs.py [--check].

`--check` writes nothing, and exits with 1 and the differences if a page is out of date.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer.main
from fastapi import FastAPI
from pydantic.alias_generators import to_camel

from briter_worker import events
from briter_worker.allowlist import ADAPTER_EXCLUDED, EXCLUDED, FOLDERS
from briter_worker.commands import EPILOG, EXAMPLES, build_app
from briter_worker.errors import FailureClass, FailureCode
from briter_worker.job import job_schema
from briter_worker.settings import settings_schema
from briter_worker.sinks.metrics import GAUGES, MetricsSink
from briter_worker.web import api, server

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- Made by scripts/docs from the models; change those. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def page(title: str, *parts: str) -> str:
    """Return a whole page."""
    return "\n\n".join([f"# {title}", MADE, *(part.strip() for part in parts)]) + "\n"


def type_text(schema: dict[str, Any]) -> str:
    """Return the type of a JSON Schema as text."""
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return {"Author": "`{name, email}`", "Status": "`pending` or `failed`"}[schema["$ref"].split("/")[-1]]
    if schema["type"] == "array":
        return f"list of {type_text(schema['items'])}s"
    return "ISO-8601 time" if schema.get("format") == "date-time" else str(schema["type"])


EXAMPLE = """\
```json
{
  "id": "4f1c9b0e-hello",
  "slug": "hello",
  "paths": ["content/posts/hello.md", "content/images/hello/"],
  "message": "Publish Hello",
  "scheduledFor": "2026-01-31T09:00:00Z",
  "createdAt": "2026-01-30T17:12:08.311Z",
  "author": { "name": "Ada Author", "email": "ada@example.org" }
}
```"""


def job_page() -> str:
    """Return the page about the job file."""
    schema = job_schema()
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for key, described in schema["properties"].items():
        text = described["description"]
        is_workers = text.endswith("Written by the worker.")
        required = " **Required.**" if key in schema["required"] else ""
        meaning = text.removesuffix("Written by the worker.").strip() + required
        meaning = meaning or "`failed`: a dead letter."
        rows[is_workers].append([f"`{key}`", type_text(described), meaning])
    return page(
        "The job file",
        "One JSON object per file, `*.json`, directly in the queue folder (`storage/queue/`). The producer "
        "chooses the name; `<id>.json` is recommended. The worker never reads names that start with a dot or "
        "do not end in `.json`. The file has at most 1 MiB.",
        EXAMPLE,
        "## Keys of the producer",
        table(["key", "type", "meaning"], rows[False]),
        "## Keys of the worker",
        table(["key", "type", "meaning"], rows[True]),
        "Unknown keys stay in the file through every rewrite. The worker reads the older spellings "
        "`commitMessage` (for `message`) and `attempt` (for `attempts`), and never writes them.",
        "Print the JSON Schema: `briter-worker schema job`. [Writing jobs](../how-to/write-jobs.md) shows "
        "how to write a job safely in four languages.",
    )


MEANINGS = {
    FailureCode.NO_PATHS: (
        "No declared path may be published: see [adapters](configuration.md#adapters).",
        "Correct the paths that the CMS declares, or allow the folder with `BRITER_ALLOWED_PATHS`.",
    ),
    FailureCode.MALFORMED: (
        "The file is JSON, but breaks [the job file's table](job.md).",
        "Correct the program that writes the jobs; `lastError` names the key.",
    ),
    FailureCode.UNREADABLE: (
        "The file is not JSON. Its bytes are in `storage/quarantine/`.",
        "Have the producer [rename a complete file](../how-to/write-jobs.md) into the queue.",
    ),
    FailureCode.UNKNOWN_TYPE: (
        "No installed plugin handles jobs of this `type`.",
        "Leave `type` out, or install the plugin where the worker runs.",
    ),
    FailureCode.TOO_LARGE: (
        "A file is larger than `BRITER_WORKER_MAX_FILE_BYTES`.",
        "Make the file smaller, or raise the setting if the remote accepts such a file.",
    ),
    FailureCode.REJECTED: (
        "The remote rejects this post (a hook, a size limit, a secret scan), and no post besides.",
        "Change what the remote names in `lastError`, then save the post again.",
    ),
    FailureCode.OUTDATED: (
        "The remote has a later version of the post than this save, which a restored backup brought back.",
        "Cancel the job, or publish it all the same with `briter-worker publish-now ID-or-SLUG --over`.",
    ),
    FailureCode.CONFLICT: (
        "The same lines were changed on the remote. Both versions are kept.",
        "Save the post again with both changes, or merge `conflict/<slug>` with the commands in `fix`.",
    ),
    FailureCode.PLUGIN: (
        "A plugin refuses this post, and gives the reason.",
        "Change the post as the plugin asks.",
    ),
    FailureCode.LOST_RACE: (
        "Other pushes came first, several times in a row.",
        "Nothing: the worker retries. If it happens often, let fewer programs push to the branch.",
    ),
    FailureCode.MISSING: (
        (
            "A declared path does not exist: the site has no such file, the remote never had one, and no "
            "earlier save of the post declared it. An empty folder counts as missing, too. A job whose paths "
            "are all missing is tried again after the first two delays, then it is a dead letter. Of a job "
            "with other paths, those are published at once; if the missing ones never come, the receipt has "
            "them in `rejectedPaths`."
        ),
        "Correct the path that the CMS declares. If the file comes later, run `briter-worker retry`.",
    ),
    FailureCode.UNSETTLED: (
        (
            "A file of the post cannot be published yet: it kept changing while the worker read it, a "
            "scheduled post declares it, a `git stash` that was made after the save has it, or git wrote a "
            "conflict into it. `lastError` says which. Only the first costs an attempt."
        ),
        (
            "Nothing: the worker tries again by itself. Stop a program that writes without end. Run "
            "`git stash pop`, or drop the stash. Resolve the conflict, then run `git add`."
        ),
    ),
    FailureCode.KILLED_WORKER: (
        "The worker died while it published this job, several times.",
        "Look for the cause (memory limit, time limit of cron), then run `briter-worker retry`.",
    ),
    FailureCode.INTERNAL: (
        "An error in the worker itself. Please report it.",
        "Run `briter-worker retry`, and report `lastError`.",
    ),
    FailureCode.NETWORK: (
        "The remote cannot be reached.",
        "Nothing, if the remote is down. Otherwise check name resolution, proxy and firewall.",
    ),
    FailureCode.TIMEOUT: (
        "A git command made no progress, or took too long in all. `fix` names the post, if one is slow.",
        "Check the connection. Make the post's files smaller, or raise the setting that `fix` names.",
    ),
    FailureCode.AUTH: (
        "The remote does not accept the credentials, or there are none.",
        "Renew the [deploy key or token](../how-to/deploy-keys.md), with write access.",
    ),
    FailureCode.HOST_KEY: (
        "The remote's SSH host key is unknown, or has changed.",
        "Compare the key with its owner's, then add it to `known_hosts` ([how](../how-to/deploy-keys.md)).",
    ),
    FailureCode.REMOTE_MISSING: (
        "There is no such remote, or no repository at its address.",
        "Correct `BRITER_GIT_REMOTE` or the address: `git remote set-url`.",
    ),
    FailureCode.REMOTE_REFUSED: (
        "The remote refuses every push (a hook that refuses each post alike, a full disk, locks).",
        "Correct what `lastError` quotes: the remote's hook, its disk, its locks.",
    ),
    FailureCode.PROTECTED: (
        "The branch is protected on the remote, and the worker's account may not push to it.",
        "Allow the worker's account to push to the branch, or configure another branch.",
    ),
    FailureCode.REMOTE_REWRITTEN: (
        "The remote's branch was deleted, or set back.",
        "Restore the branch on the remote, or make the site's clone follow it: `fix` has the command.",
    ),
    FailureCode.DIVERGED: (
        "Only in the history of earlier versions: local commits were in the way of a push.",
        "Nothing: the present version does not report it.",
    ),
    FailureCode.WRONG_BRANCH: (
        "The checked-out branch is not `BRITER_GIT_BRANCH`, or HEAD is detached.",
        "Check the configured branch out: `git switch main`.",
    ),
    FailureCode.UNFINISHED: (
        "A merge, rebase, cherry-pick or bisect is under way in the site.",
        "Finish or abort it: `git status` names the command.",
    ),
    FailureCode.LOCKED: (
        "A lock file of git is in the way, and may belong to a running command.",
        "Wait, if a git command runs. Otherwise remove the file that `fix` names.",
    ),
    FailureCode.CORRUPT: (
        "The repository is damaged. The worker resets nothing by itself.",
        "Run the command in `fix`, or clone the site again. Waiting posts stay in the queue.",
    ),
    FailureCode.OWNERSHIP: (
        "The site's files belong to another user (git: dubious ownership).",
        "Run the worker as the owner, or use [a shared group](../how-to/other-user.md).",
    ),
    FailureCode.SIGNING: (
        "The key of `BRITER_GIT_SIGNING_KEY` cannot [sign](../how-to/signing.md).",
        "Correct the key or its file mode; `briter-worker doctor` signs a test commit.",
    ),
    FailureCode.NOT_A_REPOSITORY: (
        "The folder is not the top of a git repository.",
        "Set `BRITER_GIT_WORKTREE` to the top of the site's clone.",
    ),
    FailureCode.DISK: (
        "The disk is full, read-only, or failing.",
        "Free space or inodes, or mount the disk writable.",
    ),
    FailureCode.PLUGIN_BROKEN: (
        "An installed plugin cannot be loaded.",
        "Repair or uninstall the plugin that `lastError` names, then restart the worker.",
    ),
    FailureCode.GIT_MISSING: (
        "Git is not installed, or too old.",
        "Install git 2.38 or newer.",
    ),
}
CONSEQUENCES = {
    FailureClass.REFUSED: "The job can never succeed as it is, and becomes a dead letter at once. Fix the "
    "cause, then save the post again or run `briter-worker retry`.",
    FailureClass.TRANSIENT: "The worker retries the job after 1, 5, then every 30 minutes "
    "(`BRITER_WORKER_BACKOFF_MS`). After 8 attempts (`BRITER_WORKER_MAX_ATTEMPTS`) the job is a dead letter.",
    FailureClass.ENVIRONMENT: "No post of the site can be published. The worker retries as above. Once a "
    "push succeeds, dead letters of these failures are pending again. `briter-worker doctor` names the fix.",
}


def failures_page() -> str:
    """Return the page about failure codes."""
    parts = []
    for failure_class, text in CONSEQUENCES.items():
        codes = [code for code in FailureCode if code.failure_class is failure_class]
        parts += [f"## {failure_class.value.capitalize()}", text]
        for code in codes:
            meaning, action = MEANINGS[code]
            parts += [f"### `{code}`", f"{meaning} **What to do:** {action}"]
    return page(
        "Why a job fails",
        "`failure` in a job file and in the log is a code from this closed set, for programs. `lastError` "
        "describes what happened, and `fix` what to do. Each code has its anchor on this page, such as "
        "`failures.md#conflict`. See also [failed posts](../how-to/failed-posts.md).",
        *parts,
    )


FIELDS = {
    "job_id": "the job's `id`",
    "slug": "the post",
    "attempt": "number of the attempt, from 1",
    "commit": "the commit on the remote",
    "dry_run": "whether the worker runs dry",
    "duration_ms": "duration of the attempt in milliseconds",
    "rejected_paths": "declared paths that are missing or may not be published; absent if there are none",
    "error": "what happened, as one line",
    "failure": "the [failure code](failures.md)",
    "fix": "what to do; absent if nothing is known",
    "condition": "the environment failure that stops all posts; absent once it has passed",
    "retry_at": "time of the next attempt",
    "superseded_by": "the `id` of the newer job",
    "file": "where the bytes are",
    "pid": "the worker's process",
    "holder_pid": "the other worker's process, if known",
    "message": "`another worker instance is active, skipping`; of `worker-stopping`: what the stop waits for",
    "signal": "the signal that stopped the worker",
    "drained": "number of completed jobs",
    "reason": "the reason given with `pause`",
    "action": "`retry`, `publish-now`, `cancel`, `undo`, `pause` or `resume`",
    "by": "the system user of the command line; `dashboard` (a session), `token` or `token NAME` (API)",
    "until": "when the pause ends by itself",
    "site": "in a cluster: the site",
    "worker": "in a cluster: the number of the node that had the site",
}


def logged_events() -> list[type[events.Event]]:
    """Return every event that has a log line, in the order of the module."""
    found = [
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, events.Event) and "name" in vars(value)
    ]
    return [event for event in found if event is not events.Progress]


def logged_fields(event: type[events.Event]) -> list[str]:
    """Return the fields that the log shows."""
    return [name for name in event.fields if name not in event.unlogged]


def public_text(docstring: str) -> str:
    """Return the docstring with the log's spelling of fields and events."""
    public = {event.__name__: event.name for event in logged_events()}
    return re.sub(r"`(\w+)`", lambda found: f"`{public.get(found[1]) or to_camel(found[1])}`", docstring)


def log_page() -> str:
    """Return the page about the log."""
    rows = []
    for event in logged_events():
        fields = ", ".join(f"`{to_camel(name)}`" for name in logged_fields(event))
        rows.append([f"`{event.name}`", event.level, public_text(event.__doc__ or ""), fields])
    used = {name for event in logged_events() for name in logged_fields(event)}
    return page(
        "The log",
        "`briter-worker run` prints one line per event to standard output: `[briter-worker] ` and a JSON "
        "object. Every line has `time` (ISO-8601, UTC), `level` and `event`.",
        "```\n"
        '[briter-worker] {"time":"2026-01-31T09:00:00.412Z","level":"info","event":"published",'
        '"jobId":"4f1c9b0e-hello","slug":"hello","attempt":1,'
        '"commit":"52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1","dryRun":false,"durationMs":96}\n'
        "```",
        "Each attempt has one `start`, then exactly one of `published`, `nochange`, `nopaths`, `failed` and "
        "`dead-lettered`.",
        "## Events",
        table(["event", "level", "meaning", "fields"], rows),
        "## Fields",
        table(
            ["field", "meaning"], [[f"`{to_camel(name)}`", FIELDS[name]] for name in FIELDS if name in used]
        ),
    )


def default_text(value: object) -> str:
    """Return a default as a variable would spell it."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def bounds_text(described: dict[str, Any]) -> str:
    """Return the range of a number; empty for other types."""
    return f" From {described['minimum']} to {described['maximum']}." if "minimum" in described else ""


def code_list(items: Iterable[str]) -> str:
    """Return the items as code, separated by commas."""
    return ", ".join(f"`{item}`" for item in items) or "none"


GROUPS = {
    "Folders and paths": r"app_root|storage_root|queue_root|adapter|\w+_paths|git_worktree",
    "Git and the remote": r"git_\w+|publish_\w+",
    "Publishing and retries": r"worker_(?!concurrency|per_host)\w+|kind_\w+|history_\w+|plugins",
    "Links": r"\w+_href_template|live_\w+",
    "Webhooks": r"webhook_\w+|build_hook_\w+",
    "Dashboard and metrics": r"dashboard_\w+|metrics_\w+|pull_secret|trusted_proxies|proxy_\w+",
    "Cluster": r"database_url|site|worker_\w+|cache_root",
    "Others": r"\w+",
}
"""The settings of each group by the pattern of their names; of several patterns, the first counts."""


def setting_group(variable: str) -> str:
    """Return the group in which the page shows a variable."""
    name = variable.removeprefix("BRITER_").lower()
    return next(group for group, pattern in GROUPS.items() if re.fullmatch(pattern, name))


def configuration_page() -> str:
    """Return the page about settings and adapters."""
    rows: dict[str, list[list[str]]] = {group: [] for group in GROUPS}
    for key, described in settings_schema()["properties"].items():
        text, _, computed = described["description"].partition(" Default: ")
        literal = default_text(described.get("default", ""))
        default = computed.rstrip(".") or (f"`{literal}`" if literal else "empty")
        if key == "appRoot":
            default = "the current folder"
        variable = described["title"]
        row = [f"`{variable}`<br>`{key}`", default, text + bounds_text(described)]
        rows[setting_group(variable)].append(row)
    groups = [
        f"### {group}\n\n{table(['variable, and key in config.json', 'default', 'meaning'], found)}"
        for group, found in rows.items()
        if found
    ]
    folders = [
        [
            f"`{name}`",
            code_list(f"{folder}/" for folder in folders),
            code_list(ADAPTER_EXCLUDED.get(name, ())),
        ]
        for name, folders in FOLDERS.items()
    ]
    return page(
        "Configuration",
        "Three layers, lowest first: defaults, `storage/config.json`, environment. A variable that is unset "
        "or blank hides no lower layer. A value that is not accepted stops the start with exit status 2 and "
        "one line that names the variable, the value and what is accepted; so does a key that occurs twice. "
        "Other keys of the file may belong to the CMS: the start ignores them, and `doctor` names those that "
        "look like a misspelt setting. Relative folders start at `BRITER_APP_ROOT`.",
        "Print the JSON Schema: `briter-worker schema config`.",
        "```json\n"
        "{\n"
        '  "adapter": "hugo",\n'
        '  "allowedPaths": ["media"],\n'
        '  "gitBranch": "main",\n'
        '  "workerDryRun": false,\n'
        '  "workerBackoffMs": [60000, 300000, 1800000]\n'
        "}\n"
        "```",
        "Lists are comma-separated in the environment, and may be JSON lists in the file. Only an explicit "
        "false (`false`, `0`, `no`, `off`) turns the dry run off.",
        "## Settings",
        *groups,
        "## Adapters",
        "`BRITER_ADAPTER` decides which folders a job may publish, with everything under them. "
        "`BRITER_ALLOWED_PATHS` adds folders.",
        table(["adapter", "folders", "excluded"], folders),
        f"Every adapter excludes the backup, lock and system files of programs: {code_list(EXCLUDED)}. "
        "`BRITER_EXCLUDED_PATHS` adds patterns; the rules are those of `.gitignore`, the last pattern that "
        "matches decides, and `!` takes an exclusion back. An excluded path alone is refused as `nopaths`, "
        "with its pattern. Inside a declared folder it is left out; if git has it, it stays as it is.",
        "A path that `.gitignore` excludes, a symlink, a special file and a file in a nested repository are "
        "never published. See [kinds of sites](../how-to/sites.md).",
    )


EXIT_CODES = [
    ["0", "done; also: another worker is active"],
    ["1", "the command failed; `run --once`: a job failed, was dead-lettered or delayed"],
    ["2", "usage or configuration"],
]


def list_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's own tree
    """Yield every command by its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part_name, part in command.commands.items():
        yield from list_commands(part, f"{name} {part_name}")


def parameter_text(parameter: Any) -> str:  # noqa: ANN401 - click's own
    """Return how a parameter is written on the command line."""
    if parameter.param_type_name == "argument":
        name = str(parameter.metavar or parameter.name.upper())
        return f"{name}..." if parameter.nargs == -1 else name
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return flags if parameter.is_flag else f"{flags} {value_text(parameter)}"


def value_text(parameter: Any) -> str:  # noqa: ANN401 - click's own
    """Return what an option takes: its metavar, its choices, or TEXT."""
    return str(parameter.metavar or "|".join(get_args(parameter.type_descriptor.annotation)) or "TEXT")


def commands_page() -> str:
    """Return the page about commands."""
    parts = []
    for name, command in list_commands(typer.main.get_command(build_app()), "briter-worker"):
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join([name, *(parameter_text(argument) for argument in arguments)])
        rows = [
            [f"`{parameter_text(each)}`", each.help or ""] for each in command.params if each.name != "help"
        ]
        parts += [f"## `{usage}`", command.help]
        if example := EXAMPLES.get(name.removeprefix("briter-worker ")):
            parts.append(f"Example: `{example}`")
        if rows:
            parts.append(table(["option", "meaning"], rows))
    return page(
        "The commands",
        "`python -m briter_worker …`, also installed as `briter-worker`. Every command that prints data "
        "takes `--json`, and prints plain columns into a pipe. An error is one line on standard error, with "
        f"its fix at the end. {EPILOG.replace('BRITER_APP_ROOT', '`BRITER_APP_ROOT`')}",
        "`briter-worker --install-completion` has the shell complete commands, options and slugs.",
        "## Exit status",
        table(["exit status", "meaning"], EXIT_CODES),
        *parts,
    )


def schema_text(schema: dict[str, Any], parts: dict[str, Any]) -> str:
    """Return the keys that a request's body may have."""
    schema = next((each for each in schema.get("anyOf", [schema]) if "$ref" in each), schema)
    if "$ref" not in schema:
        return type_text(schema)
    described = parts[schema["$ref"].split("/")[-1]]
    required = described.get("required", ())
    return ", ".join(f"`{key}`" + (" (required)" * (key in required)) for key in described["properties"])


def api_page() -> str:
    """Return the page about the API of one site, from its OpenAPI document."""
    application = FastAPI()
    for router in (api.router, api.folder_router):
        application.include_router(router, prefix="/api")
    for router in (api.live_router, server.router):
        application.include_router(router)
    document = application.openapi()
    models = document["components"]["schemas"]
    rows = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            inputs = [f"`{each['name']}`" for each in described.get("parameters", []) if each["in"] != "path"]
            bodies = described.get("requestBody", {}).get("content", {}).values()
            inputs += ["body: " + schema_text(body["schema"], models) for body in bodies]
            text = described["description"].split("\n\n")[0].replace("\n", " ")
            rows.append([f"`{method.upper()} {path}`", text, ", ".join(inputs)])
    return page(
        "The HTTP API",
        "`briter-worker serve` answers these calls beside [the dashboard](../how-to/dashboard.md). Programs "
        "send the dashboard's token as `Authorization: Bearer`. Answers have the keys of the commands' "
        "`--json`; an error is `application/problem+json`, with the fix in `fix`. The dashboard's own "
        "`/openapi.json` has every type and limit. In a cluster, `/api/…` is `/api/sites/NAME/…`.",
        table(["call", "meaning", "parameters"], rows),
        "[The guide](../how-to/dashboard.md#for-programs) has examples with `curl`, and "
        "[this one](../how-to/outcome.md) shows how to wait for the outcome of a job.",
    )


def metrics_page() -> str:
    """Return the page about metrics, from the sink."""
    rows = [[f"`briter_{name}`", "gauge", text] for name, text in GAUGES.items()]
    for metric in MetricsSink().registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append([f"`{name}`", metric.type, metric.documentation])
    return page(
        "Metrics",
        "`briter-worker run --metrics-port 9320` and the dashboard answer `/metrics` for Prometheus. In a "
        "cluster, each number has the label `site`. [Monitoring](../how-to/monitoring.md) has alerts and a "
        "Grafana dashboard.",
        table(["metric", "type", "meaning"], sorted(rows)),
    )


def pages() -> dict[str, str]:
    """Return every page of the reference, by file name."""
    return {
        "job.md": job_page(),
        "configuration.md": configuration_page(),
        "commands.md": commands_page(),
        "log.md": log_page(),
        "failures.md": failures_page(),
        "api.md": api_page(),
        "metrics.md": metrics_page(),
    }


def main() -> int:
    """Write the pages, or compare them; return the exit status."""
    outdated = []
    for name, text in pages().items():
        file = REFERENCE / name
        written = file.read_text() if file.exists() else ""
        if written != text:
            outdated.append(name)
            if "--check" in sys.argv[1:]:
                print(
                    *difflib.unified_diff(written.splitlines(), text.splitlines(), name, "models"), sep="\n"
                )
            else:
                REFERENCE.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    if "--check" in sys.argv[1:] and outdated:
        print(f"docs/reference is out of date ({', '.join(outdated)}): run scripts/docs and commit")
        return 1
    print("docs/reference is up to date" if not outdated else f"wrote {', '.join(outdated)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
