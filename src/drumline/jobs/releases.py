"""Slices that are to go: each is deleted again and again until a look shows that it has gone.

A forgotten slice costs money, so what bears our label and belongs to no job is taken in here too.
"""

import logging
from collections.abc import Collection, Iterator

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.folders import Folders
from drumline.jobs.looks import Looks, ZoneLook
from drumline.jobs.signs import may_be_running
from drumline.jobs.store import SliceRow, Store

log = logging.getLogger(__name__)

LABEL_OWNER = "drumline-owner"
LABEL_JOB = "drumline-job"


class Releases:
    """What is to go from the cloud."""

    def __init__(self, store: Store, cloud: Cloud, looks: Looks, folders: Folders) -> None:
        """Take up what earlier servers left to be released."""
        self._store = store
        self._cloud = cloud
        self._looks = looks
        self._folders = folders
        self._again_at: dict[str, float] = {}
        self.rows: list[SliceRow] = store.releasing()
        """As of the beginning of this round."""

    def begin_round(self) -> None:
        """Read once what is to go."""
        self.rows = self._store.releasing()

    def may_still_run(self, job_id: str) -> bool:
        """Whether an old slice of this job may still be running its program."""
        for row in self.rows:
            if row.job != job_id or row.ready is None:
                continue
            look = self._looks.newest(row.zone)
            if look is None or may_be_running(look.nodes.get(row.name)):
                return True
        return False

    def due(self, now: float, asking: Collection[str]) -> Iterator[SliceRow]:
        """Those to delete now; what has gone is crossed off, unless it is just being asked for."""
        for row in self.rows:
            look = self._looks.newest(row.zone)
            assert row.released is not None
            if look and look.at > row.released and row.name not in asking and _absent(look, row):
                self._store.gone(row.name, now)
                self._folders.forget_known_hosts(row.name)
                self._looks.forget(row.name)
                self._again_at.pop(row.name, None)
            elif now >= self._again_at.get(row.name, 0.0):
                self._again_at[row.name] = now + self._looks.interval
                yield row

    async def release(self, row: SliceRow) -> None:
        """Delete a slice; one that is gone already is no error."""
        try:
            await self._cloud.release(row.zone, row.name)
            look = self._looks.newest(row.zone)
            if look and row.name in look.nodes and row.name not in look.requests:
                await self._cloud.remove_node(row.zone, row.name)
        except CloudError as trouble:
            log.info("release %s: %s", row.name, trouble)
        self._looks.soon(row.zone)

    def take_in_strays(self, look: ZoneLook, held: Collection[str]) -> None:
        """What bears our label and belongs to no job is released."""
        owner = self._store.owner
        known = {*held, *(row.name for row in self._store.releasing())}
        for name, one in look.everything().items():
            ours = one.labels.get(LABEL_OWNER) == owner
            if ours and name not in known and one.state != "DELETING":
                log.warning("stray slice %s in %s is released", name, look.zone)
                job = one.labels.get(LABEL_JOB, "")
                stray = SliceRow(
                    name, job, look.zone, one.accelerator, look.at, None, look.at, None
                )
                self._store.adopt_stray(stray)


def _absent(look: ZoneLook, row: SliceRow) -> bool:
    return row.name not in look.requests and row.name not in look.nodes
