"""What a verb would do to a job, for the confirmation and for `--dry-run`."""

from drumline.cli.rendering.text import count, dollars, harmless
from drumline.cli.rendering.views import ENDED, Job, progress_count


def standing(job: Job) -> str:
    """`000004 llama-1b is RUNNING at step 18,400; its last checkpoint is step 18,000`."""
    text = f"{_named(job)} is {job['status']}"
    at = progress_count(_only_step(job))
    if at:
        text += f" at step {at}"
    saved = progress_count({"step": (job.get("progress") or {}).get("checkpoint")})
    if saved:
        text += f"; its last checkpoint is step {saved}"
    elif at and job["status"] not in ENDED and not (job.get("spec") or {}).get("checkpoint"):
        text += "; it has no checkpoint"
    return text


def loss(verb: str, job: Job) -> str:
    """`this ends it and releases 64 chips in us-central2-b.`"""
    does = [] if job["status"] in ENDED else ["ends it"]
    if job.get("chips_held"):
        does.append(f"releases {_held(job)}")
    if verb == "clean":
        does.append("removes its logs and its record")
    return f"this {_joined(does)}." if does else "it has ended and holds nothing."


def would(verb: str, job: Job) -> str:
    """The dry run of a verb, in one line."""
    name, held, ended = _named(job), job.get("chips_held"), job["status"] in ENDED
    at = progress_count(_only_step(job))
    state = f"{name} ({job['status']}{f' at step {at}' if at else ''})"
    if verb == "resume":
        if not ended:
            return f"would change nothing: {name} is {job['status']}"
        where = f"on the {_held(job)} it holds" if held else f"on a new {job['accelerator']}"
        return f"would start {state} again {where}"
    if verb == "cancel":
        if ended:
            return f"would change nothing: {name} is {job['status']}"
        if not held:
            return f"would end {state}; it holds no slice"
        price = (
            f", about {dollars(job['cost_per_hour'])} an hour" if job.get("cost_per_hour") else ""
        )
        return f"would end the program of {state} and keep {_held(job)}{price}"
    does = [] if ended else [f"end {state}"]
    if held:
        does.append(f"release {_held(job)}")
    if verb == "clean":
        does.append(f"remove the logs and the record of {name}")
    return f"would {_joined(does)}" if does else f"would change nothing: {state} holds nothing"


def _named(job: Job) -> str:
    return f"{job['id']} {harmless(job['name'])}"


def _only_step(job: Job) -> dict[str, object]:
    return {"step": (job.get("progress") or {}).get("step")}


def _held(job: Job) -> str:
    return f"{count(job['chips_held'], 'chip')} in {harmless(job['zone'] or 'the cloud')}"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
