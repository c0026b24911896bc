"""Write docs/reference from the models: make_docs.py [--check].

What a reader looks up is generated, so that it cannot say what the program does not do. `--check` writes
nothing, and exits 1 with the differences when a page has fallen behind.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic.alias_generators import to_camel

from briter_worker import events
from briter_worker.adapters import folders_for, names
from briter_worker.commands.app import app
from briter_worker.contract import job_schema
from briter_worker.errors import Failure, Kind
from briter_worker.settings import settings_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- Made by scripts/docs from the models; change those. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a cell keeps its line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def page(title: str, *parts: str) -> str:
    """A whole page."""
    return "\n\n".join([f"# {title}", MADE, *(part.strip() for part in parts)]) + "\n"


def kind_of(schema: dict[str, Any]) -> str:
    """A JSON Schema's type in words."""
    if "anyOf" in schema:
        return " or ".join(kind_of(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return {"Author": "`{name, email}`", "Status": "`pending` or `failed`"}[schema["$ref"].split("/")[-1]]
    if schema["type"] == "array":
        return f"list of {kind_of(schema['items'])}s"
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
    """The job file, key by key."""
    schema = job_schema()
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for key, what in schema["properties"].items():
        text = what["description"]
        by_worker = text.endswith("Written by the worker.")
        needed = " **Required.**" if key in schema["required"] else ""
        words = text.removesuffix("Written by the worker.").strip() + needed
        rows[by_worker].append([f"`{key}`", kind_of(what), words or "`pending`, or `failed`: a dead letter."])
    return page(
        "The job file",
        "One JSON object in one file, `*.json`, directly in the queue folder (`storage/queue/`). The name is "
        "the writer's choice; `<id>.json` is recommended. A name that starts with a dot, or does not end in "
        "`.json`, is never read. The file has at most 1 MiB.",
        EXAMPLE,
        "## What a writer writes",
        table(["key", "type", "meaning"], rows[False]),
        "## What the worker writes",
        table(["key", "type", "meaning"], rows[True]),
        "Keys that the worker does not know stay in the file through every rewrite. The older spellings "
        "`commitMessage` (for `message`) and `attempt` (for `attempts`) are read, never written.",
        "The JSON Schema: `briter-worker schema job`. How to write a job safely, in four languages: "
        "[writing jobs](../how-to/write-jobs.md).",
    )


MEANINGS = {
    Failure.NO_PATHS: "No declared path may be published: see `BRITER_ADAPTER`, `BRITER_ALLOWED_PATHS`.",
    Failure.MALFORMED: "The file is JSON, but not a job as [its table](job.md) has it.",
    Failure.UNREADABLE: "The file is no JSON; its bytes are kept in `storage/quarantine/`.",
    Failure.UNKNOWN_TYPE: "Nothing here handles jobs of this `type`.",
    Failure.TOO_LARGE: "A file is larger than `BRITER_WORKER_MAX_FILE_BYTES`.",
    Failure.REJECTED: "The remote refuses this post alone (a hook, a size limit, a secret scan).",
    Failure.CONFLICT: "The same lines were changed on the remote; both versions are kept.",
    Failure.PLUGIN_BROKEN: "A plugin that is installed cannot be loaded.",
    Failure.PLUGIN: "A plugin does not let this post through, and says why.",
    Failure.LOST_RACE: "Somebody else pushed first, several times in a row.",
    Failure.UNSETTLED: "A file kept changing while it was read.",
    Failure.KILLED_WORKER: "The worker died while it published this job, time and again.",
    Failure.INTERNAL: "A mistake in the worker itself; please report it.",
    Failure.NETWORK: "The remote cannot be reached.",
    Failure.TIMEOUT: "Git made no progress for `BRITER_GIT_TIMEOUT_MS`.",
    Failure.AUTH: "The remote does not accept the credentials, or there are none.",
    Failure.HOST_KEY: "The remote's SSH host key is unknown, or has changed.",
    Failure.REMOTE_MISSING: "No such remote, or no such repository behind it.",
    Failure.REMOTE_REFUSED: "The remote refuses every push (a protected branch, its own disk or locks).",
    Failure.REMOTE_REWRITTEN: "The remote's branch was deleted, or moved back.",
    Failure.DIVERGED: "A person's unpushed commits stand against the remote's.",
    Failure.WRONG_BRANCH: "Another branch than `BRITER_GIT_BRANCH` is checked out, or none.",
    Failure.UNFINISHED: "A merge, rebase, cherry-pick or bisect is under way in the site.",
    Failure.LOCKED: "A lock file of git's is in the way, and is not provably ours to remove.",
    Failure.CORRUPT: "The repository is damaged; nothing is reset by itself.",
    Failure.OWNERSHIP: "The site's files belong to another user (git: dubious ownership).",
    Failure.NOT_A_REPOSITORY: "The folder is not the top of a git repository.",
    Failure.DISK: "The disk is full, read-only, or failing.",
    Failure.GIT_MISSING: "Git is not installed, or too old.",
}
KINDS = {
    Kind.REFUSED: (
        "This job will never succeed as it is: it is dead-lettered at once. Mend the cause, then save the "
        "post again, or `briter-worker retry`."
    ),
    Kind.TRANSIENT: (
        "This batch was unlucky: the job is tried again after 1, 5, then every 30 minutes "
        "(`BRITER_WORKER_BACKOFF_MS`), and dead-lettered after 8 attempts (`BRITER_WORKER_MAX_ATTEMPTS`)."
    ),
    Kind.ENVIRONMENT: (
        "No post of the site could be published. Tried again as above; and once a push succeeds, the dead "
        "letters it caused wait again by themselves. `briter-worker doctor` names the fix."
    ),
}


def failures_page() -> str:
    """Every word of `failure`, by what it means for the job."""
    parts = []
    for kind, text in KINDS.items():
        words = [failure for failure in Failure if failure.kind is kind]
        parts += [f"## {kind.value.capitalize()}", text]
        parts.append(table(["`failure`", "meaning"], [[f"`{word}`", MEANINGS[word]] for word in words]))
    return page(
        "Why a job fails",
        "`failure` in a job file and in the log is one word of this closed set, for programs; `lastError` is "
        "one line for a person, and says what to do. See [failed posts](../how-to/failed-posts.md).",
        *parts,
    )


FIELDS = {
    "job_id": "the job's `id`",
    "slug": "the post",
    "attempt": "which attempt, from 1",
    "commit": "the commit on the remote",
    "dry_run": "whether nothing really reaches the remote",
    "duration_ms": "how long the attempt took",
    "rejected_paths": "declared paths that may not be published; only when there are any",
    "error": "one line for a person",
    "failure": "[why](failures.md), as one word",
    "condition": "what keeps any post from being published, in words; absent once that has passed",
    "retry_at": "when it is tried again",
    "superseded_by": "the `id` of the newer job",
    "file": "where the bytes are",
    "pid": "the worker's process",
    "holder_pid": "the other worker's process, when it is known",
    "message": "`another worker instance is active, skipping`",
    "signal": "what asked it to stop",
    "drained": "how many jobs were settled",
    "reason": "why, in the words of whoever asked for it",
    "until": "when it ends by itself",
    "stale": "how many receipts are out of sight now",
    "deleted": "how many receipts are gone",
}


def logged() -> list[type[events.Event]]:
    """Every event that has a line in the log, in the order of the module."""
    found = [
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, events.Event) and "name" in vars(value)
    ]
    return [event for event in found if event is not events.Progress]


def told(event: type[events.Event]) -> list[str]:
    """The fields that the log shows."""
    return [field.name for field in dataclasses.fields(event) if field.name not in event.unlogged]


def for_readers(docstring: str) -> str:
    """A docstring with the log's spelling of fields and events instead of the code's."""
    words = {event.__name__: event.name for event in logged()}
    return re.sub(r"`(\w+)`", lambda m: f"`{words.get(m[1]) or to_camel(m[1])}`", docstring)


def log_page() -> str:
    """Every event, with its fields."""
    rows = []
    for event in logged():
        fields = [f"`{to_camel(name)}`" for name in told(event)]
        rows.append([f"`{event.name}`", event.level, for_readers(event.__doc__ or ""), ", ".join(fields)])
    used = {name for event in logged() for name in told(event)}
    return page(
        "The log",
        "`briter-worker run` prints one line per event to standard output: `[briter-worker] ` and a JSON "
        "object. Every line has `time` (ISO-8601, UTC), `level` and `event`.",
        "```\n"
        '[briter-worker] {"time":"2026-01-31T09:00:00.412Z","level":"info","event":"published",'
        '"jobId":"4f1c9b0e-hello","slug":"hello","attempt":1,'
        '"commit":"52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1","dryRun":false,"durationMs":96}\n'
        "```",
        "Per attempt there is one `start`, then exactly one of `published`, `nochange`, `nopaths`, `failed` "
        "and `dead-lettered`.",
        "## Events",
        table(["event", "level", "meaning", "fields"], rows),
        "## Fields",
        table(
            ["field", "meaning"],
            [[f"`{to_camel(name)}`", text] for name, text in FIELDS.items() if name in used],
        ),
    )


def spelled(value: object) -> str:
    """A default as it would be written in the environment."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def bounds(what: dict[str, Any]) -> str:
    """What numbers and words are accepted, where the schema says so."""
    if "enum" in what:
        return ""  # the adapters have a table of their own
    high = what.get("maximum", what.get("exclusiveMaximum"))
    return f" From {what['minimum']} to {high}." if "minimum" in what else ""


def configuration_page() -> str:
    """Every setting, in both spellings, and the adapters."""
    rows = []
    for key, what in settings_schema()["properties"].items():
        text, _, computed = what["description"].partition(" Default: ")
        literal = spelled(what.get("default", ""))
        default = computed.rstrip(".") or (f"`{literal}`" if literal else "empty")
        if key == "appRoot":
            default = "the current folder"
        rows.append([f"`{what['title']}`", f"`{key}`", default, text + bounds(what)])
    folders = [
        [f"`{name}`", ", ".join(f"`{folder}/`" for folder in folders_for(name)) or "none of its own"]
        for name in names()
    ]
    return page(
        "Configuration",
        "Three layers, lowest first: defaults, `storage/config.json`, the environment. A variable that is "
        "unset or empty hides no lower layer. A value that does not parse stops the start with exit 2 and "
        "one line that names it and what is accepted. Relative folders resolve against `BRITER_APP_ROOT`.",
        table(["variable", "in config.json", "default", "meaning"], rows),
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
        "false (`false`, `0`, `no`, `off`) turns the dry run off. "
        "The JSON Schema: `briter-worker schema config`.",
        "## Adapters",
        "`BRITER_ADAPTER` says which folders a job may publish, everything under them; "
        "`BRITER_ALLOWED_PATHS` adds more.",
        table(["adapter", "folders"], folders),
        "A path that `.gitignore` excludes, a symlink, a special file or one inside a nested repository is "
        "not published, wherever it is. See [kinds of sites](../how-to/sites.md).",
    )


EXIT_CODES = [
    ["0", "done; also: another worker is active"],
    ["1", "something that was asked for failed; `run --once`: any job failed, was dead-lettered or put off"],
    ["2", "usage or configuration"],
]


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's own tree
    """Every command that can be run, by its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, part in command.commands.items():
        yield from leaves(part, f"{name} {word}")


def argument_of(parameter: Any) -> str:  # noqa: ANN401 - click's own
    """How a parameter is written on the command line."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return words if parameter.is_flag else f"{words} {value_of(parameter)}"


def value_of(parameter: Any) -> str:  # noqa: ANN401 - click's own
    """What an option takes: its own word, its choices, or any text."""
    kind = parameter.type_descriptor.annotation
    choices = list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []
    return str(parameter.metavar or "|".join(choices) or "TEXT")


def commands_page() -> str:
    """Every command, with what it takes."""
    parts = []
    for name, command in leaves(typer.main.get_command(app), "briter-worker"):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([name, *(argument_of(argument) for argument in arguments)])
        rows = [[f"`{argument_of(p)}`", p.help or ""] for p in command.params if p.name != "help"]
        parts += [f"## `{usage}`", command.help]
        if rows:
            parts.append(table(["", ""], rows))
    return page(
        "The commands",
        "`python -m briter_worker …`, also installed as `briter-worker`. Every command that prints data "
        "takes `--json`, and prints plain text when it does not write to a terminal.",
        table(["exit code", "meaning"], EXIT_CODES),
        *parts,
    )


def pages() -> dict[str, str]:
    """Every page of the reference, by file name."""
    return {
        "job.md": job_page(),
        "configuration.md": configuration_page(),
        "commands.md": commands_page(),
        "log.md": log_page(),
        "failures.md": failures_page(),
    }


def main() -> int:
    """Write the pages, or compare them."""
    behind = []
    for name, text in pages().items():
        file = REFERENCE / name
        written = file.read_text() if file.exists() else ""
        if written != text:
            behind.append(name)
            if "--check" in sys.argv[1:]:
                print(
                    *difflib.unified_diff(written.splitlines(), text.splitlines(), name, "models"), sep="\n"
                )
            else:
                REFERENCE.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    if "--check" in sys.argv[1:] and behind:
        print(f"docs/reference has fallen behind ({', '.join(behind)}): run scripts/docs and commit")
        return 1
    print("docs/reference is up to date" if not behind else f"wrote {', '.join(behind)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
