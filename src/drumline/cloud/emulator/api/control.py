"""`/emulator/…`: controls that a real cloud does not have: preempt, break, capacity, faults.

Each call answers JSON; a mistake is `{"error": "one sentence"}` with status 400.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from drumline.chips import UnknownName
from drumline.cloud.emulator.breaking import Breakage, break_host, broken_machines
from drumline.cloud.emulator.config import Faults, first_problem, known_zones, pool_name
from drumline.cloud.emulator.service import ControlMistake, Service
from drumline.cloud.model.errors import Json

PREFIX = "/emulator/"
_Answer = Callable[[Service, object], Awaitable[Json]]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Preempt(_Asked):
    target: str
    notice: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    """Seconds until the preemption; if positive, the programs there get SIGTERM now."""


class _Capacity(_Asked):
    zone: str
    accelerator: str
    chips: Annotated[int, Field(ge=0, le=999_999_999)] | None = None
    """The number of chips; None removes the limit."""


class _Break(_Asked):
    target: str
    host: int | None = None
    how: str
    from_step: int | None = None
    chip: int | None = None


async def _status(service: Service, _: object) -> Json:
    calls = service.calls
    return {
        "pid": os.getpid(),
        "home": str(service.settings.home),
        "started": service.started,
        "requests": len(service.fleet.requests),
        "nodes": len(service.fleet.nodes),
        "hosts": sum(len(node.hosts) for node in service.fleet.nodes.values()),
        "capacity": service.fleet.limits.capacity,
        "faults": service.faults.model_dump(),
        "machines": broken_machines(service),
        "calls": dict(calls.by_method),
        "calls_by_zone": {zone: dict(counts) for zone, counts in calls.by_zone.items() if zone},
        "total": calls.by_method.total(),
    }


async def _resources(service: Service, _: object) -> Json:
    service.settle()
    return service.resources()


async def _preempt(service: Service, body: object) -> Json:
    given = _Preempt.model_validate(body)
    return {"preempted": await service.preempt(given.target, given.notice)}


async def _capacity(service: Service, body: object) -> Json:
    given = _Capacity.model_validate(body)
    if given.zone not in known_zones():
        raise ControlMistake(
            f"{given.zone!r} is no zone with TPUs; local-a is one, us-central2-b another"
        )
    pools = service.fleet.limits.capacity.setdefault(given.zone, {})
    name = pool_name(given.accelerator)
    if given.chips is None:
        pools.pop(name, None)
    else:
        pools[name] = given.chips
    service.settle()
    return {"zone": given.zone, "accelerator": name, "chips": given.chips}


async def _faults(service: Service, body: object) -> Json:
    """Change the named faults and keep the others; `clear` ends all of them first."""
    given = dict(body) if isinstance(body, dict) else {}
    before = {} if given.pop("clear", False) else service.faults.model_dump()
    service.faults = Faults.model_validate(before | given)
    for zone in service.faults.deny:
        if zone not in known_zones():
            service.faults = Faults.model_validate(before)
            raise ControlMistake(f"{zone!r} is no zone with TPUs")
    return service.faults.model_dump()


async def _break(service: Service, body: object) -> Json:
    given = _Break.model_validate(body)
    return await break_host(service, Breakage(**given.model_dump()))


def routes(service: Service, stop: Callable[[], None]) -> list[Route]:
    """All controls; `stop` ends the process once the answer is sent."""

    async def _stop(_: Service, __: object) -> Json:
        stop()
        return {"stopping": True}

    def route(path: str, method: str, answer: _Answer) -> Route:
        return Route(f"{PREFIX}{path}", _handler(service, answer), methods=[method])

    return [
        route("status", "GET", _status),
        route("resources", "GET", _resources),
        route("preempt", "POST", _preempt),
        route("capacity", "POST", _capacity),
        route("faults", "POST", _faults),
        route("break", "POST", _break),
        route("stop", "POST", _stop),
    ]


def _handler(service: Service, answer: _Answer) -> Callable[[HttpRequest], Awaitable[JSONResponse]]:
    async def handle(http: HttpRequest) -> JSONResponse:
        try:
            body = await http.json() if await http.body() else {}
        except ValueError:
            return JSONResponse({"error": "the body is not JSON"}, 400)
        try:
            return JSONResponse(await answer(service, body))
        except ValidationError as wrong:
            return JSONResponse({"error": first_problem(wrong)}, 400)
        except (ControlMistake, UnknownName) as wrong:
            return JSONResponse({"error": str(wrong)}, 400)

    return handle
