"""The record of a copy of outputs that ends after its job."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drumline.hosts.protocol import CopiedOutputs, HostCopy
from drumline.jobs.config import read
from drumline.jobs.controller.outputs import JobOutputs
from drumline.jobs.folders import Folders


@pytest.mark.parametrize("copied", [True, False])
def test_files_that_were_copied_before_the_limit_are_known_after_the_end_of_the_job(
    tmp_path: Path, copied: bool
) -> None:
    folders, records = (
        Folders(tmp_path),
        {"000001": SimpleNamespace(spec=SimpleNamespace(outputs=["x"]))},
    )
    outputs = JobOutputs(
        cast(Any, records), cast(Any, None), cast(Any, None), folders, read(tmp_path),
        clock=lambda: 1.0, wall=lambda: 2.0,
    )  # fmt: skip

    class Session:
        async def copy_outputs(self, *_: object) -> CopiedOutputs:
            if copied:
                (folders.outputs("000001") / "host-0").mkdir(parents=True)
                (folders.outputs("000001") / "host-0" / "x").write_text("12345")
            del records["000001"]  # the job has waited long enough
            copies = {0: HostCopy(1, 5, "not all files were copied in time")}
            return CopiedOutputs(copies, files=int(copied), bytes=5 * copied)

    asyncio.run(outputs._copy("000001", 1, cast(Any, Session())))
    record = outputs.record("000001")
    if copied:
        assert record is not None
        assert (record.files, record.bytes) == (1, 5)
        assert record.hosts[0].error == "not all files were copied in time"
    else:
        assert record is None
