"""The search in the history: receipts by words of their post, with an index in either backend.

A word of a search is found where a word of the text begins: `pub` finds "It is published". Postgres keeps the
index itself (`search_words` in its migrations). For SQLite, each process that searches keeps one in its own
memory. The first search makes it, the next ones add what is new, and a publication costs nothing. So the file
has nothing to migrate, an earlier version may write it, and no crash leaves the index out of step.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from hashlib import blake2s
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.errors import FailureCode
from briter_worker.sinks.store import SqliteStore, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from briter_worker.sinks.store import PostgresStore, Store

# The same characters are in the migration. ASCII and blocks of Unicode, whatever the database's locale is.
_PIECE = re.compile(
    "[\u3040-\u30ff\u3400-\u9fff]|[^\0-/:-@[-`{-\xbf\u2000-\u206f\u3000-\u30ff\u3400-\u9fff]+"
)
_MAX_PIECE = 100
_MAX_TEXT = 4000
_AT_ONCE = 1000
"""Receipts that are read at once, while other threads wait for the file."""
_PATIENCE_S = 1.0
"""A search waits so long for its index."""
_MIN_RETIRED = 10_000
_TEXT = (
    "a.slug || ' ' || a.title || ' ' || a.author || ' ' || COALESCE(a.error, '')"
    " || ' ' || COALESCE(a.\"commit\", '')"
)
_WORDS = f"search_words(a.site, {_TEXT}, COALESCE(a.failure, ''))"
"""As the index in Postgres has it."""


class IndexingError(StoreError):
    """The index is being made, and the search has to wait."""

    def __init__(self, done: int, total: int) -> None:
        percent = min(99, 100 * done // max(1, total))
        super().__init__(
            f"the history is being prepared for the search: {percent} %", "search again in a moment"
        )


class Wanted(NamedTuple):
    """The receipts that a search is for: those that ended, with all of `words`."""

    words: Sequence[str]
    slug: str | None = None
    outcomes: Sequence[str] = ()
    before: int | None = None
    limit: int = 50


def words_of(text: str) -> list[str]:
    """Return the different words of a search that have a letter or a digit."""
    return [word for word in dict.fromkeys(text.split()) if _PIECE.search(word)]


def _pieces(text: str) -> list[str]:
    """Return what the index has of a text: what is between spaces and punctuation."""
    return [piece[:_MAX_PIECE] for piece in _PIECE.findall(text)]


def _causes(word: str) -> list[FailureCode]:
    """Return the failures whose meaning, which pages show, has the word."""
    return [code for code in FailureCode if word.lower() in code.text.lower()]


class PostgresSearch:
    """Finds receipts by the index of the database."""

    def __init__(self, store: PostgresStore, site: str) -> None:
        self._store = store
        self._site = site

    def ids(self, wanted: Wanted) -> list[int]:
        """Return the ids of the receipts, the newest first. Raises StoreError."""
        condition = f"a.site = ? AND a.outcome IS NOT NULL AND {_WORDS} @@ lower(?)::tsquery"
        values: list[Any] = [self._site, " & ".join(map(self._term, wanted.words))]
        for word in wanted.words:
            if len(_pieces(word)) > 1:  # the index has them one by one
                text = re.sub(r"([\\%_])", r"\\\1", word)
                condition += f" AND lower({_TEXT}) LIKE lower(?)"
                values.append(f"%{text}%")
        if wanted.slug is not None:
            condition += " AND a.slug = ?"
            values.append(wanted.slug)
        if wanted.outcomes:
            condition += f" AND a.outcome IN ({', '.join('?' * len(wanted.outcomes))})"
            values += wanted.outcomes
        if wanted.before is not None:
            condition += " AND a.id < ?"
            values.append(wanted.before)
        # Materialized: else the newest receipts would be read one by one until enough of them fit.
        query = (
            f"WITH found AS MATERIALIZED (SELECT a.id FROM attempts a WHERE {condition})"  # noqa: S608 - our own
            " SELECT id FROM found ORDER BY id DESC LIMIT ?"
        )
        return [number for (number,) in self._store.query(query, [*values, wanted.limit])]

    def _term(self, word: str) -> str:
        pieces = " & ".join(f"'{self._site}/{piece}':*" for piece in _pieces(word))
        causes = [f"'{self._site}/!{code.value}'" for code in _causes(word)]
        return f"({' | '.join([f'({pieces})', *causes])})"


class SqliteSearch:
    """Finds receipts by an index in memory: about 110 bytes for each receipt. Safe in several threads."""

    def __init__(self, store: SqliteStore, site: str) -> None:
        self._store = store
        self._site = site
        self._guard = threading.Lock()
        self._follower: threading.Thread | None = None
        self._failure: Exception | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._index: sqlite3.Connection | None = None
        self._is_made = False
        self._first = self._seen = 0
        self._seen_job = ""
        self._open: set[int] = set()
        """Attempts that had not ended when they were read."""
        self._total = 0

    def ids(self, wanted: Wanted) -> list[int]:
        """Return the ids of the receipts, the newest first. Raises StoreError, as IndexingError at first."""
        self._follow()
        terms = [self._term(word) for word in wanted.words]
        if wanted.slug is not None:
            terms.append(f"facts : {_slug_fact(wanted.slug)}")
        if wanted.outcomes:
            terms.append(f"facts : ({' OR '.join(_fact('o', each) for each in wanted.outcomes)})")
        query = "SELECT rowid FROM receipts WHERE receipts MATCH ? AND rowid < ? ORDER BY rowid DESC LIMIT ?"
        before = 2**63 - 1 if wanted.before is None else wanted.before
        with self._guard:
            if self._index is None:
                return []
            values = (" AND ".join(terms), before, wanted.limit)
            return [number for (number,) in self._index.execute(query, values)]

    def _term(self, word: str) -> str:
        causes = [_fact("f", code.value) for code in _causes(word)]
        phrase = f'words : "{" ".join(_pieces(word))}" *'
        return f"({phrase} OR facts : ({' OR '.join(causes)}))" if causes else f"({phrase})"

    def _follow(self) -> None:
        """Wait for the index to be up to date, but not for long. Raises StoreError."""
        with self._guard:
            follower = self._follower
            if follower is None or not follower.is_alive():
                # It ends with the process, and goes on while nobody waits.
                follower = self._follower = threading.Thread(target=self._try_to_catch_up, daemon=True)
                follower.start()
        follower.join(_PATIENCE_S)
        if follower.is_alive() and not self._is_made:
            raise IndexingError(self._seen - self._first, self._total)
        if self._failure is not None:
            raise self._failure

    def _try_to_catch_up(self) -> None:
        try:
            self._catch_up()
            self._failure, self._is_made = None, True
        except Exception as error:  # noqa: BLE001 - raised to whoever searches
            self._failure = error
            self._begin_anew()

    def _catch_up(self) -> None:
        """Bring the index up to the file: what is new, and what has ended since. Raises StoreError."""
        # One by one, each is read at an end of the table; together, by a scan.
        oldest, newest = (self._id(end) for end in ("min", "max"))
        if self._index is not None and self._is_outdated(oldest):
            self._begin_anew()
        if oldest is None or newest is None:
            return
        if self._index is None:
            self._index = open_index()
            self._first = self._seen = oldest - 1
        self._total = newest - self._first
        while rows := self._read("id > ? ORDER BY id LIMIT ?", self._seen, _AT_ONCE):
            self._add(rows)
            self._open |= {row["id"] for row in rows if row["outcome"] is None}
            self._seen, self._seen_job = rows[-1]["id"], rows[-1]["job_id"]
        waiting = sorted(self._open)
        for start in range(0, len(waiting), _AT_ONCE):
            some = waiting[start : start + _AT_ONCE]
            rows = self._read(f"id IN ({', '.join('?' * len(some))})", *some)
            self._add(rows)
            self._open -= set(some) - {row["id"] for row in rows if row["outcome"] is None}

    def _id(self, end: str) -> int | None:
        rows = self._store.query(f"SELECT {end}(id) FROM attempts")  # noqa: S608 - our own
        return rows[0][0] if rows else None

    def _is_outdated(self, oldest: int | None) -> bool:
        """Return True if the file is another one, or if most of what the index has was deleted as too old."""
        last = self._store.query("SELECT job_id FROM attempts WHERE id = ?", [self._seen])
        if oldest is None or not last or last[0][0] != self._seen_job:
            return True
        retired = oldest - self._first
        return retired > _MIN_RETIRED and retired > (self._seen - self._first) // 2

    def _read(self, which: str, *values: object) -> list[dict[str, Any]]:
        query = (
            f"SELECT id, job_id, outcome, slug, failure, {_TEXT} FROM attempts a WHERE site = ? AND {which}"  # noqa: S608 - our own
        )
        names = ("id", "job_id", "outcome", "slug", "failure", "text")
        return [dict(zip(names, row, strict=True)) for row in self._store.query(query, [self._site, *values])]

    def _add(self, rows: Iterable[dict[str, Any]]) -> None:
        entries = [
            (row["id"], " ".join(_pieces(row["text"][:_MAX_TEXT])), _facts(row))
            for row in rows
            if row["outcome"] is not None
        ]
        with self._guard:
            index = self._index
            if index is not None and entries:
                index.execute("BEGIN")
                with index:
                    index.executemany("INSERT INTO receipts (rowid, words, facts) VALUES (?, ?, ?)", entries)


def _facts(row: dict[str, Any]) -> str:
    facts = [_fact("o", row["outcome"]), _slug_fact(row["slug"])]
    return " ".join([*facts, _fact("f", row["failure"])] if row["failure"] else facts)


def _fact(kind: str, value: str) -> str:
    """Return one word that stands for the value."""
    return kind + re.sub("[^a-z0-9]", "", value)


def _slug_fact(slug: str) -> str:
    return "s" + blake2s(slug.encode("utf-8", "replace"), digest_size=12).hexdigest()


def open_index() -> sqlite3.Connection:
    """Return an empty index. Raises StoreError where SQLite has none."""
    index = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        # The prefix: a search for single letters is no slower than one for words.
        index.execute(
            "CREATE VIRTUAL TABLE receipts USING fts5(words, facts, content='', columnsize=0, prefix='1',"
            " tokenize='unicode61 remove_diacritics 0')"
        )
    except sqlite3.OperationalError as error:
        index.close()
        fix = "use a Python whose SQLite has FTS5, as the one of every Linux distribution"
        raise StoreError(f"the history cannot be searched: {error}", fix) from None
    return index


def search_of(store: Store, site: str) -> PostgresSearch | SqliteSearch:
    """Return the search in the history of one site."""
    return SqliteSearch(store, site) if isinstance(store, SqliteStore) else PostgresSearch(store, site)
