"""The entry point of the command line: `drumline`, or `python -m drumline`."""

import gc


def run() -> None:
    """Run the command line and exit with its code.

    A command runs for a tenth of a second and leaves its memory to the operating system. Garbage
    collection of the imported modules, most of all at exit, would take a sixth of this time.
    """
    gc.disable()
    from drumline.cli import main

    gc.freeze()
    gc.enable()  # for long commands: follow, logs, list --watch
    try:
        main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    run()
