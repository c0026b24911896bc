"""A person takes a publication back: by `undo`, by the button, and after a look at the differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dashboards import serving

from briter_worker.actions import undo_post
from briter_worker.cluster.submit import enqueue
from briter_worker.errors import DeclinedError
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.undo import differences
from briter_worker.git.work_tree import WorkTree
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from cluster_farm import Farm
    from sites import Site


A, PICTURE, OLD = "content/posts/a.md", "content/posts/a/picture.png", "content/posts/old.md"


def publish(site: Site, slug: str = "a", paths: Sequence[str] = (A,)) -> str:
    """Save and publish; return the remote's tip."""
    site.save(slug, paths)
    done = site.run_once()
    assert done.of("published"), done
    return site.remote_log()[0][0]


def undo(site: Site, *args: str) -> None:
    done = site.command("undo", *args)
    assert done.returncode == 0, done.stderr
    assert site.run_once().of("published")


@pytest.fixture
def two(site: Site) -> tuple[str, str]:
    """A post that was published twice: changed, with a new picture, and without its former part."""
    site.write_post(A, "one\n")
    site.write_post(OLD, "old\n").chmod(0o755)
    first = publish(site, paths=[A, OLD])
    site.write_post(A, "two\n")
    site.write_post(PICTURE, "picture")
    (site.worktree / OLD).unlink()
    return first, publish(site, paths=[A, OLD, "content/posts/a"])


def contents(site: Site) -> list[str | None]:
    """The files, the same on the remote and in the work tree."""
    paths = (A, PICTURE, OLD)
    here = [file.read_text() if (file := site.worktree / path).exists() else None for path in paths]
    assert here == [site.remote_file(path) for path in paths]
    return here


def test_an_undo_in_a_dry_run_restores_the_files_and_is_published_by_the_first_live_run(
    site: Site, two: tuple[str, str]
) -> None:
    done = site.command("undo", "a", BRITER_WORKER_DRY_RUN="true")
    assert "a dry run publishes nothing" in done.stderr
    site.run_once(BRITER_WORKER_DRY_RUN="true")
    assert (site.worktree / A).read_text() == "one\n"
    assert site.remote_log()[0][0] == two[1]
    assert site.command("list").stdout.startswith("tried")
    assert site.run_once().of("published")
    assert contents(site) == ["one\n", None, "old\n"]
    assert "dry run" not in site.command("undo", "a").stderr


def test_an_undo_restores_what_was_changed_deleted_and_new_and_can_be_undone(
    site: Site, two: tuple[str, str]
) -> None:
    (site.worktree / A).chmod(0o640)
    undo(site, "a")
    assert contents(site) == ["one\n", None, "old\n"]
    assert not (site.worktree / PICTURE).parent.exists()
    assert site.remote_log()[0][1] == "Restore a"
    assert (site.worktree / A).stat().st_mode & 0o777 == 0o640
    assert site.git("diff", "--raw", two[0], "main", "--", "content") == ""
    assert site.git("status", "--porcelain") == ""

    undo(site, "a", "-m", "As it was")
    assert contents(site) == ["two\n", "picture", None]
    assert site.remote_log()[0][1] == "As it was"
    assert len(site.remote_log()) == 5


def test_an_undo_goes_back_to_any_version(site: Site, two: tuple[str, str]) -> None:
    site.write_post(A, "three\n")
    publish(site)
    undo(site, "a", "--to", two[0][:10])
    assert contents(site) == ["one\n", None, "old\n"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("edit", "path"), [("rewrite", PICTURE), ("remove", A), ("link", PICTURE), ("rewrite", OLD)]
)
def test_an_undo_leaves_what_the_cms_has_changed_since(site: Site, edit: str, path: str) -> None:
    file, outside = site.worktree / path, site.root / "outside"
    outside.write_text("picture")
    file.unlink(missing_ok=True)
    if edit == "rewrite":
        file.write_text("edited")
    elif edit == "link":
        file.symlink_to(outside)
    before = site.git("status", "--porcelain")
    done = site.command("undo", "a")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{path} changed since" in done.stderr
    assert "Fix: " in done.stderr
    assert site.git("status", "--porcelain") == before
    assert (outside.read_text(), site.jobs()) == ("picture", [])


def test_an_undo_of_an_edit_of_the_remote_needs_to_be_asked_for(site: Site, two: tuple[str, str]) -> None:
    site.push_elsewhere({A: "a colleague's\n"})
    assert site.command("pull").returncode == 0
    done = site.command("undo", "a")
    assert (done.returncode, site.jobs()) == (1, [])
    assert "undo --to COMMIT" in done.stderr
    undo(site, "a", "--to", two[1])
    assert contents(site) == ["two\n", "picture", None]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["never"], 1, "no publication"),
        (["a", "--to", "HEAD~9"], 2, "no commit of main"),
        (["a", "--to", "--all"], 2, "no commit of main"),
        (["a", "--to", "other"], 2, "no commit of main"),
        (["a", "--to", "main"], 1, "already"),
        (["a", "-m", "\udcff"], 2, "half of a surrogate pair"),
    ],
)
def test_an_undo_that_makes_no_sense_changes_nothing(
    site: Site, arguments: list[str], status: int, words: str
) -> None:
    site.git("branch", "other", site.git("commit-tree", "-m", "x", "main^{tree}"))
    done = site.command("undo", *arguments)
    assert done.returncode == status, done
    assert words in done.stderr
    assert "Fix: " in done.stderr
    assert (contents(site), site.jobs()) == (["two\n", "picture", None], [])


@pytest.mark.usefixtures("two")
def test_an_undo_that_meets_a_save_half_way_puts_everything_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = WorkTree.put

    def meet_a_save(self: WorkTree, temporary: str, path: str, expected: os.stat_result | None) -> bool:
        if path == OLD:  # the last one
            site.write_post(OLD, "saved\n")
        return put(self, temporary, path, expected)

    monkeypatch.setattr(WorkTree, "put", meet_a_save)
    with pytest.raises(DeclinedError, match=r"old\.md changed since"):
        undo_post(load_settings(site.environment()), "a", "Ada", lambda _: None)
    assert site.jobs() == []
    assert site.git("status", "--porcelain") == f"?? {OLD}"
    assert (site.worktree / OLD).read_text() == "saved\n"


def test_the_differences_of_the_last_publication_are_shown(site: Site, two: tuple[str, str]) -> None:
    del two
    site.write_post(A, "two\n\x1b[31mred\n")
    commit = publish(site)
    said = site.command("show", "a", "--diff").stdout
    assert "-one" not in said
    assert "+red" in said
    assert "\x1b" not in said
    assert site.command("show", "a", "--diff", "--json").json()["commit"] == commit
    assert site.command("show", "never", "--diff").returncode == 1


def test_each_file_has_its_own_difference_where_a_link_became_a_file(site: Site) -> None:
    """Git prints two patches for such a file: the link's deletion, and the new file."""
    folder = site.worktree / "content/posts"
    (folder / "b.md").symlink_to("welcome.md")
    site.commit_all("A link")
    (folder / "b.md").unlink()
    for name in "abc":
        site.write_post(f"content/posts/{name}.md", f"text of {name}\n")
    commit = publish(site, paths=[f"content/posts/{name}.md" for name in "abc"])
    repository = Repository(Git(site.worktree, remote="origin", timeout=60), branch="main", remote="origin")
    found = {each.path: each for each in differences(repository, commit)}
    words = {path: [word for word in each.words if word[1].strip()] for path, each in found.items()}
    assert words == {
        "content/posts/a.md": [("+", "text of a")],
        "content/posts/b.md": [("-", "welcome.md"), ("+", "text of b")],
        "content/posts/c.md": [("+", "text of c")],
    }
    assert found["content/posts/b.md"].sizes == (len("welcome.md"), len("text of b\n"))


@pytest.mark.usefixtures("two")
def test_the_dashboard_undoes(site: Site) -> None:
    with serving(site) as dashboard:
        assert "Restore the version before" in dashboard.page.get("/post?slug=a").text
        assert dashboard.act("undo", id="a").status_code == 303
        assert site.job("a")["message"] == "Restore a"
        site.run_once()
        assert contents(site) == ["one\n", None, "old\n"]
        assert dashboard.api.post("/api/jobs/a/undo").status_code == 200
        actions = site.command("history", "--actions", "--slug", "a", "--json").json()
        assert [(each["action"], each["by"]) for each in actions] == [
            ("undo", "token"),
            ("undo", "dashboard"),
        ]
        second = site.remote_log()[1][0]
        for wanted, status in (
            ({"to": second, "message": "Back"}, 200),
            ({"to": "nowhere"}, 409),
            ({"to": "a\0b"}, 409),
            ({"then": 1}, 422),
        ):
            assert dashboard.api.post("/api/jobs/a/undo", json=wanted).status_code == status, wanted
        assert dashboard.act("undo", id="a", to=second, message="Back again").status_code == 303
        assert {job["message"] for job in site.jobs()} == {"Restore a", "Back", "Back again"}
        refused = dashboard.api.post("/api/jobs/never/undo")
        assert (refused.status_code, bool(refused.json()["fix"])) == (409, True)


# --- in a cluster


@pytest.fixture
def farm(farm: Farm) -> Farm:
    """A site whose post was published twice: changed, with a new picture, and without its former part."""
    farm.add("blog")
    for files in ({A: b"one\n", OLD: b"old\n"}, {A: b"two\n", PICTURE: b"picture", OLD: None}):
        enqueue("a", files=files, site="blog", settings=farm.settings())
        farm.once()
    return farm


def on_remote(farm: Farm) -> list[str | None]:
    return [farm.site("blog").remote_file(path) for path in (A, PICTURE, OLD)]


def in_cluster(farm: Farm, *args: str) -> Any:  # noqa: ANN401 - any JSON
    return farm.command(*args, "--site", "blog", "--json", host="office").json()


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_a_node_publishes_the_version_before_and_any_other(farm: Farm, *, filters: bool) -> None:
    site = farm.site("blog")
    site.git("config", "uploadpack.allowFilter", str(filters).lower(), cwd=site.remote)
    site.push_elsewhere({"content/posts/b.md": "a colleague's\n"})
    first = site.remote_log()[2][0]
    in_cluster(farm, "undo", "a")
    farm.once("two")
    assert on_remote(farm) == ["one\n", None, "old\n"]
    assert site.remote_log()[0][1] == "Restore a"
    assert site.remote_file("content/posts/b.md") == "a colleague's\n"
    in_cluster(farm, "undo", "a", "-m", "As it was")
    farm.once()
    assert (on_remote(farm), site.remote_log()[0][1]) == (["two\n", "picture", None], "As it was")
    in_cluster(farm, "undo", "a", "--to", first[:10])
    farm.once("three")
    assert on_remote(farm) == ["one\n", None, "old\n"]
    assert [each["outcome"] for each in in_cluster(farm, "history")] == ["published"] * 5
    assert [each["action"] for each in in_cluster(farm, "history", "--actions")] == ["undo"] * 3


def test_a_waiting_save_and_what_makes_no_sense_refuse_an_undo_in_a_cluster(farm: Farm) -> None:
    for args, status, words in ((["never"], 1, "no publication"), (["a", "--to", "HEAD~9"], 2, "no commit")):
        done = farm.command("undo", *args, "--site", "blog")
        assert (done.returncode, words in done.stderr, "Fix: " in done.stderr) == (status, True, True)
    in_cluster(farm, "undo", "a", "--to", "0123456789")
    farm.fail_once()
    (job,) = in_cluster(farm, "list")
    assert (job["state"], job["attempts"], "no commit of main" in job["lastError"]) == ("failed", 1, True)
    done = farm.command("undo", "a", "--site", "blog")
    assert (done.returncode, "cancel a" in done.stderr) == (1, True)
    assert [each["cancelled"] for each in in_cluster(farm, "cancel", "a")] == [True]
    assert (on_remote(farm), farm.rows()) == (["two\n", "picture", None], 0)


@pytest.mark.parametrize("path", ["content/a  b.md", "content/token=abc.md"])
def test_an_undo_that_would_miss_a_file_refuses_in_a_cluster(farm: Farm, path: str) -> None:
    for text in (b"three\n", b"four\n"):
        enqueue("a", files={A: text, path: text}, site="blog", settings=farm.settings())
        farm.once()
    done = farm.command("undo", "a", "--site", "blog")
    assert (done.returncode, "does not have every file" in done.stderr) == (1, True)
    assert farm.rows() == 0


def test_the_differences_are_shown_in_a_cluster_and_the_dashboard_undoes(farm: Farm) -> None:
    shown = in_cluster(farm, "show", "a", "--diff")
    assert ("-one" in shown["diff"], "+two" in shown["diff"]) == (True, True)
    office = farm.site("blog")
    office.env.update(farm.environment("office"))
    with serving(office) as dashboard:
        page = dashboard.page.get("/sites/blog/post", params={"slug": "a", "commit": shown["commit"]}).text
        assert "<del>one</del>" in page
        picture = {"commit": shown["commit"], "file": PICTURE}
        assert dashboard.page.get("/sites/blog/picture", params=picture).content == b"picture"
        form = {"csrf": dashboard.csrf("/sites/blog/site"), "back": "/", "id": "a"}
        assert dashboard.page.post("/sites/blog/actions/undo", data=form).status_code == 303
    farm.once()
    assert on_remote(farm) == ["one\n", None, "old\n"]
