"""A declared folder is published as it is, whatever else the job declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sites import Site


def test_a_refused_folder_above_does_not_keep_deletions_below_it_from_being_published(site: Site) -> None:
    gone = site.write_post("public/uploads/old.txt", "old\n")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=An upload")
    site.git("push", "--quiet")
    gone.unlink()
    site.write_post("public/uploads/new.txt", "new\n")
    site.save("uploads", ["public", "public/uploads"])

    result = site.run_once(BRITER_ADAPTER="git-target")

    assert result.of("published")[0]["rejectedPaths"] == ["public"]
    assert site.remote_file("public/uploads/new.txt") == "new\n"
    assert site.remote_file("public/uploads/old.txt") is None
