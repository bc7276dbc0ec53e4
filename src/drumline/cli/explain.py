"""`drumline explain`: what an answer of the cloud or the log of a program means.

The command classifies with the functions of the server: `cloud.google.errors` and
`jobs.core.refusals` for answers, `jobs.core.causes` for logs.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson

if TYPE_CHECKING:
    from drumline.observed import Fault

# Enough for any log whose beginning matters, and little enough for the memory of a laptop.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class _Explanation:
    """What an answer or a log means, and what follows."""

    means: str
    action: str
    sentence: str
    """What happened."""
    words: str
    """The words of the cloud or of the program."""
    reaction: str
    """What Drumline does, as an infinitive."""
    advice: str
    """What the user can do, as an infinitive."""


def explain(
    api: Annotated[
        bool, typer.Option("--api", help="Explain an answer of Google Cloud, from stdin.")
    ] = False,
    http: Annotated[
        int | None, typer.Option("--http", metavar="N", help="The HTTP code of the answer.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="S", help="Its gRPC status, such as PERMISSION_DENIED."),
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", metavar="FILE", help="Explain a log; - is stdin.")
    ] = None,
    exit_code: Annotated[
        int | None,
        typer.Option("--exit-code", metavar="N", help="The exit code of the program [default: 1]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain an answer of the cloud, or a log."""
    from drumline.cli.rendering.text import sanitize
    from drumline.errors import UserError

    if api == (log is not None):
        raise UserError(
            "say what to explain: `drumline explain --api < answer.txt` or "
            "`drumline explain --log FILE`"
        )
    if api and exit_code is not None:
        raise UserError("--exit-code belongs to --log; an answer of the cloud has --http N")
    if not api and (http is not None or status is not None):
        raise UserError("--http and --status belong to --api; a log has --exit-code N")
    explanation = _explain_answer(http, status) if log is None else _explain_log(log, exit_code)
    if as_json:
        from drumline.cli.connect import echo_json

        says = f"{explanation.sentence}. You can {explanation.advice}. {explanation.words}".strip()
        echo_json({"means": explanation.means, "action": explanation.action, "says": says})
        return
    typer.echo(sanitize(f"means: {explanation.means} ({explanation.sentence})"))
    if explanation.words:
        typer.echo(sanitize(explanation.words))
    typer.echo(f"Drumline would: {explanation.action} ({explanation.reaction})")
    typer.echo(sanitize(f"you can: {explanation.advice}"))


# --- Answers of the cloud ---------------------------------------------------------------------

_ANSWER_MEANS = {
    "stockout": "stockout",
    "quota": "quota",
    "rate": "rate limit",
    "denied": "denied",
    "login": "denied",
    "preempted": "preempted",
    "conflict": "transient",
    "invalid": "invalid",
    "not found": "transient",
    "transient": "transient",
    "unknown": "transient",
}
"""The word for each `FaultType`."""
_ANSWER_ACTIONS = {
    "next candidate": "next zone",
    "retry": "later",
    "preemption": "another slice",
    "give up": "stop",
}
"""The word for each `RefusalAction`."""
_REACTIONS = {
    "next zone": "request the next zone or accelerator of the job file, and this one again after a "
    "pause",
    "later": "repeat the request after a pause that grows to two minutes",
    "another slice": "count a preemption, not a failure, and request another slice",
    "stop": "end the job, because only a change of the job file or of the project can help",
    "count a failure": "count a failure, and start the program again if `retry` allows it",
}


def _explain_answer(http: int | None, status: str | None) -> _Explanation:
    from drumline.cloud.google import errors
    from drumline.cloud.google.responses import OK, parse_answer
    from drumline.errors import UserError
    from drumline.jobs.core.refusals import (
        REFUSALS_PER_CANDIDATE,
        action_for,
        leaves_candidate,
    )
    from drumline.observed import FaultType

    if http is not None and not 300 <= http < 600:
        raise UserError(f"--http {http}: the HTTP code of an error is between 300 and 599")
    status = status and status.strip().upper()
    if status is not None and status not in errors.Rpc.__members__:
        raise UserError(
            f"--status {status}: unknown; use one of {', '.join(errors.Rpc.__members__)}"
        )
    text = _read_stdin(needed=http is None and status is None)
    code, text = parse_answer(text, http, status)
    zone = errors.zone_in(text) or "this zone"
    meaning = errors.explain(code, text, zone)
    if code == OK and meaning.fault.kind is FaultType.UNKNOWN:
        raise UserError("the answer reports no error, so there is nothing to explain")
    action = _ANSWER_ACTIONS[action_for(meaning.fault)]
    reaction = _REACTIONS[action]
    if action == "later" and leaves_candidate(meaning.fault, REFUSALS_PER_CANDIDATE):
        reaction += f", and request the next zone after {REFUSALS_PER_CANDIDATE} refusals in a row"
    return _Explanation(
        means=_means(meaning.fault, code, text),
        action=action,
        sentence=meaning.sentence,
        words=meaning.words and f"The cloud's own words: {meaning.words}",
        reaction=reaction,
        advice=meaning.advice,
    )


def _means(fault: "Fault", code: int | None, text: str) -> str:
    from drumline.cloud.google.errors import Rpc
    from drumline.observed import FaultType

    if fault.kind is FaultType.UNKNOWN and code == Rpc.RESOURCE_EXHAUSTED:
        return "quota" if "quota" in text.lower() else "stockout"
    return _ANSWER_MEANS[fault.kind]


# --- Logs -------------------------------------------------------------------------------------

_LOG_MEANINGS = {
    "bad host": ("bad host", "another slice"),
    "ambiguous start": ("ambiguous start", "another slice"),
    "transient": ("transient", "later"),
    "preempted": ("preempted", "another slice"),
    "stopped": ("preempted", "later"),
    "restart": ("program", "later"),
    "another host": ("program", "count a failure"),
    "program": ("program", "count a failure"),
}
"""The words for each `Meaning` of the last output."""
_LOG_REACTIONS = {
    "bad host": "release the slice, remember the host, and run the program on another slice",
    "ambiguous start": "try one or two other slices without blaming a host; the same error on two "
    "machines counts as a failure of the program",
    "transient": "repeat the set-up step for some minutes without counting a failure",
    "preempted": "request another slice once the cloud confirms the preemption, without counting "
    "a failure",
    "stopped": "start the program again without counting a failure, on another slice if the cloud "
    "takes this one",
    "restart": "start the program again without counting a failure",
    "another host": "look for the host that failed first or that still hangs; if there is none, "
    + _REACTIONS["count a failure"],
    "program": _REACTIONS["count a failure"],
}
_LOG_ADVICE = {
    "bad host": "do nothing: the job continues on another slice",
    "ambiguous start": "check the versions of JAX and libtpu, and that no second process of the "
    "program uses the chips, if other slices fail in the same way",
    "transient": "do nothing: the step is repeated",
    "preempted": "do nothing: the job continues from its newest checkpoint",
    "stopped": "do nothing: the job continues from its newest checkpoint",
    "restart": "do nothing: the job continues from its newest checkpoint",
    "another host": "read the logs of the other hosts: `drumline logs ID --host all`",
    "program": "correct the program, then run `drumline resume`",
}


def _explain_log(path: str, exit_code: int | None) -> _Explanation:
    from drumline.errors import UserError
    from drumline.hosts.agent.first_error import first_error
    from drumline.hosts.agent.log import last_lines_of
    from drumline.jobs.core.causes import find_fault_report, judge_output

    if exit_code == 0:
        raise UserError("--exit-code 0: the program succeeded, so there is no failure to explain")
    data = _read_log(path)
    tail = last_lines_of(data)
    error = first_error(data, "/")
    output = "\n".join((error, *tail))
    fault_report = find_fault_report(output)
    judgement = judge_output(1 if exit_code is None else exit_code, output)
    meaning = "bad host" if fault_report else judgement.meaning.value
    means, action = _LOG_MEANINGS[meaning]
    return _Explanation(
        means=means,
        action=action,
        sentence=fault_report.sentence if fault_report else judgement.reason,
        words=f"The log's own words: {error or (tail[-1] if tail else '(an empty line)')}",
        reaction=_LOG_REACTIONS[meaning],
        advice=_LOG_ADVICE[meaning],
    )


# --- Input ------------------------------------------------------------------------------------


def _read_stdin(needed: bool) -> str:
    """Return the text of stdin. A code alone is enough, because some answers have no body."""
    from drumline.errors import UserError

    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(_MAX_BYTES)
    text = data.decode(errors="replace").strip()
    if needed and not text:
        raise UserError("there is no answer on stdin: drumline explain --api < answer.txt")
    return text


def _read_log(path: str) -> bytes:
    from drumline.errors import UserError

    if path == "-":
        no_input = sys.stdin is None or sys.stdin.isatty()
        data = b"" if no_input else sys.stdin.buffer.read(_MAX_BYTES)
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(_MAX_BYTES)
        except OSError as error:
            raise UserError(f"--log {path}: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"--log {path}: the log is empty, so there is nothing to explain")
    return data
