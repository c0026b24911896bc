"""The ground that the other tests stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sites import Site


def test_no_configuration_of_the_machine_reaches_git(site: Site) -> None:
    shown = site.git("config", "--list", "--show-origin")
    origins = {line.partition("\t")[0] for line in shown.splitlines()}
    assert origins <= {"file:.git/config", "command line:"}


def test_a_new_site_is_in_step_with_its_remote(site: Site) -> None:
    assert [subject for _, subject in site.remote_log()] == ["Start the site"]
    assert site.remote_file("content/posts/welcome.md") == "# Welcome\n"
    assert site.remote_file("content/posts/absent.md") is None
    assert site.git("status", "--porcelain", "--branch") == "## main...origin/main"


def test_a_saved_job_is_complete_under_its_final_name(site: Site) -> None:
    file = site.save("welcome", ["content/posts/welcome.md"], message="Hello")
    assert [entry.name for entry in site.queue.iterdir()] == [file.name]
    assert site.job("welcome")["message"] == "Hello"
