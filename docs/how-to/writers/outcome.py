#!/usr/bin/env python3
"""Read what became of a job, in three ways. Needs the standard library only.

outcome.py file QUEUE ID       look into the queue folder
outcome.py api ADDRESS ID      ask the dashboard; BRITER_DASHBOARD_TOKEN has its token
outcome.py webhook PORT        receive webhooks; BRITER_WEBHOOK_SECRET has their secret
"""

import base64
import hmac
import json
import os
import sys
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def outcome_by_file(queue: Path, job_id: str) -> str:
    """Return `waiting`, `failed: reason`, or `gone`: published, unchanged, cancelled or superseded.

    The history knows which of these: `briter-worker show ID --json`, or the API.
    """
    if (queue / ".claimed" / f"{job_id}.json").exists():
        return "waiting"
    try:
        job = json.loads((queue / f"{job_id}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "gone"
    return f"failed: {job['lastError']}" if job.get("status") == "failed" else "waiting"


def outcome_by_api(address: str, job_id: str, token: str) -> str:
    """Return the state of the job, with its commit or its error."""
    request = urllib.request.Request(  # noqa: S310 - the address is your dashboard's
        f"{address}/api/jobs/{urllib.parse.quote(job_id, safe='')}",
        headers={"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        job = json.load(response)
    commit = job["receipts"][0].get("commit") if job["receipts"] else None
    return " ".join(filter(None, [job["state"], commit, job.get("lastError")]))


def verified(body: bytes, headers: dict[str, str], secret: str) -> bool:
    """Return True if the message was signed with the secret (Standard Webhooks)."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    wanted = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return any(hmac.compare_digest(wanted, each) for each in headers["webhook-signature"].split())


class Receiver(BaseHTTPRequestHandler):
    """Prints each message, and answers 204. A message may arrive twice, with the same webhook-id."""

    def do_POST(self) -> None:
        """Take one message."""
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_ours = verified(body, headers, os.environ["BRITER_WEBHOOK_SECRET"])
        self.send_response(204 if is_ours else 400)
        self.end_headers()
        if is_ours:
            message = json.loads(body)
            data = message["data"]
            print(message["type"], data.get("slug"), data.get("commit") or data.get("error"), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["file", folder, job]:
            print(outcome_by_file(Path(folder), job))
        case ["api", address, job]:
            print(outcome_by_api(address, job, os.environ["BRITER_DASHBOARD_TOKEN"]))
        case ["webhook", port]:
            HTTPServer(("127.0.0.1", int(port)), Receiver).serve_forever()
        case _:
            sys.exit(__doc__)
