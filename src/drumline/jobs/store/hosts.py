"""The hosts that jobs have met, as rows of the job database."""

import logging
import sqlite3

from pydantic import TypeAdapter, ValidationError

from drumline.jobs.core.memory import KnownHost

log = logging.getLogger(__name__)

_KNOWN = TypeAdapter(KnownHost)


class HostRows:
    """One row for each host."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """The table is in this database."""
        self._db = db

    def all(self) -> dict[str, KnownHost]:
        """Every host by its identity; a row that cannot be read is left where it is."""
        found = {}
        for row in self._db.execute("SELECT identity, record FROM hosts ORDER BY identity"):
            try:
                found[row["identity"]] = _KNOWN.validate_json(row["record"])
            except ValidationError as wrong:
                log.warning("the row of host %s cannot be read: %s", row["identity"], wrong)
        return found

    def save(self, known: KnownHost) -> None:
        """Save a host, whether it is new or not."""
        self._db.execute(
            "INSERT INTO hosts VALUES (?, ?, ?) ON CONFLICT (identity)"
            " DO UPDATE SET last = excluded.last, record = excluded.record",
            (known.name.identity, known.last_seen, _KNOWN.dump_json(known).decode()),
        )

    def remove(self, identity: str) -> None:
        """Forget a host."""
        self._db.execute("DELETE FROM hosts WHERE identity = ?", (identity,))
