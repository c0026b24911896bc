"""The dashboard behind a real nginx, Caddy and Traefik, set up as `How to: reverse proxies` says."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from dashboards import TOKEN, Dashboard, events, serving, sign_in
from postgres import free_port
from requirements import provide, unavailable
from sites import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "reverse-proxies.md"
NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {{}}
http {{ access_log off; {folders} {server} }}
"""
TRAEFIK = str(Path(sys.executable).with_name("traefik"))
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def documented(program: str) -> str:
    language = {"traefik": "yaml"}.get(program, program)
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(found)


@contextmanager
def proxied(program: str, configuration: str, folder: Path, port: int) -> Iterator[None]:
    """Run the proxy until it answers at the port."""
    file = folder / program
    if program == "nginx":
        folders = " ".join(f"{kind}_temp_path {kind};" for kind in KINDS)
        file.write_text(NGINX.format(folders=folders, server=configuration))
        command = ["nginx", "-p", str(folder), "-c", str(file)]
    elif program == "traefik":
        file = folder / "dynamic.yml"  # traefik.yml would be taken for its static configuration
        file.write_text(configuration)
        command = [TRAEFIK, f"--entryPoints.websecure.address=127.0.0.1:{port}"]
        command += [f"--providers.file.filename={file}", "--global.checkNewVersion=false"]
    else:
        file.write_text(f"{{\n  admin off\n  auto_https off\n}}\n{configuration}")
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]

    def answers() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    env = {"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"}
    with subprocess.Popen(command, env=env, cwd=folder, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(answers)
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("program", ["nginx", "caddy", "traefik"])
def test_the_documented_proxy_signs_in_steers_and_streams(
    site: Site, program: str, certificate: Path, tmp_path: Path
) -> None:
    if program != "traefik":
        provide(program, package=program)
    elif not Path(TRAEFIK).exists():
        unavailable("there is no wheel of Traefik for this processor")
    port = free_port()
    with serving(site, BRITER_TRUSTED_PROXIES="127.0.0.1") as dashboard:
        text = documented(program).replace("127.0.0.1:8320", f"127.0.0.1:{dashboard.port}")
        text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        text = re.sub(r"/etc/ssl/\S+(?=;)", str(certificate), text)
        tls = f"https://127.0.0.1:{port} {{\n  tls {certificate} {certificate}\n"
        text = text.replace("posts.example.org {\n", tls).replace(
            "Host(`posts.example.org", "Host(`127.0.0.1"
        )
        if program == "traefik":
            store = f"{{ certFile: {certificate}, keyFile: {certificate} }}"
            text = text.replace("{ certResolver: letsencrypt }", "{}")
            text += f"tls: {{ stores: {{ default: {{ defaultCertificate: {store} }} }} }}\n"
        trust = ssl.create_default_context(cafile=certificate)
        options = {"base_url": f"https://127.0.0.1:{port}", "verify": trust, "timeout": 30}
        with proxied(program, text, tmp_path, port), httpx.Client(**options) as page:  # type: ignore[arg-type]
            page.headers.update({"Accept": "text/html", "Origin": str(page.base_url)})
            eventually(lambda: serves(page))
            assert page.get("/").headers["location"].startswith("/sign-in")
            answer = sign_in(page, TOKEN)
            assert answer.status_code == 303
            assert "; secure" in answer.headers["set-cookie"].lower()
            with page.stream("GET", "/events") as response:
                stream = events(response)
                assert next(stream)[0] == "snapshot"
                through = Dashboard(str(page.base_url), dashboard.process, page, page)
                assert through.act("pause", reason="Lunch", **{"for": ""}).status_code == 303
                assert next(data for name, _, data in stream if name == "status")["paused"]
            headers = {"Authorization": f"Bearer {TOKEN}"}
            large = page.post("/api/pause", json={"unknown": "x" * (3 << 19)}, headers=headers)
            assert large.status_code == 422, "the proxy takes what the dashboard takes"
            refused = [forged(page, f"192.0.2.{number}") for number in range(6)]
            assert refused == [401] * 5 + [429], "nobody chooses by whose address they are counted"


def serves(page: httpx.Client) -> bool:
    """Return True if the dashboard answers. Traefik listens before it has read its configuration."""
    with suppress(httpx.TransportError):
        return page.get("/healthz").status_code == 200
    return False


def forged(page: httpx.Client, address: str) -> int:
    """Send a wrong token under another address."""
    headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": address}
    return page.get("/api/status", headers=headers).status_code
