"""A remote behind HTTP that fails in every way it can: the post waits, is not lost, and is not doubled."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from outcomes import (
    CANARY,
    LAST,
    SOON,
    assert_dead_letter,
    assert_once,
    assert_published,
    assert_put_off,
    assert_refused,
    assert_waits_until_it_passes,
    save,
)
from remotes import (
    Exchange,
    HttpRemote,
    Late,
    asks_for,
    cuts_after,
    cuts_before,
    cuts_the_answer,
    http_remote,
    says,
    serve,
    stalls,
)
from sites import program

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sites import Result, Site

HOSTILE = (
    f"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x08\x00 https://user:{CANARY}@h/x?private_token={CANARY}\n"
    f"Authorization: Basic {CANARY}\nfatal: No space left on device\nprotected branch\ntoken={CANARY}\n"
)


@pytest.fixture
def http(site: Site) -> Iterator[HttpRemote]:
    """The site's remote, reached by HTTP."""
    with http_remote(site.root) as remote:
        site.git("remote", "set-url", "origin", remote.url(site.remote))
        yield remote


@pytest.mark.parametrize(
    ("code", "failure", "fix"),
    [
        (401, FailureCode.AUTH, "deploy key or token"),
        (403, FailureCode.AUTH, "deploy key or token"),
        (404, FailureCode.REMOTE_MISSING, "git remote -v"),
        (429, FailureCode.NETWORK, "limits how often"),
        (500, FailureCode.NETWORK, "the host's status"),
        (503, FailureCode.NETWORK, "the host's status"),
    ],
)
@pytest.mark.parametrize("where", ["at once", "at the push"])
def test_a_host_that_refuses_is_waited_for(
    site: Site, http: HttpRemote, where: str, code: int, failure: FailureCode, fix: str
) -> None:
    if where == "at once":
        http.behaviour = says(code, "No.", WWW_Authenticate='Basic realm="posts"')
    else:
        http.on_push = says(code, "No.")
        if code == 404:
            failure, fix = FailureCode.NETWORK, "check the network"  # it was there a moment ago
    reason = assert_waits_until_it_passes(site, failure, fix, http.heal)
    assert str(code) in reason or code in {401, 404}
    assert http.asked[-1] == "POST git-receive-pack"


@pytest.mark.parametrize(
    ("page", "failure", "fix"),
    [
        ("<html>\nPlease log in.\n</html>\n", FailureCode.REMOTE_MISSING, "git remote -v"),
        (
            "Please log in",
            FailureCode.REMOTE_REWRITTEN,
            "check what answers at its address: git ls-remote origin",
        ),
    ],
)
def test_a_page_in_place_of_a_repository_is_waited_for(
    site: Site, http: HttpRemote, page: str, failure: FailureCode, fix: str
) -> None:
    http.behaviour = says(200, page)
    assert_waits_until_it_passes(site, failure, fix, http.heal)


@pytest.mark.parametrize("where", ["at once", "at the push"])
def test_a_host_that_falls_silent_is_given_up_with_every_process(
    site: Site, http: HttpRemote, where: str
) -> None:
    if where == "at once":
        http.behaviour = stalls
    else:
        http.on_push = stalls
    fix = "raise BRITER_GIT_TIMEOUT_MS"
    assert_waits_until_it_passes(site, FailureCode.TIMEOUT, fix, http.heal, **SOON)


def test_a_connection_cut_before_the_push_is_applied_is_waited_for(site: Site, http: HttpRemote) -> None:
    http.on_push = cuts_before
    assert_waits_until_it_passes(site, FailureCode.NETWORK, "check the network", http.heal)


@pytest.mark.parametrize("cut", [cuts_after, cuts_the_answer], ids=["no answer", "half an answer"])
def test_a_push_whose_answer_is_lost_is_published_at_once(
    site: Site, http: HttpRemote, cut: Callable[[Exchange], None]
) -> None:
    http.on_push = cut
    save(site, "a", "b")
    assert_published(site, site.run_once(), "a", "b")
    assert_once(site, "a", "b")


def lose(http: HttpRemote, answer: Callable[[Exchange], None] = Exchange.hang_up) -> None:
    """The push is applied, its answer is lost, and then nobody answers any more."""

    def behave(exchange: Exchange) -> None:
        exchange.run()
        answer(exchange)
        http.behaviour = says(503)

    http.on_push = behave


def delay(site: Site, http: HttpRemote) -> Late:
    """A push that fails here, and lands there when told."""
    late = http.on_push = Late()
    save(site, "a")
    assert_put_off(site, site.run_once(), FailureCode.NETWORK)
    return late


def assert_in_flight(site: Site, result: Result) -> None:
    """Nothing is decided about the job until the remote has said what became of its push."""
    assert result.returncode == 1
    assert "jobs in flight wait for the remote" in result.of("warning")[0]["error"]
    assert result.of("failed") == result.of("dead-lettered") == []
    (job,) = site.command("list", "--json").json()
    assert (job["slug"], job["state"]) == ("a", "claimed")


def test_a_push_that_turns_out_later_to_have_landed_is_settled_with_its_own_commit(
    site: Site, http: HttpRemote
) -> None:
    lose(http)
    save(site, "a")
    assert_in_flight(site, site.run_once(**LAST))
    assert_in_flight(site, site.run_once(**LAST))
    commit = site.remote_log()[0][0]
    http.heal()
    after = site.run_once()
    assert [e["commit"] for e in after.of("published")] == [commit], after.stdout
    assert_once(site, "a")


@pytest.mark.parametrize("answer", [Exchange.hang_up, says(403)], ids=["no answer", "a proxy's answer"])
def test_one_save_is_one_commit_though_its_file_changes_while_the_remote_is_lost(
    site: Site, http: HttpRemote, answer: Callable[[Exchange], None]
) -> None:
    lose(http, answer)
    save(site, "a")
    assert_in_flight(site, site.run_once())
    site.write_post("content/posts/a.md", "a, edited\n")
    http.heal()
    assert len(site.run_once().of("published")) == 1
    assert site.subjects() == ["Publish a", "Start the site"]
    assert site.remote_file("content/posts/a.md") == "a\n"
    assert site.jobs() == []


def test_an_edit_after_a_lost_answer_is_an_edit_of_what_landed(site: Site, http: HttpRemote) -> None:
    lose(http)
    save(site, "a")
    assert_in_flight(site, site.run_once())
    http.heal()
    site.save_post("a", "a, edited\n", message="Edit a")
    assert site.run_once().of("published")
    assert site.subjects() == ["Edit a", "Publish a", "Start the site"]
    assert site.remote_file("content/posts/a.md") == "a, edited\n"
    assert site.jobs() == []


def test_a_lost_push_that_lands_late_is_not_done_twice_though_its_file_changes(
    site: Site, http: HttpRemote
) -> None:
    late = delay(site, http)
    http.heal()
    late.land()
    commit = site.remote_log()[0][0]
    site.write_post("content/posts/a.md", "a, edited\n")
    site.command("retry", "a")
    assert [event["commit"] for event in site.run_once().of("published")] == [commit]
    assert site.subjects() == ["Publish a", "Start the site"]
    assert site.git("diff", "--name-only") == "content/posts/a.md"
    assert site.jobs() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_push_that_lands_late_is_not_done_twice(site: Site, http: HttpRemote, when: str) -> None:
    late = delay(site, http)
    assert len(site.remote_log()) == 1
    http.heal()
    if when == "before":
        late.land()
    site.command("retry", "a")
    result = site.run_once()
    assert result.of("published"), result.stdout
    if when == "after":
        late.land()
    assert_once(site, "a")


def test_an_edit_of_a_push_that_landed_late_is_no_conflict_though_its_own_push_fails_first(
    site: Site, http: HttpRemote
) -> None:
    late = delay(site, http)
    late.land()
    site.save_post("a", "a, edited\n", message="Edit a")
    http.on_push = cuts_before
    assert_put_off(site, site.run_once(), FailureCode.NETWORK)
    http.heal()
    site.command("retry", "a")
    result = site.run_once()
    assert result.of("published"), result.stdout
    assert site.subjects() == ["Edit a", "Publish a", "Start the site"]


def test_a_worker_that_is_killed_while_its_push_is_under_way_does_not_do_it_twice(
    site: Site, http: HttpRemote
) -> None:
    late = Late()
    holding: list[Exchange] = []

    def hold(exchange: Exchange) -> None:
        late.taken.append(exchange)
        holding.append(exchange)
        worker.kill()
        exchange.hang_up()

    http.on_push = hold
    save(site, "a")
    with site.running() as worker:
        worker.wait(30)
    assert holding
    late.land()
    http.heal()
    commit = site.remote_log()[0][0]
    result = site.run_once()
    assert [e["commit"] for e in result.of("published")] == [commit], result.stdout + result.stderr
    assert_once(site, "a")


def test_what_a_host_says_is_shown_without_secrets_and_escapes_and_decides_nothing(
    site: Site, http: HttpRemote
) -> None:
    http.behaviour = says(403, HOSTILE)
    reason = assert_waits_until_it_passes(site, FailureCode.AUTH, "deploy key or token", http.heal)
    assert "red" in reason


def test_a_host_that_never_stops_talking_does_not_hide_what_is_wrong(site: Site, http: HttpRemote) -> None:
    http.behaviour = says(500, f"https://user:{CANARY}@h/x \x1b[2J\n" * 30_000)
    reason = assert_waits_until_it_passes(site, FailureCode.NETWORK, "the host's status", http.heal)
    assert "error: 500" in reason


def test_a_post_too_large_for_the_host_is_refused_alone(site: Site, http: HttpRemote) -> None:
    def bounded(exchange: Exchange) -> None:
        (says(413, "Too large.") if len(exchange.body) > 20_000 else serve)(exchange)

    http.on_push = bounded
    noise = random.Random(1)
    save(site, "a", "c", "d")
    site.save_post("b", "".join(noise.choices("abcdefghijklmnop", k=60_000)))
    result = site.run_once()
    assert "413" in assert_refused(site, result, FailureCode.REJECTED, slug="b")
    assert_published(site, result, "a", "c", "d")


# Credentials and prompts


def test_wrong_credentials_are_told_and_not_shown(site: Site, http: HttpRemote) -> None:
    http.behaviour = asks_for("worker", "right")
    site.git("remote", "set-url", "origin", http.url(site.remote, f"worker:{CANARY}@"))

    def mend() -> None:
        site.git("remote", "set-url", "origin", http.url(site.remote, "worker:right@"))

    reason = assert_waits_until_it_passes(site, FailureCode.AUTH, "deploy key or token", mend)
    assert "Authentication failed" in reason


def test_nobody_is_ever_asked_for_a_password(site: Site, http: HttpRemote) -> None:
    http.behaviour = asks_for("worker", "right")
    mark = site.root / "asked"
    ask = str(program(site.root / "askpass", f'echo "$@" >> {mark}; echo right'))
    tty = f"(exec < /dev/tty && echo tty >> {mark}) 2>/dev/null; cat > /dev/null"
    site.git("config", "core.askPass", ask)
    site.git("config", "credential.helper", str(program(site.root / "helper", tty)))
    save(site, "a")
    result = site.run_once(
        GIT_ASKPASS=ask,
        SSH_ASKPASS=ask,
        SSH_ASKPASS_REQUIRE="force",
        DISPLAY=":0",
        GIT_TERMINAL_PROMPT="1",
        **LAST,
    )
    assert_dead_letter(site, result, FailureCode.AUTH)
    assert "deploy key or token" in site.job("a")["fix"]
    assert not mark.exists(), mark.read_text()


def test_a_credential_helper_that_hangs_is_ended_with_all_that_it_started(
    site: Site, http: HttpRemote
) -> None:
    http.behaviour = asks_for("worker", "right")
    site.git(
        "config", "credential.helper", str(program(site.root / "helper", "trap '' TERM; sleep 60 & wait"))
    )

    def mend() -> None:
        http.heal()
        site.git("config", "--unset", "credential.helper")

    assert_waits_until_it_passes(site, FailureCode.TIMEOUT, "check the network", mend, **SOON)
