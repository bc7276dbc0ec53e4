"""The process of a command: `drumline`, or `python -m drumline`."""

import gc


def run() -> None:
    """Run the command line and exit with its code.

    A command lives for a tenth of a second and leaves its memory to the system. Looking through
    all that was imported for garbage, most of all as Python ends, would be a sixth of that.
    """
    gc.disable()
    from drumline.cli import main

    gc.freeze()
    gc.enable()  # for those that stay: follow, logs, list --watch
    try:
        main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    run()
