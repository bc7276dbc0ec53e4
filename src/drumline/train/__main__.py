"""`python -m drumline.train CONFIG.py`: train what a config file describes.

    python -m drumline.train examples/digits.py --set steps=100 --checkpoint /tmp/digits

Exit codes: 0 when done; 75 when told to stop, with everything saved; 1 when the run failed; 2 when
something on the command line or in the recipe is wrong.
"""

# mypy: allow-untyped-calls

import argparse
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from drumline.health.fault_report import HardwareFault
from drumline.train.mistakes import Mistake, Unwritable, missing


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise Mistake(f"{message}; see python -m drumline.train --help")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    words = _Words(prog="python -m drumline.train", add_help=False, allow_abbrev=False)
    words.add_argument("config", nargs="?", metavar="CONFIG.py", help="defines recipe(*, …)")
    words.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting")
    words.add_argument(
        "--checkpoint",
        default=os.environ.get("DRUMLINE_CHECKPOINT"),
        metavar="FOLDER",
        help="where checkpoints are kept, a folder or gs://…; by default $DRUMLINE_CHECKPOINT",
    )
    words.add_argument(
        "--allow-changes",
        action="store_true",
        help="go on from a checkpoint that another recipe or other data led to",
    )
    words.add_argument("--help", "-h", action="store_true", help="this; of a config, its settings")
    return words


def main(words: list[str]) -> int:
    """Do what the words say, and return the exit code."""
    try:
        asked = parser().parse_args(words)
        if asked.help and asked.config is None:
            print(parser().format_help())
            return 0
        if asked.config is None:
            raise Mistake("CONFIG.py is missing; see python -m drumline.train --help")
        if lacking := missing():
            raise Mistake(lacking)
        return _with_config(asked)
    except ValueError as error:
        if not _is_a_sentence(error):
            raise
        print(error, file=sys.stderr)
        return 2
    except (Unwritable, HardwareFault) as error:
        # Every host says it: whoever reads one host's log learns which chip it was.
        print(error, file=sys.stderr, flush=True)
        return 1


def _with_config(asked: argparse.Namespace) -> int:
    from drumline.train.config import load_config
    from drumline.train.notice import listening

    if asked.help:
        print(load_config(asked.config).help())
        return 0
    with listening():
        return _train(asked)


def _train(asked: argparse.Namespace) -> int:
    import jax

    import drumline.distributed
    from drumline.train.checkpoints.digest import fingerprint
    from drumline.train.config import load_config
    from drumline.train.loop import fit
    from drumline.train.reporting.report import described
    from drumline.train.result import Ending

    # JAX's own handler of SIGTERM would take ours' place and only remember that it came.
    with suppress(AttributeError):
        jax.config.update("jax_enable_preemption_service", False)
    drumline.distributed.initialize()
    recipe = load_config(asked.config).make(asked.set)
    result = fit(recipe, checkpoint=asked.checkpoint, allow_changes=asked.allow_changes)
    if result.ending is not Ending.DONE:
        return result.ending.exit_code
    same = fingerprint(result.state.params)
    if jax.process_index() == 0:
        print(f"done: step {result.step:,}  {'  '.join(described(result.metrics))}")
        print(f"parameters {same}", flush=True)
    return result.ending.exit_code


def _is_a_sentence(error: ValueError) -> bool:
    """Whether its text is meant for the user: a mistake, or what a model or a ring refuses."""
    if isinstance(error, Mistake):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    home = Path(__file__).parents[1]
    return any(raised_in.is_relative_to(home / room) for room in ("models", "parallel"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
