"""`/emulator/…`: controls that a real cloud does not have: preempt, break, capacity, faults.

Each call returns JSON. An error is `{"error": "one sentence"}` with status 400.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from drumline.chips import UnknownName
from drumline.cloud.emulator.breaking import BreakRequest, break_host, broken_machines
from drumline.cloud.emulator.config import Faults, first_error, known_zones, pool_name
from drumline.cloud.emulator.service import Service
from drumline.cloud.model.errors import Json
from drumline.errors import UserError

PREFIX = "/emulator/"
_Control = Callable[[Service, object], Awaitable[Json]]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Preempt(_Arguments):
    target: str
    notice: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    """Seconds until the preemption. If positive, the programs get SIGTERM now."""


class _Capacity(_Arguments):
    zone: str
    accelerator: str
    chips: Annotated[int, Field(ge=0, le=999_999_999)] | None = None
    """The number of chips; None removes the limit."""


class _Break(_Arguments):
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
    service.carry_out_orders()
    return service.resources()


async def _preempt(service: Service, body: object) -> Json:
    arguments = _Preempt.model_validate(body)
    return {"preempted": await service.preempt(arguments.target, arguments.notice)}


async def _capacity(service: Service, body: object) -> Json:
    arguments = _Capacity.model_validate(body)
    if arguments.zone not in known_zones():
        raise UserError(
            f"{arguments.zone!r} is not a zone with TPUs, such as local-a or us-central2-b"
        )
    pools = service.fleet.limits.capacity.setdefault(arguments.zone, {})
    name = pool_name(arguments.accelerator)
    if arguments.chips is None:
        pools.pop(name, None)
    else:
        pools[name] = arguments.chips
    service.carry_out_orders()
    return {"zone": arguments.zone, "accelerator": name, "chips": arguments.chips}


async def _faults(service: Service, body: object) -> Json:
    """Change the given faults and keep the others. `clear` ends all of them first."""
    arguments = dict(body) if isinstance(body, dict) else {}
    current = {} if arguments.pop("clear", False) else service.faults.model_dump()
    service.faults = Faults.model_validate(current | arguments)
    for zone in service.faults.deny:
        if zone not in known_zones():
            service.faults = Faults.model_validate(current)
            raise UserError(f"{zone!r} is not a zone with TPUs")
    return service.faults.model_dump()


async def _break(service: Service, body: object) -> Json:
    arguments = _Break.model_validate(body)
    return await break_host(service, BreakRequest(**arguments.model_dump()))


def routes(service: Service, stop: Callable[[], None]) -> list[Route]:
    """Return the routes of all controls. `stop` ends the process after its response."""

    async def _stop(_: Service, __: object) -> Json:
        stop()
        return {"stopping": True}

    def route(path: str, method: str, control: _Control) -> Route:
        return Route(f"{PREFIX}{path}", _handler(service, control), methods=[method])

    return [
        route("status", "GET", _status),
        route("resources", "GET", _resources),
        route("preempt", "POST", _preempt),
        route("capacity", "POST", _capacity),
        route("faults", "POST", _faults),
        route("break", "POST", _break),
        route("stop", "POST", _stop),
    ]


def _handler(
    service: Service, control: _Control
) -> Callable[[HttpRequest], Awaitable[JSONResponse]]:
    async def handle(http: HttpRequest) -> JSONResponse:
        try:
            body = await http.json() if await http.body() else {}
        except ValueError:
            return JSONResponse({"error": "the body is not JSON"}, 400)
        try:
            return JSONResponse(await control(service, body))
        except ValidationError as error:
            return JSONResponse({"error": first_error(error)}, 400)
        except (UserError, UnknownName) as error:
            return JSONResponse({"error": str(error)}, 400)

    return handle
