"""`python -m drumline.train CONFIG.py`: train the recipe of a config file.

    python -m drumline.train examples/digits.py --set steps=100 --checkpoint /tmp/digits

Exit codes: 0 if the run is done, 75 if it was stopped by SIGTERM and is saved, 1 if it failed, and
2 for an error in the command line or the recipe.
"""

# mypy: allow-untyped-calls

import argparse
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from drumline.errors import CheckpointError, UserError
from drumline.health.fault_report import HardwareFault
from drumline.train import missing_packages_message


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see python -m drumline.train --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _ArgumentParser(prog="python -m drumline.train", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.py", help="a file that defines recipe(*, …)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting"
    )
    parser.add_argument(
        "--checkpoint",
        default=os.environ.get("DRUMLINE_CHECKPOINT") or None,
        metavar="FOLDER",
        help="folder for checkpoints, or gs://… (default: $DRUMLINE_CHECKPOINT)",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="resume from a checkpoint of another recipe or other data",
    )
    parser.add_argument(
        "--help", "-h", action="store_true", help="show this, or the settings of a config"
    )
    return parser


def main(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        if options.help and options.config is None:
            print(make_parser().format_help())
            return 0
        if options.config is None:
            raise UserError("CONFIG.py is missing; see python -m drumline.train --help")
        if message := missing_packages_message():
            raise UserError(message)
        return _run_config(options)
    except ValueError as error:
        if not _is_user_error(error):
            raise
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, HardwareFault) as error:
        # Every host prints the fault, so that the log of any host names the chip.
        print(error, file=sys.stderr, flush=True)
        return 1


def _run_config(options: argparse.Namespace) -> int:
    from drumline.train.config import load_config
    from drumline.train.multihost import catch_sigterm

    if options.help:
        print(load_config(options.config).help())
        return 0
    with catch_sigterm():
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    import jax

    import drumline.distributed
    from drumline.train.checksums import fingerprint
    from drumline.train.config import load_config
    from drumline.train.loop import Ending, fit
    from drumline.train.reporting import format_metrics

    # JAX's own SIGTERM handler would replace `catch_sigterm`.
    with suppress(AttributeError):
        jax.config.update("jax_enable_preemption_service", False)
    drumline.distributed.initialize()
    recipe = load_config(options.config).make_recipe(options.set)
    result = fit(recipe, checkpoint=options.checkpoint, allow_changes=options.allow_changes)
    if result.ending is not Ending.DONE:
        return result.ending.exit_code
    parameters = fingerprint(result.state.params)
    if jax.process_index() == 0:
        print(f"done: step {result.step:,}  {'  '.join(format_metrics(result.metrics))}")
        print(f"parameters {parameters}", flush=True)
    return result.ending.exit_code


def _is_user_error(error: ValueError) -> bool:
    """Return True if the message is for the user, as are all ValueErrors of models and parallel."""
    if isinstance(error, UserError):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(__file__).parents[1]
    return any(raised_in.is_relative_to(package / name) for name in ("models", "parallel"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
