"""The dashboard and its API: what `serve` starts. It reads what the worker leaves, and needs none to run.

`serving` opens the door, `security` stands in it, `app` puts the rooms together: `pages` for people, `api`
for programs, `live` for whoever stays. None of them looks at the queue's folder: `snapshot` does, for all.
"""
