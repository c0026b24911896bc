"""A producer for a CMS that writes no jobs: each save of a post's files becomes a job.

Guarantee. The last saved version of every file below the allowed folders is enqueued, once, whatever happens
in between: a crash, a restart, a lost event of the kernel, edits made while nothing watched. A version counts
as saved when the program that wrote it has closed the file and the file holds still; a file counts as deleted
when it has been gone for a second. One file that cannot be read never delays another.

`ledger` has, per path, the version that was handed over last: enqueued, left to a job that declares the path,
written by the worker itself, or brought from the remote by a user's `git pull` that the watcher saw. A job is
written first, and the ledger second, so that a crash in between costs one job without changes, never a save.
An undo does the same, because its job publishes the files. The worker records the remote's versions before it
writes them, because no job follows.

Nothing but the ledger decides that a file needs no job: no ref, no time stamp of a job, and no job in the
queue. Equal stat data prove that a file is the ledger's version, as in git's index. A new ledger, or one that
nobody kept for a while, does not know what was left to a job: the history names the files of cancelled jobs.

`kernel` and `tree` say where to look and what is there, `saves` decides which posts to enqueue, and `watcher`
does so in a loop.
"""

LEDGER_NAME = "watch.db"
"""Name of the ledger's file in the git folder's `briter/`."""
