"""The server's end of what it says with the agent: the program going out, the answers checked.

What the messages are is written in `agent/wire.py`, for both sides. A host runs the user's code, so
nothing that comes from it is believed unchecked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from drumline.hosts.agent.wire import HostProgram, Message, Prepare
from drumline.hosts.values import Address, Program

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True)
class HostRank:
    """What one host is to the program: its number on the slice, and among those that run."""

    index: int
    address: Address
    rank: int | None
    """None: it is prepared but runs nothing."""
    ranks: int


def checked(kind: type[Answer], value: Mapping[str, object]) -> Answer:
    """An answer whose every field is of its type; raises ValidationError where one is not.

    Fields that this version does not know are left out.
    """
    # mypy takes a class whose messages have no hash for one that has none itself.
    found = _model(kind).model_validate(value)  # type: ignore[arg-type]
    return kind(**{name: getattr(found, name) for name in found.model_fields_set})


@cache
def _model(kind: type[Message]) -> type[BaseModel]:
    """The check that the fields of a message describe."""
    # The agent spares itself the import of these; its annotations are text until they are asked.
    hints = get_type_hints(kind, localns={"ClassVar": ClassVar, "Literal": Literal})
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        if get_origin(hint) is not ClassVar:
            least, most = kind.BOUNDS.get(name, (None, None))
            fields[name] = (_typed(hint), Field(getattr(kind, name, ...), ge=least, le=most))
    config = ConfigDict(arbitrary_types_allowed=True)
    model: type[BaseModel] = create_model(kind.__name__, __config__=config, **fields)
    return model


def _typed(hint: Any) -> Any:
    """The type to check; a message within a message has a check of its own."""
    for part in get_args(hint):
        if isinstance(part, type) and issubclass(part, Message):
            return Annotated[hint, BeforeValidator(partial(_checked_within, part))]
    return hint


def _checked_within(kind: type[Message], value: Any) -> Any:
    return checked(kind, value) if isinstance(value, Mapping) else value


def attempt_folder(program: Program) -> str:
    """Where the attempt is kept on the host, below ~/.drumline."""
    return f"jobs/{_safe(program.job_id)}/{program.attempt}"


def work_folder(program: Program) -> str:
    """Where the code is unpacked on the host, below ~/.drumline."""
    return working_copy(program.job_id, program.archive_sha)


def working_copy(job_id: str, sha: str | None) -> str:
    """Where the code of an archive is unpacked for a job, below ~/.drumline."""
    return f"work/{_safe(job_id)}/{(sha or 'empty')[:12]}"


def _safe(name: str) -> str:
    """A name as one part of a path, whatever is in it."""
    return quote(name, safe="").replace(".", "%2E")


def program_message(program: Program, place: HostRank) -> Prepare:
    """The program as the agent takes it; secrets apart, for a file of their own."""
    container = f"drumline-{_safe(program.job_id)}-{program.attempt}".replace("%", "_")
    variables = {
        "DRUMLINE_JOB_ID": program.job_id,
        "DRUMLINE_ATTEMPT": str(program.attempt),
        "DRUMLINE_OWNER": program.owner,
        "DRUMLINE_FENCE": str(program.fence),
        "DRUMLINE_HOST": str(place.rank or 0),
        "DRUMLINE_HOSTS": str(place.ranks),
        "DRUMLINE_ACCELERATOR": program.accelerator,
        "DRUMLINE_CONTAINER": container,
    }
    described = HostProgram(
        run=program.run,
        environment=dict(program.environment),
        variables=variables,
        checkpoint=program.checkpoint,
        work=work_folder(program),
        wrap=list(program.wrap),
    )
    return Prepare(
        program=vars(described),
        secrets=dict(program.secrets),
        archive=program.archive_sha if program.archive is not None else None,
    )
